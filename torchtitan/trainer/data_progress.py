"""How much data a run has read, and where it ends."""

from collections.abc import Mapping

from torchtitan.config.sections import TrainingConfig, parse_step_ranges


class RunLength:
    """Counts what a run reads of its data, in global batches and in samples, and tells its last step from that.

    Batches are counted in the order of the data, those included that are read for nothing. A resumed run may have
    larger or smaller ones, so that only the samples tell how much data is left.

    Args:
        config: says how many `steps` or `epochs` the run has, and which global batches it leaves out (`skip_data`).
        n_samples: of all epochs; None: not known, and the run has as many steps as the configuration says.
        global_batch_size: samples of a global batch.
    """

    def __init__(self, config: TrainingConfig, *, n_samples: int | None, global_batch_size: int):
        self.data_step = 0
        """Global batches read: those of all steps, and those that were left out."""
        self.n_samples_read = 0
        """Their samples, all ranks together."""
        self._steps = config.steps
        self._n_samples = None if config.epochs is None else n_samples
        self._global_batch_size = global_batch_size
        self._skipped = sorted(parse_step_ranges(config.skip_data), key=lambda of: of.start)

    @property
    def next_is_left_out(self) -> bool:
        """Whether the next global batch is to be read for nothing."""
        return any(self.data_step + 1 in of for of in self._skipped)

    def count_batch(self) -> None:
        """Count a global batch as read."""
        self.data_step += 1
        self.n_samples_read += self._global_batch_size

    def last_step(self, step: int) -> int:
        """The last step of the run, of which `step` steps have been done."""
        if self._n_samples is None:
            return self._steps
        n_batches = -(-max(0, self._n_samples - self.n_samples_read) // self._global_batch_size)
        end = self.data_step + 1 + n_batches
        return step + n_batches - sum(max(0, min(of.stop, end) - of.start) for of in self._left_out())

    def data_steps(self, n_steps: int) -> int:
        """`data_step` when `n_steps` more steps, at least 1, have been done."""
        end = self.data_step + 1 + n_steps
        for left_out in self._left_out():
            if left_out.start < end:
                end += len(left_out)
        return end - 1

    def samples_read_at(self, last_step: int, step: int) -> int:
        """`n_samples_read` when `last_step` has been done, and `step` is the last that has."""
        if last_step <= step:
            return self.n_samples_read
        n_batches = self.data_steps(last_step - step) - self.data_step
        return self.n_samples_read + n_batches * self._global_batch_size

    def _left_out(self) -> list[range]:
        """The batches ahead that are left out, in ascending ranges of which no two have any in common."""
        first, left_out = self.data_step + 1, []
        for of in self._skipped:
            left_out.append(range(max(of.start, first), max(of.stop, first)))
            first = max(first, of.stop)
        return left_out

    def state_dict(self) -> dict[str, int]:
        """What has been read."""
        return {"data_step": self.data_step, "n_samples_read": self.n_samples_read}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Count on from a saved state, whatever the batches of the run that saved it."""
        self.data_step, self.n_samples_read = state["data_step"], state["n_samples_read"]
