"""Runs a pipeline schedule in full, computing only a few of its micro-batches."""

import functools
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining.schedules import BACKWARD_INPUT, FULL_BACKWARD, PipelineScheduleMulti, _Action
from torch.distributed.pipelining.stage import InferenceMode
from torch.utils._pytree import tree_iter, tree_map_only

from torchtitan.distributed.pipeline import Pipeline
from torchtitan.tools.memory_tracker import Allocation, MemoryTracker
from torchtitan.tools.work_tracker import Work, WorkTracker


@dataclass
class _Sample:
    """What a computation of one micro-batch did to the memory, from one moment to another; its work and its result."""

    start: int
    end: int
    work: Work
    result: Any
    """For each tensor of the result a function that makes one like it."""
    allocations: list[Allocation | None]
    """Of the result's tensors."""


class MicrobatchReplay:
    """Computes the first micro-batch of each stage, in which weights are gathered and gradients begin to exist, and one
    more for each way in which the schedule computes backward passes: at once, or inputs and weights one after the other.

    All others do to memory and work exactly what that one did. What they hand to another stage, or to the loss, is a
    tensor of the right shape, and its memory lasts as long as the schedule holds on to it.
    """

    def __init__(
        self, pipeline: Pipeline, memory: MemoryTracker, work: WorkTracker, after_backward: Callable[[], None]
    ):
        self.schedule = pipeline._schedule
        self.memory = memory
        self.work = work
        self.after_backward = after_backward
        self.samples: dict[Hashable, _Sample] = {}
        self.twins: dict[Hashable, dict[Allocation, Allocation]] = {}

    def install(self) -> None:
        """Put this between the schedule and its stages."""
        self.schedule._warmup_p2p = _skip_vote
        single = getattr(self.schedule, "_stage", None)
        for stage in [single] if single else self.schedule._stages:
            templates = _templates(self.schedule, stage.stage_index)
            stage.forward_one_chunk = functools.partial(self.forward, stage, stage.forward_one_chunk, templates)
            stage.backward_one_chunk = functools.partial(self.backward, stage, stage.backward_one_chunk, templates)
            stage.backward_weight_one_chunk = functools.partial(
                self.backward_weight, stage, stage.backward_weight_one_chunk, templates
            )

    def forward(
        self, stage: Any, compute: Callable[..., Any], templates: list[int], chunk: int, *args: Any, **kwargs: Any
    ) -> Any:
        """`stage.forward_one_chunk`."""
        template = templates[chunk]
        if chunk == template:
            return self._sample((stage.stage_index, template, "forward"), lambda: compute(chunk, *args, **kwargs))
        output = self._replay((stage.stage_index, template, "forward"), (stage.stage_index, chunk))
        stage.fwd_cache[chunk] = ((output,), [])
        return output

    def backward(
        self, stage: Any, compute: Callable[..., Any], templates: list[int], chunk: int, **kwargs: Any
    ) -> None:
        """`stage.backward_one_chunk`."""
        template = templates[chunk]

        def gradients_of_inputs() -> Any:
            compute(chunk, **kwargs)
            return stage.bwd_cache[chunk]

        if chunk == template:
            self._sample((stage.stage_index, template, "backward"), gradients_of_inputs)
            self.after_backward()
        else:
            del stage.fwd_cache[chunk]
            stage.bwd_cache[chunk] = self._replay((stage.stage_index, template, "backward"), (stage.stage_index, chunk))

    def backward_weight(
        self, stage: Any, compute: Callable[..., Any], templates: list[int], chunk: int, **kwargs: Any
    ) -> None:
        """`stage.backward_weight_one_chunk`."""
        template = templates[chunk]
        if chunk == template:
            self._sample((stage.stage_index, template, "weight"), lambda: compute(chunk, **kwargs))
            self.after_backward()
        else:
            self._replay((stage.stage_index, template, "weight"), (stage.stage_index, chunk))

    def _sample(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        start, before = self.memory.now, self.work.work
        result = compute()
        made = [self.memory.allocation_of(tensor) for tensor in tree_iter(result) if isinstance(tensor, Tensor)]
        again = tree_map_only(Tensor, lambda t: functools.partial(torch.empty, t.shape, dtype=t.dtype), result)
        self.samples[key] = _Sample(start, self.memory.now, self.work.work - before, again, made)
        return result

    def _replay(self, key: Hashable, microbatch: Hashable) -> Any:
        sample = self.samples[key]
        self.work.work += sample.work
        twins = self.twins.setdefault(microbatch, {})
        self.memory.replay(sample.start, sample.end, twins, omit=sample.allocations)
        return tree_map_only(functools.partial, lambda make: make(), sample.result)


def _skip_vote(stages: list[Any], has_backward: bool, p2p_done: bool) -> None:
    """In place of a vote of all ranks, whose outcome is known: `Pipeline` says what each stage takes and gives."""
    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC


def _templates(schedule: Any, stage: int) -> list[int]:
    """For each micro-batch of a stage, the one that is computed in its place; itself, where it is computed."""
    microbatches = range(schedule._n_microbatches)
    backward = [
        action
        for action in _actions(schedule)
        if action.stage_index == stage and action.computation_type in (BACKWARD_INPUT, FULL_BACKWARD)
    ]
    order = [action.microbatch_index for action in backward]
    if order != sorted(order):  # the second is not among the first whose backward pass is computed
        return list(microbatches)
    split = {action.microbatch_index for action in backward if action.computation_type == BACKWARD_INPUT}
    firsts: dict[bool, int] = {}
    for microbatch in microbatches[1:]:
        firsts.setdefault(microbatch in split, microbatch)
    return [0, *(firsts[microbatch in split] for microbatch in microbatches[1:])]


def _actions(schedule: Any) -> Iterator[_Action]:
    """What this rank does, one after the other; nothing, where a schedule's code says it and no list: there, backward
    passes are not split."""
    if isinstance(schedule, PipelineScheduleMulti):
        for action in schedule.pipeline_order[schedule.rank]:
            if action is not None:
                yield from action.sub_actions or (action,)
