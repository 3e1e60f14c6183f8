"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, 2.1): keys and values of all heads
come from one short vector per token, the latent of width R, which is all that caches and other
ranks need."""

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from torchtitan.models.common.attention import Attention
from torchtitan.models.common.attention_scores import reason_not_to_scale, rows_of
from torchtitan.models.common.blocks import Rope
from torchtitan.models.common.config_reader import ConfigReader
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.feed_forward import make_linear
from torchtitan.models.common.hugging_face import module_rows
from torchtitan.models.common.mixers import MixerKind
from torchtitan.models.common.norms import RMSNorm
from torchtitan.models.common.rope import apply_rope
from torchtitan.protocols.attention import AttentionMetadata, ScaledScores
from torchtitan.tools.errors import require


class LatentScores(nn.Module):
    """Attention of queries to latents, which context parallelism gathers and generation stores."""

    def __init__(
        self, config: Decoder.Config, rank: int, v_dim: int, scores: Attention, init_std: float
    ):
        super().__init__()
        head_dim, self.v_dim = config.resolved_head_dim, v_dim
        self.plain_dim = head_dim - config.rope.rotated_dim(head_dim)
        self.wkv_b = make_linear(rank, config.n_heads * (self.plain_dim + v_dim), init_std)
        self.scores = scores

    def forward(
        self, q_BLHD: Tensor, latent_BS1R: Tensor, k_BS1P: Tensor, attention: AttentionMetadata
    ) -> Tensor:
        """Return (B, L, H, v_dim). `k_BS1P` is the part of the keys with positions, the same for
        all heads."""
        kv_BSHE = self.wkv_b(latent_BS1R[:, :, 0]).unflatten(-1, (-1, self.plain_dim + self.v_dim))
        plain_BSHD, v_BSHD = kv_BSHE.split([self.plain_dim, self.v_dim], dim=-1)
        k_BSHD = torch.cat((plain_BSHD, k_BS1P.expand(-1, -1, plain_BSHD.shape[2], -1)), dim=-1)
        return self.scores(q_BLHD, k_BSHD, v_BSHD, attention)


class LatentAttention(ScaledScores):
    """Causal self-attention to latents of width `rank`; queries have latents of width `q_rank`, or
    none. Only the last P elements of a head have positions, and all heads share their keys.
    `scores` computes their products. `interleaved`: RoPE rotates neighbors."""

    def __init__(
        self,
        config: Decoder.Config,
        *,
        q_rank: int | None,
        rank: int,
        v_dim: int,
        scores: Attention,
        interleaved: bool,
        **stds: float,
    ):
        super().__init__()
        # in the published models, independent of their other norms
        norm = partial(RMSNorm, eps=1e-6)
        dim = config.dim
        bias = config.attention_bias
        init_std = stds["init_std"]
        self.head_dim, self.interleaved = config.resolved_head_dim, interleaved
        self.widths = [rank, config.rope.rotated_dim(self.head_dim)]
        wq = make_linear(q_rank or dim, config.n_heads * self.head_dim, init_std)
        down = [make_linear(dim, q_rank, init_std, bias=bias), norm(q_rank)] if q_rank else []
        self.wq = None if q_rank else wq
        self.q_latent = nn.Sequential(*down, wq) if q_rank else None
        self.wkv_a = make_linear(dim, sum(self.widths), init_std, bias=bias)
        self.kv_norm = norm(rank)
        # tensor parallelism gathers its input, the latents of each rank's tokens
        self.latents = nn.Identity()
        # of sparse attention
        self.indexer: nn.Module | None = None
        self.indexes: nn.Module | None = None
        self.attend = self.make_scores(config, rank, v_dim, scores, init_std)
        self.wo = make_linear(config.n_heads * v_dim, dim, stds["out_init_std"], bias=bias)

    def make_scores(
        self, config: Decoder.Config, rank: int, v_dim: int, scores: Attention, init_std: float
    ) -> LatentScores:
        """Return the part that computes scores, and their products with values."""
        return LatentScores(config, rank, v_dim, scores, init_std)

    def forward(self, x_BLD: Tensor, rope: Rope, attention: AttentionMetadata) -> Tensor:
        """(B, L, dim) → (B, L, dim). Without `rope`, no part of a head is rotated."""
        keys = self.keys(x_BLD, rope)
        project = self.wq or self.q_latent
        assert project is not None
        q_BLHD = self.queries(project(x_BLD), rope)
        return self.wo(self.attend(q_BLHD, *keys, attention).flatten(-2))

    def keys(self, x_BLD: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Return latents (B, L, 1, R), and the part of the keys with positions (B, L, 1, P)."""
        latent_BLR, k_BLP = self.wkv_a(x_BLD).split(self.widths, dim=-1)
        latents_BLE = self.latents(torch.cat((self.kv_norm(latent_BLR), k_BLP), dim=-1))
        latent_BL1R, k_BL1P = latents_BLE[:, :, None].split(self.widths, dim=-1)
        return latent_BL1R, self._rotate(k_BL1P, rope)

    def queries(self, q_BLE: Tensor, rope: Rope) -> Tensor:
        """Return the queries of each head, (B, L, H, head_dim)."""
        q_BLHD = q_BLE.unflatten(-1, (-1, self.head_dim))
        plain_BLHE, q_BLHP = q_BLHD.tensor_split([-self.widths[1]], dim=-1)
        return torch.cat((plain_BLHE, self._rotate(q_BLHP, rope)), dim=-1)

    @property
    def scores(self) -> Attention:
        return self.attend.scores

    @property
    def n_heads(self) -> int:
        return self._q_up.out_features // self.head_dim

    @property
    def _q_up(self) -> nn.Linear:
        up = self.wq if self.q_latent is None else self.q_latent[-1]
        assert isinstance(up, nn.Linear)
        return up

    def reason_not_to_scale(self) -> str:
        return reason_not_to_scale(self._q_up, self.attend.wkv_b)

    def rows_of_scores(self, factor_H: Tensor) -> list[tuple[Tensor, Tensor]]:
        # All heads share the keys with positions, so queries alone scale these products.
        factor_H1, root_H1 = factor_H[:, None], factor_H.sqrt()[:, None]
        plain_dim, v_dim = self.attend.plain_dim, self.attend.v_dim
        plain_HE = root_H1.expand(-1, plain_dim)
        q_HD = torch.cat((plain_HE, factor_H1.expand(-1, self.widths[1])), dim=1)
        kv_HE = torch.cat((plain_HE, torch.ones_like(factor_H1).expand(-1, v_dim)), dim=1)
        return [*rows_of(self._q_up, q_HD.flatten()), *rows_of(self.attend.wkv_b, kv_HE.flatten())]

    def _rotate(self, x_BLHP: Tensor, rope: Rope) -> Tensor:
        if rope is None:
            return x_BLHP
        if self.interleaved:  # the result keeps the new order, the same in queries and keys
            x_BLHP = x_BLHP.unflatten(-1, (-1, 2)).mT.flatten(-2)
        return apply_rope(x_BLHP, rope)


