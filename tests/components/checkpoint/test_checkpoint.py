"""Checkpoints: exact round trips, resharding, and saves that fail or are interrupted."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.commands import RunningCommand
from tests.components.checkpoint.small_run import Run, Values, assert_same, shard, steps
from tests.conftest import file_size_limit
from tests.processes import run_processes
from torchtitan.components.checkpoint import (
    CheckpointManager,
    CheckpointSaveError,
    ModelState,
    RandomState,
    catalog,
    dcp,
    list_checkpoints,
    saver,
)
from torchtitan.tools.errors import UserError

# Values are compared exactly (torch.equal, ==): saving and loading must not change a bit.

pytestmark = [
    pytest.mark.usefixtures("log"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

# Saving and resuming


@pytest.mark.parametrize(
    "async_mode",
    ["disabled", "async", pytest.param("async_with_pinned_mem", marks=pytest.mark.slow)],
)
def test_resume_is_exact(tmp_path: Path, async_mode: str) -> None:
    straight = Run(tmp_path / "straight", enable=False)
    straight.train(6)

    stopped = Run(tmp_path, interval=3, async_mode=async_mode)
    stopped.train_and_save(4)
    assert steps(tmp_path) == [3]
    stopped.train(2)
    assert_same(stopped.snapshot(), straight.snapshot())  # saving changed nothing

    resumed = Run(tmp_path, seed=1, interval=3)
    assert resumed.manager.load() == 3
    assert resumed.optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    resumed.train(3)
    assert_same(resumed.snapshot(), straight.snapshot())


def test_async_save_keeps_the_state_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = threading.Event()
    write = dcp.save

    def write_late(*args: Any) -> None:
        assert changed.wait(timeout=60)
        write(*args)

    monkeypatch.setattr(dcp, "save", write_late)
    run = Run(tmp_path, async_mode="async")
    run.train(1)
    at_save = run.snapshot()
    run.manager.save(1)
    run.train(2)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.zero_()
    assert steps(tmp_path) == []
    changed.set()
    run.manager.wait()
    assert steps(tmp_path) == [1]

    loaded = Run(tmp_path, seed=1)
    loaded.manager.load()
    assert_same(loaded.snapshot(), at_save)


def test_background_saves_use_the_cuda_device_of_the_manager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a fake CUDA. With two GPUs, rank 1 must not open a context on the first one."""
    devices: list[tuple[str, int]] = []
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_initialized", lambda: True)
        patched.setattr(torch.cuda, "current_device", lambda: 3)
        patched.setattr(
            torch.cuda, "set_device", lambda i: devices.append((threading.current_thread().name, i))
        )
        manager = CheckpointManager.Config(enable=True, interval=1, async_mode="async").build(
            dump_folder=str(tmp_path), states={"model": ModelState([nn.Linear(2, 2)])}
        )
    manager.save(1)
    manager.close()
    assert devices == [("checkpoint_0", 3)]
    assert steps(tmp_path) == [1]


def test_async_save_completes_without_another_call(tmp_path: Path) -> None:
    run = Run(tmp_path, async_mode="async")
    run.train(1)
    run.manager.save(1)
    deadline = time.monotonic() + 60
    while not steps(tmp_path):
        assert time.monotonic() < deadline, "only a later call to the manager completes the save"
        time.sleep(0.01)
    run.manager.close()


