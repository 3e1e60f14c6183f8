"""The form of processors that put one image at the beginning of each text themselves, such as those
of Kosmos-2 and Kosmos-2.5, whose classes take a mask of the places of images."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from torchtitan.components.images.forms.form import Expansion, ImageForm, repeated
from torchtitan.components.images.opened import Images, Opened, Outputs, Samples, Size, noise
from torchtitan.protocols.images import PLACES
from torchtitan.tools.logging import without_logs


@dataclass(frozen=True)
class LeadingTokens:
    """What a processor writes for an image, the same for all images."""

    ids: list[int]
    """The token that begins an image, the tokens in the places of its features, which may be those
    of ordinary text, and the token that ends it."""
    places: list[int]
    """Values of the class's mask for these tokens: 1 for a feature."""
    name: str
    """Name of the mask."""
    tensors: list[str]
    """Names of the results for pixels."""

    def mask(self, ids: np.ndarray) -> np.ndarray:
        """Return the mask of the places of images, int64 (..., L)."""
        found = np.zeros(ids.shape, dtype=np.int64)
        for n, value in enumerate(self.places[: ids.shape[-1]]):
            begins = ids[..., : ids.shape[-1] - n] == self.ids[0]
            found[..., n:][begins] = value
        return found


class LeadingForm(ImageForm):
    """A text places its images by the first token of one, and the class computes any number of
    them."""

    names = {"Kosmos2Processor", "Kosmos2_5Processor"}

    def __init__(self, opened: Opened, token: str):
        with without_logs():
            outputs = _call(opened, noise()[:1])
        [name] = [name for name in outputs if name.endswith(PLACES)]
        [ids], [mask] = outputs["input_ids"].tolist(), outputs[name].tolist()
        first = mask.index(1) - 1
        stop = first + mask.count(1) + 2
        tensors = [one for one in outputs if one not in ("input_ids", "attention_mask", name)]
        self.tokens = LeadingTokens(ids[first:stop], mask[first:stop], name, tensors)
        super().__init__(opened, opened.processor.tokenizer.convert_ids_to_tokens(ids[first]))

    def expand(self, sizes: Sequence[Size]) -> Expansion:
        return repeated(self.token, self.tokens.ids, len(sizes))

    def inputs(self, images: Samples) -> dict[str, Tensor]:
        outputs = _call(self.opened, [image for sample in images for image in sample])
        return self.opened.tensors(outputs, self.tokens.tensors)

    def token_types(self, ids: np.ndarray) -> np.ndarray:
        return (self.tokens.mask(ids) == 1).astype(np.int64)

    def more_types(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        return {self.tokens.name: self.tokens.mask(ids)}


def _call(opened: Opened, images: Images) -> Outputs:
    """Return what a processor makes of images, each before a text of its own."""
    texts = ["q"] * len(images)
    return opened.processor(images=list(images), text=texts, return_tensors="pt")
