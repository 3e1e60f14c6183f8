"""Location of the trained turns in a rendered conversation, by marks of the template or by comparing prefixes."""

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
    f"set another --dataloader.chat_template ({', '.join(BUILT_IN_TEMPLATES)}), or a file with "
    "{% generation %} around each turn of the assistant"
)


class Turn(NamedTuple):
    """A message in the rendered text."""

    span: Span
    trained: bool
    marked: bool = False
    """True if the template marks the turn; marks may exclude its end token."""


class Rendered(NamedTuple):
    """Text of a conversation, with its turns."""

    text: str
    turns: list[Turn]
    """All marked turns if the template has marks, otherwise the turns that differ from `default`."""
    default: bool
    """True if text outside of the turns is trained."""
    unprompted: tuple[str, str] | None = None
    """Generation prompt, and header of a trained turn that does not begin with it; None if all do."""


def render_with_mask(template: ChatTemplate, conversation: Conversation, train_on: TrainOn) -> Rendered:
    """Render a conversation and find its trained turns.

    An assistant's turn is the text that the template marks by `{% generation %}`. Without marks, the turn is the text
    between two prefixes: the conversation before the turn with the generation prompt, and the conversation including
    the turn. If finished turns do not begin with the generation prompt (DeepSeek-R1's distills write `<think>` only in
    the prompt), the turn begins after the header that the template writes before any answer. Turns of other roles, if
    the row selects them, are always found by prefixes. Raise `BrokenSample` if the template rejects the conversation, a
    turn cannot be located, or a turn without the generation prompt omits a part of its message."""
    should_train = _should_train(conversation, train_on)
    try:
        if train_on == "all":
            return _all_but(template, conversation, should_train)
        if template.marks_generation:
            return _by_marks(template, conversation, should_train)
        return _by_prefixes(template, conversation, should_train)
    except BrokenSample:
        raise
    except UserError as error:
        raise BrokenSample(str(error)) from error


def _should_train(conversation: Conversation, train_on: TrainOn) -> list[bool]:
    assistant = _assistant(conversation)
    default = {"all": range(len(conversation.messages)), "assistant": assistant, "last_assistant": assistant[-1:]}
    return [i in default[train_on] if flag is None else flag for i, flag in enumerate(conversation.trained)]


def _assistant(conversation: Conversation) -> list[int]:
    return [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]


def _all_but(template: ChatTemplate, conversation: Conversation, should_train: Sequence[bool]) -> Rendered:
    prefixes = _Prefixes(template, conversation)
    untrained = [Turn(prefixes.span(i), False) for i, trained in enumerate(should_train) if not trained]
    return Rendered(prefixes.text, untrained, default=True)


def _by_marks(template: ChatTemplate, conversation: Conversation, should_train: Sequence[bool]) -> Rendered:
    text, spans = template.render_marked(conversation.messages, tools=conversation.tools)
    assistant = _assistant(conversation)
    turns: list[Turn] = []
    # Where the flag changes between two turns, render the conversation up to there to assign marks to turns.
    for i, following in pairwise(assistant):
        if should_train[following] != should_train[i]:
            n = _n_marks(template, conversation, i, text, spans)
            turns += [Turn(span, should_train[i], marked=True) for span in spans[len(turns) : n]]
    trained = bool(assistant) and should_train[assistant[-1]]
    turns += [Turn(span, trained, marked=True) for span in spans[len(turns) :]]
    others = [i for i, trained in enumerate(should_train) if trained and i not in assistant]
    if others:
        prefixes = _Prefixes(template, conversation)
        turns += [Turn(prefixes.span(i), True) for i in others]
    return Rendered(text, turns, default=False)


def _by_prefixes(template: ChatTemplate, conversation: Conversation, should_train: Sequence[bool]) -> Rendered:
    prefixes = _Prefixes(template, conversation)
    trained = [i for i, trained in enumerate(should_train) if trained]
    turns = [Turn(prefixes.span(i), True) for i in trained]
    unprompted = [prefixes.unprompted(i, turn.span) for i, turn in zip(trained, turns, strict=True)]
    return Rendered(prefixes.text, turns, default=False, unprompted=next(filter(None, unprompted), None))


