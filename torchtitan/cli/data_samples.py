"""Readable form of batches: rows split into documents, and documents into tokens with their
text."""

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from torchtitan.components.data.base import NO_DOCUMENT, BaseDataLoader, Batch
from torchtitan.components.data.finetuning.preference import SIDES
from torchtitan.components.images.files import ImageFile
from torchtitan.components.losses.loss import IGNORE_INDEX
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import visible

_THUMBNAIL = 320
"""Most pixels of a thumbnail's side. A larger image becomes JPEG, a smaller one PNG."""

_UNDECODED = "\ufffd"
_MOST_SHARED = 16
"""Maximum tokens examined for the rest of a character. A character has at most four, and the last
may begin another."""


class Picture(NamedTuple):
    """An image in the place of its tokens."""

    width: int
    """Pixels of the whole image."""
    height: int
    n_tokens: int
    thumbnail: str
    """Data URL of the image, reduced to `_THUMBNAIL` pixels."""

    @property
    def caption(self) -> str:
        return f"image {self.width}x{self.height}: {self.n_tokens:,} tokens"


class Token(NamedTuple):
    """A token of a document with its text, or all tokens of an image."""

    id: int
    text: str
    """Text added by the token; empty if it is part of an earlier token's character."""
    trained: bool
    """True if the token is predicted in training."""
    special: bool
    position: int
    picture: Picture | None = None

    @property
    def n_tokens(self) -> int:
        return self.picture.n_tokens if self.picture else 1


class Document(NamedTuple):
    """Tokens that attend to each other."""

    name: str
    """Empty if unknown for this document."""
    tokens: list[Token]


class Row(NamedTuple):
    """One input of a sample, of shape (T,), as documents."""

    title: str
    """Name of the input if a sample has several, else empty."""
    documents: list[Document]
    n_positions: int
    """T, including padding."""
    n_padding: int


@dataclass(frozen=True)
class Sample:
    """One sample of a batch: a row of each of its tensors."""

    name: str
    rows: list[Row]
    answer: str | None = None


def samples_of(batch: Batch, loader: BaseDataLoader, tokenizer: Tokenizer) -> list[Sample]:
    """Return the rows of a batch except padding rows. Raise `UserError` if the batch has no known
    fields."""
    samples = []
    for index in range(len(next(iter(batch.values())))):
        row: Batch = {
            name: value.rows(index, index + 1)
            if isinstance(value, AttentionMetadata)
            else value[index]
            for name, value in batch.items()
            if name != "images"
        }
        documents = row.get("documents")
        if documents is not None and documents[0] == NO_DOCUMENT:
            continue
        names = [] if documents is None else loader.document_names(documents)
        rows = (
            [_prompt(row, names, tokenizer)] if "prompts" in row else _rows(row, names, tokenizer)
        )
        if "images" in batch or row.get("prompt_images"):
            rows = [_with_images(shown, row["documents"], loader, tokenizer) for shown in rows]
        if not rows:
            raise UserError(
                f"batches of {type(loader).__qualname__} contain {', '.join(batch)}, which cannot "
                "be shown; they need input and labels, possibly with a common prefix"
            )
        answer = row.get("answers")
        name = ", ".join(dict.fromkeys(names))
        samples.append(Sample(name, rows, None if answer is None else visible(answer)))
    return samples


def _with_images(
    row: Row, numbers: torch.Tensor, loader: BaseDataLoader, tokenizer: Tokenizer
) -> Row:
    """Return a row with images instead of their tokens. `numbers` are the numbers of its
    documents."""
    from torchtitan.components.data.finetuning.planned_loader import PlannedDataLoader
    from torchtitan.components.images.rows_loader import processor_of

    assert isinstance(loader, PlannedDataLoader)
    config: Any = loader.config  # of a loader of images
    processor = processor_of(tokenizer, config.image_back_end)
    known = [number for number in numbers.tolist() if number != NO_DOCUMENT]
    samples = [loader.samples.sample(number) for number in known]
    of_documents = [sample.images for sample in samples for _ in sample.parts]
    documents = []
    for document, stored in zip(row.documents, of_documents, strict=True):
        images = [ImageFile.from_json(one) for one in stored]
        sizes = [(image.width, image.height) for image in images]
        expansions = processor.expansions(sizes) if sizes else []
        places = [
            _without_text(ids, processor.token_types(np.array(ids)).tolist()) for ids in expansions
        ]
        documents.append(document._replace(tokens=with_images(document.tokens, images, places)))
    return row._replace(documents=documents)


def _without_text(ids: Sequence[int], types: Sequence[int]) -> list[int]:
    """Return the ids from the first to the last token of an image, without text around them, which
    the tokens of other text may have joined; none of an image that an encoder or layers read."""
    of_image = [place for place, kind in enumerate(types) if kind]
    return list(ids[of_image[0] : of_image[-1] + 1]) if of_image else []


def with_images(
    tokens: Sequence[Token], images: Sequence[ImageFile], places: Sequence[Sequence[int]]
) -> list[Token]:
    """Return tokens, with one token for each image instead of its ids, `places`, in order. An image
    without ids is inserted where the one before it ends. Skip images whose ids are not found."""
    ids = [token.id for token in tokens]
    shown: list[Token] = []
    end = 0
    for image, place in zip(images, places, strict=True):
        n_tokens = len(place)
        starts = range(end, len(ids) - n_tokens + 1)
        start = next((i for i in starts if ids[i : i + n_tokens] == list(place)), None)
        if start is None:
            continue
        picture = Picture(image.width, image.height, n_tokens, _thumbnail(image))
        text = f"[{picture.caption}]"
        shown += tokens[end:start]
        shown.append(
            tokens[start]._replace(text=text, trained=False, special=True, picture=picture)
        )
        end = start + n_tokens
    return [*shown, *tokens[end:]]


