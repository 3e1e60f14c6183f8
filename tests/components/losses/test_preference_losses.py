"""Preference losses against formulas written with Python's floats, and their gradients."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from torchtitan.components.losses.preference_losses import (
    KINDS,
    Answers,
    PreferenceLoss,
    aot_loss,
    discopop_loss,
    kto_loss,
    orpo_loss,
)
from torchtitan.tools.errors import UserError

F32, F64 = torch.float32, torch.float64

# Log-probability, reference, tokens.
CHOSEN = [(-12.0, -14.0, 7), (-3.5, -3.0, 2), (-40.0, -41.5, 30)]
REJECTED = [(-15.0, -13.0, 9), (-6.0, -6.5, 3), (-20.0, -17.5, 12)]
BETA, SMOOTHING, GAMMA, WEIGHT, TEMPERATURE = 0.3, 0.2, 0.7, 0.4, 0.8
MIX = ["dpo=0.8", "bco=0.2", "sft=1"]

Answer = tuple[float, float, int]


def log_sigmoid(x: float) -> float:
    return -math.log(1 + math.exp(-x))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def expected_loss(kind: str, chosen: Answer, rejected: Answer, shift: float) -> float:
    """Return the loss of a pair; `shift` is the mean reward of all answers."""
    (c, c_ref, c_n), (r, r_ref, r_n) = chosen, rejected
    win, lose = BETA * (c - c_ref), BETA * (r - r_ref)
    x = win - lose
    q = sigmoid(x)
    per_token = (c - c_ref) / c_n - (r - r_ref) / r_n
    odds = [math.exp(p / n) / (1 - math.exp(p / n)) for p, n in ((c, c_n), (r, r_n))]
    share = sigmoid(x / TEMPERATURE)
    losses = {
        "dpo": -log_sigmoid(x),
        "cdpo": -(1 - SMOOTHING) * log_sigmoid(x) - SMOOTHING * log_sigmoid(-x),
        "robust": (-(1 - SMOOTHING) * log_sigmoid(x) + SMOOTHING * log_sigmoid(-x))
        / (1 - 2 * SMOOTHING),
        "hinge": max(0.0, 1 - x),
        "ipo": (per_token - 1 / (2 * BETA)) ** 2,
        "dpo_normalized": -log_sigmoid(BETA * per_token),
        "exo": q * math.log(q / (1 - SMOOTHING)) + (1 - q) * math.log((1 - q) / SMOOTHING),
        "nca": -log_sigmoid(win) - 0.5 * log_sigmoid(-win) - 0.5 * log_sigmoid(-lose),
        "bco": -log_sigmoid(win - shift) - log_sigmoid(-(lose - shift)),
        "apo_zero": 1 - sigmoid(win) + sigmoid(lose),
        "apo_down": sigmoid(win) + 1 - sigmoid(x),
        "sppo": (c - c_ref - 0.5 / BETA) ** 2 + (r - r_ref + 0.5 / BETA) ** 2,
        "discopop": -(1 - share) * log_sigmoid(x) + share * math.exp(-x),
        "simpo": -log_sigmoid(BETA * (c / c_n - r / r_n) - GAMMA),
        "orpo": -c / c_n - WEIGHT * log_sigmoid(math.log(odds[0] / odds[1])),
        "cpo": -log_sigmoid(BETA * (c - r)) - WEIGHT * c / c_n,
        "sft": -c / c_n,
    }
    losses["mix"] = 0.8 * losses["dpo"] + 0.2 * losses["bco"] + losses["sft"]
    return losses[kind]


def expected_losses(kind: str, chosen: list[Answer], rejected: list[Answer]) -> list[float]:
    if kind.startswith("aot"):
        if kind == "aot":  # margins of the model against those of the reference
            upper, lower = (
                [c[i] - r[i] for c, r in zip(chosen, rejected, strict=True)] for i in (0, 1)
            )
        else:
            upper, lower = ([a[0] - a[1] for a in answers] for answers in (chosen, rejected))
        return [
            -log_sigmoid(BETA * (a - b)) for a, b in zip(sorted(upper), sorted(lower), strict=True)
        ]
    # the values at which the tests begin, since no gradient passes through them
    shift = sum(BETA * (a[0] - a[1]) for a in (*CHOSEN, *REJECTED)) / 6
    return [expected_loss(kind, c, r, shift) for c, r in zip(chosen, rejected, strict=True)]


def answers_of(kind: str) -> Answers:
    log_probs, reference, lengths = torch.tensor([CHOSEN, REJECTED], dtype=F64).permute(2, 1, 0)
    log_probs = log_probs.clone().requires_grad_()
    return Answers(log_probs, reference if KINDS[kind].needs_reference else 0.0, lengths)


def loss_of(kind: str) -> PreferenceLoss:
    config = PreferenceLoss.Config(
        kind=kind,
        mix=MIX if kind == "mix" else [],
        beta=BETA,
        label_smoothing=SMOOTHING if KINDS[kind].is_smoothed else 0.0,
        gamma=GAMMA,
        weight=WEIGHT,
        temperature=TEMPERATURE,
    )
    config.validate()
    return config.build()


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients(kind):
    """Gradients are compared with central differences of the Python formula, whose error is below
    1e-8."""
    answers = answers_of(kind)
    values, _ = loss_of(kind)(answers)
    expected = expected_losses(kind, CHOSEN, REJECTED)
    torch.testing.assert_close(values, torch.tensor(expected, dtype=F64), rtol=1e-12, atol=1e-12)
    values.sum().backward()
    step = 1e-5
    for side in (0, 1):
        for number in range(len(CHOSEN)):
            totals = []
            for change in (-step, step):
                both = [list(CHOSEN), list(REJECTED)]
                log_prob, *rest = both[side][number]
                both[side][number] = (log_prob + change, *rest)
                totals.append(sum(expected_losses(kind, *both)))
            slope = (totals[1] - totals[0]) / (2 * step)
            found = answers.log_probs.grad[number, side].item()
            assert found == pytest.approx(slope, rel=1e-6, abs=1e-8)


def test_sorted_losses_need_no_values():
    """A dry run computes with tensors without values."""
    with FakeTensorMode():
        upper, lower = (torch.zeros(2, 3, requires_grad=True) for _ in range(2))
        aot_loss(upper, lower, torch.ones(2, 3, dtype=torch.bool), BETA).sum().backward()
        assert upper.grad.shape == (2, 3)


@pytest.mark.parametrize("kind", ["bco", "aot", "aot_unpaired", "mix"])
def test_missing_pairs_change_no_loss_of_others(kind):
    answers = answers_of(kind)
    padded = Answers(
        *(
            F.pad(values, (0, 0, 1, 2), value=value)
            for values, value in zip(answers, (-9, -5, 0), strict=True)
        )
    )
    expected, _ = loss_of(kind)(answers)
    found, _ = loss_of(kind)(padded)
    torch.testing.assert_close(found[1:-2], expected)


def test_discopop_of_extreme_margins():
    """exp(-x) alone is infinite in float32 for -1000, and its weight 0."""
    x = torch.tensor([-1000.0, 1000.0], requires_grad=True)
    losses = discopop_loss(x, 0.05)
    losses.sum().backward()
    assert losses.tolist() == [1000, 0]
    assert x.grad.tolist() == [-1, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "mix"}, r"--loss\.mix is \[\], but must be KIND=WEIGHT"),
        ({"mix": ["dpo=1"]}, r"--loss\.mix is \['dpo=1'\], but must be empty without"),
        ({"kind": "mix", "mix": ["dpo"]}, r"--loss\.mix dpo is no KIND=WEIGHT"),
        ({"kind": "mix", "mix": ["mix=1"]}, r"--loss\.mix mix=1 is no KIND=WEIGHT"),
        ({"kind": "mix", "mix": ["dpo=1", "dpo=2"]}, r"--loss\.mix dpo=2 is no"),
        ({"kind": "mix", "mix": ["dpo=nan"]}, r"--loss\.mix dpo=nan is no"),
        ({"kind": "exo"}, r"--loss\.label_smoothing is 0\.0, but must be above 0"),
        ({"kind": "discopop", "temperature": 0.0}, r"--loss\.temperature is 0\.0"),
        ({"verbose_weight": 1.5}, r"--loss\.verbose_weight is 1\.5, but must be from 0 to 1"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        PreferenceLoss.Config(**options).validate()


def test_missing_answers_have_finite_gradients():
    for kind in ("orpo", "ipo", "simpo"):
        log_ratios = torch.zeros(2, requires_grad=True)
        answers = Answers(log_ratios, 0.0, torch.zeros(2))
        loss, _ = PreferenceLoss.Config(kind=kind).build()(answers)
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
