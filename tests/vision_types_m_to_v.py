"""Types of tiny models of images and text from M to V, which fewer tests train."""

from dataclasses import replace
from typing import Any

from tests.vision_types import (
    HIDDEN,
    LINEAR,
    QWEN_PIXELS,
    QWEN_VISION,
    SQUARE,
    VISION,
    VisionType,
    mrope,
    qwen,
)

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


_PROJECTOR = {"out_hidden_size": 4 * HIDDEN, "projector_hidden_size": 48}
_SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}


def _muse(processor: str) -> VisionType:
    tokens = {
        "image_token": "<|patch|>",
        "image_start_token": "<|image_start|>",
        "image_end_token": "<|image_end|>",
        "video_token": "<|video|>",
        "audio_token": "<|audio|>",
    }
    return VisionType(
        processor=processor,
        image_processor="MuseGlimmerImageProcessor",
        tokens=tokens,
        placeholder="<|patch|>",
        ids={f"{name}_id": tokens[name] for name in ("image_token", "video_token", "audio_token")},
        text=_SLIDING,
        vision=VISION | {"patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4},
        config=_PROJECTOR,
        pixels={name: QWEN_PIXELS[name] for name in ("patch_size", "temporal_patch_size")}
        | {"max_image_tokens": 36},
        projector=r"model\.(vision_adapter|vision_projection)\.",
    )


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
    "muse_glimmer": _muse("MuseGlimmerProcessor"),
    "muse_spark": replace(
        _muse("MuseSparkProcessor"),
        text=_SLIDING | _EXPERTS | {"num_local_experts": 4, "moe_hidden_size": 16},
        config=_PROJECTOR
        | {
            "audio_config": {
                "patch_sizes": [4, 4],
                "hidden_sizes": [8, 8],
                "depths": [1, 1],
                "num_hidden_layers": 2,
                "out_hidden_size": HIDDEN,
            }
        },
    ),
    "nemotron_h_omni": VisionType(
        processor="NemotronH_Omni_Reasoning_V3Processor",
        image_processor="NemotronH_Omni_Reasoning_V3ImageProcessor",
        tokens={
            "image_token": "<image>",
            "video_token": "<video>",
            "audio_token": "<so_embedding>",
            "image_start_token": "<img>",
            "image_end_token": "</img>",
        },
        placeholder="<image>",
        ids={"image_token_id": "<image>", "audio_token_id": "<so_embedding>"},
        text={
            "layers_block_type": ["mamba", "attention"],
            "ssm_state_size": 8,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "chunk_size": 8,
        },
        vision=VISION
        | {"patch_size": 4, "mlp_ratio": 1.5, "max_img_size": 64, "video_temporal_patch_size": 2}
        | {"num_cls_tokens": 1, "num_registers": 1},
        config={"projector_hidden_size": 48, "vision_hidden_size": HIDDEN},
        pixels={"patch_size": 4, "min_num_patches": 16, "max_num_patches": 64},
        projector=r"multi_modal_projector\.",
    ),
    "paligemma": VisionType(
        processor="PaliGemmaProcessor",
        image_processor="SiglipImageProcessor",
        tokens={"image_token": "<image>", "bos_token": "<bos>"},
        placeholder="<image>",
        ids={"image_token_index": "<image>"},
        config={"projection_dim": HIDDEN},
        pixels=SQUARE | {"image_seq_length": 16},
    ),
    "pp_chart2table": VisionType(
        processor="PPChart2TableProcessor",
        image_processor="PPChart2TableImageProcessor",
        tokens={"image_token": "<imgpad>", "start": "<img>", "end": "</img>"},
        placeholder=f"<img>{'<imgpad>' * 4}</img>",
        ids={"image_token_index": "<imgpad>"},
        vision=VISION
        | {
            "patch_size": 4,
            "output_channels": 32,
            "mlp_dim": 48,
            "global_attn_indexes": [],
        },
        config={"image_seq_length": 4},
        pixels=SQUARE,
        is_flat=True,
    ),
    "step3p7": VisionType(
        processor="Step3p7Processor",
        image_processor="Step3p7ImageProcessor",
        tokens={
            token: token
            for token in ("<im_patch>", "<im_start>", "<im_end>")
            + ("<patch_start>", "<patch_end>", "<patch_newline>")
        },
        placeholder="<im_patch>",
        ids={"image_token_id": "<im_patch>"},
        text=_SLIDING
        | _EXPERTS
        | {"n_routed_experts": 4, "share_expert_dim": 16, "mlp_layer_types": ["dense", "sparse"]},
        vision=VISION
        | {"hidden_size": 16, "patch_size": 14, "image_size": 112, "mlp_ratio": 1.5}
        | {"max_position_embeddings": 64},
        pixels={"size": {"height": 112, "width": 112}, "patch_size": 56},
        projector=r"model\.(multi_modal_projector|vision_model\.downsampler\d)\.",
    ),
    "unlimited_ocr": VisionType(
        processor="UnlimitedOcrProcessor",
        image_processor="UnlimitedOcrImageProcessor",
        tokens={"image_token": "<image>"},
        placeholder="<image>",
        ids={"image_token_id": "<image>"},
        text=_EXPERTS
        | {"n_routed_experts": 4, "n_shared_experts": 1, "sliding_window": 8}
        | {"mlp_layer_types": ["dense", "sparse"]},
        vision={
            "sam_config": {
                "hidden_size": HIDDEN,
                "output_channels": 8,
                "downsample_channels": [8, HIDDEN],
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "image_size": 64,
                "patch_size": 4,
                "mlp_dim": 48,
                "global_attn_indexes": [1],
                "window_size": 4,
            },
            "encoder_config": VISION | {"image_size": 16, "patch_size": 4},
        },
        pixels={"size": {"height": 64, "width": 64}, "tile_size": 32, "max_patches": 4},
        arguments={"patch_size": 4, "downsample_ratio": 4},
        projector=r"model\.(multi_modal_projector\.|view_separator|image_newline)",
    ),
}

ROWS_M_TO_V = ("qwen4_exp", "nemotron_h_omni")
"""Types that get a row for each packed document: linear attention and state-space layers."""

OF_TORCHVISION = ("muse_glimmer", "muse_spark", "nemotron_h_omni", "step3p7", "unlimited_ocr")
"""Types whose image processor has no back end but torchvision."""

REFUSED_M_TO_V = (
    "pi0",
    "pp_formulanet",
    "shieldgemma2",
    "udop",
)
"""Types that do not train on conversations with images: `tests/models/test_image_types_m_to_v.py`."""
