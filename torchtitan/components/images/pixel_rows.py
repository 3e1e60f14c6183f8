"""Rows of a dataset as pixels of a few sizes and a text each; skipped rows are counted."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from torchtitan.components.data.finetuning.conversation import BrokenSample
from torchtitan.components.data.report import ExampleCounter
from torchtitan.components.data.sources.rows import Row
from torchtitan.components.data.sources.source import Source
from torchtitan.components.images.files import ImageOpener, decoded
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import read_regular
from torchtitan.tools.logging import logger

Size = tuple[int, int]
"""Height and width in pixels."""


class PixelRow(NamedTuple):
    """An image that is used."""

    bucket: int
    """Index of its size."""
    pixels: np.ndarray
    """uint8, (channels, height, width)."""
    text: str
    """Its label or caption."""
    where: str
    """Location of the row."""


@dataclass
class PixelRows:
    """Reads the rows of a source.

    An image gets the size whose ratio of height and width is nearest to its own. It is scaled to
    cover this size, and the rest is cut off on both sides.
    """

    source: Source
    sizes: Sequence[Size]
    channels: int
    """3 (RGB), or 1 (gray)."""
    image_columns: Sequence[str]
    """Column with the image: the first of these that a row has."""
    text_columns: Sequence[str]
    """Column with the text: the first of these that a row has, also if it is empty there."""
    text_of: Callable[[object], str]
    """Returns the text of a cell. Raises `BrokenSample`."""
    drops_broken: bool
    """False: an image that cannot be read, or a row without image or text, is an error."""
    broken: ExampleCounter = field(default_factory=ExampleCounter, init=False)
    too_small: ExampleCounter = field(default_factory=ExampleCounter, init=False)

    def read(self) -> Iterator[PixelRow]:
        """Yield the images in order; warn of skipped ones at the end.

        Raises:
            UserError: for a broken row, unless `drops_broken`; and if no image is left.
        """
        n_rows = 0
        for part in self.source.parts:
            # A row of a folder names a file in it, by its own path.
            opener = ImageOpener(part.folder)
            for row in part.rows(lambda n: None):
                if row.values is None and not row.error:
                    continue  # a blank line
                image = self._row(row, opener)
                if image is not None:
                    n_rows += 1
                    yield image
        self._report(n_rows)

    def _report(self, n_rows: int) -> None:
        smallest = min(self.sizes)
        shown = f"{smallest[1]} x {smallest[0]}" if len(self.sizes) == 1 else "their bucket's"
        left_out = {
            "cannot be read": self.broken,
            f"are smaller than {shown} pixels": self.too_small,
        }
        name = self.source.name
        for reason, counter in left_out.items():
            if counter.count:
                examples = "; ".join(counter.in_words())
                logger.warning("%s: %d images %s: %s", name, counter.count, reason, examples)
        if not n_rows:
            reasons = "; ".join(f"{c.count} {reason}" for reason, c in left_out.items() if c.count)
            raise UserError(f"{name} has no image to train on{reasons and ': ' + reasons}")

    def _row(self, row: Row, opener: ImageOpener) -> PixelRow | None:
        """Return the image of a row, or None to skip it."""
        try:
            cells = row.values
            if cells is None:
                raise BrokenSample(row.error)
            # An empty label is an error, not the label of another column.
            text_columns = [name for name in self.text_columns if name in cells]
            text = self.text_of(_first(cells, text_columns[:1] or self.text_columns))
            image = opener.open(_only(_first(cells, self.image_columns)))
            bucket = nearest(self.sizes, (image.height, image.width))
            height, width = self.sizes[bucket]
            if image.width < width or image.height < height:
                self.too_small.add(row.where, f"{image.width} x {image.height} pixels")
                return None
            content = image.content or read_regular(Path(image.path))
            pixels = _pixels(content, (height, width), self.channels)
            return PixelRow(bucket, pixels, text, row.where)
        except BrokenSample as error:
            if not self.drops_broken:
                raise UserError(
                    f"{row.where}: {error}; repair or remove it, or drop such rows: "
                    "--dataloader.broken drop"
                ) from error
            self.broken.add(row.where, str(error))
            return None


def nearest(sizes: Sequence[Size], size: Size) -> int:
    """Return the index of the size whose ratio of height and width is nearest to the ratio of
    `size`, in logarithms; the first of several."""
    wanted = math.log(size[0] / size[1])
    return min(range(len(sizes)), key=lambda n: abs(math.log(sizes[n][0] / sizes[n][1]) - wanted))


def _first(cells: Mapping[str, object], columns: Sequence[str]) -> object:
    """Return the cell of the first of several columns that a row has."""
    for column in columns:
        if cells.get(column) is not None:
            return cells[column]
    raise BrokenSample(f"it has no {columns[0]!r}, but {', '.join(cells) or 'no column'}")


def _only(cell: object) -> object:
    """Return the image of a cell, which WebDataset's rows have in a list."""
    if not isinstance(cell, list):
        return cell
    if len(cell) != 1:
        raise BrokenSample(f"it has {len(cell)} images, and must have one")
    return cell[0]


def _pixels(content: bytes, size: Size, channels: int) -> np.ndarray:
    """Return an encoded image, scaled and cut, as uint8 (channels, height, width)."""
    from PIL import Image, ImageOps

    image = decoded(content)
    if image.size != size[::-1]:
        image = ImageOps.fit(image, size[::-1], Image.Resampling.LANCZOS)
    if channels == 1:
        return np.asarray(image.convert("L"))[None]
    return np.asarray(image).transpose(2, 0, 1)
