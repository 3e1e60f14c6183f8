"""The data loader of images with labels, with the random numbers that flow matching needs."""

import dataclasses
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import Dataset

from torchtitan.components.data.base import (
    NO_DOCUMENT,
    BaseDataLoader,
    Batch,
    can_resume_position,
)
from torchtitan.components.data.disk_cache import data_digest
from torchtitan.components.data.pretraining.order import BlockOrder
from torchtitan.components.data.workers import Workers
from torchtitan.components.images.labeled import (
    ImageFormat,
    LabeledImages,
    check_same_classes,
    find_source,
    open_images,
)
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.config.code import CacheFolder
from torchtitan.config.configurable import builds
from torchtitan.tools.digests import digest_of
from torchtitan.tools.errors import UserError, require


class LabeledImageDataLoader(BaseDataLoader):
    """Images with labels, each with noise and uniform random numbers of its own.

    The order depends only on the seed: the n-th batch of rank r of R has B images, from place n R B
    + r B of the run. The random numbers depend on the seed and the place, so a batch is the same
    for any number of ranks, after a resume, and in each validation.

    Batches have `pixels` (B, C, H, W) between -1 and 1 and `noise` of the same shape, both float32;
    `classes` (B,) int64; `uniform` (B, 2), float32 between 0 and 1; `weights` (B,) float32, 0 for
    padding at the end of the last epoch; and `documents` (B, 1).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Images with labels."""

        dataset: list[str] = field(default_factory=list)
        """Datasets: each a folder with a folder of images for each class; or rows with an image and
        a label: a file (jsonl, json, csv, parquet or WebDataset's tar), a folder of such files, a
        glob pattern, or a folder written by `datasets.save_to_disk`. Paths of images are relative
        to the file's folder."""
        split: str = "train"
        """Split to read, if the data has more than one."""
        image_size: int = 32
        """Height and width in pixels. Larger images are scaled down and cut to a square; smaller
        ones are skipped, and counted."""
        channels: Literal[1, 3] = 3
        """Colors: 3 (RGB) or 1 (gray)."""
        image_column: str = "image"
        """Column with an image: its path, content, or an object with one of these."""
        label_column: str = "label"
        """Column with a label: a name or a whole number."""
        classes: list[str] = field(default_factory=list)
        """All labels, in the order of their numbers in the model; empty: the labels in the data,
        sorted."""
        broken: Literal["error", "drop"] = "error"
        """Images that cannot be read, and rows without image or label: drop or error."""
        shuffle: bool = True
        """Shuffle the images in each epoch."""
        num_workers: int = 0
        """Worker processes per rank that prepare batches; 0: use the main process."""
        cache_dir: CacheFolder = ""
        """Folder for decoded images; empty: $TORCHTITAN_CACHE or, if it is not set,
        ~/.cache/torchtitan."""
        verify_caches: bool = False
        """Verify all checksums of the decoded images before use; False: verify a sample of them."""

        @builds(lambda: LabeledImageDataLoader)
        def build(self) -> Any:
            """Build the loader of one data-parallel rank."""

        def validate(self) -> None:
            if not self.dataset or "" in self.dataset:
                raise UserError(
                    "--dataloader.dataset is empty; set it to a folder of images, or a file with "
                    "images and labels"
                )
            size, n = self.image_size, self.num_workers
            require(1 <= size <= 2**14, "--dataloader.image_size", size, "from 1 to 16,384")
            require(0 <= n <= 64, "--dataloader.num_workers", n, "from 0 to 64")
            if twice := {name for name in self.classes if self.classes.count(name) > 1}:
                raise UserError(f"--dataloader.classes names {min(twice)!r} twice")

        @property
        def format(self) -> ImageFormat:
            return ImageFormat(
                size=self.image_size,
                channels=self.channels,
                image_column=self.image_column,
                label_column=self.label_column,
                classes=tuple(self.classes),
                broken=self.broken,
            )

        def open(self) -> list[LabeledImages]:
            """Return the images of each dataset, decoded if necessary. Raise `UserError` if they
            cannot be used."""
            sets = [
                open_images(
                    find_source(dataset, self.split, self.format),
                    self.format,
                    self.cache_dir,
                    verify=self.verify_caches,
                )
                for dataset in self.dataset
            ]
            check_same_classes(sets)
            return sets

        def prepare(self, *, tokenizer: Tokenizer) -> None:
            """Decode the images into the cache."""
            self.open()

        def identity(self) -> dict[str, Any]:
            """Return the loader's class, and the datasets' content and format."""

            def resolve(dataset: str) -> Any:
                return find_source(dataset, self.split, self.format)

            digests = [data_digest(resolve, self.cache_dir, dataset) for dataset in self.dataset]
            return BaseDataLoader.Config.identity(self) | {
                "dataloader.content": digest_of(digests),
                "dataloader.format": digest_of(dataclasses.astuple(self.format)),
            }

        def for_validation(self, dataset: str) -> "LabeledImageDataLoader.Config | None":
            """Return the config of `dataset`, with the classes of the training data, in order."""
            if not dataset:
                return None
            classes = self.classes or list(self.open()[0].classes)
            return dataclasses.replace(
                self, dataset=[dataset], classes=classes, shuffle=False, num_workers=0
            )

        def blank_batch(self, n_samples: int, seq_len: int) -> Batch:
            pixels = torch.zeros(n_samples, *self.format.shape)
            return {
                "pixels": pixels,
                "noise": torch.zeros_like(pixels),
                "classes": torch.zeros(n_samples, dtype=torch.int64),
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
        **unused: Any,
    ):
        super().__init__(config)
        self.sets = config.open()
        self.classes = self.sets[0].classes
        self._batch_size = local_batch_size
        self._rank, self._n_ranks = dp_rank, dp_world_size
        self._seed = seed
        self._place = 0  # images that all ranks have read
        n_images = sum(map(len, self.sets))
        self.n_samples = None if epochs is None else epochs * n_images
        self._fingerprint = digest_of([[images.key for images in self.sets], config.shuffle])
        self._workers: Workers | None = None

    def __next__(self) -> Batch:
        if self.n_samples is not None and self._place >= self.n_samples:
            raise StopIteration
        if self._workers is None:
            dataset = _Batches(
                self.sets,
                self._batch_size,
                shuffle=self.config.shuffle,
                seed=self._seed,
                n_samples=self.n_samples,
            )
            self._workers = Workers(
                dataset, sampler=self._places(), num_workers=self.config.num_workers
            )
        batch: Batch = next(self._workers)
        self._place += self._batch_size * self._n_ranks
        if self.n_samples is not None:
            self._place = min(self._place, self.n_samples)
        return batch

    def _places(self) -> Iterable[int]:
        stride = self._batch_size * self._n_ranks
        first = self._place + self._rank * self._batch_size
        if self.n_samples is None:
            return itertools.count(first, stride)
        n_batches = -(-(self.n_samples - self._place) // stride)
        return range(first, first + n_batches * stride, stride)

    def state_dict(self) -> dict[str, Any]:
        return {
            "dataset": self.config.dataset,
            "data": self._fingerprint,
            "place": self._place,
            "seed": self._seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved position. Ignore it with a warning if data or shuffling differ."""
        self.close()
        if can_resume_position(state, self._fingerprint, " ".join(self.config.dataset)):
            # With a different seed, images of this epoch would be repeated or skipped.
            self._place, self._seed = state["place"], state["seed"]

    def document_names(self, documents: torch.Tensor) -> list[str]:
        """Return the location of the image."""
        names = list(itertools.chain.from_iterable(images.names for images in self.sets))
        return [names[number] for number in documents.tolist() if number != NO_DOCUMENT]

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()
            self._workers = None


class _Batches(Dataset[Batch]):
    """Batches of one rank by the place of their first image."""

    def __init__(
        self,
        sets: list[LabeledImages],
        batch_size: int,
        *,
        shuffle: bool,
        seed: int,
        n_samples: int | None,
    ):
        self._sets = sets
        self._batch_size = batch_size
        self._seed = seed
        self._n_samples = n_samples
        sizes = [len(images) for images in sets]
        self._starts = np.cumsum([0, *sizes]).tolist()
        self._order = BlockOrder(sizes, shuffle=shuffle, seed=seed)

    def __getitem__(self, first: int) -> Batch:
        samples = [self._sample(first + k) for k in range(self._batch_size)]
        return {name: torch.from_numpy(np.stack([s[name] for s in samples])) for name in samples[0]}

    def _sample(self, place: int) -> dict[str, np.ndarray]:
        is_padding = self._n_samples is not None and place >= self._n_samples
        number, index = self._order.block(0 if is_padding else place)
        images = self._sets[number]
        random = np.random.Generator(np.random.Philox(key=[self._seed % 2**64, place]))
        # Between 0 and 1, exclusive.
        uniform = (random.integers(0, 2**23, 2) + 0.5) / 2**23
        return {
            "pixels": (images.pixels[index] / np.float32(127.5) - np.float32(1)),
            "noise": random.standard_normal(images.pixels.shape[1:], np.float32),
            "classes": images.labels[index],
            "uniform": uniform.astype(np.float32),
            "weights": np.float32(not is_padding),
            "documents": np.array([NO_DOCUMENT if is_padding else self._starts[number] + index]),
        }
