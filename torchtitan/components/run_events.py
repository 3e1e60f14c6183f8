"""`events.jsonl`: what happened to a run, over all its sessions, as JSON lines that are only ever appended."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtitan.components.metric_sinks import set_aside
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import parse_json, regular_file
from torchtitan.tools.logging import logger

EVENTS = "events.jsonl"

Event = Mapping[str, Any]
"""`event` (its kind), `time` (seconds since the epoch), `step`, and the values of its kind (docs/report.md)."""


class EventLog:
    """Appends events to the file of a run.

    A session that starts at step 0 continues the file only if the last one has the same command and did not end, as
    after a crash before the first checkpoint; otherwise the file is of an earlier run and is moved aside. If a line
    cannot be written, this is logged once and the run continues.
    """

    def __init__(self, folder: Path, step: int, command: str):
        self._path = folder / EVENTS
        self._failed = False
        if step == 0 and self._path.exists() and not _is_interrupted(read_json_lines(self._path)[0], command):
            set_aside(self._path)
        self._file = open(self._path, "ab", buffering=0)
        if self._file.tell() and not self._path.read_bytes().endswith(b"\n"):  # its writer was killed
            self._file.write(b"\n")

    def write(self, event: str, step: int, **values: Any) -> None:
        """Append an event that happens now."""
        try:
            self._file.write(f"{json.dumps({'event': event, 'time': time.time(), 'step': step, **values})}\n".encode())
        except OSError as error:
            if not self._failed:
                logger.warning("'%s' cannot be written: %s; training continues", self._path, error.strerror)
            self._failed = True

    def read(self) -> list[Event]:
        """Return all events of the run so far."""
        return events_in(self._path.parent)

    def close(self) -> None:
        self._file.close()


def _is_interrupted(events: Sequence[Event], command: str) -> bool:
    starts = [event for event in events if event.get("event") == "start"]
    return bool(starts) and starts[-1].get("command") == command and events[-1].get("event") != "end"


def events_in(folder: Path) -> list[Event]:
    """Return the events of a run's folder in order, from the first start on; none if there is no file."""
    events: list[Event] = [event for event in read_json_lines(folder / EVENTS)[0] if _is_event(event)]
    first = next((index for index, event in enumerate(events) if event["event"] == "start"), len(events))
    return events[first:]


_VALUES: dict[str, dict[str, type]] = {
    "start": {"begun": float, "seconds": dict},
    "progress": {"seconds": dict},
    "straggler": {"rank": int, "host": str, "phase": str, "seconds_more": float},
    "skipped": {"reason": str},
    "returned": {"to": int},
    "save": {"blocked": float},
    "end": {"reason": str, "seconds": dict},
}
"""Kind of event → its values that readers rely on."""


def _is_event(line: Mapping[str, Any]) -> bool:
    kind = line.get("event")
    expected = {"time": float, "step": int, **(_VALUES.get(kind, {}) if isinstance(kind, str) else {"event": str})}
    if not all(type(line.get(name)) is wanted for name, wanted in expected.items()):
        return False
    seconds = line.get("seconds", {})
    return isinstance(seconds, dict) and all(type(value) is float for value in seconds.values())


def read_json_lines(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the objects of a file of JSON lines, and the numbers of the lines that hold none; nothing if the file is
    absent. Raise `UserError` if it cannot be read."""
    try:
        content = regular_file(path).read_bytes() if path.exists() else b""
    except OSError as error:
        raise UserError(f"'{path}' cannot be read: {error.strerror}") from error
    objects, damaged = [], []
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            value = parse_json(line, "the line")
        except UserError:
            value = None
        if isinstance(value, dict):
            objects.append(value)
        else:
            damaged.append(number)
    return objects, damaged
