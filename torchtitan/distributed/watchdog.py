"""`Watchdog`: ends a hanging run after reporting every rank's position and the ranks that hang."""

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torchtitan.distributed.hang_consensus import (
    ANSWER_SECONDS,
    TICK_SECONDS,
    HangConsensus,
    HangReport,
    Position,
    Process,
    headline,
)
from torchtitan.distributed.phases import BETWEEN_STEPS, PhaseClock
from torchtitan.distributed.process_group import gather_objects
from torchtitan.tools.logging import logger
from torchtitan.tools.process import exit_process, is_launched, report_failure

HANG_EXIT_CODE = 3
"""Exit code of all runs that fail for a reported reason."""

_CONSENSUS_SECONDS = 10.0
"""Time for the ranks to agree; after it, the store counts as unresponsive."""

_PRINTING_SECONDS = 2.0
"""Time for the other ranks to read the report and print their positions before this rank exits."""

_PATIENCE_SECONDS = 30.0
"""Time that a rank has to answer between two steps, when it may hold the GIL to write a large
file."""

_EXIT_SECONDS = 10.0
"""Time after which a rank with the report exits, even if it could not print the report."""

_STDERR = 2  # the file descriptor, since a hanging thread may hold the lock of `sys.stderr`


@dataclass(eq=False)
class _Step:
    number: int
    seconds: float  # time limit
    phase: str | None = "start of the step"  # None: after the step
    n_phases: int = 0


