"""Types of tiny models of images and text whose processor places images itself: one before each
text, or several in a list of texts and images."""

from tests.vision_types import VISION, VisionType

_TEXT = {"ffn_dim": 48, "dropout": 0.0, "attention_dropout": 0.0}
_TAGS = ("</doc>", "<image>", "</image>", "</chunk>", "</line>", "<phrase>", "</phrase>")
_TAGS += ("<object>", "</object>", "</delimiter_of_multi_objects/>", "<grounding>")

LEADING_TYPES: dict[str, VisionType] = {
    "kosmos-2": VisionType(
        processor="Kosmos2Processor",
        image_processor="CLIPImageProcessor",
        # The places of an image have the 64 ids after that of "!": those of ordinary text.
        tokens={tag: tag for tag in _TAGS} | {"unk_token": "!", "bos_token": "<s>"},
        placeholder="<image>",
        ids={},
        text=_TEXT,
        config={"latent_query_num": 64},
        pixels={"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}},
        arguments={"num_patch_index_tokens": 0},
        projector=r"image_to_text_projection\.",
    ),
    "kosmos-2.5": VisionType(
        processor="Kosmos2_5Processor",
        image_processor="Kosmos2_5ImageProcessor",
        tokens={
            "boi_token": "<image>",
            "eoi_token": "</image>",
            "image_token": "<s>",
            "bos_token": "<s>",
        },
        placeholder="<image>",
        ids={},
        text=_TEXT,
        vision=VISION | {"patch_embed_hidden_size": 192, "max_num_patches": 64, "head_dim": 8},
        config={"latent_query_num": 4},
        pixels={"patch_size": {"height": 8, "width": 8}},
        settings={"max_patches": 16},  # the processor does not read that of its images
        arguments={"num_image_tokens": 4},
        projector=r"image_to_text_projection\.",
    ),
}

PLACING_TYPES: dict[str, VisionType] = {
    "idefics": VisionType(
        processor="IdeficsProcessor",
        image_processor="IdeficsImageProcessor",
        tokens={
            "image_token": "<image>",
            "fake": "<fake_token_around_image>",
            "bos_token": "<s>",
        },
        placeholder="<fake_token_around_image><image><fake_token_around_image>",
        ids={},
        vision=VISION | {"embed_dim": 32},
        config={
            "freeze_text_layers": False,
            "freeze_vision_layers": False,
            "use_resampler": True,
            "perceiver_config": {
                "model_type": "idefics_perciever",
                "resampler_n_latents": 4,
                "resampler_depth": 1,
                "resampler_n_heads": 4,
                "resampler_head_dim": 8,
            },
        },
        pixels={"image_size": 32},
        projector=r"model\.perceiver_resampler\.",
    ),
    "fuyu": VisionType(
        processor="FuyuProcessor",
        image_processor="FuyuImageProcessor",
        tokens={token: token for token in ("|SPEAKER|", "|NEWLINE|")},
        placeholder="|SPEAKER|",
        ids={"image_token_id": "|SPEAKER|"},
        text={"hidden_dropout": 0.0, "attention_dropout": 0.0},
        vision={},
        config={"patch_size": 8},
        pixels={"size": {"height": 64, "width": 64}, "patch_size": {"height": 8, "width": 8}},
        parts=("language", "projector"),
        projector=r"model\.vision_embed_tokens\.",
    ),
}
