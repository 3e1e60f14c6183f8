"""Tokenizers of many kinds, and texts, for tests of `ArrayEncoder`."""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from torchtitan.components.tokenizer import PretrainedTokenizer, array_encoder
from torchtitan.components.tokenizer.probes import probe_texts

_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_CORPUS = [
    *probe_texts([], []),
    *("It was a cold day in 1984, and the clocks were striking thirteen; don't ask. " * 9),
]

FILES = {
    "embedded": "",
    "gpt2": "gpt2-tokenizer",
    "llama3": "llama3-tokenizer",
    "mistral": "mistral-v0.3-tokenizer",
    "stories260K": "stories260K/hf-converted",
}
"""Folder of each tokenizer in the tests' assets; empty: the package's."""

PACKAGED = {
    "tekken": ("tekken_240911.json", "tekken.json"),
    "sentencepiece": ("tokenizer.model.v1", "tokenizer.model"),
    "sentencepiece-pieces": ("mistral_instruct_tokenizer_240323.model.v3", "tokenizer.model"),
}
"""Files of mistral-common, and the names that models give them."""

FAST = [*FILES, *PACKAGED, "qwen", "llama3-json", "o200k", "spaces", "prefix", "flags", "gemma"]
"""Tokenizers that gigatoken reads."""
SLOW = {
    "digits": "Unsupported pre_tokenizer",
    "nfkc": "Unsupported normalizer",
    "neox": "no added tokens within normalized text",
    "dropout": "no dropout",
    "unigram": "Unsupported model",
    "wordpiece": "Unsupported model",
}
"""Tokenizers for which gigatoken is not used, and the reason in the log."""


def load(name: str, folder: Path, assets: Path) -> PretrainedTokenizer:
    """Load a tokenizer by name, from files that are made in `folder` if necessary."""
    if name in FILES:
        path: Any = assets / FILES[name] if FILES[name] else ""
    elif name in PACKAGED:
        import mistral_common

        source, target = PACKAGED[name]
        path = folder
        (folder / target).symlink_to(Path(mistral_common.__file__).parent / "data" / source)
    else:
        path = folder
        _write(name, folder / "tokenizer.json")
    tokenizer: PretrainedTokenizer = PretrainedTokenizer.Config().build(path=path)
    return tokenizer


def texts_for(tokenizer: PretrainedTokenizer, n: int = 150) -> list[str]:
    """Return texts of several scripts, code, special tokens and parts of them, blanks, and long
    ones."""
    chance = random.Random(0)
    added = [*tokenizer.backend.added_tokens()][:40] if tokenizer.backend else []
    probes = probe_texts(added, [])
    words = [
        *added,
        *(token[:4] for token in added),
        "<think>",
        "foo",
        "foobar",
        "<s>",
        "<unk>",
        "[INST]",
        "</s",
    ]
    words += [
        "é",
        "e\u0301",
        "ﬁ",
        "\u2028",
        "\u3000",
        "'s",
        "123456",
        " ",
        "  ",
        "\n",
        "\r\n",
        "\t",
        "▁",
        "中文",
        "🙂",
    ]
    words += Path(__file__).read_text().split(" ")

    def mixture() -> str:
        return "".join(
            chance.choice(words) + chance.choice(["", " ", "\n"])
            for _ in range(chance.randint(1, 40))
        )

    edges = [
        "",
        " " * 3000,
        "a" * 30_000,
        "\ud83d\ude00 pair",
        "alone \ud800 and",
        "\0\1\x7f",
        "中" * 2000,
        "\u0301" * 50,
    ]
    source = Path(__file__).read_text()
    return [
        *probes,
        *edges,
        source,
        "Words in a long text. " * 20_000,
        *(mixture() for _ in range(n)),
    ]


class Changed:
    """gigatoken's tokenizer with a change to the ids of some texts."""

    def __init__(self, fast: Any, change: Callable[[bytes, np.ndarray], np.ndarray]):
        self.fast, self.change = fast, change

    def encode(self, content: bytes) -> np.ndarray:
        return self.change(content, self.fast.encode(content))


