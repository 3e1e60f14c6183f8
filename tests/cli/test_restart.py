"""Runs that fail and restart: the losses equal the losses of an uninterrupted run."""

import json
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_launch import Command, free_port
from tests.cli.test_main import write_module
from tests.training import TINY, flags
from torchtitan.cli.train import train

FAILING = """
    import os
    import signal
    import time
    from pathlib import Path

    from torchtitan.tools.errors import RunFailure, UserError


    class Failing(Trainer):
        # The last rank fails in step 6, once or every time.
        def next_micro_batches(self, batches):
            failed = Path(self.config.dump_folder, "failed")
            if self.step == 5 and self.rank == self.parallel_dims.world_size - 1 and not failed.exists():
                if "ALWAYS" not in os.environ:
                    failed.touch()
                fail(os.environ["HOW"])
            return super().next_micro_batches(batches)


    def fail(how):
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "hang":
            time.sleep(1000)
        elif how != "not":
            raise {"crash": KeyError, "mistake": UserError, "failure": RunFailure}[how]("as asked for")


    class Stopping(Trainer):
        # Crashes while it ends after a stop request.
        def finish(self, ending):
            raise KeyError("while stopping")


    def debug():
        return config_of(Failing)


    def stopping():
        return config_of(Stopping)
"""

OPTIONS = {
    **TINY,
    "dataloader.dataset": "corpus.txt",
    "training.steps": 8,
    "training.local_batch_size": 1,
    "training.global_batch_size": 4,
    "checkpoint.enable": True,
    "checkpoint.interval": 3,
    "comm.step_timeout_seconds": 10,
}
TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--monitor-interval",
    "0.1",
    "--max-restarts",
    "3",
]
LAUNCHER = [sys.executable, "-m", "torchtitan.cli.main", "train"]
MODULE = ["--module", "failing", "--config", "debug"]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("restarts")
    (folder / "corpus.txt").write_text(
        "".join(f"This is sentence {number}. " for number in range(400))
    )
    write_module(folder / "failing", textwrap.dedent(FAILING))
    return folder


@pytest.fixture
def start(workplace: Path) -> Iterator[Callable[..., Command]]:
    """Start a command in the workplace; running commands are killed after the test."""
    commands: list[Command] = []

    def start(*words: str, **variables: str) -> Command:
        commands.append(Command(list(words), workplace, **variables))
        return commands[-1]

    yield start
    for command in commands:
        command.kill()


@pytest.fixture(scope="module")
def expected(workplace: Path) -> Callable[[int], list[dict[str, Any]]]:
    """Return the metrics of an uninterrupted run of our launcher with a number of processes."""
    known: dict[int, list[dict[str, Any]]] = {}

    def expected(processes: int) -> list[dict[str, Any]]:
        if processes not in known:
            folder = f"uninterrupted-{processes}"
            command = Command(
                [*LAUNCHER, *MODULE, *options(folder)], workplace, HOW="not", NGPU=str(processes)
            )
            assert command.wait() == 0, command.printed
            known[processes] = numbers(workplace / folder)
        return known[processes]

    return expected


def options(folder: str, **changes: object) -> list[str]:
    return flags({**OPTIONS, "dump_folder": folder, **changes})


