"""The training loss: cross entropy summed over valid tokens, without materializing all logits.

A loss is a function of the last hidden states and the output weights, passed to the model as its
`head`. This avoids the full logits, the largest tensor of a training step with a large vocabulary.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan.components.losses.cross_entropy import (
    IGNORE_INDEX,
    BlockLoss,
    OfChunk,
    chunked_loss,
    cross_entropy_,
    cross_entropy_in_blocks,
    labeled_rows,
)
from torchtitan.config import Configurable
from torchtitan.config.configurable import builds
from torchtitan.distributed.loss_parallel import LogitsLoss, local_shards, on_sharded_logits
from torchtitan.distributed.whole_tensors import whole
from torchtitan.protocols.output_head import UNCHANGED, LogitTransform
from torchtitan.tools.errors import require
from torchtitan.tools.sharded import is_dtensor

_CHUNK_TOKENS = {"cuda": 4096}
_DEFAULT_CHUNK_TOKENS = 1024


class CrossEntropyLoss(Configurable):
    """Sum of the negative log-likelihood over valid tokens (label != -100); the caller divides by
    their number in the *global* batch. A subclass that is also a sum over tokens overrides only
    `from_logits`; chunking still applies."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Cross entropy."""

        chunk_tokens: int | None = None
        """Number of tokens with logits in memory at a time; 0: all at once. None: 4,096 on CUDA,
        otherwise 1,024."""

        @builds(lambda: CrossEntropyLoss)
        def build(self) -> object:
            """Build the loss."""

        def validate(self) -> None:
            tokens = self.chunk_tokens
            require(tokens is None or tokens >= 0, "--loss.chunk_tokens", tokens, "at least 0")

    config: Config

    def __init__(self, config: "CrossEntropyLoss.Config"):
        super().__init__(config)
        self._recorded: list[Tensor] | None = None  # the losses of tokens, while they are recorded
        self._plain: CrossEntropySum | None = None  # receives plain cross entropy in validation
        own = type(self)
        self._is_plain = (own.from_logits, own.token_losses) == (
            CrossEntropyLoss.from_logits,
            CrossEntropyLoss.token_losses,
        )
        self._compiled: BlockLoss | None = None
        self.device_type: str | None = None
        """Type of the device to choose sizes for; None: the device of the hidden states."""

    @property
    def unit(self) -> str:
        """Unit of the mean over tokens; empty: a subclass computes another number."""
        return "nats per token" if self._is_plain else ""

    def compile(self, backend: str) -> None:
        """Compile the loss of a chunk of logits, in place."""
        if self._is_plain:
            self._compiled = torch.compile(cross_entropy_, backend=backend)
        else:
            self.from_logits = torch.compile(self.from_logits, backend=backend)  # type: ignore[method-assign]

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """Record the losses of single tokens, without gradients, in the yielded list, as tensors of
        several tokens each, in the order of `labels_BL`. The summed loss is bitwise unchanged."""
        recorded: list[Tensor] = []
        self._recorded = recorded
        try:
            yield recorded
        finally:
            self._recorded = None

    @contextlib.contextmanager
    def adding_cross_entropy(self, total: "CrossEntropySum") -> Iterator[None]:
        """Add the plain cross entropy of all tokens of the calls in a block to `total`, without
        gradients, to compute bits per byte for any loss. It takes the same logits, so no further
        forward pass."""
        self._plain = total
        try:
            yield
        finally:
            self._plain = None

    def __call__(
        self,
        hidden_BLD: Tensor,
        weight_VD: Tensor | None,
        labels_BL: Tensor,
        *,
        transform: LogitTransform = UNCHANGED,
    ) -> Tensor:
        """Return the summed loss, a float32 scalar, from the normalized last hidden states, the
        output weights (without them, `hidden_BLD` are all logits, as autograd knows them), and the
        token after each position, or -100. `transform` changes the logits before the softmax.

        Under tensor parallelism, the first two are DTensors, with the weights sharded by rows. Each
        rank computes the logits of its vocabulary shard, and an overridden `from_logits` gets them
        as a DTensor.
        """
        from_logits: LogitsLoss = (
            self.from_logits if self._recorded is None else self._from_logits_and_record
        )
        if self._plain is not None:
            self._plain.count(labels_BL)
            if not self._is_plain or weight_VD is None:
                from_logits = self._plain.adding(from_logits)
        if transform != UNCHANGED:
            from_logits = _after(transform, from_logits)
        if weight_VD is None:
            return from_logits(hidden_BLD.flatten(0, 1), labels_BL.flatten())
        if is_dtensor(weight_VD):
            from_logits = on_sharded_logits(from_logits, weight_VD)
        hidden_BLD, weight_VD, shard = local_shards(hidden_BLD, weight_VD)
        hidden, labels = hidden_BLD.flatten(0, 1), labels_BL.flatten()
        device_type = self.device_type or hidden.device.type
        chunk_tokens = self.config.chunk_tokens
        if chunk_tokens is None:
            chunk_tokens = _CHUNK_TOKENS.get(device_type, _DEFAULT_CHUNK_TOKENS)
        chunk_tokens = chunk_tokens or max(1, len(labels))
        needs_grad = torch.is_grad_enabled()
        if not self._is_plain:
            of_chunk = _by_autograd(from_logits, labels, needs_grad=needs_grad)
            return chunked_loss(hidden, weight_VD, of_chunk, chunk_tokens)[0]
        # Tokens without a label need no logits. Compiled code would be specialized on their number.
        rows = None if self._compiled else labeled_rows(labels)
        n_tokens = len(labels)
        if rows is not None:
            hidden, labels = hidden.index_select(0, rows), labels[rows]
        options = {"transform": transform, "shard": shard, "needs_grad": needs_grad}

        def closed_form(logits_NV: Tensor, part: slice) -> tuple[Tensor, Tensor]:
            if self._compiled:  # fuses the passes, and needs no memory in float32
                losses_N = self._compiled(logits_NV, labels[part], **options)
            else:
                losses_N = cross_entropy_in_blocks(logits_NV, labels[part], device_type, **options)
            return losses_N[:, None], logits_NV

        loss, losses_N1 = chunked_loss(hidden, weight_VD, closed_form, chunk_tokens)
        if self._plain is not None:
            self._plain.add(loss)
        if self._recorded is not None:
            losses_N = losses_N1[:, 0]
            if rows is not None:
                losses_N = losses_N.new_zeros(n_tokens).index_copy_(0, rows, losses_N)
            self._recorded.append(losses_N)
        return loss

    def from_logits(self, logits_NV: Tensor, labels_N: Tensor) -> Tensor:
        """Return the summed loss of some tokens, in float32 for any type of logits. Autograd
        computes the gradients of a subclass's own version, and a closed form the gradients of this
        one."""
        return F.cross_entropy(
            logits_NV.float(), labels_N, reduction="sum", ignore_index=IGNORE_INDEX
        )

    def token_losses(self, logits_NV: Tensor, labels_N: Tensor) -> Tensor:
        """Return the loss of each token, (N,) in float32, 0 for label -100. Override it together
        with `from_logits`."""
        return F.cross_entropy(
            logits_NV.float(), labels_N, reduction="none", ignore_index=IGNORE_INDEX
        )

    def _from_logits_and_record(self, logits_NV: Tensor, labels_N: Tensor) -> Tensor:
        assert self._recorded is not None
        with torch.no_grad():
            losses = self.token_losses(logits_NV, labels_N)
        self._recorded.append(whole(losses))
        return self.from_logits(logits_NV, labels_N)


