"""Files written by `torch.save`: the positions of the tensors in them, and Hugging Face checkpoints made of such files.

Only tensors are ever created from such a file, and no tensor is read to find its position.
"""

import pickle
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from torchtitan.components.checkpoint.formats.huggingface import files_of
from torchtitan.components.checkpoint.formats.source import Slices, TensorSource, damaged, some, whole
from torchtitan.protocols.state_dict_adapter import TensorForm
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import unreadable
from torchtitan.tools.torch_private import offset_in_file

WEIGHTS = "pytorch_model.bin"
INDEX = "pytorch_model.bin.index.json"


@dataclass(frozen=True)
class Piece:
    """A tensor whose values are contiguous in a file."""

    file: Path
    offset: int
    form: TensorForm

    def read(self, slices: Slices) -> Tensor:
        """The part that `slices` says; reads its rows whole."""
        shape = self.form.shape
        if not shape:
            return self._values(0, shape)
        rows = slices[0]
        row_bytes = self.form.n_bytes // max(1, shape[0])
        values = self._values(rows.start * row_bytes, (rows.stop - rows.start, *shape[1:]))
        return values[(slice(None), *slices[1:])]

    def _values(self, start: int, shape: Sequence[int]) -> Tensor:
        """A tensor of that shape from the bytes that begin at `start`."""
        values = torch.empty(shape, dtype=self.form.dtype)
        buffer = values.view(-1).view(torch.uint8).numpy().data
        with open(self.file, "rb") as file:
            file.seek(self.offset + start)
            if file.readinto(buffer) != len(buffer):
                raise damaged(self.file, "it ends too early")
        return values


class PickledSource(TensorSource):
    """The tensors of `pytorch_model.bin`, or of the files that `pytorch_model.bin.index.json` names.

    Args:
        path: the folder.

    Raises:
        UserError: if a file is missing, damaged or outside the folder, holds anything but tensors, or lacks tensors
            that the index assigns to it.
    """

    def __init__(self, path: str | Path):
        self._pieces: dict[str, Piece] = {}
        for file, names in files_of(Path(path), WEIGHTS, INDEX).items():
            pieces = tensors_in(file)
            if missing := [name for name in names or [] if name not in pieces]:
                raise UserError(f"{file} lacks tensors that {INDEX} says are in it: {some(missing)}")
            self._pieces |= {name: pieces[name] for name in names or pieces}
        self.forms = {name: piece.form for name, piece in self._pieces.items()}

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        """The tensor of that name, or the part of it that `slices` says; only its rows are read."""
        return self._pieces[name].read(slices or whole(self.forms[name].shape))


def tensors_in(file: Path) -> dict[str, Piece]:
    """Return the positions of the tensors in a file written by `torch.save`, without reading the tensors.

    Loaded as fake tensors, storages know their place in the file ("Serialization semantics" in PyTorch's notes).

    Raises:
        UserError: if the file is damaged, or holds anything but a dict of tensors.
    """
    from torchtitan.tools.torch_private import FakeTensorMode

    try:
        _check_stored(file)
        with FakeTensorMode():
            tensors = torch.load(file, weights_only=True)
    except UserError:
        raise
    except pickle.UnpicklingError as error:
        # torch's first line advises to load the file all the same; the second one names the object.
        reason = [line for line in str(error).splitlines() if line.strip()][:2][-1]
        raise unreadable(
            file,
            f"{file} does not hold tensors alone, and is not loaded, since other objects could run code ({reason}); "
            "use safetensors files",
        ) from error
    except Exception as error:  # there is no end to what damaged bytes lead to
        raise damaged(file, str(error).split("\n")[0] or type(error).__name__) from error
    is_named = isinstance(tensors, dict) and all(isinstance(name, str) for name in tensors)
    if not is_named or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise UserError(f"{file} is not a file of weights: it must hold a dict of tensors")
    pieces, n_bytes = {}, file.stat().st_size
    for name, tensor in tensors.items():
        is_dense = tensor.layout == torch.strided
        start = offset_in_file(tensor.untyped_storage()) if is_dense else None
        if start is None or not tensor.is_contiguous():
            raise UserError(f"{file}: {name} does not lie in one piece; load the file and torch.save it again")
        piece = Piece(file, start + tensor.storage_offset() * tensor.itemsize, TensorForm.of(tensor))
        if not 0 <= piece.offset <= n_bytes - piece.form.n_bytes:
            raise damaged(file, f"{name} is not inside it")
        pieces[name] = piece
    return pieces


def _check_stored(file: Path) -> None:
    """Refuse compressed records: their tensors have no place in the file, and they could unpack to any size."""
    if not zipfile.is_zipfile(file):
        return
    with zipfile.ZipFile(file) as records:
        if any(record.compress_type != zipfile.ZIP_STORED for record in records.infolist()):
            raise UserError(
                f"{file} has compressed records, which torch.save does not write; load it with torch and save it again"
            )
