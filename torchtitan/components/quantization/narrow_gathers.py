"""FSDP gathers the weights of linear layers in NVFP4: 4 bits for each number, and a byte for each
block of 16 x 16.

Each rank casts its shard with the scale of the whole weight. Blocks of 16 x 16 serve all products,
so the gathered weight multiplies as the cast of the plain one would. Weights, optimizer and
checkpoints stay plain.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan.components.quantization.block_formats import (
    NVFP4_BLOCK,
    Blocks,
    largest_of,
    nvfp4,
    pack_e2m1,
)
from torchtitan.components.quantization.narrow_products import NarrowLinear, NVFP4Weight
from torchtitan.distributed.initialize import canonical_name, local_part, sharded_dims
from torchtitan.tools.errors import UserError
from torchtitan.tools.torch_private import extend_gather, fsdp_parameters, n_shards, owner_of


class NVFP4Gathers:
    """The gathers of the weights of all narrow linear layers that FSDP divides.

    Args:
        option: name of the converter's options.

    Raise `UserError` for a weight whose shards are not whole blocks.
    """

    def __init__(self, model_parts: Iterable[nn.Module], option: str):
        self._weights: list[tuple[Tensor, Tensor]] = []
        modules = [module for part in model_parts for module in part.modules()]
        names = {
            module: canonical_name(name)
            for part in model_parts
            for name, module in part.named_modules()
        }
        for record in fsdp_parameters(modules):
            if n_shards(record) == 1:
                continue
            layer = owner_of(record)
            if isinstance(layer, NarrowLinear) and record.sharded_param is layer.weight:
                _check_shards(names[layer], layer.weight, option)
                peak = torch.zeros((), device=local_part(layer.weight).device)
                scale = torch.zeros_like(peak)
                extend_gather(
                    record,
                    partial(_pack_shard, local_part(layer.weight), peak, scale),
                    partial(_receive, scale),
                )
                self._weights.append((layer.weight, peak))

    @torch.no_grad()
    def refresh(self) -> None:
        """Compute the largest value of each weight, with one all-reduce for each dimension of the
        mesh."""
        if not self._weights:
            return
        peaks = torch.stack([largest_of(local_part(weight)) for weight, _ in self._weights])
        weight: Any = self._weights[0][0]
        for dim in range(weight.device_mesh.ndim):
            group = weight.device_mesh.get_group(dim)
            dist.all_reduce(peaks, dist.ReduceOp.MAX, group)
        for (_, peak), new in zip(self._weights, peaks, strict=True):
            peak.copy_(new)


def _check_shards(name: str, weight: Any, option: str) -> None:
    ranks = 1
    for size, dim in zip(weight.device_mesh.shape, sharded_dims(weight), strict=True):
        ranks *= size if dim == 0 else 1
    if weight.shape[0] % (ranks * NVFP4_BLOCK):
        raise UserError(
            f"{option}.fsdp_nvfp4_all_gather: the {weight.shape[0]} outputs of {name} cannot be "
            f"divided over {ranks} ranks in blocks of {NVFP4_BLOCK}; remove this option, or "
            f"exclude the layer ({option}.exclude)"
        )


def _pack_shard(
    shard: Tensor,
    peak: Tensor,
    scale: Tensor,
    mesh: object,
    size: object,
    stride: object,
    module: object,
    policy: Any,
) -> tuple[tuple[Tensor, Tensor], None]:
    """Return the bytes of a shard's numbers and of their scales, as FSDP asks for before a
    gather."""
    dtype = policy.param_dtype or shard.dtype  # which the plain weight is rounded to
    blocks = nvfp4(shard.to(dtype), square_blocks=True, peak=peak.to(dtype).float())
    scale.copy_(blocks.tensor_scale)
    return (pack_e2m1(blocks.elements), _squares_of(blocks)), None


def _receive(
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
