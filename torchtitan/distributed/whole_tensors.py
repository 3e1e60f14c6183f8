"""Whole tensors from parts under tensor parallelism; a plain tensor is whole. Nothing here imports
DTensor before there is one."""

from typing import cast

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from torchtitan.protocols.output_head import LogitTransform, compute_logits
from torchtitan.tools.sharded import is_dtensor


def sequence_group(model: nn.Module) -> ProcessGroup | None:
    """Return the ranks that split the model's sequences; None if each rank has all tokens."""
    if not getattr(model, "splits_sequences", False):
        return None
    meshes = (parameter.device_mesh for parameter in model.parameters() if is_dtensor(parameter))
    with_name = (mesh["tp"] for mesh in meshes if "tp" in (mesh.mesh_dim_names or ()))
    mesh = next(with_name, None)
    return None if mesh is None else cast(ProcessGroup, mesh.get_group())


def sequence_splits(model: nn.Module) -> int:
    """Return the number of ranks that split the model's sequences, whose lengths it divides."""
    group = sequence_group(model)
    return 1 if group is None else group.size()


def whole(x: Tensor) -> Tensor:
    """Return all of a tensor on every rank."""
    return x.full_tensor() if is_dtensor(x) else x


def whole_logits(hidden_ND: Tensor, weight_VD: Tensor | None, transform: LogitTransform) -> Tensor:
    """Return all logits (N, V) on every rank, given all hidden states (N, D). Weights that are
    split by vocabulary stay so, since gathering logits is cheaper."""
    if not is_dtensor(weight_VD):
        return compute_logits(hidden_ND, weight_VD, transform)
    from torch.distributed.tensor import DTensor, Replicate

    shared_ND = DTensor.from_local(hidden_ND, weight_VD.device_mesh, [Replicate()])
    return cast(DTensor, compute_logits(shared_ND, weight_VD, transform)).full_tensor()
