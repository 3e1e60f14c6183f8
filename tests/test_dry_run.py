"""The dry run against real runs: the same trainer with real tensors in real processes, watched by the same trackers."""

import contextlib
import dataclasses
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import torchtitan.dry_run.microbatch_replay as microbatch_replay
from tests.processes import run_processes
from tests.training import TINY, flags, tiny_config
from torchtitan.distributed import ParallelDims
from torchtitan.dry_run import dry_run
from torchtitan.dry_run.fake_trainer import FakeTrainer, without_data
from torchtitan.dry_run.rank_report import axis_of, report_of
from torchtitan.tools.errors import UserError
from torchtitan.trainer import Trainer

LAYOUTS = {
    "FSDP": {},
    "DDP": {"parallelism.data_parallel_replicate_degree": 2},
    "TP": {"parallelism.tensor_parallel_degree": 2},
    "PP": {"parallelism.pipeline_parallel_degree": 2, "training.local_batch_size": 4},
    "FSDP, full": {"activation_checkpoint.mode": "full", "training.mixed_precision_param": "bfloat16"},
    "FSDP, selective": {"activation_checkpoint.mode": "selective", "training.global_batch_size": 8},
}


def config_of(layout, folder):
    options = {key.replace(".", "__"): value for key, value in LAYOUTS[layout].items()}
    return tiny_config(folder, **{"model__n_layers": 4, **options})


class RealTrainer(FakeTrainer):
    """Measures a step like its parent, but with real tensors in real processes, and every micro-batch."""

    init_weights = Trainer.init_weights
    count_valid_tokens = Trainer.count_valid_tokens
    read_outcome = Trainer.read_outcome

    def init_distributed(self):
        super().init_distributed()
        self.fake_mode = contextlib.nullcontext()
        return Trainer.init_distributed(self)


def run_for_real(layout, folder):
    microbatch_replay._templates = lambda schedule, stage: list(range(schedule._n_microbatches))
    trainer = RealTrainer(without_data(config_of(layout, folder)))
    trainer.measure_step()
    (Path(folder) / f"rank{trainer.rank}.json").write_text(json.dumps(dataclasses.asdict(report_of(trainer))))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_a_real_run(layout, tmp_path):
    run_processes(run_for_real, 2, layout, str(tmp_path))
    for expected in dry_run(config_of(layout, tmp_path), 2):
        real = json.loads((tmp_path / f"rank{expected.rank}.json").read_text())
        predicted = dataclasses.asdict(expected)
        for key in ("parameters", "parameter_bytes", "gradient_bytes", "optimizer_bytes", "executed_flops", "stages"):
            assert predicted[key] == real[key], key
        # What a run reads and sums to report its loss is left out of a dry run: some numbers.
        assert predicted["peak_bytes"] == pytest.approx(real["peak_bytes"], abs=2**10)
        for kind, n_bytes in real["peak"].items():
            assert predicted["peak"][kind] == pytest.approx(n_bytes, abs=2**10), kind
        assert messages_of(predicted) == messages_of(real)
        assert real["peak_bytes"] > 2**20


def messages_of(report):
    return [traffic for traffic in report["communication"] if traffic["kind"] != "all-reduce"]
