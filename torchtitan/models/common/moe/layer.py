"""The mixture of experts that replaces a block's feed-forward network, and its configuration."""

from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal, Unpack

import torch
from torch import Tensor, nn

from torchtitan.models.common.feed_forward import GatedFeedForward, LayerSizes
from torchtitan.models.common.moe.experts import RoutedExperts
from torchtitan.models.common.moe.router import Router, RoutingConfig
from torchtitan.protocols.attention import Documents
from torchtitan.protocols.initializer import TruncatedNormal, with_initializers
from torchtitan.tools.errors import require

_MOST = 2**24
_LEAST = {
    **{
        "n_experts": 1,
        "ffn_dim": 1,
        "shared_ffn_dim": 1,
        "n_shared_experts": 0,
        "routed_scaling_factor": 0,
    },
    **{
        "bias_rate": 0,
        "penalties.batch_loss": 0,
        "penalties.sequence_loss": 0,
        "penalties.z_loss": 0,
    },
}
"""Field → its smallest value; the largest is `_MOST`."""


@dataclass(kw_only=True, slots=True)
class MoEConfig(RoutingConfig):
    """Experts of a model, in the field `moe` of its configuration."""

    ffn_dim: int | None = None
    """Width of a routed expert. None: --model.ffn_dim."""

    layer_types: list[Literal["sparse", "dense"]] = field(default_factory=lambda: ["sparse"])
    """Types of the first layers, repeated for the others; dense ones have one network of width
    --model.ffn_dim."""

    n_shared_experts: int = 0
    """Experts that every token passes through, computed as one that is wider by this factor."""

    shared_ffn_dim: int | None = None
    """Width of an expert that replaces them, with a gate of its result (Qwen) or without (Granite
    4, Nemotron-H). None: without it."""

    def is_sparse(self, index: int) -> bool:
        """Return whether a layer has experts."""
        return self.layer_types[index % len(self.layer_types)] == "sparse"

    def validate(self) -> None:
        """Raise `UserError` for impossible values."""
        for name, least in _LEAST.items():
            value = attrgetter(name)(self)
            require(
                value is None or least <= value <= _MOST,
                f"--model.moe.{name}",
                value,
                f"from {least} to {_MOST}",
            )
        require(
            bool(self.layer_types), "--model.moe.layer_types", self.layer_types, "at least one type"
        )
        most = f"from 1 to --model.moe.n_experts {self.n_experts}"
        require(1 <= self.top_k <= self.n_experts, "--model.moe.top_k", self.top_k, most)
        has_rate = self.bias_rate and not self.selection_bias
        require(not has_rate, "--model.moe.bias_rate", self.bias_rate, "0 without the bias")
        size, rest = divmod(self.n_experts, max(1, self.n_group))
        fits = not rest and size > self.selection_bias and 1 <= self.topk_group <= self.n_group
        must = (
            f"a divisor of --model.moe.n_experts {self.n_experts} with groups of at least "
            f"{1 + self.selection_bias}, and --model.moe.topk_group {self.topk_group} of them must "
            f"have --model.moe.top_k {self.top_k} experts"
        )
        require(
            fits and self.top_k <= size * self.topk_group, "--model.moe.n_group", self.n_group, must
        )

    def make_shared(self, width: int, **sizes: Unpack[LayerSizes]) -> nn.Module | None:
        """Return the expert that gets all tokens, next to routed ones of a `width`; None: without
        it."""
        if self.shared_ffn_dim:
            return GatedSharedExpert(hidden_dim=self.shared_ffn_dim, **sizes)
        width *= self.n_shared_experts
        return GatedFeedForward(hidden_dim=width, **sizes) if width else None


SMALL_SIGMOID = MoEConfig(
    n_experts=32,
    top_k=4,
    ffn_dim=128,
    n_shared_experts=1,
    scoring_func="sigmoid",
    selection_bias=True,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.0,
    layer_types=["dense", "sparse", "sparse", "sparse"],
)
"""Experts as in DeepSeek-V3, for a model that trains on a laptop."""


class MixtureOfExperts(nn.Module):
    """The sum of the routed experts' results, times their weights, and of an expert that gets every
    token. `norm` and `post_norm` are around the routed experts."""

    is_compiled = False
    """Compiled blocks run this module uncompiled, since its matrix sizes change from step to
    step."""

    def __init__(self, router: Router, experts: RoutedExperts, shared: nn.Module | None = None):
        super().__init__()
        self.router = router
        self.experts = experts
        self.shared = shared
        self.norm: nn.Module = nn.Identity()
        self.post_norm: nn.Module = nn.Identity()

    def forward(self, x_BLD: Tensor, documents: Documents | None = None) -> Tensor:
        """(B, L, dim) → (B, L, dim); for `documents`, see `Router.forward`."""
        weights_BLK, chosen_BLK = self.router(x_BLD, documents)
        routed_ND = self.experts(
            self.norm(x_BLD).flatten(0, 1), weights_BLK.flatten(0, 1), chosen_BLK.flatten(0, 1)
        )
        routed_BLD = self.post_norm(routed_ND.view_as(x_BLD))
        return routed_BLD if self.shared is None else routed_BLD + self.shared(x_BLD)


class GatedSharedExpert(GatedFeedForward):
    """A network times a gate of one number per token (Qwen1.5-MoE)."""

    def __init__(self, *, hidden_dim: int, **sizes: Unpack[LayerSizes]):
        super().__init__(hidden_dim=hidden_dim, **sizes)
        # Not a linear layer, since it is too narrow for adapters and quantization.
        self.gate = nn.Parameter(torch.empty(1, sizes["dim"]))
        with_initializers(self, gate=TruncatedNormal(sizes["init_std"]))

    def forward(self, x_BLD: Tensor) -> Tensor:
        """(B, L, dim) → (B, L, dim)."""
        return torch.sigmoid(x_BLD @ self.gate.T) * super().forward(x_BLD)
