"""Granite 3 and 4 (IBM), and their Hugging Face formats."""

import dataclasses
import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Unpack, cast

from torch import Tensor, nn

from torchtitan.models.common.attention import AttentionOptions
from torchtitan.models.common.config_reader import ConfigReader
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.feed_forward import GatedFeedForward, InitStds, LayerSizes
from torchtitan.models.common.gguf import (
    NEIGHBORS,
    Architecture,
    Experts,
    gguf_format,
    require_gguf,
)
from torchtitan.models.common.gguf_recurrent import gguf_mamba_rows, is_recurrent, mamba_keys
from torchtitan.models.common.hugging_face import (
    DENSE_ROWS,
    FUSED_GATE_UP,
    ModelType,
    dense_format,
    replaced,
)
from torchtitan.models.common.mamba import LAYER_NAMES, MambaDecoder, mamba_rows
from torchtitan.models.common.moe.decoder import ExpertLayers
from torchtitan.models.common.moe.layer import MoEConfig
from torchtitan.models.common.moe.rows import LOCAL_KEYS
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.protocols.initializer import TruncatedNormal
from torchtitan.protocols.output_head import LogitTransform
from torchtitan.protocols.state_dict_adapter import Concatenated, KeyMapping, Permuted
from torchtitan.tools.errors import UnsupportedModelError, UserError

_MULTIPLIERS = (
    "embedding_multiplier",
    "attention_multiplier",
    "residual_multiplier",
    "logits_scaling",
)


class Multiplied:
    """A mixin before a decoder's class, with constant factors as in maximal update parametrization
    (arXiv:2203.03466); so is its `Config`, before the decoder's."""

    class Config:
        __slots__ = ()

        embedding_multiplier: float
        attention_multiplier: float
        residual_multiplier: float
        logits_scaling: float
        tie_embeddings: bool

        def validate(self) -> None:
            decoder = cast(Decoder.Config, super())
            decoder.validate()
            cast(Decoder.Config, self).check_positive(*_MULTIPLIERS)

    config: Config

    def make_block(self, index: int, **options: Any) -> nn.Module:
        decoder = cast(Decoder, super())
        return decoder.make_block(index, multiplier=self.config.residual_multiplier, **options)

    def make_attention(self, index: int, **options: Unpack[AttentionOptions]) -> nn.Module:
        decoder = cast(Decoder, super())
        options.setdefault("scale", self.config.attention_multiplier)
        return decoder.make_attention(index, **options)

    def embed(self, tokens_BL: Tensor) -> Tensor:
        return cast(Decoder, super()).embed(tokens_BL) * self.config.embedding_multiplier

    def logit_transform(self) -> LogitTransform:
        return LogitTransform(multiplier=1 / self.config.logits_scaling)

    # Initial values are divided by the factors, so that a new model starts like one without
    # factors.

    def embedding_init(self) -> TruncatedNormal:
        init = cast(Decoder, super()).embedding_init()
        return (
            init
            if self.config.tie_embeddings
            else TruncatedNormal(init.std / self.config.embedding_multiplier)
        )

    def init_stds(self, index: int) -> InitStds:
        stds = cast(Decoder, super()).init_stds(index)
        return {**stds, "out_init_std": stds["out_init_std"] / self.config.residual_multiplier}

    def output_init(self) -> TruncatedNormal:
        init = cast(Decoder, super()).output_init()
        return TruncatedNormal(init.std * self.config.logits_scaling)


class GraniteModel(Multiplied, Decoder):
    """Llama's decoder with constant factors."""

    @dataclass(kw_only=True, slots=True)
    class Config(Multiplied.Config, Decoder.Config):
        embedding_multiplier: float = 1.0
        """Factor of the embedding."""

        attention_multiplier: float = 1.0
        """Factor of attention scores, instead of 1 / sqrt(head_dim)."""

        residual_multiplier: float = 1.0
        """Factor of the results of attention and feed-forward network before they are added to the
        residual stream."""

        logits_scaling: float = 1.0
        """Divisor of logits."""

    config: Config


class Granite4Model(Multiplied, MambaDecoder):
    """Granite 4: the same decoder with or without positions, and with layers of Mamba 2."""

    @dataclass(kw_only=True, slots=True)
    class Config(Multiplied.Config, MambaDecoder.Config):
        embedding_multiplier: float = 1.0
        """Factor of the embedding."""

        attention_multiplier: float = 1.0
        """Factor of attention scores, instead of 1 / sqrt(head_dim)."""

        residual_multiplier: float = 1.0
        """Factor of the results of a layer's parts before they are added to the residual stream."""

        logits_scaling: float = 1.0
        """Divisor of logits."""

        position_embedding_type: Literal["rope", "nope"] = "rope"
        """Positions in attention: rotary, or none."""

        layer_types: list[Literal["linear_attention", "full_attention"]] = field(
            default_factory=lambda: ["linear_attention", "linear_attention", "full_attention"]
        )
        """Types of the first layers, repeated for the others; linear_attention is Mamba 2."""

    config: Config

    def rope_of_layer(self, index: int) -> RoPEConfig | None:
        return self.config.rope if self.config.position_embedding_type == "rope" else None


