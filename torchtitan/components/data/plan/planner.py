"""The planner: one global order of windows over all sources, from the lengths of the samples alone."""

import copy
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np

from torchtitan.components.data.plan.mixture import Mixture
from torchtitan.components.data.plan.packing import Packing, SourceStream, StreamSnapshot, Window
from torchtitan.components.data.plan.sampler import Array, Sampler, StepStatistics, without_arrays
from torchtitan.tools.errors import UserError


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A position of a planner, cheap to take: references to what does not change any more."""

    n_windows: int
    """Windows given before it."""
    mixture: dict[str, Any]
    streams: list[StreamSnapshot]


class Planner:
    """An iterator over the windows of all sources, in one order that is the same on every rank.

    Each source's samples are drawn by its sampler, `chunk` at a time, and packed; a `Mixture` deals the sources'
    windows. The order is a function of the arguments and of what was given to `observe`: ranks, workers and batches
    take windows from it as they like, and whoever counts windows can go on anywhere.

    Samples are numbered over all sources too: sample s of source i is `offsets[i] + s`.

    Args:
        lengths: for each source, the positions (n,) that its samples take, 1 to `capacity` each; n is at least 1.
        capacity: positions of a window.
        samplers: one per source, at their beginning, of as many samples.
        packing: how the samples of a chunk become windows.
        chunk: samples of one source that are packed together.
        weights: share of each source in the tokens; None: by their numbers of tokens, so that all are read equally
            often.
        schedule: steps and the weights from then on, see `Mixture`; only with weights.
        windows_per_step: windows of one training step, for the schedule; a resumed run may have others.
        max_epochs: how often each source may be read; None: without limit.
        names: of the sources, for messages.
        seed: orders the windows of a chunk.
        epochs: how often the sources are read. With weights the data ends when the first source has been read so often
            and is wanted again. None: without end.
        ahead: most windows that are planned before those trained on; what a step taught the samplers changes the
            samples drawn this many windows later. The same in a resumed run for the same samples.

    Raises:
        UserError: weights, schedule or limits cannot be used.
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
        self.names = list(names) if names is not None else [f"data set {i + 1}" for i in range(len(lengths))]
        self.offsets = np.cumsum([0, *(len(of_source) for of_source in lengths)])
        """Where each source's samples begin in the numbers over all sources, and the number of all samples."""
        self.n_tokens = [int(of_source.sum()) for of_source in lengths]
        """Positions that all samples of each source take."""
        self._streams = [
            SourceStream(i, of_source, capacity, sampler, packing=packing, chunk=chunk, seed=seed, epochs=epochs)
            for i, (of_source, sampler) in enumerate(zip(lengths, samplers, strict=True))
        ]
        if weights is None and schedule:
            raise UserError("a weight schedule needs --dataloader.weights, those before its first step")
        self._weighted = weights is not None
        self._mixture = Mixture(weights or self.n_tokens, capacity, schedule, windows_per_step)
        self.max_epochs: list[float | None] = list([None] * len(lengths) if max_epochs is None else max_epochs)
        """How often each source may be read; None: without limit."""
        if len(self.max_epochs) != len(lengths):
            raise UserError(
                f"{len(self.max_epochs)} values of --dataloader.max_epochs for {len(lengths)} data sets: give one each"
            )
        self.epochs = epochs
        """How often the sources are read; None: without end."""
        self._ahead = ahead
        self.is_adaptive = any(sampler.adaptive for sampler in samplers)
        """Whether the windows depend on what is observed, and not on the arguments alone."""
        self._observed: list[tuple[int, StepStatistics]] = []
        self._horizon = 0
        self._shared = {id(of_source): of_source for of_source in lengths}
        self._initial = copy.deepcopy(self, {**self._shared})

    def _from_start(self) -> "Planner":
        """Another planner at the beginning, where nothing has been observed."""
        planner = copy.deepcopy(self._initial, {**self._shared})
        planner._ahead = 0
        return planner

    @property
    def n_windows(self) -> int:
        """Windows given so far."""
        return self._mixture.n_windows

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Window:
        """The next window; `StopIteration` behind the last.

        Raises:
            UserError: a source would be read more often than its limit.
        """
        due = self.n_windows - self._ahead
        for at, statistics in self._observed:
            if at == due:
                self._teach(statistics)
        source, n_tokens = self._choose()
        limit = self.max_epochs[source]
        if limit is not None and self._mixture.given[source] + n_tokens > limit * self.n_tokens[source]:
            raise self._over_epoching(source, limit, n_tokens)
        self._mixture.deal(source, n_tokens)
        return self._streams[source].take()

    def _choose(self) -> tuple[int, int]:
        """The source of the next window, and its tokens."""
        sizes = {source: self._streams[source].next_size() for source in self._mixture.released()}
        if self._weighted and None in sizes.values():
            raise StopIteration
        left = {source: size for source, size in sizes.items() if size is not None}
        if not left:  # the released ones are over; the others end within a window of their share
            every = {source: stream.next_size() for source, stream in enumerate(self._streams)}
            left = {source: size for source, size in every.items() if size is not None}
        if not left:
            raise StopIteration
        source = self._mixture.choose(left)
        return source, left[source]

    def _over_epoching(self, source: int, limit: float, n_tokens: int) -> UserError:
        n_windows = max(self._horizon, self.n_windows + 1)
        estimated = self._mixture.share_after(n_windows)[source] / self.n_tokens[source]
        at_least = (self._mixture.given[source] + n_tokens) / self.n_tokens[source]
        times = max(min(estimated, self.epochs or math.inf), at_least)
        return UserError(
            f"{self.names[source]} would be read {times:.2f} times in {n_windows} windows, beyond its limit of "
            f"{limit:g}: train fewer steps, give it less weight, or allow more by --dataloader.max_epochs"
        )

    def epochs_after(self, n_windows: int) -> list[float]:
        """How often each source has been read, by its tokens, after the first `n_windows` or at the end, whatever the
        limits, and as if nothing were observed: found by planning as many tokens as all sources have, and behind those
        estimated by the mean tokens of a window."""
        planner = self._from_start()
        planner.max_epochs = [None] * len(self.max_epochs)
        mixture, n_all = planner._mixture, sum(self.n_tokens)
        for _ in itertools.islice(planner, n_windows):
            if sum(mixture.given) >= n_all and planner.n_windows < n_windows:
                tokens = mixture.share_after(n_windows)
                break
        else:
            tokens = [float(given) for given in mixture.given]
        most = self.epochs or math.inf
        return [min(given / total, most) for given, total in zip(tokens, self.n_tokens, strict=True)]

    @cached_property
    def windows_of_epochs(self) -> list[int] | None:
        """Windows of each epoch, exactly, found by planning them, in seconds per million samples; with weights, those
        of the sources together that are in it. None: without end, or not known because a sampler draws by what it
        observes.

        Raises:
            UserError: a source would be read more often than its limit.
        """
        if self.epochs is None or self.is_adaptive:
            return None
        counts = Counter(window.epoch for window in self._from_start())
        return [counts[epoch] for epoch in range(self.epochs)]

    def check_repetitions(self, n_windows: int) -> None:
        """Find out beforehand whether a source is read more often than its limit by the time that `n_windows` windows
        have been given: by planning from where this one stands, as if nothing more were observed.

        Raises:
            UserError: it is; the message says how often, estimated by the mean tokens of a window.
        """
        if all(limit is None for limit in self.max_epochs):
            return
        planner = self._from_start()
        planner.load_state_dict(self.state_dict())
        planner._horizon = n_windows
        for _ in itertools.islice(planner, max(0, n_windows - self.n_windows)):
            pass

    def observe(self, statistics: StepStatistics, n_windows: int) -> None:
        """Give the samplers what a training step found out.

        Args:
            statistics: of the step; `samples` are numbers over all sources.
            n_windows: windows trained on so far, those of the step included; more than in the call before.
        """
        if not self.is_adaptive:
            return
        assert self.n_windows <= n_windows + self._ahead, "planned further ahead than `ahead` says"
        # No position before `n_windows` will be saved any more, and those behind it have learned what is dropped here.
        self._observed = [entry for entry in self._observed if entry[0] >= n_windows - self._ahead]
        self._observed.append((n_windows, statistics))

    def _teach(self, statistics: StepStatistics) -> None:
        for i, stream in enumerate(self._streams):
            own = (statistics.samples >= self.offsets[i]) & (statistics.samples < self.offsets[i + 1])
            stream.sampler.observe(
                replace(
                    statistics,
                    samples=statistics.samples[own] - self.offsets[i],
                    sample_losses=statistics.sample_losses[own],
                )
            )

    def snapshot(self) -> Snapshot:
        """The position behind the last window."""
        return Snapshot(self.n_windows, self._mixture.state_dict(), [stream.snapshot() for stream in self._streams])

    def state_dict(self, snapshot: Snapshot | None = None) -> dict[str, Any]:
        """A position, JSON-ready, exact at any window; it has what was observed and not learned yet there.

        Args:
            snapshot: the position, not before the last `observe`d; None: where the planner stands.
        """
        snapshot = snapshot or self.snapshot()
        learned = snapshot.n_windows - 1 - self._ahead
        return {
            "mixture": snapshot.mixture,
            "streams": [
                stream.state_dict(position) for stream, position in zip(self._streams, snapshot.streams, strict=True)
            ],
            "observed": [
                {"n_windows": at, **without_arrays(vars(statistics))}
                for at, statistics in self._observed
                if at > learned
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position in the same data, with the same capacity, packing, chunk and number of sources."""
        self._mixture.load_state_dict(state["mixture"])
        for stream, of_stream in zip(self._streams, state["streams"], strict=True):
            stream.load_state_dict(of_stream)
        self._observed = []
        for entry in state["observed"]:
            samples, losses = np.array(entry["samples"], np.int64), np.array(entry["sample_losses"], np.float64)
            statistics = StepStatistics(entry["step"], entry["loss"], entry["grad_norm"], samples, losses)
            if entry["n_windows"] < self.n_windows - self._ahead:
                self._teach(statistics)  # the run that saved it planned further ahead
            else:
                self._observed.append((entry["n_windows"], statistics))
