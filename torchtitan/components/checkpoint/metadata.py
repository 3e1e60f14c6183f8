"""Safe reader of `.metadata`, the index of a torch.distributed.checkpoint (DCP) checkpoint from any source.

DCP's own reader unpickles it, and a pickle can run any code. This module turns the pickle into records without code,
checks them against the files in the folder, and builds DCP's objects from the checked values. DCP takes a second to
import: import this module inside the functions that use it.
"""

import io
import math
import pickle
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from torchtitan.components.checkpoint.filesystem import DCP_METADATA, Folder
from torchtitan.protocols.tensor_source import damaged_file_error
from torchtitan.tools.errors import UserError
from torchtitan.tools.torch_private import StorageInfo

_MAX_DIMS = 64
"""Largest number of dimensions of a PyTorch tensor."""

_MAX_NAME = 4096
_MAX_ARGUMENTS = 1024
"""Limits against small files that take hours, by repeating one long name or list any number of times."""

_RECORDS = {
    **dict.fromkeys(
        "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorProperties "
        "TensorStorageMetadata _MEM_FORMAT_ENCODING".split(),
        ("torch.distributed.checkpoint.metadata",),
    ),
    "_StorageInfo": ("torch.distributed.checkpoint.filesystem",),
    "Size": ("torch",),
    "_get_layout": ("torch.serialization",),
    **dict.fromkeys(("Path", "PosixPath", "WindowsPath"), ("pathlib", "pathlib._local")),
}
"""Class or function in a `.metadata` → modules that may define it."""

_OPCODES = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE),
    *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINUNICODE, pickle.SHORT_BINUNICODE),
    *(pickle.EMPTY_DICT, pickle.EMPTY_LIST, pickle.EMPTY_TUPLE, pickle.APPEND, pickle.APPENDS),
    *(pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT),
    *(pickle.BINGET, pickle.LONG_BINGET, pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.BUILD),
)
"""Instructions of a `.metadata`, except the ones that are checked first."""


def read_metadata(folder: Folder) -> Metadata:
    """Return the checked metadata of the checkpoint in `folder`. Raise `UserError` if `.metadata` cannot be read,
    contains anything but DCP's records, or does not fit the files."""
    file = f"{folder}/{DCP_METADATA}"
    try:
        sizes = folder.files()
        metadata = _checked(_Unpickler(folder.read(DCP_METADATA)).load(), sizes)
    except _CodeError as error:
        raise UserError(
            f"{file} names {short_error(error)}, which could run code, and is not loaded: it is damaged or made to do "
            "harm; take the checkpoint from another source"
        ) from error
    except Exception as error:  # the bytes are anybody's, and there is no end to what they lead to
        raise damaged_file_error(file, short_error(error)) from error
    for name, n_bytes in _needed(metadata.storage_data.values()).items():
        if n_bytes > sizes[name]:
            raise damaged_file_error(f"{folder}/{name}", f"it has {sizes[name]:,} bytes, and {n_bytes:,} are needed")
    return metadata


class _DamageError(ValueError):
    """A file is not as DCP writes it; the message says why."""


class _CodeError(_DamageError):
    """A pickle names a class or function that no `.metadata` has; the message is the name."""


