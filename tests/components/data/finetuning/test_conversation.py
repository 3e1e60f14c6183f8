"""Conversion of messages in OpenAI's and ShareGPT's formats for chat templates, compared with
handwritten results."""

import json
import re

import pytest

from tests.components.data.helpers import raises
from torchtitan.components.data.finetuning.conversation import (
    BrokenSample,
    Conversation,
    EmptySample,
    normalize,
)
from torchtitan.components.data.finetuning.row_formats import find_format

QUESTION, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
SYSTEM = {"role": "system", "content": "s"}


def converted(row: dict) -> Conversation:
    return find_format(list(row), "auto", {}, "sft").convert(row)


def test_normal_messages_are_unchanged():
    messages = [
        SYSTEM,
        {"role": "developer", "content": " d\n"},
        {"role": "user", "content": "", "name": "Tom"},
        {"role": "assistant", "content": "a", "reasoning_content": "because"},
    ]
    assert normalize(messages) == Conversation(messages, None, [None] * 4)


def test_parts_are_joined():
    parts = [{"type": "text", "text": "one "}, "two", {"text": " three"}]
    assert normalize([{"role": "user", "content": parts}]).messages == [
        {"role": "user", "content": "one two three"}
    ]
    image = {"type": "image_url", "image_url": {"url": "x"}}
    with raises("message 2: its content has a part of type 'image_url'", BrokenSample):
        normalize([SYSTEM, {"role": "user", "content": [image]}])
    with raises("a part of its content has no text, but has type, txt", BrokenSample):
        normalize([{"role": "user", "content": [{"type": "text", "txt": "x"}]}])


@pytest.mark.parametrize(
    "part",
    [
        {"type": "text", "value": "one"},
        {"type": "text", "text": None, "value": "one"},
        {"type": "text", "content": "one"},
        {"type": "input_text", "text": "one"},
        {"type": "output_text", "text": "one", "annotations": []},
    ],
)
def test_alternative_names_of_parts(part):
    assert normalize([{"role": "user", "content": [part, "!"]}]).messages == [
        {"role": "user", "content": "one!"}
    ]


def test_tool_calls():
    call = {
        "id": "abc",
        "type": "function",
        "function": {"name": "f", "arguments": '{"x": ["文", null]}'},
    }
    result = {"role": "tool", "content": "1", "tool_call_id": "abc", "name": "f"}
    [first, second] = normalize(
        [{"role": "assistant", "content": None, "tool_calls": [call]}, result]
    ).messages
    arguments = {"x": ["文", None]}
    assert first == {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "abc", "type": "function", "function": {"name": "f", "arguments": arguments}}
        ],
    }
    assert second == result
    assert call["function"]["arguments"] == '{"x": ["文", null]}'  # the row is not changed


@pytest.mark.parametrize("arguments", ["", None, "{}", {}])
def test_tool_call_without_arguments_or_wrapping(arguments):
    [message] = normalize(
        [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": arguments}]}]
    ).messages
    assert message["tool_calls"] == [
        {"type": "function", "function": {"name": "f", "arguments": {}}}
    ]
    assert "content" not in message


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (
            {"role": "bot", "content": "x"},
            "the role 'bot' is unknown; use one of: system, developer, user",
        ),
        ({"content": "x"}, "it has no role, but has content"),
        ({"speaker": "user", "text": "x"}, "it has no role, but has speaker, text"),
        ({"role": "user", "text": "x"}, "the role 'user' has no content, but has text"),
        ({"role": ["user"], "content": "x"}, "the role ['user'] is unknown; use one of"),
        ({"role": "user", "content": None}, "the role 'user' has no content"),
        ({"role": "assistant", "tool_calls": []}, "has no content and no tool_calls"),
        ({"role": "user", "content": 3}, "the content must be text, not an int: 3"),
        (
            {"role": "user", "content": "x", "tool_calls": [{"name": "f"}]},
            "has tool_calls, which only the assistant may have",
        ),
        (
            {"role": "assistant", "tool_calls": {"name": "f"}},
            "the tool_calls must be a list, not a dict",
        ),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "a tool call has no name"),
        (
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{x"}]},
            "arguments of a tool call must be valid JSON",
        ),
        (
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]},
            "arguments of a tool call must be an object, not a list",
        ),
        (
            {"role": "assistant", "content": "x", "weight": 0.5},
            "its weight is 0.5; it must be 0 or false (not trained), or 1 or true (trained)",
        ),
        (
            {"role": "assistant", "content": "x", "loss_weight": 2},
            "its loss_weight is 2; it must be 0 or false",
        ),
        (
            {"role": "assistant", "content": "x", "train_detail": []},
            "its train_detail is not supported: a message is",
        ),
        (
            {"role": "assistant", "content": "x", "mask": 0},
            "its mask is not supported: a message is trained completely or not at all; use a "
            "weight",
        ),
        (
            {"role": "assistant", "content": "x", "train": "no"},
            "its train is 'no'; it must be 0 or false",
        ),
        (
            {"role": "assistant", "content": "x", "weight": 1, "train": False},
            "weight is 1 and its train is False",
        ),
        (
            {"role": "assistant", "content": "x", "wieght": 0},  # codespell:ignore
            "unknown key 'wieght'; did you mean 'weight'?",
        ),
        ({"role": "assistant", "content": "", "tool_call": [{}]}, "did you mean 'tool_calls'?"),
        ({"role": "assistant", "content": "x", "thinkings": "y"}, "did you mean 'thinking'?"),
        ("hello", "the message must be valid JSON"),
        (None, "the message must be an object, not a NoneType"),
    ],
)
def test_error_gives_the_number_of_the_message(message, error):
    with raises(error, BrokenSample) as caught:
        normalize([SYSTEM, message])
    assert str(caught.value).startswith("message 2: ")


