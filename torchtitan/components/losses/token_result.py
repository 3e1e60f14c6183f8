"""Results of a frozen model for each token, which a loss reads and a cache keeps."""

from typing import NamedTuple

import torch


class TokenResult(NamedTuple):
    """Form of one tensor of results, without the dimension of the tokens."""

    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    below: int | None = None
    """Bound of whole numbers that begin at 0; None if any value is possible."""