class CrossEntropySum:
    """The summed cross entropy of tokens in nats, and their number, on their device."""

    def __init__(self) -> None:
        self.nats: Tensor | int = 0
        self.n_tokens: Tensor | int = 0

    def count(self, labels: Tensor) -> None:
        """Count the valid tokens in labels."""
        self.n_tokens = self.n_tokens + (labels != IGNORE_INDEX).sum()

    def add(self, nats: Tensor) -> None:
        self.nats = self.nats + nats.detach()

    def adding(self, from_logits: LogitsLoss) -> LogitsLoss:
        """Return the loss of logits, which then also adds the cross entropy of these."""

        def compute(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
            with torch.no_grad():
                nats = F.cross_entropy(
                    logits_NV.float(), labels_N, reduction="sum", ignore_index=IGNORE_INDEX
                )
            self.add(whole(nats))
            return from_logits(logits_NV, labels_N)

        return compute


def _after(transform: LogitTransform, from_logits: LogitsLoss) -> LogitsLoss:
    return lambda logits_NV, labels_N: from_logits(transform(logits_NV.float()), labels_N)


def _by_autograd(from_logits: LogitsLoss, labels_N: Tensor, *, needs_grad: bool) -> OfChunk:
    def of_chunk(logits_NV: Tensor, part: slice) -> tuple[Tensor, Tensor | None]:
        with torch.set_grad_enabled(needs_grad):
            logits_NV = logits_NV.detach().requires_grad_(needs_grad)
            loss = from_logits(logits_NV, labels_N[part])
        gradients = torch.autograd.grad(loss, logits_NV)[0] if needs_grad else None
        return loss.detach().float().view(1, 1), gradients

    return of_chunk


class Measures:
    """Named weighted means of additional quantities, such as the margin of a preference loss. The
    sums stay on `device`, in `dtype`."""

    def __init__(
        self, names: Sequence[str], *, device: torch.device, dtype: torch.dtype = torch.float64
    ):
        self.names = list(names)
        self._sums = torch.zeros(len(self.names), 2, device=device, dtype=dtype)

    def add(self, name: str, total: Tensor, weight: Tensor) -> None:
        """Add the sum and weight of a batch, two scalars. Raise `ValueError` for an unknown
        `name`."""
        self._sums[self.names.index(name)] += torch.stack((total, weight)).detach().to(self._sums)

    def take(self) -> Tensor:
        """Return this rank's sums and weights since the last call, shape (2 n,), and reset them."""
        sums, self._sums = self._sums, torch.zeros_like(self._sums)
        return sums.flatten()

    def means(self, sums: Sequence[float]) -> dict[str, float]:
        """Return the means from the results of `take` summed over ranks, except for means of zero
        weight."""
        pairs = zip(self.names, sums[::2], sums[1::2], strict=True)
        return {name: total / weight for name, total, weight in pairs if weight}
