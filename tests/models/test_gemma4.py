"""Gemma 4: mistakes are caught; published sizes, config.json, files of models with vision, and
adapters."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.models.family_cases import (
    difference_with,
    random_reference,
    random_tokens,
    relative_error,
    to_ours,
)
from tests.models.family_runs import assert_adapters_open_in_peft, save_with_tokenizer
from tests.models.test_sft_configs import SHORT, chat_file, run_named
from tests.training import killed_in, read_metrics, train
from torchtitan.cli.main import main
from torchtitan.components.generation import KVCache, generate
from torchtitan.config import ParallelismConfig
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.models import gemma4
from torchtitan.models.common import layer_inputs
from torchtitan.models.common.attention import Attention
from torchtitan.models.common.rope import RoPEConfig, rope_frequencies
from torchtitan.models.gemma4 import FLAVORS, FORMATS, model_registry
from torchtitan.models.pretrained import load_model
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.protocols.output_head import UNCHANGED
from torchtitan.protocols.state_dict_adapter import model_tensor_specs
from torchtitan.tools.errors import UserError
from torchtitan.trainer import Trainer

__all__ = ["chat_file"]  # a fixture

transformers = pytest.importorskip("transformers")

READ, WRITE = FORMATS["hf"].from_external, FORMATS["hf"].to_external

ROPES = {
    "full_attention": {
        "rope_type": "proportional",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
}
DISTINCT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "attention_bias": False,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 16,
    "final_logit_softcapping": 1.5,
    "tie_word_embeddings": False,
    "rope_parameters": ROPES,
}
"""A configuration in which each feature has an effect."""

SMALL: dict[str, Any] = {
    **DISTINCT,
    **{
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 3,
    },
    **{
        "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": 97,
        "use_double_wide_mlp": True,
    },
    "attention_k_eq_v": False,
}
EXPERTS: dict[str, Any] = {
    **DISTINCT,
    **{"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24},
}


# --- mistakes
# --------------------------------------------------------------------------------------------------


def _for_attention(model: Any, change: Callable[[Any], None]) -> None:
    for layer in model.layers.values():
        change(layer.attention)


def scores_divided(model: Any) -> None:
    _for_attention(model, lambda attention: setattr(attention, "attend", Attention()))


def no_value_norm(model: Any) -> None:
    _for_attention(model, lambda attention: setattr(attention, "v_norm", None))


class _KeyNorm(nn.Module):
    def __init__(self, norm: nn.RMSNorm):
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(self.norm(x), x.shape[-1:], eps=1e-6)


def values_after_key_norm(model: Any) -> None:
    def change(attention: Any) -> None:
        if attention.wv is None:
            attention.v_norm = _KeyNorm(attention.k_norm)

    _for_attention(model, change)


def norms_with_offset(model: Any) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(1.0)


def no_layer_scalar(model: Any) -> None:
    for layer in model.layers.values():
        layer.layer_scalar.fill_(1.0)


def scalar_before_addition(model: Any) -> None:
    for layer in model.layers.values():
        scalar = layer.layer_scalar.clone()
        layer.layer_scalar.fill_(1.0)
        layer._add = lambda x, out, scalar=scalar: x + scalar * out


def first_elements_rotated(model: Any) -> None:
    """As in other models with partial rotation, and with the frequencies of the rotated part."""
    model.config.rope = RoPEConfig(theta=1e4, rotated_fraction=0.25)


def all_elements_rotated(model: Any) -> None:
    model.config.rope = RoPEConfig(theta=1e4)


def ropes_exchanged(model: Any) -> None:
    model.config.rope, model.config.local_rope = model.config.local_rope, model.config.rope


def frequencies_of_narrow_heads(model: Any) -> None:
    """As if all layers had the heads of layers with windows: half of the cosines repeat."""
    original = layer_inputs.rope_cos_sin

    def cos_sin(rope: RoPEConfig, head_dim: int, *positions: Any) -> Any:
        repeats = head_dim // 8
        return tuple(x.repeat_interleave(repeats, dim=-1) for x in original(rope, 8, *positions))

    forward = model.forward

    def with_narrow(*inputs: Any) -> Tensor:
        layer_inputs.rope_cos_sin = cos_sin  # type: ignore[assignment]
        try:
            return forward(*inputs)
        finally:
            layer_inputs.rope_cos_sin = original

    model.forward = with_narrow


def window_one_longer(model: Any) -> None:
    model.config.sliding_window += 1


def windows_exchanged(model: Any) -> None:
    model.window_of_layer = lambda index: model.config.sliding_window if index % 2 else None


def no_cap_of_logits(model: Any) -> None:
    model.head.transform = UNCHANGED


def no_embedding_factor(model: Any) -> None:
    model.embed = lambda tokens: model.tok_embeddings(tokens)


def exact_gelu(model: Any) -> None:
    for layer in model.layers.values():
        layer.feed_forward.activation = F.gelu


def keys_of_the_first_layer(model: Any) -> None:
    """Instead of the last of the type before the layers that share."""
    given: list[Any] = []
    first, last = model.layers["0"].forward, model.layers["2"].forward

    def with_memory(*inputs: Any) -> Any:
        hidden, *given[:] = first(*inputs)
        return hidden, *given

    model.layers["0"].forward = with_memory
    model.layers["2"].forward = lambda *inputs: (last(*inputs)[0], *given)


def no_embedding_of_layers(model: Any) -> None:
    model.per_layer.tok_embeddings.weight.data.zero_()


def no_factor_of_their_embeddings(model: Any) -> None:
    model.per_layer.tok_embeddings.weight.data.mul_(12**-0.5)


def no_projection_of_states(model: Any) -> None:
    model.per_layer.norm.weight.data.zero_()


def inputs_of_the_next_layer(model: Any) -> None:
    inputs = model.per_layer.forward
    model.per_layer.forward = lambda *states: inputs(*states).roll(-1, dims=2)


def third_part_behind_the_factor(model: Any) -> None:
    for layer in model.layers.values():
        layer.own["norm"].weight.data.div_(layer.layer_scalar)


def plain_router(model: Any) -> None:
    for layer in model.layers.values():
        layer.moe.router.norm = nn.Identity()


def no_scale_of_experts(model: Any) -> None:
    for layer in model.layers.values():
        layer.moe.router.expert_scale.data.fill_(1.0)


def experts_behind_the_dense_norm(model: Any) -> None:
    for layer in model.layers.values():
        layer.moe.norm = layer.ffn_norm


def no_norm_of_the_dense_result(model: Any) -> None:
    for layer in model.layers.values():
        layer.dense_post_norm = nn.Identity()


@pytest.fixture(scope="module")
def reference() -> Any:
    return random_reference("gemma4_text", 0, **DISTINCT)


@pytest.fixture(scope="module")
def small() -> Any:
    return random_reference("gemma4_text, small", 0, **SMALL)


@pytest.fixture(scope="module")
def experts() -> Any:
    return random_reference("gemma4_text, experts", 0, **EXPERTS)


MISTAKES = [
    *(
        scores_divided,
        no_value_norm,
        values_after_key_norm,
        norms_with_offset,
        no_layer_scalar,
        scalar_before_addition,
    ),
    *(
        first_elements_rotated,
        all_elements_rotated,
        ropes_exchanged,
        frequencies_of_narrow_heads,
        window_one_longer,
    ),
    *(windows_exchanged, no_cap_of_logits, no_embedding_factor, exact_gelu),
]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_caught(reference: Any, mistake: Callable[[Any], None]) -> None:
    # Float32 sums in another order. Mistakes change more than 0.01, except GELU by erf instead of
    # tanh.
    assert difference_with(lambda model: None, reference) < 1e-5
    assert difference_with(mistake, reference) > 2e-4


SMALL_MISTAKES = [
    *(
        keys_of_the_first_layer,
        no_embedding_of_layers,
        no_factor_of_their_embeddings,
        no_projection_of_states,
    ),
    *(inputs_of_the_next_layer, third_part_behind_the_factor),
]


@pytest.mark.parametrize("mistake", SMALL_MISTAKES)
def test_mistake_in_small_model_is_caught(small: Any, mistake: Callable[[Any], None]) -> None:
    assert difference_with(lambda model: None, small) < 1e-5
    assert difference_with(mistake, small) > 1e-2


@pytest.mark.parametrize(
    "mistake",
    [plain_router, no_scale_of_experts, experts_behind_the_dense_norm, no_norm_of_the_dense_result],
)
def test_mistake_with_experts_is_caught(experts: Any, mistake: Callable[[Any], None]) -> None:
    assert difference_with(lambda model: None, experts) < 1e-5
    assert difference_with(mistake, experts) > 1e-2


def test_shared_keys_are_cached_once(small: Any) -> None:
    """Only layers with their own keys have some in the cache."""
    model, _ = to_ours(gemma4, small)
    with KVCache(model, 20) as cache, torch.no_grad():
        model(torch.arange(20)[None], cache.attention(torch.arange(20)[None]))
        assert len(cache._stored) == 3
    layers: Any = model.layers
    assert all(layers[str(index)].attention.wk is None for index in (3, 4, 5))
    assert [layers[str(index)].feed_forward.w1.out_features for index in (2, 3)] == [
        model.config.ffn_dim,  # type: ignore[attr-defined]
        2 * model.config.ffn_dim,  # type: ignore[attr-defined]
    ]


@pytest.mark.parametrize("kind", ["small", "experts"])
def test_packed_documents_are_separate(kind: str, request: pytest.FixtureRequest) -> None:
    model, _ = to_ours(gemma4, request.getfixturevalue(kind))
    tokens, _ = random_tokens(97, 50)
    positions_BL = torch.cat([torch.arange(20), torch.arange(30)])[None]
    with torch.no_grad():
        packed = model(tokens[:1], AttentionMetadata.from_positions(positions_BL))
        alone = torch.cat([model(part) for part in tokens[:1].split([20, 30], dim=1)], dim=1)
    assert relative_error(packed, alone) < 1e-5


def test_unused_keys_in_files_are_left_out(tmp_path: Path, small: Any) -> None:
    """Published files have them; no other tensor is skipped."""
    small.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.4.self_attn.k_proj.weight"] = torch.zeros(32, 32)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = load_model(tmp_path, device="cpu").model
    tokens, _ = random_tokens(97, 50)
    with torch.no_grad():
        assert relative_error(model(tokens), small(tokens).logits) < 1e-5
    tensors["model.layers.2.self_attn.other.weight"] = torch.zeros(3)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"layers\.2\.self_attn\.other"):
        load_model(tmp_path, device="cpu")


def test_proportional_rope() -> None:
    """The first eighth of the elements, and of the second half, turn as in a head that is rotated
    entirely."""
    whole = rope_frequencies(RoPEConfig(theta=1e4), 16)
    part = rope_frequencies(
        RoPEConfig(theta=1e4, scaling="proportional", rotated_fraction=0.25), 16
    )
    assert part.tolist() == [*whole[:2].tolist(), *[0.0] * 6]


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "glm4"])
def test_proportional_rope_in_other_families(model_type: str) -> None:
    """transformers computes it in every model, and so do we."""
    rope = {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    reference = random_reference(model_type, 0, rope_parameters=rope, num_hidden_layers=3)
    assert difference_with(lambda model: None, reference) < 1e-5
    assert (
        difference_with(
            lambda model: setattr(model.config, "rope", RoPEConfig(theta=1e4)), reference
        )
        > 1e-3
    )


def test_embedding_factor_and_scalar_are_rounded(reference: Any) -> None:
    """As in transformers, bit for bit, to the type of the weights."""
    model, _ = to_ours(gemma4, reference)
    tokens, _ = random_tokens(97, 50)
    model, theirs = (
        model.to(torch.bfloat16),
        random_reference("gemma4_text", 0, **DISTINCT).to(torch.bfloat16),
    )
    assert torch.equal(model.embed(tokens), theirs.model.embed_tokens(tokens))  # type: ignore[operator]
    assert model(tokens).dtype == torch.bfloat16


# --- sizes of heads
# --------------------------------------------------------------------------------------------------


def test_each_layer_has_its_heads(monkeypatch: pytest.MonkeyPatch, reference: Any) -> None:
    """RoPE and kernels are computed once for each width of heads, and the cache holds each
    layer's."""
    model, _ = to_ours(gemma4, reference)
    calls: list[tuple[str, int]] = []
    for name in ("rope_cos_sin", "with_kernel"):
        original = getattr(layer_inputs, name)

        def recorded(
            *inputs: Any, name: str = name, original: Any = original, **options: Any
        ) -> Any:
            calls.append((name, options["head_dim"] if options else inputs[1]))
            return original(*inputs, **options)

        monkeypatch.setattr(layer_inputs, name, recorded)
    with KVCache(model, 20) as cache, torch.no_grad():
        model(torch.arange(20)[None], cache.attention(torch.arange(20)[None]))
        shapes = [tuple(keys.shape) for _, keys, _ in cache._stored.values()]
    assert sorted(calls) == [
        (name, head_dim) for name in ("rope_cos_sin", "with_kernel") for head_dim in (8, 16)
    ]
    assert shapes == [(1, 20, 4, 8), (1, 20, 2, 16)] * 2


