"""Model families (docs/extending.md), and the search for the family of a checkpoint among given,
built-in and installed packages. No other package that a checkpoint names is imported."""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypedDict

from torchtitan.components.losses.loss import CrossEntropyLoss
from torchtitan.config import Configurable
from torchtitan.config.registry import built_in_modules, installed_modules, trusted_module
from torchtitan.distributed.parallelize import parallelize_model
from torchtitan.models.common.decoder import DENSE_SHARDING
from torchtitan.protocols import BaseModel, ModelSpec, ShardingPlan
from torchtitan.protocols.state_dict_adapter import ExternalFormat
from torchtitan.tools.errors import UserError, errors_of

ANY_CLASS = "torchtitan.models.transformers"
"""Package of the models that transformers computes."""


class Sizes(TypedDict):
    """Sizes of a decoder."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int


class SmallSizes(Sizes):
    """Sizes of a decoder, and its context."""

    max_seq_len: int


SMALL: SmallSizes = {
    "dim": 256,
    "n_layers": 4,
    "n_heads": 8,
    "n_kv_heads": 4,
    "ffn_dim": 768,
    "max_seq_len": 2048,
}
"""Sizes of a model that trains on a laptop."""

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
)


def of_sizes(
    format: ExternalFormat, model_type: str, *sizes: int, max_seq_len: int, **keys: object
) -> BaseModel.Config:
    """Return the model of a config.json with the `sizes` width, feed-forward width, layers, heads
    and vocabulary, and further `keys`. The others have their defaults in transformers."""
    named = dict(zip(_SIZES, sizes, strict=True))
    return format.from_external(
        {"model_type": model_type, "max_position_embeddings": max_seq_len, **named, **keys}
    )


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of models, in its package: `model_spec, model_registry = FAMILY.spec,
    FAMILY.registry`."""

    module: str

    flavors: Mapping[str, BaseModel.Config]

    formats: Mapping[str, ExternalFormat]
    """Weights in other formats: `hf` (Hugging Face), `meta`."""

    sharding: ShardingPlan | Callable[[Any], ShardingPlan] = DENSE_SHARDING
    """Modules that tensor and context parallelism split, or model configuration → these."""

    loss: type[Configurable.Config] = CrossEntropyLoss.Config
    """Training loss, with its default values."""

    @property
    def name(self) -> str:
        return self.module.rpartition(".")[2]

    def spec(self, model: BaseModel.Config, flavor: str) -> ModelSpec:
        """Return the specification of a model with any sizes, called `flavor`."""
        return ModelSpec(
            name=self.name,
            flavor=flavor,
            module=self.module,
            model=model,
            loss=self.loss(),
            sharding=self.sharding(model) if callable(self.sharding) else self.sharding,
            parallelize=parallelize_model,
            formats=self.formats,
        )

    def registry(self, flavor: str) -> ModelSpec:
        """Return a new specification of a flavor. Raise `UserError` if there is no such flavor."""
        if flavor not in self.flavors:
            raise UserError(
                f"{self.name} has no flavor '{flavor}' (there are: {', '.join(self.flavors)})"
            )
        return self.spec(copy.deepcopy(self.flavors[flavor]), flavor)


def named_family(name: str, checkpoint: Path, given: ModuleType | None = None) -> ModuleType:
    """Return the family that a DCP checkpoint names by import path. Raise `UserError` if it is not
    a family, or is not built in, installed or imported."""
    said = f"{checkpoint} holds a model of the package '{name}'"
    if not all(part.isidentifier() for part in name.split(".")):
        raise UserError(f"{said}, which is not a package name")
    with errors_of(said):
        family = trusted_module(name)
    if family is None:
        other = f"; --module now names '{given.__name__}'" if given else ""
        raise UserError(
            f"{said}, which is neither built in nor installed; if you trust that package, name it "
            f"with --module PATH (its folder, or '{name}' where Python finds it){other}"
        )
    flavors = getattr(family, "FLAVORS", None)
    if not (flavors and isinstance(flavors, dict) and hasattr(family, "model_spec")):
        raise UserError(f"{said}, which is not a model family")
    return family


def families_with(format: str, given: ModuleType | None = None) -> Iterator[ModuleType]:
    """Yield the families that have a format, imported one at a time: the given, then built-in, then
    installed ones; without `ANY_CLASS`, which is for the models of no family."""
    if given and format in getattr(given, "FORMATS", {}):  # an experiment has no formats
        yield given
    ours = [name for name, folder in built_in_modules().items() if folder.parent.name == "models"]
    for path in (*(f"torchtitan.models.{name}" for name in ours), *installed_modules().values()):
        family = trusted_module(path) if path != ANY_CLASS else None
        if family and format in getattr(family, "FORMATS", {}):
            yield family
