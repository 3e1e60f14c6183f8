"""Hugging Face checkpoints: safetensors files, and an index if there is more than one.

File format (https://github.com/huggingface/safetensors#format): the length of the header in 8
bytes, little endian; the header, a JSON object of name → dtype, shape and offsets; then the data of
all tensors.
"""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchtitan.components.checkpoint.formats import STEMS
from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.protocols.tensor_source import (
    MakeTensor,
    Slices,
    TensorSource,
    TensorSpec,
    damaged_file_error,
    value_chunks,
)
from torchtitan.tools import durable
from torchtitan.tools.errors import UserError, summarize_names
from torchtitan.tools.files import is_file_name, read_object

if TYPE_CHECKING:
    from safetensors import safe_open

MAX_FILE_BYTES = 5 * 2**30
"""Default maximum size of a file."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class HuggingFaceSource(TensorSource):
    """Tensors of `model.safetensors`, or of the files listed in `model.safetensors.index.json`.
    Raises `UserError` if a file is missing, damaged or outside the folder `path`, or if tensors
    listed in the index are missing. `weights` is another name of the single file; None: the first
    of `STEMS` in the folder."""

    def __init__(self, path: str | Path, weights: str | None = None):
        self._files: dict[str, Path] = {}
        self.specs: dict[str, TensorSpec] = {}
        weights = weights or f"{_stem_in(Path(path))}.safetensors"
        index = f"{weights}.index.json"
        for file, names in files_of(Path(path), weights, index).items():
            with _open(file) as opened:
                for name in listed(file, opened.keys(), names, index):
                    part = opened.get_slice(name)
                    if part.get_dtype() not in _DTYPES:
                        raise UserError(
                            f"{file}: {name} has the unsupported type {part.get_dtype()}"
                        )
                    self.specs[name] = TensorSpec(
                        torch.Size(part.get_shape()), _DTYPES[part.get_dtype()]
                    )
                    self._files[name] = file

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        # Reopened each time, since pages of the memory-mapped file stay resident once read.
        with _open(self._files[name]) as file:
            tensor: Tensor = (
                file.get_tensor(name) if slices is None else file.get_slice(name)[slices]
            )
        return tensor


def _stem_in(folder: Path) -> str:
    return next(
        (stem for stem in STEMS if any(map(Path.is_file, files_named(folder, stem)))),
        "model",
    )


def files_named(folder: Path, stem: str) -> tuple[Path, Path]:
    """Return the paths of the single file with a stem, and of the index of several."""
    return folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"


def files_of(folder: Path, weights: str, index: str) -> dict[Path, list[str] | None]:
    """Return file → names of its tensors in the file `index`; only `weights` → None (all tensors)
    if that file exists. Raise `UserError` if files are missing or outside the folder, or the index
    is damaged."""
    if (folder / weights).is_file():
        return {folder / weights: None}
    if not (folder / index).is_file():
        raise UserError(f"{folder} has neither {weights} nor {index}")
    weight_map = _read_index(folder / index)
    files: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        files.setdefault(file, []).append(name)
    if missing := sorted(file for file in files if not (folder / file).is_file()):
        raise UserError(
            f"{folder} is incomplete: {index} lists missing files: {summarize_names(missing)}; "
            "copy or download them"
        )
    return {folder / file: files[file] for file in sorted(files)}


def listed(
    file: Path, stored: Collection[str], names: list[str] | None, index: str
) -> Collection[str]:
    """Return the `names` of a file's tensors in the file `index`; None: all that are `stored`.
    Raise `UserError` if some are not."""
    known = set(stored)
    if missing := [name for name in names or [] if name not in known]:
        raise UserError(
            f"{file} has no tensors {summarize_names(missing)}, which {index} lists in it"
        )
    return stored if names is None else names


def write_huggingface(
    path: Path,
    specs: Mapping[str, TensorSpec],
    make: MakeTensor,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    ranks: Ranks | None = None,
    stem: str = "model",
) -> None:
    """Write tensors as safetensors files into the existing folder `path`, with one tensor in memory
    at a time. Files are renamed once complete, and the index is written last, so an interrupted
    export cannot be opened. Raise `UserError` if safetensors does not support a dtype, or a dtype
    is too narrow for a value.

    Args:
        specs: name → spec to write; tensors of other dtypes are converted.
        make: returns a tensor by name, called just before the tensor is written.
        max_file_bytes: maximum size of a file, unless a single tensor is larger.
        ranks: processes that call this together and divide the files; None: this process alone.
        stem: beginning of the files' names.
    """
    for name, spec in specs.items():
        if spec.dtype not in _DTYPE_NAMES:
            raise UserError(
                f"{name} has type {spec.dtype}, which safetensors does not support; export another "
                "type"
            )
    assignment = assign_to_files(
        {name: spec.n_bytes for name, spec in specs.items()}, max_file_bytes, stem
    )
    files = {file: {name: specs[name] for name in names} for file, names in assignment.items()}
    ranks = ranks or Ranks()

    def write_share() -> None:
        for file in list(files)[ranks.rank :: ranks.size]:
            write_file(path / file, files[file], make)

    ranks.all_ranks_or_raise(write_share)
    ranks.broadcast_from_rank0(lambda: write_index(path, files, stem))


def write_index(
    path: Path, files: Mapping[str, Mapping[str, TensorSpec]], stem: str = "model"
) -> None:
    """Write the index of `files` (name → contents) into the folder `path`, unless there is only one
    file."""
    if len(files) == 1:
        return
    total = sum(spec.n_bytes for members in files.values() for spec in members.values())
    weight_map = {name: file for file, members in files.items() for name in members}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    durable.write(files_named(path, stem)[1], json.dumps(index, indent=2) + "\n")


def assign_to_files(
    n_bytes: Mapping[str, int], max_file_bytes: int, stem: str = "model"
) -> dict[str, list[str]]:
    """Return file name → names of its tensors, in the order of `n_bytes`."""
    groups: list[list[str]] = [[]]
    total = 0
    for name, size in n_bytes.items():
        if groups[-1] and total + size > max_file_bytes:
            groups.append([])
            total = 0
        groups[-1].append(name)
        total += size
    if len(groups) == 1:
        return {f"{stem}.safetensors": groups[0]}
    return {
        f"{stem}-{i:05d}-of-{len(groups):05d}.safetensors": group
        for i, group in enumerate(groups, start=1)
    }


def write_file(
    path: Path,
    specs: Mapping[str, TensorSpec],
    make: MakeTensor,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write one safetensors file and rename it once complete. `make` is called for wide dtypes
    first; `metadata` extends the header; other arguments are as in `write_huggingface`."""
    # Wide dtypes first, as in the safetensors library, so that all values are aligned.
    names = sorted(specs, key=lambda name: -specs[name].dtype.itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for name in names:
        spec = specs[name]
        begin, end = end, end + spec.n_bytes
        dtype = _DTYPE_NAMES[spec.dtype]
        header[name] = {"dtype": dtype, "shape": list(spec.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    with durable.in_place_of(path) as partial, durable.new_file(partial) as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for name in names:
            for chunk in value_chunks(name, make(name), specs[name].dtype):
                file.write(chunk)
        assert file.tell() == 8 + len(encoded) + end, f"{path}: a tensor does not match its spec"


def _open(path: Path) -> "safe_open":
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise damaged_file_error(path, error) from error


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = read_object(path).get("weight_map")
    except UserError as error:
        raise damaged_file_error(path, error) from error
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) for file in weight_map.values()
    ):
        raise damaged_file_error(path, "it has no valid weight_map")
    if wrong := sorted({repr(file)[:80] for file in weight_map.values() if not is_file_name(file)}):
        raise damaged_file_error(
            path, f"it lists {summarize_names(wrong)}, which cannot be the name of a file"
        )
    # Names are checked, not link targets, since all files in the Hub's cache are links to files
    # outside the folder.
    outside = {
        file for file in weight_map.values() if Path(file).is_absolute() or ".." in Path(file).parts
    }
    if outside:
        raise UserError(
            f"{path} lists files outside its folder: {summarize_names(sorted(outside))}"
        )
    return weight_map
