"""Count communication and computation from the operations that a program executes."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.dry_run.observer import Observer
from torchtitan.tools.torch_private import (
    OpOverload,
    current_backward_pass,
    flop_formulas,
    group_by_name,
    is_process_group,
    storage_key,
    tree_iter,
    written_arguments,
)

CommunicationKind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "broadcast", "send", "receive"]

_KIND_OF_WORD: dict[str, CommunicationKind] = {
    "allgather": "all-gather",
    "reducescatter": "reduce-scatter",
    "allreduce": "all-reduce",
    "alltoall": "all-to-all",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "receive",
}
"""By part of the operation's name, without underscores. Other operations of the namespaces below send no data."""
_COMMUNICATION_NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")


class Transfer(NamedTuple):
    """A message of a group of ranks; `n_bytes` counts the whole message."""

    kind: CommunicationKind
    ranks: tuple[int, ...]
    n_bytes: int

    @property
    def n_bytes_sent(self) -> float:
        """Bytes that this rank sends in a ring of n ranks: (n - 1) / n of a message to gather or scatter it, twice as
        much to all-reduce it."""
        part = (len(self.ranks) - 1) / len(self.ranks)
        return self.n_bytes * {"all-reduce": 2 * part, "send": 1.0, "receive": 0.0}.get(self.kind, part)


KernelKind = Literal["product", "attention", "sharding", "other"]
"""`sharding`: copies of weights and gradients around FSDP's communication; `other` is bound by memory traffic."""

Phase = Literal["forward", "recompute", "backward", "update"]
"""`update` follows the last backward pass: gradient norm and optimizer."""


class Kernel(NamedTuple):
    """An operation on a device, as far as its time depends on it."""

    kind: KernelKind
    phase: Phase
    dtype: torch.dtype
    flops: int
    n_bytes: int
    """Bytes of its tensor arguments and results, each read or written once."""


@dataclass
class Work:
    """Kernels and messages with their numbers of calls."""

    kernels: Counter[Kernel] = field(default_factory=Counter)
    transfers: Counter[Transfer] = field(default_factory=Counter)

    @property
    def flops(self) -> int:
        """Floating-point operations of matrix products and attention."""
        return sum(kernel.flops * calls for kernel, calls in self.kernels.items())

    def copy(self) -> "Work":
        return Work(self.kernels.copy(), self.transfers.copy())

    def __iadd__(self, other: "Work") -> "Work":
        self.kernels.update(other.kernels)
        self.transfers.update(other.transfers)
        return self

    def __sub__(self, other: "Work") -> "Work":
        return Work(self.kernels - other.kernels, self.transfers - other.transfers)


class WorkTracker(Observer):
    """Count this rank's communication and the operations of matrix products and attention, 2 per multiply-add,
    including recomputation. As in `flops_per_token`, attention ignores the mask; its backward pass counts twice."""

    def __init__(self) -> None:
        self.work = Work()
        self.is_updating = False
        """True if operations outside a backward pass belong to the phase `update`, not `forward`."""

    def observe(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if func.namespace in _COMMUNICATION_NAMESPACES:
            self._count_message(func, [*args, *kwargs.values(), result])
            return
        formula = _formula_of(func) if func.namespace == "aten" else None
        flops = formula(*args, **kwargs, out_val=result) if formula else 0
        written = _count_new_bytes(func, args, kwargs, result)
        if flops or written:
            n_bytes = _count_bytes((args, kwargs)) + written
            kernel = Kernel(_kind_of(func, flops), self._phase(), _dtype_of((args, result)), flops, n_bytes)
            self.work.kernels[kernel] += 1

    def _phase(self) -> Phase:
        if current_backward_pass() == -1:
            return "update" if self.is_updating else "forward"
        # Activation checkpointing enables gradients when it repeats a forward pass inside a backward pass.
        return "recompute" if torch.is_grad_enabled() else "backward"

    def _count_message(self, func: OpOverload, values: list[Any]) -> None:
        name = func.overloadpacket.__name__.replace("_", "")
        kind = next((kind for word, kind in _KIND_OF_WORD.items() if word in name), None)
        if kind is None:
            return
        ranks = tuple(dist.get_process_group_ranks(_group_in(values)))
        # One side of a collective has the whole message, the other a part of it.
        self.work.transfers[Transfer(kind, ranks, max(map(_count_bytes, values)))] += 1


def _tensors(value: Any) -> Iterator[Tensor]:
    return (part for part in tree_iter(value) if isinstance(part, Tensor))


def _count_bytes(value: Any) -> int:
    return sum(part.numel() * part.element_size() for part in _tensors(value))


def _count_new_bytes(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Count the bytes that an operation writes; none for views and for memory that stays uninitialized."""
    if "empty" in func.overloadpacket.__name__:
        return 0
    if written := written_arguments(func, args, kwargs):
        return _count_bytes(written)
    old = {storage_key(tensor.untyped_storage()) for tensor in _tensors((args, kwargs))}
    return sum(_count_bytes(tensor) for tensor in _tensors(result) if storage_key(tensor.untyped_storage()) not in old)


def _dtype_of(value: Any) -> torch.dtype:
    """Return the type of the first tensor of floating-point numbers."""
    return next((tensor.dtype for tensor in _tensors(value) if tensor.is_floating_point()), torch.float32)


def _kind_of(func: OpOverload, flops: int) -> KernelKind:
    if func.namespace == "fsdp":
        return "sharding"
    if func.overloadpacket.__name__.startswith("_scaled_dot_product"):
        return "attention"
    return "product" if flops else "other"


def _group_in(values: list[Any]) -> dist.ProcessGroup:
    """Find the process group among an operation's arguments: the object itself, or its name, the last string."""
    for value in values:
        if is_process_group(value):
            return dist.ProcessGroup.unbox(value)
    name = [value for value in values if isinstance(value, str)][-1]
    return group_by_name(dist.distributed_c10d.GroupName(name))


def _formula_of(func: OpOverload) -> Callable[..., int] | None:
    """Return the function that counts the operations of `func` from its arguments; None if it has no products."""
    if func.overloadpacket.__name__.startswith("_scaled_dot_product"):
        return _attention_backward_flops if "backward" in func.overloadpacket.__name__ else _attention_flops
    in_place = getattr(torch.ops.aten, func.overloadpacket.__name__.removesuffix("_"), None)
    formulas = flop_formulas()
    return formulas.get(func.overloadpacket) or formulas.get(in_place)


def _attention_flops(q_BHLD: Tensor, k_BKMD: Tensor, v_BKMD: Tensor, *args: Any, **kwargs: Any) -> int:
    samples, heads, length, width = q_BHLD.shape
    return 2 * samples * heads * length * k_BKMD.shape[2] * (width + v_BKMD.shape[3])


def _attention_backward_flops(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> int:
    return 2 * _attention_flops(q, k, v)
