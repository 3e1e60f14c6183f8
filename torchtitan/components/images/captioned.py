"""Images with captions, decoded once to pixels of a few sizes (buckets) in the disk cache."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from torchtitan.components.data.disk_cache import map_array, open_or_build
from torchtitan.components.data.finetuning.conversation import BrokenSample
from torchtitan.components.data.sources.paths import searched_folder
from torchtitan.components.data.sources.rows import Document, OnRead, Part, Row
from torchtitan.components.data.sources.source import Source
from torchtitan.components.data.sources.webdataset import IMAGES
from torchtitan.components.images.labeled import SUFFIXES, rows_of
from torchtitan.components.images.pixel_rows import PixelRows, Size
from torchtitan.tools.durable import new_file
from torchtitan.tools.errors import UserError

METADATA = "metadata.jsonl"
"""Rows with the images of its folder in the column `file_name`, as `datasets` reads them."""

_VERSION = 1
_FILE_COLUMN = "file_name"
_DESCRIPTION = "images.json"


@dataclass(frozen=True, kw_only=True)
class CaptionFormat:
    """Images and captions that a dataset yields."""

    buckets: tuple[Size, ...]
    """Heights and widths in pixels; see `PixelRows`."""
    channels: int
    image_column: str = "image"
    caption_column: str = "text"
    broken: str = "error"
    """Images that cannot be read, and rows without a caption: `error` or `drop`."""

    @property
    def image_columns(self) -> list[str]:
        """Columns with the image: the first of these that a row has."""
        return [self.image_column, _FILE_COLUMN, IMAGES]


@dataclass(frozen=True)
class Bucket:
    """The N images of a dataset that have one size, in its order."""

    pixels: np.ndarray
    """uint8, (N, channels, height, width)."""
    captions: tuple[str, ...]
    names: tuple[str, ...]
    """Location of each image."""

    def __len__(self) -> int:
        return len(self.captions)


@dataclass(frozen=True)
class CaptionedImages:
    """The images of a dataset, by bucket."""

    key: str
    """Digest of the content."""
    buckets: tuple[Bucket, ...]


class CaptionFolder(Part):
    """Images anywhere in a folder, each with its caption in a file `.txt` of the same name."""

    def __init__(self, folder: Path, format: CaptionFormat):
        super().__init__(str(folder))
        self._top = self.folder = folder.absolute()
        self._format = format
        self._files = sorted(_images_in(self._top))

    def size(self) -> int:
        return sum(path.stat().st_size for path in self._files)

    def contents(self, digest: Callable[[Path], str]) -> list[str]:
        return [
            f"{path.relative_to(self._top)} {digest(path)}"
            for image in self._files
            for path in (image, image.with_suffix(".txt"))
            if path.is_file()
        ]

    def rows(self, on_read: OnRead) -> Iterator[Row]:
        for path in self._files:
            on_read(path.stat().st_size)
            where, caption = str(path.relative_to(self._top)), path.with_suffix(".txt")
            if not caption.is_file():
                yield Row(where, None, f"it has no caption {caption.name} beside it")
                continue
            try:
                text = caption.read_text(encoding="utf-8").strip()
            except UnicodeDecodeError as error:
                yield Row(where, None, f"its caption {caption.name} is not UTF-8 ({error.reason})")
                continue
            columns = self._format.image_column, self._format.caption_column
            yield Row(where, dict(zip(columns, (str(path), text), strict=True)))

    def documents(self, on_read: OnRead) -> Iterator[Document]:
        raise UserError(f"{self.name} is a folder of images, whose captions are not documents")


def find_captions(dataset: str, split: str, format: CaptionFormat, cache_dir: str = "") -> Source:
    """Return the rows of a dataset: of the `metadata.jsonl` of a folder; of a folder of images with
    captions; otherwise of files with rows (see `resolve_source`). Raise `UserError` if there is no
    such dataset."""
    folder = searched_folder(dataset)
    if folder and (folder / METADATA).is_file():
        return rows_of(str(folder / METADATA), split, format.image_columns, cache_dir)
    if folder and next(_images_in(folder), None):
        return Source(dataset, [CaptionFolder(folder, format)], documents=False)
    return rows_of(dataset, split, format.image_columns, cache_dir)


def _images_in(folder: Path) -> Iterator[Path]:
    """Yield the images in a folder and its folders, without images whose own or folder's name
    begins with a dot."""
    for path in folder.rglob("*"):
        is_hidden = any(name.startswith(".") for name in path.relative_to(folder).parts)
        if path.suffix.lower() in SUFFIXES and not is_hidden:
            yield path


def open_captioned(
    source: Source, format: CaptionFormat, cache_dir: str = "", *, verify: bool = False
) -> CaptionedImages:
    """Return the images of a source, decoded into the cache if they are not there.

    Raises:
        UserError: for an image that cannot be read and a row without image or caption, unless
            `format.broken` is `drop`; and if no image is left.
    """
    return open_or_build(
        "captioned_images",
        source,
        key=lambda identity: [identity, _VERSION, *astuple(format)],
        read=partial(_read, format=format),
        write=partial(_write, source, format),
        cache_dir=cache_dir,
        verify=verify,
    )


def _pixels_of(bucket: int) -> str:
    return f"pixels_{bucket}.u8"


def _read(folder: Path, format: CaptionFormat) -> CaptionedImages:
    description = json.loads((folder / _DESCRIPTION).read_text())
    buckets = []
    for number, ((height, width), rows) in enumerate(zip(format.buckets, description, strict=True)):
        shape = len(rows), format.channels, height, width
        pixels = np.zeros(shape, np.uint8)
        if rows:  # an empty file cannot be mapped
            path = folder / _pixels_of(number)
            pixels = map_array(path, "uint8", pixels.size).reshape(shape)
        captions, names = (tuple(row[k] for row in rows) for k in range(2))
        buckets.append(Bucket(pixels, captions, names))
    return CaptionedImages(folder.name, tuple(buckets))


def _write(source: Source, format: CaptionFormat, folder: Path) -> str:
    rows = PixelRows(
        source=source,
        sizes=format.buckets,
        channels=format.channels,
        image_columns=format.image_columns,
        text_columns=[format.caption_column],
        text_of=_caption,
        drops_broken=format.broken == "drop",
    )
    described: list[list[tuple[str, str]]] = [[] for _ in format.buckets]
    with ExitStack() as stack:
        files = [
            stack.enter_context(new_file(folder / _pixels_of(number)))
            for number in range(len(format.buckets))
        ]
        for row in rows.read():
            files[row.bucket].write(row.pixels.tobytes())
            described[row.bucket].append((row.text, row.where))
    (folder / _DESCRIPTION).write_text(json.dumps(described))
    sizes = zip(format.buckets, described, strict=True)
    counts = ", ".join(f"{len(images):,} of {w} x {h}" for (h, w), images in sizes)
    return f"images with captions: {counts} pixels"


def _caption(cell: object) -> str:
    if not isinstance(cell, str):
        raise BrokenSample(f"its caption must be a text, not {cell!r}")
    return cell
