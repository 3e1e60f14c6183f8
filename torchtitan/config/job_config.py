"""The sections of a job that belong to no single component: training, parallelism, communication, debugging."""

from dataclasses import dataclass
from typing import Literal

from torchtitan.tools.errors import UserError


def require_at_least(minimum: float, **values: float) -> None:
    """Raise `UserError` for the first of `values` (option name with `__` for `.`) that is below `minimum`."""
    for name, value in values.items():
        if not value >= minimum:  # so that NaN is refused too
            raise UserError(f"--{name.replace('__', '.')} is {value}, and must be at least {minimum}")


@dataclass(kw_only=True, slots=True)
class TrainingConfig:
    """How much to train, on batches of which size, in which precision."""

    steps: int = 1000
    """Optimizer steps to train for."""

    epochs: int | None = None
    """Passes over the data to train for. Where its size is known they count instead of `steps`; a stream, whose size is
    not, ends after them, with `steps` as the limit and as the length of the schedule."""

    seq_len: int = 512
    """Tokens in one training sample."""

    local_batch_size: int = 4
    """Samples that one data-parallel rank processes at once."""

    global_batch_size: int = -1
    """Samples in one optimizer step, all ranks together; what exceeds local_batch_size times the data-parallel ranks
    is accumulated. -1: no accumulation."""

    max_norm: float = 1.0
    """Gradients are scaled down to this total norm when they exceed it; `inf` only measures it."""

    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What a NaN or infinite loss or gradient norm does: `stop` ends the run, naming the step and its documents;
    `skip` goes on with the next batch and leaves weights and optimizer state as they were."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the master weights and the optimizer state. bfloat16 loses small updates."""

    mixed_precision_param: Literal["float32", "bfloat16"] = "bfloat16"
    """Type in which forward and backward are computed."""

    mixed_precision_reduce: Literal["float32", "bfloat16"] = "float32"
    """Type in which gradients are summed over ranks."""

    gc_freq: int = 50
    """Steps between runs of Python's garbage collector, which is otherwise off so that all ranks pause together."""

    def validate(self) -> None:
        """Raise `UserError` for values that no run could use."""
        require_at_least(1, training__steps=self.steps, training__seq_len=self.seq_len)
        require_at_least(1, training__local_batch_size=self.local_batch_size, training__gc_freq=self.gc_freq)
        if self.epochs is not None:
            require_at_least(1, training__epochs=self.epochs)
        if not self.max_norm > 0:
            raise UserError(f"--training.max_norm is {self.max_norm}, and must be above 0 (inf: never clip)")

    def resolve_global_batch_size(self, data_parallel_degree: int) -> int:
        """Samples in one optimizer step over `data_parallel_degree` ranks.

        Raises:
            UserError: if the ranks' local batches do not divide `global_batch_size`.
        """
        one_pass = self.local_batch_size * data_parallel_degree
        if self.global_batch_size == -1:
            return one_pass
        if self.global_batch_size < 1 or self.global_batch_size % one_pass:
            raise UserError(
                f"--training.global_batch_size {self.global_batch_size} is not a multiple of local_batch_size x "
                f"data-parallel ranks = {self.local_batch_size} x {data_parallel_degree} = {one_pass}"
            )
        return self.global_batch_size


@dataclass(kw_only=True, slots=True)
class ParallelismConfig:
    """How the ranks share the work. The degrees multiply to the number of processes."""

    data_parallel_replicate_degree: int = 1
    """Replicas of the weights. Above 1 with shard degree 1 this is DDP; above 1 with a shard degree above 1, HSDP."""

    data_parallel_shard_degree: int = -1
    """Ranks that share one copy of weights, gradients and optimizer state (FSDP2). -1: all that remain."""

    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Whether a layer's gathered weights are freed after its forward pass: `always` saves memory, `never` saves
    communication; `default` is always, but for the last layers, which the backward pass needs at once."""


@dataclass(kw_only=True, slots=True)
class CommConfig:
    """Communication between ranks."""

    timeout_seconds: int = 600
    """Seconds that a collective may wait for the slowest rank before the run fails."""

    def validate(self) -> None:
        """Raise `UserError` for a time limit that is not positive."""
        require_at_least(1, comm__timeout_seconds=self.timeout_seconds)


@dataclass(kw_only=True, slots=True)
class DebugConfig:
    """Reproducibility."""

    seed: int = 0
    """Seed of the initial weights, the order of the data and every random operation."""

    deterministic: bool = False
    """Use deterministic algorithms only: bit-identical runs on CUDA, at some cost. (CPU runs are anyway.)"""

    def validate(self) -> None:
        """Raise `UserError` for a seed that the generators do not take."""
        require_at_least(0, debug__seed=self.seed)
