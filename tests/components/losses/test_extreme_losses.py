"""Losses of policies, preferences and distillation at extreme inputs: float32 against formulas in
float64."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.processes import run_processes
from torchtitan.components.losses import policy_loss, preference_losses
from torchtitan.components.losses.cross_entropy import cross_entropy_
from torchtitan.components.losses.distillation import DistillationLoss, Kind, Outputs, divergence
from torchtitan.experiments.reward.trainer import bradley_terry_loss
from torchtitan.experiments.rl.advantages import estimate_advantages
from torchtitan.protocols.output_head import UNCHANGED
from torchtitan.tools.errors import UserError

REL = 1e-5
"""float32 rounds arguments of up to 20 to 1e-6, and their exponentials by as much."""

LOG_RATIOS = [
    -1e4,
    -199.0,
    -20.5,
    -1.0,
    -1e-4,
    0.0,
    1e-4,
    0.3,
    19.5,
    20.5,
    88.0,
    199.0,
    1e4,
    math.inf,
]


@pytest.mark.parametrize("advantage", [-2.0, 0.0, 2.0])
@pytest.mark.parametrize("bound", [math.log(3), 20.0])
def test_policy_losses_are_bounded(advantage: float, bound: float) -> None:
    """As by the two-sided clipping of arXiv:1912.09729, with c = exp(bound)."""
    log_ratios = torch.tensor(LOG_RATIOS, requires_grad=True)
    losses, _ = policy_loss.clipped_losses(
        log_ratios, torch.full_like(log_ratios, advantage), 0.2, 0.2, bound
    )
    losses.sum().backward()
    assert log_ratios.grad is not None and log_ratios.grad.isfinite().all()
    for log_ratio, loss, gradient in zip(
        LOG_RATIOS, losses.tolist(), log_ratios.grad.tolist(), strict=True
    ):
        ratio = math.exp(min(log_ratio, 700.0))
        objective = min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
        if advantage < 0:
            objective = max(objective, math.exp(bound) * advantage)
        assert loss == pytest.approx(-objective, rel=REL), log_ratio
        if log_ratio > bound or advantage == 0:
            assert gradient == 0


@pytest.mark.parametrize("method", sorted(policy_loss.METHODS))
def test_extreme_samples_have_finite_losses_and_are_counted(method: str) -> None:
    log_probs = torch.tensor([-200.0, -1.0, -1.0, -200.0], requires_grad=True)
    tokens = {
        "old_logprobs": torch.tensor([-1.0, -200.0, -200.0, -1.0]),
        "logprobs": torch.tensor([-200.0, -1.0, -200.0, -1.0]),
        "advantages": torch.tensor([1.0, -1.0, 1.0, -1.0]),
        "reference": torch.tensor([-1.0, -200.0, -1.0, -200.0]),
        "samples": torch.tensor([0, 1, 2, 3]),
    }
    config = policy_loss.PolicyLoss.Config(method=method, beta=0.1)
    loss, _, measures = config.build(max_new_tokens=4)(log_probs, tokens)
    loss.backward()
    assert loss.isfinite() and log_probs.grad is not None and log_probs.grad.isfinite().all()
    assert all(values.isfinite().all() for values in measures.values())
    assert measures["bound_fraction"].tolist() == [False, True, False, False]


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "unbiased"])
def test_the_largest_bound_is_finite(kind: str) -> None:
    """A token that has become much more likely, and is much likelier for the reference."""
    log_probs = torch.tensor([-200.0], requires_grad=True)
    tokens = {
        "old_logprobs": torch.tensor([-400.0]),
        "logprobs": torch.tensor([-400.0]),
        "advantages": torch.tensor([-1.0]),
        "reference": torch.tensor([-1.0]),
        "samples": torch.tensor([0]),
    }
    config = policy_loss.PolicyLoss.Config(kl=kind, beta=0.1, max_log_ratio=40.0)
    config.validate()
    loss, _, measures = config.build(max_new_tokens=4)(log_probs, tokens)
    loss.backward()
    assert loss.isfinite() and log_probs.grad is not None and log_probs.grad.isfinite().all()
    assert measures["kl"].isfinite().all()


def test_k3_is_the_formula_up_to_its_bound_and_its_tangent_beyond() -> None:
    for d in (-1e4, -100.0, -1.0, -1e-3, 1e-3, 1.0, 19.0, 20.0, 21.0, 199.0, 1e4):
        log_prob = torch.zeros(1, requires_grad=True)
        estimate = policy_loss.kl_estimates(log_prob, torch.tensor([d]), "k3")
        (gradient,) = torch.autograd.grad(estimate.sum(), log_prob)
        near = min(d, 20.0)
        expected = math.expm1(near) - near + math.expm1(20.0) * max(d - 20.0, 0)
        # expm1(d) and d of 1e-3 cancel to 5e-7, which float32 resolves to 1e-10.
        assert estimate.item() == pytest.approx(expected, rel=REL, abs=2e-10)
        # PyTorch's gradient of expm1 adds 1 to its result.
        assert gradient.item() == pytest.approx(-math.expm1(near), rel=REL, abs=1e-7)


@pytest.mark.parametrize("bound", [0.0, -1.0, math.inf, math.nan, 41.0])
def test_bounds_out_of_range_are_refused(bound: float) -> None:
    with pytest.raises(UserError, match="--policy.max_log_ratio"):
        policy_loss.PolicyLoss.Config(max_log_ratio=bound).validate()


def test_advantages_far_from_0_are_whitened_exactly() -> None:
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(3):
        rewards = 1000 + 0.1 * torch.randn(1, 50, generator=generator)
        labels = torch.full((1, 50), 7)
        labels[0, ::7] = -100
        batch = {"labels": labels, "samples": torch.arange(50)[None], "advantages": rewards.clone()}
        batch["old_values"] = torch.zeros(1, 50)
        batches.append((batch, rewards[labels != -100].double()))
    rewards = torch.cat([own for _, own in batches])
    estimate_advantages([batch for batch, _ in batches], 0.95)
    found = torch.cat([batch["advantages"][batch["labels"] != -100] for batch, _ in batches])
    expected = (rewards - rewards.mean()) / rewards.std(correction=0)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    assert all((batch["advantages"][batch["labels"] == -100] == 0).all() for batch, _ in batches)


def rewards_of_rank(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rewards and labels of a rank, of other lengths and around other means."""
    generator = torch.Generator().manual_seed(rank)
    length = (40, 17)[rank]
    labels = torch.full((1, length), 7)
    labels[0, :: rank + 3] = -100
    return 1000 + rank + 0.1 * torch.randn(1, length, generator=generator), labels


