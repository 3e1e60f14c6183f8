"""Data loaders: what the trainer relies on, and the one for pre-training."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from torchtitan.components.checkpoint.identity import content
from torchtitan.components.data.disk_cache import sources_digest
from torchtitan.components.data.feeds import CachedFeed, Feed, Layout
from torchtitan.components.data.hub import StreamSource, registered_datasets
from torchtitan.components.data.local_data import location
from torchtitan.components.data.packing import NO_DOCUMENT, Batch
from torchtitan.components.data.plan.sampler import StepStatistics
from torchtitan.components.data.sources import available_splits, resolve_source
from torchtitan.components.data.streaming import StreamFeed, StreamOrder
from torchtitan.components.data.summary import DataSummary
from torchtitan.components.data.token_cache import open_token_cache
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.config import Configurable
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger


class BaseDataLoader(Configurable):
    """The batches of one data-parallel rank: what the trainer relies on.

    A loader is its own iterator: `iter(loader)` is the loader, and `next(loader)` the next `Batch` (see
    `torchtitan.components.data.packing`), wherever it stands. There is one position, that behind the last batch handed
    out, whatever workers have prepared ahead; `state_dict` returns it and `load_state_dict` sets it, so
    `loader.load_state_dict(state)` with a state taken at the start is also how one begins again.

    It is built as `config.build(tokenizer=, seq_len=, local_batch_size=, dp_rank=, dp_world_size=, seed=, epochs=,
    global_batch_size=)`; `PretrainDataLoader` says what these are.

    A loader of one's own may leave `documents` out of its batches, and may simply raise `StopIteration` where its data
    ends: the trainer takes that for the end of the data on that rank.

    The loaders here raise it only where every rank does so after the same number of batches. A stream split over
    several ranks cannot know that. There, `exhausted` becomes True once a rank's own share has ended, and `next` goes
    on handing out batches whose labels are all ignored; a loop over several ranks must ask after each `next` whether
    all ranks are `exhausted`, and then end.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Training data."""

        def prepare(self, *, tokenizer: Tokenizer) -> None:
            """Do what is to be done once per host, before any training process starts. Bad data is found here.

            Raises:
                UserError: the data cannot be used.
            """

        def identity(self) -> dict[str, Any]:
            """Return what tells this data from other data, as a part of the run's identity: JSON-ready, by name."""
            return {"dataloader": f"{self._owner.__module__}.{self._owner.__qualname__}"}

        def for_validation(self, dataset: str) -> "BaseDataLoader.Config | None":
            """The configuration of a loader of validation data, in a fixed order.

            Args:
                dataset: a dataset string; empty: this loader's own dataset, if that has a validation split.

            Returns:
                None where there is no validation data.
            """
            return None

    n_samples: int | None = None
    """Samples that all ranks together are given over all `epochs`, the fillers of a last batch left out; None: not
    known, as of a stream, or without end."""

    needs_sample_losses: bool = False
    """Whether `observe` is to be told the loss of each sample, and not of the step alone."""

    @property
    def exhausted(self) -> bool:
        """Whether `next` has found this rank's data to be at its end; see the class."""
        return False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """The next batch, `StopIteration` behind the last."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """The position, JSON-ready."""
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position."""
        raise NotImplementedError

    def describe(self, documents: torch.Tensor) -> str:
        """Which documents a sample touches, in words; here by their numbers alone.

        Args:
            documents: a row of a batch's `documents`.
        """
        return ", ".join(self.document_names(documents)) or "no document (padding)"

    def document_names(self, documents: torch.Tensor) -> list[str]:
        """The documents of a sample for the ledger, in their order, each by the name that it has in every run; none for
        a sample that only fills up a batch. A stretch of documents may have one name.

        Args:
            documents: a row of a batch's `documents`.
        """
        return [f"document {number}" for number in documents.tolist() if number != NO_DOCUMENT]

    def batch_of(self, names: Sequence[str]) -> Batch | None:
        """The documents of these names, as `document_names` gives them, each in a row of its own; None: the names here
        do not stand for single rows.

        Raises:
            UserError: there is none of a name.
        """
        return None

    def summary(self, n_samples: int) -> DataSummary | None:
        """What is known of the data without training, for `torchtitan data`; None: nothing is.

        Args:
            n_samples: that a run reads, all ranks together.
        """
        return None

    def check_repetitions(self, n_samples: int) -> None:
        """Find out before training whether a run of so many samples, all ranks together, reads data more often than the
        configuration allows; here it never does.

        Raises:
            UserError: it does.
        """

    def observe(self, statistics: StepStatistics) -> None:
        """Learn how a training step went; every rank is told the same, in order of the steps. Here: nothing.

        What was handed out or prepared ahead before the call does not change.
        """

    def assets(self) -> dict[str, str]:
        """Files that belong to a model trained on this data, for its checkpoints and exports: file name → text."""
        return {}

    def close(self) -> None:
        """End what the loader has started, such as worker processes. It can be called twice."""


