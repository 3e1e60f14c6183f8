"""Data progress and the end of a run, compared with a batch-by-batch count."""

import json
import math
import random

import pytest

from torchtitan.config import TrainingConfig
from torchtitan.trainer.data_progress import DataProgress


def make(*, n_samples=None, batch=8, **config):
    epochs = 1 if n_samples is not None else None
    return DataProgress(
        TrainingConfig(epochs=epochs, **config), n_samples, batch, sequences_per_sample=1
    )


def read_step(length):
    """Count one step as the trainer does."""
    while length.next_is_skipped:
        length.count_batch()
    length.count_batch()


def random_skips(rng):
    """Random ranges that may overlap, touch, or start after the end."""
    return [
        f"{first}-{first + rng.randint(0, 4)}"
        for first in rng.choices(range(1, 30), k=rng.randint(0, 5))
    ]


@pytest.mark.parametrize("seed", range(30))
def test_predicted_progress_matches_reading(seed):
    rng = random.Random(seed)
    skips, n_samples = random_skips(rng), rng.randint(1, 200)
    length = make(n_samples=n_samples, batch=8, skip_data=skips)
    last, n_batches = length.last_step(0), math.ceil(n_samples / 8)
    left_out = [
        batch for batch in range(1, n_batches + 1) if any(batch in of for of in length._skipped)
    ]
    assert last == n_batches - len(left_out)
    expected = length.samples_read_at(last, 0)
    for step in range(last):
        assert length.last_step(step) == last
        assert length.samples_read_at(last, step) == expected
        behind = length.data_steps(1)
        read_step(length)
        assert length.data_step == behind
    assert length.n_samples_read == length.samples_read_at(last, last) == expected


def test_steps_from_the_configuration():
    length = make(steps=7, skip_data=["2", "4-5", "9-10"])
    assert length.last_step(0) == 7
    assert [length.data_steps(n) for n in range(1, 8)] == [1, 3, 6, 7, 8, 11, 12]
    assert length.samples_read_at(7, 0) == 12 * 8
    assert make(steps=10**12, skip_data=["5-1000000000000"]).data_steps(10) == 10**12 + 6


@pytest.mark.parametrize(("before", "after"), [(8, 16), (16, 8), (8, 6)])
def test_new_batch_size_loses_and_repeats_nothing(before, after):
    first = make(n_samples=120, batch=before)
    for _ in range(5):
        read_step(first)
    resumed = make(n_samples=120, batch=after)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    last = resumed.last_step(5)
    assert last == 5 + math.ceil((120 - 5 * before) / after)
    for _ in range(5, last):
        assert resumed.n_samples_read < 120
        read_step(resumed)
    assert resumed.n_samples_read >= 120


def test_complete_after_all_data():
    length = make(n_samples=10)
    for _ in range(4):
        read_step(length)
    assert length.last_step(4) == 4 and length.samples_read_at(4, 4) == 32
