"""Results that the host reads a step late, as on CUDA, against results that it reads in their own
step, as on a CPU."""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from tests.processes import run_processes
from tests.training import read_metrics, run, tiny_config
from torchtitan.components.data.dataloader import PretrainDataLoader
from torchtitan.components.observe.run_events import read_events
from torchtitan.tools.errors import RunFailure
from torchtitan.trainer import Callback, NonFiniteError, StepResult, Trainer
from torchtitan.trainer.deferred_results import DeferredNumbers, DeferredResult, DeferredResults

EXACT = ("loss", "grad_norm", "lr", "n_tokens_seen", "skipped_steps")
READS = {
    "item",
    "tolist",
    "cpu",
    "numpy",
    "__bool__",
    "__float__",
    "__int__",
    "__index__",
    "nonzero",
}


class Damaged(Trainer):
    """Has an infinite gradient in the steps `damaged`, keeps copies of weights and moments, and
    lists late steps."""

    damaged: tuple[int, ...] = ()

    def forward_backward_step(self, batch, n_tokens):
        loss = super().forward_backward_step(batch, n_tokens)
        if self.step + 1 in self.damaged:
            next(p.grad for p in self.trained_parameters() if p.grad is not None).fill_(math.inf)
        return loss

    def complete_step(self, outcome):
        history, late = (
            self.__dict__.setdefault("history", []),
            self.__dict__.setdefault("late_steps", []),
        )
        state = {**dict(self.model_parts[0].state_dict()), **self.optimizer.state_dict()}
        history.append({name: _whole(value).detach().clone() for name, value in state.items()})
        if isinstance(outcome, DeferredResult) and not outcome.is_read:
            late.append(self.step + 1)
        super().complete_step(outcome)


def _whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


@pytest.fixture
def late(monkeypatch) -> None:
    """Read results on a CPU as on CUDA."""
    monkeypatch.setattr(DeferredResults, "device_types", ("cpu",))


def trained(
    folder: Path, damaged: tuple[int, ...] = (), dataloader: Any = None, **options: Any
) -> Any:
    config = tiny_config(folder, **{"training__steps": 8, "metrics__log_freq": 100, **options})
    if dataloader:
        config.dataloader = dataloader.Config()
    return run(config, type("Damaged", (Damaged,), {"damaged": damaged}))


def compare(folder: Path, monkeypatch: pytest.MonkeyPatch, *args: Any, **options: Any) -> Any:
    """Train with results read at once and late; compare all that they leave behind, and return the
    late trainer."""
    at_once = trained(folder / "at once", *args, **options)
    with monkeypatch.context() as patch:
        patch.setattr(DeferredResults, "device_types", ("cpu",))
        late = trained(folder / "late", *args, **options)
    assert not at_once.late_steps
    assert len(at_once.history) == len(late.history) == at_once.step == late.step
    for before, after in zip(at_once.history, late.history, strict=True):
        assert all(torch.equal(before[name], after[name]) for name in before)
    assert at_once.state_dict() == late.state_dict()
    assert at_once.spikes.state_dict() == late.spikes.state_dict()
    assert at_once.lr_scheduler.state_dict() == late.lr_scheduler.state_dict()
    if at_once.rank == 0:
        assert _lines(folder / "at once") == _lines(folder / "late")
        assert _events(folder / "at once") == _events(folder / "late")
    return late


def _lines(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: line.get(name) for name in ("step", *EXACT)} for line in lines]


def _events(folder: Path) -> list[tuple[Any, ...]]:
    return [
        (event["event"], event["step"], event.get("reason"))
        for event in read_events(folder)
        if event["event"] != "straggler"
    ]


SKIP = {"training__on_nonfinite": "skip"}
SAVES = {"checkpoint__enable": True, "checkpoint__interval": 4}


