"""LFM2 (Liquid AI, arXiv:2511.23404), dense and with experts, and its Hugging Face formats."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Literal

from torchtitan.models.common.config_reader import ConfigReader
from torchtitan.models.common.gguf import Architecture, Experts, gguf_format, require_gguf
from torchtitan.models.common.hugging_face import (
    EMBEDDING,
    ModelType,
    attention_rows,
    dense_format,
    module_rows,
    replaced,
)
from torchtitan.models.common.mixers import ATTENTION, HybridDecoder, MixerKind
from torchtitan.models.common.moe.decoder import ExpertLayers
from torchtitan.models.common.moe.layer import MoEConfig
from torchtitan.models.common.moe.router import Router
from torchtitan.models.common.moe.rows import (
    QWEN_KEYS,
    SPARSE_KEYS,
    expert_rows,
    fused_expert_rows,
    prepare_dense_layers,
    selection_bias,
    write_dense_layers,
)
from torchtitan.models.common.short_conv import SHORT_CONV, SHORT_CONV_ROWS
from torchtitan.protocols.state_dict_adapter import Concatenated, KeyMapping, Permuted
from torchtitan.tools.errors import UserError

LayerType = Literal["conv", "full_attention"]


class Lfm2Model(HybridDecoder):
    """Llama's decoder with short convolutions instead of attention in most layers, and norms of
    queries and keys in the others."""

    has_qk_norm = True

    @dataclass(kw_only=True, slots=True)
    class Config(HybridDecoder.Config):
        layer_types: list[LayerType] = field(
            default_factory=lambda: ["conv", "conv", "full_attention"]
        )
        """Types of the first layers, repeated for the others."""

        conv_width: int = 3
        """Tokens that a short convolution sees, including the current one."""

        conv_bias: bool = False
        """Add biases to short convolutions and their projections."""

        mixers: ClassVar[Mapping[str, MixerKind]] = {
            "conv": SHORT_CONV,
            "full_attention": ATTENTION,
        }

        def validate(self) -> None:
            HybridDecoder.Config.validate(self)
            self.check_sizes(2**16, "conv_width")

    config: Config


class Lfm2Router(Router):
    """A router whose weights add up to slightly less than 1."""

    eps = 1e-6


class Lfm2MoEModel(ExpertLayers, Lfm2Model):
    """LFM2 with experts in all but the first layers."""

    @dataclass(kw_only=True, slots=True)
    class Config(ExpertLayers.Config, Lfm2Model.Config):
        moe: MoEConfig
        """Experts."""

        router_types = ("sigmoid",)

    config: Config

    make_router = Lfm2Router


def _prepare(document: dict[str, object]) -> dict[str, object]:
    """Return a config.json with `layer_types` and the width of the feed-forward network, instead of
    the keys that they follow from in older files. Raise `UserError` for unusable keys."""
    older = {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"}
    document = {**document, **{older[key]: document[key] for key in older if key in document}}
    reader = ConfigReader("config.json", document)
    n_layers = reader.n_layers()
    if document.get("layer_types") is None:
        attention = document.get("full_attn_idxs")
        attention = [*range(n_layers)] if attention is None else attention
        if not isinstance(attention, list):
            raise reader.wrong("full_attn_idxs", attention, "a list of numbers of layers")
        types = ["full_attention" if i in attention else "conv" for i in range(n_layers)]
        document["layer_types"] = types
    if reader.flag("block_auto_adjust_ff_dim", True):
        width = 2 * reader.whole_number("intermediate_size") // 3
        if document.get("block_ffn_dim_multiplier", 1.0) is not None:
            multiple = reader.whole_number("block_multiple_of", 256)
            width = int(reader.number("block_ffn_dim_multiplier", 1.0) * width)
            width = -(-width // multiple) * multiple
        document["intermediate_size"] = width
    return {**document, "block_auto_adjust_ff_dim": False}


def _prepare_experts(document: dict[str, object]) -> dict[str, object]:
    document = prepare_dense_layers(document, 2, "num_dense_layers")
    if "tie_embedding" in document:
        document["tie_word_embeddings"] = document["tie_embedding"]
    if document.get("layer_types") is None:
        raise UserError("config.json: layer_types is missing, and this type has no default")
    return document


_ROWS = (
    EMBEDDING,
    *attention_rows("out_proj", "q_layernorm", "k_layernorm"),
    *SHORT_CONV_ROWS,
    *module_rows(
        "layers.*.feed_forward", "model.layers.*.feed_forward", {n: n for n in ("w1", "w2", "w3")}
    ),
    *module_rows(
        "layers.*", "model.layers.*", {"attention_norm": "operator_norm", "ffn_norm": "ffn_norm"}
    ),
    *module_rows("head", "model", {"norm": "embedding_norm"}),
)

_OF_OTHER_CODE = (
    *("block_dim", "block_ff_dim", "block_multiple_of", "block_ffn_dim_multiplier"),
    *("block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_swiglu"),
    *("block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init"),
    *("full_attn_idxs", "num_heads", "tie_embedding", "use_pos_enc"),
)
"""Keys that only the code before transformers reads, or `_prepare`."""

_DENSE = ModelType(
    architecture="Lfm2ForCausalLM",
    config=Lfm2Model.Config,
    rows=_ROWS,
    keys={
        "layer_types": "layer_types",
        "norm_eps": "norm_eps",
        "conv_L_cache": "conv_width",
        "conv_bias": "conv_bias",
    },
    fixed={"block_auto_adjust_ff_dim": False},
    defaults={"num_key_value_heads": 8, "rope_theta": 1e6, "tie_word_embeddings": True},
    ignored=_OF_OTHER_CODE,
    prepare=_prepare,
)


def _expert_rows(config: Lfm2MoEModel.Config) -> tuple[KeyMapping, ...]:
    folder = "feed_forward"
    rows = expert_rows(config, folder=folder, names=("w1", "w2", "w3"))
    return _ROWS + replaced(rows, selection_bias(f"{folder}.expert_bias"))


_MOE = replace(
    _DENSE,
    architecture="Lfm2MoeForCausalLM",
    config=Lfm2MoEModel.Config,
    rows=_expert_rows,
    keys={
        **_DENSE.keys,
        **QWEN_KEYS,
        **SPARSE_KEYS,
        "norm_topk_prob": "moe.norm_topk_prob",
        "routed_scaling_factor": "moe.routed_scaling_factor",
        "use_expert_bias": "moe.selection_bias",
    },
    values={"moe.scoring_func": "sigmoid"},
    fixed={},
    defaults={
        **_DENSE.defaults,
        **{"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1792},
        "use_expert_bias": True,
    },
    ignored=("num_dense_layers", "tie_embedding"),
    prepare=_prepare_experts,
    write=partial(write_dense_layers, key="num_dense_layers"),
)

FORMAT = dense_format(
    {"lfm2": _DENSE, "lfm2_moe": _MOE},
    class_rows={"lfm2_moe": fused_expert_rows(folder="feed_forward")},
)


def _gguf_rows(config: Lfm2Model.Config) -> tuple[KeyMapping, ...]:
    return (
        KeyMapping(
            tuple(f"layers.*.attention.in_{name}.weight" for name in "bcx"),
            "blk.*.shortconv.in_proj.weight",
            Concatenated(0),
        ),
        KeyMapping("layers.*.attention.out.weight", "blk.*.shortconv.out_proj.weight"),
        KeyMapping(
            "layers.*.attention.conv.weight",
            "blk.*.shortconv.conv.weight",
            Permuted((0, 1, 2), joined=0),
        ),
        KeyMapping("head.norm.weight", "token_embd_norm.weight"),
    )


def _gguf_keys(config: Lfm2Model.Config) -> dict[str, object]:
    require_gguf(not config.conv_bias, "conv_bias", True, "False")
    types = config.layer_types
    kinds = {types[index % len(types)] for index in range(config.n_layers)}
    require_gguf(len(kinds) == 2, "layer_types", types, "convolutions and attention")
    heads = [
        config.n_kv_heads if types[index % len(types)] == "full_attention" else 0
        for index in range(config.n_layers)
    ]
    return {"shortconv.l_cache": config.conv_width, "attention.head_count_kv": heads}


_architecture = partial(Architecture, rows=_gguf_rows, keys=_gguf_keys, any_head_width=False)

GGUF = gguf_format(
    _architecture(name="lfm2", config=Lfm2Model.Config),
    _architecture(
        name="lfm2moe",
        config=Lfm2MoEModel.Config,
        experts=Experts(
            {"norm_topk_prob": True, "selection_bias": True, "shared_ffn_dim": None},
            chosen=("scoring_func", "layer_types"),
        ),
    ),
)
