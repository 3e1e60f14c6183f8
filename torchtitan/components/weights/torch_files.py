"""Files written by `torch.save`: Hugging Face's `pytorch_model.bin`, and Meta's
`consolidated.00.pth` (of torchtune: `model-00001-of-00001.bin` and others).

Only tensors are loaded from these files, and they are located without reading their values.
Multiple Meta files are tensor-parallel shards, dicts with the same names. As in Meta's reference
code, linear layers are sharded along their outputs or inputs, the embedding along the vocabulary
(Llama 3) or the features (Llama 1 and 2); norms are replicated.
"""

import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from torchtitan.components.checkpoint.formats import META_FILES, META_PARAMETERS, PICKLED
from torchtitan.components.checkpoint.torchtune_files import weights_in
from torchtitan.components.weights.huggingface import files_of, listed
from torchtitan.protocols.tensor_source import (
    MakeTensor,
    Slices,
    TensorSource,
    TensorSpec,
    damaged_file_error,
    full_slices,
    slice_shape,
    value_chunks,
)
from torchtitan.tools import durable
from torchtitan.tools.errors import UserError, summarize_names
from torchtitan.tools.files import read_object, unreadable_file_error
from torchtitan.tools.torch_private import offset_in_file

_AXES = {"wq": 0, "wk": 0, "wv": 0, "w1": 0, "w3": 0, "output": 0, "wo": 1, "w2": 1}
"""Module → dimension along which its weight is sharded."""

_EMBEDDING = "tok_embeddings"


