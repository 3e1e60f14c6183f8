"""`torchtitan run`: run command lines as the stages of a recipe, each on the model of an earlier
one."""

import argparse
import json
import math
import re
import shlex
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from torchtitan.cli.child import run_python, run_torchtitan
from torchtitan.cli.main import COMMANDS
from torchtitan.cli.model_options import run_command
from torchtitan.components.checkpoint.catalog import list_checkpoints
from torchtitan.config.manager import ConfigManager
from torchtitan.config.yaml_files import read_config_file
from torchtitan.tools import durable
from torchtitan.tools.errors import UserError, errors_of, os_errors_as, require, suggest
from torchtitan.tools.files import read_object
from torchtitan.tools.logging import for_output, logger, presentable
from torchtitan.tools.parser import Parser
from torchtitan.tools.redact import redacted

PYTHON = "python"
"""First word of a stage that runs a script."""

_PLACEHOLDER = re.compile(r"\{([^{}]*\b(?:folder|hours)\b[^{}]*)\}")
_OF_HOURS = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)\*(hours|sqrt\(hours\))")
"""A number that grows with `--hours`."""


class _Stage(NamedTuple):
    name: str
    words: list[str]
    base: str
    trains: bool


class _Values(NamedTuple):
    """Values of the placeholders in a recipe's command lines."""

    folder: Path
    hours: float | None

    def fill(self, word: str, where: str) -> str:
        """Return a word with `{folder}`, and `{N*hours}` or `{N*sqrt(hours)}` as a whole number of
        at least 1. Raise `UserError` for another placeholder, and for missing hours."""

        def value(found: re.Match[str]) -> str:
            if found[1] == "folder":
                return str(self.folder)
            number = _OF_HOURS.fullmatch(found[1])
            if number is None:
                raise UserError(
                    f"{where} has {found[0]}, but must have {{folder}}, {{N*hours}} or "
                    "{N*sqrt(hours)} with a number N"
                )
            if self.hours is None:
                raise UserError(f"{where} has {found[0]}; set --hours, or `hours` in the recipe")
            growth = self.hours if number[2] == "hours" else math.sqrt(self.hours)
            return str(max(1, round(float(number[1]) * growth)))

        return _PLACEHOLDER.sub(value, word)


