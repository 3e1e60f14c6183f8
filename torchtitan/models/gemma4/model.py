"""The models of Gemma 4 for text, and their Hugging Face format."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from torchtitan.models.common.attention import GivingAttention, GroupedQueryAttention, SharedKeyAttention
from torchtitan.models.common.blocks import PerLayerBlock, PerLayerEmbeddings, ScaledSandwichBlock
from torchtitan.models.common.config_reader import ConfigReader
from torchtitan.models.common.feed_forward import gelu_tanh
from torchtitan.models.common.hugging_face import SANDWICH_ROWS, ModelType, dense_format, module_rows, write_if
from torchtitan.models.common.layer_types import WINDOW_KEYS, LayerType, ScaledEmbeddingDecoder
from torchtitan.models.common.moe.decoder import DenseAndExpertsBlock, ExpertLayers
from torchtitan.models.common.moe.experts import RoutedExperts
from torchtitan.models.common.moe.layer import MoEConfig
from torchtitan.models.common.moe.router import ScaledRouter
from torchtitan.models.common.moe.rows import FUSED_EXPERT_ROWS
from torchtitan.models.common.norms import RMSNorm
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.protocols.state_dict_adapter import KeyMapping
from torchtitan.tools.errors import UserError, require

PATTERN: list[LayerType] = ["full_attention" if index == 5 else "sliding_attention" for index in range(6)]


class Gemma4Model(ScaledEmbeddingDecoder):
    """Norms before and after each part of a block, and of queries, keys and values. Layers of full attention, one of
    which is the last, have heads of other sizes, and rotate only a part of each."""

    @dataclass(kw_only=True, slots=True)
    class Config(ScaledEmbeddingDecoder.Config):
        sliding_window: int
        """Tokens that a token sees in layers of type sliding_attention, including itself."""

        local_rope: RoPEConfig = field(default_factory=lambda: RoPEConfig(theta=10_000.0))
        """Rotary position embedding of layers of type sliding_attention. The others use `rope`."""

        global_head_dim: int = 512
        """Width of one head in layers of full attention, even."""

        num_global_key_value_heads: int
        """Key/value heads in layers of full attention; divides n_heads."""

        attention_k_eq_v: bool = False
        """Use the keys, before their norm and RoPE, as values in layers of full attention."""

        @property
        def tensor_parallel_sizes(self) -> dict[str, int]:
            heads = ("n_heads", "n_kv_heads", "num_global_key_value_heads")
            return {name: getattr(self, name) for name in (*heads, "ffn_dim")}

        def validate(self) -> None:
            ScaledEmbeddingDecoder.Config.validate(self)
            full: dict[str, Any] = {"head_dim": self.global_head_dim, "n_kv_heads": self.num_global_key_value_heads}
            try:
                ScaledEmbeddingDecoder.Config.validate(replace(self, **full))
            except UserError as error:
                raise UserError(f"with global_head_dim and num_global_key_value_heads, {full}: {error}") from error
            if self.has_window(self.n_layers - 1):
                raise UserError(f"--model.layer_types gives a window to the last of {self.n_layers} layers")

    config: Config

    def make_block(self, index: int, **options: Any) -> nn.Module:
        return super().make_block(index, **{"kind": ScaledSandwichBlock, **options})

    def make_attention(self, index: int, **options: Any) -> nn.Module:
        config = self.config
        if not config.has_window(index):
            options |= {"n_kv_heads": config.num_global_key_value_heads, "keys_as_values": config.attention_k_eq_v}
        # The first scores are as small as if they were divided by the square root of the width.
        qk_norm = partial(RMSNorm, eps=config.norm_eps, init=self.head_dim_of_layer(index) ** -0.25)
        v_norm = partial(nn.RMSNorm, eps=config.norm_eps, elementwise_affine=False)
        return super().make_attention(index, scale=1.0, qk_norm=qk_norm, v_norm=v_norm, **options)

    def head_dim_of_layer(self, index: int) -> int:
        return self.config.resolved_head_dim if self.config.has_window(index) else self.config.global_head_dim


class Gemma4SmallModel(Gemma4Model):
    """E2B and E4B: each layer has its own embedding of a token, and the last layers have the keys and values of earlier
    ones."""

    @dataclass(kw_only=True, slots=True)
    class Config(Gemma4Model.Config):
        hidden_size_per_layer_input: int
        """Width of a token's embedding for one layer."""

        num_kv_shared_layers: int = 0
        """Number of last layers with the keys and values of the last layer of their type before them."""

        use_double_wide_mlp: bool = False
        """Double the width of the feed-forward networks of these layers."""

        def unsupported_parallelisms(self) -> dict[str, str]:
            return {"pipeline_parallel_degree": "layers use embeddings, keys and values from before their stage"}

        def source_of(self, index: int) -> int | None:
            """Return the layer whose keys and values a layer uses; None: its own."""
            n_own = self.n_layers - self.num_kv_shared_layers
            of_type = [other for other in range(n_own) if self.has_window(other) == self.has_window(index)]
            return of_type[-1] if index >= n_own else None

        def validate(self) -> None:
            Gemma4Model.Config.validate(self)
            self.check_sizes(2**24, "hidden_size_per_layer_input")
            n, types = self.num_kv_shared_layers, [self.has_window(index) for index in range(self.n_layers)]
            fits = 0 <= n < self.n_layers and {*types[: self.n_layers - n]} == {*types}
            require(fits, "--model.num_kv_shared_layers", n, "at least 0, and leave a layer of each type before them")

    config: Config

    def __init__(self, config: Config):
        super().__init__(config)
        sizes: Any = {"dim": config.dim, "vocab_size": config.vocab_size, "norm": self.make_norm}
        self.per_layer = PerLayerEmbeddings(config.n_layers, config.hidden_size_per_layer_input, **sizes)

    def make_block(self, index: int, **options: Any) -> nn.Module:
        own = self.config.hidden_size_per_layer_input
        return super().make_block(index, kind=PerLayerBlock, input_dim=own, **options)

    def make_attention(self, index: int, **options: Any) -> nn.Module:
        config = self.config
        kind = GroupedQueryAttention if config.source_of(index) is None else SharedKeyAttention
        attention: Any = super().make_attention(index, kind=kind, **options)
        if index in map(config.source_of, range(config.n_layers)):
            attention.attend = GivingAttention(scale=1.0)
        return attention

    def make_feed_forward(self, index: int, *args: Any, **options: Any) -> nn.Module:
        is_wide = self.config.use_double_wide_mlp and self.config.source_of(index) is not None
        return super().make_feed_forward(index, *args, hidden_dim=self.config.ffn_dim * (1 + is_wide), **options)

    def run_blocks(self, calls: list[Any], tokens_BL: Tensor, hidden_BLD: Tensor) -> Tensor:
        own_BLNP = self.per_layer(tokens_BL, hidden_BLD)
        given: dict[int | None, Any] = {None: ()}
        for index, (block, *inputs) in enumerate(calls):
            shared = given[self.config.source_of(index)]
            hidden_BLD, *given[index] = block(hidden_BLD, *inputs, own_BLNP[:, :, index], *shared)
        return hidden_BLD


