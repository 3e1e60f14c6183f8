"""Text to token ids and back: `Tokenizer`, the interface, and `PretrainedTokenizer`, which reads a
model's files."""

from torchtitan.components.tokenizer.array_encoder import ArrayEncoder, DifferentIds
from torchtitan.components.tokenizer.interface import Offsets, Tokenizer
from torchtitan.components.tokenizer.pretrained import (
    EMBEDDED_TOKENIZER,
    PretrainedTokenizer,
    tokenizer_file,
)
from torchtitan.components.tokenizer.span_encoder import SpanEncoder, TokenSpans

__all__ = [
    "EMBEDDED_TOKENIZER",
    "ArrayEncoder",
    "DifferentIds",
    "Offsets",
    "PretrainedTokenizer",
    "SpanEncoder",
    "TokenSpans",
    "Tokenizer",
    "tokenizer_file",
]
