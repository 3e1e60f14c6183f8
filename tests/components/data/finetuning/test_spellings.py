"""Every spelling of reasoning and tool calls gives one normal form; what would be lost is
refused."""

import json

import pytest

from tests.components.data.helpers import raises
from torchtitan.components.chat_template import ChatTemplate
from torchtitan.components.data.finetuning.conversation import (
    BrokenSample,
    Conversation,
    EmptySample,
    normalize,
)
from torchtitan.components.data.finetuning.row_formats import find_format
from torchtitan.components.data.finetuning.spellings.reader import openai_messages
from torchtitan.components.data.finetuning.spellings.reasoning import split_reasoning

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "Weather of a city", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]
PARIS, ROME = {"city": "Paris"}, {"city": "Rome"}
THOUGHT, SAID, ANSWER = "Both cities.", "I look it up.", "Sun in Paris, rain in Rome."
QUESTION = {"role": "user", "content": "Weather in Paris and Rome?"}


def converted(row: dict, kind: str = "sft", **mapping: str) -> Conversation:
    return find_format(list(row), "auto", mapping, kind).convert(row)


def calling(name: str, arguments: dict, id: str) -> dict:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def normal(first: str = "a", second: str = "b", **changes) -> list[dict]:
    """The normal form of one conversation with parallel calls."""
    asked = {
        "role": "assistant",
        "content": SAID,
        "reasoning_content": THOUGHT,
        "tool_calls": [calling("weather", PARIS, first), calling("weather", ROME, second)],
        **changes,
    }
    return [
        QUESTION,
        {key: value for key, value in asked.items() if value != ""},
        {"role": "tool", "content": "sun", "tool_call_id": first},
        {"role": "tool", "content": "rain", "tool_call_id": second},
        {"role": "assistant", "content": ANSWER},
    ]


def openai(reasoning: dict, arguments=json.dumps) -> list[dict]:
    calls = [("a", PARIS), ("b", ROME)]
    functions = [(id, {"name": "weather", "arguments": arguments(given)}) for id, given in calls]
    return [
        QUESTION,
        {
            "role": "assistant",
            "content": SAID,
            "tool_calls": [
                {"id": id, "type": "function", "function": function} for id, function in functions
            ],
            **reasoning,
        },
        {"role": "tool", "tool_call_id": "a", "content": "sun"},
        {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "rain"}]},
        {"role": "assistant", "content": [{"type": "text", "text": ANSWER}]},
    ]


ANTHROPIC = [
    QUESTION,
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": THOUGHT, "signature": "x"},
            {"type": "text", "text": SAID},
            {"type": "tool_use", "id": "a", "name": "weather", "input": PARIS},
            {"type": "tool_use", "id": "b", "name": "weather", "input": ROME},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": "sun"},
            {
                "type": "tool_result",
                "tool_use_id": "b",
                "content": [{"type": "text", "text": "rain"}],
            },
        ],
    },
    {"role": "assistant", "content": [{"type": "text", "text": ANSWER}]},
]

RESPONSES = [
    {
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": QUESTION["content"]}],
    },
    {
        "type": "reasoning",
        "id": "rs",
        "summary": [{"type": "summary_text", "text": THOUGHT}],
        "encrypted_content": None,
    },
    {
        "type": "message",
        "id": "m",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": SAID, "annotations": []}],
    },
    {
        "type": "function_call",
        "id": "fc",
        "call_id": "a",
        "name": "weather",
        "arguments": json.dumps(PARIS),
    },
    {
        "type": "function_call",
        "id": "fd",
        "call_id": "b",
        "name": "weather",
        "arguments": json.dumps(ROME),
    },
    {"type": "function_call_output", "call_id": "a", "output": "sun"},
    {
        "type": "function_call_output",
        "call_id": "b",
        "output": [{"type": "input_text", "text": "rain"}],
    },
    {"role": "assistant", "content": ANSWER},
]

AI_SDK = [
    QUESTION,
    {
        "role": "assistant",
        "content": [
            {"type": "reasoning", "text": THOUGHT},
            {"type": "text", "text": SAID},
            {"type": "tool-call", "toolCallId": "a", "toolName": "weather", "input": PARIS},
            {"type": "tool-call", "toolCallId": "b", "toolName": "weather", "args": ROME},
        ],
    },
    {
        "role": "tool",
        "content": [
            {"type": "tool-result", "toolCallId": "a", "output": {"type": "text", "value": "sun"}},
            {"type": "tool-result", "toolCallId": "b", "result": "rain"},
        ],
    },
    {"role": "assistant", "content": ANSWER},
]