class Gemma4MoEModel(ExpertLayers, Gemma4Model):
    """26B-A4B: experts next to each feed-forward network."""

    @dataclass(kw_only=True, slots=True)
    class Config(Gemma4Model.Config):
        moe: MoEConfig
        """Experts."""

        @property
        def expert_parallel_sizes(self) -> dict[str, int]:
            return self.moe.parallel_sizes(self.ffn_dim)

        def validate(self) -> None:
            Gemma4Model.Config.validate(self)
            self.moe.validate()

    config: Config

    make_experts = staticmethod(partial(RoutedExperts, activation=lambda gate, up: gelu_tanh(gate) * up))

    def make_router(self, **options: Any) -> ScaledRouter:
        return ScaledRouter(norm=self.make_norm, **options)

    def make_block(self, index: int, **options: Any) -> nn.Module:
        dense = Gemma4Model.make_feed_forward(self, index)
        return super().make_block(index, kind=DenseAndExpertsBlock, dense=dense, **options)


_ROPES = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_DEFAULTS = {"tie_word_embeddings": True, "head_dim": 256, "num_key_value_heads": 4, "rope_parameters": _ROPES}
_EXPERT_KEYS = {"num_experts": "moe.n_experts", "top_k_experts": "moe.top_k", "moe_intermediate_size": "moe.ffn_dim"}
_GLOBAL = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
"""Size of the heads in layers with windows → in layers of full attention."""


