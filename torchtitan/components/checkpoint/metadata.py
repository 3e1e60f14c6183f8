"""Safe reader of `.metadata`, the index of a torch.distributed.checkpoint (DCP) checkpoint.

DCP's own reader unpickles the file, which can run arbitrary code. This module unpickles it into
plain records, checks them against the files in the folder, and builds DCP's objects from the
checked values. DCP takes a second to import, so import this module inside the functions that use
it.
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
"""Limits that reject small files that repeat a long name or list so often that reading them takes
hours."""

_RECORDS = {
    **dict.fromkeys(
        "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta "
        "TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING".split(),
        ("torch.distributed.checkpoint.metadata",),
    ),
    "_StorageInfo": ("torch.distributed.checkpoint.filesystem",),
    "Size": ("torch",),
    "_get_layout": ("torch.serialization",),
    **dict.fromkeys(("Path", "PosixPath", "WindowsPath"), ("pathlib", "pathlib._local")),
}
"""Class or function in `.metadata` → modules that may define it."""

_OPCODES = (
    pickle.PROTO,
    pickle.FRAME,
    pickle.STOP,
    pickle.MARK,
    pickle.NONE,
    pickle.NEWTRUE,
    pickle.NEWFALSE,
    pickle.BININT,
    pickle.BININT1,
    pickle.BININT2,
    pickle.LONG1,
    pickle.BINUNICODE,
    pickle.SHORT_BINUNICODE,
    pickle.EMPTY_DICT,
    pickle.EMPTY_LIST,
    pickle.EMPTY_TUPLE,
    pickle.APPEND,
    pickle.APPENDS,
    pickle.TUPLE,
    pickle.TUPLE1,
    pickle.TUPLE2,
    pickle.TUPLE3,
    pickle.MEMOIZE,
    pickle.BINPUT,
    pickle.LONG_BINPUT,
    pickle.BINGET,
    pickle.LONG_BINGET,
    pickle.GLOBAL,
    pickle.STACK_GLOBAL,
    pickle.BUILD,
)
"""Pickle opcodes allowed in `.metadata`, except opcodes with extra checks in `_Unpickler`."""


def read_metadata(folder: Folder) -> Metadata:
    """Return the validated metadata of the checkpoint in `folder`. Raise `UserError` if `.metadata`
    cannot be read, contains anything other than DCP's records, or does not match the files."""
    file = f"{folder}/{DCP_METADATA}"
    try:
        sizes = folder.files()
        metadata = _parse_metadata(_Unpickler(folder.read(DCP_METADATA)).load(), sizes)
    except _CodeError as error:
        raise UserError(
            f"{file} refers to {short_error(error)}, which could run code, and is not loaded: it "
            "is damaged or malicious; get the checkpoint from another source"
        ) from error
    except Exception as error:  # untrusted bytes may raise any error
        raise damaged_file_error(file, short_error(error)) from error
    for name, n_bytes in _required_bytes(metadata.storage_data.values()).items():
        if n_bytes > sizes[name]:
            raise damaged_file_error(
                f"{folder}/{name}", f"it has {sizes[name]:,} bytes, but {n_bytes:,} are needed"
            )
    return metadata


class _DamageError(ValueError):
    """Raised if a file differs from DCP's format; the message gives the reason."""


class _CodeError(_DamageError):
    """Raised if a pickle refers to a class or function that is not allowed in `.metadata`; the
    message is its name."""


class _Record:
    """Object in a pickle. Each read creates its own subclasses, so that one pickle cannot affect
    another."""

    state: Any = None

    def __init__(self, *args: Any):
        self.args = args

    def __setstate__(self, state: object) -> None:
        self.state = state


