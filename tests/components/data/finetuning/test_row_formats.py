"""Row formats: conversion to samples, recognition by columns, rejected rows."""

import json
import re
import sys
from collections import Counter

import pytest

from tests.components.data.helpers import raises
from torchtitan.components.data.finetuning.columns import parse_columns
from torchtitan.components.data.finetuning.conversation import (
    BrokenSample,
    Conversation,
    EmptySample,
    Pair,
    Prompt,
    Text,
)
from torchtitan.components.data.finetuning.row_formats import (
    FORMATS,
    RowFormat,
    dataset_formats,
    find_format,
    function_format,
)
from torchtitan.components.data.sources.source import (
    CHAT_DATASETS,
    ChatDataset,
    register_chat_dataset,
    resolve_source,
)

QUESTION, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
SYSTEM = {"role": "system", "content": "s"}


def turns(*texts: str) -> list[dict[str, object]]:
    """Return messages of the user and the assistant by turns."""
    sides = ("user", "assistant")
    return [{"role": sides[n % 2], "content": text} for n, text in enumerate(texts)]


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
        (
            {"instruction": "q", "input": "i", "output": "a"},
            [{"role": "user", "content": "q\n\ni"}, ANSWER],
        ),
        ({"instruction": "", "input": "q", "output": "a"}, [QUESTION, ANSWER]),
        ({"question": "q", "answer": 0}, [QUESTION, {"role": "assistant", "content": "0"}]),
        ({"prompt": 1.5, "response": "a"}, [{"role": "user", "content": "1.5"}, ANSWER]),
        (
            {"instruction": "q", "input": 2, "output": 4, "history": [["q", 3]]},
            [
                QUESTION,
                {"role": "assistant", "content": "3"},
                {"role": "user", "content": "q\n\n2"},
                {"role": "assistant", "content": "4"},
            ],
        ),
        (
            {"instruction": "q", "context": "i", "response": "a", "category": "c"},
            [{**QUESTION, "content": "q\n\ni"}, ANSWER],
        ),
        (
            {"id": "1", "system_prompt": "s", "question": "q", "response": "a"},
            [SYSTEM, QUESTION, ANSWER],
        ),
        ({"system_prompt": "", "question": "q", "response": "a"}, [QUESTION, ANSWER]),
        (
            {"query": "q", "response": "a", "type": "t", "original_question": "o"},
            [QUESTION, ANSWER],
        ),
        ({"problem": "q", "solution": "a", "answer": "3", "source": "s"}, [QUESTION, ANSWER]),
        ({"problem": "p", "solution": "s", "messages": [QUESTION, ANSWER]}, [QUESTION, ANSWER]),
        (
            {"instruction": "r", "output": "b", "history": [["q", "a"]], "system": "s"},
            [
                SYSTEM,
                QUESTION,
                ANSWER,
                {"role": "user", "content": "r"},
                {"role": "assistant", "content": "b"},
            ],
        ),
    ],
)
def test_text_columns(row, messages):
    assert converted(row) == Conversation(messages)


@pytest.mark.parametrize(
    ("row", "error", "kind"),
    [
        ({"text": " \n"}, "text is empty", EmptySample),
        ({"text": None}, "text is empty", EmptySample),
        ({"prompt": "q", "response": ""}, "response is empty", EmptySample),
        ({"prompt": None, "response": "a"}, "prompt is empty", EmptySample),
        (
            {"question": "q", "answer": True},
            "the answer must be text, not a bool: True",
            BrokenSample,
        ),
        (
            {"question": "q", "answer": float("nan")},
            "the answer must be text, not a float: nan",
            BrokenSample,
        ),
        ({"instruction": "", "input": None, "output": "a"}, "instruction is empty", EmptySample),
        (
            {"instruction": "q", "output": "a", "history": ["q"]},
            "history must contain pairs of texts, not 'q'",
            BrokenSample,
        ),
        (
            {"instruction": "q", "output": "a", "history": 1},
            "history must be a list of pairs of texts",
            BrokenSample,
        ),
        (
            {"instruction": "q", "output": "a", "history": True},
            "history must be a list of pairs of texts, not True",
            BrokenSample,
        ),
        (
            {"prompt": "q", "response": [{"role": "assistant", "content": ""}]},
            "messages are empty",
            EmptySample,
        ),
        (
            {"instruction": "q", "output": "a", "history": [["q", None]]},
            "the role 'assistant' has no content",
            BrokenSample,
        ),
        (
            {"prompt": "q", "response": "a", "system": 3},
            "the system must be text, not an int",
            BrokenSample,
        ),
        (
            {"prompt": "q", "response": [QUESTION, ANSWER]},
            "--dataloader.columns messages=NAME",
            BrokenSample,
        ),
    ],
)
def test_unusable_rows(row, error, kind):
    with raises(error, kind):
        converted(row)


