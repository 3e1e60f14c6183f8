"""Data loader for supervised fine-tuning on conversations with images."""

from collections.abc import Callable
from dataclasses import dataclass

from torchtitan.components.chat_template import ChatTemplate
from torchtitan.components.data.base import Batch, to_batch
from torchtitan.components.data.finetuning.chat_encoding import ChatEncoder
from torchtitan.components.data.finetuning.samples import Windows, pack_samples, pack_windows
from torchtitan.components.data.finetuning.sft import SFTDataLoader
from torchtitan.components.images.encoder import ImageEncoder
from torchtitan.components.images.files import ImageFile
from torchtitan.components.images.keys import image_keys
from torchtitan.components.images.processor import ImageProcessor
from torchtitan.components.images.reader import ImageReader
from torchtitan.components.images.rows_loader import ROWS_OF_STREAM, ImageRowsDataLoader
from torchtitan.components.tokenizer import Tokenizer


class ImageDataLoader(ImageRowsDataLoader, SFTDataLoader):
    """Conversations with images, packed without splitting, with labels for trained tokens only.

    Images are decoded when a batch is made. A batch has `images`, the `ImageInputs` of its samples,
    in order. Without packing, each row is one document, and the rows end with the longest sample of
    their batch.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ImageRowsDataLoader.Config, SFTDataLoader.Config):
        """Fine-tuning data with images."""

        shuffle_buffer: int = ROWS_OF_STREAM
        """Rows of a stream, with their images, that are shuffled and packed together, for each rank
        and worker."""

        def encoder(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> ImageEncoder:
            chat = ChatEncoder(tokenizer, template, self.train_on, self.accepted_losses())
            return ImageEncoder(chat, self.processor(tokenizer), tokenizer)

        def batch_maker(self, tokenizer: Tokenizer) -> Callable[[Windows, int], Batch]:
            return ImageBatches(self.processor(tokenizer), is_packed=self.packing != "none")

    config: Config

    @property
    def packing_efficiency(self) -> float | None:
        """As in `SFTDataLoader`; None without packing, since rows end with their longest sample."""
        return None if self.config.packing == "none" else super().packing_efficiency


class ImageBatches:
    """Makes batches of windows with images.

    Args:
        is_packed: False if each window has at most one sample; the rows then end with the longest
            one.
    """

    def __init__(self, processor: ImageProcessor, *, is_packed: bool = False):
        self._processor = processor
        self._is_packed = is_packed

    def __call__(self, windows: Windows, seq_len: int) -> Batch:
        if self._is_packed:
            batch = pack_windows(windows, seq_len)
        else:
            batch = _rows(windows)
        images = [
            [ImageFile.from_json(image).decode() for image in sample.images]
            for window in windows
            for sample in window
        ]
        batch["images"] = ImageReader(self._processor).inputs(images, batch["input"])
        batch["image_keys"] = image_keys(self._processor, windows, batch["input"])
        return batch


def _rows(windows: Windows) -> Batch:
    """Return rows of one document each, with padding up to the longest one."""
    longest = max((len(sample.ids) - 1 for window in windows for sample in window), default=1)
    rows = [pack_samples([one.parts[0] for one in window], longest) for window in windows]
    for row in rows:
        del row["positions"]
    return to_batch(rows)
