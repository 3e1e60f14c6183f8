"""Training of a byte-level BPE tokenizer with the library `tokenizers`."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan.tools import durable
from torchtitan.tools.errors import UserError

if TYPE_CHECKING:
    import tokenizers

BOS = "<|begin_of_text|>"
EOS = "<|end_of_text|>"
PAD = "<|pad|>"

_N_BYTES = 256
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Splits text before merging: contractions, words, digits, punctuation, blanks (published with
Llama 3, with up to three digits, and with Qwen2, with one)."""

_MOST_TOKENS = 2**22
"""The library reserves about 70 bytes per token of the vocabulary before it trains, and ends the
process if it cannot."""

_BATCH = 1000
"""Pieces of text that the library gets at once."""


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = (), *, digits: int = 3
) -> "tokenizers.Tokenizer":
    """Return a `tokenizers.Tokenizer` of at most `vocab_size` tokens, the special ones first: BOS,
    EOS, padding, then `special_tokens`. Every text has tokens, since all bytes have one. It adds
    BOS. A token of a number has at most so many `digits`.

    The result depends only on the texts and their order, not on the number of threads. Memory
    grows with the number of distinct words, not with the length of the texts.

    Raises:
        UserError: if the vocabulary is too small for bytes and special tokens, or above 2^22
            tokens; if a special token may also be a token of ordinary text; or if all texts are
            empty.
    """
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
        processors,
        trainers,
    )

    special = list(dict.fromkeys([BOS, EOS, PAD, *special_tokens]))
    if vocab_size < _N_BYTES + len(special):
        raise UserError(
            f"--vocab_size is {vocab_size}, but {_N_BYTES} bytes and {len(special)} special tokens "
            f"take {_N_BYTES + len(special)}"
        )
    if vocab_size > _MOST_TOKENS:
        raise UserError(f"--vocab_size is {vocab_size}, but must be at most {_MOST_TOKENS}")
    tokenizer = Tokenizer(models.BPE())
    pattern = _PATTERN.replace("DIGITS", "" if digits == 1 else f"{{1,{digits}}}")
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    split_text = tokenizer.pre_tokenizer.pre_tokenize_str
    for token in special:
        word = decoders.ByteLevel().decode([token])
        if not token or [token] == [piece for piece, _ in split_text(word)]:
            raise UserError(
                f"--special_tokens {token!r} may be a word, or a part of one, in ordinary text; "
                "choose a text that is not, such as <|name|>"
            )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in special],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_batches(texts), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B:1",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    return tokenizer


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield non-empty texts in batches. Raise `UserError` if all are empty."""
    pieces = (text for text in texts if text)
    first = next(pieces, None)
    if first is None:
        raise UserError("the data has no text to train a tokenizer on")
    batch: list[str] = []
    for text in chain([first], pieces):
        batch.append(text)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    yield batch


def tokenizer_files(tokenizer: "tokenizers.Tokenizer", chat_template: str = "") -> dict[str, str]:
    """Return the text of tokenizer.json, tokenizer_config.json and, if given,
    chat_template.jinja."""
    settings = {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": BOS,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS,
        "pad_token": PAD,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    files = {
        "tokenizer.json": tokenizer.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(settings, indent=2) + "\n",
    }
    return files | ({"chat_template.jinja": chat_template} if chat_template else {})


def save_tokenizer(files: Mapping[str, str], folder: Path) -> None:
    """Write the files of `tokenizer_files`."""
    durable.make_folder(folder)
    for name, text in files.items():
        durable.write(folder / name, text)
