"""Interface to torch.distributed.checkpoint (DCP): save and load states, read and write single
tensors.

Each tensor of a state is a separate entry, so that DCP can shard and reshard it. All other values
share one JSON string, so their structure may differ between saving and loading. DCP takes a second
to import, so import this module inside the functions that use it.
"""

import hashlib
import io
import json
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torchtitan.components.checkpoint.filesystem import AnyFolder, Folder, LocalFolder, folder_at
from torchtitan.components.checkpoint.metadata import read_metadata, require, short_error
from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.checkpoint.state import Entries
from torchtitan.protocols.tensor_source import (
    MakeTensor,
    Slices,
    TensorSource,
    TensorSpec,
    as_type,
    damaged_file_error,
    full_slices,
    slice_shape,
)
from torchtitan.tools.errors import UserError, summarize_names
from torchtitan.tools.torch_private import (
    FsspecReader,
    FsspecWriter,
    PyTorchFileReader,
    StorageInfo,
    set_element,
)

# DCP logs this harmless warning whenever a single process saves or loads.
warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)

_SHOWN_PROBLEMS = 5


# Entries


def encode(name: str, state_dict: Mapping[str, object]) -> Entries:
    """Return the entries of the state `name`: its tensors, and all other values as one JSON string.
    The string's key contains its digest, so that equal strings of several ranks are saved once, and
    different strings (such as optimizer settings of pipeline stages) separately. Raise `TypeError`
    if a value is neither a tensor nor JSON-serializable."""
    tensors = dict(_tensors(state_dict))
    try:
        text = json.dumps({key: value for key, value in state_dict.items() if key not in tensors})
    except TypeError as error:
        raise TypeError(
            f"state {name!r} must be a flat dict of tensors and JSON-serializable values: {error}"
        ) from error
    return {**tensors, f"json-{hashlib.sha256(text.encode()).hexdigest()[:16]}": text}


def decode(entries: Entries, template: Mapping[str, object]) -> dict[str, object]:
    """Return the state dict encoded in `entries`. Lists become tuples for keys that are tuples in
    `template`."""
    state_dict: dict[str, object] = {}
    for key, value in sorted(entries.items()):
        state_dict.update(json.loads(value) if isinstance(value, str) else {key: value})
    return {
        key: tuple(value)
        if isinstance(value, list) and isinstance(template.get(key), tuple)
        else value
        for key, value in state_dict.items()
    }


def rank_key(name: str, rank: int) -> str:
    """Return the key under which the state `name` of one rank is saved."""
    return f"{name}.rank{rank}"


def _tensors(state_dict: Mapping[str, object]) -> list[tuple[str, Tensor]]:
    return [(key, value) for key, value in state_dict.items() if isinstance(value, Tensor)]


# Saving


def save(
    folder: Folder,
    states: Mapping[str, Entries],
    group: dist.ProcessGroup | None,
    write_items: Callable[[str, SavePlan, SavePlanner], list[WriteResult]] | None = None,
) -> None:
    """Write `states` (name → entries) into the empty `folder`; each rank of `group` writes its
    part. `write_items` replaces DCP's own code for writing this rank's plan. Raise the error of the
    first failed rank on every rank."""
    writer = _make_writer(folder)
    writer.write_items = write_items
    _call_dcp(
        lambda: dcp.save(
            dict(states), storage_writer=writer, process_group=group, no_dist=group is None
        )
    )


def write_dcp(path: Path, specs: Mapping[str, TensorSpec], make: MakeTensor) -> None:
    """Write tensors one at a time as the state "model" of a checkpoint. The caller commits it
    (`catalog.commit`). Raise `UserError` if a dtype is too narrow for a value, `OSError` if a file
    cannot be written.

    Args:
        path: an existing folder.
        specs: name → spec to write; tensors of other dtypes are converted.
        make: function that returns a tensor by name, called just before the tensor is written.
    """
    templates = {name: spec.on_meta() for name, spec in specs.items()}
    # One file per tensor, since DCP keeps all tensors of a file in memory until it closes the file.
    writer = _Writer(path, single_file_per_rank=False)
    states, planner = {"model": encode("model", templates)}, _LazyPlanner(specs, make)
    _call_dcp(lambda: dcp.save(states, storage_writer=writer, planner=planner, no_dist=True))


