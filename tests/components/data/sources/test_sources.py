"""Dataset strings and file formats, and the error messages for wrong ones."""

import csv
import errno
import gzip
import json
import os
from pathlib import Path

import fsspec
import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from tests.components.data.helpers import raises
from torchtitan.assets.stories import Stories
from torchtitan.components.data.sources import lakes
from torchtitan.components.data.sources.files import CHUNK_SIZE
from torchtitan.components.data.sources.source import (
    DOCUMENTS,
    HubDataset,
    Source,
    StreamSource,
    register_dataset,
    resolve_source,
)
from torchtitan.tools.errors import UserError

TEXTS = ["First, a comma.", "Ünïcode — 文字 🙂", "", 'Two\nlines and "quotes"', "Last."]


def read_documents(source: Source) -> list[str]:
    return [
        "".join(document) for part in source.parts for document in part.documents(lambda _: None)
    ]


def documents_at(path: Path | str, text_column: str | None = None) -> list[str]:
    return read_documents(resolve_source(str(path), text_column))


def write_table(path: Path, column: str = "text", texts: list[str] = TEXTS) -> Path:
    rows = [{"id": i, column: text} for i, text in enumerate(texts)]
    kind = path.name.split(".")[1]
    if kind == "jsonl":
        content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    elif kind == "json":
        content = json.dumps(rows, indent=1).encode()
    elif kind == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["id", column])
            writer.writeheader()
            writer.writerows(rows)
        content = path.read_bytes()
    else:
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.compress(content)
    elif path.suffix == ".zst":
        content = zstandard.ZstdCompressor().compress(content)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_tables(tmp_path, kind, compression):
    assert documents_at(write_table(tmp_path / f"data.{kind}{compression}")) == TEXTS
    assert (
        documents_at(write_table(tmp_path / f"other.{kind}{compression}", "body"), "body") == TEXTS
    )


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", ["txt", "md"])
def test_text_file_is_one_unchanged_document(tmp_path, kind, compression):
    text = "\n".join(TEXTS) + "\r\nend\r" + "x文" * CHUNK_SIZE
    content = text.encode()
    if compression == ".gz":
        content = gzip.compress(content[:1000]) + gzip.compress(content[1000:])
    if compression == ".zst":
        compress = zstandard.ZstdCompressor().compress
        content = compress(content[:1000]) + compress(content[1000:])
    path = tmp_path / f"data.{kind}{compression}"
    path.write_bytes(content)
    assert documents_at(path) == [text]


