"""The model types that transformers maps to causal and image-text classes, and configurations to
build them from."""

import json
from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from torchtitan.models.transformers.model import TransformersModel
from torchtitan.models.transformers.tiny import tiny_config

CAUSAL = list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
IMAGE_TEXT = list(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)

# What published configurations state, classes need and default configurations leave at None: of any
# type, by type.
_COMMON = {
    "num_experts": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "moe_intermediate_size": 512,
}
_BY_TYPE: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10_000.0}}
    },
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense"] + ["sparse"] * 11},
    "emu3": {"vocabulary_map": {"<image>": 150_000}},
    "chameleon": {"vocabulary_map": {"<image>": 60_000, "IMGIMGA": 60_001}},
    "granite4_vision": {"deepstack_layer_map": [[-1, 0]], "downsample_rate": "1/2"},
    "lfm2_moe": {"layer_types": ["conv"] * 16 + ["full_attention"] * 16},
    "paddleocr_vl_text": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 500_000.0,
            "mrope_section": [16, 24, 24],
        }
    },
    "step3p5": {"sliding_window": 512},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 128,
        "indexer_budget": 512,
        "indexer_compress_ratio": 4,
    },
}
_AT_START: dict[str, dict[str, Any]] = {
    "dbrx": {"attn_config": {"rope_theta": 10_000.0, "clip_qkv": 8.0}},
    "reformer": {"axial_pos_embds": False, "is_decoder": True},
    "xlm": {"causal": True},
    "xlnet": {"attn_type": "uni"},
    "xmod": {"default_language": "en_XX"},
}


def default_config(model_type: str) -> PretrainedConfig:
    """Return the default configuration of `model_type`, with what its class needs besides."""
    config = AutoConfig.for_model(model_type, **_AT_START.get(model_type, {}))
    configs = [config]
    for part in configs:
        configs += [value for value in vars(part).values() if isinstance(value, PretrainedConfig)]
        values = part.to_dict()
        needed = {**_COMMON, **_BY_TYPE.get(part.model_type, {})}
        if isinstance(heads := values.get("num_attention_heads"), int) and "hidden_size" in values:
            needed |= {"head_dim": values["hidden_size"] // heads, "num_key_value_heads": heads}
        for name, value in needed.items():
            if name in values and values[name] is None or name == "rope_parameters":
                setattr(part, name, value)
        rope = values.get("rope_parameters") or {}
        if (
            "mrope_section" in getattr(part, "ignore_keys_at_rope_validation", ())
            and "rope_theta" in rope
        ):
            part.rope_parameters.setdefault("mrope_section", [16, 24, 24])
    return config


def decoder_config(model_type: str) -> PretrainedConfig:
    """Return `default_config`, as the decoder that predicts the next token if the type is in the
    causal mapping: the decoders of BERT and of encoder-decoders are causal only if their
    configurations request it."""
    config = default_config(model_type)
    if model_type in CAUSAL:
        for name, value in {"is_decoder": True, "is_encoder_decoder": False}.items():
            if hasattr(config, name):
                setattr(config, name, value)
    return config


def tiny_model(model_type: str, **changes: object) -> TransformersModel.Config:
    """Return the configuration of a tiny model, with changes of its config.json, which are not in
    the cache of trials."""
    document = tiny_config(decoder_config(model_type)).to_json_string(use_diff=False)
    return TransformersModel.Config.of({**json.loads(document), **changes})
