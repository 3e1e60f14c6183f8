"""Rows of every shape to samples: what they say, how they are recognized, and what is refused, each by hand."""

import json
import re
import sys
from collections import Counter

import pytest

from torchtitan.components.data.finetuning import registry
from torchtitan.components.data.finetuning.conversation import (
    BrokenSample,
    Conversation,
    EmptySample,
    Pair,
    Prompt,
    Text,
)
from torchtitan.components.data.finetuning.registry import ChatDataset, dataset_format, register_chat_dataset
from torchtitan.components.data.finetuning.row_formats import (
    FORMATS,
    RowFormat,
    find_format,
    function_format,
    parse_columns,
)
from torchtitan.components.data.rows import resolve_rows
from torchtitan.tools.errors import UserError

QUESTION, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
SYSTEM = {"role": "system", "content": "s"}


def raises(message: str, kind: type[Exception] = UserError):
    """Expect an error of this very kind that contains `message`."""
    return pytest.raises(kind, match=re.escape(message), check=lambda error: type(error) is kind)


def converted(row: dict, kind: str = "sft", format: str = "auto", mapping: dict | None = None):
    return find_format(list(row), format, mapping or {}, kind).convert(row)


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"prompt": "q", "response": "a"}, [QUESTION, ANSWER]),
        ({"prompt": "q", "completion": "a"}, [QUESTION, ANSWER]),
        ({"prompt": [SYSTEM, QUESTION], "completion": [ANSWER]}, [SYSTEM, QUESTION, ANSWER]),
        ({"question": "q", "answer": "a", "system": "s"}, [SYSTEM, QUESTION, ANSWER]),
        ({"instruction": "q", "output": "a"}, [QUESTION, ANSWER]),
        ({"instruction": "q", "input": "", "output": "a", "system": None}, [QUESTION, ANSWER]),
        ({"instruction": "q", "input": "i", "output": "a"}, [{"role": "user", "content": "q\n\ni"}, ANSWER]),
        ({"instruction": "", "input": "q", "output": "a"}, [QUESTION, ANSWER]),
        (
            {"instruction": "r", "output": "b", "history": [["q", "a"]], "system": "s"},
            [SYSTEM, QUESTION, ANSWER, {"role": "user", "content": "r"}, {"role": "assistant", "content": "b"}],
        ),
    ],
)
def test_columns_of_texts(row, messages):
    assert converted(row) == Conversation(messages)


@pytest.mark.parametrize(
    ("row", "error", "kind"),
    [
        ({"text": " \n"}, "text is empty", EmptySample),
        ({"text": None}, "text is empty", EmptySample),
        ({"prompt": "q", "response": ""}, "response is empty", EmptySample),
        ({"prompt": None, "response": "a"}, "prompt is empty", EmptySample),
        ({"question": "q", "answer": 0}, "the answer is a int, and must be text: 0", BrokenSample),
        ({"instruction": "", "input": None, "output": "a"}, "instruction is empty", EmptySample),
        ({"instruction": "q", "output": "a", "history": ["q"]}, "history must be a list of pairs", BrokenSample),
        ({"instruction": "q", "output": "a", "history": [["q", None]]}, "the role 'assistant' has no", BrokenSample),
        ({"prompt": "q", "response": "a", "system": 3}, "the system is a int", BrokenSample),
    ],
)
def test_rows_that_cannot_be_used(row, error, kind):
    with raises(error, kind):
        converted(row)


def test_text():
    assert converted({"text": "Once.\n", "id": 3}) == Text("Once.\n")