def change_ids(
    patch: pytest.MonkeyPatch, change: Callable[[bytes, np.ndarray], np.ndarray]
) -> None:
    """Make gigatoken change the ids of texts that are encoded one by one."""
    patch.setenv("TOKENIZERS_PARALLELISM", "false")
    original = array_encoder._open_backend

    def open_changed(backend: Any) -> tuple[Callable[[], Changed], Changed]:
        load, fast = original(backend)
        return (lambda: Changed(load(), change)), Changed(fast, change)

    patch.setattr(array_encoder, "_open_backend", open_changed)


def open_for_any_text(patch: pytest.MonkeyPatch) -> None:
    """Make gigatoken worth opening for a text of any length."""
    patch.setattr(array_encoder, "WORTH_OPENING", dict.fromkeys(array_encoder.WORTH_OPENING, 0))


def split_ids(ids: np.ndarray, lengths: np.ndarray) -> list[list[int]]:
    """Return the ids of each text."""
    return [of_text.tolist() for of_text in np.split(ids, np.cumsum(lengths))[:-1]]


def _write(name: str, path: Path) -> None:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=name == "prefix")
    by_pattern = {
        "qwen": _QWEN,
        "llama3-json": _LLAMA3,
        "o200k": _O200K,
        "flags": _LLAMA3,
        "dropout": _LLAMA3,
    }
    pre: Any = _split(by_pattern[name]) if name in by_pattern else byte_level
    if name == "digits":
        pre = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if name == "gemma":
        path.write_text(_gemma())
        return
    if name in ("unigram", "wordpiece"):
        path.write_text(_of_other_model(name))
        return
    tokenizer = Tokenizer(models.BPE(dropout=0.5 if name == "dropout" else None))
    tokenizer.pre_tokenizer = pre
    normalizer = {"qwen": normalizers.NFC, "neox": normalizers.NFC, "nfkc": normalizers.NFKC}.get(
        name
    )
    if normalizer:
        tokenizer.normalizer = normalizer()
    special = ["<|endoftext|>", "<|im_start|>"]
    _train(
        tokenizer,
        trainers.BpeTrainer,
        special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(_added(name))
    tokenizer.save(str(path))


def _added(name: str) -> Sequence[AddedToken]:
    def token(text: str, **flags: bool) -> AddedToken:
        return AddedToken(text, special=False, **flags)

    if name == "qwen":
        return [token("<think>", normalized=False)]
    if name in ("neox", "spaces"):
        return [token(" " * n, normalized=name == "neox") for n in range(16, 1, -1)]
    if name == "flags":
        whole = token("foo", single_word=True, normalized=False)
        return [token("<think>", lstrip=True, rstrip=True, normalized=False), whole]
    return []


def _split(pattern: str) -> Any:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def _train(
    tokenizer: Any, trainer: Callable[..., Any], special: Sequence[str], **options: Any
) -> None:
    options = {"vocab_size": 900, "show_progress": False, "special_tokens": [*special]} | options
    tokenizer.train_from_iterator(_CORPUS, trainer(**options))


def _gemma() -> str:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    _train(tokenizer, trainers.BpeTrainer, ["<unk>", "<bos>", *fallback], max_token_length=16)
    document = json.loads(tokenizer.to_str())
    document["added_tokens"] = [
        token for token in document["added_tokens"] if token["content"] not in fallback
    ]
    return json.dumps(document)


def _of_other_model(name: str) -> str:
    if name == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        _train(
            tokenizer, trainers.UnigramTrainer, ["<unk>", "</s>"], unk_token="<unk>", vocab_size=300
        )
    else:
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        _train(tokenizer, trainers.WordPieceTrainer, ["[UNK]", "[CLS]"])
    text: str = tokenizer.to_str()
    return text
