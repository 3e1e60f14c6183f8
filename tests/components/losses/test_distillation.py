"""Divergences between models against plain PyTorch in float64."""

import pytest
import torch
import torch.nn.functional as F

from torchtitan.components.losses.distillation import (
    DistillationLoss,
    Outputs,
    TopTokens,
    divergence,
    top_logits,
)
from torchtitan.protocols.output_head import UNCHANGED, LogitTransform

KINDS = "forward_kl", "reverse_kl", "jensen_shannon"
IGNORED = -100


def outputs(seed: int, vocabulary: int = 13, dim: int = 8) -> Outputs:
    torch.manual_seed(seed)
    return Outputs(
        torch.randn(2, 9, dim, requires_grad=True), torch.randn(vocabulary, dim, requires_grad=True)
    )


def labels() -> torch.Tensor:
    torch.manual_seed(2)
    labels = torch.randint(0, 13, (2, 9))
    labels[0, 2:5] = IGNORED
    return labels


def exact(student: Outputs, teacher: Outputs, kind: str, temperature: float, share: float):
    """Loss, cross entropy, divergence and both gradients in float64, by definition, from all
    logits."""
    hidden, weight = (
        x.detach().double().requires_grad_() for x in (student.hidden, student.weight)
    )
    logits = student.transform(hidden @ weight.T)
    taught = teacher.transform(
        teacher.hidden.detach().double() @ teacher.weight.detach().double().T
    )
    n = min(len(student.weight), len(teacher.weight))
    q, p = ((x[..., :n] / temperature).softmax(-1) for x in (logits, taught))

    def kl(a, b):
        return (a * (a / b).log()).sum(-1)

    values = {
        "forward_kl": lambda: kl(p, q),
        "reverse_kl": lambda: kl(q, p),
        "jensen_shannon": lambda: (kl(p, (p + q) / 2) + kl(q, (p + q) / 2)) / 2,
    }[kind]()
    divergence = (values * (labels() != IGNORED)).sum() * temperature**2
    cross_entropy = F.cross_entropy(
        logits[..., :n].flatten(0, 1), labels().flatten(), reduction="sum", ignore_index=IGNORED
    )
    loss = share * cross_entropy + (1 - share) * divergence
    loss.backward()
    return loss, cross_entropy, divergence, hidden.grad, weight.grad


def check(
    student: Outputs,
    teacher: Outputs,
    kind: str,
    temperature: float,
    share: float,
    chunk_tokens: int,
) -> None:
    """Compare with float64. The float32 sums of about 20 tokens have values up to 100, rounded to
    1e-7 of them."""
    config = DistillationLoss.Config(
        kind=kind, temperature=temperature, cross_entropy_weight=share, chunk_tokens=chunk_tokens
    )
    sums = config.build()(student, teacher, labels())
    (3 * sums[0]).backward()
    *expected, grad_hidden, grad_weight = exact(student, teacher, kind, temperature, share)
    for ours, reference in zip(sums, expected, strict=True):
        torch.testing.assert_close(ours.double(), reference, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(student.hidden.grad.double(), 3 * grad_hidden, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(student.weight.grad.double(), 3 * grad_weight, rtol=1e-4, atol=1e-5)
    assert teacher.hidden.grad is None and teacher.weight.grad is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("temperature", "share", "chunk_tokens"), [(1.0, 0.0, 100), (2.0, 0.3, 4), (0.5, 1.0, 5)]
)
def test_values_and_gradients_equal_float64(kind, temperature, share, chunk_tokens):
    check(outputs(0), outputs(1, dim=6), kind, temperature, share, chunk_tokens)


@pytest.mark.parametrize("sizes", [(13, 16), (16, 13)])
@pytest.mark.parametrize("kind", KINDS)
def test_changed_logits_and_padded_vocabularies(kind, sizes):
    student, teacher = (outputs(seed, size) for seed, size in enumerate(sizes))
    student = Outputs(student.hidden, student.weight, LogitTransform(1.5, softcap=2.0))
    check(student, Outputs(teacher.hidden, teacher.weight, LogitTransform(0.5)), kind, 2.0, 0.3, 4)


def test_models_that_give_logits_match_output_weights():
    student, teacher, loss = (
        outputs(0),
        outputs(1),
        DistillationLoss.Config(cross_entropy_weight=0.5).build(),
    )
    expected = loss(student, teacher, labels())
    logits = [Outputs(x.hidden @ x.weight.T, None) for x in (student, teacher)]
    sums = loss(*logits, labels())
    expected[0].backward()
    gradients = student.hidden.grad.clone()
    student.hidden.grad = None
    sums[0].backward()
    torch.testing.assert_close(sums, expected)
    torch.testing.assert_close(student.hidden.grad, gradients)


def test_bfloat16_sums_in_float32():
    student, teacher = (
        Outputs(*(t.detach().bfloat16().requires_grad_() for t in (x.hidden, x.weight)), UNCHANGED)
        for x in (outputs(0), outputs(1))
    )
    loss, *_ = DistillationLoss.Config(chunk_tokens=4).build()(student, teacher, labels())
    loss.backward()
    expected, *_, grad_hidden, _ = exact(student, teacher, "forward_kl", 1.0, 0.0)
    assert loss.dtype == torch.float32
    # bfloat16 logits have 8 bits: each is rounded by up to 2**-9 of values up to 8.
    torch.testing.assert_close(loss.double(), expected, rtol=2e-2, atol=5e-2)
    torch.testing.assert_close(student.hidden.grad.double(), grad_hidden, rtol=5e-2, atol=1e-1)


def test_a_teacher_of_itself_gives_no_gradient():
    student = outputs(0)
    for kind in KINDS:
        loss, _, _ = DistillationLoss.Config(kind=kind).build()(student, outputs(0), labels())
        loss.backward()
        assert loss.item() == pytest.approx(0, abs=1e-5)
        assert student.hidden.grad.abs().max() < 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 5, 12, 13])
