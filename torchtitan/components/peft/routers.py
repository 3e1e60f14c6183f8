"""LoRA and DoRA of routers, in float32 as their logits."""

from collections.abc import Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.components.peft.lora import AdaptedLayer, row_scale
from torchtitan.distributed.gradients import row_norms
from torchtitan.protocols.experts import LinearRouter
from torchtitan.protocols.initializer import Constant, DerivedRows, Uniform, initializer_of
from torchtitan.protocols.sharding import with_features


class AdaptedRouter(AdaptedLayer, LinearRouter):
    """A mixin before a class of routers, which adapts their `weight` (E, dim), frozen like their
    other parameters, with `lora_A` (rank, dim), `lora_B` (E, rank) and, with DoRA, `magnitude`
    (E,)."""

    weight: nn.Parameter
    dropout: float
    magnitude: nn.Parameter | None

    def plain_state(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        plain = {name: own[name] for name in self.plain_types(own)}
        return plain | {
            "weight": self._merge(
                own["weight"].float(), {key: own[key].float() for key in self.adapter}
            )
        }

    def logits(self, x_BLD: Tensor) -> Tensor:
        base = super().logits(x_BLD)
        if not self.is_adapted:
            return base
        x_BLD = x_BLD.float()
        inputs = F.dropout(x_BLD, self.dropout) if self.training and self.dropout else x_BLD
        added = F.linear(F.linear(inputs, self.lora_A.float()), self.lora_B.float()) * self.scaling
        if self.magnitude is None:
            return base + added
        scale_E = self._scale(
            self.weight.float(), self.lora_A.float(), self.lora_B.float(), self.magnitude
        )
        return base + (scale_E - 1) * F.linear(inputs, self.weight.float()) + scale_E * added

    def _merge(self, weight: Tensor, adapter: Mapping[str, Tensor]) -> Tensor:
        lora_A, lora_B = (adapter[name].to(weight.dtype) for name in ("lora_A", "lora_B"))
        merged = torch.addmm(weight, lora_B, lora_A, alpha=self.scaling)
        if self.magnitude is None:
            return merged
        return self._scale(weight, lora_A, lora_B, adapter["magnitude"])[:, None] * merged

    def _scale(self, weight: Tensor, lora_A: Tensor, lora_B: Tensor, magnitude: Tensor) -> Tensor:
        merged = torch.addmm(weight, lora_B, lora_A, alpha=self.scaling).detach()
        return row_scale(magnitude, row_norms(merged))


def adapt_router(
    router: LinearRouter, *, rank: int, scaling: float, dropout: float, dora: bool
) -> AdaptedRouter:
    """Freeze a router and give it an adapter, in place: it becomes an `AdaptedRouter` of its class.
    Return it."""
    router.requires_grad_(False)
    n_experts, dim = router.weight.shape
    router.__class__ = type(f"Adapted{type(router).__name__}", (AdaptedRouter, type(router)), {})
    assert isinstance(router, AdaptedRouter)
    router.rank = rank
    router.scaling = scaling
    router.dropout = dropout
    router.is_adapted, router.adapter = True, ("lora_A", "lora_B")
    router.lora_A = nn.Parameter(router.weight.new_empty(rank, dim))
    router.lora_B = nn.Parameter(router.weight.new_empty(n_experts, rank))
    router._add_initializers(lora_A=Uniform(-(dim**-0.5), dim**-0.5), lora_B=Constant(0.0))
    with_features(router, weight=("out", "in"), lora_A=(None, "in"), lora_B=("out", None))
    router.register_parameter("magnitude", None)
    if dora:
        router.adapter += ("magnitude",)
        router.magnitude = nn.Parameter(router.weight.new_empty(n_experts))
        start = initializer_of(router, "weight")
        norms = partial(_stored_row_norms, router)
        router._add_initializers(magnitude=DerivedRows("weight", router.weight.shape, start, norms))
        with_features(router, magnitude=("out",))
    return router


def _stored_row_norms(router: LinearRouter, rows: Tensor) -> Tensor:
    return row_norms(rows.to(router.weight.dtype).float())
