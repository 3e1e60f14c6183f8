"""The assistant's turns of a conversation as inference sees them: the prompt, and what the model must write."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, get_args

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
    without_empty_block,
)
from torchtitan.components.chat_template.stops import Stop, Stops, n_common
from torchtitan.components.data.finetuning.conversation import BrokenSample, Conversation, LossySample, Message
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger

Part = Literal["reasoning", "tools", "content"]
"""Part of a message that a template may leave out."""

PARTS: tuple[Part, ...] = get_args(Part)

_KEPT_FORMS = 4
"""Forms that are remembered for turns with equal traits."""

_ADVICE = (
    f"set another --dataloader.chat_template ({', '.join(BUILT_IN_TEMPLATES)}), or a copy of the template that "
    "continues its generation prompt"
)

_MARK, _REASONING_MARK, _VALUE_MARK = "ContentMark", "ReasoningMark", "ValueMark"


class Turn(NamedTuple):
    """One turn of the assistant."""

    prompt: str
    """The conversation before the turn, with the generation prompt."""
    completion: str
    """What the model must write: the turn up to and including its stop."""
    stop: str
    """The stop at the end of the completion; empty if the turn teaches none."""
    form: Form
    lost: tuple[Part, ...]
    """Parts that the completion lacks."""
    unseen: tuple[str, ...]
    """Parts of the prompt that the template leaves out: "system message" or "tools"."""
    marks: tuple[tuple[int, int], ...] | None
    """Spans that the template marks by `{% generation %}`, in characters of prompt and completion; None: no marks."""

    rest: str = ""
    """What the template writes after the turn in this conversation."""

    @property
    def text(self) -> str:
        return self.prompt + self.completion

    @property
    def is_only_a_stop(self) -> bool:
        """Return whether the model learns nothing from the turn but to stop."""
        return not self.completion.removesuffix(self.stop).strip()


class _Attempt(NamedTuple):
    """Result of a form: a turn, or why there is none."""

    turn: Turn | None
    problem: str = ""


class _Verdict(NamedTuple):
    """Forms for turns with equal traits."""

    forms: list[Form]
    """Forms that lose nothing, else the one that loses the least."""
    is_complete: bool
    """True if the forms lose nothing."""
    problem: str
    """Why there is none."""


class _Rank(NamedTuple):
    """Order of the forms that lose nothing of a turn."""

    is_unseen: bool
    """True if the prompt lacks the system message or the tools."""
    kind: int
    """Place of the form's way and options among those tried."""
    n_missing: int
    """Parts of earlier turns that the prompt lacks, although another form may write them."""


