"""The stops of a template, found by trial: tokens or texts at which inference ends a turn of the
assistant."""

import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torchtitan.components.chat_template.template import ChatTemplate, Message, load_chat_template
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.tools.errors import UserError

Kind = Literal["answer", "call"]
"""Turn of the assistant that the user answers; turn with calls, which tools answer."""

QUESTION = "Question1"
ANSWER = "Answer1"
VALUE = "Value1"
FOLLOWING = "Following1"
"""Texts of trial conversations that no template writes by itself."""

_OTHER_VALUE = "Value0"

PROBE_TOOLS: list[dict[str, object]] = [
    {
        "type": "function",
        "function": {
            "name": "probe_function",
            "description": "Tries the template.",
            "parameters": {
                "type": "object",
                "properties": {"probe_key": {"type": "string", "description": "A text."}},
                "required": ["probe_key"],
            },
        },
    }
]


class Stop(NamedTuple):
    """End of a turn."""

    text: str
    """Token or text at which inference stops."""
    token_id: int | None
    """None: the text is not a single special token."""
    after: str = ""
    """Text that the template writes between the stop and the end of a finished conversation."""
    lead: str | None = None
    """For a stop that belongs to the next message, such as its header: the text after the turn, up
    to and including the stop. None: the turn itself contains its stop."""

    def cut(self, completion: str) -> str | None:
        """Return a finished turn up to and including its stop; None if the turn does not have this
        stop."""
        if self.lead is not None:
            return completion + self.lead
        if self.text and completion.endswith(self.text + self.after):
            return completion[: len(completion) - len(self.after)]
        at = completion.rfind(self.text) if self.text else -1
        is_last = at >= 0 and not completion[at + len(self.text) :].strip()
        return completion[: at + len(self.text)] if is_last else None


class Stops:
    """The stops of a template's turns.

    The template renders a trial conversation that ends with the turn, and the same one followed by
    the next message. The stop is the last special token that both have after the turn's last text
    and that does not occur inside a turn, such as between two calls; otherwise, the first one in
    which the finished conversation differs (gpt-oss writes `<|return|>` after the last turn, and
    `<|end|>` after others); otherwise, the first one of the next message (GLM's `<|user|>` and
    `<|observation|>`); otherwise text.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer):
        self._template, self._tokenizer = template, tokenizer
        self.pattern = special_pattern(tokenizer)
        """Pattern of all special tokens."""
        self._known: dict[tuple[str, str], Stop | None] = {}
        self._trailers: dict[tuple[bool, str], str] = {}

    def of(self, kind: Kind, options: Mapping[str, object]) -> Stop | None:
        """Return the stop of a kind of turns; None if the template does not write such turns."""
        key = kind, repr(sorted(options.items())) if options else ""
        if key not in self._known:
            trials = (self._try(trial, options) for trial in trial_conversations(kind))
            found = next(filter(None, trials), None)
            if found and kind == "call" and not found.text:
                # The template writes calls differently if messages follow, and turns alike.
                found = self.of("answer", options)
            self._known[key] = found
        return self._known[key]

    def all(self) -> list[Stop]:
        """Return the stops after answers and after calls, without repetitions."""
        found = [self.of(kind, {}) for kind in ("answer", "call")]
        by_text = {stop.text.strip(): stop for stop in found if stop and stop.text.strip()}
        return list(by_text.values())

    def ids(self) -> list[int]:
        """Return the tokens at which inference stops."""
        return [stop.token_id for stop in self.all() if stop.token_id is not None]

    def texts(self) -> list[str]:
        """Return the texts at which inference stops because they are not single tokens."""
        return [stop.text for stop in self.all() if stop.token_id is None]

    def trailer(self, options: Mapping[str, object], *, has_tools: bool) -> str:
        """Return the text that the template writes after the last message of any conversation,
        before the generation prompt, such as an instruction (Command R+); empty if there is
        none."""
        key = has_tools, repr(sorted(options.items()))
        if key not in self._trailers:
            question = {"role": "user", "content": QUESTION}
            answer = {"role": "assistant", "content": ANSWER}
            tools = PROBE_TOOLS if has_tools else None
            try:
                renderings = (
                    self._render([question], options, tools),
                    self._prompt([question], options, tools),
                    self._render([question, answer], options, tools),
                )
            except UserError:
                renderings = ("", "", "")
            self._trailers[key] = _trailer_of(*renderings)
        return self._trailers[key]

    def _try(self, trial: "Trial", options: Mapping[str, object]) -> Stop | None:
        try:
            finished = self._render(trial.messages, options, trial.tools)
        except UserError:
            return None
        finished = finished.removesuffix(self.trailer(options, has_tools=bool(trial.tools)))
        head, found, tail = finished.rpartition(trial.marker)
        if not found:
            return None
        try:
            longer = self._render([*trial.messages, trial.following], options, trial.tools)
        except UserError:
            longer = ""
        start = len(head) + len(found)
        if not longer.startswith(finished[:start]):
            longer = finished  # the template rewrites the turn, so that there is nothing to compare
        interior = self._interior(trial, options)
        n_shared = start + n_common(tail, longer[start:])
        opening = self._opening(trial, options)
        after = itertools.takewhile(
            lambda match: match[0] not in opening, self.pattern.finditer(finished, start)
        )
        spans = [match for match in after if match[0] not in interior]
        shared = [match for match in spans if match.end() <= n_shared]
        if not shared and trial.kind == "call" and (usual := self.of("answer", options)):
            shared = [match for match in spans if match[0] == usual.text]
        if chosen := shared[-1] if shared else next(iter(spans), None):
            return Stop(chosen[0], self._tokenizer.id_of(chosen[0]), after=finished[chosen.end() :])
        return self._of_next(finished, longer, start, trial.kind, opening)

    def _of_next(
        self, finished: str, longer: str, start: int, kind: Kind, opening: Collection[str]
    ) -> Stop:
        is_continued = longer.startswith(finished)
        end = len(finished) if is_continued else len(finished.rstrip())
        following = (
            longer[end:].partition(FOLLOWING)[0] if longer.startswith(finished[:end]) else ""
        )
        if token := self.pattern.search(following):
            usual = self.of("answer", {}) if kind == "call" and token[0] in opening else None
            if usual and usual.text and usual.lead is None:
                # The token begins any message; inference stops at the end of answers.
                return Stop(usual.text, usual.token_id, lead=usual.text)
            return Stop(token[0], self._tokenizer.id_of(token[0]), lead=following[: token.end()])
        tail = finished[start:]
        if (
            kind == "call"
            and (usual := self.of("answer", {}))
            and usual.text
            and usual.text in tail
        ):
            return (
                usual._replace(after=tail.rpartition(usual.text)[2])
                if usual.lead is None
                else usual
            )
        if kind == "answer" and tail.strip():
            return Stop(tail.rstrip(), None, after=tail[len(tail.rstrip()) :])
        lead = following.rstrip()
        return Stop((tail + lead).rstrip() if lead else "", None, lead=lead)

    def _opening(self, trial: "Trial", options: Mapping[str, object]) -> set[str]:
        """Return the special tokens of the generation prompt, which begin the next message."""
        before = trial.messages[:-1]
        prompt = self._prompt(before, options, trial.tools)
        return set(
            self.pattern.findall(
                prompt, n_common(prompt, self._render(before, options, trial.tools))
            )
        )

    def _interior(self, trial: "Trial", options: Mapping[str, object]) -> set[str]:
        """Return the special tokens between two calls of a turn; none if each call is a message of
        its own, with the header of the generation prompt: inference then stops after the first."""
        if trial.kind == "answer":
            return set()
        message = trial.messages[-1]
        other = _call(_OTHER_VALUE, as_text=trial.as_text)
        both = {**message, "tool_calls": [{**other, "id": "callaaaaa"}, *message["tool_calls"]]}
        try:
            text = self._render([*trial.messages[:-1], both], options, trial.tools)
        except UserError:
            return set()
        first, second = text.find(_OTHER_VALUE), text.rfind(VALUE)
        between = set(self.pattern.findall(text[first:second])) if 0 <= first < second else set()
        are_messages = bool(between & self._opening(trial, options))
        return set() if are_messages else between

    def _prompt(self, messages: Sequence[Message], options: Mapping[str, Any], tools: Any) -> str:
        return self._template.render(messages, tools=tools, add_generation_prompt=True, **options)

    def _render(self, messages: Sequence[Message], options: Mapping[str, Any], tools: Any) -> str:
        is_null = any("content" in message and message["content"] is None for message in messages)
        known = {"tools": tools, "null_content": is_null, **options}
        return self._template.render(messages, add_generation_prompt=False, **known)


def _trailer_of(before: str, prompt: str, finished: str) -> str:
    """Return the text after the last message of a conversation, from its text, the text with the
    generation prompt, and the text with an answer."""
    if finished.startswith(prompt) or not prompt.startswith(before):
        return ""
    generated = prompt[len(before) :]
    at = finished.rfind(generated, 0, n_common(before, finished) + len(generated))
    trailer = before[at:]
    is_found = at >= 0 and generated.strip() and trailer.strip() and finished.endswith(trailer)
    return trailer if is_found else ""


class Trial(NamedTuple):
    """A conversation that ends with the assistant's turn, and the message that follows."""

    kind: Kind
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    marker: str
    """Last text of the turn."""
    following: dict[str, Any]
    as_text: bool = False
    """True if arguments are JSON text."""


