"""Rows with images, in the forms of public data.

Images are parts of messages, or are in a column `image` or `images`. Their places in the texts
are then marks `<image>` or parts without an image of their own; without any, they come before the
first text of the user.

A row is converted by its format as if it were text alone: characters for private use replace
parts with images, and become parts again in the converted messages.
"""

import functools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from torchtitan.components.data.finetuning.columns import IMAGE_COLUMNS, is_filled, renamed_row
from torchtitan.components.data.finetuning.conversation import (
    IMAGE_PARTS,
    IMAGE_PLACE,
    BrokenSample,
    Conversation,
    Message,
    Pair,
    Prompt,
    Sample,
    Text,
    from_json,
)
from torchtitan.components.data.finetuning.row_formats import RowFormat, convert_by_function
from torchtitan.components.data.sources.source import Source, StreamSource
from torchtitan.components.images.files import ImageFile, ImageOpener, filled_key
from torchtitan.components.images.labeled import SUFFIXES
from torchtitan.components.images.remote import RemoteImages
from torchtitan.tools.digests import cache_root

COLUMNS = tuple(spell(name) for name in IMAGE_COLUMNS for spell in (str, str.title, str.upper))
"""Columns with images, unless `--dataloader.columns` names another one."""

MARK = "<image>"
"""Place of an image in a text."""

_OPENING, _CLOSING = "\U000f49e1", "\U000f49e2"
"""Characters around the number of an image of a part. No language has them."""

_PLACES = re.compile(f"{_OPENING}([0-9]{{1,9}}){_CLOSING}|{MARK}")

_CONTENTS = ("content", "value", "output", "result")
"""Keys of turns, and of results of tools in their parts, whose value may be a list of parts."""

_FILE, _FILES = "file_name", ("_file_name", "_file_names")
"""Column of `datasets` with the file of an image, in the `metadata.jsonl` of its folder, and ends
of the names of others."""

_OF_REJECTED = "rejected_images"
"""Column of ms-swift with the images of the rejected answer."""

_LISTS = ("messages", "conversations")
"""Columns that may contain the JSON text of a list of turns."""


def folder_of(source: Source | StreamSource) -> Path | None:
    """Return the folder to which paths in a source's rows are relative: the one that is searched
    for files, the folder of its only file, or the common one of several files. None: the data is
    not in a local folder."""
    parts = [] if isinstance(source, StreamSource) else source.parts
    folders = [part.folder for part in parts]
    known = [folder.absolute() for folder in folders if folder is not None]
    return Path(os.path.commonpath(known)) if known and len(known) == len(folders) else None


def reads_images(format: RowFormat, opener: ImageOpener) -> RowFormat:
    """Return a row format that also converts rows with images: the content of a message with images
    is a list of parts `{"type": "image"}` and `{"type": "text", "text": …}`; a text has
    `IMAGE_PLACE` for each. The images of a pair are in its prompt.

    Its `convert` raises `BrokenSample` for an image that cannot be opened, naming its number, for
    another number of images than of their places, and for images that the assistant writes. Rows
    without images are converted as before."""
    named = tuple(column for column in IMAGE_COLUMNS if column in format.mapping)
    key = [format.fingerprint, "images", str(opener.folder), opener.fetches]
    return replace(
        format,
        convert=partial(_convert, format, opener),
        prefetch=partial(_prefetch, format, opener) if opener.fetches else None,
        optional=(*format.optional, *(named or COLUMNS)),
        fingerprint=json.dumps(key),
    )


def rows_with_images(
    rows: Sequence[tuple[Source | StreamSource, RowFormat]],
    image_root: str,
    *,
    fetch_images: bool,
    cache_dir: str,
) -> list[tuple[Source | StreamSource, RowFormat]]:
    """Return sources with row formats that also convert rows with images.

    Args:
        rows: sources and their row formats.
        image_root: see `ImageOpener`.
        fetch_images: whether to fetch images behind URLs.
        cache_dir: see `remote_images`.
    """
    remote = remote_images(cache_dir) if fetch_images else None
    return [
        (source, reads_images(format, ImageOpener(folder_of(source), image_root, remote)))
        for source, format in rows
    ]


def remote_images(cache_dir: str) -> RemoteImages:
    """Return a downloader of images from URLs into the folder `fetched` of a `cache_root`."""
    return RemoteImages(cache_root(cache_dir) / "fetched")