@pytest.mark.parametrize(
    "rejected",
    [
        {"rejected_response": "no"},
        {"rejected_response": [{"role": "assistant", "content": "no"}]},
        {"rejected_messages": [QUESTION, {"role": "assistant", "content": "no"}]},
    ],
)
def test_a_conversation_with_another_answer_is_a_pair(rejected):
    """The rows of ms-swift."""
    row = {"messages": [QUESTION, ANSWER], **rejected}
    expected = Pair(Conversation([QUESTION]), [ANSWER], [{"role": "assistant", "content": "no"}])
    assert converted(row, "preference") == expected
    assert converted(row | {"messages": json.dumps(row["messages"])}, "preference") == expected
    with raises("messages must end with the chosen answer", BrokenSample):
        converted(row | {"messages": [QUESTION]}, "preference")


def test_text():
    assert converted({"text": "Once.\n", "id": 3}) == Text("Once.\n")


class TestRecognition:
    @pytest.mark.parametrize("format", FORMATS, ids=lambda format: f"{format.kind}-{format.name}")
    def test_every_format_by_its_columns(self, format: RowFormat):
        assert find_format(format.required, "auto", {}, format.kind).name == format.name
        assert (
            find_format(format.required, format.name, {}, format.kind).required == format.required
        )

    def test_more_specific_columns_win(self):
        assert (
            find_format(["prompt", "prompt_id", "messages"], "auto", {}, "sft").name == "messages"
        )
        columns = ["text", "instruction", "input", "output"]
        assert find_format(columns, "auto", {}, "sft").name == "instruction"
        assert (
            find_format([*columns, "chosen", "rejected"], "auto", {}, "preference").name
            == "instruction"
        )
        assert find_format(columns, "text", {}, "sft").name == "text"

    def test_unknown_columns(self):
        with raises(
            "the rows have the columns frage, antwort, which match no format; rename them with"
        ) as e:
            find_format(["frage", "antwort"], "auto", {}, "sft")
        assert "prompt_response: prompt, response" in str(e.value)
        assert (
            "--dataloader.columns OURS=THEIRS, or set another --dataloader.format: messages: m"
            in str(e.value)
        )
        with raises("the rows have the columns frage, but 'text' needs text"):
            find_format(["frage"], "text", {}, "sft")
        with raises(
            "--dataloader.format 'mesages' is unknown; use one of: auto, messages, conversations, "
            "instruction"
        ):
            find_format(["messages"], "mesages", {}, "sft")  # codespell:ignore

    @pytest.mark.parametrize(
        "row",
        [
            {"Input": "q", "Output": "a"},
            {"inputs": "q", "targets": "a", "task": "t"},
            {"dialogue": [QUESTION, ANSWER], "id": 1},
            {"user": "q", "assistant": "a"},
        ],
    )
    def test_error_suggests_a_mapping_of_the_columns(self, row):
        with raises("which match no format") as caught:
            find_format(list(row), "auto", {}, "sft")
        [options] = re.findall(r"--dataloader.columns (.*), or set", str(caught.value))
        assert converted(row, mapping=parse_columns(options.split())) == Conversation(
            [QUESTION, ANSWER]
        )

    def test_mapping(self):
        mapping = parse_columns(["prompt=frage", "response = antwort"])
        assert mapping == {"prompt": "frage", "response": "antwort"}
        assert converted({"frage": "q", "antwort": "a"}, mapping=mapping) == Conversation(
            [QUESTION, ANSWER]
        )
        swapped = {"instruction": "output", "output": "instruction"}
        assert converted({"instruction": "a", "output": "q"}, mapping=swapped) == Conversation(
            [QUESTION, ANSWER]
        )

    def test_all_mapped_columns_are_read(self):
        row = {"messages": [QUESTION, {"role": "assistant", "content": "no"}], "q": "q", "a": "a"}
        mapping = {"prompt": "q", "response": "a"}
        assert converted(row, mapping=mapping) == Conversation([QUESTION, ANSWER])
        with raises("--dataloader.columns: the format 'messages' has no column 'prompt'"):
            find_format(list(row), "messages", mapping, "sft")
        with raises("the rows have the columns messages, a, prompt, which match no format"):
            find_format(list(row), "auto", {"prompt": "q"}, "sft")

    @pytest.mark.parametrize("extra", ["prompt", "messages", "conversations"])
    def test_preference_rows_are_rejected_in_fine_tuning(self, extra):
        columns = [extra, "chosen", "rejected"]
        with raises("the columns chosen and rejected are for preference training"):
            find_format(columns, "auto", {}, "sft")
        assert find_format(columns, "auto", {}, "prompt").name == extra
        row = {"prompt": "q", "chosen": "a", "rejected": "b"}
        assert converted(row, mapping={"response": "chosen"}) == Conversation([QUESTION, ANSWER])
        assert converted(
            {"messages": [QUESTION, ANSWER], **row}, format="messages"
        ) == Conversation([QUESTION, ANSWER])

    @pytest.mark.parametrize(
        "row",
        [
            {"prompt": "q", "chosen": "a", "rejected": "b"},
            {"question": "q", "chosen_messages": [ANSWER], "rejected_messages": [ANSWER]},
            {"instruction": "q", "output": "c", "chosen": "a", "rejected": "b"},
            {"problem": "q", "chosen": "a", "rejected": "b"},
            {"chosen": [QUESTION, ANSWER], "rejected": [QUESTION]},
            {"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant: b"},
        ],
    )
    def test_error_suggests_how_to_train_on_one_answer_of_a_pair(self, row):
        with raises(" are for preference training; to train on one of them") as caught:
            find_format(list(row), "auto", {}, "sft")
        [option] = re.findall(r"--dataloader.columns ([a-z_=]+)", str(caught.value))
        formats = re.findall(r"; to ignore both, set --dataloader.format (\S+)", str(caught.value))
        assert formats == (["instruction"] if "instruction" in row else [])
        assert converted(row, mapping=parse_columns([option])) == Conversation([QUESTION, ANSWER])

    def test_answers_next_to_a_conversation_need_a_function(self):
        """No option appends an answer column to a conversation column."""
        with raises(
            "to train on one of them, write a function that returns the whole conversation"
        ) as caught:
            find_format(["conversations", "chosen", "rejected"], "auto", {}, "sft")
        assert str(caught.value).endswith("; to ignore both, set --dataloader.format conversations")

    def test_mapping_overrides_an_existing_column(self):
        row = {"prompt": "no", "question": "q", "response": "a"}
        assert converted(row, mapping={"prompt": "question"}) == Conversation([QUESTION, ANSWER])

    @pytest.mark.parametrize(
        ("columns", "row", "needs"),
        [
            (
                ["messages", "prompt", "response"],
                {"prompt": "q", "response": "a"},
                "prompt, response",
            ),
            (
                ["prompt", "response", "completion"],
                {"prompt": "q", "completion": "a"},
                "prompt, completion",
            ),
            (["prompt", "response", "text"], {"prompt": " ", "response": "", "text": "t"}, "text"),
        ],
    )
    def test_merged_file_with_two_formats(self, columns, row, needs):
        """Rows of the second format have null in the columns of the first one."""
        row = {**dict.fromkeys(columns), **row}
        format = find_format(columns, "auto", {}, "sft")
        with raises(
            f"is empty, but the columns of another format have content ({needs})", BrokenSample
        ):
            format.convert(row)
        with raises("is empty", EmptySample):
            converted(row, format=format.name)

    def test_empty_answer_next_to_a_text_is_empty(self):
        """In Alpaca's rows, `text` repeats the other columns."""
        with raises("output is empty", EmptySample):
            converted({"instruction": "q", "output": "", "text": "Below is an instruction. q"})

    def test_later_rows_may_lack_a_column(self):
        format = find_format(["frage", "response"], "auto", {"prompt": "frage"}, "sft")
        with raises("no column prompt; the columns are: response", BrokenSample):
            format.convert({"response": "a"})

    @pytest.mark.parametrize("entry", ["prompt", "=frage", "prompt=", ""])
    def test_malformed_mapping(self, entry):
        with raises(f"--dataloader.columns: {entry!r} must have the form OURS=THEIRS"):
            parse_columns([entry])

    def test_wrong_mapping(self):
        with raises("'prompt' is set twice, to 'a' and 'b'"):
            parse_columns(["prompt=a", "prompt=b"])
        with raises("--dataloader.columns: no format has a column 'promt'; did you mean 'prompt'?"):
            find_format(["frage"], "auto", {"promt": "frage"}, "sft")  # codespell:ignore
        with raises("the rows have no column 'frag'; did you mean 'frage'? (they have: frage)"):
            find_format(["frage"], "auto", {"prompt": "frag"}, "sft")

    def test_fingerprint_changes_with_the_conversion(self):
        columns = ["text", "prompt", "response"]
        chosen = [
            find_format(columns, "auto", {}, "sft"),
            find_format(columns, "prompt_response", {}, "sft"),
            find_format(columns, "text", {}, "sft"),
            find_format(columns, "text", {"text": "prompt"}, "sft"),
            find_format([*columns, "chosen", "rejected"], "auto", {}, "preference"),
        ]
        assert len({format.fingerprint for format in chosen}) == 5
        assert (
            find_format(["prompt", "response"], "auto", {}, "sft").fingerprint
            == chosen[0].fingerprint
        )