def trial_conversations(kind: Kind) -> Iterator[Trial]:
    """Yield trial conversations, in the forms that templates expect."""
    user = {"role": "user", "content": QUESTION}
    if kind == "answer":
        following = {"role": "user", "content": FOLLOWING}
        for tools in (None, PROBE_TOOLS):  # some templates need tools
            yield Trial(
                kind, [user, {"role": "assistant", "content": ANSWER}], tools, ANSWER, following
            )
        return
    result = {
        "role": "tool",
        "name": "probe_function",
        "content": FOLLOWING,
        "tool_call_id": "callbbbbb",
    }
    for content, as_text in itertools.product(("", None), (False, True)):
        calls = {
            "role": "assistant",
            "content": content,
            "tool_calls": [_call(VALUE, as_text=as_text)],
        }
        yield Trial(kind, [user, calls], PROBE_TOOLS, VALUE, result, as_text)


def _call(value: str, *, as_text: bool) -> dict[str, object]:
    arguments = f'{{"probe_key": "{value}"}}' if as_text else {"probe_key": value}
    return {
        "id": "callbbbbb",
        "type": "function",
        "function": {"name": "probe_function", "arguments": arguments},
    }


def template_stop_ids(tokenizer: Tokenizer, folders: Sequence[Path]) -> set[int]:
    """Return the tokens at which the chat template in a model's folders stops; none without a
    template. Raise `UserError` if it cannot be read."""
    template = load_chat_template(*folders)
    return {*Stops(template, tokenizer).ids()} if template else set()


def special_pattern(tokenizer: Tokenizer) -> re.Pattern[str]:
    """Return a pattern of all special tokens."""
    special = sorted(
        (tokenizer.decode([token_id]) for token_id in tokenizer.special_ids), key=len, reverse=True
    )
    return re.compile("|".join(re.escape(token) for token in special if token) or "(?!)")


def n_common(first: str, second: str) -> int:
    """Return the number of characters that two texts begin with in common."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return sum(1 for _ in pairs)
