"""Jinja's sandbox for chat templates, with a limit on the work and memory of one rendering.

A template comes with a model, from anywhere. Jinja's own sandbox keeps it from running code, but lets it loop for hours
and fill the memory. Here every step and every value costs a part of an allowance, by its size and before
it is made, so that the same template ends at the same place everywhere: turns of loops, calls, operators that make
values, lists and dictionaries, and what is written. A rarely used few of Jinja's filters, which would need bounds of
their own, are left out. What remains: one expression that compares two long lists, or sorts one, can take minutes.
"""

import functools
import json
import operator
import re
import time
from collections.abc import Callable, ItemsView, KeysView, Mapping, ValuesView
from dataclasses import dataclass, field
from datetime import datetime
from types import BuiltinMethodType
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.filters
import jinja2.nodes as nodes
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils
from jinja2.parser import Parser
from jinja2.visitor import NodeTransformer

PROGRESS = "its progress"
"""The variable with the `Progress` of a rendering. No template can name it, since the name has a blank."""

_ALLOWANCE = 2**28
"""Of one rendering; a conversation of a thousand turns takes a few hundredths."""

_SECONDS = 10.0
"""Of the processor's time that one rendering may take, for what costs more than it seems."""

_STEP, _ITEM, _GROWTH = 512, 64, 16
"""The price of a turn of a loop or a call, of an item of a list, and of a character that a filter may escape; any other
character costs 1."""

_WIDEST = 9999
"""The largest number that a method of a value may be given, such as a width."""

_LEFT_OUT = (
    *("batch", "center", "filesizeformat", "forceescape", "pprint", "random", "slice", "striptags", "urlize"),
    *("wordwrap", "xmlattr"),
)

_LIGHT = ("abs", "attr", "count", "d", "default", "first", "float", "int", "items", "last", "length", "round")
"""Filters that look at a text once, and of another value at its outside alone."""

_TEXT = ("capitalize", "format", "indent", "lower", "replace", "safe", "title", "trim", "upper")
"""Filters that make a text of any value, and look at it once."""

_DEEP = (
    *("dictsort", "e", "escape", "groupby", "max", "min", "sort", "string", "sum", "truncate", "unique", "urlencode"),
    *("tojson", "wordcount"),
)
"""Filters that look at all parts of a value, and may make a longer text of it."""

_COMPARING = (
    "==",
    "eq",
    "equalto",
    "!=",
    "ne",
    "<",
    "lt",
    "lessthan",
    "<=",
    "le",
    ">",
    "gt",
    "greaterthan",
    ">=",
    "ge",
    "in",
)

_OF_DICTIONARIES = frozenset(dir(dict))

_MARK = "mark"


class TooMuchError(Exception):
    """A template takes more than a rendering may."""


