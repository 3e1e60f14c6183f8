"""Health of hosts: pairs of ranks, findings, and a real check."""

import os
import pickle
import re
import resource
import socket
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest
import torch

from tests.cli.test_launch import free_port
from tests.commands import RunningCommand
from tests.conftest import PROJECT
from tests.processes import run_processes
from torchtitan.cli import doctor
from torchtitan.cli.main import main
from torchtitan.distributed import health
from torchtitan.distributed.health import (
    ALL_REDUCE,
    CHECKS,
    CLOCK,
    DISK,
    ERRORS,
    FREE,
    GPU_ERRORS,
    LINKS,
    NETWORK,
    OPEN_FILES,
    PRODUCTS,
    SHARED,
    SLOWDOWN,
    Check,
    Health,
    findings,
    measure,
    rounds,
)

OF_RANK = {PRODUCTS: 1.0, GPU_ERRORS: 0, SLOWDOWN: False}
OF_HOST = {DISK: 1.0, FREE: 100, SHARED: 8, OPEN_FILES: 65536, CLOCK: -0.5, ERRORS: 0}


def four_hosts(changed=4, software="2.13.0", all_reduce=0.1, **changes):
    """Four hosts of two ranks; software and changes to facts apply to one rank, by default the
    first of host c."""
    facts = {name: {(rank,): value for rank in range(8)} for name, value in OF_RANK.items()}
    facts |= {name: {(rank,): value for rank in range(0, 8, 2)} for name, value in OF_HOST.items()}
    facts |= {ALL_REDUCE: {(rank,): all_reduce for rank in range(8)}, LINKS: {}, NETWORK: {}}
    for pair in combinations(range(8), 2):
        within = pair[0] // 2 == pair[1] // 2
        facts[LINKS if within else NETWORK][pair] = 1.0 if within else 0.1
    for name, value in changes.items():
        facts[name][changed,] = value
    versions = [{"torch": software if rank == changed else "2.13.0"} for rank in range(8)]
    return Health(list("aabbccdd"), versions, {name: facts[name] for name in CHECKS})


def test_sound_hosts_have_no_findings():
    assert findings(four_hosts(), {}) == []
    alone = dict.fromkeys(CHECKS, {}) | {
        name: {(0,): value} for name, value in (OF_RANK | OF_HOST).items()
    }
    assert findings(Health(["a"], [{"torch": "2.13.0"}], alone), {}) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({PRODUCTS: 0.7}, "matrix products (TFLOP/s), rank 4: 70% of the median"),
        (
            {SLOWDOWN: True},
            "clocks of the GPU lowered (heat or power), rank 4: 1, but must be at most 0",
        ),
        ({DISK: 0.1}, "writing to the dump folder (GB/s), rank 4: 10% of the median"),
        ({FREE: 5}, "GiB free in the dump folder, rank 4: 5, but must be at least 10"),
        ({SHARED: 1 / 16}, "GiB free in /dev/shm, rank 4: 0.0625, but must be at least 1"),
        (
            {OPEN_FILES: 1024},
            "open files allowed (ulimit -n), rank 4: 1024, but must be at least 4096",
        ),
        ({CLOCK: 3.0}, "seconds that the clock is ahead, rank 4: 3, but must be at most 1"),
        ({CLOCK: -5.0}, "seconds that the clock is ahead, rank 4: -5, but must be at least -1"),
        ({ERRORS: 2}, "uncorrected memory errors, rank 4: 2, but must be at most 0"),
    ],
)
def test_the_odd_host_is_named(changes, words):
    assert findings(four_hosts(**changes), {}) == [("c", words)]


def test_memory_errors_of_any_gpu_count():
    assert findings(four_hosts(5, **{GPU_ERRORS: 1}), {}) == [
        ("c", f"{GPU_ERRORS}, rank 5: 1, but must be at most 0")
    ]


