"""The tensors of two sources as one."""

from torch import Tensor

from torchtitan.components.checkpoint.formats.source import Slices, TensorSource


class JoinedSource(TensorSource):
    """All tensors of one source, and of another those that the first lacks.

    Args:
        first: goes before the other.
        other: the other.
    """

    def __init__(self, first: TensorSource, other: TensorSource):
        self._first, self._other = first, other
        self.forms = {**other.forms, **first.forms}

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        """The tensor of that name, or the part of it that `slices` says."""
        source = self._first if name in self._first.forms else self._other
        return source.read(name, slices)
