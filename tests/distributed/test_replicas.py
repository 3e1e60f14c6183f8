"""DDP and HSDP add up gradients over replicas once per optimizer step. That the sums are right is a
matter of `tests/test_equivalence.py`, whose runs accumulate gradients."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import Tensor

from tests.processes import run_processes
from tests.training import train
from torchtitan.components.data.base import Batch
from torchtitan.trainer import Trainer


class ReadingTrainer(Trainer):
    """Could read the gradients of each micro-batch."""

    def forward_backward_step(self, batch: Batch, n_tokens: Tensor) -> Tensor:
        return super().forward_backward_step(batch, n_tokens)


def count_sums_of_gradients(folder: Path, shards: int) -> None:
    options = {
        "parallelism__data_parallel_replicate_degree": 2,
        "parallelism__data_parallel_shard_degree": shards,
        "training__steps": 1,
    }

    def sums(passes: int, trainer: type[Trainer] = Trainer) -> int:
        all_reduce, counted = dist.all_reduce, []

        def count(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            counted.append(tensor.numel() > 1000)  # not the few numbers of a step
            return all_reduce(tensor, *args, **kwargs)

        with mock.patch.object(dist, "all_reduce", count):
            batch = 2 * 2 * shards * passes
            name = folder / f"{passes}-{trainer.__name__}"
            train(name, trainer_class=trainer, training__global_batch_size=batch, **options)
        return sum(counted)

    units = sums(1)
    assert units >= 4  # embedding, two layers and head
    assert sums(4) == units
    assert sums(4, ReadingTrainer) == 4 * units


def test_replicas_add_up_gradients_once_per_step(tmp_path: Path):
    run_processes(count_sums_of_gradients, 2, tmp_path, 1)


@pytest.mark.slow
def test_sharded_replicas_add_up_gradients_once_per_step(tmp_path: Path):
    run_processes(count_sums_of_gradients, 4, tmp_path, 2)
