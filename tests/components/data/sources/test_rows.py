"""Rows of all file formats: values, positions, broken rows and broken files."""

import csv
import gzip
import io
import json
import os
import tarfile
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from tests.components.data.helpers import raises
from torchtitan.assets.chats import Chats
from torchtitan.assets.stories import Stories
from torchtitan.components.data.sources import rows as rows_module
from torchtitan.components.data.sources.rows import Row
from torchtitan.components.data.sources.source import (
    CHAT_DATASETS,
    ChatDataset,
    Source,
    register_chat_dataset,
    resolve_source,
)
from torchtitan.tools.errors import UserError

ROWS = [
    {"id": "1", "question": "Wie heißt du? 🙂", "answer": 'Two\nlines, a comma, and "quotes"'},
    {"id": "2", "question": "文字", "answer": ""},
    {"id": "3", "question": "x" * 300_000, "answer": "long"},
]


def source_of(dataset: str, split: str = "train") -> Source:
    return resolve_source(dataset, split=split, catalog=CHAT_DATASETS)


def read_rows(source: Source) -> list[Row]:
    return list(source.rows(lambda _: None))


def rows_at(path: Path | str, split: str = "train") -> list[Row]:
    return read_rows(source_of(str(path), split))


def write(path: Path, rows: list[dict]) -> Path:
    if ".jsonl" in path.name:
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    elif ".json" in path.name:
        path.write_text(json.dumps(rows, indent=1))
    elif ".csv" in path.name:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(path.read_bytes()))
    return path


@pytest.fixture
def own_registry(monkeypatch):
    """Undo registrations after the test."""
    monkeypatch.setattr(CHAT_DATASETS, "registered", {})


@pytest.mark.parametrize("compression", ["", ".gz"])
@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_values_and_places(tmp_path, kind, compression):
    path = write(tmp_path / f"data.{kind}{compression}", ROWS)
    rows = rows_at(path)
    assert [row.values for row in rows] == ROWS
    place = {"jsonl": ":{}", "json": ", element {}", "csv": ":{}", "parquet": ", row {}"}[kind]
    numbers = (
        [2, 4, 5] if kind == "csv" else [1, 2, 3]
    )  # a CSV row has the number of its first line; the header is line 1
    assert [row.where for row in rows] == [path.name + place.format(number) for number in numbers]


@pytest.mark.parametrize("kind", ["txt", "jsonl", "json", "csv", "parquet", "jsonl.gz"])
def test_progress_adds_up_to_the_size(tmp_path, kind):
    path = tmp_path / f"data.{kind}"
    path.write_text("text " * 1000) if kind == "txt" else write(path, ROWS)
    source, seen = source_of(str(path)), []
    list(source.rows(seen.append))
    assert sum(seen) == source.size()


def test_text_file_is_one_row(tmp_path):
    (tmp_path / "a.md").write_bytes("\ufeff# Title\r\n\r\nText 文".encode())
    assert rows_at(tmp_path / "a.md") == [Row("a.md", {"text": "# Title\r\n\r\nText 文"})]


def test_blank_lines_are_skipped_and_counted(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"n": 1}\r\n\r\n  \n{"n": null}')
    assert rows_at(tmp_path / "a.jsonl") == [
        Row("a.jsonl:1", {"n": 1}),
        Row("a.jsonl:4", {"n": None}),
    ]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ('{"text": "never ends', "broken JSON, Invalid control character at (column 21)"),
        ("[1, 2]", "expected an object with columns as its keys, found a list"),
        ("17", "found an int"),
        ('{"text": "half \\ud83d of one"}', r"broken JSON, lone surrogate '\ud83d'"),
        ("[" * 100_000, "broken JSON, nested too deeply"),
        ('{"n": ' + "1" * 5000 + "}", "broken JSON, Exceeds the limit"),
    ],
)
def test_broken_line_is_a_row_with_an_error(tmp_path, line, error):
    (tmp_path / "a.jsonl").write_text(
        '{"text": "whole \\ud83d\\ude42"}\n' + line + '\n{"text": "c"}\n'
    )
    first, broken, last = rows_at(tmp_path / "a.jsonl")
    assert (first.values, last.values) == ({"text": "whole 🙂"}, {"text": "c"})
    assert (broken.where, broken.values) == ("a.jsonl:2", None)
    assert error in broken.error


