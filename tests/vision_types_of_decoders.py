"""Types of tiny encoder-decoders whose encoder reads images."""

from tests.vision_types import HIDDEN, VISION, VOCABULARY, VisionType

_SECTIONS = ("decoder", "encoder")
_TOKENS = {"bos_token": "<s>", "mask": "<mask>"}
_DECODER = {
    "is_decoder": True,
    "add_cross_attention": True,
    "decoder_ffn_dim": 48,
    "dropout": 0.0,
}
_SWIN = {
    "model_type": "donut-swin",
    "image_size": [32, 48],
    "patch_size": 4,
    "embed_dim": HIDDEN // 2,
    "depths": [1, 1],
    "num_heads": [2, 4],
    "window_size": 4,
    "drop_path_rate": 0.0,
}

_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
_GEMMA = {
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
    "final_logit_softcapping": 2.0,
}

DECODER_TYPES: dict[str, VisionType] = {
    "trocr": VisionType(
        model_type="vision-encoder-decoder",
        processor="TrOCRProcessor",
        image_processor="ViTImageProcessor",
        tokens=_TOKENS,
        placeholder="<mask>",
        ids={"decoder_start_token_id": "<|im_end|>"},
        sections=_SECTIONS,
        text=_DECODER | {"model_type": "trocr", "layernorm_embedding": True},
        vision=VISION | {"model_type": "vit", "hidden_size": 24},
        projector=r"enc_to_dec_proj\.",
    ),
    "donut": VisionType(
        model_type="vision-encoder-decoder",
        processor="DonutProcessor",
        image_processor="DonutImageProcessor",
        tokens=_TOKENS | {"task": "<s_task>"},
        placeholder="<mask>",
        ids={"decoder_start_token_id": "<s_task>"},
        sections=_SECTIONS,
        text=_DECODER
        | {
            "model_type": "mbart",
            "decoder_layers": 2,
            "decoder_attention_heads": 4,
            "scale_embedding": True,
            "add_final_layer_norm": True,
        },
        vision=_SWIN,
        pixels={"size": {"height": 32, "width": 48}},
        parts=("language", "vision"),
        projector=r"$",
    ),
    "florence2": VisionType(
        processor="Florence2Processor",
        image_processor="CLIPImageProcessor",
        tokens=_TOKENS | {"image_token": "<image>"},
        placeholder="<mask>",
        ids={"image_token_id": "<image>"},
        text={
            "model_type": "bart",
            "d_model": HIDDEN,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "dropout": 0.0,
            "max_position_embeddings": 64,
        },
        vision={
            "depths": [1, 1],
            "patch_size": [7, 3],
            "patch_stride": [4, 2],
            "patch_padding": [3, 1],
            "patch_prenorm": [False, True],
            "embed_dim": [16, 24],
            "num_heads": [2, 4],
            "num_groups": [2, 4],
            "window_size": 4,
            "drop_path_rate": 0.0,
            "projection_dim": HIDDEN,
        },
        pixels={
            "size": {"height": 32, "width": 32},
            "do_center_crop": False,
            "image_seq_length": 17,
        },
        projector=r"model\.multi_modal_projector\.",
    ),
    "pix2struct": VisionType(
        processor="Pix2StructProcessor",
        image_processor="Pix2StructImageProcessor",
        tokens={},
        placeholder="<pad>",
        ids={},
        text={
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 258,  # <pad>, the first special token
        },
        vision={
            "hidden_size": HIDDEN,
            "patch_embed_hidden_size": 3 * 8 * 8,
            "d_ff": 48,
            "d_kv": 8,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "seq_len": 64,
        },
        pixels={"max_patches": 24, "patch_size": {"height": 8, "width": 8}},
        parts=("language", "vision"),
        projector=r"$",
    ),
    "t5gemma2": VisionType(
        processor="Gemma3Processor",
        image_processor="Gemma3ImageProcessor",
        tokens=_TOKENS
        | {
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
        placeholder="<mask>",
        ids={"image_token_index": "<image_soft_token>", "eoi_token_index": "<end_of_image>"},
        sections=("decoder", "encoder"),
        text=_GEMMA,
        vision={
            "text_config": {**_TEXT, **_GEMMA},
            "vision_config": VISION | {"model_type": "siglip_vision_model"},
            "mm_tokens_per_image": 4,
        },
        arguments={"image_seq_length": 4},
        projector=r"model\.encoder\.multi_modal_projector\.",
    ),
}
"""Types of tests/models/test_encoder_decoders.py."""

ENCODER_DECODERS = {kind.model_type or name for name, kind in DECODER_TYPES.items()}
"""Types of their configurations."""
