"""Account of a run: the uses of its time, slow ranks, and events."""

import contextlib
import os
import platform
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import torchtitan
from torchtitan.components.goodput import goodput
from torchtitan.components.run_events import EventLog
from torchtitan.distributed.phases import BETWEEN_STEPS
from torchtitan.distributed.process_group import gather_objects
from torchtitan.tools.device import device_description
from torchtitan.tools.logging import logger
from torchtitan.tools.process import COMMAND_VARIABLE
from torchtitan.trainer.callbacks import Callback
from torchtitan.trainer.step_result import StepResult, StopReason

OWN_PHASES = (BETWEEN_STEPS, "start of the step", "data", "forward", "optimizer step")
"""Phases in which a rank does not wait for others. In the rest of a step, a slow rank delays all ranks alike."""

STRAGGLER_MARGIN = 0.1
"""A rank is slow if a phase of its own takes longer than the median of the other ranks by this part of a step."""

_PAUSES = {"start-up", "validation", "save"}
"""Phases that are not parts of a step."""


class _Spent(NamedTuple):
    """Time spent in each phase of this session, up to the end of a step."""

    step: int
    seconds: dict[str, float]


class Accounting(Callback):
    """Write what happens to the run to `events.jsonl`, name a slow rank when metrics are logged, and log the time of a
    step by phase and the run's goodput at the end. See docs/report.md."""

    def __init__(self, config: Callback.Config, *, trainer: Any):
        super().__init__(config, trainer=trainer)
        self._log: EventLog | None = None  # on rank 0
        self._hosts: list[str] = []  # of each rank
        self._first = _Spent(0, {})  # after the first step of this session
        self._since = self._first  # at the last comparison of the ranks
        self._save: tuple[int, float] | None = None  # step of an unreported save, and the time spent saving before it
        self._slow: tuple[int, str] | None = None  # rank and phase of the last comparison
        self._returned_to: int | None = None  # step of the weights to which the run returned after spikes
        self._reason: StopReason | None = None

    @contextlib.contextmanager
    def around_run(self) -> Iterator[None]:
        self._hosts = gather_objects(socket.gethostname())
        if self.trainer.rank == 0:
            self._start()
        yield

    def _start(self) -> None:
        trainer, command = self.trainer, os.environ.get(COMMAND_VARIABLE, "")
        self._returned_to = trainer.spikes.returned_to
        self._log = EventLog(Path(trainer.config.dump_folder), trainer.step, command)
        summary = trainer.dataloader.summary(trainer.total_steps * trainer.global_batch_size)
        data = [
            {"name": of.name, "rows": of.report.rows, "tokens": of.report.tokens, "epochs": of.epochs}
            for of in (summary.sets if summary else ())
        ]
        environment = {
            "torchtitan": torchtitan.__version__,
            "torch": torch.__version__,
            "Python": platform.python_version(),
            "system": platform.platform(),
            "device": device_description(trainer.device),
            "processes": len(self._hosts),
            "hosts": ", ".join(sorted(set(self._hosts))),
        }
        self._log.write(
            "start",
            trainer.step,
            begun=trainer.phases.begun,
            seconds=trainer.phases.seconds(),
            command=command,
            environment=environment,
            layout=str(trainer.parallel_dims) if trainer.mesh else "single process",
            total_steps=trainer.total_steps,
            parameters=trainer.num_parameters,
            data=data,
        )

    def on_step(self, outcome: StepResult) -> None:
        trainer = self.trainer
        spent = _Spent(trainer.step, trainer.phases.seconds())
        is_due = trainer.metrics.should_log(trainer.step)
        if not self._first.step:  # warm-up and compilation would hide the other steps
            self._first = self._since = spent
        elif is_due:
            if len(self._hosts) > 1:
                self._name_slow_rank(spent)
            self._since = spent
        if self._log:
            self._report_save(self._log, spent.seconds)
            if trainer.spikes.returned_to != self._returned_to:
                self._returned_to = trainer.spikes.returned_to
                self._log.write("returned", trainer.step, to=self._returned_to)
            if not outcome.is_taken:
                self._log.write("skipped", trainer.step, reason=str(outcome))
            if is_due:
                self._log.write("progress", trainer.step, seconds=spent.seconds)

    def _name_slow_rank(self, now: _Spent) -> None:
        """Compare the ranks' own phases since the last comparison, in one exchange of host memory."""
        n_steps = now.step - self._since.step
        spent = {phase: seconds - self._since.seconds.get(phase, 0.0) for phase, seconds in now.seconds.items()}
        own = torch.tensor([spent.get(phase, 0.0) for phase in OWN_PHASES], dtype=torch.float64)
        of_ranks = torch.empty(len(self._hosts) * len(own), dtype=torch.float64)
        dist.all_gather_into_tensor(of_ranks, own)
        excess, rank, phase = largest_excess(of_ranks.view(-1, len(own)) / n_steps)
        step_seconds = sum(seconds for phase, seconds in spent.items() if phase not in _PAUSES) / n_steps
        slow = (rank, OWN_PHASES[phase]) if excess > STRAGGLER_MARGIN * step_seconds else None
        if self._log and slow:
            host = self._hosts[rank]
            self._log.write("straggler", now.step, rank=rank, host=host, phase=slow[1], seconds_more=excess)
            if slow != self._slow:
                logger.warning(
                    f"rank {rank} on {host} is slower than the other ranks: {excess:.3f} s more per step in the phase "
                    f'"{slow[1]}", {excess / step_seconds:.0%} of a step (steps {self._since.step + 1} to {now.step})'
                )
        self._slow = slow

    def before_save(self) -> None:
        if self._save is None:  # the last step may be saved twice, in full and for export
            self._save = self.trainer.step, self.trainer.phases.seconds().get("save", 0.0)

    def _report_save(self, log: EventLog, seconds: dict[str, float]) -> None:
        if self._save and (blocked := seconds.get("save", 0.0) - self._save[1]):
            log.write("save", self._save[0], blocked=blocked)
        self._save = None

    def on_end(self, reason: StopReason) -> None:
        self._reason = reason

    def close(self) -> None:
        """If the run came to its end, log the account."""
        if self._log:
            if self._reason:
                self._finish(self._log, self._reason)
            self._log.close()
            self._log = None

    def _finish(self, log: EventLog, reason: StopReason) -> None:
        step, seconds = self.trainer.step, self.trainer.phases.seconds()
        self._report_save(log, seconds)
        log.write("end", step, reason=reason, seconds=seconds)
        if step > self._first.step > 0:
            logger.info("%s", describe_step(seconds, self._first.seconds, step - self._first.step))
        if account := goodput(log.read()):
            logger.info("%s", account)


def largest_excess(seconds_RP: torch.Tensor) -> tuple[float, int, int]:
    """Return by how much the slowest rank in a phase exceeds the median of the other ranks, the rank and the phase.

    Args:
        seconds_RP: time of each of several ranks R in each phase P.
    """
    n_ranks = len(seconds_RP)
    others = [torch.cat([seconds_RP[:rank], seconds_RP[rank + 1 :]]).quantile(0.5, dim=0) for rank in range(n_ranks)]
    excess_RP = seconds_RP - torch.stack(others)
    rank, phase = divmod(int(excess_RP.argmax()), excess_RP.shape[1])
    return float(excess_RP[rank, phase]), rank, phase


def describe_step(seconds: dict[str, float], since: dict[str, float], n_steps: int) -> str:
    """Return the mean time of a step by phase, from the phases' times before and after `n_steps`."""
    spent = {phase: seconds[phase] - since.get(phase, 0.0) for phase in seconds}
    total = sum(spent.values())
    shown = [
        f"{phase} {1000 * time / n_steps:.1f} ms ({time / total:.1%})" for phase, time in spent.items() if time > 0
    ]
    return f"mean of {n_steps} steps: {1000 * total / n_steps:.1f} ms; {', '.join(shown)}"
