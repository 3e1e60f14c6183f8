"""Changes to processors that place images themselves, so that texts place them."""

from collections.abc import Mapping, Sequence
from typing import Any


class _Idefics:
    """Reads texts that place their images by `<image>`, which a chat template writes between tokens
    of its own. The call of the class makes the mask of images of token ids."""

    image_token = "<image>"
    tokenizer: Any
    image_processor: Any
    replacements: Sequence[str]

    def __call__(
        self,
        images: Sequence[Any],
        text: Sequence[str],
        images_kwargs: Mapping[str, Any] | None = None,
        text_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        from transformers.image_utils import make_flat_list_of_images

        flat: list[Any] = make_flat_list_of_images(list(images))  # type: ignore[assignment]
        options = {"return_tensors": "pt", **(images_kwargs or {})}
        outputs = self.tokenizer(list(text), **{"add_special_tokens": False, **(text_kwargs or {})})
        self.replacements = [self.image_token] * len(flat)
        return {**outputs, "pixel_values": self.image_processor(flat, **options)}


CHANGES: dict[str, type] = {"IdeficsProcessor": _Idefics}
"""Class of a processor → a base class with changes."""
