"""Chats with GGUF files in llama-cpp-python: prompt, tokens and greedy answer equal to those of
transformers, for each architecture; where `llama_cpp` is installed."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import PROJECT
from tests.models.test_gguf import FITTING, convert, save

pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

BUILT_IN = PROJECT / "torchtitan/assets/chat_templates"
PUBLISHED = PROJECT / "tests/components/chat_template/published"
TEMPLATES = [
    *(BUILT_IN / f"{name}.jinja" for name in ("chatml", "llama3", "mistral", "alpaca")),
    *(PUBLISHED / f"{name}.jinja" for name in ("qwen3", "phi-3")),
]

CONVERSATION = [
    {"role": "user", "content": "Hi <b>é & 1+1?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "Sure?"},
]


def formatter(model: Any) -> Any:
    """Return what renders prompts in `Llama.create_chat_completion`."""
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    texts = {
        name: model._model.token_get_text(index) if index != -1 else ""
        for name, index in (("bos_token", model.token_bos()), ("eos_token", model.token_eos()))
    }
    return Jinja2ChatFormatter(template=model.metadata["tokenizer.chat_template"], **texts)


def opened(folder: Path) -> Any:
    llama_cpp = pytest.importorskip("llama_cpp")
    assert convert(folder / "hf", folder / "out") == 0
    exact = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
    return llama_cpp.Llama(str(folder / "out" / "model.gguf"), n_ctx=256, verbose=False, **exact)


@pytest.mark.slow
@pytest.mark.parametrize("name", FITTING)
def test_chats_are_equal(name, tmp_path):
    reference = save(tmp_path / "hf", name, seed=0)
    template = TEMPLATES[list(FITTING).index(name) % len(TEMPLATES)]
    shutil.copy(template, tmp_path / "hf" / "chat_template.jinja")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    model = opened(tmp_path)
    expected = tokenizer.apply_chat_template(
        CONVERSATION, add_generation_prompt=True, tokenize=False
    )
    prompt = formatter(model)(messages=CONVERSATION).prompt
    assert prompt == expected
    ids = model.tokenize(prompt.encode(), add_bos=False, special=True)
    assert ids == tokenizer(expected, add_special_tokens=False)["input_ids"]
    if re.fullmatch("gemma2?|gemma3_text", name):  # near choices may differ
        return
    answer = [token for token, _ in zip(model.generate(ids, temp=0.0), range(8), strict=False)]
    generated = reference.generate(
        torch.tensor([ids]),
        max_new_tokens=8,
        do_sample=False,
        eos_token_id=reference.config.vocab_size,
    )
    assert answer == generated[0, len(ids) :].tolist()
