"""FSDP gathers the weights of narrow linear layers as bytes, and results stay bitwise the same.
Weights, optimizer and checkpoints stay plain.

NVFP4: 4 bits for each number, and a byte for each block of 16 x 16. Each rank casts its shard with
the scale of the whole weight. Blocks of 16 x 16 serve all products, so the gathered weight
multiplies as the cast of the plain one would.

MXFP8: 11.5 bits for each number. Products round a weight twice, in blocks along its inputs and
along its outputs, with different scales s, powers of 2. A weight rounded to odd in 6 significant
bits (Boldo and Melquiond 2008, doi:10.1109/TC.2007.70819) still decides how both round it to at
most 4, and the scales of its blocks. It needs 11 bits relative to the smaller of its two s, which
both follow from a byte for each block. Gathered, it is an ordinary weight, which kernels can
multiply too.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan.components.quantization.block_formats import (
    MXFP8_BLOCK,
    NVFP4_BLOCK,
    Blocks,
    largest_of,
    mxfp8_exponents,
    nvfp4,
    pack_e2m1,
    times_power_of_2,
)
from torchtitan.components.quantization.narrow_products import NarrowLinear, NVFP4Weight
from torchtitan.distributed.initialize import canonical_name, local_part, sharded_dims
from torchtitan.tools.errors import UserError
from torchtitan.tools.sharded import is_dtensor
from torchtitan.tools.torch_private import (
    extend_gather,
    fsdp_parameters,
    keep_write_count,
    n_shards,
    owner_of,
)

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.tensor import DTensor

    from torchtitan.tools.torch_private import FSDPParam

_MANTISSA_BITS = 5
"""Of a number rounded to odd, after its first 1: two more than E4M3 has."""

_DROPPED_BITS = 23 - _MANTISSA_BITS
_FIRST_CODE = (127 - 15) << _MANTISSA_BITS
"""Kept bits of 2⁻¹⁵, which become code 0: smaller numbers, relative to their scale, are 0 in
E4M3."""

_INFINITY, _NAN = 0x3E0, 0x3FF
"""Codes above the codes of finite numbers, which are at most 448."""

_BIAS = 127
"""Of the exponents of scales as bytes."""


def gather_mxfp8(model_parts: Iterable[nn.Module], option: str) -> None:
    """Let FSDP gather the weights of all narrow linear layers that it divides. `option`: name of
    the converter's options. Raise `UserError` for a weight whose shards are not whole blocks."""
    name = f"{option}.fsdp_mxfp8_all_gather"
    for record, layer in _gathered_layers(model_parts, name, MXFP8_BLOCK):
        extend_gather(record, partial(_pack_mxfp8_shard, local_part(layer.weight)), _receive_mxfp8)


class NVFP4Gathers:
    """The gathers of the weights of all narrow linear layers that FSDP divides.

    Args:
        option: name of the converter's options.

    Raise `UserError` for a weight whose shards are not whole blocks.
    """

    def __init__(self, model_parts: Iterable[nn.Module], option: str):
        self._weights: list[tuple[DTensor, Tensor]] = []
        name = f"{option}.fsdp_nvfp4_all_gather"
        for record, layer in _gathered_layers(model_parts, name, NVFP4_BLOCK):
            shard = local_part(layer.weight)
            peak = torch.zeros((), device=shard.device)
            scale = torch.zeros_like(peak)
            before = partial(_pack_nvfp4_shard, shard, peak, scale)
            extend_gather(record, before, partial(_receive_nvfp4, scale))
            self._weights.append((_of_ranks(layer), peak))

    @torch.no_grad()
    def refresh(self) -> None:
        """Compute the largest value of each weight, with one all-reduce for each dimension of the
        mesh."""
        if not self._weights:
            return
        peaks = torch.stack([largest_of(local_part(weight)) for weight, _ in self._weights])
        weight = self._weights[0][0]
        for dim in range(weight.device_mesh.ndim):
            group = weight.device_mesh.get_group(dim)
            dist.all_reduce(peaks, dist.ReduceOp.MAX, group)
        for (_, peak), new in zip(self._weights, peaks, strict=True):
            peak.copy_(new)


def _gathered_layers(
    model_parts: Iterable[nn.Module], option: str, block: int
) -> "Iterator[tuple[FSDPParam, NarrowLinear]]":
    """Yield the narrow linear layers whose weights FSDP divides, each after FSDP's record of it."""
    parts = list(model_parts)
    names = {
        module: canonical_name(name) for part in parts for name, module in part.named_modules()
    }
    for record in fsdp_parameters(names):
        layer = owner_of(record)
        if (
            n_shards(record) > 1
            and isinstance(layer, NarrowLinear)
            and record.sharded_param is layer.weight
        ):
            _check_shards(names[layer], _of_ranks(layer), option, block)
            yield record, layer


def _of_ranks(layer: NarrowLinear) -> "DTensor":
    """Return the weight of a layer that FSDP divides."""
    weight = layer.weight
    assert is_dtensor(weight)
    return weight


def _check_shards(name: str, weight: "DTensor", option: str, block: int) -> None:
    ranks = 1
    for size, dim in zip(weight.device_mesh.shape, sharded_dims(weight), strict=True):
        ranks *= size if dim == 0 else 1
    if weight.shape[0] % (ranks * block):
        raise UserError(
            f"{option}: the {weight.shape[0]} outputs of {name} cannot be divided over {ranks} "
            f"ranks in blocks of {block}; remove this option, or exclude the layer "
            f"({option.rpartition('.')[0]}.exclude)"
        )


