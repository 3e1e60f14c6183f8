"""The lock on a dump folder: a second run reports the first, and a killed run never blocks."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands import RunningCommand, run_command
from tests.training import TINY, flags, train
from torchtitan.cli.main import main
from torchtitan.tools import folder_lock
from torchtitan.tools.errors import UserError
from torchtitan.tools.folder_lock import FILE, lock_folder
from torchtitan.trainer import Trainer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

HOLDER = """
import os, subprocess, sys, time
from pathlib import Path
from torchtitan.tools.folder_lock import lock_folder

lock = lock_folder(Path(sys.argv[1]))
ready, told = os.pipe()
forked = os.fork()
if not forked:
    os.write(told, b"closed")  # `os.fork` closes the lock's file before it returns here
    time.sleep(600)
os.read(ready, 6)
started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], close_fds=False)
print(forked, started.pid, flush=True)
time.sleep(600)
"""
"""Takes the lock and starts children that outlive it."""

SAVING = """
import os, sys, time
from pathlib import Path
from torchtitan.cli.main import main

fsync = os.fsync

def hang(descriptor):
    if "step-2.partial" in os.readlink(f"/proc/self/fd/{descriptor}"):
        print("saving", flush=True)
        time.sleep(600)
    fsync(descriptor)

os.fsync = hang
main(["train", *sys.argv[1:]])
"""
"""A run whose save of step 2 never ends."""


@pytest.fixture(autouse=True)
def without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "_WAIT_SECONDS", 0.0)


def words(folder: Path) -> list[str]:
    saving = {"checkpoint.enable": True, "checkpoint.interval": 1, "training.steps": 3}
    return flags({**TINY, "dump_folder": folder, **saving})


def killed_while_children_live(folder: Path) -> None:
    """Take the lock right after its holder was killed."""
    with RunningCommand(
        [sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout
        children = [int(word) for word in holder.stdout.readline().split()]
        try:
            with pytest.raises(
                UserError,
                match=f"'{folder}' is .*, process {holder.pid} on {socket.gethostname()}; ",
            ):
                lock_folder(folder)
            holder.kill()
            holder.wait()
            lock = lock_folder(folder)
            assert len(children) == 2
            for child in children:
                os.kill(child, 0)  # lives
            lock.release()
        finally:
            holder.kill()
            for child in children:
                os.kill(child, signal.SIGKILL)


def test_killed_holder_never_blocks(tmp_path: Path) -> None:
    for _ in range(3):
        killed_while_children_live(tmp_path)


@pytest.mark.long
def test_a_hundred_killed_holders_never_block(tmp_path: Path) -> None:
    for _ in range(100):
        killed_while_children_live(tmp_path)


def test_exiting_holder_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "_WAIT_SECONDS", 60.0)
    with RunningCommand(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout
        children = [int(word) for word in holder.stdout.readline().split()]

        def kill(seconds: float) -> None:
            # killed before, and the lock is not free yet
            with contextlib.suppress(ProcessLookupError):
                holder.kill()

        monkeypatch.setattr(time, "sleep", kill)
        lock_folder(tmp_path)
        for child in children:
            os.kill(child, signal.SIGKILL)


def test_process_holds_one_lock(tmp_path: Path) -> None:
    """A notebook may build several trainers without closing them."""
    first, second = lock_folder(tmp_path), lock_folder(tmp_path)
    assert first is second
    command = (
        "import sys; from pathlib import Path; from torchtitan.tools import folder_lock as module;"
    )
    command += "module._WAIT_SECONDS = 0; module.lock_folder(Path(sys.argv[1]))"
    other = [sys.executable, "-c", command, str(tmp_path)]
    del first
    result = run_command(other)
    assert f"is in use by another run, process {os.getpid()} on " in result.stderr
    del second
    assert run_command(other).returncode == 0


def test_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(folder_lock.errno.ENOLCK, "No locks available")

    monkeypatch.setattr(folder_lock.fcntl, "flock", refuse)
    lock_folder(tmp_path)
    assert "has no locks: do not use this folder for other runs" in caplog.text


def test_symbolic_link_as_lock_is_not_followed(tmp_path: Path) -> None:
    (precious := tmp_path / "precious").write_text("text")
    for target in (precious, tmp_path / "new"):
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / FILE).unlink(missing_ok=True)
        (tmp_path / "run" / FILE).symlink_to(target)
        with pytest.raises(UserError, match="run/run.lock' is a link; remove it"):
            lock_folder(tmp_path / "run")
    assert precious.read_text() == "text" and not (tmp_path / "new").exists()


def test_trainer_holds_the_lock_until_closed(tmp_path: Path) -> None:
    trainer = train(tmp_path / "run", training__steps=1)
    assert trainer.folder_lock is None and tmp_path / "run" not in folder_lock._locks
    assert (
        tmp_path / "run" / FILE
    ).read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"

    class Held(Trainer):
        def complete_step(self, outcome):
            super().complete_step(outcome)
            assert folder_lock._locks[tmp_path / "run"] is self.folder_lock

    train(tmp_path / "run", trainer_class=Held, training__steps=1)


@pytest.fixture
def saving(tmp_path: Path) -> Iterator[RunningCommand]:
    """A run in `tmp_path` during a save."""
    command = [sys.executable, "-c", SAVING, *words(tmp_path)]
    with RunningCommand(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == b"saving\n"
        yield process
        process.kill()


def content(folder: Path) -> dict[str, tuple[int, int]]:
    found = {path: path.stat() for path in folder.rglob("*")}
    return {str(path): (stat.st_ino, stat.st_mtime_ns) for path, stat in found.items()}


@pytest.mark.slow
def test_second_run_does_not_disturb_the_first_save(
    tmp_path: Path, saving: RunningCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(tmp_path)
    assert any("step-2.partial/" in name for name in before)
    assert main(["train", *words(tmp_path)]) == 2
    assert (
        f"in use by another run, process {saving.pid} on {socket.gethostname()}; "
        in capsys.readouterr().err
    )
    assert content(tmp_path) == before

    saving.kill()
    saving.wait()
    assert main(["train", *words(tmp_path)]) == 0
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == [
        "step-1",
        "step-2",
        "step-3",
    ]


@pytest.mark.slow
def test_second_run_with_several_processes(tmp_path: Path, saving: RunningCommand) -> None:
    before = content(tmp_path)
    command = [sys.executable, "-m", "torchtitan.cli.main", "train", *words(tmp_path)]
    environment = {**os.environ, "NGPU": "2", "OMP_NUM_THREADS": "1"}
    result = run_command(command, env=environment)
    assert result.returncode == 2, result.stderr
    message = f"in use by another run, process {saving.pid} on {socket.gethostname()}; "
    assert result.stderr.count(message) == 1
    assert content(tmp_path) == before
