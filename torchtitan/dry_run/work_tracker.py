"""Counts communication and computation from the operations that a program executes."""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.dry_run.observer import Observer, Operation, tensors_in
from torchtitan.tools.torch_private import (
    OpOverload,
    current_backward_pass,
    flop_formulas,
    group_by_name,
    is_process_group,
    written_arguments,
)

CommunicationKind = Literal[
    "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "broadcast", "send", "receive"
]

_KIND_OF_WORD: dict[str, CommunicationKind] = {
    kind.replace("-", "").replace("receive", "recv"): kind for kind in get_args(CommunicationKind)
}
"""By part of the operation's name, without underscores. Other operations of the namespaces below
send no data."""
_COMMUNICATION_NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")
_ATTENTION = "_scaled_dot_product"


class Transfer(NamedTuple):
    """A message of a group of ranks; `n_bytes` counts the whole message."""

    kind: CommunicationKind
    ranks: tuple[int, ...]
    n_bytes: int

    @property
    def n_bytes_sent(self) -> float:
        """Bytes that this rank sends in a ring of n ranks: (n - 1) / n of a message to gather or
        scatter it, twice as much to all-reduce it."""
        part = (len(self.ranks) - 1) / len(self.ranks)
        return self.n_bytes * {"all-reduce": 2 * part, "send": 1.0, "receive": 0.0}.get(
            self.kind, part
        )


KernelKind = Literal["product", "attention", "sharding", "other"]
"""`sharding`: copies of weights and gradients around FSDP's communication; `other` is bound by
memory traffic."""

Phase = Literal["forward", "recompute", "backward", "update"]
"""`update` follows the last backward pass: gradient norm and optimizer."""


class Kernel(NamedTuple):
    """The facts of a device operation that determine its time."""

    kind: KernelKind
    phase: Phase
    dtype: torch.dtype
    flops: int
    n_bytes: int
    """Bytes of its tensor arguments and results, each read or written once."""
    is_causal: bool = True
    """False: attention of every token to every token. Masks are taken for causal ones."""


Work = Counter[Kernel | Transfer]
"""Numbers of calls."""


class WorkTracker(Observer):
    """Count this rank's communication and the operations of matrix products and attention, 2 per
    multiply-add, including recomputation. As in `flops_per_token`, attention ignores the mask; its
    backward pass counts twice."""

    def __init__(self) -> None:
        self.work: Work = Counter()
        self.is_updating = False
        """True if operations outside a backward pass belong to the phase `update`, not
        `forward`."""

    @property
    def flops(self) -> int:
        """Floating-point operations of matrix products and attention so far."""
        return sum(one.flops * calls for one, calls in self.work.items() if isinstance(one, Kernel))

    def observe(self, operation: Operation) -> None:
        result = operation.result
        if operation.func.namespace in _COMMUNICATION_NAMESPACES:
            self._count_message(
                operation.name, [*operation.args, *operation.kwargs.values(), result]
            )
            return
        flops, written = _flops_of(operation), _count_written_bytes(operation)
        if flops or written:
            kernel = Kernel(
                _kind_of(operation, flops),
                self._phase(),
                _dtype_of((operation.args, result)),
                flops,
                _count_bytes(operation.inputs) + written,
                _is_causal(operation),
            )
            self.work[kernel] += 1

    def _phase(self) -> Phase:
        if current_backward_pass() == -1:
            return "update" if self.is_updating else "forward"
        # Activation checkpointing enables gradients when it repeats a forward pass inside a
        # backward pass.
        return "recompute" if torch.is_grad_enabled() else "backward"

    def _count_message(self, name: str, values: Sequence[object]) -> None:
        kind = next(
            (kind for word, kind in _KIND_OF_WORD.items() if word in name.replace("_", "")), None
        )
        if kind is not None:
            ranks = tuple(dist.get_process_group_ranks(_group_in(values)))
            # One side of a collective has the whole message, the other a part of it.
            self.work[Transfer(kind, ranks, max(map(_count_bytes, values)))] += 1


def _count_bytes(value: object) -> int:
    return sum(part.numel() * part.element_size() for part in tensors_in(value))


def _count_written_bytes(operation: Operation) -> int:
    """Count the bytes that an operation writes; 0 for views and uninitialized memory."""
    if "empty" in operation.name:
        return 0
    written = written_arguments(operation.func, operation.args, operation.kwargs)
    return _count_bytes(written or operation.new_tensors)


def _dtype_of(value: object) -> torch.dtype:
    """Return the type of the first tensor of floating-point numbers."""
    return next(
        (tensor.dtype for tensor in tensors_in(value) if tensor.is_floating_point()), torch.float32
    )


def _kind_of(operation: Operation, flops: int) -> KernelKind:
    if operation.func.namespace == "fsdp":
        return "sharding"
    if operation.name.startswith(_ATTENTION):
        return "attention"
    return "product" if flops else "other"


def _is_causal(operation: Operation) -> bool:
    """Return False for attention with neither a causal nor another mask."""
    if not operation.name.startswith(_ATTENTION):
        return True
    names = (argument.name for argument in operation.func._schema.arguments)
    given = {**dict(zip(names, operation.args, strict=False)), **operation.kwargs}
    masks = (given.get("attn_mask"), given.get("attn_bias"))
    return bool(given.get("is_causal")) or any(mask is not None for mask in masks)


def _group_in(values: Sequence[object]) -> dist.ProcessGroup:
    """Find the process group among an operation's arguments: the object itself, or its name, the
    last string."""
    for value in values:
        if is_process_group(value):
            return dist.ProcessGroup.unbox(value)
    name = [value for value in values if isinstance(value, str)][-1]
    return group_by_name(dist.distributed_c10d.GroupName(name))


def _flops_of(operation: Operation) -> int:
    """Count the floating-point operations of matrix products and attention."""
    if operation.func.namespace != "aten":
        return 0
    if operation.name.startswith(_ATTENTION):
        is_backward = "backward" in operation.name
        first = 1 if is_backward else 0  # after the gradient of the result
        tensors = operation.args[first : first + 3]
        q_BHLD, k_BKMD, v_BKMD = (x for x in tensors if isinstance(x, Tensor))
        samples, heads, length, width = q_BHLD.shape
        flops: int = 2 * samples * heads * length * k_BKMD.shape[2] * (width + v_BKMD.shape[3])
        return 2 * flops if is_backward else flops
    formula = _formula_of(operation.func)
    return formula(*operation.args, **operation.kwargs, out_val=operation.result) if formula else 0


@functools.cache
def _formula_of(func: OpOverload) -> Callable[..., int] | None:
    """Return the function of an operation's arguments that counts its floating-point operations;
    None: it has none."""
    formulas, packet = flop_formulas(), func.overloadpacket
    outside = getattr(torch.ops.aten, packet.__name__.removesuffix("_"), None)
    return formulas.get(packet) or (None if outside is None else formulas.get(outside))
