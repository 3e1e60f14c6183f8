"""Folders in which something is prepared: none outlives its process for longer than until the next call."""

import signal
import subprocess
import sys
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
    """A process in a workplace."""

    def __init__(self, target: Path, *, before: str = "") -> None:
        command = [sys.executable, "-c", before + HOLDER, str(target)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout
        self.folder = Path(self.process.stdout.readline().strip())
        self.process.stdout.close()

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Path]:
    """A name that would find others if it were a pattern."""
    yield tmp_path / "ou[t]*"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_removes_it(target: Path, number: int) -> None:
    holder = Holder(target)
    assert (holder.folder / "model").exists() and holder.folder.parent == target.parent
    assert holder.end(number) == -number
    assert list(target.parent.iterdir()) == []


def test_a_signal_that_is_ignored_stays_ignored(target: Path) -> None:
    holder = Holder(target, before="import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n")
    holder.process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        holder.process.wait(0.3)
    assert holder.folder.exists()
    holder.end(signal.SIGTERM)


def test_the_next_one_removes_what_a_killed_process_left_and_nothing_else(target: Path) -> None:
    killed, alive = Holder(target), Holder(target)
    assert killed.end(signal.SIGKILL) == -signal.SIGKILL
    others = [
        target.parent / name for name in (f"{target.name}.mine.partial", f"{target.name}.partial", "out.a.partial")
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


def test_it_goes_with_an_error(target: Path) -> None:
    with pytest.raises(KeyError), workplace(target) as folder:
        raise KeyError
    assert not folder.exists() and list(target.parent.iterdir()) == []
