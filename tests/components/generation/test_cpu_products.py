"""Products by oneDNN: equal to PyTorch's, taken only for plain float32 tensors, and only while texts are generated."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.components.generation.test_generation import TINY_PROMPTS, mixed_model
from torchtitan.components.generation import Engine, Sampling, cpu_products, generate
from torchtitan.components.generation.cpu_products import onednn_products, product
from torchtitan.components.peft import LoRA
from torchtitan.distributed import initialize_weights
from torchtitan.tools.errors import UserError


@pytest.fixture
def calls(monkeypatch):
    """The shapes of the weights that oneDNN multiplies with."""
    shapes, linear = [], cpu_products._linear
    monkeypatch.setattr(
        cpu_products, "_linear", lambda x, w, *rest: shapes.append(tuple(w.shape)) or linear(x, w, *rest)
    )
    return shapes


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("n_rows", [1, 8, 100])
@torch.no_grad()
def test_products_are_pytorchs(n_rows, has_bias, calls):
    x = torch.randn(n_rows, 3, 192)[:, 1]  # not contiguous, as the last token of each row
    weight, bias = torch.randn(80, 192), torch.randn(80) if has_bias else None
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    # Sums of 192 products of about 1 in float32.
    torch.testing.assert_close(product(x, weight, bias).double(), exact, atol=1e-4, rtol=0)
    assert calls


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@torch.no_grad()
def test_other_types_are_left_to_pytorch(dtype, calls):
    x, weight = torch.randn(2, 16, dtype=dtype), torch.randn(8, 16, dtype=dtype)
    assert torch.equal(product(x, weight), F.linear(x, weight))
    assert not calls


def test_gradients_and_autocast_are_left_to_pytorch(calls):
    x, weight = torch.randn(2, 16), nn.Parameter(torch.randn(8, 16))
    product(x, weight).sum().backward()
    torch.testing.assert_close(weight.grad, x.sum(0).expand(8, 16))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert product(x, weight).dtype == torch.bfloat16
    assert not calls


def test_layers_of_a_model_are_as_before_after_an_error(calls):
    model = mixed_model().float()
    engine = Engine(model, sampling=Sampling())
    engine.run([engine.generate(TINY_PROMPTS[1], max_new_tokens=3, key="")])
    n_linear = sum(type(layer) is nn.Linear for layer in model.modules())
    head = tuple(model.head.output.weight.shape)
    assert len(calls) == 3 * n_linear and calls.count(head) == 3

    async def fail() -> None:
        raise UserError("no reward")

    with pytest.raises(UserError, match="no reward"):
        engine.run([fail()])
    assert not any("forward" in vars(layer) for layer in model.modules())


def test_a_layer_with_a_forward_of_its_own_keeps_it():
    layer = nn.Linear(16, 8)
    layer.forward = lambda x: x
    with torch.no_grad(), onednn_products(layer):
        assert layer(3) == 3
    assert layer(3) == 3


def test_each_product_reads_the_current_weights():
    """A copy in another order would be outdated after a training step."""
    layer, x = nn.Linear(16, 8), torch.randn(2, 16)
    with torch.no_grad(), onednn_products(layer):
        before = layer(x)
        layer.weight *= 2
        layer.bias *= 2
        torch.testing.assert_close(layer(x), 2 * before)


def test_converted_layers_compute_themselves(calls):
    model = mixed_model().float()
    LoRA.Config(rank=2).build().convert(model)
    initialize_weights(model, seed=0)
    converted = [layer for layer in model.modules() if isinstance(layer, nn.Linear) and type(layer) is not nn.Linear]
    n_plain = sum(type(layer) is nn.Linear for layer in model.modules())
    generate(model, [TINY_PROMPTS[1]], max_new_tokens=1)
    assert converted and len(calls) == n_plain
