"""SentencePiece models, tekken.json and files of ranks against the libraries that define their
ids."""

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import mistral_common
import pytest
import sentencepiece
import tiktoken
import transformers
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

from tests.components.tokenizer.helpers import load_tokenizer, write_sentencepiece, write_tekken
from tests.components.tokenizer.test_tokenizer import EXTREMES, LOOKS_SPECIAL, SCRIPTS
from tests.conftest import PROJECT
from torchtitan.components.tokenizer import probes, sentencepiece_model, tiktoken_model
from torchtitan.components.tokenizer.auto_tokenizer import make_loadable_by_auto_tokenizer
from torchtitan.tools.errors import UserError

PUBLISHED = Path(mistral_common.__file__).parent / "data"
"""Mistral's tokenizers, which the package mistral-common contains."""

SPACES = [" hi", "hi", "  hi", "hi ", "a" + " " * 9 + "b", "\u2581x", " [INST] a[/INST]"]
TEXTS = [*SCRIPTS, *EXTREMES, *LOOKS_SPECIAL, *SPACES]
KIMI_LIKE = (
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}&&[^\p{Han}]]+(?i:'s|'t)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set an empty cache folder, so that each test converts."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("TORCHTITAN_CACHE", str(folder))
    return folder


def sentences() -> list[str]:
    source = (PROJECT / "scripts/train_tokenizer.py").read_text(encoding="utf-8")
    return [*source.splitlines(), *SCRIPTS] * 3


def pieces_folder(
    folder: Path, **options: Any
) -> tuple[Path, sentencepiece.SentencePieceProcessor]:
    folder.mkdir(exist_ok=True)
    write_sentencepiece(folder / "tokenizer.model", sentences(), **options)
    return folder, sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


def ranks() -> list[bytes]:
    merged = [
        b"th",
        b"he",
        b"the",
        b" the",
        b"  ",
        b"    ",
        b"in",
        b"ing",
        b"12",
        b"123",
        "你好".encode(),
    ]
    return [*(bytes([byte]) for byte in range(256)), *merged]


def write_ranks(path: Path) -> None:
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(ranks())]
    path.write_bytes(b"".join(lines))


# SentencePiece.


