"""Where checkpoints lie and which of them count: the folders' names, the marker of a complete one, removal.

A save is written into `step-N.partial`, which is renamed to `step-N`; the marker, put into place last, is what makes
it count. Whatever stops a save, a folder without a marker remains, and nothing here takes it for a checkpoint.
"""

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path
from typing import Literal

import torch

from torchtitan.tools.errors import UserError

Kind = Literal["full", "model_only"]
"""What a checkpoint holds: all that a run needs to go on, or the model's weights alone."""

_MARKER = "complete.json"
_FORMAT_VERSION = 1
_NAME = re.compile(r"step-(\d+)(\.partial)?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Marker:
    """The content of the file that makes a checkpoint complete."""

    step: int
    """The training step after which it was saved."""

    kind: Kind
    """What it holds."""

    world_size: int
    """How many processes saved it."""

    torch_version: str = torch.__version__
    """The version of torch that wrote it."""

    format_version: int = _FORMAT_VERSION
    """The version of the layout of folder and entries."""


@dataclasses.dataclass(frozen=True)
class CheckpointInfo:
    """One folder of the form `step-N` or `step-N.partial`."""

    step: int
    """The step in the folder's name."""

    path: Path

    marker: Marker | None
    """None: the checkpoint is not complete and cannot be loaded."""

    @property
    def complete(self) -> bool:
        """Whether every byte of it was written."""
        return self.marker is not None

    @property
    def kind(self) -> Kind | None:
        """What it holds; None: it is not complete."""
        return self.marker.kind if self.marker else None


def list_checkpoints(folder: str | Path) -> list[CheckpointInfo]:
    """The checkpoints in `folder`, complete or not, in the order of their steps; none where there is no such folder.

    Raises:
        UserError: where one was written in a layout that this version does not know.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [CheckpointInfo(step, path, _read_marker(path)) for step, path in sorted(found)]


def find_step(folder: Path, step: int) -> CheckpointInfo:
    """The complete, full checkpoint of `step` in `folder`.

    Raises:
        UserError: where there is none.
    """
    checkpoints = list_checkpoints(folder)
    same_step = [info for info in checkpoints if info.step == step]
    if full := [info for info in same_step if info.kind == "full"]:
        return full[0]
    if any(info.kind == "model_only" for info in same_step):
        raise UserError(
            f"checkpoint.load_step: step {step} in {folder} holds the model only, so a run cannot resume from it; "
            f"to start a new run from its weights, name {folder / f'step-{step}'} as checkpoint.initial_load_path"
        )
    fault = "is not complete" if same_step else "is not there"
    steps = [str(info.step) for info in checkpoints if info.kind == "full"]
    raise UserError(f"checkpoint.load_step: step {step} in {folder} {fault}; complete: {', '.join(steps) or 'none'}")


def newest_full(folder: Path) -> CheckpointInfo | None:
    """The complete, full checkpoint of the highest step in `folder`, if there is one."""
    full = [info for info in list_checkpoints(folder) if info.kind == "full"]
    return full[-1] if full else None


def open_checkpoint(path: Path) -> CheckpointInfo:
    """The complete checkpoint that is the folder `path`, whatever the folder's name.

    Raises:
        UserError: where `path` is no folder, no checkpoint or an incomplete one.
    """
    if not path.is_dir():
        raise UserError(f"checkpoint.initial_load_path: {path} is not a folder; name the step-N folder of a checkpoint")
    if marker := _read_marker(path):
        return CheckpointInfo(marker.step, path, marker)
    for inside in (path, path / "checkpoint"):
        if complete := [info for info in list_checkpoints(inside) if info.complete]:
            raise UserError(
                f"checkpoint.initial_load_path: {path} is not a checkpoint but holds some; "
                f"name one of them, for example {complete[-1].path}"
            )
    fault = "is not complete: its save was cut short" if _NAME.fullmatch(path.name) else "is not a checkpoint"
    raise UserError(f"checkpoint.initial_load_path: {path} {fault} (there is no {_MARKER} in it); name another one")


def start_partial(folder: Path, step: int) -> Path:
    """An empty folder to write the checkpoint of `step` into, after what an earlier attempt left is removed."""
    discard_incomplete(folder, step)
    partial = folder / f"step-{step}.partial"
    partial.mkdir(parents=True)
    return partial


def commit(partial: Path, marker: Marker) -> Path:
    """Turn the fully written folder `step-N.partial` into the complete checkpoint `step-N`; return its path.

    A checkpoint of the same step, which a run that resumed from an earlier one left behind, is replaced.
    """
    # Written before the rename, so that a full disk shows while a checkpoint to be replaced is still there.
    with open(partial / f"{_MARKER}.tmp", "w") as file:
        json.dump(dataclasses.asdict(marker), file)
        file.flush()
        os.fsync(file.fileno())
    final = partial.with_suffix("")
    if final.exists():
        remove_checkpoint(final)
    partial.rename(final)
    (final / f"{_MARKER}.tmp").replace(final / _MARKER)
    for changed in (final, final.parent):
        _sync_folder(changed)
    return final


def prune(folder: Path, step: int, keep_latest_k: int) -> None:
    """Keep `keep_latest_k` (0: all) of the complete checkpoints up to `step`, the one just saved, and remove the rest.

    The newest full one always stays, since without it the run could not be continued. Those of later steps stay
    too: a run that went back to an earlier step replaces them as it reaches them.
    """
    complete = [info for info in list_checkpoints(folder) if info.complete and info.step <= step]
    full = [info for info in complete if info.kind == "full"]
    for info in complete[:-keep_latest_k] if keep_latest_k else []:
        if info not in full[-1:]:
            remove_checkpoint(info.path)


def discard_incomplete(folder: Path, step: int) -> None:
    """Remove what an unfinished save of `step` left in `folder`; a complete checkpoint stays."""
    for info in list_checkpoints(folder):
        if info.step == step and not info.complete:
            shutil.rmtree(info.path)


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint, its marker first: cut short, what remains does not look like a checkpoint."""
    (path / _MARKER).unlink(missing_ok=True)
    shutil.rmtree(path)


def _read_marker(path: Path) -> Marker | None:
    if not (path / _MARKER).is_file():
        return None
    try:
        content = json.loads((path / _MARKER).read_text())
    except ValueError as error:
        raise UserError(
            f"{path / _MARKER} is damaged ({error}); load another checkpoint, or remove this one"
        ) from error
    if content["format_version"] != _FORMAT_VERSION:
        raise UserError(
            f"{path} is a checkpoint in layout {content['format_version']}, and this version reads "
            f"layout {_FORMAT_VERSION}; use the version of torchtitan that wrote it"
        )
    return Marker(**content)


def _sync_folder(path: Path) -> None:
    """Make a rename inside `path` outlast a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
