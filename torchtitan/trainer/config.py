"""`RunConfig`: the complete configuration of a run, and its validation."""

import dataclasses
import functools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol, Self

import torch
import tyro

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.checkpoint.formats import format_of
from torchtitan.components.checkpoint.identity import RunIdentity, identify_content
from torchtitan.components.checkpoint.resume import StartDecision, clean_up_complete
from torchtitan.components.data.base import BaseDataLoader
from torchtitan.components.data.dataloader import PretrainDataLoader
from torchtitan.components.evaluation.validate import Validator
from torchtitan.components.observe.metrics import MetricsProcessor
from torchtitan.components.observe.profiling import Profiler
from torchtitan.components.optim.ema import WeightAverage
from torchtitan.components.optim.loss_scale import LossScale
from torchtitan.components.optim.lr_scheduler import LRScheduler
from torchtitan.components.optim.optimizer import Optimizer, check_early_step
from torchtitan.components.optim.spikes import SpikeGuard
from torchtitan.components.tokenizer import PretrainedTokenizer, Tokenizer
from torchtitan.components.weights.pretrained import check_start
from torchtitan.components.weights.sources import base_weights
from torchtitan.config import (
    ActivationCheckpointConfig,
    CommConfig,
    CompileConfig,
    Configurable,
    DebugConfig,
    ParallelismConfig,
    TrainingConfig,
)
from torchtitan.config.configurable import config_key, field_types, leaves
from torchtitan.config.degrees import check_training
from torchtitan.config.values import is_hidden
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import check_activation_checkpoint
from torchtitan.distributed.compile import (
    check_async_tensor_parallel,
    check_c_compiler,
    check_compile,
)
from torchtitan.distributed.pipeline import PipelinePlan
from torchtitan.protocols import ModelConverter, ModelSpec
from torchtitan.protocols.conversion import (
    check_plain_state,
    converter_records,
    import_path,
    weight_options,
)
from torchtitan.tools import durable
from torchtitan.tools.errors import RunComplete, UserError, os_errors_as, require
from torchtitan.tools.files import check_output_folder
from torchtitan.tools.logging import logger
from torchtitan.trainer.answers import Answers
from torchtitan.trainer.callbacks import Callback
from torchtitan.trainer.chosen_metric import check_measured
from torchtitan.trainer.data_progress import DataProgress
from torchtitan.trainer.early_stopping import EarlyStopping
from torchtitan.trainer.evaluation import Evaluation
from torchtitan.trainer.samples import Samples


