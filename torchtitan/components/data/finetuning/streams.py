"""Rows of fine-tuning data that are streamed during training.

Each rank and worker, a "node", reads its own part of each dataset, block by block, as in
`torchtitan.components.data.pretraining.feeds`. The rows of a block are encoded, filtered and packed
together. A node's position is the stream's state before the block and the number of windows
taken from it; resuming reads and packs the block again.
"""

import dataclasses
import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from torchtitan.components.chat_template import ChatTemplate
from torchtitan.components.data.base import NO_DOCUMENT, Batch, Layout
from torchtitan.components.data.dataloader import WindowsDataLoader
from torchtitan.components.data.disk_cache import data_digest
from torchtitan.components.data.finetuning.encoded import EncodedRow
from torchtitan.components.data.finetuning.filters import Dropped
from torchtitan.components.data.finetuning.row_batches import (
    BatchEncoder,
    EncodedBatch,
    name_of,
    row_of,
)
from torchtitan.components.data.finetuning.row_formats import RowFormat
from torchtitan.components.data.finetuning.rows_loader import RowsDataLoader
from torchtitan.components.data.finetuning.samples import (
    LengthLimit,
    count_too_long,
    warnings_of,
)
from torchtitan.components.data.plan.packing import PACKINGS
from torchtitan.components.data.plan.sampler import State
from torchtitan.components.data.pretraining.feeds import (
    EpochFeed,
    StreamBlocks,
    StreamPosition,
    twice_if_different,
)
from torchtitan.components.data.pretraining.order import permute
from torchtitan.components.data.pretraining.streamed_windows import (
    StreamedWindows,
    StreamOrder,
    Window,
)
from torchtitan.components.data.pretraining.streaming import StreamBatches
from torchtitan.components.data.report import Report, no_rows_left_error
from torchtitan.components.data.sources.rows import Row
from torchtitan.components.data.sources.source import Source, StreamSource
from torchtitan.components.data.sources.tables import arrow_rows
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger

if TYPE_CHECKING:
    from torch import Tensor


class RowSet(NamedTuple):
    """One dataset of a stream, see `StreamedSet`."""

    name: str
    source: StreamSource | Source
    """A dataset on the hub, or local data, which is read in the same way."""
    format: RowFormat
    key: object

    @property
    def commit(self) -> str:
        return self.source.commit

    def n_bytes(self) -> int:
        return self.source.n_bytes()

    def pinned(self, commit: str | None = None) -> Self:
        return self._replace(source=self.source.pinned(commit))

    def resumed(self, commit: str) -> Self:
        return self._replace(source=self.source.resumed(commit))


@dataclass(frozen=True, kw_only=True)
class RowWindows:
    """Creation of windows from rows."""

    config: RowsDataLoader.Config
    tokenizer: Tokenizer
    template: ChatTemplate | None
    seq_len: int

    @property
    def loader(self) -> type[RowsDataLoader]:
        """The loader of the same rows without streams."""
        return self.config.loader

    def encoder(self, format: RowFormat) -> BatchEncoder:
        """Return an encoder of rows."""
        config = self.config
        return BatchEncoder(format, config.encoder(self.tokenizer, self.template), config.filters())

    @property
    def limit(self) -> LengthLimit:
        """Limit on the length of samples."""
        config = self.config
        return config.length_limit(self.loader.max_length(self.seq_len))

    def pack(self, rows: Sequence[EncodedRow]) -> list[np.ndarray]:
        """Return the row indices of each window."""
        sizes = np.array([self.loader.positions_of(row) for row in rows], np.int64)
        packing = PACKINGS[self.config.packing_method()]
        return packing(sizes, self.loader.positions_of_window(self.seq_len))

    def key(self) -> list[object]:
        """Return the settings that windows depend on, as JSON-serializable values."""
        config = self.config
        encoder = config.encoder(self.tokenizer, self.template)
        filters = dataclasses.asdict(config.filters())
        return [encoder.fingerprint, filters, config.order_key()]


