"""Readers that convert rows to samples, given the names of columns. They raise `BrokenSample` for
unusable rows, `EmptySample` for empty ones."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import Any

from torchtitan.components.data.finetuning.calls_in_text import (
    glaive_system,
    glaive_turns,
    move_tools,
)
from torchtitan.components.data.finetuning.columns import LABELS
from torchtitan.components.data.finetuning.conversation import (
    BrokenSample,
    Conversation,
    EmptySample,
    Message,
    Pair,
    Prompt,
    Text,
    checked_text,
    from_json,
    normalize,
    shortened,
)
from torchtitan.components.data.finetuning.spellings.answers import OF_COLUMN
from torchtitan.components.data.finetuning.spellings.reader import openai_messages
from torchtitan.components.data.finetuning.spellings.reasoning import (
    REASONING_COLUMNS,
    one_reasoning,
)
from torchtitan.components.data.finetuning.spellings.roles import SPEAKERS, role_of
from torchtitan.components.data.finetuning.spellings.tool_schemas import with_parameters
from torchtitan.components.data.sources.rows import kind_of
from torchtitan.tools.errors import UserError

Cells = dict[str, Any]
"""A row's cells by column."""

PromptReader = Callable[[Cells], list[object]]
"""Returns the turns of a row's prompt."""

_BEGINS_TRANSCRIPT = re.compile(r"\s*Human:")
_SPEAKER_IN_TRANSCRIPT = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")
_LOOKS_LIKE_A_MESSAGE = re.compile(r'\s*\{.*"(role|from)"\s*:', re.DOTALL)

ANSWERS = ("answer", "solution", "ground_truth")
"""Columns with a reference answer; the first one present is used."""


_SIDES = ("chosen", "rejected")

_LABEL_VALUES = {
    "true": True,
    "1": True,
    "desirable": True,
    "false": False,
    "0": False,
    "undesirable": False,
}


def read_text(row: Cells) -> Text:
    return Text(_filled(row, "text"))


def read_turns(column: str, row: Cells) -> Conversation:
    """Read the turns in a column, with `tools` and `system`."""
    return _answered(_conversation(row, listed_in(column, row)))


def read_instruction(answer: str, row: Cells) -> Conversation:
    """Read `instruction` and an answer, with an optional `input` (appended to the instruction after
    an empty line) and pairs of earlier turns in `history`."""
    if isinstance(row[answer], list) and len(row[answer]) > 1:
        raise UserError(
            f"{answer} has {len(row[answer])} answers, as rows for preference training have (the "
            "better one first): train on pairs with MODULE=preference, or return the better answer "
            "from a function, --dataloader.format my_rows.py:better"
        )
    response = [_message("assistant", _filled(row, answer))]
    return _conversation(row, [*instruction_in(row), *_with_reasoning(response, row)])


def read_question(question: str, answer: str, row: Cells) -> Conversation:
    """Read two columns: the user's text or previous turns, and the assistant's answer."""
    prompt, response = turns_in("user", question, row), turns_in("assistant", answer, row)
    if (role := role_of(response[0])) in ("system", "user"):
        raise BrokenSample(
            f"{answer} must begin with the role 'assistant', not {role!r}; for a column of whole "
            "conversations, set --dataloader.columns messages=NAME"
        )
    return _answered(_conversation(row, [*prompt, *_with_reasoning(response, row)]))


def _with_reasoning(response: Sequence[object], row: Cells) -> list[object]:
    """Return the turns of an answer with the reasoning of a row's own column, which belongs to the
    only turn."""
    found = {column: row[column] for column in REASONING_COLUMNS if row.get(column) is not None}
    reasoning = one_reasoning(found) if found else ""
    if not reasoning:
        return list(response)
    if len(response) != 1 or not isinstance(response[0], Mapping):
        raise BrokenSample(
            "the answer has several turns, so a column with reasoning cannot be assigned to one"
        )
    return [{**response[0], OF_COLUMN: reasoning}]


