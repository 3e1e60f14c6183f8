"""`--loss_scale`: training in float16, compared with a loop around `torch.amp.GradScaler`."""

import copy
import json
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.processes import run_processes
from tests.training import killed_in, read_metrics, tiny_config, train
from torchtitan.components.optim.loss_scale import LossScale
from torchtitan.tools.errors import RunFailure, UserError
from torchtitan.trainer import Callback, Trainer
from torchtitan.trainer.step_result import NonFiniteError

FLOAT16 = {
    "training__mixed_precision_param": "float16",
    "training__steps": 12,
    "lr_scheduler__warmup_steps": 0,
    "lr_scheduler__decay_ratio": 0.0,
    "optimizer__lr": 1e-3,
    "loss_scale__initial": 2.0**22,
    "loss_scale__interval": 3,
}
"""Overflows in the first steps, and grows later, into an overflow again."""
SAVING = {"checkpoint__enable": True, "checkpoint__interval": 2}


def test_factor_equals_grad_scaler():
    generator = random.Random(0)
    settings = {"growth": 2.0, "backoff": 0.25, "interval": 2}
    ours = LossScale.Config(initial=2.0**10, **settings).build(dtype=torch.float16)
    theirs = torch.amp.GradScaler(
        "cpu", init_scale=2.0**10, growth_factor=2.0, backoff_factor=0.25, growth_interval=2
    )
    weight = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    theirs.scale(torch.ones(()))  # allocates its state
    seen = set()
    for step in range(900):
        # Long enough without an infinite gradient to reach the largest float32.
        is_finite = step > 150 or generator.random() < 0.8
        weight.grad = torch.full((3,), 1.0 if is_finite else torch.inf)
        theirs.step(optimizer)
        theirs.update()
        ours.update(is_finite=is_finite)
        seen.add(ours.value)
        assert ours.value == theirs.get_scale(), step
    assert len(seen) > 80 and max(seen) > 1e38


class Factors(Trainer):
    """Records the factor of each step."""

    def load_checkpoint(self):
        super().load_checkpoint()
        self.factors = []

    def update(self, micro_batches):
        self.factors.append(self.loss_scale.value)
        return super().update(micro_batches)


class Recorder(Factors):
    """Records batches and initial weights too."""

    def load_checkpoint(self):
        super().load_checkpoint()
        self.initial = copy.deepcopy(self.model_parts[0])
        self.batches = []

    def update(self, micro_batches):
        self.batches.append(micro_batches)
        return super().update(micro_batches)


