"""`python -m tests.equivalence`: runs the matrix, prints it as a table, and writes it into the documentation."""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.conftest import PROJECT
from tests.equivalence.layouts import Layout, Options, all_layouts
from tests.equivalence.matrix import Matrix, Row
from tests.equivalence.random_layouts import draw_layouts
from tests.equivalence.runs import TOLERANCE
from tests.tables import Row as TableRow
from tests.tables import as_markdown, print_table, write_docs

PAGE = PROJECT / "docs" / "parallelism.md"
COLUMNS = ("layout", "processes", "loss", "gradient norm", "validation", "weights", "verdict")


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.equivalence", description=__doc__)
    parser.add_argument("--long", action="store_true", help="with eight processes too, and with inductor")
    parser.add_argument(
        "--only", metavar="PATTERN", default="", help="layouts whose name this regular expression finds: '^FSDP 2$'"
    )
    parser.add_argument("--list", action="store_true", help="name the layouts, and run none")
    parser.add_argument("--write-docs", action="store_true", help=f"replace the table in {PAGE.relative_to(PROJECT)}")
    parser.add_argument("--random", metavar="N", type=int, help="N layouts drawn at random instead of the table's")
    parser.add_argument("--seed", type=int, default=0, help="which ones are drawn")
    parser.add_argument("--dataset", type=Path, help="train on this text file instead of the built-in stories")
    return parser.parse_args(words)


def main() -> int:
    """Run what the command line asks for; 0 if all rows pass, else 1."""
    arguments = parse_arguments()
    extra = _data_options(arguments.dataset)
    layouts = choose_layouts(arguments, extra)
    if not layouts:
        print(f"no layout is named like --only '{arguments.only}'; --list names them", file=sys.stderr)
        return 2
    if arguments.list:
        for layout in layouts:
            print(f"{layout.processes} processes: {layout.name}")
        return 0
    torch.set_num_threads(1)
    rows = run(layouts, extra)
    shown = [TableRow(cells(row), failed=not row.passed) for row in rows]
    print_table(f"largest relative differences from a single process (at most {TOLERANCE:.0e})", COLUMNS, shown)
    if arguments.write_docs:
        write_docs(PAGE, "matrix", as_markdown(COLUMNS, shown))
    return 0 if rows and all(row.passed for row in rows) else 1


def choose_layouts(arguments: argparse.Namespace, extra: Options) -> list[Layout]:
    """Those that the command line names."""
    if arguments.random is not None:
        return list(draw_layouts(arguments.random, arguments.seed, extra))
    return [
        layout
        for layout in all_layouts()
        if re.search(arguments.only, layout.name) and (arguments.long or not layout.long)
    ]


def _data_options(dataset: Path | None) -> Options:
    if dataset is None:
        return {}
    return {"dataloader__dataset": dataset, "validator__dataset": dataset}


def run(layouts: Sequence[Layout], extra: Options) -> list[Row]:
    """All rows, each told when it is there."""
    rows = []
    with Matrix(extra=extra) as matrix:
        for number, row in enumerate(matrix.run(layouts), start=1):
            rows.append(row)
            details = f" ({row.differences})" if row.differences and not row.passed else ""
            told = f"[{number}/{len(layouts)}] {row.layout.name}: {row.verdict}{details}, {row.seconds:.0f} s"
            print(told, file=sys.stderr, flush=True)
            if row.failure:
                print(row.failure, file=sys.stderr, flush=True)
    return rows


def cells(row: Row) -> tuple[str, ...]:
    """A row's text, by `COLUMNS`."""
    numbers = ("", "", "", "")
    if row.differences:
        d = row.differences
        numbers = tuple(f"{value:.0e}" for value in (d.loss, d.grad_norm, d.validation_loss, d.weights))  # type: ignore[assignment]
    return (row.layout.name, str(row.layout.processes), *numbers, row.verdict)


if __name__ == "__main__":
    sys.exit(main())
