"""One attempt at a run: its processes, and the moment at which they are killed."""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from tests.conftest import PROJECT
from tests.kill_test.disks import Disk
from tests.kill_test.modes import INTERVAL, Options, Victim
from tests.training import flags

start_process: Any = subprocess.Popen
"""Starts the processes of an attempt; `RunningCommand` in the quick test."""

_TIMEOUT_SECONDS = 600
"""Seconds after which an attempt without progress counts as hung."""
_POLL_SECONDS = 0.0005
_LARGE_SAVE_BYTES = 64 << 20
"""More than the size of a checkpoint."""

Event = Literal["start", "step", "save", "written", "renamed", "complete"]
"""Processes started; a step completed; `step-N.partial` exists; its tensors are written; renamed to
`step-N`; marked complete, before older checkpoints are removed."""

_EVENTS: tuple[Event, ...] = (
    "save",
    "complete",
    "written",
    "step",
    "start",
    "save",
    "renamed",
    "step",
)
"""Used in turn, so that a few kills cover several events."""


class AttemptFailed(Exception):
    """An attempt ended unexpectedly or hung; the message has its output."""


@dataclass(frozen=True)
class Moment:
    """The time of a kill: a delay after an event."""

    event: Event

    step: int
    """The first step whose event counts."""

    delay: float
    """Seconds."""


def draw_moment(generator: random.Random, kill: int, saved: int, start_seconds: float) -> Moment:
    """Draw a moment for a kill, within the next two saves.

    Args:
        kill: the number of the kill, from 0.
        saved: the step of the newest checkpoint.
        start_seconds: approximate time from the command to the first step.
    """
    event = _EVENTS[kill % len(_EVENTS)]
    longest = {"start": start_seconds, "step": 0.2}.get(event, 0.01)
    return Moment(event, saved + generator.randint(1, 2 * INTERVAL), generator.uniform(0, longest))


