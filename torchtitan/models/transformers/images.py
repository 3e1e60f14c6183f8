"""The parts of a class that read images, and its call for a batch with images."""

import inspect
import re
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.protocols.images import ImageInputs
from torchtitan.tools.device import send
from torchtitan.tools.errors import UserError

Part = Literal["language", "projector", "vision"]

_PROJECTORS = re.compile(
    r"(model\.)?("
    # a module beside the vision tower
    r"\w*(projector|projection|connector|aligner|adapter|resampler|qformer)\w*(\.|$)|"
    r"(embed_vision|visual_embeddings_table|vision_embed_tokens)\.|"
    r"(image_newline|view_separator|query_tokens)$|"
    # a module in the tower, behind its layers
    r"\w+\.(\w*merger\w*|connector|downsample\w*|head_linear|head_norm)\."
    r")"
)
"""Names of the parameters between a vision tower and the language model, in the classes of
transformers. Some modules inside the tower's layers are also called projection."""


def parts_of(model: Any) -> dict[Part, list[nn.Parameter]]:
    """Return the parameters of a class by part; a language model by itself has one part."""
    if model.config.get_text_config(decoder=True) is model.config:
        return {"language": list(model.parameters())}
    owners = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    language = {
        id(parameter) for owner in owners if owner is not None for parameter in owner.parameters()
    }
    parts: dict[Part, list[nn.Parameter]] = {"language": [], "projector": [], "vision": []}
    for name, parameter in model.named_parameters():
        if id(parameter) in language:
            parts["language"].append(parameter)
        elif _PROJECTORS.match(name):
            parts["projector"].append(parameter)
        else:
            parts["vision"].append(parameter)
    return parts


def train_parts(model: Any, trained: list[Part]) -> None:
    """Freeze the parameters of all other parts. Raise `UserError` if a part has none."""
    parts = parts_of(model)
    for name in trained:
        if not parts.get(name):
            raise UserError(
                f"--model.train {name}: {type(model).__name__} has no such part; it has: "
                + ", ".join(part for part, parameters in parts.items() if parameters)
            )
    for name, parameters in parts.items():
        for parameter in parameters:
            parameter.requires_grad_(name in trained)


def image_arguments(model: Any, images: ImageInputs, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the arguments of a class for images, in `dtype`: that of the weights that read
    them."""
    accepted = inspect.signature(model.forward).parameters
    arguments = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in images.tensors.items()
    }
    names = accepted.keys() & {"mm_token_type_ids", "token_type_ids"}
    return arguments | dict.fromkeys(names, images.token_types_BL)


def without_images(
    readers: Sequence[nn.Parameter], hidden_BLD: Tensor, images: ImageInputs
) -> Tensor:
    """Return hidden states that depend, with gradients of 0, on all trained parameters that read
    images, if a batch has none: each rank must have the same gradients to reduce."""
    if images.tensors or not torch.is_grad_enabled():
        return hidden_BLD
    for parameter in readers:
        if parameter.requires_grad:
            hidden_BLD = hidden_BLD + 0 * parameter.flatten()[0]
    return hidden_BLD


def places_of_readers(model: Any) -> list[tuple[nn.Module, str]]:
    """Return the owner and name of each parameter that reads images. Sharding and mixed precision
    replace the parameters, but not their owners."""
    parts = parts_of(model)
    readers = {id(parameter) for parameter in (*parts["vision"], *parts["projector"])}
    return [
        (module, name)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if id(parameter) in readers
    ]


def token_mask(tokens_BL: Tensor, attention: AttentionMetadata | None) -> Tensor:
    """Return a mask that is 0 in the padding of rows, int64; a row without tokens keeps one."""
    mask_BL = torch.ones_like(tokens_BL)
    if attention is None or attention.n_tokens_B is None:
        return mask_BL
    n_tokens_B = send(attention.n_tokens_B.clamp(min=1), tokens_BL.device)
    places_L = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)
    return mask_BL * (places_L < n_tokens_B[:, None])