def tagged(call: dict) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'weather', 'arguments': call})}\n</tool_call>"


HERMES = [
    {"from": "human", "value": QUESTION["content"]},
    {
        "from": "gpt",
        "value": f"<think>\n{THOUGHT}\n</think>\n{SAID}\n{tagged(PARIS)}\n{tagged(ROME)}",
    },
    {
        "from": "tool",
        "value": "<tool_response>\nsun\n</tool_response>\n<tool_response>\nrain\n</tool_response>",
    },
    {"from": "gpt", "value": ANSWER},
]

PYTHON = [
    HERMES[0],
    {
        "from": "gpt",
        "value": f"{SAID}<tool_call>{{'name': 'weather', 'arguments': {PARIS!r}}}</tool_call>"
        f"<tool_call>{[{'name': 'weather', 'arguments': ROME}]}</tool_call>",
        "thoughts": THOUGHT,
    },
    {"from": "observation", "value": "sun"},
    {"from": "observation", "value": "rain"},
    HERMES[3],
]

SHAREGPT = [
    HERMES[0],
    {"from": "gpt", "value": SAID, "reasoning": THOUGHT},
    {"from": "function_call", "value": json.dumps({"name": "weather", "arguments": PARIS})},
    {
        "from": "function_call",
        "value": json.dumps({"name": "weather", "arguments": json.dumps(ROME)}),
    },
    {"from": "observation", "value": "sun"},
    {"from": "observation", "value": "rain"},
    HERMES[3],
]


@pytest.mark.parametrize(
    ("turns", "ids"),
    [
        *(
            (openai(reasoning), ("a", "b"))
            for reasoning in (
                {"reasoning_content": THOUGHT},
                {"reasoning": THOUGHT},
                {"thinking": THOUGHT},
                {"thought": THOUGHT},
                {"thoughts": THOUGHT},
                {"analysis": THOUGHT},
                {"reasoning": {"summary": [{"type": "summary_text", "text": THOUGHT}]}},
                {
                    "reasoning_details": [
                        {"type": "reasoning.text", "text": THOUGHT, "signature": "x"}
                    ]
                },
                {
                    "reasoning_details": [{"type": "reasoning.summary", "summary": THOUGHT}],
                    "reasoning": THOUGHT,
                },
                {
                    "reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}],
                    "reasoning": THOUGHT,
                },
                {
                    "reasoning_content": THOUGHT,
                    "thinking": f" {THOUGHT}\n",
                    "reasoning": None,
                    "thought": "",
                },
                {
                    "content": [
                        {"type": "reasoning", "reasoning": THOUGHT},
                        {"type": "text", "text": SAID},
                    ]
                },
                {
                    "content": [
                        {"type": "thinking", "thinking": [{"type": "text", "text": THOUGHT}]},
                        SAID,
                    ]
                },
                *(
                    {"content": f"{opening}{THOUGHT}{closing}{SAID}"}
                    for opening, closing in (
                        ("<think>\n", "\n</think>\n\n"),
                        ("\n<thinking>", "</thinking>"),
                        ("<reasoning>", "</reasoning> "),
                        ("<thought>", "</thought>"),
                        ("[THINK]", "[/THINK]"),
                        ("<|begin_of_thought|>\n\n", "\n\n<|end_of_thought|>\n\n"),
                    )
                ),
            )
        ),
        (openai({"reasoning_content": THOUGHT}, dict), ("a", "b")),
        (ANTHROPIC, ("a", "b")),
        (RESPONSES, ("a", "b")),
        (AI_SDK, ("a", "b")),
        (HERMES, ("call00000", "call00001")),
        (PYTHON, ("call00000", "call00001")),
        (SHAREGPT, ("call00000", "call00001")),
    ],
)
def test_one_normal_form(turns, ids):
    before = json.dumps(turns)
    assert converted({"messages": turns, "tools": TOOLS}) == Conversation(normal(*ids), TOOLS)
    assert converted(
        {"conversations": json.dumps(turns), "tools": json.dumps(TOOLS)}
    ).messages == normal(*ids)
    assert json.dumps(turns) == before  # the row is not changed