class Watchdog:
    """Watches the steps of a training loop, in one process or in all ranks of the default process
    group.

        with Watchdog(first_step_seconds=1800, step_seconds=600) as watchdog:
            for number in range(1, steps + 1):
                with watchdog.step(number):
                    watchdog.phase("data")
                    ...
                    watchdog.phase("forward and backward")
                    ...
                save()  # not watched between steps: the timeouts of collectives apply

    When a step exceeds its limit, every rank prints its step, its phase and the stacks of its
    threads to standard error; one rank then prints which ranks hold up the others or do not answer.
    The process exits with code 3, even if its threads are stuck. On Linux, another rank on the same
    host makes an unresponsive rank (stopped, or holding the GIL) print its stacks, and ends it.

    While a rank is between two steps, for example to save, the others wait for it. After the same
    limit, they ask it for an answer; only a rank that does not answer, for example because it is
    stopped, is reported. Time in which the process was stopped or the host suspended does not
    count.

    All ranks enter and leave the watchdog together. Within it, SIGQUIT (Ctrl-\\) prints stacks and
    ends the process.

    Args:
        first_step_seconds: limit of the first step, which compiles and connects to the other ranks.
        step_seconds: limit of each later step; 0: disabled, including the first step.
        clock: receives the phases of all steps, even if the limit is disabled.
    """

    def __init__(
        self, *, first_step_seconds: float, step_seconds: float, clock: PhaseClock | None = None
    ):
        self._clock = clock or PhaseClock()
        self._step_seconds = step_seconds
        self._next_step_seconds = first_step_seconds
        self._step = _Step(0, first_step_seconds, phase=None)  # in progress, or completed last
        self._rank = 0
        self._processes: list[Process] = []
        self._consensus: HangConsensus | None = None
        self._main_thread = threading.current_thread()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def __enter__(self) -> "Watchdog":
        if self._step_seconds == 0:
            return self
        this_process = Process(host=socket.gethostname(), pid=os.getpid(), begun=time.time())
        self._processes = gather_objects(this_process)
        self._rank = self._processes.index(this_process)
        if len(self._processes) > 1:
            self._consensus = HangConsensus(self._rank, self._processes, self._position)
        # Shells start background processes with this signal ignored, so it would not end the
        # process.
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        faulthandler.register(signal.SIGQUIT, file=_STDERR, chain=True)
        self._closed.clear()
        self._main_thread = threading.current_thread()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread:
            self._closed.set()
            self._thread.join()
            faulthandler.unregister(signal.SIGQUIT)
        if self._consensus:
            self._consensus.close()

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Watch the step `number` until the block ends."""
        self._step = _Step(number, self._next_step_seconds)
        self._clock.enter("start of the step")
        try:
            yield
        except BaseException:
            self._clock.failed_in = self._clock.failed_in or self._step.phase
            raise
        finally:
            self._step = _Step(number, self._step_seconds, phase=None)
            self._clock.enter(BETWEEN_STEPS)
            self._next_step_seconds = self._step_seconds

    def phase(self, name: str) -> None:
        """Set the name of the step's current phase. Ignored outside a step."""
        if self._step.phase is not None:
            self._clock.enter(name)
            self._step.phase = name
            self._step.n_phases += 1

    def _position(self) -> Position:
        step, line = self._step, "its end"
        if frame := sys._current_frames().get(self._main_thread.ident or 0):
            code = frame.f_code
            line = f"{code.co_qualname} ({Path(code.co_filename).name}:{frame.f_lineno})"
        if step.phase is None:
            return Position(
                step.number, sys.maxsize, phase=None, line=line, after=self._clock.phase
            )
        return Position(step=step.number, n_phases=step.n_phases, phase=step.phase, line=line)

    def _watch(self) -> None:
        """Count wake-ups of this thread instead of clock time, to exclude stopped processes and
        suspended hosts."""
        watched, n_ticks = self._step, 0
        while not self._closed.wait(TICK_SECONDS):
            cleared = self._consensus is not None and self._consensus.hear_cleared()
            step = self._step
            n_ticks = 0 if cleared or step is not watched else n_ticks + 1
            watched = step
            if report := self._hang(step, n_ticks * TICK_SECONDS):
                self._end(report)

    def _hang(self, step: _Step, seconds: float) -> HangReport | None:
        limit = step.seconds if seconds > step.seconds else None
        if self._consensus is None:
            if limit is None or step.phase is None:
                return None
            return HangReport(f"{headline(limit)}: the process is {self._position()}", 0, [])
        self._consensus.patience = (
            min(_PATIENCE_SECONDS, step.seconds) if step.phase is None else ANSWER_SECONDS
        )
        self._consensus.suspected_seconds = limit
        if limit and self._consensus.report is None and seconds > limit + _CONSENSUS_SECONDS:
            return self._consensus.report_without_store(limit)
        return self._consensus.report

    def _end(self, report: HangReport) -> None:
        """Print this rank's stacks and, once, the report; end the ranks that do not answer, then
        this one."""
        stacks = self._stacks()
        timer = threading.Timer(_EXIT_SECONDS, os._exit, [HANG_EXIT_CODE])
        timer.daemon = True
        timer.start()
        os.write(_STDERR, stacks.encode(errors="replace"))
        if self._consensus:
            time.sleep(_PRINTING_SECONDS)
        if is_launched():
            report_failure(HANG_EXIT_CODE, report.text, passing=True)
        elif report.reporter_rank == self._rank:
            logger.error("%s", report.text)
        self._end_silent_ranks(report.silent)
        exit_process(HANG_EXIT_CODE)

    def _stacks(self) -> str:
        """Return this rank's position and the stacks of its threads, main thread first, without the
        watchdog's."""
        frames = sys._current_frames()
        threads = [
            self._main_thread,
            *(one for one in threading.enumerate() if one is not self._main_thread),
        ]
        excluded = (self._thread, self._consensus.thread if self._consensus else None)
        lines = [f"rank {self._rank} ({self._processes[self._rank]}) is {self._position()}\n"]
        for thread in threads:
            frame = frames.get(thread.ident or 0)
            if frame and thread not in excluded:
                lines += [
                    f"{thread.name} (most recent call last):\n",
                    *traceback.format_stack(frame),
                ]
        return "".join(lines)

    def _end_silent_ranks(self, silent: list[int]) -> None:
        """On the first responsive rank of a host, end the unresponsive ranks there with a signal
        that prints stacks."""
        host = self._processes[self._rank].host
        here = {rank for rank, process in enumerate(self._processes) if process.host == host}
        if self._rank != min(here - set(silent)):
            return
        for rank in here & set(silent):
            process = self._processes[rank]
            if _is_sibling(process.pid):
                os.write(_STDERR, f"rank {rank} ({process}) does not answer\n".encode())
                os.kill(process.pid, signal.SIGQUIT)
                os.kill(process.pid, signal.SIGCONT)  # a stopped process now receives the signal


def _is_sibling(pid: int) -> bool:
    """Return whether a process has the same parent and so is a rank of this run; False without
    /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return int(stat.rpartition(")")[2].split()[1]) == os.getppid()
