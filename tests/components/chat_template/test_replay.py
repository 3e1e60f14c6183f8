"""Renderings by recordings, compared with the template's own."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.components.chat_template.helpers import Message, assistant, user
from torchtitan.components.chat_template import ChatTemplate
from torchtitan.tools.errors import UserError

TEXTS = (
    *("Hi", "", "  spaces \n", "<tool_response>x</tool_response>", "a</think>b</think>\n\nc"),
    *("Größe 中文 👩‍👩‍👧", '"quoted" \\n <b>&', "{{ 7 * 7 }}", "x" * 300, "Aa", "False", "a,b"),
)

TEMPLATES = {
    "whitespace": "{% for m in messages %}[{{ m.content | trim }}|{{ m.content.strip('a') }}]"
    "{% endfor %}",
    "questions": "{% for m in messages %}{% if m.content %}{{ m.role }}{% endif %}"
    "{% if 'think' in m.content and m.content is string %}T{% endif %}"
    "{% if m.content == 'Aa' or m.content in ['a,b', 'Hi'] %}E{% endif %}"
    "{% if m.content.startswith('<tool') %}R{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "divided": "{% for m in messages %}{% if '</think>' in m.content %}"
    "{{ m.content.split('</think>')[-1].lstrip('\\n') }}|{{ m.content.split('</think>')[0] }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "equal texts": "{% for m in messages %}{{ m.content == messages[0].content }}"
    "{{ m.content in messages[0].content }}{{ m.content }}{% endfor %}",
    "macros": "{% macro show(text, n) %}({{ n }} {{ text }}){% endmacro %}{% for m in messages %}"
    "{% set shown %}{{ show(m.content, loop.index) }}!{% endset %}"
    "{% if '(1 Hi)' in shown %}first{% endif %}{{ shown | upper }}{{ shown ~ 1 ~ m.role }}"
    "{% endfor %}",
    "state": "{% set ns = namespace(text='', last=-1) %}{% for m in messages %}"
    "{% set ns.text = ns.text + m.content + '/' %}"
    "{% if m.content.endswith('\\n') %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{{ ns.text }}{{ ns.last }}{{ ns.text[:3] }}",
    "numbers": "{% for m in messages %}{{ m.content | length }} {{ m.content.count('a') }} "
    "{{ m.content }}{% endfor %}{{ messages | length }}",
    "values": "{% for m in messages %}{{ m.content | tojson }}{{ m | tojson }}{{ m }}{% endfor %}",
    "letters": "{% for m in messages %}{% for letter in m.content %}{{ letter }}.{% endfor %}"
    "{{ m.content[0] }}{{ m.content | list | join('-') }}{% endfor %}",
    "lists": "{{ messages | map(attribute='content') | join(', ') }}"
    "{{ messages | selectattr('content', 'equalto', 'Aa') | list | length }}"
    "{% for m in messages | rejectattr('role', 'equalto', 'user') %}{{ m.content }}{% endfor %}",
    "replaced": "{% for m in messages %}{{ m.content | replace('a', 'bb') }}"
    "{{ m.content.replace('a', 'long' * 20) }}{{ '%s!' % m.content }}"
    "{{ '{}'.format(m.content) }}{% endfor %}",
    "missing": "{% for m in messages %}{{ m.content.nothing }}{{ m.content['nothing'] }}"
    "{{ m.content is mapping }}{{ m.content | default('none') }}{{ m.reasoning_content }}"
    "{{ m.content is sequence and m.content is not none }}{% endfor %}",
    "subscripts": "{% set known = {'Hi': 'H', 'Aa': 'A'} %}{% for m in messages %}"
    "{{ known[m.content] or m.content }}{{ loop[m.content] }}{% endfor %}",
    "escaped": "{% for m in messages %}{% autoescape true %}{{ m.content }}{% endautoescape %}"
    "{% endfor %}",
    "searched": "{% for m in messages %}{% if '</think>' in m.content or m.role == 'user' %}"
    "{{ m.content[m.content.index('a') :] }}{% endif %}{% endfor %}",
    "raising": "{% for m in messages %}{% if m.content == 'Aa' %}"
    "{{ raise_exception('no ' + m.content) }}{% endif %}{{ m.content }}{% endfor %}",
}

RECORDED = {*TEMPLATES} - {
    *("numbers", "values", "letters", "lists", "replaced", "subscripts", "escaped", "searched")
}


def conversations(n: int) -> list[list[Message]]:
    rng = random.Random(0)
    chats = []
    for _ in range(n):
        turns = [role(rng.choice(TEXTS)) for _ in range(rng.randint(1, 2)) for role in (user, user)]
        turns.append(assistant(rng.choice(TEXTS), reasoning_content=rng.choice(TEXTS)))
        chats.append(turns)
    return chats


MARKUP = (
    *("<think>a</think>b", "</think>", "<think>\n\n</think>\n\nHi", "[INST] x [/INST]"),
    *("<|im_end|>", "\n\n", "<tool_call>", "Hi /think", "<|channel|>final", "system", "{}"),
)
"""Texts that templates of published models ask for."""


def published_conversation(rng: random.Random) -> list[Message]:
    def text() -> str:
        return rng.choice([*TEXTS, *MARKUP])

    messages = [{"role": "system", "content": text()}] if rng.random() < 0.3 else []
    for _ in range(rng.randint(1, 2)):
        answer = assistant(text())
        if rng.random() < 0.4:
            answer[rng.choice(["reasoning_content", "thinking", "reasoning"])] = text()
        messages += [user(text()), answer]
        if rng.random() < 0.2:
            function = {"name": "weather", "arguments": {"days": 1}}
            answer["tool_calls"] = [{"type": "function", "id": "a1b2c3d4e", "function": function}]
            result = {"role": "tool", "name": "weather", "tool_call_id": "a1b2c3d4e"}
            messages += [{**result, "content": text()}, assistant(text())]
    return messages


def rendered(template: ChatTemplate, messages: Sequence[Message], **more: Any) -> str:
    try:
        return template.render(messages, add_generation_prompt=True, **more)
    except UserError as error:
        return f"error: {error}"


@pytest.mark.parametrize("name", TEMPLATES)
def test_recordings_render_as_the_template(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    template, reference = (ChatTemplate(TEMPLATES[name]) for _ in range(2))
    monkeypatch.setattr(reference._replays, "render", lambda messages, variables, run: run())
    for messages in conversations(150):
        assert rendered(template, messages) == rendered(reference, messages)


def test_recordings_render_as_published_templates(
    assets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(0)
    chats = [published_conversation(rng) for _ in range(60)]
    n_recordings = 0
    for file in sorted((assets / "templates").glob("*.jinja")):
        source = file.read_text()
        template, reference = (ChatTemplate(source, name=file.stem) for _ in range(2))
        monkeypatch.setattr(reference._replays, "render", lambda messages, variables, run: run())
        for messages in chats:
            assert rendered(template, messages) == rendered(reference, messages), file.stem
        n_recordings += any(map(any, template._replays._paths.values()))
    assert n_recordings >= 25


@pytest.mark.parametrize("name", TEMPLATES)
def test_known_paths_do_not_run_the_template(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate(TEMPLATES[name])
    messages = [user("One"), assistant("Two")]
    for _ in range(2):
        rendered(template, messages)
    runs: list[Any] = []
    run = template._run
    monkeypatch.setattr(template, "_run", lambda *args: runs.append(args) or run(*args))
    others = [user("Three"), assistant("Four")]
    assert rendered(template, others) == rendered(ChatTemplate(TEMPLATES[name]), others)
    assert bool(runs) == (name not in RECORDED)
    n_runs = len(runs)
    rendered(template, [*others, user("longer")])
    rendered(template, others, enable_thinking=True)
    rendered(template, others, tools=[{"type": "function"}])
    assert len(runs) == n_runs + 3


def test_memory_of_hostile_templates_is_bounded() -> None:
    doubling = (
        "{% set ns = namespace(text=messages[0].content) %}{% for i in range(60) %}"
        "{% set ns.text = ns.text + ns.text %}{% endfor %}{{ ns.text }}"
    )
    growing = (
        "{% set ns = namespace(text=messages[0].content) %}{% for i in range(60) %}"
        "{% set ns.text = ns.text | replace('a', 'aaaaaaaa') %}{% endfor %}{{ ns.text }}"
    )
    for source, text in ((doubling, ""), (growing, "b")):
        template = ChatTemplate(source)
        for _ in range(3):
            assert rendered(template, [user(text)]) == text
        assert "exceeds the time or memory limit" in rendered(template, [user("a")])


def test_deep_values_and_long_texts_run_the_template() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    deep: list[Any] = ["x"]
    for _ in range(5000):
        deep = [deep]
    for _ in range(3):
        assert rendered(template, [{**user("Hi"), "beside": deep}]) == "Hi"
        assert rendered(template, [user("long" * 2**19)]) == "long" * 2**19
    assert not template._replays._paths


def test_shapes_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtitan.components.chat_template import replay

    monkeypatch.setattr(replay, "_MOST_SHAPES", 3)
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    for n in [*range(1, 9), *range(1, 9)]:
        messages = [user(f"{n}")] * n
        assert rendered(template, messages) == f"{n}" * n
        rendered(template, messages)
    assert len(template._replays._seen) <= 3
    assert len(template._replays._paths) <= 3
