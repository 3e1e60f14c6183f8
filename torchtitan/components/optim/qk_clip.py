"""`QKClip`: limits the scores of attention heads by their weights (Kimi K2, arXiv:2507.20534,
section 2.1). With `--optimizer.name Muon`, it is MuonClip."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.initialize import canonical_name, local_part, local_slices
from torchtitan.distributed.process_group import world_size
from torchtitan.protocols.attention import ScaledScores
from torchtitan.protocols.converter import ModelConverter
from torchtitan.tools.device import device_type
from torchtitan.tools.errors import UserError, require
from torchtitan.tools.sharded import is_dtensor


class QKClip(ModelConverter):
    """After each optimizer step, scales the projections of each head whose largest score S in the
    step's batch exceeds the threshold t, so that the same score would be t: queries and keys of a
    head by sqrt(t / S), or its queries alone by t / S where heads share keys.

    Attention computes the scores a second time, in blocks, for their maximum, which no kernel
    returns; this part of compiled layers is not compiled. Of projections with DoRA, it scales the
    magnitudes.
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
            if training.dtype != "float32":
                raise UserError(
                    f"{self.option} changes weights by less than --training.dtype "
                    f"{training.dtype} can tell apart; set float32"
                )

    config: Config

    def check_model(self, model: nn.Module) -> None:
        _attention_of(model, self.config.option)

    def convert(self, model: nn.Module) -> None:
        """Make attention record its largest scores. Raise `UserError` without attention, or if its
        scores do not follow its weights."""
        self.n_heads = {}
        for name, attention in _attention_of(model, self.config.option).items():
            attention.scores.records_peaks = True
            # scores are recorded outside of compiled code
            attention.scores.is_compiled = False
            self.n_heads[name] = attention.n_heads

    def post_init_hook(self, model_parts: list[nn.Module]) -> None:
        """Raise `UserError` if a later converter keeps scores from following the weights."""
        _check_scores(_all(model_parts), self.config.option)

    def pre_step_hook(self, model_parts: list[nn.Module], step: int) -> None:
        _forget_peaks(_all(model_parts))  # of a step that was not taken

    @torch.no_grad()
    def post_optimizer_hook(self, model_parts: list[nn.Module]) -> None:
        layers, device = _all(model_parts), torch.device(device_type())
        # Of all heads of the model: ranks have other layers, other heads or other tokens.
        peaks = torch.full((sum(self.n_heads.values()),), -torch.inf, device=device)
        peaks_of = dict(zip(self.n_heads, peaks.split([*self.n_heads.values()]), strict=True))
        for name, layer in layers.items():
            if layer.scores.peaks_H is not None:  # a step with samples
                first = _first_head(layer)
                peaks_of[name][first : first + len(layer.scores.peaks_H)] = layer.scores.peaks_H
        if world_size() > 1:
            dist.all_reduce(peaks, dist.ReduceOp.MAX)
        threshold = self.config.threshold
        for name, layer in layers.items():
            peaks_H = peaks_of[name]
            is_large_H = peaks_H.isfinite() & (peaks_H > threshold)
            factor_H = torch.where(is_large_H, threshold / peaks_H, 1.0)
            for parameter, factor_E in layer.rows_of_scores(factor_H):
                _multiply_rows(parameter, factor_E)
        _forget_peaks(layers)


def _all(model_parts: list[nn.Module]) -> dict[str, ScaledScores]:
    named = (each for part in model_parts for each in part.named_modules())
    return {canonical_name(name): each for name, each in named if isinstance(each, ScaledScores)}


def _forget_peaks(layers: Mapping[str, ScaledScores]) -> None:
    for layer in layers.values():
        layer.scores.peaks_H = None


def _first_head(layer: ScaledScores) -> int:
    """Return the number of the first head whose scores this rank computes: tensor parallelism gives
    each rank the same number of heads, in order."""
    peaks_H = layer.scores.peaks_H
    if len(peaks_H) == layer.n_heads:
        return 0
    (parameter, _), *_ = layer.rows_of_scores(peaks_H.new_ones(layer.n_heads))
    assert is_dtensor(parameter)
    return len(peaks_H) * parameter.device_mesh.get_local_rank("tp")


def _attention_of(model: nn.Module, option: str) -> dict[str, ScaledScores]:
    """Return the attention of a model by name. Raise `UserError` for a model without attention, or
    with scores that do not follow the weights."""
    found = {
        name: module for name, module in model.named_modules() if isinstance(module, ScaledScores)
    }
    if not found:
        raise UserError(f"{option}: the model has no attention whose scores it can limit")
    _check_scores(found, option)
    return found


def _check_scores(layers: Mapping[str, ScaledScores], option: str) -> None:
    for name, layer in layers.items():
        if reason := layer.reason_not_to_scale():
            raise UserError(f"{option}: the scores of {name} do not follow its weights: {reason}")


def _multiply_rows(parameter: Tensor, factor_E: Tensor) -> None:
    """Multiply each row of a whole or sharded parameter by a factor."""
    rows, own = local_slices(parameter)[0], local_part(parameter)
    factors = factor_E[rows].to(own.device)  # CPU memory if weights are offloaded
    own.mul_(factors.view(-1, *[1] * (own.ndim - 1)))
