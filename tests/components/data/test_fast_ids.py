"""gigatoken in preparation, token cache and streams: the same bytes as without it, also if its ids
differ."""

import contextlib
import json
import logging
import pickle
import shutil
from pathlib import Path
from typing import Any, cast

import pytest

from tests.components.data.helpers import raises, write_jsonl
from tests.components.data.test_prepare import contents, preparation, prepared
from tests.components.tokenizer.array_encoder import (
    FAST,
    SLOW,
    change_ids,
    load,
    open_for_any_text,
    texts_for,
)
from torchtitan.components.data.disk_cache import open_or_build
from torchtitan.components.data.prepare.merge import merge
from torchtitan.components.data.prepare.preparation import FAST as MADE_FAST
from torchtitan.components.data.prepare.preparation import REFUSED
from torchtitan.components.data.pretraining import token_cache
from torchtitan.components.data.pretraining.feeds import StreamFeed
from torchtitan.components.data.pretraining.streamed_windows import StreamOrder
from torchtitan.components.data.pretraining.streaming import PackedStream
from torchtitan.components.data.pretraining.token_cache import open_token_cache
from torchtitan.components.data.sources.source import resolve_source
from torchtitan.components.tokenizer import ArrayEncoder, DifferentIds
from torchtitan.tools.errors import UserError

pytest.importorskip(
    "gigatoken", reason="gigatoken is not installed; there are no wheels for this platform"
)


@pytest.fixture
def worth(monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # as in `torchtitan data prepare`
    open_for_any_text(monkeypatch)


@contextlib.contextmanager
def without_gigatoken():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ArrayEncoder, "expect", lambda self, n_characters: None)
        yield


def write_sources(folder: Path, texts: list[str]) -> list[str]:
    """Write texts as JSON Lines, twice, and as a text file."""
    folder.mkdir()
    rows = [{"text": text} for text in texts if not any("\ud800" <= c <= "\udfff" for c in text)]
    write_jsonl(folder / "a.jsonl", rows)
    write_jsonl(folder / "b.jsonl", rows[::2])
    (folder / "c.txt").write_text("\n".join(row["text"] for row in rows[:20]).replace("\0", ""))
    return [str(folder / name) for name in ("a.jsonl", "b.jsonl", "c.txt")]


@pytest.mark.parametrize(
    "name",
    [
        "embedded",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in [*FAST, *SLOW]
            if name != "embedded"
        ),
    ],
)
def test_prepared_bytes_are_the_same(name, worth, tmp_path, assets):
    if name == "dropout":
        pytest.skip("its ids are random")
    (tmp_path / "tokenizer").mkdir()
    tokenizer = load(name, tmp_path / "tokenizer", assets)
    sources = write_sources(tmp_path / "text", texts_for(tokenizer))
    made = prepared(sources, tmp_path / "fast", tokenizer, held_out=0.2, part_bytes=100_000)
    assert made.encoding.encoder.is_fast == (name in FAST)
    with without_gigatoken():
        prepared(sources, tmp_path / "slow", tokenizer, held_out=0.2, part_bytes=100_000)
    assert contents(tmp_path / "fast") == contents(tmp_path / "slow")


def test_the_token_cache_is_the_same(worth, tokenizer, tmp_path):
    [source, *_] = write_sources(tmp_path / "text", texts_for(tokenizer))
    fast = open_token_cache(resolve_source(source), tokenizer, str(tmp_path / "fast"))
    with without_gigatoken():
        slow = open_token_cache(resolve_source(source), tokenizer, str(tmp_path / "slow"))
    assert fast.key == slow.key and contents(fast.folder) == contents(slow.folder)


def test_old_caches_stay_valid(worth, tokenizer, tmp_path):
    """A cache's name depends on the tokenizer and the text, not on the library that encodes it."""
    (tmp_path / "a.txt").write_text("some text")
    source = resolve_source(str(tmp_path / "a.txt"))
    made = open_token_cache(source, tokenizer, str(tmp_path / "cache"))
    found = open_or_build(
        "tokens",
        source,
        lambda identity: [
            3,
            tokenizer.fingerprint,
            ([tokenizer.bos_id], [tokenizer.eos_id]),
            identity,
        ],
        lambda folder: folder,
        lambda folder: pytest.fail("built again"),
        str(tmp_path / "cache"),
    )
    assert found == made.folder


def test_streams_are_the_same(worth, tokenizer):
    texts = [text for text in texts_for(tokenizer) if text.isascii()]

    def encode() -> list[list[int]]:
        order = StreamOrder(shuffle=False, block_size=1, seed=0)
        stream: Any = PackedStream([], [], [], tokenizer, cast(Any, None), order)
        encoded = StreamFeed(stream, cast(Any, None), 0, 1).encode(texts)
        return [[] if ids is None else ids.tolist() for ids in encoded]

    fast = encode()
    with without_gigatoken():
        slow = encode()
    expected = tokenizer.encode_documents(texts)
    assert (
        fast
        == slow
        == [ids if text.strip() else [] for text, ids in zip(texts, expected, strict=True)]
    )


@pytest.fixture
def deceived(worth, monkeypatch):
    """gigatoken changes the ids of texts with a word."""
    change_ids(monkeypatch, lambda content, ids: ids[::-1] if b"Deceive" in content else ids)


def deceiving_sources(folder: Path) -> list[str]:
    """Return five files, of which the fourth is encoded wrongly, and the second too, but not where
    it is compared."""
    folder.mkdir()
    for name in "abcde":
        texts = [f"Text {i} of the file {name}." for i in range(40)]
        if name == "d":
            texts = [f"Deceive: {text}" for text in texts]
        if name == "b":
            texts[5] = "Deceive here."
        write_jsonl(folder / f"{name}.jsonl", [{"text": text} for text in texts])
    return [str(folder / f"{name}.jsonl") for name in "abcde"]


