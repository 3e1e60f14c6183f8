"""`ImageReader`: reads the images in a batch, as the model's inputs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchtitan.components.images.files import ImageFile
from torchtitan.components.images.processor import ImageProcessor
from torchtitan.protocols.images import ImageInputs
from torchtitan.tools.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image


class ImageReader:
    """Makes `ImageInputs` of the images of rows with a model's processor."""

    def __init__(self, processor: ImageProcessor):
        self._processor = processor

    @property
    def image_ids(self) -> frozenset[int]:
        """Ids of the tokens of images, which no answer may contain."""
        return self._processor.form.image_ids

    def inputs(self, images: Sequence[Sequence["Image"]], tokens_BL: Tensor) -> ImageInputs:
        """Return the inputs of rows of tokens with these decoded images, on the host."""
        ids = tokens_BL.numpy()
        form = self._processor.form
        more = form.more_types(ids)
        has_images = any(images)
        return ImageInputs(
            tensors=self._processor.inputs(images) if has_images else {},
            n_images=sum(map(len, images)),
            blank={} if has_images else self._processor.blank_inputs(),
            token_types_BL=torch.from_numpy(form.token_types(ids)),
            more_types={name: torch.from_numpy(each) for name, each in more.items()},
        )

    def check(self, tokens: Sequence[int], images: Sequence[ImageFile]) -> None:
        """Raise `UserError` unless `tokens` has the number of image tokens that `images` need: the
        model cannot compute another number."""
        image_ids = self.image_ids
        n_found = sum(token in image_ids for token in tokens)
        sizes = [(image.width, image.height) for image in images]
        expansions = self._processor.expansions(sizes) if sizes else []
        n_expected = sum(token in image_ids for ids in expansions for token in ids)
        if n_found != n_expected:
            raise UserError(
                f"it has {n_found} tokens of images, and its {len(images)} images have "
                f"{n_expected}; only a row's prompt, at the beginning, has images"
            )
