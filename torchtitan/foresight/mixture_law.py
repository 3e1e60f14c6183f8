"""Loss over the shares of data sources, as a regression over small runs with random mixtures, and a
mixture with a low forecast (RegMix, Liu et al. 2024, arXiv:2407.01492, with its linear model, of
the loss's logarithm).

The model has one number for each source, so it ranks mixtures and tells which sources help; it
cannot tell that a share is best in the middle of its range.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy
from numpy.typing import NDArray

from torchtitan.tools.errors import UserError

Numbers = NDArray[numpy.float64]

_LEAST_STRENGTH, _MOST_STRENGTH = 0.1, 5.0
"""Strengths of the Dirichlet distributions; the lowest strengths give mixtures of nearly one source
(arXiv:2407.01492, appendix)."""

_MOST_DRAWS = 20_000
"""Draws in a row that find no new mixture: two sources have only 101 in percent."""

_CANDIDATES = 100_000
_BEST = 100
"""The proposal is the mean of the best candidates (arXiv:2407.01492, section 3)."""

_PERCENT = 100


def draw_mixtures(around: Sequence[float], n: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Return different mixtures in percent: `around` first, then random ones. `around` has a share
    above 0 for each source. Raise `UserError` if the draws find fewer than `n` mixtures."""
    shares = numpy.array(around) / sum(around)
    found = {_in_percent(shares): None}
    random = numpy.random.default_rng(seed)
    n_known = 0
    while len(found) < n and n_known < _MOST_DRAWS:
        mixture = _in_percent(_draw(random, shares, 1)[0])
        n_known = n_known + 1 if mixture in found else 0
        found[mixture] = None
    if len(found) >= n:
        return list(found)
    weights = " ".join(f"{weight:g}" for weight in around)
    raise UserError(
        f"{n} different mixtures in whole percent were not found around {weights}, only "
        f"{len(found)}; set a lower --runs, or weights of --around that differ less"
    )


def _draw(random: numpy.random.Generator, shares: Numbers, n: int) -> Numbers:
    """Draw mixtures, (n, sources), from Dirichlet distributions around shares."""
    low, high = math.log(_LEAST_STRENGTH), math.log(_MOST_STRENGTH)
    strengths = numpy.exp(random.uniform(low, high, (n, 1))) * len(shares)
    gammas = random.standard_gamma(strengths * shares) + 1e-300
    mixtures: Numbers = gammas / gammas.sum(axis=1, keepdims=True)
    return mixtures


def _in_percent(shares: Numbers) -> tuple[int, ...]:
    """Round shares to whole percent that add up to 100, by the largest remainders."""
    exact = shares * _PERCENT
    whole = numpy.floor(exact).astype(int)
    left = _PERCENT - int(whole.sum())
    whole[numpy.argsort(whole - exact, kind="stable")[:left]] += 1
    return tuple(whole.tolist())


@dataclass(frozen=True)
class MixtureLaw:
    """The logarithm of the loss as a linear function of shares, by least squares.

    Args:
        mixtures: percent of each source, for each run.
        losses: of the runs, on held-out data.

    Raises:
        UserError: for fewer runs than sources and two more, for mixtures that do not tell the
            sources apart, and for a loss that is not a finite number above 0.
    """

    mixtures: Sequence[tuple[int, ...]]
    losses: Sequence[float]

    def __post_init__(self) -> None:
        n_sources = len(self.mixtures[0])
        if len(self.losses) < n_sources + 2:
            raise UserError(
                f"{len(self.losses)} runs are too few for {n_sources} sources; it takes "
                f"{n_sources + 2}"
            )
        if numpy.linalg.matrix_rank(self._shares) < n_sources:
            raise UserError("the mixtures do not tell the sources apart; train more runs")
        if not all(0 < loss < math.inf for loss in self.losses):
            raise UserError("a run has no finite loss above 0; remove it, or change its options")

    @cached_property
    def _shares(self) -> Numbers:
        return numpy.array(self.mixtures) / _PERCENT

    @cached_property
    def coefficients(self) -> Numbers:
        """Logarithm of the loss of each source alone, by the regression."""
        found: Numbers = numpy.linalg.lstsq(self._shares, numpy.log(self.losses), rcond=None)[0]
        return found

    def loss(self, mixture: Sequence[int]) -> float:
        """Return the forecast loss of a mixture in percent."""
        return float(numpy.exp(numpy.array(mixture) / _PERCENT @ self.coefficients))

    @cached_property
    def left_out(self) -> Numbers:
        """Forecast of each run by the other runs, (n,)."""
        logs = numpy.log(self.losses)
        influence = self._shares @ numpy.linalg.pinv(self._shares)
        errors = (logs - self._shares @ self.coefficients) / (1 - influence.diagonal())
        forecasts: Numbers = numpy.exp(logs - errors)
        return forecasts

    @property
    def error(self) -> float:
        """The largest relative error of a run's forecast by the others."""
        return float(numpy.abs(self.left_out / numpy.array(self.losses) - 1).max())

    @property
    def rank_correlation(self) -> float:
        """Spearman's correlation of the runs' losses and their forecasts by the others."""
        forecast, measured = (
            numpy.argsort(numpy.argsort(x)).astype(float) for x in (self.left_out, self.losses)
        )
        return float(numpy.corrcoef(forecast, measured)[0, 1])

    def proposal(self, around: Sequence[float]) -> tuple[int, ...]:
        """Return the mean of the mixtures with the lowest forecasts, out of many that are drawn
        like the runs' mixtures; deterministic."""
        shares = numpy.array(around) / sum(around)
        candidates = _draw(numpy.random.default_rng(1), shares, _CANDIDATES)
        order = numpy.argsort(candidates @ self.coefficients, kind="stable")
        return _in_percent(candidates[order[:_BEST]].mean(axis=0))
