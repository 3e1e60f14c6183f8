"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, 2.1): keys and values of all heads come from one short
vector per token, the latent, which is all that caches and other ranks need.

R is the width of a latent, P of the part of a head that has positions.
"""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan.models.common.attention import Attention
from torchtitan.models.common.feed_forward import make_linear
from torchtitan.models.common.norms import RMSNorm
from torchtitan.models.common.rope import apply_rope
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.protocols.model import effective_weight

_NORM_EPS = 1e-6  # of the published models, whatever the other norms have


class LatentScores(nn.Module):
    """Attention of queries to latents. Context parallelism gathers its inputs, and generation stores them."""

    def __init__(self, *, n_heads: int, plain_dim: int, latent_dim: int, v_dim: int, scale: float, init_std: float):
        super().__init__()
        self.plain_dim, self.v_dim = plain_dim, v_dim
        self.wkv_b = make_linear(latent_dim, n_heads * (plain_dim + v_dim), init_std)
        self.scores = Attention(scale=scale)

    def forward(self, q_BLHD: Tensor, latent_BS1R: Tensor, k_BS1P: Tensor, attention: AttentionMetadata) -> Tensor:
        """Return (B, L, H, v_dim). `k_BS1P` is the part of the keys with positions, the same for all heads."""
        if attention.states is not None and q_BLHD.shape[1] < latent_BS1R.shape[1]:
            return self._attend_absorbed(q_BLHD, latent_BS1R, k_BS1P, attention)
        kv_BSHE = self.wkv_b(latent_BS1R[:, :, 0]).unflatten(-1, (-1, self.plain_dim + self.v_dim))
        plain_BSHD, v_BSHD = kv_BSHE.split([self.plain_dim, self.v_dim], dim=-1)
        k_BSHD = torch.cat((plain_BSHD, k_BS1P.expand(-1, -1, plain_BSHD.shape[2], -1)), dim=-1)
        return self.scores(q_BLHD, k_BSHD, v_BSHD, attention)

    def _attend_absorbed(
        self, q_BLHD: Tensor, latent_BS1R: Tensor, k_BS1P: Tensor, attention: AttentionMetadata
    ) -> Tensor:
        """Multiply the few new queries, instead of all cached latents, by the weights of keys, and the result by those
        of values: the latents are then the keys and values of all heads."""
        weight = effective_weight(self.wkv_b)
        weight = weight.to_local() if isinstance(weight, DTensor) else weight
        weight_HER = weight.to(q_BLHD.dtype).unflatten(0, (-1, self.plain_dim + self.v_dim))
        of_keys, of_values = weight_HER.split([self.plain_dim, self.v_dim], dim=1)
        plain_BLHD, q_BLHP = q_BLHD.split([self.plain_dim, k_BS1P.shape[-1]], dim=-1)
        q_BLHR = torch.einsum("blhd,hdr->blhr", plain_BLHD, of_keys)
        keys = torch.cat((latent_BS1R, k_BS1P), dim=-1)
        out_BLHR = self.scores(torch.cat((q_BLHR, q_BLHP), dim=-1), keys, latent_BS1R, attention)
        return torch.einsum("blhr,hdr->blhd", out_BLHR, of_values)


class LatentAttention(nn.Module):
    """Causal self-attention to latents. The first elements of a head have no positions; the last `rope_dim` have, and
    their keys are shared by all heads.

    Args:
        head_dim: width of a head's queries and keys.
        v_dim: width of a head's values.
        q_latent_dim: width of the latent of queries; None: they come from the hidden states.
        latent_dim: width of the latent of keys and values.
        interleaved: RoPE rotates neighboring pairs of elements, not i with i + rope_dim / 2.
        bias: of the projections to latents, and of the output.
        scale: factor of scores.
    """

    def __init__(
        self,
        *,
        dim: int,
        n_heads: int,
        head_dim: int,
        v_dim: int,
        rope_dim: int,
        q_latent_dim: int | None,
        latent_dim: int,
        interleaved: bool,
        bias: bool,
        scale: float,
        init_std: float,
        out_init_std: float,
    ):
        super().__init__()
        self.head_dim, self.rope_dim, self.interleaved = head_dim, rope_dim, interleaved
        q_width, has_latent = n_heads * head_dim, q_latent_dim is not None
        self.wq = None if has_latent else make_linear(dim, q_width, init_std)
        self.wq_a = make_linear(dim, q_latent_dim, init_std, bias=bias) if q_latent_dim else None
        self.q_norm = RMSNorm(q_latent_dim, _NORM_EPS) if q_latent_dim else None
        self.wq_b = make_linear(q_latent_dim, q_width, init_std) if q_latent_dim else None
        self.wkv_a = make_linear(dim, latent_dim + rope_dim, init_std, bias=bias)
        self.kv_norm = RMSNorm(latent_dim, _NORM_EPS)
        self.latents = nn.Identity()
        """Tensor parallelism gathers its input, the latents of each rank's tokens."""
        self.attend = LatentScores(
            n_heads=n_heads,
            plain_dim=head_dim - rope_dim,
            latent_dim=latent_dim,
            v_dim=v_dim,
            scale=scale,
            init_std=init_std,
        )
        self.wo = make_linear(n_heads * v_dim, dim, out_init_std, bias=bias)

    def forward(self, x_BLD: Tensor, rope: tuple[Tensor, Tensor], attention: AttentionMetadata) -> Tensor:
        """(B, L, dim) → (B, L, dim)."""
        if self.wq is not None:
            q_BLE = self.wq(x_BLD)
        else:
            assert self.wq_a is not None and self.q_norm is not None and self.wq_b is not None
            q_BLE = self.wq_b(self.q_norm(self.wq_a(x_BLD)))
        latent_BLR, k_BLP = self.wkv_a(x_BLD).split([self.kv_norm.weight.shape[0], self.rope_dim], dim=-1)
        latents_BL1E = self.latents(torch.cat((self.kv_norm(latent_BLR), k_BLP), dim=-1))[:, :, None]
        latent_BL1R, k_BL1P = latents_BL1E.split([latent_BLR.shape[-1], self.rope_dim], dim=-1)
        # -1, because a rank holds only some of the heads under tensor parallelism.
        plain_BLHD, q_BLHP = q_BLE.unflatten(-1, (-1, self.head_dim)).split(
            [self.head_dim - self.rope_dim, self.rope_dim], dim=-1
        )
        q_BLHD = torch.cat((plain_BLHD, self._rotate(q_BLHP, rope)), dim=-1)
        return self.wo(self.attend(q_BLHD, latent_BL1R, self._rotate(k_BL1P, rope), attention).flatten(-2))

    def _rotate(self, x_BLHP: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        if self.interleaved:  # the order of the result does not matter: it is that of queries and keys
            x_BLHP = x_BLHP.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return apply_rope(x_BLHP, rope)
