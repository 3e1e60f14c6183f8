"""The text of a turn after its generation prompt, in each of the ways of `forms.Form`."""

from collections.abc import Sequence
from dataclasses import replace

from torchtitan.components.chat_template.forms import BLOCK, REASONING, Form, closed_block, prepared
from torchtitan.components.chat_template.stops import FOLLOWING, n_common
from torchtitan.components.data.finetuning.conversation import Message
from torchtitan.components.data.finetuning.markers import MARK
from torchtitan.components.data.finetuning.renderings import Renderings

Marks = tuple[tuple[int, int], ...] | None
"""Spans that the template marks by `{% generation %}`, in characters of prompt and completion;
None: no marks."""


class Completion:
    """Message `number`, the assistant's, in a form."""

    def __init__(self, row: Renderings, number: int, form: Form):
        self._row, self._number = row, number
        self._form = form
        self._message = row.messages[number]
        self._reasoning: str = self._message.get(REASONING) or ""

    def after(self, prompt: str) -> tuple[str | None, Marks]:
        """Return the text after the generation prompt, or None, and the marked spans."""
        way = self._form.way
        if way == "followed":
            followed = self._followed()
            return self._joined(prompt, followed) if followed else None, None
        finished, spans = self._row.rendered(self._number + 1, self._form, False)
        if way == "joined":
            return self._joined(prompt, finished), None
        if way == "tail":
            return self._tail(prompt, finished, spans)
        if not finished.startswith(prompt):
            return None, None
        if not self._row.template.marks_generation:
            return finished[len(prompt) :], None
        return finished[len(prompt) :], tuple(span for span in spans if span[1] >= len(prompt))

    def _tail(
        self, prompt: str, finished: str, spans: Sequence[tuple[int, int]]
    ) -> tuple[str | None, Marks]:
        """Return the text after the generation prompt at the place where the template writes any
        answer."""
        row, options = self._row, self._form.options
        generated = row.forms.prompt(options)
        header = self._header()
        # without a prompt of its own, the turn follows the previous message
        if self._number and not generated.strip():
            previous = str(row.messages[self._number - 1].get("content") or "").strip()
            generated = prompt[prompt.rfind(previous) :] if previous in prompt else ""
        is_usable = generated.strip() and prompt.endswith(generated)
        if not is_usable or header is None or generated not in header:
            return None, None
        end = header.rfind(generated) + len(generated)
        if not finished.startswith(header[:end]):
            return None, None
        trailer = row.stops.trailer(dict(options), has_tools=bool(row.tools))
        finished = finished.removesuffix(trailer)
        shift = len(prompt) - end
        marks = tuple((first + shift, last + shift) for first, last in spans if last >= end)
        return finished[end:], marks if row.template.marks_generation else None

    def _joined(self, prompt: str, finished: str) -> str | None:
        """Return the reasoning, its closing tag and the answer as the template renders it without
        reasoning."""
        tags, reasoning = self._form.tags, self._reasoning
        assert tags
        header = self._shared_header(prompt)
        before = self._row.render(self._number, self._form, prompted=False)
        if not finished.startswith(header) or not header.startswith(before):
            return None
        answer, extra = finished[len(header) :], prompt[len(header) :]
        if self._row.forms.opened_by(prompt):
            if answer.lstrip().startswith(tags.close):  # of an empty block
                answer = answer.partition(tags.close)[2].lstrip("\n")
            begin = "" if prompt != prompt.rstrip() or not reasoning else tags.inner
            return begin + tags.rest(reasoning) + answer
        if closed_block(prompt) or extra:  # such as an empty block in another notation
            return None if reasoning else answer
        if not reasoning or not tags.close:
            return None
        if block := BLOCK.match(answer):
            inner = "\n" if "\n" in block["inner"] else ""
            written = f"{block['open']}{inner}{reasoning}{inner}{block['close']}"
            return written + answer[block.end("close") :]
        return tags.block(reasoning) + answer

    def _followed(self) -> str | None:
        """Return the text of the conversation up to the message, up to its stop, if another message
        follows."""
        row = self._row
        stop = row.stops.of(row.kind(self._number), dict(self._form.options))
        if stop is None or stop.lead is not None or not stop.text:
            return None
        text = self._replaced(self._message).partition(FOLLOWING)[0]
        head, found, _ = text.rpartition(stop.text)
        return head + found if found else None

    def _replaced(self, message: Message) -> str:
        """Return the text of the conversation up to the message, which another one replaces. The
        way `followed` adds a message after it."""
        row, form = self._row, self._form
        _, before = row.in_form(self._number, form, True)
        messages = prepared([message], replace(form, reasoning="none"))
        if form.way == "followed":
            messages += _following(message)
        return row.plain([*before, *row.inputs(messages, form)[1]], form)

    def _header(self) -> str | None:
        """Return the text before the content of the message."""
        # Some templates write no content next to calls.
        for marked in ({**self._message, "content": MARK}, {"role": "assistant", "content": MARK}):
            header, found, _ = self._replaced(marked).rpartition(MARK)
            if found:
                return header
        return None

    def _shared_header(self, prompt: str) -> str:
        """Return the start that the prompt and the text before the content share, which ends before
        markup that differs."""
        message = self._message
        if message.get("content") or not message.get("tool_calls"):
            message = {**message, "content": MARK}
        text = self._replaced(message)
        n = n_common(text, prompt)
        opened = max(text.rfind("<", 0, n), text.rfind("[", 0, n))
        is_cut = n < len(prompt) and opened >= 0 and not {">", "]"} & {*text[opened:n]}
        return text[: opened if is_cut else n]


def _following(message: Message) -> list[Message]:
    """Return the messages that follow a turn of the assistant: a result of each call, or a
    question."""
    results = [
        {
            "role": "tool",
            "name": call["function"]["name"],
            "tool_call_id": call.get("id"),
            "content": FOLLOWING,
        }
        for call in message.get("tool_calls") or []
    ]
    return results or [{"role": "user", "content": FOLLOWING}]
