"""Formats of reasoning and calls in chat templates, found by trial, and the reader of replies."""

import json
import re
import uuid
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

from torchtitan.components.chat_template import ChatTemplate
from torchtitan.components.chat_template.forms import Forms, Tags
from torchtitan.components.chat_template.stops import Trial, trial_conversations
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.tools.errors import UserError

_NAME = "probe_function"  # of `trial_conversations`
_MARK_BEFORE = re.compile(r"(<[^<>\s]+>|\[[A-Z_]+\])\s*\[?\s*\Z")
_MARK_AFTER = re.compile(r"\s*\]?\s*(</[^<>\s]+>|<\|(?i:[^<>\s]*end[^<>\s]*)\|>|\[/[A-Z_]+\])")
_BETWEEN_CALLS = " \t\r\n,;[]"


class Call(NamedTuple):
    """A call of a function."""

    id: str
    name: str
    arguments: str
    """A JSON object."""

    def to_dict(self) -> dict[str, Any]:
        """Return an item of `tool_calls`."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class CallMarks:
    """Calls as JSON objects between marks."""

    opening: str
    """Mark before a call or several; empty: the reply is the JSON."""
    closing: str
    """Mark after it; empty: none."""
    name_key: str
    arguments_key: str
    before_name: str | None
    """Text from the beginning of a reply that calls a function to the function's name. None:
    unknown, since the finished turn does not continue the generation prompt."""
    after_name: str
    """Text between the name and the arguments."""

    def read(self, text: str, known: Collection[str]) -> list[Call] | None:
        """Return the calls in a text of nothing else; None if it is anything else. Without marks,
        names must be `known`."""
        calls = []
        place = 0
        while place < len(text):
            mark = next((one for one in self._marks if text.startswith(one, place)), None)
            if mark:
                place += len(mark)
                continue
            if text[place] in _BETWEEN_CALLS:
                place += 1
                continue
            try:
                value, place = _DECODER.raw_decode(text, place)
            except (ValueError, RecursionError):
                return None
            call = self._call(value)
            if call is None or not (self.opening or call.name in known):
                return None
            calls.append(call)
        return calls or None

    @property
    def _marks(self) -> list[str]:
        return [mark for mark in (self.opening, self.closing) if mark]

    def _call(self, value: object) -> Call | None:
        if not isinstance(value, dict) or not isinstance(value.get(self.name_key), str):
            return None
        arguments = value.get(self.arguments_key, {})
        if isinstance(arguments, str):
            try:
                arguments = _DECODER.decode(arguments)
            except (ValueError, RecursionError):
                return None
        if not isinstance(arguments, dict):
            return None
        text = json.dumps(arguments, ensure_ascii=False)
        # Mistral's templates reject ids of any other length.
        return Call(uuid.uuid4().hex[:9], value[self.name_key], text)


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


_DECODER = json.JSONDecoder(parse_constant=_no_number)


class ReplyFormat:
    """The parts of a template's replies.

    Calls are read if the template writes them as JSON objects with a name and arguments, as
    Hermes, Qwen 2.5 and 3 (`<tool_call>`), Mistral (`[TOOL_CALLS]`) and Llama 3.1 (nothing but the
    object) do. Calls in another notation stay in the text.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer):
        self._template = template
        self._tokenizer = tokenizer
        self._forms = Forms(template)

    @cached_property
    def calls(self) -> CallMarks | None:
        """Marks of calls; None: the template writes none that can be read."""
        found = (self._try(trial) for trial in trial_conversations("call"))
        return next(filter(None, found), None)

    @cached_property
    def tags(self) -> list[Tags]:
        """Tags of reasoning."""
        return [tags for tags in self._forms.tags if tags.open.strip() and tags.close.strip()]

    def opened_by(self, prompt: str) -> Tags | None:
        """Return the tags whose opening one ends a prompt."""
        opened = self._forms.opened_by(prompt)
        return opened if opened in self.tags else None

    def kept(self, *, with_calls: bool) -> dict[int, str]:
        """Return the special tokens that belong to tags and marks, with their texts."""
        marks = [part.strip() for tags in self.tags for part in (tags.open, tags.close)]
        if with_calls and self.calls:
            marks += [self.calls.opening, self.calls.closing]
        return {
            token: text
            for token, text in self._special_texts.items()
            if text and any(text in mark for mark in marks)
        }

    @cached_property
    def _special_texts(self) -> dict[int, str]:
        tokenizer = self._tokenizer
        return {token: tokenizer.decode([token]) for token in tokenizer.special_ids}

    def _try(self, trial: Trial) -> CallMarks | None:
        before = trial.messages[:-1]
        try:
            prompt = self._template.render(before, tools=trial.tools, add_generation_prompt=True)
            finished = self._template.render(
                trial.messages, tools=trial.tools, add_generation_prompt=False
            )
        except UserError:
            return None
        found = next(_objects_around(finished, finished.rfind(trial.marker)), None)
        if found is None:
            return None
        start, end, value = found
        name_at = finished.find(_NAME, start)
        name_key = next(key for key, one in value.items() if one == _NAME)
        arguments_key = next(key for key, one in value.items() if trial.marker in str(one))
        continues = finished.startswith(prompt)
        is_bare = continues and not finished[len(prompt) : start].strip(" \t\r\n[")
        opening = _MARK_BEFORE.search(finished[:start])
        if opening is None and not is_bare:
            return None
        closing = _MARK_AFTER.match(finished, end)
        if closing and closing[1] == self._template.variables.get("eos_token"):
            closing = None  # the stop
        after_name = finished[name_at + len(_NAME) : finished.rfind("{", 0, end)]
        return CallMarks(
            opening="" if is_bare or opening is None else opening[1],
            closing=closing[1] if closing else "",
            name_key=name_key,
            arguments_key=arguments_key,
            before_name=finished[len(prompt) : name_at] if continues else None,
            after_name=after_name,
        )


