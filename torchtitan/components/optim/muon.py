"""Muon (Jordan 2024, https://kellerjordan.github.io/posts/muon) on sharded and replicated matrices:
one rank orthogonalizes the update of a matrix, and sends it to the others. Matrices of stacked
experts are orthogonalized one at a time."""

import itertools
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.components.optim.bf16_weights import (
    Rounding,
    add_rounding_state,
    wide_weight,
    write_weight,
)
from torchtitan.components.optim.own_state import Allocated, Group
from torchtitan.distributed.gradients import redistribute_like
from torchtitan.distributed.initialize import local_part, local_slices, sharded_dims
from torchtitan.distributed.whole_tensors import whole
from torchtitan.tools.sharded import is_dtensor
from torchtitan.tools.torch_private import adjusted_lr, dtensor_like, orthogonalize


class Muon(Allocated, torch.optim.Muon):
    """`torch.optim.Muon` for groups of parameters that are on the same mesh, or on none.

    Weights and moments stay sharded. n ranks gather the updates of n matrices in bfloat16, the type
    of the Newton-Schulz iterations, and each rank orthogonalizes one whole update, as a single
    process does. A parameter (…, m, n) is a stack of matrices, which counts as one for this
    division, unless each rank has whole matrices of it.
    """

    def __init__(
        self, groups: Sequence[dict[str, Any]], *, rounding: Rounding = "nearest", **options: Any
    ):
        # torch refuses stacks, so it gets a matrix for each group.
        super().__init__([{**group, "params": [torch.empty(1, 1)]} for group in groups], **options)
        for group, given in zip(self.param_groups, groups, strict=True):
            group["params"] = list(given["params"])
        self.rounding = rounding
        # Found by computations on tensors, which have no values during a dry run's step.
        matrices = [matrix for group in self.param_groups for matrix in group["params"]]
        self._own_parts = {matrix: local_slices(matrix) for matrix in matrices}
        self._whole_stacks = {matrix for matrix in matrices if _has_whole_matrices(matrix)}

    def allocate(self) -> None:
        for matrix in (matrix for group in self.param_groups for matrix in group["params"]):
            if matrix not in self.state:
                state = {"momentum_buffer": torch.zeros_like(matrix, requires_grad=False)}
                if self.rounding != "nearest":
                    add_rounding_state(state, matrix, self.rounding)
                self.state[matrix] = state

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.allocate()
        for group in self.param_groups:
            settings = cast(Group, group)
            given = [parameter for parameter in group["params"] if parameter.grad is not None]
            for stack in (parameter for parameter in given if parameter in self._whole_stacks):
                direction = local_part(self._direction(stack, settings))
                self._apply(stack, self._orthogonal(direction, settings), settings)
            matrices = [parameter for parameter in given if parameter not in self._whole_stacks]
            # Matrices of similar size take ranks a similar time.
            matrices.sort(key=lambda matrix: (matrix.numel(), max(matrix.shape)), reverse=True)
            mesh = matrices[0].device_mesh if matrices and is_dtensor(matrices[0]) else None
            n_ranks = mesh.size() if mesh else 1
            for first in range(0, len(matrices), n_ranks):
                self._update(matrices[first : first + n_ranks], mesh, settings)

    def _update(self, matrices: Sequence[Tensor], mesh: DeviceMesh | None, group: Group) -> None:
        """Update at most one matrix per rank. A collective."""
        own = _coordinates(mesh).index(tuple(mesh.get_coordinate() or ())) if mesh else 0
        update = None
        # All are gathered before the first product, since other ranks would wait for it.
        for index, matrix in enumerate(matrices):
            direction = self._direction(matrix, group)
            gathered = whole(direction)
            update = gathered if index == own else update
        if update is not None:
            update = self._orthogonal(update, group)
        for index, matrix in enumerate(matrices):
            shared = _shared(update if index == own else None, matrix, index)
            self._apply(matrix, shared[self._own_parts[matrix]], group)

    def _orthogonal(self, matrices: Tensor, group: Group) -> Tensor:
        """Return orthogonal matrices (…, m, n) next to the given ones, each computed by itself."""
        settings = group["ns_coefficients"], group["ns_steps"], group["eps"]
        if matrices.ndim == 2:
            return orthogonalize(matrices, *settings)
        out = torch.empty_like(matrices, dtype=torch.bfloat16)
        for one, place in zip(matrices.flatten(0, -3), out.flatten(0, -3), strict=True):
            place.copy_(orthogonalize(one, *settings))
        return out

    def _apply(self, matrix: Tensor, part: Tensor, group: Group) -> None:
        """Update this rank's part of a matrix by a part of the orthogonal matrix."""
        rate = adjusted_lr(group["lr"], group["adjust_lr_fn"], matrix.shape[-2:])
        state = self.state[matrix]
        is_rounded = self.rounding != "nearest"
        weight = wide_weight(matrix, state) if is_rounded else local_part(matrix)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(part.to(weight.device), alpha=-rate)
        if is_rounded:
            state["step"] += 1
            write_weight(matrix, weight, state, self.rounding)

    def _direction(self, matrix: Tensor, group: Group) -> Tensor:
        """Add the gradient to the matrix's moment, and return Nesterov's moment: of a sharded
        matrix, in bfloat16 on the device of its mesh, sharded alike."""
        assert matrix.grad is not None
        gradient = local_part(redistribute_like(matrix.grad, matrix))
        moment = local_part(self.state[matrix]["momentum_buffer"]).lerp_(
            gradient, 1 - group["momentum"]
        )
        direction = gradient.lerp(moment, group["momentum"])
        if not is_dtensor(matrix):
            return direction
        # Weights that FSDP keeps in CPU memory are orthogonalized on the GPU.
        return dtensor_like(direction.to(matrix.device_mesh.device_type, torch.bfloat16), matrix)


def _has_whole_matrices(stack: Tensor) -> bool:
    """Return whether ranks divide a stack of matrices, but no single matrix."""
    dims = [dim for dim in sharded_dims(stack) if dim is not None]
    return bool(dims) and max(dims) < stack.ndim - 2


def _shared(update: Tensor | None, matrix: Tensor, index: int) -> Tensor:
    """Send the update from the rank at a flat index of the matrix's mesh, and return it."""
    if not is_dtensor(matrix):
        assert update is not None
        return update
    mesh = matrix.device_mesh
    coordinate, source = tuple(mesh.get_coordinate() or ()), _coordinates(mesh)[index]
    if update is None:
        update = torch.empty(matrix.shape, dtype=torch.bfloat16, device=mesh.device_type)
    update = update.contiguous()  # a tall matrix was transposed
    # Along one dimension at a time, from the ranks that have the update to the ranks that differ
    # in this dimension.
    for dim in reversed(range(mesh.ndim)):
        if coordinate[:dim] == source[:dim]:
            dist.broadcast(update, group=mesh.get_group(dim), group_src=source[dim])
    return update


def _coordinates(mesh: DeviceMesh) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, mesh.shape)))
