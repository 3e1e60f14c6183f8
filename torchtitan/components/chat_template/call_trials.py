"""Search for the notation of a template's calls, by trial."""

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torchtitan.components.chat_template.calls import (
    CallMarks,
    CallNotation,
    JsonArguments,
    KeyedArguments,
    LiteralArguments,
    NamedCalls,
    decoded,
    loose,
    pieces,
)
from torchtitan.components.chat_template.forms import Tags
from torchtitan.components.chat_template.literals import Literals
from torchtitan.components.chat_template.stops import QUESTION, Stops, n_common
from torchtitan.components.chat_template.template import ChatTemplate
from torchtitan.components.chat_template.unwritten_calls import unwritten_calls
from torchtitan.tools.errors import UserError

_FIRST, _SECOND = "probe_first", "probe_second"
_KEYS = ("key_one", "key_two")
_VALUES = ("Value1", "Value2")
_NEWLINE = "Line1\nLine2"
_IDS = ("callbbbbb", "callccccc")
_MARK = re.compile(r"<[^<>\s]*>?|\[[A-Z_]+\]")
_OPENING = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]|\S.*\S|\S")
_MARK_AFTER = re.compile(r"\s*\]?\s*(</[^<>\s]+>|<\|(?i:[^<>\s]*end[^<>\s]*)\|>|\[/[A-Z_]+\]|`{3})")
_QUOTE = re.compile(r"<\|[\"']\|>$|[\"']$")

Arguments = Mapping[str, str]


def find_calls(template: ChatTemplate, stops: Stops, tags: Sequence[Tags]) -> CallNotation | None:
    """Return the notation of a template's calls; None if it is unknown."""
    for content, as_text in itertools.product(("", None), (False, True)):
        trial = _Trial(template, stops, tags, content, as_text)
        found = trial.find()
        if found is not None:
            return found
    question = [{"role": "user", "content": QUESTION}]
    try:
        prompt = template.render(question, tools=[_tool(_FIRST)], add_generation_prompt=True)
    except UserError:
        return None
    return unwritten_calls(prompt)


class _Turn(NamedTuple):
    """The text that a template writes for a turn with calls."""

    text: str
    """Text after the prompt and its reasoning, without the stop."""
    before: str | None
    """Text between the generation prompt and `text`; None: the turn does not continue it."""


class _Trial:
    """Tries one form of calls.

    Args:
        content: content of the messages with calls.
        as_text: whether arguments are JSON text.
    """

    def __init__(
        self,
        template: ChatTemplate,
        stops: Stops,
        tags: Sequence[Tags],
        content: str | None,
        as_text: bool,
    ):
        self._template = template
        self._stops = stops
        self._tags = tags
        self._content, self._as_text = content, as_text
        self._before = [{"role": "user", "content": QUESTION}]
        self._tools = [_tool(_FIRST), _tool(_SECOND)]

    def find(self) -> CallNotation | None:
        """Return the notation; None if the template writes none in this form."""
        both = dict(zip(_KEYS, _VALUES, strict=True))
        turn = self._render([(_FIRST, both)])
        if turn is None or not all(part in turn.text for part in (_FIRST, *_KEYS, *_VALUES)):
            return None
        objects = _objects_around(turn.text, turn.text.index(_VALUES[0]))
        if found := next(objects, None):
            return _marks(turn, *found)
        return self._named(turn)

    def _named(self, turn: _Turn) -> NamedCalls | None:
        name_at = turn.text.index(_FIRST)
        lead, rest = turn.text[:name_at], turn.text[name_at + len(_FIRST) :]
        if not lead.strip():
            return None
        begin, between = self._begin(lead)
        found = _json_after(rest) or self._keyed(rest, between)
        if found is None:
            return None
        middle, arguments, after = found
        opening = _OPENING.search(lead)
        assert opening
        around = {piece for piece in pieces(lead + between + after) if piece.strip()}
        # Words are not separators; marks between name and arguments belong to the notation.
        around = {piece for piece in around if not piece.isalnum()}
        around |= {piece for piece in pieces(middle) if _MARK.fullmatch(piece)}
        pattern = loose(middle)
        pattern = re.sub(r"\d+", r"\\d+", pattern) if _IDS[0] not in pattern else pattern
        pattern = pattern.replace(_IDS[0], r"(?P<id>\w*)")
        return NamedCalls(
            opening=opening[0],
            begin=begin,
            middle=pattern,
            arguments=arguments,
            around=frozenset(around),
            before_name=None if turn.before is None else turn.before + lead,
            after_name=middle.partition(_IDS[0])[0],  # each call has its own id
        )

    def _begin(self, lead: str) -> tuple[str, str]:
        """Return the text before the name of every call, and the text between the arguments of a
        call and the name of the next one."""
        one = {_KEYS[0]: _VALUES[0]}
        turn = self._render([(_FIRST, one), (_SECOND, one)])
        if turn is None or turn.text.count(_SECOND) != 1:
            return lead, ""
        between = turn.text[: turn.text.index(_SECOND)].rpartition(_VALUES[0])[2]
        return _common_end(lead, between), between

    def _keyed(
        self, rest: str, between: str
    ) -> tuple[str, KeyedArguments | LiteralArguments, str] | None:
        """Return the text before arguments, their notation, and the text after them."""
        ends = [rest.find(part) for part in (_KEYS[0], _VALUES[0], _KEYS[1], _VALUES[1])]
        if ends != sorted(ends):
            return None
        head, after_key, pair, _ = (
            rest[start:end]
            for start, end in zip(
                (0, ends[0] + len(_KEYS[0]), ends[1] + len(_VALUES[0]), ends[2] + len(_KEYS[1])),
                ends,
                strict=True,
            )
        )
        tail = rest[ends[3] + len(_VALUES[1]) :]
        if quote := _QUOTE.search(after_key):
            closing = tail.removeprefix(quote[0])[:1]
            if closing not in (")", "}"):
                return None
            literals = Literals(quote[0], after_key[: quote.start()].strip(), self._escapes())
            return head, LiteralArguments(literals, closing), tail[len(quote[0]) + 1 :]
        before_key = _common_end(head, pair)
        after_value = pair[: len(pair) - len(before_key)]
        middle = head[: len(head) - len(before_key)]
        if not (before_key.strip() and after_key.strip() and after_value.strip()):
            return None
        after = tail.removeprefix(after_value)
        # The text after the last call also contains the end of all calls.
        end = _common_start(after, between.removeprefix(after_value)) if between else after
        return middle, KeyedArguments(before_key, after_key, after_value, end), after

    def _escapes(self) -> bool:
        """Return whether the template writes a newline in a text as an escape."""
        turn = self._render([(_FIRST, {_KEYS[0]: _NEWLINE})])
        return turn is not None and _NEWLINE not in turn.text

    def _render(self, calls: Sequence[tuple[str, Arguments]]) -> _Turn | None:
        made = [
            {
                "id": id,
                "type": "function",
                "function": {
                    "name": name,
                    "arguments": json.dumps(arguments) if self._as_text else dict(arguments),
                },
            }
            for id, (name, arguments) in zip(_IDS, calls, strict=False)
        ]
        message = {"role": "assistant", "content": self._content, "tool_calls": made}
        is_null = self._content is None
        try:
            question, prompt = (
                self._template.render(self._before, tools=self._tools, add_generation_prompt=adds)
                for adds in (False, True)
            )
            finished = self._template.render(
                [*self._before, message],
                tools=self._tools,
                add_generation_prompt=False,
                null_content=is_null,
            )
        except UserError:
            return None
        finished = finished.removesuffix(self._stops.trailer({}, has_tools=True))
        stop = self._stops.of("call", {})
        if stop is not None and stop.lead is None and stop.text:
            finished = finished.rpartition(stop.text)[0] or finished
        is_continued = finished.startswith(prompt)
        text = finished[len(prompt) if is_continued else _start(prompt, finished) :]
        if not is_continued:
            text = _without_header(text, prompt.removeprefix(question))
        reasoning = 0
        for one in self._tags:
            close = one.close.strip()
            if close and (at := text.find(close)) >= 0:
                reasoning = max(reasoning, at + len(close))
        before = text[:reasoning] + _space(text[reasoning:])
        return _Turn(text[len(before) :], before if is_continued else None)