class TestSameRun:
    def test_with_skipped_steps(self, tmp_path, monkeypatch):
        """Steps 2, 3 and 6 are read late, step 4 is saved, and step 8 is the last."""
        late = compare(tmp_path, monkeypatch, (2, 3, 4, 6, 8), **SKIP, **SAVES)
        assert late.late_steps == [2, 3, 5, 6, 7]
        names = late.history[0].keys()
        unchanged = [
            all(torch.equal(a[n], b[n]) for n in names) for a, b in itertools.pairwise(late.history)
        ]
        assert unchanged == [True, True, True, False, True, False, True]
        assert [step for event, step, _ in _events(tmp_path / "late") if event == "skipped"] == [
            2,
            3,
            4,
            6,
            8,
        ]

    def test_logs_and_validates_as_often(self, tmp_path, monkeypatch):
        options = {
            "metrics__log_freq": 3,
            "validator__enable": True,
            "validator__freq": 5,
            "validator__steps": 1,
        }
        assert compare(tmp_path, monkeypatch, (5,), **SKIP, **options).late_steps == [2, 4, 7]

    def test_at_an_unknown_end_of_the_data(self, tmp_path, monkeypatch):
        """The last step before the end is late, damaged, and still logged."""
        assert compare(tmp_path, monkeypatch, (6,), SixBatches, **SKIP).late_steps == [
            2,
            3,
            4,
            5,
            6,
        ]
        assert _lines(tmp_path / "late")[-1]["skipped_steps"] == 1

    def test_with_balanced_experts(self, tmp_path, monkeypatch):
        """The balance of the experts, which is not part of the optimizer's update, stays too."""
        options = {
            "module": "glm4_moe",
            "model__n_layers": 2,
            "model__moe__layer_types": ["dense", "sparse"],
        }
        options |= {"model__moe__bias_rate": 0.01, "training__steps": 4}
        late = compare(tmp_path, monkeypatch, (2,), **SKIP, **options)
        name = "layers.1.moe.router.selection.bias_E"
        first, skipped, third = (state[name] for state in late.history[1:])
        assert (
            late.late_steps == [2, 3]
            and torch.equal(first, skipped)
            and not torch.equal(skipped, third)
        )

    def test_resumes_exactly(self, tmp_path, monkeypatch, late):
        whole = trained(tmp_path / "whole", (3, 6), **SKIP)
        trained(tmp_path / "parts", (3, 6), **SKIP, **SAVES, training__steps=8)
        for step in (tmp_path / "parts" / "checkpoint").glob("step-8"):
            step.rename(tmp_path / "gone")
        resumed = trained(tmp_path / "parts", (3, 6), **SKIP, **SAVES)
        assert len(resumed.history) == 4 and resumed.late_steps == [6, 7]
        assert all(
            torch.equal(resumed.history[-1][name], value)
            for name, value in whole.history[-1].items()
        )
        assert whole.spikes.state_dict() == resumed.spikes.state_dict()


class SixBatches(PretrainDataLoader):
    def __next__(self):
        self.n_batches = getattr(self, "n_batches", 0) + 1
        if self.n_batches > 6:
            raise StopIteration
        return super().__next__()


def compare_shards(folder: Path, layout: dict[str, int]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        options = {**SKIP, "metrics__log_freq": 3, **layout}
        assert compare(folder, monkeypatch, (2, 5), **options).late_steps == [2, 4, 5, 7]
    (folder / f"rank {torch.distributed.get_rank()}").touch()


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {},
        *(
            {f"parallelism__{of}_degree": 2}
            for of in ("data_parallel_replicate", "tensor_parallel", "pipeline_parallel")
        ),
    ],
)
def test_two_processes_skip_alike(tmp_path, layout):
    run_processes(compare_shards, 2, tmp_path, layout)
    assert len(list(tmp_path.glob("rank *"))) == 2


class TestNonFinite:
    def test_is_named_a_step_later_and_changes_nothing(self, tmp_path, late):
        with pytest.raises(
            NonFiniteError, match=r"^step 3: loss .* gradient norm inf; documents: stories"
        ) as error:
            trained(tmp_path, (3,), **SAVES, training__steps=7)
        assert [step for step, _ in read_metrics(tmp_path, "loss")] == [1, 2]
        assert not any((tmp_path / "checkpoint").glob("step-*"))
        trainer = next(
            frame.f_locals["self"]
            for frame, _ in _frames(error)
            if frame.f_code.co_name == "run_steps"
        )
        assert trainer.step == 3 and len(trainer.history) == 3
        assert all(
            torch.equal(trainer.history[1][name], value)
            for name, value in trainer.history[2].items()
        )

    @pytest.mark.parametrize("options", [SAVES, {}], ids=["saves", "saves nothing"])
    def test_is_noticed_in_a_last_step_that_comes_unexpectedly(self, tmp_path, late, options):
        """A callback ends the run, which saves the step, or only logs it."""
        config = tiny_config(tmp_path, training__steps=8, metrics__log_freq=100, **options)
        config.callbacks = [EndsEarly.Config()]
        with pytest.raises(NonFiniteError, match=r"^step 3: "):
            run(config, type("Damaged", (Damaged,), {"damaged": (3,)}))
        assert not any(tmp_path.glob("checkpoint/step-*"))
        run(config, Damaged)
        assert [step for step, _ in read_metrics(tmp_path, "loss")] == [1, 3]

    def test_many_in_a_row_end_the_run(self, tmp_path, late):
        with pytest.raises(RunFailure, match="2 steps in a row are skipped .*step 3: loss"):
            trained(tmp_path, (2, 3, 4, 5), **SKIP, spikes__max_in_a_row=2)


class EndsEarly(Callback):
    @dataclass(kw_only=True, slots=True)
    class Config(Callback.Config):
        """A callback without options."""

    def after_step(self, outcome):
        if self.trainer.step == 3:
            self.trainer.total_steps = 3


def _frames(error: Any) -> list[Any]:
    frame = error.value.__traceback__
    frames = []
    while frame:
        frames.append((frame.tb_frame, frame.tb_lineno))
        frame = frame.tb_next
    return frames


