"""The experiment that clips the gradient of each micro-batch before averaging."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.processes import run_processes
from tests.training import RaggedDataLoader, flags, read_metrics, run, tiny_config, train
from torchtitan.config.manager import ConfigManager
from torchtitan.experiments.gradient_aggregation.trainer import MicroBatchClippingTrainer
from torchtitan.tools.errors import UserError
from torchtitan.trainer import Trainer

TINY = {
    "module": "gradient_aggregation",
    "config": "debugmodel",
    "model.dim": 64,
    "model.ffn_dim": 128,
    "model.n_layers": 2,
    "training.seq_len": 32,
    "training.local_batch_size": 2,
    "training.global_batch_size": 8,
    "training.steps": 4,
    "metrics.log_freq": 1,
    "validator.enable": False,
    "optimizer.name": "SGD",
    "optimizer.lr": 0.5,
    "optimizer.weight_decay": 0.0,
    "lr_scheduler.warmup_steps": 2,
}


def config_of(folder: Path, **options):
    overrides = {name.replace("__", "."): value for name, value in options.items()}
    config = ConfigManager().parse_args(flags({**TINY, "dump_folder": folder, **overrides})).config
    config.dataloader = RaggedDataLoader.Config()
    return config


def reference(config, *, max_norm: float) -> list[tuple[int, float, float]]:
    """Train in float64 with plain PyTorch. Clip the gradient of the mean loss of each micro-batch,
    average gradients weighted by valid tokens, clip the average, and update with SGD."""
    trainer = Trainer(config)
    model = trainer.model_parts[0].double()
    loader = config.dataloader.build(
        tokenizer=trainer.tokenizer, seq_len=32, local_batch_size=2, seed=0
    )
    lines = []
    for step in range(1, config.training.steps + 1):
        micro_batches, total_loss = list(itertools.islice(loader, 4)), 0.0
        n_tokens = sum(int((batch["labels"] != -100).sum()) for batch in micro_batches)
        average = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for batch in micro_batches:
            logits = model(batch["input"], batch["attention"])
            loss = F.cross_entropy(
                logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100
            )
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            weight = int((batch["labels"] != -100).sum()) / n_tokens
            norm = math.sqrt(sum((gradient**2).sum().item() for gradient in gradients))
            for mean, gradient in zip(average, gradients, strict=True):
                mean += weight * min(1.0, max_norm / norm) * gradient
            total_loss += weight * loss.item()
        norm = math.sqrt(sum((gradient**2).sum().item() for gradient in average))
        lr = trainer.lr_scheduler.lr
        trainer.lr_scheduler.step()
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), average, strict=True):
                parameter -= min(1.0, config.training.max_norm / norm) * lr * gradient
        lines.append((step, total_loss, norm))
    trainer.close()
    return lines


@pytest.mark.parametrize("max_norm", [0.3, 1.5])
def test_matches_plain_torch(tmp_path, max_norm):
    options = {"micro_batch_max_norm": max_norm, "training__max_norm": 100.0}
    options["training__mixed_precision_param"] = "float32"
    trainer = run(config_of(tmp_path / "run", **options))
    assert isinstance(trainer, MicroBatchClippingTrainer)
    expected = reference(config_of(tmp_path / "reference", **options), max_norm=max_norm)
    # Float32 against float64 over four steps.
    assert read_metrics(tmp_path / "run", "loss", "grad_norm") == [
        pytest.approx(line, rel=1e-5) for line in expected
    ]
    # The norm of an average is at most the largest norm, so every micro-batch was clipped.
    assert all(
        norm <= max_norm * (1 + 1e-6) for _, norm in read_metrics(tmp_path / "run", "grad_norm")
    )


def test_without_clipping_the_run_is_bitwise_equal_to_the_library(tmp_path):
    """Both sum micro-batches in the same order."""
    run(config_of(tmp_path / "clipped", micro_batch_max_norm=math.inf))
    plain = {
        name.replace(".", "__"): value
        for name, value in TINY.items()
        if name not in ("module", "config")
    }
    config = tiny_config(tmp_path / "plain", **plain)
    config.dataloader = RaggedDataLoader.Config()
    config.training.mixed_precision_param = "float32"
    run(config)
    names = ("loss", "grad_norm")
    assert read_metrics(tmp_path / "clipped", *names) == read_metrics(tmp_path / "plain", *names)


def run_all(folder: Path, runs: dict[str, dict[str, Any]]) -> None:
    for name, options in runs.items():
        train(folder / name, trainer_class=MicroBatchClippingTrainer, **options)


@pytest.mark.slow
def test_two_processes_match_one(tmp_path):
    """A micro-batch spans all ranks: two samples of each of two ranks are clipped like four samples
    of one."""
    options = {**TINY, "micro_batch_max_norm": 0.3}
    options = {name.replace(".", "__"): value for name, value in options.items()}
    one = {**options, "training__local_batch_size": 4}
    train(tmp_path / "one", trainer_class=MicroBatchClippingTrainer, **one)
    replicas = {
        "parallelism__data_parallel_replicate_degree": 2,
        "parallelism__data_parallel_shard_degree": 1,
    }
    tensor_parallel = {**one, "parallelism__tensor_parallel_degree": 2}
    runs = {"FSDP": options, "DDP": {**options, **replicas}, "TP": tensor_parallel}
    run_processes(run_all, 2, tmp_path, runs)
    for name in runs:
        expected = read_metrics(tmp_path / "one", "loss", "grad_norm")
        # The tolerance of the equivalence tests.
        assert read_metrics(tmp_path / name, "loss", "grad_norm") == [
            pytest.approx(line, rel=1e-5) for line in expected
        ]


def run_pipeline(folder: Path, options: dict[str, Any]) -> None:
    for schedule in ("1F1B", "ZBVZeroBubble"):
        pipeline = {
            "parallelism__pipeline_parallel_degree": 2,
            "parallelism__pipeline_parallel_schedule": schedule,
        }
        train(folder / schedule, trainer_class=MicroBatchClippingTrainer, **options, **pipeline)


@pytest.mark.slow
def test_a_pipeline_with_tied_embeddings_matches_one_process(tmp_path):
    """Both copies of the embedding get the whole gradient of each micro-batch before it is
    clipped."""
    options = {
        **TINY,
        "micro_batch_max_norm": 0.3,
        "training.local_batch_size": 4,
        "model.tie_embeddings": True,
    }
    options = {
        name.replace(".", "__"): value for name, value in {**options, "model.n_layers": 4}.items()
    }
    train(tmp_path / "one", trainer_class=MicroBatchClippingTrainer, **options)
    run_processes(run_pipeline, 2, tmp_path, options)
    expected = [
        pytest.approx(line, rel=1e-5)
        for line in read_metrics(tmp_path / "one", "loss", "grad_norm")
    ]
    for schedule in ("1F1B", "ZBVZeroBubble"):
        assert read_metrics(tmp_path / schedule, "loss", "grad_norm") == expected


def test_a_micro_batch_without_valid_tokens_is_ignored(tmp_path):
    class OftenIgnored(RaggedDataLoader):
        count = 0

        def __next__(self):
            batch = super().__next__()
            self.count += 1
            if self.count % 2:
                batch["labels"].fill_(-100)
            return batch

    config = config_of(tmp_path)
    config.dataloader = OftenIgnored.Config()
    run(config)
    assert all(0 < norm < math.inf for _, norm in read_metrics(tmp_path, "grad_norm"))


@pytest.mark.parametrize("norm", [0.0, -1.0, math.nan])
def test_an_invalid_norm_is_rejected(tmp_path, norm):
    with pytest.raises(UserError, match=f"--micro_batch_max_norm is {norm}, but must be above 0"):
        config_of(tmp_path, micro_batch_max_norm=norm).build()


def test_early_step_is_rejected(tmp_path):
    with pytest.raises(UserError, match=r"--optimizer\.early_step_in_backward keeps no gradients"):
        config_of(tmp_path, optimizer__early_step_in_backward=True).build()
