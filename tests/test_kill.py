"""Killed and resumed runs equal uninterrupted runs, and the kill test can fail."""

import json
import math
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest
import torch

from tests import tables
from tests.commands import RunningCommand
from tests.kill_test import __main__ as command
from tests.kill_test import attempts, campaign, elastic
from tests.kill_test.attempts import (
    Attempt,
    AttemptFailed,
    Event,
    Moment,
    draw_moment,
    furthest_save,
)
from tests.kill_test.campaign import Campaign, Checkpoints, Outcome
from tests.kill_test.disks import Disk
from tests.kill_test.modes import INTERVAL, MODES, ROUNDING, RUN
from tests.kill_test.records import (
    Difference,
    Line,
    State,
    compare_lines,
    compare_states,
    read_lines,
    read_state,
    without_ranks,
)
from tests.kill_test.trainer import NoisyTrainer
from tests.training import train
from torchtitan.tools import durable
from torchtitan.trainer import Trainer

MODE = {mode.name: mode for mode in MODES}


# --- runs that are killed
# ---------------------------------------------------------------------------------------------


@pytest.fixture(params=["forked", pytest.param("new interpreter", marks=pytest.mark.long)])
def start_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the runs, without the imports of new interpreters; the long tests start interpreters, as
    users do."""
    if request.param == "forked":
        monkeypatch.setattr(attempts, "start_process", RunningCommand)


@pytest.mark.usefixtures("start_process")
@pytest.mark.parametrize(
    ("name", "kills"),
    [
        ("1 process, async", 1),
        pytest.param("1 process, async", 3, marks=pytest.mark.long),
        pytest.param(
            "1 process, async_with_pinned_mem, one rank killed", 3, marks=pytest.mark.slow
        ),
        pytest.param("2 processes, async, one rank killed", 3, marks=pytest.mark.slow),
        pytest.param("1, 2 or 4 processes, async", 3, marks=pytest.mark.long),
    ],
)
def test_kills_leave_no_trace(tmp_path: Path, name: str, kills: int) -> None:
    """The first and third kills are timed inside a save, the second after one."""
    text = command.write_text(tmp_path / "text.txt", seed=0)
    killing = Campaign(tmp_path, text, kills=kills, seed=0)  # it makes the run left alone once
    for seed in range(4):  # on a busy machine, a save of milliseconds may end before the kill
        killing.seed = seed
        outcome = killing.run(MODE[name])
        assert outcome.passed, outcome
        assert outcome.kills == kills and outcome.resumed_steps[0] == 0
        if outcome.kills_in_save and outcome.resumed_steps[-1] > 0:
            return
    pytest.fail("no run was killed inside a save and resumed from a checkpoint")


@pytest.mark.slow
@pytest.mark.usefixtures("start_process")
@pytest.mark.parametrize(
    ("name", "kills"),
    [
        ("1 process, async_with_pinned_mem, power cut", 2),
        ("1 process, disabled, full disk", 2),
        ("1 process, async, second run", 1),
        ("conversion, signals and power cuts", 2),
        ("export of a run, signals and power cuts", 1),
        ("token cache, signals and power cuts", 2),
    ],
)
def test_other_interruptions_leave_no_trace(tmp_path: Path, name: str, kills: int) -> None:
    """Power cuts, full disks, second runs, and outputs other than checkpoints."""
    if MODE[name].needs_disk and (obstacle := Disk.obstacle()):
        pytest.skip(obstacle)
    text = command.write_text(tmp_path / "text.txt", seed=0)
    for seed in range(4):  # a fast run may end before the moment, or survive a full disk
        (workplace := tmp_path / str(seed)).mkdir()
        outcome = Campaign(workplace, text, kills=kills, seed=seed).run(MODE[name])
        assert outcome.passed, outcome
        if outcome.kills:
            return
    pytest.fail("no moment came")


@pytest.mark.usefixtures("start_process")
@pytest.mark.parametrize(
    "rounds", [pytest.param(1, marks=pytest.mark.slow), pytest.param(20, marks=pytest.mark.long)]
)
def test_lost_hosts_leave_no_trace(tmp_path: Path, rounds: int) -> None:
    """The hosts that are left, and new ones, continue with the same documents and losses."""
    outcome = elastic.run(tmp_path, rounds, seed=0)
    assert outcome.passed, outcome
    assert outcome.rounds == rounds and len({processes for _, processes in outcome.starts}) > 1
    assert len(outcome.starts) > rounds and min(step for step, _ in outcome.starts[2:]) > 1


def test_disk_that_loses_unsynced_data(tmp_path: Path) -> None:
    """After a power cut, only the synced one of two files exists."""
    if obstacle := Disk.obstacle():
        pytest.skip(obstacle)
    with Disk(tmp_path / "disk") as disk:
        durable.write(disk.path / "synced", "a")
        (disk.path / "other").write_text("b")
        disk.cut_power()
        with pytest.raises(OSError):
            (disk.path / "late").write_text("c")
        disk.restart()
        assert [path.name for path in disk.path.iterdir() if path.is_file()] == ["synced"]
        with disk.full(spared=0), pytest.raises(OSError, match="No space left"):
            (disk.path / "large").write_bytes(bytes(1 << 20))
        (disk.path / "large").write_bytes(bytes(1 << 20))
    assert list((tmp_path / "disk").iterdir()) == [tmp_path / "disk/mounted"] and not any(
        disk.path.iterdir()
    )


def test_modes_without_a_disk_are_skipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    monkeypatch.setattr(Disk, "obstacle", staticmethod(lambda: "mounting a disk image needs root"))
    monkeypatch.setattr(Campaign, "run", lambda *_: pytest.fail("it was run"))
    assert command.main(["--only", "power cut|full disk"]) == 0
    assert capsys.readouterr().err.count(": skipped, for mounting a disk image needs root\n") == 8


@pytest.mark.slow
@pytest.mark.usefixtures("start_process")
def test_forgotten_state_is_caught(tmp_path: Path) -> None:
    text = command.write_text(tmp_path / "text.txt", seed=0)
    options = {"checkpoint.exclude_from_loading": ["optimizer"]}
    outcome = Campaign(tmp_path, text, kills=2, seed=0, options=options).run(
        MODE["1 process, disabled"]
    )
    assert not outcome.passed and not outcome.faults
    assert outcome.lines.value > ROUNDING and outcome.state.value > ROUNDING


def test_run_that_exits_early_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho a mistake >&2\nexit 2\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    with Attempt(tmp_path, {"dump_folder": tmp_path}, processes=1) as attempt:
        assert not attempt.kill_at(Moment("step", step=1, delay=60), "all", random.Random(0))
        with pytest.raises(AttemptFailed, match="exit code 2:\na mistake"):
            attempt.check_success()


# --- resumed runs that lose state
# -------------------------------------------------------------------------------------

STEPS = 2 * INTERVAL


class SkipsBatch(NoisyTrainer):
    """Loses a batch on resume."""

    def load_checkpoint(self) -> None:
        super().load_checkpoint()
        if self.step == INTERVAL:
            next(self.dataloader)


class LosesStep(NoisyTrainer):
    """Counts a step on resume without running it."""

    def load_checkpoint(self) -> None:
        super().load_checkpoint()
        self.step += self.step == INTERVAL


def train_noisy(
    folder: Path, text: Path, trainer_class: type[Trainer] = NoisyTrainer, **options: Any
) -> tuple[list[Line], State]:
    small = {"model.dim": 64, "model.ffn_dim": 128, "training.steps": STEPS, "noise": 0.1}
    module = {"module": "tests.kill_test", "config": "noisy_debugmodel"}
    data = {"dataloader.dataset": text, "dataloader.cache_dir": text.parent / "cache"}
    train(folder, trainer_class=trainer_class, **{**RUN, **small, **module, **data, **options})
    return read_lines(folder), read_state(folder / "checkpoint" / f"step-{STEPS}")


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[Line], State]:
    folder = tmp_path_factory.mktemp("whole")
    text = command.write_text(folder / "text.txt", seed=0)
    return text, folder / "run", *train_noisy(folder / "run", text)


def without(name: str) -> dict[str, Any]:
    return {"checkpoint.exclude_from_loading": [name]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer_class", "options", "caught"),
    [
        pytest.param(NoisyTrainer, {}, False, id="nothing"),
        pytest.param(NoisyTrainer, without("optimizer"), True, id="optimizer"),
        pytest.param(NoisyTrainer, without("random"), True, id="random numbers"),
        pytest.param(NoisyTrainer, without("dataloader"), True, id="position in the data"),
        pytest.param(NoisyTrainer, without("lr_scheduler"), True, id="learning rate schedule"),
        pytest.param(SkipsBatch, {}, True, id="a batch"),
        pytest.param(LosesStep, {}, True, id="a step"),
    ],
)
def test_state_lost_on_resume_is_caught(
    whole_run: Any,
    tmp_path: Path,
    trainer_class: type[Trainer],
    options: dict[str, Any],
    caught: bool,
) -> None:
    """The metrics and the last checkpoint show it, beyond the largest tolerance."""
    text, folder, lines, state = whole_run
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    resumed = train_noisy(
        tmp_path, text, trainer_class, **{"checkpoint.load_step": INTERVAL, **options}
    )
    differences = [compare_lines(resumed[0], lines), compare_states(resumed[1], state)]
    assert [difference.value > (ROUNDING if caught else 0) for difference in differences] == [
        caught,
        caught,
    ], differences


# --- comparisons
# --------------------------------------------------------------------------------------------------


def make_lines(count: int) -> list[Line]:
    numbers = range(1, count + 1)
    return [
        {"step": n, "lr": 0.1 * n, "n_tokens_seen": 8 * n, "loss": 1 / n, "grad_norm": 2.0 * n}
        for n in numbers
    ]


class TestComparison:
    @pytest.mark.parametrize(
        ("change", "value", "place"),
        [
            (lambda lines: lines, 0.0, ""),
            (lambda lines: lines[:2], 0.0, ""),
            (lambda lines: [], 0.0, ""),
            (lambda lines: [*lines, lines[-1]], math.inf, "4 lines"),
            (lambda lines: [lines[0], lines[2]], math.inf, "step of line 2"),
            (lambda lines: [lines[0], lines[0], lines[1]], math.inf, "step of line 2"),
            (lambda lines: [lines[0] | {"lr": math.nextafter(0.1, 1)}], math.inf, "lr of line 1"),
            (lambda lines: [lines[0] | {"loss": math.nan}], math.inf, "loss of line 1"),
            (lambda lines: [lines[0] | {"loss": 1.0 + 2**-52}], 2**-52, "loss of line 1"),
            (
                lambda lines: [lines[0] | {"grad_norm": 2.5, "loss": 1.125}],
                0.25,
                "grad_norm of line 1",
            ),
        ],
    )
    def test_lines(
        self, change: Callable[[list[Line]], list[Line]], value: float, place: str
    ) -> None:
        assert compare_lines(change(make_lines(3)), make_lines(3)) == Difference(value, place)

    @pytest.mark.parametrize(
        ("change", "value", "place"),
        [
            ({}, 0.0, ""),
            ({"b.json-1": "[2]"}, math.inf, "b.json-1"),
            ({"c": torch.ones(1)}, math.inf, "c"),
            ({"a": torch.ones(4).double()}, math.inf, "a"),
            ({"a": torch.ones(2, 2)}, math.inf, "a"),
            ({"a": torch.tensor([1.0, 1.0, 1.0, 2.0])}, 0.5, "a"),
            ({"a": torch.full((4,), math.nan)}, math.inf, "a"),
            ({"zero": torch.tensor(-0.0)}, math.ulp(0.0), "zero"),
            ({"bytes": torch.tensor([3, 5], dtype=torch.uint8)}, 0.2, "bytes"),
        ],
    )
    def test_states(self, change: State, value: float, place: str) -> None:
        """Relative to the norm of (3, 4), which is 5."""
        expected: State = {
            "a": torch.ones(4),
            "b.json-1": "[1]",
            "bytes": torch.tensor([3, 4], dtype=torch.uint8),
            "zero": torch.tensor(0.0),
        }
        assert compare_states({**expected, **change}, expected) == Difference(value, place)
        missing = {name: entry for name, entry in expected.items() if name != "a"}
        assert compare_states(missing, expected) == Difference(math.inf, "a")

    def test_lines_lost_to_a_full_disk(self) -> None:
        lines = make_lines(5)
        assert compare_lines(lines[:2] + lines[3:], lines, with_gaps=True) == Difference()
        assert (
            compare_lines([lines[0], lines[2] | {"lr": 7.0}], lines, with_gaps=True).place
            == "lr of line 2"
        )
        assert compare_lines([lines[1], lines[0]], lines, with_gaps=True).value == math.inf
        assert compare_lines([lines[0], lines[0]], lines, with_gaps=True).value == math.inf

    def test_partial_line_is_skipped(self, tmp_path: Path) -> None:
        assert read_lines(tmp_path) == []
        text = "".join(json.dumps({**line, "step_time": 1.0}) + "\n" for line in make_lines(3))
        (tmp_path / "metrics.jsonl").write_text(text[:-1])
        assert read_lines(tmp_path) == make_lines(2)

    def test_recent_losses_are_ignored(self) -> None:
        """Counts of the spike guard are compared, in whatever entry they are."""
        states = [
            {f"spikes.json-{loss}": json.dumps({"recent": [[loss, 1.0]], "n_skipped": 2})}
            for loss in (3.0, 3.1)
        ]
        assert [without_ranks(state) for state in states] == [{"spikes": '{"n_skipped": 2}'}] * 2

    def test_process_specific_values_are_ignored(self) -> None:
        names = [
            "model.rank0.weight",
            "random.rank0.cpu",
            "dataloader.rank0.json-1",
            "dataloader.rank1.json-1",
        ]
        assert list(without_ranks(dict.fromkeys(names, ""))) == ["dataloader.rank0.json-1"]
        assert list(without_ranks({"model.layers.0.rank0.weight": "", "optimizer.rank": ""})) == [
            "model.layers.0.rank0.weight",
            "optimizer.rank",
        ]

    def test_tolerance_depends_on_the_mode(self) -> None:
        rounded = Difference(ROUNDING, "loss of line 1")
        exact, elastic = MODE["1 process, async"], MODE["1, 2 or 4 processes, async"]
        assert Outcome(exact).passed and Outcome(elastic, lines=rounded, state=rounded).passed
        assert not Outcome(exact, lines=rounded).passed and not Outcome(exact, state=rounded).passed
        assert not Outcome(elastic, state=Difference(math.nextafter(ROUNDING, 1), "w")).passed
        assert not Outcome(elastic, faults=["a step is missing"]).passed


# --- other checks
# --------------------------------------------------------------------------------------------------


class FakeAttempt:
    """Runs three steps with a save and is killed; then `wrong` is called with it."""

    number = 0
    wrong: Callable[["FakeAttempt"], None] = staticmethod(lambda attempt: None)

    def __init__(self, workplace: Path, options: dict[str, Any], processes: int):
        type(self).number += 1
        self.folder = Path(options["dump_folder"])
        self.checkpoints = self.folder / "checkpoint"
        self.steps = options["training.steps"]
        self.saved_step = 0
        self.resumed_step = Checkpoints.read(self.folder).newest

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait_for(self, moment: Moment) -> None:
        pass

    def kill_at(self, *_: object) -> bool:
        self.train(self.resumed_step + INTERVAL)
        self.wrong(self)
        return True

    def check_success(self) -> None:
        self.train(self.steps)
        if "left-alone" not in self.folder.parts:
            self.wrong(self)

    def train(self, last: int) -> None:
        for step in range(INTERVAL, last + 1, INTERVAL):
            (self.checkpoints / f"step-{step}").mkdir(parents=True, exist_ok=True)
            (self.checkpoints / f"step-{step}/complete.json").touch()
        for name in ("metrics.jsonl", "ledger.jsonl"):
            (self.folder / name).write_text(
                "".join(json.dumps(line) + "\n" for line in make_lines(last))
            )


def loses_checkpoint(attempt: FakeAttempt) -> None:
    if attempt.number == 3:
        for marker in attempt.checkpoints.glob("*/complete.json"):
            marker.unlink()


def starts_over(attempt: FakeAttempt) -> None:
    attempt.resumed_step = 0


def leaves_partial(attempt: FakeAttempt) -> None:
    (attempt.checkpoints / "step-1.partial").mkdir(exist_ok=True)


def loses_last_line(attempt: FakeAttempt) -> None:
    path = attempt.folder / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def loses_documents(attempt: FakeAttempt) -> None:
    path = attempt.folder / "ledger.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))


def calls_a_lost_checkpoint_saved(attempt: FakeAttempt) -> None:
    attempt.saved_step = attempt.resumed_step + 2 * INTERVAL


def loses_last_checkpoint(attempt: FakeAttempt) -> None:
    (attempt.checkpoints / f"step-{attempt.steps}/complete.json").unlink(missing_ok=True)


class TestFaults:
    @pytest.mark.parametrize(
        ("wrong", "fault"),
        [
            (lambda attempt: None, None),
            (loses_checkpoint, "the checkpoint of step 3 is gone, and there is no later one"),
            (starts_over, "resumed from step 0, but 3 was saved"),
            (leaves_partial, "left behind: checkpoint/step-1.partial"),
            (loses_last_line, "23 of 24 steps are logged at the end"),
            (loses_documents, "the ledger does not have the steps 1 to 24"),
            (
                calls_a_lost_checkpoint_saved,
                "the checkpoint of step 6 is gone, and there is no later one",
            ),
            (loses_last_checkpoint, "there is no complete checkpoint of step 24"),
        ],
    )
    def test_each_is_reported(
        self,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        wrong: Callable[[FakeAttempt], None],
        fault: str | None,
    ) -> None:
        monkeypatch.setattr(FakeAttempt, "wrong", staticmethod(wrong))
        monkeypatch.setattr(FakeAttempt, "number", 0)
        monkeypatch.setattr(campaign, "Attempt", FakeAttempt)
        monkeypatch.setattr(campaign, "read_state", lambda path: {"w": torch.ones(1)})
        outcome = Campaign(tmp_path, tmp_path / "text.txt", kills=4, seed=0).run(
            MODE["1 process, async"]
        )
        assert outcome.passed == (fault is None)
        assert fault is None or fault in outcome.faults

    def test_kill_inside_a_save(self, tmp_path: Path) -> None:
        """A partial checkpoint newer than the newest complete one is unfinished; an older one is
        being removed."""
        for name in ("step-3", "step-6", "step-9", "step-12.partial"):
            (tmp_path / "checkpoint" / name).mkdir(parents=True)
        (tmp_path / "checkpoint/step-6/complete.json").touch()
        before = Checkpoints.read(tmp_path)
        assert before.newest == 6 and {name for name, _ in before.unfinished} == {
            "step-9",
            "step-12.partial",
        }
        (tmp_path / "checkpoint/step-15.partial").mkdir()
        (tmp_path / "checkpoint/step-12.partial").rename(tmp_path / "checkpoint/step-12")
        (tmp_path / "checkpoint/step-12/complete.json").touch()
        after = Checkpoints.read(tmp_path)
        assert after.newest == 12 and {
            name for name, _ in after.unfinished - before.unfinished
        } == {"step-15.partial"}


# --- moments
# --------------------------------------------------------------------------------------------------


class TestMoments:
    def test_progress_of_a_save(self, tmp_path: Path) -> None:
        def reached() -> list[int]:
            events: list[Event] = ["save", "written", "renamed", "complete"]
            return [furthest_save(tmp_path / "checkpoint", event) for event in events]

        assert reached() == [0, 0, 0, 0]
        partial, final = tmp_path / "checkpoint/step-10.partial", tmp_path / "checkpoint/step-10"
        partial.mkdir(parents=True)
        assert reached() == [10, 0, 0, 0]
        (partial / ".metadata").touch()
        assert reached() == [10, 10, 0, 0]
        partial.rename(final)
        assert reached() == [10, 10, 10, 0]
        (final / "complete.json").touch()
        (tmp_path / "checkpoint/step-9.partial").mkdir()
        assert reached() == [10, 10, 10, 10]

    def test_all_precede_the_next_but_one_save(self) -> None:
        generator = random.Random(0)
        moments = [draw_moment(generator, kill, saved=30, start_seconds=5) for kill in range(200)]
        assert {moment.event for moment in moments[:8]} == {
            "start",
            "step",
            "save",
            "written",
            "renamed",
            "complete",
        }
        assert {moment.step for moment in moments} == set(range(31, 31 + 2 * INTERVAL))
        assert max(moment.delay for moment in moments if moment.event == "start") > 4
        assert (
            max(moment.delay for moment in moments if moment.event not in ("start", "step")) < 0.01
        )


# --- the command
# --------------------------------------------------------------------------------------------------


class TestCommand:
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--only", "3 processes"], "no mode is named like --only '3 processes'"),
            (["--kills", "0"], "--kills is 0"),
            (["--write-docs"], "has no marker <!-- kill:end -->"),
        ],
    )
    def test_mistakes(
        self,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        capsys: Any,
        words: list[str],
        message: str,
    ) -> None:
        page = tmp_path / "docs/checkpoints.md"
        page.parent.mkdir()
        page.write_text(f"# Checkpoints\n{tables.markers('kill')[0]}\n")
        monkeypatch.setattr(command, "PAGE", page)
        monkeypatch.setattr(command, "PROJECT", tmp_path)
        assert command.main(words) == 2
        assert message in capsys.readouterr().err

    def test_list(self, capsys: Any) -> None:
        assert command.main(["--list", "--only", "^1"]) == 0
        assert capsys.readouterr().out.splitlines() == [
            mode.name for mode in MODES if mode.name[0] == "1"
        ]

    def test_table_is_written_between_its_markers(self, tmp_path: Path) -> None:
        page = tmp_path / "page.md"
        begin, end = tables.markers("kill")
        page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
        passed = Outcome(
            MODE["1 process, async"], kills=20, kills_in_save=9, resumed_steps=[0, 3, 3]
        )
        rounded = Difference(2e-7, "loss of line 3")
        elastic = Outcome(
            MODE["1, 2 or 4 processes, async"], lines=rounded, state=replace(rounded, value=1.0)
        )
        rows = [tables.Row(command.cells(outcome)) for outcome in (passed, elastic)]
        tables.write_docs(page, "kill", tables.as_markdown(command.COLUMNS, rows))
        lines = page.read_text().splitlines()
        assert lines[:2] == ["before", begin] and lines[-2:] == [end, "after"]
        assert lines[4] == "| 1 process, async | 20 | 9 | 0, 3, 3 | identical | identical |"
        assert (
            lines[5]
            == "| 1, 2 or 4 processes, async | 0 | 0 |  | equal to 2e-07 | DIFFERENT by 1e+00 |"
        )

    def test_failure_is_reported(self) -> None:
        different = Difference(0.5, "loss of line 3")
        outcome = Outcome(MODE["1 process, async"], lines=different, faults=["a step is missing"])
        assert command.verdict(outcome) == (
            "logged numbers DIFFERENT by 5e-01 loss of line 3, last checkpoint identical, a step "
            "is missing"
        )

    def test_table_names_its_command_and_machine(self) -> None:
        arguments = command.parse_arguments(
            ["--kills", "3", "--only", "^1 process, async$", "--dataset", "a/b.txt"]
        )
        told = tables.describe("tests.kill_test", arguments, "kills", "seed", "only", "dataset")
        assert told.startswith(
            "`python -m tests.kill_test --kills 3 --seed 0 --only '^1 process, async$' --dataset "
            "b.txt`, 2"
        )
        assert f"torch {torch.__version__}" in told

    def test_text_depends_only_on_the_seed(self, tmp_path: Path) -> None:
        texts = [
            command.write_text(tmp_path / str(number), seed).read_text()
            for number, seed in enumerate((0, 0, 1))
        ]
        assert texts[0] == texts[1] != texts[2]