def trained_with_grad_scaler(
    trainer: Recorder, *, unscales: bool = True
) -> tuple[nn.Module, list[float]]:
    """Return the weights and the factors of a plain loop over the same batches."""
    config = trainer.config
    master, half = trainer.initial, copy.deepcopy(trainer.initial).half()
    decayed = [p for n, p in master.named_parameters() if not ("norm" in n or "tok_emb" in n)]
    others = [p for n, p in master.named_parameters() if "norm" in n or "tok_emb" in n]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.optimizer.lr, betas=(0.9, 0.95), eps=1e-8)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=config.loss_scale.initial, growth_interval=config.loss_scale.interval
    )
    factors = []
    for batches in trainer.batches:
        optimizer.zero_grad()
        n_tokens = sum(int((batch["labels"] != -100).sum()) for batch in batches)
        factors.append(float(scaler.scale(torch.ones(()))))
        with torch.no_grad():
            for own, weight in zip(half.parameters(), master.parameters(), strict=True):
                own.copy_(weight)
        for batch in batches:
            half.zero_grad()
            logits = half(batch["input"], batch["attention"])
            loss = F.cross_entropy(
                logits.float().flatten(0, 1), batch["labels"].flatten().long(), reduction="sum"
            )
            scaler.scale(loss / n_tokens).backward()
            for own, weight in zip(half.parameters(), master.parameters(), strict=True):
                gradient = own.grad.float()
                weight.grad = gradient if weight.grad is None else weight.grad + gradient
        if unscales:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(master.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return master, factors


def assert_close(ours: nn.Module, expected: nn.Module, initial: nn.Module) -> None:
    """Compare weights; the loop computes the loss whole, ours in chunks, so that gradients differ
    by roundings to float16 (5e-4), and Adam's updates in early steps by a few of these."""
    for (name, weight), reference, first in zip(
        ours.named_parameters(), expected.parameters(), initial.parameters(), strict=True
    ):
        moved = (reference - first).norm()
        assert moved > 0, name
        assert (weight - reference).norm() < 0.02 * moved, name


@pytest.mark.parametrize("accumulates", [False, True])
def test_training_equals_a_loop_with_grad_scaler(tmp_path, accumulates):
    batch = {"training__global_batch_size": 4} if accumulates else {}
    trainer = train(tmp_path, trainer_class=Recorder, **FLOAT16, **batch)
    initial = copy.deepcopy(trainer.initial)
    expected, factors = trained_with_grad_scaler(trainer)
    assert trainer.factors == factors
    assert factors[0] > factors[5] < max(factors[5:])  # shrinks, and grows
    assert_close(trainer.model_parts[0], expected, initial)
    (model,), skipped = trainer.model_parts, trainer.spikes.n_skipped
    assert all(weight.dtype == torch.float32 for weight in model.parameters())
    n_overflows = sum(later < factor for factor, later in zip(factors, factors[1:], strict=False))
    assert skipped in (n_overflows, n_overflows + 1) and skipped >= 2


def test_clipping_scaled_gradients_would_differ(tmp_path):
    """Without the division before clipping, the clipped gradients are tiny."""
    trainer = train(tmp_path, trainer_class=Recorder, **FLOAT16)
    initial = copy.deepcopy(trainer.initial)
    expected, _ = trained_with_grad_scaler(trainer, unscales=False)
    with pytest.raises(AssertionError):
        assert_close(trainer.model_parts[0], expected, initial)


def test_skipped_steps_are_reported(tmp_path, log):
    seen = []

    class Watch(Callback):
        def on_skip(self, outcome):
            seen.append(outcome.step)

    config = tiny_config(tmp_path, **FLOAT16, debug__ledger=True)
    config.callbacks.append(Watch.Config())
    trainer = config.build()
    try:
        trainer.train()
    finally:
        trainer.close()
    assert seen[:2] == [1, 2] and len(seen) == trainer.spikes.n_skipped
    factors = dict(read_metrics(tmp_path, "loss_scale"))
    assert factors[1] == 2.0**21  # of the next step
    lines = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "skipped" in line] == seen
    assert "float16 overflows with the loss scale 4.1943e+06); documents: " in log.text


def test_too_many_overflows_end_the_run(tmp_path):
    options = {**FLOAT16, "loss_scale__initial": 1e30, "spikes__max_in_a_row": 3}
    with pytest.raises(RunFailure, match=r"3 steps in a row are skipped.*loss scale 2\.5e\+29"):
        train(tmp_path, **options)


def test_a_return_keeps_the_lower_scale(tmp_path):
    """The scale of the checkpoint would overflow again: here, every second step does."""
    trainer = train(
        tmp_path,
        **{
            **FLOAT16,
            "checkpoint__enable": True,
            "checkpoint__interval": 1,
            "spikes__action": "leave_out",
            "spikes__max_in_a_row": 1,
            "loss_scale__initial": 2.0**14,
            "loss_scale__interval": 1,
            "loss_scale__growth": 2.0**14,
            "loss_scale__backoff": 2.0**-14,
        },
    )
    assert (trainer.step, trainer.spikes.n_skipped) == (12, 6)


def test_infinite_loss_is_no_overflow(tmp_path):
    class Infinite(Trainer):
        def result_of(self, values):
            return super().result_of([values[0], float("nan"), *values[2:]])

    with pytest.raises(NonFiniteError, match="step 1"):
        train(tmp_path, trainer_class=Infinite, **{**FLOAT16, "loss_scale__initial": 1.0})


