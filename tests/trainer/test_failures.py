"""Errors and exits in users' code: they are named, the last complete step is saved, and the run
does not succeed."""

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.commands import run_command
from tests.experiments.test_rl import folder, train_rl  # noqa: F401 (a fixture)
from tests.processes import run_processes
from tests.training import TINY, flags, read_metrics, run, tiny_config, train
from torchtitan.components.rollout.rewards import Rewards
from torchtitan.distributed.process_group import sum_over_ranks
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger
from torchtitan.trainer import Callback, Trainer
from torchtitan.trainer.deferred_results import DeferredResults

OPTIONS = {"checkpoint__enable": True, "checkpoint__interval": 100, "training__steps": 4}
EXITS = [SystemExit(0), SystemExit, GeneratorExit, asyncio.CancelledError, KeyboardInterrupt]


class Failing(Callback):
    """Raises an error in a method of step 3."""

    @dataclass(kw_only=True, slots=True)
    class Config(Callback.Config):
        method: str = ""
        exits: bool = True
        rank: int = 0

    def fail(self, method: str) -> None:
        if (
            method == self.config.method
            and self.trainer.step >= 2
            and self.trainer.rank == self.config.rank
        ):
            raise SystemExit(0) if self.config.exits else ValueError("mine")

    def on_batches(self, micro_batches):
        self.fail("on_batches")

    @contextlib.contextmanager
    def around_step(self, step):
        self.fail("around_step")
        yield
        self.fail("after around_step")

    def before_save(self):
        self.fail("before_save")

    def on_step(self, outcome):
        self.fail("on_step")

    def after_step(self, outcome):
        self.fail("after_step")


class FailingLoss(Trainer):
    """Raises an error in the loss of step 3."""

    error: BaseException | type[BaseException] = SystemExit

    def compute_loss(self, batch):
        if self.step == 2:
            raise self.error
        return super().compute_loss(batch)


class OwnLoss(Trainer):
    """The same loss without the error."""

    def compute_loss(self, batch):
        return super().compute_loss(batch)


def saved_steps(path: Path) -> list[int]:
    return sorted(
        int(checkpoint.name.removeprefix("step-")) for checkpoint in path.glob("checkpoint/step-*")
    )


