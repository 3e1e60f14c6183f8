"""Files written by `torch.save`: Hugging Face's `pytorch_model.bin`, and Meta's `consolidated.00.pth`.

Only tensors are ever created from such a file, and no tensor is read to find its position. Several Meta files are the
shards of tensor parallelism, dicts with the same names. As in Meta's reference code, linear layers are cut along their
outputs or inputs, the embedding along the vocabulary (Llama 3) or the features (Llama 1 and 2), and norms not at all.
"""

import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from torchtitan.components.weights.huggingface import files_of
from torchtitan.protocols.tensor_source import (
    MakeTensor,
    Slices,
    TensorSource,
    TensorSpec,
    damaged_file_error,
    full_slices,
    slice_shape,
    summarize_names,
    value_chunks,
)
from torchtitan.tools import durable
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import read_object, unreadable_file_error
from torchtitan.tools.torch_private import offset_in_file

PICKLED_WEIGHTS = "pytorch_model.bin"
PICKLED_INDEX = "pytorch_model.bin.index.json"
META_FILES = "consolidated.*.pth"
META_PARAMETERS = "params.json"

_AXES = {"wq": 0, "wk": 0, "wv": 0, "w1": 0, "w3": 0, "output": 0, "wo": 1, "w2": 1}
"""Module → dimension along which its weight is cut."""

_EMBEDDING = "tok_embeddings"


