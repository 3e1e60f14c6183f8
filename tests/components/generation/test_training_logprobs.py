"""Log-probabilities of the distribution that tokens are drawn from, and their counterpart in
training."""

import math

import pytest
import torch
from scipy.stats import chisquare
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation import logits_process as hf

from tests.components.generation.test_generation import mixed_model
from torchtitan.components.generation import Engine, Generation, Sampling
from torchtitan.components.losses.importance import importance_weights
from torchtitan.components.losses.log_probs import token_log_probs
from torchtitan.models.pretrained import load_model
from torchtitan.protocols.output_head import LogitTransform

SETTINGS = [
    Sampling(temperature=0.7),
    Sampling(temperature=1.5, top_k=7),
    Sampling(temperature=1.0, top_p=0.8),
    Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.05),
]


def warped(scores: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return the distribution by transformers' own processors."""
    steps = [hf.TemperatureLogitsWarper(sampling.temperature)]
    if sampling.top_k:
        steps.append(hf.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p:
        steps.append(hf.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        steps.append(hf.MinPLogitsWarper(sampling.min_p))
    for step in steps:
        scores = step(None, scores)
    return scores.log_softmax(dim=-1)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A random model in transformers and here, float32."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 96}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    reference = LlamaForCausalLM(config)
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    reference.save_pretrained(folder)
    return reference, load_model(folder, device="cpu").model


def run(model, sampling: Sampling, n: int, **options) -> list[Generation]:
    engine = Engine(model, sampling=sampling, logprobs_of="sampling")
    return engine.run(
        [
            engine.generate([5, 6, 7], max_new_tokens=6, key=f"text {number}", **options)
            for number in range(n)
        ]
    )


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_they_equal_transformers_and_the_frequencies(models, sampling):
    """Float32 sums in another order; and a chi-square test of the first of 2,000 tokens with a fixed
    seed. The distribution of temperature 1 fails both."""
    reference, model = models
    texts = run(model, sampling, 8)
    for text in texts:
        with torch.no_grad():
            scores = reference(torch.tensor([[5, 6, 7, *text.ids]])).logits[0, 2:-1]
        ids = torch.tensor(text.ids)[:, None]
        expected = warped(scores, sampling).gather(1, ids)[:, 0]
        assert text.logprobs == pytest.approx(expected.tolist(), abs=2e-5)
        plain = scores.log_softmax(dim=-1).gather(1, ids)[:, 0]
        assert text.logprobs != pytest.approx(plain.tolist(), abs=1e-2)
    engine = Engine(model, sampling=sampling)
    drawn = engine.run(
        [engine.generate([5, 6, 7], max_new_tokens=1, key=str(number)) for number in range(2000)]
    )
    counts = torch.bincount(torch.tensor([text.ids[0] for text in drawn]), minlength=96)
    with torch.no_grad():
        scores = reference(torch.tensor([[5, 6, 7]])).logits[0, -1:]
    expected = warped(scores, sampling)[0].double().exp() * 2000
    common = expected >= 5
    rest = counts[~common].sum().item(), expected[~common].sum().item()
    if rest[1] < 1e-6:
        assert rest[0] == 0
    observed, wanted = counts[common].tolist(), expected[common].tolist()
    if rest[1] >= 5:
        observed, wanted = [*observed, rest[0]], [*wanted, rest[1]]
    total = sum(observed) / sum(wanted)
    assert chisquare(observed, [value * total for value in wanted]).pvalue > 1e-3


def test_a_text_may_have_its_own_settings(models):
    """Also next to others in the batch; the most probable token is certain."""
    _, model = models
    engine = Engine(model, sampling=SETTINGS[0], logprobs_of="sampling")
    own = [
        engine.generate([5, 6], max_new_tokens=4, key="a", sampling=sampling)
        for sampling in (None, Sampling(), SETTINGS[3])
    ]
    usual, greedy, restricted = engine.run(own)
    assert greedy.logprobs == [0.0] * 4
    alone = Engine(model, sampling=SETTINGS[3], logprobs_of="sampling")
    (expected,) = alone.run([alone.generate([5, 6], max_new_tokens=4, key="a")])
    assert restricted.ids == expected.ids
    assert restricted.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    assert usual.logprobs != pytest.approx(restricted.logprobs)


def test_temperature_1_keeps_every_bit():
    """What the engine returned before it knew other settings."""
    model = mixed_model()
    texts = [
        Engine(model, sampling=Sampling(temperature=1.0), logprobs_of=kind)
        for kind in ("model", "sampling")
    ]
    first, second = (
        engine.run([engine.generate([1, 2, 3], max_new_tokens=9, key="k")]) for engine in texts
    )
    assert first == second


@pytest.mark.parametrize(
    "transform", [LogitTransform(), LogitTransform(0.5), LogitTransform(2.0, 3.0)], ids=str
)
def test_trained_log_probs_have_the_temperature(transform):
    """Values and gradients against float64 by autograd."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 5, 8, generator=generator, requires_grad=True)
    weight = torch.randn(11, 8, generator=generator, requires_grad=True)
    labels = torch.tensor([[1, 2, -100, 4, 5], [6, 7, 8, 9, 10]])
    found = token_log_probs(
        hidden, weight, labels, transform=transform, temperature=0.6, chunk_tokens=3
    )
    (found * torch.arange(10).view(2, 5)).sum().backward()
    hidden64, weight64 = (x.detach().double().requires_grad_() for x in (hidden, weight))
    scores = hidden64 @ weight64.T * transform.multiplier
    if transform.softcap:
        scores = transform.softcap * torch.tanh(scores / transform.softcap)
    expected = (scores / 0.6).log_softmax(dim=-1).gather(2, labels.clamp(min=0)[..., None])[..., 0]
    expected = expected.masked_fill(labels == -100, 0)
    (expected * torch.arange(10).view(2, 5)).sum().backward()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hidden.grad.double(), hidden64.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(weight.grad.double(), weight64.grad, rtol=1e-4, atol=1e-4)


def test_importance_weights_equal_their_definitions():
    old = [-1.0, -2.0, -0.5, -3.0]
    sampler = [-1.2, -1.0, -1.5, -2.9]
    samples = [0, 0, 1, 1]
    ratios = [math.exp(p - q) for p, q in zip(old, sampler, strict=True)]
    wholes = [ratios[0] * ratios[1]] * 2 + [ratios[2] * ratios[3]] * 2
    for kind, values in (("token", ratios), ("sequence", wholes)):
        for suffix, instead in (("", 1.3), ("_mask", 0.0)):
            weights, exceeds = importance_weights(
                torch.tensor(old), torch.tensor(sampler), torch.tensor(samples), kind + suffix, 1.3
            )
            expected = [value if value <= 1.3 else instead for value in values]
            assert weights.tolist() == pytest.approx(expected, rel=1e-5)
            assert exceeds.tolist() == [value > 1.3 for value in values]
    assert max(ratios) > 1.3 > min(ratios) and max(wholes) > 1.3 > min(wholes)