@pytest.mark.parametrize("indent", [None, 2])
def test_lists(tmp_path, indent):
    elements = [{"n": 1, "t": 'a ], "b" \u6587'}, {}, {"n": [1, {"x": None}]}, {"n": -1.5e3}]
    for listed in (elements, elements[:1], []):
        (tmp_path / "a.json").write_text(" \n" + json.dumps(listed, indent=indent) + "\n\n")
        assert [row.values for row in rows_at(tmp_path / "a.json")] == listed
    (tmp_path / "a.json").write_text('[12, {"n": 1}, "\\ud83d", 34]')
    rows = rows_at(tmp_path / "a.json")
    assert [row.values for row in rows] == [None, {"n": 1}, None, None]
    assert [row.error.rpartition(", ")[2] for row in rows] == [
        "found an int",
        "",
        r"lone surrogate '\ud83d'",
        "found an int",
    ]


def test_a_list_is_searched_for_surrogates_once(tmp_path, monkeypatch):
    """Not once for each element, which takes minutes for a file of some megabytes."""
    searched = []
    search = rows_module._may_have_surrogates
    monkeypatch.setattr(
        rows_module, "_may_have_surrogates", lambda text: searched.append(text) or search(text)
    )
    (tmp_path / "a.json").write_text('[{"n": 1}, {"n": 2}, {"n": 3}]')
    assert len(rows_at(tmp_path / "a.json")) == 3
    assert len(searched) == 1


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('[{"n": 1}\n{"n": 2}]', ":2"),
        ('[{"n": 1},\n\n]', ":3"),
        ('[{"n": 1}\n', ":2"),
        ("[", ":1"),
        ('[{"n": 1,\n}]', ":2"),
        ("[]\n[]", ":2"),
        ('[{"n": ' + "[" * 100_000, ""),
    ],
)
def test_broken_lists(tmp_path, text, line):
    (tmp_path / "a.json").write_text(text)
    with raises(f"a.json{line}: broken JSON, "):
        rows_at(tmp_path / "a.json")


def test_broken_elements_and_cells(tmp_path):
    (tmp_path / "a.json").write_text('[{"n": 1}, "two"]')
    assert (
        rows_at(tmp_path / "a.json")[1].error
        == "expected an object with columns as its keys, found a str"
    )
    (tmp_path / "a.csv").write_text(",text\n0,a\n1,b,c\n2\n")
    rows = rows_at(tmp_path / "a.csv")
    assert [row.values for row in rows] == [{"": "0", "text": "a"}, None, None]
    assert [row.error for row in rows[1:]] == ["3 cells for 2 columns", "1 cells for 2 columns"]
    (tmp_path / "a.csv").write_text("text,,\na,1,2\n")
    assert rows_at(tmp_path / "a.csv")[0].values == {"text": "a", "": "2"}
    (tmp_path / "a.csv").write_text('\ntext\n\n\n"a\n\nb"\nc\n')
    assert [(row.where, row.values) for row in rows_at(tmp_path / "a.csv")] == [
        ("a.csv:5", {"text": "a\n\nb"}),
        ("a.csv:8", {"text": "c"}),
    ]


