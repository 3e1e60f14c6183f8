"""`DialTrainer`: a run whose numbers follow from one dial; it prints them, with predicted time,
memory and loss, before it starts."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchtitan.components.observe.run_files import FORECAST
from torchtitan.components.optim.optimizer import Optimizer
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.foresight import scaling
from torchtitan.foresight.devices import device_named, own_device
from torchtitan.foresight.loss_law import Setting, read_ladder
from torchtitan.foresight.prediction import predict
from torchtitan.foresight.sizes import parameters_per_token
from torchtitan.tools import durable
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import presentable
from torchtitan.tools.tables import open_console, print_table
from torchtitan.trainer import Trainer
from torchtitan.trainer.config import Preflight


class DialTrainer(Trainer):
    """A `Trainer` whose configuration remembers the dial."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """A run whose numbers follow from one dial."""

        dial: int | None = None
        """Layers of the model; all other numbers follow."""

        budget: float | None = None
        """FLOPs of the run, instead of `dial`."""

        hours: float | None = None
        """Hours of the run on the devices, instead of `dial`."""

        device: str = ""
        """Kind of device, such as h100, as `torchtitan plan` takes it; also decides precision and
        compilation. Empty: this machine's."""

        devices: int = 1
        """Data-parallel ranks."""

        tokens_per_parameter: float = scaling.TOKENS_PER_PARAMETER
        """Length of the run, in tokens per parameter that multiplies every token."""

        width_per_layer: int = scaling.WIDTH_PER_LAYER
        """Width of the model, per layer."""

        window: int | None = None
        """Tokens of a window, which the batch follows. None: 256 below a width of 512, else
        2048."""

        muon: bool = False
        """Muon for the matrices inside layers, with rates that transfer for it, and AdamW for the
        rest."""

        ladder: str = ""
        """Folder of `torchtitan ladder`, whose fit forecasts the loss. Empty: no forecast."""

        predict: bool = True
        """Predict time and memory before the run, which takes seconds."""

        def check(self, world_size: int, *, dry_run: bool = False) -> Preflight:
            """Check the configuration as every run's, and print the numbers of the run. Raise
            `UserError` for an optimizer without transfer."""
            adam = ("AdamW", "AdamW8bit", "AdamW4bit", "AdamWOffload")
            if self.optimizer.name not in (("Muon",) if self.muon else adam):
                raise UserError(
                    f"--optimizer.name {self.optimizer.name}: the rates of --config dial transfer "
                    "for AdamW, and with --muon for Muon; choose one of them"
                )
            preflight = Trainer.Config.check(self, world_size, dry_run=dry_run)
            tokenizer = preflight.tokenizer
            announce(self.resolve(tokenizer), None if dry_run else tokenizer, world_size)
            return preflight

    config: Config


@dataclass(frozen=True)
class Cost:
    """Size and length of a run."""

    parameters: float
    """Number of parameters that multiply every token."""
    tokens: int
    flops: float
    """With attention."""


def cost_of(config: Trainer.Config, world_size: int = 1) -> Cost:
    """Return the cost of a run with a known vocabulary."""
    training, model = config.training, config.model_spec.model
    parameters = parameters_per_token(model)
    windows = training.resolve_global_batch_size(world_size)
    tokens = training.steps * windows * training.seq_len
    with torch.device("meta"):
        per_token = model.build().flops_per_token(training.seq_len)
    return Cost(parameters, tokens, per_token * tokens)


def setting_of(config: DialTrainer.Config, tokenizer: Tokenizer) -> Setting:
    """Return the properties that a run shares with its ladder."""
    loader: Any = config.dataloader
    return Setting(
        family=config.model_spec.module,
        width_per_layer=config.width_per_layer,
        tokenizer=tokenizer.fingerprint,
        window=config.training.seq_len,
        optimizer="Muon" if config.muon else "AdamW",
        base_rate=config.optimizer.lr,
        data=loader.dataset,
        held_out_data=config.validator.dataset,
    )


