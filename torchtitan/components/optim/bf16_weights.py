"""Updates of bfloat16 weights, which have no copy in a wider type.

An update is usually smaller than half a step of a bfloat16 weight (2⁻⁹ of it), so that rounding to
the nearest number loses it. Two ways keep it: rounding to a random neighbor, with the probabilities
that make the expected weight exact (Gupta et al. 2015, arXiv:1502.02551), or a second bfloat16
number with the rounding error of the weight, added before the next update (Kahan 1965).
"""

from typing import Literal, Unpack, cast

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from torchtitan.components.optim.own_state import AdamSettings, Group, Groups, KeptTypes
from torchtitan.distributed.initialize import local_part, local_slices

Rounding = Literal["nearest", "stochastic", "kahan"]

_LOW_BITS = 0xFFFF
"""Bits of a float32 number that bfloat16 does not have."""


def add_rounding_state(state: dict[str, Tensor], parameter: Tensor, rounding: Rounding) -> None:
    """Add what `rounding` needs to the state of a parameter: the number of updates, or the rounding
    error, like the parameter."""
    state.setdefault("step", torch.tensor(0.0))
    if rounding == "kahan":
        state["compensation"] = torch.zeros_like(parameter)


def wide_weight(parameter: Tensor, state: dict[str, Tensor]) -> Tensor:
    """Return this rank's part of a parameter with its rounding error, in a new float32 tensor."""
    wide = local_part(parameter).to(torch.float32, copy=True)
    if "compensation" in state:
        wide += local_part(state["compensation"])
    return wide


def write_weight(
    parameter: Tensor, wide: Tensor, state: dict[str, Tensor], rounding: Rounding
) -> None:
    """Round the new value, float32, to this rank's part of a parameter. `state["step"]` is the
    number of the update."""
    local = local_part(parameter)
    if rounding == "stochastic" and local.dtype == torch.bfloat16:
        local.copy_(rounded_stochastically(wide, state["step"], _indices(parameter)))
        return
    local.copy_(wide)
    if "compensation" in state:
        local_part(state["compensation"]).copy_(wide.sub_(local))


def rounded_stochastically(wide: Tensor, step: Tensor, indices: Tensor) -> Tensor:
    """Round float32 numbers to one of their two neighbors in bfloat16. Infinities and NaN are kept.

    The choice is a hash of the number, the step and the number's index in the whole tensor, int64:
    it does not depend on the layout, and needs no generator to be saved. Without the index, equal
    numbers, such as the first weights of norms, would all move in one direction.
    """
    bits = wide.view(torch.int32)
    of_step = _mix32(step.to(wide.device).long())
    key = bits.long() + indices * 0x9E3779B1 + of_step  # an odd number keeps indices apart
    mixed = _mix32(key & 0xFFFFFFFF)
    # to the neighbor away from 0 if the sum of the low bits reaches it
    moved = (bits + (mixed & _LOW_BITS).int()) & ~_LOW_BITS
    return torch.where(wide.isfinite(), moved.view(torch.float32), wide).bfloat16()


def _indices(parameter: Tensor) -> Tensor:
    """Return the index of each element of this rank's part of a parameter, in the order of the
    whole parameter, int64."""
    slices = local_slices(parameter)
    indices = torch.zeros((), dtype=torch.int64, device=local_part(parameter).device)
    for part, size in zip(slices, parameter.shape, strict=True):
        along = torch.arange(part.start, part.stop, device=indices.device)
        indices = indices[..., None] * size + along
    return indices


def _mix32(z: Tensor) -> Tensor:
    """Return 32 random bits for each number of 32 bits, both in int64 (MurmurHash3's finalizer)."""
    z = ((z ^ (z >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    z = ((z ^ (z >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return z ^ (z >> 16)


class RoundedUpdates(KeptTypes):
    """A mixin before an optimizer class, which updates one float32 copy of a weight after another,
    in `update_wide`, and rounds it."""

    rounding: Rounding

    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter before its first update."""
        raise NotImplementedError

    def update_wide(
        self, wide: Tensor, gradient: Tensor, state: dict[str, Tensor], group: Group
    ) -> None:
        """Update a float32 tensor and the state in place, with a float32 gradient."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(self.new_state(parameter))
                    add_rounding_state(state, parameter, self.rounding)
                wide = wide_weight(parameter, state)
                gradient = local_part(parameter.grad).float()
                self.update_wide(wide, gradient, state, cast(Group, group))
                write_weight(parameter, wide, state, self.rounding)


class RoundedAdamW(RoundedUpdates, torch.optim.AdamW):
    """AdamW of bfloat16 weights, with moments in float32."""

    def __init__(self, groups: Groups, *, rounding: Rounding, **settings: Unpack[AdamSettings]):
        super().__init__(groups, **settings)
        self.rounding = rounding

    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        return {
            "step": torch.zeros((), device=local_part(parameter).device),
            "exp_avg": torch.zeros_like(parameter, dtype=torch.float32),
            "exp_avg_sq": torch.zeros_like(parameter, dtype=torch.float32),
        }

    def update_wide(
        self, wide: Tensor, gradient: Tensor, state: dict[str, Tensor], group: Group
    ) -> None:
        beta1, beta2 = group["betas"]
        adamw(
            [wide],
            [gradient],
            [local_part(state["exp_avg"])],
            [local_part(state["exp_avg_sq"])],
            [],
            [state["step"]],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
