"""Training configurations shared by families; a family's `config_registry.py` supplies models and
numbers."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.data.dataloader import PretrainDataLoader
from torchtitan.components.data.finetuning.sft import SFTDataLoader
from torchtitan.components.evaluation.validate import Validator
from torchtitan.components.images.loader import ImageDataLoader
from torchtitan.components.observe.metrics import MetricsProcessor
from torchtitan.components.optim.lr_scheduler import LRScheduler
from torchtitan.components.optim.optimizer import Optimizer
from torchtitan.components.peft import LoRA
from torchtitan.config import ActivationCheckpointConfig, CompileConfig, TrainingConfig
from torchtitan.models.common.moe.layer import MoEConfig
from torchtitan.models.families import Family
from torchtitan.protocols import ModelSpec
from torchtitan.protocols.experts import PenaltyConfig
from torchtitan.trainer import Trainer

ConfigT = TypeVar("ConfigT", bound=Trainer.Config)


def small_run(
    spec: ModelSpec,
    trainer: type[ConfigT] = Trainer.Config,  # type: ignore[assignment]
) -> ConfigT:
    """Pre-train a small model on the built-in stories with `trainer`: about a minute on two CPU
    cores, no network. Configurations of longer runs save checkpoints; this one only if asked to, so
    that the same command trains again."""
    return trainer(
        model_spec=spec,
        training=TrainingConfig(
            steps=100, seq_len=256, local_batch_size=8, mixed_precision_param="float32"
        ),
        optimizer=Optimizer.Config(lr=2e-3),
        lr_scheduler=LRScheduler.Config(
            warmup_steps=10, decay_ratio=0.5, decay_type="cosine", min_lr_factor=0.1
        ),
        validator=Validator.Config(enable=True, freq=50, steps=10),
        checkpoint=CheckpointManager.Config(interval=50),
    )


def large_run(
    spec: ModelSpec,
    assets: str,
    *,
    lr: float,
    local_batch_size: int,
    steps: int = 10_000,
    seq_len: int = 8192,
    warmup_steps: int = 600,
) -> Trainer.Config:
    """Pre-train on C4 with the tokenizer in the folder `assets`."""
    return Trainer.Config(
        model_spec=spec,
        hf_assets_path=assets,
        dataloader=PretrainDataLoader.Config(dataset=["c4"], num_workers=2),
        training=TrainingConfig(steps=steps, seq_len=seq_len, local_batch_size=local_batch_size),
        optimizer=Optimizer.Config(lr=lr),
        lr_scheduler=LRScheduler.Config(
            warmup_steps=warmup_steps, decay_type="cosine", min_lr_factor=0.1
        ),
        activation_checkpoint=ActivationCheckpointConfig(mode="auto"),
        # On a CPU, compilation takes longer than a short run gains.
        compile=CompileConfig(enable=torch.cuda.is_available()),
        metrics=MetricsProcessor.Config(enable_tensorboard=True),
        checkpoint=CheckpointManager.Config(enable=True, interval=500),
    )


def small(family: Family, flavor: str) -> Callable[[], Trainer.Config]:
    """Return a configuration function for `config_registry.py`: a `small_run` of a flavor."""
    return _configuration(family, flavor, small_run)


def published(
    family: Family, flavor: str, assets: str, **options: Any
) -> Callable[[], Trainer.Config]:
    """Return a configuration function for `config_registry.py`: a `large_run` of a flavor with
    these `options`, and the tokenizer in ./assets/hf/`assets`."""
    return _configuration(
        family, flavor, partial(large_run, assets=f"./assets/hf/{assets}", **options)
    )


def _configuration(
    family: Family, flavor: str, run: Callable[..., Trainer.Config]
) -> Callable[[], Trainer.Config]:
    def configuration() -> Trainer.Config:
        config = run(family.registry(flavor))
        return balanced(config) if hasattr(config.model_spec.model, "moe") else config

    configuration.__module__ = f"{family.module}.config_registry"
    return configuration


def balanced(config: Trainer.Config) -> Trainer.Config:
    """Return `config` for training a model with experts from its beginning: its router's bias or an
    auxiliary loss balances them. A short run needs more than DeepSeek-V3's rate of 0.001 and
    Switch's weight of 0.01."""
    moe: MoEConfig = config.model_spec.model.moe  # type: ignore[attr-defined]
    is_short = config.training.steps < 1000
    if moe.selection_bias:
        moe.bias_rate = 0.01 if is_short else 1e-3
        moe.penalties = PenaltyConfig(sequence_loss=1e-4)
    else:
        moe.penalties = PenaltyConfig(batch_loss=0.05 if is_short else 0.01, z_loss=1e-4)
    return config


def for_conversations(config: Trainer.Config) -> Trainer.Config:
    """Return `config` for user-supplied conversations. The run starts from a Hugging Face folder
    and exports one."""
    training = dataclasses.replace(
        config.training, steps=300, seq_len=min(2048, config.model_spec.model.max_seq_len)
    )
    return dataclasses.replace(
        config,
        dataloader=SFTDataLoader.Config(dataset=[]),
        training=training,
        optimizer=Optimizer.Config(lr=2e-5),
        lr_scheduler=LRScheduler.Config(warmup_steps=10, decay_type="cosine", min_lr_factor=0.1),
        checkpoint=CheckpointManager.Config(
            enable=True,
            interval=500,
            keep_latest_k=2,
            initial_load_path=config.hf_assets_path,
            initial_load_in_hf=True,
            last_save_in_hf=True,
            export_dtype=training.mixed_precision_param,
        ),
    )


def with_images(config: Trainer.Config) -> Trainer.Config:
    """Return `config`, of a class of transformers, for conversations with images. The language
    model and the projector before it are trained, as the models' own recipes do.

    Raises:
        UserError: if the model reads text only.
    """
    spec = config.model_spec
    model = dataclasses.replace(
        spec.model,
        reads_images=True,  # type: ignore[call-arg]
        train=["language", "projector"],
    )
    return dataclasses.replace(
        config,
        model_spec=dataclasses.replace(spec, model=model),
        dataloader=ImageDataLoader.Config(dataset=config.dataloader.dataset),  # type: ignore
    )


def with_adapters(config: ConfigT, adapters: LoRA.Config, lr: float = 2e-4) -> ConfigT:
    """Return `config` for training adapters only, without weight decay, which would pull the
    adapted weights back to the original ones. Checkpoints for resuming contain only the
    adapters."""
    return dataclasses.replace(
        config,
        model_converters=[adapters],
        optimizer=Optimizer.Config(lr=lr, weight_decay=0.0, param_groups={}),
        checkpoint=dataclasses.replace(config.checkpoint, save_trainable_only=True),
    )
