"""Types of tiny models of images and text from M to V, which fewer tests train."""

from dataclasses import replace
from typing import Any

from tests.vision_types import HIDDEN, LINEAR, QWEN_VISION, VisionType, mrope, qwen

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_SOUND = {
    "num_mel_bins": 8,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "d_model": 16,
    "max_source_positions": 16,
    "output_dim": HIDDEN,
}
_OMNI = {
    "image_token": "<|IMAGE|>",
    "video_token": "<|VIDEO|>",
    "audio_token": "<|AUDIO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}


def _omni(processor: str, suffix: str, **differences: Any) -> VisionType:
    """The language model of a model that also hears and speaks."""
    names = [f"{sense}_token" for sense in ("image", "video", "audio")]
    ids = {f"{name}{suffix}": _OMNI[name] for name in names}
    values: dict[str, Any] = {
        "tokens": _OMNI,
        "placeholder": "<|vision_bos|><|IMAGE|><|vision_eos|>",
        "ids": ids | {"vision_start_token_id": "<|vision_bos|>"},
        "projector": r"model\.visual\.(merger_list|merger)\.",
    }
    return replace(qwen(processor, mrope(2, 1, 1), {}), **(values | differences))


TYPES_M_TO_V: dict[str, VisionType] = {
    "qwen4_exp": qwen(
        "Qwen3VLProcessor",
        mrope(2, 1, 1, partial_rotary_factor=1.0)
        | {"layer_types": ["linear_attention", "indexed_attention"]}
        | {"shared_expert_intermediate_size": 16, "hc_count": 2, "hc_lowrank": 8}
        | {f"indexer_{name}": 8 for name in ("head_dim", "budget")}
        | {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_compress_ratio": 4}
        | LINEAR
        | _EXPERTS,
        {"num_position_embeddings": 16},
    ),
    "qwen2_5_omni_thinker": _omni(
        "Qwen2_5OmniProcessor",
        "_index",
        config={"audio_config": _SOUND | {"n_window": 8}},
    ),
    "qwen3_omni_moe_thinker": _omni(
        "Qwen3OmniMoeProcessor",
        "_id",
        text=mrope(2, 1, 1) | _EXPERTS,
        vision=QWEN_VISION | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        config={"audio_config": _SOUND | {"n_window": 8, "downsample_hidden_size": 8}},
    ),
}

ROWS_M_TO_V = ("qwen4_exp",)
"""Types that get a row for each packed document: linear attention."""