def test_operations_count_the_width_of_each_layer(reference: Any) -> None:
    model, _ = to_ours(gemma4, reference)
    # 2 layers of 4 heads with a window of 16 tokens, and 2 wider ones
    scores = 2 * 12 * 4 * (8 * 16 + 16 * 50)
    weights = model.num_parameters() - 97 * 32  # except the embedding, which is only looked up
    frozen_input = sum(p.numel() for p in [*model.layers["0"].attention.wq.parameters()])  # type: ignore[union-attr]
    assert frozen_input and model.flops_per_token(50) == pytest.approx(6 * weights + scores)


def test_operations_count_active_weights_only(small: Any, experts: Any) -> None:
    """Not the embeddings of layers, which are only looked up; of the experts, only a token's."""
    model, _ = to_ours(gemma4, small)
    table: Any = model.per_layer.tok_embeddings  # type: ignore[union-attr]
    scores = 3 * 12 * 8 * (8 * 16 + 16 * 50) / 2
    weights = model.num_parameters() - 97 * 32 - table.weight.numel()
    assert model.flops_per_token(50) == pytest.approx(6 * weights + scores)
    model, _ = to_ours(gemma4, experts)
    inactive = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n) * 4 / 6
    weights = model.num_parameters() - 97 * 32 - inactive
    assert model.flops_per_token(50) == pytest.approx(6 * weights + scores * 2 / 3)


