"""Chat templates: generation marks, built-in templates, template selection. Loss masks are tested
in `components/data/finetuning/test_chat_encoding.py`."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.components.tokenizer.helpers import load_tokenizer
from torchtitan.components.chat_template import (
    ChatTemplate,
    load_chat_template,
    resolve_chat_template,
)
from torchtitan.components.chat_template.stops import Stops
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.tools.errors import UserError

TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": " Hi <é>? "},
    {"role": "assistant", "content": "Good day.\n"},
    {"role": "user", "content": "More?"},
    {"role": "assistant", "content": "👩 No."},
]


# Marks.


def test_marks_are_spans_of_the_text() -> None:
    template = ChatTemplate(
        "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% generation %}{{ "
        "m.content }};"
        "{% endgeneration %}{% endif %}{% endfor %}"
    )
    text, spans = template.render_marked(TURNS)
    assert text == template.render(TURNS, add_generation_prompt=False)
    assert [text[start:end] for start, end in spans] == ["Good day.\n;", "👩 No.;"]
    assert template.marks_generation and not ChatTemplate("{{ 'generation' }}").marks_generation


def test_marks_in_a_macro_equal_transformers_or_raise() -> None:
    """transformers' span is wrong if a macro writes text before the mark."""
    macro = "{% macro say(text) %}FRONT{% generation %}{{ text }}{% endgeneration %}{% endmacro %}"
    leading_mark = ChatTemplate(macro.replace("FRONT", "") + "a{{ say('b') }}c{{ say('b') }}")
    assert leading_mark.render_marked(TURNS) == ("abcb", [(1, 2), (3, 4)])
    later_mark = ChatTemplate(macro + "a{{ say('b') }}", name="mine")
    assert later_mark.render(TURNS, add_generation_prompt=False) == "aFRONTb"
    with pytest.raises(UserError, match="mine uses {% generation %} inside a macro"):
        later_mark.render_marked(TURNS)


def test_template_cannot_access_the_marks() -> None:
    source = "{{ _PROGRESS }}{{ progress }}{{ marks }}{% for name in self %}{{ name }}{% endfor %}"
    with pytest.raises(UserError):
        ChatTemplate(source).render(TURNS, add_generation_prompt=False)
    assert ChatTemplate(source.split("{%")[0]).render(TURNS, add_generation_prompt=False) == ""


def test_null_keys_and_reasoning_render_as_in_transformers(stories: Path) -> None:
    transformers = pytest.importorskip("transformers")
    source = (
        "{% for m in messages %}{% for key in m | sort %}{{ key }}={{ m[key] }};{% endfor %}\n{% "
        "endfor %}"
    )
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(stories / "tokenizer.json"))
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": None, "tool_calls": None, "name": "x"},
        *(
            {"role": "assistant", "content": "a", name: "b"}
            for name in ("reasoning", "thinking", "reasoning_content")
        ),
    ]
    expected = reference.apply_chat_template(messages, chat_template=source, tokenize=False)
    assert ChatTemplate(source).render(messages, add_generation_prompt=False) == expected
    assert messages[0]["content"] is None  # the caller's messages are unchanged


def test_empty_list_of_tools_equals_none(stories: Path) -> None:
    """Llama 3.1's template tests whether the list exists, not whether it has elements."""
    transformers = pytest.importorskip("transformers")
    source = (
        "{% if not tools is defined %}{% set tools = none %}{% endif %}{{ 'Environment' if tools "
        "is not none }}"
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(stories / "tokenizer.json"))
    expected = reference.apply_chat_template(
        TURNS, tools=None, chat_template=source, tokenize=False
    )
    assert (
        reference.apply_chat_template(TURNS, tools=[], chat_template=source, tokenize=False)
        != expected
    )
    template = ChatTemplate(source)
    for nothing in (None, []):
        assert template.render(TURNS, tools=nothing, add_generation_prompt=False) == expected
        assert template.render_marked(TURNS, tools=nothing)[0] == expected


# Built-in templates.


def test_built_in_mistral_equals_mistrals_template(assets: Path) -> None:
    """Except for the system message, which Mistral's template writes with the last question."""
    folder = assets / "mistral-v0.3-tokenizer"
    own, built_in = (
        resolve_chat_template(name, [folder], load_tokenizer(folder)) for name in ("", "mistral")
    )
    for n in range(1, len(TURNS) + 1):
        assert built_in.render(TURNS[:n], add_generation_prompt=n % 2 == 1) == own.render(
            TURNS[:n], add_generation_prompt=n % 2 == 1
        )
    turns = [{"role": "system", "content": "Be kind."}, TURNS[0]]
    assert built_in.render(turns, add_generation_prompt=True) == own.render(
        turns, add_generation_prompt=True
    )
    assert built_in.render(turns + TURNS[1:], add_generation_prompt=False).startswith(
        "<s>[INST] Be kind.\n\n Hi"
    )


