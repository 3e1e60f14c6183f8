"""The data loader for pre-training."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchtitan.components.checkpoint.filesystem import LocalFolder
from torchtitan.components.checkpoint.identity import identify_content
from torchtitan.components.data.base import NO_DOCUMENT, Batch, TokenizingDataLoader, can_resume_position
from torchtitan.components.data.disk_cache import cache_root
from torchtitan.components.data.prepare.encoding import DocumentEncoding
from torchtitan.components.data.prepare.prepared import PreparedTokens, dataset_identity, find_prepared, splits_of
from torchtitan.components.data.pretraining.streaming import StreamBatches, StreamOrder
from torchtitan.components.data.pretraining.token_cache import open_token_cache
from torchtitan.components.data.pretraining.token_files import files_digest, find_token_files, open_token_files
from torchtitan.components.data.pretraining.tokens import Tokens
from torchtitan.components.data.pretraining.windows import BatchIterator, CachedBatches
from torchtitan.components.data.report import DataSummary
from torchtitan.components.data.sources.paths import location
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
        `torchtitan data prepare` or `datasets.save_to_disk`; a URL of files or prepared data
        (s3://…); or token files of Megatron (bin and idx), llm.c or nanoGPT (bin), or OLMo (npy)."""
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
            data = self.open(tokenizer)
            if isinstance(data, StreamSource):
                data.check()

        def open(self, tokenizer: Tokenizer) -> Tokens | StreamSource:
            """Return the tokens, encoded if necessary, or a stream of documents."""
            if prepared := find_prepared(self.dataset, DOCUMENTS):
                prepared.check(self.split, "tokens", DocumentEncoding(tokenizer).identity)
                index_folder = LocalFolder(cache_root(self.cache_dir) / "indexes")
                return PreparedTokens(prepared, self.split, index_folder, verify=self.verify_caches)
            if files := self._token_files():
                return open_token_files(files, tokenizer)
            source = self.source()
            if isinstance(source, StreamSource):
                return source
            return open_token_cache(source, tokenizer, self.cache_dir, verify=self.verify_caches)

        def _token_files(self) -> list[Path]:
            return [] if self.dataset in DOCUMENTS.names() else find_token_files(self.dataset)

        def source(self) -> Source | StreamSource:
            """Return the documents; raise `UserError` if there are none."""
            return resolve_source(self.dataset, self.text_column, self.split)

        def identity(self) -> dict[str, Any]:
            """Return the loader's class, and the dataset's content, split and text column."""
            if files := self._token_files():
                content = identify_content(location(self.dataset), files_digest(files))
            else:
                content = dataset_identity([self.dataset], lambda _: self.source(), DOCUMENTS, self.cache_dir)
            return TokenizingDataLoader.Config.identity(self) | {
                "dataloader.dataset": content,
                "dataloader.split": self.split,
                "dataloader.text_column": self.text_column,
            }

        def for_validation(self, dataset: str) -> "PretrainDataLoader.Config | None":
            """Return the config for the validation split of `dataset`, by default the training data."""
            splits = splits_of(dataset or self.dataset, DOCUMENTS)
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
        config, tokenizer = self.config, self._tokenizer
        data = config.open(tokenizer)
        layout = dataclasses.replace(self._layout, document_mask=config.document_mask)
        self._batches: BatchIterator
        if isinstance(data, StreamSource):
            order = StreamOrder(shuffle=config.shuffle, block_size=config.shuffle_buffer, seed=seed)
            self._batches = StreamBatches(data, tokenizer, layout, order)
        else:
            self._batches = CachedBatches(data, layout, shuffle=config.shuffle, seed=seed)
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