def test_pipelines_are_refused_by_name() -> None:
    config = model_registry("small-debugmodel").model
    dims = ParallelDims.from_config(ParallelismConfig(pipeline_parallel_degree=2), world_size=2)
    with pytest.raises(
        UserError, match="pipeline_parallel_degree 2 must be 1 for Gemma4Model, because layers use"
    ):
        dims.check_fits(config, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"global_head_dim": 15}, "an even number from 2 to the head width 15 is rotated"),
        ({"global_head_dim": 2**25}, "--model.global_head_dim is 33554432, but must be from 1 to"),
        (
            {"num_global_key_value_heads": 3},
            "num_global_key_value_heads is 3, but must be a divisor of n_heads 8",
        ),
        (
            {"num_global_key_value_heads": 0},
            "num_global_key_value_heads is 0, but must be from 1 to",
        ),
        (
            {"n_layers": 3},
            "--model.layer_types is .*, but must be full_attention in the last layer",
        ),
        (
            {"hidden_size_per_layer_input": -1},
            "--model.hidden_size_per_layer_input is -1, but must be from 0 to",
        ),
        ({"final_logit_softcapping": 0.0}, "--model.final_logit_softcapping is 0.0"),
        ({"local_rope": RoPEConfig(theta=0.0)}, "theta is 0.0"),
    ],
)
def test_unusable_options_are_refused(change: dict[str, Any], message: str) -> None:
    config = model_registry("debugmodel").model
    for name, value in change.items():
        setattr(config, name, value)
    with pytest.raises(UserError, match=message):
        config.validate()