class TestRecognition:
    @pytest.mark.parametrize("format", FORMATS, ids=lambda format: f"{format.kind}-{format.name}")
    def test_every_format_by_its_columns(self, format: RowFormat):
        assert find_format(format.required, "auto", {}, format.kind).name == format.name
        assert find_format(format.required, format.name, {}, format.kind).required == format.required

    def test_the_more_telling_columns_win(self):
        assert find_format(["prompt", "prompt_id", "messages"], "auto", {}, "sft").name == "messages"
        columns = ["text", "instruction", "input", "output", "chosen", "rejected"]
        assert find_format(columns, "auto", {}, "sft").name == "instruction"
        assert find_format(columns, "auto", {}, "preference").name == "instruction"
        assert find_format(columns, "text", {}, "sft").name == "text"

    def test_nothing_fits(self):
        with raises(
            "the rows have the columns frage, antwort, which fit none of the formats (messages: messages;"
        ) as e:
            find_format(["frage", "antwort"], "auto", {}, "sft")
        assert "prompt_response: prompt, response" in str(e.value)
        assert "--dataloader.columns OURS=THEIRS" in str(e.value) and "--dataloader.format" in str(e.value)
        with raises("the rows have the columns frage, and 'text' needs text"):
            find_format(["frage"], "text", {}, "sft")
        with raises("'mesages' is none of: auto, messages, conversations, instruction"):
            find_format(["messages"], "mesages", {}, "sft")

    def test_mapping(self):
        mapping = parse_columns(["prompt=frage", "response = antwort"])
        assert mapping == {"prompt": "frage", "response": "antwort"}
        assert converted({"frage": "q", "antwort": "a"}, mapping=mapping) == Conversation([QUESTION, ANSWER])
        swapped = {"instruction": "output", "output": "instruction"}
        assert converted({"instruction": "a", "output": "q"}, mapping=swapped) == Conversation([QUESTION, ANSWER])

    def test_mapping_of_a_column_that_is_there_as_well(self):
        row = {"prompt": "no", "question": "q", "response": "a"}
        assert converted(row, mapping={"prompt": "question"}) == Conversation([QUESTION, ANSWER])

    def test_later_rows_may_lack_a_column(self):
        format = find_format(["frage", "response"], "auto", {"prompt": "frage"}, "sft")
        with raises("no column prompt, only response", BrokenSample):
            format.convert({"response": "a"})

    @pytest.mark.parametrize("entry", ["prompt", "=frage", "prompt=", ""])
    def test_malformed_mapping(self, entry):
        with raises(f"--dataloader.columns: {entry!r} must be of the form OURS=THEIRS"):
            parse_columns([entry])

    def test_wrong_mapping(self):
        with raises("'prompt' is given twice, 'a' and 'b'"):
            parse_columns(["prompt=a", "prompt=b"])
        with raises("'promt' is a column of no format; did you mean 'prompt'?"):
            find_format(["frage"], "auto", {"promt": "frage"}, "sft")
        with raises("the rows have no column 'frag'; did you mean 'frage'? (they have: frage)"):
            find_format(["frage"], "auto", {"prompt": "frag"}, "sft")

    def test_fingerprint_tells_what_converts_differently(self):
        columns = ["text", "prompt", "response", "chosen", "rejected"]
        chosen = [
            find_format(columns, "auto", {}, "sft"),
            find_format(columns, "text", {}, "sft"),
            find_format(columns, "text", {"text": "prompt"}, "sft"),
            find_format(columns, "auto", {}, "preference"),
        ]
        assert len({format.fingerprint for format in chosen}) == 4
        assert find_format(["prompt", "response"], "auto", {}, "sft").fingerprint == chosen[0].fingerprint


class TestPreference:
    def test_texts_after_a_prompt(self):
        pair = converted({"prompt": "q", "chosen": "a", "rejected": "b", "system": "s"}, "preference")
        rejected = [{"role": "assistant", "content": "b"}]
        assert pair == Pair(Conversation([SYSTEM, QUESTION]), [ANSWER], rejected)
        instruction = {"instruction": "q", "input": "i", "output": "unused", "chosen": "a", "rejected": "b"}
        prompt = Conversation([{"role": "user", "content": "q\n\ni"}])
        assert converted(instruction, "preference") == Pair(prompt, [ANSWER], rejected)

    @pytest.mark.parametrize("beside", [{}, {"prompt": "q"}, {"messages": [QUESTION, ANSWER], "prompt": "q"}])
    def test_whole_conversations(self, beside):
        worse = [{"role": "assistant", "content": "b"}, QUESTION, ANSWER]
        row = {**beside, "chosen": [SYSTEM, QUESTION, ANSWER], "rejected": [SYSTEM, QUESTION, *worse]}
        assert converted(row, "preference") == Pair(Conversation([SYSTEM, QUESTION]), [ANSWER], worse)

    def test_the_prompt_is_all_that_is_common(self):
        more = [QUESTION, ANSWER, {"role": "user", "content": "r"}]
        row = {"chosen": [*more, ANSWER], "rejected": [*more, {"role": "assistant", "content": "b"}]}
        assert converted(row, "preference").prompt.messages == more
        row = {"chosen": [QUESTION, ANSWER], "rejected": [QUESTION, ANSWER, QUESTION, ANSWER]}
        assert converted(row, "preference") == Pair(Conversation([QUESTION]), [ANSWER], [ANSWER, QUESTION, ANSWER])

    def test_turns_of_sharegpt(self):
        turn, call = {"from": "gpt", "value": "b"}, {"from": "function_call", "value": '{"name": "f"}'}
        turns = [{"from": "human", "value": "q"}, call, {"from": "observation", "value": "1"}]
        pair = converted({"conversations": turns, "chosen": call, "rejected": [turn]}, "preference")
        assert [message["role"] for message in pair.prompt.messages] == ["user", "assistant", "tool"]
        ids = [message["tool_calls"][0]["id"] for message in (pair.prompt.messages[1], pair.chosen[0])]
        assert ids[0] != ids[1]
        assert pair.rejected == [{"role": "assistant", "content": "b"}]

    @pytest.mark.parametrize(
        ("row", "error", "kind"),
        [
            ({"prompt": "q", "chosen": "a", "rejected": "a"}, "chosen and rejected are the same", EmptySample),
            ({"prompt": "q", "chosen": "a", "rejected": " "}, "rejected is empty", EmptySample),
            ({"chosen": [QUESTION, ANSWER], "rejected": [QUESTION, ANSWER]}, "are the same", EmptySample),
            ({"chosen": "a", "rejected": "b"}, "there is no column for the prompt", BrokenSample),
            (
                {"chosen": [QUESTION, ANSWER], "rejected": [SYSTEM, ANSWER]},
                "have no first message in common",
                BrokenSample,
            ),
            (
                {"chosen": [QUESTION, ANSWER], "rejected": [QUESTION, QUESTION, ANSWER]},
                "rejected goes on after the prompt with the role 'user'",
                BrokenSample,
            ),
        ],
    )
    def test_pairs_that_cannot_be_used(self, row, error, kind):
        with raises(error, kind):
            converted(row, "preference")