@pytest.mark.parametrize(
    "turns", [openai({"thought": THOUGHT}), ANTHROPIC, RESPONSES, AI_SDK, HERMES, SHAREGPT]
)
def test_spellings_in_a_template_with_tools(assets, turns):
    """Qwen3's template writes what its model generates, whatever the spelling."""
    known = json.loads((assets / "qwen3-chat-template" / "tokenizer_config.json").read_text())
    template = ChatTemplate(known["chat_template"])
    conversation = converted({"messages": turns, "tools": TOOLS})
    text = template.render(
        conversation.messages, tools=conversation.tools, add_generation_prompt=False
    )
    _, _, dialog = text.partition("<|im_start|>user\n")
    assert dialog == (
        f"{QUESTION['content']}<|im_end|>\n"
        f"<|im_start|>assistant\n<think>\n{THOUGHT}\n</think>\n\n{SAID}\n"
        f"{tagged(PARIS)}\n{tagged(ROME)}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nsun\n</tool_response>\n"
        "<tool_response>\nrain\n</tool_response><|im_end|>\n"
        f"<|im_start|>assistant\n<think>\n\n</think>\n\n{ANSWER}<|im_end|>\n"
    )
    assert json.dumps(TOOLS[0]) in text


def test_calls_without_text():
    parts = [{"type": "tool_use", "id": "a", "name": "weather", "input": PARIS}]
    expected = {
        "role": "assistant",
        "content": None,
        "tool_calls": [calling("weather", PARIS, "a")],
    }
    assert (
        converted({"messages": [QUESTION, {"role": "assistant", "content": parts}]}).messages[1]
        == expected
    )
    thinking = [{"type": "thinking", "thinking": THOUGHT}, *parts]
    [_, message] = converted(
        {"messages": [QUESTION, {"role": "assistant", "content": thinking}]}
    ).messages
    assert message == {**expected, "reasoning_content": THOUGHT}
    text = {"role": "assistant", "content": tagged(PARIS)}
    [_, message] = converted({"messages": [QUESTION, text]}).messages
    assert (message["content"], message["tool_calls"][0]["function"]["arguments"]) == (None, PARIS)
    value = f"<think>{THOUGHT}</think>{json.dumps({'name': 'weather', 'arguments': PARIS})}"
    [_, message] = converted(
        {"conversations": [HERMES[0], {"from": "function_call", "value": value}]}
    ).messages
    assert message == {
        **expected,
        "reasoning_content": THOUGHT,
        "tool_calls": [calling("weather", PARIS, "call00000")],
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a</think>b <think>c</think>", ("a", "b <think>c</think>")),
        ("<think>\n\n</think>\n\nb", ("", "b")),
        (
            "<|begin_of_thought|>a<|end_of_thought|>\n"
            "<|begin_of_solution|>\nb\n<|end_of_solution|>",
            ("a", "b"),
        ),
        ("<think>a</think><answer>b</answer>", ("a", "<answer>b</answer>")),
        ("<think>a", None),  # the closing tag is missing
        ("<think>a <think>b</think> c</think>d", None),  # ambiguous
        ("b <think>a</think>", None),
        ("<thinker>a</thinker>b", None),
        ("a</think>b", None),
    ],
)
def test_tags_at_the_beginning(text, expected):
    assert split_reasoning(text) == expected
    [_, message] = converted(
        {"messages": [QUESTION, {"role": "assistant", "content": text}]}
    ).messages
    reasoning, content = expected or ("", text)
    assert (message.get("reasoning_content", ""), message["content"]) == (reasoning, content)
    # Templates without a place for reasoning write the text as it is.
    assert message.get("written") == (text if reasoning else None)


CONTENTS = (
    "Hi [x] <b>",
    " <think>Why.</think> Yes.",
    "<think></think>Yes.",
    "[THINK]Why.[/THINK]Yes.",
    "<think>Never closed",
    '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>',
    "<tool_call>no end",
    "<tool_response>7</tool_response>",
    "",
)


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
@pytest.mark.parametrize("content", CONTENTS)
def test_a_null_key_changes_nothing(role, content):
    """Turns with a role and a text alone are not searched for other keys."""

    def read(**more):
        try:
            return normalize(openai_messages([{"role": role, "content": content, **more}]))
        except BrokenSample as error:
            return str(error)

    assert read() == read(name=None)