class TestLabels:
    """KTO rows with one answer, labeled good or bad."""

    @pytest.mark.parametrize("label", [False, "False", "false", 0, "0", "undesirable"])
    @pytest.mark.parametrize(
        "row",
        [
            {"prompt": "q", "completion": "a"},
            {"prompt": [QUESTION], "completion": [ANSWER]},
            {"messages": [QUESTION, ANSWER]},
        ],
    )
    def test_bad_answer_is_rejected(self, row, label):
        for column in ("label", "kto_tag"):
            with raises(
                f"its {column} is {label!r}: such columns rate answers, as for KTO, so this answer "
                "must not be learned"
            ):
                converted({**row, column: label})
        with raises("its label is"):
            function_format(lambda row: row, "sft").convert({**row, "label": label})

    @pytest.mark.parametrize("column", ["weight", "loss_weight", "sample_weight"])
    def test_row_with_weight_0_is_rejected(self, column):
        row = {"prompt": "q", "completion": "a"}
        with raises(
            f"its {column} is 0: such columns weight rows, so this answer must not be learned"
        ):
            converted({**row, column: 0})
        assert converted({**row, column: 1.0}) == Conversation([QUESTION, ANSWER])

    def test_good_answers_are_accepted(self):
        row, expected = {"prompt": "q", "completion": "a"}, Conversation([QUESTION, ANSWER])
        assert converted({**row, "label": True}) == expected
        assert converted({**row, "label": False}, format="prompt_completion") == expected
        assert converted({**row, "label": False}, "prompt") == Prompt(
            Conversation([QUESTION]), None
        )
        assert converted({"text": "t", "label": False}) == Text("t")

    def test_labeled_rows_are_no_pairs(self):
        with raises("the column label rates single answers; use --config kto"):
            find_format(["prompt", "completion", "label"], "auto", {}, "preference")


