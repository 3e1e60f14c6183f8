"""The total norm of gradients, and clipping by it, whatever they are sharded over."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients down, in place, to a total Euclidean norm of `max_norm` where they exceed it.

    Like `torch.nn.utils.clip_grad_norm_`, but for the norm's precision: a CPU adds up a large tensor's squares in one
    float32 sum, whose rounding error reaches 1e-4, and another one in every layout. Here each row is summed for itself.
    Norms of gradients in lower precision are in float32.

    Returns:
        The norm before clipping over all ranks, a plain scalar tensor on the gradients' device.
    """
    with_gradients = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [parameter.grad for parameter in with_gradients if parameter.grad is not None]
    if not gradients:
        return torch.zeros(())
    row_norms = [
        torch.linalg.vector_norm(gradient, dim=-1, dtype=torch.promote_types(gradient.dtype, torch.float32))
        for gradient in gradients
    ]
    total = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(norms) for norms in row_norms]))
    if isinstance(total, DTensor):
        total = total.full_tensor()
    torch.nn.utils.clip_grads_with_norm_(with_gradients, max_norm, total)
    return total