def test_tags_of_the_user_stay():
    turns = [
        {"role": "user", "content": "<think>a</think>b"},
        {"role": "assistant", "content": "c"},
    ]
    assert converted({"messages": turns}).messages == turns


def test_results_in_another_order():
    turns = openai({"reasoning_content": THOUGHT})
    turns[2], turns[3] = turns[3], turns[2]
    found = converted({"messages": turns}).messages
    assert [message.get("tool_call_id") for message in found] == [None, None, "b", "a", None]
    names = [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]
    results = [
        {"role": "tool", "name": "g", "content": "1"},
        {"role": "tool", "name": "f", "content": "2"},
    ]
    found = converted(
        {"messages": [QUESTION, {"role": "assistant", "tool_calls": names}, *results]}
    ).messages
    f, g = (call["id"] for call in found[1]["tool_calls"])
    assert [message["tool_call_id"] for message in found[2:]] == [g, f]


def test_results_give_ids_to_calls_without():
    calls = [{"name": "weather", "arguments": PARIS}, {"name": "weather", "arguments": ROME}]
    results = [{"role": "tool", "tool_call_id": id, "content": id} for id in ("x", "y")]
    found = converted(
        {"messages": [QUESTION, {"role": "assistant", "tool_calls": calls}, *results]}
    ).messages
    assert [call["id"] for call in found[1]["tool_calls"]] == ["x", "y"]


def test_results_between_texts_of_the_user():
    turns = [
        *ANTHROPIC[:2],
        {"role": "user", "content": [*ANTHROPIC[2]["content"], {"type": "text", "text": "Go on"}]},
    ]
    turns[2]["content"][1] = {**turns[2]["content"][1], "is_error": True}
    found = converted({"messages": [*turns, ANTHROPIC[3]]}).messages
    assert [(message["role"], message["content"]) for message in found[2:]] == [
        ("tool", "sun"),
        ("tool", "rain"),
        ("user", "Go on"),
        ("assistant", ANSWER),
    ]
    assert [message.get("is_error") for message in found[2:4]] == [None, True]


def test_results_as_objects():
    turns = [*openai({})[:2], {"role": "tool", "tool_call_id": "a", "content": {"sky": "sun ☀"}}]
    assert converted({"messages": turns}).messages[2]["content"] == '{"sky": "sun ☀"}'


def test_results_of_calls_in_an_unknown_form_stay():
    turns = [
        QUESTION,
        {"role": "assistant", "content": "[weather(city='Paris')]"},
        {"role": "tool", "content": "sun"},
    ]
    assert converted({"messages": turns}).messages == turns


def test_weights_of_divided_messages():
    turns = [
        ANTHROPIC[0],
        {**ANTHROPIC[1], "weight": 0},
        {**ANTHROPIC[2], "weight": 1},
        ANTHROPIC[3],
    ]
    assert converted({"messages": turns}).trained == [None, False, True, True, None]


def test_refusals():
    parts = [{"type": "refusal", "refusal": "No."}]
    for message in (
        {"content": parts},
        {"content": None, "refusal": "No."},
        {"content": "No.", "refusal": "No."},
    ):
        [_, found] = converted({"messages": [QUESTION, {"role": "assistant", **message}]}).messages
        assert found == {"role": "assistant", "content": "No."}
    with raises("message 2: it has both a content and a refusal", BrokenSample):
        converted(
            {"messages": [QUESTION, {"role": "assistant", "content": "Yes.", "refusal": "No."}]}
        )


GLAIVE_SYSTEM = (
    "SYSTEM: You are a helpful assistant with access to the following functions. Use them if "
    "required -\n"
    f"{json.dumps(FUNCTION, indent=4)}\n{json.dumps({**FUNCTION, 'name': 'news'})}\n"
)
GLAIVE_CHAT = (
    "USER: Weather in Paris?\n\n\nASSISTANT: <functioncall> "
    '{"name": "weather", "arguments": \'{"city": "Paris\\\'s"}\'} <|endoftext|>\n\n\n'
    'FUNCTION RESPONSE: {"sky": "sun"}\n\n\nASSISTANT: Sun.\n\nReally. <|endoftext|>\n\n\n'
)


