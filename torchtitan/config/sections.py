"""Configuration sections that belong to no single component."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import ClassVar, Literal

from torchtitan.config.configurable import Section
from torchtitan.config.schedule import parse_changes
from torchtitan.tools.errors import UserError, require


def require_at_least(minimum: float, **values: float | None) -> None:
    """Raise `UserError` for the first of `values` (option name with `__` for `.`) that is below
    `minimum`, or NaN."""
    for name, value in values.items():
        require(
            value is None or value >= minimum,
            f"--{name.replace('__', '.')}",
            value,
            f"at least {minimum}",
        )


@dataclass(kw_only=True, slots=True)
class TrainingConfig(Section):
    """Length, batch sizes and precision of training."""

    steps: int = 1000
    """Optimizer steps."""

    epochs: int | None = None
    """Passes over the data. If its size is known, they replace `steps`, even if both are set, and
    the run logs this. A stream of unknown size ends after these passes, and after `steps` at the
    latest; its schedule has the length `steps`."""

    seq_len: int = 512
    """Tokens in a window, the sequence that the model sees at once."""

    local_batch_size: int = 4
    """Windows that one data-parallel rank processes at once."""

    global_batch_size: int = -1
    """Windows in an optimizer step over all ranks. Gradients accumulate if this exceeds
    local_batch_size times the number of data-parallel ranks. -1: no accumulation."""

    batch_schedule: list[str] = field(default_factory=list)
    """Later values of global_batch_size, each after a number of steps, or of tokens with a t:
    1000:64 5e8t:128."""

    seq_len_schedule: list[str] = field(default_factory=list)
    """Later values of seq_len, like batch_schedule: 1000:2048 5e8t:4096. All lengths divide the
    longest."""

    max_norm: float = 1.0
    """Maximum total gradient norm; larger gradients are scaled down to it. `inf`: only measure the
    norm."""

    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Response to a NaN or infinite loss or gradient norm: `stop` ends the run, naming the step and
    its documents; `skip` continues with the next batch, without changing weights or optimizer
    state."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the master weights and the optimizer state. bfloat16 loses small updates."""

    mixed_precision_param: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Type of the forward and backward computation. float16 is for GPUs without bfloat16 (V100,
    T4), and multiplies the loss by a factor (--loss_scale)."""

    mixed_precision_reduce: Literal["float32", "bfloat16"] = "float32"
    """Type in which gradients are summed over ranks."""

    enable_cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in CPU memory, and copy each layer's weights to
    the device when it computes. Needs data-parallel sharding (FSDP)."""

    skip_data: list[str] = field(default_factory=list)
    """Data to skip, given as the steps that would otherwise train on it: "100-120" "300". These
    steps train on the data that follows instead."""

    gc_freq: int = 50
    """Steps between runs of Python's garbage collector. It is off in between, so that all ranks
    pause together."""

    def validate(self) -> None:
        require_at_least(
            1,
            training__steps=self.steps,
            training__epochs=self.epochs,
            training__seq_len=self.seq_len,
        )
        require(self.steps <= 10**12, "--training.steps", self.steps, "at most 1e12")
        require(self.seq_len <= 2**30, "--training.seq_len", self.seq_len, "at most 2^30")
        require_at_least(
            1, training__local_batch_size=self.local_batch_size, training__gc_freq=self.gc_freq
        )
        require(
            self.max_norm > 0, "--training.max_norm", self.max_norm, "above 0 (inf: never clip)"
        )
        parse_step_ranges(self.skip_data)
        for option in ("batch_schedule", "seq_len_schedule"):
            if parse_changes(option, 0, getattr(self, option))[1:] and self.epochs is not None:
                raise UserError(
                    f"--training.{option} cannot be combined with --training.epochs; set "
                    "--training.steps"
                )
        *shorter, longest = self.seq_lens
        for length in shorter:
            require(
                longest % length == 0,
                "a length of --training.seq_len_schedule",
                length,
                f"a divisor of {longest}",
            )

    @property
    def seq_lens(self) -> list[int]:
        """All lengths of windows, ascending."""
        changes = parse_changes("seq_len_schedule", self.seq_len, self.seq_len_schedule)
        return sorted({change.value for change in changes})

    def resolve_global_batch_size(self, data_parallel_degree: int) -> int:
        """Return the samples of the first optimizer step. Raise `UserError` if local batches do not
        divide a batch."""
        one_pass = self.local_batch_size * data_parallel_degree
        first = one_pass if self.global_batch_size == -1 else self.global_batch_size
        later = {
            f"batch_schedule {word}": int(word.rpartition(":")[2]) for word in self.batch_schedule
        }
        for option, size in {f"global_batch_size {first}": first, **later}.items():
            if size < 1 or size % one_pass:
                raise UserError(
                    f"--training.{option} is not a multiple of local_batch_size x data-parallel "
                    f"ranks = {self.local_batch_size} x {data_parallel_degree} = {one_pass}"
                )
        return first


