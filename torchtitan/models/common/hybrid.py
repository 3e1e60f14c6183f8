"""Decoders with gated delta nets in some layers, and attention in the others."""

from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.delta_net import GatedDeltaNet
from torchtitan.protocols.state_dict_adapter import KeyMapping
from torchtitan.tools.errors import UserError

_SIZES = (
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    "linear_conv_kernel_dim",
)

DELTA_NET_KEYS = {name: name for name in ("layer_types", *_SIZES)}
"""`ModelType.keys` of gated delta nets."""

_NAMES = {
    **{f"in_{name}.weight": f"in_proj_{name}.weight" for name in ("qkv", "z", "a", "b")},
    **{"conv.weight": "conv1d.weight", "norm.weight": "norm.weight", "out.weight": "out_proj.weight"},
    **{"A_log": "A_log", "dt_bias": "dt_bias"},
}

DELTA_NET_ROWS = tuple(
    KeyMapping(f"layers.*.attention.{ours}", f"model.layers.*.linear_attn.{theirs}") for ours, theirs in _NAMES.items()
)
"""Names of the weights of gated delta nets. No layer has tensors of both these rows and attention's rows."""


class HybridDecoder(Decoder):
    """A decoder whose layers of type linear_attention are gated delta nets."""

    @dataclass(kw_only=True, slots=True)
    class Config(Decoder.Config):
        layer_types: list[Literal["linear_attention", "full_attention"]] = field(
            default_factory=lambda: ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
        )
        """Types of the first layers, repeated for the others."""

        linear_num_key_heads: int = 16
        """Heads of queries and keys in gated delta nets; divides linear_num_value_heads."""

        linear_num_value_heads: int = 32
        """Heads of values in gated delta nets, each with a state."""

        linear_key_head_dim: int = 128
        """Width of a query or key in gated delta nets."""

        linear_value_head_dim: int = 128
        """Width of a value in gated delta nets."""

        linear_conv_kernel_dim: int = 4
        """Tokens that the convolution of a gated delta net sees, including the own one."""

        def is_linear(self, index: int) -> bool:
            """Return whether a layer is a gated delta net."""
            return self.layer_types[index % len(self.layer_types)] == "linear_attention"

        def unsupported_parallelisms(self) -> dict[str, str]:
            has_net = any(self.is_linear(index) for index in range(self.n_layers))
            return GatedDeltaNet.unsupported_parallelisms if has_net else {}

        def validate(self) -> None:
            Decoder.Config.validate(self)
            if not self.layer_types:
                raise UserError("--model.layer_types is empty, but must name at least one type")
            for name in _SIZES:
                if not 1 <= getattr(self, name) <= 2**16:
                    raise UserError(f"--model.{name} is {getattr(self, name)}, but must be from 1 to {2**16}")
            if self.linear_num_value_heads % self.linear_num_key_heads:
                raise UserError(
                    f"--model.linear_num_key_heads {self.linear_num_key_heads} must divide "
                    f"--model.linear_num_value_heads {self.linear_num_value_heads}"
                )

    config: Config

    def make_attention(self, index: int, **options: Any) -> nn.Module:
        config = self.config
        if not config.is_linear(index):
            return super().make_attention(index, **options)
        return GatedDeltaNet(
            dim=config.dim,
            n_key_heads=config.linear_num_key_heads,
            n_value_heads=config.linear_num_value_heads,
            key_head_dim=config.linear_key_head_dim,
            value_head_dim=config.linear_value_head_dim,
            conv_width=config.linear_conv_kernel_dim,
            norm_eps=config.norm_eps,
            **self.init_stds(index),
        )

    def score_flops(self, index: int, seq_len: int) -> float:
        """A gated delta net multiplies a key and a query with each state, and adds the product of a key and a value to
        it (arXiv:2412.06464, equation 10): 2 operations each per element. The chunked computation needs more."""
        config = self.config
        if not config.is_linear(index):
            return super().score_flops(index, seq_len)
        return 6 * config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
