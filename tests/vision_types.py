"""Types of tiny models of images and text, by what differs between them."""

from dataclasses import dataclass, field
from typing import Any

VOCABULARY = 384
HIDDEN = 32

VISION = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "patch_size": 8,
    "image_size": 32,
}
QWEN_VISION = {
    "depth": 2,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_heads": 4,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": HIDDEN,
}
QWEN_PIXELS = {
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 16 * 16, "longest_edge": 48 * 48},
}
SQUARE = {"size": {"height": 32, "width": 32}}


@dataclass(frozen=True)
class VisionType:
    """What differs between types of models."""

    processor: str
    """Name of the class of the processor."""
    image_processor: str
    tokens: dict[str, str]
    """Special tokens by the names that the processor looks up in the tokenizer."""
    placeholder: str
    """What the chat template writes for an image."""
    ids: dict[str, str]
    """Field of the configuration → the special token whose id it holds."""
    text: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] = field(default_factory=lambda: dict(VISION))
    config: dict[str, Any] = field(default_factory=dict)
    pixels: dict[str, Any] = field(default_factory=lambda: dict(SQUARE))
    """Values of the image processor."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Values of the processor."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Values of the tokenizer, which processors take for options of images too."""
    id_lists: dict[str, list[str]] = field(default_factory=dict)
    """Field of the configuration → the special tokens whose ids it lists."""
    id_maps: dict[str, list[str]] = field(default_factory=dict)
    """Field of the configuration → the special tokens whose ids it has by their text."""
    model_type: str = ""
    """Type of the configuration, if it has another name."""
    sections: tuple[str, str] = ("text_config", "vision_config")
    """Sections of the configuration for the language model and the vision tower."""
    parts: tuple[str, ...] = ("language", "projector", "vision")
    """Parts of the class."""
    n_before: int = 0
    """Tokens that the processor writes before each text, besides those of the template."""
    n_virtual: int = 0
    """Tokens of an image in a sample of ours that the processor does not write."""
    projector: str = r"model\.multi_modal_projector\."
    """Pattern of the names of parameters between the vision tower and the language model."""
    is_flat: bool = False
    """True if the processor takes the images of all samples in one list."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options for a call of the processor."""


def qwen(processor: str, text: dict[str, Any], vision: dict[str, Any]) -> VisionType:
    tokens = {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_start_token": "<|vision_start|>",
        "vision_end_token": "<|vision_end|>",
    }
    return VisionType(
        processor=processor,
        image_processor="Qwen2VLImageProcessor",
        tokens=tokens,
        placeholder="<|vision_start|><|image_pad|><|vision_end|>",
        ids={f"{name}_id": token for name, token in tokens.items()},
        text=text,
        vision=QWEN_VISION | vision,
        pixels=QWEN_PIXELS,
        projector=r"model\.visual\.(deepstack_merger_list|merger)\.",
    )


def mrope(*sections: int, **more: Any) -> dict[str, Any]:
    parameters = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": list(sections)}
    return {"rope_parameters": parameters | more}


def _idefics(processor: str, image_processor: str) -> VisionType:
    rows = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    return VisionType(
        processor=processor,
        image_processor=image_processor,
        tokens={
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "end_of_utterance_token": "<end_of_utterance>",
        }
        | {row: row for row in rows},
        placeholder="<image>",
        ids={"image_token_id": "<image>"},
        config={"scale_factor": 2},
        pixels={"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}},
        arguments={"image_seq_len": 4},
        projector=r"model\.connector\.",
    )


def llava(processor: str, image_processor: str, **differences: Any) -> VisionType:
    values: dict[str, Any] = {
        "tokens": {"image_token": "<image>"},
        "placeholder": "<image>",
        "ids": {"image_token_index": "<image>"},
        "pixels": {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}},
        "arguments": {
            "patch_size": 8,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
        },
    }
    for name, value in differences.items():
        values[name] = values.get(name, {}) | value if isinstance(value, dict) else value
    return VisionType(processor=processor, image_processor=image_processor, **values)


def glm(processor: str, image_processor: str) -> VisionType:
    tokens = {
        "image_token": "<|image|>",
        "video_token": "<|video|>",
        "image_start_token": "<|begin_of_image|>",
        "image_end_token": "<|end_of_image|>",
        "video_start_token": "<|begin_of_video|>",
        "video_end_token": "<|end_of_video|>",
    }
    return VisionType(
        processor=processor,
        image_processor=image_processor,
        tokens=tokens,
        placeholder="<|begin_of_image|><|image|><|end_of_image|>",
        ids={f"{name}_id": token for name, token in tokens.items()},
        text=mrope(2, 1, 1, partial_rotary_factor=1.0),
        vision=QWEN_VISION | {"image_size": 32},
        pixels=QWEN_PIXELS,
        projector=r"model\.visual\.(downsample|merger)\.",
    )


