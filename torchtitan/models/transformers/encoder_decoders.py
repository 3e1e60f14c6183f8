"""Classes whose encoder reads an image, and the prompt if it reads text: the tokens of a sample are
those of the decoder, and begin with the one that starts it.

Source: transformers 5.23.0, models/vision_encoder_decoder.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


_TYPES = ("vision-encoder-decoder",)

_PREFIX = "encoder_"
"""First part of the names of images' arguments that are named like those of tokens."""


def is_encoder_decoder(config: "PretrainedConfig") -> bool:
    """Return whether the class of a configuration is an encoder-decoder that trains here."""
    return config.model_type in _TYPES


def decoder_inputs(ids_NM: Tensor, mask_NM: Tensor, rows: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the arguments of a class for the tokens of its decoder, (N, M), and for `rows` of what
    its encoder reads."""
    read = {name.removeprefix(_PREFIX): row for name, row in rows.items()}
    return {**read, "decoder_input_ids": ids_NM, "decoder_attention_mask": mask_NM}


def decoder_side(model: "PreTrainedModel") -> Any:
    """Return the decoder of a class, which computes logits of tokens without an image."""
    return model.get_decoder()


def encoder_width(config: Any) -> int:
    """Return the size of the hidden states that the class of a configuration takes for those of its
    encoder."""
    return int(config.encoder.hidden_size)


def encoder_states(model: Any, pixel_values: Tensor, return_dict: bool = True) -> Any:
    """Return the result of the encoder of a class, after its projection for the decoder."""
    states = model.encoder(pixel_values=pixel_values, return_dict=True).last_hidden_state
    if hasattr(model, "enc_to_dec_proj"):
        states = model.enc_to_dec_proj(states)
    return BaseModelOutput(last_hidden_state=states)
