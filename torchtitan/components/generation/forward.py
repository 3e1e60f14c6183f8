"""Forward passes of a model that generates."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from torchtitan.components.generation.row import PADDING
from torchtitan.distributed import context_parallel
from torchtitan.distributed.parallelize import free_gathered_weights
from torchtitan.distributed.whole_tensors import whole, whole_logits
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.protocols.images import ImageInputs
from torchtitan.protocols.output_head import UNCHANGED, LogitTransform
from torchtitan.tools.errors import UserError
from torchtitan.tools.sharded import is_dtensor
from torchtitan.tools.torch_private import forward_hooks

NOT_FINITE_HINT = (
    "the weights may be damaged, training may have diverged, or values are too large for --dtype"
)
"""Possible causes of NaN in a model's output."""


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode within the block; then restore its mode and free weights
    gathered by FSDP."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        free_gathered_weights(model)
        model.train(was_training)


def left_padded(sequences: Sequence[Sequence[int]], multiple: int) -> tuple[Tensor, Tensor]:
    """Return tokens and positions (B, L) on the host, L divisible by `multiple`. Padding is
    documents of one token."""
    longest = -(-max(map(len, sequences)) // multiple) * multiple
    paddings = [longest - len(sequence) for sequence in sequences]
    tokens = [
        [PADDING] * padding + list(sequence)
        for padding, sequence in zip(paddings, sequences, strict=True)
    ]
    return torch.tensor(tokens), (torch.arange(longest) - torch.tensor(paddings)[:, None]).clamp(
        min=0
    )


def logits_at(
    model: nn.Module,
    index: int,
    tokens_BL: Tensor,
    attention: AttentionMetadata,
    images: ImageInputs | None = None,
) -> Tensor:
    """Return the logits (B, V) of the token in column `index`, after `images` if there are
    any."""

    def head(
        hidden_BLD: Tensor, weight_VD: Tensor | None, transform: LogitTransform = UNCHANGED
    ) -> Tensor:
        return whole_logits(whole(hidden_BLD)[:, index], weight_VD, transform)

    more = {} if images is None else {"images": images}
    logits: Tensor = model(tokens_BL, attention, head=head, **more)
    return logits


def device_of(model: nn.Module) -> torch.device:
    """Return the compute device of the model, even if FSDP offloads the parameters."""
    parameter = next(model.parameters())
    return (
        torch.device(parameter.device_mesh.device_type)
        if is_dtensor(parameter)
        else parameter.device
    )


def reject_partial_model(model: nn.Module) -> None:
    """Raise `UserError` for a part of a model, or one that has only some of the tokens."""
    # The last stage has the embedding too if it is tied, but not the first layer.
    lacks_layers = "0" not in getattr(model, "layers", "0")
    if lacks_layers or any(
        getattr(model, name, model) is None for name in ("tok_embeddings", "head")
    ):
        raise UserError(
            "a pipeline stage cannot generate text: it has only some of the model's layers"
        )
    hooks = (hook for module in model.modules() for hook in forward_hooks(module))
    if any(getattr(hook, "__module__", None) == context_parallel.__name__ for hook in hooks):
        raise UserError(
            "a model under context parallelism cannot generate text: each rank has only some of "
            "the tokens"
        )
