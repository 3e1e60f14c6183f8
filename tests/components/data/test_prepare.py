"""`torchtitan data prepare`: the same result for any division of the work, after kills, and read
like a cache."""

import collections
import contextlib
import dataclasses
import errno
import functools
import hashlib
import http.server
import itertools
import json
import os
import pickle
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import fsspec
import numpy as np
import pytest
import tokenizers

from tests.components.data.helpers import (
    open_tokens,
    raises,
    split_documents,
    take,
    with_positions,
    write_jsonl,
)
from tests.conftest import PROJECT, file_size_limit
from tests.replacements import REPLACEMENTS
from torchtitan.cli.main import main
from torchtitan.components.checkpoint.filesystem import LocalFolder, RemoteFolder, folder_at
from torchtitan.components.data import PretrainDataLoader
from torchtitan.components.data.disk_cache import BLOCKS_FILE
from torchtitan.components.data.finetuning import rows_loader
from torchtitan.components.data.finetuning.filters import FilterConfig
from torchtitan.components.data.finetuning.sft import SFTDataLoader
from torchtitan.components.data.prepare import encoding
from torchtitan.components.data.prepare import merge as merging
from torchtitan.components.data.prepare import preparation as preparing
from torchtitan.components.data.prepare.encoding import (
    ITEM,
    Encoding,
    document_encoding,
    sample_encoding,
)
from torchtitan.components.data.prepare.merge import find_duplicates, merge
from torchtitan.components.data.prepare.near_duplicates import Bands
from torchtitan.components.data.prepare.preparation import Preparation
from torchtitan.components.data.prepare.prepared import find_prepared
from torchtitan.components.data.sources import block_cache, stored
from torchtitan.components.data.sources.source import CHAT_DATASETS, DOCUMENTS, resolve_source
from torchtitan.config.manager import ConfigManager
from torchtitan.tools import durable
from torchtitan.tools.digests import bytes_digest, digest_of
from torchtitan.tools.errors import UserError