@dataclass(frozen=True)
class Preflight:
    """Results of `RunConfig.check`. The Trainer of the same process continues with them."""

    tokenizer: Tokenizer

    start: StartDecision
    """Start of the run, unless its folder changes before the run has locked it."""

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Return itself, since copies of a configuration share the tokenizer."""
        return self


@dataclass(kw_only=True, slots=True)
class RunConfig(Configurable.Config):
    """A whole run. Each field is a section of the command line and of `--config_file`."""

    trains_scores: ClassVar[bool] = False
    """True for trainers of reward models."""

    registered_as: Annotated[str, tyro.conf.Fixed] = ""
    """Package and function that registered this configuration. Part of the run's identity; set by
    the command line."""

    preflight: Annotated[Preflight | None, tyro.conf.Suppress] = None
    """Result of `check`, if the run takes place in the same process. Set by `torchtitan train`."""

    model_spec: Annotated[ModelSpec, tyro.conf.arg(name="")]
    """Model and its loss."""

    loss: Annotated[Configurable.Config | None, tyro.conf.Suppress] = None
    """Training loss. None: the model's (`ModelSpec.loss`). In both cases, its options are
    `--loss.<field>`."""

    hf_assets_path: str = ""
    """Folder with tokenizer files (tokenizer.json or tokenizer.model). Empty: torchtitan's own
    small tokenizer."""

    dump_folder: str = "./outputs"
    """Output folder: metrics.jsonl, config.yaml, checkpoints, traces."""

    tokenizer: Tokenizer.Config = field(default_factory=PretrainedTokenizer.Config)
    """Tokenizer."""

    dataloader: BaseDataLoader.Config = field(default_factory=PretrainDataLoader.Config)
    """Training data."""

    model_converters: list[ModelConverter.Config] = field(default_factory=list)
    """Rewrites of the model, applied in order."""

    optimizer: Optimizer.Config = field(default_factory=Optimizer.Config)
    """Optimizer."""

    lr_scheduler: LRScheduler.Config = field(default_factory=LRScheduler.Config)
    """Learning-rate schedule."""

    training: TrainingConfig = field(default_factory=TrainingConfig)
    """Length, batch sizes and precision of training."""

    spikes: SpikeGuard.Config = field(default_factory=SpikeGuard.Config)
    """Steps to skip, and the response to many of them."""

    loss_scale: LossScale.Config = field(default_factory=LossScale.Config)
    """Factor of the loss, only with --training.mixed_precision_param float16."""

    ema: WeightAverage.Config = field(default_factory=WeightAverage.Config)
    """Exponential moving average of the weights."""

    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    """Degrees of parallelism."""

    activation_checkpoint: ActivationCheckpointConfig = field(
        default_factory=ActivationCheckpointConfig
    )
    """Recomputation of forward results in the backward pass."""

    compile: CompileConfig = field(default_factory=CompileConfig)
    """Compilation."""

    checkpoint: CheckpointManager.Config = field(default_factory=CheckpointManager.Config)
    """Checkpoints."""

    metrics: MetricsProcessor.Config = field(default_factory=MetricsProcessor.Config)
    """Metrics."""

    validator: Validator.Config = field(default_factory=Validator.Config)
    """Validation."""

    profiling: Profiler.Config = field(default_factory=Profiler.Config)
    """Profiling."""

    comm: CommConfig = field(default_factory=CommConfig)
    """Communication."""

    callbacks: list[Callback.Config] = field(
        default_factory=lambda: [
            Evaluation.Config(),
            Answers.Config(),
            Samples.Config(),
            EarlyStopping.Config(),
        ]
    )
    """Further actions around the steps, in order."""

    debug: DebugConfig = field(default_factory=DebugConfig)
    """Reproducibility."""

    @property
    def chosen_loss(self) -> Configurable.Config:
        return self.loss or self.model_spec.loss

    def registered(self, name: str) -> Self:
        """Return a copy for the command line: with its registered name, and its loss as the
        model's."""
        spec = dataclasses.replace(self.model_spec, loss=self.chosen_loss)
        return dataclasses.replace(self, registered_as=name, model_spec=spec, loss=None)

    @classmethod
    def based_on(cls, other: "RunConfig", **sections: object) -> Self:
        """Return this trainer's configuration with the sections of another's, except for the given
        ones."""
        return cls(
            **{
                **{field.name: getattr(other, field.name) for field in dataclasses.fields(other)},
                **sections,
            }
        )

    def to_dict(self) -> dict[str, object]:
        """Return the configuration in the shape of the command line, with separate sections `model`
        and `loss`."""
        document = Configurable.Config.to_dict(dataclasses.replace(self, preflight=None))
        document = {**document.pop("model_spec"), **document, "loss": self.chosen_loss.to_dict()}
        del document["registered_as"]  # `module` and `config` in a configuration file
        del document["preflight"]
        for name in ("model_converters", "callbacks"):
            document[name] = {
                config_key(config): _options_of(config) for config in getattr(self, name)
            }
        return document

    def check(self, world_size: int, *, dry_run: bool = False) -> Preflight:
        """Find the user's mistakes before any process starts, and tokenize the data if needed.
        Return the tokenizer and where the run starts.

        Args:
            world_size: processes of the run.
            dry_run: whether this is a dry run, whose devices may be missing.

        Raises:
            UserError: for the first mistake found.
            RunComplete: if the run has nothing left to train.
        """
        spec = self.model_spec
        check_output_folder(self.dump_folder, self.hf_assets_path)
        if spec.model.scores and not self.trains_scores:
            raise UserError(
                f"{self.hf_assets_path} holds a reward model; train it with --module reward"
            )
        for part in _validated_parts(self):
            part.validate()
        spec.model.check_training()
        self.check_layout(world_size)
        _check_distinct("callbacks", self.callbacks)
        for callback in self.callbacks:
            callback.check_run(self)
        _check_writable(Path(self.dump_folder))
        if self.checkpoint.keep_best:
            option = "--checkpoint.keep_best with best_metric"
            check_measured(self, self.checkpoint.best_metric, option)
        build_tokenizer = functools.cache(lambda: self.tokenizer.build(path=self.hf_assets_path))

        resolve = functools.cache(lambda: self.resolve(build_tokenizer()))

        def identity() -> RunIdentity:
            return resolve().identity(build_tokenizer())

        is_owner_checked = self.checkpoint.enable and not dry_run
        try:
            decision = self.checkpoint.decide_start(
                self.dump_folder, identity if is_owner_checked else None
            )
        except RunComplete:
            clean_up_complete(self.checkpoint, Path(self.dump_folder))
            raise
        if decision.start is None and self.checkpoint.initial_load_in_hf:
            format_of(self.checkpoint.initial_load_path)  # raises without weights
        tokenizer = build_tokenizer()
        if not dry_run:  # whose tokenizer has no folder
            self.dataloader.check_folder(tokenizer)
        resolved = resolve()
        resolved.check_conversion(n_added_tokens=tokenizer.n_added)
        for converter in self.model_converters if not dry_run else ():
            converter.check_device()
        check_start(
            self.checkpoint,
            decision.start,
            resolved.model_spec,
            [converter.build() for converter in resolved.model_converters],
            added=tokenizer.added,
            seed=self.debug.seed,
        )
        if not dry_run:  # which reads no data
            self.dataloader.prepare(tokenizer=tokenizer)
            for validation in self.validation_dataloaders().values():
                validation.validate()
                validation.prepare(tokenizer=tokenizer)
        return Preflight(tokenizer, decision)

    def check_layout(self, world_size: int) -> ParallelDims:
        """Return the degrees. Raise `UserError` if they do not fit the trainer, processes, model or
        batch."""
        self.validate()
        dims = ParallelDims.from_config(self.parallelism, world_size)
        for seq_len in self.training.seq_lens:
            dims.check_fits(self.model_spec.model, seq_len)
        check_training(self.training, self.parallelism, dims.degrees)
        if dims.pp > 1:
            PipelinePlan.from_config(
                self.parallelism, self.model_spec.model, self.training.local_batch_size
            )
        # Only a split backward pass asks, and a class of transformers answers by a trial.
        has_experts = self.parallelism.splits_backward and bool(
            self.model_spec.model.expert_parallel_sizes
        )
        check_activation_checkpoint(
            self.activation_checkpoint, self.compile, self.parallelism, has_experts=has_experts
        )
        check_compile(self.compile)
        check_async_tensor_parallel(self.compile, self.parallelism)
        if dims.divides_batches(self.model_spec.model):
            check_c_compiler(
                "--parallelism.context_parallel_degree above 1 computes with FlexAttention, which"
            )
        optimizer = self.optimizer
        optimizer.check_run(self)
        check_early_step(optimizer, self.training, self.parallelism, dims.dp_degree)
        if self.training.batch_schedule and getattr(self.dataloader, "weight_schedule", None):
            raise UserError(
                "--training.batch_schedule cannot be combined with --dataloader.weight_schedule, "
                "which counts steps of one size"
            )
        self.spikes.check_run(self)
        self.loss_scale.check_run(self)
        self.ema.check_run(self)
        progress = self.data_progress(self.training.resolve_global_batch_size(dims.dp_degree))
        progress.check_schedules()
        warmup, n_tokens = self.lr_scheduler.warmup_steps, progress.tokens_per_step
        has_ratio = self.lr_scheduler.warmup_ratio is not None
        in_steps = self.lr_scheduler.unit == "steps"
        is_long = in_steps or has_ratio or warmup == 0 or warmup >= n_tokens
        least = f"0 tokens (--lr_scheduler.unit), or at least the {n_tokens} of a step"
        require(is_long, "--lr_scheduler.warmup_steps", warmup, least)
        for section in dataclasses.fields(self):
            if getattr(getattr(self, section.name), "offload", False):  # of a frozen model
                dims.require_fsdp(f"--{section.name}.offload")
        return dims

    def data_progress(self, global_batch_size: int, n_samples: int | None = None) -> DataProgress:
        """Return the run's progress at its start; arguments as in `DataProgress`."""
        trainer: Any = self._owner
        return DataProgress(
            self.training, n_samples, global_batch_size, trainer.sequences_per_sample
        )

    def check_conversion(self, *, n_added_tokens: int = 0) -> None:
        """Try the converters on a meta-device model, whose vocabulary size must be known. Warn if
        they leave the rows of added tokens untrained, since the model then never generates these
        tokens. Raise `UserError` if a converter does not apply."""
        if not self.model_converters:
            return
        _check_distinct("model_converters", self.model_converters)
        with torch.device("meta"):
            model = self.model_spec.model.build()
        for config in self.model_converters:
            config.check_run(
                training=self.training, parallelism=self.parallelism, compile=self.compile
            )
            config.build().check_model(model)
        if self.checkpoint.last_save_in_hf:
            check_plain_state(
                self.model_spec.model, [config.build() for config in self.model_converters]
            )
        if (degree := self.parallelism.tensor_parallel_degree) > 1:
            from torchtitan.distributed.tensor_parallel import check_parts

            check_parts(model, self.model_spec.sharding, degree)
        vocab_size = self.model_spec.model.vocab_size
        if n_added_tokens and not any(
            p.requires_grad and vocab_size in p.shape for p in model.parameters()
        ):
            logger.warning(
                "%d tokens are added to the vocabulary (--tokenizer.added_tokens), and the "
                "model_converters freeze its rows: the model will not learn to write them; train "
                "the output head, and the embedding, too",
                n_added_tokens,
            )

    def resolve(self, tokenizer: Tokenizer) -> Self:
        """Return a copy with unset values from the tokenizer and the initial weights, whose files
        may be opened. Raise `UserError` as `resolved_spec`."""
        spec = self.resolved_spec(tokenizer)
        return dataclasses.replace(self, model_spec=spec).with_initial_weights(tokenizer.added)

    def resolved_spec(self, tokenizer: Tokenizer) -> ModelSpec:
        """Return the model with the tokenizer's vocabulary if its own is unset; added tokens
        (`n_added`) enlarge it. Raise `UserError` if the model's vocabulary is too small for the
        tokenizer's files."""
        model = self.model_spec.model
        in_files = tokenizer.vocab_size - tokenizer.n_added
        if model.vocab_size is None or in_files <= model.vocab_size < tokenizer.vocab_size:
            model = dataclasses.replace(model, vocab_size=tokenizer.vocab_size)
        elif model.vocab_size < tokenizer.vocab_size:
            raise UserError(
                f"the tokenizer (--hf_assets_path '{self.hf_assets_path}') has "
                f"{tokenizer.vocab_size} tokens, and the model's vocabulary only "
                f"{model.vocab_size} (--model.vocab_size)"
            )
        return dataclasses.replace(self.model_spec, model=model)

    def with_initial_weights(self, added: range) -> Self:
        """Return a copy whose converters know the initial weights, if it has any; `added`: ids of
        tokens added to the tokenizer. The vocabulary size must be known."""
        path = self.checkpoint.initial_load_path
        if not path:
            return self
        converters = [
            config.with_weights(self.model_spec, path, added) for config in self.model_converters
        ]
        return dataclasses.replace(self, model_converters=converters)

    def identity(self, tokenizer: Tokenizer) -> RunIdentity:
        """Return the properties that must stay the same when the run resumes, after
        `resolve(tokenizer)`; steps, rates, layout and logging may change."""
        properties: dict[str, object] = (
            {"configuration": self.registered_as} if self.registered_as else {}
        )
        properties["trainer"] = import_path(self._owner)
        properties |= leaves({"model": self.model_spec.model.to_dict()})
        described = [config for config in self.model_converters if converter_records([config])]
        properties["model_converters"] = [config_key(config) for config in described]
        for config in described:
            properties |= leaves({"model_converters": {config_key(config): weight_options(config)}})
        properties["base weights"] = base_weights(self.checkpoint.initial_load_path)
        folder = str(tokenizer.folder.resolve()) if tokenizer.folder else "no folder"
        properties["tokenizer"] = identify_content(folder, tokenizer.fingerprint)
        training = self.training
        length = (
            {"steps": training.steps} if training.epochs is None else {"epochs": training.epochs}
        )
        return RunIdentity(properties | self.dataloader.identity(), length)

    def validation_dataloaders(self) -> dict[str, BaseDataLoader.Config]:
        """Return the loader configurations of the validation sets by name; none if validation is
        off or has no data. Raise `UserError` for a dataset that the loader of the training data
        cannot read."""
        loaders: dict[str, BaseDataLoader.Config] = {}
        if not self.validator.enable:
            return loaders
        for name, dataset in self.validator.named_datasets().items():
            if loader := self.dataloader.for_validation(dataset):
                loaders[name] = loader
            elif dataset:
                owner = self.dataloader._owner.__qualname__
                raise UserError(
                    f"--validator.dataset '{dataset}': {owner}.Config.for_validation gives no data "
                    "for it"
                )
        return loaders


