"""The trainers of preference optimization: `PreferenceTrainer` for pairs, `KTOTrainer` for single answers."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from torchtitan.components.data.base import BaseDataLoader, Batch
from torchtitan.components.data.finetuning.preference import SEQUENCES_PER_SAMPLE, PreferenceDataLoader
from torchtitan.components.data.plan import ShuffleSampler
from torchtitan.components.log_probs import token_log_probs
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.peft import LoRA
from torchtitan.components.peft.lora import adapters_off
from torchtitan.components.weights.pretrained import internal_source
from torchtitan.components.weights.sources import base_weights
from torchtitan.distributed.process_group import sum_over_ranks
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger
from torchtitan.trainer import RunModel, Trainer

from .losses import Answers, KTOLoss, PreferenceLoss, kto_loss
from .reference import ReferenceCache

_SAVE_EVERY = 50
"""Batches between writes of the reference's log-probabilities."""


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


class PreferenceTrainer(Trainer):
    """Train the model to prefer chosen answers to rejected ones; see the package."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """A whole run of preference optimization."""

        reference: ReferenceConfig = field(default_factory=ReferenceConfig)
        """Reference model; methods without one ignore it."""

        def validate(self) -> None:
            if not isinstance(self.chosen_loss, PreferenceLoss.Config | KTOLoss.Config):
                raise UserError("--module preference has its own losses, and takes no other one")
            self.parallelism.require_one("context", "pipeline", user="--module preference")
            if self.reference.kind == "adapters_off" and (
                self.reference.path or not any(isinstance(item, LoRA.Config) for item in self.model_converters)
            ):
                raise UserError(
                    "--reference.kind adapters_off is the base model of adapters: use --config dpo_lora, without "
                    "--reference.path"
                )

        def check(self, world_size: int, *, dry_run: bool = False) -> None:
            Trainer.Config.check(self, world_size, dry_run=dry_run)
            if not self.reference.path:
                return
            tokenizer = self.tokenizer.build(path=self.hf_assets_path)
            try:
                internal_source(self.reference.path, self.resolve(tokenizer).model_spec, added=tokenizer.added)
            except UserError as error:
                raise UserError(f"--reference.path: {error}") from error

    config: Config
    loss: Any
    sequences_per_sample = SEQUENCES_PER_SAMPLE
    cache: ReferenceCache | None = None
    """Log-probabilities of the reference, if they are cached."""

    def __init__(self, config: Config):
        self.needs_reference: bool = config.chosen_loss.needs_reference  # type: ignore[attr-defined]
        self.measures_named = self.names_of_measures()
        super().__init__(config)

    def names_of_measures(self) -> tuple[str, ...]:
        names = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
        return (*names, "kl") if self.needs_reference else names

    # --- the reference ----------------------------------------------------------------------------------------------

    @property
    def reference_weights(self) -> str:
        return self.config.reference.path or self.config.checkpoint.initial_load_path

    def build_models(self) -> dict[str, RunModel]:
        config, models = self.config, super().build_models()
        if not self.needs_reference or config.reference.kind == "adapters_off":
            return models
        if config.reference.kind == "cached":
            assert isinstance(config.dataloader, PreferenceDataLoader.Config)
            source = base_weights(self.reference_weights) if self.reference_weights else config.debug.seed
            identity = [source, config.model_spec.model.to_dict(), config.training.mixed_precision_param]
            self.cache = ReferenceCache(identity, config.dataloader.cache_dir, self.ranks)
            if not any(self.cache.missing(batch["answer_keys"]) for batch in self.all_batches()):
                return models
        reference = self.build_other_model(
            config.model_spec, weights=self.reference_weights, offloaded=config.reference.offload
        )
        return {**models, "reference": reference}

    def all_batches(self) -> Iterator[Batch]:
        """Yield the batches of all training and validation data, once and in order."""
        data: list[BaseDataLoader.Config] = [self.config.dataloader, *self.config.validation_dataloaders().values()]
        for config in data:
            in_order = {"sampler": ShuffleSampler.Config(shuffle=False), "num_workers": 0}
            with contextlib.closing(self.build_dataloader(dataclasses.replace(config, **in_order), epochs=1)) as loader:
                yield from loader

    def load_checkpoint(self) -> None:
        super().load_checkpoint()
        if self.cache is not None and "reference" in self.models:
            with self.precision.fixed_weights(), self.mixed_precision():
                self.fill_cache(self.cache)
            del self.models["reference"], self.checkpointer.initial_loads["reference"]
            self.metrics.flops_per_token = sum(model.flops_per_token for model in self.models.values())

    def fill_cache(self, cache: ReferenceCache) -> None:
        """Compute the missing log-probabilities of the reference and write them to disk."""
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for batch in self.all_batches():
            if cache.missing(batch["answer_keys"]):
                keys.append(batch["answer_keys"])
                values.append(self.log_probs("reference", super().post_dataloading_process(batch)).cpu())
            if len(keys) == _SAVE_EVERY:
                cache.add(torch.cat(keys), torch.cat(values))
                keys, values = [], []
        if keys:
            cache.add(torch.cat(keys), torch.cat(values))
        logger.info("reference: the log-probabilities of %d answers are in %s", len(cache.keys), cache.path)

    def identity(self) -> Any:
        identity = super().identity()
        if self.cache is None or "reference" in self.models or not self.reference_weights:
            return identity
        named = {**identity.properties, "weights of reference": base_weights(self.reference_weights)}
        return dataclasses.replace(identity, properties=named)

    # --- the loss ---------------------------------------------------------------------------------------------------

    def post_dataloading_process(self, batch: Batch) -> Batch:
        if self.cache is not None:
            batch = {**batch, "reference": self.cache.look_up(batch["answer_keys"])}
        return super().post_dataloading_process(batch)

    def log_probs(self, model: str, batch: Batch, prefix: str = "") -> Tensor:
        """Return the log-probability of each answer, (B, W, 2); with a `prefix`, of each token of such inputs."""
        tokens_BL, labels_BL = (batch[f"{prefix}{name}"] for name in ("input", "labels"))
        attention, run = batch.get(f"{prefix}attention"), self.models[model]
        values_BL: Tensor = run(tokens_BL, attention, head=token_log_probs, labels_BL=labels_BL)
        return values_BL if prefix else self.sum_answers(values_BL, batch)

    def reference_log_probs(self, batch: Batch, prefix: str = "") -> Tensor:
        """Return what `log_probs` returns for the reference; 0 if the loss has none."""
        if not self.needs_reference:
            return torch.zeros((), device=self.device)
        if self.config.reference.kind == "adapters_off":
            with torch.no_grad(), adapters_off(self.model_parts):
                return self.log_probs("model", batch, prefix)
        cached: Tensor | None = batch.get("reference")
        return cached if cached is not None else self.log_probs("reference", batch, prefix)

    def sum_answers(self, values_BL: Tensor, batch: Batch) -> Tensor:
        """Return the sums of values over the tokens of each answer, (B, W, 2)."""
        n_rows, length = values_BL.shape
        rows_B = torch.arange(n_rows, device=self.device) * length * 2
        sums = values_BL.new_zeros(n_rows * length * 2)
        sums = sums.index_add(0, (batch["sequences"] + rows_B[:, None]).flatten(), values_BL.flatten())
        return sums.view(n_rows, length, 2)

    def answers(self, batch: Batch) -> Answers:
        """Return all answers of a batch, each tensor (B, W, 2)."""
        lengths = self.sum_answers((batch["labels"] != IGNORE_INDEX).float(), batch)
        # The reference first, before the model stores activations for its backward pass.
        reference = self.reference_log_probs(batch)
        return Answers(self.log_probs("model", batch), reference.expand_as(lengths), lengths)

    def compute_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the summed loss of a batch's pairs, and their number."""
        answers = self.answers(batch)
        chosen, rejected = (Answers(*(values[..., side] for values in answers)) for side in (0, 1))
        is_pair = chosen.lengths > 0
        n_pairs = is_pair.sum()
        rewards = [self.loss.rewards(side) for side in (chosen, rejected)]
        margins = rewards[0] - rewards[1]
        measured = (*rewards, margins, (margins > 0).float())
        for name, values in zip(self.measures_named, measured, strict=False):
            self.measure(name, (values * is_pair).sum(), n_pairs)
        if self.needs_reference:
            self.measure("kl", -answers.log_ratios.sum(), answers.lengths.sum())
        return (self.loss(chosen, rejected) * is_pair).sum(), n_pairs


