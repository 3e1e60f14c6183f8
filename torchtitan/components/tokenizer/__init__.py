"""Text to token ids and back: `Tokenizer`, the interface, and `PretrainedTokenizer`, which reads a
model's files."""

from torchtitan.components.tokenizer.array_encoder import ArrayEncoder, DifferentIds
from torchtitan.components.tokenizer.interface import Offsets, Tokenizer
from torchtitan.components.tokenizer.pretrained import (
    EMBEDDED_TOKENIZER,
    PretrainedTokenizer,
    tokenizer_file,
)

__all__ = [
    "EMBEDDED_TOKENIZER",
    "ArrayEncoder",
    "DifferentIds",
    "Offsets",
    "PretrainedTokenizer",
    "Tokenizer",
    "tokenizer_file",
]
