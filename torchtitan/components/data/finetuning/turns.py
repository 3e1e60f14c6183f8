"""Conversation turns in the shapes of public data, converted to messages in OpenAI's form."""

import re
from collections import deque
from collections.abc import Mapping
from itertools import cycle
from typing import Any

from torchtitan.components.data.finetuning.conversation import BrokenSample, beside, from_json

SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "ai": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "tool_response": "tool",
}
"""Speaker of a turn in public data → role."""

_CALLERS = ("function_call", "tool_call")
"""Speakers whose content is a function call, or a list of them, in JSON."""

_BEGINS_TRANSCRIPT = re.compile(r"\s*Human:")
_SPEAKER_IN_TRANSCRIPT = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")
_LOOKS_LIKE_A_MESSAGE = re.compile(r'\s*\{.*"(role|from)"\s*:', re.DOTALL)


def role_of(turn: Any) -> Any:
    """The role of a turn in any shape; None if it has none."""
    if not isinstance(turn, Mapping):
        return None
    speaker = turn.get("role") if turn.get("from") is None else turn["from"]
    return SPEAKERS.get(speaker, speaker) if isinstance(speaker, str) else speaker


def alternating(turns: list[Any]) -> list[Any]:
    """A list of plain texts as the turns of the user and the assistant, one after the other; any other list as it is.

    Texts that look like messages in JSON are not plain.
    """
    if not all(isinstance(turn, str) and not _LOOKS_LIKE_A_MESSAGE.match(turn) for turn in turns):
        return turns
    return [{"role": role, "content": text} for role, text in zip(cycle(("user", "assistant")), turns, strict=False)]


def transcript(text: str) -> list[Any] | None:
    """The turns of a text such as "\\n\\nHuman: Hi.\\n\\nAssistant: Hello.", as Anthropic's HH has them; None if it is
    not one."""
    if not _BEGINS_TRANSCRIPT.match(text):
        return None
    _, *pieces = _SPEAKER_IN_TRANSCRIPT.split(text)
    if "Assistant" not in pieces[::2]:
        return None
    return [
        {"role": SPEAKERS[speaker.lower()], "content": said.strip()}
        for speaker, said in zip(pieces[::2], pieces[1::2], strict=True)
    ]


def openai_messages(turns: list[Any]) -> list[Any]:
    """Turns as messages with `role` and `content`; those that cannot be read stay as they are, for `normalize` to name.

    - `from` and `value` (ShareGPT) become `role` and `content`, and the speakers of `SPEAKERS` become roles.
    - A legacy `function_call`, as a key or as the speaker of a turn, becomes `tool_calls`, and each result after it
      answers the next of its calls. The calls get ids, nine letters and digits long as some templates ask for, by their
      number in the conversation.
    """
    calls = _Calls()
    messages = []
    for number, turn in enumerate(turns, 1):
        try:
            messages.append(calls.message(_parsed(turn)))
        except BrokenSample as error:
            raise BrokenSample(f"message {number}: {error}") from None
    return messages


class _Calls:
    """Turns to messages in their order, with ids for function calls and their results."""

    def __init__(self) -> None:
        self._waiting: deque[str] = deque()
        self._n_calls = 0

    def message(self, turn: Any) -> Any:
        """A turn as a message."""
        if not isinstance(turn, Mapping):
            return turn
        speaker, role, message = turn.get("role"), role_of(turn), dict(turn)
        if turn.get("from") is not None:
            speaker = str(message.pop("from"))
            if speaker not in SPEAKERS:
                raise BrokenSample(f"its from is {speaker!r}, none of: {', '.join(SPEAKERS)}")
            if "content" not in message and "value" not in message:
                raise BrokenSample(f"it has no value{beside(turn)}")
            message["content"] = message.pop("value", message.get("content"))
        message["role"] = role
        functions = message.pop("function_call", None)
        if speaker in _CALLERS:
            functions, message["content"] = message.get("content"), None
        if functions not in (None, "", {}):
            if message.get("tool_calls"):
                raise BrokenSample("it has tool_calls and a function_call; leave one of them out")
            message["tool_calls"] = self._called(from_json(functions, "function_call"))
        elif role == "tool" and self._waiting and message.get("tool_call_id") is None:
            message["tool_call_id"] = self._waiting.popleft()
        return message

    def _called(self, functions: Any) -> list[dict[str, Any]]:
        self._waiting.clear()
        calls = []
        for function in functions if isinstance(functions, list) else [functions]:
            self._waiting.append(f"call{self._n_calls:05}")
            calls.append({"id": self._waiting[-1], "type": "function", "function": function})
            self._n_calls += 1
        return calls


def _parsed(turn: Any) -> Any:
    """Return the object in a turn that is JSON text; any other turn as it is."""
    try:
        return from_json(turn, "message")
    except BrokenSample:
        return turn
