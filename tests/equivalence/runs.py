"""Training runs, their outcomes, and the comparison of two outcomes."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.equivalence.layouts import PROBLEM, Options
from tests.equivalence.random_images import RandomImages
from tests.training import RaggedDataLoader, read_metrics, read_validation, tiny_config
from torchtitan.components.data.dataloader import PretrainDataLoader
from torchtitan.components.images.labeled_loader import LabeledImageDataLoader
from torchtitan.distributed.initialize import canonical_name
from torchtitan.models.common.attention import Sinks
from torchtitan.models.common.delta_net import GatedDeltaNet
from torchtitan.models.common.moe.experts import RoutedExperts
from torchtitan.models.common.moe.router import Router
from torchtitan.protocols import ModelConverter
from torchtitan.protocols.initializer import TruncatedNormal, initializers_of, with_initializers
from torchtitan.trainer import Trainer

TOLERANCE = 1e-5
"""Relative tolerance. Layouts differ only in the order of float32 sums, which changes the sixth or
seventh digit."""


class UnitVariance(ModelConverter):
    """Initialize matrices for outputs of unit variance. With the usual small weights, attention is
    nearly uniform and blocks add little to the residual stream, so that a missing gradient could
    stay within `TOLERANCE`.

    The norms in gated delta nets get an eps of 1e-2. If a query and a key are nearly orthogonal,
    the norm of a document's first output magnifies rounding by up to 1 / sqrt(eps). With OLMo
    Hybrid's 1e-5 and a rate of 0.1, a difference grows tenfold per step: in float64 and TP 2 x CP
    2, from 6e-16 of the first gradient norm to 4e-7 of the tenth; in float32, from 1e-7 to
    everything."""

    def convert(self, model: nn.Module) -> None:
        """Set the initializers of a decoder on the meta device."""
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                with_initializers(module, weight=TruncatedNormal(module.embedding_dim**-0.5))
            elif isinstance(module, nn.Linear):
                bias = {} if module.bias is None else {"bias": TruncatedNormal(0.1)}
                with_initializers(module, weight=TruncatedNormal(module.in_features**-0.5), **bias)
            elif isinstance(module, Router):
                bias = {} if module.bias is None else {"bias": TruncatedNormal(0.1)}
                weights = {
                    **initializers_of(module),
                    "weight": TruncatedNormal(module.weight.shape[-1] ** -0.5),
                }
                with_initializers(module, **{**weights, **bias})
            elif isinstance(module, GatedDeltaNet):
                module.norm.eps = 1e-2
            elif isinstance(module, Sinks):
                with_initializers(module, scores=TruncatedNormal(1.0))
            elif isinstance(module, RoutedExperts):
                stds = {
                    name: weight.shape[-1] ** -0.5 for name, weight in module.named_parameters()
                }
                with_initializers(
                    module, **{name: TruncatedNormal(std) for name, std in stds.items()}
                )


def make_config(
    folder: Path, options: Options, loader: type[PretrainDataLoader] = RaggedDataLoader
) -> Any:
    """Return the configuration of `PROBLEM` with `options`, for a run in `folder`."""
    config = tiny_config(folder, **{**PROBLEM, **options})
    of_images = isinstance(config.dataloader, LabeledImageDataLoader.Config)
    kind: Any = RandomImages if of_images else loader
    config.dataloader = kind.Config(**config.dataloader.to_dict())
    config.model_converters = [UnitVariance.Config()]
    return config


def record_run(
    folder: Path,
    options: Options,
    trainer_class: type[Trainer] | None = None,
    loader: type[PretrainDataLoader] = RaggedDataLoader,
) -> None:
    """Train, and save the whole weights of each rank in the folder of the run. Every rank of a
    layout calls it."""
    if options.get("compile__enable"):
        # otherwise, code compiled by an earlier run with other settings is used
        torch.compiler.reset()
    config = make_config(folder, options, loader)
    trainer = trainer_class(config) if trainer_class else config.build()
    try:
        trainer.train()
        parts = trainer.model_parts
        # A list, since a module may be in two pipeline stages of this rank.
        named = [
            (canonical_name(name), tensor)
            for part in parts
            for name, tensor in (*part.named_parameters(), *_saved_buffers(part))
        ]
        weights = [(name, _whole(tensor)) for name, tensor in named]
        rank = dist.get_rank() if dist.is_initialized() else 0
        torch.save(weights, folder / f"weights-{rank}.pt")
    finally:
        trainer.close()


def _saved_buffers(part: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the buffers that checkpoints have; others, such as frequencies, are in every stage."""
    saved = {canonical_name(name) for name in part.state_dict()}
    return [pair for pair in part.named_buffers() if canonical_name(pair[0]) in saved]


