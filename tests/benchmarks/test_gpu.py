"""`benchmarks/gpu.sh`: every row at toy size on the CPU."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import gpu
import pytest
from gpu_rows import kernel_class

from tests.conftest import PROJECT

QUICK = [
    "1B eager",
    "attention kernels",
    "experts",
    "generation",
    "generation without CUDA graphs",
    "profiled step",
]


def lines_of(folder: Path, *words: str) -> list[dict[str, Any]]:
    results = folder / "results.jsonl"
    command = [PROJECT / "benchmarks" / "gpu.sh", "--toy", "--results", results, *words]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert results.read_text() == done.stdout
    return [json.loads(line) for line in done.stdout.splitlines()]


def assert_measured(lines: list[dict[str, Any]], *rows: str) -> None:
    assert [line["row"] for line in lines] == ["machine", *rows]
    assert [line for line in lines if "error" in line] == []
    results = [line["result"] for line in lines]
    results += [part for result in results for part in result.values() if isinstance(part, dict)]
    speeds = [result["tokens_per_second"] for result in results if "tokens_per_second" in result]
    assert speeds and all(speed > 0 for speed in speeds)


@pytest.mark.slow
def test_a_row_writes_its_line(tmp_path: Path):
    assert_measured(lines_of(tmp_path, "--rows", *QUICK), *QUICK)


@pytest.mark.long
def test_every_row_runs(tmp_path: Path):
    assert_measured(lines_of(tmp_path), *gpu.ROWS)


def test_a_row_that_fails_or_hangs_costs_only_itself(monkeypatch: pytest.MonkeyPatch):
    size = gpu.Size(toy=True)
    rows = {
        "fails": lambda size: 1 // 0,
        "dies": lambda size: os._exit(3),
        "works": lambda size: {"x": 1.0},
    }
    monkeypatch.setattr(gpu, "ROWS", {**rows, "hangs": lambda size: os.read(os.pipe()[0], 1)})
    lines = {row: gpu.run_row(row, size, limit=0.5 if row == "hangs" else 60) for row in gpu.ROWS}
    assert lines["works"]["result"] == {"x": 1.0}
    assert lines["fails"]["error"].startswith("ZeroDivisionError")
    assert lines["dies"]["error"] == "the process died"
    assert lines["hangs"]["error"] == "no result within 0 s"


def test_kernels_are_classified():
    names = [
        "nvjet_hsh_128x128",
        "flash_fwd_kernel",
        "ncclDevKernel_AllReduce",
        "triton_poi_fused_mul",
        "aten::mm",
    ]
    classes = ["matrix products", "attention", "communication", "compiled", "matrix products"]
    assert [kernel_class(name) for name in names] == classes
