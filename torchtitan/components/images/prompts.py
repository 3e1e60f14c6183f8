"""Data loader for prompts with images, which models answer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchtitan.components.chat_template import ChatTemplate
from torchtitan.components.data.base import Batch
from torchtitan.components.data.finetuning.chat_encoding import (
    ChatEncoder,
    EncodedRow,
    EncodedSample,
)
from torchtitan.components.data.finetuning.conversation import BrokenSample, Prompt, Sample
from torchtitan.components.data.finetuning.prompts import PromptDataLoader, PromptRowEncoder
from torchtitan.components.data.finetuning.row_formats import RowFormat
from torchtitan.components.data.finetuning.samples import SampleSets, Windows
from torchtitan.components.data.sources.source import Source
from torchtitan.components.images.encoder import expand_prompt
from torchtitan.components.images.loader import ImageBatches, processor_of
from torchtitan.components.images.processor import BackEnd, ImageProcessor, preferred_back_end
from torchtitan.components.images.reader import ImageReader
from torchtitan.components.images.rows import rows_with_images
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.tools.digests import digest_of
from torchtitan.tools.errors import UserError


class ImagePromptEncoder(PromptRowEncoder):
    """Encodes prompts with the tokens of their images."""

    stored = (*PromptRowEncoder.stored, "images")

    def __init__(self, chat: ChatEncoder, processor: ImageProcessor, tokenizer: Tokenizer):
        super().__init__(chat)
        self._processor = processor
        self._tokenizer = tokenizer

    @property
    def fingerprint(self) -> str:
        return digest_of([super().fingerprint, self._processor.fingerprint])

    def encode(self, sample: Sample) -> EncodedRow:
        assert isinstance(sample, Prompt)
        row = super().encode(sample)
        images = sample.prompt.images
        try:
            ids = expand_prompt(self._processor, self._tokenizer, row.ids.tolist(), images)
        except UserError as error:  # such as sizes that the processor refuses
            raise BrokenSample(str(error)) from error
        part = EncodedSample(ids, np.zeros(len(ids), bool))
        return row._replace(parts=(part,), images=[image.to_json() for image in images])


class ImagePromptDataLoader(PromptDataLoader):
    """Prompts with images. Their answers are trained with the images, one per window."""

    @dataclass(kw_only=True, slots=True)
    class Config(PromptDataLoader.Config):
        """Prompts with images to answer."""

        image_root: str = ""
        """Folder with the images, to which paths in the data are relative; empty: the folder of the
        data file."""
        fetch_images: bool = False
        """Fetch images behind URLs in rows (http, https), once per host, into the cache; otherwise,
        such rows are broken."""
        image_back_end: BackEnd = "auto"
        """What computes pixel values, which differ: pillow, torchvision, or auto (torchvision if it
        is installed and the model's processor has it)."""

        def encoder(
            self, tokenizer: Tokenizer, template: ChatTemplate | None
        ) -> ImagePromptEncoder:
            chat = ChatEncoder(tokenizer, template, "assistant", self.accepted_losses())
            return ImagePromptEncoder(chat, processor_of(tokenizer, self.image_back_end), tokenizer)

        def rows(self) -> list[tuple[Source, RowFormat]]:
            """Return the source and row format of each dataset, with the columns of images."""
            return rows_with_images(
                PromptDataLoader.Config.rows(self),
                self.image_root,
                fetch_images=self.fetch_images,
                cache_dir=self.cache_dir,
            )

        def identity(self) -> dict[str, Any]:
            """Return the identity of the data, of the folder of images and of what computes pixel
            values."""
            own = {
                "dataloader.image_root": self.image_root,
                "dataloader.image_back_end": preferred_back_end(self.image_back_end),
            }
            return PromptDataLoader.Config.identity(self) | own

    config: Config
    packs_answers = False

    def _open_samples(self) -> SampleSets:
        samples = super()._open_samples()
        processor = processor_of(self._tokenizer, self.config.image_back_end)
        self._fingerprint = digest_of([self._fingerprint, processor.fingerprint])
        return samples

    def image_reader(self) -> ImageReader:
        return ImageReader(processor_of(self._tokenizer, self.config.image_back_end))

    def answer_batch_maker(self) -> Callable[[Windows, int], Batch]:
        return ImageBatches(processor_of(self._tokenizer, self.config.image_back_end))
