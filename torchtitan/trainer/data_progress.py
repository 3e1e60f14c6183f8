"""`DataProgress`: the amount of data that a run has read, and the run's last step."""

from collections.abc import Mapping

from torchtitan.config.schedule import parse_changes, value_at
from torchtitan.config.sections import TrainingConfig, parse_step_ranges


class DataProgress:
    """Count a run's data in global batches and in samples, and compute the last step.

    Batches are counted in data order, including skipped ones (`skip_data`). A resumed run may change the batch size, so
    only the samples tell how much data is left. `n_samples` is the total of all epochs; None: `steps` determines the
    last step. `global_batch_size` is the size of the first batch, before `batch_schedule`.
    """

    def __init__(
        self, config: TrainingConfig, *, n_samples: int | None, global_batch_size: int, sequences_per_sample: int = 1
    ):
        self.data_step = 0
        """Global batches read, including skipped ones."""
        self.n_samples_read = 0
        """Samples read by all ranks."""
        self._steps = config.steps
        self._n_samples = None if config.epochs is None else n_samples
        self.global_batch_size = self._first_size = global_batch_size
        """Samples of the next global batch."""
        self.seq_len = self._first_seq_len = config.seq_len
        """Length of the windows of the next global batch."""
        self._sequences_per_sample = sequences_per_sample
        self._changes = parse_changes(config.batch_schedule)
        self._seq_len_changes = parse_changes(config.seq_len_schedule)
        self._skipped = sorted(parse_step_ranges(config.skip_data), key=lambda span: span.start)

    @property
    def next_is_skipped(self) -> bool:
        """True if the next global batch is to be skipped."""
        return any(self.data_step + 1 in span for span in self._skipped)

    def count_batch(self) -> None:
        self.data_step += 1
        self.n_samples_read += self.global_batch_size

    def follow_schedule(self, step: int, n_tokens: int) -> None:
        """Set the sizes of the batch after `step` steps with `n_tokens` tokens."""
        self.global_batch_size, self.seq_len = self._sizes(step, n_tokens)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of the next global batch."""
        return self.global_batch_size * self.seq_len * self._sequences_per_sample

    def _sizes(self, step: int, n_tokens: int) -> tuple[int, int]:
        size = value_at(self._changes, self._first_size, step, n_tokens)
        return size, value_at(self._seq_len_changes, self._first_seq_len, step, n_tokens)

    def ahead(self, last_step: int, step: int, n_tokens: int) -> tuple[int, int]:
        """Return the samples and tokens of the steps after `step`, which ends at `n_tokens`, up to `last_step`."""
        if not (self._changes or self._seq_len_changes):
            n_steps = max(0, last_step - step)
            return n_steps * self.global_batch_size, n_steps * self.tokens_per_step
        n_samples, end = 0, n_tokens
        for taken in range(step, last_step):
            size, seq_len = self._sizes(taken, end)
            n_samples, end = n_samples + size, end + size * seq_len * self._sequences_per_sample
        return n_samples, end - n_tokens

    def last_step(self, step: int) -> int:
        """Return the last step of a run that has taken `step` steps."""
        if self._n_samples is None:
            return self._steps
        n_batches = -(-max(0, self._n_samples - self.n_samples_read) // self.global_batch_size)
        end = self.data_step + 1 + n_batches
        return step + n_batches - sum(max(0, min(span.stop, end) - span.start) for span in self._skipped_ahead())

    def data_steps(self, n_steps: int) -> int:
        """Return `data_step` after `n_steps` more steps, at least 1."""
        end = self.data_step + 1 + n_steps
        for skipped in self._skipped_ahead():
            if skipped.start < end:
                end += len(skipped)
        return end - 1

    def samples_read_at(self, last_step: int, step: int, n_tokens: int = 0) -> int:
        """Return the value of `n_samples_read` after `last_step`, if the current step is `step`. Batches yet to be
        skipped count with the current size."""
        if last_step <= step:
            return self.n_samples_read
        n_skipped = self.data_steps(last_step - step) - self.data_step - (last_step - step)
        n_samples, _ = self.ahead(last_step, step, n_tokens)
        return self.n_samples_read + n_samples + n_skipped * self.global_batch_size

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
