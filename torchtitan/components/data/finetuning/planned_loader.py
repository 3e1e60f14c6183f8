"""Batches of fine-tuning rows whose lengths are known: a planner decides which share a window."""

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Unpack

import numpy as np

from torchtitan.components.data.base import (
    NO_DOCUMENT,
    Batch,
    can_resume_position,
    number_tokens,
)
from torchtitan.components.data.finetuning.rows_loader import RowsDataLoader
from torchtitan.components.data.finetuning.samples import (
    LengthFilteredDataset,
    SampleSets,
    WindowDataset,
)
from torchtitan.components.data.plan import (
    Planner,
    PlanOptions,
    Sampler,
    ShuffleSampler,
    Snapshot,
    StepStatistics,
)
from torchtitan.components.data.plan.sampler import State
from torchtitan.components.data.report import DataSummary, SetSummary
from torchtitan.tools.digests import digest_of
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger
from torchtitan.tools.redact import redacted

if TYPE_CHECKING:
    from torch import Tensor

    from torchtitan.components.data.finetuning.streams import RowStreamDataLoader
    from torchtitan.components.data.workers import Workers

PREFETCHED_BATCHES = 2
"""Batches prefetched by each worker process."""

CHUNK_WITHOUT_PACKING = 1024
"""Samples drawn at a time if each window holds one sample; does not affect the order."""