def read_glaive(row: Cells) -> Conversation:
    """Read Glaive's transcripts, with functions in the system prompt."""
    chat, system = row["chat"], row["system"]
    turns = glaive_turns(chat) if isinstance(chat, str) else None
    if turns is None:
        return read_turns("chat", row)
    words, functions = glaive_system(checked_text(system or "", "system"))
    if functions and row.get("tools"):
        raise BrokenSample(
            "there are tools both in the column tools and in the column system; remove one"
        )
    return _answered(
        _conversation({**row, "system": words, "tools": functions or row.get("tools")}, turns)
    )


def read_exchanges(row: Cells) -> Conversation:
    """Read `texts`, a list of questions with answers (The Cauldron, FineVision)."""
    exchanges = from_json(row["texts"], "texts")
    if exchanges in (None, []):
        raise EmptySample("texts is empty")
    sides = ("user", "assistant")
    if not isinstance(exchanges, list) or not all(
        isinstance(one, Mapping) and one.keys() >= {*sides} for one in exchanges
    ):
        raise BrokenSample(
            f"texts must be a list of objects with user and assistant, not {shortened(exchanges)}"
        )
    turns = [_message(side, one[side]) for one in exchanges for side in sides]
    return _answered(_conversation(row, turns))


def read_calls(row: Cells) -> Conversation:
    """Read a question and the calls that answer it (xLAM): `query`, `answers` and `tools`."""
    answers = from_json(row["answers"], "answers")
    if answers in (None, "", []):
        raise EmptySample("answers is empty")
    if not isinstance(answers, list) or not all(isinstance(call, Mapping) for call in answers):
        raise BrokenSample(f"answers must be a list of function calls, not {shortened(answers)}")
    answer = {"role": "assistant", "content": None, "tool_calls": answers}
    return _conversation(row, [*turns_in("user", "query", row), answer])


def read_pair(prompt: PromptReader, row: Cells) -> Pair:
    """Read `chosen` and `rejected`, continuations of a prompt as text, a message or messages.

    If they are transcripts or do not begin with the assistant, they are whole conversations: the
    prompt is their common prefix, and `prompt` is not called.
    """
    chosen, rejected = (_continuation(row, column) for column in _SIDES)
    if all(role_of(messages[0]) == "assistant" for messages in (chosen, rejected)):
        turns = prompt(row)
        n_prompt = len(_conversation(row, turns).messages)
        first, second = (
            _conversation(row, [*turns, *chosen]),
            _conversation(row, [*turns, *rejected]),
        )
    else:
        first, second = _conversation(row, chosen), _conversation(row, rejected)
        limit = min(len(first.messages), len(second.messages)) - 1
        equal = (
            a == b for a, b in zip(first.messages[:limit], second.messages[:limit], strict=True)
        )
        n_prompt = next((n for n, is_equal in enumerate(equal) if not is_equal), limit)
    return _pair(first, second, n_prompt, row.get("margin"))


def read_answers(answers: str, row: Cells) -> Pair:
    """Read `instruction` and a list of two answers, the better one first (LLaMA-Factory)."""
    found = row[answers]
    if found in (None, "", []):
        raise EmptySample(f"{answers} is empty")
    if not isinstance(found, list) or len(found) != len(_SIDES):
        rated = next(
            (f", and {name} rates single ones (--config kto)" for name in LABELS if name in row), ""
        )
        raise BrokenSample(
            f"{answers} must be a list of two answers, the better one first, not "
            f"{shortened(found)}{rated}"
        )
    return read_pair(instruction_in, {**row, **dict(zip(_SIDES, found, strict=True))})


def read_other_answer(column: str, row: Cells) -> Pair:
    """Read `messages`, which end with the chosen answer, and a rejected answer to replace it, or
    another whole conversation (ms-swift)."""
    turns, rejected = listed_in("messages", row), _continuation(row, column)
    if not turns or role_of(turns[-1]) != "assistant":
        raise BrokenSample("messages must end with the chosen answer")
    if role_of(rejected[0]) == "assistant":
        rejected = [*turns[:-1], *rejected]
    return read_pair(no_prompt, {**row, "chosen": turns, "rejected": rejected})


