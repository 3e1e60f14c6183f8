"""Errors and exits in users' code: they are named, the last complete step is saved, and the run
does not succeed."""

import asyncio
import contextlib
import logging
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.commands import run_command
from tests.experiments.test_rl import OPTIONS as RL_OPTIONS
from tests.experiments.test_rl import folder, train_rl  # noqa: F401 (a fixture)
from tests.processes import run_processes
from tests.training import TINY, flags, read_metrics, run, tiny_config, train
from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.optim.lr_scheduler import LRScheduler
from torchtitan.components.rollout.reward_trial import PLACEHOLDERS
from torchtitan.components.rollout.rewards import Rewards
from torchtitan.config.manager import ConfigManager
from torchtitan.distributed.connections import recorded
from torchtitan.distributed.process_group import init_group_in, sum_over_ranks
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger
from torchtitan.trainer import Callback, Trainer
from torchtitan.trainer.agreement import Agreement
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


class FailingSchedule(LRScheduler):
    """Cannot tell the rate of the step after the third one."""

    @dataclass(kw_only=True, slots=True)
    class Config(LRScheduler.Config):
        fails: bool = True

    def factor(self, steps_taken: int) -> float:
        if self.config.fails and steps_taken >= 3:
            raise ValueError("mine")
        return 1.0


def test_a_failing_schedule_ends_the_run_before_the_update(tmp_path):
    """The last complete step is saved, and the run resumes once the schedule is mended."""

    def run_with(name: str, *, fails: bool) -> None:
        config = tiny_config(tmp_path / name, **OPTIONS)
        config.lr_scheduler = FailingSchedule.Config(fails=fails)
        run(config)

    run_with("straight", fails=False)
    with pytest.raises(ValueError, match="mine"):
        run_with("run", fails=True)
    assert saved_steps(tmp_path / "run") == [2]
    run_with("run", fails=False)
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
        Rewards([f"{tmp_path}/mine.py:score"], []).rated_now("", "", {})


@pytest.mark.parametrize("error", EXITS[:-1])
@pytest.mark.parametrize("kind", ["reward", "rollout"])
def test_an_exit_in_rollouts_saves(folder, tmp_path, error, kind):  # noqa: F811
    name = error.__name__ if isinstance(error, type) else type(error).__name__
    # The trial before the run gets another completion.
    text = "import asyncio\ndef score(prompt, completion, row):\n"
    text += f"    if completion != {PLACEHOLDERS[0]!r}:\n        raise {name}\n    return 1.0\n"
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


class FailingTogether(Trainer):
    """Fails on all ranks in step 3, or after it, at a place."""

    place: str = ""

    def __init__(self, config):
        super().__init__(config)
        layer = next(iter(self.model_parts[0].layers.values()))
        layer.register_forward_pre_hook(lambda *_: self.fail("model", in_training=True))
        layer.register_full_backward_hook(lambda *_: self.fail("backward"))
        if self.validator:
            self.validator.sums_of_batch = self.own_validation_sums

    def fail(self, place: str, *, in_training: bool = False) -> None:
        if self.step == 2 and place == self.place and (not in_training or torch.is_grad_enabled()):
            raise ZeroDivisionError("mine")

    def own_validation_sums(self, batch):
        sums = self.validation_sums(batch)
        self.fail("validation")
        return sums

    def post_dataloading_process(self, batch):
        if torch.is_grad_enabled():
            self.fail("batch")
        return super().post_dataloading_process(batch)

    def next_micro_batches(self, batches):
        micro_batches = super().next_micro_batches(batches)
        self.fail("next_micro_batches")
        return micro_batches

    def build_loss(self):
        loss = super().build_loss()

        def failing(*args, **inputs):
            self.fail("loss", in_training=True)
            return loss(*args, **inputs)

        return failing

    def train_step(self, batches):
        self.fail("train_step")
        return super().train_step(batches)


class FailingOwnUpdate(FailingTogether):
    def update(self, micro_batches):
        outcome = super().update(micro_batches)
        self.fail("update")
        return outcome

    def read_result(self, *sums):
        self.fail("read_result")
        if self.place == "weights" and self.step == 2:
            with torch.no_grad():
                next(self.model_parts[0].parameters()).add_(1.0)
            raise ZeroDivisionError("mine")
        return super().read_result(*sums)


TOGETHER = ["model", "backward", "validation", "train_step", "next_micro_batches", "read_result"]
UNSAVED = ["update", "weights"]
VALIDATED = {
    **OPTIONS,
    "validator__enable": True,
    "validator__dataset": "stories",
    "validator__freq": 2,
    "validator__steps": 1,
    "metrics__log_freq": 1,
}


