"""Small random models of transformers for every `model_type` that a family here reads, and their equivalents here."""

import copy
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from torchtitan.components.cross_entropy import IGNORE_INDEX
from torchtitan.models.families import families_with
from torchtitan.protocols import BaseModel

transformers = pytest.importorskip("transformers")

Options = Mapping[str, Sequence[Any]]
"""Key of config.json → the values to draw from."""

SIZES: Options = {
    "vocab_size": [97],
    "hidden_size": [32, 48],
    "intermediate_size": [40, 64],
    "num_hidden_layers": [1, 3, 4],
    "num_attention_heads": [4],
    "num_key_value_heads": [1, 2, 4],
    "head_dim": [8, 16],
    "max_position_embeddings": [128],
    "rms_norm_eps": [1e-6, 1e-3],
    "tie_word_embeddings": [False, True],
    "rope_parameters": [
        {"rope_type": "default", "rope_theta": 1e4},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32},
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 8.0,
            "beta_slow": 2.0,
            "attention_factor": 1.3,
        },
        {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 3.0,
            "original_max_position_embeddings": 32,
        },
    ],
}
"""Options of all types."""

WINDOWS: Options = {"sliding_window": [3, 16]}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A `model_type` and the options that its models vary in."""

    model_type: str
    options: Options = field(default_factory=dict)
    without: Sequence[str] = ()
    """Keys of `SIZES` that the type does not have."""


CASES = {
    case.model_type: case
    for case in [
        Case(model_type="llama"),
        Case(model_type="mistral", options={"sliding_window": [None, 3, 16]}),
        Case(
            model_type="ministral",
            options={**WINDOWS, "layer_types": [("sliding_attention", "full_attention"), ("full_attention",)]},
        ),
        Case(
            model_type="qwen2",
            options={**WINDOWS, "use_sliding_window": [False, True], "max_window_layers": [0, 2]},
            without=["head_dim"],
        ),
        Case(
            model_type="qwen3",
            options={
                **WINDOWS,
                "use_sliding_window": [False, True],
                "max_window_layers": [0, 2],
                "attention_bias": [False, True],
            },
        ),
        Case(
            model_type="qwen3_5_text",
            options={
                "head_dim": [16, 24],
                # With a smaller constant, norms in delta nets magnify rounding, here and in transformers.
                "rms_norm_eps": [3e-2, 1e-1],
                "attention_bias": [False, True],
                "layer_types": [
                    None,
                    ("linear_attention", "full_attention"),
                    ("full_attention", "linear_attention"),
                    ("full_attention",),
                ],
                "partial_rotary_factor": [0.25, 0.5, 1.0],
                "linear_num_key_heads": [1, 2],
                "linear_num_value_heads": [2, 4],
                "linear_key_head_dim": [8, 10],
                "linear_value_head_dim": [8, 12],
                "linear_conv_kernel_dim": [2, 4],
            },
        ),
    ]
}

WITH_VISION = {"qwen3_5"}
"""Types whose language model is read, and written as another type."""


def random_reference(model_type: str, seed: int, **fixed: Any) -> Any:
    """Return transformers' model of a random configuration, with weights that make every part matter: norms and biases
    that differ from their initial values, and attention that is far from uniform."""
    case, choose = CASES[model_type], random.Random(f"{model_type} {seed}")
    options = {key: values for key, values in SIZES.items() if key not in case.without} | dict(case.options)
    document = {key: choose.choice(values) for key, values in sorted(options.items())} | fixed
    n_layers = document["num_hidden_layers"]
    for key, value in document.items():
        if isinstance(value, tuple):  # a pattern of layers
            document[key] = [value[index % len(value)] for index in range(n_layers)]
    config = transformers.AutoConfig.for_model(model_type, **copy.deepcopy(document))  # it changes nested values
    print(f"{model_type}, seed {seed}: {document}")
    torch.manual_seed(seed)
    reference = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if "norm" in name:
                parameter.add_(torch.empty_like(parameter).uniform_(-0.5, 0.5))
            elif parameter.ndim == 1:
                parameter.normal_(std=0.5)
            elif "embed" not in name:
                parameter.normal_(std=0.7 * parameter.shape[-1] ** -0.5)
    return reference


def family_of(model_type: str) -> Any:
    """Return the package of the family that reads a `model_type`."""
    return next(f for f in families_with("hf") if model_type in f.FORMATS["hf"].model_types)


def to_ours(family: Any, reference: Any) -> tuple[BaseModel, dict[str, Tensor]]:
    """Return our model of transformers' configuration and weights, and those weights as in its files."""
    format = family.FORMATS["hf"]
    config = format.from_external(reference.config.to_dict())
    adapter = format.adapter(config)
    theirs = {name: tensor for name, tensor in reference.state_dict().items() if name not in adapter.tied}
    model: BaseModel = config.build()
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    ours: dict[str, Tensor] = {}
    for step in adapter.steps:
        tensors = step.transform.to_internal([theirs[n] for n in step.external], [shapes[n] for n in step.internal])
        ours |= dict(zip(step.internal, tensors, strict=True))
    assert {name for step in adapter.steps for name in step.external} == set(theirs)
    model.load_state_dict(ours)
    return model.eval(), theirs


def to_external(family: Any, model: BaseModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of our model, weights or gradients, under the names and in the layout of transformers."""
    converted: dict[str, Tensor] = {}
    for step in family.FORMATS["hf"].adapter(model.config).steps:
        outputs = step.transform.to_external([tensors[name] for name in step.internal])
        converted |= dict(zip(step.external, outputs, strict=True))
    return converted


def random_tokens(vocab_size: int, length: int) -> tuple[Tensor, Tensor]:
    """Return tokens and labels, (2, length), some of them ignored."""
    generator = torch.Generator().manual_seed(0)
    tokens, labels = (torch.randint(vocab_size, (2, length), generator=generator) for _ in range(2))
    labels[:, : math.isqrt(length)] = IGNORE_INDEX
    return tokens, labels


def relative_error(ours: Tensor, theirs: Tensor, least: float = 0.0) -> float:
    """Return the largest difference, relative to the largest element, or to `least` if that is larger."""
    return (ours - theirs).abs().max().item() / max(theirs.abs().max().item(), least)


def all_cases(seeds: int) -> Iterator[Any]:
    """Yield model types with seeds; all but the first two seeds are slow tests."""
    for model_type in CASES:
        for seed in range(seeds):
            yield pytest.param(model_type, seed, marks=[pytest.mark.slow] if seed > 1 else [])
