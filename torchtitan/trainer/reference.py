"""Frozen models that the trained one is compared with, or their results in a cache:
`FrozenModelTrainer` for any, and `ReferenceTrainer` for the log-probabilities of a reference."""

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from torchtitan.components.data.base import Batch, images_in
from torchtitan.components.data.sequence_cache import SequenceCache
from torchtitan.components.losses.log_probs import token_log_probs
from torchtitan.components.losses.token_result import TokenResult
from torchtitan.components.peft import LoRA
from torchtitan.components.peft.lora import adapters_off
from torchtitan.components.weights.pretrained import internal_source
from torchtitan.components.weights.sources import base_weights
from torchtitan.config.sections import require_at_least
from torchtitan.distributed.process_group import on_all_ranks
from torchtitan.tools.digests import cache_root
from torchtitan.tools.errors import UserError, errors_of, require
from torchtitan.tools.logging import logger, without_logs
from torchtitan.trainer.config import Preflight
from torchtitan.trainer.models import RunModel
from torchtitan.trainer.run_state import initial_load
from torchtitan.trainer.step_result import StepResult
from torchtitan.trainer.trainer import Trainer


def check_cache(config: Trainer.Config, option: str, *, dry_run: bool) -> None:
    """Raise `UserError` for a run whose data cannot be known before its first step."""
    if dry_run:
        raise UserError(
            f"{option} cannot be combined with a dry run, which reads no data; leave it out"
        )
    if config.training.batch_schedule or config.training.seq_len_schedule:
        raise UserError(
            f"{option} needs batches of one size; remove --training.batch_schedule and "
            "seq_len_schedule"
        )


class FrozenModelTrainer(Trainer):
    """A trainer with a frozen model, `models[frozen]`. If it has a cache, the model computes the
    missing results before the first step and is then removed, and the batches get them."""

    frozen: ClassVar[str]
    """Name of the model."""
    cache: SequenceCache | None = None

    def open_cache(self, model: RunModel) -> SequenceCache | None:
        """Return the cache for the results of the frozen model; None: it computes them in each
        step."""
        raise NotImplementedError

    @property
    def verifies_caches(self) -> bool:
        """True to verify all files of a cache at the start."""
        return getattr(self.config.dataloader, "verify_caches", False)

    def setting(self, model: RunModel) -> list[object]:
        """Return the settings that change the frozen model's results, besides tokens, as JSON
        values."""
        source = base_weights(model.weights)["digest"] if model.weights else self.config.debug.seed
        return [
            source,
            model.spec.name,
            model.spec.model.to_dict(),
            self.config.training.mixed_precision_param,
        ]

    def frozen_results(self, batch: Batch) -> dict[str, Tensor]:
        """Return what the frozen model computes for each token of a batch on the device, (B, L,
        ...)."""
        raise NotImplementedError

    def init_weights(self) -> None:
        model = self.models.get(self.frozen)
        self.cache = self.open_cache(model) if model else None
        if not (model and self.cache):
            super().init_weights()
            return
        parts, model.parts = model.parts, []
        super().init_weights()
        n_computed = 0
        for batch in self.cached_batches(self.cache):
            if all(self.ranks.all_ranks_or_raise(partial(self.cache.holds, batch))):
                continue
            if not model.parts:
                model.parts = parts
                model.allocate(self.device)
                initial_load(self, model, model.weights, [])()
            with self.precision.fixed_weights(), self.mixed_precision():
                results = self.frozen_results(super().post_dataloading_process(batch))
            self.ranks.all_ranks_or_raise(partial(self.cache.write, batch, results))
            n_computed += 1
        logger.info(
            "%s is complete: %d of this rank's batches were computed", self.cache.folder, n_computed
        )
        model.parts, model.flops_per_token = [], 0.0

    def cached_batches(self, cache: SequenceCache) -> Iterator[Batch]:
        """Log the size of the results for all steps and validation, and yield the batches of
        incomplete data."""
        config = self.config
        data = [
            (
                config.dataloader,
                config.training.epochs,
                self.run_length.data_steps(self.total_steps),
            )
        ]
        data += [
            (loader, 1, config.validator.steps)
            for loader in config.validation_dataloaders().values()
        ]
        for loader_config, epochs, steps in data:
            with without_logs():  # the loaders of training and validation log the same
                loader = self.build_dataloader(loader_config, epochs=epochs)
            with contextlib.closing(loader):
                n_samples = steps * self.global_batch_size if steps > 0 else loader.n_samples or 0
                size = (
                    n_samples
                    * config.training.seq_len
                    * self.sequences_per_sample
                    * cache.bytes_per_token
                    / 2**20
                )
                most = (
                    f"at most {n_samples:,} windows, {size:,.1f} MiB"
                    if n_samples
                    else "all windows of a stream"
                )
                logger.info("%s: %s", cache.folder, most)
                order = [
                    config.debug.seed,
                    epochs,
                    steps,
                    self.global_batch_size,
                    config.training.local_batch_size,
                ]
                share = [self.parallel_dims.dp_rank, self.parallel_dims.dp_degree]
                mark = cache.mark([loader_config.to_dict(), loader.state_dict(), *order, *share])
                if on_all_ranks(cache.is_complete(mark)):
                    continue
                names: set[str] = set()
                for batch in itertools.islice(
                    loader, steps * self.gradient_accumulation_steps if steps > 0 else None
                ):
                    if loader.n_samples is None and on_all_ranks(loader.exhausted):
                        break
                    yield batch
                    names |= cache.names(batch)
                cache.finish(mark, names)

    def post_dataloading_process(self, batch: Batch) -> Batch:
        return super().post_dataloading_process(
            {**batch, **self.cache.read(batch)} if self.cache else batch
        )


