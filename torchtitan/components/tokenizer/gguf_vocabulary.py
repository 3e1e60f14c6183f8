"""Tokenizers in GGUF, the format of llama.cpp: vocabulary, merges, and the name of the
pre-tokenizer.

llama.cpp has its own code for each pre-tokenizer that it knows, and a file only names one. So a
tokenizer whose rules are not in `_NAMES` is refused. It has no normalizer for these tokenizers.
"""

import json
import re
from collections.abc import Mapping
from enum import IntEnum
from typing import NotRequired, Required, TypedDict

from torchtitan.components.tokenizer.pretrained import PretrainedTokenizer
from torchtitan.tools.errors import UserError, summarize_names
from torchtitan.tools.logging import logger


class TokenType(IntEnum):
    """Kinds of tokens, as numbered in the format."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(ending: str) -> str:
    """Return the pattern of words that a capital begins, with an `ending`."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return f"{start}{_UPPER}*{_LOWER}+{ending}|{start}{_UPPER}+{_LOWER}*{ending}"


_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_MARKED = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"

_PATTERNS = {
    "llama3": "|".join((_ENDINGS, _WORDS, r"\p{N}{1,3}", _SYMBOLS, _BLANKS)),
    "qwen2": "|".join((_ENDINGS, _WORDS, r"\p{N}", _SYMBOLS, _BLANKS)),
    "qwen35": "|".join((_ENDINGS, _MARKED, r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", _BLANKS)),
    "tekken": "|".join((_cased(""), r"\p{N}", _PATHS, _BLANKS)),
    "gpt-4o": "|".join((_cased(_ENDINGS + "?"), r"\p{N}{1,3}", _PATHS, _BLANKS)),
    "deepseek-v3": "|".join(
        (
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
            r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
            r" ?[\p{P}\p{S}]+[\r\n]*",
            _BLANKS,
        )
    ),
    "exaone-moe": "|".join(
        (
            _ENDINGS,
            r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
            r"\p{N}",
            r" ?[^\s\p{L}\p{N}]+[\r\n/]?",
            r"\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
}
"""Name → regular expression that finds the words of a text."""

_BEFORE_DEEPSEEK = (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+")
"""Digits, and Chinese and Japanese text, which DeepSeek-V3 finds first."""

_NAMES: Mapping[tuple[str, ...], Mapping[bool, str]] = {
    ("words of GPT-2",): {False: "gpt-2"},
    ("single digits", "words of GPT-2"): {False: "smollm"},
    (_PATTERNS["llama3"], "bytes"): {False: "dbrx", True: "llama-bpe"},
    (_PATTERNS["qwen2"], "bytes"): {False: "qwen2"},
    (_PATTERNS["qwen35"], "bytes"): {False: "qwen35"},
    (_PATTERNS["tekken"], "bytes"): {True: "tekken"},
    (_PATTERNS["gpt-4o"], "bytes"): {False: "gpt-4o"},
    (*_BEFORE_DEEPSEEK, _PATTERNS["deepseek-v3"], "bytes"): {False: "deepseek-v3"},
    (_PATTERNS["exaone-moe"], "bytes"): {False: "exaone-moe"},
}
"""Rules of a pre-tokenizer → whether whole words are looked up before merging → its name in
llama.cpp (src/llama-vocab.cpp)."""

_NO_HAN = r"&&[^\p{Han}]]"
_KIMI = "|".join(
    (
        r"[\p{Han}]+",
        *(
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER[:-1]}{_NO_HAN}{upper}"
            rf"{_LOWER[:-1]}{_NO_HAN}{lower}{_ENDINGS}?"
            for upper, lower in ("*+", "+*")
        ),
        r"\p{N}{1,3}",
        _SYMBOLS,
        _BLANKS,
    )
)
_REFUSED: Mapping[tuple[str, ...], str] = {
    (_KIMI, "bytes"): "its pre-tokenizer is Kimi's, and llama.cpp's kimi-k2 splits words with "
    "capitals or accents elsewhere, such as dA"
}
"""Rules that llama.cpp has a name for, but follows otherwise → why they are refused."""

_KEEP_SPACES = {"<unk>", "<s>", "<|endoftext|>"}
"""Special tokens of Phi-3 that do not strip the spaces after them."""

_BYTE = re.compile("<0x[0-9A-F]{2}>")


class _Model(TypedDict):
    type: str
    vocab: dict[str, int]
    merges: list[tuple[str, str]]
    byte_fallback: NotRequired[bool]
    ignore_merges: NotRequired[bool]
    unk_token: NotRequired[str | None]


class _Added(TypedDict):
    id: int
    content: str
    special: bool
    lstrip: bool
    rstrip: bool
    single_word: bool


class _Step(TypedDict, total=False):
    """A normalizer or pre-tokenizer, with the settings of its type."""

    type: Required[str]
    add_prefix_space: bool
    use_regex: bool
    individual_digits: bool
    behavior: str
    invert: bool
    pattern: dict[str, str]
    pretokenizers: "list[_Step]"
    replacement: str
    split: bool
    prepend_scheme: str


class _Tokenizer(TypedDict):
    """A tokenizer.json as the library `tokenizers` writes it."""

    model: _Model
    added_tokens: list[_Added]
    normalizer: _Step | None
    pre_tokenizer: _Step | None


def gguf_vocabulary(tokenizer: PretrainedTokenizer, n_rows: int) -> dict[str, object]:
    """Return the metadata of a tokenizer.

    Args:
        n_rows: rows of the model's embedding; ids without a token get one that no text has.

    Raises:
        UserError: if llama.cpp does not have its rules, or it has more tokens than the model.
    """
    document: _Tokenizer = json.loads(tokenizer.as_hugging_face().to_str())
    if tokenizer.vocab_size > n_rows:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but the model only {n_rows}"
        )
    if tokenizer.eos_id is None:
        raise UserError(
            "GGUF needs a token that ends a text, but the tokenizer has no EOS; set eos_token in "
            "tokenizer_config.json"
        )
    if document["model"]["type"] != "BPE":
        raise _unknown(f"its model is {document['model']['type']}, not BPE")
    if document["model"].get("byte_fallback"):
        keys = _sentencepiece(document, n_rows)
    else:
        keys = _byte_level(document)
    tokens, types = _tokens(document, n_rows)
    if len(set(tokens)) < len(tokens):
        raise UserError("two tokens of the tokenizer have the same text in GGUF")
    keys |= {"tokens": tokens, "token_type": types, "eos_token_id": tokenizer.eos_id}
    keys |= {"add_bos_token": tokenizer.adds_bos, "add_eos_token": tokenizer.adds_eos}
    if tokenizer.bos_id is not None:
        keys["bos_token_id"] = tokenizer.bos_id
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()} | _stripping(document)


def _unknown(reason: str) -> UserError:
    return UserError(
        f"llama.cpp does not split text like this tokenizer: {reason}; convert with --to hf"
    )


def _tokens(document: _Tokenizer, n_rows: int) -> tuple[list[str], list[int]]:
    """Return the text and type of every row."""
    model = document["model"]
    tokens = [f"[PAD{index}]" for index in range(n_rows)]
    types = [int(TokenType.UNUSED)] * n_rows
    for text, index in model["vocab"].items():
        is_byte = model.get("byte_fallback") and _BYTE.fullmatch(text)
        tokens[index] = text
        types[index] = int(TokenType.BYTE if is_byte else TokenType.NORMAL)
        if text == model.get("unk_token"):
            types[index] = int(TokenType.UNKNOWN)
    for added in document["added_tokens"]:
        index = added["id"]
        tokens[index] = added["content"]
        if types[index] == TokenType.UNKNOWN:
            continue
        if added["special"]:
            types[index] = int(TokenType.CONTROL)
        else:
            types[index] = int(TokenType.USER_DEFINED)
            if model.get("byte_fallback"):
                tokens[index] = tokens[index].replace("▁", " ")  # found in the text as it is
    return tokens, types


def _stripping(document: _Tokenizer) -> dict[str, str]:
    """Return the name of the model that makes llama.cpp strip spaces after special tokens, as
    Phi-3's tokenizer does; the format has no other place for it. Warn of tokens that strip spaces
    in other ways. No other file gets a name, since each that contains this one has the effect."""
    added = document["added_tokens"]
    stripped = {
        token["content"]
        for token in added
        if token["lstrip"] or token["rstrip"] or token["single_word"]
    }
    special = {token["content"] for token in added if token["special"]} | {"</s>"}
    is_phi3 = stripped == special - _KEEP_SPACES and special >= _KEEP_SPACES
    if (
        stripped
        and is_phi3
        and all(token["rstrip"] for token in added if token["content"] in stripped)
    ):
        return {"general.name": "phi-3"}
    if stripped:
        logger.warning(
            "llama.cpp does not strip spaces around added tokens, which the tokenizer does: %s",
            summarize_names(sorted(stripped)),
        )
    return {}


def _byte_level(document: _Tokenizer) -> dict[str, object]:
    """Return the keys of a byte-level BPE."""
    model = document["model"]
    normalizer = document["normalizer"]
    if normalizer is not None:
        if normalizer["type"] != "NFC":
            raise _unknown(f"it normalizes text by {normalizer['type']}")
        logger.warning(
            "llama.cpp does not normalize text to NFC, which the tokenizer does: an accent that "
            "is a character of its own gets other tokens"
        )
    if not model["merges"]:
        raise _unknown("it has no merges")
    rules = _rules(document["pre_tokenizer"])
    if rules in _REFUSED:
        raise _unknown(_REFUSED[rules])
    if rules not in _NAMES:
        raise _unknown(f"its pre-tokenizer is {json.dumps(document['pre_tokenizer'])}")
    names, looks_up = _NAMES[rules], bool(model.get("ignore_merges"))
    if looks_up not in names and not _merges_reach_all(document):
        must = "true" if True in names else "false"
        raise _unknown(f"ignore_merges is not {must}, with the pre-tokenizer {[*names.values()]}")
    return {
        "model": "gpt2",
        "pre": names.get(looks_up) or next(iter(names.values())),
        "merges": [" ".join(pair) for pair in _merges(model)],
    }


def _merges(model: _Model) -> list[tuple[str, str]]:
    return [(left, right) for left, right in model["merges"]]


def _merges_reach_all(document: _Tokenizer) -> bool:
    """Return whether every token is the result of merging its own text, so that looking up whole
    words changes nothing."""
    from tokenizers import Tokenizer, models

    model, added = document["model"], {token["content"] for token in document["added_tokens"]}
    merging = Tokenizer(models.BPE(vocab=model["vocab"], merges=_merges(model)))
    texts = [text for text in model["vocab"] if len(text) > 1 and text not in added]
    return all(len(each.ids) == 1 for each in merging.encode_batch(texts))


def _rules(pre_tokenizer: _Step | None) -> tuple[str, ...]:
    """Return the steps of a pre-tokenizer, in the words of `_NAMES`."""
    parts = [pre_tokenizer or _Step(type="none")]
    if parts[0]["type"] == "Sequence":
        parts = parts[0]["pretokenizers"]
    return tuple(_rule(part) for part in parts)


def _rule(part: _Step) -> str:
    kind = part["type"]
    if kind == "ByteLevel" and not part["add_prefix_space"]:
        return "words of GPT-2" if part.get("use_regex", True) else "bytes"
    if kind == "Digits" and part["individual_digits"]:
        return "single digits"
    if kind == "Split" and part["behavior"] == "Isolated" and not part["invert"]:
        # some files have the characters themselves, for the same regular expression
        pattern = str(part["pattern"].get("Regex"))
        return pattern.replace("\r", r"\r").replace("\n", r"\n")
    return json.dumps(part)


def _sentencepiece(document: _Tokenizer, n_rows: int) -> dict[str, object]:
    """Return the keys of a BPE of SentencePiece: pieces with scores. llama.cpp joins any two
    pieces that are a piece together, the best score first, and reads a score for every row."""
    model = document["model"]
    vocab = model["vocab"]
    missing = [f"<0x{byte:02X}>" for byte in range(256) if f"<0x{byte:02X}>" not in vocab]
    if missing:
        raise _unknown(f"it has no token {missing[0]}")
    scores = [float(-len(model["merges"]))] * n_rows
    ranks: dict[str, list[int]] = {}
    pairs = _merges(model)
    for rank, (left, right) in enumerate(pairs):
        ranks.setdefault(left + right, []).append(rank)
    for text, found in ranks.items():
        if found[-1] - found[0] >= len(found):
            raise _unknown(f"its merges to {text!r} do not follow each other")
        scores[vocab[text]] = float(-found[0])
    added = {each["content"] for each in document["added_tokens"]}
    known = set(pairs)
    for text in vocab.keys() - added:
        for cut in range(1, len(text)):
            pair = (text[:cut], text[cut:])
            if pair[0] in vocab and pair[1] in vocab and pair not in known:
                raise _unknown(f"it does not join {pair[0]!r} and {pair[1]!r}")
    return {
        "model": "llama",
        "pre": "default",
        "scores": scores,
        "add_space_prefix": _adds_space(document),
    }


def _adds_space(document: _Tokenizer) -> bool:
    """Return whether a text gets a space before its first word. Raise `UserError` for a tokenizer
    that changes text in other ways."""
    normalizer, pre_tokenizer = document["normalizer"], document["pre_tokenizer"]
    marks = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    if pre_tokenizer is None or pre_tokenizer["type"] == "Split":
        prepends = {"type": "Prepend", "prepend": "▁"}
        if normalizer == marks:
            return False
        if normalizer == {"type": "Sequence", "normalizers": [prepends, marks]}:
            return True
    if normalizer is None and pre_tokenizer and pre_tokenizer["type"] == "Metaspace":
        if pre_tokenizer["replacement"] == "▁" and not pre_tokenizer["split"]:
            if pre_tokenizer["prepend_scheme"] == "first":
                logger.warning(
                    "llama.cpp puts a space before the text after each special token, the "
                    "tokenizer only before the first text"
                )
            return bool(pre_tokenizer["prepend_scheme"] != "never")
    raise _unknown(f"its normalizer is {json.dumps(normalizer)}")