class TestPrompts:
    @pytest.mark.parametrize(
        ("row", "expected"),
        [
            ({"prompt": "q"}, Prompt(Conversation([QUESTION]), None)),
            ({"question": "q", "answer": "#### 3"}, Prompt(Conversation([QUESTION]), "#### 3")),
            ({"prompt": [SYSTEM, QUESTION], "solution": 3}, Prompt(Conversation([SYSTEM, QUESTION]), "3")),
            ({"messages": [QUESTION], "ground_truth": "x", "answer": None}, Prompt(Conversation([QUESTION]), "x")),
            ({"instruction": "q", "answer": 0.5}, Prompt(Conversation([QUESTION]), "0.5")),
        ],
    )
    def test_with_and_without_an_answer(self, row, expected):
        assert converted(row, "prompt") == expected

    def test_what_is_no_prompt(self):
        with raises("the prompt ends with the assistant's message", BrokenSample):
            converted({"messages": [QUESTION, ANSWER]}, "prompt")
        with raises("the answer is a bool", BrokenSample):
            converted({"prompt": "q", "answer": True}, "prompt")


def as_question(row):
    return {"messages": [{"role": "user", "content": row["body"]}]} if row["body"] else None


class TestFunctions:
    SOURCE = (
        "from dataclasses import dataclass\n"
        "@dataclass\nclass Note:\n    body: 'str'\n"
        "def convert(row):\n    return {'text': Note(row['body']).body} if row['body'] else None\n"
    )

    def test_in_a_file(self, tmp_path):
        path = tmp_path / "mine.py"
        path.write_text(self.SOURCE)
        format = find_format(["body"], f"{path}:convert", {}, "sft")
        assert (format.name, format.convert({"body": "x"})) == ("row_functions_mine:convert", Text("x"))
        assert format.convert({"body": ""}) is None
        path.write_text(self.SOURCE.replace("['body'])", "['body'].upper())"))
        changed = find_format(["body"], f"{path}:convert", {}, "sft")
        assert changed.convert({"body": "x"}) == Text("X")
        assert changed.fingerprint != format.fingerprint

    def test_in_a_module_of_the_working_directory(self, tmp_path, monkeypatch):
        (tmp_path / "own_rows").mkdir()
        (tmp_path / "own_rows" / "notes.py").write_text(self.SOURCE)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", sys.path[:])
        format = find_format(["body"], "own_rows.notes:convert", {}, "sft")
        assert format.convert({"body": "x"}) == Text("x")

    def test_gives_any_known_format(self):
        assert function_format(as_question, "sft").convert({"body": "q"}) == Conversation([QUESTION])
        assert function_format(as_question, "prompt").convert({"body": "q"}) == Prompt(Conversation([QUESTION]), None)

    def test_what_it_does_wrong(self):
        with raises("the function as_question fails: KeyError: 'body'", BrokenSample):
            function_format(as_question, "sft").convert({"text": "x"})
        with raises("gave a str, and must give a dictionary, or None"):
            function_format(lambda row: "text", "sft").convert({})
        with raises("gave 'body', which fits none of: messages: messages;"):
            function_format(lambda row: {"body": "x"}, "sft").convert({})
        with raises("is not a function written in Python"):
            function_format(json.loads.__call__, "sft")

    def test_names_that_lead_nowhere(self, tmp_path):
        (tmp_path / "mine.py").write_text(self.SOURCE)
        (tmp_path / "broken.py").write_text("import nothing_of_this_name\n")
        for name, message in [
            (f"{tmp_path}/mine.py:covert", "has no function 'covert'; did you mean 'convert'?"),
            (f"{tmp_path}/other.py:convert", f"there is no file {tmp_path}/other.py"),
            (f"{tmp_path}/broken.py:convert", "failed: ModuleNotFoundError: No module named 'nothing_of_this_name'"),
            ("not_a_module_at_all:convert", "there is no module 'not_a_module_at_all' to import"),
            (f"{tmp_path}/mine:convert", "must be of the form package.module:function or path/to/file.py:function"),
            (":convert", "must be of the form"),
        ]:
            with raises(message):
                find_format(["body"], name, {}, "sft")
        with raises("--dataloader.columns cannot be combined with the function"):
            find_format(["body"], f"{tmp_path}/mine.py:convert", {"text": "body"}, "sft")


