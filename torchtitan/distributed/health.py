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
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import torchtitan
from torchtitan.distributed.process_group import gather_objects
from torchtitan.tools.device import peak_flops, synchronize
from torchtitan.tools.errors import UserError

GIB = 2**30

LEAST_PRODUCTS = 0.8
"""Least speed of matrix products, relative to the median of all ranks. Clocks of sound GPUs differ by a few percent."""

LEAST_BANDWIDTH = 0.5
"""Least bandwidth between two ranks, relative to the median of pairs of its kind (within a host, between hosts)."""

LEAST_DISK = 0.25
"""Least speed of writing, relative to the median of all hosts, which may share the disk."""

LEAST_OF_EXPECTED = 0.25
"""Least part of the speed that a GPU's data sheet promises. Messages are too small to fill a fast link, and a GPU may
have less power than its data sheet assumes."""

PRODUCTS, LINKS, NETWORK = "matrix products", "links within the host", "links to other hosts"
"""Names of the speeds that can be expected: FLOP/s, and bytes/s of a rank in one direction."""

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

_SMI_FIELDS = ("ecc.errors.uncorrected.volatile.total", "clocks_event_reasons.hw_slowdown")


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
    """Of writing to the dump folder, by the first rank of a host; 0 on other ranks."""
    free_bytes: int
    """In the dump folder's file system."""
    shared_memory_bytes: int
    """Free in /dev/shm."""
    open_files: int
    """Limit of this process."""
    seconds: float
    """Time of the host's clock when all ranks left a barrier."""
    memory_errors: int
    """Uncorrected errors since the host, or the driver of its GPU, started."""
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
    rank = dist.get_rank() if dist.is_initialized() else 0
    host = socket.gethostname()
    is_first = gather_objects(host).index(host) == rank
    existing = next(one for one in (folder, *folder.absolute().parents) if one.exists())  # the run creates the rest
    disk, problem = 0.0, ""
    try:
        disk = _disk_bandwidth(existing) if is_first else 0.0
    except OSError as error:
        problem = f"{host}: --dump_folder '{folder}' cannot be written: {error.strerror}"
    if found := next(filter(None, gather_objects(problem)), ""):
        raise UserError(found)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    errors, is_throttled = _gpu_state() if torch.version.cuda and device.type == "cuda" else (_memory_errors(), False)
    if dist.is_initialized():
        dist.barrier()
    own = RankHealth(
        rank=rank,
        host=host,
        seconds=time.time(),
        software=software(),
        product_flops=peak_flops(device, dtype, published=False).value,
        disk_bandwidth=disk,
        free_bytes=shutil.disk_usage(existing).free,
        shared_memory_bytes=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        memory_errors=errors,
        is_throttled=is_throttled,
        bandwidths=dict(_pair_bandwidths(rank, device)),
        all_reduce_bandwidth=_all_reduce_bandwidth(device),
    )
    return gather_objects(own)


def findings(ranks: Sequence[RankHealth], expected: Mapping[str, float]) -> list[Finding]:
    """Return everything that is out of line with the other ranks, or with the speeds expected, by name, of the GPU."""
    found = [*_different_software(ranks), *_slow_links(ranks)]
    hosts = [one for one in ranks if one.disk_bandwidth]
    median_products = statistics.median(one.product_flops for one in ranks)
    median_disk = statistics.median(one.disk_bandwidth for one in hosts)
    median_seconds = statistics.median(one.seconds for one in hosts)
    for one in ranks:
        products = one.product_flops / median_products
        checks = [
            (products < LEAST_PRODUCTS, f"rank {one.rank} multiplies at {products:.0%} of the median of all ranks"),
            (one.is_throttled, f"the GPU of rank {one.rank} has lowered its clocks (heat or power)"),
        ]
        if one in hosts:
            free, shared = one.free_bytes / GIB, one.shared_memory_bytes / GIB
            disk, skew = one.disk_bandwidth / median_disk, one.seconds - median_seconds
            checks += [
                (free < LEAST_FREE_GIB, f"{free:.2f} GiB free in the dump folder, less than {LEAST_FREE_GIB:g}"),
                (shared < LEAST_SHARED_GIB, f"{shared:.2f} GiB free in /dev/shm, less than {LEAST_SHARED_GIB:g}"),
                (disk < LEAST_DISK, f"writes at {disk:.0%} of the median of all hosts"),
                (one.open_files < LEAST_OPEN_FILES, f"may open only {one.open_files} files (ulimit -n)"),
                (abs(skew) > MOST_SKEW_SECONDS, f"its clock is {abs(skew):.1f} s {'ahead' if skew > 0 else 'behind'}"),
                (one.memory_errors > 0, f"{one.memory_errors} uncorrected memory errors"),
            ]
        found += [Finding(one.host, message) for is_wrong, message in checks if is_wrong]
    return found + list(_below_expectation(ranks, expected, is_sound=not found)) if expected else found


