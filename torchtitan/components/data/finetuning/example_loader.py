"""What the data loaders of preference and prompt data share: examples one by one, in an order that can be resumed."""

import dataclasses
import itertools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch.utils.data import Dataset

from torchtitan.components.chat_template import ChatTemplate, resolve_chat_template
from torchtitan.components.data.disk_cache import digest_of
from torchtitan.components.data.finetuning.chat_encoding import ChatEncoder
from torchtitan.components.data.finetuning.examples import Example, ExampleCache, ExampleEncoder, open_example_cache
from torchtitan.components.data.finetuning.fitted_examples import FittedExamples, TooLongExample
from torchtitan.components.data.finetuning.planned_loader import PREFETCHED_BATCHES, PlannedDataLoader
from torchtitan.components.data.finetuning.policies import Policy, Rules
from torchtitan.components.data.finetuning.registry import dataset_format
from torchtitan.components.data.finetuning.row_formats import Kind, parse_columns
from torchtitan.components.data.finetuning.sample_cache import first_columns
from torchtitan.components.data.packing import NO_DOCUMENT, Batch
from torchtitan.components.data.plan import Planner, Sampler, ShuffleSampler
from torchtitan.components.data.rows import available_row_splits, resolve_rows
from torchtitan.components.data.summary import DataSummary, SetSummary, numbers_of
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger

DRAWN_AT_A_TIME = 1024
"""Examples that a sampler draws at a time; nothing else depends on it, since examples share no windows."""