@pytest.mark.parametrize(
    ("row", "unread"),
    [
        (
            {"messages": [], "Label": 0, "score": 0.5, "id": 3, "images": [], "tools": [1]},
            ["Label", "score"],
        ),
        (
            {"messages": [], "system_prompt": "s", "functions": "[1]", "loss_weight": 0},
            ["loss_weight"],
        ),
        (
            {"messages": [], "system": "t", "system_prompt": "s", "history": [["q", "a"]]},
            ["system_prompt", "history"],
        ),
        ({"prompt": "q", "response": "a", "context": "c", "rejected": " "}, ["context"]),
        (
            {
                "instruction": "q",
                "response": "a",
                "context": "c",
                "history": [],
                "functions": "[1]",
            },
            [],
        ),
        ({"instruction": "q", "output": "a", "tools": [1], "score": 1}, ["score"]),
        ({"text": "t", "system": "s", "labels": None}, ["system"]),
    ],
)
def test_unread_columns(row, unread):
    assert find_format(list(row), "auto", {}, "sft").unread_columns(row) == unread


def test_mapped_columns_and_columns_of_functions_are_read():
    row = {"prompt": "q", "response": "a", "score": "s", "system": "t"}
    assert find_format(list(row), "auto", {"system": "score"}, "sft").unread_columns(row) == [
        "system"
    ]
    assert function_format(as_question, "sft").unread_columns(row) == []


