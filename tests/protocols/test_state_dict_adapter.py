"""The state-dict adapter: transforms in both directions, names, and validation."""

import pytest
import torch

from torchtitan.models.common.rope import RoPEConfig, apply_rope, rope_cos_sin
from torchtitan.models.llama3 import FORMATS, Llama3Model
from torchtitan.protocols.state_dict_adapter import (
    Columns,
    Concatenated,
    Grouped,
    Identity,
    KeyMapping,
    Permuted,
    Repeated,
    RopePermutation,
    Stacked,
    StateDictAdapter,
    Transform,
    check_tied,
    model_tensor_specs,
)
from torchtitan.protocols.tensor_source import TensorSpec
from torchtitan.tools.errors import UserError


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def spec(*shape: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec(torch.Size(shape), dtype)


@pytest.mark.parametrize(
    ("transform", "internal", "external"),
    [
        (Identity(), [(3, 4)], [(3, 4)]),
        (RopePermutation(6), [(12, 5)], [(12, 5)]),
        (Concatenated(0), [(2, 5), (4, 5), (1, 5)], [(7, 5)]),
        (Concatenated(1), [(5, 2), (5, 3)], [(5, 5)]),
        (Stacked(), [(3, 4, 5)], [(4, 5), (4, 5), (4, 5)]),
        (Stacked(2), [(3, 2, 4)], [(4,)] * 6),
        (Permuted((0, 1, 2, 3), 1), [(3, 2, 4, 5)], [(3, 8, 5)]),
        (Permuted((0, 3, 2, 1), 2), [(3, 2, 4, 5)], [(3, 5, 8)]),
        (Permuted((0, 2, 1)), [(3, 4, 5)], [(3, 5, 4)]),
        (Repeated(2), [(3, 4)], [(3, 4), (3, 4)]),
        (Grouped(2, (1, 4)), [(20, 3)], [(20, 3)]),
        (Columns(Grouped(2, (1, 4))), [(3, 20)], [(3, 20)]),
    ],
    ids=lambda value: repr(value) if isinstance(value, Transform) else None,
)
def test_transforms_are_invertible_on_every_device(transform, internal, external):
    for device in ("cpu", "meta"):
        tensors = [random(*shape).to(device) for shape in internal]
        converted = transform.to_external(tensors)
        assert [tuple(tensor.shape) for tensor in converted] == external
        back = transform.to_internal(converted, [tensor.shape for tensor in tensors])
        assert [tuple(tensor.shape) for tensor in back] == internal
        if device == "cpu":
            assert all(torch.equal(a, b) for a, b in zip(back, tensors, strict=True))


def test_groups_have_their_share_of_each_part():
    """Two heads of width 2, and their 3 hidden features each."""
    theirs = torch.tensor([0, 1, 10, 11, 2, 3, 4, 12, 13, 14])
    (ours,) = Grouped(2, (2, 3)).to_internal([theirs], [theirs.shape])
    assert ours.tolist() == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]


def rotate_adjacent(x_LHD: torch.Tensor, angles_LF: torch.Tensor) -> torch.Tensor:
    """Apply RoPE as in the paper and Meta's checkpoints: elements 2i and 2i + 1 form a complex
    number rotated by angle i."""
    pairs = torch.view_as_complex(x_LHD.unflatten(-1, (-1, 2)))
    return torch.view_as_real(
        pairs * torch.polar(torch.ones_like(angles_LF), angles_LF)[:, None]
    ).flatten(-2)


def test_rope_permutation_matches_the_definition():
    """Attention scores of permuted weights with Meta's rotation equal our scores; without
    permutation they differ."""
    heads, head_dim, dim, length = 3, 10, 12, 7
    wq, wk, x = (
        random(heads * head_dim, dim),
        random(heads * head_dim, dim).flip(0),
        random(length, dim),
    )
    positions = torch.arange(length)
    config = RoPEConfig(theta=100.0)
    rope = rope_cos_sin(config, head_dim, positions[None])
    angles = positions[:, None] * 100.0 ** -(torch.arange(0, head_dim, 2) / head_dim)

    def ours(weight: torch.Tensor) -> torch.Tensor:
        return apply_rope((x @ weight.T).unflatten(-1, (heads, head_dim))[None], rope)[0]

    def metas(weight: torch.Tensor) -> torch.Tensor:
        return rotate_adjacent((x @ weight.T).unflatten(-1, (heads, head_dim)), angles)

    def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return torch.einsum("qhd,khd->hqk", q, k)

    expected = scores(ours(wq), ours(wk))
    permuted = RopePermutation(head_dim).to_external([wq, wk])
    # Float32 rounding of sums over 10 products of size up to 30.
    torch.testing.assert_close(scores(*map(metas, permuted)), expected, rtol=1e-5, atol=1e-4)
    assert (scores(metas(wq), metas(wk)) - expected).abs().max() > 1


