"""Account of a run: the uses of its time, slow ranks, and events."""

import os
import platform
import socket
import statistics
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from torchtitan.components.data.sources.source import hub_repositories
from torchtitan.components.observe import run_events
from torchtitan.components.observe.run_events import Event
from torchtitan.distributed.health import software
from torchtitan.distributed.phases import BETWEEN_STEPS, RETURN
from torchtitan.distributed.process_group import gather_objects
from torchtitan.tools.device import device_description
from torchtitan.tools.logging import logger
from torchtitan.tools.process import COMMAND_VARIABLE
from torchtitan.tools.redact import redacted
from torchtitan.trainer.callbacks import Recorder
from torchtitan.trainer.step_result import StepResult, StopReason

OWN_PHASES = (BETWEEN_STEPS, "start of the step", "data", "forward", "optimizer step")
"""Phases in which a rank does not wait for others. In the rest of a step, a slow rank delays all
ranks alike."""

STRAGGLER_MARGIN = 0.1
"""A rank is slow if a phase of its own takes longer than the median of the ranks by this part of a
step."""

_PAUSES = {"start-up", "validation", "save", RETURN}  # not parts of a step


class Accounting(Recorder):
    """Write what happens to the run to `events.jsonl`, name a slow rank when metrics are logged,
    and log the time of a step by phase and the run's goodput at the end. See docs/report.md."""

    _hosts: Sequence[str] = ()  # of each rank
    _progress: Event | None = None  # the last such event of this session
    _slow: tuple[int, str] | None = None  # rank and phase of the last comparison
    _saved_step: int | None = None
    _reason: StopReason | None = None

    def around_run(self) -> AbstractContextManager[object]:
        self._hosts = gather_objects(socket.gethostname())
        if self.trainer.rank == 0:
            self._open()
        return super().around_run()

    def _open(self) -> None:
        trainer, command = self.trainer, os.environ.get(COMMAND_VARIABLE, "")
        self.file = run_events.open_events(Path(trainer.config.dump_folder), trainer.step, command)
        n_samples = trainer.run_length.samples_read_at(
            trainer.total_steps, trainer.step, trainer.n_tokens_seen
        )
        summary = trainer.dataloader.summary(n_samples)
        sets = summary.sets if summary else ()
        for of in sets:
            logger.info(
                "%s: %.3g epochs in %s steps", of.name, of.epochs, f"{trainer.total_steps:,}"
            )
        environment: dict[str, object] = {
            **software(),
            "system": platform.platform(),
            "processes": len(self._hosts),
        }
        environment |= {
            "device": device_description(trainer.device),
            "hosts": ", ".join(sorted(set(self._hosts))),
        }
        self._write(
            "start",
            command=command,
            begun=trainer.phases.begun,
            total_steps=trainer.total_steps,
            layout=str(trainer.parallel_dims) if trainer.mesh else "single process",
            parameters=trainer.num_parameters,
            trained_parameters=trainer.num_trained,
            loss_unit=trainer.loss_unit,
            data={
                of.name: {"rows": of.report.rows, "tokens": of.report.tokens, "epochs": of.epochs}
                for of in sets
            },
            hub=hub_repositories(getattr(trainer.config.dataloader, "dataset", ())),
            environment=environment,
        )

    def _write(self, event: str, **values: object) -> Event:
        """Append an event that happens now, and return it."""
        # read before `time`, which the parts of goodput must not exceed
        seconds = self.trainer.phases.seconds()
        line = {
            "event": event,
            "time": time.time(),
            "step": self.trainer.step,
            **values,
            "seconds": seconds,
        }
        self.use(lambda file: file.append(redacted(line)))
        return line

    def on_failure(self, error: OSError) -> None:
        logger.warning("events.jsonl cannot be written: %s; training continues", error)
        self.file = None

    def on_skip(self, outcome: StepResult) -> None:
        self._write("skipped", step=outcome.step, reason=str(outcome))

    def on_step(self, outcome: StepResult) -> None:
        # Warm-up and compilation in the first step would hide the other steps.
        if self._progress is None or self.trainer.metrics.should_log(self.trainer.step):
            before, self._progress = self._progress, self._write("progress")
            if before and len(self._hosts) > 1:
                self._name_slow_rank(before, self._progress)

    def _name_slow_rank(self, before: Event, now: Event) -> None:
        """Compare the ranks' own phases between two events, in an exchange of host memory, and name
        a slow one."""
        spent = run_events.mean_between(before, now)
        of_ranks = gather_objects([spent.get(phase, 0.0) for phase in OWN_PHASES])
        if self.trainer.rank > 0:
            return
        excess, rank, phase = largest_excess(of_ranks)
        share = excess / sum(time for phase, time in spent.items() if phase not in _PAUSES)
        last, self._slow = self._slow, (rank, phase) if share > STRAGGLER_MARGIN else None
        if self._slow:
            host = self._hosts[rank]
            self._write("straggler", rank=rank, host=host, phase=phase, seconds_more=excess)
            if self._slow != last:
                logger.warning(
                    f"rank {rank} on {host} is slower than the other ranks: {excess:.3f} s more "
                    "per step in the phase "
                    f'"{phase}", {share:.0%} of a step (steps {before["step"] + 1} to '
                    f"{now['step']})"
                )

    def on_return(self, step: int) -> None:
        self._write("returned", to=step)

    def before_save(self) -> None:
        # the last step may be saved twice, in full and for export
        if self._saved_step != self.trainer.step:
            self._saved_step = self.trainer.step
            self._write("save")
        super().before_save()

    def on_end(self, reason: StopReason) -> None:
        self._reason = reason

    def close(self) -> None:
        """If the run came to its end, log the account."""
        if self._reason and self.file:
            why = {"why": self.trainer.early_end} if self.trainer.early_end else {}
            self._write("end", reason=self._reason, **why)
            events = run_events.read_events(Path(self.trainer.config.dump_folder))
            if not events:
                folder = self.trainer.config.dump_folder
                logger.warning(
                    "--dump_folder '%s' was removed during the run, with its metrics and events",
                    folder,
                )
                super().close()
                return
            if phases := run_events.mean_phases(events):
                parts = ", ".join(
                    f"{phase} {share}" for phase, share in run_events.shares(phases).items()
                )
                logger.info("mean step: %.1f ms; %s", 1000 * sum(phases.values()), parts)
            logger.info("goodput %s", run_events.describe_goodput(run_events.goodput(events)))
        super().close()


def largest_excess(of_ranks: Sequence[Sequence[float]]) -> tuple[float, int, str]:
    """Return by how much the slowest of several ranks in a phase exceeds the median of the ranks
    (of an even number, the lower one), the rank and the phase. `of_ranks`: seconds of each rank in
    each of `OWN_PHASES`."""
    of_phases = dict(zip(OWN_PHASES, zip(*of_ranks, strict=True), strict=True))
    excess, phase = max(
        (max(times) - statistics.median_low(times), phase) for phase, times in of_phases.items()
    )
    return excess, of_phases[phase].index(max(of_phases[phase])), phase
