"""Classes that read one image before each text: each row of tokens needs one.

Source: transformers 5.23.0, models/blip_2 (`Blip2ForConditionalGeneration`).
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_TYPES = ("blip-2",)


def reads_captions(config: Any) -> bool:
    """Return whether the class of a configuration reads one image before each text."""
    return config.model_type in _TYPES


def needs_images(model: Any) -> bool:
    """Return whether such a class computes no text without an image."""
    pixels = inspect.signature(model.forward).parameters.get("pixel_values")
    return reads_captions(model.config) and pixels is not None and pixels.default is pixels.empty


def language_side(model: Any) -> Any:
    """Return the part of a class that computes text without images: the class, or its language
    model."""
    return model.get_decoder() if needs_images(model) else model


def blank_image(model: Any) -> dict[str, Tensor]:
    """Return the images of a class for a row of tokens in a trial; nothing for other classes."""
    if not reads_captions(model.config):
        return {}
    size = model.config.vision_config.image_size
    return {"pixel_values": torch.zeros(1, 3, size, size)}


def caption_inputs(model: Any, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the images of a class for rows of tokens (N, M) with `attention_mask`, one for each
    row, from `inputs` with one for each row with text, in their order; others get one of zeros.
    Nothing for other classes."""
    if not reads_captions(model.config):
        return {}
    pixels, mask_NM = inputs["pixel_values"], inputs["attention_mask"]
    # a row without text keeps one token
    places_R = (mask_NM.sum(1) > 1).nonzero().flatten()
    if not len(places_R):
        places_R = torch.zeros(1, dtype=torch.long, device=mask_NM.device)
    assert len(places_R) == len(pixels), "each text has one image"
    rows = pixels.new_zeros(len(mask_NM), *pixels.shape[1:]).index_copy(0, places_R, pixels)
    return {"pixel_values": rows}