@pytest.fixture
def corpus(tmp_path) -> list[str]:
    """Two files of 300 documents with repetitions, blank lines and an empty document, and a text
    file."""
    chance = random.Random(0)
    sources = []
    for name in "ab":
        texts = [
            f"Document {chance.randrange(200)} é: " + "tea and toast. " * (i % 7)
            for i in range(300)
        ]
        lines = [
            json.dumps({"text": text}, ensure_ascii=chance.random() < 0.5) for text in [*texts, " "]
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n\n".join(lines))
        sources.append(str(tmp_path / f"{name}.jsonl"))
    (tmp_path / "c.txt").write_text("A plain text.\n" * 20)
    return [*sources, str(tmp_path / "c.txt")]


def preparation(sources, place, tokenizer, *, part_bytes=6000, **options) -> Preparation:
    encoding = document_encoding(tokenizer, FilterConfig(min_tokens=options.pop("min_tokens", 0)))

    return Preparation(
        open_sources=lambda: [resolve_source(source) for source in sources],
        place=folder_at(str(place)),
        encoding=encoding,
        part_bytes=part_bytes,
        **options,
    )


def prepared(*args, workers: int = 1, **options) -> Preparation:
    made = preparation(*args, **options)
    made.begin()
    made.write_all(made.missing(), workers)
    merge(made, workers)
    return made


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def texts_of(sources: list[str]) -> list[str]:
    lines = [
        line for source in sources[:2] for line in Path(source).read_text().split("\n") if line
    ]
    return [*(json.loads(line)["text"] for line in lines), Path(sources[2]).read_text()]


def test_the_checksums_of_a_part_are_read_once(corpus, tokenizer, tmp_path, monkeypatch):
    made = preparation(corpus, tmp_path / "out", tokenizer)
    made.begin()
    made.write_all(made.missing(), 1)
    read: list[str] = []
    read_json = encoding.read_json

    def counted(folder, name):
        read.append(name)
        return read_json(folder, name)

    monkeypatch.setattr(encoding, "read_json", counted)
    selections = [(made.folder(part), np.arange(2)) for part in range(3)]
    made.encoding.select(selections, tmp_path / "selected")
    assert read == 3 * [BLOCKS_FILE]
    assert {path.name for path in (tmp_path / "selected").iterdir()} == {
        "tokens.bin",
        "offsets.bin",
    }


@pytest.mark.parametrize("config", ["debugmodel", "debugmodel_sft"])
def test_torch_is_not_imported(config, tmp_path):
    row = {"text": "tea"} if config == "debugmodel" else {"question": "tea?", "answer": "tea"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    code = (
        "import sys; from torchtitan.cli.main import main; code = main(sys.argv[1:]); "
        "sys.exit(9 if 'torch' in sys.modules else code)"
    )
    words = ["data", "prepare", "rows.jsonl", "--out", "out", "--config", config, "--workers=1"]
    subprocess.run([sys.executable, "-P", "-c", code, *words], cwd=tmp_path, check=True)
    assert find_prepared(str(tmp_path / "out"), DOCUMENTS).splits


def test_rows_of_a_run_that_streams_are_prepared(tmp_path):
    """Prepared rows are copies."""
    files = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
    for file in files:
        file.write_text(json.dumps({"question": f"{file.name}?", "answer": "tea"}))
    command = ["data", "prepare", *map(str, files), "--out", str(tmp_path / "out"), "--workers=1"]
    assert main([*command, "--config", "debugmodel_sft", "--dataloader.stream", "all"]) == 0
    assert find_prepared(str(tmp_path / "out"), CHAT_DATASETS).splits["train"]


def test_tokens_equal_an_independent_tokenization_without_duplicates(
    corpus, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr(merging, "ITEMS_PER_PASS", 200)  # several passes
    prepared(corpus, tmp_path / "out", tokenizer, held_out=0.2)
    library = tokenizers.Tokenizer.from_file(
        str(PROJECT / "torchtitan/assets/tokenizer/tokenizer.json")
    )
    unique = [text for text in dict.fromkeys(texts_of(corpus)) if text.strip()]
    expected = [library.encode(text, add_special_tokens=False).ids for text in unique]
    splits = {
        split: open_tokens(tmp_path / "out", tokenizer, tmp_path, split)
        for split in ("train", "validation")
    }
    documents = {
        split: [ids[1:-1] for ids in split_documents(tokens)] for split, tokens in splits.items()
    }
    held_out = {tuple(ids) for ids in documents["validation"]}
    assert documents["train"] == [ids for ids in expected if tuple(ids) not in held_out]
    assert documents["validation"] == [ids for ids in expected if tuple(ids) in held_out]
    assert 0.1 < len(held_out) / len(expected) < 0.3
    sources = find_prepared(str(tmp_path / "out"), DOCUMENTS).sources
    assert sources.keys() == documents.keys()
    for split, of_split in sources.items():
        assert [name for name, _ in of_split] == corpus
        reports = [report for _, report in of_split]
        rows = [(report.rows, report.kept + report.n_dropped) for report in reports]
        assert rows == [(601, 601), (601, 601), (1, 1)]  # blank lines are empty documents
        assert sum(report.kept for report in reports) == len(documents[split])
        assert sum(report.tokens for report in reports) == splits[split].n_tokens
        lengths = [len(ids) + 1 for ids in documents[split]]  # without BOS, which is not predicted
        assert sum(report.trained_tokens for report in reports) == sum(lengths)


@pytest.mark.slow
def test_any_division_of_the_work_has_the_same_result(corpus, tokenizer, tmp_path):
    reference = prepared(corpus, tmp_path / "1", tokenizer, held_out=0.1)
    assert len(reference.parts) > 5
    for workers in (2, 4):
        prepared(corpus, tmp_path / str(workers), tokenizer, held_out=0.1, workers=workers)
        assert contents(tmp_path / str(workers)) == contents(tmp_path / "1")
    shares = preparation(corpus, tmp_path / "shares", tokenizer, held_out=0.1)
    for share in (2, 0, 1):
        shares.begin()
        if share != 1:
            with raises("parts in"):
                merge(shares, 1)
        shares.write_all([number for number in shares.missing() if number % 3 == share], 1)
    merge(shares, 2)
    assert contents(tmp_path / "shares") == contents(tmp_path / "1")
    whole = prepared(corpus, tmp_path / "whole", tokenizer, held_out=0.1, part_bytes=10**9)
    assert len(whole.parts) == 3
    streams = [open_tokens(tmp_path / name, tokenizer, tmp_path) for name in ("1", "whole")]
    assert np.array_equal(*(stream.tokens(0, stream.n_tokens) for stream in streams))


def test_without_changes_the_stream_is_the_token_cache(corpus, tokenizer, tmp_path):
    prepared(corpus, tmp_path / "out", tokenizer, deduplicate=False)
    cached = PretrainDataLoader.Config(
        dataset=[str(tmp_path / "[abc].*")], cache_dir=str(tmp_path / "cache")
    )
    joined = open_tokens(tmp_path / "out", tokenizer, tmp_path)
    batches = [
        take(config.build(tokenizer=tokenizer, seq_len=50, local_batch_size=3, epochs=1, seed=1))
        for config in (cached, PretrainDataLoader.Config(dataset=[str(tmp_path / "out")]))
    ]
    for ours, theirs in zip(*batches, strict=True):
        for name in ("input", "labels", "positions"):
            assert with_positions(ours)[name].equal(with_positions(theirs)[name])
    assert joined.describe(0, 0).startswith("a.jsonl[0:6000], document 1")
    assert joined.describe(0, joined.n_tokens - 1).endswith("to c.txt, document 1")


@pytest.mark.slow
def test_killed_preparations_continue(corpus, tokenizer, tmp_path):
    """Processes are killed at random times, also between the merge's steps, until one is
    finished."""
    prepared(corpus, tmp_path / "whole", tokenizer, held_out=0.1)
    chance, n_kills = random.Random(os.getpid()), 0
    for attempt in range(60):
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            prepared(corpus, tmp_path / "killed", tokenizer, held_out=0.1, workers=1 + attempt % 2)
            os._exit(0)
        time.sleep(chance.uniform(0, 0.1 + 0.02 * attempt))
        if os.waitpid(child, os.WNOHANG)[0]:
            break
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        n_kills += 1
    assert n_kills > 2
    prepared(corpus, tmp_path / "killed", tokenizer, held_out=0.1)
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_results_come_in_order_of_completion(tmp_path):
    """While a long part is written, progress is shown, and an error ends the work."""

    def work(number):
        for _ in range(500 if number == 0 else 0):
            if (tmp_path / "1 has come").exists():
                break
            time.sleep(0.01)
        return 10 + number

    results = preparing.run_in_processes(work, [0, 1], 2)
    assert next(results) == 11
    (tmp_path / "1 has come").touch()
    assert list(results) == [10]


def test_duplicates_are_found_in_several_passes():
    chance = random.Random(0)
    hashes = [
        bytes(16),
        b"\xff" * 16,
        *(bytes([i]) * 15 + bytes([i % 3]) for i in range(0, 250, 5)),
    ]
    drawn = [[chance.choice(hashes) for _ in range(n)] for n in (300, 0, 500)]
    seen, expected = set(), []
    for position, item in enumerate(itertools.chain(*drawn)):
        expected += [position] if item in seen else []
        seen.add(item)
    assert {*hashes} == seen
    parts = []
    for of_part in drawn:
        in_order = sorted(range(len(of_part)), key=of_part.__getitem__)
        parts.append(
            np.array([(of_part[position], 1, position, 0, 0, 0) for position in in_order], ITEM)
        )
    positions = np.concatenate(
        [of_part["number"] + before for of_part, before in zip(parts, (0, 300, 300), strict=True)]
    )
    for n_passes in (1, 3):
        found = [find_duplicates(parts, index, n_passes) for index in range(n_passes)]
        assert sorted(positions[np.concatenate(found)].tolist()) == expected


@pytest.fixture
def store():
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    yield memory
    memory.store.clear()


def test_sources_and_results_in_a_store(corpus, tokenizer, tmp_path, store, monkeypatch):
    for source in corpus:
        store.pipe_file(f"/raw/{Path(source).name}", Path(source).read_bytes())
    prepared(["memory://raw"], "memory://out", tokenizer)
    assert not any(".work" in path for path in store.find("/"))
    (tmp_path / "raw").mkdir()
    for source in corpus:
        Path(source).rename(tmp_path / "raw" / Path(source).name)
    prepared([str(tmp_path / "raw")], tmp_path / "local", tokenizer)
    batches = []
    for dataset in (str(tmp_path / "local"), "memory://out"):
        config = PretrainDataLoader.Config(dataset=[dataset], cache_dir=str(tmp_path / "cache"))
        build = functools.partial(
            config.build,
            tokenizer=tokenizer,
            seq_len=50,
            local_batch_size=3,
            epochs=1,
            dp_rank=1,
            dp_world_size=2,
        )
        loader = build()
        state = None
        for batch in loader:
            batches.append((dataset, batch["input"]))
            state = state or loader.state_dict()
        again = build()
        again.load_state_dict(state)
        assert [batch["input"].tolist() for batch in take(again)] == [
            ids.tolist() for name, ids in batches if name == dataset
        ][1:]
    half = len(batches) // 2
    assert half > 3 and all(
        a[1].equal(b[1]) for a, b in zip(batches[:half], batches[half:], strict=True)
    )


def test_mixed_with_other_data(corpus, tokenizer, tmp_path, store):
    """Of three windows, two come from prepared data in a store and one from a text, each in its own
    order."""
    prepared(corpus[:2], "memory://out", tokenizer)
    sets = ["memory://out", corpus[2]]
    config = PretrainDataLoader.Config(
        dataset=sets, weights=[2, 1], cache_dir=str(tmp_path / "cache")
    )

    def windows(config, count):
        batches = take(config.build(tokenizer=tokenizer, seq_len=50, local_batch_size=1), count)
        return [batch["input"].tolist() for batch in batches]

    own = [
        iter(windows(dataclasses.replace(config, dataset=[name], weights=[]), 40)) for name in sets
    ]
    order = [0, 1, 0] * 20
    assert windows(config, 60) == [next(own[number]) for number in order]


def test_preparations_of_earlier_versions_stay_valid(corpus, tokenizer, tmp_path):
    """Their reports lack the counters that were added since."""
    prepared(corpus[:2], tmp_path / "out", tokenizer)
    path = tmp_path / "out/manifest.json"
    manifest = json.loads(path.read_text())
    reports = [report for of_split in manifest["sources"].values() for _, report in of_split]
    assert reports and all(report.pop("normal") for report in reports)
    assert manifest.pop("manifest")
    path.write_text(json.dumps(manifest))
    config = PretrainDataLoader.Config(dataset=[str(tmp_path / "out")])
    summary = config.build(tokenizer=tokenizer, seq_len=50, local_batch_size=1).summary(1)
    assert [report.rows for _, report in summary.sources] == [report["rows"] for report in reports]


def test_sources_of_one_name_in_mixed_preparations(corpus, tokenizer, tmp_path):
    sets = [str(tmp_path / "all"), str(tmp_path / "short")]
    for place, limit in zip(sets, (0, 40), strict=True):
        prepared(corpus[:2], place, tokenizer, min_tokens=limit)
    config = PretrainDataLoader.Config(dataset=sets, cache_dir=str(tmp_path / "cache"))
    summary = config.build(tokenizer=tokenizer, seq_len=50, local_batch_size=1).summary(1)
    names = [name for name, _ in summary.sources]
    assert names == [f"{source} of {place}" for place in sets for source in corpus[:2]]
    tokens = [report.tokens for _, report in summary.sources]
    expected = [open_tokens(place, tokenizer, tmp_path).n_tokens for place in sets]
    assert [sum(tokens[:2]), sum(tokens[2:])] == expected and expected[0] > expected[1]


def test_a_throttling_store_is_asked_again(corpus, tokenizer, tmp_path, store, monkeypatch, log):
    prepared(corpus, "memory://out", tokenizer)
    waits, failures = [], [2]
    monkeypatch.setattr(stored.time, "sleep", waits.append)
    original = type(store).cat_file

    def throttled(self, path, *args, **kwargs):
        if path.endswith("tokens.bin") and failures[0]:
            failures[0] -= 1
            raise RuntimeError("SlowDown: reduce your request rate")
        return original(self, path, *args, **kwargs)

    tokens = open_tokens("memory://out", tokenizer, tmp_path)
    monkeypatch.setattr(type(store), "cat_file", throttled)
    assert len(tokens.tokens(0, 10)) == 10
    assert waits == [1, 2] and "SlowDown" in log.text
    failures[0] = 100
    assert len(tokens.tokens(0, 10)) == 10  # cached
    with raises("at offset 0 failed 6 times"):
        tokens.tokens(tokens.n_tokens - 10, tokens.n_tokens)


def test_cache_of_remote_blocks(corpus, tokenizer, tmp_path, store, monkeypatch):
    """A second process reads only blocks again whose slot another block has; a small cache stays
    small; a damaged one is not believed."""
    prepared(corpus, "memory://out", tokenizer)
    files = [
        path for path in store.find("/out/train") if path.endswith(("tokens.bin", "offsets.bin"))
    ]
    assert all(0 < store.size(path) < 2**18 for path in files), "each has one block"
    n_caches = len(files) // 2

    def slot(path: str) -> int:
        name = f"memory:/{path} 0".encode()
        # of 2**18 + 32 bytes each
        return int.from_bytes(hashlib.blake2b(name, digest_size=16).digest(), "big") % 49

    users = collections.Counter(map(slot, files))
    shared = {path for path in files if users[slot(path)] > 1}
    reads, original = [], type(store).cat_file

    def counted(self, path, *args, **kwargs):
        reads.append(path)
        return original(self, path, *args, **kwargs)

    monkeypatch.setattr(type(store), "cat_file", counted)
    small = {"remote_cache": 50 * 2**18 / 2**30}
    whole = [open_tokens("memory://out", tokenizer, tmp_path, **small).tokens(0, 10**9).tolist()]
    assert any(path.endswith("tokens.bin") for path in reads)
    again = pickle.loads(pickle.dumps(open_tokens("memory://out", tokenizer, tmp_path, **small)))
    reads.clear()  # opening verifies some blocks
    whole.append(again.tokens(0, 10**9).tolist())
    assert {*reads} & {*files} <= shared < {*files}
    cache = tmp_path / "cache/remote_blocks_49"
    cache.write_bytes(bytes(byte ^ 1 for byte in cache.read_bytes()))
    tokens = open_tokens("memory://out", tokenizer, tmp_path, **small)
    reads.clear()
    whole.append(tokens.tokens(0, 10**9).tolist())
    assert any(path.endswith("tokens.bin") for path in reads)
    before = cache.read_bytes()
    for n_blocks in (2, 1, 0):  # blocks replace each other
        tokens = open_tokens(
            "memory://out", tokenizer, tmp_path, remote_cache=(n_blocks * 2**18 + 99) / 2**30
        )
        reads.clear()
        whole += [tokens.tokens(0, 10**9).tolist() for _ in range(2)]
        # The second time, each slot has at most one of the blocks.
        assert sum(path.endswith("tokens.bin") for path in reads) >= 2 * n_caches - n_blocks
        if n_blocks:
            assert (
                tmp_path / f"cache/remote_blocks_{n_blocks}"
            ).stat().st_size <= n_blocks * 2**18 + 99
    assert cache.read_bytes() == before, "a run with a smaller cache leaves it alone"
    assert all(ids == whole[0] for ids in whole)


def test_a_file_cut_in_the_store_is_an_error_and_not_cached(corpus, tokenizer, tmp_path, store):
    prepared(corpus, "memory://out", tokenizer)
    tokens = open_tokens("memory://out", tokenizer, tmp_path)
    path = f"{tokens._stream(0)._tokens.folder}/tokens.bin"
    content = store.cat_file(path)
    store.pipe_file(path, content[:-7])
    with raises(f"tokens.bin at offset 0: the file ends after {len(content) - 7:,} bytes"):
        tokens.tokens(0, 10)
    store.pipe_file(path, content)
    assert len(tokens.tokens(0, 10)) == 10


def test_ranges_are_read_from_stores_with_versions(corpus, tokenizer, tmp_path, store, monkeypatch):
    """s3fs has a version between the path and the range."""
    prepared(corpus, "memory://out", tokenizer)
    original = type(store).cat_file

    def versioned(self, path, version_id=None, start=None, end=None):
        assert version_id is None
        return original(self, path, start=start, end=end)

    expected = open_tokens("memory://out", tokenizer, tmp_path).tokens(0, 10**9)
    monkeypatch.setattr(type(store), "cat_file", versioned)
    assert np.array_equal(
        open_tokens("memory://out", tokenizer, tmp_path / "other").tokens(0, 10**9), expected
    )


class Ranges(http.server.SimpleHTTPRequestHandler):
    """Files of a folder, and ranges of them."""

    read: ClassVar[list[str]] = []

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        span, path = self.headers.get("Range"), Path(self.translate_path(self.path))
        if not span:
            return super().do_GET()
        self.read.append(path.name)
        start, stop = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", span).groups())
        content = path.read_bytes()[start : stop + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def test_data_behind_http(corpus, tokenizer, tmp_path):
    """fsspec's HTTP store lists files without sizes. The second reader finds the blocks in the
    cache."""
    prepared(corpus, tmp_path / "out", tokenizer)
    expected = open_tokens(tmp_path / "out", tokenizer, tmp_path).tokens(0, 10**9)
    handler = functools.partial(Ranges, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"http://127.0.0.1:{server.server_port}/out"
        for is_cached in (False, True):
            tokens = open_tokens(place, tokenizer, tmp_path)
            Ranges.read.clear()  # opening verifies some blocks
            assert np.array_equal(tokens.tokens(0, 10**9), expected)
            assert ("tokens.bin" in Ranges.read) != is_cached
        server.shutdown()


@pytest.mark.parametrize("failing", ["pwrite", "pread", "open"])
def test_data_is_read_without_a_cache_on_a_full_disk(
    failing, corpus, tokenizer, tmp_path, store, monkeypatch, log
):
    prepared(corpus, "memory://out", tokenizer)
    expected = open_tokens("memory://out", tokenizer, tmp_path).tokens(0, 10**9)
    [cache] = (tmp_path / "cache").glob("remote_blocks_*")
    cache.unlink()
    tokens = open_tokens("memory://out", tokenizer, tmp_path)

    def fail(path, *args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(block_cache.os, failing, fail)
        assert np.array_equal(tokens.tokens(0, 10**9), expected)
    assert (
        log.text.count("read without the cache") == log.text.count("No space left on device") == 1
    )
    assert (
        np.array_equal(tokens.tokens(0, 10**9), expected)
        and log.text.count("read without the cache") == 1
    )


def test_changes_in_stores_that_name_times_differently(corpus, store, monkeypatch, log):
    """Each store of fsspec has its own names; without any, a warning says which changes go
    unnoticed."""
    entry = {"type": "file", "size": 5}

    def version(**details):
        monkeypatch.setattr(
            type(store), "find", lambda self, path, **options: {path: {**entry, **details}}
        )
        [part] = resolve_source("memory://raw/a.jsonl").parts
        return part.version

    for name in (
        "ETag",
        "etag",
        "md5Hash",
        "mtime",
        "Last-Modified",
        "LastModified",
        "last_modified",
        "updated",
    ):
        assert version(**{name: "1"}) != version(**{name: "2"})
    assert version(ETag=None, mtime=1) != version(ETag=None, mtime=2)
    assert not log.text
    assert version(accessed=1) == version(accessed=2)
    assert (
        "memory://raw/a.jsonl: the store states neither checksums nor times; only another size"
        in log.text
    )


def test_a_full_disk_ends_the_merge_with_a_message(corpus, tokenizer, tmp_path, store):
    """Not with the signal SIGBUS, when a page of the map is written."""
    for place, options in ((tmp_path / "out", "--out"), ("memory://out", "--out or TMPDIR")):
        made = preparation(corpus, place, tokenizer)
        made.begin()
        made.write_all(made.missing(), 1)
        _, limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limit))  # the file of hashes is larger
        try:
            with raises(f": File too large; set {options} to another"):
                merge(made, 1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        merge(made, 1)


@pytest.mark.parametrize("kind", ["text", "chats"])
def test_a_disk_that_is_full_at_any_byte_leaves_no_part_that_counts_as_complete(
    kind, tokenizer, tmp_path
):
    """Also if it refuses only the last bytes of a small array, and in the merge."""
    if kind == "text":
        rows = [{"text": f"Document {number}."} for number in range(9)]
    else:
        rows = [{"prompt": "What is it?", "completion": f"It is {number}."} for number in range(9)]
    source = write_jsonl(tmp_path / "a.jsonl", rows)
    config = SFTDataLoader.Config(dataset=[source], chat_template="alpaca")
    encoder = config.encoder(tokenizer, config.find_template(tokenizer))
    chats = sample_encoding(
        {found.name: form for found, form in config.rows()}, encoder, config.filters()
    )

    def begin(place: Path) -> Preparation:
        made = preparation([source], place, tokenizer)
        if kind == "chats":
            made = dataclasses.replace(
                made, open_sources=lambda: [config.source(source)], encoding=chats
            )
        made.begin()
        return made

    complete = begin(tmp_path / "complete")
    complete.write_all([0], 1)
    files = contents(tmp_path / "complete/parts")
    sizes = {limit for content in files.values() for limit in (len(content) // 2, len(content) - 1)}
    assert len(sizes) > 6
    merge(complete, 1)
    for limit in sorted({0, 1, *sizes}):
        made = begin(tmp_path / str(limit))
        with file_size_limit(limit), contextlib.suppress(UserError):
            made.write(0)
        if not made.missing():
            assert contents(tmp_path / str(limit) / "parts") == files
        made.write_all(made.missing(), 1)
        with file_size_limit(limit), contextlib.suppress(UserError):
            merge(made, 1)
        merge(made, 1)
        assert contents(tmp_path / str(limit)) == contents(tmp_path / "complete")


@pytest.mark.parametrize("replacement", REPLACEMENTS)
def test_a_source_that_another_program_replaces(replacement, tokenizer, tmp_path):
    """With its size and its time of modification as before, between two commands."""
    path = tmp_path / "data" / "a.txt"
    path.parent.mkdir()
    path.write_text("Some text.")
    os.utime(path, (1e9, 1e9))
    replace = replacement(path)
    made = preparation([str(path)], tmp_path / "out", tokenizer)
    made.begin()
    preparation([str(path)], tmp_path / "out", tokenizer).check()
    made.write_all(made.missing(), 1)
    replace(b"Different.")
    with raises("was begun with other sources, or they have changed"):
        preparation([str(path)], tmp_path / "out", tokenizer).begin()
    with raises("was begun with other sources, or they have changed"):
        merge(made, 1)
    assert not (tmp_path / "out/manifest.json").exists()


def test_what_killed_processes_leave_is_removed(corpus, tokenizer, tmp_path):
    """When the preparation is complete. A process that still works then, on the same parts, ends
    without an error."""
    place, made = tmp_path / "out", preparation(corpus, tmp_path / "out", tokenizer)
    made.begin()
    made.write_all(made.missing(), 1)
    child = os.fork()
    if child == 0:
        with made.working() as work:
            (work / "file").write_text("some content")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert [path.name for path in place.glob(".work-*/*")] == ["file"]
    with made.working() as living:
        merge(made, 1)
        assert not [*place.glob(".work-*")]
        (living / "file").write_text("some content")
    assert {path.name for path in place.iterdir()} == {
        "manifest.json",
        "plan",
        "train",
        "train.index",
    }


def test_errors_count_until_the_preparation_is_complete(corpus, tokenizer, tmp_path):
    made = preparation(corpus, tmp_path / "out", tokenizer)
    made.begin()
    with raises("cannot write to"), made.working() as work:
        (work / "folder/file").write_text("some content")


@pytest.mark.parametrize("place", ["local", "store"])
def test_two_merges_at_once(place, corpus, tokenizer, tmp_path, store, monkeypatch):
    """The second one removes the parts while the first one reads them."""
    out = tmp_path / "out" if place == "local" else "memory://out"
    made = preparation(corpus, out, tokenizer)
    made.begin()
    made.write_all(made.missing(), 1)
    select = Encoding.select

    def select_after_other(*arguments):
        monkeypatch.setattr(Encoding, "select", select)
        merge(preparation(corpus, out, tokenizer), 1)
        select(*arguments)

    monkeypatch.setattr(Encoding, "select", select_after_other)
    merge(made, 1)
    result, expected = folder_at(str(out)), prepared(corpus, tmp_path / "expected", tokenizer).place
    assert result.files() == expected.files()
    assert result.read("manifest.json") == expected.read("manifest.json")


def test_two_merges_write_an_index_at_once(corpus, tokenizer, tmp_path, monkeypatch):
    made = preparation(corpus, tmp_path / "out", tokenizer)
    made.begin()
    made.write_all(made.missing(), 1)
    replace, n_others = durable.replace, 0

    def replace_after_other(file, target):
        nonlocal n_others
        if target.name == "train.index" and not n_others:
            n_others += 1
            with made.working() as work:
                merging._Merge(made, 1, work).write()
        replace(file, target)

    monkeypatch.setattr(durable, "replace", replace_after_other)
    merge(made, 1)
    assert n_others == 1
    prepared(corpus, tmp_path / "expected", tokenizer)
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


def test_a_full_disk_is_not_tried_again(monkeypatch):
    def fail():
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(stored.time, "sleep", None)
    with raises("writing x failed: No space left on device"):
        stored.with_patience("writing x", fail)


def test_what_is_no_regular_file_is_not_tried_again(monkeypatch, tmp_path):
    monkeypatch.setattr(stored.time, "sleep", None)
    os.mkfifo(tmp_path / "x")
    (tmp_path / "y").mkdir()
    for name in "xy":
        with raises(f"reading {name} failed: OSError: {tmp_path / name} is not a regular file"):
            stored.with_patience(
                f"reading {name}", lambda name=name: folder_at(str(tmp_path)).read(name)
            )


def test_a_damaged_copy_of_an_index_is_copied_again(corpus, tokenizer, tmp_path, store, log):
    prepared(corpus, "memory://out", tokenizer)
    expected = open_tokens("memory://out", tokenizer, tmp_path).tokens(0, 99)
    [copy] = tmp_path.glob("cache/indexes/*.index")
    content = copy.read_bytes()
    for place in (0, len(content) // 2, len(content) - 1):
        copy.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        again = open_tokens("memory://out", tokenizer, tmp_path)
        assert (again.tokens(0, 99) == expected).all()
        assert f"{copy} is damaged; it is copied again from memory://out" in log.text
        assert copy.read_bytes() == content


def test_processes_of_one_host_copy_an_index_at_the_same_time(corpus, tokenizer, tmp_path, store):
    prepared(corpus, "memory://out", tokenizer)
    with ThreadPoolExecutor(8) as pool:
        opened = list(
            pool.map(lambda _: open_tokens("memory://out", tokenizer, tmp_path), range(8))
        )
    assert len({tokens.n_tokens for tokens in opened}) == 1
    [index] = (tmp_path / "cache/indexes").iterdir()
    assert index.read_bytes() == store.cat_file("/out/train.index")


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("held_out", [0.0, 0.5])
@pytest.mark.parametrize("place", ["local", "store"])
def test_hosts_begin_together(
    place, held_out, is_before, corpus, tokenizer, tmp_path, store, monkeypatch
):
    """The plan of another process appears before or after the look for other files, next to its
    work folder."""
    (tmp_path / "out/.work-other/plan").mkdir(parents=True)
    out = "memory://out" if place == "store" else str(tmp_path / "out")
    other, ours = (
        preparation(corpus, out, tokenizer),
        preparation(corpus, out, tokenizer, held_out=held_out),
    )
    has_file, publish = preparing.has_file, preparing.publish

    def has_no_plan_yet(*arguments):
        monkeypatch.setattr(preparing, "has_file", has_file)
        if is_before:
            other.begin()
        return False

    def publish_after_other(*arguments):
        monkeypatch.setattr(preparing, "publish", publish)
        if not is_before:
            other.begin()
        publish(*arguments)

    monkeypatch.setattr(preparing, "has_file", has_no_plan_yet)
    monkeypatch.setattr(preparing, "publish", publish_after_other)
    with raises("was begun with other --held_out") if held_out else contextlib.nullcontext():
        ours.begin()
    other.check()
    assert other.missing() != []


def test_preparations_do_not_mix_in_a_store_without_conditional_writes(
    corpus, tokenizer, tmp_path, store, monkeypatch
):
    """The second plan replaces the first, whose preparation has begun and writes its parts."""
    monkeypatch.setattr(RemoteFolder, "write_new", RemoteFolder.write)
    first, second = (
        preparation(corpus, "memory://out", tokenizer, held_out=share) for share in (0.5, 0.1)
    )
    first.begin()
    with monkeypatch.context() as patch:
        patch.setattr(preparing, "has_file", lambda *arguments: False)  # it looked earlier
        second.begin()
    for made in (first, second):
        made.write_all(made.missing(), 1)
    for merge_second in (lambda: merge(second, 1), lambda: None):
        with raises("memory://out was begun with other --held_out"):
            merge(first, 1)
        merge_second()
    expected = prepared(corpus, "memory://expected", tokenizer, held_out=0.1)
    assert store.cat_file("/out/manifest.json") == store.cat_file("/expected/manifest.json")
    assert expected.missing() == []


def test_a_file_that_a_server_lists_without_details(corpus, store, monkeypatch):
    """fsspec's HTTP store does so."""
    store.pipe_file("/raw/a.jsonl", Path(corpus[0]).read_bytes())
    monkeypatch.setattr(type(store), "find", lambda self, path, **options: {path: {}})
    assert resolve_source("memory://raw/a.jsonl").size() == os.path.getsize(corpus[0])
    monkeypatch.setattr(type(store), "info", lambda self, path: {"type": "file", "size": None})
    with raises("does not state the size"):
        resolve_source("memory://raw/a.jsonl")


def test_parts_of_a_file_with_colons_in_its_name(corpus, tokenizer, tmp_path):
    """They are no chain of fsspec's stores. Lines of any length, also empty ones, belong to one
    part each."""
    path = tmp_path / "a::b.jsonl"
    lines = [json.dumps({"text": "x" * n}) for n in (*range(1, 80), 500, 1)]
    path.write_text("\n".join(lines))
    for part_bytes in (7, 64, 101):
        [source] = preparation([str(path)], tmp_path / "out", tokenizer).sources
        pieces = [piece for part in source.parts for piece in stored.divide(part, part_bytes)]
        assert len(pieces) == -(-path.stat().st_size // part_bytes)
        texts = ["".join(text) for piece in pieces for text in piece.documents(lambda n: None)]
        assert texts == [json.loads(line)["text"] for line in lines]


CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}


@pytest.mark.parametrize("config", ["debugmodel_sft", "dpo"])
def test_chats_and_preferences(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHTITAN_CACHE", str(tmp_path / "cache"))
    if config == "dpo":
        rows = [
            {"prompt": f"Add {i % 20}", "chosen": f"{i % 20} it is", "rejected": "no"}
            for i in range(60)
        ]
        names = ["--module", "preference", "--config", "dpo_debugmodel"]
    else:
        rows = [
            {"messages": [CHAT["messages"][0], {"role": "assistant", "content": f"{i % 20}."}]}
            for i in range(60)
        ]
        names = ["--module", "llama3", "--config", "debugmodel_sft"]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    write_jsonl(tmp_path / "unique.jsonl", rows[:20])
    arguments = [
        "--part_size",
        "0.001",
        "--workers",
        "2",
        "--dataloader.chat_template",
        "alpaca",
        *names,
    ]
    listed, resolve = [], rows_loader.resolve_source
    monkeypatch.setattr(
        rows_loader,
        "resolve_source",
        lambda name, **o: listed.append(name) or resolve(name, **o),
    )
    assert main(["data", "prepare", "rows.jsonl", "--out", "out", *arguments]) == 0
    assert not (tmp_path / "out/parts").exists()
    assert listed == ["rows.jsonl"] * 3  # for the format, at the start, and to find changes
    monkeypatch.setattr(Preparation, "write", None)  # the same command again writes no part
    assert main(["data", "prepare", "rows.jsonl", "--out", "out", *arguments]) == 0
    batches = []
    for dataset in ("unique.jsonl", "out"):
        run = (
            ConfigManager("test")
            .parse_args([*names, "--dataloader.chat_template", "alpaca"])
            .config
        )
        run.dataloader.dataset = [dataset]
        built = run.dataloader.build(
            tokenizer=run.tokenizer.build(path=run.hf_assets_path),
            seq_len=128,
            local_batch_size=2,
            epochs=1,
            seed=3,
        )
        batches.append([batch["input"].tolist() for batch in take(built)])
    assert batches[0] == batches[1] and len(batches[0]) > 1


def test_each_source_has_its_own_row_format(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHTITAN_CACHE", str(tmp_path / "cache"))
    sources = [
        write_jsonl(tmp_path / "chats.jsonl", [CHAT]),
        write_jsonl(
            tmp_path / "pairs.jsonl",
            [{"prompt": "Add 1", "response": "2"}, {"prompt": "a", "response": "b"}],
        ),
    ]
    arguments = ["--config", "debugmodel_sft", "--dataloader.chat_template", "alpaca"]
    assert main(["data", "prepare", *sources, "--out", "out", "--workers", "1", *arguments]) == 0
    samples = []
    for datasets in (sources, ["out"]):
        run = ConfigManager("test").parse_args(arguments).config
        run.dataloader.dataset = datasets
        caches = run.dataloader.open_caches(
            tokenizer := run.tokenizer.build(path=""), run.dataloader.find_template(tokenizer)
        )
        samples.append(
            [
                cache.sample(i).parts[0].ids.tolist()
                for cache in caches
                for i in range(cache.n_samples)
            ]
        )
    assert samples[0] == samples[1] and len(samples[0]) == 3


class TestErrors:
    def test_another_preparation_or_other_files(self, corpus, tokenizer, tmp_path):
        prepared(corpus, tmp_path / "out", tokenizer)
        with raises(
            "was begun with other --held_out, or they have changed; set --out to a new folder"
        ):
            preparation(corpus, tmp_path / "out", tokenizer, held_out=0.5).begin()
        Path(corpus[0]).write_text('{"text": "changed"}')
        with raises("was begun with other sources"):
            preparation(corpus, tmp_path / "out", tokenizer).begin()
        with raises("holds other files, such as a.jsonl"):
            preparation(corpus, tmp_path, tokenizer).begin()

    def test_another_order_of_sources(self, corpus, tokenizer, tmp_path):
        preparation(corpus, tmp_path / "out", tokenizer).begin()
        with raises("was begun with other sources"):
            preparation(corpus[::-1], tmp_path / "out", tokenizer).begin()

    @pytest.mark.parametrize("place", ["local", "store"])
    def test_sources_that_change_while_they_are_read(
        self, place, corpus, tokenizer, tmp_path, store
    ):
        store.pipe_file("/raw/c.txt", b"Some text.")
        made = preparation(
            [corpus[2] if place == "local" else "memory://raw"], tmp_path / "out", tokenizer
        )
        made.begin()
        made.write_all(made.missing(), 1)
        made.check()
        Path(corpus[2]).write_text("Other text.")
        store.pipe_file("/raw/c.txt", b"Same size.")
        with raises("was begun with other sources, or they have changed"):
            merge(made, 1)
        assert not (tmp_path / "out/manifest.json").exists()

    def test_nothing_or_everything_held_out(self, corpus, tokenizer, tmp_path):
        with raises("--held_out selects no document; increase it"):
            prepared(corpus, tmp_path / "out", tokenizer, held_out=1e-9)
        with raises("--held_out selects all documents; decrease it"):
            prepared(corpus, tmp_path / "all", tokenizer, held_out=1 - 1e-9)

    def test_another_manifest_is_no_preparation(self, tmp_path):
        (tmp_path / "manifest.json").write_text("{}")
        assert find_prepared(str(tmp_path), DOCUMENTS) is None

    def test_not_writable(self, corpus, tokenizer, tmp_path):
        (tmp_path / "file").write_text("")
        with raises("cannot write to"):
            preparation(corpus, tmp_path / "file/out", tokenizer).begin()

    def test_broken_row_names_file_and_range(self, corpus, tokenizer, tmp_path):
        content = Path(corpus[1]).read_text().split("\n")
        content[200] = content[200][:-3]
        Path(corpus[1]).write_text("\n".join(content))
        with raises(f"{corpus[1]}[6000:12000]:"):
            prepared(corpus, tmp_path / "out", tokenizer, workers=2)

    def test_killed_worker(self, corpus, tokenizer, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(
            Preparation, "write", lambda self, number: os.kill(os.getpid(), signal.SIGKILL)
        )
        command = ["data", "prepare", *corpus, "--out", str(tmp_path / "out"), "--workers", "2"]
        assert main([*command, "--module", "llama3", "--config", "debugmodel"]) == 3
        assert "run the same command again to continue" in capsys.readouterr().err

    @pytest.mark.parametrize(
        "arguments, message",
        [
            ([], "no source is given"),
            (["--out", "o", "a.jsonl"], "no source is given"),
            (["a.jsonl"], "--out is missing"),
            (["a.jsonl", "--out", "o", "--part", "3/2"], "--part is 3/2"),
            (["a.jsonl", "--out", "o", "--part", "1/2", "--merge"], "set one of them"),
            (["a.jsonl", "--out", "o", "--held_out", "1"], "--held_out is 1.0"),
            (
                ["a.jsonl", "--out", "o", "--heldout", "0.1"],
                "unknown option --heldout; did you mean '--held_out'?",
            ),
            (["a.jsonl", "--out", "o", "--dataloder", "x"], "did you mean '--dataloader."),
            (["c4", "--out", "o"], "registered datasets are streamed"),
            (["a.jsonl", "--out", "nothere://o"], "nothere"),
        ],
    )
    def test_options(self, arguments, message, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
        assert (
            main(["data", "prepare", *arguments, "--module", "llama3", "--config", "debugmodel"])
            == 2
        )
        error = capsys.readouterr().err
        assert message in error and len(error.splitlines()) == 1

    def test_datasets_of_the_run_do_not_count(self, corpus, tmp_path, capsys):
        (tmp_path / "run.yaml").write_text("dataloader: {dataset: [a, b], weights: [2, 1]}")
        command = ["data", "prepare", corpus[2], "--out", str(tmp_path / "out"), "--workers", "1"]
        assert main([*command, "--config_file", str(tmp_path / "run.yaml")]) == 0
        assert main([*command, "--dataloader.dataset", "a"]) == 2
        assert "begin with what to prepare" in capsys.readouterr().err

    def test_merge_without_parts(self, corpus, tmp_path, capsys):
        command = ["data", "prepare", corpus[2], "--out", str(tmp_path / "out"), "--merge"]
        assert main(command) == 2 and "1 of 1 parts" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("config", ["debugmodel", "debugmodel_sft"])
    def test_prepared_sources(self, config, corpus, tokenizer, tmp_path, capsys):
        prepared(corpus, tmp_path / "out", tokenizer)
        command = [
            "data",
            "prepare",
            str(tmp_path / "out"),
            "--out",
            str(tmp_path / "again"),
            "--config",
            config,
        ]
        assert (
            main(command) == 2
            and "is prepared data; name what it was made of" in capsys.readouterr().err
        )

    def test_filters_of_text_for_chats(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        write_jsonl(tmp_path / "a.jsonl", [CHAT])
        command = [
            "data",
            "prepare",
            "a.jsonl",
            "--out",
            "o",
            "--min_tokens",
            "3",
            "--module",
            "llama3",
        ]
        assert main([*command, "--config", "debugmodel_sft"]) == 2
        assert "--max_repetition filter text" in capsys.readouterr().err

    def test_incomplete_or_damaged_data(self, corpus, tokenizer, tmp_path):
        made = preparation(corpus, tmp_path / "out", tokenizer)
        made.begin()
        with raises("is not complete; run torchtitan data prepare again"):
            open_tokens(tmp_path / "out", tokenizer, tmp_path)
        prepared(corpus, tmp_path / "out", tokenizer)
        with raises(f"is part of prepared data; use {tmp_path / 'out'}"):
            open_tokens(tmp_path / "out/train", tokenizer, tmp_path)
        with raises("has no split 'validation'"):
            open_tokens(tmp_path / "out", tokenizer, tmp_path, "validation")
        [tokens, *_] = sorted(tmp_path.glob("out/train/*/tokens.bin"))
        content = tokens.read_bytes()
        tokens.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(
            ValueError,
            match=r"block 1 of 1 of tokens.bin has a wrong checksum.*; prepare the data again",
        ):
            open_tokens(tmp_path / "out", tokenizer, tmp_path)
        shutil.rmtree(tokens.parent)
        with pytest.raises(
            ValueError,
            match="blocks.json failed: No such file or directory.; prepare the data again",
        ):
            open_tokens(tmp_path / "out", tokenizer, tmp_path)
        manifest = json.loads((tmp_path / "out/manifest.json").read_text())
        manifest["splits"]["train"]["tokens"] += 1
        (tmp_path / "out/manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(ValueError, match="does not match its digest"):
            open_tokens(tmp_path / "out", tokenizer, tmp_path)

    def test_a_manifest_with_other_counts_of_rows(self, corpus, tokenizer, tmp_path):
        """A digest protects them; those of earlier versions have none, but are counts."""
        made = prepared(corpus, tmp_path / "out", tokenizer)
        path = tmp_path / "out/manifest.json"
        manifest = json.loads(path.read_text())
        report = manifest["sources"]["train"][0][1]
        for rows, message in ((report["rows"] + 1, "does not match its digest"), ("1", "'str'")):
            report["rows"] = rows
            path.write_text(json.dumps(manifest))
            with pytest.raises(ValueError, match=f"damaged .*{message}.*; prepare the data again"):
                open_tokens(tmp_path / "out", tokenizer, tmp_path)
            manifest.pop("manifest", None)
        path.write_text("{}")
        with pytest.raises(ValueError, match="is damaged .'splits'.; remove it, and prepare"):
            merge(made, 1)

    def test_a_damaged_plan(self, corpus, tokenizer, tmp_path):
        made = preparation(corpus, tmp_path / "out", tokenizer)
        made.begin()
        for content in ("", "[]", "{}{}", '{"format": 2}', "[" * 10_000):
            (tmp_path / "out/plan/plan.json").write_text(content)
            with pytest.raises(UserError, match="set --out to a new folder"):
                made.begin()

    def test_damaged_parts(self, corpus, tokenizer, tmp_path):
        """A bit of any file of a part; the part can be written again."""
        made = preparation(corpus, tmp_path / "out", tokenizer, near_duplicates=Bands(0.8))
        made.begin()
        made.write_all(made.missing(), 1)
        part = next(path for path in sorted(tmp_path.glob("out/parts/*/*")) if path.is_dir())
        files = [path for path in part.iterdir() if path.stat().st_size]
        assert {"part.json", "items.bin", "bands.bin", "tokens.bin", "offsets.bin"} <= {
            file.name for file in files
        }
        for file in files:
            content = file.read_bytes()
            file.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
            with pytest.raises(UserError, match=f"{part} is damaged [(]"):
                merge(made, 1)
            file.write_bytes(content)
        (part / "blocks.json").rename(tmp_path / "blocks.json")
        with pytest.raises(UserError, match=f"; remove it, or {part.parent} if an earlier version"):
            merge(made, 1)
        shutil.rmtree(part)
        made.write_all(made.missing(), 1)
        merge(made, 1)
        other = preparation(corpus, tmp_path / "other", tokenizer, near_duplicates=Bands(0.8))
        other.begin()
        other.write_all(other.missing(), 1)
        merge(other, 1)
        assert made.place.read("manifest.json") == other.place.read("manifest.json")

    def test_a_store_that_fails_is_not_called_damage(
        self, corpus, tokenizer, tmp_path, monkeypatch
    ):
        """Its parts would be removed."""
        made = preparation(corpus, tmp_path / "out", tokenizer)
        made.begin()
        made.write_all(made.missing(), 1)
        monkeypatch.setattr(stored, "ATTEMPTS", 1)
        own = LocalFolder.read

        def failing(folder, name):
            if name == "items.bin":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return own(folder, name)

        monkeypatch.setattr(LocalFolder, "read", failing)
        with pytest.raises(UserError, match="^reading .*/items.bin failed 1 times: Input/output"):
            merge(made, 1)

    def test_other_tokenizer(self, corpus, tokenizer, tmp_path):
        prepared(corpus, tmp_path / "out", tokenizer)
        other = type(tokenizer).Config().build()
        other.fingerprint = "another"
        with raises("was prepared with another tokenizer"):
            open_tokens(tmp_path / "out", other, tmp_path)


def test_many_parts_open_fast_and_in_little_memory(corpus, tokenizer, tmp_path):
    """An index of 100,000 equal parts."""
    prepared([corpus[2]], tmp_path / "out", tokenizer)
    n, [part] = 100_000, (tmp_path / "out/train").iterdir()
    n_tokens = open_tokens(tmp_path / "out", tokenizer, tmp_path).n_tokens
    index = np.zeros((preparing.INDEX_ROWS, n), np.int64)
    index[0] = np.arange(n) * n_tokens
    index[1:] = np.frombuffer(bytes.fromhex(part.name), np.int64)[:, None]
    (tmp_path / "out/train.index").write_bytes(index.tobytes())
    read = [5, 77_777, 99_998, 99_999]
    path = tmp_path / "out/manifest.json"
    manifest = json.loads(path.read_text())
    entry = {
        "tokens": n * n_tokens,
        "items": n,
        "parts": n,
        "digest": bytes_digest(index.tobytes()),
    }
    manifest |= {"splits": {"train": entry}, "digest": digest_of({"train": entry})}
    del manifest["manifest"]
    manifest["manifest"] = digest_of(manifest)
    path.write_text(json.dumps(manifest))
    memory, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    tokens = open_tokens(tmp_path / "out", tokenizer, tmp_path)
    assert time.monotonic() - started < 5
    expected = tokens.tokens(0, n_tokens)
    for number in read:
        assert np.array_equal(tokens.tokens(number * n_tokens, (number + 1) * n_tokens), expected)
        assert tokens.locate(number * n_tokens + 3) == ("c.txt, document", 1)
    assert tokens.starts(99_998 * n_tokens, 99_999 * n_tokens + 1).tolist() == [0, n_tokens]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 30_000  # KiB
    assert [*manifest["splits"]] == ["train"]


def test_plans_have_stable_keys(corpus, tokenizer, tmp_path):
    """A preparation of a version with other keys is refused, and its result is still read."""
    place = tmp_path / "out"
    prepared(corpus, place, tokenizer)
    plan = json.loads((place / "plan/plan.json").read_text())
    options = ["part_bytes", "held_out", "deduplicate", "near_duplicates", "keep_best"]
    assert list(plan) == ["format", "kind", "encoding", *options, "sources"]
    assert plan["format"] == 2
    earlier = {"kind": plan["kind"], "--part_size": plan["part_bytes"], "sources": plan["sources"]}
    (place / "plan/plan.json").write_text(json.dumps(earlier))
    with raises(
        f"{place} was begun by another version of torchtitan, whose plan.json has other keys"
    ):
        prepared(corpus, place, tokenizer)
    assert open_tokens(place, tokenizer, tmp_path).n_tokens
