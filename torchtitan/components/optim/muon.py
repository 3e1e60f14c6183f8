"""Muon (Jordan 2024, https://kellerjordan.github.io/posts/muon) on sharded and replicated matrices:
one rank orthogonalizes the update of a matrix, and sends it to the others."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchtitan.components.optim.bf16_weights import (
    Rounding,
    add_rounding_state,
    wide_weight,
    write_weight,
)
from torchtitan.distributed.gradients import redistribute_like
from torchtitan.distributed.initialize import local_part, local_slices
from torchtitan.tools.torch_private import adjusted_lr, dtensor_like, orthogonalize


class Muon(torch.optim.Muon):
    """`torch.optim.Muon` for groups of parameters that are on the same mesh, or on none.

    Weights and moments stay sharded. n ranks gather the updates of n matrices in bfloat16, the type
    of the Newton-Schulz iterations, and each rank orthogonalizes one whole update, as a single
    process does.
    """

    def __init__(self, *args: Any, rounding: Rounding = "nearest", **options: Any):
        super().__init__(*args, **options)
        self.rounding = rounding
        # Found by computations on tensors, which have no values during a dry run's step.
        matrices = [matrix for group in self.param_groups for matrix in group["params"]]
        self._own_parts = {
            matrix: local_slices(matrix) if isinstance(matrix, DTensor) else ()
            for matrix in matrices
        }

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            matrices = [parameter for parameter in group["params"] if parameter.grad is not None]
            # Matrices of similar size take ranks a similar time.
            matrices.sort(key=lambda matrix: (matrix.numel(), max(matrix.shape)), reverse=True)
            mesh = (
                matrices[0].device_mesh if matrices and isinstance(matrices[0], DTensor) else None
            )
            n_ranks = mesh.size() if mesh else 1
            for first in range(0, len(matrices), n_ranks):
                self._update(matrices[first : first + n_ranks], mesh, group)

    def _update(
        self, matrices: Sequence[Tensor], mesh: DeviceMesh | None, group: dict[str, Any]
    ) -> None:
        """Update at most one matrix per rank. A collective."""
        own = _coordinates(mesh).index(tuple(mesh.get_coordinate() or ())) if mesh else 0
        update = None
        # All are gathered before the first product, since other ranks would wait for it.
        for index, matrix in enumerate(matrices):
            whole = self._moment(matrix, group)
            update = whole if index == own else update
        if update is not None:
            update = orthogonalize(
                update, group["ns_coefficients"], group["ns_steps"], group["eps"]
            )
        for index, matrix in enumerate(matrices):
            part = _shared(update if index == own else None, matrix, index)[self._own_parts[matrix]]
            rate = adjusted_lr(group["lr"], group["adjust_lr_fn"], matrix.shape)
            state = self.state[matrix]
            is_rounded = self.rounding != "nearest"
            weight = wide_weight(matrix, state) if is_rounded else local_part(matrix)
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            weight.add_(part.to(weight.device), alpha=-rate)
            if is_rounded:
                state["step"] += 1
                write_weight(matrix, weight, state, self.rounding)

    def _moment(self, matrix: Tensor, group: dict[str, Any]) -> Tensor:
        """Add the gradient to the matrix's moment, and return the whole matrix of Nesterov's moment
        in bfloat16."""
        assert matrix.grad is not None
        gradient = local_part(redistribute_like(matrix.grad, matrix))
        state = self.state[matrix]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
            if self.rounding != "nearest":
                add_rounding_state(state, matrix, self.rounding)
        moment = local_part(state["momentum_buffer"]).lerp_(gradient, 1 - group["momentum"])
        direction = gradient.lerp(moment, group["momentum"])
        if not isinstance(matrix, DTensor):
            return direction
        # Weights that FSDP keeps in CPU memory are orthogonalized on the GPU.
        return dtensor_like(
            direction.to(matrix.device_mesh.device_type, torch.bfloat16), matrix
        ).full_tensor()


def _shared(update: Tensor | None, matrix: Tensor, index: int) -> Tensor:
    """Send the update from the rank at a flat index of the matrix's mesh, and return it."""
    if not isinstance(matrix, DTensor):
        assert update is not None
        return update
    mesh = matrix.device_mesh
    coordinate, source = tuple(mesh.get_coordinate() or ()), _coordinates(mesh)[index]
    if update is None:
        update = torch.empty(matrix.shape, dtype=torch.bfloat16, device=mesh.device_type)
    update = update.contiguous()  # a tall matrix was transposed
    # Along one dimension at a time, from the ranks that have the update to those that differ in
    # this dimension.
    for dim in reversed(range(mesh.ndim)):
        if coordinate[:dim] == source[:dim]:
            dist.broadcast(update, group=mesh.get_group(dim), group_src=source[dim])
    return update


def _coordinates(mesh: DeviceMesh) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, mesh.shape)))