def _thumbnail(image: ImageFile) -> str:
    picture = image.decode()
    picture.thumbnail((_THUMBNAIL, _THUMBNAIL))
    kind = "png" if max(picture.size) < _THUMBNAIL else "jpeg"
    file = io.BytesIO()
    picture.save(file, kind)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"


def _rows(row: Batch, names: Sequence[str], tokenizer: Tokenizer) -> list[Row]:
    prefixes = [name.removesuffix("input") for name in row if name.endswith("input")]
    return [_row(prefix, row, names, tokenizer) for prefix in prefixes if f"{prefix}labels" in row]


def _prompt(row: Batch, names: Sequence[str], tokenizer: Tokenizer) -> Row:
    ids = row["prompts"]
    tokens = _tokens(ids, [IGNORE_INDEX] * len(ids), tokenizer)
    return Row("", [Document(names[0] if names else "", tokens)], len(ids), 0)


def _row(prefix: str, row: Batch, names: Sequence[str], tokenizer: Tokenizer) -> Row:
    inputs = row[f"{prefix}input"]
    labels = row[f"{prefix}labels"]
    attention = row.get(f"{prefix}attention")
    starts = [0] if attention is None else attention.cu_seqlens[:-1].tolist()
    n_data = len(inputs) - _n_padding(inputs, labels, None if attention is None else starts[-1])
    starts = [start for start in starts if start < n_data]
    if "sequences" in row and not prefix:
        sequences = row["sequences"][starts].tolist()
        names = [
            f"{names[number // len(SIDES)]} {SIDES[number % len(SIDES)]}" for number in sequences
        ]
    own_names = names if len(names) == len(starts) else [""] * len(starts)
    ids, predicted = inputs.tolist(), labels.tolist()
    documents = [
        Document(name, _tokens(ids[start:stop], predicted[start:stop], tokenizer))
        for name, start, stop in zip(own_names, starts, [*starts, n_data][1:], strict=True)
    ]
    return Row(prefix.rstrip("_"), documents, len(inputs), len(inputs) - n_data)


def _n_padding(inputs: torch.Tensor, labels: torch.Tensor, last_start: int | None) -> int:
    """Count the padding positions at the end of a row: one repeated token without labels. The last
    document is all padding or has none; if documents are unknown (`last_start` is None), padding
    has at least two positions."""
    differs = ((inputs != inputs[-1]) | (labels != IGNORE_INDEX)).nonzero().flatten()
    begin = int(differs[-1]) + 1 if len(differs) else 0
    if last_start is not None:
        return len(inputs) - last_start if begin <= last_start else 0
    return len(inputs) - begin if len(inputs) - begin >= 2 else 0


def _tokens(ids: list[int], labels: list[int], tokenizer: Tokenizer) -> list[Token]:
    """Return a document's tokens. Labels that differ from the next input are inserted where they
    belong."""
    shown: list[tuple[int, bool, int]] = []
    for position, token in enumerate(ids):
        is_label = position > 0 and labels[position - 1] == token
        if position > 0 and labels[position - 1] != IGNORE_INDEX and not is_label:
            shown.append((labels[position - 1], True, position))
        shown.append((token, is_label, position))
    if ids and labels[-1] != IGNORE_INDEX:
        shown.append((labels[-1], True, len(ids)))
    texts = token_texts([token for token, _, _ in shown], tokenizer)
    special = tokenizer.special_ids
    return [
        Token(token, visible(text), trained, token in special, position)
        for (token, trained, position), text in zip(shown, texts, strict=True)
    ]


def token_texts(ids: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    """Return the text that each token adds; a character split over tokens belongs to the first of
    them."""
    texts: list[str] = []
    before: list[int] = []  # earlier tokens affect decoding, for example of a leading space
    while (start := len(texts)) < len(ids):
        decoded = partial(_decode_behind, tokenizer, before)
        n_tokens = _n_sharing(ids[start : start + _MOST_SHARED], decoded)
        before = list(ids[start : start + n_tokens])
        texts += [decoded(before), *[""] * (n_tokens - 1)]
    return texts


def _decode_behind(tokenizer: Tokenizer, before: Sequence[int], ids: Sequence[int]) -> str:
    return tokenizer.decode([*before, *ids])[len(tokenizer.decode(before)) :]


def _n_sharing(ids: Sequence[int], decoded: Callable[[Sequence[int]], str]) -> int:
    """Return the number of leading tokens that make up the same characters."""
    first = decoded(ids[:1])
    if not first.endswith(_UNDECODED):
        return 1
    texts = [decoded(ids[: n + 1]) for n in range(len(ids))]
    whole = next((n for n, text in enumerate(texts) if not text.endswith(_UNDECODED)), None)
    if whole is not None and texts[whole].count(_UNDECODED) < first.count(_UNDECODED):
        return whole + 1
    # Either the text itself contains U+FFFD, perhaps as single bytes, or the bytes are not text.
    return next((n for n, text in enumerate(texts) if text != first), len(texts))
