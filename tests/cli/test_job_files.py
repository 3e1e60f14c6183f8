"""The files for Slurm, Kubernetes and SkyPilot: published schemas, and the commands that their
shells run."""

import getpass
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.test_launch import free_port
from tests.conftest import PROJECT
from tests.training import TINY, flags
from torchtitan.distributed.health import CHECKS, GPU_ERRORS, NETWORK, SLOWDOWN

SLURM = PROJECT / "multinode.slurm"
TRAIN_JOB: dict[str, Any] = yaml.safe_load((PROJECT / "recipes/train_kubeflow.yaml").read_text())
TASK: dict[str, Any] = yaml.safe_load((PROJECT / "recipes/train_skypilot.yaml").read_text())

SLURM_VARIABLES = {
    "SLURM_JOB_NODELIST": "node-[7,9]",
    "SLURM_NNODES": "2",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_JOB_ID": "42",
    "SLURM_CPUS_PER_TASK": "96",
    "CONFIG": "llama3_8b",
    "DUMP_FOLDER": "/shared/outputs",
}
KUBEFLOW_VARIABLES = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "8", "PET_MASTER_ADDR": "node-7"}
SKYPILOT_VARIABLES = {
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_NODE_IPS": "node-7\nnode-9",
}


def command_of(scheduler: str) -> tuple[list[Any], dict[str, str]]:
    """Return what a scheduler runs on a host, and the environment that it sets."""
    if scheduler == "kubeflow":
        trainer = TRAIN_JOB["spec"]["trainer"]
        variables = {variable["name"]: variable["value"] for variable in trainer["env"]}
        return [*trainer["command"], *trainer["args"]], KUBEFLOW_VARIABLES | variables
    if scheduler == "skypilot":
        return ["bash", "-c", TASK["run"]], SKYPILOT_VARIABLES | TASK["envs"]
    return ["bash", SLURM, "--checkpoint.enable"], SLURM_VARIABLES


def calls(scheduler: str, folder: Path, doctor: int = 0, **changes: str) -> list[list[str]]:
    """Run the shell of a file with a fake Python, whose doctor exits with a code; return its
    calls."""
    programs = {
        "scontrol": 'printf "node-7\\nnode-9\\n"',
        "srun": 'while [ "$1" != python3 ]; do shift; done; exec "$@"',
        "python": 'printf "%s " "$@" >> calls; echo >> calls; case "$*" in *doctor*) exit '
        f"{doctor};; esac",
    }
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    shutil.copy(folder / "python", folder / "python3")
    words, variables = command_of(scheduler)
    environment = {"PATH": f"{folder}:/usr/bin:/bin", **variables, **changes}
    code = subprocess.run(words, env=environment, cwd=folder).returncode
    lines = (folder / "calls").read_text().splitlines()
    assert (code == 0) == (lines[-1].count("doctor") == 0)
    return [line.split() for line in lines]


@pytest.mark.parametrize("scheduler", ["slurm", "kubeflow", "skypilot"])
def test_hosts_are_checked_before_they_train(scheduler: str, tmp_path: Path) -> None:
    """torchrun accepts its arguments, which are the same under all schedulers, and the commands
    theirs."""
    from torch.distributed.run import parse_args

    from torchtitan.config.manager import ConfigManager

    doctor, train = (parse_args(words[2:]) for words in calls(scheduler, tmp_path))
    for agent in (doctor, train):
        assert (agent.nnodes, agent.nproc_per_node, agent.module) == ("2", "8", True)
        assert (agent.rdzv_backend, agent.rdzv_endpoint) == ("c10d", "node-7:29500")
        assert (agent.monitor_interval, agent.shutdown_timeout) == (0.1, 270)
    assert (doctor.max_restarts, train.max_restarts) == (0, 3)
    assert doctor.rdzv_id != train.rdzv_id
    assert (doctor.training_script, train.training_script) == ("torchtitan", "torchtitan.train")
    assert doctor.training_script_args == ["doctor", "--dump_folder", "/shared/outputs"]
    config = ConfigManager().parse_args(train.training_script_args).config
    assert config.checkpoint.enable and config.dump_folder == "/shared/outputs"
    assert train.training_script_args[:4] == ["--module", "llama3", "--config", "llama3_8b"]


@pytest.mark.parametrize("scheduler", ["slurm", "kubeflow", "skypilot"])
def test_a_problem_ends_the_job_unless_it_is_accepted(scheduler: str, tmp_path: Path) -> None:
    assert len(calls(scheduler, tmp_path, doctor=1)) == 1
    (tmp_path / "calls").unlink()
    assert len(calls(scheduler, tmp_path, doctor=1, DOCTOR="no")) == 2


def test_train_job_matches_the_models_of_kubeflow() -> None:
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed"
    )
    # The models drop names that they do not know.
    assert models.TrainerV1alpha1TrainJob.from_dict(TRAIN_JOB).to_dict() == TRAIN_JOB


def test_task_matches_the_schema_of_skypilot() -> None:
    schemas = pytest.importorskip("sky.utils.schemas", reason="skypilot is not installed")
    import jsonschema

    jsonschema.validate(TASK, schemas.get_task_schema())
    jsonschema.validate(TASK["resources"], schemas.get_resources_schema())