@dataclass(slots=True)
class Progress:
    """The text that a template has written so far, and its remaining allowance."""

    n_characters: int = 0
    marks: list[tuple[int, str]] = field(default_factory=list)
    """Of each mark, where it begins, and what it marks."""
    allowance: int = field(default_factory=lambda: _ALLOWANCE)
    started: float = field(default_factory=time.thread_time)
    began: float = field(default_factory=time.monotonic)

    def spend(self, amount: int) -> None:
        """Take `amount` from the allowance; raise `TooMuchError` if less is left."""
        self.allowance -= amount
        if self.allowance < 0:
            raise TooMuchError

    def has_taken_long(self) -> bool:
        """Return whether the time is over. Only the thread's own time counts: the process may have been stopped."""
        return time.thread_time() > self.started + _SECONDS

    def size(self, value: Any) -> int:
        """Return the length of a value as text, counting a part each time it occurs; raise `TooMuchError` beyond the
        remaining allowance."""
        if isinstance(value, str):
            return len(value)
        if isinstance(value, int):
            return value.bit_length() // 8
        if isinstance(value, (KeysView, ValuesView, ItemsView)):
            value = list(value)
        if isinstance(value, Mapping):
            value = [part for item in value.items() for part in item]
        if not isinstance(value, (list, tuple)):
            return _ITEM
        size = _ITEM * len(value)
        for item in value:
            size += self.size(item)
            if size > self.allowance:
                raise TooMuchError
        return size


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}`, which marks the text of the assistant."""

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


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Asks for a price at each call.

    It remembers what is safe, which the class of an object decides: to find that out takes half of the time.
    """

    def __init__(self, **options: Any):
        super().__init__(**options)
        self._safe: dict[tuple[type, str], bool] = {}

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Jinja's way for a message's keys too would be to ask for an attribute, and to fail at that."""
        if type(obj) is dict and attribute in obj and attribute not in _OF_DICTIONARIES:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        key = type(obj), attr
        if key not in self._safe:
            makes_bytes = attr == "encode"  # they have methods of their own, which templates have no use for
            self._safe[key] = not makes_bytes and super().is_safe_attribute(obj, attr, value)
        return self._safe[key]

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902, N805
        progress = _progress(__context)
        progress.spend(_STEP)
        method = getattr(__obj, "__wrapped__", __obj)  # Jinja wraps `str.format`
        if isinstance(method, BuiltinMethodType):
            if isinstance(method.__self__, str):
                progress.spend(len(method.__self__) * (_ITEM if "split" in method.__name__ else 1))
                args = _checked(progress, method.__name__, method.__self__, args, kwargs)
            if method is __obj:
                _check_numbers(*args, *kwargs.values())
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, (str, list, tuple, dict)):
            progress.spend(progress.size(result))
        return result


class _Namespace(jinja2.utils.Namespace):
    """Its text does not have its values, each of which may be there any number of times."""

    __repr__ = object.__repr__


def environment() -> _Sandbox:
    """Return the environment that compiles templates; see `bounded`."""
    made = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    for name in _LEFT_OUT:
        del made.filters[name]
    del made.globals["lipsum"]
    made.globals["namespace"] = _Namespace
    tests: dict[str, Any] = made.tests
    tests |= {name: _compared(tests[name]) for name in _COMPARING}
    made.filters |= {name: _checked_filter(name, made.filters[name]) for name in ("replace", "join", "format")}
    made.filters |= {"tojson": _to_json, "indent": _indent, "round": _round}
    made.filters |= {name: _paid(made, name) for name in tuple(made.filters)}
    made.filters |= _OPERATORS
    # One time for all that is rendered: the texts of a conversation and of its beginnings have to agree.
    made.globals |= {"raise_exception": _refuse, "strftime_now": functools.partial(_date, datetime.now())}
    return made


def bounded(tree: nodes.Template, made: _Sandbox) -> nodes.Template:
    """Return `tree` with the calls that take prices from the allowance."""
    _Bounds().visit(tree)
    tree.set_environment(made)
    return tree


def marks_generation(tree: nodes.Template) -> bool:
    """Return whether the template marks the text of the assistant."""
    return any(node.name == _MARK for node in tree.find_all(nodes.ExtensionAttribute))


def literals(tree: nodes.Node) -> list[str]:
    """Return the texts in a template, or in a part of it, that it may write."""
    texts = [node.data for node in tree.find_all(nodes.TemplateData)]
    return texts + [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]


class _Bounds(NodeTransformer):
    """Puts a filter of `_OPERATORS` around, or in place of, each expression that makes a value, and into each loop.

    Filters are the cheapest way to call a function from a template: Jinja calls them directly.
    """

    def visit_For(self, node: nodes.For) -> nodes.Node:
        written = sum(len(text) for child in node.body for text in literals(child))
        self.generic_visit(node)
        price = nodes.Const(_STEP + written, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(_filter("a step", price), lineno=node.lineno))
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        free = (nodes.TemplateData, nodes.Const)
        paid = [isinstance(of, free) or isinstance(of, nodes.Filter) and of.name in _OPERATORS for of in node.nodes]
        node.nodes = [of if is_paid else _filter("written", of) for of, is_paid in zip(node.nodes, paid, strict=True)]
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        if not any(isinstance(side, nodes.Const) for side in (node.expr, *(of.expr for of in node.ops))):
            node.expr = _filter("sized", node.expr)
            for of in node.ops:
                of.expr = _filter("sized", of.expr)
        return node

    def visit_FilterBlock(self, node: nodes.FilterBlock | nodes.AssignBlock) -> nodes.Node:
        if node.filter is not None:
            raise jinja2.TemplateSyntaxError("blocks cannot have filters", node.lineno)
        self.generic_visit(node)
        return node

    visit_AssignBlock = visit_FilterBlock

    def visit_List(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        if getattr(node, "ctx", "load") == "store" or all(
            isinstance(item, nodes.Const) for item in node.iter_child_nodes()
        ):
            return node
        return _filter("sized", node)

    visit_Tuple = visit_Dict = visit_List

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter("~", nodes.List(node.nodes, lineno=node.lineno))

    def visit_Add(self, node: nodes.Add) -> nodes.Node:
        self.generic_visit(node)
        left = node.left
        if isinstance(left, nodes.Filter) and left.name == "+":  # a sum of several is one call
            left.args.append(node.right)
            return left
        return _filter("+", left, node.right)

    def visit_Mul(self, node: nodes.BinExpr) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node.operator, node.left, node.right)

    visit_Mod = visit_Pow = visit_Mul


def _filter(name: str, node: nodes.Expr, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


def _progress(context: jinja2.runtime.Context) -> Progress:
    progress: Progress = context.parent[PROGRESS]
    return progress


@jinja2.pass_context
def _written(context: jinja2.runtime.Context, value: Any) -> Any:
    progress = _progress(context)
    progress.spend(len(value) if type(value) is str else progress.size(value))
    return value


@jinja2.pass_context
def _step(context: jinja2.runtime.Context, price: int) -> None:
    progress: Progress = context.parent[PROGRESS]
    progress.allowance -= price
    if progress.allowance < 0 or time.monotonic() > progress.began + _SECONDS and progress.has_taken_long():
        raise TooMuchError


@jinja2.pass_context
def _sized(context: jinja2.runtime.Context, value: Any) -> Any:
    progress = _progress(context)
    progress.spend(progress.size(value))
    return value


@jinja2.pass_context
def _concatenated(context: jinja2.runtime.Context, parts: list[Any]) -> Any:
    progress = _progress(context)
    progress.spend(progress.size(parts))
    return jinja2.runtime.str_join(parts)


@jinja2.pass_context
def _sum(context: jinja2.runtime.Context, *terms: Any) -> Any:
    progress = _progress(context)
    progress.spend(sum([len(term) if type(term) is str else progress.size(term) for term in terms]))
    return functools.reduce(operator.add, terms)


@jinja2.pass_context
def _product(context: jinja2.runtime.Context, left: Any, right: Any) -> Any:
    progress = _progress(context)
    numbers = [abs(side) for side in (left, right) if isinstance(side, int)]
    if len(numbers) == 2:
        _check_powers(sum(number.bit_length() for number in numbers))
    elif numbers:
        progress.spend(numbers[0] * progress.size(right if isinstance(left, int) else left))
    return left * right


@jinja2.pass_context
def _power(context: jinja2.runtime.Context, left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        _check_powers(left.bit_length() * abs(right))
    return left**right


@jinja2.pass_context
def _rest(context: jinja2.runtime.Context, left: Any, right: Any) -> Any:
    if isinstance(left, str):
        _check_format(_progress(context), left, "%", right)
    return left % right


_OPERATORS: dict[str, Callable[..., Any]] = {
    **{"a step": _step, "written": _written, "sized": _sized, "~": _concatenated},
    **{"+": _sum, "*": _product, "**": _power, "%": _rest},
}
"""Filters that `_Bounds` puts into a template, by names that no template can spell."""


def _paid(made: _Sandbox, name: str) -> Callable[..., Any]:
    """Return a filter of `made` that costs its price."""
    plain = made.filters[name]
    key: Any = object()  # which no template can name
    made.filters[key] = plain
    needs_context = hasattr(plain, "jinja_pass_arg")  # of the decorators `jinja2.pass_context` and its siblings
    rate = 1 if name in (*_LIGHT, *_TEXT) else _GROWTH if name in _DEEP else _ITEM
    reads_all = name in (*_TEXT, *_DEEP)

    @jinja2.pass_context
    def paid(context: jinja2.runtime.Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(value, str):
            _progress(context).spend(rate * len(value))
        elif reads_all:
            progress = _progress(context)
            progress.spend(rate * progress.size(value))
        elif rate == _ITEM and hasattr(value, "__len__"):
            _progress(context).spend(rate * len(value))
        if not needs_context:
            return plain(value, *args, **kwargs)
        return made.call_filter(key, value, args, kwargs, context=context, eval_ctx=context.eval_ctx)

    return paid


def _compared(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a test that costs the sizes of what it compares."""

    @jinja2.pass_context
    def compared(context: jinja2.runtime.Context, left: Any, right: Any) -> Any:
        progress = _progress(context)
        progress.spend(progress.size(left) + progress.size(right))
        return plain(left, right)

    return compared


def _checked_filter(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of Jinja's that looks at what its text would become first."""

    @jinja2.pass_context
    def checked(context: jinja2.runtime.Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        if name == "join":  # the parts are the value
            value = list(value)
            _checked(_progress(context), name, str(args[0] if args else kwargs.get("d", "")), (value,), {})
        else:
            _checked(_progress(context), "%" if name == "format" else name, str(value), args, kwargs)
        first = [context.eval_ctx] if name in ("join", "replace") else []
        return plain(*first, value, *args, **kwargs)

    return checked


def _checked(
    progress: Progress, name: str, text: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """The arguments of a method of `text`; takes the price where the result may be longer than all of them."""
    given = [*args, *kwargs.values()]
    if name in ("format", "format_map", "%"):
        _check_format(progress, text, "%" if name == "%" else "{", given)
    elif name == "replace":
        old, new = (str(part) for part in given[:2])
        progress.spend((text.count(old) if old else len(text) + 1) * len(new))
    elif name == "join" and args:
        if not isinstance(args[0], str):
            args = (list(args[0]),)
        progress.spend(len(args[0]) * len(text) + progress.size(args[0]))
    elif name == "expandtabs":
        progress.spend(text.count("\t") * _WIDEST)
    elif name == "translate":
        progress.spend(len(text) * progress.size(given[0]))
    return args


def _check_format(progress: Progress, text: str, sign: str, given: Any) -> None:
    """Take the price of putting values into `text`, and refuse widths that are far too wide or come from elsewhere."""
    if re.search(r"\{[^{}]*(\d{5}|\{[^{}]*\})" if sign == "{" else r"%[^a-zA-Z%]*(\d{5}|\*)", text):
        raise TooMuchError
    progress.spend(text.count(sign) * (_WIDEST + progress.size(given)))


def _check_numbers(*values: Any) -> None:
    if any(isinstance(value, int) and abs(value) > _WIDEST for value in values):
        raise TooMuchError


def _check_powers(n_bits: int) -> None:
    if n_bits > _WIDEST:
        raise TooMuchError


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Jinja's own filter would escape characters that mean something in HTML."""
    indent = options.get("indent")
    _check_numbers(indent)
    if isinstance(indent, (int, str)) and (indent if isinstance(indent, int) else len(indent)) > 16:
        raise TooMuchError
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


@jinja2.pass_context
def _indent(context: jinja2.runtime.Context, text: Any, width: int | str = 4, *args: Any, **kwargs: Any) -> str:
    _check_numbers(width)
    text = str(text)
    _progress(context).spend((text.count("\n") + 1) * (width if isinstance(width, int) else len(width)))
    return jinja2.filters.do_indent(text, width, *args, **kwargs)


def _round(value: float, precision: int = 0, method: Any = "common") -> float:
    if abs(precision) > 100:
        raise TooMuchError
    return jinja2.filters.do_round(value, precision, method)


def _date(now: datetime, format: str) -> str:
    if len(format) > 200 or re.search(r"%[^a-zA-Z%]*\d", format):  # the system's strftime takes any width
        raise TooMuchError
    return now.strftime(format)


@jinja2.pass_context
def _refuse(context: jinja2.runtime.Context, message: Any) -> NoReturn:
    progress = _progress(context)
    progress.spend(progress.size(message))
    raise jinja2.TemplateError(message)
