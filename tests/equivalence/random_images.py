"""Images with random pixels and labels, in place of files."""

import zlib
from dataclasses import dataclass

import numpy as np

from torchtitan.components.images.labeled import LabeledImages
from torchtitan.components.images.labeled_loader import LabeledImageDataLoader

N_IMAGES = 64


class RandomImages(LabeledImageDataLoader):
    """Images that depend only on the names of the datasets."""

    @dataclass(kw_only=True, slots=True)
    class Config(LabeledImageDataLoader.Config):
        """Random images."""

        def open(self) -> list[LabeledImages]:
            """Return the images of each dataset."""
            return [self._random(name) for name in self.dataset]

        def _random(self, name: str) -> LabeledImages:
            random = np.random.default_rng(zlib.crc32(name.encode()))
            return LabeledImages(
                key=name,
                pixels=random.integers(0, 256, (N_IMAGES, *self.format.shape), np.uint8),
                labels=random.integers(0, 10, N_IMAGES),
                classes=tuple(map(str, range(10))),
                names=tuple(map(str, range(N_IMAGES))),
            )
