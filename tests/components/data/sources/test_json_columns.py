"""Columns of the type `Json` of `datasets`, in all files that keep it: rows equal those that
`datasets` returns."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from tests.components.data.helpers import raises, take, write_jsonl
from torchtitan.components.data.finetuning.preference import PreferenceDataLoader
from torchtitan.components.data.finetuning.prompts import PromptDataLoader
from torchtitan.components.data.finetuning.sft import SFTDataLoader
from torchtitan.components.data.plan import ShuffleSampler
from torchtitan.components.data.sources.rows import Row
from torchtitan.components.data.sources.source import CHAT_DATASETS, resolve_source

datasets = pytest.importorskip("datasets")

Json, List, LargeList, Value = datasets.Json, datasets.List, datasets.LargeList, datasets.Value


def rows_at(path: Path) -> list[Row]:
    return list(resolve_source(str(path), catalog=CHAT_DATASETS).rows(lambda _: None))


def documents_at(path: Path) -> list[str]:
    source: Any = resolve_source(str(path))
    return [
        "".join(document) for part in source.parts for document in part.documents(lambda _: None)
    ]


def save(data: Any, path: Path) -> Path:
    data.save_to_disk(path)
    return path


def save_shards(data: Any, path: Path) -> Path:
    data.save_to_disk(path, num_shards=min(2, len(data)))
    return path


def save_parquet(data: Any, path: Path) -> Path:
    path.mkdir()
    data.to_parquet(path / "a.parquet")
    return path


def save_parquet_without_arrow_schema(data: Any, path: Path) -> Path:
    """As other writers do: the type is only the column's logical type."""
    path.mkdir()
    parquet.write_table(data.data.table, path / "a.parquet", store_schema=False)
    return path


def save_hub_layout(data: Any, path: Path) -> Path:
    """As `push_to_hub` does: shards in `data`."""
    (path / "data").mkdir(parents=True)
    rows = list(data)
    for index, shard in enumerate((rows[:1], rows[1:])):
        written = datasets.Dataset.from_list(shard, features=data.features)
        written.to_parquet(path / f"data/train-{index:05}-of-00002.parquet")
    return path


FORMS = [save, save_shards, save_parquet, save_parquet_without_arrow_schema, save_hub_layout]
Save = Callable[[Any, Path], Path]

MIXED = [
    "plain words",
    'a "quoted" word',
    "",
    {"a": None, "b": [1, {"c": 2.5}]},
    [1, "x", None],
    42,
    True,
    "文字 🙂",
]

NESTED = {
    "top": (Json(), [*MIXED, None]),
    "list": (List(Json()), [MIXED, [], [None], None]),
    "lists": (List(List(Json())), [[MIXED, []], [], None]),
    "large": (LargeList(Json()), [MIXED, None]),
    "object": (
        {"x": Json(), "n": Value("int64")},
        [{"x": value, "n": 1} for value in MIXED] + [None],
    ),
    "objects": (
        List({"x": {"y": List(Json())}}),
        [[{"x": {"y": MIXED}}, {"x": {"y": []}}], [], None],
    ),
    "kept": (List(Json(decode=False)), [['{"a": 1}', "1"], None]),
    "text": (Value("string"), ['"text"', "{}", None]),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", NESTED)
def test_rows_equal_those_of_datasets(tmp_path, form: Save, case):
    feature, cells = NESTED[case]
    features = datasets.Features({"cell": feature, "n": Value("int64")})
    data = datasets.Dataset.from_list([{"cell": cell, "n": 1} for cell in cells], features=features)
    if case == "kept" and form is save_parquet_without_arrow_schema:
        pytest.skip("the file does not tell that the text is not decoded")
    assert [row.values for row in rows_at(form(data, tmp_path / "data"))] == list(data)


@pytest.mark.parametrize("form", FORMS)
def test_messages_of_json_lines_with_different_rows(tmp_path, form: Save):
    """The columns get the type `Json` by themselves, because rows differ."""
    content = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]
    parameters = [
        {"type": "object", "properties": {"city": {"type": "string"}}},
        {
            "type": "object",
            "properties": {"a": {"type": "integer", "enum": [1, 2]}},
            "required": ["a"],
        },
    ]
    rows = [
        {
            "messages": [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": "plain words"},
            ],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
        }
        for asked, schema in zip(("Hello", content), parameters, strict=True)
    ]
    lines = write_jsonl(tmp_path / "a.jsonl", rows)
    read = datasets.load_dataset(
        "json", data_files=lines, split="train", cache_dir=str(tmp_path / "cache")
    )
    assert "Json" in str(read.features)
    assert [row.values for row in rows_at(form(read, tmp_path / "data"))] == list(read) == rows