class PretrainDataLoader(BaseDataLoader):
    """Documents packed into windows of `seq_len` + 1 tokens that overlap by one.

    Local data comes from a token cache, and the n-th batch is a function of the seed and n alone: rank r of R takes
    samples n * R * B + r * B and the B - 1 behind, of one order for any number of ranks, workers and samples per batch
    B. A registered data set is a stream; see `torchtitan.components.data.streaming` for what it promises.

    Args:
        config: what to read.
        tokenizer: encodes the documents.
        seq_len: tokens per sample, T.
        local_batch_size: samples per batch and rank, B.
        dp_rank: this process's place among the data-parallel ranks.
        dp_world_size: number of data-parallel ranks.
        seed: decides the order.
        epochs: how often the data is read; the last batch is filled up with samples that predict nothing. None:
            without end. Each epoch is shuffled anew.
        global_batch_size: samples of one training step, all ranks together. Nothing here depends on it.

    Raises:
        UserError: the data cannot be used, or a number is out of range.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Training data."""

        dataset: str = "stories"
        """What to read: `stories` (embedded), a registered name (c4), or a local path: a file (txt, md, jsonl, json,
        csv, parquet; .gz or .zst of these), a folder, a glob pattern, or a folder saved by the library datasets."""
        text_column: str | None = None
        """Column of a table that holds the text; None: a registered data set's own, `text` elsewhere."""
        split: str = "train"
        """Split to read, where the data set has several."""
        document_mask: bool = True
        """Keep packed documents apart: attention and positions stay within each. False: one running text."""
        shuffle: bool = True
        """Visit the samples in another order in each epoch."""
        shuffle_buffer: int = 4096
        """Documents of a stream that are shuffled together; local data is shuffled as a whole."""
        num_workers: int = 0
        """Processes per rank that prepare batches; 0: none, which suffices for local data."""
        cache_dir: str = ""
        """Folder for tokenized local data; empty: $TORCHTITAN_CACHE, else ~/.cache/torchtitan."""
        verify_caches: bool = False
        """Compare all of the tokenized data with its checksums before it is used; False: a sample of it."""

        def validate(self) -> None:
            """Raise `UserError` for a number out of range; looks at no data."""
            if self.num_workers < 0:
                raise UserError(f"--dataloader.num_workers must be at least 0, not {self.num_workers}")
            if self.shuffle_buffer < 1:
                raise UserError(f"--dataloader.shuffle_buffer must be at least 1 document, not {self.shuffle_buffer}")

        def prepare(self, *, tokenizer: Tokenizer) -> None:
            """Tokenize local data into the cache, or read a first document of a stream."""
            source = resolve_source(self.dataset, self.text_column, self.split)
            if isinstance(source, StreamSource):
                source.check()
            else:
                open_token_cache(source, tokenizer, self.cache_dir, verify=self.verify_caches)

        def identity(self) -> dict[str, Any]:
            """Return the loader's class, the content of its dataset and the part of it that is read."""
            return BaseDataLoader.Config.identity(self) | {
                "dataloader.dataset": content(location(self.dataset), self._digest()),
                "dataloader.split": self.split,
                "dataloader.text_column": self.text_column,
            }

        def _digest(self) -> str:
            """The digest of the data; empty for a stream, and for data that is not there anymore."""
            try:
                source = resolve_source(self.dataset, self.text_column, self.split)
                return "" if isinstance(source, StreamSource) else sources_digest([source], self.cache_dir)
            except UserError:
                return ""

        def for_validation(self, dataset: str) -> "PretrainDataLoader.Config | None":
            """The validation split of `dataset` or of the own one; all of a given one that has no splits."""
            splits = available_splits(dataset or self.dataset)
            if "validation" in splits:
                split = "validation"
            elif dataset:
                split = splits[0]
            else:
                return None
            chosen = dataset or self.dataset
            # The column of local files is likely the same; a registered data set knows its own.
            column = self.text_column if chosen == self.dataset or chosen not in registered_datasets() else None
            return dataclasses.replace(
                self, dataset=chosen, text_column=column, split=split, shuffle=False, num_workers=0
            )

    config: Config

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
        assert 0 <= dp_rank < dp_world_size
        layout = Layout(
            seq_len=seq_len,
            local_batch_size=local_batch_size,
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            num_workers=config.num_workers,
            document_mask=config.document_mask,
        )
        self._feed = _make_feed(config, tokenizer, layout, seed, epochs)
        self.n_samples = self._feed.n_samples

    @property
    def exhausted(self) -> bool:
        return self._feed.exhausted

    def __next__(self) -> Batch:
        return next(self._feed)

    def state_dict(self) -> dict[str, Any]:
        return {"dataset": self.config.dataset, "data": self._feed.fingerprint, "position": self._feed.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position; one of other data, tokenizer, seq_len or shuffling is refused with a warning."""
        if state["data"] == self._feed.fingerprint:
            self._feed.load_state_dict(state["position"])
        else:
            logger.warning(
                f"the saved position is one in other data than this run's {self.config.dataset!r} (it was "
                f"{state['dataset']!r}, or another content, tokenizer, seq_len or shuffling): "
                "reading starts at the beginning"
            )

    def document_names(self, documents: torch.Tensor) -> list[str]:
        """One name for all that a window touches, of which it may have no more than a part."""
        first, last = documents.tolist()
        return [] if first == NO_DOCUMENT else [self._feed.describe(first, last)]

    def summary(self, n_samples: int) -> DataSummary | None:
        return self._feed.summary(self.config.dataset, n_samples)

    def close(self) -> None:
        self._feed.close()


def _make_feed(
    config: PretrainDataLoader.Config, tokenizer: Tokenizer, layout: Layout, seed: int, epochs: int | None
) -> Feed:
    source = resolve_source(config.dataset, config.text_column, config.split)
    if isinstance(source, StreamSource):
        order = StreamOrder(shuffle=config.shuffle, block_size=config.shuffle_buffer, seed=seed, epochs=epochs)
        return StreamFeed(source, tokenizer, layout, order)
    cache = open_token_cache(source, tokenizer, config.cache_dir, verify=config.verify_caches)
    return CachedFeed(cache, layout, shuffle=config.shuffle, seed=seed, epochs=epochs)
