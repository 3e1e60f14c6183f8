"""Helper for tests of tokenizers."""

from pathlib import Path

from torchtitan.components.tokenizer import PretrainedTokenizer


def load_tokenizer(path: str | Path = "") -> PretrainedTokenizer:
    """Load the tokenizer of a folder, by default the embedded one."""
    tokenizer: PretrainedTokenizer = PretrainedTokenizer.Config().build(path=path)
    return tokenizer
