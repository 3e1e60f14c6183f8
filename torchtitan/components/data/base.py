"""Batches, and the interface of all data loaders."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from torchtitan.components.chat_template import ChatTemplate
from torchtitan.components.data.plan.sampler import Array, State, StepStatistics
from torchtitan.components.data.report import DataSummary
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.config import Configurable
from torchtitan.config.code import CacheFolder
from torchtitan.config.configurable import builds
from torchtitan.tools.errors import UserError, require
from torchtitan.tools.logging import logger
from torchtitan.tools.process import usable_cores

if TYPE_CHECKING:
    from torch import Tensor

    from torchtitan.protocols.images import ImageInputs

NO_DOCUMENT = -1
"""Document number of a padding sample."""

Batch = dict[str, Any]
"""A data loader's batch of B samples. A trainer with its own `compute_loss` may read any values
with a method `to(device)`, such as images without tokens. The batches of language models have
samples of T = `seq_len` tokens; tensors are int64:

- `input` (B, T): token ids.
- `labels` (B, T): the token that follows each input token, or `IGNORE_INDEX`.
- `attention`, with document masking or padding: the `AttentionMetadata` of the batch. With document
  masking, positions restart with each document and in each window.
- `images`, with a loader of images: the `ImageInputs` of the batch.
- `image_keys` (B, T), with a frozen model's results in a cache: 0, or a number that identifies the
  images of the token's document.
- `documents` (B, M), optional: numbers of the sample's documents in order, padded with
  `NO_DOCUMENT`; for windows of running text (B, 2), any numbers for the first and last document.
  `document_names` names them.
"""


def to_batch(samples: Sequence[Mapping[str, Array]]) -> Batch:
    """Stack the arrays of samples, and make `attention` of their `positions`, and of `n_tokens`:
    how many tokens a sample has before its padding."""
    import torch

    from torchtitan.protocols.attention import AttentionMetadata

    batch: Batch = {
        name: torch.from_numpy(np.stack([sample[name] for sample in samples]))
        for name in samples[0]
    }
    (n_rows, length), n_tokens_B = batch["input"].shape, batch.pop("n_tokens", None)
    if n_tokens_B is not None and bool((n_tokens_B == length).all()):
        n_tokens_B = None
    if "positions" in batch:
        batch["attention"] = AttentionMetadata.from_positions(batch.pop("positions"), n_tokens_B)
    elif n_tokens_B is not None:
        batch["attention"] = AttentionMetadata.of_rows(n_rows, length, n_tokens_B)
    return batch


def images_in(batch: Batch) -> "dict[str, ImageInputs]":
    """Return the argument of a model for the images of a batch, if its loader reads images."""
    return {"images": batch["images"]} if "images" in batch else {}


def check_ids(ids: Array, vocab_size: int | None, place: Callable[[int], str]) -> None:
    """Raise `UserError` if a token id that was read from a file is not below `vocab_size`; `place`
    describes where the token with an index in `ids` is."""
    if vocab_size is None or not len(ids) or (int(ids.min()) >= 0 and int(ids.max()) < vocab_size):
        return
    first = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
    raise UserError(
        f"{place(first)}: token id {int(ids[first])} is outside the vocabulary of {vocab_size:,} "
        "tokens; the file was changed or damaged while it was in use: restore it, or remove the "
        "cache that holds it"
    )


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Shape of samples and their distribution over ranks. Raises `UserError` for values out of
    range."""

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
    """True to mask attention between packed documents."""
    vocab_size: int | None = None
    """Token ids that are read from files must be below it."""

    def __post_init__(self) -> None:
        for name in ("seq_len", "local_batch_size", "epochs"):
            number = getattr(self, name)
            require(number is None or number >= 1, name, number, "at least 1")
        assert 0 <= self.dp_rank < self.dp_world_size

    @property
    def global_batch_size(self) -> int:
        """Samples per batch over all ranks."""
        return self.local_batch_size * self.dp_world_size