def _objects_around(text: str, place: int) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield the JSON objects around a place, such as an argument, that have the name of the trial's
    function as a value, from the inside, with their start and end."""
    start = text.rfind("{", 0, max(place, 0))
    while start >= 0:
        try:
            value, end = _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError):
            value, end = None, -1
        if isinstance(value, dict) and _NAME in value.values() and end > place:
            yield start, end, value
        start = text.rfind("{", 0, start)


Kind = Literal["reasoning_content", "content"]


@dataclass(slots=True)
class Piece:
    """New parts of a reply."""

    texts: dict[Kind, str] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)

    def add(self, kind: Kind, text: str) -> None:
        """Append text."""
        if text:
            self.texts[kind] = self.texts.get(kind, "") + text


class ReplyReader:
    """Splits a reply into reasoning, content and calls, while its text arrives.

    Whitespace around reasoning, and between content and calls, is dropped. Calls come at the end;
    if they cannot be read, their text is content.

    Args:
        tags: tags of reasoning that the reply may begin with.
        is_open: whether the prompt has opened the first of them.
        marks: marks of calls; None: none are read.
        known: names of the functions.
    """

    def __init__(
        self,
        tags: Sequence[Tags],
        is_open: bool,
        marks: CallMarks | None,
        known: Collection[str] = (),
    ):
        self._tags = tags
        self._marks = marks
        self._known = known
        self._closing = tags[0].close.strip() if is_open else ""
        self._text = ""
        self._drops_space = is_open
        self._is_beginning = not is_open
        self._has_calls = False

    def push(self, text: str) -> Piece:
        """Append text, and return the parts that are complete."""
        return self._read(text, is_final=False)

    def finish(self) -> Piece:
        """Return the rest."""
        return self._read("", is_final=True)

    def _read(self, text: str, *, is_final: bool) -> Piece:
        piece = Piece()
        self._text += text
        if self._is_beginning and not self._begin(is_final):
            return piece
        if self._closing:
            self._reason(piece, is_final)
        if not self._closing:
            self._answer(piece, is_final)
        return piece

    def _begin(self, is_final: bool) -> bool:
        """Find out whether the reply begins with reasoning; return False if that is unknown."""
        start = self._text.lstrip()
        for tags in self._tags:
            opening = tags.open.strip()
            if start.startswith(opening):
                self._closing = tags.close.strip()
                self._text = start.removeprefix(opening)
                self._drops_space = True
            elif not is_final and opening.startswith(start):
                return False
        self._is_beginning = False
        return True

    def _reason(self, piece: Piece, is_final: bool) -> None:
        self._drop_space()
        reasoning, closing, rest = self._text.partition(self._closing)
        if closing:
            piece.add("reasoning_content", reasoning.rstrip())
            self._text = rest
            self._closing = ""
            self._drops_space = True
            return
        n_held = 0 if is_final else _n_beginning(self._text, self._closing)
        certain = self._text[: len(self._text) - n_held].rstrip()
        piece.add("reasoning_content", certain)
        self._text = self._text[len(certain) :]

    def _answer(self, piece: Piece, is_final: bool) -> None:
        self._drop_space()
        marks = self._marks
        if marks is None:
            piece.add("content", self._text)
            self._text = ""
            return
        if not self._has_calls:
            self._find_calls(marks, piece, is_final)
        if is_final:
            calls = marks.read(self._text, self._known) if self._has_calls else None
            if calls:
                piece.calls = calls
            else:
                piece.add("content", self._text)
            self._text = ""

    def _find_calls(self, marks: CallMarks, piece: Piece, is_final: bool) -> None:
        """Pass on the text before the first mark."""
        if not marks.opening:
            start = self._text.lstrip()
            self._has_calls = start[:1] in ("{", "[")
            certain = "" if self._has_calls or not start else self._text
            if certain:
                self._marks = None  # calls come first, or not at all
        else:
            before, opening, _ = self._text.partition(marks.opening)
            self._has_calls = bool(opening)
            n_held = 0 if opening or is_final else _n_beginning(before, marks.opening)
            certain = before[: len(before) - n_held].rstrip()
            if is_final and not opening:
                certain = before
        piece.add("content", certain)
        self._text = self._text[len(certain) :]

    def _drop_space(self) -> None:
        if self._drops_space:
            self._text = self._text.lstrip()
            self._drops_space = not self._text


def _n_beginning(text: str, mark: str) -> int:
    """Return the number of characters at the end of a text that a mark may begin with."""
    lengths = range(min(len(text), len(mark) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(mark[:n])), 0)
