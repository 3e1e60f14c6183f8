"""Gathers of FSDP in NVFP4 and MXFP8, bit by bit against those of plain weights."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.components.quantization.test_float8 import SentDtypes
from tests.components.quantization.test_narrow import BASE, LAYOUTS, mx, numbers, nv
from tests.distributed.test_parallel_dims import fake_rank
from tests.processes import run_processes
from tests.training import tiny_config, train
from torchtitan.components.quantization.block_formats import (
    mxfp8,
    nvfp4,
    pack_e2m1,
    unpack_e2m1,
)
from torchtitan.components.quantization.narrow_gathers import pack_mxfp8, unpack_mxfp8
from torchtitan.components.quantization.narrow_products import NVFP4Products, NVFP4Weight
from torchtitan.tools.errors import UserError

GATHERED = {
    "fsdp": {},
    "fsdp, bfloat16": {"training__mixed_precision_param": "bfloat16"},
    "one shard": {**LAYOUTS["tp"], "training__mixed_precision_param": "bfloat16"},
    "ddp": {
        "parallelism__data_parallel_replicate_degree": 2,
        "parallelism__data_parallel_shard_degree": 1,
    },
}
"""In the last two, FSDP has nothing to gather."""


GATHERS = {
    "nvfp4": lambda gathers: nv(fsdp_nvfp4_all_gather=gathers),
    "mxfp8": lambda gathers: mx(fsdp_mxfp8_all_gather=gathers),
}
MXFP8_LAYOUTS = ("fsdp", "fsdp, bfloat16")


def gather_in_layouts(folder: Path) -> None:
    """Train with and without narrow gathers; stop after 1 of 2 steps and resume."""
    options = {**BASE, "lr_scheduler__total_steps": 2}
    for kind, convert in GATHERS.items():
        for layout in GATHERED if kind == "nvfp4" else MXFP8_LAYOUTS:
            for gathers in (False, True):
                with SentDtypes() as sent:
                    whole = folder / kind / layout / str(gathers)
                    train(whole, convert(gathers), **options, **GATHERED[layout])
                if layout == "fsdp, bfloat16":
                    sent_by_block(sent, kind if gathers else "")
        for steps in (1, 2):
            settings = {**options, "training__steps": steps, "checkpoint__enable": True}
            train(folder / kind / "parts", convert(True), **settings)


def sent_by_block(gathers: SentDtypes, kind: str) -> None:
    """Check what each of two ranks sends of a block, in one message of bytes, with two norms of 64
    elements: in NVFP4, 4 bits for each element of a matrix, and a byte for 256 of them; in MXFP8,
    11 bits, and two bytes for 32 of them."""
    elements, norms = 5 * 64 * 64 - 64 * 64 + 3 * 64 * 128, 2 * 64
    bits = {"nvfp4": 4 + 8 / 256, "mxfp8": 11 + 2 * 8 / 32}.get(kind)
    expected = (
        (torch.uint8, (elements * bits / 8 + 2 * norms) / 2)
        if bits
        else (torch.bfloat16, (elements + norms) // 2)
    )
    assert Counter(gathers.sent)[expected] >= 4, gathers.sent


@pytest.mark.slow
def test_narrow_gathers_are_bitwise_exact(tmp_path):
    """Also in bfloat16, which both round weights to first, and after a resumption."""
    run_processes(gather_in_layouts, 2, tmp_path)
    for kind, convert in GATHERS.items():
        for layout in GATHERED if kind == "nvfp4" else MXFP8_LAYOUTS:
            folder = tmp_path / kind / layout
            plain, narrow_ones = (numbers(folder / name) for name in ("False", "True"))
            assert plain == narrow_ones and len(plain) == 2, layout
        gathered = numbers(tmp_path / kind / "fsdp" / "True")
        assert numbers(tmp_path / kind / "parts") == gathered
        train(tmp_path / "one" / kind, convert(False), **BASE, lr_scheduler__total_steps=2)
        for ours, expected in zip(gathered, numbers(tmp_path / "one" / kind), strict=True):
            assert ours == pytest.approx(expected, rel=1e-6)  # sums over ranks


@pytest.mark.parametrize("kind", GATHERS)
def test_shards_of_broken_blocks_are_not_gathered(kind):
    with fake_rank(0, 3):
        layer = nn.ModuleDict({"wq": nn.Linear(32, 64)})
        converter = GATHERS[kind](True).build()
        converter.convert(layer)
        fully_shard(layer["wq"], mesh=init_device_mesh("cpu", (3,)))
        with pytest.raises(UserError, match=r"gather: the 64 outputs of wq cannot .* over 3 ranks"):
            converter.post_init_hook([layer])


def hostile_matrices() -> Iterator[Tensor]:
    """Matrices whose blocks along rows and columns have other scales; every pattern of bits;
    infinities, NaN, signed zeros, and the smallest and largest numbers."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    for spread in (0.1, 1, 4, 12):
        yield normal(96, 64) * torch.exp2(spread * normal(96, 64))
        yield normal(64, 96) * torch.exp2(spread * normal(64, 1)) * torch.exp2(spread * normal(96))
    bits = torch.randint(-(2**31), 2**31, (128, 128), generator=generator)
    yield bits.int().view(torch.float32)
    yield bits.int().view(torch.float32).nan_to_num(0.0, 1.0, -1.0)
    bad = normal(64, 64)
    bad[3, 5], bad[40, 7], bad[40, 40], bad[:32, 33], bad[0] = (
        torch.inf,
        -torch.inf,
        torch.nan,
        0,
        -0.0,
    )
    yield bad
    for value in (0.0, -0.0, 1e-45, 1e-40, 1e-38, 3.4028234e38):
        yield torch.full((32, 64), value)
    yield normal(64, 64) * 2.0**-130
    # midpoints of the subnormal numbers along one side, next to which are numbers that have 4 bits
    # along the other
    ties = 2.0**-9 * (0.5 + torch.arange(64) / 8) * (1 + 2.0**-20 * normal(64, 64))
    ties[:, 0] = 448.0
    yield ties


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bytes_of_mxfp8_decide_both_casts(dtype):
    """Elements, their signs, and scales are equal to those of the plain weight, bit by bit."""

    def bits(part: Tensor) -> Tensor:
        return torch.where(part.isnan(), torch.nan, part).view(torch.int32)

    n_changed = n_twice = 0
    for matrix in hostile_matrices():
        weight = matrix.to(dtype)
        packed = pack_mxfp8(weight.float())
        assert sum(8 * part.numel() for part in packed) == 11.5 * weight.numel()
        gathered = unpack_mxfp8(*packed).to(dtype)
        for plain, ours in ((weight, gathered), (weight.T, gathered.T)):
            for part, own in zip(mxfp8(plain), mxfp8(ours), strict=True):
                assert torch.equal(bits(own), bits(part))
        n_changed += int((gathered != weight).sum())
        n_twice += int((mxfp8(mxfp8(weight).values().T).values() != mxfp8(weight.T).values()).sum())
    # narrower than the weight, and one cast does not decide the other
    assert n_changed > 1000 and n_twice > 1000


