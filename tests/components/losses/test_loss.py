"""The chunked loss against the cross entropy of PyTorch on whole logits."""

import pytest
import torch
import torch.nn.functional as F

from torchtitan.components.losses.loss import CrossEntropyLoss
from torchtitan.tools.errors import UserError


def value_and_gradients(loss, hidden, weight, labels, scale=0.37):
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    value = loss(hidden, weight, labels)
    # A factor after the loss, like the division by the number of tokens.
    (value * scale).backward()
    return value, hidden.grad, weight.grad


def plain(hidden, weight, labels):
    logits = F.linear(hidden, weight).flatten(0, 1).float()
    return F.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    labels = torch.randint(50, (3, 7))
    labels[0, :4] = labels[2] = -100
    return torch.randn(3, 7, 16), torch.randn(50, 16), labels


@pytest.mark.parametrize("chunk_tokens", [0, 1, 4, 7, 21, 1000])
def test_value_and_gradients_match_the_plain_loss(tensors, chunk_tokens):
    ours = CrossEntropyLoss.Config(chunk_tokens=chunk_tokens).build()
    results = zip(
        value_and_gradients(ours, *tensors), value_and_gradients(plain, *tensors), strict=True
    )
    for result, expected in results:
        # Float32 sums over 21 tokens in a different order.
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


def test_bfloat16_error_is_not_larger_than_the_plain_loss(tensors):
    hidden, weight, labels = tensors
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    exact = value_and_gradients(
        lambda h, w, y: F.cross_entropy((h @ w.T).flatten(0, 1), y.flatten(), reduction="sum"),
        hidden.double(), weight.double(), labels,
    )  # fmt: skip
    ours = value_and_gradients(
        CrossEntropyLoss.Config(chunk_tokens=4).build(), hidden, weight, labels
    )
    theirs = value_and_gradients(plain, hidden, weight, labels)
    for result, reference, truth in zip(ours, theirs, exact, strict=True):
        error, allowed = ((x.double() - truth).norm().item() for x in (result, reference))
        # Both losses round gradients to bfloat16 at the same places; the factor 1.5 allows for
        # chance.
        assert error <= 1.5 * allowed + 1e-6
        assert result.dtype == reference.dtype


def test_logits_are_computed_in_chunks(tensors):
    sizes = []

    class Spy(CrossEntropyLoss):
        def from_logits(self, logits_NV, labels_N):
            sizes.append(logits_NV.shape[0])
            return super().from_logits(logits_NV, labels_N)

    value_and_gradients(Spy.Config(chunk_tokens=4).build(), *tensors)
    assert sizes == [4, 4, 4, 4, 4, 1]


def test_a_frozen_output_weight_gets_no_gradient(tensors):
    hidden, weight, labels = tensors
    hidden.requires_grad_()
    CrossEntropyLoss.Config(chunk_tokens=4).build()(hidden, weight, labels).backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_without_gradients_the_value_is_the_same(tensors):
    hidden, weight, labels = tensors
    weight = torch.nn.Parameter(weight)
    seen = []

    class Spy(CrossEntropyLoss):
        def from_logits(self, logits_NV, labels_N):
            seen.append(logits_NV.requires_grad)
            return super().from_logits(logits_NV, labels_N)

    with torch.no_grad():
        value = Spy.Config(chunk_tokens=4).build()(hidden, weight, labels)
    torch.testing.assert_close(value, plain(*tensors), rtol=1e-5, atol=0)
    assert seen == [False] * 6  # no gradient is computed needlessly


def test_a_negative_chunk_is_rejected():
    with pytest.raises(UserError, match=r"--loss\.chunk_tokens is -1, but must be at least 0"):
        CrossEntropyLoss.Config(chunk_tokens=-1).validate()