@dataclass(kw_only=True, slots=True)
class ReferenceConfig:
    """Frozen model to which the trained model is compared."""

    kind: Literal["model", "adapters_off", "cached"] = "model"
    """model: a second model, sharded alike; adapters_off: the trained model without its adapters,
    for LoRA; cached: a second model that computes the log-probabilities of the run's tokens before
    the first step, writes them to the data's cache folder, and is then removed."""

    path: str = ""
    """Checkpoint of the reference, in any format. Empty: the initial weights of the run."""

    offload: bool = False
    """Keep its weights in CPU memory between uses; needs FSDP."""

    update_every: int = 0
    """Steps after which the reference becomes the trained model (TR-DPO, Gorbatovski et al.,
    arXiv:2404.09656); 0: never."""

    update_share: float = 1.0
    """Share of the trained model's weights in the new reference, above 0 and at most 1; α in
    TR-DPO. The rest is of the old reference."""


class ReferenceTrainer(FrozenModelTrainer):
    """A trainer with a reference, whose `compute_loss` calls `log_probs` and
    `reference_log_probs`."""

    @dataclass(kw_only=True, slots=True)
    class Config(FrozenModelTrainer.Config):
        """A whole run with a reference."""

        reference: ReferenceConfig = field(default_factory=ReferenceConfig)
        """Reference model; methods without one ignore it."""

        def validate(self) -> None:
            has_adapters = any(
                isinstance(converter, LoRA.Config) for converter in self.model_converters
            )
            every, share = self.reference.update_every, self.reference.update_share
            require_at_least(0, reference__update_every=every)
            require(0 < share <= 1, "--reference.update_share", share, "above 0 and at most 1")
            if every and (self.reference.kind != "model" or self.reference.offload or has_adapters):
                raise UserError(
                    f"--reference.update_every {every} copies the trained weights to a second "
                    "model of the same kind: use --reference.kind model, without adapters and "
                    "--reference.offload"
                )
            precision = self.training.mixed_precision_param
            if every and share < 1 and precision != "float32":
                raise UserError(
                    f"--reference.update_share {share:g}: the reference has the type {precision}, "
                    "which would round small changes away; set --training.mixed_precision_param "
                    "float32, or a share of 1"
                )
            has_weights = self.reference.path or self.reference.offload
            if self.reference.kind == "adapters_off" and (has_weights or not has_adapters):
                remedy = (
                    "use a configuration with adapters, such as dpo_lora or grpo_lora, without "
                    "--reference.path and --reference.offload"
                )
                raise UserError(
                    f"--reference.kind adapters_off is the base model of adapters: {remedy}"
                )

        def check(self, world_size: int, *, dry_run: bool = False) -> Preflight:
            preflight = FrozenModelTrainer.Config.check(self, world_size, dry_run=dry_run)
            if self.reference.kind == "cached":
                check_cache(self, "--reference.kind cached", dry_run=dry_run)
            if self.reference.path:
                tokenizer = preflight.tokenizer
                with errors_of("--reference.path"):
                    internal_source(
                        self.reference.path,
                        self.resolved_spec(tokenizer),
                        added=tokenizer.added,
                    )
            return preflight

    config: Config
    needs_reference = True
    frozen = "reference"
    loss_device_type: str | None = None
    """Device whose block sizes log-probabilities have; None: the run's. A dry run has a GPU's."""

    temperature = 1.0
    """Divisor of the logits before `log_probs`."""

    def build_models(self) -> dict[str, RunModel]:
        models = super().build_models()
        config = self.config.reference
        spec = self.config.model_spec
        if self.needs_reference and config.kind != "adapters_off":
            weights = config.path or self.config.checkpoint.initial_load_path
            models["reference"] = self.build_other_model(
                spec,
                weights=weights,
                offloaded=config.offload,
                saved=config.update_every > 0,
            )
        return models

    def complete_step(self, outcome: StepResult) -> None:
        every = self.config.reference.update_every
        if every and self.needs_reference and (self.step + 1) % every == 0:
            self.update_reference(self.config.reference.update_share)
        super().complete_step(outcome)

    @torch.no_grad()
    def update_reference(self, share: float) -> None:
        """Move the reference's weights by `share` of the way to the trained model's weights."""
        parts = zip(self.models["reference"].parts, self.model_parts, strict=True)
        for reference, model in parts:
            trained = dict(itertools.chain(model.named_parameters(), model.named_buffers()))
            for name, old in itertools.chain(
                reference.named_parameters(), reference.named_buffers()
            ):
                new = trained[name].to(old.dtype)
                old.copy_(new if share == 1 else old + share * (new - old))

    def open_cache(self, model: RunModel) -> SequenceCache | None:
        if self.config.reference.kind != "cached":
            return None
        folder = cache_root(getattr(self.config.dataloader, "cache_dir", "")) / "reference"
        results = {"reference": TokenResult(torch.float32)}
        return SequenceCache(
            folder, self.setting(model), results=results, verify=self.verifies_caches
        )

    def frozen_results(self, batch: Batch) -> dict[str, Tensor]:
        return {"reference": self.log_probs("reference", batch)}

    def log_probs(self, model: str, batch: Batch) -> Tensor:
        """Return the log-probability of each label (B, L)."""
        inputs, labels_BL = (batch["input"], batch.get("attention")), batch["labels"]
        values_BL: Tensor = self.models[model](
            *inputs,
            head=partial(
                token_log_probs, temperature=self.temperature, device_type=self.loss_device_type
            ),
            labels_BL=labels_BL,
            **images_in(batch),
        )
        return values_BL

    def reference_log_probs(self, batch: Batch) -> Tensor:
        """Return what `log_probs` returns for the reference; 0 if the method has none."""
        if not self.needs_reference:
            return torch.zeros((), device=self.device)
        if self.config.reference.kind == "adapters_off":
            with torch.no_grad(), adapters_off(self.model_parts):
                return self.log_probs("model", batch)
        return batch["reference"] if self.cache else self.log_probs("reference", batch)
