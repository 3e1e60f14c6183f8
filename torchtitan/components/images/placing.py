"""Changes to processors that place images themselves, so that texts place them."""

from collections.abc import Callable, Mapping, Sequence

from torchtitan.components.images.opened import ClassTokenizer, Outputs


class _Idefics:
    """Reads texts that place their images by `<image>`, which a chat template writes between tokens
    of its own. The call of the class makes the mask of images of token ids."""

    image_token = "<image>"
    tokenizer: ClassTokenizer
    image_processor: Callable[..., object]
    replacements: Sequence[str]

    def __call__(
        self,
        images: Sequence[object],
        text: Sequence[str],
        images_kwargs: Mapping[str, object] | None = None,
        text_kwargs: Mapping[str, object] | None = None,
    ) -> Outputs:
        nested = [each if isinstance(each, list) else [each] for each in images]
        flat = [image for sample in nested for image in sample]
        options = {"return_tensors": "pt", **(images_kwargs or {})}
        outputs = self.tokenizer(list(text), **{"add_special_tokens": False, **(text_kwargs or {})})
        self.replacements = [self.image_token] * len(flat)
        return {**outputs, "pixel_values": self.image_processor(flat, **options)}


CHANGES: dict[str, type] = {"IdeficsProcessor": _Idefics}
"""Class of a processor → a base class with changes."""
