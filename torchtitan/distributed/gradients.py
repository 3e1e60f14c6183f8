"""Total norm of gradients, and clipping by it, for any sharding."""

import functools
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.tools.sharded import is_dtensor
from torchtitan.tools.torch_private import multiply_all

TensorT = TypeVar("TensorT", bound=Tensor)


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    pipeline: dist.ProcessGroup | None = None,
    copies: Collection[nn.Parameter] = frozenset(),
) -> Tensor:
    """Scale gradients down, in place, to a total Euclidean norm of at most `max_norm` (`inf`: only
    measure it).

    Unlike `torch.nn.utils.clip_grad_norm_`, this supports parameters on different meshes or none,
    and more precise norms (`_norm`). `pipeline` contains the ranks that hold the other parts of the
    model. `copies`, a set, contains parameters that count in another part, with the same gradients,
    and are only scaled.

    Returns:
        The norm before clipping over all ranks, a plain scalar tensor on the gradients' device.
    """
    with_gradients = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = []
    for parameter in with_gradients:
        assert parameter.grad is not None
        parameter.grad = redistribute_like(parameter.grad, parameter)
        if parameter not in copies:
            gradients.append(parameter.grad)
    total = total_norm(gradients, pipeline)
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    # This rank's parts, since DTensor's rules for a list take time that grows with its square.
    parts: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for gradient in [one.grad for one in with_gradients if one.grad is not None]:
        part = _local(gradient)
        parts[part.device, part.dtype].append(part)
    for (device, _), tensors in parts.items():
        multiply_all(tensors, scale.to(device))
    return total


@torch.no_grad()
def divide_gradients(parameters: Iterable[nn.Parameter], divisor: Tensor) -> None:
    """Divide all gradients by a plain scalar tensor, in place."""
    divisor_on = functools.cache(divisor.to)  # a copy per device, not per gradient
    for gradient in [parameter.grad for parameter in parameters if parameter.grad is not None]:
        local = _local(gradient)
        local.div_(divisor_on(local.device, local.dtype))


def total_norm(gradients: Sequence[Tensor], pipeline: dist.ProcessGroup | None = None) -> Tensor:
    """Return the Euclidean norm of all gradients over all ranks, a plain scalar tensor of at least
    float32."""
    device = gradients[0].device if gradients else torch.device("cpu")
    norms = [_norm(group) for group in by_mesh(gradients).values()]
    plain = [norm.full_tensor() if is_dtensor(norm) else norm for norm in norms]
    total = (
        torch.linalg.vector_norm(torch.stack(plain)) if plain else torch.zeros((), device=device)
    )
    if pipeline is None:
        return total
    squares = total.double() ** 2
    dist.all_reduce(squares, group=pipeline)
    return squares.sqrt().to(total.dtype)


def redistribute_like(tensor: Tensor, other: Tensor) -> Tensor:
    """Give a DTensor the placements of another, since tensor parallelism may leave gradients
    partial or replicated."""
    if not (is_dtensor(tensor) and is_dtensor(other)) or tensor.placements == other.placements:
        return tensor
    return tensor.redistribute(placements=other.placements)


def row_norms(gradient: Tensor) -> Tensor:
    """Return the Euclidean norm of each row in at least float32, which suffices for
    `total_norm`."""
    return torch.linalg.vector_norm(
        gradient, dim=-1, dtype=torch.promote_types(gradient.dtype, torch.float32)
    )


def by_mesh(tensors: Iterable[TensorT]) -> dict[DeviceMesh | None, list[TensorT]]:
    """Group tensors by mesh, since an operation in PyTorch supports only one mesh."""
    groups: dict[DeviceMesh | None, list[TensorT]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.device_mesh if is_dtensor(tensor) else None].append(tensor)
    return groups


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if is_dtensor(tensor) else tensor


def _norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean norm of gradients on one mesh, in at least float32. CPUs sum a large
    tensor's squares in one float32 accumulator, with a layout-dependent rounding error up to 1e-4,
    unless rows are summed first. Other devices sum in trees, so PyTorch's fused norm is as accurate
    there, and faster, but it rounds each norm to the gradients' dtype."""
    if all(
        gradient.device.type != "cpu" and gradient.dtype == torch.float32 for gradient in gradients
    ):
        return torch.nn.utils.get_total_norm(gradients)
    norms_of_rows = [row_norms(gradient) for gradient in gradients]
    norms = [torch.linalg.vector_norm(norms) if norms.ndim else norms for norms in norms_of_rows]
    return torch.linalg.vector_norm(torch.stack(norms))
