"""Skipped steps: `--spikes`, with a stretch of garbage in real text."""

import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.training import killed_in, launch, read_metrics, tiny_config, train
from torchtitan.components.data.dataloader import PretrainDataLoader
from torchtitan.components.optim.spikes import SpikeGuard
from torchtitan.tools.errors import RunFailure, UserError
from torchtitan.trainer import Trainer

OPTIONS = {
    "training__steps": 30,
    "training__local_batch_size": 8,
    "training__global_batch_size": 16,
    "training__mixed_precision_param": "float32",
    "optimizer__lr": 3e-3,
    "dataloader__shuffle": False,
    "debug__ledger": True,
    "spikes__threshold": 5.0,
    "spikes__window": 8,
}
SAVING = {"checkpoint__enable": True, "checkpoint__interval": 8}
# Without the schedule, so that runs of different lengths have equal rates.
CONSTANT = {
    "spikes__advance_schedule": False,
    "lr_scheduler__total_steps": 100,
    "lr_scheduler__decay_ratio": 0.0,
}
GARBAGE = range(55, 59)
"""Documents of random characters, which steps 21 to 23 read."""


@pytest.fixture
def text(assets, tmp_path) -> Path:
    """Shakespeare in documents of 400 characters, with `GARBAGE` between them."""
    shakespeare, draw = (assets / "text" / "tinyshakespeare.txt").read_text(), random.Random(0)
    texts = [shakespeare[400 * i : 400 * (i + 1)] for i in range(130)]
    for i in GARBAGE:
        texts[i] = "".join(draw.choices("qxzjkvw0123456789#@~^|{}", k=400))
    path = tmp_path / "text.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return path


def ledger(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]


def skipped(folder: Path) -> list[int]:
    return [line["step"] for line in ledger(folder) if "skipped" in line]


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    state = trainer.states()
    return {**state["model"].state_dict(), **state["optimizer"].state_dict()}


def assert_equal(first: Trainer, second: Trainer) -> None:
    first, second = weights(first), weights(second)
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def test_decisions_equal_numpy():
    """A reference over random series with outliers; only values of steps taken count."""
    guard = SpikeGuard.Config(threshold=2.0, window=16).build()
    draw = np.random.default_rng(0)
    taken, decisions = [], []
    for values in np.exp(draw.normal(size=(300, 2)) * 0.5):
        recent = np.array(taken[-16:])
        expected = (
            len(taken) >= 16
            and (values > recent.mean(axis=0) + 2 * recent.std(axis=0, ddof=1)).any()
        )
        assert bool(guard.spike(*values)) == expected
        decisions.append(expected)
        if not expected:
            taken.append(values)
            guard.record(*values)
    assert 10 < sum(decisions) < 200


def test_equal_values_define_no_spike():
    """Steps that learned nothing, as with equal rewards, say nothing about the size of the first
    one that does."""
    guard = SpikeGuard.Config(threshold=2.0, window=4).build()
    for _ in range(4):
        guard.record(0.0, 0.0)
    assert not guard.spike(0.1, 0.2)


class Glitch(Trainer):
    """Damages the weights once, in step 20, like a faulty device."""

    def train_step(self, batches):
        if self.step == 19 and self.spikes.returned_to is None:
            with torch.no_grad():
                for parameter in self.model_parts[0].parameters():
                    parameter.add_(
                        torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
                    )
        return super().train_step(batches)


class WithoutGarbage(PretrainDataLoader):
    """Leaves out batches 21 to 23 of 16 windows, of which this loader returns halves."""

    def __init__(self, config, **arguments):
        super().__init__(config, **arguments)
        self.n_read = 0

    def __next__(self):
        self.n_read += 1
        while 40 < self.n_read <= 46:
            super().__next__()
            self.n_read += 1
        return super().__next__()