def fused_adapter() -> StateDictAdapter:
    rows = [
        KeyMapping(("layers.*.q", "layers.*.k"), "h.*.qk", Concatenated(0)),
        KeyMapping("layers.*.experts", ("h.*.expert0", "h.*.expert1"), Stacked()),
        KeyMapping("norm", "ln"),
    ]
    return StateDictAdapter(rows, n_layers=2, ignored=["h.*.inv_freq"], tied={"head": "ln"})


def internal_specs() -> dict[str, TensorSpec]:
    specs = {}
    for layer in range(2):
        specs |= {f"layers.{layer}.q": spec(4, 3), f"layers.{layer}.k": spec(2, 3)}
        specs[f"layers.{layer}.experts"] = spec(2, 5, 6)
    return {**specs, "norm": spec(3, dtype=torch.bfloat16)}


def test_wildcards_expand_to_every_layer():
    adapter = fused_adapter()
    assert adapter.internal_names == [
        "layers.0.q",
        "layers.0.k",
        "layers.1.q",
        "layers.1.k",
        "layers.0.experts",
        "layers.1.experts",
        "norm",
    ]
    assert adapter.external_names == [
        "h.0.qk",
        "h.1.qk",
        "h.0.expert0",
        "h.0.expert1",
        "h.1.expert0",
        "h.1.expert1",
        "ln",
    ]


def test_external_shapes_are_computed_without_tensors():
    specs = fused_adapter().external_specs(internal_specs())
    assert specs["h.1.qk"] == spec(6, 3)
    assert specs["h.0.expert1"] == spec(5, 6)
    assert specs["ln"] == spec(3, dtype=torch.bfloat16)
    assert specs["ln"].n_bytes == 6


def test_ignored_and_tied_tensors_are_accepted():
    adapter, internal = fused_adapter(), internal_specs()
    external = adapter.external_specs(internal) | {"h.1.inv_freq": spec(2), "head": spec(3)}
    assert adapter.plan(external, internal) == (adapter.steps, {"head": "ln"}, [])


def change(specs: dict[str, TensorSpec], **changes: TensorSpec | None) -> dict[str, TensorSpec]:
    return {name: value for name, value in {**specs, **changes}.items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ln": None}, "missing from the checkpoint: ln$"),
        ({"h.0.qk": None, "h.1.expert0": None}, r": h\.0\.qk, h\.1\.expert0$"),
        ({"h.2.qk": spec(6, 3)}, r"^in the checkpoint, but not in the model: h\.2\.qk$"),
        ({"h.2.inv_freq": spec(1)}, r"not in the model: h\.2\.inv_freq$"),
        (
            {"ln": None, "lm": spec(3)},
            "missing from the checkpoint: ln; in the checkpoint, but not in the model: lm$",
        ),
        ({"h.1.qk": spec(7, 3)}, r"h\.1\.qk has shape \[7, 3\] instead of \[6, 3\]"),
        (
            {"h.0.expert1": spec(6, 5), "ln": spec(3, 1)},
            r"h\.0\.expert1 has shape \[6, 5\].*ln has shape \[3, 1\]",
        ),
    ],
)
def test_mismatched_tensors_are_rejected(changes, message):
    adapter, internal = fused_adapter(), internal_specs()
    with pytest.raises(UserError, match=message):
        adapter.plan(change(adapter.external_specs(internal), **changes), internal)


def test_a_long_list_of_names_is_shortened_to_five():
    with pytest.raises(
        UserError, match=r"missing from the checkpoint: h\.0\.qk, (\S+ ){4}… \(7 in all\)$"
    ):
        fused_adapter().plan({}, internal_specs())


def test_missing_weights_of_the_model_are_rejected():
    with pytest.raises(UserError, match="missing from the weights: norm$"):
        fused_adapter().external_specs(change(internal_specs(), norm=None))


def test_tied_weights_must_be_equal():
    check_tied("head", torch.ones(3), "embedding", torch.ones(3))
    with pytest.raises(UserError, match="head differs from embedding"):
        check_tied("head", torch.ones(3), "embedding", torch.tensor([1.0, 1.0, 1.001]))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["hf", "meta"])
def test_llama_formats_contain_every_tensor(name, tied):
    config = Llama3Model.Config(
        dim=16,
        n_layers=3,
        n_heads=4,
        n_kv_heads=1,
        ffn_dim=9,
        vocab_size=11,
        tie_embeddings=tied,
        rope=RoPEConfig(),
    )
    adapter, specs = FORMATS[name].adapter(config), model_tensor_specs(config)
    assert set(adapter.internal_names) == specs.keys()
    # The Hugging Face format omits a tied head; the Meta format stores the shared tensor twice.
    assert len(adapter.external_names) == len(specs) + (tied and name == "meta")
