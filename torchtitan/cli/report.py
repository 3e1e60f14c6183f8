"""`torchtitan report`: what one or several runs did, as a self-contained HTML page or as text."""

import argparse
import base64
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan.cli.model_options import run_command
from torchtitan.cli.run_record import RunRecord, read_run
from torchtitan.tools import durable
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import print_error, visible
from torchtitan.tools.progress import sparkline

_TEMPLATES = Path(__file__).parent / "templates"
_FIRST_CURVES = ("loss", "validation_loss", "grad_norm", "lr", "tokens_per_second", "step_time", "memory_gib", "mfu")
_NO_CURVE = {"step", "n_tokens_seen"}
_SAMPLES = 12


class Section(NamedTuple):
    """A table with a title; cells are text."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    folded: bool = False
    """True if the page shows the table only on request, and the terminal not at all."""


def report(args: Sequence[str]) -> int:
    """Write or print the report, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="torchtitan report",
        description="Write one self-contained HTML page about runs: curves, configuration, data, time, incidents, "
        "samples, checkpoints. Runs may be in progress; their folders are only read.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="dump folder of a run")
    parser.add_argument(
        "--output", type=Path, default=Path("report.html"), metavar="FILE", help="the page (default: report.html)"
    )
    parser.add_argument("--text", action="store_true", help="print the report instead")
    options = parser.parse_args(args)
    return run_command("report", lambda: _report(options.runs, options.output, as_text=options.text))


def _report(folders: Sequence[Path], output: Path, *, as_text: bool) -> int:
    runs = distinctly_named([read_run(folder) for folder in folders], folders)
    for run in runs:
        for file, numbers in run.broken.items():
            shown = ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")
            print_error("report", f"{run.name}: {file}: broken lines are left out: {shown}")
    if as_text:
        _print(runs)
        return 0
    try:
        durable.write(output, page(runs))
    except OSError as error:
        raise UserError(f"--output '{output}' cannot be written: {error.strerror}") from error
    print(output)
    return 0


def distinctly_named(runs: Sequence[RunRecord], folders: Sequence[Path]) -> list[RunRecord]:
    """Return the runs, named by their paths if their folders have equal names."""
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    if len(set(names)) < len(names):
        raise UserError(f"a run is named twice: {', '.join(names)}")
    return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]


# Sections, shared by the page and the terminal.


def sections(runs: Sequence[RunRecord]) -> Iterator[Section]:
    """Yield the report's tables; what no run has recorded is left out."""
    names = [run.name for run in runs]
    yield Section("Summary", ("", *names), _by_run(runs, _SUMMARY))
    yield from _nonempty(Section("Where the time went", ("", *names), _time_rows(runs)))
    yield from _nonempty(Section("Time of a step by phase", ("", *names), _phase_rows(runs)))
    yield from _nonempty(Section("Incidents", ("run", "time", "step", "what"), [*_incidents(runs)]))
    yield from _nonempty(Section("Foresight", ("run", "", "dry run", "run"), [*_foresight(runs)]))
    yield from _nonempty(Section("Data", ("run", "dataset", "rows", "tokens", "epochs", "tokens read"), [*_data(runs)]))
    options = sorted({key for run in runs for key in run.config})
    rows = [[key, *(str(run.config.get(key, "")) for run in runs)] for key in options]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    yield from _nonempty(Section("Differences of configuration", ("option", *names), differing))
    yield from _nonempty(Section("Configuration", ("option", *names), rows, folded=True))
    yield from _nonempty(Section("Samples", ("run", "step", "reward", "prompt", "completion"), [*_samples(runs)], True))
    columns = ("run", "step", "contents", "validation loss", "processes")
    yield from _nonempty(Section("Checkpoints", columns, [*_checkpoints(runs)]))
    environment = list(dict.fromkeys(key for run in runs for key in run.start.get("environment", {})))
    rows = [[key, *(str(run.start.get("environment", {}).get(key, "")) for run in runs)] for key in environment]
    yield from _nonempty(Section("Environment", ("", *names), rows))
    commands = [[run.name, run.start["command"]] for run in runs if run.start.get("command")]
    yield from _nonempty(Section("Command", ("run", "repeat or resume it with"), commands))


def _nonempty(section: Section) -> list[Section]:
    return [section] if section.rows else []


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def _lowest_validation(run: RunRecord) -> str:
    points = run.points("validation_loss")
    step, loss = min(points, key=lambda point: point[1], default=(0, None))
    return "" if loss is None else f"{loss:.4f} (step {step})"


