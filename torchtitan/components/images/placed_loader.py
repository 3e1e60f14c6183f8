"""The base of loaders of images: batches whose content depends only on their place in the run."""

import dataclasses
import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch.utils.data import Dataset

from torchtitan.components.data.base import NO_DOCUMENT, BaseDataLoader, Batch, can_resume_position
from torchtitan.components.data.disk_cache import data_digest
from torchtitan.components.data.plan.sampler import State
from torchtitan.components.data.sources.source import Source
from torchtitan.components.data.workers import Workers
from torchtitan.config.code import CacheFolder
from torchtitan.tools.digests import digest_of
from torchtitan.tools.errors import UserError, require

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Sample = Mapping[str, np.ndarray]

ImageAt = Callable[[int], tuple[int | None, Sample]]
"""Maps a place in the run to the number of its image, None for padding, and its values, which have
`pixels`; padding has the values of any image."""


class PlacedLoader(BaseDataLoader):
    """Images, each with its own noise and uniform random numbers.

    The n-th batch of rank r of R has B images, from place n R B + r B of the run. The random
    numbers depend on the seed and the place, so a batch is the same for any number of ranks, after
    a resume, and in each validation.

    Batches have `pixels` (B, C, H, W) and `noise` of the same shape, both float32; `uniform`
    (B, 2), float32 between 0 and 1; `weights` (B,) float32, 0 for padding; `documents` (B, 1); and
    other values of the images.

    Args:
        n_places: images of all epochs, with padding between them; None: endless.
        fingerprint: digest of the data and of all that determines its order, except the seed.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Images, and how they are read."""

        dataset: list[str] = field(default_factory=list)
        """Datasets: each a folder of images (with a folder for each class, or with captions); or
        rows with an image: a file (jsonl, json, csv, parquet or WebDataset's tar), a folder of such
        files, a glob pattern, or a folder written by `datasets.save_to_disk`. Paths of images are
        relative to the file's folder."""
        split: str = "train"
        """Split to read, if the data has more than one."""
        channels: Literal[1, 3] = 3
        """Colors: 3 (RGB) or 1 (gray)."""
        image_column: str = "image"
        """Column with an image: its path, content, or an object with one of these."""
        broken: Literal["error", "drop"] = "error"
        """Images that cannot be read, and rows without image, label or caption: drop or error."""
        shuffle: bool = True
        """Shuffle the images in each epoch."""
        num_workers: int = 0
        """Worker processes per rank that prepare batches; 0: use the main process."""
        cache_dir: CacheFolder = ""
        """Folder for decoded and encoded images; empty: $TORCHTITAN_CACHE or, if it is not set,
        ~/.cache/torchtitan."""
        verify_caches: bool = False
        """Verify all checksums of cached images before use; False: verify a sample of them."""

        def validate(self) -> None:
            if not self.dataset or "" in self.dataset:
                raise UserError(
                    "--dataloader.dataset is empty; set it to a folder of images, or a file with "
                    "images and labels (or captions)"
                )
            n = self.num_workers
            require(0 <= n <= 64, "--dataloader.num_workers", n, "from 0 to 64")

        @property
        @abstractmethod
        def format(self) -> "DataclassInstance":
            """Dataclass of what decoding depends on."""

        @abstractmethod
        def source(self, dataset: str) -> Source:
            """Return the rows of a dataset. Raise `UserError` if there is no such dataset."""

        def identity(self) -> dict[str, object]:
            """Return the loader's class, and the datasets' content and format."""
            digests = [
                data_digest(self.source, self.cache_dir, dataset) for dataset in self.dataset
            ]
            return BaseDataLoader.Config.identity(self) | {
                "dataloader.content": digest_of(digests),
                "dataloader.format": digest_of(dataclasses.astuple(self.format)),
            }

    config: Config

    def __init__(
        self,
        config: Config,
        *,
        local_batch_size: int,
        dp_rank: int,
        dp_world_size: int,
        seed: int,
        n_places: int | None,
        fingerprint: str,
    ):
        super().__init__(config)
        self._batch_size = local_batch_size
        self._rank, self._n_ranks = dp_rank, dp_world_size
        self._seed = seed
        self._place = 0  # images that all ranks have read
        self.n_samples = n_places
        self._fingerprint = fingerprint
        self._workers: Workers | None = None

    @abstractmethod
    def images(self, seed: int) -> ImageAt:
        """Return the images in the order of a seed."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return the location of each image, by its number."""

    def __next__(self) -> Batch:
        if self.n_samples is not None and self._place >= self.n_samples:
            raise StopIteration
        if self._workers is None:
            dataset = _Batches(
                self.images(self._seed), self._batch_size, self._seed, self.n_samples
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

    def state_dict(self) -> State:
        return {
            "dataset": self.config.dataset,
            "data": self._fingerprint,
            "place": self._place,
            "seed": self._seed,
        }

    def load_state_dict(self, state: State) -> None:
        """Restore a saved position. Ignore it with a warning if data or shuffling differ."""
        self.close()
        if can_resume_position(state, self._fingerprint, " ".join(self.config.dataset)):
            # With a different seed, images of this epoch would be repeated or skipped.
            self._place, self._seed = state["place"], state["seed"]

    def document_names(self, documents: torch.Tensor) -> list[str]:
        """Return the location of the image."""
        names = self.names()
        return [names[number] for number in documents.tolist() if number != NO_DOCUMENT]

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()
            self._workers = None


@dataclass
class _Batches(Dataset[Batch]):
    """Batches of one rank by the place of their first image."""

    image_at: ImageAt
    batch_size: int
    seed: int
    n_places: int | None

    def __getitem__(self, first: int) -> Batch:
        samples = [self._sample(first + k) for k in range(self.batch_size)]
        return {name: torch.from_numpy(np.stack([s[name] for s in samples])) for name in samples[0]}

    def _sample(self, place: int) -> dict[str, np.ndarray | np.float32]:
        is_after_end = self.n_places is not None and place >= self.n_places
        number, values = self.image_at(0 if is_after_end else place)
        is_padding = is_after_end or number is None
        random = np.random.Generator(np.random.Philox(key=[self.seed % 2**64, place]))
        # Between 0 and 1, exclusive.
        uniform = (random.integers(0, 2**23, 2) + 0.5) / 2**23
        return {
            **values,
            "noise": random.standard_normal(values["pixels"].shape, np.float32),
            "uniform": uniform.astype(np.float32),
            "weights": np.float32(not is_padding),
            "documents": np.array([NO_DOCUMENT if is_padding else number]),
        }


def check_image_size(size: int) -> None:
    """Raise `UserError` for an impossible `--dataloader.image_size`."""
    require(1 <= size <= 2**14, "--dataloader.image_size", size, "from 1 to 16,384")


def scaled(pixels: np.ndarray) -> np.ndarray:
    """Map uint8 to float32 between -1 and 1."""
    return pixels / np.float32(127.5) - np.float32(1)
