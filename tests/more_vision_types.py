"""More types of tiny models of images and text, which fewer tests train: with the processors of the
types in `vision_types`, or with their own."""

from dataclasses import replace

from tests.vision_types import (
    GRIDS,
    HIDDEN,
    IMG,
    LINEAR,
    LLAVA_PROJECTOR,
    PIXTRAL,
    QWEN_PIXELS,
    QWEN_VISION,
    SQUARE,
    VISION,
    VisionType,
    glm,
    llava,
    mrope,
    qwen,
)

_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_FEATURES = QWEN_VISION | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
_PADS = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
_COMPASS = {
    "image_token": "<|IMAGE_PAD|>",
    "video_token": "<|VIDEO_PAD|>",
    "vision_start_token": "<|VISION_START|>",
    "vision_end_token": "<|VISION_END|>",
}


def _with_experts() -> VisionType:
    dense = glm("Glm4vProcessor", "Glm4vImageProcessor")
    return replace(dense, text=dense.text | _EXPERTS | {"n_routed_experts": 4})


MORE_TYPES: dict[str, VisionType] = {
    "glm_ocr": glm("Glm46VProcessor", "Glm46VImageProcessor"),
    "glmga": glm("Glm46VProcessor", "GlmgaImageProcessor"),
    "glm4v_moe": _with_experts(),
    "qwen3_5_moe": qwen(
        "Qwen3VLProcessor",
        mrope(2, 1, 1, partial_rotary_factor=1.0)
        | {"layer_types": ["linear_attention", "full_attention"], "num_experts": 4}
        | {"shared_expert_intermediate_size": 16}
        | LINEAR
        | _EXPERTS,
        {"num_position_embeddings": 16},
    ),
    "exaone4_5": replace(
        qwen(
            "Exaone4_5_Processor",
            {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
            {"window_size": 16, "fullatt_block_indexes": [1], "num_key_value_heads": 2},
        ),
        ids=_PADS,
    ),
    "hyperclovax_vision_v2": replace(
        qwen("HyperCLOVAXVisionV2Processor", {}, {"window_size": 16, "fullatt_block_indexes": [1]}),
        ids=_PADS,
        projector=r"model\.(projector|vision_model\.merger)\.",
    ),
    "cohere_compass": VisionType(
        processor="CohereCompassProcessor",
        image_processor="CohereCompassImageProcessor",
        tokens=_COMPASS,
        placeholder="<|VISION_START|><|IMAGE_PAD|><|VISION_END|>",
        ids={f"{name}_id": token for name, token in _COMPASS.items()},
        text={
            "layer_types": ["full_attention"] * 2,
            "rope_parameters": {"full_attention": mrope(2, 1, 1)["rope_parameters"]},
        },
        vision=_FEATURES,
        pixels=QWEN_PIXELS,
        projector=r"model\.visual\.(deepstack_merger_list|merger)\.",
    ),
    "cosmos3_edge": replace(
        qwen("Cosmos3EdgeProcessor", mrope(2, 1, 1), {}),
        image_processor="Cosmos3EdgeImageProcessor",
        vision=VISION | {"patch_size": 4, "num_patches": 16, "spatial_merge_size": 2},
        config={"projector_hidden_size": 48},
        pixels={name: QWEN_PIXELS[name] for name in ("patch_size", "merge_size", "size")},
        options={"return_mm_token_type_ids": True},
        projector=r"model\.projector\.",
    ),
    "aria": VisionType(
        processor="AriaProcessor",
        image_processor="AriaImageProcessor",
        tokens={"image_token": "<image>"},
        placeholder="<image>",
        ids={"image_token_index": "<image>"},
        text={"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
        vision=VISION | {"image_size": 980, "patch_size": 70},
        config={"projector_patch_to_query_dict": {49: 4, 196: 8}},
        pixels={"max_image_size": 490, "min_image_size": 56},
        arguments={"size_conversion": {490: 4, 980: 8}},
    ),
    "janus": VisionType(
        processor="JanusProcessor",
        image_processor="JanusImageProcessor",
        tokens={
            "image_token": "<image_placeholder>",
            "boi_token": "<begin_of_image>",
            "eoi_token": "<end_of_image>",
        },
        placeholder="<image_placeholder>",
        ids={"image_token_id": "<image_placeholder>"},
        vision=VISION | {"projection_dim": HIDDEN, "num_image_tokens": 16},
        config={
            "vq_config": {
                "model_type": "janus_vqgan",
                "num_embeddings": 16,
                "latent_channels": 32,
                "base_channels": 32,
                "channel_multiplier": [1, 1],
                "num_res_blocks": 1,
                "projection_dim": HIDDEN,
                "image_token_embed_dim": HIDDEN,
            }
        },
        pixels=SQUARE | {"min_size": 8},
        arguments={"num_image_tokens": 16},
        projector=r"model\.(generation_)?aligner\.",
    ),
    "qianfan_ocr": VisionType(
        processor="QianfanOCRProcessor",
        image_processor="GotOcr2ImageProcessor",
        tokens={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "placeholder": "<image>",
        },
        placeholder="<image>",
        ids={"image_token_id": "<IMG_CONTEXT>"},
        vision=VISION | {"patch_size": [8, 8], "image_size": [32, 32], "drop_path_rate": 0.0},
        config={"image_seq_length": 4},
        pixels=SQUARE | {"max_patches": 3, "crop_to_patches": True},
        arguments={"image_seq_length": 4},
    ),
    "granite4_vision": llava(
        "Granite4VisionProcessor",
        "LlavaNextImageProcessor",
        vision=VISION | {"hidden_size": 64},
        config=GRIDS
        | {
            "downsample_rate": "1/2",
            "deepstack_layer_map": [[-2, 0]],
            "spatial_target_layers": [1],
            "projector_dropout": 0.0,
            "qformer_config": {
                "model_type": "blip_2_qformer",
                "num_hidden_layers": 1,
                "intermediate_size": 48,
                "hidden_dropout_prob": 0.0,
                "attention_probs_dropout_prob": 0.0,
            },
        },
        pixels=GRIDS,
        arguments={"downsample_rate": "1/2"},
        projector=r"model\.(layerwise_projectors\.|spatial_projectors\.|image_newline)",
    ),
    "llava_next_video": llava(
        "LlavaNextVideoProcessor",
        "LlavaNextImageProcessor",
        tokens={"video_token": "<video>"},
        ids={"video_token_index": "<video>"},
        config=GRIDS,
        pixels=GRIDS,
        projector=LLAVA_PROJECTOR,
    ),
    "video_llava": llava(
        "VideoLlavaProcessor",
        "VideoLlavaImageProcessor",
        tokens={"video_token": "<video>"},
        ids={"video_token_index": "<video>"},
    ),
    "deepseek_vl_hybrid": VisionType(
        processor="DeepseekVLHybridProcessor",
        image_processor="DeepseekVLHybridImageProcessor",
        tokens={"image_token": "<image_placeholder>"},
        placeholder="<image_placeholder>",
        ids={"image_token_id": "<image_placeholder>"},
        config={
            "high_res_vision_config": {
                "model_type": "sam_vision_model",
                "hidden_size": HIDDEN,
                "output_channels": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "image_size": 64,
                "patch_size": 8,
                "mlp_dim": 48,
                "global_attn_indexes": [1],
                "window_size": 4,
            }
        },
        pixels=SQUARE | {"high_res_size": {"height": 64, "width": 64}},
        arguments={"num_image_tokens": 16},
        projector=r"model\.aligner\.",
    ),
    "mistral_large4": VisionType(
        processor="PixtralProcessor",
        image_processor="PixtralImageProcessor",
        tokens=IMG,
        placeholder="[IMG]",
        ids={"image_token_index": "[IMG]"},
        text={
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "mlp_layer_types": ["dense", "sparse"],
        }
        | _EXPERTS,
        vision=PIXTRAL,
        config={"spatial_merge_size": 2},
        pixels={"size": {"longest_edge": 64}, "patch_size": {"height": 8, "width": 8}},
        arguments={"patch_size": 8, "spatial_merge_size": 2},
    ),
}
