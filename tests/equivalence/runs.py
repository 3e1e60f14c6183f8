"""One training run, what is kept of it, and how two of them are compared."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.equivalence.layouts import PROBLEM, Options
from tests.training import RaggedDataLoader, read_metrics, read_validation, tiny_config
from torchtitan.components.data.dataloader import PretrainDataLoader
from torchtitan.distributed.initialize import canonical_name
from torchtitan.protocols import ModelConverter
from torchtitan.protocols.initializer import TruncatedNormal, with_initializers
from torchtitan.trainer import Trainer

TOLERANCE = 1e-5
"""Relative. Layouts differ in the order of float32 sums alone, which shows in the sixth or seventh digit."""


class UnitVariance(ModelConverter):
    """Lets matrices start with outputs of unit variance. From the usual small ones, attention is nearly even and blocks
    add little to the residual stream: ten steps without some layer's gradient would end within `TOLERANCE`."""

    def convert(self, model: nn.Module) -> None:
        """Of a decoder on the meta device."""
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                with_initializers(module, weight=TruncatedNormal(module.embedding_dim**-0.5))
            elif isinstance(module, nn.Linear):
                with_initializers(module, weight=TruncatedNormal(module.in_features**-0.5))


def make_config(folder: Path, options: Options, loader: type[PretrainDataLoader] = RaggedDataLoader) -> Any:
    """The configuration of `PROBLEM` with these options, run in `folder`."""
    config = tiny_config(folder, **{**PROBLEM, **options})
    config.dataloader = loader.Config(**config.dataloader.to_dict())
    config.model_converters = [UnitVariance.Config()]
    return config


def record_run(
    folder: Path,
    options: Options,
    trainer_class: type[Trainer] = Trainer,
    loader: type[PretrainDataLoader] = RaggedDataLoader,
) -> None:
    """Train, and save each rank's weights, whole, beside the run's metrics; for every rank of a layout to call."""
    if options.get("compile__enable"):
        torch.compiler.reset()  # or what an earlier run has compiled, with other settings, would be used
    trainer = trainer_class(make_config(folder, options, loader))
    try:
        trainer.train()
        parts = trainer.model_parts
        named = [(canonical_name(name), tensor) for part in parts for name, tensor in part.named_parameters()]
        weights = {name: _whole(tensor) for name, tensor in named}
        assert len(weights) == len(named), "two of a rank's parameters have the same name"
        rank = dist.get_rank() if dist.is_initialized() else 0
        torch.save(weights, folder / f"weights-{rank}.pt")
    finally:
        trainer.close()


def _whole(parameter: Tensor) -> Tensor:
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()


class InconsistentRanks(Exception):
    """The ranks of a run do not hold what they should; the message says which tensor."""


@dataclass(frozen=True)
class Outcome:
    """What a run computed: a number per step, and the weights at its end."""

    losses: Sequence[float]
    grad_norms: Sequence[float]
    validation_losses: Sequence[float]
    weights: dict[str, Tensor]

    @classmethod
    def read(cls, folder: Path, processes: int, pipeline_degree: int) -> "Outcome":
        """Of a run that `record_run` has made.

        Raises:
            InconsistentRanks: see `merge_weights`.
        """
        of_ranks = [torch.load(folder / f"weights-{rank}.pt") for rank in range(processes)]
        steps = read_metrics(folder, "loss", "grad_norm")
        assert [step for step, *_ in steps] == list(range(1, len(steps) + 1))
        return cls(
            losses=[loss for _, loss, _ in steps],
            grad_norms=[norm for _, _, norm in steps],
            validation_losses=[loss for _, loss in read_validation(folder)],
            weights=merge_weights(of_ranks, copies=processes // pipeline_degree),
        )


def merge_weights(of_ranks: Sequence[dict[str, Tensor]], copies: int) -> dict[str, Tensor]:
    """The weights of all pipeline stages together.

    Args:
        of_ranks: each rank's weights, whole.
        copies: ranks that hold each of them.

    Raises:
        InconsistentRanks: if another number of ranks holds one of them, or copies are not equal, bit for bit.
    """
    held: dict[str, list[Tensor]] = {}
    for weights in of_ranks:
        for name, tensor in weights.items():
            held.setdefault(name, []).append(tensor)
    for name, tensors in held.items():
        if len(tensors) != copies:
            raise InconsistentRanks(f"{name} is on {len(tensors)} ranks, and should be on {copies}")
        if not all(torch.equal(tensors[0], tensor) for tensor in tensors):
            raise InconsistentRanks(f"{name} differs from rank to rank")
    return {name: tensors[0] for name, tensors in held.items()}


@dataclass(frozen=True)
class Differences:
    """The largest relative differences between two runs; infinite where they have not the same steps or tensors."""

    loss: float
    grad_norm: float
    validation_loss: float
    weights: float
    """Of the tensor that differs most, ‖Δ‖ / ‖w‖."""
    worst_weight: str
    """Its name."""

    @property
    def agree(self) -> bool:
        """Whether all are within `TOLERANCE`; NaN is not."""
        values = (self.loss, self.grad_norm, self.validation_loss, self.weights)
        return all(value <= TOLERANCE for value in values)

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.1e}, gradient norm {self.grad_norm:.1e}, validation {self.validation_loss:.1e}, "
            f"weights {self.weights:.1e} ({self.worst_weight})"
        )


def compare(outcome: Outcome, reference: Outcome) -> Differences:
    """How far `outcome` is from `reference`."""
    names = sorted({*outcome.weights, *reference.weights})
    of_weights = {name: _weight_difference(outcome.weights.get(name), reference.weights.get(name)) for name in names}
    worst = max(of_weights, key=lambda name: _nan_is_worst(of_weights[name]))
    return Differences(
        loss=_largest_difference(outcome.losses, reference.losses),
        grad_norm=_largest_difference(outcome.grad_norms, reference.grad_norms),
        validation_loss=_largest_difference(outcome.validation_losses, reference.validation_losses),
        weights=of_weights[worst],
        worst_weight=worst,
    )


def _largest_difference(values: Sequence[float], expected: Sequence[float]) -> float:
    if len(values) != len(expected) or not expected:
        return math.inf
    differences = [abs(a - b) / abs(b) for a, b in zip(values, expected, strict=True)]
    return max(differences, key=_nan_is_worst)


def _weight_difference(value: Tensor | None, expected: Tensor | None) -> float:
    if value is None or expected is None or value.shape != expected.shape:
        return math.inf
    return ((value.double() - expected.double()).norm() / expected.double().norm()).item()


def _nan_is_worst(value: float) -> float:
    return math.inf if math.isnan(value) else value
