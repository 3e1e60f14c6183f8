"""Text to token ids and back: `Tokenizer`, the interface, and `PretrainedTokenizer`, which reads a model's files."""

from torchtitan.components.tokenizer.interface import Offsets, Tokenizer
from torchtitan.components.tokenizer.pretrained import EMBEDDED_TOKENIZER, PretrainedTokenizer, tokenizer_file

__all__ = ["EMBEDDED_TOKENIZER", "Offsets", "PretrainedTokenizer", "Tokenizer", "tokenizer_file"]
