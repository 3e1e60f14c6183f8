"""The base class of data loaders for rows with images."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch

from torchtitan.components.data.finetuning.planned_loader import PlannedDataLoader
from torchtitan.components.data.finetuning.row_formats import RowFormat
from torchtitan.components.data.finetuning.samples import SampleSets
from torchtitan.components.data.sources.source import Source, StreamSource
from torchtitan.components.images.opening import BackEnd, preferred_back_end
from torchtitan.components.images.processor import ImageProcessor
from torchtitan.components.images.reader import ImageReader
from torchtitan.components.images.rows import rows_with_images
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.protocols.images import ImageInputs
from torchtitan.tools.digests import digest_of
from torchtitan.tools.errors import UserError


@lru_cache(maxsize=4)  # opened several times at the start of a run
def processor_of(tokenizer: Tokenizer, back_end: BackEnd = "auto") -> ImageProcessor:
    """Return the image processor in the folder of a tokenizer. Raise `UserError` without one."""
    if not tokenizer.folder:
        raise UserError("data with images needs the folder of a model with an image processor")
    return ImageProcessor.from_folder(tokenizer.folder, tokenizer, back_end)


ROWS_OF_STREAM = 256
"""Default rows in a buffer of streams, which holds the images as they are stored."""

WHITE_SIZE = 512
"""Width and height of the images of a dry run, in pixels."""

TEXT_LENGTH = 64
"""Tokens of a text of a dry run after an image without tokens of its own."""


def white_images(processor: ImageProcessor, n_tokens: int) -> ImageInputs:
    """Return white images of `WHITE_SIZE` x `WHITE_SIZE` pixels: as many as fit into `n_tokens`
    tokens, at least one. An image without tokens of its own has a text of `TEXT_LENGTH` tokens."""
    from PIL import Image

    [ids] = processor.expansions([(WHITE_SIZE, WHITE_SIZE)])
    n_images = max(1, n_tokens // (len(ids) if len(ids) > 1 else TEXT_LENGTH))
    images = [Image.new("RGB", (WHITE_SIZE, WHITE_SIZE), "white")] * n_images
    return ImageReader(processor).inputs([images], torch.tensor([ids * n_images]))


class ImageRowsDataLoader(PlannedDataLoader):
    """Rows with images. A subclass also derives from the loader of the same rows without images,
    and its `Config` from both configs, this one first."""

    @dataclass(kw_only=True)
    class Config(PlannedDataLoader.Config):
        """Rows with images."""

        __slots__ = ()  # the subclass has the fields: two bases with slots cannot be combined

        image_root: str = ""
        """Folder of the images; paths in the data are relative to it. Empty: the folder of the data
        file."""
        image_back_end: BackEnd = "auto"
        """Library that computes pixel values, which differ: pillow, torchvision, or auto
        (torchvision if it is installed and the model's processor has it)."""
        fetch_images: bool = False
        """Fetch images behind URLs in rows (http, https), once per host, into the cache; otherwise,
        such rows are broken."""

        has_images: ClassVar[bool] = True

        def check_folder(self, tokenizer: Tokenizer) -> None:
            self.processor(tokenizer)

        def processor(self, tokenizer: Tokenizer) -> ImageProcessor:
            """Return the image processor of the model. Raise `UserError` without one."""
            return processor_of(tokenizer, self.image_back_end)

        def blank_images(self, tokenizer: Callable[[], Tokenizer], n_tokens: int) -> ImageInputs:
            """Return white images that fill `n_tokens` tokens, see `white_images`."""
            return white_images(self.processor(tokenizer()), n_tokens)

        def rows(self) -> list[tuple[Source | StreamSource, RowFormat]]:
            """Return the source and row format of each dataset, with the columns of images."""
            return rows_with_images(
                super().rows(),
                self.image_root,
                fetch_images=self.fetch_images,
                cache_dir=self.cache_dir,
            )

        def identity(self) -> dict[str, object]:
            """Return the identity of the data, of the folder of images and of what computes pixel
            values."""
            return super().identity() | {
                "dataloader.image_root": self.image_root,
                "dataloader.image_back_end": preferred_back_end(self.image_back_end),
            }

    config: Config

    @property
    def processor(self) -> ImageProcessor:
        """Image processor of the model."""
        return self.config.processor(self._tokenizer)

    def _open_samples(self) -> SampleSets:
        samples = super()._open_samples()
        self.fingerprint = digest_of([self.fingerprint, self.processor.fingerprint])
        return samples
