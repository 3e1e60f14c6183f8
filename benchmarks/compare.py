"""Compare two results of `peers.py` or `prepare.py`: what got slower?

    python benchmarks/compare.py benchmarks/results/OLD.json benchmarks/results/NEW.json
    [--tolerance 0.05]

Prints the change of speed and memory of each system. Exits with 1 if torchtitan got slower by more
than the tolerance in a job of both files: in speed on the same machine, or else relative to the
fastest peer.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from systems.report import FASTEST, OURS

SPEEDS = ("tokens_per_second", "mb_per_second")


class Change(NamedTuple):
    """A system's numbers in a job of both files."""

    job: str
    system: str
    speed: float
    """New speed / old speed: of tokens or MB per second, of the first step's time in jobs without
    them; for the fastest peer, of torchtitan's speed relative to it."""
    memory: float | None
    """New memory / old memory; None if it was not measured."""


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Change]:
    """Yield the changes from one document to another."""
    for job in old["jobs"].keys() & new["jobs"].keys():
        before, after = old["jobs"][job], new["jobs"][job]
        for system in [name for name in before if name in after]:
            was, now = before[system], after[system]
            is_ratio = system == FASTEST
            speeds, memory = (
                (("speed_ratio",), "memory_ratio") if is_ratio else (SPEEDS, "memory_gib")
            )
            speed = next((name for name in speeds if name in was), None)
            faster = (
                median_ratio(now, was, speed)
                if speed
                else median_ratio(was, now, "first_step_seconds")
            )
            yield Change(
                job, system, faster, median_ratio(now, was, memory) if memory in was else None
            )


def median_ratio(above: Mapping[str, Any], below: Mapping[str, Any], name: str) -> float:
    ratio: float = above[name][0] / below[name][0]
    return ratio


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument(
        "--tolerance", type=float, default=0.05, help="permitted loss of speed, as a fraction"
    )
    options = parser.parse_args()
    old, new = (json.loads(path.read_text()) for path in (options.old, options.new))
    same_machine = all(old[name] == new[name] for name in ("processor", "threads"))
    judged = OURS if same_machine else FASTEST
    if not same_machine:
        print("different machines or threads: only the ratio to the fastest peer is comparable")
    slower = []
    for change in sorted(changes(old, new), key=lambda change: change[:2]):
        is_slower = change.system == judged and change.speed < 1 - options.tolerance
        slower += [change.job] * is_slower
        memory = "" if change.memory is None else f"  memory {change.memory - 1:+7.1%}"
        slow = "  SLOWER" if is_slower else ""
        print(f"{change.job:12} {change.system:17} speed {change.speed - 1:+7.1%}{memory}{slow}")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