def _pack_mxfp8_shard(
    shard: Tensor,
    mesh: object,
    size: object,
    stride: object,
    module: object,
    policy: "MixedPrecisionPolicy",
) -> tuple[tuple[Tensor, ...], None]:
    """Return bytes of a shard (rows, I), as FSDP asks for before a gather."""
    weight = shard.to(policy.param_dtype or shard.dtype)  # which the plain weight is rounded to
    return pack_mxfp8(weight.float()), None


def pack_mxfp8(weight_OI: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the bytes of a float32 matrix whose sides are multiples of 32: the lower bits of its
    codes (O, I), the upper 3 (O, 3 I / 8), and the exponents of its blocks along the inputs (O, I /
    32) and outputs (O / 32, I)."""
    sizes_OI = weight_OI.abs().nan_to_num(nan=0.0, posinf=torch.inf)
    along_inputs = mxfp8_exponents(sizes_OI.unflatten(1, (-1, MXFP8_BLOCK)).amax(2))
    along_outputs = mxfp8_exponents(sizes_OI.unflatten(0, (-1, MXFP8_BLOCK)).amax(1))
    bits_OI = times_power_of_2(sizes_OI, -_smaller(along_inputs, along_outputs)).view(torch.int32)
    # to odd: the last kept bit is 1 if any dropped bit is
    is_inexact_OI = bits_OI & ((1 << _DROPPED_BITS) - 1) != 0
    codes_OI = ((bits_OI >> _DROPPED_BITS) | is_inexact_OI.int()) - _FIRST_CODE
    codes_OI = codes_OI.clamp(0, _INFINITY).masked_fill(weight_OI.isnan(), _NAN)
    codes_OI |= weight_OI.signbit().int() << 10
    places = 3 * torch.arange(8, device=weight_OI.device, dtype=torch.int32)
    upper = ((codes_OI >> 8).unflatten(1, (-1, 8)) << places).sum(-1, dtype=torch.int32)
    upper_bytes = upper[..., None].view(torch.uint8)[..., :3].flatten(1)
    exponents = ((each + _BIAS).to(torch.uint8) for each in (along_inputs, along_outputs))
    return (codes_OI & 0xFF).to(torch.uint8), upper_bytes, *exponents


def unpack_mxfp8(
    lower: Tensor, upper: Tensor, along_inputs: Tensor, along_outputs: Tensor
) -> Tensor:
    """Return the matrix rounded to odd, float32, of the bytes from `pack_mxfp8`."""
    groups = torch.nn.functional.pad(upper.unflatten(1, (-1, 3)), (0, 1)).view(torch.int32)
    places = 3 * torch.arange(8, device=lower.device, dtype=torch.int32)
    codes_OI = lower.int() | (((groups >> places) & 7).flatten(1) << 8)
    sizes_OI = codes_OI & 0x3FF
    values_OI = ((sizes_OI + _FIRST_CODE) << _DROPPED_BITS).view(torch.float32)
    values_OI = values_OI.masked_fill(sizes_OI == 0, 0.0)
    values_OI = values_OI.masked_fill(sizes_OI == _INFINITY, torch.inf)
    exponents = (each.int() - _BIAS for each in (along_inputs, along_outputs))
    values_OI = times_power_of_2(values_OI, _smaller(*exponents))
    values_OI = values_OI.masked_fill(sizes_OI == _NAN, torch.nan)
    return values_OI.where(codes_OI < 1 << 10, -values_OI)


def _smaller(along_inputs: Tensor, along_outputs: Tensor) -> Tensor:
    """Return the smaller exponent of each element's two blocks, (O, I)."""
    return torch.minimum(
        along_inputs.repeat_interleave(MXFP8_BLOCK, 1),
        along_outputs.repeat_interleave(MXFP8_BLOCK, 0),
    )


@torch.no_grad()
def _receive_mxfp8(
    outputs: tuple[Tensor, ...],
    metadata: None,
    dtype: torch.dtype,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """Return the gathered weight, with the memory that FSDP frees; or write it to `out`, which
    autograd does not count as a change, since the values are the same."""
    weight = unpack_mxfp8(*outputs).to(dtype)
    if out is None:
        return weight, (weight,)
    own = local_part(out)
    with keep_write_count(own):
        own.copy_(weight)
    return None


def _pack_nvfp4_shard(
    shard: Tensor,
    peak: Tensor,
    scale: Tensor,
    mesh: object,
    size: object,
    stride: object,
    module: object,
    policy: "MixedPrecisionPolicy",
) -> tuple[tuple[Tensor, Tensor], None]:
    """Return the bytes of a shard's numbers and of their scales, as FSDP asks for before a
    gather."""
    dtype = policy.param_dtype or shard.dtype  # which the plain weight is rounded to
    blocks = nvfp4(shard.to(dtype), square_blocks=True, peak=peak.to(dtype).float())
    scale.copy_(blocks.tensor_scale)
    return (pack_e2m1(blocks.elements), _squares_of(blocks)), None


def _receive_nvfp4(
    scale: Tensor,
    outputs: tuple[Tensor, ...],
    metadata: None,
    dtype: torch.dtype,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """Return the gathered weight, or nothing if `out` is it already: then its memory is filled
    again."""
    packed, squares = outputs
    return None if out is not None else (NVFP4Weight(packed, squares, scale, dtype), ())


def _squares_of(blocks: Blocks) -> Tensor:
    """Return the E4M3 scales of blocks of 16 x 16 as bytes, (rows / 16, columns / 16)."""
    return blocks.scales[::NVFP4_BLOCK].to(torch.float8_e4m3fn).view(torch.uint8)
