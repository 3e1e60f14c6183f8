import os
import time

import pytest
import torch

from torchtitan.components.sequence_cache import SequenceCache
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.tools.errors import UserError


def batch_of(*rows: list[list[int]]):
    """Return windows of documents, of which a negative number is padding; labels are the tokens themselves."""
    tokens = torch.tensor([[token for document in row for token in document] for row in rows])
    positions = torch.tensor([[place for document in row for place in range(len(document))] for row in rows])
    labels = tokens.where(tokens >= 0, -100)
    return {"input": tokens.clamp(min=0), "labels": labels, "attention": AttentionMetadata.from_positions(positions)}


def test_results_follow_the_sequences_to_other_windows(tmp_path):
    """In another order, in windows of another length, and with more padding."""
    cache = SequenceCache(tmp_path, ["model"], bytes_per_token=4)
    written = batch_of([[1, 2, 3], [4], [-1]], [[5, 6], [7, 8], [-1]])
    results = {"own": 10.0 * written["input"], "two": torch.stack([written["input"]] * 2, dim=-1)}
    cache.write(written, results)
    moved = batch_of([[7, 8], [1, 2, 3], [-1, -1, -1]], [[4], [5, 6], [-1, -1, -1, -1, -1]])
    assert cache.holds(moved)
    read = cache.read(moved)
    is_labeled = moved["labels"] >= 0
    assert torch.equal(read["own"][is_labeled], 10.0 * moved["input"][is_labeled])
    assert torch.equal(read["two"][is_labeled], torch.stack([moved["input"]] * 2, dim=-1)[is_labeled])


def test_other_sequences_labels_and_settings_have_no_results(tmp_path):
    written = batch_of([[1, 2, 3], [4]])
    SequenceCache(tmp_path, ["model"], bytes_per_token=4).write(written, {"own": written["input"]})
    part = batch_of([[1, 2], [4]])
    masked = {**written, "labels": written["labels"].masked_fill(written["input"] == 2, -100)}
    joined = batch_of([[1, 2, 3, 4]])
    for batch, setting in ((part, "model"), (masked, "model"), (joined, "model"), (written, "other model")):
        cache = SequenceCache(tmp_path, [setting], bytes_per_token=4)
        assert not cache.holds(batch)
        with pytest.raises(UserError, match=r"\.safetensors of the cache is missing; a new start computes"):
            cache.read(batch)


def test_unfinished_files_do_not_count_and_damaged_ones_are_named(tmp_path):
    cache, written = SequenceCache(tmp_path, ["model"], bytes_per_token=4), batch_of([[1, 2, 3]])
    cache.write(written, {"own": written["input"]})
    (file,) = tmp_path.glob("*/*.safetensors")
    content = file.read_bytes()
    for name, age in (("of_a_killed_run", 7200.0), ("of_another_run", 60.0)):
        (unfinished := tmp_path / "unfinished" / name).write_bytes(content)
        os.utime(unfinished, (time.time() - age,) * 2)
    SequenceCache(tmp_path, ["model"], bytes_per_token=4)
    assert [left.name for left in (tmp_path / "unfinished").iterdir()] == ["of_another_run"]
    file.rename(tmp_path / "unfinished/0123")
    assert not cache.holds(written)
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=rf"{file} of the cache is damaged: delete it"):
        cache.read(written)
