"""The form of processors that write an image as rows of tokens, each of which another token ends,
such as Fuyu's. They put one image before each text themselves; here, a text places its images.

Source: transformers 5.23.0, models/fuyu; its processor itself fails with Pillow.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Protocol, cast

import numpy as np
from torch import Tensor

from torchtitan.components.images.forms.form import Expansion, ImageForm
from torchtitan.components.images.opened import Images, Opened, Outputs, Samples, Size, blank
from torchtitan.tools.errors import UserError

_CACHED_SIZES = 4096


class _Height(Protocol):
    height: int
    width: int


class _Patches(Protocol):
    """An image processor that divides images into patches."""

    size: _Height
    patch_size: _Height

    def __call__(self, images: Images, **options: object) -> Outputs: ...

    def patchify_image(self, image: np.ndarray, patch_size: _Height) -> np.ndarray: ...


class RowsForm(ImageForm):
    """A token for each patch of an image, and one at the end of each row of patches."""

    names = {"FuyuProcessor"}

    def __init__(self, opened: Opened, token: str):
        super().__init__(opened, token)
        self.image_ids = frozenset(i for i in opened.processor.image_token_ids if i is not None)
        self._patches = cast(_Patches, opened.processor.image_processor)
        size, patch = self._patches.size, self._patches.patch_size
        if size.height % patch.height or size.width % patch.width:
            raise UserError(
                f"preprocessor_config.json: size {size.height} x {size.width} must be multiples of "
                f"patch_size {patch.height} x {patch.width}"
            )
        self._cached = functools.lru_cache(maxsize=_CACHED_SIZES)(self._ids)

    def expand(self, sizes: Sequence[Size]) -> Expansion:
        return Expansion([self.token] * len(sizes), [self._cached(size) for size in sizes])

    def _ids(self, size: Size) -> np.ndarray:
        [(pixels, n_columns)] = self._cut(blank([size]), **self.opened.quick_options)
        [end_id] = self.image_ids - {self.token_id}
        n_rows = pixels.shape[-2] // self._patches.patch_size.height
        return np.array(([self.token_id] * n_columns + [end_id]) * n_rows, dtype=np.int32)

    def inputs(self, images: Samples) -> dict[str, Tensor]:
        size = self._patches.patch_size
        flat = [image for sample in images for image in sample]
        patches = [self._patches.patchify_image(cut, size) for cut, _ in self._cut(flat)]
        joined = np.concatenate([np.asarray(each) for each in patches])
        return self.opened.tensors({"pixel_values": joined}, ["pixel_values"])

    def _cut(self, images: Images, **options: object) -> Iterator[tuple[np.ndarray, int]]:
        """Yield the pixels (C, H, W) of each image, without rows and columns of patches that are
        padding only, and the number of its columns."""
        outputs, patch = self._patches(images, **options), self._patches.patch_size
        names = ("images", "image_unpadded_heights", "image_unpadded_widths")
        for [pixels], [height], [width] in zip(*(outputs[name] for name in names), strict=True):
            n_rows, n_columns = -(-int(height) // patch.height), -(-int(width) // patch.width)
            yield pixels[:, : n_rows * patch.height, : n_columns * patch.width], n_columns