def write_staged(
    folder: Folder, plan: SavePlan, data: Mapping[MetadataIndex, Tensor | bytes]
) -> list[WriteResult]:
    """Write the items of `plan` (one rank's part of a save), with values from `data`, into
    `folder`."""
    return _make_writer(folder).write_data(plan, _StagedPlanner(data)).wait()


def _call_dcp(operation: Callable[[], object]) -> None:
    """Call DCP. Raise the error of the first failed rank instead of DCP's `CheckpointException`."""
    try:
        operation()
    except dcp.CheckpointException as error:
        raise error.failures[min(error.failures)][0] from None


class _Writer(dcp.FileSystemWriter):
    """DCP's file writer, which raises `OSError`s unchanged and can delegate writing to another
    process."""

    write_items: Callable[[str, SavePlan, SavePlanner], list[WriteResult]] | None = None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        if self.write_items:
            future: Future[list[WriteResult]] = Future()
            future.set_result(self.write_items(str(self.path), plan, planner))
            return future
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # torch.save hides the system's error, such as "No space left on device"; raise the
            # original.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


class _RemoteWriter(_Writer, FsspecWriter):
    pass


def _make_writer(folder: Folder) -> _Writer:
    if isinstance(folder, LocalFolder):
        return _Writer(folder.path)
    # No sync: a store has the data once the file is closed, and DCP would sync every disk of this
    # host.
    return _RemoteWriter(str(folder), sync_files=False)


class _StagedPlanner(DefaultSavePlanner):
    def __init__(self, data: Mapping[MetadataIndex, Tensor | bytes]):
        super().__init__()
        self._data = data

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        value = self._data[write_item.index]
        return io.BytesIO(value) if isinstance(value, bytes) else value


class _LazyPlanner(DefaultSavePlanner):
    """Saves meta-device tensors, creating each one when its values are needed."""

    def __init__(self, specs: Mapping[str, TensorSpec], make: MakeTensor):
        super().__init__()
        self._specs = specs
        self._make = make

    def lookup_object(self, index: MetadataIndex) -> object:
        name = str(self.mappings[index.fqn][-1])
        if name not in self._specs:
            return super().lookup_object(index)
        spec, tensor = self._specs[name], self._make(name)
        assert tensor.shape == spec.shape, (
            f"{name} has shape {tensor.shape}, but its spec {spec.shape}"
        )
        return as_type(name, tensor, spec.dtype)


# Loading


def load(
    path: Folder,
    states: Mapping[str, Stateful],
    rank_states: Mapping[str, Stateful],
    saved_rank: int,
    ranks: Ranks,
    *,
    optional: Collection[str] = (),
) -> set[str]:
    """Load the checkpoint in `path` and return the names of the loaded states; states in `optional`
    may be missing.

    Each rank reads its tensor shards of `states` in place; names and shapes must match.
    `rank_states` receive the states of `saved_rank`, whatever their contents. Raise `UserError` on
    every rank if a state is missing, or if the checkpoint does not fit or cannot be read.
    """
    metadata = ranks.broadcast_from_rank0(lambda: read_metadata(path))
    saved = _saved_states(metadata)
    states = {
        name: state for name, state in states.items() if name in saved or name not in optional
    }
    keys = {name: name for name in states} | {
        name: rank_key(name, saved_rank) for name in rank_states
    }
    local = [name for name, key in keys.items() if key not in saved]
    missing = [name for names in ranks.gather(local) for name in names]
    if missing:
        raise UserError(
            f"{path} has no state {missing[0]!r}; to continue without it, add {missing[0]} to "
            "--checkpoint.exclude_from_loading"
        )
    specs = {state: _specs(metadata, entries) for state, entries in saved.items()}
    templates = {name: state.state_dict() for name, state in states.items()}
    _check_tensors(path, templates, specs, ranks)
    request: dict[str, Entries] = {
        name: dict(_tensors(template)) for name, template in templates.items()
    }
    for key in (keys[name] for name in rank_states):
        request[key] = {
            entry: torch.empty(spec.shape, dtype=spec.dtype) for entry, spec in specs[key].items()
        }
    for key, entries in request.items():
        entries |= dict.fromkeys(saved[key].keys() - specs[key].keys(), "")
    try:
        dcp.load(
            request,
            storage_reader=_Reader(path, metadata),
            planner=_TextPlanner(),
            process_group=ranks.group,
            no_dist=ranks.group is None,
        )
    except dcp.CheckpointException as error:
        raise _unreadable_error(path, error.failures[min(error.failures)][0]) from error
    decoded: dict[str, dict[str, object]] = {}

    def decode_all() -> None:
        try:
            decoded.update(
                {name: decode(request[key], templates.get(name, {})) for name, key in keys.items()}
            )
        except (TypeError, ValueError, RecursionError) as error:  # JSON not written by a run
            raise _unreadable_error(path, error) from error

    ranks.all_ranks_or_raise(decode_all)  # rank states differ, so any rank may fail
    for name, state in {**states, **rank_states}.items():
        state.load_state_dict(decoded[name])
    return set(keys)


