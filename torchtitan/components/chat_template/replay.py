"""Renderings of conversations of equal shape, without running the template again.

Most conversations of a dataset differ only in their texts. A template is run once for a shape, with
placeholders instead of the texts (`_Text`). They record what the template does with a text: each
question about it (is it empty, does it begin with `<tool_response>`), each change (without the
whitespace around it), and where it writes it. Another conversation of this shape for which all
questions have the same answers takes the same path through the template, so its rendering is the
recorded one with its own texts. If an answer differs, the template runs.

A placeholder is no `str`, and everything that a template can do with a value goes through the
environment of `_Recorder`. An operation that may depend on more than the recorded answers raises
`_Unrecordable`; such shapes are always rendered by the template itself.
"""

import functools
import hashlib
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, cast

import jinja2
import jinja2.compiler
import jinja2.nodes as nodes
import jinja2.runtime

from torchtitan.components.chat_template import sandbox

_MOST_SHAPES = 2000
"""Shapes with recordings, and shapes seen once, that are remembered."""

_MOST_PATHS = 4
"""Recordings of a shape, with other answers."""

_LONGEST_TEXT = 1 << 20
"""Characters of a conversation, and of each text that a template makes of it, up to which
recordings are used. Longer ones may exceed the limits of the sandbox, which only the template's own
run checks."""

_MOST_CHARACTERS = 1 << 26
_MOST_PARTS = 1 << 16
_MOST_GROWTH = 8
"""Further limits, which also keep hostile templates from using much memory: characters of a
rendering, parts of a recording, and length of a replacement compared with what it replaces."""

Values = list[Any]
"""Texts of a conversation, followed by what the steps of a recording make of them."""


class _Unrecordable(Exception):
    """A template does something with a text that recordings do not support."""


class _TooLong(Exception):
    """A text exceeds the limits of recordings."""


class _Step(NamedTuple):
    """Something that a template does with a text."""

    function: Callable[[Values], Any]
    answer: Any = None
    """Expected result, for a question; None: the result is a new value."""


class Recording(NamedTuple):
    """One path through a template."""

    steps: tuple[_Step, ...]
    parts: tuple[str | int, ...]
    """Rendering: literal text, and numbers of values."""

    def replay(self, texts: Sequence[str]) -> str | None:
        """Return the rendering with other texts; None if they lead to another path."""
        values: Values = [*texts]
        try:
            for function, answer in self.steps:
                result = function(values)
                if answer is not None and result != answer:
                    return None
                if answer is None:
                    values.append(_checked(result))
            return _joined(self.parts, values)
        except (_TooLong, ValueError):  # such as of `index` for a text that is not found
            return None


class Input(NamedTuple):
    """A message as a template gets it. Renderings of conversations share the inputs of their common
    messages, which must not change."""

    values: dict[str, object]
    texts: tuple[str, ...]
    """Texts that placeholders replace."""
    shape: str | None
    """Everything but these texts; None: it is nested too deeply."""

    @classmethod
    def of(cls, values: dict[str, object]) -> "Input":
        texts: list[str] = []
        others: list[object] = []
        for key, value in values.items():
            if type(value) is str and key != "role":
                texts.append(value)
                others.append(key)
            else:
                others.append((key, value))
        try:
            return cls(values, tuple(texts), repr(others))
        except RecursionError:
            return cls(values, tuple(texts), None)


class Replays:
    """Recordings of a template.

    Args:
        source: Jinja source of the template.
        environment: environment of the template.
    """

    def __init__(self, source: str, environment: jinja2.Environment):
        self._source, self._environment = source, environment
        self._seen: set[bytes] = set()
        """Shapes that had one conversation so far."""
        self._paths: dict[bytes, list[Recording | None]] = {}
        """Recordings of each shape; None: it is not recorded again."""

    @functools.cached_property
    def _recorder(self) -> "_Recorder":
        return _Recorder(self._source, self._environment)

    def render(
        self,
        inputs: Sequence[Input],
        variables: Mapping[str, object],
        run: Callable[[], str],
    ) -> str:
        """Return the result of `run`, the template's rendering, or the same without running it.

        Args:
            inputs: messages.
            variables: its other variables.
            run: runs the template.
        """
        texts = [text for message in inputs for text in message.texts]
        shape = None if sum(map(len, texts)) > _LONGEST_TEXT else _shape_of(inputs, variables)
        if shape is None:
            return run()
        for path in self._paths.get(shape, ()):
            rendered = path.replay(texts) if path else None
            if rendered is not None:
                return rendered
        rendered = run()
        if self._is_worth_recording(shape):
            path = self._recorder.record([one.values for one in inputs], variables)
            is_right = path is not None and path.replay(texts) == rendered
            self._paths.setdefault(shape, []).append(path if is_right else None)
        return rendered

    def _is_worth_recording(self, shape: bytes) -> bool:
        """Return whether a shape is seen again, and may have more recordings."""
        if shape in self._paths:
            paths = self._paths[shape]
            return len(paths) < _MOST_PATHS and None not in paths
        if shape in self._seen:
            return len(self._paths) < _MOST_SHAPES
        if len(self._seen) >= _MOST_SHAPES:
            self._seen.clear()
        self._seen.add(shape)
        return False


