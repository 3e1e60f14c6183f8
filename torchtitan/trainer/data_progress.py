"""`DataProgress`: the amount of data that a run has read, and the run's last step."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torchtitan.config.schedule import Change, change_at, parse_changes
from torchtitan.config.sections import TrainingConfig, parse_step_ranges
from torchtitan.tools.errors import UserError


class Stretch(NamedTuple):
    """Consecutive steps with batches of one size: the steps after `step`, and the changes in
    effect."""

    step: int
    n_steps: int
    tokens_per_step: int
    batch: Change
    window: Change


class DataProgress:
    """Count a run's data in global batches and in samples, and compute the last step.

    Batches are counted in data order, including skipped ones (`skip_data`). A resumed run may
    change the batch size, so only the samples tell how much data is left. `n_samples` is the total
    of all epochs; None: `steps` determines the last step. `global_batch_size` is the size of the
    first batch, before `batch_schedule`.
    """

    def __init__(
        self,
        config: TrainingConfig,
        n_samples: int | None,
        global_batch_size: int,
        sequences_per_sample: int,
    ):
        self.data_step = 0
        """Global batches read, including skipped ones."""
        self.n_samples_read = 0
        """Samples read by all ranks."""
        self._steps = config.steps
        self._n_samples = None if config.epochs is None else n_samples
        self._sequences_per_sample = sequences_per_sample
        self._batches = parse_changes("batch_schedule", global_batch_size, config.batch_schedule)
        self._windows = parse_changes("seq_len_schedule", config.seq_len, config.seq_len_schedule)
        self.follow_schedule(0, 0)
        self._skipped: list[range] = []  # ascending and disjoint
        for span in sorted(parse_step_ranges(config.skip_data), key=lambda span: span.start):
            end = self._skipped[-1].stop if self._skipped else 1
            self._skipped.append(range(max(span.start, end), max(span.stop, end)))

    @property
    def next_is_skipped(self) -> bool:
        """True if the next global batch is to be skipped."""
        return any(self.data_step + 1 in span for span in self._skipped)

    def count_batch(self) -> None:
        self.data_step += 1
        self.n_samples_read += self.global_batch_size

    def follow_schedule(self, step: int, n_tokens: int) -> None:
        """Set the samples, the length of windows and the tokens of the global batch after `step`
        steps with `n_tokens` tokens."""
        (following,) = self.stretches(step + 1, step, n_tokens)
        self.global_batch_size, self.seq_len = following.batch.value, following.window.value
        self.tokens_per_step = following.tokens_per_step

    def check_schedules(self) -> None:
        """Raise `UserError` for a change of batches or windows that never takes effect."""
        used = {
            change
            for stretch in self.stretches(self._steps, 0, 0)
            for change in (stretch.batch, stretch.window)
        }
        for change in self._batches + self._windows:
            if change not in used:
                raise UserError(
                    f"{change.text} never takes effect in {self._steps} steps (--training.steps); "
                    "list changes in the order in which the run reaches them"
                )

    def stretches(self, last_step: int, step: int, n_tokens: int) -> Iterator[Stretch]:
        """Yield the steps after `step`, which ends at `n_tokens`, up to `last_step`."""
        while step < last_step:
            batch, window = (
                change_at(changes, step, n_tokens) for changes in (self._batches, self._windows)
            )
            tokens_per_step = batch.value * window.value * self._sequences_per_sample
            ahead = [
                change.steps_ahead(step, n_tokens, tokens_per_step)
                for change in self._batches + self._windows
            ]
            n_steps = min([last_step - step, *(n for n in ahead if n > 0)])
            yield Stretch(step, n_steps, tokens_per_step, batch, window)
            step, n_tokens = step + n_steps, n_tokens + n_steps * tokens_per_step

    def tokens_at(self, last_step: int, step: int, n_tokens: int) -> int:
        """Return the tokens up to `last_step`, if `step` ends at `n_tokens`."""
        return n_tokens + sum(
            part.n_steps * part.tokens_per_step
            for part in self.stretches(last_step, step, n_tokens)
        )

    def last_step(self, step: int) -> int:
        """Return the last step of a run that has taken `step` steps."""
        if self._n_samples is None:
            return self._steps
        n_batches = -(-max(0, self._n_samples - self.n_samples_read) // self.global_batch_size)
        first, end = self.data_step + 1, self.data_step + 1 + n_batches
        return (
            step
            + n_batches
            - sum(max(0, min(span.stop, end) - max(span.start, first)) for span in self._skipped)
        )

    def data_steps(self, n_steps: int) -> int:
        """Return `data_step` after `n_steps` more steps, at least 1."""
        first, end = self.data_step + 1, self.data_step + 1 + n_steps
        for span in self._skipped:
            if span.start < end:
                end += max(0, span.stop - max(span.start, first))
        return end - 1

    def samples_read_at(self, last_step: int, step: int, n_tokens: int = 0) -> int:
        """Return the value of `n_samples_read` after `last_step`, if the current step is `step`.
        Batches yet to be skipped count with the current size."""
        if last_step <= step:
            return self.n_samples_read
        n_skipped = self.data_steps(last_step - step) - self.data_step - (last_step - step)
        n_samples = sum(
            part.n_steps * part.batch.value for part in self.stretches(last_step, step, n_tokens)
        )
        return self.n_samples_read + n_samples + n_skipped * self.global_batch_size

    def state_dict(self) -> dict[str, int]:
        return {"data_step": self.data_step, "n_samples_read": self.n_samples_read}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from a saved state, with any batch size."""
        self.data_step, self.n_samples_read = state["data_step"], state["n_samples_read"]