CALLS = [
    {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
    {"type": "function", "function": {"name": "g", "arguments": {"y": ["z"]}}},
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
    }
]
TEMPLATE = """\
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for message in messages %}
{{- message.role + ": " }}
{%- if message.role == "assistant" %}
{%- generation %}{{ message.content }}
{{- message.tool_calls | tojson if message.tool_calls }}{% endgeneration %}
{%- else %}{{ message.content }}{% endif %}
{%- endfor %}
"""
SAMPLES = {
    SFTDataLoader: (
        [
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "plain words", "tool_calls": CALLS[:n]},
                ],
                "tools": TOOLS,
            }
            for n in (1, 2)
        ],
        {
            "messages": List(
                {"role": Value("string"), "content": Json(), "tool_calls": List(Json())}
            ),
            "tools": List({"type": Value("string"), "function": Json()}),
        },
    ),
    PreferenceDataLoader: (
        [{"prompt": "a", "chosen": "good words", "rejected": "bad"}] * 2,
        dict.fromkeys(("prompt", "chosen", "rejected"), Json()),
    ),
    PromptDataLoader: (
        [
            {"prompt": "a", "answer": "x", "tests": {"n": [1, 2]}},
            {"prompt": "b", "answer": "y", "tests": "z"},
        ],
        dict.fromkeys(("prompt", "answer", "tests"), Json()),
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("loader", SAMPLES)
def test_samples_equal_those_of_json_lines(tmp_path, tokenizer, form: Save, loader):
    rows, features = SAMPLES[loader]
    data = datasets.Dataset.from_list(rows, features=datasets.Features(features))
    (tmp_path / "a.jinja").write_text(TEMPLATE)

    def batches(path: Path | str) -> list[Any]:
        config = loader.Config(
            dataset=[str(path)],
            chat_template=str(tmp_path / "a.jinja"),
            sampler=ShuffleSampler.Config(shuffle=False),
            cache_dir=str(tmp_path / "cache"),
        )
        built = config.build(tokenizer=tokenizer, seq_len=512, local_batch_size=1, epochs=1)
        return [repr(batch) for batch in take(built)]

    expected = batches(write_jsonl(tmp_path / "a.jsonl", rows))
    assert batches(form(data, tmp_path / "data")) == expected and expected


@pytest.mark.parametrize("form", FORMS)
def test_documents(tmp_path, form: Save):
    """A document has no quotes of its JSON text."""
    texts = ["plain words", 'a "quoted" word', "two\nlines", None]
    features = datasets.Features({"text": Json(), "other": Value("int64")})
    data = datasets.Dataset.from_list(
        [{"text": text, "other": 1} for text in texts], features=features
    )
    assert documents_at(form(data, tmp_path / "data")) == [*texts[:-1], ""]


def test_documents_that_are_no_text(tmp_path):
    data = datasets.Dataset.from_list([{"text": [1]}], features=datasets.Features({"text": Json()}))
    data.to_parquet(tmp_path / "a.parquet")
    with raises(f"{tmp_path / 'a.parquet'}, row 1: column 'text' contains a list, not text"):
        documents_at(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expected object or value"),
        ("{", "Expected object or value"),
        ("[" * 100_000, "Reached object decoding depth limit"),
        (r'["a\ud800"]', r"lone surrogate '\ud800'"),
        ("9" * 30, "Value is too big"),
    ],
)
def test_broken_json_is_an_error_of_its_row(tmp_path, text, message):
    cells = pyarrow.array(["1", text, '"\\u00e9"'], pyarrow.json_())
    parquet.write_table(pyarrow.table({"a": cells}), tmp_path / "a.parquet")
    first, broken, last = rows_at(tmp_path / "a.parquet")
    assert (first.values, last.values) == ({"a": 1}, {"a": "é"})
    assert broken.error.startswith(f"column 'a' is not valid JSON, {message}")


def test_json_in_types_that_datasets_does_not_read(tmp_path):
    """Maps, which have pairs, and cells that a dictionary holds."""
    values = pyarrow.array(['{"a": 1}', '"b"'], pyarrow.json_())
    columns = {
        "map": pyarrow.MapArray.from_arrays(
            pyarrow.array([0, 1, 2]), pyarrow.array(["x", "y"]), values
        ),
        "list": pyarrow.FixedSizeListArray.from_arrays(values, 1),
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    assert [row.values for row in rows_at(tmp_path / "a.parquet")] == [
        {"map": [("x", {"a": 1})], "list": [{"a": 1}]},
        {"map": [("y", "b")], "list": ["b"]},
    ]


@pytest.mark.parametrize(
    "metadata", ["", "null", "[]", '{"info": {"features": [1]}}', "[" * 100_000]
)
def test_damaged_metadata_of_a_schema(tmp_path, metadata):
    table = pyarrow.table({"a": pyarrow.array(["[1]"], pyarrow.json_())})
    parquet.write_table(
        table.replace_schema_metadata({"huggingface": metadata}), tmp_path / "a.parquet"
    )
    assert rows_at(tmp_path / "a.parquet")[0].values == {"a": [1]}


def test_text_that_only_metadata_calls_json(tmp_path):
    """`datasets` believes the type of the column, and returns text."""
    features = datasets.Features({"a": Json()}).to_dict()
    table = pyarrow.table({"a": ['{"a": 1}']})
    table = table.replace_schema_metadata(
        {"huggingface": json.dumps({"info": {"features": features}})}
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    files, cache = str(tmp_path / "a.parquet"), str(tmp_path / "cache")
    expected = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=cache)
    assert (
        [row.values for row in rows_at(tmp_path / "a.parquet")]
        == list(expected)
        == [{"a": '{"a": 1}'}]
    )


@pytest.mark.parametrize("kind", [pyarrow.float16(), pyarrow.float32()])
def test_short_floats_have_their_own_digits(kind, tmp_path):
    """The text of an answer is 0.1, not the digits of the double that pyarrow makes of it."""
    answers = [0.1, 2.5, 1e-5, -0.0, float("inf"), None]
    columns = {"answer": pyarrow.array(answers, kind), "vector": [[0.5]] * 6}
    columns["object"] = pyarrow.array([{"x": 0.3}] * 6, pyarrow.struct([("x", kind)]))
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    rows = [row.values for row in rows_at(tmp_path / "a.parquet")]
    assert [str(row["answer"]) for row in rows] == list(map(str, answers))
    assert rows[0]["object"] == {"x": 0.3} and rows[0]["vector"] == [0.5]
    assert columns["answer"].to_pylist()[0] != 0.1
