"""Codes of images by a frozen tokenizer, which do not depend on the other images of a batch.

Source: transformers 5.23.0, models/emu3.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class _Codes(Protocol):
    image_tokens: list[Tensor]


def encode_each_image(model: "PreTrainedModel") -> None:
    """Make Emu3's class encode each image by itself. It pads the images of a batch to the largest
    one, and its tokenizer normalizes the padding and attends to it, so that an image would get
    other codes in a batch than alone. Other classes stay as they are."""
    if model.config.model_type == "emu3":
        tokenizer: Any = model.get_submodule("model.vqmodel")
        tokenizer.encode = functools.partial(_encode, tokenizer.encode)


def _encode(
    encode: Callable[..., _Codes], pixel_values: Tensor, image_sizes: Tensor, **options: object
) -> _Codes:
    """Return the class's results for padded images (N, C, H, W) of the sizes (N, 2)."""
    outputs = [
        encode(image[None, :, :height, :width], torch.tensor([[height, width]]), **options)
        for image, (height, width) in zip(pixel_values, image_sizes.tolist(), strict=True)
    ]
    outputs[0].image_tokens = [codes for output in outputs for codes in output.image_tokens]
    return outputs[0]
