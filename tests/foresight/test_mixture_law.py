"""The regression of loss over shares: against scikit-learn, and on losses of a known law."""

import numpy as np
import pytest
from sklearn.linear_model import LinearRegression

from torchtitan.foresight.mixture_law import MixtureLaw, draw_mixtures
from torchtitan.tools.errors import UserError

TRUE = np.log([3.0, 4.0, 6.0])


def losses_of(mixtures: list[tuple[int, ...]], noise: float = 0.0) -> list[float]:
    errors = noise * np.random.default_rng(0).standard_normal(len(mixtures))
    return np.exp(np.array(mixtures) / 100 @ TRUE + errors).tolist()


def test_mixtures_are_different_percents_around_the_given_one():
    mixtures = draw_mixtures([6, 3, 1], 200)
    assert mixtures[0] == (60, 30, 10) and len(set(mixtures)) == 200
    assert all(sum(shares) == 100 and min(shares) >= 0 for shares in mixtures)
    assert mixtures == draw_mixtures([6, 3, 1], 200) != draw_mixtures([6, 3, 1], 200, seed=1)
    # the mean of a Dirichlet distribution is its center; 0.25 is the largest standard deviation of
    # a share, and four of the mean's are allowed
    assert np.abs(np.mean(mixtures, axis=0) - [60, 30, 10]).max() < 4 * 25 / 200**0.5
    assert max(shares[2] for shares in mixtures) > 40  # and they are spread
    assert draw_mixtures([1, 1, 1], 1) == [(34, 33, 33)]


@pytest.mark.parametrize(("around", "n"), [([1, 1], 102), ([1, 1], 10**9), ([1, 1e20], 4)])
def test_more_mixtures_than_there_are_do_not_take_forever(around, n):
    with pytest.raises(UserError, match=f"{n} different mixtures .* set a lower --runs"):
        draw_mixtures(around, n)


def test_the_fit_is_the_least_squares_of_scikit_learn():
    mixtures = draw_mixtures([1, 1, 1], 12)
    losses = losses_of(mixtures, noise=0.02)
    law = MixtureLaw(mixtures, losses)
    x, y = np.array(mixtures) / 100, np.log(losses)
    assert np.allclose(law.coefficients, LinearRegression(fit_intercept=False).fit(x, y).coef_)
    for left_out in range(12):
        others = [number for number in range(12) if number != left_out]
        fitted = LinearRegression(fit_intercept=False).fit(x[others], y[others])
        expected = np.exp(fitted.predict(x[left_out : left_out + 1])[0])
        assert law.left_out[left_out] == pytest.approx(expected, rel=1e-9)
    assert law.error == pytest.approx(np.abs(law.left_out / losses - 1).max())
    assert 0.5 < law.rank_correlation < 1


def test_a_known_law_is_found_and_its_best_source_proposed():
    mixtures = draw_mixtures([1, 1, 1], 10)
    law = MixtureLaw(mixtures, losses_of(mixtures))
    assert np.allclose(law.coefficients, TRUE) and law.error < 1e-9  # float64
    assert law.rank_correlation == pytest.approx(1)
    assert law.loss((50, 50, 0)) == pytest.approx(12**0.5)
    proposal = law.proposal([1, 1, 1])
    assert sum(proposal) == 100 and proposal[0] > 90
    assert proposal == MixtureLaw(mixtures, losses_of(mixtures)).proposal([1, 1, 1])


@pytest.mark.parametrize(
    ("mixtures", "losses", "message"),
    [
        ([(50, 50), (40, 60), (30, 70)], [1.0, 2.0, 3.0], "3 runs are too few for 2 sources"),
        ([(50, 50)] * 4, [1.0] * 4, "do not tell the sources apart"),
        (draw_mixtures([1, 1], 4), [1.0, 2.0, 3.0, float("nan")], "no finite loss above 0"),
    ],
)
def test_fits_that_say_nothing_are_refused(mixtures, losses, message):
    with pytest.raises(UserError, match=message):
        MixtureLaw(mixtures, losses)
