"""`QuantizedWeight`: the interface of methods of quantization."""

from abc import ABC, abstractmethod

from torch import Tensor

from torchtitan.components.weights.few_bits import FewBits
from torchtitan.protocols.tensor_source import TensorSource, TensorSpec, full_slices


class QuantizedWeight(ABC):
    """A weight that several stored tensors describe."""

    spec: TensorSpec
    stored: tuple[str, ...]
    """Names of its stored tensors."""

    @property
    @abstractmethod
    def kept(self) -> FewBits | str:
        """The form in which the weight can be kept in few bits, or why it cannot."""

    @abstractmethod
    def read(self, source: TensorSource, items: slice) -> Tensor:
        """Return `items` of the first dimension, in the type of `spec`."""

    @abstractmethod
    def part(self, source: TensorSource, items: slice, part: str) -> Tensor:
        """Return `TensorSource.of_part` of `items` of the first dimension, in the shape of the
        values."""


def read_part(source: TensorSource, name: str, part: slice, dim: int = 0) -> Tensor:
    """Return a part of a stored tensor along one dimension."""
    slices = list(full_slices(source.specs[name].shape))
    slices[dim] = part
    return source.read(name, tuple(slices))
