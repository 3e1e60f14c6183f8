"""Exported tokenizers in transformers' `AutoTokenizer`: the same ids and text as in training, and a
warning if the source folder gives different ids. Some tokenizers imitate published ones, others are
real."""

import base64
import hashlib
import json
import random
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from tests.components.tokenizer.helpers import load_tokenizer
from tests.conftest import PROJECT
from tests.pretrained import LAST_IN_HF
from tests.training import train
from torchtitan.cli.convert import convert
from torchtitan.components.chat_template import resolve_chat_template
from torchtitan.components.data.finetuning.chat_encoding import ChatEncoder
from torchtitan.components.data.finetuning.conversation import Conversation
from torchtitan.components.tokenizer import EMBEDDED_TOKENIZER, PretrainedTokenizer, tiktoken_model
from torchtitan.components.tokenizer.auto_tokenizer import (
    _GENERIC_MODEL_TYPES,
    warn_of_different_ids,
)
from torchtitan.components.weights import TensorSource, export_checkpoint
from torchtitan.models.llama3 import model_registry
from torchtitan.protocols.state_dict_adapter import model_tensor_specs

transformers = pytest.importorskip("transformers")

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' "
    "}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PIECES = [
    *(
        "the",
        "Model's",
        "tokenizer",
        "don't",
        "WE'LL",
        "x",
        "2024",
        "3.14",
        "a_b",
        "naïve",
        "e\u0301",
        "\ufb01",
    ),
    *(
        " ",
        " ",
        " ",
        "  ",
        "\n",
        "\n\n",
        "\t",
        "\u00a0",
        ".",
        ", ",
        "!?",
        "▁",
        "日本語",
        "한국",
        "नमस्ते",
        "🦙",
        "👩\u200d👧",
        "\x07",
    ),
]

cached_tokenizer = cache(load_tokenizer)


# Imitations of published tokenizers.


@cache
def corpus() -> list[str]:
    return (PROJECT / "docs" / "data.md").read_text(encoding="utf-8").splitlines()


def sentencepiece(special: Sequence[str]) -> tokenizers.Tokenizer:
    """Train BPE with byte fallback, as converted from SentencePiece, without normalizer and
    pre-tokenizer."""
    tokenizer = tokenizers.Tokenizer(
        models.BPE(unk_token=special[0], fuse_unk=True, byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=True)
    as_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=[*special, *as_bytes], show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [
        token for token in content["added_tokens"] if token["content"] in special
    ]
    return tokenizers.Tokenizer.from_str(json.dumps({**content, "pre_tokenizer": None}))


def byte_level(*split: Any) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, byte_level]) if split else byte_level
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def with_bos(tokenizer: tokenizers.Tokenizer, bos: str) -> tokenizers.Tokenizer:
    special = [(bos, tokenizer.token_to_id(bos))]
    pair = f"{bos} $A {bos}:1 $B:1"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=pair, special_tokens=special
    )
    return tokenizer


def llama2() -> tokenizers.Tokenizer:
    tokenizer = sentencepiece(["<unk>", "<s>", "</s>"])
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return with_bos(tokenizer, "<s>")


def llama2_new() -> tokenizers.Tokenizer:
    tokenizer = llama2()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


def llama2_truncating() -> tokenizers.Tokenizer:
    """Llama 2 saved with the truncation and padding settings of a program."""
    tokenizer = llama2()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    return tokenizer


def gemma() -> tokenizers.Tokenizer:
    tokenizer = sentencepiece(["<unk>", "<pad>", "<eos>", "<bos>"])
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return with_bos(tokenizer, "<bos>")


def qwen2() -> tokenizers.Tokenizer:
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| "
        r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    )
    tokenizer = byte_level(pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    tokenizer.normalizer = normalizers.NFC()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def gpt2() -> tokenizers.Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def deepseek() -> tokenizers.Tokenizer:
    """Byte-level tokenizer with BOS set only by `add_bos_token`."""
    tokenizer = byte_level(pre_tokenizers.Digits(individual_digits=True))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in ("<s>", "</s>")])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def t5() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    metaspace = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), metaspace])
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=500, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return tokenizer


def phi3() -> tokenizers.Tokenizer:
    """Llama 2 with added tokens that include the following whitespace."""
    tokenizer = llama2()
    tokenizer.add_special_tokens(
        [AddedToken(f"<|{name}|>", rstrip=True, normalized=False) for name in ("user", "end")]
    )
    tokenizer.add_tokens([AddedToken("<tool>", normalized=True)])
    return tokenizer


# Folders of these tokenizers, and exports.