def test_tensor_parallelism_needs_all_key_value_heads() -> None:
    assert FLAVORS["12B"].tensor_parallel_sizes["num_global_key_value_heads"] == 1
    assert FLAVORS["31B"].tensor_parallel_sizes["num_global_key_value_heads"] == 4


# --- config.json
# --------------------------------------------------------------------------------------------------


SIZES = {"E2B": 4_628_569_344, "E4B": 7_463_013_376, "12B": 11_907_350_272}
SIZES |= {"26B-A4B": 25_233_141_760, "31B": 30_697_345_280}


@pytest.mark.parametrize("flavor", ["E2B", "E4B", "26B-A4B", "31B"])
def test_tensors_of_published_sizes(flavor: str) -> None:
    """Names and shapes equal transformers' class of our config.json."""
    config = transformers.AutoConfig.for_model(**WRITE(FLAVORS[flavor]))
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config).state_dict()
    specs = (
        FORMATS["hf"].adapter(FLAVORS[flavor]).external_specs(model_tensor_specs(FLAVORS[flavor]))
    )
    assert {name: spec.shape for name, spec in specs.items()} == {
        name: tensor.shape for name, tensor in theirs.items() if name != "lm_head.weight"
    }


@pytest.mark.parametrize(("flavor", "parameters"), SIZES.items())
def test_published_sizes(flavor: str, parameters: int) -> None:
    """The published 26B-A4B has 25.2 billion parameters, and E2B 2.3 billion besides the embeddings
    of layers. 12B has 11,959,730,176 with the embedders of images and sound, as transformers builds
    it too."""
    with torch.device("meta"):
        model = model_registry(flavor).model.build()
    assert model.num_parameters() == parameters
    if flavor == "12B":
        text = {**WRITE(model.config), "model_type": "gemma4_unified_text"}
        config = transformers.AutoConfig.for_model(
            "gemma4_unified", text_config=text, vision_config={}, audio_config={}
        )
        with torch.device("meta"):
            whole = transformers.AutoModelForImageTextToText.from_config(config)
        assert sum(parameter.numel() for parameter in whole.parameters()) == 11_959_730_176


