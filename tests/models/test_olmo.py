"""Features of OLMo 2 and 3 that Llama lacks: mistakes are caught. Sizes and config.json are as
published."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.family_cases import difference_with, random_reference
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.olmo import FLAVORS, FORMATS, model_registry
from torchtitan.models.olmo.model import Olmo2Model
from torchtitan.tools.errors import UserError

transformers = pytest.importorskip("transformers")

READ, WRITE = FORMATS["hf"].from_external, FORMATS["hf"].to_external

YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "attention_factor": 1.2079441541679836,
    "beta_fast": 32,
    "beta_slow": 1,
}
OLMO_3_7B = {
    "architectures": ["Olmo3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 8,
    "max_position_embeddings": 65536,
    "model_type": "olmo3",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pad_token_id": 100277,
    "rms_norm_eps": 1e-6,
    "rope_scaling": YARN,
    "rope_theta": 500000,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.0",
    "use_cache": True,
    "vocab_size": 100278,
}
"""As published, in the spelling of transformers 4."""


# --- mistakes
# --------------------------------------------------------------------------------------------------


def norms_before_instead_of_after(model: Any) -> None:
    for block in model.layers.values():
        block.attention_norm, block.attention_post_norm = block.attention_post_norm, None
        block.ffn_norm, block.ffn_post_norm = block.ffn_post_norm, None


def query_norm_of_each_head(model: Any) -> None:
    def forward(norm: nn.RMSNorm, x_BLE: Tensor) -> Tensor:
        x_BLHD = x_BLE.unflatten(-1, (4, -1))
        return (
            nn.functional.rms_norm(x_BLHD, x_BLHD.shape[-1:], eps=norm.eps).flatten(-2)
            * norm.weight
        )

    for block in model.layers.values():
        norm = block.attention.q_wide_norm
        norm.forward = forward.__get__(norm)


def exchanged_norms_of_queries_and_keys(model: Any) -> None:
    for block in model.layers.values():
        attention = block.attention
        attention.q_wide_norm, attention.k_wide_norm = attention.k_wide_norm, attention.q_wide_norm


def window_one_wider(model: Any) -> None:
    model.config.sliding_window += 1


def window_one_narrower(model: Any) -> None:
    model.config.sliding_window -= 1


def window_in_full_attention_layers(model: Any) -> None:
    model.window_of_layer = lambda index: model.config.sliding_window


def scaled_rope_in_all_layers(model: Any) -> None:
    model.config.local_rope = model.config.rope


def unscaled_rope_in_all_layers(model: Any) -> None:
    model.config.rope = model.config.local_rope


@pytest.mark.parametrize(
    "mistake",
    [
        norms_before_instead_of_after,
        query_norm_of_each_head,
        exchanged_norms_of_queries_and_keys,
        window_one_wider,
        window_one_narrower,
        window_in_full_attention_layers,
        scaled_rope_in_all_layers,
        unscaled_rope_in_all_layers,
    ],
)
def test_mistake_is_caught(mistake: Callable[[Any], None]) -> None:
    ropes = {
        "full_attention": {**YARN, "rope_theta": 1e4, "original_max_position_embeddings": 16},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    reference = random_reference(
        "olmo3",
        0,
        layer_types=None,
        num_hidden_layers=4,
        num_key_value_heads=4,
        rope_parameters=ropes,
        sliding_window=8,
        rms_norm_eps=1e-6,
    )
    assert difference_with(lambda model: None, reference) < 1e-4
    assert difference_with(mistake, reference) > 1e-3


# --- sizes and config.json
# --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flavor", "parameters"),
    # Of the published weights.
    [
        ("2-1B", 1_484_916_736),
        ("2-7B", 7_298_617_344),
        ("2-13B", 13_716_198_400),
        ("2-32B", 32_234_279_936),
        ("3-7B", 7_298_011_136),
        ("3-32B", 32_233_522_176),
    ],
)
def test_published_sizes(flavor: str, parameters: int) -> None:
    with torch.device("meta"):
        assert model_registry(flavor).model.build().num_parameters() == parameters
    assert READ(json.loads(json.dumps(WRITE(FLAVORS[flavor])))) == FLAVORS[flavor]


def test_published_file_is_read_without_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert READ(OLMO_3_7B) == FLAVORS["3-7B"]
    assert not caplog.records


def test_spelling_of_transformers_5_is_equal() -> None:
    document = {
        key: value for key, value in OLMO_3_7B.items() if key not in ("rope_scaling", "rope_theta")
    }
    sections = {
        "full_attention": {**YARN, "rope_theta": 500000},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500000},
    }
    assert READ({**document, "rope_parameters": sections}) == FLAVORS["3-7B"]
    assert READ(transformers.Olmo3Config.from_dict(OLMO_3_7B).to_dict()) == FLAVORS["3-7B"]


def test_written_file_has_the_spelling_of_transformers_4() -> None:
    written = WRITE(FLAVORS["3-7B"])
    assert written["rope_theta"] == 500000 and written["rope_scaling"] == YARN
    config = FLAVORS["debugmodel"]
    assert "rope_scaling" in WRITE(config)
    differing = type(config)(
        **{
            **config.to_dict(),
            "vocab_size": 8,
            "rope": RoPEConfig(theta=1e6),
            "local_rope": RoPEConfig(theta=1e4),
        }
    )
    assert "rope_scaling" not in WRITE(differing)
    assert READ(WRITE(differing)) == differing


@pytest.mark.parametrize("model_type", ["olmo2", "olmo3"])
def test_missing_keys_have_transformers_defaults(model_type: str) -> None:
    required = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
    )
    document = {
        "model_type": model_type,
        "max_position_embeddings": 64,
        **{key: OLMO_3_7B[key] for key in required},
    }
    config, theirs = READ(document), transformers.AutoConfig.for_model(**document)
    assert config.n_kv_heads == theirs.num_key_value_heads
    assert (config.norm_eps, config.tie_embeddings) == (
        theirs.rms_norm_eps,
        theirs.tie_word_embeddings,
    )
    if model_type == "olmo2":
        assert config.rope.theta == theirs.rope_parameters["rope_theta"]
        return
    assert config.sliding_window == theirs.sliding_window
    assert [config.has_window(index) for index in range(config.n_layers)] == [
        kind == "sliding_attention" for kind in theirs.layer_types
    ]
    assert config.rope.theta == theirs.rope_parameters["full_attention"]["rope_theta"]
    assert config.local_rope.theta == theirs.rope_parameters["sliding_attention"]["rope_theta"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["sliding_attention"]}, "layer_types is .* 32 items"),
        ({"layer_types": ["linear_attention"] * 32}, "layer_types is .*'linear_attention'"),
        (
            {"rope_theta": 1e6},
            "rope_theta is 1000000.0, which transformers 5 does not apply to all layers",
        ),
        ({"rope_parameters": YARN}, "rope_parameters has 'rope_type': 'yarn'"),
        (
            {"rope_parameters": {"sliding_attention": YARN}},
            "rope_scaling .* and rope_parameters .* differ",
        ),
        ({"sliding_window": None}, "sliding_window is None"),
        ({"rope_parameters": "yarn"}, "rope_parameters is 'yarn', but must be an object"),
        ({"rope_parameters": {"full_attention": 5}}, "full_attention is 5, but must be an object"),
        ({"rope_theta": "1e6"}, "rope_theta is '1e6'"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn', but must be an object"),
        ({"rope_scaling": {**YARN, "truncate": 0}}, "truncate is 0"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "type is 'linear', .* rename the key to rope_type",
        ),
        ({"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ],
)
def test_unsupported_values_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        READ({**OLMO_3_7B, **change})
    assert "\n" not in str(caught.value)


def test_windows_of_olmo_2_cannot_be_written() -> None:
    config = Olmo2Model.Config(
        dim=32,
        n_layers=2,
        n_heads=2,
        n_kv_heads=2,
        ffn_dim=8,
        vocab_size=8,
        rope=RoPEConfig(),
        sliding_window=4,
    )
    with pytest.raises(UserError, match="no model_type of config.json"):
        WRITE(config)
