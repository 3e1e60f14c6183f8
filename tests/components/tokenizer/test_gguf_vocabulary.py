"""Tokenizers in GGUF: names of pre-tokenizers, scores, types of tokens, and what is refused; tokens
equal to llama.cpp's where `llama_cpp` is installed."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from torchtitan.cli.main import main
from torchtitan.components.tokenizer import EMBEDDED_TOKENIZER, PretrainedTokenizer
from torchtitan.components.tokenizer.gguf_vocabulary import TokenType, gguf_vocabulary
from torchtitan.components.tokenizer.training import train_tokenizer
from torchtitan.tools.errors import UserError

ASSETS = Path(os.environ.get("TORCHTITAN_TEST_ASSETS", "../shared/assets"))

ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {
    "dbrx": ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + BLANKS,
    "qwen2": ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + BLANKS,
    "tekken": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|" + BLANKS,
    "gpt-4o": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    rf"{ENDINGS}?|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+"
    rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{ENDINGS}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|"
    + BLANKS,
    "exaone-moe": ENDINGS + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    # with the characters themselves for \r and \n, as in published files
    "deepseek-v3": r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^"""
    "\r\n"
    r"\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+["
    "\r\n]*|"
    r"\s*["
    "\r\n"
    r"]+|\s+(?!\S)|\s+",
}
"""Name in llama.cpp → the pattern of published files, as in the comments of its llama-vocab.cpp."""

KIMI = (
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]+{ENDINGS}?|[^\r\n\p{{L}}\p{{N}}]?"
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    rf"{ENDINGS}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|" + BLANKS
)
"""The pattern in the code of Kimi K2 and Kimi Linear."""

BEFORE = {"deepseek-v3": [r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+"]}
"""Name → patterns of steps before."""

TEXTS = [
    "Hello world. It's 2024, I'M 12345678 years!!!\n\n\tfoo",
    " Hello  world\n\n x",
    "한국어 テスト 中文 naïve café 🦙🦙\r\nb  ",
    "HTTPServer don'T we'LL ```py\ndef f(x):\n    return x\n``` path/to//file",
]


def trained(folder: Path, **changes: Any) -> PretrainedTokenizer:
    """Save a tokenizer trained on `TEXTS`, with `changes` of tokenizer.json."""
    document = json.loads(train_tokenizer(TEXTS, 300).to_str())
    for key, value in changes.items():
        outer, _, inner = key.partition("__")
        if inner:
            document[outer][inner] = value
        else:
            document[outer] = value
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(document))
    return PretrainedTokenizer.Config().build(path=folder)


def split_by(*patterns: str) -> dict[str, Any]:
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    splits = [{**split, "pattern": {"Regex": pattern}} for pattern in patterns]
    whole = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [*splits, {"type": "ByteLevel", **whole}]}


def published(name: str) -> dict[str, Any]:
    return split_by(*BEFORE.get(name, []), PATTERNS[name])


@pytest.mark.parametrize("name", PATTERNS)
def test_names_of_published_patterns(name, tmp_path):
    looks_up = name == "tekken"
    pre_tokenizer = published(name)
    tokenizer = trained(tmp_path, pre_tokenizer=pre_tokenizer, model__ignore_merges=looks_up)
    assert gguf_vocabulary(tokenizer, 300)["tokenizer.ggml.pre"] == name


def test_rules_of_kimi_are_refused_by_name(tmp_path):
    """llama.cpp 0.3.36's kimi-k2 gave other tokens for 656 of 3000 random texts of letters, digits,
    signs and Chinese, and its other rules for none."""
    tokenizer = trained(tmp_path, pre_tokenizer=split_by(KIMI))
    with pytest.raises(UserError, match="is Kimi's, and llama.cpp's kimi-k2 splits words with"):
        gguf_vocabulary(tokenizer, 300)


def test_whole_words_are_part_of_the_name(tmp_path):
    looks_up = trained(tmp_path / "1", model__ignore_merges=True)
    assert gguf_vocabulary(looks_up, 300)["tokenizer.ggml.pre"] == "llama-bpe"
    # Qwen2's rules never look up: right only if merging gives the same.
    qwen2 = split_by(PATTERNS["qwen2"])
    same = trained(tmp_path / "2", model__ignore_merges=True, pre_tokenizer=qwen2)
    assert gguf_vocabulary(same, 300)["tokenizer.ggml.pre"] == "qwen2"
    merges = json.loads((tmp_path / "2" / "tokenizer.json").read_text())["model"]["merges"]
    other = trained(
        tmp_path / "3", model__ignore_merges=True, pre_tokenizer=qwen2, model__merges=merges[:-1]
    )
    with pytest.raises(UserError, match="ignore_merges is not false"):
        gguf_vocabulary(other, 300)


