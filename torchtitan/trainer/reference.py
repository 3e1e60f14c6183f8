"""`ReferenceTrainer`: a trainer that compares the trained model with a frozen one, by their log-probabilities."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from torchtitan.components.data.base import Batch
from torchtitan.components.data.disk_cache import cache_root, digest_of, writable
from torchtitan.components.data.finetuning.planned_loader import PlannedDataLoader
from torchtitan.components.data.plan import ShuffleSampler
from torchtitan.components.log_probs import token_log_probs
from torchtitan.components.peft import LoRA
from torchtitan.components.peft.lora import adapters_off
from torchtitan.components.weights.pretrained import internal_source
from torchtitan.components.weights.sources import base_weights
from torchtitan.tools import durable
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger
from torchtitan.trainer.models import RunModel
from torchtitan.trainer.trainer import Trainer


@dataclass(kw_only=True, slots=True)
class ReferenceConfig:
    """Frozen model to which the trained model is compared."""

    kind: Literal["model", "adapters_off", "cached"] = "model"
    """model: a second model, sharded alike; adapters_off: the trained model without its adapters, for LoRA; cached: a
    second model that computes the log-probabilities of all answers before the first step, writes them to the data's
    cache folder, and is then removed."""

    path: str = ""
    """Checkpoint of the reference, in any format. Empty: the initial weights of the run."""

    offload: bool = False
    """Keep its weights in CPU memory between uses; needs FSDP."""


class ReferenceTrainer(Trainer):
    """A trainer with a reference, whose `compute_loss` calls `log_probs` and `reference_log_probs`."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """A whole run with a reference."""

        reference: ReferenceConfig = field(default_factory=ReferenceConfig)
        """Reference model; methods without one ignore it."""

        def validate(self) -> None:
            has_adapters = any(isinstance(converter, LoRA.Config) for converter in self.model_converters)
            if self.reference.kind == "adapters_off" and (self.reference.path or not has_adapters):
                remedy = "use --config dpo_lora, without --reference.path"
                raise UserError(f"--reference.kind adapters_off is the base model of adapters: {remedy}")

        def check(self, world_size: int, *, dry_run: bool = False) -> None:
            Trainer.Config.check(self, world_size, dry_run=dry_run)
            if self.reference.path:
                tokenizer = self.tokenizer.build(path=self.hf_assets_path)
                try:
                    internal_source(self.reference.path, self.resolve(tokenizer).model_spec, added=tokenizer.added)
                except UserError as error:
                    raise UserError(f"--reference.path: {error}") from error

    config: Config
    needs_reference = True
    cache: dict[int, float] | None = None
    """Log-probabilities of answers under the reference by their `answer_keys`, if they are cached."""

    def build_models(self) -> dict[str, RunModel]:
        models, config = super().build_models(), self.config.reference
        if self.needs_reference and config.kind != "adapters_off":
            weights = config.path or self.config.checkpoint.initial_load_path
            spec = self.config.model_spec
            models["reference"] = self.build_other_model(spec, weights=weights, offloaded=config.offload)
        return models

    def log_probs(self, model: str, batch: Batch, prefix: str = "") -> Tensor:
        """Return the log-probability of each label (B, L), of the tensors of the batch whose names have the prefix."""
        tokens_BL, labels_BL = (batch[f"{prefix}{name}"] for name in ("input", "labels"))
        attention, run = batch.get(f"{prefix}attention"), self.models[model]
        values_BL: Tensor = run(tokens_BL, attention, head=token_log_probs, labels_BL=labels_BL)
        return values_BL

    def reference_log_probs(self, batch: Batch, prefix: str = "") -> Tensor:
        """Return what `log_probs` returns for the reference; 0 if the method has none."""
        if not self.needs_reference:
            return torch.zeros((), device=self.device)
        if self.config.reference.kind == "adapters_off":
            with torch.no_grad(), adapters_off(self.model_parts):
                return self.log_probs("model", batch, prefix)
        return batch["reference"] if self.cache else self.log_probs("reference", batch, prefix)

    # --- the cache --------------------------------------------------------------------------------------------------

    def init_weights(self) -> None:
        super().init_weights()
        if self.needs_reference and self.config.reference.kind == "cached":
            reference = self.models["reference"]
            self.cache = self.fill_cache(reference)
            reference.parts, reference.flops_per_token = [], 0.0

    def fill_cache(self, reference: RunModel) -> dict[int, float]:
        """Return the log-probabilities of the answers in all batches under the reference, by their `answer_keys`, and 0
        for key 0. Compute those that `reference/DIGEST.json` in the cache folder lacks, and write them."""
        config, ranks = self.config, self.ranks
        assert isinstance(config.dataloader, PlannedDataLoader.Config)
        source = base_weights(reference.weights) if reference.weights else config.debug.seed
        # Without converters, since the reference is the plain model.
        digest = digest_of([source, config.model_spec.model.to_dict(), config.training.mixed_precision_param])
        path = cache_root(config.dataloader.cache_dir) / "reference" / f"{digest}.json"
        stored = ranks.broadcast_from_rank0(lambda: path.read_text() if path.exists() else "{}")
        cache = {0: 0.0} | {int(key): value for key, value in json.loads(stored).items()}

        def write() -> None:
            with writable(path.parent):
                durable.write(path, json.dumps(cache))

        for number, batch in enumerate(self.all_batches(), start=1):
            keys = batch["answer_keys"].flatten().tolist()
            if any(ranks.gather(not cache.keys() >= set(keys))):
                if not reference.is_initialized:
                    self._initial_load(reference, reference.weights, [])()
                with self.precision.fixed_weights(), self.mixed_precision():
                    values = self.log_probs("reference", super().post_dataloading_process(batch)).flatten().tolist()
                for of_rank in ranks.gather(dict(zip(keys, values, strict=True))):
                    cache |= of_rank
                if number % 50 == 0:  # an interrupted pass continues here
                    ranks.broadcast_from_rank0(write)
        ranks.broadcast_from_rank0(write)
        logger.info("reference: the log-probabilities of %d answers are in %s", len(cache) - 1, path)
        return cache

    def all_batches(self) -> Iterator[Batch]:
        """Yield the batches of all training and validation data, once and in order."""
        in_order: dict[str, Any] = {"sampler": ShuffleSampler.Config(shuffle=False), "num_workers": 0}
        for config in (self.config.dataloader, *self.config.validation_dataloaders().values()):
            with contextlib.closing(self.build_dataloader(dataclasses.replace(config, **in_order), epochs=1)) as loader:
                yield from loader

    def post_dataloading_process(self, batch: Batch) -> Batch:
        if self.cache is not None:
            keys = batch["answer_keys"]
            values = [self.cache[key] for key in keys.flatten().tolist()]
            batch = {**batch, "reference": torch.tensor(values).view(keys.shape)}
        return super().post_dataloading_process(batch)