def factors_and_weights(trainer: Trainer) -> list:
    weights = [
        weight.full_tensor() if hasattr(weight, "full_tensor") else weight.detach()
        for part in trainer.model_parts
        for weight in part.parameters()
    ]
    return [trainer.loss_scale.state_dict(), trainer.spikes.n_skipped, weights]


def test_resumes_bit_identically(tmp_path):
    straight = train(tmp_path / "straight", **FLOAT16, **SAVING)
    with killed_in(Trainer, "train_step", 8):  # between two changes of the factor
        train(tmp_path / "resumed", **FLOAT16, **SAVING)
    resumed = train(tmp_path / "resumed", **FLOAT16, **SAVING)
    first, second = factors_and_weights(straight), factors_and_weights(resumed)
    assert first[:2] == second[:2]
    assert all(torch.equal(a, b) for a, b in zip(first[2], second[2], strict=True))
    # A checkpoint of another type has no factor.
    bfloat16 = {**FLOAT16, "training__mixed_precision_param": "bfloat16"}
    train(tmp_path / "other", **bfloat16, **SAVING)
    trainer = train(tmp_path / "other", **{**FLOAT16, "training__steps": 13}, **SAVING)
    assert trainer.step == 13 and trainer.loss_scale.value == 2.0**21


def finish(folder: Path, options: dict) -> None:
    trainer = train(folder, trainer_class=Factors, **{**FLOAT16, **options})
    rank = trainer.rank
    (folder / f"factors-{rank}.json").write_text(json.dumps(trainer.factors))


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {"training__local_batch_size": 1},
        {"parallelism__pipeline_parallel_degree": 2},
        {"parallelism__tensor_parallel_degree": 2},
    ],
    ids=["FSDP", "PP", "TP"],
)
def test_ranks_agree(tmp_path, layout):
    """Both ranks have one factor, which shrinks and grows. It may differ from that of one process
    where a gradient is close to the largest number."""
    one = train(tmp_path / "one", trainer_class=Factors, **FLOAT16)
    run_processes(finish, 2, tmp_path / "two", layout)
    first, second = (
        json.loads((tmp_path / "two" / f"factors-{rank}.json").read_text()) for rank in (0, 1)
    )
    assert first == second and first[:4] == one.factors[:4]
    assert first[0] > min(first[:6]) < max(first[6:])
    losses = [dict(read_metrics(tmp_path / name, "loss")) for name in ("one", "two")]
    # Products in float16 round to 5e-4, in another order.
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"optimizer__early_step_in_backward": True, "training__max_norm": "inf"},
            "early_step_in_backward uses gradients before they can be divided",
        ),
        ({"loss_scale__backoff": 1.0}, "--loss_scale.backoff is 1.0, but must be between 0 and 1"),
        ({"loss_scale__growth": 1.0}, "--loss_scale.growth is 1.0"),
        ({"loss_scale__initial": 0.0}, "--loss_scale.initial is 0.0"),
        ({"loss_scale__interval": 0}, "--loss_scale.interval is 0"),
    ],
)
def test_refusals(tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        tiny_config(tmp_path, **{**FLOAT16, **options}).check(world_size=1)


def test_trainers_with_gradients_of_their_own_are_refused(tmp_path):
    class OwnBackward(Trainer):
        def forward_backward_step(self, batch, n_tokens):
            return super().forward_backward_step(batch, n_tokens)

    class OwnStep(Trainer):
        def update(self, micro_batches):
            batch = self.post_dataloading_process(micro_batches[0])
            n_tokens = self.count_valid_tokens(micro_batches)
            loss = self.forward_backward_step(batch, n_tokens)
            return self.read_result(loss, self.clip_gradients(), n_tokens)

    config = tiny_config(tmp_path, **FLOAT16)
    own = OwnBackward.Config.based_on(config)
    with pytest.raises(UserError, match="OwnBackward overrides forward_backward_step"):
        own.check(world_size=1)
    with pytest.raises(UserError, match="OwnStep overrides train_step or update"):
        train(tmp_path, trainer_class=OwnStep, **FLOAT16)
