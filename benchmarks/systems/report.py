"""The numbers of runs, summarized over rounds, and as a table."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OURS, FASTEST = "torchtitan", "fastest peer"


@dataclass(frozen=True, kw_only=True)
class Run:
    """The numbers of a process that trained."""

    job: str
    precision: str
    system: str
    round: int

    first_step_seconds: float
    """Time from the start of the command to the end of the first step."""

    step_seconds: float | None
    """Median, without the warm-up; this and the following two are None if only the first step was
    timed."""

    tokens_per_second: float | None
    labels_per_second: float | None

    memory_gib: float
    """Peak resident set."""

    cores_used: float
    """CPU time divided by time; a machine with other work leaves fewer cores than threads."""

    @property
    def speed(self) -> float:
        """Tokens per second, or else first steps per second."""
        return (
            1 / self.first_step_seconds
            if self.tokens_per_second is None
            else self.tokens_per_second
        )


Rounds = dict[int, Run]
"""Round → run."""


def summarize(
    runs: Sequence[Run], flops_per_token: float, peak_flops: float
) -> dict[str, dict[str, Any]]:
    """Return the numbers of each system in a job, as [median, minimum, maximum] over the rounds.
    Peers have ratios, of torchtitan to them; those to the fastest peer of each round are under
    `fastest peer`."""
    by_system: dict[str, Rounds] = {}
    fastest: Rounds = {}
    for run in runs:
        by_system.setdefault(run.system, {})[run.round] = run
        if run.system != OURS and (
            run.round not in fastest or run.speed > fastest[run.round].speed
        ):
            fastest[run.round] = run
    ours = by_system.get(OURS, {})
    summary = {}
    for system, rounds in by_system.items():
        names = ["first_step_seconds", "memory_gib", "cores_used"]
        if all(run.tokens_per_second is not None for run in rounds.values()):
            names += ["tokens_per_second", "labels_per_second", "step_seconds"]
        numbers: dict[str, Any] = {
            name: spread(getattr(run, name) for run in rounds.values()) for name in names
        }
        if "tokens_per_second" in numbers:
            numbers["mfu"] = numbers["tokens_per_second"][0] * flops_per_token / peak_flops
        summary[system] = numbers | (ratios(ours, rounds) if system != OURS else {})
    return summary | ({FASTEST: found} if (found := ratios(ours, fastest)) else {})


def ratios(ours: Rounds, theirs: Rounds) -> dict[str, list[float]]:
    """Return the ratios of torchtitan's speed and memory to a peer's, over the rounds that both
    have."""
    both = ours.keys() & theirs.keys()
    if not both:
        return {}
    return {
        "speed_ratio": spread(ours[round].speed / theirs[round].speed for round in both),
        "memory_ratio": spread(ours[round].memory_gib / theirs[round].memory_gib for round in both),
    }


def spread(values: Iterable[float]) -> list[float]:
    """Return median, minimum and maximum."""
    numbers = list(values)
    return [statistics.median(numbers), min(numbers), max(numbers)]


def table(title: str, summary: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the summary of a job in Markdown: median (minimum–maximum)."""
    header = [title, *(column for column, _ in _COLUMNS)]
    rows = [
        [system, *(cell(numbers) for _, cell in _COLUMNS)] for system, numbers in summary.items()
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows))


def _spread_of(name: str, digits: int) -> Callable[[Mapping[str, Any]], str]:
    def cell(numbers: Mapping[str, Any]) -> str:
        if name not in numbers:
            return ""
        median, low, high = (f"{number:,.{digits}f}" for number in numbers[name])
        return f"{median} ({low}–{high})"

    return cell


_COLUMNS: tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("tokens/s", _spread_of("tokens_per_second", 0)),
    ("labels/s", _spread_of("labels_per_second", 0)),
    ("step, s", _spread_of("step_seconds", 2)),
    ("first step, s", _spread_of("first_step_seconds", 1)),
    ("GiB", _spread_of("memory_gib", 2)),
    ("MFU", lambda numbers: f"{numbers['mfu']:.1%}" if "mfu" in numbers else ""),
    ("cores used", _spread_of("cores_used", 1)),
    ("speed ratio", _spread_of("speed_ratio", 2)),
    ("memory ratio", _spread_of("memory_ratio", 2)),
)