def test_each_save_logs_one_line(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    for async_mode in ("disabled", "async"):
        log.clear()
        Run(tmp_path / async_mode, async_mode=async_mode).train_and_save(2)
        saved = [message for message in log.messages if message.startswith("saved ")]
        assert len(saved) == len(log.messages) == 2
        assert "step-2; training was blocked for 0." in saved[1]


def test_saves_are_due_at_the_interval_and_at_the_end(tmp_path: Path) -> None:
    run = Run(tmp_path, interval=2, enable_first_step_checkpoint=True)
    run.train_and_save(5)
    assert steps(tmp_path) == [1, 2, 4]
    run.manager.save(5, last=True)
    assert steps(tmp_path) == [1, 2, 4, 5]
    assert [step for step in range(1, 6) if run.manager.is_due(step)] == [1, 2, 4]
    assert run.manager.is_due(5, last=True)
    idle_configs: list[dict[str, Any]] = [{"enable": False}, {"load_only": True}]
    for config in idle_configs:
        idle = Run(tmp_path / "idle", **config)
        idle.train(1)
        idle.manager.save(1, last=True)
        assert not (tmp_path / "idle").exists()
        assert not idle.manager.is_due(1, last=True)


def test_a_step_is_saved_once(tmp_path: Path) -> None:
    run = Run(tmp_path, async_mode="async")
    run.train(1)
    run.manager.save(1)
    run.manager.save(1, last=True)
    saved_at = (tmp_path / "checkpoint/step-1/complete.json").stat().st_mtime_ns

    resumed = Run(tmp_path)
    resumed.manager.load()
    resumed.manager.save(1, last=True)
    assert (tmp_path / "checkpoint/step-1/complete.json").stat().st_mtime_ns == saved_at


def test_newest_is_the_highest_step(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train_and_save(10)
    os.utime(tmp_path / "checkpoint/step-9")  # neither the newest folder nor the last name
    assert steps(tmp_path) == list(range(1, 11))
    assert Run(tmp_path).manager.load() == 10
    assert Run(tmp_path, load_step=9).manager.load() == 9


def test_keep_latest_k(tmp_path: Path) -> None:
    Run(tmp_path, keep_latest_k=3).train_and_save(5)
    assert steps(tmp_path) == [3, 4, 5]


def test_a_start_removes_what_a_killed_save_did_not(tmp_path: Path) -> None:
    """The process was killed between a save and the removal of older checkpoints."""
    Run(tmp_path, keep_latest_k=0).train_and_save(4)
    for options in ({"keep_latest_k": 0}, {"load_only": True}, {"load_step": 4}):
        Run(tmp_path, **{"keep_latest_k": 2, **options}).manager.load()
        assert steps(tmp_path) == [1, 2, 3, 4]
    Run(tmp_path, keep_latest_k=2).manager.load()
    assert steps(tmp_path) == [3, 4]


def test_loading_an_earlier_step_replaces_later_ones(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    Run(tmp_path).train_and_save(4)
    run = Run(tmp_path, load_step=1, keep_latest_k=1)
    assert run.manager.load() == 1
    assert [m for m in log.messages if "skipped" in m and "step-4" in m]
    torch.manual_seed(5)
    run.train_and_save(1)
    assert steps(tmp_path) == [2, 3, 4]  # this run has not reached steps 3 and 4
    loaded = Run(tmp_path, load_step=2)
    loaded.manager.load()
    assert_same(loaded.snapshot(), run.snapshot())


# Incomplete checkpoints


KILLED_WHILE_SAVING = """
import os, sys, time
from pathlib import Path
import torch
from torchtitan.components.checkpoint import CheckpointManager, ModelState

model = torch.nn.Linear(4, 4)
manager = CheckpointManager.Config(enable=True, interval=1, async_mode=sys.argv[2]).build(
    dump_folder=sys.argv[1], states={"model": ModelState([model])})
manager.save(1)
manager.wait()
fsync = os.fsync

def hang(descriptor):
    Path(sys.argv[1], "saving").touch()
    time.sleep(600)

os.fsync = hang
manager.save(2)
time.sleep(600)
"""


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_a_killed_save_leaves_no_checkpoint(
    tmp_path: Path, async_mode: str, log: pytest.LogCaptureFixture
) -> None:
    process = RunningCommand([sys.executable, "-c", KILLED_WHILE_SAVING, str(tmp_path), async_mode])
    deadline = time.monotonic() + 60
    while not (tmp_path / "saving").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()

    assert (tmp_path / "checkpoint/step-2.partial").exists()
    assert steps(tmp_path) == [1]
    manager = CheckpointManager.Config(enable=True, interval=1).build(
        dump_folder=str(tmp_path), states={"model": ModelState([nn.Linear(4, 4)])}
    )
    assert manager.load() == 1
    assert "step-2.partial was left by an interrupted save or removal" in log.text
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == ["step-1"]


def test_a_folder_without_marker_is_skipped(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    run = Run(tmp_path)
    run.train_and_save(3)
    (tmp_path / "checkpoint/step-3/complete.json").unlink()
    resumed = Run(tmp_path)
    assert resumed.manager.load() == 2
    assert "step-3/complete.json is missing" in log.text
    resumed.train_and_save(1)
    assert steps(tmp_path) == [1, 2, 3]


def test_a_missing_marker_does_not_restart_the_run(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    Run(tmp_path).train_and_save(1)
    path = tmp_path / "checkpoint/step-1"
    # a save interrupted before the rename
    path.joinpath("complete.json").rename(path / "complete.json.tmp")
    assert Run(tmp_path).manager.load() == 0
    assert "step-1: it is incomplete" in log.text
    path.joinpath("complete.json.tmp").unlink()
    with pytest.raises(
        UserError, match=r"(?s)no checkpoint in .*step-1/complete.json is missing.*repair one,"
    ):
        Run(tmp_path).manager.load()


def test_an_interrupted_removal_leaves_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    Run(tmp_path).train_and_save(2)

    def refuse(path: Path) -> None:
        raise PermissionError(f"cannot remove {path}")

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", refuse)
        run = Run(tmp_path, keep_latest_k=2)
        run.manager.load()
        run.train_and_save(1)  # succeeds although the old ones cannot be removed
    assert [
        info.step for info in list_checkpoints(tmp_path / "checkpoint") if not info.is_complete
    ] == [1]
    assert (tmp_path / "checkpoint/step-1.removed.partial/.metadata").exists()
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", refuse)
        assert Run(tmp_path).manager.load() == 3
    assert "step-1.removed.partial: cannot remove" in log.text
    Run(tmp_path).manager.load()  # a new run removes the leftovers
    assert steps(tmp_path) == [2, 3]
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == ["step-2", "step-3"]


BAD_MARKERS: dict[str, tuple[Callable[[dict[str, Any]], str], str]] = {
    "empty file": (lambda good: "", "complete.json is damaged"),
    "not JSON": (lambda good: json.dumps(good)[:-1], "complete.json is damaged"),
    "empty": (lambda good: "{}", "complete.json is damaged"),
    "list": (lambda good: "[]", "complete.json is damaged"),
    "missing key": (
        lambda good: json.dumps({k: v for k, v in good.items() if k != "kind"}),
        "complete.json is damaged",
    ),
    "extra key": (lambda good: json.dumps({**good, "stepz": 1}), "complete.json is damaged"),
    "unknown kind": (lambda good: json.dumps({**good, "kind": "half"}), "complete.json is damaged"),
    "wrong type": (
        lambda good: json.dumps({**good, "world_size": None}),
        "complete.json is damaged",
    ),
    "newer layout": (lambda good: json.dumps({**good, "format_version": 99}), "layout version 99"),
}


@pytest.mark.parametrize("damage", BAD_MARKERS)
def test_a_bad_marker_is_skipped_or_an_error_if_requested(
    tmp_path: Path, damage: str, log: pytest.LogCaptureFixture
) -> None:
    Run(tmp_path).train_and_save(3)
    content, fault = BAD_MARKERS[damage]
    for step in (1, 3):
        marker = tmp_path / f"checkpoint/step-{step}/complete.json"
        marker.write_text(content(json.loads(marker.read_text())))

    assert steps(tmp_path) == [2]
    run = Run(tmp_path)
    assert run.manager.load() == 2
    for step in (1, 3):
        assert [
            m
            for m in log.messages
            if m.startswith("skipped ") and f"step-{step}: " in m and fault in m
        ]
    with pytest.raises(
        UserError,
        match=rf"load_step: step 3 in .* cannot be loaded: .*step-3.*{fault[-9:]}.*complete steps: "
        r"2",
    ):
        CheckpointManager.Config(enable=True, load_step=3).find_start(str(tmp_path))
    with pytest.raises(
        UserError, match=f"initial_load_path: .*step-1.*{fault[-9:]}.*use another checkpoint"
    ):
        path = str(tmp_path / "checkpoint/step-1")
        CheckpointManager.Config(initial_load_path=path).find_start(str(tmp_path / "other"))
    run.train_and_save(1)
    assert steps(tmp_path) == [2, 3]


# Saves that fail


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_full_disk(tmp_path: Path, async_mode: str, log: pytest.LogCaptureFixture) -> None:
    run = Run(tmp_path, dim=256, async_mode=async_mode)
    run.train(1)
    run.manager.save(1)
    run.manager.wait()
    first = run.snapshot()
    run.train(1)
    with file_size_limit(1 << 17):
        run.manager.save(2)
        run.manager.wait()
        assert "step-2 could not be saved: OSError: [Errno 27] File too large" in log.text
        assert os.listdir(tmp_path / "checkpoint") == ["step-1"]
        for end in ({"last": True}, {"stopped": True}):
            with pytest.raises(CheckpointSaveError, match="step-2 could not be saved"):
                run.manager.save(2, **end)
        run.manager.save(3)
        run.manager.wait()
    with pytest.raises(CheckpointSaveError, match="step-3 could not be saved"):
        run.manager.close()

    resumed = Run(tmp_path, dim=256, seed=1)
    assert resumed.manager.load() == 1
    assert_same(resumed.snapshot(), first)
    resumed.train_and_save(1)
    assert steps(tmp_path) == [1, 2]


def test_full_tmpfs(tmp_path: Path) -> None:
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(mounted)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs is not allowed here")
    try:
        run = Run(mounted, dim=256)
        run.train(1)
        with pytest.raises(CheckpointSaveError, match="No space left on device"):
            run.train_and_save(2)
        assert steps(mounted) == [2]
    finally:
        subprocess.run(["umount", str(mounted)], check=True)


def test_unwritable_folder(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    (tmp_path / "checkpoint").write_text("a file in place of the folder")
    run = Run(tmp_path)
    run.train(1)
    run.manager.save(1)
    assert (
        "step-1 could not be saved: NotADirectoryError" in log.text or "FileExistsError" in log.text
    )
    with pytest.raises(CheckpointSaveError):
        run.manager.save(1, last=True)
    run.manager.close()  # reported only once


def test_ctrl_c_is_not_a_failed_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    run = Run(tmp_path)
    run.train(1)
    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.manager.save(1)
    assert steps(tmp_path) == []


# Model-only checkpoints and starting from another run


def test_model_only_final_save(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    run = Run(tmp_path, interval=2, last_save_model_only=True, keep_latest_k=1)
    run.train(2)
    run.manager.save(2)
    at_step_2 = run.snapshot()
    run.train(1)
    run.manager.save(3, last=True)
    run.manager.close()
    assert [(info.step, info.kind) for info in list_checkpoints(tmp_path / "checkpoint")] == [
        (2, "full"),
        (3, "model_only"),
    ]

    resumed = Run(tmp_path, seed=1)
    assert resumed.manager.load() == 2
    assert "step-3: it holds the model only, so a run cannot resume from it" in log.text
    assert_same(resumed.snapshot(), at_step_2)
    resumed.train(1)
    resumed.manager.save(3, last=True)
    assert list_checkpoints(tmp_path / "checkpoint")[-1].kind == "full"


def test_a_stopped_run_saves_everything(tmp_path: Path) -> None:
    run = Run(tmp_path, interval=100, last_save_model_only=True, async_mode="async")
    run.train(2)
    run.manager.save(2, stopped=True)
    assert steps(tmp_path) == [2]
    resumed = Run(tmp_path, seed=1)
    assert resumed.manager.load() == 2
    assert_same(resumed.snapshot(), run.snapshot())


def test_a_model_only_checkpoint_cannot_be_resumed(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, interval=100, last_save_model_only=True)
    run.train(2)
    run.manager.save(2, last=True)

    assert Run(tmp_path).manager.load() == 0
    assert "step-2: it holds the model only" in log.text
    with pytest.raises(UserError, match="step 2 .* holds the model only.*initial_load_path"):
        Run(tmp_path, load_step=2).manager.load()

    other = Run(tmp_path / "other", seed=1, initial_load_path=str(tmp_path / "checkpoint/step-2"))
    assert other.manager.load() == 0
    assert torch.equal(other.model[1].weight, run.model[1].weight)
    with pytest.raises(UserError, match="initial_load_model_only"):
        Run(
            tmp_path / "other",
            initial_load_path=str(tmp_path / "checkpoint/step-2"),
            initial_load_model_only=False,
        ).manager.load()


@pytest.mark.parametrize("enable", [False, True])
def test_initial_load_path_with_an_empty_checkpoint_folder(tmp_path: Path, enable: bool) -> None:
    source = Run(tmp_path / "source")
    source.train_and_save(3)
    path = str(tmp_path / "source/checkpoint/step-3")
    (tmp_path / "run/checkpoint/step-9").mkdir(parents=True)  # not a checkpoint
    (tmp_path / "run/checkpoint/step-9.partial").mkdir()

    run = Run(tmp_path / "run", seed=1, enable=enable, initial_load_path=path)
    fresh_optimizer = run.states["optimizer"].state_dict()
    assert run.manager.load() == 0
    assert torch.equal(run.model[0].weight, source.model[0].weight)
    assert_same(run.states["optimizer"].state_dict(), fresh_optimizer)
    assert run.trainer.values == {"step": 0}

    run = Run(
        tmp_path / "run",
        seed=1,
        enable=enable,
        initial_load_path=path,
        initial_load_model_only=False,
    )
    assert run.manager.load() == 3
    assert_same(run.snapshot(), source.snapshot())


def test_resuming_takes_precedence_over_initial_load_path(tmp_path: Path) -> None:
    Run(tmp_path).train_and_save(1)
    assert Run(tmp_path, initial_load_path="/gone/since/then").manager.load() == 1


def test_invalid_initial_load_path(tmp_path: Path) -> None:
    Run(tmp_path / "source").train_and_save(2)
    (tmp_path / "empty").mkdir()
    (tmp_path / "source/checkpoint/step-7").mkdir()
    for path, message in (
        (tmp_path / "absent", "absent does not exist"),
        (tmp_path / "empty", "empty is not a checkpoint"),
        (tmp_path / "source/checkpoint/step-7", "step-7 is incomplete"),
        (tmp_path / "source/checkpoint", "use one of them, such as .*step-2"),
        (tmp_path / "source", "use one of them, such as .*step-2"),
    ):
        config = CheckpointManager.Config(initial_load_path=str(path))
        with pytest.raises(UserError, match=message):
            config.find_start(str(tmp_path / "run"))
        with pytest.raises(UserError, match=message):
            config.build(
                dump_folder=str(tmp_path / "run"), states={"model": ModelState([nn.Linear(1, 1)])}
            ).load()


# User errors


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"interval": 0}, "checkpoint.interval is 0, but must be"),
        ({"keep_latest_k": -1}, "checkpoint.keep_latest_k is -1, but must be"),
        ({"load_step": 7, "enable": False}, "checkpoint.load_step 7 requires --checkpoint.enable"),
        ({"load_step": -2}, "checkpoint.load_step is -2, but must be a step"),
        ({"load_step": 7}, "step 7 in .* does not exist; complete steps: 9, 10"),
        ({"load_step": 8}, "step 8 in .* is incomplete; complete steps: 9, 10"),
        ({"load_step": 0}, "step 0 in .* does not exist"),
    ],
)
def test_invalid_options(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    run = Run(tmp_path)
    run.trainer.values["step"] = 8
    run.train_and_save(2)
    (tmp_path / "checkpoint/step-8").mkdir()
    checked = CheckpointManager.Config(**{"enable": True, **config})
    with pytest.raises(UserError, match=message):
        checked.validate()
        checked.find_start(str(tmp_path))
    with pytest.raises(UserError, match=message):
        Run(tmp_path, **config).manager.load()


def test_a_shape_mismatch_names_the_tensor_and_changes_nothing(tmp_path: Path) -> None:
    Run(tmp_path).train_and_save(1)
    run = Run(tmp_path, dim=24)
    before = run.snapshot()
    with pytest.raises(
        UserError, match=r"model\.1\.bias: \[16\] in the checkpoint, \[24\] in this run"
    ) as raised:
        run.manager.load()
    assert "12 tensors differ" in str(raised.value)  # 4 parameters and the 8 averages of AdamW
    assert_same(run.snapshot(), before)


def test_missing_and_unexpected_tensors_are_named(tmp_path: Path) -> None:
    def manager(model: nn.Module) -> CheckpointManager:
        return CheckpointManager.Config(enable=True, interval=1).build(
            dump_folder=str(tmp_path), states={"model": ModelState([model])}
        )

    manager(nn.Linear(2, 3)).save(1)
    with pytest.raises(
        UserError, match=r"model\.bias: \[3\] in the checkpoint, absent in this run"
    ):
        manager(nn.Linear(2, 3, bias=False)).load()
    larger = nn.Linear(2, 3)
    larger.register_buffer("scale", torch.ones(1))
    with pytest.raises(
        UserError, match=r"model\.scale: absent in the checkpoint, \[1\] in this run"
    ):
        manager(larger).load()


def test_exclude_from_loading(tmp_path: Path) -> None:
    source = Run(tmp_path)
    source.train_and_save(2)
    run = Run(tmp_path, seed=1, exclude_from_loading=["optimizer", "random"])
    fresh_optimizer, random_state = run.states["optimizer"].state_dict(), torch.get_rng_state()
    assert run.manager.load() == 2
    assert torch.equal(run.model[0].weight, source.model[0].weight)
    assert_same(run.states["optimizer"].state_dict(), fresh_optimizer)
    assert torch.equal(torch.get_rng_state(), random_state)
    with pytest.raises(UserError, match="no state 'optimizers'; did you mean 'optimizer'"):
        Run(tmp_path, exclude_from_loading=["optimizers"])


def test_missing_state(tmp_path: Path) -> None:
    Run(tmp_path).train_and_save(1)
    for excluded in ([], ["average"]):
        model = nn.Sequential(
            nn.Embedding(32, 16), nn.Linear(16, 16), nn.Linear(16, 32, bias=False)
        )
        manager = CheckpointManager.Config(enable=True, exclude_from_loading=excluded).build(
            dump_folder=str(tmp_path),
            states={"model": ModelState([model]), "average": Values(decay=0.9)},
        )
        if excluded:
            assert manager.load() == 1
        else:
            with pytest.raises(
                UserError, match="has no state 'average'.*add average to --checkpoint.exclude"
            ):
                manager.load()


def test_missing_rank_state(tmp_path: Path) -> None:
    Run(tmp_path).train_and_save(1)
    position = {"position": Values(n=0)}
    with pytest.raises(
        UserError, match="has no state 'position'.*add position to --checkpoint.exclude"
    ):
        Run(tmp_path, rank_states=position).manager.load()
    assert (
        Run(tmp_path, rank_states=position, exclude_from_loading=["position"]).manager.load() == 1
    )


# States


def test_state_may_change_structure(tmp_path: Path) -> None:
    saved = {
        "position": 7,
        "workers": [{"epoch": 1.5}, None],
        "nothing": {},
        "moments": (1, float("inf")),
    }
    states = {"data": Values(**saved)}
    CheckpointManager.Config(enable=True, interval=1).build(
        dump_folder=str(tmp_path), states=states
    ).save(1)
    loaded = Values(moments=(0, 0))
    manager = CheckpointManager.Config(enable=True).build(
        dump_folder=str(tmp_path), states={"data": loaded}
    )
    assert manager.load() == 1
    assert loaded.values == saved


def test_a_value_that_is_not_json_is_named(tmp_path: Path) -> None:
    manager = CheckpointManager.Config(enable=True).build(
        dump_folder=str(tmp_path), states={"data": Values(x=Path())}
    )
    with pytest.raises(TypeError, match="state 'data' must be .*PosixPath"):
        manager.save(1, last=True)


def test_ranks_with_different_settings_are_merged() -> None:
    """Two pipeline stages, each with the optimizer settings of its own parameters."""
    first = dcp.encode("optimizer", {"param_groups.a.lr": 0.1, "state.a.step": torch.ones(())})
    second = dcp.encode("optimizer", {"param_groups.b.lr": 0.2})
    assert dcp.decode(first | second, {}) == {
        "param_groups.a.lr": 0.1,
        "param_groups.b.lr": 0.2,
        "state.a.step": torch.ones(()),
    }


@pytest.mark.slow
def test_model_state_has_canonical_names() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    def build() -> nn.Sequential:
        return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))

    plain, inner = build(), build()
    inner[0] = checkpoint_wrapper(inner[0])
    wrapped = cast(nn.Module, torch.compile(inner))  # never called, so never compiled
    assert list(ModelState([wrapped]).state_dict()) == list(plain.state_dict())
    ModelState([wrapped]).load_state_dict(plain.state_dict())
    assert_same(ModelState([wrapped]).state_dict(), plain.state_dict())


def test_model_state_of_several_parts_is_strict() -> None:
    whole_model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
    parts = [nn.ModuleDict({"0": nn.Linear(2, 3)}), nn.ModuleDict({"1": nn.Linear(3, 4)})]
    ModelState(parts).load_state_dict(whole_model.state_dict())
    assert_same(ModelState(parts).state_dict(), whole_model.state_dict())
    for wrong in ({}, {**whole_model.state_dict(), "2.weight": torch.ones(1)}):
        with pytest.raises(UserError, match=r"0\.weight|2\.weight"):
            ModelState(parts).load_state_dict(wrong)


def test_random_state() -> None:
    def draw() -> list[float]:
        return [
            torch.rand(1).item(),
            numpy.random.rand(),
            numpy.random.randn(),
            random.random(),
            random.gauss(),
        ]

    draw()  # leaves half of a pair of normal numbers pending in numpy and in Python
    state = json.loads(
        json.dumps({k: v for k, v in RandomState().state_dict().items() if k != "cpu"})
    )
    state["cpu"] = torch.get_rng_state()
    expected = draw()
    assert draw() != expected
    RandomState().load_state_dict(state)
    assert draw() == expected


def test_random_state_of_the_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fake CUDA device, because the CPU has no separate generator."""

    class Device:
        state = torch.tensor([1, 2, 3], dtype=torch.uint8)

        def get_rng_state(self) -> torch.Tensor:
            return self.state.clone()

        def set_rng_state(self, state: torch.Tensor) -> None:
            self.state = state

    device = Device()
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda")
    )
    monkeypatch.setattr(torch, "get_device_module", lambda accelerator: device)
    saved = RandomState().state_dict()
    device.state += 1
    RandomState().load_state_dict({key: value for key, value in saved.items() if key != "cuda"})
    # without a saved state for this device, its state is unchanged
    assert device.state.tolist() == [2, 3, 4]
    RandomState().load_state_dict(saved)
    assert device.state.tolist() == [1, 2, 3]


@pytest.mark.slow
def test_import_does_not_load_dcp() -> None:
    code = (
        "import sys, torchtitan.components.checkpoint; sys.exit('torch.distributed.checkpoint' in "
        "sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# Several processes


def _train_sharded(rank: int, folder: Path) -> None:
    data = Values(position=0)
    run = Run(folder, wrap=shard, seed=1, async_mode="async", rank_states={"data": data})
    assert run.manager.load() == 1
    assert data.values == {"position": 100}  # the saved run had only rank 0
    torch.save(run.snapshot(), folder / f"loaded-{rank}.pt")

    torch.manual_seed(rank)
    run.train(1)
    data.values = {"position": 200 + rank}
    run.manager.save(2)
    at_save, random_state = run.snapshot(), torch.get_rng_state()
    run.train(1)
    run.manager.close()
    if rank == 0:
        torch.save(at_save, folder / "trained.pt")
        torch.save(random_state, folder / "random.pt")

    data = Values(position=0)
    again = Run(folder, wrap=shard, seed=2, rank_states={"data": data})
    assert again.manager.load() == 2
    assert data.values == {"position": 200 + rank}
    assert torch.equal(torch.get_rng_state(), random_state)
    assert_same(again.snapshot(), at_save)


def _errors_on_every_rank(rank: int, folder: Path) -> None:
    with pytest.raises(UserError, match="step 5 .* does not exist"):
        Run(folder, wrap=shard, load_step=5).manager.load()
    with pytest.raises(UserError, match=r"model\.1\.bias"):
        Run(folder, wrap=shard, dim=24).manager.load()
    run = Run(folder, wrap=shard)
    run.manager.load()
    run.train(1)
    _out_of_memory(rank, folder)
    if rank == 1:  # only this rank's disk is full
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, resource.RLIM_INFINITY))
    run.manager.save(3)
    assert "step-3 could not be saved: OSError: [Errno 27]" in run.manager._saver.failure
    dist.barrier()
    assert not (folder / "checkpoint/step-3.partial").exists()
    assert steps(folder) == [1, 2]
    dist.barrier()
    with pytest.raises(CheckpointSaveError, match="Errno 27"):
        run.manager.save(3, last=True)


def _out_of_memory(rank: int, folder: Path) -> None:
    def fail(*args: Any) -> None:
        raise MemoryError("too large")

    stage = saver.stage
    if rank == 1:
        saver.stage = fail
    try:
        run = Run(folder, wrap=shard, async_mode="async")
        run.manager.save(3)
        assert "step-3 could not be saved: MemoryError: too large" in run.manager._saver.failure
    finally:
        saver.stage = stage


def _unexpected_errors_on_every_rank(folder: Path) -> None:
    def fail(*args: Any) -> None:
        raise error  # on rank 0, the only one that starts a save

    start_partial, catalog.start_partial = catalog.start_partial, fail
    try:
        for async_mode in ("disabled", "async"):
            run = Run(folder, wrap=shard, async_mode=async_mode)
            error: Exception = KeyError("storage")
            run.manager.save(4)
            run.manager.wait()
            assert "step-4 could not be saved: KeyError: 'storage'" in run.manager._saver.failure
            error = TypeError("bug")
            with pytest.raises(TypeError, match="bug"):
                run.manager.save(4)
                run.manager.wait()
    finally:
        catalog.start_partial = start_partial


def _train_and_fail(folder: Path) -> None:
    rank = dist.get_rank()
    _train_sharded(rank, folder)
    _unexpected_errors_on_every_rank(folder)
    _errors_on_every_rank(rank, folder)


def test_resharding_from_one_process_to_two_and_back(tmp_path: Path) -> None:
    run = Run(tmp_path, rank_states={"data": Values(position=100)})
    run.train_and_save(1)
    run_processes(_train_and_fail, 2, tmp_path)
    for rank in range(2):
        assert_same(torch.load(tmp_path / f"loaded-{rank}.pt"), run.snapshot())

    data = Values(position=0)
    back = Run(tmp_path, seed=3, rank_states={"data": data})
    assert back.manager.load() == 2
    assert_same(back.snapshot(), torch.load(tmp_path / "trained.pt"))
    assert data.values == {"position": 200}
    assert torch.equal(torch.get_rng_state(), torch.load(tmp_path / "random.pt"))
