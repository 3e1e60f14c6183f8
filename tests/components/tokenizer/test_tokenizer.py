"""`PretrainedTokenizer` against transformers on real text; BOS and EOS; invalid files;
subclasses."""

import importlib.util
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from tests.components.tokenizer.helpers import load_tokenizer
from tests.conftest import PROJECT
from torchtitan.components.tokenizer import EMBEDDED_TOKENIZER, PretrainedTokenizer, Tokenizer
from torchtitan.tools.errors import UserError

HUGGING_FACE = ["gpt2-tokenizer", "mistral-v0.3-tokenizer", "stories260K/hf-converted", "embedded"]

SCRIPTS = [
    "This is a test sentence.",
    "Größere Übungen über naïve Fälle, señor: l'été à Łódź.",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "نص حكيم له سر قاطع وذو شأن عظيم مكتوب على ثوب أخضر.",
    "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता प्राप्त है।",
    "我能吞下玻璃而不伤身体。四五六、七八九!",
    "私はガラスを食べられます。それは私を傷つけません。",
    "👩‍👩‍👧‍👦 🎉🏳️‍🌈 é versus é \u200b zero width",
    "def f(x: int) -> int:\n    return x**2  # ok\n\n\nprint(f(3), 'it''s')\n",
    "1 12 123 1234 12345678 3.14159 1,000,000 0xFF",
    "a  b   c\t\td \n \n\n\r\n  e    ",
    "IT'S we'LL they've\n\n   \n\tx",
]
EXTREMES = ["", "   leading and trailing   ", "\n", "a" * 5000, " " * 5000]
LOOKS_SPECIAL = [
    "<s>hi</s>",
    "stop</s> now",
    "x<|endoftext|>y",
    "<|begin_of_text|>x<|end_of_text|>",
    "<|eot_id|><|python_tag|> [INST] [/INST]",
]


def folder_of(name: str, assets: Path) -> Path:
    return EMBEDDED_TOKENIZER if name == "embedded" else assets / name


def real_texts(assets: Path) -> list[str]:
    lines = (assets / "text" / "c4_demo.jsonl").read_text(encoding="utf-8").splitlines()[:40]
    shakespeare = (assets / "text" / "tinyshakespeare.txt").read_text(encoding="utf-8")[:20_000]
    return [*(json.loads(line)["text"] for line in lines), shakespeare]


# tokenizer.json against transformers.


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_tokenizer_json_equals_transformers(name: str, assets: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = folder_of(name, assets)
    ours = load_tokenizer(folder)
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    texts = SCRIPTS + EXTREMES + real_texts(assets)
    assert ours.encode_batch(texts) == reference(texts)["input_ids"]
    plain = reference(texts + LOOKS_SPECIAL, add_special_tokens=False, split_special_tokens=True)[
        "input_ids"
    ]
    assert ours.encode_batch(texts + LOOKS_SPECIAL, add_bos=False) == plain
    special = reference(LOOKS_SPECIAL, add_special_tokens=False)["input_ids"]
    assert ours.encode_batch(LOOKS_SPECIAL, add_bos=False, allow_special=True) == special
    assert plain[-len(special) :] != special  # the flag matters for these texts
    for ids in ours.encode_batch(texts) + special:
        for skip in (False, True):
            assert ours.decode(ids, skip_special_tokens=skip) == reference.decode(
                ids, skip_special_tokens=skip
            )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt2-tokenizer", (50257, None, 50256, False, False)),
        ("mistral-v0.3-tokenizer", (32768, 1, 2, True, False)),
        ("stories260K/hf-converted", (512, 1, 2, True, False)),
        ("llama3-tokenizer", (128256, 128000, 128001, True, False)),
        ("embedded", (2048, 0, 1, True, False)),
    ],
)
def test_vocabulary_and_special_ids(name: str, expected: tuple[Any, ...], assets: Path) -> None:
    ours = load_tokenizer(folder_of(name, assets))
    assert (ours.vocab_size, ours.bos_id, ours.eos_id, ours.adds_bos, ours.adds_eos) == expected


@pytest.mark.parametrize("name", [*HUGGING_FACE, "llama3-tokenizer"])
def test_decode_inverts_encode(name: str, assets: Path) -> None:
    ours = load_tokenizer(folder_of(name, assets))
    texts = SCRIPTS + EXTREMES + LOOKS_SPECIAL + real_texts(assets)
    if name == "mistral-v0.3-tokenizer":
        # The file adds a blank to texts without a leading one and strips the first one: one blank
        # is lost.
        texts = [text.lstrip(" ") for text in texts]
    for text in texts:
        assert ours.decode(ours.encode(text), skip_special_tokens=True) == text
        assert ours.decode(ours.encode(text, add_bos=False)) == text


