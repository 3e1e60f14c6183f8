"""One run of a system: its command, its process, and the numbers from its log of steps."""

import dataclasses
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from systems.report import OURS
from systems.task import GROUP_SIZE, NEW_TOKENS, Task

PROGRAMS = Path(__file__).resolve().parent
OWN_TOKENIZER = PROGRAMS.parents[1] / "torchtitan" / "assets" / "tokenizer"
POLL_SECONDS = 0.05
KIB_PER_GIB = 2**20


@dataclasses.dataclass(frozen=True)
class System:
    """A trainer: its package, and the program in this folder that runs it (torchtitan has a
    command)."""

    package: str
    program: str = ""
    compile: bool = False
    checkpointing: bool = False


SYSTEMS = {
    OURS: System("torchtitan"),
    "loop": System("transformers", "run_loop.py"),
    "trainer": System("transformers", "run_trainer.py"),
    "trainer-compiled": System("transformers", "run_trainer.py", compile=True),
    "litgpt": System("litgpt", "run_litgpt.py"),
    "trl": System("trl", "run_trl.py"),
    "trl-checkpointing": System("trl", "run_trl.py", checkpointing=True),
    "generate": System("transformers"),
    "grouped_mm": System("transformers"),
    "eager": System("transformers"),
}
OF_KIND = {"generate": "run_generate.py", "experts": "run_experts.py"}
"""Kind of task → the program in this folder that runs it with any system."""


class RunFailed(Exception):
    """A run that took too few steps, with the reason."""


def find_interpreters(systems: Iterable[str], pythons: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return system → (interpreter, version of its package) for the first of `pythons` that has the
    package."""
    program = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"
    found = {}
    for system, python in itertools.product(systems, pythons):
        if system not in found:
            command = [python, "-c", program, SYSTEMS[system].package]
            outcome = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            if outcome.returncode == 0:
                found[system] = (python, outcome.stdout.strip())
    return found


def measure(
    system: str, task: Task, python: str, *, threads: int, limit: float, warm_up: int | None
) -> dict[str, Any]:
    """Run a task in a process of its own, and return the numbers of a `Run`.

    Args:
        limit: seconds after which the process is killed; its steps until then count.
        warm_up: steps that are not timed; None to time only the first step.

    Raises:
        RunFailed: if the process took too few steps.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "task.json").write_text(json.dumps(dataclasses.asdict(task)))
        with open(f"{folder}/log.txt", "w") as log:
            started = time.monotonic()
            process = subprocess.Popen(
                command_of(system, task, python, folder),
                stdout=log,
                stderr=log,
                env=environment_of(threads),
            )
            usage = wait(process, started + limit)
        seconds = time.monotonic() - started
        path = Path(folder) / "steps.jsonl"
        steps = (
            [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        )
        try:
            numbers = numbers_of(steps, started, warm_up)
        except RunFailed as error:
            last_lines = " | ".join(Path(log.name).read_text().splitlines()[-2:])
            raise RunFailed(
                f"{error}, {seconds:.0f} s, exit code {process.returncode}: {last_lines}"
            ) from None
    return numbers | {
        "memory_gib": usage.ru_maxrss / KIB_PER_GIB,
        "cores_used": (usage.ru_utime + usage.ru_stime) / seconds,
    }


def command_of(system: str, task: Task, python: str, folder: str) -> list[str]:
    """Return the command that runs the task in `folder` with a system."""
    if program := OF_KIND.get(task.kind):
        return [python, str(PROGRAMS / program), folder, system]
    if program := SYSTEMS[system].program:
        return [python, str(PROGRAMS / program), folder]
    options: dict[str, Any] = {}
    if task.model:
        (Path(folder) / "config.json").write_text(json.dumps(task.document))
        tokenizer = OWN_TOKENIZER if task.kind == "pretrain" else Path(task.tokenizer)
        shutil.copy(tokenizer / "tokenizer.json", folder)
        options["hf_assets_path"] = folder
    else:
        options |= {f"model.{name}": size for name, size in task.widths.items()}
        options["model.vocab_size"] = task.vocab_size
    options |= {
        "training.steps": task.steps,
        "training.seq_len": task.seq_len,
        # A window has room for two answers of the greatest length: two pairs of half of it, the
        # mean in job DPO.
        "training.local_batch_size": task.batch_size // 2
        if task.kind == "dpo"
        else task.batch_size,
        "training.mixed_precision_param": task.precision,
        "dataloader.cache_dir": f"{folder}/cache",
        "dump_folder": f"{folder}/out",
        "callbacks.steps.folder": folder,
    }
    if task.kind != "pretrain":
        options |= {
            "hf_assets_path": folder if task.model else task.tokenizer,
            "dataloader.dataset": task.data,
            "dataloader.chat_template": PROGRAMS / "question_answer.jinja",
        }
    if task.kind == "grpo":
        options |= {"rollout.group_size": GROUP_SIZE, "rollout.max_new_tokens": NEW_TOKENS}
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    config = f"class_{task.kind}" if task.model else task.kind
    return [
        python,
        "-m",
        "torchtitan",
        "train",
        "--module",
        str(PROGRAMS),
        "--config",
        config,
        *arguments,
    ]


def environment_of(threads: int) -> dict[str, str]:
    """Return the environment variables of all runs: only the processor, and no network."""
    own = {"OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **own}


def wait(process: subprocess.Popen[bytes], deadline: float) -> Any:
    """Wait for a process, kill it at the deadline (`time.monotonic()`), and return its `os.wait4`
    resource usage."""
    try:
        while not (ended := os.wait4(process.pid, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                process.kill()
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        process.kill()
        raise
    _, status, usage = ended
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage


def numbers_of(
    steps: Sequence[Mapping[str, float]], started: float, warm_up: int | None
) -> dict[str, Any]:
    """Return the numbers of a `Run` that follow from the log of its steps; for the arguments, see
    `measure`.

    Raises:
        RunFailed: if there are too few steps.
    """
    if len(steps) < (1 if warm_up is None else warm_up + 1):
        raise RunFailed(f"{len(steps)} steps")
    numbers: dict[str, Any] = {"first_step_seconds": steps[0]["time"] - started}
    if warm_up is None:
        return numbers | dict.fromkeys(("step_seconds", "tokens_per_second", "labels_per_second"))
    timed = [
        (later["time"] - earlier["time"], later)
        for earlier, later in itertools.pairwise(steps[warm_up - 1 :])
    ]
    numbers["step_seconds"] = statistics.median(seconds for seconds, _ in timed)
    for name in ("tokens", "labels"):
        numbers[f"{name}_per_second"] = statistics.median(
            step[name] / seconds for seconds, step in timed
        )
    return numbers


def measure_machine(task: Task, threads: int) -> dict[str, Any]:
    """Return the peak of matrix products in the task's precision, and its operations per token."""
    command = [
        sys.executable,
        str(PROGRAMS / "measure_machine.py"),
        json.dumps(dataclasses.asdict(task)),
    ]
    output = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env=environment_of(threads)
    ).stdout
    facts: dict[str, Any] = json.loads(output.splitlines()[-1])
    return facts
