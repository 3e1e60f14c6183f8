"""Plans the global order of all sources' windows from sample lengths."""

import copy
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NotRequired, Self, TypedDict

import numpy as np

from torchtitan.components.data.plan.mixture import (
    Mixture,
    MixtureState,
    check_can_set_weights,
    check_per_dataset,
)
from torchtitan.components.data.plan.packing import (
    Packing,
    SourceState,
    SourceStream,
    StreamSnapshot,
    Window,
)
from torchtitan.components.data.plan.sampler import Array, Sampler, StepStatistics
from torchtitan.tools.errors import UserError


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Position of a planner. Cheap to create: it refers to values that no longer change."""

    n_windows: int
    mixture: MixtureState
    streams: list[StreamSnapshot]


class ObservedState(TypedDict):
    """A step's statistics that are not applied yet: those of `StepStatistics` as lists, and the
    windows that were trained on until then. Lists may be missing in older positions."""

    n_windows: int
    step: int
    loss: float
    grad_norm: float
    samples: list[int]
    sample_losses: NotRequired[list[float]]
    sample_rewards: NotRequired[list[float]]


class PlannerState(TypedDict):
    """A position of a planner."""

    mixture: MixtureState
    streams: list[SourceState]
    observed: list[ObservedState]


class PlanOptions(TypedDict, total=False):
    """Arguments of `Planner` that a loader passes on."""

    names: Sequence[str]
    seed: int
    ahead: int
    weights: Sequence[float] | None
    schedule: Sequence[tuple[int, Sequence[float]]]
    max_epochs: Sequence[float | None]


class Planner:
    """Iterator over the windows of all sources, in the same order on every rank.

    The sampler of each source draws chunks of samples, which are packed into windows; a `Mixture`
    selects the source of each window. The order depends only on the arguments and the input of
    `observe`, not on ranks, workers or batches, so a count of windows is a position. Sample s of
    source i has the global number `offsets[i] + s`.

    Args:
        lengths: for each source, the positions (n,) of its samples, 1 to `capacity` each; n is at
            least 1.
        capacity: positions of a window.
        samplers: one new sampler per source.
        packing: packing method of a chunk.
        chunk: samples of one source that are packed at a time.
        weights: share of each source in the tokens; None: by size, so that all are read equally
            often.
        schedule: steps and new weights, see `Mixture`; requires `weights`.
        windows_per_step: windows of a training step, for the schedule; a resumed run may change it.
        max_epochs: maximum number of epochs of each source; None: no limit. `next` raises
            `UserError` if it is exceeded.
        names: names of the sources, for messages.
        seed: seed of the order of windows in a chunk.
        epochs: passes over the sources; with weights, the iterator ends when a source has completed
            them. None: endless.
        ahead: maximum number of windows planned before they are trained on; a step's statistics
            affect samples drawn this many windows later. A resumed run needs the same value to draw
            the same samples.

    Raises:
        UserError: weights, schedule or limits are invalid.
    """

    def __init__(
        self,
        lengths: Sequence[Array],
        capacity: int,
        samplers: Sequence[Sampler],
        *,
        packing: Packing = "ffd",
        chunk: int = 8192,
        weights: Sequence[float] | None = None,
        schedule: Sequence[tuple[int, Sequence[float]]] = (),
        windows_per_step: int = 1,
        max_epochs: Sequence[float | None] | None = None,
        names: Sequence[str] | None = None,
        seed: int = 0,
        epochs: int | None = None,
        ahead: int = 0,
    ):
        self.names = (
            list(names) if names is not None else [f"dataset {i + 1}" for i in range(len(lengths))]
        )
        self.offsets = np.cumsum([0, *(len(of_source) for of_source in lengths)])
        """Global number of each source's first sample, and the total."""
        self.n_tokens = [int(of_source.sum()) for of_source in lengths]
        """Positions of all samples of each source."""
        self._streams = [
            SourceStream(
                i,
                of_source,
                capacity,
                sampler,
                packing=packing,
                chunk=chunk,
                seed=seed,
                epochs=epochs,
            )
            for i, (of_source, sampler) in enumerate(zip(lengths, samplers, strict=True))
        ]
        if weights is None and schedule:
            raise UserError(
                "--dataloader.weight_schedule also needs --dataloader.weights, the initial weights"
            )
        self._weighted = weights is not None
        self._mixture = Mixture(weights or self.n_tokens, capacity, schedule, windows_per_step)
        self.max_epochs: list[float | None] = list(
            [None] * len(lengths) if max_epochs is None else max_epochs
        )
        check_per_dataset("max_epochs", self.max_epochs, len(lengths))
        self.epochs = epochs
        self.ahead = ahead
        """See the class; changed before the first window only."""
        self.is_adaptive = any(sampler.adaptive for sampler in samplers)
        """True if the windows depend on observed statistics."""
        self._observed: list[tuple[int, StepStatistics]] = []
        self._horizon = 0
        self._shared = {id(of_source): of_source for of_source in lengths}
        self._initial = copy.deepcopy(self, {**self._shared})

    def _from_start(self) -> "Planner":
        """Return a planner in the initial state, without observed statistics."""
        planner = copy.deepcopy(self._initial, {**self._shared})
        planner.ahead = 0
        return planner

    @property
    def n_windows(self) -> int:
        return self._mixture.n_windows

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Window:
        due = self.n_windows - self.ahead
        for at, statistics in self._observed:
            if at == due:
                self._apply_statistics(statistics)
        source, n_tokens = self._choose()
        limit = self.max_epochs[source]
        if (
            limit is not None
            and self._mixture.tokens_read[source] + n_tokens > limit * self.n_tokens[source]
        ):
            raise self._max_epochs_error(source, limit, n_tokens)
        self._mixture.add_window(source, n_tokens)
        return self._streams[source].next_window()

    def _choose(self) -> tuple[int, int]:
        sizes = {source: self._streams[source].next_size() for source in self._mixture.released()}
        if self._weighted and None in sizes.values():
            raise StopIteration
        candidates = {source: size for source, size in sizes.items() if size is not None}
        # all released sources have ended; the others end within a window of their share
        if not candidates:
            all_sizes = {source: stream.next_size() for source, stream in enumerate(self._streams)}
            candidates = {source: size for source, size in all_sizes.items() if size is not None}
        if not candidates:
            raise StopIteration
        source = self._mixture.choose(candidates)
        return source, candidates[source]

    def _max_epochs_error(self, source: int, limit: float, n_tokens: int) -> UserError:
        n_windows = max(self._horizon, self.n_windows + 1)
        estimated = self._mixture.share_after(n_windows)[source] / self.n_tokens[source]
        at_least = (self._mixture.tokens_read[source] + n_tokens) / self.n_tokens[source]
        times = max(min(estimated, self.epochs or math.inf), at_least)
        return UserError(
            f"{self.names[source]} would be read {times:.2f} times in {n_windows} windows, more "
            f"than its limit of {limit:g}; train fewer steps, reduce its weight, or increase "
            "--dataloader.max_epochs"
        )

    def epochs_after(self, n_windows: int) -> list[float]:
        """Return the epochs of each source, by tokens, after `n_windows` windows or at the end,
        ignoring limits and statistics. Exact for one pass over all tokens, then estimated from the
        mean number of tokens per window."""
        planner = self._from_start()
        planner.max_epochs = [None] * len(self.max_epochs)
        mixture, n_all = planner._mixture, sum(self.n_tokens)
        for _ in itertools.islice(planner, n_windows):
            if sum(mixture.tokens_read) >= n_all and planner.n_windows < n_windows:
                tokens = mixture.share_after(n_windows)
                break
        else:
            tokens = [float(n_read) for n_read in mixture.tokens_read]
        limit = self.epochs or math.inf
        return [
            min(n_read / total, limit) for n_read, total in zip(tokens, self.n_tokens, strict=True)
        ]

    @cached_property
    def windows_by_epoch(self) -> list[int] | None:
        """Number of windows in each epoch, over all sources; None: endless, or dependent on
        observed statistics. Takes seconds per million samples. Raises `UserError` if the limit of a
        source would be exceeded."""
        if self.epochs is None or self.is_adaptive:
            return None
        counts = Counter(window.epoch for window in self._from_start())
        return [counts[epoch] for epoch in range(self.epochs)]

    def check_repetitions(self, n_windows: int) -> None:
        """Raise `UserError` if `n_windows` windows, without further statistics, exceed the limit of
        a source. The message estimates the epochs of the source from the mean number of tokens per
        window."""
        if all(limit is None for limit in self.max_epochs):
            return
        planner = self._from_start()
        planner.load_state_dict(self.state_dict())
        planner._horizon = n_windows
        for _ in itertools.islice(planner, max(0, n_windows - self.n_windows)):
            pass

    def set_weights(self, weights: Sequence[float]) -> None:
        """Replace the weights from the next window on. Raise `UserError` if the data has no
        weights, or has `epochs`, whose end new weights would move."""
        check_can_set_weights(self._weighted, self.epochs)
        self._mixture.set_weights(weights)

    def observe(self, statistics: StepStatistics, n_windows: int) -> None:
        """Pass a training step's statistics, with global sample numbers, to the samplers;
        `n_windows` counts the windows trained on so far, including the step's, and must
        increase."""
        if not self.is_adaptive:
            return
        assert self.n_windows <= n_windows + self.ahead, "planned further ahead than `ahead` allows"
        # Positions before `n_windows` are no longer saved; later positions already include the
        # effect of the dropped entries.
        self._observed = [entry for entry in self._observed if entry[0] >= n_windows - self.ahead]
        self._observed.append((n_windows, statistics))

    def _apply_statistics(self, statistics: StepStatistics) -> None:
        for i, stream in enumerate(self._streams):
            stream.sampler.observe(statistics.of(int(self.offsets[i]), int(self.offsets[i + 1])))

    def snapshot(self) -> Snapshot:
        """Return the position after the last window."""
        return Snapshot(
            self.n_windows,
            self._mixture.state_dict(),
            [stream.snapshot() for stream in self._streams],
        )

    def state_dict(self, snapshot: Snapshot | None = None) -> PlannerState:
        """Return a position, by default the current one. A `snapshot` must not be older than the
        last `observe`."""
        snapshot = snapshot or self.snapshot()
        applied = snapshot.n_windows - 1 - self.ahead
        return {
            "mixture": snapshot.mixture,
            "streams": [
                stream.state_dict(position)
                for stream, position in zip(self._streams, snapshot.streams, strict=True)
            ],
            "observed": [
                ObservedState(
                    n_windows=at,
                    step=statistics.step,
                    loss=statistics.loss,
                    grad_norm=statistics.grad_norm,
                    samples=statistics.samples.tolist(),
                    sample_losses=statistics.sample_losses.tolist(),
                    sample_rewards=statistics.sample_rewards.tolist(),
                )
                for at, statistics in self._observed
                if at > applied
            ],
        }

    def load_state_dict(self, state: PlannerState) -> None:
        """Restore a position in the same data, with the same capacity, packing, chunk and number of
        sources."""
        self._mixture.load_state_dict(state["mixture"])
        for stream, stream_state in zip(self._streams, state["streams"], strict=True):
            stream.load_state_dict(stream_state)
        self._observed = []
        for entry in state["observed"]:
            statistics = StepStatistics(
                step=entry["step"],
                loss=entry["loss"],
                grad_norm=entry["grad_norm"],
                samples=np.array(entry["samples"], np.int64),
                sample_losses=np.array(entry.get("sample_losses", ()), np.float64),
                sample_rewards=np.array(entry.get("sample_rewards", ()), np.float64),
            )
            if entry["n_windows"] < self.n_windows - self.ahead:
                self._apply_statistics(statistics)  # saved by a run with a larger `ahead`
            else:
                self._observed.append((entry["n_windows"], statistics))
