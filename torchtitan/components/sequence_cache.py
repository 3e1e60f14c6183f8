"""`SequenceCache`: results of a frozen model for the tokens of sequences, on disk."""

import contextlib
import json
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from torchtitan.components.data.base import Batch
from torchtitan.components.data.disk_cache import writable
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.tools import durable
from torchtitan.tools.digests import bytes_digest
from torchtitan.tools.errors import UserError


class SequenceCache:
    """A folder with a file for each sequence, named by a hash of its tokens, its labels and the `setting`, JSON values
    that writing and reading must have in common. A sequence without labels, such as padding, has one of its tokens."""

    def __init__(self, folder: Path, setting: Any, *, bytes_per_token: int):
        self.folder, self.bytes_per_token, self._setting = folder, bytes_per_token, json.dumps(setting).encode()
        self._unfinished = folder / "unfinished"
        for file in self._unfinished.glob("*"):
            with contextlib.suppress(OSError):
                if time.time() - file.stat().st_mtime > 3600:  # seconds: its run was killed
                    file.unlink()

    def complete(self, data: Any) -> Path:
        """Return a file that exists once there are results for all sequences of `data`, JSON values."""
        return self.folder / f"{bytes_digest(self._setting + json.dumps(data).encode())}.complete"

    def holds(self, batch: Batch) -> bool:
        """Return whether there is a file for each sequence of a loader's batch."""
        return all(file.exists() for file, _, _ in self._sequences(batch))

    def write(self, batch: Batch, results: Mapping[str, Tensor]) -> None:
        """Write tensors (B, L, ...) of a loader's batch durably. Raise `UserError` if the folder cannot be written."""
        rows = {name: result.flatten(0, 1).cpu() for name, result in results.items()}
        for file, place, _ in self._sequences(batch):
            with writable(file.parent), writable(self._unfinished):
                unfinished = self._unfinished / uuid.uuid4().hex  # several ranks may have the same sequence
                safetensors.torch.save_file({name: x[place].contiguous() for name, x in rows.items()}, unfinished)
                durable.replace(unfinished, file)

    def read(self, batch: Batch) -> Batch:
        """Return the tensors (B, L, ...) of a loader's batch. Raise `UserError` if a file is missing or damaged."""
        parts = [(self._load(file), length) for file, _, length in self._sequences(batch)]
        rows = {
            name: torch.cat([part[name].expand(length, *part[name].shape[1:]) for part, length in parts])
            for name in parts[0][0]
        }
        return {name: x.unflatten(0, batch["input"].shape) for name, x in rows.items()}

    def _sequences(self, batch: Batch) -> list[tuple[Path, slice, int]]:
        """Return the file of each sequence, the places of its results in the flattened batch, and its length."""
        tokens_N2 = torch.stack([batch["input"], batch["labels"]], dim=-1).flatten(0, 1)
        attention = batch.get("attention") or AttentionMetadata.of_rows(*batch["input"].shape)
        sequences, start = [], 0
        for length in attention.lengths:
            is_labeled = bool((tokens_N2[start : start + length, 1] >= 0).any())
            place = slice(start, start + (length if is_labeled else 1))
            name = bytes_digest(self._setting + tokens_N2[place].numpy().tobytes())
            sequences.append((self.folder / name[:2] / f"{name[2:]}.safetensors", place, length))
            start += length
        return sequences

    def _load(self, file: Path) -> dict[str, Tensor]:
        try:
            return safetensors.torch.load_file(file)
        except (OSError, SafetensorError) as error:
            with contextlib.suppress(OSError):
                for mark in self.folder.glob("*.complete"):
                    mark.unlink(missing_ok=True)
            problem = "is damaged: delete it" if file.exists() else "is missing"
            raise UserError(
                f"{file} of the cache {problem}; a new start computes missing results, and a run that resumes needs "
                "the global batch size with which it began"
            ) from error
