"""`torchtitan mixture`: train small models on random mixtures of data sources, fit their loss over
the shares, and propose a mixture."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan.cli.model_options import run_command
from torchtitan.cli.small_runs import SmallRun, check_words, configuration, small_run, total_cost
from torchtitan.tools.errors import UserError, require
from torchtitan.tools.logging import presentable
from torchtitan.tools.parser import Parser

if TYPE_CHECKING:
    from torchtitan.foresight.mixture_law import MixtureLaw

Mixture = tuple[int, ...]

_WEIGHTS = "--dataloader.weights"
_MOST_RUNS = 10_000
"""Far above the 512 of RegMix (arXiv:2407.01492)."""


def mixture(args: Sequence[str]) -> int:
    """Plan, run and fit small runs with different mixtures, and return the exit code."""
    parser = Parser(
        prog="torchtitan mixture",
        allow_abbrev=False,
        description="Train small models on random mixtures of the datasets, fit the held-out loss "
        "over their shares, check the fit on mixtures that it has not seen, and train the mixture "
        "that it proposes. Finished runs are not repeated, an interrupted one resumes.",
        epilog="Also accepts the options of `torchtitan train --config dial`: --module, "
        "--dataloader.dataset (two or more), --validator.dataset, --tokens_per_parameter …",
    )
    add = parser.add_argument
    add("--dial", type=int, required=True, metavar="N", help="size of all runs, such as 2")
    add("--runs", type=int, default=16, metavar="N", help="runs that are fitted (default: 16)")
    add(
        "--held_out_runs",
        type=int,
        default=2,
        metavar="N",
        help="further runs that only check the fit (default: 2)",
    )
    add(
        "--around",
        type=float,
        nargs="+",
        metavar="W",
        help="weights of the datasets around which mixtures are drawn (default: equal ones)",
    )
    add("--out", type=Path, required=True, metavar="DIR", help="folder of all runs")
    add("--plan", action="store_true", help="print the runs and their cost, and end")
    options, words = parser.parse_known_args(args)
    return run_command("mixture", lambda: _search(options, words))


def _search(options: argparse.Namespace, words: list[str]) -> int:
    from torchtitan.foresight.mixture_law import MixtureLaw, draw_mixtures

    check_words(words, "set --dial before other options")
    if any(word.partition("=")[0] == _WEIGHTS for word in words):
        raise UserError(f"{_WEIGHTS} is chosen for each run; set --around")
    own = ["--dial", str(options.dial)]
    config: Any = configuration(["--config", "dial", *own, "--predict=false", *words])
    names: list[str] = config.dataloader.dataset
    around = _around(options, names)
    if not config.validator.dataset:
        raise UserError(
            "--validator.dataset is empty; name held-out text, whose loss the mixture shall lower"
        )
    held_out, least = options.held_out_runs, len(names) + 2
    require(0 <= held_out <= _MOST_RUNS, "--held_out_runs", held_out, f"from 0 to {_MOST_RUNS:,}")
    enough = f"from {least} to {_MOST_RUNS:,} for {len(names)} datasets"
    require(least <= options.runs <= _MOST_RUNS, "--runs", options.runs, enough)
    mixtures = draw_mixtures(around, options.runs + options.held_out_runs)

    def run_of(shares: Mixture) -> SmallRun:
        weights = [str(share) for share in shares]
        folder = options.out / f"shares-{'-'.join(weights)}"
        return small_run(folder, [*own, _WEIGHTS, *weights], words)

    runs = {shares: run_of(shares) for shares in mixtures}
    _show(names, runs, options.held_out_runs)
    if options.plan:
        return 0
    for run in runs.values():
        if code := run.train():
            return code
    losses = {shares: _loss(run) for shares, run in runs.items()}
    fitted = mixtures[: options.runs]
    law = MixtureLaw(fitted, [losses[shares] for shares in fitted])
    proposal = law.proposal(around)
    _tell_fit(names, law, {shares: losses[shares] for shares in mixtures[options.runs :]})
    last = runs.get(proposal) or run_of(proposal)
    print(presentable(f"proposal: {_WEIGHTS} {' '.join(map(str, proposal))}"), flush=True)
    if code := last.train():
        return code
    _tell_outcome(law, proposal, _loss(last), losses)
    return 0


def _around(options: argparse.Namespace, names: Sequence[str]) -> list[float]:
    """Return the weights around which mixtures are drawn. Raise `UserError` unless there are
    several datasets with one each."""
    if len(names) < 2:
        raise UserError(
            f"a mixture needs several datasets, and --dataloader.dataset has {len(names)}; name "
            "two or more"
        )
    around = [1.0] * len(names) if options.around is None else options.around
    if len(around) != len(names) or not all(0 < weight < 1e30 for weight in around):
        raise UserError(f"--around is {around}, but must have {len(names)} weights above 0")
    return [float(weight) for weight in around]


def _loss(run: SmallRun) -> float:
    loss = run.measured()
    assert loss is not None, "it was trained"
    return loss


def _show(names: Sequence[str], runs: dict[Mixture, SmallRun], held_out: int) -> None:
    """Print the runs, and the cost of all, with one more for the proposal."""
    from torchtitan.tools.tables import open_console, print_table

    rows = []
    for number, (shares, run) in enumerate(runs.items()):
        loss = run.measured()
        use = "fitted" if number < len(runs) - held_out else "held out"
        rows.append([*(f"{share} %" for share in shares), use, f"{loss:.4f}" if loss else ""])
    columns = (*names, "use", "loss")
    one = next(iter(runs.values())).cost.flops
    title = f"{total_cost(list(runs.values()))}; then one of {one:.3g} for the proposal"
    print_table(open_console(), title, columns, rows, columns)


def _tell_fit(names: Sequence[str], law: "MixtureLaw", held_out: dict[Mixture, float]) -> None:
    from math import exp

    from torchtitan.tools.tables import open_console, print_table

    rows = [
        [name, f"{exp(coefficient):.4f}"]
        for name, coefficient in zip(names, law.coefficients.tolist(), strict=True)
    ]
    columns = ("dataset", "loss by the fit, if it were all")
    print_table(open_console(), "The fit", columns, rows, columns[1:])
    print(
        f"each run, forecast by the others: rank correlation {law.rank_correlation:.2f}, largest "
        f"error {law.error:.2%}"
    )
    for shares, loss in held_out.items():
        forecast = law.loss(shares)
        print(
            f"held-out mixture {' '.join(map(str, shares))}: forecast {forecast:.4f}, outcome "
            f"{loss:.4f} ({forecast / loss - 1:+.2%})"
        )


def _tell_outcome(
    law: "MixtureLaw", proposal: Mixture, loss: float, losses: dict[Mixture, float]
) -> None:
    forecast, around = law.loss(proposal), next(iter(losses.values()))
    best = min(losses.keys() - {proposal}, key=lambda shares: (losses[shares], shares))
    print(
        f"proposal: forecast {forecast:.4f}, outcome {loss:.4f} ({forecast / loss - 1:+.2%}); "
        f"the first mixture has {around:.4f}, the best other {losses[best]:.4f} "
        f"({' '.join(map(str, best))})"
    )
