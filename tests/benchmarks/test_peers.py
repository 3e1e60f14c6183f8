"""The runs of `benchmarks/peers.py`, and the numbers that it derives from them."""

import dataclasses
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import peers
import pytest
from systems import runs
from systems.report import FASTEST, OURS, Run, summarize, table
from systems.task import NEW_TOKENS, Task
from tokenizers import Tokenizer

from tests.conftest import PROJECT

CPUINFO = """processor\t: 0
model name\t: Example CPU 9000 @ 2.5GHz
flags\t\t: fpu avx2 avx512f amx_bf16_other
processor\t: 1
model name\t: Example CPU 9000 @ 2.5GHz
flags\t\t: fpu avx2 avx512f amx_bf16_other
"""

TINY: dict[str, Any] = {
    "vocab_size": 2050,
    "seq_len": 32,
    "precision": "float32",
    "compile": False,
    "data": "",
    "tokenizer": "",
    "widths": {"dim": 32, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 64},
}


RUN_SECONDS = 300
"""Limit of a run of seconds, for machines that do other work too."""


@pytest.fixture
def step_log(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, float]]:
    """The steps that `runs.measure` reads."""
    steps: list[dict[str, float]] = []
    monkeypatch.setattr(runs, "numbers_of", lambda log, *_: steps.extend(log) or {})
    return steps


def make_run(system: str, round: int, speed: float, memory: float) -> Run:
    return Run(
        job="A",
        precision="float32",
        system=system,
        round=round,
        first_step_seconds=5.0,
        step_seconds=2048 / speed,
        tokens_per_second=speed,
        labels_per_second=speed / 2,
        memory_gib=memory,
        cores_used=2.0,
    )


def test_numbers_are_medians_of_the_steps_after_the_warm_up():
    ends = [107.0, 117.0, 119.0, 123.0, 124.0]  # steps of 10 (warm-up), 2, 4 and 1 seconds
    steps = [{"time": end, "tokens": 80, "labels": 40} for end in ends]
    assert runs.numbers_of(steps, started=100.0, warm_up=2) == {
        "first_step_seconds": 7.0,
        "step_seconds": 2.0,
        "tokens_per_second": 40.0,
        "labels_per_second": 20.0,
    }
    with_first_steps = runs.numbers_of(steps, started=100.0, warm_up=1)
    assert with_first_steps["step_seconds"] == 3.0


def test_speed_is_the_median_of_speeds_when_steps_differ_in_tokens():
    steps = [
        {"time": end, "tokens": n, "labels": 1}
        for end, n in ((1.0, 0), (2.0, 10), (4.0, 60), (5.0, 20))
    ]
    assert runs.numbers_of(steps, started=0.0, warm_up=1)["tokens_per_second"] == 20.0


def test_only_the_first_step():
    numbers = runs.numbers_of([{"time": 7.5, "tokens": 8, "labels": 8}], started=5.0, warm_up=None)
    assert numbers["first_step_seconds"] == 2.5
    assert numbers["tokens_per_second"] is None


@pytest.mark.parametrize(("n_steps", "warm_up"), [(0, None), (2, 2)])
def test_too_few_steps(n_steps: int, warm_up: int | None):
    with pytest.raises(runs.RunFailed, match=f"{n_steps} steps"):
        runs.numbers_of([{"time": 1.0, "tokens": 1, "labels": 1}] * n_steps, 0.0, warm_up)


