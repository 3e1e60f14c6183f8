"""Prices of filters, tests and methods, by the sizes of the values that they read and return."""

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jinja2

from torchtitan.components.chat_template.sandbox.budget import (
    ITEM,
    Progress,
    WorkLimitError,
    progress_of,
)

GROWTH = 16
"""Price of a character that may be escaped."""

MAX_NUMBER = 9999
"""Largest number, such as a width, allowed as an argument of a method."""

LAZY = ("list", "map", "reject", "rejectattr", "reverse", "select", "selectattr")
"""Filters that process the items of a value one by one."""

LIGHT = (
    "abs",
    "attr",
    "count",
    "d",
    "default",
    "first",
    "float",
    "int",
    "items",
    "last",
    "length",
    "round",
)
"""Filters that read text once, and do not read parts of other values."""

TEXT = ("capitalize", "format", "indent", "lower", "replace", "safe", "title", "trim", "upper")
"""Filters that convert a value to text and read it once."""

DEEP = (
    "dictsort",
    "e",
    "escape",
    "groupby",
    "join",
    "max",
    "min",
    "sort",
    "string",
    "sum",
    "tojson",
    "truncate",
    "unique",
    "urlencode",
    "wordcount",
)
"""Filters that read all parts of a value, and may return a longer text."""

FREE_TESTS = (
    "boolean",
    "callable",
    "defined",
    "escaped",
    "false",
    "filter",
    "float",
    "integer",
    "iterable",
    "mapping",
    "none",
    "number",
    "sameas",
    "sequence",
    "string",
    "test",
    "true",
    "undefined",
)
"""Tests that do not read parts of a value. Others have a price, and reject text that `%` would
format."""


def priced_filter(environment: jinja2.Environment, name: str) -> Callable[..., object]:
    """Return a filter of the environment that charges for its values before it runs."""
    plain = environment.filters[name]
    key: Any = object()  # templates cannot use it
    environment.filters[key] = plain
    # set by `jinja2.pass_context` and similar decorators
    needs_context = hasattr(plain, "jinja_pass_arg")
    rate = GROWTH if name in DEEP else ITEM
    if name in (*LIGHT, *TEXT):
        rate = 1
    reads_all, growing = name in (*TEXT, *DEEP), GROWING.get("%" if name == "format" else name)

    @jinja2.pass_context
    def priced(
        context: jinja2.runtime.Context, value: object, *args: object, **kwargs: object
    ) -> object:
        progress = progress_of(context)
        if isinstance(value, str):
            progress.spend(rate * len(value))
        elif reads_all:
            value = as_list(value)
            progress.spend(rate * progress.size(value))
        elif rate == ITEM and hasattr(value, "__len__"):
            progress.spend(rate * len(value))
        if name == "join":
            _price_join(progress, str(args[0] if args else kwargs.get("d", "")), value)
        elif growing is not None:
            growing(progress, str(value), *args, **kwargs)
        if not needs_context:
            return plain(value, *args, **kwargs)
        return environment.call_filter(
            key, value, args, kwargs, context=context, eval_ctx=context.eval_ctx
        )

    return priced


def priced_test(name: str, plain: Callable[..., bool]) -> Callable[..., bool]:
    """Return a test that charges for its values before it runs."""

    @jinja2.pass_context
    def priced(
        context: jinja2.runtime.Context, value: object, *args: object, **kwargs: object
    ) -> bool:
        progress = progress_of(context)
        progress.spend(progress.size([value, args, kwargs]))
        if name in ("divisibleby", "even", "odd") and isinstance(value, str):
            GROWING["%"](progress, value, args)
        return plain(value, *args, **kwargs)

    return priced


def _price_replace(
    progress: Progress, text: str, old: object, new: object, count: int | None = None
) -> None:
    progress.spend((text.count(str(old)) if old else len(text) + 1) * len(str(new)))


def _price_join(progress: Progress, text: str, parts: Any) -> None:
    progress.spend(len(parts) * len(text) + progress.size(parts))


def _price_indent(
    progress: Progress, text: str, width: int | str = 4, first: bool = False, blank: bool = False
) -> None:
    check_numbers(width)
    progress.spend((text.count("\n") + 1) * (width if isinstance(width, int) else len(width)))


def _price_format(
    progress: Progress, text: str, *args: object, sign: str = "{", **kwargs: object
) -> None:
    """Charge for a format operation. Raise `WorkLimitError` for widths that are too large or not
    literal."""
    if re.search(r"\{[^{}]*(\d{5}|\{[^{}]*\})" if sign == "{" else r"%[^a-zA-Z%]*(\d{5}|\*)", text):
        raise WorkLimitError
    progress.spend(text.count(sign) * (MAX_NUMBER + progress.size([args, kwargs])))


GROWING: dict[str, Callable[..., None]] = {
    "%": functools.partial(_price_format, sign="%"),
    "expandtabs": lambda progress, text, tabsize=8: progress.spend(text.count("\t") * MAX_NUMBER),
    "format": _price_format,
    "format_map": _price_format,
    "indent": _price_indent,
    "join": _price_join,
    "replace": _price_replace,
    "translate": lambda progress, text, table: progress.spend(len(text) * progress.size(table)),
}
"""Pricing of methods and filters whose results may be longer than their arguments."""


def check_numbers(*values: object) -> None:
    """Raise `WorkLimitError` for a number above `MAX_NUMBER`."""
    if any(isinstance(value, int) and abs(value) > MAX_NUMBER for value in values):
        raise WorkLimitError


def as_list(value: object) -> object:
    """Convert a generator to a list, which has a size; return other values unchanged."""
    return list(value) if isinstance(value, Iterator) else value
