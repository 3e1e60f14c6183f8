"""Configurations with converters, run as a user runs them."""

import dataclasses
import shutil
from typing import Any

import pytest
import torch

from tests.models.test_sft_configs import (
    CHATS,
    SHORT,
    chat_file,
    loss_of_transformers,
    pretrained,
    run_named,
)
from tests.training import read_metrics
from torchtitan.config.manager import ConfigManager
from torchtitan.models.llama3 import config_registry
from torchtitan.tools.errors import UserError

__all__ = ["chat_file", "pretrained"]  # fixtures

QUICK = {
    "model__dim": 64,
    "model__ffn_dim": 128,
    "model__n_layers": 2,
    "training__seq_len": 64,
    "training__local_batch_size": 2,
    "training__steps": 8,
    "metrics__log_freq": 1,
    "validator__enable": False,
    "lr_scheduler__warmup_steps": 0,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "qlora",
        *("lora", "dora", "float8", "mxfp8", "nvfp4", "qat"),
    ],
)
def test_small_model_learns(tmp_path, kind):
    """Every configuration runs unchanged, and its loss falls, even if only adapters are trained."""
    options: dict[str, Any] = {"model_converters__qat__start_step": 4} if kind == "qat" else {}
    if kind == "nvfp4":  # the last of two layers stays wide
        options["model_converters__nvfp4__exclude"] = [r"layers\.1\."]
    if kind.endswith("lora") or kind == "dora":
        options["dataloader__max_tokens"] = 64
    trainer = run_named(f"llama3_debugmodel_{kind}", tmp_path, **QUICK, **options)
    losses = [loss for _, loss in read_metrics(tmp_path, "loss")]
    assert min(losses[-3:]) < losses[0] - 0.05, losses
    trained = trainer.num_trained / trainer.num_parameters
    assert trained < 0.2 if "lora" in kind or kind == "dora" else trained == 1


@pytest.mark.parametrize("size", ["8b_float8", "8b_mxfp8", "8b_nvfp4", "8b_lora", "8b_qlora"])
def test_large_configurations_convert_the_named_layers(size, monkeypatch):
    """The sizes of Llama 3.1 8B on the meta device; float8 is checked without the GPU that it needs
    to run."""
    config = getattr(config_registry, f"llama3_{size}")()
    config.model_spec.model = dataclasses.replace(config.model_spec.model, vocab_size=128256)
    config.check_conversion()
    if size == "8b_float8":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(UserError, match=r"float8 products need a GPU.*emulate"):
            config.model_converters[0].check_device()


@pytest.mark.slow
def test_frozen_rows_of_added_tokens_warn(tmp_path, caplog):
    """A model that cannot learn the end-of-turn token never stops."""
    words = [
        "--config",
        "llama3_debugmodel_lora",
        "--dump_folder",
        str(tmp_path),
        "--tokenizer.added_tokens",
        "<|new|>",
    ]
    patterns = {
        "frozen": [],
        "adapted": ["--model_converters.lora.include", "layers", r"^head\.output$"],
    }
    for kind, include in patterns.items():
        config = ConfigManager().parse_args([*words, *include]).config
        caplog.clear()
        config.check(world_size=1)
        assert any("1 tokens are added" in message for message in caplog.messages) is (
            kind == "frozen"
        )


class TestFromHuggingFace:
    """`MODULE=auto CONFIG=lora --hf_assets_path DIR --dataloader.dataset my.jsonl`."""

    @pytest.mark.slow
    def test_exports_adapter_and_merged_model(self, tmp_path, pretrained, chat_file):
        """transformers opens the merged model, and peft opens the adapter on its base model."""
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        trainer = run_named(
            "lora",
            tmp_path / "run",
            module="auto",
            hf_assets_path=pretrained,
            dataloader__dataset=[chat_file],
            optimizer__lr=1e-2,
            lr_scheduler__warmup_steps=0,
            model_converters__lora__rank=4,
            **SHORT,
        )
        assert trainer.num_trained < 0.2 * trainer.num_parameters
        ((_, first), *_, (last_step, last)) = read_metrics(tmp_path / "run", "loss")
        # One packed window against single conversations: float32 sums in another order.
        assert first == pytest.approx(loss_of_transformers(pretrained, CHATS), rel=1e-5)
        assert last < first
        folder = tmp_path / "run" / "checkpoint" / f"step-{last_step}"
        merged = AutoModelForCausalLM.from_pretrained(folder)
        base = AutoModelForCausalLM.from_pretrained(pretrained)
        adapted = PeftModel.from_pretrained(base, folder / "adapter")
        tokens = torch.arange(40)[None]
        with torch.no_grad():
            logits = merged(tokens).logits
            # Relative to the largest: products of small matrices, summed in another order in
            # float32.
            torch.testing.assert_close(
                adapted(tokens).logits, logits, atol=1e-5 * logits.abs().max().item(), rtol=0
            )
            with adapted.disable_adapter():
                assert not torch.allclose(adapted(tokens).logits, logits, atol=1e-2)
        assert loss_of_transformers(folder, CHATS) < first

    @pytest.mark.slow
    def test_resumes_without_the_base_weights(self, tmp_path, pretrained, chat_file):
        """The losses equal an uninterrupted run, bit for bit."""
        options = {
            "module": "auto",
            "hf_assets_path": pretrained,
            "dataloader__dataset": [chat_file],
            "checkpoint__interval": 1,
            "checkpoint__keep_latest_k": 0,
            "training__steps": 4,
            "training__seq_len": 256,
            "metrics__log_freq": 1,
            "training__mixed_precision_param": "float32",
            "model_converters__lora__dropout": 0.1,
            "model_converters__lora__rank": 4,
        }
        run_named("lora", tmp_path / "run", **options)
        losses = read_metrics(tmp_path / "run", "loss")
        checkpoints = tmp_path / "run" / "checkpoint"
        weights = sum(file.stat().st_size for file in pretrained.glob("*.safetensors"))
        assert (
            sum(file.stat().st_size for file in (checkpoints / "step-2").glob("*.distcp"))
            < weights / 2
        )
        for step in (3, 4):
            shutil.rmtree(checkpoints / f"step-{step}")
        run_named("lora", tmp_path / "run", **options)
        assert (checkpoints / "step-4" / "adapter" / "adapter_model.safetensors").is_file()
        assert len(losses) == 4 and read_metrics(tmp_path / "run", "loss") == losses
