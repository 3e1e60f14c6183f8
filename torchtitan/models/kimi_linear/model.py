"""Kimi Linear (arXiv:2510.26692), and its Hugging Face format."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch import nn

from torchtitan.models.common.config_reader import ConfigReader
from torchtitan.models.common.gguf import (
    CHOICES_OF_DEEPSEEK,
    Architecture,
    Experts,
    Rotation,
    Tying,
    gguf_format,
    require_gguf,
)
from torchtitan.models.common.gguf_latent import latent_keys, latent_rows
from torchtitan.models.common.gguf_recurrent import COLUMN, is_recurrent, single
from torchtitan.models.common.gguf_rows import NegatedExp
from torchtitan.models.common.hugging_face import (
    DENSE_ROWS,
    ModelType,
    dense_format,
    module_rows,
)
from torchtitan.models.common.kimi_delta import KIMI_DELTA, KIMI_DELTA_CLASS_ROWS, KIMI_DELTA_ROWS
from torchtitan.models.common.latent_attention import (
    LATENT_ATTENTION,
    LATENT_ROWS,
    LatentDecoder,
    widths_of,
    with_widths,
)
from torchtitan.models.common.mixers import HybridDecoder, MixerKind
from torchtitan.models.common.moe import rows
from torchtitan.models.common.moe.decoder import ExpertLayers
from torchtitan.models.common.moe.layer import MoEConfig
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.protocols.state_dict_adapter import KeyMapping
from torchtitan.tools.errors import UserError


class KimiLinearModel(ExpertLayers, LatentDecoder, HybridDecoder):
    """Kimi Delta Attention, latent attention without positions in every fourth layer, and experts
    in all but the first."""

    @dataclass(kw_only=True, slots=True)
    class Config(ExpertLayers.Config, LatentDecoder.Config, HybridDecoder.Config):
        router_types = ("sigmoid",)

        layer_types: list[Literal["linear_attention", "full_attention"]] = field(
            default_factory=lambda: [
                "linear_attention",
                "linear_attention",
                "linear_attention",
                "full_attention",
            ]
        )
        """Types of the first layers, repeated for the others."""

        linear_num_heads: int = 32
        """Heads of Kimi Delta Attention, each with a state."""

        linear_head_dim: int = 128
        """Width of a query, key or value in Kimi Delta Attention."""

        linear_conv_kernel_dim: int = 4
        """Tokens that a convolution of Kimi Delta Attention sees, including the current one."""

        q_lora_rank: int | None = None
        """Width of the latent of queries. None: queries have no latent."""

        kv_lora_rank: int
        """Width of the latent of keys and values."""

        v_head_dim: int
        """Width of a head's values, at most --model.head_dim."""

        rope: RoPEConfig = field(default_factory=lambda: RoPEConfig(theta=10_000.0))
        """Only the part of a head (`rotated_fraction`) whose keys all heads share: no layer has
        positions."""

        moe: MoEConfig
        """Experts."""

        mixers: ClassVar[Mapping[str, MixerKind]] = {
            "linear_attention": KIMI_DELTA,
            "full_attention": LATENT_ATTENTION,
        }

        def validate(self) -> None:
            ExpertLayers.Config.validate(self)
            self.check_sizes(2**16, *_LINEAR)

    config: Config

    def rope_of_layer(self, index: int) -> RoPEConfig | None:
        return None

    def make_attention(self, index: int, **options: Any) -> nn.Module:
        return super().make_attention(index, interleaved=False, **options)


_LINEAR = ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
_OF_SECTION = dict(zip(_LINEAR, ("num_heads", "head_dim", "short_conv_kernel_size"), strict=True))
"""Key → its name in `linear_attn_config`."""

_OTHER_KEYS = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}
"""Key that transformers also reads → the key in its files."""


def _prepare(document: dict[str, object]) -> dict[str, object]:
    """Return a config.json with the types of layers, the widths of heads and the sizes of Kimi
    Delta Attention. Raise `UserError` for layers without a type or with two."""
    renamed = {_OTHER_KEYS.get(key, key): value for key, value in document.items()}
    reader = ConfigReader("config.json", renamed)
    section = reader.section("linear_attn_config").values
    sizes = {key: section[name] for key, name in _OF_SECTION.items() if name in section}
    types = {} if reader.has("layer_types") else {"layer_types": _layer_types(reader, section)}
    if not reader.has("mlp_layer_types"):
        renamed = rows.prepare_dense_layers(renamed)
    # of no effect without positions
    plain = {key: value for key, value in renamed.items() if not key.startswith("rope_")}
    return with_widths({**plain, **sizes, **types, "linear_attn_config": None}, plain=128)


def _layer_types(reader: ConfigReader, section: Mapping[str, object]) -> list[str]:
    """Return the types of layers, by their numbers in `linear_attn_config`, from 1."""
    n_layers = reader.n_layers()
    if not {"full_attn_layers", "kda_layers"} <= {*section}:
        return [
            "full_attention" if index and index % 4 == 0 else "linear_attention"
            for index in range(n_layers)
        ]
    full, linear = section["full_attn_layers"], section["kda_layers"]
    if not isinstance(full, list) or not isinstance(linear, list):
        raise reader.wrong("linear_attn_config", section, "with lists of the numbers of layers")
    if sorted([*full, *linear]) != [*range(1, n_layers + 1)]:
        raise UserError(
            f"config.json: linear_attn_config has full_attn_layers {full} and kda_layers {linear}, "
            f"but each layer from 1 to {n_layers} must be in one of them"
        )
    return [
        "full_attention" if number in full else "linear_attention"
        for number in range(1, n_layers + 1)
    ]


