"""The form of texts of classes that read one image before each text, such as BLIP-2's."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.components.data.finetuning.conversation import BrokenSample
from torchtitan.components.data.pretraining.token_cache import around
from torchtitan.components.tokenizer.interface import Tokenizer
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import read_object

CAPTIONS = frozenset({"Blip2Processor", "BlipProcessor", "GitProcessor"})
"""Processors whose class reads one image before each text. The first one writes its tokens."""


@dataclass(frozen=True)
class CaptionForm:
    """Texts of one image, which a chat template writes as one token, and what follows it."""

    token: str
    """What a chat template writes for the image."""
    token_id: int
    n_tokens: int
    """Tokens of an image in a sample."""
    before_caption: list[int]
    """Ids that the processor puts between the image and a text without a prompt."""
    eos_id: int
    """Id that ends a text without a prompt."""

    def check(self, ids: np.ndarray) -> None:
        """Raise `BrokenSample` unless rendered `ids` (L,) begin with the image, and have no other
        one."""
        places = np.flatnonzero(ids == self.token_id).tolist()
        if places != [0]:
            where = f"{len(places)} images, at the tokens {places[:3]}" if places else "no image"
            raise BrokenSample(
                f"this model reads one image before each text, and this one has {where}; write a "
                f"row for each image, with a chat template that begins with {self.token}"
            )


def find_caption_form(processor: Any, tokenizer: Tokenizer, folder: Path) -> CaptionForm | None:
    """Return the form of texts of a `folder` if its processor's class reads one image before each
    of them; None if it does not. Raise `UserError` if its settings or its tokenizer do not fit."""
    name = type(processor).__name__
    if name not in CAPTIONS:
        return None
    token = getattr(processor, "image_token", processor.tokenizer.mask_token)
    token = getattr(token, "content", token)  # of a tokenizer without a token for images
    if token is None:
        raise UserError(f"{name}: the tokenizer has no mask_token, which stands for an image here")
    n_tokens = _n_tokens(processor, name, folder)
    token_id = tokenizer.id_of(token)
    if token_id is None:
        raise UserError(
            f"{name} writes {token!r} for an image, which is not one token of the tokenizer; use "
            "the tokenizer of the published model"
        )
    bare = list(processor.tokenizer("a", add_special_tokens=False)["input_ids"])
    before, after = around(bare, list(processor.tokenizer("a")["input_ids"]))
    eos_id = after[0] if after else tokenizer.eos_id
    if eos_id is None:
        raise UserError(f"{name}: the tokenizer has no EOS, which ends a caption")
    return CaptionForm(token, token_id, n_tokens, before, eos_id)


def _n_tokens(processor: Any, name: str, folder: Path) -> int:
    """Return the tokens of an image; 0 if layers of the decoder read it."""
    if name == "BlipProcessor":
        return 0
    if name == "GitProcessor":
        config = read_object(folder / "config.json")
        if "vision_config" not in config:
            raise UserError(
                f"'{folder}' has no config.json with a vision_config, which gives the number of "
                f"hidden states of an image for {name}; use the folder of the published model, or "
                "one of `torchtitan convert --to hf`"
            )
        if config.get("num_image_with_embedding") is not None:
            raise UserError(
                "config.json: num_image_with_embedding is set, so that the class reads the images "
                "of a video; train a model of another type"
            )
        from transformers import GitVisionConfig

        vision: Any = GitVisionConfig(**(config["vision_config"] or {}))
        return int((vision.image_size // vision.patch_size) ** 2) + 1
    if processor.num_query_tokens is None:
        raise UserError(
            f"{name}: processor_config.json has no num_query_tokens, the number of tokens of an "
            "image; set it to the num_query_tokens of config.json"
        )
    return int(processor.num_query_tokens)