def test_completely_broken_files(tmp_path):
    for name, content, message in [
        ("a.json", b'[{"n": 1},\n{"n": 2', "a.json:2: broken JSON"),
        ("b.json", b'{\n"n": 1\n}', "b.json is one object over several lines"),
        ("a.csv", b'text\n"a\n', "a.csv:2: broken CSV"),
        (
            "c.csv",
            b"question;answer\na;b\n",
            "c.csv:1: the only column is 'question;answer'; separate columns by commas, not ';'",
        ),
        (
            "b.csv",
            b"prompt,text,text\na,b,c\n",
            "b.csv:1: the column name 'text' is repeated; rename one column",
        ),
        ("a.parquet", b"no parquet", "a.parquet is not a readable parquet file"),
        (
            "a.jsonl",
            b'{"n": 1}\n{"n": "\xff"}',
            "a.jsonl is not UTF-8: byte 0xff at offset 16 (line 2)",
        ),
        ("a.jsonl.gz", gzip.compress(b'{"n": 1}')[:-8], "a.jsonl.gz cannot be read"),
        ("a.jsonl.gz", b"", "a.jsonl.gz is empty, not a compressed file"),
        ("a.csv.zst", b"", "a.csv.zst is empty, not a compressed file"),
    ]:
        (tmp_path / name).write_bytes(content)
        with raises(message):
            rows_at(tmp_path / name)


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ("null", "expected an object with columns as its keys, found a NoneType"),
        ("5", "expected an object with columns as its keys, found an int"),
        ("[" * 100_000, "broken JSON, nested too deeply"),
        ('{"n": ' + "[" * 100_000 + "]" * 100_000 + "}", "broken JSON, nested too deeply"),
        (
            '{"n": ' + "9" * 5000 + "}",
            "broken JSON, Exceeds the limit (4300 digits) for integer string conversion",
        ),
        (r'{"a": [{"b": "\ud800"}]}', r"broken JSON, lone surrogate '\ud800'"),
        (r'{"\udfff": 1}', r"broken JSON, lone surrogate '\udfff'"),
        ("\0\0\0", "broken JSON, Expecting value"),
    ],
)
def test_rows_that_crash_parsers(tmp_path, row, error):
    (tmp_path / "a.jsonl").write_text(f'{{"n": 1}}\n{row}\n{{"n": 2}}\n')
    first, broken, last = rows_at(tmp_path / "a.jsonl")
    assert (first.values, last.values) == ({"n": 1}, {"n": 2})
    assert broken.where == "a.jsonl:2" and broken.error.startswith(error)
    (tmp_path / "a.json").write_text(f'[{{"n": 1}},\n{row},\n{{"n": 2}}]\n')
    try:
        found = rows_at(tmp_path / "a.json")[1]
        assert found.where == "a.json, element 2" and found.error == broken.error
    except UserError as whole:
        # Only errors of syntax have a place.
        line = ":2" if "Expecting" in str(whole) or "Unterminated" in str(whole) else ""
        assert str(whole).startswith(f"{tmp_path / 'a.json'}{line}: broken JSON, ") and error[
            :20
        ] in str(whole)


def test_parquet_values_without_python_equivalent(tmp_path):
    """Only rows with such values are broken."""
    columns = {
        "time": pyarrow.array([0, 2**62, 1]).cast(pyarrow.timestamp("us")),
        "date": pyarrow.array([0, 2**30, 1], pyarrow.int32()).view(pyarrow.date32()),
        "text": pyarrow.array([b"a", b"\xff", b"c"]).view(pyarrow.string()),
    }
    for name, column in columns.items():
        table = pyarrow.table({"prompt": ["x", "y", "z"], name: column})
        parquet.write_table(table, tmp_path / "a.parquet")
        rows = rows_at(tmp_path / "a.parquet")
        assert [row.where for row in rows] == [f"a.parquet, row {number}" for number in (1, 2, 3)]
        assert [row.values is None for row in rows] == [False, True, False]
        assert rows[1].error.startswith("a cell cannot be read: ")
        datasets = pytest.importorskip("datasets")
        datasets.Dataset(table).save_to_disk(tmp_path / name)
        if name == "text":
            with raises(f"the dataset saved in {tmp_path / name} cannot be read ("):
                rows_at(tmp_path / name)
        else:
            assert [row.error for row in rows_at(tmp_path / name)] == [row.error for row in rows]


def test_damaged_parquet_files(tmp_path):
    """A flipped bit leaves readable rows or raises an error with the file name; checksums of pages
    are verified."""
    rows = [{"text": f"number {i}", "n": i} for i in range(20)]
    path = tmp_path / "a.parquet"
    parquet.write_table(
        pyarrow.Table.from_pylist(rows), path, write_page_checksum=True, compression="none"
    )
    whole = path.read_bytes()
    failed = 0
    for place in range(0, len(whole), 23):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
        try:
            rows_at(path)
        except UserError as error:
            failed += 1
            assert "a.parquet" in str(error) and "\n" not in str(error)
    assert failed > 20
    place = whole.index(b"number 7")
    path.write_bytes(whole[:place] + b"Number 7" + whole[place + 8 :])
    with raises(f"{path} is not a readable parquet file: could not verify page integrity"):
        rows_at(path)


