"""`ModelSpec`: everything that a model family provides for one flavor."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from tyro.conf import Suppress

from torchtitan.config import Configurable
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.sharding import ShardingPlan
from torchtitan.protocols.state_dict_adapter import ForeignFormat

ParallelizeFunction = Callable[..., nn.Module]


@dataclass(kw_only=True, slots=True)
class ModelSpec:
    """What `model_registry(flavor)` returns, a fresh one per call. `model` and `loss` can be set on the command line;
    the rest is the family's (`Suppress`ed there)."""

    name: Suppress[str]
    """The family: `llama3`."""

    flavor: Suppress[str]
    """The size within the family: `8B`."""

    module: Suppress[str]
    """Import path of the family's package, `torchtitan.models.llama3`, by which a checkpoint names it."""

    model: BaseModel.Config
    """The model; `model.build()` constructs it. Its fields are `--model.<field>` on the command line."""

    loss: Configurable.Config
    """The training loss, unless a run chooses another (`Trainer.Config.loss`); see `torchtitan.components.loss`. Its
    fields are `--loss.<field>`."""

    sharding: Suppress[ShardingPlan]
    """Which modules tensor and context parallelism split, and how."""

    parallelize: Suppress[ParallelizeFunction]
    """Applies the parallelisms to a meta-device model or pipeline stage, in place, as
    `torchtitan.distributed.parallelize.parallelize_decoder`."""

    formats: Suppress[Mapping[str, ForeignFormat]] = field(default_factory=dict)
    """What the weights are in other formats, by format: `hf` (Hugging Face), `meta`. Empty: only our own."""

    def to_dict(self) -> dict[str, Any]:
        """The parts that can be set, as JSON-ready values."""
        return {"model": self.model.to_dict(), "loss": self.loss.to_dict()}
