"""Small training runs for tests: in this process, or in several through the command line."""

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import nn

from tests.commands import run_command
from torchtitan.components.data.base import Batch
from torchtitan.components.data.dataloader import PretrainDataLoader
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.config.manager import ConfigManager
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.parallelize import parallelize_model
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.llama3 import SHARDING
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.trainer import Trainer

ABSENT = "absent"
"""Value of an option of `TINY` that a model does not have."""

TINY = {
    "model.dim": 64,
    "model.ffn_dim": 128,
    "model.n_layers": 2,
    "training.seq_len": 32,
    "training.local_batch_size": 2,
    "training.steps": 4,
    "metrics.log_freq": 1,
    "optimizer.lr": 3e-4,
    "lr_scheduler.warmup_steps": 2,
    "validator.enable": False,
}
"""A run of less than a second: half a million parameters, 64 tokens per step."""


class RaggedDataLoader(PretrainDataLoader):
    """Hides a different number of labels in every window, so that a mean of means is wrong."""

    def __next__(self) -> Batch:
        batch = super().__next__()
        for row, labels in zip(batch["input"], batch["labels"], strict=True):
            labels[: int(row.sum()) % (labels.numel() - 1)] = -100
        return batch


def llama_config(**options: Any) -> Llama3Model.Config:
    """Return the configuration of a tiny Llama model of a few thousand parameters; `options`
    override it."""
    sizes = {
        "vocab_size": 99,
        "dim": 32,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 2,
        "ffn_dim": 50,
    }
    return Llama3Model.Config(**{"rope": RoPEConfig(), **sizes, **options})


def lay_out(model: nn.Module, parallelism: ParallelismConfig, **options: Any) -> None:
    """Divide a model of Llama's layers among two processes, in float32; `options` go to
    `parallelize_model`."""
    dims = ParallelDims.from_config(parallelism, 2)
    common = {
        "mesh": dims.build_mesh("cpu"),
        "training": TrainingConfig(mixed_precision_param="float32"),
    }
    parallelize_model(
        model,
        parallel_dims=dims,
        sharding=SHARDING,
        parallelism=parallelism,
        **{**common, **options},
    )


def flags(options: dict[str, Any]) -> list[str]:
    """Return options as words of the command line; a boolean becomes its switch, a list several
    words."""
    words = []
    for key, value in options.items():
        section, _, name = key.rpartition(".")
        if isinstance(value, bool):
            words.append(f"--{key}" if value else f"--{section}.no_{name}")
        elif isinstance(value, list):
            words += [f"--{key}", *map(str, value)]
        else:
            words.append(f"--{key}={value}")
    return words


def tiny_config(folder: Path, **options: Any) -> Any:
    """Return the configuration of a tiny run in `folder`; write options with `__` for `.`."""
    overrides = {key.replace("__", "."): value for key, value in options.items()}
    chosen = {
        key: value
        for key, value in {**TINY, "dump_folder": folder, **overrides}.items()
        if value != ABSENT
    }
    return ConfigManager().parse_args(flags(chosen)).config


def run(config: Any, trainer_class: type[Trainer] | None = None) -> Trainer:
    """Train a configuration to its end, with its own trainer or another; return the trainer."""
    trainer = trainer_class(config) if trainer_class else config.build()
    try:
        trainer.train()
    finally:
        trainer.close()
    return trainer


def train(
    folder: Path, *converters: Any, trainer_class: type[Trainer] | None = None, **options: Any
) -> Any:
    """Run a tiny training with `converters` (configurations; None: no converter) to its end, in
    this process or in all of `run_processes`; return the trainer."""
    config = tiny_config(folder, **options)
    config.model_converters += filter(None, converters)
    config.check(world_size=int(os.environ.get("WORLD_SIZE", 1)))
    return run(config, trainer_class)


class Killed(BaseException):
    """Simulates the end of a process."""


@contextlib.contextmanager
def killed_in(owner: type, method: str, call: int) -> Iterator[None]:
    """Let this call of a method, counted from 1, end the run of the block; fail if it does not
    come."""
    original, calls = getattr(owner, method), itertools.count(1)

    def stop(*args: Any) -> Any:
        if next(calls) == call:
            raise Killed
        return original(*args)

    # A kill saves nothing.
    no_save = mock.patch.object(Trainer, "save_last_step", lambda *_: None)
    with no_save, mock.patch.object(owner, method, stop), pytest.raises(Killed):
        yield


def launch(folder: Path, processes: int, **options: Any) -> str:
    """Train through the command line in `processes` processes; return standard error."""
    overrides = {key.replace("__", "."): value for key, value in options.items()}
    words = flags({**TINY, "dump_folder": folder, **overrides})
    environment = {**os.environ, "NGPU": str(processes), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torchtitan.cli.main", "train", *words]
    result = run_command(command, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stderr


def read_metrics(folder: Path, *keys: str) -> list[tuple[Any, ...]]:
    """Return `step` and `keys` of the training lines of metrics.jsonl."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], *(line[key] for key in keys)) for line in lines if "loss" in line]


def read_validation(folder: Path) -> list[tuple[int, float]]:
    """Return step and loss of the validation lines of metrics.jsonl."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["validation_loss"]) for line in lines if "validation_loss" in line]
