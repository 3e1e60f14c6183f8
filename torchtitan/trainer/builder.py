"""`RunBuilder`: build the parts of a run from its configuration, for `Trainer.__init__`."""

import dataclasses
import logging
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.data.base import BaseDataLoader
from torchtitan.components.optim.optimizer import Optimizer
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.components.tokenizer.auto_tokenizer import warn_of_different_ids
from torchtitan.config import Configurable
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.compile import check_c_compiler, compile_loss
from torchtitan.distributed.phases import PhaseClock, mark_gathering
from torchtitan.distributed.pipeline import Pipeline, PipelinePlan, take_stage
from torchtitan.distributed.process_group import init_process_group
from torchtitan.protocols import BaseModel, ModelConverter, ModelSpec
from torchtitan.protocols.conversion import convert_model
from torchtitan.tools.device import device_type
from torchtitan.tools.errors import UserError
from torchtitan.tools.folder_lock import FolderLock, lock_folder
from torchtitan.tools.logging import logger
from torchtitan.trainer.config import RunConfig
from torchtitan.trainer.data_progress import DataProgress
from torchtitan.trainer.models import RunModel, summarize


class RunBuilder(Configurable):
    """Base class with the methods that build the parts of a run. `Trainer.__init__` calls them in order; subclasses may
    override them."""

    @dataclass(kw_only=True, slots=True)
    class Config(RunConfig):
        """A whole run. Each field is a section of the command line and of `--config_file`."""

    config: Config
    device: torch.device
    phases: PhaseClock
    folder_lock: FolderLock | None = None
    parallel_dims: ParallelDims
    mesh: DeviceMesh | None
    tokenizer: Tokenizer
    dataloader: BaseDataLoader
    global_batch_size: int
    sequences_per_sample: ClassVar[int] = 1
    """Sequences of `training.seq_len` tokens in a sample, for the count of tokens."""
    converters: list[ModelConverter]
    loss: Any
    pipeline_plan: PipelinePlan | None
    has_own_loss: bool
    """True if a subclass computes the loss. Its weight is then known only after the forward passes."""
    has_own_forward: bool
    """True if a subclass has its own forward pass, with or without its own loss."""
    models: dict[str, RunModel]
    """Sharded models of the run, allocated by `init_weights`; the configuration describes "model"."""
    model_parts: list[nn.Module]
    """Parts of "model" on this rank; more than one only under pipeline parallelism."""

    def init_distributed(self) -> torch.device:
        """Join the process group, and return this rank's device."""
        return init_process_group(device_type(), self.config.comm)

    def lock_folder(self) -> None:
        """Lock the dump folder on rank 0 against other runs until `close`. Raise `UserError` on every rank if it is in
        use."""

        def lock() -> None:
            self.folder_lock = lock_folder(Path(self.config.dump_folder))

        self.ranks.broadcast_from_rank0(lock)

    def init_random_state(self) -> None:
        """Seed every generator, differently on each rank; make algorithms deterministic if requested."""
        debug = self.config.debug
        seed = debug.seed + self.rank
        random.seed(seed)
        numpy.random.seed(seed % 2**32)  # NumPy's range of seeds
        torch.manual_seed(seed)
        self.was_deterministic = torch.are_deterministic_algorithms_enabled()
        if debug.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)

    def build_tokenizer(self) -> Tokenizer:
        tokenizer: Tokenizer = self.config.tokenizer.build(path=self.config.hf_assets_path)
        warn_of_different_ids(tokenizer)
        return tokenizer

    def build_dataloader(self, config: BaseDataLoader.Config, *, epochs: int | None) -> BaseDataLoader:
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
        """Build the counter that determines the last step, from `training.steps` or `training.epochs`."""
        training, samples = self.config.training, self.dataloader.n_samples
        if training.epochs is not None and samples is None and self.config.optimizer.early_step_in_backward:
            # The end of a stream is known only after a backward pass, when an early optimizer has already stepped.
            raise UserError(
                "--optimizer.early_step_in_backward cannot be combined with --training.epochs of a stream, whose end "
                "is found too late to skip the step; set --training.steps instead"
            )
        run_length = self.config.data_progress(self.global_batch_size, samples)
        if training.epochs is not None and samples is not None:
            n_steps = run_length.last_step(0)
            logger.log(
                logging.WARNING if n_steps > training.steps else logging.INFO,
                f"--training.epochs {training.epochs} sets the length of the run, {n_steps:,} steps, in place of "
                f"--training.steps {training.steps}; leave out --training.epochs to train by steps",
            )
        return run_length

    def build_models(self) -> dict[str, RunModel]:
        """Build the run's models by name, sharded and not yet allocated: here "model", which the configuration
        describes. A subclass adds others with `build_other_model`, or as plain `nn.Module`s, and may replace it."""
        model, spec = self.build_model(), self.config.model_spec
        num_parameters = model.num_parameters()
        dtype = getattr(torch, self.config.training.mixed_precision_param)
        convert_model(model, self.converters, frozen_dtype=dtype)
        facts = summarize(model, self.config.training.seq_len)
        parts, offloaded = self.parallelize(model), self.config.training.enable_cpu_offload
        return {"model": RunModel(spec=spec, parts=parts, num_parameters=num_parameters, offloaded=offloaded, **facts)}

    def build_other_model(
        self, spec: ModelSpec, *, weights: str = "", trained: bool = False, saved: bool = False, offloaded: bool = False
    ) -> RunModel:
        """Build an additional model, sharded like the main one, from its specification, in which a vocabulary size of
        None is the main model's, and a checkpoint folder in any format; without one, initialize it with `debug.seed`.
        A `trained` model shares the optimizer and the schedule, and must be `saved` in checkpoints; a frozen model has
        the type that FSDP computes in, and FSDP keeps the weights of an `offloaded` one in CPU memory. Raise
        `UserError` under pipeline parallelism, and for offloading without FSDP."""
        assert saved or not trained, "the weights of a trained model would be lost"
        training = self.config.training
        if self.parallel_dims.pp > 1:
            raise UserError(
                "--parallelism.pipeline_parallel_degree above 1 supports a single model, but this run has several"
            )
        if offloaded:
            self.parallel_dims.require_fsdp("offloading a model")
        vocab_size = spec.model.vocab_size or self.config.model_spec.model.vocab_size
        spec = dataclasses.replace(spec, model=dataclasses.replace(spec.model, vocab_size=vocab_size))
        dtype = training.dtype if trained else training.mixed_precision_param
        with torch.device("meta"):
            model: BaseModel = spec.model.build().to(getattr(torch, dtype))
        if not trained:
            model.requires_grad_(False)
        facts = {"num_parameters": model.num_parameters(), **summarize(model, training.seq_len)}
        parts = [self.shard(model, spec, offloaded=offloaded)]
        offloaded = offloaded or training.enable_cpu_offload
        return RunModel(spec=spec, parts=parts, weights=weights, saved=saved, offloaded=offloaded, **facts)

    def build_model(self) -> BaseModel:
        """Build the model on the meta device, in the type of the master weights."""
        config, training = self.config.model_spec.model, self.config.training
        if training.seq_lens[-1] > config.max_seq_len:
            logger.warning(
                f"--training.seq_len {training.seq_lens[-1]} exceeds the model's maximum sequence length of "
                f"{config.max_seq_len} tokens"
            )
        with torch.device("meta"):
            model: BaseModel = config.build().to(getattr(torch, training.dtype))
        attention = [part for part in model.modules() if {"softcap", "has_sinks"} <= vars(part).keys()]
        if any(part.softcap or part.has_sinks for part in attention):
            check_c_compiler("attention with soft caps or sinks is computed by FlexAttention, which")
        is_packed = getattr(self.config.dataloader, "document_mask", True)
        if attention and is_packed and training.mixed_precision_param == "float32":
            check_c_compiler("attention to packed documents in float32 is computed by FlexAttention, which")
        return model

    def build_loss(self) -> Any:
        """Build the training loss, a function of hidden states, output weights and `labels_BL`. Raise `UserError`
        for early optimizer steps with a loss whose weight is known only after the forward passes."""
        if self.has_own_loss and self.config.optimizer.early_step_in_backward:
            raise UserError(
                "--optimizer.early_step_in_backward applies gradients before they can be divided by the weight of the "
                f"global batch, which {type(self).__name__}.compute_loss returns; disable it"
            )
        loss, config = self.config.chosen_loss.build(), self.config.compile
        if config.enable and "loss" in config.components:
            compile_loss(loss, config)
        return loss

    def plan_pipeline(self) -> PipelinePlan | None:
        """Divide the model into pipeline stages; None without pipeline parallelism. Raise `UserError` for a trainer
        with its own forward pass, which a pipeline would not call."""
        config = self.config
        if self.parallel_dims.pp == 1:
            return None
        if self.has_own_forward and type(self).build_pipeline is RunBuilder.build_pipeline:
            raise UserError(
                f"{type(self).__name__} overrides the forward pass, which a pipeline does not call; override "
                "build_pipeline too, or train without --parallelism.pipeline_parallel_degree"
            )
        return PipelinePlan.from_config(config.parallelism, config.model_spec.model, config.training.local_batch_size)

    def parallelize(self, model: BaseModel) -> list[nn.Module]:
        """Return the model's parts on this rank, sharded; a pipeline rank may hold several stages."""
        parts: list[nn.Module] = [model]
        if self.pipeline_plan:
            stages = self.pipeline_plan.stages_of_rank(self.parallel_dims.coordinate("pp"))
            parts = [take_stage(model, self.pipeline_plan.modules_of_stage(stage)) for stage in stages]
        return [self.shard(part, self.config.model_spec) for part in parts]

    def shard(self, part: nn.Module, spec: ModelSpec, *, offloaded: bool = False) -> nn.Module:
        """Apply all parallelisms except pipelines to a model of `spec`, or a stage of it."""
        training = self.config.training
        sharded = spec.parallelize(
            part,
            parallel_dims=self.parallel_dims,
            mesh=self.mesh,
            sharding=spec.sharding,
            training=dataclasses.replace(training, enable_cpu_offload=True) if offloaded else training,
            parallelism=self.config.parallelism,
            activation_checkpoint=self.config.activation_checkpoint,
            compile=self.config.compile,
        )
        mark_gathering(sharded, self.phases)
        return sharded

    def init_weights(self) -> None:
        """Allocate the parameters. Initialize a model unless there are weights to load: then `load_checkpoint` draws
        only the values that it does not read."""
        config = self.config
        start = self.ranks.broadcast_from_rank0(lambda: config.checkpoint.find_start(config.dump_folder))
        for name, model in self.models.items():
            model.allocate(self.device)
            if not (start or model.weights or (name == "model" and config.checkpoint.initial_load_path)):
                model.initialize(config.debug.seed)

    def build_optimizer(self) -> Optimizer:
        """Build the optimizer of all trained models; an additional model's name prefixes its parameters."""
        others = {name: model.parts for name, model in self.models.items() if name != "model" and model.num_trained}
        named = [nn.ModuleDict({name: part}) for name, parts in others.items() for part in parts]
        all_names = self.models["model"].trained_names if self.pipeline_plan else None
        optimizer: Optimizer = self.config.optimizer.build(model_parts=[*self.model_parts, *named], all_names=all_names)
        return optimizer

    def build_pipeline(self) -> Pipeline | None:
        if (plan := self.pipeline_plan) is None:
            return None
        assert self.mesh is not None
        config, dims = self.config, self.parallel_dims
        hidden = torch.empty(
            config.parallelism.pipeline_parallel_microbatch_size,
            config.training.seq_len // (dims.cp * dims.tp),
            config.model_spec.model.dim,
            dtype=getattr(torch, config.training.mixed_precision_param),
            device="meta",
            requires_grad=True,
        )
        mesh = self.mesh["pp"]
        return Pipeline(plan, self.model_parts, mesh=mesh, device=self.device, hidden=hidden, head=self.loss)

    @property
    def ranks(self) -> Ranks:
        """All ranks of the run."""
        return Ranks(dist.group.WORLD if dist.is_initialized() else None)

    @property
    def rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0
