"""Images with labels, decoded once to pixels of one size in the disk cache."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.components.data.disk_cache import map_array, open_or_build
from torchtitan.components.data.finetuning.conversation import BrokenSample
from torchtitan.components.data.report import ExampleCounter
from torchtitan.components.data.sources.paths import searched_folder
from torchtitan.components.data.sources.rows import Document, OnRead, Part, Row
from torchtitan.components.data.sources.source import Catalog, Source, StreamSource, resolve_source
from torchtitan.components.images.files import ImageOpener, decoded
from torchtitan.tools.durable import new_file
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import read_regular
from torchtitan.tools.logging import logger

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif", ".ppm")

_VERSION = 1
_NO_CATALOG: Catalog[Any] = Catalog("image dataset", {}, {})
_PIXELS = "pixels.u8"
_LABELS = "labels.i64"
_DESCRIPTION = "images.json"


@dataclass(frozen=True, kw_only=True)
class ImageFormat:
    """Shape of the images that a dataset yields."""

    size: int
    """Height and width in pixels. The shorter side of a larger image is scaled to it, and the rest
    is cut off on both sides."""
    channels: int
    """3 (RGB), or 1 (gray)."""
    image_column: str = "image"
    label_column: str = "label"
    classes: tuple[str, ...] = ()
    """Labels in the order of their numbers; empty: the labels of the data, sorted."""
    broken: str = "error"
    """Images that cannot be read, and rows without a label: `error` or `drop`."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width."""
        return self.channels, self.size, self.size


@dataclass(frozen=True)
class LabeledImages:
    """The N images of a dataset, in its order."""

    key: str
    """Digest of the content."""
    pixels: np.ndarray
    """uint8, (N, channels, size, size)."""
    labels: np.ndarray
    """Number of each image's class, int64 (N,)."""
    classes: tuple[str, ...]
    names: tuple[str, ...]
    """Location of each image."""

    def __len__(self) -> int:
        return len(self.labels)


class FolderPart(Part):
    """Images in a folder of folders, one for each class. Rows have the columns of `format`."""

    def __init__(self, folder: Path, format: ImageFormat):
        super().__init__(str(folder))
        self._folder = self.folder = folder
        self._format = format
        self._files = sorted(_images_in(folder))

    def size(self) -> int:
        return sum(path.stat().st_size for path in self._files)

    def contents(self, digest: Callable[[Path], str]) -> list[str]:
        return [f"{path.parent.name}/{path.name} {digest(path)}" for path in self._files]

    def rows(self, on_read: OnRead) -> Iterator[Row]:
        for path in self._files:
            on_read(path.stat().st_size)
            name = path.relative_to(self._folder)
            columns = self._format.image_column, self._format.label_column
            yield Row(str(name), dict(zip(columns, (str(path), path.parent.name), strict=True)))

    def documents(self, on_read: OnRead) -> Iterator[Document]:
        raise UserError(f"{self.name} is a folder of images, which have no text")


def find_source(dataset: str, split: str, format: ImageFormat) -> Source:
    """Return the rows of a dataset: of a folder with a folder of images for each class; otherwise
    of files with rows (see `resolve_source`). Raise `UserError` if there is no such dataset."""
    folder = searched_folder(dataset)
    if folder and next(_images_in(Path(folder)), None):
        return Source(dataset, [FolderPart(Path(folder), format)], documents=False)
    source = resolve_source(dataset, split=split, catalog=_NO_CATALOG)
    assert not isinstance(source, StreamSource), "the catalog has none"
    return source


def _images_in(folder: Path) -> Iterator[Path]:
    """Yield the images in the folders of a folder, without those whose own or folder's name begins
    with a dot: previews and copies that programs leave."""
    for of_class in os.scandir(folder):
        if of_class.is_dir() and not of_class.name.startswith("."):
            for name in os.listdir(of_class.path):
                if Path(name).suffix.lower() in SUFFIXES and not name.startswith("."):
                    yield Path(of_class.path) / name


def open_images(
    source: Source, format: ImageFormat, cache_dir: str = "", *, verify: bool = False
) -> LabeledImages:
    """Return the images of a source, decoded into the cache if they are not there.

    Raises:
        UserError: for an image that cannot be read and a row without image or label, unless
            `format.broken` is `drop`; for a label that is not in `format.classes`; and if no image
            is left.
    """
    described = [_VERSION, format.shape, format.image_column, format.label_column]
    described += [format.classes, format.broken]
    return open_or_build(
        "labeled_images",
        source,
        key=lambda identity: [identity, described],
        read=partial(_read, shape=format.shape),
        write=partial(_write, source, format),
        cache_dir=cache_dir,
        verify=verify,
    )


