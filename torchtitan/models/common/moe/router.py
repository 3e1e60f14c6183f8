"""Routers choose the experts of each token, and weight their results."""

from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.config.configurable import Section
from torchtitan.models.common.norms import NormFactory
from torchtitan.protocols.attention import Documents
from torchtitan.protocols.experts import LinearRouter, LoadBalanced, PenaltyConfig, SelectionBias
from torchtitan.protocols.initializer import (
    Constant,
    TruncatedNormal,
    initializers_of,
    with_initializers,
)
from torchtitan.tools.autograd import Context


@dataclass(kw_only=True, slots=True)
class RoutingConfig(Section):
    """Choice of the experts that get a token, and the weights of their results."""

    n_experts: int
    """Routed experts of a layer."""

    top_k: int
    """Routed experts that a token passes through."""

    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    """Scores of experts: probabilities that compete (Switch, arXiv:2101.03961), or independent
    affinities (DeepSeek-V3, arXiv:2412.19437, equation 15)."""

    norm_topk_prob: bool = True
    """Divide the weights of a token's experts by their sum. Of probabilities, these are the softmax
    over the logits of the chosen experts (gpt-oss)."""

    routed_scaling_factor: float = 1.0
    """Factor of the weights after that."""

    n_group: int = 1
    """Groups of consecutive routed experts; divides n_experts."""

    topk_group: int = 1
    """Groups that a token's experts are in, so that it reaches few devices (DeepSeek-V2,
    arXiv:2405.04434, 2.2.2)."""

    selection_bias: bool = False
    """Add a bias to each expert's score for the choice alone (DeepSeek-V3). A group is then as good
    as its two best experts, without it as its best."""

    bias_rate: float = field(default=0.0, compare=False)  # not in config.json
    """Change of this bias after each optimizer step, for balance; DeepSeek-V3 used 0.001."""

    # not in config.json
    penalties: PenaltyConfig = field(default_factory=PenaltyConfig, compare=False)
    """Auxiliary losses."""

    def choose(self, scores: Tensor) -> Tensor:
        """Return the numbers of the experts with the largest scores: (…, E) → (…, K)."""
        if self.n_group > 1:
            groups = scores.unflatten(-1, (self.n_group, -1))
            best = (
                groups.topk(1 + self.selection_bias, dim=-1)
                .values.sum(dim=-1)
                .topk(self.topk_group, dim=-1)
                .indices
            )
            excluded = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(-1, best, False)
            # Infinity, since scores with a bias may be below 0.
            scores = groups.masked_fill(excluded[..., None], -torch.inf).flatten(-2)
        return scores.topk(self.top_k, dim=-1).indices


class Router(LinearRouter):
    """Linear gate with or without `bias`, scores, choice and weights, in float32: rounding would
    change the choice."""

    eps = 1e-20
    """Added to the sum that divides the weights."""

    def __init__(self, config: RoutingConfig, *, dim: int, bias: bool = False, init_std: float):
        selection = (
            SelectionBias(config.n_experts, config.bias_rate) if config.selection_bias else None
        )
        super().__init__(config.n_experts, config.top_k, config.penalties, selection)
        self.choose, self.scale = config.choose, config.routed_scaling_factor
        self.is_sigmoid, self.is_normalized = (
            config.scoring_func == "sigmoid",
            config.norm_topk_prob,
        )
        # Not a linear layer: converters to 8 and 4 bits take all of them, and the router should
        # keep its precision.
        self.weight = nn.Parameter(torch.empty(config.n_experts, dim))
        self.bias = nn.Parameter(torch.empty(config.n_experts)) if bias else None
        with_initializers(self, weight=TruncatedNormal(init_std), bias=Constant(0.0))

    def forward(self, x_BLD: Tensor, documents: Documents | None = None) -> tuple[Tensor, Tensor]:
        """(B, L, dim) → weights and numbers of the chosen experts, both (B, L, K). Only tokens of
        `documents` count for balance and auxiliary losses; None: each row is one document. They may
        name the experts, which then only get their weights here."""
        logits_BLE = self.logits(x_BLD)
        scores_BLE = torch.sigmoid(logits_BLE) if self.is_sigmoid else logits_BLE.softmax(dim=-1)
        with torch.no_grad():
            chosen_BLK = self.choose(
                scores_BLE if self.selection is None else self.selection(scores_BLE)
            )
            if documents is not None and documents.experts_BLNK is not None:
                given_BLK = documents.experts_BLNK[:, :, self.layer].to(chosen_BLK)
                chosen_BLK = given_BLK.where(given_BLK >= 0, chosen_BLK)
        weights_BLK = scores_BLE.gather(-1, chosen_BLK)
        if self.is_normalized:
            weights_BLK = weights_BLK / (weights_BLK.sum(dim=-1, keepdim=True) + self.eps)
        weights_BLK = self.scale * weights_BLK
        if self.training and self.totals is not None:
            documents = documents or _rows_as_documents(x_BLD)
            probabilities_BLE = scores_BLE / scores_BLE.sum(dim=-1, keepdim=True)
            counts_ME = self._count(chosen_BLK, documents)
            entropy_BL = torch.special.entr(probabilities_BLE.detach()).sum(dim=-1)
            entropy = entropy_BL.where(documents.has_token_BL, 0).sum(dtype=widest(entropy_BL))
            totals = torch.cat((counts_ME.sum(dim=0), (entropy * 2**20).long()[None]))
            if self.is_measuring:
                self.totals += totals
            elif weights_BLK.requires_grad:
                losses = self._losses(logits_BLE, probabilities_BLE, counts_ME, documents)
                weights_BLK = Observed.apply(weights_BLK, losses, totals, self)
        return weights_BLK, chosen_BLK

    def _count(self, chosen_BLK: Tensor, documents: Documents) -> Tensor:
        """Return how many tokens of each of M documents go to each expert, (M, E)."""
        # Not `bincount`, which waits for a GPU. The last row counts padding.
        places_BLK = documents.of_token_BL[..., None] * self.n_experts + chosen_BLK
        counts = chosen_BLK.new_zeros((documents.count + 1) * self.n_experts)
        counts.scatter_add_(0, places_BLK.flatten(), torch.ones_like(chosen_BLK).flatten())
        return counts.view(-1, self.n_experts)[:-1]

    def _losses(
        self, logits_BLE: Tensor, probabilities_BLE: Tensor, counts_ME: Tensor, documents: Documents
    ) -> Tensor:
        """Return the auxiliary losses, times their weights: sums over these tokens, which
        `counts_ME` counts."""
        penalties, has_token_BL1 = self.penalties, documents.has_token_BL[..., None]
        probabilities_BLE = probabilities_BLE.where(has_token_BL1, 0)
        total = logits_BLE.new_zeros(())
        if penalties.batch_loss:
            assert self.batch_counts_E is not None, (
                "call LoadBalancer.measuring before the step's backward passes"
            )
            total = total + penalties.batch_loss * imbalance(
                probabilities_BLE, shares_of(self.batch_counts_E)
            )
        if penalties.sequence_loss:
            for group in self.row_groups:
                dist.all_reduce(counts_ME, group=group)
            shares_ME = F.pad(shares_of(counts_ME), (0, 0, 0, 1))  # a row for padding
            shares_BLE = shares_ME[documents.of_token_BL]
            total = total + penalties.sequence_loss * imbalance(probabilities_BLE, shares_BLE)
        if penalties.z_loss:  # keeps the logits small (ST-MoE, arXiv:2202.08906, equation 5)
            squares_BL1 = logits_BLE.logsumexp(dim=-1, keepdim=True).square()
            total = total + penalties.z_loss * squares_BL1.where(has_token_BL1, 0).sum()
        return total


