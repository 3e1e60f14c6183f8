"""What the loaders of fine-tuning data share: the rows they read, the way from a `Planner` to batches, the position."""

import dataclasses
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
import torch

from torchtitan.components.chat_template import ChatTemplate, resolve_chat_template
from torchtitan.components.data.base import NO_DOCUMENT, Batch, TokenizingDataLoader, is_own_position
from torchtitan.components.data.disk_cache import data_identity, digest_of
from torchtitan.components.data.finetuning.chat_encoding import RowEncoder
from torchtitan.components.data.finetuning.columns import parse_columns
from torchtitan.components.data.finetuning.filters import FilterConfig, Policy
from torchtitan.components.data.finetuning.row_formats import Kind, RowFormat, dataset_formats, describes
from torchtitan.components.data.finetuning.sample_cache import SampleCache, first_columns, open_sample_cache
from torchtitan.components.data.finetuning.samples import (
    LengthFilteredDataset,
    SampleSets,
    TooLong,
    WindowDataset,
    Windows,
    pack_windows,
)
from torchtitan.components.data.plan import Planner, Sampler, ShuffleSampler, Snapshot, StepStatistics, Window
from torchtitan.components.data.report import DataSummary, SetSummary
from torchtitan.components.data.sources.source import AUTO, CHAT_DATASETS, Source, resolve_source
from torchtitan.components.data.workers import Workers
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger

PREFETCHED_BATCHES = 2
"""Batches that `Workers` has each of its processes prepare ahead."""

DRAWN_AT_A_TIME = 1024
"""Samples that a sampler draws at a time where nothing else depends on it, since samples share no windows."""


