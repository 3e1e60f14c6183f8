"""Command line of the matrix of types: run it, print it as a table, and write it into the
documentation."""

import argparse
import re
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
import transformers

from tests.conftest import PROJECT
from tests.models.transformers.model_types import CAUSAL, IMAGE_TEXT
from tests.models_page import TABLE, page
from tests.tables import Row as TableRow
from tests.tables import as_markdown, print_table, stored_rows, write_docs
from tests.tiny_vision import ALL_VISION_TYPES, IN_ROWS
from tests.transformers_matrix.mechanisms import MECHANISMS, MechanismRow, run_mechanisms
from tests.transformers_matrix.trial import TOLERANCE, Row, run_trial
from tests.vision_types_b_to_g import B_TO_G_REFUSED
from tests.vision_types_i_to_m import I_TO_M_REFUSED, WITH_TORCHVISION
from tests.vision_types_m_to_v import REFUSED_M_TO_V
from tests.vision_types_of_captions import CAPTION_TYPES
from tests.vision_types_of_decoders import ENCODER_DECODERS

COLUMNS = ("model_type", "class", "packing", "layouts", "head", "images", "verdict")
MECHANISM_COLUMNS = (
    "model_type",
    "mechanism",
    "loss",
    "gradient norm",
    "validation",
    "weights",
    "resumed",
    "packed documents",
    "verdict",
    "seconds",
)
TYPES = sorted({*CAUSAL, *IMAGE_TEXT})

_LONGEST = 200
"""Characters of a message in the table."""


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.transformers_matrix", description=__doc__
    )
    parser.add_argument(
        "--only",
        metavar="PATTERN",
        default="",
        help="run only types that match this regular expression, such as '^qwen'",
    )
    parser.add_argument(
        "--part", metavar="I/N", default="1/1", help="run every N-th type, from the I-th on"
    )
    parser.add_argument("--processes", metavar="N", type=int, default=1, help="run N types at once")
    parser.add_argument(
        "--mechanisms",
        metavar="NAME",
        nargs="*",
        choices=MECHANISMS,
        help="train these types, one with each mechanism, in two processes instead (default: all "
        "of them)",
    )
    parser.add_argument("--list", action="store_true", help="list the types without running them")
    parser.add_argument(
        "--write-docs",
        action="store_true",
        help="replace the rows of these types in docs/models.md",
    )
    return parser.parse_args(words)


def main() -> int:
    """Run the selected types; return 0 if every one is equal to its class or refused, else 1."""
    arguments = parse_arguments()
    if arguments.mechanisms is not None:
        return train_mechanisms(
            arguments.mechanisms or list(MECHANISMS), is_written=arguments.write_docs
        )
    types = choose_types(arguments.only, arguments.part)
    if not types:
        print(f"no type matches --only '{arguments.only}' --part {arguments.part}", file=sys.stderr)
        return 2
    if arguments.list:
        print("\n".join(types))
        return 0
    start = time.monotonic()
    rows = []
    for number, row in enumerate(run(types, arguments.processes), start=1):
        rows.append(row)
        print(
            f"[{number}/{len(types)}] {row.model_type}: {verdict(row)}, {row.seconds:.0f} s",
            file=sys.stderr,
            flush=True,
        )
    shown = [TableRow(cells(row), failed=row.outcome not in ("equal", "refused")) for row in rows]
    print_table(
        f"compared with the class in transformers (at most {TOLERANCE:.0e})", COLUMNS, shown
    )
    print(f"{len(rows)} types in {time.monotonic() - start:.0f} s")
    if arguments.write_docs:
        write_docs(TABLE, "matrix", merge(TABLE, shown))
        write_page()
    return 0 if all(not row.failed for row in shown) else 1