class ScaledRouter(Router):
    """A router with its own norm of the input, and a learned factor of each expert's weight (Gemma
    4)."""

    def __init__(self, config: RoutingConfig, *, dim: int, norm: NormFactory, init_std: float):
        super().__init__(config, dim=dim, init_std=init_std)
        self.norm, self.expert_scale = norm(dim), nn.Parameter(torch.empty(config.n_experts))
        with_initializers(self, **initializers_of(self), expert_scale=Constant(1.0))

    def forward(self, x_BLD: Tensor, documents: Documents | None = None) -> tuple[Tensor, Tensor]:
        weights_BLK, chosen_BLK = super().forward(
            self.norm(x_BLD) * x_BLD.shape[-1] ** -0.5, documents
        )
        return weights_BLK * self.expert_scale.float()[chosen_BLK], chosen_BLK


def _rows_as_documents(x_BLD: Tensor) -> Documents:
    n_rows, length = x_BLD.shape[:2]
    return Documents(
        torch.arange(n_rows, device=x_BLD.device)[:, None].expand(n_rows, length), n_rows
    )


def widest(x: Tensor) -> torch.dtype:
    return torch.float32 if x.device.type == "mps" else torch.float64


def shares_of(counts: Tensor) -> Tensor:
    """Return the share of each expert in counts of tokens, (…, E)."""
    return counts / counts.sum(dim=-1, keepdim=True).clamp(min=1)


def imbalance(probabilities_BLE: Tensor, shares: Tensor) -> Tensor:
    """Return the sum over tokens of `E sum_i f_i P_i`, with f_i the share of expert i and P_i its
    probability; the mean is 1 if all experts are equally busy. Shares have no gradient. They come
    from the global batch, (E,) (Switch, arXiv:2101.03961, equation 4; arXiv:2501.11873), or from
    each token's document, (B, L, E) (DeepSeek-V3, arXiv:2412.19437, equations 17 to 20)."""
    return shares.shape[-1] * (probabilities_BLE * shares).sum()


class _Kept(Context, Protocol):
    saved_tensors: tuple[Tensor]
    router: LoadBalanced


class Observed(torch.autograd.Function):
    """Passes the weights unchanged; the backward pass adds to the totals, and adds the auxiliary
    losses' gradient."""

    @staticmethod
    def forward(
        ctx: _Kept, weights: Tensor, losses: Tensor, totals: Tensor, router: LoadBalanced
    ) -> Tensor:
        ctx.router = router
        ctx.save_for_backward(totals)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: _Kept, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.router.totals is not None
        ctx.router.totals += ctx.saved_tensors[0]
        return grad_outputs[0], ctx.router.gradient_scale, None, None
