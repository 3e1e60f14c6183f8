"""`Recurrence`: a mixer of tokens whose state passes from token to token, like a delta net, a
state-space layer or a short convolution."""

from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from torchtitan.protocols.attention import AttentionMetadata


class HeadExchange(Protocol):
    """Exchange among ranks that divide the tokens of each row (context parallelism): for a
    recurrence, they divide its heads or channels instead."""

    def to_heads(
        self, inputs: Sequence[Tensor], attention: AttentionMetadata, shared: Collection[int]
    ) -> tuple[Tensor, ...]:
        """Exchange tensors of the same type: (B, L, H), all heads of a rank's tokens → (B, S, H /
        ranks), a rank's heads of all tokens of the rows, in their order. Of the `shared` ones, by
        number, each rank gets all: (B, S, H)."""

    def to_tokens(self, x_BSH: Tensor, attention: AttentionMetadata) -> Tensor:
        """(B, S, H / ranks, …) → (B, L, H, …)."""

    def own(self, parameter_H: Tensor) -> Tensor:
        """Return the rows of a rank's heads, (H / ranks, …)."""


class OwnHeads(nn.Module):
    """A module with parameters of one row per head or channel, which it declares for tensor
    parallelism: `with_features(self, A_log=("out",))`."""

    exchange: HeadExchange | None = None
    """Set by context parallelism."""

    is_shared = False
    """True if all heads use all rows, so that each rank has them."""

    total_of_ranks: Callable[[Tensor], Tensor] | None = None
    """Sum over the ranks that divide the heads; set by tensor parallelism."""

    def own(self, parameter_H: Tensor) -> Tensor:
        """Return the rows of a parameter that belong to the heads that this rank computes."""
        if self.exchange is None or self.is_shared:
            return parameter_H
        return self.exchange.own(parameter_H)


class Recurrence(OwnHeads):
    """Mixer of tokens, called like attention, in three steps. The first and the last one work on
    each token separately; the recurrence works on each head (or channel) separately, so that
    tensor- and context-parallel ranks have some of the heads."""

    shared_inputs: Collection[int] = ()
    """Numbers of the inputs of `recur` that all heads use."""

    def forward(self, x_BLD: Tensor, rope: object, attention: AttentionMetadata) -> Tensor:
        """(B, L, dim) → (B, L, dim). Positions matter only as the starts of documents, so `rope` is
        not used."""
        inputs = self.project(x_BLD)
        if self.exchange is not None:
            inputs = self.exchange.to_heads(inputs, attention, self.shared_inputs)
        documents_BL = document_numbers(inputs[0], attention)
        state = (attention.states or {}).get(self)
        out_BLH, state = self.recur(
            *inputs, documents_BL=documents_BL, state=state, attention=attention
        )
        if attention.states is not None:
            attention.states[self] = state
        if self.exchange is not None:
            out_BLH = self.exchange.to_tokens(out_BLH, attention)
        return self.finish(out_BLH, x_BLD)

    @abstractmethod
    def project(self, x_BLD: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs of the recurrence, all of x's type, (B, L, heads or channels). The
        channels of a head are contiguous; ranks divide the last dimension of each."""

    @abstractmethod
    def recur(
        self, *inputs: Tensor, documents_BL: Tensor, state: object, attention: AttentionMetadata
    ) -> tuple[Tensor, Any]:
        """Return the result, (B, L, heads or channels, …), and the state after the last token: a
        tensor or nested tuples of tensors, each with B rows. Without `attention.states`, the state
        is not used, and may be None.

        Args:
            documents_BL: number of each token's document, (B or 1, L); documents do not see each
                other. 0: the document of `state`.
            state: after the tokens before these; None: no tokens before.
            attention: of the rows, for kernels that take the boundaries of documents.
        """

    @abstractmethod
    def finish(self, out_BLH: Tensor, x_BLD: Tensor) -> Tensor:
        """Return the mixer's output, (B, L, dim), given the recurrence's and the mixer's input."""


def document_numbers(x_BL: Tensor, attention: AttentionMetadata) -> Tensor:
    """Number the documents of each row, (B or 1, L), from 1. 0: the document of earlier tokens, if
    any."""
    positions_BL = attention.positions_BL
    if attention.row_positions_BS is not None:
        positions_BL = attention.row_positions_BS
    if positions_BL is None:
        return torch.zeros(1, x_BL.shape[1], dtype=torch.long, device=x_BL.device)
    return (positions_BL == 0).cumsum(dim=1)
