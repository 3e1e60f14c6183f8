"""What the loaders of planned windows share: the way from a `Planner` through workers to batches, and the position."""

import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset

from torchtitan.components.data.dataloader import BaseDataLoader
from torchtitan.components.data.packing import NO_DOCUMENT, Batch
from torchtitan.components.data.plan import Planner, Snapshot, StepStatistics
from torchtitan.components.data.workers import Workers
from torchtitan.tools.logging import logger

PREFETCHED_BATCHES = 2
"""Batches that `Workers` has each of its processes prepare ahead."""


class PlannedDataLoader(BaseDataLoader):
    """Batches of the windows of a `Planner`, made from the numbers of the samples in each.

    The windows come in one global order, the same for any number of ranks, workers and windows per batch: with R ranks
    that take B at a time, rank r takes those from n * R * B + r * B on. The planner runs in the main process, and the
    position is that behind the last batch handed out, exact between any two batches; it can be continued by other
    numbers of all of these.

    A subclass calls `start` when it has a planner, and says how samples are called (`sample_name`).
    """

    def start(
        self,
        planner: Planner,
        batches: Dataset[Batch],
        *,
        names: list[str],
        fingerprint: str,
        num_workers: int,
        local_batch_size: int,
        dp_rank: int,
        dp_world_size: int,
    ) -> None:
        """Begin at the first window.

        Args:
            planner: at its first window, made for `PREFETCHED_BATCHES` batches of every rank and worker `ahead`.
            batches: its items are the batches, its keys the numbers of the samples in each of their windows, counted
                over all data sets; an empty list is a window that only fills up the last batch.
            names: of the data sets, for messages.
            fingerprint: equal ones mean that positions mean the same samples.
            num_workers: processes that make batches.
            local_batch_size: windows per batch and rank.
            dp_rank: this process's place among the data-parallel ranks.
            dp_world_size: number of data-parallel ranks.
        """
        assert 0 <= dp_rank < dp_world_size
        self._planner, self._batches, self._num_workers = planner, batches, num_workers
        self._names, self._fingerprint = names, fingerprint
        self._first, self._per_rank = dp_rank * local_batch_size, local_batch_size
        self._per_pass = local_batch_size * dp_world_size
        self._planned: deque[Snapshot] = deque()
        self._handed_out = planner.snapshot()
        self._workers: Workers | None = None
        self._exhausted = False
        self.n_samples = planner.count_windows()

    def sample_name(self, number: int) -> str:
        """What the ledger calls a sample."""
        raise NotImplementedError

    @property
    def exhausted(self) -> bool:
        return self._exhausted

    def __next__(self) -> Batch:
        if self._exhausted:
            raise StopIteration
        if self._workers is None:
            self._workers = Workers(self._batches, sampler=self._keys(), num_workers=self._num_workers)
        try:
            batch: Batch = next(self._workers)
        except StopIteration:
            self._exhausted = True
            raise
        self._handed_out = self._planned.popleft()
        return batch

    def _keys(self) -> Iterator[Any]:
        """The samples of each window of this rank's batches."""
        while windows := list(itertools.islice(self._planner, self._per_pass)):
            self._planned.append(self._planner.snapshot())
            numbers = [(window.samples + self._planner.offsets[window.source]).tolist() for window in windows]
            numbers += [[]] * (self._per_pass - len(numbers))
            yield numbers[self._first : self._first + self._per_rank]

    def state_dict(self) -> dict[str, Any]:
        position = self._planner.state_dict(self._handed_out)
        return {"dataset": self._names, "data": self._fingerprint, "position": position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position; one in other data, or in another order, is refused with a warning."""
        if state["data"] != self._fingerprint:
            logger.warning(
                f"the saved position is one in other data than this run's {' '.join(self._names)} (it was "
                f"{' '.join(state['dataset'])}, or another content, tokenizer, template, filter, seq_len, packing or "
                "sampler): reading starts at the beginning"
            )
            return
        self.close()
        self._exhausted = False
        self._planner.load_state_dict(state["position"])
        self._handed_out = self._planner.snapshot()

    def observe(self, statistics: StepStatistics) -> None:
        """Pass a step's statistics on to the samplers. They apply to what is drawn from then on: with workers,
        `PREFETCHED_BATCHES` batches of each later; and always behind the samples that are drawn already."""
        self._planner.observe(statistics, self._handed_out.n_windows)

    def describe(self, documents: torch.Tensor) -> str:
        return ", ".join(self.document_names(documents)) or "no document (padding)"

    def document_names(self, documents: torch.Tensor) -> list[str]:
        return [self.sample_name(number) for number in documents.tolist() if number != NO_DOCUMENT]

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()
            self._workers = None
            # What was prepared ahead is lost, and planned again if there is a next batch.
            self._planner.load_state_dict(self._planner.state_dict(self._handed_out))
            self._planned.clear()
