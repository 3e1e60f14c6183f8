"""Schedule-free AdamW (Defazio et al. 2024, arXiv:2405.15682): averages of the weights instead of a
decay of the learning rate."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from torchtitan.components.optim.own_state import Group, Groups, OwnState
from torchtitan.distributed.initialize import local_part


class ScheduleFreeAdamW(OwnState):
    """AdamW with three sequences of weights: x, the averages that are evaluated; z, which the
    gradients move; and y = (1 - beta1) z + beta1 x, where gradients are computed. The parameters
    are y; x follows from y and z.

    It computes what `AdamWScheduleFree` of the package `schedulefree` computes with `warmup_steps`
    0. That class keeps counts of a group, which a parameter's state does not contain, and changes
    between x and y by operations that round, so that a run which validates would differ from one
    which does not.
    """

    number_names = ("step", "largest_lr", "weight_sum")

    def __init__(self, groups: Groups, **settings: object):
        super().__init__(groups, **settings)
        self.training_weights: dict[Tensor, Tensor] = {}
        """Parameter → y in a context of `evaluating`; empty outside."""

    def new_state(self, parameter: Tensor, group: Group) -> dict[str, Tensor]:
        # z follows with the first update, since weights may be loaded before it.
        return {
            "z": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }

    def update(self, parameter: Tensor, gradient: Tensor, group: Group) -> None:
        state, lr = self.state[parameter], group["lr"]
        beta1, beta2 = group["betas"]
        y, z, squares = map(local_part, (parameter, state["z"], state["exp_avg_sq"]))
        step = self.number(parameter, "step")
        if step == 1:
            z.copy_(y)
        largest_lr = max(lr, self.number(parameter, "largest_lr"))
        weight = largest_lr**2
        weight_sum = self.number(parameter, "weight_sum") + weight
        self.set_number(parameter, "largest_lr", largest_lr)
        self.set_number(parameter, "weight_sum", weight_sum)
        share = weight / weight_sum if weight_sum else 0.0
        local = local_part(gradient)
        squares.mul_(beta2).addcmul_(local, local, value=1 - beta2)
        direction = local / (squares / (1 - beta2**step)).sqrt_().add_(group["eps"])
        direction.add_(y, alpha=group["weight_decay"])
        # x moves by `share` toward the new z, and y with both.
        y.lerp_(z, share)
        y.add_(direction, alpha=lr * (beta1 * (1 - share) - 1))
        z.sub_(direction, alpha=lr)

    @contextlib.contextmanager
    @torch.no_grad()
    def evaluating(self) -> Iterator[None]:
        """Replace the weights y by the averages x in the block; afterwards, they have their exact
        values."""
        try:
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.training_weights[parameter] = parameter.detach().clone()
                    if self._has_averages(parameter):
                        z = local_part(self.state[parameter]["z"])
                        local_part(parameter).lerp_(z, 1 - 1 / group["betas"][0])
            yield
        finally:
            for parameter, weight in self.training_weights.items():
                parameter.copy_(weight)
            self.training_weights = {}

    def _has_averages(self, parameter: Tensor) -> bool:
        return parameter in self._numbers and self.number(parameter, "step") > 0
