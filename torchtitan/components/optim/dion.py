"""Dion (Ahn et al. 2025, arXiv:2504.05295): orthonormal updates of low rank, for sharded
matrices."""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.components.optim.own_state import Group, Groups, OwnState
from torchtitan.distributed.gradients import redistribute_like
from torchtitan.distributed.initialize import local_part, local_slices, sharded_dims
from torchtitan.tools.sharded import is_dtensor
from torchtitan.tools.torch_private import adjusted_lr


class Dion(OwnState):
    """Algorithm 1 of the paper for matrices (…, m, n); the earlier dimensions stack matrices.

    A momentum M gathers the gradients. One power iteration from the basis Q (n, r) of the last step
    gives its part of rank r, P Rᵀ with orthonormal P (m, r). The weights move along P and the
    normalized columns of R (n, r), the next Q; M keeps what this update omits. As in
    Muon, updates have AdamW's size. Ranks add up P and R, r (m + n) numbers, and gather no matrix.
    """

    def __init__(self, groups: Groups, **settings: object):
        super().__init__(groups, **settings)
        # Found by computations on tensors, which have no values during a dry run's step.
        self._own_slices = {
            parameter: local_slices(parameter)[-2:]  # rows and columns
            for group in self.param_groups
            for parameter in group["params"]
        }

    def new_state(self, parameter: Tensor, group: Group) -> dict[str, Tensor]:
        rank = math.ceil(group["rank_fraction"] * min(parameter.shape[-2:]))
        basis = local_part(parameter).new_empty((parameter.shape[-1], rank))
        # Equal in all layouts, and for all matrices of a stack.
        basis.normal_(generator=torch.Generator(basis.device).manual_seed(0))
        return {
            "momentum_buffer": torch.zeros_like(parameter, requires_grad=False),
            "basis": _stacked_like(basis, parameter),
        }

    def update(self, parameter: Tensor, gradient: Tensor, group: Group) -> None:
        state, momentum = self.state[parameter], group["momentum"]
        weight, moment = local_part(parameter), local_part(state["momentum_buffer"])
        basis = local_part(state["basis"])
        *_, m, n = parameter.shape
        rows, columns = self._own_slices[parameter]
        moment.add_(local_part(redistribute_like(gradient, parameter)))
        sketch = _summed(moment @ basis[..., columns, :], rows, m, parameter)
        left = torch.linalg.qr(sketch).Q
        own_left = left[..., rows, :]
        right = _summed(moment.mT @ own_left, columns, n, parameter)
        own_right = right[..., columns, :]
        moment.sub_(own_left @ own_right.mT, alpha=1 - momentum)
        lengths = right.norm(dim=-2, keepdim=True)
        # Without gradients, such as of an expert without tokens, the basis stays.
        has_length = lengths > 0
        right = torch.where(has_length, right / lengths, 0)
        rate = adjusted_lr(group["lr"], "match_rms_adamw", parameter.shape[-2:])
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.sub_(own_left @ right[..., columns, :].mT, alpha=rate)
        basis.copy_(torch.where(has_length, right, basis))


def _summed(part: Tensor, rows: slice, n_rows: int, parameter: Tensor) -> Tensor:
    """Return the whole (…, n_rows, r); this rank has some of its rows, or a term of these rows. A
    collective over the ranks that have other parts of the same matrices."""
    if not is_dtensor(parameter):
        return part
    whole = part.new_zeros((*part.shape[:-2], n_rows, part.shape[-1]))
    whole[..., rows, :] = part
    for mesh_dim, dim in enumerate(sharded_dims(parameter)):
        if dim is not None and dim >= parameter.ndim - 2:
            dist.all_reduce(whole, group=parameter.device_mesh.get_group(mesh_dim))
    return whole


def _stacked_like(basis: Tensor, parameter: Tensor) -> Tensor:
    """Return a basis for each matrix of this rank's part of a stack, in the layout of the
    parameter's stacked dimensions."""
    local = local_part(parameter)
    stacked = basis.expand(*local.shape[:-2], *basis.shape).contiguous()
    if not is_dtensor(parameter):
        return stacked
    from torch.distributed.tensor import DTensor, Replicate

    is_stacked = [dim is not None and dim < parameter.ndim - 2 for dim in sharded_dims(parameter)]
    placements = [
        placement if is_kept else Replicate()
        for placement, is_kept in zip(parameter.placements, is_stacked, strict=True)
    ]
    shape = torch.Size((*parameter.shape[:-2], *basis.shape))
    stride = torch.empty(shape, device="meta").stride()
    tensor: Tensor = DTensor.from_local(
        stacked, parameter.device_mesh, placements, run_check=False, shape=shape, stride=stride
    )
    return tensor