@dataclass(frozen=True)
class TensorLocation:
    """Location of a contiguous tensor in a file."""

    file: Path
    offset: int
    spec: TensorSpec

    def read(self, slices: Slices) -> Tensor:
        """Return the part of the tensor in `slices`. Whole rows are read."""
        rows, *columns = slices or (slice(0, 1),)
        n_rows, *row_shape = self.spec.shape or (1,)
        values = torch.empty([rows.stop - rows.start, *row_shape], dtype=self.spec.dtype)
        buffer = values.view(-1).view(torch.uint8).numpy().data
        with open(self.file, "rb") as file:
            file.seek(self.offset + rows.start * (self.spec.n_bytes // max(1, n_rows)))
            if file.readinto(buffer) != len(buffer):
                raise damaged_file_error(self.file, "the file is too short")
        return values[(slice(None), *columns)] if slices else values[0]


class PickledSource(TensorSource):
    """Tensors of `pytorch_model.bin`, or of the files in its index. Raises `UserError` if a file is
    missing, damaged or outside the folder `path`, holds other objects, or does not have all tensors
    listed in the index. `weights` is another name of the single file."""

    def __init__(self, path: str | Path, weights: str = PICKLED[0]):
        self._locations: dict[str, TensorLocation] = {}
        index = f"{weights}.index.json"
        for file, names in files_of(Path(path), weights, index).items():
            locations = locate_tensors(file)
            self._locations |= {
                name: locations[name] for name in listed(file, locations, names, index)
            }
        self.specs = {name: location.spec for name, location in self._locations.items()}

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        return self._locations[name].read(slices or full_slices(self.specs[name].shape))


def locate_tensors(file: Path) -> dict[str, TensorLocation]:
    """Locate the tensors in a file written by `torch.save` without reading them. Storages loaded as
    fake tensors record their offset in the file (PyTorch notes, "Serialization semantics"). Raise
    `UserError` if the file is damaged, or is not a dict of tensors."""
    from torchtitan.tools.torch_private import FakeTensorMode

    try:
        _check_uncompressed(file)
        with FakeTensorMode():
            tensors = torch.load(file, weights_only=True)
    except UserError:
        raise
    except pickle.UnpicklingError as error:
        # The first line of PyTorch's message advises loading the file anyway; the second names the
        # object.
        reason = [line for line in str(error).splitlines() if line.strip()][:2][-1]
        raise unreadable_file_error(
            file,
            f"{file} contains objects other than tensors, which could run code, and is not loaded "
            f"({reason}); use safetensors files",
        ) from error
    except Exception as error:  # damaged bytes may raise any error
        reason = str(error).split("\n")[0] or type(error).__name__
        raise damaged_file_error(file, reason) from error
    is_named = isinstance(tensors, dict) and all(isinstance(name, str) for name in tensors)
    if not is_named or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise UserError(f"{file} is not a weights file: it must contain a dict of tensors")
    locations, n_bytes = {}, file.stat().st_size
    for name, tensor in tensors.items():
        is_dense = tensor.layout == torch.strided
        start = offset_in_file(tensor.untyped_storage()) if is_dense else None
        if start is None or not tensor.is_contiguous():
            raise UserError(
                f"{file}: {name} is not contiguous; load the file with PyTorch and save it again"
            )
        location = TensorLocation(
            file, start + tensor.storage_offset() * tensor.itemsize, TensorSpec.of(tensor)
        )
        if not 0 <= location.offset <= n_bytes - location.spec.n_bytes:
            raise damaged_file_error(file, f"{name} is outside the file")
        locations[name] = location
    return locations


def _check_uncompressed(file: Path) -> None:
    """Reject compressed records: their tensors have no offset in the file, and may unpack to any
    size."""
    if not zipfile.is_zipfile(file):
        return
    with zipfile.ZipFile(file) as records:
        if any(record.compress_type != zipfile.ZIP_STORED for record in records.infolist()):
            raise UserError(
                f"{file} has compressed records, unlike files of torch.save; load it with PyTorch "
                "and save it again"
            )


class MetaSource(TensorSource):
    """Tensors of the `consolidated.*.pth` files in the folder `path`, with shards joined. Raises
    `UserError` if a file is missing or damaged, or files are inconsistent."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        files = meta_files(self.path)
        expected = [
            self.path / f"consolidated.{index:02d}.pth" for index in range(max(1, len(files)))
        ]
        is_of_torchtune = bool(files) and not files[0].match(META_FILES)
        if is_of_torchtune and (len(files) > 1 or files[0].suffix == ".safetensors"):
            raise UserError(
                f"{self.path}: weights with {META_PARAMETERS} are in one .bin or .pt file, not "
                f"{summarize_names([file.name for file in files])}; with a config.json, they are "
                "read as a Hugging Face model"
            )
        if files != expected and not is_of_torchtune:
            missing = [file.name for file in expected if file not in files]
            raise UserError(
                f"{self.path} is incomplete: {summarize_names(missing)} is missing (it has "
                f"{len(files)} files)"
            )
        if invalid := [file.name for file in files if not file.is_file()]:
            raise UserError(f"{self.path} is incomplete: {summarize_names(invalid)} is not a file")
        shards = [locate_tensors(file) for file in files]
        for file, shard in zip(files, shards, strict=True):
            if differing := sorted(shards[0].keys() ^ shard.keys()):
                raise UserError(
                    f"{file} and {files[0]} contain different tensors: {summarize_names(differing)}"
                )
        self._locations = {name: [shard[name] for shard in shards] for name in shards[0]}
        self._axes = {name: self._find_axis(name) for name in self._locations}
        self.specs = {name: self._join_specs(name) for name in self._locations}

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        """Like `TensorSource.read`; also raise `UserError` if replicas of a tensor differ between
        files."""
        bounds = slices or full_slices(self.specs[name].shape)
        locations, axis = self._locations[name], self._axes[name]
        if axis is None:
            return self._read_replicated(name, bounds)
        out = torch.empty(slice_shape(bounds), dtype=self.specs[name].dtype)
        begin = 0
        for location in locations:
            size = location.spec.shape[axis]
            first, last = max(bounds[axis].start, begin), min(bounds[axis].stop, begin + size)
            if first < last:
                part = slice(first - begin, last - begin)
                values = location.read((*bounds[:axis], part, *bounds[axis + 1 :]))
                out.narrow(axis, first - bounds[axis].start, last - first).copy_(values)
            begin += size
        return out

    @property
    def vocab_size(self) -> int:
        """Number of rows of the embedding, since params.json may omit it. Raises `UserError`
        without an embedding."""
        name = f"{_EMBEDDING}.weight"
        if name not in self.specs or len(self.specs[name].shape) != 2:
            raise UserError(
                f"{self.path}: unknown vocabulary size, since the matrix {name} is missing"
            )
        return self.specs[name].shape[0]

    def _read_replicated(self, name: str, slices: Slices) -> Tensor:
        first, *others = self._locations[name]
        values = first.read(slices)
        for other in others:
            if not torch.equal(values, other.read(slices)):
                raise UserError(
                    f"{name} must be the same in {first.file} and {other.file}, but differs"
                )
        return values

    def _find_axis(self, name: str) -> int | None:
        """Return the dimension along which the tensor is sharded; None if it is replicated."""
        locations = self._locations[name]
        shape = locations[0].spec.shape
        if len(locations) == 1 or len(shape) < 2:
            return None
        module = name.split(".")[-2] if "." in name else name
        if module == _EMBEDDING:
            dim = read_object(self.path / META_PARAMETERS).get("dim")
            if type(dim) is not int:
                raise UserError(
                    f"{self.path / META_PARAMETERS}: dim must be an integer, not {dim!r}"
                )
            return 0 if shape[1] == dim else 1
        if module not in _AXES:
            raise UserError(
                f"{self.path}: the sharded dimension of {name} ({len(locations)} shards) is unknown"
            )
        return _AXES[module]

    def _join_specs(self, name: str) -> TensorSpec:
        specs, axis = [location.spec for location in self._locations[name]], self._axes[name]
        if any(spec.dtype != specs[0].dtype for spec in specs):
            raise UserError(f"{self.path}: {name} has different types in different files")
        other_sizes = [
            [size for dim, size in enumerate(spec.shape) if dim != axis] for spec in specs
        ]
        if any(sizes != other_sizes[0] for sizes in other_sizes):
            raise UserError(f"{self.path}: the shapes of {name} in the files are inconsistent")
        shape = list(specs[0].shape)
        if axis is not None:
            shape[axis] = sum(spec.shape[axis] for spec in specs)
        return TensorSpec(torch.Size(shape), specs[0].dtype)


def meta_files(folder: Path) -> list[Path]:
    """Return the files of weights with Meta's names in a folder, in order; without such files,
    torchtune's. Raise `UserError` if torchtune's files are of several models or incomplete."""
    return sorted(folder.glob(META_FILES)) or weights_in(folder)


def write_meta(path: Path, specs: Mapping[str, TensorSpec], make: MakeTensor) -> None:
    """Write tensors as `consolidated.00.pth` into the folder `path`; arguments are as in
    `write_huggingface`.

    One tensor is in memory at a time. `torch.load` opens the file, memory-mapped or not. The
    checksums in its zip directory do not match the values; PyTorch ignores them, but other zip
    tools do not. Raise `UserError` if a dtype is too narrow for a value, `OSError` if the file
    cannot be written."""
    from torchtitan.tools.torch_private import FakeTensorMode

    with FakeTensorMode():
        tensors = {name: torch.empty(spec.shape, dtype=spec.dtype) for name, spec in specs.items()}
    with durable.in_place_of(path / "consolidated.00.pth") as partial:
        try:
            with torch.serialization.skip_data(materialize_fake_tensors=True):
                torch.save(tensors, partial)
        except RuntimeError as error:  # torch.save's class for system errors
            raise OSError(
                f"{partial} cannot be written ({str(error).splitlines()[0]}); is the disk full?"
            ) from error
        with open(partial, "r+b") as file:
            for name, location in locate_tensors(partial).items():
                file.seek(location.offset)
                for chunk in value_chunks(name, make(name), location.spec.dtype):
                    file.write(chunk)
                assert file.tell() == location.offset + location.spec.n_bytes, (
                    f"{name} does not match its spec"
                )
