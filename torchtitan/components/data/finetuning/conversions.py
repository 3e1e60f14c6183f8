"""Readers that convert rows to samples. They raise `BrokenSample` for an unusable row, and `EmptySample` for a row with
nothing to learn."""

import math
import re
from collections import deque
from collections.abc import Callable, Mapping
from itertools import cycle
from typing import Any

from torchtitan.components.data.finetuning.conversation import (
    BrokenSample,
    Conversation,
    EmptySample,
    Pair,
    Prompt,
    Text,
    beside,
    checked_text,
    from_json,
    normalize,
    shortened,
)
from torchtitan.components.data.sources.rows import kind_of

Cells = dict[str, Any]
"""A row's cells by column."""

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
"""Speaker in public data → role."""

_CALLERS = ("function_call", "tool_call")
"""Speakers with function calls in JSON, one or a list, as content."""

_BEGINS_TRANSCRIPT = re.compile(r"\s*Human:")
_SPEAKER_IN_TRANSCRIPT = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")
_LOOKS_LIKE_A_MESSAGE = re.compile(r'\s*\{.*"(role|from)"\s*:', re.DOTALL)

ANSWERS = ("answer", "solution", "ground_truth")
"""Columns with a reference answer; the first one that a row has is read."""


def read_text(row: Cells) -> Text:
    return Text(_filled(row, "text"))


def read_turns(column: str) -> Callable[[Cells], Conversation]:
    """Return a reader of the turns in a column, with `tools` and `system`."""

    def read(row: Cells) -> Conversation:
        return _answered(_conversation(row, _listed(row, column)))

    return read


def read_instruction(answer: str) -> Callable[[Cells], Conversation]:
    """Return a reader of `instruction` and an answer, with an optional `input`, which follows the instruction after an
    empty line, and pairs of earlier turns in `history`."""

    def read(row: Cells) -> Conversation:
        return _conversation(row, [*instruction_in(row), _message("assistant", _filled(row, answer))])

    return read


def read_question(question: str, answer: str) -> Callable[[Cells], Conversation]:
    """Return a reader of two columns: the user's text or the turns so far, and the assistant's answer."""

    def read(row: Cells) -> Conversation:
        said, answered = _turns(row, question, "user"), _turns(row, answer, "assistant")
        if (role := role_of(answered[0])) in ("system", "user"):
            raise BrokenSample(
                f"{answer} begins with the role {role!r}, and must begin with the assistant; a column of whole "
                "conversations is named by --dataloader.columns messages=NAME"
            )
        return _answered(_conversation(row, [*said, *answered]))

    return read


def read_pair(prompt: Callable[[Cells], list[Any]]) -> Callable[[Cells], Pair]:
    """Return a reader of `chosen` and `rejected`, each a text, a message, or messages, that continue a prompt.

    If they do not begin with the assistant, or are transcripts, they are whole conversations: their common beginning is
    the prompt, and `prompt` is not called.
    """

    def read(row: Cells) -> Pair:
        chosen, rejected = (_continuation(row, column) for column in ("chosen", "rejected"))
        if all(role_of(turns[0]) == "assistant" for turns in (chosen, rejected)):
            said = prompt(row)
            n_prompt = len(_conversation(row, said).messages)
            return _pair(_conversation(row, [*said, *chosen]), _conversation(row, [*said, *rejected]), n_prompt)
        first, second = _conversation(row, chosen), _conversation(row, rejected)
        limit = min(len(first.messages), len(second.messages)) - 1
        alike = (a == b for a, b in zip(first.messages[:limit], second.messages[:limit], strict=True))
        return _pair(first, second, next((n for n, same in enumerate(alike) if not same), limit))

    return read


def _pair(chosen: Conversation, rejected: Conversation, n_prompt: int) -> Pair:
    pair = Pair(
        Conversation(chosen.messages[:n_prompt], chosen.tools, chosen.trained[:n_prompt]),
        chosen.messages[n_prompt:],
        rejected.messages[n_prompt:],
    )
    if n_prompt == 0:
        raise BrokenSample("chosen and rejected have no first message in common that could be the prompt")
    if False in (*chosen.trained[n_prompt:], *rejected.trained[n_prompt:]):
        raise BrokenSample("chosen or rejected has a message that is not to be trained, and answers are compared whole")
    for name, messages in (("chosen", pair.chosen), ("rejected", pair.rejected)):
        if messages[0]["role"] != "assistant":
            raise BrokenSample(f"{name} goes on after the prompt with the role {messages[0]['role']!r}")
        if not Conversation(messages).answers():
            raise EmptySample(f"{name} is empty")
    if pair.chosen == pair.rejected:
        raise EmptySample("chosen and rejected are the same")
    return pair


def read_prompt(prompt: Callable[[Cells], list[Any]]) -> Callable[[Cells], Prompt]:
    """Return a reader of a prompt, and of the reference answer in one of the `ANSWERS`."""

    def read(row: Cells) -> Prompt:
        conversation = _conversation(row, prompt(row))
        if conversation.messages[-1]["role"] == "assistant":
            raise BrokenSample("the prompt ends with the assistant's message, and must end before it")
        return Prompt(conversation, _answer(row))

    return read


def _answer(row: Cells) -> str | None:
    for column in ANSWERS:
        if (answer := row.get(column)) is not None:
            return checked_text(_number_as_text(answer), column)
    return None


