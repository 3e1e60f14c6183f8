"""Data loaders for answers to prompts with images: pairs, also for reward models, and single
answers with labels."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

from torch import Tensor

from torchtitan.components.chat_template import ChatTemplate
from torchtitan.components.data.base import Batch, to_batch
from torchtitan.components.data.finetuning.chat_encoding import ChatEncoder
from torchtitan.components.data.finetuning.conversation import BrokenSample, Pair, Sample
from torchtitan.components.data.finetuning.encoded import EncodedRow
from torchtitan.components.data.finetuning.preference import (
    AnswerDataLoader,
    PairEncoder,
    PreferenceDataLoader,
    RewardDataLoader,
    RewardEncoder,
    mismatch,
    mismatched_batch,
    pack_pairs,
    with_margins,
)
from torchtitan.components.data.finetuning.samples import Windows
from torchtitan.components.images.encoder import ImageTokens
from torchtitan.components.images.files import ImageFile
from torchtitan.components.images.keys import image_keys
from torchtitan.components.images.processor import ImageProcessor
from torchtitan.components.images.reader import ImageReader
from torchtitan.components.images.rows_loader import ROWS_OF_STREAM, ImageRowsDataLoader
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.protocols.images import ImageInputs
from torchtitan.tools.digests import digest_of


class ImagePairEncoder(PairEncoder):
    """Encodes pairs, and replaces the placeholder that the chat template writes for each image of
    the prompt in both sequences."""

    stored: ClassVar[tuple[str, ...]] = ("images",)
    can_fork = False

    def __init__(self, chat: ChatEncoder, processor: ImageProcessor, tokenizer: Tokenizer):
        super().__init__(chat)
        self._processor = processor
        self._tokens = ImageTokens(processor, tokenizer)

    @property
    def fingerprint(self) -> str:
        return digest_of([super().fingerprint, self._processor.fingerprint])

    def encode(self, sample: Sample) -> EncodedRow:
        assert isinstance(sample, Pair)
        images: Sequence[ImageFile] = sample.prompt.images
        encoded = super().encode(sample)
        form = self._processor.form
        if images and form.reads_prompts:
            images = form.with_prompt(images, self._chat.encode_prompt(sample.prompt).tolist())
        present = [part for part in encoded.parts if len(part.ids)]
        expanded = self._tokens.expand_samples(present, images)
        if any(n < len(images) for _, n in expanded):
            raise BrokenSample(
                f"the chat template writes fewer than its {len(images)} images before one of the "
                "answers"
            )
        answers = iter(expanded)
        parts = tuple(next(answers)[0] if len(part.ids) else part for part in encoded.parts)
        return encoded._replace(parts=parts, images=[image.to_json() for image in images])


class ImageRewardEncoder(ImagePairEncoder, RewardEncoder):
    """Encodes pairs of whole conversations with images, and their margins."""

    stored = (*ImagePairEncoder.stored, *RewardEncoder.stored)


class ImagePreferenceDataLoader(ImageRowsDataLoader, PreferenceDataLoader):
    """Pairs of answers to prompts with images, as `PreferenceDataLoader` packs them; windows end
    with the longest of their batch. Images are decoded when a batch is made.

    A batch has `images`, the `ImageInputs` of its sequences, each of a pair with the images of the
    prompt, and `image_keys` (B, W), see the function.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ImageRowsDataLoader.Config, PreferenceDataLoader.Config):
        """Preference data with images."""

        shuffle_buffer: int = ROWS_OF_STREAM
        """Rows of a stream, with their images, that are shuffled and packed together, for each rank
        and worker."""

        def encoder(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> ImagePairEncoder:
            chat = ChatEncoder(tokenizer, template, "assistant", self.accepted_losses())
            owner = cast(type[ImagePreferenceDataLoader], self._owner)
            return owner.image_encoder(chat, self.processor(tokenizer), tokenizer)

        def batch_maker(self, tokenizer: Tokenizer) -> Callable[[Windows, int], Batch]:
            owner = cast(type[ImagePreferenceDataLoader], self._owner)
            return owner.batches()(self.processor(tokenizer))

    config: Config
    image_encoder: ClassVar[type[ImagePairEncoder]] = ImagePairEncoder

    @classmethod
    def batches(cls) -> "type[_ImagePairBatches]":
        """Return the class that makes batches."""
        return _ImagePairBatches


class ImageAnswerDataLoader(ImagePreferenceDataLoader, AnswerDataLoader):
    """Single answers with a label to prompts with images, as `AnswerDataLoader` packs them.

    A batch also has `mismatched_images`, the images in `mismatched_input`. A prompt that
    would be too long with an answer to another prompt is not shortened, since it would lose its
    images, but is not part of the estimate.
    """

    config: ImagePreferenceDataLoader.Config

    @classmethod
    def batches(cls) -> "type[_ImagePairBatches]":
        return _ImageAnswerBatches


class ImageRewardDataLoader(ImagePreferenceDataLoader, RewardDataLoader):
    """Pairs for reward models of prompts with images, with `margins` as `RewardDataLoader`."""

    config: ImagePreferenceDataLoader.Config
    image_encoder = ImageRewardEncoder

    @classmethod
    def batches(cls) -> "type[_ImagePairBatches]":
        return _ImageRewardBatches


class _ImagePairBatches:
    """Makes batches of windows of pairs."""

    def __init__(self, processor: ImageProcessor):
        self._processor = processor

    def __call__(self, windows: Windows, seq_len: int) -> Batch:
        """Return a batch, with the windows' padding up to the longest."""
        longest = _longest(windows)
        batch = to_batch([pack_pairs(window, longest) for window in windows])
        batch["images"] = self._inputs(windows, batch["input"])
        batch["image_keys"] = image_keys(self._processor, windows, batch["input"])
        return batch

    def _inputs(self, windows: Windows, tokens_BW: Tensor) -> ImageInputs:
        """Return the images of all sequences, in order."""
        rows = [row for window in windows for row in window]
        opened = [[ImageFile.from_json(image).decode() for image in row.images] for row in rows]
        n_sequences = [sum(len(part.ids) > 0 for part in row.parts) for row in rows]
        sequences = [
            images for images, n in zip(opened, n_sequences, strict=True) for _ in range(n)
        ]
        return ImageReader(self._processor).inputs(sequences, tokens_BW)


class _ImageRewardBatches(_ImagePairBatches):
    """Makes batches of windows of pairs with margins."""

    def __call__(self, windows: Windows, seq_len: int) -> Batch:
        return with_margins(super().__call__(windows, seq_len), windows)


class _ImageAnswerBatches(_ImagePairBatches):
    """Makes batches of windows of single answers."""

    def __call__(self, windows: Windows, seq_len: int) -> Batch:
        batch = super().__call__(windows, seq_len)
        mismatched = [mismatch(window, seq_len, shortens=False) for window in windows]
        batch |= mismatched_batch(mismatched, _longest(mismatched))
        batch["mismatched_images"] = self._inputs(mismatched, batch["mismatched_input"])
        return batch


def _longest(windows: Windows) -> int:
    """Return the number of positions of the longest window, at least 1."""
    return max(1, *(sum(map(_n_positions, window)) for window in windows))


def _n_positions(row: EncodedRow) -> int:
    return sum(max(len(part.ids) - 1, 0) for part in row.parts)
