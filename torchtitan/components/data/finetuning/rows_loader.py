"""Base of the loaders of fine-tuning rows: their options, and what tells kinds of rows apart."""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from torchtitan.components.chat_template import ChatTemplate, resolve_chat_template
from torchtitan.components.data.base import Batch, TokenizingDataLoader
from torchtitan.components.data.disk_cache import data_digest
from torchtitan.components.data.finetuning.chat_encoding import ChatEncoder
from torchtitan.components.data.finetuning.columns import parse_columns
from torchtitan.components.data.finetuning.encoded import EncodedRow
from torchtitan.components.data.finetuning.filters import FilterConfig, LossPolicy, Policy
from torchtitan.components.data.finetuning.losses import Part
from torchtitan.components.data.finetuning.row_batches import check_processes
from torchtitan.components.data.finetuning.row_encoder import RowEncoder
from torchtitan.components.data.finetuning.row_formats import Kind, RowFormat, dataset_formats
from torchtitan.components.data.finetuning.sample_cache import (
    SampleCache,
    first_columns,
    open_sample_cache,
)
from torchtitan.components.data.finetuning.samples import (
    LengthLimit,
    TooLong,
    Windows,
    pack_windows,
)
from torchtitan.components.data.plan import Packing, Sampler, ShuffleSampler
from torchtitan.components.data.prepare.prepared import (
    dataset_identity,
    find_prepared,
    find_samples,
    validation_split,
)
from torchtitan.components.data.pretraining.order import check_cycle
from torchtitan.components.data.sources.paths import is_quick_to_open
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
from torchtitan.tools.errors import UserError, require

if TYPE_CHECKING:
    from torchtitan.components.data.pretraining.streamed_windows import StreamOrder

NOT_STREAMED = ("encoding_processes", "pack_chunk", "weight_schedule", "max_epochs")
"""Options that need all rows, or that a block of a stream replaces."""