SLURM_CONFIGURATION = """
ClusterName=one
SlurmctldHost={host}
SlurmctldPort={port}
SlurmdPort={other_port}
SlurmUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
ReturnToService=2
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
NodeName={host} CPUs=2 RealMemory=1000
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a Slurm of this machine."""
    missing = [
        name for name in ("munged", "slurmctld", "slurmd", "sbatch") if not shutil.which(name)
    ]
    if missing or os.getuid() != 0:
        pytest.skip(f"a Slurm needs root and {', '.join(missing) or 'nothing else'}")
    values = {
        "host": socket.gethostname().split(".")[0],
        "user": getpass.getuser(),
        "folder": tmp_path,
    }
    text = SLURM_CONFIGURATION.format(**values, port=free_port(), other_port=free_port())
    (tmp_path / "slurm.conf").write_text(text)
    for name in ("state", "spool"):
        (tmp_path / name).mkdir()
    (tmp_path / "munge.key").write_bytes(os.urandom(1024))
    (tmp_path / "munge.key").chmod(0o600)
    files = {
        "key-file": "munge.key",
        "socket": "munge.socket",
        "pid-file": "munge.pid",
        "log-file": "munge.log",
    }
    files["seed-file"] = "munge.seed"
    munge = [
        "munged",
        "--foreground",
        "--force",
        *(f"--{name}={tmp_path / file}" for name, file in files.items()),
    ]
    environment = {**os.environ, "SLURM_CONF": str(tmp_path / "slurm.conf")}
    daemons = [subprocess.Popen(munge, start_new_session=True)]
    try:
        deadline = time.monotonic() + 30
        while not (tmp_path / "munge.socket").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        for name in ("slurmctld", "slurmd"):
            daemons.append(subprocess.Popen([name, "-D"], env=environment, start_new_session=True))
        while (
            subprocess.run(["scontrol", "ping"], env=environment).returncode
            and time.monotonic() < deadline
        ):
            time.sleep(0.1)
        yield environment
    finally:
        for daemon in reversed(daemons):
            os.killpg(daemon.pid, signal.SIGTERM)
            daemon.wait(30)


@pytest.mark.long
def test_batch_script_in_a_slurm(slurm: dict[str, str], tmp_path: Path) -> None:
    """sbatch runs doctor, then a training of two processes."""
    (tmp_path / "corpus.txt").write_text(
        "".join(f"This is sentence {number}. " for number in range(400))
    )
    (tmp_path / ".venv").symlink_to(sys.prefix)
    words = flags({**TINY, "dataloader.dataset": "corpus.txt", "checkpoint.enable": True})
    one_node = ["--wait", "--nodes=1", "--gpus-per-node=0", "--cpus-per-task=2", "--output=job.log"]
    environment = {
        **slurm,
        "NGPU": "2",
        "DOCTOR": "no",
        "PYTHONPATH": str(PROJECT),
        "OMP_NUM_THREADS": "1",
    }
    command = ["timeout", "240", "sbatch", *one_node, SLURM, *words]
    code = subprocess.run(command, cwd=tmp_path, env=environment).returncode
    printed = (tmp_path / "job.log").read_text() if (tmp_path / "job.log").exists() else ""
    assert code == 0, printed
    host = socket.gethostname()
    measured = re.findall(
        r"^│ (.+?) +│ +[\d.,e+-]+ │ +[\d.,e+-]+ │ +[\d.,e+-]+ │$", printed, re.MULTILINE
    )
    assert measured == [name for name in CHECKS if name not in (NETWORK, GPU_ERRORS, SLOWDOWN)], (
        printed
    )
    problems = re.findall(r"^PROBLEM (\S+): (.+), rank (?:0|1|0 and 1): \S+", printed, re.MULTILINE)
    assert all(place == host and name in CHECKS for place, name in problems), printed
    assert ("1 host(s), 2 rank(s): no problem found" in printed) == (not problems), printed
    assert "on 2 process(es)" in printed and "training completed: 4 steps" in printed


@pytest.mark.long
def test_preparation_in_a_slurm(slurm: dict[str, str], tmp_path: Path) -> None:
    """The tasks of an array write shares, the last job merges them, and the result equals one
    command's."""
    lines = [json.dumps({"text": f"Sentence {number % 90} of a corpus."}) for number in range(120)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    (tmp_path / "recipes").symlink_to(PROJECT / "recipes")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/torchtitan").write_text(
        f'#!/bin/sh\nexec {sys.executable} -m torchtitan "$@"\n'
    )
    (tmp_path / "bin/torchtitan").chmod(0o755)
    options = ["--part_size", "0.001", "--held_out", "0.1"]
    environment = {
        **slurm,
        "PYTHONPATH": str(PROJECT),
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
    }
    environment |= {"SOURCES": "corpus.jsonl", "OUT": "out", "OPTIONS": " ".join(options)}
    command = [
        "timeout",
        "240",
        "sbatch",
        "--wait",
        "--array=1-2",
        "--cpus-per-task=1",
        "--output=job.log",
        "--open-mode=append",
    ]
    code = subprocess.run(
        [*command, "recipes/prepare_slurm.sbatch"], cwd=tmp_path, env=environment
    ).returncode
    deadline = time.monotonic() + 120
    while (
        code == 0 and not (tmp_path / "out/manifest.json").exists() and time.monotonic() < deadline
    ):
        time.sleep(0.5)
    logs = "".join(
        path.read_text()
        for path in (tmp_path / "job.log", *tmp_path.glob("slurm-*.out"))
        if path.exists()
    )
    assert (tmp_path / "out/manifest.json").exists(), logs
    words = [
        "data",
        "prepare",
        "corpus.jsonl",
        "--out",
        "alone",
        "--module",
        "llama3",
        "--config",
        "debugmodel",
    ]
    subprocess.run(
        [sys.executable, "-m", "torchtitan", *words, *options],
        cwd=tmp_path,
        env=environment,
        check=True,
    )
    assert (tmp_path / "out/manifest.json").read_bytes() == (
        tmp_path / "alone/manifest.json"
    ).read_bytes()
