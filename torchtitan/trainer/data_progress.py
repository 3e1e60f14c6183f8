"""`DataProgress`: the amount of data that a run has read, and the run's last step."""

from collections.abc import Mapping

from torchtitan.config.sections import TrainingConfig, parse_step_ranges


class DataProgress:
    """Count a run's data in global batches and in samples, and compute the last step.

    Batches are counted in data order, including skipped ones (`skip_data`). A resumed run may change the batch size, so
    only the samples tell how much data is left. `n_samples` is the total of all epochs; None: `steps` determines the
    last step.
    """

    def __init__(self, config: TrainingConfig, *, n_samples: int | None, global_batch_size: int):
        self.data_step = 0
        """Global batches read, including skipped ones."""
        self.n_samples_read = 0
        """Samples read by all ranks."""
        self._steps = config.steps
        self._n_samples = None if config.epochs is None else n_samples
        self._global_batch_size = global_batch_size
        self._skipped = sorted(parse_step_ranges(config.skip_data), key=lambda span: span.start)

    @property
    def next_is_skipped(self) -> bool:
        """True if the next global batch is to be skipped."""
        return any(self.data_step + 1 in span for span in self._skipped)

    def count_batch(self) -> None:
        self.data_step += 1
        self.n_samples_read += self._global_batch_size

    def last_step(self, step: int) -> int:
        """Return the last step of a run that has taken `step` steps."""
        if self._n_samples is None:
            return self._steps
        n_batches = -(-max(0, self._n_samples - self.n_samples_read) // self._global_batch_size)
        end = self.data_step + 1 + n_batches
        return step + n_batches - sum(max(0, min(span.stop, end) - span.start) for span in self._skipped_ahead())

    def data_steps(self, n_steps: int) -> int:
        """Return `data_step` after `n_steps` more steps, at least 1."""
        end = self.data_step + 1 + n_steps
        for skipped in self._skipped_ahead():
            if skipped.start < end:
                end += len(skipped)
        return end - 1

    def samples_read_at(self, last_step: int, step: int) -> int:
        """Return the value of `n_samples_read` after `last_step`, if the current step is `step`."""
        if last_step <= step:
            return self.n_samples_read
        n_batches = self.data_steps(last_step - step) - self.data_step
        return self.n_samples_read + n_batches * self._global_batch_size

    def _skipped_ahead(self) -> list[range]:
        """Return the batches that are yet to be skipped, as ascending, disjoint ranges."""
        first, skipped = self.data_step + 1, []
        for span in self._skipped:
            skipped.append(range(max(span.start, first), max(span.stop, first)))
            first = max(first, span.stop)
        return skipped

    def state_dict(self) -> dict[str, int]:
        return {"data_step": self.data_step, "n_samples_read": self.n_samples_read}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from a saved state, with any batch size."""
        self.data_step, self.n_samples_read = state["data_step"], state["n_samples_read"]
