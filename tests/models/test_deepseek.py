"""DeepSeek-V2, V3 and Kimi K2: mistakes that `test_equal_transformers` catches, latents in caches,
sizes and files."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.components.weights.test_dequantize import quantize, read_by_transformers
from tests.models.family_cases import (
    difference_with,
    random_reference,
    random_tokens,
    relative_error,
    to_ours,
)
from tests.models.family_runs import assert_documents_are_apart, save_with_tokenizer
from tests.models.test_attention import metadata_of
from tests.training import train
from torchtitan.components.generation import KVCache, generate
from torchtitan.config.manager import ConfigManager
from torchtitan.dry_run import dry_run
from torchtitan.models import deepseek_v3
from torchtitan.models.common.norms import RMSNorm
from torchtitan.models.common.rope import apply_rope
from torchtitan.models.deepseek_v3 import FLAVORS, FORMAT, model_registry
from torchtitan.models.pretrained import load_model
from torchtitan.tools.errors import UserError

transformers = pytest.importorskip("transformers")

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 40.0,
    "original_max_position_embeddings": 16,
}
TINY: dict[str, Any] = {
    **{
        "num_hidden_layers": 2,
        "q_lora_rank": 20,
        "kv_lora_rank": 12,
        "attention_bias": True,
        "n_routed_experts": 8,
    },
    **{
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "qk_rope_head_dim": 8,
    },
    "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
}
V2 = {**TINY, "topk_method": "group_limited_greedy"}
V3 = {**TINY, "norm_topk_prob": True, "rope_interleave": True}


def in_attention(change: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a mistake that `change` makes in each layer's attention."""

    def mistake(model: Any) -> None:
        for layer in model.layers.values():
            change(layer.attention)

    return mistake


def halves(attention: Any) -> None:
    attention.interleaved = False


def first_part_rotated(attention: Any) -> None:
    attend = attention.attend.forward
    attention._rotate = lambda x, rope: x if x.shape[2] > 1 else apply_rope(x, rope)
    attention.attend.forward = lambda q, *others: attend(q.flip(-1), *others)


def scores_without_mscale(attention: Any) -> None:
    attention.attend.scores.scale = attention.head_dim**-0.5


def no_norm(attention: Any) -> None:
    attention.kv_norm.forward = lambda x: x


def no_query_norm(attention: Any) -> None:
    attention.q_latent[1] = nn.Identity()


def other_eps(attention: Any) -> None:
    attention.kv_norm.eps = 1.0


def two_members(model: Any) -> None:
    for layer in model.layers.values():
        router = layer.moe.router
        router.choose = replace(router.choose.__self__, selection_bias=True).choose


def no_selection(model: Any) -> None:
    for layer in model.layers.values():
        layer.moe.router.selection.bias_E.zero_()


@pytest.mark.parametrize(
    ("model_type", "options", "mistake"),
    [
        *(
            ("deepseek_v3", V3, in_attention(change))
            for change in (halves, first_part_rotated, scores_without_mscale)
        ),
        *(
            ("deepseek_v3", V3, in_attention(change))
            for change in (no_norm, no_query_norm, other_eps)
        ),
        ("deepseek_v3", V3, no_selection),
        ("deepseek_v2", V2, in_attention(halves)),
        (
            "deepseek_v2",
            {**V2, "n_routed_experts": 12, "hidden_size": 48, "routed_scaling_factor": 1.0},
            two_members,
        ),
    ],
)
def test_mistake_is_caught(
    model_type: str, options: dict[str, Any], mistake: Callable[[Any], None]
) -> None:
    reference = random_reference(model_type, 0, **options)
    assert difference_with(lambda model: None, reference) < 1e-5
    assert difference_with(mistake, reference) > 1e-3


def test_latents_have_their_own_eps() -> None:
    model, _ = to_ours(deepseek_v3, random_reference("deepseek_v3", 0, **V3, rms_norm_eps=1e-3))
    eps = {
        name: module.eps for name, module in model.named_modules() if isinstance(module, RMSNorm)
    }
    assert {value for name, value in eps.items() if "attention." in name} == {1e-6}
    assert eps["head.norm"] == 1e-3


# --- documents and generation
# -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3"])
def test_packed_documents_equal_documents_alone(model_type: str) -> None:
    model, _ = to_ours(
        deepseek_v3, random_reference(model_type, 0, **(V2 if model_type[-1] == "2" else V3))
    )
    tokens, _ = random_tokens(97, 50)
    packed = model(tokens[:1], metadata_of([[20, 30]]))
    alone = torch.cat([model(part) for part in tokens[:1].split([20, 30], dim=1)], dim=1)
    assert relative_error(packed, alone) < 1e-5
    whole = model(tokens[:1])  # the same without documents differs
    assert relative_error(packed, whole) > 1e-3


