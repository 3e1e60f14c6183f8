"""Window order and packing, against a token-by-token reference."""

import numpy as np
import pytest

from torchtitan.components.data.pretraining.order import permute
from torchtitan.components.data.pretraining.windows import count_windows, pack, padding_sample
from torchtitan.components.losses.loss import IGNORE_INDEX


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 63, 64, 65, 1000, 4097])
def test_permutation_is_a_bijection(size):
    assert sorted(permute(i, size, 7, 3) for i in range(size)) == list(range(size))


def test_permutations_of_epochs_and_seeds_differ():
    orders = {
        tuple(permute(i, 50, seed, epoch) for i in range(50))
        for seed in range(4)
        for epoch in range(4)
    }
    assert len(orders) == 16


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 10, 37])
def test_permutations_are_uniform(size):
    n_keys = 2000
    counts = np.zeros((size, size))
    for key in range(n_keys):
        for i in range(size):
            counts[i, permute(i, size, key, 0)] += 1
    chi_squared = ((counts - n_keys / size) ** 2 / (n_keys / size)).sum()
    freedom = (size - 1) ** 2
    # Five standard deviations of the chi-squared distribution, whose variance is twice its degrees
    # of freedom.
    assert chi_squared < freedom + 5 * np.sqrt(2 * freedom)


def random_documents(seed):
    """Return distinct tokens of documents of 0 to 12 tokens, and the offsets of the documents."""
    lengths = np.random.default_rng(seed).integers(0, 13, 40)
    return np.arange(100, 100 + lengths.sum()), np.cumsum(lengths) - lengths


def windows_of(tokens, offsets, seq_len, *, document_mask):
    for i in range(count_windows(len(tokens), seq_len)):
        start = i * seq_len
        part = tokens[start : start + seq_len + 1]
        starts = (
            offsets[(offsets >= start) & (offsets < min(start + len(part), len(tokens)))] - start
        )
        yield start, pack(part, starts, seq_len, document_mask=document_mask)


@pytest.mark.parametrize("seq_len", [1, 2, 5, 8, 64, 500])
@pytest.mark.parametrize("document_mask", [True, False])
def test_windows_equal_the_reference(seq_len, document_mask):
    tokens, offsets = random_documents(seq_len)
    first_of_document = set(offsets[offsets < len(tokens)].tolist())
    for start, sample in windows_of(tokens, offsets, seq_len, document_mask=document_mask):
        position = 0
        for t in range(seq_len):
            here, padding = start + t, start + t >= len(tokens) - 1
            position = (
                0
                if t == 0 or here in first_of_document or here == len(tokens) - 1
                else position + 1
            )
            hidden = document_mask and here + 1 in first_of_document
            assert sample["labels"][t] == (IGNORE_INDEX if padding or hidden else tokens[here + 1])
            if not padding:
                assert sample["input"][t] == tokens[here]
            if document_mask:
                assert sample["positions"][t] == position
        assert ("positions" in sample) == document_mask


@pytest.mark.parametrize("seq_len", [1, 3, 7, 50])
@pytest.mark.parametrize("document_mask", [True, False])
def test_every_token_is_predicted_exactly_once(seq_len, document_mask):
    tokens, offsets = random_documents(seq_len)
    labels = [
        sample["labels"]
        for _, sample in windows_of(tokens, offsets, seq_len, document_mask=document_mask)
    ]
    predicted = np.concatenate(labels)
    predicted = predicted[predicted != IGNORE_INDEX]
    first_of_document = offsets[offsets < len(tokens)] if document_mask else [0]
    assert sorted(predicted) == sorted(np.delete(tokens, np.unique(first_of_document)))


def test_number_of_windows():
    assert [count_windows(n, 4) for n in (0, 1, 2, 5, 6, 9, 10)] == [0, 0, 1, 1, 2, 2, 3]


@pytest.mark.parametrize("document_mask", [True, False])
def test_padding_has_no_labels(document_mask):
    sample, _ = padding_sample(6, document_mask=document_mask)
    assert (sample["labels"] == IGNORE_INDEX).all()
    assert sample.keys() == pack(np.arange(3), np.arange(1), 6, document_mask=document_mask).keys()