class _Record:
    """Object described by a pickle; each read makes subclasses, so that no pickle changes another's."""

    state: Any = None

    def __init__(self, *args: Any):
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle._Unpickler):
    """Makes records, types, numbers, text and containers of these. It extends the pure Python unpickler, since the C
    one allocates any amount of memory that a pickle names."""

    def __init__(self, content: bytes):
        super().__init__(io.BytesIO(content))
        self._classes = {name: type(name, (_Record,), {}) for name in _RECORDS}

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a class or function; refuse all that no `.metadata` has."""
        if module in _RECORDS.get(name, ()):
            return self._classes[name]
        dtype = vars(torch).get(name) if module == "torch" else None
        if not isinstance(dtype, torch.dtype):
            raise _CodeError(f"{module}.{name}")
        return dtype

    def _load_call(self: Any) -> None:
        require(len(self.stack[-1]) <= _MAX_ARGUMENTS, "it has an object with too many arguments")
        pickle._Unpickler.load_reduce(self)  # type: ignore[attr-defined]

    def _load_item(self: Any) -> None:
        _check_keys([self.stack[-2]])
        pickle._Unpickler.load_setitem(self)  # type: ignore[attr-defined]

    def _load_items(self: Any) -> None:
        _check_keys(self.stack[::2])
        pickle._Unpickler.load_setitems(self)  # type: ignore[attr-defined]

    dispatch = {code[0]: pickle._Unpickler.dispatch[code[0]] for code in _OPCODES}
    # NEWOBJ can be handled like a call, since no record defines __new__.
    dispatch |= {pickle.REDUCE[0]: _load_call, pickle.NEWOBJ[0]: _load_call}
    dispatch |= {pickle.SETITEM[0]: _load_item, pickle.SETITEMS[0]: _load_items}


def _check_keys(keys: list[Any]) -> None:
    # Hashing deeply nested tuples would overflow the stack and end the process.
    require(all(isinstance(key, str | _Record) for key in keys), "it has a dict with keys that are not names")


def _checked(root: Any, sizes: Mapping[str, int]) -> Metadata:
    """Return the metadata that `root` describes; raise an error of any class if it is not as DCP writes it. `sizes`
    maps the files in the folder to their bytes."""
    fields = _fields(root, "Metadata")
    places = {_index(index): _place(place, sizes) for index, place in fields["storage_data"].items()}
    n_chunks = sum(len(_fields(spec)["chunks"]) for spec in fields["state_dict_metadata"].values() if _is_tensor(spec))
    require(n_chunks <= len(places), "it has more pieces of tensors than places for them")
    specs = {_text(name): _spec(name, spec, places) for name, spec in fields["state_dict_metadata"].items()}
    names = {name: _saved_name(name, fields["planner_data"]) for name in specs}
    return Metadata(specs, planner_data=names, storage_data=places, storage_meta=StorageMeta())


def _spec(
    name: str, record: Any, places: Mapping[MetadataIndex, StorageInfo]
) -> TensorStorageMetadata | BytesStorageMetadata:
    if not _is_tensor(record):
        require(type(record).__name__ == "BytesStorageMetadata", f"{name} is neither tensor nor text")
        require(MetadataIndex(name) in places, f"it does not say where {name} is")
        return BytesStorageMetadata()
    fields = _fields(record)
    dtype, *_ = fields["properties"].state
    require(isinstance(dtype, torch.dtype), f"{name} has no type")
    size = _size(fields["size"])
    chunks = [_chunk(name, chunk, size) for chunk in fields["chunks"]]
    require(sum(chunk.sizes.numel() for chunk in chunks) == size.numel(), f"the pieces of {name} are not all of it")
    for chunk in chunks:
        place = places.get(MetadataIndex(name, chunk.offsets))
        require(place is not None, f"it does not say where {name} is")
        assert place is not None
        require(chunk.sizes.numel() * dtype.itemsize <= place.length, f"{name} is larger than its place in the file")
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)


def _chunk(name: str, record: Any, whole: torch.Size) -> ChunkStorageMetadata:
    fields = _fields(record, "ChunkStorageMetadata")
    chunk = ChunkStorageMetadata(_size(fields["offsets"]), _size(fields["sizes"]))
    inside = len(chunk.offsets) == len(chunk.sizes) == len(whole) and all(
        offset + size <= end for offset, size, end in zip(chunk.offsets, chunk.sizes, whole, strict=True)
    )
    require(inside, f"a piece of {name} lies outside of it")
    return chunk


def _index(record: Any) -> MetadataIndex:
    fields = _fields(record, "MetadataIndex")
    offset, index = fields.get("offset"), fields.get("index")
    require(index is None or type(index) is int, "it has an index that is not a number")
    return MetadataIndex(_text(fields["fqn"]), None if offset is None else _size(offset), index)


def _place(record: Any, sizes: Mapping[str, int]) -> StorageInfo:
    fields = _fields(record, "_StorageInfo")
    file, numbers = _text(fields["relative_path"]), (fields["offset"], fields["length"])
    require(all(type(number) is int and 0 <= number < 2**63 for number in numbers), f"it has no place in {file}")
    require(not fields.get("transform_descriptors"), f"{file} is compressed or encrypted, which is not supported")
    # Also refuses names that lead out of the folder.
    require(file in sizes, f"{file} is not in the folder")
    return StorageInfo(file, *numbers)


def _saved_name(key: str, planner_data: Mapping[str, Any]) -> tuple[str, str]:
    path = planner_data[key]
    require(isinstance(path, tuple) and len(path) == 2, f"{key} is not the entry of a state of a run here")
    return _text(path[0]), _text(path[1])


def _is_tensor(record: Any) -> bool:
    return type(record).__name__ == "TensorStorageMetadata"


def _fields(record: Any, kind: str = "") -> dict[str, Any]:
    found = type(record).__name__
    require(not kind or found == kind, f"it has a {found} in place of a {kind}")
    state = record.state
    require(isinstance(state, dict), f"a {found} has no fields")
    fields: dict[str, Any] = state
    return fields


def _size(record: Any) -> torch.Size:
    require(type(record).__name__ == "Size", "it has a size that is none")
    (value,) = record.args
    fits = isinstance(value, tuple) and len(value) <= _MAX_DIMS
    require(fits and all(type(number) is int and number >= 0 for number in value), "it has an impossible size")
    # Zeros, which would make the product zero, count as one: PyTorch refuses such a size too.
    require(math.prod(max(1, number) for number in value) < 2**60, "it has an impossible size")
    return torch.Size(value)


def _text(value: Any) -> str:
    require(isinstance(value, str) and len(value) <= _MAX_NAME, "it has a name that is not text, or endless")
    return str(value)


def require(is_met: bool, otherwise: str) -> None:
    """Raise `_DamageError` with the message `otherwise` unless `is_met`."""
    if not is_met:
        raise _DamageError(otherwise)


def _needed(places: Collection[StorageInfo]) -> dict[str, int]:
    """Return the minimum bytes of each file, given that no two places in a file overlap."""
    ends, lengths = Counter[str](), Counter[str]()
    for place in places:
        ends[place.relative_path] = max(ends[place.relative_path], place.offset + place.length)
        lengths[place.relative_path] += place.length
    return dict(ends | lengths)


def short_error(error: BaseException) -> str:
    """Return an error's class and message (for this module's errors only the message) as one short line. Nonprintable
    characters are removed: a hostile file could put terminal control codes there."""
    text = str(error) if isinstance(error, _DamageError) else f"{type(error).__name__}: {error}"
    return "".join(character for character in text.partition("\n")[0][:200] if character.isprintable())