LLAMA = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "add_bos_token": True,
    "model_max_length": 512,
}
GEMMA = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
QWEN = {
    "bos_token": None,
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "chat_template": CHATML,
}
GPT2 = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
NOT_ADDED = {
    "content": "Model",
    "lstrip": False,
    "normalized": True,
    "rstrip": False,
    "single_word": False,
}

CASES: dict[str, tuple[Callable[[], tokenizers.Tokenizer], dict[str, Any]]] = {
    "llama2": (llama2, {**LLAMA, "tokenizer_class": "LlamaTokenizer", "legacy": False}),
    "llama2 legacy": (llama2, {**LLAMA, "tokenizer_class": "LlamaTokenizerFast", "legacy": True}),
    "llama2 generic": (llama2, {**LLAMA, "tokenizer_class": "PreTrainedTokenizerFast"}),
    "llama2 without BOS": (
        llama2,
        {**LLAMA, "tokenizer_class": "LlamaTokenizer", "add_bos_token": False},
    ),
    "llama2 with EOS": (
        llama2,
        {**LLAMA, "tokenizer_class": "PreTrainedTokenizerFast", "add_eos_token": True},
    ),
    "llama2 truncating": (llama2_truncating, {**LLAMA, "tokenizer_class": "LlamaTokenizer"}),
    "llama2 code": (llama2, {**LLAMA, "tokenizer_class": "CodeLlamaTokenizer"}),
    "llama2 new": (llama2_new, {**LLAMA, "tokenizer_class": "LlamaTokenizer", "legacy": None}),
    "llama2 new legacy": (
        llama2_new,
        {**LLAMA, "tokenizer_class": "LlamaTokenizer", "legacy": True},
    ),
    "gemma": (gemma, {**GEMMA, "tokenizer_class": "GemmaTokenizerFast"}),
    "llama2 as gemma": (llama2, {**LLAMA, "tokenizer_class": "GemmaTokenizer"}),
    "qwen2": (qwen2, {**QWEN, "tokenizer_class": "Qwen2Tokenizer"}),
    "gpt2": (gpt2, {**GPT2, "tokenizer_class": "GPT2Tokenizer"}),
    "gpt2 as qwen2": (gpt2, {**GPT2, "tokenizer_class": "Qwen2TokenizerFast"}),
    "gpt2 with prefix": (gpt2, {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}),
    "gpt2 as llama": (gpt2, {**GPT2, "tokenizer_class": "LlamaTokenizer"}),
    "gpt2 as neox": (gpt2, {"tokenizer_class": "GPTNeoXTokenizerFast"}),
    "gpt2 as cohere": (gpt2, {"tokenizer_class": "CohereTokenizerFast"}),
    "gpt2 alone": (gpt2, {}),
    "deepseek": (deepseek, {**LLAMA, "tokenizer_class": "LlamaTokenizerFast"}),
    "phi3": (
        phi3,
        {
            **LLAMA,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "extra_special_tokens": ["<|user|>", "</s>"],
        },
    ),
    "phi3 with code": (
        phi3,
        {
            **LLAMA,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "auto_map": {"AutoTokenizer": ["my.Slow", None]},
            "split_special_tokens": True,
        },
    ),
    "phi3 with other flags": (
        phi3,
        {
            **LLAMA,
            "tokenizer_class": "TokenizersBackend",
            "added_tokens_decoder": {"9": {**NOT_ADDED, "special": False}},
        },
    ),
    "t5": (
        t5,
        {
            "eos_token": "</s>",
            "tokenizer_class": "T5Tokenizer",
            "clean_up_tokenization_spaces": True,
        },
    ),
}
LARGE = ["llama3-tokenizer", "gpt2-tokenizer", "mistral-v0.3-tokenizer"]
REAL = [
    "stories260K/hf-converted",
    "embedded",
    *(pytest.param(name, marks=pytest.mark.slow) for name in LARGE),
]

QUICK = ("llama2", "gemma", "qwen2", "gpt2", "deepseek", "phi3")
"""Cases of the default tests."""


def make_folder(name: str, folder: Path) -> Path:
    create, settings = CASES[name]
    create().save(str(folder / "tokenizer.json"))
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    if "chat_template" not in settings:
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def copy_real(name: str, assets: Path, folder: Path) -> Path:
    for file in (EMBEDDED_TOKENIZER if name == "embedded" else assets / name).glob("*token*.*"):
        shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def export(source: Path, folder: Path) -> Path:
    """Export a Hugging Face folder of a tiny model with the tokenizer in `source`."""
    spec = model_registry("debugmodel")
    spec.model.vocab_size, spec.model.n_layers, spec.model.dim = 8, 1, 32

    class Zeros(TensorSource):
        specs = model_tensor_specs(spec.model)

        def read(self, name: str, slices: Any = None) -> torch.Tensor:
            return torch.zeros(self.specs[name].shape)

    folder.mkdir()
    export_checkpoint(folder, "hf", spec, Zeros(), assets=source)
    return folder


