"""Follows the memory of tensors, byte by byte, and says what its peak consists of.

Works on real tensors and on fake ones (`torch._subclasses.FakeTensorMode`) alike: what is followed are storages, from
the operation that makes one to its end, each counted once however many views of it there are. What an operation
allocates and frees within itself is not seen.
"""

import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from torchtitan.dry_run.caching_allocator import CachingAllocator
from torchtitan.dry_run.observer import Observer
from torchtitan.tools.torch_private import (
    OpOverload,
    current_backward_pass,
    is_traceable_wrapper_subclass,
    storage_key,
    tree_iter,
)

MemoryKind = Literal["parameters", "gradients", "optimizer", "gathered parameters", "activations", "temporary"]
"""What memory is for. The first four are what `MemoryTracker.label` said; `activations` is what was made outside of a
backward pass and lasted until one; `temporary` is the rest."""

_FSDP_COMMUNICATION = ("_allgather_base_", "_reduce_scatter_base_")
"""Each has a stream on which its result is allocated: a gathered layer, or a layer's sharded gradients."""

MEMORY_KINDS: tuple[MemoryKind, ...] = get_args(MemoryKind)


@dataclass(eq=False)
class Allocation:
    """A storage's memory, from when it was allocated to when it was freed."""

    n_bytes: int
    owner: "Owner"
    stream: str | None = None
    """Where it would be made on a GPU: None, or for what FSDP's communication makes, the name of the operation."""
    outlived_backward: bool = False
    """Whether a backward pass began while it lasted."""
    twin_of: "Allocation | None" = None

    @property
    def kind(self) -> MemoryKind:
        """What it is for, by what is known of it so far."""
        if self.twin_of is not None:
            return self.twin_of.kind
        return self.owner.label or ("activations" if self.outlived_backward else "temporary")


@dataclass(eq=False)
class Owner:
    """A storage that is followed; several allocations where it is freed and allocated again."""

    reference: "weakref.ref[torch.UntypedStorage] | None" = None
    label: MemoryKind | None = None
    current: Allocation | None = None


