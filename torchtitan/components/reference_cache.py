"""`ReferenceCache`: log-probabilities of answers under a frozen model, computed once and kept on disk."""

import json
from typing import Any

import torch
from torch import Tensor

from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.data.disk_cache import cache_root, digest_of, writable
from torchtitan.tools import durable

_WRITE_EVERY = 50
"""Additions between writes."""


class ReferenceCache:
    """Log-probability of each answer by the hash of its tokens, for one model, in `{cache}/reference/{digest}.json`.

    Args:
        identity: what determines the log-probabilities except the tokens, as JSON-serializable values.
        cache_dir: cache folder of the data.
        ranks: the ranks that share the cache, and call its methods together; rank 0 reads and writes the file.
    """

    def __init__(self, identity: Any, cache_dir: str, ranks: Ranks):
        self.path = cache_root(cache_dir) / "reference" / f"{digest_of(identity)}.json"
        self.ranks = ranks
        stored = ranks.broadcast_from_rank0(lambda: self.path.read_text() if self.path.exists() else "{}")
        self.values: dict[int, float] = {0: 0.0} | {int(key): value for key, value in json.loads(stored).items()}
        self._unwritten = 0

    def missing(self, keys: Tensor) -> bool:
        """Return whether any answer of any rank is unknown; 0 is no answer."""
        return any(self.ranks.gather(not self.values.keys() >= set(keys.flatten().tolist())))

    def add(self, keys: Tensor, values: Tensor) -> None:
        """Add the answers of all ranks; each 50th addition writes them to disk, and so does `write`."""
        for added in self.ranks.gather(dict(zip(keys.flatten().tolist(), values.flatten().tolist(), strict=True))):
            self.values |= added
        self._unwritten += 1
        if self._unwritten == _WRITE_EVERY:
            self.write()

    def write(self) -> None:
        """Write additions to disk, if there are any."""
        if self._unwritten:
            self.ranks.broadcast_from_rank0(self._write)
        self._unwritten = 0

    def look_up(self, keys: Tensor) -> Tensor:
        """Return the log-probabilities of known answers, and 0 for key 0."""
        return torch.tensor([self.values[key] for key in keys.flatten().tolist()]).view(keys.shape)

    def _write(self) -> None:
        with writable(self.path.parent):
            durable.write(self.path, json.dumps(self.values))
