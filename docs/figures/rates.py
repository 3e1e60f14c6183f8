"""Runs, table and figure of the learning rates in docs/scaling.md:

    python docs/figures/rates.py train FOLDER TRAIN_TEXT HELD_OUT_TEXT TOKENIZER
    python docs/figures/rates.py draw FOLDER

`train` trains models of `--config dial` of several sizes on the same batches at several rates, with
the transfer rules, without them, and with them and Muon; finished runs are not repeated. `draw`
prints the table and writes the figure.
"""

import json
import math
import sys
from pathlib import Path

import numpy
from run_curves import HERE, Axis, draw

from torchtitan.config.manager import ConfigManager
from torchtitan.trainer import Trainer

PARAMETERS = {1: "86,208", 2: "492,160", 4: "3,541,248"}
"""Layers → parameters that multiply every token, with a vocabulary of 512 tokens."""

RATES = [2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2]
STEPS, WINDOWS, WINDOW = 300, 16, 64
KEY = "validation_loss"
WITH, WITHOUT, MUON = "with transfer rules", "without", "with Muon"
RUNS = {
    WITH: {1: RATES[:5], 2: RATES[:5], 4: RATES[:4]},
    WITHOUT: {1: RATES[:5], 2: RATES[:5], 4: RATES[:3]},
    MUON: {1: RATES, 2: RATES, 4: RATES[2:5]},
}
"""Rules → layers → rates. A run of 4 layers costs seven times as much as one of 2."""


def folder_of(folder: Path, rules: str, dial: int, rate: float) -> Path:
    return folder / rules / f"dial-{dial}_rate-{rate:g}"


def configuration(run: Path, rules: str, dial: int, rate: float, data: list[str]) -> Trainer.Config:
    """Return a run whose decay of weights, rate times `weight_decay`, is the same at every rate."""
    train_text, held_out, tokenizer = data
    options = {
        "dial": dial,
        "window": WINDOW,
        "hf_assets_path": tokenizer,
        "dataloader.dataset": train_text,
        "validator.dataset": held_out,
        "validator.freq": STEPS,
        "training.steps": STEPS,
        "training.global_batch_size": WINDOWS,
        "training.local_batch_size": WINDOWS,
        "lr_scheduler.warmup_steps": STEPS // 10,
        "optimizer.lr": rate,
        "optimizer.weight_decay": 1 / (rate * STEPS),
        "muon": rules == MUON,
        "checkpoint.enable": False,
        "predict": False,
        "dump_folder": run,
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    config: Trainer.Config = (
        ConfigManager().parse_args(["--module", "llama3", "--config", "dial", *words]).config
    )
    if rules == WITHOUT:  # the family's initial values, and one rate for all parameters
        config.model_converters = []
        for group in config.optimizer.param_groups.values():
            group.lr_factor = 1.0
            group.weight_decay_factor = float(group.weight_decay_factor > 0)
    return config


def last_loss(run: Path) -> float | None:
    """Return the validation loss after the last step; None: the run has not finished."""
    path = run / "metrics.jsonl"
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return next((line[KEY] for line in lines if line["step"] == STEPS and KEY in line), None)


def train(folder: Path, data: list[str]) -> None:
    """Train the runs that have not finished."""
    for rules, dials in RUNS.items():
        for dial, rates in dials.items():
            for rate in rates:
                run = folder_of(folder, rules, dial, rate)
                if last_loss(run) is not None:
                    continue
                config = configuration(run, rules, dial, rate, data)
                config.check(1)
                trainer = config.build()
                trainer.train()
                trainer.close()


def best_rate(rates: list[float], losses: list[float]) -> str:
    """Return the minimum of the parabola through the lowest loss and its neighbors, over the
    logarithm of the rate, or that the first or last rate has the lowest loss."""
    at = losses.index(min(losses))
    if at == 0:
        return f"at most {rates[0]:g}"
    if at == len(losses) - 1:
        return f"at least {rates[-1]:g}"
    around = slice(at - 1, at + 2)
    a, b, _ = numpy.polyfit(numpy.log2(rates[around]), losses[around], 2)
    return f"{2 ** (-b / (2 * a)):.2g}"


def show(folder: Path) -> None:
    """Print the table, and draw loss over rate."""
    panels = []
    for rules, dials in RUNS.items():
        lines = []
        for dial, rates in dials.items():
            runs = [folder_of(folder, rules, dial, rate) for rate in rates]
            losses = [loss for run in runs if (loss := last_loss(run)) is not None]
            if len(losses) < len(runs):
                raise SystemExit(f"{len(runs) - len(losses)} runs of dial {dial} have not finished")
            points = dict(zip(rates, losses, strict=True))
            cells = [f"{points[rate]:.4f}" if rate in points else "" for rate in RATES]
            best = best_rate(rates, losses)
            print(f"| {rules} | {dial}, width {64 * dial} | {' | '.join(cells)} | {best} |")
            lines.append((f"{PARAMETERS[dial]} parameters", list(points.items())))
        panels.append((f"held-out loss, {rules}", lines))
    axis = Axis("learning rate", math.log, RATES)
    (HERE / "rates.svg").write_text(draw(panels, axis))


def main(action: str, folder: str, *data: str) -> None:
    if action == "train":
        train(Path(folder), list(data))
    else:
        show(Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
