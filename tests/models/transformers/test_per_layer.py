"""Models of the first layers of a class of transformers."""

import json
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tests.models.transformers.model_types import decoder_config  # noqa: E402
from torchtitan.models.transformers.model import TransformersModel  # noqa: E402
from torchtitan.tools.errors import UserError  # noqa: E402

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "llama": (1, {"num_hidden_layers": 2}),
    "bert": (2, {"num_hidden_layers": 3}),
    "gpt_neo": (2, {"num_layers": 4, "attention_types": [[["global", "local"], 2]]}),
    "gemma3_text": (3, {"num_hidden_layers": 7}),
    "gemma4_text": (6, {"num_hidden_layers": 12, "num_kv_shared_layers": 4}),
    "qwen3_5_text": (3, {"num_hidden_layers": 5}),
    "jamba": (3, {"num_hidden_layers": 6, "num_experts": 2}),
    "falcon_h1": (1, {"num_hidden_layers": 2}),
    "deepseek_v3": (4, {"num_hidden_layers": 5, "n_routed_experts": 8}),
}
"""Type → layers of the smaller model, and sizes of the whole one."""


def kinds_of(block: torch.nn.Module) -> set[str]:
    """Return what a block or its attention is called, such as a layer with a window."""
    named = ("layer_type", "attention_type", "is_sliding")
    return {
        f"{name} {value}"
        for module in block.modules()
        for name in named
        if isinstance(value := getattr(module, name, None), (str, bool))
    }


def layers_of(config: TransformersModel.Config) -> list[list[tuple[object, ...]]]:
    """Return the names and shapes of each layer's weights, and its kind of attention."""
    with torch.device("meta"):
        blocks = config.build().blocks()
    return [
        [
            (type(block).__name__, *sorted(kinds_of(block))),
            *((name, weight.shape) for name, weight in block.named_parameters()),
        ]
        for block in blocks.values()
    ]


def configuration(model_type: str, **sizes: Any) -> TransformersModel.Config:
    """Return a configuration in which the class chooses the kinds of layers."""
    given = json.loads(decoder_config(model_type).to_json_string(use_diff=False))
    listed = {"layer_types", "attention_layers", "layers_block_type", "per_layer_config"}
    kept = {key: value for key, value in given.items() if key not in listed}
    return TransformersModel.Config.of({**kept, **sizes})


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(one, marks=pytest.mark.slow if one == "jamba" else ()) for one in CASES],
)
def test_fewer_layers_are_the_first_ones(model_type: str) -> None:
    n_layers, sizes = CASES[model_type]
    config = configuration(model_type, **sizes)
    whole = layers_of(config)
    assert config.n_layers == len(config.layer_kinds) == len(whole)
    fewer = config.with_layers(n_layers)
    assert fewer.n_layers == n_layers
    assert layers_of(fewer) == whole[:n_layers]


def test_layers_that_a_configuration_changes_are_refused() -> None:
    """Gemma 4's last layer has no window, whatever is asked for."""
    config = configuration("gemma4_text", num_hidden_layers=12)
    with pytest.raises(UserError, match="Gemma4TextConfig changes layer_types if only the first"):
        config.with_layers(2)
