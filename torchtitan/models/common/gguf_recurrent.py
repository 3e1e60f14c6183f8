"""Layers with a recurrence in GGUF: Mamba 2 and gated delta nets, whose names begin with ssm_."""

from dataclasses import dataclass

from torch import Tensor

from torchtitan.models.common.delta_net import DeltaNetDecoder
from torchtitan.models.common.gguf import check_eps, require_gguf
from torchtitan.models.common.gguf_rows import Chain, NegatedExp, OneWay
from torchtitan.models.common.hugging_face import module_rows
from torchtitan.models.common.mamba import MambaDecoder
from torchtitan.models.common.mixers import HybridDecoder
from torchtitan.models.common.moe.decoder import ExpertLayers
from torchtitan.protocols.state_dict_adapter import (
    Columns,
    Concatenated,
    KeyMapping,
    Permuted,
    Transform,
    Unsqueezed,
)

_OURS = "layers.*.attention"

COLUMN = Unsqueezed(before=0, after=1)
"""A vector as a matrix with one column."""

_CHANNELS = Permuted((0, 1, 2), joined=0)
"""Weights of a convolution of single channels, without its dimension of size 1."""


def fused(parts: str | tuple[str, ...], name: str, *steps: Transform) -> KeyMapping:
    """Return the row of the tensor `blk.*.NAME` for some tensors of a mixer, one after the other,
    after further `steps`."""
    internal = tuple(f"{_OURS}.{part}" for part in parts)
    return KeyMapping(internal, f"blk.*.{name}", Chain(steps))


def single(part: str, name: str, *steps: Transform) -> KeyMapping:
    """Return the row of the tensor `blk.*.NAME` for one of a mixer."""
    return KeyMapping(f"{_OURS}.{part}", f"blk.*.{name}", Chain(steps))


@dataclass(frozen=True)
class TiledValues(OneWay):
    """The rows of value heads, the last of some tensors: first the first value head of each key
    head, then the second of each, and so on, since ggml repeats keys so."""

    n_key_heads: int
    n_value_heads: int

    def to_external(self, tensors: list[Tensor]) -> list[Tensor]:
        *others, values = tensors
        heads = values.unflatten(0, (self.n_key_heads, self.n_value_heads // self.n_key_heads, -1))
        return [*others, heads.transpose(0, 1).flatten(0, 2)]


def delta_net_rows(values: Transform) -> tuple[KeyMapping, ...]:
    """Return the rows of gated delta nets without decays and betas. `values`: places of the value
    heads."""
    inputs, convs = (tuple(f"{kind}_{name}.weight" for name in "qkv") for kind in ("in", "conv"))
    return (
        fused(inputs, "attn_qkv.weight", values, Concatenated(0)),
        fused(convs, "ssm_conv1d.weight", values, Concatenated(0), _CHANNELS),
        single("in_z.weight", "attn_gate.weight", values),
        single("A_log", "ssm_a", values, NegatedExp()),
        single("dt_bias", "ssm_dt.bias", values),
        single("norm.weight", "ssm_norm.weight"),
        single("out.weight", "ssm_out.weight", Columns(values)),
    )


def delta_net_keys(config: DeltaNetDecoder.Config) -> dict[str, object]:
    """Return the metadata of gated delta nets, and of the layers that have them."""
    check_eps(config)
    if isinstance(config, ExpertLayers.Config):
        width = config.moe.shared_ffn_dim
        require_gguf(width is not None, "moe.shared_ffn_dim", None, "an expert for every token")
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    must = f"--model.linear_key_head_dim {key_dim}"
    require_gguf(value_dim == key_dim, "linear_value_head_dim", value_dim, must)
    return {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": key_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": value_dim * config.linear_num_value_heads,
        **_interval(is_recurrent(config)),
    }


def is_recurrent(config: HybridDecoder.Config) -> list[bool]:
    """Return whether each layer has a recurrence. Raise `UserError` for a model without both kinds
    of layers."""
    types = [config.type_of(index) for index in range(config.n_layers)]
    fits = {"linear_attention", "full_attention"} <= {*types}
    require_gguf(fits, "layer_types", config.layer_types, "linear_attention and full_attention")
    return [kind == "linear_attention" for kind in types]


def _interval(recurrent: list[bool]) -> dict[str, object]:
    interval = recurrent.index(False) + 1
    if recurrent == [(index + 1) % interval > 0 for index in range(len(recurrent))]:
        return {"full_attention_interval": interval}
    return {"attention.recurrent_layers": recurrent}


@dataclass(frozen=True)
class _Groups(OneWay):
    """A vector as a matrix with a row for each group."""

    count: int

    def to_external(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensors[0].unflatten(0, (self.count, -1))]


def gguf_mamba_rows(config: MambaDecoder.Config) -> tuple[KeyMapping, ...]:
    """Return the rows of Mamba 2."""
    convs = ("conv_x", "conv_b", "conv_c")
    return (
        fused(
            tuple(f"in_{name}.weight" for name in ("z", "x", "b", "c", "dt")),
            "ssm_in.weight",
            Concatenated(0),
        ),
        fused(
            tuple(f"{conv}.weight" for conv in convs),
            "ssm_conv1d.weight",
            Concatenated(0),
            _CHANNELS,
        ),
        fused(tuple(f"{conv}.bias" for conv in convs), "ssm_conv1d.bias", Concatenated(0)),
        single("A_log", "ssm_a", NegatedExp(), COLUMN),
        single("D", "ssm_d", COLUMN),
        single("dt_bias", "ssm_dt.bias"),
        single("norm.weight", "ssm_norm.weight", _Groups(config.mamba.n_groups)),
        *module_rows(_OURS, "blk.*", {"out": "ssm_out"}),
    )


def mamba_keys(config: MambaDecoder.Config) -> dict[str, object]:
    """Return the metadata of Mamba 2. Raise `UserError` for biases that llama.cpp lacks, or
    needs."""
    mamba = config.mamba
    require_gguf(not mamba.bias, "mamba.bias", True, "False")
    require_gguf(mamba.conv_bias, "mamba.conv_bias", False, "True")
    return {
        "ssm.conv_kernel": mamba.conv_width,
        "ssm.inner_size": mamba.dim,
        "ssm.state_size": mamba.state_dim,
        "ssm.time_step_rank": mamba.n_heads,
        "ssm.group_count": mamba.n_groups,
    }
