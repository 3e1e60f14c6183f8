"""Policy losses against formulas in float64, and against TRL's loss of the same batch."""

import math
from typing import Any

import pytest
import torch

from torchtitan.components.losses import policy_loss
from torchtitan.components.losses.entropies import log_probs_and_entropies
from torchtitan.components.losses.entropy_control import EntropyControl
from torchtitan.components.losses.policy_loss import METHODS, PolicyLoss
from torchtitan.protocols.output_head import LogitTransform
from torchtitan.tools.errors import UserError

F64 = torch.float64
LENGTHS = (3, 6, 1, 5)
PLACES = [number for number, length in enumerate(LENGTHS) for _ in range(length)]


def random_tokens() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities in float64 and the other tokens of four samples."""
    generator = torch.Generator().manual_seed(0)
    n = len(PLACES)
    log_probs, change, far = (
        torch.randn(n, generator=generator, dtype=F64) * scale for scale in (1.0, 0.4, 0.7)
    )
    log_probs = -1 - log_probs.abs()
    advantages = torch.tensor([1.3, -0.4, 0.0, -1.1], dtype=F64)[PLACES]
    old = log_probs - change
    tokens = {"old_logprobs": old, "logprobs": old, "advantages": advantages}
    tokens |= {"samples": torch.tensor(PLACES), "reference": log_probs + far}
    return log_probs.requires_grad_(), tokens


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def gradient_weight(method: str, ratio: float, sample: float, product: float, a: float) -> float:
    """Return the factor of the gradient of a token's log-probability, from the papers' gradients:
    the ratio of the token, the mean one of its sample, and their product."""
    low, high = METHODS[method].clip

    def clipped(r: float) -> float:
        is_cut = (a > 0 and r > 1 + high) or (a < 0 and r < 1 - low)
        return 0.0 if is_cut else r * a

    if method in ("gspo", "gspo_token", "luspo"):
        return clipped(sample)
    if method == "cispo":
        return min(max(ratio, 1 - low), 1 + high) * a
    if method == "sapo":
        t = 1.0 if a > 0 else 1.05
        gate = sigmoid(t * (ratio - 1))
        return 4 * gate * (1 - gate) * ratio * a
    if method == "vespo":
        k, c = (2.0, 3.0) if a > 0 else (3.0, 2.0)
        return product**k * math.exp(c * (1 - product)) * a
    if method == "rejection":
        return a
    return clipped(ratio)


@pytest.mark.parametrize("method", METHODS)
def test_gradients_equal_the_papers(method):
    log_probs, tokens = random_tokens()
    loss, weight, _ = PolicyLoss.Config(method=method).build(max_new_tokens=8)(log_probs, tokens)
    loss.backward()
    row = METHODS[method]
    assert weight == (len(PLACES) if row.per_token else len(LENGTHS))
    change = (log_probs - tokens["old_logprobs"]).tolist()
    for n, place in enumerate(PLACES):
        own = [change[m] for m in range(len(PLACES)) if PLACES[m] == place]
        total = sum(own)
        a = tokens["advantages"][n].item()
        expected = -gradient_weight(
            method, math.exp(change[n]), math.exp(total / len(own)), math.exp(total), a
        )
        expected /= {"mean": len(own), "constant": 8, "sum": 1}[row.token_weight]
        assert log_probs.grad[n].item() == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_the_ratio_of_gspo_token_has_the_value_of_gspo():
    log_probs, tokens = random_tokens()
    losses = [
        PolicyLoss.Config(method=method).build(max_new_tokens=8)(log_probs, tokens)[0]
        for method in ("gspo", "gspo_token")
    ]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-12)
    tokens["advantages"] = torch.linspace(-1, 1, len(PLACES), dtype=F64)  # of tokens
    gradients = [
        torch.autograd.grad(
            PolicyLoss.Config(method=method).build(max_new_tokens=8)(log_probs, tokens)[0],
            log_probs,
        )[0]
        for method in ("gspo", "gspo_token")
    ]
    assert (gradients[0] - gradients[1]).abs().max() > 1e-3


def test_the_unbiased_divergence_has_the_gradient_of_the_divergence():
    """Summed over a whole distribution, not sampled: sum p (r k3), with r = p / p_old and samples
    from p_old = p, has the gradient of KL(p‖q), and k3 alone that of KL(q‖p)."""
    generator = torch.Generator().manual_seed(0)
    logits, other = torch.randn(2, 7, generator=generator, dtype=F64)
    logits.requires_grad_()
    log_p, log_q = logits.log_softmax(0), other.log_softmax(0)
    p = log_p.detach().exp()
    divergence = (log_p.exp() * (log_p - log_q)).sum()
    (expected,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    zeros = torch.zeros(7, dtype=F64)
    tokens = {"old_logprobs": log_p.detach(), "logprobs": log_p.detach(), "advantages": zeros}
    tokens |= {"samples": torch.arange(7), "reference": log_q}
    found = {}
    for kind in ("unbiased", "k3"):
        loss = PolicyLoss.Config(beta=1.0, kl=kind).build(max_new_tokens=1)
        _, _, measures = loss(log_p, tokens)
        total = (p * measures["kl"]).sum()
        assert total.item() == pytest.approx(divergence.item(), rel=1e-12)
        (found[kind],) = torch.autograd.grad(total, logits, retain_graph=True)
    torch.testing.assert_close(found["unbiased"], expected, rtol=1e-9, atol=1e-12)
    assert (found["k3"] - expected).abs().max() > 1e-2


def test_advantages_of_the_step_and_of_the_best():
    rewards = torch.tensor([[1.0, 0.0, 3.0], [2.0, 2.0, 2.0]], dtype=F64)
    scaled = policy_loss.group_advantages(rewards, "batch_scaled", 0.5)
    expected = torch.tensor([[-1 / 3, -4 / 3, 5 / 3], [0.0, 0.0, 0.0]], dtype=F64) / 0.5001
    torch.testing.assert_close(scaled, expected)
    best = policy_loss.group_advantages(rewards, "best")
    assert best.tolist() == [[0, 0, 1], [1, 0, 0]]


def test_penalties_reduce_the_rewards_of_tokens():
    """REINFORCE++: without values and with λ = 1, the sum of the rewards from each token on."""
    rewards = torch.tensor([2.0, 2.0, 2.0, 5.0], dtype=F64)
    penalties = torch.tensor([0.1, 0.2, 0.4, 0.8], dtype=F64)
    samples, zeros = torch.tensor([0, 0, 0, 1]), torch.zeros(4, dtype=F64)
    found = policy_loss.generalized_advantages(rewards, zeros, samples, 1.0, penalties)
    assert found.tolist() == pytest.approx([2 - 0.7, 2 - 0.6, 2 - 0.4, 5 - 0.8])


@pytest.mark.parametrize("has_weight", [True, False])
def test_log_probs_and_entropies_equal_float64(has_weight):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 5, 6, generator=generator, requires_grad=True)
    weight = torch.randn(6 if not has_weight else 9, 6, generator=generator, requires_grad=True)
    labels = torch.tensor([[-100, 1, 2, 3, -100], [4, -100, 0, 1, 2]])
    outputs = (hidden, weight) if has_weight else (hidden @ weight.T, None)
    transform = LogitTransform(multiplier=0.7, softcap=3.0)
    both = log_probs_and_entropies(*outputs, labels, transform=transform, chunk_tokens=2)
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    p = (3 * torch.tanh(wide[0] @ wide[1].T * 0.7 / 3)).softmax(-1)
    likelihoods = p.log().gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    for values, exact in zip(both, (likelihoods, -(p * p.log()).sum(-1)), strict=True):
        expected = torch.where(labels >= 0, exact, 0)
        torch.testing.assert_close(values.double(), expected, rtol=1e-5, atol=1e-6)
        gradients = torch.autograd.grad(values.sum(), (hidden, weight), retain_graph=True)
        exact_gradients = torch.autograd.grad(expected.sum(), wide, retain_graph=True)
        for found, gradient in zip(gradients, exact_gradients, strict=True):
            torch.testing.assert_close(found.double(), gradient, rtol=1e-4, atol=1e-5)


def test_impossible_tokens_add_nothing_to_entropies():
    """Neither a logit of -inf nor a probability that underflows."""
    logits = torch.tensor([[[0.0, 1.0, -200.0], [0.0, 1.0, -math.inf]]], requires_grad=True)
    _, entropies = log_probs_and_entropies(logits, None, torch.tensor([[0, 1]]), temperature=0.5)
    p = torch.tensor([0.0, 2.0], dtype=F64).softmax(-1)
    expected = -(p * p.log()).sum().item()
    assert entropies.tolist() == [[pytest.approx(expected)] * 2]
    (gradient,) = torch.autograd.grad(entropies.sum(), logits)
    slope = -p * (p.log() + expected) / 0.5  # dH/dx = -p (log p + H), by the temperature
    for found in gradient[0].tolist():
        assert found == [*map(pytest.approx, slope.tolist()), 0.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kl_in_reward": True}, r"--policy\.kl_in_reward is True, but must be False, or with"),
        ({"method": "ppo", "kl_in_reward": True}, r"kl_in_reward is True"),
        ({"method": "ppo", "advantage": "centered"}, r"--policy\.advantage is centered, but must"),
        ({"minibatches": 0}, r"--policy\.minibatches is 0"),
        ({"entropy_weight": -1.0}, r"--policy\.entropy_weight is -1"),
        ({"entropy_target": -1.0}, r"--policy\.entropy_target is -1"),
        (
            {"entropy_target": 1.0, "entropy_step": 0.0},
            r"--policy\.entropy_step is 0\.0, but must be above 0",
        ),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        PolicyLoss.Config(**options).validate()


# TRL.

N_PROMPT, N_ANSWER = 4, 6
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"method": "grpo"}, {"loss_type": "grpo"}),
    "dr_grpo": ({"method": "dr_grpo"}, {"loss_type": "dr_grpo"}),
    "dapo": ({"method": "dapo"}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "gspo": (
        {"method": "gspo", "clip_low": 0.02, "clip_high": 0.03},
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 0.02,
            "epsilon_high": 0.03,
        },
    ),
    "luspo": (
        {"method": "luspo", "clip_low": 0.02, "clip_high": 0.03},
        {
            "loss_type": "luspo",
            "importance_sampling_level": "sequence",
            "epsilon": 0.02,
            "epsilon_high": 0.03,
        },
    ),
    "cispo": ({"method": "cispo", "clip_high": 0.3}, {"loss_type": "cispo", "epsilon_high": 1.3}),
    "sapo": ({"method": "sapo"}, {"loss_type": "sapo"}),
    "vespo": ({"method": "vespo"}, {"loss_type": "vespo"}),
    "two-sided": (
        {"method": "grpo", "max_log_ratio": math.log(1.3)},
        {"loss_type": "grpo", "delta": 1.3},
    ),
    "k3": (
        {"method": "grpo", "beta": 0.2},
        {"loss_type": "grpo", "beta": 0.2, "use_bias_correction_kl": False},
    ),
    "unbiased": (
        {"method": "grpo", "beta": 0.2, "kl": "unbiased"},
        {"loss_type": "grpo", "beta": 0.2},
    ),
    "entropy": (
        {"method": "dapo", "entropy_weight": 0.05},
        {"loss_type": "dapo", "epsilon_high": 0.28, "entropy_coef": 0.05},
    ),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Any:
    """A model in a folder, from which TRL loads the reference."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    folder = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_loss_of_a_batch_equals_trl(tiny, tmp_path, case):
    """Four answers of several lengths whose old probabilities differ by up to 40 %, so that all
    bounds act. Both compute in float32."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import AutoTokenizer

    ours, theirs = CASES[case]
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(3, 64, (4, N_PROMPT), generator=generator)
    answers = torch.randint(3, 64, (4, N_ANSWER), generator=generator)
    mask = torch.arange(N_ANSWER) < torch.tensor([3, 6, 1, 5])[:, None]
    advantages = torch.tensor([1.3, -0.4, 0.7, -1.1])
    noise, far = torch.randn(2, 4, N_ANSWER, generator=generator)

    def outputs() -> tuple[torch.Tensor, torch.Tensor]:
        logits = tiny(torch.cat([prompts, answers], dim=1)).logits[:, N_PROMPT - 1 : -1]
        log_p = logits.log_softmax(-1)
        entropies = -(log_p.exp() * log_p).sum(-1)
        return log_p.gather(-1, answers[..., None])[..., 0], entropies

    log_probs, entropies = outputs()
    old, reference = (log_probs.detach() + 0.2 * x for x in (noise, far))
    samples = torch.arange(4)[:, None].expand(4, N_ANSWER)
    tokens = {"old_logprobs": old, "logprobs": old, "samples": samples}
    tokens["advantages"] = advantages[:, None].expand(4, N_ANSWER)
    if "beta" in ours:
        tokens["reference"] = reference
    if "entropy_weight" in ours:
        tokens["entropies"] = entropies
    loss, weight, _ = PolicyLoss.Config(**ours).build(max_new_tokens=8)(
        log_probs[mask], {name: values[mask] for name, values in tokens.items()}
    )
    found = loss / weight
    gradients = torch.autograd.grad(found, list(tiny.parameters()))

    trainer = trl.GRPOTrainer(
        tiny,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=trl.GRPOConfig(
            output_dir=str(tmp_path),
            max_completion_length=8,
            num_generations=4,
            per_device_train_batch_size=4,
            bf16=False,
            use_cpu=True,
            report_to=[],
            gradient_checkpointing=False,
            **theirs,
        ),
        train_dataset=Dataset.from_list([{"prompt": "a"}] * 4),
        processing_class=AutoTokenizer.from_pretrained(_tokenizer_folder()),
    )
    trainer.current_gradient_accumulation_steps = 1
    batch = {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": answers,
        "completion_mask": mask.long(),
        "advantages": advantages,
        "num_items_in_batch": mask.sum(),
        "old_per_token_logps": old,
        "ref_per_token_logps": reference,
    }
    expected = trainer._compute_loss(tiny, batch)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
    others = torch.autograd.grad(expected, list(tiny.parameters()))
    for gradient, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-6)
    assert max(gradient.abs().max() for gradient in gradients) > 1e-3


def _tokenizer_folder() -> str:
    from tests.conftest import PROJECT

    return str(PROJECT / "torchtitan/assets/tokenizer")


def test_the_entropy_factor_follows_its_target():
    """By hand: below the target it rises, above it falls to 0 at least and does not act."""
    control = EntropyControl(weight=0.0, target=1.0, step=0.5)
    factors = []
    for entropy in (0.5, 0.9, 1.5, 1.5, 1.5, 0.2, 0.2):
        control.observe(entropy)
        factors.append(control.factor)
    assert factors == [0.5, 1.0, 0.0, 0.0, 0.0, 0.5, 1.0]
    assert control.is_on and control.is_adaptive
    constant = EntropyControl(weight=0.1, target=None, step=0.5)
    constant.observe(0.0)
    assert constant.factor == 0.1 and not constant.is_adaptive
    assert not EntropyControl(weight=0.0, target=None, step=0.5).is_on
