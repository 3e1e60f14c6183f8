"""Pipeline parallelism: splits a model into stages, and runs them by a schedule of
`torch.distributed.pipelining`.

`torch.distributed.pipelining` is imported inside the functions that use it, since it imports the
compiler.
"""

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.config import ParallelismConfig
from torchtitan.distributed.gradients import clip_grad_norm, redistribute_like
from torchtitan.distributed.initialize import local_part
from torchtitan.protocols import BaseModel
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.tools.errors import UserError
from torchtitan.tools.torch_private import adjust_microbatches
from torchtitan.tools.user_code import is_of_user

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

_V_SCHEDULES = ("ZBVZeroBubble", "DualPipeV")
"""Rank r of P holds stages r and 2P - 1 - r; in other schedules with several stages, r, r + P, r +
2P, …"""


@dataclass(frozen=True)
class PipelinePlan:
    """Modules and rank of each stage, and the number of micro-batches."""

    schedule: str
    degree: int
    stages: tuple[tuple[str, ...], ...]
    """Names of the modules of each stage; each module of the model is in one stage."""
    n_microbatches: int
    shared: tuple[str, ...] = ()
    """Names of first-stage modules that the last stage copies: a tied embedding."""

    @classmethod
    def from_config(
        cls, config: ParallelismConfig, model: BaseModel.Config, local_batch_size: int
    ) -> "PipelinePlan":
        """Divide a model into stages. Raise `UserError` if model, schedule, stages and batch do not
        fit together."""
        names = model.pipeline_modules()
        is_listed = config.module_fqns_per_model_part is not None
        stages = _stages_by_name(config, names) if is_listed else _stages_by_weight(config, names)
        size = config.pipeline_parallel_microbatch_size
        if local_batch_size % size:
            raise UserError(
                f"--parallelism.pipeline_parallel_microbatch_size {size} does not divide "
                f"--training.local_batch_size {local_batch_size}"
            )
        schedule, degree = config.pipeline_parallel_schedule, config.pipeline_parallel_degree
        plan = cls(
            schedule, degree, stages, local_batch_size // size, shared=tuple(model.shared_modules)
        )
        plan._check_schedule()
        return plan

    def __str__(self) -> str:
        """Return one line: the schedule, the micro-batches, and the first and last module of each
        stage."""
        stages = " | ".join(
            names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}" for names in self.stages
        )
        return f"pipeline: {self.schedule}, {self.n_microbatches} micro-batches; {stages}"

    def stages_of_rank(self, rank: int) -> list[int]:
        """Return the numbers of a pipeline rank's stages."""
        if self.schedule in _V_SCHEDULES:
            return [rank, 2 * self.degree - 1 - rank]
        return list(range(rank, len(self.stages), self.degree))

    def modules_of_stage(self, stage: int) -> tuple[str, ...]:
        """Return the names of a stage's modules, including copies."""
        return self.stages[stage] + (self.shared if stage == len(self.stages) - 1 else ())

    def _check_schedule(self) -> None:
        stages, name = len(self.stages), f"--parallelism.pipeline_parallel_schedule {self.schedule}"
        is_single = _is_single(self.schedule)
        if is_single and stages != self.degree:
            raise UserError(
                f"{name} needs one stage per rank, but there are {stages} stages for {self.degree} "
                "ranks"
            )
        if not is_single and (stages % self.degree or stages < 2 * self.degree):
            raise UserError(
                f"{name} needs the same number of stages, at least two, on each rank, but there "
                f"are {stages} stages for {self.degree} ranks"
            )
        if self.schedule in _V_SCHEDULES and stages != 2 * self.degree:
            raise UserError(
                f"{name} needs two stages per rank, but there are {stages} stages for "
                f"{self.degree} ranks"
            )
        least = stages if self.schedule in ("1F1B", "DualPipeV") else 1
        rounds = max(1, self.n_microbatches // self.degree)
        divisor = rounds if self.schedule in ("Interleaved1F1B", "InterleavedZeroBubble") else 1
        if self.n_microbatches < least or self.n_microbatches % divisor:
            rule = (
                f"at least {least}" if self.n_microbatches < least else f"a multiple of {divisor}"
            )
            raise UserError(
                f"{name} with {stages} stages on {self.degree} ranks needs {rule} micro-batches, "
                "but --training.local_batch_size / "
                f"--parallelism.pipeline_parallel_microbatch_size is {self.n_microbatches}"
            )


def _is_single(schedule: str) -> bool:
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    return issubclass(get_schedule_class(schedule), PipelineScheduleSingle)


def _stages_by_name(config: ParallelismConfig, names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return the stages that the user lists. Raise `UserError` unless they contain all modules, in
    order."""
    option = "--parallelism.module_fqns_per_model_part"
    parts = config.module_fqns_per_model_part or []
    if config.pipeline_parallel_layers_per_stage is not None:
        raise UserError(
            f"{option} already defines the stages; remove "
            "--parallelism.pipeline_parallel_layers_per_stage"
        )
    stages = tuple(tuple(filter(None, map(str.strip, part.split(",")))) for part in parts)
    listed = [name for stage in stages for name in stage]
    if unknown := [name for name in listed if name not in names]:
        raise UserError(f"{option}: '{unknown[0]}' is not a part of the model ({names})")
    if listed != list(names):
        raise UserError(
            f"{option} must list each part of the model once, in this order: {', '.join(names)}"
        )
    if not all(stages):
        raise UserError(f"{option}: a stage is empty")
    return stages


def _stages_by_weight(
    config: ParallelismConfig, names: Sequence[str]
) -> tuple[tuple[str, ...], ...]:
    """Return stages of similar cost: a layer costs 1; options set the cost of embedding and head in
    layers."""
    first = config.pipeline_parallel_first_stage_less_layers
    last = config.pipeline_parallel_last_stage_less_layers
    layers = len(names) - 2
    n_stages = _count_stages(config, first + layers + last)
    # Layers of each stage: as even as possible, less the cost of embedding and head.
    share, rest = divmod(first + layers + last, n_stages)
    capacity = [share + (stage < rest) for stage in range(n_stages)]
    capacity[0] -= first
    capacity[-1] -= last
    if min(capacity) < 0 or (n_stages > 2 and min(capacity[1:-1]) < 1):
        raise UserError(
            f"{layers} layers are too few for {n_stages} pipeline stages, with the embedding "
            f"counting for {first} and the head for {last} "
            "(--parallelism.pipeline_parallel_first_stage_less_layers, …last_stage_less_layers)"
        )
    ends = [0, *(1 + sum(capacity[: stage + 1]) for stage in range(n_stages - 1)), len(names)]
    return tuple(tuple(names[start:end]) for start, end in pairwise(ends))


def _count_stages(config: ParallelismConfig, weight: int) -> int:
    degree, per_stage = config.pipeline_parallel_degree, config.pipeline_parallel_layers_per_stage
    if per_stage is None:
        return degree if _is_single(config.pipeline_parallel_schedule) else 2 * degree
    stages = -(-weight // per_stage)
    if stages % degree:
        raise UserError(
            f"--parallelism.pipeline_parallel_layers_per_stage {per_stage} gives {stages} stages "
            f"(embedding and head count as layers), which pipeline_parallel_degree {degree} does "
            "not divide; set another number, or change their weights "
            "(--parallelism.pipeline_parallel_first_stage_less_layers, …last_stage_less_layers)"
        )
    return stages


def take_stage(model: BaseModel, names: Sequence[str]) -> BaseModel:
    """Copy the named parts of a model on the meta device (`BaseModel.keep_modules`)."""
    stage = copy.deepcopy(model)
    stage.keep_modules(names)
    return stage


class Pipeline:
    """This rank's stages, run together with the stages of other ranks in the order of a schedule.

    Args:
        parts: this rank's stages, parallelized and materialized, in the order of
            `plan.stages_of_rank`.
        mesh: the dimension of pipeline parallelism.
        hidden: hidden states of a micro-batch, as stages exchange them, on the meta device.
        head: computes the summed loss in the last stage, from hidden states, output weights and
            `labels_BL`.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        parts: Sequence[nn.Module],
        *,
        mesh: DeviceMesh,
        device: torch.device,
        hidden: Tensor,
        head: Callable[..., Tensor],
    ):
        from torch.distributed.pipelining.schedules import get_schedule_class

        self.head = head
        self._scaled: Callable[[Tensor], Tensor] = _unscaled
        stages = [
            _make_stage(part, index, len(plan.stages), mesh, device, hidden)
            for index, part in zip(plan.stages_of_rank(mesh.get_local_rank()), parts, strict=True)
        ]
        self.has_first = any(stage.is_first for stage in stages)
        self.has_last = any(stage.is_last for stage in stages)
        self._group = mesh.get_group()
        self._shared = [
            _trained(stage.submod, plan.shared)
            for stage in stages
            if stage.is_first or stage.is_last
        ]
        self._copies = set(self._shared[-1]) if self.has_last else set()
        self._is_summed = True  # if true, the copies of shared modules have the whole gradient
        self.schedule = get_schedule_class(plan.schedule)(
            stages[0] if _is_single(plan.schedule) else stages,
            n_microbatches=plan.n_microbatches,
            loss_fn=lambda summed_loss, labels: self._scaled(summed_loss),
            # The loss is a sum over tokens, and the trainer divides by their number, so there is
            # nothing to average.
            scale_grads=False,
        )
        adjust_microbatches(self.schedule, _select_rows)

    def forward_backward(
        self, batch: dict[str, object], scaled: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Add the gradients of a batch's loss: the sum over micro-batches of `scaled(summed loss)`,
        with a linear `scaled`. Return the loss on the rank with the last stage, 0 on the others."""
        self._scaled, self._is_summed = scaled, False
        return self._run(self.schedule.step, batch)

    @torch.no_grad()
    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        """Complete the gradients of shared modules, once after the last backward pass; then clip
        the gradients of all stages and return their norm, like
        `torchtitan.distributed.gradients.clip_grad_norm`."""
        if not self._is_summed:
            for copies in zip(*self._shared, strict=True):
                self._sum_gradients(copies)
            self._is_summed = True
        return clip_grad_norm(parameters, max_norm, self._group, self._copies)

    def _sum_gradients(self, copies: Sequence[nn.Parameter]) -> None:
        """Give a shared parameter's copies the sum of their gradients. This rank has both copies in
        a V schedule; otherwise, the other copy is on the first or the last rank. The order of two
        terms does not change a sum, so the copies stay bit-identical."""
        own, *others = [_local_gradient(parameter) for parameter in copies]
        own += others[0] if others else self._exchange(own)
        for other in others:
            other.copy_(own)

    def _exchange(self, own: Tensor) -> Tensor:
        """Exchange `own` with the rank that has the other copy, and return its tensor."""
        peer = self._group.size() - 1 if self.has_first else 0
        sent = own.contiguous()
        received = torch.empty_like(own, memory_format=torch.contiguous_format)
        operations = [
            dist.P2POp(operation, tensor, group=self._group, group_peer=peer)
            for operation, tensor in ((dist.isend, sent), (dist.irecv, received))
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return received

    @torch.no_grad()
    def forward(self, batch: dict[str, object]) -> Tensor:
        """Return the summed loss of a batch on the rank with the last stage, 0 on the others."""
        self._scaled = _unscaled
        with _forward_only(self.schedule):
            return self._run(self.schedule.eval, batch)

    def _run(self, run: Callable[..., object], batch: dict[str, Any]) -> Tensor:
        tokens, labels = batch["input"], batch["labels"]
        # A stage cannot create this itself, since its input may be only a part of the sequence.
        attention = batch.get("attention", AttentionMetadata.of_rows(*tokens.shape))
        losses: list[Tensor] = []
        try:
            run(
                *((tokens,) if self.has_first else ()),
                target=labels if self.has_last else None,
                losses=losses,
                return_outputs=False,
                attention=attention,
                head=self.head,
                labels_BL=labels,
            )
        except RuntimeError as error:
            # PyTorch wraps a stage's error in one that adds inputs and hides the place.
            if error.__cause__ and is_of_user(error.__cause__):
                raise error.__cause__ from None
            raise
        return sum((loss.detach() for loss in losses), torch.zeros((), device=labels.device))


def _unscaled(loss: Tensor) -> Tensor:
    return loss


def _trained(stage: nn.Module, names: Iterable[str]) -> list[nn.Parameter]:
    """Return the trained parameters of a stage's modules, in an order that is the same in all
    stages."""
    parameters = (
        parameter for name in names for parameter in stage.get_submodule(name).parameters()
    )
    return [parameter for parameter in parameters if parameter.requires_grad]


def _local_gradient(parameter: nn.Parameter) -> Tensor:
    """Return this rank's shard of a gradient, zeros if the stage has not used the parameter; with
    shards as in the parameter, since tensor parallelism may leave gradients partial or
    replicated."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    parameter.grad = redistribute_like(parameter.grad, parameter)
    return local_part(parameter.grad)


def _select_rows(microbatches: list[dict[str, Any]]) -> None:
    """Give each micro-batch the attention of its rows; PyTorch divides only tensors, and repeats
    other values."""
    for index, inputs in enumerate(microbatches):
        attention: AttentionMetadata = inputs["attention"]
        size = attention.n_rows // len(microbatches)
        inputs["attention"] = attention.rows(index * size, (index + 1) * size)


@contextlib.contextmanager
def _forward_only(schedule: Any) -> Iterator[None]:
    """Remove backward actions from a schedule, since PyTorch would run some of them in evaluation
    and fail."""
    from torch.distributed.pipelining import schedules

    if isinstance(schedule, schedules.PipelineScheduleSingle):
        yield
        return
    all_actions = schedule.pipeline_order_with_comms
    kept = (
        schedules.FORWARD,
        schedules.SEND_F,
        schedules.RECV_F,
        schedules.UNSHARD,
        schedules.RESHARD,
    )

    def kept_parts(action: Any) -> list[object]:
        parts = action.sub_actions if action.computation_type == schedules.OVERLAP_F_B else [action]
        return [part for part in parts if part.computation_type in kept]

    schedule.pipeline_order_with_comms = {
        rank: [part for action in actions for part in kept_parts(action)]
        for rank, actions in all_actions.items()
    }
    try:
        yield
    finally:
        schedule.pipeline_order_with_comms = all_actions


def _make_stage(
    part: nn.Module,
    index: int,
    n_stages: int,
    mesh: DeviceMesh,
    device: torch.device,
    hidden: Tensor,
) -> "PipelineStage":
    """Build a stage with declared shapes, which PyTorch would otherwise infer by running the model
    once."""
    from torch.distributed.pipelining import PipelineStage

    samples, length = hidden.shape[:2]
    tokens = torch.empty(samples, length, dtype=torch.int64, device="meta")
    loss = torch.empty((), dtype=torch.float32, device="meta", requires_grad=True)
    return PipelineStage(
        part,
        index,
        n_stages,
        device,
        input_args=tokens if index == 0 else hidden,
        output_args=loss if index == n_stages - 1 else hidden,
        group=mesh.get_group(),
    )
