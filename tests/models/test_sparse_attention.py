"""DeepSeek-V3.2 and GLM-5: mistakes in the choice of tokens that `test_equal_transformers` catches,
packed documents, frozen indexers, adapters, sizes and refusals."""

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.family_cases import (
    difference_with,
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
from tests.training import train
from torchtitan.distributed.initialize import initialize_weights
from torchtitan.models import deepseek_v3
from torchtitan.models.common import sparse_attention
from torchtitan.models.common.sparse_attention import Indexer, SparseLatentAttention
from torchtitan.models.deepseek_v3 import FLAVORS, FORMAT
from torchtitan.tools.errors import UserError

transformers = pytest.importorskip("transformers")

__all__ = ["chat_file"]  # a fixture

TINY: dict[str, Any] = {
    **{"num_hidden_layers": 2, "first_k_dense_replace": 1, "index_topk": 6, "index_head_dim": 12},
    **{"qk_rope_head_dim": 8, "n_group": 1, "topk_group": 1},
}
TYPES = ["deepseek_v32", "glm_moe_dsa"]


def indexers(model: Any) -> list[Indexer]:
    return [module for module in model.modules() if isinstance(module, Indexer)]


def other_rope(model: Any) -> None:
    for indexer in indexers(model):
        indexer.interleaved = not indexer.interleaved


def no_norm_of_keys(model: Any) -> None:
    for indexer in indexers(model):
        indexer.k_norm.forward = lambda x: x


def no_weights(model: Any) -> None:
    for indexer in indexers(model):
        forward, n_heads = indexer.forward, indexer.widths[-1]
        indexer.forward = lambda *x, f=forward, n=n_heads: torch.cat(
            (f(*x)[..., :-n], torch.ones_like(f(*x)[..., -n:])), dim=-1
        )


def one_token_more(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, SparseLatentAttention):
            module.attend.top_k += 1


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("mistake", [other_rope, no_norm_of_keys, no_weights, one_token_more])
def test_mistake_is_caught(model_type: str, mistake: Callable[[Any], None]) -> None:
    reference = random_reference(model_type, 0, **TINY)
    assert difference_with(lambda model: None, reference) < 1e-5
    assert difference_with(mistake, reference) > 1e-3


def test_products_below_zero_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = random_reference("deepseek_v32", 0, **TINY)
    monkeypatch.setattr(sparse_attention, "F", SimpleNamespace(relu=lambda x: x))
    assert difference_with(lambda model: None, reference) > 1e-3


@pytest.mark.parametrize("types", [("full",), ("full", "shared")])
def test_packed_documents_equal_documents_alone(types: tuple[str, ...]) -> None:
    reference = random_reference("glm_moe_dsa", 0, **TINY, indexer_types=types)
    model, _ = to_ours(deepseek_v3, reference)
    assert_documents_are_apart(model)


def test_a_shared_choice_is_that_of_the_last_full_layer() -> None:
    options = {**TINY, "num_hidden_layers": 4, "indexer_types": ("full", "full", "shared")}
    reference = random_reference("glm_moe_dsa", 0, **options)

    model: Any = to_ours(deepseek_v3, reference)[0]
    tokens, _ = random_tokens(97, 50)
    with torch.no_grad():
        assert relative_error(model(tokens), reference(tokens).logits) < 1e-5
        second = model.layers["1"].attention.attend
        second.gives_choice = False  # so that the next layer sees all tokens
        assert relative_error(model(tokens), reference(tokens).logits) > 1e-3


@pytest.mark.parametrize(
    ("change", "first"),
    [
        ({"index_topk_pattern": "FSSF" * 2}, "FSSF"),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, "FFFS"),
        ({"index_topk_freq": 3}, "FFSS"),
        ({}, "FFFF"),
    ],
)
def test_types_of_indexers_are_those_of_transformers(change: dict[str, Any], first: str) -> None:
    document = FORMAT.to_external(dataclasses.replace(FLAVORS["GLM-5-744B"], n_layers=8))
    del document["indexer_types"]
    config: Any = FORMAT.from_external({**document, **change})
    theirs = transformers.AutoConfig.for_model(**copy.deepcopy({**document, **change}))
    ours = ["shared" if config.shares_choice(index) else "full" for index in range(8)]
    assert ours == theirs.indexer_types
    assert "".join(kind[0].upper() for kind in ours[:4]) == first


def test_blocks_of_queries_choose_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = to_ours(deepseek_v3, random_reference("deepseek_v32", 0, **TINY))
    tokens, _ = random_tokens(97, 50)
    with torch.no_grad():
        expected = model(tokens)
        monkeypatch.setattr(sparse_attention, "BLOCK", 16)
        assert relative_error(model(tokens), expected) < 1e-5


def test_a_run_leaves_the_indexer_and_exports_what_transformers_opens(tmp_path: Path) -> None:
    options = {"checkpoint__enable": True, "checkpoint__last_save_in_hf": True}
    trainer = train(
        tmp_path,
        module="deepseek_v3",
        config="deepseek_v3_sparse_debugmodel",
        model__index_topk=8,
        checkpoint__export_dtype="float32",
        **options,
    )
    (model,) = trainer.model_parts
    initial = trainer.config.model_spec.model.build()
    initialize_weights(initial, trainer.config.debug.seed)

    def of_indexers(model: Any) -> dict[str, Tensor]:
        return {name: p for name, p in model.named_parameters() if ".indexer." in name}

    ours, before = of_indexers(model), of_indexers(initial)
    assert ours.keys() == before.keys() and len(ours) == 5 * len(model.layers)
    assert all(torch.equal(ours[name], before[name]) for name in ours)
    (folder,) = (tmp_path / "checkpoint").glob("step-*")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager"
    ).eval()
    assert type(theirs).__name__ == "DeepseekV32ForCausalLM"
    tokens = random_tokens(97, 40)[0]
    with torch.no_grad():
        assert relative_error(model.eval()(tokens), theirs(tokens).logits) < 1e-5


