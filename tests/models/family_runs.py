"""Runs that start from a tiny model of any family, as transformers saves it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.family_cases import relative_error
from tests.models.test_attention import metadata_of
from tests.models.test_sft_configs import CHATS, SHORT, loss_of_transformers, run_named
from torchtitan.cli.main import main
from torchtitan.components.tokenizer import EMBEDDED_TOKENIZER
from torchtitan.models.pretrained import load_model

transformers = pytest.importorskip("transformers")


def save_with_tokenizer(reference: Any, folder: Path) -> Path:
    """Save transformers' model with the embedded tokenizer and a custom chat template; return the
    folder."""
    reference.generation_config.eos_token_id = 1
    reference.save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(EMBEDDED_TOKENIZER)
    tokenizer.chat_template = (
        "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}"
    )
    tokenizer.save_pretrained(folder)
    return folder


def assert_adapters_open_in_peft(
    family: str, pretrained: Path, chat_file: Path, folder: Path, **options: Any
) -> None:
    """Train adapters: transformers opens the merged model, and peft opens the adapter on its base
    model."""
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
    merged, base = (
        transformers.AutoModelForCausalLM.from_pretrained(path) for path in (export, pretrained)
    )
    tokens = torch.arange(1, 40)[None]
    with torch.no_grad():
        expected = merged(tokens).logits
        adapted = PeftModel.from_pretrained(base, export / "adapter")(tokens).logits
    # Relative to the largest: products of small matrices, summed in another order in float32.
    torch.testing.assert_close(adapted, expected, atol=1e-5 * expected.abs().max().item(), rtol=0)


def assert_conversion_round_trip(pretrained: Path, folder: Path) -> None:
    """Convert to DCP and back: our model and transformers' compute the original logits."""
    assert main(["convert", "--to", "dcp", str(pretrained), str(folder / "dcp")]) == 0
    assert main(["convert", "--to", "hf", str(folder / "dcp"), str(folder / "again")]) == 0
    tokens = torch.arange(1, 30)[None]
    auto = transformers.AutoModelForCausalLM
    original, again = (auto.from_pretrained(path) for path in (pretrained, folder / "again"))
    loaded = load_model(folder / "dcp", device="cpu")
    with torch.no_grad():
        expected = original(tokens).logits
        assert torch.equal(again(tokens).logits, expected)
        # Float32 rounding of sums in another order.
        torch.testing.assert_close(
            loaded.model(tokens), expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item()
        )


def assert_documents_are_apart(model: nn.Module) -> None:
    """Compare logits and gradients of packed documents with those of each document alone."""
    rows = [[7, 1, 2, 90], [64, 36]]
    tokens = torch.randint(97, (2, 100), generator=torch.Generator().manual_seed(0))
    documents = [
        document
        for row, lengths in zip(tokens, rows, strict=True)
        for document in row.split(lengths)
    ]
    weight = torch.randn(200, 97, generator=torch.Generator().manual_seed(1))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def outcome(logits: Tensor) -> list[Tensor]:
        return [logits, *torch.autograd.grad((logits * weight).sum(), trained)]

    packed = outcome(model(tokens, metadata_of(rows)).reshape(-1, 97))
    alone = outcome(torch.cat([model(each[None])[0] for each in documents]))
    least = 0.01 * max(gradient.abs().max().item() for gradient in alone[1:])
    for found, expected in zip(packed, alone, strict=True):
        # Float32 sums in another order; small gradients are as in test_equal_transformers.
        assert relative_error(found, expected, least) < 2e-5
