"""`python -m tests.kill_test.elastic`: kill whole hosts of an elastic run, add others, and compare
it with a run that was left alone. A host is a torchrun agent with one process."""

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist

from tests.conftest import PROJECT
from tests.kill_test import attempts
from tests.kill_test.__main__ import write_text
from tests.kill_test.attempts import Attempt, AttemptFailed
from tests.kill_test.modes import INTERVAL, ROUNDING, RUN, Options
from tests.kill_test.records import (
    Difference,
    compare_lines,
    compare_states,
    read_lines,
    read_state,
    without_ranks,
)
from tests.training import flags

MOST = 4
LEAST = 2
STEPS_PER_ROUND = 10
_LAST_STEPS = 30
"""Enough that the run does not end while the hosts of the last round start."""

_PAUSE = 0.7
"""Seconds of sleep before a step."""

_TIMEOUT_SECONDS = 240
"""Longest time without progress; interpreters of four hosts start on two busy cores."""

# Short times until a silent host counts as lost, and until the others start without it; the
# defaults are 15 s and 30 s.
_MEETING = "is_host=false,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=5"


class Hosts:
    """The hosts of a run, which meet at a store outside of them. Use it in a `with` statement,
    which ends them all."""

    def __init__(self, workplace: Path, options: Options):
        self._workplace, self._options = workplace, options
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._log = workplace / "hosts.log"
        self.running: list[Any] = []

    def start(self, count: int) -> None:
        """Start hosts."""
        torchrun = [
            "-m",
            "torch.distributed.run",
            "--nnodes",
            f"{LEAST}:{MOST}",
            "--nproc-per-node",
            "1",
        ]
        meeting = [
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            f"127.0.0.1:{self._store.port}",
            "--rdzv-id",
            "elastic",
        ]
        limits = ["--rdzv-conf", _MEETING, "--max-restarts", "1000", "--monitor-interval", "0.1"]
        run = [
            "-m",
            "torchtitan.train",
            "--module",
            "tests.kill_test",
            "--config",
            "noisy_debugmodel",
        ]
        words = [
            *torchrun,
            *meeting,
            *limits,
            "--local-addr",
            "127.0.0.1",
            *run,
            *flags(dict(self._options)),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT)}
        environment |= {
            "TORCHTITAN_CACHE": str(self._workplace / "cache"),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        with open(self._log, "ab") as log:
            for _ in range(count):
                host = attempts.start_process(
                    [sys.executable, *words],
                    cwd=self._workplace,
                    env=environment,
                    stdout=log.fileno(),
                    stderr=log.fileno(),
                    start_new_session=True,
                )
                self.running.append(host)

    def kill(self, host: Any) -> None:
        """End an agent and its processes, which have their own process groups, by SIGKILL."""
        os.kill(host.pid, signal.SIGSTOP)  # it starts no more processes
        listed = subprocess.run(
            ["ps", "-A", "-o", "ppid=,pid="], capture_output=True, text=True, check=True
        )
        pairs = [tuple(map(int, line.split())) for line in listed.stdout.splitlines()]
        for pid in (host.pid, *(child for parent, child in pairs if parent == host.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        host.wait()
        self.running.remove(host)

    def starts(self) -> list[tuple[int, int]]:
        """Return the first step and the number of processes of each start so far."""
        return [
            (int(a), int(b))
            for a, b in re.findall(r" steps (\d+) to \d+ on (\d+) process", self.printed())
        ]

    def done_steps(self) -> list[int]:
        """Return the steps logged so far, in the order in which they were taken."""
        return [int(step) for step in re.findall(r"INFO step +(\d+)/", self.printed())]

    def printed(self) -> str:
        """Return what all hosts have printed."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        """Wait for the condition; return False if a host ends earlier.

        Raises:
            AttemptFailed: if a host fails, or the run makes no progress.
        """
        deadline, size = time.monotonic() + _TIMEOUT_SECONDS, 0
        while not condition():
            codes = [host.poll() for host in self.running]
            if 0 in codes:
                return False
            if any(codes):
                raise AttemptFailed(f"exit codes {codes}:\n{self.printed()}")
            if (now := len(self.done_steps())) > size:
                deadline, size = time.monotonic() + _TIMEOUT_SECONDS, now
            if time.monotonic() > deadline:
                raise AttemptFailed(f"no progress:\n{self.printed()}")
            time.sleep(0.05)
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for host in list(self.running):
            if host.poll() is None:
                self.kill(host)


@dataclass
class Outcome:
    """The result of an elastic run."""

    rounds: int = 0
    """Number of times that one or two hosts were killed and the run continued."""
    starts: list[tuple[int, int]] = field(default_factory=list)
    """First step and number of processes of each start."""
    lines: Difference = field(default_factory=Difference)
    state: Difference = field(default_factory=Difference)
    same_documents: bool = False
    """True if each step had the documents of the run left alone, in their order."""

    @property
    def passed(self) -> bool:
        """True if the hosts that were lost left no trace."""
        return self.same_documents and max(self.lines.value, self.state.value) <= ROUNDING


def run(workplace: Path, rounds: int, seed: int) -> Outcome:
    """Run with 2 to 4 hosts, kill one or two in each round, and compare with one undisturbed
    process.

    Raises:
        AttemptFailed: if the run ends in another way than by its last step.
    """
    generator = random.Random(seed)
    steps = rounds * STEPS_PER_ROUND + _LAST_STEPS
    options = {
        **RUN,
        "model.dim": 64,
        "model.ffn_dim": 128,
        "training.global_batch_size": 12,  # a multiple of any number of hosts
        "training.steps": steps,
        "debug.ledger": True,
        "dataloader.dataset": write_text(workplace / "text.txt", seed),
    }
    alone, folder = workplace / "alone", workplace / "elastic"
    with Attempt(workplace, {**options, "dump_folder": alone}, processes=1) as reference:
        reference.check_success()
    outcome = Outcome()
    changes = {"dump_folder": folder, "checkpoint.async_mode": "async", "pause": _PAUSE}
    with Hosts(workplace, {**options, **changes}) as hosts:
        hosts.start(MOST)
        while outcome.rounds < rounds and _lose_hosts(hosts, generator):
            outcome.rounds += 1
            _tell(f"round {outcome.rounds}: starts {hosts.starts()[-3:]}")
        hosts.wait_until(lambda: False)
        outcome.starts = hosts.starts()
    outcome.lines = compare_lines(read_lines(folder), read_lines(alone))
    states = [
        without_ranks(read_state(run / "checkpoint" / f"step-{steps}")) for run in (folder, alone)
    ]
    outcome.state = compare_states(*states)
    outcome.same_documents = _documents(folder) == _documents(alone)
    return outcome


def _lose_hosts(hosts: Hosts, generator: random.Random) -> bool:
    """Kill hosts at a random moment, let the others take a step, and start new ones. Return whether
    it continued."""
    started = len(hosts.starts())
    first = len(hosts.done_steps()) + generator.randint(1, 2 * INTERVAL)
    delay = generator.uniform(0, 0.3)
    if not hosts.wait_until(lambda: len(hosts.done_steps()) >= first):
        return False
    time.sleep(delay)
    n_lost = generator.randint(1, max(1, len(hosts.running) - LEAST))
    n_left = len(hosts.running) - n_lost
    for host in generator.sample(hosts.running, n_lost):
        hosts.kill(host)
    if n_left >= LEAST:  # otherwise the rest waits for a new host
        goes_on = hosts.wait_until(lambda: any(n == n_left for _, n in hosts.starts()[started:]))
        taken = len(hosts.done_steps())
        if not goes_on or not hosts.wait_until(lambda: len(hosts.done_steps()) > taken):
            return False
    started = len(hosts.starts())
    hosts.start(generator.randint(1, MOST - n_left))
    return hosts.wait_until(lambda: len(hosts.starts()) > started)


def _documents(folder: Path) -> list[list[str]]:
    return [
        json.loads(line)["documents"] for line in (folder / "ledger.jsonl").read_text().splitlines()
    ]


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(words: Sequence[str] | None = None) -> int:
    """Run the rounds that the command line asks for: 0 if the run equals the one left alone,
    otherwise 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.kill_test.elastic", description=__doc__)
    parser.add_argument(
        "--rounds", type=int, default=20, help="times that hosts are killed (default: 20)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the hosts and moments (default: 0)"
    )
    arguments = parser.parse_args(words)
    workplace = Path(tempfile.mkdtemp(prefix="elastic-test-"))
    outcome = run(workplace, arguments.rounds, arguments.seed)
    sizes = " ".join(str(processes) for _, processes in outcome.starts)
    print(f"{outcome.rounds} rounds; processes after each start: {sizes}")
    print(
        f"same documents: {outcome.same_documents}; losses differ by {outcome.lines}, weights by "
        f"{outcome.state}"
    )
    return 0 if outcome.passed else 1


if __name__ == "__main__":
    sys.exit(main())
