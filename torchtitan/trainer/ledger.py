"""The ledger of a run: which documents each step was trained on, in one order for all ranks."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from torchtitan.components.data.base import Batch
from torchtitan.components.metric_sinks import JsonLines
from torchtitan.distributed.process_group import gather_objects
from torchtitan.tools.errors import RunFailure
from torchtitan.trainer.callbacks import Callback
from torchtitan.trainer.outcome import StepOutcome


class Ledger(Callback):
    """Writes a line of `ledger.jsonl` for each step that was taken: the names of its documents, of all ranks, in their
    global order. A step skipped because its loss or gradients were not finite has none.

    A line is on disk before the checkpoint of its step is begun. A run that resumes after step N drops the lines of
    later steps, which are done again, so that the file says what the weights have seen. Rank 0 writes. Without
    `debug.ledger` nothing happens; a file of an earlier run is set aside by a fresh run.
    """

    def __init__(self, config: Callback.Config, *, trainer: Any):
        super().__init__(config, trainer=trainer)
        self.enabled = trainer.config.debug.ledger
        self.path = Path(trainer.config.dump_folder) / "ledger.jsonl"
        self._file: JsonLines | None = None
        self._taken: list[list[str]] = []

    @contextlib.contextmanager
    def around_run(self) -> Iterator[None]:
        """Continue after the line of the last finished step."""
        if self.enabled and self.trainer.rank == 0:
            self._file = JsonLines(self.path, self.trainer.step)
        yield

    def on_batches(self, micro_batches: Sequence[Batch]) -> None:
        """Remember the documents of the step in progress."""
        own = micro_batches if self.enabled and self.trainer.parallel_dims.is_batch_leader else []
        self._taken = names_of(own, self.trainer.dataloader.document_names)

    def on_step(self, outcome: StepOutcome) -> None:
        """Write the line of a step that was taken.

        Raises:
            RunFailure: if the file cannot be written: a ledger with a gap would not be one.
        """
        if not (self.enabled and outcome.is_finite):
            return
        documents = in_global_order(self._taken)
        if self._file is not None:
            step, data_step = self.trainer.step, self.trainer.run_length.data_step
            with self._writing():
                self._file.append({"step": step, "data_step": data_step, "documents": documents})

    def before_save(self) -> None:
        """Make the lines outlast a power failure; raises as `on_step` does."""
        if self._file is not None:
            with self._writing():
                self._file.sync()

    def close(self) -> None:
        """Close the file."""
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
