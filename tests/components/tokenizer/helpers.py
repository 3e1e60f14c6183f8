"""Helpers for tests of tokenizers."""

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan.components.tokenizer import PretrainedTokenizer

TEKKEN_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def load_tokenizer(path: str | Path = "", **options: Any) -> PretrainedTokenizer:
    """Load the tokenizer of a folder, by default the embedded one."""
    tokenizer: PretrainedTokenizer = PretrainedTokenizer.Config(**options).build(path=path)
    return tokenizer


def write_sentencepiece(path: Path, sentences: Sequence[str], **options: Any) -> None:
    """Train a small SentencePiece model, by default like Llama 2's: BPE with byte fallback."""
    import sentencepiece

    defaults = {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "vocab_size": 700,
        "character_coverage": 0.9995,
        "hard_vocab_limit": False,
        "minloglevel": 2,
    }
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences), model_writer=file, **defaults | options
        )


def write_tekken(path: Path, ranks: Sequence[bytes], **changes: Any) -> None:
    """Write a tekken.json with ten special tokens."""
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(ranks)
    ]
    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    config = {
        "pattern": TEKKEN_PATTERN,
        "num_vocab_tokens": len(ranks),
        "default_vocab_size": len(ranks) + 10,
        "default_num_special_tokens": 10,
        "version": "v11",
    }
    special = [{"rank": i, "token_str": name, "is_control": True} for i, name in enumerate(names)]
    document = {"config": config, "vocab": vocab, "special_tokens": special} | changes
    path.write_text(json.dumps(document))