@pytest.mark.parametrize(
    ("name", "prompt", "answer", "rest"),
    [
        (
            "chatml",
            "<s><|im_start|>system\nBe "
            "kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
            "Ho<|im_end|>",
            "\n",
        ),
        (
            "llama3",
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe "
            "kind.<|eot_id|><|start_header_id|>user"
            "<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
            "Ho<|eot_id|>",
            "",
        ),
        ("mistral", "<s>[INST] Be kind.\n\nHi[/INST]", " Ho</s>", ""),
        ("alpaca", "<s>Be kind.\n\n### Instruction:\nHi\n\n### Response:\n", "Ho</s>", ""),
    ],
)
def test_built_in_templates(name: str, prompt: str, answer: str, rest: str, stories: Path) -> None:
    template = resolve_chat_template(name, [], load_tokenizer(stories))
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    assert template.render(messages, add_generation_prompt=True) == prompt
    messages += [{"role": "assistant", "content": "Ho"}]
    assert template.render_marked(messages) == (
        prompt + answer + rest,
        [(len(prompt), len(prompt + answer))],
    )
    [stop] = Stops(template, load_tokenizer(stories)).all()
    assert stop.text == answer.strip().removeprefix("Ho")
    # Each rendering is a prefix of the next one, so that training and inference see equal text.
    longer = [*messages, *TURNS]
    whole = template.render(longer, add_generation_prompt=False)
    for n in (2, 4, 6):
        assert whole.startswith(template.render(longer[:n], add_generation_prompt=True))


def test_alpaca_has_a_default_system_message(stories: Path) -> None:
    text = resolve_chat_template("alpaca", [], load_tokenizer(stories)).render(
        TURNS[:1], add_generation_prompt=True
    )
    assert text.startswith("<s>Below is an instruction that describes a task.")


@pytest.mark.parametrize("name", ["llama3", "mistral", "alpaca"])
def test_built_in_templates_reject_unsupported_messages(name: str, stories: Path) -> None:
    template = resolve_chat_template(name, [], load_tokenizer(stories))
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    cases: list[tuple[list[dict[str, Any]], Any]] = [
        ([TURNS[0], call], None),
        (TURNS, [{"function": {"name": "f"}}]),
    ]
    for messages, tools in cases:
        with pytest.raises(UserError, match=f"built-in chat template {name} .* tools"):
            template.render(messages, tools=tools, add_generation_prompt=False)
    with pytest.raises(UserError, match="the role tool"):
        template.render([TURNS[0], {"role": "tool", "content": "3"}], add_generation_prompt=False)


def test_built_in_template_uses_the_tokens_of_the_tokenizer(assets: Path, stories: Path) -> None:
    turns = TURNS[:2]
    rendered = {
        (name, folder.name): resolve_chat_template(name, [], load_tokenizer(folder)).render(
            turns, add_generation_prompt=False
        )
        for name in ("chatml", "alpaca")
        for folder in (stories, assets / "gpt2-tokenizer")
    }
    # GPT-2's has no BOS.
    assert rendered["chatml", "hf-converted"] == "<s>" + rendered["chatml", "gpt2-tokenizer"]
    assert rendered["alpaca", "gpt2-tokenizer"].endswith("Good day.\n<|endoftext|>")
    assert rendered["alpaca", "hf-converted"].endswith("Good day.\n</s>")
    # It needs no variables, so that other programs render equal text.
    source = resolve_chat_template("alpaca", [], load_tokenizer(stories)).source
    assert (
        ChatTemplate(source).render(turns, add_generation_prompt=False)
        == rendered["alpaca", "hf-converted"]
    )
    endless: Tokenizer = load_tokenizer(stories)
    endless.eos_id = None
    with pytest.raises(
        UserError, match="alpaca needs EOS, which the tokenizer does not define; use chatml"
    ):
        resolve_chat_template("alpaca", [], endless)


# Choice of the template.


