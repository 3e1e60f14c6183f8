"""The model's turns in conversations: prompts, replies and the messages between, as tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torchtitan.components.chat_template import ChatTemplate
from torchtitan.components.chat_template.calls import Call
from torchtitan.components.chat_template.replies import ReplyFormat
from torchtitan.components.chat_template.stops import (
    ANSWER,
    QUESTION,
    Kind,
    Stop,
    Stops,
    trial_conversations,
)
from torchtitan.components.data.finetuning.histories import render_history
from torchtitan.components.generation import TextWriter
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger

Message = Mapping[str, object]
Tools = Sequence[Mapping[str, object]]

_TAIL = 64
"""Tokens at the end of a prompt in which it may open reasoning."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A turn of the model in its parts."""

    content: str
    """Text without special tokens, reasoning and calls."""
    reasoning: str = ""
    tool_calls: Sequence[Call] = field(default_factory=list)
    is_cut: bool = False
    """True if it ended without a stop."""

    def to_message(self) -> dict[str, object]:
        """Return a message in the form of OpenAI's API."""
        message: dict[str, object] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.to_dict() for call in self.tool_calls]
        return message


class Chat:
    """Encodes conversations by a chat template, and reads replies by its marks."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer):
        self._template = template
        self._tokenizer = tokenizer
        self.format = ReplyFormat(template, tokenizer)
        self.stops = Stops(template, tokenizer)
        self._is_told = False

    @cached_property
    def stop_texts(self) -> list[str]:
        """Texts that end a turn because the template has no token for it."""
        return self.stops.texts()

    @cached_property
    def kept(self) -> dict[int, str]:
        """Special tokens of reasoning and calls, with their texts."""
        return self.format.kept(with_calls=True)

    def encode(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Return the tokens of a conversation, up to the beginning of the model's turn. Warn once
        if the calls of its tools cannot be read."""
        if tools and self.format.unread_calls and not self._is_told:
            self._is_told = True
            logger.warning("%s", self.format.unread_calls)
        every = [dict(message) for message in messages]
        return self._encode(render_history(self._template, every, tools=tools or None))

    def read(self, prompt: Sequence[int], ids: Sequence[int], tools: Tools = ()) -> Reply:
        """Return the parts of a sampled turn. Calls are read if there are tools, or the template
        has marks for them."""
        notation = self.format.calls
        reads_calls = bool(tools) or notation is not None and bool(notation.opening)
        end = self._tokenizer.decode(list(prompt[-_TAIL:]))
        reader = self.format.reader(end, tools, reads_calls=reads_calls)
        writer = TextWriter(self._tokenizer, prompt, self.stop_texts, self.kept)
        is_stopped = bool(ids) and ids[-1] in self.stops.ids()
        text = writer.push(*ids[: len(ids) - is_stopped])
        pieces = [reader.push(text + writer.finish()), reader.finish()]
        parts = {
            kind: "".join(piece.texts.get(kind, "") for piece in pieces)
            for kind in ("content", "reasoning_content")
        }
        calls = [call for piece in pieces for call in piece.calls]
        is_cut = not (is_stopped or writer.stopped)
        return Reply(parts["content"], parts["reasoning_content"], calls, is_cut)

    def following(
        self, ids: Sequence[int], messages: Sequence[Message], tools: Tools = ()
    ) -> list[int]:
        """Return the tokens between a sampled turn `ids` and the model's next turn, with messages
        of users or tools in between: the sampled tokens stay as they are. Raise `UserError` if the
        template does not write these messages after such a turn."""
        kind: Kind = "call" if any(message["role"] == "tool" for message in messages) else "answer"
        rest, stop = self._rest_of(kind, messages, tools)
        if stop is None or not stop.text:
            return self._encode(rest)
        head, found, tail = rest.partition(stop.text)
        if not found:
            tail = rest
        has_stop = bool(ids) and (
            ids[-1] in self.stops.ids() or self._tokenizer.decode(list(ids)).endswith(stop.text)
        )
        return self._encode(tail if has_stop else stop.text + tail)

    def _rest_of(
        self, kind: Kind, messages: Sequence[Message], tools: Tools
    ) -> tuple[str, Stop | None]:
        """Return the text after the last words of a turn, with its end, and its stop."""
        trials = [(trial.messages, trial.marker) for trial in trial_conversations(kind)]
        if kind == "call":  # for templates that write results, but no calls
            answer = {"role": "assistant", "content": ANSWER}
            trials.append(([{"role": "user", "content": QUESTION}, answer], ANSWER))
        error: UserError | None = None
        for before, marker in trials:
            try:
                text = self._template.render(
                    [*before, *messages], tools=tools or None, add_generation_prompt=True
                )
            except UserError as refused:
                error = error or refused
                continue
            _, found, rest = text.partition(marker)
            if found:
                return rest, self.stops.of(kind, {}) or self.stops.of("answer", {})
        raise error or UserError(
            f"{self._template.name} rewrites earlier turns, so none can follow the sampled tokens"
        )

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_bos=False, add_eos=False, allow_special=True)
