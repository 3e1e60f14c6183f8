"""What a checkpoint holds and how it is read: states as the entries of torch.distributed.checkpoint (DCP).

A state's tensors are entries under their own names, so that DCP can shard and reshard them; all its other values are
one entry, a JSON string, so that their structure may differ between the state that was saved and the one that loads.

DCP takes a second to import: import this module where it is used, not at the top of another.
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful

from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.checkpoint.reading import Planner, Reader, in_words, read_metadata
from torchtitan.components.checkpoint.staging import Entries
from torchtitan.components.checkpoint.store import Folder
from torchtitan.components.checkpoint.writing import failure_cause
from torchtitan.tools.errors import UserError

SavedEntries = dict[str, TensorStorageMetadata | BytesStorageMetadata]

_SHOWN_PROBLEMS = 5


def encode(name: str, state_dict: Mapping[str, Any]) -> Entries:
    """The entries of the state `name`: its tensors, and all other values as one JSON string.

    The string's key is a digest of it: where ranks hold different values (pipeline stages, each with the optimizer's
    settings for its own parameters), every string is saved, and where they hold the same, one.

    Raises:
        TypeError: where a value is neither a tensor nor has a JSON form.
    """
    tensors = dict(_tensors(state_dict))
    try:
        text = json.dumps({key: value for key, value in state_dict.items() if key not in tensors})
    except TypeError as error:
        raise TypeError(f"state {name!r} must be a flat dict of tensors and JSON-ready values: {error}") from error
    return {**tensors, f"json-{hashlib.sha256(text.encode()).hexdigest()[:16]}": text}


def decode(entries: Entries, template: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict that `entries` were made from; JSON has no tuples: there are some where `template` has them."""
    state_dict: dict[str, Any] = {}
    for key, value in sorted(entries.items()):
        state_dict.update(json.loads(value) if isinstance(value, str) else {key: value})
    return {key: tuple(value) if isinstance(template.get(key), tuple) else value for key, value in state_dict.items()}


def rank_key(name: str, rank: int) -> str:
    """The name under which the state `name` of `rank` alone is saved."""
    return f"{name}.rank{rank}"


def load(
    path: Folder,
    states: Mapping[str, Stateful],
    rank_states: Mapping[str, Stateful],
    saved_rank: int,
    ranks: Ranks,
    *,
    optional: Collection[str] = (),
) -> set[str]:
    """Load the checkpoint in `path` into `states`, which must fit it, and `rank_states`, which take what it has.

    The tensors of `states` are loaded in place, each rank reading its shards; `rank_states` get those of `saved_rank`.

    Returns:
        The names of those that were loaded: all, but for `optional` ones that the checkpoint lacks.

    Raises:
        UserError: on every rank, where the checkpoint lacks a state, does not fit or cannot be read.
    """
    metadata = ranks.first_decides(lambda: read_metadata(path))
    saved = _saved_entries(metadata)
    states = {name: state for name, state in states.items() if name in saved or name not in optional}
    keys = {name: name for name in states} | {name: rank_key(name, saved_rank) for name in rank_states}
    lacking = [name for of_rank in ranks.gather([name for name in keys if keys[name] not in saved]) for name in of_rank]
    if lacking:
        excluded = f"to go on without, list {lacking[0]} in checkpoint.exclude_from_loading"
        raise UserError(f"{path} was saved without a state {lacking[0]!r}; {excluded}")
    templates = {name: state.state_dict() for name, state in states.items()}
    _check_tensors(path, templates, saved, ranks)
    targets: dict[str, Entries] = {name: dict(_tensors(template)) for name, template in templates.items()}
    targets |= {keys[name]: _empty_tensors(saved[keys[name]]) for name in rank_states}
    request = {key: tensors | _strings(saved[key]) for key, tensors in targets.items()}
    try:
        dcp.load(
            request,
            storage_reader=Reader(path, metadata),
            planner=Planner(),
            process_group=ranks.group,
            no_dist=ranks.group is None,
        )
    except dcp.CheckpointException as error:
        raise _unreadable(path, failure_cause(error)) from error
    decoded: dict[str, dict[str, Any]] = {}

    def decode_all() -> None:
        try:
            decoded.update({name: decode(request[key], templates.get(name, {})) for name, key in keys.items()})
        except (TypeError, ValueError, RecursionError) as error:  # of JSON that no run has written
            raise _unreadable(path, error) from error

    ranks.together(decode_all)  # each has a state of its own
    for name, state in {**states, **rank_states}.items():
        state.load_state_dict(decoded[name])
    return set(keys)


def _unreadable(path: Folder, error: BaseException) -> UserError:
    return UserError(f"{path} cannot be read ({in_words(error)}); load another checkpoint")


def _saved_entries(metadata: Metadata) -> dict[str, SavedEntries]:
    """Return the entries that a checkpoint has: state → entry → its form."""
    saved: dict[str, SavedEntries] = {}
    for name, form in metadata.state_dict_metadata.items():
        state, entry = metadata.planner_data[name]
        saved.setdefault(state, {})[entry] = form
    return saved


def _check_tensors(
    path: Folder,
    templates: Mapping[str, Mapping[str, Any]],
    saved: Mapping[str, SavedEntries],
    ranks: Ranks,
) -> None:
    """Compare names and shapes of the tensors before any is loaded.

    A rank may hold a part of the model only, so a tensor of the checkpoint is surplus where no rank has it.
    """
    wanted = {f"{state}.{entry}": tensor.shape for state in templates for entry, tensor in _tensors(templates[state])}
    stored = {f"{state}.{entry}": form.size for state in templates for entry, form in _tensor_forms(saved[state])}
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


def saved_shapes(path: Folder, state: str) -> dict[str, torch.Size]:
    """Name → shape of the tensors of one state of the checkpoint in `path`; none, where it lacks the state.

    Raises:
        UserError: where it cannot be read.
    """
    return {name: form.size for name, form in _tensor_forms(_saved_entries(read_metadata(path)).get(state, {}))}


def _tensors(state_dict: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
    return [(key, value) for key, value in state_dict.items() if isinstance(value, torch.Tensor)]


def _tensor_forms(entries: SavedEntries) -> list[tuple[str, TensorStorageMetadata]]:
    return [(entry, form) for entry, form in entries.items() if isinstance(form, TensorStorageMetadata)]


def _empty_tensors(entries: SavedEntries) -> Entries:
    return {entry: torch.empty(form.size, dtype=form.properties.dtype) for entry, form in _tensor_forms(entries)}


def _strings(entries: SavedEntries) -> Entries:
    return {entry: "" for entry, form in entries.items() if isinstance(form, BytesStorageMetadata)}
