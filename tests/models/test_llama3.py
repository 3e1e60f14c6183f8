"""Llama 3 against transformers' LlamaForCausalLM, and its sizes against the published ones."""

import json

import pytest
import torch

from torchtitan.config.registry import built_in_modules, list_module
from torchtitan.distributed import initialize_weights
from torchtitan.models.common import attention
from torchtitan.models.common.rope import RoPEConfig, rope_frequencies
from torchtitan.models.llama3 import FLAVORS, model_registry
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.tools.errors import UserError

VARIANTS = {
    "multi-head": {"n_kv_heads": 4},
    "gqa": {"n_kv_heads": 2},
    "tied": {"n_kv_heads": 2, "tie_embeddings": True},
    "scaled-rope": {
        "n_kv_heads": 1,
        "rope": RoPEConfig(theta=10_000.0, scaling_factor=8.0, original_max_seq_len=16),
    },
}


def small_config(**overrides) -> Llama3Model.Config:
    sizes = {
        "vocab_size": 97,
        "dim": 64,
        "n_layers": 3,
        "n_heads": 4,
        "n_kv_heads": 2,
        "ffn_dim": 96,
    }
    return Llama3Model.Config(**{**sizes, "rope": RoPEConfig(theta=10_000.0), **overrides})


def small_model(**overrides) -> Llama3Model:
    model = small_config(**overrides).build()
    initialize_weights(model, seed=1)
    # With initial weights, attention is nearly uniform, which would hide a wrong rotation or mask.
    with torch.no_grad():
        for layer in model.layers.values():
            layer.attention.wq.weight *= 8
            layer.attention.wk.weight *= 8
    return model


class WindowedModel(Llama3Model):
    """A model whose tokens see 6 tokens in every layer, like Mistral."""

    def window_of_layer(self, index: int) -> int | None:
        return 6


def windowed_model() -> WindowedModel:
    model = WindowedModel(small_config())
    model.load_state_dict(small_model().state_dict())
    return model


def reference_of(model: Llama3Model):
    """Return transformers' model (Llama, or Mistral for a window) with the same sizes and weights,
    and the map from our parameter names to its names."""
    transformers = pytest.importorskip("transformers")
    config, rope = model.config, model.config.rope
    parameters = {"rope_type": "default", "rope_theta": rope.theta}
    if rope.scaling_factor != 1.0:
        parameters |= {
            "rope_type": "llama3",
            "factor": rope.scaling_factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_seq_len,
        }
    window = model.window_of_layer(0)
    family = "Mistral" if window else "Llama"
    reference = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(
            vocab_size=config.vocab_size,
            hidden_size=config.dim,
            intermediate_size=config.ffn_dim,
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads,
            num_key_value_heads=config.n_kv_heads,
            rms_norm_eps=config.norm_eps,
            tie_word_embeddings=config.tie_embeddings,
            max_position_embeddings=512,
            rope_parameters=parameters,
            attn_implementation="eager",
            **({"sliding_window": window} if window else {}),
        )
    )
    names = {
        "tok_embeddings.weight": "model.embed_tokens.weight",
        "head.norm.weight": "model.norm.weight",
    }
    names["head.output.weight"] = "lm_head.weight"
    inner = {
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        **{f"attention.w{x}": f"self_attn.{x}_proj" for x in "qkvo"},
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w2": "mlp.down_proj",
        "feed_forward.w3": "mlp.up_proj",
    }
    for layer in range(config.n_layers):
        names |= {
            f"layers.{layer}.{ours}.weight": f"model.layers.{layer}.{x}.weight"
            for ours, x in inner.items()
        }
    theirs = dict(reference.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            theirs[names[name]].copy_(parameter)
    return reference, names


@pytest.mark.parametrize("variant", [*VARIANTS, "window"])
def test_logits_and_all_gradients_equal_transformers(variant):
    model = windowed_model() if variant == "window" else small_model(**VARIANTS[variant])
    reference, names = reference_of(model)
    torch.manual_seed(0)
    tokens, labels = torch.randint(97, (2, 48)), torch.randint(97, (2, 48))
    logits, expected = model(tokens), reference(tokens).logits
    # 1e-5: float32 sums in another order; logits are of order 1.
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    for output in (logits, expected):
        torch.nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten()).backward()
    theirs = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        gradient = theirs[names[name]].grad
        torch.testing.assert_close(
            parameter.grad, gradient, rtol=1e-5, atol=1e-5 * gradient.abs().max().item()
        )


def test_wrong_rotation_is_caught():
    """Interleaved instead of half-split pairs have the effect of a wrong permutation of query and
    key rows."""
    model = small_model()
    reference, _ = reference_of(model)
    with torch.no_grad():
        for layer in model.layers.values():
            for projection in (layer.attention.wq, layer.attention.wk):
                rows = projection.weight.unflatten(0, (-1, 2, 8)).transpose(1, 2).flatten(0, 2)
                projection.weight.copy_(rows)
    tokens = torch.arange(48)[None]
    # a thousand times the tolerance above
    assert (model(tokens) - reference(tokens).logits).abs().max() > 1e-2


