"""Loss over size and length, L(N, D) = E + A N^-a + B D^-b (Chinchilla, arXiv:2203.15556, approach
3), fitted to the runs of a ladder, and its forecast of a larger run.

The fit minimizes Huber's loss of the logarithm's residuals, as there. The error of a forecast comes
from a bootstrap of the residuals, and is at least the error that the same form makes for the
ladder's own largest size when it is fitted without that size.
"""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy
from numpy.typing import NDArray

from torchtitan.tools import durable
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import read_object

Numbers = NDArray[numpy.float64]

LADDER = "ladder.json"
"""File in a ladder's folder with the points of its finished runs."""

_HUBER = 1e-3
"""Residuals of the logarithm beyond this count linearly (arXiv:2203.15556)."""

_EXPONENTS = (0.1, 0.3, 0.7)
_PARTS = (0.2, 0.5, 0.8)
"""Starting points: exponents, and E as a part of the lowest loss."""

_ITERATIONS = 200
_RESAMPLES = 200
_LEVEL = 0.95
_ROUGH = 1e-4
"""Tolerance of a fit to resampled data: far below the differences between these."""
_LEAST_LOG = -30.0


class Setting(NamedTuple):
    """Everything that is equal in all runs of a ladder, and must be in a run that it forecasts."""

    family: str
    """Import path of the family's package."""
    width_per_layer: int
    tokenizer: str
    """Fingerprint (`Tokenizer.fingerprint`)."""
    window: int
    """Tokens."""
    optimizer: str
    """AdamW or Muon."""
    base_rate: float
    """`--optimizer.lr`, which is the same at every size."""
    data: list[str]
    """Training data, as configured."""
    held_out_data: list[str]

    def check(self, own: "Setting", folder: Path) -> None:
        """Raise `UserError` if a run's setting, `own`, differs from this one, of the ladder in
        `folder`."""
        for name, theirs, ours in zip(self._fields, self, own, strict=True):
            if theirs != ours:
                raise UserError(
                    f"--ladder '{folder}' was trained with another {name.replace('_', ' ')} "
                    f"({_OPTIONS[name]}): {theirs}, and this run has {ours}. Its law does not hold "
                    "for this run; set the same, or train another ladder"
                )


_OPTIONS = {
    "family": "--module",
    "width_per_layer": "--width_per_layer",
    "tokenizer": "--hf_assets_path",
    "window": "--window",
    "optimizer": "--muon",
    "base_rate": "--optimizer.lr",
    "data": "--dataloader.dataset",
    "held_out_data": "--validator.dataset",
}
"""Field of `Setting` → option."""


class Point(NamedTuple):
    """A finished run."""

    parameters: float
    """Number of parameters that multiply every token."""
    tokens: float
    loss: float
    """On held-out data, in nats per token."""
    name: str = ""


class Law(NamedTuple):
    """`E + A N^-a + B D^-b`."""

    E: float
    A: float
    a: float
    B: float
    b: float

    def loss(self, parameters: float, tokens: float) -> float:
        return self.E + self.A * parameters**-self.a + self.B * tokens**-self.b

    def __str__(self) -> str:
        return f"{self.E:.4g} + {self.A:.4g} N^-{self.a:.3f} + {self.B:.4g} D^-{self.b:.3f}"


class Forecast(NamedTuple):
    """The loss of a run, and the interval in which 95 of 100 are expected."""

    loss: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.loss:.4f} ({self.low:.4f} to {self.high:.4f})"


class _Data(NamedTuple):
    """Logarithms of sizes and lengths, relative to their means, and of losses."""

    n: Numbers
    d: Numbers
    log_loss: Numbers
    means: tuple[float, float]

    @classmethod
    def of(cls, points: Sequence[Point]) -> "_Data":
        table = numpy.log([[point.parameters, point.tokens, point.loss] for point in points])
        n, d, log_loss = table.T
        return cls(n - n.mean(), d - d.mean(), log_loss, (float(n.mean()), float(d.mean())))


def too_few(runs: Sequence[Any], irreducible: float | None) -> str:
    """Return why a law cannot be fitted to runs with `parameters` and `tokens`, or nothing."""
    least, least_sizes = (6, 3) if irreducible is None else (5, 2)
    n_sizes = len({run.parameters for run in runs})
    n_lengths = len({run.tokens for run in runs})
    if len(runs) >= least and n_sizes >= least_sizes and n_lengths >= 2:
        return ""
    return (
        f"a fit takes {least} finished runs, of {least_sizes} sizes and 2 lengths, and these are "
        f"{len(runs)}, of {n_sizes} and {n_lengths}; add --sizes or --tokens_per_parameter"
    )


