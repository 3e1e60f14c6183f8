"""Samples to batches: the data sets side by side, and whole samples packed into windows."""

from collections.abc import Sequence

import numpy as np
import torch
from torch.utils.data import Dataset

from torchtitan.components.data.finetuning.chat_encoding import EncodedSample
from torchtitan.components.data.finetuning.fitting import FittedSamples
from torchtitan.components.data.finetuning.numbering import NumberedSets
from torchtitan.components.data.packing import NO_DOCUMENT, Array, Batch
from torchtitan.components.loss import IGNORE_INDEX


class SampleSets(NumberedSets[FittedSamples]):
    """The samples of several data sets."""

    @property
    def positions(self) -> list[Array]:
        """For each data set, the positions of a window that its samples take: the last token predicts nothing."""
        return [of_set.lengths - 1 for of_set in self.sets]

    @property
    def trained_fraction(self) -> float:
        """The share of these positions that are trained."""
        n_positions = sum(int(of_set.sum()) for of_set in self.positions)
        return sum(of_set.report.trained_tokens for of_set in self.sets) / n_positions

    def sample(self, number: int) -> EncodedSample:
        """The sample with a number."""
        source, index = self.locate(number)
        return self.sets[source].sample(index)


class WindowDataset(Dataset[Batch]):
    """Batches by the numbers of the samples in each of their B windows; an empty list is a window of padding."""

    def __init__(self, samples: SampleSets, seq_len: int):
        self.samples = samples
        self.seq_len = seq_len

    def __getitem__(self, windows: Sequence[Sequence[int]]) -> Batch:
        packed = [pack_samples([self.samples.sample(number) for number in window], self.seq_len) for window in windows]
        batch = {name: torch.from_numpy(np.stack([window[name] for window in packed])) for name in packed[0]}
        documents = np.full((len(windows), max(1, *map(len, windows))), NO_DOCUMENT, np.int64)
        for row, window in zip(documents, windows, strict=True):
            row[: len(window)] = window
        batch["documents"] = torch.from_numpy(documents)
        return batch


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