@pytest.mark.parametrize("workers", [1, 2])
def test_other_ids_begin_the_preparation_again(workers, deceived, tokenizer, tmp_path, caplog):
    sources = deceiving_sources(tmp_path / "text")
    with caplog.at_level(logging.WARNING, "torchtitan"):
        prepared(sources, tmp_path / "fast", tokenizer, workers=workers)
    assert caplog.text.count("gigatoken has other ids for 'Deceive") == 1
    with without_gigatoken():
        prepared(sources, tmp_path / "slow", tokenizer)
    assert contents(tmp_path / "fast") == contents(tmp_path / "slow")


def test_other_ids_on_one_of_several_hosts(deceived, tokenizer, tmp_path):
    """Parts of other hosts, and of earlier commands, count as missing if gigatoken has encoded
    them."""
    sources = deceiving_sources(tmp_path / "text")
    made = preparation(sources, tmp_path / "fast", tokenizer)
    made.begin()
    made.write_all([0, 1, 2], 1)
    assert made.missing() == [3, 4] and (made.folder(1) / MADE_FAST).path.exists()
    other = preparation(sources, tmp_path / "fast", tokenizer)
    other._refuse()
    assert other.missing() == [0, 1, 2, 3, 4]
    with raises("5 of 5 parts"):
        merge(other, 1)
    last = preparation(sources, tmp_path / "fast", tokenizer)  # a later command
    last.write_all(last.missing(), 1)
    assert last.missing() == [] and not (last.folder(1) / MADE_FAST).path.exists()
    assert (last.folder(0).parent / REFUSED).path.exists()
    merge(last, 1)
    with without_gigatoken():
        prepared(sources, tmp_path / "slow", tokenizer)
    assert contents(tmp_path / "fast") == contents(tmp_path / "slow")


def test_killed_while_parts_are_written_again(deceived, tokenizer, tmp_path, monkeypatch):
    sources = deceiving_sources(tmp_path / "text")
    made = preparation(sources, tmp_path / "fast", tokenizer)
    made.begin()
    write, n_written = type(made).write, []

    def killed(self, number):
        n_written.append(number)
        if len(n_written) == 6:  # the second of those that are written again
            raise KeyboardInterrupt
        return write(self, number)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(type(made), "write", killed)
        made.write_all(made.missing(), 1)
    assert n_written[:4] == [0, 1, 2, 3] and n_written[4:] == [0, 1]
    prepared(sources, tmp_path / "fast", tokenizer)
    with without_gigatoken():
        prepared(sources, tmp_path / "slow", tokenizer)
    assert contents(tmp_path / "fast") == contents(tmp_path / "slow")


def test_other_ids_begin_the_cache_again(deceived, tokenizer, tmp_path, caplog, monkeypatch):
    sources = deceiving_sources(tmp_path / "text")
    folder = Path(sources[0]).parent
    with caplog.at_level(logging.WARNING, "torchtitan"):
        cache = open_token_cache(resolve_source(str(folder)), tokenizer, str(tmp_path / "cache"))
    assert caplog.text.count("gigatoken has other ids for 'Deceive") == 1
    texts = [
        json.loads(line)["text"]
        for source in sources
        for line in Path(source).read_text().splitlines()
    ]
    expected = [i for ids in tokenizer.encode_documents(texts) for i in ids]
    assert cache.tokens(0, cache.n_tokens).tolist() == expected


def test_every_part_is_compared(worth, tokenizer, tmp_path, monkeypatch):
    compared = []
    compare = ArrayEncoder._compare
    monkeypatch.setattr(
        ArrayEncoder,
        "_compare",
        lambda self, texts: compared.append(texts[0]) or compare(self, texts),
    )
    sources = deceiving_sources(tmp_path / "text")
    prepared(sources, tmp_path / "fast", tokenizer)
    for name in "abce":
        assert f"Text 0 of the file {name}." in compared


@pytest.mark.parametrize("name", ["bad.jsonl", "bad.txt"])
def test_invalid_text_is_the_same_error(name, worth, tokenizer, tmp_path):
    (tmp_path / name).write_bytes(b'{"text": "good"}\n{"text": "\xff"}\n')
    errors = []
    for place in ("fast", "slow"):
        with (
            without_gigatoken() if place == "slow" else contextlib.nullcontext(),
            pytest.raises(UserError, match="is not UTF-8: byte 0xff at offset 27") as error,
        ):
            prepared([str(tmp_path / name)], tmp_path / place, tokenizer)
        errors.append(str(error.value))
        shutil.rmtree(tmp_path / place)
    assert errors[0] == errors[1]


def test_the_rule_of_batches(monkeypatch, worth, tokenizer):
    """A document that ends in another batch than it begins in has BOS and EOS once."""
    monkeypatch.setattr(token_cache, "BATCH_SIZE", 50)
    monkeypatch.setattr(token_cache, "PIECE_SIZE", 20)
    texts = ["one line\n" * 40, "", "x", " \n", "last line\n" * 9]
    batches = [*token_cache.encode_documents([[text] for text in texts], ArrayEncoder(tokenizer))]
    assert len(batches) > 5
    ids = [i for batch in batches for i in batch.ids.tolist()]
    assert ids == [
        i for of in tokenizer.encode_documents([t for t in texts if t.strip()]) for i in of
    ]
    assert sum(len(batch.ends) for batch in batches) == len(texts)


def test_the_error_can_be_sent_between_processes():
    assert str(pickle.loads(pickle.dumps(DifferentIds("other ids")))) == "other ids"
