"""Mixing: each source within one window of its share at every moment, whatever the weights and the window sizes."""

import json

import numpy as np
import pytest

from torchtitan.components.data.plan import Mixture
from torchtitan.tools.errors import UserError

CAPACITY = 1000


def deal(mixture, sizes, n_windows):
    """Deal `n_windows` windows, source i's k-th one with `sizes[i][k]` tokens; gives the sources in order, and checks
    the bound against shares that are computed here."""
    next_of = [0] * len(sizes)
    order = []
    for _ in range(n_windows):
        source = mixture.choose({i: int(sizes[i][next_of[i]]) for i in mixture.released()})
        mixture.add_window(source, int(sizes[source][next_of[source]]))
        next_of[source] += 1
        order.append(source)
    return order


def largest_deviation(order, sizes, weights_at):
    """The most tokens by which any source was off its share, with `weights_at(k)` of window k."""
    n_sources = len(sizes)
    given, share, next_of, worst = np.zeros(n_sources), np.zeros(n_sources), [0] * n_sources, 0.0
    for k, source in enumerate(order):
        size = sizes[source][next_of[source]]
        next_of[source] += 1
        given[source] += size
        share += size * np.array(weights_at(k)) / np.sum(weights_at(k))
        worst = max(worst, np.abs(given - share).max())
    return worst


def random_sizes(rng, n_sources, n_windows):
    """Window sizes as packing gives them, or anything at all."""
    low = int(rng.choice([1, 100, 950, CAPACITY]))
    return rng.integers(low, CAPACITY + 1, (n_sources, n_windows))


@pytest.mark.parametrize("seed", range(60))
def test_within_one_window_of_the_share_at_every_moment(seed):
    rng = np.random.default_rng(seed)
    n_sources = int(rng.integers(1, 11))
    weights = rng.dirichlet(np.full(n_sources, rng.choice([0.2, 1.0, 10.0]))) + 1e-9
    if seed % 5 == 0:
        weights = np.ones(n_sources)
    if seed % 7 == 0:
        weights[0] = 0.0 if n_sources > 1 else 1.0
    sizes = random_sizes(rng, n_sources, 500)
    order = deal(Mixture(weights.tolist(), CAPACITY), sizes, 500)
    # A rounding error of the sums is all that may be added: shares are floats.
    assert largest_deviation(order, sizes, lambda k: weights) <= CAPACITY * (1 + 1e-5)
    assert weights[0] > 0 or 0 not in order


@pytest.mark.parametrize("seed", range(60))
def test_a_schedule_keeps_the_bound(seed):
    rng = np.random.default_rng(seed)
    n_sources, per_step = int(rng.integers(2, 11)), int(rng.integers(1, 9))
    steps = np.sort(rng.choice(np.arange(2, 60), size=int(rng.integers(1, 8)), replace=False))
    pieces = [(1, rng.dirichlet(np.full(n_sources, 0.5)))]
    pieces += [(int(step), rng.dirichlet(np.full(n_sources, 0.5))) for step in steps]
    sizes = random_sizes(rng, n_sources, 500)
    if seed % 3 == 0:  # nearly empty and full windows, which no mean foretells
        sizes = rng.choice([1, CAPACITY], (n_sources, 500))
    schedule = [(step, of_step.tolist()) for step, of_step in pieces[1:]]
    order = deal(Mixture(pieces[0][1].tolist(), CAPACITY, schedule, per_step), sizes, 500)

    def weights_at(k):
        return next(of_step for step, of_step in reversed(pieces) if step <= 1 + k // per_step)

    assert largest_deviation(order, sizes, weights_at) <= CAPACITY * (1 + 1e-5)


def test_weights_change_with_the_step():
    sizes = np.full((2, 400), CAPACITY)
    order = deal(Mixture([1, 0], CAPACITY, [(11, [0, 1]), (21, [1, 1])], windows_per_step=4), sizes, 160)
    assert set(order[:40]) == {0}
    assert set(order[40:80]) == {1}
    assert abs(np.mean(order[80:]) - 0.5) <= 1 / 80


def test_steps_that_were_done_count_as_such_when_a_step_has_more_windows():
    """200 steps of one weight, then of the other, whatever a step has been: 150 of 8 windows, 20 of 16, then of 4."""
    sizes, schedule = np.full((2, 4000), CAPACITY), [(201, [0, 1])]
    order: list[int] = []
    state = Mixture([1, 0], CAPACITY, schedule, 8).state_dict()
    for windows_per_step, n_steps in ((8, 150), (16, 20), (4, 40)):
        mixture = Mixture([1, 0], CAPACITY, schedule, windows_per_step)
        mixture.load_state_dict(json.loads(json.dumps(state)))
        order += deal(mixture, sizes, n_steps * windows_per_step)
        state = mixture.state_dict()
    assert order == [0] * (150 * 8 + 20 * 16 + 30 * 4) + [1] * (10 * 4)
    later = Mixture([1, 0], CAPACITY, schedule, 16)
    later.load_state_dict(state)
    assert set(deal(later, sizes, 100)) == {1}, "and it does not run backwards"


def test_equal_weights_of_full_windows_take_turns():
    assert deal(Mixture([3, 3, 3], CAPACITY), np.full((3, 9), CAPACITY), 9) == [0, 1, 2] * 3


def test_goes_on_from_any_saved_state():
    rng = np.random.default_rng(0)
    sizes = random_sizes(rng, 4, 300)
    arguments = ([0.1, 0.2, 0.3, 0.4], CAPACITY, [(20, [0.4, 0.3, 0.2, 0.1])], 3)
    order = deal(Mixture(*arguments), sizes, 100)
    for stop in range(100):
        first = Mixture(*arguments)
        deal(first, sizes, stop)
        second = Mixture(*arguments)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        given = [order[:stop].count(source) for source in range(4)]
        rest = [of_source[count:] for of_source, count in zip(sizes, given, strict=True)]
        assert deal(second, rest, 100 - stop) == order[stop:]


def test_what_will_have_been_given_is_estimated():
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
        ([1, 2], [(5, [1, 2, 3])], "3 weights .1 2 3. for 2 data sets"),
        ([1, 2], [(5, [1, 2]), (5, [2, 1])], "ascend.*5, 5"),
        ([1, 2], [(0, [1, 2])], "ascend"),
    ],
)
def test_useless_weights_are_refused(weights, schedule, message):
    with pytest.raises(UserError, match=message):
        Mixture(weights, CAPACITY, schedule)