class PlannedDataLoader(RowsDataLoader):
    """Batches of the windows that a `Planner` plans.

    The global order of windows does not depend on ranks, workers or batch size B: the n-th batch of
    rank r of R holds B windows, starting with window n * R * B + r * B. The planner runs in the
    main process. The position is exact after every batch, and can be resumed with a different
    number of ranks, workers or windows per batch. A batch's `documents` (B, M) are the sample
    numbers of each window over all datasets, padded with `NO_DOCUMENT`.

    Subclasses define the kind of rows, see `RowsDataLoader`, and may override the planning of
    windows (`plan`).
    """

    @classmethod
    def stream_class(cls) -> "type[RowStreamDataLoader]":
        """Return the loader that reads and encodes the rows during training."""
        from torchtitan.components.data.finetuning.streams import RowStreamDataLoader

        return RowStreamDataLoader

    def _open(self, seed: int, samples_per_step: int) -> None:
        self.template = self.config.find_template(self._tokenizer)
        self.samples = self._open_samples()
        """Samples that fit into windows, with reports on dropped rows."""
        self._batches = WindowDataset(
            self.samples,
            self._layout.seq_len,
            self.config.batch_maker(self._tokenizer),
            self._layout.vocab_size,
        )
        self._planner = self._new_planner(seed, samples_per_step)
        self._prefetched_positions: deque[Snapshot] = deque()
        self._position = self._planner.snapshot()
        self._workers: Workers | None = None
        self._exhausted = False
        windows_by_epoch = self._planner.windows_by_epoch
        self.n_samples = None if windows_by_epoch is None else sum(windows_by_epoch)
        self.log_data()

    def plan(
        self,
        samplers: list[Sampler],
        *,
        epochs: int | None,
        windows_per_step: int,
        **options: Unpack[PlanOptions],
    ) -> Planner:
        """Create a planner at the first window.

        Args:
            samplers: sampler of each dataset.
            epochs: passes over the data; None: windows never end.
            windows_per_step: windows of a training step.
            options: further arguments of the planner.
        """
        config, sets = self.config, self.samples.sets
        if self.sequences_per_window:
            sizes = [data.sequence_positions().sum(axis=1) for data in sets]
            chunk = config.packing_chunk()
        else:
            sizes = [np.ones(data.n_samples, np.int64) for data in sets]
            adapts = any(sampler.adaptive for sampler in samplers)  # after each step
            chunk = windows_per_step if adapts else CHUNK_WITHOUT_PACKING
        return Planner(
            sizes,
            self.positions_of_window(self._layout.seq_len),
            samplers,
            packing=config.packing_method(),
            chunk=chunk,
            epochs=epochs,
            windows_per_step=windows_per_step,
            **options,
        )

    def _open_samples(self) -> SampleSets:
        config = self.config
        caches = config.open_caches(self._tokenizer, self.template)
        max_length = self.max_length(self._layout.seq_len)
        contents = [cache.fingerprint for cache in caches]
        self.fingerprint = digest_of([contents, [self._layout.seq_len, *config.order_key()]])
        """Fingerprint of the data and its order."""
        limit = config.length_limit(max_length)
        filtered = [
            LengthFilteredDataset(cache, limit, name)
            for name, cache in zip(config.dataset, caches, strict=True)
        ]
        return SampleSets(config.dataset, filtered)

    def _new_planner(self, seed: int, windows_per_step: int) -> Planner:
        config = self.config
        self.dataset_names = config.dataset
        sizes = [data.n_samples for data in self.samples.sets]
        samplers = [
            config.sampler.build(n_samples=size, seed=seed + i) for i, size in enumerate(sizes)
        ]
        self.needs_sample_losses = any(sampler.needs_sample_losses for sampler in samplers)
        self.needs_sample_rewards = any(sampler.needs_sample_rewards for sampler in samplers)
        return self.plan(
            samplers,
            epochs=self._layout.epochs,
            windows_per_step=windows_per_step,
            names=config.dataset,
            seed=seed,
            ahead=PREFETCHED_BATCHES * config.num_workers * self._layout.global_batch_size,
        )

    @cached_property
    def windows_per_epoch(self) -> int:
        """Windows in one pass over all data, without mixing datasets."""
        windows = self._planner.windows_by_epoch
        if windows is not None and not self.config.dataset_weights():
            return windows[0]
        in_any_order = ShuffleSampler.Config()
        samplers = [
            in_any_order.build(n_samples=data.n_samples, seed=0) for data in self.samples.sets
        ]
        epoch = PlannedDataLoader.plan(self, samplers, epochs=1, windows_per_step=1)
        return sum(1 for _ in epoch)

    @property
    def packing_efficiency(self) -> float | None:
        """Fraction of the windows' positions that hold samples, over an epoch; None: samples are
        not packed."""
        return None

    def summary(self, n_samples: int) -> DataSummary:
        if self.n_samples is not None:
            n_samples = min(n_samples, self.n_samples)
        epochs, limits = self._planner.epochs_after(n_samples), self._planner.max_epochs
        sets = [
            SetSummary(
                name=name,
                report=data.report,
                lengths=data.all_lengths,
                epochs=times,
                max_epochs=limit,
            )
            for name, data, times, limit in zip(
                self.samples.names, self.samples.sets, epochs, limits, strict=True
            )
        ]
        return DataSummary(
            sets=sets,
            max_length=self.max_length(self._layout.seq_len),
            windows_per_epoch=self.windows_per_epoch,
            packing_efficiency=self.packing_efficiency,
            follows_seed=not self._planner.is_adaptive,
        )

    def log_data(self) -> None:
        for name, data in zip(self.samples.names, self.samples.sets, strict=True):
            for line in data.report.lines():
                logger.info(f"{name}: {line}")
            for warning in data.warnings():
                logger.warning(f"{name}: {warning}")

    def sample_name(self, number: int) -> str:
        """Return a sample's name in the ledger: the location of its row."""
        return self.samples.describe(number)

    @property
    def adapts(self) -> bool:
        return self._planner.is_adaptive

    @property
    def exhausted(self) -> bool:
        return self._exhausted

    def __next__(self) -> Batch:
        if self._exhausted:
            raise StopIteration
        from torchtitan.components.data.workers import Workers  # deferred: it imports torch

        if self._workers is None:
            self._workers = Workers(
                self._batches, sampler=self._keys(), num_workers=self.config.num_workers
            )
        try:
            batch = next(self._workers)
        except StopIteration:
            self._exhausted = True
            raise
        self._position = self._prefetched_positions.popleft()
        return batch

    def _keys(self) -> Iterator[list[list[int]] | UserError]:
        """Yield the sample numbers of the windows of each batch of this rank. After a planning
        error, yield the error, which `Workers` raises in its turn, since the run may not need more
        batches."""
        batch_size = self._layout.global_batch_size
        first = self._layout.dp_rank * self._layout.local_batch_size
        try:
            while windows := list(itertools.islice(self._planner, batch_size)):
                self._prefetched_positions.append(self._planner.snapshot())
                numbers = [
                    (window.samples + self._planner.offsets[window.source]).tolist()
                    for window in windows
                ]
                numbers += [[]] * (batch_size - len(numbers))
                yield numbers[first : first + self._layout.local_batch_size]
        except UserError as error:
            yield from itertools.repeat(error)

    @property
    def position(self) -> Snapshot:
        """Position after the last batch of a step, by default the last one that was returned."""
        return self._position

    def state_dict(self) -> State:
        return self._state_at(self.position)

    def present_state(self) -> Callable[[], State]:
        # a snapshot refers to arrays, which nothing modifies
        return partial(self._state_at, self.position)

    def _state_at(self, snapshot: Snapshot) -> State:
        position = self._planner.state_dict(snapshot)
        names = redacted(self.config.dataset)
        return {"dataset": names, "data": self.fingerprint, "position": position}

    def load_state_dict(self, state: State) -> None:
        """Restore a saved position. Ignore it with a warning if the data or its order differ."""
        if not can_resume_position(state, self.fingerprint, " ".join(self.config.dataset)):
            return
        self.close()
        self._exhausted = False
        self._planner.load_state_dict(state["position"])
        self._position = self._planner.snapshot()

    def observe(self, statistics: StepStatistics) -> None:
        """Pass a step's statistics to the samplers. They affect draws `PREFETCHED_BATCHES` batches
        per worker later, and only samples not yet drawn."""
        self._planner.observe(statistics, self.position.n_windows)

    def document_names(self, documents: "Tensor") -> list[str]:
        return [self.sample_name(number) for number in documents.tolist() if number != NO_DOCUMENT]

    def datasets_of(self, batch: Batch) -> "Tensor":
        import torch

        offsets = torch.from_numpy(self._planner.offsets)
        return torch.searchsorted(offsets, number_tokens(batch), right=True) - 1

    def batch_of(self, names: Sequence[str]) -> Batch:
        batch = self._batches[[[number] for number in self.samples.find_numbers(names)]]
        if isinstance(batch, UserError):
            raise batch
        return batch

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()
            self._workers = None
            # Prefetched batches are discarded and planned again if needed.
            self._planner.load_state_dict(self._planner.state_dict(self._position))
            self._prefetched_positions.clear()
