"""Sandbox for untrusted chat templates that limits the time and memory of each rendering.

Jinja's sandbox prevents a template from running code, but not from looping for hours or exhausting
memory. This sandbox charges loop iterations, calls, filters, tests, operators and output to a
budget before they run, according to the sizes of their values. A template therefore stops at the
same point on every machine. Filters without a price are removed; templates do not use them.
"""

import functools
import json
import math
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from dataclasses import dataclass, field
from datetime import datetime
from types import BuiltinMethodType
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.filters
import jinja2.meta
import jinja2.nodes as nodes
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils
from jinja2.parser import Parser
from jinja2.visitor import NodeTransformer

PROGRESS = "its progress"
"""Variable with the `Progress` of a rendering. Templates cannot access it because of the space in
its name."""

_BUDGET = 2**28
"""Budget of one rendering; a conversation of a thousand turns uses a few percent."""

_SECONDS = 10.0
"""Limit on the CPU time of each rendering, for operations that take longer than their price
suggests."""

_STEP = 512
_ITEM = 64
_GROWTH = 16
"""Prices of a loop iteration or call, a list item, and a character that may be escaped; other
characters cost 1."""

_LONG = 100
"""Length of a list from which on each different item is measured once only."""

_MAX_NUMBER = 9999
"""Largest number, such as a width, allowed as an argument of a method."""

_LAZY = ("list", "map", "reject", "rejectattr", "reverse", "select", "selectattr")
"""Filters that process the items of a value one by one."""

