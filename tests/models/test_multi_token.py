"""Multi-token prediction of DeepSeek-V3 against its equations (arXiv:2412.19437, 21 to 25), files,
and runs."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models.family_cases import (
    random_reference,
    random_tokens,
    relative_error,
    to_external,
    to_ours,
)
from tests.models.test_attention import metadata_of
from tests.models.test_deepseek import V3
from tests.training import train
from torchtitan.components.losses.loss import CrossEntropyLoss
from torchtitan.config.manager import ConfigManager
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.dry_run import dry_run
from torchtitan.models import deepseek_v3
from torchtitan.models.deepseek_v3 import FORMAT
from torchtitan.models.deepseek_v3 import model as deepseek_model
from torchtitan.protocols.output_head import with_further_tokens
from torchtitan.protocols.tensor_source import TensorSpec
from torchtitan.tools.errors import UserError
from torchtitan.trainer.sample_losses import SampleLosses

transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-5
"""Relative: the models compute in float32, and the reference norms and routers of transformers
do."""

N_LAYERS, DOCUMENTS = 2, [[20, 3, 27], [1, 49]]
OWN = ("enorm.weight", "hnorm.weight", "shared_head.norm.weight", "eh_proj.weight")


def weights_of(reference: Any, n_modules: int) -> dict[str, Tensor]:
    """Return the weights that only modules have, as in files; their blocks are layers of
    `reference`."""
    dim, generator = reference.config.hidden_size, torch.Generator().manual_seed(1)
    weights = {}
    for layer in range(N_LAYERS, N_LAYERS + n_modules):
        for name in OWN:
            shape = (dim, 2 * dim) if name.startswith("eh") else (dim,)
            weight = torch.randn(shape, generator=generator) * (0.2 if len(shape) == 2 else 0.3) + (
                len(shape) == 1
            )
            weights[f"model.layers.{layer}.{name}"] = weight
    return weights


def make_pair(n_modules: int, **options: Any) -> tuple[Any, Any, dict[str, Tensor]]:
    """Return our model with modules, and transformers' class with a layer for each of them, and
    their other weights."""
    reference = random_reference(
        "deepseek_v3", 0, **{**V3, "num_hidden_layers": N_LAYERS + n_modules, **options}
    )
    own = weights_of(reference, n_modules)
    plain, _ = to_ours(deepseek_v3, reference)
    config = plain.config
    config.n_layers, config.n_mtp_modules, config.mtp_weight = N_LAYERS, n_modules, 0.7
    model = config.build()
    adapter, theirs = FORMAT.adapter(config), {**reference.state_dict(), **own}
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    ours: dict[str, Tensor] = {}
    for step in adapter.steps:
        tensors = step.transform.to_internal(
            [as_in_files(theirs)[name] for name in step.external],
            [shapes[name] for name in step.internal],
        )
        ours |= dict(zip(step.internal, tensors, strict=True))
    model.load_state_dict(ours)
    reference.double()
    return (
        model,
        reference,
        {name: weight.double().requires_grad_() for name, weight in own.items()},
    )


def as_in_files(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of transformers' class with a tensor for each expert."""
    files = {}
    for name, weight in weights.items():
        folder, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for expert, both in enumerate(weight):
                (
                    files[f"{folder}.{expert}.gate_proj.weight"],
                    files[f"{folder}.{expert}.up_proj.weight"],
                ) = both.chunk(2)
        elif last == "down_proj":
            files |= {
                f"{folder}.{expert}.down_proj.weight": each for expert, each in enumerate(weight)
            }
        else:
            files[name] = weight
    return files


