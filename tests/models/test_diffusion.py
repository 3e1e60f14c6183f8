"""DiT and FLUX against diffusers."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.flux_reference import flux_velocity
from torchtitan.cli.convert import convert
from torchtitan.experiments.flow_matching.config_registry import flux_captions
from torchtitan.foresight.profile import find_facts
from torchtitan.models import dit, flux
from torchtitan.models.common.diffusion import from_patches, to_patches
from torchtitan.models.pretrained import load_model
from torchtitan.tools.errors import UserError

pytestmark = pytest.mark.slow  # importing diffusers takes seconds

TOLERANCE = 1e-5
"""Of float32, relative to the largest value; sums in another order change the seventh digit."""


@pytest.fixture(scope="module", autouse=True)
def diffusers() -> Any:
    """The library, imported by the process that runs these tests only."""
    return pytest.importorskip("diffusers")


def randomized(model: Any) -> Any:
    """Draw all weights of a reference, since published ones begin with layers of zeros."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def dit_reference() -> Any:
    import diffusers

    model = randomized(
        diffusers.DiTTransformer2DModel(
            num_attention_heads=2,
            attention_head_dim=10,
            in_channels=3,
            out_channels=3,
            num_layers=3,
            sample_size=12,
            patch_size=2,
            num_embeds_ada_norm=7,
        )
    )
    first, *others = (block.norm1.emb for block in model.transformer_blocks)
    for other in others:  # as in published weights, of which diffusers makes copies
        other.load_state_dict(first.state_dict())
    return model


def flux_reference(*, guidance: bool = True) -> Any:
    import diffusers

    return randomized(
        diffusers.FluxTransformer2DModel(
            in_channels=20,
            num_layers=2,
            num_single_layers=3,
            attention_head_dim=16,
            num_attention_heads=3,
            joint_attention_dim=11,
            pooled_projection_dim=13,
            guidance_embeds=guidance,
            axes_dims_rope=[4, 8, 4],
        )
    )


def gradients_differ_by(model: Any, reference: Any, adapter: Any) -> float:
    """Return the largest difference of gradients, relative to the largest of a tensor, or to a
    thousandth of the largest of all: attention does not depend on the biases of keys, whose
    gradients are rounding. The copies of a tensor in the reference add up."""
    ours, theirs = dict(model.named_parameters()), dict(reference.named_parameters())
    pairs = []
    for step in adapter.steps:
        (name,) = step.internal
        expected = sum(
            step.transform.to_internal([theirs[other].grad], [ours[name].shape])[0]
            for other in step.external
        )
        pairs.append((ours[name].grad, expected))
    assert len(pairs) == len(ours)
    least = max(expected.abs().max() for _, expected in pairs) / 1000
    differences = [
        (gradient - expected).abs().max() / max(expected.abs().max(), least)
        for gradient, expected in pairs
    ]
    return float(torch.stack(differences).max())


def test_dit_equals_diffusers(tmp_path):
    reference = dit_reference()
    reference.save_pretrained(tmp_path)
    model = load_model(tmp_path, device="cpu").model
    images, times, classes = torch.randn(5, 3, 12, 12), torch.rand(5), torch.tensor([0, 3, 6, 7, 7])
    expected = reference(images, times * 1000, classes).sample
    velocity = model(images, times, classes=classes)
    assert (velocity - expected).abs().max() < TOLERANCE * expected.abs().max()
    expected.square().mean().backward()
    velocity.square().mean().backward()
    assert gradients_differ_by(model, reference, dit.FORMAT.adapter(model.config)) < TOLERANCE


def flux_inputs() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        "images": torch.randn(2, 5, 8, 12),  # higher than wide would not show exchanged axes
        "times": torch.rand(2),
        "text": torch.randn(2, 6, 11),
        "pooled": torch.randn(2, 13),
        "guidance": torch.tensor([3.5, 1.0]),
    }


@pytest.mark.parametrize("guidance", [True, False])
def test_flux_equals_diffusers(tmp_path, guidance):
    reference, inputs = flux_reference(guidance=guidance), flux_inputs()
    images, times = inputs.pop("images"), inputs.pop("times")
    reference.save_pretrained(tmp_path)
    model = load_model(tmp_path, device="cpu").model
    velocity = to_patches(model(images, times, **inputs), 2)
    read = inputs | ({} if guidance else {"guidance": None})
    expected = flux_velocity(reference, images, times, **read)
    assert (velocity - expected).abs().max() < TOLERANCE * expected.abs().max()
    expected.square().mean().backward()
    velocity.square().mean().backward()
    assert gradients_differ_by(model, reference, flux.FORMAT.adapter(model.config)) < TOLERANCE


