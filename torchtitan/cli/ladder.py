"""`torchtitan ladder`: train small models of several sizes and lengths, fit their loss, and
forecast a larger run."""

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, log
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torchtitan.cli.model_options import run_command
from torchtitan.cli.small_runs import (
    SmallRun,
    check_words,
    configuration,
    described,
    small_run,
    total_cost,
)
from torchtitan.tools import durable
from torchtitan.tools.errors import os_errors_as, require
from torchtitan.tools.logging import presentable
from torchtitan.tools.parser import Parser

if TYPE_CHECKING:
    from torchtitan.foresight.dial import Cost

PAGE = "ladder.html"


class Rung(NamedTuple):
    """A run of the ladder."""

    dial: int
    tokens_per_parameter: float
    run: SmallRun

    @property
    def cost(self) -> "Cost":
        return self.run.cost


def ladder(args: Sequence[str]) -> int:
    """Plan, run and fit a ladder, and return the exit code."""
    parser = Parser(
        prog="torchtitan ladder",
        allow_abbrev=False,
        description="Train models of several sizes and lengths by the rules of --config dial, fit "
        "loss over size and tokens, and forecast a larger run. Finished runs are not repeated, an "
        "interrupted one resumes.",
        epilog="Also accepts the options of `torchtitan train --config dial`: --module, "
        "--dataloader.dataset, --validator.dataset, --width_per_layer …",
    )
    add = parser.add_argument
    add("--sizes", type=int, nargs="+", required=True, metavar="N", help="dials, such as 2 3 4 6")
    add(
        "--tokens_per_parameter",
        type=float,
        nargs="+",
        default=[10.0, 20.0, 40.0],
        metavar="R",
        help="lengths of the runs of each size (default: 10 20 40)",
    )
    add(
        "--window",
        type=int,
        metavar="TOKENS",
        help="tokens of a window in all runs and the forecast (default: by the rule for the "
        "largest of --sizes and --forecast)",
    )
    add("--out", type=Path, required=True, metavar="DIR", help="folder of all runs")
    add(
        "--forecast",
        type=int,
        metavar="N",
        help="dial of a larger run to forecast, which is not trained",
    )
    add(
        "--forecast_tokens_per_parameter",
        type=float,
        default=20.0,
        metavar="R",
        help="length of that run (default: 20)",
    )
    add(
        "--irreducible",
        type=float,
        metavar="E",
        help="loss of an endless run of an endless model, fixed in the fit (default: fitted too)",
    )
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--plan", action="store_true", help="print the runs and their cost, and end")
    only.add_argument(
        "--commands", type=Path, metavar="FILE", help="write a command per run instead, and end"
    )
    only.add_argument("--fit", action="store_true", help="fit the finished runs, without training")
    options, words = parser.parse_known_args(args)
    return run_command("ladder", lambda: _ladder(options, words))


def _ladder(options: argparse.Namespace, words: list[str]) -> int:
    from torchtitan.foresight.loss_law import too_few

    check_words(words, "set --sizes")
    _check(options)
    words = ["--window", str(_window(options, words)), *words]
    rungs = [
        _rung(options.out, words, size, ratio)
        for size, ratio in itertools.product(
            sorted(set(options.sizes)), sorted(set(options.tokens_per_parameter))
        )
    ]
    rungs.sort(key=lambda rung: rung.cost.flops)
    larger = None
    if options.forecast is not None:
        ratio = options.forecast_tokens_per_parameter
        larger = _rung(options.out, words, options.forecast, ratio)
    _show(rungs)
    if lack := too_few([rung.cost for rung in rungs], options.irreducible):
        print(presentable(lack), flush=True)
    if options.plan:
        return 0
    if options.commands:
        missing = [rung.run.command for rung in rungs if rung.run.measured() is None]
        with os_errors_as(f"--commands '{options.commands}' cannot be written"):
            durable.write(options.commands, "".join(f"{command}\n" for command in missing))
        print(presentable(f"{len(missing)} commands in {options.commands}; then repeat with --fit"))
        return 0
    for rung in rungs if not options.fit else ():
        if code := rung.run.train():
            return code
    _fit(options, rungs, larger)
    return 0


def _check(options: argparse.Namespace) -> None:
    """Raise `UserError` for numbers out of range, also for those that only the fit uses, which may
    be hours later."""
    from torchtitan.foresight.scaling import MOST_LAYERS

    sizes = [("--sizes", size) for size in options.sizes] + [("--forecast", options.forecast)]
    for name, size in sizes:
        fits = size is None or 1 <= size <= MOST_LAYERS
        require(fits, name, size, f"from 1 to {MOST_LAYERS} layers")
    ratios = [("--tokens_per_parameter", ratio) for ratio in options.tokens_per_parameter]
    ratios.append(("--forecast_tokens_per_parameter", options.forecast_tokens_per_parameter))
    for name, ratio in ratios:
        require(0 < ratio < 1e6, name, ratio, "above 0 and below 1e6")
    floor = options.irreducible
    require(floor is None or 0 < floor < inf, "--irreducible", floor, "above 0")


def _window(options: argparse.Namespace, words: Sequence[str]) -> int:
    """Return the window of all runs: loss falls with the context, and a law of runs with different
    windows would attribute that to the size. By default it is the largest size's, since the ladder
    forecasts runs of at least that size."""
    if options.window is not None:
        return int(options.window)
    largest = max(*options.sizes, options.forecast or 0)
    config = configuration(["--config", "dial", "--dial", str(largest), *words])
    window: int = config.training.seq_len
    return window


