"""A trainer with fake tensors, which have shapes but no memory. It runs one rank without the
others."""

import dataclasses
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.data import PromptDataLoader
from torchtitan.components.data.base import BaseDataLoader, Batch
from torchtitan.components.evaluation.validate import Validator
from torchtitan.components.losses.loss import CrossEntropyLoss
from torchtitan.components.optim.optimizer import Optimizer
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.config import CompileConfig
from torchtitan.distributed.activation_checkpoint import apply_activation_checkpointing
from torchtitan.distributed.expert_parallel import TokenExchange
from torchtitan.dry_run.layer_replay import LayerReplay
from torchtitan.dry_run.memory_tracker import MEMORY_KINDS, MemoryKind, MemoryTracker
from torchtitan.dry_run.microbatch_replay import MicrobatchReplay
from torchtitan.dry_run.observer import observing
from torchtitan.dry_run.work_tracker import Work, WorkTracker
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.protocols.conversion import convert_model
from torchtitan.protocols.experts import StackedExperts
from torchtitan.protocols.images import ImageInputs
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger
from torchtitan.tools.torch_private import (
    FakeTensorMode,
    cutting_own_shards,
    fsdp_parameters,
    gathered_weights,
)
from torchtitan.trainer import StepResult, Trainer
from torchtitan.trainer.agreement import Agreement

_PARAMETERS_PER_GROUP = 32


class VocabularySize(Tokenizer):
    """A tokenizer with only a vocabulary size, since a dry run has no text."""

    @dataclass(kw_only=True, slots=True)
    class Config(Tokenizer.Config):
        """The size of a vocabulary."""

        vocab_size: int
        """Token ids."""

    def __init__(self, config: Config, *, path: str):
        super().__init__(config)
        self.vocab_size = config.vocab_size

    def tokenize(self, *args: object, **options: object) -> NoReturn:
        raise NotImplementedError

    decode = tokenize


def with_vocabulary(config: Trainer.Config) -> Trainer.Config:
    """Return a configuration whose model takes the vocabulary size from the tokenizer if it has
    none, and whose converters know the initial weights."""
    if config.model_spec.model.vocab_size is not None:
        return config.with_initial_weights(range(0))
    return config.resolve(config.tokenizer.build(path=config.hf_assets_path))


def without_data(config: Trainer.Config) -> Trainer.Config:
    """Copy a configuration without text, checkpoints and compilation, with its longest windows;
    read the tokenizer for its size, if needed. Raise `UserError` for a trainer that samples its
    data."""
    if isinstance(config.dataloader, PromptDataLoader.Config):
        raise UserError(
            "a dry run cannot sample answers; try --module auto --config sft with the same model"
        )
    config = with_vocabulary(config)
    vocab_size = config.model_spec.model.vocab_size
    assert vocab_size is not None, "`with_vocabulary` sets it"
    return dataclasses.replace(
        config,
        tokenizer=VocabularySize.Config(vocab_size=vocab_size),
        validator=Validator.Config(),
        checkpoint=CheckpointManager.Config(),
        training=dataclasses.replace(
            config.training, epochs=None, seq_len=config.training.seq_lens[-1], seq_len_schedule=[]
        ),
        compile=CompileConfig(),
        callbacks=[],
        preflight=None,
    )


def images_of(config: Trainer.Config, sequences: int) -> ImageInputs | None:
    """Return the images of a local batch of `sequences` windows per sample, see
    `white_images`; None: the data has none."""
    training = config.training
    n_tokens = sequences * training.local_batch_size * training.seq_lens[-1]
    images: ImageInputs | None = config.dataloader.blank_images(
        lambda: config.tokenizer.build(path=config.hf_assets_path), n_tokens
    )
    return images


