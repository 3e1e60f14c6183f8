"""The modes of the kill test, which are the rows of its table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Options = Mapping[str, Any]
"""Options of the command line, without the dashes."""

Victim = Literal["all", "rank", "power", "space", "folder"]
"""The target: SIGKILL for all processes or one rank, a power cut of the disk, which loses unsynced
data, a full disk, or a second run in the same dump folder, which must be rejected. After the last
three, all processes are killed."""

INTERVAL = 3
"""Steps between saves."""

ROUNDING = 1e-5
"""Relative difference from the order of float32 sums if attempts have different numbers of
processes."""

RUN: Options = {
    "model.n_layers": 2,
    "training.seq_len": 32,
    "training.local_batch_size": 1,
    "training.global_batch_size": 4,
    "metrics.log_freq": 1,
    "optimizer.lr": 1e-4,
    "lr_scheduler.warmup_steps": 2,
    "validator.enable": False,
    "checkpoint.enable": True,
    "checkpoint.interval": INTERVAL,
    "checkpoint.keep_latest_k": 2,
    "debug.deterministic": True,
}
"""Steps of a tenth of a second, and checkpoints of tens of megabytes, so that a save takes about as
long as a step."""


def _count(processes: int) -> str:
    return f"{processes} process{'es' * (processes > 1)}"


@dataclass(frozen=True)
class Mode:
    """One row of the table."""

    name: str

    processes: tuple[int, ...]
    """Numbers of processes; each attempt draws one."""

    async_mode: str
    """`checkpoint.async_mode` of the attempts. The uninterrupted run always saves synchronously."""

    victim: Victim = "all"

    work: str = ""
    """Name of one of `works.WORKS`, a command that is interrupted instead of a run."""

    @property
    def needs_disk(self) -> bool:
        """True if the dump folder is on a separate disk."""
        return self.victim in ("power", "space")

    @property
    def may_lack_lines(self) -> bool:
        """True if metrics.jsonl may have gaps: metrics lost to a full disk do not end a run."""
        return self.victim == "space"

    @property
    def tolerance(self) -> float:
        """The largest relative difference allowed; 0: bit-identical."""
        return 0.0 if len(self.processes) == 1 else ROUNDING

    @property
    def options(self) -> Options:
        """Options of the attempts and of the uninterrupted run.

        Random state belongs to a process, so runs with different numbers of processes have no
        noise. A failed write of the ledger ends a run, so modes with a full disk have no ledger.
        """
        return {
            **RUN,
            "noise": 0.1 if self.tolerance == 0 else 0.0,
            "debug.ledger": not self.may_lack_lines,
        }


MODES = (
    *(
        Mode(f"{_count(processes)}, {async_mode}", (processes,), async_mode)
        for processes in (1, 2)
        for async_mode in ("disabled", "async", "async_with_pinned_mem")
    ),
    *(
        Mode(
            f"{_count(processes)}, {async_mode}, one rank killed",
            (processes,),
            async_mode,
            victim="rank",
        )
        for processes, async_mode in (
            (1, "async_with_pinned_mem"),
            (2, "async"),
            (2, "async_with_pinned_mem"),
        )
    ),
    Mode("1, 2 or 4 processes, async", (1, 2, 4), "async"),
    *(
        Mode(
            f"{_count(processes)}, {async_mode}, power cut",
            (processes,),
            async_mode,
            victim="power",
        )
        for processes, async_mode in ((1, "disabled"), (1, "async_with_pinned_mem"), (2, "async"))
    ),
    Mode("1 process, disabled, full disk", (1,), "disabled", victim="space"),
    Mode("2 processes, async, full disk", (2,), "async", victim="space"),
    Mode("1 process, async, second run", (1,), "async", victim="folder"),
    *(
        Mode(f"{work}, signals and power cuts", (1,), "disabled", victim="power", work=work)
        for work in ("conversion", "export of a run", "token cache")
    ),
)
