"""The dense models of Gemma 4 for text, without per-layer embeddings, and their Hugging Face format."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from torchtitan.models.common.blocks import ScaledSandwichBlock
from torchtitan.models.common.config_reader import ConfigReader
from torchtitan.models.common.hugging_face import SANDWICH_ROWS, ModelType, dense_format, write_if
from torchtitan.models.common.layer_types import WINDOW_KEYS, LayerType, ScaledEmbeddingDecoder
from torchtitan.models.common.norms import RMSNorm
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.tools.errors import UserError

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
        return super().make_block(index, kind=ScaledSandwichBlock, **options)

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


_ROPES = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_DEFAULTS = {"tie_word_embeddings": True, "head_dim": 256, "num_key_value_heads": 4, "rope_parameters": _ROPES}
_GLOBAL = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
"""Size of the heads in layers with windows → in layers of full attention."""


def _prepare(document: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json with the types of all layers, and `_GLOBAL` in place of `per_layer_config`, which
    transformers writes. Raise `UserError` if that has other sizes."""
    of_type = {"hidden_size_per_layer_input": 256, "sliding_window": 512}
    of_type = of_type if document["model_type"] == "gemma4_text" else {"sliding_window": 1024}
    reader = ConfigReader("config.json", document := {**_DEFAULTS, **of_type, **document})
    n_layers = reader.n_layers()
    types = document.setdefault("layer_types", [*(PATTERN * n_layers)[: n_layers - 1], "full_attention"])
    if document.get("use_bidirectional_attention") == "vision":  # no effect on text
        del document["use_bidirectional_attention"]
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
_GELU = dict.fromkeys(("hidden_act", "hidden_activation"), "gelu_pytorch_tanh")
_OF_OTHERS = ("vocab_size_per_layer_input", "use_double_wide_mlp", "num_experts", "top_k_experts")

_TEXT = ModelType(
    architecture="Gemma4ForCausalLM",
    config=Gemma4Model.Config,
    rows=SANDWICH_ROWS,
    keys={**WINDOW_KEYS, **{name: name for name in _NAMES}},
    fixed={**_GELU, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "enable_moe_block": False},
    ignored=("per_layer_config", "moe_intermediate_size", *_OF_OTHERS),
    prepare=_prepare,
    ropes={"rope": "full_attention", "local_rope": "sliding_attention"},
    write=write_if(lambda config: config.attention_k_eq_v or config.num_global_key_value_heads == config.n_kv_heads),
)

FORMAT = dense_format(
    dict.fromkeys(("gemma4_text", "gemma4", "gemma4_unified_text", "gemma4_unified"), _TEXT),
    without=("model.vision_", "model.audio_", "model.embed_vision.", "model.embed_audio."),
)