@dataclass(frozen=True)
class Ladder:
    """The finished runs of a ladder, and the law fitted to them.

    Args:
        points: at least one more than the law has numbers to fit, of two sizes and two lengths;
            three sizes if E is fitted, which two do not tell from A and a.
        irreducible: E; None: it is fitted too.

    Raises:
        UserError: for too few points, and for a loss that is not a finite number above 0.
    """

    points: Sequence[Point]
    irreducible: float | None = None

    def __post_init__(self) -> None:
        for point in self.points:
            if not 0 < point.loss < math.inf:
                raise UserError(
                    f"the loss of the run '{point.name}' is {point.loss}, but must be a finite "
                    "number above 0; remove the run"
                )
        if lack := too_few(self.points, self.irreducible):
            raise UserError(lack)
        lowest = min(point.loss for point in self.points)
        if self.irreducible is not None and not 0 < self.irreducible < lowest:
            raise UserError(
                f"--irreducible is {self.irreducible}, but must be above 0 and below the lowest "
                f"loss, {lowest:.4f}"
            )

    @cached_property
    def _data(self) -> _Data:
        return _Data.of(self.points)

    @cached_property
    def _theta(self) -> Numbers:
        return _fit(self._data, _starts(self._data, self.irreducible), self.irreducible)

    @cached_property
    def law(self) -> Law:
        return _law(self._theta, self._data.means, self.irreducible)

    @cached_property
    def residuals(self) -> Numbers:
        """Fitted over measured loss, as differences of logarithms."""
        return _residuals(self._theta, self._data, self.irreducible)

    @cached_property
    def measured_error(self) -> float | None:
        """The largest relative error for the runs of the largest size when the law is fitted
        without them; None if the other runs are too few."""
        largest = max(point.parameters for point in self.points)
        others = [point for point in self.points if point.parameters < largest]
        try:
            smaller = Ladder(others, self.irreducible)
        except UserError:
            return None
        held_out = [point for point in self.points if point.parameters == largest]
        return max(
            abs(smaller.law.loss(point.parameters, point.tokens) / point.loss - 1)
            for point in held_out
        )

    def forecast(self, parameters: float, tokens: float) -> Forecast:
        """Return the loss of another run. The interval is deterministic."""
        loss = self.law.loss(parameters, tokens)
        random = numpy.random.default_rng(0)
        n_points, n_fitted = len(self.points), len(self._theta)
        fitted = self._data.log_loss + self.residuals
        noise = self.residuals.mean() - self.residuals  # measured over fitted, around 0
        spread = noise * math.sqrt(n_points / (n_points - n_fitted))
        losses = []
        for _ in range(_RESAMPLES):
            drawn = random.choice(spread, n_points + 1)
            data = self._data._replace(log_loss=fitted + drawn[1:])
            theta = _fit(data, [self._theta], self.irreducible, _ROUGH)
            law = _law(theta, data.means, self.irreducible)
            losses.append(law.loss(parameters, tokens) * math.exp(drawn[0]))
        tail = (1 - _LEVEL) / 2
        low, high = (float(x) for x in numpy.quantile(losses, [tail, 1 - tail]))
        error = loss * (self.measured_error or 0.0)
        return Forecast(loss, min(low, loss - error), max(high, loss + error))


def write_ladder(folder: Path, ladder: Ladder, setting: Setting) -> None:
    """Write the ladder for `read_ladder`."""
    document = {
        "irreducible": ladder.irreducible,
        "setting": setting._asdict(),
        "points": [point._asdict() for point in ladder.points],
    }
    durable.write(folder / LADDER, json.dumps(document, indent=1) + "\n")


def read_ladder(folder: Path, setting: Setting) -> Ladder:
    """Return the ladder in a folder of `torchtitan ladder`. Raise `UserError` if it has no, broken
    or too few finished runs, and if it has another setting than the run to forecast."""
    path = folder / LADDER
    if not path.is_file():
        raise UserError(f"'{folder}' has no {LADDER}; name a folder of torchtitan ladder")
    document = read_object(path)
    try:
        points = [Point(**row) for row in document["points"]]
        theirs = Setting(**document["setting"])
        numbers = [number for point in points for number in point[:2]]
        is_valid = all(0 < number < 1e40 for number in numbers)
        is_valid &= all(type(point.loss) is float for point in points)
    except (KeyError, TypeError):
        is_valid = False
    if not is_valid:
        raise UserError(
            f"'{path}' is damaged or of an earlier version; run torchtitan ladder again"
        )
    theirs.check(setting, folder)
    return Ladder(points, document.get("irreducible"))