def _options_of(config: Configurable.Config) -> dict[str, object]:
    """Return the values of a configuration's options, without fields that the run sets."""
    kind: type = type(config)
    hints = field_types(kind)
    return {name: value for name, value in config.to_dict().items() if not is_hidden(hints[name])}


class _Validated(Protocol):
    def validate(self) -> None: ...


def _validated_parts(config: RunConfig) -> list[_Validated]:
    """Return the parts of a configuration that check their own values, in order."""
    return [
        config.model_spec.model,
        config.chosen_loss,
        config.tokenizer,
        config.dataloader,
        *config.model_converters,
        config.optimizer,
        config.lr_scheduler,
        config.spikes,
        config.loss_scale,
        config.ema,
        config.checkpoint,
        config.metrics,
        config.validator,
        config.profiling,
        *config.callbacks,
        config.training,
        config.activation_checkpoint,
        config.comm,
        config.debug,
    ]


def _check_distinct(section: str, configs: Sequence[Configurable.Config]) -> None:
    keys = [config_key(config) for config in configs]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise UserError(
            f"{section}: {', '.join(twice)} is listed twice; one of a name can be configured"
        )


def _check_writable(folder: Path) -> None:
    with os_errors_as(f"--dump_folder '{folder}' cannot be written", "; use another folder"):
        durable.make_folder(folder)
        tempfile.TemporaryFile(dir=folder).close()
