"""Sums of 16-bit gradients on CPUs equal sums in float64 up to their own rounding, only in the
block, and in training."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.training import tiny_config
from torchtitan.tools.cpu_sums import float32_sums

HALVES = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Type → relative error of one rounding."""

N_TOKENS = 4096


def embedding(table: Tensor, tokens: Tensor) -> Tensor:
    return F.embedding(tokens, table, padding_idx=3)


def frequent_tokens() -> Tensor:
    """A third of them are the same."""
    tokens = torch.randint(0, 20, (4, N_TOKENS // 4))
    tokens[:, ::3] = 7
    return tokens


def table_gradient(read: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    tokens, gradient = frequent_tokens(), torch.randn(4, N_TOKENS // 4, 8) + 0.3
    table = torch.zeros(20, 8, dtype=dtype, requires_grad=True)
    read(table, tokens).backward(gradient.bfloat16().to(dtype))
    assert table.grad is not None
    return [table.grad]


def layer_norm_gradients(dtype: torch.dtype, wanted: str = "all") -> list[Tensor]:
    torch.manual_seed(0)
    weight, bias = torch.ones(8, dtype=dtype), torch.zeros(8, dtype=dtype)
    x, gradient = ((torch.randn(N_TOKENS, 8) + 0.25).bfloat16().to(dtype) for _ in range(2))
    leaves = [weight, bias, x] if wanted == "all" else [x]
    for leaf in leaves:
        leaf.requires_grad_()
    F.layer_norm(x, (8,), weight, bias).backward(gradient)
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


CASES: dict[str, Callable[[torch.dtype], list[Tensor]]] = {
    "embedding": lambda dtype: table_gradient(embedding, dtype),
    "index": lambda dtype: table_gradient(lambda table, tokens: table[tokens], dtype),
    "index of columns": lambda dtype: table_gradient(
        lambda table, tokens: table.T[:, tokens].movedim(0, -1), dtype
    ),
    "layer norm": layer_norm_gradients,
    "layer norm of inputs": lambda dtype: layer_norm_gradients(dtype, "inputs"),
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("case", CASES)
def test_sums_are_those_of_float64(case: str, dtype: torch.dtype) -> None:
    """A layer norm also rounds the mean and the variance that it keeps: twice."""
    exact, plain = CASES[case](torch.float64), CASES[case](dtype)
    with float32_sums():
        found = CASES[case](dtype)
        wide = CASES[case](torch.float32)
    after = CASES[case](dtype)
    for one, other, expected in zip(found, wide, exact, strict=True):
        assert one.dtype == dtype and other.dtype == torch.float32
        scale = expected.abs().max().item()
        torch.testing.assert_close(one.double(), expected, rtol=0, atol=2 * HALVES[dtype] * scale)
        torch.testing.assert_close(other.double(), expected, rtol=0, atol=1e-5 * scale)
    assert all(map(torch.equal, after, plain))
    error = max(
        ((one - expected).abs().max() / expected.abs().max()).item()
        for one, expected in zip(plain, exact, strict=True)
    )
    assert error > 2 * HALVES[dtype] or case == "layer norm of inputs"


def test_float32_weights_of_a_layer_norm_get_float32() -> None:
    """With inputs in 16 bits, the weights' gradients equal the gradients with wide inputs."""
    torch.manual_seed(0)
    x, gradient = (torch.randn(N_TOKENS, 8).bfloat16() for _ in range(2))
    leaves = [torch.ones(8), torch.zeros(8)]
    for leaf in leaves:
        leaf.requires_grad_()
    normal = F.layer_norm(x, (8,), *leaves)
    with float32_sums():
        found = torch.autograd.grad(normal, leaves, gradient)
    wide = F.layer_norm(x.float(), (8,), *leaves)
    expected = torch.autograd.grad(wide, leaves, gradient.float())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * other.abs().max().item())


def test_float32_stays_pytorchs() -> None:
    for case in CASES.values():
        expected = case(torch.float32)
        with float32_sums():
            assert all(map(torch.equal, case(torch.float32), expected))


def test_places_that_are_set_are_not_added() -> None:
    with float32_sums():
        table = torch.ones(4, dtype=torch.bfloat16)
        table[torch.tensor([1, 1, 2])] = torch.tensor(5, dtype=torch.bfloat16)
    assert table.tolist() == [1, 5, 5, 1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_sums_so(dtype: str, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a run whose weights or computation have 16 bits."""
    entered = []
    original = float32_sums

    def record():
        entered.append(True)
        return original()

    monkeypatch.setattr("torchtitan.trainer.trainer.float32_sums", record)
    options = {"training__steps": 1, "training__mixed_precision_param": dtype}
    tiny_config(tmp_path, **options).build().train()
    assert bool(entered) == (dtype == "bfloat16")