@pytest.mark.slow
def test_adapters_open_in_peft(chat_file: Path, tmp_path: Path) -> None:
    """Without adapters of the indexer."""
    reference = random_reference("glm_moe_dsa", 0, **TINY, vocab_size=2048, hidden_size=64)
    pretrained = save_with_tokenizer(reference, tmp_path / "pretrained")
    rank = {"model_converters__lora__rank": 4}
    assert_adapters_open_in_peft("deepseek_v3", pretrained, chat_file, tmp_path / "run", **rank)
    (saved,) = (tmp_path / "run").rglob("adapter_config.json")
    targets = json.loads(saved.read_text())["target_modules"]
    assert "q_b_proj" in str(targets) and "indexer" not in str(targets)


GLM_5: dict[str, Any] = {
    **{"architectures": ["GlmMoeDsaForCausalLM"], "attention_bias": False, "dtype": "bfloat16"},
    **{"attention_dropout": 0.0, "eos_token_id": [154820, 154827, 154829], "ep_size": 1},
    **{"first_k_dense_replace": 3, "hidden_act": "silu", "head_dim": 64, "hidden_size": 6144},
    **{"index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048},
    **{"indexer_rope_interleave": True, "initializer_range": 0.02, "intermediate_size": 12288},
    **{"kv_lora_rank": 512, "max_position_embeddings": 202752, "moe_intermediate_size": 2048},
    **{"moe_layer_freq": 1, "model_type": "glm_moe_dsa", "n_group": 1, "n_routed_experts": 256},
    **{"n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64},
    **{"num_experts_per_tok": 8, "num_hidden_layers": 78, "num_key_value_heads": 64},
    **{"num_nextn_predict_layers": 1, "pad_token_id": 154820, "pretraining_tp": 1},
    **{"q_lora_rank": 2048, "qk_head_dim": 256, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64},
    **{"rms_norm_eps": 1e-05, "rope_interleave": True, "routed_scaling_factor": 2.5},
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    **{"scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 1},
    **{"topk_method": "noaux_tc", "transformers_version": "5.0.2.dev0", "use_cache": True},
    **{"v_head_dim": 256, "vocab_size": 154880},
}
"""With the keys of published files."""


def test_published_file_is_read_without_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert FORMAT.from_external(GLM_5) == FLAVORS["GLM-5-744B"]
    shared = {"index_topk_freq": 4, "index_skip_topk_offset": 3, "moe_router_dtype": "float32"}
    further = {**GLM_5, **shared, "index_share_for_mtp_iteration": True}
    config: Any = FORMAT.from_external(further)
    assert not caplog.records
    # As other readers of GLM-5.2 resolve these keys.
    full = [index for index in range(78) if not config.shares_choice(index)]
    assert full[:4] == [0, 1, 2, 6] and full[-1] == 74 and len(full) == 21


@pytest.mark.slow
@pytest.mark.parametrize(("flavor", "billions"), [("V3.2-671B", 671.9), ("GLM-5-744B", 744)])
def test_published_sizes(flavor: str, billions: float) -> None:
    """From the model cards: DeepSeek-V3's 671 B and the indexers; GLM-5. The same number in
    transformers, from our config.json."""
    config: Any = FLAVORS[flavor]
    document = json.loads(json.dumps(FORMAT.to_external(config)))
    with torch.device("meta"):
        parameters = config.build().num_parameters()
        theirs = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**copy.deepcopy(document))  # it changes them
        )
    assert parameters == theirs.num_parameters()
    assert parameters / 1e9 == pytest.approx(billions, rel=5e-4)
    assert FORMAT.from_external(document) == config


@pytest.mark.parametrize(
    ("flavor", "change", "message"),
    [
        ("GLM-5-744B", {"indexer_types": ["shared", "full"] * 39}, "indexer_types is"),
        (
            "GLM-5-744B",
            {"indexer_types": None, "index_topk_pattern": "FSX"},
            "index_topk_pattern is 'FSX'",
        ),
        ("GLM-5-744B", {"indexer_types": None, "index_topk_freq": 0}, "index_topk_freq is 0"),
        ("GLM-5-744B", {"indexer_rope_interleave": False}, "indexer_rope_interleave is False"),
        ("V3.2-671B", {"layer_types": ["full_attention"] * 61}, "layer_types is"),
        ("V3.2-671B", {"rope_interleave": False}, "rope_interleave is False"),
        ("V3.2-671B", {"q_lora_rank": None}, "q_lora_rank is None, but must be a width"),
        ("V3.2-671B", {"index_head_dim": 32}, "index_head_dim is 32, but must be at least"),
        ("V3.2-671B", {"index_topk": 0}, "index_topk is 0"),
    ],
)
def test_unsupported_models_are_refused_by_name(
    flavor: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        FORMAT.from_external({**FORMAT.to_external(FLAVORS[flavor]), **change})
    assert "\n" not in str(caught.value)


def test_operations() -> None:
    """Attention to the chosen tokens, forward and backward; the indexer forward, to all tokens."""
    config: Any = dataclasses.replace(FLAVORS["V3.2-671B"], n_layers=1)
    with torch.device("meta"):
        model = config.build()
    grown = model.flops_per_token(8192) - model.flops_per_token(4096)
    assert grown == 2 * 64 * 128 * 4096
    grown = model.flops_per_token(2048) - model.flops_per_token(1024)
    assert grown == 2 * 64 * 128 * 1024 + 6 * 128 * (192 + 128) * 1024
