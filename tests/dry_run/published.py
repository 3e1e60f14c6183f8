"""Predicted memory of published runs: `python -m tests.dry_run.published [--write_docs]` takes
about five minutes."""

import argparse
import tempfile
from typing import NamedTuple

from torch import Tensor

from tests.conftest import PROJECT
from tests.tables import Row, as_markdown, print_table, write_docs
from torchtitan.components.losses.loss import CrossEntropyLoss
from torchtitan.config.manager import ConfigManager
from torchtitan.dry_run import dry_run
from torchtitan.dry_run.report import RankReport

GIB = 2**30
COLUMNS = [
    "",
    "published",
    "predicted: reserved",
    "ratio",
    "predicted: allocated",
    "our loss: reserved (allocated)",
]


class Run(NamedTuple):
    """A published run, and its peak reserved memory in GiB."""

    config: str
    gpus: int
    options: str
    gib: float


_8B = "--training.local_batch_size=2 --activation_checkpoint.mode=selective"
_70B = (
    "--training.local_batch_size=16 --activation_checkpoint.mode=full "
    "--parallelism.tensor_parallel_degree=8"
)
RUNS = {
    "8B, 8 GPUs: FSDP 8, local batch 2 (fitted)": Run("llama3_8b", 8, _8B, 82.4),
    "8B, 128 GPUs: FSDP 128, local batch 2": Run("llama3_8b", 128, _8B, 67.0),
    "the same, compiled": Run("llama3_8b", 128, f"{_8B} --compile.enable=true", 62.0),
    "70B, 256 GPUs: FSDP 32 x TP 8, local batch 16, compiled, float8 (fitted)": Run(
        "llama3_70b", 256, f"{_70B} --compile.enable=true", 71.9
    ),
}
"""Rows 1, 4, 5 and 11 of tests/foresight/published_runs.csv; 1 and 11 chose constants."""


class WholeLogitsLoss(CrossEntropyLoss):
    """Autograd on all logits at once, as in the published runs."""

    def from_logits(self, logits_NV: Tensor, labels_N: Tensor) -> Tensor:
        return super().from_logits(logits_NV, labels_N)


def predict(name: str, *, whole_logits: bool) -> RankReport:
    """Predict a run of `RUNS` with the published loss or ours."""
    run = RUNS[name]
    with tempfile.TemporaryDirectory() as folder:
        words = [
            "--module",
            "llama3",
            "--config",
            run.config,
            "--dump_folder",
            folder,
            *run.options.split(),
        ]
        config = ConfigManager().parse_args(words).config
        if whole_logits:
            config.model_spec.loss = WholeLogitsLoss.Config(chunk_tokens=0)
        (report,) = dry_run(config, run.gpus)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--write_docs", action="store_true", help="write the table into docs/dry_run.md"
    )
    arguments = parser.parse_args()
    rows = []
    for name, run in RUNS.items():
        whole, ours = (predict(name, whole_logits=whole_logits) for whole_logits in (True, False))
        reserved = whole.peak_reserved_bytes / GIB
        numbers = [
            f"{run.gib:.1f}",
            f"{reserved:.1f}",
            f"{reserved / run.gib:.2f}",
            f"{whole.peak_bytes / GIB:.1f}",
        ]
        rows.append(
            Row(
                [
                    name,
                    *numbers,
                    f"{ours.peak_reserved_bytes / GIB:.1f} ({ours.peak_bytes / GIB:.1f})",
                ]
            )
        )
    print_table("Peak memory, GiB", COLUMNS, rows)
    if arguments.write_docs:
        write_docs(
            PROJECT / "docs/dry_run.md", "published", as_markdown(COLUMNS, rows, counts=True)
        )


if __name__ == "__main__":
    main()
