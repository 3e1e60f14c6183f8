"""`RunModel`: one of the models in a run."""

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchtitan.components.optimizer import trained_names
from torchtitan.distributed import initialize_weights
from torchtitan.distributed.parallelize import free_gathered_weights
from torchtitan.protocols import BaseModel, ModelSpec


@dataclass(kw_only=True)
class RunModel:
    """A sharded model of a run: a policy, a reference, a teacher, a critic. Call it to run a forward
    pass, which stores nothing for a backward pass if the model is frozen."""

    spec: ModelSpec

    parts: list[nn.Module]
    """The model, or this rank's stages of it under pipeline parallelism; empty once it is no longer needed."""

    num_parameters: int
    """Parameters of the plain model, before converters."""

    num_trained: int
    """Parameters that the optimizer updates; 0 if the model is frozen."""

    flops_per_token: float
    """Operations per token of a forward pass, and of a backward pass if the model is trained."""

    trained_names: list[str]
    """Canonical names of the trained parameters of all pipeline stages."""

    weights: str = ""
    """Checkpoint folder of the initial weights, in any format. Empty: initialized with `debug.seed`."""

    saved: bool = True
    """True if checkpoints contain the weights; otherwise a resumed run reads them from `weights` again."""

    offloaded: bool = False
    """True if FSDP keeps the weights in CPU memory between uses."""

    is_initialized: bool = True
    """False from allocation until every tensor has an initial value or is about to be loaded."""

    def __str__(self) -> str:
        kind = "trained" if self.num_trained else "frozen"
        return f"{self.spec.name} {self.spec.flavor}, {self.num_parameters:,} parameters, {kind}"

    def allocate(self, device: torch.device) -> None:
        """Allocate the weights on a device, or in CPU memory, and set the mode for training or inference."""
        for part in self.parts:
            part.to_empty(device="cpu" if self.offloaded else device)
            part.train(self.num_trained > 0)
        self.is_initialized = False

    def initialize(self, seed: int, *, loaded: Container[str] = ()) -> None:
        """Draw initial values, unless that has been done, except for tensors with canonical names in `loaded`, whose
        values are read from files."""
        if not self.is_initialized:
            for part in self.parts:
                initialize_weights(part, seed, loaded=loaded)
        self.is_initialized = True

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
    """Return the fields of a `RunModel` that must be computed before it is sharded."""
    return {
        "num_trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "flops_per_token": model.flops_per_token(seq_len),
        "trained_names": trained_names(model),
    }
