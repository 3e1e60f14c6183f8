"""Mixtures: each source stays within one window of its share for any weights and window sizes."""

import json

import numpy as np
import pytest

from torchtitan.components.data.plan import Mixture
from torchtitan.tools.errors import UserError

CAPACITY = 1000


def deal(mixture, sizes, n_windows):
    """Choose the sources of `n_windows` windows; the k-th window of source i has `sizes[i][k]`
    tokens. Return the sources in order, and check the bound against independently computed
    shares."""
    next_window = [0] * len(sizes)
    order = []
    for _ in range(n_windows):
        source = mixture.choose({i: int(sizes[i][next_window[i]]) for i in mixture.released()})
        mixture.add_window(source, int(sizes[source][next_window[source]]))
        next_window[source] += 1
        order.append(source)
    return order


def largest_deviation(order, sizes, weights_at):
    """Return the largest deviation of a source from its share in tokens, with weights
    `weights_at(k)` for window k."""
    n_sources = len(sizes)
    read_tokens, share, next_window, worst = (
        np.zeros(n_sources),
        np.zeros(n_sources),
        [0] * n_sources,
        0.0,
    )
    for k, source in enumerate(order):
        size = sizes[source][next_window[source]]
        next_window[source] += 1
        read_tokens[source] += size
        share += size * np.array(weights_at(k)) / np.sum(weights_at(k))
        worst = max(worst, np.abs(read_tokens - share).max())
    return worst


def random_sizes(rng, n_sources, n_windows):
    """Return window sizes typical of packing, or arbitrary ones."""
    low = int(rng.choice([1, 100, 950, CAPACITY]))
    return rng.integers(low, CAPACITY + 1, (n_sources, n_windows))


@pytest.mark.parametrize("seed", range(60))
def test_each_source_stays_within_one_window_of_its_share(seed):
    rng = np.random.default_rng(seed)
    n_sources = int(rng.integers(1, 11))
    weights = rng.dirichlet(np.full(n_sources, rng.choice([0.2, 1.0, 10.0]))) + 1e-9
    if seed % 5 == 0:
        weights = np.ones(n_sources)
    if seed % 7 == 0:
        weights[0] = 0.0 if n_sources > 1 else 1.0
    sizes = random_sizes(rng, n_sources, 500)
    order = deal(Mixture(weights.tolist(), CAPACITY), sizes, 500)
    # Shares are floats, so the tolerance is the rounding error of the sums.
    assert largest_deviation(order, sizes, lambda k: weights) <= CAPACITY * (1 + 1e-5)
    assert weights[0] > 0 or 0 not in order


@pytest.mark.parametrize("seed", range(60))
def test_schedule_keeps_the_bound(seed):
    rng = np.random.default_rng(seed)
    n_sources, per_step = int(rng.integers(2, 11)), int(rng.integers(1, 9))
    steps = np.sort(rng.choice(np.arange(2, 60), size=int(rng.integers(1, 8)), replace=False))
    pieces = [(1, rng.dirichlet(np.full(n_sources, 0.5)))]
    pieces += [(int(step), rng.dirichlet(np.full(n_sources, 0.5))) for step in steps]
    sizes = random_sizes(rng, n_sources, 500)
    if seed % 3 == 0:  # a mix of nearly empty and full windows, unpredictable from the mean
        sizes = rng.choice([1, CAPACITY], (n_sources, 500))
    schedule = [(step, weights.tolist()) for step, weights in pieces[1:]]
    order = deal(Mixture(pieces[0][1].tolist(), CAPACITY, schedule, per_step), sizes, 500)

    def weights_at(k):
        return next(weights for step, weights in reversed(pieces) if step <= 1 + k // per_step)

    assert largest_deviation(order, sizes, weights_at) <= CAPACITY * (1 + 1e-5)


def test_weights_change_with_the_step():
    sizes = np.full((2, 400), CAPACITY)
    order = deal(
        Mixture([1, 0], CAPACITY, [(11, [0, 1]), (21, [1, 1])], windows_per_step=4), sizes, 160
    )
    assert set(order[:40]) == {0}
    assert set(order[40:80]) == {1}
    assert abs(np.mean(order[80:]) - 0.5) <= 1 / 80


def test_completed_steps_count_if_the_batch_size_changes():
    """The weights change after 200 steps, for 150 steps of 8 windows, 20 of 16, and the rest of
    4."""
    sizes, schedule = np.full((2, 4000), CAPACITY), [(201, [0, 1])]
    order: list[int] = []
    state = Mixture([1, 0], CAPACITY, schedule, 8).state_dict()
    for windows_per_step, n_steps in ((8, 150), (16, 20), (4, 40)):
        mixture = Mixture([1, 0], CAPACITY, schedule, windows_per_step)
        mixture.load_state_dict(json.loads(json.dumps(state)))
        order += deal(mixture, sizes, n_steps * windows_per_step)
        state = mixture.state_dict()
    assert order == [0] * (150 * 8 + 20 * 16 + 30 * 4) + [1] * (10 * 4)
    resumed = Mixture([1, 0], CAPACITY, schedule, 16)
    resumed.load_state_dict(state)
    assert set(deal(resumed, sizes, 100)) == {1}, "and it does not run backwards"


def test_equal_weights_alternate():
    assert deal(Mixture([3, 3, 3], CAPACITY), np.full((3, 9), CAPACITY), 9) == [0, 1, 2] * 3


def test_resume_from_any_state_is_exact():
    rng = np.random.default_rng(0)
    sizes = random_sizes(rng, 4, 300)
    arguments = ([0.1, 0.2, 0.3, 0.4], CAPACITY, [(20, [0.4, 0.3, 0.2, 0.1])], 3)
    order = deal(Mixture(*arguments), sizes, 100)
    for stop in range(100):
        first = Mixture(*arguments)
        deal(first, sizes, stop)
        second = Mixture(*arguments)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        read_tokens = [order[:stop].count(source) for source in range(4)]
        rest = [
            source_sizes[count:] for source_sizes, count in zip(sizes, read_tokens, strict=True)
        ]
        assert deal(second, rest, 100 - stop) == order[stop:]


def test_estimate_of_future_tokens():
    mixture = Mixture([1, 3], CAPACITY, [(6, [1, 1])], windows_per_step=2)
    assert mixture.share_after(20) == pytest.approx([250 * 10 + 500 * 10, 750 * 10 + 500 * 10])
    deal(mixture, np.full((2, 50), 500), 4)
    assert mixture.share_after(20) == pytest.approx([125 * 10 + 250 * 10, 375 * 10 + 250 * 10])


@pytest.mark.parametrize(
    ("weights", "schedule", "message"),
    [
        ([1, -1], [], "1 -1"),
        ([0, 0], [], "not all 0"),
        ([1, float("nan")], [], "nan"),
        ([1, 2], [(5, [1, 2, 3])], r"weight_schedule must have one value per dataset \(2\), not 3"),
        ([1, 2], [(5, [1, 2]), (5, [2, 1])], "ascend.*5, 5"),
        ([1, 2], [(0, [1, 2])], "ascend"),
    ],
)
def test_invalid_weights_are_rejected(weights, schedule, message):
    with pytest.raises(UserError, match=message):
        Mixture(weights, CAPACITY, schedule)
