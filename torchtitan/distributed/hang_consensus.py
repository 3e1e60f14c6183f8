"""Consensus of all ranks on which rank hangs, reached through the store of the default process
group."""

import contextlib
import dataclasses
import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch.distributed as dist

from torchtitan.tools.torch_private import default_store

TICK_SECONDS = 0.5

ANSWER_SECONDS = 4.0
"""Time after which a rank that has not answered counts as unresponsive, if the rank that calls is
in a step."""


@dataclass(frozen=True)
class Process:
    """A rank's process; `begun`, in seconds since the epoch, distinguishes successive watchdogs in
    it."""

    host: str
    pid: int
    begun: float

    def __str__(self) -> str:
        return f"{self.host}, process {self.pid}"


@dataclass(frozen=True, order=True)
class Position:
    """Progress of a rank; a smaller one is further behind."""

    step: int
    n_phases: int
    phase: str | None = dataclasses.field(compare=False)
    """None between steps."""
    line: str = dataclasses.field(compare=False)
    """Line of code that the main thread is executing."""
    after: str = dataclasses.field(default="between steps", compare=False)
    """Phase between steps, such as "save"."""

    def __str__(self) -> str:
        if self.phase is None:
            return f'after step {self.step}, phase "{self.after}", at {self.line}'
        return f'in step {self.step}, phase "{self.phase}", at {self.line}'


@dataclass(frozen=True)
class HangReport:
    """A hang: the text of the report, the rank that prints it, and the unresponsive ranks."""

    text: str
    reporter_rank: int
    silent: list[int]


class HangConsensus:
    """Thread that agrees with the other ranks on whether the run hangs.

    A rank that suspects a hang sets a key, which all ranks poll twice a second. Each rank then
    writes its `position` and waits for the decision. The calling rank decides when it has all
    answers, or after a timeout. If any rank is between two steps, the others only wait for it, and
    no rank reports a hang. If the process that hosts the store has stopped, requests never return,
    and this thread blocks: readers of `report` must not wait for it.
    """

    def __init__(self, rank: int, processes: list[Process], position: Callable[[], Position]):
        self.suspected_seconds: float | None = None
        """Set while this rank suspects a hang: the limit of its step."""
        self.patience = ANSWER_SECONDS
        """Time that the others have to answer when this rank calls."""
        self.report: HangReport | None = None
        """Set when the ranks agree on a hang."""
        self._rank = rank
        self._processes = processes
        self._position = position
        self._cleared = threading.Event()
        self._closed = threading.Event()
        # A store may outlive the processes (torchrun's does), so the keys must be unique to these
        # processes.
        prefix = f"hang consensus of {processes[0]}, {processes[0].begun}"
        self._store = dist.PrefixStore(prefix, default_store().clone())
        self.thread = threading.Thread(target=self._run, name="hang consensus", daemon=True)
        self.thread.start()

    def hear_cleared(self) -> bool:
        """Return whether this rank's suspicion was unfounded, and reset the flag."""
        cleared = self._cleared.is_set()
        self._cleared.clear()
        return cleared

    def close(self) -> None:
        """Announce that this rank has finished, and wait up to 5 seconds for the store."""
        self._closed.set()
        self.thread.join(timeout=5)

    def report_without_store(self, seconds: float) -> HangReport:
        """Return this rank's own report if the store does not answer because its process has
        stopped."""
        from_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        host = "torchrun's first agent" if from_agent else f"rank 0 ({self._processes[0]})"
        finding = f"{host}, which hosts the ranks' store, does not answer"
        text = (
            f"{headline(seconds, self._position())}: {finding}\n  rank {self._rank}: "
            f"{self._position()}"
        )
        return HangReport(text, self._rank, [] if from_agent else [0])

    def _run(self) -> None:
        number = 0
        with contextlib.suppress(dist.DistError):  # the store is gone because the run has ended
            while self.report is None and not self._closed.wait(TICK_SECONDS):
                called = self.suspected_seconds is not None and self._set_once(
                    f"{number}/call", f"{self._rank} {self.patience}"
                )
                if called or self._store.check([f"{number}/call"]):
                    self._answer(number, called)
                    number += 1
            self._store.set(f"finished/{self._rank}", "")

    def _set_once(self, key: str, value: str) -> bool:
        return self._store.compare_set(key, "", value).decode() == value

    def _answer(self, number: int, called: bool) -> None:
        """Answer call `number` and wait for the decision; decide if this rank `called`."""
        self._store.set(f"{number}/{self._rank}", json.dumps(dataclasses.asdict(self._position())))
        decision, n_ticks = f"{number}/decision", 0
        _, patience = self._store.get(f"{number}/call").decode().split()
        # Other ranks decide only if the calling rank itself hangs.
        last_tick = (1 if called else 2) * float(patience) / TICK_SECONDS
        while not self._store.check([decision]):
            complete = called and self._store.check(
                [f"{number}/{rank}" for rank in range(len(self._processes))]
            )
            if complete or n_ticks >= last_tick or (called and self.suspected_seconds is None):
                report = self._decide(number)
                self._set_once(decision, json.dumps(report and dataclasses.asdict(report)))
            elif self._closed.wait(TICK_SECONDS):
                return
            n_ticks += 1
        content = json.loads(self._store.get(decision))
        if content is not None:
            self.report = HangReport(**content)
        elif self.suspected_seconds is not None:
            self._cleared.set()
            while self._cleared.is_set() and not self._closed.wait(TICK_SECONDS):
                pass

    def _decide(self, number: int) -> HangReport | None:
        """Return the report of a hang; None if the step has ended, or a rank is between steps."""
        seconds, own = self.suspected_seconds, self._position()
        if seconds is None:
            return None
        answers, silent = {}, {}
        for rank, process in enumerate(self._processes):
            if self._store.check([f"{number}/{rank}"]):
                answers[rank] = Position(**json.loads(self._store.get(f"{number}/{rank}")))
            elif not self._store.check([f"finished/{rank}"]):
                silent[rank] = process
        if not silent and any(position.phase is None for position in answers.values()):
            return None
        return HangReport(describe(answers, silent, seconds, own), self._rank, list(silent))


