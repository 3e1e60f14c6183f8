"""Device information: type, name, peak FLOP/s and memory use."""

import functools
import re
import sys
import time
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from torchtitan.tools.errors import UserError

# Peak FLOP/s of dense bf16/fp16 matrix products (not "with sparsity"), from the vendors' data
# sheets. The first entry whose words all occur in the device's name applies.
_PUBLISHED_PEAKS: tuple[tuple[str, float], ...] = (
    ("GB200", 2500e12),
    ("B200", 2250e12),
    ("GH200", 989e12),
    ("H200 NVL", 835e12),
    ("H200", 989e12),
    ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("A100", 312e12),
    ("A30", 165e12),
    ("A10", 125e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("MI325X", 1307e12),
    ("MI300X", 1307e12),
    ("MI250X", 191.5e12),  # one of its two dies; PyTorch sees each die as a device
)

# Rows of the square matrices that are timed, and the seconds for all of them. A GPU first raises
# its clock; on a CPU, the first step waits, and the largest size is for many cores.
_CPU_SIZES, _CPU_SECONDS = (512, 1024, 2048), 0.1
_GPU_SIZES, _GPU_SECONDS = (2048, 4096), 0.35
_GIB = 2**30
_DRIVER = Path("/proc/driver/nvidia/version")


class PeakFlops(NamedTuple):
    """Peak floating-point operations per second of a device, and the source of the number."""

    value: float
    source: str


def device_type() -> Literal["cuda", "mps", "cpu"]:
    """Return the best available type of device. Raise `UserError` if there are NVIDIA GPUs that
    PyTorch cannot use: the driver (NVML) counts them, but CUDA does not start."""
    if torch.cuda.is_available():
        return "cuda"
    if n_gpus := torch.cuda.device_count():
        version = _DRIVER.read_text() if _DRIVER.is_file() else ""
        found = re.search(r"Module\D*(\d+[.\d]+)", version)
        release = f" {found[1]}" if found else ""
        raise UserError(
            f"{n_gpus} GPU(s) are present, but the NVIDIA driver{release} cannot run CUDA "
            f"{torch.version.cuda}, for which torch {torch.__version__} is built: update the "
            "driver, install a build of torch for an older CUDA (docs/performance.md), or set "
            "CUDA_VISIBLE_DEVICES= to use the CPU"
        )
    return "mps" if torch.backends.mps.is_available() else "cpu"


def device_description(device: torch.device) -> str:
    """Describe the device in one line."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name}, {properties.total_memory / _GIB:.0f} GiB"
    if device.type == "mps":
        return "Apple GPU (MPS)"
    return f"CPU, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"


def total_memory() -> int:
    """Return the bytes of memory of this process's GPU."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


def memory_gib(device: torch.device) -> float:
    """Return the GiB of memory used: on CUDA, the peak that PyTorch's allocator has reserved; on
    MPS, the driver's current allocation (it keeps no peak); on CPU, the peak resident set of this
    process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / _GIB
    if device.type == "mps":
        return torch.mps.driver_allocated_memory() / _GIB
    return _peak_resident_bytes() / _GIB


def synchronize(device: torch.device) -> None:
    """Wait for the work queued on the device's current stream, for timing."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    elif device.type == "mps":
        torch.mps.synchronize()


def send(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy from the host without waiting for the device. On CUDA, this needs pinned memory."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


class HostCopy:
    """Copy of a tensor on the host, made in the order of the device's work. Only `tolist` waits,
    for this copy."""

    def __init__(self, x: torch.Tensor):
        on_cuda = x.device.type == "cuda"
        # in pinned memory, which PyTorch takes for such copies
        self._copy = x.to("cpu", non_blocking=on_cuda)
        self._event = torch.cuda.Event() if on_cuda else None
        if self._event:
            self._event.record()

    def tolist(self) -> list[float]:
        if self._event:
            self._event.synchronize()
        values: list[float] = self._copy.tolist()
        return values


@functools.cache
def multiplies(dtype: torch.dtype) -> bool:
    """Return whether this CPU has instructions for products of a type. Without them, such products
    are slow."""
    has = torch.cpu.get_capabilities()
    has_bfloat16 = bool(has.get("avx512_bf16") or has.get("amx_bf16"))
    return dtype in (torch.float32, torch.float64) or dtype == torch.bfloat16 and has_bfloat16


def peak_flops(device: torch.device, dtype: torch.dtype, *, published: bool = True) -> PeakFlops:
    """Return the peak dense matrix-product FLOP/s of one device in `dtype`, the type that training
    computes in.

    The number is published for well-known GPUs in bf16 and fp16. Otherwise (CPU, another GPU or a
    slice of one, fp32), it is measured in a fraction of a second with this process's threads, and
    is lower than in a data sheet.

    Args:
        published: False: measure also well-known GPUs.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    if (
        published
        and dtype in (torch.bfloat16, torch.float16)
        and (peak := published_peak(name)) is not None
    ):
        return PeakFlops(peak, f"published for {name}")
    return _measured_peak(device, dtype)


def published_peak(device_name: str) -> float | None:
    """Return the published dense bf16/fp16 FLOP/s of the GPU named `device_name`; None if it is not
    in the table."""
    words = _words(device_name)
    if "MIG" in words:  # a slice of a GPU with the name of the whole GPU
        return None
    return next((peak for name, peak in _PUBLISHED_PEAKS if _words(name) <= words), None)


def _words(name: str) -> set[str]:
    return set(re.findall(r"[A-Z0-9]+", name.upper()))


def _measured_peak(device: torch.device, dtype: torch.dtype) -> PeakFlops:
    """Return the best rate of square matrix products within the measuring time. Sizes double while
    time permits, then start over, so that brief interference does not affect the result."""
    is_cpu = device.type == "cpu"
    sizes, limit = (_CPU_SIZES, _CPU_SECONDS) if is_cpu else (_GPU_SIZES, _GPU_SECONDS)
    # A separate generator, so that the measurement does not affect training.
    generator = torch.Generator(device).manual_seed(0)

    @functools.cache
    def factors(size: int) -> torch.Tensor:
        return torch.rand(2, size, size, device=device, generator=generator).to(dtype)

    size = sizes[0]
    _product_seconds(factors(size))  # the first product loads libraries
    best = PeakFlops(0.0, "")
    deadline = time.perf_counter() + limit
    # At least once, also if the machine pauses until the deadline.
    while (remaining := deadline - time.perf_counter()) > 0 or not best.value:
        seconds = _product_seconds(factors(size))
        speed = 2 * size**3 / seconds
        if speed > best.value:
            best = PeakFlops(
                speed,
                f"measured: {size}x{size} matrix product in {str(dtype).removeprefix('torch.')}",
            )
        # the work grows by 2**3
        next_fits = 2 * size in sizes and seconds + 8 * seconds < remaining
        size = 2 * size if next_fits else sizes[0]
    return best


def _product_seconds(factors: torch.Tensor) -> float:
    """Return the seconds of one product of the two square matrices in `factors`, shape (2, n,
    n)."""
    a, b = factors
    # enough to hide the latency of launching and waiting
    repeats = 1 if factors.device.type == "cpu" else 10
    synchronize(factors.device)
    start = time.perf_counter()
    for _ in range(repeats):
        torch.mm(a, b)
    synchronize(factors.device)
    return (time.perf_counter() - start) / repeats


def _peak_resident_bytes() -> int:
    """Return the peak resident set of this process; on Linux, `ru_maxrss` would start at the parent
    process's peak."""
    if sys.platform == "linux":
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
