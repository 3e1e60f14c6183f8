"""Texts with images from datasets that are streamed during training."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch

from torchtitan.components.data.base import NO_DOCUMENT, Batch, Layout, TokenizingDataLoader
from torchtitan.components.data.dataloader import WindowsDataLoader
from torchtitan.components.data.finetuning.chat_encoding import ChatEncoder
from torchtitan.components.data.finetuning.columns import parse_columns
from torchtitan.components.data.finetuning.conversation import BrokenSample, Sample, Text
from torchtitan.components.data.finetuning.encoded import EncodedRow
from torchtitan.components.data.finetuning.row_formats import RowFormat, find_format
from torchtitan.components.data.plan.mixture import check_weights
from torchtitan.components.data.prepare.prepared import validation_split
from torchtitan.components.data.pretraining.feeds import DocumentsFeed, StreamPosition
from torchtitan.components.data.pretraining.order import check_cycle
from torchtitan.components.data.pretraining.streamed_windows import (
    Feed,
    StreamedWindows,
    StreamOrder,
    Window,
)
from torchtitan.components.data.pretraining.streaming import StreamBatches
from torchtitan.components.data.sources.source import (
    AUTO,
    DOCUMENTS,
    StreamSource,
    resolve_source,
)
from torchtitan.components.images.encoder import ImageEncoder
from torchtitan.components.images.files import ImageOpener
from torchtitan.components.images.loader import ImageBatches
from torchtitan.components.images.opening import BackEnd, preferred_back_end
from torchtitan.components.images.processor import ImageProcessor
from torchtitan.components.images.remote import RemoteImages
from torchtitan.components.images.rows import reads_images, remote_images
from torchtitan.components.images.rows_loader import processor_of, white_images
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.protocols.images import ImageInputs
from torchtitan.tools.errors import UserError, require
from torchtitan.tools.logging import logger

if TYPE_CHECKING:
    import datasets

Policy = Literal["drop", "error"]

_DocumentsOfWindow = list[tuple[StreamPosition, EncodedRow]]


@dataclass(frozen=True, kw_only=True)
class ImageRows:
    """Conversion of the rows of a stream to documents."""

    tokenizer: Tokenizer
    processor: ImageProcessor
    columns: dict[str, str]
    """Ours → theirs."""
    broken: Policy
    remote: RemoteImages | None = None
    """Fetches images behind URLs; None: rows with URLs are broken."""

    def format_of(self, columns: Sequence[str]) -> RowFormat:
        """Return the row format for these columns; images are in the rows themselves, or behind
        URLs."""
        opener = ImageOpener(None, remote=self.remote)
        return reads_images(find_format(columns, AUTO, self.columns, "sft"), opener)

    @cached_property
    def encoder(self) -> ImageEncoder:
        """Encoder of texts with images."""
        chat = ChatEncoder(self.tokenizer, None, "assistant")
        return ImageEncoder(chat, self.processor, self.tokenizer)


class ImageStreamFeed(DocumentsFeed[list[EncodedRow], dict[str, object], EncodedRow]):
    """Windows of whole documents, in the order of the stream: a document that does not fit into the
    rest of a window begins the next one."""

    dataset: "PackedImageStream"

    def __init__(self, dataset: "PackedImageStream", source: StreamSource, node: int, n_nodes: int):
        super().__init__(dataset, source, node, n_nodes)
        self._format: RowFormat | None = None
        self._dropped: Counter[str] = Counter()
        self._last_warning = 0

    def open(self) -> "datasets.IterableDataset":
        return self.source.open_rows()

    def items(self, rows: dict[str, list[object]]) -> list[dict[str, object]]:
        return [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]

    def encode(self, items: list[dict[str, object]]) -> Sequence[EncodedRow | None]:
        """Return the `EncodedRow` of each row; None for one that is dropped."""
        if self._format is None:
            self._format = self.dataset.rows.format_of(list(items[0]))
        if self._format.prefetch is not None:
            self._format.prefetch(items)
        samples = [self._convert(self._format, row) for row in items]
        known = [sample for sample in samples if sample is not None]
        encoded = iter(self.dataset.rows.encoder.encode_batch(known))
        return [None if sample is None else self._only(next(encoded)) for sample in samples]

    def _convert(self, format: RowFormat, row: dict[str, object]) -> Sample | None:
        try:
            sample = format.convert(row)
            if not isinstance(sample, Text):
                raise UserError(
                    f"dataset {self.source.name!r} has conversations, which are not running text; "
                    "train on them with --config sft_images --dataloader.stream all"
                )
        except BrokenSample as error:
            self._drop(error)
            return None
        return sample

    def _only(self, found: list[EncodedRow] | BrokenSample) -> EncodedRow | None:
        if isinstance(found, BrokenSample):
            self._drop(found)
            return None
        return found[0]

    def _drop(self, error: BrokenSample) -> None:
        if self.dataset.rows.broken == "error":
            raise UserError(
                f"dataset {self.source.name!r}: {error}; to drop such rows, set "
                "--dataloader.broken drop"
            )
        self._count("broken")

    def _count(self, reason: str) -> None:
        """Count a dropped document, and warn at each doubling of their number."""
        self._dropped[reason] += 1
        if self._dropped.total() >= 2 * self._last_warning:
            self._warn()

    def _warn(self) -> None:
        """Warn of the dropped documents, unless a warning has named all of them."""
        if (total := self._dropped.total()) > self._last_warning:
            self._last_warning = total
            counts = ", ".join(f"{n:,} {reason}" for reason, n in self._dropped.items())
            logger.warning(
                "dataset %r: documents dropped so far by reader %d of %d: %s",
                *(self.source.name, self.node + 1, self.n_nodes, counts),
            )

    def epoch_windows(
        self, position: StreamPosition
    ) -> Iterator[tuple[Window[list[EncodedRow]], StreamPosition]]:
        seq_len = self.dataset.layout.seq_len
        window: _DocumentsOfWindow = []
        room, is_empty = seq_len, position == StreamPosition(epoch=position.epoch)
        for begin, row in self.documents(position):
            size = row.n_tokens - 1
            if not 0 < size <= seq_len:
                self._count("too long" if size > seq_len else "empty")
                continue
            if size > room:
                yield self._sample(window), begin
                window, room = [], seq_len
            window.append((begin, row))
            room, is_empty = room - size, False
        if window:
            yield self._sample(window), StreamPosition(epoch=position.epoch + 1)
        elif is_empty and self._dropped:
            raise UserError(
                f"dataset {self.source.name!r}: all documents were dropped ({dict(self._dropped)})"
            )
        self._warn()  # of those since the last warning, at the end of an epoch

    def _sample(self, window: _DocumentsOfWindow) -> tuple[list[EncodedRow], tuple[int, int]]:
        first, last = (self.number(window[place][0]) for place in (0, -1))
        return [row for _, row in window], (first, last)


class PackedImageStream(StreamedWindows[StreamSource, list[EncodedRow]]):
    """Batches of texts with images."""

    def __init__(self, *arguments: Any, rows: ImageRows):
        super().__init__(*arguments)
        self.rows = rows

    def feed(self, data: StreamSource, node: int, n_nodes: int) -> Feed[list[EncodedRow]]:
        return ImageStreamFeed(self, data, node, n_nodes)

    def make_batch(self, samples: Sequence[Window[list[EncodedRow]]]) -> Batch:
        n_missing = self.layout.local_batch_size - len(samples)
        windows = [*(rows for rows, _ in samples), *[[]] * n_missing]
        batch = ImageBatches(self.rows.processor, is_packed=True)(windows, self.layout.seq_len)
        numbers = [*(both for _, both in samples), *[(NO_DOCUMENT, NO_DOCUMENT)] * n_missing]
        return {**batch, "documents": torch.tensor(numbers)}


class ImageStreamBatches(StreamBatches[StreamSource]):
    """Batches of texts with images from streams; see `StreamBatches`."""

    def __init__(
        self,
        sets: Sequence[StreamSource],
        weights: Sequence[float],
        layout: Layout,
        order: StreamOrder,
        rows: ImageRows,
    ):
        details = [rows.processor.fingerprint, sorted(rows.columns.items()), rows.broken]
        if rows.remote is not None:
            details.append("fetched")
        super().__init__(sets, weights, rows.tokenizer, layout, order, details)
        self._rows = rows

    def stream(self) -> PackedImageStream:
        return PackedImageStream(*self._arguments, rows=self._rows)


class ImageStreamDataLoader(WindowsDataLoader):
    """Texts with images from streamed datasets, packed whole into windows of `seq_len` tokens; a
    longer document is dropped with its images, and counted. Each rank and worker reads its own part
    of the stream, and resumes at its next document. A batch has `images`, see
    `torchtitan.components.images.loader`."""

    @dataclass(kw_only=True, slots=True)
    class Config(WindowsDataLoader.Config):
        """Streamed texts with images."""

        dataset: list[str] = field(default_factory=list)
        """Datasets on the Hugging Face Hub, `org/name[:config][@revision][split]`, or registered
        names."""
        weights: list[float] = field(default_factory=list)
        """Relative share of each dataset in the windows; empty: read each dataset once per
        epoch."""
        columns: list[str] = field(default_factory=list)
        """Columns to rename, as OURS=THEIRS: text=caption."""
        shuffle: bool = True
        """Shuffle the documents of each buffer."""
        shuffle_buffer: int = 256
        """Documents per shuffle buffer, with their images as stored."""
        broken: Policy = "error"
        """Rows that cannot be read or encoded: drop (with a count) or error."""
        image_back_end: BackEnd = "auto"
        """Library that computes pixel values, which differ: pillow, torchvision, or auto
        (torchvision if it is installed and the model's processor has it)."""
        fetch_images: bool = False
        """Fetch images behind URLs in rows (http, https), once per host, into the cache; otherwise,
        such rows are broken."""

        def validate(self) -> None:
            TokenizingDataLoader.Config.validate(self)
            size = self.shuffle_buffer
            require(size >= 1, "--dataloader.shuffle_buffer", size, "at least 1 document")
            if not self.dataset:
                raise UserError("--dataloader.dataset is empty; name a dataset to stream")
            if self.weights:
                check_weights("weights", self.weights, len(self.dataset))
                check_cycle(self.weights)
            parse_columns(self.columns)

        def check_folder(self, tokenizer: Tokenizer) -> None:
            processor_of(tokenizer, self.image_back_end)

        def sources(self) -> list[StreamSource]:
            """Return the streams. Raise `UserError` for local data."""
            found = [resolve_source(name, None, self.split) for name in self.dataset]
            streams = [one for one in found if isinstance(one, StreamSource)]
            if len(streams) < len(found):
                raise UserError(
                    f"--dataloader.dataset {' '.join(self.dataset)}: this configuration streams "
                    "datasets of the Hugging Face Hub; train on local texts with images with "
                    "--config sft_images, which knows all lengths before it packs them"
                )
            return streams

        def rows(self, tokenizer: Tokenizer) -> ImageRows:
            """Return the conversion of rows. Raise `UserError` without an image processor."""
            return ImageRows(
                tokenizer=tokenizer,
                processor=processor_of(tokenizer, self.image_back_end),
                columns=parse_columns(self.columns),
                broken=self.broken,
                remote=remote_images(self.cache_dir) if self.fetch_images else None,
            )

        def blank_images(self, tokenizer: Callable[[], Tokenizer], n_tokens: int) -> ImageInputs:
            """Return white images that fill `n_tokens` tokens, see `white_images`."""
            return white_images(processor_of(tokenizer(), self.image_back_end), n_tokens)

        def prepare(self, *, tokenizer: Tokenizer) -> None:
            """Read the first row of each stream."""
            self.check_host()
            for source in self.sources():
                self.rows(tokenizer).format_of(list(source.first_row(source.open_rows)))

        def identity(self) -> dict[str, object]:
            """Return the datasets, and what decides their order, form and pixel values."""
            names = ("dataset", "weights", "columns", "split")
            return TokenizingDataLoader.Config.identity(self) | {
                **{f"dataloader.{name}": getattr(self, name) for name in names},
                "dataloader.image_back_end": preferred_back_end(self.image_back_end),
            }

        def for_validation(self, dataset: str) -> "ImageStreamDataLoader.Config | None":
            """Return the config for the validation split of `dataset`, as of pre-training."""
            if (found := validation_split(dataset, self.dataset, DOCUMENTS)) is None:
                return None
            chosen, split = found
            return dataclasses.replace(
                self, dataset=chosen, weights=[], split=split, shuffle=False, num_workers=0
            )

    config: Config

    def _open(self, seed: int, samples_per_step: int) -> None:
        config = self.config
        order = StreamOrder(shuffle=config.shuffle, block_size=config.shuffle_buffer, seed=seed)
        self.dataset_names = config.dataset
        self._batches = ImageStreamBatches(
            config.sources(), config.weights, self._layout, order, config.rows(self._tokenizer)
        )
        self.n_samples = None
