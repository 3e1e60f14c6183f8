"""The auxiliary loss of a class's routers over the global batch instead of a micro-batch, also if
the layers are in several pipeline stages.

Most classes of transformers have one formula (`load_balancing_loss_func`, of arXiv:2101.03961): E K
sum_i f_i P_i, with f_i the share of the choices that expert i gets, P_i its mean probability, both
over all layers and tokens, and K the experts of a token. f has no gradient, and P is a sum over
tokens and layers; so micro-batches and stages add up if f is known before."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.utils.output_capturing import OutputRecorder

from torchtitan.models.common.moe.router import Observed, imbalance, shares_of, widest
from torchtitan.models.transformers.tiny import (
    CLONE_TOLERANCE,
    TEXT_IDS,
    random_clone,
    text_inputs,
    trial,
)
from torchtitan.protocols.experts import LoadBalanced, PenaltyConfig
from torchtitan.tools.logging import logger

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ClassBalance(LoadBalanced):
    """The routers of all layers of a class, or of a pipeline stage, as one: a token gets K of E
    experts in each layer."""

    advice = "increase the weight of the routers' loss in config.json, such as router_aux_loss_coef"

    def __init__(self, n_experts: int, n_chosen: int, weight: float):
        super().__init__(n_experts, n_chosen, PenaltyConfig(batch_loss=weight), selection=None)
        self.stage_layers = 0

    def forward(
        self, hidden: Tensor, router_logits: tuple[Tensor, ...] | None, has_token_N: Tensor
    ) -> Tensor:
        """Return hidden states unchanged, and add to the statistics, or in the backward pass to the
        gradients. Logits are (N, E) for each layer; a stage may have none."""
        assert self.totals is not None
        if not router_logits:
            return hidden
        if self.stage_layers != len(router_logits):  # in the first call
            self.stage_layers = len(router_logits)
            self.totals = self.no_totals(hidden.device)
        logits_LNE = torch.stack(
            [logits.reshape(-1, self.n_experts) for logits in router_logits]
        ).float()
        probabilities = logits_LNE.softmax(dim=-1).where(has_token_N[:, None], 0)
        chosen_LNK = probabilities.detach().topk(self.top_k, dim=-1).indices
        counts_LE = _count(chosen_LNK, has_token_N, self.n_experts)
        entropy = torch.special.entr(probabilities.detach()).sum(dtype=widest(logits_LNE))
        parts = counts_LE.sum(0), (entropy * 2**20).long()[None], counts_LE.flatten()
        totals = torch.cat(parts) * self.is_counting
        if self.is_measuring:
            self.totals += totals
            return hidden
        if not hidden.requires_grad:
            return hidden
        losses = hidden.new_zeros(())
        if self.penalties.batch_loss:
            assert self.batch_counts_E is not None, (
                "call LoadBalancer.measuring before the step's backward passes"
            )
            factor = self.penalties.batch_loss * self.top_k / self.n_layers
            losses = factor * imbalance(probabilities, shares_of(self.batch_counts_E))
        observed: Tensor = Observed.apply(hidden, losses, totals, self)
        return observed


def _count(chosen_LNK: Tensor, has_token_N: Tensor, n_experts: int) -> Tensor:
    """Return how often each layer's tokens chose each expert, (layers, experts)."""
    is_counted = has_token_N[:, None].expand(chosen_LNK.shape).long()
    counts_LE = is_counted.new_zeros(len(chosen_LNK), n_experts)
    return counts_LE.scatter_add_(1, chosen_LNK.flatten(1), is_counted.flatten(1))


def returns_router_loss(config: PretrainedConfig) -> bool:
    """Return whether the class of a configuration returns a loss of its routers."""
    owners = config, config.get_text_config(decoder=True)
    return any(getattr(owner, "output_router_logits", False) for owner in owners)


def records_routers(model: "PreTrainedModel") -> bool:
    """Return whether a class has routers whose logits it records. `model` is a pipeline stage's
    part of the class."""
    recorded = model.get_decoder().can_record_outputs.get("router_logits")
    if recorded is None:  # its blocks return them
        return True
    of_kinds = recorded if isinstance(recorded, list) else [recorded]
    kinds = tuple(
        kind.target_class if isinstance(kind, OutputRecorder) else kind for kind in of_kinds
    )
    return any(isinstance(module, kinds) for module in model.modules())


def make_balance(model: "PreTrainedModel", weight: float) -> ClassBalance | None:
    """Return the balance of a class; None, with a warning, if a trial shows that its loss has
    another formula."""
    if not has_formula(model.config):
        logger.warning(
            "%s computes the loss of its routers in its own way, for each micro-batch of a rank: "
            "gradients depend on --training.local_batch_size and the number of ranks; set "
            "output_router_logits to false in config.json to train without it",
            type(model).__name__,
        )
        return None
    return ClassBalance(*_sizes(model), weight)


def _sizes(model: "PreTrainedModel") -> tuple[int, int]:
    """Return the experts of a layer and of a token. Raise `AttributeError` if the class does not
    name them."""
    text = model.config.get_text_config(decoder=True)
    names = ("num_experts", "num_experts_per_tok")
    n_experts, n_chosen = (getattr(model, name, None) or getattr(text, name) for name in names)
    return n_experts, n_chosen


@trial
def has_formula(config: PretrainedConfig) -> bool:
    """Return whether the loss of a tiny clone follows the formula."""
    try:
        model = random_clone(config)
        n_experts, n_chosen = _sizes(model)
        outputs = model(
            **text_inputs(model, torch.arange(TEXT_IDS.start, TEXT_IDS.start + 48).view(2, 24))
        )
        logits = torch.cat([each.reshape(-1, n_experts) for each in outputs.router_logits]).float()
        probabilities = logits.softmax(dim=-1)
        chosen = probabilities.topk(n_chosen, dim=-1).indices
        shares = shares_of(chosen.flatten().bincount(minlength=n_experts))
        expected = n_chosen * imbalance(probabilities, shares) / len(probabilities)
        return bool((expected - outputs.aux_loss).abs() <= CLONE_TOLERANCE * expected)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False