def numbers(folder: Path) -> list[dict[str, Any]]:
    """All lines of metrics.jsonl, without timings."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [
        {key: line[key] for key in ("step", "loss", "grad_norm", "lr", "n_tokens_seen")}
        for line in lines
    ]


class TestOurLauncher:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("how", "processes"),
        [
            pytest.param("kill", 2, marks=pytest.mark.long),
            ("crash", 1),
            ("hang", 2),
            pytest.param("kill", 4, marks=pytest.mark.long),
        ],
    )
    def test_loss_curve_continues(
        self,
        start: Callable[..., Command],
        workplace: Path,
        expected: Any,
        how: str,
        processes: int,
    ) -> None:
        """Each step has one line, bit-identical to an uninterrupted run."""
        folder = f"{how}-{processes}"
        command = start(
            *LAUNCHER, *MODULE, *options(folder), HOW=how, NGPU=str(processes), MAX_RESTARTS="1"
        )
        assert command.wait() == 0, command.printed
        assert command.printed.count("restart 1 of 1") == 1
        # A run in one process saves its last complete step when it crashes.
        step = 5 if (how, processes) == ("crash", 1) else 3
        resumed = f"resuming after step {step}: loaded {folder}/checkpoint/step-{step}"
        assert resumed in command.printed
        assert numbers(workplace / folder) == expected(processes)
        assert [line["step"] for line in expected(processes)] == [*range(1, 9)]

    @pytest.mark.slow
    @pytest.mark.parametrize(("how", "code"), [("mistake", 2), ("failure", 3)])
    def test_deterministic_failure_is_not_restarted(
        self, start: Callable[..., Command], how: str, code: int
    ) -> None:
        command = start(
            *LAUNCHER, *MODULE, *options(f"{how}-1"), HOW=how, NGPU="1", MAX_RESTARTS="2"
        )
        assert command.wait() == code
        assert (
            command.printed.count("ERROR as asked for") == 1 and "restart 1" not in command.printed
        )

    def test_restarts_are_counted(self, start: Callable[..., Command]) -> None:
        command = start(
            *LAUNCHER,
            *MODULE,
            *options("always"),
            HOW="crash",
            ALWAYS="1",
            NGPU="1",
            MAX_RESTARTS="2",
        )
        assert command.wait() == 1
        assert command.printed.count("KeyError: 'as asked for'") == 3
        assert [f"restart {number} of 2" in command.printed for number in (1, 2, 3)] == [
            True,
            True,
            False,
        ]

    def test_stop_request_does_not_restart(self, start: Callable[..., Command]) -> None:
        words = ["--module", "failing", "--config", "stopping"]
        endless = options("stopping", **{"training.steps": 1_000_000, "checkpoint.enable": False})
        command = start(*LAUNCHER, *words, *endless, NGPU="1", MAX_RESTARTS="2")
        command.wait_for_text(r"step +\d+/")
        command.signal(signal.SIGTERM)
        assert command.wait() == 1
        assert (
            command.printed.count("KeyError: 'while stopping'") == 1
            and "restart 1" not in command.printed
        )

    @pytest.mark.parametrize(
        ("variables", "message"),
        [
            ({"NNODES": "2", "MAX_RESTARTS": "1"}, "torchrun --max-restarts"),
            ({"MAX_RESTARTS": "x"}, "MAX_RESTARTS is 'x'"),
        ],
    )
    def test_refusals(
        self,
        monkeypatch: pytest.MonkeyPatch,
        capfd: Any,
        tmp_path: Path,
        variables: dict[str, str],
        message: str,
    ) -> None:
        for name, value in {
            "NODE_RANK": "0",
            "MASTER_ADDR": "localhost",
            "NGPU": "1",
            **variables,
        }.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("TORCHTITAN_COMMAND", "")
        handler = signal.getsignal(signal.SIGPIPE)
        try:
            assert train([*flags({**TINY, "dump_folder": tmp_path}), "--module", "llama3"]) == 2
        finally:
            signal.signal(signal.SIGPIPE, handler)
        assert message in capfd.readouterr().err


class TestTorchrun:
    @pytest.mark.long
    @pytest.mark.parametrize("processes", [2, 4])
    def test_killed_worker_restarts(
        self, start: Callable[..., Command], workplace: Path, expected: Any, processes: int
    ) -> None:
        folder = f"torchrun-{processes}"
        words = [
            *TORCHRUN,
            "--standalone",
            "--nproc-per-node",
            str(processes),
            "-m",
            "torchtitan.train",
        ]
        command = start(*words, *MODULE, *options(folder), HOW="kill")
        assert command.wait() == 0, command.printed
        assert (workplace / folder / "failed").exists()
        assert f"loaded {folder}/checkpoint/step-3" in command.printed
        assert numbers(workplace / folder) == expected(processes)

    @pytest.mark.long
    @pytest.mark.parametrize("how", ["not", "kill"])
    def test_two_agents(
        self, start: Callable[..., Command], workplace: Path, expected: Any, how: str
    ) -> None:
        """Two agents with two processes each equal four processes of one launcher, also after a
        kill."""
        folder = f"agents-{how}"
        rendezvous = [
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            f"localhost:{free_port()}",
            "--rdzv-id",
            folder,
        ]
        words = [
            *TORCHRUN,
            "--nnodes",
            "2",
            "--nproc-per-node",
            "2",
            *rendezvous,
            "--local-addr",
            "127.0.0.1",
        ]
        agents = [
            start(*words, "-m", "torchtitan.train", *MODULE, *options(folder), HOW=how)
            for _ in range(2)
        ]
        assert [agent.wait() for agent in agents] == [0, 0], [agent.printed for agent in agents]
        assert any("loaded agents-kill/checkpoint/step-3" in agent.printed for agent in agents) == (
            how == "kill"
        )
        assert numbers(workplace / folder) == expected(4)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--dataloader.dataset", "nowhere.txt"], "'nowhere.txt'"),
            pytest.param(
                ["--training.stepz", "3"], "unknown option --training.stepz", marks=pytest.mark.long
            ),
        ],
    )
    def test_mistake_is_reported_once(
        self, start: Callable[..., Command], words: list[str], message: str
    ) -> None:
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
        ]
        command = start(*torchrun, "-m", "torchtitan.train", *words)
        assert command.wait() != 0
        assert command.printed.count(message) == 1
        ours = command.printed.partition("Traceback")[0]  # torchrun's own follows
        assert "Traceback" not in ours and message in ours
