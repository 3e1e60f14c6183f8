"""The training loss: cross entropy summed over valid tokens, without materializing all logits.

A loss is a function of the last hidden states and the output weights, passed to the model as its `head`. This avoids
the full logits, the largest tensor of a training step with a large vocabulary.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan.config import Configurable
from torchtitan.distributed.loss_parallel import LogitsLoss, shard_vocabulary
from torchtitan.tools.errors import UserError

IGNORE_INDEX = -100
"""Label of a token that is not predicted."""


class CrossEntropyLoss(Configurable):
    """Sum of the negative log-likelihood over valid tokens (label != -100); the caller divides by their number in the
    *global* batch. A subclass that is also a sum over tokens overrides only `from_logits`; chunking still applies."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Cross entropy."""

        chunk_tokens: int = 512
        """Number of tokens with logits in memory at a time; 0: all at once."""

        def validate(self) -> None:
            if self.chunk_tokens < 0:
                raise UserError(f"--loss.chunk_tokens is {self.chunk_tokens}, but must be at least 0")

    config: Config

    def __init__(self, config: "CrossEntropyLoss.Config"):
        super().__init__(config)
        self._recorded: list[Tensor] | None = None  # the losses of tokens, while they are recorded

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """Record the losses of single tokens, without gradients, in the yielded list: one tensor per chunk, in the
        order of `labels_BL`. The summed loss is bitwise unchanged."""
        recorded: list[Tensor] = []
        self._recorded = recorded
        try:
            yield recorded
        finally:
            self._recorded = None

    def __call__(self, hidden_BLD: Tensor, weight_VD: Tensor, labels_BL: Tensor) -> Tensor:
        """Return the summed loss, a float32 scalar.

        Args:
            hidden_BLD: last hidden states, normalized.
            weight_VD: output weights.
            labels_BL: the token after each position, or -100.

        Under tensor parallelism, the first two are DTensors, with the weights sharded by rows. Each rank computes the
        logits of its vocabulary shard, and `from_logits` gets them as a DTensor.
        """
        from_logits: LogitsLoss = self.from_logits if self._recorded is None else self._from_logits_and_record
        if isinstance(weight_VD, DTensor):
            hidden_BLD, weight_VD, from_logits = shard_vocabulary(hidden_BLD, weight_VD, from_logits)
        hidden, labels = hidden_BLD.flatten(0, 1), labels_BL.flatten()
        if self.config.chunk_tokens == 0:
            return from_logits(F.linear(hidden, weight_VD), labels)
        device_type = hidden.device.type
        if torch.is_autocast_enabled(device_type):
            # Once here rather than once per chunk.
            dtype = torch.get_autocast_dtype(device_type)
            hidden, weight_VD = hidden.to(dtype), weight_VD.to(dtype)
        # `needs_input_grad` would be true for a parameter even if gradients are disabled.
        hidden, weight_VD = (x if torch.is_grad_enabled() else x.detach() for x in (hidden, weight_VD))
        return _ChunkedLinearLoss.apply(hidden, weight_VD, labels, from_logits, self.config.chunk_tokens)

    def from_logits(self, logits_NV: Tensor, labels_N: Tensor) -> Tensor:
        """Return the summed loss of some tokens, in float32 for any type of logits."""
        return F.cross_entropy(logits_NV.float(), labels_N, reduction="sum", ignore_index=IGNORE_INDEX)

    def token_losses(self, logits_NV: Tensor, labels_N: Tensor) -> Tensor:
        """Return the loss of each token, (N,) in float32, 0 for label -100. Override it together with `from_logits`."""
        return F.cross_entropy(logits_NV.float(), labels_N, reduction="none", ignore_index=IGNORE_INDEX)

    def _from_logits_and_record(self, logits_NV: Tensor, labels_N: Tensor) -> Tensor:
        assert self._recorded is not None
        with torch.no_grad():
            losses = self.token_losses(logits_NV, labels_N)
        self._recorded.append(losses.full_tensor() if isinstance(losses, DTensor) else losses)
        return self.from_logits(logits_NV, labels_N)


class _ChunkedLinearLoss(torch.autograd.Function):
    """Linear layer and summed loss over chunks of tokens. The forward pass also computes each chunk's gradient, so only
    one chunk's logits are in memory, and nothing is recomputed."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, from_logits: LogitsLoss, chunk_tokens: int
    ) -> Tensor:
        needs_grad_hidden, needs_grad_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden_ND) if needs_grad_hidden else None
        # Always float32, since a sum over chunks in bfloat16 would lose small terms.
        grad_weight = torch.zeros_like(weight_VD, dtype=torch.float32) if needs_grad_weight else None
        total = hidden_ND.new_zeros((), dtype=torch.float32)
        for start in range(0, hidden_ND.shape[0], chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            logits = F.linear(hidden_ND[rows], weight_VD)
            with torch.enable_grad():
                logits.requires_grad_(needs_grad_hidden or needs_grad_weight)
                loss = from_logits(logits, labels_N[rows])
            total += loss.detach()
            if not logits.requires_grad:
                continue
            (grad_logits,) = torch.autograd.grad(loss, logits)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight_VD, out=grad_hidden[rows])
            if grad_weight is not None and grad_logits.dtype == torch.float32:
                grad_weight.addmm_(grad_logits.T, hidden_ND[rows])
            elif grad_weight is not None:
                grad_weight += grad_logits.T @ hidden_ND[rows]
        ctx.weight_dtype = weight_VD.dtype
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = grad_outputs
        grad_hidden, grad_weight = ctx.saved_tensors
        # Not in place, since pipeline schedules with a split backward pass call this twice.
        if grad_hidden is not None:
            grad_hidden = grad_hidden * scale
        if grad_weight is not None:
            scaled = torch.empty_like(grad_weight, dtype=ctx.weight_dtype)
            grad_weight = torch.mul(grad_weight, scale, out=scaled)
        return grad_hidden, grad_weight, None, None, None


class Measures:
    """Named weighted means of additional quantities, such as the margin of a preference loss. The sums stay on
    `device`, in `dtype`."""

    def __init__(self, names: Sequence[str], *, device: torch.device, dtype: torch.dtype = torch.float64):
        self.names = list(names)
        self._sums = torch.zeros(len(self.names), 2, device=device, dtype=dtype)

    def add(self, name: str, total: Tensor, weight: Tensor) -> None:
        """Add the sum and weight of a batch, two scalars. Raise `ValueError` for an unknown `name`."""
        self._sums[self.names.index(name)] += torch.stack((total, weight)).detach().to(self._sums)

    def take(self) -> Tensor:
        """Return this rank's sums and weights since the last call, shape (2 n,), and reset them."""
        sums, self._sums = self._sums, torch.zeros_like(self._sums)
        return sums.flatten()

    def means(self, sums: Sequence[float]) -> dict[str, float]:
        """Return the means from the results of `take` summed over ranks; NaN for zero weight."""
        pairs = zip(self.names, sums[::2], sums[1::2], strict=True)
        return {name: total / weight if weight else math.nan for name, total, weight in pairs}
