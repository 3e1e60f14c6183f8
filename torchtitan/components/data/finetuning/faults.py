"""Faults of a form, found in a turn whose texts are markers."""

import re
from dataclasses import replace

from torchtitan.components.chat_template.forms import REASONING, Form, closed_block
from torchtitan.components.chat_template.stops import QUESTION, Stop
from torchtitan.components.data.finetuning.attempts import (
    ADVICE,
    Attempt,
    Turn,
    attempt_turn,
    writes,
)
from torchtitan.components.data.finetuning.conversation import Message
from torchtitan.components.data.finetuning.markers import before_call, before_markers
from torchtitan.components.data.finetuning.renderings import Renderings

_PARTS_AS_CODE = re.compile(r"""(["'])type\1: *\1thinking\1""")

_QUESTION: Message = {"role": "user", "content": QUESTION}


def trial_turn(row: Renderings, number: int, form: Form) -> Attempt:
    """Return the turn of message `number` in a form, or why the form is unsuitable: also because of
    a fault."""
    attempt = attempt_turn(row, number, form)
    if attempt.turn is None:
        return attempt
    fault = _fault(row, number, attempt.turn, attempt.stop)
    return (
        Attempt(None, f"{writes(row, number, form)} with {fault}; {ADVICE}", 2)
        if fault
        else attempt
    )


def _fault(row: Renderings, number: int, turn: Turn, stop: Stop | None) -> str:
    """Return the fault of a turn; empty for a correct turn."""
    message, form = row.messages[number], turn.form
    prompt, finished = turn.prompt, turn.completion.removesuffix(turn.stop)
    if form.empty == "none" and _writes_none(row, number, form):
        return "a text for a content that is none"
    if number == 0 and (more := _added(row, finished, form)):
        return (
            f"text before it that no prompt has, {more!r}; give the message a weight of 0, or "
            "remove it"
        )
    if token := _missing_beginning(row, number, finished, form):
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
    return _misplaced_tag(row, prompt, finished, reasoning)


def _misplaced_tag(row: Renderings, prompt: str, finished: str, reasoning: str | None) -> str:
    """Return the fault of the tags around the reasoning; empty without a fault."""
    if opened := row.forms.opened_by(prompt):
        if opened.close not in finished or opened.open.strip() in finished:
            return f"no {opened.close!r}, although its generation prompt ends with {opened.open!r}"
        inside, _, rest = finished.partition(opened.close)
        is_misplaced = opened.close in rest or inside.strip() != (reasoning or "")
        return f"{opened.close!r} before the reasoning, or twice" if is_misplaced else ""
    if not reasoning or reasoning not in finished:
        return ""
    is_twice = any(finished.count(tags.close) > 1 for tags in row.forms.tags)
    return "reasoning after an empty block of reasoning" if closed_block(prompt) or is_twice else ""


def _writes_none(row: Renderings, number: int, form: Form) -> bool:
    """Return whether the template writes a text for contents that are none."""
    text = row.render(number + 1, form, prompted=False)
    plain = row.render(number + 1, replace(form, empty="text"), prompted=False)
    return text.count("None") > plain.count("None")


def _missing_beginning(row: Renderings, number: int, finished: str, form: Form) -> str:
    """Return the special token that the template writes before the calls of a first answer, and
    omits after earlier calls; empty without such a token."""
    message = row.messages[number]
    if not (message.get("tool_calls") and row.has_calls(number)):
        return ""
    first = attempt_turn(row.with_messages([_QUESTION, message]), 1, form).turn
    if first is None:
        return ""
    pattern = row.stops.pattern
    tags = {tag for tags in row.forms.tags for tag in (tags.open, tags.close)}
    present = {*pattern.findall(before_call(message, finished)), *tags}
    expected = pattern.findall(before_call(message, first.completion))
    return next((token for token in expected if token not in present), "")


def _added(row: Renderings, finished: str, form: Form) -> str:
    """Return the text before the markers of a first message if it is not the same after a question,
    such as a system prompt; empty if it is."""
    head = before_markers(finished)
    if not head.strip():
        return ""
    turn = attempt_turn(row.with_messages([_QUESTION, row.messages[0]]), 1, form).turn
    return "" if turn and before_markers(turn.completion) == head else head