def test_kernels_cast_a_gathered_weight_as_the_plain_one():
    """torchao's casts, along both sides."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    torch.manual_seed(0)
    weight = (torch.randn(96, 64) * torch.exp2(4 * torch.randn(96, 1))).bfloat16()
    gathered = unpack_mxfp8(*pack_mxfp8(weight.float())).bfloat16()
    assert not torch.equal(weight, gathered)
    for plain, ours in ((weight, gathered), (weight.T, gathered.T)):
        casts = (
            MXTensor.to_mx(x.contiguous(), torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
            for x in (plain, ours)
        )
        one, other = (
            (cast.qdata.view(torch.uint8), cast.scale.view(torch.uint8)) for cast in casts
        )
        assert all(map(torch.equal, one, other))


def test_a_gathered_weight_multiplies_as_the_plain_one():
    """Zeros, their signs, and blocks of different size survive the bytes."""
    torch.manual_seed(0)
    weight = torch.randn(64, 48) * torch.logspace(-3, 3, 64)[:, None]
    weight[3], weight[5] = 0, -0.0
    blocks = nvfp4(weight, square_blocks=True)
    assert torch.equal(unpack_e2m1(pack_e2m1(blocks.elements)), blocks.elements)
    squares = blocks.scales[::16].to(torch.float8_e4m3fn).view(torch.uint8)
    gathered = NVFP4Weight(pack_e2m1(blocks.elements), squares, blocks.tensor_scale, torch.float32)
    x, gradient = torch.randn(20, 48), torch.randn(20, 64)
    results = []
    for operand in (weight, gathered):
        own_x, parameter = x.clone().requires_grad_(), nn.Parameter(operand)
        y = NVFP4Products().multiply(own_x, parameter)
        y.backward(gradient)
        results.append((y.detach(), own_x.grad, parameter.grad))
    for plain, ours in zip(*results, strict=True):
        assert torch.equal(plain, ours)


@pytest.mark.parametrize("kind", GATHERS)
def test_offloaded_weights_are_not_gathered_in_fewer_bits(kind, tmp_path):
    config = tiny_config(tmp_path, training__enable_cpu_offload=True)
    config.model_converters = [GATHERS[kind](True)]
    with pytest.raises(UserError, match=rf"fsdp_{kind}_all_gather cannot .*enable_cpu_offload"):
        config.check(2, dry_run=True)
