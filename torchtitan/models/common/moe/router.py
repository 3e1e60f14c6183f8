"""Routers: which experts get a token, and how much their results count."""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.config.configurable import Section
from torchtitan.models.common.norms import NormFactory
from torchtitan.protocols.experts import LoadBalanced, PenaltyConfig, SelectionBias
from torchtitan.protocols.initializer import Constant, TruncatedNormal, initializers_of, with_initializers


@dataclass(kw_only=True, slots=True)
class RoutingConfig(Section):
    """Choice of the experts that get a token, and the weights of their results."""

    n_experts: int
    """Routed experts of a layer."""

    top_k: int
    """Routed experts that a token passes through."""

    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    """Scores of experts: probabilities that compete (Switch, arXiv:2101.03961), or independent affinities (DeepSeek-V3,
    arXiv:2412.19437, equation 15)."""

    norm_topk_prob: bool = True
    """Divide the weights of a token's experts by their sum. Of probabilities, these are the softmax over the logits of
    the chosen experts (gpt-oss)."""

    routed_scaling_factor: float = 1.0
    """Factor of the weights after that."""

    n_group: int = 1
    """Groups of consecutive routed experts; divides n_experts."""

    topk_group: int = 1
    """Groups that a token's experts are in, so that it reaches few devices (DeepSeek-V2, arXiv:2405.04434, 2.2.2)."""

    selection_bias: bool = False
    """Add a bias to each expert's score for the choice alone (DeepSeek-V3). A group is then as good as its two best
    experts, without it as its best."""

    bias_rate: float = field(default=0.0, compare=False)  # not in config.json
    """Change of this bias after each optimizer step, for balance; DeepSeek-V3 used 0.001."""

    penalties: PenaltyConfig = field(default_factory=PenaltyConfig, compare=False)  # not in config.json
    """Auxiliary losses."""

    def choose(self, scores: Tensor) -> Tensor:
        """Return the numbers of the experts with the largest scores: (…, E) → (…, K)."""
        if self.n_group > 1:
            groups = scores.unflatten(-1, (self.n_group, -1))
            best = groups.topk(1 + self.selection_bias, dim=-1).values.sum(dim=-1).topk(self.topk_group, dim=-1).indices
            excluded = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(-1, best, False)
            # Infinity, since scores with a bias may be below 0.
            scores = groups.masked_fill(excluded[..., None], -torch.inf).flatten(-2)
        return scores.topk(self.top_k, dim=-1).indices