IMG = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
_HUNYUAN = {
    "image_start_token": "<image>",
    "image_token": "<image_pad>",
    "image_end_token": "</image>",
}
PIXTRAL = VISION | {"head_dim": 8, "image_size": 64}
GRIDS = {"image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]]}
LLAVA_PROJECTOR = r"model\.(multi_modal_projector\.|image_newline)"
LINEAR = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}

TYPES: dict[str, VisionType] = {
    "qwen3_vl": qwen(
        "Qwen3VLProcessor",
        mrope(2, 1, 1),
        {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
    "qwen3_vl_moe": qwen(
        "Qwen3VLProcessor",
        mrope(2, 1, 1) | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
    "smolvlm": _idefics("SmolVLMProcessor", "SmolVLMImageProcessor"),
    "gemma3": VisionType(
        processor="Gemma3Processor",
        image_processor="Gemma3ImageProcessor",
        tokens={
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
        placeholder="<start_of_image>",
        ids={
            "image_token_index": "<image_soft_token>",
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
        },
        text={"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
        config={"mm_tokens_per_image": 4},
        arguments={"image_seq_length": 4},
    ),
    "llava": llava("LlavaProcessor", "CLIPImageProcessor"),
    "internvl": VisionType(
        processor="InternVLProcessor",
        image_processor="GotOcr2ImageProcessor",
        tokens={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        placeholder="<IMG_CONTEXT>\n",
        ids={"image_token_id": "<IMG_CONTEXT>"},
        vision=VISION | {"patch_size": [8, 8], "image_size": [32, 32]},
        config={"image_seq_length": 4},
        pixels=SQUARE | {"max_patches": 3, "crop_to_patches": True},
        arguments={"image_seq_length": 4},
    ),
    "qwen2_vl": qwen("Qwen2VLProcessor", mrope(2, 1, 1), {"embed_dim": HIDDEN}),
    "qwen2_5_vl": qwen(
        "Qwen2_5_VLProcessor",
        mrope(2, 1, 1),
        {"window_size": 16, "fullatt_block_indexes": [1]},
    ),
    "qwen3_5": qwen(
        "Qwen3VLProcessor",
        mrope(2, 1, 1, partial_rotary_factor=1.0)
        | {"layer_types": ["linear_attention", "full_attention"]}
        | LINEAR,
        {"num_position_embeddings": 16},
    ),
    "idefics3": _idefics("Idefics3Processor", "Idefics3ImageProcessor"),
    "gemma4": VisionType(
        processor="Gemma4Processor",
        image_processor="Gemma4ImageProcessor",
        tokens={
            "image_token": "<|image|>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
            "video_token": "<|video|>",
        },
        placeholder="<|image|>",
        ids={
            "image_token_id": "<|image|>",
            "boi_token_id": "<|image>",
            "eoi_token_id": "<image|>",
            "audio_token_id": "<|audio|>",
            "boa_token_id": "<|audio>",
            "eoa_token_index": "<audio|>",
            "video_token_id": "<|video|>",
        },
        text={
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
            "global_head_dim": 8,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY,
            "use_bidirectional_attention": "vision",
        },
        vision=VISION
        | {
            "num_key_value_heads": 4,
            "head_dim": 8,
            "patch_size": 4,
            "position_embedding_size": 64,
        },
        config={"audio_config": None},
        pixels={"patch_size": 4, "max_soft_tokens": 70},
        projector=r"model\.embed_vision\.",
    ),
    "vipllava": llava(
        "LlavaProcessor", "CLIPImageProcessor", config={"vision_feature_layers": [-2, -1]}
    ),
    "llava_next": llava(
        "LlavaNextProcessor",
        "LlavaNextImageProcessor",
        config=GRIDS,
        pixels=GRIDS,
        projector=LLAVA_PROJECTOR,
    ),
    "llava_onevision": llava(
        "LlavaOnevisionProcessor",
        "LlavaOnevisionImageProcessor",
        tokens={"video_token": "<video>"},
        ids={"video_token_index": "<video>"},
        config=GRIDS,
        pixels=GRIDS | SQUARE,
        arguments={"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
        projector=LLAVA_PROJECTOR,
    ),
    "mistral3": VisionType(
        processor="PixtralProcessor",
        image_processor="PixtralImageProcessor",
        tokens=IMG,
        placeholder="[IMG]",
        ids={"image_token_index": "[IMG]"},
        vision=PIXTRAL,
        config={"spatial_merge_size": 2},
        pixels={"size": {"longest_edge": 64}, "patch_size": {"height": 8, "width": 8}},
        arguments={"patch_size": 8, "spatial_merge_size": 2},
    ),
    "glm4v": glm("Glm4vProcessor", "Glm4vImageProcessor"),
    "glm46v": glm("Glm46VProcessor", "Glm46VImageProcessor"),
    "aya_vision": VisionType(
        processor="AyaVisionProcessor",
        image_processor="GotOcr2ImageProcessor",
        tokens={
            token: token
            for token in (
                "<image>",
                "<|START_OF_IMG|>",
                "<|END_OF_IMG|>",
                "<|IMG_PATCH|>",
                "<|IMG_LINE_BREAK|>",
                "TILE_GLOBAL",
            )
        },
        placeholder="<image>",
        ids={"image_token_index": "<|IMG_PATCH|>"},
        text={"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
        config={"downsample_factor": 2},
        pixels=SQUARE | {"max_patches": 3},
        arguments={"patch_size": 8, "img_size": 32, "downsample_factor": 2},
    ),
    "ovis2": VisionType(
        processor="Ovis2Processor",
        image_processor="Ovis2ImageProcessor",
        tokens={
            token: token
            for token in (
                "<image>",
                "<IMG_ATOM>",
                "<IMG_START>",
                "<IMG_GRID>",
                "<IMG_COL>",
                "<IMG_ROW>",
                "<IMG_END>",
            )
        },
        placeholder="<image>",
        ids={"image_token_id": "<IMG_ATOM>"},
        id_lists={
            "visual_indicator_token_ids": [
                "<IMG_START>",
                "<IMG_GRID>",
                "<IMG_COL>",
                "<IMG_ROW>",
                "<IMG_END>",
            ]
        },
        vision=VISION | {"vocab_size": 16, "hidden_stride": 2},
        config={"vocab_size": VOCABULARY, "hidden_size": HIDDEN},
        pixels=SQUARE | {"crop_to_patches": True, "max_patches": 3},
        arguments={"image_seq_length": 4},
        projector=r"model\.(visual_embeddings_table|vision_tower\.head_(linear|norm))\.",
    ),
    "got_ocr2": VisionType(
        processor="GotOcr2Processor",
        image_processor="GotOcr2ImageProcessor",
        tokens={"image_token": "<imgpad>", "start": "<img>", "end": "</img>"},
        placeholder="<img><imgpad></img>",
        ids={"image_token_index": "<imgpad>"},
        # The processor always writes 256 tokens: of 64 x 64 patches, by two strides of two.
        vision=VISION
        | {
            "patch_size": 2,
            "image_size": 128,
            "output_channels": 32,
            "mlp_dim": 48,
            "global_attn_indexes": [],
        },
        config={"image_seq_length": 256},
        pixels={"size": {"height": 128, "width": 128}},
        is_flat=True,
    ),
    "hunyuan_vl": VisionType(
        processor="HunYuanVLProcessor",
        image_processor="HunYuanVLImageProcessor",
        tokens=_HUNYUAN,
        placeholder="".join(_HUNYUAN.values()),
        ids={
            "image_token_id": _HUNYUAN["image_token"],
            "im_start_id": _HUNYUAN["image_start_token"],
            "im_end_id": _HUNYUAN["image_end_token"],
        },
        text=mrope(1, 1, 1, 1),
        vision=VISION | {"patch_size": 4, "out_hidden_size": HIDDEN},
        pixels=QWEN_PIXELS | {"temporal_patch_size": 1},
        projector=r"model\.vision_tower\.patch_merger\.",
    ),
    "paddleocr_vl": VisionType(
        processor="PaddleOCRVLProcessor",
        image_processor="PaddleOCRVLImageProcessor",
        tokens={"image_token": "<|IMAGE_PLACEHOLDER|>", "start": "<|IMAGE_START|>"},
        placeholder="<|IMAGE_START|><|IMAGE_PLACEHOLDER|>",
        ids={"image_token_id": "<|IMAGE_PLACEHOLDER|>", "vision_start_token_id": "<|IMAGE_START|>"},
        text=mrope(2, 1, 1),
        vision=VISION | {"patch_size": 4},
        pixels=QWEN_PIXELS | {"temporal_patch_size": 1},
        projector=r"model\.projector\.",
    ),
    "video_llama_3": VisionType(
        processor="VideoLlama3Processor",
        image_processor="VideoLlama3ImageProcessor",
        tokens={"image_token": "<image>", "video_token": "<video>"},
        placeholder="<image>",
        ids={"image_token_id": "<image>", "video_token_id": "<video>"},
        vision=VISION | {"patch_size": 4},
        pixels=QWEN_PIXELS | {"temporal_patch_size": 1, "merge_size": 2},
        projector=r"model\.projector\.",
    ),
    "lighton_ocr": VisionType(
        processor="LightOnOcrProcessor",
        image_processor="PixtralImageProcessor",
        tokens=IMG,
        placeholder="[IMG]",
        ids={"image_token_id": "[IMG]"},
        vision=PIXTRAL,
        config={"spatial_merge_size": 2},
        pixels={"size": {"longest_edge": 64}, "patch_size": {"height": 16, "width": 16}},
        arguments={"patch_size": 8, "spatial_merge_size": 2},
        projector=r"model\.vision_projection\.",
    ),
    "deepseek_vl": VisionType(
        processor="DeepseekVLProcessor",
        image_processor="DeepseekVLImageProcessor",
        tokens={"image_token": "<image_placeholder>"},
        placeholder="<image_placeholder>",
        ids={"image_token_id": "<image_placeholder>"},
        arguments={"num_image_tokens": 16},
        projector=r"model\.aligner\.",
    ),
}
