"""The models of Gemma 4 for text, and their Hugging Face format."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self, Unpack

from torch import Tensor, nn

from torchtitan.models.common.attention import (
    Attention,
    AttentionOptions,
    GivingAttention,
    HeadSizes,
    SharedKeyAttention,
)
from torchtitan.models.common.blocks import PerLayerBlock, PerLayerEmbeddings, ScaledSandwichBlock
from torchtitan.models.common.config_reader import ConfigReader
from torchtitan.models.common.feed_forward import GatedFeedForward
from torchtitan.models.common.gguf import (
    Architecture,
    Experts,
    Rotation,
    divisors,
    gguf_format,
    require_gguf,
)
from torchtitan.models.common.hugging_face import (
    SANDWICH_ROWS,
    ModelType,
    dense_format,
    module_rows,
    write_if,
)
from torchtitan.models.common.layer_inputs import LayerCall
from torchtitan.models.common.layer_types import WINDOW_KEYS, ScaledEmbeddingDecoder, one_full_of
from torchtitan.models.common.moe.decoder import DenseAndExpertsBlock, ExpertLayers
from torchtitan.models.common.moe.experts import GeGLUExperts
from torchtitan.models.common.moe.layer import MoEConfig
from torchtitan.models.common.moe.router import ScaledRouter
from torchtitan.models.common.moe.rows import fused_expert_rows
from torchtitan.models.common.norms import RMSNorm
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.protocols.state_dict_adapter import KeyMapping, Permuted
from torchtitan.tools.errors import require


class Gemma4Model(ScaledEmbeddingDecoder):
    """Norms before and after each part of a block, and of queries, keys and values. Layers of full
    attention, one of which is the last, have heads of other sizes, and rotate only a part of
    each."""

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

        hidden_size_per_layer_input: int = 0
        """Width of a token's embedding for one layer (E2B, E4B). 0: layers have none."""

        num_kv_shared_layers: int = 0
        """Number of last layers with the keys and values of the last layer of their type before
        them."""

        use_double_wide_mlp: bool = False
        """Double the width of the feed-forward networks of these layers."""

        def unsupported_parallelisms(self) -> dict[str, str]:
            reason = "layers use embeddings, keys and values from before their stage"
            return {"pipeline_parallel_degree": reason} if self.hidden_size_per_layer_input else {}

        def shares_keys(self, index: int) -> bool:
            """Return whether a layer has the keys and values of an earlier one."""
            return index >= self.n_layers - self.num_kv_shared_layers

        def with_layers(self, n_layers: int) -> Self:
            n_own = self.n_layers - self.num_kv_shared_layers
            n_shared = max(0, n_layers - n_own)
            return replace(self, n_layers=n_layers, num_kv_shared_layers=n_shared)

        def validate(self) -> None:
            ScaledEmbeddingDecoder.Config.validate(self)
            self.check_sizes(2**24, "global_head_dim", "num_global_key_value_heads")
            self.rope.validate(self.global_head_dim)
            n_heads, fits = (
                self.num_global_key_value_heads,
                self.n_heads % self.num_global_key_value_heads == 0,
            )
            require(
                fits,
                "--model.num_global_key_value_heads",
                n_heads,
                f"a divisor of n_heads {self.n_heads}",
            )
            types, n_shared = (
                [self.has_window(index) for index in range(self.n_layers)],
                self.num_kv_shared_layers,
            )
            require(
                not types[-1],
                "--model.layer_types",
                self.layer_types,
                "full_attention in the last layer",
            )
            self.check_sizes(2**24, "hidden_size_per_layer_input", "num_kv_shared_layers", least=0)
            fits = (
                not n_shared
                or {*types[:-n_shared]} == {*types}
                and self.hidden_size_per_layer_input > 0
            )
            must = (
                "0 without hidden_size_per_layer_input, and leave a layer of each type before them"
            )
            require(fits, "--model.num_kv_shared_layers", n_shared, must)

    config: Config
    block_kind: type[nn.Module] = ScaledSandwichBlock

    def __init__(self, config: Config):
        super().__init__(config)
        if width := config.hidden_size_per_layer_input:
            assert self.tok_embeddings is not None
            self.per_layer = PerLayerEmbeddings(
                config.n_layers, width, self.tok_embeddings, self.make_norm
            )

    def make_block(self, index: int, **options: Any) -> nn.Module:
        if width := self.config.hidden_size_per_layer_input:
            options |= {"kind": PerLayerBlock, "input_dim": width}
        return super().make_block(index, **options)

    def make_attention(self, index: int, **options: Unpack[AttentionOptions]) -> nn.Module:
        config = self.config
        own: AttentionOptions = {
            "attend": Attention(scale=1.0),
            # The first scores are as small as if they were divided by the square root of the width.
            "qk_norm": partial(
                RMSNorm, eps=config.norm_eps, init=self.head_dim_of_layer(index) ** -0.25
            ),
            "v_norm": partial(nn.RMSNorm, eps=config.norm_eps, elementwise_affine=False),
            "keys_as_values": config.attention_k_eq_v and not config.has_window(index),
        }
        if config.shares_keys(index):
            own["kind"] = SharedKeyAttention
        elif config.num_kv_shared_layers:
            own["attend"] = GivingAttention(scale=1.0)
        own.update(options)
        return super().make_attention(index, **own)

    def head_sizes(self, index: int) -> HeadSizes:
        sizes = super().head_sizes(index)
        if self.config.has_window(index):
            return sizes
        return replace(sizes, n_kv_heads=self.config.num_global_key_value_heads)

    def make_feed_forward(
        self, index: int, kind: Callable[..., nn.Module] = GatedFeedForward, **options: object
    ) -> nn.Module | None:
        width = self.config.ffn_dim
        if self.config.use_double_wide_mlp and self.config.shares_keys(index):
            width *= 2
        return super().make_feed_forward(index, kind, hidden_dim=width, **options)

    def head_dim_of_layer(self, index: int) -> int:
        return (
            self.config.resolved_head_dim
            if self.config.has_window(index)
            else self.config.global_head_dim
        )

    def run_blocks(
        self, calls: Sequence[LayerCall], tokens_BL: Tensor, hidden_BLD: Tensor
    ) -> Tensor:
        if self.per_layer is None:
            return super().run_blocks(calls, tokens_BL, hidden_BLD)
        own_BLNP = self.per_layer(tokens_BL, hidden_BLD)
        # of the last layer of each type that has its own
        keys_values: dict[bool, list[Tensor]] = {}
        for index, call in enumerate(calls):
            has_window = self.config.has_window(index)
            shared = keys_values[has_window] if self.config.shares_keys(index) else []
            hidden_BLD, *given = call.block(
                hidden_BLD, call.rope, call.attention, own_BLNP[:, :, index], *shared
            )
            if given:
                keys_values[has_window] = given
        return hidden_BLD