class LatentDecoder:
    """A mixin before a decoder's class, with latent attention; so is its `Config`, before the
    decoder's."""

    class Config:
        __slots__ = ()

        q_lora_rank: int | None
        kv_lora_rank: int
        v_head_dim: int

        def validate(self) -> None:
            cast(Decoder.Config, super()).validate()
            decoder = cast(Decoder.Config, self)
            decoder.check_positive("q_lora_rank", "kv_lora_rank", "v_head_dim")
            most, n_heads = decoder.resolved_head_dim, decoder.n_heads
            must = f"at most the head width {most}"
            require(self.v_head_dim <= most, "--model.v_head_dim", self.v_head_dim, must)
            must, n_kv_heads = f"equal to --model.n_heads {n_heads}", decoder.n_kv_heads
            require(n_kv_heads == n_heads, "--model.n_kv_heads", n_kv_heads, must)

    config: Config

    def make_attention(
        self, index: int, *, kind: type[nn.Module] = LatentAttention, **options: Any
    ) -> nn.Module:
        config, decoder = self.config, cast(Decoder, self)
        own = {
            "q_rank": config.q_lora_rank,
            "rank": config.kv_lora_rank,
            "v_dim": config.v_head_dim,
            "scores": self.make_scores(self.score_scale()),
            **decoder.init_stds(index),
        }
        return kind(config, **{**own, **options})

    def make_scores(self, scale: float) -> Attention:
        """Return the attention of one layer, without its projections."""
        return Attention(scale=scale)

    def score_scale(self) -> float:
        """Return the factor of query-key products."""
        return float(cast(Decoder, self).config.resolved_head_dim ** -0.5)


def latent_score_flops(decoder: Decoder, index: int, seq_len: int) -> float:
    """Return the operations per token of a layer's products of queries, keys and values."""
    config = decoder.config
    assert isinstance(config, LatentDecoder.Config)
    relative = (1 + config.v_head_dim / config.resolved_head_dim) / 2
    return Decoder.score_flops(decoder, index, seq_len) * relative


LATENT_ATTENTION = MixerKind(
    make=lambda decoder, index: decoder.make_attention(index),
    score_flops=latent_score_flops,
    tensor={
        **dict.fromkeys(("q_latent.0", "q_latent.1", "wkv_a", "kv_norm"), "whole"),
        **dict.fromkeys(("wq", "q_latent.2"), "columns"),
        **{"latents": "whole to shared", "attend.wkv_b": "shared to columns", "wo": "rows"},
    },
)
"""For hybrid decoders, whose mixers get the whole sequence."""

_NAMES = {
    **{"q_latent.0": "q_a_proj", "q_latent.1": "q_a_layernorm", "q_latent.2": "q_b_proj"},
    **{"wkv_a": "kv_a_proj_with_mqa", "kv_norm": "kv_a_layernorm", "attend.wkv_b": "kv_b_proj"},
}

LATENT_ROWS = module_rows("layers.*.attention", "model.layers.*.self_attn", _NAMES)
"""Names of the weights of latent attention in Hugging Face's format, without `wq` and `wo`."""


def with_widths(document: dict[str, object], plain: int) -> dict[str, object]:
    """Return a config.json with the width of whole heads, by default `plain` elements and 64
    rotated ones, and its rotated part."""
    reader = ConfigReader(
        "config.json", {"qk_nope_head_dim": plain, "qk_rope_head_dim": 64, **document}
    )
    plain, rotated = (reader.whole_number(f"qk_{part}_head_dim") for part in ("nope", "rope"))
    return {
        **document,
        "head_dim": plain + rotated,
        "partial_rotary_factor": rotated / (plain + rotated),
    }


def widths_of(config: Decoder.Config) -> dict[str, int]:
    """Return the widths of a head's parts with and without positions."""
    rotated = config.rope.rotated_dim(config.resolved_head_dim)
    return {"qk_rope_head_dim": rotated, "qk_nope_head_dim": config.resolved_head_dim - rotated}
