"""Which folders are checkpoints and which of them count: names, the marker of a complete one, what is kept.

A save is written into `step-N.partial`, which is renamed to `step-N`; the marker, put into place last, is what makes
it count. Where a store cannot rename, it is written into `step-N`, and the marker alone decides. Whatever stops a save,
a folder without a marker remains, and nothing here takes it for a checkpoint.
"""

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch

from torchtitan.components.checkpoint.manifest import find_faults, write_manifest
from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.checkpoint.store import UNFINISHED, Folder, folder_at
from torchtitan.tools.errors import UserError

Kind = Literal["full", "model_only", "huggingface"]
"""What a checkpoint holds: all that a run goes on from, the models' weights alone, or a model in Hugging Face files."""

AnyFolder = str | os.PathLike[str] | Folder

_MARKER = "complete.json"
_DAMAGE = "damaged.json"
_FORMAT_VERSION = 2
_NAME = re.compile(r"step-(\d+)((?:\.dcp|\.removed)?\.partial)?")
_KINDS_IN_WORDS = {"full": "everything", "model_only": "the model only", "huggingface": "a Hugging Face model only"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Marker:
    """The content of the file that makes a checkpoint complete."""

    step: int
    """The training step after which it was saved."""

    kind: Kind
    """What it holds."""

    world_size: int
    """How many processes saved it."""

    validation_loss: float | None = None
    """The validation loss at that step, where it was measured."""

    manifest: str = ""
    """The digest of manifest.json; `commit` fills it in."""

    torch_version: str = torch.__version__
    """The version of torch that wrote it."""

    format_version: int = _FORMAT_VERSION
    """The version of the layout of folder and entries."""


_MARKER_TYPES: dict[str, tuple[type, ...]] = {
    "step": (int,),
    "kind": (str,),
    "world_size": (int,),
    "validation_loss": (float, type(None)),
    "manifest": (str,),
    "torch_version": (str,),
    "format_version": (int,),
}


@dataclasses.dataclass(frozen=True)
class CheckpointInfo:
    """One folder of the form `step-N` or `step-N.partial`."""

    step: int
    """The step in the folder's name."""

    path: Folder
    """Where it lies; `str()` gives the path or URL, and a local one is an `os.PathLike`."""

    marker: Marker | None
    """None: the checkpoint is not complete and cannot be loaded."""

    fault: str = ""
    """Why it is not complete although there is a marker; the message names the marker or the folder."""

    damage: str = ""
    """What a run found damaged when it was to resume from it: it is neither used nor removed without being asked."""

    @property
    def complete(self) -> bool:
        """Whether every byte of it was written."""
        return self.marker is not None

    @property
    def kind(self) -> Kind | None:
        """What it holds; None: it is not complete."""
        return self.marker.kind if self.marker else None

    @property
    def holds(self) -> str:
        """What it holds, in words."""
        return in_words(self.marker.kind) if self.marker else "nothing that is complete"

    @property
    def validation_loss(self) -> float | None:
        """The validation loss at its step, where it was measured."""
        return self.marker.validation_loss if self.marker else None


def in_words(kind: Kind) -> str:
    """What a checkpoint of this kind holds."""
    return _KINDS_IN_WORDS[kind]


def list_checkpoints(folder: AnyFolder) -> list[CheckpointInfo]:
    """The checkpoints in `folder`, complete or not, in the order of their steps; none where there is no such folder.

    One whose marker is damaged, or is that of a layout that this version does not know, is not complete.
    """
    folder = folder_at(folder)
    found = [(int(match[1]), name) for name in folder.folders() if (match := _NAME.fullmatch(name))]
    return [_inspect(step, folder / name) for step, name in sorted(found)]


def find_step(folder: Folder, step: int) -> CheckpointInfo:
    """The complete, full checkpoint of `step` in `folder`.

    Raises:
        UserError: where there is none.
    """
    checkpoints = list_checkpoints(folder)
    same_step = [info for info in checkpoints if info.step == step]
    if full := [info for info in same_step if info.kind == "full"]:
        return full[0]
    if complete := [info for info in same_step if info.complete]:
        raise UserError(
            f"checkpoint.load_step: step {step} in {folder} holds {complete[0].holds}, so a run cannot resume from it; "
            f"to start a new run from its weights, name {complete[0].path} as checkpoint.initial_load_path"
        )
    fault = "is not complete" if same_step else "is not there"
    fault = next((f"cannot be loaded: {info.fault}" for info in same_step if info.fault), fault)
    steps = [str(info.step) for info in checkpoints if info.kind == "full"]
    raise UserError(f"checkpoint.load_step: step {step} in {folder} {fault}; complete: {', '.join(steps) or 'none'}")


def resumable(folder: Folder) -> list[CheckpointInfo]:
    """The complete, full checkpoints in `folder` that are not known to be damaged, in the order of their steps.

    Raises:
        UserError: where there is none, and there are damaged ones: to begin anew would lose the run.
    """
    checkpoints = list_checkpoints(folder)
    sound = [info for info in checkpoints if info.kind == "full" and not info.damage]
    lost = {info.step: info.fault for info in checkpoints if info.fault}
    lost |= {info.step: info.damage for info in checkpoints if info.kind == "full" and info.damage}
    if lost and not sound:
        raise all_damaged(folder, lost)
    return sound


def all_damaged(folder: Folder, faults: Mapping[int, str]) -> UserError:
    """The error of a run that has checkpoints, by their steps, and can resume from none."""
    lines = "".join(f"\n  step {step}: {faults[step]}" for step in sorted(faults))
    return UserError(
        f"every checkpoint in {folder} that a run could resume from is damaged:{lines}\n"
        f"repair one and remove its {_DAMAGE}, or start anew with another checkpoint.folder"
    )


def open_checkpoint(path: AnyFolder) -> CheckpointInfo:
    """The complete checkpoint that is the folder `path`, whatever the folder's name.

    Raises:
        UserError: where `path` is no folder, no checkpoint, an incomplete one or one with a damaged marker.
    """
    folder = folder_at(path)
    if not folder.exists():
        raise UserError(f"checkpoint.initial_load_path: {path} is not a folder; name the step-N folder of a checkpoint")
    try:
        marker = _read_marker(folder)
    except _MarkerError as error:
        raise UserError(f"checkpoint.initial_load_path: {error}; name another one") from error
    if marker:
        return CheckpointInfo(marker.step, folder, marker)
    for outer in (folder, folder / "checkpoint"):
        if complete := [info for info in list_checkpoints(outer) if info.complete]:
            raise UserError(
                f"checkpoint.initial_load_path: {path} is not a checkpoint but holds some; "
                f"name one of them, for example {complete[-1].path}"
            )
    fault = "is not complete: its save was cut short" if _NAME.fullmatch(folder.name) else "is not a checkpoint"
    raise UserError(f"checkpoint.initial_load_path: {path} {fault} (there is no {_MARKER} in it); name another one")


def verify(path: AnyFolder, ranks: Ranks | None = None) -> list[str]:
    """What is wrong with the files of the checkpoint in the folder `path`, one line for each; empty: nothing.

    Args:
        path: a step's folder.
        ranks: those who share the work, calling this together; None: this process alone.
    """
    folder, ranks = folder_at(path), ranks or Ranks()
    try:
        marker = ranks.first_decides(lambda: _read_marker(folder))
    except _MarkerError as error:
        return [str(error)]
    return find_faults(folder, marker.manifest, ranks) if marker else [f"{_MARKER} is missing"]


def record_damage(checkpoint: CheckpointInfo, faults: Sequence[str]) -> None:
    """Leave a note in a checkpoint that was found damaged, so that later runs neither count on it nor remove it."""
    checkpoint.path.write(_DAMAGE, json.dumps({"faults": faults}, indent=1).encode())


def has_marker(path: AnyFolder) -> bool:
    """Whether the folder `path` says of itself that it is a complete checkpoint."""
    return folder_at(path).has_file(_MARKER)


def start_partial(folder: AnyFolder, step: int) -> Folder:
    """An empty folder to write the checkpoint of `step` into, after what an earlier attempt left is removed.

    Where the store cannot rename, it has the checkpoint's own name, and a complete checkpoint of that name is removed.
    """
    folder = folder_at(folder)
    discard_incomplete(folder, step)
    partial = folder / (f"step-{step}.partial" if folder.renames else f"step-{step}")
    if partial.exists():
        remove_checkpoint(partial)
    partial.make()
    return partial


def start_native(partial: Folder) -> Folder:
    """An empty folder beside `partial`, `step-N.dcp.partial`, for the checkpoint that another form is made from."""
    native = partial.parent / f"{partial.name.removesuffix('.partial')}.dcp.partial"
    native.make()
    return native


def commit(partial: AnyFolder, marker: Marker, ranks: Ranks | None = None) -> Folder:
    """Write the manifest of the fully written folder `partial` and turn it into the complete checkpoint; return that.

    `step-N.partial` becomes `step-N`. A checkpoint of the same step, which a run that resumed from an earlier one left
    behind, is replaced.

    Args:
        partial: as `start_partial` gave it.
        marker: its `manifest` is filled in.
        ranks: those who share the work, calling this together; None: this process alone.

    Raises:
        OSError: on every rank, where a file cannot be written or read.
    """
    folder, ranks = folder_at(partial), ranks or Ranks()
    assert folder.name.endswith(".partial") or not folder.renames, "commit takes what is to be renamed"
    marker = dataclasses.replace(marker, manifest=write_manifest(folder, ranks))
    final = folder.name.removesuffix(".partial")
    return ranks.first_decides(lambda: folder.publish(final, _MARKER, _marker_content(marker)))


def best(checkpoints: Sequence[CheckpointInfo]) -> CheckpointInfo | None:
    """The one of the lowest validation loss, the earliest of equals; None where none has one."""
    measured = [(info.validation_loss, info) for info in checkpoints if info.validation_loss is not None]
    numbers = [(loss, info) for loss, info in measured if loss == loss]  # NaN is not
    return min(numbers, key=lambda pair: pair[0])[1] if numbers else None


def prune(folder: Folder, step: int, keep_latest_k: int, *, keep_best: bool = False) -> None:
    """Keep `keep_latest_k` (0: all) of the complete checkpoints up to `step`, the one just saved, and remove the rest.

    The newest full one always stays, since without it the run could not be continued; with `keep_best`, that of the
    lowest validation loss too. Those found damaged stay, as evidence. Those of later steps stay as well: a run that
    went back to an earlier step replaces them as it reaches them.
    """
    complete = [info for info in list_checkpoints(folder) if info.complete and not info.damage and info.step <= step]
    kept = [info for info in complete if info.kind == "full"][-1:]
    if keep_best and (lowest := best(complete)):
        kept.append(lowest)
    for info in complete[:-keep_latest_k] if keep_latest_k else []:
        if info not in kept:
            remove_checkpoint(info.path)


def discard_incomplete(folder: Folder, step: int) -> None:
    """Remove what an unfinished save of `step` left in `folder`; a complete checkpoint stays."""
    for info in list_checkpoints(folder):
        if info.step == step and not info.complete:
            remove_checkpoint(info.path)


def remove_checkpoint(path: Folder) -> None:
    """Remove a checkpoint; cut short, what remains does not look like one."""
    path.remove(first=_MARKER)


class _MarkerError(Exception):
    """The marker of a checkpoint cannot be used; the message says which and why."""


def _inspect(step: int, folder: Folder) -> CheckpointInfo:
    if folder.name.endswith(UNFINISHED):
        return CheckpointInfo(step, folder, None)  # with a marker, it is being removed
    try:
        return CheckpointInfo(step, folder, _read_marker(folder), damage=_read_damage(folder))
    except _MarkerError as error:
        return CheckpointInfo(step, folder, None, fault=str(error))


def _read_damage(folder: Folder) -> str:
    if not folder.has_file(_DAMAGE):
        return ""
    try:
        return "; ".join(json.loads(folder.read(_DAMAGE))["faults"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"{_DAMAGE} says so, but cannot be read"


def _read_marker(folder: Folder) -> Marker | None:
    """The marker in `folder`, None where there is none; raises `_MarkerError` for one that cannot be used."""
    if not folder.has_file(_MARKER):
        return None
    file = f"{folder}/{_MARKER}"
    try:
        text = folder.read(_MARKER)
        content: Any = json.loads(text)
    except (OSError, ValueError) as error:
        raise _MarkerError(f"{file} is damaged ({error})") from error
    version = content.get("format_version", _FORMAT_VERSION) if isinstance(content, dict) else _FORMAT_VERSION
    if version != _FORMAT_VERSION:
        raise _MarkerError(
            f"{folder} is in layout {version}, and this version of torchtitan reads layout {_FORMAT_VERSION}; "
            "it can be loaded by the version that wrote it"
        )
    marker = _marker_from(content)
    if marker is None or _marker_content(marker) != text:
        raise _MarkerError(f"{file} is damaged (its content is not that of a marker)")
    return marker


def _marker_content(marker: Marker) -> bytes:
    """The marker's file: its fields, and a digest of them, since no manifest says what they were."""
    fields = dataclasses.asdict(marker)
    digest = hashlib.sha256(json.dumps(fields).encode()).hexdigest()
    return json.dumps({**fields, "digest": digest}).encode()


def _marker_from(content: Any) -> Marker | None:
    fields = {name: value for name, value in content.items() if name != "digest"} if isinstance(content, dict) else {}
    types_fit = fields.keys() == _MARKER_TYPES.keys() and all(
        type(value) in _MARKER_TYPES[name] for name, value in fields.items()
    )
    return Marker(**fields) if types_fit and fields["kind"] in get_args(Kind) else None
