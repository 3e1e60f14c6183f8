"""Features of SmolLM3 that Llama lacks: mistakes are caught. Sizes and config.json are as
published."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.models.family_cases import difference_with, random_reference
from torchtitan.models.smollm3 import FLAVORS, FORMATS, model_registry
from torchtitan.tools.errors import UserError

transformers = pytest.importorskip("transformers")

READ, WRITE = FORMATS["hf"].from_external, FORMATS["hf"].to_external

SMOLLM3_3B = {
    "architectures": ["SmolLM3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "eos_token_id": 128012,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "layer_types": ["full_attention"] * 36,
    "max_position_embeddings": 65536,
    "max_window_layers": 28,
    "mlp_bias": False,
    "model_type": "smollm3",
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "pad_token_id": 128004,
    "pretraining_tp": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.54.0.dev0",
    "use_cache": False,
    "use_sliding_window": False,
    "vocab_size": 128256,
}
"""As published."""


# --- mistakes
# --------------------------------------------------------------------------------------------------


def positions_in_all_layers(model: Any) -> None:
    model.config.no_rope_layers = [1]


def positions_where_the_others_have_none(model: Any) -> None:
    model.config.no_rope_layers = [1 - has_rope for has_rope in model.config.no_rope_layers]


def first_layer_without_positions(model: Any) -> None:
    model.config.no_rope_layers = [0, 1, 1, 1]


def window_one_wider(model: Any) -> None:
    model.config.sliding_window += 1


def window_one_narrower(model: Any) -> None:
    model.config.sliding_window -= 1


def window_in_layers_with_positions(model: Any) -> None:
    model.config.layer_types = [*["sliding_attention"] * 3, "full_attention"]


@pytest.mark.parametrize(
    "mistake",
    [
        positions_in_all_layers,
        positions_where_the_others_have_none,
        first_layer_without_positions,
        window_one_wider,
        window_one_narrower,
        window_in_layers_with_positions,
    ],
)
def test_mistake_is_caught(mistake: Callable[[Any], None]) -> None:
    own = {"no_rope_layers": None, "no_rope_layer_interval": 4, "sliding_window": 8}
    reference = random_reference("smollm3", 0, num_hidden_layers=4, **own)
    assert difference_with(lambda model: None, reference) < 1e-4
    assert difference_with(mistake, reference) > 1e-3


# --- sizes and config.json
# --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_published_size() -> None:
    with torch.device("meta"):
        # of the published weights
        assert model_registry("3B").model.build().num_parameters() == 3_075_098_624
    assert READ(json.loads(json.dumps(WRITE(FLAVORS["3B"])))) == FLAVORS["3B"]


def test_published_file_is_read_without_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert READ(SMOLLM3_3B) == FLAVORS["3B"]
    assert not caplog.records
    assert READ(transformers.SmolLM3Config.from_dict(SMOLLM3_3B).to_dict()) == FLAVORS["3B"]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"num_key_value_heads": None},
        {"no_rope_layer_interval": 3},
        {"no_rope_layers": None, "no_rope_layer_interval": 5},
        {"use_sliding_window": True},
        {"sliding_window": 16},
        {"use_sliding_window": True, "sliding_window": 16},
        {"use_sliding_window": True, "sliding_window": 16, "no_rope_layers": [0, *[1] * 35]},
        {
            "use_sliding_window": True,
            "sliding_window": 16,
            "layer_types": ["sliding_attention"] * 36,
        },
    ],
)
def test_missing_keys_have_transformers_defaults(change: dict[str, Any]) -> None:
    required = (
        "model_type",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    )
    required += ("vocab_size", "max_position_embeddings")
    document = {key: SMOLLM3_3B[key] for key in required} | change
    config, theirs = READ(document), transformers.AutoConfig.for_model(**document)
    assert config.n_kv_heads == theirs.num_key_value_heads
    assert (config.norm_eps, config.tie_embeddings) == (
        theirs.rms_norm_eps,
        theirs.tie_word_embeddings,
    )
    assert config.rope.theta == theirs.rope_parameters["rope_theta"]
    with torch.device("meta"):
        model, reference = config.build(), transformers.AutoModelForCausalLM.from_config(theirs)
    for index, layer in enumerate(reference.model.layers):
        assert (model.rope_of_layer(index) is not None) == bool(layer.self_attn.use_rope)
        assert model.window_of_layer(index) == layer.self_attn.sliding_window


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"no_rope_layers": [1, 0]},
            r"no_rope_layers is \[1, 0\], but must be a list with num_hidden_layers = 36",
        ),
        ({"no_rope_layers": [2] * 36}, r"no_rope_layers is \[2\]"),
        ({"no_rope_layers": "all"}, "no_rope_layers is 'all'"),
        ({"no_rope_layers": None, "no_rope_layer_interval": 0}, "no_rope_layer_interval is 0"),
        (
            {"layer_types": ["sliding_attention"] * 36},
            "layer_types is .*, but use_sliding_window is not true",
        ),
        ({"layer_types": 2}, "layer_types is 2"),
        ({"use_sliding_window": True, "sliding_window": "8"}, "sliding_window is '8'"),
        (
            {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["mamba"] * 36},
            "layer_types is .*'mamba'",
        ),
        ({"num_hidden_layers": "36"}, "num_hidden_layers is '36'"),
        ({"num_hidden_layers": 2**31}, "num_hidden_layers is 2147483648"),
        (
            {"num_hidden_layers": 2**31, "layer_types": None, "no_rope_layers": None},
            "n_layers is 2147483648",
        ),
        (
            {"use_sliding_window": True, "sliding_window": 8, "no_rope_layers": 5},
            "no_rope_layers is 5",
        ),
        ({"use_sliding_window": "no"}, "use_sliding_window is 'no'"),
    ],
)
def test_unsupported_values_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        READ({**SMOLLM3_3B, **change})
    assert "\n" not in str(caught.value)