def test_weights_become_training_flags():
    turns = [
        {**QUESTION, "weight": None},
        {**ANSWER, "weight": 0},
        QUESTION,
        {**ANSWER, "weight": 1.0, "train": True},
        {**ANSWER, "train": False},
        {**ANSWER, "loss_weight": 0.0},
        {**ANSWER, "loss": True},
        {**ANSWER, "training": 0},
    ]
    conversation = normalize(turns)
    assert conversation.trained == [None, False, None, True, False, False, True, False]
    assert conversation.messages == [QUESTION, ANSWER, QUESTION, *[ANSWER] * 5]


def test_no_messages():
    with raises("there are no messages", EmptySample):
        normalize([])
    with raises("messages is empty", EmptySample):
        converted({"messages": None})
    with raises("messages must be a list of messages, not a dict", BrokenSample):
        converted({"messages": {"role": ["user"], "content": ["x"]}})


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_options_that_the_loader_sets(name):
    with pytest.raises(BrokenSample, match=f"chat_template_kwargs has {name}, which the loader"):
        normalize([{"role": "user", "content": "a"}], None, {name: [], "enable_thinking": True})


def test_json_text():
    """Cells of CSV files and JSON columns contain JSON text."""
    row = {"messages": json.dumps([QUESTION, ANSWER]), "tools": json.dumps([{"name": "f"}])}
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert converted(row) == Conversation([QUESTION, ANSWER], tools)
    assert converted({"messages": [json.dumps(QUESTION), ANSWER], "tools": ""}) == Conversation(
        [QUESTION, ANSWER]
    )
    with raises("the messages must be valid JSON", BrokenSample):
        converted({"messages": "hello"})


@pytest.mark.parametrize("tools", [None, "", " ", "[]", "null", []])
def test_no_tools(tools):
    assert converted({"messages": [QUESTION], "tools": tools}) == Conversation([QUESTION])


def test_tools_keep_their_keys():
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object"}},
        "strict": True,
    }
    assert normalize([QUESTION], [tool]).tools == [tool]
    with raises("a tool has no name", BrokenSample):
        normalize([QUESTION], [{"description": "d"}])


BARE = {
    "name": "f",
    "description": "d",
    "parameters": {"type": "object", "properties": {"type": {"type": "string"}}},
}
WRAPPED = {"type": "function", "function": BARE}


@pytest.mark.parametrize(
    "tools",
    [
        [WRAPPED, WRAPPED],
        [BARE, WRAPPED],
        [json.dumps(WRAPPED), json.dumps(BARE)],
        [json.dumps(BARE), WRAPPED],
        json.dumps([json.dumps(BARE), WRAPPED]),
        # OpenAI's Responses; keys of other rows
        [{"type": "function", **BARE}, {**BARE, "function": None}],
        [
            {"type": "function", "function": json.dumps(BARE)},
            {**BARE, "parameters": json.dumps(BARE["parameters"])},
        ],
    ],
)
def test_forms_of_tools(tools):
    assert normalize([QUESTION], tools).tools == [WRAPPED, WRAPPED]