# tokenizer.model in tiktoken format, against transformers' conversion, which has its own BPE and
# regex engine.


@pytest.fixture(scope="module")
def llama3(assets: Path) -> PretrainedTokenizer:
    return load_tokenizer(assets / "llama3-tokenizer")


@pytest.fixture(scope="module")
def converted_llama3(llama3: PretrainedTokenizer, assets: Path) -> tokenizers.Tokenizer:
    """Llama 3's tokenizer, converted by transformers."""
    convert = pytest.importorskip("transformers.convert_slow_tokenizer")
    special = [llama3.decode([i]) for i in range(128_000, 128_256)]
    path = str(assets / "llama3-tokenizer" / "tokenizer.model")
    with pytest.MonkeyPatch.context() as monkeypatch:
        # transformers reads the file, not a cached copy
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
        converted: tokenizers.Tokenizer = convert.TikTokenConverter(
            path, extra_special_tokens=special
        ).converted()
    return converted


@pytest.mark.slow
def test_tiktoken_format_equals_transformers_conversion(
    llama3: PretrainedTokenizer, converted_llama3: tokenizers.Tokenizer, assets: Path
) -> None:
    reference = converted_llama3
    texts = SCRIPTS + EXTREMES + LOOKS_SPECIAL + real_texts(assets)
    parsed = [encoding.ids for encoding in reference.encode_batch(texts)]
    assert llama3.encode_batch(texts, add_bos=False, allow_special=True) == parsed
    reference.encode_special_tokens = True
    literal = [encoding.ids for encoding in reference.encode_batch(texts)]
    reference.encode_special_tokens = False
    assert llama3.encode_batch(texts, add_bos=False) == literal
    assert [llama3.decode(ids) for ids in parsed] == [
        reference.decode(ids, skip_special_tokens=False) for ids in parsed
    ]


# Offsets against transformers.


@pytest.mark.slow
@pytest.mark.parametrize("name", [*HUGGING_FACE, "llama3-tokenizer"])
@pytest.mark.parametrize("special", [True, False])
def test_offsets_equal_transformers(
    name: str, special: bool, assets: Path, request: pytest.FixtureRequest
) -> None:
    transformers = pytest.importorskip("transformers")
    folder = folder_of(name, assets)
    ours = load_tokenizer(folder)
    if name == "llama3-tokenizer":
        converted = request.getfixturevalue("converted_llama3")
        reference = transformers.PreTrainedTokenizerFast(tokenizer_object=converted)
    else:
        reference = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json")
        )
    texts = SCRIPTS + EXTREMES + LOOKS_SPECIAL + real_texts(assets)[:10]
    expected = reference(
        texts,
        add_special_tokens=False,
        split_special_tokens=not special,
        return_offsets_mapping=True,
    )
    found = ours.tokenize_with_offsets(texts, allow_special=special)
    assert [ids for ids, _ in found] == expected["input_ids"]
    assert [offsets for _, offsets in found] == expected["offset_mapping"]
    assert [ids for ids, _ in found] == ours.tokenize(texts, allow_special=special)


