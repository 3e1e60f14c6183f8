"""The sections of a run's configuration that belong to no single component."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torchtitan.tools.errors import UserError


def require_at_least(minimum: float, **values: float | None) -> None:
    """Raise `UserError` for the first of `values` (option name with `__` for `.`) that is below `minimum`, or NaN."""
    for name, value in values.items():
        if value is not None and not value >= minimum:
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

    enable_cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in CPU memory, and copy each layer's weights to the device when it
    computes. Needs data-parallel sharding (FSDP)."""

    skip_data: list[str] = field(default_factory=list)
    """Data that is read and not trained on, by the steps that would train on it if nothing were left out: "100-120"
    "300". A step goes on to what follows."""

    gc_freq: int = 50
    """Steps between runs of Python's garbage collector, which is otherwise off so that all ranks pause together."""

    def validate(self) -> None:
        """Raise `UserError` for values that no run could use."""
        require_at_least(1, training__steps=self.steps, training__epochs=self.epochs, training__seq_len=self.seq_len)
        require_at_least(1, training__local_batch_size=self.local_batch_size, training__gc_freq=self.gc_freq)
        if not self.max_norm > 0:
            raise UserError(f"--training.max_norm is {self.max_norm}, and must be above 0 (inf: never clip)")
        try:
            parse_step_ranges(self.skip_data)
        except ValueError as error:
            raise UserError(
                f"--training.skip_data '{error}' is neither a step from 1, nor a range like 100-120"
            ) from None

    def resolve_global_batch_size(self, data_parallel_degree: int) -> int:
        """Samples in one optimizer step over `data_parallel_degree` ranks. Raises `UserError` if the ranks' local
        batches do not divide `global_batch_size`."""
        one_pass = self.local_batch_size * data_parallel_degree
        if self.global_batch_size == -1:
            return one_pass
        if self.global_batch_size < 1 or self.global_batch_size % one_pass:
            raise UserError(
                f"--training.global_batch_size {self.global_batch_size} is not a multiple of local_batch_size x "
                f"data-parallel ranks = {self.local_batch_size} x {data_parallel_degree} = {one_pass}"
            )
        return self.global_batch_size


def parse_step_ranges(words: Sequence[str]) -> list[range]:
    """`["100-120", "300"]`, both ends included, as ranges.

    Raises:
        ValueError: for the first word that is no such range of numbers from 1.
    """
    ranges = []
    for word in words:
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", word, re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last:
            raise ValueError(word)
        ranges.append(range(first, last + 1))
    return ranges


PipelineSchedule = Literal[
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]


@dataclass(kw_only=True, slots=True)
class ParallelismConfig:
    """How the ranks share the work. The degrees multiply to the number of processes."""

    data_parallel_replicate_degree: int = 1
    """Replicas of the weights. Above 1 with shard degree 1 this is DDP; above 1 with a shard degree above 1, HSDP."""

    data_parallel_shard_degree: int = -1
    """Ranks that share one copy of weights, gradients and optimizer state (FSDP2). -1: all that remain."""

    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Whether a layer's gathered weights are freed after its forward pass: `always` saves memory, `never` saves
    communication; `default` is always, but for the last layers, which the backward pass needs at once, and never under
    pipeline parallelism, where every micro-batch would gather them anew."""

    tensor_parallel_degree: int = 1
    """Ranks that share each layer's matrices, and the sequence between them. Divides heads, key/value heads, the
    width of the feed-forward network and training.seq_len."""

    disable_loss_parallel: bool = False
    """Under tensor parallelism, gather hidden states and output weights and compute the loss on every rank, rather than
    each rank its part of the vocabulary: for a loss of one's own that needs whole logits."""

    context_parallel_degree: int = 1
    """Ranks that share each sequence: every rank computes its part of the tokens, and gathers keys and values."""

    context_parallel_load_balancer: Literal["headtail", "none"] = "headtail"
    """Which tokens a context-parallel rank has: `headtail`, one piece from the front and one from the back of the
    sequence, so that causal attention costs all ranks the same; `none`, one contiguous piece."""

    pipeline_parallel_degree: int = 1
    """Ranks that share the layers: each holds one or more stages of the model."""

    pipeline_parallel_schedule: PipelineSchedule = "1F1B"
    """Order in which stages work on micro-batches. GPipe and 1F1B have one stage per rank, all others two or more
    (ZBVZeroBubble and DualPipeV: two)."""

    pipeline_parallel_microbatch_size: int = 1
    """Samples of training.local_batch_size that pass through the pipeline together."""

    pipeline_parallel_layers_per_stage: int | None = None
    """Layers in one stage, which decides how many stages there are. None: one stage per rank for GPipe and 1F1B,
    two for the others."""

    pipeline_parallel_first_stage_less_layers: int = 1
    """Layers that the token embedding counts for when layers are shared out."""

    pipeline_parallel_last_stage_less_layers: int = 1
    """Layers that the final norm and the output head count for when layers are shared out."""

    module_fqns_per_model_part: list[str] | None = None
    """The modules of each stage by name, instead of sharing them out automatically; the names in one stage are
    separated by commas: "tok_embeddings,layers.0,layers.1" "layers.2,layers.3,norm,output"."""

    @property
    def splits_backward(self) -> bool:
        """Whether the gradients of inputs and of weights are computed at different times, from the same results."""
        schedules = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
        return self.pipeline_parallel_degree > 1 and self.pipeline_parallel_schedule in schedules

    def validate(self) -> None:
        """Raise `UserError` for degrees and sizes that no run could use; `ParallelDims` checks how they fit."""
        least = {
            "data_parallel_replicate_degree": 1,
            "data_parallel_shard_degree": -1 if self.data_parallel_shard_degree == -1 else 1,
            "tensor_parallel_degree": 1,
            "context_parallel_degree": 1,
            "pipeline_parallel_degree": 1,
            "pipeline_parallel_microbatch_size": 1,
            "pipeline_parallel_layers_per_stage": 1,
            "pipeline_parallel_first_stage_less_layers": 0,
            "pipeline_parallel_last_stage_less_layers": 0,
        }
        for name, minimum in least.items():
            require_at_least(minimum, **{f"parallelism__{name}": getattr(self, name)})


