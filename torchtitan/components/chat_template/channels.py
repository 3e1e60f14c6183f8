"""Replies in channels: messages of the assistant with a header, as gpt-oss writes them (harmony).

A reply has the form `HEADER<|message|>TEXT<|end|><|start|>assistantHEADER<|message|>TEXT…`. The
header names the channel (`<|channel|>analysis`: reasoning) and may have a recipient
(`to=functions.NAME`: a call with JSON arguments). The model writes the recipient before or after
the channel, with or without `<|constrain|>`.
"""

import re

from torchtitan.components.chat_template.calls import Call, decoded, new_call
from torchtitan.components.chat_template.parts import Kind, Piece
from torchtitan.components.chat_template.stops import ANSWER, QUESTION
from torchtitan.components.chat_template.template import ChatTemplate
from torchtitan.tools.errors import UserError

CHANNEL_MARKS = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>"]
"""Special tokens that the reader needs in the text."""

_MESSAGE, _CHANNEL = "<|message|>", "<|channel|>"
_END = re.compile(r"<\|(?:end|start|call|return)\|>")
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
_KIND = re.compile(r"<\|channel\|>\s*(\w+)")
_LONGEST_END = len("<|return|>")


def writes_channels(template: ChatTemplate) -> bool:
    """Return whether a template writes answers as messages in channels."""
    answer = {"role": "assistant", "content": ANSWER}
    try:
        text = template.render(
            [{"role": "user", "content": QUESTION}, answer], add_generation_prompt=False
        )
    except UserError:
        return False
    header = text.partition(QUESTION)[2].partition(ANSWER)[0]
    return _CHANNEL in header and header.endswith(_MESSAGE)


class ChannelReader:
    """Splits a reply in channels into reasoning, content and calls, while its text arrives. Other
    channels than `analysis` are content, which blank lines separate. Calls come at the end; one
    that cannot be read is content, with its header.

    Args:
        reads_calls: whether recipients are functions.
    """

    def __init__(self, reads_calls: bool):
        self._reads_calls = reads_calls
        self._text = ""
        self._header: str | None = None
        self._calls: list[Call] = []
        self._has_text: dict[Kind, bool] = {"content": False, "reasoning_content": False}
        self._is_new = False

    def push(self, text: str) -> Piece:
        """Append text, and return the parts that are complete."""
        return self._read(text, is_final=False)

    def finish(self) -> Piece:
        """Return the rest."""
        piece = self._read("", is_final=True)
        piece.calls, self._calls = self._calls, []
        return piece

    def _read(self, text: str, *, is_final: bool) -> Piece:
        piece = Piece()
        self._text += text
        while self._begin(piece, is_final) and self._go_on(piece, is_final):
            pass
        return piece

    def _begin(self, piece: Piece, is_final: bool) -> bool:
        """Read a header; return False if it is not complete."""
        if self._header is not None:
            return True
        header, found, rest = self._text.partition(_MESSAGE)
        if found:
            self._header = header
            self._text = rest
            self._is_new = True
            return True
        if is_final:
            if _CHANNEL not in header and not _RECIPIENT.search(header) and not _is_start(header):
                piece.add("content", header)
            self._text = ""
        return False

    def _go_on(self, piece: Piece, is_final: bool) -> bool:
        """Read the text of a message; return True if it is complete."""
        assert self._header is not None
        end = _END.search(self._text)
        name = _RECIPIENT.search(self._header) if self._reads_calls else None
        if name:
            if not end and not is_final:
                return False
            body = self._text[: end.start()] if end else self._text
            found = decoded(body.strip(), 0)
            value = found[0] if found and found[1] == len(body.strip()) else None
            call = new_call(name[1], value) if isinstance(value, dict) else None
            if call:
                self._calls.append(call)
            else:
                self._add(piece, "content", f"{self._header.strip()}{_MESSAGE}{body}")
        else:
            body = self._text[: end.start()] if end else self._text[: self._certain(is_final)]
            kind = _KIND.search(self._header)
            is_reasoning = bool(kind and kind[1] == "analysis")
            self._add(piece, "reasoning_content" if is_reasoning else "content", body)
        self._text = self._text[end.end() if end else len(body) :]
        if end:
            self._header = None
        return bool(end)

    def _certain(self, is_final: bool) -> int:
        """Return the number of characters that no mark begins with."""
        mark = self._text.rfind("<|", max(0, len(self._text) - _LONGEST_END))
        mark = len(self._text) - 1 if mark < 0 and self._text.endswith("<") else mark
        return len(self._text) if is_final or mark < 0 else mark

    def _add(self, piece: Piece, kind: Kind, text: str) -> None:
        if not text:
            return
        if self._is_new and self._has_text[kind]:
            piece.add(kind, "\n\n")
        self._is_new = False
        self._has_text[kind] = True
        piece.add(kind, text)


def _is_start(header: str) -> bool:
    return header.strip() in ("", "assistant", "<|start|>", "<|start|>assistant")