class FakeTrainer(Trainer):
    """A mixin before the original trainer class that replaces methods which need values, data or
    other ranks."""

    work_of_second: Work
    replays_layers = True
    """False: compute equal layers too."""
    last_layers: dict[int, int] | None = None
    """For `LayerReplay`."""
    loss_device_type = "cuda"
    image_flops = 0.0
    """Operations for the images of a step, by the formula of model FLOP/s utilization, divided
    evenly among all ranks."""

    def init_distributed(self) -> torch.device:
        """Use the existing process group, and return the CPU as the device."""
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.memory, self.work = MemoryTracker(), WorkTracker()
        return torch.device("cpu")

    def lock_folder(self) -> None:
        """Do nothing; a dry run writes no files that need a lock."""

    def shard(self, part: nn.Module, spec: ModelSpec, *, offloaded: bool = False) -> nn.Module:
        """Shard a model in time that does not grow with the number of ranks."""
        with cutting_own_shards():
            return super().shard(part, spec, offloaded=offloaded)

    def build_dataloader(
        self, config: BaseDataLoader.Config, *, epochs: int | None
    ) -> BaseDataLoader:
        """Return a loader without data."""
        return BaseDataLoader(config)

    def post_dataloading_process(self, batch: Batch) -> Batch:
        """Describe each row as one document that needs no mask, as with the kernels of a GPU; under
        context parallelism, a row of this rank's tokens, with the places of all ranks' ones."""
        batch = super().post_dataloading_process(batch)
        attention = batch.pop("attention", None)
        if attention is not None and attention.key_places_S is not None:
            batch["attention"] = dataclasses.replace(
                AttentionMetadata.of_rows(*batch["input"].shape),
                query_places_L=attention.query_places_L,
                key_places_S=attention.key_places_S,
                kernel="causal",
            )
        return batch

    def build_loss(self) -> Any:
        """Build the loss with the sizes that it has on CUDA."""
        loss = super().build_loss()
        if isinstance(loss, CrossEntropyLoss):
            loss.device_type = "cuda"
        return loss

    def init_weights(self) -> None:
        """Give the parameters fake memory, without values; make experts compute as on CUDA, with
        equal parts of the tokens."""
        for module in (module for part in self.all_parts for module in part.modules()):
            if hasattr(module, "device_type"):
                module.device_type = "cuda"  # type: ignore[assignment]
            if hasattr(module, "has_chunks"):
                module.has_chunks = False  # type: ignore[assignment]  # windows cost the same, and need no values
            if isinstance(module, StackedExperts) and isinstance(module.exchange, TokenExchange):
                module.exchange.is_balanced = True
        with self.fake_mode:
            for model in self.models.values():
                for part in model.parts:
                    part.to_empty(device=self.device)
                    part.train(model.num_trained > 0)

    def build_optimizer(self) -> Optimizer:
        """Build the optimizer with groups of few parameters, since DTensor's rules for a list of
        tensors take time that grows with its square."""
        optimizer = super().build_optimizer()
        if not self.config.optimizer.early_step_in_backward:  # whose hooks know their groups
            for one in optimizer.optimizers:
                one.param_groups = [
                    {**group, "params": group["params"][first : first + _PARAMETERS_PER_GROUP]}
                    for group in one.param_groups
                    for first in range(0, len(group["params"]), _PARAMETERS_PER_GROUP)
                ]
        return optimizer

    def build_checkpointer(self) -> Any:
        """Return None; nothing is saved."""

    def build_agreement(self) -> Agreement:
        """Return an agreement of this rank alone, since the others do not run."""
        return Agreement(Ranks())

    def count_valid_tokens(self, micro_batches: list[Batch]) -> Tensor:
        return torch.ones((), device=self.device, dtype=self.statistics_dtype)

    def forward_backward_step(self, batch: Batch, n_tokens: Tensor) -> Tensor:
        """Compute the first two micro-batches; later ones would repeat the second and need no more
        memory."""
        if self.n_computed == 2:
            self.work.work += self.work_of_second
            return torch.zeros((), device=self.device)
        before = self.work.work.copy()
        self.work.is_updating = False
        loss = super().forward_backward_step(batch, n_tokens)
        self.work.is_updating = True
        self.n_computed += 1
        self.work_of_second = self.work.work - before
        self.label_training_allocations()
        return loss

    def read_result(self, loss: Tensor, grad_norm: Tensor, n_tokens: Tensor) -> StepResult:
        return StepResult(loss=0.0, grad_norm=0.0, stop_requested=False, data_exhausted=False)

    @property
    def all_parts(self) -> list[nn.Module]:
        """This rank's parts of all models of the run."""
        return [part for model in self.models.values() for part in model.parts]

    def measure_images(self, images: ImageInputs | None) -> None:
        """Add the work of the model parts that read images, and the memory that these parts keep
        for the backward pass of a micro-batch. They run by themselves, on the meta device: towers
        read the sizes of images, and the tensors of a step have no values."""
        if images is None:
            return
        n_batches, training = self.gradient_accumulation_steps, self.config.training
        models: list[Any] = self.all_parts
        flops = sum(part.image_flops(images) for part in models)
        # tensor-parallel ranks have the same images
        share = self.parallel_dims.dp_degree / self.parallel_dims.world_size
        self.image_flops = n_batches * flops * share
        model, dtype = self.build_model(), getattr(torch, training.mixed_precision_param)
        convert_model(model, self.converters, frozen_dtype=dtype)
        apply_activation_checkpointing(model, self.config.activation_checkpoint)
        memory, work = MemoryTracker(), WorkTracker()
        try:
            with observing(memory, work):
                model.to(dtype).trace_images(images)
        except (RuntimeError, NotImplementedError) as error:
            reason = str(error).split("\n")[0]
            logger.warning("operations and activations of images are not counted: %s", reason)
            memory, work = MemoryTracker(), WorkTracker()  # without those before the error
        for kernel, calls in work.work.items():
            self.work.work[kernel] += n_batches * calls
        kept = memory.peak(without=[one for one in MEMORY_KINDS if one != "activations"])
        parts: list[Any] = self.model_parts
        readers = [one for part in parts for one in part.image_readers()]
        trained = local_tensors(one for one in readers if one.requires_grad)
        sizes: dict[MemoryKind, int] = {
            "activations": kept.total(),
            "gradients": sum(one.nbytes for one in trained),
        }
        with self.fake_mode:
            self.of_images = {kind: torch.empty(n, dtype=torch.uint8) for kind, n in sizes.items()}
        for kind, memory_of_kind in self.of_images.items():
            self.memory.label(kind, [memory_of_kind])

    def measure_step(self, images: ImageInputs | None = None) -> None:
        """Measure a step of local batches with these images."""
        self.measure_images(images)
        self.n_computed = 0
        parameters = [p for part in self.all_parts for p in (*part.parameters(), *part.buffers())]
        states = [
            state for optimizer in self.optimizer.optimizers for state in optimizer.state.values()
        ]
        values = [value for state in states for value in state.values()]
        self.memory.label("parameters", [*parameters, *self.ema.averages])
        self.memory.label("optimizer", [value for value in values if isinstance(value, Tensor)])
        if self.pipeline:
            schedule = self.pipeline.schedule
            MicrobatchReplay(
                schedule, self.memory, self.work, self.label_training_allocations
            ).install()
        elif self.replays_layers:
            parts: list[Any] = self.model_parts
            for part in parts:
                LayerReplay(part, self.memory, self.work, self.last_layers)
        loader, training = self.config.dataloader, self.config.training
        seq_len = training.seq_len * self.sequences_per_sample
        with self.fake_mode, observing(self.memory, self.work):
            # Again and again, since a device never holds two batches. Each sample is one document.
            batch = loader.blank_batch(training.local_batch_size, seq_len)
            # the first step gathers facts about gradients from other ranks, which do not exist
            self.step = 1
            self.prepare_converters(1)
            self.train_step(itertools.repeat(batch))

    def local_parameters(self, *, offloaded: bool = False) -> list[Tensor]:
        """Return this rank's weight shards of all models, or only of offloaded models."""
        models = [model for model in self.models.values() if model.offloaded or not offloaded]
        parts = [part for model in models for part in model.parts]
        return local_tensors(parameter for part in parts for parameter in part.parameters())

    def label_training_allocations(self) -> None:
        """Label the memory of gradients and gathered weights."""
        parameters = [parameter for part in self.all_parts for parameter in part.parameters()]
        records = list(
            fsdp_parameters(module for part in self.all_parts for module in part.modules())
        )
        gathered = [weight for record in records for weight in gathered_weights(record)]
        outputs = [output for record in records for output in record.all_gather_outputs]
        # Also gradients that are not yet reduced over the ranks.
        unreduced = [record.unsharded_accumulated_grad for record in records]
        self.memory.label("gathered parameters", [*outputs, *gathered])
        self.memory.label(
            "gradients", [*(tensor.grad for tensor in (*parameters, *gathered)), *unreduced]
        )
        # Last, because without sharding a gathered weight is the weight itself.
        self.memory.label("parameters", parameters)


def local_tensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return this rank's shards of tensors."""
    return [one.to_local() if isinstance(one, DTensor) else one for one in tensors]


def fake_trainer(config: Trainer.Config) -> FakeTrainer:
    """Build a `FakeTrainer` of the configuration's trainer class, from a result of `without_data`,
    for the rank in an existing process group of backend `fake`."""
    owner = config._owner
    trainer: FakeTrainer = type(f"Fake{owner.__name__}", (FakeTrainer, owner), {})(config)
    return trainer
