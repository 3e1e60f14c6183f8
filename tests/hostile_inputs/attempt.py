"""One case: one command in a new process, on a copy of the example files with one hostile file, and
the verdict."""

import contextlib
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.hostile_inputs.mutators import CANARY, Mutator
from tests.hostile_inputs.places import REPLACEMENTS, Replacement, forge
from tests.hostile_inputs.subjects import ALWAYS, DESTRUCTIVE, Subject
from tests.hostile_inputs.world import SECRET, Command
from torchtitan.cli.main import main

HANG_SECONDS = 20.0
"""Processor time after which a case hangs, since the machine may be busy."""

WAITING = 6
"""A case that waits hangs after so many times `HANG_SECONDS`."""

MEMORY_BYTES = 8 * 2**30
"""Address space of a case beyond the one of this process."""

_POLL_SECONDS = 0.002
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

Verdict = Literal[
    "accepted", "refused", "traceback", "hang", "executed", "silent", "leaked", "escape"
]
DEFECTS: tuple[Verdict, ...] = ("traceback", "hang", "executed", "silent", "leaked", "escape")
"""An exception with its traceback, or a process that dies; no end within `HANG_SECONDS`; code of
the file was executed; damage was accepted, or changed a result, without a message; the content of a
file outside the folder was copied; control characters were printed."""


@dataclass(frozen=True)
class Case:
    """One change to one file, drawn by `draw`."""

    subject: Subject
    file: str
    change: Mutator | Replacement
    command: Command
    seed: int

    @property
    def name(self) -> str:
        """Text for the report."""
        return f"{self.subject.name}: {self.file} {self.change.__name__}, seed {self.seed}"

    def apply(self, world: Path) -> None:
        """Change the file; the current folder is the copy, `world`."""
        path, generator = world / self.file, random.Random(self.seed)
        if self.change in REPLACEMENTS:
            path.unlink()
            self.change(path, generator)  # type: ignore[arg-type]
        else:
            path.write_bytes(self.change(path.read_bytes(), generator))  # type: ignore[arg-type]
            if self.subject.forged:
                forge(world / self.subject.forged)


@dataclass(frozen=True)
class Result:
    """The end of a case."""

    verdict: Verdict
    printed: str


def draw(subject: Subject, world: Path, seed: int) -> Case:
    """Return the case of that seed."""
    generator = random.Random(f"{subject.name} {seed}")
    file = generator.choice(
        [found for pattern in subject.files for found in sorted(world.glob(pattern))]
    )
    change = generator.choice((*subject.mutators, *ALWAYS, generator.choice(REPLACEMENTS)))
    is_json = file.suffix in (".json", ".jsonl")
    if change.__name__ == "changed_json" and not is_json:
        change = generator.choice(ALWAYS)
    return Case(
        subject, str(file.relative_to(world)), change, generator.choice(subject.commands), seed
    )


def last_loss(world: Path, subject: Subject) -> float | None:
    """Return the loss of the last step in the subject's result; None if it has no steps."""
    losses = []
    for line in (world / subject.result).read_bytes().splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError):
            losses.append(json.loads(line)["loss"])
    return losses[-1] if losses else None


def attempt(case: Case, world: Path, workplace: Path, expected: float | None) -> Result:
    """Try a case on a copy of the world, which is removed.

    Args:
        expected: the correct last loss of the subject's result.
    """
    place = workplace / str(os.getpid())
    copy = place / "case"
    shutil.copytree(world, copy, symlinks=True)
    try:
        with contextlib.chdir(copy):
            case.apply(copy)
        code, printed = run(case.command, copy)
        return Result(verdict_of(case, copy, code, printed, expected), printed)
    finally:
        shutil.rmtree(place)


def run(
    command: Command, folder: Path, function: Callable[[Sequence[str]], int] = main
) -> tuple[int | None, str]:
    """Run a command in a forked process, without imports; return the exit code (None if it hung)
    and output."""
    output = folder.parent / "printed"
    child = os.fork()
    if child == 0:
        _become(command, folder, output, function)
    deadline = time.monotonic() + WAITING * HANG_SECONDS
    ended = 0
    while not ended and time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0 if ended else _POLL_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not ended:
        os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status) if ended else -signal.SIGXCPU
    printed = output.read_text(errors="surrogateescape")
    return None if code == -signal.SIGXCPU else code, printed


def _become(
    command: Command, folder: Path, output: Path, function: Callable[[Sequence[str]], int]
) -> None:
    """Run the command in this process, and end it."""
    code = 1
    try:
        os.setsid()
        os.chdir(folder)
        os.environ["TORCHTITAN_CACHE"] = str(folder / "cache")
        sys.path.insert(0, str(folder))  # as `python -m` does
        descriptor = os.open(output, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(descriptor, stream)
        os.dup2(os.open(folder / "stdin", os.O_RDONLY | os.O_CREAT), 0)
        # A command that is forked from this one gets other objects, and these must not close then.
        sys.stdin, sys.stdout, sys.stderr = (
            open(n, mode, closefd=False) for n, mode in ((0, "r"), (1, "w"), (2, "w"))
        )
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(HANG_SECONDS), resource.RLIM_INFINITY))
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (_address_space() + MEMORY_BYTES, hard))
        code = function(command)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def verdict_of(
    case: Case, copy: Path, code: int | None, printed: str, expected: float | None
) -> Verdict:
    """Return the verdict on a case from what its command left in the folder, its exit code, and its
    output."""
    if (copy / CANARY).exists():
        return "executed"
    if code is None:
        return "hang"
    if code not in (0, 2, 3) or "Traceback (most recent call last)" in printed:
        return "traceback"
    if _leaks(copy, case):
        return "leaked"
    if _CONTROL.search(printed):
        return "escape"
    if code != 0:
        return "refused"
    is_destroyed = case.change.__name__ in DESTRUCTIVE and case.subject.noticed
    if case.subject.result:
        return "accepted" if last_loss(copy, case.subject) == expected else "silent"
    return "silent" if is_destroyed else "accepted"


def _leaks(copy: Path, case: Case) -> bool:
    """Return whether a file that was written has the content of a file outside the folder."""
    known = {copy / "secret.txt", copy / case.file}
    files = [
        path
        for path in copy.rglob("*")
        if path.is_file() and not path.is_symlink() and path not in known
    ]
    return any(SECRET.encode() in path.read_bytes() for path in files)