class KTOTrainer(PreferenceTrainer):
    """Train the model on single answers that are desirable or not. The rewards are compared with the divergence of the
    model from the reference, which answers to other prompts of the same global batch estimate."""

    @dataclass(kw_only=True, slots=True)
    class Config(PreferenceTrainer.Config):
        """A whole run of KTO."""

        def validate(self) -> None:
            PreferenceTrainer.Config.validate(self)
            if self.reference.kind == "cached":
                raise UserError("--reference.kind cached has no answers to other prompts, which KTO needs; use model")
            if isinstance(self.dataloader, PreferenceDataLoader.Config) and self.dataloader.packing == "none":
                raise UserError("--dataloader.packing none leaves no answers to other prompts, which KTO needs")

    kl: Tensor
    """Estimate of the divergence in the current global batch."""

    def names_of_measures(self) -> tuple[str, ...]:
        return "rewards/chosen", "rewards/rejected", "kl"

    def next_micro_batches(self, batches: Iterator[Batch]) -> list[Batch]:
        micro_batches = super().next_micro_batches(batches)
        self.kl = self.estimate_kl(micro_batches)
        return micro_batches

    def validation_sums(self, batch: Batch) -> tuple[Tensor, Tensor]:
        self.kl = self.estimate_kl([batch])
        return super().validation_sums(batch)

    @torch.no_grad()
    def estimate_kl(self, batches: Sequence[Batch]) -> Tensor:
        """Return the mean log-ratio of answers to other prompts in the batches of all ranks, at least 0."""
        total, number = torch.zeros(2, device=self.device, dtype=self.statistics_dtype)
        for batch in map(self.post_dataloading_process, batches):
            with self.mixed_precision():
                ratios = self.log_probs("model", batch, "mismatched_") - self.reference_log_probs(batch, "mismatched_")
            total, number = total + ratios.sum(), number + batch["n_mismatched"].sum()
        total, number = sum_over_ranks(torch.stack([total, number]))
        return (total / number.clamp(min=1)).clamp(min=0).float()

    def compute_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the summed loss of a batch's answers, and their number."""
        config, answers = self.loss.config, self.answers(batch)
        is_answer = answers.lengths > 0
        is_desirable = torch.tensor([True, False], device=self.device).expand_as(is_answer)
        rewards = config.beta * answers.log_ratios
        losses = kto_loss(rewards, config.beta * self.kl, is_desirable)
        weights = torch.tensor([config.desirable_weight, config.undesirable_weight], device=self.device)
        n_answers = is_answer.sum()
        for side, name in enumerate(("rewards/chosen", "rewards/rejected")):
            self.measure(name, (rewards * is_answer)[..., side].sum(), is_answer[..., side].sum())
        self.measure("kl", self.kl * n_answers, n_answers)
        return (losses * weights * is_answer).sum(), n_answers