class _Unpickler(pickle._Unpickler):
    """Unpickler restricted to records, dtypes, numbers, text and containers of these. It extends
    the pure Python unpickler, since the C one allocates as much memory as a pickle requests."""

    def __init__(self, content: bytes):
        super().__init__(io.BytesIO(content))
        self._classes = {name: type(name, (_Record,), {}) for name in _RECORDS}

    def find_class(self, module: str, name: str) -> object:
        """Return the record class for a class or function; reject names that are not allowed in
        `.metadata`."""
        if module in _RECORDS.get(name, ()):
            return self._classes[name]
        dtype = vars(torch).get(name) if module == "torch" else None
        if not isinstance(dtype, torch.dtype):
            raise _CodeError(f"{module}.{name}")
        return dtype

    def _load_call(self: Any) -> None:
        require(
            len(self.stack[-1]) <= _MAX_ARGUMENTS, "it contains an object with too many arguments"
        )
        pickle._Unpickler.load_reduce(self)  # type: ignore[attr-defined]

    def _load_item(self: Any) -> None:
        _check_keys([self.stack[-2]])
        pickle._Unpickler.load_setitem(self)  # type: ignore[attr-defined]

    def _load_items(self: Any) -> None:
        _check_keys(self.stack[::2])
        pickle._Unpickler.load_setitems(self)  # type: ignore[attr-defined]

    dispatch = {code[0]: pickle._Unpickler.dispatch[code[0]] for code in _OPCODES}
    # NEWOBJ is handled like a call, since no record defines __new__.
    dispatch |= {pickle.REDUCE[0]: _load_call, pickle.NEWOBJ[0]: _load_call}
    dispatch |= {pickle.SETITEM[0]: _load_item, pickle.SETITEMS[0]: _load_items}


def _check_keys(keys: list[Any]) -> None:
    # Hashing deeply nested tuples would overflow the stack and end the process.
    require(
        all(isinstance(key, str | _Record) for key in keys),
        "it contains a dict with keys that are not names",
    )


def _parse_metadata(root: object, sizes: Mapping[str, int]) -> Metadata:
    """Return the metadata described by `root`; raise an error of any class if `root` is malformed.
    `sizes` maps the files in the folder to their bytes."""
    fields = _get_fields(root, "Metadata")
    locations = {
        _parse_index(index): _parse_location(location, sizes)
        for index, location in fields["storage_data"].items()
    }
    n_chunks = sum(
        len(_get_fields(spec)["chunks"])
        for spec in fields["state_dict_metadata"].values()
        if _is_tensor(spec)
    )
    require(n_chunks <= len(locations), "it has more tensor chunks than locations")
    specs = {
        _parse_text(name): _parse_spec(name, spec, locations)
        for name, spec in fields["state_dict_metadata"].items()
    }
    names = {name: _parse_saved_name(name, fields["planner_data"]) for name in specs}
    return Metadata(specs, planner_data=names, storage_data=locations, storage_meta=StorageMeta())


def _parse_spec(
    name: str, record: object, locations: Mapping[MetadataIndex, StorageInfo]
) -> TensorStorageMetadata | BytesStorageMetadata:
    if not _is_tensor(record):
        require(
            type(record).__name__ == "BytesStorageMetadata", f"{name} is neither a tensor nor text"
        )
        require(MetadataIndex(name) in locations, f"it has no location for {name}")
        return BytesStorageMetadata()
    fields = _get_fields(record)
    dtype, *_ = fields["properties"].state
    require(isinstance(dtype, torch.dtype), f"{name} has no dtype")
    size = _parse_size(fields["size"])
    chunks = [_parse_chunk(name, chunk, size) for chunk in fields["chunks"]]
    require(
        sum(chunk.sizes.numel() for chunk in chunks) == size.numel(),
        f"the chunks of {name} do not cover it",
    )
    for chunk in chunks:
        location = locations.get(MetadataIndex(name, chunk.offsets))
        require(location is not None, f"it has no location for {name}")
        assert location is not None
        require(
            chunk.sizes.numel() * dtype.itemsize <= location.length,
            f"{name} is larger than its part of the file",
        )
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)