def train_mechanisms(model_types: Sequence[str], *, is_written: bool) -> int:
    """Run the second tier for these types; return 0 if all are equal, else 1."""
    torch.set_num_threads(1)
    start, shown = time.monotonic(), list[TableRow]()
    for number, row in enumerate(run_mechanisms(model_types), start=1):
        shown.append(TableRow(mechanism_cells(row), failed=bool(row.problems)))
        line = (
            f"[{number}/{len(model_types)}] {row.model_type}: {'; '.join(row.problems) or 'equal'}"
        )
        print(f"{line}, {row.seconds:.0f} s", file=sys.stderr, flush=True)
    print_table("FSDP over two processes compared with one process", MECHANISM_COLUMNS, shown)
    print(f"{len(shown)} mechanisms in {time.monotonic() - start:.0f} s")
    if is_written:
        stored = stored_rows(TABLE, "mechanisms") | {
            row.cells[0]: tuple(row.cells) for row in shown
        }
        table = [TableRow(stored[name]) for name in MECHANISMS if name in stored]
        equal = sum(row.cells[-2] == "equal" for row in table)
        seconds = sum(int(row.cells[-1]) for row in table)
        counts = f"{equal} of {len(table)} are equal. They took {seconds} s."
        write_docs(TABLE, "mechanisms", f"{counts}\n\n{as_markdown(MECHANISM_COLUMNS, table)}")
        write_page()
    return 0 if all(not row.failed for row in shown) else 1


def write_page() -> None:
    """Write docs/models.md."""
    (PROJECT / "docs" / "models.md").write_text("\n".join(page()) + "\n")


def choose_types(only: str = "", part: str = "1/1") -> list[str]:
    """Return the types that the command line selects."""
    first, step = (int(number) for number in part.split("/"))
    return [name for name in TYPES if re.search(only, name)][first - 1 :: step]


def run(types: Sequence[str], processes: int = 1) -> Iterator[Row]:
    """Yield the row of each type in the order of `types`."""
    with ProcessPoolExecutor(
        processes, get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        yield from pool.map(run_trial, types)


def verdict(row: Row) -> str:
    """Return the result in words."""
    return in_cell(f"{row.outcome}: {row.details}" if row.details else row.outcome)


def in_cell(text: str) -> str:
    """Return a message as one cell of a table."""
    text = re.sub(r"\s+", " ", text).replace("|", "/").replace("<", "&lt;")
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def mechanism_cells(row: MechanismRow) -> tuple[str, ...]:
    """Return the text of a row for each of `MECHANISM_COLUMNS`."""
    numbers, resumed = ("",) * 4, ""
    if row.differences:
        d = row.differences
        numbers = tuple(
            f"{value:.0e}" for value in (d.loss, d.grad_norm, d.validation_loss, d.weights)
        )  # type: ignore[assignment]
        resumed = f"other {row.changed_bits}" if row.changed_bits else "same bits"
    packing = f"{row.packing}: {row.leak:.0e}" if row.packing else ""
    result = in_cell("; ".join(row.problems) or "equal")
    return (
        row.model_type,
        MECHANISMS[row.model_type],
        *numbers,
        resumed,
        packing,
        result,
        f"{row.seconds:.0f}",
    )


def cells(row: Row) -> tuple[str, ...]:
    """Return the text of a row for each of `COLUMNS`."""
    numbers = row.model_type, row.class_name, row.packing, row.layouts, row.head
    return *numbers, images_of(row.model_type), verdict(row)


def images_of(model_type: str) -> str:
    """Return how a type trains on images, by `tests/models/test_images.py`."""
    if model_type in {*CAPTION_TYPES, *ENCODER_DECODERS}:
        return "rows"
    if model_type in {*ALL_VISION_TYPES, *WITH_TORCHVISION}:
        return "rows" if model_type in IN_ROWS else "packed"
    if model_type in {*B_TO_G_REFUSED, *I_TO_M_REFUSED, *REFUSED_M_TO_V}:
        return "refused"
    return "untested" if model_type in IMAGE_TEXT else ""


def merge(page: Path, rows: Sequence[TableRow]) -> str:
    """Return a page's table with these rows replacing the same types' rows, below a line that
    counts them."""
    stored = {name: line for name, line in stored_rows(page, "matrix").items() if name in TYPES}
    merged = stored | {row.cells[0]: tuple(row.cells) for row in rows}
    table = [TableRow(merged[name]) for name in sorted(merged)]
    built = [row for row in table if row.cells[1]]
    equal = sum(row.cells[-1] == "equal" for row in built)
    refused = sum(row.cells[-1].startswith("refused") for row in built)
    counts = (
        f"transformers {transformers.__version__} has {len(table)} types. {len(built)} "
        f"({len(built) / len(table):.1%}) build; of these, {equal} ({equal / len(built):.1%}) "
        f"train equally, {refused} are refused since they do not predict the next token of text "
        f"alone, and {len(built) - equal - refused} differ."
    )
    return f"{counts}\n\n{as_markdown(COLUMNS, table)}"


if __name__ == "__main__":
    sys.exit(main())
