"""Rows of fine-tuning data in batches: converted, encoded, filtered and counted, in one process or
several."""

import itertools
import json
import os
import pickle
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import NamedTuple

from torchtitan.components.data.finetuning.conversation import (
    BrokenSample,
    Conversation,
    Pair,
    Prompt,
    Sample,
    Text,
)
from torchtitan.components.data.finetuning.encoded import EncodedRow
from torchtitan.components.data.finetuning.filters import Dropped, FilterConfig
from torchtitan.components.data.finetuning.row_encoder import RowEncoder
from torchtitan.components.data.finetuning.row_formats import RowFormat
from torchtitan.components.data.forks import can_fork, forked_calls
from torchtitan.components.data.report import ExampleCounter, Report
from torchtitan.components.data.sources.rows import Row
from torchtitan.components.tokenizer import DifferentIds
from torchtitan.tools.errors import RunFailure, UserError, require
from torchtitan.tools.logging import collected_logs, logger
from torchtitan.tools.process import usable_cores

BATCH_ROWS = 256
BATCH_BYTES = 1 << 28
"""Bytes of images in rows from which on fewer rows are encoded together."""

PREFETCHED_ROWS = 128

SECONDS_ALONE = 2.0
"""Time of encoding after which automatic processes start: longer than they take to start, and long
enough to learn the forms of most conversations, which they inherit."""

MOST_AUTOMATIC = 8
"""Automatic processes at most: the process that reads and writes cannot serve many more."""

BATCHES_AHEAD = 2
"""Batches of each process that wait for it, or to be written."""

Converted = Sample | BrokenSample | Dropped
Batch = list[tuple[Row, Converted | None]]
"""Rows with their samples; None for a row that is not converted yet."""


Place = str | list[str | int]
"""Place of a sample, as JSON: the location of its row, `my.jsonl:17`, or if the row has several
samples, a list of it and the number of the sample, from 1."""


def name_of(place: Place) -> str:
    """Return the unique name of a sample: `my.jsonl:17`, or `my.jsonl:17, sample 2`."""
    return place if isinstance(place, str) else f"{place[0]}, sample {place[1]}"


def row_of(place: Place) -> str:
    """Return the location of a sample's row."""
    return place if isinstance(place, str) else str(place[0])


class EncodedBatch(NamedTuple):
    """The samples of a batch of rows."""

    report: Report
    """Counts of the rows."""
    samples: list[tuple[Place, EncodedRow]]


