"""Which characters of a rendered conversation are trained on: by the template's own marks, or by comparing prefixes."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from torchtitan.components.chat_template import ChatTemplate, Span
from torchtitan.components.data.finetuning.conversation import BrokenSample, Conversation
from torchtitan.tools.errors import UserError

TrainOn = Literal["all", "assistant", "last_assistant"]
"""All tokens; the assistant's turns; only the last of them. What a row says of its own messages comes first."""


class Turn(NamedTuple):
    """What a message was rendered to."""

    span: Span
    trained: bool
    marked: bool = False
    """Whether the template marks it so; marks may leave out the token that ends a turn."""


class Rendered(NamedTuple):
    """The text of a conversation, and what is trained on."""

    text: str
    turns: list[Turn]
    """All that the template marks, if it does; of other turns, those that differ from `default`."""
    default: bool
    """Whether the text outside of the turns is trained on."""


def render_with_mask(template: ChatTemplate, conversation: Conversation, train_on: TrainOn) -> Rendered:
    """A conversation's text, and which turns of it are trained on.

    An assistant's turn is what the template marks by `{% generation %}`. Where it marks nothing, it begins where the
    conversation before it, rendered with the generation prompt, ends, and ends where the conversation up to it does.
    Both must be prefixes of the whole text. Other turns, where a row asks for them, are always found in this way.

    Raises:
        BrokenSample: if the template does not take the conversation, or if it cannot be told what a turn became.
    """
    wanted = _wanted(conversation, train_on)
    try:
        if train_on == "all":
            return _all_but(template, conversation, wanted)
        if template.marks_generation:
            return _by_marks(template, conversation, wanted)
        text = _render(template, conversation, len(conversation.messages))
        turns = [Turn(_span(template, conversation, i, text), True) for i, trained in enumerate(wanted) if trained]
    except BrokenSample:
        raise
    except UserError as error:
        raise BrokenSample(str(error)) from error
    return Rendered(text, turns, default=False)


def _wanted(conversation: Conversation, train_on: TrainOn) -> list[bool]:
    """For each message whether it is trained on."""
    assistant = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    default = {"all": range(len(conversation.messages)), "assistant": assistant, "last_assistant": assistant[-1:]}
    return [i in default[train_on] if said is None else said for i, said in enumerate(conversation.trained)]


def _all_but(template: ChatTemplate, conversation: Conversation, wanted: Sequence[bool]) -> Rendered:
    text = _render(template, conversation, len(conversation.messages))
    left_out = [_span(template, conversation, i, text) for i, trained in enumerate(wanted) if not trained]
    return Rendered(text, [Turn(span, False) for span in left_out], default=True)


def _by_marks(template: ChatTemplate, conversation: Conversation, wanted: Sequence[bool]) -> Rendered:
    text, spans = template.render_marked(conversation.messages, tools=conversation.tools)
    assistant = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    trained = [wanted[i] for i in assistant]
    if len(set(trained)) < 2:
        turns = [Turn(span, True in trained, marked=True) for span in spans]
    elif len(spans) == len(assistant):
        turns = [Turn(*turn, marked=True) for turn in zip(spans, trained, strict=True)]
    else:
        raise BrokenSample(
            f"{template.name} marks {len(spans)} texts in a conversation with {len(assistant)} turns of the assistant, "
            "so that it cannot be told which of them is which turn; --dataloader.train_on assistant trains all"
        )
    others = [i for i, trained in enumerate(wanted) if trained and i not in assistant]
    turns += [Turn(_span(template, conversation, i, text), True) for i in others]
    return Rendered(text, turns, default=False)


def _span(template: ChatTemplate, conversation: Conversation, i: int, text: str) -> Span:
    """Where message `i` is in the `text` of the conversation; the assistant's without the generation prompt."""
    messages, role = conversation.messages, conversation.messages[i]["role"]
    prompted = role == "assistant"
    before = _render(template, conversation, i, prompted) if i or prompted else ""
    after = text if i + 1 == len(messages) else _render(template, conversation, i + 1)
    if not (text.startswith(before) and text.startswith(after) and len(before) <= len(after)):
        raise BrokenSample(
            f"{template.name} writes the conversation up to message {i + 1} ({role}) differently where it goes on, so "
            "that it cannot be told what of the text is that message; choose a --dataloader.chat_template that has "
            "{% generation %} marks, or --dataloader.train_on last_assistant, which needs one turn's beginning only"
        )
    return len(before), len(after)


def _render(template: ChatTemplate, conversation: Conversation, n: int, add_generation_prompt: bool = False) -> str:
    """The text of the first `n` messages."""
    return template.render(
        conversation.messages[:n], tools=conversation.tools, add_generation_prompt=add_generation_prompt
    )