def _shape_of(inputs: Sequence[Input], variables: Mapping[str, object]) -> bytes | None:
    """Return a digest of everything in a conversation but the texts of its messages; None if it is
    nested too deeply."""
    shapes = [one.shape for one in inputs if one.shape is not None]
    try:
        text = f"[{', '.join(shapes)}] {variables!r}"
    except RecursionError:
        return None
    is_whole = len(shapes) == len(inputs)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest() if is_whole else None


def _joined(parts: Sequence[str | int], values: Values) -> str:
    pieces: list[str] = [part if isinstance(part, str) else values[part] for part in parts]
    if len(pieces) * max(map(len, pieces), default=0) > _MOST_CHARACTERS:
        raise _TooLong
    return "".join(pieces)


def _checked(value: Any) -> object:
    """Return a text or list of texts. Raise `_TooLong` if it is too long."""
    if len(value) > _LONGEST_TEXT:
        raise _TooLong
    return value


class _Trace:
    """A recording in progress."""

    def __init__(self) -> None:
        self.values: Values = []
        self.steps: list[_Step] = []

    def leaf(self, text: str) -> "_Text":
        assert not self.steps
        self.values.append(text)
        return _Text(self, (len(self.values) - 1,))

    def made(self, function: Callable[[Values], object]) -> int:
        """Record a new value; return its number."""
        if len(self.steps) >= _MOST_PARTS:
            raise _Unrecordable
        self.values.append(_checked(function(self.values)))
        self.steps.append(_Step(function))
        return len(self.values) - 1

    def answered(self, function: Callable[[Values], object]) -> Any:
        """Record a question; return its answer, which is not None."""
        answer = function(self.values)
        assert answer is not None
        if len(self.steps) >= _MOST_PARTS:
            raise _Unrecordable
        self.steps.append(_Step(function, answer))
        return answer


def _unsupported(self: object, *args: object, **kwargs: object) -> NoReturn:
    raise _Unrecordable


_UNSUPPORTED = (
    *("__str__", "__repr__", "__format__", "__len__", "__iter__", "__int__", "__float__"),
    *("__lt__", "__le__", "__gt__", "__ge__", "__mod__", "__rmod__", "__mul__", "__rmul__"),
)

_Opaque: Any = type("_Opaque", (), {"__slots__": (), **dict.fromkeys(_UNSUPPORTED, _unsupported)})
"""Class of values that templates cannot read."""


class _Text(_Opaque):
    """Placeholder of a text: pieces of literal text and numbers of values."""

    __slots__ = ("parts", "trace")

    def __init__(self, trace: _Trace, parts: tuple[str | int, ...]):
        if len(parts) > _MOST_PARTS:
            raise _Unrecordable
        self.trace, self.parts = trace, parts

    def number(self) -> int:
        """Return the number of the value that is this text."""
        if len(self.parts) != 1 or isinstance(self.parts[0], str):
            parts = self.parts
            self.parts = (self.trace.made(lambda values: _joined(parts, values)),)
        [number] = self.parts
        assert isinstance(number, int)
        return number

    def made(self, function: Callable[..., object], *args: object) -> "_Text":
        """Return the text that a function makes of this one."""
        number = self.number()
        return _Text(self.trace, (self.trace.made(lambda values: function(values[number], *args)),))

    def answer(self, function: Callable[..., object], *args: object) -> Any:
        """Return the answer of a function about this text."""
        number = self.number()
        return self.trace.answered(lambda values: function(values[number], *args))

    def pieces(self, function: Callable[..., Sequence[str]], *args: object) -> "list[_Text]":
        """Return the texts into which a function divides this one."""
        number, trace = self.number(), self.trace
        whole = trace.made(lambda values: function(values[number], *args))
        n_pieces = trace.answered(lambda values: len(values[whole]))
        numbers = [
            trace.made(functools.partial(_piece, whole=whole, index=index))
            for index in range(n_pieces)
        ]
        return [_Text(trace, (number,)) for number in numbers]

    def __bool__(self) -> bool:
        return bool(self.answer(bool))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, _Text):
            first, second = self.number(), other.number()
            return bool(self.trace.answered(lambda values: values[first] == values[second]))
        return isinstance(other, str) and bool(self.answer(operator.eq, other))

    def __contains__(self, other: object) -> bool:
        if isinstance(other, _Text):
            first, second = self.number(), other.number()
            return bool(self.trace.answered(lambda values: values[second] in values[first]))
        return bool(self.answer(operator.contains, other))

    def __add__(self, other: object) -> "_Text":
        return _Text(self.trace, (*self.parts, *_parts_of(other)))

    def __radd__(self, other: object) -> "_Text":
        return _Text(self.trace, (*_parts_of(other), *self.parts))

    def __getitem__(self, index: object) -> "_Text":
        if not isinstance(index, slice):
            raise _Unrecordable
        return self.made(operator.getitem, index)

    # `None`, as without a declaration, raises a `TypeError`, which Jinja takes as a missing key.
    __hash__ = _unsupported


