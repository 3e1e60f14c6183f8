"""`benchmarks/compare.py`: speed lost between two results."""

import copy
import json
import sys
from pathlib import Path
from typing import Any

import compare
import pytest

OLD: dict[str, Any] = {
    "processor": {"name": "Example CPU"},
    "threads": 2,
    "jobs": {
        "A, float32": {
            "torchtitan": {
                "tokens_per_second": [100.0, 90.0, 110.0],
                "memory_gib": [2.0, 2.0, 2.0],
            },
            "trainer": {"tokens_per_second": [50.0, 50.0, 50.0], "memory_gib": [4.0, 4.0, 4.0]},
            "fastest peer": {"speed_ratio": [2.0, 1.8, 2.2], "memory_ratio": [0.5, 0.5, 0.5]},
        },
        "D, float32": {
            "torchtitan": {"first_step_seconds": [5.0, 5.0, 5.0], "memory_gib": [1.0, 1.0, 1.0]},
            "fastest peer": {"speed_ratio": [2.0, 2.0, 2.0], "memory_ratio": [0.5, 0.5, 0.5]},
        },
        "P, gpt2": {
            "torchtitan": {"mb_per_second": [20.0, 19.0, 21.0]},
            "before": {"mb_per_second": [1.0, 1.0, 1.0], "speed_ratio": [20.0, 20.0, 20.0]},
            "fastest peer": {"speed_ratio": [20.0, 20.0, 20.0]},
        },
    },
}


def compared(
    new: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *options: str
) -> int:
    for name, document in (("old.json", OLD), ("new.json", new)):
        (tmp_path / name).write_text(json.dumps(document))
    paths = [str(tmp_path / "old.json"), str(tmp_path / "new.json")]
    monkeypatch.setattr(sys, "argv", ["compare.py", *paths, *options])
    return compare.main()


def changed(job: str, system: str, name: str, median: float, **document: Any) -> dict[str, Any]:
    new = copy.deepcopy(OLD) | document
    new["jobs"][job][system][name][0] = median
    return new


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (("A, float32", "torchtitan", "tokens_per_second", 90.0), 1),
        (("A, float32", "torchtitan", "tokens_per_second", 96.0), 0),
        (("A, float32", "torchtitan", "tokens_per_second", 150.0), 0),
        (("A, float32", "trainer", "tokens_per_second", 10.0), 0),  # a peer
        (("A, float32", "torchtitan", "memory_gib", 3.0), 0),  # not slower
        (("D, float32", "torchtitan", "first_step_seconds", 6.0), 1),
        (("D, float32", "torchtitan", "first_step_seconds", 4.0), 0),
        (("P, gpt2", "torchtitan", "mb_per_second", 10.0), 1),
        (("P, gpt2", "torchtitan", "mb_per_second", 30.0), 0),
        (("P, gpt2", "before", "mb_per_second", 0.5), 0),
    ],
)
def test_slower_torchtitan_fails(
    change: Any, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert compared(changed(*change), tmp_path, monkeypatch) == code


def test_tolerance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    new = changed("A, float32", "torchtitan", "tokens_per_second", 90.0)
    assert compared(new, tmp_path, monkeypatch, "--tolerance", "0.11") == 0
    assert compared(new, tmp_path, monkeypatch, "--tolerance", "0.09") == 1
    [line] = [line for line in capsys.readouterr().out.splitlines() if "SLOWER" in line]
    assert line.split() == "A, float32 torchtitan speed -10.0% memory +0.0% SLOWER".split()


@pytest.mark.parametrize("other", [{"processor": {"name": "Slow CPU"}}, {"threads": 1}])
def test_another_machine_is_compared_by_the_ratio_to_peers(
    other: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert (
        compared(
            changed("A, float32", "torchtitan", "tokens_per_second", 50.0, **other),
            tmp_path,
            monkeypatch,
        )
        == 0
    )
    assert (
        compared(
            changed("A, float32", "fastest peer", "speed_ratio", 1.5, **other),
            tmp_path,
            monkeypatch,
        )
        == 1
    )


def test_jobs_and_systems_of_one_file_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    new = copy.deepcopy(OLD)
    del new["jobs"]["D, float32"], new["jobs"]["P, gpt2"], new["jobs"]["A, float32"]["trainer"]
    assert {(change.job, change.system) for change in compare.changes(OLD, new)} == {
        ("A, float32", "torchtitan"),
        ("A, float32", "fastest peer"),
    }
