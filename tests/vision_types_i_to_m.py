"""Types of tiny models of images and text from Idefics 2 to MiniCPM-V."""

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
}

I_TO_M_IN_ROWS = ("lfm3_vl", "minicpmv4_6", "minicpmv4_7", "mllama")
"""With short convolutions, linear attention, or layers that read the images of a row."""
