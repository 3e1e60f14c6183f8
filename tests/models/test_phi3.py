"""Phi-3 against transformers, in addition to `test_equal_transformers`: mistakes, config.json,
published sizes."""

import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.models.family_cases import (
    LONG_FACTORS,
    random_reference,
    random_tokens,
    relative_error,
    to_ours,
)
from tests.models.family_runs import assert_adapters_open_in_peft, save_with_tokenizer
from tests.models.test_sft_configs import chat_file
from torchtitan.components.generation import Engine, Sampling, generate
from torchtitan.models import phi3
from torchtitan.models.common import rope
from torchtitan.models.phi3 import FLAVORS, FORMATS, Phi3Model, model_registry
from torchtitan.protocols import BaseModel
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.tools.errors import UserError

__all__ = ["chat_file"]  # a fixture

transformers = pytest.importorskip("transformers")

LONG_ROPE = {"rope_type": "longrope", "rope_theta": 1e4, **LONG_FACTORS}
LONG: dict[str, Any] = {"original_max_position_embeddings": 16, "rope_parameters": LONG_ROPE}
TINY: dict[str, Any] = {
    "num_hidden_layers": 3,
    "sliding_window": 16,
    "tie_word_embeddings": False,
    **LONG,
}


def tiny(**options: Any) -> tuple[BaseModel, Any]:
    """Return our model and transformers'."""
    reference = random_reference("phi3", 0, **{**TINY, **options})
    return to_ours(phi3, reference)[0], reference


# --- mistakes
# --------------------------------------------------------------------------------------------------


def _window_excludes_the_token_itself(model: Any) -> None:
    model.config.sliding_window += 1


def _short_factors_everywhere(model: Any) -> None:
    model.config.rope.long_factors = model.config.rope.short_factors


def _long_factors_everywhere(model: Any) -> None:
    model.config.rope.short_factors = model.config.rope.long_factors


def _original_context_off_by_one(model: Any) -> None:
    model.config.rope.original_max_seq_len -= 1


def _no_factor_of_attention(model: Any) -> None:
    model.config.rope.attention_factor = 1.0


def _gate_and_up_exchanged(model: Any) -> None:
    for block in model.layers.values():
        block.feed_forward.w1, block.feed_forward.w3 = block.feed_forward.w3, block.feed_forward.w1


def _keys_and_values_exchanged(model: Any) -> None:
    for block in model.layers.values():
        block.attention.wk, block.attention.wv = block.attention.wv, block.attention.wk


@pytest.mark.parametrize(
    ("mistake", "length"),
    [
        (_window_excludes_the_token_itself, 50),
        (_short_factors_everywhere, 50),
        (_long_factors_everywhere, 16),
        (_original_context_off_by_one, 16),
        (_no_factor_of_attention, 50),
        (_gate_and_up_exchanged, 50),
        (_keys_and_values_exchanged, 50),
    ],
)
def test_mistake_changes_logits(mistake: Callable[[Any], None], length: int) -> None:
    model, reference = tiny()
    tokens, _ = random_tokens(97, length)
    with torch.no_grad():
        expected = reference(tokens).logits
        assert relative_error(model(tokens), expected) < 1e-5
        mistake(model)
        assert relative_error(model(tokens), expected) > 1e-3  # a hundred times the tolerance


def test_other_part_of_heads_rotated_changes_logits() -> None:
    long = {
        "partial_rotary_factor": 0.75,
        **{key: factors[:3] for key, factors in LONG_FACTORS.items()},
    }
    model, reference = tiny(rope_parameters={**LONG_ROPE, **long})
    tokens, _ = random_tokens(97, 50)
    config: Any = model.config
    assert config.rope.rotated_dim(8) == 6
    whole = {"rotated_fraction": 1.0, "short_factors": [1.0] * 4, "long_factors": [1.0] * 4}
    config.rope = dataclasses.replace(config.rope, **whole)
    with torch.no_grad():
        assert relative_error(model(tokens), reference(tokens).logits) > 1e-3


# --- documents and generation
# -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 5])
def test_packed_documents_equal_documents_alone(window: int | None) -> None:
    """Some have short factors, others long ones."""
    model, reference = tiny(sliding_window=window)
    lengths = [9, 30, 16, 17]
    tokens, _ = random_tokens(97, sum(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths]).expand(2, -1)
    with torch.no_grad():
        packed = model(tokens, AttentionMetadata.from_positions(positions)).split(lengths, dim=1)
        for document, logits in zip(tokens.split(lengths, dim=1), packed, strict=True):
            # Float32 sums in another order.
            assert relative_error(logits, model(document)) < 1e-5
            assert relative_error(logits, reference(document).logits) < 1e-5


