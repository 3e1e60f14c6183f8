"""Runs that start from a tiny model of any family, as transformers saves it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.test_sft_configs import CHATS, SHORT, loss_of_transformers, run_named
from torchtitan.components.tokenizer import EMBEDDED_TOKENIZER

transformers = pytest.importorskip("transformers")


def save_with_tokenizer(reference: Any, folder: Path) -> Path:
    """Save transformers' model with the embedded tokenizer and a custom chat template; return the folder."""
    reference.generation_config.eos_token_id = 1
    reference.save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(EMBEDDED_TOKENIZER)
    tokenizer.chat_template = "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def assert_adapters_open_in_peft(family: str, pretrained: Path, chat_file: Path, folder: Path, **options: Any) -> None:
    """Train adapters: transformers opens the merged model, and peft opens the adapter on its base model."""
    from peft import PeftModel

    trainer = run_named(
        "lora",
        folder,
        module="auto",
        hf_assets_path=pretrained,
        dataloader__dataset=[chat_file],
        training__seq_len=128,
        optimizer__lr=1e-2,
        **{**SHORT, "training__epochs": 1, **options},
    )
    assert trainer.config.model_spec.name == family
    export = folder / "checkpoint" / f"step-{trainer.step}"
    assert loss_of_transformers(export, CHATS) < loss_of_transformers(pretrained, CHATS)
    merged, base = (transformers.AutoModelForCausalLM.from_pretrained(path) for path in (export, pretrained))
    tokens = torch.arange(1, 40)[None]
    with torch.no_grad():
        expected = merged(tokens).logits
        adapted = PeftModel.from_pretrained(base, export / "adapter")(tokens).logits
    # Relative to the largest: products of small matrices, summed in another order in float32.
    torch.testing.assert_close(adapted, expected, atol=1e-5 * expected.abs().max().item(), rtol=0)
