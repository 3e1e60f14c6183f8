"""Initial weights that depend only on the seed and the parameter's name, not on the layout.

The value of an element depends on the seed, the parameter's name, and the element's index in the
whole parameter. A rank draws the rows that its shard touches, without communication, in chunks that
fit into a core's cache, in parallel.
"""

import hashlib
import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import cast

import numpy
import torch
from torch import Tensor, nn

from torchtitan.protocols.initializer import (
    DerivedRows,
    Initializer,
    Numbers,
    initializer_of,
    initializers_of,
)
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.tensor_source import Slices, full_slices
from torchtitan.tools.sharded import is_dtensor

_CHUNK_ELEMENTS = 2**15
"""Elements drawn at once. From here on, PyTorch would divide each operation among threads of its
own."""

_CHUNKS_PER_JOB = 32
"""Chunks that a thread takes at once: enough to hide the cost of scheduling."""

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def canonical_name(name: str) -> str:
    """Remove the names that compilation and activation checkpointing insert into a parameter's or
    module's name."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def initialize_weights(model: nn.Module, seed: int, *, loaded: Container[str] = ()) -> None:
    """Fill the parameters and buffers of `model`, possibly sharded, from its modules' initializers,
    in `torch.get_num_threads()` threads. Leave those whose canonical names are in `loaded`: their
    values will be read. The model itself supplies values of tensors without an initializer
    (`BaseModel.values_of`), from which others are derived."""
    jobs: list[Callable[[], None]] = []
    others: dict[str, list[_Place]] = {}
    for module_name, module in model.named_modules():
        prefix = canonical_name(f"{module_name}.") if module_name else ""
        for name, tensor in [
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        ]:
            if f"{prefix}{name}" in loaded:
                continue
            start = initializers_of(module).get(name)
            derived = start if isinstance(start, DerivedRows) else None
            drawn = derived.plain if derived else name
            if isinstance(model, BaseModel) and (derived.initializer if derived else start) is None:
                others.setdefault(f"{prefix}{drawn}", []).append((module, name, derived))
                continue
            initializer = initializer_of(module, name)
            jobs += _jobs(tensor.detach(), initializer, f"{seed}/{prefix}{drawn}")
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        for _ in threads.map(operator.call, jobs):
            pass
    if others:
        _set_values(others, cast(BaseModel, model).values_of(list(others), seed))


_Place = tuple[nn.Module, str, DerivedRows | None]
"""A tensor of a module, by its name there, and how it derives from the plain module's."""


@torch.no_grad()
def _set_values(
    places: Mapping[str, Iterable[_Place]], values: Iterable[tuple[str, Tensor]]
) -> None:
    """Copy each whole tensor in `values`, or the tensors derived from it, to its places."""
    for name, value in values:
        for module, own_name, derived in places[name]:
            _set_value(module, own_name, derived.from_rows(value.float()) if derived else value)


def _set_value(module: nn.Module, name: str, value: Tensor) -> None:
    tensor = getattr(module, name)
    if not isinstance(tensor, nn.Parameter):
        # A buffer is not copied, since it keeps its type when weights are cast.
        setattr(module, name, value.to(tensor.device))
    elif is_dtensor(tensor):
        tensor.to_local().copy_(value[local_slices(tensor)])
    else:
        tensor.copy_(value)


def local_part(tensor: Tensor) -> Tensor:
    """Return this process's shard of a tensor; a plain tensor unchanged."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def sharded_dims(tensor: Tensor) -> list[int | None]:
    """Return the dimension of a tensor that each dimension of its mesh divides; None: none."""
    placements = tensor.placements if is_dtensor(tensor) else ()
    return [getattr(placement, "dim", None) for placement in placements]


def local_slices(tensor: Tensor) -> Slices:
    """Return the slices of the full tensor that this process's shard covers; of a plain tensor, all
    of it."""
    if not is_dtensor(tensor):
        return full_slices(tensor.shape)
    from torchtitan.tools.torch_private import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def _jobs(parameter: Tensor, initializer: Initializer, key: str) -> Iterator[Callable[[], None]]:
    """Yield functions that each fill some rows of this rank's shard."""
    row = (initializer.shape if isinstance(initializer, DerivedRows) else parameter.shape)[1:]
    rows, *columns = local_slices(parameter)
    part = local_part(parameter)
    if part.numel() == 0:
        return
    n_rows = max(1, _CHUNK_ELEMENTS // row.numel())
    size = _CHUNKS_PER_JOB * n_rows
    for start, some in zip(range(rows.start, rows.stop, size), part.split(size), strict=True):
        yield partial(_fill, some, n_rows, initializer, key, start, row, tuple(columns))


def _fill(
    part: Tensor,
    n_rows: int,
    initializer: Initializer,
    key: str,
    first: int,
    row: torch.Size,
    columns: tuple[slice, ...],
) -> None:
    """Fill `part`, the `columns` of whole rows of shape `row` from index `first` on, `n_rows` rows
    at a time."""
    for rows in part.split(n_rows):
        uniform = uniform_numbers(key, first * row.numel(), len(rows) * row.numel()).reshape(
            -1, *row
        )
        rows.copy_(torch.from_numpy(initializer(uniform)[(slice(None), *columns)]))
        first += len(rows)


def uniform_numbers(key: str, start: int, count: int) -> Numbers:
    """Return the numbers from index `start` on of the random sequence `key`: odd multiples of 2⁻²⁴
    between -1 and 1.

    Philox 4x64-10 (Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3") encrypts the
    number of a block, so a sequence can start anywhere. NumPy guarantees the same bits in all
    versions.
    """
    block, skipped = divmod(start, 8)
    digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
    philox = numpy.random.Philox(counter=block, key=int.from_bytes(digest, "big"))
    words = philox.random_raw((skipped + count + 7) // 8 * 4).astype("<u8", copy=False).view("<i4")
    odd = words[skipped : skipped + count] >> 7 | 1
    return odd.astype(numpy.float32) * 2.0**-24
