"""Small runs of `--config dial` that a command trains to learn about larger ones: each in a folder
of its own, resumable, and not repeated."""

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan.cli.child import how_ended, run_torchtitan
from torchtitan.components.observe.run_files import METRICS
from torchtitan.config.yaml_files import read_config_file
from torchtitan.tools import durable
from torchtitan.tools.errors import RunFailure, UserError, os_errors_as
from torchtitan.tools.files import json_lines, read_object
from torchtitan.tools.logging import presentable
from torchtitan.tools.redact import redacted

if TYPE_CHECKING:
    from torchtitan.foresight.dial import Cost
    from torchtitan.foresight.loss_law import Setting

CHOSEN = ("--config", "--dial", "--budget", "--hours", "--dump_folder", "--config_file")
"""Options of the runs that the command sets."""

DECIDING = (
    *("model", "model_converters", "loss", "optimizer", "lr_scheduler"),
    *("training", "dataloader"),
)
"""Sections of a run's configuration that its loss follows from."""

SCORES = ("bits_per_byte", "centered_accuracy")
"""Last parts of the names of metrics that tables of runs show."""

CHOSEN_BY_RUN = ("model.vocab_size", "training.local_batch_size")
"""Options that a run may set itself: the vocabulary of its tokenizer, which is part of its setting,
and the part of a batch that fits, which does not change the batch."""

FINISHED = "finished.json"
LOG = "log.txt"


@dataclass(frozen=True)
class SmallRun:
    """A run with validation after its last step."""

    folder: Path
    words: list[str]
    """Command line of `torchtitan train`, without the command."""
    steps: int
    cost: "Cost"
    setting: "Setting"
    sections: dict[str, object]
    """Its configuration, as its file has it."""

    @property
    def command(self) -> str:
        return f"torchtitan train {shlex.join(self.words)}"

    def measured(self) -> float | None:
        """Return the validation loss after the last step, and record it; None: the run has not
        finished. Raise `UserError` if it finished with another command, tokenizer or data, or
        without a finite loss."""
        own = {"command": redacted(self.words), "setting": self.setting._asdict()}
        path = self.folder / FINISHED
        record = read_object(path)
        if not record and (loss := self._last_loss()) is not None:
            record = {**own, "loss": loss}
            durable.write(path, json.dumps(record) + "\n")
        if not record:
            return None
        for name, value in own.items():
            if record.get(name) != value:
                raise UserError(
                    f"'{self.folder}' was trained with another {name} ({record.get(name)}); repeat "
                    "that, remove the folder, or set another --out"
                )
        if type(record.get("loss")) is not float:
            raise UserError(f"'{path}' is damaged; remove '{self.folder}'")
        return float(record["loss"])

    def _last_metrics(self) -> list[dict[str, Any]]:
        """Return the lines of the last step."""
        lines = json_lines(self.folder / METRICS, bool, [])
        return [line for line in lines if line.get("step") == self.steps]

    def scores(self) -> dict[str, float]:
        """Return name → bits per byte or centered accuracy after the last step."""
        values = [item for line in self._last_metrics() for item in line.items()]
        return {
            name: value for name, value in values if name.endswith(SCORES) and type(value) is float
        }

    def _last_loss(self) -> float | None:
        key = "validation_loss"
        losses = [line[key] for line in self._last_metrics() if key in line]
        if not losses:
            return None
        if type(losses[-1]) is not float:  # null: NaN or infinite
            raise UserError(
                f"'{self.folder}' has no finite {key} after its last step, {self.steps}: the "
                "run has diverged, or its held-out text has no tokens; remove it, and change its "
                "options or omit its size"
            )
        return losses[-1]

    def _check_begun(self) -> None:
        """Raise `UserError` if an earlier part of this run had other options or rules."""
        path = self.folder / "config.yaml"
        if not path.exists():
            return
        begun = read_config_file(path, f"'{path}'")
        for section in DECIDING:
            theirs = dict(_values(begun.get(section), section))
            for option, value in _values(self.sections[section], section):
                if option not in CHOSEN_BY_RUN and theirs.get(option, value) != value:
                    raise UserError(
                        f"'{self.folder}' was begun with another {option} ({theirs[option]}), and "
                        f"would continue with {value}; repeat the first command, remove the "
                        "folder, or set another --out"
                    )

    def train(self) -> int:
        """Train the run if it has not finished; return the exit code. Raise `RunFailure` if it
        fails."""
        if self.measured() is not None:
            return 0
        self._check_begun()
        print(presentable(f"{self.command} > {self.folder / LOG}"), flush=True)
        with os_errors_as(f"--out: '{self.folder}' cannot be written", "; name another folder"):
            durable.make_folder(self.folder)
            log = open(self.folder / LOG, "ab")  # noqa: SIM115
        with log:
            ended = run_torchtitan(["train", *self.words], stdout=log, stderr=log)
        if ended.stopped_by:
            return ended.code
        if ended.code:
            log_path = self.folder / LOG
            raise RunFailure(f"a run {how_ended(ended.code)}: {_last_line(log_path)} ({log_path})")
        loss = self.measured()
        if loss is None:
            raise UserError(
                f"'{self.folder}' has stopped before its last step, {self.steps}, or has no "
                "validation_loss there; run the same command again, or give one set of held-out "
                "text with --validator.dataset"
            )
        print(f"  validation loss {loss:.4f}", flush=True)
        return 0


