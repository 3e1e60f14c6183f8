"""Arguments of classes whose decoder reads images in layers of their own, such as Llama 3.2: a row
of images for each row of tokens, and the images that each token reads.

Source: transformers 5.23.0, models/mllama (`MllamaProcessor`).
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

_MASK = "cross_attention_mask"
_OF_IMAGES = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")


def has_cross_attention(model: Any) -> bool:
    """Return whether the decoder of a class reads images in layers of their own."""
    return _MASK in inspect.signature(model.forward).parameters


def cross_attention_layers(model: Any) -> list[nn.Module]:
    """Return the layers of a class that read images, which it skips for tokens without images."""
    text = model.config.get_text_config(decoder=True)
    layers = getattr(text, "cross_attention_layers", None) or []
    return [model.get_decoder().layers[index] for index in layers]


def cross_attention_arguments(
    model: Any, ids_NM: Tensor, arguments: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return the arguments of a class for the images of the rows that have some, given in their
    order, with a row for each row of tokens, and with the mask of its layers that read images, (N,
    M, images, tiles). Nothing for other classes, and for tokens without images."""
    images = {name: arguments[name] for name in _OF_IMAGES if name in arguments}
    if not images or not has_cross_attention(model):
        return {}
    from transformers.models.mllama.processing_mllama import (
        convert_sparse_cross_attention_mask_to_dense as dense_mask,
    )
    from transformers.models.mllama.processing_mllama import (
        get_cross_attention_token_mask as spans_of,
    )

    is_image_NM = ids_NM == model.config.image_token_id
    places_R = is_image_NM.any(1).nonzero().flatten()
    n_rows, length = ids_NM.shape
    rows = {
        name: tensor.new_zeros(n_rows, *tensor.shape[1:]).index_copy(0, places_R, tensor)
        for name, tensor in images.items()
    }
    tiles_NIT = rows["aspect_ratio_mask"]
    spans = [spans_of(ids, model.config.image_token_id) for ids in ids_NM.tolist()]
    mask = dense_mask(spans, tiles_NIT.sum(-1).tolist(), tiles_NIT.shape[-1], length)
    tiles_NIT[..., 0] = 1  # as the processor pads images
    return {**rows, _MASK: torch.from_numpy(mask).to(ids_NM.device)}