def _unreadable_error(path: Folder, error: BaseException) -> UserError:
    return UserError(f"{path} cannot be read ({short_error(error)}); load another checkpoint")


def _check_tensors(
    path: Folder,
    templates: Mapping[str, Mapping[str, object]],
    saved: Mapping[str, Mapping[str, TensorSpec]],
    ranks: Ranks,
) -> None:
    """Compare tensor names and shapes before loading. Saved tensors that no rank needs are also an
    error."""
    expected = {
        f"{state}.{entry}": tensor.shape
        for state in templates
        for entry, tensor in _tensors(templates[state])
    }
    stored = {
        f"{state}.{entry}": spec.shape
        for state in templates
        for entry, spec in saved[state].items()
    }
    local = [
        _describe(name, stored.get(name), shape)
        for name, shape in expected.items()
        if stored.get(name) != shape
    ]
    gathered = ranks.gather((local, [name in expected for name in stored]))
    problems = list(
        dict.fromkeys(problem for rank_problems, _ in gathered for problem in rank_problems)
    )
    flags_of_ranks = [flags for _, flags in gathered]
    needed = [any(flags) for flags in zip(*flags_of_ranks, strict=True)]
    problems += [
        _describe(name, stored[name], None)
        for name, keep in zip(stored, needed, strict=True)
        if not keep
    ]
    if problems:
        shown = "".join(f"\n  {problem}" for problem in problems[:_SHOWN_PROBLEMS])
        raise UserError(
            f"{path} does not fit this run; {len(problems)} tensors differ, including{shown}\n"
            "use the model and optimizer settings of the saved run, "
            "or add a state to --checkpoint.exclude_from_loading"
        )


def _describe(name: str, saved: torch.Size | None, current: torch.Size | None) -> str:
    shapes = ["absent" if shape is None else str(list(shape)) for shape in (saved, current)]
    return f"{name}: {shapes[0]} in the checkpoint, {shapes[1]} in this run"


class _Reader(dcp.FileSystemReader):
    """DCP's reader for local and remote folders, which never runs code from the files."""

    def __init__(self, folder: Folder, metadata: Metadata):
        super().__init__(str(folder))
        if not isinstance(folder, LocalFolder):
            remote = FsspecReader(str(folder))
            self.fs, self.path = remote.fs, remote.path
        self.metadata = metadata

    def _slice_file(self, file: object, sinfo: StorageInfo) -> IO[bytes]:
        """Return an entry's slice of a file. Reject records that would unpack to more than its
        length."""
        entry = super()._slice_file(file, sinfo)
        if entry.read(4) == b"PK\3\4":  # the test for a zip file in torch.load
            entry.seek(0)
            records: Any = PyTorchFileReader(entry)
            n_bytes = sum(records.get_record_size(name) for name in records.get_all_records())
            require(n_bytes <= sinfo.length, f"{sinfo.relative_path} has compressed records")
        entry.seek(0)
        return entry

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        return self.metadata


