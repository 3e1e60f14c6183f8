"""Renderings of conversations with calls."""

import pytest

from torchtitan.components.chat_template import ChatTemplate
from torchtitan.components.data.finetuning.histories import render_history
from torchtitan.tools.errors import UserError

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
MESSAGES = [
    {"role": "user", "content": "Add."},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "content": "5"},
]
CALLS = (
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments }}{% endfor %}"
)


def template_of(assistant: str) -> ChatTemplate:
    source = "{% for m in messages %}{% if m.role == 'assistant' %}" + assistant
    return ChatTemplate(source + "{% else %}{{ m.content }};{% endif %}{% endfor %}", name="T")


@pytest.mark.parametrize(
    ("assistant", "text"),
    [
        ("{{ m.content is defined }}" + CALLS, "Add.;Falseadd{'a': 1}5;"),
        # Qwen 3: neither its absence nor null
        ("{{ 'x' in m['content'] + '' }}" + CALLS, "Add.;Falseadd{'a': 1}5;"),
        # DeepSeek R1's distilled models: writes calls of null only
        ("{% if m.content is none %}" + CALLS + "{% endif %}", "Add.;add{'a': 1}5;"),
        # writes no call at all: as for transformers
        ("{{ m.content is defined }}", "Add.;False5;"),
    ],
)
def test_a_call_without_content_is_written(assistant, text):
    assert render_history(template_of(assistant), MESSAGES) == text


def test_a_template_that_takes_none_is_refused():
    template = template_of("{{ raise_exception('no calls') }}")
    with pytest.raises(UserError, match="T rejects this conversation: no calls"):
        render_history(template, MESSAGES)


def test_other_contents_stay():
    template = template_of("{{ m.content }}" + CALLS)
    messages = [MESSAGES[0], {**MESSAGES[1], "content": "So."}, MESSAGES[2]]
    assert render_history(template, messages) == "Add.;So.add{'a': 1}5;"
    assert render_history(template, MESSAGES[:1], tools=None) == "Add.;"
