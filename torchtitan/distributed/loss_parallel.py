"""Loss under tensor parallelism: each rank computes the logits of its vocabulary shard."""

import textwrap
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from torchtitan.distributed.whole_tensors import whole
from torchtitan.tools.autograd import Saved
from torchtitan.tools.errors import UserError
from torchtitan.tools.sharded import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_TRIED_TOKENS, _REASON_WIDTH = 8, 100

LogitsLoss = Callable[[Tensor, Tensor], Tensor]
"""(logits (N, V), labels (N,)) → the loss summed over the N tokens."""


@dataclass(frozen=True)
class VocabularyShard:
    """Rows of the output weights that a rank holds under tensor parallelism."""

    first: int
    group: ProcessGroup


def local_shards(
    hidden_BLD: Tensor, weight_VD: Tensor
) -> tuple[Tensor, Tensor, VocabularyShard | None]:
    """Return plain tensors for a linear layer on this rank's part of the vocabulary: all hidden
    states, this rank's rows of the weights, and their position. Gradients of a rank are its own
    part of the gradients. Plain tensors stay unchanged, without a position.

    Args:
        hidden_BLD: a DTensor on the mesh of `weight_VD`, with any sharding.
        weight_VD: rows sharded over a mesh of one dimension, possibly unevenly.
    """
    if not is_dtensor(weight_VD):
        return hidden_BLD, weight_VD, None
    from torch.distributed.tensor import Partial, Replicate, Shard

    mesh = weight_VD.device_mesh
    assert is_dtensor(hidden_BLD) and weight_VD.placements == (Shard(0),)
    # Every rank's rows of the weights contribute to the gradient of every hidden state.
    hidden = hidden_BLD.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    rows_before = -(-weight_VD.shape[0] // mesh.size()) * mesh.get_local_rank()
    first_token = min(rows_before, weight_VD.shape[0])
    return hidden, weight_VD.to_local(), VocabularyShard(first_token, mesh.get_group())


def on_sharded_logits(from_logits: LogitsLoss, weight_VD: "DTensor") -> LogitsLoss:
    """Return a loss as a function of this rank's logits (N, V_local), the outputs of its rows of
    `weight_VD`. The loss has the same value on all ranks. It raises `UserError` for an operation
    that DTensor does not support; PyTorch's cross entropy communicates only sums and maxima, and
    other operations may gather."""
    from torch.distributed.tensor import DTensor, Shard

    mesh, vocabulary = weight_VD.device_mesh, weight_VD.shape[0]

    def compute_loss(local_logits: Tensor, labels: Tensor) -> Tensor:
        shape = torch.Size((local_logits.shape[0], vocabulary))
        logits = DTensor.from_local(
            local_logits, mesh, [Shard(1)], shape=shape, stride=(vocabulary, 1)
        )
        loss = from_logits(logits, labels)
        return whole(loss)

    def from_local_logits(local_logits: Tensor, labels: Tensor) -> Tensor:
        try:
            return _LossWithGradient.apply(local_logits, labels, compute_loss)
        except (UserError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if _is_communication_error(error):
                raise
            _raise_error_on_full_logits(from_logits, local_logits, labels, vocabulary)
            reason = textwrap.shorten(
                str(error).partition("\n")[0], _REASON_WIDTH, placeholder=" …"
            )
            raise UserError(
                "the loss uses an operation that does not support logits with a sharded "
                f"vocabulary ({reason}); set --parallelism.disable_loss_parallel, or compute the "
                "loss with other operations"
            ) from error

    return from_local_logits


def _is_communication_error(error: Exception) -> bool:
    """Return whether a collective failed, which means that the error is on another rank."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    callers = [file for file in files if not file.endswith("torch/_ops.py")]
    return callers[-1].endswith(("_functional_collectives.py", "distributed_c10d.py"))


def _raise_error_on_full_logits(
    from_logits: LogitsLoss, local_logits: Tensor, labels: Tensor, vocabulary: int
) -> None:
    """Raise the error that the loss also raises on a few plain logits, since no option can fix
    it."""
    labels = labels[:_TRIED_TOKENS]
    with torch.enable_grad():
        logits = local_logits.new_zeros(len(labels), vocabulary, requires_grad=True)
        try:
            torch.autograd.grad(from_logits(logits, labels), logits)
        except Exception as error:
            raise error from None


class _LossWithGradient(torch.autograd.Function):
    """A summed loss whose gradient is computed in the forward pass, inside PyTorch's
    `loss_parallel` context."""

    @staticmethod
    def forward(ctx: Saved, logits: Tensor, labels: Tensor, compute_loss: LogitsLoss) -> Tensor:
        from torch.distributed.tensor.experimental import implicit_replication
        from torch.distributed.tensor.parallel import loss_parallel

        needs_grad = ctx.needs_input_grad[0]
        logits = logits.detach().requires_grad_(needs_grad)
        with torch.enable_grad(), loss_parallel(), implicit_replication():
            loss = compute_loss(logits, labels)
            gradient = torch.autograd.grad(loss, logits)[0] if needs_grad else None
        ctx.save_for_backward(gradient)
        return loss.detach()

    @staticmethod
    def backward(ctx: Saved, *grad_outputs: Tensor) -> tuple[Tensor | None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_outputs[0], None, None