def _read(folder: Path, shape: tuple[int, int, int]) -> LabeledImages:
    description = json.loads((folder / _DESCRIPTION).read_text())
    names = tuple(description["names"])
    n_values = len(names) * shape[0] * shape[1] * shape[2]
    return LabeledImages(
        key=folder.name,
        pixels=map_array(folder / _PIXELS, "uint8", n_values).reshape(len(names), *shape),
        labels=map_array(folder / _LABELS, "int64", len(names)),
        classes=tuple(description["classes"]),
        names=names,
    )


@dataclass
class _Counts:
    """Skipped rows, by reason."""

    broken: ExampleCounter = field(default_factory=ExampleCounter)
    too_small: ExampleCounter = field(default_factory=ExampleCounter)


def _write(source: Source, format: ImageFormat, folder: Path) -> str:
    labels: list[str] = []
    names: list[str] = []
    counts = _Counts()
    with new_file(folder / _PIXELS) as file:
        for part in source.parts:
            # A row of a folder names a file in it, by its own path.
            opener = ImageOpener(part.folder)
            for row in part.rows(lambda n: None):
                image = _image_of(row, format, opener, counts)
                if image is not None:
                    file.write(image[0].tobytes())
                    labels.append(image[1])
                    names.append(row.where)
    left_out = {
        "cannot be read": counts.broken,
        f"are smaller than {format.size} x {format.size} pixels": counts.too_small,
    }
    for reason, counter in left_out.items():
        if counter.count:
            examples = "; ".join(counter.in_words())
            logger.warning("%s: %d images %s: %s", source.name, counter.count, reason, examples)
    if not labels:
        reasons = "; ".join(f"{c.count} {reason}" for reason, c in left_out.items() if c.count)
        raise UserError(f"{source.name} has no image to train on{reasons and ': ' + reasons}")
    classes = format.classes or tuple(sorted(set(labels), key=_numbers_first))
    numbers = {name: number for number, name in enumerate(classes)}
    for label, name in zip(labels, names, strict=True):
        if label not in numbers:
            raise UserError(
                f"{source.name}, {name}: the label {label!r} is none of the {len(classes)} classes "
                f"{', '.join(classes[:20])} (--dataloader.classes); add it, or remove the image"
            )
    with new_file(folder / _LABELS) as file:
        file.write(np.array([numbers[label] for label in labels], np.int64).tobytes())
    (folder / _DESCRIPTION).write_text(json.dumps({"classes": classes, "names": names}))
    return f"{len(labels):,} images of {len(classes)} classes"


def _numbers_first(label: str) -> tuple[bool, int, str]:
    """Sort numbers by value, then other labels."""
    return (not label.isdecimal(), int(label) if label.isdecimal() else 0, label)


def _image_of(
    row: Row, format: ImageFormat, opener: ImageOpener, counts: _Counts
) -> tuple[np.ndarray, str] | None:
    """Return the pixels and label of a row, or None to skip it."""
    try:
        cells = row.values
        if cells is None:
            raise BrokenSample(row.error or "it is empty")
        for column in (format.image_column, format.label_column):
            if cells.get(column) is None:
                raise BrokenSample(f"it has no {column!r}, but {', '.join(cells) or 'no column'}")
        label = cells[format.label_column]
        if isinstance(label, bool) or not isinstance(label, (int, str)):
            raise BrokenSample(f"its label must be a name or a whole number, not {label!r}")
        image = opener.open(cells[format.image_column])
        if min(image.width, image.height) < format.size:
            counts.too_small.add(row.where, f"{image.width} x {image.height} pixels")
            return None
        content = image.content or read_regular(Path(image.path))
        return _pixels(content, format), str(label)
    except BrokenSample as error:
        if format.broken == "error":
            raise UserError(
                f"{row.where}: {error}; repair or remove it, or leave out such rows: "
                "--dataloader.broken drop"
            ) from error
        counts.broken.add(row.where, str(error))
        return None


def _pixels(content: bytes, format: ImageFormat) -> np.ndarray:
    """Return an encoded image, scaled and cut, as uint8 (channels, size, size)."""
    from PIL import Image, ImageOps

    image = decoded(content)
    if image.size != (format.size, format.size):
        image = ImageOps.fit(image, (format.size, format.size), Image.Resampling.LANCZOS)
    if format.channels == 1:
        return np.asarray(image.convert("L"))[None]
    return np.asarray(image).transpose(2, 0, 1)


def check_same_classes(sets: Sequence[LabeledImages]) -> None:
    """Raise `UserError` if the classes of several sets differ."""
    first, *others = sets
    for other in others:
        if other.classes != first.classes:
            raise UserError(
                f"datasets have different classes: {', '.join(first.classes[:20])}, and "
                f"{', '.join(other.classes[:20])}; list all of them in --dataloader.classes"
            )
