"""Checkpoints of torch.distributed.checkpoint (DCP), as a run saves them, read and written one tensor at a time.

DCP takes a second to import: import this module where it is used, not at the top of another.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from torchtitan.components.checkpoint import storage, writing
from torchtitan.components.checkpoint.formats.source import (
    MakeTensor,
    Slices,
    TensorSource,
    as_type,
    damaged,
    slice_shape,
    some,
    whole,
)
from torchtitan.components.checkpoint.reading import Reader, in_words, read_metadata
from torchtitan.components.checkpoint.store import LocalFolder
from torchtitan.protocols.state_dict_adapter import TensorForm
from torchtitan.tools.errors import UserError


class DcpSource(TensorSource):
    """The tensors of one state of a checkpoint.

    Args:
        path: the checkpoint's folder.
        state: the state's name.

    Raises:
        UserError: where the checkpoint cannot be read or has no such state.
    """

    def __init__(self, path: str | Path, state: str = "model"):
        self.path = Path(path)
        self._metadata = read_metadata(LocalFolder(self.path))
        self._reader = Reader(LocalFolder(self.path), self._metadata)
        states = _states(self._metadata)
        if state not in states:
            raise UserError(f"{self.path} was saved without a state {state!r}; it has {some(sorted(states))}")
        self._keys = states[state]
        self.forms = _forms(self._metadata, self._keys)

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        """The tensor of that name, or the part of it that `slices` says; reads the saved shards that have some."""
        form, key = self.forms[name], self._keys[name]
        wanted = slices if slices is not None else whole(form.shape)
        shape = slice_shape(wanted)
        out = torch.empty(shape, dtype=form.dtype)
        chunk = ChunkStorageMetadata(torch.Size(part.start for part in wanted), torch.Size(shape))
        saved = self._metadata.state_dict_metadata[key]
        assert isinstance(saved, TensorStorageMetadata), "a form is a tensor's"
        items = create_read_items_for_chunk_list(key, saved, [chunk])
        try:
            if slices is None and len(items) == len(saved.chunks) == 1:
                return self._load(items[0], form)
            self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
            self._reader.read_data(LoadPlan(items), _ReadInto(out)).wait()
        except Exception as error:  # there is no end to what damaged bytes lead to
            raise damaged(self.path, f"{name}: {in_words(error)}") from error
        return out

    def _load(self, item: ReadItem, form: TensorForm) -> Tensor:
        """A tensor that lies in one piece; DCP's reader would hold it twice."""
        place = self._metadata.storage_data[item.storage_index]
        with open(self.path / place.relative_path, "rb") as file:
            tensor: Tensor = torch.load(self._reader._slice_file(file, place), map_location="cpu", weights_only=True)
        if TensorForm.of(tensor) != form or tensor.is_meta or tensor.layout != torch.strided:
            raise ValueError(f"{place.relative_path} holds another tensor than .metadata says")
        return tensor


def state_forms(path: Path) -> dict[str, dict[str, TensorForm]]:
    """State → tensor → its form, for every state of the checkpoint in `path`. Reads no tensor.

    Raises:
        UserError: where the checkpoint cannot be read.
    """
    metadata = read_metadata(LocalFolder(path))
    return {state: _forms(metadata, keys) for state, keys in sorted(_states(metadata).items())}


def optimized_names(path: Path) -> set[str]:
    """Names of the parameters that the checkpoint in `path` has an optimizer's state of; empty: it has none at all.

    Raises:
        UserError: where the checkpoint cannot be read.
    """
    keys = state_forms(path).get("optimizer", {})
    return {key.removeprefix("state.").rpartition(".")[0] for key in keys if key.startswith("state.")}


def write_dcp(path: Path, forms: Mapping[str, TensorForm], make: MakeTensor) -> None:
    """Write tensors as the state "model" of a checkpoint into the folder `path`, holding one at a time.

    What makes a checkpoint complete is not written: the caller commits it (`folders.commit`).

    Args:
        path: an existing folder.
        forms: name → form of what is written; values of another dtype are converted.
        make: gives each tensor when its turn comes.

    Raises:
        UserError: where a dtype is too narrow for a value.
        OSError: where a file cannot be written.
    """
    templates = {name: torch.empty(form.shape, dtype=form.dtype, device="meta") for name, form in forms.items()}
    # A file per tensor: DCP keeps all tensors of a file until the file is closed.
    writer = writing.Writer(path, single_file_per_rank=False)
    entries = storage.encode("model", templates)
    try:
        dcp.save({"model": entries}, storage_writer=writer, planner=_LazyPlanner(forms, make), no_dist=True)
    except dcp.CheckpointException as error:
        raise writing.failure_cause(error) from None


class _LazyPlanner(DefaultSavePlanner):
    """Saves tensors of the meta device, and makes each one when its values are asked for."""

    def __init__(self, forms: Mapping[str, TensorForm], make: MakeTensor):
        super().__init__()
        self._to_make = forms
        self._make = make

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The tensor, or a value that is not one."""
        name = str(self.mappings[index.fqn][-1])
        if name not in self._to_make:
            return super().lookup_object(index)
        form, tensor = self._to_make[name], self._make(name)
        assert tensor.shape == form.shape, f"{name} had another shape than its form"
        return as_type(name, tensor, form.dtype)


class _ReadInto(DefaultLoadPlanner):
    """Puts what is read into its place in one tensor."""

    def __init__(self, tensor: Tensor):
        super().__init__()
        self._tensor = tensor

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The part of the tensor that the item is for."""
        part = self._tensor
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(dim, offset, length)
        return part


def _states(metadata: Metadata) -> dict[str, dict[str, str]]:
    """State → entry → the key under which it was saved."""
    states: dict[str, dict[str, str]] = {}
    for key in metadata.state_dict_metadata:
        state, entry = metadata.planner_data[key]
        states.setdefault(state, {})[entry] = key
    return states


def _forms(metadata: Metadata, keys: Mapping[str, str]) -> dict[str, TensorForm]:
    saved = {entry: metadata.state_dict_metadata[key] for entry, key in keys.items()}
    return {
        entry: TensorForm(form.size, form.properties.dtype)
        for entry, form in saved.items()
        if isinstance(form, TensorStorageMetadata)
    }
