"""The transformer block of dense decoders, and how tensor and context parallelism split it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from torchtitan.models.common.attention import AttentionMask, GroupedQueryAttention
from torchtitan.models.common.layers import RMSNorm, SwiGLU
from torchtitan.protocols.sharding import ShardingPlan

if TYPE_CHECKING:
    from torchtitan.models.common.decoder import Decoder

_INIT_STD = 0.02

DENSE_SHARDING = ShardingPlan(
    tensor={
        "tok_embeddings": "vocabulary",
        "layers.*.attention_norm": "sequence",
        "layers.*.attention": "whole sequence",
        "layers.*.attention.wq": "columns",
        "layers.*.attention.wk": "columns",
        "layers.*.attention.wv": "columns",
        "layers.*.attention.q_norm": "heads",
        "layers.*.attention.k_norm": "heads",
        "layers.*.attention.wo": "rows",
        "layers.*.ffn_norm": "sequence",
        "layers.*.feed_forward": "whole sequence",
        "layers.*.feed_forward.w1": "columns",
        "layers.*.feed_forward.w3": "columns",
        "layers.*.feed_forward.w2": "rows",
        "norm": "sequence",
        "output": "columns",
    },
    attention="layers.*.attention.attend",
    mask="mask",
)
"""The plan for every `Decoder` of `TransformerBlock`s; the parts that a model leaves out are None in it."""


@dataclass(frozen=True, kw_only=True)
class BlockDesign:
    """Differences of a family's blocks from Llama's; the sizes are in `Decoder.Config`."""

    qk_norm: bool = False
    """Normalize each head of queries and keys by its root mean square before RoPE, with weights that all heads of a
    layer share."""


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each normalized before and added to the residual stream."""

    def __init__(self, config: "Decoder.Config", index: int, design: BlockDesign):
        super().__init__()
        std = depth_scaled_std(index, _INIT_STD)
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = GroupedQueryAttention(
            dim=config.dim,
            n_heads=config.n_heads,
            n_kv_heads=config.n_kv_heads,
            head_dim=config.resolved_head_dim,
            qk_norm_eps=config.norm_eps if design.qk_norm else None,
            init_std=_INIT_STD,
            out_init_std=std,
        )
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = SwiGLU(dim=config.dim, hidden_dim=config.ffn_dim, init_std=_INIT_STD, out_init_std=std)

    def forward(self, x_BLD: Tensor, rope: tuple[Tensor, Tensor], mask: AttentionMask) -> Tensor:
        """(B, L, dim) → (B, L, dim)."""
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), rope, mask)
        return x_BLD + self.feed_forward(self.ffn_norm(x_BLD))


def depth_scaled_std(index: int, base: float = 0.02) -> float:
    """Standard deviation of the initial projections that write to the residual stream in layer `index` (from 0):
    `base / sqrt(2 (index + 1))`, so that the stream's variance grows slowly with depth (after GPT-2's 1 / sqrt(N))."""
    return base / (2 * (index + 1)) ** 0.5
