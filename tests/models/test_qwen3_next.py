"""Qwen3-Next: mistakes are caught; the published size and config.json, packing, and adapters."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.family_cases import (
    difference_with,
    family_of,
    random_reference,
    random_tokens,
    relative_error,
    to_ours,
)
from tests.models.family_runs import (
    assert_adapters_open_in_peft,
    assert_documents_are_apart,
    save_with_tokenizer,
)
from tests.models.test_sft_configs import chat_file
from torchtitan.models.common.delta_net import GatedDeltaNet
from torchtitan.models.pretrained import load_model
from torchtitan.models.qwen3_next import FLAVORS, FORMATS, model_registry
from torchtitan.tools.errors import UserError

__all__ = ["chat_file"]  # a fixture

transformers = pytest.importorskip("transformers")

READ, WRITE = FORMATS["hf"].from_external, FORMATS["hf"].to_external

MIXED = {"num_hidden_layers": 2, "layer_types": ("linear_attention", "full_attention")}
HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
SPARSE = {"decoder_sparse_step": 1, "mlp_only_layers": [], "num_experts": 4}

PUBLISHED_80B: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.0.dev0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""As published with Qwen3-Next-80B-A3B-Instruct."""


def _nets(model: Any) -> list[GatedDeltaNet]:
    found = [layer.attention for layer in model.layers.values()]
    return [one for one in found if isinstance(one, GatedDeltaNet)]


def _fused_without_groups(model: Any) -> None:
    """All queries, all keys, …, as in Qwen3.5's files."""
    for net in _nets(model):
        parts = [net.in_q, net.in_k, net.in_v, net.in_z]
        grouped = torch.cat([part.weight.unflatten(0, (2, -1)) for part in parts], dim=1)
        sizes = [len(part.weight) for part in parts]
        for part, weight in zip(parts, grouped.flatten(0, 1).split(sizes), strict=True):
            part.weight.copy_(weight)


def _exchanged_decay_and_beta(model: Any) -> None:
    for net in _nets(model):
        net.in_a, net.in_b = net.in_b, net.in_a


def _exchanged_values_and_gates(model: Any) -> None:
    for net in _nets(model):
        net.in_v, net.in_z = net.in_z, net.in_v


@pytest.mark.parametrize(
    "mistake", [_fused_without_groups, _exchanged_decay_and_beta, _exchanged_values_and_gates]
)
def test_mistake_is_caught(mistake: Callable[[Any], None]) -> None:
    reference = random_reference("qwen3_next", 0, **MIXED, **HEADS, rms_norm_eps=1e-4)
    assert difference_with(lambda model: None, reference) < 1e-4
    with torch.no_grad():
        assert difference_with(mistake, reference) > 1e-3


def test_packed_documents_equal_documents_alone() -> None:
    """Logits and gradients, through delta nets, attention and experts."""
    model, _ = to_ours(family_of("qwen3_next"), random_reference("qwen3_next", 2, **MIXED, **HEADS))
    assert_documents_are_apart(model)


def test_published_file_equals_flavor() -> None:
    assert READ(PUBLISHED_80B) == FLAVORS["80B-A3B"]
    assert READ(WRITE(FLAVORS["80B-A3B"])) == FLAVORS["80B-A3B"]


def test_defaults_of_transformers_are_read() -> None:
    document = transformers.Qwen3NextConfig().to_dict()
    required = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    few = {key: document[key] for key in (*required, "vocab_size", "max_position_embeddings")}
    assert READ({"model_type": "qwen3_next", **few}) == READ(document)


@pytest.mark.slow
def test_published_size() -> None:
    """The same number in transformers, without tensors that predict further tokens."""
    with torch.device("meta"):
        parameters = model_registry("80B-A3B").model.build().num_parameters()
        config = transformers.Qwen3NextConfig.from_dict(PUBLISHED_80B)
        assert transformers.Qwen3NextForCausalLM(config).num_parameters() == parameters
    assert parameters / 1e9 == pytest.approx(79.7, rel=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["mamba"] * 48}, "contradicts layer_types"),
        ({"full_attention_interval": 0}, "full_attention_interval is 0"),
        ({"mlp_only_layers": [48]}, "mlp_only_layers is"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"linear_num_key_heads": 24}, "linear_num_key_heads is 24, but must be a divisor of"),
    ],
)
def test_unsupported_models_are_rejected_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        READ({**PUBLISHED_80B, **change})


def test_tensors_for_further_tokens_are_skipped(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    reference = random_reference("qwen3_next", 1, **MIXED, **SPARSE, vocab_size=97)
    folder = save_with_tokenizer(reference, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    further = {"mtp.norm.weight": torch.zeros(3)}
    save_file({**tensors, **further}, folder / "model.safetensors", {"format": "pt"})
    tokens, _ = random_tokens(97, 20)
    with torch.no_grad():
        expected = reference(tokens).logits
        assert relative_error(load_model(folder, device="cpu").model(tokens), expected) < 1e-5


@pytest.mark.slow
def test_adapters_open_in_peft(tmp_path: Path, chat_file: Path) -> None:
    """Also of the fused projections of delta nets."""
    sizes = {"vocab_size": 2048, "hidden_size": 48, "num_key_value_heads": 2}
    reference = random_reference("qwen3_next", 0, **MIXED, **HEADS, **SPARSE, **sizes)
    pretrained = save_with_tokenizer(reference, tmp_path / "base")
    rank = {"model_converters__lora__rank": 4}
    assert_adapters_open_in_peft("qwen3_next", pretrained, chat_file, tmp_path / "run", **rank)
    (saved,) = tmp_path.glob("run/checkpoint/*/adapter/adapter_config.json")
    targets = json.loads(saved.read_text())["target_modules"]
    assert all(
        any(name in target for target in targets)
        for name in ("in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj")
    )
