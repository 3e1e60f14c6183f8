"""`ArrayEncoder`: the tokenizer's ids, with gigatoken or without it, in any process."""

import functools
import logging
import math
import multiprocessing
import pickle
import re
import sys

import numpy as np
import pytest

from tests.components.tokenizer.array_encoder import (
    FAST,
    SLOW,
    change_ids,
    load,
    open_for_any_text,
    split_ids,
    texts_for,
)
from torchtitan.components.tokenizer import (
    ArrayEncoder,
    DifferentIds,
    PretrainedTokenizer,
    array_encoder,
    tiktoken_model,
)

pytest.importorskip(
    "gigatoken", reason="gigatoken is not installed; there are no wheels for this platform"
)


@pytest.fixture
def worth(monkeypatch):
    """gigatoken is opened for any text."""
    open_for_any_text(monkeypatch)


@pytest.fixture
def changed(worth, monkeypatch):
    """Return a function that makes gigatoken change ids."""
    return functools.partial(change_ids, monkeypatch)


def check(encoder: ArrayEncoder, texts: list[str]) -> None:
    expected = encoder.tokenizer.tokenize(texts, allow_special=False)
    assert split_ids(*encoder.encode(texts)) == expected


@pytest.mark.parametrize("name", FAST)
def test_ids_are_the_tokenizers(name, worth, tmp_path, assets, monkeypatch):
    tokenizer = load(name, tmp_path, assets)
    encoder = ArrayEncoder(tokenizer)
    texts = texts_for(tokenizer)
    expected = tokenizer.tokenize(texts, allow_special=False)
    for is_parallel in (True, False):
        monkeypatch.setattr(array_encoder, "WORTH_THREADS", 0 if is_parallel else math.inf)
        assert split_ids(*encoder.encode(texts)) == expected
        assert split_ids(*encoder.encode(texts[-1:])) == expected[-1:]
        assert split_ids(*encoder.encode([])) == []
    assert encoder.is_fast


@pytest.mark.parametrize("name", SLOW)
def test_other_tokenizers_are_used_as_they_are(name, worth, tmp_path, assets, caplog):
    tokenizer = load(name, tmp_path, assets)
    encoder = ArrayEncoder(tokenizer)
    texts = texts_for(tokenizer)
    with caplog.at_level(logging.INFO, "torchtitan"):
        encoded = [encoder.encode(texts) for _ in range(2)]
    assert (
        not encoder.is_fast
        and caplog.text.count("since gigatoken has") == 1
        and SLOW[name] in caplog.text
    )
    if name != "dropout":
        assert split_ids(*encoded[1]) == tokenizer.tokenize(texts, allow_special=False)


def test_little_text_opens_nothing(tokenizer, monkeypatch):
    monkeypatch.setattr(array_encoder, "_open_backend", lambda backend: pytest.fail("opened"))
    check(ArrayEncoder(tokenizer), ["A few words."] * 1000)