@contextlib.contextmanager
def capture_logs():
    """Yield the list of messages that are logged in the block."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def with_failing(path: Path, **options: object):
    config = tiny_config(path, **OPTIONS)
    config.callbacks = [*config.callbacks, Failing.Config(**options)]
    return config


@pytest.mark.parametrize("method", ["on_batches", "on_step", "after_step"])
@pytest.mark.parametrize("exits", [True, False])
def test_a_failing_callback_ends_the_run_after_a_save(tmp_path, method, exits):
    """The run resumes with the numbers of one that never stopped."""
    train(tmp_path / "straight", **OPTIONS)
    expected, message = (UserError, "the run was ended by") if exits else (ValueError, "mine")
    with pytest.raises(expected, match=message):
        run(with_failing(tmp_path / "run", method=method, exits=exits))
    assert saved_steps(tmp_path / "run") == [2]
    train(tmp_path / "run", **OPTIONS)
    numbers = [read_metrics(tmp_path / name, "loss", "grad_norm") for name in ("run", "straight")]
    assert numbers[0] == numbers[1]


@pytest.mark.parametrize("error", EXITS)
def test_an_exit_in_a_loss_is_named_and_the_last_step_is_saved(tmp_path, error, monkeypatch):
    train(tmp_path / "straight", trainer_class=OwnLoss, **OPTIONS)
    monkeypatch.setattr(FailingLoss, "error", error)
    with pytest.raises(
        UserError, match=r"the run was ended by .*test_failures\.py, line \d+, in compute_loss"
    ):
        train(tmp_path / "run", trainer_class=FailingLoss, **OPTIONS)
    assert saved_steps(tmp_path / "run") == [2]
    train(tmp_path / "run", trainer_class=OwnLoss, **OPTIONS)
    numbers = [read_metrics(tmp_path / name, "loss", "grad_norm") for name in ("run", "straight")]
    assert numbers[0] == numbers[1]


def test_weights_between_two_steps_are_not_saved(tmp_path, caplog):
    class FailingUpdate(Trainer):
        def follow_weights(self):
            super().follow_weights()
            if self.step == 2:
                raise ValueError("after the update")

    with pytest.raises(ValueError, match="after the update"):
        train(tmp_path, trainer_class=FailingUpdate, **OPTIONS)
    assert saved_steps(tmp_path) == [] and "between steps 2 and 3, and are not saved" in caplog.text


@pytest.mark.parametrize("error", [*EXITS[:-1], ZeroDivisionError])
def test_rewards_are_named_with_file_and_line(tmp_path, error):
    name = error.__name__ if isinstance(error, type) else type(error).__name__
    module = "asyncio." if error is asyncio.CancelledError else ""
    lines = [
        "import asyncio",
        "def helper():",
        f"    raise {module}{name}",
        "def score(*args):",
        "    return helper()",
    ]
    (tmp_path / "mine.py").write_text("\n".join(lines))
    with pytest.raises(
        UserError,
        match=rf"score failed: {name}: .*\(.*mine\.py, line 3, in helper; from .*line 5, in score",
    ):
        Rewards([f"{tmp_path}/mine.py:score"], [])("", "", {})


@pytest.mark.parametrize("error", EXITS[:-1])
@pytest.mark.parametrize("kind", ["reward", "rollout"])
def test_an_exit_in_rollouts_saves(folder, tmp_path, error, kind):  # noqa: F811
    name = error.__name__ if isinstance(error, type) else type(error).__name__
    text = f"import asyncio\ndef score(prompt, completion, row):\n    raise {name}\n"
    text += (
        "async def roll(row, engine):\n    await engine.generate(engine.prompt)\n    raise "
        f"{name}\n"
    )
    (tmp_path / "mine.py").write_text(text.replace("raise Cancelled", "raise asyncio.Cancelled"))
    options = {"checkpoint__interval": 100, "training__steps": 2}
    train_rl(
        folder,
        tmp_path / "run",
        **{
            **options,
            "checkpoint__interval": 1,
            "checkpoint__last_save_in_hf": False,
            "checkpoint__export_dtype": None,
        },
    )
    option = {"rewards": [f"{tmp_path}/mine.py:score"], "rollout__function": ""}
    if kind == "rollout":
        option = {"rollout__function": f"{tmp_path}/mine.py:roll"}
    options |= {"training__steps": 4, **option}
    with pytest.raises(
        UserError, match=rf"prompts\.jsonl:\d+: the {kind}.* failed: {name}: .*mine\.py, line \d"
    ):
        train_rl(folder, tmp_path / "run", **options)


def test_an_exit_while_importing_is_named(tmp_path):
    (tmp_path / "mine.py").write_text("x = 1\nraise SystemExit\n")
    with pytest.raises(UserError, match=r"failed: SystemExit:.*mine\.py, line 2"):
        Rewards([f"{tmp_path}/mine.py:score"], [])


def run_own(
    path: Path, trainer: type[Trainer], *, processes: int, **options: object
) -> subprocess.CompletedProcess[str]:
    """Run `torchtitan train` with a trainer of this file, from a module in `path`; the run's
    folder is `path / "run"`."""
    module = path / "mine"
    module.mkdir()
    (module / "__init__.py").touch()
    name = trainer.__name__
    (module / "config_registry.py").write_text(
        f"from tests.trainer.test_failures import {name}\n"
        "from torchtitan.models.llama3.config_registry import llama3_debugmodel\n"
        f"def debugmodel():\n    return {name}.Config.based_on(llama3_debugmodel())\n"
    )
    overrides = {key.replace("__", "."): value for key, value in options.items()}
    words = ["train", "--module", str(module), "--config", "debugmodel"]
    words += flags({**TINY, **overrides, "dump_folder": path / "run"})
    variables = {"NGPU": str(processes), "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-m", "torchtitan.cli.main", *words]
    return run_command(command, env={**os.environ, **variables})


@pytest.mark.slow
def test_the_command_does_not_succeed(tmp_path):
    result = run_own(tmp_path, FailingLoss, processes=1, **OPTIONS)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert (
        "the run was ended by SystemExit" in result.stderr
        and "test_failures.py, line" in result.stderr
    )
    assert saved_steps(tmp_path / "run") == [2]


SAVED_AFTER = {
    "on_batches": 3,
    "around_step": 3,
    "on_step": 3,
    "after_step": 3,
    "after around_step": 4,
    "before_save": 4,
}
"""Methods that fail at step 3 or its end, and the step that is saved: all ranks learn of it in the
next exchange."""


@pytest.mark.slow
def test_a_callback_that_fails_in_a_step_ends_all_after_a_save(tmp_path):
    run_processes(fail_in_steps, 2, tmp_path)
    assert {method: saved_steps(tmp_path / method)[0] for method in SAVED_AFTER} == SAVED_AFTER


def fail_in_steps(path: Path) -> None:
    for method in SAVED_AFTER:
        config = with_failing(path / method, method=method, rank=1)
        config.parallelism.data_parallel_shard_degree = 2
        with pytest.raises(UserError, match="SystemExit"), capture_logs() as logs:
            run(config)
        assert "is not saved" not in "".join(logs), method


class FailingAlone(Trainer):
    """Fails on the second rank in step 3, at a place."""

    place: str = ""

    def fail(self, place: str) -> None:
        if self.step == 2 and self.rank == 1 and place == self.place:
            raise SystemExit("mine") if place == "forward" else ZeroDivisionError("mine")

    def build_dataloader(self, config, **options):
        loader = super().build_dataloader(config, **options)
        read = type(loader).__next__

        class Failing(type(loader)):
            def __next__(loader):
                self.fail("data")
                batch = read(loader)
                self.fail("after data")
                return batch

        loader.__class__ = Failing
        return loader

    def build_loss(self):
        loss = super().build_loss()

        def failing(*args, **inputs):
            self.fail("loss")
            return loss(*args, **inputs)

        return failing

    def post_dataloading_process(self, batch):
        self.fail("batch")
        return super().post_dataloading_process(batch)

    def forward_backward_step(self, batch, n_tokens):
        loss = super().forward_backward_step(batch, n_tokens)
        sum_over_ranks(torch.ones(()))  # takes part, although the loss has failed
        self.fail("after backward")
        return loss


class FailingForward(FailingAlone):
    def forward(self, batch):
        self.fail("forward")
        loss = super().forward(batch)
        self.fail("after forward")
        return loss


ONE_PART = {"parallelism__data_parallel_shard_degree": 1}
LAYOUTS = {
    "fsdp": {"parallelism__data_parallel_shard_degree": 2},
    "late": {"parallelism__data_parallel_shard_degree": 2, "metrics__log_freq": 100},
    "ddp": {**ONE_PART, "parallelism__data_parallel_replicate_degree": 2},
    "cp": {**ONE_PART, "parallelism__context_parallel_degree": 2},
    "pp": {**ONE_PART, "parallelism__pipeline_parallel_degree": 2},
}
WHOLE = ["data", "after data", "batch", "loss", "after backward"]
OWN = ["forward", "after forward"]
FAILURES = [
    *(("fsdp", place) for place in WHOLE + OWN),
    *(("late", place) for place in ("data", "loss")),
    *(("ddp", place) for place in ("data", "loss", "after forward")),
    *(("cp", place) for place in ("loss", "forward")),
    *(("pp", place) for place in ("data", "batch", "loss")),
]
"""Layouts of two ranks, and the place where the second rank fails. "late" reads results late, as on
CUDA."""
RESUMED = ["fsdp-data", "fsdp-after forward", "late-loss"]


@pytest.mark.slow
def test_data_or_a_loss_that_fails_on_one_rank_ends_all_after_a_save(tmp_path):
    """All ranks name the error, and the run resumes with the numbers of one that never stopped."""
    run_processes(fail_alone, 2, tmp_path)
    for name in (f"{layout}-{place}" for layout, place in FAILURES):
        assert saved_steps(tmp_path / name) == ([2, 4] if name in RESUMED else [2]), name
    expected = read_metrics(tmp_path / "straight", "loss", "grad_norm", "lr", "n_tokens_seen")
    for name in RESUMED:
        numbers = read_metrics(tmp_path / name, "loss", "grad_norm", "lr", "n_tokens_seen")
        assert {*numbers} <= {*expected} and numbers[-1][0] == 4, name


def fail_alone(path: Path) -> None:
    options = {**OPTIONS, "training__global_batch_size": 8}
    for layout, place in FAILURES:
        FailingAlone.place = place
        devices = ("cpu",) if layout == "late" else ("cuda",)
        with (
            mock.patch.object(DeferredResults, "device_types", devices),
            pytest.raises(UserError, match=r"rank 1 failed: .*mine \(.*py, line \d+, in fail"),
        ):
            train(
                path / f"{layout}-{place}",
                trainer_class=FailingForward if place in OWN else FailingAlone,
                **options,
                **LAYOUTS[layout],
            )
    FailingAlone.place = ""
    for name in ("straight", *RESUMED):
        train(path / name, trainer_class=FailingAlone, **options, **LAYOUTS["fsdp"])
