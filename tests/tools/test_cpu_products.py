"""Products by oneDNN: equal to float64 and to PyTorch's, with gradients, only in the block, and
only where chosen."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.components.generation.test_generation import TINY_PROMPTS, mixed_model
from torchtitan import train
from torchtitan.components.generation import generate
from torchtitan.components.losses.loss import CrossEntropyLoss
from torchtitan.components.peft import LoRA
from torchtitan.distributed import initialize_weights
from torchtitan.tools import cpu_products
from torchtitan.tools.cpu_products import PassProducts, is_faster, onednn_products
from torchtitan.tools.torch_private import onednn_linear

TOLERANCE = 1e-4
"""Sums of up to 200 products of about 1 in float32."""


@pytest.fixture
def calls(monkeypatch):
    """Choose oneDNN on any processor and for small products, and return the shapes of its first
    factors."""
    if onednn_linear() is None:
        pytest.skip("PyTorch is built without oneDNN")
    shapes, linear = [], onednn_linear()
    monkeypatch.setattr(cpu_products, "is_faster", lambda: True)
    monkeypatch.setattr(cpu_products, "_FEWEST", 1)
    monkeypatch.setattr(
        cpu_products,
        "onednn_linear",
        lambda: lambda x, *rest: shapes.append(tuple(x.shape)) or linear(x, *rest),
    )
    return shapes


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("n_rows", [1, 100])
def test_layers_and_their_gradients_are_those_of_float64(n_rows, has_bias, calls):
    # not contiguous, as the last token of each row
    x = torch.randn(n_rows, 3, 192)[:, 1].requires_grad_()
    weight, bias = (
        torch.randn(80, 192, requires_grad=True),
        torch.randn(80, requires_grad=True) if has_bias else None,
    )
    inputs = [each for each in (x, weight, bias) if each is not None]
    weights = torch.randn(n_rows, 80)
    with onednn_products():
        out = F.linear(x, weight, bias)
        gradients = torch.autograd.grad((out * weights).sum(), inputs)
    assert len(calls) == 3
    exact_inputs = [each.detach().double().requires_grad_() for each in inputs]
    exact = F.linear(*exact_inputs)
    exact_gradients = torch.autograd.grad((exact * weights.double()).sum(), exact_inputs)
    for got, expected in zip((out, *gradients), (exact, *exact_gradients), strict=True):
        torch.testing.assert_close(got.double(), expected, atol=TOLERANCE, rtol=0)


class WithHead(nn.Module):
    """Its layers have smaller matrices than its head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.Linear(8, 4), nn.Linear(8, 16)


@pytest.mark.parametrize(
    ("model", "fewest_tokens"),
    [
        (nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)), 4),
        (nn.ParameterList([torch.empty(3, 16, 8)]), 4),  # matrices of experts
        (nn.ParameterList([nn.Parameter(torch.zeros(2, 2, dtype=torch.uint8), False)]), 1),
        (nn.LayerNorm(8), None),
        (WithHead(), 16),
    ],
)
def test_passes_without_large_products_leave_all_to_pytorch(
    model, fewest_tokens, calls, monkeypatch
):
    monkeypatch.setattr(cpu_products, "_FEWEST", 4 * 8 * 16)
    for n_tokens in (1, 3, 4, 16, 100):
        with PassProducts(model) as products:
            products.before(n_tokens, 1)
            torch.ones(100, 8) @ torch.ones(8, 16)
            is_large = fewest_tokens is not None and n_tokens >= fewest_tokens
            assert bool(calls) == is_large
            products.before(1, 4)
            products.before(1, 1)
            torch.ones(100, 8) @ torch.ones(8, 16)
            assert len(calls) == 2 * is_large + (not is_large and fewest_tokens is not None)
        calls.clear()
        torch.ones(100, 8) @ torch.ones(8, 16)
        assert not calls  # after the block


def test_small_products_are_left_to_pytorch(calls, monkeypatch):
    """A call of oneDNN takes longer than all of a small product."""
    monkeypatch.setattr(cpu_products, "_FEWEST", 4 * 8 * 16)
    x, weight, bias = torch.randn(4, 8), torch.randn(8, 16), torch.randn(16)
    expected = x[:3] @ weight, torch.addmm(bias, x[:3], weight)
    with onednn_products():
        products = x[:3] @ weight, torch.addmm(bias, x[:3], weight)
        assert not calls
        x @ weight, torch.addmm(bias, x, weight)
    assert calls == [(4, 8), (4, 8)]
    assert all(map(torch.equal, products, expected))


def layouts(rows, columns):
    """Return matrices of one shape in several layouts, from contiguous to repeated columns."""
    return [
        torch.randn(rows, columns),
        torch.randn(columns, rows).T,
        torch.randn(rows, 2 * columns)[:, :columns],
        torch.randn(2 * rows, 2 * columns)[::2, ::2],
        torch.randn(rows, 1).expand(rows, columns),
        torch.ones(()).expand(rows, columns),
    ]


