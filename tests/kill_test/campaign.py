"""Kill and resume a run repeatedly, and compare it with an uninterrupted run."""

import contextlib
import random
import re
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.kill_test.attempts import Attempt, Moment, draw_moment
from tests.kill_test.disks import Disk
from tests.kill_test.modes import INTERVAL, Mode, Options
from tests.kill_test.records import (
    Difference,
    Line,
    State,
    compare_lines,
    compare_states,
    read_ledger,
    read_lines,
    read_state,
    without_ranks,
)
from tests.kill_test.works import WORKS, end_repeatedly, make_materials

_KILLED_FOLDER, _REFERENCE_FOLDER = "killed", "left-alone"


@dataclass(frozen=True)
class Reference:
    """An uninterrupted run."""

    lines: list[Line]
    state: State
    start_seconds: float
    """Seconds from the command to the first step."""


@dataclass
class Outcome:
    """The result of a run that was killed and resumed."""

    mode: Mode

    kills: int = 0
    """Kills that ended an attempt."""

    kills_in_save: int = 0
    """Kills that left an unfinished checkpoint."""

    resumed_steps: list[int] = field(default_factory=list)
    """Steps from which attempts resumed, as far as they logged it."""

    lines: Difference = field(default_factory=Difference)
    """Difference of all logged lines."""

    state: Difference = field(default_factory=Difference)
    """Difference of the last checkpoints."""

    faults: list[str] = field(default_factory=list)
    """Other faults."""

    @property
    def passed(self) -> bool:
        """True if the kills left no trace."""
        return not self.faults and max(self.lines.value, self.state.value) <= self.mode.tolerance


