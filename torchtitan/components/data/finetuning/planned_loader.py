"""Base class of the fine-tuning data loaders."""

import copy
import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np

from torchtitan.components.chat_template import ChatTemplate, resolve_chat_template
from torchtitan.components.data.base import (
    NO_DOCUMENT,
    Batch,
    TokenizingDataLoader,
    can_resume_position,
    number_tokens,
)
from torchtitan.components.data.disk_cache import data_digest
from torchtitan.components.data.finetuning.chat_encoding import (
    ChatEncoder,
    EncodedRow,
    RowEncoder,
)
from torchtitan.components.data.finetuning.columns import parse_columns
from torchtitan.components.data.finetuning.filters import FilterConfig, LossPolicy, Policy
from torchtitan.components.data.finetuning.losses import PARTS, Part
from torchtitan.components.data.finetuning.row_batches import check_processes
from torchtitan.components.data.finetuning.row_formats import Kind, RowFormat, dataset_formats
from torchtitan.components.data.finetuning.sample_cache import (
    SampleCache,
    first_columns,
    open_sample_cache,
)
from torchtitan.components.data.finetuning.samples import (
    LengthFilteredDataset,
    LengthLimit,
    SampleSets,
    TooLong,
    WindowDataset,
    Windows,
    pack_windows,
)
from torchtitan.components.data.finetuning.stream_options import check_stream
from torchtitan.components.data.plan import (
    Planner,
    Sampler,
    ShuffleSampler,
    Snapshot,
    StepStatistics,
)
from torchtitan.components.data.prepare.prepared import (
    dataset_identity,
    find_prepared,
    find_samples,
    validation_split,
)
from torchtitan.components.data.report import DataSummary, SetSummary
from torchtitan.components.data.sources.source import (
    AUTO,
    CHAT_DATASETS,
    Source,
    StreamSource,
    resolve_rows,
    resolve_source,
)
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.config.code import CodeReference
from torchtitan.tools.digests import digest_of
from torchtitan.tools.errors import UserError, require
from torchtitan.tools.logging import logger
from torchtitan.tools.redact import redacted

if TYPE_CHECKING:
    from torch import Tensor

    from torchtitan.components.data.finetuning.streams import RowStreamDataLoader
    from torchtitan.components.data.pretraining.streaming import StreamOrder
    from torchtitan.components.data.workers import Workers

PREFETCHED_BATCHES = 2
"""Batches prefetched by each worker process."""

CHUNK_WITHOUT_PACKING = 1024
"""Samples drawn at a time if each window holds one sample; does not affect the order."""


