"""Special features of Gemma 1, 2 and 3 against transformers, and their sizes against the published
ones."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.family_cases import random_reference, random_tokens, to_ours
from tests.models.family_runs import (
    assert_adapters_open_in_peft,
    assert_conversion_round_trip,
    save_with_tokenizer,
)
from tests.models.test_sft_configs import chat_file
from torchtitan.models import gemma
from torchtitan.models.common.attention import Attention
from torchtitan.models.common.norms import OffsetRMSNorm
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.gemma import FLAVORS, FORMATS, model_registry
from torchtitan.models.gemma.model import Gemma2Model
from torchtitan.models.pretrained import load_model
from torchtitan.protocols.output_head import UNCHANGED
from torchtitan.tools.errors import UserError

__all__ = ["chat_file"]  # a fixture

transformers = pytest.importorskip("transformers")

TYPES = ("gemma", "gemma2", "gemma3_text")
READ, WRITE = FORMATS["hf"].from_external, FORMATS["hf"].to_external

ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_UNTIED = {"num_hidden_layers": 3, "tie_word_embeddings": False}  # for large logits
DISTINCT: dict[str, dict[str, Any]] = {
    "gemma": _UNTIED,
    "gemma2": {
        **_UNTIED,
        "layer_types": None,
        "sliding_window": 16,
        "query_pre_attn_scalar": 4,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 1.5,
    },
    "gemma3_text": {
        **_UNTIED,
        "layer_types": None,
        "sliding_window_pattern": 2,
        "sliding_window": 16,
        "query_pre_attn_scalar": 4,
        "final_logit_softcapping": 1.5,
        "rope_parameters": ROPES,
    },
}
"""Model type → a configuration in which each feature has an effect."""


# --- mistakes
# --------------------------------------------------------------------------------------------------


def _patch_norms(
    model: Any, forward: Callable[[OffsetRMSNorm, Tensor], Tensor], within: str = ""
) -> None:
    for name, norm in model.named_modules():
        if isinstance(norm, OffsetRMSNorm) and within in name:
            norm.forward = forward.__get__(norm)


def _without_offset(norm: OffsetRMSNorm, x: Tensor) -> Tensor:
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)


def norms_without_offset(model: Any) -> None:
    _patch_norms(model, _without_offset)


def query_and_key_norms_without_offset(model: Any) -> None:
    _patch_norms(model, _without_offset, "attention.")


def no_embedding_factor(model: Any) -> None:
    model.embed = lambda tokens: model.tok_embeddings(tokens)


def exact_gelu(model: Any) -> None:
    for layer in model.layers.values():
        layer.feed_forward.activation = F.gelu


def window_one_longer(model: Any) -> None:
    model.config.sliding_window += 1


def window_one_shorter(model: Any) -> None:
    model.config.sliding_window -= 1


def first_layer_is_full(model: Any) -> None:
    model.config.layer_types = ["full_attention", "sliding_attention"]


def cap_before_scale(model: Any) -> None:
    config = model.config
    scale = config.query_pre_attn_scalar**-0.5
    for layer in model.layers.values():
        # scale c tanh(s / c), with unscaled scores s, is c' tanh(scale s / c') with c' = scale c.
        layer.attention.attend = Attention(
            scale=scale, softcap=scale * config.attn_logit_softcapping
        )


def no_cap_of_scores(model: Any) -> None:
    for layer in model.layers.values():
        layer.attention.attend = Attention(scale=layer.attention.attend.scale)


def scale_of_head_width(model: Any) -> None:
    for layer in model.layers.values():
        layer.attention.attend = Attention(softcap=layer.attention.attend.softcap)


def no_cap_of_logits(model: Any) -> None:
    model.head.transform = UNCHANGED


def norms_named_as_in_llama(model: Any) -> None:
    for layer in model.layers.values():
        layer.attention_post_norm, layer.ffn_norm = layer.ffn_norm, layer.attention_post_norm


def norms_only_before(model: Any) -> None:
    for layer in model.layers.values():
        layer.attention_post_norm = layer.ffn_post_norm = None


def post_norm_after_addition(model: Any) -> None:
    for layer in model.layers.values():
        norm, layer.attention_post_norm = layer.attention_post_norm, None
        layer.forward = lambda x, rope, attention, layer=layer, norm=norm: layer._add(
            y := norm(layer._add(x, layer._attend(x, rope, attention))),
            layer._feed_forward(y, attention),
        )


def ropes_exchanged(model: Any) -> None:
    model.config.rope, model.config.local_rope = model.config.local_rope, model.config.rope


def one_rope_for_all(model: Any) -> None:
    model.config.local_rope = model.config.rope


def rope_without_scaling(model: Any) -> None:
    model.config.rope = RoPEConfig(theta=model.config.rope.theta)


def query_and_key_norms_exchanged(model: Any) -> None:
    for layer in model.layers.values():
        layer.attention.q_norm, layer.attention.k_norm = (
            layer.attention.k_norm,
            layer.attention.q_norm,
        )


_OF_ALL = [norms_without_offset, no_embedding_factor, exact_gelu]
_OF_2_AND_3 = [
    *(
        window_one_longer,
        window_one_shorter,
        first_layer_is_full,
        scale_of_head_width,
        no_cap_of_logits,
    ),
    *(norms_named_as_in_llama, norms_only_before, post_norm_after_addition),
]
_OF_3 = [ropes_exchanged, one_rope_for_all, rope_without_scaling]
_OF_3 += [query_and_key_norms_exchanged, query_and_key_norms_without_offset]
MISTAKES = {
    "gemma": _OF_ALL,
    "gemma2": [*_OF_ALL, *_OF_2_AND_3, cap_before_scale, no_cap_of_scores],
    "gemma3_text": [*_OF_ALL, *_OF_2_AND_3, *_OF_3],
}


@pytest.mark.parametrize(
    ("model_type", "mistake"),
    [
        pytest.param(kind, mistake, id=f"{kind}-{mistake.__name__}")
        for kind in TYPES
        for mistake in MISTAKES[kind]
    ],
)
def test_mistake_is_caught(model_type: str, mistake: Callable[[Any], None]) -> None:
    reference = random_reference(model_type, 0, **DISTINCT[model_type])
    model, _ = to_ours(gemma, reference)
    tokens, _ = random_tokens(97, 50)
    with torch.no_grad():
        expected = reference(tokens).logits
        # Float32 sums in another order. Mistakes change more than 0.1, except GELU by erf instead
        # of tanh, 1e-3.
        torch.testing.assert_close(model(tokens), expected, rtol=0, atol=1e-5)
        mistake(model)
        assert (model(tokens) - expected).abs().max() > 5e-4


def test_embedding_factor_is_rounded() -> None:
    """As in transformers, bit for bit, to the type of the weights."""
    reference = random_reference("gemma3_text", 0, hidden_size=48)
    model, _ = to_ours(gemma, reference)
    tokens, _ = random_tokens(97, 50)
    model, theirs = model.to(torch.bfloat16), reference.to(torch.bfloat16).model.embed_tokens
    assert isinstance(model, Gemma2Model)
    assert torch.equal(model.embed(tokens), theirs(tokens))
    assert not torch.equal(F.embedding(tokens, theirs.weight) * 48**0.5, theirs(tokens))


# --- sizes and config.json
# --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flavor", "parameters"),
    # From the files of the published models, without the second copy of a tied matrix.
    [
        ("1-2B", 2_506_172_416),
        ("1-7B", 8_537_680_896),
        ("2-2B", 2_614_341_888),
        ("2-9B", 9_241_705_984),
        ("2-27B", 27_227_128_320),
        ("3-270M", 268_098_176),
        ("3-1B", 999_885_952),
        ("3-4B", 4_300_079_472),
        ("3-12B", 12_187_325_040),
        ("3-27B", 27_432_406_640),
    ],
)
def test_published_sizes(flavor: str, parameters: int) -> None:
    config = model_registry(flavor).model
    with torch.device("meta"):
        model = config.build()
    if flavor in ("3-4B", "3-12B", "3-27B"):
        # of the vision encoder, and of its norm and projection
        parameters -= 416_866_032 + 1152 * (config.dim + 1)
    assert model.num_parameters() == parameters


@pytest.mark.parametrize("flavor", FLAVORS)
def test_flavors_are_written_and_read(flavor: str) -> None:
    config = model_registry(flavor).model
    config.vocab_size = config.vocab_size or 2048
    assert READ(json.loads(json.dumps(WRITE(config)))) == config


def required(flavor: str) -> dict[str, Any]:
    names = (
        "model_type",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    )
    names += ("vocab_size", "max_position_embeddings")
    written = WRITE(FLAVORS[flavor])
    return {name: written[name] for name in names}


@pytest.mark.parametrize("flavor", ["1-7B", "2-9B", "3-12B"])
def test_missing_keys_have_transformers_defaults(
    flavor: str, caplog: pytest.LogCaptureFixture
) -> None:
    document = required(flavor)
    theirs = transformers.AutoConfig.for_model(**document).to_dict()
    assert len(theirs) > 2 * len(document)
    assert READ(document) == READ(theirs)
    assert not caplog.records


def test_published_gemma_2(assets: Path, caplog: pytest.LogCaptureFixture) -> None:
    published = assets / "hf-configs/google--gemma-2-2b-it_config.json"
    assert READ(json.loads(published.read_text())) == FLAVORS["2-2B"]
    assert not caplog.records


def changed(document: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """Return `document` with other keys; ... leaves one out."""
    return {key: value for key, value in {**document, **change}.items() if value is not ...}


OLD_GEMMA3: dict[str, Any] = {
    "layer_types": ...,
    "rope_parameters": ...,
    "rope_theta": 1_000_000,
    "rope_local_base_freq": 10_000,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window_pattern": 6,
}
"""Changes to the files of Gemma 3 in transformers 4."""


@pytest.mark.parametrize(
    ("flavor", "change"),
    [
        ("1-2B", {"hidden_act": "gelu", "hidden_activation": None}),
        ("1-2B", {"hidden_act": "gelu", "hidden_activation": ...}),
        ("1-2B", {"use_bidirectional_attention": None}),
        ("2-2B", {"layer_types": ...}),
        ("2-2B", {"layer_types": None}),
        ("2-2B", {"hidden_act": ...}),
        ("3-1B", {**OLD_GEMMA3, "rope_scaling": None}),
        (
            "3-1B",
            {**OLD_GEMMA3, "rope_scaling": ..., "rope_theta": ..., "rope_local_base_freq": ...},
        ),
        ("3-270M", {"_sliding_window_pattern": 6, "use_bidirectional_attention": False}),
        ("3-4B", OLD_GEMMA3),
        ("3-4B", {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}}),
        # The files of 4B omit these three keys.
        (
            "3-4B",
            {
                **OLD_GEMMA3,
                "num_attention_heads": ...,
                "vocab_size": ...,
                "max_position_embeddings": ...,
            },
        ),
    ],
)
def test_spellings_of_published_files(
    flavor: str, change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """They mean the same model, here and in transformers, and nothing is logged."""
    document = changed(WRITE(FLAVORS[flavor]), change)
    assert READ(document) == FLAVORS[flavor]
    assert not caplog.records
    assert READ(transformers.AutoConfig.for_model(**document).to_dict()) == FLAVORS[flavor]


def test_pattern_of_windows_is_read() -> None:
    document = changed(
        WRITE(FLAVORS["3-1B"]), {**OLD_GEMMA3, "rope_scaling": None, "sliding_window_pattern": 4}
    )
    theirs = transformers.AutoConfig.for_model(**document)
    config = READ(document)
    assert [config.has_window(index) for index in range(config.n_layers)] == [
        kind == "sliding_attention" for kind in theirs.layer_types
    ]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("flavor", "change", "message"),
    [
        ("1-2B", {"hidden_act": "silu"}, "hidden_act is 'silu'"),
        ("1-2B", {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
        ("1-2B", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ("1-2B", {"layer_types": ["full_attention"] * 18}, "layer_types is "),
        ("1-2B", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("2-2B", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("2-2B", {"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
        ("2-2B", {"sliding_window": None}, "sliding_window is None"),
        ("2-2B", {"layer_types": ["linear_attention"] * 26}, "layer_types is "),
        ("2-2B", {"query_pre_attn_scalar": 2.5}, "query_pre_attn_scalar is 2.5"),
        ("2-2B", {"attn_logit_softcapping": 0}, "attn_logit_softcapping is 0"),
        ("2-2B", {"final_logit_softcapping": "30"}, "final_logit_softcapping is '30'"),
        ("3-4B", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("3-4B", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ("3-4B", {"layer_types": ..., "sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        ("3-4B", {"num_hidden_layers": "34"}, "num_hidden_layers is '34'"),
        (
            "3-4B",
            {"num_hidden_layers": 2**31, "layer_types": ..., "sliding_window_pattern": 2},
            "n_layers is 2147483648",
        ),
        (
            "3-4B",
            {"rope_parameters": {"rope_type": "default"}},
            "rope_parameters has 'rope_type': 'default', .* full_attention and sliding_attention",
        ),
        ("3-4B", {"rope_parameters": {**ROPES, "sliding_attention": 3}}, "sliding_attention is 3"),
        (
            "3-4B",
            {"rope_parameters": {**ROPES, "sliding_attention": {"rope_type": "x"}}},
            "RoPE of type 'x'",
        ),
        (
            "3-4B",
            {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
            "rope_scaling .*4.0.* and rope_parameters .*8.0",
        ),
        ("3-4B", {"rope_scaling": 8}, "rope_scaling is 8"),
        (
            "3-4B",
            {"rope_parameters": ..., "rope_scaling": {"type": "linear", "factor": 8.0}},
            "rename .* to rope_type",
        ),
        ("3-4B", {"rope_parameters": ..., "rope_local_base_freq": None}, "rope_theta is None"),
        (
            "3-4B",
            {"model_type": "gemma4"},
            "model_type is 'gemma4', and this family is gemma or gemma2 or gemma3_text",
        ),
    ],
)
def test_unsupported_values_are_refused(flavor: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        READ(changed(WRITE(FLAVORS[flavor]), change))
    assert "\n" not in str(raised.value)


PUBLISHED_12B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255_999,
    "eoi_token_index": 256_000,
    "eos_token_id": [1, 106],
    "image_token_index": 262_144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "model_type": "gemma3_text",
        "num_attention_heads": 16,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
"""google/gemma-3-12b-pt."""


def test_published_file_of_a_model_with_vision(caplog: pytest.LogCaptureFixture) -> None:
    assert READ(PUBLISHED_12B) == FLAVORS["3-12B"]
    assert caplog.messages == [
        "config.json: only the language model is trained and exported, without the model's vision"
    ]
    assert READ({**PUBLISHED_12B, "hidden_size": 3840, "image_newline": None}) == FLAVORS["3-12B"]
    for key, value in {"hidden_size": 9, "logit_scale": 0.5, "rope_theta": 1e4}.items():
        with pytest.raises(UserError, match=f"config.json: {key} is {value} next to text_config"):
            READ({**PUBLISHED_12B, key: value})


@pytest.mark.parametrize(
    ("flavor", "change", "message"),
    [
        ("2-2B", {"attn_logit_softcapping": -1.0}, "--model.attn_logit_softcapping is -1.0"),
        ("2-2B", {"query_pre_attn_scalar": 0}, "--model.query_pre_attn_scalar is 0"),
        ("3-1B", {"local_rope": RoPEConfig(theta=0.0)}, "theta is 0.0"),
    ],
)
def test_unusable_options_are_refused(flavor: str, change: dict[str, Any], message: str) -> None:
    config = model_registry(flavor).model
    for name, value in change.items():
        setattr(config, name, value)
    with pytest.raises(UserError, match=message):
        config.validate()


@pytest.mark.parametrize(
    ("flavor", "change"),
    [("1-2B", {"sliding_window": 8}), ("3-1B", {"attn_logit_softcapping": 50.0})],
)
def test_models_unknown_to_transformers_are_not_written(
    flavor: str, change: dict[str, Any]
) -> None:
    config = model_registry(flavor).model
    for name, value in change.items():
        setattr(config, name, value)
    with pytest.raises(UserError, match="no model_type of config.json"):
        WRITE(config)


# --- files and runs
# --------------------------------------------------------------------------------------------------


@pytest.fixture(params=TYPES)
def pretrained(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A tiny model, saved by transformers with the embedded tokenizer and a custom chat
    template."""
    options = {"vocab_size": 2048, "max_position_embeddings": 2048, "tie_word_embeddings": True}
    reference = random_reference(request.param, 0, **{**DISTINCT[request.param], **options})
    return save_with_tokenizer(reference, tmp_path / "hf")


