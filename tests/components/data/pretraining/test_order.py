"""Several sets of tokens in one run: exact shares, order, position."""

import json
from collections import Counter

import numpy as np
import pytest

from tests.components.data.helpers import raises, replace, take
from tests.components.data.pretraining.test_token_files import (
    write_litdata,
    write_megatron,
    write_raw,
)
from tests.components.data.test_dataloader import build, rows
from torchtitan.components.data import PretrainDataLoader
from torchtitan.components.data.pretraining.order import BlockOrder

SIZES = [300, 90, 50]
"""Documents of each set."""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Three sets in different formats, with weights."""
    folder = tmp_path_factory.mktemp("sets")
    rng = np.random.default_rng(0)
    sets = [
        [rng.integers(2, 900, int(rng.integers(4, 61))).tolist() for _ in range(size)]
        for size in SIZES
    ]
    paths = [
        write_megatron(folder / "a", sets[0]),
        write_litdata(folder / "b", sets[1]),
        write_raw(folder / "c.npy", sets[2]),
    ]
    return PretrainDataLoader.Config(
        dataset=paths, weights=[0.5, 0.2, 0.3], cache_dir=str(folder / "cache")
    )


def sources(batches):
    """Return the set of each window, from the numbers of its documents."""
    return [int(first) % 3 for batch in batches for first, _ in batch["documents"].tolist()]


def test_shares_are_exact(config, tokenizer):
    """Every ten windows hold five, two and three of the sets; in between, each is within one window
    of its share."""
    order = sources(take(build(config, tokenizer), 100))
    for first in range(0, 400, 10):
        assert Counter(order[first : first + 10]) == {0: 5, 1: 2, 2: 3}
    counts = np.cumsum(np.eye(3)[order], 0)
    assert np.abs(counts - np.outer(np.arange(1, 401), [0.5, 0.2, 0.3])).max() < 1 + 1e-9


@pytest.mark.parametrize("seed", range(20))
def test_shares_of_random_weights(seed):
    rng = np.random.default_rng(seed)
    weights = rng.integers(0, 9, int(rng.integers(1, 8))) / rng.choice([1, 4, 10])
    weights[0] += 1
    order = BlockOrder([5] * len(weights), weights.tolist(), shuffle=True, seed=seed)
    sets = [order.block(place)[0] for place in range(400)]
    share = np.outer(np.arange(1, 401), weights / weights.sum())
    assert np.abs(np.cumsum(np.eye(len(weights))[sets], 0) - share).max() < 1 + 1e-9
    for number in set(sets):  # each epoch of a set is complete
        blocks = [order.block(place)[1] for place in range(400) if sets[place] == number]
        assert all(
            sorted(blocks[i : i + 5]) == list(range(5)) for i in range(0, len(blocks) // 5 * 5, 5)
        )


def test_windows_come_from_their_set(config, tokenizer):
    """Windows with weights are the windows of each set by itself, in the same order."""
    mixed = take(build(config, tokenizer, batch=1), 60)
    for number in range(3):
        alone = replace(config, dataset=[config.dataset[number]], weights=[])
        own = take(build(alone, tokenizer, batch=1), 60)
        chosen = [
            batch for batch, source in zip(mixed, sources(mixed), strict=True) if source == number
        ]
        assert len(chosen) > 10
        for batch, other in zip(chosen, own, strict=False):
            assert batch["input"].equal(other["input"]) and batch["labels"].equal(other["labels"])


def test_without_weights_every_window_once_per_epoch(config, tokenizer):
    together = replace(config, weights=[])
    loader = build(together, tokenizer, batch=1, epochs=1)
    separate = []
    for dataset in config.dataset:
        separate += take(build(replace(together, dataset=[dataset]), tokenizer, batch=1, epochs=1))
    found = take(loader)
    assert loader.n_samples == len(separate) == len(found)
    assert sorted(b["input"].tolist() for b in found) == sorted(
        b["input"].tolist() for b in separate
    )
    assert len(set(sources(found)[:20])) > 1, "the sets are shuffled together"


@pytest.mark.parametrize("ranks, batch, workers", [(1, 8, 0), (4, 2, 0), (2, 4, 1)])
def test_order_is_the_same_for_any_layout(config, tokenizer, ranks, batch, workers):
    loaders = [
        build(
            replace(config, num_workers=workers),
            tokenizer,
            batch=batch,
            dp_rank=r,
            dp_world_size=ranks,
            epochs=1,
        )
        for r in range(ranks)
    ]
    steps = [rows(step) for step in zip(*loaders, strict=True)]
    assert steps == [rows([step]) for step in build(config, tokenizer, batch=8, epochs=1)]
    for loader in loaders:
        loader.close()


def test_an_epoch_ends_with_the_first_set(config, tokenizer):
    """It has all windows of one set, and no set more often than once."""
    loader = build(config, tokenizer, batch=1, epochs=1)
    counts = Counter(sources(take(loader)))
    sizes = [
        build(replace(config, dataset=[d], weights=[]), tokenizer, epochs=1).n_samples
        for d in config.dataset
    ]
    assert loader.n_samples == counts.total()
    assert max(counts[number] / size for number, size in enumerate(sizes)) == 1.0


def test_position(config, tokenizer):
    straight = take(build(config, tokenizer), 40)
    loader = build(config, tokenizer)
    take(loader, 17)
    state = json.loads(json.dumps(loader.state_dict()))
    assert len(json.dumps(state)) < 1000
    resumed = build(config, tokenizer, batch=2, seed=9)
    resumed.load_state_dict(state)
    assert rows(take(resumed, 46)) == rows(straight[17:])


def test_names_and_summary(config, tokenizer):
    loader = build(config, tokenizer)
    names = [loader.document_names(row) for batch in take(loader, 5) for row in batch["documents"]]
    assert {name.split(",")[0] for [name] in names} >= {"a.bin", "c.npy"}
    summary = loader.summary(100)
    assert [of.name for of in summary.sets] == config.dataset
    assert summary.windows_per_epoch == len(take(build(config, tokenizer, batch=1, epochs=1)))
    assert {of.report.format for of in summary.sets} == {"tokens"}
    sizes = [
        build(replace(config, dataset=[d], weights=[]), tokenizer, epochs=1).n_samples
        for d in config.dataset
    ]
    for n_windows in (100, 107):
        counts = Counter(sources(take(build(config, tokenizer, batch=1), n_windows)))
        expected = [counts[number] / size for number, size in enumerate(sizes)]
        assert [of.epochs for of in loader.summary(n_windows).sets] == pytest.approx(expected)


def test_identity_depends_on_sets_and_weights(config):
    changed = [replace(config, weights=[1, 1, 1]), replace(config, dataset=config.dataset[::-1])]
    assert all(other.identity() != config.identity() for other in changed)


def test_errors(config, tokenizer):
    with raises("--dataloader.weights must have one value per dataset (3), not 2"):
        replace(config, weights=[1, 2]).validate()
    with raises(
        "--dataloader.weights: the weights 1 -1 0 must be finite, at least 0, and not all 0"
    ):
        replace(config, weights=[1, -1, 0]).validate()
    with raises(
        "the shortest cycle with exactly these shares has 1,000,000 windows, more than 10,000; use"
    ):
        replace(config, weights=[0.333333, 0.333333, 0.333334][::-1]).validate()
    with raises("--dataloader.dataset is empty"):
        build(replace(config, dataset=[], weights=[]), tokenizer)