def test_the_cache_holds_only_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = to_ours(deepseek_v3, random_reference("deepseek_v3", 0, **V3))
    stored: list[torch.Size] = []
    clear = KVCache.clear

    def record(cache: KVCache) -> None:
        stored.extend(tensor.shape for _, *tensors in cache._stored.values() for tensor in tensors)
        clear(cache)

    monkeypatch.setattr(KVCache, "clear", record)
    prompts = [[5, 17, 3, 11], [7]]
    cached = generate(model, prompts, max_new_tokens=8)
    assert {(shape[0], *shape[2:]) for shape in stored} == {(2, 1, 12), (2, 1, 8)}
    assert [g.ids for g in cached] == [
        g.ids for g in generate(model, prompts, max_new_tokens=8, use_cache=False)
    ]


# --- sizes and config.json
# --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flavor", "billions", "active"),
    # From the papers and model cards; Kimi K2 rounds to 1T and 32.
    [
        ("V2-Lite-16B", 15.7, 2.4),
        ("V2-236B", 236, 21),
        ("V3-671B", 671, 37),
        ("Kimi-K2-1T", 1026, 32),
    ],
)
def test_published_sizes(flavor: str, billions: float, active: float) -> None:
    config: Any = FLAVORS[flavor]
    with torch.device("meta"):
        model = model_registry(flavor).model.build()
    assert model.num_parameters() / 1e9 == pytest.approx(billions, rel=5e-3)
    scores = 6 * config.n_layers * config.n_heads * (192 + 128) * 1024
    operations = model.flops_per_token(1024) - scores
    assert (operations / 6 + config.vocab_size * config.dim) / 1e9 == pytest.approx(
        active, rel=0.12
    )
    assert FORMAT.from_external(json.loads(json.dumps(FORMAT.to_external(config)))) == config


def test_published_file_equals_flavor(assets: Path, caplog: pytest.LogCaptureFixture) -> None:
    document = json.loads((assets / "hf-configs/deepseek-ai--DeepSeek-V3_config.json").read_text())
    assert FORMAT.from_external(document) == FLAVORS["V3-671B"]
    assert not caplog.records


def test_kimi_is_read_without_its_code_and_written_as_deepseek(
    caplog: pytest.LogCaptureFixture,
) -> None:
    auto_map = {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}
    document = {
        **FORMAT.to_external(FLAVORS["Kimi-K2-1T"]),
        "model_type": "kimi_k2",
        "auto_map": auto_map,
    }
    document["rope_scaling"] = {
        "type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
    }
    document["rope_scaling"] |= {
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    document |= {
        "aux_loss_alpha": 0.001,
        "seq_aux": True,
        "ep_size": 1,
        "num_nextn_predict_layers": 0,
    }
    assert FORMAT.from_external(document) == FLAVORS["Kimi-K2-1T"]
    assert FORMAT.to_external(FLAVORS["Kimi-K2-1T"])["model_type"] == "deepseek_v3"
    assert not caplog.records


def test_missing_keys_have_transformers_defaults() -> None:
    theirs = transformers.AutoConfig.for_model("deepseek_v3")
    required = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
    )
    document = {
        key: getattr(theirs, key) for key in (*required, "max_position_embeddings", "model_type")
    }
    assert FORMAT.from_external(document) == FORMAT.from_external(theirs.to_dict())