def test_offsets_include_white_space_if_the_file_trims_it(tmp_path: Path) -> None:
    content = json.loads((EMBEDDED_TOKENIZER / "tokenizer.json").read_text())
    trims = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    content["post_processor"] = {
        "type": "Sequence",
        "processors": [trims, content["post_processor"]],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    text = "a cat\n\n and a  dog "
    trimmed = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(tmp_path)
    [(ids, offsets)] = ours.tokenize_with_offsets([text], allow_special=True)
    assert ids == trimmed.encode(text, add_special_tokens=False).ids
    assert offsets != trimmed.encode(text, add_special_tokens=False).offsets
    assert [text[start:end] for start, end in offsets] == [
        ours.decode([token_id]) for token_id in ids
    ]
    assert ours.encode(text)[0] == ours.bos_id  # BOS of the file is still found


@pytest.mark.parametrize(
    ("name", "special", "ordinary"),
    [
        ("gpt2-tokenizer", {50256}, "hello"),
        ("stories260K/hf-converted", {0, 1, 2}, "\u2581the"),
        ("llama3-tokenizer", set(range(128_000, 128_256)), None),
    ],
)
def test_special_tokens_and_ids(
    name: str, special: set[int], ordinary: str | None, assets: Path
) -> None:
    ours = load_tokenizer(assets / name)
    assert ours.special_ids == special
    assert all(ours.id_of(ours.decode([token_id])) == token_id for token_id in special)
    assert ours.id_of("<|im_start|>") is None
    if ordinary:
        assert ours.id_of(ordinary) not in special | {None}


def test_llama3_sentence(llama3: PretrainedTokenizer) -> None:
    """Compare with published ids."""
    assert llama3.encode("This is a test sentence.") == [128000, 2028, 374, 264, 1296, 11914, 13]


@pytest.mark.parametrize(
    ("token", "token_id"),
    [
        ("<|begin_of_text|>", 128000),
        ("<|end_of_text|>", 128001),
        ("<|reserved_special_token_0|>", 128002),
        ("<|reserved_special_token_1|>", 128003),
        ("<|finetune_right_pad_id|>", 128004),
        ("<|reserved_special_token_2|>", 128005),
        ("<|start_header_id|>", 128006),
        ("<|end_header_id|>", 128007),
        ("<|eom_id|>", 128008),
        ("<|eot_id|>", 128009),
        ("<|python_tag|>", 128010),
        ("<|reserved_special_token_3|>", 128011),
        ("<|reserved_special_token_247|>", 128255),
    ],
)
def test_llama3_special_tokens(llama3: PretrainedTokenizer, token: str, token_id: int) -> None:
    """Compare with Llama 3.1's published tokenizer_config.json."""
    assert llama3.encode(token, add_bos=False, allow_special=True) == [token_id]
    assert llama3.decode([token_id]) == token
    assert token_id not in llama3.encode(token, add_bos=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["embedded", "llama3-tokenizer"])
def test_unusual_text(name: str, assets: Path) -> None:
    """A lone surrogate, a surrogate pair, a byte order mark, two million blanks."""
    ours = load_tokenizer(folder_of(name, assets))
    assert ours.decode(ours.encode("a\ud800b \ud83d\ude00", add_bos=False)) == "a\ufffdb 😀"
    blanks = "\ufeffx" + " " * 2_000_000 + "y"
    assert ours.decode(ours.encode(blanks, add_bos=False)) == blanks


# BOS and EOS.


def test_bos_and_eos_are_added_once() -> None:
    ours = load_tokenizer()
    bos, eos = ours.bos_id, ours.eos_id
    assert bos is not None and eos is not None
    hi = ours.encode("Hi", add_bos=False)
    assert ours.encode("Hi") == [bos, *hi]
    assert ours.encode("Hi", add_eos=True) == [bos, *hi, eos]
    text = "<|begin_of_text|>Hi<|end_of_text|>"
    assert ours.encode(text, add_eos=True, allow_special=True) == [bos, *hi, eos]
    assert ours.encode(text, add_bos=False, allow_special=True) == [bos, *hi, eos]
    ids = ours.encode(text, add_eos=True)
    assert ids.count(bos) == ids.count(eos) == 1 and ours.decode(ids[1:-1]) == text
    assert ours.encode("", add_eos=True) == [bos, eos]
    assert ours.encode_batch(["Hi", ""], add_eos=True) == [[bos, *hi, eos], [bos, eos]]
    assert ours.encode_batch([]) == []


def test_documents_have_eos_and_the_bos_of_the_model(assets: Path) -> None:
    texts = ["Hi there", *LOOKS_SPECIAL]
    for name in [*HUGGING_FACE, "llama3-tokenizer"]:
        ours = load_tokenizer(folder_of(name, assets))
        prefix = [ours.bos_id] if ours.adds_bos else []
        plain = ours.encode_batch(texts, add_bos=False)
        assert ours.encode_documents(texts) == [[*prefix, *ids, ours.eos_id] for ids in plain]
        assert all(ours.eos_id not in ids and ours.bos_id not in ids for ids in plain)


def test_gpt2_has_no_bos(assets: Path) -> None:
    with pytest.raises(UserError, match="cannot add BOS: the tokenizer has none"):
        load_tokenizer(assets / "gpt2-tokenizer").encode("Hi", add_bos=True)


def copy_embedded(folder: Path, *, post_processor: bool = True, **settings: Any) -> Path:
    """Copy the embedded tokenizer.json to a folder, and write a tokenizer_config.json of the
    settings, if any."""
    content = json.loads((EMBEDDED_TOKENIZER / "tokenizer.json").read_text(encoding="utf-8"))
    if not post_processor:
        content["post_processor"] = None
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


ADDED_EOS = {"__type": "AddedToken", "content": "<|end_of_text|>", "lstrip": False, "special": True}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (0, 1, True, False)),
        (
            {"bos_token": "<|pad|>", "eos_token": ADDED_EOS, "add_bos_token": True},
            (2, 1, True, False),
        ),
        ({"bos_token": None, "eos_token": "<|end_of_text|>"}, (None, 1, False, False)),
        ({"bos_token": None, "add_bos_token": True}, (None, 1, False, False)),
        ({"add_bos_token": False, "add_eos_token": True}, (0, 1, False, True)),
        ({"add_bos_token": None, "add_eos_token": None}, (0, 1, True, False)),
    ],
)
def test_tokenizer_config_sets_bos_and_eos(
    tmp_path: Path, settings: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    ours = load_tokenizer(copy_embedded(tmp_path, **settings))
    assert (ours.bos_id, ours.eos_id, ours.adds_bos, ours.adds_eos) == expected


def test_post_processor_sets_bos_by_default(tmp_path: Path) -> None:
    assert not load_tokenizer(copy_embedded(tmp_path, post_processor=False)).adds_bos


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        ("special_tokens_map.json", {"bos_token": {"content": "<|pad|>"}}, (2, 1)),
        # 1 is <|end_of_text|>
        ("config.json", {"bos_token_id": 2, "eos_token_id": [0, 1]}, (2, 1)),
        ("generation_config.json", {"bos_token_id": None, "eos_token_id": 0}, (0, 0)),
    ],
)
def test_other_files_name_bos_and_eos(
    tmp_path: Path, file: str, content: dict[str, Any], expected: tuple[int, int]
) -> None:
    copy_embedded(tmp_path)
    (tmp_path / file).write_text(json.dumps(content))
    ours = load_tokenizer(tmp_path)
    assert (ours.bos_id, ours.eos_id) == expected