def announce(config: DialTrainer.Config, tokenizer: Tokenizer | None, world_size: int) -> None:
    """Print the numbers of a run with their rules, and the predictions; write the forecast. Without
    a tokenizer, in a dry run, which predicts time and memory itself, only the cost is predicted."""
    cost = cost_of(config, world_size)
    rules = {rule.quantity: rule for rule in scaling.RULES}
    rows = [
        [name, value, rules[name].option, rules[name].rule, rules[name].source]
        for name, value in values_of(config, cost, world_size).items()
    ]
    console = open_console()
    columns = ("quantity", "value", "option", "rule", "source")
    print_table(console, "The dial", columns, rows)
    for name, text in _predictions(config, cost, tokenizer, world_size).items():
        console.print(presentable(f"predicted {name}: {text}"), soft_wrap=True)


def values_of(config: Trainer.Config, cost: Cost, world_size: int) -> dict[str, str]:
    """Return quantity of `scaling.RULES` → value, after overrides."""
    model: Any = config.model_spec.model
    training, schedule = config.training, config.lr_scheduler
    windows = training.resolve_global_batch_size(world_size)
    ratio = cost.tokens / cost.parameters
    by_rule = f"by the rule {scaling.batch_tokens(cost.tokens):,.0f}"
    decay = "the rest" if schedule.decay_ratio is None else f"{schedule.decay_ratio:g} of the run"
    return {
        "layers": f"{model.n_layers}",
        "width": f"{model.dim}",
        "heads": f"{model.n_heads}",
        "feed-forward width": f"{model.ffn_dim}",
        "window": f"{training.seq_len:,} tokens",
        "tokens": f"{cost.tokens:,} ({ratio:.3g} per parameter), {training.steps:,} steps",
        "batch": f"{windows} windows, {windows * training.seq_len:,} tokens ({by_rule})",
        "learning rate": f"{config.optimizer.lr:.3g} ({_range_of_rates(config.optimizer)})",
        "weight decay": f"{config.optimizer.weight_decay:.3g}",
        "warm-up": f"{schedule.warmup_steps} {schedule.unit}",
        "decay": f"{decay}, {schedule.decay_type} to {schedule.min_lr_factor:g}",
    }


def _range_of_rates(optimizer: Optimizer.Config) -> str:
    factors = [group.lr_factor for group in optimizer.param_groups.values()] or [1.0]
    return f"x {min(factors):.3g} to {max(factors):.3g}"


def _predictions(
    config: DialTrainer.Config, cost: Cost, tokenizer: Tokenizer | None, world_size: int
) -> dict[str, str]:
    vocabulary = config.model_spec.model.vocab_size
    assert vocabulary is not None
    share = vocabulary * config.model_spec.model.dim / cost.parameters
    size = f"{cost.parameters:,.0f} parameters per token, {share:.0%} of them the output head"
    found = {"cost": f"{cost.flops:.3g} FLOPs; {size}"}
    if tokenizer is not None:
        found |= _time_and_memory(config, world_size) if config.predict else {}
        found["loss"] = _loss(config, cost, setting_of(config, tokenizer))
    return found


def _time_and_memory(config: DialTrainer.Config, world_size: int) -> dict[str, str]:
    try:
        device = (
            device_named(config.device, world_size)
            if config.device
            else own_device(world_size, "set --device to one that is known")
        )
        step = predict(config, world_size, device)
    except UserError as error:
        return {"time and memory": f"none: {error}"}
    hours = step.seconds * config.training.steps / 3600
    return {
        "time": f"{hours:.3g} hours on {world_size} x {device.name}, without saves",
        "memory": f"{step.memory_gib:.3g} GiB per device",
    }


def _loss(config: DialTrainer.Config, cost: Cost, setting: Setting) -> str:
    if not config.ladder:
        return "none without a ladder of smaller runs (--ladder DIR, torchtitan ladder)"
    ladder = read_ladder(Path(config.ladder), setting)
    forecast = ladder.forecast(cost.parameters, cost.tokens)
    record = {"ladder": config.ladder, **forecast._asdict()}
    path = Path(config.dump_folder) / FORECAST
    if not path.exists():  # made before the run, and not again when it resumes
        durable.write(path, json.dumps(record) + "\n")
    return f"{forecast} at the end, by {len(ladder.points)} runs of {config.ladder}"
