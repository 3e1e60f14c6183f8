"""Compatibility with transformers' `AutoTokenizer`: detection of different token ids, and export of
matching files.

torchtitan uses tokenizer.json unchanged. `AutoTokenizer` does so only for some values of
`tokenizer_class`: a class with its own `__init__` reads vocabulary, merges, added tokens and
post-processor from the file, but creates its own normalizer, pre-tokenizer and decoder. It also
ignores `add_bos_token` and `add_eos_token` next to a tokenizer.json. Source: transformers 5.23.0,
tokenization_auto.py, `convert_to_native_format` in tokenization_utils_tokenizers.py,
`_from_pretrained` in tokenization_utils_base.py, and models/*/tokenization_*.py.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan.components.tokenizer.interface import Tokenizer
from torchtitan.components.tokenizer.pretrained import (
    EMBEDDED_TOKENIZER,
    PretrainedTokenizer,
    tokenizer_file,
)
from torchtitan.components.tokenizer.sentencepiece_model import is_sentencepiece
from torchtitan.components.tokenizer.tokenizer_json import suppress_native_errors, wrap_errors
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import read_object, read_regular
from torchtitan.tools.logging import logger

if TYPE_CHECKING:
    import tokenizers
    from tokenizers import normalizers, pre_tokenizers
    from tokenizers.processors import TemplateProcessing

_VERSION = "5.23.0"
"""Version of transformers that these rules follow."""

_GENERIC_CLASS = "PreTrainedTokenizerFast"
"""Class that uses tokenizer.json unchanged, in transformers 4 and 5."""

_GENERIC_MODEL_TYPES = frozenset(
    "glm glm4 glm4_moe gpt_bigcode granite granitemoe granitemoehybrid granitemoeshared internlm2 "
    "internlm3 jamba minicpm3 minimax_m2 ministral ministral3 mistral mistral3 mixtral nemotron "
    "olmo2 olmo3 phi3 phimoe stablelm".split()
)
"""Values of `model_type` in config.json that select the generic class, regardless of
`tokenizer_class`."""

_PADS_LEFT = frozenset(
    {"LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer"}
)
"""Classes that pad on the left by default."""

_CHANGES_IDS = frozenset(
    {"auto_map", "fast_tokenizer_files", "fix_mistral_regex", "split_special_tokens"}
)
"""Keys of tokenizer_config.json that select other code, files or patterns, or disable special
tokens."""

_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def warn_of_different_ids(tokenizer: Tokenizer) -> None:
    """Warn if `AutoTokenizer` returns different token ids for the folder of `tokenizer`, with an
    example. Covers `tokenizer_class` Llama, CodeLlama, Gemma, Qwen2, GPT2, GPTNeoX and Cohere,
    flags of added tokens, BOS and EOS."""
    folder = tokenizer.folder
    if (
        type(tokenizer) is not PretrainedTokenizer
        or folder is None
        or (folder == EMBEDDED_TOKENIZER and not tokenizer.n_added)  # a test compares its ids
        or not (folder / "tokenizer.json").is_file()
    ):
        return
    with wrap_errors(folder / "tokenizer_config.json"):
        name, auto_tokenizer = _open_like_auto_tokenizer(folder)
    for text in _probes(auto_tokenizer):
        with wrap_errors(folder / "tokenizer.json", "cannot encode a text"):
            auto_ids = auto_tokenizer.encode(text).ids
        ids = tokenizer.encode(text, allow_special=True)
        if auto_ids != ids:
            logger.warning(
                f"transformers' AutoTokenizer opens '{folder}' as {name}, with different token ids "
                f"than this run: for {text!r}, it returns {auto_ids} instead of {ids} "
                f"(transformers {_VERSION}). Hugging Face folders saved by this run use the ids of "
                "this run"
            )
            return


def make_loadable_by_auto_tokenizer(folder: Path) -> None:
    """Rewrite the tokenizer files of an exported model so that `AutoTokenizer` returns the same ids
    as torchtitan. Files in other formats get a tokenizer.json next to them; it replaces Llama 3's
    tokenizer.model, which other programs would read as a SentencePiece model. Warn if the tokenizer
    cannot be opened."""
    file = tokenizer_file(folder)
    if file is None:
        return
    try:
        ours: PretrainedTokenizer = PretrainedTokenizer.Config().build(path=folder)
        theirs = ours.as_hugging_face()
    except UserError as error:
        logger.warning(
            f"AutoTokenizer may return other token ids for '{folder}' than torchtitan: {error}"
        )
        return
    has_wrong_ends = theirs.encode("a").ids != ours.encode("a")
    if has_wrong_ends:
        theirs.post_processor = _post_processor(ours, theirs)
    if has_wrong_ends or file.name != "tokenizer.json":
        (folder / "tokenizer.json").write_text(theirs.to_str(pretty=True), encoding="utf-8")
    if file.name == "tokenizer.model" and not is_sentencepiece(file):
        file.unlink()
    settings = read_object(folder / "tokenizer_config.json")
    updated = _new_settings(folder, settings, ours, theirs)
    if updated != settings:
        text = json.dumps(updated, indent=2, ensure_ascii=False) + "\n"
        # JSON allows lone surrogates, which must stay escaped.
        (folder / "tokenizer_config.json").write_text(
            text, encoding="utf-8", errors="backslashreplace"
        )


def _read(path: Path) -> "tokenizers.Tokenizer":
    import tokenizers

    with suppress_native_errors(path):
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _open_like_auto_tokenizer(folder: Path) -> "tuple[str, tokenizers.Tokenizer]":
    """Return the name of the class that `AutoTokenizer` selects for `folder`, and its tokenizer."""
    from tokenizers import AddedToken

    settings = read_object(folder / "tokenizer_config.json")
    config = read_object(folder / "config.json")
    tokenizer = _read(folder / "tokenizer.json")
    model_type = str(config.get("model_type"))
    name = (
        "Qwen2Tokenizer" if model_type == "qwen2" else _class_name(settings) or _class_name(config)
    )
    # AutoTokenizer uses a byte-level tokenizer.json, such as Llama 3's, unchanged even if
    # LlamaTokenizer is declared.
    is_llama3 = name == "LlamaTokenizer" and "ByteLevel(" in repr(tokenizer.pre_tokenizer)
    rebuilt = None if is_llama3 or model_type in _GENERIC_MODEL_TYPES else _parts_of(name, settings)
    if rebuilt:
        tokenizer.normalizer, tokenizer.pre_tokenizer = rebuilt
    tokenizer.encode_special_tokens = bool(settings.get("split_special_tokens"))
    tokenizer.add_tokens(
        [AddedToken(**token) for token in (settings.get("added_tokens_decoder") or {}).values()]
    )
    return name if rebuilt else _GENERIC_CLASS, tokenizer


def _class_name(settings: dict[str, object]) -> str:
    return str(settings.get("tokenizer_class") or "").removesuffix("Fast")


def _parts_of(
    name: str, settings: dict[str, object]
) -> "tuple[normalizers.Normalizer | None, pre_tokenizers.PreTokenizer] | None":
    """Return the normalizer and pre-tokenizer created by the class `name`; None if it uses the
    file's."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    prefix = settings.get("add_prefix_space")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=bool(prefix))
    if name in ("LlamaTokenizer", "CodeLlamaTokenizer"):
        always = name == "LlamaTokenizer" and settings.get("legacy")
        scheme = "always" if always else "first"
        if prefix is False:
            scheme = "never"
        return None, pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    if name == "GemmaTokenizer":
        return normalizers.Replace(" ", "▁"), pre_tokenizers.Split(
            " ", behavior="merged_with_previous"
        )
    if name == "Qwen2Tokenizer":
        split = pre_tokenizers.Split(Regex(_QWEN2_PATTERN), behavior="isolated")
        whole = pre_tokenizers.ByteLevel(add_prefix_space=bool(prefix), use_regex=False)
        return normalizers.NFC(), pre_tokenizers.Sequence([split, whole])
    if name == "CohereTokenizer":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return normalizers.NFC(), pre_tokenizers.Sequence([digits, byte_level])
    if name == "GPTNeoXTokenizer":
        return normalizers.NFC(), byte_level
    return (None, byte_level) if name == "GPT2Tokenizer" else None


