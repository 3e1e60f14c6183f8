"""Validation: the loss on held-out data, by the same definition as the training loss."""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchtitan.components.data.dataloader import BaseDataLoader, Batch
from torchtitan.config import Configurable
from torchtitan.config.job_config import require_at_least
from torchtitan.distributed.parallelize import free_gathered_weights
from torchtitan.distributed.process_group import on_all_ranks, sum_over_ranks
from torchtitan.tools.errors import UserError


class Validator(Configurable):
    """Measures the mean loss over all valid tokens of the validation data, all ranks together.

    Args:
        config: when and how much.
        model_parts: put into evaluation mode meanwhile.
        dataloader: over the validation data, once; each validation begins with it anew.
        batches_per_step: local batches of one rank that make up its share of a global batch.
        sums_of_batch: this rank's part of the summed loss of a batch as the loader gave it, a scalar on the device, and
            of the number of its valid tokens.
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
        dataloader: BaseDataLoader,
        batches_per_step: int,
        sums_of_batch: Callable[[Batch], tuple[Tensor, int]],
    ):
        super().__init__(config)
        self.model_parts = model_parts
        self.dataloader = dataloader
        self.beginning = dataloader.state_dict()
        self.max_batches = config.steps * batches_per_step if config.steps != -1 else None
        self.sums_of_batch = sums_of_batch

    def is_due(self, step: int, *, last: bool) -> bool:
        """Whether to validate after `step`."""
        return last or step % self.config.freq == 0

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Measure the validation data.

        Returns:
            `validation_loss`, the mean per valid token (NaN where no token is valid), `validation_time` in seconds, and
            `validation_tokens_per_second`, valid tokens of all ranks together.
        """
        begun = time.perf_counter()
        for part in self.model_parts:
            part.eval()
        self.dataloader.load_state_dict(self.beginning)
        # float64: a mean over many batches should not depend on their order or on the number of ranks.
        totals = torch.zeros(2, dtype=torch.float64)
        for batch in itertools.islice(self.dataloader, self.max_batches):
            # Of a stream, no rank knows when the others' shares end; until then it gets batches that count nothing.
            if self.dataloader.samples_per_epoch is None and on_all_ranks(self.dataloader.exhausted):
                break
            loss, n_tokens = self.sums_of_batch(batch)
            totals += torch.tensor([loss.item(), n_tokens], dtype=torch.float64)
        for part in self.model_parts:
            free_gathered_weights(part)
            part.train()
        loss_sum, n_valid = sum_over_ranks(totals).tolist()
        seconds = time.perf_counter() - begun
        return {
            "validation_loss": loss_sum / n_valid if n_valid else float("nan"),
            "validation_time": seconds,
            "validation_tokens_per_second": n_valid / seconds,
        }

    def close(self) -> None:
        """End what the data loader has started."""
        self.dataloader.close()
