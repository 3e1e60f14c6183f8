"""Of which code tokenized rows are: whatever it may make of the same rows, another version makes it anew."""

import hashlib
from functools import cache
from pathlib import Path

from torchtitan import components

SOURCES = (
    "chat_template/*.py",
    "tokenizer/*.py",
    "data/json_list.py",
    "data/local_data.py",
    "data/readers.py",
    "data/rows.py",
    "data/tables.py",
    "data/finetuning/chat_encoding.py",
    "data/finetuning/column_names.py",
    "data/finetuning/conversation.py",
    "data/finetuning/conversions.py",
    "data/finetuning/filters.py",
    "data/finetuning/loss_mask.py",
    "data/finetuning/policies.py",
    "data/finetuning/function_fingerprint.py",
    "data/finetuning/row_encoders.py",
    "data/finetuning/row_formats.py",
    "data/finetuning/row_functions.py",
    "data/finetuning/sample_cache.py",
    "data/finetuning/template_tokens.py",
    "data/finetuning/turns.py",
)
"""The modules, as patterns below `torchtitan/components`, by which rows are read, converted, encoded, kept or left out,
and written."""


@cache
def code_version() -> str:
    """Hexadecimal digest of `SOURCES`, for the key of a cache."""
    folder = Path(components.__path__[0])
    files = [file for pattern in SOURCES for file in sorted(folder.glob(pattern))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