class ExampleDataLoader(PlannedDataLoader):
    """Examples of several token sequences, each in a row of a batch, never packed.

    The batches' `documents` (B, 1) are the numbers of the examples, counted over all data sets, or `NO_DOCUMENT` in the
    rows that fill up the last batch. See `PlannedDataLoader` for order and position.

    A subclass says what its rows are (`kind`), how one is encoded, how long it may be, and what a batch of them is.

    Args:
        config: what to read.
        tokenizer: encodes the conversations; its folder has the chat template, unless the configuration names one.
        seq_len: how long an example may be; see the subclass.
        local_batch_size: examples per batch and rank, B.
        dp_rank: this process's place among the data-parallel ranks.
        dp_world_size: number of data-parallel ranks.
        seed: decides the order.
        epochs: how often the data is read, several data sets equally often; the last batch is filled up with rows that
            have no example. None: without end.
        global_batch_size: examples of one training step; not needed here.

    Raises:
        UserError: the data cannot be used, or a number is out of range.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(PlannedDataLoader.Config):
        """Examples of a fine-tuning method."""

        dataset: list[str] = field(default_factory=list)
        """What to read, one or several: a registered name, or a local path: a file (json, jsonl, csv, parquet; .gz or
        .zst of these), a folder, a glob pattern, or a folder saved by the library datasets."""
        split: str = "train"
        """Split to read, where the data sets have several."""
        format: str = "auto"
        """How rows are read: auto (by their columns), the name of a format, or a function of your own,
        package.module:function or path/to/file.py:function."""
        columns: list[str] = field(default_factory=list)
        """Columns under other names, as ours=theirs: prompt=question."""
        chat_template: str = ""
        """Template that makes text of a conversation: chatml, llama3, mistral, alpaca, or a file; empty: the model's
        own."""
        too_long: TooLongExample = "drop"
        """Examples beyond the sequence length: drop, truncate_left (cuts the beginning of the prompt), or error."""
        empty: Policy = "drop"
        """Rows that say nothing: drop or error."""
        broken: Policy = "error"
        """Rows that cannot be read, converted or encoded: drop or error."""
        sampler: Sampler.Config = field(default_factory=ShuffleSampler.Config)
        """Order in which examples are drawn."""
        num_workers: int = 0
        """Processes per rank that prepare batches; 0: none, which suffices."""
        cache_dir: str = ""
        """Folder for tokenized data; empty: $TORCHTITAN_CACHE, else ~/.cache/torchtitan."""

        def validate(self) -> None:
            """Raise `UserError` for a value out of range; looks at no data."""
            if not self.dataset or "" in self.dataset:
                raise UserError("--dataloader.dataset must say what to read: a file such as my.jsonl")
            if self.num_workers < 0:
                raise UserError(f"--dataloader.num_workers must be at least 0, not {self.num_workers}")
            parse_columns(self.columns)

        def prepare(self, *, tokenizer: Tokenizer) -> None:
            """Tokenize the data into the cache."""
            self.validate()
            owner = self._owner
            assert issubclass(owner, ExampleDataLoader)
            owner.open_caches(self, tokenizer, find_template(self, tokenizer))

        def for_validation(self, dataset: str) -> "ExampleDataLoader.Config | None":
            """The validation split of `dataset`, or all of it where it has no splits; where none is given, those of the
            own data sets that have one."""
            having = [own for own in self.dataset if "validation" in available_row_splits(own)]
            chosen = [dataset] if dataset else having
            if not chosen:
                return None
            splits = available_row_splits(chosen[0])
            split = "validation" if "validation" in splits else splits[0]
            in_order = ShuffleSampler.Config(shuffle=False)
            return dataclasses.replace(self, dataset=chosen, split=split, sampler=in_order, num_workers=0)

    config: Config

    kind: ClassVar[Kind]
    """What the rows are for."""

    def __init__(
        self,
        config: Config,
        *,
        tokenizer: Tokenizer,
        seq_len: int,
        local_batch_size: int,
        dp_rank: int = 0,
        dp_world_size: int = 1,
        seed: int = 0,
        epochs: int | None = None,
        global_batch_size: int | None = None,
    ):
        super().__init__(config)
        for name, number in (("seq_len", seq_len), ("local_batch_size", local_batch_size), ("epochs", epochs)):
            if number is not None and number < 1:
                raise UserError(f"{name} must be at least 1, not {number}")
        self._seq_len = seq_len
        self._tokenizer = tokenizer
        self.template = find_template(config, tokenizer)
        """What makes text of the conversations."""
        caches = self.open_caches(config, tokenizer, self.template)
        self.sets = [
            FittedExamples(cache, self.max_length(seq_len), config.too_long, name)
            for name, cache in zip(config.dataset, caches, strict=True)
        ]
        """The examples of each data set, with the report of what was left out."""
        of_order = [seq_len, config.too_long, config.sampler.to_dict()]
        self.start(
            self._plan(seed, epochs, local_batch_size * dp_world_size),
            _Batches(self.sets, seq_len, type(self).collate),
            names=config.dataset,
            fingerprint=digest_of([[cache.key for cache in caches], of_order]),
            num_workers=config.num_workers,
            local_batch_size=local_batch_size,
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
        )
        for name, of_set in zip(config.dataset, self.sets, strict=True):
            for line in of_set.report.lines():
                logger.info(f"{name}: {line}")

    @classmethod
    def encoder(cls, encoder: ChatEncoder) -> ExampleEncoder:
        """How a row becomes an example."""
        raise NotImplementedError

    @staticmethod
    def max_length(seq_len: int) -> int:
        """Most tokens of each sequence of an example."""
        raise NotImplementedError

    @staticmethod
    def collate(examples: Sequence[Example | None], seq_len: int) -> Batch:
        """A batch of examples, without `documents`; None: a row to be filled."""
        raise NotImplementedError

    @classmethod
    def open_caches(cls, config: Config, tokenizer: Tokenizer, template: ChatTemplate) -> list[ExampleCache]:
        """The examples of each data set, encoded now if they are not in the cache.

        Raises:
            UserError: the data cannot be used.
        """
        encoder = cls.encoder(ChatEncoder(tokenizer, template, "assistant"))
        rules = Rules(empty=config.empty, broken=config.broken)
        caches, mapping = [], parse_columns(config.columns)
        for dataset in config.dataset:
            source = resolve_rows(dataset, config.split)
            row_format = dataset_format(dataset, first_columns(source), config.format, mapping, cls.kind)
            caches.append(open_example_cache(source, row_format, encoder, rules, config.cache_dir))
        return caches

    def _plan(self, seed: int, epochs: int | None, per_pass: int) -> Planner:
        sizes = [of_set.n_examples for of_set in self.sets]
        samplers = [self.config.sampler.build(n_samples=size, seed=seed + i) for i, size in enumerate(sizes)]
        self.needs_sample_losses = any(sampler.needs_sample_losses for sampler in samplers)
        return Planner(
            [np.ones(size, np.int64) for size in sizes],
            1,
            samplers,
            packing="none",
            chunk=DRAWN_AT_A_TIME,
            names=self.config.dataset,
            seed=seed,
            epochs=epochs,
            ahead=PREFETCHED_BATCHES * self.config.num_workers * per_pass,
        )

    def sample_name(self, number: int) -> str:
        source, index = self.locate(number)
        place = self.sets[source].describe(index)
        return place if len(self.sets) == 1 else f"{self.config.dataset[source]}: {place}"

    def locate(self, number: int) -> tuple[int, int]:
        """The data set that an example of `documents` is in, and its number there."""
        return _locate(self.sets, number)

    def batch_of(self, names: Sequence[str]) -> Batch:
        n_examples = sum(of_set.n_examples for of_set in self.sets)
        batch: Batch = self._batches[[[number] for number in numbers_of(names, self.sample_name, n_examples)]]
        return batch

    def summary(self, n_samples: int) -> DataSummary:
        epochs = self._planner.epochs_after(n_samples)
        sets = [
            SetSummary(name=name, report=of.report, lengths=of.all_lengths, epochs=times, max_epochs=None)
            for name, of, times in zip(self.config.dataset, self.sets, epochs, strict=True)
        ]
        return DataSummary(
            sets=sets,
            max_length=self.max_length(self._seq_len),
            windows_per_epoch=sum(of_set.n_examples for of_set in self.sets),
            packing_efficiency=None,
            follows_seed=not self._planner.is_adaptive,
        )

    def assets(self) -> dict[str, str]:
        """The chat template, and what a model that was trained with it is used by; see `chat_assets`."""
        from torchtitan.components.checkpoint.chat_assets import chat_assets  # deferred, as all that saves

        return chat_assets(self._tokenizer, self.template)


def find_template(config: ExampleDataLoader.Config, tokenizer: Tokenizer) -> ChatTemplate:
    """The template that the configuration names, else the model's own.

    Raises:
        UserError: there is none.
    """
    folders = [tokenizer.folder] if tokenizer.folder else []
    return resolve_chat_template(config.chat_template, folders, tokenizer)


class _Batches(Dataset[Batch]):
    """Batches by the numbers of their examples."""

    def __init__(
        self, sets: Sequence[FittedExamples], seq_len: int, collate: Callable[[Sequence[Example | None], int], Batch]
    ):
        self.sets, self.seq_len, self.collate = sets, seq_len, collate

    def __getitem__(self, windows: Sequence[Sequence[int]]) -> Batch:
        numbers = [window[0] if window else NO_DOCUMENT for window in windows]
        batch = self.collate([self._example(number) for number in numbers], self.seq_len)
        batch["documents"] = torch.tensor(numbers)[:, None]
        return batch

    def _example(self, number: int) -> Example | None:
        if number == NO_DOCUMENT:
            return None
        source, index = _locate(self.sets, number)
        return self.sets[source].example(index)


def _locate(sets: Sequence[FittedExamples], number: int) -> tuple[int, int]:
    first = [0, *itertools.accumulate(of_set.n_examples for of_set in sets)]
    source = bisect_right(first, number) - 1
    return source, number - first[source]
