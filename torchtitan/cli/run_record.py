"""The record of a run in its folder, which is only read; the run may be in progress."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from torchtitan.components.checkpoint.catalog import CheckpointInfo, list_checkpoints
from torchtitan.components.checkpoint.filesystem import is_url, resolve_folder
from torchtitan.components.goodput import Goodput, goodput
from torchtitan.components.run_events import EVENTS, Event, events_in, read_json_lines
from torchtitan.config.configurable import leaves
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import read_object, regular_file

METRICS, COMPLETIONS, CONFIG, DRY_RUN = "metrics.jsonl", "completions.jsonl", "config.yaml", "dry_run.json"

Line = Mapping[str, float | None]
Points = list[tuple[int, float]]

_MOST_POINTS = 1000


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The record of one run."""

    name: str
    lines: list[Line]
    """Lines of metrics, in order; each has a `step`."""
    events: list[Event]
    config: dict[str, Any] = field(default_factory=dict)
    """Options by their dotted names."""
    completions: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[CheckpointInfo] = field(default_factory=list)
    dry_run: dict[str, Any] = field(default_factory=dict)
    """Predictions, if a dry run had the same dump folder."""
    broken: dict[str, list[int]] = field(default_factory=dict)
    """Numbers of the lines that were left out, by file."""

    @property
    def goodput(self) -> Goodput | None:
        return goodput(self.events)

    @property
    def start(self) -> Event:
        """The start of the last session; empty if it is unknown."""
        return next((event for event in reversed(self.events) if event["event"] == "start"), {})

    @property
    def status(self) -> str:
        """The end of the run. A run without one is in progress or was killed."""
        last = self.events[-1] if self.events else {}
        return str(last.get("reason", "")) if last.get("event") == "end" else "no end recorded"

    def last(self, key: str) -> float | None:
        """Return the last value of a metric."""
        return next((line[key] for line in reversed(self.lines) if line.get(key) is not None), None)

    def values(self, key: str) -> list[float]:
        """Return all values of a metric."""
        return [value for _, value in self.points(key)]

    def points(self, key: str) -> Points:
        """Return the steps and values of a metric."""
        return [(int(line["step"] or 0), value) for line in self.lines if (value := line.get(key)) is not None]

    def curve(self, key: str) -> Points:
        """Return the points of a metric; of many points, the lowest and highest in equally many per bucket."""
        points = self.points(key)
        size = -(-2 * len(points) // _MOST_POINTS)
        if size <= 2:
            return points
        buckets = [points[start : start + size] for start in range(0, len(points), size)]
        extremes = [{min(bucket, key=_value), max(bucket, key=_value)} for bucket in buckets]
        return sorted({points[0], points[-1]}.union(*extremes))


def _value(point: tuple[int, float]) -> float:
    return point[1]


def read_run(folder: Path) -> RunRecord:
    """Read the folder of a run. Raise `UserError` if it holds no metrics, or a file cannot be read."""
    if not folder.is_dir():
        raise UserError(f"'{folder}' is not a folder; name the dump folder of a run (--dump_folder)")
    broken: dict[str, list[int]] = {}

    def read_lines(name: str) -> list[dict[str, Any]]:
        found, damaged = read_json_lines(folder / name)
        if damaged:
            broken[name] = damaged
        return found

    numbered = list(enumerate(read_lines(METRICS), start=1))
    lines: list[Line] = [line for _, line in numbered if _is_metrics(line)]
    if unusable := [number for number, line in numbered if not _is_metrics(line)]:
        broken[f"{METRICS}, objects that are no metrics"] = unusable
    if not lines:
        raise UserError(f"'{folder}' holds no metrics: {METRICS} is {_state(folder / METRICS)}; name a run's folder")
    read_lines(EVENTS)  # for the broken ones
    config = _read_config(folder / CONFIG)
    checkpoints = str(config.get("checkpoint.folder", "checkpoint"))
    return RunRecord(
        name=folder.resolve().name,
        lines=lines,
        events=events_in(folder),
        config=config,
        completions=read_lines(COMPLETIONS),
        checkpoints=[] if is_url(checkpoints) else list_checkpoints(resolve_folder(str(folder), checkpoints)),
        dry_run=read_object(folder / DRY_RUN),
        broken=broken,
    )


def _is_metrics(line: Mapping[str, Any]) -> bool:
    return type(line.get("step")) is int and all(type(value) in (int, float, type(None)) for value in line.values())


def _state(path: Path) -> str:
    if not path.exists():
        return "missing"
    return "without a usable line" if path.stat().st_size else "empty"


def _read_config(path: Path) -> dict[str, Any]:
    try:
        document = yaml.safe_load(regular_file(path).read_text()) if path.exists() else {}
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise UserError(f"'{path}' cannot be read: {error}") from error
    return leaves(document) if isinstance(document, dict) else {}
