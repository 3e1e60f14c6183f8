"""Formats of reasoning and calls in chat templates, found by trial, and the reader of replies."""

from collections.abc import Mapping, Sequence
from functools import cached_property

from torchtitan.components.chat_template import ChatTemplate
from torchtitan.components.chat_template.call_trials import find_calls
from torchtitan.components.chat_template.calls import CallNotation, Schemas, schemas_of
from torchtitan.components.chat_template.channels import (
    CHANNEL_MARKS,
    ChannelReader,
    writes_channels,
)
from torchtitan.components.chat_template.forms import Forms, Tags
from torchtitan.components.chat_template.parts import Piece
from torchtitan.components.chat_template.stops import Stops
from torchtitan.components.tokenizer import Tokenizer


class ReplyFormat:
    """The parts of a template's replies.

    Reasoning and calls are found by trial of the template. Calls stay in the text if the template
    writes them in a notation that the trial cannot follow, or does not write them and
    `unwritten_calls` has none.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer):
        self._template = template
        self._tokenizer = tokenizer
        self._forms = Forms(template)

    @cached_property
    def calls(self) -> CallNotation | None:
        """Notation of calls; None: unknown."""
        return find_calls(self._template, Stops(self._template, self._tokenizer), self.tags)

    @cached_property
    def unread_calls(self) -> str:
        """Warning that calls in replies stay in their text; empty if they are read."""
        if self.calls is not None or not self._template.reads("tools"):
            return ""
        return (
            f"{self._template.name} shows tools to the model, but writes no calls in a form that "
            "can be read: calls in replies stay in their text"
        )

    @cached_property
    def tags(self) -> list[Tags]:
        """Tags of reasoning."""
        return [tags for tags in self._forms.tags if tags.open.strip() and tags.close.strip()]

    @cached_property
    def has_channels(self) -> bool:
        """True if replies are messages in channels, as gpt-oss writes them."""
        return writes_channels(self._template)

    def opened_by(self, prompt: str) -> Tags | None:
        """Return the tags whose opening one ends a prompt."""
        opened = self._forms.opened_by(prompt)
        return opened if opened in self.tags else None

    def kept(self, *, with_calls: bool) -> dict[int, str]:
        """Return the special tokens that belong to tags and marks, with their texts."""
        marks = [part.strip() for tags in self.tags for part in (tags.open, tags.close)]
        if with_calls and self.calls:
            marks.append(self.calls.markup)
        if self.has_channels:
            marks += CHANNEL_MARKS
        return {
            token: text
            for token, text in self._special_texts.items()
            if text and any(text in mark for mark in marks)
        }

    def reader(
        self,
        prompt: str,
        tools: Sequence[Mapping[str, object]],
        *,
        reads_calls: bool,
        begun: str = "",
    ) -> "Reader":
        """Return a reader of a reply.

        Args:
            prompt: end of the text before the reply, or before `begun`.
            tools: functions that may be called.
            reads_calls: whether calls are read, instead of left in the text.
            begun: beginning of the reply that is not sampled.
        """
        reader: Reader
        if self.has_channels:
            reader = ChannelReader(reads_calls)
        else:
            opened = self.opened_by(prompt)
            if opened and begun and opened.close.strip() not in begun:
                opened = None
            tags = [opened] if opened else self.tags
            notation = self.calls if reads_calls else None
            reader = ReplyReader(tags, opened is not None, notation, schemas_of(tools))
        reader.push(begun)
        return reader

    @cached_property
    def _special_texts(self) -> dict[int, str]:
        tokenizer = self._tokenizer
        return {token: tokenizer.decode([token]) for token in tokenizer.special_ids}


class ReplyReader:
    """Splits a reply into reasoning, content and calls, while its text arrives.

    Whitespace around reasoning, and between content and calls, is dropped. Calls come at the end;
    if they cannot be read, their text is content.

    Args:
        tags: tags of reasoning that the reply may begin with.
        is_open: whether the prompt has opened the first of them.
        marks: notation of calls; None: none are read.
        schemas: schemas of the functions.
    """

    def __init__(
        self,
        tags: Sequence[Tags],
        is_open: bool,
        marks: CallNotation | None,
        schemas: Schemas,
    ):
        self._tags = tags
        self._marks = marks
        self._schemas = schemas
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
            calls = marks.read(self._text, self._schemas) if self._has_calls else None
            if calls:
                piece.calls = calls
            else:
                piece.add("content", self._text)
            self._text = ""

    def _find_calls(self, marks: CallNotation, piece: Piece, is_final: bool) -> None:
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


Reader = ReplyReader | ChannelReader


def _n_beginning(text: str, mark: str) -> int:
    """Return the number of characters at the end of a text that a mark may begin with."""
    lengths = range(min(len(text), len(mark) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(mark[:n])), 0)