@pytest.mark.parametrize(
    "tools", [BARE, WRAPPED, json.dumps(BARE), json.dumps([WRAPPED]), [json.dumps(WRAPPED)]]
)
def test_a_single_tool(tools):
    assert normalize([QUESTION], tools).tools == [WRAPPED]


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        (["f"], "the item of tools must be valid JSON (Expecting value"),
        (["1"], "the item of tools must be an object, not an int"),
        ([None], "the item of tools must be an object, not a NoneType"),
        (5, "the tools must be a list, not an int"),
        ([{"name": "f", "parameters": "[1]"}], "the parameters must be an object, not a list"),
        ({"f": {}}, "a tool has no name"),
    ],
)
def test_tools_that_cannot_be_read(tools, message):
    with raises(message, BrokenSample):
        normalize([QUESTION], tools)


def test_tool_calls_as_json_text():
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    for calls in ([json.dumps(call)], json.dumps([call]), [{"name": "f", "arguments": '{"x": 1}'}]):
        message = {"role": "assistant", "content": None, "tool_calls": calls}
        assert normalize([QUESTION, message]).messages[1]["tool_calls"] == [call]


def test_system_column():
    assert converted({"messages": [QUESTION, ANSWER], "system": "s"}).messages == [
        SYSTEM,
        QUESTION,
        ANSWER,
    ]
    assert converted({"messages": [QUESTION, ANSWER], "system": ""}).messages == [QUESTION, ANSWER]
    with raises(
        "there are two system prompts, in the column system and in the first message", BrokenSample
    ):
        converted({"messages": [SYSTEM, QUESTION], "system": "t"})


def test_roles():
    speakers = ["system", "human", "gpt", "user", "assistant"]
    turns = [
        {"from": speaker, "value": speaker, "weight": 1 if speaker == "gpt" else None}
        for speaker in speakers
    ]
    conversation = converted({"conversations": turns})
    roles = ["system", "user", "assistant", "user", "assistant"]
    expected = [
        {"role": role, "content": speaker} for role, speaker in zip(roles, speakers, strict=True)
    ]
    assert conversation == Conversation(expected, None, [None, None, True, None, None])
    with raises(
        "message 1: the speaker 'narrator' is unknown; use one of: human, user, gpt", BrokenSample
    ):
        converted({"conversations": [{"from": "narrator", "value": "x"}]})


def test_tool_calls_and_results_share_ids():
    both = [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": "{}"}]
    turns = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": json.dumps(both)},
        {"from": "observation", "value": "1"},
        {"from": "observation", "value": "2"},
        {"from": "function_call", "value": json.dumps(both[0])},
        {"from": "tool", "value": "3"},
        {"from": "gpt", "value": "a"},
    ]
    messages = converted({"conversations": turns, "tools": "[]"}).messages
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    assert [call["function"] for call in calls] == [
        {"name": "f", "arguments": {"x": 1}},
        {"name": "g", "arguments": {}},
        {"name": "f", "arguments": {"x": 1}},
    ]
    ids = [call["id"] for call in calls]
    assert len(set(ids)) == 3 and all(re.fullmatch("[a-zA-Z0-9]{9}", name) for name in ids)
    results = [message for message in messages if message["role"] == "tool"]
    assert [message.get("tool_call_id") for message in results] == ids
    assert [message["content"] for message in messages] == ["q", None, "1", "2", None, "3", "a"]
    with raises("message 8: it is a result that no call asked for: '4'", BrokenSample):
        converted({"conversations": [*turns, {"from": "tool", "value": "4"}]})
    with raises("message 1: the function_call must be valid JSON", BrokenSample):
        converted({"conversations": [{"from": "function_call", "value": "f(x)"}]})


def test_alternative_speaker_names():
    speakers = ["human", "ai", "user", "model", "function", "gpt"]
    roles = ["user", "assistant", "user", "assistant", "tool", "assistant"]
    expected = Conversation([{"role": role, "content": "x"} for role in roles])
    assert (
        converted({"messages": [{"role": speaker, "content": "x"} for speaker in speakers]})
        == expected
    )
    assert (
        converted({"conversations": [{"from": speaker, "value": "x"} for speaker in speakers]})
        == expected
    )
    assert (
        converted(
            {"messages": [json.dumps({"role": speaker, "content": "x"}) for speaker in speakers]}
        )
        == expected
    )


def legacy_calls() -> list[dict]:
    call = {"name": "f", "arguments": '{"x": 1}'}
    return [
        QUESTION,
        {"role": "assistant", "content": "", "function_call": call},
        {"role": "function", "name": "f", "content": "2"},
        {"role": "assistant", "content": None, "function_call": {**call, "arguments": ""}},
        {"role": "function", "name": "f", "content": "3"},
        ANSWER,
    ]


