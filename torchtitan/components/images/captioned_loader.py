"""The data loader of images with captions, in buckets of sizes, encoded once."""

import bisect
import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from torchtitan.components.data.base import Batch
from torchtitan.components.data.sources.source import Source
from torchtitan.components.images.buckets import BucketOrder
from torchtitan.components.images.captioned import (
    CaptionedImages,
    CaptionFormat,
    find_captions,
    open_captioned,
)
from torchtitan.components.images.encoded import ROWS, Shard, encode
from torchtitan.components.images.encoders import LATENTS, POOLED, TEXT, EncoderFolder
from torchtitan.components.images.pixel_rows import Size
from torchtitan.components.images.placed_loader import (
    ImageAt,
    PlacedLoader,
    Sample,
    check_image_size,
    scaled,
)
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.config.configurable import builds
from torchtitan.tools.digests import cache_root, digest_of, file_digest
from torchtitan.tools.errors import UserError, require


class CaptionedImageDataLoader(PlacedLoader):
    """Images with captions, see `PlacedLoader`: `pixels` are latents, or pixels between -1 and 1;
    `text` (B, T, text_dim) and `pooled` (B, pooled_dim) are states of the text encoders, float32.

    All images of a global batch have one size, see `BucketOrder`; the last batch of a bucket in an
    epoch ends with padding.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(PlacedLoader.Config):
        """Images with captions."""

        encoders: str = ""
        """Folder of diffusers with text encoders and tokenizers (CLIP in text_encoder and
        tokenizer, T5 in text_encoder_2 and tokenizer_2), and an autoencoder in vae; without vae,
        the model is trained on pixels."""
        image_size: int = 512
        """Height and width in pixels, without buckets."""
        buckets: list[str] = field(default_factory=list)
        """Sizes of images in pixels, each as HEIGHTxWIDTH. An image gets the size with the
        nearest ratio, and is scaled down and cut to this size; smaller images are skipped, and
        counted. Empty: one square of image_size."""
        caption_column: str = "text"
        """Column with a caption."""
        caption_tokens: int = 512
        """Tokens of a caption for T5; longer captions are cut, and counted."""
        encoding_dtype: Literal["bfloat16", "float32"] = "bfloat16"
        """Type of the encoders, and of their results in the cache."""

        @builds(lambda: CaptionedImageDataLoader)
        def build(self) -> object:
            """Build the loader of one data-parallel rank."""

        def validate(self) -> None:
            PlacedLoader.Config.validate(self)
            check_image_size(self.image_size)
            n = self.caption_tokens
            require(1 <= n <= 2**14, "--dataloader.caption_tokens", n, "from 1 to 16,384")
            if not self.encoders:
                raise UserError(
                    "--dataloader.encoders is empty; set it to a folder of diffusers with the text "
                    "encoders of FLUX, such as a download of FLUX.1"
                )
            self.folder.check()
            reduction = self.folder.reduction
            for height, width in self.sizes:
                if height % reduction or width % reduction:
                    given = f"buckets {height}x{width}" if self.buckets else f"image_size {height}"
                    raise UserError(
                        f"--dataloader.{given} must be multiples of {reduction}, the pixels of a "
                        "latent"
                    )

        @property
        def sizes(self) -> list[Size]:
            """Height and width of each bucket."""
            sizes = []
            for text in self.buckets or [f"{self.image_size}x{self.image_size}"]:
                match = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", text)
                if match is None:
                    raise UserError(
                        f"--dataloader.buckets {text!r} must be HEIGHTxWIDTH, such as 448x576"
                    )
                sizes.append((int(match[1]), int(match[2])))
            return sizes

        @property
        def folder(self) -> EncoderFolder:
            """The encoders."""
            dtype = getattr(torch, self.encoding_dtype)
            return EncoderFolder(Path(self.encoders).expanduser(), self.caption_tokens, dtype)

        @property
        def shapes(self) -> list[tuple[int, ...]]:
            """Shapes (channels, height, width) of what the model is trained on."""
            return [self.folder.image_shape((self.channels, *size)) for size in self.sizes]

        @property
        def format(self) -> CaptionFormat:
            return CaptionFormat(
                buckets=tuple(self.sizes),
                channels=self.channels,
                image_column=self.image_column,
                caption_column=self.caption_column,
                broken=self.broken,
            )

        def source(self, dataset: str) -> Source:
            return find_captions(dataset, self.split, self.format, self.cache_dir)

        def open(self, sources: Sequence[Source]) -> list[CaptionedImages]:
            """Return the images of each dataset, decoded if necessary. Raise `UserError` if they
            cannot be used."""
            return [
                open_captioned(source, self.format, self.cache_dir, verify=self.verify_caches)
                for source in sources
            ]

        def prepare(self, *, tokenizer: Tokenizer) -> None:
            """Decode the images into the cache. Ranks encode them, on their devices."""
            self.open(list(map(self.source, self.dataset)))

        def encoder_identity(self) -> str:
            """Return a digest of the encoders and of their settings."""
            root = cache_root(self.cache_dir)
            return digest_of(self.folder.identity(lambda path: file_digest(root, path)))

        def identity(self) -> dict[str, object]:
            """Return the loader's class, and the datasets' content, format and encoders."""
            encoders = {"dataloader.encoders": self.encoder_identity()}
            return PlacedLoader.Config.identity(self) | encoders

        def for_validation(self, dataset: str) -> "CaptionedImageDataLoader.Config | None":
            """Return the config of `dataset`."""
            if not dataset:
                return None
            return dataclasses.replace(self, dataset=[dataset], shuffle=False, num_workers=0)

        def blank_batch(self, n_samples: int, seq_len: int) -> Batch:
            pixels = torch.zeros(n_samples, *self.shapes[0])
            folder = self.folder
            return {
                "pixels": pixels,
                "noise": torch.zeros_like(pixels),
                "text": torch.zeros(n_samples, self.caption_tokens, folder.text_dim),
                "pooled": torch.zeros(n_samples, folder.pooled_dim),
                "uniform": torch.full((n_samples, 2), 0.5),
                "weights": torch.ones(n_samples),
            }

    config: Config

    def __init__(
        self,
        config: Config,
        *,
        local_batch_size: int,
        dp_rank: int = 0,
        dp_world_size: int = 1,
        seed: int = 0,
        epochs: int | None = None,
        global_batch_size: int | None = None,
        **unused: object,
    ):
        sources = list(map(config.source, config.dataset))
        sets = config.open(sources)
        shards = encode(
            sources,
            sets,
            config.folder,
            rank=dp_rank,
            n_ranks=dp_world_size,
            cache_dir=config.cache_dir,
            verify=config.verify_caches,
        )
        self._buckets = [
            _Bucket(sets, shards, number) for number in range(len(config.format.buckets))
        ]
        self._shuffle = config.shuffle
        self._global_batch_size = global_batch_size or local_batch_size * dp_world_size
        order = self._order(seed)
        identity = [[images.key for images in sets], config.encoder_identity()]
        super().__init__(
            config,
            local_batch_size=local_batch_size,
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            seed=seed,
            n_places=None if epochs is None else epochs * order.places_of_epoch,
            fingerprint=digest_of([identity, config.shuffle, self._global_batch_size]),
        )

    def _order(self, seed: int) -> BucketOrder:
        sizes = [len(bucket) for bucket in self._buckets]
        return BucketOrder(sizes, self._global_batch_size, shuffle=self._shuffle, seed=seed)

    def images(self, seed: int) -> ImageAt:
        return _InOrder(self._buckets, self._order(seed))

    def names(self) -> list[str]:
        return list(itertools.chain.from_iterable(bucket.names for bucket in self._buckets))

    def examples(self, most: int) -> Batch:
        """Return the caption states of the first images of the first bucket with images."""
        bucket = next(bucket for bucket in self._buckets if len(bucket))
        samples = [bucket.sample(index) for index in range(min(most, len(bucket)))]
        return {
            name: torch.from_numpy(np.stack([sample[name] for sample in samples]))
            for name in (TEXT, POOLED)
        }


class _Bucket:
    """The images of one size of all datasets."""

    def __init__(self, sets: list[CaptionedImages], shards: list[list[list[Shard]]], number: int):
        self._images = [of_set.buckets[number] for of_set in sets]
        self._shards = [of_shards[number] for of_shards in shards]
        self._starts = list(itertools.accumulate(map(len, self._images), initial=0))

    @property
    def names(self) -> Iterator[str]:
        return itertools.chain.from_iterable(images.names for images in self._images)

    def __len__(self) -> int:
        return self._starts[-1]

    def sample(self, index: int) -> Sample:
        number = bisect.bisect_right(self._starts, index) - 1
        place = index - self._starts[number]
        states = self._shards[number][place // ROWS].row(place % ROWS)
        if LATENTS in states:
            return states
        return {**states, LATENTS: scaled(self._images[number].pixels[place])}


class _InOrder:
    """The images of all buckets, in one order."""

    def __init__(self, buckets: list[_Bucket], order: BucketOrder):
        self._buckets, self._order = buckets, order
        self._starts = np.cumsum([0, *(len(bucket) for bucket in buckets)]).tolist()

    def __call__(self, place: int) -> tuple[int | None, Sample]:
        bucket, index = self._order.image(place)
        sample = self._buckets[bucket].sample(index or 0)
        return None if index is None else self._starts[bucket] + index, sample