class RowsFeed(EpochFeed[list[EncodedRow]]):
    """Windows of a node's rows of one dataset, block by block."""

    dataset: "PackedRows"

    def __init__(self, dataset: "PackedRows", data: RowSet, node: int, n_nodes: int):
        super().__init__(dataset, node, n_nodes)
        self._data = data
        self._encoder = dataset.rows.encoder(data.format)
        self._limit = dataset.rows.limit

    @property
    def name(self) -> str:
        return self._data.source.name

    @property
    def reader(self) -> str:
        """The dataset's name in messages, with this node's place among several."""
        place = f" (reader {self.node + 1} of {self.n_nodes})" if self.n_nodes > 1 else ""
        return f"{self.name}{place}"

    @abstractmethod
    def blocks(self, position: StreamPosition) -> Iterator[tuple[int, State | None, list[Row]]]:
        """Yield each block's number, the state before it, and its rows, from the block of
        `position` on."""

    def epoch_windows(
        self, position: StreamPosition
    ) -> Iterator[tuple[Window[list[EncodedRow]], StreamPosition]]:
        is_whole = position == StreamPosition(epoch=position.epoch)
        report, n_blocks = Report(), 0
        for block, state, rows in self.blocks(position):
            samples = self._samples(block, rows, report)
            n_blocks += 1
            if n_blocks & (n_blocks - 1) == 0:  # after 1, 2, 4, 8, …
                self._log(report)
            windows = self._packed([row for _, row in samples], position.epoch, block)
            first = position.document if block == position.block else 0
            for number, window in enumerate(windows[first:], first + 1):
                chosen = [samples[index] for index in window]
                documents = tuple(document for document, _ in chosen)
                after = StreamPosition(position.epoch, block, state, number)
                yield ([row for _, row in chosen], documents), after
        if is_whole and report.rows and not report.samples:
            self._end_without_samples(report)
        if n_blocks & (n_blocks - 1):
            self._log(report)

    def _end_without_samples(self, report: Report) -> None:
        """Raise the error that no rows are left. Warn instead if this reader has only a part of
        the rows and may continue with other datasets."""
        self.dropped = no_rows_left_error(self.reader, report, warnings_of(report, self._limit))
        if self.n_nodes == 1 or not self.dataset.reads_whole_epochs:
            raise self.dropped
        logger.warning("%s", self.dropped)

    def _log(self, report: Report) -> None:
        """Log the counts of the rows that were read since the start or the last epoch."""
        for line in report.lines():
            logger.info("%s: %s", self.reader, line)
        for warning in warnings_of(report, self._limit):
            logger.warning("%s: %s", self.reader, warning)
        if warning := self.dataset.label_warning():
            logger.warning("%s: %s so far", self.reader, warning)

    def _samples(
        self, block: int, rows: Sequence[Row], report: Report
    ) -> list[tuple[int, EncodedRow]]:
        """Return the samples of a block with the numbers of their rows, and count them."""
        first = block * self.dataset.order.block_size
        numbers = {row.where: first + index for index, row in enumerate(rows)}
        samples = []
        for batch in self._encoder.batches(rows):
            encoded = twice_if_different(lambda: self._encoder.encode(batch))  # noqa: B023
            report.add(encoded.report)
            for where, sample in self._fitting(encoded, report):
                samples.append((numbers[where] * self.n_nodes + self.node, sample))
        self.dataset.note_lengths(self.name, [sample for _, sample in samples])
        return samples

    def _fitting(self, batch: EncodedBatch, report: Report) -> Iterator[tuple[str, EncodedRow]]:
        """Yield the samples within the limit with the locations of their rows, and count others."""
        for where, samples in itertools.groupby(batch.samples, lambda found: row_of(found[0])):
            dropped: list[tuple[str, Dropped]] = []
            is_kept = False
            for place, sample in samples:
                kept = self._limit.counted(sample, name_of(place), report)
                if isinstance(kept, Dropped):
                    dropped.append((name_of(place), kept))
                else:
                    is_kept = True
                    yield where, kept
            count_too_long(report, where, dropped, is_kept=is_kept)

    def _packed(self, samples: list[EncodedRow], epoch: int, block: int) -> list[np.ndarray]:
        """Return the sample indices of each window, in the order of training."""
        order = self.dataset.order
        if not order.shuffle:
            return sorted(self.dataset.rows.pack(samples), key=lambda window: int(window.min()))
        key = (order.seed, order.restarts, epoch, block, self.node)
        drawn = np.array([permute(i, len(samples), *key) for i in range(len(samples))], np.int64)
        windows = self.dataset.rows.pack([samples[index] for index in drawn])
        # Packing orders windows by the length of their samples.
        places = (permute(i, len(windows), *key, 1) for i in range(len(windows)))
        return [drawn[windows[place]] for place in places]


class StreamRowsFeed(RowsFeed):
    """Windows of a node's rows of a stream."""

    def __init__(self, dataset: "PackedRows", data: RowSet, node: int, n_nodes: int):
        super().__init__(dataset, data, node, n_nodes)
        assert isinstance(data.source, StreamSource)
        self._blocks = StreamBlocks(
            source=data.source,
            open=data.source.open_tables,
            node=node,
            n_nodes=n_nodes,
            size=dataset.order.block_size,
            shuffles_files=False,  # a row keeps its number, which tells prompts apart
        )

    def blocks(self, position: StreamPosition) -> Iterator[tuple[int, State | None, list[Row]]]:
        for block, before, table in self._blocks.from_position(position):
            first = block * self._blocks.size + 1
            yield block, before, list(arrow_rows(table, self.reader, first))


class LocalRowsFeed(RowsFeed):
    """Windows of a node's rows of local data: every n-th row."""

    def __init__(self, dataset: "PackedRows", data: RowSet, node: int, n_nodes: int):
        super().__init__(dataset, data, node, n_nodes)
        assert isinstance(data.source, Source)
        self._source = data.source

    def blocks(self, position: StreamPosition) -> Iterator[tuple[int, State | None, list[Row]]]:
        size = self.dataset.order.block_size
        rows = self._source.rows(lambda n_read: None)
        first = position.block * size * self.n_nodes + self.node
        own = itertools.islice(rows, first, None, self.n_nodes)
        for block in itertools.count(position.block):
            if not (found := list(itertools.islice(own, size))):
                return
            yield block, None, found