@dataclass
class _Images:
    """References to the images of a row."""

    of_parts: list[object] = field(default_factory=list)
    """Image of each part of the row's messages, by number; None if a column has it."""
    indices: dict[int, int] = field(default_factory=dict)
    """Index in the column, from 0, by the number of a part that states it."""
    of_column: list[object] = field(default_factory=list)
    named: list[str] = field(default_factory=list)
    """Names of the column's images that parts hold themselves."""
    row: Mapping[str, object] = field(default_factory=dict)
    """The row itself."""

    def marked_part(self, part: Mapping[str, object]) -> dict[str, object]:
        """Add a part's image, and return the part with text instead."""
        number = len(self.of_parts)
        key = filled_key(part)
        has_own = key is not None
        self.of_parts.append(self._named_in_column(part[key]) or part if key else None)
        index = part.get("index")
        if not has_own and isinstance(index, int):
            self.indices[number] = index
        return {"type": "text", "text": f"{_OPENING}{number}{_CLOSING}"}

    def _named_in_column(self, reference: object) -> object:
        """Return the column's image with content whose file name a reference states, as in an
        archive of images next to their messages, or None."""
        name = reference.get("url") if isinstance(reference, Mapping) else reference
        base = os.path.basename(name) if isinstance(name, str) else ""
        found = [image for image in self.of_column if base and _name_of(image) == base]
        if len(found) != 1:
            return None
        self.named.append(base)
        return found[0]


def _name_of(image: object) -> str:
    """Return the file name of an image in the form of `datasets`, whose content a row that was
    read no longer has; empty for others."""
    if not isinstance(image, Mapping) or "bytes" not in image:
        return ""
    return os.path.basename(str(image.get("path") or ""))


def _prefetch(format: RowFormat, opener: ImageOpener, rows: Sequence[Mapping[str, object]]) -> None:
    """Fetch the remote images of rows. Images from a function of the user are fetched when their
    row is converted."""
    references: list[object] = []
    for row in rows:
        images = _Images()
        with suppress(BrokenSample):  # which the conversion reports
            _marked_row(images, format.mapping, row, format.kind == "preference")
        references += [*images.of_parts, *images.of_column]
    opener.prefetch(references)


def _convert(format: RowFormat, opener: ImageOpener, row: Mapping[str, object]) -> Sample | None:
    images = _Images()
    has_pairs = format.kind == "preference"
    if format.function is None:
        sample = format.convert(_marked_row(images, format.mapping, row, has_pairs))
    else:
        function = format.function

        @functools.wraps(function)
        def marking(row: dict[str, object]) -> Mapping[str, object] | None:
            result = function(row)
            if not isinstance(result, Mapping):
                return result
            return _marked_row(images, {}, result, has_pairs)

        sample = convert_by_function(marking, format.kind, row)
    if sample is None or not (images.of_parts or images.of_column):
        return sample
    if isinstance(sample, Text):
        references = _place_in_text(sample, images)
        sample.images += _opened(references, opener)
        return sample
    conversation = sample
    if isinstance(sample, Pair):
        _check_answers(sample)
        conversation = sample.prompt
    if isinstance(sample, Prompt):
        conversation = sample.prompt
        sample.row = renamed_row(_object_without_bytes(images.row), format.mapping)
    if not isinstance(conversation, Conversation):
        raise BrokenSample(
            "it has images, which are trained in conversations, texts, pairs and prompts only; "
            "write messages, or a question and its answer"
        )
    references = _place(conversation.messages, images)
    conversation.images += _opened(references, opener)
    return sample


def _opened(references: Sequence[object], opener: ImageOpener) -> list[ImageFile]:
    opened = []
    for number, reference in enumerate(references, 1):
        try:
            opened.append(opener.open(reference))
        except BrokenSample as error:
            raise BrokenSample(f"image {number}: {error}") from error
    return opened


def _check_answers(pair: Pair) -> None:
    """Raise `BrokenSample` if an answer has an image: only the prompt may have images."""
    for name, messages in (("chosen", pair.chosen), ("rejected", pair.rejected)):
        if any(True for message in messages for _ in _places_in(message)):
            raise BrokenSample(
                f"{name} has an image or the mark {MARK} in or after the answer; only the common "
                "prompt may have images"
            )


_CONTENT_KEYS = ("bytes", "data")


def _without_bytes(value: object) -> object:
    """Return a value in which images in the form of `datasets`, without content, replace bytes."""
    if isinstance(value, bytes):
        return {"bytes": None, "path": None}
    if isinstance(value, list):
        return [_without_bytes(one) for one in value]
    return _object_without_bytes(value) if isinstance(value, Mapping) else value