def _piece(values: Values, whole: int, index: int) -> str:
    text: str = values[whole][index]
    return text


def _parts_of(value: object) -> tuple[str | int, ...]:
    if isinstance(value, _Text):
        return value.parts
    if type(value) is str:
        return (value,)
    raise _Unrecordable


def _concatenated(pieces: Any) -> Any:
    """Return pieces of text as one, a placeholder if one of them is one."""
    pieces = [*pieces]
    found = next((piece for piece in pieces if isinstance(piece, _Text)), None)
    if found is None:
        return "".join(pieces)
    return _Text(found.trace, tuple(part for piece in pieces for part in _parts_of(piece)))


_MADE = (
    *("capitalize", "lower", "lstrip", "removeprefix", "removesuffix", "replace", "rstrip"),
    *("strip", "title", "upper"),
)
"""Methods of texts that return a text."""

_ASKED = ("count", "endswith", "find", "index", "rfind", "startswith", "isdigit", "isspace")
"""Methods that return a number or truth value."""

_DIVIDING = ("partition", "rpartition", "rsplit", "split", "splitlines")


class _Method:
    """A method of a placeholder."""

    def __init__(self, text: _Text, name: str):
        self._text, self._name = text, name  # which templates cannot read

    def __call__(self, *args: object) -> object:
        if any(type(argument) not in (str, int, tuple) for argument in args):
            raise _Unrecordable
        if self._name == "replace":
            _check_growth(*args)
        function = getattr(str, self._name)
        if self._name in _MADE:
            return self._text.made(function, *args)
        if self._name in _ASKED:
            return self._text.answer(function, *args)
        return self._text.pieces(function, *args)


def _check_growth(old: object, new: object, *count: object) -> None:
    if not isinstance(old, str) or not isinstance(new, str) or count:
        raise _Unrecordable
    if len(new) > _MOST_GROWTH * len(old):
        raise _Unrecordable


_TEXT_FILTERS: dict[str, Callable[..., str]] = {
    "lower": str.lower,
    "replace": str.replace,
    "string": str,
    "tojson": functools.partial(json.dumps, ensure_ascii=False),
    "trim": str.strip,
    "upper": str.upper,
}
"""Filters that return a text, without keywords."""

_TRUE_TESTS = ("defined", "iterable", "sequence", "string")
_FALSE_TESTS = (
    *("boolean", "callable", "false", "float", "integer", "mapping", "none", "number", "true"),
    "undefined",
)
"""Tests whose answer is the same for all texts."""


class _Compiler(jinja2.compiler.CodeGenerator):
    """Compiler that does not convert what a template writes to `str`."""

    def _output_child_pre(self, node: nodes.Expr, frame: Any, finalize: Any) -> None:
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super()._output_child_pre(node, frame, finalize)  # it refuses placeholders
            return
        self.write("environment.written(")
        if finalize.src is not None:
            self.write(finalize.src)


