"""Data loader for supervised fine-tuning on conversations with images."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torchtitan.components.chat_template import ChatTemplate
from torchtitan.components.data.base import Batch, to_batch
from torchtitan.components.data.finetuning.chat_encoding import ChatEncoder
from torchtitan.components.data.finetuning.row_formats import RowFormat
from torchtitan.components.data.finetuning.samples import (
    SampleSets,
    Windows,
    pack_samples,
    pack_windows,
)
from torchtitan.components.data.finetuning.sft import SFTDataLoader
from torchtitan.components.data.sources.source import Source
from torchtitan.components.images.encoder import ImageEncoder
from torchtitan.components.images.files import ImageFile
from torchtitan.components.images.keys import image_keys
from torchtitan.components.images.processor import BackEnd, ImageProcessor, preferred_back_end
from torchtitan.components.images.reader import ImageReader
from torchtitan.components.images.rows import rows_with_images
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.tools.digests import digest_of
from torchtitan.tools.errors import UserError


class ImageDataLoader(SFTDataLoader):
    """Conversations with images, packed without splitting, with labels for trained tokens only.

    Images are decoded when a batch is made. A batch has `images`, the `ImageInputs` of its samples,
    in order. Without packing, each row is one document, and the rows end with the longest sample of
    their batch.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(SFTDataLoader.Config):
        """Fine-tuning data with images."""

        image_root: str = ""
        """Folder with the images, to which paths in the data are relative; empty: the folder of the
        data file."""
        image_back_end: BackEnd = "auto"
        """What computes pixel values, which differ: pillow, torchvision, or auto (torchvision if it
        is installed and the model's processor has it)."""
        fetch_images: bool = False
        """Fetch images behind URLs in rows (http, https), once per host, into the cache; otherwise,
        such rows are broken."""

        def encoder(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> ImageEncoder:
            chat = ChatEncoder(tokenizer, template, self.train_on, self.accepted_losses())
            return ImageEncoder(chat, processor_of(tokenizer, self.image_back_end), tokenizer)

        def rows(self) -> list[tuple[Source, RowFormat]]:
            """Return the source and row format of each dataset, with the columns of images."""
            return rows_with_images(
                SFTDataLoader.Config.rows(self),
                self.image_root,
                fetch_images=self.fetch_images,
                cache_dir=self.cache_dir,
            )

        def identity(self) -> dict[str, Any]:
            """Return the identity of the data, of the trained turns, of the folder of images and of
            what computes pixel values."""
            own = {
                "dataloader.image_root": self.image_root,
                "dataloader.image_back_end": preferred_back_end(self.image_back_end),
            }
            return SFTDataLoader.Config.identity(self) | own

    config: Config

    def _open_samples(self) -> SampleSets:
        samples = super()._open_samples()
        processor = processor_of(self._tokenizer, self.config.image_back_end)
        self._fingerprint = digest_of([self._fingerprint, processor.fingerprint])
        return samples

    @property
    def packing_efficiency(self) -> float | None:
        """As in `SFTDataLoader`; None without packing, since rows end with their longest sample."""
        return None if self.config.packing == "none" else super().packing_efficiency

    def batch_maker(self) -> Callable[[Windows, int], Batch]:
        processor = processor_of(self._tokenizer, self.config.image_back_end)
        return ImageBatches(processor, is_packed=self.config.packing != "none")


@lru_cache(maxsize=4)  # opened several times at the start of a run
def processor_of(tokenizer: Tokenizer, back_end: BackEnd = "auto") -> ImageProcessor:
    """Return the image processor in the folder of a tokenizer. Raise `UserError` without one."""
    if not tokenizer.folder:
        raise UserError("data with images needs the folder of a model with an image processor")
    return ImageProcessor.from_folder(tokenizer.folder, tokenizer, back_end)


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
