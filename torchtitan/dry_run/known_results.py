"""Remembers what operations on fake tensors return, since a step repeats each of them for every
layer."""

import functools
from collections.abc import Callable, Iterable
from typing import ClassVar

import torch
from torch import Tensor

from torchtitan.tools.torch_private import (
    FakeTensor,
    FakeTensorMode,
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

_Maker = Callable[[list[Tensor], FakeTensorMode | None], Tensor | None]
"""Makes a result from the tensors among the arguments, for a `FakeTensorMode`."""

_MOST_KNOWN = 20_000
"""Operations that are remembered at once; a dry run has a few thousand."""


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

    _known: ClassVar[dict[object, tuple[type | None, list[_Maker]]]] = {}
    """Of all dry runs of the process, of which a plan has many that differ little."""

    def call(self, func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Return the result of `func` within the active `FakeTensorMode`, if any."""
        mode = active_fake_mode()
        if mode is None or func.namespace != "aten":
            return func(*args, **kwargs)
        try:
            tensors: list[Tensor] = []
            key = _key(func, args, kwargs, tensors)
        except _Unknown:
            return func(*args, **kwargs)
        if key not in self._known:
            result = func(*args, **kwargs)
            try:
                # an operation that changes the sizes of an argument has to run
                if _key(func, args, kwargs, []) == key:
                    if len(self._known) == _MOST_KNOWN:
                        self._known.clear()
                    self._known[key] = _recipe_of(result, tensors, _makes_views(func))
            except _Unknown:
                pass
            return result
        container, makers = self._known[key]
        results = [make(tensors, mode) for make in makers]
        return results[0] if container is None else container(results)


def _key(
    func: OpOverload,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    tensors: list[Tensor],
) -> tuple[object, ...]:
    """Return all that the sizes and types of a result depend on, and append the tensors among the
    arguments to `tensors`. Only a view depends on where its argument begins in memory, as the
    blocks of a loss do elsewhere."""
    start = len(tensors)
    facts: list[object] = [func, torch.get_default_dtype()]
    _describe(args, facts, tensors)
    for name, value in kwargs.items():
        facts.append(name)
        _describe((value,), facts, tensors)
    if _makes_views(func):
        facts += [tensor.storage_offset() for tensor in tensors[start:]]
    return tuple(facts)


@functools.cache
def _makes_views(func: OpOverload) -> bool:
    """Return whether the results of an operation are parts of arguments, by its schema."""
    schema = func._schema
    aliases = [result.alias_info for result in schema.returns]
    is_part = any(alias is not None and not alias.is_write for alias in aliases)
    return is_part or schema.name == "aten::_unsafe_view"  # whose schema does not say so


def _describe(values: Iterable[object], facts: list[object], tensors: list[Tensor]) -> None:
    for value in values:
        kind = type(value)
        if isinstance(value, FakeTensor):
            facts += _facts_of(value)
            tensors.append(value)
        elif kind in _PLAIN:
            facts += (kind, value)
        elif isinstance(value, list | tuple) and kind in (list, tuple):
            facts += (kind, len(value))
            _describe(value, facts, tensors)
        else:
            raise _Unknown


def _facts_of(tensor: FakeTensor) -> tuple[object, ...]:
    if tensor.constant is not None or tensor.is_conj() or tensor.is_neg():
        raise _Unknown
    return (
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.fake_device,
        tensor.requires_grad,
        tensor.is_inference(),
        tensor.layout,
    )


def _recipe_of(
    result: object, tensors: list[Tensor], makes_views: bool
) -> tuple[type | None, list[_Maker]]:
    """Return the type of a collection of results (None: there is one), and how to make each."""
    kind = type(result)
    results = list(result) if isinstance(result, list | tuple) else [result]
    owners = {_storage(one): i for i, one in enumerate(tensors)}
    if len(owners) < len(tensors):  # arguments of a later call may not share their memory
        raise _Unknown
    makers = [_maker_of(one, tensors, owners, makes_views) for one in results]
    new = [one for one in results if isinstance(one, Tensor) and _storage(one) not in owners]
    if len({_storage(one) for one in new}) < len(new):  # several in one memory
        raise _Unknown
    return (kind if kind in (list, tuple) else None), makers


def _maker_of(
    result: object, tensors: list[Tensor], owners: dict[int, int], makes_views: bool
) -> _Maker:
    if result is None:
        return lambda arguments, mode: None
    for i, tensor in enumerate(tensors):
        if tensor is result:
            return lambda arguments, mode: arguments[i]
    if not isinstance(result, FakeTensor):
        raise _Unknown
    _facts_of(result)  # raises for what is not made here
    make, owner = like_fake_tensor(result), owners.get(_storage(result))
    if owner is not None:
        if not makes_views:
            raise _Unknown
        return lambda arguments, mode: make(arguments[owner].untyped_storage(), mode)
    # a part of larger memory
    if result.storage_offset() or _bytes_of(make(None, None)) != _bytes_of(result):
        raise _Unknown
    return lambda arguments, mode: make(None, mode)


def _storage(tensor: Tensor) -> int:
    return storage_key(tensor.untyped_storage())


def _bytes_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()
