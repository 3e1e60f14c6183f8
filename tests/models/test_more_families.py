"""Families that combine existing parts: mistakes are caught. Sizes and config.json are as
published."""

import json
import re
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
)
from tests.models.family_runs import save_with_tokenizer
from torchtitan.models import (
    deepseek_v3,
    ernie4_5,
    exaone,
    hunyuan,
    minimax_m2,
    mistral,
    seed_oss,
)
from torchtitan.models.pretrained import load_model
from torchtitan.tools.errors import UserError

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

TYPES = (
    *("minimax_m2", "glm4_moe_lite", "seed_oss", "exaone4", "exaone_moe"),
    *("ernie4_5", "ernie4_5_moe", "hunyuan_v1_dense", "hunyuan_v1_moe"),
    "ministral3",
)

# --- mistakes
# --------------------------------------------------------------------------------------------------

Mistake = Callable[[Any], None]


def in_attention(change: Mistake) -> Mistake:
    """Return a mistake that `change` makes in the attention of each layer."""

    def mistake(model: Any) -> None:
        for layer in model.layers.values():
            change(layer.attention)

    return mistake


def in_routers(change: Mistake) -> Mistake:
    """Return a mistake that `change` makes in each router."""

    def mistake(model: Any) -> None:
        for layer in model.layers.values():
            if layer.moe is not None:
                change(layer.moe.router)

    return mistake


def without_wide_norms(attention: Any) -> None:
    attention.q_wide_norm = attention.k_wide_norm = None


def rotated_in_full(model: Any) -> None:
    model.config.rope.rotated_fraction = 1.0


def without_bias(router: Any) -> None:
    router.selection.bias_E.zero_()


def softmax(router: Any) -> None:
    router.is_sigmoid = False


def positions_in_all_layers(model: Any) -> None:
    model.rope_of_layer = lambda index: model.config.rope


def without_norms(attention: Any) -> None:
    attention.q_norm = attention.k_norm = None


def zero_biases(attention: Any) -> None:
    for name in ("wq", "wk", "wv"):
        getattr(attention, name).bias.data.zero_()


def norms_before_rope(attention: Any) -> None:
    attention.rotates_first = False


def unstretched(model: Any) -> None:
    model.config.rope.theta = 1e4


def growth_from_one(attention: Any) -> None:
    attention.attend.first = 1


def constant_queries(attention: Any) -> None:
    attention.attend.attn_scale = 0.0


def without_shared(model: Any) -> None:
    for layer in model.layers.values():
        if layer.moe is not None:
            layer.moe.shared = None


_HALF = {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}
_MINIMAX = {**_HALF, "num_local_experts": 6, "num_experts_per_tok": 2, "rotary_dim": None}
_ERNIE = {"moe_layer_interval": 1, "moe_num_shared_experts": 2, "moe_k": 2}
_ALPHA: dict[str, Any] = {
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 50.0}
}
_GROWING: dict[str, Any] = {
    "rope_parameters": {
        **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "llama_4_scaling_beta": 0.5},
        "original_max_position_embeddings": 16,
    }
}
_WINDOWS = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 16}


@pytest.mark.parametrize(
    ("model_type", "options", "mistake"),
    [
        ("minimax_m2", _MINIMAX, in_attention(without_wide_norms)),
        ("minimax_m2", _MINIMAX, rotated_in_full),
        ("minimax_m2", _MINIMAX, in_routers(without_bias)),
        ("minimax_m2", _MINIMAX, in_routers(softmax)),
        ("seed_oss", {"attention_bias": True}, in_attention(zero_biases)),
        ("exaone4", _WINDOWS, positions_in_all_layers),
        ("exaone4", _WINDOWS, in_attention(without_norms)),
        ("exaone_moe", _WINDOWS, positions_in_all_layers),
        ("exaone_moe", _WINDOWS, in_routers(without_bias)),
        ("exaone_moe", _WINDOWS, without_shared),
        ("ernie4_5_moe", _ERNIE, in_routers(without_bias)),
        ("ernie4_5_moe", _ERNIE, without_shared),
        ("hunyuan_v1_dense", _ALPHA, in_attention(norms_before_rope)),
        ("hunyuan_v1_dense", _ALPHA, unstretched),
        ("ministral3", _GROWING, in_attention(growth_from_one)),
        ("ministral3", _GROWING, in_attention(constant_queries)),
        ("hunyuan_v1_moe", {"moe_topk": 2}, in_attention(norms_before_rope)),
        ("hunyuan_v1_moe", {"moe_topk": 2}, without_shared),
    ],
)
def test_mistake_is_caught(model_type: str, options: dict[str, Any], mistake: Mistake) -> None:
    reference = random_reference(model_type, 0, num_hidden_layers=4, **options)
    assert difference_with(lambda model: None, reference) < 1e-4
    assert difference_with(mistake, reference) > 1e-3


