"""`AttentionMetadata`: which tokens of a batch attend to which. Data loaders make it, and every
kernel reads it."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.tools.device import send

Kernel = Literal["causal", "documents", "dense", "varlen", "flex"]
"""Computation of attention; `torchtitan.models.common.attention` chooses it."""


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of a batch, for statistics over tokens."""

    of_token_BL: Tensor
    """Number of each token's document, from 0; `count` for padding."""

    count: int
    """Number of documents."""

    experts_BLNK: Tensor | None = None
    """See `AttentionMetadata`."""

    @property
    def has_token_BL(self) -> Tensor:
        """True for the tokens of documents, False for padding."""
        return self.of_token_BL < self.count

    def tokens(self, part: slice | Tensor) -> "Documents":
        """Describe a part of each row's tokens, or those at some places."""
        experts = self.experts_BLNK
        return replace(
            self,
            of_token_BL=self.of_token_BL[:, part],
            experts_BLNK=None if experts is None else experts[:, part],
        )

    def before_last(self, n_tokens: int) -> "Documents":
        """Count the last `n_tokens` tokens of each document as padding."""
        later_BL = F.pad(self.of_token_BL[:, n_tokens:], (0, n_tokens), value=self.count)
        later_BL = later_BL[:, : self.of_token_BL.shape[1]]
        has_later_BL = later_BL == self.of_token_BL
        return replace(self, of_token_BL=self.of_token_BL.where(has_later_BL, self.count))


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionMetadata:
    """Attention in a batch of B rows of L tokens: each token sees itself and the earlier tokens of
    its document, at most `window` in all. Documents are contiguous and end with their row.

    Everything that decides shapes is on the host, so that no kernel waits for the device to read
    it.
    """

    positions_BL: Tensor | None = None
    """Each token's position in its document, on the device of the tokens. None: each row is one
    document."""

    cu_seqlens: Tensor
    """Boundaries of documents in the flattened rows, from 0 to B x L: int32, (documents + 1,),
    always on the host."""

    max_seqlen: int
    """Tokens of the longest document."""

    n_tokens_B: Tensor | None = None
    """Tokens of each row before its padding, int64 (B,), always on the host. None: no row has
    padding."""

    documents: Documents | None = None
    """Documents of the tokens on their device, for routers of experts; the model sets them in
    training."""

    experts_BLNK: Tensor | None = None
    """Experts that each token passes through in each of N layers, instead of those that the routers
    choose, on the device of the tokens; -1: the router chooses. None: all routers choose."""

    window: int | None = None
    """Number of tokens that a token sees, including itself; None: no limit."""

    query_places_L: Tensor | None = None
    """Places of the tokens in their row, if it has other keys too: keys of other ranks under
    context parallelism (then the boundaries are of entire rows), or of a cache."""

    key_places_S: Tensor | None = None
    """Places of all keys in the row, in the order in which attention gets them."""

    sees_all: bool = False
    """True if the only token of each row sees all keys of its window, so that no mask is needed."""

    row_positions_BS: Tensor | None = None
    """Positions of all tokens of the rows, in their order, if a rank has only some of them (context
    parallelism)."""

    kernel: Kernel | None = None
    """Computation of attention; None: the model chooses."""

    mask: Any = None
    """Input of the kernel that is the same in all layers with this window."""

    states: dict[nn.Module, object] | None = None
    """States of recurrent modules after the previous forward pass, which continues in this one: a
    module reads and replaces its own. None: no states are kept."""

    @classmethod
    def from_positions(
        cls, positions_BL: Tensor, n_tokens_B: Tensor | None = None
    ) -> "AttentionMetadata":
        """Describe packed documents by the positions of their tokens, which are on the host and 0
        at each start. The padding after the first `n_tokens_B` tokens of a row has positions like a
        document."""
        assert positions_BL.device.type == "cpu", (
            "reading positions from a device would wait for it"
        )
        starts_BL = positions_BL == 0
        starts_BL[:, 0] = True
        starts = starts_BL.flatten().nonzero().flatten()
        boundaries = torch.cat((starts, starts.new_tensor([starts_BL.numel()]))).int()
        longest = int(boundaries.diff().max())
        return cls(
            positions_BL=positions_BL,
            cu_seqlens=boundaries,
            max_seqlen=longest,
            n_tokens_B=n_tokens_B,
        )

    @classmethod
    def of_rows(
        cls, n_rows: int, length: int, n_tokens_B: Tensor | None = None
    ) -> "AttentionMetadata":
        """Describe rows of `length` tokens, one document each, with padding after their first
        `n_tokens_B` tokens."""
        boundaries = torch.arange(0, (n_rows + 1) * length, length, dtype=torch.int32, device="cpu")
        return cls(cu_seqlens=boundaries, max_seqlen=length, n_tokens_B=n_tokens_B)

    @property
    def n_rows(self) -> int:
        return len(self.cu_seqlens) - 1 if self.positions_BL is None else len(self.positions_BL)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each document, in order."""
        return self.cu_seqlens.diff().tolist()

    def document_lengths_BL(self, device: torch.device) -> Tensor:
        """Return the length of each token's document on `device`, (B, L) or (1, 1)."""
        if self.positions_BL is None:
            return torch.full((1, 1), self.max_seqlen, device=device)
        lengths = self.cu_seqlens.diff().long()
        lengths_BL = lengths.repeat_interleave(lengths).view(self.n_rows, -1)
        lengths_BL = send(lengths_BL, device)
        return lengths_BL if self.query_places_L is None else lengths_BL[:, self.query_places_L]

    def with_documents(self, device: torch.device) -> "AttentionMetadata":
        """Describe the same tokens, with `documents` on `device`."""
        lengths, n_rows = self.cu_seqlens.diff().long(), self.n_rows
        n_documents = len(lengths)
        if self.positions_BL is None:
            length = self.max_seqlen
            of_token_BL = torch.arange(n_rows, device=device)[:, None].expand(n_rows, length)
        else:
            of_token_BL = torch.arange(n_documents).repeat_interleave(lengths).view(n_rows, -1)
            of_token_BL = send(of_token_BL, device)
        if self.n_tokens_B is not None:
            places_L = torch.arange(of_token_BL.shape[1], device=device)
            is_padding_BL = places_L >= send(self.n_tokens_B, device)[:, None]
            of_token_BL = of_token_BL.masked_fill(is_padding_BL, n_documents)
        documents = Documents(of_token_BL, n_documents, self.experts_BLNK)
        if self.query_places_L is not None:
            documents = documents.tokens(self.query_places_L)
        return replace(self, documents=documents)

    def with_window(self, window: int | None) -> "AttentionMetadata":
        """Describe the same tokens for layers with this window."""
        return replace(self, window=window)

    def with_chunks(self, length: int | None, positions_BL: Tensor) -> "AttentionMetadata":
        """Describe the same tokens, with these positions, for layers that cut documents into chunks
        of this length."""
        if length is None or (self.positions_BL is None and self.max_seqlen <= length):
            return self
        starts = [
            start
            for first, last in pairwise(self.cu_seqlens.tolist())
            for start in range(first, last, length)
        ]
        return replace(
            self,
            positions_BL=(positions_BL % length).expand(self.n_rows, -1),
            cu_seqlens=torch.tensor(
                [*starts, int(self.cu_seqlens[-1])], dtype=torch.int32, device="cpu"
            ),
            max_seqlen=min(self.max_seqlen, length),
            sees_all=False,
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "AttentionMetadata":
        """Copy positions and experts to a device; the boundaries stay on the host."""
        tensors = {"positions_BL": self.positions_BL, "experts_BLNK": self.experts_BLNK}
        copied: dict[str, Any] = {
            name: tensor.to(device, non_blocking=non_blocking)
            for name, tensor in tensors.items()
            if tensor is not None
        }
        return replace(self, **copied) if copied else self

    def pin_memory(self) -> "AttentionMetadata":
        """Pin the tensors; PyTorch's `DataLoader` calls this if it pins memory."""
        positions_BL = None if self.positions_BL is None else self.positions_BL.pin_memory()
        return replace(self, positions_BL=positions_BL, cu_seqlens=self.cu_seqlens.pin_memory())

    def rows(self, start: int, stop: int) -> "AttentionMetadata":
        """Describe the rows from `start` to before `stop`, such as a micro-batch of a pipeline."""
        of_rows: dict[str, Any] = {
            name: None if (values := getattr(self, name)) is None else values[start:stop]
            for name in ("n_tokens_B", "experts_BLNK")
        }
        if self.positions_BL is None:
            return replace(self, cu_seqlens=self.cu_seqlens[: stop - start + 1], **of_rows)
        row_positions_BS = self.row_positions_BS
        if row_positions_BS is not None:
            row_positions_BS = row_positions_BS[start:stop]
        first, last = (row * int(self.cu_seqlens[-1]) // self.n_rows for row in (start, stop))
        boundaries = self.cu_seqlens[(self.cu_seqlens >= first) & (self.cu_seqlens <= last)] - first
        return replace(
            self,
            positions_BL=self.positions_BL[start:stop],
            row_positions_BS=row_positions_BS,
            cu_seqlens=boundaries,
            max_seqlen=int(boundaries.diff().max()),
            **of_rows,
        )

    def shard(self, query_places_L: Tensor, key_places_S: Tensor) -> "AttentionMetadata":
        """Describe a rank's part of each row's tokens, given the places of its tokens and of the
        gathered keys."""
        whole_BS = self.positions_BL
        if whole_BS is None:
            places_S = torch.arange(len(key_places_S), device=key_places_S.device)
            whole_BS = places_S.expand(self.n_rows, -1)
        return replace(
            self,
            positions_BL=whole_BS[:, query_places_L],
            row_positions_BS=whole_BS,
            query_places_L=query_places_L,
            key_places_S=key_places_S,
        )


class ScaledScores(nn.Module):
    """Base class of attention whose scores follow from weights of its own."""

    @property
    def scores(self) -> Any:
        """The module that computes scores. With `records_peaks`, its passes with gradients record
        the largest scaled score of each head since `peaks_H` was None, float32 (H,): of the heads
        of this rank under tensor parallelism."""
        raise NotImplementedError

    @property
    def n_heads(self) -> int:
        """Number of heads over all ranks."""
        raise NotImplementedError

    def reason_not_to_scale(self) -> str:
        """Return what keeps the scores from following the weights, "" for nothing."""
        raise NotImplementedError

    def rows_of_scores(self, factor_H: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return parameters, with a factor of each row over all ranks, that multiply the scores of
        each head by a factor."""
        raise NotImplementedError
