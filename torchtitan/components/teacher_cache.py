"""`TeacherCache`: a teacher's likeliest tokens at each position of windows, on disk."""

import hashlib
import json
import uuid
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from torchtitan.components.checkpoint.identity import identify_content
from torchtitan.components.data.base import Batch
from torchtitan.components.data.disk_cache import digest_of
from torchtitan.components.distillation import TopTokens
from torchtitan.tools import durable
from torchtitan.tools.errors import UserError


class TeacherCache:
    """A folder with a file for each window, named by a hash of its tokens, its documents and the `setting`, JSON values
    that training must have in common with writing."""

    def __init__(self, folder: str, setting: Any):
        self.folder, self._setting = Path(folder), json.dumps(setting).encode()
        self._path = self.folder / "teacher.json"

    def claim(self, teacher: Any) -> None:
        """Create the folder for a teacher, which JSON values identify. Raise `UserError` for another's."""
        own = json.dumps(teacher)
        if not self._path.exists():
            durable.make_folder(self.folder)
            durable.write(self._path, own)
        elif self._path.read_text() != own:
            raise UserError(
                f"--teacher.cache {self.folder} has another teacher, --teacher.top_k or type; use a new folder"
            )

    def teacher(self) -> dict[str, str]:
        """Return the teacher as a property of runs (`identify_content`)."""
        return identify_content(str(self.folder), digest_of(self._path.read_text()) if self._path.exists() else "")

    def files(self, batch: Batch) -> list[Path]:
        """Return the files of a loader's windows."""
        documents = [batch["attention"].positions_BL] if "attention" in batch else []
        rows = torch.stack([batch["input"], *documents], dim=1).numpy()
        names = [hashlib.blake2b(self._setting + row.tobytes(), digest_size=16).hexdigest() for row in rows]
        return [self.folder / name[:2] / f"{name[2:]}.safetensors" for name in names]

    def write(self, batch: Batch, tokens: TopTokens) -> None:
        """Write the files of a loader's windows durably."""
        for file, ids, log_probs in zip(self.files(batch), tokens.ids.cpu(), tokens.log_probs.cpu(), strict=True):
            durable.make_folder(file.parent)
            unfinished = file.with_suffix(f".{uuid.uuid4().hex}")  # several ranks may have the same window
            safetensors.torch.save_file({"ids": ids, "log_probs": log_probs}, unfinished)
            durable.replace(unfinished, file)

    def read(self, batch: Batch) -> Batch:
        """Return `ids` and `log_probs` of a loader's windows. Raise `UserError` if one has no file."""
        if not all(file.exists() for file in self.files(batch)):
            raise UserError(
                f"--teacher.cache {self.folder} lacks a window of this run; write it with --teacher.path, or use the "
                "data, tokenizer, --training.seq_len and --loss.temperature for which it was written"
            )
        rows = [safetensors.torch.load_file(file) for file in self.files(batch)]
        return {name: torch.stack([row[name] for row in rows]) for name in ("ids", "log_probs")}
