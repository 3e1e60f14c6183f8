"""Consecutive turns in any spelling to messages, and the results of calls to their calls."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from torchtitan.components.data.finetuning.conversation import (
    BrokenSample,
    from_json,
    shortened,
)
from torchtitan.components.data.finetuning.spellings.answers import OF_ITEM, WRITTEN, normal_answer
from torchtitan.components.data.finetuning.spellings.calls import IDS_OF_RESULTS, split_results
from torchtitan.components.data.finetuning.spellings.reasoning import REASONING_KEYS, reasoning_text
from torchtitan.components.data.finetuning.spellings.roles import Turn, role_of
from torchtitan.components.data.finetuning.spellings.single_turns import is_plain, message_of


def openai_messages(turns: Sequence[object]) -> list[object]:
    """Convert turns in any spelling to messages with `role` and `content`.

    Call ids that are missing have nine letters and digits, as some templates require. Raise
    `BrokenSample`, naming the turn from 1, for an unknown speaker, two different reasonings, a
    result that no call asked for, and content that would be lost or moved."""
    reader = _Reader()
    for number, turn in enumerate(turns, 1):
        if isinstance(turn, str):
            with suppress(BrokenSample):  # which `normalize` reports
                turn = from_json(turn, "message")
        try:
            reader.read(turn)
        except BrokenSample as error:
            raise BrokenSample(f"message {number}: {error}") from None
    if reader.reasoning:
        raise BrokenSample(f"message {len(turns)}: its reasoning is followed by no answer")
    return reader.messages


class _Call(NamedTuple):
    id: str
    name: object


class _Reader:
    """Converts consecutive turns to messages, and assigns results to function calls."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.reasoning: list[str] = []
        """Reasoning items without their answer so far."""
        self._pending: list[_Call] = []
        """Calls without results; later ones in the same turn of the assistant are appended."""
        self._unanswered: list[_Call] = []
        """Calls of earlier turns without results."""
        self._invented: dict[str, Turn] = {}
        """Calls that had no ids, by the ids given to them."""
        self._ids: set[str] = set()
        self._n_calls = 0

    def read(self, turn: object) -> None:
        if not isinstance(turn, Mapping):
            self.messages.append(turn)
            return
        if is_plain(turn) and not self.reasoning:
            self._close()
            self.messages.append(dict(turn))
            return
        message, is_call = message_of(turn)
        role = message.get("role")
        if role != "assistant":
            self._refuse_reasoning(message)
        for one in split_results(message):
            if one.get("role") == "tool":
                self._add_result(one)
            elif role == "assistant":
                self._add_answer(one, is_call)
            else:
                self._close()
                self.messages.append(one)

    def _refuse_reasoning(self, message: Turn) -> None:
        if self.reasoning:
            raise BrokenSample(
                f"the reasoning before it is followed by the role {message.get('role')!r}, by no "
                "answer"
            )
        for key in REASONING_KEYS:
            value = message.get(key)
            if value in (None, "", []):
                message.pop(key, None)
            else:
                raise BrokenSample(
                    f"it has {key}, which only the assistant may have: {shortened(value)}"
                )

    def _add_answer(self, message: Turn, is_call: bool) -> None:
        if message.get("type") == "reasoning":
            text = reasoning_text(dict(message, type=None), "reasoning item")
            self.reasoning += [text] if text.strip() else []
            return
        if self.reasoning:
            message[OF_ITEM] = "\n\n".join(self.reasoning)
            self.reasoning = []
        answer = normal_answer(message)
        if is_call and self.messages and _continues(self.messages[-1], answer):
            self._append_calls(self.messages[-1], answer["tool_calls"])
            return
        self._close()
        if isinstance(answer.get("tool_calls"), list):
            answer["tool_calls"] = self._registered(answer["tool_calls"])
        self.messages.append(answer)

    def _append_calls(self, message: Turn, calls: list[object]) -> None:
        message["tool_calls"] = [*message.get("tool_calls", []), *self._registered(calls)]
        message["content"] = message.get("content") or None
        message.pop(WRITTEN, None)

    def _close(self) -> None:
        """Assign the following results by their ids only, since the turn of the pending calls is
        over."""
        self._unanswered += self._pending
        self._pending = []

    def _registered(self, calls: list[object]) -> list[object]:
        """Return calls with ids, which become pending."""
        copies: list[Turn] = [dict(call) for call in calls if isinstance(call, Mapping)]
        if len(copies) < len(calls):
            return calls
        registered: list[object] = []
        for call in copies:
            function = call.get("function")
            name = function.get("name") if isinstance(function, Mapping) else None
            if call.get("id") in (None, ""):
                call["id"] = self._new_id()
                self._invented[call["id"]] = call
            self._ids.add(str(call["id"]))
            self._pending.append(_Call(call["id"], name))
            registered.append(call)
        return registered

    def _new_id(self) -> str:
        while True:
            name = f"call{self._n_calls:05}"
            self._n_calls += 1
            if name not in self._ids:
                return name

    def _add_result(self, message: Turn) -> None:
        given = [message.pop(key) for key in IDS_OF_RESULTS if message.get(key) not in (None, "")]
        for key in IDS_OF_RESULTS:
            message.pop(key, None)
        content = message.get("content")
        if isinstance(content, Mapping):
            message["content"] = json.dumps(content, ensure_ascii=False)
        call = self._call_of(given[0] if given else None, message.get("name"), message)
        if call is not None:
            message["tool_call_id"] = call
        self.messages.append(message)

    def _call_of(self, given: object, name: object, message: Turn) -> object:
        """Return the id of the call that a result answers, and mark it as answered; None for a call
        in the text."""
        if given is not None:
            return self._call_by_id(given, message)
        named = [call for call in self._pending if name is None or call.name == name]
        if named:
            self._pending.remove(named[0])
            return named[0].id
        if self._pending:
            names = ", ".join(str(call.name) for call in self._pending)
            raise BrokenSample(
                f"it is a result of {name!r}, which no call asked for (calls without a result: "
                f"{names})"
            )
        if self._ids or not self._follows_text():
            raise BrokenSample(
                f"it is a result that no call asked for: {shortened(message.get('content'))}"
            )
        return None

    def _call_by_id(self, given: object, message: Turn) -> object:
        for calls in (self._pending, self._unanswered):
            if found := [call for call in calls if call.id == given]:
                calls.remove(found[0])
                return given
        nameless = [call for call in self._pending if str(call.id) in self._invented]
        name = message.get("name")
        nameless = [call for call in nameless if name is None or call.name == name]
        if not nameless or isinstance(given, list | Mapping) or str(given) in self._ids:
            raise BrokenSample(
                f"it is the result of the call {given!r}, which no earlier message made or which "
                "has a result already"
            )
        self._pending.remove(nameless[0])
        self._invented.pop(nameless[0].id)["id"] = given
        self._ids.add(str(given))
        return given

    def _follows_text(self) -> bool:
        """Return whether the last message but results is an answer, whose text may have calls in an
        unknown form."""
        others = [message for message in self.messages if role_of(message) != "tool"]
        return bool(others) and role_of(others[-1]) == "assistant"


_OWN_KEYS = ("role", "content", "tool_calls", "reasoning_content", WRITTEN)


def _continues(previous: object, call: Turn) -> bool:
    """Return whether a call belongs to the message before it, since both are one turn of the
    assistant."""
    if not isinstance(previous, Mapping) or role_of(previous) != "assistant":
        return False
    if call.get("reasoning_content"):
        return False
    if not isinstance(previous.get("content"), str | None):
        return False
    if not isinstance(call.get("tool_calls"), list) or not isinstance(
        previous.get("tool_calls", []), list
    ):
        return False
    others = [
        {key: value for key, value in one.items() if key not in _OWN_KEYS}
        for one in (previous, call)
    ]
    return others[0] == others[1]
