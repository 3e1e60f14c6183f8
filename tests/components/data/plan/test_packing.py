"""Packing algorithms: every sample in one window, balanced and dense windows."""

import itertools
import json
import math

import numpy as np
import pytest

from torchtitan.components.data.plan.packing import first_fit_decreasing, multipack, no_packing

PACKINGS = [first_fit_decreasing, multipack, no_packing]


def random_cases():
    rng = np.random.default_rng(0)
    for _ in range(60):
        capacity = int(rng.integers(1, 200))
        yield rng.integers(1, capacity + 1, int(rng.integers(0, 120))), capacity
    yield np.full(10, 5), 5
    yield np.full(10, 1), 64


def lognormal(n, capacity, seed=0):
    """Return lengths with a distribution like a chat dataset: mostly short, with a long tail."""
    lengths = np.random.default_rng(seed).lognormal(mean=5.0, sigma=0.8, size=n).astype(np.int64)
    return np.clip(lengths, 1, capacity)


def efficiency(lengths, windows, capacity):
    return lengths.sum() / (len(windows) * capacity)


@pytest.mark.parametrize("pack", PACKINGS)
def test_every_sample_is_in_one_window_within_capacity(pack):
    for lengths, capacity in random_cases():
        windows = pack(lengths, capacity)
        assert sorted(np.concatenate([np.empty(0, int), *windows]).tolist()) == list(
            range(len(lengths))
        )
        assert all(len(window) and lengths[window].sum() <= capacity for window in windows)
        assert all((np.diff(window) > 0).all() for window in windows)
        for window, repeated in zip(windows, pack(lengths.copy(), capacity), strict=True):
            np.testing.assert_array_equal(window, repeated)


def test_first_fit_decreasing_equals_its_definition():
    """The definition: put each sample, longest first, into the first window with room."""
    for lengths, capacity in random_cases():
        expected: list[list[int]] = []
        for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            for window in expected:
                if lengths[window].sum() + lengths[index] <= capacity:
                    window.append(index)
                    break
            else:
                expected.append([index])
        actual = [window.tolist() for window in first_fit_decreasing(lengths, capacity)]
        assert actual == [sorted(window) for window in expected]


def test_multipack_equals_its_definition():
    """The definition: put each sample, longest first, into the least full window. The number of
    windows is first fit's, or the next larger number (by 0.5 %) with which all samples fit."""
    n_more = 0
    for lengths, capacity in random_cases():
        n_first_fit = n_windows = len(first_fit_decreasing(lengths, capacity))
        while True:
            expected: list[list[int]] = [[] for _ in range(n_windows)]
            loads = [0] * n_windows
            for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
                least = loads.index(min(loads))
                expected[least].append(index)
                loads[least] += int(lengths[index])
            if max(loads, default=0) <= capacity:
                break
            n_windows += math.ceil(n_windows / 200)
        assert [window.tolist() for window in multipack(lengths, capacity)] == [
            sorted(window) for window in expected
        ]
        n_more += n_windows > n_first_fit
    assert n_more > 0


def test_multipack_may_need_one_more_window():
    """3 + 3 and 2 + 2 + 2 fit into two windows of 6, but the longest samples first are 3 + 2 + 2
    and 3 + 2."""
    lengths, capacity = np.array([3, 3, 2, 2, 2]), 6
    loads = [
        np.bincount(places, weights=lengths, minlength=2)
        for places in itertools.product(range(2), repeat=5)
    ]
    assert min(load.max() for load in loads) == capacity  # the best of all assignments
    assert len(first_fit_decreasing(lengths, capacity)) == 2
    assert [window.tolist() for window in multipack(lengths, capacity)] == [[0, 4], [1], [2, 3]]


def test_multipack_fills_windows_equally():
    """With about six samples per window, multipack needs up to 1 % more windows than first fit,
    filled evenly."""
    lengths = np.random.default_rng(0).integers(60, 290, 5000)
    loads, first_fit = (
        [int(lengths[window].sum()) for window in pack(lengths, 1024)]
        for pack in (multipack, first_fit_decreasing)
    )
    assert len(first_fit) <= len(loads) <= 1.01 * len(first_fit)
    assert min(loads) > 0.95 * np.mean(loads) and np.ptp(loads) < np.ptp(first_fit) / 2


@pytest.mark.parametrize("pack", [first_fit_decreasing, multipack])
def test_windows_are_nearly_full(pack):
    """At least 97 % full if samples are much shorter than the window."""
    lengths = lognormal(8192, 1024)
    assert efficiency(lengths, pack(lengths, 1024), 1024) >= 0.97


@pytest.mark.parametrize("pack", [first_fit_decreasing, multipack])
def test_windows_of_real_samples_are_nearly_full(pack, assets):
    rows = (assets / "sft" / "gsm8k_train.jsonl").read_text(encoding="utf-8").splitlines()
    # Estimate four characters per token.
    lengths = np.array([1 + sum(map(len, json.loads(row).values())) // 4 for row in rows])
    assert efficiency(lengths, pack(lengths, 1024), 1024) >= 0.97


def test_too_long_sample_fails_an_assertion():
    for pack in PACKINGS:
        with pytest.raises(AssertionError, match="fit"):
            pack(np.array([3, 9]), 8)
        with pytest.raises(AssertionError, match="fit"):
            pack(np.array([3, 0]), 8)
