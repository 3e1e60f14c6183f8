"""Calls in the notations of published templates: what a template writes is read back."""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.components.chat_template.generic import published
from torchtitan.components.chat_template import ChatTemplate
from torchtitan.components.chat_template.call_trials import find_calls
from torchtitan.components.chat_template.calls import (
    CallMarks,
    JsonArguments,
    KeyedArguments,
    LiteralArguments,
    NamedCalls,
    typed,
)
from torchtitan.components.chat_template.literals import LiteralError, Literals
from torchtitan.components.chat_template.replies import ReplyFormat
from torchtitan.components.chat_template.stops import Stops
from torchtitan.components.rollout.chat import Chat
from torchtitan.components.serving.prompts import Preparer
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.tools.errors import UserError

Named = tuple[str, Mapping[str, Any]]

QUESTION = {"role": "user", "content": "What is it?"}
PROPERTIES: dict[str, Any] = {
    "text": {"type": "string", "description": "A text."},
    "count": {"type": "integer", "description": "A count."},
    "ratio": {"type": "number", "description": "A ratio."},
    "flag": {"type": "boolean", "description": "A flag."},
    "items": {"type": "array", "description": "A list.", "items": {"type": "string"}},
    "nested": {"type": "object", "description": "An object.", "properties": {}},
    "maybe": {"type": ["string", "null"], "description": "A text or nothing."},
}


def tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": PROPERTIES, "required": ["text"]}
    function = {"name": name, "description": "Does it.", "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [tool(name) for name in ("find", "add-2.x", "now")]

CALLS: dict[str, list[Named]] = {
    "types": [
        (
            "find",
            {
                "text": "a",
                "count": -5,
                "ratio": 1.5,
                "flag": True,
                "items": [1, "x", None, [], False],
                "nested": {"k": "v", "z": False, "d": {"e": [{}]}, "n": "a\nb"},
                "maybe": None,
            },
        )
    ],
    "quotes": [
        ("find", {"text": 'say "hi", it\'s\n\n  {"a": 1}\ttab é 🙂', "items": ["a'b", 'c"d']})
    ],
    "backslashes": [("find", {"text": "\\n C:\\new\\"})],
    "spaces": [("find", {"text": " before and after\n"})],
    "empty": [("find", {"text": ""})],
    "looks like another type": [("find", {"text": "5"}), ("find", {"text": "true"})],
    "marks": [
        (
            "find",
            {
                "text": "</tool_call> <tool_call> <|tool_call_end|> </parameter> </arg_value> "
                "<arg_key>a ```json [ARGS] ) ] } "
            },
        )
    ],
    "no arguments": [("now", {})],
    "parallel": [("find", {"text": "x"}), ("now", {}), ("add-2.x", {"count": 3, "text": "y z"})],
}

JSON: dict[str, type] = dict.fromkeys(
    (
        *("Apriel-1.6-15b-Thinker-fixed", "Cohere2MoE", "NVIDIA-Nemotron-Nano-v2"),
        *("NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", "Qwen-Qwen2.5-7B-Instruct"),
        *("Qwen-Qwen3-0.6B", "ibm-granite-granite-4.0", "meta-llama-Llama-3.1-8B-Instruct"),
        *("meta-llama-Llama-3.2-3B-Instruct", "mistralai-Mistral-Nemo-Instruct-2407"),
        *("unsloth-Apriel-1.5", "CohereForAI-c4ai-command-r-plus-tool_use"),
        *("TRL's qwen3_instruct_2507", "qwen3", "chatml"),
    ),
    CallMarks,
)
NAMED: dict[str, type] = {
    **dict.fromkeys(
        (
            *("Mistral-Small-3.2-24B-Instruct-2506", "deepseek-ai-DeepSeek-R1-Distill-Llama-8B"),
            *("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "deepseek-ai-DeepSeek-V3.1"),
            *("llama-cpp-deepseek-r1", "meetkai-functionary-medium-v3.1", "moonshotai-Kimi-K2"),
            *("openai-gpt-oss-120b", "gpt-oss", "TRL's deepseekv3"),
        ),
        JsonArguments,
    ),
    **dict.fromkeys(
        (
            *("GLM-4.6", "MiniMax-M2", "Qwen3.5-4B", "StepFun3.5-Flash", "poolside-Laguna-S-2.1"),
            *("TRL's glm4moe", "TRL's nemotron_3_nano", "TRL's nemotron_3_super"),
            *("TRL's nemotron_3_ultra", "TRL's qwen3_5_nothink", "TRL's qwen3_8"),
        ),
        KeyedArguments,
    ),
    **dict.fromkeys(
        ("LFM2.5-8B-A1B", "google-gemma-4-31B-it", "TRL's lfm2_v2", "TRL's lfm2_2_5_v2"),
        LiteralArguments,
    ),
}
UNREAD = ("Kimi-K2-Instruct", "Kimi-K2-Thinking")
"""Templates that show tools, but write no calls: llama.cpp's of Kimi change lists, which the sandbox
forbids here and in transformers."""

GRANITE = "ibm-granite-granite-3.3-2B-Instruct"
UNWRITTEN = {
    ("LFM2-8B-A1B", '<|tool_call_start|>[find(text="it\'s", count=3), now()]<|tool_call_end|>'),
    ("LFM2-8B-A1B", "<|tool_call_start|>[find(text='it\\'s', count=3), now()]<|tool_call_end|>"),
    (
        GRANITE,
        '<|tool_call|>[{"name": "find", "arguments": {"text": "it\'s", "count": 3}}, '
        '{"name": "now", "arguments": {}}]',
    ),
    (
        GRANITE,
        '<|tool_call|> [{"arguments": {"text": "it\'s", "count": 3}, "name": "find"}, '
        '{"name": "now", "arguments": {}}]\n',
    ),
}
"""Templates that show tools, but write no calls, and calls as their models write them, according to
their cards and prompts."""

REJECTED = {
    "CohereForAI-c4ai-command-r-plus-tool_use": set(CALLS),  # schemas of lists and objects
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": set(CALLS),  # a list of types
    **dict.fromkeys(
        ("meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.2-3B-Instruct"),
        {"parallel", "looks like another type"},
    ),
    # Its template writes the stop after each call but the first.
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": {"parallel", "looks like another type"},
    # Of several calls, the template writes the first.
    **dict.fromkeys(("openai-gpt-oss-120b", "gpt-oss"), {"parallel", "looks like another type"}),
}
"""Template → calls that it rejects, or does not write as a model would."""

SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in (*JSON, *NAMED)]


def written(
    template: ChatTemplate, stops: Stops, calls: Sequence[Named], tools: Sequence[Any]
) -> tuple[str, str] | None:
    """Return a generation prompt, and what a template writes after it for a turn with calls. The
    prompt is empty, and the text begins after the question, if the turn does not continue it."""
    for content, as_text in (("", False), ("", True), (None, False), (None, True)):
        made = [
            {
                "id": f"callbbbb{number}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(given) if as_text else given},
            }
            for number, (name, given) in enumerate(calls)
        ]
        turn = {"role": "assistant", "content": content, "tool_calls": made}
        try:
            prompt = template.render([QUESTION], tools=tools, add_generation_prompt=True)
            whole = template.render(
                [QUESTION, turn],
                tools=tools,
                add_generation_prompt=False,
                null_content=content is None,
            )
        except UserError:
            continue
        is_continued = whole.startswith(prompt)
        start = len(prompt) if is_continued else whole.rindex(QUESTION["content"])
        text = whole[start:].removesuffix(stops.trailer({}, has_tools=True))
        if all(name in text for name, _ in calls):
            stop = stops.of("call", {})
            assert stop
            text = text if stop.lead is not None else text.rpartition(stop.text)[0]
            return prompt if is_continued else "", text
    return None


def read(
    replies: ReplyFormat, tokenizer: PretrainedTokenizer, prompt: str, text: str, size: int
) -> tuple[list[Named], dict[str, str]]:
    """Read a text in pieces, without the special tokens that are not kept."""
    kept = replies.kept(with_calls=True)
    for token in tokenizer.special_ids - kept.keys():
        text = text.replace(tokenizer.decode([token]), "")
    reader = replies.reader(prompt, TOOLS, reads_calls=True)
    starts = range(0, len(text), size)
    parts = [*(reader.push(text[start : start + size]) for start in starts), reader.finish()]
    calls = [(call.name, json.loads(call.arguments)) for part in parts for call in part.calls]
    kinds = {kind for part in parts for kind in part.texts}
    return calls, {kind: "".join(part.texts.get(kind, "") for part in parts) for kind in kinds}


@pytest.mark.parametrize("name", SLOW)
def test_calls_that_a_template_writes_are_read(name: str, assets: Path) -> None:
    template, tokenizer = published(name, assets / "templates")
    replies, stops = ReplyFormat(template, tokenizer), Stops(template, tokenizer)
    notation = replies.calls
    if name in JSON:
        assert isinstance(notation, CallMarks)
    else:
        assert isinstance(notation, NamedCalls) and type(notation.arguments) is NAMED[name]
    assert not replies.unread_calls
    rejected = set()
    for case, calls in CALLS.items():
        found = written(template, stops, calls, TOOLS)
        if found is None or case in REJECTED.get(name, ()):
            rejected.add(case)
            continue
        prompt, text = found
        if not prompt:
            text = text[text.index(notation.opening) :]
        for size in (len(text), 3):
            [read_calls, texts] = read(replies, tokenizer, prompt, text, size)
            assert read_calls == calls, (case, text, texts)
            assert not texts.get("content", "").strip()
    assert rejected == REJECTED.get(name, set())


@pytest.mark.parametrize(
    "name",
    [
        *("GLM-4.6", "Qwen3.5-4B", "openai-gpt-oss-120b", "LFM2.5-8B-A1B", "qwen3"),
        *("Mistral-Small-3.2-24B-Instruct-2506", "deepseek-ai-DeepSeek-V3.1"),
    ],
)
def test_a_call_can_be_begun_for_the_model(name: str, templates: Path) -> None:
    """The beginning closes reasoning that the prompt opens (Qwen3.5)."""
    template, tokenizer = published(name, templates)
    replies, stops = ReplyFormat(template, tokenizer), Stops(template, tokenizer)
    assert replies.calls and replies.calls.before_name is not None
    found = written(template, stops, CALLS["quotes"], TOOLS)
    assert found
    prompt, text = found
    begun = f"{replies.calls.before_name}find{replies.calls.after_name}"
    assert text.startswith(begun)
    reader = replies.reader(prompt, TOOLS, reads_calls=True, begun=begun)
    pieces = [reader.push(text.removeprefix(begun)), reader.finish()]
    [call] = [call for piece in pieces for call in piece.calls]
    assert (call.name, json.loads(call.arguments)) == CALLS["quotes"][0]
    assert not any(piece.texts for piece in pieces)


@pytest.mark.parametrize(("name", "text"), sorted(UNWRITTEN))
def test_calls_that_a_template_does_not_write(name: str, text: str, templates: Path) -> None:
    template, tokenizer = published(name, templates)
    replies = ReplyFormat(template, tokenizer)
    assert not replies.unread_calls
    for size in (len(text), 3):
        calls, texts = read(replies, tokenizer, "", text, size)
        assert calls == [("find", {"text": "it's", "count": 3}), ("now", {})]
        assert not texts.get("content", "").strip()
    assert read(replies, tokenizer, "", "It is 3.", 3) == ([], {"content": "It is 3."})
    notation = replies.calls
    assert notation is not None and notation.before_name is not None
    begun = f"{notation.before_name}find{notation.after_name}"
    if name == GRANITE:
        begun_text = begun + '{"text": "x"}}]'
    else:
        begun_text = begun + "text='x')]<|tool_call_end|>"
    reader = replies.reader("", TOOLS, reads_calls=True, begun=begun)
    parts = [reader.push(begun_text.removeprefix(begun)), reader.finish()]
    [call] = [call for part in parts for call in part.calls]
    assert (call.name, json.loads(call.arguments)) == ("find", {"text": "x"})


def test_a_notation_is_read(templates: Path) -> None:
    """A value ends at its closing mark if the structure goes on; other text around calls, or in
    them, leaves the whole in the content."""
    template, tokenizer = published("GLM-4.6", templates)
    replies = ReplyFormat(template, tokenizer)
    whole = (
        "Let me see.\n<tool_call>find\n<arg_key>text</arg_key>\n<arg_value>1</arg_value>\n"
        "<arg_key>count</arg_key>\n<arg_value>1</arg_value>\n"
        "<arg_key>other</arg_key>\n<arg_value>x</arg_value>\n</tool_call>"
    )
    calls, texts = read(replies, tokenizer, "", whole, 5)
    assert calls == [("find", {"text": "1", "count": 1, "other": "x"})]
    assert texts == {"content": "Let me see."}
    for broken in (
        whole + " and more",
        whole.removesuffix("<arg_value>x</arg_value>\n</tool_call>"),
        whole.replace("find", "find it"),
    ):
        calls, texts = read(replies, tokenizer, "", broken, 5)
        assert calls == [] and texts == {"content": broken}


@pytest.fixture
def templates(assets: Path) -> Path:
    return assets / "templates"


@pytest.mark.parametrize("name", UNREAD)
def test_calls_that_cannot_be_read_are_told(
    name: str, templates: Path, caplog: pytest.LogCaptureFixture
) -> None:
    template, tokenizer = published(name, templates)
    replies = ReplyFormat(template, tokenizer)
    assert replies.calls is None
    assert f"{name} shows tools to the model, but writes no calls" in replies.unread_calls
    preparer = Preparer(tokenizer, [], context=9, vocab_size=9, template=template)
    assert preparer.unread_calls == replies.unread_calls
    chat = Chat(template, tokenizer)
    with caplog.at_level(logging.WARNING):
        for tools in (TOOLS, TOOLS, ()):
            chat.encode([QUESTION], tools)
    assert [record.getMessage() for record in caplog.records] == [replies.unread_calls]


def test_templates_without_tools_need_no_words(templates: Path) -> None:
    for name in ("google-gemma-2-2b-it", "phi-3", "HuggingFaceTB-SmolLM3-3B"):
        template, tokenizer = published(name, templates)
        assert find_calls(template, Stops(template, tokenizer), []) is None
        assert ReplyFormat(template, tokenizer).unread_calls == ""


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {"type": "string"}, "5"),
        ("5", {"type": "integer"}, 5),
        ("5", {"type": ["string", "null"]}, "5"),
        ("null", {"type": ["string", "null"]}, None),
        ("None", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("True", {"type": "boolean"}, True),
        ("true", {"type": "string"}, "true"),
        ("true", {"type": ["boolean", "string"]}, True),
        ("1.5", {"type": ["number", "string"]}, 1.5),
        ("1", {"enum": ["1", "2"]}, "1"),
        (' [1, "x"]\n', {"type": "array"}, [1, "x"]),
        ("[1, 'x']", {"type": "array"}, "[1, 'x']"),  # no JSON: as the model wrote it
        ("5", {}, 5),
        ("five", {}, "five"),
        ("five", {"type": "integer"}, "five"),
        ("NaN", {"type": "number"}, "NaN"),
        ("[" * 5000, {"type": "array"}, "[" * 5000),
    ],
)
def test_values_without_quotes_have_types_of_the_schema(
    text: str, schema: dict[str, Any], value: object
) -> None:
    found = typed(text, schema)
    assert found == value and type(found) is type(value)