def expected_loss(
    reference: Any,
    own: dict[str, Tensor],
    documents: Sequence[tuple[Tensor, Tensor]],
    n_modules: int,
) -> tuple[Tensor, Tensor]:
    """Return the main loss, and the sum of the modules', of documents that are computed one by one;
    each module has as many positions less as it predicts tokens ahead."""
    theirs, output = reference.model, reference.lm_head.weight
    eps = reference.config.rms_norm_eps

    def norm(x_TD: Tensor, weight_D: Tensor) -> Tensor:
        return x_TD * (x_TD.square().mean(-1, keepdim=True) + eps).rsqrt() * weight_D

    def block(index: int, h_TD: Tensor) -> Tensor:
        length = len(h_TD)
        mask = torch.full((length, length), -torch.inf, dtype=h_TD.dtype).triu(1)[None, None]
        places = torch.arange(length)[None]
        rope = theirs.rotary_emb(h_TD[None], places)
        hidden: Tensor = theirs.layers[index](
            h_TD[None], mask, position_ids=places, position_embeddings=rope
        )[0]
        return hidden

    def loss(h_TD: Tensor, labels_T: Tensor) -> Tensor:
        return F.cross_entropy(h_TD @ output.T, labels_T, reduction="sum")

    main, further = torch.zeros(2, dtype=torch.float64)
    for tokens_T, labels_T in documents:
        embedded_TD = theirs.embed_tokens(tokens_T)
        h_TD = embedded_TD
        for index in range(N_LAYERS):
            h_TD = block(index, h_TD)
        h_TD = norm(h_TD, theirs.norm.weight)
        main = main + loss(h_TD, labels_T)
        for k in range(1, n_modules + 1):
            if k >= len(tokens_T):
                break
            enorm, hnorm, last, projection = (
                own[f"model.layers.{N_LAYERS + k - 1}.{name}"] for name in OWN
            )
            both = torch.cat((norm(embedded_TD[k:], enorm), norm(h_TD[:-1], hnorm)), dim=-1)
            h_TD = norm(block(N_LAYERS + k - 1, both @ projection.T), last)
            further = further + loss(h_TD, labels_T[k:])
    return main, further


def difference(
    n_modules: int, mistake: Callable[[Any], None] = lambda model: None, **options: Any
) -> float:
    """Return the largest relative difference in the loss and all gradients."""
    model, reference, own = make_pair(n_modules, **options)
    tokens, labels = random_tokens(97, 50)
    mistake(model)
    loss = model(
        tokens, metadata_of(DOCUMENTS), head=CrossEntropyLoss.Config().build(), labels_BL=labels
    )
    loss.backward()
    documents = [
        part
        for row, lengths in enumerate(DOCUMENTS)
        for part in zip(tokens[row].split(lengths), labels[row].split(lengths), strict=True)
    ]
    main, further = expected_loss(reference, own, documents, n_modules)
    (main + 0.7 / n_modules * further).backward()
    expected = {
        name: parameter.grad for name, parameter in [*reference.named_parameters(), *own.items()]
    }
    ours = to_external(
        deepseek_v3, model, {name: parameter.grad for name, parameter in model.named_parameters()}
    )
    assert ours.keys() == expected.keys()
    # As in `test_equal_transformers`: a small gradient counts as 1 % of the largest.
    least = 0.01 * max(gradient.abs().max().item() for gradient in expected.values())
    errors = [relative_error(ours[name], expected[name], least) for name in expected]
    return max(relative_error(loss.detach(), main.detach()), *errors)


@pytest.mark.parametrize(
    ("n_modules", "tied"),
    [(1, True), (2, False), (3, False)],
)
def test_loss_and_all_gradients_equal_the_equations(n_modules: int, tied: bool) -> None:
    assert difference(n_modules, tie_word_embeddings=tied) < TOLERANCE


def swapped(model: Any) -> None:
    for block in list(model.layers.values())[N_LAYERS:]:
        block.mtp["enorm"], block.mtp["hnorm"] = block.mtp["hnorm"], block.mtp["enorm"]


def no_last_norm(model: Any) -> None:
    norm = model.layers[str(N_LAYERS)].mtp["norm"]
    norm.forward = lambda x: x * norm.weight


