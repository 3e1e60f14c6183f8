"""Forms in which a conversation can be given to a template: its options, and the keys that hold
reasoning and calls.

Templates read reasoning from different keys, or from tags in the text; some want arguments as
objects, others as JSON text; some write calls only if the content is none. Which form a template
understands is found by trial: `candidates` lists the forms to try.
"""

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

from torchtitan.components.chat_template.stops import PROBE_TOOLS
from torchtitan.components.chat_template.template import ChatTemplate
from torchtitan.tools.errors import UserError

REASONING = "reasoning_content"
"""Key of the reasoning of a message before it is given to a template."""

WRITTEN = "written"
"""Key of a content as the row has it, with reasoning between tags."""

KEYS = (REASONING, "reasoning", WRITTEN)
"""Keys of reasoning to try; `thinking` comes with each (see `ChatTemplate`)."""

_QUESTION = "Question1"
_ANSWER = "Answer1"
_BEFORE = "Before1"
_LONGEST_TAG, _LONGEST_END = 40, 200

BLOCK = re.compile(
    r"(?P<open><\|\w+>\w+|<[^/<>\s]+>|\[[A-Z_]+\])(?P<inner>\s*)"
    r"(?P<close></[^<>\s]+>|<\|END_[^<>\s]+>|<[^<>|/\s]+\|>|\[/[A-Z_]+\])(?P<after>\s*)"
)
"""An empty block of reasoning, such as at the end of a generation prompt."""

_TAG = re.compile(r"<[^<>]+>|\[[^\[\]]+\]")

_STANDARD = re.compile(r"\s*(?:<(think|thinking|reasoning|thought)>|\[(THINK)\])")
"""Tags in rows, whatever the template."""

_NO_REASONING = re.compile(
    r"\s*(?:<(think|thinking|reasoning|thought)>\s*</\1>|\[THINK\]\s*\[/THINK\])"
)
"""An empty block of reasoning in rows, which marks an answer without reasoning."""


class Tags(NamedTuple):
    """Tags around reasoning, with the whitespace that the template writes inside and after them."""

    open: str
    inner: str
    close: str
    after: str

    def block(self, reasoning: str) -> str:
        """Return the whole block."""
        return self.open + self.inner + self.rest(reasoning)

    def rest(self, reasoning: str) -> str:
        """Return the block without its beginning."""
        return reasoning + self.inner + self.close + self.after


Way = Literal["whole", "tail", "joined", "followed"]
"""Derivation of a turn from renderings:

- `whole`: the conversation up to the turn, without its prompt.
- `tail`: the end of that conversation after the text of the generation prompt, if the template
  rewrites earlier turns.
- `joined`, if no rendering contains the reasoning: the generation prompt, the reasoning, its
  closing tag, and the answer as the template writes the last message.
- `followed`: the same with the answer as the template writes it before another message, if it
  writes the last message otherwise (Nemotron Nano v2 omits an empty one).
"""


_NO_TAGS = Tags("", "", "", "")

_Options = tuple[tuple[str, object], ...]


@dataclass(frozen=True, slots=True)
class Form:
    """One way to give a conversation to a template."""

    options: _Options = ()
    """Options of the template, such as ("enable_thinking", False)."""
    reasoning: str = REASONING
    """Key of the reasoning; or "parts" of the content, "inline" between tags in the content,
    "closing" for only the closing tag, or "written" as in the row."""
    empty: str = "given"
    """Content of a message with calls alone: as given (null leaves the key out, as in
    transformers), "none", or "text" (empty)."""
    arguments_as_text: bool = False
    developer_as_system: bool = False
    way: Way = "whole"
    tags: Tags | None = None

    @property
    def words(self) -> str:
        """Return the differences between the form and the messages as they are; empty without
        differences."""
        words = [f"{name}={value}" for name, value in self.options]
        if self.reasoning in _PLACES:
            words.append(f"reasoning {_PLACES[self.reasoning]}")
        if self.empty in _CONTENTS:
            words.append(_CONTENTS[self.empty])
        if self.arguments_as_text:
            words.append("arguments as text")
        if self.developer_as_system:
            words.append("the developer's message as system message")
        return ", ".join(words)


