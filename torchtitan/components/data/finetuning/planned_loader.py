"""Base of the fine-tuning data loaders: reading rows, turning a `Planner`'s windows into batches, and the position."""

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
"""Batches that each process of `Workers` prefetches."""

DRAWN_AT_A_TIME = 1024
"""Samples drawn at a time if they share no windows, so that nothing else depends on it."""


class PlannedDataLoader(TokenizingDataLoader):
    """Batches of a `Planner`'s windows.

    The windows have one global order, the same for any number of ranks, workers and windows per batch: rank r of R
    takes the B windows from n * R * B + r * B on. The planner runs in the main process. The position, after the last
    batch returned, is exact between any two batches, and can be resumed with other numbers of all of these. A batch's
    `documents` (B, M) are the numbers of each window's samples, counted over all data sets, padded with `NO_DOCUMENT`.

    A subclass defines the kind of rows (`kind`) and their encoding (`Config.encoder`), and may override the longest
    sample (`max_length`), the planning of windows (`plan`) and their conversion to a batch (`collate`).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TokenizingDataLoader.Config):
        """Rows of fine-tuning data."""

        dataset: list[str] = field(default_factory=list)
        """One or several data sets, each a registered name, or a local path: a file (json, jsonl, csv, parquet; .gz or
        .zst of these), a folder, a glob pattern, or a folder saved by the library datasets."""
        format: str = "auto"
        """How rows are read: auto (by their columns), the name of a format, or a custom function,
        package.module:function or path/to/file.py:function. Applies to the data sets that it fits."""
        columns: list[str] = field(default_factory=list)
        """Renamed columns, as ours=theirs: prompt=question. Applies to the data sets that have them."""
        chat_template: str = ""
        """Template that renders conversations: chatml, llama3, mistral, alpaca, or a file; empty: the model's own."""
        empty: Policy = "drop"
        """Rows without content: drop or error."""
        broken: Policy = "error"
        """Rows that cannot be read, converted or encoded: drop or error."""
        too_long: TooLong = "drop"
        """Samples beyond the sequence length: drop, truncate_left (keeps the end), truncate_right, or error."""
        sampler: Sampler.Config = field(default_factory=ShuffleSampler.Config)
        """Order in which samples are drawn."""

        def validate(self) -> None:
            TokenizingDataLoader.Config.validate(self)
            if not self.dataset or "" in self.dataset:
                raise UserError("--dataloader.dataset must say what to read: a file such as my.jsonl")
            parse_columns(self.columns)

        def prepare(self, *, tokenizer: Tokenizer) -> None:
            self.validate()
            self.open_caches(tokenizer, self.find_template(tokenizer))

        def open_caches(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> list[SampleCache]:
            """Return the samples of each data set, encoding uncached ones; raises `UserError` for unusable data."""
            encoder, filters = self.encoder(tokenizer, template), self.filters()
            return [
                open_sample_cache(*of_set, encoder, filters, self.cache_dir, verify=self.verify_caches)
                for of_set in self.rows()
            ]

        def encoder(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> RowEncoder:
            raise NotImplementedError

        def filters(self) -> FilterConfig:
            return FilterConfig(empty=self.empty, broken=self.broken, untrained=None)

        def order_key(self) -> list[Any]:
            """Return what decides the windows besides the cached samples and the sequence length, JSON-ready."""
            return [self.too_long, self.sampler.to_dict()]

        def find_template(self, tokenizer: Tokenizer) -> ChatTemplate | None:
            """Return the configured or the model's own template; None: not needed. Raises `UserError` if it is
            missing."""
            return resolve_chat_template(self.chat_template, [tokenizer.folder] if tokenizer.folder else [], tokenizer)

        def rows(self) -> list[tuple[Source, RowFormat]]:
            """Return the rows of each data set and their format; raises `UserError` if either cannot be found."""
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
            """Return the config for the validation split of `dataset` (all of it if it has no splits), or of the
            loader's own data sets that have one. `format` and `columns` stay if they fit."""
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
    """Purpose of the rows."""

    def _open(self, seed: int, samples_per_step: int) -> None:
        self.template = self.config.find_template(self._tokenizer)
        """Template that renders conversations; None: the data is running text."""
        self.samples = self._open_samples()
        """Samples to batch, with the report of dropped rows."""
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
        """Return the most tokens of a sequence; its last token predicts nothing and takes no position."""
        return seq_len + 1

    @staticmethod
    def collate(windows: Windows, seq_len: int) -> Batch:
        """Return a batch without `documents`."""
        return pack_windows(windows, seq_len)

    def plan(self, samplers: list[Sampler], *, epochs: int | None, windows_per_step: int, **order: Any) -> Planner:
        """Return a planner at the first window; here each window is one sample.

        Args:
            samplers: one per data set.
            epochs: passes over the data; None: endless.
            windows_per_step: windows of a training step.
            order: further arguments of the planner.
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
        """Windows in one pass over all data."""
        return self.samples.first[-1]

    @property
    def packing_efficiency(self) -> float | None:
        """Fraction of the windows' positions that samples fill, in an epoch; None: samples are not packed."""
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
        for line in self.samples.report_lines():
            logger.info(line)
        for warning in self.samples.warnings():
            logger.warning(warning)

    def sample_name(self, number: int) -> str:
        """Return a sample's name in the ledger, the location of its row."""
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
        """Yield the sample numbers of each window of this rank's batches. They end if the planner refuses to continue:
        the run may not need more."""
        while windows := self._plan_pass():
            self._planned.append(self._planner.snapshot())
            numbers = [(window.samples + self._planner.offsets[window.source]).tolist() for window in windows]
            numbers += [[]] * (self._layout.global_batch_size - len(numbers))
            first = self._layout.dp_rank * self._layout.local_batch_size
            yield numbers[first : first + self._layout.local_batch_size]

    def _plan_pass(self) -> list[Window]:
        try:
            return list(itertools.islice(self._planner, self._layout.global_batch_size))
        except UserError as error:
            self._refusal = error
            return []

    def state_dict(self) -> dict[str, Any]:
        position = self._planner.state_dict(self._handed_out)
        return {"dataset": self.config.dataset, "data": self._fingerprint, "position": position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved position; one from other data, or another order, is refused with a warning."""
        if not is_own_position(state, self._fingerprint, " ".join(self.config.dataset)):
            return
        self.close()
        self._exhausted = False
        self._planner.load_state_dict(state["position"])
        self._handed_out = self._planner.snapshot()

    def observe(self, statistics: StepStatistics) -> None:
        """Pass a step's statistics to the samplers. They affect later draws: `PREFETCHED_BATCHES` batches per worker
        later, and only samples not yet drawn."""
        self._planner.observe(statistics, self._handed_out.n_windows)

    def document_names(self, documents: torch.Tensor) -> list[str]:
        return [self.sample_name(number) for number in documents.tolist() if number != NO_DOCUMENT]

    def batch_of(self, names: Sequence[str]) -> Batch:
        batch: Batch = self._batches[[[number] for number in self.samples.numbers_of(names)]]
        return batch

    def assets(self) -> dict[str, str]:
        """Return the chat template and the settings to use a model trained with it; see `chat_assets`."""
        from torchtitan.components.weights.assets import chat_assets  # deferred, like all saving code

        return chat_assets(self._tokenizer, self.template) if self.template else {}

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()
            self._workers = None
            # Prefetched batches are lost, and planned again if there is a next batch.
            self._planner.load_state_dict(self._planner.state_dict(self._handed_out))
            self._planned.clear()
            self._refusal = None
