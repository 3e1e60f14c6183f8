"""Computes the time of a step on a device: kernels, collectives, their overlap, and a pipeline's
bubble."""

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Literal, NamedTuple

import torch

from torchtitan.distributed.pipeline import PipelinePlan
from torchtitan.dry_run.work_tracker import CommunicationKind, Kernel
from torchtitan.foresight.devices import Device
from torchtitan.tools.errors import UserError

Role = Literal["FSDP", "tensor parallel", "context parallel", "expert parallel", "replicas"]
"""Reason why ranks communicate."""

_PART_OF_PHASE = {"update": "optimizer", "recompute": "recomputation"}
_PART_OF_KIND = {"product": "products", "attention": "attention"}

FUSED_TRAFFIC = 0.45
"""Memory traffic of compiled elementwise operations, relative to eager ones: fused, they keep
intermediate results in registers. Fitted to row 2 of the published runs."""

FUSED_LAUNCHES = 0.3
"""Launches of compiled elementwise operations, relative to eager ones: about three become one
kernel."""

FLOAT8_EFFICIENCY = 0.53
"""Part of the float8 peak that large products reach. Fitted to rows 3 and 11 of the published
runs."""

FLOAT8_CASTS = 1.75
"""Traffic to cast the operands of products to float8, relative to the traffic of the products in
bfloat16, before fusing (`FUSED_TRAFFIC`). Fitted to rows 3 and 11."""

CAUSAL_PART = 0.5
"""Part of the square of attention that flash attention computes under a causal mask."""

ATTENTION_BACKWARD = 1.25
"""Five products in flash attention's backward pass (arXiv:2205.14135), where counted operations
have four."""

CONTENTION = 0.12
"""Part of the device that a collective occupies meanwhile: 16 of an H100's 132 multiprocessors,
NCCL's usual number of channels."""

ASYNC_TENSOR_PARALLEL = 0.25
"""Part of tensor-parallel communication that is hidden if products are computed in pieces as they
arrive. The first and last piece stay exposed, and smaller products are slower. Fitted to row 13."""

FILLED_BUBBLES = {"InterleavedZeroBubble": 1 / 3, "ZBVZeroBubble": 1 / 6, "DualPipeV": 1 / 6}
"""Bubble relative to the bubble of other schedules, which is (ranks - 1) / (micro-batches x stages
per rank) of the step (arXiv:2104.04473, section 2.2): delayed weight gradients fill two thirds
(arXiv:2401.10241, section 2.2), and V schedules fill half of the rest."""


class Message(NamedTuple):
    """A collective; `n_bytes` counts the whole message."""

    role: Role
    kind: CommunicationKind
    n_bytes: float
    ranks: int
    per_host: int
    """Ranks that share a host."""


WorkOfRank = Iterable[tuple[Kernel | Message, float]]
"""Kernels and messages with their numbers of calls."""


def collective_seconds(device: Device, message: Message) -> float:
    """Return the time of a collective.

    A ring over several hosts crosses each of them with all network devices of its ranks. All-to-all
    sends to other hosts directly, with one network device per rank. All-reduce takes the faster of
    ring and tree (2 log2 n hops).
    """
    n = message.ranks
    n_bytes = message.n_bytes
    per_host = message.per_host
    hosts = math.ceil(n / per_host)
    if n == 1:
        return 0.0
    link, network = device.link_bandwidth, device.network_bandwidth * per_host
    bandwidth = device.link_efficiency * (link if hosts == 1 else min(link, network))
    hop = device.link_latency if hosts == 1 else device.network_latency
    ring = (n - hosts) * device.link_latency + (hosts - 1) * hop
    start, part = device.collective_seconds, (n - 1) / n
    if message.kind == "all-to-all":
        remote = n_bytes * (n - per_host) / n
        local = n_bytes * part - remote
        return (
            start
            + hop
            + max(local / link, remote / device.network_bandwidth) / device.link_efficiency
        )
    if message.kind == "all-reduce":
        return start + 2 * min(
            ring + part * n_bytes / bandwidth, math.log2(n) * hop + n_bytes / bandwidth
        )
    return start + ring + part * n_bytes / bandwidth


