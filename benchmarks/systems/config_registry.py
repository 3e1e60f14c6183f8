"""Configurations of torchtitan for `benchmarks/peers.py` and `post_training.py`, which set sizes,
lengths and files on the command line."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torchtitan.components.data import PromptDataLoader, SFTDataLoader
from torchtitan.components.data.base import NO_DOCUMENT, Batch
from torchtitan.components.data.dataloader import PretrainDataLoader
from torchtitan.components.data.finetuning.preference import PreferenceDataLoader
from torchtitan.components.losses.loss import IGNORE_INDEX
from torchtitan.components.losses.preference_losses import PreferenceLoss
from torchtitan.experiments.preference.trainer import PreferenceTrainer
from torchtitan.experiments.rl.trainer import RLTrainer
from torchtitan.models.llama3 import model_registry
from torchtitan.models.pretrained import huggingface_model
from torchtitan.protocols import ModelSpec
from torchtitan.trainer import Trainer
from torchtitan.trainer.callbacks import Callback
from torchtitan.trainer.step_result import StepResult

from .task import StepLog


class Steps(Callback):
    """Log the end of each step with its useful tokens and labels; in `grpo`, with sampled tokens
    and samples."""

    @dataclass(kw_only=True, slots=True)
    class Config(Callback.Config):
        """Log of steps."""

        folder: str = "."
        """Folder of the log."""

    config: Config

    def __init__(self, config: Config, *, trainer: Trainer):
        super().__init__(config, trainer=trainer)
        self.log = StepLog(config.folder)
        self.tokens = self.labels = 0

    def on_batches(self, micro_batches: Sequence[Batch]) -> None:
        if "prompts" in micro_batches[0]:
            self.labels = (
                sum(len(batch["prompts"]) for batch in micro_batches)
                * self.trainer.config.rollout.group_size
            )
            return
        self.tokens = sum(map(useful_tokens, micro_batches))
        self.labels = sum(int((batch["labels"] != IGNORE_INDEX).sum()) for batch in micro_batches)

    def after_step(self, outcome: StepResult) -> None:
        tokens = (
            round(outcome.measures["length"] * self.labels)
            if "length" in outcome.measures
            else self.tokens
        )
        self.log.end_step(time.monotonic(), tokens, self.labels)


def useful_tokens(batch: Batch) -> int:
    """Return the tokens of a batch without padding, which is the last document of a window. Each
    answer of a pair is a document."""
    positions_BL = batch["attention"].positions_BL if "attention" in batch else None
    if positions_BL is None:
        return batch["input"].numel()
    total, n_documents_B = (
        0,
        (batch["documents"] != NO_DOCUMENT).sum(dim=1) * (2 if "sequences" in batch else 1),
    )
    for positions, n_documents in zip(positions_BL, n_documents_B.tolist(), strict=True):
        starts = (positions == 0).nonzero().flatten().tolist()
        total += starts[n_documents] if len(starts) > n_documents else len(positions)
    return total


def pretrain() -> Trainer.Config:
    """Pre-train on windows of the built-in stories, each as one document, which is more work than
    several."""
    return Trainer.Config(
        model_spec=model_registry("debugmodel"),
        dataloader=PretrainDataLoader.Config(document_mask=False),
        callbacks=[Steps.Config()],
    )


def sft() -> Trainer.Config:
    """Fine-tune on packed samples."""
    return Trainer.Config(
        model_spec=model_registry("debugmodel"),
        dataloader=SFTDataLoader.Config(),
        callbacks=[Steps.Config()],
    )


def dpo() -> Trainer.Config:
    """Train on packed pairs; the reference is a second model with the same initial weights."""
    return PreferenceTrainer.Config.based_on(
        sft(), dataloader=PreferenceDataLoader.Config(), loss=PreferenceLoss.Config()
    )


def grpo() -> Trainer.Config:
    """Sample groups of answers, all of the same length if none ends, and learn from the length of
    their text."""
    return RLTrainer.Config.based_on(
        sft(), dataloader=PromptDataLoader.Config(), rewards=["length=500"]
    )


def class_pretrain(hf_assets_path: str) -> Trainer.Config:
    """Pre-train the model of a folder's config.json through its class in transformers."""
    return replace(pretrain(), model_spec=_class_in(hf_assets_path))


def class_sft(hf_assets_path: str) -> Trainer.Config:
    """Fine-tune as `class_pretrain`."""
    return replace(sft(), model_spec=_class_in(hf_assets_path))


def _class_in(folder: str) -> ModelSpec:
    from torchtitan.models import transformers

    return huggingface_model(Path(folder), transformers)[0]