def _values(section: object, prefix: str) -> Iterator[tuple[str, object]]:
    """Return option → value, and section → names of its sections, such as groups of parameters."""
    if not isinstance(section, dict):
        yield prefix, section
        return
    yield prefix, sorted(key for key, value in section.items() if isinstance(value, dict))
    for key, value in section.items():
        yield from _values(value, f"{prefix}.{key}")


def _last_line(log: Path) -> str:
    """Return the last line of a log of any length that has text."""
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - 2**16))
        lines = file.read().decode("utf-8", "replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "without a message")


def small_run(folder: Path, own: Sequence[str], words: Sequence[str]) -> SmallRun:
    """Return a run with its `own` options and the `words` of all runs. Raise `UserError` if the
    run has no validation or no checkpoints."""
    from torchtitan.foresight.dial import cost_of, setting_of

    # the caller prints the cost of all runs at once
    all_words = ["--config", "dial", *own, "--predict=false", *words, "--dump_folder", str(folder)]
    config = configuration(all_words)
    if not (config.validator.enable and config.checkpoint.enable):
        raise UserError("small runs need validation and checkpoints; leave them on")
    tokenizer = config.tokenizer.build(path=config.hf_assets_path)
    cost = cost_of(config.resolve(tokenizer), config.devices)
    setting = setting_of(config, tokenizer)
    sections = redacted(config.to_dict())
    return SmallRun(folder, all_words, config.training.steps, cost, setting, sections)


def configuration(words: Sequence[str]) -> Any:
    """Return the configuration of a command line of `torchtitan train`."""
    from torchtitan.config.manager import ConfigManager

    return ConfigManager("torchtitan train").parse_args(words).config


def check_words(words: Sequence[str], remedy: str) -> None:
    """Raise `UserError` for an option of the runs that the command sets."""
    for word in words:
        name = word.partition("=")[0]
        if name in CHOSEN:
            raise UserError(f"{name} is chosen for each run; {remedy}")


def described(run: SmallRun) -> list[str]:
    """Return parameters, tokens, steps and FLOPs as text."""
    cost = run.cost
    return [f"{cost.parameters:,.0f}", f"{cost.tokens:,}", f"{run.steps:,}", f"{cost.flops:.3g}"]


def total_cost(runs: Sequence[SmallRun]) -> str:
    """Return the cost of all runs and of the unfinished runs."""
    total = sum(run.cost.flops for run in runs)
    left = sum(run.cost.flops for run in runs if run.measured() is None)
    return f"{len(runs)} runs: {total:.3g} FLOPs, {left:.3g} of them left"