def test_truncation_and_padding_in_the_file_are_ignored(tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(EMBEDDED_TOKENIZER / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = ["Hi", "Once upon a time, there was a brave girl named Nina."]
    assert load_tokenizer(tmp_path).encode_batch(texts) == load_tokenizer().encode_batch(texts)


# Choice of the file, and unusable files.


def test_tokenizer_json_has_priority(tmp_path: Path, assets: Path) -> None:
    copy_embedded(tmp_path)
    shutil.copy(assets / "llama3-tokenizer" / "tokenizer.model", tmp_path)
    assert load_tokenizer(tmp_path).vocab_size == 2048


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {},
            "no tokenizer in '.*': found neither tokenizer.json .*, tekken.json .*, nor "
            "tokenizer.model",
        ),
        (
            {"tokenizer.json": b"not json"},
            "tokenizer.json' is not a valid tokenizer of the library `tokenizers`",
        ),
        (
            {"tokenizer.json": b""},
            "tokenizer.json' is not a valid tokenizer of the library `tokenizers`",
        ),
        (
            {"tokenizer.json": b"\xff\xfe{}"},
            "tokenizer.json' is not a valid tokenizer of the library `tokenizers`",
        ),
        (
            {"tokenizer.json": b'{"model": {"type": "BPE", "vocab": {}, "merges": []}}'},
            "empty vocabulary",
        ),
        ({"tokenizer.model": b""}, "tokenizer.model' is incomplete: its 0 ranks"),
        ({"tokenizer.model": b"IQ== 0\nIg== 1\n"}, "tokenizer.model' is incomplete: its 2 ranks"),
        (
            {"tokenizer.model": b"IQ== 0\n!!! 1\n"},
            "tokenizer.model' line 2 is not in tiktoken's format, `<base64> <rank>`",
        ),
        (
            {"tokenizer.model": b"version https://git-lfs.example/spec/v1\n"},
            "line 1 is not in tiktoken's format, `<base64> <rank>`",
        ),
        ({"tokenizer_config.json": b"{"}, "tokenizer_config.json' is not valid JSON"),
        (
            {"tokenizer_config.json": b"[]"},
            "tokenizer_config.json' must contain a JSON object, not list",
        ),
        (
            {"tokenizer_config.json": b'{"bos_token": "<nope>"}'},
            "has bos_token '<nope>', which is not a token",
        ),
        ({"tokenizer_config.json": b'{"eos_token": 7}'}, "has eos_token 7, which is not a token"),
        (
            {"config.json": b'{"eos_token_id": 9999}'},
            "has eos_token_id 9999, not an id of the tokenizer",
        ),
    ],
)
def test_unusable_files(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    if not any(name.startswith("tokenizer.") for name in files) and files:
        copy_embedded(tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_tokenizer(tmp_path)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere does not exist"):
        load_tokenizer(tmp_path / "nowhere")


# Caches, workers, subclasses, the embedded files.


def test_fingerprint_changes_with_the_ids(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("same", "also", "eos", "processor")}
    for folder in folders.values():
        folder.mkdir()
    same = load_tokenizer(copy_embedded(folders["same"])).fingerprint
    assert load_tokenizer(copy_embedded(folders["also"])).fingerprint == same
    others = {
        load_tokenizer(copy_embedded(folders["eos"], add_eos_token=True)).fingerprint,
        load_tokenizer(copy_embedded(folders["processor"], post_processor=False)).fingerprint,
        Lowercase.Config().build(path=folders["same"]).fingerprint,
    }
    assert len(others | {same}) == 4


@pytest.mark.parametrize("name", ["embedded", "llama3-tokenizer"])
def test_pickled_copy_encodes_equally(name: str, assets: Path) -> None:
    ours = load_tokenizer(folder_of(name, assets))
    copy = pickle.loads(pickle.dumps(ours))
    assert copy.encode_documents(LOOKS_SPECIAL) == ours.encode_documents(LOOKS_SPECIAL)
    assert copy.encode(LOOKS_SPECIAL[3], allow_special=True) == ours.encode(
        LOOKS_SPECIAL[3], allow_special=True
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_worker_encodes_without_warning_or_deadlock() -> None:
    program = """
import os
from torchtitan.components.tokenizer import PretrainedTokenizer
tokenizer = PretrainedTokenizer.Config().build()
texts = ["Once upon a time there was a brave girl."] * 2000
expected = tokenizer.encode_batch(texts)
pid = os.fork()
if pid == 0:
    os._exit(0 if tokenizer.encode_batch(texts) == expected else 1)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    env = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    result = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60
    )
    assert (result.stdout, result.stderr) == ("0\n", "")


class Lowercase(PretrainedTokenizer):
    """Custom subclass of the pretrained tokenizer that lowercases text."""

    def tokenize(self, texts: Sequence[str], *, allow_special: bool) -> list[list[int]]:
        return super().tokenize([text.lower() for text in texts], allow_special=allow_special)


class Bytes(Tokenizer):
    """Custom tokenizer of shifted UTF-8 bytes with BOS and EOS."""

    @dataclass(kw_only=True, slots=True)
    class Config(Tokenizer.Config):
        shift: int = 2

    def __init__(self, config: Config, *, path: str = ""):
        super().__init__(config)
        self.shift = config.shift
        self.vocab_size, self.bos_id, self.eos_id = 256 + self.shift, 0, 1
        self.adds_bos, self.adds_eos = True, False
        self.fingerprint = f"bytes-{self.shift}"

    def tokenize(self, texts: Sequence[str], *, allow_special: bool) -> list[list[int]]:
        return [[byte + self.shift for byte in text.encode()] for text in texts]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return bytes(i - self.shift for i in ids if i >= self.shift).decode()


def test_custom_tokenizers() -> None:
    lowercase = Lowercase.Config().build()
    assert lowercase.encode("HI") == load_tokenizer().encode("hi")
    tokenizer = Bytes.Config(shift=3).build(path="")
    assert tokenizer.encode("Hi") == [0, 75, 108]
    assert tokenizer.encode_documents(["Hi"]) == [[0, 75, 108, 1]]
    assert tokenizer.decode(tokenizer.encode("größer")) == "größer"
    assert (tokenizer.special_ids, tokenizer.id_of("x"), tokenizer.id_of("ö")) == (
        {0, 1},
        123,
        None,
    )
    # neither defines offsets, and the parent's would not match its ids
    for custom in (lowercase, tokenizer):
        with pytest.raises(UserError, match=f"{type(custom).__name__}.*tokenize_with_offsets"):
            custom.tokenize_with_offsets(["Hi"], allow_special=True)


@pytest.mark.slow
def test_embedded_files_equal_the_output_of_the_script(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location(
        "train_tokenizer", PROJECT / "scripts/train_tokenizer.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (EMBEDDED_TOKENIZER / name).read_bytes(), (
            f"run {spec.origin} again"
        )