def random_texts(special: Sequence[str], seed: int) -> list[str]:
    """Return 200 texts, the first one empty. Special tokens are inside only, since BOS and EOS are
    not repeated."""
    choice = random.Random(seed)
    pieces = [*PIECES, *special[:8], *special[-4:]]
    inner = ("".join(choice.choices(pieces, k=choice.randint(0, 30))) for _ in range(199))
    return ["", *(choice.choice(PIECES) + text + choice.choice(PIECES[:12]) for text in inner)]


def random_chats(seed: int) -> list[list[dict[str, str]]]:
    """Return chats whose answers begin with a letter, so that prompt and answer have no common
    token."""
    texts = iter(random_texts((), seed)[1:])
    begins = {"user": "", "assistant": "w"}
    return [
        [{"role": role, "content": begin + next(texts)} for role, begin in begins.items()]
        for _ in range(99)
    ]


def special_tokens(tokenizer: PretrainedTokenizer) -> list[str]:
    return [tokenizer.decode([token_id]) for token_id in sorted(tokenizer.special_ids)]


def chat_ids(folder: Path, chats: list[list[dict[str, str]]]) -> list[list[int]]:
    """Return the ids of the chats as whole texts. In training, a turn that merges with its prompt
    is split from it."""
    tokenizer = cached_tokenizer(folder)
    encoder = ChatEncoder(tokenizer, resolve_chat_template("", [folder], tokenizer), "assistant")
    return [encoder.encode_whole(Conversation(chat[:1]), chat[1:]).ids.tolist() for chat in chats]


def differences(theirs: Any, folder: Path) -> int:
    """Count the random texts and chats for which `theirs` and training on `folder` have different
    ids."""
    ours = cached_tokenizer(folder)
    texts, chats = random_texts(special_tokens(ours), seed=1), random_chats(seed=2)
    expected = ours.encode_batch(texts, allow_special=True)
    n_texts = sum(a != b for a, b in zip(theirs(texts)["input_ids"], expected, strict=True))
    found = [theirs.apply_chat_template(chat, return_dict=False) for chat in chats]
    return n_texts + sum(a != b for a, b in zip(found, chat_ids(folder, chats), strict=True))


def assert_same(theirs: Any, folder: Path) -> None:
    assert differences(theirs, folder) == 0
    ours = cached_tokenizer(folder)
    for ids in ours.encode_batch(random_texts(special_tokens(ours), seed=3), allow_special=True):
        for skip in (False, True):
            assert theirs.decode(ids, skip_special_tokens=skip) == ours.decode(
                ids, skip_special_tokens=skip
            )


