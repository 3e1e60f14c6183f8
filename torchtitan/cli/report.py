"""`torchtitan report`: describe one or several runs as a self-contained HTML page or as text."""

import base64
import hashlib
import itertools
import math
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan.cli.model_options import run_command
from torchtitan.cli.pages import TEMPLATES, render
from torchtitan.components.checkpoint.catalog import CheckpointInfo, list_checkpoints
from torchtitan.components.checkpoint.filesystem import is_url, resolve_folder
from torchtitan.components.observe.run_events import (
    EVENTS,
    Event,
    describe_goodput,
    goodput,
    mean_phases,
    read_events,
    shares,
)
from torchtitan.components.observe.run_files import (
    COMPLETIONS,
    FORECAST,
    FORESIGHT,
    METRICS,
    TEXT_SAMPLES,
)
from torchtitan.config.configurable import leaves
from torchtitan.config.yaml_files import read_config_file
from torchtitan.tools import durable
from torchtitan.tools.errors import UserError, in_words, os_errors_as
from torchtitan.tools.files import MOST_BROKEN_LINES, json_lines, read_object
from torchtitan.tools.logging import presentable, print_error
from torchtitan.tools.parser import Parser
from torchtitan.tools.progress import sparkline
from torchtitan.tools.tables import open_console, print_table

SAMPLES = (COMPLETIONS, TEXT_SAMPLES)
_MOST_POINTS = 1000
_MOST_INCIDENTS = 500
_UNITS = {
    "step_time": "s",
    "tflops": "TFLOP/s per device",
    "mfu": "%",
    "memory_gib": "GiB",
    "data_loading_fraction": "0 to 1",
    "image_token_fraction": "0 to 1",
    "validation_bits_per_byte": "bits per byte",
    "validation_time": "s",
}
"""Metric, also of a named set, → its unit on the page. A loss has the unit of its run."""

_LOSS, _VALIDATION_LOSS = "loss", "validation_loss"
_UNLISTED = {"event", "time", "step", "seconds"}


class RunRecord:
    """Contents of the folder of a run, which may be in progress. Raises `UserError` if it has no
    metrics or is unreadable."""

    def __init__(self, folder: Path):
        self.name = str(folder)
        self.problems: list[str] = []
        """Messages about broken files, and broken lines of files, that the report skips."""
        self.lines = self._lines(METRICS, partial(json_lines, folder / METRICS, is_metrics))
        if not self.lines:
            raise UserError(
                f"'{folder}' has no {METRICS} with metrics; name the dump folder of a run "
                "(--dump_folder)"
            )
        self.events = self._lines(EVENTS, partial(read_events, folder))
        self.start: Event = next(
            (event for event in reversed(self.events) if event["event"] == "start"), {}
        )
        """The start of the last session; empty if unknown."""
        self.goodput = goodput(self.events)
        self.samples = [
            line
            for name in SAMPLES
            for line in self._lines(name, partial(json_lines, folder / name, bool))[-12:]
        ]
        self.config = leaves(
            self._values(folder / "config.yaml", lambda path: read_config_file(path, f"'{path}'"))
        )
        saved = str(self.config.get("checkpoint.folder", "checkpoint"))
        self.checkpoints = [] if is_url(saved) else self._list_checkpoints(folder, saved)
        self.foresight = self._values(folder / FORESIGHT, read_object)
        self.forecast = self._values(folder / FORECAST, read_object)

    def _lines(self, file: str, read: Callable[[list[int]], Iterable[Event]]) -> list[Event]:
        broken: list[int] = []
        lines = [*read(broken)]
        if broken:
            shown = ", ".join(map(str, broken[:5])) + (", ..." if len(broken) > 5 else "")
            rest = (
                f", and all after line {broken[-1]:,}" if len(broken) == MOST_BROKEN_LINES else ""
            )
            self.problems.append(f"{self.name}: {file}: skipped broken lines: {shown}{rest}")
        return lines

    def _values(self, path: Path, read: Callable[[Path], dict[str, object]]) -> dict[str, object]:
        try:
            return read(path) if path.exists() else {}
        except UserError as error:
            self.problems.append(f"{error}; the report skips it")
            return {}

    def _list_checkpoints(self, folder: Path, saved: str) -> list[CheckpointInfo]:
        try:
            return list_checkpoints(resolve_folder(str(folder), saved))
        except (OSError, ValueError) as error:  # no name of a folder, or one that cannot be read
            self.problems.append(
                f"{self.name}: skipped checkpoint.folder of config.yaml: {in_words(error)}"
            )
            return []

    @property
    def model(self) -> str:
        """Module, configuration, size and trained parameters; empty if unknown."""
        facts = [" ".join(str(self.config.get(key) or "") for key in ("module", "config")).strip()]
        if type(size := self.start.get("parameters")) is int:
            facts.append(f"{size:,} parameters")
        if type(trained := self.start.get("trained_parameters")) is int:
            facts.append(f"{trained:,} trained")
        return ", ".join(fact for fact in facts if fact)

    def points(self, key: str) -> list[tuple[int, float]]:
        """Return steps and values of a metric."""
        return points_of(self.lines, key)

    def curve(self, key: str) -> list[tuple[int, float]]:
        """Return the points of a metric, thinned out."""
        return thinned(self.points(key))


def thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return steps and values of a curve; of many, the lowest and the highest value in each of
    equal parts."""
    size = max(1, -(-2 * len(points) // _MOST_POINTS))
    parts = [
        sorted(points[i : i + size], key=lambda point: point[1])
        for i in range(0, len(points), size)
    ]
    return sorted({*points[:1], *points[-1:], *(part[end] for part in parts for end in (0, -1))})


def is_metrics(line: Mapping[str, Any]) -> bool:
    """Return whether a line of a run's metrics has a step and numbers only."""
    step, numbers = line.get("step"), [value for value in line.values() if value is not None]
    is_step = type(step) is int and 0 <= step < 2**63
    return is_step and all(type(n) in (int, float) and abs(n) < 1e100 for n in numbers)


class Section(NamedTuple):
    """A table of text. A folded one is shown on request on the page, and not on the terminal."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    folded: bool = False


def sections(runs: Sequence[RunRecord]) -> list[Section]:
    """Return the tables of the report, without empty ones."""

    def compared(
        title: str, of_run: Callable[[RunRecord], Mapping[str, object]], folded: bool = False
    ) -> Section:
        facts = [of_run(run) for run in runs]
        rows = [
            [key, *(_text(of.get(key)) for of in facts)]
            for key in dict.fromkeys(itertools.chain(*facts))
        ]
        return Section(
            title, ("", *(run.name for run in runs)), [row for row in rows if any(row[1:])], folded
        )

    options = compared("Configuration", lambda run: run.config, folded=True)
    sampled = ("step", "reward", "prompt", "completion")
    samples = [
        [run.name, *(_text(row.get(key)) for key in sampled)] for run in runs for row in run.samples
    ]
    found = [
        compared("Summary", _summary),
        compared("Where the time went", lambda run: shares(run.goodput)),
        compared("Time of a step by phase", lambda run: shares(mean_phases(run.events))),
        Section(
            "Incidents",
            ("run", "time", "step", "event", ""),
            [row for run in runs for row in _incidents(run)],
        ),
        compared("Foresight", _foresight),
        compared("Forecast", _forecast),
        compared("Data", lambda run: run.start.get("data", {})),
        options._replace(
            title="Differences",
            rows=[row for row in options.rows if len({*row[1:]}) > 1],
            folded=False,
        ),
        options,
        Section("Samples", ("run", *sampled), samples, folded=True),
        compared(
            "Checkpoints",
            lambda run: {f"step {info.step}": _contents(info) for info in run.checkpoints},
        ),
        compared("Environment", lambda run: run.start.get("environment", {})),
        compared("Command", lambda run: {"to repeat or resume": run.start.get("command")}),
    ]
    return [section for section in found if section.rows]


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(part)}" for key, part in value.items())
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if value is None:
        return ""
    return f"{value:,}" if type(value) is int else str(value)


def _summary(run: RunRecord) -> dict[str, object]:
    facts = {
        key: run.start.get(key)
        for key in ("total_steps", "parameters", "trained_parameters", "layout")
    }
    if run.events:
        last = run.events[-1]
        facts["last event"] = f"{last['event']}, {_moment(last['time'])}"
        facts["goodput"] = describe_goodput(run.goodput).split(";")[0]
    facts["lowest validation_loss"] = min(
        (loss for _, loss in run.points(_VALIDATION_LOSS)), default=None
    )
    keys = dict.fromkeys(key for line in run.lines for key in line if "/" not in key)
    for key in keys:
        if points := run.points(key):
            unit = unit_of(key, [run.start])
            facts[f"last {key} ({unit})" if unit else f"last {key}"] = points[-1][1]
    return facts


def _moment(when: float) -> str:
    return datetime.fromtimestamp(when).strftime("%Y-%m-%d %H:%M:%S")


def _incidents(run: RunRecord) -> list[list[str]]:
    """Return the rows of the last events, and the number of earlier ones."""
    found = [
        pair for pair in itertools.pairwise([{}, *run.events]) if pair[1]["event"] != "progress"
    ]
    rows = [_row_of_event(run.name, *pair) for pair in found[-_MOST_INCIDENTS:]]
    if n_more := len(found) - len(rows):
        return [[run.name, "", "", "", f"{n_more:,} earlier events are left out"], *rows]
    return rows


def _row_of_event(name: str, before: Event, event: Event) -> list[str]:
    values = {key: value for key, value in event.items() if key not in _UNLISTED}
    words = ": ".join(_text(event[key]) for key in ("reason", "why") if key in event)
    words = words or _text(values)
    if event["event"] == "start":
        words = ""
        if before:
            how = (
                before.get("reason") if before["event"] == "end" else "killed, or ended by an error"
            )
            gap = event["begun"] - before["time"]
            words = f"{gap:.1f} s after the last event, at step {before['step']} ({how})"
    return [name, _moment(event["time"]), f"{event['step']:,}", event["event"], words]


def _foresight(run: RunRecord) -> dict[str, str]:
    """Compare the metrics that a dry run predicted with their medians in the run."""
    rows = {}
    for key, predicted in run.foresight.items():
        if points := run.points(key):
            median = _text(statistics.median(value for _, value in points))
            rows[key] = (
                f"predicted for {run.foresight.get('device')}: {_text(predicted)}, median here: "
                f"{median}"
            )
    return rows


def _forecast(run: RunRecord) -> dict[str, str]:
    """Compare the loss that a ladder of smaller runs forecast with the last validation loss."""
    numbers = [run.forecast.get(key) for key in ("loss", "low", "high")]
    if not all(type(number) is float and math.isfinite(number) for number in numbers):
        return {}
    loss, low, high = (float(str(number)) for number in numbers)
    rows = {
        "forecast validation loss": f"{_text(loss)}, from {_text(low)} to {_text(high)}",
        "forecast by": _text(run.forecast.get("ladder")),
    }
    if points := run.points(_VALIDATION_LOSS):
        step, outcome = points[-1]
        place = "inside" if low <= outcome <= high else "outside"
        rows["outcome"] = (
            f"{_text(outcome)} at step {step:,} of {_text(run.start.get('total_steps'))}: "
            f"{outcome / loss - 1:+.2%}, {place} the interval"
        )
    return rows


def _contents(info: CheckpointInfo) -> str:
    loss = (
        f", validation loss {info.validation_loss:.4f}" if info.validation_loss is not None else ""
    )
    return f"damaged: {fault}" if (fault := info.damage or info.fault) else f"{info.contents}{loss}"


def shown_metrics(lines: Iterable[Mapping[str, object]]) -> list[str]:
    """Return the names of the metrics that have a curve, in order of their first line."""
    keys = dict.fromkeys(key for line in lines for key in line)
    counters = re.compile(r"n_\w+_seen")
    return [key for key in keys if key != "step" and not counters.fullmatch(key)]


def unit_of(metric: str, starts: Sequence[Event] = ()) -> str:
    """Return the unit of a metric on the page: what its name counts per second, as in `_UNITS` or,
    for losses, what the `starts` of all its runs say; empty if they differ."""
    name = metric.partition("/")[0]
    if name in (_LOSS, _VALIDATION_LOSS):
        units = {str(start.get("loss_unit") or "") for start in starts}
        return units.pop() if len(units) == 1 else ""
    counted = re.fullmatch(r"(?:validation_)?(\w+)_per_second", name)
    return f"{counted[1]}/s" if counted else _UNITS.get(name, "")


def points_of(lines: Iterable[Mapping[str, Any]], key: str) -> list[tuple[int, float]]:
    """Return steps and values of a metric."""
    return [(line["step"], line[key]) for line in lines if line.get(key) is not None]


class Chart(NamedTuple):
    """Curves of a metric: one for each run, and for a loss then one of its validation each."""

    metric: str
    title: str
    series: list[list[tuple[int, float]]]


def charts(runs: Sequence[RunRecord]) -> list[Chart]:
    """Return the charts of all metrics; losses come first. Training and validation loss share
    one."""
    found = shown_metrics(line for run in runs for line in run.lines)
    keys = sorted(found, key=lambda key: not key.endswith("loss"))
    every = [Chart(key, key, [run.curve(key) for run in runs]) for key in keys]
    shown = {one.metric: one for one in every if any(len(points) > 1 for points in one.series)}
    if _LOSS in shown and _VALIDATION_LOSS in keys:
        validation = [run.curve(_VALIDATION_LOSS) for run in runs]
        shown.pop(_VALIDATION_LOSS, None)
        title = f"{_LOSS} and {_VALIDATION_LOSS} (dashed)"
        shown[_LOSS] = Chart(_LOSS, title, shown[_LOSS].series + validation)
    return [*shown.values()]


def page(runs: Sequence[RunRecord]) -> str:
    """Return a whole HTML file that loads nothing. Everything that comes from a run is escaped, and
    only the page's own script runs."""
    script = (TEMPLATES / "run_report.js").read_text("utf-8")
    return render(
        "run_report.html",
        runs=runs,
        written=_moment(time.time()),
        charts=charts(runs),
        unit_of=partial(unit_of, starts=[run.start for run in runs]),
        sections=sections(runs),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _print(runs: Sequence[RunRecord]) -> None:
    console = open_console()
    for run in runs:
        losses = sparkline(value for _, value in run.curve(_LOSS))
        console.print(presentable(f"loss of {run.name} {losses}"), soft_wrap=True)
    for title, columns, rows, folded in sections(runs):
        if not folded:
            print_table(console, title, columns, rows)


def report(args: Sequence[str]) -> int:
    """Write or print the report, and return the exit code."""
    description = (
        "Write a self-contained HTML page about runs, which may be in progress. Their folders are "
        "only read."
    )
    parser = Parser(prog="torchtitan report", description=description)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="dump folder of a run")
    parser.add_argument(
        "--output", type=Path, default="report.html", metavar="FILE", help="default: report.html"
    )
    parser.add_argument("--text", action="store_true", help="print the report instead")
    options = parser.parse_args(args)

    def write() -> None:
        runs = [RunRecord(folder) for folder in options.runs]
        for run in runs:
            for problem in run.problems:
                print_error("report", problem)
        if options.text:
            _print(runs)
            return
        with os_errors_as(f"--output '{options.output}' cannot be written"):
            durable.write(options.output, page(runs).encode("utf-8", "backslashreplace"))
        print(presentable(str(options.output)))

    return run_command("report", write)
