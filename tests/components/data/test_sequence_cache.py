import os
import sys
import time

import pytest
import torch

from tests.conftest import memory_limit
from torchtitan.components.data import sequence_cache
from torchtitan.components.data.sequence_cache import SequenceCache, TokenResult
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.tools.errors import UserError

WHOLE = TokenResult(torch.int64)
FLOAT = TokenResult(torch.float32)
TEACHER = {"ids": TokenResult(torch.int32, below=100), "log_probs": FLOAT}


def batch_of(*rows: list[list[int]]):
    """Return windows of documents, of which a negative number is padding; labels are the tokens
    themselves."""
    tokens = torch.tensor([[token for document in row for token in document] for row in rows])
    positions = torch.tensor(
        [[place for document in row for place in range(len(document))] for row in rows]
    )
    labels = tokens.where(tokens >= 0, -100)
    return {
        "input": tokens.clamp(min=0),
        "labels": labels,
        "attention": AttentionMetadata.from_positions(positions),
    }


def test_results_follow_the_sequences_to_other_windows(tmp_path):
    """In another order, in windows of another length, and with more padding."""
    results_of = {"own": FLOAT, "two": TokenResult(torch.int64, (2,))}
    cache = SequenceCache(tmp_path, ["model"], results=results_of)
    assert cache.bytes_per_token == 4 + 2 * 8
    written = batch_of([[1, 2, 3], [4], [-1]], [[5, 6], [7, 8], [-1]])
    results = {"own": 10.0 * written["input"], "two": torch.stack([written["input"]] * 2, dim=-1)}
    cache.write(written, results)
    moved = batch_of([[7, 8], [1, 2, 3], [-1, -1, -1]], [[4], [5, 6], [-1, -1, -1, -1, -1]])
    assert cache.holds(moved)
    read = cache.read(moved)
    is_labeled = moved["labels"] >= 0
    assert torch.equal(read["own"][is_labeled], 10.0 * moved["input"][is_labeled])
    assert torch.equal(
        read["two"][is_labeled], torch.stack([moved["input"]] * 2, dim=-1)[is_labeled]
    )


def test_other_sequences_labels_and_settings_have_no_results(tmp_path):
    written = batch_of([[1, 2, 3], [4]])
    SequenceCache(tmp_path, ["model"], results={"own": WHOLE}).write(
        written, {"own": written["input"]}
    )
    part = batch_of([[1, 2], [4]])
    masked = {**written, "labels": written["labels"].masked_fill(written["input"] == 2, -100)}
    joined = batch_of([[1, 2, 3, 4]])
    for batch, setting in (
        (part, "model"),
        (masked, "model"),
        (joined, "model"),
        (written, "other model"),
    ):
        cache = SequenceCache(tmp_path, [setting], results={"own": WHOLE})
        assert not cache.holds(batch)
        with pytest.raises(
            UserError, match=r"\.safetensors of the cache is missing; a new start computes"
        ):
            cache.read(batch)