def parse_step_ranges(words: Sequence[str]) -> list[range]:
    """Return ranges for `["100-120", "300"]`, both ends inclusive. Raise `UserError` for a
    malformed word."""
    ranges = []
    for word in words:
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", word, re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last:
            raise UserError(
                f"--training.skip_data '{word}' is neither a step from 1, nor a range like 100-120"
            )
        ranges.append(range(first, last + 1))
    return ranges


PipelineSchedule = Literal[
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
]


@dataclass(kw_only=True, slots=True)
class ParallelismConfig(Section):
    """Degrees of parallelism, which multiply to the number of processes."""

    auto: bool = False
    """Choose degrees, pipeline schedule, local batch and activation checkpointing for the fastest
    predicted step that fits into memory, before the run starts (docs/foresight.md). A run that
    resumes keeps its layout."""

    data_parallel_replicate_degree: int = 1
    """Replicas of the weights. Above 1: DDP with shard degree 1, HSDP with a higher shard
    degree."""

    data_parallel_shard_degree: int = -1
    """Ranks that shard one copy of weights, gradients and optimizer state (FSDP2). -1: all
    remaining ranks."""

    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Free a layer's gathered weights after its forward pass: `always` saves memory, `never` saves
    communication. `default` means `always`, except for the last layers, which the backward pass
    needs first. Under pipeline parallelism it means `never`, since every micro-batch would gather
    the weights again."""

    tensor_parallel_degree: int = 1
    """Ranks that split each layer's matrices, and the sequence between layers. Must divide heads,
    key/value heads, the feed-forward width and training.seq_len."""

    disable_loss_parallel: bool = False
    """Under tensor parallelism, gather hidden states and output weights and compute the whole loss
    on every rank, instead of splitting it by vocabulary. For a custom loss that needs full
    logits."""

    enable_async_tensor_parallel: bool = False
    """Split collectives of tensor parallelism, by the compiler, into parts that overlap with matrix
    products. Needs a compiled model, and GPUs of one host that reach each other's memory
    (NVLink)."""

    context_parallel_degree: int = 1
    """Ranks that split each sequence. Each rank computes its part of the tokens, and gathers all
    keys and values."""

    context_parallel_load_balancer: Literal["headtail", "none"] = "headtail"
    """Tokens that each context-parallel rank gets: `headtail`, two pieces at equal distance from
    the ends of the sequence, which balances causal attention; `none`, one contiguous piece."""

    expert_parallel_degree: int = 1
    """Ranks that divide the routed experts of each layer, and exchange tokens. It divides the
    experts, and the product of shard, context and tensor degree; without the tensor degree if
    expert_tensor_parallel_degree equals it."""

    expert_tensor_parallel_degree: int = 1
    """Ranks that split the width of each routed expert: 1 or tensor_parallel_degree."""

    pipeline_parallel_degree: int = 1
    """Ranks that split the layers. Each rank holds one or more stages of the model."""

    pipeline_parallel_schedule: PipelineSchedule = "1F1B"
    """Order in which stages process micro-batches. GPipe and 1F1B have one stage per rank; the
    others have two or more (ZBVZeroBubble and DualPipeV: two)."""

    pipeline_parallel_microbatch_size: int = 1
    """Windows of training.local_batch_size that pass through the pipeline together."""

    pipeline_parallel_layers_per_stage: int | None = None
    """Layers per stage, which determine the number of stages. None: one stage per rank for GPipe
    and 1F1B, else two."""

    pipeline_parallel_first_stage_less_layers: int = 1
    """Cost of the token embedding, in layers, when the model is divided into stages."""

    pipeline_parallel_last_stage_less_layers: int = 1
    """Cost of the final norm and the output head, in layers, when the model is divided into
    stages."""

    module_fqns_per_model_part: list[str] | None = None
    """Modules of each stage, instead of an automatic division. Commas separate the names within a
    stage: "tok_embeddings,layers.0,layers.1" "layers.2,layers.3,head"."""

    @property
    def splits_backward(self) -> bool:
        """True if gradients of inputs and of weights are computed at different times, from the same
        saved tensors."""
        schedules = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
        return self.pipeline_parallel_degree > 1 and self.pipeline_parallel_schedule in schedules

    def require_one(self, *kinds: str, user: str, why: str = "") -> None:
        """Raise `UserError` for the first kind of parallelism with a degree above 1, which `user`
        does not support, and `why`."""
        for kind in kinds:
            if (degree := getattr(self, f"{kind}_parallel_degree")) > 1:
                option = f"--parallelism.{kind}_parallel_degree {degree}"
                reason = f", {why}" if why else ""
                raise UserError(f"{option} cannot be combined with {user}{reason}; set it to 1")

    def validate(self) -> None:
        if self.auto:
            raise UserError(
                "--parallelism.auto works in a training run that `torchtitan train` starts; "
                "otherwise, use the options that `torchtitan plan` prints"
            )
        self.check_values()

    def check_values(self) -> None:
        """Raise `UserError` for a number out of range."""
        numbers = {name: value for name, value in asdict(self).items() if type(value) is int}
        for name, value in numbers.items():
            if (name, value) != ("data_parallel_shard_degree", -1):
                require_at_least(
                    0 if name.endswith("less_layers") else 1, **{f"parallelism__{name}": value}
                )


@dataclass(kw_only=True, slots=True)
class ActivationCheckpointConfig(Section):
    """Activation checkpointing: recompute forward results in the backward pass instead of keeping
    them."""

    mode: Literal["none", "full", "selective", "memory_budget", "auto"] = "none"
    """`none` keeps everything; `full` keeps only each layer's input; `selective` follows
    `selective_option`; `memory_budget` lets the compiler choose (needs --compile.enable); `auto`
    chooses the first of none, selective and full with which a step fits in the GPU's memory, by dry
    runs before the start (without a GPU: none)."""

    selective_option: str = "op"
    """`op`: keep the results of attention, reduce-scatter, all-to-all, and every second matrix
    product. A number n: recompute every n-th layer in full, and keep all results of the other
    layers."""

    memory_budget: float = 0.5
    """Fraction of mode `none`'s memory that the compiler may use, from 0 (recompute as much as
    possible) to 1."""

    def validate(self) -> None:
        section = "--activation_checkpoint"
        option = self.selective_option
        budget = self.memory_budget
        valid = option == "op" or option.isdecimal() and int(option) >= 1
        require(
            valid, f"{section}.selective_option", f"'{option}'", "`op` or a number of layers from 1"
        )
        require(0 <= budget <= 1, f"{section}.memory_budget", budget, "from 0 to 1")


@dataclass(kw_only=True, slots=True)
class CompileConfig(Section):
    """Settings of torch.compile."""

    enable: bool = False
    """Compile `components`. The first step takes longer; later steps take less time and memory."""

    components: list[Literal["model", "loss"]] = field(default_factory=lambda: ["model", "loss"])
    """Parts to compile: `model`, each layer separately; `loss`, the loss of a chunk of logits."""

    backend: str = "inductor"
    """Compiler: `inductor`, or another from `torch.compiler.list_backends()` (`aot_eager`, for
    debugging)."""

    @property
    def compiles_model(self) -> bool:
        """True if the layers of the model are compiled."""
        return self.enable and "model" in self.components


@dataclass(kw_only=True, slots=True)
class CommConfig(Section):
    """Timeouts of the communication between ranks."""

    init_timeout_seconds: int = 1800
    """Seconds that a collective may wait for the slowest rank in the first step, including loading
    and compiling."""

    train_timeout_seconds: int = 900
    """Seconds that a collective may wait for the slowest rank after the first step."""

    step_timeout_seconds: int = 600
    """Seconds after which an unfinished step counts as hanging: every rank prints its position, and
    the run ends. The first step has `init_timeout_seconds` instead. Must be at least 60 below
    train_timeout_seconds, so that the hanging rank is named before a collective times out. 0: no
    limit."""

    naming_seconds: ClassVar[int] = 60
    """Time by which the timeout of a collective must exceed a step's limit, to find and report the
    hanging rank."""

    def validate(self) -> None:
        """Raise `UserError` for a time limit that is not positive, or that ends the run before a
        hang is reported."""
        require_at_least(1, comm__init_timeout_seconds=self.init_timeout_seconds)
        require_at_least(1, comm__train_timeout_seconds=self.train_timeout_seconds)
        require_at_least(0, comm__step_timeout_seconds=self.step_timeout_seconds)
        least = self.step_timeout_seconds + self.naming_seconds
        if 0 < self.step_timeout_seconds and self.train_timeout_seconds < least:
            raise UserError(
                f"--comm.train_timeout_seconds {self.train_timeout_seconds} must be at least "
                f"{least}, to leave {self.naming_seconds} s beyond --comm.step_timeout_seconds to "
                "name the rank that hangs"
            )


@dataclass(kw_only=True, slots=True)
class DebugConfig(Section):
    """Reproducibility."""

    seed: int = 0
    """Seed of the initial weights, the order of the data and every random operation."""

    deterministic: bool = False
    """Use only deterministic algorithms: bit-identical runs on CUDA, at some cost (CPU runs always
    are)."""

    ledger: bool = False
    """Record the documents of each step in ledger.jsonl."""

    def validate(self) -> None:
        require(0 <= self.seed < 2**63, "--debug.seed", self.seed, "from 0 to 2^63 - 1")