def _parse_chunk(name: str, record: object, shape: torch.Size) -> ChunkStorageMetadata:
    fields = _get_fields(record, "ChunkStorageMetadata")
    chunk = ChunkStorageMetadata(_parse_size(fields["offsets"]), _parse_size(fields["sizes"]))
    is_inside = len(chunk.offsets) == len(chunk.sizes) == len(shape) and all(
        offset + size <= end
        for offset, size, end in zip(chunk.offsets, chunk.sizes, shape, strict=True)
    )
    require(is_inside, f"a chunk of {name} is out of bounds")
    return chunk


def _parse_index(record: object) -> MetadataIndex:
    fields = _get_fields(record, "MetadataIndex")
    offset, index = fields.get("offset"), fields.get("index")
    require(index is None or type(index) is int, "it has a non-integer index")
    return MetadataIndex(
        _parse_text(fields["fqn"]), None if offset is None else _parse_size(offset), index
    )


def _parse_location(record: object, sizes: Mapping[str, int]) -> StorageInfo:
    fields = _get_fields(record, "_StorageInfo")
    file, numbers = _parse_text(fields["relative_path"]), (fields["offset"], fields["length"])
    require(
        all(type(number) is int and 0 <= number < 2**63 for number in numbers),
        f"it has no location in {file}",
    )
    require(
        not fields.get("transform_descriptors"),
        f"{file} is compressed or encrypted, which is not supported",
    )
    # This also rejects paths outside the folder.
    require(file in sizes, f"{file} is not in the folder")
    return StorageInfo(file, *numbers)


def _parse_saved_name(key: str, planner_data: Mapping[str, Any]) -> tuple[str, str]:
    path = planner_data[key]
    require(
        isinstance(path, tuple) and len(path) == 2, f"{key} is not an entry of a torchtitan state"
    )
    return _parse_text(path[0]), _parse_text(path[1])


def _is_tensor(record: object) -> bool:
    return type(record).__name__ == "TensorStorageMetadata"


def _get_fields(record: Any, kind: str = "") -> dict[str, Any]:
    name = type(record).__name__
    require(not kind or name == kind, f"it has a {name} instead of a {kind}")
    state = record.state
    require(isinstance(state, dict), f"a {name} has no fields")
    fields: dict[str, object] = state
    return fields


def _parse_size(record: Any) -> torch.Size:
    require(type(record).__name__ == "Size", "it has an invalid size")
    (value,) = record.args
    is_tuple = isinstance(value, tuple) and len(value) <= _MAX_DIMS
    require(
        is_tuple and all(type(number) is int and number >= 0 for number in value),
        "it has an invalid size",
    )
    # Zeros count as one, since PyTorch rejects such sizes too.
    require(math.prod(max(1, number) for number in value) < 2**60, "it has an invalid size")
    return torch.Size(value)


def _parse_text(value: object) -> str:
    require(
        isinstance(value, str) and len(value) <= _MAX_NAME,
        "it has a name that is too long or not text",
    )
    return str(value)


def require(condition: bool, message: str) -> None:
    """Raise `_DamageError` with `message` unless `condition` is true."""
    if not condition:
        raise _DamageError(message)


def _required_bytes(locations: Collection[StorageInfo]) -> dict[str, int]:
    """Return the minimum size of each file, given that no two locations overlap."""
    ends, lengths = Counter[str](), Counter[str]()
    for location in locations:
        ends[location.relative_path] = max(
            ends[location.relative_path], location.offset + location.length
        )
        lengths[location.relative_path] += location.length
    return dict(ends | lengths)


def short_error(error: BaseException) -> str:
    """Return an error's class and message (for this module's errors, only the message) as one short
    line, without nonprintable characters: a malicious file could inject terminal control codes."""
    text = str(error) if isinstance(error, _DamageError) else f"{type(error).__name__}: {error}"
    return "".join(
        character for character in text.partition("\n")[0][:200] if character.isprintable()
    )