def _starts(data: _Data, irreducible: float | None) -> list[Numbers]:
    """Return starting points: the logarithms of A at the mean size, a, B at the mean length, b,
    and E if it is fitted."""
    lowest, typical = math.exp(data.log_loss.min()), math.exp(data.log_loss.mean())
    floors = [part * lowest for part in _PARTS] if irreducible is None else [irreducible]
    found = []
    for a, b, floor in itertools.product(_EXPONENTS, _EXPONENTS, floors):
        half = max(1e-6, (typical - floor) / 2)
        found.append(numpy.log([half, a, half, b] + ([floor] if irreducible is None else [])))
    return found


def _terms(
    theta: Numbers, data: _Data, irreducible: float | None
) -> tuple[Numbers, Numbers, float]:
    """Return both falling terms, and E."""
    log_A, log_a, log_B, log_b = theta[:4]
    floor = math.exp(theta[4]) if irreducible is None else irreducible
    of_size: Numbers = numpy.exp(log_A - math.exp(log_a) * data.n)
    of_length: Numbers = numpy.exp(log_B - math.exp(log_b) * data.d)
    return of_size, of_length, floor


def _residuals(theta: Numbers, data: _Data, irreducible: float | None) -> Numbers:
    of_size, of_length, floor = _terms(theta, data, irreducible)
    difference: Numbers = numpy.log(of_size + of_length + floor) - data.log_loss
    return difference


def _jacobian(theta: Numbers, data: _Data, irreducible: float | None) -> Numbers:
    of_size, of_length, floor = _terms(theta, data, irreducible)
    columns = [
        of_size,
        -of_size * math.exp(theta[1]) * data.n,
        of_length,
        -of_length * math.exp(theta[3]) * data.d,
    ]
    if irreducible is None:
        columns.append(numpy.full_like(data.n, floor))
    return numpy.stack(columns, axis=1) / (of_size + of_length + floor)[:, None]


def _huber(residuals: Numbers) -> float:
    size = numpy.abs(residuals)
    inside = size <= _HUBER
    return float(numpy.where(inside, size**2 / 2, _HUBER * (size - _HUBER / 2)).sum())


def _fit(
    data: _Data, starts: Sequence[Numbers], irreducible: float | None, tolerance: float = 1e-12
) -> Numbers:
    """Return the best of the minima that are reached from the starting points."""
    reached = [_descend(start, data, irreducible, tolerance) for start in starts]
    return min(reached, key=lambda theta: _huber(_residuals(theta, data, irreducible)))


def _descend(theta: Numbers, data: _Data, irreducible: float | None, tolerance: float) -> Numbers:
    """Minimize Huber's loss by Levenberg and Marquardt's method with reweighted residuals, until a
    step improves it by less than a part `tolerance`."""
    damping = 1e-3
    residuals = _residuals(theta, data, irreducible)
    value = _huber(residuals)
    for _ in range(_ITERATIONS):
        weights = numpy.minimum(1.0, _HUBER / numpy.maximum(numpy.abs(residuals), 1e-300))
        jacobian = _jacobian(theta, data, irreducible)
        curvature = jacobian.T @ (weights[:, None] * jacobian)
        gradient = jacobian.T @ (weights * residuals)
        scale = numpy.diag(numpy.maximum(curvature.diagonal(), 1e-12))
        step = numpy.linalg.solve(curvature + damping * scale, -gradient)
        # a term that vanishes must not leave the numbers of float64
        candidate = numpy.clip(theta + numpy.clip(step, -2.0, 2.0), _LEAST_LOG, -_LEAST_LOG)
        candidate[[1, 3]] = numpy.minimum(candidate[[1, 3]], math.log(5.0))
        new_residuals = _residuals(candidate, data, irreducible)
        new_value = _huber(new_residuals)
        if new_value >= value:
            damping *= 4
            if damping > 1e12:
                break
            continue
        is_done = value - new_value < tolerance * value
        theta, residuals = candidate, new_residuals
        value = new_value
        damping /= 3
        if is_done:
            break
    return theta


def _law(theta: Numbers, means: tuple[float, float], irreducible: float | None) -> Law:
    log_A, log_a, log_B, log_b = (float(x) for x in theta[:4])
    a, b = math.exp(log_a), math.exp(log_b)
    floor: Any = irreducible if irreducible is not None else math.exp(theta[4])
    return Law(floor, math.exp(log_A + a * means[0]), a, math.exp(log_B + b * means[1]), b)
