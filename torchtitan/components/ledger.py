"""The ledger of a run: which documents each step was trained on, in one order for all ranks."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from torch import Tensor

from torchtitan.components.data.base import Batch
from torchtitan.components.metric_sinks import JsonLines
from torchtitan.distributed.process_group import gather_objects
from torchtitan.tools.errors import RunFailure


class Ledger:
    """Writes a line of `ledger.jsonl` for each step that was taken: the names of its documents, of all ranks, in their
    global order. A step left out because its loss or gradients were not finite has none.

    A line is on the disk before the checkpoint of its step is begun. A run that resumes after step N drops the lines of
    later steps, which are done again, so that what the file says is what the weights have seen.

        ledger.open(step)               # after a checkpoint was loaded, or not
        for each step:
            ledger.take(micro_batches)  # as they come from the loader
            ...
            ledger.write(step, data_step)  # if the step was taken
            ledger.sync()           # if a checkpoint is to be saved
        ledger.close()

    Every rank makes these calls; rank 0 writes.

    Args:
        path: the file; one of an earlier run is set aside by a fresh run. None: nothing is written.
        names: the names of a sample's documents by a row of the batch's `documents`, see
            `BaseDataLoader.document_names`.
        rank: this process's.
        is_batch_leader: whether this rank stands for those that see the same samples.
    """

    def __init__(self, path: Path | None, names: Callable[[Tensor], list[str]], *, rank: int, is_batch_leader: bool):
        self.path = path
        self.names = names
        self.rank = rank
        self.is_batch_leader = is_batch_leader
        self._file: JsonLines | None = None
        self._taken: list[list[str]] = []

    def open(self, step: int) -> None:
        """Go on behind the line of `step`, the last finished one; 0 for a fresh run."""
        if self.path and self.rank == 0:
            self._file = JsonLines(self.path, step)

    def take(self, micro_batches: Sequence[Batch]) -> None:
        """The documents of the step in progress."""
        self._taken = names_of(micro_batches, self.names) if self.path and self.is_batch_leader else []

    def write(self, step: int, data_step: int) -> None:
        """Write the line of a step that is done.

        Args:
            step: counted from 1.
            data_step: the same, counting also the steps' worth of data that were left out (`training.skip_data`).

        Raises:
            RunFailure: where the file cannot be written: a ledger with a gap would not be one.
        """
        if self.path is None:
            return
        documents = in_global_order(self._taken)
        if self._file is not None:
            with self._writing():
                self._file.append({"step": step, "data_step": data_step, "documents": documents})

    def sync(self) -> None:
        """Make the lines outlast a power failure; raises as `write` does."""
        if self._file is not None:
            with self._writing():
                self._file.sync()

    def close(self) -> None:
        """Close the file; it can be called twice."""
        if self._file is not None:
            self._file.close()
            self._file = None

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunFailure(f"'{self.path}' cannot be written: {error.strerror} (--debug.ledger)") from error


def names_of(micro_batches: Sequence[Batch], names: Callable[[Tensor], list[str]]) -> list[list[str]]:
    """The names of each micro-batch's documents; none where the loader does not say which they are."""
    return [[name for row in batch.get("documents", ()) for name in names(row)] for batch in micro_batches]


def in_global_order(local: Sequence[Sequence[str]]) -> list[str]:
    """What all ranks say of their micro-batches: of the first ones by rank, then of the second ones, and so on.

    Args:
        local: of each of this rank's micro-batches.
    """
    of_ranks = gather_objects(local)
    return [item for of_place in itertools.zip_longest(*of_ranks, fillvalue=()) for own in of_place for item in own]


def shortened(documents: Sequence[str], shown: int = 8) -> str:
    """The first names in words, and how many more there are."""
    more = f" and {len(documents) - shown} more" if len(documents) > shown else ""
    return ("; ".join(documents[:shown]) or "not known") + more
