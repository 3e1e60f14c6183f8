"""`Measures`: means that a loss measures beside itself."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class Measures:
    """Weighted means by name, such as the margin of a preference method; the sums stay on the device.

    Args:
        names: of the means.
        device: where the sums are.
        dtype: of the sums.
    """

    def __init__(self, names: Sequence[str], *, device: torch.device, dtype: torch.dtype = torch.float64):
        self.names = list(names)
        self._sums = torch.zeros(len(self.names), 2, device=device, dtype=dtype)

    def add(self, name: str, total: Tensor, weight: Tensor) -> None:
        """Add a batch's sum and its weight, two scalars.

        Raises:
            ValueError: if `name` is none of the names.
        """
        self._sums[self.names.index(name)] += torch.stack((total, weight)).detach().to(self._sums)

    def take(self) -> Tensor:
        """Return this rank's sums and weights since the last call, flat (2 n,), and start again from 0."""
        taken, self._sums = self._sums, torch.zeros_like(self._sums)
        return taken.flatten()

    def means(self, sums: Sequence[float]) -> dict[str, float]:
        """Return the means from what `take` gave, summed over ranks; NaN without any weight."""
        pairs = zip(self.names, sums[::2], sums[1::2], strict=True)
        return {name: total / weight if weight else math.nan for name, total, weight in pairs}
