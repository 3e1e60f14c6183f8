"""Commands with several processes, signals and the two scripts, run as a user runs them."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.test_main import write_module
from tests.commands import RunningCommand
from tests.conftest import PROJECT
from tests.training import TINY, flags

# seconds until a command counts as hung; on an idle machine, each takes less than 15
_TIMEOUT = 300
_ENDLESS = {"training.steps": 1_000_000, "metrics.log_freq": 10}


class Command:
    """A running command in its own process group; `printed` is its standard error. It is forked
    (`tests.commands`) unless `fresh`, which starts a new interpreter for the command and each
    rank."""

    def __init__(self, words: list[str], folder: Path, *, fresh: bool = False, **variables: str):
        environment = {
            name: value for name, value in os.environ.items() if name not in ("NGPU", "LOG_RANK")
        }
        environment |= {
            "PYTHONPATH": str(PROJECT),
            "TORCHTITAN_CACHE": str(folder / "cache"),
            "OMP_NUM_THREADS": "1",
        }
        start = subprocess.Popen if fresh or words[0] != sys.executable else RunningCommand
        self.process = start(
            words,
            cwd=folder,
            env={**environment, **variables},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.printed = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.printed += line

    def wait_for(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _TIMEOUT
        while not happened():
            assert self.process.poll() is None and time.monotonic() < deadline, self.printed
            time.sleep(0.05)

    def wait_for_text(self, pattern: str) -> None:
        self.wait_for(lambda: re.search(pattern, self.printed) is not None)

    def signal(self, number: int, *, group: bool = False) -> None:
        (os.killpg if group else os.kill)(self.process.pid, number)

    def listening(self) -> set[str]:
        """Addresses on which its processes listen, in hexadecimal as in /proc/net."""
        states = [
            line.split()
            for name in ("tcp", "tcp6")
            for line in Path("/proc/net", name).read_text().splitlines()
        ]
        address_of = {words[9]: words[1].partition(":")[0] for words in states if words[3] == "0A"}
        listed = subprocess.run(
            ["ps", "-A", "-o", "pgid=,pid="], capture_output=True, text=True, check=True
        ).stdout
        processes = [
            pid
            for group, pid in map(str.split, listed.splitlines())
            if group == str(self.process.pid)
        ]
        opened = [
            os.readlink(file) for pid in processes for file in Path("/proc", pid, "fd").iterdir()
        ]
        return {
            address_of[inode]
            for link in opened
            if (inode := link[len("socket:[") : -1]) in address_of
        }

    def wait(self) -> int:
        """Return the exit code after all processes that write to standard error have ended."""
        code = self.process.wait(_TIMEOUT)
        self._reader.join(_TIMEOUT)
        assert not self._reader.is_alive(), "a process outlives the command"
        return code

    def kill(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The current folder of the commands, with data."""
    folder = tmp_path_factory.mktemp("workplace")
    (folder / "corpus.txt").write_text(
        "".join(f"This is sentence {number}. " for number in range(400))
    )
    return folder


@pytest.fixture
def start(workplace: Path) -> Iterator[Callable[..., Command]]:
    """Start `torchtitan train` with a tiny model; running commands are killed after the test."""
    commands: list[Command] = []

    def start(
        processes: int,
        *words: str,
        fresh: bool = False,
        variables: dict[str, str] | None = None,
        **options: object,
    ) -> Command:
        overrides = {key.replace("__", "."): value for key, value in options.items()}
        settings = {**TINY, "dataloader.dataset": "corpus.txt", **overrides}
        command = [sys.executable, "-m", "torchtitan.cli.main", "train", *flags(settings), *words]
        commands.append(
            Command(command, workplace, fresh=fresh, NGPU=str(processes), **(variables or {}))
        )
        return commands[-1]

    yield start
    for command in commands:
        command.kill()


def assert_quiet(printed: str) -> None:
    """Check that only our logger wrote, without a traceback; lines of torch's logger begin with [W,
    W1120, [rank0]."""
    assert "Traceback" not in printed
    for line in printed.splitlines():
        assert re.match(r"\d\d:\d\d:\d\d (INFO|WARNING|ERROR) ", line), line