class TestPreference:
    @pytest.mark.parametrize("column", ["output", "response"])
    def test_lists_of_two_answers(self, column):
        row = {"instruction": "q", "input": "i", column: ["better", "worse"]}
        expected = converted(
            {"instruction": "q", "input": "i", "chosen": "better", "rejected": "worse"},
            "preference",
        )
        assert converted(row, "preference") == expected
        with raises(f"{column} has 2 answers, as rows for preference training have"):
            converted(row)
        for value in ("better", ["better"], ["a", "b", "c"]):
            with pytest.raises(BrokenSample, match=f"^{column} must be a list of two answers, the"):
                converted({**row, column: value}, "preference")
        with pytest.raises(BrokenSample, match="label rates single ones .--config kto"):
            converted({**row, column: "better", "label": True}, "preference")
        with pytest.raises(EmptySample):
            converted({**row, column: []}, "preference")

    @pytest.mark.parametrize("label", [True, False])
    @pytest.mark.parametrize(
        "row",
        [
            {"instruction": "q", "input": "i", "output": "a"},
            {"instruction": "q", "input": "i", "response": "a"},
            {"messages": turns("q\n\ni", "a")},
            {
                "conversations": [
                    {"from": "human", "value": "q\n\ni"},
                    {"from": "gpt", "value": "a"},
                ]
            },
        ],
    )
    def test_conversations_with_a_label(self, row, label):
        """As in LLaMA-Factory and ms-swift."""
        expected = converted({"prompt": "q\n\ni", "completion": "a", "label": label}, "rated")
        assert converted({**row, "label": label}, "rated") == expected
        assert bool(expected.chosen) is label and bool(expected.rejected) is not label

    @pytest.mark.parametrize(
        ("messages", "fault"),
        [
            (turns("q", "a", "q"), "must be an answer"),
            (turns("q", "a")[1:], "must be an answer to a prompt"),
            ([*turns("q"), {**turns("q", "a")[1], "weight": 0}], "has the weight 0"),
        ],
    )
    def test_a_label_rates_the_last_message(self, messages, fault):
        with pytest.raises(BrokenSample, match=f"^label rates the last message, which {fault}"):
            converted({"messages": messages, "label": True}, "rated")

    def test_texts_after_a_prompt(self):
        pair = converted(
            {"prompt": "q", "chosen": "a", "rejected": "b", "system": "s"}, "preference"
        )
        rejected = [{"role": "assistant", "content": "b"}]
        assert pair == Pair(Conversation([SYSTEM, QUESTION]), [ANSWER], rejected)
        instruction = {
            "instruction": "q",
            "input": "i",
            "output": "unused",
            "chosen": "a",
            "rejected": "b",
        }
        prompt = Conversation([{"role": "user", "content": "q\n\ni"}])
        assert converted(instruction, "preference") == Pair(prompt, [ANSWER], rejected)

    @pytest.mark.parametrize(
        "extra", [{}, {"prompt": "q"}, {"messages": [QUESTION, ANSWER], "prompt": "q"}]
    )
    def test_whole_conversations(self, extra):
        worse = [{"role": "assistant", "content": "b"}, QUESTION, ANSWER]
        row = {
            **extra,
            "chosen": [SYSTEM, QUESTION, ANSWER],
            "rejected": [SYSTEM, QUESTION, *worse],
        }
        assert converted(row, "preference") == Pair(
            Conversation([SYSTEM, QUESTION]), [ANSWER], worse
        )

    def test_prompt_is_the_common_prefix(self):
        more = [QUESTION, ANSWER, {"role": "user", "content": "r"}]
        row = {
            "chosen": [*more, ANSWER],
            "rejected": [*more, {"role": "assistant", "content": "b"}],
        }
        assert converted(row, "preference").prompt.messages == more
        row = {"chosen": [QUESTION, ANSWER], "rejected": [QUESTION, ANSWER, QUESTION, ANSWER]}
        assert converted(row, "preference") == Pair(
            Conversation([QUESTION]), [ANSWER], [ANSWER, QUESTION, ANSWER]
        )

    def test_alternative_names_of_message_columns(self):
        row = {
            "chosen_messages": [QUESTION, ANSWER],
            "rejected_messages": [QUESTION, {**ANSWER, "content": "b"}],
        }
        expected = Pair(Conversation([QUESTION]), [ANSWER], [{**ANSWER, "content": "b"}])
        assert (
            converted(row, "preference")
            == converted({"prompt": "q", **row}, "preference")
            == expected
        )

    @pytest.mark.parametrize("extra", [{}, {"prompt": "q"}])
    def test_transcripts_with_a_common_prefix(self, extra):
        """The published form of Anthropic's HH."""
        prompt = "\n\nHuman: q\n\nAssistant: a\n\nHuman: More?\n\nAssistant:"
        pair = converted(
            {**extra, "chosen": f"{prompt} Yes.", "rejected": f"{prompt} No.\n\nNo!"}, "preference"
        )
        assert pair == Pair(
            Conversation([QUESTION, ANSWER, {"role": "user", "content": "More?"}]),
            [{"role": "assistant", "content": "Yes."}],
            [{"role": "assistant", "content": "No.\n\nNo!"}],
        )
        with raises("rejected is empty", EmptySample):
            converted({"chosen": f"{prompt} Yes.", "rejected": prompt}, "preference")

    def test_sharegpt_pairs(self):
        turn = {"from": "gpt", "value": "b"}
        call = {"from": "function_call", "value": '{"name": "f"}'}
        turns = [{"from": "human", "value": "q"}, call, {"from": "observation", "value": "1"}]
        pair = converted({"conversations": turns, "chosen": call, "rejected": [turn]}, "preference")
        assert [message["role"] for message in pair.prompt.messages] == [
            "user",
            "assistant",
            "tool",
        ]
        ids = [
            message["tool_calls"][0]["id"] for message in (pair.prompt.messages[1], pair.chosen[0])
        ]
        assert ids[0] != ids[1]
        assert pair.rejected == [{"role": "assistant", "content": "b"}]

    @pytest.mark.parametrize(
        ("row", "error", "kind"),
        [
            (
                {"prompt": "q", "chosen": "a", "rejected": "a"},
                "chosen and rejected are equal",
                EmptySample,
            ),
            ({"prompt": "q", "chosen": "a", "rejected": " "}, "rejected is empty", EmptySample),
            (
                {"prompt": "q", "chosen": {**ANSWER, "content": ""}, "rejected": "a"},
                "chosen is empty",
                EmptySample,
            ),
            (
                {"chosen": [QUESTION, ANSWER], "rejected": [QUESTION, ANSWER]},
                "are equal",
                EmptySample,
            ),
            (
                {"chosen": "a", "rejected": "b"},
                "chosen and rejected have no prompt; name its column with --dataloader.columns "
                "prompt=NAME",
                BrokenSample,
            ),
            (
                {"prompt": "q", "chosen": [ANSWER], "rejected": [{**ANSWER, "loss_weight": 0}]},
                "chosen or rejected has a message with weight 0",
                BrokenSample,
            ),
            (
                {"chosen": [QUESTION, ANSWER], "rejected": [SYSTEM, ANSWER]},
                "have no common first message to use as the prompt",
                BrokenSample,
            ),
            (
                {"chosen": [QUESTION, ANSWER], "rejected": [QUESTION, QUESTION, ANSWER]},
                "rejected continues the prompt with the role 'user'",
                BrokenSample,
            ),
        ],
    )
    def test_unusable_pairs(self, row, error, kind):
        with raises(error, kind):
            converted(row, "preference")


