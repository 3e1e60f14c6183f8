"""Predicted against published speed and memory: `python -m tests.foresight.published
[--write_docs]`, a minute."""

import argparse
import csv
import statistics
import tempfile
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from tests.conftest import PROJECT
from tests.dry_run.published import WholeLogitsLoss
from tests.tables import Row, as_markdown, print_table, write_docs
from torchtitan.config.manager import ConfigManager
from torchtitan.foresight.prediction import Prediction, predict
from torchtitan.trainer import Trainer

FITTED = ("1", "2", "3", "8", "11", "13", "21")
"""Rows whose numbers chose constants. The others were only predicted."""

PIPELINE_MICROBATCH = 4
"""Windows of a micro-batch in the published pipelines: unpublished. A local batch of 32 in 8
micro-batches, the number of ranks, explains both row 13's speed and its memory; fitted."""

COMPILED_LOSS = ("21", "24")
"""Rows published later. We assume that their loss was also compiled: otherwise row 21 would need 20
GiB more. Fitted."""

LOAD_BALANCER = "none"
"""Division of windows over context ranks in the published runs: unpublished. Consecutive parts
explain row 8, balanced ones would be 20 % faster; fitted."""

DEVICES = {"H100": "h100_96gb", "H200": "h200", "B200": "b200"}
COLUMNS = ["row", "setup", "tokens/s", "predicted", "error", "GiB", "predicted", "error"]


class _FusedLoss(torch.autograd.Function):
    """Memory of a compiled loss: of the logits and their gradient in their own type, without
    float32 copies."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor) -> Tensor:
        ctx.save_for_backward(logits_NV)
        return logits_NV.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tensor:
        return torch.zeros_like(ctx.saved_tensors[0])


class CompiledLoss(WholeLogitsLoss):
    """Whole logits, as a compiled loss holds them; only for dry runs."""

    def from_logits(self, logits_NV: Tensor, labels_N: Tensor) -> Tensor:
        return cast(Tensor, _FusedLoss.apply(logits_NV))


class Run(NamedTuple):
    """A published run; `layout` names the degrees, such as `fsdp8 tp8 pp8`."""

    id: str
    model: str
    gpus: int
    device: str
    layout: str
    local_batch: int
    seq_len: int
    activation_checkpoint: str
    compile: bool
    float8: bool
    async_tp: bool
    schedule: str
    tokens_per_s: float
    gib: float

    @property
    def setup(self) -> str:
        methods = [name for name in ("compile", "float8", "async_tp") if getattr(self, name)]
        words = [f"{self.model}, {self.gpus} {self.device}: {self.layout} {self.schedule}".strip()]
        words += [f"{self.local_batch} x {self.seq_len:,}", self.activation_checkpoint, *methods]
        return ", ".join(words).replace("_", " ")


def published_runs() -> list[Run]:
    with (Path(__file__).parent / "published_runs.csv").open() as file:
        runs = []
        for row in csv.DictReader(file):
            switches = {name: row[name] == "yes" for name in ("compile", "float8", "async_tp")}
            numbers = {name: int(row[name]) for name in ("gpus", "local_batch", "seq_len")}
            results = {
                "tokens_per_s": float(row.pop("tokens_per_s_per_gpu")),
                "gib": float(row["gib"]),
            }
            runs.append(Run(**{**row, **switches, **numbers, **results}))
        return runs


def configuration(run: Run, folder: str) -> Trainer.Config:
    """Return a configuration with the published setup."""
    size = run.model.removeprefix("llama3-").lower()
    name = "llama3_8b_float8" if run.float8 and size == "8b" else f"llama3_{size}"
    degrees = {
        word.rstrip("0123456789"): int(word.lstrip("abcdefghijklmnopqrstuvwxyz"))
        for word in run.layout.split()
    }
    options = {
        "training.local_batch_size": run.local_batch,
        "training.seq_len": run.seq_len,
        "model.max_seq_len": max(run.seq_len, 131_072),
        "activation_checkpoint.mode": run.activation_checkpoint,
        "compile.enable": str(run.compile).lower(),
        "parallelism.enable_async_tensor_parallel": str(run.async_tp).lower(),
        "parallelism.tensor_parallel_degree": degrees.get("tp", 1),
        "parallelism.context_parallel_degree": degrees.get("cp", 1),
        "parallelism.context_parallel_load_balancer": LOAD_BALANCER,
        "parallelism.pipeline_parallel_degree": degrees.get("pp", 1),
        "parallelism.pipeline_parallel_schedule": run.schedule or "1F1B",
        "parallelism.pipeline_parallel_microbatch_size": PIPELINE_MICROBATCH
        if "pp" in degrees
        else 1,
    }
    words = [f"--{option}={value}" for option, value in options.items()]
    config = (
        ConfigManager()
        .parse_args(["--module=llama3", f"--config={name}", f"--dump_folder={folder}", *words])
        .config
    )
    if run.float8 and size != "8b":
        from torchtitan.models.llama3.config_registry import llama3_8b_float8

        config.model_converters = llama3_8b_float8().model_converters
    for converter in config.model_converters:
        converter.min_features = 0  # the fitted constants stand for all layers but the head
    loss = CompiledLoss if run.id in COMPILED_LOSS else WholeLogitsLoss
    config.model_spec.loss = loss.Config(chunk_tokens=0)
    return config


def prediction_of(run: Run) -> Prediction:
    with tempfile.TemporaryDirectory() as folder:
        config = configuration(run, folder)
        return predict(config, run.gpus, DEVICES[run.device])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--write_docs", action="store_true", help="write the table into docs/foresight.md"
    )
    parser.add_argument("--parts", action="store_true", help="also print where the time goes")
    arguments = parser.parse_args()
    rows, errors = [], []
    for run in published_runs():
        prediction = prediction_of(run)
        time_error = run.tokens_per_s / prediction.tokens_per_second - 1
        memory_error = prediction.memory_gib / run.gib - 1
        is_fitted = run.id in FITTED
        if not is_fitted:
            errors.append((abs(time_error), abs(memory_error)))
        speed = [
            f"{run.tokens_per_s:,.0f}",
            f"{prediction.tokens_per_second:,.0f}",
            f"{time_error:+.1%}",
        ]
        memory = [f"{run.gib:.1f}", f"{prediction.memory_gib:.1f}", f"{memory_error:+.1%}"]
        rows.append(
            Row([f"{run.id}{' (fitted)' if is_fitted else ''}", run.setup, *speed, *memory])
        )
        if arguments.parts:
            print(
                run.id,
                f"{prediction.seconds:.2f}",
                {name: round(s, 2) for name, s in prediction.parts.items()},
                flush=True,
            )
    times, memory_errors = zip(*errors, strict=True)
    summary = (
        f"On the {len(errors)} rows that were not fitted: time, median error "
        f"{statistics.median(times):.1%}, worst {max(times):.1%}; memory, worst "
        f"{max(memory_errors):.1%}."
    )
    print_table(
        "Predicted against published (error of the step's time, and of memory)", COLUMNS, rows
    )
    print(summary)
    if arguments.write_docs:
        page = PROJECT / "docs/foresight.md"
        write_docs(page, "published", f"{as_markdown(COLUMNS, rows)}\n\n{summary}")


if __name__ == "__main__":
    main()
