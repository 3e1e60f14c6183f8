"""Products of linear layers in generation in float32 on a CPU, computed by oneDNN in place of PyTorch's BLAS."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.tools.torch_private import onednn_linear

_linear = onednn_linear()
_PLAIN = (Tensor, nn.Parameter)


@contextmanager
def onednn_products(model: nn.Module) -> Iterator[None]:
    """Let the linear layers of a model compute with `product` in the block; not those that something has replaced, such
    as a converter."""
    layers = [layer for layer in model.modules() if type(layer) is nn.Linear and "forward" not in vars(layer)]
    for layer in layers:
        layer.forward = partial(_forward, layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `F.linear(x, weight, bias)`.

    oneDNN is faster than MKL, PyTorch's BLAS, on the processor of docs/performance.md, and most of all for many rows.
    It takes plain tensors only, without gradients: no DTensors, quantized weights or autocast.
    """
    tensors = [x, weight] if bias is None else [x, weight, bias]
    is_plain = all(type(each) in _PLAIN and each.is_cpu and each.dtype == torch.float32 for each in tensors)
    if _linear is None or not is_plain or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return F.linear(x, weight, bias)
    out: Tensor = _linear(x, weight, bias, "none", [], "")
    return out


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    return product(x, layer.weight, layer.bias)