# --- sizes and config.json
# --------------------------------------------------------------------------------------------

MINIMAX_M2 = {
    **{"architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2"},
    **{"attn_type_list": [1] * 62, "head_dim": 128, "hidden_act": "silu", "hidden_size": 3072},
    **{"initializer_range": 0.02, "intermediate_size": 1536, "layernorm_mlp_beta": 1.0},
    **{"layernorm_full_attention_beta": 1.0, "layernorm_linear_attention_beta": 1.0},
    **{"max_position_embeddings": 196_608, "mlp_intermediate_size": 8192},
    **{"mtp_transformer_layers": 1, "num_attention_heads": 48, "num_experts_per_tok": 8},
    **{"num_hidden_layers": 62, "num_key_value_heads": 8, "num_local_experts": 256},
    **{"num_mtp_modules": 3, "output_router_logits": False, "qk_norm_type": "per_layer"},
    **{"rms_norm_eps": 1e-06, "rope_theta": 5_000_000, "rotary_dim": 64},
    **{"router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "scoring_func": "sigmoid"},
    **{"shared_intermediate_size": 0, "shared_moe_mode": "sigmoid", "sliding_window": None},
    **{"tie_word_embeddings": False, "use_cache": True, "use_mtp": True, "use_qk_norm": True},
    **{"use_routing_bias": True, "vocab_size": 200_064},
}


GLM_4_7_FLASH = {
    **{"architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite"},
    **{"attention_bias": False, "attention_dropout": 0.0, "dtype": "bfloat16"},
    **{"eos_token_id": [154_820, 154_827, 154_829], "first_k_dense_replace": 1},
    **{"hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 10240},
    **{"kv_lora_rank": 512, "max_position_embeddings": 202_752, "moe_intermediate_size": 1536},
    **{"n_group": 1, "n_routed_experts": 64, "n_shared_experts": 1, "norm_topk_prob": True},
    **{"num_attention_heads": 20, "num_experts_per_tok": 4, "num_hidden_layers": 47},
    **{"num_key_value_heads": 20, "num_nextn_predict_layers": 1, "pad_token_id": 154_820},
    **{"partial_rotary_factor": 1.0, "q_lora_rank": 768, "qk_nope_head_dim": 192},
    **{"qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_scaling": None},
    **{"rope_theta": 1_000_000, "routed_scaling_factor": 1.8, "tie_word_embeddings": False},
    **{"topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 256, "vocab_size": 154_880},
}

SEED_OSS_36B = {
    **{"architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss"},
    **{"attention_bias": True, "attention_dropout": 0.1, "attention_out_bias": False},
    **{"bos_token_id": 0, "eos_token_id": 2, "head_dim": 128, "hidden_act": "silu"},
    **{"hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 27648},
    **{"max_position_embeddings": 524_288, "mlp_bias": False, "num_attention_heads": 80},
    **{"num_hidden_layers": 64, "num_key_value_heads": 8, "pad_token_id": 1},
    **{"residual_dropout": 0.1, "rms_norm_eps": 1e-06, "rope_scaling": {"rope_type": "default"}},
    **{"rope_theta": 10_000_000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
    **{"use_cache": True, "vocab_size": 155_136},
}

_EXAONE_LLAMA3 = {
    **{"factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0},
    **{"original_max_position_embeddings": 8192, "rope_type": "llama3"},
}
_ONE_FULL_OF_4 = [*["sliding_attention"] * 3, "full_attention"]
EXAONE_4_32B = {
    **{"architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4"},
    **{"attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 361, "head_dim": 128},
    **{"hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 27392},
    **{"layer_types": _ONE_FULL_OF_4 * 16, "max_position_embeddings": 131_072},
    **{"num_attention_heads": 40, "num_hidden_layers": 64, "num_key_value_heads": 8},
    **{"pad_token_id": 0, "rms_norm_eps": 1e-05, "rope_scaling": _EXAONE_LLAMA3},
    **{"rope_theta": 1_000_000, "sliding_window": 4096, "sliding_window_pattern": "LLLG"},
    **{"tie_word_embeddings": False, "vocab_size": 102_400},
}
EXAONE_4_1B = {
    **EXAONE_4_32B,
    **{"head_dim": 64, "hidden_size": 2048, "intermediate_size": 4096},
    **{"layer_types": ["full_attention"] * 30, "max_position_embeddings": 65_536},
    **{"num_attention_heads": 32, "num_hidden_layers": 30, "sliding_window": None},
    **{"sliding_window_pattern": None, "tie_word_embeddings": True},
}
K_EXAONE = {
    **{"architectures": ["ExaoneMoEForCausalLM"], "model_type": "exaone_moe"},
    **{"attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 53, "pad_token_id": 0},
    **{"first_last_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu"},
    **{"hidden_size": 6144, "intermediate_size": 18432, "is_moe_layer": [False] + [True] * 47},
    **{"layer_types": _ONE_FULL_OF_4 * 12, "max_position_embeddings": 262_144},
    **{"moe_intermediate_size": 2048, "n_group": 1, "norm_topk_prob": True},
    **{"num_attention_heads": 64, "num_experts": 128, "num_experts_per_tok": 8},
    **{"num_hidden_layers": 48, "num_key_value_heads": 8, "num_shared_experts": 1},
    **{"num_nextn_predict_layers": 1, "rms_norm_eps": 1e-05, "rope_scaling": None},
    **{"rope_theta": 1_000_000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid"},
    **{"sliding_window": 128, "sliding_window_pattern": "LLLG", "tie_word_embeddings": False},
    **{"topk_group": 1, "topk_method": "noaux_tc", "vocab_size": 153_600},
}

ERNIE_21B = {
    **{"architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe"},
    **{"bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 2560},
    **{"intermediate_size": 12288, "max_position_embeddings": 131_072, "moe_capacity": [64] * 3},
    **{"moe_gate": "topk", "moe_intermediate_size": 1536, "moe_k": 6, "moe_layer_end_index": 27},
    **{"moe_layer_interval": 1, "moe_layer_start_index": 1, "moe_num_experts": 64},
    **{"moe_num_shared_experts": 2, "moe_use_aux_free": True, "num_attention_heads": 20},
    **{"num_hidden_layers": 28, "num_key_value_heads": 4, "num_nextn_predict_layers": 1},
    **{"pad_token_id": 0, "rms_norm_eps": 1e-05, "rope_theta": 500_000.0},
    **{"tie_word_embeddings": True, "use_bias": False, "vocab_size": 103_424},
}

_ALPHA_1000 = {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "type": "dynamic"}
HUNYUAN_7B = {
    **{"architectures": ["HunYuanDenseV1ForCausalLM"], "model_type": "hunyuan_v1_dense"},
    **{"attention_bias": False, "attention_dropout": 0.0, "attention_head_dim": 128},
    **{"cla_share_factor": 2, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096},
    **{"intermediate_size": 14336, "max_position_embeddings": 262_144, "mlp_bias": False},
    **{"norm_type": "rms", "num_attention_heads": 32, "num_hidden_layers": 32},
    **{"num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_scaling": _ALPHA_1000},
    **{"rope_theta": 10000.0, "tie_word_embeddings": True, "use_cla": False},
    **{"use_qk_norm": True, "vocab_size": 128_167},
}
HUNYUAN_A13B = {
    **HUNYUAN_7B,
    **{"architectures": ["HunYuanMoEV1ForCausalLM"], "model_type": "hunyuan_v1_moe"},
    **{"intermediate_size": 3072, "max_position_embeddings": 32_768, "num_experts": 64},
    **{"moe_intermediate_size": [3072] * 32, "moe_layer_num_skipped": 0, "moe_topk": [8] * 32},
    **{"norm_topk_prob": True, "num_shared_expert": [1] * 32, "routed_scaling_factor": 1.0},
    "use_mixed_mlp_moe": True,
}

MINISTRAL_3_8B: dict[str, Any] = {
    **{"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3"},
    **{"attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096},
    **{"intermediate_size": 14336, "max_position_embeddings": 262_144},
    **{"num_attention_heads": 32, "num_hidden_layers": 34, "num_key_value_heads": 8},
    **{"rms_norm_eps": 1e-05, "sliding_window": None, "tie_word_embeddings": False},
    "rope_parameters": {
        **{"beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1},
        **{"mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 16_384},
        **{"rope_theta": 1_000_000.0, "rope_type": "yarn", "type": "yarn"},
    },
    "vocab_size": 131_072,
}

PUBLISHED = [
    (minimax_m2, "229B-A10B", MINIMAX_M2),
    (deepseek_v3, "GLM-4.7-Flash-30B", GLM_4_7_FLASH),
    (seed_oss, "36B", SEED_OSS_36B),
    (exaone, "4.0-1.2B", EXAONE_4_1B),
    (exaone, "4.0-32B", EXAONE_4_32B),
    (exaone, "K-236B-A23B", K_EXAONE),
    (ernie4_5, "21B-A3B", ERNIE_21B),
    (hunyuan, "7B", HUNYUAN_7B),
    (mistral, "3-8B", MINISTRAL_3_8B),
    (hunyuan, "80B-A13B", HUNYUAN_A13B),
]


@pytest.mark.parametrize(
    ("family", "flavor", "document"), PUBLISHED, ids=[flavor for _, flavor, _ in PUBLISHED]
)
def test_published_file_is_read_without_warning(
    family: Any, flavor: str, document: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Except of dropout; also after transformers has read and written it."""
    format, config = family.FORMATS["hf"], family.FLAVORS[flavor]
    assert format.from_external(document) == config
    assert all("dropout" in record.getMessage() for record in caplog.records)
    theirs = transformers.AutoConfig.for_model(**document).to_dict()
    assert format.from_external(theirs) == config
    assert format.from_external(json.loads(json.dumps(format.to_external(config)))) == config


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "flavor", "billions"),
    # as published, without modules that predict further tokens
    [
        (minimax_m2, "229B-A10B", 228.7),
        (deepseek_v3, "GLM-4.7-Flash-30B", 29.9),
        (deepseek_v3, "GLM-5-744B", 744),
        (deepseek_v3, "V3.2-671B", 671.9),
        (seed_oss, "36B", 36.15),
        (exaone, "4.0-1.2B", 1.28),
        (exaone, "4.0-32B", 32.0),
        (exaone, "K-236B-A23B", 236.5),
        (ernie4_5, "0.3B", 0.361),
        (ernie4_5, "21B-A3B", 21.8),
        (ernie4_5, "300B-A47B", 300),
        (hunyuan, "7B", 7.5),
        (hunyuan, "80B-A13B", 80.4),
        # the language models
        (mistral, "3-3B", 3.43),
        (mistral, "3-8B", 8.49),
        (mistral, "3-14B", 13.5),
    ],
)
def test_published_size(family: Any, flavor: str, billions: float) -> None:
    with torch.device("meta"):
        model = family.model_registry(flavor).model.build()
    assert model.num_parameters() / 1e9 == pytest.approx(billions, rel=2e-3)


@pytest.mark.parametrize("model_type", TYPES)
def test_missing_keys_have_transformers_defaults(model_type: str) -> None:
    read = family_of(model_type).FORMATS["hf"].from_external
    theirs = transformers.AutoConfig.for_model(model_type)
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    keys += ("vocab_size", "max_position_embeddings", "model_type")
    assert read({key: getattr(theirs, key) for key in keys}) == read(theirs.to_dict())


@pytest.mark.parametrize(
    ("model_type", "change"),
    [
        ("minimax_m2", {"attn_type_list": [0, 1]}),
        ("minimax_m2", {"scoring_func": "softmax"}),
        ("minimax_m2", {"use_routing_bias": False}),
        ("minimax_m2", {"use_qk_norm": False}),
        ("minimax_m2", {"qk_norm_type": "per_head"}),
        ("minimax_m2", {"shared_intermediate_size": 8}),
        ("minimax_m2", {"sliding_window": 8}),
        ("minimax_m2", {"rotary_dim": 0}),
        ("glm4_moe_lite", {"first_k_dense_replace": 2, "mlp_layer_types": None}),
        ("glm4_moe_lite", {"partial_rotary_factor": 0.5}),
        ("glm4_moe_lite", {"scoring_func": "softmax"}),
        ("seed_oss", {"attention_out_bias": True}),
        ("exaone4", {"sliding_window_pattern": "LLLG", "layer_types": None}),
        ("exaone4", {"layer_types": _ONE_FULL_OF_4 * 8, "sliding_window": None}),
        ("exaone_moe", {"is_moe_layer": [True] * 32}),
        ("exaone_moe", {"topk_method": "greedy"}),
        ("ernie4_5", {"use_bias": True}),
        ("ernie4_5_moe", {"moe_norm_min": 0.5}),
        ("ernie4_5_moe", {"moe_layer_interval": 0}),
        ("hunyuan_v1_dense", {"use_qk_norm": False}),
        ("hunyuan_v1_dense", {"use_cla": True}),
        ("hunyuan_v1_dense", {"attention_head_dim": 64}),
        ("hunyuan_v1_moe", {"moe_topk": [1, *[2] * 31]}),
        ("hunyuan_v1_moe", {"moe_intermediate_size": 1024}),
        ("hunyuan_v1_moe", {"num_shared_expert": 2}),
    ],
)
def test_unsupported_models_are_refused_by_name(model_type: str, change: dict[str, Any]) -> None:
    document = transformers.AutoConfig.for_model(model_type).to_dict()
    key, value = next(iter(change.items()))
    with pytest.raises(UserError, match=re.escape(f"{key} is {value!r}")):
        family_of(model_type).FORMATS["hf"].from_external({**document, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"llama_4_scaling_beta": None}, "llama_4_scaling_beta is None, but must be a number in"),
        ({"llama_4_scaling_beta": -1.0}, "llama_4_scaling_beta is -1.0"),
        ({"rope_type": "linear"}, "RoPE's .* is .*, which this family does not support"),
        ({"factor": 1.0}, "rope.scaling is none, but must be yarn"),
    ],
)
def test_queries_grow_with_yarn_only(change: dict[str, Any], message: str) -> None:
    rope = {**MINISTRAL_3_8B["rope_parameters"], **change}
    with pytest.raises(UserError, match=message):
        mistral.FORMATS["hf"].from_external({**MINISTRAL_3_8B, "rope_parameters": rope})


# --- files
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model_type", ["minimax_m2", "glm4_moe_lite", "exaone_moe", "ernie4_5_moe", "hunyuan_v1_moe"]
)
def test_files_with_an_experts_tensors_and_with_all_experts_open(
    model_type: str, tmp_path: Path
) -> None:
    reference = random_reference(model_type, 1, num_hidden_layers=2, tie_word_embeddings=False)
    each = save_with_tokenizer(reference, tmp_path / "each")
    fused = save_with_tokenizer(reference, tmp_path / "fused")
    weights = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    safetensors.save_file(weights, fused / "model.safetensors", metadata={"format": "pt"})
    names = safetensors.load_file(each / "model.safetensors").keys()
    assert any(".experts.0." in name for name in names)
    tokens, _ = random_tokens(97, 40)
    expected = reference(tokens).logits
    for folder in (each, fused):
        assert relative_error(load_model(folder, device="cpu").model(tokens), expected) < 1e-5