def turns_in(column: str) -> Callable[[Cells], list[Any]]:
    """Return a reader of the turns in a column, or of its text as the user's."""
    return lambda row: _turns(row, column, "user")


def listed_in(column: str) -> Callable[[Cells], list[Any]]:
    """Return a reader of the turns in a column that holds a list or its JSON."""
    return lambda row: _listed(row, column)


def instruction_in(row: Cells) -> list[Any]:
    """Return an instruction as turns, with its history and input."""
    messages: list[Any] = []
    history = from_json(row.get("history") or [], "history")
    if not isinstance(history, list):
        raise BrokenSample(f"history must be a list of pairs of texts, not {shortened(history)}")
    for exchange in history:
        if not isinstance(exchange, list) or len(exchange) != 2:
            raise BrokenSample(f"history must be a list of pairs of texts, not of {shortened(exchange)}")
        question, answer = map(_number_as_text, exchange)
        messages += [_message("user", question), _message("assistant", answer)]
    given = [column for column in ("instruction", "input") if row.get(column) is not None]
    parts = [checked_text(_number_as_text(row[column]), column) for column in given]
    text = "\n\n".join(part for part in parts if part and not part.isspace())
    if not text:
        raise EmptySample("instruction is empty")
    return [*messages, _message("user", text)]


def no_prompt(row: Cells) -> list[Any]:
    raise BrokenSample(
        "chosen and rejected are answers, and there is no column for the prompt (name it by --dataloader.columns "
        "prompt=NAME); texts that begin with it have the form '\\n\\nHuman: ...\\n\\nAssistant: ...'"
    )


def _answered(conversation: Conversation) -> Conversation:
    if not conversation.answers():
        raise EmptySample("the assistant's messages are empty")
    return conversation


def _conversation(row: Cells, turns: list[Any]) -> Conversation:
    messages, system = openai_messages(turns), row.get("system")
    if system not in ("", None):
        if messages and role_of(messages[0]) == "system":
            raise BrokenSample("there is a column system, and the messages begin with the role 'system'")
        messages = [_message("system", checked_text(system, "system")), *messages]
    return normalize(messages, row.get("tools"))


def _listed(row: Cells, column: str) -> list[Any]:
    value = row[column]
    if value is None:
        raise EmptySample(f"{column} is empty")
    if isinstance(value, str) and (turns := transcript(value)):
        return turns
    try:
        listed = from_json(value, column)
    except BrokenSample as error:
        raise BrokenSample(f"{error}; running text is read by --dataloader.columns text={column}") from None
    if not isinstance(listed, list):
        raise BrokenSample(f"{column} is {kind_of(listed)}, and must be a list of messages: {shortened(listed)}")
    return alternating(listed)


def _continuation(row: Cells, column: str) -> list[Any]:
    value = row[column]
    return (transcript(value) if isinstance(value, str) else None) or _turns(row, column, "assistant")


def _turns(row: Cells, column: str, role: str) -> list[Any]:
    """Return the turns in a column: a list, a single turn, a transcript without its answer, or a text in that role."""
    value = row[column]
    if isinstance(value, Mapping):
        return [value]
    if role == "user" and isinstance(value, str) and (turns := transcript(value)) and not turns[-1]["content"]:
        return turns[:-1]
    return value if isinstance(value, list) and value else [_message(role, _filled(row, column))]


def _message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def _filled(row: Cells, column: str) -> str:
    if row[column] in (None, "", []):
        raise EmptySample(f"{column} is empty")
    text = checked_text(_number_as_text(row[column]), column)
    if text.isspace():
        raise EmptySample(f"{column} is empty")
    return text


def _number_as_text(value: Any) -> Any:
    """Return a number as text, since answers to sums often are numbers; other values unchanged."""
    is_number = (
        isinstance(value, int) and not isinstance(value, bool) or isinstance(value, float) and math.isfinite(value)
    )
    return str(value) if is_number else value


def role_of(turn: Any) -> Any:
    """Return the role of a turn in any shape; None if it has none."""
    if not isinstance(turn, Mapping):
        return None
    speaker = turn.get("role") if turn.get("from") is None else turn["from"]
    return SPEAKERS.get(speaker, speaker) if isinstance(speaker, str) else speaker


def alternating(turns: list[Any]) -> list[Any]:
    """Return a list of plain texts (not JSON messages) as alternating user and assistant turns; other lists
    unchanged."""
    if not all(isinstance(turn, str) and not _LOOKS_LIKE_A_MESSAGE.match(turn) for turn in turns):
        return turns
    return [{"role": role, "content": text} for role, text in zip(cycle(("user", "assistant")), turns, strict=False)]


def transcript(text: str) -> list[Any] | None:
    """Return the turns of a text such as "\\n\\nHuman: Hi.\\n\\nAssistant: Hello." (Anthropic's HH); None for other
    texts."""
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
    """Return turns as messages with `role` and `content`; unreadable turns stay unchanged for `normalize` to report.

    - `from` and `value` (ShareGPT) become `role` and `content`, and `SPEAKERS` become roles.
    - A legacy `function_call`, as a key or as a speaker, becomes `tool_calls`, and each following result answers the
      next call. Call ids are numbered within the conversation and have nine letters and digits, as some templates
      require.
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
    """Converts consecutive turns to messages, with ids for function calls and their results."""

    def __init__(self) -> None:
        self._waiting: deque[str] = deque()
        self._n_calls = 0

    def message(self, turn: Any) -> Any:
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
    try:
        return from_json(turn, "message")
    except BrokenSample:
        return turn
