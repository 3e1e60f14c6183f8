"""Prompts with images for `torchtitan generate` and `torchtitan chat`."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan.cli.model_options import OpenedModel
from torchtitan.tools.errors import UserError

if TYPE_CHECKING:
    from torchtitan.components.images.files import ImageFile


class ImagePrompts:
    """The images that a model is asked about.

    Raises:
        UserError: if the model reads text only, or its folder has no image processor.
    """

    def __init__(self, opened: OpenedModel):
        from torchtitan.components.images.processor import ImageProcessor

        if not hasattr(opened.model, "reading"):
            raise UserError(
                "the model is computed by a family here, which reads text only; set --module "
                "torchtitan.models.transformers, which computes it by its class"
            )
        self._model: Any = opened.model
        self._tokenizer = opened.tokenizer
        # A checkpoint of a run has no config.json, which may be needed to find the classes.
        described = [folder for folder in opened.folders if (folder / "config.json").is_file()]
        folder = [*described, *opened.folders][0]
        self.processor = ImageProcessor.from_folder(folder, opened.tokenizer)

    def open(self, path: Path) -> "ImageFile":
        """Open an image. Raise `UserError` if it cannot be read."""
        from torchtitan.components.data.finetuning.conversation import BrokenSample
        from torchtitan.components.images.files import ImageOpener

        if not path.name:
            raise UserError("/image needs the path of an image: /image photo.jpg")
        path = path.expanduser().resolve()
        try:
            return ImageOpener(path.parent).open(path.name)
        except BrokenSample as error:
            raise UserError(f"{path}: {error}") from None

    def encode(
        self, ids: Sequence[int], images: "Sequence[ImageFile]"
    ) -> tuple[list[int], contextlib.AbstractContextManager[None]]:
        """Return the ids of a rendered prompt with its images' tokens, and the context in which the
        model reads them."""
        from torchtitan.components.images.encoder import encode_prompt

        expanded, inputs = encode_prompt(self.processor, self._tokenizer, ids, images)
        device = next(self._model.parameters()).device
        return expanded, self._model.reading(inputs.to(device))


def message(text: str, n_images: int) -> dict[str, object]:
    """Return a user's message: its images, and the text after them."""
    if not n_images:
        return {"role": "user", "content": text}
    parts: list[dict[str, str]] = [{"type": "image"} for _ in range(n_images)]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