def test_template_file(tmp_path: Path, stories: Path, assets: Path) -> None:
    tokenizer = load_tokenizer(stories)
    with pytest.raises(
        UserError,
        match=r"no chat template in .*set --chat to a file or one of: chatml, llama3, mistral, "
        r"alpaca",
    ):
        resolve_chat_template("", [stories], tokenizer, option="--chat")
    with pytest.raises(
        UserError, match="--dataloader.chat_template chatlm is neither a file.*chatml, llama3"
    ):
        resolve_chat_template("chatlm", [stories], tokenizer)
    file = tmp_path / "my.jinja"
    file.write_text("{{ bos_token }}|{{ eos_token }}|{{ messages[0].role }}")
    template = resolve_chat_template(str(file), [stories], tokenizer)
    assert template.render(TURNS, add_generation_prompt=False) == "<s>|</s>|user"
    assert (template.of_model, str(file) in template.name) == (False, True)
    # The model's folder has priority over the tokenizer's.
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    template = resolve_chat_template(str(file), [tmp_path], tokenizer)
    assert template.render(TURNS, add_generation_prompt=False) == "<s>|<end>|user"
    with pytest.raises(UserError, match="tokenizer_config.json' has no chat_template"):
        resolve_chat_template(str(tmp_path / "tokenizer_config.json"), [stories], tokenizer)
    qwen = assets / "qwen3-chat-template"
    from_file = resolve_chat_template(str(qwen / "tokenizer_config.json"), [stories], tokenizer)
    own = resolve_chat_template("", [qwen], tokenizer)
    assert own.of_model and load_chat_template(qwen) is not None
    assert from_file.render(TURNS, add_generation_prompt=True) == own.render(
        TURNS, add_generation_prompt=True
    )
    file.write_bytes(b"\xff")
    with pytest.raises(UserError, match="my.jinja"):
        resolve_chat_template(str(file), [stories], tokenizer)


def test_exported_built_in_template_is_read_from_the_model(tmp_path: Path, stories: Path) -> None:
    transformers = pytest.importorskip("transformers")
    shutil.copy(stories / "tokenizer.json", tmp_path)
    template = resolve_chat_template("mistral", [], load_tokenizer(stories))
    (tmp_path / "chat_template.jinja").write_text(template.source, encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    expected = template.render(TURNS, add_generation_prompt=False)
    assert (
        transformers.AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
            TURNS, tokenize=False
        )
        == expected
    )
    own = resolve_chat_template("", [tmp_path], load_tokenizer(tmp_path))
    assert own.render(TURNS, add_generation_prompt=False) == expected


def ending(text: str, mark: bool = False) -> str:
    """Return a template with line ends and blanks that Jinja partly strips."""
    body = "{% generation %}{{ m.content }}{% endgeneration %}" if mark else "{{ m.content }}"
    return (
        f"\n  {{{{ bos_token }}}}{text}\n{{% for m in messages %}}\n  {body} \n{{% endfor %}}\n  \n"
    )


def named(**templates: str) -> str:
    declared = [{"name": name, "template": text} for name, text in templates.items()]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "chat_template": declared,
    }
    return json.dumps(settings)


@pytest.mark.parametrize("as_files", [False, True])
def test_choice_of_named_templates_equals_transformers(
    as_files: bool, tmp_path: Path, stories: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    shutil.copy(stories / "tokenizer.json", tmp_path)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    default, tool_use = ending("none"), ending("{{ tools | tojson }}")
    (tmp_path / "tokenizer_config.json").write_text(
        named(default=default, tool_use=tool_use, rag="x")
    )
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    if as_files:
        reference.save_pretrained(tmp_path)
        assert (tmp_path / "additional_chat_templates" / "tool_use.jinja").is_file()
    template = load_chat_template(tmp_path)
    assert template is not None
    exported = tmp_path / "exported"
    exported.mkdir()
    (exported / "chat_template.jinja").write_text(template.source)
    again = load_chat_template(exported, tmp_path)
    assert again is not None
    for available in (None, tools):
        expected = reference.apply_chat_template(TURNS, tools=available, tokenize=False)
        assert ("parameters" in expected) == (available is not None)
        for either in (template, again):
            assert either.render(TURNS, tools=available, add_generation_prompt=False) == expected


def test_the_template_of_an_older_processor_comes_last(tmp_path: Path) -> None:
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": ending("old")}))
    found = load_chat_template(tmp_path)
    assert found is not None and "chat_template.json" in found.name
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": ending("new")}))
    found = load_chat_template(tmp_path)
    assert found is not None and found.source == ending("new")


def test_unusable_named_templates(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer_config.json"
    file.write_text(named(rag="x", tool_use="y"))
    with pytest.raises(UserError, match="the chat templates rag, tool_use, but none named default"):
        load_chat_template(tmp_path)
    file.write_text(named(default="x", tool_use="{% if %}"))
    with pytest.raises(
        UserError, match="the chat template tool_use in .* is not valid Jinja, line 1"
    ):
        load_chat_template(tmp_path)
    file.write_text(named(default=ending("x", mark=True), tool_use=ending("y")))
    with pytest.raises(
        UserError, match="only one of the chat templates default and tool_use in .* marks"
    ):
        load_chat_template(tmp_path)
    file.write_text(named(default=ending("x", mark=True), tool_use=ending("y", mark=True)))
    template = load_chat_template(tmp_path)
    assert template is not None and template.marks_generation
    text, spans = template.render_marked(TURNS, tools=[{}])
    assert "y" in text and [text[start:end] for start, end in spans] == [
        turn["content"] for turn in TURNS
    ]
