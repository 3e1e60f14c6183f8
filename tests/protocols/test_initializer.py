"""Initial distributions: their values bit by bit on any machine, and their statistics."""

import math
import statistics
import struct

import numpy
import pytest

from torchtitan.protocols.initializer import LogUniform, TruncatedNormal, Uniform, normal_quantile

ALL = (numpy.arange(-(2**23), 2**23) * 2 + 1).astype(numpy.float32) * 2.0**-24
"""Every uniform number."""


def rounded(value: float) -> float:
    """Round to float32. This makes a sum, product, quotient or square root of float32 numbers in
    float64 the correctly rounded one in float32, since float64 has more than twice the digits and
    two more."""
    return struct.unpack("f", struct.pack("f", value))[0]


def polynomial(x: float, coefficients: list[float]) -> float:
    value = 0.0
    for coefficient in coefficients:
        value = rounded(rounded(value * x) + rounded(coefficient))
    return value


def exact_quantile(uniform: float) -> float:
    """AS 241 in Python's arithmetic, one rounding per operation, with the coefficients of the
    paper."""
    half = uniform / 2
    r = rounded(rounded(0.180625) - rounded(half * half))
    if r >= 0:
        above = polynomial(r, [5.9109374720e1, 1.5929113202e2, 5.0434271938e1, 3.3871327179e0])
        below = polynomial(r, [6.7187563600e1, 7.8757757664e1, 1.7895169469e1, 1.0])
        return rounded(rounded(half * above) / below)
    fraction, exponent = math.frexp(rounded(0.5 - abs(half)))
    fraction = rounded(fraction * rounded(math.sqrt(2)))
    s = rounded(rounded(fraction - 1) / rounded(fraction + 1))
    series = rounded(s * polynomial(rounded(s * s), [2 / 9, 2 / 7, 2 / 5, 2 / 3, 2.0]))
    logarithm = rounded(series + rounded((exponent - 0.5) * rounded(math.log(2))))
    r = rounded(rounded(math.sqrt(-logarithm)) - rounded(1.6))
    above = polynomial(r, [1.7023821103e-1, 1.3067284816e0, 2.7568153900e0, 1.4234372777e0])
    below = polynomial(r, [1.2021132975e-1, 7.3700164250e-1, 1.0])
    return math.copysign(rounded(above / below), half)


def test_every_operation_is_rounded_as_ieee_754_defines():
    """This holds on every machine, so the values depend on no version and no processor."""
    uniform = numpy.concatenate([ALL[::9973], ALL[:50], ALL[-50:], ALL[2**23 - 50 : 2**23 + 50]])
    assert normal_quantile(uniform).tolist() == [exact_quantile(each) for each in uniform.tolist()]


def test_quantiles():
    uniform = numpy.concatenate([ALL[::997], ALL[:2000], ALL[-2000:]])
    normal = statistics.NormalDist()
    expected = numpy.array([normal.inv_cdf(0.5 + each / 2) for each in uniform.tolist()])
    # The algorithm's error is 1e-7 of the value, at most 5.5; the float32 operations add a few
    # roundings of 6e-8.
    numpy.testing.assert_allclose(normal_quantile(uniform), expected, rtol=4e-7)


def test_quantiles_increase():
    values = normal_quantile(ALL)
    # Where the two approximations meet, and by rounding, neighbors may differ by a little in the
    # wrong direction.
    assert (numpy.diff(values) > -2e-6).all()
    assert (values == -values[::-1]).all()


@pytest.mark.parametrize("bound", [1.0, 3.0])
def test_truncated_normal(bound):
    values = numpy.sort(TruncatedNormal(0.02, bound)(ALL[::64])).astype(float) / 0.02
    assert -bound - 1e-6 < values[0] and values[-1] < bound + 1e-6
    inside = math.erf(bound / math.sqrt(2))
    density = math.exp(-(bound**2) / 2) / math.sqrt(2 * math.pi)
    assert values.mean() == pytest.approx(0, abs=1e-4)
    assert values.std() == pytest.approx(math.sqrt(1 - 2 * bound * density / inside), rel=1e-4)
    # The distance between empirical and exact CDF is at most the share of a few values: 2**18
    # evenly spaced quantiles.
    exact = numpy.array(
        [0.5 + math.erf(each / math.sqrt(2)) / (2 * inside) for each in values.tolist()]
    )
    assert numpy.abs(exact - (numpy.arange(len(values)) + 0.5) / len(values)).max() < 1e-5


def test_uniform_and_its_logarithm():
    values = Uniform(0.01, 16.0)(ALL)
    assert values.dtype == numpy.float32 and (numpy.diff(values) >= 0).all()
    assert values[0] == pytest.approx(0.01, rel=1e-3) and values[-1] == pytest.approx(16)
    assert values.astype(float).mean() == pytest.approx(8.005, rel=1e-6)
    logarithms = LogUniform(0.01, 16.0)(ALL[::97])
    assert logarithms.dtype == numpy.float32
    # The series has an error of 7e-10, and the largest values 4 are rounded to 2**-22.
    numpy.testing.assert_allclose(
        logarithms, numpy.log(values[::97].astype(float)), rtol=0, atol=1e-6
    )


def test_float32_results():
    assert (
        TruncatedNormal(0.02)(ALL[:8]).dtype
        == normal_quantile(ALL[:8].reshape(2, 4)).dtype
        == numpy.float32
    )
    assert (normal_quantile(ALL[:8].reshape(2, 4)).ravel() == normal_quantile(ALL[:8])).all()