class TestFailures:
    @pytest.mark.slow
    def test_incompatible_checkpoint(self, start: Callable[..., Command], workplace: Path) -> None:
        """Every rank finds the error; it is reported once."""
        assert (
            start(1, "--checkpoint.enable", "--dump_folder", "earlier", training__steps=1).wait()
            == 0
        )
        command = start(
            2, "--checkpoint.initial_load_path", "earlier/checkpoint/step-1", model__ffn_dim=96
        )
        assert command.wait() == 2
        assert command.printed.count("does not fit this run") == 1
        assert (
            "layers.0.feed_forward.w1.weight: [128, 64] in the checkpoint, [96, 64] in this run"
            in command.printed
        )
        assert "Traceback" not in command.printed and "rank" not in command.printed
        assert not (workplace / "outputs" / "config.yaml").exists()

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            pytest.param(["--training.stepz", "3"], "--training.stepz", marks=pytest.mark.slow),
            (["--dataloader.dataset", "nowhere.txt"], "'nowhere.txt'"),
        ],
    )
    def test_mistake_is_reported_once(
        self, start: Callable[..., Command], words: list[str], message: str
    ) -> None:
        """`tests/cli/test_main.py` tests other mistakes."""
        command = start(2, *words)
        assert command.wait() == 2
        assert command.printed.count(message) == 1
        assert "Traceback" not in command.printed

    @pytest.mark.slow
    def test_one_rank_crashes(self, start: Callable[..., Command], workplace: Path) -> None:
        """Only the crashed rank's traceback is printed; a rank that hangs is killed."""
        code = """
            import time


            class Crashing(Trainer):
                def train_step(self, batches):
                    if self.step == 1 and self.rank == 1:
                        raise KeyError("a bug of rank 1")
                    if self.step == 1:
                        time.sleep(1000)
                    return super().train_step(batches)


            def debug():
                return config_of(Crashing)
        """
        write_module(workplace / "crashing", textwrap.dedent(code))
        command = start(2, "--module", "crashing", "--config", "debug", fresh=True)
        assert command.wait() == 1
        log, _, traceback = command.printed.partition("ERROR rank 1 failed:\n")
        assert_quiet("".join(log.splitlines(keepends=True)[:-1]))
        assert traceback.startswith("Traceback") and traceback.count("Traceback") == 1
        assert traceback.endswith("KeyError: 'a bug of rank 1'\n")

    @pytest.mark.slow
    def test_one_rank_is_killed(self, start: Callable[..., Command], workplace: Path) -> None:
        """The error names the killed rank, not the ranks that lost their connection to it."""
        code = """
            import os
            import signal


            class Killed(Trainer):
                def train_step(self, batches):
                    if self.step == 1 and self.rank == 1:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return super().train_step(batches)


            def debug():
                return config_of(Killed)
        """
        write_module(workplace / "killed", textwrap.dedent(code))
        command = start(2, "--module", "killed", "--config", "debug")
        assert command.wait() == 1
        assert re.search(
            r"ERROR rank 1, process \d+, was ended by SIGKILL \(.*memory\)", command.printed
        )
        assert_quiet(command.printed)


