"""`PhaseClock`: the time that a rank spends in each phase of a run."""

import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from torchtitan.tools.sharded import is_fsdp_module

START_UP = "start-up"
BETWEEN_STEPS = "between steps"
GATHERING = "waiting for weights"
RETURN = "return to a checkpoint"
SAVE = "save"
EXPORT = "export"
VALIDATION = "validation"


class PhaseClock:
    """Divides a rank's time among phases: each moment belongs to the phase entered last, at first
    "start-up".

    On CUDA, whose work the host only queues, a phase begins when the device reaches its mark in the
    current stream: its time includes waiting for the host and other streams. Reading waits for
    nothing; marks not yet reached count later.

    Args:
        device: the rank's device; None: the host's clock.
    """

    def __init__(self, device: torch.device | None = None):
        self._on_cuda = device is not None and device.type == "cuda"
        self._seconds = defaultdict[str, float](float)
        self._marks = deque[tuple[str, Any]]()
        self.begun = time.time()
        self.failed_in: str | None = None
        """The innermost phase that an error ended first; `phase` is then the next one."""
        self.enter(START_UP)

    def enter(self, phase: str) -> None:
        """Begin a phase, which ends the current one."""
        self.phase = phase
        mark: Any = torch.cuda.Event(enable_timing=True) if self._on_cuda else time.perf_counter()
        if self._on_cuda:
            mark.record()
        self._marks.append((phase, mark))
        while len(self._marks) > 1 and (not self._on_cuda or self._marks[1][1].query()):
            (ended, begin), (_, end) = self._marks.popleft(), self._marks[0]
            self._seconds[ended] += begin.elapsed_time(end) / 1000 if self._on_cuda else end - begin

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Spend the block in a phase, then return to the current one."""
        outer = self.phase
        self.enter(phase)
        try:
            yield
        except BaseException:
            self.failed_in = self.failed_in or phase
            raise
        finally:
            self.enter(outer)

    def seconds(self) -> dict[str, float]:
        """Return the time spent in each phase so far."""
        self.enter(self.phase)
        return dict(self._seconds)

    def begin_at(self, when: float) -> None:
        """Move the beginning of the start-up back to `when`, in seconds since the epoch."""
        self._seconds[START_UP] += self.begun - when
        self.begun = when


def mark_gathering(model: nn.Module, clock: PhaseClock) -> None:
    """Enter the phase "waiting for weights" while FSDP's units gather weights in the phase
    "forward", so that "forward" counts only this rank's own work. Call this after applying FSDP."""

    def switch(before: str, after: str) -> Any:
        return torch.compiler.disable(
            lambda module, inputs: clock.enter(after) if clock.phase == before else None
        )

    for module in model.modules():
        if is_fsdp_module(module):
            module.register_forward_pre_hook(switch("forward", GATHERING), prepend=True)
            module.register_forward_pre_hook(switch(GATHERING, "forward"))