class Gemma4MoEModel(ExpertLayers, Gemma4Model):
    """26B-A4B: experts next to each feed-forward network."""

    @dataclass(kw_only=True, slots=True)
    class Config(ExpertLayers.Config, Gemma4Model.Config):
        moe: MoEConfig
        """Experts."""

    config: Config
    block_kind = DenseAndExpertsBlock
    make_experts = GeGLUExperts

    def make_router(self, config: MoEConfig, *, dim: int, init_std: float) -> ScaledRouter:
        return ScaledRouter(config, dim=dim, norm=self.make_norm, init_std=init_std)

    def make_block(self, index: int, **options: object) -> nn.Module:
        return super().make_block(
            index, dense=Gemma4Model.make_feed_forward(self, index), **options
        )


_ROPES = {
    "full_attention": {
        "rope_type": "proportional",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_DEFAULTS = {
    "tie_word_embeddings": True,
    "head_dim": 256,
    "num_key_value_heads": 4,
    "rope_parameters": _ROPES,
}
_EXPERT_KEYS = {
    "num_experts": "moe.n_experts",
    "top_k_experts": "moe.top_k",
    "moe_intermediate_size": "moe.ffn_dim",
}
_SMALL = ("hidden_size_per_layer_input", "num_kv_shared_layers", "use_double_wide_mlp")
_GLOBAL = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
"""Size of the heads in layers with windows → in layers of full attention."""


def _prepare(document: dict[str, object]) -> dict[str, object]:
    """Return a config.json with the types of all layers, without keys that have no effect, and with
    `_GLOBAL` instead of the `per_layer_config` that transformers writes. Raise `UserError` if that
    has other sizes."""
    of_type = {
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262_144,
        "sliding_window": 512,
    }
    of_type = of_type if document["model_type"] == "gemma4_text" else {"sliding_window": 1024}
    document = {**_DEFAULTS, **of_type, **document}
    reader = ConfigReader("config.json", document)
    n_layers = reader.n_layers()
    types = document.setdefault(
        "layer_types", [*(one_full_of(6) * n_layers)[: n_layers - 1], "full_attention"]
    )
    unused = {"use_bidirectional_attention": "vision", **dict.fromkeys(_SMALL[:2], 0)}
    unused |= {} if document.get("num_kv_shared_layers") else {"use_double_wide_mlp": True}
    document = {key: value for key, value in document.items() if value != unused.get(key, ...)}
    key, n_rows = "vocab_size_per_layer_input", document.get("vocab_size")
    if document.get("hidden_size_per_layer_input") and document.get(key) != n_rows:
        raise reader.wrong(key, document.get(key), f"vocab_size {n_rows}")
    for key in _EXPERT_KEYS if document.get("enable_moe_block") else ():
        reader.whole_number(key)
    if reader.has("per_layer_config"):
        given = reader.section("per_layer_config").values
        layers = ConfigReader(
            "config.json", {key.lstrip("0") or "0": value for key, value in given.items()}
        )
        own = layers.section(str(n_layers - 1)).values
        full = [
            str(i)
            for i, kind in enumerate(types if isinstance(types, list) else ())
            if kind == "full_attention"
        ]
        if layers.values != dict.fromkeys(full if own else (), own) or own.keys() - _GLOBAL.keys():
            raise reader.wrong(
                "per_layer_config", given, f"equal {' and '.join(_GLOBAL)} of all full layers"
            )
        document |= {_GLOBAL[key]: own.get(key, reader.values[key]) for key in _GLOBAL}
    elif document.get("num_global_key_value_heads") is None or not document.get("attention_k_eq_v"):
        document["num_global_key_value_heads"] = reader.values["num_key_value_heads"]
    return document


_NAMES = ("attention_bias", "attention_k_eq_v", "final_logit_softcapping", *_GLOBAL.values())
_KEYS = {**WINDOW_KEYS, **{name: name for name in _NAMES}}
_FIXED = dict.fromkeys(("hidden_act", "hidden_activation"), "gelu_pytorch_tanh") | {
    "enable_moe_block": False
}
_FIXED_LARGE = {**_FIXED, **dict.fromkeys(_SMALL[:2], 0)}

_OF_EXPERTS = {
    "moe.norm": "pre_feedforward_layernorm_2",
    "moe.post_norm": "post_feedforward_layernorm_2",
    "dense_post_norm": "post_feedforward_layernorm_1",
    "moe.router": "router.proj",
}
_ROWS = (
    *SANDWICH_ROWS,
    *module_rows("layers.*", "model.layers.*", _OF_EXPERTS),
    KeyMapping("layers.*.moe.router.norm.weight", "model.layers.*.router.scale"),
    KeyMapping("layers.*.moe.router.expert_scale", "model.layers.*.router.per_expert_scale"),
    *(
        replace(row, external=str(row.external).replace("mlp.", ""))
        for row in fused_expert_rows()[2:]
    ),
)

_DENSE = ModelType(
    architecture="Gemma4ForCausalLM",
    config=Gemma4Model.Config,
    rows=_ROWS,
    keys={**_KEYS, **{name: name for name in _SMALL}},
    fixed=_FIXED,
    ignored=(
        "per_layer_config",
        "vocab_size_per_layer_input",
        "use_double_wide_mlp",
        *_EXPERT_KEYS,
    ),
    prepare=_prepare,
    write=write_if(
        lambda config: (
            config.attention_k_eq_v or config.num_global_key_value_heads == config.n_kv_heads
        ),
        lambda config: {"vocab_size_per_layer_input": config.vocab_size},
    ),
)
_LARGE = replace(_DENSE, keys=_KEYS, fixed=_FIXED_LARGE)
_EXPERTS = replace(
    _DENSE,
    config=Gemma4MoEModel.Config,
    keys={**_KEYS, **_EXPERT_KEYS},
    fixed={**_FIXED_LARGE, "enable_moe_block": True},
)

_TYPES = {
    **dict.fromkeys(("gemma4_text", "gemma4"), _DENSE),
    **dict.fromkeys(("gemma4_unified_text", "gemma4_unified"), _LARGE),
    "gemma4_text:enable_moe_block": _EXPERTS,
}
FORMAT = dense_format(
    _TYPES, without=("model.vision_", "model.audio_", "model.embed_vision.", "model.embed_audio.")
)


_GGUF_OF_LAYER = {
    "own.gate": "inp_gate",
    "own.out": "proj",
    "own.norm": "post_norm",
    "moe.norm": "pre_ffw_norm_2",
    "moe.post_norm": "post_ffw_norm_2",
    "dense_post_norm": "post_ffw_norm_1",
}
_GGUF_INPUTS = {"tok_embeddings": "token_embd", "projection": "model_proj", "norm": "proj_norm"}
_GGUF_ROWS = (
    *module_rows("layers.*", "blk.*", _GGUF_OF_LAYER),
    *(
        KeyMapping(f"per_layer.{ours}.weight", f"per_layer_{theirs}.weight")
        for ours, theirs in _GGUF_INPUTS.items()
    ),
    KeyMapping("layers.*.layer_scalar", "blk.*.layer_output_scale.weight"),
    KeyMapping("layers.*.moe.router.norm.weight", "blk.*.ffn_gate_inp.scale"),
    KeyMapping("layers.*.moe.router.expert_scale", "blk.*.ffn_down_exps.scale"),
    KeyMapping(
        "layers.*.moe.experts.w13",
        "blk.*.ffn_gate_up_exps.weight",
        Permuted((0, 1, 2, 3), joined=1),
    ),
)


def _gguf_rows(config: Gemma4Model.Config) -> tuple[KeyMapping, ...]:
    """Return the rows, with divisors of frequencies in layers of full attention."""
    return (*_GGUF_ROWS, divisors(config.rope, config.global_head_dim))


def _check_gguf(config: Gemma4Model.Config) -> None:
    rope, local = config.rope, config.local_rope
    part, has_parts = rope.rotated_fraction, rope.scaling == "proportional"
    require_gguf(part == 1.0 or has_parts, "rope.rotated_fraction", part, "1.0 if not proportional")
    require_gguf(not local.is_scaled, "local_rope.scaling", local.scaling, "unscaled windows")
    fraction = local.rotated_fraction
    require_gguf(fraction == 1.0, "local_rope.rotated_fraction", fraction, "1.0")
    n_shared = config.num_kv_shared_layers
    last = [config.has_window(index) for index in range(config.n_layers - n_shared)][-2:]
    must = "such that the last layer before them has full attention, and the one before a window"
    require_gguf(not n_shared or last == [True, False], "num_kv_shared_layers", n_shared, must)


def _gguf_keys(config: Gemma4Model.Config) -> dict[str, object]:
    _check_gguf(config)
    layers, wide = range(config.n_layers), config.resolved_head_dim
    keys: dict[str, object] = {
        **{f"attention.{name}_length": config.global_head_dim for name in ("key", "value")},
        **{f"attention.{name}_length_swa": wide for name in ("key", "value")},
        "attention.head_count_kv": [
            config.n_kv_heads if config.has_window(i) else config.num_global_key_value_heads
            for i in layers
        ],
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "rope.dimension_count": config.global_head_dim,
        "rope.dimension_count_swa": wide,
        "rope.freq_base_swa": float(config.local_rope.theta),
    }
    if config.use_double_wide_mlp:
        keys["feed_forward_length"] = [
            config.ffn_dim * (2 if config.shares_keys(i) else 1) for i in layers
        ]
    if (cap := config.final_logit_softcapping) is not None:
        keys["final_logit_softcapping"] = float(cap)
    return keys


_architecture = partial(
    Architecture,
    name="gemma4",
    rotation=Rotation(part=True, own=True, scalings=("linear", "llama3", "proportional")),
    rows=_gguf_rows,
    windows="stated",
    keys=_gguf_keys,
)

GGUF = gguf_format(
    _architecture(config=Gemma4Model.Config),
    _architecture(
        config=Gemma4MoEModel.Config,
        experts=Experts({"norm_topk_prob": True, "shared_ffn_dim": None}),
    ),
)
