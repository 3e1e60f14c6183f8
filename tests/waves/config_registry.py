"""Data, trainer and configuration of waves: `--module ./waves --config debugmodel`."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.data.base import BaseDataLoader, Batch
from torchtitan.components.evaluation.validate import Validator
from torchtitan.components.optim.lr_scheduler import LRScheduler
from torchtitan.components.tokenizer.no_tokens import NoTokens
from torchtitan.config import TrainingConfig
from torchtitan.config.configurable import builds
from torchtitan.trainer import Trainer

from . import model_registry

SHAPE = (2, 32)


class Waves(BaseDataLoader):
    """Sines and cosines of a frequency for each class, with noise and a time; each depends only on
    its place in the run."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Waves."""

        @builds(lambda: Waves)
        def build(self) -> Any:
            """Build the loader of one data-parallel rank."""

        def blank_batch(self, n_samples: int, seq_len: int) -> Batch:
            return {
                "x": torch.zeros(n_samples, *SHAPE),
                "noise": torch.zeros(n_samples, *SHAPE),
                "uniform": torch.full((n_samples,), 0.5),
                "classes": torch.zeros(n_samples, dtype=torch.int64),
            }

    def __init__(
        self,
        config: Config,
        /,
        *,
        local_batch_size: int,
        dp_rank: int,
        dp_world_size: int,
        **unused: Any,
    ):
        super().__init__(config)
        self.size, self.rank, self.n_ranks = local_batch_size, dp_rank, dp_world_size
        self.place = 0

    def __next__(self) -> Batch:
        first = self.place + self.rank * self.size
        self.place += self.size * self.n_ranks
        samples = [self._wave(place) for place in range(first, first + self.size)]
        return {name: torch.stack([one[name] for one in samples]) for name in samples[0]}

    def _wave(self, place: int) -> dict[str, Tensor]:
        random = torch.Generator().manual_seed(place)
        frequency = 0.4 * (1 + place % 3)
        angles = frequency * torch.arange(SHAPE[1]) + torch.rand(1, generator=random)
        return {
            "x": torch.stack([angles.sin(), angles.cos()]),
            "noise": torch.randn(SHAPE, generator=random),
            "uniform": torch.rand((), generator=random),
            "classes": torch.tensor(place % 3),
        }

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class WaveTrainer(Trainer):
    """Train a model of waves by flow matching."""

    unit = "waves"

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """A whole run."""

        dataloader: Waves.Config = field(default_factory=Waves.Config)

    def compute_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        loss: Any = self.loss
        times = loss.times(batch["uniform"])
        noisy = loss.at_time(batch["x"], batch["noise"], times)
        velocity = self.models["model"](noisy, times, batch["classes"])
        losses = loss.losses(velocity, batch["x"], batch["noise"])
        return losses.sum(), torch.tensor(len(losses), device=losses.device)


def waves_debugmodel() -> WaveTrainer.Config:
    """A run of seconds."""
    return WaveTrainer.Config(
        model_spec=model_registry("debugmodel"),
        tokenizer=NoTokens.Config(),
        training=TrainingConfig(
            steps=4, seq_len=1, local_batch_size=8, mixed_precision_param="float32"
        ),
        lr_scheduler=LRScheduler.Config(warmup_steps=0),
        validator=Validator.Config(enable=False),
        checkpoint=CheckpointManager.Config(enable=True, interval=2),
    )