@pytest.mark.slow
class TestGarbage:
    def test_is_skipped_as_if_it_had_never_been_there(self, tmp_path, text):
        """Weights and moments equal those of a loader without these batches, and the ledger names
        their documents."""
        guarded = train(tmp_path / "guarded", dataloader__dataset=text, **OPTIONS, **CONSTANT)
        assert skipped(tmp_path / "guarded") == [21, 22, 23]
        named = {
            int(name.split()[-1].split("-")[-1])
            for line in ledger(tmp_path / "guarded")[20:23]
            for name in line["documents"]
        }
        assert {i + 1 for i in GARBAGE} <= named
        (_, n_skipped) = read_metrics_of(tmp_path / "guarded", "skipped_steps")[-1]
        assert n_skipped == 3
        options = {**OPTIONS, **CONSTANT, "training__steps": 27, "spikes__threshold": None}
        config = tiny_config(tmp_path / "without", dataloader__dataset=text, **options)
        config.dataloader = WithoutGarbage.Config(dataset=str(text), shuffle=False)
        reference = config.build()
        reference.train()
        reference.close()
        assert_equal(guarded, reference)
        # The comparison can fail: a run that trains on the garbage differs.
        careless = train(
            tmp_path / "careless", dataloader__dataset=text, **{**options, "training__steps": 30}
        )
        with pytest.raises(AssertionError):
            assert_equal(guarded, careless)

    def test_schedule_advances_by_choice(self, tmp_path, text):
        for advance in (True, False):
            folder, options = (
                tmp_path / str(advance),
                {**OPTIONS, "spikes__advance_schedule": advance},
            )
            trainer = train(folder, dataloader__dataset=text, **options)
            assert trainer.lr_scheduler.steps_taken == (30 if advance else 27)

    @pytest.mark.parametrize("layout", [{}, {"parallelism__pipeline_parallel_degree": 2}])
    def test_two_processes_decide_alike_and_return_alike(self, tmp_path, text, layout):
        options = {**OPTIONS, **SAVING, "spikes__max_in_a_row": 3, "spikes__action": "leave_out"}
        train(tmp_path / "one", dataloader__dataset=text, **options)
        launch(tmp_path / "two", 2, dataloader__dataset=text, **options, **layout)
        assert skipped(tmp_path / "one") == skipped(tmp_path / "two") == [21, 22, 23]
        one, two = (
            [line.get("returned_to") for line in ledger(tmp_path / name)] for name in ("one", "two")
        )
        assert one == two == [None] * 23 + [16] * 7
        one, two = (read_metrics(tmp_path / name, "loss", "grad_norm") for name in ("one", "two"))
        # Float32 sums in another order, over 30 steps.
        assert one == [pytest.approx(line, rel=1e-4) for line in two]

    def test_resumes_bit_identically(self, tmp_path, text):
        """One run is killed four times: before the garbage, in it, at the return to a checkpoint,
        and after it."""
        options = {**OPTIONS, **SAVING, "checkpoint__interval": 1, "checkpoint__keep_latest_k": 0}
        options |= {
            "dataloader__dataset": text,
            "spikes__max_in_a_row": 3,
            "spikes__action": "leave_out",
        }
        straight = train(tmp_path / "straight", **options)
        begun = 0
        for killed in (20, 22, 23, 26):
            with killed_in(Trainer, "train_step", killed - begun + 1):
                train(tmp_path / "resumed", **options)
            assert len(ledger(tmp_path / "resumed")) == killed
            begun = killed
        resumed = train(tmp_path / "resumed", **options)
        assert_equal(straight, resumed)
        assert straight.spikes.state_dict() == resumed.spikes.state_dict()
        assert ledger(tmp_path / "straight") == ledger(tmp_path / "resumed")
        exact = ("loss", "grad_norm", "lr", "n_tokens_seen")
        assert read_metrics(tmp_path / "straight", *exact) == read_metrics(
            tmp_path / "resumed", *exact
        )

    def test_stop_saves_nothing_after_the_spikes(self, tmp_path, text):
        with pytest.raises(RunFailure, match=r"3 steps in a row are skipped .*step 23: loss"):
            train(tmp_path, dataloader__dataset=text, **OPTIONS, **SAVING, spikes__max_in_a_row=3)
        assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == [
            "step-16",
            "step-8",
        ]


