"""Windows of `benchmarks/packing.py`."""

import numpy as np
from packing import SEQ_LEN, batches_of, make_windows

from torchtitan.components.losses.loss import IGNORE_INDEX


def test_shared_padding_is_cut_without_labels() -> None:
    lengths = np.arange(40, 56)
    windows = make_windows(lengths, lengths // 2, "none", 16)
    padded, cut = batches_of(windows, 8), batches_of(windows, 8, to_longest=True)
    assert {batch["input"].shape for batch in padded} == {(8, SEQ_LEN)}
    assert max(batch["input"].shape[1] for batch in cut) == lengths.max() - 1
    for batch, whole in zip(cut, padded, strict=True):
        n_tokens = batch["input"].shape[1]
        assert batch["input"].equal(whole["input"][:, :n_tokens])
        assert (whole["labels"][:, n_tokens:] == IGNORE_INDEX).all()