@pytest.mark.parametrize("name", ["state.json", "dataset_info.json"])
@pytest.mark.parametrize(
    "content", ["", "null", "[]", "5", "[" * 100_000, '{"_data_files": 5, "features": 5}']
)
def test_damaged_metadata_of_saved_datasets(tmp_path, name, content):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"prompt": ["x"]}).save_to_disk(tmp_path / "one")
    (tmp_path / "one" / name).write_text(content)
    with raises(f"the dataset saved in {tmp_path / 'one'} cannot be read (") as error:
        rows_at(tmp_path / "one")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name", ["../other/data-00000-of-00001.arrow", "../pipe", "/dev/zero", "..", "sub", "", 5]
)
def test_saved_datasets_read_only_files_in_their_folder(tmp_path, name):
    datasets = pytest.importorskip("datasets")
    for folder in ("one", "other"):
        datasets.Dataset.from_dict({"prompt": ["x"]}).save_to_disk(tmp_path / folder)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "one/sub").mkdir()
    state = tmp_path / "one/state.json"
    state.write_text(
        json.dumps({**json.loads(state.read_text()), "_data_files": [{"filename": name}]})
    )
    with raises(
        f"{state} refers to {name!r}, which is not a file in its folder; save the dataset again"
    ):
        rows_at(tmp_path / "one")


def test_objects_in_tables_have_no_keys_of_other_rows(tmp_path):
    """Arrow gives all objects of a column the same keys; JSON objects are unchanged."""
    rows = [
        {"messages": [{"role": "user", "content": "a"}], "note": None},
        {
            "messages": [
                {"role": "tool", "content": "b", "name": "f", "seen": {"x": [{"y": 1}, {"z": 2}]}}
            ],
            "note": "n",
        },
    ]
    assert [row.values for row in rows_at(write(tmp_path / "a.parquet", rows))] == rows
    explicit = [{"messages": [{"role": "user", "content": None}]}]
    assert [row.values for row in rows_at(write(tmp_path / "a.jsonl", explicit))] == explicit


def test_saved_datasets_and_their_splits(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [
        {"messages": [{"role": "user", "content": "a"}], "n": 1},
        {"messages": [{"role": "assistant", "content": "b", "weight": 0}], "n": None},
    ]
    train = datasets.Dataset.from_list(rows)
    train.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": train, "validation": train.select([1])}).save_to_disk(
        tmp_path / "several"
    )
    source = source_of(str(tmp_path / "one"))
    assert read_rows(source) == [Row("one, row 1", rows[0]), Row("one, row 2", rows[1])]
    assert source.size() == 2
    assert rows_at(tmp_path / "several", "validation") == [Row("validation, row 1", rows[1])]
    assert CHAT_DATASETS.splits(str(tmp_path / "several")) == ("train", "validation")
    with raises("has no split 'test'; use one of: train, validation"):
        rows_at(tmp_path / "several", "test")


def test_saved_images_are_not_decoded(tmp_path):
    """Reading needs no image library, and the stored bytes may be invalid images."""
    datasets = pytest.importorskip("datasets")
    image = {"bytes": b"no image", "path": None}
    features = datasets.Features({"prompt": datasets.Value("string"), "image": datasets.Image()})
    datasets.Dataset.from_dict({"prompt": ["x"], "image": [image]}, features=features).save_to_disk(
        tmp_path / "images"
    )
    [row] = rows_at(tmp_path / "images")
    assert row.values["prompt"] == "x" and row.values["image"]["bytes"] == b"no image"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            Path.unlink,
            "{}/state.json refers to 'data-00000-of-00001.arrow', which is not a file in its "
            "folder",
        ),
        (
            lambda file: file.write_bytes(file.read_bytes()[:100]),
            "the dataset saved in {} cannot be read (",
        ),
    ],
)
def test_damaged_saved_datasets(tmp_path, damage, message):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"prompt": ["x"] * 1000}).save_to_disk(tmp_path / "one")
    damage(next((tmp_path / "one").glob("*.arrow")))
    with raises(message.format(tmp_path / "one")):
        rows_at(tmp_path / "one")