def test_schemas_may_refer_to_others_and_be_anything() -> None:
    """As pydantic writes enumerations, optional and nested ones; `true` is a schema, and a client
    may send what is none."""
    root = {
        "$ref": "#/$defs/All",
        "$defs": {
            "Size": {"enum": ["1", "2"], "type": "string"},
            "All": {
                "properties": {
                    "one": {"$ref": "#/$defs/Size"},
                    "default": {"allOf": [{"$ref": "#/$defs/Size"}], "default": "1"},
                    "optional": {"anyOf": [{"$ref": "#/$defs/Size"}, {"type": "null"}]},
                    "fixed": {"const": "1"},
                    "number": {"$ref": "#/$defs/a~1b%20c"},
                    "any": True,
                    "loop": {"anyOf": [{"$ref": "#"}, {"$ref": "#/$defs/All/properties/loop"}]},
                    "away": {"$ref": "https://example.com/schema"},
                    "missing": {"$ref": "#/$defs/No/thing"},
                }
            },
            "a/b c": {"type": "integer"},
        },
    }
    keys = [*root["$defs"]["All"]["properties"], "x"]  # type: ignore[index]
    text = "".join(f"<parameter={key}>1</parameter>" for key in keys)
    arguments = KeyedArguments("<parameter=", ">", "</parameter>", "")
    found, end = arguments.read(text, 0, root)
    texts = {key for key, value in found.items() if value == "1"}
    assert end == len(text) and texts == {"one", "default", "optional", "fixed"}
    assert all(value == 1 for key, value in found.items() if key not in texts)
    for wrong in (5, "text", [], [{"type": "string"}], None, {"properties": [1]}, {"anyOf": 5}):
        for schema in (wrong, {"properties": {"a": wrong}}, {"properties": wrong}):
            assert arguments.read("<parameter=a>1</parameter>", 0, schema)[0] == {"a": 1}
    for key in ("type", "enum", "anyOf", "oneOf", "allOf", "$ref", "const", "properties"):
        for wrong in (5, True, None, [[1]], {"a": 1}, [None], {}):
            assert typed("1", {key: wrong}) == 1