@dataclass(frozen=True)
class Piece:
    """Tensor with contiguous values in a file."""

    file: Path
    offset: int
    spec: TensorSpec

    def read(self, slices: Slices) -> Tensor:
        """Return the part in `slices`; reads whole rows."""
        rows, *columns = slices or (slice(0, 1),)
        n_rows, *row_shape = self.spec.shape or (1,)
        values = torch.empty([rows.stop - rows.start, *row_shape], dtype=self.spec.dtype)
        buffer = values.view(-1).view(torch.uint8).numpy().data
        with open(self.file, "rb") as file:
            file.seek(self.offset + rows.start * (self.spec.n_bytes // max(1, n_rows)))
            if file.readinto(buffer) != len(buffer):
                raise damaged_file_error(self.file, "it ends too early")
        return values[(slice(None), *columns)] if slices else values[0]


class PickledSource(TensorSource):
    """Tensors of `pytorch_model.bin`, or of the files in its index. Raises `UserError` if a file is missing, damaged or
    outside the folder `path`, holds anything but tensors, or lacks tensors that the index lists."""

    def __init__(self, path: str | Path):
        self._pieces: dict[str, Piece] = {}
        for file, names in files_of(Path(path), PICKLED_WEIGHTS, PICKLED_INDEX).items():
            pieces = tensors_in(file)
            if missing := [name for name in names or [] if name not in pieces]:
                raise UserError(f"{file} lacks tensors that {PICKLED_INDEX} says are in it: {summarize_names(missing)}")
            self._pieces |= {name: pieces[name] for name in names or pieces}
        self.specs = {name: piece.spec for name, piece in self._pieces.items()}

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        return self._pieces[name].read(slices or full_slices(self.specs[name].shape))


def tensors_in(file: Path) -> dict[str, Piece]:
    """Return the positions of the tensors in a file written by `torch.save`, without reading the tensors: storages
    loaded as fake tensors know their offset in the file ("Serialization semantics" in PyTorch's notes). Raise
    `UserError` if the file is damaged, or holds anything but a dict of tensors."""
    from torchtitan.tools.torch_private import FakeTensorMode

    try:
        _check_stored(file)
        with FakeTensorMode():
            tensors = torch.load(file, weights_only=True)
    except UserError:
        raise
    except pickle.UnpicklingError as error:
        # torch's first line advises loading the file anyway; the second one names the object.
        reason = [line for line in str(error).splitlines() if line.strip()][:2][-1]
        raise unreadable_file_error(
            file,
            f"{file} does not hold tensors alone, and is not loaded, since other objects could run code ({reason}); "
            "use safetensors files",
        ) from error
    except Exception as error:  # there is no end to what damaged bytes lead to
        raise damaged_file_error(file, str(error).split("\n")[0] or type(error).__name__) from error
    is_named = isinstance(tensors, dict) and all(isinstance(name, str) for name in tensors)
    if not is_named or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise UserError(f"{file} is not a file of weights: it must hold a dict of tensors")
    pieces, n_bytes = {}, file.stat().st_size
    for name, tensor in tensors.items():
        is_dense = tensor.layout == torch.strided
        start = offset_in_file(tensor.untyped_storage()) if is_dense else None
        if start is None or not tensor.is_contiguous():
            raise UserError(f"{file}: {name} does not lie in one piece; load the file and torch.save it again")
        piece = Piece(file, start + tensor.storage_offset() * tensor.itemsize, TensorSpec.of(tensor))
        if not 0 <= piece.offset <= n_bytes - piece.spec.n_bytes:
            raise damaged_file_error(file, f"{name} is not inside it")
        pieces[name] = piece
    return pieces


def _check_stored(file: Path) -> None:
    """Refuse compressed records: their tensors have no offset in the file, and could unpack to any size."""
    if not zipfile.is_zipfile(file):
        return
    with zipfile.ZipFile(file) as records:
        if any(record.compress_type != zipfile.ZIP_STORED for record in records.infolist()):
            raise UserError(
                f"{file} has compressed records, which torch.save does not write; load it with torch and save it again"
            )


class MetaSource(TensorSource):
    """Tensors of the `consolidated.*.pth` files in the folder `path`, with the shards joined. Raises `UserError` if a
    file is missing or damaged, or files do not fit each other."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        files = sorted(self.path.glob(META_FILES))
        expected = [self.path / f"consolidated.{index:02d}.pth" for index in range(max(1, len(files)))]
        if files != expected:
            missing = [file.name for file in expected if file not in files]
            raise UserError(
                f"{self.path} is incomplete: there is no {summarize_names(missing)} (there are {len(files)} files)"
            )
        if odd := [file.name for file in files if not file.is_file()]:
            raise UserError(f"{self.path} is incomplete: {summarize_names(odd)} is not a file")
        shards = [tensors_in(file) for file in files]
        for file, shard in zip(files, shards, strict=True):
            if differing := sorted(shards[0].keys() ^ shard.keys()):
                raise UserError(f"{file} and {files[0]} do not hold the same tensors: {summarize_names(differing)}")
        self._pieces = {name: [shard[name] for shard in shards] for name in shards[0]}
        self._axes = {name: self._axis(name) for name in self._pieces}
        self.specs = {name: self._joined_spec(name) for name in self._pieces}

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        """As `TensorSource.read`; also raise `UserError` if replicas of a tensor differ between files."""
        wanted = slices or full_slices(self.specs[name].shape)
        pieces, axis = self._pieces[name], self._axes[name]
        if axis is None:
            return self._read_replicated(name, wanted)
        out = torch.empty(slice_shape(wanted), dtype=self.specs[name].dtype)
        begin = 0
        for piece in pieces:
            size = piece.spec.shape[axis]
            first, last = max(wanted[axis].start, begin), min(wanted[axis].stop, begin + size)
            if first < last:
                part = slice(first - begin, last - begin)
                values = piece.read((*wanted[:axis], part, *wanted[axis + 1 :]))
                out.narrow(axis, first - wanted[axis].start, last - first).copy_(values)
            begin += size
        return out

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding, which a params.json may omit; raises `UserError` if there is no embedding."""
        name = f"{_EMBEDDING}.weight"
        if name not in self.specs or len(self.specs[name].shape) != 2:
            raise UserError(f"{self.path}: there is no matrix {name}, which would say the size of the vocabulary")
        return self.specs[name].shape[0]

    def _read_replicated(self, name: str, slices: Slices) -> Tensor:
        first, *others = self._pieces[name]
        values = first.read(slices)
        for other in others:
            if not torch.equal(values, other.read(slices)):
                raise UserError(f"{name} differs between {first.file} and {other.file}, which must hold the same")
        return values

    def _axis(self, name: str) -> int | None:
        """Return the dimension along which the files' tensors are joined; None: each file has the whole tensor."""
        pieces = self._pieces[name]
        shape = pieces[0].spec.shape
        if len(pieces) == 1 or len(shape) < 2:
            return None
        module = name.split(".")[-2] if "." in name else name
        if module == _EMBEDDING:
            return 0 if shape[1] == self._dim() else 1
        if module not in _AXES:
            raise UserError(f"{self.path}: it is not known along which dimension {name} was cut into {len(pieces)}")
        return _AXES[module]

    def _dim(self) -> int:
        dim = read_object(self.path / META_PARAMETERS).get("dim")
        if type(dim) is not int:
            raise UserError(
                f"{self.path / META_PARAMETERS} must say the model's `dim`, a whole number; it says {dim!r}"
            )
        return dim

    def _joined_spec(self, name: str) -> TensorSpec:
        specs, axis = [piece.spec for piece in self._pieces[name]], self._axes[name]
        if any(spec.dtype != specs[0].dtype for spec in specs):
            raise UserError(f"{self.path}: the files hold {name} in different types")
        rest = [[size for dim, size in enumerate(spec.shape) if dim != axis] for spec in specs]
        if any(sizes != rest[0] for sizes in rest):
            raise UserError(f"{self.path}: the shapes of {name} in the files do not fit each other")
        shape = list(specs[0].shape)
        if axis is not None:
            shape[axis] = sum(spec.shape[axis] for spec in specs)
        return TensorSpec(torch.Size(shape), specs[0].dtype)


def write_meta(path: Path, specs: Mapping[str, TensorSpec], make: MakeTensor) -> None:
    """Write tensors as `consolidated.00.pth` into the folder `path`; arguments as in `write_huggingface`.

    Tensors are held one at a time. `torch.load` opens the file, memory-mapped or not. The checksums in its zip
    directory are of a file without values; torch ignores them, other zip tools would not.

    Raises:
        UserError: if a dtype is too narrow for a value.
        OSError: if the file cannot be written.
    """
    from torchtitan.tools.torch_private import FakeTensorMode

    with FakeTensorMode():
        tensors = {name: torch.empty(spec.shape, dtype=spec.dtype) for name, spec in specs.items()}
    with durable.in_place_of(path / "consolidated.00.pth") as partial:
        try:
            with torch.serialization.skip_data(materialize_fake_tensors=True):
                torch.save(tensors, partial)
        except RuntimeError as error:  # as which torch tells the system's errors
            raise OSError(f"{partial} cannot be written ({str(error).splitlines()[0]}); is the disk full?") from error
        with open(partial, "r+b") as file:
            for name, piece in tensors_in(partial).items():
                file.seek(piece.offset)
                for chunk in value_chunks(name, make(name), piece.spec.dtype):
                    file.write(chunk)
                assert file.tell() == piece.offset + piece.spec.n_bytes, f"{name} had another shape than its spec"
