"""Types of tiny models that read one image before each text."""

from tests.vision_types import HIDDEN, VisionType

_QFORMER = {
    "vocab_size": 64,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}

_BERT = {"cls": "[CLS]", "mask": "[MASK]", "bos_token": "[CLS]"}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

CAPTION_TYPES: dict[str, VisionType] = {
    "blip-2": VisionType(
        processor="Blip2Processor",
        image_processor="BlipImageProcessor",
        tokens={"image": "<image>", "bos_token": "<bos>"},
        placeholder="<image>",
        ids={"image_token_index": "<image>"},
        text={
            "ffn_dim": 48,
            "word_embed_proj_dim": HIDDEN,
            "dropout": 0.0,
        },
        config={"qformer_config": _QFORMER, "num_query_tokens": 4},
        arguments={"num_query_tokens": 4},
        projector=r"qformer\.|query_tokens$|language_projection\.",
    ),
    "instructblip": VisionType(
        processor="InstructBlipProcessor",
        image_processor="BlipImageProcessor",
        tokens={"image": "<image>", "bos_token": "<bos>"},
        placeholder="<image>",
        ids={"image_token_index": "<image>"},
        text={
            "ffn_dim": 48,
            "word_embed_proj_dim": HIDDEN,
            "dropout": 0.0,
        },
        config={
            "qformer_config": _QFORMER | {"max_position_embeddings": 64},
            "num_query_tokens": 4,
        },
        arguments={"num_query_tokens": 4},
        projector=r"qformer\.|query_tokens$|language_projection\.",
    ),
    "git": VisionType(
        processor="GitProcessor",
        image_processor="CLIPImageProcessor",
        tokens=_BERT,
        placeholder="[MASK]",
        ids={},
        text=_NO_DROPOUT,
        pixels={"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}},
        projector=r"git\.visual_projection\.",
        n_virtual=17,
    ),
    "blip": VisionType(
        processor="BlipProcessor",
        image_processor="BlipImageProcessor",
        tokens=_BERT,
        placeholder="[MASK]",
        ids={},
        text=_NO_DROPOUT | {"encoder_hidden_size": HIDDEN},
        parts=("language", "vision"),
        projector=r"$",
    ),
}
"""Types of tests/models/test_caption_images.py."""
