"""Matrix products in float32 on CPUs, computed by oneDNN where it is faster than MKL, PyTorch's
choice."""

import functools
from contextlib import AbstractContextManager, ExitStack
from typing import Self

import torch
from torch import Tensor, nn

from torchtitan.tools.replaced_kernels import ReplacedKernels
from torchtitan.tools.torch_private import onednn_linear

# of a sum in place, multiplied at a time, since oneDNN needs memory for them; no slower than all
# rows
_ROWS = 128
# multiplications of a product, below which the call takes longer than oneDNN saves: for a matrix of
# 64 x 64 and 8 rows, 23 microseconds instead of 3
_FEWEST = 2**23


def onednn_products() -> AbstractContextManager[None]:
    """Let oneDNN compute large products of two float32 matrices on the CPU in the block, in this
    process, also of gradients, the loss and local shards. Only AMD's processors with AVX-512 do so,
    by their name alone, since MKL does not use it there; others are not measured. Other products,
    and compiled ones, stay PyTorch's."""
    return _products.block()


class PassProducts:
    """Enters `onednn_products` within a `with` block before the first pass of a model in which
    oneDNN multiplies a matrix: in others, it would only delay each product by microseconds. It
    stays until the end of the block, since other threads may multiply now."""

    def __init__(self, model: nn.Module):
        layers = getattr(model, "layers", model)
        self._largest_in_layers = max(map(_matrix_size, layers.parameters()), default=0)
        self._largest = max(map(_matrix_size, model.parameters()), default=0)
        self._stack = ExitStack()
        self._is_in_use = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_in_use = False
        self._stack.close()

    def before(self, n_tokens: int, n_rows: int) -> None:
        """Prepare a pass over `n_tokens` tokens in `n_rows` rows, one of each for the output
        weights."""
        most = max(n_tokens * self._largest_in_layers, n_rows * self._largest)
        if most >= _FEWEST and not self._is_in_use:
            self._is_in_use = True
            self._stack.enter_context(onednn_products())


def _matrix_size(weight: Tensor) -> int:
    """Return the elements of a matrix, or of one of several; at least so many if they are packed,
    so that their number is not known."""
    if not weight.is_floating_point():
        return _FEWEST
    n_matrices = len(weight) if weight.ndim == 3 else 1
    return weight.numel() // n_matrices if weight.ndim >= 2 else 0


@functools.cache
def is_faster() -> bool:
    """Return whether oneDNN is known to be faster on this processor."""
    cpu = torch.cpu.get_capabilities()
    return bool("AMD" in cpu.get("cpu_name", "") and cpu.get("avx512_f") and onednn_linear())


def is_large(a: Tensor, b: Tensor) -> bool:
    """Return whether oneDNN may multiply two matrices in a block of `onednn_products`."""
    return a.ndim == b.ndim == 2 and a.numel() * b.shape[1] >= _FEWEST


def _takes(*tensors: Tensor, beta: float = 1, alpha: float = 1) -> bool:
    """Return whether oneDNN can multiply the last two tensors, matrices, and add the first, if
    there is one."""
    a, b = tensors[-2:]
    if not is_large(a, b):
        return False
    is_float32 = all(each.dtype == torch.float32 for each in tensors)
    return is_float32 and a.shape[1] == len(b) and beta == alpha == 1


def _multiply(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    # For other strides, oneDNN would use its reference code, a thousand times slower; of a bias, it
    # ignores them.
    weight = b.mT if b.is_contiguous() or b.mT.is_contiguous() else b.contiguous().mT
    linear = onednn_linear()
    assert linear is not None, "see `replacements`"
    out: Tensor = linear(a, weight, None if bias is None else bias.contiguous(), "none", [], "")
    return out


def _mm(a: Tensor, b: Tensor) -> Tensor:  # with `out`, it is another operation, PyTorch's own
    return _multiply(a, b) if _takes(a, b) else torch.mm(a, b, out=a.new_empty(0))


def _addmm(total: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if _takes(total, a, b, beta=beta, alpha=alpha) and total.shape == b.shape[1:]:
        return _multiply(a, b, total)
    return torch.addmm(total, a, b, beta=beta, alpha=alpha, out=a.new_empty(0))


def _addmm_(total: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if total.shape != (shape := (*a.shape[:1], *b.shape[1:])):  # `out` would be resized
        raise RuntimeError(
            f"Bad in-place call: the total has shape {tuple(total.shape)}, the product {shape}"
        )
    if not _takes(total, a, b, beta=beta, alpha=alpha):
        return torch.addmm(total, a, b, beta=beta, alpha=alpha, out=total)
    for part, rows in zip(total.split(_ROWS), a.split(_ROWS), strict=True):
        part.add_(_multiply(rows, b))
    return total


_products = ReplacedKernels(
    lambda: {"mm": _mm, "addmm": _addmm, "addmm_": _addmm_} if is_faster() else {}
)