class TestStopping:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_one_process_without_checkpoints(
        self, start: Callable[..., Command], number: signal.Signals
    ) -> None:
        command = start(1, **_ENDLESS)
        command.wait_for_text(r"step +10/")
        command.signal(number)
        assert command.wait() == 0
        assert command.printed.count(f"{number.name} received") == 1
        assert re.search(
            r"stopped after step \d+; nothing is saved .*--checkpoint.enable", command.printed
        )
        assert_quiet(command.printed)

    @pytest.mark.slow
    def test_printed_command_resumes(self, start: Callable[..., Command], workplace: Path) -> None:
        variables = {"TORCHTITAN_PROGRAM": "./run train.sh"}  # with a space, which must be quoted
        command = start(
            1, "--checkpoint.enable", "--dump_folder", "it's", variables=variables, **_ENDLESS
        )
        command.wait_for_text(r"step +10/")
        command.signal(signal.SIGINT)
        assert command.wait() == 0
        match = re.search(r"stopped after step (\d+); to resume: (.*)", command.printed)
        assert match
        assert (workplace / "it's" / "checkpoint" / f"step-{match[1]}" / "complete.json").exists()
        script = workplace / "run train.sh"
        script.write_text(
            f'#!/bin/sh\necho "$NGPU" >&2\nexec {sys.executable} -m torchtitan.cli.main train '
            '"$@"\n'
        )
        script.chmod(0o755)
        again = Command(["sh", "-c", f"{match[2]} --training.steps {int(match[1]) + 1}"], workplace)
        assert again.wait() == 0
        assert again.printed.startswith("1\n")
        assert f"loaded it's/checkpoint/step-{match[1]}" in again.printed

    @pytest.mark.parametrize(
        ("number", "group"),
        [(signal.SIGTERM, True), pytest.param(signal.SIGTERM, False, marks=pytest.mark.slow)],
        ids=["group", "launcher"],
    )
    def test_two_processes(
        self, start: Callable[..., Command], workplace: Path, number: signal.Signals, group: bool
    ) -> None:
        folder = f"two-{group}"
        command = start(2, "--checkpoint.enable", "--dump_folder", folder, **_ENDLESS)
        command.wait_for_text(r"step +10/")
        if sys.platform == "linux":  # 127.0.0.1: other hosts can reach neither the store nor gloo
            assert command.listening() == {"0100007F"}
        command.signal(number, group=group)
        assert command.wait() == 0
        assert command.printed.count("received: the run stops after this step") == 1
        match = re.search(
            r"stopped after step (\d+); to resume: NGPU=2 torchtitan train ", command.printed
        )
        assert match
        assert (workplace / folder / "checkpoint" / f"step-{match[1]}" / "complete.json").exists()
        assert_quiet(command.printed)

    SLOW_SAVE = """
        import dataclasses
        import time

        from torchtitan.components.checkpoint import CheckpointManager


        class Slow(CheckpointManager):
            def save(self, step, *, stopped=False, **arguments):
                if stopped:
                    print("saving", file=sys.stderr, flush=True)
                    time.sleep(SECONDS)
                super().save(step, stopped=stopped, **arguments)


        def debug():
            base = llama3_debugmodel()
            return dataclasses.replace(base, checkpoint=Slow.Config(enable=True))
    """

    def slow_save(self, start: Callable[..., Command], module: Path, seconds: int) -> Command:
        """Start two processes and request a stop; their save takes some seconds."""
        code = textwrap.dedent(self.SLOW_SAVE).replace("SECONDS", str(seconds))
        write_module(module, f"import sys\n{code}")
        words = [
            "--module",
            module.name,
            "--config",
            "debug",
            "--dump_folder",
            f"{module.name}_run",
        ]
        command = start(2, *words, **_ENDLESS)
        command.wait_for_text(r"step +10/")
        command.signal(signal.SIGINT, group=True)  # as a terminal does
        command.wait_for_text("saving")
        return command

    @pytest.mark.slow
    def test_stop_waits_for_a_slow_save(
        self, start: Callable[..., Command], workplace: Path
    ) -> None:
        """The save takes longer than the 30 seconds after which launchers commonly kill."""
        command = self.slow_save(start, workplace / "slow", 40)
        assert command.wait() == 0
        match = re.search(r"stopped after step (\d+)", command.printed)
        assert (
            match
            and (
                workplace / "slow_run" / "checkpoint" / f"step-{match[1]}" / "complete.json"
            ).exists()
        )

    @pytest.mark.slow
    def test_second_signal_exits_immediately(
        self, start: Callable[..., Command], workplace: Path
    ) -> None:
        command = self.slow_save(start, workplace / "endless", 1000)
        time.sleep(1.2)  # earlier, it would count as a repetition of the first one
        command.signal(signal.SIGINT, group=True)
        assert command.wait() == 128 + signal.SIGINT
        assert "Traceback" not in command.printed

    @pytest.mark.slow
    def test_second_signal_ends_one_process(
        self, start: Callable[..., Command], workplace: Path
    ) -> None:
        code = """
            import time


            class Stuck(Trainer):
                def train_step(self, batches):
                    if self.step == 1:
                        logger.info("stuck")
                        time.sleep(1000)
                    return super().train_step(batches)
        """
        code = f"from torchtitan.tools.logging import logger\n{textwrap.dedent(code)}"
        write_module(workplace / "stuck", f"{code}\n\ndef debug():\n    return config_of(Stuck)\n")
        command = start(1, "--module", "stuck", "--config", "debug")
        command.wait_for_text("stuck\n")
        command.signal(signal.SIGINT)
        command.wait_for_text("SIGINT received")
        time.sleep(1.2)
        command.signal(signal.SIGINT)
        assert command.wait() == -signal.SIGINT
        assert_quiet(command.printed)

    @pytest.mark.parametrize(
        ("processes", "number", "code"),
        [
            (1, signal.SIGINT, -signal.SIGINT),
            (2, signal.SIGINT, 130),
            pytest.param(2, signal.SIGTERM, 143, marks=pytest.mark.slow),
        ],
    )
    def test_stop_during_startup(
        self,
        start: Callable[..., Command],
        workplace: Path,
        processes: int,
        number: signal.Signals,
        code: int,
    ) -> None:
        """The run has not started, so it exits without waiting."""
        name = f"starting_{processes}_{number.name}"
        registry = f"""
            import os
            import time
            from pathlib import Path


            def debug():
                if ("RANK" in os.environ) == {processes > 1}:
                    Path("{name}.started").touch()
                    time.sleep(1000)
                return llama3_debugmodel()
        """
        write_module(workplace / name, textwrap.dedent(registry))
        command = start(processes, "--module", name, "--config", "debug")
        command.wait_for((workplace / f"{name}.started").exists)
        command.signal(number, group=True)
        assert command.wait() == code
        assert_quiet(command.printed)

    @pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
    def test_stop_in_the_first_step(
        self, start: Callable[..., Command], workplace: Path, processes: int
    ) -> None:
        """The step may compile for minutes or wait for a missing rank, and there is nothing to
        save."""
        name = f"first_step_{processes}"
        code = (
            "import time\n\n\nclass Stuck(Trainer):\n    def train_step(self, batches):\n        "
            "time.sleep(1000)\n"
        )
        write_module(workplace / name, f"{code}\n\ndef debug():\n    return config_of(Stuck)\n")
        command = start(
            processes,
            "--module",
            name,
            "--config",
            "debug",
            "--checkpoint.enable",
            dump_folder=name,
        )
        command.wait_for_text("parameters")
        command.signal(signal.SIGTERM)
        started = time.monotonic()
        assert command.wait() == (-signal.SIGTERM if processes == 1 else 128 + signal.SIGTERM)
        assert time.monotonic() - started < 10
        assert_quiet(command.printed)

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_stop_while_workers_start(
        self, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
    ) -> None:
        """The remaining workers are not started: thousands would take too long."""
        from torchtitan.cli import launch

        started = []

        class Worker:
            rank, failed = 0, False

            def __init__(self, *arguments: object) -> None:
                started.append(self)
                self.process = subprocess.Popen(["sleep", "1000"])
                if len(started) == 2:
                    # To this thread: the launcher has one, but a test process has more, any of
                    # which may receive a process's signal later.
                    signal.raise_signal(number)

        monkeypatch.setattr(launch, "_Worker", Worker)
        hosts = launch.Hosts(count=1, rank=0, address="localhost", port=1)
        assert launch.launch([], hosts=hosts, processes=1000) == 0
        assert len(started) == 2 and all(worker.process.poll() is not None for worker in started)

    @pytest.mark.slow
    def test_no_process_outlives_its_launcher(self, start: Callable[..., Command]) -> None:
        command = start(2, **_ENDLESS)
        command.wait_for_text(r"step +10/")
        command.signal(signal.SIGKILL)
        assert command.wait() == -signal.SIGKILL


