"""The training loss of each dataset of a mixture."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan.components.data.base import BaseDataLoader, Batch
from torchtitan.components.losses.loss import IGNORE_INDEX, CrossEntropyLoss, Measures
from torchtitan.distributed.context_parallel import shard_sequences
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.tools.errors import UserError


class DatasetLosses:
    """Adds the losses of valid tokens to the measures `loss/DATASET` of a step, if `wanted`. The
    training loss and its gradients stay bit-identical. Raises `UserError` for a loss, a loader or a
    layout without the losses of single tokens.

    Args:
        loss: the training loss.
        loader: knows the dataset of each token.
    """

    def __init__(
        self, loss: Any, loader: BaseDataLoader, parallel_dims: ParallelDims, *, wanted: bool
    ):
        self._loss = loss
        self._loader = loader
        self._dims = parallel_dims
        self.names: list[str] = []
        """Names of the measures."""
        if not wanted:
            return
        option = "--metrics.dataset_losses"
        if not isinstance(loss, CrossEntropyLoss):
            raise UserError(
                f"{option} needs the losses of single tokens, which {type(loss).__qualname__} does "
                "not provide; derive the loss from CrossEntropyLoss"
            )
        if parallel_dims.pp > 1:
            raise UserError(
                f"{option} cannot be combined with --parallelism.pipeline_parallel_degree "
                f"{parallel_dims.pp}, under which only the last stage has losses"
            )
        if loader.needs_sample_losses:
            raise UserError(f"{option} cannot be combined with a sampler that records losses")
        if not loader.dataset_names:
            raise UserError(
                f"{option}: {type(loader).__qualname__} does not tell the datasets of its samples "
                "apart"
            )
        self.names = [f"loss/{name}" for name in _short_names(loader.dataset_names)]

    @contextlib.contextmanager
    def of(self, batch: Batch, measures: Measures) -> Iterator[None]:
        """Record a micro-batch's forward pass; `batch` is as the loader returned it."""
        if not self.names:
            yield
            return
        with self._loss.recording() as chunks:
            yield
        per_token = {"labels": batch["labels"], "sets": self._loader.datasets_of(batch)}
        if self._dims.cp > 1:
            per_token = shard_sequences(
                per_token, self._dims.sequence_shards, self._dims.coordinate("cp")
            )
        sets = per_token["sets"].where(per_token["labels"] != IGNORE_INDEX, -1).flatten()
        losses = torch.cat(chunks)[: len(sets)]  # then the losses of multi-token prediction
        assert losses.shape == sets.shape, "expected exactly one forward pass of the batch"
        if not self._dims.is_tensor_leader:
            return
        sums_N2 = _sums_by_set(sets.to(losses.device), losses, len(self.names))
        for name, (total, weight) in zip(self.names, sums_N2, strict=True):
            measures.add(name, total, weight)


def _sums_by_set(sets: Tensor, losses: Tensor, n_sets: int) -> Tensor:
    """Return the summed loss and number of tokens of each set, (n, 2); set -1 does not count."""
    counted = torch.stack([losses.float(), torch.ones_like(losses, dtype=torch.float32)], dim=1)
    sums = torch.zeros(n_sets + 1, 2, device=losses.device)
    return sums.index_add_(0, sets + 1, counted)[1:]


def _short_names(names: Sequence[str]) -> list[str]:
    """Return the last part of each path, if these differ; otherwise the whole names."""
    short = [Path(name).name for name in names]
    return short if len({*short}) == len(short) else list(names)
