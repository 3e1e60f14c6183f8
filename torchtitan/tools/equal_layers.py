"""Tells layers whose operations on tensors without values are the same."""

import functools
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import MethodType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from typing_extensions import TypeIs

_LAYER_NUMBER = re.compile("layer|idx|index")
"""Part of the name of a field with the number of a layer."""

_WITHOUT_EFFECT = ("forward", "parameter_initializers")
"""Fields of modules that do not change the operations on tensors without values."""


def facts_of_layer(layer: nn.Module, index: int) -> object:
    """Return all that the operations of a layer depend on, without its number `index`: the types,
    fields and shapes of parameters of its modules."""
    return tuple(
        (
            name,
            type(module),
            _facts_of_number(getattr(module, "config", None), index),
            facts_of(dict(module.named_parameters(recurse=False))),
            facts_of(dict(module.named_buffers(recurse=False))),
            tuple(
                (key, _facts_of_field(key, value, index))
                for key, value in vars(module).items()
                if not key.startswith("_") and key not in _WITHOUT_EFFECT
            ),
        )
        for name, module in layer.named_modules()
    )


def _facts_of_number(config: object, index: int) -> object:
    """Return what the lists of a configuration of transformers say about a layer."""
    n_layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(n_layers, int):
        return None
    lists = {key: one for key, one in vars(config).items() if isinstance(one, (list, tuple))}
    each = ((key, one[index]) for key, one in lists.items() if index < len(one) == n_layers)
    return tuple((key, repr(one)) for key, one in each)


def _facts_of_field(name: str, value: object, index: int) -> object:
    if type(value) is int and value == index and _LAYER_NUMBER.search(name):
        return "the number of the layer"
    try:
        if isinstance(value, functools.partial):  # as of an activation function
            given = [*enumerate(value.args), *value.keywords.items()]
            return id(value.func), tuple(
                (key, _facts_of_field("", one, index)) for key, one in given
            )
        if isinstance(value, MethodType):
            return value.__func__, facts_of(value.__self__)
        return facts_of(value)
    except TypeError:
        return id(value)


def facts_of(value: object) -> object:
    """Return what tells tensors without values, or collections of them, from others.

    Raises:
        TypeError: for other objects.
    """
    if isinstance(value, Tensor):
        facts = (value.shape, value.stride(), value.dtype, value.device, value.requires_grad)
        return "tensor", *facts
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(facts_of, value))
    if isinstance(value, Mapping):
        return type(value), tuple((key, facts_of(item)) for key, item in value.items())
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        return type(value), value
    if _is_value(value):
        return type(value), tuple(facts_of(getattr(value, one.name)) for one in fields(value))
    raise TypeError(f"{type(value)} may hold anything")


def _is_value(value: object) -> "TypeIs[DataclassInstance]":
    """Return whether a dataclass has no attributes besides its fields."""
    if not is_dataclass(value) or isinstance(value, type):
        return False
    is_frozen = getattr(vars(type(value)).get("__dataclass_params__"), "frozen", False)
    return is_frozen or not hasattr(value, "__dict__")
