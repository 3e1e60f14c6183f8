"""The renderings of one conversation in each form."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from torchtitan.components.chat_template import ChatTemplate
from torchtitan.components.chat_template.forms import (
    KEYS,
    REASONING,
    WRITTEN,
    Form,
    Forms,
    Traits,
    prepared,
    split_reasoning,
)
from torchtitan.components.chat_template.stops import Kind, Stops
from torchtitan.components.data.finetuning.conversation import BrokenSample, Conversation, Message
from torchtitan.components.data.finetuning.markers import marked_answer, numbered, numbered_marker
from torchtitan.tools.errors import UserError

if TYPE_CHECKING:
    from torchtitan.components.chat_template.replay import Input

_MOST_ENDS = 2000
"""Conversations whose ends of messages are remembered."""


class TriedTemplate(NamedTuple):
    """A template with the results of trials."""

    template: ChatTemplate
    forms: Forms
    stops: Stops
    known_ends: dict[str, list[str]]
    """Results of `Renderings.texts_after` by what they depend on."""


class Renderings:
    """A conversation, with its renderings in each form.

    Args:
        tried: the template.
        conversation: messages, tools and options.
        thinks: whether the conversation has reasoning; None: as its messages have it.
    """

    def __init__(
        self, tried: TriedTemplate, conversation: Conversation, thinks: bool | None = None
    ):
        self._tried = tried
        self.template, self.forms, self.stops, self._known_ends = tried
        self.messages = [self._split(message) for message in conversation.messages]
        answers = (message for message in self.messages if message["role"] == "assistant")
        self.thinks = any(answer.get(REASONING) for answer in answers) if thinks is None else thinks
        self.tools = conversation.tools
        self.options = {
            name: value for name, value in conversation.options.items() if self.template.reads(name)
        }
        self._traits: dict[int, Traits] = {}
        self._prepared: dict[Form, tuple[list[Message], list[Input]]] = {}
        self._rendered: dict[tuple[int, bool, Form], tuple[str, list[tuple[int, int]]]] = {}
        self.has_system = any(
            message["role"] in ("system", "developer") for message in self.messages
        )

    def _split(self, message: Message) -> Message:
        if message["role"] != "assistant":
            return message
        return split_reasoning(message, self.forms.tags)

    def traits(self, number: int) -> Traits:
        """Return the traits of the assistant's message `number`."""
        if number in self._traits:
            return self._traits[number]
        traits = Traits(thinks=self.thinks, options=self.options)
        bare = set()
        for message in self.messages[: number + 1]:
            if message["role"] != "assistant":
                continue
            traits.reasoning |= bool(message.get(REASONING))
            traits.written |= WRITTEN in message
            if calls := message.get("tool_calls"):
                traits.n_calls = min(2, max(traits.n_calls, len(calls)))
                if not message.get("content"):
                    bare.add(_kind_of(message))
        traits.bare = tuple(sorted(bare))
        traits.developer = "developer" in [other["role"] for other in self.messages]
        self._traits[number] = traits
        return traits

    def with_markers(self, number: int) -> "Renderings":
        """Return the conversation up to message `number`, with markers instead of its texts."""
        message = marked_answer(self.messages[number])
        before = [{**other} for other in self.messages[:number]]
        row = self.with_messages([*before, message])
        row.has_system = self.has_system
        return row

    def with_messages(self, messages: list[Message]) -> "Renderings":
        """Return a conversation of these messages, not split, with the same tools and options."""
        row = Renderings(
            self._tried, Conversation([], self.tools, options=self.options), self.thinks
        )
        row.messages = messages
        return row

    def text(self, n: int, form: Form, *, prompted: bool = False) -> str:
        """Return `render`. Raise `BrokenSample` if the template rejects the messages."""
        try:
            return self.render(n, form, prompted=prompted)
        except UserError as error:
            raise BrokenSample(str(error)) from error

    def render(self, n: int, form: Form, *, prompted: bool) -> str:
        """Return the text of the first `n` messages."""
        return self.rendered(n, form, prompted)[0]

    def rendered(self, n: int, form: Form, prompted: bool) -> tuple[str, list[tuple[int, int]]]:
        key = n, prompted, form
        result = self._rendered.get(key)
        if result is None:
            messages, inputs = self.in_form(n, form, prompted)
            if self.template.marks_generation and not prompted:
                result = self.template.render_marked(
                    messages,
                    tools=self.tools,
                    null_content=_has_nulls(form),
                    **dict(form.options),
                )
            else:
                result = self.plain(inputs, form, prompted=prompted), []
            self._rendered[key] = result
        return result

    def plain(self, inputs: "Sequence[Input]", form: Form, *, prompted: bool = False) -> str:
        """Return the text of messages that are already in the form."""
        return self.template.render_inputs(
            inputs, tools=self.tools, add_generation_prompt=prompted, **dict(form.options)
        )

    def in_form(self, n: int, form: Form, prompted: bool) -> "tuple[list[Message], list[Input]]":
        """Return the first `n` messages, and the inputs of the template for them. Reasoning between
        tags concerns the last one only: earlier turns have what the template keeps of them."""
        is_usual = form.reasoning in (*KEYS, "parts")
        usual = form if is_usual else replace(form, reasoning=REASONING, tags=None)
        known = self._prepared.get(usual)
        if known is None:
            known = self._prepared[usual] = self.inputs(prepared(self.messages, usual), usual)
        messages, inputs = known[0][:n], known[1][:n]
        if is_usual or prompted or not n:
            return messages, inputs
        last, its_input = self.inputs(prepared(self.messages[n - 1 : n], form), form)
        return [*messages[:-1], *last], [*inputs[:-1], *its_input]

    def inputs(self, messages: list[Message], form: Form) -> "tuple[list[Message], list[Input]]":
        """Return messages in a form, and the inputs of the template for them."""
        return messages, self.template.inputs(messages, null_content=_has_nulls(form))

    def texts_after(self, form: Form) -> list[str]:
        """Return the text that the template writes between each message and the next one, for
        messages with markers instead of their texts."""
        marked = self.with_messages(
            [numbered(message, number) for number, message in enumerate(self.messages)]
        )
        key = repr((marked.messages, self.tools, form))
        if key not in self._known_ends:
            if len(self._known_ends) >= _MOST_ENDS:
                self._known_ends.clear()
            self._known_ends[key] = marked._texts_between(form)
        return self._known_ends[key]

    def _texts_between(self, form: Form) -> list[str]:
        """Return `texts_after` of messages with markers."""
        text = self.text(len(self.messages), form)
        ends, end = [], 0
        for number in range(len(self.messages)):
            end = max([end, *(found.end() for found in numbered_marker(number).finditer(text))])
            ends.append(end)
        begins = [numbered_marker(number + 1).search(text, end) for number, end in enumerate(ends)]
        return [
            text[end : begin.start() if begin else None]
            for end, begin in zip(ends, begins, strict=True)
        ]

    def kind(self, number: int) -> Kind:
        return "call" if self.messages[number].get("tool_calls") else "answer"

    def has_calls(self, number: int) -> bool:
        """Return whether a message before `number` has calls."""
        return any(message.get("tool_calls") for message in self.messages[:number])


def _has_nulls(form: Form) -> bool:
    """Return whether the template gets null as the content of messages without one."""
    return form.empty == "none"


def _kind_of(message: Message) -> str:
    """Return the kind of a message's missing content."""
    return "none" if message.get("content") is None else "empty"
