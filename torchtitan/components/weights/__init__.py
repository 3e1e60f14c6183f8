"""Weights in files: DCP, Hugging Face and Meta checkpoints, read and written tensor by tensor.

Nothing here knows a family of models: a source has the names and shapes that its files have. What they are called in
our models is said by an adapter (`torchtitan.protocols.state_dict_adapter`), and `ConvertedSource` and `ForeignView`
apply it.
"""

from torchtitan.components.checkpoint.formats.convert import ConvertedSource, ForeignView
from torchtitan.components.checkpoint.formats.converted import ConvertedView, PlainView
from torchtitan.components.checkpoint.formats.export import export_checkpoint
from torchtitan.components.checkpoint.formats.find import Format, format_of, open_source
from torchtitan.components.checkpoint.formats.grown import GrownVocabulary
from torchtitan.components.checkpoint.formats.huggingface import (
    HuggingFaceSource,
    write_huggingface,
    write_huggingface_index,
)
from torchtitan.components.checkpoint.formats.joined import JoinedSource
from torchtitan.components.checkpoint.formats.load import load_weights
from torchtitan.components.checkpoint.formats.meta import MetaSource, write_meta
from torchtitan.components.checkpoint.formats.source import TensorSource

__all__ = [
    "ConvertedSource",
    "ConvertedView",
    "ForeignView",
    "Format",
    "GrownVocabulary",
    "HuggingFaceSource",
    "JoinedSource",
    "MetaSource",
    "PlainView",
    "TensorSource",
    "export_checkpoint",
    "format_of",
    "load_weights",
    "open_source",
    "write_huggingface",
    "write_huggingface_index",
    "write_meta",
]