def whiten_on_rank(folder: Path) -> None:
    rank = torch.distributed.get_rank()
    rewards, labels = rewards_of_rank(rank)
    samples, values = torch.arange(labels.numel())[None], torch.zeros_like(rewards)
    batch = {"labels": labels, "samples": samples, "advantages": rewards, "old_values": values}
    estimate_advantages([batch], 0.95)
    torch.save(batch["advantages"], folder / f"{rank}.pt")


@pytest.mark.slow
def test_advantages_are_whitened_over_all_ranks(tmp_path: Path) -> None:
    """Equal to float64 over the tokens of both ranks: a mean of the ranks' means would differ by 20
    deviations."""
    run_processes(whiten_on_rank, 2, tmp_path)
    parts = [rewards_of_rank(rank) for rank in range(2)]
    rewards = torch.cat([rewards[labels != -100].double() for rewards, labels in parts])
    expected = (rewards - rewards.mean()) / rewards.std(correction=0)
    found = [
        torch.load(tmp_path / f"{rank}.pt")[labels != -100]
        for rank, (_, labels) in enumerate(parts)
    ]
    torch.testing.assert_close(torch.cat(found).double(), expected, rtol=1e-6, atol=1e-6)


MARGINS = [-1e6, -200.0, -1.0, 0.0, 1.0, 200.0, 1e6]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_of_pairs_equal_float64(smoothing: float) -> None:
    functions = {
        "dpo": lambda x: preference_losses.dpo_loss(x, smoothing),
        "robust": lambda x: preference_losses.robust_loss(x, smoothing),
        "hinge": preference_losses.hinge_loss,
        "ipo": lambda x: preference_losses.ipo_loss(x, 0.1),
        "cpo": lambda x: preference_losses.cpo_loss(x, x, 0.5),
        "kto": lambda x: preference_losses.kto_loss(x, 3.0, x > 0),
        "reward": lambda x: bradley_terry_loss(x, -x, 0.5),
        "orpo": lambda x: preference_losses.orpo_loss(
            -x.abs() - 1e-3, -x.abs().flip(0) - 1e-3, 0.5
        ),
    }
    for name, function in functions.items():
        results = []
        for dtype in (torch.float32, torch.float64):
            x = torch.tensor(MARGINS, dtype=dtype, requires_grad=True)
            loss = function(x)
            (gradient,) = torch.autograd.grad(loss.sum(), x)
            results.append(torch.stack((loss.detach(), gradient)).double())
        assert all(result.isfinite().all() for result in results), name
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6, msg=name)


