"""Qwen3's models with experts (arXiv:2505.09388), and Qwen2's and Qwen1.5's, with their Hugging
Face format."""

from dataclasses import replace

from torchtitan.models.common.config_reader import ConfigReader
from torchtitan.models.common.gguf import Architecture, Experts, Tying, gguf_format, require_gguf
from torchtitan.models.common.hugging_face import DENSE_ROWS, ModelType, dense_format
from torchtitan.models.common.moe.decoder import MoEDecoder
from torchtitan.models.common.moe.rows import (
    QWEN_KEYS,
    SPARSE_KEYS,
    expert_rows,
    prepare_sparse_steps,
    write_sparse_steps,
)


class Qwen3MoeModel(MoEDecoder):
    """Qwen3's decoder with experts in some layers or in all."""

    has_qk_norm = True


class Qwen2MoeModel(MoEDecoder):
    """Qwen2's decoder with experts in some layers or in all, next to one that every token passes
    through."""

    biased = "qkv"


_KEYS = {**QWEN_KEYS, **SPARSE_KEYS, "norm_topk_prob": "moe.norm_topk_prob"}


def _prepare(document: dict[str, object]) -> dict[str, object]:
    """Return a config.json with `mlp_layer_types` for its keys about dense layers, and without an
    unused window. Raise `UserError` for unusable keys."""
    reader = ConfigReader("config.json", document)
    unused = () if reader.flag("use_sliding_window", False) else ("sliding_window", "layer_types")
    prepared = {key: value for key, value in document.items() if key not in unused}
    if "num_local_experts" in prepared:  # transformers 5 writes this name
        prepared.setdefault("num_experts", prepared.pop("num_local_experts"))
    return prepare_sparse_steps(prepared)


def _write(config: MoEDecoder.Config) -> dict[str, object] | None:
    if config.moe.ffn_dim is None:
        return None
    return {"use_sliding_window": config.sliding_window is not None, **write_sparse_steps(config)}


_3 = ModelType(
    architecture="Qwen3MoeForCausalLM",
    config=Qwen3MoeModel.Config,
    rows=lambda config: DENSE_ROWS + expert_rows(config, shared="shared_expert"),
    keys={**_KEYS, "sliding_window": "sliding_window", "attention_bias": "attention_bias"},
    defaults={
        **{
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "num_key_value_heads": 4,
        },
        **{"norm_topk_prob": False},
    },
    fixed={"use_qk_norm": True},
    ignored=("use_sliding_window", "decoder_sparse_step", "mlp_only_layers", "max_window_layers"),
    prepare=_prepare,
    write=_write,
)
_2 = replace(
    _3,
    architecture="Qwen2MoeForCausalLM",
    config=Qwen2MoeModel.Config,
    keys={
        **_KEYS,
        "qkv_bias": "attention_bias",
        "shared_expert_intermediate_size": "moe.shared_ffn_dim",
    },
    fixed={"use_sliding_window": False},
    defaults={
        **{
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "num_key_value_heads": 16,
        },
        **{"norm_topk_prob": False, "shared_expert_intermediate_size": 5632, "qkv_bias": True},
    },
    write=lambda config: _write(config) if config.moe.shared_ffn_dim else None,
)

FORMAT = dense_format({"qwen3_moe": _3, "qwen2_moe": _2})


def _check_shared(config: MoEDecoder.Config) -> dict[str, object]:
    width = config.moe.shared_ffn_dim
    require_gguf(width is not None, "moe.shared_ffn_dim", width, "an expert for every token")
    return {}


GGUF = gguf_format(
    Architecture(
        name="qwen3moe",
        config=Qwen3MoeModel.Config,
        experts=Experts({"norm_topk_prob": True, "shared_ffn_dim": None}),
    ),
    Architecture(
        name="qwen2moe",
        config=Qwen2MoeModel.Config,
        any_head_width=False,
        tying=Tying(copies=True),
        experts=Experts({"norm_topk_prob": False}),
        keys=_check_shared,
    ),
)