def fail_together(path: Path, place: str, **options: object) -> str:
    """Let a run fail, and return its messages."""
    FailingTogether.place = place
    own = place in (*UNSAVED, "read_result")
    with pytest.raises((ZeroDivisionError, UserError), match="mine"), capture_logs() as logs:
        train(
            path,
            trainer_class=FailingOwnUpdate if own else FailingTogether,
            **{**VALIDATED, **options},
        )
    FailingTogether.place = ""
    return "\n".join(logs)


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> list[tuple[Any, ...]]:
    """Numbers of a run in one process that does not fail."""
    path = tmp_path_factory.mktemp("straight")
    train(path, **VALIDATED)
    return read_metrics(path, "loss", "grad_norm")


@pytest.mark.parametrize("place", TOGETHER)
def test_an_error_anywhere_before_the_update_saves(tmp_path, straight, place):
    """In one process; the run resumes with the numbers of one that never stopped."""
    fail_together(tmp_path, place)
    assert saved_steps(tmp_path) == [2]
    train(tmp_path, **VALIDATED)
    assert read_metrics(tmp_path, "loss", "grad_norm") == straight


TENSOR = {**ONE_PART, "parallelism__tensor_parallel_degree": 2}
FULL = LAYOUTS["fsdp"]
ON_ALL_RANKS = [
    *((TENSOR, place) for place in ("loss", "model", "validation")),
    *((FULL, place) for place in ("model", "validation", "backward")),
]
"""Layouts of two ranks, and the place where both fail. The last one resumes."""


@pytest.mark.slow
def test_ranks_that_all_fail_save_together(tmp_path):
    """The run resumes with the numbers of one that never stopped."""
    run_processes(fail_on_all_ranks, 2, tmp_path)
    *paths, resumed = (tmp_path / str(number) for number in range(len(ON_ALL_RANKS)))
    assert [saved_steps(path) for path in paths] == [[2]] * len(paths)
    assert saved_steps(resumed) == [2, 4]
    numbers = [read_metrics(path, "loss", "grad_norm") for path in (resumed, tmp_path / "straight")]
    assert numbers[0] == numbers[1]


def fail_on_all_ranks(path: Path) -> None:
    for number, (layout, place) in enumerate(ON_ALL_RANKS):
        fail_together(path / str(number), place, **layout)
    for name in (str(number), "straight"):
        train(path / name, **VALIDATED, **layout)


class FailingModelOfOne(FailingTogether):
    """Fails on the second rank alone, where the others wait for it."""

    def fail(self, place: str, **options: bool) -> None:
        if self.rank == 1:
            super().fail(place, **options)


class FailingUpdateOfOne(FailingModelOfOne, FailingOwnUpdate):
    pass


OF_ONE = [
    *((FULL, place) for place in ("backward", "validation", "train_step", "model")),
    (TENSOR, "loss"),
    (LAYOUTS["pp"], "model"),
]
"""Layouts of two ranks, and the place where one fails while the other waits for it. The first
resumes."""


@pytest.mark.slow
def test_a_rank_that_fails_alone_ends_the_collectives_of_the_others(tmp_path):
    """All ranks save the last step and name the rank that failed, at once, and the run resumes with
    the numbers of one that never stopped. A rank that fails after its update does not save."""
    run_processes(fail_in_own_groups, 2, tmp_path)
    resumed, *paths = (tmp_path / str(number) for number in range(len(OF_ONE)))
    assert [saved_steps(path) for path in paths] == [[2]] * len(paths)
    assert saved_steps(resumed) == [2, 4]
    numbers = [read_metrics(path, "loss", "grad_norm") for path in (resumed, tmp_path / "straight")]
    assert numbers[0] == numbers[1]
    assert saved_steps(tmp_path / "update") == []


def fail_in_own_groups(path: Path) -> None:
    for number, (layout, place) in enumerate(OF_ONE):
        fail_in_own_group(FailingModelOfOne, path / str(number), place, layout)
    logs = fail_in_own_group(FailingUpdateOfOne, path / "update", "update", FULL)
    step = 2 if torch.distributed.get_rank() == 1 else 3  # the other has updated its weights
    assert f"step {step} is not saved, since the ranks cannot save together" in logs
    use_group_in(path)
    for name in ("0", "straight"):
        train(path / name, **VALIDATED, **FULL)


def fail_in_own_group(
    trainer_class: type[Trainer], path: Path, place: str, layout: dict[str, int]
) -> str:
    """Let one rank fail, and return the messages of this one."""
    use_group_in(path / "group")
    trainer_class.place, begun = place, time.monotonic()
    with (
        capture_logs() as logs,
        pytest.raises((ZeroDivisionError, UserError), match="mine") as caught,
    ):
        train(path, trainer_class=trainer_class, **VALIDATED, **layout)
    trainer_class.place = ""
    assert time.monotonic() - begun < 45, place  # no timeout of 60 seconds has passed
    if torch.distributed.get_rank() == 0:
        assert re.match(r"rank 1 failed: .*mine .*py, line \d+, in fail", str(caught.value))
    return "\n".join(logs)


