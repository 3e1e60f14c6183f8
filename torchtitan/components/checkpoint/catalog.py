"""Finds, names, commits and removes the checkpoints in a folder.

A save is written into `step-N.partial`, which is renamed to `step-N`; the marker, put in place last, makes it count.
If the store cannot rename, files go into `step-N`, and the marker alone decides. An interrupted save leaves a folder
without a marker, which is never taken for a checkpoint.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence

from torchtitan.components.checkpoint.filesystem import UNFINISHED, UNPUBLISHED, AnyFolder, Folder, folder_at
from torchtitan.components.checkpoint.manifest import (
    MANIFEST,
    MARKER,
    Faults,
    Kind,
    Marker,
    MarkerError,
    UnreadMarkerError,
    find_faults,
    in_words,
    marker_content,
    read_marker,
    write_manifest,
)
from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.tools.errors import UserError

_DAMAGE = "damaged.json"
_NAME = re.compile(r"step-(\d+)((?:\.dcp|\.removed)?\.partial)?")


@dataclasses.dataclass(frozen=True)
class CheckpointInfo:
    """A folder named `step-N` or `step-N.partial`."""

    step: int
    """Step in the folder name."""

    path: Folder

    marker: Marker | None
    """None if the checkpoint is incomplete and cannot be loaded."""

    fault: str = ""
    """Reason why a folder that should be complete is not."""

    damage: str = ""
    """Damage that a run found when it tried to resume. The checkpoint is not used, nor removed unless requested."""

    @property
    def complete(self) -> bool:
        return self.marker is not None

    @property
    def kind(self) -> Kind | None:
        return self.marker.kind if self.marker else None

    @property
    def base_model(self) -> str:
        return self.marker.base_model if self.marker else ""

    @property
    def ends_run(self) -> bool:
        """True if a run with a `RunIdentity` ended in it and cannot be resumed from it."""
        return self.marker is not None and self.marker.kind != "full" and bool(self.marker.identity)

    @property
    def holds(self) -> str:
        return in_words(self.marker.kind) if self.marker else "nothing that is complete"

    @property
    def validation_loss(self) -> float | None:
        return self.marker.validation_loss if self.marker else None


def list_checkpoints(folder: AnyFolder) -> list[CheckpointInfo]:
    """Return the checkpoints in `folder`, complete or not, by step; none if the folder does not exist. A checkpoint
    with a damaged marker, or a marker of an unknown layout, is not complete."""
    folder = folder_at(folder)
    found = [(int(match[1]), name) for name in folder.folders() if (match := _NAME.fullmatch(name))]
    return [_inspect(step, folder / name) for step, name in sorted(found)]


def find_step(folder: Folder, step: int) -> CheckpointInfo:
    """Return the complete, full checkpoint of `step` in `folder`; raise `UserError` if there is none."""
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
    """Return the complete, full checkpoints in `folder` that are not known to be damaged, by step. Raise `UserError` if
    there are only damaged ones: starting over would lose the run."""
    checkpoints = list_checkpoints(folder)
    sound = [info for info in checkpoints if info.kind == "full" and not info.damage]
    lost = {info.step: info.fault for info in checkpoints if info.fault}
    lost |= {
        info.step: f"it was found damaged: {info.damage}" for info in checkpoints if info.kind == "full" and info.damage
    }
    if lost and not sound:
        raise no_usable_checkpoint(folder, lost)
    return sound


def no_usable_checkpoint(folder: Folder, lost: Mapping[int, str]) -> UserError:
    """Return the error for a run whose checkpoints are all unusable; `lost` maps step to reason."""
    lines = "".join(f"\n  step {step}: {lost[step]}" for step in sorted(lost))
    note = f" and remove its {_DAMAGE}" if any(info.damage for info in list_checkpoints(folder)) else ""
    return UserError(
        f"no checkpoint in {folder} can be resumed from:{lines}\n"
        f"repair one{note}, or start anew with another checkpoint.folder"
    )


def open_checkpoint(path: AnyFolder, option: str = "") -> CheckpointInfo:
    """Return the complete checkpoint in the folder `path`, which may have any name. Raise `UserError` if `path`, given
    by `option`, is no folder, no checkpoint, incomplete or has a damaged marker."""
    folder, named = folder_at(path), f"{option}: " if option else ""
    if not folder.exists():
        raise UserError(f"{named}{path} is not a folder; name the step-N folder of a checkpoint")
    try:
        marker = read_marker(folder)
    except MarkerError as error:
        raise UserError(f"{named}{error}; name another one") from error
    if marker:
        return CheckpointInfo(marker.step, folder, marker)
    for outer in (folder, folder / "checkpoint"):
        if complete := [info for info in list_checkpoints(outer) if info.complete]:
            raise UserError(
                f"{named}{path} is not a checkpoint but holds some; name one of them, for example {complete[-1].path}"
            )
    fault = "is not complete: its save was cut short" if _NAME.fullmatch(folder.name) else "is not a checkpoint"
    raise UserError(f"{named}{path} {fault} (there is no {MARKER} in it); name another one")


def verify(path: AnyFolder, ranks: Ranks | None = None) -> list[str]:
    """Return the faults of the files of the checkpoint in `path`, one line each; empty if there are none. `ranks` call
    this together and divide the work; None: this process alone."""
    return find_damage(folder_at(path), ranks or Ranks()).lines


def find_damage(folder: Folder, ranks: Ranks, *, only: Collection[str] | None = None) -> Faults:
    """As `verify`, but separate damaged files from unreadable ones; `only` names the files to check."""
    try:
        marker = ranks.broadcast_from_rank0(lambda: read_marker(folder))
    except UnreadMarkerError as error:
        return Faults(unread=[str(error)])
    except MarkerError as error:
        return Faults(damage=[str(error)])
    return find_faults(folder, marker.manifest, ranks, only=only) if marker else Faults(damage=[f"{MARKER} is missing"])


def raise_if_damaged(path: AnyFolder, ranks: Ranks | None = None, *, only: Collection[str] | None = None) -> None:
    """Raise `UserError` if a file of the checkpoint in `path` differs from what was written, or cannot be read."""
    if faults := find_damage(folder_at(path), ranks or Ranks(), only=only):
        raise UserError(f"{path} {faults.in_words()}; load another checkpoint")


def record_damage(checkpoint: CheckpointInfo, faults: Sequence[str]) -> None:
    """Record the damage in the checkpoint, so that later runs neither use nor remove it."""
    checkpoint.path.write(_DAMAGE, json.dumps({"faults": faults}, indent=1).encode())


def has_marker(path: AnyFolder) -> bool:
    """Return whether the folder `path` has a marker, intact or not."""
    return folder_at(path).has_file(MARKER)


def start_partial(folder: AnyFolder, step: int) -> Folder:
    """Return an empty folder for the checkpoint of `step`, removing the remains of earlier attempts. In a store that
    cannot rename, it has the final name, and a complete checkpoint of that name is removed."""
    folder = folder_at(folder)
    discard_incomplete(folder, step)
    partial = folder / (f"step-{step}.partial" if folder.renames else f"step-{step}")
    if partial.exists():
        remove_checkpoint(partial)
    partial.make()
    return partial


def start_dcp(partial: Folder) -> Folder:
    """Return the empty folder `step-N.dcp.partial` next to `partial`, for the files to convert from."""
    dcp_folder = partial.parent / f"{partial.name.removesuffix('.partial')}.dcp.partial"
    dcp_folder.make()
    return dcp_folder


def commit(partial: AnyFolder, marker: Marker, ranks: Ranks | None = None, *, name: str = "") -> Folder:
    """Write the manifest of the fully written folder `partial`, make it a complete checkpoint and return it. It
    replaces a checkpoint of the same name that a run left before it went back to an earlier one. `marker` gets its
    `manifest`; `ranks` call this together; `name` is "step-N", by default the name of `partial`.

    Raises:
        OSError: on every rank, if a file cannot be written or read.
    """
    folder, ranks = folder_at(partial), ranks or Ranks()
    assert folder.name.endswith(".partial") or not folder.renames, "commit takes what is to be renamed"
    marker = dataclasses.replace(marker, manifest=write_manifest(folder, ranks))
    final = name or folder.name.removesuffix(".partial")
    return ranks.broadcast_from_rank0(lambda: folder.publish(final, MARKER, marker_content(marker)))


def best(checkpoints: Sequence[CheckpointInfo]) -> CheckpointInfo | None:
    """Return the earliest checkpoint with the lowest validation loss; None if none was measured."""
    measured = [(info.validation_loss, info) for info in checkpoints if info.validation_loss is not None]
    numbers = [(loss, info) for loss, info in measured if loss == loss]  # NaN is not
    return min(numbers, key=lambda pair: pair[0])[1] if numbers else None


def prune(folder: Folder, step: int, keep_latest_k: int, *, best_of: Callable[[int], bool] | None = None) -> None:
    """Keep the newest `keep_latest_k` (0: all) complete checkpoints up to `step`, the one just saved; remove the rest.

    The newest full checkpoint always stays, since the run resumes from it. So do the end of a run
    (`CheckpointInfo.ends_run`), the lowest validation loss among the steps that `best_of` accepts, damaged checkpoints
    (as evidence), and later steps, which a run that went back replaces as it reaches them.
    """
    complete = [info for info in list_checkpoints(folder) if info.complete and not info.damage and info.step <= step]
    kept = [info for info in complete if info.kind == "full"][-1:]
    kept += [info for info in complete if info.ends_run]
    if best_of and (lowest := best([info for info in complete if best_of(info.step)])):
        kept.append(lowest)
    for info in complete[:-keep_latest_k] if keep_latest_k else []:
        if info not in kept:
            remove_checkpoint(info.path)


def discard_incomplete(folder: Folder, step: int) -> None:
    """Remove the remains of an unfinished save of `step` in `folder`; a complete checkpoint stays."""
    for info in list_checkpoints(folder):
        if info.step == step and not info.complete:
            remove_checkpoint(info.path)


def remove_checkpoint(path: Folder) -> None:
    """Remove a checkpoint. If interrupted, the remains do not look like one."""
    path.remove(first=MARKER)


def _inspect(step: int, folder: Folder) -> CheckpointInfo:
    if folder.name.endswith(UNFINISHED):
        return CheckpointInfo(step, folder, None)  # with a marker, it is being removed
    try:
        marker = read_marker(folder)
        # A save that renames complete folders never leaves a folder with a manifest but no marker.
        is_whole = marker or not folder.renames or not folder.has_file(MANIFEST)
        fault = "" if is_whole or folder.has_file(MARKER + UNPUBLISHED) else f"{folder}/{MARKER} is missing"
        return CheckpointInfo(step, folder, marker, fault, _read_damage(folder))
    except MarkerError as error:
        return CheckpointInfo(step, folder, None, fault=str(error))
    except OSError as error:
        return CheckpointInfo(step, folder, None, fault=f"{folder} could not be read ({error})")


def _read_damage(folder: Folder) -> str:
    if not folder.has_file(_DAMAGE):
        return ""
    try:
        return "; ".join(json.loads(folder.read(_DAMAGE))["faults"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return f"{_DAMAGE} says so, but cannot be read"