def test_hidden_type_rounds_times_of_flux_before_they_are_multiplied(tmp_path):
    """A time of 0.7 is 0.69921875 in bfloat16, so 699.2 instead of 700."""
    reference = flux_reference().to(torch.bfloat16)
    reference.save_pretrained(tmp_path)
    model = load_model(tmp_path, device="cpu").model
    times = torch.tensor([0.7, 0.123])
    scaled = times.to(torch.bfloat16) * 1000
    embedding = reference.time_text_embed
    expected = embedding.timestep_embedder(embedding.time_proj(scaled).to(torch.bfloat16))
    assert torch.equal(model._embed_scalar(model.time, times, torch.bfloat16), expected)


@pytest.mark.parametrize(
    ("make", "class_name"),
    [(dit_reference, "DiTTransformer2DModel"), (flux_reference, "FluxTransformer2DModel")],
)
def test_weights_and_configuration_return_unchanged(tmp_path, make, class_name, diffusers):
    reference = make()
    reference.save_pretrained(tmp_path / "theirs")
    assert convert(["--to", "dcp", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    assert convert(["--to", "hf", str(tmp_path / "ours"), str(tmp_path / "back")]) == 0
    back = getattr(diffusers, class_name).from_pretrained(tmp_path / "back")
    assert all(
        back.config[key] == value for key, value in reference.config.items() if key[0] != "_"
    )
    state = back.state_dict()
    assert all(torch.equal(state[key], value) for key, value in reference.state_dict().items())


def test_copies_of_an_embedding_must_be_equal(tmp_path):
    reference = dit_reference()
    with torch.no_grad():
        reference.transformer_blocks[1].norm1.emb.timestep_embedder.linear_1.bias[0] += 1
    reference.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="differs from transformer_blocks.0.norm1.emb"):
        load_model(tmp_path, device="cpu")


def test_published_sizes_have_the_published_numbers_of_parameters():
    """XL/2: 675 M (arXiv:2212.09748, table 4), whose count includes two outputs per value. FLUX.1:
    12 B (its model card)."""
    with torch.device("meta"):
        xl = dit.model_registry("XL-2").model.build().num_parameters()
        dev = flux.model_registry("dev").model.build().num_parameters()
    assert round(xl / 1e6) == 675
    assert round(dev / 1e9) == 12


def test_guidance_counts_as_computation():
    """6 operations per weight, once per image."""
    with torch.device("meta"):
        without, guided = (
            dataclasses.replace(flux.FLAVORS["debugmodel"], guidance=guidance).build()
            for guidance in (False, True)
        )
    added = 6 * (guided.num_parameters() - without.num_parameters())
    assert guided.flops_per_token(1) - without.flops_per_token(1) == added


def test_few_layers_of_flux_count_for_all():
    """Foresight, and so `torchtitan plan`, measures models of the first layers."""
    config = flux.FLAVORS["dev"]
    counts = [config.with_layers(n) for n in (2, 3, 4)]
    assert [(one.n_double, one.n_single) for one in counts] == [(1, 1), (2, 1), (2, 2)]
    spec = flux.model_registry("dev")
    facts = find_facts(dataclasses.replace(flux_captions(), model_spec=spec))
    assert facts.prefixes.lengths == (2, 3, 4)
    # After one of each, 18 double and 37 single ones are left: the third model less the second is
    # a single layer, and the second less the first a double one.
    assert facts.prefixes.weights == pytest.approx((-18 / 55, (18 - 37) / 55, 37 / 55))


def test_patches_return_to_images():
    images = torch.randn(2, 3, 6, 10)
    assert torch.equal(from_patches(to_patches(images, 2), 2, 6), images)


def test_other_keys_of_a_configuration_are_refused(tmp_path: Path):
    """A published DiT predicts noise and a variance, in twice the channels."""
    plain = dit.FORMAT.to_external(dit.FLAVORS["debugmodel"])
    for changed, message in (
        ({"norm_eps": 1e-6}, "norm_eps is 1e-06, but must be 1e-05"),
        ({"out_channels": 2}, "out_channels is 2, but must be 1"),
    ):
        with pytest.raises(UserError, match=message):
            dit.FORMAT.from_external({**plain, **changed})
