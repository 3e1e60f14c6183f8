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
_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "mlp_layer_types": ["dense", "sparse"],
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "index_head_dim": 8,
    "index_n_heads": 16,
    **_EXPERTS,
}
_CODES = [f"IMGIMG{letter}Z" for letter in "ABCDEFGHI"]
_VISUAL_TOKENS = [f"<|visual token {code:06d}|>" for code in range(16)]
_VQ = {
    "embed_dim": 4,
    "latent_channels": 4,
    "base_channels": 32,
    "channel_multiplier": [1, 1],
    "num_res_blocks": 1,
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
    "deepseek_ocr2": VisionType(
        processor="DeepseekOcr2Processor",
        image_processor="DeepseekOcr2ImageProcessor",
        tokens={"image_token": "<image>"},
        placeholder="<image>",
        ids={"image_token_id": "<image>"},
        text=_EXPERTS | {"n_shared_experts": 1},
        # The class has 256 learned queries for a page, and 144 for a part of it.
        vision={
            "sam_config": {
                "model_type": "deepseek_ocr2_sam_vision_model",
                "hidden_size": 16,
                "output_channels": 8,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 128,
                "patch_size": 2,
                "mlp_dim": 16,
                "window_size": 4,
                "global_attn_indexes": [],
                "downsample_channels": [8, 16],
            },
            "encoder_config": {
                "model_type": "deepseek_ocr2_encoder",
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "vocab_size": 8,
            },
        },
        pixels={"size": {"height": 128, "width": 128}, "tile_size": 96},
        arguments={"patch_size": 2, "downsample_ratio": 4},
        projector=r"model\.(multi_modal_projector\.|view_separator)",
    ),
    "chameleon": VisionType(
        processor="ChameleonProcessor",
        image_processor="ChameleonImageProcessor",
        tokens={
            "image_token": "<image>",
            "boi_token": "<racm3:break>",
            "eoi_token": "<eoss>",
            "sep_token": "<reserved08706>",
        }
        | {token: token for token in _CODES},
        placeholder="<image>",
        ids={},
        id_maps={"vocabulary_map": ["<image>", *_CODES]},
        vision={},
        config={"vq_config": _VQ | {"resolution": 8, "num_embeddings": len(_CODES)}},
        pixels={"size": {"shortest_edge": 8}, "crop_size": {"height": 8, "width": 8}},
        arguments={"image_seq_length": 16},
        options={"return_for_text_completion": True},
        parts=("language", "vision"),
    ),
    "emu3": VisionType(
        processor="Emu3Processor",
        image_processor="Emu3ImageProcessor",
        tokens={
            "image_token": "<image>",
            "boi_token": "<|image start|>",
            "eoi_token": "<|image end|>",
            "image_wrapper_token": "<|image token|>",
            "eof_token": "<|extra_201|>",
            "bos_token": "<|extra_203|>",
            "eol": "<|extra_200|>",
        }
        | {token: token for token in _VISUAL_TOKENS},
        placeholder="<image>",
        ids={},
        id_maps={"vocabulary_map": ["<image>", "<|extra_200|>", *_VISUAL_TOKENS]},
        text={"attention_dropout": 0.0},
        vision={},
        config={
            "vq_config": _VQ
            | {"channel_multiplier": [1, 1, 1, 1], "attn_resolutions": []}
            | {"codebook_size": len(_VISUAL_TOKENS), "hidden_size": 32}
        },
        pixels={"min_pixels": 256, "max_pixels": 1024},
        n_before=1,
        parts=("language", "vision"),
    ),
}

B_TO_G_REFUSED = ("diffusion_gemma", "evolla")
"""Types that are refused by name (tests/models/test_refused_images.py)."""
