"""Health of the hosts of a run: the facts of each rank, measured in seconds, and those that are out of line."""

import os
import platform
import resource
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import torchtitan
from torchtitan.distributed.process_group import gather_objects
from torchtitan.tools.device import peak_flops, synchronize
from torchtitan.tools.errors import UserError

GIB = 2**30

PRODUCTS, LINKS, NETWORK = "matrix products", "links within the host", "links to other hosts"
DISK, ALL_REDUCE = "writing to the dump folder", "the all-reduce"
"""Names of the speeds: FLOP/s of a rank, bytes/s of a rank in one direction, and bytes/s of a host."""

LEAST_OF_MEDIAN = {PRODUCTS: 0.8, LINKS: 0.5, NETWORK: 0.5, DISK: 0.25}
"""Least part of the median of all ranks, pairs of ranks or hosts. Clocks of sound GPUs differ by a few percent; hosts
may share a disk."""

LEAST_OF_EXPECTED = 0.25
"""Least part of the speed that a GPU's data sheet promises. Messages are too small to fill a fast link, and a GPU may
have less power than its data sheet assumes."""

LEAST_FREE_GIB = 10.0
LEAST_SHARED_GIB = 1.0
"""Workers of a data loader pass batches through /dev/shm, of which containers often have only 64 MiB."""

LEAST_OPEN_FILES = 4096
MOST_SKEW_SECONDS = 1.0
"""Largest difference of a host's clock from the median. Files of one run then have inconsistent times."""

_MESSAGE_BYTES = 2**25
_DISK_BYTES = 2**26
_ALL_PAIRS = 16
"""Most ranks of which all pairs are measured; of more, those whose numbers differ in one binary digit."""


@dataclass(frozen=True, kw_only=True)
class RankHealth:
    """Facts of one rank and its host. Bandwidths are bytes/s."""

    rank: int
    host: str
    software: dict[str, str]
    """Name → version."""
    product_flops: float
    """FLOP/s of the fastest square matrix product in bfloat16 on a GPU, in float32 on a CPU."""
    disk_bandwidth: float
    """By the first rank of a host; 0 on other ranks."""
    free_bytes: int
    """In the dump folder's file system."""
    shared_memory_bytes: int
    """Free in /dev/shm."""
    open_files: int
    """Limit of this process."""
    seconds: float
    """Time of the host's clock when all ranks had received the same message."""
    memory_errors: int
    """Uncorrected errors since the start of the GPU's driver; with the host's on its first rank."""
    is_throttled: bool
    """True if the hardware of a GPU has lowered its clocks (heat or power)."""
    bandwidths: dict[int, float] = field(default_factory=dict)
    """Other rank → bandwidth of messages in both directions at once, while other pairs communicate too."""
    all_reduce_bandwidth: float = 0.0
    """Of one all-reduce over all ranks: bytes that each rank sends, per second; 0 for a single rank."""


class Finding(NamedTuple):
    """Something wrong with a host."""

    host: str
    message: str


