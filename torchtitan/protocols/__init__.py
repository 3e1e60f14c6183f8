"""What a plug-in provides: a model, its specification and sharding plan, a converter."""

from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.model_converter import ModelConverter
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.sharding import ShardingPlan

__all__ = ["BaseModel", "ModelConverter", "ModelSpec", "ShardingPlan"]
