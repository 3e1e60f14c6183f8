"""Arguments of classes whose decoder reads images in layers of their own, such as Llama 3.2: a row
of images for each row of tokens, and the images that each token reads.

Source: transformers 5.23.0, models/mllama (`MllamaProcessor`) and models/idefics
(`IdeficsProcessor`).
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.models.transformers.description import forward_arguments
from torchtitan.models.transformers.images import absent_images, reads_latest_image

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_MASK = "cross_attention_mask"
_OF_IMAGES = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")


def has_cross_attention(model: "PreTrainedModel") -> bool:
    """Return whether the decoder of a class reads images in layers of their own."""
    return _MASK in forward_arguments(model)


def cross_attention_layers(model: "PreTrainedModel") -> list[nn.Module]:
    """Return the layers of a class that read images, which it skips for tokens without images."""
    text = model.config.get_text_config(decoder=True)
    layers = getattr(text, "cross_attention_layers", None) or []
    return [model.get_decoder().layers[index] for index in layers]


def cross_attention_arguments(
    model: "PreTrainedModel", ids_NM: Tensor, arguments: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the arguments of a class for the images of the rows that have some, given in their
    order, with a row for each row of tokens, and with the mask of its layers that read images, (N,
    M, images, tiles). Nothing for other classes, and for tokens without images."""
    if reads_latest_image(model):
        return _latest_images(model, ids_NM, arguments)
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


def _latest_images(
    model: "PreTrainedModel", ids_NM: Tensor, arguments: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return a row of images for each row of tokens, and the mask of its layers, (N, M, images):
    each token reads the latest image before it, unless a text ended since."""
    if "pixel_values" not in arguments:
        return absent_images(model, ids_NM)
    length = ids_NM.shape[1]
    types_NM = arguments["image_attention_mask"]
    is_image_NM = F.pad(types_NM, (0, length - types_NM.shape[1])) == 1
    counts_N = is_image_NM.sum(1)
    n_images = max(int(counts_N.max()), 1)
    places_M = torch.arange(length, device=ids_NM.device)
    end_ids = torch.tensor(model.config.eos_token_id, device=ids_NM.device)
    ends_NM = torch.where(torch.isin(ids_NM, end_ids), places_M, -1).cummax(1).values
    latest_NM = torch.where(is_image_NM, places_M, -1).cummax(1).values
    reads_NM = latest_NM > F.pad(ends_NM[:, :-1], (1, 0), value=-1)
    index_NM = (is_image_NM.cumsum(1) - 1).clamp(min=0)
    mask_NMI = F.one_hot(index_NM, n_images) * reads_NM[..., None]
    pixels = arguments["pixel_values"]
    rows = pixels.new_zeros(len(ids_NM), n_images, *pixels.shape[1:])
    is_there_NI = torch.arange(n_images, device=ids_NM.device) < counts_N[:, None]
    rows[is_there_NI] = pixels[: int(counts_N.sum())]
    if not is_there_NI.any():
        rows = rows + pixels[:, None]  # a blank one
    return {"pixel_values": rows, "image_attention_mask": mask_NMI}
