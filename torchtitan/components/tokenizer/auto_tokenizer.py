"""The rules by which transformers' `AutoTokenizer` opens a folder, and the files with which it gives our token ids.

We encode with tokenizer.json unchanged. `AutoTokenizer` does so only for some values of `tokenizer_class`: a class with
its own `__init__` takes vocabulary, merges, added tokens and post-processor from the file, and builds its own
normalizer, pre-tokenizer and decoder. It also ignores `add_bos_token` and `add_eos_token` next to a tokenizer.json.
Source: transformers 5.23.0, tokenization_auto.py, `convert_to_native_format` in tokenization_utils_tokenizers.py,
`_from_pretrained` in tokenization_utils_base.py, and models/*/tokenization_*.py.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchtitan.components.tokenizer.interface import Tokenizer
from torchtitan.components.tokenizer.pretrained import PretrainedTokenizer
from torchtitan.components.tokenizer.tiktoken_model import converted_tiktoken
from torchtitan.components.tokenizer.tokenizer_json import naming, reading
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import read_object
from torchtitan.tools.logging import logger

_VERSION = "5.23.0"
"""Version of transformers with these rules."""

_GENERIC_CLASS = "PreTrainedTokenizerFast"
"""Uses tokenizer.json unchanged, in transformers 4 and 5."""

_GENERIC_MODEL_TYPES = frozenset(
    "glm glm4 glm4_moe gpt_bigcode granite granitemoe granitemoehybrid granitemoeshared internlm2 internlm3 jamba "
    "minicpm3 minimax_m2 ministral ministral3 mistral mistral3 mixtral nemotron olmo2 olmo3 phi3 phimoe "
    "stablelm".split()
)
"""Values of `model_type` in config.json that select the generic class, regardless of `tokenizer_class`."""

_PADS_LEFT = frozenset({"LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer"})
"""Classes that pad on the left by default."""

_CHANGES_IDS = frozenset({"auto_map", "fast_tokenizer_files", "fix_mistral_regex", "split_special_tokens"})
"""Keys of tokenizer_config.json that select other code, files or patterns, or turn special tokens into text."""

_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def warn_of_other_ids(tokenizer: Tokenizer) -> None:
    """Warn if `AutoTokenizer` gives other token ids for the folder of `tokenizer`, with an example. Covers
    `tokenizer_class` Llama, CodeLlama, Gemma, Qwen2, GPT2, GPTNeoX and Cohere, flags of added tokens, BOS and EOS."""
    folder = tokenizer.folder
    if type(tokenizer) is not PretrainedTokenizer or folder is None or not (folder / "tokenizer.json").is_file():
        return
    with naming(folder / "tokenizer_config.json"):
        name, theirs = _as_opened(folder)
    for text in _probes(theirs):
        with naming(folder / "tokenizer.json", "cannot encode a text"):
            there = theirs.encode(text).ids
        here = tokenizer.encode(text, allow_special=True)
        if there != here:
            logger.warning(
                f"transformers' AutoTokenizer opens '{folder}' as {name} and gives other token ids than this run "
                f"trains on: {there} for {text!r}, here {here} (rules of transformers {_VERSION}). The Hugging Face "
                "folders that this run saves open with the ids that it trains on"
            )
            return


def make_loadable_by_auto_tokenizer(folder: Path) -> None:
    """Rewrite an exported model's tokenizer files so that `AutoTokenizer` gives our token ids; a tokenizer.model in
    tiktoken format becomes tokenizer.json. Skip tokenizers that we cannot read, such as SentencePiece models."""
    try:
        ours: PretrainedTokenizer = PretrainedTokenizer.Config().build(path=folder)
    except UserError:
        return
    path, tiktoken = folder / "tokenizer.json", folder / "tokenizer.model"
    is_tiktoken = not path.is_file()
    theirs = converted_tiktoken(tiktoken) if is_tiktoken else _read(path)
    adds_others = theirs.encode("a").ids != ours.encode("a")
    if adds_others:
        theirs.post_processor = _post_processor(ours, theirs)
    if is_tiktoken or adds_others:
        path.write_text(theirs.to_str(pretty=True), encoding="utf-8")
    if is_tiktoken:
        tiktoken.unlink()
    settings = read_object(folder / "tokenizer_config.json")
    settled = _settled(folder, settings, ours, theirs)
    if settled != settings:
        text = json.dumps(settled, indent=2, ensure_ascii=False) + "\n"
        # A lone surrogate, which JSON allows, stays an escape.
        (folder / "tokenizer_config.json").write_text(text, encoding="utf-8", errors="backslashreplace")


def _read(path: Path) -> Any:
    import tokenizers

    with reading(path):
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _as_opened(folder: Path) -> tuple[str, Any]:
    """Return the class that `AutoTokenizer` chooses for `folder`, and the tokenizer that it builds."""
    from tokenizers import AddedToken

    settings, config = read_object(folder / "tokenizer_config.json"), read_object(folder / "config.json")
    tokenizer = _read(folder / "tokenizer.json")
    model_type = str(config.get("model_type"))
    name = "Qwen2Tokenizer" if model_type == "qwen2" else _class_name(settings) or _class_name(config)
    # AutoTokenizer uses a byte-level tokenizer.json, such as Llama 3's, unchanged even if LlamaTokenizer is declared.
    is_llama3 = name == "LlamaTokenizer" and "ByteLevel(" in repr(tokenizer.pre_tokenizer)
    rebuilt = None if is_llama3 or model_type in _GENERIC_MODEL_TYPES else _parts_of(name, settings)
    if rebuilt:
        tokenizer.normalizer, tokenizer.pre_tokenizer = rebuilt
    tokenizer.encode_special_tokens = bool(settings.get("split_special_tokens"))
    tokenizer.add_tokens([AddedToken(**token) for token in (settings.get("added_tokens_decoder") or {}).values()])
    return name if rebuilt else _GENERIC_CLASS, tokenizer


def _class_name(settings: dict[str, Any]) -> str:
    return str(settings.get("tokenizer_class") or "").removesuffix("Fast")


def _parts_of(name: str, settings: dict[str, Any]) -> tuple[Any, Any] | None:
    """Return the normalizer and pre-tokenizer that the class `name` builds; None if it uses the file's."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    prefix = settings.get("add_prefix_space")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=bool(prefix))
    if name in ("LlamaTokenizer", "CodeLlamaTokenizer"):
        always = name == "LlamaTokenizer" and settings.get("legacy")
        scheme = "never" if prefix is False else "always" if always else "first"
        return None, pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    if name == "GemmaTokenizer":
        return normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", behavior="merged_with_previous")
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


