"""`FrozenModelTrainer`: a trainer that compares the trained model with a frozen one, or with its results in a cache."""

import contextlib
import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from torchtitan.components.data.base import Batch
from torchtitan.components.sequence_cache import SequenceCache
from torchtitan.distributed.process_group import on_all_ranks
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger
from torchtitan.trainer.models import RunModel
from torchtitan.trainer.trainer import Trainer


def check_cache(config: Trainer.Config, option: str, *, dry_run: bool) -> None:
    """Raise `UserError` for a run whose data cannot be known before its first step."""
    if dry_run:
        raise UserError(f"{option} cannot be combined with a dry run, which reads no data; leave it out")
    if config.training.batch_schedule or config.training.seq_len_schedule:
        raise UserError(f"{option} needs batches of one size; leave out batch_schedule and seq_len_schedule")


class FrozenModelTrainer(Trainer):
    """A trainer with a frozen model, `models[frozen]`. If it has a cache, the model computes the missing results
    before the first step and is then removed, and the batches get them."""

    frozen: ClassVar[str]
    """Name of the model."""
    cache: SequenceCache | None = None

    def open_cache(self, model: RunModel) -> SequenceCache | None:
        """Return the cache for the results of the frozen model; None: it computes them in each step."""
        raise NotImplementedError

    def frozen_results(self, batch: Batch) -> dict[str, Tensor]:
        """Return what the frozen model computes for each token of a batch on the device, (B, L, ...)."""
        raise NotImplementedError

    def init_weights(self) -> None:
        model = self.models.get(self.frozen)
        self.cache = self.open_cache(model) if model else None
        if not (model and self.cache):
            super().init_weights()
            return
        parts, model.parts = model.parts, []
        super().init_weights()
        for batch in self.cached_batches(self.cache):
            if not on_all_ranks(self.cache.holds(batch)):
                if not model.parts:
                    model.parts = parts
                    model.allocate(self.device)
                    self._initial_load(model, model.weights, [])()
                with self.precision.fixed_weights(), self.mixed_precision():
                    results = self.frozen_results(super().post_dataloading_process(batch))
                self.ranks.all_ranks_or_raise(partial(self.cache.write, batch, results))
        logger.info("%s is complete", self.cache.folder)
        model.parts, model.flops_per_token = [], 0.0

    def cached_batches(self, cache: SequenceCache) -> Iterator[Batch]:
        """Log the size of the cache for the run's steps and validation, and yield their batches."""
        config = self.config
        data: list[Any] = [(config.dataloader, config.training.epochs, self.run_length.data_steps(self.total_steps))]
        data += [(loader, 1, config.validator.steps) for loader in config.validation_dataloaders().values()]
        for loader_config, epochs, steps in data:
            with contextlib.closing(self.build_dataloader(loader_config, epochs=epochs)) as loader:
                n_samples = steps * self.global_batch_size if steps > 0 else loader.n_samples or 0
                n_tokens = n_samples * config.training.seq_len * self.sequences_per_sample
                size = n_tokens * cache.bytes_per_token / 2**20
                logger.info("%s: at most %d windows, %.1f MiB (0: a stream)", cache.folder, n_samples, size)
                for batch in itertools.islice(loader, steps * self.gradient_accumulation_steps if steps > 0 else None):
                    if loader.n_samples is None and on_all_ranks(loader.exhausted):
                        break
                    yield batch

    def post_dataloading_process(self, batch: Batch) -> Batch:
        return super().post_dataloading_process({**batch, **self.cache.read(batch)} if self.cache else batch)
