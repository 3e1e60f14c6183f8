"""Sections of a run that the parts of the optimizer check themselves against."""

from collections.abc import Sequence
from typing import Protocol

from torchtitan.config.sections import TrainingConfig
from torchtitan.protocols.converter import ModelConverter


class OptimizerSection(Protocol):
    """The section `optimizer` of a run."""

    early_step_in_backward: bool


class ScheduleSection(Protocol):
    """The section `lr_scheduler` of a run."""

    decay_ratio: float | None
    min_lr_factor: float

    @property
    def points(self) -> Sequence[object]: ...


class AverageSection(Protocol):
    """The section `ema` of a run."""

    decay: float | None


class CheckpointSection(Protocol):
    """The section `checkpoint` of a run."""

    interval: int
    keep_latest_k: int

    @property
    def last_kind(self) -> str: ...

    @property
    def saves(self) -> bool: ...


class RunSections(Protocol):
    """A `Trainer.Config`."""

    training: TrainingConfig

    @property
    def optimizer(self) -> OptimizerSection: ...

    @property
    def lr_scheduler(self) -> ScheduleSection: ...

    @property
    def ema(self) -> AverageSection: ...

    @property
    def checkpoint(self) -> CheckpointSection: ...

    @property
    def model_converters(self) -> Sequence[ModelConverter.Config]: ...