def test_request_to_stop_is_heard_in_the_next_step(tmp_path, late):
    class Interrupted(Damaged):
        def clip_gradients(self):
            if self.step == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().clip_gradients()

    trainer = run(
        tiny_config(tmp_path, training__steps=8, metrics__log_freq=100, **SAVES), Interrupted
    )
    assert trainer.step == 3 and trainer.late_steps == [2]
    assert (tmp_path / "checkpoint" / "step-3" / "complete.json").exists()


class Reads(TorchFunctionMode):
    """Counts the functions that would wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in READS:
            self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


class Counting(Damaged):
    """Counts the reads from clipping to the end of each step."""

    def clip_gradients(self):
        self.stack, self.reads = contextlib.ExitStack(), Reads()
        self.stack.enter_context(self.reads)
        return super().clip_gradients()

    def complete_step(self, outcome):
        Trainer.complete_step(self, outcome)
        self.stack.close()
        self.__dict__.setdefault("counts", []).append(self.reads.names)


def test_late_steps_read_nothing_of_their_own(tmp_path, monkeypatch):
    """Each step after the first late one only reads the copy of the step before."""
    options = {"training__steps": 8, "metrics__log_freq": 5, "metrics__enable_live_view": False}
    at_once = run(tiny_config(tmp_path / "at once", **options), Counting).counts
    assert at_once[1:] == [["tolist"]] * 7
    monkeypatch.setattr(DeferredResults, "device_types", ("cpu",))
    copies = []
    monkeypatch.setattr(
        "torchtitan.tools.device.HostCopy.tolist", lambda self: copies.append(1) or _tolist(self)
    )
    late = run(tiny_config(tmp_path / "late", **options), Counting).counts
    assert late[1:] == [[], [], [], ["tolist"], [], [], ["tolist"]]
    assert len(copies) == 5


def _tolist(copy: Any) -> list[float]:
    with torch._C.DisableTorchFunction():
        return copy._copy.tolist()


NEEDS_EACH = {
    "threshold": {"spikes__threshold": 5.0},
    "return": {"spikes__action": "leave_out", "checkpoint__enable": True},
    "schedule": {"spikes__advance_schedule": False},
    "averages": {"ema__decay": 0.9},
    "ledger": {"debug__ledger": True},
    "early steps": {"optimizer__early_step_in_backward": True, "training__max_norm": math.inf},
    "foreach": {"optimizer__implementation": "foreach"},
    "SGD": {"optimizer__name": "SGD"},
    "Muon": {"optimizer__name": "Muon"},
    "offloaded": {"optimizer__name": "AdamWOffload"},
}


@pytest.mark.parametrize("options", NEEDS_EACH.values(), ids=NEEDS_EACH)
def test_what_needs_each_result_gets_it_in_its_step(tmp_path, late, options):
    trainer = trained(tmp_path, **{"training__steps": 3, **options})
    assert trainer.step == 3 and trainer.late_steps == []


def test_own_steps_of_two_updates_are_reported_once(tmp_path, late):
    reported = []

    class Twice(Damaged):
        def train_step(self, batches):
            super().train_step(batches)
            return super().train_step(batches)

        def use_result(self, outcome, step, **progress):
            reported.append(step)

    trainer = run(tiny_config(tmp_path, training__steps=5, metrics__log_freq=100), Twice)
    assert reported == [1, 2, 3, 4, 5] and trainer.late_steps == [2, 3, 4]


def test_a_changed_copy_has_all_numbers():
    def read(values):
        return StepResult(
            *values, stop_requested=False, data_exhausted=True, measures={"kl": 3.0}, step=9
        )

    numbers = DeferredNumbers(torch.tensor([8.0, 1.0, math.inf]), lambda values: read(values[1:]))
    late = DeferredResult(numbers=numbers, step=4, data_step=5, skip=torch.ones(()))
    assert late.skip == 1 and late.step == 4 and not late.is_read
    changed = dataclasses.replace(late, measures={**late.measures, "more": 5.0})
    assert changed.is_read and (changed.loss, changed.grad_norm, changed.step) == (1.0, math.inf, 4)
    assert (
        changed.data_exhausted
        and changed.measures == {"kl": 3.0, "more": 5.0}
        and not changed.is_taken
    )


def test_own_updates_and_adaptive_data_get_each_result(tmp_path, late):
    class OwnUpdate(Damaged):
        def update(self, micro_batches):
            return super().update(micro_batches)

    class OwnReading(Damaged):
        def read_result(self, *arguments):
            return super().read_result(*arguments)

    class Adaptive(PretrainDataLoader):
        def observe(self, statistics):
            assert statistics.step == self.__dict__.setdefault("observed", 0) + 1
            self.observed += 1

    for index, kind in enumerate((OwnUpdate, OwnReading)):
        assert (
            run(
                tiny_config(tmp_path / str(index), training__steps=3, metrics__log_freq=9), kind
            ).late_steps
            == []
        )
    trainer = trained(tmp_path / "data", dataloader=Adaptive, training__steps=3)
    assert trainer.late_steps == [] and trainer.dataloader.observed == 3