def test_ratios_are_to_the_fastest_peer_of_each_round():
    rounds = [
        {OURS: (200.0, 1.0), "a": (100.0, 4.0), "b": (50.0, 1.0)},
        {OURS: (300.0, 1.0), "a": (100.0, 4.0), "b": (200.0, 2.0)},
        {OURS: (400.0, 1.0), "b": (100.0, 2.0)},  # a has failed
    ]
    all_runs = [
        make_run(system, i, *numbers)
        for i, of in enumerate(rounds)
        for system, numbers in of.items()
    ]
    summary = summarize(all_runs, flops_per_token=10.0, peak_flops=12_000.0)
    assert summary[OURS]["tokens_per_second"] == [300.0, 200.0, 400.0]
    assert summary[OURS]["mfu"] == 0.25
    assert "speed_ratio" not in summary[OURS]
    assert summary["a"]["speed_ratio"] == [2.5, 2.0, 3.0]
    assert summary["b"]["speed_ratio"] == [4.0, 1.5, 4.0]
    assert summary[FASTEST] == {"speed_ratio": [2.0, 1.5, 4.0], "memory_ratio": [0.5, 0.25, 0.5]}
    last_row = table("A", summary).splitlines()[-1]
    assert "| 2.00 (1.50–4.00) | 0.50 (0.25–0.50) |" in last_row


def test_first_steps_compare_by_their_time():
    untimed = {"step_seconds": None, "tokens_per_second": None, "labels_per_second": None}
    shared: dict[str, Any] = {
        "job": "D",
        "precision": "float32",
        "round": 0,
        "memory_gib": 1.0,
        "cores_used": 1.0,
    }
    slow, fast, ours = (
        Run(system=system, first_step_seconds=seconds, **shared, **untimed)
        for system, seconds in (("slow", 30.0), ("fast", 10.0), (OURS, 5.0))
    )
    summary = summarize([ours, slow, fast], 1.0, 1.0)
    assert summary[FASTEST]["speed_ratio"] == [2.0, 2.0, 2.0]
    assert "tokens_per_second" not in summary[OURS]
    assert "5.0 (5.0–5.0)" in table("D", summary)


def test_no_peer_is_installed():
    assert list(summarize([make_run(OURS, 0, 100.0, 1.0)], 1.0, 1.0)) == [OURS]


def test_memory_is_what_the_process_itself_reports():
    """In a small process like `peers.py`: the peak of a new process starts at its parent's, which
    is large in tests."""
    child = (
        "x = b'x' * 300_000_000; print(*(l for l in open('/proc/self/status') if "
        "l.startswith('VmHWM')))"
    )
    parent = f"""if True:
        import subprocess, sys, time
        import peers
        from systems import runs
        assert "torch" not in sys.modules
        process = subprocess.Popen([sys.executable, "-c", {child!r}])
        print(runs.wait(process, time.monotonic() + 60).ru_maxrss)
    """
    output = subprocess.run(
        [sys.executable, "-c", parent],
        capture_output=True,
        text=True,
        check=True,
        cwd=PROJECT / "benchmarks",
    ).stdout
    own_kib, measured_kib = map(int, re.findall(r"\d+", output))
    assert own_kib > 290_000
    assert measured_kib == pytest.approx(own_kib, rel=0.02)  # the process ends after its report


def test_a_process_is_killed_at_its_deadline():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    started = time.monotonic()
    runs.wait(process, started + 0.2)
    assert process.returncode == -9
    assert time.monotonic() - started < 30


def test_a_failed_program_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "broken.py").write_text("raise SystemExit('no such model')")
    monkeypatch.setitem(runs.SYSTEMS, "broken", runs.System("pytest", str(tmp_path / "broken.py")))
    task = Task(kind="pretrain", steps=1, **TINY)
    with pytest.raises(runs.RunFailed, match="0 steps, .* exit code 1: no such model"):
        runs.measure("broken", task, sys.executable, threads=1, limit=60, warm_up=None)


def test_interpreters_are_searched_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\necho 7.0\n")
    other.chmod(0o755)
    monkeypatch.setitem(runs.SYSTEMS, "other", runs.System("no-such-package-anywhere"))
    found = runs.find_interpreters([OURS, "other"], [sys.executable, str(other)])
    assert found[OURS][0] == sys.executable
    assert found["other"] == (str(other), "7.0")
    assert "other" not in runs.find_interpreters(["other"], [sys.executable])


