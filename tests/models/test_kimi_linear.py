"""Kimi Linear: mistakes are caught; the published size and config.json, packing, and adapters."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.family_cases import difference_with, family_of, random_reference, to_ours
from tests.models.family_runs import (
    assert_adapters_open_in_peft,
    assert_documents_are_apart,
    save_with_tokenizer,
)
from tests.models.test_sft_configs import chat_file
from torchtitan.models.common.kimi_delta import KimiDeltaNet
from torchtitan.models.kimi_linear import FLAVORS, FORMATS, model_registry
from torchtitan.tools.errors import UserError

__all__ = ["chat_file"]  # a fixture

transformers = pytest.importorskip("transformers")

READ, WRITE = FORMATS["hf"].from_external, FORMATS["hf"].to_external

MIXED = {"num_hidden_layers": 2, "layer_types": ("linear_attention", "full_attention")}

_FULL = [4, 8, 12, 16, 20, 24, 27]
PUBLISHED_48B: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_kimi.KimiLinearConfig"},
    "bos_token_id": 163584,
    "dtype": "bfloat16",
    "eos_token_id": 163586,
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": _FULL,
        "head_dim": 128,
        "kda_layers": [number for number in range(1, 28) if number not in _FULL],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "pad_token_id": 163839,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_cache": True,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}
"""Keys and values of Kimi-Linear-48B-A3B-Instruct."""


def _nets(model: Any) -> list[KimiDeltaNet]:
    found = [layer.attention for layer in model.layers.values()]
    return [one for one in found if isinstance(one, KimiDeltaNet)]


def _decays_of_heads(model: Any) -> None:
    """The mean of the elements' decays for all elements of a head, as in a gated delta net."""
    for net in _nets(model):
        decays = net.decays
        net.decays = lambda x, decays=decays: decays(x).mean(-1, keepdim=True)  # type: ignore[method-assign]


def _silu_gates(model: Any) -> None:
    for net in _nets(model):
        net.gate = torch.nn.functional.silu


def _exchanged_decays_and_gates(model: Any) -> None:
    for net in _nets(model):
        net.in_a, net.in_z = net.in_z, net.in_a


def _rotated(model: Any) -> None:
    model.rope_of_layer = lambda index: model.config.rope


@pytest.mark.parametrize(
    "mistake", [_decays_of_heads, _silu_gates, _exchanged_decays_and_gates, _rotated]
)
def test_mistake_is_caught(mistake: Callable[[Any], None]) -> None:
    reference = random_reference("kimi_linear", 0, **MIXED)
    assert difference_with(lambda model: None, reference) < 1e-4
    with torch.no_grad():
        assert difference_with(mistake, reference) > 1e-3


def test_packed_documents_equal_documents_alone() -> None:
    """Logits and gradients, through both kinds of attention and experts."""
    model, _ = to_ours(family_of("kimi_linear"), random_reference("kimi_linear", 2, **MIXED))
    assert_documents_are_apart(model)


def test_published_file_equals_flavor() -> None:
    assert READ(PUBLISHED_48B) == FLAVORS["48B-A3B"]
    assert READ(WRITE(FLAVORS["48B-A3B"])) == FLAVORS["48B-A3B"]


def test_defaults_of_transformers_are_read() -> None:
    document = transformers.KimiLinearConfig().to_dict()
    required = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    few = {key: document[key] for key in (*required, "vocab_size")}
    assert READ({"model_type": "kimi_linear", **few}) == READ(document)


@pytest.mark.slow
def test_published_size() -> None:
    with torch.device("meta"):
        parameters = model_registry("48B-A3B").model.build().num_parameters()
        config = transformers.KimiLinearConfig.from_dict(PUBLISHED_48B)
        assert transformers.KimiLinearForCausalLM(config).num_parameters() == parameters
    assert parameters / 1e9 == pytest.approx(49.1, rel=1e-3)


_MISSING = {"full_attn_layers": [4], "kda_layers": [1, 2, 3]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mla_use_nope": False}, "mla_use_nope is False"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func is 'softmax'"),
        ({"linear_attn_config": _MISSING}, "each layer from 1 to 27 must be in one of them"),
        ({"linear_attn_config": {**_MISSING, "kda_layers": 3}}, "lists of the numbers of layers"),
        ({"linear_attn_config": {"head_dim": 0}}, "linear_head_dim is 0"),
        ({"num_key_value_heads": 8}, "must be equal to"),
    ],
)
def test_unsupported_models_are_rejected_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        READ({**PUBLISHED_48B, **change})


@pytest.mark.slow
def test_adapters_open_in_peft(tmp_path: Path, chat_file: Path) -> None:
    """Also of the projections of decays and gates, which the class has in other modules."""
    sizes = {"vocab_size": 2048, "hidden_size": 48}
    reference = random_reference("kimi_linear", 0, **MIXED, **sizes)
    pretrained = save_with_tokenizer(reference, tmp_path / "base")
    rank = {"model_converters__lora__rank": 2}
    assert_adapters_open_in_peft("kimi_linear", pretrained, chat_file, tmp_path / "run", **rank)
    (saved,) = tmp_path.glob("run/checkpoint/*/adapter/adapter_config.json")
    targets = json.loads(saved.read_text())["target_modules"]
    assert all(
        any(name in target for target in targets) for name in ("f_a_proj", "g_b_proj", "o_proj")
    )