def test_registered_sets_say_how_their_rows_are_read(monkeypatch):
    monkeypatch.setattr(registry, "_registry", {})
    register_chat_dataset("mapped", ChatDataset(path="a.jsonl", columns={"prompt": "frage", "response": "antwort"}))
    register_chat_dataset("function", ChatDataset(path="a.jsonl", function=as_question))
    columns = ["frage", "antwort", "text", "body"]
    row = {"frage": "q", "antwort": "a", "text": "t", "body": "b"}
    assert dataset_format("mapped", columns, "auto", {}, "sft").convert(row) == Conversation([QUESTION, ANSWER])
    assert dataset_format("mapped", columns, "text", {}, "sft").convert(row) == Text("t")
    assert dataset_format("mapped", columns, "auto", {"text": "body"}, "sft").convert(row) == Text("b")
    asked = Conversation([{"role": "user", "content": "b"}])
    assert dataset_format("function", columns, "auto", {}, "sft").convert(row) == asked
    assert dataset_format("a.jsonl", columns, "auto", {}, "sft").convert(row) == Text("t")


@pytest.mark.parametrize(
    ("file", "kind", "name", "counts"),
    [
        ("sft/alpaca_en_demo.json", "sft", "instruction", {Conversation: 999}),
        ("sft/dolly_hhrlhf_train_small.jsonl", "sft", "prompt_response", {Conversation: 1000}),
        ("sft/glaive_toolcall_en_demo.json", "sft", "conversations", {Conversation: 300}),
        ("sft/gsm8k_train.jsonl", "sft", "question_answer", {Conversation: 7470}),
        ("sft/gsm8k_train.jsonl", "prompt", "question", {Prompt: 7470}),
        ("sft/toy_chat_fine_tuning.jsonl", "sft", "messages", {Conversation: 5}),
        ("preference/dpo_en_demo.json", "preference", "conversations", {Pair: 300}),
        # Six of its rows prefer a text to itself.
        ("preference/instruction-data-with-preference.json", "preference", "instruction", {Pair: 1094, EmptySample: 6}),
    ],
)
def test_real_files(assets, file, kind, name, counts):
    rows = list(resolve_rows(str(assets / file)).rows(lambda _: None))
    format = find_format(list(rows[0].values), "auto", {}, kind)
    found: Counter[type] = Counter()
    for row in rows:
        try:
            found[type(format.convert(row.values))] += 1
        except BrokenSample as error:
            found[type(error)] += 1
    assert format.name == name
    assert found == counts


def test_tool_calls_of_a_real_file(assets):
    """Every call is there as an object, and every observation has the id of the call before it."""
    path = assets / "sft" / "glaive_toolcall_en_demo.json"
    n_calls = 0
    for row in json.loads(path.read_text()):
        messages = converted(row).messages
        assert len(messages) == len(row["conversations"])
        for turn, message, before in zip(row["conversations"], messages, [{}, *messages], strict=False):
            if turn["from"] == "function_call":
                n_calls += 1
                assert [call["function"] for call in message["tool_calls"]] == [json.loads(turn["value"])]
            else:
                assert message["content"] == turn["value"]
            if turn["from"] == "observation":
                assert message["tool_call_id"] == before["tool_calls"][0]["id"]
    assert n_calls == 211