class _TextPlanner(DefaultLoadPlanner):
    """DCP's planner, which rejects entries that are neither tensors nor text."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name, text = read_item.dest_index.fqn, torch.load(value, weights_only=True)
        require(isinstance(text, str), f"{name} is a {type(text).__name__} instead of text")
        set_element(self.original_state_dict, self.mappings[name], text)


# Single tensors


class DcpSource(TensorSource):
    """Tensors of one state of a checkpoint. Raises `UserError` if it cannot be read or has no such
    state."""

    def __init__(self, path: str | Path, state: str = "model"):
        self.path = Path(path)
        self._metadata = read_metadata(LocalFolder(self.path))
        self._reader = _Reader(LocalFolder(self.path), self._metadata)
        states = _saved_states(self._metadata)
        if state not in states:
            raise UserError(
                f"{self.path} has no state {state!r}; its states are "
                f"{summarize_names(sorted(states))}"
            )
        self._keys = states[state]
        self.specs = _specs(self._metadata, self._keys)

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        spec, key = self.specs[name], self._keys[name]
        bounds = slices if slices is not None else full_slices(spec.shape)
        shape = slice_shape(bounds)
        out = torch.empty(shape, dtype=spec.dtype)
        chunk = ChunkStorageMetadata(torch.Size(part.start for part in bounds), torch.Size(shape))
        saved = self._metadata.state_dict_metadata[key]
        assert isinstance(saved, TensorStorageMetadata), "only tensors have a spec"
        items = create_read_items_for_chunk_list(key, saved, [chunk])
        try:
            if slices is None and len(items) == len(saved.chunks) == 1:
                return self._load_whole(items[0], spec)
            self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
            self._reader.read_data(LoadPlan(items), _SliceReader(out)).wait()
        except Exception as error:  # damaged bytes may raise any error
            raise damaged_file_error(self.path, f"{name}: {short_error(error)}") from error
        return out

    def _load_whole(self, item: ReadItem, spec: TensorSpec) -> Tensor:
        """Return a tensor stored as one chunk; DCP's reader would keep two copies in memory."""
        location = self._metadata.storage_data[item.storage_index]
        with open(self.path / location.relative_path, "rb") as file:
            tensor: Tensor = torch.load(
                self._reader._slice_file(file, location), map_location="cpu", weights_only=True
            )
        if TensorSpec.of(tensor) != spec or tensor.is_meta or tensor.layout != torch.strided:
            raise ValueError(f"the tensor in {location.relative_path} does not match .metadata")
        return tensor


class _SliceReader(DefaultLoadPlanner):
    def __init__(self, tensor: Tensor):
        super().__init__()
        self._tensor = tensor

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        part = self._tensor
        for dim, (offset, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            part = part.narrow(dim, offset, length)
        return part


def state_tensor_specs(path: AnyFolder) -> dict[str, dict[str, TensorSpec]]:
    """Return state → tensor → spec without reading tensors. Raise `UserError` if the checkpoint
    cannot be read."""
    metadata = read_metadata(folder_at(path))
    return {
        state: _specs(metadata, keys) for state, keys in sorted(_saved_states(metadata).items())
    }


def optimized_names(path: AnyFolder) -> set[str]:
    """Return the names of parameters with optimizer state. Raise `UserError` if the checkpoint
    cannot be read."""
    keys = state_tensor_specs(path).get("optimizer", {})
    return {
        key.removeprefix("state.").rpartition(".")[0] for key in keys if key.startswith("state.")
    }


def _saved_states(metadata: Metadata) -> dict[str, dict[str, str]]:
    """Return state → entry → key in the checkpoint."""
    states: dict[str, dict[str, str]] = {}
    for key in metadata.state_dict_metadata:
        state, entry = metadata.planner_data[key]
        states.setdefault(state, {})[entry] = key
    return states


def _specs(metadata: Metadata, keys: Mapping[str, str]) -> dict[str, TensorSpec]:
    saved = {entry: metadata.state_dict_metadata[key] for entry, key in keys.items()}
    return {
        entry: TensorSpec(spec.size, spec.properties.dtype)
        for entry, spec in saved.items()
        if isinstance(spec, TensorStorageMetadata)
    }
