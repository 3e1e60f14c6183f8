"""What a row of each shape says: functions from a row to a sample.

All raise `BrokenSample` for a row that cannot be used, and `EmptySample` for one in which there is nothing to learn.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from torchtitan.components.data.finetuning.conversation import (
    BrokenSample,
    Conversation,
    EmptySample,
    Pair,
    Prompt,
    Text,
    checked_text,
    from_json,
    normalize,
    shortened,
)
from torchtitan.components.data.readers import kind_of

Cells = dict[str, Any]
"""A row: its cells by column."""

ANSWERS = ("answer", "solution", "ground_truth")
"""The columns of a reference answer; the first that a row has is read."""

_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}


def read_text(row: Cells) -> Text:
    """Running text in the column `text`."""
    return Text(_filled(row, "text"))


def read_turns(column: str) -> Callable[[Cells], Conversation]:
    """A reader of the turns in a column, and of the columns `tools` and `system`."""

    def read(row: Cells) -> Conversation:
        return _answered(_conversation(row, _listed(row, column)))

    return read


def read_instruction(row: Cells) -> Conversation:
    """`instruction` and `output`, an `input` that the instruction is about, pairs of earlier turns in `history`.

    The user says the instruction and then, after an empty line, the input.
    """
    return _conversation(row, [*instruction_in(row), _message("assistant", _filled(row, "output"))])


def read_question(question: str, answer: str) -> Callable[[Cells], Conversation]:
    """A reader of two columns, a text that the user says or turns so far, and what the assistant answers."""

    def read(row: Cells) -> Conversation:
        return _answered(_conversation(row, [*_turns(row, question, "user"), *_turns(row, answer, "assistant")]))

    return read


def read_pair(prompt: Callable[[Cells], list[Any]]) -> Callable[[Cells], Pair]:
    """A reader of `chosen` and `rejected`, each a text, a message, or messages, that follow a prompt.

    Where they do not begin with the assistant, they are conversations of their own: then the messages that both begin
    with are the prompt, and `prompt` is not asked.
    """

    def read(row: Cells) -> Pair:
        chosen, rejected = (_turns(row, column, "assistant") for column in ("chosen", "rejected"))
        if all(_role(turns) == "assistant" for turns in (chosen, rejected)):
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
    for name, messages in (("chosen", pair.chosen), ("rejected", pair.rejected)):
        if messages[0]["role"] != "assistant":
            raise BrokenSample(f"{name} goes on after the prompt with the role {messages[0]['role']!r}")
        if not Conversation(messages).answers():
            raise EmptySample(f"{name} is empty")
    if pair.chosen == pair.rejected:
        raise EmptySample("chosen and rejected are the same")
    return pair


def read_prompt(prompt: Callable[[Cells], list[Any]]) -> Callable[[Cells], Prompt]:
    """A reader of a prompt, and of the reference answer in one of the columns `ANSWERS`."""

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
    """The turns in a column, or its text as the user's."""
    return lambda row: _turns(row, column, "user")


def listed_in(column: str) -> Callable[[Cells], list[Any]]:
    """The turns in a column, which has no other text than their JSON."""
    return lambda row: _listed(row, column)


def instruction_in(row: Cells) -> list[Any]:
    """The turns that an instruction is, with its history and input."""
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
    """That of a row without a column for it."""
    raise BrokenSample("chosen and rejected begin with the assistant, and there is no column for the prompt")


def _answered(conversation: Conversation) -> Conversation:
    if not conversation.answers():
        raise EmptySample("the assistant's messages are empty")
    return conversation


def _conversation(row: Cells, turns: list[Any]) -> Conversation:
    system = row.get("system")
    if system not in ("", None):
        if _role(turns) == "system":
            raise BrokenSample("there is a column system, and the messages begin with the role 'system'")
        turns = [_message("system", checked_text(system, "system")), *turns]
    return normalize(openai_messages(turns), row.get("tools"))


def _listed(row: Cells, column: str) -> list[Any]:
    if row[column] is None:
        raise EmptySample(f"{column} is empty")
    turns = from_json(row[column], column)
    if not isinstance(turns, list):
        raise BrokenSample(f"{column} is {kind_of(turns)}, and must be a list of messages: {shortened(turns)}")
    return turns


def _turns(row: Cells, column: str, role: str) -> list[Any]:
    """The turns in a column: a list, a single one, or a text in that role."""
    value = row[column]
    if isinstance(value, Mapping):
        return [value]
    return value if isinstance(value, list) and value else [_message(role, _filled(row, column))]


def _role(turns: list[Any]) -> str | None:
    """The role of the first turn, if it is one."""
    turn = turns[0] if turns else None
    if not isinstance(turn, Mapping):
        return None
    return turn.get("role") if turn.get("from") is None else _SHAREGPT_ROLES.get(str(turn["from"]))


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
    """A number as its text, since the answers of sums often are numbers; anything else as it is."""
    is_number = (
        isinstance(value, int) and not isinstance(value, bool) or isinstance(value, float) and math.isfinite(value)
    )
    return str(value) if is_number else value


def openai_messages(turns: list[Any]) -> list[Any]:
    """Turns of ShareGPT's shape (`from` and `value`) as messages; those of another shape stay as they are.

    A `function_call` (JSON: one call, or a list of them) is a message with `tool_calls`; each `observation` after it
    answers the next of its calls. The calls get ids, nine letters and digits long as some templates ask for, by their
    number in the conversation.
    """
    messages: list[Any] = []
    waiting: deque[str] = deque()
    n_calls = 0
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, Mapping) or turn.get("from") is None:
            messages.append(turn)
            continue
        speaker = str(turn["from"])
        if speaker not in _SHAREGPT_ROLES:
            raise BrokenSample(f"message {number}: its from is {speaker!r}, none of: {', '.join(_SHAREGPT_ROLES)}")
        message = {key: turn[key] for key in ("name", "weight", "train") if key in turn}
        message |= _message(_SHAREGPT_ROLES[speaker], turn.get("value"))
        if speaker == "function_call":
            calls = from_json(turn.get("value"), f"function_call in message {number}")
            waiting.clear()
            message |= {"content": None, "tool_calls": []}
            for call in calls if isinstance(calls, list) else [calls]:
                waiting.append(f"call{n_calls:05}")
                message["tool_calls"].append({"id": waiting[-1], "type": "function", "function": call})
                n_calls += 1
        elif message["role"] == "tool" and waiting:
            message["tool_call_id"] = waiting.popleft()
        messages.append(message)
    return messages
