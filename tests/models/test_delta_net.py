"""Gated delta nets against transformers' Qwen3.5, and against the recurrence, token by token, in
float64."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models.test_attention import metadata_of
from tests.models.test_llama3 import small_config
from torchtitan.components.generation import generate
from torchtitan.distributed import initialize_weights
from torchtitan.models.common import delta_net, document_conv
from torchtitan.models.common.delta_net import DELTA_NET_ROWS, GatedDeltaNet
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.protocols.attention import AttentionMetadata

SIZES = {
    "dim": 24,
    "num_key_heads": 2,
    "num_value_heads": 4,
    "key_head_dim": 6,
    "value_head_dim": 10,
    "conv_kernel_dim": 4,
}
ROWS = [
    [[200]],
    [[1]],
    [[64, 64], [128]],  # boundary at the edge of a chunk
    [[63, 1, 64, 2], [130], [1, 65, 64]],
    [[5, 1, 1, 9, 30, 1, 20, 70, 3], [66, 1, 73], [140]],  # several documents in a chunk
    [[1] * 70],
    [[3, 2, 1, 4]],  # documents shorter than the convolution
]
ROPE: Any = None


def make_net(seed: int = 0, norm_eps: float = 1e-6, **sizes: int) -> GatedDeltaNet:
    """Return a layer in float64 that forgets slowly in one head and fast in another."""
    net = GatedDeltaNet(**{**SIZES, **sizes}, norm_eps=norm_eps, init_std=0.3, out_init_std=0.3)
    initialize_weights(net, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        net.A_log.copy_(torch.linspace(-4, 2, len(net.A_log)))
        net.dt_bias.copy_(torch.randn(len(net.dt_bias), generator=generator))
        net.norm.weight.copy_(torch.rand(len(net.norm.weight), generator=generator) + 0.5)
    return net.double()


def random_input(rows: Sequence[Sequence[int]], dim: int = SIZES["dim"]) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(
        len(rows), sum(rows[0]), dim, generator=generator, dtype=torch.float64, requires_grad=True
    )


def recurrence(net: GatedDeltaNet, x_TD: Tensor) -> Tensor:
    """Return the outputs of one document, by definition: one token after another."""
    convs = net.conv_q, net.conv_k, net.conv_v
    qkv_TJ = torch.cat([net.in_q(x_TD), net.in_k(x_TD), net.in_v(x_TD)], dim=1)
    conv_J1W = torch.cat([conv.weight for conv in convs])
    width = conv_J1W.shape[-1]
    before_TJ = torch.cat([qkv_TJ.new_zeros(width - 1, qkv_TJ.shape[1]), qkv_TJ])
    heads = len(net.A_log)
    state_HEF = x_TD.new_zeros(heads, net.key_head_dim, net.value_head_dim)
    outs = []
    for t, x_D in enumerate(x_TD):
        mixed = F.silu((before_TJ[t : t + width] * conv_J1W[:, 0].T).sum(0))
        q, k, v = (part.view(-1, size) for part, size in zip(
            mixed.split([len(conv.weight) for conv in convs]),
            (net.key_head_dim, net.key_head_dim, net.value_head_dim), strict=True,
        ))  # fmt: skip
        q, k = (y[[h * len(y) // heads for h in range(heads)]] for y in (q, k))
        q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
        decay = torch.exp(-net.A_log.exp() * F.softplus(net.in_a(x_D) + net.dt_bias))
        state_HEF = state_HEF * decay[:, None, None]
        change_HF = net.in_b(x_D).sigmoid()[:, None] * (
            v - torch.einsum("hef,he->hf", state_HEF, k)
        )
        state_HEF = state_HEF + k[:, :, None] * change_HF[:, None]
        out_HF = torch.einsum("hef,he->hf", state_HEF, q) / net.key_head_dim**0.5
        out_HF = out_HF / (out_HF.square().mean(-1, keepdim=True) + 1e-6).sqrt() * net.norm.weight
        outs.append(net.out((out_HF * F.silu(net.in_z(x_D)).view_as(out_HF)).flatten()))
    return torch.stack(outs)


def expected_output(net: GatedDeltaNet, x_BLD: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
    return torch.stack(
        [
            torch.cat([recurrence(net, document) for document in x_LD.split(list(lengths))])
            for x_LD, lengths in zip(x_BLD, rows, strict=True)
        ]
    )


def results(net: GatedDeltaNet, x: Tensor, out: Tensor) -> list[Tensor]:
    """Return the output and the gradients of the input and all parameters for a fixed weighting of
    the outputs."""
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return [out, *torch.autograd.grad((out * weight).sum(), [x, *net.parameters()])]


# --- transformers
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_output_and_all_gradients_equal_transformers(seed):
    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

    choose = random.Random(seed)
    key_heads = choose.choice([1, 2, 3])
    sizes = {
        "dim": choose.choice([16, 24, 40]),
        "num_key_heads": key_heads,
        "num_value_heads": key_heads * choose.choice([1, 2, 3]),
        "key_head_dim": choose.choice([8, 10, 16]),
        "value_head_dim": choose.choice([8, 12, 20]),
        "conv_kernel_dim": choose.choice([2, 3, 4]),
    }
    length = choose.choice([1, 2, 40, 63, 64, 65, 128, 150, 200])
    print(sizes, length)
    # With a smaller constant, the norm of a document's first token magnifies rounding where its
    # query and its key are nearly orthogonal. For faster decays, the rounding of the reference's
    # cumulative sums alone is 1e-5.
    net = make_net(seed, norm_eps=1e-2, **sizes).float()
    net.A_log.data.clamp_(max=0.5)
    reference = Qwen3_5GatedDeltaNet(
        transformers.Qwen3_5TextConfig(
            hidden_size=sizes["dim"],
            linear_num_key_heads=sizes["num_key_heads"],
            linear_num_value_heads=sizes["num_value_heads"],
            linear_key_head_dim=sizes["key_head_dim"],
            linear_value_head_dim=sizes["value_head_dim"],
            linear_conv_kernel_dim=sizes["conv_kernel_dim"],
            rms_norm_eps=1e-2,
            num_hidden_layers=1,
            layer_types=["linear_attention"],
        ),
        0,
    )
    names: dict[str, list[str]] = {}
    for row in DELTA_NET_ROWS:
        internal = [row.internal] if isinstance(row.internal, str) else row.internal
        name = row.external.rpartition("linear_attn.")[2]
        names[name] = [one.split(".", 3)[3] for one in internal]
    ours = dict(net.named_parameters())

    def external(tensors: dict[str, Any]) -> dict[str, Any]:
        return {theirs: torch.cat([tensors[name] for name in own]) for theirs, own in names.items()}

    reference.load_state_dict({name: tensor.detach() for name, tensor in external(ours).items()})
    x_BLD = random_input([[length]] * 2, sizes["dim"]).detach().float()
    copies = [x_BLD.clone().requires_grad_() for _ in range(2)]
    out, expected = net(copies[0], ROPE, AttentionMetadata.of_rows(2, length)), reference(copies[1])
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    for each in (out, expected):
        (each * weight).sum().backward()
    gradients = external({name: parameter.grad for name, parameter in ours.items()})
    pairs = {"output": (out, expected), "input": (copies[0].grad, copies[1].grad)}
    pairs |= {
        name: (gradients[name], parameter.grad) for name, parameter in reference.named_parameters()
    }
    for name, (found, other) in pairs.items():
        # Float32 sums in another order, relative to the largest value.
        assert (found - other).abs().max() <= 1e-5 * other.abs().max(), name


# --- documents
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_packed_documents_equal_the_recurrence_of_each(rows):
    net, x = make_net(), random_input(rows)
    found = results(net, x, net(x, ROPE, metadata_of(rows)))
    # Float64 sums in another order.
    torch.testing.assert_close(
        found, results(net, x, expected_output(net, x, rows)), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("seed", range(4))
def test_random_documents_equal_the_recurrence_of_each(seed):
    choose = random.Random(seed)
    boundaries = [sorted(choose.sample(range(1, 170), choose.choice([1, 4, 30]))) for _ in range(2)]
    rows = [[b - a for a, b in zip([0, *cuts], [*cuts, 170], strict=True)] for cuts in boundaries]
    print(rows)
    net, x = (
        make_net(seed, num_key_heads=1, conv_kernel_dim=choose.choice([1, 2, 5])),
        random_input(rows),
    )
    found = results(net, x, net(x, ROPE, metadata_of(rows)))
    torch.testing.assert_close(
        found, results(net, x, expected_output(net, x, rows)), rtol=1e-9, atol=1e-9
    )


def defined_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, documents: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what `gated_delta_rule` returns, one token after another."""
    outs, before = [], torch.zeros_like(documents[:, 0])
    for t, document in enumerate(documents.unbind(1)):
        kept = (document == before).double()[:, None, None, None] * state
        kept = decay[:, t, :, :, None].exp() * kept
        seen = torch.einsum("bhef,bhe->bhf", kept, k[:, t])
        change = beta[:, t, :, None] * (v[:, t] - seen)
        state, before = kept + k[:, t, :, :, None] * change[:, :, None], document
        outs.append(torch.einsum("bhef,bhe->bhf", state, q[:, t]))
    return torch.stack(outs, dim=1), state


