"""`ReferenceCache`: log-probabilities of answers under the reference, computed once and kept on disk."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.data.disk_cache import cache_root, digest_of
from torchtitan.tools import durable


class ReferenceCache:
    """Log-probability of each answer by the hash of its tokens, for one reference, in `{cache}/reference/{digest}.npz`.

    Args:
        identity: what determines the log-probabilities except the tokens, as JSON-serializable values.
        cache_dir: cache folder of the data.
        ranks: the ranks that share the cache; rank 0 reads and writes the file.
    """

    def __init__(self, identity: Any, cache_dir: str, ranks: Ranks):
        self.path = cache_root(cache_dir) / "reference" / f"{digest_of(identity)}.npz"
        self.ranks = ranks
        self.keys, self.values = ranks.broadcast_from_rank0(lambda: _read(self.path))

    def missing(self, keys: Tensor) -> bool:
        """Return whether any answer of any rank is unknown; 0 is no answer."""
        return any(self.ranks.gather(not (np.isin(keys.numpy(), self.keys) | (keys.numpy() == 0)).all()))

    def add(self, keys: Tensor, values: Tensor) -> None:
        """Add the answers of all ranks and write them to disk."""
        pairs = self.ranks.gather((keys.numpy(), values.numpy()))
        columns = zip((self.keys, self.values), *pairs, strict=True)
        all_keys, all_values = (np.concatenate([part.ravel() for part in column]) for column in columns)
        self.keys, first = np.unique(all_keys, return_index=True)
        self.values = all_values[first]
        self.ranks.broadcast_from_rank0(lambda: _write(self.path, self.keys, self.values))

    def look_up(self, keys: Tensor) -> Tensor:
        """Return the log-probabilities of known answers, and 0 for key 0."""
        wanted = keys.numpy()
        places = np.searchsorted(self.keys, wanted).clip(max=len(self.keys) - 1)
        assert ((self.keys[places] == wanted) | (wanted == 0)).all(), "an answer is not in the cache"
        return torch.from_numpy(np.where(wanted == 0, np.float32(0), self.values[places]))


def _read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    if not path.exists():
        return np.zeros(0, np.int64), np.zeros(0, np.float32)
    with np.load(path, allow_pickle=False) as arrays:
        return arrays["keys"], arrays["values"]


def _write(path: Path, keys: np.ndarray, values: np.ndarray) -> None:
    content = io.BytesIO()
    np.savez(content, keys=keys, values=values)
    path.parent.mkdir(parents=True, exist_ok=True)
    durable.write(path, content.getvalue())
