"""What the data loaders of preference and prompt data share: examples one by one, in an order that can be resumed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import Dataset

from torchtitan.components.chat_template import ChatTemplate
from torchtitan.components.data.disk_cache import digest_of
from torchtitan.components.data.finetuning.chat_encoding import ChatEncoder
from torchtitan.components.data.finetuning.examples import Example, ExampleCache, ExampleEncoder, open_example_cache
from torchtitan.components.data.finetuning.fitted_examples import FittedExamples, TooLongExample
from torchtitan.components.data.finetuning.numbering import NumberedSets
from torchtitan.components.data.finetuning.planned_loader import PREFETCHED_BATCHES, PlannedDataLoader
from torchtitan.components.data.finetuning.policies import Rules
from torchtitan.components.data.packing import NO_DOCUMENT, Batch
from torchtitan.components.data.plan import Planner
from torchtitan.components.data.summary import DataSummary, SetSummary
from torchtitan.components.tokenizer import Tokenizer
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

        too_long: TooLongExample = "drop"
        """Examples beyond the sequence length: drop, truncate_left (cuts the beginning of the prompt), or error."""

        def open_caches(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> list[ExampleCache]:
            owner = self._owner
            assert issubclass(owner, ExampleDataLoader)
            encoder = owner.encoder(ChatEncoder(tokenizer, template, "assistant"))
            rules = Rules(empty=self.empty, broken=self.broken)
            return [
                open_example_cache(source, row_format, encoder, rules, self.cache_dir)
                for source, row_format in self.rows()
            ]

    config: Config
    samples: NumberedSets[FittedExamples]

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
        super().__init__(config, tokenizer=tokenizer, seq_len=seq_len, local_batch_size=local_batch_size, epochs=epochs)
        caches = config.open_caches(tokenizer, self.template)
        fitted = [
            FittedExamples(cache, self.max_length(seq_len), config.too_long, name)
            for name, cache in zip(config.dataset, caches, strict=True)
        ]
        self.samples = NumberedSets(config.dataset, fitted)
        of_order = [seq_len, config.too_long, config.sampler.to_dict()]
        self.start(
            self._plan(seed, epochs, local_batch_size * dp_world_size),
            _Batches(self.samples, seq_len, type(self).collate),
            fingerprint=digest_of([[cache.fingerprint for cache in caches], of_order]),
            local_batch_size=local_batch_size,
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
        )
        for line in self.samples.report_lines():
            logger.info(line)

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

    def _plan(self, seed: int, epochs: int | None, per_pass: int) -> Planner:
        sizes = [of_set.n_samples for of_set in self.samples.sets]
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

    def summary(self, n_samples: int) -> DataSummary:
        epochs = self._planner.epochs_after(n_samples)
        sets = [
            SetSummary(name=name, report=of.report, lengths=of.all_lengths, epochs=times, max_epochs=None)
            for name, of, times in zip(self.samples.names, self.samples.sets, epochs, strict=True)
        ]
        return DataSummary(
            sets=sets,
            max_length=self.max_length(self._seq_len),
            windows_per_epoch=self.samples.first[-1],
            packing_efficiency=None,
            follows_seed=not self._planner.is_adaptive,
        )


class _Batches(Dataset[Batch]):
    """Batches by the numbers of their examples."""

    def __init__(
        self,
        samples: NumberedSets[FittedExamples],
        seq_len: int,
        collate: Callable[[Sequence[Example | None], int], Batch],
    ):
        self.samples, self.seq_len, self.collate = samples, seq_len, collate

    def __getitem__(self, windows: Sequence[Sequence[int]]) -> Batch:
        numbers = [window[0] if window else NO_DOCUMENT for window in windows]
        batch = self.collate([self._example(number) for number in numbers], self.seq_len)
        batch["documents"] = torch.tensor(numbers)[:, None]
        return batch

    def _example(self, number: int) -> Example | None:
        if number == NO_DOCUMENT:
            return None
        source, index = self.samples.locate(number)
        return self.samples.sets[source].example(index)
