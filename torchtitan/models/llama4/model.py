"""The language model of Llama 4 (ai.meta.com/blog/llama-4-multimodal-intelligence), and its Hugging
Face format."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Unpack, cast

from torch import nn

from torchtitan.models.common.attention import AttentionOptions, TemperedAttention
from torchtitan.models.common.config_reader import ConfigReader
from torchtitan.models.common.gguf import Architecture, Experts, Rotation, gguf_format, require_gguf
from torchtitan.models.common.hugging_face import (
    DENSE_ROWS,
    ModelType,
    dense_format,
    interleaved,
    write_if,
)
from torchtitan.models.common.layer_types import one_full_of
from torchtitan.models.common.moe.decoder import MoEDecoder
from torchtitan.models.common.moe.experts import InputScaledExperts
from torchtitan.models.common.moe.rows import LOCAL_KEYS, fused_expert_rows, shared_rows
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.protocols.state_dict_adapter import KeyMapping
from torchtitan.tools.errors import UserError


class Llama4Model(MoEDecoder):
    """A decoder whose windows are chunks of the document. Layers of type full_attention have no
    positions."""

    @dataclass(kw_only=True, slots=True)
    class Config(MoEDecoder.Config):
        use_qk_norm: bool = True
        """Normalize the queries and keys of each head, in layers with positions."""

        attn_temperature_tuning: bool = True
        """In layers without, multiply queries by `1 + attn_scale * log(1 + n)` from position n *
        floor_scale on."""

        floor_scale: int = 8192
        """Tokens between steps of this factor."""

        attn_scale: float = 0.1
        """Height of its steps."""

        router_types = ("sigmoid",)

        def validate(self) -> None:
            MoEDecoder.Config.validate(self)
            self.check_sizes(2**32, "floor_scale")
            self.check_positive("attn_scale")
            if self.use_qk_norm and self.rope.scaling in ("yarn", "yarn_untruncated", "longrope"):
                raise UserError(
                    f"--model.rope.scaling is {self.rope.scaling}, but with use_qk_norm must be "
                    "another"
                )

    config: Config

    has_chunks = True
    make_experts = InputScaledExperts

    def rope_of_layer(self, index: int) -> RoPEConfig | None:
        return self.config.rope if self.config.has_window(index) else None

    def make_attention(self, index: int, **options: Unpack[AttentionOptions]) -> nn.Module:
        config, has_rope = self.config, self.config.has_window(index)
        # The format's norms are behind RoPE, which does not change them.
        norm = partial(nn.RMSNorm, eps=config.norm_eps, elementwise_affine=False)
        has_norm = config.use_qk_norm and has_rope
        if config.attn_temperature_tuning and not has_rope:
            options["attend"] = TemperedAttention(config.floor_scale, config.attn_scale)
        options.setdefault("qk_norm", norm if has_norm else None)
        return super().make_attention(index, **options)


def _rows(config: Llama4Model.Config) -> list[KeyMapping]:
    experts = fused_expert_rows("router", (0, 3, 1, 2))
    rows = [*interleaved(DENSE_ROWS, config), *shared_rows("shared_expert"), *experts]
    return [
        replace(row, external=cast(str, row.external).replace(".mlp.", ".feed_forward."))
        for row in rows
    ]


def _prepare(document: dict[str, object]) -> dict[str, object]:
    """Return a config.json with `layer_types` and `mlp_layer_types`. Raise `UserError` for
    contradictory keys."""
    reader = ConfigReader("config.json", document)
    n_layers, interval = reader.n_layers(), reader.whole_number("no_rope_layer_interval", 4)
    step = reader.whole_number("interleave_moe_layer_step", 1)
    has_rope = document.get("no_rope_layers") or [
        (index + 1) % interval for index in range(n_layers)
    ]
    sparse = (
        document["moe_layers"] if reader.has("moe_layers") else [*range(step - 1, n_layers, step)]
    )
    if not isinstance(has_rope, list) or len(has_rope) < n_layers:
        raise reader.wrong(
            "no_rope_layers", has_rope, f"a list with num_hidden_layers = {n_layers} items"
        )
    if not (isinstance(sparse, list) and all(index in range(n_layers) for index in sparse)):
        raise reader.wrong("moe_layers", sparse, "a list of numbers of layers")
    types = ["chunked_attention" if rope else "full_attention" for rope in has_rope[:n_layers]]
    if document.get("layer_types", types) != types:
        raise reader.wrong(
            "layer_types", document["layer_types"], "chunked_attention where layers have positions"
        )
    kinds = ["sparse" if index in sparse else "dense" for index in range(n_layers)]
    if document.get("attn_temperature_tuning") == 4:  # true, in older files
        document["attn_temperature_tuning"] = True
    return {
        **document,
        "layer_types": [kind.replace("chunked", "sliding") for kind in types],
        "mlp_layer_types": kinds,
    }


def _write(config: Llama4Model.Config) -> dict[str, object]:
    has_rope = [int(config.has_window(index)) for index in range(config.n_layers)]
    sparse = [index for index in range(config.n_layers) if config.moe.is_sparse(index)]
    types = ["chunked_attention" if rope else "full_attention" for rope in has_rope]
    return {"no_rope_layers": has_rope, "moe_layers": sparse, "layer_types": types}


_SAME = (
    "attention_bias",
    "layer_types",
    "use_qk_norm",
    "attn_temperature_tuning",
    "floor_scale",
    "attn_scale",
)
_TEXT = ModelType(
    architecture="Llama4ForCausalLM",
    config=Llama4Model.Config,
    rows=_rows,
    keys={
        **{**LOCAL_KEYS, "intermediate_size": "moe.ffn_dim", "mlp_layer_types": "moe.layer_types"},
        **{"intermediate_size_mlp": "ffn_dim", "attention_chunk_size": "sliding_window"},
        **{name: name for name in _SAME},
    },
    defaults={
        **{
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
        **{"intermediate_size": 8192, "intermediate_size_mlp": 16384, "attention_chunk_size": 8192},
        **{"rope_theta": 500_000.0, "rms_norm_eps": 1e-5},
    },
    values={"moe.scoring_func": "sigmoid", "moe.norm_topk_prob": False, "moe.n_shared_experts": 1},
    fixed={"router_jitter_noise": 0.0},
    ignored=("no_rope_layers", "no_rope_layer_interval", "moe_layers", "interleave_moe_layer_step"),
    prepare=_prepare,
    write=write_if(
        lambda config: config.moe.ffn_dim is not None and config.sliding_window is not None, _write
    ),
)
FORMAT = dense_format(
    {"llama4_text": _TEXT, "llama4": _TEXT}, without=("vision_model.", "multi_modal_projector.")
)

_MAVERICK = 128
"""Experts of the size without norms of queries and keys; llama.cpp recognizes it by this number."""


def _gguf_keys(config: Llama4Model.Config) -> dict[str, object]:
    has_norm = config.moe.n_experts != _MAVERICK
    for option, must in (
        ("use_qk_norm", has_norm),
        ("attn_temperature_tuning", True),
        ("floor_scale", 8192),
        ("attn_scale", 0.1),
        ("sliding_window", 8192),
    ):
        value = getattr(config, option)
        require_gguf(value == must, option, value, f"{must} with {config.moe.n_experts} experts")
    return {}


GGUF = gguf_format(
    Architecture(
        name="llama4",
        config=Llama4Model.Config,
        rotation=Rotation(neighbors=True, scalings=("llama3", "linear")),
        windows=one_full_of(4),
        experts=Experts(
            {
                **{"scoring_func": "sigmoid", "norm_topk_prob": False, "n_shared_experts": 1},
                "shared_ffn_dim": None,
            },
            step=True,
        ),
        keys=_gguf_keys,
    )
)
