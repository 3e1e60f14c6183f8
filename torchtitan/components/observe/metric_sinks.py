"""Destinations of a run's metrics on disk: `metrics.jsonl`, TensorBoard."""

import errno
import json
import math
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

from torchtitan.tools import durable
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import parse_json
from torchtitan.tools.logging import logger


class Sink(ABC):
    """Destination of metrics. A sink is opened with the last completed step. For a new run (step
    0), it sets older data aside; for a resumed run, it drops the data of later steps."""

    @abstractmethod
    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the metrics of `step` by name, in step order; multiple calls may have the same
        step. Raise `OSError` if they cannot be written. It is reported once and training continues;
        nothing else is caught."""

    def sync(self) -> None:  # noqa: B027 (most sinks have nothing to do)
        """Flush all written metrics to disk before a checkpoint is saved. Raise `OSError` like
        `write`."""

    @abstractmethod
    def close(self) -> None:
        """Write the remaining metrics. Raise `OSError` like `write`."""


class JsonLines(Sink):
    """One JSON object per line: `step`, then the numbers in full precision; NaN and infinity, not
    valid JSON, become null. Each line is in the file when `write` returns; a partially written line
    is removed. An infinite `step` keeps all complete lines."""

    def __init__(self, path: Path, step: float):
        if path.exists():
            if step == 0:
                set_aside(path)
            else:
                _drop_lines_after(path, step)
        self._file = open(path, "ab", buffering=0)
        durable.sync_folder(path.parent)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.append(
            {"step": step}
            | {name: value if math.isfinite(value) else None for name, value in values.items()}
        )

    def append(self, document: Mapping[str, object]) -> None:
        """Write a line of JSON-serializable values, including its `step`. Raise `OSError` like
        `write`."""
        line = (json.dumps(document) + "\n").encode()
        end = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._file.name)
        except OSError:
            self._file.truncate(end)
            raise

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        with self._file:
            self.sync()


class TensorBoard(Sink):
    """Scalars under their names in `metrics.jsonl`, in TensorBoard's single precision."""

    def __init__(self, folder: Path, step: int):
        from torch.utils.tensorboard import SummaryWriter

        if step == 0 and folder.exists():
            set_aside(folder)
        self._writer = SummaryWriter(str(folder), purge_step=step + 1 if step else None)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # show the values now, and raise an error at the step that caused it

    def close(self) -> None:
        self._writer.close()


def set_aside(path: Path) -> None:
    """Rename `path`, written by an earlier run, to the next free of `name-1`, `name-2`, ..."""
    aside = path.rename(_free_name(path))
    logger.info(f"{path} is from an earlier run: renamed to {aside.name}")


def _free_name(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
        number += 1
    return aside


def _drop_lines_after(path: Path, step: float) -> None:
    """Keep the complete lines up to `step`; a killed run may truncate its last line. Copy a file
    with other damaged lines."""
    if not path.is_file():
        raise UserError(f"'{path}' is not a regular file; remove it")
    n_damaged = 0
    with (
        durable.in_place_of(path) as partial,
        open(path, "rb") as lines,
        open(partial, "wb") as kept,
    ):
        for line in lines:
            line_step = step_of(line)
            if line_step is not None and line_step <= step:
                kept.write(line.rstrip(b"\n") + b"\n")
            n_damaged += line_step is None and line.endswith(b"\n")
        if n_damaged:
            aside = _free_name(path)
            shutil.copyfile(path, aside)
            logger.warning(
                f"{path}: skipped {n_damaged} damaged lines; the original is {aside.name}"
            )


def step_of(line: bytes) -> int | None:
    """Return the step of a line of `JsonLines`; None if the line is damaged."""
    try:
        content = parse_json(line, "the line")
    except UserError:
        return None
    step = content.get("step") if isinstance(content, dict) else None
    return step if type(step) is int else None