def _rung(out: Path, words: Sequence[str], dial: int, ratio: float) -> Rung:
    folder = out / f"dial-{dial}_tokens-{ratio:g}"
    own = ["--dial", str(dial), "--tokens_per_parameter", f"{ratio:g}"]
    return Rung(dial, ratio, small_run(folder, own, words))


def _show(rungs: Sequence[Rung]) -> None:
    from torchtitan.tools.tables import open_console, print_table

    columns, rows = _table(rungs)
    title = total_cost([rung.run for rung in rungs])
    print_table(open_console(), title, columns, rows, columns)


def _table(rungs: Sequence[Rung]) -> tuple[list[str], list[list[str]]]:
    """Return columns and rows: sizes, costs, and what finished runs have reached."""
    found = [rung.run.scores() for rung in rungs]
    names = list(dict.fromkeys(name for scores in found for name in scores))
    rows = [
        [
            *(str(rung.dial), *described(rung.run), _loss_of(rung)),
            *(f"{scores[name]:.4f}" if name in scores else "" for name in names),
        ]
        for rung, scores in zip(rungs, found, strict=True)
    ]
    return ["dial", "parameters", "tokens", "steps", "FLOPs", "loss", *names], rows


def _loss_of(rung: Rung) -> str:
    loss = rung.run.measured()
    return "" if loss is None else f"{loss:.4f}"


def _fit(options: argparse.Namespace, rungs: Sequence[Rung], larger: Rung | None) -> None:
    from torchtitan.cli.pages import render
    from torchtitan.foresight.loss_law import Ladder, Point, write_ladder

    done = [(rung, loss) for rung in rungs if (loss := rung.run.measured()) is not None]
    points = [
        Point(rung.cost.parameters, rung.cost.tokens, loss, rung.run.folder.name)
        for rung, loss in done
    ]
    fitted = Ladder(points, options.irreducible)
    write_ladder(options.out, fitted, rungs[0].run.setting)
    facts = {"law": f"L(N, D) = {fitted.law}, nats per token"}
    residual, worst = max(zip(fitted.residuals, points, strict=True), key=lambda one: abs(one[0]))
    facts["largest residual"] = f"{residual:+.2%} fitted over measured, of {worst.name}"
    error = fitted.measured_error
    *_, second, largest = sorted({point.parameters for point in points})
    facts["error for the largest size, fitted without it"] = (
        "not measured: too few runs"
        if error is None
        else f"{error:.2%}, at {largest / second:.3g} times the parameters of the next"
    )
    forecast = None
    if larger:
        forecast = fitted.forecast(larger.cost.parameters, larger.cost.tokens)
        dial, ratio = larger.dial, larger.tokens_per_parameter
        name = f"forecast of --dial {dial} --tokens_per_parameter {ratio:g}"
        distance = larger.cost.parameters / largest
        facts[name] = (
            f"{forecast}, {larger.cost.flops:.3g} FLOPs, {distance:.3g} times the parameters of "
            "the largest run"
        )
    for name, text in facts.items():
        print(presentable(f"{name}: {text}"))
    chart = Chart.of(done, fitted, (larger, forecast) if larger else None)
    columns, rows = _table([rung for rung, _ in done])
    values = {"facts": facts, "columns": columns, "rows": rows, "chart": chart}
    page = render("ladder.html", name=str(options.out), **values)
    durable.write(options.out / PAGE, page.encode("utf-8", "backslashreplace"))
    print(presentable(str(options.out / PAGE)))


@dataclass(frozen=True)
class Chart:
    """Lines and points of the figure, in its coordinates: loss over FLOPs, both logarithmic."""

    series: list[dict[str, object]]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]

    WIDTH, HEIGHT = 640, 360

    @classmethod
    def of(cls, done: Sequence[tuple[Rung, float]], fitted: Any, larger: Any) -> "Chart":
        flops = [rung.cost.flops for rung, _ in done]
        losses = [loss for _, loss in done]
        if larger:
            flops.append(larger[0].cost.flops)
            losses += [larger[1].low, larger[1].high]
        low_x, high_x = log(min(flops)) - 0.3, log(max(flops)) + 0.3
        low_y, high_y = log(min(losses)) - 0.02, log(max(losses)) + 0.02

        def x(value: float) -> float:
            return round(60 + (cls.WIDTH - 80) * (log(value) - low_x) / (high_x - low_x), 1)

        def y(value: float) -> float:
            return round(20 + (cls.HEIGHT - 60) * (high_y - log(value)) / (high_y - low_y), 1)

        series: list[dict[str, object]] = []
        for dial in sorted({rung.dial for rung, _ in done}):
            own = [(rung, loss) for rung, loss in done if rung.dial == dial]
            points = [(x(rung.cost.flops), y(loss)) for rung, loss in own]
            law = [
                (
                    x(rung.cost.flops),
                    y(fitted.law.loss(rung.cost.parameters, rung.cost.tokens)),
                )
                for rung, _ in own
            ]
            series.append({"name": f"dial {dial}", "points": points, "line": law, "bar": None})
        if larger:
            rung, forecast = larger
            at = x(rung.cost.flops)
            bar = (at, y(forecast.low), y(forecast.high))
            points = [(at, y(forecast.loss))]
            name = f"forecast, dial {rung.dial}"
            series.append({"name": name, "points": points, "line": [], "bar": bar})
        first, last = int(low_x / log(10)) + 1, int(high_x / log(10))
        x_ticks = [(x(10.0**power), f"1e{power}") for power in range(first, last + 1)]
        step = (high_y - low_y) / 5
        values = [exp(low_y + step * number) for number in range(1, 5)]
        return cls(series, x_ticks, [(y(value), f"{value:.2f}") for value in values])