class TurnFinder:
    """Finds the assistant's turns of conversations.

    Turn i is rendered twice: the messages before it with the generation prompt, P, and the messages up to it, F. If F
    begins with P, the rest of F is what the model must write, up to the stop. Otherwise, and if the rest lacks a part
    of the message, other forms are tried (see `Forms`). The forms that suit a kind of turns are found once, with marker
    texts in place of the turn's own; each turn is then checked with these.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, accepted: Sequence[Part] = ()):
        self._template, self._accepted = template, frozenset(accepted)
        self.forms, self.stops = Forms(template), Stops(template, tokenizer)
        self._known: dict[str, _Verdict] = {}
        self._told: set[str] = set()

    def turns(self, conversation: Conversation, numbers: Sequence[int], thinks: bool | None = None) -> list[Turn]:
        """Return the assistant's messages with these numbers as turns. `thinks` says whether the conversation has
        reasoning; None: as its messages have it. Raise `LossySample` if a turn lacks a part of
        its message that must be trained, `BrokenSample` if the template rejects the conversation or a turn does not
        begin with the generation prompt."""
        row = _Row(self, conversation, thinks)
        turns = [self._turn(row, number) for number in numbers]
        if turns:
            turns[-1] = turns[-1]._replace(rest=row.rest(turns[-1]))
        return turns

    def has_reasoning(self, messages: Sequence[Message]) -> bool:
        """Return whether any turn of the assistant has reasoning, also between tags."""
        return _Row(self, Conversation(list(messages))).thinks

    def whole(self, conversation: Conversation) -> str:
        """Return the text of a whole conversation. Raise `BrokenSample` if the template rejects it."""
        row = _Row(self, conversation)
        return row.text(len(conversation.messages), self._form_of(row))

    def span(self, conversation: Conversation, number: int, text: str) -> tuple[int, int]:
        """Return the span of message `number` in a text of the conversation, an assistant's without the generation
        prompt. Raise `BrokenSample` if the text does not contain the message as the last one of its conversation."""
        row = _Row(self, conversation)
        form = self._form_of(row)
        before = row.text(number, form) if number else ""
        after = row.text(number + 1, form)
        role = conversation.messages[number]["role"]
        if role == "assistant":
            prompt = row.text(number, form, prompted=True)
            before = prompt if after.startswith(prompt) else before
        if text.startswith(after) and after.startswith(before):
            return len(before), len(after)
        raise BrokenSample(
            f"{self._template.name} writes the conversation up to message {number + 1} ({role}) differently if more "
            "messages follow, so the message cannot be located in the text; remove its weight, or set another "
            f"--dataloader.chat_template ({', '.join(BUILT_IN_TEMPLATES)})"
        )

    def _form_of(self, row: "_Row") -> Form:
        """Return the form of a conversation, of which not a turn but the text is needed."""
        answers = [number for number, message in enumerate(row.messages) if message["role"] == "assistant"]
        plain = Form(tuple(row.options.items()))
        forms = self._suitable(row, answers[-1]).forms if answers else []
        return forms[0] if forms else plain

    def prompt(self, conversation: Conversation) -> str:
        """Return a conversation with the generation prompt, in the form in which its next turn would be trained. Raise
        `BrokenSample` if the template rejects it."""
        number = len(conversation.messages)
        answer = {"role": "assistant", "content": _MARK}
        answered = Conversation([*conversation.messages, answer], conversation.tools, options=conversation.options)
        row = _Row(self, answered, thinks=True)
        forms = self._suitable(row, number).forms
        return row.text(number, forms[0] if forms else Form(tuple(row.options.items())), prompted=True)

    def _turn(self, row: "_Row", number: int) -> Turn:
        verdict = self._suitable(row, number)
        if verdict.problem:
            raise BrokenSample(verdict.problem)
        best, problem = self._best(row, number, verdict.forms)
        if verdict.is_complete and (best is None or best.lost):
            other, other_problem = self._best(row, number, self.forms.candidates(row.traits(number)))
            if best is None or other is not None and len(other.lost) < len(best.lost):
                best, problem = other, problem or other_problem
        if best is None:
            raise BrokenSample(problem)
        self._refuse_loss(best.lost, number)
        self._tell(best)
        return best

    def losses(self, conversation: Conversation, numbers: Sequence[int], text: str) -> list[Part]:
        """Return the parts of the assistant's messages with these numbers that a text of the whole conversation lacks.
        Raise `LossySample` if one of them must be trained."""
        row = _Row(self, conversation)
        found: list[Part] = []
        for number in numbers:
            lost = list(lost_parts(row.messages[number], text))
            self._refuse_loss(lost, number)
            found += lost
        return found

    def _refuse_loss(self, lost: Sequence[Part], number: int) -> None:
        if refused := [part for part in lost if part not in self._accepted]:
            raise LossySample(
                f"{self._template.name} leaves out the {refused[0]} of message {number + 1} (assistant)",
                f"on_loss_of_{refused[0]}",
            )

    def _best(self, row: "_Row", number: int, forms: Sequence[Form] | Iterator[Form]) -> tuple[Turn | None, str]:
        """Return the first turn without losses, else the one with the fewest, and the first problem."""
        best, problem = None, ""
        for form in forms:
            turn, why = row.attempt(number, form)
            problem = problem or why
            if turn is None:
                continue
            if not turn.lost:
                return turn, ""
            if best is None or len(turn.lost) < len(best.lost):
                best = turn
        return best, problem

    def _suitable(self, row: "_Row", number: int) -> "_Verdict":
        """Return the forms for a turn, found with markers in place of its texts."""
        traits = row.traits(number)
        message, before = row.messages[number], row.messages[number - 1]["role"] if number else ""
        own = bool(message.get(REASONING)), bool(message.get("content")), len(message.get("tool_calls") or ())
        key = repr((traits, own, before, bool(row.tools), row.has_system))
        if key in self._known:
            return self._known[key]
        marked = row.with_markers(number)
        complete: list[tuple[_Rank, Form]] = []
        lossy: list[tuple[int, Form]] = []
        kinds: dict[tuple[Any, ...], int] = {}
        n_full = 0
        problem = ""
        for form in self.forms.candidates(traits):
            kind = kinds.setdefault((form.way, form.options), len(kinds))
            turn, why = marked.attempt(number, form, is_trial=True)
            problem = problem or why
            if turn is None:
                continue
            if turn.lost:
                lossy.append((len(turn.lost), form))
            else:
                rank = _Rank(bool(turn.unseen), kind, marked.n_missing(number, turn.prompt))
                complete.append((rank, form))
                n_full += not turn.unseen and not rank.n_missing
                if n_full >= _KEPT_FORMS:
                    break
        found = [form for _, form in sorted(complete, key=lambda pair: pair[0])][:_KEPT_FORMS]
        if not found:
            found = [form for _, form in sorted(lossy, key=lambda pair: pair[0])][:1]
        verdict = _Verdict(found, bool(complete), "" if found else problem)
        if found:
            self._known[key] = verdict
        return verdict

    def _tell(self, turn: Turn) -> None:
        form = turn.form
        if form.way == "joined" and form.tags and form.tags.close and form.tags.close in turn.completion:
            self._warn_once(
                f"{self._template.name} does not continue its generation prompt in some finished turns: they are "
                f"trained after it, with {form.tags.inner + form.tags.close + form.tags.after!r} after the reasoning "
                "(also if there is none); this whitespace is a guess, since no rendering of the template shows it"
            )
        for what in turn.unseen:
            self._warn_once(f"{self._template.name} does not write the {what} of the prompt")

    def _warn_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            logger.warning(text)


class _Row:
    """A conversation, with its renderings in each form."""

    def __init__(self, finder: TurnFinder, conversation: Conversation, thinks: bool | None = None):
        self._finder, self._template = finder, finder._template
        self.messages = [self._split(message) for message in conversation.messages]
        answers = (message for message in self.messages if message["role"] == "assistant")
        self.thinks = any(answer.get(REASONING) for answer in answers) if thinks is None else thinks
        self.tools, self.options = conversation.tools, conversation.options
        self._traits: dict[int, Traits] = {}
        self._prepared: dict[Form, list[Message]] = {}
        self._rendered: dict[tuple[int, bool, Form], tuple[str, list[tuple[int, int]]]] = {}
        self.has_system = any(message["role"] in ("system", "developer") for message in self.messages)

    def _split(self, message: Message) -> Message:
        if message["role"] != "assistant":
            return message
        return split_reasoning(message, self._finder.forms.tags)

    def traits(self, number: int) -> Traits:
        """Return the traits of the assistant's message `number`."""
        if number in self._traits:
            return self._traits[number]
        answers = [message for message in self.messages[: number + 1] if message["role"] == "assistant"]
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

    def with_markers(self, number: int) -> "_Row":
        """Return the conversation up to message `number`, with markers in place of its texts."""
        message = _marked(self.messages[number])
        before = [{**other} for other in self.messages[:number]]
        row = _Row(self._finder, Conversation([], self.tools, options=self.options), self.thinks)
        row.messages, row.has_system = [*before, message], self.has_system
        return row

    def rest(self, turn: Turn) -> str:
        """Return what the template writes after a turn in the whole conversation; empty if it rewrites the turn."""
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
        if key not in self._rendered:
            messages = self._in_form(n, form, prompted)
            template, options = self._template, {**dict(form.options), "null_content": form.empty == "none"}
            if template.marks_generation and not prompted:
                result = template.render_marked(messages[:n], tools=self.tools, **options)
            else:
                text = template.render(messages[:n], tools=self.tools, add_generation_prompt=prompted, **options)
                result = text, []
            self._rendered[key] = result
        return self._rendered[key]

    def _in_form(self, n: int, form: Form, prompted: bool) -> list[Message]:
        """Return the first `n` messages. The form of reasoning that is not under a key concerns the last one only:
        earlier turns have what the template keeps of them."""
        usual = form if form.reasoning in KEYS else replace(form, reasoning=REASONING, tags=None)
        if usual not in self._prepared:
            self._prepared[usual] = prepared(self.messages, usual)
        messages = self._prepared[usual][:n]
        if usual == form or prompted or not n:
            return messages
        return [*messages[:-1], *prepared(self.messages[n - 1 : n], form)]

    def attempt(self, number: int, form: Form, *, is_trial: bool = False) -> _Attempt:
        """Return the turn in a form, or why the form is unsuitable."""
        try:
            prompt = self.render(number, form, prompted=True)
            completion, marks = self._completion(number, form, prompt)
        except UserError as error:
            return _Attempt(None, str(error))
        if completion is None:
            return _Attempt(None, self._mismatch(number, form, prompt))
        message = self.messages[number]
        kind: Literal["answer", "call"] = "call" if message.get("tool_calls") else "answer"
        stop = self._finder.stops.of(kind, dict(form.options))
        if kind == "call" and stop and stop.lead is not None:
            # Some templates end several calls like answers, but not a single one.
            usual = self._finder.stops.of("answer", dict(form.options))
            ends_alike = usual and usual.lead is None and usual.text and completion.rstrip().endswith(usual.text)
            stop = usual if ends_alike else stop
        finished = stop.cut(completion) if stop else None
        if finished is None:
            stop, finished = None, self._cut(completion)
        if is_trial:
            end = stop.text if stop else ""
            if fault := self._fault(number, prompt, finished.removesuffix(end), stop, form):
                name = f"message {number + 1} (assistant)"
                return _Attempt(None, f"{self._template.name} writes {name} with {fault}; {_ADVICE}")
        lost = tuple(lost_parts(message, finished))
        unseen = tuple(self._unseen(number, prompt))
        end = stop.text if stop else ""
        return _Attempt(Turn(prompt, finished, end, form, lost, unseen, marks))

    def _completion(
        self, number: int, form: Form, prompt: str
    ) -> tuple[str | None, tuple[tuple[int, int], ...] | None]:
        """Return the text of the turn after the generation prompt, None if there is none, and the marked spans."""
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
        """Return the text after the generation prompt at the place where the template writes any answer."""
        generated = self._finder.forms.prompt(form.options)
        header = self._header(number, form)
        if number and not generated.strip():  # without a prompt of its own, the turn follows the previous message
            previous = str(self.messages[number - 1].get("content") or "").strip()
            generated = prompt[prompt.rfind(previous) :] if previous in prompt else ""
        is_usable = generated.strip() and prompt.endswith(generated)
        if not is_usable or header is None or generated not in header:
            return None, None
        end = header.rfind(generated) + len(generated)
        if not finished.startswith(header[:end]):
            return None, None
        shift = len(prompt) - end
        marks = tuple((first + shift, last + shift) for first, last in spans if last >= end)
        return finished[end:], marks if self._template.marks_generation else None

    def _joined(self, number: int, form: Form, prompt: str, finished: str) -> str | None:
        """Return the reasoning, its closing tag and the answer as the template renders it without reasoning."""
        assert form.tags
        header, before = self._header(number, form, prompt), self.render(number, form, prompted=False)
        if header is None or not finished.startswith(header) or not header.startswith(before):
            return None
        answer, extra = finished[len(header) :], prompt[len(header) :]
        reasoning = self.messages[number].get(REASONING) or ""
        if self._finder.forms.opened_by(prompt):
            if answer.lstrip().startswith(form.tags.close):  # of an empty block
                answer = answer.partition(form.tags.close)[2].lstrip("\n")
            begin = "" if prompt != prompt.rstrip() or not reasoning else form.tags.inner
            return begin + form.tags.rest(reasoning) + answer
        if closed_block(prompt) and (not extra or BLOCK.fullmatch(extra.strip())):
            return None if reasoning else answer
        if extra:  # such as an empty block in another notation
            return None if reasoning else answer
        if not reasoning or not form.tags.close:
            return None
        if block := BLOCK.match(answer):
            inner = "\n" if "\n" in block["inner"] else ""
            return block["open"] + inner + reasoning + inner + block["close"] + answer[block.end("close") :]
        return form.tags.block(reasoning) + answer

    def _header(self, number: int, form: Form, prompt: str | None = None) -> str | None:
        """Return the text before the content of message `number`; with a prompt, what both have in common, which ends
        before markup that differs."""
        message = self.messages[number]
        if message.get("content") or not message.get("tool_calls"):
            message = {**message, "content": _MARK}
        before = self._in_form(number, form, True)
        messages = [*before, *prepared([message], replace(form, reasoning="none"))]
        options = {**dict(form.options), "null_content": form.empty == "none"}
        text = self._template.render(messages, tools=self.tools, add_generation_prompt=False, **options)
        if prompt is None:
            header, found, _ = text.rpartition(_MARK)
            return header if found else None
        n = n_common(text, prompt)
        opened = max(text.rfind("<", 0, n), text.rfind("[", 0, n))
        is_cut = n < len(prompt) and opened >= 0 and not {">", "]"} & {*text[opened:n]}
        return text[: opened if is_cut else n]

    def _cut(self, completion: str) -> str:
        """Return a completion without the whitespace after its last special token or text."""
        return completion.rstrip()

    def _writes_none(self, number: int, form: Form) -> bool:
        """Return whether the template writes a text for contents that are none."""
        text = self.render(number + 1, form, prompted=False)
        plain = self.render(number + 1, replace(form, empty="text"), prompted=False)
        return text.count("None") > plain.count("None")

    def _fault(self, number: int, prompt: str, finished: str, stop: Stop | None, form: Form) -> str:
        """Return what is wrong with a trial turn, without its stop; empty if nothing is."""
        message = self.messages[number]
        if form.empty == "none" and self._writes_none(number, form):
            return "a text for a content that is none"
        reasoning, content = message.get(REASONING), message.get("content")
        texts = [text for text in (reasoning, content) if isinstance(text, str) and text]
        if any(finished.count(text) > 1 for text in texts):
            return "a text twice"
        places = [finished.find(text) for text in texts if text in finished]
        if places != sorted(places):
            return "the answer before the reasoning"
        if form.tags and reasoning and reasoning in finished and form.tags.close not in finished:
            return f"reasoning without {form.tags.close!r}"
        if form.reasoning == "parts" and ("'type'" in finished or '"type"' in finished):
            return "its parts as code"
        if stop and stop.token_id is not None and stop.text in finished:
            return f"a stop, {stop.text!r}, inside"
        forms = self._finder.forms
        if opened := forms.opened_by(prompt):
            is_closed = opened.close in finished and opened.open.strip() not in finished
            if not is_closed:
                return f"no {opened.close!r}, although its generation prompt ends with {opened.open!r}"
            is_misplaced = _is_misclosed(finished, reasoning, opened)
            return f"{opened.close!r} before the reasoning, or twice" if is_misplaced else ""
        if not reasoning or reasoning not in finished:
            return ""
        is_twice = closed_block(prompt) or any(finished.count(tags.close) > 1 for tags in forms.tags)
        return "reasoning after an empty block of reasoning" if is_twice else ""

    def _unseen(self, number: int, prompt: str) -> Iterator[str]:
        if self.has_system:
            texts = [m.get("content") for m in self.messages[:number] if m["role"] in ("system", "developer")]
            if any(isinstance(text, str) and not is_written(text, prompt) for text in texts):
                yield "system message"
        if self.tools and not all(tool["function"]["name"] in prompt for tool in self.tools):
            yield "tools"

    def n_missing(self, number: int, prompt: str) -> int:
        """Return how many parts of the assistant's messages before `number` a prompt lacks."""
        earlier = (message for message in self.messages[:number] if message["role"] == "assistant")
        return sum(1 for message in earlier for _ in lost_parts(message, prompt))

    def _mismatch(self, number: int, form: Form, prompt: str) -> str:
        finished = self.render(number + 1, form, prompted=False)
        n = n_common(finished, prompt)
        return (
            f"{self._template.name} writes message {number + 1} (assistant) differently from what its generation "
            f"prompt begins: {finished[n : n + 40]!r} instead of {prompt[n : n + 40]!r}; {_ADVICE}"
        )


