"""Tracks the memory of real or fake tensors, and breaks down its peak by kind. Memory is counted by
storage, once for all views. Temporary memory inside an operation is not counted."""

import itertools
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from torchtitan.dry_run.observer import Observer, Operation
from torchtitan.tools.torch_private import current_backward_pass, get_untyped_storages, storage_key

MemoryKind = Literal[
    "parameters", "gradients", "optimizer", "gathered parameters", "activations", "temporary"
]
"""The first four are labels. `activations` are allocated outside a backward pass and live until
one. The rest is `temporary`."""

MEMORY_KINDS: tuple[MemoryKind, ...] = get_args(MemoryKind)


@dataclass(eq=False)
class Allocation:
    """The memory of a storage, which may be freed and allocated again."""

    n_bytes: int = 0
    """Now; 0: freed."""
    label: MemoryKind | None = None
    outlived_backward: bool = False
    twin_of: "Allocation | None" = None
    reference: "weakref.ref[torch.UntypedStorage] | None" = None

    @property
    def kind(self) -> MemoryKind:
        if self.twin_of is not None:
            return self.twin_of.kind
        return self.label or ("activations" if self.outlived_backward else "temporary")


class MemoryTracker(Observer):
    """Track the memory of tensors.

        tracker = MemoryTracker()
        tracker.label("parameters", model.parameters())     # existing tensors to count
        with observing(tracker):
            step()
            tracker.label("gradients", (p.grad for p in model.parameters()))
        tracker.peak().total()                              # bytes

    A label applies to the whole life of a storage, including the time before the call.
    """

    def __init__(self) -> None:
        self._allocations: dict[int, Allocation] = {}  # by the storage's address
        self._events: list[tuple[Allocation, int]] = []  # bytes allocated (above 0) or freed
        self._latest_backward = -1  # the number that PyTorch gives it

    @property
    def now(self) -> int:
        """Number of allocations and releases so far, a moment for `use` and `replay`."""
        return len(self._events)

    def label(self, kind: MemoryKind, tensors: Iterable[Tensor | None]) -> None:
        """Label the memory of `tensors`, and track it from now on if it is not yet tracked."""
        for tensor in tensors:
            for storage in get_untyped_storages(tensor) if tensor is not None else ():
                allocation = self._allocation(storage)
                allocation.label = kind
                if not allocation.n_bytes:
                    self._resize(allocation, storage.nbytes())

    def use(
        self, moment: int | None = None, without: Collection[MemoryKind] = ()
    ) -> Counter[MemoryKind]:
        """Return the bytes in use at a moment (default: now) by kind, 0 for kinds in `without`."""
        by_kind: Counter[MemoryKind] = Counter(dict.fromkeys(MEMORY_KINDS, 0))
        for allocation, change in self._events[:moment]:
            if allocation.kind not in without:
                by_kind[allocation.kind] += change
        return by_kind

    def peak(self, without: Collection[MemoryKind] = ()) -> Counter[MemoryKind]:
        """Return the bytes in use at their peak by kind, 0 for kinds in `without`."""
        changes = (
            0 if allocation.kind in without else change for allocation, change in self._events
        )
        live = list(itertools.accumulate(changes, initial=0))
        return self.use(live.index(max(live)), without)

    def allocation_of(self, tensor: Tensor) -> Allocation | None:
        """Return the memory of a plain tensor; None if it is not tracked."""
        return self._allocations.get(storage_key(tensor.untyped_storage()))

    def created(self, start: int, end: int) -> list[Allocation]:
        """Return the memory that was allocated between two moments, in order."""
        return list(dict.fromkeys(one for one, change in self._events[start:end] if change > 0))

    def changes(self, start: int, end: int, of: Sequence[Allocation]) -> list[tuple[int, int]]:
        """Return the events of these allocations between two moments, each as its index and the
        change in bytes."""
        index = {one: i for i, one in enumerate(of)}
        return [(index[one], change) for one, change in self._events[start:end] if one in index]

    def place(self, tensor: Tensor, allocation: Allocation) -> None:
        """Let a new tensor, whose creation was not observed, have the memory of `allocation`."""
        storage = tensor.untyped_storage()
        allocation.reference = self._reference(storage)
        self._allocations[storage_key(storage)] = allocation

    def replay(
        self,
        start: int,
        end: int,
        twins: dict[Allocation, Allocation],
        omit: Sequence[Allocation | None],
    ) -> None:
        """Repeat the events from moment `start` to `end` with new memory, except allocations in
        `omit`. `twins` holds the allocations of earlier replays that are not freed yet."""
        for allocation, change in self._events[start:end]:
            if change < 0 and allocation in twins:
                self._resize(twins.pop(allocation), 0)
            elif change > 0 and allocation not in omit:
                twins[allocation] = Allocation(twin_of=allocation)
                self._resize(twins[allocation], change)

    def observe(self, operation: Operation) -> None:
        self._note_backward_pass()
        for tensor in operation.new_tensors:
            storage = tensor.untyped_storage()
            if storage_key(storage) not in self._allocations:
                self._resize(self._allocation(storage), storage.nbytes())

    def resized(self, storage: torch.UntypedStorage, n_bytes: int) -> None:
        self._note_backward_pass()
        allocation = self._allocation(storage)
        if n_bytes != allocation.n_bytes:
            self._resize(allocation, n_bytes)

    def _allocation(self, storage: torch.UntypedStorage) -> Allocation:
        address = storage_key(storage)
        if address not in self._allocations:
            self._allocations[address] = Allocation(reference=self._reference(storage))
        return self._allocations[address]

    def _reference(self, storage: torch.UntypedStorage) -> "weakref.ref[torch.UntypedStorage]":
        """Return a reference to a storage, which frees its memory with it."""
        address = storage_key(storage)
        return weakref.ref(storage, lambda _: self._resize(self._allocations.pop(address), 0))

    def _resize(self, allocation: Allocation, n_bytes: int) -> None:
        changes = (-allocation.n_bytes, n_bytes)
        self._events += [(allocation, change) for change in changes if change]
        allocation.n_bytes = n_bytes

    def _note_backward_pass(self) -> None:
        current = current_backward_pass()
        if current > self._latest_backward:
            self._latest_backward = current
            for allocation in self._allocations.values():
                allocation.outlived_backward |= allocation.n_bytes > 0
