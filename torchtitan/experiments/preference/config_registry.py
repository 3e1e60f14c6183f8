"""Configurations of preference optimization."""

import dataclasses
from types import ModuleType
from typing import Any

from torchtitan.components.data.finetuning.preference import AnswerDataLoader, PreferenceDataLoader
from torchtitan.components.optimizer import Optimizer
from torchtitan.components.peft import LoRA
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.models.auto.config_registry import lora, sft
from torchtitan.models.common.recipes import small_run
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

from .losses import KTOLoss, PreferenceLoss
from .trainer import KTOTrainer, PreferenceTrainer, ReferenceConfig


def dpo(hf_assets_path: str, family: ModuleType | None = None) -> PreferenceTrainer.Config:
    """Direct preference optimization of the model in a Hugging Face folder: `--dataloader.dataset pairs.jsonl`."""
    return with_pairs(_slow(sft(hf_assets_path, family)), PreferenceLoss.Config())


def dpo_lora(hf_assets_path: str, family: ModuleType | None = None) -> PreferenceTrainer.Config:
    """Direct preference optimization of low-rank adapters; the reference is the model without them."""
    config = with_pairs(lora(hf_assets_path, family), PreferenceLoss.Config())
    optimizer = dataclasses.replace(config.optimizer, lr=5e-6)
    return dataclasses.replace(config, optimizer=optimizer, reference=ReferenceConfig(kind="adapters_off"))


def ipo(hf_assets_path: str, family: ModuleType | None = None) -> PreferenceTrainer.Config:
    """As `dpo`, with IPO's squared loss, which bounds the margin."""
    return with_pairs(_slow(sft(hf_assets_path, family)), PreferenceLoss.Config(kind="ipo"))


def simpo(hf_assets_path: str, family: ModuleType | None = None) -> PreferenceTrainer.Config:
    """As `dpo`, with SimPO's loss: no reference, rewards per token."""
    return with_pairs(_slow(sft(hf_assets_path, family)), PreferenceLoss.Config(kind="simpo", beta=2.0))


def kto(hf_assets_path: str, family: ModuleType | None = None) -> KTOTrainer.Config:
    """Training on single answers with labels, or on pairs: `--dataloader.dataset answers.jsonl`."""
    return with_answers(_slow(sft(hf_assets_path, family)))


def dpo_debugmodel() -> PreferenceTrainer.Config:
    """Direct preference optimization of the small Llama 3 on built-in pairs: minutes on two CPU cores, no network.
    `--checkpoint.initial_load_path` starts from a checkpoint of llama3's `debugmodel_sft`."""
    return with_pairs(_small(), PreferenceLoss.Config(), dataset="preferences")


def dpo_lora_debugmodel() -> PreferenceTrainer.Config:
    """As `dpo_debugmodel` with low-rank adapters, and the model without them as the reference."""
    config = dataclasses.replace(dpo_debugmodel(), model_converters=[LoRA.Config()])
    return dataclasses.replace(config, reference=ReferenceConfig(kind="adapters_off"))


def kto_debugmodel() -> KTOTrainer.Config:
    """As `dpo_debugmodel`, with KTO on the same answers."""
    return with_answers(_small(), dataset="preferences")


def with_pairs(config: Trainer.Config, loss: PreferenceLoss.Config, dataset: str = "") -> PreferenceTrainer.Config:
    """Return `config` for pairs: user-supplied ones, or an embedded dataset."""
    template, names = ("chatml", [dataset]) if dataset else ("", [])
    loader = PreferenceDataLoader.Config(dataset=names, chat_template=template)
    return PreferenceTrainer.Config(**{**_sections(config), "dataloader": loader, "loss": loss})


def with_answers(config: Trainer.Config, dataset: str = "") -> KTOTrainer.Config:
    """Return `config` for answers with labels: user-supplied ones, or an embedded dataset."""
    template, names = ("chatml", [dataset]) if dataset else ("", [])
    loader = AnswerDataLoader.Config(dataset=names, chat_template=template)
    return KTOTrainer.Config(**{**_sections(config), "dataloader": loader, "loss": KTOLoss.Config()})


def _sections(config: Trainer.Config) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


def _slow(config: Trainer.Config) -> Trainer.Config:
    return dataclasses.replace(config, optimizer=Optimizer.Config(lr=5e-7, weight_decay=0.0))


def _small() -> Trainer.Config:
    config: Trainer.Config = small_run(model_registry("debugmodel"))
    config.tokenizer = PretrainedTokenizer.Config(added_tokens=["<|im_start|>", "<|im_end|>"])
    config.training.seq_len, config.training.local_batch_size = 256, 4
    config.optimizer = Optimizer.Config(lr=2e-4, weight_decay=0.0)
    return config