PROMPTS = [[5, 17, 3, 11], [7], list(range(1, 21)), list(range(1, 17))]


def generated(model: nn.Module, **options: Any) -> list[list[int]]:
    return [row.ids for row in generate(model, PROMPTS, max_new_tokens=30, **options)]


@pytest.mark.parametrize("window", [None, 5])
def test_cache_is_computed_again_at_the_original_context(window: int | None) -> None:
    """Rows get there at different times, one with its first token; one starts beyond it."""
    model, reference = tiny(sliding_window=window)
    tokens = generated(model)
    assert tokens == generated(model, use_cache=False)
    for prompt, ids in zip(PROMPTS, tokens, strict=True):
        expected = reference.generate(
            torch.tensor([prompt]),
            max_new_tokens=30,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert [*prompt, *ids] == expected[0].tolist()


@pytest.mark.parametrize("degree", [2, 4])
def test_cache_is_computed_again_with_padding_of_tensor_parallelism(
    monkeypatch: pytest.MonkeyPatch, degree: int
) -> None:
    model, _ = tiny(sliding_window=None)
    expected = generated(model)
    module = importlib.import_module("torchtitan.components.generation.engine")
    monkeypatch.setattr(module, "sequence_splits", lambda model: degree)
    assert generated(model) == expected


def test_kept_texts_are_computed_again_at_the_original_context() -> None:
    """A later prompt goes beyond it, and so has other factors for all tokens."""
    model, _ = tiny(sliding_window=None)

    def texts(**options: Any) -> list[list[int]]:
        engine = Engine(model, sampling=Sampling(), **options)

        async def converse(n_tokens: int) -> list[int]:
            tokens = list(range(n_tokens))
            for _ in range(3):
                text = await engine.generate(tokens, max_new_tokens=3, key="", is_continued=True)
                tokens += [*text.ids, 1]
            return tokens

        return engine.run([converse(n_tokens) for n_tokens in range(2, 20)])

    assert texts() == texts(use_cache=False)


def test_keys_from_before_the_original_context_change_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The test above can fail."""
    model, _ = tiny(sliding_window=None)
    expected = generated(model)
    monkeypatch.setattr(Phi3Model, "cache_boundaries", lambda self: frozenset())
    assert generated(model) != expected


# --- sizes and config.json
# --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flavor", "parameters"),
    # From the files of the published models.
    [("3-mini-4k", 3_821_079_552), ("3-medium-4k", 13_960_238_080), ("4", 14_659_507_200)],
)
def test_published_sizes(flavor: str, parameters: int) -> None:
    with torch.device("meta"):
        assert model_registry(flavor).model.build().num_parameters() == parameters
    assert (
        FORMATS["hf"].from_external(FORMATS["hf"].to_external(FLAVORS[flavor])) == FLAVORS[flavor]
    )


def document_of(flavor: str, **changes: Any) -> dict[str, Any]:
    return {**FORMATS["hf"].to_external(FLAVORS[flavor]), **changes}


FACTORS = {
    "short_factor": [1.0 + i / 48 for i in range(48)],
    "long_factor": [1.0 + i for i in range(48)],
}


def test_older_spellings_equal_newer_ones(caplog: pytest.LogCaptureFixture) -> None:
    """Phi-3-mini-128k and Phi-3.5 as published, with `su`, `yarn` (which transformers reads as
    `longrope`) and `longrope`; the factor is the ratio of the contexts."""
    newer = document_of(
        "3-mini-4k",
        max_position_embeddings=131_072,
        original_max_position_embeddings=4096,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **FACTORS},
    )
    del newer["rope_theta"], newer["rope_scaling"]
    expected = FORMATS["hf"].from_external(newer)
    assert (expected.rope.scaling_factor, expected.rope.original_max_seq_len) == (32.0, 4096)
    theirs = transformers.Phi3Config.from_dict(newer)
    assert rope.attention_factor(expected.rope) == pytest.approx(
        transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["longrope"](theirs)[1], rel=1e-12
    )
    for spelling in (
        {"type": "su"},
        {"type": "yarn"},
        {"type": "longrope"},
        {"rope_type": "longrope"},
    ):
        older = {key: value for key, value in newer.items() if key != "rope_parameters"}
        older |= {"rope_theta": 1e4, "rope_scaling": {**spelling, **FACTORS}}
        assert FORMATS["hf"].from_external(older) == expected
    assert not caplog.records


def test_long_rope_is_written_as_transformers_4_reads_it() -> None:
    """It accepts three keys only; another factor needs more."""
    config = FLAVORS["debugmodel"]
    written = FORMATS["hf"].to_external(config)
    factors = {"short_factor": config.rope.short_factors, "long_factor": config.rope.long_factors}
    assert written["rope_scaling"] == {"type": "longrope", **factors}
    assert (written["original_max_position_embeddings"], written["partial_rotary_factor"]) == (
        128,
        0.75,
    )
    for change in ({"scaling_factor": 2.0}, {"attention_factor": 1.5}):
        other = dataclasses.replace(
            config, rope=dataclasses.replace(config.rope, **change), vocab_size=97
        )
        written = FORMATS["hf"].to_external(other)
        assert FORMATS["hf"].from_external(written) == other
        assert len(written["rope_scaling"]) > 3


def test_phi_4_mini_is_read(caplog: pytest.LogCaptureFixture) -> None:
    """Three quarters of each head are rotated."""
    document = document_of(
        "3-mini-4k",
        num_attention_heads=24,
        num_key_value_heads=8,
        head_dim=None,
        vocab_size=200_064,
        tie_word_embeddings=True,
        max_position_embeddings=131_072,
        original_max_position_embeddings=4096,
        partial_rotary_factor=0.75,
        sliding_window=262_144,
        rope_scaling={"type": "longrope", **FACTORS},
        **{"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False},
    )
    config = FORMATS["hf"].from_external(document)
    assert config.rope.rotated_dim(config.resolved_head_dim) == 96
    with torch.device("meta"):
        # from the files of the published model
        assert config.build().num_parameters() == 3_836_021_760
    assert not caplog.records


def test_missing_keys_have_transformers_defaults() -> None:
    names = (
        "num_key_value_heads",
        "rms_norm_eps",
        "tie_word_embeddings",
        "rope_theta",
        "rope_scaling",
    )
    document = document_of("3-medium-4k")
    document = {
        key: value
        for key, value in document.items()
        if key not in (*names, "head_dim", "sliding_window")
    }
    config, theirs = (
        FORMATS["hf"].from_external(document),
        transformers.Phi3Config.from_dict(document),
    )
    assert (config.n_kv_heads, config.norm_eps) == (theirs.num_key_value_heads, theirs.rms_norm_eps)
    assert (config.tie_embeddings, config.sliding_window) == (
        theirs.tie_word_embeddings,
        theirs.sliding_window,
    )
    assert config.rope.theta == theirs.rope_parameters["rope_theta"]
    document["rope_scaling"] = {"rope_type": "longrope", **{key: [1.0] * 64 for key in FACTORS}}
    config, theirs = (
        FORMATS["hf"].from_external(document),
        transformers.Phi3Config.from_dict(document),
    )
    assert (
        config.rope.original_max_seq_len
        == theirs.rope_parameters["original_max_position_embeddings"]
        == 4096
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "RoPE of type 'linear'"),
        ({"rope_scaling": {"type": ["su"]}}, r"RoPE of type \['su'\]"),
        ({"rope_scaling": {"type": "su", **FACTORS, "long_mscale": 1.2}}, "long_mscale is 1.2"),
        ({"rope_scaling": {"type": "su", "short_factor": [1.0]}}, "long_factor is missing"),
        (
            {"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0]}},
            "must be 48 numbers",
        ),
        (
            {"rope_scaling": {"type": "su", "original_max_position_embeddings": 2048, **FACTORS}},
            "original_max_position_embeddings is 4096, and 2048",
        ),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"layer_types": ["full_attention"] * 32}, "layer_types is "),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"model_type": "phi"}, "model_type is 'phi', and this family is phi3"),
    ],
)
def test_unsupported_models_are_rejected_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        FORMATS["hf"].from_external(document_of("3-mini-4k", **change))


def test_models_of_other_scalings_cannot_be_written() -> None:
    scaled = dataclasses.replace(
        FLAVORS["4"], rope=rope.RoPEConfig(scaling="linear", scaling_factor=2.0)
    )
    for config in (scaled, dataclasses.replace(FLAVORS["4"], layer_types=["full_attention"])):
        with pytest.raises(UserError, match="no model_type of config.json"):
            FORMATS["hf"].to_external(config)


def test_dropout_is_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    document = document_of("3-mini-4k", resid_pdrop=0.1, embd_pdrop=0.0)
    assert FORMATS["hf"].from_external(document) == FLAVORS["3-mini-4k"]
    (record,) = caplog.records
    assert "ignoring resid_pdrop 0.1" in record.getMessage()


# --- files and runs
# --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_adapters_for_a_hugging_face_folder(tmp_path: Path, chat_file: Path) -> None:
    """The adapter is of fused layers."""
    sizes = {
        "vocab_size": 2048,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "max_position_embeddings": 2048,
    }
    _, reference = tiny(
        **sizes, sliding_window=64, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
    )
    pretrained = save_with_tokenizer(reference, tmp_path / "hf")
    assert_adapters_open_in_peft("phi3", pretrained, chat_file, tmp_path / "run")
