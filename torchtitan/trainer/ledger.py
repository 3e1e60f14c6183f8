"""Ledger of a run: the documents of each step, in one global order over all ranks."""

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from torch import Tensor

from torchtitan.components.data.base import Batch
from torchtitan.components.observe.metric_sinks import JsonLines
from torchtitan.distributed.process_group import gather_objects
from torchtitan.tools.errors import RunFailure
from torchtitan.trainer.callbacks import Callback, Recorder
from torchtitan.trainer.run import Run
from torchtitan.trainer.step_result import StepResult


class Ledger(Recorder):
    """Write a line of `ledger.jsonl` for each step: the names of all ranks' documents in their
    global order.

    The line of a skipped step has the reason as `skipped`. `returned_to` is the step whose weights
    the run last loaded again, which undid the steps between. Resuming from step N drops later
    lines; a fresh run moves an existing file aside. Without `debug.ledger`, nothing is written.
    Raises `RunFailure` on failure, since a ledger must have no gaps.
    """

    def __init__(self, config: Callback.Config, *, trainer: Run):
        super().__init__(config, trainer=trainer)
        self.enabled = trainer.config.debug.ledger
        self.path = Path(trainer.config.dump_folder) / "ledger.jsonl"
        self._taken: list[list[str]] = []

    def around_run(self) -> AbstractContextManager[object]:
        if self.enabled and self.trainer.rank == 0:
            self.file = JsonLines(self.path, self.trainer.step)
        return super().around_run()

    def on_batches(self, micro_batches: Sequence[Batch]) -> None:
        local_batches = (
            micro_batches if self.enabled and self.trainer.parallel_dims.is_batch_leader else []
        )
        self._taken += names_of(local_batches, self.trainer.dataloader.document_names)

    def on_step(self, outcome: StepResult) -> None:
        taken, self._taken = self._taken, []
        if not self.enabled:
            return
        line: dict[str, object] = {
            "step": self.trainer.step,
            "data_step": self.trainer.run_length.data_step,
        }
        line["documents"] = in_global_order(taken)
        if not outcome.is_taken:
            line["skipped"] = str(outcome)
        if self.trainer.spikes.returned_to is not None:
            line["returned_to"] = self.trainer.spikes.returned_to
        self.use(lambda file: file.append(line))

    def on_failure(self, error: OSError) -> None:
        raise RunFailure(
            f"'{self.path}' cannot be written: {error.strerror} (--debug.ledger)"
        ) from error


def names_of(
    micro_batches: Sequence[Batch], names: Callable[[Tensor], list[str]]
) -> list[list[str]]:
    """Return the names of each micro-batch's documents, none if the loader does not name them."""
    return [
        [name for row in batch.get("documents", ()) for name in names(row)]
        for batch in micro_batches
    ]


def in_global_order(local: Sequence[Sequence[str]]) -> list[str]:
    """Return the items of all ranks' micro-batches: the first micro-batch of each rank, then the
    second, and so on.

    Args:
        local: items of each of this rank's micro-batches.
    """
    by_rank = gather_objects(local)
    return [
        item
        for batches in itertools.zip_longest(*by_rank, fillvalue=())
        for batch in batches
        for item in batch
    ]


def shortened(documents: Sequence[str], shown: int = 8) -> str:
    """Return the first names as text, and the number of other names."""
    more = f" and {len(documents) - shown} more" if len(documents) > shown else ""
    return ("; ".join(documents[:shown]) or "unknown") + more