@dataclass(kw_only=True, slots=True)
class ActivationCheckpointConfig:
    """Activation checkpointing: what the backward pass needs of the forward pass is computed again, and not kept."""

    mode: Literal["none", "full", "selective", "memory_budget"] = "none"
    """`none` keeps everything; `full` keeps each layer's input alone; `selective` follows `selective_option`;
    `memory_budget` lets the compiler choose (needs --compile.enable)."""

    selective_option: str = "op"
    """`op`: keep the results of attention, of reduce-scatter and all-to-all, and of every second matrix product. A
    number n: recompute every n-th layer in full, and keep everything of the others."""

    memory_budget: float = 0.5
    """Part of the memory of `none` that the compiler may use, from 0 (recompute as much as possible) to 1."""

    def validate(self) -> None:
        """Raise `UserError` for an option that is neither `op` nor a number, and for a budget outside 0 to 1."""
        option = self.selective_option
        if option != "op" and not (option.isdecimal() and int(option) >= 1):
            raise UserError(
                f"--activation_checkpoint.selective_option is '{option}', and must be `op` or a number of layers from 1"
            )
        if not 0 <= self.memory_budget <= 1:
            raise UserError(f"--activation_checkpoint.memory_budget is {self.memory_budget}, and must be from 0 to 1")


@dataclass(kw_only=True, slots=True)
class CompileConfig:
    """torch.compile."""

    enable: bool = False
    """Compile what `components` names. The first step takes longer, the later ones less time and memory."""

    components: list[Literal["model", "loss"]] = field(default_factory=lambda: ["model", "loss"])
    """What is compiled: `model`, each layer by itself; `loss`, the loss of a chunk of logits."""

    backend: str = "inductor"
    """The compiler: `inductor`, or another that `torch.compiler.list_backends()` names (`aot_eager`, to debug)."""


@dataclass(kw_only=True, slots=True)
class CommConfig:
    """Communication between ranks, and how long to wait for one that does not answer."""

    init_timeout_seconds: int = 1800
    """Seconds that a collective may wait for the slowest rank until the first step is done: loading and compiling take
    their time, and not the same on all ranks."""

    train_timeout_seconds: int = 900
    """Seconds that a collective may wait for the slowest rank afterwards."""

    step_timeout_seconds: int = 600
    """Seconds after which a step that has not ended is taken for hanging: every rank prints where it stands, and the
    run ends. It counts from the second step on; the first has `init_timeout_seconds`. At least 60 below
    train_timeout_seconds, so that the rank that hangs is named first. 0: never."""

    naming_seconds: ClassVar[int] = 60
    """What a collective may take beyond the limit of its step: time to find out and to say which rank hangs."""

    def validate(self) -> None:
        """Raise `UserError` for a time limit that is not positive, or that ends the run before a hang is named."""
        require_at_least(1, comm__init_timeout_seconds=self.init_timeout_seconds)
        require_at_least(1, comm__train_timeout_seconds=self.train_timeout_seconds)
        require_at_least(0, comm__step_timeout_seconds=self.step_timeout_seconds)
        least = self.step_timeout_seconds + self.naming_seconds
        if 0 < self.step_timeout_seconds and self.train_timeout_seconds < least:
            raise UserError(
                f"--comm.train_timeout_seconds {self.train_timeout_seconds} must be at least {least}, to leave "
                f"{self.naming_seconds} s beyond --comm.step_timeout_seconds to name the rank that hangs"
            )


@dataclass(kw_only=True, slots=True)
class DebugConfig:
    """Reproducibility."""

    seed: int = 0
    """Seed of the initial weights, the order of the data and every random operation."""

    deterministic: bool = False
    """Use deterministic algorithms only: bit-identical runs on CUDA, at some cost. (CPU runs are anyway.)"""

    ledger: bool = False
    """Write down in ledger.jsonl which documents each step trains on."""

    def validate(self) -> None:
        """Raise `UserError` for a seed that the generators do not take."""
        require_at_least(0, debug__seed=self.seed)
