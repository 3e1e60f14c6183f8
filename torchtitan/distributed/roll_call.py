"""How ranks find out together which of them hangs, through the store of the default process group."""

import contextlib
import dataclasses
import json
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

_TICK_SECONDS = 0.5
_ANSWER_TICKS = 10
"""After how many ticks a rank that has not answered does not answer."""


@dataclass(frozen=True)
class Process:
    """The process of a rank; `begun`, in seconds since the epoch, tells one watchdog in it from a later one."""

    host: str
    pid: int
    begun: float

    def __str__(self) -> str:
        return f"{self.host}, process {self.pid}"


@dataclass(frozen=True, order=True)
class Position:
    """How far a rank has come. A smaller one is further behind.

    `n_phases` counts the phases begun in the step; `phase` is the last one's name, None between steps; `line` is where
    the main thread is.
    """

    step: int
    n_phases: int
    phase: str | None = dataclasses.field(compare=False)
    line: str = dataclasses.field(compare=False)

    @property
    def where(self) -> str:
        """In words."""
        return f"behind step {self.step}" if self.phase is None else f'in step {self.step}, phase "{self.phase}"'


@dataclass(frozen=True)
class Verdict:
    """That the run hangs: what to say, the rank that says it, and the ranks that do not answer."""

    text: str
    spokesman: int
    silent: list[int]


class RollCall:
    """Answers, on a thread of its own, when another rank suspects that the run hangs; and asks the others.

    A rank that suspects a hang sets a key, which all look at twice a second. Each then writes where it stands, and waits
    for the outcome; the first suspecting rank that has all answers, or has waited for them long enough, decides it. If
    a rank answers that it is between two steps, nothing hangs: the others wait for it with good reason.

    The connection to the store is one of its own. Where the process that holds the store has stopped, requests never
    return: this thread then stands still, and whoever reads `verdict` must not wait for it.

    Args:
        rank: this process's.
        processes: of all ranks.
        position: tells where this rank stands.
    """

    def __init__(self, rank: int, processes: list[Process], position: Callable[[], Position]):
        self.verdict: Verdict | None = None
        """That the run hangs; None as long as it does not."""
        self.acquitted = threading.Event()
        """Set when a suspicion turned out to be none."""
        self._rank = rank
        self._processes = processes
        self._position = position
        self._suspected_seconds: float | None = None
        self._closed = threading.Event()
        # A store may outlive the processes (torchrun's does): the keys are those of this very group of processes.
        prefix = f"roll call of {processes[0]}, {processes[0].begun}"
        self._store = dist.PrefixStore(prefix, _get_default_store().clone())
        self.thread = threading.Thread(target=self._take_part, name="roll call", daemon=True)
        self.thread.start()

    def suspect(self, seconds: float) -> None:
        """Say that this rank's step takes longer than `seconds`; `verdict` or `acquitted` comes of it."""
        self._suspected_seconds = seconds

    def close(self) -> None:
        """This rank has finished: it is not to be missed. Waits for the last request, if the store still answers."""
        self._closed.set()
        self.thread.join(timeout=5)

    def verdict_without_store(self) -> Verdict:
        """What to say where the store does not answer: its process has stopped."""
        from_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        holder = "torchrun on the host MASTER_ADDR" if from_agent else f"rank 0 ({self._processes[0]})"
        text = (
            f"{_headline(self._suspected_seconds)}: {holder} does not answer, and it holds the store that the ranks "
            f"talk through\n  rank {self._rank} waits {_place(self._position())}"
        )
        return Verdict(text, self._rank, [] if from_agent else [0])

    def _take_part(self) -> None:
        number = 0
        with contextlib.suppress(dist.DistError):  # the store has gone, and with it the run
            while not self._closed.wait(_TICK_SECONDS):
                if self._suspected_seconds is not None:
                    self._store.set(f"{number}/call", "")
                if self._store.check([f"{number}/call"]):
                    self._answer(number)
                    number += 1
            self._store.set(f"finished/{self._rank}", "")

    def _answer(self, number: int) -> None:
        """Answer call `number`, and wait for what comes of it."""
        self._store.set(f"{number}/{self._rank}", json.dumps(dataclasses.asdict(self._position())))
        outcome = f"{number}/outcome"
        n_ticks = 0
        while not self._store.check([outcome]):
            if self._closed.wait(_TICK_SECONDS):
                return
            n_ticks += 1
            answers, missing = self._answers(number)
            if self._suspected_seconds is not None and (not missing or n_ticks >= _ANSWER_TICKS):
                verdict = self._judge(answers, missing)
                self._store.compare_set(outcome, "", json.dumps(verdict and dataclasses.asdict(verdict)))
        content = json.loads(self._store.get(outcome))
        if content is None:
            self._suspected_seconds = None
            self.acquitted.set()
        else:
            self.verdict = Verdict(**content)

    def _answers(self, number: int) -> tuple[dict[int, Position], list[int]]:
        """Where the ranks that have answered stand, and the ranks that have not, but for those that have finished."""
        ranks = range(len(self._processes))
        answered = [rank for rank in ranks if self._store.check([f"{number}/{rank}"])]
        missing = [rank for rank in ranks if rank not in answered and not self._store.check([f"finished/{rank}"])]
        return {rank: Position(**json.loads(self._store.get(f"{number}/{rank}"))) for rank in answered}, missing

    def _judge(self, answers: dict[int, Position], silent: list[int]) -> Verdict | None:
        """That the run hangs, or None where ranks wait for one that is between two steps."""
        if not silent and any(position.phase is None for position in answers.values()):
            return None
        text = describe(answers, {rank: self._processes[rank] for rank in silent}, self._suspected_seconds)
        return Verdict(text, self._rank, silent)


def told_alone(position: Position, seconds: float) -> Verdict:
    """The verdict in a run of a single process."""
    return Verdict(f"{_headline(seconds)}: it is {_place(position)}", 0, [])


def describe(answers: dict[int, Position], silent: dict[int, Process], seconds: float | None) -> str:
    """In words: which ranks hold up the others, then where each stands, those furthest behind first.

    Ranks that do not answer hold up the others; where there are none, the ranks that are behind all others do.
    """
    first = min(answers.values())
    behind = [rank for rank, position in answers.items() if position == first]
    if silent:
        culprits = f"{_ranks(silent)} {_verb(silent, 'does', 'do')} not answer"
    elif len(behind) < len(answers):
        culprits = f"{_ranks(behind)} {_verb(behind, 'holds', 'hold')} up the others"
    else:
        culprits = "all ranks are in the same phase"
    lines = [f"{_headline(seconds)}: {culprits}"]
    lines += [f"rank {rank} ({process}) is stopped, or its Python is" for rank, process in silent.items()]
    places: dict[tuple[Position, str], list[int]] = {}
    for rank, position in sorted(answers.items(), key=lambda item: item[1]):
        places.setdefault((position, position.line), []).append(rank)
    for (position, _), ranks in places.items():
        lines.append(f"{_ranks(ranks)}: {_place(position)}")
    return "\n  ".join(lines)
