"""One turn of the assistant in a form: its prompt and the text that the model must write."""

from collections.abc import Iterator
from typing import NamedTuple

from torchtitan.components.chat_template import BUILT_IN_TEMPLATES
from torchtitan.components.chat_template.forms import REASONING, Form
from torchtitan.components.chat_template.stops import Stop, n_common
from torchtitan.components.data.finetuning.completions import Completion, Marks
from torchtitan.components.data.finetuning.losses import Part, is_written, lost_parts, parts_of
from torchtitan.components.data.finetuning.renderings import Renderings
from torchtitan.tools.errors import UserError

ADVICE = (
    f"set another --dataloader.chat_template ({', '.join(BUILT_IN_TEMPLATES)}), or a copy of the "
    "template that continues its generation prompt"
)


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
    marks: Marks
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
    stop: Stop | None = None
    """The stop at the end of the turn."""


def attempt_turn(row: Renderings, number: int, form: Form) -> Attempt:
    """Return the turn of message `number` in a form, or why the form is unsuitable."""
    try:
        prompt = row.render(number, form, prompted=True)
        completion, marks = Completion(row, number, form).after(prompt)
        if completion is None:
            whole = row.render(number + 1, form, prompted=False)
            n_passed = 0 if whole.startswith(prompt) else 1
            return Attempt(None, _mismatch(row, number, form, prompt), n_passed)
    except UserError as error:
        return Attempt(None, _without_prompt(error) if number == 0 else str(error))
    stop = _stop_of(row, number, form, completion)
    finished = stop.cut(completion) if stop else None
    if finished is None:
        stop, finished = None, completion.rstrip()
    message = row.messages[number]
    lost = tuple(lost_parts(message, finished))
    unseen = tuple(_unseen(row, number, prompt))
    is_only_a_stop = not {*parts_of(message)} - {*lost}
    end = stop.text if stop else ""
    turn = Turn(prompt, finished, end, form, lost, unseen, marks, is_only_a_stop)
    return Attempt(turn, stop=stop)


def _stop_of(row: Renderings, number: int, form: Form, completion: str) -> Stop | None:
    kind, options = row.kind(number), dict(form.options)
    stop = row.stops.of(kind, options)
    if kind == "answer" or not stop or stop.lead is None:
        return stop
    # Some templates end several calls like answers, but not a single one.
    usual = row.stops.of("answer", options)
    if usual and usual.lead is None and usual.text and completion.rstrip().endswith(usual.text):
        return usual
    return stop


def rest_after(row: Renderings, turn: Turn) -> str:
    """Return the text that the template writes after a turn in the whole conversation; empty if the
    template rewrites the turn."""
    try:
        whole = row.render(len(row.messages), turn.form, prompted=False)
    except UserError:
        return ""
    return whole[len(turn.text) :] if whole.startswith(turn.text) else ""


def closing_inside(row: Renderings, number: int, completion: str) -> str:
    """Return the tag inside the reasoning of message `number` that also closes it in its turn;
    empty for reasoning without such a tag."""
    reasoning = row.messages[number].get(REASONING) or ""
    closings = (tags.close for tags in row.forms.tags if tags.close in reasoning)
    return next((closing for closing in closings if completion.count(closing) > 1), "")


def n_missing(row: Renderings, number: int, prompt: str) -> int:
    """Return how many parts of the assistant's messages before `number` a prompt lacks."""
    earlier = (message for message in row.messages[:number] if message["role"] == "assistant")
    return sum(1 for message in earlier for _ in lost_parts(message, prompt))


def _unseen(row: Renderings, number: int, prompt: str) -> Iterator[str]:
    if row.has_system:
        texts = [
            m.get("content") for m in row.messages[:number] if m["role"] in ("system", "developer")
        ]
        if any(isinstance(text, str) and not is_written(text, prompt) for text in texts):
            yield "system message"
    if row.tools and not all(tool["function"]["name"] in prompt for tool in row.tools):
        yield "tools"


def writes(row: Renderings, number: int, form: Form) -> str:
    """Return the beginning of a sentence about message `number` in a form."""
    tried = f", given with {form.words}," if form.words else ""
    return f"{row.template.name} writes message {number + 1} (assistant){tried}"


def _mismatch(row: Renderings, number: int, form: Form, prompt: str) -> str:
    is_second = number > 0 and row.messages[number - 1]["role"] == "assistant"
    before = row.render(number, form, prompted=False)
    if is_second and len(prompt) < len(before) and before.startswith(prompt):
        return (
            f"the generation prompt of {row.template.name} continues message {number} "
            f"(assistant), so it begins no other one; make messages {number} and {number + 1} "
            "one"
        )
    finished = row.render(number + 1, form, prompted=False)
    n = n_common(finished, prompt)
    return (
        f"{writes(row, number, form)} differently from what its generation prompt begins: "
        f"{finished[n : n + 40]!r} instead of {prompt[n : n + 40]!r}; {ADVICE}"
    )


def _without_prompt(error: UserError) -> str:
    """Return the reason why a first message of the assistant cannot be trained."""
    return (
        "message 1 (assistant) has no prompt, as the template needs a message before it "
        f"({error}); begin with another role, or give the message a weight of 0"
    )