@pytest.mark.parametrize("value", ["1e999", r'"\ud800"', r'["\udfff"]'])
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (JsonArguments(), '{"a": VALUE}'),
        (KeyedArguments("<key=", ">", "</key>", ""), "<key=a>VALUE</key>"),
        (LiteralArguments(Literals('"', "=", escapes=True), ")"), "a=VALUE)"),
    ],
)
def test_what_json_cannot_carry_is_no_call(arguments: Any, text: str, value: str) -> None:
    notation = NamedCalls("<call>", "<call>", r"\s*", arguments, frozenset(), None, "")
    assert notation.read("<call>f " + text.replace("VALUE", "1"), {}) is not None
    assert notation.read("<call>f " + text.replace("VALUE", value), {}) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (")", {}),
        ("a=1, b=-2.5e3, c=True, d=null)", {"a": 1, "b": -2500.0, "c": True, "d": None}),
        ("a='it\\'s', b=\"x\\ny\")", {"a": "it's", "b": "x\ny"}),
        ("a='it's', b='c, d=\"e\"')", {"a": "it's", "b": 'c, d="e"'}),
        ("a=[1, 'x', {'k': [], \"j\": false}], )", {"a": [1, "x", {"k": [], "j": False}]}),
        ("a='\\u00e9\\x41')", {"a": "éA"}),
        ("a=b)", None),
        ("a=1", None),
        ("a='x", None),
        ("1)", None),
        ("a=[1)", None),
    ],
)
def test_literals(text: str, expected: dict[str, Any] | None) -> None:
    literals = Literals("'", "=", escapes=True)
    if expected is None:
        with pytest.raises(LiteralError):
            literals.pairs(text, 0, ")")
    else:
        assert literals.pairs(text + "rest", 0, ")") == (expected, len(text))
