"""Token cache: content, reuse, checks, failed builds."""

import errno
import json
import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

from tests.commands import RunningCommand
from tests.replacements import REPLACEMENTS
from torchtitan.components.data import disk_cache
from torchtitan.components.data.dataloader import PretrainDataLoader
from torchtitan.components.data.finetuning.sft import SFTDataLoader
from torchtitan.components.data.pretraining import token_cache as encoding
from torchtitan.components.data.pretraining.token_cache import (
    TokenCache,
    encode_documents,
    open_token_cache,
    split_document,
)
from torchtitan.components.data.sources.source import resolve_source
from torchtitan.components.tokenizer import ArrayEncoder, PretrainedTokenizer, Tokenizer
from torchtitan.tools import digests
from torchtitan.tools.digests import cache_root
from torchtitan.tools.errors import UserError
from torchtitan.tools.progress import progress


class FailingTokenizer(PretrainedTokenizer):
    """Embedded tokenizer that fails if it encodes more than a probe."""

    def tokenize(self, texts, *, allow_special):
        assert max(len(text) for text in texts) < 5, "the cache was not used"
        return super().tokenize(texts, allow_special=allow_special)


class OtherTokenizer(PretrainedTokenizer):
    """Embedded tokenizer with a different fingerprint, like every other class."""


def same_fingerprint(kind: type[Tokenizer], tokenizer: Tokenizer) -> Tokenizer:
    twin = kind.Config().build()
    twin.fingerprint = tokenizer.fingerprint
    return twin


def open_cache(
    path: Path, tokenizer: Tokenizer, root: Path, text_column: str | None = None
) -> TokenCache:
    return open_token_cache(resolve_source(str(path), text_column), tokenizer, str(root))


def cache_folders(root: Path) -> list[str]:
    """Return the finished and unfinished token folders."""
    return sorted(path.name for path in (root / "tokens").iterdir() if path.suffix != ".lock")


def test_content_is_the_encoded_documents(tmp_path, tokenizer):
    texts = ["The first.", "", " \n", "A third <|end_of_text|> one, longer.\n" * 30, "x"]
    (tmp_path / "a.jsonl").write_text(
        "\n".join(f'{{"text": "{text}"}}'.replace("\n", "\\n") for text in texts)
    )
    (tmp_path / "b.txt").write_text("The last.")
    cache = open_cache(tmp_path, tokenizer, tmp_path / "cache")
    visible = [texts[0], texts[3], texts[4], "The last."]
    reference = tokenizer.encode_documents(visible)
    assert all(ids[0] == tokenizer.bos_id and ids[-1] == tokenizer.eos_id for ids in reference)
    assert cache.tokens(0, 10**9).tolist() == [i for ids in reference for i in ids]
    assert (cache.n_tokens, len(cache.lengths())) == (sum(map(len, reference)), 6)
    begins = np.cumsum([0] + [len(ids) for ids in reference])
    assert sorted(set(cache.starts(0, cache.n_tokens + 9).tolist())) == begins[:-1].tolist()
    assert cache.starts(begins[1] - 2, begins[1]).tolist() == []
    assert set(cache.starts(begins[1] - 2, begins[1] + 1).tolist()) == {2}
    last = cache.n_tokens - 1
    located = [
        cache.locate(int(i)) for i in (0, begins[1] - 1, begins[1], begins[2], begins[3], last)
    ]
    assert located == [
        *(("a.jsonl, document", n) for n in (1, 1, 4, 5)),
        *[("b.txt, document", 1)] * 2,
    ]
    assert cache.describe(0, int(begins[1])) == "a.jsonl, documents 1-4"
    assert cache.describe(last, last) == "b.txt, document 1"
    assert cache.describe(int(begins[2]), last) == "a.jsonl, document 5 to b.txt, document 1"


