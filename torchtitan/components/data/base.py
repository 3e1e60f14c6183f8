"""What the trainer relies on: batches, and the interface of all data loaders."""

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
"""The document number of a sample that only fills up a batch."""

Batch = dict[str, torch.Tensor]
"""What a data loader hands out, for B samples of T = `seq_len` tokens, all int64:

- `input` (B, T): token ids.
- `labels` (B, T): the token that follows each input token, or `IGNORE_INDEX`.
- `positions` (B, T), only with document masking: each token's position counted from the start of its document in this
  window. A 0 therefore begins a document, and attention must not reach back across it.
- `documents` (B, M), optional: numbers of the documents that the sample is made of, in their order, then `NO_DOCUMENT`;
  of windows of running text, (B, 2), the first and the last that they touch. The loader's `document_names` names them.
"""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How samples are shaped and who takes which; raises `UserError` for a number that is out of range."""

    seq_len: int
    """Tokens per sample, T."""
    local_batch_size: int
    """Samples per batch of each data-parallel rank, B."""
    dp_rank: int = 0
    dp_world_size: int = 1
    num_workers: int = 0
    """Processes per rank that prepare batches."""
    epochs: int | None = None
    """How often the data is read; None: without end."""
    document_mask: bool = True
    """Whether packed documents are kept apart."""

    def __post_init__(self) -> None:
        for name in ("seq_len", "local_batch_size", "epochs"):
            if (number := getattr(self, name)) is not None and number < 1:
                raise UserError(f"{name} must be at least 1, not {number}")
        assert 0 <= self.dp_rank < self.dp_world_size

    @property
    def global_batch_size(self) -> int:
        """Samples that all ranks together take at a time."""
        return self.local_batch_size * self.dp_world_size


class BaseDataLoader(Configurable):
    """The batches of one data-parallel rank: what the trainer relies on.

    A loader is its own iterator: `iter(loader)` is the loader, and `next(loader)` the next `Batch`, wherever it stands.
    There is one position, behind the last batch handed out, whatever workers have prepared ahead; `state_dict` returns
    it and `load_state_dict` sets it, so a state taken at the start is also how one begins again.

    It is built as `config.build(tokenizer=, seq_len=, local_batch_size=, dp_rank=, dp_world_size=, seed=, epochs=,
    global_batch_size=)`; `TokenizingDataLoader` says what these are.

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

    token_tensors: ClassVar[tuple[str, ...]] = ("input", "labels")
    """Names of the (B, T) tensors that a loss needs of a batch: all that a dry run knows of the data."""

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


class TokenizingDataLoader(BaseDataLoader):
    """What the loaders of this package share: options and arguments.

    Args:
        config: what to read.
        tokenizer: encodes the data.
        seq_len: positions per sample, T.
        local_batch_size: samples per batch and rank, B.
        dp_rank: this process's place among the data-parallel ranks.
        dp_world_size: number of data-parallel ranks.
        seed: decides the order.
        epochs: how often the data is read, several data sets equally often; the last batch is filled up with samples
            that predict nothing. None: without end. Each epoch is shuffled anew.
        global_batch_size: samples of one training step, all ranks together; None: one batch of each rank.

    Raises:
        UserError: the data cannot be used, or a number is out of range.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Training data."""

        split: str = "train"
        """Split to read, where the data has several."""
        num_workers: int = 0
        """Processes per rank that prepare batches; 0: none, which suffices for local data."""
        cache_dir: str = ""
        """Folder for tokenized local data; empty: $TORCHTITAN_CACHE, else ~/.cache/torchtitan."""
        verify_caches: bool = False
        """Compare all of the tokenized data with its checksums before it is used; False: a sample of it."""

        def validate(self) -> None:
            """Raise `UserError` for a value out of range; looks at no data."""
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
        """Get ready to hand out batches, from the first on."""
        raise NotImplementedError


def is_own_position(state: dict[str, Any], fingerprint: str, dataset: str) -> bool:
    """Whether a loader's saved position is one in the same data; if not, a warning says that reading starts anew.

    Args:
        state: with the data's fingerprint as `data`, and `dataset`: what the configuration called it, one or several.
        fingerprint: of this run's data.
        dataset: what this run's configuration calls it.
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