def _n_marks(template: ChatTemplate, conversation: Conversation, i: int, text: str, spans: Sequence[Span]) -> int:
    """Return the number of marked spans up to the assistant's message `i`, found by rendering only these messages. A
    template may omit parts of earlier turns, such as reasoning: each span must then be part of its counterpart, except
    whitespace, and begin no later."""
    prefix, prefix_spans = template.render_marked(conversation.messages[: i + 1], tools=conversation.tools)
    is_consistent = len(prefix_spans) <= len(spans) and all(
        start <= old_start and text[start:end].strip() in prefix[old_start:old_end]
        for (start, end), (old_start, old_end) in zip(spans, prefix_spans, strict=False)
    )
    if not is_consistent:
        raise BrokenSample(
            f"{template.name} marks the turns up to message {i + 1} (assistant) differently in the whole conversation, "
            f"so the marks cannot be assigned to turns; {_ADVICE}"
            # The option has no effect if the row or the loader selects the turns.
            + ("" if any(flag is not None for flag in conversation.trained) else ", or --dataloader.train_on assistant")
        )
    return len(prefix_spans)


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
        """Return the span of message `i` in the text, excluding the header that an assistant's turn shares with the
        generation prompt. Raise `BrokenSample` if rendered prefixes of the conversation are not prefixes of the text,
        or an assistant's turn begins neither with the generation prompt nor with the header of other answers."""
        before, after = self._before(i), self._render(i + 1, False)
        if before is not None and self.text.startswith(after) and after.startswith(before):
            return len(before), len(after)
        raise BrokenSample(f"{self._template.name} {self._reason(i)}")

    def unprompted(self, i: int, span: Span) -> tuple[str, str] | None:
        """Return the generation prompt and the header of message `i` if it is an assistant's turn without that prompt.
        Raise `BrokenSample` if the turn also omits a part of its message, such as reasoning."""
        message, (start, end) = self._conversation.messages[i], span
        if message["role"] != "assistant" or self.text.startswith(self._render(i, True)):
            return None
        before = self._render(i, False)
        prompt, header = self._render(i, True).removeprefix(before), self.text[:start].removeprefix(before)
        texts = [message.get(key) for key in ("content", "reasoning_content", "thinking", "reasoning")]
        if any(isinstance(text, str) and text.strip() not in self.text[start:end] for text in texts):
            raise BrokenSample(
                f"{self._template.name} omits a part of message {i + 1} (assistant), such as its reasoning, although "
                f"its generation prompt is {prompt!r}: the model would learn to answer without it; set "
                "--dataloader.chat_template to a copy of the template that keeps it, or remove it from the data"
            )
        return prompt, header

    def _before(self, i: int) -> str | None:
        """Return the text before message `i`, including an assistant's header; None if it cannot be determined."""
        if self._conversation.messages[i]["role"] != "assistant":
            return self._render(i, False) if i else ""
        prompted, after = self._render(i, True), self._render(i + 1, False)
        if after.startswith(prompted):
            return prompted
        # Finished turns do not begin with this prompt: the header is the text before any answer.
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
                f"{self._render(i, True).removeprefix(before)!r}, nor like other answers, so the model's part of the "
                f"text cannot be located; {_ADVICE}"
            )
        # The option has no effect on the last turn, or if the row or the loader selects the turns.
        has_option = (
            role == "assistant" and self._conversation.trained[i] is None and i != _assistant(self._conversation)[-1]
        )
        return (
            f"writes the conversation up to message {i + 1} ({role}) differently if more messages follow, so the "
            f"message cannot be located in the text; {_ADVICE}"
            + (", or --dataloader.train_on last_assistant" if has_option else "")
        )
