"""`OwnTokens`, a part of a model that gets whole samples, such as images: it divides their tokens
among context-parallel ranks, and joins the results."""

from typing import Protocol

from torch import Tensor, nn


class TokenExchange(Protocol):
    """Division of the tokens of each sample among ranks."""

    def take(self, x: Tensor, dim: int) -> Tensor:
        """Return a rank's part of a dimension. Raise `UserError` if the ranks do not divide it."""

    def join(self, x_BLD: Tensor) -> Tensor:
        """(B, L / ranks, …) → (B, L, …), the parts of all ranks."""


class OwnTokens(nn.Module):
    """A part of a model without weights, through which all tokens pass: `take` before the blocks,
    `join` after them. All ranks compute the same loss of the joined result; the trainer divides its
    sum over ranks by the sum of their weights."""

    exchange: TokenExchange | None = None
    """Set by context parallelism."""

    def take(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's tokens, which are in dimension `dim`."""
        return x if self.exchange is None else self.exchange.take(x, dim)

    def join(self, x_BLD: Tensor) -> Tensor:
        """Return the tokens of all ranks."""
        return x_BLD if self.exchange is None else self.exchange.join(x_BLD)
