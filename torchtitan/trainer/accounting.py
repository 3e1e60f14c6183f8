"""Account of a run: the uses of its time, slow ranks, and events."""

import contextlib
import os
import platform
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.components.goodput import describe_goodput, goodput, mean_phases, shares
from torchtitan.components.run_events import open_events, read_events
from torchtitan.distributed.health import software
from torchtitan.distributed.phases import BETWEEN_STEPS, RETURN
from torchtitan.distributed.process_group import gather_objects
from torchtitan.tools.device import device_description
from torchtitan.tools.logging import logger
from torchtitan.tools.process import COMMAND_VARIABLE
from torchtitan.trainer.callbacks import Callback, Recorder
from torchtitan.trainer.step_result import StepResult, StopReason

OWN_PHASES = (BETWEEN_STEPS, "start of the step", "data", "forward", "optimizer step")
"""Phases in which a rank does not wait for others. In the rest of a step, a slow rank delays all ranks alike."""

STRAGGLER_MARGIN = 0.1
"""A rank is slow if a phase of its own takes longer than the median of the ranks by this part of a step."""

_Seconds = dict[str, float]
_PAUSES = {"start-up", "validation", "save", RETURN}  # not parts of a step


class Accounting(Recorder):
    """Write what happens to the run to `events.jsonl`, name a slow rank when metrics are logged, and log the time of a
    step by phase and the run's goodput at the end. See docs/report.md."""

    def __init__(self, config: Callback.Config, *, trainer: Any):
        super().__init__(config, trainer=trainer)
        self._folder = Path(trainer.config.dump_folder)
        self._hosts: list[str] = []  # of each rank
        # Step and seconds by phase when the ranks were last compared, first after the first step of this session.
        self._compared: tuple[int, _Seconds] | None = None
        self._slow: tuple[int, int] | None = None  # rank and phase of the last comparison
        self._saved_step: int | None = None
        self._reason: StopReason | None = None

    @contextlib.contextmanager
    def around_run(self) -> Iterator[None]:
        self._hosts = gather_objects(socket.gethostname())
        if self.trainer.rank == 0:
            command = os.environ.get(COMMAND_VARIABLE, "")
            self.file = open_events(self._folder, self.trainer.step, command)
            self._write("start", command=command, **self._description())
        yield

    def _description(self) -> dict[str, Any]:
        trainer = self.trainer
        n_samples = trainer.run_length.samples_read_at(trainer.total_steps, trainer.step, trainer.n_tokens_seen)
        summary = trainer.dataloader.summary(n_samples)
        data = {
            of.name: {"rows": of.report.rows, "tokens": of.report.tokens, "epochs": of.epochs}
            for of in (summary.sets if summary else ())
        }
        environment = {
            **software(),
            "system": platform.platform(),
            "device": device_description(trainer.device),
            "processes": len(self._hosts),
            "hosts": ", ".join(sorted(set(self._hosts))),
        }
        return {
            "begun": trainer.phases.begun,
            "total_steps": trainer.total_steps,
            "layout": str(trainer.parallel_dims) if trainer.mesh else "single process",
            "parameters": trainer.num_parameters,
            "data": data,
            "environment": environment,
        }

    def _write(self, event: str, **values: Any) -> None:
        """Append an event that happens now."""
        seconds = self.trainer.phases.seconds()  # read before `time`, which the parts of goodput must not exceed
        line = {"event": event, "time": time.time(), "step": self.trainer.step, **values, "seconds": seconds}
        self.use(lambda file: file.append(line))

    def on_failure(self, error: OSError) -> None:
        logger.warning("events.jsonl cannot be written: %s; training continues", error)
        self.file = None

    def on_skip(self, outcome: StepResult) -> None:
        self._write("skipped", step=outcome.step, reason=str(outcome))

    def on_step(self, outcome: StepResult) -> None:
        # Warm-up and compilation in the first step would hide the other steps.
        if self._compared is None or self.trainer.metrics.should_log(self.trainer.step):
            self._write("progress")
            before, self._compared = self._compared, (self.trainer.step, self.trainer.phases.seconds())
            if before and len(self._hosts) > 1:
                self._name_slow_rank(*before, *self._compared)

    def _name_slow_rank(self, before: int, seconds_before: _Seconds, step: int, seconds: _Seconds) -> None:
        """Compare the ranks' own phases after step `before`, in an exchange of host memory, and name a slow one."""
        spent = {phase: (now - seconds_before.get(phase, 0.0)) / (step - before) for phase, now in seconds.items()}
        of_ranks = gather_objects([spent.get(phase, 0.0) for phase in OWN_PHASES])
        if self.trainer.rank > 0:
            return
        excess, rank, index = largest_excess(of_ranks)
        share = excess / sum(time for phase, time in spent.items() if phase not in _PAUSES)
        last, self._slow = self._slow, (rank, index) if share > STRAGGLER_MARGIN else None
        if self._slow:
            host, phase = self._hosts[rank], OWN_PHASES[index]
            self._write("straggler", rank=rank, host=host, phase=phase, seconds_more=excess)
            if self._slow != last:
                logger.warning(
                    f"rank {rank} on {host} is slower than the other ranks: {excess:.3f} s more per step in the phase "
                    f'"{phase}", {share:.0%} of a step (steps {before + 1} to {step})'
                )

    def on_return(self, step: int) -> None:
        self._write("returned", to=step)

    def before_save(self) -> None:
        if self._saved_step != self.trainer.step:  # the last step may be saved twice, in full and for export
            self._saved_step = self.trainer.step
            self._write("save")
        super().before_save()

    def on_end(self, reason: StopReason) -> None:
        self._reason = reason

    def close(self) -> None:
        """If the run came to its end, log the account."""
        if self._reason:
            self._write("end", reason=self._reason)
        if self._reason and self.file:
            events, _ = read_events(self._folder)
            if phases := mean_phases(events):
                parts = ", ".join(f"{phase} {share}" for phase, share in shares(phases).items())
                logger.info("mean step: %.1f ms; %s", 1000 * sum(phases.values()), parts)
            logger.info("%s", describe_goodput(goodput(events)))
        super().close()


def largest_excess(seconds_RP: Sequence[Sequence[float]]) -> tuple[float, int, int]:
    """Return by how much the slowest of several ranks R in a phase P exceeds the median of the ranks (of an even
    number, the lower one), the rank and the phase."""
    of_ranks = np.array(seconds_RP)
    excess_RP = of_ranks - np.sort(of_ranks, axis=0)[(len(of_ranks) - 1) // 2]
    rank, phase = divmod(int(excess_RP.argmax()), excess_RP.shape[1])
    return float(excess_RP[rank, phase]), rank, phase
