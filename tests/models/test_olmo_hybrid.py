"""OLMo Hybrid: mistakes are caught; sizes and config.json, packing, and adapters."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.family_cases import (
    difference_with,
    family_of,
    random_reference,
    to_ours,
)
from tests.models.family_runs import (
    assert_adapters_open_in_peft,
    assert_documents_are_apart,
    save_with_tokenizer,
)
from tests.models.test_sft_configs import chat_file
from torchtitan.models.common.delta_net import GatedDeltaNet
from torchtitan.models.olmo_hybrid import FLAVORS, FORMATS, model_registry
from torchtitan.models.pretrained import load_model
from torchtitan.tools.errors import UserError

__all__ = ["chat_file"]  # a fixture

transformers = pytest.importorskip("transformers")

READ, WRITE = FORMATS["hf"].from_external, FORMATS["hf"].to_external

PLAIN = {"rope_type": "default", "rope_theta": None}
MIXED: dict[str, Any] = {
    "num_hidden_layers": 2,
    "layer_types": ("linear_attention", "full_attention"),
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_allow_neg_eigval": True,
    "rms_norm_eps": 1e-4,
    "rope_parameters": PLAIN,
}
REQUIRED = {
    "model_type": "olmo_hybrid",
    "hidden_size": 3840,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 30,
    "vocab_size": 100352,
    "max_position_embeddings": 65536,
}


def _betas_up_to_one(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, GatedDeltaNet):
            module.largest_beta = 1.0


def _norms_before_attention(model: Any) -> None:
    block = model.layers["1"]
    block.attention_norm, block.attention_post_norm = block.attention_post_norm, None


def _positions(model: Any) -> None:
    model.config.has_positions = True


def _eps_of_the_other_norms(model: Any) -> None:
    model.layers["0"].attention.norm.eps = 1e-2


@pytest.mark.parametrize(
    "mistake", [_betas_up_to_one, _norms_before_attention, _positions, _eps_of_the_other_norms]
)
def test_mistake_is_caught(mistake: Callable[[Any], None]) -> None:
    reference = random_reference("olmo_hybrid", 0, **MIXED)
    assert difference_with(lambda model: None, reference) < 1e-4
    assert difference_with(mistake, reference) > 1e-3


def test_packed_documents_equal_documents_alone() -> None:
    reference = random_reference("olmo_hybrid", 2, **{**MIXED, "rms_norm_eps": 1e-2})
    model, _ = to_ours(family_of("olmo_hybrid"), reference)
    assert_documents_are_apart(model)


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 9])
def test_missing_keys_have_the_values_of_transformers(layers: int) -> None:
    document = {**REQUIRED, "num_hidden_layers": layers, "rope_parameters": PLAIN}
    if layers == 1:  # which transformers refuses
        assert READ(document).layer_types == ["full_attention"]
        return
    assert READ(document) == READ(transformers.OlmoHybridConfig.from_dict(document).to_dict())


@pytest.mark.parametrize("key", ["rope_theta", "rope_parameters"])
def test_theta_of_null_means_no_positions(key: str) -> None:
    document = {**REQUIRED, key: None if key == "rope_theta" else PLAIN}
    config = READ(document)
    assert not config.has_positions and config == FLAVORS["7B"]
    assert READ(WRITE(config)) == config
    assert READ({**REQUIRED, "rope_theta": 5e5}).rope.theta == 5e5
    assert READ(REQUIRED).has_positions


@pytest.mark.slow
def test_published_size() -> None:
    with torch.device("meta"):
        parameters = model_registry("7B").model.build().num_parameters()
        config = transformers.OlmoHybridConfig()
        assert transformers.OlmoHybridForCausalLM(config).num_parameters() == parameters


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["sliding_attention"] * 32}, "layer_types is"),
        ({"linear_num_key_heads": 7}, "linear_num_key_heads is 7, but must be a divisor of"),
        ({"linear_num_key_heads": 0}, "linear_num_key_heads is 0"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ],
)
def test_unsupported_models_are_rejected_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        READ({**REQUIRED, **change})


def test_files_with_parts_of_wrong_widths_are_refused(tmp_path: Path) -> None:
    """transformers 5.23 saves the convolution in three parts of one size."""
    sizes = {"linear_key_head_dim": 8, "linear_value_head_dim": 12}
    reference = random_reference("olmo_hybrid", 0, **MIXED, **sizes)
    reference.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"q_conv1d\.weight has shape .* instead of \[16, 1"):
        load_model(tmp_path, device="cpu")


@pytest.mark.slow
def test_adapters_open_in_peft(tmp_path: Path, chat_file: Path) -> None:
    sizes = {"vocab_size": 2048, "hidden_size": 48, "num_key_value_heads": 2}
    # transformers 5.23 saves the convolution of queries, keys and values in three parts of one
    # size, whatever their widths.
    equal = dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8)
    equal |= dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 4)
    reference = random_reference("olmo_hybrid", 0, **{**MIXED, **sizes, **equal})
    pretrained = save_with_tokenizer(reference, tmp_path / "base")
    rank = {"model_converters__lora__rank": 4}
    assert_adapters_open_in_peft("olmo_hybrid", pretrained, chat_file, tmp_path / "run", **rank)