_LIGHT = (
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

_TEXT = ("capitalize", "format", "indent", "lower", "replace", "safe", "title", "trim", "upper")
"""Filters that convert a value to text and read it once."""

_DEEP = (
    *(
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
        "truncate",
        "unique",
    ),
    *("tojson", "urlencode", "wordcount"),
)
"""Filters that read all parts of a value, and may return a longer text."""

_FREE_TESTS = (
    *(
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
    ),
    *("none", "number", "sameas", "sequence", "string", "test", "true", "undefined"),
)
"""Tests that do not read parts of a value. Others have a price, and reject text that `%` would
format."""

_DICT_ATTRIBUTES = frozenset(dir(dict))

_MARK = "mark"


class WorkLimitError(Exception):
    """A template exceeds the limits of one rendering."""


class _Clock(threading.local):
    """The thread's CPU time, read at most once per second, since reading it may take longer than a
    rendering."""

    def __init__(self) -> None:
        self._read_at = -math.inf
        self._cpu_time = 0.0

    def cpu_time(self) -> float:
        """Return the CPU time as of the last second."""
        now = time.monotonic()
        if now > self._read_at + 1.0:
            self._read_at, self._cpu_time = now, time.thread_time()
        return self._cpu_time


_clock = _Clock()


@dataclass(slots=True)
class Progress:
    """Length of the text rendered so far, marks, and remaining budget."""

    n_characters: int = 0
    marks: list[tuple[int, str]] = field(default_factory=list)
    """Start and text of each mark."""
    budget: int = field(default_factory=lambda: _BUDGET)
    cpu_started: float = field(default_factory=lambda: _clock.cpu_time())
    started: float = field(default_factory=time.monotonic)

    def spend(self, amount: int) -> None:
        """Subtract `amount` from the budget. Raise `WorkLimitError` if the budget is exceeded."""
        self.budget -= amount
        if self.budget < 0:
            raise WorkLimitError

    def size(self, value: object) -> int:
        """Return the length of a value as text. Raise `WorkLimitError` if it exceeds the remaining
        budget."""
        return len(value) if isinstance(value, str) else self._size(value, {})

    def _size(self, value: object, known: dict[int, int]) -> int:
        """`known`: sizes by `id` of the containers in a value, which may be in it any number of
        times."""
        if isinstance(value, str):
            return len(value)
        if isinstance(value, int):
            return value.bit_length() // 8
        if not isinstance(value, (Mapping, list, tuple, KeysView, ValuesView, ItemsView)):
            return _ITEM
        if id(value) in known:
            return known[id(value)]
        size = _ITEM * len(value)
        if size > self.budget:
            raise WorkLimitError
        if isinstance(value, (list, tuple)) and len(value) > _LONG:
            # A list that doubles itself holds the same few items millions of times.
            items = dict(zip(map(id, value), value, strict=True))
            repeated = Counter(map(id, value)).items()
            size += sum(number * self._size(items[key], known) for key, number in repeated)
            known[id(value)] = size
            return size
        for item in value.items() if isinstance(value, Mapping) else value:
            if isinstance(value, (Mapping, ItemsView)):
                # Pairs are made as they are read: their ids are used again.
                size += 2 * _ITEM + sum(self._size(part, known) for part in item)
            else:
                size += self._size(item, known)
            if size > self.budget:
                raise WorkLimitError
        known[id(value)] = size
        return size


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
        progress = _progress(context)
        progress.marks.append((progress.n_characters, text))
        return text


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Environment that charges for calls and operators. It caches safety checks of attributes,
    which would otherwise take half of the time."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: object):
        super().__init__(**options)
        self._safe: dict[tuple[type, str], bool] = {}

    def getattr(self, obj: object, attribute: str) -> Any:
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
        progress: Progress = context.parent[PROGRESS]
        if operator == "+":
            # The most common case, inlined.
            n_left = len(left) if type(left) is str else progress.size(left)
            progress.spend(n_left + (len(right) if type(right) is str else progress.size(right)))
            return left + right
        if operator == "%" and isinstance(left, str):
            _GROWING["%"](progress, left, right)
        elif isinstance(left, int) and isinstance(right, int):
            n_bits = left.bit_length()
            if (
                n_bits * abs(right) if operator == "**" else n_bits + right.bit_length()
            ) > _MAX_NUMBER:
                raise WorkLimitError
        elif operator == "*" and (isinstance(left, int) or isinstance(right, int)):
            times, repeated = (left, right) if isinstance(left, int) else (right, left)
            progress.spend(abs(times) * progress.size(repeated))
        return super().call_binop(context, operator, left, right)

    def call(
        __self, __context: jinja2.runtime.Context, __obj: object, *args: object, **kwargs: object
    ) -> object:  # noqa: B902, N805
        progress = _progress(__context)
        progress.spend(_STEP)
        method = getattr(__obj, "__wrapped__", __obj)  # Jinja wraps `str.format`
        if isinstance(method, BuiltinMethodType):
            name, text = method.__name__, method.__self__
            if isinstance(text, str):
                args = tuple(_as_list(value) for value in args)
                progress.spend(len(text) * (_ITEM if "split" in name else 1))
                if name in _GROWING:
                    # Without Jinja's internal arguments.
                    own = {key: value for key, value in kwargs.items() if not key.startswith("_")}
                    _GROWING[name](progress, text, *args, **own)
            if method is __obj:
                _check_numbers(*args, *kwargs.values())
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
        finalize=_charge_value,
    )
    environment.filters = {
        name: environment.filters[name] for name in (*_LAZY, *_LIGHT, *_TEXT, *_DEEP)
    }
    del environment.globals["lipsum"]
    tests: dict[str, Any] = environment.tests
    tests |= {
        name: _priced_test(name, test) for name, test in tests.items() if name not in _FREE_TESTS
    }
    environment.filters |= {"tojson": _to_json, "round": _round}
    environment.filters |= {
        name: _priced_filter(environment, name) for name in tuple(environment.filters)
    }
    environment.filters |= {
        ITERATION: _charge_iteration,
        VALUE: _charge_value,
        CONCAT: _charge_concat,
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


def add_charges(tree: nodes.Template, environment: Sandbox) -> nodes.Template:
    """Insert filters into `tree` that charge for constructs that the environment does not charge
    for."""
    _Charges().visit(tree)
    tree.set_environment(environment)
    return tree


def marks_generation(tree: nodes.Template) -> bool:
    """Return whether the template marks the assistant's text."""
    return any(node.name == _MARK for node in tree.find_all(nodes.ExtensionAttribute))


def undeclared(tree: nodes.Template, environment: jinja2.Environment) -> set[str]:
    """Return the variables that a template reads without setting them first."""
    tree.environment = environment
    return jinja2.meta.find_undeclared_variables(tree)


def literals(tree: nodes.Node) -> list[str]:
    """Return the literal texts in a template or a part of it."""
    texts = [node.data for node in tree.find_all(nodes.TemplateData)]
    return texts + [
        node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)
    ]


ITERATION = "an iteration"
VALUE = "a value"
CONCAT = "a concatenation"
"""Filters inserted by `_Charges`, with names that templates cannot use: the cheapest way to call a
function."""