def _is_misclosed(finished: str, reasoning: str | None, opened: Tags) -> bool:
    """Return whether the tag that closes the reasoning which a prompt opens is not directly after it."""
    inside, _, rest = finished.partition(opened.close)
    return opened.close in rest or inside.strip() != (reasoning or "")


def _kind_of(message: Message) -> str:
    """Return the kind of a message's missing content."""
    return "none" if message.get("content") is None else "empty"


def _marked(message: Message) -> Message:
    """Return a message of the assistant with markers in place of its texts."""
    content, reasoning, written = message.get("content"), message.get(REASONING), message.get(WRITTEN)
    marked = dict(message)
    if isinstance(content, str) and content:
        marked["content"] = _MARK
    if reasoning:
        marked[REASONING] = _REASONING_MARK
    if isinstance(written, str):
        changed = written.replace(str(reasoning), _REASONING_MARK, 1)
        head, found, tail = changed.rpartition(str(content)) if content else (changed, "", "")
        marked[WRITTEN] = head + _MARK + tail if found else changed
    if calls := message.get("tool_calls"):
        marked["tool_calls"] = [_marked_call(call, number) for number, call in enumerate(calls)]
    return marked


def _marked_call(call: Mapping[str, Any], number: int) -> dict[str, Any]:
    function = call["function"]
    names = function.get("arguments") or {}
    arguments = {name: f"{_VALUE_MARK}{number}x{i}x" for i, name in enumerate(names)}
    return {**call, "function": {**function, "arguments": arguments}}


