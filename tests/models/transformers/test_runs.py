"""Runs of a class of transformers through the trainer: adapters, resumption, export."""

import json
from pathlib import Path

import pytest
import torch

from tests.training import ABSENT, read_metrics, train
from torchtitan.components.peft import LoRA
from torchtitan.config import ConfigManager
from torchtitan.models.pretrained import load_model

transformers = pytest.importorskip("transformers")

from torchtitan.models.transformers.tiny import tiny_config  # noqa: E402

CLASS = {
    "module": "transformers",
    "config": "transformers_debugmodel",
    **dict.fromkeys(("model__dim", "model__ffn_dim", "model__n_layers"), ABSENT),
    "checkpoint__enable": True,
}
"""The hybrid of convolutions and attention."""


def test_a_resumed_run_continues_bit_for_bit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path / "whole", **CLASS, training__steps=4)
    train(tmp_path / "parts", **CLASS, training__steps=4, checkpoint__interval=2)
    (newest,) = (tmp_path / "parts/checkpoint").glob("step-4")
    newest.rename(tmp_path / "set aside")
    caplog.set_level("INFO")
    train(tmp_path / "parts", **CLASS, training__steps=4)
    assert "step-2" in caplog.text
    whole, resumed = (
        read_metrics(tmp_path / name, "loss", "grad_norm") for name in ("whole", "parts")
    )
    assert resumed == whole and len(resumed) == 4


def test_an_export_is_the_class_in_transformers(tmp_path: Path) -> None:
    train(
        tmp_path,
        LoRA.Config(include=["q_proj", "v_proj", "w1"]),
        **CLASS,
        checkpoint__last_save_in_hf=True,
    )
    folder = tmp_path / "checkpoint/step-4"
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours = load_model(folder, device="cpu", dtype=torch.float32).model
    tokens = torch.randint(8, 64, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(
            ours(tokens), reference(input_ids=tokens).logits, rtol=0, atol=1e-5
        )
    assert json.loads((folder / "adapter/adapter_config.json").read_text())["peft_type"] == "LORA"


def test_a_folder_is_chosen_on_the_command_line(tmp_path: Path) -> None:
    """Also one whose config.json has sections in sections; its saved configuration is the same."""
    config = tiny_config(transformers.AutoConfig.for_model("gemma3_text"))
    config.save_pretrained(tmp_path)
    document = json.loads((tmp_path / "config.json").read_text())
    assert isinstance(document["rope_parameters"]["full_attention"], dict)
    words = ["--module", "transformers", "--config", "pretrain", "--hf_assets_path", str(tmp_path)]
    resolved = ConfigManager().parse_args(words)
    resolved.save(tmp_path / "config.yaml")
    again = ConfigManager().parse_args(["--config_file", str(tmp_path / "config.yaml")])
    assert again == resolved
    kept = again.config.model_spec.model.document
    assert kept["rope_parameters"] == document["rope_parameters"]