def read_rated(read: Callable[[Cells], Conversation], label: str, row: Cells) -> Pair:
    """Read a conversation and the label of its last message: a pair without a rejected answer if
    the label is true, or without a chosen one."""
    is_desirable = _LABEL_VALUES.get(str(row[label]).lower())
    if is_desirable is None:
        raise BrokenSample(f"{label} must be true or false, not {shortened(row[label])}")
    conversation = read(row)
    *before, last = (message["role"] for message in conversation.messages)
    if not before or last != "assistant":
        raise BrokenSample(f"{label} rates the last message, which must be an answer to a prompt")
    if False in conversation.trained[-1:]:
        raise BrokenSample(f"{label} rates the last message, which has the weight 0")
    prompt = Conversation(
        conversation.messages[:-1],
        conversation.tools,
        conversation.trained[:-1],
        conversation.options,
    )
    answers = conversation.messages[-1:]
    return Pair(prompt, answers, []) if is_desirable else Pair(prompt, [], answers)


def _pair(chosen: Conversation, rejected: Conversation, n_prompt: int, margin: object) -> Pair:
    pair = Pair(
        Conversation(
            chosen.messages[:n_prompt], chosen.tools, chosen.trained[:n_prompt], chosen.options
        ),
        chosen.messages[n_prompt:],
        rejected.messages[n_prompt:],
        margin,
    )
    if n_prompt == 0:
        raise BrokenSample("chosen and rejected have no common first message to use as the prompt")
    if False in (*chosen.trained[n_prompt:], *rejected.trained[n_prompt:]):
        raise BrokenSample(
            "chosen or rejected has a message with weight 0, but answers are always compared "
            "completely"
        )
    for name, messages in (("chosen", pair.chosen), ("rejected", pair.rejected)):
        if not messages:
            raise BrokenSample(
                f"{name} is a call that continues the last answer of the prompt; move both to one "
                "message"
            )
        if messages[0]["role"] != "assistant":
            raise BrokenSample(
                f"{name} continues the prompt with the role {messages[0]['role']!r}, not "
                "'assistant'"
            )
        if not Conversation(messages).is_answered():
            raise EmptySample(f"{name} is empty")
    if _stripped(pair.chosen) == _stripped(pair.rejected):
        raise EmptySample("chosen and rejected are equal")
    return pair


def _stripped(messages: list[Message]) -> list[Message]:
    """Return messages without whitespace around their texts."""
    return [
        {**message, "content": str(message.get("content") or "").strip()} for message in messages
    ]


def read_prompt(prompt: PromptReader, row: Cells) -> Prompt:
    """Read a prompt and an optional reference answer from one of the columns `ANSWERS`."""
    conversation = _conversation(row, prompt(row))
    if conversation.messages[-1]["role"] == "assistant":
        raise BrokenSample("the prompt must not end with a message of the assistant")
    return Prompt(conversation, _answer(row), row)


def _answer(row: Cells) -> str | None:
    for column in ANSWERS:
        if (answer := row.get(column)) is not None:
            return checked_text(_number_as_text(answer), column)
    return None


def instruction_in(row: Cells) -> list[object]:
    """Return the turns of an instruction, with its history and input."""
    messages: list[object] = []
    history = from_json(row.get("history") or [], "history")
    if not isinstance(history, list):
        raise BrokenSample(f"history must be a list of pairs of texts, not {shortened(history)}")
    for exchange in history:
        if not isinstance(exchange, list) or len(exchange) != 2:
            raise BrokenSample(f"history must contain pairs of texts, not {shortened(exchange)}")
        question, answer = map(_number_as_text, exchange)
        messages += [_message("user", question), _message("assistant", answer)]
    columns = [column for column in ("instruction", "input") if row.get(column) is not None]
    parts = [checked_text(_number_as_text(row[column]), column) for column in columns]
    text = "\n\n".join(part for part in parts if part and not part.isspace())
    if not text:
        raise EmptySample("instruction is empty")
    return [*messages, _message("user", text)]


