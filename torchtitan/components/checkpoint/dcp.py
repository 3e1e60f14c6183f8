"""The interface to torch.distributed.checkpoint (DCP): save and load states, read and write single tensors.

The tensors of a state are entries under their own names, so that DCP can shard and reshard them. All other values are
one JSON string, so their structure may differ between the saved state and the loading one. DCP takes a second to
import: import this module inside the functions that use it.
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
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, SavePlanner, WriteItem
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
    summarize_names,
)
from torchtitan.tools.errors import UserError
from torchtitan.tools.torch_private import FsspecReader, FsspecWriter, PyTorchFileReader, StorageInfo, set_element

# DCP gives this warning at each save and load of a single process, although nothing is wrong.
warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)

_SHOWN_PROBLEMS = 5


# Entries


def encode(name: str, state_dict: Mapping[str, Any]) -> Entries:
    """Return the entries of the state `name`: its tensors, and all other values as one JSON string. The key of the
    string contains its digest: equal strings of several ranks are saved once, different ones (such as optimizer
    settings of pipeline stages) separately. Raise `TypeError` if a value is neither a tensor nor JSON-serializable."""
    tensors = dict(_tensors(state_dict))
    try:
        text = json.dumps({key: value for key, value in state_dict.items() if key not in tensors})
    except TypeError as error:
        raise TypeError(f"state {name!r} must be a flat dict of tensors and JSON-ready values: {error}") from error
    return {**tensors, f"json-{hashlib.sha256(text.encode()).hexdigest()[:16]}": text}


def decode(entries: Entries, template: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state dict that `entries` encode, with tuples (absent from JSON) where `template` has tuples."""
    state_dict: dict[str, Any] = {}
    for key, value in sorted(entries.items()):
        state_dict.update(json.loads(value) if isinstance(value, str) else {key: value})
    return {key: tuple(value) if isinstance(template.get(key), tuple) else value for key, value in state_dict.items()}


def rank_key(name: str, rank: int) -> str:
    """Return the name under which the state `name` of `rank` alone is saved."""
    return f"{name}.rank{rank}"


