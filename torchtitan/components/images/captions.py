"""The form of texts of classes that read one image before each text, such as BLIP-2's."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from torchtitan.components.data.finetuning.conversation import BrokenSample
from torchtitan.components.tokenizer.interface import Tokenizer
from torchtitan.tools.errors import UserError

CAPTIONS = frozenset({"Blip2Processor"})
"""Processors that put one image before each text themselves."""


@dataclass(frozen=True)
class CaptionForm:
    """Texts of one image, which a chat template writes as one token, and what follows it."""

    token: str
    """What a chat template writes for the image."""
    token_id: int
    n_tokens: int
    """Tokens of an image in a sample."""
    begin_ids: list[int]
    """Ids that the processor puts between the image and the text."""
    eos_id: int
    """Id that ends a text without a prompt."""

    @property
    def before_caption(self) -> list[int]:
        """Ids between the image and a text without a prompt."""
        return self.begin_ids

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


def find_caption_form(processor: Any, tokenizer: Tokenizer) -> CaptionForm | None:
    """Return the form of a processor's texts if it puts one image before each of them; None if it
    does not. Raise `UserError` if its settings or its tokenizer do not fit."""
    name = type(processor).__name__
    if name not in CAPTIONS:
        return None
    token = processor.image_token
    token = getattr(token, "content", token)  # of a tokenizer without a token for images
    n_tokens = processor.num_query_tokens
    if n_tokens is None:
        raise UserError(
            f"{name}: processor_config.json has no num_query_tokens, the number of tokens of an "
            "image; set it to the num_query_tokens of config.json"
        )
    token_id = tokenizer.id_of(token)
    if token_id is None:
        raise UserError(
            f"{name} writes {token!r} for an image, which is not one token of the tokenizer; use "
            "the tokenizer of the published model"
        )
    begin_ids, end_ids = _around(processor.tokenizer)
    eos_id = end_ids[0] if end_ids else tokenizer.eos_id
    if eos_id is None:
        raise UserError(f"{name}: the tokenizer has no EOS, which ends a caption")
    return CaptionForm(token, token_id, n_tokens, begin_ids, eos_id)


def _around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the ids that a processor's tokenizer puts before and after a text."""
    ids = list(tokenizer("")["input_ids"])
    bare = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    whole = list(tokenizer("a")["input_ids"])
    begin = next(i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
    assert whole[:begin] + whole[begin + len(bare) :] == ids
    return whole[:begin], whole[begin + len(bare) :]
