"""The renderings of one conversation in each form, and the assistant's turns in them."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from torchtitan.components.chat_template import BUILT_IN_TEMPLATES, ChatTemplate
from torchtitan.components.chat_template.forms import (
    BLOCK,
    KEYS,
    REASONING,
    WRITTEN,
    Form,
    Forms,
    Tags,
    Traits,
    closed_block,
    prepared,
    split_reasoning,
)
from torchtitan.components.chat_template.stops import (
    FOLLOWING,
    QUESTION,
    Kind,
    Stop,
    Stops,
    n_common,
)
from torchtitan.components.data.finetuning.conversation import BrokenSample, Conversation, Message
from torchtitan.components.data.finetuning.losses import Part, is_written, lost_parts, parts_of
from torchtitan.components.data.finetuning.markers import (
    MARK,
    before_call,
    before_markers,
    marked_answer,
    numbered,
    numbered_marker,
)
from torchtitan.tools.errors import UserError

if TYPE_CHECKING:
    from torchtitan.components.chat_template.replay import Input

_ADVICE = (
    f"set another --dataloader.chat_template ({', '.join(BUILT_IN_TEMPLATES)}), or a copy of the "
    "template that continues its generation prompt"
)


_MOST_ENDS = 2000
"""Conversations whose ends of messages are remembered."""

_PARTS_AS_CODE = re.compile(r"""(["'])type\1: *\1thinking\1""")


class Turn(NamedTuple):
    """One turn of the assistant."""

    prompt: str
    """The conversation before the turn, with the generation prompt."""
    completion: str
    """Text that the model must write: the turn up to and including its stop."""
    stop: str
    """The stop at the end of the completion; empty for a turn without a stop."""
    form: Form
    lost: tuple[Part, ...]
    """Parts that the completion lacks."""
    unseen: tuple[str, ...]
    """Parts of the prompt that the template omits: "system message" or "tools"."""
    marks: tuple[tuple[int, int], ...] | None
    """Spans that the template marks by `{% generation %}`, in characters of prompt and completion;
    None: no marks."""
    is_only_a_stop: bool = False
    """True if the model learns nothing from the turn but to stop."""
    rest: str = ""
    """Text that the template writes after the turn in this conversation."""
    unprompted: tuple[str, ...] = ()
    """With the last trained turn: why others of the conversation have no prompt."""

    @property
    def text(self) -> str:
        return self.prompt + self.completion


class Attempt(NamedTuple):
    """Result of a form: a turn, or the reason why the form has no turn."""

    turn: Turn | None
    problem: str = ""
    n_passed: int = 0
    """Number of checks that the form passes: 0 if the template rejects it, 1 if its turn does not
    continue the generation prompt, 2 if the turn has a fault."""


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
        self._template, self._forms, self._stops, self._known_ends = tried
        self.messages = [self._split(message) for message in conversation.messages]
        answers = (message for message in self.messages if message["role"] == "assistant")
        self.thinks = any(answer.get(REASONING) for answer in answers) if thinks is None else thinks
        self.tools = conversation.tools
        self.options = {
            name: value
            for name, value in conversation.options.items()
            if self._template.reads(name)
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
        return split_reasoning(message, self._forms.tags)

    @property
    def template_name(self) -> str:
        return self._template.name

    def traits(self, number: int) -> Traits:
        """Return the traits of the assistant's message `number`."""
        if number in self._traits:
            return self._traits[number]
        answers = [
            message for message in self.messages[: number + 1] if message["role"] == "assistant"
        ]
        calling = [message for message in answers if message.get("tool_calls")]
        bare = {_kind_of(message) for message in calling if not message.get("content")}
        self._traits[number] = traits = Traits(
            reasoning=any(message.get(REASONING) for message in answers),
            written=any(WRITTEN in message for message in answers),
            thinks=self.thinks,
            n_calls=min(2, max((len(message["tool_calls"]) for message in calling), default=0)),
            bare=tuple(sorted(bare)),
            developer=any(other["role"] == "developer" for other in self.messages),
            options=self.options,
        )
        return traits

    def with_markers(self, number: int) -> "Renderings":
        """Return the conversation up to message `number`, with markers instead of its texts."""
        message = marked_answer(self.messages[number])
        before = [{**other} for other in self.messages[:number]]
        row = self._with_messages([*before, message])
        row.has_system = self.has_system
        return row

    def _with_messages(self, messages: list[Message]) -> "Renderings":
        """Return a conversation of these messages, not split, with the same tools and options."""
        row = Renderings(
            self._tried, Conversation([], self.tools, options=self.options), self.thinks
        )
        row.messages = messages
        return row

    def rest(self, turn: Turn) -> str:
        """Return the text that the template writes after a turn in the whole conversation; empty
        if the template rewrites the turn."""
        try:
            whole = self.render(len(self.messages), turn.form, prompted=False)
        except UserError:
            return ""
        return whole[len(turn.text) :] if whole.startswith(turn.text) else ""

    def text(self, n: int, form: Form, *, prompted: bool = False) -> str:
        """Return `render`. Raise `BrokenSample` if the template rejects the messages."""
        try:
            return self.render(n, form, prompted=prompted)
        except UserError as error:
            raise BrokenSample(str(error)) from error

    def render(self, n: int, form: Form, *, prompted: bool) -> str:
        """Return the text of the first `n` messages."""
        return self._render(n, form, prompted)[0]

    def _render(self, n: int, form: Form, prompted: bool) -> tuple[str, list[tuple[int, int]]]:
        key = n, prompted, form
        result = self._rendered.get(key)
        if result is None:
            messages, inputs = self._in_form(n, form, prompted)
            if self._template.marks_generation and not prompted:
                result = self._template.render_marked(
                    messages,
                    tools=self.tools,
                    null_content=_has_nulls(form),
                    **dict(form.options),
                )
            else:
                result = self._plain(inputs, form, prompted=prompted), []
            self._rendered[key] = result
        return result

    def _plain(self, inputs: "Sequence[Input]", form: Form, *, prompted: bool = False) -> str:
        """Return the text of messages that are already in the form."""
        return self._template.render_inputs(
            inputs, tools=self.tools, add_generation_prompt=prompted, **dict(form.options)
        )

    def _in_form(self, n: int, form: Form, prompted: bool) -> "tuple[list[Message], list[Input]]":
        """Return the first `n` messages, and the inputs of the template for them. Reasoning between
        tags concerns the last one only: earlier turns have what the template keeps of them."""
        is_usual = form.reasoning in (*KEYS, "parts")
        usual = form if is_usual else replace(form, reasoning=REASONING, tags=None)
        known = self._prepared.get(usual)
        if known is None:
            known = self._prepared[usual] = self._inputs(prepared(self.messages, usual), usual)
        messages, inputs = known[0][:n], known[1][:n]
        if is_usual or prompted or not n:
            return messages, inputs
        last, its_input = self._inputs(prepared(self.messages[n - 1 : n], form), form)
        return [*messages[:-1], *last], [*inputs[:-1], *its_input]

    def _inputs(self, messages: list[Message], form: Form) -> "tuple[list[Message], list[Input]]":
        """Return messages in a form, and the inputs of the template for them."""
        return messages, self._template.inputs(messages, null_content=_has_nulls(form))

    def attempt(self, number: int, form: Form, *, is_trial: bool = False) -> Attempt:
        """Return the turn in a form, or why the form is unsuitable."""
        try:
            prompt = self.render(number, form, prompted=True)
            completion, marks = self._completion(number, form, prompt)
            if completion is None:
                whole = self.render(number + 1, form, prompted=False)
                n_passed = 0 if whole.startswith(prompt) else 1
                return Attempt(None, self._mismatch(number, form, prompt), n_passed)
        except UserError as error:
            return Attempt(None, _without_prompt(error) if number == 0 else str(error))
        message, kind = self.messages[number], self.kind(number)
        stop = self._stops.of(kind, dict(form.options))
        if kind == "call" and stop and stop.lead is not None:
            # Some templates end several calls like answers, but not a single one.
            usual = self._stops.of("answer", dict(form.options))
            ends_alike = (
                usual
                and usual.lead is None
                and usual.text
                and completion.rstrip().endswith(usual.text)
            )
            stop = usual if ends_alike else stop
        finished = stop.cut(completion) if stop else None
        if finished is None:
            stop, finished = None, completion.rstrip()
        end = stop.text if stop else ""
        if is_trial:
            if fault := self._fault(number, prompt, finished.removesuffix(end), stop, form):
                return Attempt(None, f"{self._writes(number, form)} with {fault}; {_ADVICE}", 2)
        lost = tuple(lost_parts(message, finished))
        unseen = tuple(self._unseen(number, prompt))
        is_only_a_stop = not {*parts_of(message)} - {*lost}
        return Attempt(Turn(prompt, finished, end, form, lost, unseen, marks, is_only_a_stop))

    def texts_after(self, form: Form) -> list[str]:
        """Return the text that the template writes between each message and the next one, for
        messages with markers instead of their texts."""
        marked = self._with_messages(
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

    def _writes(self, number: int, form: Form) -> str:
        """Return the beginning of a sentence about message `number` in a form."""
        tried = f", given with {form.words}," if form.words else ""
        return f"{self._template.name} writes message {number + 1} (assistant){tried}"

    def closing_inside(self, number: int, completion: str) -> str:
        """Return the tag inside the reasoning of message `number` that also closes it in its turn;
        empty for reasoning without such a tag."""
        reasoning = self.messages[number].get(REASONING) or ""
        closings = (tags.close for tags in self._forms.tags if tags.close in reasoning)
        return next((closing for closing in closings if completion.count(closing) > 1), "")

    def _completion(
        self, number: int, form: Form, prompt: str
    ) -> tuple[str | None, tuple[tuple[int, int], ...] | None]:
        """Return the text of the turn after the generation prompt, or None, and the marked
        spans."""
        if form.way == "followed":
            followed = self._followed(number, form)
            return self._joined(number, form, prompt, followed) if followed else None, None
        finished, spans = self._render(number + 1, form, False)
        if form.way == "joined":
            return self._joined(number, form, prompt, finished), None
        if form.way == "tail":
            return self._tail(number, form, prompt, finished, spans)
        if not finished.startswith(prompt):
            return None, None
        if not self._template.marks_generation:
            return finished[len(prompt) :], None
        return finished[len(prompt) :], tuple(span for span in spans if span[1] >= len(prompt))

    def _tail(
        self, number: int, form: Form, prompt: str, finished: str, spans: Sequence[tuple[int, int]]
    ) -> tuple[str | None, tuple[tuple[int, int], ...] | None]:
        """Return the text after the generation prompt at the place where the template writes any
        answer."""
        generated = self._forms.prompt(form.options)
        header = self._header(number, form)
        # without a prompt of its own, the turn follows the previous message
        if number and not generated.strip():
            previous = str(self.messages[number - 1].get("content") or "").strip()
            generated = prompt[prompt.rfind(previous) :] if previous in prompt else ""
        is_usable = generated.strip() and prompt.endswith(generated)
        if not is_usable or header is None or generated not in header:
            return None, None
        end = header.rfind(generated) + len(generated)
        if not finished.startswith(header[:end]):
            return None, None
        trailer = self._stops.trailer(dict(form.options), has_tools=bool(self.tools))
        finished = finished.removesuffix(trailer)
        shift = len(prompt) - end
        marks = tuple((first + shift, last + shift) for first, last in spans if last >= end)
        return finished[end:], marks if self._template.marks_generation else None

    def _joined(self, number: int, form: Form, prompt: str, finished: str) -> str | None:
        """Return the reasoning, its closing tag and the answer as the template renders it without
        reasoning."""
        assert form.tags
        header = self._header(number, form, prompt)
        before = self.render(number, form, prompted=False)
        if header is None or not finished.startswith(header) or not header.startswith(before):
            return None
        answer, extra = finished[len(header) :], prompt[len(header) :]
        reasoning = self.messages[number].get(REASONING) or ""
        if self._forms.opened_by(prompt):
            if answer.lstrip().startswith(form.tags.close):  # of an empty block
                answer = answer.partition(form.tags.close)[2].lstrip("\n")
            begin = "" if prompt != prompt.rstrip() or not reasoning else form.tags.inner
            return begin + form.tags.rest(reasoning) + answer
        if closed_block(prompt) or extra:  # such as an empty block in another notation
            return None if reasoning else answer
        if not reasoning or not form.tags.close:
            return None
        if block := BLOCK.match(answer):
            inner = "\n" if "\n" in block["inner"] else ""
            written = f"{block['open']}{inner}{reasoning}{inner}{block['close']}"
            return written + answer[block.end("close") :]
        return form.tags.block(reasoning) + answer

    def _followed(self, number: int, form: Form) -> str | None:
        """Return the text of the conversation up to message `number`, up to its stop, if another
        message follows."""
        stop = self._stops.of(self.kind(number), dict(form.options))
        if stop is None or stop.lead is not None or not stop.text:
            return None
        text = self._replaced(number, self.messages[number], form).partition(FOLLOWING)[0]
        head, found, _ = text.rpartition(stop.text)
        return head + found if found else None

    def _replaced(self, number: int, message: Message, form: Form) -> str:
        """Return the text of the conversation up to message `number`, which another message
        replaces. The way `followed` adds a message after it."""
        _, before = self._in_form(number, form, True)
        messages = prepared([message], replace(form, reasoning="none"))
        if form.way == "followed":
            messages += _following(message)
        return self._plain([*before, *self._inputs(messages, form)[1]], form)

    def _header(self, number: int, form: Form, prompt: str | None = None) -> str | None:
        """Return the text before the content of message `number`; with a prompt, the start that
        this text and the prompt share, which ends before markup that differs."""
        message = self.messages[number]
        if prompt is None:
            # Some templates write no content next to calls.
            for marked in ({**message, "content": MARK}, {"role": "assistant", "content": MARK}):
                header, found, _ = self._replaced(number, marked, form).rpartition(MARK)
                if found:
                    return header
            return None
        if message.get("content") or not message.get("tool_calls"):
            message = {**message, "content": MARK}
        text = self._replaced(number, message, form)
        n = n_common(text, prompt)
        opened = max(text.rfind("<", 0, n), text.rfind("[", 0, n))
        is_cut = n < len(prompt) and opened >= 0 and not {">", "]"} & {*text[opened:n]}
        return text[: opened if is_cut else n]

    def _writes_none(self, number: int, form: Form) -> bool:
        """Return whether the template writes a text for contents that are none."""
        text = self.render(number + 1, form, prompted=False)
        plain = self.render(number + 1, replace(form, empty="text"), prompted=False)
        return text.count("None") > plain.count("None")

    def _fault(self, number: int, prompt: str, finished: str, stop: Stop | None, form: Form) -> str:
        """Return the fault of a trial turn, without its stop; empty for a correct turn."""
        message = self.messages[number]
        if form.empty == "none" and self._writes_none(number, form):
            return "a text for a content that is none"
        if number == 0 and (more := self._added(finished, form)):
            return (
                f"text before it that no prompt has, {more!r}; give the message a weight of 0, or "
                "remove it"
            )
        if token := self._missing_beginning(number, finished, form):
            return f"calls without {token!r}, which begins the calls of a first answer"
        reasoning, content = message.get(REASONING), message.get("content")
        texts = [text for text in (reasoning, content) if isinstance(text, str) and text]
        if any(finished.count(text) > 1 for text in texts):
            return "a text twice"
        places = [finished.find(text) for text in texts if text in finished]
        if places != sorted(places):
            return "the answer before the reasoning"
        if form.tags and reasoning and reasoning in finished and form.tags.close not in finished:
            return f"reasoning without {form.tags.close!r}"
        if form.reasoning == "parts" and (
            "'type'" in finished or '"type"' in finished or _PARTS_AS_CODE.search(prompt)
        ):
            return "its parts as code"
        if stop and stop.token_id is not None and stop.text in finished:
            return f"a stop, {stop.text!r}, inside"
        forms = self._forms
        if opened := forms.opened_by(prompt):
            is_closed = opened.close in finished and opened.open.strip() not in finished
            if not is_closed:
                return (
                    f"no {opened.close!r}, although its generation prompt ends with {opened.open!r}"
                )
            is_misplaced = _is_misclosed(finished, reasoning, opened)
            return f"{opened.close!r} before the reasoning, or twice" if is_misplaced else ""
        if not reasoning or reasoning not in finished:
            return ""
        is_twice = closed_block(prompt) or any(
            finished.count(tags.close) > 1 for tags in forms.tags
        )
        return "reasoning after an empty block of reasoning" if is_twice else ""

    def _missing_beginning(self, number: int, finished: str, form: Form) -> str:
        """Return the special token that the template writes before the calls of a first answer, and
        omits after earlier calls; empty without such a token."""
        message = self.messages[number]
        if not (message.get("tool_calls") and has_calls(self.messages[:number])):
            return ""
        question = {"role": "user", "content": QUESTION}
        first = self._with_messages([question, message]).attempt(1, form).turn
        if first is None:
            return ""
        tags = {tag for tags in self._forms.tags for tag in (tags.open, tags.close)}
        present = {*self._stops.pattern.findall(before_call(message, finished)), *tags}
        expected = self._stops.pattern.findall(before_call(message, first.completion))
        return next((token for token in expected if token not in present), "")

    def _added(self, finished: str, form: Form) -> str:
        """Return the text before the markers of a first message if it is not the same after a
        question, such as a system prompt; empty if it is."""
        head = before_markers(finished)
        if not head.strip():
            return ""
        question = {"role": "user", "content": QUESTION}
        turn = self._with_messages([question, self.messages[0]]).attempt(1, form).turn
        return "" if turn and before_markers(turn.completion) == head else head

    def _unseen(self, number: int, prompt: str) -> Iterator[str]:
        if self.has_system:
            texts = [
                m.get("content")
                for m in self.messages[:number]
                if m["role"] in ("system", "developer")
            ]
            if any(isinstance(text, str) and not is_written(text, prompt) for text in texts):
                yield "system message"
        if self.tools and not all(tool["function"]["name"] in prompt for tool in self.tools):
            yield "tools"

    def n_missing(self, number: int, prompt: str) -> int:
        """Return how many parts of the assistant's messages before `number` a prompt lacks."""
        earlier = (message for message in self.messages[:number] if message["role"] == "assistant")
        return sum(1 for message in earlier for _ in lost_parts(message, prompt))

    def _mismatch(self, number: int, form: Form, prompt: str) -> str:
        is_second = number > 0 and self.messages[number - 1]["role"] == "assistant"
        before = self.render(number, form, prompted=False)
        if is_second and len(prompt) < len(before) and before.startswith(prompt):
            return (
                f"the generation prompt of {self._template.name} continues message {number} "
                f"(assistant), so it begins no other one; make messages {number} and {number + 1} "
                "one"
            )
        finished = self.render(number + 1, form, prompted=False)
        n = n_common(finished, prompt)
        return (
            f"{self._writes(number, form)} differently from what its generation prompt begins: "
            f"{finished[n : n + 40]!r} instead of {prompt[n : n + 40]!r}; {_ADVICE}"
        )


def has_calls(messages: Sequence[Message]) -> bool:
    return any(message.get("tool_calls") for message in messages)


def _has_nulls(form: Form) -> bool:
    """Return whether the template gets null as the content of messages without one."""
    return form.empty == "none"


def _without_prompt(error: UserError) -> str:
    """Return the reason why a first message of the assistant cannot be trained."""
    return (
        "message 1 (assistant) has no prompt, as the template needs a message before it "
        f"({error}); begin with another role, or give the message a weight of 0"
    )


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


def _is_misclosed(finished: str, reasoning: str | None, opened: Tags) -> bool:
    """Return whether the tag that closes the reasoning which a prompt opens is not directly after
    it."""
    inside, _, rest = finished.partition(opened.close)
    return opened.close in rest or inside.strip() != (reasoning or "")


def _kind_of(message: Message) -> str:
    """Return the kind of a message's missing content."""
    return "none" if message.get("content") is None else "empty"
