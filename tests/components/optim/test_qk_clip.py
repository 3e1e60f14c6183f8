"""`QKClip` against scores computed in float64: the largest of each head, and after the clip."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.processes import run_processes
from tests.training import ABSENT, llama_config, run, tiny_config, train
from torchtitan.components.checkpoint.dcp import DcpSource
from torchtitan.components.checkpoint.state import ModelState
from torchtitan.components.optim.freeze import Freeze
from torchtitan.components.optim.qk_clip import QKClip
from torchtitan.components.peft import LoRA
from torchtitan.distributed import initialize_weights
from torchtitan.models.common.attention import (
    Attention,
    GroupedQueryAttention,
    HeadSizes,
    TemperedAttention,
    with_kernel,
)
from torchtitan.models.deepseek_v3 import FLAVORS
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.tools.errors import UserError
from torchtitan.trainer import Callback, Trainer


def scores_in_float64(
    q_BLHD: Tensor, k_BLKD: Tensor, positions_BL: Tensor, scale: float, window: int | None
) -> Tensor:
    """The largest score of each head, from one product after another."""
    n_heads, n_keys = q_BLHD.shape[2], k_BLKD.shape[2]
    peaks = [-float("inf")] * n_heads
    for row, positions in enumerate(positions_BL.tolist()):
        for query, position in enumerate(positions):
            n_seen = position + 1 if window is None else min(position + 1, window)
            for head in range(n_heads):
                key_head = head * n_keys // n_heads
                seen = k_BLKD[row, query - n_seen + 1 : query + 1, key_head].double()
                products = seen @ q_BLHD[row, query, head, : seen.shape[1]].double() * scale
                peaks[head] = max(peaks[head], float(products.detach().max()))
    return torch.tensor(peaks, dtype=torch.float64)


POSITIONS = torch.cat((torch.arange(9), torch.arange(4), torch.arange(11))).repeat(2, 1)


def metadata(window: int | None = None) -> AttentionMetadata:
    attention = AttentionMetadata.from_positions(POSITIONS)
    if window is not None:
        attention = attention.with_window(window)
    return with_kernel(
        attention,
        device=torch.device("cpu"),
        dtype=torch.float32,
        head_dim=8,
        static=False,
    )


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("block", [5, 512])
def test_largest_scores_equal_float64(window, block, monkeypatch):
    """In blocks of queries, within documents and windows, over two micro-batches."""
    monkeypatch.setattr("torchtitan.models.common.attention_scores.BLOCK", block)
    generator = torch.Generator().manual_seed(0)
    attend, expected = Attention(scale=0.3), None
    attend.records_peaks = True
    for _ in range(2):
        q, k, v = (
            torch.randn(2, 24, heads, 8, generator=generator).requires_grad_()
            for heads in (4, 2, 2)
        )
        attend(q, k, v, metadata(window))
        with torch.no_grad():  # as in validation: not recorded
            attend(100 * q, k, v, metadata(window))
        peaks = scores_in_float64(q, k, POSITIONS, 0.3, window)
        expected = peaks if expected is None else torch.maximum(expected, peaks)
    torch.testing.assert_close(attend.peaks_H.double(), expected, rtol=1e-6, atol=1e-6)
    # Keys of other documents, or after a query, have larger scores.
    everything = 0.3 * torch.einsum("blhd,bshd->bhls", q, k.repeat_interleave(2, 2)).amax((0, 2, 3))
    assert (everything > attend.peaks_H + 1e-3).any()


DORA = LoRA.Config(rank=2, dora=True)


def attention_of(kind: str) -> GroupedQueryAttention:
    options = {
        "heads of their own": {},
        "shared keys": {},
        "gated": {"gated": True},
        "biases": {"biases": "qkv"},
        "values of keys": {"keys_as_values": True},
        "sinks": {},
        "tempered": {},
        "adapted": {},
    }[kind]
    attend = {
        "sinks": Attention(has_sinks=True),
        "tempered": TemperedAttention(floor_scale=4, attn_scale=0.5),
    }.get(kind, Attention())
    n_keys = 2 if kind in ("shared keys", "sinks") else 4
    sizes = HeadSizes(dim=16, n_heads=4, n_kv_heads=n_keys, head_dim=8)
    attention = GroupedQueryAttention(sizes, attend, init_std=1.0, out_init_std=1.0, **options)
    if kind == "adapted":
        for name in ("wq", "wk", "wv", "wo"):
            adapted = DORA.build().convert_layer(name, attention.get_submodule(name))
            attention.set_submodule(name, adapted)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return attention


FACTORS = torch.tensor([1.0, 0.25, 0.7, 1.0])


def peaks_and_values(attention: nn.Module, x: Tensor, rope=None) -> tuple[Tensor, Tensor]:
    """Return the largest scores, and the values that attention gets."""
    seen: list[Tensor] = []
    hook = attention.scores.register_forward_pre_hook(lambda _, args: seen.append(args[2].detach()))
    attention.scores.records_peaks, attention.scores.peaks_H = True, None
    attention(x, rope, metadata())
    hook.remove()
    return attention.scores.peaks_H.clone(), seen[0]


def scale_rows(attention: nn.Module, factor_H: Tensor) -> None:
    with torch.no_grad():
        for parameter, factor_E in attention.rows_of_scores(factor_H):
            parameter.mul_(factor_E.view(-1, *[1] * (parameter.ndim - 1)))


@pytest.mark.parametrize(
    "kind",
    [
        "heads of their own",
        "shared keys",
        "gated",
        "biases",
        "values of keys",
        "sinks",
        "tempered",
        "adapted",
    ],
)
def test_weights_scale_scores_of_a_head_and_nothing_else(kind):
    attention = attention_of(kind)
    assert attention.reason_not_to_scale() == ""
    x = torch.randn(2, 24, 16, generator=torch.Generator().manual_seed(2))
    before, values = peaks_and_values(attention, x)
    scale_rows(attention, FACTORS)
    after, unchanged = peaks_and_values(attention, x)
    torch.testing.assert_close(after, before * FACTORS, rtol=1e-5, atol=1e-6)
    assert torch.equal(values, unchanged)


@pytest.mark.parametrize("q_rank", [None, 12])
def test_weights_scale_scores_of_latent_attention(q_rank):
    """Keys with positions are common to all heads, and stay."""
    config = FLAVORS["debugmodel"]
    from dataclasses import replace

    config = replace(config, vocab_size=99, q_lora_rank=q_rank)
    model = config.build()
    initialize_weights(model, 0)
    attention = model.layers["0"].attention
    with torch.no_grad():
        for parameter in attention.parameters():
            if parameter.ndim == 2:
                parameter.mul_(20)
    tokens = torch.randint(99, (2, 24), generator=torch.Generator().manual_seed(3))
    scores = attention.scores
    scores.records_peaks = True
    factors = torch.linspace(0.2, 1.0, config.n_heads)

    def peaks() -> Tensor:
        scores.peaks_H = None
        model(tokens, AttentionMetadata.from_positions(POSITIONS))
        return scores.peaks_H.clone()

    before, keys = peaks(), attention.wkv_a.weight.detach().clone()
    scale_rows(attention, factors)
    torch.testing.assert_close(peaks(), before * factors, rtol=1e-4, atol=1e-5)
    assert torch.equal(attention.wkv_a.weight, keys) and before.min() > 0.1


OPTIONS = {
    "optimizer__name": "Muon",
    "optimizer__lr": 1e-2,
    "training__mixed_precision_param": "float32",
    "training__steps": 3,
}
THRESHOLD = 0.1
"""Within the scores of the heads of a small model."""


class Recorder(Trainer):
    """Records weights before and after the clip of each step, and the largest scores."""

    def load_checkpoint(self):
        super().load_checkpoint()
        self.steps = []

    def weights(self):
        return {
            name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
            for name, value in ModelState(self.model_parts).state_dict().items()
        }

    def follow_weights(self):
        before = self.weights()
        peaks = [
            module.peaks_H.clone()
            for part in self.model_parts
            for module in part.modules()
            if isinstance(module, Attention) and module.peaks_H is not None
        ]
        super().follow_weights()
        self.steps.append((before, peaks, self.weights()))


def test_training_clips_by_the_scores_of_the_step(tmp_path):
    trainer = train(
        tmp_path,
        QKClip.Config(threshold=THRESHOLD),
        trainer_class=Recorder,
        **OPTIONS,
        training__global_batch_size=4,
        validator__enable=True,
        validator__freq=1,
        validator__steps=1,
    )
    n_clipped = 0
    assert len(trainer.steps) == 3
    config = trainer.config.model_spec.model
    for before, peaks, after in trainer.steps:
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        expected = set()
        for layer, peaks_H in enumerate(peaks):
            n_clipped += int((peaks_H > THRESHOLD).sum())
            factors = (THRESHOLD / peaks_H.double()).clamp(max=1)
            is_shared = config.n_kv_heads < config.n_heads
            for name in ("wq",) if is_shared else ("wq", "wk"):
                key = f"layers.{layer}.attention.{name}.weight"
                factor = factors if is_shared else factors.sqrt()
                rows = factor.repeat_interleave(len(before[key]) // config.n_heads)
                torch.testing.assert_close(
                    after[key].double(), before[key].double() * rows[:, None], rtol=1e-6, atol=0
                )
                expected |= {key} if (factors < 1).any() else set()
        assert changed == expected
    assert 0 < n_clipped < 3 * config.n_layers * config.n_heads


def test_training_clips_the_magnitudes_of_adapters(tmp_path):
    """Frozen weights and low-rank matrices stay."""
    options = {**OPTIONS, "training__steps": 2, "optimizer__name": "AdamW"}
    clip = QKClip.Config(threshold=0.01)
    trainer = train(tmp_path, DORA, clip, trainer_class=Recorder, **options)
    key = "layers.0.attention.wq.magnitude"
    for before, peaks, after in trainer.steps:
        factors = (0.01 / peaks[0].double()).clamp(max=1)
        ratios = (after[key].double() / before[key].double()).unflatten(0, (len(factors), -1))
        torch.testing.assert_close(ratios.amax(1), factors, rtol=1e-5, atol=0)
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert key in changed and all(name.endswith("wq.magnitude") for name in changed)


@pytest.mark.parametrize(
    "options",
    [
        {"activation_checkpoint__mode": "selective"},
        pytest.param(
            {
                "activation_checkpoint__mode": "full",
                "compile__enable": True,
                "compile__backend": "aot_eager",
            },
            marks=pytest.mark.slow,
        ),
    ],
)
def test_recomputed_and_compiled_layers_clip_as_others_do(options, tmp_path):
    clip, name = QKClip.Config(threshold=THRESHOLD), {"optimizer__name": "AdamW"}
    options = {**OPTIONS, **name, **options, "training__global_batch_size": 4}
    plain = {**OPTIONS, **name, "training__global_batch_size": 4}
    runs = [
        train(tmp_path / str(number), clip, trainer_class=Recorder, **each)
        for number, each in enumerate((plain, options))
    ]
    for (_, expected, _), (_, found, _) in zip(*(each.steps for each in runs), strict=True):
        for ours, peaks_H in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, peaks_H, rtol=1e-4, atol=1e-5)
    assert (
        max(float(peaks_H.max()) for _, peaks, _ in runs[0].steps for peaks_H in peaks) > THRESHOLD
    )


class Twice(Recorder):
    """Two updates in a step."""

    def update(self, micro_batches):
        super().update(micro_batches)
        self.optimizer.zero_grad()
        return super().update(micro_batches)


def test_each_of_several_updates_clips_by_its_own_scores(tmp_path):
    options = {**OPTIONS, "training__steps": 2}
    trainer = train(tmp_path, QKClip.Config(threshold=0.01), trainer_class=Twice, **options)
    assert len(trainer.steps) == 4
    for before, peaks, after in trainer.steps:
        factors = (0.01 / peaks[0].double()).clamp(max=1)
        key = "layers.0.attention.wq.weight"
        ratios = (after[key].double() / before[key].double()).unflatten(0, (len(factors), -1))
        is_shared = trainer.config.model_spec.model.n_kv_heads < len(factors)
        expected = factors if is_shared else factors.sqrt()
        torch.testing.assert_close(ratios.amax((1, 2)), expected, rtol=1e-5, atol=0)
        assert factors.min() < 1


class Returned(Callback):
    """Keeps the weights after a return to a checkpoint."""

    def on_return(self, step):
        state = ModelState(self.trainer.model_parts).state_dict()
        self.trainer.returned = step, {name: value.clone() for name, value in state.items()}


class NotFinite(Trainer):
    """The losses of steps 3 and 4 are NaN."""

    def forward_backward_step(self, batch, n_tokens):
        loss = super().forward_backward_step(batch, n_tokens)
        return loss * (math.nan if self.step in (2, 3) else 1)


def test_scores_of_a_skipped_step_scale_no_checkpoint(tmp_path):
    config = tiny_config(
        tmp_path,
        **{**OPTIONS, "training__steps": 5},
        training__on_nonfinite="skip",
        spikes__max_in_a_row=2,
        spikes__action="leave_out",
        checkpoint__enable=True,
        checkpoint__interval=2,
    )
    config.model_converters.append(QKClip.Config(threshold=0.01))
    config.callbacks.append(Returned.Config())
    trainer = run(config, NotFinite)
    step, weights = trainer.returned
    source = DcpSource(tmp_path / "checkpoint" / "step-2")
    assert step == 2 and weights
    assert all(torch.equal(value, source.read(name)) for name, value in weights.items())


class Overflowing(Trainer):
    """Its gradients overflow in the last step."""

    def clip_gradients(self):
        norm = super().clip_gradients()
        return norm * math.inf if self.step == 2 else norm


def test_scores_of_a_skipped_step_scale_no_export(tmp_path):
    trainer = train(
        tmp_path,
        QKClip.Config(threshold=0.01),
        trainer_class=Overflowing,
        **{**OPTIONS, "optimizer__name": "AdamW", "training__mixed_precision_param": "float16"},
        loss_scale__initial=1.0,
        ema__decay=0.9,
        ema__for_export=True,
        checkpoint__enable=True,
        checkpoint__last_save_model_only=True,
        checkpoint__export_dtype="float32",
    )
    assert trainer.spikes.n_skipped == 1
    source = DcpSource(tmp_path / "checkpoint" / "step-3")
    averages = {n: v for n, v in trainer.ema.state_dict().items() if n != "n_updates"}
    assert averages
    assert all(torch.equal(value, source.read(name)) for name, value in averages.items())


def test_a_high_threshold_changes_nothing(tmp_path):
    plain = train(tmp_path / "plain", **OPTIONS)
    clipped = train(tmp_path / "clipped", QKClip.Config(threshold=1e4), **OPTIONS)
    for one, other in zip(
        plain.model_parts[0].parameters(), clipped.model_parts[0].parameters(), strict=True
    ):
        assert torch.equal(one, other)


def finish(folder: Path) -> None:
    trainer = train(
        folder,
        QKClip.Config(threshold=THRESHOLD),
        trainer_class=Recorder,
        **{**OPTIONS, "optimizer__name": "AdamW", "training__local_batch_size": 1},
    )
    weights = trainer.weights()
    if trainer.rank == 0:
        torch.save(weights, folder / "weights.pt")


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path):
    one = train(
        tmp_path / "one",
        QKClip.Config(threshold=THRESHOLD),
        trainer_class=Recorder,
        **{**OPTIONS, "optimizer__name": "AdamW"},
    )
    (tmp_path / "two").mkdir()
    run_processes(finish, 2, tmp_path / "two")
    two = torch.load(tmp_path / "two" / "weights.pt")
    expected = one.weights()
    before, peaks, after = one.steps[-1]
    assert any((peaks_H > THRESHOLD).any() for peaks_H in peaks)
    for name, weight in expected.items():
        # Two ranks sum gradients in another order, which Adam's first steps amplify.
        torch.testing.assert_close(two[name], weight, rtol=1e-3, atol=1e-3)


LATENT = {"module": "deepseek_v3", "model__n_kv_heads": ABSENT, "model__ffn_dim": ABSENT}
DIVIDED = {
    "tp": {"parallelism__tensor_parallel_degree": 2},
    "tp, latents": {"parallelism__tensor_parallel_degree": 2, **LATENT},
    "cp": {"parallelism__context_parallel_degree": 2},
    "cp, latents": {"parallelism__context_parallel_degree": 2, **LATENT},
    "pp": {"parallelism__pipeline_parallel_degree": 2},
    "offload": {"training__local_batch_size": 1, "training__enable_cpu_offload": True},
}
"""Ranks with other heads, other queries, other layers, and weights in CPU memory."""


def first_clip(folder: Path, name: str, **options: Any) -> None:
    """Save the weights before and after the first clip: later ones differ as the updates do."""
    options = {**OPTIONS, "training__steps": 1, "training__global_batch_size": 2, **options}
    trainer = train(
        folder / name, QKClip.Config(threshold=THRESHOLD), trainer_class=Recorder, **options
    )
    ((before, _, after),) = trainer.steps
    torch.save((before, after), folder / f"{name} {trainer.rank}.pt")


def clip_in_layouts(folder: Path) -> None:
    for name, options in DIVIDED.items():
        first_clip(folder, name, **options)


@pytest.mark.slow
def test_layouts_clip_by_the_scores_of_all_ranks(tmp_path):
    """The weights of a step's forward pass are the same in all layouts, so its factors are, up to
    the rounding of float32 scores."""
    run_processes(clip_in_layouts, 2, tmp_path)
    first_clip(tmp_path, "one")
    first_clip(tmp_path, "one, latents", **LATENT)
    for name in DIVIDED:
        before, after = torch.load(
            tmp_path / ("one, latents 0.pt" if "latents" in name else "one 0.pt")
        )
        clipped = {key for key in before if not torch.equal(before[key], after[key])}
        found = set()
        for rank in range(2):
            own_before, own_after = torch.load(tmp_path / f"{name} {rank}.pt")
            for key in own_before.keys() & clipped:
                found.add(key)
                factors = own_after[key].double() / own_before[key].double()
                expected = after[key].double() / before[key].double()
                torch.testing.assert_close(factors, expected, rtol=2e-6, atol=0, msg=name)
            for key in own_before.keys() - clipped:
                assert torch.equal(own_before[key], own_after[key]), (name, key)
        assert found == clipped and len(clipped) >= 2, name


@pytest.mark.parametrize(
    ("options", "converters", "message"),
    [
        ({}, [QKClip.Config(threshold=0.0)], r"--model_converters\.qkclip\.threshold is 0\.0"),
        ({"training__dtype": "bfloat16"}, [QKClip.Config()], "changes weights by less than"),
        ({}, [LoRA.Config(rank=2), QKClip.Config()], "adapters without magnitudes"),
        (
            {"module": "qwen2"},
            [DORA, QKClip.Config()],
            r"its projections are frozen \(bias\)",
        ),
        (
            {"optimizer__name": "ScheduleFreeAdamW", "lr_scheduler__decay_ratio": 0.0},
            [QKClip.Config()],
            r"computes averages that --model_converters\.qkclip would not change",
        ),
    ],
)
def test_refusals(tmp_path, options, converters, message):
    config = tiny_config(tmp_path, **options)
    config.model_converters += converters
    with pytest.raises(UserError, match=message):
        config.check(world_size=1)


def test_a_later_converter_that_freezes_projections_is_refused(tmp_path):
    for converter in (LoRA.Config(rank=2), Freeze.Config(include=["attention"])):
        with pytest.raises(UserError, match="do not follow its weights: its projections"):
            train(tmp_path, QKClip.Config(), converter, **OPTIONS)


def test_models_without_scores_that_follow_weights_are_refused():
    normed = llama_config().build()
    normed.layers["0"].attention.q_norm = nn.Identity()
    with pytest.raises(UserError, match=r"layers\.0\.attention .*norms of queries and keys"):
        QKClip.Config().build().check_model(normed)
    with pytest.raises(UserError, match="no attention"):
        QKClip.Config().build().check_model(nn.Linear(2, 2))
