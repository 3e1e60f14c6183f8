"""The assistant's turns of a conversation as inference sees them: the prompt, and what the model
must write."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from torchtitan.components.chat_template import BUILT_IN_TEMPLATES, ChatTemplate
from torchtitan.components.chat_template.forms import REASONING, Form, Forms
from torchtitan.components.chat_template.stops import Stops
from torchtitan.components.data.finetuning.attempts import (
    Attempt,
    Turn,
    attempt_turn,
    closing_inside,
    n_missing,
    rest_after,
)
from torchtitan.components.data.finetuning.conversation import (
    BrokenSample,
    Conversation,
    LossySample,
    Message,
)
from torchtitan.components.data.finetuning.faults import trial_turn
from torchtitan.components.data.finetuning.losses import Part, lost_parts
from torchtitan.components.data.finetuning.markers import MARK
from torchtitan.components.data.finetuning.renderings import Renderings, TriedTemplate
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.tools.logging import logger

_KEPT_FORMS = 4
"""Forms that are remembered for turns with equal traits."""


class UnpromptedTurn(BrokenSample):
    """Message of the assistant that begins a conversation or follows another one of it, and that no
    generation prompt begins."""


class _Verdict(NamedTuple):
    """Forms for turns with equal traits."""

    forms: list[Form]
    """Forms that lose nothing, else the one that loses the least."""
    is_complete: bool
    """True if the forms lose nothing."""
    problem: str
    """Reason why a kind of turns has no form."""


class _Rank(NamedTuple):
    """Order of the forms that lose nothing of a turn."""

    is_unseen: bool
    """True if the prompt lacks the system message or the tools."""
    kind: int
    """Place of the form's way and options in the order of trials."""
    n_missing: int
    """Parts of earlier turns that the prompt lacks, although another form may write them."""