class BatchEncoder:
    """Converts, encodes, filters and counts rows.

    Args:
        format: row format.
        encoder: encoder of the samples; it is checked before the first one other than a text.
        filters: filters for samples.
    """

    def __init__(self, format: RowFormat, encoder: RowEncoder, filters: FilterConfig):
        self.format, self.encoder = format, encoder
        self._filters = filters
        self._is_checked = False

    def batches(self, rows: Iterable[Row]) -> Iterator[Batch]:
        """Yield rows, `BATCH_ROWS` at a time, fewer if they contain images of more than
        `BATCH_BYTES`. What a user's function returns may depend on the rows before, so it is called
        here, in their order."""
        is_converted = self.format.function is not None or not self.encoder.can_fork
        batch: Batch = []
        n_bytes = 0
        for row in self._prefetched(rows):
            sample = self._convert(row) if is_converted else None
            batch.append((row, sample))
            n_bytes += _image_bytes(sample)
            if len(batch) == BATCH_ROWS or n_bytes > BATCH_BYTES:
                yield batch
                batch, n_bytes = [], 0
        if batch:
            yield batch

    def results(self, row: Row) -> list[EncodedRow | Dropped]:
        """Return the samples of a single row, and why others are dropped."""
        sample = self._convert(row)
        if isinstance(sample, (BrokenSample, Dropped)):
            return self._filtered(sample)
        [encoded] = self.encoder.encode_batch([sample])
        return self._filtered(encoded)

    def encode(self, batch: Batch) -> EncodedBatch:
        """Return the samples of a batch. Raise `UserError` if the filters reject a row with policy
        `error`, `DifferentIds` as `RowEncoder.encode_batch`."""
        pairs = [(row, self._convert(row) if sample is None else sample) for row, sample in batch]
        usable = [sample for _, sample in pairs if not isinstance(sample, (BrokenSample, Dropped))]
        if not self._is_checked and not all(isinstance(sample, Text) for sample in usable):
            self.encoder.check()
            self._is_checked = True
        encoded = iter(self.encoder.encode_batch(usable))
        result = EncodedBatch(Report(format=self.format.name), [])
        for row, sample in pairs:
            if isinstance(sample, (BrokenSample, Dropped)):
                self._add(result, row, sample, sample)
            else:
                self._add(result, row, sample, next(encoded))
        return result

    def _add(
        self,
        batch: EncodedBatch,
        row: Row,
        converted: Converted,
        encoded: Sequence[EncodedRow] | BrokenSample | Dropped,
    ) -> None:
        """Add the samples of a row to a batch, and count them."""
        report = batch.report
        report.rows += 1
        if isinstance(converted, Conversation) and _is_respelled(row, converted):
            report.normal.add(
                row.where, partial(json.dumps, converted.messages, ensure_ascii=False)
            )
        for column in self.format.unread_columns(row.values or {}):
            report.unread.setdefault(column, ExampleCounter()).add(row.where, "it has content")
        try:
            results = self._filtered(encoded)
        except UserError as error:
            raise UserError(f"{row.where}: {error}") from None
        samples = [result for result in results if not isinstance(result, Dropped)]
        dropped = [result for result in results if isinstance(result, Dropped)]
        if not samples:
            report.drop(row.where, *dropped[0])
            return
        for reason, why in dropped:
            report.left_out.add(row.where, f"{reason}: {why}")
        report.kept += 1
        if not isinstance(converted, (BrokenSample, Dropped)):
            for name, why in self.encoder.unread_options(converted).items():
                report.unread_options.setdefault(name, ExampleCounter()).add(row.where, why)
        for number, sample in enumerate(samples, 1):
            _count(report, row.where, sample)
            batch.samples.append((row.where if len(samples) == 1 else [row.where, number], sample))

    def _filtered(
        self, encoded: Sequence[EncodedRow] | BrokenSample | Dropped
    ) -> list[EncodedRow | Dropped]:
        if isinstance(encoded, Dropped):
            return [encoded]
        if isinstance(encoded, BrokenSample):
            return [self._filters.apply(encoded)]
        return [self._filters.apply(sample) for sample in encoded]

    def _prefetched(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Yield rows after what they name was fetched."""
        if self.format.prefetch is None:
            yield from rows
            return
        rows = iter(rows)
        while waiting := list(itertools.islice(rows, PREFETCHED_ROWS)):
            self.format.prefetch([row.values for row in waiting if row.values is not None])
            yield from waiting

    def _convert(self, row: Row) -> Converted:
        if row.values is None:
            return BrokenSample(row.error)
        try:
            sample = self.format.convert(row.values)
        except BrokenSample as error:
            return error
        except RecursionError:
            return BrokenSample("it is nested too deeply")
        except UserError as error:
            raise UserError(f"{row.where}: {error}") from None
        return Dropped("left_out", f"by {self.format.name}") if sample is None else sample


def check_processes(processes: int) -> None:
    """Raise `UserError` for a value of `--dataloader.encoding_processes` that this host cannot
    run."""
    option, most = "--dataloader.encoding_processes", 16 * usable_cores()
    require(processes <= most, option, processes, f"at most {most}, 16 per CPU core")
    where = "at most 1 in a daemonic process and outside Linux, where processes cannot be forked"
    require(processes <= 1 or can_fork(), option, processes, where)


def encoded_batches(
    rows: Iterable[Row], encoder: BatchEncoder, processes: int
) -> Iterator[EncodedBatch]:
    """Yield the samples of rows, in their order.

    Args:
        rows: rows of a source, which this process reads.
        encoder: encodes them.
        processes: processes that encode; 0: this one and, after `SECONDS_ALONE`, one for each core.
            Encoders that cannot be forked use this one.
    """
    started, batches = time.process_time(), encoder.batches(rows)
    n_processes = processes or (min(MOST_AUTOMATIC, usable_cores()) if can_fork() else 1)
    seconds_alone = 0.0 if processes else SECONDS_ALONE
    for batch in batches:
        yield encoder.encode(batch)
        is_long = time.process_time() - started >= seconds_alone
        if n_processes > 1 and is_long and encoder.encoder.can_fork:
            yield from _in_processes(batches, encoder, n_processes)


def _in_processes(
    batches: Iterator[Batch], encoder: BatchEncoder, n_processes: int
) -> Iterator[EncodedBatch]:
    """Yield the samples of batches that processes encode, in the order of the batches."""
    pending: deque[Future[_Answer] | EncodedBatch] = deque()
    told: set[str] = set()
    problem: UserError | None = None
    with forked_calls(partial(_encode_pickled, encoder), n_processes, _prepare_process) as call:
        try:
            while True:
                try:
                    batch = next(batches, None)
                except UserError as error:  # earlier rows may also have one
                    problem, batch = error, None
                if batch is None:
                    break
                pending.append(_submitted(batch, call, encoder))
                if len(pending) == BATCHES_AHEAD * n_processes:
                    yield _result(pending.popleft(), told)
            while pending:
                yield _result(pending.popleft(), told)
        except BrokenProcessPool:
            raise RunFailure(
                "a process that encodes rows was killed, possibly for lack of memory; set a lower "
                "--dataloader.encoding_processes"
            ) from None
        except DifferentIds:
            encoder.encoder.arrays.close()  # the process has closed its own
            raise
    if problem:
        raise problem


class _Answer(NamedTuple):
    """Result of a process."""

    batch: EncodedBatch
    logs: list[tuple[int, str]]
    """Level and text of its log messages."""


def _submitted(
    batch: Batch, call: Callable[[bytes], "Future[_Answer]"], encoder: BatchEncoder
) -> "Future[_Answer] | EncodedBatch":
    try:
        return call(pickle.dumps(batch))
    except RecursionError:  # a value is nested too deeply to be sent
        return encoder.encode(batch)


def _result(pending: "Future[_Answer] | EncodedBatch", told: set[str]) -> EncodedBatch:
    """Wait for a batch, and repeat the log messages that no process has sent before."""
    if isinstance(pending, EncodedBatch):
        return pending
    batch, logs = pending.result()
    for level, text in logs:
        if text not in told:
            told.add(text)
            logger.log(level, "%s", text)
    return batch


def _encode_pickled(encoder: BatchEncoder, content: bytes) -> _Answer:
    with collected_logs() as logs:
        batch = encoder.encode(pickle.loads(content))  # noqa: S301 - from the parent process
    return _Answer(batch, logs)


def _prepare_process() -> None:
    """Leave signals, which reach the whole process group, to the parent. Each process uses one
    thread: the libraries' own threads are not forked."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _is_respelled(row: Row, conversation: Conversation) -> bool:
    """Return whether a row has a list of messages, and in another form than the conversation that
    is read from it."""
    listed = [value for value in (row.values or {}).values() if isinstance(value, list)]
    lists = [value for value in listed if value and all(isinstance(turn, dict) for turn in value)]
    if not lists or conversation.messages in lists:
        return False
    # Tables store every key in every message.
    return _without_nulls(conversation.messages) not in map(_without_nulls, lists)


def _without_nulls(turns: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    return [{key: value for key, value in turn.items() if value is not None} for turn in turns]


def _count(report: Report, where: str, sample: EncodedRow) -> None:
    report.samples += 1
    report.tokens += sample.n_tokens
    report.trained_tokens += sample.n_trained
    if sample.n_special_in_text:
        report.special_in_text.add(where, f"{sample.n_special_in_text} tokens")
    for part in sample.parts:
        facts = part.facts
        report.turns += facts.n_turns
        report.stops += facts.n_stops
        if facts.n_only_stops:
            report.only_stops.add(where, f"{facts.n_only_stops} of {facts.n_turns} turns")
        for reason in facts.unprompted:
            report.unprompted.add(where, reason)
        for option in facts.options:
            report.options[option] = report.options.get(option, 0) + 1
        for lost in facts.lost:
            report.lost.setdefault(lost, ExampleCounter()).add(
                where, "the template does not write it"
            )


def _image_bytes(sample: Converted | None) -> int:
    """Return the bytes of the images that a row contains itself."""
    conversation = sample.prompt if isinstance(sample, Pair | Prompt) else sample
    images = conversation.images if isinstance(conversation, Conversation) else ()
    return sum(len(image.content) for image in images)
