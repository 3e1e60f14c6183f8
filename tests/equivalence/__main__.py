"""Command line of the equivalence matrix: run it, print it as a table, and write it into the
documentation."""

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
from tests.tables import as_markdown, print_table, stored_rows, write_docs

PAGE = PROJECT / "docs" / "parallelism.md"
COLUMNS = ("layout", "processes", "loss", "gradient norm", "validation", "weights", "verdict")


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.equivalence", description=__doc__)
    parser.add_argument(
        "--long", action="store_true", help="also run layouts of eight processes and with inductor"
    )
    parser.add_argument(
        "--only",
        metavar="PATTERN",
        default="",
        help="run only layouts whose name matches this regular expression, such as '^FSDP 2$'",
    )
    parser.add_argument("--list", action="store_true", help="list the layouts without running them")
    parser.add_argument(
        "--write-docs",
        action="store_true",
        help=f"write these rows into {PAGE.relative_to(PROJECT)}",
    )
    parser.add_argument(
        "--random", metavar="N", type=int, help="run N random layouts instead of the table"
    )
    parser.add_argument(
        "--hybrids",
        action="store_true",
        help="with --random: only models whose layers differ, or whose attention is latent",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random layouts")
    parser.add_argument(
        "--dataset", type=Path, help="train on this text file instead of the built-in stories"
    )
    return parser.parse_args(words)


def main() -> int:
    """Run the selected layouts; return 0 if all rows pass, else 1."""
    arguments = parse_arguments()
    extra = _data_options(arguments.dataset)
    layouts = choose_layouts(arguments, extra)
    if not layouts:
        print(
            f"no layout matches --only '{arguments.only}'; --list prints their names",
            file=sys.stderr,
        )
        return 2
    if arguments.list:
        for layout in layouts:
            print(f"{layout.processes} processes: {layout.name}")
        return 0
    torch.set_num_threads(1)
    rows = run(layouts, extra)
    shown = [TableRow(cells(row), failed=not row.passed) for row in rows]
    print_table(
        f"largest relative differences from a single process (at most {TOLERANCE:.0e})",
        COLUMNS,
        shown,
    )
    if arguments.write_docs:
        write_docs(PAGE, "matrix", merge(PAGE, shown))
    return 0 if rows and all(row.passed for row in rows) else 1


def choose_layouts(arguments: argparse.Namespace, extra: Options) -> list[Layout]:
    """Return the layouts that the command line selects."""
    if arguments.random is not None:
        print(f"random layouts of --seed {arguments.seed}", file=sys.stderr)
        return list(
            draw_layouts(arguments.random, arguments.seed, extra, hybrids=arguments.hybrids)
        )
    return [
        layout
        for layout in all_layouts()
        if re.search(arguments.only, layout.name) and (arguments.long or not layout.long)
    ]


def merge(page: Path, rows: Sequence[TableRow]) -> str:
    """Return a page's table with these rows replacing the same layouts' rows, in the order of the
    layouts."""
    merged = stored_rows(page, "matrix") | {row.cells[0]: tuple(row.cells) for row in rows}
    return as_markdown(
        COLUMNS,
        [TableRow(merged[layout.name]) for layout in all_layouts() if layout.name in merged],
    )


def _data_options(dataset: Path | None) -> Options:
    if dataset is None:
        return {}
    return {"dataloader__dataset": dataset, "validator__dataset": dataset}


def run(layouts: Sequence[Layout], extra: Options) -> list[Row]:
    """Run the layouts and return all rows; print each row when it is finished."""
    rows = []
    with Matrix(extra=extra) as matrix:
        for number, row in enumerate(matrix.run(layouts), start=1):
            rows.append(row)
            details = f" ({row.differences})" if row.differences and not row.passed else ""
            line = (
                f"[{number}/{len(layouts)}] {row.layout.name}: {row.verdict}{details}, "
                f"{row.seconds:.0f} s"
            )
            print(line, file=sys.stderr, flush=True)
            if row.failure:
                print(row.failure, file=sys.stderr, flush=True)
    return rows


def cells(row: Row) -> tuple[str, ...]:
    """Return the text of a row for each of `COLUMNS`."""
    numbers = ("", "", "", "")
    if row.differences:
        d = row.differences
        numbers = tuple(
            f"{value:.0e}" for value in (d.loss, d.grad_norm, d.validation_loss, d.weights)
        )  # type: ignore[assignment]
    return (row.layout.name, str(row.layout.processes), *numbers, row.verdict)


if __name__ == "__main__":
    sys.exit(main())
