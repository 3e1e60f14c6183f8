"""Batches of trajectories for training."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch

from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.data.base import Batch
from torchtitan.components.data.finetuning.encoded import EncodedRow, EncodedSample
from torchtitan.components.data.finetuning.samples import Windows, pack_windows
from torchtitan.components.data.plan.packing import first_fit_decreasing, no_packing
from torchtitan.components.rollout.trajectory import Trajectory

T = TypeVar("T")

Advantage = float | list[float]
"""Advantage of a trajectory, or of each of its tokens."""


def to_batches(
    samples: Sequence[tuple[Trajectory, Advantage]],
    seq_len: int,
    batch_size: int,
    ranks: Ranks,
    *,
    packs: bool = True,
    make_batch: Callable[[Windows, int], Batch] = pack_windows,
) -> list[Batch]:
    """Make batches of trajectories and their advantages, one of each or of each token, equally many
    on each rank. Labels also have `logprobs` of the sampler, `old_logprobs` (0), `advantages`, and
    trajectory numbers, `samples`; inputs have the `experts` of trajectories that recorded them.

    Args:
        seq_len: positions of a window at most.
        packs: pack trajectories into windows; otherwise each has one of its own.
        make_batch: makes a batch of the trajectories in its windows, whose positions follow one
            another.
    """
    lengths = np.array([len(t.tokens) - 1 for t, _ in samples], np.int64)
    if packs:
        packed = first_fit_decreasing(lengths, seq_len)
    else:
        order = np.argsort(-lengths, kind="stable")  # so that the rows of a batch are similar
        packed = [order[window] for window in no_packing(lengths[order], seq_len)]
    numbers = [window.tolist() for window in packed]
    return [
        _batch_of(samples, windows, seq_len, make_batch)
        for windows in equal_batches(numbers, batch_size, ranks)
    ]


def equal_batches(
    windows: Sequence[Sequence[T]], batch_size: int, ranks: Ranks
) -> Iterator[Sequence[Sequence[T]]]:
    """Yield the windows by `batch_size`, equally many batches on each rank; empty windows fill
    them."""
    n_windows = batch_size * max(ranks.gather(-(-len(windows) // batch_size)))
    filled = [*windows, *[[]] * (n_windows - len(windows))]
    for start in range(0, n_windows, batch_size):
        yield filled[start : start + batch_size]


def _batch_of(
    samples: Sequence[tuple[Trajectory, Advantage]],
    windows: Sequence[Sequence[int]],
    seq_len: int,
    make_batch: Callable[[Windows, int], Batch],
) -> Batch:
    """Return a batch of windows with these numbers of samples; see `to_batches`."""
    batch = make_batch([[_row_of(samples[n][0]) for n in window] for window in windows], seq_len)
    length = batch["input"].shape[1]
    columns: dict[str, list[np.ndarray]] = {"logprobs": [], "advantages": [], "samples": []}
    for window in windows:
        chosen = [samples[number] for number in window]
        n_labels = [len(trajectory.tokens) - 1 for trajectory, _ in chosen]
        values: dict[str, Sequence[float] | np.ndarray] = {
            "logprobs": [logprob for t, _ in chosen for logprob in t.logprobs[1:]],
            "advantages": np.concatenate([np.zeros(0), *map(_advantages_of_labels, chosen)]),
            "samples": np.repeat(np.array(window, np.int64), n_labels),
        }
        for name, column in columns.items():
            kind = np.int64 if name == "samples" else np.float32
            row = np.zeros(length, kind)
            row[: len(values[name])] = values[name]
            column.append(row)
    batch |= {name: torch.from_numpy(np.stack(rows)) for name, rows in columns.items()}
    every = [[samples[number][0] for number in window] for window in windows]
    if (experts_BLNK := _experts_of(every, length)) is not None:
        batch["experts"] = experts_BLNK
    return {**batch, "old_logprobs": torch.zeros_like(batch["logprobs"])}


def _experts_of(windows: Sequence[Sequence[Trajectory]], length: int) -> torch.Tensor | None:
    """Return the experts of each window's inputs, (B, L, layers, K); None if no trajectory has
    experts."""
    known = (t.experts for window in windows for t in window if t.experts is not None)
    sizes = next((experts.shape[1:] for experts in known), None)
    if sizes is None:
        return None
    experts_BLNK = np.full((len(windows), length, *sizes), -1, np.int16)
    for row, window in zip(experts_BLNK, windows, strict=True):
        start = 0
        for trajectory in window:
            end = start + len(trajectory.tokens) - 1
            if trajectory.experts is not None:
                row[start:end] = trajectory.experts[:-1]
            start = end
    return torch.from_numpy(experts_BLNK)


def _advantages_of_labels(sample: tuple[Trajectory, Advantage]) -> np.ndarray:
    trajectory, advantage = sample
    n_labels = len(trajectory.tokens) - 1
    if isinstance(advantage, list):
        return np.array(advantage[1:])
    return np.full(n_labels, advantage)


def _row_of(trajectory: Trajectory) -> EncodedRow:
    sample = EncodedSample(np.array(trajectory.tokens), np.array(trajectory.trained))
    return EncodedRow((sample,), images=[image.to_json() for image in trajectory.images])
