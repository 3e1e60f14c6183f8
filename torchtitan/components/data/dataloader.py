"""The data loader for pre-training."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torchtitan.components.data.base import (
    NO_DOCUMENT,
    Batch,
    TokenizingDataLoader,
    can_resume_position,
)
from torchtitan.components.data.disk_cache import data_digest
from torchtitan.components.data.plan.mixture import check_can_set_weights, check_weights
from torchtitan.components.data.plan.sampler import State
from torchtitan.components.data.prepare import prepared
from torchtitan.components.data.prepare.encoding import document_encoding
from torchtitan.components.data.pretraining.order import check_cycle
from torchtitan.components.data.pretraining.token_cache import open_token_cache
from torchtitan.components.data.pretraining.token_files import (
    files_digest,
    find_token_files,
    open_token_files,
)
from torchtitan.components.data.pretraining.tokens import Tokens
from torchtitan.components.data.report import DataSummary
from torchtitan.components.data.sources.block_cache import BlockCache
from torchtitan.components.data.sources.paths import is_quick_to_open
from torchtitan.components.data.sources.source import (
    DOCUMENTS,
    Source,
    StreamSource,
    resolve_source,
)
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.config.configurable import builds
from torchtitan.tools.digests import cache_root
from torchtitan.tools.errors import UserError, require
from torchtitan.tools.redact import redacted

if TYPE_CHECKING:
    from torch import Tensor

    from torchtitan.components.data.pretraining.windows import BatchIterator


class WindowsDataLoader(TokenizingDataLoader):
    """Windows whose position a `BatchIterator` holds. `_open` sets it and `dataset_names`, the
    configured datasets."""

    _batches: "BatchIterator[Any]"

    def set_seq_len(self, seq_len: int, longest: int) -> None:
        self._batches.set_seq_len(seq_len, longest)

    def set_weights(self, weights: Sequence[float]) -> None:
        check_can_set_weights(self._batches.has_weights, self._layout.epochs)
        check_weights("weights", weights, len(self.dataset_names))
        check_cycle(weights)
        self._batches.set_weights(list(weights))

    @property
    def exhausted(self) -> bool:
        return self._batches.exhausted

    def __next__(self) -> Batch:
        return next(self._batches)

    def state_dict(self) -> State:
        position = self._batches.state_dict()
        return {
            "dataset": redacted(self.dataset_names),
            "data": self._batches.fingerprint,
            "position": position,
        }

    def load_state_dict(self, state: State) -> None:
        """Restore a saved position. Ignore it with a warning if data, tokenizer, seq_len or
        shuffling differ."""
        if can_resume_position(state, self._batches.fingerprint, " ".join(self.dataset_names)):
            self._batches.load_state_dict(state["position"])

    def document_names(self, documents: "Tensor") -> list[str]:
        """Return one name for all documents in a window, including partial ones."""
        first, last = documents.tolist()
        return [] if first == NO_DOCUMENT else [self._batches.describe(first, last)]

    def datasets_of(self, batch: Batch) -> "Tensor":
        first_B1: Tensor = batch["documents"][:, :1]  # a window is of one dataset
        sets_B1 = (first_B1 % len(self.dataset_names)).where(first_B1 != NO_DOCUMENT, -1)
        return sets_B1.expand_as(batch["input"])

    def summary(self, n_samples: int) -> DataSummary | None:
        return self._batches.summary(n_samples)

    def close(self) -> None:
        self._batches.close()


class PretrainDataLoader(WindowsDataLoader):
    """Documents packed into windows of `seq_len` + 1 tokens that overlap by one.

    Local data is read from a token cache. The order of all datasets depends only on the seed, not
    on ranks, workers or B: the n-th batch of rank r of R holds B samples, starting with sample n *
    R * B + r * B. With weights, the end is when one dataset has been read `epochs` times. For
    streams and mixtures with them, see `torchtitan.components.data.pretraining.streaming`.
    `global_batch_size` has no effect.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(WindowsDataLoader.Config):
        """Training data."""

        dataset: list[str] = field(default_factory=lambda: ["stories"])
        """Datasets, each `stories` (built in), a registered name (c4), or a local
        path: a file (txt, md, jsonl, json, csv, parquet or WebDataset's tar, optionally .gz or
        .zst), a folder, a glob pattern, or a folder written by `torchtitan data prepare` or
        `datasets.save_to_disk`; a URL of files or prepared data (s3://…); or token files of
        Megatron (bin and idx), llm.c or nanoGPT (bin), OLMo (npy), or litdata (folder); or a
        dataset on the Hugging Face Hub, `org/name[:config][@revision][split]`, see `stream`."""
        weights: list[float] = field(default_factory=list)
        """Relative share of each dataset in the tokens; empty: read each dataset once per epoch."""
        text_column: str | None = None
        """Column with the text; None: the registered dataset's column, else `text`."""
        document_mask: bool = True
        """Restrict attention and positions to each packed document; False: treat a window as one
        text."""
        shuffle: bool = True
        """Shuffle the samples in each epoch."""
        remote_cache: float = 8.0
        """GiB of the local cache for blocks of remote prepared data, shared by the processes of a
        host; 0: none."""
        stream: Literal["single", "all", "none"] = "single"
        """Datasets on the Hugging Face Hub to stream: single: one that is the only dataset; all; or
        none. Others are copied first. Registered names such as c4 are streamed in any case."""
        shuffle_buffer: int = 4096
        """Documents per shuffle buffer of a stream; local data is always shuffled as a whole."""

        @builds(lambda: PretrainDataLoader)
        def build(self) -> object:
            """Build the loader of one data-parallel rank."""

        def validate(self) -> None:
            TokenizingDataLoader.Config.validate(self)
            require(
                self.shuffle_buffer >= 1,
                "--dataloader.shuffle_buffer",
                self.shuffle_buffer,
                "at least 1 document",
            )
            require(
                self.remote_cache >= 0,
                "--dataloader.remote_cache",
                self.remote_cache,
                "at least 0 GiB",
            )
            if not self.dataset or "" in self.dataset:
                raise UserError("--dataloader.dataset is empty; set it to a file such as my.txt")
            if self.weights:
                check_weights("weights", self.weights, len(self.dataset))
                check_cycle(self.weights)

        def check_first_rows(self) -> None:
            for dataset in filter(is_quick_to_open, self.dataset):
                if prepared.find_prepared(dataset, DOCUMENTS):
                    continue
                if find_token_files(dataset, DOCUMENTS.names()):
                    continue
                source = self.source(dataset)
                if isinstance(source, Source):
                    for document in source.documents():
                        next(iter(document), None)
                        break

        def prepare(self, *, tokenizer: Tokenizer) -> None:
            """Tokenize local data into the cache, or read the first document of a stream."""
            self.check_host()
            for data in self.open(tokenizer):
                if isinstance(data, StreamSource):
                    data.check()

        def open(self, tokenizer: Tokenizer) -> list[Tokens | StreamSource]:
            """Return the tokens of each dataset, encoded if necessary, or its stream of
            documents."""
            return [self._open(dataset, tokenizer) for dataset in self.dataset]

        def _open(self, dataset: str, tokenizer: Tokenizer) -> Tokens | StreamSource:
            if manifest := prepared.find_prepared(dataset, DOCUMENTS):
                manifest.check(self.split, "tokens", document_encoding(tokenizer).identity)
                blocks = BlockCache(cache_root(self.cache_dir), round(self.remote_cache * 2**30))
                return prepared.PreparedTokens(
                    manifest, self.split, blocks, verify=self.verify_caches
                )
            if files := find_token_files(dataset, DOCUMENTS.names()):
                return open_token_files(files, tokenizer, self.cache_dir)
            source = self.source(dataset)
            if isinstance(source, StreamSource):
                return source
            return open_token_cache(source, tokenizer, self.cache_dir, verify=self.verify_caches)

        def source(self, dataset: str) -> Source | StreamSource:
            """Return the documents of a dataset; raise `UserError` if it has none."""
            is_single = self.stream == "single" and len(self.dataset) == 1
            streamed = is_single or self.stream == "all"
            return resolve_source(dataset, self.text_column, self.split, copied=not streamed)

        def identity(self) -> dict[str, object]:
            """Return the loader's class, and the datasets' content, weights, split and text
            column."""

            def digest(dataset: str) -> str:
                files = find_token_files(dataset, DOCUMENTS.names())
                if files:
                    return files_digest(files, self.cache_dir)
                return data_digest(self.source, self.cache_dir, dataset)

            return TokenizingDataLoader.Config.identity(self) | {
                "dataloader.dataset": prepared.dataset_identity(self.dataset, digest, DOCUMENTS),
                **{f"dataloader.{name}": getattr(self, name) for name in ("split", "text_column")},
                **({"dataloader.weights": self.weights} if self.weights else {}),
            }

        def for_validation(self, dataset: str) -> "PretrainDataLoader.Config | None":
            """Return the config for the validation split of `dataset` (all data if it has no
            splits), by default of the training datasets that have one."""
            if (found := prepared.validation_split(dataset, self.dataset, DOCUMENTS)) is None:
                return None
            chosen, split = found
            # The column of local files is likely the same; a registered dataset defines its own.
            column = (
                None
                if dataset in DOCUMENTS.registered and dataset not in self.dataset
                else self.text_column
            )
            return dataclasses.replace(
                self,
                dataset=chosen,
                weights=[],
                text_column=column,
                split=split,
                shuffle=False,
                num_workers=0,
            )

    config: Config

    def _open(self, seed: int, samples_per_step: int) -> None:
        # deferred: only batches need torch
        from torchtitan.components.data.pretraining.streamed_windows import StreamOrder
        from torchtitan.components.data.pretraining.streaming import StreamBatches
        from torchtitan.components.data.pretraining.windows import CachedBatches

        config, tokenizer = self.config, self._tokenizer
        data = config.open(tokenizer)
        tokens = [one for one in data if isinstance(one, Tokens)]
        layout = dataclasses.replace(self._layout, document_mask=config.document_mask)
        self.dataset_names = config.dataset
        if len(tokens) < len(data):
            order = StreamOrder(shuffle=config.shuffle, block_size=config.shuffle_buffer, seed=seed)
            self._batches = StreamBatches(data, config.weights, tokenizer, layout, order)
        else:
            self._batches = CachedBatches(
                config.dataset,
                tokens,
                layout,
                weights=config.weights,
                shuffle=config.shuffle,
                seed=seed,
            )
        self.n_samples = self._batches.n_samples
