"""Steps that are not taken, and the return to a checkpoint."""

import math
from collections.abc import Sequence
from typing import Protocol

from torchtitan.components.data.base import Batch
from torchtitan.distributed.phases import RETURN
from torchtitan.tools.errors import RunFailure
from torchtitan.tools.logging import logger
from torchtitan.trainer.callbacks import Callback
from torchtitan.trainer.ledger import in_global_order, names_of, shortened
from torchtitan.trainer.run import Run
from torchtitan.trainer.step_result import NonFiniteError, StepResult


class SkippingRun(Run, Protocol):
    """A `Trainer` as the functions here see it."""

    callbacks: list[Callback]

    def refresh_converters(self) -> None: ...

    def update_length(self) -> None: ...


def is_overflow(trainer: SkippingRun, outcome: StepResult) -> bool:
    """Return whether gradients of a step are infinite by the loss scale of float16, while the loss
    is finite."""
    return trainer.loss_scale.is_on and math.isfinite(outcome.loss) and not outcome.is_finite


def ends_run(trainer: SkippingRun, outcome: StepResult) -> bool:
    """Return whether a step ends the run by numbers that are not finite."""
    is_unexpected = not outcome.is_finite and not is_overflow(trainer, outcome)
    return is_unexpected and trainer.config.training.on_nonfinite == "stop"


def skip_step(trainer: SkippingRun, outcome: StepResult, micro_batches: Sequence[Batch]) -> None:
    """Name a step that is not taken, with its documents, on all ranks of a `Trainer`. Raise
    `NonFiniteError` or `RunFailure` if the run must end."""
    guard = trainer.spikes
    local_batches = micro_batches if trainer.parallel_dims.is_batch_leader else []
    documents = in_global_order(names_of(local_batches, trainer.dataloader.document_names))
    data_step = f" (data step {outcome.data_step})" if outcome.data_step > outcome.step else ""
    scale = trainer.loss_scale
    overflow = f" (float16 overflows with the loss scale {scale.value:g})"
    reason = overflow if is_overflow(trainer, outcome) else ""
    message = (
        f"step {outcome.step}{data_step}: {outcome}{reason}; documents: {shortened(documents)}"
    )
    if ends_run(trainer, outcome):
        # the process ends immediately, which would lose a save in the background
        trainer.checkpointer.wait()
        raise NonFiniteError(
            f"{message}. If the loss rose before, lower --optimizer.lr or set a warm-up and "
            "--training.max_norm; --training.on_nonfinite skip leaves such steps out"
        )
    logger.warning("%s. The step is skipped.", message)
    guard.count_skipped()
    if guard.is_return_due and guard.config.action == "stop":
        trainer.checkpointer.wait()
        raise RunFailure(
            f"{guard.in_a_row} steps in a row are skipped (--spikes.max_in_a_row), last {message}"
        )
    for callback in trainer.callbacks:
        callback.on_skip(outcome)


def return_to_checkpoint(trainer: SkippingRun) -> None:
    """Load weights and optimizer from the newest checkpoint before the skipped steps of a
    `Trainer`. The step count continues, so that metrics, ledger and checkpoints never go back.
    Raise `RunFailure` if there is no such checkpoint, or the run has returned to it before."""
    guard, action = trainer.spikes, trainer.spikes.config.action
    step = trainer.step
    n_tokens_seen = trainer.n_tokens_seen
    n_skipped = guard.n_skipped
    before = guard.returned_to
    last_taken = step - guard.in_a_row
    # The loss scale of the checkpoint would be too large again.
    kept = {"random", "loss_scale"} | (set() if action == "repeat" else {"trainer", "dataloader"})
    if guard.config.advance_schedule:
        kept.add("lr_scheduler")
    with trainer.metrics.exclude(), trainer.phases.during(RETURN):
        returned_to = trainer.checkpointer.reload(last_taken, excluding=kept)
        trainer.refresh_converters()
    if returned_to == before:
        raise RunFailure(
            f"steps {last_taken + 1} to {step} are skipped, and the run has returned to step "
            f"{before} before; skip more data (--training.skip_data), or increase "
            "--spikes.max_in_a_row or --spikes.threshold"
        )
    trainer.step, trainer.n_tokens_seen = step, n_tokens_seen
    guard.in_a_row = 0
    guard.n_skipped = n_skipped
    guard.returned_to = returned_to
    trainer.update_length()
    for callback in trainer.callbacks:
        callback.on_return(returned_to)
    data = "is read again" if action == "repeat" else "is skipped"
    logger.warning(
        f"steps {returned_to + 1} to {step} are undone: the run continues after step {step} with "
        f"the weights and optimizer state of step {returned_to}; the data of these steps {data} "
        f"(--spikes.action {action})"
    )