def test_identity_depends_on_the_content(tmp_path):
    def identity(path: Path) -> list[str]:
        return source_of(str(path)).identity(lambda file: file.read_bytes().hex())

    (tmp_path / "sub").mkdir()
    first = identity(write(tmp_path / "a.jsonl", ROWS[:2]))
    assert identity(write(tmp_path / "sub" / "a.jsonl", ROWS[:2])) == first
    renamed = identity(write(tmp_path / "b.jsonl", ROWS[:2]))  # places contain the file name
    assert len({*first, *renamed, *identity(write(tmp_path / "a.jsonl", ROWS[1:]))}) == 3
    for name in ("chats", "stories"):
        splits = [
            source_of(name, split).identity(lambda _: "") for split in CHAT_DATASETS.splits(name)
        ]
        assert len(splits) == 2 and splits[0] != splits[1]


def test_folder_and_pattern(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("b.jsonl", "sub/a.csv"):
        write(tmp_path / name, ROWS[:1])
    (tmp_path / "notes.docx").write_bytes(b"\xff")
    assert [row.where for row in rows_at(tmp_path)] == ["b.jsonl:1", "sub/a.csv:2"]
    assert [row.values for row in rows_at(tmp_path / "**" / "*.csv")] == ROWS[:1]
    with raises("dataset 'chatz' is neither a registered name (chats, stories"):
        rows_at("chatz")
    with raises("did you mean 'chats'?"):
        rows_at("chatz")
    with raises(
        "file format is not supported; use one of: txt, md, jsonl, json, csv, parquet, tar, each "
        "also as .gz"
    ):
        rows_at(tmp_path / "notes.docx")


def test_embedded_sets():
    assert [row.values for row in rows_at("chats", "validation")] == [
        {"messages": m} for m in Chats("validation")
    ]
    source = source_of("stories", "validation")
    rows = read_rows(source)
    assert rows[1] == Row("stories (validation), row 2", {"text": Stories("validation")[1]})
    assert len(rows) == source.size()


def test_registered_local_set(tmp_path, own_registry):
    for split in ("train", "validation"):
        write(tmp_path / f"{split}.jsonl", [{"text": split}])
    mine = ChatDataset(path=str(tmp_path / "{split}.jsonl"), splits=("train", "validation"))
    register_chat_dataset("mine", mine)
    register_chat_dataset("mine", mine)  # repeated registration, as on a second import, is allowed
    assert CHAT_DATASETS.splits("mine") == ("train", "validation")
    assert rows_at("mine", "validation") == [Row("validation.jsonl:1", {"text": "validation"})]
    for name in ("mine", "chats"):
        with raises(f"the chat dataset {name!r} is already registered; use another name"):
            register_chat_dataset(name, ChatDataset(path="elsewhere.jsonl"))
    one_file = str(tmp_path / "train.jsonl")
    register_chat_dataset("one", ChatDataset(path=one_file, splits=("train", "validation")))
    assert len(rows_at("one")) == 1
    with raises(f"dataset 'one': {one_file} has no split 'validation'; use {{split}} in its path"):
        rows_at("one", "validation")
    register_chat_dataset("missing", ChatDataset(path=str(tmp_path / "nothing.jsonl")))
    with raises(f"{tmp_path / 'nothing.jsonl'} does not exist"):
        rows_at("missing")


def test_registered_hub_set(tmp_path, own_registry, monkeypatch):
    datasets = pytest.importorskip("datasets")
    write(tmp_path / "data.jsonl", [{"prompt": "p", "response": "r"}])
    fetched = datasets.load_dataset(
        "json",
        data_files=str(tmp_path / "data.jsonl"),
        split="train",
        cache_dir=str(tmp_path / "cache"),
    )
    requests = []

    def load_dataset(path, name, *, split, **_):
        requests.append((path, name, split))
        if path == "someone/absent":
            raise ConnectionError("Couldn't reach 'someone/absent' on the Hub\nmore lines")
        return fetched

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    register_chat_dataset(
        "present", ChatDataset(path="someone/something", name="en", splits=("train", "test"))
    )
    source = source_of("present", "test")
    assert requests == []  # loaded on demand only
    assert read_rows(source) == [Row("present (test), row 1", {"prompt": "p", "response": "r"})]
    assert requests == [("someone/something", "en", "test")]
    assert source.size() == 1 and fetched.cache_files[0]["filename"] in source.identity(str)[0]
    register_chat_dataset("absent", ChatDataset(path="someone/absent"))
    with raises(
        "dataset 'absent' (someone/absent, split 'train') cannot be read: Couldn't reach "
        "'someone/absent' on the Hub; check the network, or use a local path"
    ):
        rows_at("absent")


@pytest.mark.parametrize("name", ["a.parquet.gz", "a.json"])
def test_size_limit_of_files_that_are_read_as_a_whole(tmp_path, monkeypatch, name):
    path = write(tmp_path / name, [{"prompt": f"text {i}"} for i in range(1000)])
    monkeypatch.setattr("torchtitan.components.data.sources.files.CHUNK_SIZE", 100)
    assert len(rows_at(path)) == 1000
    monkeypatch.setattr("torchtitan.components.data.sources.files.MAX_WHOLE_SIZE", 500)
    with raises(f"{path} has more than 500 characters or bytes; "):
        rows_at(path)


def test_a_list_in_one_line_may_be_longer_than_a_row(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"prompt": f"text {i}"} for i in range(1000)]))
    for module in ("files", "rows"):
        monkeypatch.setattr(f"torchtitan.components.data.sources.{module}.MAX_ROW_CHARACTERS", 1000)
    assert len(rows_at(path)) == 1000