class BaseDataLoader(Configurable):
    """Iterator over the batches of one data-parallel rank, built as `config.build(tokenizer=,
    seq_len=, local_batch_size=, dp_rank=, dp_world_size=, seed=, epochs=, global_batch_size=)` (see
    `TokenizingDataLoader`).

    The position is always after the last batch returned, regardless of prefetching. `state_dict`
    returns it and `load_state_dict` restores it, so a state saved at the start rewinds the loader.
    A custom loader may omit `documents` and raise `StopIteration` at the end of its rank's data.

    The built-in loaders raise `StopIteration` only if all ranks do so after the same number of
    batches. A stream split over ranks cannot guarantee this. Instead, `exhausted` becomes True at
    the end of the rank's shard, and `next` keeps returning batches with all labels ignored. A loop
    over several ranks must check after each `next` whether all ranks are `exhausted`, and then
    stop.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Training data."""

        def check_first_rows(self) -> None:
            """Raise `UserError` if the first rows of local data show that it cannot be used. This
            neither runs a user's code nor imports torch, so it comes before either."""

        def check_folder(self, tokenizer: Tokenizer) -> None:
            """Raise `UserError` if the folder of the tokenizer lacks what this data needs, such as
            a processor of images."""

        def prepare(self, *, tokenizer: Tokenizer) -> None:
            """Prepare the data of a validated configuration once per host before training. Raise
            `UserError` if the data cannot be used."""

        def identity(self) -> dict[str, object]:
            """Return the properties that identify this data in the run's identity: name →
            JSON-serializable value."""
            return {"dataloader": f"{self._owner.__module__}.{self._owner.__qualname__}"}

        def for_validation(self, dataset: str) -> "BaseDataLoader.Config | None":
            """Return a config that loads validation data in a fixed order, None without such data.
            An empty `dataset` selects the validation split of the training data."""
            return None

        def blank_batch(self, n_samples: int, seq_len: int) -> Batch:
            """Return a batch of zeros, without reading data, with the shapes that the loss needs:
            for a dry run."""
            import torch

            names = self._owner.token_tensors  # type: ignore[attr-defined]
            return {name: torch.zeros((n_samples, seq_len), dtype=torch.int64) for name in names}

        def blank_images(
            self, tokenizer: Callable[[], Tokenizer], n_tokens: int
        ) -> "ImageInputs | None":
            """Return the `ImageInputs` of a batch that is all images, for a dry run; None: the data
            has no images."""
            return None

    token_tensors: ClassVar[tuple[str, ...]] = ("input", "labels")
    """Names of the (B, T) batch tensors that the loss needs; a dry run creates only these."""

    n_samples: int | None = None
    """Samples of all ranks over all `epochs`, without padding; None: unknown (a stream) or
    endless."""

    dataset_names: Sequence[str] = ()
    """Names of the datasets that `datasets_of` tells apart; empty: none."""

    needs_sample_losses: bool = False
    """True if `observe` needs per-sample losses."""

    needs_sample_rewards: bool = False
    """True if `observe` needs the rewards of sampled answers."""

    @property
    def adapts(self) -> bool:
        """True if `observe` changes later batches."""
        return type(self).observe is not BaseDataLoader.observe

    @property
    def exhausted(self) -> bool:
        """True if this rank has reached the end of its data; see the class."""
        return False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """Return the next batch; raise `StopIteration` after the last."""
        raise NotImplementedError

    def set_seq_len(self, seq_len: int, longest: int) -> None:
        """Set the length of the following windows to `seq_len` tokens, a divisor of `longest`, the
        longest of the run. Also called before the first batch. Raise `UserError` if the windows of
        this loader cannot change."""
        raise UserError(
            f"--training.seq_len_schedule: the windows of {type(self).__qualname__} have one length"
        )

    def set_weights(self, weights: Sequence[float]) -> None:
        """Replace the share of each dataset from the next batch on, with the same values on all
        ranks, such as in a callback. Checkpoints contain them, and a resumed run continues with
        them instead of its configured ones. Raise `UserError` if this loader has no weights, or
        they do not suit its datasets.
        """
        raise UserError(f"{type(self).__qualname__} has no weights of datasets")

    def state_dict(self) -> State:
        """Return the position as JSON-serializable values."""
        raise NotImplementedError

    def load_state_dict(self, state: State) -> None:
        """Restore a saved position."""
        raise NotImplementedError

    def present_state(self) -> Callable[[], State]:
        """Return a function that returns the `state_dict` of the present position, also after
        further batches, until `observe` is called. This is called in every step of a run that
        saves, so a loader with a large state overrides it."""
        state = self.state_dict()
        return lambda: state

    def describe(self, documents: "Tensor") -> str:
        """Return a sample's document names as text. `documents` is a row of a batch's
        `documents`."""
        return ", ".join(self.document_names(documents)) or "no document (padding)"

    def document_names(self, documents: "Tensor") -> list[str]:
        """Return a sample's document names for the ledger, in order; empty for padding. Names are
        the same in every run, and a range of documents may share one. `documents` is a row of a
        batch's `documents`."""
        return [f"document {number}" for number in documents.tolist() if number != NO_DOCUMENT]

    def datasets_of(self, batch: Batch) -> "Tensor":
        """Return the index in `dataset_names` of each token's dataset, (B, T); -1 for padding."""
        raise NotImplementedError

    def batch_of(self, names: Sequence[str]) -> Batch | None:
        """Return a batch of the documents with these `document_names`, one per row, or None if
        names do not identify rows. Raise `UserError` for an unknown name."""
        return None

    def summary(self, n_samples: int) -> DataSummary | None:
        """Summarize the data for a run of `n_samples` over all ranks, without training; None:
        unknown."""
        return None

    def check_repetitions(self, n_samples: int) -> None:
        """Raise `UserError` if a run of `n_samples` over all ranks repeats data more often than
        allowed."""

    def observe(self, statistics: StepStatistics) -> None:
        """Adapt to a training step's statistics. Called on every rank with the same values, in step
        order. Batches already returned or prefetched do not change."""

    def assets(self) -> dict[str, str]:
        """Return files to save with checkpoints and exports of a model trained on this data: file
        name → text."""
        return {}

    def close(self) -> None:
        """Release resources such as worker processes. May be called repeatedly."""


