"""The losses of single tokens in a step's forward passes."""

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from torchtitan.components.data.base import Batch
from torchtitan.components.losses.loss import CrossEntropyLoss
from torchtitan.distributed.context_parallel import shard_sequences
from torchtitan.distributed.parallel_dims import ParallelDims


class TokenLosses:
    """Gives the loss of each token of a micro-batch. The training loss and its gradients stay
    bit-identical.

    Args:
        loss: a `CrossEntropyLoss`.
        has_failed: tells whether this rank has failed in the step (`StepFailure`). Such a step
            has no losses, or losses of other tokens.
    """

    def __init__(
        self, loss: CrossEntropyLoss, parallel_dims: ParallelDims, has_failed: Callable[[], bool]
    ):
        self._loss = loss
        self._dims = parallel_dims
        self._has_failed = has_failed

    @contextlib.contextmanager
    def passed_to(
        self,
        use: Callable[[Mapping[str, Tensor], Tensor], None],
        batch: Batch,
        per_token: Mapping[str, Tensor],
    ) -> Iterator[None]:
        """Record a micro-batch's forward pass, then call `use` on one of the ranks with the same
        tokens: with this rank's part of the labels and of `per_token`, (B, L), and the losses,
        (B L,). `batch` and `per_token` are as the loader returned them."""
        with self._loss.recording() as chunks:
            yield
        if self._has_failed():
            return
        own = {"input": batch["input"], "labels": batch["labels"], **per_token}
        if self._dims.cp > 1:
            own = shard_sequences(own, self._dims.sequence_shards, self._dims.coordinate("cp"))
        n_tokens = own["labels"].numel()
        losses = torch.cat(chunks)[:n_tokens]  # then the losses of multi-token prediction
        assert losses.shape == (n_tokens,), "expected exactly one forward pass of the batch"
        if self._dims.is_tensor_leader:
            use(own, losses)
