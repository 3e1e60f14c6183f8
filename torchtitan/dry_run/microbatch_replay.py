"""Runs a complete pipeline schedule, but computes only a few of its micro-batches."""

import functools
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from torchtitan.dry_run.memory_tracker import Allocation, MemoryTracker
from torchtitan.dry_run.observer import tensors_in
from torchtitan.dry_run.work_tracker import Work, WorkTracker
from torchtitan.tools.torch_private import pipeline_stages, skip_shape_vote, tree_map_only

_REPLAYED = (ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B)
"""Schedules with whole backward passes in the order of the forward passes: the second one
represents all later ones."""


@dataclass
class _Sample:
    """Effect of a micro-batch's computation on memory (the events between two moments), its work
    and its result."""

    start: int
    end: int
    work: Work
    result: Any
    """For each tensor of the result, a function that makes a similar one."""
    allocations: list[Allocation | None]
    """Allocations of the result's tensors."""


@dataclass
class MicrobatchReplay:
    """Compute the first micro-batch of each stage, which gathers weights and creates gradients, and
    the second; replay the effects of the second on memory and work for all others.

    A replayed result is a tensor of the right shape, with memory as long as the schedule holds it.
    Schedules that are not `_REPLAYED` compute every micro-batch. `schedule` must not have run;
    `after_backward` is called after each computed backward pass.
    """

    schedule: PipelineScheduleSingle | PipelineScheduleMulti
    memory: MemoryTracker
    work: WorkTracker
    after_backward: Callable[[], None]
    samples: dict[Hashable, _Sample] = field(default_factory=dict)
    twins: defaultdict[Hashable, dict[Allocation, Allocation]] = field(
        default_factory=lambda: defaultdict(dict)
    )

    def install(self) -> None:
        """Insert this object between the schedule and its stages. Skip their shape exchange:
        `Pipeline` declares shapes."""
        skip_shape_vote(self.schedule)
        for stage in pipeline_stages(self.schedule):
            forward = functools.partial(self.forward, stage, stage.forward_one_chunk)
            backward = functools.partial(self.backward, stage, stage.backward_one_chunk)
            vars(stage).update(forward_one_chunk=forward, backward_one_chunk=backward)

    def forward(
        self,
        stage: PipelineStage,
        compute: Callable[..., object],
        microbatch: int,
        *args: object,
        **kwargs: object,
    ) -> object:
        """Replace `stage.forward_one_chunk`."""
        key = (stage.stage_index, "forward")
        if microbatch < 2 or not isinstance(self.schedule, _REPLAYED):
            return self._sample(key, lambda: compute(microbatch, *args, **kwargs))
        output = self._replay(key, (stage.stage_index, microbatch))
        stage.fwd_cache[microbatch] = ((output,), [])
        return output

    def backward(
        self,
        stage: PipelineStage,
        compute: Callable[..., object],
        microbatch: int,
        **kwargs: object,
    ) -> None:
        """Replace `stage.backward_one_chunk`."""
        key = (stage.stage_index, "backward")

        def gradients_of_inputs() -> object:
            compute(microbatch, **kwargs)
            return stage.bwd_cache[microbatch]

        if microbatch < 2 or not isinstance(self.schedule, _REPLAYED):
            self._sample(key, gradients_of_inputs)
            self.after_backward()
        else:
            del stage.fwd_cache[microbatch]
            stage.bwd_cache[microbatch] = self._replay(key, (stage.stage_index, microbatch))

    def _sample(self, key: Hashable, compute: Callable[[], object]) -> object:
        start, before = self.memory.now, self.work.work.copy()
        result = compute()
        allocations = [self.memory.allocation_of(tensor) for tensor in tensors_in(result)]
        again = tree_map_only(
            Tensor, lambda t: functools.partial(torch.empty, t.shape, dtype=t.dtype), result
        )
        self.samples[key] = _Sample(
            start, self.memory.now, self.work.work - before, again, allocations
        )
        return result

    def _replay(self, key: Hashable, microbatch: Hashable) -> Any:
        sample = self.samples[key]
        self.work.work += sample.work
        self.memory.replay(
            sample.start, sample.end, self.twins[microbatch], omit=sample.allocations
        )
        result = tree_map_only(functools.partial, lambda make: make(), sample.result)
        for tensor, original in zip(tensors_in(result), sample.allocations, strict=True):
            if (copied := self.memory.allocation_of(tensor)) is not None:
                copied.twin_of = original
        return result
