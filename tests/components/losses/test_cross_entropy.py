"""The closed form of the loss against autograd in float64."""

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan.components.losses import cross_entropy
from torchtitan.components.losses.loss import CrossEntropyLoss
from torchtitan.protocols.output_head import UNCHANGED, LogitTransform

TOKENS, DIM, VOCABULARY = 24, 16, 50
TRANSFORMS = {
    "unchanged": UNCHANGED,
    "multiplier": LogitTransform(multiplier=0.25),
    "soft cap": LogitTransform(softcap=3.0),
    "both": LogitTransform(multiplier=2.0, softcap=3.0),
}


class OwnLoss(CrossEntropyLoss):
    """A subclass, which autograd differentiates."""

    def from_logits(self, logits_NV: Tensor, labels_N: Tensor) -> Tensor:
        return super().from_logits(logits_NV, labels_N)


@pytest.fixture
def tensors() -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, output weights, and labels, some of them ignored."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(VOCABULARY, (2, TOKENS // 2), generator=generator)
    labels[0, 2:5] = labels[1, -1] = -100
    hidden = torch.randn(2, TOKENS // 2, DIM, generator=generator)
    return hidden, torch.randn(VOCABULARY, DIM, generator=generator), labels


def value_and_gradients(
    loss: Callable[..., Tensor], hidden: Tensor, weight: Tensor, labels: Tensor
) -> list[Tensor]:
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    value = loss(hidden, weight, labels)
    (value / TOKENS).backward()
    return [value.detach(), hidden.grad, weight.grad]


def exact(
    transform: LogitTransform, hidden: Tensor, weight: Tensor, labels: Tensor
) -> list[Tensor]:
    """The loss and its gradients by autograd in float64."""

    def whole(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        logits = (hidden @ weight.T).flatten(0, 1) * transform.multiplier
        if transform.softcap is not None:
            logits = (logits / transform.softcap).tanh() * transform.softcap
        return F.cross_entropy(logits, labels.flatten(), reduction="sum")

    return value_and_gradients(whole, hidden.double(), weight.double(), labels)


def errors(results: list[Tensor], truth: list[Tensor]) -> list[float]:
    return [
        ((result.double() - expected).norm() / expected.norm()).item()
        for result, expected in zip(results, truth, strict=True)
    ]


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("chunk_tokens", [0, 7])
def test_float32_equals_float64(tensors, name, chunk_tokens):
    """Within 1e-6 relative to the norm, about ten float32 roundings; with autograd, the error is as
    large."""
    for kind in (CrossEntropyLoss, OwnLoss):
        loss = functools.partial(
            kind.Config(chunk_tokens=chunk_tokens).build(), transform=TRANSFORMS[name]
        )
        assert (
            max(errors(value_and_gradients(loss, *tensors), exact(TRANSFORMS[name], *tensors)))
            < 1e-6
        )


@pytest.mark.parametrize("name", TRANSFORMS)
def test_bfloat16_is_as_exact_as_autograd(tensors, name):
    """Chunks of one token are the hardest sum of weight gradients. The factor 1.2 allows for
    chance."""
    hidden, weight, labels = tensors
    inputs = hidden.bfloat16(), weight.bfloat16(), labels
    truth = exact(TRANSFORMS[name], *inputs)
    own = functools.partial(OwnLoss.Config(chunk_tokens=0).build(), transform=TRANSFORMS[name])
    allowed = errors(value_and_gradients(own, *inputs), truth)
    for chunk_tokens in (0, 7, 1):
        loss = functools.partial(
            CrossEntropyLoss.Config(chunk_tokens=chunk_tokens).build(), transform=TRANSFORMS[name]
        )
        found = errors(value_and_gradients(loss, *inputs), truth)
        assert all(error <= 1.2 * limit + 1e-6 for error, limit in zip(found, allowed, strict=True))
        assert max(found) < 2**-7  # bfloat16 has 8 bits


def test_extreme_logits():
    """Logits of thousands neither overflow nor lose a token's loss."""
    hidden, weight = torch.tensor([[[1.0]], [[-1.0]]]), torch.tensor([[5e4], [-5e4], [0.0]])
    labels = torch.tensor([[0], [0]])
    results = value_and_gradients(CrossEntropyLoss.Config().build(), hidden, weight, labels)
    assert max(errors(results, exact(UNCHANGED, hidden, weight, labels))) < 1e-6


def test_tokens_without_labels_have_no_gradient(tensors):
    hidden, weight, labels = tensors
    loss = CrossEntropyLoss.Config(chunk_tokens=7).build()
    _, grad_hidden, _ = value_and_gradients(loss, hidden, weight, labels)
    assert torch.equal(grad_hidden.any(-1), labels != -100)
    value, *gradients = value_and_gradients(loss, hidden, weight, torch.full_like(labels, -100))
    assert value == 0
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_do_not_change_any_bit(tensors, dtype, monkeypatch):
    hidden, weight, labels = tensors
    inputs = hidden.to(dtype), weight.to(dtype), labels
    whole = value_and_gradients(CrossEntropyLoss.Config().build(), *inputs)
    monkeypatch.setitem(cross_entropy.BLOCK_ELEMENTS, "cpu", 3 * VOCABULARY)
    assert all(
        map(torch.equal, value_and_gradients(CrossEntropyLoss.Config().build(), *inputs), whole)
    )


@pytest.mark.parametrize("kind", [CrossEntropyLoss, OwnLoss])
def test_recorded_losses_equal_float64(tensors, kind):
    hidden, weight, labels = tensors
    loss = kind.Config(chunk_tokens=7).build()
    expected = value_and_gradients(loss, *tensors)
    with loss.recording() as recorded:
        results = value_and_gradients(loss, *tensors)
    assert all(map(torch.equal, results, expected))
    logits = (hidden.double() @ weight.double().T).flatten(0, 1)
    exact_losses = F.cross_entropy(logits, labels.flatten(), reduction="none")
    torch.testing.assert_close(torch.cat(recorded).double(), exact_losses, rtol=1e-6, atol=1e-6)
    assert not any(losses.requires_grad for losses in recorded)


class Allocations(TorchDispatchMode):
    """Record the operations, the largest float32 result, and the largest tensor filled with a
    value."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.elements = self.filled = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        self.names.add(name)
        if isinstance(result, Tensor) and result.dtype == torch.float32:
            self.elements = max(self.elements, result.numel())
        if isinstance(result, Tensor) and ("zeros" in name or "fill" in name):
            self.filled = max(self.filled, result.numel())
        return result


def test_bfloat16_logits_have_no_whole_copy_in_float32(tensors, monkeypatch):
    """No result in float32 is larger than a block or the weights, and no logits are filled or
    differentiated."""
    hidden, weight, labels = tensors
    monkeypatch.setitem(cross_entropy.BLOCK_ELEMENTS, "cpu", VOCABULARY)
    with Allocations() as seen:
        value_and_gradients(
            CrossEntropyLoss.Config().build(), hidden.bfloat16(), weight.bfloat16(), labels
        )
    assert VOCABULARY <= seen.elements < (TOKENS - 4) * VOCABULARY
    assert not {name for name in seen.names if "softmax" in name or "nll_loss" in name}
    assert seen.filled == hidden.numel()  # the gradient of hidden states, 0 without a label


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unchanged", "both"])
def test_compiled_equals_eager(tensors, name):
    """Up to float32 rounding; the compiler changes the order of operations."""
    loss = CrossEntropyLoss.Config(chunk_tokens=7).build()
    loss.compile("inductor")
    compiled = functools.partial(loss, transform=TRANSFORMS[name])
    assert (
        max(errors(value_and_gradients(compiled, *tensors), exact(TRANSFORMS[name], *tensors)))
        < 1e-6
    )