def test_top_tokens_equal_a_teacher_with_one_event_for_the_others(kind, k):
    """Value and gradient of the divergence over k + 1 events, in float64 by definition and by
    autograd: 1e-12. It never exceeds the divergence over all tokens, and equals it if the event is
    one token or none."""
    torch.manual_seed(0)
    temperature = 1.7
    student, teacher = (3 * torch.randn(6, 13, dtype=torch.float64) for _ in range(2))
    student.requires_grad_()
    q, p = ((x / temperature).softmax(-1) for x in (student, teacher))
    top, ids = p.topk(k)
    events = [(top, q.gather(1, ids))]
    if k < 13:
        events.append(tuple((1 - x.gather(1, ids).sum(1, keepdim=True)) for x in (p, q)))
    p_events, q_events = (torch.cat(parts, dim=1) for parts in zip(*events, strict=True))

    def kl(a, b):
        return (a * (a / b).log()).sum(-1)

    mean = (p_events + q_events) / 2
    expected = {
        "forward_kl": lambda: kl(p_events, q_events),
        "reverse_kl": lambda: kl(q_events, p_events),
        "jensen_shannon": lambda: (kl(p_events, mean) + kl(q_events, mean)) / 2,
    }[kind]() * temperature**2
    (gradients,) = torch.autograd.grad(expected.sum(), student)
    scores = student.detach()
    taught = top_logits(scores, ids, p_events.log(), temperature)
    values, ours = divergence(scores, taught, kind, temperature)
    torch.testing.assert_close(values, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours, gradients, rtol=1e-10, atol=1e-12)
    whole, _ = divergence(scores, teacher, kind, temperature)
    assert (values <= whole + 1e-12).all() and (k < 12) == bool((values < whole - 1e-9).any())


def test_top_tokens_of_a_teacher_replace_its_outputs():
    """All 13 tokens give the same loss and gradients as the teacher itself, except for rounding in
    float32."""
    loss = DistillationLoss.Config(kind="jensen_shannon", temperature=2.0, chunk_tokens=4).build()
    teacher = Outputs(
        *(x.detach() for x in (outputs(1, 16).hidden, outputs(1, 16).weight)), LogitTransform(0.5)
    )
    results = []
    for known in (teacher, loss.top_tokens(teacher, 13, 13)):
        student = outputs(0)
        sums = loss(student, known, labels())
        sums[0].backward()
        results.append((*sums, student.hidden.grad, student.weight.grad))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)
    assert (
        isinstance(known, TopTokens)
        and known.ids.shape == (2, 9, 13)
        and known.ids.dtype == torch.int32
    )
    few = loss.top_tokens(teacher, 13, 4).log_probs
    torch.testing.assert_close(few.exp().sum(-1), torch.ones(2, 9))
    torch.testing.assert_close(few[..., :4], known.log_probs[..., :4])


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.1, 0.5, 0.8])
def test_the_weighted_jensen_shannon_divergence_equals_trl(beta):
    """TRL has no factor of the temperature squared. Both round float32 values of up to 10 to
    1e-6."""
    pytest.importorskip("trl")
    from trl.experimental.gkd import GKDTrainer

    torch.manual_seed(0)
    logits, taught = torch.randn(2, 2, 9, 13)
    logits.requires_grad_()
    expected = GKDTrainer.generalized_jsd_loss(
        logits, taught, labels=labels(), beta=beta, temperature=2.0, reduction="sum"
    )
    (gradient,) = torch.autograd.grad(expected, logits)
    config = DistillationLoss.Config(kind="jensen_shannon", beta=beta, temperature=2.0)
    loss, *_ = config.build()(Outputs(logits, None), Outputs(taught, None), labels())
    (found,) = torch.autograd.grad(loss, logits)
    assert loss.item() == pytest.approx(4 * expected.item(), rel=1e-5)
    torch.testing.assert_close(found, 4 * gradient, rtol=1e-4, atol=1e-6)
