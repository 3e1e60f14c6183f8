"""Configurations of this experiment."""

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.lr_scheduler import LRScheduler
from torchtitan.components.optimizer import Optimizer
from torchtitan.components.validate import Validator
from torchtitan.config import TrainingConfig
from torchtitan.models.llama3 import model_registry

from .trainer import MicroBatchClippingTrainer


def gradient_aggregation_debugmodel() -> MicroBatchClippingTrainer.Config:
    """The small Llama 3 on the built-in stories, in four micro-batches per step."""
    return MicroBatchClippingTrainer.Config(
        model_spec=model_registry("debugmodel"),
        training=TrainingConfig(
            steps=100, seq_len=256, local_batch_size=2, global_batch_size=8, mixed_precision_param="float32"
        ),
        optimizer=Optimizer.Config(lr=2e-3),
        lr_scheduler=LRScheduler.Config(warmup_steps=10, decay_ratio=0.5, decay_type="cosine", min_lr_factor=0.1),
        validator=Validator.Config(enable=True, freq=50, steps=10),
        checkpoint=CheckpointManager.Config(interval=50),
    )
