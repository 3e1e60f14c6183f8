"""The watchdog: a hanging run exits, every rank prints its stack traces, and the report names the
blocking rank."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.test_launch import Command, free_port
from tests.cli.test_main import write_module
from tests.commands import RunningCommand
from tests.conftest import PROJECT
from tests.training import TINY, flags
from torchtitan.distributed.hang_consensus import Position, Process, describe

# seconds until a command counts as hanging; it takes less than 20 on an idle machine
_TIMEOUT = 300
_LIMIT = 2  # time limit of a step in seconds; a step takes milliseconds

LOOP = f"""
import ctypes, os, signal, sys, time
import torch.distributed as dist
from torchtitan.distributed.watchdog import Watchdog
from torchtitan.tools.logging import init_logger

def hold_the_gil():
    ctypes.PyDLL(None).sleep(1000)  # like a call into C that does not release the GIL

init_logger()
rank = int(os.environ.get("RANK", "0"))
if "RANK" in os.environ:
    dist.init_process_group("gloo")
with Watchdog(first_step_seconds=30, step_seconds={_LIMIT}) as watchdog:
    for step in range(1, 4):
        with watchdog.step(step):
            watchdog.phase("data")
            DATA
            watchdog.phase("forward and backward")
            if dist.is_initialized():
                dist.barrier()
        BETWEEN
if dist.is_initialized():
    dist.barrier()
    dist.destroy_process_group()
