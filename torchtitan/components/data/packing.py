"""Documents to windows: the order in which windows are visited, and how one becomes a training sample.

The documents of a data set, one behind the other, are one stream of tokens. Window `i` covers the tokens
`[i * seq_len, i * seq_len + seq_len]`: neighbours overlap by one token, so that every token but the first of the
stream is the label of exactly one input position. Everything here is a pure function.
"""

import hashlib

import numpy as np
import numpy.typing as npt
import torch

from torchtitan.components.loss import IGNORE_INDEX

NO_DOCUMENT = -1
"""The document number of a sample that only fills up a batch."""

Batch = dict[str, torch.Tensor]
"""What a data loader hands out, for B samples of T = `seq_len` tokens, all int64:

- `input` (B, T): token ids.
- `labels` (B, T): the token that follows each input token, or `IGNORE_INDEX`.
- `positions` (B, T), only with document masking: each token's position counted from the start of its document in this
  window. A 0 therefore begins a document, and attention must not reach back across it.
- `documents` (B, M), optional: numbers of the documents that the sample is made of, in their order, then `NO_DOCUMENT`;
  of windows of running text, (B, 2), the first and the last that they touch. The loader's `document_names` names them.
"""

Array = npt.NDArray[np.int64]

_MASK = (1 << 64) - 1
_ROUNDS = 6


def count_windows(n_tokens: int, seq_len: int) -> int:
    """Number of windows of `seq_len` predictions that a stream of `n_tokens` tokens fills, the last one partly."""
    return max(0, -(-(n_tokens - 1) // seq_len))


def permute(index: int, size: int, *key: int) -> int:
    """Where a pseudo-random permutation of `range(size)`, chosen by `key`, sends `index`.

    It needs no memory: a Feistel network permutes the smallest even-bit power of two that holds `size`, and a result
    outside is sent through again until it falls inside ("cycle walking"; Black and Rogaway, "Ciphers with Arbitrary
    Finite Domains", 2002). At most 4 times as large a domain: fewer than 4 passes on average.
    """
    assert 0 <= index < size
    half_bits = max(1, -(-(size - 1).bit_length() // 2))
    half_mask = (1 << half_bits) - 1
    round_keys = _round_keys(key)
    while True:
        left, right = index >> half_bits, index & half_mask
        for round_key in round_keys:
            left, right = right, left ^ (_mix(right ^ round_key) & half_mask)
        index = left << half_bits | right
        if index < size:
            return index


def _round_keys(key: tuple[int, ...]) -> list[int]:
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8 * _ROUNDS).digest()
    return [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(_ROUNDS)]


def _mix(value: int) -> int:
    """SplitMix64's finalizer (Steele, Lea and Flood, 2014): every input bit moves every output bit."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def pack(tokens: Array, starts: Array, seq_len: int, *, document_mask: bool) -> dict[str, Array]:
    """One window as a sample of `seq_len` positions.

    Args:
        tokens: the window's 2 to `seq_len + 1` tokens; fewer than `seq_len + 1` at the end of the data only.
        starts: the indices in `tokens` at which a document begins, index 0 or not.
        document_mask: keep documents apart. Positions count from each document's start in the window, and the last
            token of a document does not predict the first of the next, which it could not know. Without it, the
            window is one text and there are no positions.

    Returns:
        `input`, `labels` and, with document masking, `positions`, each (seq_len,). The rest of a short window is
        padding: a document of its own whose labels are ignored.
    """
    n_inputs = len(tokens) - 1
    assert 1 <= n_inputs <= seq_len
    inputs = np.zeros(seq_len, np.int64)
    inputs[:n_inputs] = tokens[:-1]
    labels = np.full(seq_len, IGNORE_INDEX, np.int64)
    labels[:n_inputs] = tokens[1:]
    if not document_mask:
        return {"input": inputs, "labels": labels}
    labels[starts[starts > 0] - 1] = IGNORE_INDEX
    origin = np.zeros(seq_len, np.int64)
    inside = np.append(starts[starts < n_inputs], n_inputs) if n_inputs < seq_len else starts[starts < seq_len]
    origin[inside] = inside
    return {"input": inputs, "labels": labels, "positions": np.arange(seq_len) - np.maximum.accumulate(origin)}


def filler(seq_len: int, *, document_mask: bool) -> dict[str, Array]:
    """A sample that predicts nothing, to fill up the last batch."""
    sample = {"input": np.zeros(seq_len, np.int64), "labels": np.full(seq_len, IGNORE_INDEX, np.int64)}
    if document_mask:
        sample["positions"] = np.arange(seq_len)
    return sample


def collate(samples: list[tuple[dict[str, Array], tuple[int, int]]]) -> Batch:
    """Samples, each with the numbers of its first and last document, as one batch."""
    batch = {name: torch.from_numpy(np.stack([sample[name] for sample, _ in samples])) for name in samples[0][0]}
    batch["documents"] = torch.tensor([documents for _, documents in samples])
    return batch
