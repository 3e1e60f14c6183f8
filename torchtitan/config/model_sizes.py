"""Sizes that a decoder can have, known without importing the model, which needs torch."""

import math
from typing import Protocol

from torchtitan.tools.errors import UserError, require

MOST_LAYERS = 2_000

_MOST = {
    **dict.fromkeys(("dim", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "vocab_size"), 2**24),
    **{"n_layers": MOST_LAYERS, "max_seq_len": 2**32},
}
"""Maximum sizes, far above any real model's: a larger one is a mistake, or an attack on memory."""

_MOST_PARAMETERS = 2**44


class Sizes(Protocol):
    """Fields of `--model` that every decoder has."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int | None
    ffn_dim: int
    vocab_size: int | None
    max_seq_len: int
    norm_eps: float


def head_width(dim: int, n_heads: int, head_dim: int | None) -> int:
    """Return the width of one head, as given or from `dim`."""
    return dim // n_heads if head_dim is None else head_dim


def check_decoder_sizes(sizes: Sizes) -> None:
    """Raise `UserError` for sizes that no decoder can have."""
    for name, most in _MOST.items():
        size = getattr(sizes, name)
        fits = size is None or 1 <= size <= most
        require(fits, f"--model.{name}", size, f"from 1 to {most}")
    require(0 < sizes.norm_eps < math.inf, "--model.norm_eps", sizes.norm_eps, "above 0")
    dim = sizes.dim
    n_heads, n_kv_heads = sizes.n_heads, sizes.n_kv_heads
    width = head_width(dim, n_heads, sizes.head_dim)
    if sizes.head_dim is not None and (sizes.head_dim < 2 or sizes.head_dim % 2):
        raise UserError(f"--model.head_dim is {sizes.head_dim}, but must be even and at least 2")
    if sizes.head_dim is None and (dim % n_heads or width % 2):
        raise UserError(
            f"--model.dim {dim} must give each of --model.n_heads {n_heads} an even width"
        )
    if n_heads % n_kv_heads:
        raise UserError(f"--model.n_kv_heads {n_kv_heads} must divide --model.n_heads {n_heads}")
    matrices = width * 2 * (n_heads + n_kv_heads) + 3 * sizes.ffn_dim
    n_parameters = dim * (sizes.n_layers * matrices + 2 * (sizes.vocab_size or 0))
    if n_parameters > _MOST_PARAMETERS:
        raise UserError(
            f"--model.dim {dim}, n_layers {sizes.n_layers}, n_heads {n_heads}, ffn_dim "
            f"{sizes.ffn_dim} and vocab_size {sizes.vocab_size} make a model of "
            f"{n_parameters:.1e} parameters, and {_MOST_PARAMETERS:.1e} are the most"
        )