def measure(folder: Path, device: torch.device) -> list[RankHealth]:
    """Measure this rank, together with all others, and return the facts of all ranks.

    Raises:
        UserError: on all ranks, if one cannot write to the folder.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    host = socket.gethostname()
    is_first = gather_objects(host).index(host) == rank
    existing = next(one for one in (folder, *folder.absolute().parents) if one.exists())  # the run creates the rest
    disk, problem = 0.0, ""
    try:
        disk = _disk_bandwidth(existing) if is_first else 0.0
    except OSError as error:
        problem = f"{host}: --dump_folder '{folder}' cannot be written: {error.strerror}"
    problems = gather_objects(problem)
    seconds = time.time()
    if found := next(filter(None, problems), ""):
        raise UserError(found)
    is_gpu = device.type == "cuda"
    products = peak_flops(device, torch.bfloat16 if is_gpu else torch.float32, published=False).value
    bandwidths, all_reduce_bandwidth = _bandwidths(rank, size, device)
    smi_fields = "ecc.errors.uncorrected.volatile.total", "clocks_event_reasons.hw_slowdown"
    errors, slowdown = _smi(*smi_fields) if is_gpu and torch.version.cuda else ("", "")
    counts = [errors] if errors.isdecimal() else []
    if is_first:  # Linux counts the host's errors (EDAC)
        counts += [path.read_text() for path in Path("/sys/devices/system/edac/mc").glob("mc*/ue_count")]
    own = RankHealth(
        rank=rank,
        host=host,
        seconds=seconds,
        software=_software(),
        product_flops=products,
        disk_bandwidth=disk,
        free_bytes=shutil.disk_usage(existing).free,
        shared_memory_bytes=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        memory_errors=sum(map(int, counts)),
        is_throttled=slowdown == "Active",
        bandwidths=bandwidths,
        all_reduce_bandwidth=all_reduce_bandwidth,
    )
    return gather_objects(own)


def findings(ranks: Sequence[RankHealth], expected: Mapping[str, float]) -> list[Finding]:
    """Return everything that is out of line with the other ranks, or with the speeds expected, by name, of the GPU:
    hosts whose median is low, even if all hosts are equally slow."""
    host_of = {one.rank: one.host for one in ranks}
    hosts, speeds = dict.fromkeys(host_of.values()), _speeds(ranks, host_of)
    found = [*_different_software(ranks), *_beyond_limits(ranks)]
    for name, least in LEAST_OF_MEDIAN.items():
        median = statistics.median(speeds[name].values() or [0.0])
        slow = {measured: speed / median for measured, speed in speeds[name].items() if speed < least * median}
        # A pair is assigned to the host that is in most slow pairs.
        counts = Counter(host for measured in slow for host in {host_of[rank] for rank in measured})
        for measured, part in slow.items():
            host = max((host_of[rank] for rank in measured), key=counts.__getitem__)
            between = " and ".join(map(str, measured))
            found.append(Finding(host, f"{name}, rank {between}: {part:.0%} of the median"))
    expected = dict(expected)
    if expected and not found:  # an all-reduce waits for the slowest rank
        expected[ALL_REDUCE] = expected[LINKS if len(hosts) == 1 else NETWORK]
    for name, most in expected.items():
        for host in hosts:
            own = [speed for measured, speed in speeds[name].items() if host in {host_of[rank] for rank in measured}]
            if own and (part := statistics.median(own) / most) < LEAST_OF_EXPECTED:
                found.append(Finding(host, f"{name}: {part:.0%} of the speed expected of the GPU"))
    return found


def _speeds(ranks: Sequence[RankHealth], host_of: Mapping[int, str]) -> dict[str, dict[tuple[int, ...], float]]:
    """Return the speeds by name, and by the rank or the two ranks that were measured."""
    pairs = {(one.rank, other): speed for one in ranks for other, speed in one.bandwidths.items() if one.rank < other}
    return {
        PRODUCTS: {(one.rank,): one.product_flops for one in ranks},
        DISK: {(one.rank,): one.disk_bandwidth for one in ranks if one.disk_bandwidth},
        LINKS: {(a, b): speed for (a, b), speed in pairs.items() if host_of[a] == host_of[b]},
        NETWORK: {(a, b): speed for (a, b), speed in pairs.items() if host_of[a] != host_of[b]},
        ALL_REDUCE: {(one.rank,): one.all_reduce_bandwidth for one in ranks if one.all_reduce_bandwidth},
    }


def _beyond_limits(ranks: Sequence[RankHealth]) -> Iterator[Finding]:
    hosts = [one for one in ranks if one.disk_bandwidth]
    median_seconds = statistics.median(one.seconds for one in hosts)
    for one in ranks:
        checks = [
            (one.is_throttled, f"the GPU of rank {one.rank} has lowered its clocks (heat or power)"),
            (one.memory_errors > 0, f"uncorrected memory errors on rank {one.rank}: {one.memory_errors}"),
        ]
        if one in hosts:
            free, shared, skew = one.free_bytes / GIB, one.shared_memory_bytes / GIB, one.seconds - median_seconds
            checks += [
                (free < LEAST_FREE_GIB, f"{free:.2f} GiB free in the dump folder, less than {LEAST_FREE_GIB:g}"),
                (shared < LEAST_SHARED_GIB, f"{shared:.2f} GiB free in /dev/shm, less than {LEAST_SHARED_GIB:g}"),
                (one.open_files < LEAST_OPEN_FILES, f"may open only {one.open_files} files (ulimit -n)"),
                (abs(skew) > MOST_SKEW_SECONDS, f"its clock is {abs(skew):.1f} s {'ahead' if skew > 0 else 'behind'}"),
            ]
        yield from (Finding(one.host, message) for is_wrong, message in checks if is_wrong)


def _different_software(ranks: Sequence[RankHealth]) -> Iterator[Finding]:
    for name in ranks[0].software:
        ((usual, _),) = Counter(one.software[name] for one in ranks).most_common(1)
        for host, version in dict.fromkeys((one.host, one.software[name]) for one in ranks):
            if version != usual:
                yield Finding(host, f"{name} is {version}, but {usual} on most ranks")


def _software() -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": torch.__version__, "torchtitan": torchtitan.__version__}
    if torch.version.cuda and torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        versions |= {"CUDA": torch.version.cuda, "NCCL": nccl, "driver": _smi("driver_version")[0]}
    return versions


def _smi(*fields: str) -> list[str]:
    """Return fields of this rank's NVIDIA GPU, as its driver's tool prints them; "unknown" if it cannot."""
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    words = ["nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip().split(", ")
    except (OSError, subprocess.CalledProcessError):  # no such tool, or an older one without these fields
        return ["unknown"] * len(fields)


def _disk_bandwidth(folder: Path) -> float:
    data = os.urandom(_DISK_BYTES)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        start = time.perf_counter()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        return _DISK_BYTES / (time.perf_counter() - start)


def _bandwidths(rank: int, size: int, device: torch.device) -> tuple[dict[int, float], float]:
    """Return the bandwidth with each partner, see `rounds`, and of an all-reduce."""
    if size == 1:
        return {}, 0.0
    sent, received = torch.zeros(2, _MESSAGE_BYTES // 4, device=device)

    def exchange(other: int | None) -> None:
        if other is not None:
            pair = [dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, received, other)]
            for request in dist.batch_isend_irecv(pair):
                request.wait()

    seconds = [(other, _seconds(partial(exchange, other), device)) for other in rounds(rank, size)]
    pairs = {other: _MESSAGE_BYTES / duration for other, duration in seconds if other is not None}
    return pairs, 2 * (size - 1) / size * _MESSAGE_BYTES / _seconds(partial(dist.all_reduce, sent), device)


def rounds(rank: int, size: int) -> list[int | None]:
    """Return the partner of a rank in each round, None if it has none; in a round, partners have each other."""
    powers = [1 << power for power in range((size - 1).bit_length())]
    distances = range(1, sum(powers) + 1) if size <= _ALL_PAIRS else powers
    return [rank ^ distance if rank ^ distance < size else None for distance in distances]


def _seconds(communicate: Callable[[], object], device: torch.device) -> float:
    """Return the time of a communication that all ranks start together, after one that connects them."""
    communicate()
    synchronize(device)
    dist.barrier()
    start = time.perf_counter()
    communicate()
    synchronize(device)
    seconds = time.perf_counter() - start
    dist.barrier()
    return seconds
