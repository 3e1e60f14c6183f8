"""The training loss of each dataset of a mixture."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan.components.data.base import BaseDataLoader, Batch
from torchtitan.components.losses.loss import IGNORE_INDEX, CrossEntropyLoss, Measures
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.distributed.process_group import gather_objects
from torchtitan.tools.errors import UserError
from torchtitan.trainer.token_losses import TokenLosses


class DatasetLosses:
    """Adds the losses of valid tokens to the measures `loss/DATASET` of a step, if `wanted`. The
    training loss and its gradients stay bit-identical. Raises `UserError` for a loss, a loader or a
    layout without the losses of single tokens.

    Args:
        loss: the training loss.
        loader: knows the dataset of each token.
    """

    def __init__(
        self,
        loss: Any,
        loader: BaseDataLoader,
        parallel_dims: ParallelDims,
        *,
        wanted: bool,
        has_failed: Callable[[], bool] = lambda: False,
    ):
        self._losses = TokenLosses(loss, parallel_dims, has_failed)
        self._loader = loader
        self._has_recorded = self._is_checked = False
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
        self._has_recorded = True
        sets = self._loader.datasets_of(batch)
        with self._losses.passed_to(partial(self._add, measures), batch, {"sets": sets}):
            yield

    def check_step(self) -> None:
        """Raise `UserError` if no rank has recorded anything in the first step, when this is a
        collective. Call it after each step."""
        if not self.names or self._is_checked:
            return
        self._is_checked = True
        if not any(gather_objects(self._has_recorded)):
            raise UserError(
                "--metrics.dataset_losses needs the losses of single tokens, which this trainer's "
                "train_step does not record; compute each micro-batch within "
                "`self.dataset_losses.of(batch, self.measures)`"
            )

    def _add(self, measures: Measures, per_token: Mapping[str, Tensor], losses: Tensor) -> None:
        sets = per_token["sets"].where(per_token["labels"] != IGNORE_INDEX, -1).flatten()
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
