"""OLMo Hybrid's model and its Hugging Face format."""

from dataclasses import dataclass, replace
from typing import Any, Unpack

from torch import nn

from torchtitan.models.common.attention import AttentionOptions
from torchtitan.models.common.blocks import PostNormBlock, PreNormBlock
from torchtitan.models.common.config_reader import ConfigReader
from torchtitan.models.common.delta_net import (
    DELTA_NET,
    DELTA_NET_KEYS,
    DeltaNetDecoder,
    fused_row,
)
from torchtitan.models.common.hugging_face import ModelType, dense_format, dense_rows
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.protocols.state_dict_adapter import KeyMapping

_NORM_EPS = 1e-5
"""Of the norms in delta nets, in all models."""


class OlmoHybridModel(DeltaNetDecoder):
    """Gated delta nets in blocks with norms before each part, and attention in blocks with norms
    after each part and over all queries and all keys of a token."""

    @dataclass(kw_only=True, slots=True)
    class Config(DeltaNetDecoder.Config):
        linear_allow_neg_eigval: bool = True
        """A token of a gated delta net may reverse the value that the state returns for its key,
        not only replace it."""

        has_positions: bool = False
        """Rotate queries and keys of attention (`rope`). False: only delta nets know the order of
        tokens."""

    config: Config

    def make_block(self, index: int, **options: Any) -> nn.Module:
        has_net = self.config.mixer_of(index) is DELTA_NET
        return super().make_block(index, kind=PreNormBlock if has_net else PostNormBlock, **options)

    def make_attention(self, index: int, **options: Unpack[AttentionOptions]) -> nn.Module:
        options.setdefault("qk_wide_norm", self.make_norm)
        return super().make_attention(index, **options)

    def make_delta_net(self, index: int, **options: Any) -> nn.Module:
        largest_beta = 2.0 if self.config.linear_allow_neg_eigval else 1.0
        own = {"norm_eps": _NORM_EPS, "largest_beta": largest_beta}
        return super().make_delta_net(index, **{**own, **options})

    def rope_of_layer(self, index: int) -> RoPEConfig | None:
        return self.config.rope if self.config.has_positions else None


def _prepare(document: dict[str, object]) -> dict[str, object]:
    """Return a config.json with values for the keys that transformers derives from others, and with
    `no_positions` for a `rope_theta` of null."""
    reader = ConfigReader("config.json", document)
    n_layers, n_heads = reader.n_layers(), reader.whole_number("num_attention_heads")
    full = [index for index in range(n_layers) if index % 4 == 3] or [n_layers - 1]
    types = ["full_attention" if index in full else "linear_attention" for index in range(n_layers)]
    heads = ("linear_num_key_heads", "linear_num_value_heads")
    derived = {"layer_types": types, **dict.fromkeys(heads, n_heads)}
    said = {key: value for key, value in document.items() if value is not None}
    prepared = ConfigReader("config.json", {**document, **derived, **said})
    width = int(0.75 * reader.whole_number("hidden_size") / prepared.whole_number(heads[0]))
    width = ConfigReader("config.json", said).whole_number("linear_key_head_dim", width)
    derived |= {"linear_key_head_dim": width, "linear_value_head_dim": 2 * width}
    sections = [document, reader.section("rope_parameters").values]
    if any(section.get("rope_theta", 0) is None for section in sections):
        said = {key: value for key, value in said.items() if not key.startswith("rope_")}
        return {**derived, **said, "no_positions": True}
    return {**derived, **said}


_NETS = {
    "in_q": "q_proj",
    "in_k": "k_proj",
    "in_v": "v_proj",
    "in_z": "g_proj",
    "in_a": "a_proj",
    "in_b": "b_proj",
    "out": "o_proj",
    "norm": "o_norm",
}
_OURS, _THEIRS = "layers.*.attention", "model.layers.*.linear_attn"
_ROWS = (
    *dense_rows(
        attention_norm="input_layernorm",
        ffn_norm="post_attention_layernorm",
        attention_post_norm="post_attention_layernorm",
        ffn_post_norm="post_feedforward_layernorm",
    ),
    *(
        KeyMapping(f"{_OURS}.{ours}.weight", f"{_THEIRS}.{theirs}.weight")
        for ours, theirs in _NETS.items()
    ),
    *(KeyMapping(f"{_OURS}.{name}", f"{_THEIRS}.{name}") for name in ("A_log", "dt_bias")),
    *(
        KeyMapping(f"{_OURS}.conv_{name}.weight", f"{_THEIRS}.{name}_conv1d.weight")
        for name in "qkv"
    ),
)
_CLASS_ROWS = (fused_row("conv_{}.weight", "qkv", "conv1d.weight"),)

_INITIAL = ("a_log_min", "a_log_max", "dt_min", "dt_max", "dt_init_floor")
_ROTATED = ModelType(
    architecture="OlmoHybridForCausalLM",
    config=OlmoHybridModel.Config,
    rows=_ROWS,
    keys={
        **DELTA_NET_KEYS,
        "linear_allow_neg_eigval": "linear_allow_neg_eigval",
        "attention_bias": "attention_bias",
    },
    values={"has_positions": True},
    ignored=tuple(f"linear_{name}" for name in _INITIAL),
    prepare=_prepare,
)
_PLAIN = replace(
    _ROTATED,
    values={"has_positions": False},
    ignored=(*_ROTATED.ignored, "no_positions"),
    write=lambda config: {"rope_theta": None, "rope_parameters": {"rope_theta": None}},
)

_RENAMED = {
    "attention_layer_norm": "input_layernorm",
    "feedforward_layer_norm": "post_attention_layernorm",
}
"""Part of a name in files → its name in the class of transformers, which files may have too."""


def _name_of(name: str) -> str:
    for theirs, in_class in _RENAMED.items():
        name = name.replace(f".{theirs}.", f".{in_class}.")
    return name


_TYPES = {"olmo_hybrid": _ROTATED, "olmo_hybrid:no_positions": _PLAIN}

FORMAT = replace(
    dense_format(
        _TYPES,
        class_rows=dict.fromkeys(_TYPES, _CLASS_ROWS),
    ),
    name_of=_name_of,
)