@pytest.mark.slow
def test_adapters_for_a_hugging_face_folder(
    tmp_path: Path, pretrained: Path, chat_file: Path
) -> None:
    assert_adapters_open_in_peft("gemma", pretrained, chat_file, tmp_path / "run")


def test_conversion_round_trip(tmp_path: Path, pretrained: Path) -> None:
    assert_conversion_round_trip(pretrained, tmp_path)


def test_language_model_of_a_model_with_vision(tmp_path: Path) -> None:
    """Vision tensors are skipped, under the names of transformers 4 and 5; logits are equal."""
    reference = random_reference(
        "gemma3_text", 0, **{**DISTINCT["gemma3_text"], "tie_word_embeddings": True}
    )
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    vision |= {"image_size": 28, "patch_size": 14}
    options = {
        "text_config": reference.config.to_dict(),
        "vision_config": vision,
        "mm_tokens_per_image": 4,
    }
    config = transformers.AutoConfig.for_model("gemma3", **options)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    model.model.language_model.load_state_dict(reference.model.state_dict())
    model.save_pretrained(tmp_path)
    file, tokens = tmp_path / "model.safetensors", random_tokens(97, 50)[0]
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}
    plain = {
        name.replace("language_model.model.", "language_model."): tensor
        for name, tensor in tensors.items()
    }
    assert {name.partition(".")[0] for name in plain} == {
        "language_model",
        "vision_tower",
        "multi_modal_projector",
    }
    old = {
        re.sub("^language_model.", "language_model.model.", name): tensor
        for name, tensor in plain.items()
    }
    for named in ({f"model.{name}": tensor for name, tensor in plain.items()}, old):
        save_file(named, file, metadata={"format": "pt"})
        with torch.no_grad():
            logits, expected = (
                load_model(tmp_path, device="cpu").model(tokens),
                reference(tokens).logits,
            )
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)  # float32 rounding