def test_processor_and_name_of_the_results(tmp_path: Path):
    processor = peers.read_processor(CPUINFO)
    assert processor == {
        "name": "Example CPU 9000 @ 2.5GHz",
        "cores": 2,
        "flags": ["avx2", "avx512f"],
    }
    first = peers.result_path(tmp_path, "2026-01-31", processor)
    assert first.name == "2026-01-31-example-cpu-9000-2-5ghz-2-cores.json"
    first.touch()
    assert peers.result_path(tmp_path, "2026-01-31", processor).name == f"{first.stem}-2.json"


@pytest.mark.parametrize(
    "system",
    [pytest.param(OURS, marks=pytest.mark.slow)]
    + [pytest.param(system, marks=pytest.mark.long) for system in ("loop", "trainer", "trl")],
)
def test_pre_training(system: str, step_log: list[dict[str, float]]):
    if system != OURS:
        pytest.importorskip(runs.SYSTEMS[system].package)
    runs.measure(
        system,
        Task(kind="pretrain", steps=3, **TINY),
        sys.executable,
        threads=1,
        limit=RUN_SECONDS,
        warm_up=2,
    )
    assert [(step["tokens"], step["labels"]) for step in step_log] == [(4 * 32, 4 * 32)] * 3
    ends = [step["time"] for step in step_log]
    assert ends == sorted(ends) and ends[-1] < time.monotonic()


@pytest.mark.parametrize(
    "system",
    [
        pytest.param(OURS, marks=pytest.mark.slow),
        pytest.param("trainer", marks=pytest.mark.slow),
        pytest.param("trl", marks=pytest.mark.long),
    ],
)
def test_fine_tuning_counts_the_same_tokens(
    system: str, assets: Path, tmp_path: Path, step_log: list[dict[str, float]]
):
    """All samples are equal, so that each system counts a multiple of one sample's tokens and
    labels."""
    if system != OURS:
        pytest.importorskip(runs.SYSTEMS[system].package)
    row = {"question": "How many legs do seven ants have?", "answer": "7 * 6 = 42\n#### 42"}
    (tmp_path / "rows.jsonl").write_text("\n".join([json.dumps(row)] * 60))
    encoder = Tokenizer.from_file(str(assets / "gpt2-tokenizer/tokenizer.json"))
    prompt, answer = (
        len(encoder.encode(text).ids) for text in (row["question"] + "\n", row["answer"])
    )
    options = {
        "data": str(tmp_path / "rows.jsonl"),
        "tokenizer": str(assets / "gpt2-tokenizer"),
        "seq_len": 128,
    }
    task = Task(kind="sft", steps=2, **{**TINY, "vocab_size": 50_257, **options})
    runs.measure(system, task, sys.executable, threads=1, limit=RUN_SECONDS, warm_up=1)
    assert len(step_log) == 2
    for step in step_log:
        # the end of the text has no next token
        n_samples, rest = divmod(step["tokens"], prompt + answer)
        assert (rest, n_samples > 4) == (0, True)
        assert step["labels"] == n_samples * (answer + 1)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "system"), [("generate", "generate"), ("experts", "grouped_mm")])
def test_layers_and_generation(kind: str, system: str, tmp_path: Path):
    pytest.importorskip("transformers")
    task = Task(kind=kind, steps=1, batch_size=1, **TINY)
    outputs = []
    for name in (OURS, system):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "task.json").write_text(json.dumps(dataclasses.asdict(task)))
        command = runs.command_of(name, task, sys.executable, str(folder))
        outputs.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        (step,) = map(json.loads, (folder / "steps.jsonl").read_text().splitlines())
        assert step["tokens"] == (NEW_TOKENS if kind == "generate" else TINY["seq_len"])
    # The same greedy continuations.
    assert outputs[0].splitlines()[-1:] == outputs[1].splitlines()[-1:]
    assert runs.measure_machine(task, threads=1)["flops_per_token"] > 0
