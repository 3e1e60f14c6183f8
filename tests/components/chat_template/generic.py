"""A generic tokenizer for any template: bytes, and the template's own markup as tokens."""

import json
import re
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import tokenizers

from torchtitan.components.chat_template import BUILT_IN_TEMPLATES, ChatTemplate
from torchtitan.components.tokenizer import PretrainedTokenizer

BOS, EOS = "<s>", "</s>"

_OWN = Path(__file__).parent / "published"

_SPECIAL = re.compile(
    r"<\|[^<>|\s]+\|?>|<[^<>|\s/]+\|>|<｜[^<>\s]+｜>|<SPECIAL_\d+>|<(?:start|end)_of_turn>"
    r"|</assistant>|\[/?[A-Z_]+\]|\]~!b\[|\]~b\]|\[e~\["
)
_TAG = re.compile(r"</?[\w:.-]+>")
_OF_MODELS = {
    "gemma": ("<bos>", "<eos>"),
    "granite": ("<|end_of_text|>", "<|end_of_text|>"),
    "Qwen": ("<|endoftext|>", "<|im_end|>"),
    "TRL's qwen": ("<|endoftext|>", "<|im_end|>"),
    "rwkv": ("", ""),
}
"""BOS and EOS of families whose templates write `eos_token` or other names."""


def markup_of(source: str) -> tuple[list[str], list[str]]:
    """Return the special tokens and the tags in a template's text."""
    text = re.sub(r"\{#.*?#\}", "", source, flags=re.DOTALL)
    special = sorted(
        {token for token in _SPECIAL.findall(text) if "'" not in token and "+" not in token}
    )
    tags = sorted(set(_TAG.findall(text)) - set(special))
    return special, tags


@cache
def generic_tokenizer(source: str, bos: str = BOS, eos: str = EOS) -> PretrainedTokenizer:
    """Return a tokenizer with a token per byte, in which special tokens and tags of a template are
    tokens."""
    special, tags = markup_of(source)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE({byte: i for i, byte in enumerate(alphabet)}, [])
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    names = [token for token in dict.fromkeys([bos, eos, *special]) if token]
    backend.add_special_tokens(
        [tokenizers.AddedToken(token, normalized=False, special=True) for token in names]
    )
    backend.add_tokens(
        [tokenizers.AddedToken(tag, normalized=False, special=False) for tag in tags]
    )
    folder = Path(mkdtemp())
    backend.save(str(folder / "tokenizer.json"))
    declared = {"bos_token": bos, "eos_token": eos}
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
    }
    settings |= {name: token for name, token in declared.items() if token}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return PretrainedTokenizer.Config().build(path=folder)


TRL = "TRL's "
"""Beginning of the names of published templates that TRL contains."""


def published(name: str, folder: Path) -> tuple[ChatTemplate, PretrainedTokenizer]:
    """Return a published template, or a built-in one, and a tokenizer with its tokens."""
    if name.startswith(TRL):
        source = trl_template(name)
        assert source is not None
        return with_source(name, source)
    file = next(
        (file for file in (_OWN / f"{name}.jinja", folder / f"{name}.jinja") if file.is_file()),
        None,
    )
    if file is None and name not in BUILT_IN_TEMPLATES:
        pytest.skip(f"{folder} has no {name}.jinja")
    return with_source(name, file.read_text() if file else BUILT_IN_TEMPLATES[name])


def trl_template(name: str, kind: str = "chat_template") -> str | None:
    """Return a model's template by TRL, as published or marked for training; None if TRL has
    none."""
    utils = pytest.importorskip("trl.chat_template_utils")
    source = getattr(utils, f"{name.removeprefix(TRL)}_{kind}", None)
    assert source is None or isinstance(source, str)
    return source


def with_source(name: str, source: str) -> tuple[ChatTemplate, PretrainedTokenizer]:
    """Return a template with a name, and a tokenizer with its tokens."""
    known = [tokens for part, tokens in _OF_MODELS.items() if part in name]
    bos, eos = known[0] if known else (BOS, EOS)
    template = ChatTemplate(source, {"bos_token": bos, "eos_token": eos}, name=name, of_model=True)
    return template, generic_tokenizer(source, bos, eos)
