"""Mistral and Qwen2: published sizes and config.json, and the edge of the window."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.family_cases import (
    family_of,
    random_reference,
    random_tokens,
    relative_error,
    to_ours,
)
from torchtitan.models import mistral, qwen2
from torchtitan.models.mistral.model import MistralModel
from torchtitan.tools.errors import UserError

transformers = pytest.importorskip("transformers")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "flavor", "parameters"),
    # From the files of the published models, without the second copy of a tied matrix.
    [
        (mistral, "7B-v0.1", 7_241_732_096),
        (mistral, "7B-v0.3", 7_248_023_552),
        (mistral, "Ministral-8B", 8_019_808_256),
        (mistral, "Nemo-12B", 12_247_782_400),
        (mistral, "Small-24B", 23_572_403_200),
        (qwen2, "2-0.5B", 494_032_768),
        (qwen2, "2-1.5B", 1_543_714_304),
        (qwen2, "2-7B", 7_615_616_512),
        (qwen2, "2-72B", 72_706_203_648),
        (qwen2, "2.5-3B", 3_085_938_688),
        (qwen2, "2.5-14B", 14_770_033_664),
        (qwen2, "2.5-32B", 32_763_876_352),
    ],
)
def test_published_sizes(family: Any, flavor: str, parameters: int) -> None:
    with torch.device("meta"):
        assert family.model_registry(flavor).model.build().num_parameters() == parameters
    format, config = family.FORMATS["hf"], family.FLAVORS[flavor]
    assert format.from_external(format.to_external(config)) == config


def published(assets: Path, name: str) -> Any:
    return json.loads((assets / f"hf-configs/{name}_config.json").read_text())


def test_published_files_equal_flavors(assets: Path, caplog: pytest.LogCaptureFixture) -> None:
    read = mistral.FORMATS["hf"].from_external
    assert (
        read(published(assets, "mistralai--Mistral-7B-Instruct-v0.3")) == mistral.FLAVORS["7B-v0.3"]
    )
    read = qwen2.FORMATS["hf"].from_external
    assert read(published(assets, "Qwen--Qwen2.5-7B")) == qwen2.FLAVORS["2.5-7B"]
    assert not caplog.records


@pytest.mark.parametrize("off_by", [-1, 1])
@pytest.mark.parametrize("model_type", ["mistral", "ministral", "qwen2", "qwen3"])
def test_wrong_edge_of_the_window_is_caught(
    monkeypatch: pytest.MonkeyPatch, model_type: str, off_by: int
) -> None:
    options: dict[str, Any] = {"ministral": {"layer_types": ("sliding_attention",)}}.get(
        model_type, {}
    )
    if model_type.startswith("qwen"):
        options = {"use_sliding_window": True, "max_window_layers": 0}
    reference = random_reference(model_type, 0, num_hidden_layers=2, sliding_window=5, **options)
    model, _ = to_ours(family_of(model_type), reference)
    tokens, _ = random_tokens(97, 30)
    right = type(model).window_of_layer

    def wrong(self: Any, index: int) -> int | None:
        window = right(self, index)
        return None if window is None else window + off_by

    monkeypatch.setattr(type(model), "window_of_layer", wrong)
    # a hundred times the tolerance
    assert relative_error(model(tokens), reference(tokens).logits) > 1e-3


def test_missing_keys_have_transformers_defaults() -> None:
    for family, config_class in (
        (mistral, transformers.MistralConfig),
        (qwen2, transformers.Qwen2Config),
    ):
        write, read = family.FORMATS["hf"].to_external, family.FORMATS["hf"].from_external
        document = write(
            next(
                config
                for config in family.FLAVORS.values()
                if config.vocab_size and not config.head_dim
            )
        )
        names = (
            "num_key_value_heads",
            "head_dim",
            "rms_norm_eps",
            "tie_word_embeddings",
            "rope_theta",
            "rope_scaling",
        )
        document = {
            key: value
            for key, value in document.items()
            if key not in (*names, "sliding_window", "layer_types")
        }
        document["num_attention_heads"] = 32
        document["hidden_size"] = 1024
        config, theirs = read(document), config_class.from_dict(document)
        assert (config.n_kv_heads, config.norm_eps) == (
            theirs.num_key_value_heads,
            theirs.rms_norm_eps,
        )
        assert (config.tie_embeddings, config.sliding_window) == (
            theirs.tie_word_embeddings,
            theirs.sliding_window,
        )
        assert config.rope.theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sliding_window": "64"}, "sliding_window is '64', but must be a whole number"),
        ({"sliding_window": True}, "sliding_window is True"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"attention_bias": True}, "attention_bias is True, which this family does not support"),
        (
            {"layer_types": ["full_attention"] * 32},
            "layer_types is .*, which this family does not support",
        ),
    ],
)
def test_unsupported_values_are_rejected_by_name(change: dict[str, Any], message: str) -> None:
    format = mistral.FORMATS["hf"]
    with pytest.raises(UserError, match=message):
        format.from_external({**format.to_external(mistral.FLAVORS["7B-v0.1"]), **change})


def test_ministral_without_layer_types_or_window() -> None:
    """A null list is an absent one. transformers' Ministral does not run without a window, so
    Mistral is written."""
    format = mistral.FORMATS["hf"]
    document = {
        **format.to_external(mistral.FLAVORS["7B-v0.1"]),
        "model_type": "ministral",
        "layer_types": None,
    }
    assert format.from_external(document) == mistral.FLAVORS["7B-v0.1"]
    full = ["full_attention"] * document["num_hidden_layers"]
    written = format.to_external(
        format.from_external({**document, "layer_types": full, "sliding_window": None})
    )
    assert (written["model_type"], written["sliding_window"]) == ("mistral", None)


def test_empty_pattern_is_rejected() -> None:
    config = MistralModel.Config(
        **{**mistral.FLAVORS["debugmodel"].to_dict(), "layer_types": [], "rope": None}
    )
    config.rope = mistral.FLAVORS["debugmodel"].rope
    with pytest.raises(UserError, match="--model.layer_types is .*at least one type"):
        config.validate()


def test_fields_without_a_key_are_not_written() -> None:
    """transformers' Mistral has no biases, so that a config.json would say another model."""
    config = dataclasses.replace(mistral.FLAVORS["7B-v0.3"], attention_bias=True)
    with torch.device("meta"):
        assert config.build().layers["0"].attention.wo.bias is not None
    with pytest.raises(
        UserError,
        match="no model_type of config.json \\(mistral, ministral, ministral3\\) can describe",
    ):
        mistral.FORMATS["hf"].to_external(config)
