"""Copies of a run's states in CPU memory, for a save that goes on while training changes what they were made from."""

import dataclasses
import mmap
import os
from collections.abc import Callable, Mapping

import torch
from torch.distributed.tensor import DTensor

from torchtitan.tools.torch_private import dtensor_like

_ALIGNMENT = 64

Entries = dict[str, torch.Tensor | str]
"""A state as it is saved: its tensors under their names, and all else in one string."""


def stage(
    states: Mapping[str, Entries], empty_like: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, dict[str, torch.Tensor | str]]:
    """A copy of `states` whose tensors, or this rank's parts of them, lie in CPU memory; complete when this returns.

    Args:
        states: name → entries.
        empty_like: an uninitialised, contiguous tensor in CPU memory of the shape and type of its argument.
    """

    def copy(value: torch.Tensor | str) -> torch.Tensor | str:
        if isinstance(value, str):
            return value
        local = value.to_local() if isinstance(value, DTensor) else value
        staged = empty_like(local).copy_(local, non_blocking=True)
        # Not from_local, which would move the copy to the device of the mesh.
        return dtensor_like(staged, value) if isinstance(value, DTensor) else staged

    with torch.no_grad():
        staged = {name: {key: copy(value) for key, value in entries.items()} for name, entries in states.items()}
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return staged


def empty_in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """An uninitialised tensor in ordinary CPU memory of the shape and type of `tensor`."""
    return torch.empty(tensor.shape, dtype=tensor.dtype)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where in `SharedMemory` a contiguous tensor lies."""

    offset: int
    """Bytes from the beginning."""

    shape: torch.Size

    dtype: torch.dtype

    def tensor(self, memory: mmap.mmap | None) -> torch.Tensor:
        """The tensor in the mapped `memory`."""
        if self.shape.numel() == 0 or memory is None:
            return torch.empty(self.shape, dtype=self.dtype)
        flat = torch.frombuffer(memory, dtype=self.dtype, count=self.shape.numel(), offset=self.offset)
        return flat.view(self.shape)


class SharedMemory:
    """CPU memory that another process sees too, by its file descriptor; pinned where there is CUDA. Only on Linux.

    It grows to what the largest of the staged states needs and is used again for each: to pin memory takes far longer
    than to copy into it.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("checkpoint")
        self.n_bytes = 0
        self._memory: mmap.mmap | None = None
        self._address = 0
        self._used = 0
        self._pinned = False

    def reserve(self, states: Mapping[str, Entries]) -> None:
        """Make room for a copy of `states`, in place of what there was."""
        tensors = [value for entries in states.values() for value in entries.values() if not isinstance(value, str)]
        local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        needed = sum(_aligned(tensor.nbytes) for tensor in local)
        self._used = 0
        if needed > self.n_bytes:
            # Mapped before what there was is let go: where there is not enough memory, that stays as it is.
            os.ftruncate(self.descriptor, needed)
            memory = mmap.mmap(self.descriptor, needed)
            self._unpin()
            self._memory = memory
            self._address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
            self._pin(needed)
            self.n_bytes = needed

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """An uninitialised tensor of the shape and type of `tensor` in the reserved room."""
        place = Place(self._used, tensor.shape, tensor.dtype)
        self._used += _aligned(tensor.nbytes)
        assert self._used <= self.n_bytes, "more than was reserved"
        return place.tensor(self._memory)

    def place_of(self, tensor: torch.Tensor) -> Place:
        """Where `tensor`, which `empty_like` gave, lies."""
        assert tensor.is_contiguous()
        offset = tensor.data_ptr() - self._address if tensor.numel() else 0
        assert 0 <= offset <= self.n_bytes, "not in this memory"
        return Place(offset, tensor.shape, tensor.dtype)

    def close(self) -> None:
        """Let go of the memory; the tensors in it must not be used any more."""
        self._unpin()
        self._memory = None  # not closed: tensors may still point into it
        os.close(self.descriptor)

    def _pin(self, n_bytes: int) -> None:
        if torch.cuda.is_available():
            from torchtitan.tools.torch_private import pin_memory

            pin_memory(self._address, n_bytes)
            self._pinned = True

    def _unpin(self) -> None:
        if self._pinned:
            from torchtitan.tools.torch_private import unpin_memory

            self._pinned = False
            unpin_memory(self._address)


def map_shared(descriptor: int, n_bytes: int) -> mmap.mmap | None:
    """The first `n_bytes` of the `SharedMemory` of another process, by its descriptor; None for 0 bytes."""
    return mmap.mmap(descriptor, n_bytes) if n_bytes else None


def _aligned(n_bytes: int) -> int:
    """`n_bytes` rounded up, so that the next tensor of any type may begin there."""
    return -(-n_bytes // _ALIGNMENT) * _ALIGNMENT
