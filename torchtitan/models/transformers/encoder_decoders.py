"""Classes whose encoder reads an image, and the prompt if it reads text. A sample contains the
decoder's tokens, and begins with its start token.

Source: transformers 5.23.0, models/florence2, models/pix2struct, models/t5gemma2 and
models/vision_encoder_decoder.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

if TYPE_CHECKING:
    from transformers import PretrainedConfig


ENCODER_DECODERS = ("florence2", "pix2struct", "t5gemma2", "vision-encoder-decoder")
"""Types that train here."""

_PREFIX = "encoder_"
"""First part of the names of images' arguments that are named like those of tokens."""


def is_encoder_decoder(config: "PretrainedConfig") -> bool:
    """Return whether the class of a configuration is an encoder-decoder that trains here."""
    return config.model_type in ENCODER_DECODERS


def decoder_inputs(ids_NM: Tensor, mask_NM: Tensor, rows: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the arguments of a class for the tokens of its decoder, (N, M), and for `rows` of what
    its encoder reads."""
    read = {name.removeprefix(_PREFIX): row for name, row in rows.items()}
    return {**read, "decoder_input_ids": ids_NM, "decoder_attention_mask": mask_NM}


def encoder_width(config: Any) -> int:
    """Return the size of the encoder's hidden states, as the decoder reads them."""
    if config.model_type == "vision-encoder-decoder":
        return int(config.encoder.hidden_size)
    return int(config.get_text_config(decoder=True).hidden_size)


def readers_of_text(model: Any) -> list[nn.Module]:
    """Return the modules of a class's encoder that read text. Florence-2's are in what the class
    calls its decoder."""
    return [model.get_encoder().text_model] if model.config.model_type == "t5gemma2" else []


class DecoderSide(nn.Module):
    """A class that computes the tokens of its decoder, with one empty state of the encoder."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model
        self.config = model.config

    def get_output_embeddings(self) -> Any:
        return self.model.get_output_embeddings()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        use_cache: bool = False,
        return_dict: bool = True,
    ) -> Any:
        dtype = self.model.get_input_embeddings().weight.dtype
        shape = len(input_ids), 1, encoder_width(self.config)
        states = torch.zeros(shape, dtype=dtype, device=input_ids.device)
        return self.model(
            encoder_outputs=BaseModelOutput(last_hidden_state=states),
            decoder_input_ids=input_ids,
            decoder_attention_mask=attention_mask,
            use_cache=use_cache,
            return_dict=return_dict,
        )


def encoder_states(
    model: Any,
    pixel_values: Tensor | None = None,
    flattened_patches: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,
    return_dict: bool = True,
) -> Any:
    """Return the encoder's states, in a class whose encoder reads only an image."""
    given = {"pixel_values": pixel_values, "flattened_patches": flattened_patches}
    given["attention_mask"] = encoder_attention_mask
    inputs = {name: one for name, one in given.items() if one is not None}
    states = model.get_encoder()(**inputs, return_dict=True).last_hidden_state
    if hasattr(model, "enc_to_dec_proj"):
        states = model.enc_to_dec_proj(states)
    return BaseModelOutput(last_hidden_state=states)