class Campaign:
    """The kill test, mode by mode.

    Args:
        workplace: an empty folder; files of failed modes are kept there.
        dataset: a text file.
        kills: number of kills per mode.
        seed: seed of the moments.
        options: additional options for all runs.
    """

    def __init__(
        self, workplace: Path, dataset: Path, kills: int, seed: int, options: Options | None = None
    ):
        self.workplace = workplace
        self.dataset = dataset
        self.kills = kills
        self.seed = seed
        # An attempt gets about two saves far at most, so the run does not end before the last kill.
        self.steps = kills * 2 * INTERVAL
        self._options: Options = {
            "dataloader.dataset": dataset,
            "training.steps": self.steps,
            **(options or {}),
        }
        self._references: dict[tuple[int, ...], Reference] = {}

    def run(self, mode: Mode) -> Outcome:
        """Kill and resume a run until it is done.

        Raises:
            AttemptFailed: if an attempt ends in another way than by its last step or a kill.
        """
        place = self.workplace / _KILLED_FOLDER / re.sub(r"\W+", "-", mode.name)
        if mode.work:
            with Disk(place) as disk:
                return self._end_work(mode, disk)
        reference = self.reference(mode)
        with Disk(place) if mode.needs_disk else contextlib.nullcontext() as disk:
            outcome = self._run(mode, disk.path / "run" if disk else place, disk, reference)
        if outcome.passed:
            shutil.rmtree(place)
        return outcome

    def _end_work(self, mode: Mode, disk: Disk) -> Outcome:
        (work,) = (work for work in WORKS if work.name == mode.work)
        materials = make_materials(self.dataset, self.workplace / "materials")
        generator = random.Random(f"{self.seed} {mode.name}")
        n_halfway, faults = end_repeatedly(work, materials, disk, self.kills, generator)
        return Outcome(mode, kills=self.kills, kills_in_save=n_halfway, faults=faults)

    def _run(self, mode: Mode, folder: Path, disk: Disk | None, reference: Reference) -> Outcome:
        generator = random.Random(f"{self.seed} {mode.name}")
        outcome = Outcome(mode)
        while self._make_attempt(outcome, generator, folder, disk, reference):
            pass
        self._check_end(outcome, folder, reference)
        return outcome

    def reference(self, mode: Mode) -> Reference:
        """Return the uninterrupted run with the mode's smallest number of processes, run once."""
        if mode.processes not in self._references:
            folder = self.workplace / _REFERENCE_FOLDER / str(len(self._references))
            started = time.monotonic()
            options = {**mode.options, **self._options, "dump_folder": folder}
            with Attempt(self.workplace, options, mode.processes[0]) as run:
                run.wait_for(Moment("step", step=1, delay=0))
                start_seconds = time.monotonic() - started
                run.check_success()
            lines, state = (
                read_lines(folder),
                read_state(folder / "checkpoint" / f"step-{self.steps}"),
            )
            assert len(lines) == self.steps, "a run that was left alone has a line for each step"
            shutil.rmtree(folder)
            self._references[mode.processes] = Reference(lines, state, start_seconds)
        return self._references[mode.processes]

    def _make_attempt(
        self,
        outcome: Outcome,
        generator: random.Random,
        folder: Path,
        disk: Disk | None,
        reference: Reference,
    ) -> bool:
        """Make one attempt, and return whether it was killed before the end of the run."""
        mode, before = outcome.mode, Checkpoints.read(folder)
        options = {
            **mode.options,
            **self._options,
            "dump_folder": folder,
            "checkpoint.async_mode": mode.async_mode,
        }
        # The caches are on the run's disk too.
        workplace = folder.parent if disk else self.workplace
        with Attempt(workplace, options, generator.choice(mode.processes)) as attempt:
            killed = False
            if outcome.kills < self.kills:
                moment = draw_moment(
                    generator, outcome.kills, before.newest, reference.start_seconds
                )
                killed = attempt.kill_at(moment, mode.victim, generator, disk)
            if not killed:
                attempt.check_success()
        if disk and mode.victim == "power":
            disk.restart()
        after = Checkpoints.read(folder)
        outcome.kills += killed
        outcome.kills_in_save += killed and bool(after.unfinished - before.unfinished)
        different = compare_lines(
            read_lines(folder), reference.lines, with_gaps=mode.may_lack_lines
        )
        outcome.lines = max(outcome.lines, different)
        if attempt.resumed_step is not None:
            outcome.resumed_steps.append(attempt.resumed_step)
            if attempt.resumed_step != before.newest:
                outcome.faults.append(
                    f"resumed from step {attempt.resumed_step}, but {before.newest} was saved"
                )
        if after.newest < (saved := max(before.newest, attempt.saved_step)):
            outcome.faults.append(
                f"the checkpoint of step {saved} is gone, and there is no later one"
            )
        return killed

    def _check_end(self, outcome: Outcome, folder: Path, reference: Reference) -> None:
        may_lack = outcome.mode.may_lack_lines
        if (n_lines := len(read_lines(folder))) != self.steps and not may_lack:
            outcome.faults.append(f"{n_lines} of {self.steps} steps are logged at the end")
        if read_ledger(folder) != list(range(1, self.steps + 1)) and not may_lack:
            outcome.faults.append(f"the ledger does not have the steps 1 to {self.steps}")
        if left := sorted(str(path.relative_to(folder)) for path in folder.rglob("*.partial")):
            outcome.faults.append(f"left behind: {', '.join(left)}")
        unmarked = [
            path.name
            for path in folder.glob("checkpoint/step-*")
            if not (path / "complete.json").exists()
        ]
        if unmarked:
            outcome.faults.append(
                f"without a marker, but not removed: {', '.join(sorted(unmarked))}"
            )
        last = folder / "checkpoint" / f"step-{self.steps}"
        if not (last / "complete.json").exists():
            outcome.faults.append(f"there is no complete checkpoint of step {self.steps}")
            return
        states = [read_state(last), reference.state]
        if outcome.mode.tolerance > 0:
            states = [without_ranks(state) for state in states]
        outcome.state = compare_states(*states)


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints in a dump folder while no process of the run exists."""

    newest: int
    """Step of the newest complete checkpoint, or 0."""

    unfinished: frozenset[tuple[str, int]]
    """Name and inode of each checkpoint of an unfinished save, newer than `newest`."""

    @classmethod
    def read(cls, folder: Path) -> "Checkpoints":
        """Read the checkpoints of the run in `folder`."""
        found = [
            (path, int(re.split(r"\D", path.name[5:])[0]))
            for path in folder.glob("checkpoint/step-*")
        ]
        newest = max((step for path, step in found if (path / "complete.json").exists()), default=0)
        return cls(
            newest,
            frozenset((path.name, path.stat().st_ino) for path, step in found if step > newest),
        )