class Router(LoadBalanced):
    """Linear gate with or without `bias`, scores, choice and weights, in float32: rounding would change the choice."""

    def __init__(self, config: RoutingConfig, *, dim: int, bias: bool = False, init_std: float):
        selection = SelectionBias(config.n_experts, config.bias_rate) if config.selection_bias else None
        super().__init__(config.n_experts, config.top_k, config.penalties, selection)
        self.choose, self.scale = config.choose, config.routed_scaling_factor
        self.is_sigmoid, self.is_normalized = config.scoring_func == "sigmoid", config.norm_topk_prob
        # Not a linear layer: converters, such as LoRA, take all of them, and the router should keep its precision.
        self.weight = nn.Parameter(torch.empty(config.n_experts, dim))
        self.bias = nn.Parameter(torch.empty(config.n_experts)) if bias else None
        with_initializers(self, weight=TruncatedNormal(init_std), bias=Constant(0.0))

    def forward(self, x_BLD: Tensor) -> tuple[Tensor, Tensor]:
        """(B, L, dim) → weights and numbers of the chosen experts, both (B, L, K)."""
        bias = None if self.bias is None else self.bias.float()
        logits_BLE = F.linear(x_BLD.float(), self.weight.float(), bias)
        scores_BLE = torch.sigmoid(logits_BLE) if self.is_sigmoid else logits_BLE.softmax(dim=-1)
        with torch.no_grad():
            chosen_BLK = self.choose(scores_BLE if self.selection is None else self.selection(scores_BLE))
        weights_BLK = scores_BLE.gather(-1, chosen_BLK)
        if self.is_normalized:
            weights_BLK = weights_BLK / (weights_BLK.sum(dim=-1, keepdim=True) + 1e-20)
        weights_BLK = self.scale * weights_BLK
        if self.training and self.totals is not None:
            # Not `bincount`, which waits for a GPU.
            places = chosen_BLK.flatten(1)
            counts_BE = places.new_zeros(len(places), self.n_experts).scatter_add_(1, places, torch.ones_like(places))
            probabilities_BLE = scores_BLE / scores_BLE.sum(dim=-1, keepdim=True)
            entropy = torch.special.entr(probabilities_BLE.detach()).sum()
            totals = torch.cat((counts_BE.sum(dim=0), (entropy * 2**20).long()[None]))
            if self.is_measuring:
                self.totals += totals
            elif weights_BLK.requires_grad:
                losses = self._losses(logits_BLE, probabilities_BLE, counts_BE)
                weights_BLK = _Observed.apply(weights_BLK, losses, totals, self)
        return weights_BLK, chosen_BLK

    def _losses(self, logits_BLE: Tensor, probabilities_BLE: Tensor, counts_BE: Tensor) -> Tensor:
        """Return the auxiliary losses, times their weights: sums over these tokens, which `counts_BE` counts."""
        penalties, total = self.penalties, logits_BLE.new_zeros(())
        if penalties.batch_loss:
            assert self.batch_counts_E is not None, "call LoadBalancer.measuring before the step's backward passes"
            total = total + penalties.batch_loss * _imbalance(probabilities_BLE, self.batch_counts_E)
        if penalties.sequence_loss:
            for group in self.row_groups:
                dist.all_reduce(counts_BE, group=group)
            total = total + penalties.sequence_loss * _imbalance(probabilities_BLE, counts_BE[:, None])
        if penalties.z_loss:  # keeps the logits small (ST-MoE, arXiv:2202.08906, equation 5)
            total = total + penalties.z_loss * logits_BLE.logsumexp(dim=-1).square().sum()
        return total


class ScaledRouter(Router):
    """A router with its own norm of the input, and a learned factor of each expert's weight (Gemma 4)."""

    def __init__(self, config: RoutingConfig, *, dim: int, norm: NormFactory, **options: Any):
        super().__init__(config, dim=dim, **options)
        self.norm, self.expert_scale = norm(dim), nn.Parameter(torch.empty(config.n_experts))
        with_initializers(self, **initializers_of(self), expert_scale=Constant(1.0))

    def forward(self, x_BLD: Tensor) -> tuple[Tensor, Tensor]:
        weights_BLK, chosen_BLK = super().forward(self.norm(x_BLD) * x_BLD.shape[-1] ** -0.5)
        return weights_BLK * self.expert_scale.float()[chosen_BLK], chosen_BLK


def _imbalance(probabilities_BLE: Tensor, counts: Tensor) -> Tensor:
    """Return the sum over tokens of `E sum_i f_i P_i`, with f_i the share of expert i in `counts` and P_i its
    probability; the mean is 1 if all experts are equally busy. Shares have no gradient. `counts` are tokens: (E,) of
    the global batch (Switch, arXiv:2101.03961, equation 4; arXiv:2501.11873), or (B, 1, E) of each row, in which packed
    documents count together (DeepSeek-V3, arXiv:2412.19437, equations 17 to 20)."""
    shares = counts / counts.sum(dim=-1, keepdim=True).clamp(min=1)
    return counts.shape[-1] * (probabilities_BLE * shares).sum()


class _Observed(torch.autograd.Function):
    """The weights unchanged; in the backward pass, add up the totals, and the gradient of the auxiliary losses."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, losses: Tensor, totals: Tensor, router: Router) -> Tensor:
        ctx.router = router
        ctx.save_for_backward(totals)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        ctx.router.totals += ctx.saved_tensors[0]
        return grad_outputs[0], ctx.router.gradient_scale, None, None
