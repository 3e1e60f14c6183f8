"""Causal attention in bfloat16 on CPUs, compared with float64 and with PyTorch's own."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from torchtitan.models.common import cpu_attention
from torchtitan.models.common.attention import Attention, with_kernel
from torchtitan.protocols.attention import AttentionMetadata

CASES = {
    "several blocks": (2, 8, 4, 300, 64),
    "one block": (1, 4, 4, 100, 32),
    "odd width": (1, 4, 1, 130, 40),
}
"""Samples, query heads, key/value heads, tokens, width of a head."""


@pytest.fixture(autouse=True)
def with_instructions(monkeypatch):
    """Also run this backward pass on a CPU without bfloat16 products, where it is just slow."""
    monkeypatch.setattr(cpu_attention, "multiplies", lambda dtype: True)


def random_inputs(case: str, spread: float) -> list[Tensor]:
    """Queries, keys, values and a gradient in bfloat16; the larger the spread, the more peaked is
    the attention."""
    samples, heads, kv_heads, length, width = CASES[case]
    generator = torch.Generator().manual_seed(0)
    sizes = ((heads, spread), (kv_heads, spread), (kv_heads, 1.0), (heads, 1.0))
    return [
        (torch.randn(samples, length, n, width, generator=generator) * size)
        .bfloat16()
        .requires_grad_()
        for n, size in sizes
    ]


def gradients(
    inputs: list[Tensor], attend: Attention, lengths: list[int] | None = None
) -> list[Tensor]:
    *qkv, weight = inputs
    samples, length = weight.shape[:2]
    metadata = AttentionMetadata.of_rows(samples, length)
    if lengths:
        positions = torch.cat([torch.arange(n) for n in lengths])
        metadata = AttentionMetadata.from_positions(positions.expand(samples, -1))
    metadata = with_kernel(
        metadata,
        device=torch.device("cpu"),
        dtype=weight.dtype,
        head_dim=weight.shape[-1],
        static=False,
    )
    return list(torch.autograd.grad((attend(*qkv, metadata) * weight).sum(), qkv))


def errors(measured: list[Tensor], exact: list[Tensor]) -> list[float]:
    """Relative errors in the Euclidean norm."""
    return [
        ((a.double() - b).norm() / b.norm()).item() for a, b in zip(measured, exact, strict=True)
    ]


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("spread", [0.5, 1.0, 3.0], ids=["diffuse", "normal", "peaked"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_float64(case, spread, scale, monkeypatch):
    """Probabilities (in both passes), results, and gradients of scores are rounded to bfloat16,
    whose relative errors are up to 2**-8 each; so the error of a gradient is at most 4 * 2**-8, or
    twice the error of PyTorch's kernel."""
    inputs = random_inputs(case, spread)
    exact = gradients(
        [x.detach().double().requires_grad_() for x in inputs], Attention(scale=scale)
    )
    own = errors(gradients(inputs, Attention(scale=scale)), exact)
    monkeypatch.setattr(cpu_attention, "multiplies", lambda dtype: False)
    library = errors(gradients(inputs, Attention(scale=scale)), exact)
    assert own != library  # else this backward pass was not taken
    for error, of_library in zip(own, library, strict=True):
        assert error < max(4 * 2**-8, 2 * of_library), (own, library)


@pytest.mark.parametrize("spread", [0.5, 1.0, 3.0], ids=["diffuse", "normal", "peaked"])
@pytest.mark.parametrize("case", CASES)
def test_results_are_those_of_float64(case, spread):
    """Probabilities, products and their quotient are rounded to bfloat16, whose relative error is
    up to 2**-8; the log-sum-exp has the error of a sum of such probabilities."""
    q, k, v, _ = (x.detach().transpose(1, 2) for x in random_inputs(case, spread))
    scale = q.shape[-1] ** -0.5
    out, lse = cpu_attention.causal_products(q, k, v, scale)
    exact = F.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=True, enable_gqa=True
    )
    assert errors([out], [exact])[0] < 3 * 2**-8
    scores = scale * q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1).mT
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    exact_lse = scores.masked_fill(~seen, -torch.inf).logsumexp(dim=-1)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=2 * 2**-8)


def test_great_scores_do_not_overflow():
    """The rounding error of scores of tens of thousands is above 88, the largest exponent in
    float32."""
    q, k, v = (x.transpose(1, 2) for x in random_inputs("several blocks", 100.0)[:3])
    out, _ = cpu_attention.causal_products(q, k, v, q.shape[-1] ** -0.5)
    exact = F.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=True, enable_gqa=True
    )
    assert errors([out], [exact])[0] < 2**-8


def test_documents_do_not_see_each_other():
    inputs = random_inputs("several blocks", 1.0)
    lengths = [140, 10, 150]
    exact = gradients([x.detach().double().requires_grad_() for x in inputs], Attention(), lengths)
    assert max(errors(gradients(inputs, Attention(), lengths), exact)) < 3 * 2**-8


def test_a_missing_mask_is_found(monkeypatch):
    inputs = random_inputs("several blocks", 1.0)
    exact = gradients([x.detach().double().requires_grad_() for x in inputs], Attention())
    monkeypatch.setattr(Tensor, "tril_", lambda self: self)
    assert max(errors(gradients(inputs, Attention()), exact)) > 0.1


def test_recomputation_changes_nothing():
    inputs = random_inputs("one block", 1.0)
    attend = Attention()
    plain = gradients(inputs, attend)

    def recomputed(q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata) -> Tensor:
        return checkpoint(attend, q, k, v, metadata, use_reentrant=False)

    assert all(map(torch.equal, gradients(inputs, recomputed), plain))


def test_only_bfloat16_takes_it():
    q = random_inputs("one block", 1.0)[0]
    # Also without gradients, so that a frozen reference computes as the trained model does.
    assert cpu_attention.supports(q) and cpu_attention.supports(q.detach())
    assert not cpu_attention.supports(q.detach().float().requires_grad_())
    assert not cpu_attention.supports(F.pad(q, (0, 1)).to("meta"))
