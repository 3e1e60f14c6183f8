"""GLM-4 against transformers: mistakes that `test_equal_transformers` catches, config.json,
published sizes."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.family_cases import random_reference, random_tokens, relative_error, to_ours
from torchtitan.cli.main import main
from torchtitan.models import glm4
from torchtitan.models.common import hugging_face
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.glm4 import FLAVORS, FORMATS, model_registry
from torchtitan.models.pretrained import load_model
from torchtitan.protocols.state_dict_adapter import KeyMapping, RopePermutation
from torchtitan.tools.errors import UserError

transformers = pytest.importorskip("transformers")

TYPES = {"glm": "9B", "glm4": "9B-0414"}
"""model_type → a published size."""

TINY: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 16,
    "attention_bias": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}


def logits_error(
    model_type: str,
    mistake: Callable[[Any], None] = lambda model: None,
    length: int = 50,
    **options: Any,
) -> float:
    """Return the relative error of our logits after a `mistake` that changes our model."""
    reference = random_reference(model_type, 0, **{**TINY, **options})
    model, _ = to_ours(glm4, reference)
    mistake(model)
    tokens, _ = random_tokens(97, length)
    with torch.no_grad():
        return relative_error(model(tokens), reference(tokens).logits)


def _whole_heads_rotated(model: Any) -> None:
    model.config.rope.rotated_fraction = 1.0


def _gate_and_up_exchanged(model: Any) -> None:
    for block in model.layers.values():
        block.feed_forward.w1, block.feed_forward.w3 = block.feed_forward.w3, block.feed_forward.w1


def _no_biases_of_keys(model: Any) -> None:
    for block in model.layers.values():
        torch.nn.init.zeros_(block.attention.wq.bias)


def _norm_before_instead_of_after(model: Any) -> None:
    for block in model.layers.values():
        block.attention_post_norm, block.ffn_norm = block.ffn_norm, block.attention_post_norm


def _no_norm_after(model: Any) -> None:
    for block in model.layers.values():
        block.ffn_post_norm = None


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize(
    "mistake", [_whole_heads_rotated, _gate_and_up_exchanged, _no_biases_of_keys]
)
def test_mistake_changes_logits(model_type: str, mistake: Callable[[Any], None]) -> None:
    assert logits_error(model_type) < 1e-5
    assert logits_error(model_type, mistake) > 1e-3  # a hundred times the tolerance


@pytest.mark.parametrize("mistake", [_norm_before_instead_of_after, _no_norm_after])
def test_misplaced_norm_changes_logits(mistake: Callable[[Any], None]) -> None:
    assert logits_error("glm4", mistake) > 1e-3


@pytest.mark.parametrize(
    "permutation",
    [
        lambda head_dim, rotated: RopePermutation(head_dim),
        lambda head_dim, rotated: RopePermutation(head_dim, 2),
    ],
    ids=["whole heads", "too few elements"],
)
def test_other_permutation_changes_logits(
    monkeypatch: pytest.MonkeyPatch, permutation: Any
) -> None:
    monkeypatch.setattr(hugging_face, "RopePermutation", permutation)
    assert logits_error("glm4") > 1e-3


def test_biases_are_permuted(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_weights_only(rows: Sequence[KeyMapping], config: Decoder.Config) -> list[KeyMapping]:
        pairs = zip(rows, interleaved(rows, config), strict=True)
        return [row if str(row.internal).endswith(".bias") else changed for row, changed in pairs]

    interleaved = hugging_face.interleaved
    monkeypatch.setattr(hugging_face, "interleaved", of_weights_only)
    assert logits_error("glm4") > 1e-3


# --- sizes and config.json
# --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flavor", "parameters"),
    # From the files of the published models.
    [
        ("9B", 9_399_951_360),
        ("9B-chat", 9_399_951_360),
        ("9B-0414", 9_400_279_040),
        ("32B-0414", 32_566_081_536),
    ],
)
def test_published_sizes(flavor: str, parameters: int) -> None:
    with torch.device("meta"):
        assert model_registry(flavor).model.build().num_parameters() == parameters
    document = FORMATS["hf"].to_external(FLAVORS[flavor])
    assert FORMATS["hf"].from_external(document) == FLAVORS[flavor]
    assert document["model_type"] == ("glm4" if "0414" in flavor else "glm")


@pytest.mark.parametrize("model_type", TYPES)
def test_missing_keys_have_transformers_defaults(model_type: str) -> None:
    names = (
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "tie_word_embeddings",
        "attention_bias",
    )
    document = FORMATS["hf"].to_external(FLAVORS[TYPES[model_type]])
    rope = ("rope_theta", "rope_scaling", "partial_rotary_factor")
    document = {key: value for key, value in document.items() if key not in (*names, *rope)}
    document |= {"hidden_size": 2048}  # so that the width of heads is not dim / n_heads
    config: Any = FORMATS["hf"].from_external(document)
    theirs = transformers.AutoConfig.for_model(**document)
    assert (config.n_kv_heads, config.norm_eps) == (theirs.num_key_value_heads, theirs.rms_norm_eps)
    assert (config.resolved_head_dim, config.attention_bias) == (
        theirs.head_dim,
        theirs.attention_bias,
    )
    assert config.tie_embeddings == theirs.tie_word_embeddings
    assert config.rope.theta == theirs.rope_parameters["rope_theta"]
    assert config.rope.rotated_fraction == theirs.rope_parameters["partial_rotary_factor"] == 0.5


@pytest.mark.parametrize("model_type", TYPES)
def test_spellings_of_transformers_4_and_5_are_equal(
    model_type: str, caplog: pytest.LogCaptureFixture
) -> None:
    older = FORMATS["hf"].to_external(FLAVORS[TYPES[model_type]])
    assert older["partial_rotary_factor"] == 0.5
    newer = transformers.AutoConfig.for_model(**older).to_dict()
    assert newer["rope_parameters"]["partial_rotary_factor"] == 0.5
    newer = {key: value for key, value in newer.items() if key != "partial_rotary_factor"}
    assert FORMATS["hf"].from_external(newer) == FLAVORS[TYPES[model_type]]
    assert not caplog.records


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": {"rope_type": "axial"}}, "RoPE of type 'axial'"),
        ({"partial_rotary_factor": 0.0}, "partial_rotary_factor is 0.0"),
        (
            {"partial_rotary_factor": 0.01},
            "rotated_fraction is 0.01, but must be such that an even number",
        ),
        ({"attention_bias": 1}, "attention_bias is 1"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"num_experts": 8}, "num_experts is 8"),
        ({"model_type": "glm4_moe"}, "model_type is 'glm4_moe', and this family is glm4 or glm"),
    ],
)
def test_unsupported_models_are_rejected_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        FORMATS["hf"].from_external({**FORMATS["hf"].to_external(FLAVORS["9B-0414"]), **change})


# --- files
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", TYPES)
def test_conversion_round_trip(tmp_path: Path, model_type: str) -> None:
    random_reference(model_type, 1, **TINY).save_pretrained(tmp_path / "hf")
    assert main(["convert", "--to", "dcp", str(tmp_path / "hf"), str(tmp_path / "dcp")]) == 0
    assert main(["convert", "--to", "hf", str(tmp_path / "dcp"), str(tmp_path / "again")]) == 0
    tokens, _ = random_tokens(97, 30)
    original, again = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        for name in ("hf", "again")
    )
    with torch.no_grad():
        expected = original(tokens).logits
        assert torch.equal(again(tokens).logits, expected)
        assert (
            relative_error(load_model(tmp_path / "dcp", device="cpu").model(tokens), expected)
            < 1e-5
        )