def test_pickled_cache_contains_no_tokens(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("word " * 10_000)
    cache = open_cache(tmp_path / "a.txt", tokenizer, tmp_path / "cache")
    pickled = pickle.dumps(cache)
    assert len(pickled) < 1000
    assert (pickle.loads(pickled).tokens(0, 10**9) == cache.tokens(0, 10**9)).all()


@pytest.mark.parametrize(
    "folder, dtype", [("gpt2-tokenizer", "uint16"), ("llama3-tokenizer", "uint32")]
)
def test_large_vocabularies(tmp_path, assets, folder, dtype):
    tokenizer = PretrainedTokenizer.Config().build(path=assets / folder)
    text = "The quick brown fox. 文字 🙂 Ünïcode\n" * 20
    (tmp_path / "a.txt").write_text(text)
    cache = open_cache(tmp_path / "a.txt", tokenizer, tmp_path / "cache")
    [reference] = tokenizer.encode_documents([text])
    assert cache.tokens(0, 10**9).tolist() == reference
    assert (cache.folder / "tokens.bin").stat().st_size == len(reference) * np.dtype(dtype).itemsize


TRICKY = (
    "It's 1234567\n\n\n  indented\n\tdon't  \n x\n\ny.\n(z)\n12\n34 "
    "...\n\n'quoted'\n's\n文。\n\n字\n"
)


@pytest.mark.parametrize(
    "folder", ["", "gpt2-tokenizer", "llama3-tokenizer", "mistral-v0.3-tokenizer"]
)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_document_in_chunks_has_equal_tokens(assets, monkeypatch, folder, newline):
    tokenizer = PretrainedTokenizer.Config().build(path=assets / folder if folder else "")
    text = (assets / "text" / "tinyshakespeare.txt").read_text()[:200_000] + TRICKY * 50
    text = text.replace("\n", newline)
    monkeypatch.setattr(encoding, "PIECE_SIZE", 97)
    chunks = [text[i : i + 1013] for i in range(0, len(text), 1013)]
    n_encoded = []
    encode = ArrayEncoder.encode
    monkeypatch.setattr(
        ArrayEncoder,
        "encode",
        lambda self, texts: n_encoded.append(len(texts)) or encode(self, texts),
    )
    # documents end in other batches than they begin in
    monkeypatch.setattr(encoding, "BATCH_SIZE", 50_000)
    batches = list(encode_documents([chunks, ["short"], [" "]], ArrayEncoder(tokenizer)))
    ids = np.concatenate([batch.ids for batch in batches])
    before = np.cumsum([0] + [len(batch.ids) for batch in batches])
    ends = np.concatenate([batch.ends + n for batch, n in zip(batches, before, strict=False)])
    documents = [of_document.tolist() for of_document in np.split(ids, ends)]
    assert documents == [*tokenizer.encode_documents([text, "short"]), [], []]
    # Mistral's tokenizer marks the start of a text, so the document must not be split.
    assert (sum(n_encoded) > 500) == (folder != "mistral-v0.3-tokenizer") == (len(batches) > 2)


def test_chunks_are_bounded_and_read_on_demand():
    def chunks():
        for _ in range(100):
            n_read.append(1)
            yield "some words in a line\n" * 50

    n_read: list[int] = []
    longest = 0
    for number, (piece, _) in enumerate(split_document(chunks(), 500), 1):
        assert len(n_read) <= number
        longest = max(longest, len(piece))
    assert longest <= 1000


def test_cache_is_found_by_content(tmp_path, tokenizer):
    root, original = tmp_path / "cache", tmp_path / "a.txt"
    original.write_text("The same content.")
    key = open_cache(original, tokenizer, root).key
    shutil.copy(original, tmp_path / "copy.txt")
    failing = same_fingerprint(FailingTokenizer, tokenizer)
    cache = open_cache(tmp_path / "copy.txt", failing, root)
    assert cache.key == key and cache.describe(0, 0) == "copy.txt, document 1"
    assert cache_folders(root) == [key]


def test_changed_content_tokenizer_column_or_format_needs_a_new_cache(tmp_path, tokenizer):
    root, path = tmp_path / "cache", tmp_path / "a.jsonl"
    path.write_text('{"text": "one", "body": "two"}\n')
    keys = [open_cache(path, tokenizer, root).key, open_cache(path, tokenizer, root, "body").key]
    keys.append(open_cache(path, OtherTokenizer.Config().build(), root).key)
    keys.append(open_cache(shutil.copy(path, tmp_path / "a.txt"), tokenizer, root).key)
    stat = path.stat()
    path.write_text('{"text": "eno", "body": "two"}\n')
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # equal size and time
    keys.append(open_cache(path, tokenizer, root).key)
    assert len(set(keys)) == 5 and cache_folders(root) == sorted(keys)


@pytest.mark.parametrize("replacement", REPLACEMENTS)
def test_digest_is_reused_until_the_file_is_replaced(tmp_path, tokenizer, monkeypatch, replacement):
    monkeypatch.setattr(digests, "_RECENT_NS", 10**7)
    root, path = tmp_path / "cache", tmp_path / "data" / "a.txt"
    path.parent.mkdir()
    path.write_text("one text")
    os.utime(path, (1e9, 1e9))
    replace = replacement(path)
    time.sleep(0.05)
    key = open_cache(path, tokenizer, root).key
    with monkeypatch.context() as patch:
        patch.setattr(digests, "hash_file", lambda *_: pytest.fail("hashed again"))
        assert open_cache(path, tokenizer, root).key == key
    replace(b"two text")
    cache = open_cache(path, tokenizer, root)
    assert cache.key != key
    assert cache.tokens(0, 99).tolist() == tokenizer.encode_documents(["two text"])[0]


def test_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TORCHTITAN_CACHE", raising=False)
    assert cache_root("") == tmp_path / ".cache" / "torchtitan"
    monkeypatch.setenv("TORCHTITAN_CACHE", "~/elsewhere")
    assert cache_root("") == tmp_path / "elsewhere"
    assert cache_root("/given") == Path("/given")


def test_unwritable_cache_folder(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("some text")
    with pytest.raises(
        UserError,
        match=r"cannot write to the cache .*/a.txt/x: Not a directory; set --dataloader.cache_dir",
    ):
        open_cache(tmp_path / "a.txt", tokenizer, tmp_path / "a.txt" / "x")


@pytest.mark.parametrize("content", ["", " \n\t\n"])
def test_empty_data(tmp_path, tokenizer, content):
    (tmp_path / "a.txt").write_text(content)
    with pytest.raises(UserError, match="a.txt contains no text to train on"):
        open_cache(tmp_path / "a.txt", tokenizer, tmp_path / "cache")
    assert cache_folders(tmp_path / "cache") == []


def test_empty_file_among_others_causes_a_warning(tmp_path, tokenizer, caplog):
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.txt").write_text("some text")
    with caplog.at_level(logging.WARNING, "torchtitan"):
        open_cache(tmp_path, tokenizer, tmp_path / "cache")
    assert [record.message for record in caplog.records] == [
        f"1 of 2 files of {tmp_path} contain no text: a.txt"
    ]


def test_bad_data_leaves_no_files(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n' * 1000 + '{"text": "bad\n')
    with pytest.raises(UserError, match="a.jsonl:1001: broken JSON"):
        open_cache(path, tokenizer, tmp_path / "cache")
    assert cache_folders(tmp_path / "cache") == []


def test_change_while_reading_is_an_error(tmp_path, tokenizer):
    path = tmp_path / "a.txt"
    path.write_text("some text")
    source = resolve_source(str(path))
    read = source.parts[0].documents

    def documents(on_read):
        path.write_text("other text")
        return read(on_read)

    source.parts[0].documents = documents
    with pytest.raises(UserError, match="a.txt changed while it was being read"):
        open_token_cache(source, tokenizer, str(tmp_path / "cache"))
    assert cache_folders(tmp_path / "cache") == []


DAMAGES = {
    "gone": None,
    "empty": lambda old: b"",
    "an object": lambda old: b"{}",
    "a list": lambda old: b"[]",
    "null": lambda old: b"null",
    "nested": lambda old: b"[" * 100_000,
    "cut off": lambda old: old[:-1],
    "zeros": lambda old: bytes(len(old)),
    "one bit": lambda old: old[:-2] + bytes([old[-2] ^ 1]) + old[-1:],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_cache_is_renamed_and_rebuilt(tmp_path, tokenizer, caplog, damage):
    (tmp_path / "a.txt").write_text("some text")
    folder = open_cache(tmp_path / "a.txt", tokenizer, tmp_path / "cache").folder
    written = {path: path.read_bytes() for path in folder.iterdir()}
    assert len(written) == 4
    for path, content in written.items():
        path.unlink() if DAMAGES[damage] is None else path.write_bytes(DAMAGES[damage](content))
        left = {file.name: file.read_bytes() for file in folder.iterdir()}
        caplog.clear()
        cache = open_cache(tmp_path / "a.txt", tokenizer, tmp_path / "cache")
        assert cache.tokens(0, 99).tolist() == tokenizer.encode_documents(["some text"])[0]
        [line] = [
            record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
        ]
        assert line.startswith(f"the cache {folder} is damaged (") and "\n" not in line
        assert line.endswith(f"); it was renamed to {folder.name}.damaged and is rebuilt")
        assert {path: path.read_bytes() for path in folder.iterdir()} == written
        assert cache_folders(tmp_path / "cache") == [folder.name, f"{folder.name}.damaged"]
        aside = folder.with_suffix(".damaged").iterdir()
        assert {file.name: file.read_bytes() for file in aside} == left


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({}, "meta.json"),
        ({"meta.json": [1, []]}, "offsets.bin"),
        ({"meta.json": ["1", "2"], "tokens.bin": 1, "offsets.bin": None}, ""),
        ({"meta.json": [10**30, []], "tokens.bin": [], "offsets.bin": []}, ""),
    ],
)
def test_malformed_checksums_are_damage(tmp_path, tokenizer, caplog, content, problem):
    (tmp_path / "a.txt").write_text("some text")
    folder = open_cache(tmp_path / "a.txt", tokenizer, tmp_path / "cache").folder
    (folder / "blocks.json").write_text(json.dumps(content))
    open_cache(tmp_path / "a.txt", tokenizer, tmp_path / "cache")
    assert "is damaged" in caplog.text and problem in caplog.text


@pytest.mark.parametrize("name", ["../pipe", "/etc/passwd", "..", "tokens.bin/"])
def test_checksums_of_other_files_are_damage(tmp_path, tokenizer, caplog, name):
    (tmp_path / "a.txt").write_text("some text")
    folder = open_cache(tmp_path / "a.txt", tokenizer, tmp_path / "cache").folder
    os.mkfifo(folder.parent / "pipe")
    recorded = json.loads((folder / "blocks.json").read_text())
    (folder / "blocks.json").write_text(json.dumps({**recorded, name: recorded["tokens.bin"]}))
    open_cache(tmp_path / "a.txt", tokenizer, tmp_path / "cache")
    assert f"is damaged ({name!r} is missing)" in caplog.text


def test_large_file_is_checked_by_sample_or_completely(tmp_path, tokenizer, monkeypatch, caplog):
    monkeypatch.setattr(disk_cache, "BLOCK_BYTES", 32)
    (tmp_path / "a.txt").write_text("".join(f"word {i} " for i in range(300)))
    source, root = resolve_source(str(tmp_path / "a.txt")), str(tmp_path / "cache")
    tokens = open_token_cache(source, tokenizer, root).folder / "tokens.bin"
    content = tokens.read_bytes()
    n_blocks = -(-len(content) // 32)
    assert n_blocks >= 31  # with fewer, the sample would contain the second block
    for block, verify, found in [
        (0, False, True),
        (n_blocks - 1, False, True),
        (1, False, False),
        (1, True, True),
    ]:
        tokens.write_bytes(
            content[: block * 32] + bytes([content[block * 32] ^ 1]) + content[block * 32 + 1 :]
        )
        caplog.clear()
        open_token_cache(source, tokenizer, root, verify=verify)
        assert (
            f"(block {block + 1} of {n_blocks} of tokens.bin has a wrong checksum, at offset "
            f"{block * 32:,})" in caplog.text
        ) == found
        assert (tokens.read_bytes() == content) == found


def test_loaders_can_check_all_blocks(tmp_path, tokenizer, monkeypatch, caplog):
    monkeypatch.setattr(disk_cache, "BLOCK_BYTES", 32)
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "word {i}"}}\n' for i in range(300)))
    options = {"cache_dir": str(tmp_path / "cache")}
    for config in (
        PretrainDataLoader.Config(dataset=[str(tmp_path / "a.jsonl")], **options),
        SFTDataLoader.Config(dataset=[str(tmp_path / "a.jsonl")], **options),
    ):
        config.prepare(tokenizer=tokenizer)
        [file] = [*tmp_path.glob("cache/*/*/tokens.bin"), *tmp_path.glob("cache/*/*/ids.bin")][-1:]
        file.write_bytes(file.read_bytes()[:32] + bytes(32) + file.read_bytes()[64:])
        caplog.clear()
        config.prepare(tokenizer=tokenizer)
        assert "is damaged" not in caplog.text
        replace(config, verify_caches=True).prepare(tokenizer=tokenizer)
        assert "is damaged" in caplog.text


def test_unreadable_cache_is_kept(tmp_path, tokenizer, monkeypatch):
    (tmp_path / "a.txt").write_text("some text")
    cache = open_cache(tmp_path / "a.txt", tokenizer, tmp_path / "cache")
    read = Path.read_text

    def fail(path, *args, **options):
        if path.name == "meta.json":
            raise OSError(errno.EIO, "Input/output error")
        return read(path, *args, **options)

    with (
        monkeypatch.context() as patched,
        pytest.raises(UserError, match=f"{cache.folder} cannot be read: .*Input"),
    ):
        patched.setattr(Path, "read_text", fail)
        open_cache(tmp_path / "a.txt", tokenizer, tmp_path / "cache")
    failing = same_fingerprint(FailingTokenizer, tokenizer)
    assert open_cache(tmp_path / "a.txt", failing, tmp_path / "cache").key == cache.key


KILLED_BUILD = """
import sys, time
from torchtitan.components.data.sources.source import resolve_source
from torchtitan.components.data.pretraining.token_cache import open_token_cache
from torchtitan.components.tokenizer import PretrainedTokenizer

class Slow(PretrainedTokenizer):
    def tokenize(self, texts, *, allow_special):
        if max(len(text) for text in texts) > 5:
            print("encoding", flush=True)
            time.sleep(60)
        return super().tokenize(texts, allow_special=allow_special)

tokenizer = Slow.Config().build()
tokenizer.fingerprint = sys.argv[3]
open_token_cache(resolve_source(sys.argv[1]), tokenizer, sys.argv[2])
"""


@pytest.mark.slow
def test_killed_build_is_repeated(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("some text")
    arguments = [str(tmp_path / "a.txt"), str(tmp_path / "cache"), tokenizer.fingerprint]
    with RunningCommand(
        [sys.executable, "-c", KILLED_BUILD, *arguments], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"encoding\n"
        process.send_signal(signal.SIGKILL)
    [left] = cache_folders(tmp_path / "cache")
    assert left.endswith(".partial")
    cache = open_cache(tmp_path / "a.txt", tokenizer, tmp_path / "cache")
    assert cache.tokens(0, 99).tolist() == tokenizer.encode_documents(["some text"])[0]
    assert cache_folders(tmp_path / "cache") == [cache.key]


def test_second_process_waits_with_a_message(tmp_path, tokenizer, caplog):
    path, root = tmp_path / "a.txt", tmp_path / "cache"
    path.write_text("some text")
    key = open_cache(path, tokenizer, root).key
    shutil.move(root / "tokens" / key, tmp_path / "finished")
    failing = same_fingerprint(FailingTokenizer, tokenizer)
    found = []
    with caplog.at_level(logging.INFO, "torchtitan"), FileLock(root / "tokens" / f"{key}.lock"):
        thread = threading.Thread(target=lambda: found.append(open_cache(path, failing, root)))
        thread.start()
        deadline = time.monotonic() + 20
        while "waiting for another process to prepare" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert not found
        shutil.move(tmp_path / "finished", root / "tokens" / key)
    thread.join(20)
    assert found[0].key == key


def test_progress_without_a_terminal(monkeypatch, caplog):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with caplog.at_level(logging.INFO, "torchtitan"), progress("reading x", 200) as advance:
        advance(50)
        now[0] = 11.0
        advance(50)
        advance(50)
    assert [record.message for record in caplog.records] == ["reading x: 50%"]


def test_progress_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with progress("reading x", 200) as advance:
        advance(200)
    assert "reading x" in capsys.readouterr().err