@dataclass(frozen=True)
class MemoryUse:
    """Bytes in use at one moment, by kind."""

    by_kind: dict[MemoryKind, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """All kinds together."""
        return sum(self.by_kind.values())


class MemoryTracker(Observer):
    """Follows the memory of tensors.

        tracker = MemoryTracker()
        tracker.label("parameters", model.parameters())     # what exists already and is to be counted
        with observing(tracker):
            step()
            tracker.label("gradients", (p.grad for p in model.parameters()))
        tracker.peak().total                                # bytes

    A label counts for the storage's whole life, what lies behind included.
    """

    def __init__(self) -> None:
        self._owners: dict[int, Owner] = {}  # by the storage's address
        self._events: list[tuple[Allocation, int]] = []  # and 1 or -1: allocated or freed
        self._live: dict[Allocation, None] = {}
        self._latest_backward = -1  # torch numbers them

    @property
    def now(self) -> int:
        """This moment, for `use` and `replay`: the number of allocations and releases so far."""
        return len(self._events)

    def label(self, kind: MemoryKind, tensors: Iterable[Tensor | None]) -> None:
        """Say what the memory of `tensors` is for; what is not followed yet, is from now on."""
        for tensor in tensors:
            for part in _plain_parts(tensor):
                storage = part.untyped_storage()
                owner = self._owner_of(storage)
                owner.label = kind
                if owner.current is None and storage.nbytes():
                    self._allocate(owner, storage.nbytes())

    def use(self, moment: int | None = None, without: Collection[MemoryKind] = ()) -> MemoryUse:
        """What is in use now, or was at an earlier moment; kinds in `without` do not count."""
        by_kind: Counter[MemoryKind] = Counter()
        for allocation, sign in self._events if moment is None else self._events[:moment]:
            by_kind[allocation.kind] += sign * allocation.n_bytes
        return MemoryUse({kind: 0 if kind in without else by_kind[kind] for kind in MEMORY_KINDS})

    def peak(self, without: Collection[MemoryKind] = ()) -> MemoryUse:
        """The most that was in use at any time, and what it consisted of; kinds in `without` do not count."""
        live = most = moment = 0
        for index, (allocation, sign) in enumerate(self._events):
            live += sign * allocation.n_bytes * (allocation.kind not in without)
            if live > most:
                most, moment = live, index + 1
        return self.use(moment, without)

    def reserved(self, without: Collection[MemoryKind] = ()) -> int:
        """Bytes that PyTorch's CUDA allocator would have reserved by now, see `CachingAllocator`."""
        allocator = CachingAllocator()
        for allocation, sign in self._events:
            if allocation.kind in without:
                continue
            if sign > 0:
                allocator.allocate(allocation, allocation.n_bytes, allocation.stream)
            else:
                allocator.free(allocation)
        return allocator.reserved

    def allocation_of(self, tensor: Tensor) -> Allocation | None:
        """The memory of a plain tensor; None where it is not followed."""
        owner = self._owners.get(storage_key(tensor.untyped_storage()))
        return owner.current if owner else None

    def label_like(self, allocation: Allocation | None, tensor: Tensor) -> None:
        """Say that the memory of a plain tensor is for what that allocation is for."""
        if (own := self.allocation_of(tensor)) is not None:
            own.twin_of = allocation

    def replay(
        self, start: int, end: int, twins: dict[Allocation, Allocation], omit: Sequence[Allocation | None]
    ) -> None:
        """Pretend that what happened from moment `start` to `end` (see `now`) happens again, to memory of its own, but
        for the allocations in `omit`. `twins` holds what earlier replays allocated and did not free."""
        for allocation, sign in self._events[start:end]:
            if sign < 0 and allocation in twins:
                self._free(twins.pop(allocation).owner)
            elif sign > 0 and allocation not in omit:
                twins[allocation] = twin = self._allocate(Owner(), allocation.n_bytes)
                twin.twin_of, twin.stream = allocation, allocation.stream

    def observe(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Follow the storages that the operation made."""
        self._note_backward_pass()
        if func.overloadpacket.__name__ in _FSDP_COMMUNICATION and (buffer := self.allocation_of(args[0])) is not None:
            buffer.stream = func.overloadpacket.__name__
        made = [tensor for tensor in tree_iter(result) if isinstance(tensor, Tensor)]
        if not made:
            return
        given = {
            storage_key(tensor.untyped_storage()) for tensor in tree_iter((args, kwargs)) if isinstance(tensor, Tensor)
        }
        for tensor in made:
            storage = tensor.untyped_storage()
            # The storage of an argument that is not followed existed before.
            if storage_key(storage) not in self._owners and storage_key(storage) not in given:
                self._allocate(self._owner_of(storage), storage.nbytes())

    def resized(self, storage: torch.UntypedStorage, n_bytes: int) -> None:
        """Count what is freed and what is allocated anew."""
        self._note_backward_pass()
        owner = self._owner_of(storage)
        if n_bytes != (owner.current.n_bytes if owner.current else 0):
            self._free(owner)
            if n_bytes:
                self._allocate(owner, n_bytes)

    def _owner_of(self, storage: torch.UntypedStorage) -> Owner:
        """What is known of a storage; begins to follow it."""
        address = storage_key(storage)
        if address not in self._owners:
            self._owners[address] = Owner(weakref.ref(storage, lambda _: self._free(self._owners.pop(address))))
        return self._owners[address]

    def _allocate(self, owner: Owner, n_bytes: int) -> Allocation:
        allocation = owner.current = Allocation(n_bytes, owner)
        self._live[allocation] = None
        self._events.append((allocation, 1))
        return allocation

    def _free(self, owner: Owner) -> None:
        allocation, owner.current = owner.current, None
        if allocation is not None:
            del self._live[allocation]
            self._events.append((allocation, -1))

    def _note_backward_pass(self) -> None:
        current = current_backward_pass()
        if current > self._latest_backward:
            self._latest_backward = current
            for allocation in self._live:
                allocation.outlived_backward = True


def _plain_parts(tensor: Any) -> Iterator[Tensor]:
    """The tensors that a wrapper (a DTensor, a quantised tensor) holds; a plain tensor itself."""
    if not isinstance(tensor, Tensor):
        return
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    for name in names:
        yield from _plain_parts(getattr(tensor, name))
