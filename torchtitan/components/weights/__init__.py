"""Reading, writing and loading DCP, Hugging Face and Meta checkpoints, one tensor at a time.

A tensor source has the names and shapes of its files. `InternalView` and `ExternalView` apply a
family's state-dict adapter (`torchtitan.protocols.state_dict_adapter`) to map them to our models.
`components.checkpoint` does not use this package.
"""

from torchtitan.components.checkpoint.formats import Format, format_of
from torchtitan.components.weights.export import export_checkpoint
from torchtitan.components.weights.huggingface import HuggingFaceSource, write_huggingface
from torchtitan.components.weights.load import load_weights
from torchtitan.components.weights.sources import open_source
from torchtitan.components.weights.torch_files import MetaSource, write_meta
from torchtitan.components.weights.views import (
    ChainedSource,
    ConvertedView,
    ExternalView,
    InternalView,
    PlainView,
    ResizedEmbedding,
)
from torchtitan.protocols.tensor_source import TensorSource

__all__ = [
    "ChainedSource",
    "InternalView",
    "ConvertedView",
    "ExternalView",
    "Format",
    "HuggingFaceSource",
]
__all__ += [
    "MetaSource",
    "PlainView",
    "ResizedEmbedding",
    "TensorSource",
    "export_checkpoint",
    "format_of",
]
__all__ += ["load_weights", "open_source", "write_huggingface", "write_meta"]