class _Charges(NodeTransformer):
    """Charges for loop iterations, lists, dictionaries, comparisons and concatenations."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        written = sum(len(text) for child in node.body for text in literals(child))
        self.generic_visit(node)
        price = nodes.Const(_STEP + written, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(_filter(ITERATION, price), lineno=node.lineno))
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        if not any(
            isinstance(side, nodes.Const)
            for side in (node.expr, *(operand.expr for operand in node.ops))
        ):
            node.expr = _filter(VALUE, node.expr)
            for operand in node.ops:
                operand.expr = _filter(VALUE, operand.expr)
        return node

    def visit_FilterBlock(self, node: nodes.FilterBlock | nodes.AssignBlock) -> nodes.Node:
        if node.filter is not None:
            raise jinja2.TemplateSyntaxError("blocks cannot have filters", node.lineno)
        self.generic_visit(node)
        return node

    visit_AssignBlock = visit_FilterBlock

    def visit_List(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        is_constant = all(isinstance(item, nodes.Const) for item in node.iter_child_nodes())
        return (
            node if is_constant or getattr(node, "ctx", "load") == "store" else _filter(VALUE, node)
        )

    visit_Tuple = visit_Dict = visit_List

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(CONCAT, nodes.List(node.nodes, lineno=node.lineno))


def _filter(name: str, node: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _progress(context: jinja2.runtime.Context) -> Progress:
    progress: Progress = context.parent[PROGRESS]
    return progress


@jinja2.pass_context
def _charge_iteration(context: jinja2.runtime.Context, price: int) -> None:
    progress: Progress = context.parent[PROGRESS]
    progress.spend(price)
    # The limit applies to the thread's CPU time, which is slower to read than the wall-clock time.
    if (
        time.monotonic() > progress.started + _SECONDS
        and time.thread_time() > progress.cpu_started + _SECONDS
    ):
        raise WorkLimitError


@jinja2.pass_context
def _charge_value(context: jinja2.runtime.Context, value: object) -> Any:
    progress: Progress = context.parent[PROGRESS]
    progress.spend(len(value) if type(value) is str else progress.size(value))
    return value


@jinja2.pass_context
def _charge_concat(context: jinja2.runtime.Context, parts: list[object]) -> str:
    return jinja2.runtime.str_join(_charge_value(context, parts))


def _priced_filter(environment: Sandbox, name: str) -> Callable[..., Any]:
    plain = environment.filters[name]
    key: Any = object()  # templates cannot use it
    environment.filters[key] = plain
    # set by `jinja2.pass_context` and similar decorators
    needs_context = hasattr(plain, "jinja_pass_arg")
    rate = _GROWTH if name in _DEEP else _ITEM
    if name in (*_LIGHT, *_TEXT):
        rate = 1
    reads_all, growing = name in (*_TEXT, *_DEEP), _GROWING.get("%" if name == "format" else name)

    @jinja2.pass_context
    def priced(
        context: jinja2.runtime.Context, value: object, *args: object, **kwargs: object
    ) -> object:
        progress = _progress(context)
        if isinstance(value, str):
            progress.spend(rate * len(value))
        elif reads_all:
            value = _as_list(value)
            progress.spend(rate * progress.size(value))
        elif rate == _ITEM and hasattr(value, "__len__"):
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


def _priced_test(name: str, plain: Callable[..., bool]) -> Callable[..., bool]:
    @jinja2.pass_context
    def priced(
        context: jinja2.runtime.Context, value: object, *args: object, **kwargs: object
    ) -> bool:
        progress = _progress(context)
        progress.spend(progress.size([value, args, kwargs]))
        if name in ("divisibleby", "even", "odd") and isinstance(value, str):
            _GROWING["%"](progress, value, args)
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
    _check_numbers(width)
    progress.spend((text.count("\n") + 1) * (width if isinstance(width, int) else len(width)))


def _price_format(
    progress: Progress, text: str, *args: object, sign: str = "{", **kwargs: object
) -> None:
    """Charge for a format operation. Raise `WorkLimitError` for widths that are too large or not
    literal."""
    if re.search(r"\{[^{}]*(\d{5}|\{[^{}]*\})" if sign == "{" else r"%[^a-zA-Z%]*(\d{5}|\*)", text):
        raise WorkLimitError
    progress.spend(text.count(sign) * (_MAX_NUMBER + progress.size([args, kwargs])))


_GROWING: dict[str, Callable[..., None]] = {
    **{
        "format": _price_format,
        "format_map": _price_format,
        "%": functools.partial(_price_format, sign="%"),
    },
    **{"replace": _price_replace, "join": _price_join, "indent": _price_indent},
    "expandtabs": lambda progress, text, tabsize=8: progress.spend(text.count("\t") * _MAX_NUMBER),
    "translate": lambda progress, text, table: progress.spend(len(text) * progress.size(table)),
}
"""Pricing of methods and filters whose results may be longer than their arguments."""


def _check_numbers(*values: object) -> None:
    if any(isinstance(value, int) and abs(value) > _MAX_NUMBER for value in values):
        raise WorkLimitError


def _as_list(value: object) -> object:
    """Convert a generator to a list, which has a size; return other values unchanged."""
    return list(value) if isinstance(value, Iterator) else value


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
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


def _round(value: float, precision: int = 0, method: Any = "common") -> float:
    if abs(precision) > 100:
        raise WorkLimitError
    return jinja2.filters.do_round(value, precision, method)


def _date(now: datetime, format: str) -> str:
    if len(format) > 200 or re.search(r"%[^a-zA-Z%]*\d", format):  # strftime accepts any width
        raise WorkLimitError
    return now.strftime(format)


@jinja2.pass_context
def _raise_exception(context: jinja2.runtime.Context, message: object) -> NoReturn:
    raise jinja2.TemplateError(_charge_value(context, message))
