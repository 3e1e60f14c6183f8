"""Types of tiny models of images and text whose processor or vision tower needs torchvision or
timm."""

from tests.vision_types import HIDDEN, VISION, VOCABULARY, VisionType, llava

_GEMMA = {
    "image_token": "<image_soft_token>",
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "audio_token": "<audio_soft_token>",
    "boa_token": "<start_of_audio>",
    "eoa_token": "<end_of_audio>",
}
_SLIDING = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}

TYPES_OF_TORCHVISION: dict[str, VisionType] = {
    "cohere2_vision": VisionType(
        processor="Cohere2VisionProcessor",
        image_processor="Cohere2VisionImageProcessor",
        tokens={
            "image_token": "<|IMG_PATCH|>",
            "boi_token": "<|START_OF_IMG|>",
            "eoi_token": "<|END_OF_IMG|>",
            "img_line_break_token": "<|IMG_LINE_BREAK|>",
        },
        placeholder="<|IMG_PATCH|>",
        ids={"image_token_id": "<|IMG_PATCH|>"},
        text={"sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"]},
        config={"alignment_intermediate_size": 48},
        pixels={"size": {"height": 32, "width": 32}, "patch_size": 2, "max_patches": 3},
    ),
    "gemma4_unified": VisionType(
        processor="Gemma4UnifiedProcessor",
        image_processor="Gemma4UnifiedImageProcessor",
        tokens={**_GEMMA, "video_token": "<|video|>"},
        placeholder="<image_soft_token>",
        ids={
            "image_token_id": "<image_soft_token>",
            "boi_token_id": "<start_of_image>",
            "eoi_token_id": "<end_of_image>",
            "audio_token_id": "<audio_soft_token>",
            "boa_token_id": "<start_of_audio>",
            "eoa_token_index": "<end_of_audio>",
            "video_token_id": "<|video|>",
        },
        text=_SLIDING | {"global_head_dim": 8, "use_bidirectional_attention": "vision"},
        vision={
            "patch_size": 4,
            "mm_embed_dim": HIDDEN,
            "mm_posemb_size": 32,
            "output_proj_dims": HIDDEN,
        },
        config={"audio_config": None},
        pixels={"patch_size": 4, "max_soft_tokens": 70},
        parts=("language", "projector"),
        projector=r"model\.embed_vision\.",
    ),
    "molmo2": VisionType(
        processor="Molmo2Processor",
        image_processor="Molmo2ImageProcessor",
        tokens={
            token: token
            for token in ("<im_patch>", "<im_col>", "<im_start>", "<low_res_im_start>", "<im_end>")
            + ("<frame_start>", "<frame_end>", "<im_low>")
        }
        | {"image_token": "<|image|>", "video_token": "<|video|>"},
        placeholder="<|image|>",
        ids={
            "image_patch_id": "<im_patch>",
            "image_start_token_id": "<im_start>",
            "low_res_image_start_token_id": "<low_res_im_start>",
            "image_end_token_id": "<im_end>",
            "frame_start_token_id": "<frame_start>",
            "frame_end_token_id": "<frame_end>",
        },
        text={"additional_vocab_size": 8},
        vision=VISION
        | {"patch_size": 4, "image_size": [32, 32], "num_key_value_heads": 4, "head_dim": 8},
        config={
            "adapter_config": {
                "vision_feature_layer": [-1, -2],
                "hidden_size": HIDDEN,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "head_dim": 8,
                "intermediate_size": 48,
                "text_hidden_size": HIDDEN,
            }
        },
        pixels={
            "size": {"height": 32, "width": 32},
            "patch_size": 4,
            "overlap_margins": [1, 1],
            "max_crops": 3,
        },
        n_before=1,
    ),
}
"""Types whose image processor has no back end but torchvision."""

TYPES_OF_TIMM: dict[str, VisionType] = {
    "perception_lm": VisionType(
        processor="PerceptionLMProcessor",
        image_processor="PerceptionLMImageProcessor",
        tokens={"image_token": "<|image|>", "video_token": "<|video|>"},
        placeholder="<|image|>",
        ids={"image_token_id": "<|image|>", "video_token_id": "<|video|>"},
        vision={
            "architecture": "vit_pe_lang_large_patch14_448",
            "do_pooling": False,
            "model_args": {
                "embed_dim": HIDDEN,
                "depth": 2,
                "num_heads": 4,
                "patch_size": 8,
                "img_size": [32, 32],
                "ref_feat_shape": [4, 4],
            },
        },
        config={"projector_pooling_ratio": 2},
        pixels={"tile_size": 32, "max_num_tiles": 4},
        arguments={"patch_size": 8, "pooling_ratio": 2},
    ),
    "fast_vlm": llava(
        "LlavaProcessor",
        "CLIPImageProcessor",
        vision={
            "architecture": "fastvit_mci3",
            "do_pooling": True,
            "global_pool": "avg",
            "hidden_size": 256,
            "model_args": {
                "inference_mode": True,
                "layers": [1] * 5,
                "embed_dims": [8, 16, 32, 64, 128],
            },
        },
        pixels={"size": {"shortest_edge": 128}, "crop_size": {"height": 128, "width": 128}},
        arguments={
            "patch_size": 64,
            "num_additional_image_tokens": 0,
            "vision_feature_select_strategy": "full",
        },
    ),
    "gemma3n": VisionType(
        processor="Gemma3nProcessor",
        image_processor="SiglipImageProcessor",
        tokens=_GEMMA,
        placeholder="<image_soft_token>",
        ids={
            "image_token_id": "<image_soft_token>",
            "boi_token_id": "<start_of_image>",
            "eoi_token_id": "<end_of_image>",
            "audio_token_id": "<audio_soft_token>",
            "boa_token_id": "<start_of_audio>",
            "eoa_token_id": "<end_of_audio>",
        },
        text=_SLIDING
        | {
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
            "altup_num_inputs": 2,
            "num_kv_shared_layers": 0,
            "laurel_rank": 8,
            "activation_sparsity_pattern": None,
        },
        vision={"architecture": "test_convnext", "hidden_size": 64},
        config={
            "vision_soft_tokens_per_image": 4,
            "audio_config": {
                "hidden_size": 16,
                "conf_num_hidden_layers": 1,
                "conf_num_attention_heads": 2,
                "sscp_conv_channel_size": [4, 4],
                "vocab_size": 8,
                "vocab_offset": VOCABULARY,
            },
        },
        pixels={"size": {"height": 64, "width": 64}},
        arguments={"image_seq_length": 4},
        projector=r"model\.embed_vision\.",
    ),
}
"""Types whose vision tower is a model of timm, which needs torchvision."""

TYPES_OF_JOINED_TILES = ("perception_lm",)
"""Types whose processor does not stack images with different numbers of tiles, which their class
joins."""
