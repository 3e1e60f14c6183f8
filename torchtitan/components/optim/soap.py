"""SOAP (Vyas et al. 2024, arXiv:2409.11321): AdamW in the eigenbases of Shampoo's statistics."""

import torch
from torch import Tensor

from torchtitan.components.optim.own_state import Group, Groups, OwnState
from torchtitan.distributed.gradients import redistribute_like
from torchtitan.distributed.initialize import local_part, local_slices, sharded_dims
from torchtitan.distributed.whole_tensors import whole
from torchtitan.tools.sharded import is_dtensor

SIDES = ("left", "right")
"""Rows and columns of a matrix."""

LARGEST_SIDE = 10_000
"""Sides of more rows or columns keep their own basis, as in the authors' code."""


class SOAP(OwnState):
    """Algorithm 3 of the paper, for matrices (…, m, n); the earlier dimensions stack matrices.

    Statistics of both sides, means of G Gᵀ and Gᵀ G, give eigenbases; AdamW updates the matrix
    turned into them. Every `basis_interval` steps, one power iteration and a QR decomposition
    refresh the bases. As in the authors' code, the first step only computes bases, so that no
    gradient is turned into a basis of its own.

    All state is sharded, but each rank gathers it and computes the update of the whole matrix.
    """

    def __init__(self, groups: Groups, **settings: object):
        super().__init__(groups, **settings)
        # Found by computations on tensors, which have no values during a dry run's step.
        self._own_parts: dict[Tensor, tuple[slice, ...]] = {}

    def new_state(self, parameter: Tensor, group: Group) -> dict[str, Tensor]:
        moments = {
            name: torch.zeros_like(parameter, requires_grad=False)
            for name in ("exp_avg", "exp_avg_sq")
        }
        squares = {
            f"{kind}_{side}": _zeros_of_side(parameter, size)
            for side, size in zip(SIDES, parameter.shape[-2:], strict=True)
            for kind in ("statistics", "basis")
            if size <= LARGEST_SIDE
        }
        state = {**moments, **squares}
        for tensor in (parameter, *state.values()):
            if is_dtensor(tensor):
                self._own_parts[tensor] = local_slices(tensor)
        return state

    def update(self, parameter: Tensor, gradient: Tensor, group: Group) -> None:
        step = int(self.number(parameter, "step"))
        held = {
            name: tensor
            for name, tensor in self.state[parameter].items()
            if name not in self.number_names
        }
        state = {name: whole(tensor) for name, tensor in held.items()}
        gradient = whole(redistribute_like(gradient, parameter))
        if step > 1:
            change = _change(state, gradient, group, step - 1)
            own = change[self._own_parts[parameter]] if parameter in self._own_parts else change
            # After the update, as in the authors' code.
            local_part(parameter).sub_(own).mul_(1 - group["lr"] * group["weight_decay"])
        _update_bases(state, gradient, group, step - 1)
        for name, tensor in held.items():
            if tensor in self._own_parts:
                local_part(tensor).copy_(state[name][self._own_parts[tensor]])


def _change(state: dict[str, Tensor], gradient: Tensor, group: Group, step: int) -> Tensor:
    """Return what AdamW subtracts from the weights, and update its moments."""
    beta1, beta2 = group["betas"]
    turned = _turned(gradient, state)
    state["exp_avg"].lerp_(gradient, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(turned, turned, value=1 - beta2)
    rate = group["lr"] * (1 - beta2**step) ** 0.5 / (1 - beta1**step)
    normed = _turned(state["exp_avg"], state) / state["exp_avg_sq"].sqrt().add_(group["eps"])
    return _turned(normed, state, back=True).mul_(rate)


def _turned(matrix: Tensor, state: dict[str, Tensor], *, back: bool = False) -> Tensor:
    """Return matrices in the bases of their sides, or back from them."""
    left, right = (state.get(f"basis_{side}") for side in SIDES)
    if left is not None:
        matrix = (left if back else left.mT) @ matrix
    if right is not None:
        matrix = matrix @ (right.mT if back else right)
    return matrix


def _update_bases(state: dict[str, Tensor], gradient: Tensor, group: Group, step: int) -> None:
    """Add a gradient to the statistics; compute bases with the first, and refresh them when due."""
    products = {"left": gradient @ gradient.mT, "right": gradient.mT @ gradient}
    for side, dim in zip(SIDES, (-2, -1), strict=True):
        if f"basis_{side}" not in state:
            continue
        statistics, basis = state[f"statistics_{side}"], state[f"basis_{side}"]
        statistics.lerp_(products[side], 1 - group["betas"][1])
        if step == 0:
            basis.copy_(torch.linalg.eigh(statistics).eigenvectors.flip(-1))
        elif step % group["basis_interval"] == 0:
            estimates = (basis * (statistics @ basis)).sum(dim=-2)
            order = estimates.argsort(dim=-1, descending=True)
            # The second moments follow the order of the basis.
            places = order[..., None] if dim == -2 else order[..., None, :]
            state["exp_avg_sq"].copy_(
                state["exp_avg_sq"].gather(dim, places.expand_as(state["exp_avg_sq"]))
            )
            sorted_basis = basis.gather(-1, order[..., None, :].expand_as(basis))
            basis.copy_(torch.linalg.qr(statistics @ sorted_basis).Q)


def _zeros_of_side(parameter: Tensor, size: int) -> Tensor:
    """Return zeros (…, size, size), divided by rows over all ranks that share the parameter."""
    shape = (*parameter.shape[:-2], size, size)
    if not is_dtensor(parameter):
        return torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)
    from torch.distributed.tensor import Replicate, Shard, zeros

    mesh = parameter.device_mesh
    placements = [
        Replicate() if dim is None else Shard(min(dim, len(shape) - 2))
        for dim in sharded_dims(parameter)
    ]
    return zeros(shape, dtype=parameter.dtype, device_mesh=mesh, placements=placements)
