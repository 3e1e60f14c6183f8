"""Observes every operation on this process's own tensors."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchtitan.dry_run.known_results import KnownResults
from torchtitan.tools.torch_private import (
    DecompShardingStrategy,
    FakeTensor,
    OpOverload,
    ShardingPropagator,
    TorchDispatchMode,
    is_traceable_wrapper_subclass_type,
    storage_key,
)


@dataclass(slots=True)
class Operation:
    """An operation that was called. Its tensors are plain or fake."""

    func: OpOverload
    args: tuple[object, ...]
    kwargs: dict[str, object]
    result: object
    inputs: list[Tensor] = field(init=False)
    new_tensors: list[Tensor] = field(init=False)
    """The results that are not in the memory of an argument."""

    def __post_init__(self) -> None:
        self.inputs = tensors_in((self.args, self.kwargs))
        old = {storage_key(tensor.untyped_storage()) for tensor in self.inputs}
        self.new_tensors = [
            one for one in tensors_in(self.result) if storage_key(one.untyped_storage()) not in old
        ]

    @property
    def name(self) -> str:
        name: str = self.func.overloadpacket.__name__
        return name


def tensors_in(value: object) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and dictionaries, which hold all that an operation
    takes and returns. A dry run calls this for each of 100,000 operations, so it asks nothing of
    PyTorch, whose `tree_iter` also knows other containers."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for part in value for tensor in tensors_in(part)]


class Observer:
    """Base class that receives every operation within `observing`."""

    def observe(self, operation: Operation) -> None:
        """Receive an operation after the call."""

    def resized(self, storage: torch.UntypedStorage, n_bytes: int) -> None:
        """Receive the resize of `storage` to `n_bytes` bytes, before its memory changes."""


@contextlib.contextmanager
def observing(*observers: Observer) -> Iterator[None]:
    """Report every operation within the block to `observers`. Operations on a DTensor or another
    wrapper are reported as operations on its local tensors, including communication; operations
    that only infer a *global* shape are not reported."""
    mode = _Observation(observers)
    wrappers: dict[tuple[type, str], Callable[..., object]] = {
        (ShardingPropagator, "_propagate_tensor_meta_non_cached"): mode.paused(),
        (DecompShardingStrategy, "propagate_strategy"): mode.paused(),
        # FSDP resizes gathered weights this way, bypassing the dispatcher.
        (torch.UntypedStorage, "resize_"): mode.observing_resize,
    }
    with contextlib.ExitStack() as stack:
        for (owner, name), wrapper in wrappers.items():
            method = getattr(owner, name)
            stack.callback(setattr, owner, name, method)
            setattr(owner, name, wrapper(method))
        stack.enter_context(mode)
        yield


_is_wrapper = functools.cache(is_traceable_wrapper_subclass_type)


def _is_float32(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype is torch.float32


class _Observation(TorchDispatchMode):
    def __init__(self, observers: Sequence[Observer]) -> None:
        super().__init__()
        self.observers = observers
        self.looking_away = False
        self.results = KnownResults()

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            # Most calls of a step, by the autograd engine; the tensor itself answers.
            return FakeTensor.__torch_dispatch__(func, types, args)
        if any(map(_is_wrapper, types)):
            return NotImplemented  # the wrapper unwraps itself first; this mode then sees its parts
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ == "_grouped_mm" and _is_float32(args[0]):
            # Without values, PyTorch knows only bfloat16.
            tensors = (x.bfloat16() for x in args[:2] if isinstance(x, Tensor))
            result = func(*tensors, *args[2:], **kwargs).float()
        else:
            result = self.results.call(func, args, kwargs)
        # `prim` operations only query a tensor's properties.
        if not self.looking_away and func.namespace != "prim":
            operation = Operation(func, args, kwargs, result)
            for observer in self.observers:
                observer.observe(operation)
        return result

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        before, self.looking_away = self.looking_away, True
        try:
            yield
        finally:
            self.looking_away = before

    def observing_resize(
        self, method: Callable[[torch.UntypedStorage, int], object]
    ) -> Callable[[torch.UntypedStorage, int], object]:
        def resize(storage: torch.UntypedStorage, n_bytes: int) -> object:
            for observer in self.observers:
                observer.resized(storage, n_bytes)
            return method(storage, n_bytes)

        return resize