class PlannedDataLoader(TokenizingDataLoader):
    """Batches of the windows of a `Planner`, made from the numbers of the samples in each.

    The windows come in one global order, the same for any number of ranks, workers and windows per batch: with R ranks
    that take B at a time, rank r takes those from n * R * B + r * B on. The planner runs in the main process, and the
    position is that behind the last batch handed out, exact between any two batches; it can be continued by other
    numbers of all of these.

    The batches' `documents` (B, M) are the numbers of the samples in each window, in their order, counted over all data
    sets, with `NO_DOCUMENT` behind them.

    A subclass says what its rows are (`kind`), how they are encoded (`Config.encoder`), how long they may be, and where
    it differs, which of them share a window (`plan`), and what a batch of windows is (`collate`).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TokenizingDataLoader.Config):
        """Rows of fine-tuning data."""

        dataset: list[str] = field(default_factory=list)
        """What to read, one or several: a registered name, or a local path: a file (json, jsonl, csv, parquet; .gz or
        .zst of these), a folder, a glob pattern, or a folder saved by the library datasets."""
        format: str = "auto"
        """How rows are read: auto (by their columns), the name of a format, or a function of your own,
        package.module:function or path/to/file.py:function. Of several data sets, those that it fits."""
        columns: list[str] = field(default_factory=list)
        """Columns under other names, as ours=theirs: prompt=question. Of several data sets, those that have them."""
        chat_template: str = ""
        """Template that makes text of a conversation: chatml, llama3, mistral, alpaca, or a file; empty: the model's
        own."""
        empty: Policy = "drop"
        """Rows that say nothing: drop or error."""
        broken: Policy = "error"
        """Rows that cannot be read, converted or encoded: drop or error."""
        too_long: TooLong = "drop"
        """Samples beyond the sequence length: drop, truncate_left (keeps the end), truncate_right, or error."""
        sampler: Sampler.Config = field(default_factory=ShuffleSampler.Config)
        """Order in which samples are drawn."""

        def validate(self) -> None:
            """Raise `UserError` for a value out of range; looks at no data."""
            TokenizingDataLoader.Config.validate(self)
            if not self.dataset or "" in self.dataset:
                raise UserError("--dataloader.dataset must say what to read: a file such as my.jsonl")
            parse_columns(self.columns)

        def prepare(self, *, tokenizer: Tokenizer) -> None:
            """Tokenize the data into the cache."""
            self.validate()
            self.open_caches(tokenizer, self.find_template(tokenizer))

        def open_caches(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> list[SampleCache]:
            """The samples of each data set, encoded now if they are not in the cache.

            Raises:
                UserError: the data cannot be used.
            """
            encoder, filters = self.encoder(tokenizer, template), self.filters()
            return [
                open_sample_cache(*of_set, encoder, filters, self.cache_dir, verify=self.verify_caches)
                for of_set in self.rows()
            ]

        def encoder(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> RowEncoder:
            """How a row becomes a sample."""
            raise NotImplementedError

        def filters(self) -> FilterConfig:
            """Which rows become samples."""
            return FilterConfig(empty=self.empty, broken=self.broken, untrained=None)

        def order_key(self) -> list[Any]:
            """What decides, beside the samples of the caches and the sequence length, which windows there are;
            JSON-ready."""
            return [self.too_long, self.sampler.to_dict()]

        def find_template(self, tokenizer: Tokenizer) -> ChatTemplate | None:
            """The template that is named, else the model's own; None where the loader can do without.

            Raises:
                UserError: there is none.
            """
            return resolve_chat_template(self.chat_template, [tokenizer.folder] if tokenizer.folder else [], tokenizer)

        def rows(self) -> list[tuple[Source, RowFormat]]:
            """The rows of each data set, and how they are read.

            Raises:
                UserError: there are none, or they cannot be recognized.
            """
            sources = [self._source(dataset) for dataset in self.dataset]
            columns = [first_columns(source) for source in sources]
            mapping = parse_columns(self.columns)
            formats = dataset_formats(self.dataset, columns, self.format, mapping, self._kind)
            return list(zip(sources, formats, strict=True))

        def _source(self, dataset: str) -> Source:
            source = resolve_source(dataset, split=self.split, catalog=CHAT_DATASETS)
            assert isinstance(source, Source)
            return source

        def identity(self) -> dict[str, Any]:
            """Return the loader's class, the content of its data sets, and how their rows are read."""
            read = ("split", "format", "columns", "chat_template")
            return TokenizingDataLoader.Config.identity(self) | {
                "dataloader.dataset": data_identity(self.dataset, self._source, self.cache_dir),
                **{f"dataloader.{name}": getattr(self, name) for name in read},
            }

        def for_validation(self, dataset: str) -> Self | None:
            """The validation split of `dataset`, or all of it where it has no splits; where none is given, those of the
            own data sets that have one. `format` and `columns` hold for it where they fit."""
            own = [name for name in self.dataset if "validation" in CHAT_DATASETS.splits(name)]
            chosen = [dataset] if dataset else own
            if not chosen:
                return None
            splits = CHAT_DATASETS.splits(chosen[0])
            split = "validation" if "validation" in splits else splits[0]
            in_order = ShuffleSampler.Config(shuffle=False)
            config = dataclasses.replace(self, dataset=chosen, split=split, sampler=in_order, num_workers=0)
            return config if config._is_described() else dataclasses.replace(config, format=AUTO, columns=[])

        def _is_described(self) -> bool:
            """Whether `format` and `columns` fit any of the data sets."""
            if self.format == AUTO and not self.columns:
                return True
            mapping = parse_columns(self.columns)
            return any(
                describes(dataset, first_columns(self._source(dataset)), self.format, mapping, self._kind)
                for dataset in self.dataset
            )

        @property
        def _kind(self) -> Kind:
            assert issubclass(self._owner, PlannedDataLoader)
            return self._owner.kind

    config: Config

    kind: ClassVar[Kind]
    """What the rows are for."""

    def _open(self, seed: int, samples_per_step: int) -> None:
        self.template = self.config.find_template(self._tokenizer)
        """What makes text of the conversations; None: the data is running text."""
        self.samples = self._open_samples()
        """What is made batches of, with the report of what was left out."""
        self._batches = WindowDataset(self.samples, self._layout.seq_len, type(self).collate)
        self._planner = self._new_planner(seed, samples_per_step)
        self._planned: deque[Snapshot] = deque()
        self._handed_out = self._planner.snapshot()
        self._workers: Workers | None = None
        self._exhausted = False
        self._refusal: UserError | None = None
        of_epochs = self._planner.windows_of_epochs
        self.n_samples = None if of_epochs is None else sum(of_epochs)
        self.log_data()

    @staticmethod
    def max_length(seq_len: int) -> int:
        """Most tokens of a sequence: the last one has nothing to predict, and takes no position."""
        return seq_len + 1

    @staticmethod
    def collate(windows: Windows, seq_len: int) -> Batch:
        """A batch, without `documents`."""
        return pack_windows(windows, seq_len)

    def plan(self, samplers: list[Sampler], *, epochs: int | None, windows_per_step: int, **order: Any) -> Planner:
        """The windows, from the first on: of each sample one of its own.

        Args:
            samplers: of each data set.
            epochs: how often the data is read; None: without end.
            windows_per_step: windows of one training step.
            order: what the planner is to be given beside these.
        """
        lengths = [np.ones(of_set.n_samples, np.int64) for of_set in self.samples.sets]
        return Planner(lengths, 1, samplers, packing="none", chunk=DRAWN_AT_A_TIME, epochs=epochs, **order)

    def _open_samples(self) -> SampleSets:
        config = self.config
        caches, max_length = config.open_caches(self._tokenizer, self.template), self.max_length(self._layout.seq_len)
        contents = [cache.fingerprint for cache in caches]
        self._fingerprint = digest_of([contents, [self._layout.seq_len, *config.order_key()]])
        fitted = [
            LengthFilteredDataset(cache, max_length, config.too_long, config.filters().untrained, name)
            for name, cache in zip(config.dataset, caches, strict=True)
        ]
        return SampleSets(config.dataset, fitted)

    def _new_planner(self, seed: int, windows_per_step: int) -> Planner:
        config = self.config
        sizes = [of_set.n_samples for of_set in self.samples.sets]
        samplers = [config.sampler.build(n_samples=size, seed=seed + i) for i, size in enumerate(sizes)]
        self.needs_sample_losses = any(sampler.needs_sample_losses for sampler in samplers)
        return self.plan(
            samplers,
            epochs=self._layout.epochs,
            windows_per_step=windows_per_step,
            names=config.dataset,
            seed=seed,
            ahead=PREFETCHED_BATCHES * config.num_workers * self._layout.global_batch_size,
        )

    @property
    def windows_per_epoch(self) -> int:
        """Windows that all data makes when it is read once."""
        return self.samples.first[-1]

    @property
    def packing_efficiency(self) -> float | None:
        """The share of the windows' positions that samples take, in an epoch; None: samples are not packed."""
        return None

    def summary(self, n_samples: int) -> DataSummary:
        if self.n_samples is not None:
            n_samples = min(n_samples, self.n_samples)
        epochs, limits = self._planner.epochs_after(n_samples), self._planner.max_epochs
        sets = [
            SetSummary(name=name, report=of.report, lengths=of.all_lengths, epochs=times, max_epochs=limit)
            for name, of, times, limit in zip(self.samples.names, self.samples.sets, epochs, limits, strict=True)
        ]
        return DataSummary(
            sets=sets,
            max_length=self.max_length(self._layout.seq_len),
            windows_per_epoch=self.windows_per_epoch,
            packing_efficiency=self.packing_efficiency,
            follows_seed=not self._planner.is_adaptive,
        )

    def log_data(self) -> None:
        """Say at the start what became of the rows."""
        for line in self.samples.report_lines():
            logger.info(line)
        for warning in self.samples.warnings():
            logger.warning(warning)

    def sample_name(self, number: int) -> str:
        """What the ledger calls a sample: where its row is."""
        return self.samples.describe(number)

    @property
    def exhausted(self) -> bool:
        return self._exhausted

    def __next__(self) -> Batch:
        if self._exhausted:
            raise StopIteration
        if self._workers is None:
            self._workers = Workers(self._batches, sampler=self._keys(), num_workers=self.config.num_workers)
        try:
            batch: Batch = next(self._workers)
        except StopIteration:
            if self._refusal is not None:
                raise self._refusal from None
            self._exhausted = True
            raise
        self._handed_out = self._planned.popleft()
        return batch

    def _keys(self) -> Iterator[Any]:
        """The samples of each window of this rank's batches. Where the planner refuses to go on, they end, since what
        comes before may be all that the run asks for."""
        while windows := self._plan_pass():
            self._planned.append(self._planner.snapshot())
            numbers = [(window.samples + self._planner.offsets[window.source]).tolist() for window in windows]
            numbers += [[]] * (self._layout.global_batch_size - len(numbers))
            first = self._layout.dp_rank * self._layout.local_batch_size
            yield numbers[first : first + self._layout.local_batch_size]

    def _plan_pass(self) -> list[Window]:
        """The next windows, one batch of every rank; none at the end."""
        try:
            return list(itertools.islice(self._planner, self._layout.global_batch_size))
        except UserError as error:
            self._refusal = error
            return []

    def state_dict(self) -> dict[str, Any]:
        position = self._planner.state_dict(self._handed_out)
        return {"dataset": self.config.dataset, "data": self._fingerprint, "position": position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position; one in other data, or in another order, is refused with a warning."""
        if not is_own_position(state, self._fingerprint, " ".join(self.config.dataset)):
            return
        self.close()
        self._exhausted = False
        self._planner.load_state_dict(state["position"])
        self._handed_out = self._planner.snapshot()

    def observe(self, statistics: StepStatistics) -> None:
        """Pass a step's statistics on to the samplers. They apply to what is drawn from then on: with workers,
        `PREFETCHED_BATCHES` batches of each later; and always behind the samples that are drawn already."""
        self._planner.observe(statistics, self._handed_out.n_windows)

    def document_names(self, documents: torch.Tensor) -> list[str]:
        return [self.sample_name(number) for number in documents.tolist() if number != NO_DOCUMENT]

    def batch_of(self, names: Sequence[str]) -> Batch:
        batch: Batch = self._batches[[[number] for number in self.samples.numbers_of(names)]]
        return batch

    def assets(self) -> dict[str, str]:
        """The chat template, and what a model that was trained with it is used by; see `chat_assets`."""
        from torchtitan.components.weights.assets import chat_assets  # deferred, as all that saves

        return chat_assets(self._tokenizer, self.template) if self.template else {}

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()
            self._workers = None
            # What was prepared ahead is lost, and planned again if there is a next batch.
            self._planner.load_state_dict(self._planner.state_dict(self._handed_out))
            self._planned.clear()
            self._refusal = None
