"""The training that the kill test kills: one whose numbers depend on the random generators of each process."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import randrange

import numpy
import torch

from torchtitan.components.data.base import Batch
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.trainer import Trainer


class NoisyTrainer(Trainer):
    """Hides some labels at random, so that the loss of a run that forgot its random numbers is another one."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """The trainer's, and how much is hidden."""

        noise: float = 0.0
        """Share of the labels that torch's generator hides, and numpy's another time; Python's hides one column."""

    config: Config

    def next_micro_batches(self, batches: Iterator[Batch]) -> list[Batch]:
        micro_batches = super().next_micro_batches(batches)
        if self.config.noise > 0:
            for batch in micro_batches:
                self._hide_labels(batch["labels"])
        return micro_batches

    def _hide_labels(self, labels_BL: torch.Tensor) -> None:
        labels_BL[torch.rand(labels_BL.shape) < self.config.noise] = IGNORE_INDEX
        labels_BL[torch.from_numpy(numpy.random.rand(*labels_BL.shape) < self.config.noise)] = IGNORE_INDEX
        labels_BL[:, randrange(labels_BL.shape[1])] = IGNORE_INDEX