def lost_parts(message: Message, text: str) -> Iterator[Part]:
    """Yield the parts of an assistant's message that a text does not contain."""
    reasoning, content = message.get(REASONING), message.get("content")
    if isinstance(reasoning, str) and not is_written(reasoning, text):
        yield "reasoning"
    calls = message.get("tool_calls") or []
    if calls and not all(_is_called(call["function"], text) for call in calls):
        yield "tools"
    if isinstance(content, str) and not is_written(without_empty_block(content), text):
        yield "content"


def _is_called(function: Mapping[str, Any], text: str) -> bool:
    if function["name"] not in text:
        return False
    return all(is_written(leaf, text) for leaf in _leaves(function.get("arguments") or {}))


def _leaves(value: Any) -> Iterator[str]:
    """Yield the keys and values in arguments as text."""
    if isinstance(value, Mapping):
        for key, inside in value.items():
            yield str(key)
            yield from _leaves(inside)
    elif isinstance(value, list):
        for inside in value:
            yield from _leaves(inside)
    else:
        yield value if isinstance(value, str) else json.dumps(value)


def is_written(part: str, text: str) -> bool:
    """Return whether a text contains a part as it is, without whitespace around it, or escaped as in JSON, in XML or by
    `repr`; numbers and constants also in Python's spelling. Whitespace inside does not count."""
    part = part.strip()
    if part in text:
        return True
    spellings = [json.dumps(part, ensure_ascii=False)[1:-1], json.dumps(part)[1:-1], repr(part)[1:-1]]
    spellings += [json.dumps(spelling, ensure_ascii=False)[1:-1] for spelling in spellings[:1]]
    spellings += {"true": ["True"], "false": ["False"], "null": ["None"]}.get(part, [])
    spellings += [part.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")]
    if any(spelling in text for spelling in spellings):
        return True
    dense = "".join(text.split())
    return "".join(part.split()) in dense or any("".join(spelling.split()) in dense for spelling in spellings)