def no_prompt(row: Cells) -> list[object]:
    raise BrokenSample(
        "chosen and rejected have no prompt; name its column with --dataloader.columns "
        "prompt=NAME, or write transcripts such as '\\n\\nHuman: ...\\n\\nAssistant: ...'"
    )


def _answered(conversation: Conversation) -> Conversation:
    if not conversation.is_answered():
        raise EmptySample("the assistant's messages are empty")
    return conversation


def _conversation(row: Cells, turns: Sequence[object]) -> Conversation:
    messages, system = openai_messages(turns), row.get("system")
    if system not in ("", None):
        if messages and role_of(messages[0]) == "system":
            raise BrokenSample(
                "there are two system prompts, in the column system and in the first message; "
                "remove one"
            )
        messages = [
            _message(
                "system", system if isinstance(system, list) else checked_text(system, "system")
            ),
            *messages,
        ]
    messages, tools = move_tools(messages, row.get("tools"))
    conversation = normalize(messages, tools, row.get("chat_template_kwargs"))
    conversation.tools = with_parameters(conversation.tools)
    return conversation


def listed_in(column: str, row: Cells) -> list[object]:
    """Return the turns in a column with a list, its JSON text or a transcript."""
    value = row[column]
    if value is None:
        raise EmptySample(f"{column} is empty")
    if isinstance(value, str) and (turns := transcript(value)):
        return turns
    try:
        listed = from_json(value, column)
    except BrokenSample as error:
        raise BrokenSample(
            f"{error}; for plain text, set --dataloader.columns text={column}"
        ) from None
    if not isinstance(listed, list):
        raise BrokenSample(
            f"{column} must be a list of messages, not {kind_of(listed)}: {shortened(listed)}"
        )
    return alternating(listed)


def _continuation(row: Cells, column: str) -> list[object]:
    value = row[column]
    return (transcript(value) if isinstance(value, str) else None) or turns_in(
        "assistant", column, row
    )


def turns_in(role: str, column: str, row: Cells) -> list[object]:
    """Return the turns in a column: a list, one turn, a transcript without an answer, or a text
    with the given role."""
    value = row[column]
    if isinstance(value, str):
        turns = transcript(value) if role == "user" else None
        if turns and not turns[-1]["content"]:
            return turns[:-1]
    elif isinstance(value, Mapping):
        return [value]
    return value if isinstance(value, list) and value else [_message(role, _filled(row, column))]


def _message(role: str, content: object) -> dict[str, object]:
    return {"role": role, "content": content}


def _filled(row: Cells, column: str) -> str:
    if row[column] in (None, "", []):
        raise EmptySample(f"{column} is empty")
    text = checked_text(_number_as_text(row[column]), column)
    if text.isspace():
        raise EmptySample(f"{column} is empty")
    return text


def _number_as_text(value: object) -> object:
    """Convert a number to text; return other values unchanged."""
    is_number = (
        isinstance(value, int)
        and not isinstance(value, bool)
        or isinstance(value, float)
        and math.isfinite(value)
    )
    return str(value) if is_number else value


def alternating(turns: list[object]) -> list[object]:
    """Convert a list of plain texts (not JSON) to alternating user and assistant turns; return
    other lists unchanged."""
    if not all(isinstance(turn, str) and not _LOOKS_LIKE_A_MESSAGE.match(turn) for turn in turns):
        return turns
    return [
        _message(role, text)
        for role, text in zip(cycle(("user", "assistant")), turns, strict=False)
    ]


def transcript(text: str) -> list[Any] | None:
    """Parse a transcript such as "\\n\\nHuman: Hi.\\n\\nAssistant: Hello." (Anthropic's HH) into
    turns; return None for other texts."""
    if not _BEGINS_TRANSCRIPT.match(text):
        return None
    _, *pieces = _SPEAKER_IN_TRANSCRIPT.split(text)
    if "Assistant" not in pieces[::2]:
        return None
    turns = zip(pieces[::2], pieces[1::2], strict=True)
    return [_message(SPEAKERS[speaker.lower()], text.strip()) for speaker, text in turns]