def _memory(run: RunRecord) -> str:
    peak = max(run.values("memory_gib"), default=None)
    return "" if peak is None else f"{peak:.2f} GiB"


def _steps(run: RunRecord) -> str:
    total = run.start.get("total_steps")
    return f"{run.last('step'):,.0f}" + (f" of {total:,}" if total else "")


def _goodput(run: RunRecord) -> str:
    account = run.goodput
    return f"{account.fraction:.1%} of {_duration(account.wall)}" if account else ""


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else str(timedelta(seconds=round(seconds)))


_SUMMARY: dict[str, Callable[[RunRecord], str]] = {
    "end": lambda run: run.status,
    "last sign of life": lambda run: _moment(run.events[-1]["time"]) if run.events else "",
    "steps": _steps,
    "loss": lambda run: _number(run.last("loss")),
    "lowest validation loss": _lowest_validation,
    "tokens seen": lambda run: _number(run.last("n_tokens_seen")),
    "tokens/s": lambda run: _number(run.last("tokens_per_second")),
    "MFU": lambda run: f"{run.last('mfu'):.1f} %" if run.last("mfu") is not None else "",
    "peak memory of rank 0": _memory,
    "parameters": lambda run: _number(run.start.get("parameters")),
    "layout": lambda run: str(run.start.get("layout", "")),
    "sessions": lambda run: str(sum(event["event"] == "start" for event in run.events) or ""),
    "goodput": _goodput,
}


def _by_run(runs: Sequence[RunRecord], rows: dict[str, Callable[[RunRecord], str]]) -> list[list[str]]:
    table = [[name, *map(cell, runs)] for name, cell in rows.items()]
    return [row for row in table if any(row[1:])]


def _time_rows(runs: Sequence[RunRecord]) -> list[list[str]]:
    accounts = [account.parts if (account := run.goodput) else {} for run in runs]
    return _shares(accounts, _duration)


def _phase_rows(runs: Sequence[RunRecord]) -> list[list[str]]:
    return _shares([mean_phases(run) for run in runs], lambda seconds: f"{1000 * seconds:.1f} ms")


def _shares(columns: Sequence[dict[str, float]], shown: Callable[[float], str]) -> list[list[str]]:
    names = dict.fromkeys(name for column in columns for name in column)
    totals = [sum(column.values()) for column in columns]
    return [
        [
            name,
            *(
                f"{shown(c[name])} ({c[name] / t:.1%})" if name in c else ""
                for c, t in zip(columns, totals, strict=True)
            ),
        ]
        for name in names
    ]


def mean_phases(run: RunRecord) -> dict[str, float]:
    """Return the mean seconds of a step by phase over the last session, without its first step."""
    progress = [event for event in run.events if "seconds" in event]
    last_start = max((i for i, event in enumerate(progress) if event["event"] == "start"), default=0)
    first, last = [*progress[last_start + 1 : last_start + 2], *progress[-1:]] if progress else ({}, {})
    n_steps = last.get("step", 0) - first.get("step", 0)
    spent = (
        {name: time - first["seconds"].get(name, 0.0) for name, time in last["seconds"].items()} if n_steps > 0 else {}
    )
    return {name: time / n_steps for name, time in spent.items() if time > 0}


def _moment(when: float) -> str:
    return datetime.fromtimestamp(when).strftime("%Y-%m-%d %H:%M:%S")


def _incidents(runs: Sequence[RunRecord]) -> Iterator[list[str]]:
    for run in runs:
        previous: dict[str, Any] = {}
        for event in run.events:
            if words := _incident(event, previous):
                yield [run.name, _moment(event["time"]), f"{event['step']:,}", words]
            previous = dict(event)


def _incident(event: Any, previous: dict[str, Any]) -> str:
    match event["event"]:
        case "start" if not previous:
            return "started"
        case "start":
            gap = _duration(event["begun"] - previous["time"])
            how = previous.get("reason") or "killed or crashed"
            return f"started again {gap} after the last sign of life (step {previous['step']}, {how})"
        case "straggler":
            more = f"{event['seconds_more']:.3f} s more per step"
            return f'rank {event["rank"]} on {event["host"]} was slow: {more} in the phase "{event["phase"]}"'
        case "returned":
            return f"the run returned to the weights of step {event['to']}"
        case "skipped":
            return f"step skipped: {event['reason']}"
        case "save":
            return f"saved; training was blocked for {event['blocked']:.3f} s"
        case "end":
            return str(event["reason"])
    return ""