def test_unfinished_files_do_not_count_and_damaged_ones_are_named(tmp_path):
    cache = SequenceCache(tmp_path, ["model"], results={"own": WHOLE})
    written = batch_of([[1, 2, 3]])
    cache.write(written, {"own": written["input"]})
    (file,) = tmp_path.glob("*/*.safetensors")
    content = file.read_bytes()
    for name, age in (("of_a_killed_run", 7200.0), ("of_another_run", 60.0)):
        (unfinished := tmp_path / "unfinished" / name).write_bytes(content)
        os.utime(unfinished, (time.time() - age,) * 2)
    SequenceCache(tmp_path, ["model"], results={"own": WHOLE})
    assert [left.name for left in (tmp_path / "unfinished").iterdir()] == ["of_another_run"]
    file.rename(tmp_path / "unfinished/0123")
    assert not cache.holds(written)
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(
        UserError,
        match=rf"{file} of the cache is damaged .*; it was renamed to {file.stem}.damaged",
    ):
        cache.read(written)
    assert (
        file.with_suffix(".damaged").read_bytes() == content[: len(content) // 2]
        and not file.exists()
    )


def log_probs_of(batch) -> torch.Tensor:
    return -0.5 * (1 + batch["input"])


@pytest.fixture
def written(tmp_path):
    """A cache, a batch of one sequence, the batch's results, and its file."""
    cache, batch = SequenceCache(tmp_path, ["model"], results=TEACHER), batch_of([[1, 2, 3, 4, 5]])
    results = {"ids": batch["input"].int(), "log_probs": log_probs_of(batch)}
    cache.write(batch, results)
    (file,) = tmp_path.glob("*/*.safetensors")
    return cache, batch, results, file


def assert_equal(read, results) -> None:
    assert read.keys() == results.keys()
    assert all(torch.equal(read[name], results[name]) for name in results)


def test_any_changed_bit_is_found_or_changes_nothing(written, caplog):
    """In the length of the header, the header, its checksums, and the values."""
    cache, batch, results, file = written
    content = file.read_bytes()
    header_bytes = 8 + int.from_bytes(content[:8], "little")
    n_found = {"header": 0, "values": 0}
    for place in range(len(content)):
        region = "header" if place < header_bytes else "values"
        file.write_bytes(
            content[:place] + bytes([content[place] ^ (1 << place % 8)]) + content[place + 1 :]
        )
        try:
            assert_equal(cache.read(batch), results)
        except UserError as error:
            assert f"{file} of the cache is damaged (" in str(error)
            n_found[region] += 1
            continue
        assert region == "header", place
    assert n_found["values"] == len(content) - header_bytes
    assert n_found["header"] > 0.9 * header_bytes


def test_damaged_and_swapped_files_are_computed_again(written, caplog):
    """A run that starts finds them, renames them with a message, and computes them again."""
    cache, batch, results, file = written
    mark = cache.mark("data")
    cache.finish(mark, cache.names(batch))
    assert cache.is_complete(mark) and cache.holds(batch)
    other = batch_of([[6, 7, 8, 9, 10]])
    cache.write(other, {name: x + 1 for name, x in results.items()})
    (swapped,) = {cache.folder / name for name in cache.names(other)}
    for damaged in (
        b"",
        b"{}",
        file.read_bytes()[:-1],
        bytes(len(file.read_bytes())),
        swapped.read_bytes(),
    ):
        caplog.clear()
        file.write_bytes(damaged)
        assert not cache.is_complete(mark)
        assert f"{file} of the cache is damaged (" in caplog.text
        assert f"it was renamed to {file.stem}.damaged and is rebuilt" in caplog.text
        assert file.with_suffix(".damaged").read_bytes() == damaged
        assert not cache.holds(batch)
        cache.write(batch, results)
        assert cache.is_complete(mark)
        assert_equal(cache.read(batch), results)


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_something_else_in_place_of_a_file(written, kind):
    cache, batch, results, file = written
    file.unlink()
    file.mkdir() if kind == "folder" else os.mkfifo(file)
    assert not cache.holds(batch)
    cache.write(batch, results)
    assert_equal(cache.read(batch), results)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit the address space")
def test_a_file_of_any_size_fits_the_memory(written):
    """Also a hole of 5 GiB, which takes no space on the disk."""
    cache, batch, _, file = written
    os.truncate(file, 5 << 30)
    with (
        memory_limit(3 << 30),
        pytest.raises(UserError, match="is damaged .*5,368,709,120 bytes, and may have"),
    ):
        cache.read(batch)
    mark = cache.mark("data")
    cache.finish(mark, cache.names(batch))
    os.truncate(mark, 5 << 30)
    with memory_limit(3 << 30):
        assert not cache.is_complete(mark)


def test_the_limit_of_a_file_grows_with_the_results_of_a_token(tmp_path, monkeypatch):
    """A teacher may have all tokens of a vocabulary for each position."""
    monkeypatch.setattr(sequence_cache, "_MOST_TOKENS", 3)
    monkeypatch.setattr(sequence_cache, "_MOST_HEADER_BYTES", 1000)
    results = {"log_probs": TokenResult(torch.float32, (2000,))}
    cache = SequenceCache(tmp_path, [], results=results)
    batch, longer = batch_of([[1, 2, 3]]), batch_of([[1, 2, 3, 4]])
    for one in (batch, longer):
        cache.write(one, {"log_probs": torch.zeros(*one["input"].shape, 2000)})
    assert cache.holds(batch)
    assert not cache.holds(longer)


def test_a_mark_lists_what_it_stands_for(written, caplog):
    cache, batch, results, file = written
    mark = cache.mark("data")
    assert not cache.is_complete(mark)
    cache.finish(mark, cache.names(batch))
    assert cache.is_complete(mark)
    content = mark.read_text()
    for damaged in (
        "",
        content[:-20],
        content.replace(".safetensors", ".safetensorz"),
        "../" + content,
    ):
        caplog.clear()
        mark.write_text(damaged)
        assert not cache.is_complete(mark)
    mark.write_text(content)
    file.unlink()
    assert not cache.is_complete(mark)


def test_a_sample_of_many_files_is_verified_or_all(tmp_path, monkeypatch):
    monkeypatch.setattr(sequence_cache, "VERIFIED_FILES", 2)
    batch = batch_of([[number, 1] for number in range(9)])
    caches = [
        SequenceCache(tmp_path, [], results={"own": WHOLE}, verify=verify)
        for verify in (False, True)
    ]
    caches[0].write(batch, {"own": batch["input"]})
    mark = caches[0].mark("data")
    caches[0].finish(mark, caches[0].names(batch))
    middle = sorted(tmp_path.glob("*/*.safetensors"))[4]
    middle.write_bytes(middle.read_bytes()[:-1])
    assert [cache.is_complete(mark) for cache in caches] == [True, False]


def test_nan_is_refused_where_the_loss_reads_it(tmp_path):
    cache = SequenceCache(tmp_path, [], results={"log_probs": FLOAT})
    batch = batch_of([[1, 2, 3]])
    batch["labels"] = torch.tensor([[-100, 2, 3]])
    usable = torch.tensor([[float("nan"), -float("inf"), -1.0]])
    cache.write(batch, {"log_probs": usable})
    assert torch.equal(cache.read(batch)["log_probs"][:, 1:], usable[:, 1:])
    (file,) = tmp_path.glob("*/*.safetensors")
    unusable = torch.tensor([[-1.0, float("nan"), -1.0]])
    with pytest.raises(
        UserError, match="log_probs of the frozen model is NaN for a sequence of 3 tokens"
    ):
        cache.write(batch, {"log_probs": unusable})
    file.write_bytes(sequence_cache._encoded(file.name, {"log_probs": unusable[0]}))
    with pytest.raises(UserError, match=r"is damaged \(log_probs is NaN\)"):
        cache.read(batch)


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"other": torch.zeros(3)},
        {"own": torch.zeros(2)},
        {"own": torch.zeros(3, 1)},
        {"own": torch.zeros(())},
        {"own": torch.zeros(3, dtype=torch.float64)},
        {"own": torch.zeros(3), "more": torch.zeros(3)},
    ],
)
def test_files_with_other_tensors_are_damaged(tmp_path, tensors):
    """Also if their checksums are right."""
    cache, batch = SequenceCache(tmp_path, [], results={"own": FLOAT}), batch_of([[9], [1, 2, 3]])
    alone = batch_of([[1, 2, 3]])
    for read in (batch, alone):
        cache.write(batch, {"own": torch.zeros(1, 4)})
        (name,) = cache.names(alone)
        file = cache.folder / name
        file.write_bytes(sequence_cache._encoded(file.name, tensors))
        with pytest.raises(UserError, match=rf"{file} of the cache is damaged \((it|own)"):
            cache.read(read)


def test_a_forged_file_is_computed_again_at_the_start(written, caplog):
    cache, batch, results, file = written
    for forged in ({"other": torch.zeros(5)}, {**results, "ids": torch.full((1, 5), 100).int()}):
        tensors = {name: x.flatten(0, 1) if x.ndim > 1 else x for name, x in forged.items()}
        file.write_bytes(sequence_cache._encoded(file.name, tensors))
        assert not cache.holds(batch)
        cache.write(batch, results)
        assert cache.holds(batch)
    assert "it holds other, not ids, log_probs" in caplog.text
    assert "ids has numbers that are not from 0 to 99" in caplog.text
