"""Parts that no built-in family uses, as a model of transformers that has them: GPT-NeoX, with a
parallel residual, LayerNorms with biases, a plain network, and a partly rotated head."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.family_cases import random_tokens, relative_error
from torchtitan.distributed import initialize_weights
from torchtitan.models.common import blocks
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.feed_forward import FeedForward, GatedFeedForward, gelu_tanh
from torchtitan.models.common.norms import LayerNorm, OffsetRMSNorm, RMSNorm
from torchtitan.models.common.rope import RoPEConfig, rope_frequencies
from torchtitan.tools.errors import UserError

transformers = pytest.importorskip("transformers")

NAMES = {
    "tok_embeddings": "gpt_neox.embed_in",
    "head.norm": "gpt_neox.final_layer_norm",
    "head.output": "lm_head",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.wo": "attention.dense",
    "feed_forward.w1": "mlp.dense_h_to_4h",
    "feed_forward.w2": "mlp.dense_4h_to_h",
}


class NeoX(Decoder):
    parallel = True

    def make_norm(self, dim: int) -> nn.Module:
        return LayerNorm(dim, self.config.norm_eps)

    def make_attention(self, index: int, **options: Any) -> nn.Module:
        return super().make_attention(index, biases="qkvo", **options)

    def make_block(self, index: int) -> nn.Module:
        feed_forward = self.make_feed_forward(index, FeedForward, activation=F.gelu)
        kind = (
            partial(blocks.ParallelBlock, separate_norms=True)
            if self.parallel
            else blocks.PreNormBlock
        )
        return kind(
            self.make_attention(index), feed_forward, dim=self.config.dim, norm=self.make_norm
        )


class SequentialNeoX(NeoX):
    parallel = False


def reference_of(parallel: bool) -> Any:
    torch.manual_seed(0)
    config = transformers.GPTNeoXConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=128,
        use_parallel_residual=parallel,
        rotary_pct=0.5,
    )
    reference = transformers.GPTNeoXForCausalLM(config).eval()
    for parameter in reference.parameters():
        nn.init.normal_(parameter, std=0.3)
    return reference


def loaded(kind: type[NeoX], reference: Any, **options: Any) -> Decoder:
    """Return our model with the weights of transformers', whose rows of queries, keys and values
    alternate by head."""
    rope = RoPEConfig(theta=10_000.0, rotated_fraction=options.pop("rotated_fraction", 0.5))
    sizes = {
        "dim": 32,
        "n_layers": 3,
        "n_heads": 4,
        "n_kv_heads": 4,
        "ffn_dim": 64,
        "vocab_size": 97,
    }
    model: Decoder = kind.Config(rope=rope, **sizes, **options).build()
    theirs, state = reference.state_dict(), {}
    for name in model.state_dict():
        prefix, layer = "", name
        if name.startswith("layers."):
            _, index, layer = name.split(".", 2)
            prefix = f"gpt_neox.layers.{index}."
        stem, kind_of_tensor = layer.rsplit(".", 1)
        if stem in NAMES:
            state[name] = theirs[f"{prefix}{NAMES[stem]}.{kind_of_tensor}"]
        else:
            fused = theirs[f"{prefix}attention.query_key_value.{kind_of_tensor}"].unflatten(
                0, (4, 3, 8)
            )
            state[name] = fused[:, "qkv".index(stem[-1])].flatten(0, 1)
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize(("kind", "parallel"), [(NeoX, True), (SequentialNeoX, False)])
def test_gpt_neox_equals_transformers(kind: type[NeoX], parallel: bool) -> None:
    reference, (tokens, labels) = reference_of(parallel), random_tokens(97, 50)
    model = loaded(kind, reference)
    logits, expected = model(tokens), reference(tokens).logits
    # Relative to the largest: float32 sums in another order.
    assert relative_error(logits, expected) < 1e-5
    for output in (logits, expected):
        F.cross_entropy(output.flatten(0, 1), labels.flatten()).backward()
    ours = model.layers["1"].attention_norm.bias.grad
    theirs = reference.gpt_neox.layers[1].input_layernorm.bias.grad
    assert relative_error(ours, theirs) < 1e-5


@pytest.mark.parametrize(
    "mistake", [{"rotated_fraction": 1.0}, {"norm_eps": 0.1}, {"kind": SequentialNeoX}]
)
def test_mistakes_are_caught(mistake: dict[str, Any]) -> None:
    reference, (tokens, _) = reference_of(True), random_tokens(97, 50)
    model = loaded(mistake.pop("kind", NeoX), reference, **mistake)
    assert relative_error(model(tokens), reference(tokens).logits) > 1e-3


def test_parallel_block_with_one_norm() -> None:
    attention, feed_forward = nn.Linear(8, 8), nn.Linear(8, 8)
    attention.forward = lambda x, rope, metadata: nn.Linear.forward(attention, x)  # type: ignore[method-assign]
    block = blocks.ParallelBlock(
        attention, feed_forward, dim=8, norm=partial(RMSNorm, eps=1e-6), multiplier=0.5
    )
    assert block.ffn_norm is None
    x = torch.randn(2, 3, 8)
    initialize_weights(block.attention_norm, 0)
    normalized = block.attention_norm(x)
    expected = x + 0.5 * (
        F.linear(normalized, attention.weight, attention.bias) + feed_forward(normalized)
    )
    torch.testing.assert_close(block(x, None, None), expected)


def test_norm_with_offset_equals_its_definition() -> None:
    norm = OffsetRMSNorm(16, 1e-6)
    nn.init.normal_(norm.weight)
    x = torch.randn(3, 16)
    expected = x / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + norm.weight)
    torch.testing.assert_close(norm(x), expected.float())
    # In bfloat16 too, 1 + weight has the digits of float32.
    low = norm(x.bfloat16()).float()
    torch.testing.assert_close(low, expected.float(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("activation", [F.silu, F.gelu, gelu_tanh])
def test_gated_network_equals_its_definition(activation: Any) -> None:
    network = GatedFeedForward(
        dim=8, hidden_dim=12, activation=activation, bias=True, init_std=0.1, out_init_std=0.1
    )
    for parameter in network.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(2, 8)
    hidden = activation(x @ network.w1.weight.T + network.w1.bias) * (
        x @ network.w3.weight.T + network.w3.bias
    )
    torch.testing.assert_close(network(x), hidden @ network.w2.weight.T + network.w2.bias)


def test_frequencies_that_depend_on_the_length_are_those_of_each_document() -> None:
    """A long document does not change the frequencies of a short one in the same row."""
    longrope = RoPEConfig(
        theta=1e4,
        scaling="longrope",
        original_max_seq_len=8,
        short_factors=[1.0] * 4,
        long_factors=[3.0] * 4,
    )
    dynamic = RoPEConfig(theta=1e4, scaling="dynamic", scaling_factor=2.0, original_max_seq_len=8)
    for rope in (longrope, dynamic):
        assert rope.depends_on_length
        lengths_BL = torch.tensor([[4, 8, 9, 32]])
        together = rope_frequencies(rope, 8, lengths_BL)
        alone = [rope_frequencies(rope, 8, lengths_BL[:, i : i + 1]) for i in range(4)]
        torch.testing.assert_close(together, torch.cat(alone, dim=1))
        assert torch.equal(together[:, 0], together[:, 1])
        assert not torch.equal(together[:, 1], together[:, 2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"rotated_fraction": 0.0},
            "rotated_fraction is 0.0, but must be .*from 2 to the head width 8 is rotated, not 0",
        ),
        ({"rotated_fraction": 0.4}, "not 3"),
        ({"attention_factor": -1.0}, "attention_factor is -1.0"),
        (
            {"scaling": "longrope"},
            "short_factors is 0 numbers, but must be 4 numbers above 0, one for each rotated pair",
        ),
        (
            {
                "scaling": "longrope",
                "short_factors": [1.0] * 4,
                "long_factors": [1.0, 0.0, 1.0, 1.0],
            },
            "long_factors",
        ),
    ],
)
def test_unusable_rope_is_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        RoPEConfig(**options).validate(8)


def test_tensors_are_used(tmp_path: Any) -> None:
    """A model without a part's gradient would hide that the part is not used."""
    model = loaded(NeoX, reference_of(True))
    tokens, _ = random_tokens(97, 20)
    model(tokens).square().mean().backward()
    gradients: dict[str, Tensor | None] = {
        name: parameter.grad for name, parameter in model.named_parameters()
    }
    assert not [
        name for name, gradient in gradients.items() if gradient is None or not gradient.any()
    ]
