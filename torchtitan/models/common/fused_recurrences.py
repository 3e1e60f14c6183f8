"""Fused CUDA kernels of recurrences, from packages that may be installed: flash-linear-attention
(arXiv:2312.06635), with the extra `fla`, and mamba-ssm (arXiv:2405.21060). Without them, and where
`is_fusable` says no, PyTorch computes the recurrences in chunks.

Dimensions: as in `delta_net` and `mamba`.
"""

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
from torch import Tensor

from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.tools.device import send
from torchtitan.tools.logging import logger

FusedRecurrence = Callable[[Sequence[Tensor], Tensor, AttentionMetadata], Tensor]
"""(Inputs of a recurrence, (B, L, …) each; numbers of the documents, as of `Recurrence.recur`;
attention) → results, (B, L, H, width of the values)."""


@dataclass(frozen=True)
class PackagedKernel:
    """A function of a package that computes a recurrence, and resets it at each document."""

    package: str
    release: str
    """The package's release that tests use, such as 0.6. The function of another release may
    take other arguments, or give them another meaning."""
    module: str
    function: str
    adapt: Callable[..., Tensor]
    """(The function, inputs, numbers of documents, attention) → results."""


def fused_recurrence(name: str, *widths: int) -> FusedRecurrence | None:
    """Return the kernel of a recurrence of `KERNELS`; None without CUDA or an installed package of
    its release, or if a width of keys or values is not from 16 to 256."""
    return load_kernel(name) if all(16 <= width <= 256 for width in widths) else None


def is_fusable(x_BLJ: Tensor, attention: AttentionMetadata) -> bool:
    """Return whether kernels can compute a recurrence of inputs like `x_BLJ`: on CUDA, in bfloat16
    or float16 (they round the factors of float32 products to TF32), without states of generation,
    and without deterministic algorithms (their autotuning chooses the order of sums)."""
    return (
        x_BLJ.device.type == "cuda"
        and x_BLJ.dtype in (torch.bfloat16, torch.float16)
        and attention.states is None
        and not torch.are_deterministic_algorithms_enabled()
    )


@functools.cache
def load_kernel(name: str) -> FusedRecurrence | None:
    """Return the first kernel of `KERNELS[name]` whose package is installed in its release, and log
    the choice, once per process. Return None without such a kernel or without CUDA."""
    if not torch.cuda.is_available():
        return None
    kernels = KERNELS[name]
    for kernel in kernels:
        if find_spec(kernel.module.partition(".")[0]) is None:
            continue
        installed = _installed_version(kernel.package)
        if not f"{installed}.".startswith(f"{kernel.release}."):
            logger.warning(
                "%s: %s is installed in version %s, and not used; install %s",
                *(name, kernel.package, installed, kernel.release),
            )
            continue
        try:
            function = getattr(importlib.import_module(kernel.module), kernel.function)
        except ImportError as error:
            logger.warning("%s: %s cannot be imported: %s", name, kernel.package, error)
            continue
        logger.info(
            "%s: in bfloat16 and float16, computed by %s %s (%s)",
            *(name, kernel.package, installed, kernel.function),
        )
        # not traced: documents decide shapes in these functions
        return torch.compiler.disable(functools.partial(kernel.adapt, function))
    packages = " or ".join(f"{kernel.package} {kernel.release}" for kernel in kernels)
    logger.info("%s: computed in chunks by PyTorch; install %s for a kernel", name, packages)
    return None


def _installed_version(package: str) -> str:
    """Return the version of an installed package, "unknown" if another brought its modules."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _fla(
    function: Callable[..., tuple[Tensor, Tensor | None]],
    inputs: Sequence[Tensor],
    attention: AttentionMetadata,
) -> Tensor:
    """Call a function of flash-linear-attention, which takes boundaries of documents of one row."""
    n_rows = len(inputs[0])
    if len(attention.cu_seqlens) == n_rows + 1:  # each row is one document
        return function(*inputs, scale=1.0)[0]
    on_device, on_host = _boundaries(attention.cu_seqlens, inputs[0].device)
    out_1THF, _ = function(
        *(x.flatten(0, 1)[None] for x in inputs),
        scale=1.0,
        cu_seqlens=on_device,
        cu_seqlens_cpu=on_host,
    )
    return out_1THF.view(n_rows, -1, *out_1THF.shape[2:])


@functools.lru_cache(maxsize=8)
def _boundaries(cu_seqlens: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return boundaries on a device and on the host. All layers of a batch get the same tensors, by
    which flash-linear-attention recognizes the documents that it has cut into chunks already."""
    on_host = cu_seqlens.long()
    return send(on_host, device), on_host


def _delta_rule(
    function: Callable[..., tuple[Tensor, Tensor | None]],
    inputs: Sequence[Tensor],
    documents_BL: Tensor,
    attention: AttentionMetadata,
) -> Tensor:
    """Arguments of `gated_delta_rule`, with one decay per head."""
    *qkv, decay_BLHX, beta_BLH = inputs
    return _fla(function, (*qkv, decay_BLHX[..., 0], beta_BLH), attention)


def _delta_rule_of_elements(
    function: Callable[..., tuple[Tensor, Tensor | None]],
    inputs: Sequence[Tensor],
    documents_BL: Tensor,
    attention: AttentionMetadata,
) -> Tensor:
    """Arguments of `gated_delta_rule`, with a decay per element of a head's keys."""
    return _fla(function, inputs, attention)


def _linear_attention(
    function: Callable[..., tuple[Tensor, Tensor | None]],
    inputs: Sequence[Tensor],
    documents_BL: Tensor,
    attention: AttentionMetadata,
) -> Tensor:
    """Arguments of `selective_scan`, which is linear attention with decays (arXiv:2405.21060,
    section 5)."""
    x_BLHP, step_BLH, rate_H, b_BLGN, c_BLGN = inputs
    repeats = x_BLHP.shape[2] // b_BLGN.shape[2]
    queries, keys = (each.repeat_interleave(repeats, dim=2) for each in (c_BLGN, b_BLGN))
    values = (x_BLHP * step_BLH[..., None]).type_as(x_BLHP)
    return _fla(function, (queries, keys, values, rate_H * step_BLH), attention)


_MAMBA_CHUNK = 256
"""Tokens per chunk of Mamba's kernel: the default of its layers."""


def _mamba_scan(
    function: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    documents_BL: Tensor,
    attention: AttentionMetadata,
) -> Tensor:
    """Arguments of `selective_scan`, for a function that takes numbers of documents."""
    numbers_BL = documents_BL.expand(len(inputs[0]), -1).int().contiguous()
    return function(*inputs, _MAMBA_CHUNK, seq_idx=numbers_BL)


_FLA = ("fla-core", "0.6")
KERNELS: Mapping[str, tuple[PackagedKernel, ...]] = {
    "gated delta rule": (
        PackagedKernel(*_FLA, "fla.ops.gated_delta_rule", "chunk_gated_delta_rule", _delta_rule),
    ),
    "Kimi delta attention": (
        PackagedKernel(*_FLA, "fla.ops.kda", "chunk_kda", _delta_rule_of_elements),
    ),
    "selective scan of Mamba 2": (
        PackagedKernel(
            "mamba-ssm",
            "2.3",
            "mamba_ssm.ops.triton.ssd_combined",
            "mamba_chunk_scan_combined",
            _mamba_scan,
        ),
        # needs the keys and queries of each head, not of each group
        PackagedKernel(*_FLA, "fla.ops.simple_gla", "chunk_simple_gla", _linear_attention),
    ),
}
"""Name of a recurrence → its kernels, the preferred one first."""