@pytest.mark.parametrize("flavor", FLAVORS)
def test_flavors_are_written_and_read(flavor: str) -> None:
    config = model_registry(flavor).model
    config.vocab_size = config.vocab_size or 2048
    assert READ(json.loads(json.dumps(WRITE(config)))) == config


def changed(document: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """Return `document` with other keys; ... leaves one out."""
    return {key: value for key, value in {**document, **change}.items() if value is not ...}


BASE = WRITE(FLAVORS["31B"])
OVERRIDES = {str(index): {"head_dim": 512, "num_key_value_heads": 4} for index in range(5, 60, 6)}
OWN = {"hidden_size_per_layer_input": 256}
WITH_EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 64,
}
WITHOUT_GLOBAL = {"global_head_dim": ..., "num_global_key_value_heads": ...}


@pytest.mark.parametrize(
    "change",
    [
        {"layer_types": ...},
        {"layer_types": None, "rope_parameters": None},
        {"rope_parameters": ..., "head_dim": ...},
        {"use_bidirectional_attention": "vision", "top_k_experts": None},
        {"use_double_wide_mlp": True},  # only layers that share keys are wide
        {
            "model_type": "gemma4_unified_text",
            "sliding_window": ...,
            "hidden_size_per_layer_input": ...,
        },
        {**WITHOUT_GLOBAL, "per_layer_config": OVERRIDES},
        {"global_head_dim": 7, "per_layer_config": OVERRIDES},
    ],
)
def test_spellings(change: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """They mean the same model, here and in transformers, and nothing is logged."""
    document = changed(BASE, change)
    assert READ(document) == FLAVORS["31B"]
    assert not caplog.records
    assert READ(transformers.AutoConfig.for_model(**document).to_dict()) == FLAVORS["31B"]


def test_missing_keys_have_transformers_defaults() -> None:
    names = (
        "model_type",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    )
    names += ("vocab_size", "max_position_embeddings", "hidden_size_per_layer_input")
    document = {name: BASE[name] for name in names}
    assert READ(document) == READ(transformers.AutoConfig.for_model(**document).to_dict())


def test_key_value_heads_without_keys_as_values() -> None:
    """transformers then ignores the number of full layers, except in `per_layer_config`, which is
    not written."""
    document = {**BASE, "attention_k_eq_v": False}
    assert READ(document).num_global_key_value_heads == 16  # type: ignore[attr-defined]
    config = READ({**document, "per_layer_config": OVERRIDES})
    assert config.num_global_key_value_heads == 4  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="no model_type of config.json"):
        WRITE(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "gemma4_unified_text", "hidden_size_per_layer_input": 9},
            "hidden_size_per_layer_input is 9",
        ),
        ({"hidden_size_per_layer_input": "9"}, "hidden_size_per_layer_input is '9'"),
        (
            {**OWN, "vocab_size_per_layer_input": 9},
            "vocab_size_per_layer_input is 9, but must be vocab_size 262144",
        ),
        (
            {"num_kv_shared_layers": 20},
            "num_kv_shared_layers is 20, but must be 0 without hidden_size_per_layer_input",
        ),
        ({"model_type": "gemma4_unified_text", "enable_moe_block": True}, "num_experts is missing"),
        ({"model_type": "gemma4_unified_text", **WITH_EXPERTS}, "enable_moe_block is True"),
        (
            {**OWN, "num_kv_shared_layers": 55},
            "num_kv_shared_layers is 55, but must be .*leave a layer of each type",
        ),
        (
            {**OWN, "num_kv_shared_layers": 61},
            "num_kv_shared_layers is 61, but must be .*leave a layer of each type",
        ),
        ({"enable_moe_block": True}, "num_experts is missing"),
        ({**WITH_EXPERTS, "enable_moe_block": 1}, "enable_moe_block is 1"),
        ({**WITH_EXPERTS, "moe_intermediate_size": None}, "moe_intermediate_size is None"),
        ({**WITH_EXPERTS, **OWN}, "hidden_size_per_layer_input is 256"),
        ({**WITH_EXPERTS, "num_kv_shared_layers": 2}, "num_kv_shared_layers is 2"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ({"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
        ({"layer_types": 3}, "layer_types is 3"),
        ({"layer_types": 3, "per_layer_config": OVERRIDES}, "per_layer_config is "),
        ({"layer_types": ["sliding_attention"] * 60}, "must be full_attention in the last layer"),
        ({"layer_types": ["full_attention"]}, "layer_types is .*num_hidden_layers = 60"),
        ({"sliding_window": None}, "sliding_window is None"),
        ({"global_head_dim": 511}, "an even number from 2 to the head width 511"),
        ({"per_layer_config": {"5": {"head_dim": 512}}}, "per_layer_config is .*all full layers"),
        (
            {"per_layer_config": {**OVERRIDES, "0": {"head_dim": 512}}},
            "per_layer_config is .*all full layers",
        ),
        (
            {"per_layer_config": {i: {"sliding_window": 3} for i in OVERRIDES}},
            "per_layer_config is .*all full layers",
        ),
        ({"per_layer_config": 3}, "per_layer_config is 3"),
        ({"per_layer_config": {"59": 3}}, "59 is 3"),
        (
            {
                "rope_parameters": {
                    **ROPES,
                    "sliding_attention": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
                }
            },
            "partial_rotary_factor is 0.5",
        ),
        (
            {"rope_parameters": {**ROPES, "full_attention": {"rope_type": "axial"}}},
            "RoPE of type 'axial'",
        ),
    ],
)
def test_unsupported_values_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        READ(changed(BASE, change))
    assert "\n" not in str(raised.value)


# --- files and runs
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def pretrained(tmp_path: Path) -> Path:
    """A tiny model, saved by transformers with the embedded tokenizer and a custom chat
    template."""
    options = {"vocab_size": 2048, "max_position_embeddings": 2048, "tie_word_embeddings": True}
    return save_with_tokenizer(
        random_reference("gemma4_text", 0, **{**DISTINCT, **options}), tmp_path / "hf"
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "small", "experts"])
def test_adapters_for_a_hugging_face_folder(
    tmp_path: Path, pretrained: Path, chat_file: Path, kind: str
) -> None:
    if kind != "dense":
        options = {
            "vocab_size": 2048,
            "vocab_size_per_layer_input": 2048,
            "max_position_embeddings": 2048,
        }
        wide = {**SMALL, "hidden_size_per_layer_input": 16}  # the rank of the adapters
        own = {**(wide if kind == "small" else EXPERTS), **options, "tie_word_embeddings": True}
        pretrained = save_with_tokenizer(
            random_reference(f"gemma4_text, {kind}", 0, **own), tmp_path / "own"
        )
    assert_adapters_open_in_peft("gemma4", pretrained, chat_file, tmp_path / "run")


