"""The training loss: cross entropy summed over valid tokens, without materializing all logits.

A loss is a function of the last hidden states and the output weights, passed to the model as its `head`. This avoids
the full logits, the largest tensor of a training step with a large vocabulary.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan.components.cross_entropy import (
    IGNORE_INDEX,
    BlockLoss,
    LinearCrossEntropy,
    add_product,
    block_elements,
    cross_entropy_,
    scaled_gradients,
)
from torchtitan.config import Configurable
from torchtitan.distributed.loss_parallel import LogitsLoss, local_shards, on_sharded_logits
from torchtitan.protocols.output_head import UNCHANGED, LogitTransform
from torchtitan.tools.errors import require

_CHUNK_TOKENS = {"cuda": 4096}
_DEFAULT_CHUNK_TOKENS = 1024


class CrossEntropyLoss(Configurable):
    """Sum of the negative log-likelihood over valid tokens (label != -100); the caller divides by their number in the
    *global* batch. A subclass that is also a sum over tokens overrides only `from_logits`; chunking still applies."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Cross entropy."""

        chunk_tokens: int | None = None
        """Number of tokens with logits in memory at a time; 0: all at once. None: 4,096 on CUDA, otherwise 1,024."""

        def validate(self) -> None:
            tokens = self.chunk_tokens
            require(tokens is None or tokens >= 0, "--loss.chunk_tokens", tokens, "at least 0")

    config: Config

    def __init__(self, config: "CrossEntropyLoss.Config"):
        super().__init__(config)
        self._recorded: list[Tensor] | None = None  # the losses of tokens, while they are recorded
        own = type(self)
        self._is_plain = (own.from_logits, own.token_losses) == (
            CrossEntropyLoss.from_logits,
            CrossEntropyLoss.token_losses,
        )
        self._compiled: BlockLoss | None = None
        self.device_type: str | None = None
        """Type of the device to choose sizes for; None: the device of the hidden states."""

    def compile(self, backend: str) -> None:
        """Compile the loss of a chunk of logits, in place."""
        if self._is_plain:
            self._compiled = torch.compile(cross_entropy_, backend=backend)
        else:
            self.from_logits = torch.compile(self.from_logits, backend=backend)  # type: ignore[method-assign]

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """Record the losses of single tokens, without gradients, in the yielded list, as tensors of several tokens
        each, in the order of `labels_BL`. The summed loss is bitwise unchanged."""
        recorded: list[Tensor] = []
        self._recorded = recorded
        try:
            yield recorded
        finally:
            self._recorded = None

    def __call__(
        self, hidden_BLD: Tensor, weight_VD: Tensor | None, labels_BL: Tensor, *, transform: LogitTransform = UNCHANGED
    ) -> Tensor:
        """Return the summed loss, a float32 scalar.

        Args:
            hidden_BLD: last hidden states, normalized.
            weight_VD: output weights. None: `hidden_BLD` are all logits, as autograd knows them.
            labels_BL: the token after each position, or -100.
            transform: of the logits, before the softmax.

        Under tensor parallelism, the first two are DTensors, with the weights sharded by rows. Each rank computes the
        logits of its vocabulary shard, and an overridden `from_logits` gets them as a DTensor.
        """
        from_logits: LogitsLoss = self.from_logits if self._recorded is None else self._from_logits_and_record
        if transform != UNCHANGED:
            from_logits = _after(transform, from_logits)
        if weight_VD is None:
            return from_logits(hidden_BLD.flatten(0, 1), labels_BL.flatten())
        shard = None
        if isinstance(weight_VD, DTensor):
            from_logits = on_sharded_logits(from_logits, weight_VD)
            hidden_BLD, weight_VD, shard = local_shards(hidden_BLD, weight_VD)
        hidden, labels = hidden_BLD.flatten(0, 1), labels_BL.flatten()
        # `needs_input_grad` would be true for a parameter even if gradients are disabled.
        hidden, weight_VD = (x if torch.is_grad_enabled() else x.detach() for x in (hidden, weight_VD))
        device_type = self.device_type or hidden.device.type
        chunk_tokens = self.config.chunk_tokens
        if chunk_tokens is None:
            chunk_tokens = _CHUNK_TOKENS.get(device_type, _DEFAULT_CHUNK_TOKENS)
        chunk_tokens = chunk_tokens or max(1, len(labels))
        if not self._is_plain:
            return _ChunkedLinearLoss.apply(hidden, weight_VD, labels, from_logits, chunk_tokens)
        elements = block_elements(device_type, shard)
        loss, token_losses = LinearCrossEntropy.apply(
            hidden, weight_VD, labels, chunk_tokens, transform, shard, self._compiled, elements
        )
        if self._recorded is not None:
            self._recorded.append(token_losses)
        return loss

    def from_logits(self, logits_NV: Tensor, labels_N: Tensor) -> Tensor:
        """Return the summed loss of some tokens, in float32 for any type of logits. Autograd computes the gradients of
        a subclass's own version, and a closed form the gradients of this one."""
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


def _after(transform: LogitTransform, from_logits: LogitsLoss) -> LogitsLoss:
    return lambda logits_NV, labels_N: from_logits(transform(logits_NV.float()), labels_N)


class _ChunkedLinearLoss(torch.autograd.Function):
    """Linear layer and summed loss over chunks of tokens. The forward pass also computes each chunk's gradient, so only
    one chunk's logits are in memory, and nothing is recomputed."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, from_logits: LogitsLoss, chunk_tokens: int
    ) -> Tensor:
        needs_grad_hidden, needs_grad_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden_ND) if needs_grad_hidden else None
        grad_weight: Tensor | None = None
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
            if needs_grad_weight:
                is_only = hidden_ND.shape[0] <= chunk_tokens
                grad_weight = add_product(grad_weight, grad_logits.T, hidden_ND[rows], is_only=is_only)
        ctx.weight_dtype = weight_VD.dtype
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = scaled_gradients(ctx, grad_outputs[0])
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
        """Return the means from the results of `take` summed over ranks, except for means of zero weight."""
        pairs = zip(self.names, sums[::2], sums[1::2], strict=True)
        return {name: total / weight for name, total, weight in pairs if weight}