def _object_without_bytes(value: Mapping[str, object]) -> dict[str, object]:
    is_part = "type" in value  # without content, it would be a place of a column's image
    return {
        key: None
        if isinstance(one, bytes) and key in _CONTENT_KEYS and not is_part
        else _without_bytes(one)
        for key, one in value.items()
    }


def _marked_row(
    images: _Images, mapping: Mapping[str, str], row: Mapping[str, object], has_pairs: bool
) -> dict[str, object]:
    """Return a row with text instead of each part with an image, and without columns of images;
    add both kinds to `images`. If rows have pairs, both answers of one may repeat the images of
    the prompt."""
    images.row = row
    named = {mapping[column] for column in IMAGE_COLUMNS if column in mapping}
    used = set(mapping.values()) - named
    theirs = renamed_row({column: column for column in row}, mapping)
    lists = {theirs.get(column) for column in _LISTS}
    of_images = [column for column in row if column in (named or COLUMNS) and column not in used]
    filled = [column for column in of_images if is_filled(row[column]) and row[column] != b""]
    if len(filled) > 1:
        raise BrokenSample(
            f"it has images in both columns {' and '.join(filled)}; keep one of them"
        )
    images.of_column = [one for column in filled for one in _listed(row[column])]
    answers = _answers(theirs) if has_pairs else []
    others = row.get(_OF_REJECTED) if has_pairs else None
    if is_filled(others) and _listed(others) != images.of_column:
        raise BrokenSample(
            f"{_OF_REJECTED} has other images than the chosen answer; only the common prompt may "
            "have images"
        )
    of_answers = {column: _Images(of_column=images.of_column) for column in answers}
    marked = {
        column: _marked_turns(of_answers.get(column, images), value, column in lists)
        for column, value in row.items()
        if column not in of_images
    }
    if answers:
        _add_common(images, *of_answers.values())
    if not (filled or named or any(images.of_parts)):
        images.of_column = _named_files(row)
    images.of_column = [one for one in images.of_column if _name_of(one) not in images.named]
    return marked


def _named_files(row: Mapping[str, object]) -> list[object]:
    """Return the names of image files in a row of `datasets`. Raise `BrokenSample` if several
    columns have some, and none of them is the column of its image."""
    if _names_image(row.get(_FILE)):
        return [row[_FILE]]
    found = {
        column: _listed(cell)
        for column, cell in row.items()
        if column.endswith(_FILES) and is_filled(cell) and all(map(_names_image, _listed(cell)))
    }
    if len(found) > 1:
        raise BrokenSample(
            f"it has images in both columns {' and '.join(found)}; name one of them with "
            "--dataloader.columns images=COLUMN"
        )
    return next(iter(found.values()), [])


def _names_image(cell: object) -> bool:
    return isinstance(cell, str) and cell.lower().endswith(SUFFIXES)


def _answers(theirs: Mapping[str, str]) -> list[str]:
    """Return the columns with the two answers of a pair, which may repeat the prompt."""
    names = ("chosen" if "chosen" in theirs else "messages", "rejected")
    return [theirs[name] for name in names if theirs.keys() >= set(names)]


def _add_common(images: _Images, chosen: _Images, rejected: _Images) -> None:
    """Add the images of a prompt that two answers repeat."""
    if not (chosen.of_parts or rejected.of_parts):
        return
    if images.of_parts or chosen != rejected:
        raise BrokenSample(
            "chosen and rejected have different images, or images besides the prompt's images; "
            "only the common prompt may have images"
        )
    images.of_parts, images.indices = chosen.of_parts, chosen.indices
    images.named += chosen.named


def _listed(cell: object) -> list[object]:
    """Return the images of a cell: a list, also of lists, one image, or the JSON text of these in a
    table."""
    if isinstance(cell, str) and cell.lstrip().startswith(("[", "{")):
        with suppress(BrokenSample):  # the name of a file
            cell = from_json(cell, "images")
    return [one for each in cell for one in _listed(each)] if isinstance(cell, list) else [cell]


def _marked_turns(images: _Images, value: object, may_be_text: bool) -> object:
    """Return a cell with marks in the turns that it lists."""
    if may_be_text:
        value = _from_text(value)
    if isinstance(value, Mapping):
        return _marked_turn(images, value)
    if not isinstance(value, list):
        return value
    return [
        _marked_turn(images, turn) if isinstance(turn, Mapping) else turn
        for turn in map(_from_text if may_be_text else _unchanged, value)
    ]


