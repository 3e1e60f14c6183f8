"""Qwen3 against transformers' Qwen3ForCausalLM, in its own files and ours; its sizes against the
published ones."""

import json
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.family_runs import (
    assert_adapters_open_in_peft,
    assert_conversion_round_trip,
    save_with_tokenizer,
)
from tests.models.test_sft_configs import chat_file
from torchtitan.components.generation import generate
from torchtitan.distributed import initialize_weights
from torchtitan.models.common.rope import RoPEConfig, apply_rope
from torchtitan.models.qwen3 import FLAVORS, FORMATS, model_registry
from torchtitan.models.qwen3.model import Qwen3Model
from torchtitan.tools.errors import UserError

__all__ = ["chat_file"]  # a fixture

transformers = pytest.importorskip("transformers")
ROPE_INIT_FUNCTIONS = pytest.importorskip("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS

SIZES = {
    "vocab_size": 97,
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "ffn_dim": 48,
    "max_seq_len": 256,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 8}
VARIANTS: dict[str, dict[str, Any]] = {
    "wide heads": {"head_dim": 16},
    "tied": {"tie_embeddings": True},
    "scaled RoPE": {
        "head_dim": 16,
        "rope": RoPEConfig(theta=1e4, scaling="linear", scaling_factor=2.0),
    },
}


def small_model(**options: Any) -> Qwen3Model:
    """Return a model with far from uniform attention, and weights of norms other than 1."""
    model: Qwen3Model = Qwen3Model.Config(
        **{"rope": RoPEConfig(theta=1e4), **SIZES, **options}
    ).build()
    initialize_weights(model, seed=1)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 2.0)
    return model


def reference_of(model: Qwen3Model) -> tuple[Any, dict[str, str]]:
    """Return transformers' model of our config.json with the same weights, and our names → its
    names."""
    written = FORMATS["hf"].to_external(model.config)
    reference = transformers.Qwen3ForCausalLM(transformers.Qwen3Config.from_dict(written))
    adapter = FORMATS["hf"].adapter(model.config)
    names = dict(zip(adapter.internal_names, adapter.external_names, strict=True))
    state = {names[name]: tensor for name, tensor in model.state_dict().items()}
    missing, unexpected = reference.load_state_dict(state, strict=False)
    assert set(missing) <= set(adapter.tied) and not unexpected
    return reference, names


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_all_gradients_equal_transformers(variant: str) -> None:
    model = small_model(**VARIANTS[variant])
    reference, names = reference_of(model)
    tokens, labels = torch.randint(97, (2, 48)), torch.randint(97, (2, 48))
    logits, expected = model(tokens), reference(tokens).logits
    # 1e-5 of the largest: float32 sums in another order.
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
    for output in (logits, expected):
        torch.nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten()).backward()
    theirs = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        gradient = theirs[names[name]].grad
        torch.testing.assert_close(
            parameter.grad, gradient, rtol=1e-5, atol=1e-5 * gradient.abs().max().item()
        )


def _after_rope(q: Tensor, k: Tensor, rope: Any, q_norm: Any, k_norm: Any) -> tuple[Tensor, Tensor]:
    return q_norm(apply_rope(q, rope)), k_norm(apply_rope(k, rope))


def _over_all_heads(
    q: Tensor, k: Tensor, rope: Any, q_norm: Any, k_norm: Any
) -> tuple[Tensor, Tensor]:
    def normalized(x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean((-2, -1), keepdim=True) + 1e-6).rsqrt() * weight

    return apply_rope(normalized(q, q_norm.weight), rope), apply_rope(
        normalized(k, k_norm.weight), rope
    )


def _exchanged(q: Tensor, k: Tensor, rope: Any, q_norm: Any, k_norm: Any) -> tuple[Tensor, Tensor]:
    return apply_rope(k_norm(q), rope), apply_rope(q_norm(k), rope)


def _of_queries_alone(
    q: Tensor, k: Tensor, rope: Any, q_norm: Any, k_norm: Any
) -> tuple[Tensor, Tensor]:
    return apply_rope(q_norm(q), rope), apply_rope(k, rope)


@pytest.mark.parametrize("mistake", [_after_rope, _over_all_heads, _exchanged, _of_queries_alone])
def test_misplaced_norm_is_caught(mistake: Callable[..., tuple[Tensor, Tensor]]) -> None:
    def forward(self: Any, x: Tensor, rope: Any, mask: Any) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim))
            for projection in (self.wq, self.wk, self.wv)
        )
        return self.wo(
            self.attend(*mistake(q, k, rope, self.q_norm, self.k_norm), v, mask).flatten(-2)
        )

    model = small_model()
    reference, _ = reference_of(model)
    for layer in model.layers.values():
        layer.attention.forward = MethodType(forward, layer.attention)
    tokens = torch.randint(97, (1, 48))
    with torch.no_grad():
        difference = (model(tokens) - reference(tokens).logits).abs().max()
    assert difference > 1e-3  # a hundred times the tolerance above


