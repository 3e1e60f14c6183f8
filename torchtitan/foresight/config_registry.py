"""The configuration `dial` of every family: `--module llama3 --config dial --dial 6`."""

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.evaluation.validate import Validator
from torchtitan.components.optim.lr_scheduler import LRScheduler
from torchtitan.components.optim.optimizer import Optimizer
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.config import ActivationCheckpointConfig, CompileConfig, TrainingConfig
from torchtitan.foresight import scaling
from torchtitan.foresight.devices import device_named
from torchtitan.foresight.dial import DialTrainer
from torchtitan.foresight.sizes import parameters_per_token, sized, small_flavor
from torchtitan.foresight.transfer import (
    Transfer,
    initial_scale,
    on_meta,
    param_groups,
    transfers,
    transfers_depth,
)
from torchtitan.models.common.recipes import balanced
from torchtitan.tools.errors import UserError, require
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

_DEFAULT_LAYERS = 6


def dial(
    hf_assets_path: str = "",
    device: str = "",
    dial: int | None = None,
    budget: float | None = None,
    hours: float | None = None,
    devices: int = 1,
    tokens_per_parameter: float = scaling.TOKENS_PER_PARAMETER,
    width_per_layer: int = scaling.WIDTH_PER_LAYER,
    window: int | None = None,
    muon: bool = False,
    family: ModuleType | None = None,
) -> Trainer.Config:
    """Pre-train a model of `--dial` layers, or the largest one for `--budget` FLOPs or `--hours` on
    `--devices`; everything else follows from the rules of `torchtitan.foresight.scaling`."""
    if family is None or not hasattr(family, "FLAVORS"):
        raise UserError("--config dial needs a family of models, such as --module llama3")
    _check(dial, budget, hours, device, devices, tokens_per_parameter, width_per_layer)
    require(window is None or window >= 1, "--window", window, "at least 1 token")
    vocabulary = PretrainedTokenizer.Config().build(path=hf_assets_path).vocab_size
    flavor = small_flavor(family)
    total = budget
    if hours is not None:
        speed = device_named(device, devices).bfloat16_flops
        total = 3600 * hours * devices * scaling.UTILIZATION * speed

    def model_of(layers: int) -> Any:
        model = sized(flavor, scaling.sizes(layers, width_per_layer))
        return dataclasses.replace(model, vocab_size=vocabulary)

    def window_of(model: Any) -> int:
        return scaling.window(model.dim) if window is None else window

    def cost_of(layers: int) -> tuple[float, float]:
        model = model_of(layers)
        parameters = parameters_per_token(model)
        if hours is None:
            return parameters, 6 * parameters
        per_token: float = on_meta(model).flops_per_token(window_of(model))
        return parameters, per_token

    name = "--budget" if hours is None else f"--hours {hours:g} on {devices} x {device}:"
    layers, tokens = _size_and_length(cost_of, dial, total, tokens_per_parameter, name)
    model = model_of(layers)
    # with the same number of layers, so that each kind of layer has a counterpart
    base = sized(flavor, scaling.base_sizes(layers, width_per_layer))
    found = _transfers(model, dataclasses.replace(base, vocab_size=vocabulary), muon=muon)
    seq_len = window_of(model)
    on_gpu = device != "cpu" if device else torch.cuda.is_available()
    plan = scaling.schedule(parameters_per_token(model), tokens, seq_len, devices, muon=muon)
    config = DialTrainer.Config(
        hf_assets_path=hf_assets_path,
        dial=layers if total is None else None,
        budget=budget,
        hours=hours,
        device=device,
        devices=devices,
        tokens_per_parameter=tokens_per_parameter,
        width_per_layer=width_per_layer,
        window=window,
        muon=muon,
        model_spec=family.model_spec(dataclasses.replace(model, vocab_size=None), "dial"),
        model_converters=[initial_scale(found)],
        training=TrainingConfig(
            steps=plan.steps,
            seq_len=seq_len,
            local_batch_size=plan.local_windows,
            global_batch_size=plan.windows,
            mixed_precision_param="bfloat16" if on_gpu else "float32",
        ),
        optimizer=Optimizer.Config(
            name="Muon" if muon else "AdamW",
            lr=plan.rate,
            weight_decay=plan.weight_decay,
            param_groups=param_groups(found),
        ),
        lr_scheduler=LRScheduler.Config(warmup_steps=plan.warmup_steps),
        activation_checkpoint=ActivationCheckpointConfig(mode="auto"),
        # On a CPU, compilation takes longer than a short run gains.
        compile=CompileConfig(enable=on_gpu),
        validator=Validator.Config(enable=True, freq=max(1, plan.steps // 4)),
        checkpoint=CheckpointManager.Config(enable=True, interval=500, keep_latest_k=2),
    )
    return balanced(config) if hasattr(model, "moe") else config


def _transfers(model: object, base: object, *, muon: bool) -> dict[str, Transfer]:
    """Return name → transfer for the configuration of a model, and warn of depth."""
    largest = on_meta(model)
    if not transfers_depth(largest):
        logger.warning(
            "the best learning rate may change with depth: the residual branches of this family "
            "end with norms that add one to their weights, which cannot scale the branches"
        )
    return transfers(largest, on_meta(base), muon=muon)


def _check(
    dial: int | None,
    budget: float | None,
    hours: float | None,
    device: str,
    devices: int,
    tokens_per_parameter: float,
    width_per_layer: int,
) -> None:
    given = {"--dial": dial, "--budget": budget, "--hours": hours}
    chosen = [name for name, value in given.items() if value is not None]
    if len(chosen) > 1:
        raise UserError(f"{' and '.join(chosen)} each choose the size; set one of them")
    if hours is not None and not device:
        raise UserError(f"--hours {hours:g} needs --device, such as h100")
    most = scaling.MOST_LAYERS
    require(dial is None or 1 <= dial <= most, "--dial", dial, f"from 1 to {most} layers")
    for name, value in {"--budget": budget, "--hours": hours}.items():
        require(value is None or 0 < value < 1e30, name, value, "above 0 and below 1e30")
    require(devices >= 1, "--devices", devices, "at least 1")
    is_length = 0 < tokens_per_parameter < 1e6
    require(is_length, "--tokens_per_parameter", tokens_per_parameter, "above 0 and below 1e6")
    fits = 8 <= width_per_layer <= 4096 and width_per_layer % 8 == 0
    require(fits, "--width_per_layer", width_per_layer, "a multiple of 8 from 8 to 4096")


def _size_and_length(
    cost_of: Callable[[int], tuple[float, float]],
    dial: int | None,
    budget: float | None,
    tokens_per_parameter: float,
    name: str,
) -> tuple[int, float]:
    """Return the layers of the model and the tokens of the run. `cost_of` returns the parameters of
    a model and its FLOPs per token, and `name` is of the budget."""
    if budget is None:
        layers = _DEFAULT_LAYERS if dial is None else dial
        return layers, tokens_per_parameter * cost_of(layers)[0]

    def cost(layers: int) -> float:
        parameters, per_token = cost_of(layers)
        return tokens_per_parameter * parameters * per_token

    if (least := cost(1)) > budget:
        raise UserError(
            f"{name} {budget:.3g} FLOPs is too small: one layer takes {least:.3g} "
            f"(--tokens_per_parameter {tokens_per_parameter:g})"
        )
    low, high = 1, scaling.MOST_LAYERS + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) <= budget else (low, middle)
    return low, budget / cost_of(low)[1]
