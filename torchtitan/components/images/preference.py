"""Data loader for pairs of answers to prompts with images."""

from collections.abc import Callable
from dataclasses import dataclass

from torchtitan.components.chat_template import ChatTemplate
from torchtitan.components.data.base import Batch, to_batch
from torchtitan.components.data.finetuning.chat_encoding import ChatEncoder, EncodedRow
from torchtitan.components.data.finetuning.conversation import BrokenSample, Pair, Sample
from torchtitan.components.data.finetuning.preference import (
    SIDES,
    PairEncoder,
    PreferenceDataLoader,
    pack_pairs,
)
from torchtitan.components.data.finetuning.samples import Windows
from torchtitan.components.images.encoder import ImageTokens
from torchtitan.components.images.files import ImageFile
from torchtitan.components.images.keys import image_keys
from torchtitan.components.images.processor import ImageProcessor
from torchtitan.components.images.reader import ImageReader
from torchtitan.components.images.rows_loader import ImageRowsDataLoader
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.tools.digests import digest_of


class ImagePairEncoder(PairEncoder):
    """Encodes pairs, and replaces the placeholder that the chat template writes for each image of
    the prompt in both sequences."""

    stored = ("images",)

    def __init__(self, chat: ChatEncoder, processor: ImageProcessor, tokenizer: Tokenizer):
        super().__init__(chat)
        self._processor = processor
        self._tokens = ImageTokens(processor, tokenizer)

    @property
    def fingerprint(self) -> str:
        return digest_of([super().fingerprint, self._processor.fingerprint])

    def encode(self, sample: Sample) -> EncodedRow:
        assert isinstance(sample, Pair)
        images = sample.prompt.images
        expanded = self._tokens.expand_samples(super().encode(sample).parts, images)
        if any(n < len(images) for _, n in expanded):
            raise BrokenSample(
                f"the chat template writes fewer than its {len(images)} images before one of the "
                "answers"
            )
        parts = tuple(part for part, _ in expanded)
        return EncodedRow(parts, images=[image.to_json() for image in images])


class ImagePreferenceDataLoader(ImageRowsDataLoader, PreferenceDataLoader):
    """Pairs of answers to prompts with images, as `PreferenceDataLoader` packs them; windows end
    with the longest of their batch. Images are decoded when a batch is made.

    A batch has `images`, the `ImageInputs` of its sequences, each of a pair with the images of the
    prompt, and `image_keys` (B, W), see the function.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ImageRowsDataLoader.Config, PreferenceDataLoader.Config):
        """Preference data with images."""

        def encoder(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> ImagePairEncoder:
            chat = ChatEncoder(tokenizer, template, "assistant", self.accepted_losses())
            return ImagePairEncoder(chat, self.processor(tokenizer), tokenizer)

    config: Config

    def batch_maker(self) -> Callable[[Windows, int], Batch]:
        return _ImagePairBatches(self.processor)


class _ImagePairBatches:
    """Makes batches of windows of pairs."""

    def __init__(self, processor: ImageProcessor):
        self._processor = processor

    def __call__(self, windows: Windows, seq_len: int) -> Batch:
        """Return a batch, with the windows' padding up to the longest."""
        longest = max(1, *(sum(map(_n_positions, window)) for window in windows))
        batch = to_batch([pack_pairs(window, longest) for window in windows])
        pairs = [pair for window in windows for pair in window]
        opened = [[ImageFile.from_json(image).decode() for image in pair.images] for pair in pairs]
        sequences = [images for images in opened for _ in SIDES]
        batch["images"] = ImageReader(self._processor).inputs(sequences, batch["input"])
        batch["image_keys"] = image_keys(self._processor, windows, batch["input"])
        return batch


def _n_positions(pair: EncodedRow) -> int:
    return sum(len(part.ids) - 1 for part in pair.parts)
