"""Operations of a class of transformers, counted in its forward pass on tensors without memory."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from torchtitan.protocols.model import BaseModel, converted_modules
from torchtitan.tools.logging import logger
from torchtitan.tools.torch_private import OpOverload, TorchDispatchMode

_STEPS = 8, 64
"""Tokens by which passes grow to find loops over tokens, or over chunks of that size. Those over larger ones run."""

_CALLS = "calls"
"""Counts all operations, among the names of weights."""


def forward_flops(plain: nn.Module, blocks: Iterable[str], seq_len: int) -> dict[str, float]:
    """Return the operations per token of the products with each weight, by name, and without weights (""), in a forward
    pass over `seq_len` tokens: matrix products and convolutions, in attention with all keys, or with as many as its
    window has. Equal `blocks` are computed once.

    A longer pass of a class that loops over tokens or chunks is extrapolated from short ones: its operations are a
    polynomial of the length, of degree 2. `plain` is the class on the meta device with attention "eager", and cannot be
    used afterwards. A class that reads values, as to group tokens by expert, is taken to use every matrix once, which
    a warning says.
    """
    plain.bfloat16()  # grouped products know no other type
    with torch.device("meta"), torch.no_grad(), _attention_in_windows():
        with _Count(plain, blocks) as counter:

            def count(length: int) -> Counter[str]:
                counter.flops = Counter()
                plain(input_ids=torch.zeros(1, length, dtype=torch.long), use_cache=False)
                return counter.flops

            try:
                total = _extrapolated(count, seq_len)
            except RuntimeError as error:
                logger.warning(
                    "operations are estimated as 6 per parameter, used or not: %s", str(error).split("\n")[0]
                )
                return {name: 2.0 * size for name, size in counter.sizes.items()}
    del total[_CALLS]
    return {name: flops / seq_len for name, flops in total.items()}


def _extrapolated(count: Callable[[int], Counter[str]], seq_len: int) -> dict[str, float]:
    for step in _STEPS:
        first, second = count(step), count(2 * step)
        if first[_CALLS] != second[_CALLS] and seq_len > 3 * step:
            third, n = count(3 * step), seq_len / step - 1
            return {
                name: a + n * (second[name] - a) + n * (n - 1) / 2 * (third[name] - 2 * second[name] + a)
                for name, a in first.items()
            }
    return dict(count(seq_len))


def with_backward(forward: Mapping[str, float], model: BaseModel) -> float:
    """Return the operations per token of a forward and a backward pass of `model`, whose weights have the names in
    `forward`. The backward pass takes as many for the gradients of inputs, and as many for those of trained weights;
    adapters add 6 per element."""
    total, trained = sum(forward.values()), {name for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        return total
    frozen = sum(flops for name, flops in forward.items() if name and name not in trained)
    adapters = sum(
        module.get_parameter(name).numel() for _, module in converted_modules(model) for name in module.added
    )
    return 3 * total - frozen + 6 * adapters


class _Count(TorchDispatchMode):
    """Counts operations, and lets blocks that equal an earlier one return its result, counted once more."""

    def __init__(self, plain: nn.Module, blocks: Iterable[str]) -> None:
        super().__init__()
        self.flops: Counter[str] = Counter()
        matrices = {name: parameter for name, parameter in plain.named_parameters() if parameter.ndim > 1}
        self.sizes = {name: parameter.numel() for name, parameter in matrices.items()}
        self._names = {parameter.untyped_storage(): name for name, parameter in matrices.items()}
        self._of_kinds: dict[Any, tuple[Counter[str], Any]] = {}
        for name in blocks:
            self._share(plain.get_submodule(name), f"{name}.")

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.flops[_CALLS] += 1
        if func.overloadpacket is torch.ops.aten._local_scalar_dense:
            return True  # a check of a mask, as for texts of equal length
        result = func(*args, **(kwargs or {}))
        grouped = _grouped_flops if func.overloadpacket.__name__ == "_grouped_mm" else None
        if formula := grouped or flop_registry.get(func.overloadpacket):
            names = [self._names.get(arg.untyped_storage(), "") for arg in args if isinstance(arg, Tensor)]
            self.flops[max(names, default="")] += formula(*args, **(kwargs or {}), out_val=result)
        return result

    def _share(self, block: nn.Module, prefix: str) -> None:
        kind, own = _kind(block), block.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            key = kind, *(arg.shape for arg in args if isinstance(arg, Tensor))
            if key not in self._of_kinds:
                before, self.flops = self.flops, Counter()
                result = own(*args, **kwargs)
                inside = Counter({name.replace(prefix, "*", 1): n for name, n in self.flops.items()})
                self._of_kinds[key], self.flops = (inside, result), before
            flops, result = self._of_kinds[key]
            self.flops.update({name.replace("*", prefix, 1): n for name, n in flops.items()})
            return result

        block.forward = forward  # type: ignore[method-assign]


def _kind(block: nn.Module) -> str:
    """Return what determines a block's operations: its parts, their sizes and settings, without its number."""
    return repr(
        [
            (name, type(part), [(key, p.shape) for key, p in part.named_parameters(recurse=False)])
            + tuple((k, v) for k, v in vars(part).items() if isinstance(v, (int, float, str)) and "layer_i" not in k)
            for name, part in block.named_modules()
        ]
    )


def _grouped_flops(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """Return the operations of a product of groups of rows (N, K) with one matrix (E, K, M) for each group."""
    return 2 * a.numel() * b.shape[-1]


@contextmanager
def _attention_in_windows() -> Iterator[None]:
    """Replace every class's own attention ("eager") by its products with as many keys as the window has."""

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, **options: Any) -> tuple[Tensor, Tensor]:
        n_keys = min(options.get("sliding_window") or k.shape[2], k.shape[2])
        keys, values = (x[:, :, :n_keys].repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        scores = q @ keys.mT
        return (scores @ values).transpose(1, 2).contiguous(), scores

    ALL_ATTENTION_FUNCTIONS["eager"] = attend
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS["eager"]