class Attempt:
    """A run of `torchtitan train` in its own process group. Use it in a `with` statement: processes
    that still run at the end are killed.

    Args:
        workplace: the current folder of the processes.
        options: options of the command line; checkpoints are in the default folder.
        processes: the number of processes.
    """

    def __init__(self, workplace: Path, options: Options, processes: int):
        self._processes = processes
        self.printed = ""
        """Output of the processes on standard error."""
        self.resumed_step: int | None = None
        """Step from which the run resumed; 0 for a new run, None if not logged yet."""
        self.saved_step = 0
        """The last step logged as saved."""
        self.done_step = 0
        """The last step logged."""
        self._workplace, self._options = workplace, options
        self._folder = workplace / options["dump_folder"]
        self._checkpoints = self._folder / "checkpoint"
        environment = {
            **os.environ,
            "NGPU": str(processes),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(PROJECT),
            "TORCHTITAN_CACHE": str(workplace / "cache"),
        }
        module = ["--module", "tests.kill_test", "--config", "noisy_debugmodel"]
        self._process = start_process(
            [sys.executable, "-m", "torchtitan.cli.main", "train", *module, *flags(dict(options))],
            cwd=workplace,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def is_running(self) -> bool:
        """True until the launched process exits."""
        return self._process.poll() is None

    def wait_for(self, moment: Moment) -> None:
        """Wait until the moment, or the end of the attempt.

        Raises:
            AttemptFailed: if neither happens in time.
        """
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while self.is_running and not self._has_come(moment):
            if time.monotonic() > deadline:
                raise AttemptFailed(f"{moment} was not reached:\n{self.printed}")
            time.sleep(_POLL_SECONDS)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(moment.delay)

    def kill_at(
        self, moment: Moment, victim: Victim, generator: random.Random, disk: Disk | None = None
    ) -> bool:
        """Strike `victim` at the moment, and return whether this ended the attempt. No process is
        left afterwards.

        Raises:
            AttemptFailed: if the moment is not reached, a process does not end, or the attempt ends
                unexpectedly.
        """
        ranks = self._ranks() if victim == "rank" else []
        self.wait_for(moment)
        if not self.is_running:
            return False
        if victim == "rank":
            rank = generator.choice(ranks)
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)
            return (
                self._wait() == -signal.SIGKILL
                or f"process {rank}, was ended by SIGKILL" in self.printed
            )
        if victim == "power":
            assert disk
            disk.cut_power()
        elif victim == "space":
            assert disk
            self._fill(disk, generator)
        elif victim == "folder":
            self._share_folder()
        if self._process.returncode is None:  # so its number is still valid
            os.killpg(self._process.pid, signal.SIGKILL)
        return (code := self._wait()) == -signal.SIGKILL or (
            victim == "space" and self._complains(code)
        )

    def _fill(self, disk: Disk, generator: random.Random) -> None:
        """Fill the disk for a moment, and wait another moment if the attempt continues."""
        spared = generator.choice((0, 0, generator.randint(0, _LARGE_SAVE_BYTES)))
        with disk.full(spared), contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(generator.uniform(0, 1.5))
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(generator.uniform(0, 0.5))

    def _complains(self, code: int) -> bool:
        """Return whether the attempt exited with an error message; raise if it crashed."""
        if code not in (0, 2, 3) or "Traceback" in self.printed:
            raise AttemptFailed(f"exit code {code} on a full disk:\n{self.printed}")
        return code != 0

    def _share_folder(self) -> None:
        """Suspend this run and start a second one, which must be rejected and change nothing. Then
        wait for a step of this run."""
        # earlier, it may not hold the lock yet
        while self.is_running and self.resumed_step is None:
            time.sleep(_POLL_SECONDS)
        if not self.is_running:
            return
        os.killpg(self._process.pid, signal.SIGSTOP)
        while not _is_suspended(self._process.pid):
            time.sleep(_POLL_SECONDS)
        try:
            before = _content(self._folder)
            with Attempt(self._workplace, self._options, self._processes) as second:
                code = second._wait()
            if code != 2 or "is in use by another run" not in second.printed:
                raise AttemptFailed(
                    f"exit code {code} of a second run in the folder:\n{second.printed}"
                )
            if _content(self._folder) != before:
                raise AttemptFailed(f"a second run has changed files in {self._folder}")
        finally:
            os.killpg(self._process.pid, signal.SIGCONT)
        self.wait_for(Moment("step", self.done_step + 1, delay=0))

    def check_success(self) -> None:
        """Wait for the end of the attempt.

        Raises:
            AttemptFailed: if the exit code is not 0.
        """
        if (code := self._wait()) != 0:
            raise AttemptFailed(f"exit code {code}:\n{self.printed}")

    def _wait(self) -> int:
        """Return the exit code when no process of the attempt is left."""
        self._reader.join(_TIMEOUT_SECONDS)  # ends with the last process that holds standard error
        if self._reader.is_alive():
            raise AttemptFailed(f"some of its processes do not end:\n{self.printed}")
        return self._process.wait()

    def _ranks(self) -> list[int]:
        """Return the ids of the ranks when all are started; an empty list if the attempt ends
        earlier."""
        if self._processes == 1:
            return [self._process.pid]
        while self.is_running:
            listed = subprocess.run(
                ["ps", "-A", "-o", "ppid=,pid="], capture_output=True, text=True, check=True
            )
            pairs = [line.split() for line in listed.stdout.splitlines()]
            children = [int(pid) for parent, pid in pairs if int(parent) == self._process.pid]
            if len(children) == self._processes:
                return children
            time.sleep(0.1)
        return []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._reader.is_alive():  # so it is a process of the group
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                self.printed += line
                if match := re.search(r"INFO step +(\d+)/", line):
                    self.done_step = int(match[1])
                elif match := re.search(
                    r" steps (\d+) to \d+ on |the run is complete: (\d+) of ", line
                ):
                    self.resumed_step = int(match[1]) - 1 if match[1] else int(match[2])
                elif match := re.search(r"INFO saved \S*step-(\d+)", line):
                    self.saved_step = int(match[1])

    def _has_come(self, moment: Moment) -> bool:
        if moment.event == "start":
            return True
        if moment.event == "step":
            return self.done_step >= moment.step
        # Not earlier: files of an earlier attempt still exist.
        return (
            self.resumed_step is not None
            and furthest_save(self._checkpoints, moment.event) >= moment.step
        )


def _is_suspended(pid: int) -> bool:
    """Return whether all threads of a process are stopped, or the process has ended. The process
    need not be a child of this one."""
    states = set()
    for thread in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            states.add(thread.read_text().rpartition(")")[2].split()[0])
    return states <= {"T", "Z"}


def _content(folder: Path) -> dict[Path, tuple[int, int]]:
    found = {path: path.stat() for path in folder.rglob("*")}
    return {path: (stat.st_ino, stat.st_mtime_ns) for path, stat in found.items()}


def furthest_save(checkpoints: Path, event: Event) -> int:
    """Return the highest step whose save has reached `event`, or 0."""
    file = {"written": ".metadata", "complete": "complete.json"}.get(event, "")
    steps = [0]
    for name in os.listdir(checkpoints) if checkpoints.exists() else ():
        match = re.fullmatch(r"step-(\d+)(\..+)?", name)
        reached = match and (not match[2] or event in ("save", "written"))
        if match and reached and (checkpoints / name / file).exists():
            steps.append(int(match[1]))
    return max(steps)
