"""Measures every rank of a run within seconds, and reports hosts that are out of line."""

import math
import os
import platform
import resource
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import torchtitan
from torchtitan.distributed.process_group import gather_objects
from torchtitan.tools.device import peak_flops, synchronize
from torchtitan.tools.errors import UserError


class Check(NamedTuple):
    """Limits of a measurement. Hosts beyond them are out of line."""

    least: float = -math.inf
    most: float = math.inf
    of_median: float = 0.0
    """Smallest fraction of the median of all ranks, pairs of ranks, or hosts."""


PRODUCTS = "matrix products (TFLOP/s)"
LINKS = "links within the host (GB/s)"
NETWORK = "links to other hosts (GB/s)"
ALL_REDUCE = "all-reduce, sent by each rank (GB/s)"
DISK = "writing to the dump folder (GB/s)"
FREE = "GiB free in the dump folder"
SHARED = "GiB free in /dev/shm"
OPEN_FILES = "open files allowed (ulimit -n)"
CLOCK = "seconds that the clock is ahead"
ERRORS = "uncorrected memory errors"
GPU_ERRORS = "uncorrected memory errors of the GPU"
SLOWDOWN = "clocks of the GPU lowered (heat or power)"

CHECKS = {
    PRODUCTS: Check(of_median=0.8),  # clocks of sound GPUs differ by a few percent
    LINKS: Check(of_median=0.5),
    NETWORK: Check(of_median=0.5),
    ALL_REDUCE: Check(),
    DISK: Check(of_median=0.25),  # hosts may share a disk
    FREE: Check(least=10),
    SHARED: Check(least=1),  # loaders' workers need it; containers often have 64 MiB
    OPEN_FILES: Check(least=4096),
    CLOCK: Check(least=-1, most=1),  # for consistent times of files
    ERRORS: Check(most=0),
    GPU_ERRORS: Check(most=0),
    SLOWDOWN: Check(most=0),
}
"""Facts by name. Products are in bfloat16 on a GPU, in float32 on a CPU. Messages between two ranks
go in both directions at once, while other pairs communicate too."""

LEAST_OF_EXPECTED = 0.25
"""Least part of the speed that a GPU's data sheet promises. Messages are too small to fill a fast
link, and a GPU may have less power than its data sheet assumes."""

_MESSAGE_BYTES, _DISK_BYTES = 2**25, 2**26


class Health(NamedTuple):
    """Measurements of all ranks."""

    hosts: list[str]
    """Host of each rank."""
    software: list[dict[str, str]]
    """Name → version, of each rank."""
    facts: dict[str, dict[tuple[int, ...], float]]
    """Name in `CHECKS` → rank, or two ranks → value. A host's first rank also measures the host."""


def measure(folder: Path, device: torch.device) -> Health:
    """Measure all ranks together, and return their measurements.

    Raises:
        UserError: on all ranks, if one cannot write to the folder.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    hosts = gather_objects(socket.gethostname())
    is_first, is_gpu = hosts.index(hosts[rank]) == rank, device.type == "cuda"
    # the run creates the rest
    existing = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    own = dict[str, float]()
    pairs = dict[str, dict[tuple[int, ...], float]]()
    problem = ""
    try:
        if is_first:
            own[DISK] = _disk_bandwidth(existing)
    except OSError as error:
        problem = f"{hosts[rank]}: --dump_folder '{folder}' cannot be written: {error.strerror}"
    problem, seconds = max(gather_objects(problem)), time.time()
    if problem:
        raise UserError(problem)
    own[PRODUCTS] = (
        peak_flops(device, torch.bfloat16 if is_gpu else torch.float32, published=False).value
        / 1e12
    )
    if size > 1:
        speeds, own[ALL_REDUCE] = _bandwidths(rank, size, device)
        for other, speed in speeds.items():
            if rank < other:
                pairs.setdefault(LINKS if hosts[other] == hosts[rank] else NETWORK, {})[
                    rank, other
                ] = speed
    if is_first:
        shared, errors = Path("/dev/shm"), Path("/sys/devices/system/edac/mc").glob("mc*/ue_count")
        own |= {
            FREE: shutil.disk_usage(existing).free / 2**30,
            SHARED: shutil.disk_usage(shared).free / 2**30 if shared.is_dir() else 0,
            CLOCK: seconds,
            OPEN_FILES: resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            ERRORS: sum(int(path.read_text()) for path in errors),  # of Linux (EDAC)
        }
    if is_gpu and torch.version.cuda:
        gpu_errors, slowdown = _smi(
            "ecc.errors.uncorrected.volatile.total", "clocks_event_reasons.hw_slowdown"
        )
        own |= {
            GPU_ERRORS: int(gpu_errors) if gpu_errors.isdecimal() else 0,
            SLOWDOWN: slowdown == "Active",
        }
    of_this_rank: dict[str, dict[tuple[int, ...], float]] = {
        **{name: {(rank,): own[name]} for name in own},
        **pairs,
    }
    facts: dict[str, dict[tuple[int, ...], float]] = {name: {} for name in CHECKS}
    for of_rank in gather_objects(of_this_rank):
        for name, values in of_rank.items():
            facts[name] |= values
    now = statistics.median(facts[CLOCK].values())
    facts[CLOCK] = {ranks: value - now for ranks, value in facts[CLOCK].items()}
    return Health(hosts, gather_objects(software()), facts)


def findings(health: Health, expected: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return (host, message) for each measurement that is out of line with the other ranks, or with
    the GPU's `expected` speeds, by name: hosts whose median is low, even if all hosts are equally
    slow."""
    hosts, facts = health.hosts, health.facts
    found: list[tuple[str, str]] = []
    for name in dict.fromkeys(name for one in health.software for name in one):
        versions = [one.get(name, "missing") for one in health.software]
        usual = statistics.mode(versions)
        different = dict.fromkeys(
            each for each in zip(hosts, versions, strict=True) if each[1] != usual
        )
        found += [
            (host, f"{name} is {version}, but {usual} on most ranks") for host, version in different
        ]
    for name, check in CHECKS.items():
        median = statistics.median(facts[name].values() or [0.0])
        least = check.of_median * median if check.of_median else check.least
        wrong = {
            ranks: value for ranks, value in facts[name].items() if not least <= value <= check.most
        }
        # A pair is assigned to the host that is in most wrong pairs.
        counts = Counter(host for ranks in wrong for host in {hosts[rank] for rank in ranks})
        for ranks, value in wrong.items():
            host = max((hosts[rank] for rank in ranks), key=counts.__getitem__)
            limit = f"at least {check.least:g}" if value < least else f"at most {check.most:g}"
            what = (
                f"{value / median:.0%} of the median"
                if check.of_median
                else f"{value:.6g}, but must be {limit}"
            )
            found.append((host, f"{name}, rank {' and '.join(map(str, ranks))}: {what}"))
    expected = dict(expected)
    if expected and not found:  # an all-reduce waits for the slowest rank
        expected[ALL_REDUCE] = expected[LINKS if len({*hosts}) == 1 else NETWORK]
    for name, most in expected.items():
        of_hosts = defaultdict[str, list[float]](list)
        for ranks, speed in facts[name].items():
            for host in {hosts[rank] for rank in ranks}:
                of_hosts[host].append(speed)
        for host, speeds in sorted(of_hosts.items()):
            if (part := statistics.median(speeds) / most) < LEAST_OF_EXPECTED:
                found.append((host, f"{name}: {part:.0%} of the speed expected of the GPU"))
    return found


