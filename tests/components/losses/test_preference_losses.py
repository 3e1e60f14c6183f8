"""Preference losses against formulas written with Python's floats, and their gradients."""

import math

import pytest
import torch

from torchtitan.components.losses.preference_losses import PreferenceLoss, kto_loss, orpo_loss

F32, F64 = torch.float32, torch.float64

# Log-probability, reference, tokens.
CHOSEN = [(-12.0, -14.0, 7), (-3.5, -3.0, 2), (-40.0, -41.5, 30)]
REJECTED = [(-15.0, -13.0, 9), (-6.0, -6.5, 3), (-20.0, -18.0, 12)]
BETA, SMOOTHING, GAMMA, WEIGHT = 0.3, 0.2, 0.7, 0.4


def log_sigmoid(x: float) -> float:
    return -math.log(1 + math.exp(-x))


def expected_loss(
    kind: str, chosen: tuple[float, float, int], rejected: tuple[float, float, int]
) -> float:
    (c, c_ref, c_n), (r, r_ref, r_n) = chosen, rejected
    x = BETA * ((c - c_ref) - (r - r_ref))
    per_token = (c - c_ref) / c_n - (r - r_ref) / r_n
    odds = [math.exp(p / n) / (1 - math.exp(p / n)) for p, n in ((c, c_n), (r, r_n))]
    losses = {
        "dpo": -log_sigmoid(x),
        "cdpo": -(1 - SMOOTHING) * log_sigmoid(x) - SMOOTHING * log_sigmoid(-x),
        "robust": (-(1 - SMOOTHING) * log_sigmoid(x) + SMOOTHING * log_sigmoid(-x))
        / (1 - 2 * SMOOTHING),
        "hinge": max(0.0, 1 - x),
        "ipo": (per_token - 1 / (2 * BETA)) ** 2,
        "dpo_normalized": -log_sigmoid(BETA * per_token),
        "simpo": -log_sigmoid(BETA * (c / c_n - r / r_n) - GAMMA),
        "orpo": -c / c_n - WEIGHT * log_sigmoid(math.log(odds[0] / odds[1])),
        "cpo": -log_sigmoid(BETA * (c - r)) - WEIGHT * c / c_n,
    }
    return losses[kind]


def answers(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-ratios and lengths, (pairs, 2)."""
    log_probs, reference, lengths = torch.tensor([CHOSEN, REJECTED], dtype=torch.float64).permute(
        2, 1, 0
    )
    without = kind in ("simpo", "orpo", "cpo")
    return log_probs if without else log_probs - reference, lengths


@pytest.mark.parametrize(
    "kind", ["dpo", "cdpo", "robust", "hinge", "ipo", "dpo_normalized", "simpo", "orpo", "cpo"]
)
def test_losses_and_gradients(kind):
    """Gradients are compared with central differences of the Python formula, whose error is below
    1e-8."""
    smoothing = SMOOTHING if kind in ("cdpo", "robust") else 0.0
    loss = PreferenceLoss.Config(
        kind=kind, beta=BETA, label_smoothing=smoothing, gamma=GAMMA, weight=WEIGHT
    ).build()
    log_ratios, lengths = answers(kind)
    log_ratios.requires_grad_()
    values, _ = loss(log_ratios, lengths)
    expected = [expected_loss(kind, *pair) for pair in zip(CHOSEN, REJECTED, strict=True)]
    torch.testing.assert_close(
        values, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12
    )
    values.sum().backward()
    step = 1e-5
    for number, (c, r) in enumerate(zip(CHOSEN, REJECTED, strict=True)):
        for side, (low, high) in (
            (0, ([((c[0] + d, *c[1:]), r) for d in (-step, step)])),
            (1, ([(c, (r[0] + d, *r[1:])) for d in (-step, step)])),
        ):
            slope = (expected_loss(kind, *high) - expected_loss(kind, *low)) / (2 * step)
            assert log_ratios.grad[number, side].item() == pytest.approx(slope, rel=1e-6, abs=1e-8)


def test_missing_answers_have_finite_gradients():
    for kind in ("orpo", "ipo", "simpo"):
        log_ratios = torch.zeros(2, requires_grad=True)
        loss, _ = PreferenceLoss.Config(kind=kind).build()(log_ratios, torch.zeros(2))
        (loss * 0).backward()
        assert log_ratios.grad.tolist() == [0, 0]


def test_orpo_of_almost_certain_answers():
    """Log odds in float32 against float64, to the rounding of float32. At probability 1, loss and
    gradient are finite, and the loss is the one of the largest probability below 1."""
    other = torch.tensor(-0.5)
    for mean in (-30.0, -0.69, -1e-3, -1e-7):
        measured, expected = (
            orpo_loss(torch.tensor(mean, dtype=t), other.to(t), 1.0) for t in (F32, F64)
        )
        torch.testing.assert_close(measured.double(), expected, rtol=1e-6, atol=1e-7)
        odds = [math.log(math.exp(p) / -math.expm1(p)) for p in (mean, -0.5)]
        assert expected.item() == pytest.approx(-mean - log_sigmoid(odds[0] - odds[1]), rel=1e-12)
    certain = torch.zeros((), requires_grad=True)
    loss = orpo_loss(other, certain, 1.0)
    loss.backward()
    assert loss == orpo_loss(other, torch.tensor(-torch.finfo(F32).eps), 1.0)
    assert certain.grad == 0


def test_kto_loss():
    rewards, baseline = [0.5, -0.2, 1.0], 0.1
    desirable = [True, False, False]
    expected = [
        1 - 1 / (1 + math.exp(-(reward - baseline) * (1 if good else -1)))
        for reward, good in zip(rewards, desirable, strict=True)
    ]
    values = kto_loss(torch.tensor(rewards, dtype=torch.float64), baseline, torch.tensor(desirable))
    torch.testing.assert_close(values, torch.tensor(expected, dtype=torch.float64))