def test_glaive():
    conversation = converted({"system": GLAIVE_SYSTEM, "chat": GLAIVE_CHAT})
    assert conversation.tools == [
        *TOOLS,
        {"type": "function", "function": {**FUNCTION, "name": "news"}},
    ]
    assert conversation.messages == [
        {
            "role": "system",
            "content": "You are a helpful assistant with access to the following functions. Use "
            "them if required -",
        },
        {"role": "user", "content": "Weather in Paris?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [calling("weather", {"city": "Paris's"}, "call00000")],
        },
        {"role": "tool", "content": '{"sky": "sun"}', "tool_call_id": "call00000"},
        {"role": "assistant", "content": "Sun.\n\nReally."},
    ]
    without = {
        "system": "SYSTEM: You have no functions.",
        "chat": "USER: Hi\n\n\nASSISTANT: Ho <|endoftext|>",
    }
    assert converted(without).tools is None
    with raises("the functions in the column system must be valid JSON", BrokenSample):
        converted({"system": "SYSTEM: f\n{'x", "chat": GLAIVE_CHAT})
    with raises("message 2: the function_call must be valid JSON", BrokenSample):
        converted(
            {**without, "chat": 'USER: Hi\n\n\nASSISTANT: <functioncall> {"name": <|endoftext|>'}
        )
    with raises("set --dataloader.columns text=chat", BrokenSample):
        converted({**without, "chat": "hello"})
    assert (
        converted(
            {"system": "s", "chat": [QUESTION, {"role": "assistant", "content": "a"}]}
        ).messages[1]
        == QUESTION
    )


@pytest.mark.parametrize("as_text", [False, True])
def test_glaive_of_a_real_file(assets, as_text):
    """Rows of a file in ShareGPT's format, written as Glaive's transcripts, give the same
    conversations."""
    rows = json.loads((assets / "sft" / "glaive_toolcall_en_demo.json").read_text())
    headers = {"human": "USER: ", "gpt": "ASSISTANT: ", "observation": "FUNCTION RESPONSE: "}
    for row in rows:
        pieces = []
        for turn in row["conversations"]:
            value = turn["value"]
            if turn["from"] == "function_call":
                call = json.loads(value)
                given = json.dumps(call["arguments"]).replace("'", "\\'")
                value = f'<functioncall> {{"name": "{call["name"]}", "arguments": \'{given}\'}}'
                if not as_text:
                    value = f"<functioncall> {json.dumps(call)}"
            end = " <|endoftext|>" if turn["from"] in ("gpt", "function_call") else ""
            pieces.append(headers.get(turn["from"], "ASSISTANT: ") + value + end)
        functions = "\n".join(json.dumps(tool) for tool in json.loads(row["tools"]))
        glaive = {"system": f"SYSTEM: {functions}", "chat": "\n\n\n".join(pieces)}
        expected, found = converted(row), converted(glaive)
        assert found.tools == expected.tools
        stripped = [
            {**message, "content": (message["content"] or "").strip()}
            for message in expected.messages
        ]
        assert [
            {**message, "content": message["content"] or ""} for message in found.messages
        ] == stripped


def test_xlam():
    answers = [{"name": "weather", "arguments": PARIS}, {"name": "weather", "arguments": ROME}]
    row = {
        "query": QUESTION["content"],
        "tools": json.dumps([FUNCTION]),
        "answers": json.dumps(answers),
        "id": 1,
    }
    calls = [calling("weather", PARIS, "call00000"), calling("weather", ROME, "call00001")]
    answer = {"role": "assistant", "content": None, "tool_calls": calls}
    assert converted(row) == Conversation([QUESTION, answer], TOOLS)
    with raises("answers is empty", EmptySample):
        converted({**row, "answers": "[]"})
    with raises("answers must be a list of function calls, not ['Paris']", BrokenSample):
        converted({**row, "answers": ["Paris"]})


def test_xlam_functions():
    """xLAM's functions have a table of arguments in place of a schema."""
    table = {
        "city": {"type": "str", "description": "City"},
        "days": {"type": "int, optional", "description": "Days", "default": 3},
        "hours": {"type": "List[int]", "description": "Hours"},
        "type": {"type": "bool", "description": "Type", "default": False},
    }
    properties = {
        "city": {"type": "string", "description": "City"},
        "days": {"type": "integer", "description": "Days", "default": 3},
        "hours": {"type": "array", "description": "Hours (List[int])"},
        "type": {"type": "boolean", "description": "Type", "default": False},
    }
    schema = {"type": "object", "properties": properties, "required": ["city", "hours"]}
    for parameters, expected in ((table, schema), (SCHEMA, SCHEMA), ({}, {}), (schema, schema)):
        row = {"messages": ANTHROPIC, "tools": [{"name": "weather", "parameters": parameters}]}
        assert converted(row).tools[0]["function"]["parameters"] == expected


