"""Trainer of the kill test, whose metrics depend on the random generators of each process."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from random import randrange

import numpy
import torch

from torchtitan.components.data.base import Batch
from torchtitan.components.losses.loss import IGNORE_INDEX
from torchtitan.trainer import Trainer


class NoisyTrainer(Trainer):
    """Hides some labels at random, so that a run with lost random state has another loss."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """Options of the trainer, the share of hidden labels, and a pause."""

        noise: float = 0.0
        """Share of labels hidden by torch's generator, and again by numpy's; Python's hides one
        column."""

        pause: float = 0.0
        """Seconds of sleep before each step."""

    config: Config

    def next_micro_batches(self, batches: Iterator[Batch]) -> list[Batch]:
        time.sleep(self.config.pause)
        micro_batches = super().next_micro_batches(batches)
        if self.config.noise > 0:
            for batch in micro_batches:
                self._hide_labels(batch["labels"])
        return micro_batches

    def _hide_labels(self, labels_BL: torch.Tensor) -> None:
        labels_BL[torch.rand(labels_BL.shape) < self.config.noise] = IGNORE_INDEX
        labels_BL[torch.from_numpy(numpy.random.rand(*labels_BL.shape) < self.config.noise)] = (
            IGNORE_INDEX
        )
        labels_BL[:, randrange(labels_BL.shape[1])] = IGNORE_INDEX
