"""Device speeds for predictions, from data sheets, a user's file, or measured on this machine."""

import math
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from torchtitan.config.configurable import fits, from_plain, leaves
from torchtitan.config.yaml_files import read_config_file
from torchtitan.foresight.this_machine import speed_of_this_machine
from torchtitan.tools.errors import UserError, require


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device of a job. Speeds are FLOP/s, bytes/s (in one direction) and seconds."""

    name: str
    memory_gib: float
    float32_flops: float
    bfloat16_flops: float
    float8_flops: float
    """Peak of dense matrix products, as the data sheet gives it. Equal to `bfloat16_flops` without
    float8 units."""
    float4_flops: float = 0.0
    """Of products in NVFP4. 0: no 4-bit units."""
    narrow_formats: tuple[str, ...] = ()
    """Formats that torchao has kernels for: `float8`, `mxfp8`, `nvfp4`. Predictions refuse
    others."""
    product_efficiency: float = 0.7
    """Part of the peak that large bfloat16 products reach: 0.6 to 0.8 on GPUs, limited by power."""
    attention_efficiency: float = 0.35
    """Part of the bfloat16 peak in attention with a causal mask; FlashAttention-2 on an H100: 0.35
    (arXiv:2407.08608, figures 5 and 6)."""
    memory_bandwidth: float
    memory_efficiency: float = 0.85
    """Part of the memory bandwidth that elementwise kernels reach: 0.85 to 0.92 in BabelStream on
    GPUs."""
    link_bandwidth: float
    """Between devices of a host."""
    network_bandwidth: float
    """Of each device to other hosts."""
    devices_per_host: int = 8
    """Devices that fast links connect, unless `--devices_per_host` says otherwise."""
    link_efficiency: float = 0.8
    """Part of a link that large collectives use; nccl-tests report 360 of 450 GB/s on an H100
    (all-gather)."""
    link_latency: float = 2e-6
    """Per hop of a ring inside a host (nccl/src/graph/tuning.cc: 0.6 to 2.7 µs, by protocol)."""
    network_latency: float = 10e-6
    """Per hop between hosts (nccl/src/graph/tuning.cc: 2.7 to 14 µs, by protocol)."""
    collective_seconds: float = 10e-6
    """Start of a collective, at any size."""
    launch_seconds: float = 6e-6
    """Host time per operation in eager mode: dispatcher, autograd and kernel launch."""
    is_asynchronous: bool = True
    """True if the host runs ahead of the device, so that launches only count if there are too many
    of them, and communication overlaps with computation."""


FORMATS = ("float8", "mxfp8", "nvfp4")
"""Narrow types of products."""

_H100 = Device(
    name="H100 SXM 80 GB",
    memory_gib=79.2,
    float32_flops=67e12,
    bfloat16_flops=989e12,
    float8_flops=1979e12,
    narrow_formats=("float8",),
    memory_bandwidth=3.35e12,
    link_bandwidth=450e9,  # NVLink 4
    network_bandwidth=50e9,  # 400 Gbit/s
)

DEVICES = {
    # NVIDIA's data sheets "H100 Tensor Core GPU", "H200 Tensor Core GPU" and "HGX B200"; dense
    # numbers, half of those "with sparsity". float32 without tensor cores: training does not use
    # TF32. Efficiencies and latencies were compared with measurements on H100, H200 and B200 only
    # (docs/foresight.md); all other rows have the values of the H100. In particular, nobody
    # measured them on the MI300X, nor on RTX cards, whose copies pass through host memory if the
    # driver allows no direct ones.
    "h100": _H100,
    # The device of published measurements: slower memory, and 500 W instead of 700 W.
    "h100_96gb": replace(
        _H100,
        name="H100 96 GB HBM2e, 500 W",
        memory_gib=95.0,
        product_efficiency=0.53,  # fitted to row 1 of the published runs
        memory_bandwidth=2.4e12,
    ),
    "h200": replace(_H100, name="H200 SXM 141 GB", memory_gib=139.8, memory_bandwidth=4.8e12),
    "b200": replace(
        _H100,
        name="B200 SXM 180 GB",
        memory_gib=178.4,
        float32_flops=75e12,
        bfloat16_flops=2250e12,
        float8_flops=4500e12,
        float4_flops=9000e12,
        narrow_formats=FORMATS,
        memory_bandwidth=7.7e12,
        link_bandwidth=900e9,  # NVLink 5
    ),
    # "HGX B300": 8 GPUs have 36 PFLOP/s in bfloat16 and 72 in float8, with sparsity, and 105 in
    # NVFP4, dense.
    "b300": replace(
        _H100,
        name="B300 SXM 270 GB",
        memory_gib=268.0,
        float32_flops=75e12,
        bfloat16_flops=2250e12,
        float8_flops=4500e12,
        float4_flops=13_125e12,
        narrow_formats=FORMATS,
        memory_bandwidth=8e12,
        link_bandwidth=900e9,
        network_bandwidth=100e9,  # 800 Gbit/s
    ),
    # "GB200 NVL72", divided by 72 GPUs, all of which NVLink connects.
    "gb200": replace(
        _H100,
        name="GB200 NVL72 186 GB",
        memory_gib=184.0,
        float32_flops=80e12,
        bfloat16_flops=2500e12,
        float8_flops=5000e12,
        float4_flops=10_000e12,
        narrow_formats=FORMATS,
        memory_bandwidth=8e12,
        link_bandwidth=900e9,
        devices_per_host=72,
    ),
    # "A100 80GB SXM"
    "a100": replace(
        _H100,
        name="A100 SXM 80 GB",
        float32_flops=19.5e12,
        bfloat16_flops=312e12,
        float8_flops=312e12,
        narrow_formats=(),
        memory_bandwidth=2.039e12,
        link_bandwidth=300e9,  # NVLink 3
        network_bandwidth=25e9,  # 200 Gbit/s
    ),
    # "L40S". Cards without NVLink exchange data over PCIe: half of its rate in both directions.
    "l40s": replace(
        _H100,
        name="L40S 48 GB",
        memory_gib=44.5,
        float32_flops=91.6e12,
        bfloat16_flops=362e12,
        float8_flops=733e12,
        memory_bandwidth=864e9,
        link_bandwidth=32e9,  # PCIe 4 x16
        network_bandwidth=25e9,
    ),
    # White papers "NVIDIA Ada GPU Architecture" (appendix A) and "NVIDIA RTX Blackwell GPU
    # Architecture" (appendix A): tensor cores with sums in float32, dense.
    "rtx4090": replace(
        _H100,
        name="GeForce RTX 4090 24 GB",
        memory_gib=23.5,
        float32_flops=82.6e12,
        bfloat16_flops=165.2e12,
        float8_flops=330.3e12,
        memory_bandwidth=1.008e12,
        link_bandwidth=32e9,  # PCIe 4 x16
        network_bandwidth=12.5e9,
    ),
    "rtx5090": replace(
        _H100,
        name="GeForce RTX 5090 32 GB",
        memory_gib=31.3,
        float32_flops=104.8e12,
        bfloat16_flops=209.5e12,
        float8_flops=419e12,
        float4_flops=1676e12,
        memory_bandwidth=1.792e12,
        link_bandwidth=64e9,  # PCIe 5 x16
        network_bandwidth=12.5e9,
    ),
    # White paper "NVIDIA RTX Blackwell PRO GPU Architecture", Workstation Edition.
    "rtxpro6000": replace(
        _H100,
        name="RTX PRO 6000 Blackwell 96 GB",
        memory_gib=95.0,
        float32_flops=126e12,
        bfloat16_flops=503.8e12,
        float8_flops=1007.6e12,
        float4_flops=2015.2e12,
        memory_bandwidth=1.792e12,
        link_bandwidth=64e9,  # PCIe 5 x16
        network_bandwidth=50e9,
    ),
    # AMD's data sheet "Instinct MI300X"; seven Infinity Fabric links of 64 GB/s in one direction.
    "mi300x": replace(
        _H100,
        name="Instinct MI300X 192 GB",
        memory_gib=191.0,
        float32_flops=163.4e12,
        bfloat16_flops=1307.4e12,
        float8_flops=2614.9e12,
        memory_bandwidth=5.3e12,
        link_bandwidth=448e9,
    ),
}


def device_named(name: str | Device, world_size: int) -> Device:
    """Return a device, given by its name in the table, or as `cpu`: one of `world_size` processes
    on this machine. Raise `UserError` for another name."""
    if isinstance(name, Device):
        return name
    if name == "cpu":
        return Device(**speed_of_this_machine(world_size))
    if name not in DEVICES:
        known = ", ".join([*DEVICES, "cpu"])
        raise UserError(
            f"unknown device '{name}' (known: {known}); describe another one in a file "
            "(--device_file, DEVICE)"
        )
    return DEVICES[name]


_GPU_NAMES = {
    "H100 80GB HBM3": "h100",
    "H200": "h200",
    "B200": "b200",
    "B300( SXM6 AC)?": "b300",
    "GB200": "gb200",
    "A100-SXM4-80GB": "a100",
    "L40S": "l40s",
    "GeForce RTX 4090": "rtx4090",
    "GeForce RTX 5090": "rtx5090",
    "RTX PRO 6000 Blackwell Workstation Edition": "rtxpro6000",
    "Instinct MI300X( OAM)?": "mi300x",
}
"""Whole names that drivers report, without the vendor → device. Others are slower cards (PCIe, NVL,
Max-Q, D, laptops), with less memory, or a part of a device (MIG, virtual functions)."""


def device_of_gpu(name: str) -> Device | None:
    """Return the device of the table with a GPU's own name, such as NVIDIA H100 80GB HBM3."""
    model = re.sub("^(NVIDIA|AMD) ", "", name.strip())
    found = (key for pattern, key in _GPU_NAMES.items() if re.fullmatch(pattern, model))
    return DEVICES[key] if (key := next(found, None)) else None


