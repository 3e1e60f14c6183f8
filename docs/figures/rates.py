"""Runs, table and figure of the learning rates in docs/scaling.md:

    python docs/figures/rates.py train FOLDER TRAIN_TEXT HELD_OUT_TEXT TOKENIZER
    python docs/figures/rates.py draw FOLDER

`train` trains models of `--config dial` of two sizes on the same batches at several rates, with
the transfer rules and without; finished runs are not repeated. `draw` prints the table and writes
the figure.
"""

import json
import math
import sys
from pathlib import Path

import numpy
from run_curves import HERE, Axis, draw

from torchtitan.config.manager import ConfigManager
from torchtitan.trainer import Trainer

DIALS = {1: "86,208", 2: "492,160"}
"""Layers → parameters that multiply every token, with a vocabulary of 512 tokens."""

RATES = [2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2]
STEPS, WINDOWS, WINDOW = 300, 16, 64
KEY = "validation_loss"
RULES = ("with transfer rules", "without")


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
        "checkpoint.enable": False,
        "predict": False,
        "dump_folder": run,
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    config: Trainer.Config = (
        ConfigManager().parse_args(["--module", "llama3", "--config", "dial", *words]).config
    )
    if rules == "without":  # the family's initial values, and one rate for all parameters
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
    for dial in DIALS:
        for rules in RULES:
            for rate in RATES:
                run = folder_of(folder, rules, dial, rate)
                if last_loss(run) is not None:
                    continue
                config = configuration(run, rules, dial, rate, data)
                config.check(1)
                trainer = config.build()
                trainer.train()
                trainer.close()


def best_rate(losses: list[float]) -> str:
    """Return the minimum of the parabola through the lowest loss and its neighbors, over the
    logarithm of the rate, or that the first or last rate has the lowest loss."""
    at = losses.index(min(losses))
    if at == 0:
        return f"at most {RATES[0]:g}"
    if at == len(losses) - 1:
        return f"at least {RATES[-1]:g}"
    around = slice(at - 1, at + 2)
    a, b, _ = numpy.polyfit(numpy.log2(RATES[around]), losses[around], 2)
    return f"{2 ** (-b / (2 * a)):.2g}"


def show(folder: Path) -> None:
    """Print the table, and draw loss over rate."""
    panels = []
    for rules in RULES:
        lines = []
        for dial, size in DIALS.items():
            runs = [folder_of(folder, rules, dial, rate) for rate in RATES]
            losses = [loss for run in runs if (loss := last_loss(run)) is not None]
            if len(losses) < len(runs):
                raise SystemExit(f"{len(runs) - len(losses)} runs of dial {dial} have not finished")
            cells = " | ".join(f"{loss:.4f}" for loss in losses)
            print(f"| {rules} | {dial} | {cells} | {best_rate(losses)} |")
            lines.append((f"{size} parameters", list(zip(RATES, losses, strict=True))))
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
