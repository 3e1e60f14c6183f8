"""Classes that read one image before each text: each row of tokens needs one.

Source: transformers 5.23.0, models/blip, models/blip_2, models/instructblip and models/git;
`encoder_decoders` for those that read it in an encoder.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor

from torchtitan.models.transformers.description import class_of, forward_arguments
from torchtitan.models.transformers.encoder_decoders import (
    DecoderSide,
    decoder_inputs,
    encoder_states,
    is_encoder_decoder,
)
from torchtitan.protocols.images import ImageInputs

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


_TYPES = ("blip", "blip-2", "git", "instructblip")

_OF_IMAGES = (
    *("pixel_values", "flattened_patches"),
    *("qformer_input_ids", "qformer_attention_mask"),
    *("encoder_input_ids", "encoder_attention_mask"),
)
"""Names of the arguments of such classes with a row for each image. InstructBLIP's Q-Former and
some encoders read the prompt, too."""


class ImageFeatures(Protocol):
    """Results of the method of a class for the features of images. Some classes have more of them
    (`images.features_in`)."""

    @property
    def last_hidden_state(self) -> Tensor: ...


@dataclass(frozen=True)
class _TowerStates:
    last_hidden_state: Tensor


def reads_captions(config: "PretrainedConfig") -> bool:
    """Return whether the class of a configuration reads one image before each text."""
    return config.model_type in _TYPES or is_encoder_decoder(config)


def needs_images(config: "PretrainedConfig") -> bool:
    """Return whether the class of a configuration reads captions, and computes no text without an
    image."""
    if is_encoder_decoder(config):
        return True
    if not reads_captions(config):
        return False
    pixels = forward_arguments(class_of(config)[0])["pixel_values"]
    return pixels.default is pixels.empty


def text_alone_refusal(config: "PretrainedConfig") -> str:
    """Return why a class of which `needs_images` is true computes no text alone."""
    reader = "encoder" if is_encoder_decoder(config) else "class"
    return (
        f"model_type {config.model_type} does not compute text alone here: its {reader} needs an "
        "image for each text; train with --config sft_images or lora_images, and generate with "
        "--image"
    )


def language_side(model: "PreTrainedModel") -> "PreTrainedModel":
    """Return the part of a class that computes text without images: the class, or its language
    model."""
    if is_encoder_decoder(model.config):
        return cast("PreTrainedModel", DecoderSide(model))  # is called in the same way
    if not needs_images(model.config):
        return model
    # InstructBLIP's has no head
    language: PreTrainedModel = getattr(model, "language_model", model.get_decoder())
    return language


def taken(model: "PreTrainedModel") -> set[str]:
    """Return the names of the arguments of a class, with positions if only its language model names
    them."""
    parts = (model, language_side(model))
    own, inner = (set(forward_arguments(part)) for part in parts)
    return own | (inner & {"position_ids"})


def blank_image(model: "PreTrainedModel") -> dict[str, Tensor]:
    """Return the images of a class for a row of tokens in a trial; nothing for other classes."""
    if not reads_captions(model.config):
        return {}
    size = model.config.vision_config.image_size
    images = {"pixel_values": torch.zeros(1, 3, size, size)}
    if model.config.model_type == "instructblip":
        images["qformer_input_ids"] = torch.zeros(1, 1, dtype=torch.long)
    return images


def with_blank(config: "PretrainedConfig", images: ImageInputs) -> ImageInputs:
    """Return the images of a batch; of one without any, the blank one if the class needs one."""
    if images.tensors or not reads_captions(config):
        return images
    return replace(images, tensors=images.blank)


def caption_inputs(
    model: "PreTrainedModel", inputs: Mapping[str, Tensor], has_text_N: Tensor | None = None
) -> dict[str, Tensor]:
    """Return the inputs of a class for rows of tokens (N, M), `input_ids` with `attention_mask`: an
    image for each row, from `inputs` with one for each row with text, in their order; others get
    the first one. Other classes get `inputs`.

    Args:
        has_text_N: False for a row without text, which keeps one token; None: all have some.
    """
    if not reads_captions(model.config):
        return dict(inputs)
    ids_NM, mask_NM = inputs["input_ids"], inputs["attention_mask"]
    if has_text_N is None:
        has_text_N = mask_NM.new_ones(len(mask_NM))
    n_images = max(int(has_text_N.sum()), 1)
    index_N = (has_text_N.long().cumsum(0) - 1).clamp(min=0) * has_text_N.long()
    rows = {}
    for name in _OF_IMAGES:
        if (images := inputs.get(name)) is not None:
            assert n_images == len(images), "each text has one image"
            rows[name] = images[index_N.to(images.device)]
    if is_encoder_decoder(model.config):
        return decoder_inputs(ids_NM, mask_NM, rows)
    return {**inputs, **rows, **without_image(model, ids_NM, mask_NM)}


def without_image(model: "PreTrainedModel", ids_NM: Tensor, mask_NM: Tensor) -> dict[str, Tensor]:
    """Return the ids and the mask of rows of tokens (N, M) without those of their images, if the
    class puts the hidden states of an image before a text itself."""
    n_images = image_states(model.config)
    if n_images:
        n_places = ids_NM.shape[1]
        first_N = mask_NM.argmax(1).clamp(max=n_places - n_images)
        places_M = torch.arange(n_places, device=ids_NM.device) - first_N[:, None]
        is_text_NM = (places_M < 0) | (places_M >= n_images)
        ids_NM, mask_NM = (x[is_text_NM].view(len(x), -1) for x in (ids_NM, mask_NM))
    return {"input_ids": ids_NM, "attention_mask": mask_NM}


def image_states(config: "PretrainedConfig") -> int:
    """Return the number of hidden states that a class puts before a text itself; they take the
    place of as many tokens here."""
    if config.model_type != "git":
        return 0
    vision = config.vision_config
    return int((vision.image_size // vision.patch_size) ** 2) + 1


def tower_of(model: "PreTrainedModel") -> Callable[..., ImageFeatures] | None:
    """Return what computes the states of images in such a class that has no method for it."""
    if is_encoder_decoder(model.config):
        return functools.partial(encoder_states, model)
    states = {"blip": _blip_states, "git": _git_states}.get(model.config.model_type)
    return None if states is None else functools.partial(states, model)


def _blip_states(
    model: "PreTrainedModel", pixel_values: Tensor, return_dict: bool = True
) -> _TowerStates:
    output = model.get_submodule("vision_model")(pixel_values, return_dict=True)
    return _TowerStates(output.last_hidden_state)


def _git_states(
    model: "PreTrainedModel", pixel_values: Tensor, return_dict: bool = True
) -> _TowerStates:
    encoder = model.get_submodule("git.image_encoder")
    states = encoder(pixel_values, return_dict=True).last_hidden_state
    return _TowerStates(model.get_submodule("git.visual_projection")(states))