def test_different_software_is_named():
    assert findings(four_hosts(software="2.12.0"), {}) == [
        ("c", "torch is 2.12.0, but 2.13.0 on most ranks")
    ]


def test_software_of_one_host_only():
    health = four_hosts()
    for rank in (4, 5):
        health.software[rank]["CUDA"] = "13.0"
    assert findings(health, {}) == [("c", "CUDA is 13.0, but missing on most ranks")]


def test_slow_links_name_the_host_that_they_share():
    slow = four_hosts()
    for pair in slow.facts[NETWORK]:
        if 4 in pair:
            slow.facts[NETWORK][pair] /= 5
    found = findings(slow, {})
    assert {host for host, _ in found} == {"c"} and len(found) == 6  # all pairs with other hosts
    assert found[0] == ("c", "links to other hosts (GB/s), rank 0 and 4: 20% of the median")


EXPECTED = {PRODUCTS: 1.0, LINKS: 1.0, NETWORK: 0.1}


def expecting(changes):
    return findings(four_hosts(), EXPECTED | changes)


def test_equally_slow_hosts_are_named():
    assert expecting({}) == []
    for name in (PRODUCTS, LINKS):
        found = expecting({name: 5 * EXPECTED[name]})
        assert [host for host, _ in found] == list("abcd")
        assert {message for _, message in found} == {
            f"{name}: 20% of the speed expected of the GPU"
        }
    found = expecting({NETWORK: 0.5})
    assert {message.partition(":")[0] for _, message in found} == {NETWORK, ALL_REDUCE}


def test_a_slow_all_reduce_of_sound_hosts_is_found():
    found = findings(four_hosts(all_reduce=0.01), EXPECTED)
    assert found == [
        (host, f"{ALL_REDUCE}: 10% of the speed expected of the GPU") for host in "abcd"
    ]
    ((host, message),) = findings(four_hosts(all_reduce=0.01, **{SLOWDOWN: True}), EXPECTED)
    assert host == "c" and SLOWDOWN in message


@pytest.mark.parametrize("size", range(1, 17))
def test_each_pair_of_few_ranks_meets_once(size):
    met = []
    for partners in zip(*(rounds(rank, size) for rank in range(size)), strict=True):
        pairs = {(rank, other) for rank, other in enumerate(partners) if other is not None}
        assert pairs == {(other, rank) for rank, other in pairs}  # both know
        met += [pair for pair in pairs if pair[0] < pair[1]]
    assert sorted(met) == list(combinations(range(size), 2))


@pytest.mark.parametrize("size", [17, 64, 100])
def test_many_ranks_meet_few_partners(size):
    partners = [rounds(rank, size) for rank in range(size)]
    assert len(partners[0]) <= 2 * size.bit_length()
    for number, row in enumerate(zip(*partners, strict=True)):
        assert all(other is None or row[other] == rank for rank, other in enumerate(row)), number
    assert all(any(other is not None for other in row) for row in partners)


def _measure_with_a_slow_rank(folder: str) -> None:
    torch.set_num_threads(1)
    rank = torch.distributed.get_rank()
    plain, health.software = (
        health.software,
        lambda: plain() | ({"torch": "old"} if rank == 1 else {}),
    )
    measured = measure(Path(folder) / "dump", torch.device("cpu"))
    health.software = plain
    (Path(folder) / f"{rank}.pickle").write_bytes(pickle.dumps(measured))


def test_the_expectation_is_the_table_of_devices():
    assert doctor._expected_speeds("NVIDIA H100 80GB HBM3")[LINKS] == 0.8 * 450
    assert doctor._expected_speeds("NVIDIA Unheard-of") == doctor._expected_speeds("") == {}


