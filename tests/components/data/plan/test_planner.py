"""Planner: epochs, global order, exact resume, repetition limits."""

import itertools
import json
import zlib
from collections import Counter
from typing import Any

import numpy as np
import pytest

from torchtitan.components.data.plan import Planner, Sampler, ShuffleSampler, StepStatistics
from torchtitan.tools.errors import UserError

CAPACITY = 64


def some_lengths(*n_samples, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 30 + 10 * i, n) for i, n in enumerate(n_samples)]


def shuffled(lengths, shuffle=True, seed=0):
    config = ShuffleSampler.Config(shuffle=shuffle)
    return [
        config.build(n_samples=len(source_lengths), seed=seed + i)
        for i, source_lengths in enumerate(lengths)
    ]


def make(lengths, *, samplers=None, chunk=50, **options):
    return Planner(lengths, CAPACITY, samplers or shuffled(lengths), chunk=chunk, **options)


def flat(windows):
    return [
        (window.source, window.epoch, window.samples.tolist(), window.n_tokens)
        for window in windows
    ]


@pytest.mark.parametrize("packing", ["ffd", "multipack", "none"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_sample_once_per_epoch(packing, shuffle):
    lengths = some_lengths(120, 77)
    windows = list(make(lengths, samplers=shuffled(lengths, shuffle), packing=packing, epochs=3))
    seen = Counter(
        (window.source, window.epoch, sample)
        for window in windows
        for sample in window.samples.tolist()
    )
    assert seen == Counter(
        (i, e, s) for i, of in enumerate(lengths) for e in range(3) for s in range(len(of))
    )
    for window in windows:
        assert window.n_tokens == lengths[window.source][window.samples].sum() <= CAPACITY
        assert packing != "none" or len(window.samples) == 1
    for source in range(2):  # no epoch begins before the previous one ends
        assert (np.diff([window.epoch for window in windows if window.source == source]) >= 0).all()


def test_sources_without_weights_are_read_equally_often():
    lengths = some_lengths(300, 100, 40)
    total = np.array([source_lengths.sum() for source_lengths in lengths])
    read_tokens = np.zeros(3)
    for window in make(lengths, epochs=2):
        read_tokens[window.source] += window.n_tokens
        assert np.abs(read_tokens - total / total.sum() * read_tokens.sum()).max() <= CAPACITY
    np.testing.assert_array_equal(read_tokens, 2 * total)


def test_weights_are_shares_of_the_tokens():
    lengths = some_lengths(100, 500)
    read_tokens = np.zeros(2)
    for window in itertools.islice(make(lengths, weights=[0.7, 0.3]), 400):
        read_tokens[window.source] += window.n_tokens
        assert np.abs(read_tokens - np.array([0.7, 0.3]) * read_tokens.sum()).max() <= CAPACITY


def test_weight_schedule():
    lengths = some_lengths(100, 500)
    planner = make(lengths, weights=[1, 0], schedule=[(6, [0, 1])], windows_per_step=4)
    sources = [window.source for window in itertools.islice(planner, 80)]
    assert set(sources[:20]) == {0} and set(sources[20:]) == {1}
    with pytest.raises(UserError, match="--dataloader.weights"):
        make(lengths, schedule=[(6, [0, 1])])


def test_weighted_data_ends_with_the_first_exhausted_source():
    lengths = [np.full(10, CAPACITY), np.full(1000, CAPACITY)]
    windows = list(make(lengths, weights=[1, 1], epochs=1))
    counts = Counter(window.source for window in windows)
    assert counts[0] == 10 and abs(counts[1] - 10) <= 1


def test_seed_sets_the_order():
    lengths = some_lengths(200)
    first = flat(itertools.islice(make(lengths), 30))
    assert flat(itertools.islice(make(lengths), 30)) == first
    assert flat(itertools.islice(make(lengths, seed=1), 30)) != first
    assert flat(itertools.islice(make(lengths, samplers=shuffled(lengths, seed=1)), 30)) != first


def test_windows_are_shuffled_after_packing():
    """First-fit-decreasing sorts windows by their longest sample; training must not see this
    order."""
    lengths = some_lengths(1000)
    longest = [lengths[0][window.samples].max() for window in make(lengths, chunk=1000, epochs=1)]
    assert abs(np.corrcoef(np.arange(len(longest)), longest)[0, 1]) < 0.3
    assert all(
        (np.diff(w.samples) > 0).all()
        for w in make(lengths, samplers=shuffled(lengths, False), epochs=1)
    )


def test_samples_keep_their_order_without_shuffling():
    lengths = some_lengths(100)
    windows = list(
        make(lengths, samplers=shuffled(lengths, shuffle=False), packing="none", epochs=1)
    )
    assert [int(window.samples[0]) for window in windows] == list(range(100))
    windows = list(make(lengths, samplers=shuffled(lengths, shuffle=False), chunk=100, epochs=1))
    first_samples = [int(window.samples[0]) for window in windows]
    assert first_samples == sorted(first_samples)


def test_sample_numbers_continue_across_sources():
    assert make(some_lengths(5, 7, 1)).offsets.tolist() == [0, 5, 12, 13]


@pytest.mark.parametrize("packing", ["ffd", "multipack", "none"])
def test_resume_from_any_window_is_exact(packing):
    lengths = some_lengths(40, 22)
    options: dict[str, Any] = {"packing": packing, "weights": [0.6, 0.4], "chunk": 15, "epochs": 3}
    windows = flat(make(lengths, **options))
    planner = make(lengths, **options)
    snapshots = []
    for stop in range(len(windows) + 1):
        snapshots.append(planner.snapshot())
        # this case has several times more windows
        if packing == "none" and stop % 5 and stop < len(windows):
            next(planner)
            continue
        state = json.loads(json.dumps(planner.state_dict()))
        other = make(lengths, samplers=shuffled(lengths, seed=99), **{**options, "seed": 99})
        other.load_state_dict(state)
        assert other.n_windows == stop
        assert flat(other) == windows[stop:]
        if stop < len(windows):
            assert flat([next(planner)]) == [windows[stop]]
    # Earlier states are still valid.
    for stop, snapshot in enumerate(snapshots):
        other = make(lengths, **options)
        other.load_state_dict(json.loads(json.dumps(planner.state_dict(snapshot))))
        assert flat(other) == windows[stop:]


def test_windows_are_counted_exactly():
    lengths = some_lengths(150, 80)
    planner = make(lengths, epochs=3)
    for _ in range(5):
        next(planner)
    assert sum(planner.windows_by_epoch) == 5 + sum(1 for _ in planner)
    assert make(lengths).windows_by_epoch is None


def test_too_many_repetitions_raise_early_and_at_the_limit():
    lengths = [np.full(10, CAPACITY), np.full(100, CAPACITY)]
    options: dict[str, Any] = {
        "weights": [0.5, 0.5],
        "max_epochs": [1, 1],
        "names": ["small.jsonl", "large.jsonl"],
    }
    planner = make(lengths, **options)
    windows = []
    with pytest.raises(
        UserError,
        match=r"small.jsonl would be read 1\.\d+ times.*limit of 1; .*max_epochs",
    ):
        for window in planner:
            windows.append(window)
    assert Counter(window.source for window in windows)[0] == 10
    planner = make(lengths, **options)
    planner.check_repetitions(len(windows))
    with pytest.raises(UserError, match="small.jsonl would be read"):
        planner.check_repetitions(len(windows) + 1)
    with pytest.raises(UserError, match=r"small.jsonl would be read 2\.50 times in 50 windows"):
        planner.check_repetitions(50)
    assert planner.n_windows == 0
    make(lengths, **{**options, "max_epochs": [3, None]}).check_repetitions(50)
    with pytest.raises(
        UserError, match=r"--dataloader.max_epochs must have one value per dataset \(2\), not 1"
    ):
        make(lengths, max_epochs=[1])


def test_limit_is_checked_from_the_current_position():
    """The weights change after 100 steps, here with 2 windows per step for 150 windows and then
    with 8."""
    lengths = [np.full(200, CAPACITY), np.full(2000, CAPACITY)]
    options: dict[str, Any] = {
        "weights": [1, 0],
        "schedule": [(101, [0, 1])],
        "max_epochs": [1, None],
    }
    first = make(lengths, **options, windows_per_step=2)
    for _ in range(150):
        next(first)
    first.check_repetitions(1000)
    resumed = make(lengths, **options, windows_per_step=8)
    resumed.load_state_dict(first.state_dict())
    with pytest.raises(UserError, match=r"dataset 1 would be read 1.75 times in 1000 windows"):
        resumed.check_repetitions(1000)  # 150 + 25 * 8 of 200
    resumed.check_repetitions(200)
    assert resumed.n_windows == 150


def test_reported_repetitions_do_not_exceed_the_epochs():
    lengths = some_lengths(100, 100)
    with pytest.raises(UserError, match=r"dataset 1 would be read 2\.00 times"):
        make(lengths, weights=[1, 1], max_epochs=[1.5, 9], epochs=2).check_repetitions(10**4)


def test_repetitions_are_estimated_without_a_full_plan():
    """A run of ten million windows would take minutes to plan."""
    lengths = some_lengths(60, 40)
    assert make(lengths, epochs=1).epochs_after(10**7) == [1, 1]
    planner = make(lengths, weights=[0.25, 0.75], schedule=[(5_000_001, [0.75, 0.25])])
    expected = [0.5 * 10**7 / (n_tokens / CAPACITY) for n_tokens in planner.n_tokens]
    # The estimate uses the fill of one epoch, exact to a few percent.
    assert planner.epochs_after(10**7) == pytest.approx(expected, rel=0.1)
    few = make(lengths, weights=[0.25, 0.75])
    read_tokens = np.zeros(2)
    for window in itertools.islice(few, 10):
        read_tokens[window.source] += window.n_tokens
    assert few.epochs_after(10) == pytest.approx(read_tokens / few.n_tokens)


def test_windows_of_each_epoch():
    lengths = some_lengths(150, 80)
    counts = Counter(window.epoch for window in make(lengths, epochs=3))
    assert make(lengths, epochs=3).windows_by_epoch == [counts[0], counts[1], counts[2]]


def test_limit_of_one_epoch_allows_exactly_one_epoch():
    lengths = some_lengths(100, 57)
    planner = make(lengths, max_epochs=[1, 1], epochs=1)
    n_windows = sum(planner.windows_by_epoch)
    planner.check_repetitions(n_windows)
    assert sum(1 for _ in planner) == n_windows


class LearningSampler(Sampler):
    """Sampler with a random order that depends on all its observations."""

    needs_sample_losses = True

    def __init__(self, config, *, n_samples, seed):
        super().__init__(config, n_samples=n_samples, seed=seed)
        self.learned: list[Any] = []
        self.drawn = 0

    @property
    def epoch(self):
        return self.drawn // self.n_samples

    def draw(self, n):
        n = min(n, self.n_samples - self.drawn % self.n_samples)
        self.drawn += n
        key = zlib.crc32(json.dumps([self.drawn, self.learned]).encode())
        return np.random.default_rng([key, self.seed]).integers(0, self.n_samples, n)

    def observe(self, statistics):
        self.learned.append([statistics.step, statistics.loss, statistics.samples.tolist()])
        assert len(statistics.samples) == len(statistics.sample_losses)

    def state_dict(self):
        return {"learned": list(self.learned), "drawn": self.drawn}

    def load_state_dict(self, state):
        self.learned, self.drawn = list(state["learned"]), state["drawn"]


def train(planner, n_steps, *, per_step, ahead, first=0):
    """Act as a loader that prepares `ahead` windows: return windows, observe steps, save the
    position of the last returned window. Return the windows and the state after each step."""
    prepared, handed_out, states = [], [], []
    for step in range(first, first + n_steps):
        for _ in range(per_step):
            while len(prepared) < ahead + 1:
                prepared.append((next(planner), planner.snapshot()))
            window, snapshot = prepared.pop(0)
            handed_out.append(window)
        samples = np.concatenate(
            [w.samples + planner.offsets[w.source] for w in handed_out[-per_step:]]
        )
        statistics = StepStatistics(step + 1, 1 / (step + 1), 1.0, samples, samples / 7.0)
        planner.observe(statistics, (step + 1) * per_step)
        states.append(json.loads(json.dumps(planner.state_dict(snapshot))))
    return flat(handed_out), states


@pytest.mark.parametrize(("per_step", "ahead"), [(1, 0), (3, 0), (1, 4), (3, 5), (2, 40)])
def test_sampler_state_resumes_exactly(per_step, ahead):
    lengths = some_lengths(40, 23)

    def fresh():
        samplers = [
            LearningSampler(LearningSampler.Config(), n_samples=len(source_lengths), seed=i)
            for i, source_lengths in enumerate(lengths)
        ]
        return make(lengths, samplers=samplers, chunk=6, ahead=ahead), samplers

    planner, samplers = fresh()
    assert planner.windows_by_epoch is None
    windows, states = train(planner, 40, per_step=per_step, ahead=ahead)
    steps, _, first_samples = zip(*samplers[0].learned, strict=True)
    assert list(steps) == list(range(1, len(steps) + 1)), "each step once, in order"
    assert len(steps) == (planner.n_windows - 1 - ahead) // per_step, "as soon as `ahead` allows"
    assert all(0 <= sample < 40 for samples in first_samples for sample in samples)
    for stop in range(1, 40, 3):
        other, _ = fresh()
        other.load_state_dict(states[stop - 1])
        rest, later = train(other, 40 - stop, per_step=per_step, ahead=ahead, first=stop)
        assert rest == windows[stop * per_step :]
        assert later[-1] == states[-1]


def test_resume_with_different_workers_observes_each_step_once():
    lengths = some_lengths(40)

    def fresh(ahead):
        sampler = LearningSampler(LearningSampler.Config(), n_samples=40, seed=0)
        return make(lengths, samplers=[sampler], chunk=6, ahead=ahead), sampler

    for before, after in itertools.permutations([0, 3, 8], 2):
        planner, _ = fresh(before)
        _, states = train(planner, 20, per_step=2, ahead=before)
        planner, sampler = fresh(after)
        planner.load_state_dict(states[-1])
        train(planner, 20, per_step=2, ahead=after, first=20)
        steps = [step for step, _, _ in sampler.learned]
        assert steps == list(range(1, len(steps) + 1)) and len(steps) >= 35


def test_planning_beyond_the_declared_windows_fails_an_assertion():
    lengths = some_lengths(40)
    sampler = LearningSampler(LearningSampler.Config(), n_samples=40, seed=0)
    planner = make(lengths, samplers=[sampler], ahead=1)
    for _ in range(4):
        next(planner)
    with pytest.raises(AssertionError, match="ahead"):
        planner.observe(StepStatistics(1, 1.0, 1.0, np.empty(0, np.int64), np.empty(0)), 2)
