"""Mamba 2 and the gated short convolution against their definitions, token by token, in float64."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models.test_attention import metadata_of
from torchtitan.distributed import initialize_weights
from torchtitan.models.common import document_conv, mamba
from torchtitan.models.common.mamba import Mamba2, MambaConfig
from torchtitan.models.common.short_conv import GatedShortConv
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.protocols.recurrence import Recurrence

DIM = 24
SIZES = {"n_heads": 4, "head_dim": 6, "n_groups": 2, "state_dim": 10, "conv_width": 4}
ROWS = [
    [[1]],
    [[64, 64], [128]],  # boundary at the edge of a chunk
    [[63, 1, 64, 2], [130], [1, 65, 64]],
    [[5, 1, 1, 9, 30, 1, 20, 70, 3], [66, 1, 73], [140]],  # several documents in a chunk
    [[3, 2, 1, 4]],  # documents shorter than the convolution
]
KINDS = ["mamba", "short conv"]


def make_mixer(kind: str, seed: int = 0, **sizes: Any) -> Recurrence:
    """Return a layer in float64; heads of Mamba forget slowly and fast."""
    stds = {"dim": DIM, "init_std": 0.3, "out_init_std": 0.3}
    mixer: Any
    if kind == "mamba":
        mixer = Mamba2(MambaConfig(**{**SIZES, **sizes}), norm_eps=1e-6, **stds)
    else:
        mixer = GatedShortConv(width=3, bias=True, **stds)
    initialize_weights(mixer, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in mixer.parameters():
            if parameter.ndim == 1:
                parameter.copy_(torch.randn(len(parameter), generator=generator))
        if kind == "mamba":
            mixer.A_log.copy_(torch.linspace(-4, 2, len(mixer.A_log)))
    return mixer.double()


def random_input(rows: Sequence[Sequence[int]]) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    shape = len(rows), sum(rows[0]), DIM
    return torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)


def convolved(conv: Any, x_TJ: Tensor) -> Tensor:
    """Return the convolution of one document: `Conv1d` with zeros before it."""
    width, channels = conv.weight.shape[-1], x_TJ.shape[1]
    padded_1JT = F.pad(x_TJ.T[None], (width - 1, 0))
    return F.conv1d(padded_1JT, conv.weight, conv.bias, groups=channels)[0].T


def by_definition(mixer: Any, x_TD: Tensor) -> Tensor:
    """Return the outputs of one document, one token after another (arXiv:2405.21060, equations 1
    and 2, with the discretization of its code)."""
    if isinstance(mixer, GatedShortConv):
        mixed_TD = convolved(mixer.conv, mixer.in_b(x_TD) * mixer.in_x(x_TD))
        return mixer.out(mixer.in_c(x_TD) * mixed_TD)
    x, b, c = (
        F.silu(convolved(conv, project(x_TD)))
        for project, conv in (
            (mixer.in_x, mixer.conv_x),
            (mixer.in_b, mixer.conv_b),
            (mixer.in_c, mixer.conv_c),
        )
    )
    heads = len(mixer.A_log)
    x_THP = x.view(len(x), heads, mixer.head_dim)
    b_THN, c_THN = (
        y.view(len(y), -1, mixer.state_dim).repeat_interleave(
            heads * mixer.state_dim // y.shape[1], dim=1
        )
        for y in (b, c)
    )
    step_TH = F.softplus(mixer.in_dt(x_TD) + mixer.dt_bias).clamp(min=mixer.least_step)
    state_HPN, outs = x_THP.new_zeros(heads, mixer.head_dim, mixer.state_dim), []
    for x_HP, b_HN, c_HN, step_H in zip(x_THP, b_THN, c_THN, step_TH, strict=True):
        decay_H = torch.exp(-step_H * mixer.A_log.exp())
        state_HPN = decay_H[:, None, None] * state_HPN + torch.einsum(
            "h,hp,hn->hpn", step_H, x_HP, b_HN
        )
        outs.append(torch.einsum("hpn,hn->hp", state_HPN, c_HN) + mixer.D[:, None] * x_HP)
    gated = torch.stack(outs).flatten(1) * F.silu(mixer.in_z(x_TD))
    groups = gated.view(len(gated), -1, mixer.norm.group_dim)
    groups = groups / (groups.square().mean(-1, keepdim=True) + mixer.norm.eps).sqrt()
    return mixer.out(groups.flatten(1) * mixer.norm.weight)


def expected_output(mixer: Any, x_BLD: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
    return torch.stack(
        [
            torch.cat([by_definition(mixer, document) for document in x_LD.split(list(lengths))])
            for x_LD, lengths in zip(x_BLD, rows, strict=True)
        ]
    )


def results(mixer: Any, x: Tensor, out: Tensor) -> list[Tensor]:
    """Return the output and the gradients of the input and all parameters for a fixed weighting of
    the outputs."""
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return [out, *torch.autograd.grad((out * weight).sum(), [x, *mixer.parameters()])]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_packed_documents_equal_the_definition_of_each(kind, rows):
    mixer, x = make_mixer(kind), random_input(rows)
    found = results(mixer, x, mixer(x, None, metadata_of(rows)))
    expected = results(mixer, x, expected_output(mixer, x, rows))
    # Float64 sums in another order.
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "sizes",
    [
        {"n_groups": 1, "conv_bias": False},
        {"n_groups": 4, "conv_width": 1, "bias": True},
        {"least_step": 0.5},
    ],
    ids=str,
)
def test_other_sizes_equal_the_definition(sizes):
    rows = [[70, 3, 17], [90]]
    mixer, x = make_mixer("mamba", 1, **sizes), random_input(rows)
    found = results(mixer, x, mixer(x, None, metadata_of(rows)))
    expected = results(mixer, x, expected_output(mixer, x, rows))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mistake", ["state", "convolution", "short convolution"])
def test_a_missing_reset_is_caught(monkeypatch, mistake):
    rows = [[5, 1, 60, 30, 40], [80, 56]]
    owner, name = (
        (mamba, "selective_scan") if mistake == "state" else (document_conv.DocumentConv, "forward")
    )
    mixer, x = make_mixer("short conv" if "short" in mistake else "mamba"), random_input(rows)
    original = getattr(owner, name)

    def one_document(*args: Any) -> Any:
        """Call the original with the same number for all documents."""
        return original(
            *(
                arg * 0 if isinstance(arg, Tensor) and not arg.is_floating_point() else arg
                for arg in args
            )
        )

    monkeypatch.setattr(owner, name, one_document)
    difference = mixer(x, None, metadata_of(rows)) - expected_output(mixer, x, rows)
    assert difference[:, :5].abs().max() < 1e-9  # the first document
    assert difference.abs().max() > 1e-2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parts", [(70, 1, 1, 1, 5, 66), (1,) * 12 + (132,), (144,)], ids=str)
def test_states_continue_where_the_last_pass_ended(kind, parts):
    """Rows are padded on the left, by more and by less than the convolution sees, and every part
    may end anywhere."""
    paddings, length = (0, 1, 2, 69, 75), 144
    positions_BL = (torch.arange(length) - torch.tensor(paddings)[:, None]).clamp(min=0)
    rows = [[1] * padding + [length - padding] for padding in paddings]
    mixer, x_BLD, states, place = make_mixer(kind), random_input(rows), {}, 0
    expected = expected_output(mixer, x_BLD, rows)
    with torch.no_grad():
        for new in parts:
            part = slice(place, place + new)
            attention = AttentionMetadata.from_positions(positions_BL[:, part])
            out = mixer(x_BLD[:, part], None, replace(attention, states=states))
            torch.testing.assert_close(out, expected[:, part], rtol=1e-9, atol=1e-9)
            place += new


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_layer_is_one_graph_and_equal(kind):
    """Positions are data, so other documents need no other graph."""
    mixer = make_mixer(kind)
    compiled = torch.compile(mixer, backend="eager", fullgraph=True)
    for rows in (ROWS[1], [[100, 28], [1, 127]]):
        x, metadata = random_input(rows).detach(), metadata_of(rows)
        torch.testing.assert_close(compiled(x, None, metadata), mixer(x, None, metadata))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "any_length"),
    [
        ([[40], [40]], False),
        ([[128], [60, 68]], False),
        pytest.param([[40], [40]], True, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_compiled_gradients_are_equal(rows, any_length):
    """Also in rows that a single chunk could hold."""
    torch.compiler.reset()  # After a test with another length, the first graph is for any length.
    mixer, x = make_mixer("mamba"), random_input(rows)
    compiled = torch.compile(mixer, backend="aot_eager", dynamic=any_length)
    metadata = metadata_of(rows)
    # The compiler may change the order of sums.
    torch.testing.assert_close(
        results(mixer, x, compiled(x, None, metadata)),
        results(mixer, x, mixer(x, None, metadata)),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_states_and_recurrence_are_float32(kind):
    mixer, states = make_mixer(kind).bfloat16(), {}
    x = random_input([[100]]).detach()
    metadata = AttentionMetadata.of_rows(1, 100)
    out = mixer(x.bfloat16(), None, replace(metadata, states=states))
    kept = states[mixer] if isinstance(states[mixer], tuple) else [states[mixer]]
    assert out.dtype == torch.bfloat16 and {state.dtype for state in kept} == {torch.float32}
    exact = mixer.double()(x.bfloat16().double(), None, metadata)
    # Projections are rounded to 8 bits.
    assert (out.double() - exact).norm() < 0.02 * exact.norm()


def test_initial_values():
    net = Mamba2(MambaConfig(n_heads=512), dim=8, norm_eps=1e-6, init_std=0.1, out_init_std=0.2)
    initialize_weights(net, 0)
    rates, steps = net.A_log.exp(), F.softplus(net.dt_bias)
    assert 1 <= rates.min() < 1.2 and 15.8 < rates.max() <= 16
    assert 0.001 <= steps.min() < 0.0012 and 0.08 < steps.max() <= 0.1
    assert (net.D == 1).all() and (net.norm.weight == 1).all()