@pytest.mark.parametrize("width", [1, 6])
def test_rule_equals_its_definition(width):
    """With decays of heads and of elements, over many chunks: documents that end within and between
    them, one that goes on from a state, and gradients of everything."""
    generator = torch.Generator().manual_seed(width)
    q, k, decay, v, beta, state = (
        torch.randn(size, generator=generator, dtype=torch.float64)
        for size in (*[(2, 150, 2, 6)] * 2, (2, 150, 2, width), (2, 150, 2, 5), (2, 150, 2))
        + ((2, 2, 6, 5),)
    )
    starts = torch.zeros(2, 150, dtype=torch.long)
    starts[0, [9, 16, 17, 64, 100]] = starts[1, [0, 47, 128]] = 1
    documents = starts.cumsum(1)
    inputs = [q, F.normalize(k, dim=-1), v, -decay.exp(), beta.sigmoid()]
    inputs = [each.requires_grad_() for each in (*inputs, state)]
    pairs = []
    for rule in (delta_net.gated_delta_rule, defined_rule):
        out, last = rule(*inputs[:-1], documents, inputs[-1])
        gradients = torch.autograd.grad((out.sin().sum() + last.cos().sum()), inputs)
        pairs.append((out, last, *gradients))
    # Float64 sums in another order.
    torch.testing.assert_close(*pairs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("width", [1, 8])
def test_fast_decays_are_as_precise_as_slow_ones(width):
    """In float32, differences of the cumulative sums would be wrong by 3e-5 where tokens that
    forget everything precede tokens that forget little."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (F.normalize(torch.randn(1, 64, 1, 8, generator=generator), dim=-1) for _ in range(3))
    decay, beta = torch.full((1, 64, 1, width), -0.01), torch.full((1, 64, 1), 0.5)
    decay[:, :40] = -40.0
    inputs, documents = (q, k, v, decay, beta), torch.zeros(1, 64, dtype=torch.long)
    exact, _ = delta_net.gated_delta_rule(*(x.double() for x in inputs), documents, None)
    out, _ = delta_net.gated_delta_rule(*inputs, documents, None)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mistake", ["state", "convolution"])
def test_a_missing_reset_is_caught(monkeypatch, mistake):
    rows = [[5, 1, 60, 30, 40], [80, 56]]
    net, x = make_net(), random_input(rows)
    name = {"state": "gated_delta_rule", "convolution": "DocumentConv.forward"}[mistake]
    owner: Any = delta_net
    if mistake == "convolution":
        owner, name = document_conv.DocumentConv, "forward"
    original = getattr(owner, name)

    def one_document(*args: Any) -> Any:
        """Call the original with the same number for all documents."""
        integers = [isinstance(arg, Tensor) and not arg.is_floating_point() for arg in args]
        return original(
            *(
                arg * 0 if is_integer else arg
                for arg, is_integer in zip(args, integers, strict=True)
            )
        )

    monkeypatch.setattr(owner, name, one_document)
    difference = net(x, ROPE, metadata_of(rows)) - expected_output(net, x, rows)
    assert difference[:, :5].abs().max() < 1e-9  # the first document
    assert difference.abs().max() > 1e-2


# --- states
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "parts", [(70, 1, 1, 1, 5, 66), (1,) * 12 + (132,), (2, 64, 64, 14), (144,)], ids=str
)
def test_states_continue_where_the_last_pass_ended(parts):
    """Rows are padded on the left, by more and by less than the convolution sees, and every part
    may end anywhere."""
    paddings, length = (0, 1, 2, 69, 75), 144
    positions_BL = (torch.arange(length) - torch.tensor(paddings)[:, None]).clamp(min=0)
    rows = [[1] * padding + [length - padding] for padding in paddings]
    net, x_BLD, states, place = make_net(), random_input(rows), {}, 0
    expected = expected_output(net, x_BLD, rows)
    with torch.no_grad():
        for new in parts:
            part = slice(place, place + new)
            attention = AttentionMetadata.from_positions(positions_BL[:, part])
            out = net(x_BLD[:, part], ROPE, replace(attention, states=states))
            torch.testing.assert_close(out, expected[:, part], rtol=1e-9, atol=1e-9)
            place += new
    convolved, state_BHEF = states[net]
    inputs_BWJ = torch.cat(convolved, dim=-1)
    assert inputs_BWJ.shape == (5, 3, 64) and state_BHEF.shape == (5, 4, 6, 10)


class MixedModel(Llama3Model):
    """A model whose first layer is a gated delta net."""

    def make_block(self, index: int) -> torch.nn.Module:
        block = super().make_block(index)
        if index == 0:
            block.attention = GatedDeltaNet(
                **{**SIZES, "dim": 64}, norm_eps=1e-6, init_std=0.2, out_init_std=0.2
            )
        return block


def test_generation_with_and_without_the_cache_are_equal():
    model = MixedModel(small_config()).double()
    initialize_weights(model, 0)
    prompts = [[5], [9, 8], list(range(20, 90)), [1, 2, 3, 4, 5, 6]]
    cached, recomputed = (
        generate(model, prompts, max_new_tokens=6, use_cache=cached) for cached in (True, False)
    )
    for one, other in zip(cached, recomputed, strict=True):
        # float32 logits
        assert one.ids == other.ids and one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_a_compiled_block_is_one_graph_and_equal():
    """Positions are data, so other documents need no other graph."""
    net = make_net()
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    for rows in (ROWS[2], [[100, 28], [1, 127]]):
        x, metadata = random_input(rows).detach(), metadata_of(rows)
        torch.testing.assert_close(compiled(x, ROPE, metadata), net(x, ROPE, metadata))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "any_length"),
    [
        ([[40], [40]], False),
        ([[64], [64]], False),
        ([[128], [60, 68]], False),
        pytest.param([[64], [64]], True, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_compiled_gradients_are_equal(rows, any_length):
    """Also in rows that a single chunk could hold."""
    torch.compiler.reset()  # After a test with another length, the first graph is for any length.
    net, x = make_net(), random_input(rows)
    compiled = torch.compile(net, backend="aot_eager", dynamic=any_length)
    metadata = metadata_of(rows)
    # The compiler may change the order of sums.
    torch.testing.assert_close(
        results(net, x, compiled(x, ROPE, metadata)), results(net, x, net(x, ROPE, metadata))
    )


def test_bfloat16_states_and_recurrence_are_float32():
    net, states = make_net().bfloat16(), {}
    x = random_input([[100]]).detach()
    out = net(x.bfloat16(), ROPE, replace(AttentionMetadata.of_rows(1, 100), states=states))
    assert out.dtype == torch.bfloat16
    convolved, matrices = states[net]
    assert {state.dtype for state in (*convolved, matrices)} == {torch.float32}
    exact = net.double()(x.bfloat16().double(), ROPE, AttentionMetadata.of_rows(1, 100))
    # Projections are rounded to 8 bits.
    assert (out.double() - exact).norm() < 0.02 * exact.norm()


def test_every_parameter_has_an_initial_distribution():
    net = GatedDeltaNet(
        **{**SIZES, "num_key_heads": 8, "num_value_heads": 512},
        norm_eps=1e-6,
        init_std=0.1,
        out_init_std=0.2,
    )
    initialize_weights(net, 0)
    rates = net.A_log.exp()
    assert 0.01 <= rates.min() < 0.2 and 15.8 < rates.max() <= 16 and 7 < rates.mean() < 9
    assert (net.dt_bias == 1).all() and (net.norm.weight == 1).all()
    assert (
        0.49 < net.conv_v.weight.abs().max() <= 0.5
        and net.out.weight.std().item() == pytest.approx(0.2, rel=0.05)
    )
