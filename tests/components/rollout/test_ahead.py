"""Rollouts of later steps outside a trainer: ages against a simulation, and what runs beside an
update."""

import asyncio
import heapq
import itertools
import random
import time

import pytest

from tests.components.generation.test_generation import mixed_model
from torchtitan.components.generation import Engine, Sampling, Session
from torchtitan.components.rollout.ahead import Rollouts, RolloutsAhead, added, staleness_of
from torchtitan.components.rollout.rewards import Rewards
from torchtitan.components.rollout.rollout import RolloutEngine
from torchtitan.components.rollout.trajectory import Trajectory

UPDATE = 0.3  # seconds


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose time passes only while it waits for a timer, and at once."""

    def __init__(self):
        super().__init__()
        self.now = 0.0
        select = self._selector.select

        def skip(timeout: float | None):
            self.now += timeout or 0.0
            return select(0)

        self._selector.select = skip

    def time(self) -> float:
        return self.now


def sleeps_of(n_steps: int, seed: int) -> list[list[list[float]]]:
    """Return the seconds after each turn of each of three trajectories of each step."""
    draw = random.Random(seed)
    return [
        [[draw.uniform(0.2, 2) for _ in range(draw.randint(1, 3))] for _ in range(3)]
        for _ in range(n_steps)
    ]


async def play(sleeps: list[float], engine: RolloutEngine) -> Trajectory:
    """Draw a token in each turn."""
    trajectory = Trajectory()
    trajectory.append(engine.prompt)
    for seconds in sleeps:
        turn = await engine.generate(trajectory.tokens, 1)
        trajectory.append(turn.ids, turn.logprobs)
        await asyncio.sleep(seconds)
    trajectory.versions = engine.versions_of(trajectory)
    return trajectory


def simulated(sleeps: list[list[list[float]]], n_ahead: int) -> list[list[list[int]]]:
    """Return the version that draws each turn, by a queue of events: (time, step, trajectory,
    turn) is a turn that can be drawn, or after the last one, the end of a trajectory."""
    drawn = [[[] for _ in step] for step in sleeps]
    events: list[tuple[float, int, int, int]] = []
    n_open = [len(step) for step in sleeps]
    now, n_begun = 0.0, 0
    for version, step in enumerate(sleeps):
        while n_begun < min(version + 1 + n_ahead, len(sleeps)):
            for number in range(len(sleeps[n_begun])):
                heapq.heappush(events, (now, n_begun, number, 0))
            n_begun += 1
        n_drawn, wanted = 0, sum(map(len, step))
        while n_open[version] or (n_drawn < wanted and events and events[0][0] <= now):
            now = max(now, events[0][0])
            ready = []
            while events and events[0][0] <= now:  # one pass draws all that are ready
                ready.append(heapq.heappop(events))
            for _, begun, number, turn in ready:
                if turn == len(sleeps[begun][number]):
                    n_open[begun] -= 1
                    continue
                drawn[begun][number].append(version)
                n_drawn += 1
                after = now + sleeps[begun][number][turn]
                heapq.heappush(events, (after, begun, number, turn + 1))
        now += UPDATE
    return drawn


@pytest.mark.parametrize("n_ahead", [1, 2, 4])
def test_ages_equal_a_simulation(monkeypatch, n_ahead):
    """In virtual time, in which a token takes none. Ends that happen while the weights are updated
    are seen after it, in both."""
    monkeypatch.setattr(asyncio, "new_event_loop", VirtualLoop)
    engine = Engine(mixed_model(), sampling=Sampling(temperature=1.0))
    sleeps = sleeps_of(12, seed=n_ahead)
    expected = simulated(sleeps, n_ahead)
    ages = []
    with RolloutsAhead(engine) as ahead:
        for version, step in enumerate(sleeps):
            for begun in range(version + ahead.n_batches, min(version + 1 + n_ahead, 12)):
                engines = [
                    RolloutEngine(engine, None, Rewards([], []), [begun + 1], 9, f"{begun}/{n}")
                    for n in range(3)
                ]
                ahead.begin(Rollouts(list(map(play, sleeps[begun], engines)), engines, []))
            _, trajectories = ahead.finish_first(version)
            found = [[v for v in t.versions if v >= 0] for t in trajectories]
            assert found == expected[version]
            staleness = staleness_of([trajectories], version)
            own = [version - v for v in itertools.chain(*expected[version])]
            assert staleness == (sum(own), len(own), max(own))
            assert staleness.n_tokens == sum(map(len, step))
            ages.append(staleness)
            ahead._session._loop.now += UPDATE
    assert added(ages).most == n_ahead  # reached, and never exceeded
    assert 0 < added(ages).total < n_ahead * added(ages).n_tokens


def test_everything_but_texts_goes_on_beside_an_update():
    """The rollout asks a tool several times during the update, and then for a text, which waits
    until its end."""
    engine = Engine(mixed_model(), sampling=Sampling(temperature=1.0))
    seen = []

    async def asks() -> None:
        first = await engine.generate([1], max_new_tokens=1, key="a")
        for _ in range(5):
            await asyncio.sleep(0.01)
            seen.append("tool")
        second = await engine.generate([1, 2], max_new_tokens=1, key="b")
        seen.append((first.versions, second.versions))

    async def waits() -> None:
        await engine.generate([1, 2, 3], max_new_tokens=1, key="c")

    with Session(engine) as session:
        (long,) = session.start([asks()])
        session.finish(session.start([waits()]))
        assert seen == []
        with session.beside():
            time.sleep(0.5)
            assert seen == ["tool"] * 5
        assert seen == ["tool"] * 5
        engine.version = 1
        session.finish([long])
    assert seen[5:] == [([0], [1])]


def test_a_call_draws_a_share_of_the_tokens():
    """Of two texts of 40 tokens that begin together, the second ends in the second call, and in it
    a third begins."""
    engine = Engine(mixed_model(), sampling=Sampling(temperature=1.0))

    def rollouts(key: str) -> Rollouts:
        own = RolloutEngine(engine, None, Rewards([], []), [3], 40, key)

        async def answer() -> Trajectory:
            trajectory = Trajectory()
            trajectory.append(own.prompt)
            text = await own.generate(own.prompt)
            trajectory.append(text.ids, text.logprobs)
            trajectory.versions = own.versions_of(trajectory)
            return trajectory

        return Rollouts([answer()], [own], [])

    versions = []
    with RolloutsAhead(engine) as ahead:
        for version, keys in enumerate([("a", "b"), ("c",), ("d",), ()]):
            for key in keys:
                ahead.begin(rollouts(key))
            ((trajectory,),) = [ahead.finish_first(version)[1]]
            versions.append(trajectory.versions[1:])
    assert versions == [[0] * 40, [0] * 40, [1] * 40, [2] * 40]


def test_changed_texts_have_the_oldest_version():
    """A token that the rollout has moved is as old as the oldest one."""
    engine = Engine(mixed_model(), sampling=Sampling(temperature=1.0))
    own = RolloutEngine(engine, None, Rewards([], []), [3], 2, "k")

    async def edits() -> list[list[int]]:
        engine.version = 5
        first = await own.generate([3])
        engine.version = 7
        second = await own.generate([3, *first.ids, 4])
        kept, changed = Trajectory(), Trajectory()
        for trajectory, before in ((kept, [3]), (changed, [8, 3])):
            trajectory.append(before)
            trajectory.append(first.ids, first.logprobs)
            trajectory.append([4])
            trajectory.append(second.ids, second.logprobs)
        return [own.versions_of(kept), own.versions_of(changed)]

    (found,) = engine.run([edits()])
    assert found == [[-1, 5, 5, -1, 7, 7], [-1, -1, 5, 5, -1, 5, 5]]


def test_dropped_rollouts_are_counted_and_cleaned_up():
    engine = Engine(mixed_model(), sampling=Sampling(temperature=1.0))
    closed = []

    async def waits(number: int) -> Trajectory:
        try:
            await asyncio.sleep(100)
        finally:
            closed.append(number)
        return Trajectory()

    async def ends() -> Trajectory:
        return Trajectory()

    with RolloutsAhead(engine) as ahead:
        ahead.begin(Rollouts([ends()], [], []))
        ahead.begin(Rollouts([waits(0), waits(1)], [], []))
        ahead.finish_first(0)
        assert ahead.drop() == ahead.n_dropped == 2 and ahead.n_batches == 0
        assert sorted(closed) == [0, 1]
        ahead.begin(Rollouts([ends()], [], []))  # still usable
        assert ahead.finish_first(1)[1] == [Trajectory()]