@pytest.mark.slow
class TestReturn:
    def test_leaves_out_the_data(self, tmp_path, text):
        """The steps after the return equal a run from the same checkpoint with
        `training.skip_data`."""
        options = {
            **OPTIONS,
            **SAVING,
            **CONSTANT,
            "dataloader__dataset": text,
            "spikes__max_in_a_row": 3,
        }
        returned = train(tmp_path / "run", **options, spikes__action="leave_out")
        shutil.copytree(
            tmp_path / "run/checkpoint/step-16", tmp_path / "reference/checkpoint/step-16"
        )
        changes = {"training__steps": 23, "training__skip_data": ["17-23"]}
        reference = train(tmp_path / "reference", **{**options, **changes})
        assert_equal(returned, reference)
        losses = [line[1] for line in read_metrics(tmp_path / "run", "loss")]
        assert returned.phases.seconds()["return to a checkpoint"] > 0
        assert losses[23:] == [line[1] for line in read_metrics(tmp_path / "reference", "loss")]

    def test_repeats_the_data(self, tmp_path, text):
        """Weights damaged in step 20 leave no trace: the run equals one that was never damaged,
        seven steps later."""
        text.write_text(
            "\n".join(
                line for i, line in enumerate(text.read_text().splitlines()) if i not in GARBAGE
            )
        )
        options = {
            **OPTIONS,
            **SAVING,
            **CONSTANT,
            "dataloader__dataset": text,
            "spikes__max_in_a_row": 4,
        }
        damaged = train(
            tmp_path / "damaged", trainer_class=Glitch, **options, spikes__action="repeat"
        )
        assert skipped(tmp_path / "damaged") == [20, 21, 22, 23]
        sound = train(tmp_path / "sound", **{**options, "training__steps": 23})
        assert_equal(damaged, sound)
        assert [line["documents"] for line in ledger(tmp_path / "damaged")[23:]] == [
            line["documents"] for line in ledger(tmp_path / "sound")[16:]
        ]

    def test_twice_to_the_same_checkpoint_ends_the_run(self, tmp_path, text):
        options = {**OPTIONS, **SAVING, "checkpoint__interval": 16, "spikes__max_in_a_row": 3}
        options["training__steps"] = 32
        with pytest.raises(RunFailure, match="the run has returned to step 16 before; skip more"):
            train(tmp_path, dataloader__dataset=text, **options, spikes__action="repeat")

    def test_without_a_checkpoint_ends_the_run(self, tmp_path, text):
        options = {**OPTIONS, **SAVING, "checkpoint__interval": 100, "spikes__max_in_a_row": 3}
        with pytest.raises(RunFailure, match="has no checkpoint up to step 20 to return to"):
            train(tmp_path, dataloader__dataset=text, **options, spikes__action="leave_out")


def test_nonfinite_steps_in_a_row_end_the_run(tmp_path):
    class Broken(Trainer):
        def forward_backward_step(self, batch, n_tokens):
            return super().forward_backward_step(batch, n_tokens) * (math.nan if self.step else 1)

    with pytest.raises(RunFailure, match="2 steps in a row are skipped .*step 3: loss nan"):
        train(tmp_path, trainer_class=Broken, training__on_nonfinite="skip", spikes__max_in_a_row=2)


EARLY = {"optimizer__early_step_in_backward": True, "training__max_norm": math.inf}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spikes__threshold": 0.0}, r"--spikes\.threshold"),
        ({"spikes__window": 1}, r"--spikes\.window"),
        ({"spikes__max_in_a_row": 0}, r"--spikes\.max_in_a_row"),
        (
            {"spikes__threshold": 3.0, **EARLY},
            "early_step_in_backward cannot .* --spikes.threshold 3.0",
        ),
        (
            {"spikes__action": "repeat"},
            "--spikes.action repeat returns to a checkpoint, and needs --checkpoint.enable",
        ),
        (
            {
                **SAVING,
                "spikes__action": "repeat",
                "checkpoint__keep_latest_k": 2,
                "spikes__max_in_a_row": 9,
            },
            "increase --checkpoint.keep_latest_k 2 or --checkpoint.interval 8",
        ),
    ],
)
def test_mistakes(tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        tiny_config(tmp_path, **options).check(world_size=1)


def read_metrics_of(folder: Path, key: str) -> list[tuple[int, float]]:
    """Return step and value of the lines of metrics.jsonl that have a key."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line[key]) for line in lines if key in line]