def logits(n: int = 6, size: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    student, teacher = (4 * torch.randn(n, size, generator=generator) for _ in range(2))
    return student, teacher


def expected_divergence(student: torch.Tensor, teacher: torch.Tensor, kind: Kind) -> torch.Tensor:
    """By the definition, with 0 log 0 = 0, in float64."""
    q, p = student.softmax(dim=1), teacher.softmax(dim=1)
    m = (p + q) / 2

    def kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        is_there = a > 0
        ones = torch.ones_like(a)
        return (a * (a.where(is_there, ones).log() - b.where(is_there, ones).log())).sum(dim=1)

    formulas = {"forward_kl": lambda: kl(p, q), "reverse_kl": lambda: kl(q, p)}
    formulas["jensen_shannon"] = lambda: (kl(p, m) + kl(q, m)) / 2
    return formulas[kind]()


@pytest.mark.parametrize("excluded", ["teacher", "both"])
@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jensen_shannon"])
def test_divergences_with_excluded_tokens_equal_float64(kind: Kind, excluded: str) -> None:
    student, teacher = logits()
    teacher[1:4, 2] = teacher[5, :7] = -math.inf
    # which is infinite if only the teacher excludes a token
    if excluded == "both" or kind == "reverse_kl":
        student[1:4, 2] = student[5, :7] = -math.inf
    values, gradients = divergence(student, teacher, kind, 1.0)
    exact = student.double().requires_grad_()
    expected = expected_divergence(exact, teacher.double(), kind)
    (of_logits,) = torch.autograd.grad(expected.sum(), exact)
    torch.testing.assert_close(values.double(), expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients.double(), of_logits.nan_to_num(), rtol=1e-5, atol=1e-6)


def test_reverse_kl_of_a_token_that_only_the_teacher_excludes_is_infinite() -> None:
    student, teacher = logits()
    teacher[0, 3] = -math.inf
    values, _ = divergence(student, teacher, "reverse_kl", 1.0)
    assert values[0] == math.inf and values[1:].isfinite().all()


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("kind", ["forward_kl", "jensen_shannon"])
def test_the_loss_of_distillation_is_finite_with_excluded_tokens(kind: Kind, share: float) -> None:
    """Also at ignored positions, and with a label that the student excludes if labels have no
    weight."""
    student, teacher = logits()
    teacher[:, 0] = student[:, 0] = -math.inf
    labels = torch.tensor([1, 2, -100, 4, -100, 5 if share else 0])
    student.requires_grad_()
    loss = DistillationLoss.Config(kind=kind, cross_entropy_weight=share).build()
    total, _, _ = loss(Outputs(student[None], None), Outputs(teacher[None], None), labels[None])
    total.backward()
    is_valid = labels != -100
    expected = (1 - share) * expected_divergence(student.detach().double(), teacher.double(), kind)[
        is_valid
    ].sum()
    if share:
        expected += share * F.cross_entropy(student.detach().double(), labels, reduction="sum")
    assert total.item() == pytest.approx(expected.item(), rel=REL)
    assert (
        student.grad is not None
        and student.grad.isfinite().all()
        and (student.grad[~is_valid] == 0).all()
    )


def test_cross_entropy_with_excluded_tokens() -> None:
    """Token 0 represents labels of other ranks and missing labels."""
    student, _ = logits()
    student[:, 0] = -math.inf
    labels = torch.tensor([1, -100, 3, 4, -100, 5])
    losses = cross_entropy_(
        student.clone(), labels, transform=UNCHANGED, shard=None, needs_grad=False
    )
    torch.testing.assert_close(losses, F.cross_entropy(student, labels, reduction="none"))