class RowsDataLoader(TokenizingDataLoader):
    """Loader of rows that become samples of at most one window.

    Its configuration builds a loader of this class, which knows all samples (`PlannedDataLoader`),
    or with `stream` one that encodes rows during training (`stream_class`). Both make batches of
    the same form, which a subclass for a kind of rows defines: `kind`, `encoder_class`, and the
    static methods.
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
                self._check_stream()

        def _check_stream(self) -> None:
            """Raise `UserError` for options that streams do not have."""
            name = "--dataloader.stream all"
            if type(self.sampler) is not ShuffleSampler.Config:
                raise UserError(
                    f"{name} reads rows in the order of the stream, without a sampler that chooses "
                    "them; use the sampler `shuffle`, or set --dataloader.stream none"
                )
            for option in dataclasses.fields(self):
                if option.name not in NOT_STREAMED:
                    continue
                value = getattr(self, option.name)
                default = [] if option.default is dataclasses.MISSING else option.default
                if value != default:
                    raise UserError(
                        f"--dataloader.{option.name} {value} cannot be combined with {name}; "
                        "remove one"
                    )
            if weights := self.dataset_weights():
                check_cycle(weights)

        def dataset_weights(self) -> Sequence[float]:
            """Return the share of each dataset; empty: they have none."""
            return ()

        def packing_method(self) -> Packing:
            """Return how samples are packed into windows."""
            return "none"

        def packing_chunk(self) -> int:
            """Return how many samples of a dataset are drawn and packed at a time."""
            return 8192

        def build(self, *args: Any, **runtime: Any) -> Any:
            """Build the loader of one data-parallel rank; with `stream`, a
            `RowStreamDataLoader`."""
            if self.stream == "none":
                return TokenizingDataLoader.Config.build(self, *args, **runtime)
            self.validate()
            return self.loader.stream_class()(copy.deepcopy(self), *args, **runtime)

        def stream_order(self, seed: int) -> "StreamOrder":
            """Return the order of streamed rows."""
            from torchtitan.components.data.pretraining.streamed_windows import StreamOrder

            assert isinstance(self.sampler, ShuffleSampler.Config)  # says `validate`
            return StreamOrder(
                shuffle=self.sampler.shuffle, block_size=self.shuffle_buffer, seed=seed
            )

        def check_host(self) -> None:
            """Raise `UserError` for processes that this host cannot run."""
            TokenizingDataLoader.Config.check_host(self)
            check_processes(self.encoding_processes)

        def check_first_rows(self) -> None:
            is_code = ":" in self.format
            if self.stream == "none" and not is_code and all(map(is_quick_to_open, self.dataset)):
                self.rows()

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
            rows = iter(self.local_rows())
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
            """Return the filters for rows. Raise `UserError` for invalid limits."""
            return FilterConfig(
                empty=self.empty,
                broken=self.broken,
                untrained=None,
                on_loss_of_reasoning=self.on_loss_of_reasoning,
                on_loss_of_tools=self.on_loss_of_tools,
                on_loss_of_content=self.on_loss_of_content,
            )

        def length_limit(self, max_length: int) -> LengthLimit:
            """Return the limit on samples for sequences of at most `max_length` tokens."""
            return LengthLimit(max_length, self.too_long, self.filters().untrained)

        def accepted_losses(self) -> list[Part]:
            """Return the parts of messages that a template may omit."""
            policies: dict[Part, LossPolicy] = {
                "reasoning": self.on_loss_of_reasoning,
                "tools": self.on_loss_of_tools,
                "content": self.on_loss_of_content,
            }
            return [part for part, policy in policies.items() if policy == "train"]

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

        def rows(self) -> list[tuple[Source | StreamSource, RowFormat]]:
            """Return the source and row format of each dataset that is not prepared. Only with
            `stream`, it may be a `StreamSource`. Raise `UserError` if the source or format is
            unknown, or for prepared data with `stream`."""
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

        def local_rows(self) -> list[tuple[Source, RowFormat]]:
            """Return the same as `rows`, without `stream`."""
            local = [
                (source, format) for source, format in self.rows() if isinstance(source, Source)
            ]
            assert self.stream == "none", "streams have no local rows"
            return local

        def source(self, dataset: str) -> Source | StreamSource:
            """Return the rows of a dataset that is not prepared. Raise `UserError` if there are
            none."""
            if self.stream == "all":
                return resolve_rows(dataset, self.split)
            return resolve_source(dataset, split=self.split, catalog=CHAT_DATASETS)

        def identity(self) -> dict[str, object]:
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
        def loader(self) -> "type[RowsDataLoader]":
            """The class that it builds without streams."""
            assert issubclass(self._owner, RowsDataLoader)
            return self._owner

    config: Config

    kind: ClassVar[Kind]
    """Purpose of the rows."""
    encoder_class: ClassVar[type[RowEncoder]]
    sequences_per_window: ClassVar[int] = 0
    """Number of the longest sequences that fit into a window, which is packed with samples; 0: a
    window is one sample."""

    @classmethod
    def stream_class(cls) -> type[TokenizingDataLoader]:
        """Return the loader that reads and encodes the rows during training."""
        raise NotImplementedError

    @staticmethod
    def max_length(seq_len: int) -> int:
        """Return the maximum number of tokens in a sequence; its last token is only a label and
        needs no position."""
        return seq_len + 1

    @classmethod
    def positions_of(cls, row: EncodedRow) -> int:
        """Return how much of `positions_of_window` a row takes. The last token of a sequence is
        only a label."""
        if not cls.sequences_per_window:
            return 1
        return sum(max(0, len(part.ids) - 1) for part in row.parts)

    @classmethod
    def positions_of_window(cls, seq_len: int) -> int:
        """Return the size of a window."""
        return seq_len * cls.sequences_per_window or 1

    @staticmethod
    def collate(windows: Windows, seq_len: int) -> Batch:
        """Return a batch without `documents`."""
        return pack_windows(windows, seq_len)

    @staticmethod
    def label_warning(lengths: Sequence[int]) -> str:
        """Return a warning about the labels of all rows, given the most tokens of each of their
        parts; empty: none."""
        return ""