def test_tokens_of_all_rows():
    tokenizer = PretrainedTokenizer.Config().build(path=EMBEDDED_TOKENIZER)
    keys = gguf_vocabulary(tokenizer, 2050)
    tokens, types = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    assert len(tokens) == len(types) == len(set(tokens)) == 2050
    assert tokens[0] == "<|begin_of_text|>" and types[0] == TokenType.CONTROL
    assert types[2048:] == [TokenType.UNUSED] * 2
    assert all(tokenizer.id_of(token) == index for index, token in enumerate(tokens[:2048]))
    assert keys["tokenizer.ggml.bos_token_id"] == tokenizer.bos_id
    assert keys["tokenizer.ggml.eos_token_id"] == tokenizer.eos_id
    assert keys["tokenizer.ggml.add_bos_token"] is tokenizer.adds_bos
    assert "general.name" not in keys
    with pytest.raises(UserError, match="2048 tokens, but the model only 2000"):
        gguf_vocabulary(tokenizer, 2000)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"pre_tokenizer": split_by(r"\w+")}, "its pre-tokenizer is"),
        ({"normalizer": {"type": "Lowercase"}}, "it normalizes text by Lowercase"),
        ({"model__byte_fallback": True}, "it has no token <0x00>"),
        ({"model__merges": []}, "it has no merges"),
    ],
    ids=["pattern", "normalizer", "bytes", "merges"],
)
def test_unknown_rules_are_refused(changes, message, tmp_path):
    with pytest.raises(UserError, match=message):
        gguf_vocabulary(trained(tmp_path, **changes), 300)


def pieces(folder: Path, merges: list[str]) -> PretrainedTokenizer:
    """Save a SentencePiece-like tokenizer of a few letters."""
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abc"]
    texts += list(dict.fromkeys(merge.replace(" ", "") for merge in merges))
    document = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": texts[i], "special": True, "normalized": False}
            | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
            for i in range(3)
        ],
        "pre_tokenizer": {
            "type": "Metaspace",
            "replacement": "▁",
            "prepend_scheme": "always",
            "split": False,
        },
        "decoder": {"type": "ByteFallback"},
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "byte_fallback": True,
            "vocab": {text: index for index, text in enumerate(texts)},
            "merges": merges,
        },
    }
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(document))
    return PretrainedTokenizer.Config().build(path=folder)


def test_pieces_have_scores_by_rank(tmp_path):
    tokenizer = pieces(tmp_path, ["a b", "▁ ab", "b c"])
    keys = gguf_vocabulary(tokenizer, 300)
    tokens, types = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    scores = dict(zip(tokens, keys["tokenizer.ggml.scores"], strict=True))
    assert (keys["tokenizer.ggml.model"], keys["tokenizer.ggml.pre"]) == ("llama", "default")
    assert scores["ab"] > scores["▁ab"] > scores["bc"] > scores["a"] == scores["[PAD299]"]
    assert types[tokens.index("<0x41>")] == TokenType.BYTE
    assert types[:3] == [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    assert keys["tokenizer.ggml.add_space_prefix"] is True


def test_pieces_that_llama_cpp_would_join_are_refused(tmp_path):
    # "▁a" + "b" is a token too, but the tokenizer never joins these two.
    with pytest.raises(UserError, match="does not join '▁a' and 'b'"):
        gguf_vocabulary(pieces(tmp_path, ["a b", "▁ a", "▁ ab"]), 300)
    with pytest.raises(UserError, match="merges to '▁ab' do not follow each other"):
        gguf_vocabulary(pieces(tmp_path, ["▁ a", "▁a b", "a b", "▁ ab"]), 300)


def test_spaces_after_special_tokens_of_phi3(tmp_path):
    names = ["<unk>", "<s>", "</s>", "<|endoftext|>", "<|user|>"]
    strips = {"</s>", "<|user|>"}
    added = [
        {"id": 300 + i, "content": name, "special": True, "normalized": False}
        | {"single_word": False, "lstrip": False, "rstrip": name in strips}
        for i, name in enumerate(names)
    ]
    document = json.loads(train_tokenizer(TEXTS, 300).to_str())
    own = [{**token, "rstrip": True} for token in document["added_tokens"]]
    tokenizer = trained(tmp_path, added_tokens=[*own, *added])
    assert gguf_vocabulary(tokenizer, 320)["general.name"] == "phi-3"


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [*PATTERNS, "embedded", "gpt2-tokenizer", "llama3-tokenizer", "mistral-v0.3-tokenizer"],
)
def test_llama_cpp_gives_equal_tokens(source, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    from tests.pretrained import make_pretrained

    folder = tmp_path / "hf"
    if source in PATTERNS:
        looks_up = source == "tekken"
        pre_tokenizer = published(source)
        trained(folder, pre_tokenizer=pre_tokenizer, model__ignore_merges=looks_up)
    else:
        of = EMBEDDED_TOKENIZER if source == "embedded" else ASSETS / source
        if not of.is_dir():
            pytest.skip(f"{of} is missing")
        folder.mkdir()
        for file in of.glob("*token*"):
            (folder / file.name).write_bytes(file.read_bytes())
    tokenizer = PretrainedTokenizer.Config().build(path=folder)
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    make_pretrained(folder, vocab_size=tokenizer.vocab_size, **ids)
    assert main(["convert", "--to", "gguf", str(folder), str(tmp_path / "out")]) == 0
    model = llama_cpp.Llama(str(tmp_path / "out" / "model.gguf"), vocab_only=True, verbose=False)
    for text in TEXTS:
        if source.startswith("mistral"):
            text = text.strip()  # llama.cpp adds a space to a text that starts with one
        ours = tokenizer.encode(text, allow_special=True)
        assert model.tokenize(text.encode(), special=True) == ours, text
