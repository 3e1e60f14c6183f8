"""Finding, committing and removing the checkpoints in a folder.

A save is written into `step-N.partial`, which is renamed to `step-N`. The marker file, added last,
makes the checkpoint complete. In a store that cannot rename, files are written into `step-N`
directly. A folder left by an interrupted save has no marker and is never loaded.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence

from torchtitan.components.checkpoint.filesystem import (
    UNFINISHED,
    UNPUBLISHED,
    AnyFolder,
    Folder,
    LocalFolder,
    folder_at,
    read_document,
)
from torchtitan.components.checkpoint.manifest import (
    KIND_DESCRIPTIONS,
    MANIFEST,
    MARKER,
    Criterion,
    Faults,
    Kind,
    Marker,
    MarkerError,
    UnreadMarkerError,
    find_faults,
    marker_content,
    read_marker,
    write_manifest,
)
from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import missing_folder_error

_DAMAGE = "damaged.json"
_NAME = re.compile(r"step-(\d+)((?:\.dcp|\.removed)?\.partial)?")


@dataclasses.dataclass(frozen=True)
class CheckpointInfo:
    """A folder named `step-N` or `step-N.partial`."""

    step: int
    """Step in the folder name."""

    path: Folder

    marker: Marker | None
    """None if the checkpoint is incomplete."""

    fault: str = ""
    """Reason why a folder that should be complete cannot be loaded."""

    damage: str = ""
    """Damage found when a run tried to resume. A damaged checkpoint is neither loaded nor
    pruned."""

    @property
    def is_complete(self) -> bool:
        return self.marker is not None

    @property
    def kind(self) -> Kind | None:
        return self.marker.kind if self.marker else None

    @property
    def base_model(self) -> str:
        return self.marker.base_model if self.marker else ""

    @property
    def ends_run(self) -> bool:
        """True for the final checkpoint of a run with a `RunIdentity`, from which the run cannot
        resume."""
        return self.marker is not None and self.marker.kind != "full" and bool(self.marker.identity)

    @property
    def contents(self) -> str:
        return KIND_DESCRIPTIONS[self.marker.kind] if self.marker else "an incomplete checkpoint"

    @property
    def validation_loss(self) -> float | None:
        return self.marker.validation_loss if self.marker else None

    def loss(self, criterion: Criterion) -> float | None:
        """Return the number that `keep_best` minimizes; None if it was not measured."""
        return criterion.loss_of(self.marker) if self.marker else None


def list_checkpoints(folder: AnyFolder) -> list[CheckpointInfo]:
    """Return the checkpoints in `folder`, complete or not, by step; none if the folder does not
    exist. A checkpoint with a damaged marker or an unknown layout is incomplete."""
    folder = folder_at(folder)
    found = [(int(match[1]), name) for name in folder.folders() if (match := _NAME.fullmatch(name))]
    return [_inspect(step, folder / name) for step, name in sorted(found)]


def names_in(folder: Folder) -> frozenset[str]:
    """Return the names of the checkpoints in `folder`, complete or not, without reading them."""
    return frozenset(name for name in folder.folders() if _NAME.fullmatch(name))


def find_step(folder: Folder, checkpoints: Sequence[CheckpointInfo], step: int) -> CheckpointInfo:
    """Return the complete, full checkpoint of `step` among the `checkpoints` in `folder`. Raise
    `UserError` if the step has no such checkpoint."""
    same_step = [info for info in checkpoints if info.step == step]
    if full := [info for info in same_step if info.kind == "full"]:
        return full[0]
    if complete := [info for info in same_step if info.is_complete]:
        raise UserError(
            f"--checkpoint.load_step: step {step} in {folder} holds {complete[0].contents}, so a "
            "run cannot resume from it; to start a new run from its weights, set "
            f"--checkpoint.initial_load_path {complete[0].path}"
        )
    fault = "is incomplete" if same_step else "does not exist"
    fault = next((f"cannot be loaded: {info.fault}" for info in same_step if info.fault), fault)
    steps = [str(info.step) for info in checkpoints if info.kind == "full"]
    raise UserError(
        f"--checkpoint.load_step: step {step} in {folder} {fault}; complete steps: "
        f"{', '.join(steps) or 'none'}"
    )


def resumable(folder: Folder, checkpoints: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
    """Return the `checkpoints` in `folder` that are complete, full and not known to be damaged, by
    step. Raise `UserError` if all of them are damaged: starting over would lose the run."""
    usable = [info for info in checkpoints if info.kind == "full" and not info.damage]
    faults = {info.step: info.fault for info in checkpoints if info.fault}
    faults |= {
        info.step: f"it was found damaged: {info.damage}"
        for info in checkpoints
        if info.kind == "full" and info.damage
    }
    if faults and not usable:
        raise no_usable_checkpoint_error(folder, checkpoints, faults)
    return usable


def no_usable_checkpoint_error(
    folder: Folder, checkpoints: Sequence[CheckpointInfo], faults: Mapping[int, str]
) -> UserError:
    """Return the error for a run without a usable checkpoint in `folder`; `faults` maps each step
    to the reason."""
    lines = "".join(f"\n  step {step}: {faults[step]}" for step in sorted(faults))
    note = f" and remove its {_DAMAGE}" if any(info.damage for info in checkpoints) else ""
    return UserError(
        f"no checkpoint in {folder} can be loaded:{lines}\n"
        f"repair one{note}, or set --checkpoint.folder to start a new run"
    )


def open_checkpoint(path: AnyFolder, option: str = "") -> CheckpointInfo:
    """Return the complete checkpoint in the folder `path`, which may have any name. Raise
    `UserError` if `path`, the value of `option`, is not a folder or not a checkpoint, is
    incomplete, or has a damaged marker."""
    folder, prefix = folder_at(path), f"{option}: " if option else ""
    if isinstance(folder, LocalFolder) and not folder.exists():
        raise UserError(f"{prefix}{missing_folder_error(folder.path)}")
    if not folder.exists():
        raise UserError(f"{prefix}{path} does not exist; use the step-N folder of a checkpoint")
    try:
        marker = read_marker(folder)
    except MarkerError as error:
        raise UserError(f"{prefix}{error}; use another checkpoint") from error
    if marker:
        return CheckpointInfo(marker.step, folder, marker)
    reject_outer_folder(path, option)
    if option == "--checkpoint.initial_load_path" and folder.has_file("config.json"):
        raise UserError(
            f"{prefix}{path} is a model's folder, and no checkpoint of a run; add "
            "--checkpoint.initial_load_in_hf"
        )
    fault = (
        "is incomplete: its save was interrupted"
        if _NAME.fullmatch(folder.name)
        else "is not a checkpoint"
    )
    raise UserError(f"{prefix}{path} {fault} (it has no {MARKER}); use another checkpoint")


def reject_outer_folder(path: AnyFolder, option: str = "") -> None:
    """Raise `UserError` if the folder `path`, the value of `option`, is a run's or contains
    complete checkpoints."""
    for folder in (folder_at(path), folder_at(path) / "checkpoint"):
        if complete := [info for info in list_checkpoints(folder) if info.is_complete]:
            prefix = f"{option}: " if option else ""
            raise UserError(
                f"{prefix}{path} is not a checkpoint but contains some; use one of them, such as "
                f"the newest, {complete[-1].path}"
            )


def verify(path: AnyFolder) -> list[str]:
    """Return the faults in the files of the checkpoint in `path`, one line each."""
    return find_damage(folder_at(path), Ranks()).lines


def find_damage(folder: Folder, ranks: Ranks, *, only: Collection[str] | None = None) -> Faults:
    """Return damaged files and unreadable ones; `only` names the files to check. All `ranks` call
    this together and divide the work."""
    try:
        marker = ranks.broadcast_from_rank0(lambda: read_marker(folder))
    except UnreadMarkerError as error:
        return Faults(unread=[str(error)])
    except MarkerError as error:
        return Faults(damage=[str(error)])
    return (
        find_faults(folder, marker.manifest, ranks, only=only)
        if marker
        else Faults(damage=[f"{MARKER} is missing"])
    )


def raise_if_damaged(
    path: AnyFolder, ranks: Ranks | None = None, *, only: Collection[str] | None = None
) -> None:
    """Raise `UserError` if a file of the checkpoint in `path` has changed since it was written, or
    cannot be read."""
    if faults := find_damage(folder_at(path), ranks or Ranks(), only=only):
        raise UserError(f"{path} {faults.describe()}; load another checkpoint")


def record_damage(checkpoint: CheckpointInfo, faults: Sequence[str]) -> None:
    """Record the damage in the checkpoint folder, so that later runs neither use nor remove the
    checkpoint."""
    checkpoint.path.write(_DAMAGE, json.dumps({"faults": faults}, indent=1).encode())


def has_marker(path: AnyFolder) -> bool:
    """Return whether the folder `path` has a marker, intact or not."""
    return folder_at(path).has_file(MARKER)


def start_partial(folder: AnyFolder, step: int) -> Folder:
    """Return an empty folder for the checkpoint of `step`, after removing the remains of earlier
    attempts. In a store that cannot rename, it has the final name, and a complete checkpoint of
    that name is removed."""
    folder = folder_at(folder)
    discard_incomplete(folder, step)
    partial = folder / (f"step-{step}.partial" if folder.can_rename else f"step-{step}")
    if partial.exists():
        remove_checkpoint(partial)
    partial.create()
    return partial


def start_dcp(partial: Folder) -> Folder:
    """Return the empty folder `step-N.dcp.partial` next to `partial`, for the files to export
    from."""
    dcp_folder = partial.parent / f"{partial.name.removesuffix('.partial')}.dcp.partial"
    dcp_folder.create()
    return dcp_folder


def commit(
    partial: AnyFolder, marker: Marker, ranks: Ranks | None = None, *, name: str = ""
) -> Folder:
    """Write the manifest and marker of the fully written folder `partial`, rename it, and return
    the checkpoint. It replaces a checkpoint of the same name, left by a run that then resumed from
    an earlier step. `marker.manifest` is filled in; all `ranks` call this together; `name` defaults
    to the name of `partial` without ".partial". Raise `OSError` on every rank if a file cannot be
    written or read."""
    folder, ranks = folder_at(partial), ranks or Ranks()
    assert folder.name.endswith(".partial") or not folder.can_rename, (
        "the folder must end in .partial"
    )
    marker = dataclasses.replace(marker, manifest=write_manifest(folder, ranks))
    final = name or folder.name.removesuffix(".partial")
    return ranks.broadcast_from_rank0(lambda: folder.publish(final, MARKER, marker_content(marker)))


def best(checkpoints: Sequence[CheckpointInfo], criterion: Criterion) -> CheckpointInfo | None:
    """Return the earliest checkpoint with the lowest `CheckpointInfo.loss`; None if none was
    measured."""
    measured = [(loss, info) for info in checkpoints if (loss := info.loss(criterion)) is not None]
    numbers = [(loss, info) for loss, info in measured if loss == loss]  # without NaN
    return min(numbers, key=lambda pair: pair[0])[1] if numbers else None


def prune(
    folder: Folder,
    step: int,
    keep_latest_k: int,
    *,
    criterion: Criterion,
    best_of: Callable[[int], bool] | None = None,
) -> None:
    """Keep the newest `keep_latest_k` (0: all) complete checkpoints up to `step`, the one just
    saved; remove the rest.

    Also keep the newest full checkpoint, because the run resumes from it; the final checkpoint of a
    run (`CheckpointInfo.ends_run`); the best checkpoint by `criterion` among the steps that
    `best_of` accepts; damaged checkpoints, for diagnosis; and steps after `step`, which a run
    resumed from an earlier step overwrites when it reaches them.
    """
    complete = [
        info
        for info in list_checkpoints(folder)
        if info.is_complete and not info.damage and info.step <= step
    ]
    kept = [info for info in complete if info.kind == "full"][-1:]
    kept += [info for info in complete if info.ends_run]
    if best_of and (lowest := best([info for info in complete if best_of(info.step)], criterion)):
        kept.append(lowest)
    for info in complete[:-keep_latest_k] if keep_latest_k else []:
        if info not in kept:
            remove_checkpoint(info.path)


def discard_incomplete(folder: Folder, step: int) -> None:
    """Remove the remains of an unfinished save of `step` in `folder`, but not a complete
    checkpoint."""
    for info in list_checkpoints(folder):
        if info.step == step and not info.is_complete:
            remove_checkpoint(info.path)


def remove_checkpoint(path: Folder) -> None:
    """Remove a checkpoint. If interrupted, the remaining files do not count as a checkpoint."""
    path.remove(first=MARKER)


def _inspect(step: int, folder: Folder) -> CheckpointInfo:
    if folder.name.endswith(UNFINISHED):
        return CheckpointInfo(step, folder, None)  # a folder with a marker is being removed
    try:
        marker = read_marker(folder)
        # If folders are renamed, an interrupted save never leaves a folder with a manifest but no
        # marker.
        is_consistent = marker or not folder.can_rename or not folder.has_file(MANIFEST)
        fault = (
            ""
            if is_consistent or folder.has_file(MARKER + UNPUBLISHED)
            else f"{folder}/{MARKER} is missing"
        )
        return CheckpointInfo(step, folder, marker, fault, _read_damage(folder))
    except MarkerError as error:
        return CheckpointInfo(step, folder, None, fault=str(error))
    except OSError as error:
        return CheckpointInfo(step, folder, None, fault=f"{folder} could not be read ({error})")


def _read_damage(folder: Folder) -> str:
    if not folder.has_file(_DAMAGE):
        return ""
    try:
        return "; ".join(json.loads(read_document(folder, _DAMAGE))["faults"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return f"{_DAMAGE} exists, but cannot be read"