def _tensors(state_dict: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    return [(key, value) for key, value in state_dict.items() if isinstance(value, Tensor)]


# Saving


def save(
    folder: Folder,
    states: Mapping[str, Entries],
    group: dist.ProcessGroup | None,
    write_items: Callable[[str, SavePlan, SavePlanner], list[WriteResult]] | None = None,
) -> None:
    """Write `states`, name → entries, into the empty `folder`, each rank of `group` its part; `write_items` replaces
    DCP's writing of this rank's plan into the path. Raise the error of the first failed rank on every rank."""
    writer = _writer_into(folder)
    writer.write_items = write_items
    _run(lambda: dcp.save(dict(states), storage_writer=writer, process_group=group, no_dist=group is None))


def write_dcp(path: Path, specs: Mapping[str, TensorSpec], make: MakeTensor) -> None:
    """Write tensors one at a time as the state "model" of a checkpoint; the caller commits it (`catalog.commit`).

    Args:
        path: an existing folder.
        specs: name → spec to write; values of another dtype are converted.
        make: returns the tensor of a name, called just before it is written.

    Raises:
        UserError: if a dtype is too narrow for a value.
        OSError: if a file cannot be written.
    """
    templates = {name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for name, spec in specs.items()}
    # One file per tensor: DCP keeps all tensors of a file until it closes the file.
    writer = _Writer(path, single_file_per_rank=False)
    states, planner = {"model": encode("model", templates)}, _LazyPlanner(specs, make)
    _run(lambda: dcp.save(states, storage_writer=writer, planner=planner, no_dist=True))


def write_staged(folder: Folder, plan: SavePlan, data: Mapping[MetadataIndex, Tensor | bytes]) -> list[WriteResult]:
    """Write the items of `plan`, with values from `data`, into `folder`: one rank's part of a save."""
    return _writer_into(folder).write_data(plan, _StagedPlanner(data)).wait()


def _run(operation: Callable[[], object]) -> None:
    """Call DCP; raise the error of the first failed rank instead of DCP's error for all ranks."""
    try:
        operation()
    except dcp.CheckpointException as error:
        raise error.failures[min(error.failures)][0] from None


class _Writer(dcp.FileSystemWriter):
    """DCP's writer, which raises system errors unchanged and can leave the writing to another process."""

    write_items: Callable[[str, SavePlan, SavePlanner], list[WriteResult]] | None = None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        if self.write_items:
            written: Future[list[WriteResult]] = Future()
            written.set_result(self.write_items(str(self.path), plan, planner))
            return written
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # torch.save raises its own error, which hides the system's, such as "No space left on device".
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


class _RemoteWriter(_Writer, FsspecWriter):
    pass


def _writer_into(folder: Folder) -> _Writer:
    if isinstance(folder, LocalFolder):
        return _Writer(folder.path)
    # Not synced: a store has the data once the file is closed, and DCP would sync every disk of this host.
    return _RemoteWriter(str(folder), sync_files=False)


class _StagedPlanner(DefaultSavePlanner):
    def __init__(self, data: Mapping[MetadataIndex, Tensor | bytes]):
        super().__init__()
        self._data = data

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        value = self._data[write_item.index]
        return io.BytesIO(value) if isinstance(value, bytes) else value


class _LazyPlanner(DefaultSavePlanner):
    """Saves meta-device tensors, making each one when its values are needed."""

    def __init__(self, specs: Mapping[str, TensorSpec], make: MakeTensor):
        super().__init__()
        self._to_make = specs
        self._make = make

    def lookup_object(self, index: MetadataIndex) -> Any:
        name = str(self.mappings[index.fqn][-1])
        if name not in self._to_make:
            return super().lookup_object(index)
        spec, tensor = self._to_make[name], self._make(name)
        assert tensor.shape == spec.shape, f"{name} had another shape than its spec"
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
    """Load the checkpoint in `path` into `states`, which must fit it, and `rank_states`, which accept any content;
    return the names of the loaded states, all except `optional` ones that the checkpoint lacks.

    Each rank reads its shards of the tensors of `states` in place; `rank_states` get the states of `saved_rank`. Raise
    `UserError` on every rank if the checkpoint lacks a state, does not fit or cannot be read.
    """
    metadata = ranks.broadcast_from_rank0(lambda: read_metadata(path))
    saved = _saved_states(metadata)
    states = {name: state for name, state in states.items() if name in saved or name not in optional}
    keys = {name: name for name in states} | {name: rank_key(name, saved_rank) for name in rank_states}
    lacking = [name for of_rank in ranks.gather([name for name in keys if keys[name] not in saved]) for name in of_rank]
    if lacking:
        excluded = f"to go on without, list {lacking[0]} in checkpoint.exclude_from_loading"
        raise UserError(f"{path} was saved without a state {lacking[0]!r}; {excluded}")
    specs = {state: _specs(metadata, entries) for state, entries in saved.items()}
    templates = {name: state.state_dict() for name, state in states.items()}
    _check_tensors(path, templates, specs, ranks)
    request: dict[str, Entries] = {name: dict(_tensors(template)) for name, template in templates.items()}
    for key in (keys[name] for name in rank_states):
        request[key] = {entry: torch.empty(spec.shape, dtype=spec.dtype) for entry, spec in specs[key].items()}
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
        raise _unreadable(path, error.failures[min(error.failures)][0]) from error
    decoded: dict[str, dict[str, Any]] = {}

    def decode_all() -> None:
        try:
            decoded.update({name: decode(request[key], templates.get(name, {})) for name, key in keys.items()})
        except (TypeError, ValueError, RecursionError) as error:  # of JSON that no run has written
            raise _unreadable(path, error) from error

    ranks.all_ranks_or_raise(decode_all)  # each has a state of its own
    for name, state in {**states, **rank_states}.items():
        state.load_state_dict(decoded[name])
    return set(keys)


def _unreadable(path: Folder, error: BaseException) -> UserError:
    return UserError(f"{path} cannot be read ({short_error(error)}); load another checkpoint")


def _check_tensors(
    path: Folder,
    templates: Mapping[str, Mapping[str, Any]],
    saved: Mapping[str, Mapping[str, TensorSpec]],
    ranks: Ranks,
) -> None:
    """Compare names and shapes of the tensors before loading any; a tensor that no rank has is surplus."""
    wanted = {f"{state}.{entry}": tensor.shape for state in templates for entry, tensor in _tensors(templates[state])}
    stored = {f"{state}.{entry}": spec.shape for state in templates for entry, spec in saved[state].items()}
    problems = [_problem(name, stored.get(name), size) for name, size in wanted.items() if stored.get(name) != size]
    of_ranks = ranks.gather((problems, [name in wanted for name in stored]))
    problems = list(dict.fromkeys(problem for rank_problems, _ in of_ranks for problem in rank_problems))
    held = [any(held_by_rank) for held_by_rank in zip(*(rank_held for _, rank_held in of_ranks), strict=True)]
    problems += [_problem(name, stored[name], None) for name, is_held in zip(stored, held, strict=True) if not is_held]
    if problems:
        shown = "".join(f"\n  {problem}" for problem in problems[:_SHOWN_PROBLEMS])
        raise UserError(
            f"{path} does not fit this run; tensors that differ: {len(problems)}, among them{shown}\n"
            "use the settings of model and optimizer that it was saved with, "
            "or list a state to leave out in checkpoint.exclude_from_loading"
        )


def _problem(name: str, saved: torch.Size | None, here: torch.Size | None) -> str:
    sizes = ["absent" if size is None else str(list(size)) for size in (saved, here)]
    return f"{name}: {sizes[0]} in the checkpoint, {sizes[1]} in this run"


class _Reader(dcp.FileSystemReader):
    """DCP's reader for a local or remote folder, which never runs code from the files."""

    def __init__(self, folder: Folder, metadata: Metadata):
        super().__init__(str(folder))
        if not isinstance(folder, LocalFolder):
            remote = FsspecReader(str(folder))
            self.fs, self.path = remote.fs, remote.path
        self.metadata = metadata

    def _slice_file(self, file: Any, sinfo: StorageInfo) -> IO[bytes]:
        """Return an entry's part of a file; refuse records that would unpack to more than its length."""
        entry = super()._slice_file(file, sinfo)
        if entry.read(4) == b"PK\3\4":  # as torch.load tells a zip file
            entry.seek(0)
            records: Any = PyTorchFileReader(entry)
            n_bytes = sum(records.get_record_size(name) for name in records.get_all_records())
            require(n_bytes <= sinfo.length, f"{sinfo.relative_path} has compressed records")
        entry.seek(0)
        return entry

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata


class _TextPlanner(DefaultLoadPlanner):
    """DCP's planner, restricted to text in entries that are not tensors."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name, text = read_item.dest_index.fqn, torch.load(value, weights_only=True)
        require(isinstance(text, str), f"{name} holds a {type(text).__name__} instead of text")
        set_element(self.original_state_dict, self.mappings[name], text)


# Tensor by tensor


class DcpSource(TensorSource):
    """The tensors of one state of a checkpoint; raises `UserError` if it cannot be read or has no such state."""

    def __init__(self, path: str | Path, state: str = "model"):
        self.path = Path(path)
        self._metadata = read_metadata(LocalFolder(self.path))
        self._reader = _Reader(LocalFolder(self.path), self._metadata)
        states = _saved_states(self._metadata)
        if state not in states:
            raise UserError(
                f"{self.path} was saved without a state {state!r}; it has {summarize_names(sorted(states))}"
            )
        self._keys = states[state]
        self.specs = _specs(self._metadata, self._keys)

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        spec, key = self.specs[name], self._keys[name]
        wanted = slices if slices is not None else full_slices(spec.shape)
        shape = slice_shape(wanted)
        out = torch.empty(shape, dtype=spec.dtype)
        chunk = ChunkStorageMetadata(torch.Size(part.start for part in wanted), torch.Size(shape))
        saved = self._metadata.state_dict_metadata[key]
        assert isinstance(saved, TensorStorageMetadata), "a spec is a tensor's"
        items = create_read_items_for_chunk_list(key, saved, [chunk])
        try:
            if slices is None and len(items) == len(saved.chunks) == 1:
                return self._load(items[0], spec)
            self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
            self._reader.read_data(LoadPlan(items), _ReadInto(out)).wait()
        except Exception as error:  # there is no end to what damaged bytes lead to
            raise damaged_file_error(self.path, f"{name}: {short_error(error)}") from error
        return out

    def _load(self, item: ReadItem, spec: TensorSpec) -> Tensor:
        """Return a tensor stored in one piece; DCP's reader would hold it twice."""
        place = self._metadata.storage_data[item.storage_index]
        with open(self.path / place.relative_path, "rb") as file:
            tensor: Tensor = torch.load(self._reader._slice_file(file, place), map_location="cpu", weights_only=True)
        if TensorSpec.of(tensor) != spec or tensor.is_meta or tensor.layout != torch.strided:
            raise ValueError(f"{place.relative_path} holds another tensor than .metadata says")
        return tensor


class _ReadInto(DefaultLoadPlanner):
    def __init__(self, tensor: Tensor):
        super().__init__()
        self._tensor = tensor

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        part = self._tensor
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(dim, offset, length)
        return part


def state_tensor_specs(path: AnyFolder) -> dict[str, dict[str, TensorSpec]]:
    """Return state → tensor → spec, without reading tensors; raise `UserError` if the checkpoint cannot be read."""
    metadata = read_metadata(folder_at(path))
    return {state: _specs(metadata, keys) for state, keys in sorted(_saved_states(metadata).items())}


def optimized_names(path: AnyFolder) -> set[str]:
    """Return the parameters with optimizer state in the checkpoint; raise `UserError` as `state_tensor_specs` does."""
    keys = state_tensor_specs(path).get("optimizer", {})
    return {key.removeprefix("state.").rpartition(".")[0] for key in keys if key.startswith("state.")}


def _saved_states(metadata: Metadata) -> dict[str, dict[str, str]]:
    """Return state → entry → key under which it was saved."""
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
