"""Speed of this machine's CPU, measured in ten seconds by the number of processes that train, and kept in a file."""

import functools
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from torchtitan.tools import durable
from torchtitan.tools.cpu_products import onednn_products
from torchtitan.tools.errors import UserError, os_errors_as
from torchtitan.tools.process import keep_freed_memory

_SECONDS = 0.4
"""Duration of each measurement."""
_TOKENS, _WIDTHS = 1024, (256, 768)
"""Linear layer whose products are timed, forward and backward: feed-forward network of the debug model."""
_ELEMENTS = 2**20
"""Elements of the tensors that pass through memory: activations of small models."""
_LARGE, _SMALL = 2**22, 16
"""Elements of the messages that give bandwidth and latency."""
_VERSION = 4
"""Of the measurement, part of the file's name."""


def speed_of_this_machine(processes: int) -> dict[str, Any]:
    """Return the fields of `Device` for each of `processes`, at most one per core, that compute at the same time on
    this machine, measured on first use; the file is in $TORCHTITAN_CACHE or ~/.cache/torchtitan."""
    processes = min(processes, os.cpu_count() or 1)
    threads = os.environ.get("OMP_NUM_THREADS", "")
    key = [_VERSION, platform.processor(), platform.node(), os.cpu_count(), processes, threads, torch.__version__]
    cache = Path(os.environ.get("TORCHTITAN_CACHE") or Path.home() / ".cache" / "torchtitan")
    path = cache / f"device-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.json"
    if not path.is_file():
        with os_errors_as(f"{cache} cannot be written", "; set TORCHTITAN_CACHE to a folder"):
            durable.make_folder(cache)
            durable.write(path, _measure_together(processes))
    fields: dict[str, Any] = json.loads(path.read_text())
    return fields


def _measure_together(processes: int) -> str:
    """Return the speed of one of several processes as JSON."""
    threads = max(1, (os.cpu_count() or 1) // processes)  # as `torchtitan train` does
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    with tempfile.TemporaryDirectory() as folder:
        program = "from torchtitan.foresight.this_machine import measure; measure({!r}, {}, {})"
        words = [[sys.executable, "-P", "-c", program.format(folder, processes, rank)] for rank in range(processes)]
        started = [subprocess.Popen(one, stdout=subprocess.PIPE, text=True, env=environment) for one in words]
        outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise UserError("the speed of this machine could not be measured (see above); describe it in a --device_file")
    return outputs[0]


def measure(folder: str, processes: int, rank: int) -> None:
    """Print the speed of this process, while others, which it meets in a file of `folder`, measure too."""
    keep_freed_memory()  # as in training
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes)
    torch.manual_seed(0)
    gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    float32, bfloat16 = (_products_rate(dtype) for dtype in (torch.float32, torch.bfloat16))
    latency, seconds = (_mean_seconds(functools.partial(dist.all_reduce, torch.zeros(n))) for n in (_SMALL, _LARGE))
    # A ring sends twice (n - 1) / n of the message.
    bandwidth = 8 * _LARGE * (processes - 1) / processes / (seconds - latency)
    fields = dict(
        name=f"this machine, {processes} process(es)",
        memory_gib=gib / processes,
        float32_flops=float32,
        bfloat16_flops=bfloat16,
        float8_flops=bfloat16,
        product_efficiency=1.0,
        attention_efficiency=_attention_rate() / float32,
        memory_bandwidth=_memory_rate(),
        memory_efficiency=1.0,
        link_bandwidth=bandwidth,
        network_bandwidth=bandwidth,
        link_efficiency=1.0,
        link_latency=0.0,
        network_latency=0.0,
        collective_seconds=latency,
        is_asynchronous=False,
    )
    print(json.dumps(fields))


def _mean_seconds(call: Callable[[], object]) -> float:
    """Return the mean duration. All processes make the same number of calls, which one call determines."""
    call()
    start = time.perf_counter()
    call()
    count = torch.tensor(max(1, round(_SECONDS / (time.perf_counter() - start))))
    dist.broadcast(count, 0)
    start = time.perf_counter()
    for _ in range(int(count)):
        call()
    return (time.perf_counter() - start) / int(count)


def _products_rate(dtype: torch.dtype) -> float:
    width, wide = _WIDTHS
    x = torch.rand(_TOKENS, width, dtype=dtype, requires_grad=True)
    weight = torch.rand(wide, width, dtype=dtype, requires_grad=True)
    gradient = torch.rand(_TOKENS, wide, dtype=dtype)
    with onednn_products():  # as in training
        seconds = _mean_seconds(lambda: torch.autograd.grad(F.linear(x, weight), (x, weight), gradient))
    return 3 * 2 * _TOKENS * width * wide / seconds


def _memory_rate() -> float:
    """Return the bytes/s of the elementwise operations of a block and its gradients: sums, products, activations."""
    x, y = torch.rand(2, _ELEMENTS)

    def operations() -> None:
        torch.sigmoid(x)
        x * y
        x.mul(0.5)
        x + y

    return 10 * 4 * _ELEMENTS / _mean_seconds(operations)


def _attention_rate() -> float:
    """Return the FLOP/s of causal attention, forward and backward, counted as on GPUs (`foresight.time`)."""
    q, k, v = (torch.rand(1, 8, 512, 64, requires_grad=True) for _ in range(3))
    square = 4 * 8 * 512 * 512 * 64

    def attend() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    return 0.5 * square * (1 + 2.5) / _mean_seconds(attend)