class PlannedDataLoader(TokenizingDataLoader):
    """Batches of the windows that a `Planner` plans.

    The global order of windows does not depend on ranks, workers or batch size B: the n-th batch of
    rank r of R holds B windows, starting with window n * R * B + r * B. The planner runs in the
    main process. The position is exact after every batch, and can be resumed with a different
    number of ranks, workers or windows per batch. A batch's `documents` (B, M) are the sample
    numbers of each window over all datasets, padded with `NO_DOCUMENT`.

    Subclasses define the kind of rows (`kind`) and their encoding (`encoder_class`), and may
    override the maximum length (`max_length`), the planning of windows (`plan`) and the creation of
    batches (`collate`).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TokenizingDataLoader.Config):
        """Rows of fine-tuning data."""

        dataset: list[str] = field(default_factory=list)
        """Datasets, each a registered name or a local path: a file (json, jsonl, csv, parquet,
        optionally .gz or .zst), a folder, a glob pattern, or a folder written by
        `datasets.save_to_disk`; or a dataset on the Hugging Face Hub,
        org/name[:config][@revision][split]."""
        format: CodeReference = "auto"
        """Row format: auto (detected from the columns), a format name, or a custom function,
        package.module:function or path/to/file.py:function. Applies to all datasets that it
        fits."""
        columns: list[str] = field(default_factory=list)
        """Columns to rename, as OURS=THEIRS: prompt=question. Applies to all datasets that have
        them."""
        chat_template: str = ""
        """Chat template: chatml, llama3, mistral, alpaca, or a file; empty: the model's
        template."""
        empty: Policy = "drop"
        """Rows without content: drop or error."""
        broken: Policy = "error"
        """Rows that cannot be read or encoded: drop or error."""
        on_loss_of_reasoning: LossPolicy = "drop"
        """Rows with a trained turn whose reasoning the chat template omits: error, drop, or train
        (without it)."""
        on_loss_of_tools: LossPolicy = "drop"
        """Rows with a trained turn whose tool calls the chat template omits: error, drop, or
        train."""
        on_loss_of_content: LossPolicy = "drop"
        """Rows with a trained turn whose text the chat template omits: error, drop, or train."""
        too_long: TooLong = "drop"
        """Samples longer than the sequence length: drop, truncate_left (keeps the end),
        truncate_right, or error."""
        encoding_processes: int = 0
        """Processes that encode rows; 0: one and, if that takes longer than 2 seconds, one for each
        core, at most 8. Their number does not change samples or order."""
        stream: Literal["none", "all"] = "none"
        """Datasets on the Hugging Face Hub to read and encode during training: all, or none, which
        copies them first. Local data next to streams is read in the same way, and each dataset
        once per epoch, unless the datasets have weights."""
        shuffle_buffer: int = 4096
        """Rows of a stream that are shuffled and packed together, for each rank and worker."""
        sampler: Sampler.Config = field(default_factory=ShuffleSampler.Config)
        """Order in which samples are drawn."""

        has_images: ClassVar[bool] = False
        """True if rows have images, which are not in a cache of samples."""

        def validate(self) -> None:
            TokenizingDataLoader.Config.validate(self)
            if not self.dataset or "" in self.dataset:
                raise UserError("--dataloader.dataset is empty; set it to a file such as my.jsonl")
            parse_columns(self.columns)
            n_processes = self.encoding_processes
            require(n_processes >= 0, "--dataloader.encoding_processes", n_processes, "at least 0")
            buffer = self.shuffle_buffer
            require(buffer >= 1, "--dataloader.shuffle_buffer", buffer, "at least 1 row")
            if self.stream == "all":
                check_stream(self)

        def build(self, *args: Any, **runtime: Any) -> Any:
            """Build the loader of one data-parallel rank; with `stream`, a
            `RowStreamDataLoader`."""
            if self.stream == "none":
                return TokenizingDataLoader.Config.build(self, *args, **runtime)
            self.validate()
            return self.loader.stream_class()(copy.deepcopy(self), *args, **runtime)

        def stream_order(self, seed: int) -> "StreamOrder":
            """Return the order of streamed rows."""
            from torchtitan.components.data.pretraining.streaming import StreamOrder

            assert isinstance(self.sampler, ShuffleSampler.Config)  # says `validate`
            return StreamOrder(
                shuffle=self.sampler.shuffle, block_size=self.shuffle_buffer, seed=seed
            )

        def check_host(self) -> None:
            """Raise `UserError` for processes that this host cannot run."""
            TokenizingDataLoader.Config.check_host(self)
            check_processes(self.encoding_processes)

        def prepare(self, *, tokenizer: Tokenizer) -> None:
            self.check_host()
            template = self.find_template(tokenizer)
            if self.stream == "none":
                self.open_caches(tokenizer, template)
            else:
                self.rows()

        def open_caches(
            self, tokenizer: Tokenizer, template: ChatTemplate | None
        ) -> list[SampleCache]:
            """Open the cache of each dataset, encoding it if necessary. Raise `UserError` for
            unusable data."""
            encoder, filters = self.encoder(tokenizer, template), self.filters()
            caches = [
                find_samples(name, self.split, encoder, verify=self.verify_caches)
                for name in self.dataset
            ]
            rows = iter(self.rows())
            return [
                cache
                or open_sample_cache(
                    *next(rows),
                    encoder,
                    filters,
                    self.cache_dir,
                    verify=self.verify_caches,
                    processes=self.encoding_processes,
                )
                for cache in caches
            ]

        def encoder(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> RowEncoder:
            return self.loader.encoder_class(
                ChatEncoder(tokenizer, template, "assistant", self.accepted_losses())
            )

        def batch_maker(self, tokenizer: Tokenizer) -> Callable[[Windows, int], Batch]:
            """Return the function that creates batches, by default the loader's `collate`; worker
            processes get a copy."""
            return self.loader.collate

        def filters(self) -> FilterConfig:
            return FilterConfig(
                empty=self.empty, broken=self.broken, untrained=None, **self.loss_policies()
            )

        def length_limit(self, max_length: int) -> LengthLimit:
            """Return the limit on samples for sequences of at most `max_length` tokens."""
            return LengthLimit(max_length, self.too_long, self.filters().untrained)

        def loss_policies(self) -> dict[str, Any]:
            """Return the policies for parts of messages that a template omits, by option."""
            return {
                "on_loss_of_reasoning": self.on_loss_of_reasoning,
                "on_loss_of_tools": self.on_loss_of_tools,
                "on_loss_of_content": self.on_loss_of_content,
            }

        def accepted_losses(self) -> list[Part]:
            """Return the parts of messages that a template may omit."""
            policies = self.loss_policies()
            return [part for part in PARTS if policies[f"on_loss_of_{part}"] == "train"]

        def order_key(self) -> list[object]:
            """Return all settings that affect windows, except samples and sequence length, as
            JSON-serializable values."""
            return [self.too_long, self.sampler.to_dict()]

        def find_template(self, tokenizer: Tokenizer) -> ChatTemplate | None:
            """Return the configured template, by default the model's; None if not needed. Raise
            `UserError` if missing."""
            return resolve_chat_template(
                self.chat_template, [tokenizer.folder] if tokenizer.folder else [], tokenizer
            )

        def rows(self) -> list[tuple[Any, RowFormat]]:
            """Return the source and row format of each dataset that is not prepared. A source is a
            `Source` or, with `stream`, maybe a `StreamSource`. Raise `UserError` if the
            source or format is unknown, or for prepared data with `stream`."""
            prepared = [name for name in self.dataset if find_prepared(name, CHAT_DATASETS)]
            if prepared and self.stream == "all":
                raise UserError(
                    f"--dataloader.stream all: {prepared[0]} is prepared data, which is not read "
                    "as rows; name the rows, or set --dataloader.stream none"
                )
            raw = [dataset for dataset in self.dataset if dataset not in prepared]
            sources = [self.source(dataset) for dataset in raw]
            columns = [
                list(source.first_row(source.open_rows))
                if isinstance(source, StreamSource)
                else first_columns(source)
                for source in sources
            ]
            mapping = parse_columns(self.columns)
            formats = dataset_formats(raw, columns, self.format, mapping, self.loader.kind)
            return list(zip(sources, formats, strict=True))

        def source(self, dataset: str) -> Source | StreamSource:
            """Return the rows of a dataset that is not prepared. Raise `UserError` if there are
            none."""
            if self.stream == "all":
                return resolve_rows(dataset, self.split)
            return resolve_source(dataset, split=self.split, catalog=CHAT_DATASETS)

        def identity(self) -> dict[str, Any]:
            """Return the loader's class, the content of its datasets, and the options for reading
            rows."""
            digest = partial(data_digest, self.source, self.cache_dir)
            options = ("split", "format", "columns", "chat_template")
            return TokenizingDataLoader.Config.identity(self) | {
                "dataloader.dataset": dataset_identity(self.dataset, digest, CHAT_DATASETS),
                **{f"dataloader.{name}": getattr(self, name) for name in options},
            }

        def for_validation(self, dataset: str) -> Self | None:
            """Return the config for the validation split of `dataset` (all data if it has no
            splits), by default of the training datasets that have one. `format` and `columns` are
            kept if they fit."""
            if (found := validation_split(dataset, self.dataset, CHAT_DATASETS)) is None:
                return None
            chosen, split = found
            in_order = ShuffleSampler.Config(shuffle=False)
            config = dataclasses.replace(
                self, dataset=chosen, split=split, sampler=in_order, num_workers=0
            )
            if self.format == AUTO and not self.columns:
                return config
            try:
                config.rows()
            except UserError:
                return dataclasses.replace(config, format=AUTO, columns=[])
            return config

        @property
        def loader(self) -> "type[PlannedDataLoader]":
            """The class that it builds without streams."""
            assert issubclass(self._owner, PlannedDataLoader)
            return self._owner

    config: Config

    kind: ClassVar[Kind]
    """Purpose of the rows."""
    encoder_class: ClassVar[type[RowEncoder]]

    @classmethod
    def stream_class(cls) -> "type[RowStreamDataLoader]":
        """Return the loader that reads and encodes the rows during training."""
        from torchtitan.components.data.finetuning.streams import RowStreamDataLoader

        return RowStreamDataLoader

    def _open(self, seed: int, samples_per_step: int) -> None:
        self.template = self.config.find_template(self._tokenizer)
        self.samples = self._open_samples()
        """Samples that fit into windows, with reports on dropped rows."""
        self._batches = WindowDataset(
            self.samples,
            self._layout.seq_len,
            self.config.batch_maker(self._tokenizer),
            self._layout.vocab_size,
        )
        self._planner = self._new_planner(seed, samples_per_step)
        self._prefetched_positions: deque[Snapshot] = deque()
        self._position = self._planner.snapshot()
        self._workers: Workers | None = None
        self._exhausted = False
        windows_by_epoch = self._planner.windows_by_epoch
        self.n_samples = None if windows_by_epoch is None else sum(windows_by_epoch)
        self.log_data()

    @staticmethod
    def max_length(seq_len: int) -> int:
        """Return the maximum number of tokens in a sequence; its last token is only a label and
        needs no position."""
        return seq_len + 1

    @staticmethod
    def positions_of(row: EncodedRow) -> int:
        """Return how much of `positions_of_window` a row takes; by default, all of it."""
        return 1

    @staticmethod
    def positions_of_window(seq_len: int) -> int:
        """Return the size of a window."""
        return 1

    @staticmethod
    def collate(windows: Windows, seq_len: int) -> Batch:
        """Return a batch without `documents`."""
        return pack_windows(windows, seq_len)

    @staticmethod
    def label_warning(lengths: Sequence[int]) -> str:
        """Return a warning about the labels of all rows, given the most tokens of each of their
        parts; empty: none."""
        return ""

    def plan(
        self, samplers: list[Sampler], *, epochs: int | None, windows_per_step: int, **order: Any
    ) -> Planner:
        """Create a planner at the first window, by default with one sample per window, for steps of
        `windows_per_step`. Each dataset has its sampler. `epochs` is the number of passes over the
        data; None: windows never end. `order` are further arguments of the planner."""
        lengths = [np.ones(data.n_samples, np.int64) for data in self.samples.sets]
        adapts = any(sampler.adaptive for sampler in samplers)  # after each step
        return Planner(
            lengths,
            1,
            samplers,
            packing="none",
            chunk=windows_per_step if adapts else CHUNK_WITHOUT_PACKING,
            epochs=epochs,
            **order,
        )

    def _open_samples(self) -> SampleSets:
        config = self.config
        caches = config.open_caches(self._tokenizer, self.template)
        max_length = self.max_length(self._layout.seq_len)
        contents = [cache.fingerprint for cache in caches]
        self.fingerprint = digest_of([contents, [self._layout.seq_len, *config.order_key()]])
        """Fingerprint of the data and its order."""
        limit = config.length_limit(max_length)
        filtered = [
            LengthFilteredDataset(cache, limit, name)
            for name, cache in zip(config.dataset, caches, strict=True)
        ]
        return SampleSets(config.dataset, filtered)

    def _new_planner(self, seed: int, windows_per_step: int) -> Planner:
        config = self.config
        self.dataset_names = config.dataset
        sizes = [data.n_samples for data in self.samples.sets]
        samplers = [
            config.sampler.build(n_samples=size, seed=seed + i) for i, size in enumerate(sizes)
        ]
        self.needs_sample_losses = any(sampler.needs_sample_losses for sampler in samplers)
        self.needs_sample_rewards = any(sampler.needs_sample_rewards for sampler in samplers)
        return self.plan(
            samplers,
            epochs=self._layout.epochs,
            windows_per_step=windows_per_step,
            names=config.dataset,
            seed=seed,
            ahead=PREFETCHED_BATCHES * config.num_workers * self._layout.global_batch_size,
        )

    @cached_property
    def windows_per_epoch(self) -> int:
        """Windows in one pass over all data."""
        if (windows := self._planner.windows_by_epoch) is not None:
            return windows[0]
        samplers = [
            ShuffleSampler.Config().build(n_samples=data.n_samples, seed=0)
            for data in self.samples.sets
        ]
        return sum(1 for _ in self.plan(samplers, epochs=1, windows_per_step=1))

    @property
    def packing_efficiency(self) -> float | None:
        """Fraction of the windows' positions that hold samples, over an epoch; None: samples are
        not packed."""
        return None

    def summary(self, n_samples: int) -> DataSummary:
        if self.n_samples is not None:
            n_samples = min(n_samples, self.n_samples)
        epochs, limits = self._planner.epochs_after(n_samples), self._planner.max_epochs
        sets = [
            SetSummary(
                name=name,
                report=data.report,
                lengths=data.all_lengths,
                epochs=times,
                max_epochs=limit,
            )
            for name, data, times, limit in zip(
                self.samples.names, self.samples.sets, epochs, limits, strict=True
            )
        ]
        return DataSummary(
            sets=sets,
            max_length=self.max_length(self._layout.seq_len),
            windows_per_epoch=self.windows_per_epoch,
            packing_efficiency=self.packing_efficiency,
            follows_seed=not self._planner.is_adaptive,
        )

    def log_data(self) -> None:
        for name, data in zip(self.samples.names, self.samples.sets, strict=True):
            for line in data.report.lines():
                logger.info(f"{name}: {line}")
            for warning in data.warnings():
                logger.warning(f"{name}: {warning}")

    def sample_name(self, number: int) -> str:
        """Return a sample's name in the ledger: the location of its row."""
        return self.samples.describe(number)

    @property
    def adapts(self) -> bool:
        return self._planner.is_adaptive

    @property
    def exhausted(self) -> bool:
        return self._exhausted

    def __next__(self) -> Batch:
        if self._exhausted:
            raise StopIteration
        from torchtitan.components.data.workers import Workers  # deferred: it imports torch

        if self._workers is None:
            self._workers = Workers(
                self._batches, sampler=self._keys(), num_workers=self.config.num_workers
            )
        try:
            batch: Batch = next(self._workers)
        except StopIteration:
            self._exhausted = True
            raise
        self._position = self._prefetched_positions.popleft()
        return batch

    def _keys(self) -> Iterator[Any]:
        """Yield the sample numbers of the windows of each batch of this rank. After a planning
        error, yield the error, which `Workers` raises in its turn, since the run may not need more
        batches."""
        batch_size = self._layout.global_batch_size
        first = self._layout.dp_rank * self._layout.local_batch_size
        try:
            while windows := list(itertools.islice(self._planner, batch_size)):
                self._prefetched_positions.append(self._planner.snapshot())
                numbers = [
                    (window.samples + self._planner.offsets[window.source]).tolist()
                    for window in windows
                ]
                numbers += [[]] * (batch_size - len(numbers))
                yield numbers[first : first + self._layout.local_batch_size]
        except UserError as error:
            yield from itertools.repeat(error)

    @property
    def position(self) -> Snapshot:
        """Position after the last batch of a step, by default the last one that was returned."""
        return self._position

    def state_dict(self) -> dict[str, Any]:
        return self._state_at(self.position)

    def present_state(self) -> Callable[[], dict[str, Any]]:
        # a snapshot refers to arrays, which nothing modifies
        return partial(self._state_at, self.position)

    def _state_at(self, snapshot: Snapshot) -> dict[str, object]:
        position = self._planner.state_dict(snapshot)
        names = redacted(self.config.dataset)
        return {"dataset": names, "data": self.fingerprint, "position": position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved position. Ignore it with a warning if the data or its order differ."""
        if not can_resume_position(state, self.fingerprint, " ".join(self.config.dataset)):
            return
        self.close()
        self._exhausted = False
        self._planner.load_state_dict(state["position"])
        self._position = self._planner.snapshot()

    def observe(self, statistics: StepStatistics) -> None:
        """Pass a step's statistics to the samplers. They affect draws `PREFETCHED_BATCHES` batches
        per worker later, and only samples not yet drawn."""
        self._planner.observe(statistics, self.position.n_windows)

    def document_names(self, documents: "Tensor") -> list[str]:
        return [self.sample_name(number) for number in documents.tolist() if number != NO_DOCUMENT]

    def datasets_of(self, batch: Batch) -> "Tensor":
        import torch

        offsets = torch.from_numpy(self._planner.offsets)
        return torch.searchsorted(offsets, number_tokens(batch), right=True) - 1

    def batch_of(self, names: Sequence[str]) -> Batch:
        batch: Any = self._batches[[[number] for number in self.samples.find_numbers(names)]]
        return batch

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()
            self._workers = None
            # Prefetched batches are discarded and planned again if needed.
            self._planner.load_state_dict(self._planner.state_dict(self._position))
            self._prefetched_positions.clear()
