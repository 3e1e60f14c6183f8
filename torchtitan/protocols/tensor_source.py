"""`TensorSource`: named tensors that are read one at a time, or in part, from any storage."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from torchtitan.tools.errors import UserError
from torchtitan.tools.files import unreadable_file_error

Slices = tuple[slice, ...]
"""Part of a tensor: start and stop for each dimension, without steps."""

MakeTensor = Callable[[str], Tensor]
"""Function that creates a tensor by name on demand, so that a writer needs memory for only one
tensor."""

_CHUNK_BYTES = 64 * 2**20


@dataclass(frozen=True)
class TensorSpec:
    """Properties of a tensor, known without reading it."""

    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSpec":
        """Return the spec of a tensor, or of the whole tensor for a DTensor."""
        return cls(tensor.shape, tensor.dtype)

    @property
    def n_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def on_meta(self) -> Tensor:
        """Return such a tensor without memory."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


class TensorSource(ABC):
    """Tensors by name. Opening one reads only names, shapes and dtypes; no file stays open, and
    nothing is cached."""

    specs: Mapping[str, TensorSpec]

    forms: Mapping[str, str] = {}
    """Forms in which tensors stored in few bits can stay so, by name
    (`components.weights.few_bits`). Other tensors are stored as read, or cannot be kept
    (`reasons`)."""

    reasons: Mapping[str, str] = {}
    """Why a tensor in few bits can only be dequantized, by name."""

    def of_part(self, part: str) -> "TensorSource":
        """Return these tensors with a part of their few bits instead of values, in the same shape:
        the code, scale, zero point or range of scales of each value. Other tensors are
        unchanged."""
        return self

    @abstractmethod
    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        """Return the tensor, or the part in `slices`, in CPU memory. Raise `UserError` if its file
        cannot be read."""


def slice_shape(slices: Slices) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in slices)


def full_slices(shape: torch.Size) -> Slices:
    """Return the slices that cover a tensor."""
    return tuple(slice(0, size) for size in shape)


def value_chunks(name: str, tensor: Tensor, dtype: torch.dtype) -> Iterator[memoryview]:
    """Yield the values of `tensor` as `dtype`, in order, converting one chunk at a time as
    `as_type` does."""
    flat = tensor.detach().reshape(-1)
    for piece in flat.split(max(1, _CHUNK_BYTES // dtype.itemsize)):
        yield as_type(name, piece, dtype).view(torch.uint8).numpy().data


def as_type(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `tensor`, called `name`, in CPU memory as `dtype`. Raise `UserError` if a finite value
    becomes infinite in `dtype`, such as 65,520 in float16."""
    converted = tensor.to("cpu", dtype)
    floats = dtype.is_floating_point and tensor.dtype.is_floating_point
    if floats and torch.finfo(dtype).max < torch.finfo(tensor.dtype).max:
        overflow = converted.isfinite().logical_not_() & tensor.isfinite().cpu()
        if overflow.any():
            largest = tensor[overflow].abs().max().item()
            raise UserError(
                f"{name} has values up to {largest:g}, which {str(dtype).removeprefix('torch.')} "
                f"cannot hold (at most {torch.finfo(dtype).max:g}); export another type"
            )
    return converted


def damaged_file_error(file: str | Path, error: object) -> UserError:
    """Return the error for an unreadable file of weights."""
    return unreadable_file_error(
        file,
        f"{file} cannot be read, it is damaged or was cut short: {error}; copy or download it "
        "again",
    )
