"""Renderings of conversations of equal shape, without running the template again.

Most conversations of a dataset differ only in their texts. A template is run once for a shape, with
placeholders instead of the texts. They record what the template does with a text: each question
about it (is it empty, does it begin with `<tool_response>`), each change (without the whitespace
around it), and where it writes it. Another conversation of this shape for which all questions have
the same answers takes the same path through the template, so its rendering is the recorded one with
its own texts. If an answer differs, the template runs.

`recordings` holds one such path, `placeholders` make it, and `recorder` runs the template with
them.
"""

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jinja2

from torchtitan.components.chat_template.recorder import Recorder
from torchtitan.components.chat_template.recordings import LONGEST_TEXT, Recording

_MOST_SHAPES = 2000
"""Shapes with recordings, and shapes seen once, that are remembered."""

_LONGEST_SHAPE = 1000
"""Characters of a shape that is remembered as it is."""

_Shape = str | bytes
"""A shape, or the digest of a long one."""

_MOST_PATHS = 4
"""Recordings of a shape, with other answers."""


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
        if len(texts) == 1 and len(others) == 2 and type(values.get("role")) is str:
            return cls(values, tuple(texts), _plain_shape(*others))  # as most are
        try:
            return cls(values, tuple(texts), repr(others))
        except RecursionError:
            return cls(values, tuple(texts), None)


@functools.lru_cache(maxsize=1024)
def _plain_shape(*others: object) -> str:
    """Return the shape of a message with a role, which is a string, and a text."""
    return repr([*others])


class Replays:
    """Recordings of a template.

    Args:
        source: Jinja source of the template.
        environment: environment of the template.
    """

    def __init__(self, source: str, environment: jinja2.Environment):
        self._source, self._environment = source, environment
        self._seen: set[_Shape] = set()
        """Shapes that had one conversation so far."""
        self._paths: dict[_Shape, list[Recording | None]] = {}
        """Recordings of each shape; None: it is not recorded again."""

    @functools.cached_property
    def _recorder(self) -> "Recorder":
        return Recorder(self._source, self._environment)

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
        shape = None if sum(map(len, texts)) > LONGEST_TEXT else _shape_of(inputs, variables)
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

    def _is_worth_recording(self, shape: _Shape) -> bool:
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


def _shape_of(inputs: Sequence[Input], variables: Mapping[str, object]) -> _Shape | None:
    """Return everything in a conversation but the texts of its messages; None if it is nested too
    deeply."""
    shapes = [one.shape for one in inputs if one.shape is not None]
    try:
        text = f"[{', '.join(shapes)}] {variables!r}"
    except RecursionError:
        return None
    if len(shapes) != len(inputs):
        return None
    if len(text) <= _LONGEST_SHAPE:
        return text
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
