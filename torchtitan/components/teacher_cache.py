"""`TeacherCache`: a teacher's likeliest tokens at each position of windows, on disk."""

import hashlib
import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from torchtitan.components.data.base import Batch
from torchtitan.components.distillation import TopTokens
from torchtitan.tools import durable
from torchtitan.tools.errors import UserError


class TeacherCache:
    """A folder with a file for each window, named by a hash of its tokens and documents, and `cache.json`.

    Args:
        properties: name → value of what determines the files, except the windows: of a new cache all, among them
            `teacher` and `vocabulary`. Raises `UserError` that names the first that an existing cache has otherwise.
    """

    def __init__(self, folder: str, **properties: Any):
        self.folder, path = Path(folder), Path(folder, "cache.json")
        if not path.exists():
            if "teacher" not in properties:
                raise UserError(f"--teacher.cache {folder} holds no cache; set --teacher.path to write one")
            durable.make_folder(self.folder)
            durable.write(path, json.dumps(properties))
        self.properties: dict[str, Any] = json.loads(path.read_text())
        for name, value in properties.items():
            if (known := self.properties[name]) != value:
                raise UserError(f"--teacher.cache {folder} was written with {name} {known}, not {value}")

    def files(self, batch: Batch) -> list[Path]:
        """Return the files of a loader's windows."""
        documents = [batch["attention"].positions_BL] if "attention" in batch else []
        rows = torch.stack([batch["input"], *documents], dim=1).numpy()
        names = [hashlib.blake2b(row.tobytes(), digest_size=16).hexdigest() for row in rows]
        return [self.folder / name[:2] / f"{name[2:]}.safetensors" for name in names]

    def write(self, batch: Batch, tokens: TopTokens) -> None:
        """Write the files of a loader's windows durably."""
        for file, ids, log_probs in zip(self.files(batch), tokens.ids.cpu(), tokens.log_probs.cpu(), strict=True):
            durable.make_folder(file.parent)
            durable.write(file, safetensors.torch.save({"ids": ids, "log_probs": log_probs}))

    def read(self, batch: Batch) -> Batch:
        """Return `ids` and `log_probs` of a loader's windows. Raise `UserError` if one has no file."""
        if missing := [file for file in self.files(batch) if not file.exists()]:
            raise UserError(
                f"--teacher.cache {self.folder} has no window {missing[0].stem} of the data; set --teacher.path to "
                "complete it, or the data and --training.seq_len for which it was written"
            )
        rows = [safetensors.torch.load_file(file) for file in self.files(batch)]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