class TestRanks:
    def test_output_of_ranks_is_prefixed(self, start: Callable[..., Command]) -> None:
        command = start(2, training__steps=1, variables={"LOG_RANK": "1"})
        assert command.wait() == 0
        assert "INFO rank 1: step 1/1" in command.printed
        assert "rank 0" not in command.printed and command.printed.count("step 1/1") == 1
        assert_quiet(command.printed)

    @pytest.mark.slow
    def test_two_hosts(self, start: Callable[..., Command], workplace: Path) -> None:
        """Two launchers with one process each equal one launcher with two, including the threads of
        each process."""
        code = """
            import os
            from pathlib import Path


            def debug():
                if "RANK" in os.environ:
                    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
                    Path(f"host-{os.environ['RANK']}").write_text(" ".join(os.environ[name] for name in names))
                return llama3_debugmodel()
        """
        write_module(workplace / "hosts", textwrap.dedent(code))
        words = ["--module", "hosts", "--config", "debug", "--dump_folder", "hosts_run"]
        meeting = {"NNODES": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
        hosts = [
            start(1, *words, variables={**meeting, "NODE_RANK": str(rank)}) for rank in range(2)
        ]
        assert [host.wait() for host in hosts] == [0, 0]
        assert "on 2 process(es)" in hosts[0].printed
        assert [(workplace / f"host-{rank}").read_text() for rank in range(2)] == [
            "0 0 2 1 1",
            "1 0 2 1 1",
        ]

    @pytest.mark.slow
    def test_under_torchrun(self, workplace: Path) -> None:
        settings = flags({**TINY, "dataloader.dataset": "corpus.txt", "dump_folder": "torchrun"})
        words = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
        ]
        command = Command([*words, "-m", "torchtitan.train", *settings], workplace)
        assert command.wait() == 0
        assert (
            "on 2 process(es)" in command.printed
            and "training completed: 4 steps" in command.printed
        )


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])