def test_tools_in_the_system_prompt():
    before, after = (
        "Call functions within <tools> </tools> tags:",
        "Return <tool_call>\n{}\n</tool_call>.",
    )
    turns = [QUESTION, {"role": "assistant", "content": tagged(PARIS)}]
    for tools in (
        json.dumps(TOOLS),
        json.dumps(FUNCTION),
        repr(TOOLS),
        f"\n{json.dumps(TOOLS[0])}\n",
    ):
        system = {"role": "system", "content": f"{before} <tools> {tools} </tools> {after}"}
        conversation = converted({"messages": [system, *turns]})
        assert conversation.tools == TOOLS
        assert conversation.messages[0]["content"] == f"{before}\n{after}"
        assert converted({"messages": [system, *turns], "tools": [FUNCTION]}).tools == TOOLS
        with raises(
            "the tools differ between the column tools and the system prompt", BrokenSample
        ):
            converted({"messages": [system, *turns], "tools": [{"name": "news"}]})
    only = converted({"messages": turns, "system": f"<tools>{json.dumps(TOOLS)}</tools>"})
    assert (only.tools, only.messages[0]) == (TOOLS, QUESTION)
    words = {"role": "system", "content": before}
    assert converted({"messages": [words, *turns]}).messages[0] == words


@pytest.mark.parametrize("key", ["input_schema", "inputSchema"])
def test_schemas_of_tools(key):
    tool = {"name": "weather", "description": "Weather of a city", key: SCHEMA}
    row = {"messages": ANTHROPIC, "tools": [tool], "system": [{"type": "text", "text": "s"}]}
    conversation = converted(row)
    assert conversation.tools == TOOLS
    assert conversation.messages[0] == {"role": "system", "content": "s"}


@pytest.mark.parametrize(
    "column", ["reasoning_content", "reasoning", "thinking", "thought", "thoughts"]
)
def test_columns_with_reasoning(column):
    expected = {"role": "assistant", "content": "a", "reasoning_content": THOUGHT}
    for row in (
        {"question": "q", "answer": "a"},
        {"instruction": "q", "output": "a"},
        {"prompt": "q", "response": "a"},
    ):
        format = find_format([*row, column], "auto", {}, "sft")
        assert format.convert({**row, column: THOUGHT}).messages[1] == expected
        assert format.convert({**row, column: None}).messages[1] == {
            "role": "assistant",
            "content": "a",
        }
        assert not format.unread_columns({**row, column: THOUGHT})


def test_mapped_column_with_reasoning():
    row = {"Question": "q", "Complex_CoT": THOUGHT, "Response": "a"}
    names = {"prompt": "Question", "response": "Response", "reasoning_content": "Complex_CoT"}
    assert converted(row, **names).messages[1]["reasoning_content"] == THOUGHT
    with raises(
        "its reasoning differs between reasoning column and tags in its content", BrokenSample
    ):
        converted({**row, "Response": "<think>No.</think>a"}, **names)


CALL = {"role": "assistant", "tool_calls": [calling("weather", PARIS, "a")]}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "sun"}


def _calling(*keys):
    """Return a turn with calls, each with further keys."""
    function = {"name": "weather", "arguments": {}}
    return {"role": "assistant", "tool_calls": [{**one, "function": function} for one in keys]}


