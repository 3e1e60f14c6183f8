"""Probability that one of several sampled answers is right."""

import math


def pass_at_k(n: int, n_right: int, k: int) -> float:
    """Return the unbiased estimate, from `n` answers of which `n_right` are right, that at least
    one of `k` answers is: 1 - C(n - n_right, k) / C(n, k) (arXiv:2107.03374, equation 1)."""
    assert 0 <= n_right <= n and 1 <= k <= n
    return 1 - math.comb(n - n_right, k) / math.comb(n, k)
