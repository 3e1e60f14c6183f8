"""`events.jsonl`: what happened to a run, over all its sessions (docs/report.md)."""

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torchtitan.components.metric_sinks import set_aside
from torchtitan.tools import durable
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import parse_json, regular_file
from torchtitan.tools.logging import logger

EVENTS = "events.jsonl"

Event = Mapping[str, Any]
"""`event` (its kind), `time` (seconds since the epoch), `step`, and the values of its kind."""


class EventLog:
    """Appends events to the file of a run. A session that starts at step 0 moves an earlier run's file aside, unless
    that run had the same command and did not end, as after a crash before the first checkpoint."""

    def __init__(self, folder: Path, step: int, command: str):
        path, events = folder / EVENTS, events_in(folder)
        commands = [event.get("command") for event in events if event["event"] == "start"]
        if step == 0 and path.exists() and (commands[-1:] != [command] or events[-1]["event"] == "end"):
            set_aside(path)
        self._file = open(path, "ab", buffering=0)
        durable.sync_folder(folder)
        if self._file.tell() and not path.read_bytes().endswith(b"\n"):  # its writer was killed
            self._file.write(b"\n")

    def write(self, event: str, step: int, **values: Any) -> None:
        """Append an event that happens now. Log an error in writing, and write no more."""
        line = json.dumps({"event": event, "time": time.time(), "step": step, **values})
        self._attempt(lambda: self._file.write(f"{line}\n".encode()))

    def sync(self) -> None:
        """Sync the events to disk."""
        self._attempt(lambda: os.fsync(self._file.fileno()))

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            if not self._file.closed:
                action()
        except OSError as error:
            logger.warning("'%s' cannot be written: %s; training continues", self._file.name, error.strerror)
            self._file.close()

    def close(self) -> None:
        self.sync()
        self._file.close()


def events_in(folder: Path) -> list[Event]:
    """Return the events of a run's folder in order, from the first start on; none if there is no file."""
    events = read_json_lines(folder / EVENTS, is_event)[0]
    first = next((index for index, event in enumerate(events) if event["event"] == "start"), len(events))
    return list[Event](events[first:])


def is_event(line: Event) -> bool:
    """Return whether a line has all that an event needs."""
    begun, seconds = (line.get(name, default) for name, default in (("begun", 0.0), ("seconds", {})))
    if line.get("event") == "start" and not {"begun", "seconds"} <= line.keys() or not isinstance(seconds, dict):
        return False
    numbers = [begun, line.get("time"), *seconds.values()]
    return (type(line.get("event")), type(line.get("step"))) == (str, int) and {*map(type, numbers)} == {float}


def read_json_lines(path: Path, usable: Callable[[dict[str, Any]], bool]) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the usable objects of a file of JSON lines, and the numbers of the other lines; nothing if the file is
    absent. Raise `UserError` if it cannot be read."""
    try:
        content = regular_file(path).read_bytes() if path.exists() else b""
    except OSError as error:
        raise UserError(f"'{path}' cannot be read: {error.strerror}") from error
    objects, broken = [], []
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            value = parse_json(line, "the line")
        except UserError:
            value = None
        if isinstance(value, dict) and usable(value):
            objects.append(value)
        else:
            broken.append(number)
    return objects, broken