@pytest.mark.parametrize(
    ("m", "k", "n"),
    [(5, 7, 3), (1, 7, 3), (5, 1, 3), (5, 7, 1), (1, 1, 1), (5, 0, 3), (0, 7, 3), (300, 7, 3)],
)
def test_any_layout_and_size(m, k, n, calls):
    for a in layouts(m, k):
        for b in layouts(k, n):
            total = torch.randn(m, n)
            exact = a.double() @ b.double()
            with onednn_products():
                products = [
                    a @ b,
                    torch.addmm(total, a, b, alpha=2) - total,
                    total.clone().addmm_(a, b) - total,
                ]
            for product, times in zip(products, (1, 2, 1), strict=True):
                torch.testing.assert_close(product.double(), times * exact, atol=TOLERANCE, rtol=0)
            for bias in (torch.randn(n), torch.randn(2 * n)[::2], torch.randn(1).expand(n)):
                with onednn_products():
                    total = torch.addmm(bias, a, b)
                torch.testing.assert_close(
                    total.double(), bias.double() + exact, atol=TOLERANCE, rtol=0
                )
    assert bool(calls) == (m * k * n > 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64])
def test_other_types_are_left_to_pytorch(dtype, calls):
    x, weight, bias = (torch.randint(9, size).to(dtype) for size in ((2, 16), (16, 8), (8,)))
    expected = x @ weight, torch.addmm(bias, x, weight)
    with onednn_products():
        assert torch.equal(x @ weight, expected[0]) and torch.equal(
            torch.addmm(bias, x, weight), expected[1]
        )
    assert not calls


def test_autocast_and_errors_are_pytorchs(calls):
    x, weight = torch.randn(2, 16), torch.randn(8, 16)
    with onednn_products():
        with torch.autocast("cpu", torch.bfloat16):
            assert F.linear(x, weight).dtype == torch.bfloat16
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            x @ weight
        with pytest.raises(RuntimeError, match="dtype"):
            x @ weight.T.double()
        with pytest.raises(RuntimeError, match="Bad in-place call"):
            torch.zeros(8).addmm_(x, weight.T)
    assert not calls


def test_only_in_the_block_also_after_an_error(calls, monkeypatch):
    registered, register = [], torch.library.Library.impl
    monkeypatch.setattr(
        torch.library.Library, "impl", lambda *args: registered.append(args[1]) or register(*args)
    )
    x = torch.randn(4, 4)
    with onednn_products():
        with onednn_products():
            x @ x
        x @ x
    assert registered == ["mm", "addmm", "addmm_"]  # once, and by the outer block
    with pytest.raises(ZeroDivisionError), onednn_products():
        raise ZeroDivisionError
    assert len(calls) == 2
    x @ x
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        ({"cpu_name": "AMD EPYC", "avx512_f": True}, True),
        ({"cpu_name": "AMD EPYC", "avx512_f": False}, False),
        ({"cpu_name": "Intel Xeon", "avx512_f": True}, False),
        ({}, False),
    ],
)
def test_the_processor_decides(processor, expected, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: processor)
    is_faster.cache_clear()
    try:
        assert is_faster() == (expected and onednn_linear() is not None)
    finally:
        is_faster.cache_clear()


def test_other_processors_keep_pytorchs_products(calls, monkeypatch):
    monkeypatch.setattr(cpu_products, "is_faster", lambda: False)
    with onednn_products():
        torch.randn(4, 4) @ torch.randn(4, 4)
    assert not calls


@pytest.mark.parametrize("adapted", [False, True])
def test_generation_uses_it(adapted, calls):
    model = mixed_model().float()
    if adapted:
        LoRA.Config(rank=2).build().convert(model)
        initialize_weights(model, seed=0)
    n_linear = sum(isinstance(layer, nn.Linear) for layer in model.modules())
    generate(model, [TINY_PROMPTS[1]], max_new_tokens=2)
    assert len(calls) >= 2 * n_linear
    done = len(calls)
    torch.ones(2, 2) @ torch.ones(2, 2)
    assert len(calls) == done


def test_runs_use_it(calls, monkeypatch):
    monkeypatch.setattr(train.process, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(train, "_run", lambda x: x @ x)
    train.run(torch.ones(2, 2))
    assert calls == [(2, 2)]


@pytest.mark.parametrize("chunk_tokens", [0, 5])
def test_the_loss_and_its_gradients_are_those_of_float64(chunk_tokens, calls):
    hidden, weight = (
        torch.randn(1, 12, 16, requires_grad=True),
        torch.randn(40, 16, requires_grad=True),
    )
    labels = torch.randint(40, (1, 12))
    with onednn_products():
        CrossEntropyLoss.Config(chunk_tokens=chunk_tokens).build()(
            hidden, weight, labels
        ).backward()
    exact = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    F.cross_entropy(F.linear(*exact)[0], labels[0], reduction="sum").backward()
    assert len(calls) == 3 * (1 if chunk_tokens == 0 else 3)
    assert weight.grad.is_contiguous()
    for got, expected in zip((hidden, weight), exact, strict=True):
        torch.testing.assert_close(got.grad.double(), expected.grad, atol=TOLERANCE, rtol=0)
