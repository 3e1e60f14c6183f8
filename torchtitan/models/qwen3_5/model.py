"""Qwen3.5's models, dense and with experts, without their vision encoder, and their Hugging Face
format."""

from dataclasses import dataclass, replace
from functools import partial

from torchtitan.models.common.config_reader import ConfigReader
from torchtitan.models.common.delta_net import (
    DELTA_NET_KEYS,
    DELTA_NET_ROWS,
    GatedHybridDecoder,
    prepare_layer_types,
)
from torchtitan.models.common.gguf import Architecture, Experts, Rotation, gguf_format
from torchtitan.models.common.gguf_recurrent import (
    TiledValues,
    delta_net_keys,
    delta_net_rows,
    single,
)
from torchtitan.models.common.gguf_rows import POST_ATTENTION_NORM
from torchtitan.models.common.hugging_face import DENSE_ROWS, ModelType, dense_format
from torchtitan.models.common.moe.decoder import ExpertLayers
from torchtitan.models.common.moe.layer import MoEConfig
from torchtitan.models.common.moe.rows import QWEN_KEYS, expert_rows
from torchtitan.protocols.state_dict_adapter import KeyMapping


class Qwen35Model(GatedHybridDecoder):
    """Gated delta nets, with an attention layer after every three, and RoPE in a part of each
    head."""


class Qwen35MoEModel(ExpertLayers, Qwen35Model):
    """Qwen3.5 with experts in each layer, next to one that every token passes through."""

    @dataclass(kw_only=True, slots=True)
    class Config(ExpertLayers.Config, Qwen35Model.Config):
        moe: MoEConfig
        """Experts."""

    config: Config


def _prepare(document: dict[str, object]) -> dict[str, object]:
    """Return a config.json with `layer_types`, and without keys that only matter for images: they
    assign RoPE's pairs to the three coordinates of a position, which are equal in text. Raise
    `UserError` for contradictory keys."""
    prepared, reader = prepare_layer_types(document), ConfigReader("config.json", document)
    for key in ("rope_parameters", "rope_scaling"):
        section = reader.section(key).values
        prepared[key] = {
            name: value for name, value in section.items() if not name.startswith("mrope_")
        }
    return prepared


_DENSE = (*DENSE_ROWS, *DELTA_NET_ROWS)
_TEXT = ModelType(
    architecture="Qwen3_5ForCausalLM",
    config=Qwen35Model.Config,
    rows=_DENSE,
    keys={**DELTA_NET_KEYS, "attention_bias": "attention_bias"},
    fixed={"attn_output_gate": True},
    defaults={"num_key_value_heads": 4, "head_dim": 256, "partial_rotary_factor": 0.25},
    ignored=(
        "mamba_ssm_dtype",
        "mlp_only_layers",
        "mtp_num_hidden_layers",
        "mtp_use_dedicated_embeddings",
    ),
    prepare=_prepare,
)

_KEYS = {
    **QWEN_KEYS,
    "shared_expert_intermediate_size": "moe.shared_ffn_dim",
    "moe_intermediate_size": "ffn_dim",
}
_DEFAULTS = {"num_experts": 256, "num_experts_per_tok": 8, "shared_expert_intermediate_size": 512}
_MOE = replace(
    _TEXT,
    architecture="Qwen3_5MoeForCausalLM",
    config=Qwen35MoEModel.Config,
    rows=lambda config: _DENSE + expert_rows(config, shared="shared_expert"),
    keys={**_TEXT.keys, **_KEYS},
    defaults={
        **_TEXT.defaults,
        **_DEFAULTS,
        "moe_intermediate_size": 512,
        "num_key_value_heads": 2,
    },
)

# Skips tensors that predict more than one token at once, as transformers does.
_TYPES = {"qwen3_5_text": _TEXT, "qwen3_5": _TEXT, "qwen3_5_moe_text": _MOE, "qwen3_5_moe": _MOE}
FORMAT = dense_format(_TYPES, without=("model.visual.", "mtp."))


def _gguf_rows(config: Qwen35Model.Config) -> tuple[KeyMapping, ...]:
    values = TiledValues(config.linear_num_key_heads, config.linear_num_value_heads)
    return (
        *POST_ATTENTION_NORM,
        *delta_net_rows(values),
        single("in_a.weight", "ssm_alpha.weight", values),
        single("in_b.weight", "ssm_beta.weight", values),
    )


def _gguf_keys(config: Qwen35Model.Config) -> dict[str, object]:
    n_pairs = config.rope.rotated_dim(config.resolved_head_dim) // 2
    # Pairs take turns in getting their angles from a position's time, height and width, which are
    # equal in text; all pairs must get theirs from one of them.
    sections = [(n_pairs + 2) // 3, (n_pairs + 1) // 3, n_pairs // 3, 0]
    return {**delta_net_keys(config), "rope.dimension_sections": sections}


_architecture = partial(
    Architecture, rotation=Rotation(part=True), rows=_gguf_rows, keys=_gguf_keys
)

GGUF = gguf_format(
    _architecture(name="qwen35", config=Qwen35Model.Config),
    _architecture(
        name="qwen35moe",
        config=Qwen35MoEModel.Config,
        experts=Experts({"norm_topk_prob": True}, chosen=("shared_ffn_dim",)),
    ),
)
