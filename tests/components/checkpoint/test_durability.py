"""Reliability of checkpoints: damage, failed saves, background saves, remote folders, the best
step, several models."""

import contextlib
import copy
import errno
import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy
import pytest
import torch
from torch import nn

from tests.commands import RunningCommand
from tests.components.checkpoint.small_run import Run, Values, assert_same, shard, steps, unsharded
from tests.processes import run_processes
from torchtitan.components.checkpoint import (
    CheckpointManager,
    CheckpointSaveError,
    ModelState,
    catalog,
    list_checkpoints,
    load_model_state,
    manifest,
    saver,
    verify,
    writer_process,
)
from torchtitan.components.checkpoint.filesystem import LocalFolder, folder_at
from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.checkpoint.saver import Export
from torchtitan.components.checkpoint.writer_process import SharedMemory
from torchtitan.tools import durable
from torchtitan.tools.errors import UserError

# Values are compared exactly (torch.equal, ==): saving and loading must not change a bit.

pytestmark = [
    pytest.mark.usefixtures("log"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

MODES = ["disabled", "async", "async_with_pinned_mem"]


class ModelFile:
    """Assets of a checkpoint."""

    def write(self, folder: Path) -> None:
        (folder / "assets").mkdir()
        (folder / "assets/model.json").write_text('{"flavor": "tiny"}')


def with_assets(folder: Path) -> Run:
    run = Run(folder)
    run.manager.close()
    run.manager = CheckpointManager.Config(enable=True, interval=1).build(
        dump_folder=str(folder), states=run.states, assets=ModelFile()
    )
    return run


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def checkpoint_files(path: Path) -> list[str]:
    return sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())


# Damage


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped byte": (flip_byte, "is damaged"),
    "truncated": (
        lambda path: os.truncate(path, path.stat().st_size - 1),
        "bytes instead of|is damaged",
    ),
    "emptied": (lambda path: path.write_bytes(b""), "has 0 bytes instead of|is damaged"),
    "removed": (lambda path: path.unlink(), "is missing"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_to_any_file_is_found_and_named(tmp_path: Path, damage: str) -> None:
    with_assets(tmp_path).train_and_save(1)
    path = tmp_path / "checkpoint/step-1"
    names = checkpoint_files(path)
    assert names == [
        ".metadata",
        "__0_0.distcp",
        "assets/model.json",
        "complete.json",
        "manifest.json",
    ]
    assert verify(path) == []
    damage_file, message = DAMAGE[damage]
    for name in names:
        whole = (path / name).read_bytes()
        damage_file(path / name)
        found = verify(path)
        assert len(found) == 1 and name in found[0], (name, found)
        assert any(words in found[0] for words in message.split("|")), found
        with pytest.raises(UserError, match=name.replace(".", r"\.")):
            Run(tmp_path / "other", initial_load_path=str(path)).manager.load()
        (path / name).write_bytes(whole)
        assert verify(path) == []


def test_every_bit_of_the_marker_counts(tmp_path: Path) -> None:
    """The manifest does not cover the marker, and one bit is enough to change a step or a loss."""
    Run(tmp_path).train_and_save(1)
    marker = tmp_path / "checkpoint/step-1/complete.json"
    whole = marker.read_bytes()
    for position in range(len(whole)):
        marker.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        assert verify(marker.parent), whole[:position]
        assert steps(tmp_path) == []


def test_files_outside_the_manifest_are_ignored(tmp_path: Path) -> None:
    Run(tmp_path).train_and_save(1)
    (tmp_path / "checkpoint/step-1/NOTES.txt").write_text("notes")
    assert verify(str(tmp_path / "checkpoint/step-1")) == []


def test_manifest_format(tmp_path: Path) -> None:
    import hashlib

    Run(tmp_path).train_and_save(1)
    path = tmp_path / "checkpoint/step-1"
    content = json.loads((path / "manifest.json").read_text())
    assert content["algorithm"] == "sha256"
    assert set(content["files"]) == set(checkpoint_files(path)) - {"manifest.json", "complete.json"}
    for name, entry in content["files"].items():
        data = (path / name).read_bytes()
        assert entry == {"bytes": len(data), "digest": hashlib.sha256(data).hexdigest()}


def test_resuming_falls_back_to_the_newest_intact_checkpoint(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    snapshots = {}
    for step in (1, 2, 3, 4):
        run.train(1)
        run.manager.save(step)
        snapshots[step] = run.snapshot()
    run.manager.close()
    flip_byte(tmp_path / "checkpoint/step-4/__0_0.distcp")
    (tmp_path / "checkpoint/step-3/.metadata").unlink()
    # by its marker alone
    assert CheckpointManager.Config(enable=True).find_start(str(tmp_path)).checkpoint.step == 4

    for step in (3, 4):
        with pytest.raises(
            UserError, match=rf"step-{step} is damaged: .*; load another checkpoint"
        ):
            Run(tmp_path, load_step=step).manager.load()

    resumed = Run(tmp_path, seed=1)
    assert resumed.manager.load() == 2
    assert_same(resumed.snapshot(), snapshots[2])
    assert "step-4: it is damaged: __0_0.distcp is damaged (its digest differs)" in log.text
    assert "step-3: it is damaged: .metadata is missing" in log.text

    resumed.train_and_save(2)  # replaces both damaged ones
    assert [(info.step, info.damage) for info in list_checkpoints(tmp_path / "checkpoint")] == [
        (step, "") for step in (1, 2, 3, 4)
    ]
    again = Run(tmp_path, seed=2)
    assert again.manager.load() == 4
    assert_same(again.snapshot(), snapshots[4])


def test_damaged_checkpoints_are_kept(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    Run(tmp_path, interval=2, keep_latest_k=0).train_and_save(4)
    flip_byte(tmp_path / "checkpoint/step-4/__0_0.distcp")
    run = Run(tmp_path, interval=3, keep_latest_k=1)
    assert run.manager.load() == 2
    run.train_and_save(1)
    run = Run(tmp_path, interval=3, keep_latest_k=1)
    log.clear()
    assert run.manager.load() == 3
    assert "step-4: it was found damaged: __0_0.distcp" in log.text
    run.train_and_save(6)
    assert [
        (info.step, bool(info.damage)) for info in list_checkpoints(tmp_path / "checkpoint")
    ] == [
        (4, True),
        (9, False),
    ]


@pytest.mark.parametrize("load_only", [False, True])
def test_a_run_whose_checkpoints_are_all_damaged_does_not_restart(
    tmp_path: Path, load_only: bool
) -> None:
    Run(tmp_path).train_and_save(2)
    for step in (1, 2):
        flip_byte(tmp_path / f"checkpoint/step-{step}/__0_0.distcp")
    before = checkpoint_files(tmp_path)
    message = (
        r"(?s)no checkpoint in .* step 1: it .* damaged: __0_0.distcp.*step 2: it .* "
        r"damaged: "
        r"__0_0.*repair one"
    )
    message += (
        ", or set --checkpoint.folder"
        if load_only
        else " and remove its damaged.json, or set --checkpoint.folder"
    )
    for _ in range(2):  # the second time, the damage is already recorded
        with pytest.raises(UserError, match=message):
            Run(tmp_path, load_only=load_only).manager.load()
    assert (checkpoint_files(tmp_path) == before) == load_only
    for step in (1, 2):
        flip_byte(tmp_path / f"checkpoint/step-{step}/__0_0.distcp")  # repaired
        (tmp_path / f"checkpoint/step-{step}/damaged.json").unlink(missing_ok=True)
    assert Run(tmp_path).manager.load() == 2


def test_a_run_whose_only_marker_is_damaged_does_not_restart(tmp_path: Path) -> None:
    Run(tmp_path).train_and_save(1)
    flip_byte(tmp_path / "checkpoint/step-1/complete.json")
    with pytest.raises(
        UserError, match=r"(?s)no checkpoint in .*step 1: .*complete.json is damaged"
    ):
        CheckpointManager.Config(enable=True).find_start(str(tmp_path))
    marker = tmp_path / "checkpoint/step-1/complete.json"
    marker.write_text('{"format_version": 1}')
    with pytest.raises(UserError, match="step 1: .*step-1 has layout version 1") as raised:
        CheckpointManager.Config(enable=True).find_start(str(tmp_path))
    assert "damaged" not in str(raised.value)


def test_unreadable_files_do_not_count_as_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    Run(tmp_path).train_and_save(4)
    flip_byte(tmp_path / "checkpoint/step-1/__0_0.distcp")
    digest, read = manifest._digest, manifest.read_document
    bad = {"step-4": "__0_0.distcp", "step-3": "complete.json"}

    def fail(name: str) -> Any:
        raise OSError(errno.EIO, "Input/output error", name)

    monkeypatch.setattr(
        manifest, "_digest", lambda f, n: fail(n) if bad.get(f.name) == n else digest(f, n)
    )
    monkeypatch.setattr(
        manifest, "read_document", lambda f, n: fail(n) if bad.get(f.name) == n else read(f, n)
    )
    assert Run(tmp_path).manager.load() == 2
    assert (
        "step-4: it could not be read: __0_0.distcp cannot be read ([Errno 5] Input/output error"
        in log.text
    )
    assert "step-3/complete.json could not be read ([Errno 5]" in log.text
    with pytest.raises(UserError, match=r"step-4 could not be read: __0_0.distcp"):
        Run(tmp_path, load_step=4).manager.load()
    bad["step-2"] = "manifest.json"
    with pytest.raises(
        UserError, match=r"(?s)step 1: it is damaged: __0.*step 2: it could not be read: manifest"
    ):
        Run(tmp_path).manager.load()
    assert [path.parent.name for path in tmp_path.rglob("damaged.json")] == ["step-1"]
    bad.clear()
    assert Run(tmp_path).manager.load() == 4


def test_digesting_is_divided_by_size() -> None:
    sizes = {"a": 10, "b": 7, "c": 5, "d": 5, "e": 1}
    shares = manifest.split_by_size(sizes, 3)
    assert sorted(name for share in shares for name in share) == sorted(sizes)
    assert max(sum(sizes[name] for name in share) for share in shares) == 10
    assert manifest.split_by_size({"a": 1}, 3) == [["a"], [], []]


def _errors_that_cannot_be_pickled(ranks: Ranks) -> None:
    def fail() -> None:
        error.holds = lambda: None
        raise error

    error: Any = RuntimeError("client")
    with pytest.raises(OSError, match="RuntimeError.'client'"):
        ranks.broadcast_from_rank0(fail)
    error = UserError("remedy")
    with pytest.raises(UserError, match="^remedy$"):
        ranks.all_ranks_or_raise(fail)


def _digest_on_two_ranks(folder: Path) -> None:
    import torch.distributed as dist

    rank = dist.get_rank()
    ranks = Ranks(dist.group.WORLD)
    digested: list[str] = []
    digest = manifest._digest

    def counted(checkpoint: Any, name: str) -> str:
        digested.append(name)
        return digest(checkpoint, name)

    manifest._digest = counted
    run = Run(folder, seed=3)
    run.train(1)
    run.manager.save(1)
    _errors_that_cannot_be_pickled(ranks)
    gathered = ranks.gather(sorted(digested))
    assert all(gathered) and sorted(gathered[0] + gathered[1]) == [
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
    ]
    digested.clear()
    assert run.manager.load() == 1
    assert sorted(digested) == gathered[rank]
    run.train(1)
    run.manager.save(2)
    dist.barrier()
    if rank == 0:
        flip_byte(folder / "checkpoint/step-2/__1_0.distcp")
    dist.barrier()
    damaged = LocalFolder(folder / "checkpoint/step-2")
    assert verify(damaged) == catalog.find_damage(damaged, ranks).lines
    assert Run(folder).manager.load() == 1

    unshared = Run(folder, folder="memory://local/to/each/rank")  # like a local disk of each host
    unshared.manager.save(1)
    assert (
        "rank 0 cannot see __1_0.distcp; put memory://local/to/each/rank on a shared file system"
        in unshared.manager._saver.failure
    )

    def fail(checkpoint: Any, name: str) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", name)

    if rank == 1:
        manifest._digest = fail
    run.manager.save(3)
    assert "step-3 could not be saved: PermissionError" in run.manager._saver.failure
    dist.barrier()
    assert [path.name for path in sorted((folder / "checkpoint").iterdir())] == ["step-1", "step-2"]
    dist.barrier()


def test_two_ranks_divide_the_digesting(tmp_path: Path) -> None:
    run_processes(_digest_on_two_ranks, 2, tmp_path)


# Saving in the background


@pytest.mark.slow
def test_the_writer_process_saves_the_values_of_the_step(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, async_mode="async_with_pinned_mem")
    run.train(1)
    run.manager.save(1)
    run.manager.wait()
    process = run.manager._saver._process
    assert process is not None and process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)  # an arbitrarily slow writer
    run.train(1)
    at_save = run.snapshot()
    begun = time.perf_counter()
    run.manager.save(2)
    assert time.perf_counter() - begun < 5  # otherwise it would wait forever
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.zero_()
    time.sleep(0.2)
    assert steps(tmp_path) == [1]
    os.kill(process.pid, signal.SIGCONT)
    run.manager.wait()
    assert steps(tmp_path) == [1, 2]
    run.manager.close()
    assert not Path(f"/proc/{process.pid}").exists()

    loaded = Run(tmp_path, seed=1)
    assert loaded.manager.load() == 2
    assert_same(loaded.snapshot(), at_save)


@pytest.mark.slow
def test_the_writer_process_ignores_local_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ctypes.py").write_text("raise ImportError('wrong module')")
    monkeypatch.chdir(tmp_path)
    # like a script elsewhere
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    run = Run(tmp_path, async_mode="async_with_pinned_mem")
    run.manager.save(1)
    run.manager.close()
    assert steps(tmp_path) == [1]


@pytest.mark.slow
def test_the_writer_process_is_killed_during_a_save(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, async_mode="async_with_pinned_mem")
    run.train(1)
    run.manager.save(1)
    run.manager.wait()
    process = run.manager._saver._process
    assert process is not None and process.pid is not None
    killed = process.pid
    os.kill(killed, signal.SIGSTOP)
    run.train(1)
    run.manager.save(2)
    time.sleep(0.2)
    os.kill(killed, signal.SIGKILL)
    run.manager.wait()
    assert (
        "step-2 could not be saved: ChildProcessError: the checkpoint writer process exited"
        in log.text
    )
    assert os.listdir(tmp_path / "checkpoint") == ["step-1"]
    run.manager.save(3)
    run.manager.close()
    assert steps(tmp_path) == [1, 3] and process.pid != killed


@pytest.mark.slow
def test_the_writer_process_is_killed_between_saves(tmp_path: Path) -> None:
    run = Run(tmp_path, async_mode="async_with_pinned_mem")
    run.manager.save(1)
    run.manager.wait()
    process = run.manager._saver._process
    assert process is not None and process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    # Wait until all threads have ended, and leave the zombie to its parent.
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    run.train(1)
    run.manager.save(2)
    at_save = run.snapshot()
    run.manager.close()
    assert steps(tmp_path) == [1, 2]
    loaded = Run(tmp_path, seed=1)
    assert loaded.manager.load() == 2
    assert_same(loaded.snapshot(), at_save)


KILLED_RANK = """
import sys, time
import torch
from torchtitan.components.checkpoint import CheckpointManager, ModelState

manager = CheckpointManager.Config(enable=True, interval=1, async_mode="async_with_pinned_mem").build(
    dump_folder=sys.argv[1], states={"model": ModelState([torch.nn.Linear(4, 4)])})
manager.save(1)
manager.wait()
print(manager._saver._process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_a_killed_run_leaves_no_process(tmp_path: Path) -> None:
    rank = RunningCommand(
        [sys.executable, "-c", KILLED_RANK, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert rank.stdout is not None
    writer = int(rank.stdout.readline())
    os.kill(writer, signal.SIGSTOP)
    rank.kill()
    rank.wait()
    deadline = time.monotonic() + 30
    while _is_running(writer):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _is_running(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.slow
def test_all_kinds_of_state_pass_through_shared_memory(tmp_path: Path) -> None:
    tensors = {
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 3),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "half": torch.randn(7, dtype=torch.bfloat16),
        "bool": torch.tensor([True, False]),
        "transposed": torch.randn(3, 4).t(),
        "part": torch.randn(100)[10:20],
    }
    states: dict[str, Any] = {"data": Values(**tensors, note="json")}
    config = CheckpointManager.Config(enable=True, interval=1, async_mode="async_with_pinned_mem")
    manager = config.build(dump_folder=str(tmp_path), states=states)
    manager.save(1)
    # larger than the reserved memory
    states["data"].values |= {"part": torch.randn(1000), "note": "grown"}
    manager.save(2)
    manager.close()
    for step, part in ((1, tensors["part"]), (2, states["data"].values["part"])):
        loaded = Values(
            **{name: torch.zeros_like(value) for name, value in tensors.items()}, note=""
        )
        loaded.values["part"] = torch.zeros_like(part)
        manager = CheckpointManager.Config(enable=True, load_step=step).build(
            dump_folder=str(tmp_path), states={"data": loaded}
        )
        manager.load()
        assert_same(
            loaded.values, {**tensors, "part": part, "note": "json" if step == 1 else "grown"}
        )


def test_memory_is_reserved_before_training(tmp_path: Path) -> None:
    run = Run(tmp_path, async_mode="async_with_pinned_mem")
    run.manager.load()
    process = run.manager._saver._process
    assert process is not None and process.pid is None  # the process starts in the background
    reserved, address = process.memory.n_bytes, process.memory._address
    run.train_and_save(1)
    run.manager.close()
    assert reserved > 0 and (process.memory.n_bytes, process.memory._address) == (reserved, address)


def test_memory_that_cannot_be_reserved_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(memory: SharedMemory, states: Any) -> None:
        raise RuntimeError("Registering memory failed with cudaError: 2.")

    run = Run(tmp_path, async_mode="async_with_pinned_mem")
    with monkeypatch.context() as patch:
        patch.setattr(SharedMemory, "reserve", fail)
        assert run.manager.load() == 0
    run.train_and_save(1)
    run.manager.close()
    assert steps(tmp_path) == [1]


FIRST_SAVE = """
import sys
import torch
from torchtitan.components.checkpoint import CheckpointManager, ModelState

manager = CheckpointManager.Config(enable=True, interval=1, async_mode="async").build(
    dump_folder=sys.argv[1], states={"model": ModelState([torch.nn.Linear(4, 4)])})
manager.load()
before = set(sys.modules)
manager._saver._executor.submit = lambda *call: None  # the background may import
manager.save(1)
print(sorted(name for name in set(sys.modules) - before if name.startswith("torch")))
"""


@pytest.mark.slow
def test_the_first_save_in_the_background_imports_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FIRST_SAVE, str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"


def _save_shards_in_processes(folder: Path) -> None:
    run = Run(folder, wrap=shard, async_mode="async_with_pinned_mem")
    run.train(1)
    run.manager.save(1)
    at_save = run.snapshot()
    run.train(1)
    run.manager.close()
    again = Run(folder, wrap=shard, seed=5)
    assert again.manager.load() == 1
    assert_same(again.snapshot(), at_save)


@pytest.mark.slow
def test_two_ranks_write_in_processes(tmp_path: Path) -> None:
    run_processes(_save_shards_in_processes, 2, tmp_path)
    assert Run(tmp_path).manager.load() == 1


def test_pinned_memory_needs_linux_and_a_shared_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="other processes cannot access memory://run; use async"):
        CheckpointManager.Config(
            async_mode="async_with_pinned_mem", folder="memory://run"
        ).validate()
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UserError, match="async_with_pinned_mem requires Linux"):
        CheckpointManager.Config(async_mode="async_with_pinned_mem").validate()


# Saves that fail


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 KiB."""
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=400k", "none", str(mounted)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs is not allowed here")
    yield mounted
    subprocess.run(["umount", str(mounted)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("async_mode", MODES)
def test_full_disk(small_disk: Path, async_mode: str, log: pytest.LogCaptureFixture) -> None:
    run = Run(small_disk, dim=64, async_mode=async_mode)
    run.train(1)
    run.manager.save(1)
    run.manager.wait()
    first = run.snapshot()
    filler = small_disk / "filler"
    filler.write_bytes(bytes(200 << 10))
    run.train(1)
    run.manager.save(2)
    run.manager.wait()
    assert "step-2 could not be saved: OSError: [Errno 28] No space left on device" in log.text
    assert (
        os.listdir(small_disk / "checkpoint") == ["step-1"]
        and verify(small_disk / "checkpoint/step-1") == []
    )
    with pytest.raises(CheckpointSaveError, match="No space left"):
        run.manager.save(2, last=True)
    filler.unlink()
    run.manager.save(2, last=True)
    run.manager.close()
    assert steps(small_disk) == [1, 2]
    loaded = Run(small_disk, dim=64, load_step=1)
    loaded.manager.load()
    assert_same(loaded.snapshot(), first)


@pytest.mark.parametrize("name", ["manifest.json", "complete.json.tmp"])
def test_full_disk_at_the_last_small_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, log: pytest.LogCaptureFixture
) -> None:
    write = LocalFolder.write

    def full(folder: LocalFolder, file: str, content: bytes) -> None:
        if file == name:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(folder, file, content)

    run = Run(tmp_path)
    run.train(1)
    run.manager.save(1)
    run.train(1)
    monkeypatch.setattr(LocalFolder, "write", full)
    run.manager.save(2)
    assert "No space left on device" in log.text
    assert os.listdir(tmp_path / "checkpoint") == ["step-1"]


def test_no_permission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    run.train_and_save(1)

    def refuse(*args: Any, **options: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "step-2.partial")

    monkeypatch.setattr(Path, "mkdir", refuse)
    run.manager.save(2)
    assert (
        "step-2 could not be saved: PermissionError: [Errno 13] Permission denied: 'step-2.partial'"
        in log.text
    )
    with pytest.raises(CheckpointSaveError, match="Permission denied"):
        run.manager.save(2, stopped=True)
    assert steps(tmp_path) == [1]


@pytest.mark.parametrize(
    "async_mode", ["async", pytest.param("async_with_pinned_mem", marks=pytest.mark.slow)]
)
def test_out_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, async_mode: str, log: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, async_mode=async_mode, keep_best=True)

    def fail(*args: Any) -> None:
        raise RuntimeError("not enough memory")

    with monkeypatch.context() as patched:
        patched.setattr(saver, "stage", fail)
        run.manager.save(1, validation_loss=1.0)
    assert "step-1 could not be saved: RuntimeError: not enough memory" in log.text
    run.manager.save(2, validation_loss=2.0)
    run.manager.close()
    assert steps(tmp_path) == [2]


def test_shared_memory_that_cannot_grow_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SharedMemory()
    memory.reserve({"state": {"small": torch.ones(2)}})
    unpinned: list[bool] = []
    monkeypatch.setattr(memory, "_unpin", lambda: unpinned.append(True))

    def fail(*args: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(writer_process.mmap, "mmap", fail)
    with pytest.raises(OSError, match="Cannot allocate"):
        memory.reserve({"state": {"large": torch.ones(1000)}})
    assert not unpinned and memory.n_bytes == 64


def _repeated_step(folder: Path) -> Run:
    """Return a run that is about to save step 2, which already exists."""
    Run(folder).train_and_save(2)
    run = Run(folder, load_step=1)
    run.manager.load()
    run.train(1)
    return run


@pytest.mark.parametrize("method", ["rename", "replace"])
def test_a_checkpoint_that_cannot_be_replaced_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    run = _repeated_step(tmp_path)
    change, former = (
        getattr(Path, method),
        (tmp_path / "checkpoint/step-2/complete.json").stat().st_ino,
    )

    def fail(path: Path, target: Path) -> Any:
        if target.name == ("step-2" if path.name == "step-2.partial" else "complete.json"):
            raise OSError(errno.EIO, "Input/output error")
        return change(path, target)

    monkeypatch.setattr(Path, method, fail)
    run.manager.save(2)
    assert "step-2 could not be saved" in run.manager._saver.failure
    assert sorted(os.listdir(tmp_path / "checkpoint")) == ["step-1", "step-2"]
    assert verify(tmp_path / "checkpoint/step-2") == []
    assert (tmp_path / "checkpoint/step-2/complete.json").stat().st_ino == former


def test_a_replaced_checkpoint_is_removed_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    run = _repeated_step(tmp_path)
    at_save, found = run.snapshot(), []

    def refuse(path: Path) -> None:
        found.append((path.name, steps(tmp_path), verify(tmp_path / "checkpoint/step-2")))
        raise OSError(errno.EBUSY, "Device or resource busy")

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", refuse)
        run.manager.save(2)
    assert found == [("step-2.removed.partial", [1, 2], [])]
    assert (
        not run.manager._saver.failure
        and "step-2 is saved, but the checkpoint it replaces could not be removed: [Errno 16]"
        in log.text
    )
    resumed = Run(tmp_path, seed=1)
    assert resumed.manager.load() == 2
    assert_same(resumed.snapshot(), at_save)


def test_folders_that_cannot_be_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    sync = durable.sync
    number = errno.EINVAL  # a file system that cannot sync folders

    def fail(path: Path) -> None:
        if path.is_dir() and (number == errno.EINVAL or path.name == "step-2"):
            raise OSError(number, os.strerror(number))
        sync(path)

    monkeypatch.setattr(durable, "sync", fail)
    run = with_assets(tmp_path)
    run.manager.save(1, last=True)
    assert not [record for record in log.records if record.levelno >= logging.WARNING]
    number = errno.EIO  # not reported as saved, and no older checkpoint is removed
    run = Run(tmp_path, keep_latest_k=1)
    run.manager.save(2)
    assert "step-2 could not be saved: OSError: [Errno 5]" in log.text
    assert f"saved {tmp_path}/checkpoint/step-2" not in log.text
    with pytest.raises(CheckpointSaveError, match="Input/output error"):
        run.manager.save(2, last=True)
    assert steps(tmp_path) == [1, 2]


# Remote folders


@pytest.fixture
def store() -> Iterator[str]:
    import fsspec

    yield "memory://run/ckpt"
    fsspec.filesystem("memory").store.clear()
    fsspec.filesystem("memory").pseudo_dirs[:] = [""]


def test_remote_run(tmp_path: Path, store: str, log: pytest.LogCaptureFixture) -> None:
    straight = Run(tmp_path / "straight", enable=False)
    straight.train(6)
    stopped = Run(tmp_path, folder=store, interval=2, keep_latest_k=2, async_mode="async")
    stopped.train_and_save(6)
    found = list_checkpoints(store)
    assert [(info.step, info.kind, str(info.path)) for info in found] == [
        (4, "full", f"{store}/step-4"),
        (6, "full", f"{store}/step-6"),
    ]
    assert not (tmp_path / "checkpoint").exists()
    assert verify(f"{store}/step-4") == []

    resumed = Run(tmp_path, seed=1, folder=store, load_step=4)
    assert resumed.manager.load() == 4
    resumed.train(1)
    resumed.manager.save(5, last=True)
    resumed.train(1)
    assert_same(resumed.snapshot(), straight.snapshot())

    other = Run(tmp_path / "other", seed=2, initial_load_path=f"{store}/step-6")
    assert other.manager.load() == 0
    assert torch.equal(other.model[1].weight, straight.model[1].weight)
    with pytest.raises(
        UserError, match=f"{store} is not a checkpoint but contains some; .* {store}/step-6"
    ):
        Run(tmp_path / "other", initial_load_path=store).manager.load()


def test_remote_checkpoints_need_only_the_marker(
    tmp_path: Path, store: str, log: pytest.LogCaptureFixture
) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    Run(tmp_path, folder=store).train_and_save(3)
    memory.rm_file("/run/ckpt/step-3/complete.json")
    memory.pipe_file("/run/ckpt/step-2/__0_0.distcp", b"damaged")
    assert Run(tmp_path, folder=store, load_only=True).manager.load() == 1
    assert [info.step for info in list_checkpoints(store)] == [1, 2, 3]
    run = Run(tmp_path, folder=store)
    assert run.manager.load() == 1
    assert "step-3 was left by an interrupted save or removal" in log.text
    assert [info.step for info in list_checkpoints(store)] == [1, 2]
    assert f"{store}/step-2: it is damaged: __0_0.distcp has 7 bytes instead of" in log.text
    run.train_and_save(2)
    assert [
        info.step for info in list_checkpoints(store) if info.is_complete and not info.damage
    ] == [1, 2, 3]
    assert Run(tmp_path, folder=store).manager.load() == 3


def test_failed_remote_save(
    tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    run = Run(tmp_path, folder=store)
    run.train_and_save(1)

    def fail(self: Any, path: str, value: bytes, **options: Any) -> None:
        raise RuntimeError("503 Slow Down")  # an error type of the storage library

    with monkeypatch.context() as patched:
        patched.setattr(MemoryFileSystem, "pipe_file", fail)
        run.manager.save(2)
    assert "step-2 could not be saved: StoreError: " in log.text and "503 Slow Down" in log.text
    assert [info.path.name for info in list_checkpoints(store)] == ["step-1"]
    run.manager.save(3)
    assert [info.step for info in list_checkpoints(store) if info.is_complete] == [1, 3]


def test_failed_remote_read(
    tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    from fsspec.implementations.memory import MemoryFile

    def fail(self: Any) -> None:
        raise RuntimeError("503 Slow Down")

    run = Run(tmp_path, folder=store)
    run.train_and_save(1)
    with monkeypatch.context() as patched:
        patched.setattr(MemoryFile, "getbuffer", fail)  # used to digest a file in memory
        run.manager.save(2)
        assert (
            "step-2 could not be saved: " in run.manager._saver.failure
            and "503 Slow Down" in log.text
        )
        with pytest.raises(UserError, match="step 1: it could not be read: .*503 Slow Down"):
            Run(tmp_path, folder=store).manager.load()
    assert Run(tmp_path, folder=store).manager.load() == 1


def test_remote_assets(tmp_path: Path, store: str) -> None:
    run = Run(tmp_path)
    manager = CheckpointManager.Config(enable=True, interval=1, folder=store).build(
        dump_folder=str(tmp_path), states=run.states, assets=ModelFile()
    )
    manager.save(1)
    assert folder_at(f"{store}/step-1").read("assets/model.json") == b'{"flavor": "tiny"}'
    assert verify(f"{store}/step-1") == []


def test_file_urls_are_paths(tmp_path: Path) -> None:
    run = Run(tmp_path, folder=f"file://{tmp_path}/elsewhere")
    run.train_and_save(1)
    assert (tmp_path / "elsewhere/step-1/complete.json").exists()
    assert [info.step for info in list_checkpoints(f"file://{tmp_path}/elsewhere")] == [1]
    assert (
        Path(list_checkpoints(f"file://{tmp_path}/elsewhere")[0].path)
        == tmp_path / "elsewhere/step-1"
    )
    other = Run(tmp_path / "other", seed=1, initial_load_path=f"file://{tmp_path}/elsewhere/step-1")
    other.manager.load()
    assert torch.equal(other.model[1].weight, run.model[1].weight)


def test_sizes_that_a_store_lists_are_not_asked_again(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec

    folder = folder_at(store)
    folder.write("empty", b"")
    folder.write("full", b"123")

    def size(*args: Any) -> None:
        raise AssertionError("a request per file")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "size", size)
    assert folder.files() == {"empty": 0, "full": 3}


def test_unavailable_protocols(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UserError, match="nonsense://x/y cannot be opened .* Protocol not known: nonsense"
    ):
        CheckpointManager.Config(enable=True, folder="nonsense://x/y").validate()
    monkeypatch.setitem(sys.modules, "s3fs", None)  # hidden if it is installed
    for options in ({"folder": "s3://bucket/run"}, {"initial_load_path": "s3://bucket/run/step-1"}):
        with pytest.raises(UserError, match="s3://bucket/run.* cannot be opened .*[Ii]nstall s3fs"):
            CheckpointManager.Config(enable=True, **options).find_start("outputs")
    monkeypatch.setattr(Path, "iterdir", lambda path: os.listdir("/nowhere"))
    with pytest.raises(UserError, match="the checkpoints in /tmp cannot be read: No such file"):
        CheckpointManager.Config(enable=True, folder="/tmp").find_start("outputs")
    with pytest.raises(
        UserError, match="last_save_in_hf needs a local --checkpoint.folder, not memory://run"
    ):
        CheckpointManager.Config(
            enable=True, last_save_in_hf=True, folder="memory://run"
        ).validate()


# The best step


def test_the_best_and_the_newest_are_kept(tmp_path: Path) -> None:
    losses = {1: 5.0, 2: 4.0, 3: 3.0, 4: 3.5, 5: 3.2, 6: 3.6, 7: float("nan"), 8: 3.0}
    run = Run(tmp_path, interval=100, keep_best=True, keep_latest_k=1)
    for step in range(1, 6):
        run.train(1)
        assert run.manager.is_due(step, validation_loss=losses[step]) == (step <= 3)
        run.manager.save(step, validation_loss=losses[step])
    assert steps(tmp_path) == [3]
    run.manager.save(5, stopped=True, validation_loss=losses[5])
    assert steps(tmp_path) == [3, 5]

    resumed = Run(tmp_path, interval=2, keep_best=True, keep_latest_k=1)
    assert resumed.manager.load() == 5
    for step in range(6, 9):
        resumed.train(1)
        resumed.manager.save(step, validation_loss=losses[step])
        assert steps(tmp_path) == [3, 6 if step < 8 else 8]
    assert not resumed.manager.is_due(9, validation_loss=3.0)
    resumed.manager.save(9, validation_loss=2.9)
    assert [
        (info.step, info.validation_loss) for info in list_checkpoints(tmp_path / "checkpoint")
    ] == [(9, 2.9)]


def test_the_best_of_another_metric_is_kept(tmp_path: Path) -> None:
    """A higher accuracy is better; 0 counts, other numbers do not, and a restart remembers."""
    accuracy = "evaluation/quiz/accuracy"
    options = {"interval": 100, "keep_best": True, "keep_latest_k": 1, "best_metric": accuracy}
    run = Run(tmp_path, **options)
    for step, value in {1: 0.0, 2: 0.5, 3: 0.25, 4: math.nan}.items():
        measured = {accuracy: value, "evaluation/quiz/perplexity": 9.0}
        run.manager.save(step, validation_loss=5.0 - step, measured=measured)
    run.manager.save(5, stopped=True, validation_loss=0.0)
    run.manager.close()
    found = list_checkpoints(tmp_path / "checkpoint")
    assert [(info.step, info.marker.best_value) for info in found] == [(2, 0.5), (5, None)]

    resumed = Run(tmp_path, **options)
    resumed.manager.load()
    assert not resumed.manager.is_due(6, measured={accuracy: 0.5})
    assert resumed.manager.is_due(6, measured={accuracy: 0.75})
    assert not resumed.manager.is_due(6, validation_loss=-1.0)
    resumed.manager.close()

    lowest = Run(tmp_path, **options, best_goal="min")
    lowest.manager.load()
    assert lowest.manager.is_due(6, measured={accuracy: 0.25})
    assert not lowest.manager.is_due(6, measured={accuracy: 0.75})
    lowest.manager.close()
    with pytest.raises(UserError, match="best_metric 'evaluation/a/b' does not tell whether"):
        CheckpointManager.Config(
            enable=True, keep_best=True, best_metric="evaluation/a/b"
        ).validate()


def test_without_keep_best_the_validation_loss_is_only_recorded(tmp_path: Path) -> None:
    """And `best_metric` is not read, whose name may not tell the goal."""
    run = Run(tmp_path, interval=2, keep_latest_k=1, best_metric="validation_score")
    assert not run.manager.is_due(1, measured={"validation_score": 1.0})
    for step, loss in ((1, 1.0), (2, 2.0), (4, 3.0)):
        run.manager.save(step, validation_loss=loss)
    assert [
        (info.step, info.validation_loss) for info in list_checkpoints(tmp_path / "checkpoint")
    ] == [(4, 3.0)]


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_a_best_step_that_could_not_be_saved_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, async_mode: str
) -> None:
    run = Run(tmp_path, interval=100, keep_best=True, async_mode=async_mode)
    run.manager.save(1, validation_loss=5.0)
    run.manager.wait()

    def fail(*args: Any, **options: Any) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr(catalog, "commit", fail)
        run.manager.save(2, validation_loss=3.0)
        assert run.manager.is_due(3, validation_loss=4.0)  # without waiting for the save
    run.manager.save(3, validation_loss=4.0)
    run.manager.wait()
    assert steps(tmp_path) == [1, 3]


def test_after_load_step_only_earlier_steps_count_for_the_best(tmp_path: Path) -> None:
    run = Run(tmp_path, keep_best=True)
    for step, loss in ((1, 3.0), (3, 2.0)):
        run.train(1)
        run.manager.save(step, validation_loss=loss)
    back = Run(tmp_path, keep_best=True, load_step=1, interval=100, keep_latest_k=1)
    back.manager.load()
    assert back.manager.is_due(2, validation_loss=2.5)
    back.manager.save(2, validation_loss=2.5)
    back.manager.save(4, stopped=True, validation_loss=2.6)
    assert steps(tmp_path) == [2, 4]  # step 3 does not belong to this run


def test_validation_loss_may_be_any_number_type(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.manager.save(1, validation_loss=cast(float, numpy.float32(0.5)))
    run.manager.save(2, validation_loss=2)
    assert [info.validation_loss for info in list_checkpoints(tmp_path / "checkpoint")] == [
        0.5,
        2.0,
    ]


# Several models in one run


class Pair:
    """A policy that is trained, and a reference model with other weights."""

    def __init__(
        self,
        folder: Path,
        *,
        source: Path,
        wrap: Callable[[Any], None] | None = None,
        **config: Any,
    ):
        self.run = Run(folder, wrap=wrap, enable=False)
        reference = Run(folder, seed=9, wrap=wrap, enable=False)
        self.reference: Any = reference.model
        states = {**self.run.states, "reference": ModelState([self.reference])}
        self.loads: list[str] = []

        def load_reference() -> None:
            self.loads.append("reference")
            load_model_state(source, states["reference"])

        self.manager: CheckpointManager = CheckpointManager.Config(
            **{"enable": True, "interval": 1, **config}
        ).build(dump_folder=str(folder), states=states, initial_loads={"reference": load_reference})
        self.states = states

    def snapshot(self) -> dict[str, Any]:
        reference = {
            f"reference.{name}": v
            for name, v in unsharded(self.states["reference"].state_dict()).items()
        }
        return copy.deepcopy({**self.run.snapshot(), **reference})


def _resume_pair_sharded(folder: Path) -> None:
    import torch.distributed as dist

    source = folder / "source/checkpoint/step-3"
    resumed = Pair(folder, source=source, wrap=shard)
    assert resumed.manager.load() == 2 and resumed.loads == []
    assert_same(resumed.snapshot(), torch.load(folder / "pair.pt", weights_only=False))
    resumed.run.train(1)
    resumed.manager.save(3)
    at_save = resumed.snapshot()
    fresh = Pair(folder / "fresh", source=source, wrap=shard)  # each rank reads its shard
    assert fresh.manager.load() == 0 and fresh.loads == ["reference"]
    loaded = {
        name: value for name, value in fresh.snapshot().items() if name.startswith("reference.")
    }
    assert_same(loaded, {name: at_save[name] for name in loaded})
    if dist.get_rank() == 0:
        torch.save(at_save, folder / "pair-of-two.pt")


@pytest.mark.slow
def test_two_models(tmp_path: Path) -> None:
    source = Run(tmp_path / "source", seed=4)
    source.train_and_save(3)
    path = tmp_path / "source/checkpoint/step-3"
    pair = Pair(tmp_path, source=path)
    assert pair.manager.load() == 0 and pair.loads == ["reference"]
    assert torch.equal(pair.reference[1].weight, source.model[1].weight)
    assert not torch.equal(pair.run.model[1].weight, source.model[1].weight)
    for step in (1, 2):
        pair.run.train(1)
        pair.manager.save(step)
    torch.save(pair.snapshot(), tmp_path / "pair.pt")

    run_processes(_resume_pair_sharded, 2, tmp_path)
    back = Pair(tmp_path, source=path)
    assert back.manager.load() == 3 and back.loads == []
    assert_same(back.snapshot(), torch.load(tmp_path / "pair-of-two.pt", weights_only=False))


def test_a_model_only_save_has_all_models(tmp_path: Path) -> None:
    Run(tmp_path / "source").train_and_save(1)
    pair = Pair(tmp_path, source=tmp_path / "source/checkpoint/step-1", last_save_model_only=True)
    pair.manager.load()
    pair.run.train(1)
    pair.manager.save(1, last=True)
    path = tmp_path / "checkpoint/step-1"
    for name in ("model", "reference"):
        model = Run(tmp_path / "unused", seed=7, enable=False).model
        load_model_state(path, ModelState([model]), saved_name=name)
        assert_same(model.state_dict(), dict(pair.states[name].state_dict()))


def test_load_model_state_verifies_and_checks(tmp_path: Path) -> None:
    Run(tmp_path).train_and_save(1)
    path = tmp_path / "checkpoint/step-1"
    with pytest.raises(
        UserError, match=r"model\.0\.weight: \[32, 16\] in the checkpoint, absent in this run"
    ):
        load_model_state(path, ModelState([nn.Linear(2, 2)]))
    with pytest.raises(UserError, match="has no state 'reference'"):
        load_model_state(path, ModelState([nn.Linear(2, 2)]), saved_name="reference")
    flip_byte(path / "__0_0.distcp")
    with pytest.raises(UserError, match="step-1 is damaged: __0_0.distcp is damaged"):
        load_model_state(path, Run(tmp_path, enable=False).states["model"])


def test_initial_loads_of_a_new_run(tmp_path: Path) -> None:
    Run(tmp_path / "source").train_and_save(1)
    path = str(tmp_path / "source/checkpoint/step-1")
    for options, step, expected in (
        ({}, 0, ["model"]),
        # the initial load of the model takes precedence
        ({"initial_load_path": path}, 0, ["model"]),
        (
            {"initial_load_path": path, "initial_load_model_only": False},
            1,
            [],
        ),  # loads everything
        ({"initial_load_path": str(tmp_path / "hf"), "initial_load_in_hf": True}, 0, ["model"]),
    ):
        (tmp_path / "hf").mkdir(exist_ok=True)
        (tmp_path / "hf" / "model.safetensors").touch()
        calls: list[str] = []
        run = Run(tmp_path / "run", enable=False)
        manager = CheckpointManager.Config(**options).build(
            dump_folder=str(tmp_path / "run"),
            states=run.states,
            initial_loads={"model": lambda calls=calls: calls.append("model")},
        )
        assert manager.load() == step
        assert calls == expected, options


def test_initial_loads_of_states_missing_from_the_checkpoint(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    Run(tmp_path).train_and_save(1)
    path = tmp_path / "checkpoint/step-1"
    pair = Pair(tmp_path, source=path)
    assert pair.manager.load() == 1 and pair.loads == ["reference"]
    assert torch.equal(pair.reference[1].weight, pair.run.model[1].weight)
    assert (
        "initialized state reference instead of" in log.text
        and "step-1 (without reference" in log.text
    )
    pair.manager.save(2)
    excluding = Pair(tmp_path, source=path, exclude_from_loading=["reference"])
    assert excluding.manager.load() == 2 and excluding.loads == ["reference"]
    again = Pair(tmp_path, source=path)
    assert again.manager.load() == 2 and again.loads == []
    log.clear()
    Pair(tmp_path / "other", source=path, initial_load_path=str(path)).manager.load()
    assert "step-1 (model only)" in log.text
    with pytest.raises(UserError, match=r"^/nowhere does not exist"):
        load_model_state("/nowhere", pair.states["reference"])


# Final saves in other formats


def export(source: Path, target: Path, ranks: Ranks) -> None:
    """Stand-in for the conversion to Hugging Face: reads the checkpoint of the model and writes
    other files."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(source, target / "model.pt")
    (target / "config.json").write_text("{}")


def exporting(folder: Path, export: Export | None = export, **config: Any) -> Run:
    run = Run(folder, enable=False)
    run.manager = CheckpointManager.Config(
        enable=True, interval=2, last_save_in_hf=True, **config
    ).build(dump_folder=str(folder), states=run.states, export=export)
    return run


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_last_save_in_hf(tmp_path: Path, dtype: str | None, log: pytest.LogCaptureFixture) -> None:
    run = exporting(tmp_path, export_dtype=dtype, keep_latest_k=1)
    run.train(2)
    run.manager.save(2)
    at_step_2 = run.snapshot()
    run.train(1)
    run.manager.save(3, last=True)
    run.manager.close()
    assert [(info.step, info.kind) for info in list_checkpoints(tmp_path / "checkpoint")] == [
        (2, "full"),
        (3, "huggingface"),
    ]
    path = tmp_path / "checkpoint/step-3"
    assert checkpoint_files(path) == ["complete.json", "config.json", "manifest.json", "model.pt"]
    assert verify(path) == []
    weights = torch.load(path / "model.pt", weights_only=False)["model"]
    for name, value in run.model.state_dict().items():
        assert torch.equal(weights[name], value.to(getattr(torch, dtype or "float32"))), name

    resumed = exporting(tmp_path)
    assert resumed.manager.load() == 2
    assert "step-3: it holds a Hugging Face model only, so a run cannot resume from it" in log.text
    assert_same(resumed.snapshot(), at_step_2)
    with pytest.raises(UserError, match="step 3 .* holds a Hugging Face model only"):
        exporting(tmp_path, load_step=3).manager.load()
    with pytest.raises(
        UserError, match="step-3 holds a Hugging Face model; set --checkpoint.initial_load_in_hf"
    ):
        CheckpointManager.Config(initial_load_path=str(path)).find_start(str(tmp_path / "other"))

    flip_byte(path / "model.pt")
    config = CheckpointManager.Config(initial_load_path=str(path), initial_load_in_hf=True)
    manager = config.build(
        dump_folder="other", states=run.states, initial_loads={"model": lambda: None}
    )
    with pytest.raises(UserError, match="step-3 is damaged: model.pt"):
        manager.load()


def test_failed_export(tmp_path: Path) -> None:
    def fail(source: Path, target: Path, ranks: Ranks) -> None:
        (target / "half").touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    run = exporting(tmp_path, fail)
    run.train(2)
    run.manager.save(2)
    message = "step-3 could not be saved: OSError: .*No space left.*the weights were saved there"
    with pytest.raises(CheckpointSaveError, match=message):
        run.manager.save(3, last=True)
    assert [(info.path.name, info.kind) for info in list_checkpoints(tmp_path / "checkpoint")] == [
        ("step-2", "full"),
        ("step-3", "model_only"),
    ]
    other = Run(tmp_path / "other", seed=1, initial_load_path=str(tmp_path / "checkpoint/step-3"))
    other.manager.load()
    assert_same(dict(other.states["model"].state_dict()), dict(run.states["model"].state_dict()))


def test_bfloat16_weights_load_into_a_float32_model(tmp_path: Path) -> None:
    run = Run(tmp_path, last_save_model_only=True, export_dtype="bfloat16")
    run.train(1)
    run.manager.save(1, last=True)
    other = Run(tmp_path / "other", initial_load_path=str(tmp_path / "checkpoint/step-1"))
    other.manager.load()
    for name, value in run.model.state_dict().items():
        assert torch.equal(other.model.state_dict()[name], value.bfloat16().float()), name


def test_a_full_save_is_not_replaced_by_the_final_one(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    """The data ended at a step that was already saved. Replacing it would remove the only
    checkpoint to resume from."""
    run = exporting(tmp_path, keep_latest_k=1)
    run.train(2)
    run.manager.save(2)
    run.manager.save(2, last=True)
    assert "step 2 is already saved (in full) and is kept" in log.text
    resumed = exporting(tmp_path)
    assert resumed.manager.load() == 2
    resumed.train(1)
    for _ in range(2):
        log.clear()
        resumed.manager.save(3, last=True)
    assert log.messages == []  # the second save does nothing
    assert list_checkpoints(tmp_path / "checkpoint")[-1].kind == "huggingface"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"initial_load_in_hf": True},
            "initial_load_in_hf requires --checkpoint.initial_load_path",
        ),
        (
            {
                "initial_load_in_hf": True,
                "initial_load_path": "x",
                "initial_load_model_only": False,
            },
            "--checkpoint.no_initial_load_model_only cannot be combined with",
        ),
        (
            {"initial_load_in_hf": True, "initial_load_path": "hf://some/model"},
            "hf://some/model is a URL.* needs a local folder",
        ),
        (
            {"initial_load_path": "x/step-1", "exclude_from_loading": ["model"]},
            "exclude_from_loading model cannot be combined with --checkpoint.initial_load_path "
            "x/step-1",
        ),
        (
            {"enable": True, "export_dtype": "bfloat16"},
            "export_dtype is bfloat16, .*add --checkpoint.export_dtype None",
        ),
        ({"last_save_in_hf": True}, "last_save_in_hf requires --checkpoint.enable"),
        ({"last_save_model_only": True}, "last_save_model_only requires --checkpoint.enable"),
        ({"export_dtype": "bfloat16"}, "export_dtype requires --checkpoint.enable"),
        ({"keep_best": True}, "keep_best requires --checkpoint.enable"),
        (
            {"last_save_in_hf": True, "export_dtype": "bfloat16"},
            "last_save_in_hf, --checkpoint.export_dtype require .*, add "
            "--checkpoint.no_last_save_in_hf --checkpoint.export_dtype None$",
        ),
        (
            {"enable": True, "load_only": True, "keep_best": True},
            "keep_best cannot be combined with --checkpoint.load_only",
        ),
    ],
)
def test_incompatible_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        CheckpointManager.Config(**options).validate()


def test_missing_export_and_initial_load(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="last_save_in_hf: this model cannot be exported to Hugging Face"
    ):
        exporting(tmp_path, None)
    config = CheckpointManager.Config(initial_load_in_hf=True, initial_load_path=str(tmp_path))
    with pytest.raises(UserError, match="initial_load_in_hf: this model cannot be loaded"):
        config.build(dump_folder=str(tmp_path), states={})


def test_saves_of_one_size_share_their_memory():
    """Pinning memory takes far longer than copying to it."""
    memory, state = SharedMemory(), {"model": {"weight": torch.zeros(1000)}}
    addresses = []
    for _ in range(3):
        memory.reserve(state)
        addresses.append(memory.empty_like(state["model"]["weight"]).data_ptr())
    memory.close()
    assert len(set(addresses)) == 1
