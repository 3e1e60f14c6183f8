"""Deterministic mixing of sources by weight."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NotRequired, TypedDict

from torchtitan.tools.errors import UserError


class MixtureState(TypedDict):
    """Position of a `Mixture`, with its attributes of the same names."""

    weights: NotRequired[list[float]]
    """Weights of `set_weights`."""
    n_windows: int
    given: list[int]
    """`tokens_read`"""
    share: list[float]
    windows_per_step: int
    changed_at: list[int]
    """Steps and windows completed before `windows_per_step` applied."""


class Mixture:
    """Selects the source of each window by weight, deterministically and exactly to within one
    window.

    After every window, the tokens read from a source differ from its share (the sum over all
    windows of its weight times the window's tokens) by at most one window's capacity. A source is
    *released* if it is not ahead of its share, and *due* when its share covers its next window. The
    released source with the earliest due time is next. This is non-preemptive
    earliest-deadline-first scheduling of a processor that is never idle: no job is late by more
    than the longest job (cf. Tijdeman, "The chairman assignment problem", 1980, for windows of one
    size). Due times after a weight change assume full windows, so that a source with a decreasing
    weight is read in time.

    Args:
        weights: weight of each source, at least 0; only ratios matter.
        capacity: maximum tokens of a window.
        schedule: pairs of a step, ascending, and the weights from this step on.
        windows_per_step: windows of a training step; steps count from 1.

    Raises:
        UserError: weights or steps are invalid.
    """

    def __init__(
        self,
        weights: Sequence[float],
        capacity: int,
        schedule: Sequence[tuple[int, Sequence[float]]] = (),
        windows_per_step: int = 1,
    ):
        steps = [step for step, _ in schedule]
        if any(step < 1 for step in steps) or any(
            a >= b for a, b in zip(steps, steps[1:], strict=False)
        ):
            raise UserError(
                "the steps of --dataloader.weight_schedule must ascend and be at least 1, not "
                f"{steps}"
            )
        check_weights("weights", weights, len(weights))
        for _, new in schedule:
            check_weights("weight_schedule", new, len(weights))
        self._configured = weights
        self._weights_before = _normalized(weights)
        self._schedule = [(step, _normalized(new)) for step, new in schedule]
        self._set: list[float] | None = None
        """Weights of `set_weights`."""
        self._windows_per_step = windows_per_step
        self._changed_at = (0, 0)  # steps and windows completed before `windows_per_step` applied
        self._pieces = self._pieces_by_window()
        self._capacity = capacity
        self.n_windows = 0
        self.tokens_read = [0] * len(weights)
        """Tokens read from each source."""
        self.share = [0.0] * len(weights)
        """Share of each source in tokens, according to the weights."""

    def released(self) -> list[int]:
        """Return the sources that are not ahead of their share."""
        # Shares are sums of floats: allow for rounding errors.
        tolerance = 1e-6 * self._capacity
        weights = self._weights()
        behind = [
            share - n_read for share, n_read in zip(self.share, self.tokens_read, strict=True)
        ]
        # A source with weight 0 may still be behind if it had another weight before.
        return [
            i
            for i, tokens in enumerate(behind)
            if tokens > (-tolerance if weights[i] else tolerance)
        ]

    def choose(self, n_tokens: Mapping[int, int]) -> int:
        """Return the source with the earliest due time, given each candidate's tokens in its next
        window."""
        return min(n_tokens, key=lambda source: (self._due(source, n_tokens[source]), source))

    def add_window(self, source: int, n_tokens: int) -> None:
        """Record that the next window comes from `source`."""
        self.share = [
            share + weight * n_tokens
            for share, weight in zip(self.share, self._weights(), strict=True)
        ]
        self.tokens_read[source] += n_tokens
        self.n_windows += 1

    def share_after(self, n_windows: int) -> list[float]:
        """Estimate each source's share of the first `n_windows` in tokens, from the mean number of
        tokens per window so far."""
        share = self.share
        mean = sum(self.tokens_read) / self.n_windows if self.n_windows else self._capacity
        for count, weights in self._ahead(n_windows):
            share = [
                tokens + weight * count * mean
                for tokens, weight in zip(share, weights, strict=True)
            ]
        return share

    def set_weights(self, weights: Sequence[float]) -> None:
        """Replace the weights from the next window on. Raise `UserError` for unsuitable ones, and
        under a schedule."""
        check_weights("weights", weights, len(self.share))
        if self._schedule:
            raise UserError(
                "weights cannot be set under --dataloader.weight_schedule, which changes them; "
                "leave it out"
            )
        self._set = list(weights)
        self._weights_before = _normalized(weights)
        self._pieces = self._pieces_by_window()

    def state_dict(self) -> MixtureState:
        state = MixtureState(
            n_windows=self.n_windows,
            given=list(self.tokens_read),
            share=list(self.share),
            windows_per_step=self._windows_per_step,
            changed_at=list(self._changed_at),
        )
        return state if self._set is None else {**state, "weights": self._set}

    def load_state_dict(self, state: MixtureState) -> None:
        """Restore a saved state, possibly with a different `windows_per_step`."""
        self.n_windows = state["n_windows"]
        self.tokens_read = list(state["given"])
        self.share = list(state["share"])
        self._set = None
        self._weights_before = _normalized(self._configured)
        if "weights" in state:
            self.set_weights(state["weights"])
        n_steps, n_windows = state["changed_at"]
        if state["windows_per_step"] != self._windows_per_step:
            n_steps += (self.n_windows - n_windows) // state["windows_per_step"]
            n_windows = self.n_windows
        self._changed_at = (n_steps, n_windows)
        self._pieces = self._pieces_by_window()

    def _pieces_by_window(self) -> list[tuple[int, list[float]]]:
        """Return pairs of a window and the weights from this window on. Windows may be negative for
        steps completed before `windows_per_step` changed."""
        n_steps, n_windows = self._changed_at
        scheduled = [
            (n_windows + (step - 1 - n_steps) * self._windows_per_step, weights)
            for step, weights in self._schedule
        ]
        return [(min([0, *(first for first, _ in scheduled)]), self._weights_before), *scheduled]

    def _due(self, source: int, n_tokens: int) -> float:
        """Return the tokens of all sources until `source`'s share covers its next window, assuming
        full windows."""
        missing = self.tokens_read[source] + n_tokens - self.share[source]
        elapsed = 0.0
        for count, weights in self._ahead(math.inf):
            weight, duration = weights[source], count * self._capacity
            if weight and missing <= weight * duration:
                return elapsed + missing / weight
            if weight:
                missing -= weight * duration
            elapsed += duration
        return elapsed

    def _ahead(self, n_windows: float) -> Iterator[tuple[float, list[float]]]:
        """Yield pairs of a number of windows and their weights, from the next window up to
        `n_windows`."""
        ends = [*(first for first, _ in self._pieces[1:]), math.inf]
        for (first, weights), end in zip(self._pieces, ends, strict=True):
            count = min(end, n_windows) - max(first, self.n_windows)
            if count > 0:
                yield count, weights

    def _weights(self) -> list[float]:
        return next(weights for first, weights in reversed(self._pieces) if first <= self.n_windows)


def check_per_dataset(option: str, values: Sequence[float | None], n_sources: int) -> None:
    """Raise `UserError` unless a data loader's option has a value for each of `n_sources`
    datasets."""
    if len(values) != n_sources:
        raise UserError(
            f"--dataloader.{option} must have one value per dataset ({n_sources}), not "
            f"{len(values)}"
        )


def check_can_set_weights(has_weights: bool, epochs: int | None) -> None:
    """Raise `UserError` if data has no weights to replace during a run, or a number of epochs."""
    if not has_weights:
        raise UserError("weights replace those of --dataloader.weights; give the initial ones")
    if epochs is not None:
        raise UserError(
            "weights cannot be set with --training.epochs, since they move the end of the data; "
            "set --training.steps"
        )


def check_weights(option: str, weights: Sequence[float], n_sources: int) -> None:
    """Raise `UserError` for weights of a data loader's option that do not suit `n_sources`
    datasets."""
    check_per_dataset(option, weights, n_sources)
    if not all(isinstance(weight, int | float) for weight in weights):
        raise UserError(f"--dataloader.{option}: the weights {[*weights]} must be numbers")
    if not all(0 <= weight < math.inf for weight in weights) or sum(weights) == 0:
        listed = " ".join(f"{weight:g}" for weight in weights)
        raise UserError(
            f"--dataloader.{option}: the weights {listed} must be finite, at least 0, and not all 0"
        )


def _normalized(weights: Sequence[float]) -> list[float]:
    return [weight / sum(weights) for weight in weights]
