"""Trained characters of a rendered conversation, found by the template's own marks or by comparing prefixes."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from torchtitan.components.chat_template import BUILT_IN_TEMPLATES, ChatTemplate, Span
from torchtitan.components.data.finetuning.conversation import BrokenSample, Conversation
from torchtitan.tools.errors import UserError

TrainOn = Literal["all", "assistant", "last_assistant"]
"""All tokens, the assistant's turns, or only the last of them. A row's own settings take precedence."""

_PROBE = "an answer that no template writes by itself"

_ADVICE = (
    f"choose another --dataloader.chat_template: {', '.join(BUILT_IN_TEMPLATES)}, or a file that has "
    "{% generation %} around each turn of the assistant"
)


class Turn(NamedTuple):
    """A message in the rendered text."""

    span: Span
    trained: bool
    marked: bool = False
    """Whether the template marks it; marks may leave out the token that ends a turn."""


class Rendered(NamedTuple):
    """Text of a conversation, with its trained parts."""

    text: str
    turns: list[Turn]
    """All turns that the template marks; otherwise the turns that differ from `default`."""
    default: bool
    """Whether the text outside of the turns is trained on."""
    unprompted: tuple[str, str] | None = None
    """Generation prompt and header of a trained turn that does not begin with that prompt, if there is one."""


def render_with_mask(template: ChatTemplate, conversation: Conversation, train_on: TrainOn) -> Rendered:
    """Render a conversation and find its trained turns.

    An assistant's turn is the text that the template marks by `{% generation %}`. If it marks nothing, the turn begins
    where the preceding conversation, rendered with the generation prompt, ends, and ends where the conversation up to
    it ends. If no finished turn begins with that prompt, as in DeepSeek-R1's distills, which write `<think>` in the
    prompt only, the turn begins after the header that the template writes before any answer. All of these must be
    prefixes of the whole text. Other roles' turns, if a row asks for them, are always found by prefixes.

    Raises:
        BrokenSample: the template does not accept the conversation, a turn cannot be located, or a turn that does not
            begin with the generation prompt also lacks a part of its message.
    """
    wanted = _wanted(conversation, train_on)
    try:
        if train_on == "all":
            return _all_but(template, conversation, wanted)
        if template.marks_generation:
            return _by_marks(template, conversation, wanted)
        return _by_prefixes(template, conversation, wanted)
    except BrokenSample:
        raise
    except UserError as error:
        raise BrokenSample(str(error)) from error


def _wanted(conversation: Conversation, train_on: TrainOn) -> list[bool]:
    assistant = _assistant(conversation)
    default = {"all": range(len(conversation.messages)), "assistant": assistant, "last_assistant": assistant[-1:]}
    return [i in default[train_on] if said is None else said for i, said in enumerate(conversation.trained)]


def _assistant(conversation: Conversation) -> list[int]:
    return [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]


def _all_but(template: ChatTemplate, conversation: Conversation, wanted: Sequence[bool]) -> Rendered:
    prefixes = _Prefixes(template, conversation)
    left_out = [Turn(prefixes.span(i), False) for i, trained in enumerate(wanted) if not trained]
    return Rendered(prefixes.text, left_out, default=True)


def _by_marks(template: ChatTemplate, conversation: Conversation, wanted: Sequence[bool]) -> Rendered:
    text, spans = template.render_marked(conversation.messages, tools=conversation.tools)
    assistant = _assistant(conversation)
    turns: list[Turn] = []
    # If the wanted flag changes between two turns, the conversation up to there tells which turn has which marks.
    for i, following in pairwise(assistant):
        if wanted[following] != wanted[i]:
            n = _n_marks(template, conversation, i, text, spans)
            turns += [Turn(span, wanted[i], marked=True) for span in spans[len(turns) : n]]
    trained = bool(assistant) and wanted[assistant[-1]]
    turns += [Turn(span, trained, marked=True) for span in spans[len(turns) :]]
    others = [i for i, is_wanted in enumerate(wanted) if is_wanted and i not in assistant]
    if others:
        prefixes = _Prefixes(template, conversation)
        turns += [Turn(prefixes.span(i), True) for i in others]
    return Rendered(text, turns, default=False)


def _by_prefixes(template: ChatTemplate, conversation: Conversation, wanted: Sequence[bool]) -> Rendered:
    prefixes = _Prefixes(template, conversation)
    trained = [i for i, is_wanted in enumerate(wanted) if is_wanted]
    turns = [Turn(prefixes.span(i), True) for i in trained]
    unprompted = [prefixes.unprompted(i, turn.span) for i, turn in zip(trained, turns, strict=True)]
    return Rendered(prefixes.text, turns, default=False, unprompted=next(filter(None, unprompted), None))


def _n_marks(template: ChatTemplate, conversation: Conversation, i: int, text: str, spans: Sequence[Span]) -> int:
    """Return the number of marked spans in the messages up to the assistant's message `i`, as marked if the
    conversation ends there. A template may write less of an earlier turn, such as no reasoning: then each span is part
    of the earlier one, except white space, and begins no later."""
    until, known = template.render_marked(conversation.messages[: i + 1], tools=conversation.tools)
    same = len(known) <= len(spans) and all(
        start <= old_start and text[start:end].strip() in until[old_start:old_end]
        for (start, end), (old_start, old_end) in zip(spans, known, strict=False)
    )
    if not same:
        raise BrokenSample(
            f"{template.name} marks other texts in the conversation up to message {i + 1} (assistant) where it goes "
            f"on, so that it cannot be told which of them is which turn; {_ADVICE}"
            # The option has no effect if a row or the loader itself decides what to train.
            + ("" if any(said is not None for said in conversation.trained) else ", or --dataloader.train_on assistant")
        )
    return len(known)


class _Prefixes:
    def __init__(self, template: ChatTemplate, conversation: Conversation):
        self._template, self._conversation = template, conversation
        self._rendered: dict[tuple[int, bool], str] = {}
        self.text = self._render(len(conversation.messages), False)

    def _render(self, n: int, prompted: bool) -> str:
        if (n, prompted) not in self._rendered:
            messages, tools = self._conversation.messages[:n], self._conversation.tools
            text = self._template.render(messages, tools=tools, add_generation_prompt=prompted)
            self._rendered[n, prompted] = text
        return self._rendered[n, prompted]

    def span(self, i: int) -> Span:
        """Return the span of message `i` in the text, for the assistant without the header shared with the generation
        prompt.

        Raises:
            BrokenSample: prefixes of the conversation are not prefixes of the text, or an assistant's turn begins
                neither with the generation prompt nor with the header of any answer.
        """
        before, after = self._before(i), self._render(i + 1, False)
        if before is not None and self.text.startswith(after) and after.startswith(before):
            return len(before), len(after)
        raise BrokenSample(f"{self._template.name} {self._reason(i)}")

    def unprompted(self, i: int, span: Span) -> tuple[str, str] | None:
        """Return the generation prompt and the header of message `i` if it is an assistant's turn that does not begin
        with that prompt. Raises `BrokenSample` if the turn also lacks a part of its message: training would miss the
        reasoning that the prompt asks for."""
        message, (start, end) = self._conversation.messages[i], span
        if message["role"] != "assistant" or self.text.startswith(self._render(i, True)):
            return None
        before = self._render(i, False)
        prompt, header = self._render(i, True).removeprefix(before), self.text[:start].removeprefix(before)
        texts = [message.get(key) for key in ("content", "reasoning_content", "thinking", "reasoning")]
        if any(isinstance(text, str) and text.strip() not in self.text[start:end] for text in texts):
            raise BrokenSample(
                f"{self._template.name} takes a part out of message {i + 1} (assistant), such as its reasoning, while "
                f"its generation prompt is {prompt!r}: the model would learn to answer without that part; give "
                "--dataloader.chat_template a copy of the template that keeps it, or remove it from the data"
            )
        return prompt, header

    def _before(self, i: int) -> str | None:
        """Return the text up to message `i`, including an assistant's header; None: it cannot be determined."""
        if self._conversation.messages[i]["role"] != "assistant":
            return self._render(i, False) if i else ""
        prompted, after = self._render(i, True), self._render(i + 1, False)
        if after.startswith(prompted):
            return prompted
        # No finished turn begins with this prompt: its header is the text before any answer.
        turns = [*self._conversation.messages[:i], {"role": "assistant", "content": _PROBE}]
        probed = self._template.render(turns, tools=self._conversation.tools, add_generation_prompt=False)
        header, found, _ = probed.rpartition(_PROBE)
        before = self._render(i, False)
        return header if found and header.startswith(before) and after.startswith(header) else None

    def _reason(self, i: int) -> str:
        role, before = self._conversation.messages[i]["role"], self._render(i, False) if i else ""
        after = self._render(i + 1, False)
        if self.text.startswith(after) and after.startswith(before):
            return (
                f"begins message {i + 1} ({role}) neither with its generation prompt, "
                f"{self._render(i, True).removeprefix(before)!r}, nor as it begins other answers, so that it cannot be "
                f"told what of the text is the model's; {_ADVICE}"
            )
        # The option has no effect at the last turn, or if the row or the loader itself decides what to train.
        by_option = (
            role == "assistant" and self._conversation.trained[i] is None and i != _assistant(self._conversation)[-1]
        )
        return (
            f"writes the conversation up to message {i + 1} ({role}) differently where it goes on, so that it cannot "
            f"be told what of the text is that message; {_ADVICE}"
            + (", or --dataloader.train_on last_assistant, which needs one turn's beginning only" if by_option else "")
        )