def test_real_files(assets):
    rows = rows_at(assets / "sft" / "gsm8k_train.jsonl")
    assert [row.values for row in rows] == [
        json.loads(line) for line in (assets / "sft/gsm8k_train.jsonl").open()
    ]
    elements = rows_at(assets / "preference" / "dpo_en_demo.json")
    assert [row.values for row in elements] == json.loads(
        (assets / "preference/dpo_en_demo.json").read_text()
    )


BLANK_FILES = {
    "a.jsonl": b'{"a": "b"}\n%s',
    "first.jsonl": b"%s",
    "a.json": b'%s{"a": "b"}',
    "a.csv": b"a\nb\n%s",
    "first.csv": b"%sa\nb\n",
    "a.txt": b"a%s",
    "a.md": b"%s",
}


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
@pytest.mark.parametrize("blank", [b"\n", b" \n", b"\r\n"])
@pytest.mark.parametrize("name", BLANK_FILES)
def test_blank_lines_are_bounded(tmp_path, monkeypatch, name, blank, compression):
    if name.endswith("csv") and blank == b" \n":
        pytest.skip("a cell with a space")
    monkeypatch.setattr("torchtitan.components.data.sources.rows.MAX_BLANK_ROWS", 1000)
    monkeypatch.setattr("torchtitan.components.data.sources.files.MAX_BLANK_CHARACTERS", 3000)
    path = tmp_path / f"{name}{compression}"

    def rows(n: int) -> list[Row]:
        content = BLANK_FILES[name] % (blank * n)
        codec = {".gz": "gzip", ".zst": "zstd"}.get(compression)
        path.write_bytes(pyarrow.compress(content, codec=codec, asbytes=True) if codec else content)
        return rows_at(path)

    rows(1000)
    what = "characters" if name in ("a.txt", "a.md") else "rows"
    with pytest.raises(
        UserError, match=rf"{path.name}:\d+: found more than [\d,]+ blank {what} up to here"
    ):
        rows(4000)


