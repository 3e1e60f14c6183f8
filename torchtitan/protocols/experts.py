"""Mixtures of experts as parallelism (`StackedExperts`) and the training loop (`LoadBalanced`) see
them."""

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from torchtitan.protocols.initializer import Constant, with_initializers

Exchange = Callable[[Tensor, Tensor, Tensor, Callable[..., Tensor]], Tensor]
"""(rows_RD, weight_R, counts_E, compute) → (R, D): the results of the ranks that have the experts.
Rows are tokens in the order of their experts, with `counts_E` rows for each; `compute`: as
`forward`, for the experts of this rank."""


class StackedExperts(nn.Module):
    """Base class of routed experts, whose parameters have the experts as dimension 0."""

    device_type: str | None = None
    """Device whose algorithm is used. None: the tokens' device."""

    calls_product: bool = False
    """True if every algorithm must multiply by `product`, because a subclass replaces it."""

    matrices: Collection[str] = ()
    """Parameters (experts, …, outputs, inputs) that `product` multiplies with rows."""

    is_transposed: bool = False
    """True if the `matrices` are (experts, inputs, outputs), as some classes of transformers store
    them."""

    hidden_dims: Mapping[str, int | None] = {}
    """Parameter → its dimension over the experts' width, which expert tensor parallelism splits;
    None: every rank has the whole parameter. Parameters not listed are biases of results: each rank
    adds its share to the sum."""

    part_multiple: int = 1
    """Divisor of a rank's part of the width."""

    exchange: Exchange | None = None
    """Set by expert parallelism. None: this rank has all experts."""

    width_group: ProcessGroup | None = None
    """Ranks with the other parts of the width, set by expert tensor parallelism."""

    @property
    def n_local(self) -> int:
        """Number of this rank's experts."""
        return len(next(self.parameters(recurse=False)))

    def product(self, rows_RI: Tensor, name: str, ends_E: Tensor) -> Tensor:
        """Return the products of rows, in the order of experts, with the matrices `name` of their
        experts: (R, inputs) → (R, outputs). `ends_E`: end of each expert's rows, int32."""
        weight = getattr(self, name)
        matrices = weight if self.is_transposed else weight.flatten(1, -2).mT
        return F.grouped_mm(rows_RI, matrices, offs=ends_E)

    @abstractmethod
    def forward(self, x_ND: Tensor, weights_NK: Tensor, chosen_NK: Tensor) -> Tensor:
        """Return the sum of the chosen experts' results for each token, times their weights: (N,
        D)."""


@dataclass(kw_only=True, slots=True)
class PenaltyConfig:
    """Weights of the auxiliary losses, which are added over layers. They change gradients, but not
    the logged loss."""

    batch_loss: float = 0.0
    """Weight of the load-balancing loss over the global batch (Switch, GShard). Each step then
    begins with a forward pass over its tokens that only counts."""

    sequence_loss: float = 0.0
    """Weight of the load-balancing loss within each document, weighted by its tokens
    (DeepSeek-V3)."""

    z_loss: float = 0.0
    """Weight of the squared log-sum-exp of the router's logits (ST-MoE)."""


class SelectionBias(nn.Module):
    """A bias of each expert, added to its scores for the choice only. After each optimizer step, it
    rises by `rate` for experts with fewer tokens than the mean of the global batch, and falls for
    experts with more (arXiv:2408.15664)."""

    def __init__(self, n_experts: int, rate: float):
        super().__init__()
        self.rate = rate
        self.bias_E = nn.Buffer(torch.zeros(n_experts, dtype=torch.float32))
        with_initializers(self, bias_E=Constant(0.0))

    def forward(self, scores_BLE: Tensor) -> Tensor:
        # it stays in CPU memory if weights are offloaded
        return scores_BLE + self.bias_E.to(scores_BLE.device)

    @torch.no_grad()
    def update(self, counts_E: Tensor) -> None:
        counts = counts_E.to(self.bias_E.device).double()
        self.bias_E.add_(torch.sign(counts.mean() - counts), alpha=self.rate)


class LoadBalanced(nn.Module):
    """Base class of routers, which keep their E experts equally busy.
    `torchtitan.components.losses.load_balance` sums `totals` over the ranks that see other tokens,
    and moves the selection bias.

    Auxiliary losses do not travel with the training loss, which only the last stage of a pipeline
    has, and which is divided by another number of tokens: a router adds their gradient in its own
    backward pass, multiplied by `gradient_scale`. That pass runs once per micro-batch, unlike the
    forward pass, which activation checkpointing repeats and validation runs without a step. So
    tokens are counted there too.
    """

    row_groups: Sequence[ProcessGroup] = ()
    """Groups of ranks with other parts of the same rows of tokens, set by tensor and context
    parallelism."""

    advice: ClassVar[str] = (
        "increase --model.moe.penalties.batch_loss, or --model.moe.bias_rate of a router with "
        "selection biases"
    )
    """Options that give starving experts more tokens."""

    stage_layers: int | None = None
    """Layers of this pipeline stage whose tokens it counts together, if the stages' routers are
    parts of one. None: it is the router of one layer."""

    n_layers: int | Tensor = 1
    """Layers of the model whose tokens `totals` count."""

    is_counting: bool = True
    """False if another rank counts the same tokens, set by tensor parallelism of models with whole
    sequences."""

    def __init__(
        self, n_experts: int, top_k: int, penalties: PenaltyConfig, selection: SelectionBias | None
    ):
        super().__init__()
        self.n_experts = n_experts
        self.top_k = top_k
        self.penalties = penalties
        self.selection = selection
        self.totals: Tensor | None = None
        """Since the step began, the number of tokens that this rank has sent to each expert, and
        then the summed entropy of these tokens' probabilities in 2⁻²⁰ nats: (E + 1), int64; a
        router of several layers adds the first E numbers of each layer. None before the first step.
        Padding does not count."""
        self.gradient_scale: Tensor | None = None
        """Factor of the auxiliary losses' gradients, a float32 scalar: losses are sums over tokens,
        and the loop divides them by the tokens of the global batch, without padding."""
        self.batch_counts_E: Tensor | None = None
        """Tokens of the global batch that each expert gets with the current weights, for the batch
        loss."""
        self.is_measuring = False
        """True if forward passes count, because no backward pass follows."""

    @property
    def is_trained(self) -> bool:
        """True if training moves the selection bias."""
        return any(weight.requires_grad for weight in self.parameters())

    def no_totals(self, device: torch.device) -> Tensor:
        """Return the totals of a step that begins."""
        n_numbers = self.n_experts * (1 + (self.stage_layers or 0)) + 1
        return torch.zeros(n_numbers, dtype=torch.int64, device=device)

    def layer_counts(self, totals: Tensor) -> Tensor:
        """Return the tokens of each expert in each layer of this stage from totals: (layers,
        E)."""
        if self.stage_layers is None:
            return totals[None, : self.n_experts]
        return totals[self.n_experts + 1 :].view(-1, self.n_experts)


class LinearRouter(LoadBalanced):
    """A router with the logits of a linear layer, `weight` (E, dim) and `bias` (E,)."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    layer: int = 0
    """Number of its layer."""

    @property
    def is_trained(self) -> bool:
        """True if training moves the selection bias: not next to an adapter, whose base model has
        the bias."""
        return self.weight.requires_grad

    def logits(self, x_BLD: Tensor) -> Tensor:
        """Return the logits of experts, (B, L, E), in float32: rounding would change the choice."""
        bias = None if self.bias is None else self.bias.float()
        return F.linear(x_BLD.float(), self.weight.float(), bias)
