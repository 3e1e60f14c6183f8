"""Types of tiny encoder-decoders whose encoder reads images."""

from tests.vision_types import HIDDEN, VISION, VisionType

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
}
"""Types of tests/models/test_encoder_decoders.py."""

ENCODER_DECODERS = {kind.model_type or name for name, kind in DECODER_TYPES.items()}
"""Types of their configurations."""
