"""`Run`: what a callback sees of a `Trainer`."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.data.base import BaseDataLoader, Batch
from torchtitan.components.evaluation.validate import Validator
from torchtitan.components.observe.metrics import MetricsProcessor
from torchtitan.components.observe.profiling import Profiler
from torchtitan.components.optim.ema import WeightAverage
from torchtitan.components.optim.loss_scale import LossScale
from torchtitan.components.optim.lr_scheduler import LRScheduler
from torchtitan.components.optim.optimizer import Optimizer
from torchtitan.components.optim.spikes import SpikeGuard
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.config import (
    CommConfig,
    CompileConfig,
    DebugConfig,
    ParallelismConfig,
    TrainingConfig,
)
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.mixed_precision import MixedPrecision
from torchtitan.distributed.phases import PhaseClock
from torchtitan.distributed.watchdog import Watchdog
from torchtitan.trainer.data_progress import DataProgress
from torchtitan.trainer.models import RunModel


class CallbackOptions(Protocol):
    """A `Callback.Config`, as the options of other callbacks see it."""

    def evaluates(self, task: str) -> bool: ...


class Sections(Protocol):
    """Sections of a `Trainer.Config` that every run has."""

    trains_scores: ClassVar[bool]
    """True if the run trains a reward model, which predicts no text."""

    hf_assets_path: str
    dump_folder: str
    dataloader: BaseDataLoader.Config
    optimizer: Optimizer.Config
    lr_scheduler: LRScheduler.Config
    comm: CommConfig
    training: TrainingConfig
    spikes: SpikeGuard.Config
    loss_scale: LossScale.Config
    ema: WeightAverage.Config
    parallelism: ParallelismConfig
    compile: CompileConfig
    checkpoint: CheckpointManager.Config
    metrics: MetricsProcessor.Config
    validator: Validator.Config
    profiling: Profiler.Config
    debug: DebugConfig

    @property
    def callbacks(self) -> Sequence[CallbackOptions]: ...


class Run(Protocol):
    """A run as its callbacks see it: a `Trainer`, whose attributes these are."""

    has_own_loss: ClassVar[bool]

    step: int
    total_steps: int
    """The last step, unless the run ends early."""
    early_end: str
    """Reason why the run ends before `total_steps`; empty: it does not."""
    n_tokens_seen: int
    num_parameters: int
    num_trained: int
    device: torch.device
    mesh: DeviceMesh | None
    parallel_dims: ParallelDims
    phases: PhaseClock
    watchdog: Watchdog
    precision: MixedPrecision
    tokenizer: Tokenizer
    run_length: DataProgress
    models: dict[str, RunModel]
    model_parts: list[nn.Module]
    optimizer: Optimizer
    lr_scheduler: LRScheduler
    loss_scale: LossScale
    spikes: SpikeGuard
    ema: WeightAverage
    metrics: MetricsProcessor
    checkpointer: CheckpointManager
    validator: Validator | None

    @property
    def config(self) -> Sections: ...

    @property
    def loss_unit(self) -> str: ...

    @property
    def dataloader(self) -> BaseDataLoader: ...

    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> Ranks: ...

    @property
    def trained_parts(self) -> list[nn.Module]: ...

    def evaluated_weights(self, *, averaged: bool = False) -> AbstractContextManager[None]: ...

    def end_early(self, reason: str) -> None: ...

    def report_measured(self, numbers: Mapping[str, float]) -> None: ...

    def mixed_precision(self) -> AbstractContextManager[None]: ...

    def post_dataloading_process(self, batch: Batch) -> Batch: ...

    def compute_loss(self, batch: Batch) -> tuple[Tensor, Tensor]: ...