def test_without_gigatoken(tokenizer, worth, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    encoder = ArrayEncoder(tokenizer)
    with caplog.at_level(logging.INFO, "torchtitan"):
        check(encoder, ["A few words."])
    assert not encoder.is_fast and "gigatoken" in caplog.text


def test_a_subclass_with_other_ids(worth, caplog):
    class Reversed(PretrainedTokenizer):
        def tokenize(self, texts, *, allow_special):
            return [ids[::-1] for ids in super().tokenize(texts, allow_special=allow_special)]

    encoder = ArrayEncoder(Reversed.Config().build())
    with caplog.at_level(logging.INFO, "torchtitan"):
        for _ in range(2):
            check(encoder, ["A few words."])
    assert not encoder.is_fast
    assert caplog.text.count("text is encoded by Reversed itself, since gigatoken") == 1


def test_added_special_tokens(worth):
    tokenizer = PretrainedTokenizer.Config(added_tokens=["<|new|>", "tea"]).build()
    encoder = ArrayEncoder(tokenizer)
    check(encoder, ["a<|new|>b and tea", "a<|new", "steam"])
    assert encoder.is_fast


def test_long_blanks_of_files_of_ranks(worth, tmp_path, assets, monkeypatch):
    """`Tiktoken` divides them, as its library cannot encode a million at once."""
    encoder = ArrayEncoder(load("tekken", tmp_path, assets))
    check(encoder, ["few words"])
    monkeypatch.setattr(tiktoken_model, "_LONG_BLANK_LENGTH", 7)
    monkeypatch.setattr(tiktoken_model, "_LONG_BLANK", re.compile(r"(\s{7})"))
    texts = ["few  words", *(f"{'a' * n}{' ' * (7 + n % 3)}b" for n in range(16)), "", " " * 6, "c"]
    check(encoder, texts)
    assert encoder.is_fast
    assert encoder._divided(texts) == [*range(1, 17)]
    assert any(
        encoder._parse([text]).ids.tolist() != encoder.encode([text]).ids.tolist() for text in texts
    )


def test_other_ids_when_it_is_opened(tokenizer, changed, caplog):
    changed(lambda content, ids: ids[:-1] if b"sentence" in content else ids)
    encoder = ArrayEncoder(tokenizer)
    with caplog.at_level(logging.INFO, "torchtitan"):
        check(encoder, ["A sentence.", "Another one."])
    assert not encoder.is_fast and "other ids for 'This is a test sentence.'" in caplog.text


def test_other_ids_in_a_sample(tokenizer, changed):
    changed(lambda content, ids: ids[::-1] if b"Rare" in content else ids)
    encoder = ArrayEncoder(tokenizer)
    check(encoder, ["A common text."])
    encoder.sample_next()
    texts = ["A common text."] * 10 + ["Rare text."] * 90
    with pytest.raises(DifferentIds, match="other ids for 'Rare text.'"):
        encoder.encode(texts)
    assert not encoder.is_fast
    check(encoder, texts)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda content, ids: ids + np.uint32(10**6) if b"Rare" in content else ids,
            "in a vocabulary of",
        ),
        (
            lambda content, ids: ids.astype(np.int32) if b"Rare" in content else ids,
            "lists of int64",
        ),
    ],
)
def test_impossible_results(change, message, tokenizer, changed):
    changed(change)
    encoder = ArrayEncoder(tokenizer)
    check(encoder, ["A common text."])
    with pytest.raises(DifferentIds, match=message):
        encoder.encode(["A common text.", "Rare text."])
    check(encoder, ["Rare text."])


def test_errors_and_panics(tokenizer, changed):
    class PanicException(BaseException):
        pass

    def fail(content, ids):
        for kind in (ValueError, PanicException):
            if content == f"Raise {kind.__name__}.".encode():
                raise kind("it broke\nat a place")
        return ids

    changed(fail)
    for kind in ("ValueError", "PanicException"):
        encoder = ArrayEncoder(tokenizer)
        check(encoder, ["A common text."])
        with pytest.raises(DifferentIds, match="^an error: it broke$"):
            encoder.encode([f"Raise {kind}."])
        check(encoder, [f"Raise {kind}."])


def _encode_in_child(encoder: ArrayEncoder, texts: list[str], queue) -> None:
    queue.put((encoder.is_fast, split_ids(*encoder.encode(texts)), encoder.is_fast))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_other_processes(method, tokenizer, worth, monkeypatch):
    """A forked process must not wait for the threads of its parent; a new one opens gigatoken
    again."""
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    monkeypatch.setattr(array_encoder, "WORTH_THREADS", 0)
    encoder, texts = ArrayEncoder(tokenizer), ["Some words.", "And <|end_of_text|>."] * 500
    check(encoder, ["A text."])
    for _ in range(3):
        encoder._parse(texts)  # in threads
    context = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    child = context.Process(target=_encode_in_child, args=(encoder, texts, queue))
    child.start()
    assert queue._reader.poll(60), child.kill()
    was_fast, ids, is_fast = queue.get()
    child.join(60)
    assert ids == tokenizer.tokenize(texts, allow_special=False)
    # too little text there
    assert (was_fast, is_fast) == ((True, True) if method == "fork" else (False, False))


def test_a_copy_opens_it_again(tokenizer, worth):
    encoder = ArrayEncoder(tokenizer)
    check(encoder, ["A text."])
    copy = pickle.loads(pickle.dumps(encoder))
    assert encoder.is_fast and not copy.is_fast
    check(copy, ["A text."])
    assert copy.is_fast


def test_memory_is_bounded(tokenizer, worth, monkeypatch):
    """gigatoken remembers all words; any number of different ones must not fill the memory."""
    monkeypatch.setattr(array_encoder, "REOPENED_CHARACTERS", 3_000_000)
    monkeypatch.setattr(tokenizer, "tokenize", None)  # `tokenizers` needs memory, too
    encoder = ArrayEncoder(tokenizer)
    monkeypatch.setattr(encoder, "_compare", lambda texts: None)
    chance = np.random.default_rng(0)

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    sizes = []
    for _ in range(12):
        letters = chance.integers(97, 123, 2_000_000, np.uint8)
        letters[::9] = 32
        encoder.encode([letters.tobytes().decode()])
        sizes.append(resident())
    assert encoder.is_fast and sizes[-1] - sizes[3] < 100e6
