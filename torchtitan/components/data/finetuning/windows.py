"""Samples to batches: by their numbers, and whole samples packed into windows."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch.utils.data import Dataset

from torchtitan.components.data.finetuning.chat_encoding import EncodedSample
from torchtitan.components.data.finetuning.numbering import SampleSets
from torchtitan.components.data.finetuning.row_encoders import EncodedRow
from torchtitan.components.data.packing import NO_DOCUMENT, Array, Batch
from torchtitan.components.loss import IGNORE_INDEX

Windows = Sequence[Sequence[EncodedRow]]
"""The samples of each window of a batch; none: a window that only fills it up."""


class WindowDataset(Dataset[Batch]):
    """Batches by the numbers of the samples in each of their B windows.

    Args:
        samples: by their numbers.
        seq_len: given to `collate`.
        collate: makes a batch, without `documents`.
    """

    def __init__(self, samples: SampleSets, seq_len: int, collate: Callable[[Windows, int], Batch]):
        self.samples, self.seq_len, self.collate = samples, seq_len, collate

    def __getitem__(self, windows: Sequence[Sequence[int]]) -> Batch:
        batch = self.collate([[self.samples.sample(number) for number in window] for window in windows], self.seq_len)
        documents = np.full((len(windows), max(1, *map(len, windows))), NO_DOCUMENT, np.int64)
        for row, window in zip(documents, windows, strict=True):
            row[: len(window)] = window
        batch["documents"] = torch.from_numpy(documents)
        return batch


def pack_windows(windows: Windows, seq_len: int, part: int = 0) -> Batch:
    """One part of whole samples, packed: `input`, `labels` and `positions`, each (B, `seq_len`), see `pack_samples`."""
    packed = [pack_samples([sample.parts[part] for sample in window], seq_len) for window in windows]
    return {name: torch.from_numpy(np.stack([window[name] for window in packed])) for name in packed[0]}


def pack_samples(samples: Sequence[EncodedSample], seq_len: int) -> dict[str, Array]:
    """Whole samples, each a document of its own, as one window of `seq_len` positions.

    Returns:
        `input`, `labels` and `positions`, each (seq_len,). The rest of the window is padding: a document of its own
        whose labels are ignored.
    """
    window = {
        "input": np.zeros(seq_len, np.int64),
        "labels": np.full(seq_len, IGNORE_INDEX, np.int64),
        "positions": np.zeros(seq_len, np.int64),
    }
    start = 0
    for sample in samples:
        stop = start + len(sample.ids) - 1
        window["input"][start:stop] = sample.ids[:-1]
        window["labels"][start:stop] = np.where(sample.trained[1:], sample.ids[1:], IGNORE_INDEX)
        window["positions"][start:stop] = np.arange(stop - start)
        start = stop
    assert start <= seq_len
    window["positions"][start:] = np.arange(seq_len - start)
    return window