def _unchanged(value: object) -> object:
    return value


def _from_text(value: object) -> object:
    """Return the value of a JSON text that may contain a part with an image."""
    if isinstance(value, str) and "image" in value and value.lstrip().startswith(("[", "{")):
        with suppress(BrokenSample):  # which the conversion reports
            return from_json(value, "messages")
    return value


def _marked_turn(images: _Images, turn: Mapping[str, object]) -> dict[str, object]:
    """Return a turn, or a result of a tool, with marks in the place of its parts with images."""
    marked = dict(turn)
    for key in _CONTENTS:
        if isinstance(parts := turn.get(key), list):
            marked[key] = [_marked_part(images, part) for part in parts]
    return marked


def _marked_part(images: _Images, part: object) -> object:
    if not isinstance(part, Mapping):
        return part
    kind = part.get("type")
    is_image = kind in IMAGE_PARTS if kind is not None else _is_untyped_image(part)
    return images.marked_part(part) if is_image else _marked_turn(images, part)


def _is_untyped_image(part: Mapping[str, object]) -> bool:
    return any(part.get(key) is not None for key in ("image", "image_url"))


def _place(messages: list[Message], images: _Images) -> list[object]:
    """Replace the marks in the contents of messages by parts, and return the images in the order of
    these parts."""
    places = [place for message in messages for place in _places_in(message)]
    numbers = [int(place[1]) for place in places if place[1]]
    if len(numbers) < len(images.of_parts):
        raise BrokenSample(
            "an image is in a part of a message that is no content, such as reasoning or a call; "
            "remove it"
        )
    if sorted(numbers) != list(range(len(images.of_parts))):
        raise BrokenSample(
            "its text contains the characters U+F49E1 and U+F49E2, which mark images here; "
            "remove them"
        )
    if not places:
        _put_before_text(messages, len(images.of_column))
        return images.of_column
    for message in messages:
        if any(True for _ in _places_in(message)):
            if message["role"] == "assistant":
                raise BrokenSample(
                    f"a message of the assistant has an image or the mark {MARK}; models write "
                    "text alone"
                )
            message["content"] = _parts(message["content"])
    return _references(places, images)


def _place_in_text(sample: Text, images: _Images) -> list[object]:
    """Replace the marks in a text by `IMAGE_PLACE`, and return the images in their order."""
    message: Message = {"role": "user", "content": sample.text}
    references = _place([message], images)
    sample.text = "".join(part.get("text", IMAGE_PLACE) for part in message["content"])
    return references


def _places_in(message: Message) -> Iterator[re.Match[str]]:
    content = message.get("content")
    return _PLACES.finditer(content) if isinstance(content, str) else iter(())


def _references(places: list[re.Match[str]], images: _Images) -> list[object]:
    """Return the image of each place. Raise `BrokenSample` unless the column has an image for
    each place without its own image, and no others."""
    numbers = [int(place[1]) if place[1] else None for place in places]
    without = [n for n in numbers if n is None or images.of_parts[n] is None]
    n_column = len(images.of_column)
    indices = [
        number if n is None else images.indices.get(n, number) for number, n in enumerate(without)
    ]
    if len(without) != n_column or sorted(indices) != list(range(n_column)):
        own = len(places) - len(without)
        beside = f", beside {own} in its messages" if own else ""
        raise BrokenSample(
            f"it has {len(without)} places for images ({MARK}, or parts without an image of their "
            f"own), but {n_column} in a column{beside}"
        )
    in_order = iter(indices)
    return [
        images.of_parts[n]
        if n is not None and images.of_parts[n] is not None
        else images.of_column[next(in_order)]
        for n in numbers
    ]


def _put_before_text(messages: list[Message], n: int) -> None:
    of_user = next((message for message in messages if message["role"] == "user"), None)
    if of_user is None:
        raise BrokenSample("it has images, but no message of the user")
    of_user["content"] = [{"type": "image"}] * n + _parts(of_user["content"])


def _parts(content: str) -> list[dict[str, object]]:
    """Divide a text at its marks."""
    parts: list[dict[str, object]] = []
    start = 0
    for place in _PLACES.finditer(content):
        parts += [*_text(content[start : place.start()]), {"type": "image"}]
        start = place.end()
    return [*parts, *_text(content[start:])]


def _text(text: str) -> list[dict[str, object]]:
    return [{"type": "text", "text": text}] if text else []
