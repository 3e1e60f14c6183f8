"""The mixture of experts that takes the place of a block's feed-forward network, and its configuration."""

from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchtitan.models.common.feed_forward import GatedFeedForward
from torchtitan.models.common.moe.balance import PenaltyConfig, SelectionBias
from torchtitan.models.common.moe.experts import RoutedExperts
from torchtitan.models.common.moe.router import Router, TopK, sigmoid_scores, softmax_scores
from torchtitan.protocols.initializer import TruncatedNormal, with_initializers
from torchtitan.tools.errors import UserError, require

_MOST = 2**24


def _check(config: Any, least: int, *names: str) -> None:
    """Raise `UserError` for the first of these fields that is neither None nor from `least` to `_MOST`."""
    for name in names:
        value = attrgetter(name)(config)
        require(value is None or least <= value <= _MOST, f"--model.moe.{name}", value, f"from {least} to {_MOST}")


@dataclass(kw_only=True, slots=True)
class MoEConfig:
    """Experts of a model, in the field `moe` of its configuration. A family adds the fields of its router."""

    n_experts: int
    """Routed experts of a layer."""

    top_k: int
    """Routed experts that a token passes through."""

    ffn_dim: int | None = None
    """Width of a routed expert. None: --model.ffn_dim."""

    layer_types: list[Literal["sparse", "dense"]] = field(default_factory=lambda: ["sparse"])
    """Types of the first layers, repeated for the others; dense ones have one network of width --model.ffn_dim."""

    penalties: PenaltyConfig = field(default_factory=PenaltyConfig, compare=False)  # not in config.json
    """Auxiliary losses."""

    def is_sparse(self, index: int) -> bool:
        """Return whether a layer has experts."""
        return self.layer_types[index % len(self.layer_types)] == "sparse"

    def parallel_sizes(self, ffn_dim: int) -> dict[str, int]:
        """Return the sizes that expert parallelism and expert tensor parallelism divide, by field."""
        return {"moe.n_experts": self.n_experts, "moe.ffn_dim": self.ffn_dim or ffn_dim}

    def validate(self) -> None:
        """Raise `UserError` for impossible sizes."""
        _check(self, 1, "n_experts", "ffn_dim")
        _check(self, 0, "penalties.batch_loss", "penalties.sequence_loss", "penalties.z_loss")
        most = f"from 1 to --model.moe.n_experts {self.n_experts}"
        require(1 <= self.top_k <= self.n_experts, "--model.moe.top_k", self.top_k, most)
        require(bool(self.layer_types), "--model.moe.layer_types", self.layer_types, "at least one type")

    def router_options(self) -> dict[str, Any]:
        """Return options of `Router`."""
        return {"choose": TopK(self.top_k)}

    def make_shared(self, width: int, **options: Any) -> nn.Module | None:
        """Return the expert of all tokens, next to routed ones of a `width`; None: there is none."""
        return None


@dataclass(kw_only=True, slots=True)
class QwenMoEConfig(MoEConfig):
    """Experts of Qwen's models: softmax scores, and perhaps a shared expert with a gate."""

    norm_topk_prob: bool = True
    """Divide the weights of a token's experts by their sum."""

    shared_ffn_dim: int | None = None
    """Width of the shared expert. None: there is none."""

    def validate(self) -> None:
        MoEConfig.validate(self)
        _check(self, 1, "shared_ffn_dim")

    def router_options(self) -> dict[str, Any]:
        return {**MoEConfig.router_options(self), "normalized": self.norm_topk_prob}

    def make_shared(self, width: int, **options: Any) -> nn.Module | None:
        return None if self.shared_ffn_dim is None else GatedSharedExpert(hidden_dim=self.shared_ffn_dim, **options)


