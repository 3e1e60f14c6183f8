"""`ModelSpec`: everything that a model family provides for one flavor."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import nn
from tyro.conf import Suppress

from torchtitan.config import Configurable
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.sharding import ShardingPlan
from torchtitan.protocols.state_dict_adapter import ExternalFormat

ParallelizeFunction = Callable[..., nn.Module]


@dataclass(kw_only=True, slots=True)
class ModelSpec:
    """Result of `model_registry(flavor)`, new for each call. Only `model` and `loss` are
    command-line options."""

    name: Suppress[str]
    """Family: `llama3`."""

    flavor: Suppress[str]
    """Size within the family: `8B`."""

    module: Suppress[str]
    """Import path of the family's package, which names the family in checkpoints:
    `torchtitan.models.llama3`."""

    model: BaseModel.Config
    """Model; `model.build()` constructs it. Its options are `--model.<field>`."""

    loss: Configurable.Config
    """Training loss, with the options `--loss.<field>`; see `torchtitan.components.losses.loss`."""

    sharding: Suppress[ShardingPlan]
    """Modules that tensor and context parallelism split."""

    parallelize: Suppress[ParallelizeFunction]
    """Applies the parallelisms to a meta-device model or pipeline stage, in place; see
    `distributed.parallelize`."""

    formats: Suppress[Mapping[str, ExternalFormat]] = field(default_factory=dict)
    """Other formats of the weights: `hf` (Hugging Face), `meta`. Empty: only our own."""

    def to_dict(self) -> dict[str, object]:
        return {"model": self.model.to_dict(), "loss": self.loss.to_dict()}