def test_legacy_function_calls():
    """OpenAI's format before `tool_calls`."""

    def calling(name, arguments):
        return [{"id": name, "type": "function", "function": {"name": "f", "arguments": arguments}}]

    functions = [{"name": "f", "parameters": {"type": "object"}}]
    expected = Conversation(
        [
            QUESTION,
            {"role": "assistant", "content": "", "tool_calls": calling("call00000", {"x": 1})},
            {"role": "tool", "name": "f", "content": "2", "tool_call_id": "call00000"},
            {"role": "assistant", "content": None, "tool_calls": calling("call00001", {})},
            {"role": "tool", "name": "f", "content": "3", "tool_call_id": "call00001"},
            ANSWER,
        ],
        [{"type": "function", "function": functions[0]}],
    )
    turns = legacy_calls()
    assert converted({"messages": turns, "functions": functions}) == expected
    assert (
        converted({"messages": list(map(json.dumps, turns)), "functions": json.dumps(functions)})
        == expected
    )
    assert turns == legacy_calls()  # the row is not changed
    only_call = {"messages": turns[:2]}
    assert converted(only_call).messages == expected.messages[:2]  # a call is not an empty answer
    both = {**turns[1], "tool_calls": [{"name": "f"}]}
    with raises("message 2: it has both tool_calls and a function_call", BrokenSample):
        converted({"messages": [QUESTION, both]})
    without = {"role": "assistant", "content": "a", "function_call": None}
    assert converted({"messages": [QUESTION, without]}) == Conversation([QUESTION, ANSWER])


@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_plain_texts_alternate_between_user_and_assistant(column):
    assert converted({column: ["q", "a", "q"], "system": "s"}) == Conversation(
        [SYSTEM, QUESTION, ANSWER, QUESTION]
    )
    assert converted({column: json.dumps(["q", "a"])}) == Conversation([QUESTION, ANSWER])
    with raises("message 1: the message must be valid JSON", BrokenSample):
        converted({column: ['{"role": "user", "content": "q"', json.dumps(ANSWER)]})


def test_transcript_is_no_list_of_messages():
    text = "\n\nHuman: q\n\nwith Human: inside\n\nAssistant: a\n\nHuman: q\n\nAssistant: a"
    first = {"role": "user", "content": "q\n\nwith Human: inside"}
    assert converted({"conversations": text}) == Conversation([first, ANSWER, QUESTION, ANSWER])
    for other in ("Human: q", "q\n\nAssistant: a", "hello"):
        with raises("plain text, set --dataloader.columns text=conversations", BrokenSample):
            converted({"conversations": other})


def test_turn_without_text():
    with raises("message 1: it has no value, but has text", BrokenSample):
        converted({"conversations": [{"from": "human", "text": "q"}]})
    assert converted(
        {"conversations": [{"from": "human", "content": "q"}, {"role": "gpt", "content": "a"}]}
    ) == (Conversation([QUESTION, ANSWER]))


def test_openai_messages_in_a_conversations_column():
    turns = [{**QUESTION, "from": None}, ANSWER]
    assert converted({"conversations": turns}) == Conversation([QUESTION, ANSWER])


@pytest.mark.parametrize(
    ("answers", "is_empty"),
    [
        ([{"content": ""}], True),
        ([{"content": " \n"}, {"content": ""}], True),
        # the message with content is not trained
        ([{"content": "a", "weight": 0}, {"content": ""}], True),
        ([{"content": "a"}, {"content": ""}], False),
        ([{"content": "", "weight": 0}], False),  # no trained message is empty
        ([{"content": "", "reasoning_content": "because"}], False),
        ([{"content": None, "tool_calls": [{"name": "f", "arguments": {}}]}], False),
        ([], False),
    ],
)
def test_empty_answers(answers, is_empty):
    messages = [QUESTION, *({"role": "assistant", **message} for message in answers)]
    names = {"user": "human", "assistant": "gpt"}
    turns = [
        {"from": names[turn["role"]], "value": turn["content"], "weight": turn.get("weight")}
        for turn in messages
    ]
    if not is_empty:
        assert len(converted({"messages": messages}).messages) == len(messages)
        return
    for row in ({"messages": messages}, {"conversations": turns}):
        with raises("the assistant's messages are empty", EmptySample):
            converted(row)


def test_blank_tool_calls_cell():
    assert converted({"messages": [QUESTION, {**ANSWER, "tool_calls": ""}]}) == Conversation(
        [QUESTION, ANSWER]
    )
