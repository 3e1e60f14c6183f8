"""The training loop: how a run is built, then the loop, then one step from data to update."""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.components.checkpoint import CheckpointManager, list_checkpoints
from torchtitan.components.checkpoint.identity import RunIdentity
from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.checkpoint.resume import StartDecision, clean_up_complete
from torchtitan.components.data.base import BaseDataLoader, Batch, images_in
from torchtitan.components.data.plan.sampler import StepStatistics
from torchtitan.components.evaluation.validate import CLOCK_METRICS, Validator
from torchtitan.components.losses.loss import IGNORE_INDEX, Measures
from torchtitan.components.observe.metrics import MetricsProcessor
from torchtitan.components.optim.ema import WeightAverage
from torchtitan.components.optim.loss_scale import LossScale
from torchtitan.components.optim.lr_scheduler import LRScheduler
from torchtitan.components.optim.optimizer import Optimizer
from torchtitan.components.optim.spikes import SpikeGuard
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.components.tokenizer.auto_tokenizer import warn_of_different_ids
from torchtitan.config import Configurable
from torchtitan.config.configurable import builds
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.context_parallel import shard_sequences
from torchtitan.distributed.gradients import clip_grad_norm, divide_gradients
from torchtitan.distributed.mixed_precision import MixedPrecision
from torchtitan.distributed.parallelize import set_replica_reduction
from torchtitan.distributed.phases import EXPORT, SAVE, VALIDATION, PhaseClock, mark_gathering
from torchtitan.distributed.pipeline import Pipeline, PipelinePlan, take_stage
from torchtitan.distributed.process_group import (
    destroy_process_group,
    gather_objects,
    init_process_group,
    set_timeouts,
    sum_over_ranks,
    world_size,
)
from torchtitan.distributed.watchdog import Watchdog
from torchtitan.protocols import BaseModel, ModelConverter, ModelSpec
from torchtitan.protocols.conversion import convert_model
from torchtitan.tools.cpu_sums import float32_sums
from torchtitan.tools.device import device_type
from torchtitan.tools.errors import RunComplete, UserError
from torchtitan.tools.folder_lock import FolderLock, lock_folder
from torchtitan.tools.logging import logger
from torchtitan.tools.process import StopRequest
from torchtitan.tools.user_code import exits_as_errors
from torchtitan.trainer import builder, run_state
from torchtitan.trainer.accounting import Accounting
from torchtitan.trainer.agreement import Agreement
from torchtitan.trainer.callbacks import Callback, GarbageCollection, Profiling, RecompileWarning
from torchtitan.trainer.chosen_metric import BestMetric
from torchtitan.trainer.config import RunConfig
from torchtitan.trainer.data_progress import DataProgress
from torchtitan.trainer.dataset_losses import DatasetLosses
from torchtitan.trainer.deferred_results import DeferredResults
from torchtitan.trainer.failures import (
    StepStart,
    around_step,
    failure_kept,
    raise_on_all_ranks,
    save_last_step,
)
from torchtitan.trainer.ledger import Ledger
from torchtitan.trainer.live_view import LiveView
from torchtitan.trainer.load_balance import LoadBalance
from torchtitan.trainer.models import RunModel, run_models, summarize
from torchtitan.trainer.own_methods import declare_own_methods
from torchtitan.trainer.sample_losses import SampleLosses
from torchtitan.trainer.skips import return_to_checkpoint, skip_step
from torchtitan.trainer.step_failure import StepFailure
from torchtitan.trainer.step_result import StepResult, StopReason, log_stop_reason

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful  # takes a second to import


