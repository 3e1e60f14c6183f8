"""Meta's checkpoints: `consolidated.00.pth`, `consolidated.01.pth`, … beside a `params.json`.

Several files are the shards of tensor parallelism, each a dict of tensors with the same names. How a tensor was cut
follows from its module, as in Meta's reference code: linear layers along their outputs or their inputs; the embedding
along the vocabulary (Llama 3) or the features (Llama 1 and 2); norms not at all.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from torchtitan.components.checkpoint.formats.pickled import tensors_in
from torchtitan.components.checkpoint.formats.source import (
    MakeTensor,
    Slices,
    TensorSource,
    slice_shape,
    some,
    value_chunks,
    whole,
)
from torchtitan.protocols.state_dict_adapter import TensorForm
from torchtitan.tools import durable
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import read_object

FILES = "consolidated.*.pth"
PARAMETERS = "params.json"

_AXES = {"wq": 0, "wk": 0, "wv": 0, "w1": 0, "w3": 0, "output": 0, "wo": 1, "w2": 1}
"""Module → the dimension along which its weight is cut."""

_EMBEDDING = "tok_embeddings"


class MetaSource(TensorSource):
    """The tensors of the `consolidated.*.pth` files in a folder, those of several files joined.

    Args:
        path: the folder.

    Raises:
        UserError: where a file is missing or damaged, or files do not fit each other.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        files = sorted(self.path.glob(FILES))
        expected = [self.path / f"consolidated.{index:02d}.pth" for index in range(max(1, len(files)))]
        if files != expected:
            missing = [file.name for file in expected if file not in files]
            raise UserError(f"{self.path} is incomplete: there is no {some(missing)} (there are {len(files)} files)")
        if odd := [file.name for file in files if not file.is_file()]:
            raise UserError(f"{self.path} is incomplete: {some(odd)} is not a file")
        shards = [tensors_in(file) for file in files]
        for file, shard in zip(files, shards, strict=True):
            if differing := sorted(shards[0].keys() ^ shard.keys()):
                raise UserError(f"{file} and {files[0]} do not hold the same tensors: {some(differing)}")
        self._pieces = {name: [shard[name] for shard in shards] for name in shards[0]}
        self._axes = {name: self._axis(name) for name in self._pieces}
        self.forms = {name: self._joined_form(name) for name in self._pieces}

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        """The tensor of that name, or the part of it that `slices` says, joined from all files that have some of it.

        Raises:
            UserError: where a file ends too early, or files differ in a tensor that they all hold whole.
        """
        wanted = slices or whole(self.forms[name].shape)
        pieces, axis = self._pieces[name], self._axes[name]
        if axis is None:
            return self._read_replicated(name, wanted)
        out = torch.empty(slice_shape(wanted), dtype=self.forms[name].dtype)
        begin = 0
        for piece in pieces:
            size = piece.form.shape[axis]
            first, last = max(wanted[axis].start, begin), min(wanted[axis].stop, begin + size)
            if first < last:
                part = slice(first - begin, last - begin)
                values = piece.read((*wanted[:axis], part, *wanted[axis + 1 :]))
                out.narrow(axis, first - wanted[axis].start, last - first).copy_(values)
            begin += size
        return out

    @property
    def vocab_size(self) -> int:
        """The rows of the embedding, which a params.json need not say.

        Raises:
            UserError: where there is no embedding.
        """
        name = f"{_EMBEDDING}.weight"
        if name not in self.forms or len(self.forms[name].shape) != 2:
            raise UserError(f"{self.path}: there is no matrix {name}, which would say the size of the vocabulary")
        return self.forms[name].shape[0]

    def _read_replicated(self, name: str, slices: Slices) -> Tensor:
        first, *others = self._pieces[name]
        values = first.read(slices)
        for other in others:
            if not torch.equal(values, other.read(slices)):
                raise UserError(f"{name} differs between {first.file} and {other.file}, which must hold the same")
        return values

    def _axis(self, name: str) -> int | None:
        """The dimension along which the files' tensors of that name are joined; None: each has the whole one."""
        pieces = self._pieces[name]
        shape = pieces[0].form.shape
        if len(pieces) == 1 or len(shape) < 2:
            return None
        module = name.split(".")[-2] if "." in name else name
        if module == _EMBEDDING:
            return 0 if shape[1] == self._dim() else 1
        if module not in _AXES:
            raise UserError(f"{self.path}: it is not known along which dimension {name} was cut into {len(pieces)}")
        return _AXES[module]

    def _dim(self) -> int:
        dim = read_object(self.path / PARAMETERS).get("dim")
        if type(dim) is not int:
            raise UserError(f"{self.path / PARAMETERS} must say the model's `dim`, a whole number; it says {dim!r}")
        return dim

    def _joined_form(self, name: str) -> TensorForm:
        forms, axis = [piece.form for piece in self._pieces[name]], self._axes[name]
        if any(form.dtype != forms[0].dtype for form in forms):
            raise UserError(f"{self.path}: the files hold {name} in different types")
        rest = [[size for dim, size in enumerate(form.shape) if dim != axis] for form in forms]
        if any(sizes != rest[0] for sizes in rest):
            raise UserError(f"{self.path}: the shapes of {name} in the files do not fit each other")
        shape = list(forms[0].shape)
        if axis is not None:
            shape[axis] = sum(form.shape[axis] for form in forms)
        return TensorForm(torch.Size(shape), forms[0].dtype)


def write_meta(path: Path, forms: Mapping[str, TensorForm], make: MakeTensor) -> None:
    """Write tensors as `consolidated.00.pth` into the folder `path`, holding one at a time.

    `torch.load` opens the file, mapped into memory or not. The checksums in its zip directory are those of a file
    without values, which torch does not look at (other tools for zip files would). It has its name only when all of
    it is written.

    Args:
        path: an existing folder.
        forms: name → form of what is written; values of another dtype are converted.
        make: gives each tensor when its turn comes.

    Raises:
        UserError: where a dtype is too narrow for a value.
        OSError: where the file cannot be written.
    """
    from torchtitan.tools.torch_private import FakeTensorMode

    with FakeTensorMode():
        tensors = {name: torch.empty(form.shape, dtype=form.dtype) for name, form in forms.items()}
    with durable.in_place_of(path / "consolidated.00.pth") as partial:
        try:
            with torch.serialization.skip_data(materialize_fake_tensors=True):
                torch.save(tensors, partial)
        except RuntimeError as error:  # as which torch tells the system's errors
            raise OSError(f"{partial} cannot be written ({str(error).splitlines()[0]}); is the disk full?") from error
        with open(partial, "r+b") as file:
            for name, piece in tensors_in(partial).items():
                file.seek(piece.offset)
                for chunk in value_chunks(name, make(name), piece.form.dtype):
                    file.write(chunk)
                assert file.tell() == piece.offset + piece.form.n_bytes, f"{name} had another shape than its form"
