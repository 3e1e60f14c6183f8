"""What the weights of a run that are not trained begin as, so that a checkpoint need not hold them."""

import dataclasses
import hashlib
from pathlib import Path

import torch

from torchtitan.components.checkpoint import folders
from torchtitan.components.checkpoint.formats.find import format_of, open_source
from torchtitan.components.checkpoint.formats.source import Slices, TensorSource, whole
from torchtitan.components.checkpoint.store import LocalFolder, folder_at
from torchtitan.protocols.state_dict_adapter import TensorForm

_PATH = "checkpoint.initial_load_path "


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where such weights are from."""

    words: str
    """For messages and markers."""

    @classmethod
    def at(cls, path: str) -> "Origin":
        """The checkpoint in a folder, in any format, or behind a URL."""
        folder = folder_at(path)
        return cls(f"{_PATH}{folder.path.resolve() if isinstance(folder, LocalFolder) else folder}")

    @classmethod
    def of_seed(cls, seed: int) -> "Origin":
        """The initial weights that follow from a run's seed."""
        return cls(f"debug.seed {seed}")

    @property
    def path(self) -> str:
        """The folder or URL; empty: there is none."""
        return self.words.removeprefix(_PATH) if self.words.startswith(_PATH) else ""

    def digest(self) -> str:
        """What tells the weights from others; empty where `words` do.

        That of the manifest, of a checkpoint of ours, which has the digests of all files. Of others, it is one of
        names, shapes and types of all tensors and of some rows of each: another model, another revision or further
        training show, and the files need not be read as a whole.

        Raises:
            UserError: where there is no checkpoint, or one that cannot be read.
        """
        if not self.path:
            return ""
        folder = folder_at(self.path)
        if not isinstance(folder, LocalFolder) or (folder.exists() and format_of(folder.path) == "dcp"):
            marker = folders.open_checkpoint(folder).marker
            assert marker is not None, "it was opened"
            return marker.manifest
        return _sampled_digest(open_source(Path(self.path)))


def _sampled_digest(source: TensorSource) -> str:
    digest = hashlib.sha256()
    for name, form in sorted(source.forms.items()):
        digest.update(f"{name} {list(form.shape)} {form.dtype}\n".encode())
        for slices in _sampled(form):
            digest.update(source.read(name, slices).reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _sampled(form: TensorForm) -> list[Slices]:
    """A vector whole; of other tensors the first, the middle and the last row."""
    if form.shape.numel() == 0:
        return []
    if len(form.shape) < 2:
        return [whole(form.shape)]
    n_rows, *others, _ = whole(form.shape)
    rows = sorted({0, n_rows.stop // 2, n_rows.stop - 1})
    return [(slice(row, row + 1), *(slice(0, 1) for _ in others), slice(0, form.shape[-1])) for row in rows]