def _probes(tokenizer: "tokenizers.Tokenizer") -> Iterator[str]:
    """Yield short texts that are likely to reveal a difference."""
    added = [token.content for _, token in sorted(tokenizer.get_added_tokens_decoder().items())]
    yield from ("a b", " a", "a  b\n\n c", "It's 2024!", "e\u0301\ufb01 한국 🦙")
    yield from (f"a{token}a {token} a" for token in [*added[:8], *added[-8:]])


def _post_processor(ours: PretrainedTokenizer, theirs: Any) -> "TemplateProcessing":
    """Return the post-processor that adds the BOS and EOS of `ours`."""
    from tokenizers.processors import TemplateProcessing

    bos = [theirs.id_to_token(ours.bos_id)] if ours.adds_bos else []
    eos = [theirs.id_to_token(ours.eos_id)] if ours.adds_eos else []
    single = [*bos, "$A", *eos]
    second = [f"{piece}:1" for piece in [*bos, "$B", *eos]]
    special = [(token, theirs.token_to_id(token)) for token in {*bos, *eos}]
    return TemplateProcessing(single=single, pair=[*single, *second], special_tokens=special)


def _new_settings(
    folder: Path,
    settings: dict[str, object],
    ours: PretrainedTokenizer,
    theirs: "tokenizers.Tokenizer",
) -> dict[str, object]:
    """Return a tokenizer_config.json that makes `AutoTokenizer` use tokenizer.json unchanged."""
    # special_tokens_map.json is ignored if there is an `added_tokens_decoder`, written below.
    named = read_object(folder / "special_tokens_map.json")
    updated = {
        key: value for key, value in {**named, **settings}.items() if key not in _CHANGES_IDS
    }
    updated |= {
        key: _text_of(value)
        for key, value in updated.items()
        if key.endswith(("_token", "_special_tokens"))
    }
    template, source = folder / "chat_template.jinja", str(updated.get("chat_template"))
    if template.is_file():
        source = read_regular(template).decode("utf-8", errors="replace")
    eos_id = None if ours.eos_is_guess else ours.eos_id
    for key, token_id in (("bos_token", ours.bos_id), ("eos_token", eos_id)):
        if token_id is not None and key not in source:  # templates omit undefined tokens
            updated.setdefault(key, theirs.id_to_token(token_id))
    if named or "added_tokens_decoder" in updated or (folder / "added_tokens.json").is_file():
        added = sorted(theirs.get_added_tokens_decoder().items())
        flags = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
        updated["added_tokens_decoder"] = {
            str(i): {flag: getattr(token, flag) for flag in flags} for i, token in added
        }
    if updated.get("tokenizer_class") != _GENERIC_CLASS:
        updated["tokenizer_class"] = _GENERIC_CLASS
        updated.setdefault("model_input_names", ["input_ids", "attention_mask"])
        if _class_name(settings) in _PADS_LEFT:
            updated.setdefault("padding_side", "left")
        updated.setdefault("clean_up_tokenization_spaces", False)
    if updated.get("clean_up_tokenization_spaces"):
        updated["clean_up_tokenization_spaces"] = False  # it removes spaces from decoded text
    return updated


def _text_of(token: object) -> object:
    """Return the text of a token (possibly a serialized `AddedToken`), or of all tokens in a
    list."""
    if isinstance(token, list):
        return [_text_of(each) for each in token]
    return token["content"] if isinstance(token, dict) and "content" in token else token
