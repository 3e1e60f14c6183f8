"""`RunModel`: one of the models that a run computes with."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchtitan.components.optimizer import trained_names
from torchtitan.distributed.parallelize import free_gathered_weights
from torchtitan.protocols import BaseModel, ModelSpec


@dataclass(kw_only=True)
class RunModel:
    """A model of a run, sharded over the ranks like the others: a policy, a reference, a teacher, a critic.

    Calling it is its forward pass, which keeps nothing for a backward pass if the model is frozen.
    """

    spec: ModelSpec
    """What it is built from."""

    parts: list[nn.Module]
    """The model, or this rank's stages of it under pipeline parallelism."""

    num_parameters: int
    """Parameters of the plain model, before converters."""

    num_trained: int
    """Parameters that the optimizer changes; 0: the model is frozen."""

    flops_per_token: float
    """Floating-point operations of a forward pass, and of a backward pass if it is trained."""

    trained_names: list[str]
    """Canonical names of the trained parameters, of all pipeline stages."""

    weights: str = ""
    """Checkpoint folder, in any format, that the weights come from; empty: drawn with `debug.seed`."""

    saved: bool = True
    """Whether checkpoints hold the weights. If not, a resumed run reads them from `weights` again."""

    offloaded: bool = False
    """Whether FSDP keeps the weights in CPU memory."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass; see `torchtitan.models.common.decoder.Decoder.forward`."""
        (model,) = self.parts
        if self.num_trained:
            return model(*args, **kwargs)
        with torch.no_grad():
            output = model(*args, **kwargs)
        free_gathered_weights(model)
        return output


def facts_of(model: BaseModel, seq_len: int) -> dict[str, Any]:
    """Return the fields of a `RunModel` that only a whole model can tell, before it is sharded."""
    return {
        "num_trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "flops_per_token": model.flops_per_token(seq_len),
        "trained_names": trained_names(model),
    }