@dataclass(kw_only=True, slots=True)
class SigmoidMoEConfig(MoEConfig):
    """Experts of DeepSeek-V3 and models after it: sigmoid scores, a selection bias, groups and shared experts."""

    scoring_func: Literal["sigmoid", "softmax"] = "sigmoid"
    """Scores of experts. `softmax` (V2): no selection bias, and a group is as good as its best expert."""

    n_shared_experts: int = 1
    """Experts that every token passes through, computed as one that is wider by this factor."""

    norm_topk_prob: bool = True
    """Divide the weights of a token's experts by their sum."""

    routed_scaling_factor: float = 1.0
    """Factor of the weights after that."""

    n_group: int = 1
    """Groups of routed experts; divides n_experts."""

    topk_group: int = 1
    """Groups that a token's experts are in."""

    bias_rate: float = field(default=0.0, compare=False)  # not in config.json
    """Change of the selection bias after each optimizer step, for balance; DeepSeek-V3 used 0.001."""

    def validate(self) -> None:
        MoEConfig.validate(self)
        size, rest = divmod(self.n_experts, max(1, self.n_group))
        if rest or size < 2 or not 1 <= self.topk_group <= self.n_group or self.top_k > size * self.topk_group:
            raise UserError(
                f"--model.moe.n_group {self.n_group} must divide --model.moe.n_experts {self.n_experts} into groups of "
                f"at least 2, and --model.moe.topk_group {self.topk_group} of them must have --model.moe.top_k "
                f"{self.top_k} experts"
            )
        _check(self, 1, "n_shared_experts")
        _check(self, 0, "routed_scaling_factor", "bias_rate")
        if self.scoring_func == "softmax" and (self.bias_rate or self.norm_topk_prob):
            raise UserError("--model.moe.scoring_func softmax needs --model.moe.bias_rate 0 and no norm_topk_prob")

    def router_options(self) -> dict[str, Any]:
        is_v2 = self.scoring_func == "softmax"
        return {
            "score": softmax_scores if is_v2 else sigmoid_scores,
            "choose": TopK(self.top_k, self.n_group, self.topk_group, members=1 if is_v2 else 2),
            "normalized": self.norm_topk_prob,
            "scale": self.routed_scaling_factor,
            "selection": None if is_v2 else SelectionBias(self.n_experts, self.bias_rate),
        }

    def make_shared(self, width: int, **options: Any) -> nn.Module:
        return GatedFeedForward(hidden_dim=width * self.n_shared_experts, **options)


class MixtureOfExperts(nn.Module):
    """The sum of the routed experts' results, times their weights, and of an expert that gets every token. `norm` and
    `post_norm` are around the routed experts."""

    is_compiled = False
    """Compiled blocks leave this out, since the sizes of its products differ from step to step."""

    def __init__(self, router: Router, experts: RoutedExperts, shared: nn.Module | None = None):
        super().__init__()
        self.router = router
        self.experts = experts
        self.shared = shared
        self.norm: nn.Module = nn.Identity()
        self.post_norm: nn.Module = nn.Identity()

    def forward(self, x_BLD: Tensor) -> Tensor:
        """(B, L, dim) → (B, L, dim)."""
        weights_BLK, chosen_BLK = self.router(x_BLD)
        routed_ND = self.experts(self.norm(x_BLD).flatten(0, 1), weights_BLK.flatten(0, 1), chosen_BLK.flatten(0, 1))
        routed_BLD: Tensor = self.post_norm(routed_ND.view_as(x_BLD))
        return routed_BLD if self.shared is None else routed_BLD + self.shared(x_BLD)


class GatedSharedExpert(GatedFeedForward):
    """A network times a gate of one number per token (Qwen1.5-MoE)."""

    def __init__(self, *, dim: int, init_std: float, **options: Any):
        super().__init__(dim=dim, init_std=init_std, **options)
        # Not a linear layer, since it is too narrow for adapters and quantization.
        self.gate = nn.Parameter(torch.empty(1, dim))
        with_initializers(self, gate=TruncatedNormal(init_std))

    def forward(self, x_BLD: Tensor) -> Tensor:
        """(B, L, dim) → (B, L, dim)."""
        return torch.sigmoid(x_BLD @ self.gate.T) * super().forward(x_BLD)
