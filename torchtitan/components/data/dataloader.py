"""The data loader for pre-training."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from torchtitan.components.data.base import NO_DOCUMENT, Batch, TokenizingDataLoader, can_resume_position
from torchtitan.components.data.disk_cache import data_identity
from torchtitan.components.data.pretraining.streaming import StreamBatches, StreamOrder
from torchtitan.components.data.pretraining.token_cache import open_token_cache
from torchtitan.components.data.pretraining.windows import BatchIterator, CachedBatches
from torchtitan.components.data.report import DataSummary
from torchtitan.components.data.sources.source import DOCUMENTS, Source, StreamSource, resolve_source
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.tools.errors import require


class PretrainDataLoader(TokenizingDataLoader):
    """Documents packed into windows of `seq_len` + 1 tokens that overlap by one.

    Local data is read from a token cache. Its order depends only on the seed, not on ranks, workers or B: the n-th
    batch of rank r of R holds B samples, starting with sample n * R * B + r * B. A registered dataset is streamed; see
    `torchtitan.components.data.pretraining.streaming`. `global_batch_size` has no effect.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TokenizingDataLoader.Config):
        """Training data."""

        dataset: str = "stories"
        """Data to read: `stories` (built in), a registered name (c4), or a local path: a file (txt, md, jsonl, json,
        csv, parquet, optionally .gz or .zst), a folder, a glob pattern, or a folder written by
        `datasets.save_to_disk`."""
        text_column: str | None = None
        """Column with the text; None: the registered dataset's column, else `text`."""
        document_mask: bool = True
        """Restrict attention and positions to each packed document; False: treat a window as one text."""
        shuffle: bool = True
        """Shuffle the samples in each epoch."""
        shuffle_buffer: int = 4096
        """Documents per shuffle buffer of a stream; local data is always shuffled as a whole."""

        def validate(self) -> None:
            TokenizingDataLoader.Config.validate(self)
            require(self.shuffle_buffer >= 1, "--dataloader.shuffle_buffer", self.shuffle_buffer, "at least 1 document")

        def prepare(self, *, tokenizer: Tokenizer) -> None:
            """Tokenize local data into the cache, or read the first document of a stream."""
            source = self.source()
            if isinstance(source, StreamSource):
                source.check()
            else:
                open_token_cache(source, tokenizer, self.cache_dir, verify=self.verify_caches)

        def source(self) -> Source | StreamSource:
            """Return the documents; raise `UserError` if there are none."""
            return resolve_source(self.dataset, self.text_column, self.split)

        def identity(self) -> dict[str, Any]:
            """Return the loader's class, and the dataset's content, split and text column."""
            return TokenizingDataLoader.Config.identity(self) | {
                "dataloader.dataset": data_identity([self.dataset], lambda _: self.source(), self.cache_dir),
                "dataloader.split": self.split,
                "dataloader.text_column": self.text_column,
            }

        def for_validation(self, dataset: str) -> "PretrainDataLoader.Config | None":
            """Return the config for the validation split of `dataset`, by default the training data."""
            splits = DOCUMENTS.splits(dataset or self.dataset)
            if "validation" in splits:
                split = "validation"
            elif dataset:
                split = splits[0]
            else:
                return None
            chosen = dataset or self.dataset
            # The column of local files is likely the same; a registered dataset defines its own.
            column = self.text_column if chosen == self.dataset or chosen not in DOCUMENTS.registered else None
            return dataclasses.replace(
                self, dataset=chosen, text_column=column, split=split, shuffle=False, num_workers=0
            )

    config: Config

    def _open(self, seed: int, samples_per_step: int) -> None:
        config, tokenizer, source = self.config, self._tokenizer, self.config.source()
        layout = dataclasses.replace(self._layout, document_mask=config.document_mask)
        self._batches: BatchIterator
        if isinstance(source, StreamSource):
            order = StreamOrder(shuffle=config.shuffle, block_size=config.shuffle_buffer, seed=seed)
            self._batches = StreamBatches(source, tokenizer, layout, order)
        else:
            cache = open_token_cache(source, tokenizer, config.cache_dir, verify=config.verify_caches)
            self._batches = CachedBatches(cache, layout, shuffle=config.shuffle, seed=seed)
        self.n_samples = self._batches.n_samples

    def set_seq_len(self, seq_len: int, longest: int) -> None:
        self._batches.set_seq_len(seq_len, longest)

    @property
    def exhausted(self) -> bool:
        return self._batches.exhausted

    def __next__(self) -> Batch:
        return next(self._batches)

    def state_dict(self) -> dict[str, Any]:
        position = self._batches.state_dict()
        return {"dataset": self.config.dataset, "data": self._batches.fingerprint, "position": position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved position. Ignore it with a warning if data, tokenizer, seq_len or shuffling differ."""
        if can_resume_position(state, self._batches.fingerprint, self.config.dataset):
            self._batches.load_state_dict(state["position"])

    def document_names(self, documents: torch.Tensor) -> list[str]:
        """Return one name for all documents in a window, including partial ones."""
        first, last = documents.tolist()
        return [] if first == NO_DOCUMENT else [self._batches.describe(first, last)]

    def summary(self, n_samples: int) -> DataSummary | None:
        return self._batches.summary(self.config.dataset, n_samples)

    def close(self) -> None:
        self._batches.close()