def _foresight(runs: Sequence[RunRecord]) -> Iterator[list[str]]:
    for run in runs:
        ranks = [rank for rank in run.dry_run.get("ranks", []) if isinstance(rank, dict)]
        if peaks := [peak for rank in ranks if isinstance(peak := rank.get("peak_reserved_bytes"), int)]:
            yield [run.name, "memory of a rank", f"{max(peaks) / 2**30:.2f} GiB", _memory(run)]
        known = {"world_size": ("processes", run.start.get("environment", {}).get("processes"))}
        known["step_seconds"] = "time of a step, s", run.last("step_time")
        known["tokens_per_second"] = "tokens/s", run.last("tokens_per_second")
        known["mfu"] = "MFU, %", run.last("mfu")
        for key, (name, measured) in known.items():
            if isinstance(predicted := run.dry_run.get(key), (int, float)):
                yield [run.name, name, _number(predicted), _number(measured)]


def _data(runs: Sequence[RunRecord]) -> Iterator[list[str]]:
    for run in runs:
        done = (run.last("step") or 0) / max(1, run.start.get("total_steps", 1))
        for data in run.start.get("data", []):
            epochs = data["epochs"] * done
            read = f"{epochs * data['tokens']:,.0f}"
            yield [run.name, data["name"], f"{data['rows']:,}", f"{data['tokens']:,}", f"{epochs:.3g}", read]


def _samples(runs: Sequence[RunRecord]) -> Iterator[list[str]]:
    for run in runs:
        for row in run.completions[-_SAMPLES:]:
            yield [run.name, *(str(row.get(key, "")) for key in ("step", "reward", "prompt", "completion"))]


def _checkpoints(runs: Sequence[RunRecord]) -> Iterator[list[str]]:
    for run in runs:
        for info in run.checkpoints:
            contents = f"damaged: {info.damage or info.fault}" if info.damage or info.fault else info.contents
            processes = str(info.marker.world_size) if info.marker else ""
            yield [run.name, f"{info.step:,}", contents, _number(info.validation_loss), processes]


# The page.


def page(runs: Sequence[RunRecord]) -> str:
    """Return a whole HTML file that loads nothing. Everything that comes from a run is escaped, and only the page's own
    script runs."""
    import jinja2

    script = (_TEMPLATES / "run_report.js").read_text("utf-8")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["visible"] = visible
    template = environment.from_string((_TEMPLATES / "run_report.html").read_text("utf-8"))
    return template.render(
        title=", ".join(run.name for run in runs),
        written=_moment(time.time()),
        curves={"runs": [run.name for run in runs], "charts": curves(runs)},
        bars=[(run.name, [*_bar(account.parts)] if (account := run.goodput) else []) for run in runs],
        sections=[*sections(runs)],
        broken=[(run.name, file, len(lines)) for run in runs for file, lines in run.broken.items()],
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _bar(parts: dict[str, float]) -> Iterator[tuple[str, float]]:
    total = sum(parts.values()) or 1.0
    return ((name, seconds / total) for name, seconds in parts.items() if seconds > 0.001 * total)


def curves(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Return a chart per metric, with the points of each run; the most important come first."""
    found = dict.fromkeys(key for run in runs for line in run.lines for key in line if key not in _NO_CURVE)
    keys = [key for key in _FIRST_CURVES if key in found] + sorted(found.keys() - set(_FIRST_CURVES))
    charts = [{"name": key, "series": [run.curve(key) for run in runs]} for key in keys]
    return [chart for chart in charts if any(len(points) > 1 for points in chart["series"])]


# The terminal.


def _print(runs: Sequence[RunRecord]) -> None:
    from rich.table import Table
    from rich.text import Text

    from torchtitan.cli.data_report import open_console

    console = open_console()
    for run in runs:
        line = sparkline([value for _, value in run.curve("loss")])
        console.print(Text.assemble((f"loss of {visible(run.name)} ", "bold"), line), soft_wrap=True)
    for section in sections(runs):
        if not section.folded:
            table = Table(title=section.title, title_justify="left", title_style="bold")
            for column in section.columns:
                table.add_column(visible(column), overflow="fold")
            for row in section.rows:
                table.add_row(*map(visible, row))
            console.print(table)