def run(args: Sequence[str]) -> int:
    """Run the stages of a recipe that have not finished; return the exit code of the first one that
    fails, or 0."""
    parser = Parser(
        prog="torchtitan run",
        description="Run the stages of a recipe in order. Finished ones are not repeated, an "
        "interrupted one resumes.",
    )
    parser.add_argument(
        "recipe", type=Path, help="YAML file: `stages`, a list of `name`, `run` and `base`"
    )
    parser.add_argument(
        "--folder", type=Path, help="folder of all stages (default: outputs/NAME of the recipe)"
    )
    parser.add_argument(
        "--hours",
        type=float,
        metavar="H",
        help="size of a recipe whose command lines have {N*hours} (default: its `hours`)",
    )
    parser.add_argument(
        "--plan", action="store_true", help="print the command of each stage, and end"
    )
    options = parser.parse_args(args)
    return run_command("run", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    folder = options.folder or Path("outputs", options.recipe.stem)
    stages = _read(options.recipe, folder, options.hours)
    if options.plan:
        for line in _commands(stages):
            print(presentable(line))
        return 0
    # a recipe is trusted like a script, and may be stopped before it runs any command
    logger.info("the stages of the recipe run these commands:")
    for line in _commands(stages):
        logger.info("%s", line)
    return _run_stages(stages, folder)


def _read(path: Path, folder: Path, hours: float | None) -> list[_Stage]:
    """Return the stages of a recipe, with the values of their placeholders."""
    document = read_config_file(path, str(path))
    values = _Values(folder, _hours(path, document.get("hours"), hours))
    rows = document.get("stages")
    if not isinstance(rows, list) or not rows:
        raise UserError(
            f"{path} has no list `stages`; each stage has a `name` and a command line `run`"
        )
    stages: list[_Stage] = []
    for number, row in enumerate(rows, 1):
        is_stage = isinstance(row, dict) and {"name", "run"} <= row.keys() <= {
            "name",
            "run",
            "base",
        }
        try:
            words = (
                shlex.split(row["run"])
                if is_stage and all(isinstance(text, str) for text in row.values())
                else []
            )
        except ValueError:  # a quotation without an end
            words = []
        if not words:
            raise UserError(
                f"{path}: stage {number} must have `name` and `run`, a command line, and may have "
                "`base`"
            )
        known = (*COMMANDS, PYTHON)
        if words[0] not in known:
            raise UserError(
                f"{path}: stage {number} has the unknown command "
                f"'{words[0]}'{suggest(words[0], known)}"
            )
        words = [values.fill(word, f"{path}: stage {number}") for word in words]
        name, base = row["name"], row.get("base", "")
        if not name.isidentifier() or any(name == stage.name for stage in stages):
            raise UserError(
                f"{path}: stage {number} has the name '{name}'; use a new word for each stage"
            )
        if base not in ("", "previous") and "/" not in base and not Path(base).exists():
            raise UserError(
                f"{path}: stage '{name}' has base '{base}', which is no folder; use previous or a "
                "folder"
            )
        if base == "previous" and not any(stage.trains for stage in stages):
            raise UserError(f"{path}: stage '{name}' has no previous training stage to be its base")
        stage = _Stage(name, words, base, trains=words[0] == "train")
        if twice := _own_options(stage) & {word.partition("=")[0] for word in words}:
            raise UserError(
                f"{path}: stage '{name}' has {' and '.join(sorted(twice))}, which the recipe sets: "
                "its model is `base`, and it writes to a folder of its name in --folder; remove "
                "the option"
            )
        stages.append(stage)
    return stages


def _own_options(stage: _Stage) -> set[str]:
    """Return the options that a recipe adds to the command of a stage."""
    options = {"--dump_folder"} if stage.trains else set()
    if stage.base:
        options.add("--hf_assets_path" if stage.trains else "--checkpoint")
    return options


def _hours(path: Path, default: object, chosen: float | None) -> float | None:
    """Return `--hours`, or the recipe's own."""
    if chosen is not None and default is None:
        raise UserError(f"--hours {chosen:g}: {path} has no `hours`, so its size is fixed")
    hours = default if chosen is None else chosen
    if hours is None:
        return None
    is_number = isinstance(hours, int | float) and not isinstance(hours, bool)
    name = "hours" if chosen is None else "--hours"
    require(is_number and 0 < float(str(hours)) < 1e6, name, hours, "a number above 0, below 1e6")
    return float(str(hours))


def _run_stages(stages: list[_Stage], folder: Path) -> int:
    previous, id_of_previous = "", ""
    for stage in stages:
        own = folder / stage.name
        words = list(stage.words)
        has_previous = stage.base == "previous"
        if stage.base:
            words += [
                "--hf_assets_path" if stage.trains else "--checkpoint",
                previous if has_previous else stage.base,
            ]
        words += ["--dump_folder", str(own)] if stage.trains else []
        record = {"command": redacted(words), "base": id_of_previous if has_previous else ""}
        done = own / "finished.json"
        if stage.trains and not done.exists():
            _check_training(stage.name, words[1:])
        if not done.exists() and (
            code := _run_stage(stage.name, words, own, shows=not stage.trains)
        ):
            return code
        exported = _exported(stage.name, words[1:], own) if stage.trains else None
        if stage.trains and not exported:
            raise UserError(
                f"stage '{stage.name}' has exported no model; remove {own} to repeat it"
            )
        if not done.exists():
            durable.write(done, json.dumps({**record, "id": uuid.uuid4().hex}))
        finished = read_object(done)
        if {"command", "base", "id"} != finished.keys() or not isinstance(finished["id"], str):
            raise UserError(
                f"stage '{stage.name}': '{done}' is damaged; remove {own} to repeat the stage"
            )
        if finished != {**record, "id": finished["id"]}:
            raise UserError(
                f"stage '{stage.name}' finished with another command or base; remove {own} to "
                "repeat it"
            )
        if exported:
            previous, id_of_previous = str(exported.parent), finished["id"]
        logger.info("stage %s has finished: %s", stage.name, own)
    return 0


def _exported(stage: str, words: list[str], own: Path) -> Path | None:
    """Return the config.json of the model that a finished stage has exported, the newest if there
    are several."""
    with errors_of(f"stage '{stage}'"):
        folder = ConfigManager().parse_args(words).config.checkpoint.resolve_folder(str(own))
    steps = [info.step for info in list_checkpoints(folder) if info.kind == "huggingface"]
    return Path(str(folder), f"step-{max(steps)}", "config.json") if steps else None


def _commands(stages: Sequence[_Stage]) -> Iterator[str]:
    """Yield the name and command of each stage."""
    for stage in stages:
        base = f" (base: {stage.base})" if stage.base else ""
        yield f"{stage.name}: {_shown(stage.words)}{base}"


def _shown(words: Sequence[str]) -> str:
    return shlex.join(words if words[0] == PYTHON else ["torchtitan", *words])


def _check_training(stage: str, words: list[str]) -> None:
    """Raise `UserError` for wrong options, or if the stage would export no model."""
    with errors_of(f"stage '{stage}'"):
        checkpoint = ConfigManager().parse_args(words).config.checkpoint
        if not (checkpoint.enable and checkpoint.last_save_in_hf):
            raise UserError(
                "it would export no model; add --checkpoint.enable --checkpoint.last_save_in_hf"
            )


def _run_stage(name: str, words: list[str], folder: Path, *, shows: bool) -> int:
    """Run a command line. Return its exit code; what it `shows` is printed, and kept in
    output.txt."""
    logger.info("stage %s: %s", name, _shown(words))
    with os_errors_as(f"--folder: '{folder}' cannot be written", "; name another folder"):
        durable.make_folder(folder)
    stdout = subprocess.PIPE if shows else None
    ended = (
        run_python(words[1:], stdout=stdout)
        if words[0] == PYTHON
        else run_torchtitan(words, stdout=stdout)
    )
    if shows:
        sys.stdout.write(for_output(ended.output.decode(errors="replace")))
        (folder / "output.txt").write_bytes(ended.output)
    return abs(ended.code)