def use_group_in(path: Path) -> None:
    """Replace the default group by one whose connections are recorded, as those of a command."""
    rank = torch.distributed.get_rank()
    torch.distributed.destroy_process_group()
    path.mkdir(parents=True, exist_ok=True)
    with recorded():
        init_group_in(str(path), rank, 2, 60)


OTHER_MODELS = [("dpo", "log_probs"), ("ppo", "compute_loss"), ("ppo", "policy_outputs")]
"""Methods with another model in a micro-batch, before the trained one or within its pass, and the
method of the trainer that fails at its end, or at its beginning."""


@pytest.mark.slow
def test_a_rank_that_fails_completes_the_passes_of_other_models(folder, tmp_path):  # noqa: F811
    run_processes(fail_with_other_models, 2, folder, tmp_path)
    for name, method in OTHER_MODELS:
        assert saved_steps(tmp_path / name / method) == [2], (name, method)


def fail_with_other_models(folder: Path, path: Path) -> None:  # noqa: F811
    for name, method in OTHER_MODELS:
        trainer = trainer_with_other_models(name, folder, path / name / method)
        own = getattr(trainer, method)

        def failing(batch, *more, own=own, trainer=trainer, method=method):
            fails = trainer.step == 2 and trainer.rank == 1 and torch.is_grad_enabled()
            result = None if fails and method == "compute_loss" else own(batch, *more)
            if fails:
                raise ZeroDivisionError("mine")
            return result

        setattr(trainer, method, failing)
        with contextlib.closing(trainer), pytest.raises(UserError, match="rank 1 failed: .*mine"):
            trainer.train()


def trainer_with_other_models(name: str, folder: Path, path: Path) -> Any:  # noqa: F811
    options = {
        **RL_OPTIONS,
        "dump_folder": path,
        "training.steps": 4,
        "checkpoint.enable": True,
        "checkpoint.interval": 100,
        "checkpoint.last_save_in_hf": False,
        "checkpoint.export_dtype": "None",
        "parallelism.data_parallel_shard_degree": 2,
        "validator.enable": False,
    }
    if name == "dpo":
        words = ["--module", "preference", "--config", "dpo_debugmodel"]
        of_rl = ("rollout.", "rewards", "policy.", "dataloader.")
        options = {key: value for key, value in options.items() if not key.startswith(of_rl)}
        options |= {"training.seq_len": 64, "training.global_batch_size": 4}
    else:
        words = ["--module", "ppo", "--config", "ppo", "--policy.beta", "0.1"]
        options |= {
            "hf_assets_path": folder / "model",
            "dataloader.dataset": [folder / "prompts.jsonl"],
            "dataloader.cache_dir": folder / "cache",
        }
    config = ConfigManager().parse_args([*words, *flags(options)]).config
    config.check(world_size=2)
    return config.build()


@pytest.mark.slow
def test_ranks_that_fail_at_other_steps_do_not_save(tmp_path):
    run_processes(reach_agreement, 2)


def reach_agreement() -> None:
    ranks = Ranks(torch.distributed.group.WORLD)
    equal, different, alone = (Agreement(ranks) for _ in range(3))
    assert equal.reach({"step": 2})
    assert not different.reach({"step": ranks.rank})
    assert ranks.rank or not alone.reach({"step": 2}, 0.5)
    torch.distributed.barrier()
    assert not alone.reach({"step": 2})  # the others have left


@pytest.mark.parametrize("place", UNSAVED)
def test_weights_that_any_code_changed_are_not_saved(tmp_path, place):
    messages = fail_together(tmp_path, place)
    assert saved_steps(tmp_path) == []
    assert "between steps 2 and 3, and are not saved" in messages


@pytest.mark.parametrize(("place", "saved"), [("batch", [2]), ("loss", [2]), ("backward", [])])
def test_early_optimizer_steps_are_saved_before_the_first_one(tmp_path, place, saved):
    """The last layers are updated before the backward pass fails in the first one."""
    options = {"optimizer__early_step_in_backward": True, "training__max_norm": "inf"}
    fail_together(tmp_path, place, **options)
    assert saved_steps(tmp_path) == saved


def test_a_failure_in_the_first_step_says_that_nothing_is_saved(tmp_path):
    class Failing(Trainer):
        def train_step(self, batches):
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError), capture_logs() as logs:
        train(tmp_path, trainer_class=Failing, **OPTIONS)
    assert "nothing is saved, since the run has completed no step" in logs
    assert saved_steps(tmp_path) == []