def software() -> dict[str, str]:
    """Return the versions that must be equal on all hosts."""
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchtitan": torchtitan.__version__,
    }
    if torch.version.cuda and torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        versions |= {"CUDA": torch.version.cuda, "NCCL": nccl, "driver": _smi("driver_version")[0]}
    return versions


def _smi(*fields: str) -> list[str]:
    """Return fields of this rank's NVIDIA GPU, as its driver's tool prints them; "unknown" if it
    cannot."""
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    words = [
        "nvidia-smi",
        f"--id=GPU-{uuid}",
        f"--query-gpu={','.join(fields)}",
        "--format=csv,noheader",
    ]
    try:
        return (
            subprocess.run(words, check=True, capture_output=True, text=True)
            .stdout.strip()
            .split(", ")
        )
    # no such tool, or an older one without these fields
    except (OSError, subprocess.CalledProcessError):
        return ["unknown"] * len(fields)


def _disk_bandwidth(folder: Path) -> float:
    data = os.urandom(_DISK_BYTES)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        start = time.perf_counter()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        return _DISK_BYTES / 1e9 / (time.perf_counter() - start)


def _bandwidths(rank: int, size: int, device: torch.device) -> tuple[dict[int, float], float]:
    """Return the bandwidths with each partner, see `rounds`, and of an all-reduce."""
    sent, received = torch.zeros(2, _MESSAGE_BYTES // 4, device=device)

    def exchange(other: int | None) -> None:
        if other is not None:
            pair = [dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, received, other)]
            for request in dist.batch_isend_irecv(pair):
                request.wait()

    seconds = [(other, _seconds(partial(exchange, other), device)) for other in rounds(rank, size)]
    pairs = {
        other: _MESSAGE_BYTES / 1e9 / duration for other, duration in seconds if other is not None
    }
    n_sent = 2 * (size - 1) / size * _MESSAGE_BYTES
    return pairs, n_sent / 1e9 / _seconds(partial(dist.all_reduce, sent), device)


def rounds(rank: int, size: int) -> list[int | None]:
    """Return a rank's partner in each round, None without one; partners are mutual. Among at most
    16 ranks, all pairs meet; among more, only pairs whose numbers differ in one binary digit."""
    powers = [1 << power for power in range((size - 1).bit_length())]
    distances = range(1, sum(powers) + 1) if size <= 16 else powers
    return [rank ^ distance if rank ^ distance < size else None for distance in distances]


def _seconds(communicate: Callable[[], object], device: torch.device) -> float:
    """Return the time of a communication that all ranks start together, after a first one that
    connects them."""
    for _ in range(2):
        dist.barrier()
        start = time.perf_counter()
        communicate()
        synchronize(device)
        seconds = time.perf_counter() - start
    return seconds