@pytest.mark.slow
def test_all_ranks_know_the_facts_of_all(tmp_path):
    run_processes(_measure_with_a_slow_rank, 3, str(tmp_path))
    measured = [pickle.loads((tmp_path / f"{rank}.pickle").read_bytes()) for rank in range(3)]
    assert measured[0] == measured[1] == measured[2]
    hosts, software, facts = measured[0]
    assert hosts == [socket.gethostname()] * 3
    assert [one["torch"] == "old" for one in software] == [False, True, False]
    ranks, pairs = {(0,), (1,), (2,)}, {(0, 1), (0, 2), (1, 2)}
    expected = {
        PRODUCTS: ranks,
        ALL_REDUCE: ranks,
        LINKS: pairs,
        NETWORK: set(),
        GPU_ERRORS: set(),
        SLOWDOWN: set(),
    }
    assert {name: set(values) for name, values in facts.items()} == dict.fromkeys(
        CHECKS, {(0,)}
    ) | expected
    for name in (PRODUCTS, ALL_REDUCE, LINKS, DISK):
        assert all(speed > 0 for speed in facts[name].values())
    assert facts[CLOCK][0,] == 0
    assert not (tmp_path / "dump").exists()


def test_the_command_reports_this_host(tmp_path, monkeypatch, capsys):
    for name in (FREE, SHARED, OPEN_FILES):  # of this machine
        monkeypatch.setitem(health.CHECKS, name, Check())
    assert main(["doctor", "--dump_folder", str(tmp_path / "new" / "dump")]) == 0
    assert not (tmp_path / "new").exists()
    assert "1 host(s), 1 rank(s): no problem found" in capsys.readouterr().out
    monkeypatch.setitem(health.CHECKS, OPEN_FILES, Check(least=2**62))
    assert main(["doctor", "--dump_folder", str(tmp_path)]) == 1
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert (
        f"PROBLEM {socket.gethostname()}: {OPEN_FILES}, rank 0: {limit:.6g}"
        in capsys.readouterr().out
    )


def test_a_folder_that_cannot_be_written_ends_at_once(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["doctor", "--dump_folder", os.fspath(tmp_path / "file" / "dump")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_number_of_processes_that_training_refuses_is_a_problem(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NGPU", "abc")
    assert main(["doctor", "--dump_folder", str(tmp_path)]) == 2
    assert "NGPU is 'abc', but must be a number" in capsys.readouterr().err


HOST = """
import resource, socket, sys
from torchtitan.cli.doctor import doctor
from torchtitan.distributed import health
health.CHECKS = dict.fromkeys(health.CHECKS, health.Check()) | {health.OPEN_FILES: health.Check(least=128)}
name, limit = sys.argv[1], int(sys.argv[2])
socket.gethostname = lambda: name
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
sys.exit(doctor(["--dump_folder", "dump"]))
"""


@pytest.mark.slow
def test_only_the_agent_of_the_odd_host_fails(tmp_path):
    """Two agents of torchrun. Host a, the odd one, keeps the store; otherwise, the other agent
    waits for five minutes until it exits with 0."""
    (tmp_path / "host.py").write_text(HOST)
    port = free_port()
    agents = {}
    for name in "ab":
        meeting = [
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            f"127.0.0.1:{port}",
            "--rdzv-id",
            "doctor",
        ]
        meeting += [
            "--rdzv-conf",
            f"is_host={str(name == 'a').lower()}",
            "--local-addr",
            "127.0.0.1",
        ]
        words = [
            "-m",
            "torch.distributed.run",
            "--nnodes",
            "2",
            "--nproc-per-node",
            "1",
            *meeting,
            "host.py",
            name,
        ]
        environment = {
            **os.environ,
            "PYTHONPATH": str(PROJECT),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        command = [sys.executable, *words, "127" if name == "a" else "128"]
        agents[name] = RunningCommand(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
        )
    try:
        printed = "".join(agent.communicate(timeout=120)[0] for agent in agents.values())
    finally:
        for agent in agents.values():
            agent.kill()
    assert {name: agent.returncode for name, agent in agents.items()} == {"a": 1, "b": 0}
    assert re.search(
        r"PROBLEM a: open files allowed \(ulimit -n\), rank [01]: 127, but must be at least 128\n",
        printed,
    )
