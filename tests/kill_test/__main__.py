"""`python -m tests.kill_test`: kill and resume runs, and print a table or write it to the
documentation."""

import argparse
import random
import re
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

from tests.conftest import PROJECT
from tests.kill_test.campaign import Campaign, Outcome
from tests.kill_test.disks import Disk
from tests.kill_test.modes import MODES, ROUNDING, Mode
from tests.kill_test.records import Difference
from tests.tables import Row, as_markdown, describe, markers, print_table, write_docs

PAGE = PROJECT / "docs" / "checkpoints.md"
COLUMNS = (
    "mode",
    "kills",
    "inside a save",
    "resumed after step",
    "logged numbers",
    "last checkpoint",
)


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.kill_test", description=__doc__)
    parser.add_argument("--kills", type=int, default=20, help="kills per mode (default: 20)")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the times of kills (default: 0)"
    )
    parser.add_argument(
        "--only",
        metavar="PATTERN",
        default="",
        help="only modes whose name matches this regular expression",
    )
    parser.add_argument("--list", action="store_true", help="list the modes and exit")
    parser.add_argument(
        "--dataset", type=Path, help="text file for training (default: a generated one)"
    )
    parser.add_argument(
        "--write-docs",
        action="store_true",
        help=f"replace the table in {PAGE.relative_to(PROJECT)}",
    )
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Run what the command line asks for: 0 if all modes pass, 1 if one does not, 2 for a mistake
    in it."""
    arguments = parse_arguments(words)
    modes = [mode for mode in MODES if re.search(arguments.only, mode.name)]
    if mistake := find_mistake(arguments, modes):
        print(mistake, file=sys.stderr)
        return 2
    if arguments.list:
        print("\n".join(mode.name for mode in modes))
        return 0
    # DCP: one process reads a checkpoint
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    outcomes, failed = run(modes, arguments)
    rows = [Row(cells(outcome), failed=not outcome.passed) for outcome in outcomes]
    title = (
        f"killed runs and ones left alone; differences are relative, and {ROUNDING:.0e} is allowed "
        "for rounding"
    )
    print_table(title, COLUMNS, rows)
    if arguments.write_docs and not failed:
        source = describe("tests.kill_test", arguments, "kills", "seed", "only", "dataset")
        write_docs(PAGE, "kill", f"{source}\n\n{as_markdown(COLUMNS, rows)}")
    return 1 if failed else 0


def find_mistake(arguments: argparse.Namespace, modes: Sequence[Mode]) -> str:
    """Return the reason why the command line cannot be run, or an empty string."""
    if not modes:
        return f"no mode is named like --only '{arguments.only}'; --list names them"
    if arguments.kills < 1:
        return f"--kills is {arguments.kills}, but must be at least 1"
    if arguments.write_docs and (
        missing := [marker for marker in markers("kill") if marker not in PAGE.read_text()]
    ):
        return (
            f"--write-docs: {PAGE.relative_to(PROJECT)} has no marker "
            f"{' and no marker '.join(missing)}"
        )
    return ""


def run(modes: Sequence[Mode], arguments: argparse.Namespace) -> tuple[list[Outcome], bool]:
    """Return the outcomes of all completed modes, and whether a mode failed."""
    workplace = Path(tempfile.mkdtemp(prefix="kill-test-"))
    dataset = (
        arguments.dataset.resolve()
        if arguments.dataset
        else write_text(workplace / "text.txt", arguments.seed)
    )
    campaign = Campaign(workplace, dataset, arguments.kills, arguments.seed)
    outcomes, failed = [], False
    for mode in modes:
        if mode.needs_disk and (obstacle := Disk.obstacle()):
            tell(f"{mode.name}: skipped, for {obstacle}")
            continue
        try:
            outcomes.append(outcome := campaign.run(mode))
        except Exception:  # the other modes still run
            failed = True
            tell(f"{mode.name}, seed {arguments.seed}: failed\n{traceback.format_exc()}")
        else:
            failed |= not outcome.passed
            tell(f"{mode.name}, seed {arguments.seed}: {verdict(outcome)}")
    if failed:
        tell(f"what the runs left behind is in {workplace}")
    else:
        shutil.rmtree(workplace)
    return outcomes, failed


def tell(text: str) -> None:
    """Print the outcome immediately, in addition to the table."""
    print(text, file=sys.stderr, flush=True)


def write_text(path: Path, seed: int) -> Path:
    """Return a text with about a thousand sentences of made-up words."""
    generator = random.Random(seed)
    words = [
        "".join(generator.choices("aeioulnrstm", k=generator.randint(2, 7))) for _ in range(500)
    ]
    sentences = (
        " ".join(generator.choices(words, k=generator.randint(4, 12))) for _ in range(3000)
    )
    path.write_text("".join(f"{sentence.capitalize()}.\n" for sentence in sentences))
    return path


def verdict(outcome: Outcome) -> str:
    """Describe a duration."""
    if outcome.passed:
        return "equal"
    compared = {"logged numbers": outcome.lines, "last checkpoint": outcome.state}
    texts = [
        f"{name} {as_text(outcome, difference)} {difference.place}"
        for name, difference in compared.items()
    ]
    return ", ".join([*map(str.rstrip, texts), *outcome.faults])


def cells(outcome: Outcome) -> tuple[str, ...]:
    """Return the cells of an outcome, by `COLUMNS`."""
    steps = ", ".join(map(str, outcome.resumed_steps))
    differences = [as_text(outcome, difference) for difference in (outcome.lines, outcome.state)]
    return (outcome.mode.name, str(outcome.kills), str(outcome.kills_in_save), steps, *differences)


def as_text(outcome: Outcome, difference: Difference) -> str:
    """Format for the table."""
    if difference.value == 0:
        return "identical"
    return (
        f"{'equal to' if difference.value <= outcome.mode.tolerance else 'DIFFERENT by'} "
        f"{difference.value:.0e}"
    )


if __name__ == "__main__":
    sys.exit(main())
