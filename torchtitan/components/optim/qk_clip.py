"""`QKClip`: limits the scores of attention heads by their weights (Kimi K2, arXiv:2507.20534,
section 2.1). With `--optimizer.name Muon`, it is MuonClip."""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.process_group import world_size
from torchtitan.protocols.attention import ScaledScores
from torchtitan.protocols.converter import ModelConverter
from torchtitan.tools.errors import UserError, require
from torchtitan.tools.sharded import is_dtensor


class QKClip(ModelConverter):
    """After each optimizer step, scales the projections of each head whose largest score S in the
    step's batch exceeds the threshold t, so that the same score would be t: queries and keys of a
    head by sqrt(t / S), or its queries alone by t / S where heads share keys.

    Attention computes the scores a second time, in blocks, for their maximum, which no kernel
    returns.
    """

    moves_weights = True
    run_options = frozenset({"threshold"})

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConverter.Config):
        """Limit of attention scores."""

        threshold: float = 100.0
        """Largest product of a query and a key, times the scale of scores, before a head's weights
        shrink."""

        def validate(self) -> None:
            valid = 0 < self.threshold < math.inf
            require(valid, f"{self.option}.threshold", self.threshold, "a number above 0")

        def check_run(
            self,
            *,
            training: TrainingConfig,
            parallelism: ParallelismConfig,
            compile: CompileConfig,
        ) -> None:
            parallelism.require_one(
                *("tensor", "context", "pipeline"), user=self.option, why="which reads whole heads"
            )
            if compile.compiles_model:
                raise UserError(
                    f"{self.option} records scores outside of compiled code; set "
                    "--compile.components loss, or disable --compile.enable"
                )
            if training.enable_cpu_offload:
                raise UserError(
                    f"{self.option} cannot be combined with --training.enable_cpu_offload, since "
                    "it computes factors on the device; leave out one of them"
                )
            if training.dtype != "float32":
                raise UserError(
                    f"{self.option} changes weights by less than --training.dtype "
                    f"{training.dtype} can tell apart; set float32"
                )

    config: Config

    def check_model(self, model: nn.Module) -> None:
        _attention_of(model, self.config.option)

    def convert(self, model: nn.Module) -> None:
        """Let attention record its largest scores. Raise `UserError` if there is none, or its
        scores do not follow its weights."""
        for attention in _attention_of(model, self.config.option).values():
            attention.scores.records_peaks = True

    def pre_step_hook(self, model_parts: list[nn.Module], step: int) -> None:
        _forget_peaks(_all(model_parts))  # of a step that was not taken

    @torch.no_grad()
    def post_optimizer_hook(self, model_parts: list[nn.Module]) -> None:
        layers = _all(model_parts)
        if any(layer.scores.peaks_H is None for layer in layers):  # a step without samples
            return
        peaks = torch.cat([layer.scores.peaks_H for layer in layers])
        if world_size() > 1:
            dist.all_reduce(peaks, dist.ReduceOp.MAX)
        threshold = self.config.threshold
        is_large = peaks.isfinite() & (peaks > threshold)
        factors = torch.where(is_large, threshold / peaks, 1.0)
        sizes = [len(layer.scores.peaks_H) for layer in layers]
        for layer, factor_H in zip(layers, factors.split(sizes), strict=True):
            for parameter, factor_E in layer.rows_of_scores(factor_H):
                _multiply_rows(parameter, factor_E)
        _forget_peaks(layers)


def _all(model_parts: list[nn.Module]) -> list[ScaledScores]:
    modules = (module for part in model_parts for module in part.modules())
    return [module for module in modules if isinstance(module, ScaledScores)]


def _forget_peaks(layers: list[ScaledScores]) -> None:
    for layer in layers:
        layer.scores.peaks_H = None


def _attention_of(model: nn.Module, option: str) -> dict[str, ScaledScores]:
    """Return the attention of a model by name. Raise `UserError` if there is none, or the scores of
    one do not follow its weights."""
    found = {
        name: module for name, module in model.named_modules() if isinstance(module, ScaledScores)
    }
    if not found:
        raise UserError(f"{option}: the model has no attention whose scores it can limit")
    for name, attention in found.items():
        if reason := attention.reason_not_to_scale():
            raise UserError(f"{option}: the scores of {name} do not follow its weights: {reason}")
    return found


def _multiply_rows(parameter: Tensor, factor_E: Tensor) -> None:
    """Multiply each row of a whole or sharded parameter by a factor."""
    factors = factor_E.view(-1, *[1] * (parameter.ndim - 1))
    if is_dtensor(parameter):
        from torch.distributed.tensor import DTensor, Replicate

        mesh = parameter.device_mesh
        factors = DTensor.from_local(factors, mesh, [Replicate()] * mesh.ndim, run_check=False)
    parameter.mul_(factors)
