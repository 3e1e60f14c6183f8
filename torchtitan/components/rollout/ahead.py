"""`RolloutsAhead`: rollouts of later steps, which run while the weights are updated."""

import itertools
from asyncio import Task
from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from torchtitan.components.data.base import Batch
from torchtitan.components.generation import Engine, Session
from torchtitan.components.generation.row import TextCoroutine
from torchtitan.components.rollout.rollout import RolloutEngine
from torchtitan.components.rollout.trajectory import Group, Trajectory

if TYPE_CHECKING:
    from torchtitan.components.data.plan.planner import Snapshot


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Rollouts of this rank's prompts in a global batch."""

    coroutines: list[TextCoroutine[Trajectory]]
    engines: list[RolloutEngine]
    """The engine of each rollout."""
    batches: list[Batch]
    """The prompts, as loaded."""
    documents: list[int] = field(default_factory=list)
    """Number of each rollout's prompt in the data."""
    position: "Snapshot | None" = None
    """Position in the data after these batches, as the loader's `read_position` returned it."""

    def n_sampled(self) -> int:
        """Return the number of tokens that the rollouts have sampled."""
        return sum(len(text.ids) for engine in self.engines for _, text in engine.sampled)


class RolloutsAhead:
    """Rollouts of the present and of later global batches, in the order of the data, which `begin`
    starts and `finish_first` takes. Use it in a `with` block; its end cancels the rollouts that
    have not ended.

    Texts are decoded only in `finish_first`, for all rollouts together; there, an unfinished text
    continues with the weights of that time, after all of its tokens. A call draws as many tokens as
    the rollouts that it returns have sampled, unless all others wait for something else, so that
    batches that have begun together do not also end together. Everything else that rollouts await
    also continues in a block of `beside`. All processes of the engine's group call
    `finish_first` together, and each waits for its own rollouts of that batch and for the others'.
    So with at most N later batches in flight, and a batch for each change of the weights at least,
    no token is older than N changes when it is taken, and no rollout is dropped for its age.

    Args:
        engine: used by nothing else.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self._session: Session | None = None
        self._in_flight: deque[tuple[Rollouts, list[Task[Trajectory]]]] = deque()
        self.n_dropped = 0
        """Rollouts that `drop` has ended."""

    def __enter__(self) -> "RolloutsAhead":
        self._session = Session(self.engine).__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        session, self._session = self._session, None
        self._in_flight.clear()
        if session is not None:
            session.__exit__(*exception)

    @property
    def n_batches(self) -> int:
        """Global batches in flight."""
        return len(self._in_flight)

    def begin(self, rollouts: Rollouts) -> None:
        """Start the rollouts of the next global batch."""
        assert self._session is not None
        self._in_flight.append((rollouts, self._session.start(rollouts.coroutines)))

    def finish_first(self, version: int) -> tuple[Rollouts, list[Trajectory]]:
        """Wait for the rollouts of the first batch in flight, with weights of this number; return
        them with their trajectories. Raise the error of any rollout in flight, also of a later
        batch."""
        assert self._session is not None
        self.engine.version = version
        rollouts, tasks = self._in_flight.popleft()
        return rollouts, self._session.finish(tasks, rollouts.n_sampled)

    def beside(self) -> AbstractContextManager[None]:
        """Return a context in which rollouts continue in another thread, except for their texts."""
        assert self._session is not None
        return self._session.beside()

    def drop(self) -> int:
        """End and count all rollouts in flight; return their number."""
        n_dropped = sum(len(tasks) for _, tasks in self._in_flight)
        self.n_dropped += n_dropped
        self.__exit__()
        self.__enter__()
        return n_dropped


class Staleness(NamedTuple):
    """Ages of sampled tokens: the number of steps between the weights that sampled a token and the
    weights that are trained on it."""

    total: int
    n_tokens: int
    most: int


def staleness_of(groups: Iterable[Group], version: int) -> Staleness:
    """Return the ages of the sampled tokens of trajectories, with weights of this number."""
    every = itertools.chain(*groups)
    ages = [version - n for trajectory in every for n in trajectory.versions if n >= 0]
    return Staleness(sum(ages), len(ages), max(ages, default=0))


def added(parts: Iterable[Staleness]) -> Staleness:
    """Return the token ages of several parts together."""
    totals, numbers, most = zip(*parts, strict=True)
    return Staleness(sum(totals), sum(numbers), max(most))
