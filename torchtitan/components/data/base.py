"""Batches, and the interface of all data loaders."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from torchtitan.components.data.plan.sampler import StepStatistics
from torchtitan.components.data.report import DataSummary
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.config import Configurable
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger

NO_DOCUMENT = -1
"""Document number of a sample that only fills up a batch."""

Batch = dict[str, torch.Tensor]
"""A data loader's batch of B samples of T = `seq_len` tokens, all int64:

- `input` (B, T): token ids.
- `labels` (B, T): the token that follows each input token, or `IGNORE_INDEX`.
- `positions` (B, T), only with document masking: each token's position, counted from its document's start in this
  window. A 0 begins a document, and attention must not reach back across it.
- `documents` (B, M), optional: numbers of the sample's documents in order, padded with `NO_DOCUMENT`; for windows of
  running text (B, 2), the first and last document. `document_names` names them.
"""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Shape of samples and their distribution over ranks; raises `UserError` for a number out of range."""

    seq_len: int
    """Tokens per sample, T."""
    local_batch_size: int
    """Samples per batch of each data-parallel rank, B."""
    dp_rank: int = 0
    dp_world_size: int = 1
    num_workers: int = 0
    """Processes per rank that prepare batches."""
    epochs: int | None = None
    """Passes over the data; None: endless."""
    document_mask: bool = True
    """Whether packed documents are kept apart."""

    def __post_init__(self) -> None:
        for name in ("seq_len", "local_batch_size", "epochs"):
            if (number := getattr(self, name)) is not None and number < 1:
                raise UserError(f"{name} must be at least 1, not {number}")
        assert 0 <= self.dp_rank < self.dp_world_size

    @property
    def global_batch_size(self) -> int:
        """Samples per batch over all ranks."""
        return self.local_batch_size * self.dp_world_size


class BaseDataLoader(Configurable):
    """Iterator over the batches of one data-parallel rank, built as `config.build(tokenizer=, seq_len=,
    local_batch_size=, dp_rank=, dp_world_size=, seed=, epochs=, global_batch_size=)` (see `TokenizingDataLoader`).

    Its only position is after the last batch returned, whatever workers have prefetched; `state_dict` returns it and
    `load_state_dict` restores it, so a state saved at the start rewinds the loader. A custom loader may omit
    `documents` and simply raise `StopIteration` at the end of its rank's data.

    The loaders here raise `StopIteration` only if every rank does so after the same number of batches. A stream split
    over several ranks cannot know this: `exhausted` becomes True once the rank's own share has ended, and `next` keeps
    returning batches with all labels ignored. A loop over several ranks must check after each `next` whether all ranks
    are `exhausted`, and then stop.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Training data."""

        def prepare(self, *, tokenizer: Tokenizer) -> None:
            """Do the work needed once per host before training; raises `UserError` if the data cannot be used."""

        def identity(self) -> dict[str, Any]:
            """Return the properties that identify this data in the run's identity, JSON-ready, by name."""
            return {"dataloader": f"{self._owner.__module__}.{self._owner.__qualname__}"}

        def for_validation(self, dataset: str) -> "BaseDataLoader.Config | None":
            """Return the config of a loader of validation data in a fixed order; None: there is none. An empty
            `dataset` means the validation split of this loader's own dataset."""
            return None

    token_tensors: ClassVar[tuple[str, ...]] = ("input", "labels")
    """Names of the (B, T) tensors that a loss needs of a batch: all that a dry run knows of the data."""

    n_samples: int | None = None
    """Samples for all ranks over all `epochs`, without fillers; None: unknown (a stream) or endless."""

    needs_sample_losses: bool = False
    """Whether `observe` needs the loss of each sample, not only of the step."""

    @property
    def exhausted(self) -> bool:
        """Whether `next` has reached the end of this rank's data; see the class."""
        return False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """Return the next batch; raises `StopIteration` after the last."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return the position, JSON-ready."""
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved position."""
        raise NotImplementedError

    def describe(self, documents: torch.Tensor) -> str:
        """Return the names of the documents in a sample, a row of a batch's `documents`, as text."""
        return ", ".join(self.document_names(documents)) or "no document (padding)"

    def document_names(self, documents: torch.Tensor) -> list[str]:
        """Return the names of a sample's documents for the ledger, in order, the same in every run; none for padding.
        A range of documents may share one name. `documents` is a row of a batch's `documents`."""
        return [f"document {number}" for number in documents.tolist() if number != NO_DOCUMENT]

    def batch_of(self, names: Sequence[str]) -> Batch | None:
        """Return the documents with these `document_names`, one per row; None: names here do not stand for single rows.
        Raises `UserError` for an unknown name."""
        return None

    def summary(self, n_samples: int) -> DataSummary | None:
        """Summarize the data without training, for a run of `n_samples` over all ranks; None: nothing is known."""
        return None

    def check_repetitions(self, n_samples: int) -> None:
        """Raise `UserError` if a run of `n_samples`, over all ranks, reads data more often than the config allows."""

    def observe(self, statistics: StepStatistics) -> None:
        """Learn from a training step's statistics, called on every rank with the same values in the order of the steps.
        Batches already returned or prefetched do not change."""

    def assets(self) -> dict[str, str]:
        """Return the files to store with checkpoints and exports of a model trained on this data: file name → text."""
        return {}

    def close(self) -> None:
        """Stop worker processes and the like. Repeated calls are allowed."""


class TokenizingDataLoader(BaseDataLoader):
    """Options and arguments shared by the loaders of this package.

    Args:
        config: what to read.
        tokenizer: encodes the data.
        seq_len: positions per sample, T.
        local_batch_size: samples per batch and rank, B.
        seed: decides the order.
        epochs: passes over the data, all data sets equally often and shuffled anew in each; samples that predict
            nothing fill up the last batch. None: endless.
        global_batch_size: samples per training step over all ranks; None: one batch of each rank.

    Raises:
        UserError: the data cannot be used, or a number is out of range.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Training data."""

        split: str = "train"
        """Split to read if the data has several."""
        num_workers: int = 0
        """Processes per rank that prepare batches; 0: none, which suffices for local data."""
        cache_dir: str = ""
        """Folder for tokenized local data; empty: $TORCHTITAN_CACHE, else ~/.cache/torchtitan."""
        verify_caches: bool = False
        """Verify all checksums of the tokenized data before use; False: those of a sample."""

        def validate(self) -> None:
            """Raise `UserError` for a value out of range, without reading data."""
            if self.num_workers < 0:
                raise UserError(f"--dataloader.num_workers must be at least 0, not {self.num_workers}")

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
        self._tokenizer = tokenizer
        self._layout = Layout(
            seq_len=seq_len,
            local_batch_size=local_batch_size,
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            num_workers=config.num_workers,
            epochs=epochs,
        )
        self._open(seed, global_batch_size or self._layout.global_batch_size)

    def _open(self, seed: int, samples_per_step: int) -> None:
        raise NotImplementedError


def is_own_position(state: dict[str, Any], fingerprint: str, dataset: str) -> bool:
    """Return whether a loader's saved position refers to this run's data; if not, warn that reading restarts.

    Args:
        state: holds the fingerprint of its data as `data`, and the configured name or names as `dataset`.
        fingerprint: of this run's data.
        dataset: this run's configured data.
    """
    if state["data"] == fingerprint:
        return True
    before = state["dataset"]
    logger.warning(
        f"the saved position is one in other data than this run's {dataset} (it was "
        f"{before if isinstance(before, str) else ' '.join(before)}, or another content, tokenizer, template, filter, "
        "seq_len, packing, shuffling or sampler): reading starts at the beginning"
    )
    return False
