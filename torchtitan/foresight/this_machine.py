"""Measures this machine's CPU speed with the number of processes that train, in ten seconds, and
stores it in a file."""

import functools
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from torchtitan.distributed.process_group import init_group_in
from torchtitan.dry_run.observer import observing
from torchtitan.dry_run.work_tracker import WorkTracker
from torchtitan.tools import durable
from torchtitan.tools.cpu_products import onednn_products
from torchtitan.tools.errors import UserError, os_errors_as
from torchtitan.tools.process import keep_freed_memory, threads_per_process, usable_cores
from torchtitan.tools.torch_private import all_gather_single_autograd, wait_tensor

Call = Callable[[], object]

_SECONDS = 8.0
"""Duration of the measurement, without the start of the processes."""
_TIMEOUT_SECONDS = 300.0
"""Time that a process waits for the others."""
_GROUPS = 5
"""Groups of successive calls. A duration is the median of their means: it includes messages that
take ten times as long as others, but not a moment in which other programs are busy."""
_TOKENS = 1024
_WIDTH = 256
_WIDE = 768
"""Layers and batch of the debug configuration. All tensors together do not fit the fast caches."""
_LARGE, _SMALL = 2**21, 2**4
"""Elements of the messages that give bandwidth and latency."""
_VERSION = 5
"""Of the measurement, part of the file's name."""


def speed_of_this_machine(processes: int) -> dict[str, Any]:
    """Return the fields of `Device` for each of `processes` that compute at the same time on this
    machine. They are measured on first use, with at most one process per core, but two of several;
    the file is in $TORCHTITAN_CACHE or ~/.cache/torchtitan."""
    processes = min(processes, max(2, usable_cores()))
    threads = os.environ.get("OMP_NUM_THREADS", "")
    key = [
        _VERSION,
        platform.processor(),
        platform.node(),
        usable_cores(),
        processes,
        threads,
        torch.__version__,
    ]
    cache = Path(os.environ.get("TORCHTITAN_CACHE") or Path.home() / ".cache" / "torchtitan")
    path = cache / f"device-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.json"
    if not path.is_file():
        with os_errors_as(f"{cache} cannot be written", "; set TORCHTITAN_CACHE to a folder"):
            durable.make_folder(cache)
            durable.write(path, _measure_together(processes))
    fields: dict[str, object] = json.loads(path.read_text())
    return fields


def _measure_together(processes: int) -> str:
    """Return the speed of one of several processes as JSON."""
    threads = threads_per_process(processes)  # as `torchtitan train` does
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    with tempfile.TemporaryDirectory() as folder:
        program = "from torchtitan.foresight.this_machine import measure; measure({!r}, {}, {}, {})"
        words = [
            [sys.executable, "-P", "-c", program.format(folder, processes, rank, _SECONDS)]
            for rank in range(processes)
        ]
        started = [
            subprocess.Popen(one, stdout=subprocess.PIPE, text=True, env=environment)
            for one in words
        ]
        outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise UserError(
            "the speed of this machine could not be measured (see above); describe it in a "
            "--device_file"
        )
    return outputs[0]


def measure(folder: str, processes: int, rank: int, duration: float) -> None:
    """Print the speed of this process while others measure at the same time, for `duration` seconds
    or a few calls of each kind if these take longer; they meet in a file of `folder`."""
    keep_freed_memory()  # as in training
    init_group_in(folder, rank, processes, _TIMEOUT_SECONDS)
    torch.manual_seed(0)
    gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    layers = [
        torch.randn(shape) for shape in [(_TOKENS, _WIDTH), *[(_WIDE, _WIDTH), (_WIDTH, _WIDE)] * 2]
    ]
    whole, part = torch.zeros(_LARGE), torch.zeros(_LARGE // processes)
    # As in training, messages follow computation that the processes do not end at the same time.
    calls: dict[str, Call] = {
        "float32": _passes(layers, _products),
        "sum": lambda: dist.all_reduce(whole),
        "bfloat16": _passes([one.bfloat16() for one in layers], _products),
        "small sum": lambda: dist.all_reduce(whole[:_SMALL]),
        "attention": _passes(
            torch.rand(3, 2, 4, 512, 64),
            lambda q, k, v: [F.scaled_dot_product_attention(q, k, v, is_causal=True)],
        ),
        "gathering": lambda: _gather(part),
        "elementwise": _passes(
            torch.rand(3, _TOKENS, _WIDE),
            lambda x, y, z: [x + F.rms_norm(x, x.shape[-1:]), F.silu(y) * z],
        ),
        "small gathering": lambda: _gather(part[:_SMALL]),
    }
    with onednn_products():  # as in training
        seconds = _seconds_of(calls, duration)
        names = ("float32", "bfloat16", "attention", "elementwise")
        rates = {name: _work_of(calls[name]) / seconds[name] for name in names}
    latency = (seconds["small sum"] + seconds["small gathering"]) / 2
    messages = seconds["sum"] + seconds["gathering"]
    # To gather, a ring sends (n - 1) / n of the message, and to sum, twice as much. Latency varies
    # on busy machines.
    bandwidth = (
        3 * 4 * _LARGE * (processes - 1) / processes / max(messages - 2 * latency, messages / 2)
    )
    fields = dict(
        name=f"this machine, {processes} process(es)",
        memory_gib=gib / processes,
        float32_flops=rates["float32"],
        bfloat16_flops=rates["bfloat16"],
        float8_flops=rates["bfloat16"],
        product_efficiency=1.0,
        # Half of the square, and five products instead of four in the backward pass, as in
        # `foresight.time`.
        attention_efficiency=0.5 * (1 + 2.5) / (1 + 2) * rates["attention"] / rates["float32"],
        memory_bandwidth=rates["elementwise"],
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


def _seconds_of(calls: dict[str, Call], duration: float) -> dict[str, float]:
    """Return the seconds of each call; all processes run the calls in turn, for `duration`
    seconds."""
    durations: dict[str, list[float]] = {name: [] for name in calls}
    end, going_on = time.perf_counter() + duration, torch.tensor(True)
    while going_on:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            durations[name].append(time.perf_counter() - start)
        going_on.fill_(time.perf_counter() < end or len(durations[name]) <= _GROUPS)
        dist.broadcast(going_on, 0)
    n = (len(durations[name]) - 1) // _GROUPS  # without the first
    seconds = {}
    for name, each in durations.items():
        means = [statistics.mean(each[1 + i * n :][:n]) for i in range(_GROUPS)]
        seconds[name] = statistics.median(means)
    return seconds


def _work_of(call: Call) -> int:
    """Return the floating-point operations of a call or, without any, its bytes, counted as for a
    prediction."""
    tracker = WorkTracker()
    with observing(tracker):
        call()
    return tracker.flops or sum(kernel.n_bytes * calls for kernel, calls in tracker.work.items())


def _passes(leaves: Iterable[Tensor], forward: Callable[..., list[Tensor]]) -> Call:
    """Return a call that computes results from `leaves`, and their gradients."""
    leaves = [one.detach().requires_grad_() for one in leaves]
    gradients = [torch.rand_like(one) for one in forward(*leaves)]
    return lambda: torch.autograd.grad(forward(*leaves), leaves, gradients)


def _products(x: Tensor, *weights: Tensor) -> list[Tensor]:
    return [functools.reduce(F.linear, weights, x)]


def _gather(part: Tensor) -> None:
    wait_tensor(all_gather_single_autograd(part, gather_dim=0, group=dist.group.WORLD))
