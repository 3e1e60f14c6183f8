"""Samples of WebDataset archives as rows.

A sample is the consecutive members of a tar file with the same name up to the first dot after the
folder; the rest of the name is the member's kind. `.json` has columns, `.txt` the column `text`,
images become the column `images`, and `.cls`, the label of an image, the column `cls`.
"""

import itertools
import posixpath
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple, TypedDict

from torchtitan.components.data.sources.rows import (
    MAX_ROW_CHARACTERS,
    Row,
    object_row,
    parse_json,
)
from torchtitan.tools.errors import UserError

_IMAGE_TYPES = frozenset("jpg jpeg png webp gif bmp tif tiff avif jp2 ppm pgm pbm img".split())
_OTHER_MEDIA = {
    **dict.fromkeys("mp4 mov avi mkv webm".split(), "videos"),
    **dict.fromkeys("wav mp3 flac ogg m4a opus".split(), "audios"),
}
"""Column for the names of members that nothing reads, so that their loss is reported."""

_IMAGE_COLUMNS = ("image", "images")

IMAGES = "images"
LABEL = "cls"
"""Columns of images, and of the label of an image."""

_META = re.compile(r"__[^/]*__($|/)")
_MEMBER = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
"""Names of members that webdataset skips, and of members that it reads: a sample and a kind."""


class Member(tarfile.TarInfo):
    """Header of a member, whose damage is an error."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "Member":
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if buf == bytes(tarfile.BLOCKSIZE):  # the end of the archive
                raise
            # Otherwise, tarfile would end without an error.
            raise tarfile.ReadError(str(error)) from None


class _Image(TypedDict):
    """An image in the form that `datasets` stores."""

    bytes: bytes
    path: str


class _SampleFile(NamedTuple):
    sample: str
    kind: str
    member: tarfile.TarInfo


def sample_rows(archive: tarfile.TarFile, name: str, *, media: bool) -> Iterator[Row]:
    """Yield a row for each sample of an archive that is read as a stream.

    Args:
        archive: opened with the headers `Member`.
        name: file name in the rows' locations.
        media: whether to read images.

    Raises:
        UserError: a member is too large.
        tarfile.TarError: the archive is damaged.
    """
    for sample, files in itertools.groupby(_sample_files(archive), attrgetter("sample")):
        where = f"{name}, sample {sample}"
        row = _sample_row(archive, where, files, media)
        # Hidden files in folders, such as `folder/._a.txt`, are a sample `folder/` for webdataset.
        if row is not None or not sample.endswith("/"):
            yield row or Row(where, None, "it has neither .txt nor .json; remove the sample")


def _sample_files(archive: tarfile.TarFile) -> Iterator[_SampleFile]:
    """Yield the members that webdataset reads; it ignores others, such as `._a.txt` and
    `README`."""
    for member in archive:
        match = _MEMBER.match(member.name)
        if member.isfile() and match and not _META.match(member.name):
            yield _SampleFile(match[1], match[2].lower(), member)


def _sample_row(
    archive: tarfile.TarFile, where: str, files: Iterable[_SampleFile], media: bool
) -> Row | None:
    """Return the row of a sample; None for a sample without text."""
    values: dict[str, object] = {}
    images: dict[str, _Image] = {}
    others: dict[str, list[str]] = {}
    kinds: set[str] = set()
    errors = []
    read = {"txt", "json"} | ({LABEL} if media else set())
    for _, kind, member in files:
        if member.size > MAX_ROW_CHARACTERS:
            raise UserError(
                f"{where}: {member.name} has more than {MAX_ROW_CHARACTERS:,} bytes; split or "
                "remove it"
            )
        if kind in kinds:
            errors.append(
                f"there are several members .{kind}, the last one {member.name}; keep one of them"
            )
        kinds.add(kind)
        file_type = kind.rpartition(".")[2]
        if media and file_type in _IMAGE_TYPES:
            images[kind] = {"bytes": _content(archive, member), "path": member.name}
        elif media and file_type in _OTHER_MEDIA:
            others.setdefault(_OTHER_MEDIA[file_type], []).append(member.name)
        if kind not in read:
            continue
        try:
            text = _content(archive, member).decode()
            if "\0" in text:  # as in other text files
                raise ValueError("it has a NUL character")
            if kind == "json":
                row = object_row(where, parse_json(text))
            else:
                row = Row(where, {"text": text} if kind == "txt" else {LABEL: text.strip()})
            values |= row.values or {}
            errors += [row.error] if row.error else []
        except ValueError as failure:  # also if it is not UTF-8
            errors.append(f"{member.name} is broken, {failure}")
    if errors:
        return Row(where, None, errors[0])
    if not kinds & read:
        return None
    try:
        return Row(where, others | _with_images(values, images))
    except ValueError as error:
        return Row(where, None, str(error))


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    assert file is not None, "not a regular file"
    return file.read()


def _with_images(values: dict[str, object], members: Mapping[str, _Image]) -> dict[str, object]:
    """Return columns with the images of members: the images that a column names, otherwise all as
    the column `images`, numbers in their kinds in order. Raise `ValueError` for a name of no
    member."""
    images = [members[kind] for kind in sorted(members, key=_with_numbers)]
    if not images:
        return values
    column = next(
        (name for name in values if name.lower() in _IMAGE_COLUMNS and values[name]), None
    )
    if column is None:
        return {**values, IMAGES: images}
    value = values[column]
    named = value if isinstance(value, list) else [value]
    return {**values, column: [_named_image(name, images, len(named)) for name in named]}


def _with_numbers(kind: str) -> list[tuple[int, int, str]]:
    """Return a key that sorts `2.png` before `10.png`."""
    pieces = re.split("([0-9]+)", kind)
    return [(0, int(piece), "") if piece.isdecimal() else (1, 0, piece) for piece in pieces]


def _named_image(reference: object, images: Sequence[_Image], n_named: int) -> object:
    """Return the image with the file name of a reference. A single reference may have another name
    than a single image: the name before the file was packed."""
    name = reference.get("path") if isinstance(reference, Mapping) else reference
    if not isinstance(name, str) or name.startswith("data:"):
        return reference  # the content itself
    base = posixpath.basename(name)
    found = [image for image in images if posixpath.basename(image["path"]) == base]
    if len(found) == 1:
        return found[0]
    if len(images) == n_named == 1:
        return images[0]
    paths = ", ".join(image["path"] for image in images)
    raise ValueError(f"its .json names the image {name!r}, but its images are {paths}")