class TestPrompts:
    @pytest.mark.parametrize(
        ("row", "expected"),
        [
            ({"prompt": "q"}, Prompt(Conversation([QUESTION]), None)),
            ({"problem": "q", "solution": "s", "answer": 3}, Prompt(Conversation([QUESTION]), "3")),
            ({"query": "q", "system_prompt": "s"}, Prompt(Conversation([SYSTEM, QUESTION]), None)),
            ({"question": "q", "answer": "#### 3"}, Prompt(Conversation([QUESTION]), "#### 3")),
            (
                {"prompt": [SYSTEM, QUESTION], "solution": 3},
                Prompt(Conversation([SYSTEM, QUESTION]), "3"),
            ),
            (
                {"messages": [QUESTION], "ground_truth": "x", "answer": None},
                Prompt(Conversation([QUESTION]), "x"),
            ),
            ({"instruction": "q", "answer": 0.5}, Prompt(Conversation([QUESTION]), "0.5")),
        ],
    )
    def test_with_and_without_an_answer(self, row, expected):
        assert converted(row, "prompt") == expected

    def test_unusable_prompts(self):
        with raises("the prompt must not end with a message of the assistant", BrokenSample):
            converted({"messages": [QUESTION, ANSWER]}, "prompt")
        with raises("the answer must be text, not a bool", BrokenSample):
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
        assert (format.name, format.convert({"body": "x"})) == (
            "row_functions_mine:convert",
            Text("x"),
        )
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

    def test_function_may_return_any_format(self):
        assert function_format(as_question, "sft").convert({"body": "q"}) == Conversation(
            [QUESTION]
        )
        assert function_format(as_question, "prompt").convert({"body": "q"}) == Prompt(
            Conversation([QUESTION]), None
        )

    def test_function_errors(self):
        with raises("the function as_question failed: KeyError: 'body'", BrokenSample):
            function_format(as_question, "sft").convert({"text": "x"})
        with raises("returned a str; it must return a dictionary, or None"):
            function_format(lambda row: "text", "sft").convert({})
        with raises("returned the columns 'body', which match no format: messages: messages;"):
            function_format(lambda row: {"body": "x"}, "sft").convert({})
        with raises("is not a function written in Python"):
            function_format(json.loads.__call__, "sft")

    def test_function_file_may_import_from_its_folder(self, tmp_path, monkeypatch):
        (tmp_path / "row_helpers.py").write_text("def body(row):\n    return row['body']\n")
        (tmp_path / "mine.py").write_text(
            "from row_helpers import body\n\ndef convert(row):\n    return {'text': body(row)}\n"
        )
        path = list(sys.path)
        try:
            assert find_format(["body"], f"{tmp_path}/mine.py:convert", {}, "sft").convert(
                {"body": "b"}
            ) == Text("b")
        finally:
            sys.modules.pop("row_helpers", None)
        assert sys.path == path

    def test_missing_functions(self, tmp_path):
        (tmp_path / "mine.py").write_text(self.SOURCE)
        (tmp_path / "broken.py").write_text("import nothing_of_this_name\n")
        for name, message in [
            (
                f"{tmp_path}/mine.py:covert",  # codespell:ignore
                "has no function 'covert'; did you mean 'convert'?",  # codespell:ignore
            ),
            (f"{tmp_path}/other.py:convert", f"the file {tmp_path}/other.py does not exist"),
            (
                f"{tmp_path}/broken.py:convert",
                "failed: ModuleNotFoundError: No module named 'nothing_of_this_name'",
            ),
            ("not_a_module_at_all:convert", "the module 'not_a_module_at_all' does not exist"),
            (
                f"{tmp_path}/mine:convert",
                "must have the form package.module:function or path/to/file.py:function",
            ),
            (":convert", "must have the form"),
        ]:
            with raises(message):
                find_format(["body"], name, {}, "sft")
        with raises("--dataloader.columns cannot be combined with the function"):
            find_format(["body"], f"{tmp_path}/mine.py:convert", {"text": "body"}, "sft")


