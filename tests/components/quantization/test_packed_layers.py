"""Products with weights in few bits, of every form."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from torchtitan.components.quantization.packed_layers import (
    PackedLayer,
    compiled_unpack,
    packed_linear,
)
from torchtitan.components.weights.few_bits import DYNAMIC_MAP, FewBits, tables_of, unpack

FORMS = [
    "nf4:64:dynamic:bfloat16:1",
    "fp4:64:float32:float16:0",
    "e4m3:32:float32:bfloat16:0",
    "e5m2:0:bfloat16:bfloat16:0",
    "e2m1:32:e8m0:bfloat16:0",
    "e2m1:16:e4m3 over:bfloat16:0",
    "uint4:32:float16:float16:0",
    "uint8:0:bfloat16:bfloat16:0",
    "int3:32:float16:float16:0",
    "int8/127:0:float32:bfloat16:0",
]
OUT, IN = 24, 128


def parts_of(form: FewBits) -> list[Tensor]:
    """Return random parts whose values are finite and of common sizes."""
    torch.manual_seed(0)
    rows: dict[str, Tensor] = {
        "packed": torch.randint(0, 1 << form.bits, (OUT, IN)),
        "zeros": torch.randint(0, 1 << form.bits, (OUT, 1)).expand(OUT, IN),
        "scales": torch.rand(OUT, 1).expand(OUT, IN),
        "scale_ranges": torch.rand(OUT, 2).add(0.5).view(torch.int64).expand(OUT, IN),
    }
    if form.codes in ("e4m3", "e5m2"):
        rows["packed"] &= 0x77
    if form.scale_dtype.itemsize == 1:
        rows["scales"] = torch.randint(110, 124, (OUT, 1)).expand(OUT, IN)
    return [form.pack_part(part, rows[part]) for part in form.parts]


@pytest.mark.parametrize("text", FORMS)
def test_product_and_gradient_are_those_of_the_unpacked_weight(text: str) -> None:
    """Bitwise, also the gradient of a bias, and only the few bits are saved for the backward
    pass."""
    form = FewBits.parse(text)
    parts = parts_of(form)
    weight = unpack(form, parts, torch.float32)
    assert weight.isfinite().all() and len(weight.unique()) > 2
    assert weight.equal(weight.to(form.value_dtype).float())
    x, bias, direction = torch.randn(5, IN), torch.randn(OUT), torch.randn(5, OUT)
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    results = []
    for product in (
        lambda x, bias: packed_linear(x, form, parts, bias),
        lambda x, bias: F.linear(x, weight, bias),
    ):
        x, bias = x.detach().requires_grad_(), bias.detach().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y = product(x, bias)
        if not results:
            assert all(tensor.dtype == torch.uint8 for tensor in saved)
        y.backward(direction)
        results.append((y.detach(), x.grad, bias.grad))
    assert all(map(torch.equal, *results))


def test_sharded_experts_are_unpacked_with_their_strides() -> None:
    """A sharded tensor of three dimensions, as DTensor says of the plain one."""
    layer = PackedLayer()
    plain = torch.randn(2, 4, 64)
    layer.keep_packed("w", "w_", plain, None, FewBits.parse("int4:32:float16:float16:0"))
    for part in layer.parts_of("w"):
        part.data.random_(0, 60)  # scales are finite
    expected = layer.unpacked("w", torch.float32)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for name, part in list(layer.named_parameters()):
            sharded = nn.Parameter(distribute_tensor(part, mesh, [Shard(0)]), requires_grad=False)
            layer.register_parameter(name, sharded)
        unpacked = layer.unpacked("w", torch.float32)
        assert unpacked.stride() == distribute_tensor(plain, mesh, [Shard(0)]).stride()
        assert torch.equal(unpacked.full_tensor(), expected)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("text", FORMS[::2])
def test_compiled_forms(text: str) -> None:
    """Inside a compiled block, and as the kernel that a GPU uses outside of one. The compiler may
    multiply and add in one rounding, which changes the last place after the last rounding."""
    torch._dynamo.reset()
    form = FewBits.parse(text)
    parts = parts_of(form)
    compiled: Any = torch.compile(packed_linear, backend="aot_eager", fullgraph=True)
    for is_trained in (False, True):
        x = torch.randn(5, IN, requires_grad=is_trained)
        results = []
        for product in (compiled, packed_linear):
            bias = torch.ones(OUT, requires_grad=is_trained)
            y = product(x, form, parts, bias)
            results.append((y, *torch.autograd.grad(y.sum(), (x, bias))) if is_trained else (y,))
        assert all(map(torch.equal, *results))
    rows = compiled_unpack(form)(tables_of(form, torch.device("cpu")), *parts)
    expected = unpack(form, parts, form.value_dtype)
    torch.testing.assert_close(rows, expected, rtol=2**-7, atol=0)


def test_the_dynamic_map_is_that_of_bitsandbytes() -> None:
    library = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    assert torch.equal(DYNAMIC_MAP, library.functional.create_dynamic_map())