"""


class Ranks:
    """Processes that run `LOOP`, started without a launcher."""

    def __init__(self, folder: Path, world_size: int, *, data: str = "pass", between: str = "pass"):
        script = folder / "loop.py"
        script.write_text(LOOP.replace("DATA", data).replace("BETWEEN", between))
        rendezvous = {
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(world_size),
        }
        self.processes = []
        for rank in range(world_size):
            variables = {**rendezvous, "RANK": str(rank)} if world_size > 1 else {}
            environment = {
                **os.environ,
                "PYTHONPATH": str(PROJECT),
                "OMP_NUM_THREADS": "1",
                **variables,
            }
            process = RunningCommand(
                [sys.executable, script], env=environment, stderr=subprocess.PIPE, text=True
            )
            self.processes.append(process)

    def wait(self) -> tuple[list[int], list[str]]:
        """Return the exit codes and the output of all processes."""
        printed = [process.communicate(timeout=_TIMEOUT)[1] for process in self.processes]
        return [process.returncode for process in self.processes], printed

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[Ranks]]:
    """List of processes to kill at the end of the test."""
    started: list[Ranks] = []
    yield started
    for group in started:
        group.kill()


class TestLoops:
    """The watchdog in a custom loop."""

    def test_one_process(self, ranks: list[Ranks], tmp_path: Path) -> None:
        ranks.append(Ranks(tmp_path, 1, data="if step == 2: time.sleep(1000)"))
        codes, (printed,) = ranks[0].wait()
        assert codes == [3]
        assert re.search(r'rank 0 \(.*, process \d+\) is in step 2, phase "data"', printed)
        assert (
            "MainThread (most recent call last):\n" in printed
            and "time.sleep(1000)" not in printed.splitlines()[0]
        )
        assert (
            f'has not ended after {_LIMIT} seconds: the process is in step 2, phase "data"'
            in printed
        )

    @pytest.mark.slow
    def test_a_sleeping_rank_is_reported(self, ranks: list[Ranks], tmp_path: Path) -> None:
        ranks.append(Ranks(tmp_path, 2, data="if step == 2 and rank == 1: time.sleep(1000)"))
        codes, printed = ranks[0].wait()
        assert codes == [3, 3]
        assert (
            'is in step 2, phase "forward and backward"' in printed[0]
            and "dist.barrier()" in printed[0]
        )
        assert 'is in step 2, phase "data"' in printed[1] and "time.sleep(1000)" in printed[1]
        together = "".join(printed)
        assert together.count("rank 1 holds up the others") == 1, "one rank reports"
        findings = together.partition("rank 1 holds up the others\n")[2].splitlines()[:2]
        assert re.fullmatch(
            r'  rank 1: in step 2, phase "data", at <module> \(loop.py:\d+\)', findings[0]
        )
        assert re.fullmatch(
            r'  rank 0: in step 2, phase "forward and backward", at .*', findings[1]
        )

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("culprit", "how"),
        [
            (0, "os.kill(os.getpid(), signal.SIGSTOP)"),
            (0, "hold_the_gil()"),
            (1, "os.kill(os.getpid(), signal.SIGSTOP)"),
        ],
        ids=["rank 0 stopped", "rank 0 holds the GIL", "rank 1 stopped"],
    )
    def test_an_unresponsive_rank_is_reported(
        self, ranks: list[Ranks], tmp_path: Path, culprit: int, how: str
    ) -> None:
        """Another rank makes it print its stack traces. Rank 0 hosts the store through which ranks
        communicate."""
        ranks.append(Ranks(tmp_path, 2, data=f"if step == 2 and rank == {culprit}: {how}"))
        codes, printed = ranks[0].wait()
        other = 1 - culprit
        assert codes[other] == 3 and codes[culprit] == -signal.SIGQUIT
        pid = ranks[0].processes[culprit].pid
        assert re.search(rf"rank {culprit} .*does not answer", printed[other])
        assert re.search(rf"rank {culprit}\W.*, process {pid}", printed[other])
        assert f'rank {other}: in step 2, phase "forward and backward"' in printed[other]
        assert "dist.barrier()" in printed[other]
        assert re.search(r'File ".*loop.py", line \d+ in (<module>|hold_the_gil)', printed[culprit])

    @pytest.mark.slow
    def test_time_between_steps_does_not_count(self, ranks: list[Ranks], tmp_path: Path) -> None:
        """This holds also if one rank takes the time and the others wait for it in their next step,
        and at the end."""
        ranks.append(
            Ranks(tmp_path, 2, between=f"if rank == 1 and step > 1: time.sleep({2 * _LIMIT})")
        )
        assert ranks[0].wait() == ([0, 0], ["", ""])

    @pytest.mark.slow
    def test_a_hang_after_a_false_suspicion_is_reported(
        self, ranks: list[Ranks], tmp_path: Path
    ) -> None:
        data = "if step == 3 and rank == 1: time.sleep(1000)"
        between = f"if rank == 1 and step == 2: time.sleep({2 * _LIMIT})"
        ranks.append(Ranks(tmp_path, 2, data=data, between=between))
        codes, printed = ranks[0].wait()
        assert codes == [3, 3] and "rank 1 holds up the others" in "".join(printed)

    @pytest.mark.slow
    def test_time_in_a_stopped_process_does_not_count(
        self, ranks: list[Ranks], tmp_path: Path
    ) -> None:
        """A process is stopped by Ctrl-Z and continued by `fg`."""
        started = tmp_path / "started"
        ranks.append(
            Ranks(
                tmp_path,
                1,
                data=f"if step == 2: open({str(started)!r}, 'w'); time.sleep({_LIMIT / 2})",
            )
        )
        (process,) = ranks[0].processes
        deadline = time.monotonic() + _TIMEOUT
        while not started.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGSTOP)
        time.sleep(2 * _LIMIT)
        process.send_signal(signal.SIGCONT)
        assert ranks[0].wait() == ([0], [""])


class TestDescription:
    """The report on the positions of the ranks."""

    POSITIONS = {
        0: Position(step=4, n_phases=2, phase="forward and backward", line="wait (a.py:1)"),
        1: Position(step=4, n_phases=1, phase="data", line="read (b.py:2)"),
        2: Position(step=4, n_phases=2, phase="forward and backward", line="wait (a.py:1)"),
    }

    def test_the_rank_with_the_earliest_phase_is_named_first(self) -> None:
        assert describe(self.POSITIONS, {}, 600) == (
            "the run hangs, a step has not ended after 600 seconds: rank 1 holds up the others\n"
            '  rank 1: in step 4, phase "data", at read (b.py:2)\n'
            '  ranks 0, 2: in step 4, phase "forward and backward", at wait (a.py:1)'
        )

    def test_an_unresponsive_rank_is_named_first(self) -> None:
        text = describe(self.POSITIONS, {3: Process("host-7", 4711, 0.0)}, 600)
        assert "rank 3 does not answer\n  rank 3: host-7, process 4711; it is stopped" in text

    def test_a_rank_in_an_earlier_step_blocks_the_others(self) -> None:
        """An earlier step counts more than an earlier phase; the end of a step comes after all its
        phases."""
        late = Position(step=3, n_phases=9, phase="optimizer step", line="step (c.py:3)")
        finished = Position(
            step=3, n_phases=sys.maxsize, phase=None, line="save (d.py:4)", after="save"
        )
        assert "rank 3 holds up" in describe({**self.POSITIONS, 3: late, 4: finished}, {}, 600)
        assert 'rank 3: after step 3, phase "save", at save' in describe(
            {**self.POSITIONS, 3: finished}, {}, 600
        )

    def test_all_ranks_in_the_same_phase_are_listed_by_line(self) -> None:
        looping = Position(step=4, n_phases=2, phase="forward and backward", line="loop (e.py:5)")
        text = describe({0: self.POSITIONS[0], 1: looping}, {}, 600)
        assert (
            "all ranks are in the same phase" in text
            and "at wait (a.py:1)" in text
            and "at loop (e.py:5)" in text
        )


class TestRuns:
    """The watchdog of the trainer."""

    HANGING = """
        import time


        class Hanging(Trainer):
            def next_micro_batches(self, batches):
                if self.step == 2 and self.rank == 1:
                    time.sleep(1000)
                return super().next_micro_batches(batches)


        def debug():
            return config_of(Hanging)
    """

    STOPPING = """
        import os
        import signal

        from torchtitan.components.checkpoint.saver import Saver


        def stop(phase):
            # Stop rank 1 in the phase that the test names.
            if os.environ["STOP_IN"] == phase and os.environ.get("RANK") == "1":
                os.kill(os.getpid(), signal.SIGSTOP)


        class Stopping(Trainer):
            def next_micro_batches(self, batches):
                if self.step == 2:
                    stop("data")
                return super().next_micro_batches(batches)

            def forward_backward_step(self, batch, n_tokens):
                if self.step == 2:
                    stop("forward")
                return super().forward_backward_step(batch, n_tokens)

            def validate(self):
                stop("validation")
                return super().validate()

            def close(self):
                stop("end")
                super().close()


        write, export = Saver._write_complete, Saver._write_exported


        def write_complete(self, marker, *arguments):
            if marker.step == 2:
                stop("save")
            return write(self, marker, *arguments)


        def write_exported(self, *arguments):
            stop("export")
            return export(self, *arguments)


        Saver._write_complete, Saver._write_exported = write_complete, write_exported


        def debug():
            stop("start-up")
            return config_of(Stopping)
    """

    SLOW = """
        import time

        from torchtitan.components.checkpoint import CheckpointManager


        class Slow(CheckpointManager):
            def save(self, step, **arguments):
                time.sleep(5)
                super().save(step, **arguments)


        class SlowTrainer(Trainer):
            def validate(self):
                loss = super().validate()
                time.sleep(5 * self.rank)
                return loss


        def debug():
            return dataclasses.replace(config_of(SlowTrainer), checkpoint=Slow.Config(enable=True))
    """

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        (tmp_path / "corpus.txt").write_text(
            "".join(f"This is sentence {number}. " for number in range(400))
        )
        write_module(tmp_path / "hanging", textwrap.dedent(self.HANGING))
        write_module(tmp_path / "slow", textwrap.dedent(self.SLOW))
        write_module(tmp_path / "stopping", textwrap.dedent(self.STOPPING))
        return tmp_path

    def run(
        self,
        folder: Path,
        module: str,
        *words: str,
        torchrun: bool = False,
        variables: dict[str, str] | None = None,
        **options: object,
    ) -> tuple[int, str]:
        """Train with two processes; return the exit code and the output."""
        torchtitan = [sys.executable, "-m", "torchtitan.cli.main", "train"]
        elastic = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
        ]
        start = [*elastic, "-m", "torchtitan.train"] if torchrun else torchtitan
        settings = {**TINY, "dataloader.dataset": "corpus.txt", **options}
        command = Command(
            [*start, "--module", module, "--config", "debug", *flags(settings), *words],
            folder,
            NGPU="2",
            **(variables or {}),
        )
        try:
            return command.wait(), command.printed
        finally:
            command.kill()

    @pytest.mark.slow
    @pytest.mark.parametrize("torchrun", [False, pytest.param(True, marks=pytest.mark.long)])
    def test_a_sleeping_rank_ends_the_run(self, folder: Path, torchrun: bool) -> None:
        code, printed = self.run(
            folder, "hanging", torchrun=torchrun, **{"comm.step_timeout_seconds": 3}
        )
        assert code == (1 if torchrun else 3)  # torchrun returns its own code
        assert (
            re.search(r'rank 1 \(.*\) is in step 3, phase "data"', printed)
            and "time.sleep(1000)" in printed
        )
        assert re.search(r'rank 0 \(.*\) is in step 3, phase "counting tokens"', printed)
        assert "in count_valid_tokens" in printed
        assert printed.count(" ERROR ") == 1 and printed.count("rank 1 holds up the others") == 1

    @pytest.mark.slow
    def test_slow_validation_and_saving_are_not_reported(self, folder: Path) -> None:
        options = {"comm.step_timeout_seconds": 3, "validator.enable": True, "validator.freq": 2}
        code, printed = self.run(folder, "slow", "--validator.dataset", "corpus.txt", **options)
        assert code == 0 and "training completed: 4 steps" in printed
        assert "the run hangs" not in printed and "most recent call" not in printed

    @pytest.mark.slow
    @pytest.mark.parametrize("step_timeout", [3, pytest.param(0, marks=pytest.mark.long)])
    @pytest.mark.parametrize(
        ("phase", "async_mode", "named"),
        [
            ("start-up", "disabled", "start-up"),
            ("data", "disabled", "counting tokens"),
            ("forward", "disabled", "(forward|backward)"),
            ("save", "disabled", "save"),
            ("save", "async", ".*"),  # the main thread's phase
            ("save", "async_with_pinned_mem", ".*"),
            ("validation", "disabled", "validation"),
            ("export", "disabled", "export"),
            ("end", "disabled", "between steps"),
        ],
    )
    def test_a_stopped_rank_ends_the_run(
        self, folder: Path, phase: str, async_mode: str, named: str, step_timeout: int
    ) -> None:
        """One message names the phase of the rank that waits. Without the watchdog, the collective
        times out."""
        start_up_seconds = 20 if phase == "start-up" else 120  # only there is the limit reached
        timeouts = {
            "init_timeout_seconds": start_up_seconds,
            "step_timeout_seconds": step_timeout,
        }
        timeouts["train_timeout_seconds"] = step_timeout + 60 if step_timeout else 10
        options = {f"comm.{name}": value for name, value in timeouts.items()}
        options |= {
            "checkpoint.interval": 2,
            "checkpoint.async_mode": async_mode,
            "validator.enable": True,
        }
        words = (
            "--checkpoint.enable",
            "--checkpoint.last_save_in_hf",
            "--validator.dataset",
            "corpus.txt",
        )
        begun = time.monotonic()
        code, printed = self.run(
            folder, "stopping", *words, variables={"STOP_IN": phase}, **options
        )
        assert code == 3 and time.monotonic() - begun < 180
        assert printed.count(" ERROR ") == 1 and "Traceback" not in printed
        assert re.search(rf'ERROR the run hangs.* phase "{named}"', printed)
