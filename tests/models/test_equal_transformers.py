"""Every family against transformers: logits, all gradients, weights and config.json both ways,
cached generation."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.family_cases import (
    ALIASES,
    CASES,
    WITH_VISION,
    all_cases,
    class_of,
    family_of,
    random_reference,
    random_tokens,
    relative_error,
    to_external,
    to_ours,
)
from torchtitan.components.generation import generate
from torchtitan.components.losses.loss import CrossEntropyLoss
from torchtitan.models.families import families_with

transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-5
"""Relative to the largest element. Float32 sums in another order change the seventh digit, and
layers add to that."""

ROUNDING = 8
"""Largest error of gradients above `TOLERANCE`, as a multiple of the error of transformers in
float32. Sums over tokens that nearly cancel depend on the order of products: a bias of OLMo Hybrid
has 1.1e-5 with MKL, six times the error of transformers, and less with oneDNN."""


def test_every_model_type_has_a_case() -> None:
    formats = [family.FORMATS["hf"] for family in families_with("hf")]
    # those of diffusers: tests/models/test_diffusion.py
    types = {name for one in formats if one.library == "transformers" for name in one.model_types}
    assert types == {*(case.model_type for case in CASES.values()), *WITH_VISION, *ALIASES}


@pytest.mark.parametrize(("model_type", "seed"), all_cases(8))
def test_logits_and_all_gradients_equal_transformers(model_type: str, seed: int) -> None:
    family, reference = family_of(model_type), random_reference(model_type, seed)
    model, _ = to_ours(family, reference)
    reference.double()  # so that only our rounding counts
    tokens, labels = random_tokens(97, 50)
    logits, expected = model(tokens), reference(tokens).logits
    assert relative_error(logits, expected) < TOLERANCE
    loss = model(tokens, head=CrossEntropyLoss.Config().build(), labels_BL=labels)
    expected_loss = torch.nn.functional.cross_entropy(
        expected.flatten(0, 1), labels.flatten(), reduction="sum"
    )
    torch.testing.assert_close(loss, expected_loss, rtol=TOLERANCE, atol=0, check_dtype=False)
    loss.backward()
    expected_loss.backward()
    ours = {name: torch.zeros_like(buffer) for name, buffer in model.named_buffers()}
    ours |= {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    # A bias of routers is frozen in some types, and an indexer has no gradient.
    trained = {name: p.grad for name, p in reference.named_parameters() if p.requires_grad}
    gradients = {name: gradient for name, gradient in trained.items() if gradient is not None}
    assert trained.keys() - gradients.keys() == {name for name in trained if ".indexer." in name}
    # Sums of large terms that nearly cancel have fewer digits, so a small gradient counts as 1 % of
    # the largest.
    least = 0.01 * max(gradient.abs().max().item() for gradient in gradients.values())
    converted = to_external(family, model, ours)
    errors = {
        name: relative_error(converted[name], gradient, least)
        for name, gradient in gradients.items()
    }
    if max(errors.values()) >= TOLERANCE:
        single = random_reference(model_type, seed)
        torch.nn.functional.cross_entropy(
            single(tokens).logits.flatten(0, 1), labels.flatten(), reduction="sum"
        ).backward()
        theirs = {
            name: relative_error(p.grad, gradients[name], least)
            for name, p in single.named_parameters()
            if name in gradients
        }
        errors = {
            name: error
            for name, error in errors.items()
            if error >= ROUNDING * max(theirs.values())
        }
    assert max(errors.values(), default=0) < TOLERANCE, errors


@pytest.mark.parametrize(("model_type", "seed"), all_cases(4))
def test_weights_and_config_json_convert_both_ways(
    model_type: str, seed: int, tmp_path: Path
) -> None:
    """Weights bit for bit. transformers computes the same logits from our config.json, and we read
    it back."""
    family, reference = family_of(model_type), random_reference(model_type, seed)
    model, theirs = to_ours(family, reference)
    converted = to_external(family, model, model.state_dict())
    assert converted.keys() == theirs.keys()
    assert all(torch.equal(converted[name], theirs[name]) for name in theirs)
    written = family.FORMATS["hf"].to_external(model.config)
    assert family.FORMATS["hf"].from_external(json.loads(json.dumps(written))) == model.config
    (tmp_path / "config.json").write_text(json.dumps(written))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    again = class_of(config)._from_config(config, attn_implementation="eager").eval()
    again.load_state_dict(reference.state_dict())
    again.config._experts_implementation = "eager"
    tokens, _ = random_tokens(97, 50)
    assert torch.equal(again(tokens).logits, reference(tokens).logits)


def test_every_flavor_is_read_from_its_own_config_json() -> None:
    """Random models have no value that transformers never has, such as defaults of options here."""
    for family in families_with("hf"):
        format = family.FORMATS["hf"]
        for flavor, config in family.FLAVORS.items():
            if format.library == "transformers":
                document = json.loads(json.dumps(format.to_external(config)))
                assert format.from_external(document) == config, (family.__name__, flavor)


BY_LENGTH = ("'dynamic'", "'longrope'")
"""Kinds of positions whose angles depend on the length of the text so far."""


@torch.no_grad()
def greedy_tokens(reference: Any, prompt: list[int], ids: list[int]) -> list[int]:
    """Return the tokens that transformers' greedy decoding writes after a prompt, as many as `ids`.

    If `ids` are right, then they are the largest logits of one pass over the text, which takes a
    fraction of the time of a pass per token. With `BY_LENGTH`, a pass over the whole text differs
    from those that wrote it.
    """
    text = torch.tensor([[*prompt, *ids]])
    if not any(kind in str(reference.config.to_dict()) for kind in BY_LENGTH):
        return reference(text).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()
    written = reference.generate(
        text[:, : len(prompt)],
        max_new_tokens=len(ids),
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return written[0, len(prompt) :].tolist()


@pytest.mark.parametrize(("model_type", "seed"), all_cases(4))
def test_cached_generation_equals_transformers(model_type: str, seed: int) -> None:
    """Token for token, beyond every window."""
    reference = random_reference(model_type, seed)
    model, _ = to_ours(family_of(model_type), reference)
    prompts = [[5, 17, 3, 11], [7]]
    generations = generate(model, prompts, max_new_tokens=40)
    for prompt, generation in zip(prompts, generations, strict=True):
        assert len(generation.ids) == 40
        assert generation.ids == greedy_tokens(reference, prompt, generation.ids)
