"""Commands handle hostile and damaged files, and the fuzzer detects defects."""

import dataclasses
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.commands import run_command
from tests.conftest import PROJECT
from tests.hostile_inputs import attempt as attempts
from tests.hostile_inputs import mutators
from tests.hostile_inputs.attempt import Case, Verdict, run, verdict_of
from tests.hostile_inputs.mutators import CANARY, zeroed
from tests.hostile_inputs.subjects import SUBJECTS, Subject
from tests.hostile_inputs.world import SECRET

RECORD = '{"step": 1, "loss": 1.5}\n'
SUBJECT = Subject("planted", ["file"], [["train"]])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "case"
    folder.mkdir()
    (folder / "stdin").touch()
    (folder / "secret.txt").write_text(SECRET)
    (folder / "file").write_text("content")
    return folder


def judge(folder: Path, act, subject: Subject = SUBJECT, expected: float | None = None) -> Verdict:
    """Return the verdict on a command that runs `act` on a file of zeros."""
    code, printed = run(["train"], folder, act)
    return verdict_of(Case(subject, "file", zeroed, ["train"], 0), folder, code, printed, expected)


def refuses(words: Sequence[str]) -> int:
    print("file is damaged", file=sys.stderr)
    return 2


def raises(words: Sequence[str]) -> int:
    raise ValueError("a bug")


def dies(words: Sequence[str]) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def hangs(words: Sequence[str]) -> int:
    time.sleep(60)
    return 0


def executes(words: Sequence[str]) -> int:
    Path(CANARY).touch()
    return 2


def accepts(words: Sequence[str]) -> int:
    return 0


def copies(words: Sequence[str]) -> int:
    Path("export").write_text(SECRET)
    return 2


def prints_escapes(words: Sequence[str]) -> int:
    print("\x1b[2J")
    return 2


def fills_memory(words: Sequence[str]) -> int:
    return len(bytearray(2 * attempts.MEMORY_BYTES))


@pytest.mark.parametrize(
    ("act", "verdict"),
    [
        (refuses, "refused"),
        (raises, "traceback"),
        (dies, "traceback"),
        (executes, "executed"),
        (accepts, "silent"),
        (copies, "leaked"),
        (prints_escapes, "escape"),
        (fills_memory, "traceback"),
    ],
)
def test_injected_defects_are_found(folder: Path, act, verdict: Verdict) -> None:
    assert judge(folder, act) == verdict


def test_endless_command_is_a_hang(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "HANG_SECONDS", 0.2)
    assert judge(folder, hangs) == "hang"


def test_different_result_is_silent_damage(folder: Path) -> None:
    subject = dataclasses.replace(SUBJECT, result="metrics.jsonl")
    (folder / "metrics.jsonl").write_text(RECORD)
    assert judge(folder, accepts, subject, expected=1.5) == "accepted"
    assert judge(folder, accepts, subject, expected=1.25) == "silent"


@pytest.mark.parametrize(
    "mutator", dict.fromkeys(mutator for subject in SUBJECTS for mutator in subject.mutators)
)
def test_mutators_are_seeded_and_change_something(mutator) -> None:
    content = {
        "changed_line": b'{"a": [1, 2], "b": "c"}\n' * 3,
        "changed_header": (2).to_bytes(8, "little") + b'{"t": {"shape": [1]}}',
    }.get(mutator.__name__, b'{"a": [1, {"b": "c"}]}')
    if mutator is mutators.changed_header:
        content = (len(content) - 8).to_bytes(8, "little") + content[8:]
    changed = [mutator(content, random.Random(seed)) for seed in range(10)]
    assert changed == [mutator(content, random.Random(seed)) for seed in range(10)]
    assert sum(one != content for one in changed) > 7
    assert len(set(changed)) > 3


@pytest.mark.parametrize(
    "cases", [pytest.param(200, marks=pytest.mark.slow), pytest.param(2000, marks=pytest.mark.long)]
)
def test_hostile_files(cases: int) -> None:
    command = [sys.executable, "-m", "tests.hostile_inputs", "--cases", str(cases)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    tried = run_command(command, cwd=PROJECT, env=environment, timeout=3600)
    assert tried.returncode == 0, tried.stdout + tried.stderr