def test_cached_generation_equals_transformers() -> None:
    model = small_model(head_dim=16)
    reference, _ = reference_of(model)
    prompt = [5, 17, 3]
    (generation,) = generate(model, [prompt], max_new_tokens=20)
    expected = reference.generate(
        torch.tensor([prompt]),
        max_new_tokens=20,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert [*prompt, *generation.ids] == expected[0].tolist()


# --- sizes and config.json
# --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flavor", "parameters"),
    # From the files of the published models, without the second copy of a tied matrix.
    [
        ("0.6B", 596_049_920),
        ("1.7B", 1_720_574_976),
        ("4B", 4_022_468_096),
        ("8B", 8_190_735_360),
        ("14B", 14_768_307_200),
        ("32B", 32_762_123_264),
    ],
)
def test_published_sizes(flavor: str, parameters: int, assets: Path) -> None:
    with torch.device("meta"):
        assert model_registry(flavor).model.build().num_parameters() == parameters
    read, write = FORMATS["hf"].from_external, FORMATS["hf"].to_external
    assert read(write(FLAVORS[flavor])) == FLAVORS[flavor]
    published = assets / "hf-configs" / f"Qwen--Qwen3-{flavor}_config.json"
    if flavor in ("0.6B", "8B"):
        assert read(json.loads(published.read_text())) == FLAVORS[flavor]


def test_a_file_may_say_what_the_class_always_does() -> None:
    document = {**FORMATS["hf"].to_external(FLAVORS["8B"]), "use_qk_norm": True}
    assert FORMATS["hf"].from_external(document) == FLAVORS["8B"]


def test_missing_keys_have_transformers_defaults() -> None:
    names = (
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "tie_word_embeddings",
        "rope_theta",
        "rope_scaling",
    )
    document = {
        key: value
        for key, value in FORMATS["hf"].to_external(FLAVORS["8B"]).items()
        if key not in names
    }
    config, theirs = (
        FORMATS["hf"].from_external(document),
        transformers.Qwen3Config.from_dict(document),
    )
    assert (config.n_kv_heads, config.resolved_head_dim) == (
        theirs.num_key_value_heads,
        theirs.head_dim,
    )
    assert (config.norm_eps, config.tie_embeddings) == (
        theirs.rms_norm_eps,
        theirs.tie_word_embeddings,
    )
    assert config.rope.theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types is .* use_sliding_window is not true",
        ),
        (
            {**WINDOW, "layer_types": ["full_attention", "sliding_attention"]},
            "list with .* 36 items",
        ),
        ({**WINDOW, "layer_types": 2}, "layer_types is 2"),
        ({**WINDOW, "layer_types": ["linear_attention"] * 36}, "layer_types is .*one of"),
        ({**WINDOW, "layer_types": None, "max_window_layers": "0"}, "max_window_layers is '0'"),
        (
            {**WINDOW, "layer_types": None, "num_hidden_layers": 2**31},
            "num_hidden_layers is 2147483648, .* at most 2000",
        ),
        ({"use_sliding_window": "yes"}, "use_sliding_window is 'yes'"),
        ({"use_qk_norm": False}, r"use_qk_norm is False, .* \(only True\)"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": 0}}, "truncate is 0"),
        ({"rope_scaling": {"rope_type": "mrope", "mrope_section": [1, 2]}}, "RoPE of type 'mrope'"),
        ({"model_type": "qwen3_moe"}, "model_type is 'qwen3_moe', and this family is qwen3"),
    ],
)
def test_unsupported_models_are_rejected_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        FORMATS["hf"].from_external({**FORMATS["hf"].to_external(FLAVORS["8B"]), **change})


def test_config_json_of_transformers_is_read_without_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Keys as in version 5, and a sliding window that is disabled."""
    config = small_model(head_dim=16).config
    written = transformers.Qwen3Config.from_dict(FORMATS["hf"].to_external(config)).to_diff_dict()
    assert (
        FORMATS["hf"].from_external({**written, "sliding_window": 8, "max_window_layers": 1})
        == config
    )
    assert not caplog.records


def test_a_factor_that_transformers_ignores_is_ignored_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`attn_factor`, as in DeepSeek-R1-0528-Qwen3-8B; transformers' own key counts."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    document = FORMATS["hf"].to_external(FLAVORS["8B"])
    expected = FORMATS["hf"].from_external({**document, "rope_scaling": yarn})
    unsaid = {**document, "rope_scaling": {**yarn, "attn_factor": None}}
    assert FORMATS["hf"].from_external(unsaid) == expected
    assert "attn_factor" not in caplog.text
    said = {**document, "rope_scaling": {**yarn, "attn_factor": 0.8782}}
    assert FORMATS["hf"].from_external(said) == expected
    assert "ignoring RoPE's attn_factor 0.8782" in caplog.text
    config = transformers.Qwen3Config.from_dict(said)
    (_, theirs), (_, plain) = (
        ROPE_INIT_FUNCTIONS["yarn"](each, "cpu")
        for each in (config, transformers.Qwen3Config.from_dict({**document, "rope_scaling": yarn}))
    )
    assert theirs == plain
    said["rope_scaling"]["attention_factor"] = 0.5
    assert FORMATS["hf"].from_external(said).rope.attention_factor == 0.5


# --- files and runs
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def pretrained(tmp_path: Path) -> Path:
    """Tiny Qwen3, saved by transformers with the embedded tokenizer and a custom chat template."""
    reference, _ = reference_of(small_model(vocab_size=2048, head_dim=16, max_seq_len=2048))
    return save_with_tokenizer(reference, tmp_path / "hf")


@pytest.mark.slow
def test_adapters_for_a_hugging_face_folder(
    tmp_path: Path, pretrained: Path, chat_file: Path
) -> None:
    assert_adapters_open_in_peft("qwen3", pretrained, chat_file, tmp_path / "run")


def test_conversion_round_trip(tmp_path: Path, pretrained: Path) -> None:
    assert_conversion_round_trip(pretrained, tmp_path)
