"""The form of processors that put one image at the beginning of each text themselves, such as those
of Kosmos-2 and Kosmos-2.5, whose classes take a mask of the places of images."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchtitan.protocols.images import PLACES
from torchtitan.tools.logging import without_logs

LEADING = frozenset({"Kosmos2Processor", "Kosmos2_5Processor"})
"""Processors that put an image before each text."""


@dataclass(frozen=True)
class LeadingForm:
    """What a processor writes for an image, the same for all images. A text places its images by
    the first of these tokens, and the class computes any number of them."""

    ids: list[int]
    """The token that begins an image, the tokens in the places of its features, which may be those
    of ordinary text, and the token that ends it."""
    places: list[int]
    """Values of the class's mask for these tokens: 1 for a feature."""
    name: str
    """Name of the mask."""
    tensors: list[str]
    """Names of the results for pixels."""

    @staticmethod
    def call(processor: Any, images: Sequence[object]) -> Any:
        """Return what a processor makes of images, each before a text of its own."""
        return processor(images=list(images), text=["q"] * len(images), return_tensors="pt")

    def mask(self, ids: np.ndarray) -> np.ndarray:
        """Return the mask of the places of images, int64 (..., L)."""
        found = np.zeros(ids.shape, dtype=np.int64)
        for n, value in enumerate(self.places[: ids.shape[-1]]):
            begins = ids[..., : ids.shape[-1] - n] == self.ids[0]
            found[..., n:][begins] = value
        return found


def find_leading_form(processor: Any, image: Any) -> LeadingForm | None:
    """Return what a processor writes for an image, if it puts it before each text itself; None if
    it does not."""
    if type(processor).__name__ not in LEADING:
        return None
    with without_logs():
        outputs = LeadingForm.call(processor, [image])
    [name] = [name for name in outputs if name.endswith(PLACES)]
    [ids], [mask] = outputs["input_ids"].tolist(), outputs[name].tolist()
    first = mask.index(1) - 1
    stop = first + mask.count(1) + 2
    tensors = [one for one in outputs if one not in ("input_ids", "attention_mask", name)]
    return LeadingForm(ids[first:stop], mask[first:stop], name, tensors)