class Granite4MoEModel(ExpertLayers, Granite4Model):
    """Granite 4 with experts in each layer, next to a network that every token passes through."""

    @dataclass(kw_only=True, slots=True)
    class Config(ExpertLayers.Config, Granite4Model.Config):
        moe: MoEConfig
        """Experts."""

        counts_shared = False

    config: Config

    def make_shared(self, width: int, **sizes: Unpack[LayerSizes]) -> nn.Module | None:
        shared_dim = self.config.moe.shared_ffn_dim
        return GatedFeedForward(hidden_dim=shared_dim, **sizes) if shared_dim else None


_NO_LIMIT = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])
"""`time_step_limit` as in Python, and as transformers writes it."""


def _prepare_4(document: dict[str, object]) -> dict[str, object]:
    """Return a config.json with the values that transformers gives to absent keys, and the types of
    layers in the newer spelling; without keys of Mamba if no layer is of that kind. Raise
    `UserError` for contradictory sizes."""
    document = {"num_local_experts": 8, **document}
    limit = document.pop("time_step_limit", None)
    if isinstance(limit, tuple):
        limit = [*limit]
    if limit is not None and limit not in _NO_LIMIT:
        raise UnsupportedModelError(
            f"config.json: time_step_limit is {limit!r}, which this family does not support (only "
            f"{_NO_LIMIT[0]!r})"
        )
    reader = ConfigReader("config.json", document)
    n_layers = reader.n_layers()
    names = [name for name in ("layer_types", "layers_block_type") if name in document]
    types: list[object] = []
    for name in names:
        said = document.pop(name)
        if said is None:  # as if absent
            continue
        if not (isinstance(said, list) and all(isinstance(kind, str) for kind in said)):
            raise UserError(f"config.json: {name} is {said!r}, but must be a list of types")
        renamed: list[object] = [LAYER_NAMES.get(kind, kind) for kind in said]
        if types not in ([], renamed):
            raise UserError(f"config.json: {' and '.join(names)} contradict each other")
        types = renamed
    types = types or ["linear_attention"] * n_layers
    document["layer_types"] = types
    if document.get("position_embedding_type") is None:
        document["position_embedding_type"] = "nope"
    if "linear_attention" not in types:
        return {key: value for key, value in document.items() if not key.startswith("mamba_")}
    document.setdefault("mamba_d_state", 256)
    inner = reader.whole_number("mamba_expand", 2) * reader.whole_number("hidden_size")
    n_heads = reader.whole_number("mamba_n_heads", 128)
    if document.get("mamba_d_head", "auto") == "auto":
        document["mamba_d_head"] = max(inner // n_heads, 1)
    head_dim = ConfigReader("config.json", document).whole_number("mamba_d_head")
    if head_dim * n_heads != inner:
        raise UserError(
            f"config.json: mamba_n_heads {n_heads} of width mamba_d_head {head_dim} "
            f"contradict mamba_expand times hidden_size, {inner}"
        )
    return document


def _write_4(config: Granite4Model.Config) -> dict[str, object] | None:
    """Return the types of layers, and sizes that transformers checks, even in models without Mamba;
    None: it cannot describe the model."""
    kinds = [config.type_of(index) for index in range(config.n_layers)]
    older = {newer: name for name, newer in LAYER_NAMES.items()}
    types = {"layer_types": [older[kind] for kind in kinds]}
    if "linear_attention" not in kinds:
        unused = {"mamba_n_heads": 1, "mamba_d_head": "auto"}
        return {**types, **unused}
    expand, rest = divmod(config.mamba.dim, config.dim)
    return None if rest or not expand else {**types, "mamba_expand": expand}


_KEYS = {name: name for name in ("attention_bias", *_MULTIPLIERS)}

_ROWS = replaced(
    DENSE_ROWS,
    dataclasses.replace(FUSED_GATE_UP, external="model.layers.*.shared_mlp.input_linear.weight"),
    KeyMapping("layers.*.feed_forward.w2.weight", "model.layers.*.shared_mlp.output_linear.weight"),
)
_ROWS += mamba_rows("mamba")


def _expert_rows(*names: str) -> tuple[KeyMapping, ...]:
    """Return the rows of experts with these `names` of the router, the matrices of gate and up, and
    the last matrix."""
    router, w13, w2 = (f"model.layers.*.block_sparse_moe.{name}" for name in names)
    return (
        KeyMapping("layers.*.moe.router.weight", router),
        KeyMapping("layers.*.moe.experts.w13", w13, Permuted((0, 1, 2, 3), joined=1)),
        KeyMapping("layers.*.moe.experts.w2", w2),
    )


_SHARED_ROWS = (
    KeyMapping(
        tuple(f"layers.*.moe.shared.{name}.weight" for name in ("w1", "w3")),
        "model.layers.*.shared_mlp.input_linear.weight",
        Concatenated(0),
    ),
    KeyMapping("layers.*.moe.shared.w2.weight", "model.layers.*.shared_mlp.output_linear.weight"),
)

_4_KEYS = {
    **{name: name for name in ("layer_types", "position_embedding_type")},
    "mamba_n_heads": "mamba.n_heads",
    "mamba_d_head": "mamba.head_dim",
    "mamba_n_groups": "mamba.n_groups",
    "mamba_d_state": "mamba.state_dim",
    "mamba_d_conv": "mamba.conv_width",
    "mamba_conv_bias": "mamba.conv_bias",
    "mamba_proj_bias": "mamba.bias",
}

_4 = ModelType(
    architecture="GraniteMoeHybridForCausalLM",
    config=Granite4Model.Config,
    rows=_ROWS,
    keys={**_KEYS, **_4_KEYS, "shared_intermediate_size": "ffn_dim"},
    fixed={"num_local_experts": 0},
    defaults={"shared_intermediate_size": 1024},
    ignored=(
        *("mamba_chunk_size", "mamba_expand", "num_experts_per_tok", "intermediate_size"),
        *("init_method", "normalization_function"),
    ),
    prepare=_prepare_4,
    write=_write_4,
)
_4_MOE = dataclasses.replace(
    _4,
    config=Granite4MoEModel.Config,
    rows=(
        *_ROWS,
        *_SHARED_ROWS,
        *_expert_rows("router.layer.weight", "input_linear.weight", "output_linear.weight"),
    ),
    keys={**_KEYS, **_4_KEYS, **LOCAL_KEYS, "shared_intermediate_size": "moe.shared_ffn_dim"},
    fixed={},
    defaults={**_4.defaults, "num_experts_per_tok": 2},
)

FORMAT = dense_format(
    {
        "granite": ModelType(
            architecture="GraniteForCausalLM",
            config=GraniteModel.Config,
            rows=DENSE_ROWS,
            keys={**_KEYS, "mlp_bias": "mlp_bias"},
        ),
        "granitemoehybrid": _4,
        "granitemoehybrid:num_local_experts": _4_MOE,
    },
    class_rows={
        "granitemoehybrid:num_local_experts": _expert_rows(
            "router.weight", "experts.gate_up_proj", "experts.down_proj"
        )
    },
)

_SCALES = dict(
    zip(
        _MULTIPLIERS,
        ("embedding_scale", "attention.scale", "residual_scale", "logit_scale"),
        strict=True,
    )
)


def _gguf_scales(config: Multiplied.Config) -> dict[str, object]:
    return {key: float(getattr(config, ours)) for ours, key in _SCALES.items()}


def _gguf_4(config: Granite4Model.Config) -> dict[str, object]:
    """Return the factors, and whether attention has positions."""
    width = config.moe.ffn_dim if isinstance(config, ExpertLayers.Config) else None
    must = f"--model.ffn_dim {config.ffn_dim}, or None"
    require_gguf(width in (None, config.ffn_dim), "moe.ffn_dim", width, must)
    has_positions = config.position_embedding_type == "rope"
    return {**_gguf_scales(config), "rope.scaling.finetuned": has_positions}


def _gguf_moe(config: Granite4MoEModel.Config) -> dict[str, object]:
    kind = config.position_embedding_type
    require_gguf(kind == "rope", "position_embedding_type", kind, "rope with experts alone")
    return _gguf_4(config)


def _gguf_hybrid(config: Granite4Model.Config) -> dict[str, object]:
    must = f"such that all heads are twice as wide as --model.dim {config.dim}"
    fits = config.mamba.dim == 2 * config.dim
    require_gguf(fits, "mamba.head_dim", config.mamba.head_dim, must)
    heads = [0 if recurrent else config.n_kv_heads for recurrent in is_recurrent(config)]
    return {**_gguf_4(config), **mamba_keys(config), "attention.head_count_kv": heads}


class _WithMamba(Architecture):
    """The architecture of models that have layers of Mamba."""

    def is_for(self, config: Decoder.Config) -> bool:
        if not super().is_for(config) or not isinstance(config, Granite4Model.Config):
            return False
        return any(config.type_of(index) == "linear_attention" for index in range(config.n_layers))


_granite = partial(Architecture, name="granite", rotation=NEIGHBORS, biased="qkvof")
_hybrid = partial(
    _WithMamba,
    name="granitehybrid",
    rotation=NEIGHBORS,
    biased="qkvof",
    rows=gguf_mamba_rows,
    keys=_gguf_hybrid,
)
_EXPERTS = Experts({"norm_topk_prob": True}, chosen=("shared_ffn_dim",))

GGUF = gguf_format(
    _granite(config=GraniteModel.Config, keys=_gguf_scales),
    _hybrid(config=Granite4Model.Config),
    _hybrid(config=Granite4MoEModel.Config, experts=_EXPERTS),
    _granite(config=Granite4Model.Config, keys=_gguf_4),
    _granite(name="granitemoe", config=Granite4MoEModel.Config, experts=_EXPERTS, keys=_gguf_moe),
)
