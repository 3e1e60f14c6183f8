"""Initial weights that depend only on the seed and the parameter's name, not on the layout.

Every parameter is drawn in chunks of whole rows, each from a generator seeded by (seed, name, chunk). A rank draws the
chunks that its shard touches, without communication and with the memory of one chunk.
"""

import hashlib
import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan.protocols.initializer import DerivedRows, Initializer, initializer_of
from torchtitan.tools.torch_private import compute_local_shape_and_global_offset

_CHUNK_ELEMENTS = 2**22
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def canonical_name(name: str) -> str:
    """Remove the names that compilation and activation checkpointing insert into a parameter's or module's name."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


@torch.no_grad()
def initialize_weights(model: nn.Module, seed: int) -> None:
    """Fill all parameters and buffers of `model`, possibly sharded, from its modules' initializers. Raise `LookupError`
    if a parameter or buffer has none."""
    for module_name, module in model.named_modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            initializer = initializer_of(module, name)
            drawn = initializer.plain if isinstance(initializer, DerivedRows) else name
            full_name = canonical_name(f"{module_name}.{drawn}" if module_name else drawn)
            _fill(tensor, initializer, f"{seed}/{full_name}")


def _fill(parameter: Tensor, initializer: Initializer, key: str) -> None:
    if isinstance(parameter, DTensor):
        local = parameter.to_local()
        shape, offset = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
    else:
        local, shape, offset = parameter, tuple(parameter.shape), (0,) * parameter.ndim
    if local.numel() == 0:
        return
    drawn_shape = initializer.shape if isinstance(initializer, DerivedRows) else parameter.shape
    rows_per_chunk = max(1, _CHUNK_ELEMENTS // max(1, math.prod(drawn_shape[1:])))
    first, last = offset[0], offset[0] + shape[0]
    inner = tuple(slice(start, start + size) for start, size in zip(offset[1:], shape[1:], strict=True))
    for chunk in range(first // rows_per_chunk, math.ceil(last / rows_per_chunk)):
        start = chunk * rows_per_chunk
        end = min(start + rows_per_chunk, parameter.shape[0])
        values = torch.empty(end - start, *parameter.shape[1:], dtype=torch.float32)
        initializer(values, torch.Generator().manual_seed(_stable_seed(f"{key}/{chunk}")))
        kept = slice(max(first, start), min(last, end))
        local[kept.start - first : kept.stop - first] = values[(slice(kept.start - start, kept.stop - start), *inner)]


def _stable_seed(key: str) -> int:
    """Return a seed for a string, since Python's `hash` differs between processes."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") >> 1
