"""Types of tiny models of images and text from Idefics 2 to MiniCPM-V."""

import importlib.util
from dataclasses import replace

from tests.vision_types import HIDDEN, LINEAR, QWEN_PIXELS, SQUARE, VISION, VisionType, mrope, qwen

_MINICPM = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "image_start_token": "<image>",
    "image_end_token": "</image>",
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
}


def _minicpm(processor: str) -> VisionType:
    return VisionType(
        processor=processor,
        image_processor="MiniCPMV4_6ImageProcessor",
        tokens=_MINICPM,
        placeholder="<|image_pad|>",
        ids={"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"},
        text=mrope(2, 1, 1, partial_rotary_factor=1.0)
        | {"layer_types": ["linear_attention", "full_attention"]}
        | LINEAR,
        vision=VISION | {"patch_size": 4},
        config={"insert_layer_id": 0, "image_size": 32},
        pixels={"patch_size": 4, "scale_resolution": 32, "max_slice_nums": 3},
        projector=r"model\.merger\.",
    )


_KIMI = {
    "image_token": "<|media_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|media_begin|>",
    "vision_end_token": "<|media_end|>",
}
_LLAMA_4 = (
    "<|image|>",
    "<|image_start|>",
    "<|image_end|>",
    "<|patch|>",
    "<|tile_x_separator|>",
    "<|tile_y_separator|>",
)
_MINIMAX = {
    "image_token": "]<]image[>[",
    "video_token": "]<]video[>[",
    "start": "]<]start of image[>[",
    "end": "]<]end of image[>[",
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}