def _probes(tokenizer: Any) -> Iterator[str]:
    """Yield short texts that are likely to show a difference."""
    added = [token.content for _, token in sorted(tokenizer.get_added_tokens_decoder().items())]
    yield from ("a b", " a", "a  b\n\n c", "It's 2024!", "e\u0301\ufb01 한국 🦙")
    yield from (f"a{token}a {token} a" for token in [*added[:8], *added[-8:]])


def _post_processor(ours: PretrainedTokenizer, theirs: Any) -> Any:
    """Return the post-processor that adds the BOS and EOS of `ours`."""
    from tokenizers.processors import TemplateProcessing

    bos = [theirs.id_to_token(ours.bos_id)] if ours.adds_bos else []
    eos = [theirs.id_to_token(ours.eos_id)] if ours.adds_eos else []
    single = [*bos, "$A", *eos]
    second = [f"{piece}:1" for piece in [*bos, "$B", *eos]]
    special = [(token, theirs.token_to_id(token)) for token in {*bos, *eos}]
    return TemplateProcessing(single=single, pair=[*single, *second], special_tokens=special)


def _settled(folder: Path, settings: dict[str, Any], ours: PretrainedTokenizer, theirs: Any) -> dict[str, Any]:
    """Return a tokenizer_config.json with which `AutoTokenizer` uses `theirs`, the tokenizer.json's."""
    # special_tokens_map.json is ignored if there is an `added_tokens_decoder`, written below.
    named = read_object(folder / "special_tokens_map.json")
    settled = {key: value for key, value in {**named, **settings}.items() if key not in _CHANGES_IDS}
    settled |= {key: _text_of(value) for key, value in settled.items() if key.endswith(("_token", "_special_tokens"))}
    template, source = folder / "chat_template.jinja", str(settled.get("chat_template"))
    if template.is_file():
        source = template.read_text(encoding="utf-8", errors="replace")
    for key, token_id in (("bos_token", ours.bos_id), ("eos_token", ours.eos_id)):
        if token_id is not None and key not in source:  # a template writes nothing for a token without a name
            settled.setdefault(key, theirs.id_to_token(token_id))
    if named or "added_tokens_decoder" in settled or (folder / "added_tokens.json").is_file():
        added = sorted(theirs.get_added_tokens_decoder().items())
        flags = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
        settled["added_tokens_decoder"] = {str(i): {flag: getattr(token, flag) for flag in flags} for i, token in added}
    if settled.get("tokenizer_class") != _GENERIC_CLASS:
        settled["tokenizer_class"] = _GENERIC_CLASS
        settled.setdefault("model_input_names", ["input_ids", "attention_mask"])
        if _class_name(settings) in _PADS_LEFT:
            settled.setdefault("padding_side", "left")
        settled.setdefault("clean_up_tokenization_spaces", False)
    if settled.get("clean_up_tokenization_spaces"):
        settled["clean_up_tokenization_spaces"] = False  # it takes blanks out of decoded text
    return settled


def _text_of(token: Any) -> Any:
    """Return the text of a token, or of each in a list; a token may be a serialized `AddedToken` with its `content`."""
    if isinstance(token, list):
        return [_text_of(each) for each in token]
    return token["content"] if isinstance(token, dict) and "content" in token else token
