"""Data loader for prompts with images, which models answer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchtitan.components.chat_template import ChatTemplate
from torchtitan.components.data.base import Batch
from torchtitan.components.data.finetuning.chat_encoding import ChatEncoder
from torchtitan.components.data.finetuning.conversation import BrokenSample, Prompt, Sample
from torchtitan.components.data.finetuning.encoded import EncodedRow, EncodedSample
from torchtitan.components.data.finetuning.prompt_streams import PromptStreamDataLoader
from torchtitan.components.data.finetuning.prompts import PromptDataLoader, PromptRowEncoder
from torchtitan.components.data.finetuning.samples import Windows
from torchtitan.components.images.encoder import expand_prompt
from torchtitan.components.images.loader import ImageBatches
from torchtitan.components.images.processor import ImageProcessor
from torchtitan.components.images.reader import ImageReader
from torchtitan.components.images.rows_loader import ROWS_OF_STREAM, ImageRowsDataLoader
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.tools.digests import digest_of
from torchtitan.tools.errors import UserError


class ImagePromptEncoder(PromptRowEncoder):
    """Encodes prompts with the tokens of their images."""

    stored = (*PromptRowEncoder.stored, "images")
    can_fork = False

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
        try:
            ids, images = expand_prompt(
                self._processor, self._tokenizer, row.ids.tolist(), sample.prompt.images
            )
        except UserError as error:  # such as sizes that the processor refuses
            raise BrokenSample(str(error)) from error
        part = EncodedSample(ids, np.zeros(len(ids), bool))
        return row._replace(parts=(part,), images=[image.to_json() for image in images])


class _ImagePrompts:
    """Base of loaders of image prompts for methods that sample their answers."""

    config: Any
    _tokenizer: Tokenizer
    packs_answers = False

    def image_reader(self) -> ImageReader:
        return ImageReader(self.config.processor(self._tokenizer))

    def answer_batch_maker(self) -> Callable[[Windows, int], Batch]:
        return ImageBatches(self.config.processor(self._tokenizer))


class ImagePromptStreamDataLoader(_ImagePrompts, PromptStreamDataLoader):
    """Prompts with images of streams; see `ImagePromptDataLoader`."""


class ImagePromptDataLoader(_ImagePrompts, ImageRowsDataLoader, PromptDataLoader):
    """Prompts with images. Their answers are trained with the images, one per window."""

    @dataclass(kw_only=True, slots=True)
    class Config(ImageRowsDataLoader.Config, PromptDataLoader.Config):
        """Prompts with images to answer."""

        shuffle_buffer: int = ROWS_OF_STREAM
        """Rows of a stream, with their images, that are shuffled together, for each rank and
        worker."""

        def encoder(
            self, tokenizer: Tokenizer, template: ChatTemplate | None
        ) -> ImagePromptEncoder:
            chat = ChatEncoder(tokenizer, template, "assistant", self.accepted_losses())
            return ImagePromptEncoder(chat, self.processor(tokenizer), tokenizer)

    config: Config

    @classmethod
    def stream_class(cls) -> type[ImagePromptStreamDataLoader]:
        return ImagePromptStreamDataLoader
