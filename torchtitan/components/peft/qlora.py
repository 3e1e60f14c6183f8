"""QLoRA (Dettmers et al. 2023, arXiv:2305.14314): low-rank adapters beside weights that are kept in 4 bits."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from torchtitan.components.peft.converter import LoRA
from torchtitan.components.peft.lora import LoRALinear
from torchtitan.components.quantization.nf4 import BLOCK_SIZE, NF4, pack, quantized_linear, unpack, unpack_weight
from torchtitan.protocols.initializer import DerivedRows, initializer_of
from torchtitan.protocols.sharding import with_features


class QLoRALinear(LoRALinear):
    """A linear layer with an adapter, like `LoRALinear`, whose frozen weight is in 4 bits.

    In place of `weight` it has the three tensors of `torchtitan.components.quantization.nf4`, frozen: `packed`
    (out, in / 2), `scales` (out, in / 64) and `scale_ranges` (out, 8), all uint8. They are computed with in the type of
    the inputs.
    """

    packed: nn.Parameter
    scales: nn.Parameter
    scale_ranges: nn.Parameter

    def _take_base(self, linear: nn.Linear) -> None:
        plain, start = linear.weight, initializer_of(linear, "weight")
        for name, tensor in pack(plain)._asdict().items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
            self._start_with(**{name: DerivedRows("weight", plain.shape, start, partial(_packed, name))})
        with_features(self, packed=("out", "in"), scales=("out", "in"), scale_ranges=("out", None))

    def base_weight(self) -> Tensor:
        """The frozen weight (out, in), unpacked, in the type of the adapter."""
        return unpack_weight(self.packed, self.scales, self.scale_ranges, self.lora_A.dtype)

    def base_output(self, x: Tensor) -> Tensor:
        """What the plain layer computes with the weight in 4 bits, with its bias: (..., in) → (..., out)."""
        y = quantized_linear(x, self.packed, self.scales, self.scale_ranges)
        return y if self.bias is None else y + self.bias

    def base_rows(self, rows: Tensor) -> Tensor:
        """Rows of the plain weight, (n, in), as they are in 4 bits, in float32."""
        return unpack(*pack(rows), torch.float32)

    def plain_state(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The plain layer's parameters, the adapter merged into the unpacked weight: all in float32."""
        form = NF4(*(own[name] for name in NF4._fields))
        return super().plain_state({**own, "weight": unpack(*form, torch.float32)})

    def plain_types(self, own: Mapping[str, Tensor]) -> dict[str, torch.dtype]:
        """bfloat16, which the values of the weight in 4 bits are exact in; the bias has its own."""
        return {**super().plain_types(own), "weight": torch.bfloat16}


def _packed(name: str, rows: Tensor) -> Tensor:
    tensor: Tensor = getattr(pack(rows), name)
    return tensor


class QLoRA(LoRA):
    """Low-rank adapters on linear layers whose weights are kept in 4 bits. An embedding that gets an adapter keeps its
    weights as they are."""

    linear_class: ClassVar[type[LoRALinear]] = QLoRALinear

    @dataclass(kw_only=True, slots=True)
    class Config(LoRA.Config):
        """Adapters beside weights in 4 bits (NF4): their size, and where they are."""

    def accepts(self, name: str, layer: nn.Module) -> bool:
        """All layers are accepted.

        Raises:
            UserError: as `LoRA.accepts`; for a linear layer whose inputs are not whole blocks of NF4, by name.
        """
        if isinstance(layer, nn.Linear) and layer.in_features % BLOCK_SIZE:
            raise self._refusal(
                name, f"weights in 4 bits need a multiple of {BLOCK_SIZE} inputs, not {layer.in_features}"
            )
        return super().accepts(name, layer)