def state_before_final_norm(model: Any) -> None:
    """As the paper draws it."""
    states: list[Tensor] = []
    model.head.norm.register_forward_pre_hook(lambda module, inputs: states.append(*inputs))
    module = model.layers[str(N_LAYERS)]
    module.register_forward_pre_hook(lambda module, inputs: (states[0], *inputs[1:]))


def other_weight(model: Any) -> None:
    model.config.mtp_weight *= 2


@pytest.mark.parametrize("mistake", [swapped, no_last_norm, state_before_final_norm, other_weight])
def test_mistake_in_a_module_is_caught(mistake: Callable[[Any], None]) -> None:
    assert difference(2, mistake, tie_word_embeddings=False) > 1e-2


@pytest.mark.parametrize(
    "change",
    [
        lambda tokens, positions: (tokens.roll(-1, 1), positions),
        lambda tokens, positions: (tokens.roll(1, 1), positions),
        # labels of the next document
        lambda tokens, positions: (tokens, torch.arange(50).expand(2, -1)),
        lambda tokens, positions: (tokens, positions * 2),  # hides all labels
    ],
)
def test_wrong_shift_or_document_is_caught(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    def wrong(head: Any, modules: Any, tokens: Tensor, positions: Tensor, weight: float) -> Any:
        return with_further_tokens(head, modules, *change(tokens, positions), weight)

    monkeypatch.setattr(deepseek_model, "with_further_tokens", wrong)
    assert difference(2, tie_word_embeddings=False) > 1e-2


def test_only_training_computes_modules() -> None:
    model, _, _ = make_pair(1)
    tokens, labels = random_tokens(97, 50)
    calls: list[Any] = []
    model.layers[str(N_LAYERS)].register_forward_hook(lambda *args: calls.append(args))
    head = CrossEntropyLoss.Config().build()
    trained = model(tokens, head=head, labels_BL=labels)
    assert len(calls) == 1
    model(tokens)
    validated = model.eval()(tokens, head=head, labels_BL=labels)
    assert len(calls) == 1
    assert torch.equal(trained, validated)  # the logged loss is the main one


def test_losses_of_samples_leave_modules_out() -> None:
    model, _, _ = make_pair(1)
    tokens, labels = random_tokens(97, 50)
    batch = {"input": tokens, "labels": labels, "attention": metadata_of(DOCUMENTS)}
    batch["documents"] = torch.arange(6).view(2, 3)
    loss = CrossEntropyLoss.Config().build()
    samples = SampleLosses(loss, ParallelDims(world_size=1), wanted=True)
    with samples.of(batch):
        total = model(tokens, batch["attention"], head=loss, labels_BL=labels)
    ((_, losses),) = samples._recorded
    assert relative_error(losses.sum(), total) < TOLERANCE


# --- files and runs
# --------------------------------------------------------------------------------------------------


def test_files_hold_modules_as_layers_behind_the_last() -> None:
    model, _, own = make_pair(1, tie_word_embeddings=False)
    config, adapter = model.config, FORMAT.adapter(model.config)
    assert own.keys() < set(adapter.external_names)
    assert FORMAT.to_external(config)["num_nextn_predict_layers"] == 1
    internal = {name: TensorSpec.of(tensor) for name, tensor in model.state_dict().items()}
    files = adapter.external_specs(internal)
    copies = {"embed_tokens": "model.embed_tokens.weight", "shared_head.head": "lm_head.weight"}
    published = files | {
        f"model.layers.{N_LAYERS}.{name}.weight": files[of] for name, of in copies.items()
    }
    match = adapter.plan(published, internal)
    assert dict(match.tied) == {
        f"model.layers.{N_LAYERS}.{name}.weight": of for name, of in copies.items()
    }
    off = FORMAT.from_external(json.loads(json.dumps(FORMAT.to_external(config))))
    assert off.n_mtp_modules == 0
    plain = FORMAT.adapter(off)
    assert not plain.match(published).unexpected
    with pytest.raises(UserError, match=rf"missing from the checkpoint: .*layers.{N_LAYERS}"):
        adapter.plan({name: files[name] for name in plain.external_names}, internal)


@pytest.mark.parametrize(
    ("option", "value"),
    [("n_mtp_modules", -1), ("n_mtp_modules", 65), ("mtp_weight", 0.0), ("mtp_weight", -1.0)],
)
def test_impossible_values_are_named(option: str, value: float) -> None:
    config = deepseek_v3.model_registry("debugmodel").model
    setattr(config, option, value)
    with pytest.raises(UserError, match=f"--model.{option} is {value}"):
        config.validate()


@pytest.mark.slow
def test_a_dry_run_counts_modules(tmp_path: Path) -> None:
    """Executed are also products with values' padding to the width of keys, as without modules."""

    def flops(n_modules: int) -> tuple[float, float]:
        words = [
            "--module",
            "deepseek_v3",
            "--config",
            "debugmodel",
            "--dump_folder",
            str(tmp_path),
        ]
        config = ConfigManager().parse_args([*words, f"--model.n_mtp_modules={n_modules}"]).config
        (rank,) = dry_run(config, world_size=2)
        tokens, length = (
            config.training.local_batch_size * config.training.seq_len,
            config.training.seq_len,
        )
        return rank.executed_flops - 6 * (4 + n_modules) * 8 * (
            48 - 32
        ) * length * tokens, rank.model_flops

    (executed, computed), (base, _) = flops(2), flops(0)
    assert executed == pytest.approx(computed, rel=0.01)
    assert executed > 1.3 * base


@pytest.mark.slow
def test_a_run_resumes_exactly(tmp_path: Path) -> None:
    options = {"module": "deepseek_v3", "model__n_mtp_modules": 1, "model__moe__bias_rate": 0.01}
    options |= {"checkpoint__enable": True, "checkpoint__interval": 2}
    straight = train(tmp_path / "straight", **options)
    shutil.copytree(tmp_path / "straight", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed/checkpoint/step-4")
    resumed = train(tmp_path / "resumed", **options)
    weights, expected = (run.model_parts[0].state_dict() for run in (resumed, straight))
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_a_run_balances_exports_and_starts_again_with_modules(tmp_path: Path) -> None:
    options = {"module": "deepseek_v3", "model__n_mtp_modules": 1, "model__moe__bias_rate": 0.01}
    export = {
        "checkpoint__enable": True,
        "checkpoint__last_save_in_hf": True,
        "checkpoint__export_dtype": "float32",
    }
    trainer = train(tmp_path / "first", **options, **export)
    (model,) = trainer.model_parts
    module = list(model.layers.values())[-1]
    assert isinstance(module.mtp, torch.nn.ModuleDict)
    assert module.moe.router.selection.bias_E.any()  # it has a load of its own
    (line, *_) = map(json.loads, (tmp_path / "first/metrics.jsonl").read_text().splitlines())
    # the last token of a document has no second one to predict
    assert line["dropped_tokens/layers.2"] > 0
    assert line["expert_load/layers.2"] >= 1
    (folder,) = (tmp_path / "first/checkpoint").glob("step-*")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager"
    ).eval()
    tokens = random_tokens(97, 40)[0]
    with torch.no_grad():
        assert relative_error(model.eval()(tokens), theirs(tokens).logits) < TOLERANCE
    load = {
        "checkpoint__enable": True,
        "checkpoint__initial_load_path": folder,
        "checkpoint__initial_load_in_hf": True,
    }
    again = train(tmp_path / "again", **options, **load, training__steps=1, optimizer__lr=1e-30)
    (loaded,) = again.model_parts
    weights = loaded.state_dict()
    for name, weight in model.state_dict().items():
        if not name.endswith("bias_E"):
            assert relative_error(weights[name], weight) < 1e-6, name
