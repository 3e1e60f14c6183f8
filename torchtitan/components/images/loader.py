"""Data loader for supervised fine-tuning on conversations with images."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from torchtitan.components.chat_template import ChatTemplate
from torchtitan.components.data.base import Batch, to_batch
from torchtitan.components.data.finetuning.chat_encoding import ChatEncoder
from torchtitan.components.data.finetuning.row_formats import RowFormat
from torchtitan.components.data.finetuning.samples import SampleSets, Windows, pack_samples
from torchtitan.components.data.finetuning.sft import SFTDataLoader
from torchtitan.components.data.plan import Packing
from torchtitan.components.data.sources.source import Source
from torchtitan.components.images.encoder import ImageEncoder
from torchtitan.components.images.files import ImageFile, ImageOpener
from torchtitan.components.images.keys import image_keys
from torchtitan.components.images.processor import ImageProcessor
from torchtitan.components.images.remote import RemoteImages
from torchtitan.components.images.rows import folder_of, reads_images
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.protocols.images import ImageInputs
from torchtitan.tools.digests import cache_root, digest_of
from torchtitan.tools.errors import UserError


class ImageDataLoader(SFTDataLoader):
    """Conversations with images, one per window, with labels for trained tokens only.

    Images are decoded when a batch is made. A batch has `images`, the `ImageInputs` of its rows,
    and its windows end with its longest sample.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(SFTDataLoader.Config):
        """Fine-tuning data with images."""

        packing: Packing = "none"
        """Packing of samples into windows: only none."""
        image_root: str = ""
        """Folder with the images, to which paths in the data are relative; empty: the folder of the
        data file."""
        fetch_images: bool = False
        """Fetch images behind URLs in rows (http, https), once per host, into the cache; otherwise,
        such rows are broken."""

        def validate(self) -> None:
            SFTDataLoader.Config.validate(self)
            if self.packing != "none":
                raise UserError(
                    f"--dataloader.packing {self.packing}: samples with images are not packed; set "
                    "none"
                )

        def encoder(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> ImageEncoder:
            chat = ChatEncoder(tokenizer, template, self.train_on, self.accepted_losses())
            return ImageEncoder(chat, processor_of(tokenizer), tokenizer)

        def rows(self) -> list[tuple[Source, RowFormat]]:
            """Return the source and row format of each dataset, with the columns of images."""
            remote = RemoteImages(cache_root(self.cache_dir) / "fetched")
            fetched = remote if self.fetch_images else None
            return [
                (
                    source,
                    reads_images(format, ImageOpener(folder_of(source), self.image_root, fetched)),
                )
                for source, format in SFTDataLoader.Config.rows(self)
            ]

        def identity(self) -> dict[str, Any]:
            """Return the identity of the data, of the trained turns and of the folder of images."""
            return SFTDataLoader.Config.identity(self) | {"dataloader.image_root": self.image_root}

    config: Config

    def _open_samples(self) -> SampleSets:
        samples = super()._open_samples()
        self._fingerprint = digest_of(
            [self._fingerprint, processor_of(self._tokenizer).fingerprint]
        )
        return samples

    def batch_maker(self) -> Callable[[Windows, int], Batch]:
        return ImageBatches(processor_of(self._tokenizer))


@lru_cache(maxsize=4)  # opened several times at the start of a run
def processor_of(tokenizer: Tokenizer) -> ImageProcessor:
    """Return the image processor in the folder of a tokenizer. Raise `UserError` without one."""
    if not tokenizer.folder:
        raise UserError("data with images needs the folder of a model with an image processor")
    return ImageProcessor.from_folder(tokenizer.folder, tokenizer)


class ImageBatches:
    """Makes batches of windows of one sample each."""

    def __init__(self, processor: ImageProcessor):
        self._processor = processor

    def __call__(self, windows: Windows, seq_len: int) -> Batch:
        """Return a batch, with the rows' padding up to its longest sample."""
        longest = max((len(sample.ids) - 1 for window in windows for sample in window), default=1)
        rows = [pack_samples([one.parts[0] for one in window], longest) for window in windows]
        for row in rows:
            del row["positions"]  # each row is one document
        batch = to_batch(rows)
        types = np.stack([self._processor.token_types(row["input"]) for row in rows])
        images = [
            [ImageFile.from_json(image).decode() for sample in window for image in sample.images]
            for window in windows
        ]
        tensors = self._processor.inputs(images) if any(images) else {}
        batch["images"] = ImageInputs(tensors=tensors, token_types_BL=torch.from_numpy(types))
        batch["image_keys"] = image_keys(self._processor, windows, batch["input"])
        return batch