def number_tokens(batch: Batch) -> "Tensor":
    """Return each token's document number, (B, T), or `NO_DOCUMENT` for padding. The k-th document
    of a row begins at the k-th position 0, and has the k-th number in `documents`."""
    import torch

    documents: Tensor = batch["documents"]
    attention = batch.get("attention")
    if attention is None or attention.positions_BL is None:
        # each row is one document, and ends with padding without labels
        return documents[:, :1].expand_as(batch["input"])
    indices = (attention.positions_BL == 0).long().cumsum(dim=1) - 1
    padded = torch.cat([documents, torch.full_like(documents[:, :1], NO_DOCUMENT)], dim=1)
    return padded.gather(1, indices)


class TokenizingDataLoader(BaseDataLoader):
    """Options and arguments shared by the loaders of this package.

    Args:
        config: data to read.
        tokenizer: tokenizer of the model.
        seq_len: positions per sample, T.
        local_batch_size: samples per batch and rank, B.
        seed: random seed of the order.
        epochs: passes over all datasets, each in a new random order; padding samples fill the last
            batch. None: endless.
        global_batch_size: samples per training step over all ranks; None: one batch of each rank.

    Raises:
        UserError: the data cannot be used, or a number is out of range.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Training data."""

        split: str = "train"
        """Split to read, if the data has more than one."""
        num_workers: int = 0
        """Worker processes per rank that prepare batches; 0, enough for local data: use the main
        process."""
        cache_dir: CacheFolder = ""
        """Folder for tokenized local data; empty: $TORCHTITAN_CACHE or, if it is not set,
        ~/.cache/torchtitan."""
        verify_caches: bool = False
        """Verify all checksums of the tokenized data before use; False: verify a sample of them."""

        @builds(lambda: TokenizingDataLoader)
        def build(self) -> object:
            """Build the loader of one data-parallel rank."""

        def validate(self) -> None:
            """Raise `UserError` for a value out of range on any host, without reading data."""
            require(
                self.num_workers >= 0, "--dataloader.num_workers", self.num_workers, "at least 0"
            )

        def check_host(self) -> None:
            """Raise `UserError` for more workers than this host can use."""
            # more processes only use memory, even if all wait for a store
            most = 16 * usable_cores()
            limit = f"at most {most}, 16 per CPU core"
            require(self.num_workers <= most, "--dataloader.num_workers", self.num_workers, limit)

    config: Config
    template: ChatTemplate | None = None
    """Chat template; None for plain text."""

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
        config.check_host()
        self._tokenizer = tokenizer
        self._layout = Layout(
            seq_len=seq_len,
            local_batch_size=local_batch_size,
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            num_workers=config.num_workers,
            epochs=epochs,
            vocab_size=tokenizer.vocab_size,
        )
        self._open(seed, global_batch_size or self._layout.global_batch_size)

    def _open(self, seed: int, samples_per_step: int) -> None:
        raise NotImplementedError

    def assets(self) -> dict[str, str]:
        """Return the chat template and its settings as files; see `chat_assets`."""
        # deferred, like all saving code
        from torchtitan.components.weights.assets import chat_assets

        return chat_assets(self._tokenizer, self.template) if self.template else {}


def can_resume_position(state: State, fingerprint: str, dataset: str) -> bool:
    """Return whether a saved position is valid for this run's data; if not, warn that reading
    restarts.

    Args:
        state: a loader's state, with the fingerprint of its data in `data` and the configured names
            in `dataset`.
        fingerprint: fingerprint of this run's data.
        dataset: configured names of this run's data.
    """
    if state["data"] == fingerprint:
        return True
    before = state["dataset"]
    logger.warning(
        f"the saved data position does not match this run's data ({dataset}), so reading starts at "
        "the beginning: it was saved with "
        f"{before if isinstance(before, str) else ' '.join(before)}, or the content, tokenizer, "
        "template, filters, seq_len, packing, shuffling or sampler differ"
    )
    return False
