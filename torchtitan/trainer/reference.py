"""`ReferenceTrainer`: a trainer that compares the trained model with a frozen one, by their log-probabilities."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from torchtitan.components.data.base import Batch, TokenizingDataLoader
from torchtitan.components.data.disk_cache import cache_root
from torchtitan.components.log_probs import token_log_probs
from torchtitan.components.peft import LoRA
from torchtitan.components.peft.lora import adapters_off
from torchtitan.components.sequence_cache import SequenceCache
from torchtitan.components.weights.pretrained import internal_source
from torchtitan.components.weights.sources import base_weights
from torchtitan.tools.errors import UserError
from torchtitan.trainer.frozen import FrozenModelTrainer, check_cache
from torchtitan.trainer.models import RunModel


@dataclass(kw_only=True, slots=True)
class ReferenceConfig:
    """Frozen model to which the trained model is compared."""

    kind: Literal["model", "adapters_off", "cached"] = "model"
    """model: a second model, sharded alike; adapters_off: the trained model without its adapters, for LoRA; cached: a
    second model that computes the log-probabilities of the run's tokens before the first step, writes them to the
    data's cache folder, and is then removed."""

    path: str = ""
    """Checkpoint of the reference, in any format. Empty: the initial weights of the run."""

    offload: bool = False
    """Keep its weights in CPU memory between uses; needs FSDP."""


class ReferenceTrainer(FrozenModelTrainer):
    """A trainer with a reference, whose `compute_loss` calls `log_probs` and `reference_log_probs`."""

    @dataclass(kw_only=True, slots=True)
    class Config(FrozenModelTrainer.Config):
        """A whole run with a reference."""

        reference: ReferenceConfig = field(default_factory=ReferenceConfig)
        """Reference model; methods without one ignore it."""

        def validate(self) -> None:
            has_adapters = any(isinstance(converter, LoRA.Config) for converter in self.model_converters)
            if self.reference.kind == "adapters_off" and (self.reference.path or not has_adapters):
                remedy = "use --config dpo_lora, without --reference.path"
                raise UserError(f"--reference.kind adapters_off is the base model of adapters: {remedy}")

        def check(self, world_size: int, *, dry_run: bool = False) -> None:
            FrozenModelTrainer.Config.check(self, world_size, dry_run=dry_run)
            if self.reference.kind == "cached":
                check_cache(self, "--reference.kind cached", dry_run=dry_run)
            if self.reference.path:
                tokenizer = self.tokenizer.build(path=self.hf_assets_path)
                try:
                    internal_source(self.reference.path, self.resolve(tokenizer).model_spec, added=tokenizer.added)
                except UserError as error:
                    raise UserError(f"--reference.path: {error}") from error

    config: Config
    needs_reference = True
    frozen = "reference"

    def build_models(self) -> dict[str, RunModel]:
        models, config, spec = super().build_models(), self.config.reference, self.config.model_spec
        if self.needs_reference and config.kind != "adapters_off":
            weights = config.path or self.config.checkpoint.initial_load_path
            models["reference"] = self.build_other_model(spec, weights=weights, offloaded=config.offload)
        return models

    def open_cache(self, model: RunModel) -> SequenceCache | None:
        config = self.config
        if config.reference.kind != "cached":
            return None
        assert isinstance(config.dataloader, TokenizingDataLoader.Config)
        source = base_weights(model.weights)["digest"] if model.weights else config.debug.seed
        setting = [source, model.spec.name, model.spec.model.to_dict(), config.training.mixed_precision_param]
        return SequenceCache(cache_root(config.dataloader.cache_dir) / "reference", setting, bytes_per_token=4)

    def frozen_results(self, batch: Batch) -> dict[str, Tensor]:
        return {"reference": self.log_probs("reference", batch)}

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
