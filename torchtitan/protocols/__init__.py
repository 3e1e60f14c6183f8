"""Interfaces for extensions: models, their specifications, sharding plans and formats, and
converters."""

from torchtitan.protocols.converter import LayerConverter, ModelConverter
from torchtitan.protocols.model import BaseModel, ConvertedModule
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.sharding import ShardingPlan
from torchtitan.protocols.state_dict_adapter import ExternalFormat, StateDictAdapter

__all__ = [
    "BaseModel",
    "ConvertedModule",
    "ExternalFormat",
    "LayerConverter",
    "ModelConverter",
    "ModelSpec",
]
__all__ += ["ShardingPlan", "StateDictAdapter"]