class TurnFinder:
    """Finds the assistant's turns of conversations.

    Turn i is rendered twice: the messages before it with the generation prompt, P, and the messages
    up to it, F. If F begins with P, the rest of F is what the model must write, up to the stop.
    Otherwise, and if the rest lacks a part of the message, other forms are tried (see `Forms`). The
    forms that suit a kind of turns are found once, with marker texts instead of the turn's texts;
    each turn is then checked with these forms.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, accepted: Sequence[Part] = ()):
        self._template, self._accepted = template, frozenset(accepted)
        self.forms, self.stops = Forms(template), Stops(template, tokenizer)
        self._tried = TriedTemplate(template, self.forms, self.stops, {})
        self._known: dict[object, _Verdict] = {}
        self._told: set[str] = set()

    def turns(
        self, conversation: Conversation, numbers: Sequence[int], thinks: bool | None = None
    ) -> list[Turn]:
        """Return the assistant's messages with these numbers as turns. `thinks` says whether the
        conversation has reasoning; None: as its messages have it. Raise `LossySample` if a turn
        lacks a part of its message that must be trained, `BrokenSample` if the template rejects the
        conversation or a turn does not begin with the generation prompt.

        Skip messages without a prompt, unless the row asks for them to be trained or no other turn
        is."""
        row = Renderings(self._tried, conversation, thinks)
        turns: list[Turn] = []
        unprompted: list[UnpromptedTurn] = []
        for number in numbers:
            try:
                turns.append(self._turn(row, number))
            except UnpromptedTurn as error:
                if conversation.trained[number]:
                    raise
                unprompted.append(error)
        if unprompted and not turns:
            raise unprompted[0]
        if turns:
            turns[-1] = turns[-1]._replace(
                rest=rest_after(row, turns[-1]), unprompted=tuple(map(str, unprompted))
            )
        return turns

    def has_reasoning(self, messages: Sequence[Message]) -> bool:
        """Return whether any turn of the assistant has reasoning, also between tags."""
        return Renderings(self._tried, Conversation(list(messages))).thinks

    def whole(self, conversation: Conversation) -> "WholeConversation":
        """Return the text of a whole conversation. Raise `BrokenSample` if the template rejects
        it."""
        row = Renderings(self._tried, conversation)
        return WholeConversation(self, row, self._form_of(row))

    def _form_of(self, row: Renderings) -> Form:
        """Return the form of a conversation for a caller that needs its text, not a turn."""
        answers = [
            number for number, message in enumerate(row.messages) if message["role"] == "assistant"
        ]
        plain = Form(tuple(row.options.items()))
        forms = self._suitable(row, answers[-1]).forms if answers else []
        return forms[0] if forms else plain

    def prompt(self, conversation: Conversation) -> str:
        """Return a conversation with the generation prompt, as inference sees it: with the options
        of the row alone. Raise `BrokenSample` if the template rejects it."""
        number = len(conversation.messages)
        answer = {"role": "assistant", "content": MARK}
        answered = Conversation(
            [*conversation.messages, answer], conversation.tools, options=conversation.options
        )
        row = Renderings(self._tried, answered, thinks=True)
        found = self._suitable(row, number).forms
        form = replace(found[0] if found else Form(), options=tuple(sorted(row.options.items())))
        return row.text(number, form, prompted=True)

    def _turn(self, row: Renderings, number: int) -> Turn:
        verdict = self._suitable(row, number)
        if verdict.problem and (number == 0 or row.messages[number - 1]["role"] == "assistant"):
            raise UnpromptedTurn(verdict.problem)
        if verdict.problem:
            raise BrokenSample(verdict.problem)
        best, problem = self._best(row, number, verdict.forms)
        if verdict.is_complete and (best is None or best.lost):
            other, other_problem = self._best(row, number, self._faultless(row, number))
            if best is None or other is not None and len(other.lost) < len(best.lost):
                best, problem = other, problem or other_problem
        if best is None:
            raise BrokenSample(problem)
        self.refuse_loss(best.lost, number)
        if closing := closing_inside(row, number, best.completion):
            raise LossySample(
                f"the reasoning of message {number + 1} (assistant) contains {closing!r}, with "
                f"which {self._template.name} closes it: inference would end it there",
                "tag_in_reasoning",
            )
        self._tell(best)
        return best

    def _faultless(self, row: Renderings, number: int) -> Iterator[Form]:
        """Yield the forms in which the turn with markers has no fault."""
        marked = row.with_markers(number)
        for form in self.forms.candidates(row.traits(number)):
            if trial_turn(marked, number, form).turn:
                yield form

    def refuse_loss(self, lost: Sequence[Part], number: int) -> None:
        """Raise `LossySample` if message `number` loses a part that must be trained."""
        if refused := [part for part in lost if part not in self._accepted]:
            raise LossySample(
                f"{self._template.name} leaves out the {refused[0]} of message {number + 1} "
                "(assistant)",
                f"on_loss_of_{refused[0]}",
            )

    def _best(self, row: Renderings, number: int, forms: Iterable[Form]) -> tuple[Turn | None, str]:
        """Return the first turn without losses, else the one with the fewest, and the problem of
        the form that gets furthest."""
        best, furthest = None, Attempt(None)
        for form in forms:
            attempt = attempt_turn(row, number, form)
            turn = attempt.turn
            if turn is None:
                furthest = _further(furthest, attempt)
            elif not turn.lost:
                return turn, ""
            elif best is None or len(turn.lost) < len(best.lost):
                best = turn
        return best, furthest.problem

    def _suitable(self, row: Renderings, number: int) -> _Verdict:
        """Return the forms for a turn, found with markers instead of its texts."""
        traits = row.traits(number)
        message, before = row.messages[number], row.messages[number - 1]["role"] if number else ""
        own = (
            bool(message.get(REASONING)),
            bool(message.get("content")),
            len(message.get("tool_calls") or ()),
            row.has_calls(number),
        )
        key = traits.key, own, before, bool(row.tools), row.has_system
        if key in self._known:
            return self._known[key]
        marked = row.with_markers(number)
        complete: list[tuple[_Rank, Form]] = []
        lossy: list[tuple[int, Form]] = []
        kinds: dict[tuple[object, ...], int] = {}
        n_full = 0
        furthest = Attempt(None)
        for form in self.forms.candidates(traits):
            kind = kinds.setdefault((form.way, form.options), len(kinds))
            attempt = trial_turn(marked, number, form)
            turn = attempt.turn
            if turn is None:
                furthest = _further(furthest, attempt)
                continue
            if turn.lost:
                lossy.append((len(turn.lost), form))
            else:
                rank = _Rank(bool(turn.unseen), kind, n_missing(marked, number, turn.prompt))
                complete.append((rank, form))
                n_full += not turn.unseen and not rank.n_missing
                if n_full >= _KEPT_FORMS:
                    break
        found = [form for _, form in sorted(complete, key=lambda pair: pair[0])][:_KEPT_FORMS]
        if not found:
            found = [form for _, form in sorted(lossy, key=lambda pair: pair[0])][:1]
        verdict = _Verdict(found, bool(complete), "" if found else furthest.problem)
        if found:
            self._known[key] = verdict
        return verdict

    def _tell(self, turn: Turn) -> None:
        form = turn.form
        if (
            form.way in ("joined", "followed")
            and form.tags
            and form.tags.close
            and form.tags.close in turn.completion
        ):
            self._warn_once(
                f"{self._template.name} does not continue its generation prompt in some finished "
                "turns: they are trained after it, with "
                f"{form.tags.inner + form.tags.close + form.tags.after!r} after the reasoning "
                "(also in turns without reasoning); this whitespace is a guess, since no rendering "
                "of the template shows it"
            )
        for what in turn.unseen:
            self._warn_once(f"{self._template.name} does not write the {what} of the prompt")

    def _warn_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            logger.warning(text)


class WholeConversation:
    """The text of a whole conversation, for callers that need it and its turns. Raises
    `BrokenSample` if the template rejects it.

    Args:
        finder: finder of the turns of conversations with the template.
        row: the conversation.
        form: form in which it is rendered.
    """

    def __init__(self, finder: TurnFinder, row: Renderings, form: Form):
        self._finder = finder
        self._row, self._form = row, form
        self.text = row.text(len(row.messages), form)

    def span(self, number: int, text: str) -> tuple[int, int]:
        """Return the span of message `number` in a text of the conversation, an assistant's without
        the generation prompt. Raise `BrokenSample` if the text does not contain the message as the
        last one of its conversation."""
        row, form = self._row, self._form
        before = row.text(number, form) if number else ""
        after = row.text(number + 1, form)
        role = row.messages[number]["role"]
        if role == "assistant":
            prompt = row.text(number, form, prompted=True)
            before = prompt if after.startswith(prompt) else before
        if text.startswith(after) and after.startswith(before):
            return len(before), len(after)
        raise BrokenSample(
            f"{row.template.name} writes the conversation up to message {number + 1} ({role}) "
            "differently if more messages follow, so the message cannot be located in the text; "
            "remove its weight, or set another --dataloader.chat_template "
            f"({', '.join(BUILT_IN_TEMPLATES)})"
        )

    def losses(self, numbers: Sequence[int]) -> list[Part]:
        """Return the parts of the assistant's messages with these numbers that the text lacks.
        Raise `LossySample` if one of them must be trained."""
        found: list[Part] = []
        for number in numbers:
            lost = list(lost_parts(self._row.messages[number], self.text))
            self._finder.refuse_loss(lost, number)
            found += lost
        return found

    def count_stops(self, numbers: Sequence[int]) -> int:
        """Return after how many of the assistant's messages with these numbers their stop follows,
        before the next message; 0 if the template rejects the markers that show where messages
        end."""
        row, options = self._row, dict(self._form.options)
        try:
            texts = row.texts_after(self._form)
        except BrokenSample:
            return 0
        stops = [self._finder.stops.of(row.kind(number), options) for number in numbers]
        pairs = zip(numbers, stops, strict=True)
        return sum(1 for number, stop in pairs if stop and stop.text and stop.text in texts[number])


def _further(first: Attempt, second: Attempt) -> Attempt:
    """Return the failed attempt that gets further, the first of equals."""
    return second if not first.problem or second.n_passed > first.n_passed else first