def test_byte_order_mark_is_dropped(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    (tmp_path / "b.csv").write_bytes(b"\xef\xbb\xbftext,n\nhello,1\n")
    assert documents_at(tmp_path / "a.txt") == documents_at(tmp_path / "b.csv") == ["hello"]


def test_json_file_with_one_row_per_line(tmp_path):
    path = write_table(tmp_path / "data.jsonl").rename(tmp_path / "data.json")
    assert documents_at(path) == TEXTS


def test_blank_lines_and_nulls_count_as_lines(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "a"}\n\n{"text": null}\n{"text": "d"}')
    assert documents_at(path) == ["a", "", "", "d"]


def test_very_long_csv_cell(tmp_path):
    assert documents_at(write_table(tmp_path / "data.csv", texts=["x" * 500_000])) == [
        "x" * 500_000
    ]


def test_folder_is_searched_in_sorted_order(tmp_path):
    for name in ("b.txt", "a/z.md", "a/b/c.txt.gz", "a.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "a/z.md").write_text("z")
    (tmp_path / "a/b/c.txt.gz").write_bytes(gzip.compress(b"c"))
    write_table(tmp_path / "a.jsonl", texts=["j"])
    (tmp_path / "ignored.pdf").write_bytes(b"\xff")
    source = resolve_source(str(tmp_path))
    assert [part.name for part in source.parts] == ["a.jsonl", "a/b/c.txt.gz", "a/z.md", "b.txt"]
    assert read_documents(source) == ["j", "c", "z", "b"]
    assert documents_at(tmp_path / "**" / "*.txt*") == ["c", "b"]
    assert documents_at(tmp_path / "[ab].txt") == ["b"]


@pytest.mark.parametrize(
    ("metadata", "name"),
    [
        ("_delta_log/00000000000000000000.json", "Delta Lake"),
        ("metadata/00000-dceaab3f.metadata.json", "Iceberg"),
        ("metadata/v3.metadata.json", "Iceberg"),
        (".hoodie/hoodie.properties", "Hudi"),
        ("_versions/18446744073709551614.manifest", "Lance"),
    ],
)
def test_tables_whose_files_may_be_replaced(metadata, name, tmp_path, monkeypatch, log):
    """The names are those that deltalake 1.6, pyiceberg 0.12, Iceberg without a catalog, Hudi and
    pylance 14 write."""
    monkeypatch.setattr(lakes, "_warned", set())
    table = tmp_path / "[a]" / "table"
    for file in (table / "part=1" / "a.parquet", table / metadata):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_table(file) if file.suffix == ".parquet" else file.write_text("{}")
    for folder in (table, tmp_path):
        with raises(f"'{folder}' is or contains a table of {name} ("):
            documents_at(folder)
    store = fsspec.filesystem("memory")
    store.pipe({f"/{name}/a.parquet": b"", f"/{name}/{metadata}": b"{}"})
    with raises(f"is or contains a table of {name} ("):
        resolve_source(f"memory://{name}")
    assert "table" not in log.text
    for files in (table / "part=1" / "a.parquet", tmp_path / "*" / "table" / "**" / "*.parquet"):
        assert documents_at(files) == documents_at(write_table(tmp_path / "b.parquet"))
    assert log.text.count(f"{table} is a table of {name}, whose files may hold") == 1


def test_other_folders_are_no_tables(tmp_path, log):
    for name in ("metadata/a.jsonl", "_versions/a.jsonl", "delta_log/0.jsonl", "data/b.jsonl"):
        (tmp_path / name).parent.mkdir()
        write_table(tmp_path / name, texts=[name])
    for name in ("book.metadata.json", "video.metadata.json", "2024-01.metadata.json"):
        (tmp_path / "metadata" / name).write_text('[{"text": "a"}]')
    assert len(documents_at(tmp_path)) == 7 == len(documents_at(tmp_path / "*" / "*"))
    assert "table" not in log.text


def test_links_in_a_folder_cause_no_duplicates(tmp_path):
    """Links to the folder itself, its parent and another folder; `glob` never ends with two of
    them."""
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    (data / "b").mkdir(parents=True)
    elsewhere.mkdir()
    for file in (data / "a.txt", data / "b" / "b.txt", elsewhere / "c.txt", elsewhere / "d.txt"):
        file.write_text(file.stem)
    for link, target in {
        "latest": ".",
        "0latest": "b",
        "b/up": "..",
        "b/0.txt": "b.txt",
        "0.txt": "a.txt",
        "disk": elsewhere,
        "disk2": elsewhere,
        "c.txt": elsewhere / "c.txt",
        ".hidden": "nowhere",
    }.items():
        (data / link).symlink_to(target)
    for dataset, prefix in {
        data: "",
        data / "**" / "*.txt": f"{data}/",
        data / "**": f"{data}/",
    }.items():
        names = [part.name for part in resolve_source(str(dataset)).parts]
        assert names == [
            f"{prefix}{name}" for name in ("a.txt", "b/b.txt", "disk/c.txt", "disk/d.txt")
        ]
    assert [part.name for part in resolve_source(str(data / "b" / "**" / "a*")).parts] == [
        f"{data}/b/up/a.txt"
    ]
    assert documents_at(data / "**" / "up" / "**" / "*.txt") == ["a", "b", "c", "d"]
    assert documents_at(data / "0*.txt") == ["a"]
    assert documents_at(data / "latest") == documents_at(data)


def test_broken_link_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    gone = tmp_path / "gone.txt"
    gone.symlink_to("/no/where")
    for dataset in (tmp_path, tmp_path / "*.txt", tmp_path / "**" / "*"):
        with raises(f"{gone} is a link to '/no/where', which does not exist; fix or remove it"):
            documents_at(dataset)
    gone.unlink()
    gone.symlink_to(gone.name)
    with raises(f"{gone} cannot be read: Too many levels of symbolic links"):
        documents_at(tmp_path)
    gone.rename(tmp_path / "folder")  # the target may have been a folder
    with raises(f"{tmp_path / 'folder'} is a link to 'gone.txt', which does not exist"):
        documents_at(tmp_path)
    (tmp_path / "folder").rename(tmp_path / ".hidden")
    assert documents_at(tmp_path) == ["a"]


def test_special_files_are_rejected_unopened(tmp_path):
    """Opening a pipe would block until another process writes to it."""
    (tmp_path / "a.txt").write_text("a")
    os.mkfifo(tmp_path / "ignored")
    assert documents_at(tmp_path) == ["a"]
    os.mkfifo(tmp_path / "b.txt")
    for dataset in (tmp_path, tmp_path / "*.txt"):
        with raises(f"{tmp_path / 'b.txt'} is not a regular file; save its content to a file"):
            documents_at(dataset)
    with raises(f"'{tmp_path / 'b.txt'}' is not a regular file"):
        documents_at(tmp_path / "b.txt")
    (tmp_path / "b.txt").unlink()
    (tmp_path / "c.md").symlink_to("/dev/zero")
    with raises(f"{tmp_path / 'c.md'} is not a regular file"):
        documents_at(tmp_path)


def test_pipe_in_a_saved_dataset(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "one")
    [file] = (tmp_path / "one").glob("*.arrow")
    file.unlink()
    os.mkfifo(file)
    with raises(f"{file} is not a regular file"):
        documents_at(tmp_path / "one")


@pytest.mark.parametrize(
    "splits", ["", "null", "[]", "{}", '{"splits": 5}', '{"splits": ["../.."]}', "[" * 100_000]
)
def test_damaged_list_of_splits(tmp_path, splits):
    (tmp_path / "dataset_dict.json").write_text(splits)
    with raises(
        f"{tmp_path / 'dataset_dict.json'} is damaged: it contains no list of splits; save the "
        "dataset again"
    ):
        documents_at(tmp_path)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with raises(f"the dataset saved in {tmp_path / 'train'} cannot be read ("):
        documents_at(tmp_path)


@pytest.mark.parametrize(
    "dataset", ["~nobody-of-this-name/a.txt", "x" * 300, "a\0b", "x" * 300 + "/*.txt"]
)
def test_impossible_paths(dataset):
    with raises("dataset "):
        documents_at(dataset)


def test_unreadable_folder(tmp_path, monkeypatch):
    (tmp_path / "closed").mkdir()

    def fail(folder):
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    monkeypatch.setattr(os, "scandir", fail)
    with raises(f"dataset '{tmp_path}': {tmp_path} cannot be read: Permission denied"):
        documents_at(tmp_path)


def test_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("home")
    assert documents_at("~/a.txt") == documents_at("~/*.txt") == ["home"]


def test_saved_datasets_folder(tmp_path):
    datasets = pytest.importorskip("datasets")
    train = datasets.Dataset.from_dict({"text": TEXTS, "n": list(range(5))})
    train.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": train, "validation": train.select([1, 0])}).save_to_disk(
        tmp_path / "several"
    )
    assert documents_at(tmp_path / "one") == documents_at(tmp_path / "several") == TEXTS
    validation = resolve_source(str(tmp_path / "several"), None, "validation")
    assert read_documents(validation) == [TEXTS[1], TEXTS[0]]
    assert DOCUMENTS.splits(str(tmp_path / "several")) == ("train", "validation")
    with pytest.raises(
        UserError, match=r"no column 'body'; set --dataloader.text_column to one of: text, n"
    ):
        documents_at(tmp_path / "one", "body")
    with pytest.raises(UserError, match="has no split 'test'; use one of: train, validation"):
        resolve_source(str(tmp_path / "several"), None, "test")


def test_stories():
    train, validation = resolve_source("stories"), resolve_source("stories", None, "validation")
    assert read_documents(validation) == list(Stories("validation"))
    assert next(iter(train.parts[0].documents(lambda _: None))) == (Stories("train")[0],)
    assert train.identity(str) != validation.identity(str)


def test_registered_names(tmp_path):
    assert resolve_source("c4") == StreamSource(
        name="c4",
        dataset=HubDataset(path="allenai/c4", name="en", splits=("train", "validation")),
        split="train",
        text_column="text",
    )
    register_dataset("sources-test", HubDataset(path="someone/something", text_column="body"))
    assert resolve_source("sources-test").text_column == "body"
    assert resolve_source("sources-test", "other").text_column == "other"
    with pytest.raises(UserError, match="dataset 'c4' is already registered; use another name"):
        register_dataset("c4", HubDataset(path="someone/something"))


def test_progress_adds_up_to_the_size(tmp_path):
    for kind in ("txt", "jsonl", "json", "csv", "parquet", "jsonl.gz"):
        path = tmp_path / f"data.{kind}"
        path.write_text("text " * 1000) if kind == "txt" else write_table(path)
        [part] = resolve_source(str(path)).parts
        seen = []
        for document in part.documents(seen.append):
            "".join(document)
        assert sum(seen) == part.size(), kind


def test_missing_path_suggests_the_nearest(tmp_path):
    (tmp_path / "corpus.txt").write_text("a")
    with raises(f"{tmp_path / 'corpsu.txt'} does not exist; did you mean 'corpus.txt'?"):
        documents_at(tmp_path / "corpsu.txt")
    (tmp_path / "data").mkdir()
    with raises(f"{tmp_path / 'dta'} does not exist; did you mean 'data'?"):
        documents_at(tmp_path / "dta" / "x.txt")


def test_unknown_name_lists_registered_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with raises("dataset 'storeis' is neither a registered name (stories, c4"):
        documents_at("storeis")  # codespell:ignore
    with raises("did you mean 'stories'?"):
        documents_at("storeis")  # codespell:ignore
    with raises("dataset '' is neither"):
        documents_at("")


def test_paths_without_data(tmp_path):
    (tmp_path / "a.docx").write_text("a")
    with raises(
        "the file format is not supported; use one of: txt, md, jsonl, json, csv, parquet, tar, "
        "each also as"
    ):
        documents_at(tmp_path / "a.docx")
    with raises(f"the folder '{tmp_path}' contains no data files (txt, md, jsonl,"):
        documents_at(tmp_path)
    with raises("no file matches the pattern"):
        documents_at(tmp_path / "*.txt")
    with raises("has no split 'validation'; use one of: train"):
        resolve_source(str(tmp_path / "a.docx"), None, "validation")


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_wrong_column_lists_the_columns(tmp_path, kind):
    path = write_table(tmp_path / f"data.{kind}", "body")
    with raises("no column 'text'; set --dataloader.text_column to one of: id, body"):
        documents_at(path)
    with raises(str(path)):
        documents_at(path)


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
def test_column_without_text(tmp_path, kind):
    with raises("column 'id' contains an int, not text"):
        documents_at(write_table(tmp_path / f"data.{kind}"), "id")


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".csv", ".txt.gz", ".jsonl.zst"])
@pytest.mark.parametrize("distance", [10, 3 * CHUNK_SIZE - 1])
def test_undecodable_byte_error_gives_the_place(tmp_path, suffix, distance):
    line = {".txt": "文字\n", ".jsonl": '{"text": "文字"}\n', ".csv": "文字\n"}[
        "." + suffix.split(".")[1]
    ].encode()
    good = line * (distance // len(line) + 1)
    good = (b"text\n" if ".csv" in suffix else b"") + good
    content = good + line[:-4] + b"\xe6\xff"
    path = tmp_path / f"data{suffix}"
    if suffix.endswith(".gz"):
        path.write_bytes(gzip.compress(content))
    elif suffix.endswith(".zst"):
        path.write_bytes(zstandard.ZstdCompressor().compress(content))
    else:
        path.write_bytes(content)
    with pytest.raises(UnicodeDecodeError) as reference:
        content.decode()
    offset = reference.value.start
    line_number = content[:offset].count(b"\n") + 1
    with raises(
        f"{path} is not UTF-8: byte 0x{content[offset]:02x} at offset {offset} (line {line_number})"
    ):
        documents_at(path)


def test_incomplete_character_at_the_end(tmp_path):
    path = tmp_path / "data.txt"
    path.write_bytes(b"abc\xe6\x96")
    with raises("byte 0xe6 at offset 3 (line 1)"):
        documents_at(path)


@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_broken_json_error_gives_file_and_line(tmp_path, kind):
    path = tmp_path / f"data.{kind}"
    path.write_text('{"text": "a"}\n{"text": "b"}\n{"text": "c\n{"text": "d"}\n')
    with raises(f"{path}:3: broken JSON"):
        documents_at(path)
    path.write_text('\n[{"text": "a"},\n{"text": "b"}\n{"text": "c"}]')
    with raises(f"{path}:{4 if kind == 'json' else 2}: broken JSON"):
        documents_at(path)
    path.write_text('{"text": "a"}\n[1, 2]\n')
    with raises(f"{path}:2: expected an object with columns as its keys, found a list"):
        documents_at(path)


def test_broken_csv_parquet_and_compressed_files(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text('text\na\n"b\n')
    with raises(f"{path}:3: broken CSV"):
        documents_at(path)
    path = tmp_path / "data.parquet"
    path.write_text("no parquet")
    with raises(f"{path} is not a readable parquet file"):
        documents_at(path)
    for suffix in (".gz", ".zst"):
        path = write_table(tmp_path / f"data.jsonl{suffix}")
        path.write_bytes(path.read_bytes()[:-20])
        with raises(f"{path} cannot be read: "):
            documents_at(path)


@pytest.mark.parametrize("kind", ["txt", "csv"])
def test_nul_characters_are_errors(tmp_path, kind):
    path = tmp_path / f"data.{kind}"
    path.write_bytes(b"text\na\n" + bytes(100))
    with raises(f"{path}:3: found a NUL character; the file may be damaged or UTF-16"):
        documents_at(path)
    path.write_text("text\na\n", encoding="utf-16-le")
    with raises(f"{path}:1: found a NUL character"):
        documents_at(path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", '{"text": "a"}\n{"text": "%s"}'),
        ("a.csv", 'text\n"%s"'),
        ("b.csv", 'text,"\n%s'),  # the quote is never closed
    ],
)
def test_row_size_limit(tmp_path, monkeypatch, name, content):
    for module in ("files", "rows"):
        monkeypatch.setattr(f"torchtitan.components.data.sources.{module}.MAX_ROW_CHARACTERS", 1000)
    monkeypatch.setattr("torchtitan.components.data.sources.files.CHUNK_SIZE", 100)
    if name != "b.csv":
        (tmp_path / name).write_text(content % ("x" * 900))
        assert documents_at(tmp_path / name)[-1] == "x" * 900
    (tmp_path / name).write_text(content % ("x" * 5000))
    with raises(f"{tmp_path / name}:2: "):
        documents_at(tmp_path / name)


def test_real_files(assets):
    text = assets / "text" / "tinyshakespeare.txt"
    assert documents_at(text) == [text.read_text()]
    rows = [json.loads(line) for line in (assets / "text" / "c4_demo.jsonl").open()]
    assert documents_at(assets / "text" / "c4_demo.jsonl") == [row["text"] for row in rows]
    table = parquet.read_table(assets / "text" / "c4-train-00000-of-01637.parquet")
    assert documents_at(assets / "text" / "c4-train-*.parquet") == table.column("text").to_pylist()