def test_rope_frequencies_equal_transformers_for_the_published_scaling(assets):
    transformers = pytest.importorskip("transformers")
    path = assets / "hf-configs" / "meta-llama--Llama-3.2-1B_config.json"
    config = transformers.LlamaConfig(**json.loads(path.read_text()))
    expected = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config).inv_freq
    ours = model_registry("1B").model
    torch.testing.assert_close(
        rope_frequencies(ours.rope, ours.resolved_head_dim), expected, rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("flavor", ["1B", "8B", "405B"])
def test_published_sizes(flavor, assets):
    name = {"1B": "Llama-3.2-1B", "8B": "Meta-Llama-3.1-8B", "405B": "Meta-Llama-3.1-405B"}[flavor]
    published = json.loads((assets / "hf-configs" / f"meta-llama--{name}_config.json").read_text())
    config = model_registry(flavor).model
    expected = {
        "dim": published["hidden_size"],
        "n_layers": published["num_hidden_layers"],
        "n_heads": published["num_attention_heads"],
        "n_kv_heads": published["num_key_value_heads"],
        "ffn_dim": published["intermediate_size"],
        "vocab_size": published["vocab_size"],
        "norm_eps": published["rms_norm_eps"],
        "tie_embeddings": published["tie_word_embeddings"],
        "max_seq_len": published["max_position_embeddings"],
        "resolved_head_dim": published.get(
            "head_dim", published["hidden_size"] // published["num_attention_heads"]
        ),
    }
    assert {key: getattr(config, key) for key in expected} == expected
    scaling = published["rope_scaling"]
    assert (config.rope.theta, config.rope.scaling_factor) == (
        published["rope_theta"],
        scaling["factor"],
    )
    assert config.rope.original_max_seq_len == scaling["original_max_position_embeddings"]


@pytest.mark.parametrize(
    ("flavor", "parameters"),
    # From Meta's model cards (1.23B, 3.21B, 8.03B, 70.6B, 405B), exact from the sum of the shapes.
    [
        ("1B", 1_235_814_400),
        ("3B", 3_212_749_824),
        ("8B", 8_030_261_248),
        ("70B", 70_553_706_496),
        ("405B", 405_853_388_800),
    ],
)
def test_parameter_counts_match_published(flavor, parameters):
    with torch.device("meta"):
        assert model_registry(flavor).model.build().num_parameters() == parameters


@pytest.mark.parametrize("tied", [False, True])
def test_flops_count_every_matrix_product(tied, monkeypatch):
    """Compare with torch's counter, with attention that it can count, and without norms."""
    from torch.utils.flop_counter import FlopCounterMode

    monkeypatch.setattr(attention, "on_cpu", lambda q_BLHD: False)  # blocks call PyTorch's kernel
    model, length = small_model(tie_embeddings=tied), 32
    with (
        FlopCounterMode(display=False) as counter,
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    ):
        model(torch.zeros(1, length, dtype=torch.long)).sum().backward()
    norms = sum(p.numel() for name, p in model.named_parameters() if "norm" in name)
    counted = model.flops_per_token(length) - 6 * norms
    assert counter.get_total_flops() / length == pytest.approx(counted, rel=1e-6)


def test_flavors_are_fresh_and_listed():
    first = model_registry("8B")
    first.model.dim, first.model.rope.theta = 1, 1.0
    assert model_registry("8B").model.dim == 4096
    assert model_registry("8B").model.rope.theta == 500_000.0
    assert list_module("llama3", built_in_modules()["llama3"]).flavors == list(FLAVORS)
    with pytest.raises(UserError, match="9B"):
        model_registry("9B")


def test_packed_documents_do_not_see_each_other():
    """Each document of a packed window has the same logits as alone."""
    model, lengths = small_model(), [5, 1, 20, 6]
    torch.manual_seed(0)
    documents = [torch.randint(97, (1, n)) for n in lengths]
    attention = AttentionMetadata.from_positions(
        torch.cat([torch.arange(n) for n in lengths])[None]
    )
    packed = model(torch.cat(documents, dim=1), attention)
    alone = torch.cat([model(document) for document in documents], dim=1)
    # Float32 rounding of the same products in other shapes.
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)
    assert (model(torch.cat(documents, dim=1)) - alone).abs().max() > 1e-3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_packed_documents_on_cuda_equal_the_cpu():
    model = small_model()
    attention = AttentionMetadata.from_positions(
        torch.cat([torch.arange(n) for n in (100, 28)])[None]
    )
    tokens = torch.randint(97, (1, 128))
    results = []
    for device in ("cpu", "cuda"):
        copy = small_model().to(device)
        copy.load_state_dict(model.state_dict())
        logits = copy(tokens.to(device), attention.to(device))
        logits.square().mean().backward()
        results.append((logits.cpu(), {name: p.grad.cpu() for name, p in copy.named_parameters()}))
    # Float32 sums in another order, and CUDA's exponentials.
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "overrides",
    [{"dim": 66}, {"n_kv_heads": 3}, {"n_layers": 0}, {"rope": RoPEConfig(low_freq_factor=5.0)}],
)
def test_inconsistent_sizes_are_rejected(overrides):
    with pytest.raises(UserError, match="--model"):
        small_config(**overrides).validate()
