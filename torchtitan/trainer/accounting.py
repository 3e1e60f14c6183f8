"""Account of a run: the uses of its time, slow ranks, and events."""

import contextlib
import os
import platform
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torchtitan
from torchtitan.components.goodput import describe_goodput, goodput
from torchtitan.components.run_events import EventLog, events_in
from torchtitan.distributed.phases import BETWEEN_STEPS, RETURN
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

_PAUSES = {"start-up", "validation", "save", RETURN}  # not parts of a step


class Accounting(Callback):
    """Write what happens to the run to `events.jsonl`, name a slow rank when metrics are logged, and log the time of a
    step by phase and the run's goodput at the end. See docs/report.md."""

    def __init__(self, config: Callback.Config, *, trainer: Any):
        super().__init__(config, trainer=trainer)
        self._folder = Path(trainer.config.dump_folder)
        self._log: EventLog | None = None  # on rank 0
        self._hosts: list[str] = []  # of each rank
        # Step and seconds by phase after the first step of this session, and at the last comparison of the ranks.
        self._first: tuple[int, dict[str, float]] = (0, {})
        self._since = self._first
        self._save: tuple[int, float] | None = None  # step of an unreported save, and the time spent saving before it
        self._slow: tuple[int, str] | None = None  # rank and phase of the last comparison
        self._returned_to: int | None = None  # step of the weights to which the run returned after spikes
        self._reason: StopReason | None = None

    @contextlib.contextmanager
    def around_run(self) -> Iterator[None]:
        self._hosts = gather_objects(socket.gethostname())
        self._returned_to = self.trainer.spikes.returned_to
        if self.trainer.rank == 0:
            command = os.environ.get(COMMAND_VARIABLE, "")
            self._log = EventLog(self._folder, self.trainer.step, command)
            self._log.write("start", self.trainer.step, command=command, **self._description())
        yield

    def _description(self) -> dict[str, Any]:
        trainer = self.trainer
        n_samples = trainer.run_length.samples_read_at(trainer.total_steps, trainer.step, trainer.n_tokens_seen)
        summary = trainer.dataloader.summary(n_samples)
        return {
            "begun": trainer.phases.begun,
            "seconds": trainer.phases.seconds(),
            "total_steps": trainer.total_steps,
            "layout": str(trainer.parallel_dims) if trainer.mesh else "single process",
            "parameters": trainer.num_parameters,
            "data": {
                of.name: {"rows": of.report.rows, "tokens": of.report.tokens, "epochs": of.epochs}
                for of in (summary.sets if summary else ())
            },
            "environment": {
                "torchtitan": torchtitan.__version__,
                "torch": torch.__version__,
                "Python": platform.python_version(),
                "system": platform.platform(),
                "device": device_description(trainer.device),
                "processes": len(self._hosts),
                "hosts": ", ".join(sorted(set(self._hosts))),
            },
        }

    def on_step(self, outcome: StepResult) -> None:
        step, seconds = self.trainer.step, self.trainer.phases.seconds()
        is_due = self.trainer.metrics.should_log(step)
        if not self._first[0]:  # warm-up and compilation would hide the other steps
            self._first = self._since = step, seconds
        elif is_due:
            if len(self._hosts) > 1:
                self._name_slow_rank(step, seconds)
            self._since = step, seconds
        if self._log:
            self._report_save(self._log, seconds)
            if (returned_to := self.trainer.spikes.returned_to) != self._returned_to:
                self._log.write("returned", step, to=returned_to)
                self._returned_to = returned_to
            if not outcome.is_taken:
                self._log.write("skipped", step, reason=str(outcome))
            if is_due:
                self._log.write("progress", step, seconds=seconds)

    def _name_slow_rank(self, step: int, seconds: dict[str, float]) -> None:
        """Compare the ranks' own phases since the last comparison, in one exchange of host memory."""
        last_step, last = self._since
        spent = {phase: (now - last.get(phase, 0.0)) / (step - last_step) for phase, now in seconds.items()}
        own = torch.tensor([spent.get(phase, 0.0) for phase in OWN_PHASES], dtype=torch.float64)
        of_ranks = own.new_empty(len(self._hosts), len(own))
        dist.all_gather(list(of_ranks), own)
        excess, rank, phase = largest_excess(of_ranks)
        share = excess / sum(time for phase, time in spent.items() if phase not in _PAUSES)
        slow = (rank, OWN_PHASES[phase]) if share > STRAGGLER_MARGIN else None
        if self._log and slow:
            host, name = self._hosts[rank], OWN_PHASES[phase]
            self._log.write("straggler", step, rank=rank, host=host, phase=name, seconds_more=excess)
            if slow != self._slow:
                logger.warning(
                    f"rank {rank} on {host} is slower than the other ranks: {excess:.3f} s more per step in the phase "
                    f'"{name}", {share:.0%} of a step (steps {last_step + 1} to {step})'
                )
        self._slow = slow

    def before_save(self) -> None:
        if self._log:
            self._log.sync()
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
        log, self._log = self._log, None
        if log and self._reason:
            step, seconds = self.trainer.step, self.trainer.phases.seconds()
            self._report_save(log, seconds)
            log.write("end", step, reason=self._reason, seconds=seconds)
            if step > self._first[0] > 0:
                logger.info("%s", describe_step(seconds, self._first[1], step - self._first[0]))
            if parts := goodput(events_in(self._folder)):
                logger.info("%s", describe_goodput(parts))
        if log:
            log.close()


def largest_excess(seconds_RP: torch.Tensor) -> tuple[float, int, int]:
    """Return by how much the slowest of several ranks R in a phase P exceeds the median of the other ranks, the rank
    and the phase."""
    others = [torch.cat([seconds_RP[:rank], seconds_RP[rank + 1 :]]) for rank in range(len(seconds_RP))]
    excess_RP = seconds_RP - torch.stack([one.quantile(0.5, dim=0) for one in others])
    rank, phase = divmod(int(excess_RP.argmax()), excess_RP.shape[1])
    return float(excess_RP[rank, phase]), rank, phase


def describe_step(seconds: dict[str, float], since: dict[str, float], n_steps: int) -> str:
    """Return the mean time of a step by phase, from the phases' times before and after `n_steps`."""
    spent = {phase: (seconds[phase] - since.get(phase, 0.0)) / n_steps for phase in seconds}
    total = sum(spent.values())
    shown = [f"{phase} {1000 * time:.1f} ms ({time / total:.1%})" for phase, time in spent.items() if time > 0]
    return f"mean of {n_steps} steps: {1000 * total:.1f} ms; {', '.join(shown)}"
