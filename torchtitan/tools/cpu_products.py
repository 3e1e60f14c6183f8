"""Matrix products in float32 on CPUs, computed by oneDNN where it is faster than MKL, PyTorch's choice."""

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.library import Library

from torchtitan.tools.torch_private import onednn_linear

warnings.filterwarnings("ignore", message=r"Warning only once for all operators", category=UserWarning)  # on purpose


@contextmanager
def onednn_products() -> Iterator[None]:
    """Let oneDNN compute all products of float32 matrices on the CPU in the block, in this process: of linear layers,
    their gradients and the loss, also of local shards. Only AMD's processors with AVX-512 do so, by their name alone,
    since MKL does not use AVX-512 there; others are not measured. Other products, and compiled ones, stay PyTorch's."""
    library = Library("aten", "IMPL")
    if is_faster():
        for name, product in (("mm", _mm), ("addmm", _addmm), ("addmm_", _addmm_)):
            library.impl(name, product, "CPU")
    try:
        yield
    finally:
        del library  # with it, its operations


@functools.cache
def is_faster() -> bool:
    """Return whether oneDNN is known to be faster on this processor."""
    processor = torch.cpu.get_capabilities()
    is_known = "AMD" in processor.get("cpu_name", "") and processor.get("avx512_f", False)
    return is_known and onednn_linear() is not None


def _takes(*tensors: Tensor) -> bool:
    """Return whether oneDNN can multiply the last two tensors, matrices, and add the first, a bias, if there is one."""
    *bias, a, b = tensors
    is_float32 = all(each.dtype == torch.float32 and each.numel() for each in tensors)
    fits = a.ndim == b.ndim == 2 and a.shape[1] == len(b)
    return is_float32 and fits and all(each.shape == b.shape[1:] for each in bias)


def _multiply(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    # For other strides, oneDNN would use its reference code, a thousand times slower; of a bias, it ignores them.
    weight = b.mT if b.is_contiguous() or b.mT.is_contiguous() else b.contiguous().mT
    out: Tensor = onednn_linear()(a, weight, None if bias is None else bias.contiguous(), "none", [], "")
    return out


def _mm(a: Tensor, b: Tensor) -> Tensor:
    # With `out`, it is another operation, PyTorch's own.
    return _multiply(a, b) if _takes(a, b) else torch.mm(a, b, out=a.new_empty(0))


def _addmm(total: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if _takes(total, a, b) and beta == alpha == 1:
        return _multiply(a, b, total)
    return torch.addmm(total, a, b, beta=beta, alpha=alpha, out=a.new_empty(0))


def _addmm_(total: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    shape = (*a.shape[:1], *b.shape[1:])
    if total.shape != shape:  # `out` would be resized
        raise RuntimeError(f"Bad in-place call: the total has shape {tuple(total.shape)}, the product {shape}")
    is_sum = _takes(a, b) and beta == alpha == 1 and total.dtype == a.dtype
    return total.add_(_multiply(a, b)) if is_sum else torch.addmm(total, a, b, beta=beta, alpha=alpha, out=total)