class Trainer(Configurable):
    """Build every part of a run from its configuration, then train. Subclasses override methods
    (docs/extending.md)."""

    @dataclass(kw_only=True, slots=True)
    class Config(RunConfig):
        """A whole run. Each field is a section of the command line and of `--config_file`."""

        @builds(lambda: Trainer)
        def build(self) -> object:
            """Build every part of the run."""

    # Methods that a subclass changes. A class that overrides the method has the value True, and may
    # declare it.
    has_own_loss: ClassVar[bool] = False
    """True with a custom `compute_loss`. The weight of its loss is known only after the forward
    passes."""
    has_own_forward: ClassVar[bool] = False
    """True with a custom `forward` or `compute_loss`."""
    has_own_backward: ClassVar[bool] = False
    """True with a custom `forward_backward_step`, which may read gradients before the step ends."""
    has_own_update: ClassVar[bool] = False
    """True with a custom `update` or `read_result`, which need each step's result at once."""
    has_own_pipeline: ClassVar[bool] = False
    """True with a custom `build_pipeline`."""
    unit: ClassVar[str] = "tokens"
    """Unit that a run counts, in metrics and messages. A model without tokens counts its samples,
    such as `images`: a sample then has the length 1 (`training.seq_len`)."""
    sequences_per_sample: ClassVar[int] = 1
    """Sequences of `training.seq_len` tokens in a sample, for the count of tokens."""
    measures_class: ClassVar[type[Measures]] = Measures
    rates_samples = False
    """True if `step_statistics` has the rewards of samples."""
    measures_named: tuple[str, ...] = ()
    """Names of further means that `compute_loss` records with `measure`, for metrics and
    validation."""

    config: Config
    device: torch.device
    phases: PhaseClock
    folder_lock: FolderLock | None = None
    parallel_dims: ParallelDims
    mesh: DeviceMesh | None
    tokenizer: Tokenizer
    dataloader: BaseDataLoader
    global_batch_size: int
    run_length: DataProgress
    step: int
    n_tokens_seen: int
    converters: list[ModelConverter]
    loss: Any
    pipeline_plan: PipelinePlan | None
    models: dict[str, RunModel]
    """Sharded models of the run, allocated by `init_weights`; the configuration describes
    "model"."""
    model_parts: list[nn.Module]
    """Parts of "model" on this rank; more than one only under pipeline parallelism."""
    optimizer: Optimizer
    lr_scheduler: LRScheduler
    loss_scale: LossScale
    spikes: SpikeGuard
    ema: WeightAverage
    step_start: StepStart | None
    """State before the step in progress; None between steps."""
    is_step_complete: bool
    """False from the beginning of a step until everything that a checkpoint contains is of its
    end."""
    failure: BaseException | None
    """Failure of a user's callback on this rank, which ends the run after the step."""
    early_end: str
    """Reason why the run ends before `total_steps`; empty: it does not."""
    step_failure: StepFailure
    """Failure of this rank's data or loss, which ends the run before the step's update."""
    agreement: Agreement
    """Decides whether ranks that have all failed save together."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        declare_own_methods(cls, Trainer)

    def __init__(self, config: Config):
        super().__init__(config)
        training = config.training
        self.device = self.init_distributed()
        self.phases = PhaseClock(self.device)
        self.lock_folder()
        # Type of counts and sums. float32, the widest type on MPS, counts exactly only up to 2**24
        # tokens.
        self.statistics_dtype = torch.float32 if self.device.type == "mps" else torch.float64
        self.parallel_dims = config.check_layout(world_size())
        self.mesh = self.parallel_dims.build_mesh(self.device.type)
        self.init_random_state()

        self.tokenizer = self.build_tokenizer()
        self.config = config = config.resolve(self.tokenizer)
        self.global_batch_size = training.resolve_global_batch_size(self.parallel_dims.dp_degree)
        self.dataloader = self.build_dataloader(config.dataloader, epochs=training.epochs)
        self.step = self.n_tokens_seen = 0
        self.computed_tokens = 0
        self.run_length = self.build_data_progress()
        self.follow_schedule()
        self.total_steps = self.run_length.last_step(0)

        self.converters = [converter.build() for converter in config.model_converters]
        self.loss = self.build_loss()
        self.step_failure = StepFailure(self)
        self.sample_losses = SampleLosses(
            self.loss,
            self.parallel_dims,
            wanted=self.dataloader.needs_sample_losses,
            has_failed=self.step_failure.has_failed,
        )
        if self.dataloader.needs_sample_rewards and not self.rates_samples:
            raise UserError(
                f"the sampler needs the rewards of answers, which {type(self).__name__} does not "
                "rate; choose another --dataloader.sampler"
            )
        if config.metrics.dataset_losses and self.has_own_loss:
            raise UserError(
                f"--metrics.dataset_losses: {type(self).__name__} computes its own loss, which is "
                "not one of single tokens"
            )
        self.dataset_losses = DatasetLosses(
            self.loss,
            self.dataloader,
            self.parallel_dims,
            wanted=config.metrics.dataset_losses,
            has_failed=self.step_failure.has_failed,
        )
        self.measures = self.measures_class(
            (*self.measures_named, *self.dataset_losses.names),
            device=self.device,
            dtype=self.statistics_dtype,
        )
        # of the step, on this rank
        self.weight = torch.zeros((), device=self.device, dtype=self.statistics_dtype)
        self.pipeline_plan = self.plan_pipeline()
        self.models = run_models(
            self.build_models(),
            config,
            n_processes=self.parallel_dims.world_size,
            has_own_forward=self.has_own_forward,
        )
        main = self.models["model"]
        self.model_parts = main.parts
        self.num_parameters = main.num_parameters
        self.num_trained = main.num_trained
        self.precision = MixedPrecision(getattr(torch, training.mixed_precision_param))
        self.loss_scale = config.loss_scale.build(dtype=self.precision.dtype)
        # whether the step's gradients are divided by the weight of a custom loss
        self.is_divided = False
        self.start: StartDecision | None = None
        self.init_weights()
        self.ema = config.ema.build(model_parts=self.model_parts, follow=self.refresh_converters)
        self.flops_per_token = sum(model.flops_per_token for model in self.models.values())
        self.agreement = self.build_agreement()
        self.pipeline = self.build_pipeline()
        if not self.pipeline:
            for model in self.models.values():
                self.step_failure.watch(model.parts)
        self.optimizer = self.build_optimizer()
        self.lr_scheduler = config.lr_scheduler.build(
            optimizer=self.optimizer, training_steps=self.schedule_length()
        )

        self.spikes = config.spikes.build()
        self.has_data = True
        self.checkpointer = self.build_checkpointer()
        self.checkpoint_loaded = False
        self.is_step_complete, self.step_start = True, None
        self.measured: tuple[int, Mapping[str, float]] = (0, {})
        self.failure = None
        self.early_end = ""
        self.validator = self.build_validator()
        self.stop_request: StopRequest | None = None
        self.metrics = self.build_metrics()
        comm = config.comm
        self.watchdog = Watchdog(
            first_step_seconds=comm.init_timeout_seconds,
            step_seconds=comm.step_timeout_seconds,
            clock=self.phases,
        )
        self.deferred = DeferredResults(self)
        self.callbacks = self.build_callbacks()

    # --- the parts of a run, in the order of `__init__` -------------------------------------------

    def init_distributed(self) -> torch.device:
        """Join the process group, and return this rank's device."""
        return init_process_group(device_type(), self.config.comm)

    def lock_folder(self) -> None:
        """Lock the dump folder on rank 0 against other runs until `close`. Raise `UserError` on
        every rank if it is in use."""

        def lock() -> None:
            self.folder_lock = lock_folder(Path(self.config.dump_folder))

        self.ranks.broadcast_from_rank0(lock)

    def init_random_state(self) -> None:
        """Seed every generator, differently on each rank; make algorithms deterministic if
        requested."""
        self.was_deterministic = torch.are_deterministic_algorithms_enabled()
        builder.init_random_state(self.config.debug, self.rank)

    def build_tokenizer(self) -> Tokenizer:
        config = self.config
        tokenizer: Tokenizer
        if config.preflight:
            tokenizer = config.preflight.tokenizer
        else:
            tokenizer = config.tokenizer.build(path=config.hf_assets_path)
        warn_of_different_ids(tokenizer)
        return tokenizer

    def build_dataloader(
        self, config: BaseDataLoader.Config, *, epochs: int | None
    ) -> BaseDataLoader:
        """Build a loader for this rank's shard of the data."""
        return config.build(
            tokenizer=self.tokenizer,
            seq_len=self.config.training.seq_len,
            local_batch_size=self.config.training.local_batch_size,
            dp_rank=self.parallel_dims.dp_rank,
            dp_world_size=self.parallel_dims.dp_degree,
            seed=self.config.debug.seed,
            epochs=epochs,
            global_batch_size=self.global_batch_size,
        )

    def build_data_progress(self) -> DataProgress:
        """Build the counter that determines the last step, from `training.steps` or
        `training.epochs`."""
        return builder.build_data_progress(
            self.config, self.global_batch_size, self.dataloader.n_samples
        )

    def build_loss(self) -> Any:
        """Build the training loss, a function of hidden states, output weights and `labels_BL`.
        Raise `UserError` for early optimizer steps with a loss whose weight is known only after the
        forward passes."""
        if self.has_own_loss and self.config.optimizer.early_step_in_backward:
            raise UserError(
                "--optimizer.early_step_in_backward applies gradients before they can be divided "
                f"by the weight of the global batch, which {type(self).__name__}.compute_loss "
                "returns; disable it"
            )
        return builder.build_loss(self.config)

    def plan_pipeline(self) -> PipelinePlan | None:
        """Divide the model into pipeline stages; None without pipeline parallelism. Raise
        `UserError` for a trainer with its own forward pass, which a pipeline would not call."""
        if self.parallel_dims.pp == 1:
            return None
        if self.has_own_forward and not self.has_own_pipeline:
            raise UserError(
                f"{type(self).__name__} overrides the forward pass, which a pipeline does not "
                "call; override build_pipeline too, or train without "
                "--parallelism.pipeline_parallel_degree"
            )
        config = self.config
        size = config.training.local_batch_size
        return PipelinePlan.from_config(config.parallelism, config.model_spec.model, size)

    def build_models(self) -> dict[str, RunModel]:
        """Build the run's models by name, sharded and not yet allocated: here "model", which the
        configuration describes. A subclass adds others with `build_other_model`, or as plain
        `nn.Module`s, and may replace it."""
        training = self.config.training
        model = self.build_model()
        num_parameters = model.num_parameters()
        convert_model(
            model, self.converters, frozen_dtype=getattr(torch, training.mixed_precision_param)
        )
        summary = summarize(model, training.seq_len)
        main = RunModel(
            spec=self.config.model_spec,
            parts=self.parallelize(model),
            num_parameters=num_parameters,
            offloaded=training.enable_cpu_offload,
            **summary,
        )
        return {"model": main}

    def build_model(self) -> BaseModel:
        """Build the model on the meta device, in the type of the master weights."""
        return builder.build_model(self.config)

    def parallelize(self, model: BaseModel) -> list[nn.Module]:
        """Return the model's parts on this rank, sharded; a pipeline rank may hold several
        stages."""
        parts: list[nn.Module] = [model]
        if self.pipeline_plan:
            stages = self.pipeline_plan.stages_of_rank(self.parallel_dims.coordinate("pp"))
            parts = [
                take_stage(model, self.pipeline_plan.modules_of_stage(stage)) for stage in stages
            ]
        return [self.shard(part, self.config.model_spec) for part in parts]

    def shard(self, part: nn.Module, spec: ModelSpec, *, offloaded: bool = False) -> nn.Module:
        """Apply all parallelisms except pipelines to a model of `spec`, or a stage of it."""
        training = self.config.training
        sharded = spec.parallelize(
            part,
            parallel_dims=self.parallel_dims,
            mesh=self.mesh,
            sharding=spec.sharding,
            training=dataclasses.replace(training, enable_cpu_offload=True)
            if offloaded
            else training,
            parallelism=self.config.parallelism,
            activation_checkpoint=self.config.activation_checkpoint,
            compile=self.config.compile,
        )
        mark_gathering(sharded, self.phases)
        return sharded

    def build_other_model(
        self,
        spec: ModelSpec,
        *,
        weights: str = "",
        trained: bool = False,
        saved: bool = False,
        offloaded: bool = False,
    ) -> RunModel:
        """Build an additional model, sharded like the main one.

        Args:
            spec: its specification. A vocabulary size of None is the main model's.
            weights: a checkpoint folder in any format. Empty: initialize with `debug.seed`.
            trained: share the optimizer and the schedule. Otherwise the model is frozen, and has
                the type that FSDP computes in.
            saved: write it to checkpoints, which a trained model needs.
            offloaded: let FSDP keep the weights in CPU memory.

        Raises:
            UserError: under pipeline parallelism, and for offloading without FSDP.
        """
        assert saved or not trained, "the weights of a trained model would be lost"
        spec = builder.with_vocabulary_of(spec, self.config.model_spec)
        model = builder.build_other_model(spec, self.config, self.parallel_dims, trained=trained)
        if offloaded:
            self.parallel_dims.require_fsdp("offloading a model")
        num_parameters = model.num_parameters()
        summary = summarize(model, self.config.training.seq_len)
        return RunModel(
            spec=spec,
            parts=[self.shard(model, spec, offloaded=offloaded)],
            weights=weights,
            saved=saved,
            offloaded=offloaded or self.config.training.enable_cpu_offload,
            num_parameters=num_parameters,
            **summary,
        )

    def decide_start(self) -> StartDecision:
        """Decide where the run starts, now that its folder is locked, unless `RunConfig.check` has
        decided and the folder is unchanged. The checkpointer continues with the decision."""
        config, dump_folder = self.config.checkpoint, self.config.dump_folder
        preflight = self.config.preflight

        def decide() -> StartDecision:
            folder = config.resolve_folder(dump_folder)
            # In a store that cannot rename, the names do not tell which checkpoints are complete.
            if preflight and folder.can_rename and preflight.start.still_holds(folder):
                return preflight.start
            return config.decide_start(dump_folder)

        return self.ranks.broadcast_from_rank0(decide)

    def init_weights(self) -> None:
        """Allocate the parameters. Initialize a model unless there are weights to load: then
        `load_checkpoint` draws only the values that it does not read."""
        config = self.config
        self.start = self.decide_start()
        for name, model in self.models.items():
            model.allocate(self.device)
            has_initial_weights = name == "model" and config.checkpoint.initial_load_path
            if not (self.start.start or model.weights or has_initial_weights):
                model.initialize(config.debug.seed)

    def build_agreement(self) -> Agreement:
        """Build the meeting of ranks that have all failed."""
        return Agreement(self.ranks)

    def build_pipeline(self) -> Pipeline | None:
        """Build the schedule of the pipeline's stages on this rank; None without pipeline
        parallelism."""
        if self.pipeline_plan is None:
            return None
        assert self.mesh is not None
        stage = cast(BaseModel, self.model_parts[0])
        return Pipeline(
            self.pipeline_plan,
            self.model_parts,
            mesh=self.mesh["pp"],
            device=self.device,
            hidden=builder.stage_input(self.config, self.parallel_dims, stage),
            head=self.step_failure.guarded(self.loss),
        )

    def build_optimizer(self) -> Optimizer:
        """Build the optimizer of all trained models; an additional model's name prefixes its
        parameters."""
        others = {
            name: model.parts
            for name, model in self.models.items()
            if name != "model" and model.num_trained
        }
        named = [nn.ModuleDict({name: part}) for name, parts in others.items() for part in parts]
        all_names = self.models["model"].trained_names if self.pipeline_plan else None
        optimizer: Optimizer = self.config.optimizer.build(
            model_parts=[*self.model_parts, *named], all_names=all_names
        )
        return optimizer

    def build_checkpointer(self) -> CheckpointManager:
        """Build the checkpointer of everything that a resumed run needs."""
        return run_state.build_checkpointer(self)

    def build_validator(self) -> Validator | None:
        """Build the validator if validation is on and has data."""
        if not (data := self.config.validation_dataloaders()):
            if self.config.validator.enable:
                logger.warning(
                    "no validation: the training data has no validation split; set "
                    "--validator.dataset"
                )
            elif self.config.validator.dataset:
                logger.warning(
                    "no validation: --validator.dataset is set, but validation is off; set "
                    "--validator.enable"
                )
            return None
        return self.config.validator.build(
            model_parts=self.trained_parts,
            dataloaders={
                name: self.build_dataloader(config, epochs=1) for name, config in data.items()
            },
            tokenizer=None if self.has_own_loss else self.tokenizer,
            batches_per_step=self.gradient_accumulation_steps,
            sums_of_batch=self.validation_sums,
            loss=None if self.has_own_loss else self.loss,
            local_addend=self.local_addend,
            measures=self.measures,
            counts_bytes=self.parallel_dims.is_batch_leader,
        )

    def build_metrics(self) -> MetricsProcessor:
        return self.config.metrics.build(
            dump_folder=self.config.dump_folder,
            device=self.device,
            compute_dtype=getattr(torch, self.config.training.mixed_precision_param),
            flops_per_token=self.flops_per_token,
            total_steps=self.total_steps,
            world_size=self.parallel_dims.world_size,
            rank=self.rank,
            run_config=self.config.to_dict(),
            unit=self.unit,
        )

    def build_callbacks(self) -> list[Callback]:
        """Build the callbacks of every run, then the configuration's `callbacks`, except those that
        are off."""
        kinds = (
            Accounting,
            LiveView,
            Ledger,
            LoadBalance,
            RecompileWarning,
            Profiling,
            GarbageCollection,
            BestMetric,
        )
        configs = [*(kind.Config() for kind in kinds), *self.config.callbacks]
        return [config.build(trainer=self) for config in configs if config.is_on(self)]

    # --- the loop ---------------------------------------------------------------------------------

    def load_checkpoint(self) -> None:
        """Load the checkpoint that the configuration selects; `train` calls this if necessary.

        Raises:
            UserError: if a named checkpoint cannot be loaded, or a checkpoint does not fit this
                run.
            RunComplete: if this run has ended in a checkpoint that it cannot resume from.
        """
        if self.checkpoint_loaded:
            return
        self.step = self.checkpointer.load()
        for name, model in self.models.items():
            loaded = (
                self.checkpointer.states[name].state_dict()
                if name in self.checkpointer.loaded
                else ()
            )
            model.initialize(self.config.debug.seed, loaded=loaded)
        if "ema" not in self.checkpointer.loaded:
            self.ema.reset()
        self.checkpoint_loaded = True
        self.update_length()
        n_samples = self.run_length.samples_read_at(self.total_steps, self.step, self.n_tokens_seen)
        self.dataloader.check_repetitions(n_samples)
        for converter in self.converters:
            converter.post_init_hook(self.model_parts)

    def update_length(self) -> None:
        """Count the steps that the remaining data takes, for example if the batch size has
        changed."""
        self.follow_schedule()
        self.total_steps = self.metrics.total_steps = self.run_length.last_step(self.step)
        self.lr_scheduler.set_length(self.schedule_length(), step_size=self.schedule_step)

    def follow_schedule(self) -> None:
        """Set the sizes of the next global batch, its windows, and the next step of the
        learning-rate schedule."""
        self.run_length.follow_schedule(self.step, self.n_tokens_seen)
        self.global_batch_size = self.run_length.global_batch_size
        samples_per_pass = self.config.training.local_batch_size * self.parallel_dims.dp_degree
        self.gradient_accumulation_steps = self.global_batch_size // samples_per_pass
        self.tokens_per_step = self.run_length.tokens_per_step
        self.schedule_step = 1 if self.config.lr_scheduler.unit == "steps" else self.tokens_per_step
        if self.config.training.seq_len_schedule:
            self.dataloader.set_seq_len(self.run_length.seq_len, self.config.training.seq_lens[-1])

    def schedule_length(self) -> int:
        """Return the run's length in the learning-rate schedule's unit."""
        if self.config.lr_scheduler.unit == "steps":
            return self.total_steps
        return self.run_length.tokens_at(self.total_steps, self.step, self.n_tokens_seen)

    def train(self) -> None:
        """Resume if possible, then train to the end or until asked to stop. Log if nothing is left
        to train."""
        with contextlib.closing(self.metrics):
            try:
                self.load_checkpoint()
            except RunComplete as complete:
                if self.rank == 0:
                    clean_up_complete(self.config.checkpoint, Path(self.config.dump_folder))
                logger.info("%s", complete)
                return
            self.describe_run()
            if self.should_continue_training():
                self.checkpointer.check_space(self.step, self.total_steps)
            self.metrics.start(self.step)
            with exits_as_errors("the run"):
                try:
                    self.run_to_end()
                except BaseException as error:
                    self.save_last_step(error)
                    raise

    def run_to_end(self) -> None:
        """Take the remaining steps, and save the last one."""
        if self.validator and self.config.validator.at_start and self.step == 0:
            self.validate()
        with self.watchdog:
            with contextlib.ExitStack() as stack:
                training = self.config.training
                types = {training.dtype, training.mixed_precision_param}
                if self.device.type == "cpu" and types != {"float32"}:
                    stack.enter_context(float32_sums())
                for callback in self.callbacks:
                    stack.enter_context(callback.around_run())
                reason = self.run_steps()
            self.finish(reason)
        raise_on_all_ranks(self.failure)

    def run_steps(self) -> StopReason:
        """Take steps until the run ends, and return the reason."""
        batches = iter(self.dataloader)
        comm, first_step = self.config.comm, self.step + 1
        # Collectives must time out after the watchdog, which can name the hanging rank.
        set_timeouts(comm.init_timeout_seconds + comm.naming_seconds)
        while self.should_continue_training():
            if self.spikes.is_return_due:
                return_to_checkpoint(self)
            step = self.step + 1
            self.step_start = StepStart.of(self) if self.config.checkpoint.saves else None
            self.is_step_complete = False
            with self.watchdog.step(step), contextlib.ExitStack() as stack:
                for callback in self.callbacks:
                    stack.enter_context(around_step(self, callback, step))
                self.prepare_converters(step)
                self.lr_scheduler.check_step(self.schedule_step)
                outcome = self.train_step(batches)
                self.step_failure.check_step()
            if step == first_step:
                set_timeouts(comm.train_timeout_seconds)
                self.stop_request = StopRequest()  # before, a signal ends the run at once
            if outcome.data_exhausted:
                self.is_step_complete, self.step_start = True, None
                # no step was taken, so validate as in the last step
                self.prepare_converters(self.step)
                return "data ended"
            self.complete_step(outcome)
            if (
                outcome is not self.deferred.pending
                and outcome.stop_requested
                and self.should_continue_training()
            ):
                return "stopped"
        return "ended early" if self.early_end else "completed"

    def should_continue_training(self) -> bool:
        """Return whether to take another step."""
        return self.step < self.total_steps and not self.early_end

    def end_early(self, reason: str) -> None:
        """End the run after the present step, on all ranks alike; `reason` is logged."""
        self.early_end = reason

    def prepare_converters(self, step: int) -> None:
        """Run the converters' preparation of the model for a step."""
        for converter in self.converters:
            converter.pre_step_hook(self.model_parts, step)

    # --- one step, from data to update ------------------------------------------------------------

    def train_step(self, batches: Iterator[Batch]) -> StepResult:
        """Take one optimizer step over the next global batch."""
        self.optimizer.zero_grad()
        self.watchdog.phase("data")
        return self.update(self.next_micro_batches(batches))

    def next_micro_batches(self, batches: Iterator[Batch]) -> list[Batch]:
        """Return this rank's part of the next global batch; shorter at the end of the data, and
        empty after it."""
        micro_batches = self.read_batches(batches)
        self.has_data = bool(micro_batches) and not self.dataloader.exhausted
        return self.take_batches(micro_batches)

    def read_batches(self, batches: Iterator[Batch]) -> list[Batch]:
        """Read this rank's part of the next global batch."""
        n_batches = self.gradient_accumulation_steps

        def read() -> list[Batch]:
            self.skip_data(batches)
            return list(itertools.islice(batches, n_batches))

        with self.metrics.timing_data():
            return self.step_failure.or_batches_before(read, n_batches)

    def take_batches(self, micro_batches: list[Batch]) -> list[Batch]:
        """Count this rank's part of a step's global batch, tell callbacks of it, and return it."""
        self.computed_tokens = 0
        if any("images" in batch for batch in micro_batches):
            self.count_images(micro_batches)
        self.notify("on_batches", micro_batches)
        if self.failure and world_size() == 1:
            raise self.failure
        return micro_batches

    def count_images(self, micro_batches: list[Batch]) -> None:
        """Count the images of a step over all ranks, and its tokens, since rows with images may end
        with their longest sample."""
        inputs = [batch["images"] for batch in micro_batches]
        models: list[Any] = [part for model in self.models.values() for part in model.parts]
        local = (
            sum(batch["input"].numel() for batch in micro_batches),
            sum(one.n_images for one in inputs),
            sum(one.n_tokens for one in inputs),
            sum(part.image_flops(one) for part in models for one in inputs),
        )
        ranks = gather_objects(local if self.parallel_dims.is_batch_leader else (0, 0, 0, 0))
        n_tokens, n_images, n_image_tokens, n_flops = map(sum, zip(*ranks, strict=True))
        self.computed_tokens = n_tokens
        self.metrics.count_images(n_images, n_image_tokens)
        self.metrics.count_flops(n_flops)

    def skip_data(self, batches: Iterator[Batch]) -> None:
        """Read and discard the next global batches if `training.skip_data` names them."""
        first = self.run_length.data_step + 1
        while self.run_length.next_is_skipped:
            for _ in itertools.islice(batches, self.gradient_accumulation_steps):
                pass
            self.run_length.count_batch()
        if (last := self.run_length.data_step) >= first:
            logger.info("skipping the data of steps %d to %d (--training.skip_data)", first, last)

    def update(self, micro_batches: list[Batch]) -> StepResult:
        """Update the weights once with this rank's part of a global batch."""
        self.watchdog.phase("counting tokens")  # waits for the data of the other ranks
        n_tokens = self.count_valid_tokens(micro_batches)
        self.watchdog.phase("forward and backward")
        loss = torch.zeros((), device=self.device)
        with self.precision.fixed_weights():
            for index, batch in enumerate(micro_batches, start=1):
                self.reduce_over_replicas(index == len(micro_batches))
                with (
                    self.step_failure.completing(),
                    self.sample_losses.of(batch),
                    self.dataset_losses.of(batch, self.measures),
                ):
                    processed = self.step_failure.or_batch_before(
                        partial(self.post_dataloading_process, batch)
                    )
                    loss += self.forward_backward_step(processed, n_tokens)
        if self.has_own_loss:
            n_tokens = self.divide_by_weight(loss)
        self.watchdog.phase("gradient clipping")
        self.loss_scale.unscale(self.trained_parameters())
        grad_norm = self.clip_gradients()
        self.watchdog.phase("reading the outcome")
        outcome = self.deferred.result(micro_batches, loss, grad_norm, n_tokens)
        if outcome.skip is None and not outcome.is_taken:
            self.skip_step(outcome, micro_batches)
        elif not outcome.data_exhausted:
            if self.step == 0:
                self.optimizer.warn_of_idle_parameters()
            self.watchdog.phase("optimizer step")
            self.optimizer.step(outcome.skip)
            self.follow_weights()
        if self.loss_scale.is_on and not outcome.data_exhausted:
            self.loss_scale.update(is_finite=math.isfinite(outcome.grad_norm))
        return outcome

    def count_valid_tokens(self, micro_batches: list[Batch]) -> Tensor:
        """Return the divisor of the summed loss on the device: the global batch's valid tokens; 1
        for a custom loss."""
        local = 0
        # one of the ranks with the same samples
        if not self.has_own_loss and self.parallel_dims.is_batch_leader:
            local = sum(int((batch["labels"] != IGNORE_INDEX).sum()) for batch in micro_batches)
        # `full` runs on the device; copying a host tensor there would wait for it.
        counted = torch.full((), local, device=self.device, dtype=self.statistics_dtype)
        return torch.ones_like(counted) if self.has_own_loss else sum_over_ranks(counted)

    def post_dataloading_process(self, batch: Batch) -> Batch:
        """Return the batch on the device; under context parallelism, this rank's tokens, unless the
        model divides them itself. Raise `UserError` for positions, which no model would read, so
        that documents would attend to each other."""
        if "positions" in batch:
            raise UserError(
                "a batch of the loader has `positions`; replace them with `attention`, "
                "AttentionMetadata.from_positions(positions)"
            )
        on_device = {
            name: value.to(self.device, non_blocking=True) for name, value in batch.items()
        }
        if not self.parallel_dims.divides_batches(self.config.model_spec.model):
            return on_device
        return shard_sequences(
            on_device, self.parallel_dims.sequence_shards, self.parallel_dims.coordinate("cp")
        )

    def reduce_over_replicas(self, enabled: bool) -> None:
        """Make replicas add up gradients in the last backward pass of a step only, if no method
        reads them earlier. Custom losses may skip a model in that pass, so that its gradients
        would never be added up."""
        has_own_passes = self.has_own_backward or self.has_own_forward
        if self.parallel_dims.dp_replicate > 1 and not has_own_passes:
            for part in self.model_parts:
                set_replica_reduction(part, enabled)

    def forward_backward_step(self, batch: Batch, n_tokens: Tensor) -> Tensor:
        """Add a micro-batch's gradients; return its part of the global batch's loss, divided by
        `n_tokens`."""
        # Gradients are averaged over the ranks that see different tokens, but the loss is a sum
        # over them.
        factor = self.parallel_dims.gradient_degree * self.loss_scale.value

        def scaled(summed_loss: Tensor) -> Tensor:
            # Divide by at least 1; without valid tokens, loss and gradients stay 0.
            return summed_loss / n_tokens.clamp(min=1).float() * factor

        if self.pipeline:
            summed = self.pipeline.forward_backward(batch, scaled)
            self.step_failure.end_backward()
            return summed / factor
        loss: Tensor | None = None
        with self.mixed_precision(), self.step_failure.completing():
            self.watchdog.phase("forward")
            summed_loss, weight = self.compute_loss(batch)
            loss = scaled(summed_loss)
            self.watchdog.phase("backward")
            loss.backward()
            self.step_failure.end_backward()
            if self.has_own_loss:
                self.weight += self.local_addend(weight)
        return torch.zeros((), device=self.device) if loss is None else loss.detach() / factor

    def mixed_precision(self) -> contextlib.AbstractContextManager[None]:
        """Return the context for forward and backward passes of the models."""
        if self.mesh is not None:
            return contextlib.nullcontext()  # FSDP and DDP cast the weights
        return self.precision.of(*(part for model in self.models.values() for part in model.parts))

    @property
    def loss_unit(self) -> str:
        """Unit of the logged loss; empty: a number of the method, such as DPO's."""
        return "" if self.has_own_forward else getattr(self.loss, "unit", "")

    def compute_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the summed loss of a batch and its weight: here, the number of valid tokens.

        Training and validation divide the sum of the losses over the global batch by the sum of the
        weights. A subclass may compute any loss from the result of `post_dataloading_process`. All
        ranks of a tensor-parallel group must return the same values.
        """
        return self.forward(batch), (batch["labels"] != IGNORE_INDEX).sum()

    def forward(self, batch: Batch) -> Tensor:
        """Return the loss of a batch, summed over its valid tokens, in full on every
        tensor-parallel rank."""
        if self.pipeline:
            return self.pipeline.forward(batch)
        (model,) = self.model_parts
        loss: Tensor = model(
            batch["input"],
            batch.get("attention"),
            head=self.loss,
            labels_BL=batch["labels"],
            **images_in(batch),
        )
        return loss

    def measure(self, name: str, total: Tensor, weight: Tensor) -> None:
        """Add a batch's sum and weight (scalars) to a mean in `measures_named`; call this in
        `compute_loss`."""
        self.measures.add(name, self.local_addend(total), self.local_addend(weight))

    def divide_by_weight(self, loss: Tensor) -> Tensor:
        """Divide gradients and `loss`, in place, by the weight of the global batch, and return the
        weight."""
        weight = sum_over_ranks(self.weight)
        self.weight = torch.zeros_like(self.weight)
        # if the weight is 0, loss and gradients stay 0
        divisor = torch.where(weight == 0, 1, weight)
        divide_gradients(self.trained_parameters(), divisor)
        self.is_divided = True
        loss /= divisor.to(loss.dtype)
        return weight

    def clip_gradients(self) -> Tensor:
        """Scale gradients down to `training.max_norm`, and return their total norm before that,
        over all ranks."""
        if self.config.optimizer.early_step_in_backward:
            return self.optimizer.early_grad_norm()
        clip = self.pipeline.clip_grad_norm if self.pipeline else clip_grad_norm
        return clip(self.trained_parameters(), self.config.training.max_norm)

    def read_result(self, loss: Tensor, grad_norm: Tensor, n_tokens: Tensor) -> StepResult:
        """Sum the loss and requests to stop over ranks, and read all values at once. Raise
        `SharedError` if the data or the loss of a rank has failed."""
        outcome = self.result_of(self.sum_result(loss, grad_norm, n_tokens).tolist())
        if outcome.failed:
            self.step_failure.end_run()
        return outcome

    def sum_result(self, loss: Tensor, grad_norm: Tensor, n_tokens: Tensor) -> Tensor:
        """Return the numbers of a step for `result_of` on the device: tokens, loss, gradient norm,
        numbers of ranks that want to stop, have data, and failed (`RANKS_FAILED`), and measures."""
        if self.has_own_loss and not self.is_divided:
            raise UserError(
                f"{type(self).__name__} overrides train_step and compute_loss, so the step must "
                "call forward_backward_step and, after the last backward pass, "
                "divide_by_weight(loss)"
            )
        self.is_divided = False
        if not self.loss_scale.is_unscaled:
            raise UserError(
                f"{type(self).__name__} overrides train_step or update, and does not divide the "
                "gradients by the loss scale of --training.mixed_precision_param float16; set "
                "bfloat16 or float32"
            )
        stop = self.failure is not None or (
            self.stop_request is not None and self.stop_request.received
        )
        failed = self.step_failure.has_failed()
        flags = [
            torch.full((), float(flag), device=self.device)
            for flag in (stop, self.has_data, failed)
        ]
        # The norm of rank 0, since the last bit may decide whether a step is a spike, on all ranks
        # alike.
        norm = grad_norm if self.rank == 0 else torch.zeros_like(grad_norm)
        local = [
            value.to(self.device, self.statistics_dtype)
            for value in (self.local_addend(loss), norm, *flags)
        ]
        sums = sum_over_ranks(torch.cat([torch.stack(local), self.measures.take()]))
        return torch.cat([n_tokens.to(self.device, self.statistics_dtype).reshape(1), sums])

    def result_of(self, values: list[float]) -> StepResult:
        tokens, total_loss, total_norm, n_to_stop, n_with_data, n_failed, *measured = values
        return StepResult(
            loss=total_loss,
            grad_norm=total_norm,
            stop_requested=n_to_stop > 0,
            data_exhausted=n_with_data == 0 and tokens == 0,
            measures=self.measures.means(measured),
            spike=self.spikes.spike(total_loss, total_norm),
            failed=n_failed > 0,
            step=self.step + 1,
            data_step=self.run_length.data_step + 1,
        )

    def skip_step(self, outcome: StepResult, micro_batches: list[Batch]) -> None:
        """Name a step that is not taken, or end the run. Weights have changed only if the optimizer
        steps early."""
        skip_step(self, outcome, micro_batches)

    def follow_weights(self) -> None:
        """Let converters act after an optimizer step, and follow the new weights."""
        for converter in self.converters:
            converter.post_optimizer_hook(self.model_parts)
        self.refresh_converters()

    def refresh_converters(self) -> None:
        """Refresh converter state derived from the weights, which other weights have replaced."""
        for converter in self.converters:
            converter.refresh_hook(self.model_parts)

    def local_addend(self, loss: Tensor) -> Tensor:
        """Return this rank's term in a sum over all ranks: 0 if another rank contributes the same
        loss."""
        return loss if self.parallel_dims.is_tensor_leader else torch.zeros_like(loss)

    def validation_sums(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return this rank's part of a batch's summed loss and weight; the batch is as the loader
        returned it."""
        with self.mixed_precision():
            loss, weight = self.compute_loss(self.post_dataloading_process(batch))
        # all ranks of a pipeline have the labels
        is_counted = self.parallel_dims.coordinate("pp") == 0
        counted = self.local_addend(weight) if is_counted else torch.zeros_like(weight)
        return self.local_addend(loss), counted

    # --- after a step -----------------------------------------------------------------------------

    def complete_step(self, outcome: StepResult) -> None:
        """Count the step and use its result, then run callbacks, validation and checkpoint."""
        self.step += 1
        self.run_length.count_batch()
        self.n_tokens_seen += self.tokens_per_step
        self.notify("on_step", outcome)
        self.metrics.count_tokens(self.computed_tokens or self.tokens_per_step)
        progress = {"lr": self.lr_scheduler.lr, "n_tokens_seen": self.n_tokens_seen}
        self.deferred.when_known(outcome, partial(self.use_result, outcome, self.step, **progress))
        n_units = (
            self.schedule_step if self.config.spikes.advance_schedule or outcome.is_taken else 0
        )
        self.follow_schedule()
        self.lr_scheduler.step(n_units, step_size=self.schedule_step)
        self.notify("after_step", outcome)
        self.is_step_complete, self.step_start = True, None
        if self.failure and world_size() == 1:  # several ranks stop together, after the next step
            raise self.failure
        last = not self.should_continue_training()
        validation_loss = (
            self.validate()
            if self.validator and self.validator.is_due(self.step, last=last)
            else None
        )
        last = not self.should_continue_training()  # the validation may have ended the run
        self.save(last=last, validation_loss=validation_loss)

    def use_result(self, outcome: StepResult, step: int, **progress: object) -> None:
        """Log a step's numbers if due, and tell them to spike guard, averages and loader if it was
        taken."""
        numbers = {"loss": outcome.loss, "grad_norm": outcome.grad_norm}
        skipped = {"skipped_steps": self.spikes.n_skipped} if self.spikes.n_skipped else {}
        scale = {"loss_scale": self.loss_scale.value} if self.loss_scale.is_on else {}
        measured: dict[str, Any] = {**progress, **outcome.measures, **skipped, **scale}
        self.metrics.log_step(step, loss=outcome.loss, grad_norm=outcome.grad_norm, **measured)
        statistics = self.step_statistics(step, **numbers)
        self.dataset_losses.check_step()
        if outcome.is_taken:
            self.spikes.record(**numbers)
            self.ema.update()
            self.dataloader.observe(statistics)

    def step_statistics(self, step: int, **numbers: float) -> StepStatistics:
        """Return what the loader's samplers observe of a step, equal on all ranks."""
        return self.sample_losses.statistics(step, **numbers)

    def notify(self, method: str, *args: object) -> None:
        """Call a method of all callbacks. A failure of a user's callback ends the run once the step
        is complete."""
        for callback in self.callbacks:
            with failure_kept(self, callback):
                getattr(callback, method)(*args)

    def report_measured(self, numbers: Mapping[str, float]) -> None:
        """Tell the callbacks the numbers of a validation or evaluation, equal on all ranks, by
        their names in the metrics; checkpoints of this step may be chosen by them."""
        step, known = self.measured
        self.measured = (self.step, {**(known if step == self.step else {}), **numbers})
        self.notify("on_measured", numbers)

    def validate(self) -> float:
        """Validate outside of the training time, log the result, and return the loss."""
        assert self.validator is not None
        with (
            self.metrics.exclude(),
            self.phases.during(VALIDATION),
            self.evaluated_weights(averaged=self.config.ema.for_validation),
            self.precision.fixed_weights(),
        ):
            measured = self.validator.validate()
            self.metrics.log_validation(self.step, **measured)
        self.report_measured(
            {name: value for name, value in measured.items() if name not in CLOCK_METRICS}
        )
        return measured["validation_loss"]

    @contextlib.contextmanager
    def evaluated_weights(self, *, averaged: bool = False) -> Iterator[None]:
        """Replace the weights in the block by those that the optimizer evaluates, and by the
        averages of `--ema.decay` if they are `averaged`."""
        with self.optimizer.evaluating(self.refresh_converters), self.ema.applied(averaged):
            yield

    def save(self, *, last: bool, stopped: bool = False, validation_loss: float | None) -> None:
        """Save a checkpoint if due, outside of the training time; averages of weights replace these
        in an export."""
        step, numbers = self.measured
        found: dict[str, Any] = {
            "validation_loss": validation_loss,
            "measured": numbers if step == self.step else {},
        }
        if not self.checkpointer.is_due(self.step, last=last or stopped, **found):
            return
        self.deferred.settle()
        kind = self.config.checkpoint.last_kind if last else "full"
        exports, phase = kind != "full", EXPORT if kind == "huggingface" else SAVE
        evaluated = self.evaluated_weights(averaged=exports and self.config.ema.for_export)
        with self.metrics.exclude(), self.phases.during(phase), evaluated:
            self.notify("before_save")
            self.metrics.sync()
            self.checkpointer.save(self.step, last=last, stopped=stopped, **found)

    def finish(self, reason: StopReason) -> None:
        """Report and save outstanding results, and log how the run ended."""
        self.deferred.settle()
        self.metrics.flush()
        self.notify("on_end", reason)
        validating = (
            self.validator
            and reason == "data ended"
            and not self.validator.is_due(self.step, last=False)
        )
        validation_loss = self.validate() if validating else None
        stopped = reason == "stopped"
        self.save(last=not stopped, stopped=stopped, validation_loss=validation_loss)
        with self.phases.during(SAVE):
            self.checkpointer.wait()
        log_stop_reason(
            reason, self.step, self.total_steps, self.config.checkpoint, early_end=self.early_end
        )
        self.release_signals()

    def save_last_step(self, error: BaseException) -> None:
        """Save the last complete step before an error of the user's code or input ends the run, if
        possible."""
        save_last_step(self, error)

    # --- state and identity -----------------------------------------------------------------------

    def state_dict(self) -> dict[str, object]:
        """Return the loop's own state. A subclass adds the state that it needs to resume."""
        return {
            "step": self.step,
            "n_tokens_seen": self.n_tokens_seen,
            **self.run_length.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.step, self.n_tokens_seen = state_dict["step"], state_dict["n_tokens_seen"]
        self.run_length.load_state_dict(state_dict)

    def states(self) -> "dict[str, Stateful]":
        """Return the states that checkpoints of the run contain, by name."""
        return run_state.states_of(self, self.models)

    def initial_loads(self) -> dict[str, Callable[[], None]]:
        """Return model name → function that loads its initial weights, also when resuming if
        checkpoints lack them."""
        return run_state.initial_loads(self)

    def identity(self) -> RunIdentity:
        """Return the properties that must stay the same when the run resumes."""
        return run_state.identify(self.config, self.tokenizer, self.models)

    @property
    def trained_parts(self) -> list[nn.Module]:
        """This rank's parts of all trained models."""
        return [part for model in self.models.values() if model.num_trained for part in model.parts]

    def trained_parameters(self) -> list[nn.Parameter]:
        """Return this rank's parameters of all trained models."""
        return [parameter for part in self.trained_parts for parameter in part.parameters()]

    @property
    def ranks(self) -> Ranks:
        """All ranks of the run."""
        return Ranks(dist.group.WORLD if dist.is_initialized() else None)

    @property
    def rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    def describe_run(self) -> None:
        """Log the model and data of the run, and any checkpoints in its folder that it will not
        use."""
        folder = self.checkpointer.folder
        if not self.config.checkpoint.enable and list_checkpoints(folder):
            logger.warning(
                "%s contains checkpoints, which are ignored without --checkpoint.enable", folder
            )
        elif not self.config.checkpoint.enable:
            logger.info("the run saves no checkpoints and cannot resume; --checkpoint.enable does")
        if self.early_end:
            logger.info("training has ended after step %d: %s", self.step, self.early_end)
            return
        if not self.should_continue_training():
            logger.info("training is already complete at step %d (--training.steps)", self.step)
            return
        spec = self.config.model_spec
        counts = f" in the plain model, {self.num_trained:,} trained in the converted model"
        # this count excludes adapters
        trained = counts if self.num_trained < self.num_parameters else ""
        dims = self.parallel_dims
        vocabulary = f", vocabulary {size}" if (size := spec.model.vocab_size) else ""
        logger.info(
            f"{spec.name} {spec.flavor}: {self.num_parameters:,} parameters{trained}{vocabulary}; "
            f"{self.amount(self.global_batch_size, self.run_length.seq_len)} per step, "
            f"steps {self.step + 1} to {self.total_steps} on {dims.world_size} process(es)"
            f"{f' ({dims})' if self.mesh else ''}, {self.device}"
        )
        stretches = self.run_length.stretches(self.total_steps, self.step, self.n_tokens_seen)
        for part in itertools.islice(stretches, 1, None):
            amount = self.amount(part.batch.value, part.window.value)
            logger.info("from step %d on, %s per step", part.step + 1, amount)
        for name, model in list(self.models.items())[1:]:
            logger.info(
                "%s: %s, from %s", name, model, model.weights or f"seed {self.config.debug.seed}"
            )
        if self.pipeline_plan:
            logger.info("%s", self.pipeline_plan)

    @classmethod
    def amount(cls, n_samples: int, seq_len: int) -> str:
        """Return the size of a batch of `n_samples` as text: its sequences of `seq_len` tokens, or
        its samples."""
        if cls.unit == Trainer.unit:
            return f"{n_samples * cls.sequences_per_sample} x {seq_len} {cls.unit}"
        return f"{n_samples} {cls.unit}"

    def close(self) -> None:
        """Release the run's resources, whether or not `train` was called."""
        with contextlib.ExitStack() as stack:
            # Close in reverse order, and continue if one fails.
            stack.callback(setattr, self, "folder_lock", None)
            stack.callback(builder.set_deterministic, self.was_deterministic)
            stack.callback(destroy_process_group)
            stack.callback(self.checkpointer.close)
            stack.callback(self.dataloader.close)
            if self.validator:
                stack.callback(self.validator.close)
            stack.callback(self.release_signals)
            for callback in self.callbacks:
                stack.callback(callback.close)

    def release_signals(self) -> None:
        """Restore the previous signal handlers."""
        if self.stop_request:
            self.stop_request.close()
            self.stop_request = None