def describe(
    answers: Mapping[int, Position],
    silent: Mapping[int, Process],
    seconds: float,
    caller: Position | None = None,
) -> str:
    """Describe the ranks that block the others, then each rank's position, furthest behind first.
    Unresponsive ranks block the others; if all ranks answer, the ranks that are furthest behind
    do."""
    first = min(answers.values())
    behind = [rank for rank, position in answers.items() if position == first]
    if silent:
        finding = f"{_names(silent)} {'does' if len(silent) == 1 else 'do'} not answer"
    elif len(behind) < len(answers):
        finding = f"{_names(behind)} {'holds' if len(behind) == 1 else 'hold'} up the others"
    else:
        finding = "all ranks are in the same phase"
    lines = [f"{headline(seconds, caller)}: {finding}"]
    for rank, process in silent.items():
        lines.append(f"rank {rank}: {process}; it is stopped, or a thread never releases the GIL")
    places: dict[str, list[int]] = {}
    for rank, position in sorted(answers.items(), key=lambda item: item[1]):
        places.setdefault(str(position), []).append(rank)
    return "\n  ".join([*lines, *(f"{_names(ranks)}: {place}" for place, ranks in places.items())])


def headline(seconds: float, position: Position | None = None) -> str:
    """Return the first words of a report; `position`: of the rank that exceeds its limit."""
    if position is None:
        return f"the run hangs, a step has not ended after {seconds:g} seconds"
    if position.phase is None:
        return (
            f'the run hangs, phase "{position.after}" after step {position.step} exceeds '
            f"{seconds:g} seconds"
        )
    return (
        f"the run hangs, a step has not ended after {seconds:g} seconds, in phase "
        f'"{position.phase}"'
    )


def _names(ranks: Iterable[int]) -> str:
    numbers = ", ".join(map(str, ranks))
    return f"ranks {numbers}" if "," in numbers else f"rank {numbers}"