def _prepare(document: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json with the types of all layers, and `_GLOBAL` in place of `per_layer_config`, which
    transformers writes. Raise `UserError` if that has other sizes."""
    of_type = {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144, "sliding_window": 512}
    of_type = of_type if document["model_type"] == "gemma4_text" else {"sliding_window": 1024}
    reader = ConfigReader("config.json", document := {**_DEFAULTS, **of_type, **document})
    n_layers = reader.n_layers()
    types = document.setdefault("layer_types", [*(PATTERN * n_layers)[: n_layers - 1], "full_attention"])
    for key, unused in {"use_bidirectional_attention": "vision", "num_kv_shared_layers": 0}.items():
        if document.get(key) == unused:  # without effect on text
            del document[key]
    key, n_rows = "vocab_size_per_layer_input", document.get("vocab_size")
    if document.get("hidden_size_per_layer_input") and document.get(key) != n_rows:
        raise reader.wrong(key, document.get(key), f"vocab_size {n_rows}")
    for key in _EXPERT_KEYS if document.get("enable_moe_block") else ():
        reader.whole_number(key)
    if reader.has("per_layer_config"):
        given = reader.section("per_layer_config").values
        layers = ConfigReader("config.json", {key.lstrip("0") or "0": value for key, value in given.items()})
        own = layers.section(str(n_layers - 1)).values
        full = [str(i) for i, kind in enumerate(types if isinstance(types, list) else ()) if kind == "full_attention"]
        if layers.values != dict.fromkeys(full if own else (), own) or own.keys() - _GLOBAL.keys():
            raise reader.wrong("per_layer_config", given, f"equal {' and '.join(_GLOBAL)} of all full layers")
        document |= {_GLOBAL[key]: own.get(key, reader.values[key]) for key in _GLOBAL}
    elif document.get("num_global_key_value_heads") is None or not document.get("attention_k_eq_v"):
        document["num_global_key_value_heads"] = reader.values["num_key_value_heads"]
    return document


_NAMES = ("attention_bias", "attention_k_eq_v", "final_logit_softcapping", *_GLOBAL.values())
_OF_SMALL = ("hidden_size_per_layer_input", "num_kv_shared_layers", "use_double_wide_mlp")
_KEYS = {**WINDOW_KEYS, **{name: name for name in _NAMES}}
_GELU = dict.fromkeys(("hidden_act", "hidden_activation"), "gelu_pytorch_tanh")
_FIXED: dict[str, Any] = {**_GELU, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}

_PER_LAYER = {"tok_embeddings": "embed_tokens_per_layer", "projection": "per_layer_model_projection"}
_OWN = {"gate": "per_layer_input_gate", "out": "per_layer_projection", "norm": "post_per_layer_input_norm"}
_EXPERT_NORMS = {"moe.norm": "pre_feedforward_layernorm_2", "moe.post_norm": "post_feedforward_layernorm_2"}
_ROUTER = {"weight": "proj.weight", "norm.weight": "scale", "expert_scale": "per_expert_scale"}
_ROWS = (
    *SANDWICH_ROWS,
    *module_rows("per_layer", "model", {**_PER_LAYER, "norm": "per_layer_projection_norm"}),
    *module_rows("layers.*.own", "model.layers.*", _OWN),
    *module_rows("layers.*", "model.layers.*", {**_EXPERT_NORMS, "dense_post_norm": "post_feedforward_layernorm_1"}),
    *(KeyMapping(f"layers.*.moe.router.{ours}", f"model.layers.*.router.{theirs}") for ours, theirs in _ROUTER.items()),
    *(replace(row, external=str(row.external).replace("mlp.", "")) for row in FUSED_EXPERT_ROWS[1:]),
)

_DENSE = ModelType(
    architecture="Gemma4ForCausalLM",
    config=Gemma4Model.Config,
    rows=_ROWS,
    keys=_KEYS,
    fixed={**_FIXED, "enable_moe_block": False},
    ignored=("per_layer_config", "vocab_size_per_layer_input", "use_double_wide_mlp", *_EXPERT_KEYS),
    prepare=_prepare,
    ropes={"rope": "full_attention", "local_rope": "sliding_attention"},
    write=write_if(
        lambda config: config.attention_k_eq_v or config.num_global_key_value_heads == config.n_kv_heads,
        lambda config: {"vocab_size_per_layer_input": config.vocab_size},
    ),
)
_EXPERTS: Any = {"keys": {**_KEYS, **_EXPERT_KEYS}, "fixed": {**_FIXED, "enable_moe_block": True}}
_SMALL: Any = {"keys": {**_KEYS, **{n: n for n in _OF_SMALL}}, "fixed": {**_GELU, "enable_moe_block": False}}

_TYPES = {
    **dict.fromkeys(("gemma4_text", "gemma4", "gemma4_unified_text", "gemma4_unified"), _DENSE),
    "gemma4_text:hidden_size_per_layer_input": replace(_DENSE, config=Gemma4SmallModel.Config, **_SMALL),
    "gemma4_text:enable_moe_block": replace(_DENSE, config=Gemma4MoEModel.Config, **_EXPERTS),
}
FORMAT = dense_format(_TYPES, without=("model.vision_", "model.audio_", "model.embed_vision.", "model.embed_audio."))
