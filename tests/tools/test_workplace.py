"""Temporary folders for outputs in preparation: leftovers of a process are removed by the next
call."""

import contextlib
import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchtitan.tools.workplace import workplace

HOLDER = """
import sys, time
from pathlib import Path
from torchtitan.tools.workplace import workplace

with workplace(Path(sys.argv[1])) as folder:
    (folder / "model").write_text("large")
    print(folder, flush=True)
    time.sleep(600)
"""


class Holder:
    """Starts a process with a temporary folder."""

    def __init__(self, target: Path, *, before: str = "") -> None:
        command = [sys.executable, "-c", before + HOLDER, str(target)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout
        self.folder = Path(self.process.stdout.readline().strip())
        self.process.stdout.close()

    def end(self, number: int) -> int:
        """Send a signal until the process has ended: Python handles one that arrives just before
        `sleep` begins only after it."""
        for _ in range(60):
            self.process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.process.wait(1)
        raise AssertionError(f"the process does not end by signal {number}")


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Path]:
    """A name that would match other names if it were a pattern."""
    yield tmp_path / "ou[t]*"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_removes_it(target: Path, number: int) -> None:
    holder = Holder(target)
    assert (holder.folder / "model").exists() and holder.folder.parent == target.parent
    assert holder.end(number) == -number
    assert list(target.parent.iterdir()) == []


def test_ignored_signal_stays_ignored(target: Path) -> None:
    holder = Holder(target, before="import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n")
    holder.process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        holder.process.wait(0.3)
    assert holder.folder.exists()
    holder.end(signal.SIGTERM)


def test_leftovers_of_a_killed_process_are_removed(target: Path) -> None:
    killed, alive = Holder(target), Holder(target)
    assert killed.end(signal.SIGKILL) == -signal.SIGKILL
    others = [
        target.parent / name
        for name in (
            f"{target.name}.mine.partial",
            f"{target.name}.partial",
            f"out.{'a' * 16}.partial",
        )
    ]
    for other in others:
        other.mkdir()
    (others[2] / "workplace.lock").touch()  # of another target
    assert (killed.folder / "model").exists()
    before = signal.getsignal(signal.SIGTERM)
    with workplace(target) as folder:
        assert not killed.folder.exists() and (alive.folder / "model").exists()
        assert folder.is_dir() and signal.getsignal(signal.SIGTERM) is not before
    assert sorted(target.parent.iterdir()) == sorted([alive.folder, *others])
    assert signal.getsignal(signal.SIGTERM) is before
    alive.end(signal.SIGTERM)


def test_removed_after_an_error(target: Path) -> None:
    with pytest.raises(KeyError), workplace(target) as folder:
        raise KeyError
    assert not folder.exists() and list(target.parent.iterdir()) == []


def abandoned(target: Path, mark: str, *, age: float, locked: bool | None = None) -> Path:
    """Leave the folder of a process killed before it named its lock; an empty folder without any
    lock."""
    folder = target.parent / f"{target.name}.{mark * 16}.partial"
    folder.mkdir()
    if locked is not None:
        (folder / "new.lock").touch()
    os.utime(folder, (time.time() - age,) * 2)
    return folder


def test_killed_before_naming_its_lock(target: Path) -> None:
    removed = [abandoned(target, "0", age=61), abandoned(target, "1", age=61, locked=False)]
    others = [
        abandoned(target, "2", age=0),
        abandoned(target, "3", age=0, locked=False),
        abandoned(target, "4", age=61, locked=True),
        abandoned(target, "5", age=61),
    ]
    (others[3] / "mine").touch()
    os.utime(others[3], (0, 0))
    with open(others[2] / "new.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with workplace(target):
            assert not any(folder.exists() for folder in removed)
    assert sorted(target.parent.iterdir()) == sorted(others)


def test_another_thread_leaves_nothing(target: Path) -> None:
    errors = []

    def enter() -> None:
        try:
            with workplace(target):
                pass
        except ValueError as error:
            errors.append(error)

    (thread := threading.Thread(target=enter)).start()
    thread.join()
    assert "main thread" in str(errors[0]) and list(target.parent.iterdir()) == []


@pytest.mark.parametrize("moment", ["mkdir", "flock"])
def test_signal_right_after_creation(target: Path, moment: str) -> None:
    call = "os.mkdir" if moment == "mkdir" else "fcntl.flock"
    before = f"""
import fcntl, os, signal
real = {call}
def interrupted(*args, **options):
    real(*args, **options)
    os.kill(os.getpid(), signal.SIGTERM)
{call} = interrupted
"""
    assert Holder(target, before=before).process.wait(60) == -signal.SIGTERM
    assert list(target.parent.iterdir()) == []


def test_lock_is_omitted_only_without_file_locks(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, works in ((errno.ENOLCK, True), (errno.EIO, False)):

        def refuse(file: object, operation: int, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(fcntl, "flock", refuse)
        if works:
            with workplace(target) as folder:
                assert (folder / "workplace.lock").exists()
        else:
            with pytest.raises(OSError, match="Input/output"), workplace(target):
                pass
    assert list(target.parent.iterdir()) == []
