"""More types of tiny models of images and text, from BLIP to Granite: with the processors of the types
in `vision_types`, or with their own."""

from dataclasses import replace

from tests.vision_types import (
    HIDDEN,
    QWEN_PIXELS,
    QWEN_VISION,
    SQUARE,
    VISION,
    VisionType,
    glm,
    mrope,
    qwen,
)

_ERNIE = {
    "image_token": "<|IMAGE_PLACEHOLDER|>",
    "image_start_token": "<|IMAGE_START|>",
    "image_end_token": "<|IMAGE_END|>",
    "video_token": "<|VIDEO_PLACEHOLDER|>",
    "video_start_token": "<|VIDEO_START|>",
    "video_end_token": "<|VIDEO_END|>",
}
_DOTS = {
    "image_token": "<|imgpad|>",
    "video_token": "<|video_pad|>",
    "audio_token": "<|audio_comp_pad|>",
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "index_head_dim": 8,
    "index_n_heads": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "mlp_layer_types": ["dense", "sparse"],
}

B_TO_G: dict[str, VisionType] = {
    "cosmos3_omni": qwen(
        "Qwen3VLProcessor",
        mrope(2, 1, 1),
        {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
    "granite_docling": VisionType(
        processor="GraniteDoclingProcessor",
        image_processor="GraniteDoclingImageProcessor",
        tokens={
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
        }
        | {name: name for row in "123" for name in (f"<row_{row}_col_{c}>" for c in "123")},
        placeholder="<image>",
        ids={"image_token_id": "<image>"},
        text={"embedding_multiplier": 2.0, "attention_multiplier": 0.25, "logits_scaling": 2.0},
        vision=VISION
        | {"out_hidden_size": HIDDEN, "scale_factor": 2, "deepstack_visual_indexes": [0]},
        pixels=SQUARE | {"max_patches": 3},
        arguments={"image_seq_len": 4},
        projector=r"model\.vision_model\.connector\.",
    ),
    "ernie4_5_vl_moe": VisionType(
        processor="Ernie4_5_VLMoeProcessor",
        image_processor="Ernie4_5_VLMoeImageProcessor",
        tokens=_ERNIE,
        placeholder="<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
        ids={f"{name}_id": token for name, token in _ERNIE.items()},
        text=mrope(1, 1, 2)
        | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": [16, 16]}
        | {"moe_num_shared_experts": 1},
        vision={
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 48,
            "num_heads": 2,
            "patch_size": 4,
        },
        pixels=QWEN_PIXELS | {"temporal_patch_size": 1},
        projector=r"model\.resampler_model\.",
    ),
    "glm5_next": replace(
        glm("Glm5NextProcessor", "Glm5NextImageProcessor"),
        text=_LATENT
        | {
            "index_topk": 64,
            "index_kpool": 4,
            "layer_types": ["linear_attention", "indexed_attention"],
            "indexer_types": ["full", "full"],
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "hc_mult": 2,
        },
        vision=QWEN_VISION | {"image_size": 32, "projection_intermediate_size": 48},
    ),
    "dots3_note": VisionType(
        processor="Dots3NoteProcessor",
        image_processor="Qwen2VLImageProcessor",
        tokens=_DOTS,
        placeholder="<|imgpad|>",
        ids={f"{name}_id": token for name, token in _DOTS.items()},
        text=_LATENT
        | {
            "head_dim": 16,
            "qk_rope_head_dim": 8,
            "index_topk": 64,
            "shared_experts_intermediate_size": 16,
            "layer_types": ["indexed_attention", "sliding_attention"],
            "sliding_window_size": 16,
            "per_layer_config": {
                1: {
                    "num_attention_heads": 2,
                    "num_key_value_heads": 2,
                    "q_lora_rank": 16,
                    "kv_lora_rank": 16,
                    "head_dim": 16,
                    "qk_nope_head_dim": 8,
                    "qk_rope_head_dim": 8,
                    "v_head_dim": 8,
                }
            },
        },
        vision={
            "hidden_size": HIDDEN,
            "intermediate_size": 48,
            "moe_intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "patch_size": 4,
            "mlp_layer_types": ["dense", "sparse"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "adapter_in_dim": HIDDEN,
            "adapter_out_dim": HIDDEN,
        },
        config={
            "audio_config": {
                "model_type": "dots3_note_audio_encoder",
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "downsample_hidden_size": 8,
                "feature_size": 16,
                "adapter_input_size": 16,
                "adapter_out_dim": HIDDEN,
            }
        },
        pixels=QWEN_PIXELS | {"temporal_patch_size": 1},
        projector=r"model\.vision_tower\.merger\.",
    ),
}
