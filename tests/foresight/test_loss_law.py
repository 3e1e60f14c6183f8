"""The fit of loss over size and length, compared with known laws and with scipy's optimizer."""

import json
import math

import numpy
import pytest

from torchtitan.foresight.loss_law import (
    LADDER,
    Ladder,
    Law,
    Point,
    Setting,
    read_ladder,
    write_ladder,
)
from torchtitan.tools.errors import UserError

# arXiv:2404.10102, a replication of Chinchilla's fit
CHINCHILLA = Law(1.8172, 482.01, 0.3478, 2085.43, 0.3658)
SETTING = Setting("torchtitan.models.llama3", 64, "a digest", 256, "AdamW", 4e-3, ["text"], [])
GRID = [(n, n * ratio) for n in (1e5, 3e5, 1e6, 3e6) for ratio in (10, 20, 40)]


def points(noise: float = 0.0, seed: int = 0) -> list[Point]:
    random = numpy.random.default_rng(seed)
    return [Point(n, d, CHINCHILLA.loss(n, d) * math.exp(noise * random.normal())) for n, d in GRID]


@pytest.mark.parametrize("irreducible", [None, CHINCHILLA.E])
def test_a_law_without_noise_is_found(irreducible):
    fitted = Ladder(points(), irreducible).law
    assert fitted == pytest.approx(CHINCHILLA, rel=1e-4)


def huber_of_logarithms(theta: numpy.ndarray, runs: list[Point]) -> float:
    """Chinchilla's objective as its paper writes it: A, B and E as logarithms."""
    a_log, a, b_log, b, e_log = theta
    total = 0.0
    for run in runs:
        terms = [a_log - a * math.log(run.parameters), b_log - b * math.log(run.tokens), e_log]
        residual = abs(numpy.logaddexp.reduce(terms) - math.log(run.loss))
        total += residual**2 / 2 if residual <= 1e-3 else 1e-3 * (residual - 5e-4)
    return total


def test_the_minimum_is_not_above_that_of_an_independent_optimizer():
    optimize = pytest.importorskip("scipy.optimize")
    runs = points(noise=0.004, seed=3)
    law = Ladder(runs).law
    own = huber_of_logarithms(
        numpy.array([math.log(law.A), law.a, math.log(law.B), law.b, math.log(law.E)]), runs
    )
    starts = [(6.0, 0.35, 7.5, 0.35, 0.6), (5.0, 0.3, 6.0, 0.3, 0.0), (8.0, 0.5, 8.0, 0.5, 0.9)]
    options = {"maxiter": 20_000, "maxfev": 20_000, "xatol": 1e-9, "fatol": 1e-14}
    other = min(
        optimize.minimize(
            huber_of_logarithms, start, (runs,), method="Nelder-Mead", options=options
        ).fun
        for start in starts
    )
    assert own <= other * (1 + 1e-3)  # a simplex ends near the minimum


def test_an_outlier_moves_a_forecast_less_than_it_would_move_least_squares():
    """One run diverged, to 1.3 times its loss; the forecast of ten times the largest size must
    stay within the two percent that a forecast promises."""
    runs = points()
    runs[4] = runs[4]._replace(loss=1.3 * runs[4].loss)
    forecast = Ladder(runs).law.loss(3e7, 6e8)
    assert forecast == pytest.approx(CHINCHILLA.loss(3e7, 6e8), rel=0.02)


@pytest.mark.slow
def test_intervals_hold_the_outcome():
    """Of 5 seeds, a 95 % interval misses 2 or more with a probability of 2 %."""
    truth = CHINCHILLA.loss(1.2e7, 2.4e8)
    forecasts = [Ladder(points(0.004, seed)).forecast(1.2e7, 2.4e8) for seed in range(5)]
    assert sum(one.low <= truth <= one.high for one in forecasts) >= 4
    # and they say something: they are narrower than the loss falls from the largest run
    fall = CHINCHILLA.loss(3e6, 1.2e8) - truth
    assert sum(one.high - one.low < 2 * fall for one in forecasts) >= 4


def test_runs_that_lie_low_widen_the_interval_downwards():
    """Two of twelve runs lie 2 % below the law, or above it."""
    for factor, is_low in ((0.98, True), (1.02, False)):
        runs = [
            run._replace(loss=run.loss * factor) if number in (1, 6) else run
            for number, run in enumerate(points())
        ]
        forecast = Ladder(runs).forecast(1.2e7, 2.4e8)
        below, above = forecast.loss - forecast.low, forecast.high - forecast.loss
        assert (below > 2 * above) == is_low and (above > 2 * below) != is_low


def test_the_error_for_the_largest_size_is_measured_without_it():
    runs = points()
    assert Ladder(runs).measured_error == pytest.approx(0.0, abs=1e-5)
    bent = [run._replace(loss=1.1 * run.loss) if run.parameters == 3e6 else run for run in runs]
    ladder = Ladder(bent)
    assert ladder.measured_error == pytest.approx(1 - 1 / 1.1, rel=1e-3)
    forecast = ladder.forecast(1e7, 2e8)
    assert forecast.high / forecast.loss - 1 >= 0.09
    assert Ladder(runs[:9]).measured_error is None


@pytest.mark.parametrize(
    ("runs", "irreducible", "message"),
    [
        (points()[:5], None, "takes 6 finished runs, .* these are 5, of 2 and 5"),
        (points()[:6], None, "of 3 sizes .* these are 6, of 2 and"),
        (points()[:3] * 2, 1.0, "of 2 sizes .* these are 6, of 1 and 3"),
        (points(), 9.0, "--irreducible is 9.0"),
    ],
)
def test_too_little_is_refused(runs, irreducible, message):
    with pytest.raises(UserError, match=message):
        Ladder(runs, irreducible)


def test_a_ladder_is_read_from_its_folder(tmp_path):
    with pytest.raises(UserError, match="has no ladder.json"):
        read_ladder(tmp_path, SETTING)
    write_ladder(tmp_path, Ladder(points(), 1.5), SETTING)
    assert read_ladder(tmp_path, SETTING) == Ladder(points(), 1.5)
    with pytest.raises(UserError, match=r"another window \(--window\): 256, and this run has 512"):
        read_ladder(tmp_path, SETTING._replace(window=512))
    document = json.loads((tmp_path / LADDER).read_text())
    document["points"][0]["tokens"] = -1.0
    (tmp_path / LADDER).write_text(json.dumps(document))
    with pytest.raises(UserError, match="damaged"):
        read_ladder(tmp_path, SETTING)


@pytest.mark.parametrize("loss", [math.nan, math.inf, 0.0])
def test_a_loss_that_is_not_a_number_is_refused_by_name(loss):
    runs = points()
    runs[2] = runs[2]._replace(loss=loss, name="dial-2_tokens-10")
    with pytest.raises(UserError, match=rf"of the run 'dial-2_tokens-10' is {loss}, but must"):
        Ladder(runs)