@pytest.mark.parametrize(
    "version", ["tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3"]
)
def test_published_sentencepiece_model(version: str, tmp_path: Path) -> None:
    shutil.copy(PUBLISHED / version, tmp_path / "tokenizer.model")
    reference = sentencepiece.SentencePieceProcessor(model_file=str(PUBLISHED / version))
    ours = load_tokenizer(tmp_path)
    assert (ours.vocab_size, ours.bos_id, ours.eos_id, ours.adds_bos) == (
        len(reference),
        1,
        2,
        True,
    )
    assert ours.encode_batch(TEXTS, add_bos=False) == reference.encode(TEXTS)
    for ids in reference.encode(TEXTS):
        assert ours.decode(ids) == reference.decode(ids)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_dummy_prefix": False},
        {"remove_extra_whitespaces": True},
        {"byte_fallback": False},
        {"split_digits": True, "allow_whitespace_only_pieces": True},
        {"user_defined_symbols": ["<start>", "▁▁▁▁", "\n\n"], "add_dummy_prefix": False},
        {"user_defined_symbols": ["<start>"]},
        {"control_symbols": ["<tool>"]},
        {"bos_id": -1},
    ],
    ids=str,
)
def test_sentencepiece_model_equals_the_library(options: dict[str, Any], tmp_path: Path) -> None:
    folder, reference = pieces_folder(tmp_path, **options)
    ours = load_tokenizer(folder)
    texts = [*TEXTS, "a<start>b <start> c", "x\n\ny    z", "a<tool>b"]
    assert ours.encode_batch(texts, add_bos=False) == reference.encode(texts)
    assert ours.adds_bos == (options.get("bos_id") != -1)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"model_type": "unigram"}, "another algorithm than BPE"),
        ({"model_type": "word"}, "another algorithm than BPE"),
        ({"normalization_rule_name": "nmt_nfkc"}, "the normalization rules nmt_nfkc"),
        ({"treat_whitespace_as_suffix": True}, "treat_whitespace_as_suffix"),
    ],
)
def test_sentencepiece_model_of_another_kind_is_refused(
    options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    pieces_folder(tmp_path, **{"byte_fallback": False, **options})
    with pytest.raises(
        UserError, match=f"SentencePiece model with {reason}.*use the model's tokenizer.json"
    ):
        load_tokenizer(tmp_path)


def test_conversions_are_kept_and_checked(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second start reads the cache; a damaged file, and another model or setting, are converted
    again."""
    folder, reference = pieces_folder(tmp_path)
    converted = []
    original = sentencepiece_model._converted
    monkeypatch.setattr(
        sentencepiece_model, "_converted", lambda *args: converted.append(1) or original(*args)
    )
    text = "hi  there, 12345 größer"

    def n_conversions() -> int:
        assert load_tokenizer(folder).encode(text, add_bos=False) == reference.encode(text)
        return len(converted)

    assert [n_conversions(), n_conversions()] == [1, 1]
    [file] = (cache / "tokenizers").iterdir()
    content = file.read_bytes()
    for damaged in (content[:-1], content.replace(b'"BPE"', b'"BPX"'), b"", content[:32]):
        file.write_bytes(damaged)
        before = len(converted)
        assert n_conversions() == before + 1 and file.read_bytes() == content
    (folder / "tokenizer_config.json").write_text(json.dumps({"legacy": False}))
    n_before = len(converted)
    assert n_conversions() == n_before + 1 and len([*file.parent.iterdir()]) == 2
    # Another version of the code.
    for number, module in enumerate((sentencepiece_model, probes, tiktoken_model)):
        changed = tmp_path / f"{module.__name__}.py"
        changed.write_text(f"{Path(module.__file__).read_text()}# changed")
        monkeypatch.setattr(module, "__file__", str(changed))
        assert n_conversions() == n_before + 2 + number


def test_conversions_without_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """A cache folder that cannot be written costs time only."""
    folder, reference = pieces_folder(tmp_path)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHTITAN_CACHE", str(tmp_path / "file"))
    with caplog.at_level("WARNING", "torchtitan"):
        assert load_tokenizer(folder).encode("hi", add_bos=False) == reference.encode("hi")
    assert "each start converts it again" in caplog.text


def test_damaged_sentencepiece_model(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x0e")
    with pytest.raises(UserError, match="is not a valid SentencePiece model"):
        load_tokenizer(tmp_path)


def test_text_after_a_special_token(tmp_path: Path) -> None:
    """Text after a special token begins like a text of its own, unless `legacy` is false."""
    folder, reference = pieces_folder(tmp_path)
    eos = reference.eos_id()
    separate = [*reference.encode("hi"), eos, *reference.encode("there")]
    assert (
        load_tokenizer(folder).encode("hi</s>there", add_bos=False, allow_special=True) == separate
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"legacy": False}))
    ids = load_tokenizer(folder).encode("hi</s>there", add_bos=False, allow_special=True)
    assert ids[ids.index(eos) + 1 :] != reference.encode("there")


def test_declared_tokens_are_added(tmp_path: Path) -> None:
    folder, reference = pieces_folder(tmp_path)
    n = len(reference)
    decoder = {
        str(n): {"content": "<|im_end|>", "special": True},
        str(n + 1): {"content": "<think>", "special": False},
    }
    settings = {"added_tokens_decoder": decoder, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    ours = load_tokenizer(folder)
    assert (ours.vocab_size, ours.eos_id, ours.id_of("<think>")) == (n + 2, n, n + 1)
    assert n in ours.special_ids and n + 1 not in ours.special_ids
    assert ours.encode("a<think>b", add_bos=False)[-2:].count(n + 1) == 1
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": {str(n + 7): {"content": "<x>"}}})
    )
    with pytest.raises(UserError, match=rf"declares the added token '<x>' with id {n + 7}"):
        load_tokenizer(folder)


def test_without_the_library_the_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = pieces_folder(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "sentencepiece", None)
    with pytest.raises(
        UserError,
        match=r"needs the package sentencepiece \(pip install 'torchtitan\[sentencepiece\]'",
    ):
        load_tokenizer(folder)


# tekken.json.


def test_published_tekken_equals_mistral_common(tmp_path: Path) -> None:
    shutil.copy(PUBLISHED / "tekken_240718.json", tmp_path / "tekken.json")
    reference = Tekkenizer.from_file(PUBLISHED / "tekken_240718.json")
    ours = load_tokenizer(tmp_path)
    assert (
        ours.vocab_size == reference.n_words
        and ours.bos_id == reference.bos_id
        and ours.eos_id == reference.eos_id
    )
    for text in TEXTS:
        assert ours.encode(text) == reference.encode(text, bos=True, eos=False)
    for token_id in range(1000):
        assert ours.decode([token_id]) == reference.id_to_piece(token_id)
        assert ours.decode([token_id], skip_special_tokens=True) == ""


def test_small_tekken_lists_its_special_tokens(tmp_path: Path) -> None:
    write_tekken(tmp_path / "tekken.json", ranks())
    ours = load_tokenizer(tmp_path)
    assert ours.encode("[INST] the[/INST]", allow_special=True) == [
        1,
        3,
        10 + ranks().index(b" the"),
        4,
    ]
    assert ours.id_of("<SPECIAL_9>") == 9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab": []}, "is incomplete"),
        ({"vocab": [{"rank": 0}]}, "is not a tekken.json"),
        ({"config": {}}, "is not a tekken.json"),
        ({"special_tokens": None}, "has version v11 and no special_tokens"),
        ({"special_tokens": [{"rank": 1, "token_str": "x"}]}, "or none called <s>"),
    ],
)
def test_damaged_tekken(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_tekken(tmp_path / "tekken.json", ranks(), **changes)
    with pytest.raises(UserError, match=message):
        load_tokenizer(tmp_path)


# Ranks in tiktoken's format.


@pytest.mark.parametrize("name", ["tokenizer.model", "tiktoken.model", "qwen.tiktoken"])
def test_ranks_of_another_model_need_the_pattern(name: str, tmp_path: Path) -> None:
    write_ranks(tmp_path / name)
    with pytest.raises(
        UserError, match=r"267 ranks .* which are not Llama 3's.*--tokenizer.split_pattern"
    ):
        load_tokenizer(tmp_path)
    n = len(ranks())
    special = {"<|end|>": n + 5, "[BOS]": n}
    decoder = {
        str(token_id): {"content": text, "special": True} for text, token_id in special.items()
    }
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": decoder, "bos_token": "[BOS]"})
    )
    ours = load_tokenizer(tmp_path, split_pattern=KIMI_LIKE)
    reference = tiktoken.Encoding(
        "reference",
        pat_str=KIMI_LIKE,
        mergeable_ranks={token: rank for rank, token in enumerate(ranks())},
        special_tokens=special,
    )
    assert ours.encode_batch(TEXTS, add_bos=False) == [
        reference.encode_ordinary(text) for text in TEXTS
    ]
    text = "the<|end|>你好 the"
    assert ours.encode(text, add_bos=False, allow_special=True) == reference.encode(
        text, allowed_special="all"
    )
    assert (ours.bos_id, ours.vocab_size) == (n, n + 6)
    # Checkpoints contain a tokenizer.json, which needs no pattern.
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved/tokenizer.json").write_bytes(ours.changed_files["tokenizer.json"])
    assert load_tokenizer(tmp_path / "saved").encode_batch(TEXTS) == ours.encode_batch(
        TEXTS, add_bos=False
    )


def test_a_part_of_llama3s_ranks_is_not_llama3(tmp_path: Path, assets: Path) -> None:
    lines = (assets / "llama3-tokenizer/tokenizer.model").read_bytes().splitlines(keepends=True)
    (tmp_path / "tokenizer.model").write_bytes(b"".join(lines[:100_000]))
    with pytest.raises(
        UserError, match="has 100,000 ranks in tiktoken's format, which are not Llama 3's"
    ):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("pattern", ["(", r"\S+"])
def test_wrong_pattern(pattern: str, tmp_path: Path) -> None:
    write_ranks(tmp_path / "tokenizer.model")
    with pytest.raises(UserError, match="pattern|cannot be converted|not valid"):
        load_tokenizer(tmp_path, split_pattern=pattern)


def test_pattern_for_another_format(tmp_path: Path) -> None:
    write_tekken(tmp_path / "tekken.json", ranks())
    with pytest.raises(
        UserError, match="--tokenizer.split_pattern applies to files in tiktoken's format"
    ):
        load_tokenizer(tmp_path, split_pattern=r"\S+|\s+")


# Exports.


@pytest.mark.parametrize("kind", ["pieces", "tekken"])
def test_exports_open_with_the_same_ids(kind: str, tmp_path: Path) -> None:
    if kind == "pieces":
        pieces_folder(tmp_path)
    else:
        write_tekken(tmp_path / "tekken.json", ranks())
    ours = load_tokenizer(tmp_path)
    expected = ours.encode_batch(TEXTS)
    make_loadable_by_auto_tokenizer(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs(TEXTS, split_special_tokens=True)["input_ids"] == expected
    assert load_tokenizer(tmp_path).encode_batch(TEXTS) == expected


def test_guessed_eos_is_not_exported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of several stop tokens without a usual name, the export names none as EOS."""
    write_tekken(tmp_path / "tekken.json", ranks())
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert load_tokenizer(tmp_path).eos_id == 3
    assert "has the tokens '[INST]', '[/INST]' as eos_token_id" in caplog.text
    make_loadable_by_auto_tokenizer(tmp_path)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path).eos_token is None
