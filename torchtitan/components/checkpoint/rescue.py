"""Rescues a run whose last save failed: saves its state or weights elsewhere."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from functools import partial

from torchtitan.components.checkpoint import catalog
from torchtitan.components.checkpoint.config import CheckpointConfig
from torchtitan.components.checkpoint.filesystem import Folder
from torchtitan.components.checkpoint.manifest import Kind, Marker
from torchtitan.components.checkpoint.saver import CheckpointSaveError, Saver
from torchtitan.components.checkpoint.state import Entries
from torchtitan.tools.errors import UserError
from torchtitan.tools.process import COMMAND_VARIABLE

WEIGHTS_ONLY = "weights_only"
"""Folder inside `--checkpoint.folder` for the weights of a step whose full checkpoint did not fit
on the disk. Runs do not resume from it."""


def save_elsewhere(
    saver: Saver,
    fallback: Folder | None,
    marker: Marker,
    encode: Callable[[Kind], Mapping[str, Entries]],
) -> CheckpointSaveError:
    """Save the step of a failed last save in the folder `fallback`, if any, else its weights alone
    in a third of the space. Return an error that names the saved files, and how to repeat the rest.
    All ranks call this together."""
    failure, saver.failure = saver.failure, ""
    places: list[tuple[Folder, Kind]] = [(fallback, marker.kind)] if fallback else []
    if marker.kind == "full":
        places += [
            (folder / WEIGHTS_ONLY, "model_only") for folder in (saver.folder, fallback) if folder
        ]
    for folder, kind in places:
        if saver.ranks.broadcast_from_rank0(partial(_is_taken, folder, marker)):
            continue
        # A model-only checkpoint contains all weights, even if the full one omits some.
        changed = dataclasses.replace(marker, kind=kind)
        if kind != "full":
            changed = dataclasses.replace(changed, base_model="", base_digest="")
        if not saver.write_to(folder, changed, encode(kind)):
            path = folder / f"step-{marker.step}"
            return CheckpointSaveError(f"{failure}; {_description(path, kind, marker.kind, saver)}")
    return CheckpointSaveError(f"{failure}; nothing of this step is saved. {_repetition(saver)}")


def check_fallback(
    config: CheckpointConfig,
    folder: Folder,
    fallback: Folder | None,
    identity: Mapping[str, object],
) -> None:
    """Raise `UserError` if the folder `fallback` has a newer checkpoint of this run than `folder`.
    Otherwise the run would silently repeat steps."""
    if fallback is None or config.load_step != -1:
        return
    saved = [
        info
        for info in catalog.list_checkpoints(fallback)
        if info.marker and info.marker.identity == identity
    ]
    known = [info.step for info in catalog.list_checkpoints(folder) if info.is_complete]
    newer = [info for info in saved if info.step > max(known, default=0)]
    if newer:
        raise UserError(
            f"--checkpoint.fallback_folder: {newer[-1].path} is a newer checkpoint of this run "
            f"than those in {folder}; move it there to continue from it, or remove it"
        )


def _is_taken(folder: Folder, marker: Marker) -> bool:
    """Return whether a folder already has this step from another run, or cannot be read."""
    try:
        existing = [
            info.marker for info in catalog.list_checkpoints(folder) if info.step == marker.step
        ]
    except OSError:
        return True
    return any(one is not None and one.identity != marker.identity for one in existing)


def _description(path: Folder, kind: Kind, wanted: Kind, saver: Saver) -> str:
    if kind != wanted:
        return (
            f"its weights alone are saved in {path}, for other commands and new runs. "
            f"{_repetition(saver)}"
        )
    return f"it is saved in {path} instead; move that folder to {saver.folder}"


def _repetition(saver: Saver) -> str:
    def newest() -> int:
        return max(
            (one.step for one in catalog.list_checkpoints(saver.folder) if one.kind == "full"),
            default=0,
        )

    step = saver.ranks.broadcast_from_rank0(newest)
    command = os.environ.get(COMMAND_VARIABLE, "the same command")
    return f"To repeat the steps after step {step}, free space and run: {command}"
