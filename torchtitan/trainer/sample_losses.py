"""The loss of each sample of a training step, for samplers that need it."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchtitan.components.data.base import NO_DOCUMENT, Batch, number_tokens
from torchtitan.components.data.plan.sampler import Array, StepStatistics
from torchtitan.components.losses.loss import IGNORE_INDEX, CrossEntropyLoss
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.distributed.process_group import gather_objects
from torchtitan.tools.errors import UserError
from torchtitan.trainer.token_losses import TokenLosses


class SampleLosses:
    """Record token losses in the forward passes of a step, if `wanted`, and sum them by sample over
    all ranks.

    The training loss and its gradients stay bit-identical. A loss with its own `from_logits`
    computes the losses of tokens a second time. The losses stay on the device until `statistics`
    reads them. Raises `UserError` for a loss other than `CrossEntropyLoss`, and under pipeline
    parallelism, since only the last stage has token losses.
    """

    def __init__(
        self,
        loss: Any,
        parallel_dims: ParallelDims,
        *,
        wanted: bool,
        has_failed: Callable[[], bool] = lambda: False,
    ):
        if wanted and not isinstance(loss, CrossEntropyLoss):
            raise UserError(
                f"the sampler needs per-sample losses, which {type(loss).__qualname__} does not "
                "provide; derive the loss from CrossEntropyLoss, or choose another "
                "--dataloader.sampler"
            )
        if wanted and parallel_dims.pp > 1:
            raise UserError(
                "the sampler needs per-sample losses, which are not available with "
                f"--parallelism.pipeline_parallel_degree {parallel_dims.pp}; set it to 1, or "
                "choose another sampler"
            )
        self._losses = TokenLosses(loss, parallel_dims, has_failed)
        self._wanted = wanted
        # per micro-batch: document numbers and losses of valid tokens
        self._recorded: list[tuple[Array, Tensor]] = []

    @contextlib.contextmanager
    def of(self, batch: Batch) -> Iterator[None]:
        """Record a micro-batch's forward (and backward) pass; `batch` is as the loader returned
        it."""
        if not self._wanted:
            yield
            return
        with self._losses.passed_to(self._record, batch, {"numbers": number_tokens(batch)}):
            yield

    def _record(self, per_token: Mapping[str, Tensor], losses: Tensor) -> None:
        counts = (per_token["labels"] != IGNORE_INDEX) & (per_token["numbers"] != NO_DOCUMENT)
        numbers = torch.where(counts, per_token["numbers"], NO_DOCUMENT).flatten()
        self._recorded.append((numbers.numpy(), losses))

    def statistics(self, step: int, loss: float, grad_norm: float) -> StepStatistics:
        """Return the recorded step's statistics, equal on all ranks. Repeated samples count once,
        samples without valid tokens do not count. Raise `UserError` if no rank has recorded
        anything."""
        if not self._wanted:
            return StepStatistics(
                step, loss, grad_norm, samples=np.zeros(0, np.int64), sample_losses=np.zeros(0)
            )
        recorded, self._recorded = self._recorded, []
        numbers = np.concatenate([np.zeros(0, np.int64), *(part for part, _ in recorded)])
        losses = np.concatenate(
            [np.zeros(0), *(part.cpu().double().numpy() for _, part in recorded)]
        )
        valid = numbers != NO_DOCUMENT
        local = _add_up(numbers[valid], losses[valid], np.ones(valid.sum()))
        gathered = gather_objects((bool(recorded), local))
        if not any(has_recorded for has_recorded, _ in gathered):
            raise UserError(
                "the sampler needs per-sample losses, which this trainer's train_step does not "
                "record; compute each micro-batch within `self.sample_losses.of(batch)`"
            )
        samples, sums, counts = _add_up(
            *(np.concatenate(parts) for parts in zip(*(sums for _, sums in gathered), strict=True))
        )
        return StepStatistics(
            step=step, loss=loss, grad_norm=grad_norm, samples=samples, sample_losses=sums / counts
        )


def _add_up(
    numbers: Array, sums: np.typing.NDArray[np.float64], counts: np.typing.NDArray[np.float64]
) -> tuple[Array, np.typing.NDArray[np.float64], np.typing.NDArray[np.float64]]:
    """Return the distinct numbers in order, with the sums and counts of their entries."""
    unique, where = np.unique(numbers, return_inverse=True)
    return unique, *(np.bincount(where, values, len(unique)) for values in (sums, counts))  # type: ignore[return-value]