@pytest.mark.parametrize(
    ("turns", "error"),
    [
        (
            [QUESTION, {"role": "assistant", "content": "a", "reasoning": "b", "thinking": "c"}],
            "message 2: its reasoning differs between reasoning and thinking; keep one",
        ),
        (
            [
                QUESTION,
                {"role": "assistant", "content": "<think>b</think>a", "reasoning_content": "c"},
            ],
            "its reasoning differs between reasoning_content and tags in its content",
        ),
        (
            [{**QUESTION, "thinking": "b"}],
            "message 1: it has thinking, which only the assistant may have: 'b'",
        ),
        (
            [QUESTION, {**CALL, "content": "a", "cot": "b"}],
            "message 2: its key 'cot' looks like content",
        ),
        ([{**QUESTION, "images": ["x.png"]}], "message 1: its key 'images' looks like content"),
        (
            [QUESTION, RESULT],
            "message 2: it is the result of the call 'a', which no earlier message made",
        ),
        (
            [QUESTION, {"role": "tool", "content": "sun"}],
            "message 2: it is a result that no call asked for: 'sun'",
        ),
        (
            [QUESTION, CALL, RESULT, RESULT],
            "message 4: it is the result of the call 'a', which no earlier message made",
        ),
        ([QUESTION, CALL, {**RESULT, "tool_call_id": "b"}], "it is the result of the call 'b'"),
        (
            [QUESTION, _calling({}), {**RESULT, "tool_call_id": ["a"]}],
            "message 3: it is the result of the call ['a'], which no earlier message made",
        ),
        (
            [QUESTION, _calling({"id": ["a"]}), {**RESULT, "tool_call_id": "b"}],
            "message 3: it is the result of the call 'b', which no earlier message made",
        ),
        (
            [QUESTION, _calling({"id": 1}, {}), *2 * [{**RESULT, "tool_call_id": 1}]],
            "message 4: it is the result of the call 1, which no earlier message made",
        ),
        (
            [QUESTION, CALL, {"role": "tool", "name": "news", "content": "x"}],
            "it is a result of 'news', which no call asked for (calls without a result: weather)",
        ),
        (
            [
                QUESTION,
                {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, "a"]},
            ],
            "message 2: its reasoning is encrypted",
        ),
        (
            [
                QUESTION,
                {
                    "role": "assistant",
                    "content": "a",
                    "reasoning_details": [{"type": "reasoning.encrypted"}],
                },
            ],
            "message 2: its reasoning is encrypted (reasoning_details)",
        ),
        (
            [QUESTION, {"type": "reasoning", "summary": [], "encrypted_content": "x"}],
            "its reasoning is encrypted",
        ),
        (
            [QUESTION, {"type": "reasoning", "summary": [{"text": "b"}]}],
            "message 2: its reasoning is followed by no answer",
        ),
        (
            [{"type": "reasoning", "summary": [{"text": "b"}]}, QUESTION],
            "message 2: the reasoning before it is followed",
        ),
        (
            [QUESTION, {"type": "web_search_call"}],
            "message 2: an item of type 'web_search_call' is not supported",
        ),
        (
            [
                QUESTION,
                {"role": "assistant", "content": ["a", {"type": "thinking", "thinking": "b"}]},
            ],
            "message 2: its reasoning comes after its text or calls",
        ),
        (
            [QUESTION, {"role": "assistant", "content": [ANTHROPIC[1]["content"][2], "a"]}],
            "message 2: its text comes after its calls",
        ),
        (
            [QUESTION, {"role": "assistant", "content": "<tool_call>{x</tool_call>"}],
            "the function_call must be valid JSON",
        ),
        (
            [
                QUESTION,
                {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}, "input": {}}]},
            ],
            "a call of f has arguments and input",
        ),
        (
            [QUESTION, {"role": "assistant", "content": ANTHROPIC[1]["content"], **CALL}],
            "both in tool_calls and in its",
        ),
    ],
)
def test_what_would_be_lost_is_refused(turns, error):
    with raises(error, BrokenSample):
        converted({"messages": turns})


def test_empty_items_of_reasoning_are_no_loss():
    items = [RESPONSES[0], {"type": "reasoning", "id": "x", "summary": []}, RESPONSES[-1]]
    assert converted({"messages": items}).messages == [
        QUESTION,
        {"role": "assistant", "content": ANSWER},
    ]


def test_preference_rows():
    """Answers in any spelling continue the prompt."""
    row = {
        "prompt": QUESTION["content"],
        "chosen": [{"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"}],
        "rejected": "<think>b</think>No.",
    }
    pair = converted(row, "preference")
    assert pair.prompt.messages == [QUESTION]
    assert pair.chosen[0]["tool_calls"] == [calling("weather", {}, "a")]
    assert pair.rejected[0]["reasoning_content"] == "b"
    answered = [QUESTION, {"role": "assistant", "content": "a"}]
    with raises("chosen is a call that continues the last answer of the prompt", BrokenSample):
        converted({**row, "prompt": answered}, "preference")
