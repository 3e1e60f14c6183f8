"""Predicted against measured steps on this machine, with 1 and 2 processes.

`python -m tests.foresight.local steps` measures the 12 configurations, and predicts all of them
REPEATS times, each time from a new measurement of the machine. It shows the prediction in the
middle, by median error. `layouts` measures all layouts of 2 processes: the best of each kind
REPEATS times, the others once. Each takes 15 to 20 minutes on an idle machine; `--cases FIRST LAST`
measures some (`1 0`: none), and `--results FILE` keeps results between calls. `--write_docs` writes
docs/foresight.md when all are measured.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import unittest.mock
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.conftest import PROJECT
from tests.tables import Row, as_markdown, print_table, write_docs
from torchtitan.config.manager import ConfigManager
from torchtitan.foresight import plan, predict
from torchtitan.foresight.planning import layouts, option_words
from torchtitan.trainer import Trainer

REPEATS, STEPS, FIRST_STEPS = 5, 8, 3
"""Alternating repeats; steps of each, without the first ones."""

BASE = [
    "--module=llama3",
    "--config=debugmodel",
    "--validator.enable=false",
    "--checkpoint.enable=false",
]
BASE += [f"--training.steps={STEPS}", "--metrics.log_freq=1", "--training.local_batch_size=4"]
FULL = "--activation_checkpoint.mode=full"
WIDE = ["--model.dim=512", "--model.ffn_dim=1536", "--model.n_layers=2"]


class Case(NamedTuple):
    """A configuration and its number of processes."""

    processes: int
    words: list[str]


CASES = {
    "4 layers of 256": Case(1, []),
    "local batch 8": Case(1, ["--training.local_batch_size=8"]),
    "windows of 1,024": Case(1, ["--training.seq_len=1024", "--training.local_batch_size=1"]),
    "full checkpointing": Case(1, [FULL]),
    "2 layers of 512": Case(1, WIDE),
    "8 layers of 256": Case(1, ["--model.n_layers=8"]),
    "FSDP": Case(2, []),
    "DDP": Case(2, ["--parallelism.data_parallel_replicate_degree=2"]),
    "TP": Case(2, ["--parallelism.tensor_parallel_degree=2"]),
    "PP": Case(2, ["--parallelism.pipeline_parallel_degree=2"]),
    "FSDP, full checkpointing": Case(2, [FULL]),
    "FSDP, 2 layers of 512": Case(2, WIDE),
}

GLOBAL_BATCH = "--training.global_batch_size=8"


def configuration(words: Sequence[str]) -> Trainer.Config:
    config: Trainer.Config = ConfigManager().parse_args([*BASE, *words]).config
    vocabulary = config.tokenizer.build(path=config.hf_assets_path)
    return config.resolve(vocabulary)


def measure(case: Case) -> float:
    """Return the median time of a run's steps."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "torchtitan",
            "train",
            *BASE,
            *case.words,
            f"--dump_folder={folder}",
        ]
        environment = {**os.environ, "NGPU": str(case.processes)}
        subprocess.run(
            command,
            env=environment,
            check=True,
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    times = [record["step_time"] for record in map(json.loads, lines) if "step_time" in record]
    return statistics.median(times[FIRST_STEPS:])


def measure_all(
    cases: dict[str, Case], results: Path | None, repeats: dict[str, int] | None = None
) -> dict[str, list[float]]:
    """Measure the cases in turns, after those that are in the file, REPEATS times unless others are
    given."""
    measured: dict[str, list[float]] = (
        json.loads(results.read_text()) if results and results.is_file() else {}
    )
    for _ in range(REPEATS):
        for name, case in cases.items():
            if len(measured.setdefault(name, [])) < (repeats or {}).get(name, REPEATS):
                measured[name].append(measure(case))
                if results:
                    results.write_text(json.dumps(measured))
    return measured


def predict_all(names: list[str]) -> dict[str, float]:
    """Return the predicted time of each case, from a new measurement of the machine."""
    with (
        tempfile.TemporaryDirectory() as cache,
        unittest.mock.patch.dict(os.environ, TORCHTITAN_CACHE=cache),
    ):
        predicted = {}
        for name in names:
            processes, words = CASES[name]
            prediction = predict(configuration(words), processes, "cpu", devices_per_host=processes)
            predicted[name] = prediction.seconds
            print(
                name,
                {part: round(seconds, 4) for part, seconds in prediction.parts.items()},
                flush=True,
            )
    return predicted


def compare_steps(arguments: argparse.Namespace) -> None:
    first, last = arguments.cases or (1, len(CASES))
    chosen = dict(list(CASES.items())[first - 1 : last])
    measured = measure_all(chosen, arguments.results)
    actual = {name: statistics.median(measured[name]) for name in CASES if name in measured}

    def error_of(predicted: dict[str, float]) -> float:
        return statistics.median(
            abs(predicted[name] / seconds - 1) for name, seconds in actual.items()
        )

    predictions = sorted((predict_all(list(actual)) for _ in range(REPEATS)), key=error_of)
    predicted = predictions[len(predictions) // 2]
    rows, errors = [], [predicted[name] / seconds - 1 for name, seconds in actual.items()]
    for (name, seconds), error in zip(actual.items(), errors, strict=True):
        spread = f"{min(measured[name]):.3f} to {max(measured[name]):.3f}"
        numbers = [f"{seconds:.3f}", spread, f"{predicted[name]:.3f}", f"{error:+.1%}"]
        rows.append(Row([name, str(CASES[name].processes), *numbers]))
    columns = ["configuration", "processes", "measured (s)", "range", "predicted (s)", "error"]
    print_table("Step time on this machine", columns, rows)
    all_errors = ", ".join(f"{error_of(one):.1%}" for one in predictions)
    summary = (
        f"Median error {error_of(predicted):.1%}, worst {max(map(abs, errors)):.1%}. Each of "
        f"{REPEATS} predictions began with a measurement of the machine; their median errors are "
        f"{all_errors}. The table has the middle one."
    )
    print(summary)
    if arguments.write_docs:
        write_docs(
            PROJECT / "docs/foresight.md", "local", f"{as_markdown(columns, rows)}\n\n{summary}"
        )


def compare_layouts(arguments: argparse.Namespace) -> None:
    config = configuration([GLOBAL_BATCH])
    found = {
        str(one.layout): one for one in plan(config, 2, "cpu", devices_per_host=2, best=100).options
    }
    compared = [*(one.layout for one in found.values()), *layouts(config, 2, 2)]
    values = {str(layout): layout.config.to_dict() for layout in compared}
    cases = {
        name: Case(2, [GLOBAL_BATCH, *option_words(config, chosen)])
        for name, chosen in values.items()
    }
    first, last = arguments.cases or (1, len(cases))
    chosen = dict(list(cases.items())[first - 1 : last])
    measured = measure_all(
        chosen, arguments.results, {name: REPEATS if name in found else 1 for name in cases}
    )
    medians = {name: statistics.median(measured[name]) for name in cases if name in measured}
    best = next(iter(medians.values()))
    columns = [
        "layout, in the plan's order",
        "predicted (s)",
        "measured (s)",
        "relative to the first",
    ]
    rows = [
        Row([name, f"{found[name].seconds:.3f}", f"{median:.3f}", f"{median / best - 1:+.1%}"])
        for name, median in medians.items()
        if name in found
    ]
    print_table("Layouts of 2 processes", columns, rows)
    others = {name: median for name, median in medians.items() if name not in found}
    summary = ""
    if others:
        fastest = min(others, key=lambda name: others[name])
        summary = (
            f"Of the {len(others)} other layouts (other local batches and schedules), measured "
            f"once each, the fastest is {fastest}: {others[fastest]:.3f} s, "
            f"{others[fastest] / best - 1:+.1%}."
        )
    print(summary)
    if arguments.write_docs:
        write_docs(
            PROJECT / "docs/foresight.md",
            "layouts",
            f"{as_markdown(columns, rows)}\n\n{summary}".rstrip(),
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["steps", "layouts"])
    parser.add_argument(
        "--cases", type=int, nargs=2, metavar=("FIRST", "LAST"), help="only these, numbered from 1"
    )
    parser.add_argument(
        "--results", type=Path, help="file that keeps the measurements between calls"
    )
    parser.add_argument(
        "--write_docs", action="store_true", help="write the table into docs/foresight.md"
    )
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # of the runs, and of the measurement of this machine
    {"steps": compare_steps, "layouts": compare_layouts}[arguments.what](arguments)


if __name__ == "__main__":
    main()