def test_registered_data_sets_define_their_format(monkeypatch):
    monkeypatch.setattr(CHAT_DATASETS, "registered", {})
    register_chat_dataset(
        "mapped", ChatDataset(path="a.jsonl", columns={"prompt": "frage", "response": "antwort"})
    )
    register_chat_dataset("function", ChatDataset(path="a.jsonl", function=as_question))
    columns = ["frage", "antwort", "text", "body"]
    row = {"frage": "q", "antwort": "a", "text": "t", "body": "b"}
    question = Conversation([{"role": "user", "content": "b"}])

    def read(dataset, format="auto", mapping=None):
        [row_format] = dataset_formats([dataset], [columns], format, mapping or {}, "sft")
        return row_format.convert(row)

    assert read("mapped") == Conversation([QUESTION, ANSWER])
    assert read("mapped", "text") == Text("t")
    assert read("mapped", mapping={"text": "body"}) == Text("b")
    assert read("function") == question
    assert read("a.jsonl") == Text("t")


def test_options_apply_to_matching_data_sets(monkeypatch):
    monkeypatch.setattr(CHAT_DATASETS, "registered", {})
    register_chat_dataset(
        "mapped", ChatDataset(path="a.jsonl", columns={"prompt": "q", "response": "a"})
    )
    register_chat_dataset("plain", ChatDataset(path="a.jsonl"))
    columns = {
        "mapped": ["q", "a"],
        "plain": ["text"],
        "x.jsonl": ["question", "reply"],
        "y.jsonl": ["messages"],
    }

    def names(datasets, format="auto", mapping=None):
        formats = dataset_formats(
            datasets, [columns[name] for name in datasets], format, mapping or {}, "sft"
        )
        return [row_format.name.split(":")[-1] for row_format in formats]

    mapping = {"prompt": "question", "response": "reply"}
    assert names(["x.jsonl", "y.jsonl", "mapped"], mapping=mapping) == [
        "prompt_response",
        "messages",
        "prompt_response",
    ]
    assert names(["y.jsonl", "plain"], "text") == ["messages", "text"]
    with raises("no column 'question'"):
        names(["y.jsonl", "mapped"], mapping=mapping)
    with raises("'text' needs text"):
        names(["y.jsonl"], "text")
    with raises("is unknown; use one of"):
        names(["y.jsonl", "plain"], "txt")
    function = f"{__name__}:as_question"
    assert names(["x.jsonl", "plain", "mapped"], function) == [
        "as_question",
        "as_question",
        "prompt_response",
    ]
    with raises("'mapped' is registered with a format"):
        names(["mapped"], function)


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
        # Six of its rows have equal chosen and rejected texts.
        (
            "preference/instruction-data-with-preference.json",
            "preference",
            "instruction",
            {Pair: 1094, EmptySample: 6},
        ),
    ],
)
def test_real_files(assets, file, kind, name, counts):
    rows = list(resolve_source(str(assets / file), catalog=CHAT_DATASETS).rows(lambda _: None))
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
    """Every call is an object, and every observation has the id of the preceding call."""
    path = assets / "sft" / "glaive_toolcall_en_demo.json"
    n_calls = 0
    for row in json.loads(path.read_text()):
        messages = converted(row).messages
        assert len(messages) == len(row["conversations"])
        for turn, message, before in zip(
            row["conversations"], messages, [{}, *messages], strict=False
        ):
            if turn["from"] == "function_call":
                n_calls += 1
                assert [call["function"] for call in message["tool_calls"]] == [
                    json.loads(turn["value"])
                ]
            else:
                assert message["content"] == turn["value"]
            if turn["from"] == "observation":
                assert message["tool_call_id"] == before["tool_calls"][0]["id"]
    assert n_calls == 211


def test_transcript_as_prompt():
    """Some copies of Anthropic's HH have a separate prompt column."""
    row = {"prompt": "\n\nHuman: q\n\nAssistant:", "chosen": " a", "rejected": " b"}
    pair = converted(row, "preference")
    assert pair.prompt.messages == [QUESTION]
    assert converted({"prompt": row["prompt"], "response": "a"}) == Conversation([QUESTION, ANSWER])
    unfinished = "Human: q"  # not a transcript: there is no header for the answer
    assert converted({"prompt": unfinished, "response": "a"}).messages[0]["content"] == unfinished