def n_warnings(caplog: pytest.LogCaptureFixture) -> int:
    return sum("with different token ids" in message for message in caplog.messages)


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def test_exports_open_with_the_trained_ids(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning appears if and only if transformers gives different ids for the source folder."""
    source = make_folder(name, tmp_path)
    exported = transformers.AutoTokenizer.from_pretrained(export(source, tmp_path / "exported"))
    assert_same(exported, source)
    texts = random_texts(special_tokens(cached_tokenizer(source)), seed=4)
    assert cached_tokenizer(tmp_path / "exported").encode_batch(texts) == cached_tokenizer(
        source
    ).encode_batch(texts)
    if name != "t5":  # the library has no such model, so the warning ignores its class
        warn_of_different_ids(cached_tokenizer(source))
        n_different = differences(transformers.AutoTokenizer.from_pretrained(source), source)
        assert n_warnings(caplog) == (n_different > 0), n_different
        assert name != "llama2" or n_different > 99  # all chats and some texts


@pytest.mark.parametrize("name", REAL)
def test_exports_of_real_tokenizers(
    name: str, assets: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = copy_real(name, assets, tmp_path)
    assert_same(
        transformers.AutoTokenizer.from_pretrained(export(source, tmp_path / "exported")), source
    )
    warn_of_different_ids(cached_tokenizer(source))
    assert n_warnings(caplog) == 0


def test_tokenizer_class_that_transformers_ignores(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers reads tokenizer.json unchanged for Mistral, for any `tokenizer_class`."""
    source = make_folder("llama2", tmp_path)
    (source / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    warn_of_different_ids(cached_tokenizer(source))
    assert n_warnings(caplog) == 0
    assert differences(transformers.AutoTokenizer.from_pretrained(source), source) == 0
    registered = transformers.models.auto.tokenization_auto.TOKENIZER_MAPPING_NAMES
    assert {registered[model_type] for model_type in _GENERIC_MODEL_TYPES} <= {
        "TokenizersBackend",
        "MistralCommonBackend",
    }


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_tokenizer_class_that_transformers_forces(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Models of type qwen2 always get Qwen2's class, which is wrong for other tokenizers."""
    source = make_folder(name, tmp_path)
    settings = {**CASES[name][1], "tokenizer_class": "PreTrainedTokenizerFast"}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    (source / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    warn_of_different_ids(cached_tokenizer(source))
    n_different = differences(transformers.AutoTokenizer.from_pretrained(source), source)
    assert n_warnings(caplog) == (n_different > 0) == (name == "gpt2")


def test_token_files_of_transformers_4(tmp_path: Path) -> None:
    """special_tokens_map.json and added_tokens.json contain tokens that tokenizer.json lacks."""
    source = make_folder("phi3", tmp_path)
    settings = {key: value for key, value in LLAMA.items() if key != "eos_token"}
    (source / "tokenizer_config.json").write_text(
        json.dumps({**settings, "tokenizer_class": "LlamaTokenizer"})
    )
    user = {
        "content": "<|user|>",
        "lstrip": True,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
    }
    named = {
        "bos_token": "</s>",
        "eos_token": {**user, "content": "</s>"},
        "additional_special_tokens": [user],
    }
    (source / "special_tokens_map.json").write_text(json.dumps(named))
    (source / "added_tokens.json").write_text(json.dumps({"Model": 902}))
    theirs = transformers.AutoTokenizer.from_pretrained(export(source, tmp_path / "exported"))
    assert_same(theirs, source)
    assert (theirs.bos_token, theirs.eos_token, theirs.extra_special_tokens) == (
        "<s>",
        "</s>",
        ["<|user|>"],
    )


def test_other_settings_are_kept(tmp_path: Path) -> None:
    source = make_folder("llama2", tmp_path)
    before = transformers.AutoTokenizer.from_pretrained(source)
    after = transformers.AutoTokenizer.from_pretrained(export(source, tmp_path / "exported"))
    assert type(before).__name__ == "LlamaTokenizer" and before.padding_side == "left"
    for name in (
        "padding_side",
        "model_max_length",
        "model_input_names",
        "chat_template",
        "special_tokens_map",
    ):
        assert getattr(after, name) == getattr(before, name), name
    assert after.added_tokens_decoder == before.added_tokens_decoder
    assert (tmp_path / "exported/tokenizer.json").read_bytes() == (
        source / "tokenizer.json"
    ).read_bytes()


@pytest.mark.parametrize("has_template", [True, False])
def test_bos_and_eos_are_named_unless_a_template_writes_them(
    has_template: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = [*(bytes([byte]) for byte in range(256)), b"th", b"he", b"the", b" the"]
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)]
    (tmp_path / "tokenizer.model").write_bytes(b"".join(lines))
    digest = hashlib.sha256(b"".join(lines)).hexdigest()
    monkeypatch.setattr(tiktoken_model, "_LLAMA3_SHA256", digest)  # smaller than Llama 3's file
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE if has_template else "{{ messages }}")
    theirs = transformers.AutoTokenizer.from_pretrained(export(tmp_path, tmp_path / "exported"))
    assert (theirs.bos_token_id, theirs.eos_token_id) == (
        (None, None) if has_template else (260, 261)
    )
    ours, text = cached_tokenizer(tmp_path), "<|eot_id|>The other the\n\nthehe"
    assert theirs(text)["input_ids"] == ours.encode(text, allow_special=True)
    # other programs would read it as a SentencePiece model
    assert not (tmp_path / "exported/tokenizer.model").exists()


@pytest.mark.slow
def test_run_warns_once_and_its_exports_open(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Open the Hugging Face folder of the run, and the one that `convert` writes."""
    (tmp_path / "source").mkdir()
    source = make_folder("llama2", tmp_path / "source")
    train(tmp_path, hf_assets_path=source, **LAST_IN_HF)
    assert n_warnings(caplog) == 1
    checkpoints, converted = tmp_path / "checkpoint", tmp_path / "converted"
    assert convert([str(checkpoints / "step-3"), str(converted), "--to", "hf"]) == 0
    for folder in (checkpoints / "step-4", converted):
        assert differences(transformers.AutoTokenizer.from_pretrained(folder), source) == 0
