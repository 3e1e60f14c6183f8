"""Remembers what operations on fake tensors return, since a step repeats each of them for every
layer."""

from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from torchtitan.tools.torch_private import (
    FakeTensor,
    OpOverload,
    active_fake_mode,
    like_fake_tensor,
    storage_key,
)

_PLAIN = frozenset(
    [
        *(bool, int, float, complex, str, type(None)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    ]
)
"""Types of arguments, besides tensors, that are equal if their values are."""

_Maker = Callable[[list[Any]], Any]
"""Makes a result from the tensors among the arguments."""


class _Unknown(Exception):
    """An argument or a result that is more than sizes and types."""


class KnownResults:
    """Calls operations; one that was called before, with arguments of the same sizes and types,
    returns new tensors of the sizes and types of the first result.

    `FakeTensorMode` remembers results too, but takes half of the time of a dry run to describe
    arguments and make tensors, for symbolic sizes and kinds of tensors that no step has. Tensors
    that are not fake, with known values, complex conjugates, and operations outside of `aten` are
    left to it.
    """

    def __init__(self) -> None:
        self._known: dict[object, tuple[type | None, list[_Maker]]] = {}

    def call(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of `func` within the active `FakeTensorMode`, if any."""
        mode = active_fake_mode()
        if mode is None or func.namespace != "aten":
            return func(*args, **kwargs)
        try:
            tensors: list[Tensor] = []
            key = _key(mode, func, args, kwargs, tensors)
        except _Unknown:
            return func(*args, **kwargs)
        if key not in self._known:
            result = func(*args, **kwargs)
            try:
                # an operation that changes the sizes of an argument has to run
                if _key(mode, func, args, kwargs, []) == key:
                    self._known[key] = _recipe_of(result, tensors)
            except _Unknown:
                pass
            return result
        container, makers = self._known[key]
        results = [make(tensors) for make in makers]
        return results[0] if container is None else container(results)


def _key(
    mode: object,
    func: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: list[Tensor],
) -> tuple[object, ...]:
    """Return all that the sizes and types of a result depend on, and append the tensors among the
    arguments to `tensors`."""
    facts: list[object] = [func, id(mode), torch.get_default_dtype()]
    _describe(args, facts, tensors)
    for name, value in kwargs.items():
        facts.append(name)
        _describe((value,), facts, tensors)
    return tuple(facts)


def _describe(values: Iterable[Any], facts: list[object], tensors: list[Tensor]) -> None:
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            facts += _facts_of(value)
            tensors.append(value)
        elif kind in _PLAIN:
            facts += (kind, value)
        elif kind is list or kind is tuple:
            facts += (kind, len(value))
            _describe(value, facts, tensors)
        else:
            raise _Unknown


def _facts_of(tensor: Any) -> tuple[object, ...]:
    if tensor.constant is not None or tensor.is_conj() or tensor.is_neg():
        raise _Unknown
    return (
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.fake_device,
        tensor.requires_grad,
        tensor.is_inference(),
        tensor.layout,
    )


def _recipe_of(result: Any, tensors: list[Tensor]) -> tuple[type | None, list[_Maker]]:
    """Return the type of a collection of results (None: there is one), and how to make each."""
    kind = type(result)
    results = list(result) if kind in (list, tuple) else [result]
    owners = {_storage(one): i for i, one in enumerate(tensors)}
    if len(owners) < len(tensors):  # arguments of a later call may not share their memory
        raise _Unknown
    makers = [_maker_of(one, tensors, owners) for one in results]
    new = [one for one in results if isinstance(one, Tensor) and _storage(one) not in owners]
    if len({_storage(one) for one in new}) < len(new):  # several in one memory
        raise _Unknown
    return (kind if kind in (list, tuple) else None), makers


def _maker_of(result: Any, tensors: list[Any], owners: dict[int, int]) -> _Maker:
    if result is None:
        return lambda _: None
    for i, tensor in enumerate(tensors):
        if tensor is result:
            return itemgetter(i)
    if type(result) is not FakeTensor:
        raise _Unknown
    _facts_of(result)  # raises for what is not made here
    make, owner = like_fake_tensor(result), owners.get(_storage(result))
    if owner is not None:
        return lambda arguments: make(arguments[owner].untyped_storage())
    # a part of larger memory
    if result.storage_offset() or _bytes_of(make(None)) != _bytes_of(result):
        raise _Unknown
    return lambda _: make(None)


def _storage(tensor: Tensor) -> int:
    return storage_key(tensor.untyped_storage())


def _bytes_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()
