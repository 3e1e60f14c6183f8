"""Sandbox for untrusted chat templates that limits the time and memory of each rendering.

Jinja's sandbox prevents a template from running code, but not from looping for hours or exhausting
memory. This sandbox charges loop iterations, calls, filters, tests, operators and output to a
budget before they run, according to the sizes of their values. A template therefore stops at the
same point on every machine. Filters without a price are removed; templates do not use them.
"""

import functools
import json
import re
from datetime import datetime
from types import BuiltinMethodType
from typing import Any, Literal, NoReturn

import jinja2
import jinja2.ext
import jinja2.filters
import jinja2.meta
import jinja2.nodes as nodes
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils
from jinja2.parser import Parser

from torchtitan.components.chat_template.sandbox.budget import (
    ITEM,
    PROGRESS,
    Progress,
    WorkLimitError,
    progress_of,
)
from torchtitan.components.chat_template.sandbox.charges import (
    CONCAT,
    ITERATION,
    STEP,
    VALUE,
    add_charges,
    charge_concat,
    charge_iteration,
    charge_value,
    literals,
)
from torchtitan.components.chat_template.sandbox.prices import (
    DEEP,
    FREE_TESTS,
    GROWING,
    LAZY,
    LIGHT,
    MAX_NUMBER,
    TEXT,
    as_list,
    check_numbers,
    priced_filter,
    priced_test,
)

__all__ = [
    "CONCAT",
    "ITERATION",
    "PROGRESS",
    "VALUE",
    "Progress",
    "Sandbox",
    "WorkLimitError",
    "add_charges",
    "create_environment",
    "literals",
    "marks_generation",
    "undeclared",
]

_DICT_ATTRIBUTES = frozenset(dir(dict))

_MARK = "mark"


class _Generation(jinja2.ext.Extension):
    """Tag `{% generation %}…{% endgeneration %}`, which marks the assistant's text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method(_MARK), [], [], body, lineno=line)

    @jinja2.pass_context
    def mark(self, context: jinja2.runtime.Context, caller: jinja2.runtime.Macro) -> str:
        text: str = caller()
        progress = progress_of(context)
        progress.marks.append((progress.n_characters, text))
        return text


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Environment that charges for calls and operators. It caches safety checks of attributes,
    which would otherwise take half of the time."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: object):
        super().__init__(**options)
        self._safe: dict[tuple[type, str], bool] = {}

    def getattr(self, obj: object, attribute: str) -> object:
        """Look up dictionary keys directly, faster than Jinja, which tries attributes first."""
        if type(obj) is dict and attribute in obj and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: object, attr: str, value: object) -> bool:
        key = type(obj), attr
        if key not in self._safe:
            returns_bytes = attr == "encode"  # methods of bytes are not needed
            self._safe[key] = not returns_bytes and super().is_safe_attribute(obj, attr, value)
        return self._safe[key]

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> object:
        progress = progress_of(context)
        if operator == "+":
            # The most common case, inlined.
            n_left = len(left) if type(left) is str else progress.size(left)
            progress.spend(n_left + (len(right) if type(right) is str else progress.size(right)))
            return left + right
        if operator == "%" and isinstance(left, str):
            GROWING["%"](progress, left, right)
        elif isinstance(left, int) and isinstance(right, int):
            n_bits = left.bit_length()
            if (
                n_bits * abs(right) if operator == "**" else n_bits + right.bit_length()
            ) > MAX_NUMBER:
                raise WorkLimitError
        elif operator == "*" and (isinstance(left, int) or isinstance(right, int)):
            times, repeated = (left, right) if isinstance(left, int) else (right, left)
            progress.spend(abs(times) * progress.size(repeated))
        return super().call_binop(context, operator, left, right)

    def call(
        __self, __context: jinja2.runtime.Context, __obj: object, *args: object, **kwargs: object
    ) -> object:  # noqa: B902, N805
        progress = progress_of(__context)
        progress.spend(STEP)
        method = getattr(__obj, "__wrapped__", __obj)  # Jinja wraps `str.format`
        if isinstance(method, BuiltinMethodType):
            name, text = method.__name__, method.__self__
            if isinstance(text, str):
                args = tuple(as_list(value) for value in args)
                progress.spend(len(text) * (ITEM if "split" in name else 1))
                if name in GROWING:
                    # Without Jinja's internal arguments.
                    own = {key: value for key, value in kwargs.items() if not key.startswith("_")}
                    GROWING[name](progress, text, *args, **own)
            if method is __obj:
                check_numbers(*args, *kwargs.values())
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, (str, list, tuple, dict)):
            progress.spend(progress.size(result))
        return result


class _Namespace(jinja2.utils.Namespace):
    """Namespace whose `repr` omits its values, which may contain each other many times."""

    __repr__ = object.__repr__


def create_environment(kind: type[Sandbox] = Sandbox) -> Sandbox:
    """Create the environment that compiles templates; see `add_charges`."""
    environment = kind(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
        finalize=charge_value,
    )
    environment.filters = {
        name: environment.filters[name] for name in (*LAZY, *LIGHT, *TEXT, *DEEP)
    }
    del environment.globals["lipsum"]
    tests: dict[str, Any] = environment.tests
    tests |= {
        name: priced_test(name, test) for name, test in tests.items() if name not in FREE_TESTS
    }
    environment.filters |= {"tojson": _to_json, "round": _round}
    environment.filters |= {
        name: priced_filter(environment, name) for name in tuple(environment.filters)
    }
    environment.filters |= {
        ITERATION: charge_iteration,
        VALUE: charge_value,
        CONCAT: charge_concat,
    }
    # All renderings use the same date, since a conversation and its prefixes must render
    # consistently.
    date = functools.partial(_date, datetime.now())
    environment.globals |= {
        "namespace": _Namespace,
        "raise_exception": _raise_exception,
        "strftime_now": date,
    }
    return environment


def marks_generation(tree: nodes.Template) -> bool:
    """Return whether the template marks the assistant's text."""
    return any(node.name == _MARK for node in tree.find_all(nodes.ExtensionAttribute))


def undeclared(tree: nodes.Template, environment: jinja2.Environment) -> set[str]:
    """Return the variables that a template reads without setting them first."""
    tree.environment = environment
    return jinja2.meta.find_undeclared_variables(tree)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON with transformers' options; Jinja's filter would escape HTML characters."""
    if any(
        (part if isinstance(part, int) else len(part)) > 16
        for part in (indent or 0, *(separators or ()))
    ):
        raise WorkLimitError
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _round(
    value: float, precision: int = 0, method: Literal["common", "ceil", "floor"] = "common"
) -> float:
    if abs(precision) > 100:
        raise WorkLimitError
    return jinja2.filters.do_round(value, precision, method)


def _date(now: datetime, format: str) -> str:
    if len(format) > 200 or re.search(r"%[^a-zA-Z%]*\d", format):  # strftime accepts any width
        raise WorkLimitError
    return now.strftime(format)


@jinja2.pass_context
def _raise_exception(context: jinja2.runtime.Context, message: str | None) -> NoReturn:
    raise jinja2.TemplateError(charge_value(context, message))