def _below_expectation(
    ranks: Sequence[RankHealth], expected: Mapping[str, float], *, is_sound: bool
) -> Iterator[Finding]:
    """Yield hosts whose median speeds are low, even if all hosts are equally slow. An all-reduce, which waits for the
    slowest rank, counts only if the hosts are sound otherwise."""
    host_of = {one.rank: one.host for one in ranks}
    hosts = dict.fromkeys(host_of.values())
    all_reduce = expected[LINKS if len(hosts) == 1 else NETWORK]
    for host in hosts:
        own = [one for one in ranks if one.host == host]
        links = [(host_of[other] == host, speed) for one in own for other, speed in one.bandwidths.items()]
        speeds = [
            (PRODUCTS, [one.product_flops for one in own], expected[PRODUCTS]),
            (LINKS, [speed for inside, speed in links if inside], expected[LINKS]),
            (NETWORK, [speed for inside, speed in links if not inside], expected[NETWORK]),
            ("the all-reduce", [one.all_reduce_bandwidth for one in own if is_sound and len(ranks) > 1], all_reduce),
        ]
        for name, measured, most in speeds:
            if measured and (part := statistics.median(measured) / most) < LEAST_OF_EXPECTED:
                yield Finding(host, f"{name}: {part:.0%} of the speed expected of the GPU")


def _different_software(ranks: Sequence[RankHealth]) -> Iterator[Finding]:
    for name in ranks[0].software:
        ((usual, _),) = Counter(one.software[name] for one in ranks).most_common(1)
        for host, version in dict.fromkeys((one.host, one.software[name]) for one in ranks):
            if version != usual:
                yield Finding(host, f"{name} is {version}, but {usual} on most ranks")


def _slow_links(ranks: Sequence[RankHealth]) -> Iterator[Finding]:
    """Yield slow pairs, assigned to the host that is in most of them."""
    host_of = {one.rank: one.host for one in ranks}
    pairs = [(one.rank, other, speed) for one in ranks for other, speed in one.bandwidths.items() if one.rank < other]
    for within, place in ((True, "within the host"), (False, "between hosts")):
        kind = [pair for pair in pairs if (host_of[pair[0]] == host_of[pair[1]]) == within]
        if not kind:
            continue
        median = statistics.median(speed for _, _, speed in kind)
        slow = [pair for pair in kind if pair[2] < LEAST_BANDWIDTH * median]
        counts = Counter(host_of[rank] for first, second, _ in slow for rank in {first, second})
        for first, second, speed in slow:
            host = max(host_of[first], host_of[second], key=lambda name: counts[name])
            yield Finding(host, f"ranks {first} and {second} exchange {speed / median:.0%} of the median {place}")


def software() -> dict[str, str]:
    """Return the versions that must be equal on all hosts."""
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


def _gpu_state() -> tuple[int, bool]:
    errors, slowdown = _smi(*_SMI_FIELDS)
    return int(errors) if errors.isdecimal() else 0, slowdown == "Active"


def _memory_errors() -> int:
    """Return the errors that Linux counts (EDAC); 0 if it does not."""
    return sum(int(path.read_text()) for path in Path("/sys/devices/system/edac/mc").glob("mc*/ue_count"))


def _disk_bandwidth(folder: Path) -> float:
    data = os.urandom(_DISK_BYTES)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        start = time.perf_counter()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        return _DISK_BYTES / (time.perf_counter() - start)


def _pair_bandwidths(rank: int, device: torch.device) -> Iterator[tuple[int, float]]:
    size = dist.get_world_size() if dist.is_initialized() else 1
    sent, received = (torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    for other in rounds(rank, size):
        if other is None:
            dist.barrier()  # the warm-up and the measurement of the others
            dist.barrier()
            continue

        def exchange(other: int = other) -> None:
            pair = [dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, received, other)]
            for request in dist.batch_isend_irecv(pair):
                request.wait()

        yield other, _MESSAGE_BYTES / _seconds(exchange, device)


def rounds(rank: int, size: int) -> list[int | None]:
    """Return the partner of a rank in each round, None if it has none; in a round, partners have each other."""
    powers = [1 << power for power in range((size - 1).bit_length())]
    distances = range(1, sum(powers) + 1) if size <= _ALL_PAIRS else powers
    return [rank ^ distance if rank ^ distance < size else None for distance in distances]


def _all_reduce_bandwidth(device: torch.device) -> float:
    if not dist.is_initialized():
        return 0.0
    size = dist.get_world_size()
    message: Tensor = torch.zeros(_MESSAGE_BYTES // 4, device=device)
    return 2 * (size - 1) / size * _MESSAGE_BYTES / _seconds(lambda: dist.all_reduce(message), device)


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