def _space(text: str) -> str:
    return text[: len(text) - len(text.lstrip())]


def _start(prompt: str, finished: str) -> int:
    """Return the place where a finished turn differs from the prompt, not inside a mark."""
    place = n_common(prompt, finished)
    marks = (mark for mark in _MARK.finditer(finished) if mark.start() < place < mark.end())
    return next((mark.start() for mark in marks), place)


def _without_header(text: str, header: str) -> str:
    """Return a text without the end of a generation prompt that it begins with."""
    parts = pieces(header.strip())
    ends = ("".join(parts[start:]) for start in range(len(parts)))
    return text.removeprefix(next((end for end in ends if text.startswith(end)), ""))


def _common_end(first: str, second: str) -> str:
    """Return the pieces that two texts end with in common."""
    pairs = zip(reversed(pieces(first)), reversed(pieces(second)), strict=False)
    same = [one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
    return "".join(reversed(same))


def _common_start(first: str, second: str) -> str:
    """Return the pieces that two texts begin with in common."""
    pairs = zip(pieces(first), pieces(second), strict=False)
    return "".join(one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _json_after(rest: str) -> tuple[str, JsonArguments, str] | None:
    start = rest.find("{")
    found = decoded(rest, start) if start >= 0 else None
    if found is None or found[0] != dict(zip(_KEYS, _VALUES, strict=True)):
        return None
    return rest[:start], JsonArguments(), rest[found[1] :]


def _marks(turn: _Turn, start: int, end: int, value: Mapping[str, object]) -> CallMarks | None:
    """Return the marks around JSON objects with a name."""
    text = turn.text
    lead = text[:start].rstrip().removesuffix("[").rstrip()
    is_bare = not lead
    if is_bare and turn.before is None:
        return None
    marks = [*re.finditer(r"<[^<>\s]+>|\[[A-Z_]+\]", lead)]
    closing = _MARK_AFTER.match(text, end)
    name_at = text.index(_FIRST)
    return CallMarks(
        opening=marks[-1][0] if marks else lead,
        closing=closing[1] if closing else "",
        name_key=next(key for key, one in value.items() if one == _FIRST),
        arguments_key=next(key for key, one in value.items() if _VALUES[0] in str(one)),
        before_name=None if turn.before is None else turn.before + text[:name_at],
        after_name=text[name_at + len(_FIRST) : text.rfind("{", 0, end)],
    )


def _objects_around(text: str, place: int) -> Iterator[tuple[int, int, dict[str, object]]]:
    """Yield the JSON objects around a place, such as an argument, that have the name of the trial's
    function as a value, from the inside, with their start and end."""
    start = text.rfind("{", 0, max(place, 0))
    while start >= 0:
        value, end = decoded(text, start) or (None, -1)
        if isinstance(value, dict) and _FIRST in value.values() and end > place:
            yield start, end, value
        start = text.rfind("{", 0, start)


def _tool(name: str) -> dict[str, object]:
    properties = {key: {"type": "string", "description": "A text."} for key in _KEYS}
    parameters = {"type": "object", "properties": properties, "required": [_KEYS[0]]}
    function = {"name": name, "description": "Tries the template.", "parameters": parameters}
    return {"type": "function", "function": function}