_PLACES = {
    "reasoning": "under the key reasoning",
    "parts": "as a part of the content",
    "inline": "between tags in the content",
    "closing": "before its closing tag in the content",
}

_CONTENTS = {"none": "content none", "text": "an empty content"}


@dataclass(slots=True)
class Traits:
    """Properties of a turn and its conversation that forms depend on. Equal traits have equal
    forms."""

    reasoning: bool = False
    """True if the turn or an earlier one has reasoning."""
    written: bool = False
    """True if it was between tags in the content."""
    thinks: bool = False
    """True if any turn of the conversation has reasoning."""
    n_calls: int = 0
    """Most calls of a message, 0, 1 or 2 (for more)."""
    bare: tuple[str, ...] = ()
    """Contents of messages with calls alone: empty or none."""
    developer: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    """Options that the row sets."""

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for equal traits."""
        options = repr(self.options) if self.options else ""
        flags = self.reasoning, self.written, self.thinks, self.developer
        return *flags, self.n_calls, self.bare, options


class Forms:
    """The forms that a template may understand, and facts about the text that it writes."""

    def __init__(self, template: ChatTemplate):
        self._template = template
        self._prompts: dict[_Options, str] = {}

    @cached_property
    def prompts(self) -> dict[_Options, str]:
        """Options (without any, and one by one) that change the generation prompt, with that
        prompt."""
        found: dict[_Options, str] = {(): self._generation_prompt({}) or ""}
        for name, value in itertools.product(self._template.option_names, (False, True)):
            prompt = self._generation_prompt({name: value})
            if prompt is not None and prompt not in found.values():
                found[(name, value),] = prompt
        return found

    @cached_property
    def tags(self) -> list[Tags]:
        """Tags of reasoning: tags of an empty block in a generation prompt or finished turn, and
        tags before which the template removes the text of an answer."""
        found = {}
        texts = [*self.prompts.values(), *filter(None, [self._header()])]
        for block in filter(None, map(closed_block, texts)):
            inner = "\n" if "\n" in block["inner"] else ""
            found[block["close"]] = Tags(block["open"], inner, block["close"], block["after"])
        for close in self._removing():
            found.setdefault(close, self._tags_of(close))
        return list(found.values())

    def opened_by(self, prompt: str) -> Tags | None:
        """Return the tags whose opening one ends a prompt."""
        prompt = prompt[-_LONGEST_END:].rstrip()
        opened = (
            tags for tags in self.tags if tags.open.strip() and prompt.endswith(tags.open.strip())
        )
        return next(opened, None)

    def prompt(self, options: _Options) -> str:
        """Return the generation prompt after a question; empty if the template rejects it."""
        if options not in self._prompts:
            self._prompts[options] = self._generation_prompt(dict(options)) or ""
        return self._prompts[options]

    def candidates(self, traits: Traits) -> Iterator[Form]:
        """Yield the forms to try for a turn, the most natural first."""
        carriers: list[tuple[str, Tags | None]] = [(REASONING, None)]
        if traits.reasoning:
            keys: list[tuple[str, Tags | None]] = [
                (key, None) for key in KEYS if key != WRITTEN or traits.written
            ]
            inline = [(way, tags) for tags in self.tags for way in ("inline", "closing")]
            carriers = [*keys, ("parts", None), *inline]
        empties = ["given"]
        if traits.bare:
            empties += ["none", "text"]
        as_text = (False, True) if traits.n_calls else (False,)
        as_system = (False, True) if traits.developer else (False,)
        others = list(itertools.product(empties, as_text, as_system))

        def forms(way: Way, options: list[_Options]) -> Iterator[Form]:
            for chosen, (key, tags), other in itertools.product(options, carriers, others):
                yield Form(chosen, key, *other, way=way, tags=tags)

        def joined(options: list[_Options]) -> Iterator[Form]:
            ways: tuple[Way, ...] = ("joined", "followed")
            for way, chosen, other in itertools.product(ways, options, others):
                yield Form(chosen, "none", *other, way=way, tags=self._joining(chosen))

        options = self._options(traits)
        if traits.thinks:
            yield from forms("whole", options)
            yield from forms("tail", options)
            yield from joined(self._opened_first(options))
            return
        for chosen in options:
            yield from forms("whole", [chosen])
            yield from forms("tail", [chosen])
            yield from joined([chosen])

    def _options(self, traits: Traits) -> list[_Options]:
        """Return the options to try. A conversation without reasoning is first tried without the
        generation prompts that open it."""
        of_row = tuple(sorted(traits.options.items()))
        others = [
            options
            for options in self.prompts
            if not {name for name, _ in options} & traits.options.keys()
        ]
        ordered = [(*of_row, *options) for options in others]
        if traits.thinks:
            return ordered
        return sorted(ordered, key=lambda options: self.opened_by(self.prompt(options)) is not None)

    def _opened_first(self, options: "list[_Options]") -> "list[_Options]":
        return sorted(options, key=lambda chosen: self.opened_by(self.prompt(chosen)) is None)

    def _joining(self, options: "_Options") -> Tags:
        known = self.tags[0] if self.tags else _NO_TAGS
        return self.opened_by(self.prompt(options)) or known

    def _generation_prompt(self, options: Mapping[str, Any]) -> str | None:
        messages = [{"role": "user", "content": _QUESTION}]
        try:
            before = self._render(messages, **options)
            prompt = self._render(messages, add_generation_prompt=True, **options)
        except UserError:
            return None
        return (
            prompt.rpartition(_QUESTION)[2]
            if not prompt.startswith(before)
            else prompt[len(before) :]
        )

    def _render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = False,
        **options: Any,
    ) -> str:
        """Render messages, with tools if the template needs some."""
        known = {"add_generation_prompt": add_generation_prompt, **options}
        try:
            return self._template.render(messages, **known)
        except UserError:
            return self._template.render(messages, tools=PROBE_TOOLS, **known)

    def _header(self) -> str:
        """Return the text that the template writes between a question and a finished answer."""
        text = self._finished(_ANSWER)
        return text.partition(_QUESTION)[2].rpartition(_ANSWER)[0]

    def _finished(self, answer: str, *, followed: bool = False) -> str:
        messages = [
            {"role": "user", "content": _QUESTION},
            {"role": "assistant", "content": answer},
        ]
        if followed:
            messages += [
                {"role": "user", "content": "Question2"},
                {"role": "assistant", "content": "Answer2"},
            ]
        try:
            return self._render(messages)
        except UserError:
            return ""

    def _removing(self) -> list[str]:
        """Return the texts of the template before which it removes the text of an answer."""
        literals = dict.fromkeys(text.strip() for text in self._template.literals)
        markup = [text for text in literals if len(text) <= _LONGEST_TAG and _TAG.fullmatch(text)]
        found = []
        for text, followed in itertools.product(markup, (False, True)):
            written = self._finished(f"{_BEFORE}{text}{_ANSWER}", followed=followed)
            if _ANSWER in written and _BEFORE not in written and text not in found:
                found.append(text)
        return found

    def _tags_of(self, close: str) -> Tags:
        header = self._header()
        continued = (
            prompt.removeprefix(header)
            for prompt in self.prompts.values()
            if prompt.startswith(header)
        )
        opened = [text for text in continued if text.strip()]
        text = opening_of(close)
        if not text and opened:
            text = opened[0].rstrip()
        prompt = next(
            (prompt for prompt in self.prompts.values() if prompt.rstrip().endswith(text)), ""
        )
        inner = "\n" if prompt.endswith("\n") or not prompt else ""
        return Tags(text, inner, close, "\n\n" if inner else "")


def closed_block(prompt: str) -> "re.Match[str] | None":
    """Return the empty block of reasoning at the end of a prompt."""
    blocks = list(BLOCK.finditer(prompt, max(0, len(prompt) - _LONGEST_END)))
    return blocks[-1] if blocks and blocks[-1].end() == len(prompt) else None


def opening_of(close: str) -> str:
    """Return the opening tag of a closing one, such as `</think>`; empty if unknown."""
    if close.startswith("</"):
        return "<" + close[2:]
    if close.startswith("[/"):
        return "[" + close[2:]
    return close.replace("END", "START") if close.startswith("<|END") else ""


def without_empty_block(content: str) -> str:
    """Return a content without an empty block of reasoning at its beginning, which templates move
    or remove."""
    return _NO_REASONING.sub("", content, count=1) if _NO_REASONING.match(content) else content


def split_reasoning(message: Mapping[str, object], tags: Sequence[Tags]) -> dict[str, object]:
    """Move reasoning between tags at the beginning of a message's content to `reasoning_content`,
    and keep the content as `written`; return other messages as they are. An opening tag may be
    missing if the tags are the template's. Tags after other text are part of the answer, which
    would otherwise lose that text."""
    content = message.get("content")
    if not isinstance(content, str) or message.get(REASONING):
        return dict(message)
    closes = [tag.close for tag in tags]
    if standard := _STANDARD.match(content):
        name = standard[1]
        closes.insert(0, f"</{name}>" if name else "[/THINK]")
    for close in closes:
        before, found, answer = content.partition(close)
        if not found:
            continue
        opening = next((tag.open for tag in tags if tag.close == close), "") or opening_of(close)
        head, opened, inside = before.partition(opening) if opening else ("", "", before)
        reasoning = (inside if opened else before).strip()
        if not reasoning or opened and head.strip():
            continue
        return {**message, "content": answer.strip(), REASONING: reasoning, WRITTEN: content}
    return dict(message)


def prepared(messages: Sequence[Mapping[str, object]], form: Form) -> list[dict[str, object]]:
    """Return messages in a form."""
    return [_prepared(message, form) for message in messages]


def _prepared(message: Mapping[str, Any], form: Form) -> dict[str, object]:
    if message["role"] != "assistant":
        is_renamed = form.developer_as_system and message["role"] == "developer"
        return {**message, "role": "system"} if is_renamed else dict(message)
    result = dict(message)
    reasoning, written = result.pop(REASONING, None), result.pop(WRITTEN, None)
    calls = result.get("tool_calls")
    if calls and form.arguments_as_text:
        result["tool_calls"] = [_with_text(call) for call in calls]
    if calls and not result.get("content"):
        _set_empty(result, form.empty)
    if reasoning:
        _set_reasoning(result, reasoning, written, form)
    return result


def _set_empty(message: dict[str, object], way: str) -> None:
    if way == "none":
        message["content"] = None
    elif way == "text":
        message["content"] = ""


def _set_reasoning(
    message: dict[str, Any], reasoning: str, written: str | None, form: Form
) -> None:
    content = message.get("content") or ""
    if form.reasoning in (REASONING, "reasoning"):
        message[form.reasoning] = reasoning
    elif form.reasoning == "parts":
        message["content"] = [
            {"type": "thinking", "thinking": reasoning},
            {"type": "text", "text": content},
        ]
    elif form.reasoning == WRITTEN and written is not None:
        message["content"] = written
    elif form.reasoning == WRITTEN:
        message[REASONING] = reasoning
    elif form.tags and form.reasoning == "inline":
        message["content"] = form.tags.block(reasoning) + content
    elif form.tags and form.reasoning == "closing":
        message["content"] = form.tags.rest(reasoning) + content


def _with_text(call: Mapping[str, Any]) -> dict[str, object]:
    function = call["function"]
    arguments = json.dumps(function.get("arguments", {}), ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}
