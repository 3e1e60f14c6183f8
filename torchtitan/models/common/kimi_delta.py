"""Kimi Delta Attention (arXiv:2510.26692, section 4): gated delta nets in which each element of a
head's keys has its own decay."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.models.common.delta_net import DELTA_NET, GatedDeltaNet
from torchtitan.models.common.feed_forward import make_linear
from torchtitan.models.common.hugging_face import module_rows
from torchtitan.models.common.mixers import MixerKind
from torchtitan.protocols.initializer import LogUniform, Uniform, with_initializers
from torchtitan.protocols.sharding import with_features
from torchtitan.protocols.state_dict_adapter import Concatenated, KeyMapping, Unsqueezed


class KimiDeltaNet(GatedDeltaNet):
    """A gated delta net with a decay per element, which a projection with a bottleneck of a head's
    width computes, as it does the gates.

    Args:
        n_heads: heads of queries, keys and values.
        head_dim: width of each.
    """

    gate = staticmethod(torch.sigmoid)
    recurrence = "Kimi delta attention"

    def __init__(self, *, dim: int, n_heads: int, head_dim: int, init_std: float, **options: Any):
        sizes = {
            "num_key_heads": n_heads,
            "num_value_heads": n_heads,
            "key_head_dim": head_dim,
            "value_head_dim": head_dim,
        }
        super().__init__(dim=dim, init_std=init_std, **sizes, **options)
        self.in_a, self.in_z = (
            nn.Sequential(
                make_linear(dim, head_dim, init_std),
                make_linear(head_dim, n_heads * head_dim, init_std),
            )
            for _ in range(2)
        )
        self.dt_bias = nn.Parameter(torch.empty(n_heads * head_dim))
        # steps from 0.001 to 0.1, as in Mamba 2
        steps = Uniform(math.log(0.001), math.log(0.1))
        with_initializers(self, A_log=LogUniform(1.0, 16.0), dt_bias=steps)
        with_features(self, dt_bias=("out",))

    def decays(self, decay_BLJ: Tensor) -> Tensor:
        steps_BLJ = F.softplus(decay_BLJ + self.own(self.dt_bias))
        return self.rates(decay_BLJ)[:, None] * steps_BLJ.unflatten(-1, (-1, self.key_head_dim))


def _kimi_delta_net(decoder: Any, index: int) -> KimiDeltaNet:
    config = decoder.config
    return KimiDeltaNet(
        dim=config.dim,
        n_heads=config.linear_num_heads,
        head_dim=config.linear_head_dim,
        conv_kernel_dim=config.linear_conv_kernel_dim,
        norm_eps=config.norm_eps,
        **decoder.init_stds(index),
    )


def _state_flops(decoder: Any, index: int, seq_len: int) -> float:
    """As of a gated delta net."""
    return 6 * decoder.config.linear_num_heads * decoder.config.linear_head_dim**2


_BOTTLENECKS = {
    f"in_{name}.{place}": ("whole", "columns")[place] for name in "az" for place in (0, 1)
}

KIMI_DELTA = MixerKind(
    make=_kimi_delta_net,
    score_flops=_state_flops,
    tensor={
        **{name: kind for name, kind in DELTA_NET.tensor.items() if name not in ("in_a", "in_z")},
        **_BOTTLENECKS,
    },
    heads=("linear_num_heads",),
)

_OURS, _THEIRS = "layers.*.attention", "model.layers.*.self_attn"
_SHARED = {
    "in_q": "q_proj",
    "in_k": "k_proj",
    "in_v": "v_proj",
    "in_b": "b_proj",
    "in_z.0": "g_a_proj",
    "in_z.1": "g_b_proj",
    "norm": "o_norm",
    "out": "o_proj",
}
_DECAYS = {"in_a.0": "f_a_proj", "in_a.1": "f_b_proj"}


def _decay_rows(theirs: str) -> tuple[KeyMapping, ...]:
    return (
        *module_rows(_OURS, theirs, _DECAYS),
        KeyMapping(f"{_OURS}.dt_bias", f"{theirs}.dt_bias"),
        KeyMapping(f"{_OURS}.A_log", f"{theirs}.A_log", Unsqueezed(before=2, after=1)),
    )


KIMI_DELTA_ROWS = (
    *module_rows(_OURS, _THEIRS, _SHARED),
    *_decay_rows(_THEIRS),
    *module_rows(_OURS, _THEIRS, {f"conv_{name}": f"{name}_conv1d" for name in "qkv"}),
)
"""Names of the weights in Hugging Face's format."""

KIMI_DELTA_CLASS_ROWS = (
    *_decay_rows(f"{_THEIRS}.forget_gate"),
    KeyMapping(
        tuple(f"{_OURS}.conv_{name}.weight" for name in "qkv"),
        f"{_THEIRS}.conv1d.weight",
        Concatenated(0),
    ),
)
"""Rows in which the class of transformers differs."""