WITH_TORCHVISION: dict[str, VisionType] = {
    "llama4": VisionType(
        processor="Llama4Processor",
        image_processor="Llama4ImageProcessor",
        tokens={token: token for token in _LLAMA_4},
        placeholder="<|image|>",
        ids={
            "image_token_index": "<|patch|>",
            "boi_token_index": "<|image_start|>",
            "eoi_token_index": "<|image_end|>",
        },
        text={
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 0],
            "layer_types": ["chunked_attention", "full_attention"],
            "attention_chunk_size": 2048,
        },
        vision=VISION
        | {
            "intermediate_size": 128,
            "vision_output_dim": 24,
            "projector_input_dim": 24,
            "projector_output_dim": 24,
        },
        pixels=SQUARE | {"max_patches": 3},
        arguments={"patch_size": 8},
        projector=r"multi_modal_projector\.|vision_model\.vision_adapter\.",
    ),
    "lfm2_vl": VisionType(
        processor="Lfm2VlProcessor",
        image_processor="Lfm2VlImageProcessor",
        tokens={
            "image_token": "<image>",
            "image_start_token": "<|image_start|>",
            "image_end_token": "<|image_end|>",
            "image_thumbnail_token": "<|img_thumbnail|>",
        }
        | {
            token: token
            for token in (
                f"<|img_row_{row}_col_{column}|>" for row in range(1, 4) for column in range(1, 4)
            )
        },
        placeholder="<image>",
        ids={"image_token_id": "<image>"},
        text={"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "block_ff_dim": 48},
        vision=VISION | {"num_patches": 16},
        config={"projector_hidden_size": 48},
        pixels={
            "encoder_patch_size": 8,
            "tile_size": 32,
            "size": {"height": 32, "width": 32},
            "max_tiles": 3,
            "min_image_tokens": 4,
            "max_image_tokens": 9,
        },
    ),
    "kimi_k25": VisionType(
        processor="Kimi_K25Processor",
        image_processor="Kimi_K25ImageProcessor",
        tokens=_KIMI,
        placeholder="<|media_begin|><|media_pad|><|media_end|>",
        ids={f"{name}_id": token for name, token in _KIMI.items()},
        text=_LATENT
        | {"n_routed_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
        vision={
            "hidden_size": HIDDEN,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "patch_size": 4,
            "pos_emb_height": 8,
            "pos_emb_width": 8,
        },
        config={"projection_hidden_size": HIDDEN},
        pixels={"patch_size": 4, "max_patches": 144, "size": {"max_height": 48, "max_width": 48}},
        projector=r"model\.(mm_projector|multi_modal_projector)\.",
    ),
    "minimax_m3_vl": VisionType(
        processor="MiniMaxM3VLProcessor",
        image_processor="MiniMaxM3VLImageProcessor",
        tokens=_MINIMAX,
        placeholder="]<]image[>[",
        ids={"image_token_index": "]<]image[>[", "video_token_index": "]<]video[>["},
        text={
            "dense_intermediate_size": 48,
            "shared_intermediate_size": 16,
            "intermediate_size": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rotary_dim": 8,
            "mlp_layer_types": ["dense", "sparse"],
        },
        vision=VISION | {"patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2},
        config={"projector_hidden_size": HIDDEN},
        pixels=QWEN_PIXELS,
    ),
    "inkling2": VisionType(
        processor="Inkling2Processor",
        image_processor="Inkling2ImageProcessor",
        tokens={"image_token": "<image>"},
        placeholder="<image>",
        ids={"image_token_id": "<image>"},
        text={
            "unpadded_vocab_size": 384,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 8,
            "sliding_window_size": 16,
            "d_rel": 4,
            "rel_extent": 32,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_layers_per_attn_res_block": 1,
        },
        vision={
            "hidden_size": HIDDEN,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "patch_size": 8,
            "posemb_grid_size": 4,
            "projection_hidden_dim": 48,
            "text_hidden_size": HIDDEN,
        },
        pixels={"size": {"height": 16, "width": 16}},
        projector=r"model\.vision_tower\.merger\.",
    ),
    "inkling_mm_model": VisionType(
        processor="InklingProcessor",
        image_processor="InklingImageProcessor",
        tokens={
            "image_token": "<image>",
            "audio_token": "<audio>",
            "image_bos_token": "<|content_image|>",
            "audio_bos_token": "<|content_audio_input|>",
        },
        placeholder="<|content_image|><image>",
        parts=("language", "vision"),
        ids={
            "image_token_id": "<image>",
            "audio_token_id": "<audio>",
            "image_bos_token_id": "<|content_image|>",
            "audio_bos_token_id": "<|content_audio_input|>",
        },
        text={
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 8,
            "sliding_window_size": 16,
            "d_rel": 4,
            "rel_extent": 32,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "logits_mup_width_multiplier": 1.0,
        },
        vision={
            "patch_size": 16,
            "hidden_size": HIDDEN,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "text_hidden_size": HIDDEN,
        },
        config={
            "audio_config": {"n_mel_bins": 8, "mel_vocab_size": 16, "text_hidden_size": HIDDEN}
        },
        pixels={"size": {"height": 16, "width": 16}},
    ),
    "minicpm_ocr": replace(
        _minicpm("MiniCPMOcrProcessor"),
        image_processor="MiniCPMOcrImageProcessor",
        config={"insert_layer_id": 0},
    ),
}
"""Types whose processor of images needs torchvision: compared where it is installed."""

I_TO_M_TYPES: dict[str, VisionType] = {
    "lfm3_vl": replace(
        qwen("Lfm3VlProcessor", {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3}, {}),
        vision={
            "hidden_size": HIDDEN,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "layer_types": ["conv", "full_attention"],
            "patch_size": 4,
        },
        config={"projector_hidden_size": 48},
        pixels=QWEN_PIXELS,
        projector=r"model\.multi_modal_projector\.",
    ),
    "minicpmv4_6": _minicpm("MiniCPMV4_6Processor"),
    "minicpmv4_7": replace(
        _minicpm("MiniCPMV4_7Processor"),
        ids={
            "image_token_id": "<|image_pad|>",
            "video_token_id": "<|video_pad|>",
            "image_start_id": "<image>",
            "image_end_id": "</image>",
            "slice_start_id": "<slice>",
            "slice_end_id": "</slice>",
        },
        config={"insert_layer_id": 0, "image_size": 32, "newline_id": 198},  # "\\n", of its bytes
    ),
    "idefics2": VisionType(
        processor="Idefics2Processor",
        image_processor="Idefics2ImageProcessor",
        tokens={
            "image_token": "<image>",
            "image_boundary_token": "<fake_token_around_image>",
            "end_of_utterance": "<end_of_utterance>",
        },
        placeholder="<image>",
        ids={"image_token_id": "<image>"},
        config={
            "perceiver_config": {
                "model_type": "idefics2_perceiver",
                "hidden_size": HIDDEN,
                "resampler_n_latents": 4,
                "resampler_depth": 1,
                "resampler_n_heads": 4,
                "resampler_head_dim": 8,
                "num_key_value_heads": 2,
            }
        },
        pixels={"size": {"shortest_edge": 32, "longest_edge": 64}, "do_image_splitting": False},
        arguments={"image_seq_len": 4},
        projector=r"model\.connector\.",
    ),
    "mllama": VisionType(
        processor="MllamaProcessor",
        image_processor="MllamaImageProcessor",
        tokens={"image_token": "<|image|>", "bos_token": "<|im_start|>"},
        placeholder="<|image|>",
        ids={"image_token_index": "<|image|>"},
        text={"num_hidden_layers": 3, "cross_attention_layers": [1]},
        vision=VISION
        | {"num_global_layers": 1, "intermediate_layers_indices": [0], "vision_output_dim": 64},
        pixels=SQUARE | {"max_image_tiles": 4},
    ),
} | (WITH_TORCHVISION if importlib.util.find_spec("torchvision") else {})

I_TO_M_IN_ROWS = (
    "inkling2",
    "inkling_mm_model",
    "lfm2_vl",
    "lfm3_vl",
    "llama4",
    "minicpmv4_6",
    "minicpmv4_7",
    "minicpm_ocr",
    "mllama",
)
"""With short convolutions, linear attention, or layers that read the images of a row."""

I_TO_M_REFUSED = (
    "instructblipvideo",
    "mistral4",
)
"""Types that are refused by name (tests/models/test_refused_images_i_to_m.py)."""