def _write(config: KimiLinearModel.Config) -> dict[str, object]:
    """Return the keys of layers, heads and Kimi Delta Attention, as published."""
    numbers = range(1, config.n_layers + 1)
    full = [number for number in numbers if config.type_of(number - 1) == "full_attention"]
    section = {name: getattr(config, key) for key, name in _OF_SECTION.items()}
    section["full_attn_layers"] = full
    section["kda_layers"] = [number for number in numbers if number not in full]
    dense, widths = rows.write_dense_layers(config) or {}, widths_of(config)
    head = {"head_dim": widths["qk_rope_head_dim"], "partial_rotary_factor": 1.0}
    return {**dense, **widths, **head, "linear_attn_config": section}


def _rows(config: KimiLinearModel.Config) -> tuple[KeyMapping, ...]:
    folder, names = "block_sparse_moe", ("w1", "w2", "w3")
    return (
        *DENSE_ROWS,
        *LATENT_ROWS,
        *KIMI_DELTA_ROWS,
        *rows.expert_rows(config, shared="shared_experts", folder=folder, names=names),
    )


_CLASS_ROWS = (
    *KIMI_DELTA_CLASS_ROWS,
    *rows.fused_expert_rows(),
    *rows.shared_rows("shared_experts"),
    rows.selection_bias("mlp.gate.e_score_correction_bias"),
)
_TYPE = ModelType(
    architecture="KimiLinearForCausalLM",
    config=KimiLinearModel.Config,
    rows=_rows,
    keys={
        **{key: key for key in ("layer_types", *_LINEAR, "attention_bias")},
        **{key: key for key in ("q_lora_rank", "kv_lora_rank", "v_head_dim")},
        **rows.SPARSE_KEYS,
        "model_max_length": "max_seq_len",
        "num_experts": "moe.n_experts",
        "num_experts_per_token": "moe.top_k",
        "num_shared_experts": "moe.n_shared_experts",
        "moe_renormalize": "moe.norm_topk_prob",
        "num_expert_group": "moe.n_group",
        "topk_group": "moe.topk_group",
        "routed_scaling_factor": "moe.routed_scaling_factor",
    },
    values={"moe.selection_bias": True, "moe.scoring_func": "sigmoid"},
    fixed={
        **{"mla_use_nope": True, "moe_router_activation_func": "sigmoid"},
        **{"moe_layer_freq": 1, "use_grouped_topk": True},
    },
    defaults={
        **{"q_lora_rank": None, "kv_lora_rank": 512, "v_head_dim": 128, "rms_norm_eps": 1e-5},
        **{"num_experts": 256, "num_experts_per_token": 8, "moe_intermediate_size": 1024},
        **{"num_shared_experts": 1, "routed_scaling_factor": 2.446, "num_expert_group": 1},
        **{"topk_group": 1, "partial_rotary_factor": 1.0, "rope_theta": 1e4},
        **{"num_key_value_heads": 32, "model_max_length": 1_048_576, "moe_renormalize": True},
    },
    ignored=(
        *("qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "first_k_dense_replace"),
        "linear_attn_config",
    ),
    prepare=_prepare,
    write=_write,
)

FORMAT = dense_format({"kimi_linear": _TYPE}, class_rows={"kimi_linear": _CLASS_ROWS})

_GGUF_NAMES = {f"in_{name}": f"attn_{name}" for name in "qkv"}
_GGUF_NAMES |= {f"conv_{name}": f"ssm_conv1d_{name}" for name in "qkv"}
_GGUF_NAMES |= {"in_a.0": "ssm_f_a", "in_a.1": "ssm_f_b", "in_z.0": "ssm_g_a", "in_z.1": "ssm_g_b"}
_GGUF_NAMES |= {"in_b": "ssm_beta", "norm": "ssm_norm", "out": "attn_output"}


def _gguf_rows(config: KimiLinearModel.Config) -> tuple[KeyMapping, ...]:
    return (
        *latent_rows(config),
        *module_rows("layers.*.attention", "blk.*", _GGUF_NAMES),
        single("A_log", "ssm_a", NegatedExp(), COLUMN),
        single("dt_bias", "ssm_dt.bias"),
    )


def _gguf_keys(config: KimiLinearModel.Config) -> dict[str, object]:
    rank, n_heads = config.q_lora_rank, config.linear_num_heads
    require_gguf(rank is None, "q_lora_rank", rank, "None")
    must = f"--model.n_heads {config.n_heads}"
    require_gguf(n_heads == config.n_heads, "linear_num_heads", n_heads, must)
    n_shared = config.moe.n_shared_experts
    require_gguf(n_shared > 0, "moe.n_shared_experts", n_shared, "at least 1")
    return {
        **latent_keys(config),
        "attention.head_count_kv": [0 if each else 1 for each in is_recurrent(config)],
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "kda.head_dim": config.linear_head_dim,
    }


GGUF = gguf_format(
    Architecture(
        name="kimi-linear",
        config=KimiLinearModel.Config,
        rotation=Rotation(part=True),
        rows=_gguf_rows,
        tying=Tying(copies=True),
        experts=Experts(
            {"norm_topk_prob": True, "selection_bias": True, "shared_ffn_dim": None},
            chosen=[name for name in CHOICES_OF_DEEPSEEK if name != "norm_topk_prob"],
        ),
        keys=_gguf_keys,
    )
)