def test_conversion_round_trip(tmp_path: Path, pretrained: Path) -> None:
    """Bit for bit, including the layers' factors, which are buffers."""
    assert main(["convert", "--to", "dcp", str(pretrained), str(tmp_path / "dcp")]) == 0
    assert main(["convert", "--to", "hf", str(tmp_path / "dcp"), str(tmp_path / "again")]) == 0
    original, again = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        for name in ("hf", "again")
    )
    theirs, ours = original.state_dict(), again.state_dict()
    assert theirs.keys() == ours.keys() and all(
        torch.equal(theirs[name], ours[name]) for name in theirs
    )
    assert theirs["model.layers.0.layer_scalar"] != 1


@pytest.mark.slow
def test_resumed_run_keeps_the_factors_of_layers(
    tmp_path: Path, pretrained: Path, chat_file: Path
) -> None:
    """Whole weights are trained, saved, resumed and exported; the factors stay as they were
    loaded."""
    options = {"module": "auto", "hf_assets_path": pretrained, "dataloader__dataset": [chat_file]}
    options |= {
        **SHORT,
        "training__seq_len": 128,
        "checkpoint__interval": 1,
        "checkpoint__keep_latest_k": 3,
    }
    options |= {"training__epochs": None}
    for steps in (1, 2):
        length = {"training__steps": steps, "checkpoint__last_save_in_hf": steps == 2}
        length["checkpoint__export_dtype"] = "float32" if steps == 2 else None
        trainer = run_named("sft", tmp_path / "run", **options, **length)
    assert trainer.step == 2
    export = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "run/checkpoint/step-2"
    ).state_dict()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(pretrained).state_dict()
    same = {name for name, tensor in theirs.items() if torch.equal(tensor, export[name])}
    assert same == {name for name in theirs if name.endswith("layer_scalar")}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["small", "moe"])
