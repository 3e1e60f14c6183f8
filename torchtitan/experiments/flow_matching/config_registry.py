"""Configurations of flow matching: `--module flow_matching --config digits --dataloader.dataset
FOLDER`."""

from typing import TypeVar

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.evaluation.validate import Validator
from torchtitan.components.images.captioned_loader import CaptionedImageDataLoader
from torchtitan.components.images.labeled_loader import LabeledImageDataLoader
from torchtitan.components.optim.ema import WeightAverage
from torchtitan.components.optim.lr_scheduler import LRScheduler
from torchtitan.components.optim.optimizer import Optimizer
from torchtitan.components.peft import LoRA
from torchtitan.config import TrainingConfig
from torchtitan.models import dit, flux
from torchtitan.models.common.recipes import with_adapters
from torchtitan.trainer.early_stopping import EarlyStopping

from .captions import CaptionTrainer
from .flux import ClassTextTrainer
from .samples import Samples
from .trainer import FlowMatchingTrainer


def dit_debugmodel() -> FlowMatchingTrainer.Config:
    """A small DiT on gray images of 8 x 8 pixels: `--dataloader.dataset FOLDER`, with a folder of
    images for each class."""
    return FlowMatchingTrainer.Config(
        model_spec=dit.model_registry("debugmodel"),
        dataloader=LabeledImageDataLoader.Config(image_size=8, channels=1),
        training=TrainingConfig(
            steps=100, seq_len=1, local_batch_size=64, mixed_precision_param="float32"
        ),
        optimizer=Optimizer.Config(lr=1e-3, weight_decay=0.0),
        lr_scheduler=LRScheduler.Config(warmup_steps=20, decay_ratio=0.3, decay_type="cosine"),
        ema=WeightAverage.Config(decay=0.999, for_validation=True),
        validator=Validator.Config(enable=False),
        checkpoint=CheckpointManager.Config(interval=500),
        callbacks=[Samples.Config(), EarlyStopping.Config()],
    )


def dit_digits() -> FlowMatchingTrainer.Config:
    """As `dit_debugmodel`, for minutes instead of seconds, with a checkpoint in diffusers' format
    at the end: scikit-learn's handwritten digits."""
    config = dit_debugmodel()
    config.training.steps, config.optimizer.lr = 3000, 2e-3
    config.callbacks = [Samples.Config(freq=500), EarlyStopping.Config()]
    config.ema.for_export = True
    config.checkpoint = CheckpointManager.Config(enable=True, interval=500, last_save_in_hf=True)
    return config


def dit_lora() -> FlowMatchingTrainer.Config:
    """Low-rank adapters of a small DiT, for another style: `--checkpoint.initial_load_path
    STEP_FOLDER`."""
    return _adapters_of(dit_debugmodel())


def flux_debugmodel() -> ClassTextTrainer.Config:
    """A small FLUX on gray images of 8 x 8 pixels, with a fixed text for each class."""
    config = dit_debugmodel()
    return ClassTextTrainer.Config.based_on(config, model_spec=flux.model_registry("debugmodel"))


def flux_lora() -> ClassTextTrainer.Config:
    """Low-rank adapters of a small FLUX: `--checkpoint.initial_load_path STEP_FOLDER`."""
    return _adapters_of(flux_debugmodel())


def flux_captions() -> CaptionTrainer.Config:
    """A small FLUX on images of 256 x 256 pixels with captions, and the encoders of FLUX.1:
    `--dataloader.dataset DATA --dataloader.encoders FOLDER`."""
    config = CaptionTrainer.Config.based_on(
        dit_debugmodel(),
        model_spec=flux.model_registry("small"),
        dataloader=CaptionedImageDataLoader.Config(image_size=256),
        optimizer=Optimizer.Config(lr=1e-4, weight_decay=0.0),
    )
    config.training.steps, config.training.local_batch_size = 10_000, 16
    config.training.mixed_precision_param = "bfloat16"
    config.checkpoint = CheckpointManager.Config(enable=True, interval=500, last_save_in_hf=True)
    return config


def flux_dev() -> CaptionTrainer.Config:
    """All weights of FLUX.1 dev on images of 1024 x 1024 pixels with captions: also
    `--checkpoint.initial_load_path FOLDER/transformer`."""
    config = flux_captions()
    config.model_spec = flux.model_registry("dev")
    config.dataloader.image_size = 1024
    config.training.steps, config.training.local_batch_size = 1000, 1
    config.optimizer.lr = 1e-5
    config.ema = WeightAverage.Config()
    config.activation_checkpoint.mode = "full"
    config.checkpoint.initial_load_in_hf = True
    return config


def flux_dev_lora() -> CaptionTrainer.Config:
    """Low-rank adapters of FLUX.1 dev, otherwise as `flux_dev`."""
    return with_adapters(flux_dev(), LoRA.Config(rank=16, alpha=16), lr=1e-4)


ConfigT = TypeVar("ConfigT", bound=FlowMatchingTrainer.Config)


def _adapters_of(config: ConfigT) -> ConfigT:
    config = with_adapters(config, LoRA.Config(rank=8, alpha=16), lr=2e-3)
    config.training.steps = 300
    config.checkpoint = CheckpointManager.Config(
        enable=True, interval=500, initial_load_in_hf=True, last_save_in_hf=True
    )
    return config
