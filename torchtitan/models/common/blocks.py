"""Blocks of attention and a feed-forward network around the residual stream, with norms in
different places.

All blocks name their modules alike; a module that a block lacks is None.
"""

from typing import Any

import torch
from torch import Tensor, nn

from torchtitan.models.common.feed_forward import gelu_tanh, make_linear
from torchtitan.models.common.moe.layer import MixtureOfExperts
from torchtitan.models.common.norms import NormFactory
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.protocols.initializer import Constant, TruncatedNormal, with_initializers

Rope = tuple[Tensor, Tensor] | None
"""Cosines and sines of the positions (`rope.rope_cos_sin`); None in a layer without positions."""


class PreNormBlock(nn.Module):
    """Each part takes the normalized residual stream, and is added to it (Llama).

    Args:
        attention: `attention(x_BLD, rope, attention_metadata)`; None: without this part.
        feed_forward: `feed_forward(x_BLD)`; experts become `moe`, since they are split over ranks
            in another way. None: without this part.
        dim: width of the residual stream.
        norm: makes the block's norms.
        multiplier: factor of both parts before they are added.
    """

    norms_before, norms_after = True, False
    """True if both parts have norms of their inputs; the same for their results."""

    def __init__(
        self,
        attention: nn.Module | None,
        feed_forward: nn.Module | None,
        *,
        dim: int,
        norm: NormFactory,
        multiplier: float = 1.0,
    ):
        super().__init__()
        self.multiplier = multiplier
        has_attention, has_network = attention is not None, feed_forward is not None
        self.attention_norm = norm(dim) if self.norms_before and has_attention else None
        self.attention = attention
        self.attention_post_norm = norm(dim) if self.norms_after and has_attention else None
        self.ffn_norm = norm(dim) if self.norms_before and has_network else None
        self.moe = feed_forward if isinstance(feed_forward, MixtureOfExperts) else None
        self.feed_forward = feed_forward if self.moe is None else None
        self.ffn_post_norm = norm(dim) if self.norms_after and has_network else None
        self.mtp: nn.ModuleDict | None = None
        self.own: nn.ModuleDict | None = None
        self.dense_post_norm: nn.Module | None = None

    def forward(self, x_BLD: Tensor, rope: Rope, attention: AttentionMetadata) -> Tensor:
        """(B, L, dim) → (B, L, dim)."""
        if self.attention is not None:
            x_BLD = self._add(x_BLD, self._attend(x_BLD, rope, attention))
        if self.feed_forward is None and self.moe is None:
            return x_BLD
        return self._add(x_BLD, self._feed_forward(x_BLD, attention))

    def _attend(self, x_BLD: Tensor, rope: Rope, attention: AttentionMetadata) -> Tensor:
        assert self.attention is not None
        x_BLD = x_BLD if self.attention_norm is None else self.attention_norm(x_BLD)
        out_BLD: Tensor = self.attention(x_BLD, rope, attention)
        return out_BLD if self.attention_post_norm is None else self.attention_post_norm(out_BLD)

    def _feed_forward(self, x_BLD: Tensor, attention: AttentionMetadata) -> Tensor:
        out_BLD = self._mix(x_BLD if self.ffn_norm is None else self.ffn_norm(x_BLD), attention)
        return out_BLD if self.ffn_post_norm is None else self.ffn_post_norm(out_BLD)

    def _mix(self, x_BLD: Tensor, attention: AttentionMetadata) -> Tensor:
        """Return the result of the feed-forward network or of experts; their statistics skip
        padding."""
        if self.moe is not None:
            return self.moe(x_BLD, attention.documents)
        assert self.feed_forward is not None
        return self.feed_forward(x_BLD)

    def _add(self, x_BLD: Tensor, out_BLD: Tensor) -> Tensor:
        return x_BLD + (out_BLD if self.multiplier == 1.0 else self.multiplier * out_BLD)


class SharingBlock(PreNormBlock):
    """Its attention takes results of an earlier layer's, or has further results for later
    layers."""

    def forward(
        self, x_BLD: Tensor, rope: Rope, attention: AttentionMetadata, *shared: Tensor
    ) -> Any:
        """(B, L, dim) → the same, and attention's other results."""
        assert self.attention_norm and self.attention
        attended = self.attention(self.attention_norm(x_BLD), rope, attention, *shared)
        out_BLD, *given = attended if isinstance(attended, tuple) else (attended,)
        x_BLD = self._add(x_BLD, out_BLD)
        return self._add(x_BLD, self._feed_forward(x_BLD, attention)), *given


class MultiTokenBlock(PreNormBlock):
    """A module of multi-token prediction (DeepSeek-V3, arXiv:2412.19437, equations 21 and 22). Its
    input is the state of the previous one, or of the last layer, after the final norm, as in the
    code published with DeepSeek's weights and in vLLM; the paper draws it before the norm."""

    mtp: nn.ModuleDict

    def __init__(self, *parts: nn.Module, dim: int, norm: NormFactory):
        super().__init__(*parts, dim=dim, norm=norm)
        norms = {name: norm(dim) for name in ("enorm", "hnorm", "norm")}
        self.mtp = nn.ModuleDict({**norms, "eh_proj": make_linear(2 * dim, dim, init_std=0.02)})

    def forward(
        self, x_BLD: Tensor, rope: Rope, attention: AttentionMetadata, *embedded_BLD: Tensor
    ) -> Tensor:
        """(B, L, dim) → (B, L, dim), normalized; also takes the embeddings of later tokens."""
        parts = *map(self.mtp["enorm"], embedded_BLD), self.mtp["hnorm"](x_BLD)
        return self.mtp["norm"](
            super().forward(self.mtp["eh_proj"](torch.cat(parts, dim=-1)), rope, attention)
        )


