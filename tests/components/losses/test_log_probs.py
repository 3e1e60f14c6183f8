"""Log-probabilities of tokens against plain PyTorch in float64."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan.components.losses import cross_entropy
from torchtitan.components.losses.cross_entropy import cross_entropy_
from torchtitan.components.losses.log_probs import token_log_probs
from torchtitan.protocols.output_head import UNCHANGED, LogitTransform

IGNORED = -100


def inputs(dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    hidden = torch.randn(2, 9, 8).to(dtype).requires_grad_()
    weight = torch.randn(13, 8).to(dtype).requires_grad_()
    labels = torch.randint(0, 13, (2, 9))
    labels[0, 2:5] = IGNORED
    return hidden, weight, labels, torch.randn(2, 9)


def reference(hidden, weight, labels, upstream, transform):
    """Values and gradients in float64, through full logits."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    logits = transform(hidden @ weight.T)
    values = -F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none"
    )
    (values * upstream.flatten().double()).sum().backward()
    return values.view(labels.shape), hidden.grad, weight.grad


@pytest.mark.parametrize(
    "transform", [UNCHANGED, LogitTransform(0.5), LogitTransform(1.5, softcap=2.0)], ids=str
)
@pytest.mark.parametrize("chunk_tokens", [4, 100])
def test_values_and_gradients_equal_float64(transform: LogitTransform, chunk_tokens: int) -> None:
    hidden, weight, labels, upstream = inputs()
    values = token_log_probs(hidden, weight, labels, transform=transform, chunk_tokens=chunk_tokens)
    (values * upstream).sum().backward()
    expected = reference(hidden, weight, labels, upstream, transform)
    for ours, exact in zip((values, hidden.grad, weight.grad), expected, strict=True):
        # float32: a few roundings of values up to about 10.
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)
    assert (values[0, 2:5] == 0).all() and (hidden.grad[0, 2:5] == 0).all()


def test_lower_precision_and_a_frozen_weight() -> None:
    hidden, weight, labels, upstream = inputs(torch.bfloat16)
    weight.requires_grad_(False)
    values = token_log_probs(hidden, weight, labels, chunk_tokens=4)
    (values * upstream).sum().backward()
    exact, grad, _ = reference(hidden, weight, labels, upstream, UNCHANGED)
    assert values.dtype == torch.float32 and weight.grad is None
    # bfloat16 logits have 8 bits: their rounding is 2**-9 of values up to 8.
    torch.testing.assert_close(values.double(), exact, rtol=2e-2, atol=5e-2)
    torch.testing.assert_close(hidden.grad.double(), grad, rtol=5e-2, atol=5e-2)


def test_a_model_that_gives_logits() -> None:
    hidden, weight, labels, upstream = inputs()
    values = token_log_probs(hidden @ weight.T, None, labels)
    (values * upstream).sum().backward()
    exact, grad_hidden, grad_weight = reference(hidden, weight, labels, upstream, UNCHANGED)
    torch.testing.assert_close(values.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hidden.grad.double(), grad_hidden, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(weight.grad.double(), grad_weight, rtol=1e-5, atol=1e-5)


def test_blocks_are_those_of_the_named_device(monkeypatch: pytest.MonkeyPatch):
    """A dry run on a CPU counts the blocks of a GPU."""
    rows = []

    def observed(block: Tensor, *arguments: Any, **options: Any) -> Tensor:
        rows.append(len(block))
        return cross_entropy_(block, *arguments, **options)

    monkeypatch.setattr(cross_entropy, "cross_entropy_", observed)
    hidden, weight = torch.randn(1, 1024, 8), torch.randn(1024, 8)
    labels = torch.randint(0, 1024, (1, 1024))
    on_cpu = token_log_probs(hidden, weight, labels)
    as_on_gpu = token_log_probs(hidden, weight, labels, device_type="cuda")
    assert rows == [512, 512, 1024]
    assert torch.equal(on_cpu, as_on_gpu)
