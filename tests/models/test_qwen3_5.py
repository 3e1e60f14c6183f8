"""Qwen3.5: mistakes are caught; published sizes, config.json, files of models with vision, and
adapters."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models.family_cases import (
    family_of,
    random_reference,
    random_tokens,
    relative_error,
    to_ours,
)
from tests.models.family_runs import assert_documents_are_apart
from tests.models.test_sft_configs import CHATS, SHORT, chat_file, loss_of_transformers, run_named
from tests.training import read_metrics
from torchtitan.cli.main import main
from torchtitan.components.peft import LoRA
from torchtitan.components.tokenizer import EMBEDDED_TOKENIZER
from torchtitan.models.common.delta_net import GatedDeltaNet
from torchtitan.models.common.norms import OffsetRMSNorm, RMSNorm
from torchtitan.models.pretrained import load_model
from torchtitan.models.qwen3_5 import FLAVORS, FORMATS, model_registry
from torchtitan.models.qwen3_5.config_registry import qwen3_5_debugmodel
from torchtitan.tools.errors import UserError

__all__ = ["chat_file"]  # a fixture

transformers = pytest.importorskip("transformers")

READ, WRITE = FORMATS["hf"].from_external, FORMATS["hf"].to_external

MIXED = {"num_hidden_layers": 4, "layer_types": ("linear_attention", "full_attention")}

PUBLISHED_4B: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "image_token_id": 248056,
    "model_type": "qwen3_5",
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2560,
        "initializer_range": 0.02,
        "intermediate_size": 9216,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 8,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 16,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": 248320,
    },
    "tie_word_embeddings": True,
    "vision_config": {"depth": 24},
}
"""In the spelling of published files."""


# --- mistakes
# --------------------------------------------------------------------------------------------------


def _norm_without_offset(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, OffsetRMSNorm):
            module.forward = lambda x, own=module: F.rms_norm(
                x, own.weight.shape, own.weight, own.eps
            )


def _delta_norm_with_offset(model: Any) -> None:
    for layer in model.layers.values():
        if isinstance(layer.attention, GatedDeltaNet):
            layer.attention.norm.weight.add_(1)


def _attention(change: Callable[..., Tensor]) -> Callable[[Any], None]:
    """Return a mistake in the outputs of attention, which `change` returns from queries, gates and
    values."""

    def mistake(model: Any) -> None:
        def forward(self: Any, x: Tensor, rope: Any, attention: Any) -> Tensor:
            inner = self.attend.forward

            def attend(q: Tensor, k: Tensor, v: Tensor, metadata: Any) -> Tensor:
                _, gate = self.wq(x).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
                return change(inner(q, k, v, metadata), gate)

            self.attend.forward = attend
            return type(self).forward(self, x, rope, attention)

        for layer in model.layers.values():
            if not isinstance(layer.attention, GatedDeltaNet):
                layer.attention.forward = MethodType(forward, layer.attention)

    return mistake


def _queries_and_gates_apart(model: Any) -> None:
    """The first half of the rows for queries, the second for gates, instead of alternating
    heads."""
    for layer in model.layers.values():
        if not isinstance(layer.attention, GatedDeltaNet):
            for parameter in layer.attention.wq.parameters():
                heads = parameter.unflatten(0, (2, -1, layer.attention.head_dim))
                parameter.copy_(heads.transpose(0, 1).flatten(0, 2))


def _all_rotated(model: Any) -> None:
    model.config.rope.rotated_fraction = 1.0


def _wrong_base(model: Any) -> None:
    model.config.rope.theta *= 2


def _exchanged_queries_and_keys(model: Any) -> None:
    for layer in model.layers.values():
        if isinstance(layer.attention, GatedDeltaNet):
            net = layer.attention
            net.in_q, net.in_k = net.in_k, net.in_q
            net.conv_q, net.conv_k = net.conv_k, net.conv_q


def _exchanged_decay_and_beta(model: Any) -> None:
    for layer in model.layers.values():
        if isinstance(layer.attention, GatedDeltaNet):
            net = layer.attention
            net.in_a, net.in_b = net.in_b, net.in_a


@pytest.mark.parametrize(
    "mistake",
    [
        _norm_without_offset,
        _delta_norm_with_offset,
        pytest.param(_attention(lambda out, gate: out / torch.sigmoid(gate)), id="no gate"),
        pytest.param(
            _attention(lambda out, gate: out / torch.sigmoid(gate) * F.silu(gate)), id="silu gate"
        ),
        _queries_and_gates_apart,
        _all_rotated,
        _wrong_base,
        _exchanged_queries_and_keys,
        _exchanged_decay_and_beta,
    ],
)
def test_mistake_is_caught(mistake: Callable[[Any], None]) -> None:
    reference = random_reference(
        "qwen3_5_text",
        0,
        **MIXED,
        partial_rotary_factor=0.25,
        rope_parameters={"rope_type": "default", "rope_theta": 10.0},
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )
    model, _ = to_ours(family_of("qwen3_5_text"), reference)
    tokens, _ = random_tokens(97, 50)
    with torch.no_grad():
        expected = reference(tokens).logits
        assert relative_error(model(tokens), expected) < 1e-5
        mistake(model)
        assert (model(tokens) - expected).abs().max() > 1e-3


def test_packed_documents_equal_documents_alone() -> None:
    """Logits and gradients, in attention and in delta nets."""
    model, _ = to_ours(family_of("qwen3_5_text"), random_reference("qwen3_5_text", 2, **MIXED))
    assert_documents_are_apart(model)


# --- sizes and config.json
# --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flavor", "billions"), [("0.8B", 0.75), ("2B", 1.88), ("4B", 4.2), ("9B", 8.95), ("27B", 26.9)]
)
def test_published_sizes(flavor: str, billions: float) -> None:
    """Without vision and further predicted tokens; the same number in transformers."""
    with torch.device("meta"):
        parameters = model_registry(flavor).model.build().num_parameters()
        config = transformers.Qwen3_5TextConfig.from_dict(WRITE(FLAVORS[flavor]))
        assert transformers.Qwen3_5ForCausalLM(config).num_parameters() == parameters
    assert parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert READ(WRITE(FLAVORS[flavor])) == FLAVORS[flavor]


def test_defaults_of_transformers_are_a_published_size() -> None:
    config = READ(transformers.Qwen3_5TextConfig().to_dict())
    assert (config.max_seq_len, config.rope.theta) == (32768, 1e4)
    config.max_seq_len, config.rope.theta = FLAVORS["9B"].max_seq_len, FLAVORS["9B"].rope.theta
    assert config == FLAVORS["9B"]


@pytest.mark.parametrize("whole", [True, False])
def test_published_file_equals_flavor(whole: bool, caplog: pytest.LogCaptureFixture) -> None:
    published = {**PUBLISHED_4B, "language_model_only": False}  # as Qwen3.6's
    assert READ(published if whole else PUBLISHED_4B["text_config"]) == FLAVORS["4B"]
    warnings = [record.getMessage() for record in caplog.records]
    assert (
        all("without the model's vision" in warning for warning in warnings)
        and len(warnings) == whole
    )


def test_missing_keys_have_transformers_defaults() -> None:
    required = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
    )
    document = {
        key: PUBLISHED_4B["text_config"][key]
        for key in (*required, "max_position_embeddings", "model_type")
    }
    config, theirs = READ(document), transformers.Qwen3_5TextConfig.from_dict(document)
    assert config == READ(theirs.to_dict())
    assert config.rope.rotated_fraction == theirs.rope_parameters["partial_rotary_factor"] == 0.25


@pytest.mark.parametrize("interval", [1, 2, 3, 4, 9])
def test_interval_of_attention_is_that_of_transformers(interval: int) -> None:
    document = {
        **PUBLISHED_4B["text_config"],
        "full_attention_interval": interval,
        "layer_types": None,
    }
    theirs = transformers.Qwen3_5TextConfig.from_dict(document)
    assert READ(document) == READ(theirs.to_dict())


def test_coordinates_of_images_have_no_effect_on_text() -> None:
    rope = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    }
    reference = random_reference("qwen3_5_text", 1, **MIXED, rope_parameters=rope)
    model, _ = to_ours(family_of("qwen3_5_text"), reference)
    tokens, _ = random_tokens(97, 50)
    assert relative_error(model(tokens), reference(tokens).logits) < 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"full_attention_interval": 2}, "full_attention_interval 2 contradicts layer_types"),
        ({"full_attention_interval": 0}, "full_attention_interval is 0"),
        (
            {"layer_types": ["sliding_attention"] * 32, "full_attention_interval": 4},
            "contradicts layer_types",
        ),
        ({"layer_types": ["full_attention"] * 3}, "layer_types is .* 32 items"),
        ({"layer_types": ["mamba"] * 32}, "layer_types is"),
        ({"num_hidden_layers": 2**31, "layer_types": None}, "n_layers is 2147483648"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers is '32'"),
        ({"attn_output_gate": False}, "attn_output_gate is False"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (
            {"linear_num_key_heads": 24},
            "linear_num_key_heads is 24, but must be a divisor of .* 32",
        ),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim is 0"),
        ({"linear_value_head_dim": 2**20}, "linear_value_head_dim is 1048576"),
        ({"num_experts": 64}, "num_experts is 64"),
        ({"rope_parameters": {"rope_type": "mrope"}}, "RoPE of type 'mrope'"),
        ({"rope_parameters": [1]}, "rope_parameters is .*an object"),
        ({"partial_rotary_factor": 0.001, "rope_parameters": None}, "rotated_fraction is 0.001"),
        ({"model_type": "qwen3_next"}, "model_type is 'qwen3_next'"),
    ],
)
def test_unsupported_models_are_rejected_by_name(change: dict[str, Any], message: str) -> None:
    document = {
        key: value
        for key, value in PUBLISHED_4B["text_config"].items()
        if key != "full_attention_interval"
    }
    with pytest.raises(UserError, match=message) as caught:
        READ({**document, **change})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_config": None}, "num_hidden_layers is missing"),
        ({"text_config": "x"}, "text_config is 'x'"),
        (
            {"text_config": {"model_type": "qwen3_5_moe_text"}},
            "model_type is 'qwen3_5_moe_text' in text_config",
        ),
        (
            {"tie_word_embeddings": False},
            "tie_word_embeddings is True in text_config, but must be False",
        ),
    ],
)
def test_unsupported_models_with_vision_are_rejected_by_name(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        READ({**PUBLISHED_4B, **change})


def test_tie_outside_of_the_text_holds() -> None:
    text = {
        key: value
        for key, value in PUBLISHED_4B["text_config"].items()
        if key != "tie_word_embeddings"
    }
    assert READ({**PUBLISHED_4B, "text_config": text}).tie_embeddings


def test_flops() -> None:
    """Besides the parameters: the products of attention in one layer of four, and of three
    states."""
    config = FLAVORS["4B"]
    with torch.device("meta"):
        model: Any = config.build()
    # the tied matrix multiplies once
    parameters = sum(parameter.numel() for parameter in model.parameters())
    attention, states = 4 * 16 * 256 * 1000, 3 * 2 * 32 * 128 * 128
    assert model.flops_per_token(1000) == 6 * parameters + 3 * (8 * attention + 24 * states)


# --- files
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_language_model_of_a_model_with_vision(tmp_path: Path, tied: bool) -> None:
    """Tensors of vision and of further predicted tokens are skipped. The export has only the
    language model."""
    from safetensors.torch import load_file, save_file

    text = random_reference(
        "qwen3_5_text", 3, **MIXED, vocab_size=2048, tie_word_embeddings=tied
    ).config
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "num_heads": 2,
        "intermediate_size": 16,
        "num_position_embeddings": 4,
    }
    config = transformers.Qwen3_5Config(
        text_config=text.to_dict(),
        vision_config={**vision, "patch_size": 4, "out_hidden_size": text.hidden_size},
        tie_word_embeddings=tied,
    )
    reference = transformers.Qwen3_5ForConditionalGeneration(config).eval()
    folder = tmp_path / "whole"
    reference.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(EMBEDDED_TOKENIZER).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {**tensors, "mtp.norm.weight": torch.zeros(3)},
        folder / "model.safetensors",
        {"format": "pt"},
    )

    tokens, _ = random_tokens(2048, 50)
    with torch.no_grad():
        expected = reference(tokens).logits
        assert relative_error(load_model(folder, device="cpu").model(tokens), expected) < 1e-5
        assert main(["convert", "--to", "dcp", str(folder), str(tmp_path / "dcp")]) == 0
        assert main(["convert", "--to", "hf", str(tmp_path / "dcp"), str(tmp_path / "text")]) == 0
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text")
        assert again.config.model_type == "qwen3_5_text"
        assert torch.equal(again(tokens).logits, expected)

    twice = {"model.norm.weight": tensors["model.language_model.norm.weight"].clone(), **tensors}
    save_file(twice, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        UserError, match=r"model\.norm\.weight twice: .*model\.language_model\.norm\.weight"
    ):
        load_model(folder, device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize("dora", [False, True])
def test_adapters_for_a_hugging_face_folder(tmp_path: Path, chat_file: Path, dora: bool) -> None:
    """Of all projections, also in delta nets and for gates. peft opens the adapter on its base
    model, and a run continues from it."""
    from peft import PeftModel

    base = tmp_path / "hf"
    reference = random_reference(
        "qwen3_5_text",
        3,
        **MIXED,
        vocab_size=2048,
        tie_word_embeddings=False,
        linear_num_value_heads=4,
        max_position_embeddings=2048,
    )
    reference.generation_config.eos_token_id = 1
    reference.save_pretrained(base)
    tokenizer = transformers.AutoTokenizer.from_pretrained(EMBEDDED_TOKENIZER)
    tokenizer.chat_template = (
        "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}"
    )
    tokenizer.save_pretrained(base)
    options: dict[str, Any] = {
        "module": "auto",
        "hf_assets_path": base,
        "dataloader__dataset": [chat_file],
        "training__seq_len": 128,
        "optimizer__lr": 1e-3,
        "model_converters__lora__rank": 4,
        "model_converters__lora__dora": dora,
    }
    trainer = run_named("lora", tmp_path / "run", **options, **{**SHORT, "training__epochs": 1})
    assert trainer.config.model_spec.name == "qwen3_5"
    folder = tmp_path / "run/checkpoint" / f"step-{trainer.step}"
    assert loss_of_transformers(folder, CHATS) < loss_of_transformers(base, CHATS)
    adapted = json.loads((folder / "adapter/adapter_config.json").read_text())["target_modules"]
    assert all(
        any(name in target for target in adapted)
        for name in ("in_proj_qkv", "in_proj_b", "out_proj", "q_proj")
    )
    merged, plain = (
        transformers.AutoModelForCausalLM.from_pretrained(path) for path in (folder, base)
    )
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        expected = merged(tokens).logits
        logits = PeftModel.from_pretrained(plain, folder / "adapter")(tokens).logits
    # Relative to the largest: products of small matrices, summed in another order in float32.
    assert relative_error(logits, expected) < 1e-4
    run_named(
        "lora",
        tmp_path / "again",
        **options,
        **{
            **SHORT,
            "training__epochs": 1,
            "model_converters__lora__adapter_path": folder / "adapter",
        },
    )
    (_, loss), (_, continued) = (
        read_metrics(tmp_path / name, "loss")[0] for name in ("run", "again")
    )
    assert continued < loss


def test_norms_of_delta_nets_have_no_offset() -> None:
    with torch.device("meta"):
        model: Any = FLAVORS["4B"].build()
    assert isinstance(model.layers["0"].attention.norm, RMSNorm)
    assert isinstance(model.layers["3"].attention.q_norm, OffsetRMSNorm)


def test_converters_without_attention_layers() -> None:
    """The sharding plan's entries for attention are for parts that delta nets set to None."""
    config = qwen3_5_debugmodel()
    config.model_spec.model = replace(
        config.model_spec.model, vocab_size=2048, layer_types=["linear_attention"]
    )
    config.model_converters = [LoRA.Config()]
    config.check_conversion()
    config.parallelism.tensor_parallel_degree = 2
    config.check_conversion()
