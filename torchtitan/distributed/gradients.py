"""The total norm of gradients, and clipping by it, whatever they are sharded over."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients down, in place, to a total Euclidean norm of `max_norm` where they exceed it.

    Like `torch.nn.utils.clip_grad_norm_`, but for the norm's precision, see `_total_norm`.

    Returns:
        The norm before clipping over all ranks, a plain scalar tensor on the gradients' device.
    """
    with_gradients = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [parameter.grad for parameter in with_gradients if parameter.grad is not None]
    if not gradients:
        return torch.zeros(())
    total = _total_norm(gradients)
    if isinstance(total, DTensor):
        total = total.full_tensor()
    torch.nn.utils.clip_grads_with_norm_(with_gradients, max_norm, total)
    return total


def _total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Euclidean norm of all gradients together, at least in float32; a DTensor where they are.

    A CPU adds up a large tensor's squares in one float32 sum, whose rounding error reaches 1e-4, and another one in
    every layout; so there each row is summed for itself. Other devices add up in trees, and torch's norm in one kernel
    over all tensors is as exact and faster, but it would round each norm to the gradients' own precision.
    """
    if all(gradient.device.type != "cpu" and gradient.dtype == torch.float32 for gradient in gradients):
        return torch.nn.utils.get_total_norm(gradients)
    row_norms = [
        torch.linalg.vector_norm(gradient, dim=-1, dtype=torch.promote_types(gradient.dtype, torch.float32))
        for gradient in gradients
    ]
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(norms) for norms in row_norms]))
