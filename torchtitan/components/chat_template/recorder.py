"""`Recorder`: runs a template with placeholders instead of texts, in Jinja's sandbox."""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import jinja2
import jinja2.compiler
import jinja2.nodes as nodes
import jinja2.runtime

from torchtitan.components.chat_template import sandbox
from torchtitan.components.chat_template.placeholders import (
    ASKED,
    DIVIDING,
    MADE,
    Method,
    Text,
    Trace,
    Unrecordable,
    check_growth,
    concatenated,
    parts_of,
)
from torchtitan.components.chat_template.recordings import Recording

if TYPE_CHECKING:
    from jinja2.compiler import CodeGenerator, Frame

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

    def _output_child_pre(
        self, node: nodes.Expr, frame: "Frame", finalize: "CodeGenerator._FinalizeInfo"
    ) -> None:
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super()._output_child_pre(node, frame, finalize)  # it refuses placeholders
            return
        self.write("environment.written(")
        if finalize.src is not None:
            self.write(finalize.src)


class _RecordingSandbox(sandbox.Sandbox):
    """Sandbox for templates with placeholders."""

    code_generator_class = _Compiler
    concat = staticmethod(concatenated)

    @staticmethod
    def written(value: object) -> "Text | str":
        return value if isinstance(value, Text) else str(value)

    def getattr(self, obj: object, attribute: str) -> object:
        if not isinstance(obj, Text):
            return super().getattr(obj, attribute)
        if attribute in (*MADE, *ASKED, *DIVIDING):
            return Method(obj, attribute)
        if hasattr(str, attribute):
            raise Unrecordable
        return self.undefined(obj="", name=attribute)

    def getitem(self, obj: object, argument: object) -> object:
        if isinstance(argument, Text):
            raise Unrecordable  # Jinja returns undefined for other keys
        if not isinstance(obj, Text):
            return super().getitem(obj, argument)
        return self.getattr(obj, argument) if isinstance(argument, str) else obj[argument]

    def call(
        __self, __context: jinja2.runtime.Context, __obj: object, *args: object, **kwargs: object
    ) -> object:  # noqa: B902, N805
        if isinstance(__obj, Method):
            for name in ("_loop_vars", "_block_vars"):  # Jinja's own
                kwargs.pop(name, None)
            return __obj(*args, **kwargs)
        return super().call(__context, __obj, *args, **kwargs)


def _recording_filter(name: str, plain: Callable[..., object]) -> Callable[..., object]:
    @jinja2.pass_context
    def recording(
        context: jinja2.runtime.Context, value: object, *args: object, **kwargs: object
    ) -> object:
        if not any(isinstance(one, Text) for one in (value, *args, *kwargs.values())):
            return plain(context, value, *args, **kwargs)
        others = (*args, *kwargs.values())
        if not isinstance(value, Text) or any(isinstance(one, Text) for one in others):
            raise Unrecordable
        if name in ("d", "default") and not kwargs and len(args) < 2:
            return value
        if name not in _TEXT_FILTERS or kwargs:
            raise Unrecordable
        if any(type(argument) is not str for argument in args):
            raise Unrecordable
        if name == "replace":
            check_growth(*args)
        return value.made(_TEXT_FILTERS[name], *args)

    return recording


def _recording_test(name: str, plain: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(plain)
    def recording(*args: object, **kwargs: object) -> bool:
        if not any(isinstance(one, Text) for one in (*args, *kwargs.values())):
            return plain(*args, **kwargs)
        # some tests get the context first
        value, *others = [one for one in args if not isinstance(one, jinja2.runtime.Context)]
        if isinstance(value, Text) and not others and not kwargs:
            if name in _TRUE_TESTS or name in _FALSE_TESTS:
                return name in _TRUE_TESTS
        if name in ("==", "eq", "equalto") and len(others) == 1:
            return bool(value == others[0])
        raise Unrecordable

    return recording


@jinja2.pass_context
def _concat(context: jinja2.runtime.Context, parts: Sequence[object]) -> object:
    return concatenated([one if isinstance(one, Text) else str(one) for one in parts])


class Recorder:
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
        trace = Trace()
        turns = [
            {
                key: trace.leaf(value) if type(value) is str and key != "role" else value
                for key, value in message.items()
            }
            for message in messages
        ]
        known = {**variables, sandbox.PROGRESS: sandbox.Progress(), "messages": turns}
        try:
            text = concatenated(self._template.generate(known))
        except Exception:  # of any kind: the template then runs as it is
            return None
        return Recording(tuple(trace.steps), _merged(parts_of(text)))


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