def kernel_seconds(device: Device, kernel: Kernel, *, is_compiled: bool) -> float:
    """Return the time of one kernel on the device, without its launch: the longer of computation
    and memory traffic."""
    traffic = kernel.n_bytes / (device.memory_bandwidth * device.memory_efficiency)
    is_float32 = kernel.dtype == torch.float32
    peak = device.float32_flops if is_float32 else device.bfloat16_flops
    if kernel.kind == "attention":
        passes = ATTENTION_BACKWARD if kernel.phase == "backward" else 1.0
        computed = kernel.flops * (CAUSAL_PART if kernel.is_causal else 1.0)
        return max(passes * computed / (peak * device.attention_efficiency), traffic)
    if kernel.kind == "product":
        rate = _narrow_rate(device, kernel.dtype) or peak * device.product_efficiency
        return max(kernel.flops / rate, traffic)
    is_fused = is_compiled and kernel.kind == "other" and kernel.phase != "update"
    return traffic * (FUSED_TRAFFIC if is_fused else 1.0)


def _narrow_rate(device: Device, dtype: torch.dtype) -> float | None:
    """Return the FLOP/s of large products in 8 or 4 bits; None for wider types. Raise `UserError`
    for a device without 4-bit units."""
    if dtype.itemsize > 1:
        return None
    if dtype != torch.float4_e2m1fn_x2:
        return device.float8_flops * FLOAT8_EFFICIENCY
    if not device.float4_flops:
        raise UserError(
            f"{device.name} has no 4-bit units (float4_flops is 0) for the converter nvfp4; choose "
            "another device or converter"
        )
    return device.float4_flops * FLOAT8_EFFICIENCY


def step_parts(
    device: Device, work: WorkOfRank, *, is_compiled: bool = False, is_async_tp: bool = False
) -> dict[str, float]:
    """Return the seconds of a step's work on one rank by part, without a pipeline's bubble:
    products, attention, other kernels, recomputation, optimizer, launches, and each role of
    communication, unless computation hides it.

    FSDP's communication runs on its own streams: the first gather and the last reduction are
    exposed, the others only if they take longer than the computation. Tensor, context and expert
    parallelism need each result at once.
    """
    kernels: defaultdict[str, float] = defaultdict(float)
    messages: defaultdict[str, float] = defaultdict(float)
    exposed: defaultdict[CommunicationKind, float] = defaultdict(float)
    launching = hidden = 0.0
    for one, calls in work:
        if isinstance(one, Kernel):
            name = _PART_OF_PHASE.get(one.phase) or _PART_OF_KIND.get(one.kind, "other kernels")
            kernels[name] += calls * kernel_seconds(device, one, is_compiled=is_compiled)
            launching += calls * (FUSED_LAUNCHES if is_compiled and one.kind == "other" else 1.0)
            continue
        seconds = collective_seconds(device, one)
        if one.role in ("FSDP", "replicas"):
            hidden += calls * seconds
            exposed[one.kind] = max(exposed[one.kind], seconds if calls > 0 else 0.0)
        else:
            saved = ASYNC_TENSOR_PARALLEL if one.role == "tensor parallel" and is_async_tp else 0.0
            messages[one.role] += calls * seconds * (1 - saved)
    launching *= device.launch_seconds
    parts = {**kernels, **messages, "FSDP": hidden}
    if device.is_asynchronous:
        computing = sum(kernels.values())
        beyond = hidden + CONTENTION * min(hidden, computing) - computing
        parts["FSDP"] = max(beyond, CONTENTION * hidden, sum(exposed.values()))
        launching = max(0.0, launching - sum(parts.values()))
    parts["launches"] = launching
    return {name: seconds for name, seconds in parts.items() if seconds}


def bubble_seconds(parts: dict[str, float], pipeline: PipelinePlan) -> float:
    """Return the time of a pipeline's bubble."""
    working, ranks = sum(parts.values()) - parts.get("optimizer", 0.0), pipeline.degree
    part = (ranks - 1) / (pipeline.n_microbatches * len(pipeline.stages) / ranks)
    return working * FILLED_BUBBLES.get(pipeline.schedule, 1.0) * part
