"""`events.jsonl`: what happened to a run, over all its sessions (docs/report.md)."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torchtitan.components.metric_sinks import JsonLines
from torchtitan.tools.errors import UserError, os_errors_as
from torchtitan.tools.files import parse_json, regular_file

EVENTS = "events.jsonl"

Event = Mapping[str, Any]
"""`event` (its kind), `time` (seconds since the epoch), `step`, `seconds` in each phase of the session so far, and the
values of its kind."""

_TYPES: dict[str, type] = {"event": str, "time": float, "step": int, "seconds": dict}
_TYPES_OF_KIND: dict[str, dict[str, type]] = {"start": {"begun": float}, "returned": {"to": int}}


def open_events(folder: Path, step: int, command: str) -> JsonLines:
    """Open the file of a run to append events after `step`. At step 0, an earlier run's file is moved aside, unless
    that run had the same command and did not end, as after a crash before the first checkpoint."""
    events, _ = read_events(folder)
    commands = [event.get("command") for event in events if event["event"] == "start"]
    continues = step > 0 or commands[-1:] == [command] and events[-1]["event"] != "end"
    return JsonLines(folder / EVENTS, math.inf if continues else 0)


def read_events(folder: Path) -> tuple[list[Event], list[int]]:
    """Return the events of a run's folder in order, from the first start on, and the numbers of broken lines; nothing
    if there is no file."""
    events, broken = read_json_lines(folder / EVENTS, _is_event)
    return [*itertools.dropwhile(lambda event: event["event"] != "start", events)], broken


def _is_event(line: Event) -> bool:
    types = _TYPES | _TYPES_OF_KIND.get(str(line.get("event")), {})
    has_types = all(type(line.get(name)) is expected for name, expected in types.items())
    return has_types and all(type(value) is float for value in line["seconds"].values())


def read_json_lines(path: Path, usable: Callable[[dict[str, Any]], bool]) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the usable objects of a file of JSON lines, and the numbers of the other lines; see `json_lines`."""
    lines = list(json_lines(path, usable))
    broken = [number for number, line in enumerate(lines, start=1) if line is None]
    return [line for line in lines if line is not None], broken


def json_lines(path: Path, usable: Callable[[dict[str, Any]], bool]) -> Iterator[dict[str, Any] | None]:
    """Yield the object of each line of a file, None for lines that are not usable; nothing if the file is absent. Raise
    `UserError` if it cannot be read."""
    if not path.exists():
        return
    with os_errors_as(f"'{path}' cannot be read"), regular_file(path).open("rb") as file:
        for line in file:
            try:
                value = parse_json(line, "the line")
            except UserError:
                value = None
            yield value if isinstance(value, dict) and usable(value) else None
