"""Choice of the source of the next window, so that each source has its share of the tokens at every moment."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torchtitan.tools.errors import UserError


class Mixture:
    """Deals windows to sources by weight, deterministically and exactly to within one window.

    After every window, the tokens a source has given differ from its share (the sum over all windows of its weight
    times the window's tokens) by at most one window's capacity. A source is *released* if it has given no more than its
    share, and *due* when its share will cover its next window. The released source due earliest gives the next window.
    This is non-preemptive earliest-deadline-first scheduling of a processor that is never idle, in which no job is late
    by more than the longest job (cf. Tijdeman, "The chairman assignment problem", 1980, for windows of one size). If a
    source is due after a weight change, the windows until then count as full, so that a source with a falling weight
    receives its windows in time.

    Args:
        weights: of each source, at least 0; only their ratios matter.
        capacity: most tokens of a window.
        schedule: pairs of an ascending step and the weights from that step on.
        windows_per_step: windows of a training step; steps count from 1 and include steps with unused windows.

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
        if any(step < 1 for step in steps) or any(a >= b for a, b in zip(steps, steps[1:], strict=False)):
            raise UserError(f"the steps of the weight schedule must ascend, from 1 on, not be {steps}")
        self._weights_before = _normalized(weights, len(weights))
        self._schedule = [(step, _normalized(of, len(weights))) for step, of in schedule]
        self._windows_per_step = windows_per_step
        self._changed_at = (0, 0)  # steps and windows completed before `windows_per_step` applied
        self._pieces = self._pieces_by_window()
        self._capacity = capacity
        self.n_windows = 0
        self.given = [0] * len(weights)
        """Tokens dealt to each source."""
        self.share = [0.0] * len(weights)
        """Tokens due to each source."""

    def released(self) -> list[int]:
        """Return the sources that are not ahead of their share and may give the next window."""
        # Shares are sums of floats: a source exactly at its share may seem ahead by a rounding error.
        tolerance = 1e-6 * self._capacity
        weights = self._weights()
        behind = [share - given for share, given in zip(self.share, self.given, strict=True)]
        # A source with weight 0 may still be owed a window from before the weights changed.
        return [i for i, tokens in enumerate(behind) if tokens > (-tolerance if weights[i] else tolerance)]

    def choose(self, n_tokens: Mapping[int, int]) -> int:
        """Return the source due earliest, given the tokens of each candidate's next window."""
        return min(n_tokens, key=lambda source: (self._due(source, n_tokens[source]), source))

    def deal(self, source: int, n_tokens: int) -> None:
        self.share = [share + weight * n_tokens for share, weight in zip(self.share, self._weights(), strict=True)]
        self.given[source] += n_tokens
        self.n_windows += 1

    def share_after(self, n_windows: int) -> list[float]:
        """Estimate each source's tokens in the first `n_windows` by the mean window so far."""
        share = self.share
        for count, weights in self._ahead(n_windows):
            share = [tokens + weight * count * self._mean() for tokens, weight in zip(share, weights, strict=True)]
        return share

    def state_dict(self) -> dict[str, Any]:
        return {
            "n_windows": self.n_windows,
            "given": list(self.given),
            "share": list(self.share),
            "windows_per_step": self._windows_per_step,
            "changed_at": list(self._changed_at),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state; completed steps count whatever number of windows each had."""
        self.n_windows, self.given, self.share = state["n_windows"], list(state["given"]), list(state["share"])
        n_steps, n_windows = state["changed_at"]
        if state["windows_per_step"] != self._windows_per_step:
            n_steps += (self.n_windows - n_windows) // state["windows_per_step"]
            n_windows = self.n_windows
        self._changed_at = (n_steps, n_windows)
        self._pieces = self._pieces_by_window()

    def _pieces_by_window(self) -> list[tuple[int, list[float]]]:
        """Return pairs of a first window and the weights from there on; steps completed before `windows_per_step`
        changed may have numbers that are too low or negative."""
        n_steps, n_windows = self._changed_at
        scheduled = [
            (n_windows + (step - 1 - n_steps) * self._windows_per_step, weights) for step, weights in self._schedule
        ]
        return [(min([0, *(first for first, _ in scheduled)]), self._weights_before), *scheduled]

    def _due(self, source: int, n_tokens: int) -> float:
        """Return the tokens of all sources until `source`'s share covers its next window, if windows are full."""
        missing = self.given[source] + n_tokens - self.share[source]
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
        """Yield the numbers of windows from now up to `n_windows`, with their weights."""
        ends = [*(first for first, _ in self._pieces[1:]), math.inf]
        for (first, weights), end in zip(self._pieces, ends, strict=True):
            count = min(end, n_windows) - max(first, self.n_windows)
            if count > 0:
                yield count, weights

    def _weights(self) -> list[float]:
        return next(weights for first, weights in reversed(self._pieces) if first <= self.n_windows)

    def _mean(self) -> float:
        return sum(self.given) / self.n_windows if self.n_windows else self._capacity


def _normalized(weights: Sequence[float], n_sources: int) -> list[float]:
    if len(weights) != n_sources:
        raise UserError(f"{len(weights)} weights ({_listed(weights)}) for {n_sources} data sets: give one each")
    if not all(0 <= weight < math.inf for weight in weights) or sum(weights) == 0:
        raise UserError(f"the weights {_listed(weights)} must be finite, at least 0, and not all 0")
    return [weight / sum(weights) for weight in weights]


def _listed(weights: Sequence[float]) -> str:
    return " ".join(f"{weight:g}" for weight in weights)
