"""Configurations of preference optimization."""

import dataclasses
from types import ModuleType

from torchtitan.components.data.finetuning.preference import AnswerDataLoader, PreferenceDataLoader
from torchtitan.components.optimizer import Optimizer
from torchtitan.components.peft import LoRA
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.models.auto import config_registry as auto
from torchtitan.models.common.recipes import small_run
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

from .losses import KTOLoss, PreferenceLoss
from .trainer import KTOTrainer, PreferenceTrainer, ReferenceConfig


def dpo(hf_assets_path: str, family: ModuleType | None = None) -> PreferenceTrainer.Config:
    """Direct preference optimization of the model in a Hugging Face folder: `--dataloader.dataset pairs.jsonl`."""
    return PreferenceTrainer.Config.based_on(
        auto.sft(hf_assets_path, family),
        dataloader=PreferenceDataLoader.Config(dataset=[]),
        loss=PreferenceLoss.Config(),
        optimizer=Optimizer.Config(lr=5e-7, weight_decay=0.0),
    )


def dpo_lora(hf_assets_path: str, family: ModuleType | None = None) -> PreferenceTrainer.Config:
    """Direct preference optimization of low-rank adapters; the reference is the model without them."""
    config = auto.lora(hf_assets_path, family)
    return PreferenceTrainer.Config.based_on(
        config,
        dataloader=PreferenceDataLoader.Config(dataset=[]),
        loss=PreferenceLoss.Config(),
        optimizer=dataclasses.replace(config.optimizer, lr=5e-6),
        reference=ReferenceConfig(kind="adapters_off"),
    )


def ipo(hf_assets_path: str, family: ModuleType | None = None) -> PreferenceTrainer.Config:
    """As `dpo`, with IPO's squared loss, which bounds the margin."""
    return dataclasses.replace(dpo(hf_assets_path, family), loss=PreferenceLoss.Config(kind="ipo"))


def simpo(hf_assets_path: str, family: ModuleType | None = None) -> PreferenceTrainer.Config:
    """As `dpo`, with SimPO's loss: no reference, rewards per token."""
    return dataclasses.replace(dpo(hf_assets_path, family), loss=PreferenceLoss.Config(kind="simpo", beta=2.0))


def kto(hf_assets_path: str, family: ModuleType | None = None) -> KTOTrainer.Config:
    """Training on single answers with labels, or on pairs: `--dataloader.dataset answers.jsonl`."""
    loader = AnswerDataLoader.Config(dataset=[])
    return KTOTrainer.Config.based_on(dpo(hf_assets_path, family), dataloader=loader, loss=KTOLoss.Config())


def dpo_debugmodel() -> PreferenceTrainer.Config:
    """Direct preference optimization of the small Llama 3 on built-in pairs: minutes on two CPU cores, no network.
    `--checkpoint.initial_load_path` starts from a checkpoint of llama3's `debugmodel_sft`."""
    config: Trainer.Config = small_run(model_registry("debugmodel"))
    return PreferenceTrainer.Config.based_on(
        config,
        dataloader=PreferenceDataLoader.Config(dataset=["preferences"], chat_template="chatml"),
        loss=PreferenceLoss.Config(),
        optimizer=Optimizer.Config(lr=2e-4, weight_decay=0.0),
        tokenizer=PretrainedTokenizer.Config(added_tokens=["<|im_start|>", "<|im_end|>"]),
        training=dataclasses.replace(config.training, seq_len=256, local_batch_size=4),
    )


def dpo_lora_debugmodel() -> PreferenceTrainer.Config:
    """As `dpo_debugmodel` with low-rank adapters, and the model without them as the reference."""
    reference = ReferenceConfig(kind="adapters_off")
    return dataclasses.replace(dpo_debugmodel(), model_converters=[LoRA.Config()], reference=reference)


def kto_debugmodel() -> KTOTrainer.Config:
    """As `dpo_debugmodel`, with KTO on the same answers."""
    loader = AnswerDataLoader.Config(dataset=["preferences"], chat_template="chatml")
    return KTOTrainer.Config.based_on(dpo_debugmodel(), dataloader=loader, loss=KTOLoss.Config())