def _whole(parameter: Tensor) -> Tensor:
    return (
        (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()
    )


class InconsistentRanks(Exception):
    """The weights of ranks do not match; the message names the tensor."""


@dataclass(frozen=True)
class Outcome:
    """Metrics of each step and the final weights of a run."""

    losses: Sequence[float]
    grad_norms: Sequence[float]
    validation_losses: Sequence[float]
    weights: dict[str, Tensor]

    @classmethod
    def read(
        cls, folder: Path, processes: int, pipeline_degree: int, in_two_stages: Collection[str] = ()
    ) -> "Outcome":
        """Read the outcome of `record_run`.

        Raises:
            InconsistentRanks: see `merge_weights`.
        """
        weights_by_rank = [torch.load(folder / f"weights-{rank}.pt") for rank in range(processes)]
        steps = read_metrics(folder, "loss", "grad_norm")
        assert [step for step, *_ in steps] == list(range(1, len(steps) + 1))
        return cls(
            losses=[loss for _, loss, _ in steps],
            grad_norms=[norm for _, _, norm in steps],
            validation_losses=[loss for _, loss in read_validation(folder)],
            weights=merge_weights(weights_by_rank, processes // pipeline_degree, in_two_stages),
        )


def merge_weights(
    weights_by_rank: Sequence[Sequence[tuple[str, Tensor]]],
    copies: int,
    in_two_stages: Collection[str] = (),
) -> dict[str, Tensor]:
    """Merge the weights of all pipeline stages.

    Args:
        weights_by_rank: the names and whole weights of each rank.
        copies: number of copies of each tensor; twice this number for those `in_two_stages`.

    Raises:
        InconsistentRanks: if the number of copies of a tensor is wrong, or copies are not bitwise
            equal.
    """
    copies_by_name: dict[str, list[Tensor]] = {}
    for weights in weights_by_rank:
        for name, tensor in weights:
            copies_by_name.setdefault(name, []).append(tensor)
    for name, tensors in copies_by_name.items():
        expected = 2 * copies if name in in_two_stages else copies
        if len(tensors) != expected:
            raise InconsistentRanks(f"{name} has {len(tensors)} copies, and should have {expected}")
        if not all(torch.equal(tensors[0], tensor) for tensor in tensors):
            raise InconsistentRanks(f"{name} differs from copy to copy")
    return {name: tensors[0] for name, tensors in copies_by_name.items()}


@dataclass(frozen=True)
class Differences:
    """Largest relative differences between two runs; infinite if their steps or tensors do not
    match."""

    loss: float
    grad_norm: float
    validation_loss: float
    weights: float
    """‖Δ‖ / ‖w‖ of the tensor with the largest difference."""
    worst_weight: str
    """Name of the tensor with the largest difference."""

    @property
    def agree(self) -> bool:
        """True if all differences are within `TOLERANCE`; NaN is not."""
        values = (self.loss, self.grad_norm, self.validation_loss, self.weights)
        return all(value <= TOLERANCE for value in values)

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.1e}, gradient norm {self.grad_norm:.1e}, validation "
            f"{self.validation_loss:.1e}, weights {self.weights:.1e} ({self.worst_weight})"
        )


def compare(outcome: Outcome, reference: Outcome) -> Differences:
    """Return the differences between `outcome` and `reference`."""
    names = sorted({*outcome.weights, *reference.weights})
    weight_differences = {
        name: _weight_difference(outcome.weights.get(name), reference.weights.get(name))
        for name in names
    }
    worst = max(weight_differences, key=lambda name: _nan_is_worst(weight_differences[name]))
    return Differences(
        loss=_largest_difference(outcome.losses, reference.losses),
        grad_norm=_largest_difference(outcome.grad_norms, reference.grad_norms),
        validation_loss=_largest_difference(outcome.validation_losses, reference.validation_losses),
        weights=weight_differences[worst],
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
    if torch.equal(value, expected):  # perhaps zeros
        return 0.0
    return ((value.double() - expected.double()).norm() / expected.double().norm()).item()


def _nan_is_worst(value: float) -> float:
    return math.inf if math.isnan(value) else value
