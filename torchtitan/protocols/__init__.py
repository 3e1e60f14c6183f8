"""What a plug-in provides: a model, its specification, a converter."""

from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.model_converter import ModelConverter
from torchtitan.protocols.model_spec import ModelSpec

__all__ = ["BaseModel", "ModelConverter", "ModelSpec"]