def own_device(world_size: int, remedy: str) -> Device:
    """Return the GPU of this machine, or one of `world_size` processes on its CPU. Raise
    `UserError` with a remedy for a GPU that is not in the table."""
    if not torch.cuda.is_available():
        return device_named("cpu", world_size)
    name = torch.cuda.get_device_name()
    device = device_of_gpu(name)
    if device is None:
        raise UserError(f"the speed of '{name}' is unknown (known: {', '.join(DEVICES)}); {remedy}")
    return device


def device_in_file(path: Path) -> Device:
    """Read a device from a YAML file with the fields of `Device`. Raise `UserError` for a file
    without them."""
    option = f"the device file '{path}'"
    document, types = (
        leaves(read_config_file(path, option)),
        {field.name: field.type for field in fields(Device)},
    )
    for name, value in document.items():
        # also 1e12, which YAML reads as a string
        if types.get(name) is float and fits(value, float):
            document[name] = float(value)
            if name == "float4_flops" and not value:
                continue
            require(0 < document[name] < math.inf, f"{option}: {name}", value, "a number above 0")
    try:
        device: Device = from_plain(Device, document)
    except UserError as error:
        raise UserError(f"{option}: {str(error).removeprefix('configuration: ')}") from error
    per_host = device.devices_per_host
    require(per_host >= 1, f"{option}: devices_per_host", per_host, "at least 1")
    for format in device.narrow_formats:
        known = ", ".join(FORMATS)
        require(format in FORMATS, f"{option}: narrow_formats", format, f"one of {known}")
    return replace(device, narrow_formats=tuple(device.narrow_formats))
