"""Llama 3 ("The Llama 3 Herd of Models", arXiv:2407.21783)."""

from torch import Tensor, nn

from torchtitan.models.common.attention import AttentionMask, GroupedQueryAttention
from torchtitan.models.common.decoder import Decoder, depth_scaled_std
from torchtitan.models.common.feed_forward import SwiGLU
from torchtitan.models.common.norm import RMSNorm

_INIT_STD = 0.02


class Llama3Block(nn.Module):
    """Attention and feed-forward, each normalised before and added to the residual stream."""

    def __init__(self, config: Decoder.Config, index: int):
        super().__init__()
        std = depth_scaled_std(index, _INIT_STD)
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = GroupedQueryAttention(
            dim=config.dim,
            n_heads=config.n_heads,
            n_kv_heads=config.n_kv_heads,
            head_dim=config.resolved_head_dim,
            init_std=_INIT_STD,
            out_init_std=std,
        )
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = SwiGLU(dim=config.dim, hidden_dim=config.ffn_dim, init_std=_INIT_STD, out_init_std=std)

    def forward(self, x_BLD: Tensor, rope: tuple[Tensor, Tensor], mask: AttentionMask) -> Tensor:
        """(B, L, dim) → (B, L, dim)."""
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), rope, mask)
        return x_BLD + self.feed_forward(self.ffn_norm(x_BLD))


class Llama3Model(Decoder):
    """Llama 3, 3.1 and 3.2: they differ in sizes, tying and RoPE scaling alone."""

    def make_block(self, index: int) -> nn.Module:
        """A `Llama3Block`."""
        return Llama3Block(self.config, index)
