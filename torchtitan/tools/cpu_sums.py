"""Gradients that PyTorch sums in 16 bits on CPUs, summed in float32.

In bfloat16, 256 + 1 is 256. PyTorch 2.13 adds the gradients of an embedding's row, of a row read by
index and of LayerNorm's weights in the type of the gradients on CPUs, so that the row of a token
that occurs 4,096 times in a micro-batch is off by 7 % and more
(`findings/torch_cpu_sums_bf16_gradients_in_bf16.sh`).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from torchtitan.tools.replaced_kernels import ReplacedKernels
from torchtitan.tools.torch_private import cpu_kernel

_HALVES = (torch.bfloat16, torch.float16)


def float32_sums() -> AbstractContextManager[None]:
    """Sum gradients of type bfloat16 and float16 on the CPU in float32 in the block, in this
    process. Sums of other types stay PyTorch's, and so do those of embeddings and LayerNorm in
    compiled code, which are in float32."""
    return _sums.block()


def _replacing(name: str, sum_wide: Callable[..., object]) -> Callable[..., object]:
    """Return the operation `name` that computes 16-bit tensors by `sum_wide`, which gets
    PyTorch's operation, and others by PyTorch's."""
    original = cpu_kernel(name)

    def operation(first: Tensor, *args: object) -> object:
        if first.dtype in _HALVES:
            return sum_wide(original, first, *args)
        return original(first, *args)

    return operation


def _embedding(
    original: Callable[..., Tensor],
    gradient: Tensor,
    tokens: Tensor,
    n_rows: int,
    padding_index: int,
    *rest: object,
) -> Tensor:
    """Return the gradient (V, D) of a table of V rows from that of its results (..., D), which
    `tokens` (...) chose. Only the chosen rows are in float32 at once."""
    rows, places = tokens.unique(return_inverse=True)
    chosen = (rows == padding_index).nonzero()  # whose gradient is 0
    padding_place = int(chosen) if len(chosen) else -1
    sums = original(gradient.float(), places, len(rows), padding_place, *rest)
    table = gradient.new_zeros(n_rows, gradient.shape[-1])
    table[rows] = sums.to(gradient.dtype)
    return table


def _index_put(
    original: Callable[..., Tensor],
    table: Tensor,
    indices: list[Tensor | None],
    values: Tensor,
    accumulate: bool = False,
    unsafe: bool = False,
) -> Tensor:
    """Add values to the places of a table, or set them; return the table."""
    if not accumulate:
        return original(table, indices, values, accumulate, unsafe)
    sums = original(table.float(), indices, values.float(), accumulate, unsafe)
    return table.copy_(sums)


def _layer_norm(
    original: Callable[..., tuple[Tensor | None, ...]],
    gradient: Tensor,
    x: Tensor,
    shape: list[int],
    mean: Tensor,
    root: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    wanted: list[bool],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the inputs, of the weight and of the bias, whose type may be float32;
    None for those that are not asked for."""
    wide = [None if one is None else one.float() for one in (mean, root, weight, bias)]
    found = original(gradient.float(), x.float(), shape, *wide, wanted)
    of = zip(found, (x, weight, bias), strict=True)
    return tuple(None if one is None or leaf is None else one.to(leaf.dtype) for one, leaf in of)


_IN_FLOAT32: dict[str, Callable[..., object]] = {
    "embedding_dense_backward": _embedding,
    "_index_put_impl_": _index_put,
    "native_layer_norm_backward": _layer_norm,
}
_sums = ReplacedKernels(
    lambda: {name: _replacing(name, sum_wide) for name, sum_wide in _IN_FLOAT32.items()}
)
