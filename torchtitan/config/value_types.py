"""The declared types of a configuration's values, and whether a value from a file has one."""

from datetime import date
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", Path: "a path"}


def fits(value: Any, declared: Any, *, quoted: bool = True) -> bool:
    """Return whether a value of a YAML or JSON file fits the declared type. A type that files have no form for takes
    anything.

    Args:
        value: the value.
        declared: the type.
        quoted: whether, as on the command line, a number may be quoted, a string without quotes, `None` a string, and
            a list of one its single item.
    """
    arguments = get_args(declared)
    origin = get_origin(declared)
    if origin is Annotated:
        return fits(value, arguments[0], quoted=quoted)
    if origin in (Union, UnionType):
        return any(fits(value, argument, quoted=quoted) for argument in arguments)
    if origin is Literal:
        return value in arguments
    if origin in (list, tuple):
        if not quoted and not isinstance(value, list):
            return False
        items = value if isinstance(value, list) else [value]
        types = arguments if origin is tuple and Ellipsis not in arguments else [arguments[0]] * len(items)
        return len(items) == len(types) and all(fits(*pair, quoted=quoted) for pair in zip(items, types, strict=True))
    if declared is NoneType:
        return value is None or quoted and value == "None"
    if declared is bool:
        return isinstance(value, bool)
    if declared in (str, Path):
        return isinstance(value, str | int | float | date if quoted else str) and not isinstance(value, bool)
    if declared in (int, float):
        return not isinstance(value, bool) and _is_number(value, declared, quoted=quoted)
    return True


def _is_number(value: Any, declared: type[int] | type[float], *, quoted: bool) -> bool:
    if declared is int and isinstance(value, float) or not quoted and not isinstance(value, (int, float)):
        return False
    try:
        declared(value)
    except (TypeError, ValueError, OverflowError):
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
