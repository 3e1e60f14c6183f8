"""`Opened`: a processor of transformers, and its calls with images.

Source: transformers 5.23.0, processing_utils.py (`ProcessorMixin`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from torchtitan.components.tokenizer.interface import Tokenizer
from torchtitan.tools.errors import UserError, in_words

if TYPE_CHECKING:
    from PIL.Image import Image

Size = tuple[int, int]
"""Width and height of an image, in pixels."""

Images = Sequence["Image"]
Samples = Sequence[Images]
"""The images of each sample of a batch."""

Outputs = Mapping[str, Any]
"""Results of a processor by name: tensors, arrays, or lists of numbers."""

_QUICK: dict[str, object] = {"resample": 0, "do_rescale": False, "do_normalize": False}
"""Options that leave sizes unchanged, and take a third of the time: nearest neighbors, and pixels
from 0 to 255."""

TRIAL_SIZES: tuple[Size, Size] = ((96, 64), (60, 120))


class ClassTokenizer(Protocol):
    """A tokenizer of transformers."""

    bos_token: str
    bos_token_id: int | None
    mask_token: str | None
    pad_token: str | None
    unk_token_id: int | None
    backend_tokenizer: Any
    """The tokenizer of the library `tokenizers`."""

    def __call__(self, text: str | Sequence[str], **options: object) -> Outputs: ...

    def convert_ids_to_tokens(self, ids: int) -> str: ...


class ClassProcessor(Protocol):
    """A processor of transformers, built by `open_processor`."""

    image_processor: Callable[..., Outputs]
    tokenizer: ClassTokenizer
    qformer_tokenizer: ClassTokenizer
    """Tokenizer of InstructBLIP's Q-Former."""
    image_token_ids: Sequence[int | None]
    """Ids of the tokens that it writes for images."""
    return_mm_token_type_ids: bool
    replacements: Sequence[str]
    """The text in the place of each image of the latest call."""

    def __call__(self, **options: object) -> Outputs: ...

    def prepare_inputs_layout(self, **options: object) -> tuple[Any, ...]:
        """Return the images and texts that it reads."""


class Opened:
    """A processor of transformers, and the tokenizer of the run.

    Args:
        folder: the model's folder.
    """

    def __init__(self, processor: ClassProcessor, tokenizer: Tokenizer, folder: Path):
        self.processor = processor
        self.tokenizer = tokenizer
        self.folder = folder
        self.name = type(processor).__name__
        self._is_flat = False

    @property
    def token(self) -> str:
        """What stands for an image in a text, as the processor names it; empty if it does not."""
        names = ("image_placeholder_token", "image_token")  # the first one is Qianfan-OCR's
        found = (getattr(self.processor, name, None) for name in names)
        token = next(filter(None, found), "")
        return getattr(token, "content", token)

    def config(self, what: str) -> Any:
        """Return the configuration of transformers in the folder, which opening the processor has
        read. Raise `UserError` if there is none, which names `what` it is needed for."""
        if not (self.folder / "config.json").is_file():
            raise UserError(
                f"'{self.folder}' has no config.json, which names {what}, for {self.name}; use the "
                "folder of the published model, or one of `torchtitan convert --to hf`"
            )
        from transformers import AutoConfig

        options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        return AutoConfig.from_pretrained(self.folder, **options)

    @property
    def quick_options(self) -> dict[str, object]:
        """Options with which a call writes the same tokens in less time."""
        known = self.processor.image_processor
        return {name: value for name, value in _QUICK.items() if hasattr(known, name)}

    def call(
        self,
        images: Samples,
        texts: Sequence[str],
        return_tensors: str | None = "pt",
        /,
        **options: object,
    ) -> Outputs:
        """Call the processor with texts, the images of each, and options for images. Raise
        `UserError` if it refuses them."""
        nested = [list(sample) for sample in images]
        flat = [image for sample in nested for image in sample]
        has_padding = getattr(self.processor.tokenizer, "pad_token", None) is not None
        self.processor.replacements = ()
        try:
            return self.processor(
                images=flat if self._is_flat else nested,
                text=list(texts),
                images_kwargs={"return_tensors": return_tensors, **options},
                text_kwargs={
                    "return_tensors": None,
                    # ERNIE's class makes one array of the types of all samples' tokens
                    "padding": has_padding and len(nested) > 1,
                    "add_special_tokens": False,
                },
            )
        except Exception as error:  # processors raise various types
            sizes = [f"{image.width} x {image.height}" for image in flat]
            raise UserError(
                f"{self.name} refuses images of {', '.join(sizes[:8])} pixels: {in_words(error)}"
            ) from error

    def first_call(self, images: Images, text: str, return_tensors: str | None) -> Outputs:
        """Find whether the processor takes images by sample, or in one list."""
        try:
            return self.call([images], [text], return_tensors)
        except UserError as error:
            self._is_flat = True
            try:
                return self.call([images], [text], return_tensors)
            except UserError:
                cause = error.__cause__
                assert isinstance(cause, Exception)
                raise UserError(
                    f"{self.name} does not take a text with two images in their places: "
                    f"{in_words(cause)}"
                ) from cause

    def tensors(self, outputs: Outputs, names: Iterable[str]) -> dict[str, Tensor]:
        """Return results for images, in float32 if they have floating point."""
        return {name: self._tensor(name, outputs[name]) for name in names}

    def _tensor(self, name: str, value: object) -> Tensor:
        try:
            tensor = torch.as_tensor(np.asarray(value) if isinstance(value, list) else value)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{self.name} returns {name} of images in one batch with different shapes"
            ) from error
        return tensor.float() if tensor.is_floating_point() else tensor

    def check_finite(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise `UserError` if there are no results for images, or some that are not finite."""
        bad = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
        if bad or not tensors:
            raise UserError(f"{self.name} returns no finite values for {bad or 'images'}")


def noise() -> list["Image"]:
    """Return images of `TRIAL_SIZES`."""
    from PIL import Image

    values = np.random.default_rng(0)
    return [
        Image.fromarray(values.integers(0, 256, (height, width, 3), dtype=np.uint8))
        for width, height in TRIAL_SIZES
    ]


def blank(sizes: Sequence[Size]) -> list["Image"]:
    """Return black images."""
    from PIL import Image

    return [Image.new("RGB", size) for size in sizes]
