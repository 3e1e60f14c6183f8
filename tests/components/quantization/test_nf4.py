"""The 4-bit NF4 format against torchao and an exhaustive search in float64; its product against
PyTorch."""

from functools import partial

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan.components.quantization.nf4 import FORM, LEVELS, pack, unpack
from torchtitan.components.quantization.packed_layers import compiled_unpack, packed_linear
from torchtitan.components.weights import few_bits
from torchtitan.components.weights.few_bits import tables_of, unpack_rows

torchao_quantization = pytest.importorskip(
    "torchao.quantization", reason="torchao is the reference"
)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def decode(
    packed: Tensor, scales: Tensor, scale_ranges: Tensor
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Decode the tensors in float64 as the format is documented; return the values and the scale of
    each value."""
    ranges = scale_ranges.numpy().view(numpy.float32).astype(numpy.float64)
    scale = ranges[:, :1] + ranges[:, 1:] * scales.numpy()
    indices = numpy.stack([packed.numpy() >> 4, packed.numpy() & 15], axis=-1).reshape(
        len(packed), -1
    )
    scale_of_value = scale.repeat(64, axis=1)
    return numpy.array(LEVELS)[indices] * scale_of_value, scale_of_value


# --- the format
# --------------------------------------------------------------------------------------------------


def test_levels_and_indices_match_torchao():
    """The largest value of each block is 1, so that scales have no effect. The levels of torchao
    have four digits, so values very close to the midpoint of two levels are replaced: they may
    round either way."""
    weight = normal(64, 256).clamp(-1, 1)
    weight[:, ::64] = -1.0
    levels = torch.tensor(LEVELS)
    nearest_two = (weight[..., None] - levels).abs().topk(2, largest=False).values
    weight[nearest_two.diff(dim=-1).squeeze(-1) < 3e-4] = 0.0
    reference = torchao_quantization.to_nf4(weight)
    assert (levels - reference.nf4).abs().max() < 6e-5
    assert torch.equal(pack(weight).packed, reference.quantized_data.view(64, 128))


def test_error_is_not_larger_than_torchao():
    """The relative error of normal values is about 9 %. The factor 1.001 allows for the four digits
    of torchao."""
    weight = normal(256, 512) * normal(256, 1, seed=1).exp()
    error = (unpack(*pack(weight), torch.float32) - weight).norm() / weight.norm()
    reference_error = (
        torchao_quantization.to_nf4(weight).get_original_weight() - weight
    ).norm() / weight.norm()
    assert error < 1.001 * reference_error
    assert 0.08 < error < 0.1


@pytest.mark.parametrize("case", ["normal", "outlier", "tiny", "zero block", "bfloat16"])
def test_each_value_has_the_nearest_level(case):
    """Compare with all 16 levels in float64, at the stored scale. The tolerances cover rounding to
    float32, and to bfloat16 (8 bits) when values are unpacked."""
    weight = normal(16, 320) * 0.02
    if case == "outlier":
        weight[:, 7] = 3.0
    if case == "tiny":
        weight *= 1e-30
    if case == "zero block":
        weight[3, 64:128] = 0.0
    if case == "bfloat16":
        weight = weight.bfloat16()
    form = pack(weight)
    values, scale = decode(*form)
    exact = weight.double().numpy()
    least = numpy.abs(exact[..., None] - scale[..., None] * numpy.array(LEVELS)).min(-1)
    assert (numpy.abs(values - exact) <= least + 1e-6 * scale).all()
    result = unpack(*form, torch.float32).double().numpy()
    numpy.testing.assert_allclose(result, values, rtol=2.0**-8, atol=0)


def test_scales_are_within_half_a_step_of_the_block_maximum():
    weight = normal(32, 640)
    _, scale = decode(*pack(weight))
    largest = weight.view(32, 10, 64).abs().amax(-1).double().numpy()
    step = (largest.max(1) - largest.min(1)) / 255
    assert (numpy.abs(scale[:, ::64] - largest) <= 0.501 * step[:, None]).all()


def test_exact_levels_are_preserved():
    """Rows of zeros, of one number, of the levels themselves, and with a block of zeros, rounded to
    bfloat16."""
    weight = torch.zeros(4, 128)
    weight[1] = -0.3
    weight[2] = 0.7 * torch.tensor(LEVELS).repeat(8)
    weight[3, :64] = 5.0
    torch.testing.assert_close(unpack(*pack(weight), torch.float32), weight, rtol=2.0**-8, atol=0)


def test_unpacked_values_are_equal_in_every_dtype():
    form = pack(normal(8, 128))
    assert torch.equal(unpack(*form, torch.float32), unpack(*form, torch.bfloat16).float())


@pytest.mark.parametrize("chunk_values", [1, 700, 2**22])
def test_rows_are_independent(monkeypatch, chunk_values):
    """Values are bitwise equal, regardless of the number of rows that are packed or unpacked at
    once."""
    weight = normal(37, 192)
    form = pack(weight)
    values = unpack(*form, torch.bfloat16)
    monkeypatch.setattr(few_bits, "_CHUNK_VALUES", chunk_values)
    for rows in (slice(0, 37), slice(5, 6), slice(20, 37), slice(3, 3)):
        part = pack(weight[rows])
        assert all(torch.equal(value, whole[rows]) for value, whole in zip(part, form, strict=True))
        assert torch.equal(unpack(*part, torch.bfloat16), values[rows])


def test_bytes_per_weight():
    weight = normal(48, 4096)
    n_bytes = sum(tensor.numel() * tensor.element_size() for tensor in pack(weight))
    assert n_bytes / weight.numel() == 1 / 2 + 1 / 64 + 8 / 4096


class LargestTensor(TorchDispatchMode):
    """Record the size in bytes of the largest tensor that an operation returns."""

    n_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor) and value._base is None:
                self.n_bytes = max(self.n_bytes, value.numel() * value.element_size())
        return result


def test_temporary_tensors_are_at_most_a_chunk(monkeypatch):
    """A chunk takes four bytes per value; only the result may be larger."""
    weight = normal(256, 512)
    monkeypatch.setattr(few_bits, "_CHUNK_VALUES", 4096)
    with LargestTensor() as mode:
        form = pack(weight)
    assert mode.n_bytes == form.packed.numel()
    with LargestTensor() as mode:
        unpack(*form, torch.bfloat16)
    assert mode.n_bytes == 2 * weight.numel()


def test_meta_tensors_have_the_right_shapes():
    form = pack(torch.empty(10, 128, device="meta"))
    assert [tensor.shape for tensor in form] == [(10, 64), (10, 2), (10, 8)]
    assert unpack(*form, torch.bfloat16).shape == (10, 128)


# --- the product
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_and_gradient_match_the_unpacked_weight(dtype):
    """Results are bitwise equal: the same operations on the same values."""
    form = pack(normal(96, 128))
    x, direction = normal(2, 5, 128, seed=1).to(dtype), normal(2, 5, 96, seed=2).to(dtype)
    results = []
    for product in (
        lambda x: packed_linear(x, FORM, form),
        lambda x: F.linear(x, unpack(*form, dtype)),
    ):
        input = x.clone().requires_grad_()
        y = product(input)
        y.backward(direction)
        results.append((y.detach(), input.grad))
    assert results[0][0].dtype == results[0][1].dtype == dtype
    assert all(map(torch.equal, *results))


def saved_bytes(function, *args) -> int:
    """Return the bytes that the autograd graph of `function(*args)` saves; each tensor counts
    once."""
    kept = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        function(*args)
    return sum(kept.values())


def test_backward_saves_only_the_packed_weight():
    form = pack(normal(512, 256))
    x = normal(4, 256).requires_grad_()
    assert saved_bytes(lambda: packed_linear(x, FORM, form)) == sum(
        tensor.nbytes for tensor in form
    )
    assert (
        saved_bytes(lambda: F.linear(x, unpack(*form, torch.float32))) == 4 * 512 * 256
    )  # the control detects a saved weight


@pytest.mark.slow
def test_compiled_backward_saves_only_the_packed_weight():
    """The compiler sees the weight unpacked in both passes, and must not save the unpacked
    weight."""
    form = pack(normal(512, 256))
    x, direction = normal(4, 256).requires_grad_(), normal(4, 512, seed=1)
    compiled = torch.compile(
        lambda: packed_linear(x, FORM, form), backend="aot_eager", fullgraph=True
    )
    assert saved_bytes(compiled) <= sum(tensor.nbytes for tensor in form)
    y, expected = compiled(), packed_linear(x, FORM, form)
    (gradient,), (expected_gradient,) = (
        torch.autograd.grad(result, x, direction) for result in (y, expected)
    )
    assert torch.equal(y, expected)
    torch.testing.assert_close(gradient, expected_gradient)


class CompiledCalls(TorchDispatchMode):
    """Count the calls of compiled code that a checkpointing policy sees, and would keep the results
    of."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # otherwise, nothing is compiled

    n_seen = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.n_seen += function is torch.ops.higher_order.inductor_compiled_code
        return function(*args, **(kwargs or {}))


@pytest.mark.slow
def test_the_compiled_kernel_unpacks_any_size_and_is_not_kept():
    """On CUDA, products of models that are not compiled use this kernel."""
    torch._dynamo.reset()
    compiled_unpack.cache_clear()
    statistics = torch._dynamo.utils.counters["stats"]
    before = statistics["unique_graphs"]
    with (
        torch._inductor.config.patch(wrap_inductor_compiled_regions=True),
        CompiledCalls() as calls,
    ):
        for shape in ((40, 384), (56, 640), (24, 512)):
            form = pack(normal(*shape))
            rows = compiled_unpack(FORM)(tables_of(FORM, torch.device("cpu")), *form)
            # The compiler may multiply and add in one rounding, which changes the last place after
            # the last rounding.
            torch.testing.assert_close(rows, unpack(*form, torch.bfloat16), rtol=2**-7, atol=0)
        assert (statistics["unique_graphs"] - before, calls.n_seen) == (1, 0)
        torch.compile(partial(unpack_rows, FORM))(tables_of(FORM, torch.device("cpu")), *form)
        assert calls.n_seen == 1  # without the option, it would be kept