def test_empty_cells_and_long_blank_texts_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("torchtitan.components.data.sources.rows.MAX_BLANK_ROWS", 1000)
    table = pyarrow.table(
        {"a": pyarrow.array([None, ""] * 1000).dictionary_encode(), "b": [None] * 2000}
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    with raises("a.parquet, row 1001: found more than 1,000 blank rows"):
        rows_at(tmp_path / "a.parquet")
    write(tmp_path / "a.jsonl", [{"a": "x" + "\n" * (1 << 21)}])
    with raises("a.jsonl:1: found more than 1,048,676 blank characters"):
        rows_at(tmp_path / "a.jsonl")
    write(tmp_path / "b.jsonl", [{"a": i % 50, "b": ""} for i in range(5000)])  # one of 50 is blank
    assert len(rows_at(tmp_path / "b.jsonl")) == 5000


class TestWebDataset:
    SAMPLES = [
        {"__key__": "000", "txt": "Text Ü\n", "jpg": b"\xff"},
        {
            "__key__": "v1.0/001",
            "seg.txt": "left out",
            "json": {"text": "of json", "n": [1, 2]},
            "txt": "later",
        },
        {"__key__": "002", "json": {"n": 1}},
    ]

    def write(self, path: Path, samples=SAMPLES) -> Path:
        """Write a tar file by WebDataset's convention: a sample's members have the same name up to
        the first dot."""
        with tarfile.open(path, f"w:{path.suffix[1:]}" if path.suffix == ".gz" else "w") as archive:
            folder = tarfile.TarInfo("folder")
            folder.type = tarfile.DIRTYPE
            archive.addfile(folder)
            for sample in samples:
                for kind, value in list(sample.items())[1:]:
                    content = (
                        value
                        if isinstance(value, bytes)
                        else value
                        if kind.endswith("txt")
                        else json.dumps(value)
                    )
                    member = tarfile.TarInfo(f"{sample['__key__']}.{kind}")
                    content = content.encode() if isinstance(content, str) else content
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
        return path

    @pytest.mark.parametrize("name", ["a.tar", "a.tar.gz"])
    def test_rows(self, tmp_path, name):
        path = self.write(tmp_path / name)
        assert rows_at(path) == [
            Row(
                f"{name}, sample 000",
                {"text": "Text Ü\n", "images": [{"bytes": b"\xff", "path": "000.jpg"}]},
            ),
            Row(f"{name}, sample v1.0/001", {"text": "later", "n": [1, 2]}),
            Row(f"{name}, sample 002", {"n": 1}),
        ]
        seen: list[int] = []
        list(source_of(str(path)).rows(seen.append))
        assert sum(seen) == path.stat().st_size

    @pytest.mark.parametrize(
        "names",
        [
            ["a.TXT", "b.Txt", "c.txt"],
            ["._a.txt", "a.txt", "._b.txt", "b.txt"],
            ["./._a.txt", "./a.txt", ".hidden/a.txt", ".hidden/b.txt"],
            ["d/._a.txt", "d/a.txt", "d/.b", "d/b.txt"],
            [".txt", "a.txt", "d/.txt", "d/a.txt"],
            ["README", "a.txt", "LICENSE", "a.png", "d/README", "b.txt"],
            ["__meta__", "__meta__/a.txt", "__a__.txt", "d/__meta__/a.txt"],
            ["a.txt", "b.txt", "a.txt"],
            ["a.txt", "x", "a.png", "._a.txt", "a.cls"],
            ["a.", "a.txt", "b..txt", "c.txt", "d/e.f/g.txt", "ü.txt", "a b.txt"],
        ],
    )
    def test_members_are_those_of_webdataset(self, tmp_path, names):
        webdataset = pytest.importorskip("webdataset", reason="needs webdataset")
        with tarfile.open(tmp_path / "a.tar", "w") as archive:
            for number, name in enumerate(names):
                member = tarfile.TarInfo(name)
                member.size = len(f"text {number}")
                archive.addfile(member, io.BytesIO(f"text {number}".encode()))
        samples = webdataset.WebDataset(
            str(tmp_path / "a.tar"), shardshuffle=False, empty_check=False
        )
        expected, columns = [], {"text": "txt", "cls": "cls"}
        for s in samples:
            if "txt" not in s:
                continue
            values = {name: s[kind].decode() for name, kind in columns.items() if kind in s}
            if "png" in s:
                values["images"] = [{"bytes": s["png"], "path": f"{s['__key__']}.png"}]
            expected.append(Row(f"a.tar, sample {s['__key__']}", values))
        rows = [row for row in rows_at(tmp_path / "a.tar") if "neither .txt" not in row.error]
        assert rows == expected and expected
        named = [row.where for row in rows_at(tmp_path / "a.tar") if row.error]
        assert named == ["a.tar, sample b"] * ("b..txt" in names)

    @pytest.mark.parametrize(
        "kinds", [("txt", "txt"), ("txt", "TXT"), ("json", "json"), ("txt", "png", "png")]
    )
    def test_equal_members(self, tmp_path, kinds):
        """webdataset refuses them."""
        webdataset = pytest.importorskip("webdataset", reason="needs webdataset")
        path = tmp_path / "a.tar"
        with tarfile.open(path, "w") as archive:
            for kind in kinds:
                member = tarfile.TarInfo(f"a.{kind}")
                member.size = 2
                archive.addfile(member, io.BytesIO(b"{}"))
        with raises("duplicate file name in tar file", ValueError):
            list(webdataset.WebDataset(str(path), shardshuffle=False, empty_check=False))
        [row] = rows_at(path)
        last = f"a.{kinds[-1]}"
        assert (
            row.error
            == f"there are several members {last[1:].lower()}, the last one {last}; keep one of "
            "them"
        )

    def test_samples_without_text(self, tmp_path):
        source = source_of(
            str(self.write(tmp_path / "a.tar", [{"__key__": "0", "jpg": b"picture"}]))
        )
        with raises("a.tar, sample 0: it has neither .txt nor .json; remove the sample"):
            list(source.parts[0].documents(lambda n_bytes: None))

    def test_files_written_by_webdataset(self, tmp_path):
        """Rows equal the samples that the library itself decodes, in two shards."""
        webdataset = pytest.importorskip("webdataset", reason="needs webdataset")
        with webdataset.ShardWriter(str(tmp_path / "%03d.tar"), maxcount=2, verbose=0) as writer:
            for sample in self.SAMPLES[::2] * 2:
                writer.write({key: value for key, value in sample.items() if key != "jpg"})
        shards = sorted(map(str, tmp_path.glob("*.tar")))
        decoded = list(
            webdataset.WebDataset(shards, shardshuffle=False, empty_check=False).decode()
        )
        expected = [
            {"text": sample["txt"]} if "txt" in sample else sample["json"] for sample in decoded
        ]
        assert (
            [row.values for row in rows_at(tmp_path)] == expected
            and len(expected) == 4
            and len(shards) == 2
        )

    def test_broken_members(self, tmp_path):
        samples = [
            {"__key__": "0", "txt": b"\xff"},
            {"__key__": "1", "json": b"{"},
            {"__key__": "2", "txt": "good"},
            {"__key__": "3", "txt": b"a\0\0"},
        ]
        not_text, not_json, good, nul = rows_at(self.write(tmp_path / "a.tar", samples))
        assert not_text.error.startswith("0.txt is broken, 'utf-8' codec can't decode byte 0xff")
        assert not_json.error.startswith("1.json is broken, Expecting property name")
        assert good.values == {"text": "good"}
        assert nul.error == "3.txt is broken, it has a NUL character"

    def test_damaged_files(self, tmp_path):
        """A cut or overwritten file is an error, although tarfile would stop reading without
        one."""
        path = self.write(tmp_path / "a.tar")
        whole = path.read_bytes()
        for content in (
            whole[:1800],
            whole[: 3 * 512],
            whole[:1536] + b"x" * 512 + whole[2048:],
            b"no archive",
        ):
            path.write_bytes(content)
            with raises(f"{path} is not a readable tar file: "):
                rows_at(path)

    @pytest.mark.parametrize("name", ["a.tar", "a.tar.gz"])
    def test_empty_blocks_between_members(self, tmp_path, name):
        """They end an archive for tarfile, which would lose the samples after them: a header that
        is overwritten with zeros, and the end of the first of two archives."""
        whole = self.write(tmp_path / "whole.tar").read_bytes()
        compress = gzip.compress if name.endswith(".gz") else bytes
        for content in (whole[:512] + bytes(512) + whole[1024:], whole + whole):
            (tmp_path / name).write_bytes(compress(content))
            with raises(f"{tmp_path / name} is not a readable tar file: content follows empty "):
                rows_at(tmp_path / name)
