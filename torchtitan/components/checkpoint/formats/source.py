"""`TensorSource`: named tensors that are read one at a time, or a part of one, from wherever they lie."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from torchtitan.protocols.state_dict_adapter import TensorForm
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import unreadable

Slices = tuple[slice, ...]
"""The part of a tensor that is read: for each dimension from where to where, without steps."""

MakeTensor = Callable[[str], Tensor]
"""Name → tensor, made when it is asked for: what a writer is given, so that it never holds more than one."""

_CHUNK_BYTES = 64 * 2**20
_NAMED_IN_ERRORS = 5


class TensorSource(ABC):
    """Tensors by name. Opening one reads names, shapes and dtypes; no file stays open, and nothing is kept."""

    forms: Mapping[str, TensorForm]
    """Name → shape and dtype of every tensor."""

    @abstractmethod
    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        """The tensor of that name in CPU memory, or the part of it that `slices` says.

        Raises:
            UserError: where its file cannot be read.
        """


def slice_shape(slices: Slices) -> tuple[int, ...]:
    """The shape of the part that `slices` says."""
    return tuple(part.stop - part.start for part in slices)


def whole(shape: torch.Size) -> Slices:
    """The slices that are all of a tensor."""
    return tuple(slice(0, size) for size in shape)


def value_chunks(name: str, tensor: Tensor, dtype: torch.dtype) -> Iterator[memoryview]:
    """The values of `tensor` as `dtype`, in order, in pieces: a conversion copies no more than one.

    Raises:
        UserError: as `as_type`.
    """
    flat = tensor.detach().reshape(-1)
    for piece in flat.split(max(1, _CHUNK_BYTES // dtype.itemsize)):
        yield as_type(name, piece, dtype).view(torch.uint8).numpy().data


def as_type(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor`, which is called `name`, in CPU memory and as `dtype`.

    Raises:
        UserError: where a value is finite, and in `dtype` is not: 65,520 and above in float16.
    """
    converted = tensor.to("cpu", dtype)
    floats = dtype.is_floating_point and tensor.dtype.is_floating_point
    if floats and torch.finfo(dtype).max < torch.finfo(tensor.dtype).max:
        lost = converted.isfinite().logical_not_() & tensor.isfinite().cpu()
        if lost.any():
            largest = tensor[lost].abs().max().item()
            raise UserError(
                f"{name} has values up to {largest:g}, which {str(dtype).removeprefix('torch.')} cannot hold "
                f"(at most {torch.finfo(dtype).max:g}); export another type"
            )
    return converted


def some(names: list[str]) -> str:
    """The first few names, and how many there are, for a message."""
    more = f", … ({len(names)} in all)" if len(names) > _NAMED_IN_ERRORS else ""
    return ", ".join(names[:_NAMED_IN_ERRORS]) + more


def damaged(file: str | Path, error: object) -> UserError:
    """What to raise for a file that cannot be read."""
    message = f"{file} cannot be read, it is damaged or was cut short: {error}; copy or download it again"
    return unreadable(file, message)
