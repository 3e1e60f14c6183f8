"""Replacements of a file by a link, a pipe, a folder or nothing, and forged checkpoints."""

import dataclasses
import os
import random
from collections.abc import Callable
from pathlib import Path

from torchtitan.components.checkpoint.filesystem import LocalFolder
from torchtitan.components.checkpoint.manifest import (
    MANIFEST,
    MARKER,
    marker_content,
    read_marker,
    write_manifest,
)
from torchtitan.components.checkpoint.ranks import Ranks

Replacement = Callable[[Path, random.Random], None]


def link_to_secret(path: Path, generator: random.Random) -> None:
    """A link to a file outside the folder."""
    path.symlink_to(Path("secret.txt").absolute())


def dangling_link(path: Path, generator: random.Random) -> None:
    """A link to nothing."""
    path.symlink_to("nowhere")


def link_to_itself(path: Path, generator: random.Random) -> None:
    """A link to itself."""
    path.symlink_to(path.name)


def endless(path: Path, generator: random.Random) -> None:
    """A link to a device that never ends."""
    path.symlink_to("/dev/zero")


def pipe(path: Path, generator: random.Random) -> None:
    """A named pipe that nobody writes to."""
    os.mkfifo(path)


def folder(path: Path, generator: random.Random) -> None:
    """A folder of the same name."""
    path.mkdir()


def missing(path: Path, generator: random.Random) -> None:
    """Nothing."""


REPLACEMENTS: tuple[Replacement, ...] = (
    link_to_secret,
    dangling_link,
    link_to_itself,
    endless,
    pipe,
    folder,
    missing,
)


def forge(checkpoint: Path) -> None:
    """Give a checkpoint a manifest and a marker that agree with the files as they are now."""
    folder = LocalFolder(checkpoint)
    marker = read_marker(folder)
    assert marker is not None
    for name in (MARKER, MANIFEST):
        (checkpoint / name).unlink()
    digest = write_manifest(folder, Ranks())
    (checkpoint / MARKER).write_bytes(marker_content(dataclasses.replace(marker, manifest=digest)))
