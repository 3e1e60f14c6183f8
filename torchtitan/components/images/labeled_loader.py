"""The data loader of images with labels, with the random numbers that flow matching needs."""

import dataclasses
import itertools
from dataclasses import dataclass, field

import numpy as np
import torch

from torchtitan.components.data.base import Batch
from torchtitan.components.data.pretraining.order import BlockOrder
from torchtitan.components.data.sources.source import Source
from torchtitan.components.images.labeled import (
    ImageFormat,
    LabeledImages,
    check_same_classes,
    find_source,
    open_images,
)
from torchtitan.components.images.placed_loader import (
    ImageAt,
    PlacedLoader,
    Sample,
    check_image_size,
    scaled,
)
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.config.configurable import builds
from torchtitan.tools.digests import digest_of
from torchtitan.tools.errors import UserError


class LabeledImageDataLoader(PlacedLoader):
    """Images with labels, see `PlacedLoader`: `pixels` are between -1 and 1, and `classes` (B,)
    int64. Only the end of the last epoch has padding."""

    @dataclass(kw_only=True, slots=True)
    class Config(PlacedLoader.Config):
        """Images with labels."""

        image_size: int = 32
        """Height and width in pixels. Larger images are scaled down and cut to a square; smaller
        ones are skipped, and counted."""
        label_column: str = "label"
        """Column with a label: a name or a whole number."""
        classes: list[str] = field(default_factory=list)
        """All labels, in the order of their numbers in the model; empty: the labels in the data,
        sorted."""

        @builds(lambda: LabeledImageDataLoader)
        def build(self) -> object:
            """Build the loader of one data-parallel rank."""

        def validate(self) -> None:
            PlacedLoader.Config.validate(self)
            check_image_size(self.image_size)
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

        def source(self, dataset: str) -> Source:
            return find_source(dataset, self.split, self.format, self.cache_dir)

        def open(self) -> list[LabeledImages]:
            """Return the images of each dataset, decoded if necessary. Raise `UserError` if they
            cannot be used."""
            sets = [
                open_images(
                    self.source(dataset), self.format, self.cache_dir, verify=self.verify_caches
                )
                for dataset in self.dataset
            ]
            check_same_classes(sets)
            return sets

        def prepare(self, *, tokenizer: Tokenizer) -> None:
            """Decode the images into the cache."""
            self.open()

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
        **unused: object,
    ):
        self.sets = config.open()
        self.classes = self.sets[0].classes
        super().__init__(
            config,
            local_batch_size=local_batch_size,
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            seed=seed,
            n_places=None if epochs is None else epochs * sum(map(len, self.sets)),
            fingerprint=digest_of([[images.key for images in self.sets], config.shuffle]),
        )

    def images(self, seed: int) -> ImageAt:
        return _InOrder(self.sets, self.config.shuffle, seed)

    def names(self) -> list[str]:
        return list(itertools.chain.from_iterable(images.names for images in self.sets))


class _InOrder:
    """The images of several sets, in one order."""

    def __init__(self, sets: list[LabeledImages], shuffle: bool, seed: int):
        self._sets = sets
        sizes = [len(images) for images in sets]
        self._starts = np.cumsum([0, *sizes]).tolist()
        self._order = BlockOrder(sizes, shuffle=shuffle, seed=seed)

    def __call__(self, place: int) -> tuple[int, Sample]:
        number, index = self._order.block(place)
        images = self._sets[number]
        values = {"pixels": scaled(images.pixels[index]), "classes": images.labels[index]}
        return self._starts[number] + index, values
