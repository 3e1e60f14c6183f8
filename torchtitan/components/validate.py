"""Validation: the loss on held-out data, by the same definition as the training loss."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchtitan.components.data.dataloader import BaseDataLoader, Batch
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.config import Configurable
from torchtitan.config.job_config import require_at_least
from torchtitan.distributed.process_group import on_all_ranks, sum_over_ranks
from torchtitan.tools.errors import UserError


class Validator(Configurable):
    """Measures the mean loss over all valid tokens of the validation data, all ranks together.

    Args:
        config: when and how much.
        model_parts: put into evaluation mode meanwhile.
        make_dataloader: gives a fresh loader over the same samples each time.
        batches_per_step: local batches of one rank that make up its share of a global batch.
        loss_of_batch: the summed loss of a batch as the loader gave it, a scalar on the device.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Validation."""

        enable: bool = False
        """Validate during training and at its end."""

        dataset: str = ""
        """Data to validate on, as in dataloader.dataset. Empty: the validation split of the training data, where it
        has one."""

        freq: int = 100
        """Training steps from one validation to the next."""

        steps: int = -1
        """Global batches per validation, so that the samples are the same on any number of ranks; -1: all data."""

        def validate(self) -> None:
            """Raise `UserError` for counts that mean nothing."""
            require_at_least(1, validator__freq=self.freq)
            if self.steps != -1 and self.steps < 1:
                raise UserError(f"--validator.steps is {self.steps}, and must be at least 1, or -1 for all")

    config: Config

    def __init__(
        self,
        config: Config,
        *,
        model_parts: Sequence[nn.Module],
        make_dataloader: Callable[[], BaseDataLoader],
        batches_per_step: int,
        loss_of_batch: Callable[[Batch], Tensor],
    ):
        super().__init__(config)
        self.model_parts = model_parts
        self.make_dataloader = make_dataloader
        self.max_batches = config.steps * batches_per_step if config.steps != -1 else None
        self.loss_of_batch = loss_of_batch

    def is_due(self, step: int, *, last: bool) -> bool:
        """Whether to validate after `step`."""
        return last or step % self.config.freq == 0

    @torch.no_grad()
    def validate(self) -> float:
        """The mean loss per valid token over the validation data; NaN where no token is valid."""
        for part in self.model_parts:
            part.eval()
        loader = self.make_dataloader()
        # float64: a mean over many batches should not depend on their order or on the number of ranks.
        totals = torch.zeros(2, dtype=torch.float64)
        for batch in itertools.islice(loader, self.max_batches):
            # Of a stream, no rank knows when the others' shares end; until then it gets batches that count nothing.
            if loader.samples_per_epoch is None and on_all_ranks(loader.exhausted):
                break
            totals[0] += self.loss_of_batch(batch).cpu().double()
            totals[1] += (batch["labels"] != IGNORE_INDEX).sum()
        loader.close()
        for part in self.model_parts:
            part.train()
        loss_sum, n_tokens = sum_over_ranks(totals).tolist()
        return loss_sum / n_tokens if n_tokens else float("nan")