class PackedRows(StreamedWindows[RowSet, list[EncodedRow]]):
    """Batches of rows."""

    def __init__(
        self,
        sets: Sequence[RowSet],
        weights: Sequence[float],
        sizes: Sequence[int],
        layout: Layout,
        order: StreamOrder,
        rows: RowWindows,
    ):
        super().__init__(sets, weights, sizes, rows.tokenizer, layout, order)
        self.rows = rows
        self._make = rows.config.batch_maker(rows.tokenizer)
        self._lengths: dict[str, list[int]] = {}

    def note_lengths(self, name: str, samples: Sequence[EncodedRow]) -> None:
        """Remember the most tokens of each part of a dataset's samples."""
        for sample in samples:
            lengths = [len(part.ids) for part in sample.parts]
            known = self._lengths.setdefault(name, lengths)
            self._lengths[name] = list(map(max, known, lengths))

    def label_warning(self) -> str:
        """Return a warning about the labels of the rows that were read, if there are some of each
        dataset; empty: none."""
        if len(self._lengths) < len({one.source.name for one in self.sets}):
            return ""
        of_parts = zip(*self._lengths.values(), strict=True)
        return self.rows.loader.label_warning(list(map(max, of_parts)))

    def feed(self, data: RowSet, node: int, n_nodes: int) -> RowsFeed:
        is_stream = isinstance(data.source, StreamSource)
        return (StreamRowsFeed if is_stream else LocalRowsFeed)(self, data, node, n_nodes)

    def make_batch(self, windows: Sequence[Window[list[EncodedRow]]]) -> Batch:
        import torch

        layout = self.layout
        n_missing = layout.local_batch_size - len(windows)
        batch = self._make([*(rows for rows, _ in windows), *[[]] * n_missing], layout.seq_len)
        numbers = [*(documents for _, documents in windows), *[()] * n_missing]
        width = max(1, *map(len, numbers))
        filled = [[*row, *[NO_DOCUMENT] * (width - len(row))] for row in numbers]
        return {**batch, "documents": torch.tensor(filled, dtype=torch.int64)}


class RowStreamBatches(StreamBatches[RowSet]):
    """Batches of rows from streams, also mixed with local data; see `StreamBatches`."""

    def __init__(
        self,
        sets: Sequence[RowSet],
        weights: Sequence[float],
        layout: Layout,
        order: StreamOrder,
        rows: RowWindows,
    ):
        super().__init__(sets, weights, rows.tokenizer, layout, order, rows.key())
        self._rows = rows

    def stream(self) -> PackedRows:
        return PackedRows(
            self._sets, self._weights, self._sizes, self._layout, self._order, self._rows
        )

    @property
    def _names(self) -> str:
        return ", ".join(repr(one.name) for one in self._sets)

    def describe(self, first: int, last: int) -> str:
        number, place = divmod(first, len(self._sets))
        row, reader = self._reader(number)
        return f"{self._sets[place].name}, row {row + 1} {reader}"


class RowStreamDataLoader(WindowsDataLoader):
    """Rows of streams, encoded, filtered and packed during training: `--dataloader.stream all`.
    The configuration of the rows builds this loader or one without streams; the batches of both
    have the same form. Datasets take turns by their weights, window by window; without weights, by
    the sizes of their files, and each dataset is read once per epoch."""

    config: RowsDataLoader.Config

    def _open(self, seed: int, samples_per_step: int) -> None:
        config = self.config
        self.template = config.find_template(self._tokenizer)
        self.dataset_names = config.dataset
        order = config.stream_order(seed)
        rows = RowWindows(
            config=config,
            tokenizer=self._tokenizer,
            template=self.template,
            seq_len=self._layout.seq_len,
        )
        weights = config.dataset_weights()
        self._batches = RowStreamBatches(self._sets(), weights, self._layout, order, rows)
        self.n_samples = None

    def _sets(self) -> list[RowSet]:
        config = self.config
        found = zip(config.dataset, config.rows(), strict=True)
        return [
            RowSet(name, source, format, self._key(name, source, format))
            for name, (source, format) in found
        ]

    def _key(self, name: str, source: StreamSource | Source, format: RowFormat) -> list[object]:
        content = (
            source.key
            if isinstance(source, StreamSource)
            else data_digest(self.config.source, self.config.cache_dir, name)
        )
        return [content, format.fingerprint]

    def set_weights(self, weights: Sequence[float]) -> None:
        if not hasattr(self.config, "weights"):
            raise UserError(f"{self.config.loader.__qualname__} has no weights of datasets")
        super().set_weights(weights)

    def present_state(self) -> Callable[[], State]:
        state = WindowsDataLoader.state_dict(self)  # a subclass may return an earlier one
        return lambda: state

    def document_names(self, documents: "Tensor") -> list[str]:
        numbers = [number for number in documents.tolist() if number != NO_DOCUMENT]
        return [self._batches.describe(number, number) for number in numbers]

    def sample_name(self, number: int) -> str:
        """Return a sample's name in the ledger."""
        return self._batches.describe(number, number)