@pytest.mark.parametrize(
    ("flavor", "change", "message"),
    [
        ("V3-671B", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("V3-671B", {"topk_method": "greedy"}, "topk_method is 'group_limited_greedy'"),
        ("V2-236B", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
        ("V2-236B", {"norm_topk_prob": True}, "norm_topk_prob is True"),
        ("V3-671B", {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        (
            "V3-671B",
            {"num_key_value_heads": 8},
            "n_kv_heads is 8, but must be equal to --model.n_heads 128",
        ),
        (
            "V3-671B",
            {"v_head_dim": 256},
            "v_head_dim is 256, but must be at most the head width 192",
        ),
        ("V3-671B", {"kv_lora_rank": 0}, "kv_lora_rank is 0"),
        ("V3-671B", {"qk_rope_head_dim": 63}, "head_dim is 191, but must be even"),
        ("V3-671B", {"qk_rope_head_dim": 63, "qk_nope_head_dim": 129}, "such that an even number"),
        (
            "V3-671B",
            {"n_group": 7},
            "n_group is 7, but must be a divisor of --model.moe.n_experts 256",
        ),
    ],
)
def test_unsupported_models_are_rejected_by_name(
    flavor: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        FORMAT.from_external({**FORMAT.to_external(FLAVORS[flavor]), **change})
    assert "\n" not in str(caught.value)


# --- files and runs
# --------------------------------------------------------------------------------------------------


def test_weights_in_fp8_are_dequantized_while_read(tmp_path: Path) -> None:
    """With blocks that divide every matrix, as in the published files."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "q_lora_rank": 32,
    }
    widths = {"kv_lora_rank": 48, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
    reference = random_reference(
        "deepseek_v3", 0, **{**V3, **sizes, **widths}, tie_word_embeddings=False
    )
    plain = save_with_tokenizer(reference, tmp_path / "plain")
    folder = quantize(plain, tmp_path / "fp8")
    weights = read_by_transformers(folder)
    reference.load_state_dict({name: weight.float() for name, weight in weights.items()})
    tokens, _ = random_tokens(97, 40)
    model = load_model(folder, device="cpu", dtype=torch.float32).model
    assert relative_error(model(tokens), reference(tokens).logits) < 1e-5


def test_a_run_exports_what_transformers_opens(tmp_path: Path) -> None:
    options = {
        "checkpoint__enable": True,
        "checkpoint__last_save_in_hf": True,
        "model__moe__bias_rate": 0.01,
    }
    trainer = train(tmp_path, module="deepseek_v3", **options, checkpoint__export_dtype="float32")
    (folder,) = (tmp_path / "checkpoint").glob("step-*")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager"
    ).eval()
    assert type(theirs).__name__ == "DeepseekV3ForCausalLM"
    (model,) = trainer.model_parts
    tokens = random_tokens(97, 40)[0]
    with torch.no_grad():
        assert relative_error(model.eval()(tokens), theirs(tokens).logits) < 1e-5


def test_a_dry_run_counts_narrower_values(tmp_path: Path) -> None:
    """Executed are also products with values' padding to the width of keys."""
    words = ["--module", "deepseek_v3", "--config", "debugmodel", "--dump_folder", str(tmp_path)]
    config = ConfigManager().parse_args(words).config
    (rank,) = dry_run(config, world_size=2)
    tokens, length = (
        config.training.local_batch_size * config.training.seq_len,
        config.training.seq_len,
    )
    padding = 6 * 4 * 8 * (48 - 32) * length * tokens
    assert rank.executed_flops - padding == pytest.approx(rank.model_flops, rel=0.01)
    assert rank.executed_flops != pytest.approx(rank.model_flops, rel=0.02)


# --- Mistral 4
# --------------------------------------------------------------------------------------------------

MISTRAL4: dict[str, Any] = {
    "num_hidden_layers": 2,
    "rope_parameters": {**YARN, "factor": 4.0, "llama_4_scaling_beta": 1.0},
}


def constant_queries(attention: Any) -> None:
    attention.attend.scores.attn_scale = 0.0


def from_the_first(attention: Any) -> None:
    attention.attend.scores.first = 1


@pytest.mark.parametrize("change", [constant_queries, from_the_first, halves])
def test_mistake_in_mistral4_is_caught(change: Callable[[Any], None]) -> None:
    reference = random_reference("mistral4", 0, **MISTRAL4, rope_interleave=True)
    assert difference_with(lambda model: None, reference) < 1e-5
    assert difference_with(in_attention(change), reference) > 1e-3


def test_packed_documents_of_mistral4_equal_documents_alone() -> None:
    model, _ = to_ours(deepseek_v3, random_reference("mistral4", 0, **MISTRAL4))
    assert_documents_are_apart(model)


def test_missing_keys_of_mistral4_have_transformers_defaults() -> None:
    """The published size."""
    theirs = transformers.AutoConfig.for_model("mistral4").to_dict()
    config: Any = FLAVORS["Mistral-Small-4-119B"]
    assert FORMAT.from_external(theirs) == config
    with torch.device("meta"):
        assert config.build().num_parameters() / 1e9 == pytest.approx(119, rel=2e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_group": 2}, "n_group is 2"),
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25, but must be 0.5"),
        ({"llama_4_scaling_beta": None}, "llama_4_scaling_beta is"),
    ],
)
def test_other_models_than_mistral4_are_rejected_by_name(
    change: dict[str, Any], message: str
) -> None:
    document = FORMAT.to_external(FLAVORS["Mistral-Small-4-119B"])
    outer = {key: change[key] for key in change if key in ("n_group", "scoring_func")}
    document |= outer
    document["rope_parameters"] = {**document["rope_parameters"], **change}
    with pytest.raises(UserError, match=message) as caught:
        FORMAT.from_external(document)
    assert "\n" not in str(caught.value)
