"""The declared types of a configuration's values, and whether a value from a file has one."""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from torchtitan.config.configurable import Configurable, config_key

_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", Path: "a path"}


def types_by_key(value: Any, declared: Any, key: str = "") -> dict[str, Any]:
    """Return the types of all values in a configuration by their keys on the command line.

    As on the command line, a field with `tyro.conf.arg(name="")` adds nothing to the keys, and the items of a list of
    configurations are named by their classes.
    """
    children: Iterable[tuple[str, Any, Any]]
    if dataclasses.is_dataclass(value):
        hints = get_type_hints(type(value), include_extras=True)
        names = [field.name for field in dataclasses.fields(value)]
        children = ((_shown(name, hints[name]), getattr(value, name), hints[name]) for name in names)
    elif isinstance(value, Mapping):
        children = ((name, item, get_args(declared)[1]) for name, item in value.items())
    elif isinstance(value, list) and value and all(isinstance(item, Configurable.Config) for item in value):
        children = ((config_key(item), item, type(item)) for item in value)
    else:
        return {key: declared}
    types: dict[str, Any] = {}
    for name, item, item_type in children:
        types |= types_by_key(item, item_type, ".".join(part for part in (key, name) if part))
    return types


def _shown(name: str, declared: Any) -> str:
    annotations = get_args(declared)[1:] if get_origin(declared) is Annotated else ()
    return "" if any(getattr(annotation, "name", None) == "" for annotation in annotations) else name


def fits(value: Any, declared: Any) -> bool:
    """Return whether a value of a YAML file fits the declared type. As on the command line, a number may be quoted,
    `None` may be a string, and a single item is a list of one. A type that YAML has no form for takes anything."""
    arguments = get_args(declared)
    origin = get_origin(declared)
    if origin is Annotated:
        return fits(value, arguments[0])
    if origin in (Union, UnionType):
        return any(fits(value, argument) for argument in arguments)
    if origin is Literal:
        return value in arguments
    if origin in (list, tuple):
        items = value if isinstance(value, list) else [value]
        types = arguments if origin is tuple and Ellipsis not in arguments else [arguments[0]] * len(items)
        return len(items) == len(types) and all(map(fits, items, types))
    if declared is NoneType:
        return value in (None, "None")
    if declared is bool:
        return isinstance(value, bool)
    if declared in (str, Path):
        return not isinstance(value, bool | list | NoneType)
    if declared in (int, float):
        return not isinstance(value, bool) and _is_number(value, declared)
    return True


def _is_number(value: Any, declared: type[int] | type[float]) -> bool:
    if declared is int and isinstance(value, float):
        return False
    try:
        declared(value)
    except (TypeError, ValueError):
        return False
    return True


def describe(declared: Any) -> str:
    """Return words for the type that complete "must be …"."""
    arguments = get_args(declared)
    origin = get_origin(declared)
    if origin is Annotated:
        return describe(arguments[0])
    if origin in (Union, UnionType):
        return " or ".join("null" if argument is NoneType else describe(argument) for argument in arguments)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin in (list, tuple):
        types = dict.fromkeys(describe(argument) for argument in arguments if argument is not Ellipsis)
        return f"a list (each item {' or '.join(types)})"
    return _NAMES.get(declared, str(declared))