FAKE_PYTHON = """#!/bin/sh
# A fake Python: `-P` looks for packages, `-c` prints the version, `-m venv` and `-m pip` set up the environment.
echo "$*" >> "$CALLS"
case "$1 $2" in
    -P*) exit "$LACKS_PACKAGE" ;;
    *torch.version.cuda*) exit "$LACKS_TORCH" ;;
    -c*) exit "$OLD" ;;
    "-m venv") for venv; do :; done
        mkdir -p "$venv/bin" && cp "$0" "$venv/bin/python" && cp "$0" "$venv/bin/torchtitan" ;;
    "-m pip") case "$*" in *--editable*) exit "$PIP_FAILS" ;; esac ;;
    train*) echo "$TORCHTITAN_PROGRAM in $(pwd)" >> "$CALLS" ;;
esac
"""


class TestScripts:
    """The scripts in a copy of the checkout, with a fake Python that records its calls."""

    @pytest.fixture
    def checkout(self, tmp_path: Path) -> Path:
        folder = tmp_path / "check out"  # with a space
        (folder / "scripts").mkdir(parents=True)
        for name in ("run_train.sh", "run_tests.sh", "scripts/environment.sh", "pyproject.toml"):
            shutil.copy(PROJECT / name, folder / name)
        (folder / "constraints.txt").write_text("numpy==2\ntorch==2.13.0\n")
        binaries = tmp_path / "bin"
        binaries.mkdir()
        for name in ("python", "python3", "torchtitan"):
            (binaries / name).write_text(FAKE_PYTHON)
            (binaries / name).chmod(0o755)
        (tmp_path / "elsewhere").mkdir()
        return folder

    def run(
        self, checkout: Path, script: str, *words: str, **variables: str
    ) -> tuple[int, list[str], str]:
        """Run a script from another folder; return the exit code, the calls of Python and the
        output."""
        calls = checkout.parent / "calls"
        calls.write_text("")
        defaults = {
            "CALLS": str(calls),
            "LACKS_PACKAGE": "1",
            "LACKS_TORCH": "1",
            "OLD": "0",
            "PIP_FAILS": "0",
        }
        path = f"{checkout.parent / 'bin'}:/usr/bin:/bin"
        result = subprocess.run(
            [f"../check out/{script}", *words],
            cwd=checkout.parent / "elsewhere",
            env={"PATH": path, **defaults, **variables},
            capture_output=True,
            text=True,
        )
        lines = [
            line for line in calls.read_text().splitlines() if not line.startswith(("-P", "-c"))
        ]
        return result.returncode, lines, result.stderr

    def test_environment_is_set_up_once(self, checkout: Path) -> None:
        train = [
            "train --module llama3 --training.steps 3",
            f"../check out/run_train.sh in {checkout.parent / 'elsewhere'}",
        ]
        code, calls, printed = self.run(
            checkout, "run_train.sh", "--training.steps", "3", MODULE="llama3"
        )
        assert code == 0 and "Setting up" in printed
        assert calls == [
            f"-m venv {checkout}/.venv",
            "-m pip install --quiet torch==2.13.0",
            f"-m pip install --quiet --constraint {checkout}/constraints.txt --config-settings "
            f"editable_mode=compat --editable {checkout}",
            *train,
        ]
        assert self.run(checkout, "run_train.sh", "--training.steps", "3", MODULE="llama3") == (
            0,
            train,
            "",
        )

    def test_interrupted_setup_is_repeated(self, checkout: Path) -> None:
        code, calls, _ = self.run(checkout, "run_train.sh", PIP_FAILS="1")
        assert code != 0 and not any(call.startswith("train") for call in calls)
        code, calls, _ = self.run(checkout, "run_train.sh")
        assert code == 0 and calls[-2] == "train" and any("--editable" in call for call in calls)

    def test_changed_requirements_are_installed(self, checkout: Path) -> None:
        self.run(checkout, "run_train.sh")
        (checkout / "constraints.txt").write_text("torch==2.14.0\n")
        _, calls, _ = self.run(checkout, "run_train.sh")
        assert "-m pip install --quiet torch==2.14.0" in calls

    def test_test_script_installs_development_packages(self, checkout: Path) -> None:
        self.run(checkout, "run_train.sh")
        code, calls, _ = self.run(checkout, "run_tests.sh", "-k", "name")
        assert code == 0 and calls[-2].endswith(f"--editable {checkout}[dev]")
        assert (
            calls[-1]
            == "-m pytest -n 3 --dist worksteal --durations=15 -m not slow and not long -k name"
        )
        # and brings its own dependencies
        assert self.run(checkout, "run_train.sh")[1][0] == "train"

    def test_optional_packages_are_installed_on_request(self, checkout: Path) -> None:
        self.run(checkout, "run_train.sh")
        code, calls, _ = self.run(checkout, "run_train.sh", EXTRA="quantization")
        assert (
            code == 0
            and calls[-3].endswith(f"--editable {checkout}[quantization]")
            and calls[-2] == "train"
        )
        assert self.run(checkout, "run_train.sh", EXTRA="quantization")[1][0] == "train"

    def test_unknown_package_group_is_rejected(self, checkout: Path) -> None:
        code, calls, printed = self.run(checkout, "run_train.sh", EXTRA="torchao")
        assert (code, calls) == (2, [])
        groups = (
            "classify, dev, diffusion, docs, eval, fla, gguf, math, mergekit, openenv, quantization, "
            "sentencepiece, serve, transformers, verifiers, vision, vllm, wandb"
        )
        assert printed == f"EXTRA is 'torchao', but must be one of {groups}\n"

    def test_package_groups_match_pyproject(self, checkout: Path) -> None:
        for extra in tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"][
            "optional-dependencies"
        ]:
            assert self.run(checkout, "run_train.sh", EXTRA=extra)[0] == 0

    def test_environment_with_the_package_is_used(self, checkout: Path) -> None:
        code, calls, printed = self.run(checkout, "run_train.sh", "--help", LACKS_PACKAGE="0")
        assert (code, calls[0], printed) == (0, "train --help", "")
        assert not (checkout / ".venv").exists()

    def test_torch_for_cuda_is_not_downloaded_again(self, checkout: Path) -> None:
        code, calls, printed = self.run(checkout, "run_train.sh", LACKS_TORCH="0")
        assert code == 0 and "Using the torch that python3 has" in printed
        assert "-m venv --system-site-packages" in " ".join(calls)
        (install,) = [call for call in calls if "pip install" in call]
        constraints = Path(install.split("--constraint ")[1].split(" --config-settings")[0])
        assert constraints.read_text() == "numpy==2\n"

    def test_old_python_is_rejected(self, checkout: Path) -> None:
        code, calls, printed = self.run(checkout, "run_train.sh", OLD="1")
        assert (code, calls) == (1, ["--version"]) and "Python 3.11" in printed

    def test_shellcheck(self) -> None:
        shellcheck = Path(sys.executable).parent / "shellcheck"
        if not shellcheck.exists():
            pytest.skip("shellcheck is not installed (the extra dev has it)")
        scripts = [
            "run_train.sh",
            "run_tests.sh",
            "scripts/environment.sh",
            ".ci/run",
            "multinode.slurm",
            "benchmarks/gpu.sh",
        ]
        result = subprocess.run(
            [shellcheck, "-x", *scripts], cwd=PROJECT, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stdout
