"""The texts that a conversation is trained on, with the trained parts of each."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from torchtitan.components.data.finetuning.attempts import Turn
from torchtitan.components.data.finetuning.conversation import Conversation
from torchtitan.components.data.finetuning.encoded import Facts
from torchtitan.components.data.finetuning.losses import parts_of
from torchtitan.components.data.finetuning.turns import TurnFinder

TrainOn = Literal["all", "assistant", "last_assistant"]
"""All tokens, the assistant's turns, or only the last of them. A row's own settings take
precedence."""


class Plan(NamedTuple):
    """Text of a sample."""

    text: str
    turns: list[Turn]
    """Trained turns, from the last to the first; the text of each is a prefix of the text."""
    spans: list[tuple[int, int, bool]] = []
    """Other spans, in characters, with whether they are trained."""
    facts: Facts = Facts()
    """Counts of what a model learns from a text without turns."""


def plans_of(
    finder: TurnFinder, conversation: Conversation, train_on: TrainOn, thinks: bool | None
) -> list[Plan]:
    messages = conversation.messages
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    default: Sequence[int] = answers if train_on == "assistant" else answers[-1:]
    if train_on == "all":
        default = range(len(messages))
    wanted = [n in default if flag is None else flag for n, flag in enumerate(conversation.trained)]
    if train_on == "all":
        return [_whole(finder, conversation, wanted)]
    trained = [number for number in answers if wanted[number]]
    others = [
        number for number, is_wanted in enumerate(wanted) if is_wanted and number not in answers
    ]
    turns = finder.turns(conversation, trained, thinks)
    plans: list[Plan] = []
    for turn in reversed(turns):
        joined = next((plan for plan in plans if _begins_with(plan, turn)), None)
        if joined:
            joined.turns.append(turn)
        else:
            plans.insert(0, Plan(turn.text + turn.rest, [turn]))
    if others or not turns:
        return _with_others(finder, conversation, plans, others)
    return plans


def _begins_with(plan: Plan, turn: Turn) -> bool:
    return plan.turns[0].form.options == turn.form.options and plan.text.startswith(turn.text)


def _whole(finder: TurnFinder, conversation: Conversation, wanted: Sequence[bool]) -> Plan:
    """Return the whole text, trained except messages that are not wanted. Raise `LossySample` if
    the text lacks a part of the assistant's messages that must be trained."""
    whole = finder.whole(conversation)
    roles = [message["role"] for message in conversation.messages]
    answers = [
        number for number, role in enumerate(roles) if role == "assistant" and wanted[number]
    ]
    lost = whole.losses(answers)
    untrained = [
        (*whole.span(n, whole.text), False) for n, is_wanted in enumerate(wanted) if not is_wanted
    ]
    facts = Facts(
        n_turns=len(answers),
        n_stops=whole.count_stops(answers),
        n_only_stops=sum(not parts_of(conversation.messages[number]) for number in answers),
        lost=tuple(dict.fromkeys(lost)),
    )
    return Plan(whole.text, [], [(0, len(whole.text), True), *untrained], facts)


def _with_others(
    finder: TurnFinder, conversation: Conversation, plans: list[Plan], others: Sequence[int]
) -> list[Plan]:
    """Add the text of messages of other roles to the last plan."""
    last = plans.pop() if plans else Plan("", [])
    text = last.text
    whole = finder.whole(conversation)
    if whole.text.startswith(text):
        text = whole.text
    found = [whole.span(number, text) for number in others]
    # The whitespace after the token that ends a message belongs to no message.
    spans = [(start, start + len(text[start:end].rstrip()), True) for start, end in found]
    return [*plans, Plan(text, last.turns, spans)]


def marked_spans(turn: Turn) -> list[tuple[int, int]]:
    """Return the marked spans of a turn, and its stop."""
    end = len(turn.text)
    begin = len(turn.prompt)
    inside = [
        (max(first, begin), min(last, end))
        for first, last in turn.marks or ()
        if first < end and last >= begin
    ]
    is_marked = any(last >= end for _, last in inside) or not inside
    return inside if is_marked else [*inside, (end - len(turn.stop), end)]