class _RecordingSandbox(sandbox.Sandbox):
    """Sandbox for templates with placeholders."""

    code_generator_class = _Compiler
    concat = staticmethod(_concatenated)

    @staticmethod
    def written(value: object) -> Any:
        return value if isinstance(value, _Text) else str(value)

    def getattr(self, obj: object, attribute: str) -> Any:
        if not isinstance(obj, _Text):
            return super().getattr(obj, attribute)
        if attribute in (*_MADE, *_ASKED, *_DIVIDING):
            return _Method(obj, attribute)
        if hasattr(str, attribute):
            raise _Unrecordable
        return self.undefined(obj="", name=attribute)

    def getitem(self, obj: object, argument: object) -> object:
        if isinstance(argument, _Text):
            raise _Unrecordable  # Jinja returns undefined for other keys
        if not isinstance(obj, _Text):
            return super().getitem(obj, argument)
        return self.getattr(obj, argument) if isinstance(argument, str) else obj[argument]

    def call(
        __self, __context: jinja2.runtime.Context, __obj: object, *args: object, **kwargs: object
    ) -> object:  # noqa: B902, N805
        if isinstance(__obj, _Method):
            for name in ("_loop_vars", "_block_vars"):  # Jinja's own
                kwargs.pop(name, None)
            return __obj(*args, **kwargs)
        return super().call(__context, __obj, *args, **kwargs)


def _recording_filter(name: str, plain: Callable[..., object]) -> Callable[..., object]:
    @jinja2.pass_context
    def recording(
        context: jinja2.runtime.Context, value: object, *args: object, **kwargs: object
    ) -> object:
        if not any(isinstance(one, _Text) for one in (value, *args, *kwargs.values())):
            return plain(context, value, *args, **kwargs)
        others = (*args, *kwargs.values())
        if not isinstance(value, _Text) or any(isinstance(one, _Text) for one in others):
            raise _Unrecordable
        if name in ("d", "default") and not kwargs and len(args) < 2:
            return value
        if name not in _TEXT_FILTERS or kwargs:
            raise _Unrecordable
        if any(type(argument) is not str for argument in args):
            raise _Unrecordable
        if name == "replace":
            _check_growth(*args)
        return value.made(_TEXT_FILTERS[name], *args)

    return recording


def _recording_test(name: str, plain: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(plain)
    def recording(*args: object, **kwargs: object) -> bool:
        if not any(isinstance(one, _Text) for one in (*args, *kwargs.values())):
            return plain(*args, **kwargs)
        # some tests get the context first
        value, *others = [one for one in args if not isinstance(one, jinja2.runtime.Context)]
        if isinstance(value, _Text) and not others and not kwargs:
            if name in _TRUE_TESTS or name in _FALSE_TESTS:
                return name in _TRUE_TESTS
        if name in ("==", "eq", "equalto") and len(others) == 1:
            return bool(value == others[0])
        raise _Unrecordable

    return recording


@jinja2.pass_context
def _concat(context: jinja2.runtime.Context, parts: Sequence[object]) -> object:
    return _concatenated([one if isinstance(one, _Text) else str(one) for one in parts])


class _Recorder:
    """Runs a template with placeholders.

    Args:
        source: Jinja source.
        environment: environment of the template; the recorder uses its global functions.
    """

    def __init__(self, source: str, environment: jinja2.Environment):
        recording = sandbox.create_environment(_RecordingSandbox)
        recording.globals = environment.globals
        own = (sandbox.ITERATION, sandbox.VALUE)
        recording.filters |= {
            name: _recording_filter(name, plain)
            for name, plain in recording.filters.items()
            if isinstance(name, str) and name not in own
        }
        recording.filters[sandbox.CONCAT] = _concat
        recording.tests = {
            name: _recording_test(name, cast(Callable[..., bool], plain))
            for name, plain in recording.tests.items()
        }
        tree = recording.parse(source)
        self._template = recording.from_string(sandbox.add_charges(tree, recording))

    def record(
        self, messages: Sequence[Mapping[str, object]], variables: Mapping[str, object]
    ) -> Recording | None:
        """Return a recording of the rendering of messages; None if that is not possible."""
        trace = _Trace()
        turns = [
            {
                key: trace.leaf(value) if type(value) is str and key != "role" else value
                for key, value in message.items()
            }
            for message in messages
        ]
        known = {**variables, sandbox.PROGRESS: sandbox.Progress(), "messages": turns}
        try:
            text = _concatenated(self._template.generate(known))
        except Exception:  # of any kind: the template then runs as it is
            return None
        return Recording(tuple(trace.steps), _merged(_parts_of(text)))


def _merged(parts: Sequence[str | int]) -> tuple[str | int, ...]:
    """Join neighboring literal texts."""
    merged: list[str | int] = []
    for part in parts:
        last = merged[-1] if merged else 0
        if isinstance(part, str) and isinstance(last, str):
            merged[-1] = last + part
        else:
            merged.append(part)
    return tuple(merged)
