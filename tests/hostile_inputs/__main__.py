"""`python -m tests.hostile_inputs`: try hostile and damaged files, and print a table of the
verdicts."""

import argparse
import importlib
import multiprocessing
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from tests.conftest import PROJECT
from tests.hostile_inputs import world
from tests.hostile_inputs.attempt import DEFECTS, Verdict, attempt, draw, last_loss, run
from tests.hostile_inputs.mutators import CANARY
from tests.hostile_inputs.subjects import SUBJECTS, Subject
from tests.tables import Row, as_markdown, describe, print_table, write_docs
from torchtitan.components.observe import metrics
from torchtitan.tools.device import peak_flops

PAGE = PROJECT / "docs" / "security.md"
MEMORY = Path("/dev/shm")
"""A folder in memory, if the system has one."""

IMPORTED = (
    "tests.preloaded",
    "torchtitan.cli.inspect_checkpoint",
    "torchtitan.train",
    "torchtitan.models.llama3.config_registry",
)
"""Modules imported by most commands."""

VERDICTS: tuple[Verdict, ...] = ("refused", "accepted", *DEFECTS)
COLUMNS = ("file", "cases", *VERDICTS)
Counts = Mapping[str, Counter[Verdict]]


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile_inputs", description=__doc__)
    parser.add_argument(
        "--cases",
        type=int,
        default=2000,
        help="number of cases over all kinds of files (default: 2000)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the first case of each kind (default: 0)"
    )
    parser.add_argument(
        "--only",
        metavar="PATTERN",
        default="",
        help="only kinds whose name matches this regular expression",
    )
    parser.add_argument("--list", action="store_true", help="list the kinds and exit")
    parser.add_argument(
        "--verbose", action="store_true", help="print each case and the output of its command"
    )
    parser.add_argument(
        "--write-docs",
        action="store_true",
        help=f"replace the table in {PAGE.relative_to(PROJECT)}",
    )
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Try the cases of the command line; return 1 if there are defects, 2 for a mistake in the
    command line, else 0."""
    arguments = parse_arguments(words)
    subjects = [subject for subject in SUBJECTS if re.search(arguments.only, subject.name)]
    if not subjects or arguments.cases < len(subjects):
        print(
            f"--only '{arguments.only}' finds {len(subjects)} kinds, each of which needs a case",
            file=sys.stderr,
        )
        return 2
    if arguments.list:
        print("\n".join(subject.name for subject in subjects))
        return 0
    counts = try_cases(subjects, arguments.cases, arguments.seed, arguments.verbose)
    rows = rows_of(counts)
    print_table("hostile and damaged files", COLUMNS, rows)
    failed = any(counts[name][defect] for name in counts for defect in DEFECTS)
    if arguments.write_docs and not failed:
        source = describe("tests.hostile_inputs", arguments, "cases", "seed", "only")
        write_docs(PAGE, "hostile", f"{source}\n\n{as_markdown(COLUMNS, rows, counts=True)}")
    return 1 if failed else 0


def try_cases(subjects: Sequence[Subject], cases: int, seed: int, verbose: bool = False) -> Counts:
    """Try cases for each kind of file in turn; print defects with their cause."""
    prepare()
    counts: dict[str, Counter[Verdict]] = {subject.name: Counter() for subject in subjects}
    workplace = Path(
        tempfile.mkdtemp(prefix="hostile-inputs-", dir=MEMORY if MEMORY.is_dir() else None)
    )
    try:
        base = make_world(workplace)
        expected = {subject.name: _undamaged(base, workplace, subject) for subject in subjects}
        drawn = [
            draw(subjects[number % len(subjects)], base, seed + number // len(subjects))
            for number in range(cases)
        ]
        # Workers are forked, and fork their cases in turn: neither has threads that a fork would
        # lose.
        with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("fork")) as workers:
            tried = [
                workers.submit(attempt, case, base, workplace, expected[case.subject.name])
                for case in drawn
            ]
            for case, result in zip(drawn, (future.result() for future in tried), strict=True):
                counts[case.subject.name][result.verdict] += 1
                if verbose or result.verdict in DEFECTS:
                    print(
                        f"{result.verdict}: {case.name}\n  "
                        f"{shlex.join(case.command)}\n{result.printed[-3000:]}"
                    )
    finally:
        shutil.rmtree(workplace)
    return counts


def prepare() -> None:
    """Import and measure once, in the process that all cases are forked from."""
    torch.set_num_threads(1)
    for module in IMPORTED:
        importlib.import_module(module)
    peak = peak_flops(torch.device("cpu"), torch.float32)
    metrics.peak_flops = lambda device, dtype: peak


def make_world(workplace: Path) -> Path:
    """Build the examples; their run can continue from its second step.

    Raises:
        RuntimeError: if a command that writes them fails.
    """
    base = workplace / "world"
    base.mkdir()

    def run_or_fail(command: world.Command) -> None:
        code, printed = run(command, base)
        if code != 0:
            raise RuntimeError(f"{shlex.join(command)} ended with {code}:\n{printed}")

    world.build(base, run_or_fail)
    shutil.rmtree(base / f"run/checkpoint/step-{world.STEPS}")
    (base / f"{CANARY}.py").write_text(f"open({CANARY!r}, 'w').close()\n")
    (base / "stdin").write_text("hello\n")
    return base


def _undamaged(base: Path, workplace: Path, subject: Subject) -> float | None:
    """Return the loss that the subject's result has to end with.

    Raises:
        RuntimeError: if one of the subject's commands does not succeed on the undamaged world.
    """
    loss = None
    for command in subject.commands:
        copy = workplace / "undamaged"
        shutil.copytree(base, copy)
        code, printed = run(command, copy)
        if code != 0:
            raise RuntimeError(
                f"{subject.name}: {shlex.join(command)} ended with {code}:\n{printed}"
            )
        loss = last_loss(copy, subject) if subject.result else None
        shutil.rmtree(copy)
    return loss


def rows_of(counts: Counts) -> list[Row]:
    """Return the table's rows, the last with the sums."""
    named = {**counts, "all": sum(counts.values(), Counter())}
    return [
        Row(
            [name, str(count.total()), *(str(count[verdict]) for verdict in VERDICTS)],
            failed=any(count[defect] for defect in DEFECTS),
        )
        for name, count in named.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
