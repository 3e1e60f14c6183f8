"""Recordings of decoding on CPUs: the operations of a step, repeated on the same memory without the
Python code between them, which takes more time than the operations of a small batch."""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchtitan.tools.cpu_products import is_large
from torchtitan.tools.torch_private import (
    TorchDispatchMode,
    converting_operation,
    cpu_attention_operation,
    nn_functions,
    storage_key,
    written_arguments,
)

MOST_BYTES = 2**28
"""Results of a step, beyond which it is not recorded: such operations take more time than the
Python code between them."""

_HOST_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Tags of operations that tell the host values, or shapes that depend on them."""

_HOST_READS = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.data_ptr}
"""Methods that read values without an operation."""

_COPIES = {converting_operation(), torch.ops.aten.clone.default}
_ATTENTION = cpu_attention_operation()
"""Draws no random numbers, although its tags say so: its kernel supports no dropout."""
_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
_ALIGNMENT = 64  # bytes, of the memory of results

Instruction = tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]


class NotRecordable(Exception):
    """A step that must be computed in another way, with the reason."""


class _Call(NamedTuple):
    """An operation of a step, and the memory that it reads, writes and makes, each by `_key`."""

    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    reads: set[int]
    writes: set[int]
    makes: set[int]


class _HostReads(TorchFunctionMode):
    """Raises `NotRecordable` if the host reads values that may change from step to step."""

    def __init__(self, recorder: "_Recorder"):
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if func in _HOST_READS and _key(args[0]) not in self._recorder.constant:
            raise NotRecordable(f"the host reads values by {func.__name__}")
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    """Records the operations of a step while it is computed.

    Args:
        memory: what later steps find at the same place: weights, cache and inputs. A step that
            reads other tensors that it has not made, or writes more than `index_copy_` to these,
            raises `NotRecordable`.
    """

    def __init__(self, memory: Iterable[Tensor]):
        super().__init__()
        self.calls: list[_Call] = []
        self.outer = set(map(_key, memory))
        self.constant: set[int] = set()
        """Memory with the same values in each step."""
        self._known = set(self.outer)
        self._numbers: list[Tensor] = []  # so that nothing else has their memory
        self._n_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        reads = set(map(_key, _tensors((args, kwargs))))
        if func is torch.ops.aten.lift_fresh.default:
            # of a number of the host, as numbers among the arguments
            self._known |= reads
            self.constant |= reads
            self._numbers += args
        if not reads <= self._known:
            raise NotRecordable(f"{func} reads a tensor from outside of the step")
        is_constant = reads <= self.constant
        _check_operation(func, is_constant)
        writes = set(map(_key, _tensors(written_arguments(func, args, kwargs))))
        if writes & self.outer and func is not torch.ops.aten.index_copy_.default:
            raise NotRecordable(f"{func} changes weights or inputs")
        result = func(*args, **kwargs)
        makes = set()
        for x in _tensors(result):
            if (key := _key(x)) not in reads:
                makes.add(key)
                self._n_bytes += x.untyped_storage().nbytes()
        if self._n_bytes > MOST_BYTES:
            raise NotRecordable(f"its results take more than {MOST_BYTES:,} bytes")
        self._known |= makes
        if is_constant and not writes:
            self.constant |= makes
        self.constant -= writes
        if makes or writes:
            self.calls.append(_Call(func, args, kwargs, result, reads, writes, makes))
        return result


@functools.cache
def _check_operation(operation: Any, is_constant: bool) -> None:
    """Raise `NotRecordable` if an operation may depend on more than its arguments, changes the
    shape of one, or tells the host values, unless its arguments are constant."""
    tags = set(operation.tags)
    if operation.namespace != "aten" or (
        torch.Tag.nondeterministic_seeded in tags and operation is not _ATTENTION
    ):
        raise NotRecordable(f"{operation} may depend on more than its arguments")
    if torch.Tag.inplace_view in tags:
        raise NotRecordable(f"{operation} changes the shape of a tensor")
    if _HOST_TAGS & tags and not is_constant:
        raise NotRecordable(f"{operation} tells the host values")


class Recording:
    """The operations of a step, which calls repeat; computes the step once. Raises `NotRecordable`
    for a step that may not be the same operations on the same memory each time.

    Results that depend on no memory from outside are computed once. The memory of others is used
    again as soon as nothing reads them any more.

    Args:
        step: returns the logits; it may be computed more than once.
        memory: see `_Recorder`.
    """

    def __init__(self, step: Callable[[], Tensor], memory: Iterable[Tensor]):
        recorder = _Recorder(memory)
        with recorder, _HostReads(recorder):
            result = step()
        calls = _calls_to_repeat(recorder, _key(result))
        self._program: list[Instruction] = []
        memories = _Memories(calls, _key(result))
        for number, call in enumerate(calls):
            memories.reserve(number)
            self._program.append(_instruction(call, memories))
            memories.release(number)
        self._result = memories.tensor(result)
        self._check(result)
        self.n_bytes = memories.n_bytes
        """Memory of results."""
        self._memory = memories.all
        self._has_memory = True
        self._step = step
        self._n_calls = 0

    def __call__(self) -> Tensor:
        """Repeat the operations. Return the logits, in memory that the next call overwrites. Raise
        `NotRecordable` if they are not the step's: the second call, whose inputs are not those of
        the recording, computes both."""
        if not self._has_memory:
            for memory in self._memory:
                memory.untyped_storage().resize_(len(memory))
            self._has_memory = True
        for function, args, kwargs in self._program:
            function(*args, **kwargs)
        self._n_calls += 1
        if self._n_calls == 2:
            self._check(self._step())
        return self._result

    def free_results(self) -> None:
        """Give the memory of results back until the next call."""
        self._has_memory = False
        for memory in self._memory:
            memory.untyped_storage().resize_(0)

    def _check(self, expected: Tensor) -> None:
        """Raise `NotRecordable` if repeated operations have another result than the step."""
        if not torch.equal(self._result, expected):
            raise NotRecordable("repeated operations give another result")


def _calls_to_repeat(recorder: _Recorder, result: int) -> list[_Call]:
    """Return the operations without those that only view memory, whose results are constant, or
    are not read."""
    needed = {result}
    calls = []
    for call in reversed(recorder.calls):
        makes = call.makes - recorder.constant
        if makes & needed or call.writes & (needed | recorder.outer):
            needed |= call.reads
            calls.append(call)
    return calls[::-1]


class _Memories:
    """Memory for the results of calls, used again for later results of the same size. `result` is
    read after the last call."""

    def __init__(self, calls: Sequence[_Call], result: int):
        self.n_bytes = 0
        self.all: list[Tensor] = []
        self._memory: dict[int, Tensor] = {}
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        self._calls = calls
        self._last = {key: number for number, call in enumerate(calls) for key in call.reads}
        self._last[result] = len(calls)

    def reserve(self, number: int) -> None:
        """Find memory for the results of a call that are read."""
        for x in _tensors(self._calls[number].result):
            key = _key(x)
            if key not in self._calls[number].makes or key not in self._last:
                continue
            size = -(-x.untyped_storage().nbytes() // _ALIGNMENT) * _ALIGNMENT
            if not self._free[size]:
                self.all.append(torch.empty(size, dtype=torch.uint8))
                self._free[size].append(self.all[-1])
                self.n_bytes += size
            self._memory[key] = self._free[size].pop()

    def release(self, number: int) -> None:
        """Free the memory that no later call reads."""
        for key in self._calls[number].reads:
            if self._last[key] == number and key in self._memory:
                memory = self._memory.pop(key)
                self._free[len(memory)].append(memory)

    def tensor(self, x: Tensor) -> Tensor:
        """Return the place of a tensor of the step: itself if it is constant or from outside."""
        memory = self._memory.get(_key(x))
        if memory is None:
            return x
        return memory.view(x.dtype).as_strided(x.shape, x.stride(), x.storage_offset())

    def has(self, x: Tensor) -> bool:
        """Return whether a result is read, so that it has memory."""
        return _key(x) in self._memory


def _instruction(call: _Call, memories: _Memories) -> Instruction:
    """Repeat an operation; return what repeats it again."""
    args, kwargs = _replaced((call.args, call.kwargs), memories.tensor)
    function = _function(call.operation)
    instruction: Instruction = function, args, kwargs
    if not call.writes:
        targets = [memories.tensor(x) if memories.has(x) else None for x in _tensors(call.result)]
        instruction = _write_results, (targets, function, args, kwargs), {}
        if call.operation in _COPIES:
            instruction = Tensor.copy_, (targets[0], args[0]), {}
        # oneDNN multiplies large matrices, and not into given memory
        elif isinstance(call.result, Tensor) and not (
            call.operation in _PRODUCTS and is_large(*args[-2:])
        ):
            with suppress(TypeError):  # an operation that takes no `out`
                function(*args, **kwargs, out=targets[0])
                return function, args, {**kwargs, "out": targets[0]}
    repeat, args, kwargs = instruction
    repeat(*args, **kwargs)
    return instruction


def _write_results(
    targets: list[Tensor | None],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Call a function, and copy its results that have a target there."""
    results = _tensors(function(*args, **kwargs))
    for target, result in zip(targets, results, strict=True):
        if target is not None:
            target.copy_(result)


def _function(operation: Any) -> Callable[..., Any]:
    """Return PyTorch's function or method for an operation, which is called in less time than the
    operation."""
    name = operation.overloadpacket.__name__
    for place in (torch, nn_functions, Tensor):
        if hasattr(place, name):
            return cast(Callable[..., Any], getattr(place, name))
    return cast(Callable[..., Any], operation)


def _key(x: Tensor) -> int:
    return storage_key(x.untyped_storage())


def _tensors(values: object) -> Iterator[Tensor]:
    """Yield the tensors of an operation's arguments or results, in order."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(tuple(values.values()))


def _replaced(values: Any, function: Callable[[Tensor], object]) -> Any:
    """Return arguments with the function's result instead of each tensor."""
    if isinstance(values, Tensor):
        return function(values)
    if isinstance(values, (list, tuple)):
        return type(values)(_replaced(value, function) for value in values)
    if isinstance(values, dict):
        return {name: _replaced(value, function) for name, value in values.items()}
    return values
