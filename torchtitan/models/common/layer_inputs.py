"""Inputs of layers besides hidden states, which layers of the same kind share."""

from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor, nn

from torchtitan.models.common.attention import with_kernel
from torchtitan.models.common.blocks import Rope
from torchtitan.models.common.rope import RoPEConfig, rope_cos_sin
from torchtitan.protocols.attention import AttentionMetadata


class LayerCall(NamedTuple):
    """A layer and its inputs besides hidden states."""

    block: nn.Module
    rope: Rope
    attention: AttentionMetadata


class BatchInputs:
    """Rotations and attention of one batch, computed once for all layers with the same RoPE or
    window, and heads of the same width.

    Args:
        attention: positions and documents of the batch.
        positions_BL: positions of the tokens on their device, also if `attention` has none.
        has_chunks: windows are consecutive chunks of the documents.
        properties: further arguments of `choose_kernel`.
    """

    def __init__(
        self,
        attention: AttentionMetadata,
        positions_BL: Tensor,
        *,
        has_chunks: bool,
        **properties: Any,
    ) -> None:
        self.positions_BL = positions_BL
        self._attention = attention
        self._has_chunks = has_chunks
        self._properties = properties
        self._ropes: list[tuple[RoPEConfig, int, Rope]] = []
        self._with_window: dict[tuple[int | None, int], AttentionMetadata] = {}

    def rope(self, config: RoPEConfig | None, head_dim: int) -> Rope:
        """Return the cosines and sines of the positions; None for a layer without positions."""
        if config is None:
            return None
        for known_config, known_dim, known in self._ropes:
            if known_dim == head_dim and known_config == config:
                return known
        lengths_BL = self._lengths_BL if config.depends_on_length else None
        rope = rope_cos_sin(config, head_dim, self.positions_BL, lengths_BL)
        self._ropes.append((config, head_dim, rope))
        return rope

    def attention(self, window: int | None, head_dim: int) -> AttentionMetadata:
        """Return the attention of layers with this window, with kernel and mask. None: the
        window of the batch."""
        key = (window or self._attention.window, head_dim)
        if key not in self._with_window:
            self._with_window[key] = self._make_attention(*key)
        return self._with_window[key]

    def _make_attention(self, window: int | None, head_dim: int) -> AttentionMetadata:
        if self._has_chunks:
            attention = self._attention.with_chunks(window, self.positions_BL)
        else:
            attention = self._attention.with_window(window)
        device = self.positions_BL.device
        return with_kernel(attention, device=device, head_dim=head_dim, **self._properties)

    @cached_property
    def _lengths_BL(self) -> Tensor:
        return self._attention.document_lengths_BL(self.positions_BL.device)
