"""Images with labels, decoded once to pixels of one size in the disk cache."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from torchtitan.components.data.disk_cache import map_array, open_or_build
from torchtitan.components.data.finetuning.conversation import BrokenSample
from torchtitan.components.data.sources.paths import searched_folder
from torchtitan.components.data.sources.rows import Document, OnRead, Part, Row
from torchtitan.components.data.sources.source import (
    Catalog,
    HubDataset,
    Source,
    StreamSource,
    resolve_source,
)
from torchtitan.components.data.sources.webdataset import IMAGES, LABEL
from torchtitan.components.images.named_images import WithNamedImages
from torchtitan.components.images.pixel_rows import PixelRows
from torchtitan.tools.digests import cache_root
from torchtitan.tools.durable import new_file
from torchtitan.tools.errors import UserError

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif", ".ppm")

_VERSION = 1
_NO_CATALOG: Catalog[HubDataset] = Catalog("image dataset", {}, {})
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
    def image_columns(self) -> list[str]:
        """Columns with the image: the first of these that a row has."""
        return [self.image_column, IMAGES]

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
        self._folder = self.folder = folder.absolute()
        self._format = format
        self._files = sorted(_images_in(self._folder))

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


def find_source(dataset: str, split: str, format: ImageFormat, cache_dir: str = "") -> Source:
    """Return the rows of a dataset: of a folder with a folder of images for each class; otherwise
    of files with rows (see `resolve_source`). Raise `UserError` if there is no such dataset."""
    folder = searched_folder(dataset)
    if folder and next(_images_in(Path(folder)), None):
        return Source(dataset, [FolderPart(Path(folder), format)], documents=False)
    return rows_of(dataset, split, format.image_columns, cache_dir)


def rows_of(dataset: str, split: str, image_columns: Sequence[str], cache_dir: str) -> Source:
    """Return the rows of files of a dataset, which may name images. Raise `UserError` if there is
    no such dataset."""
    source = resolve_source(dataset, split=split, catalog=_NO_CATALOG)
    assert not isinstance(source, StreamSource), "the catalog has none"
    root = cache_root(cache_dir)
    return source.with_parts([WithNamedImages(part, image_columns, root) for part in source.parts])


def _images_in(folder: Path) -> Iterator[Path]:
    """Yield the images in the folders of a folder, without images whose own or folder's name
    begins with a dot: previews and copies that programs leave."""
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


def _write(source: Source, format: ImageFormat, folder: Path) -> str:
    rows = PixelRows(
        source=source,
        sizes=[(format.size, format.size)],
        channels=format.channels,
        image_columns=format.image_columns,
        text_columns=[format.label_column, LABEL],
        text_of=_label,
        drops_broken=format.broken == "drop",
    )
    labels: list[str] = []
    names: list[str] = []
    with new_file(folder / _PIXELS) as file:
        for row in rows.read():
            file.write(row.pixels.tobytes())
            labels.append(row.text)
            names.append(row.where)
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


def _label(cell: object) -> str:
    if isinstance(cell, bool) or not isinstance(cell, (int, str)):
        raise BrokenSample(f"its label must be a name or a whole number, not {cell!r}")
    return str(cell)


def _numbers_first(label: str) -> tuple[bool, int, str]:
    """Sort numbers by value, then other labels."""
    return (not label.isdecimal(), int(label) if label.isdecimal() else 0, label)


def check_same_classes(sets: Sequence[LabeledImages]) -> None:
    """Raise `UserError` if the classes of several sets differ."""
    first, *others = sets
    for other in others:
        if other.classes != first.classes:
            raise UserError(
                f"datasets have different classes: {', '.join(first.classes[:20])}, and "
                f"{', '.join(other.classes[:20])}; list all of them in --dataloader.classes"
            )
