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
from typing import Any, Literal, get_args

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


_MARKER_TYPES = {"step": int, "kind": str, "world_size": int, "torch_version": str, "format_version": int}


@dataclasses.dataclass(frozen=True)
class CheckpointInfo:
    """One folder of the form `step-N` or `step-N.partial`."""

    step: int
    """The step in the folder's name."""

    path: Path

    marker: Marker | None
    """None: the checkpoint is not complete and cannot be loaded."""

    fault: str = ""
    """Why it is not complete although there is a marker; the message names the marker or the folder."""

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

    One whose marker is damaged, or is that of a layout that this version does not know, is not complete.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [_inspect(step, path) for step, path in sorted(found)]


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
    fault = next((f"cannot be loaded: {info.fault}" for info in same_step if info.fault), fault)
    steps = [str(info.step) for info in checkpoints if info.kind == "full"]
    raise UserError(f"checkpoint.load_step: step {step} in {folder} {fault}; complete: {', '.join(steps) or 'none'}")


def newest_full(folder: Path) -> CheckpointInfo | None:
    """The complete, full checkpoint of the highest step in `folder`, if there is one."""
    full = [info for info in list_checkpoints(folder) if info.kind == "full"]
    return full[-1] if full else None


def open_checkpoint(path: Path) -> CheckpointInfo:
    """The complete checkpoint that is the folder `path`, whatever the folder's name.

    Raises:
        UserError: where `path` is no folder, no checkpoint, an incomplete one or one with a damaged marker.
    """
    if not path.is_dir():
        raise UserError(f"checkpoint.initial_load_path: {path} is not a folder; name the step-N folder of a checkpoint")
    try:
        marker = _read_marker(path)
    except _MarkerError as error:
        raise UserError(f"checkpoint.initial_load_path: {error}; name another one") from error
    if marker:
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


class _MarkerError(Exception):
    """The marker of a checkpoint cannot be used; the message says which and why."""


def _inspect(step: int, path: Path) -> CheckpointInfo:
    try:
        return CheckpointInfo(step, path, _read_marker(path))
    except _MarkerError as error:
        return CheckpointInfo(step, path, None, fault=str(error))


def _read_marker(path: Path) -> Marker | None:
    """The marker in the folder `path`, None where there is none; raises `_MarkerError` for one that cannot be used."""
    file = path / _MARKER
    if not file.is_file():
        return None
    try:
        content: Any = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise _MarkerError(f"{file} is damaged ({error})") from error
    version = content.get("format_version", _FORMAT_VERSION) if isinstance(content, dict) else _FORMAT_VERSION
    if version != _FORMAT_VERSION:
        raise _MarkerError(
            f"{path} is in layout {version}, and this version of torchtitan reads layout {_FORMAT_VERSION}; "
            "it can be loaded by the version that wrote it"
        )
    if not _is_marker(content):
        raise _MarkerError(f"{file} is damaged (its content is not that of a marker)")
    return Marker(**content)


def _is_marker(content: Any) -> bool:
    return (
        isinstance(content, dict)
        and {name: type(value) for name, value in content.items()} == _MARKER_TYPES
        and content["kind"] in get_args(Kind)
    )


def _sync_folder(path: Path) -> None:
    """Make a rename inside `path` outlast a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