def test_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, kind: str) -> None:
    """Bit for bit, with shared keys or experts."""
    options = {
        "module": "gemma4",
        "config": f"gemma4_{kind}_debugmodel",
        "model__n_layers": 4,
        "model__ffn_dim": 96,
    }
    options |= {
        "checkpoint__enable": True,
        "checkpoint__interval": 2,
        "checkpoint__keep_latest_k": 0,
    }
    train(tmp_path / "whole", **options)
    with killed_in(Trainer, "train_step", 4):
        train(tmp_path / "cut", **options)
    train(tmp_path / "cut", **options)
    assert read_metrics(tmp_path / "cut", "loss") == read_metrics(tmp_path / "whole", "loss")
    weights = [
        load_model(tmp_path / name / "checkpoint/step-4", device="cpu").model
        for name in ("whole", "cut")
    ]
    ours, theirs = (model.state_dict() for model in weights)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def with_vision_and_sound(whole: str, reference: Any) -> Any:
    """Return transformers' model with vision and sound, and with the reference as its language
    model."""
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    vision |= {"num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16}
    audio: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    audio |= {"subsampling_conv_channels": [4, 4], "output_proj_dims": 16}
    if whole == "gemma4_unified":
        vision, audio = {"mm_embed_dim": 16}, {}
    parts = {
        "text_config": reference.config.to_dict(),
        "vision_config": vision,
        "audio_config": audio,
    }
    model = transformers.AutoModelForImageTextToText.from_config(
        transformers.AutoConfig.for_model(whole, **parts)
    )
    model.model.language_model.load_state_dict(reference.model.state_dict())
    return model


DESIGNS = {"": DISTINCT, ", small": SMALL, ", experts": EXPERTS}


@pytest.mark.parametrize(
    ("whole", "design"), [*(("gemma4", design) for design in DESIGNS), ("gemma4_unified", "")]
)
def test_language_model_of_a_model_with_vision(
    tmp_path: Path, whole: str, design: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Vision and sound tensors are skipped; the language model generates the same tokens."""
    reference = random_reference(
        f"{whole}_text{design}", 0, **{**DESIGNS[design], "tie_word_embeddings": True}
    )
    save_with_tokenizer(with_vision_and_sound(whole, reference), tmp_path)
    names = load_file(tmp_path / "model.safetensors")
    assert any("vision" in name for name in names) and any("audio" in name for name in names)
    ours = load_model(tmp_path, device="cpu").model
    assert any("without the model's vision and audio" in message for message in caplog.messages)
    tokens, _ = random_tokens(97, 50)
    with torch.no_grad():
        assert relative_error(ours(tokens), reference(tokens).logits) < 1e-5
    expected = reference.generate(
        torch.tensor([[5, 7]]), max_new_tokens=30, do_sample=False, eos_token_id=None
    )
    (generation,) = generate(ours, [[5, 7]], max_new_tokens=30)
    assert [5, 7, *generation.ids] == expected[0].tolist()


@pytest.mark.slow
def test_auto_trains_the_language_model_of_a_folder_with_vision(
    tmp_path: Path, chat_file: Path
) -> None:
    """The export is the language model alone, which transformers opens."""
    sizes = {
        "vocab_size": 2048,
        "vocab_size_per_layer_input": 2048,
        "max_position_embeddings": 2048,
    }
    reference = random_reference(
        "gemma4_text, small", 0, **{**SMALL, **sizes, "tie_word_embeddings": True}
    )
    folder = save_with_tokenizer(with_vision_and_sound("gemma4", reference), tmp_path / "hf")
    options = {
        "module": "auto",
        "hf_assets_path": folder,
        "dataloader__dataset": [chat_file],
        **SHORT,
    }
    options |= {"training__seq_len": 128, "training__epochs": None, "training__steps": 1}
    trainer = run_named("sft", tmp_path / "run", **options)
    export = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run/checkpoint/step-1")
    assert (
        type(export).__name__ == "Gemma4ForCausalLM" and trainer.config.model_spec.name == "gemma4"
    )
    assert export.state_dict().keys() == reference.state_dict().keys()
