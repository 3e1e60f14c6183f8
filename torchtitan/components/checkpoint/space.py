"""Compares the size of upcoming checkpoints with the free disk space."""

import os
import shutil
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchtitan.components.checkpoint.filesystem import Folder, LocalFolder
from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.distributed.initialize import local_part
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger
from torchtitan.tools.sharded import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_SMALL = 1024
"""Bytes of a tensor that is not counted if it is not sharded, such as the step of a moment."""

_UNITS = {"GiB": 2**30, "MiB": 2**20}


def total_bytes(
    states: Mapping[str, Mapping[str, Tensor | str]],
    ranks: Ranks,
    types: Mapping[str, Mapping[str, torch.dtype]] | None = None,
) -> int:
    """Return the size of a checkpoint of `states`; each rank has a part. `types`: the types of
    tensors by state and name, if they are converted. All ranks call this together."""
    shares, whole = 0.0, dict[str, int]()
    for name, entries in states.items():
        for key, value in entries.items():
            n_bytes = local_part(value).nbytes if isinstance(value, Tensor) else len(value)
            if types and isinstance(value, Tensor):
                n_bytes = n_bytes * types[name][key].itemsize // value.dtype.itemsize
            if is_dtensor(value):
                shares += n_bytes / _replicas(value)
            elif n_bytes >= _SMALL:
                whole[f"{name}.{key}"] = n_bytes
    gathered = ranks.gather((shares, whole))
    saved_once = {key: n_bytes for _, of_rank in gathered for key, n_bytes in of_rank.items()}
    return int(sum(share for share, _ in gathered)) + sum(saved_once.values())


def _replicas(value: "DTensor") -> int:
    mesh = value.device_mesh
    return prod(
        mesh.size(dim) for dim, placement in enumerate(value.placements) if placement.is_replicate()
    )


def free_bytes(folder: Folder) -> int | None:
    """Return the free space on the disk of a folder, which may not exist yet; None for a store
    behind a URL."""
    if not isinstance(folder, LocalFolder):
        return None
    path = Path(os.path.abspath(folder.path))
    existing = next(outer for outer in (path, *path.parents) if outer.exists())
    return shutil.disk_usage(existing).free


def check_free(folder: Folder, first: int, all_to_come: int, keep_latest_k: int) -> None:
    """Compare the next checkpoint, and the peak size of all upcoming ones, with the free space.
    Raise `UserError` if the next one does not fit; log a warning if the others do not."""
    free = free_bytes(folder)
    if free is None:
        return
    if first > free:
        raise UserError(
            f"--checkpoint.folder: a checkpoint takes {in_units(first)}, but the disk of {folder} "
            f"has only {in_units(free)} free; free space there, or name a folder on another disk"
        )
    if all_to_come > free:
        logger.warning(
            f"upcoming checkpoints take up to {in_units(all_to_come)} ({in_units(first)} each), "
            f"but the disk of {folder} has only {in_units(free)} free: saves will fail; free space "
            f"there, or lower --checkpoint.keep_latest_k ({keep_latest_k})"
        )


def in_units(n_bytes: int) -> str:
    """Return a size as text, such as `1.50 GiB`."""
    unit = "GiB" if n_bytes >= _UNITS["GiB"] else "MiB"
    return f"{n_bytes / _UNITS[unit]:,.2f} {unit}"