class PostNormBlock(PreNormBlock):
    """Each part takes the residual stream unchanged; its normalized result is added (OLMo 2)."""

    norms_before, norms_after = False, True


class SandwichBlock(PreNormBlock):
    """Each part has a norm before and after it (Gemma 2)."""

    norms_after = True


class ScaledSandwichBlock(SandwichBlock):
    """A `SandwichBlock` whose result is scaled by a constant saved with the weights (Gemma 4)."""

    def __init__(self, *parts: nn.Module, **options: Any):
        super().__init__(*parts, **options)
        self.layer_scalar = nn.Buffer(torch.empty(1))
        with_initializers(self, layer_scalar=Constant(1.0))

    def forward(self, x_BLD: Tensor, rope: Rope, attention: AttentionMetadata) -> Tensor:
        """(B, L, dim) → (B, L, dim)."""
        return super().forward(x_BLD, rope, attention) * self.layer_scalar.type_as(x_BLD)


class _Lookup(nn.Embedding):
    active_fraction = 0  # of no matrix product


class PerLayerEmbeddings(nn.Module):
    """Inputs of P elements per token for each of N layers: the token's embedding plus a projection
    of its hidden state before the first layer (Gemma 3n, 4)."""

    def __init__(self, n_layers: int, width: int, first: nn.Embedding, norm: NormFactory):
        """Take sizes from the `first` embedding, of the stream."""
        super().__init__()
        self.width, embedding = width, _Lookup(first.num_embeddings, n_layers * width)
        self.tok_embeddings = with_initializers(embedding, weight=TruncatedNormal(width**-0.5))
        self.projection, self.norm = (
            make_linear(first.embedding_dim, n_layers * width, 0.02),
            norm(width),
        )

    def forward(self, tokens_BL: Tensor, hidden_BLD: Tensor) -> Tensor:
        """(B, L), (B, L, D) → (B, L, N, P)."""
        token_BLE = self.tok_embeddings(tokens_BL)
        state_BLE = self.projection(hidden_BLD) * hidden_BLD.shape[-1] ** -0.5
        # rounded, as in the reference
        root = torch.tensor(self.width**0.5, dtype=token_BLE.dtype).item()
        token_BLNP, state_BLNP = (
            x.unflatten(-1, (-1, self.width)) for x in (token_BLE * root, state_BLE)
        )
        return (self.norm(state_BLNP) + token_BLNP) * 2**-0.5


class PerLayerBlock(ScaledSandwichBlock):
    """Adds a third part: a narrow projection of the stream times the layer's
    `PerLayerEmbeddings`."""

    own: nn.ModuleDict

    def __init__(self, *parts: nn.Module, dim: int, norm: NormFactory, input_dim: int):
        super().__init__(*parts, dim=dim, norm=norm)
        gate, out = make_linear(dim, input_dim, 0.02), make_linear(input_dim, dim, 0.02)
        self.own = nn.ModuleDict({"gate": gate, "out": out, "norm": norm(dim)})

    def forward(
        self, x_BLD: Tensor, rope: Rope, attention: AttentionMetadata, *inputs: Tensor
    ) -> Any:
        """(B, L, dim) → the same, and attention's other results; `inputs`: (B, L, P), and those of
        attention."""
        assert self.attention and self.attention_norm and self.attention_post_norm
        attended = self.attention(self.attention_norm(x_BLD), rope, attention, *inputs[1:])
        out_BLD, *given = attended if isinstance(attended, tuple) else (attended,)
        x_BLD = self._add(x_BLD, self.attention_post_norm(out_BLD))
        x_BLD = self._add(x_BLD, self._feed_forward(x_BLD, attention))
        out_BLD = self.own["norm"](self.own["out"](gelu_tanh(self.own["gate"](x_BLD)) * inputs[0]))
        return self._add(x_BLD, out_BLD) * self.layer_scalar.type_as(x_BLD), *given


class ParallelBlock(PreNormBlock):
    """Both parts take the same normalized residual stream, and are added together (GPT-J, Cohere).
    With `separate_norms`, each has its own norm (GPT-NeoX)."""

    def __init__(self, *parts: nn.Module, separate_norms: bool = False, **options: Any):
        super().__init__(*parts, **options)
        if not separate_norms:
            self.ffn_norm = None

    def forward(self, x_BLD: Tensor, rope: Rope, attention: AttentionMetadata) -> Tensor:
        """(B, L, dim) → (B, L, dim)."""
        assert self.attention and self.attention_norm
        normalized_BLD = self.attention_norm(x_BLD)
        attended_BLD = self.attention(normalized_BLD, rope, attention)
        inputs_BLD = normalized_BLD if self.ffn_norm is None else self.ffn_norm(x_BLD)
        return self._add(x_BLD, attended_BLD + self._mix(inputs_BLD, attention))
