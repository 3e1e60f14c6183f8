"""Helpers for tests of data loading."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torchtitan.components.data import BaseDataLoader, PretrainDataLoader
from torchtitan.components.data.base import Batch
from torchtitan.components.data.pretraining.tokens import Tokens
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.tools.errors import UserError


def raises(message: str, kind: type[Exception] = UserError) -> Any:
    """Expect an error of exactly this class that contains `message`."""
    return pytest.raises(kind, match=re.escape(message), check=lambda error: type(error) is kind)


def replace(config: Any, **changes: Any) -> Any:
    """Return a copy of a configuration with changed options."""
    values = {name: getattr(config, name) for name in config.to_dict()}
    return type(config)(**{**values, **changes})


def take(loader: BaseDataLoader, n: int = 10**9) -> list[Batch]:
    """Return up to n batches."""
    return [batch for _, batch in zip(range(n), loader, strict=False)]


def with_positions(batch: Batch) -> Batch:
    """Replace a batch's attention, if any, by the positions it was made of, if any, so that all
    values are tensors."""
    attention = batch.get("attention")
    tensors = {name: value for name, value in batch.items() if name != "attention"}
    if attention is None or attention.positions_BL is None:
        return tensors
    return {**tensors, "positions": attention.positions_BL}


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> str:
    """Write rows as JSON Lines; return the path."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def open_tokens(
    dataset: str | Path, tokenizer: Tokenizer, folder: Path, split: str = "train", **options: Any
) -> Tokens:
    """Open a dataset of pre-training, with its cache in a subfolder."""
    config = PretrainDataLoader.Config(
        dataset=[str(dataset)], split=split, cache_dir=str(folder / "cache"), **options
    )
    [tokens] = config.open(tokenizer)
    assert isinstance(tokens, Tokens)
    return tokens


def split_documents(tokens: Tokens) -> list[list[int]]:
    """Return the token ids of each document."""
    starts = tokens.starts(0, tokens.n_tokens)
    return [part.tolist() for part in np.split(tokens.tokens(0, tokens.n_tokens), starts[1:])]
