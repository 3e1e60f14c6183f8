"""Families with experts: mistakes are caught; published sizes, config.json, layouts of files,
training and adapters."""

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
from tests.models.family_runs import assert_adapters_open_in_peft, save_with_tokenizer
from tests.models.test_attention import metadata_of
from tests.models.test_sft_configs import chat_file
from tests.processes import run_processes
from tests.training import read_metrics, run, train
from torchtitan.components.optim.freeze import Freeze
from torchtitan.components.weights import open_source
from torchtitan.config.manager import ConfigManager
from torchtitan.dry_run import dry_run
from torchtitan.models import glm4_moe, gpt_oss, llama4, mixtral, qwen3_5, qwen3_moe
from torchtitan.models.common.attention import Attention
from torchtitan.models.common.moe.experts import RoutedExperts, swiglu
from torchtitan.models.pretrained import load_model
from torchtitan.protocols.state_dict_adapter import model_tensor_specs
from torchtitan.protocols.tensor_source import TensorSpec
from torchtitan.tools.errors import UserError
from torchtitan.trainer import Trainer

__all__ = ["chat_file"]  # a fixture

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

# --- mistakes
# --------------------------------------------------------------------------------------------------


def in_routers(change: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a mistake that `change` makes in each router."""

    def mistake(model: Any) -> None:
        for layer in model.layers.values():
            if layer.moe is not None:
                change(layer.moe.router)

    return mistake


def set_part(**parts: Any) -> Callable[[Any], None]:
    def change(router: Any) -> None:
        for name, part in parts.items():
            setattr(router, name, part)

    return in_routers(change)


def exchange_gate_and_up(model: Any) -> None:
    for layer in model.layers.values():
        experts = layer.moe.experts
        experts.w13.data = experts.w13.data.flip(1)


def without_shared(model: Any) -> None:
    for layer in model.layers.values():
        layer.moe.shared = None


def open_gate(model: Any) -> None:
    for layer in model.layers.values():
        layer.moe.shared.gate.data.zero_()


def without_bias(model: Any) -> None:
    in_routers(lambda router: router.selection.bias_E.zero_())(model)


def biased_weights(router: Any) -> None:
    # in place: the weights too
    router.selection.forward = lambda scores: scores.data.add_(router.selection.bias_E)


def all_groups(router: Any) -> None:
    router.choose = lambda scores: scores.topk(2, dim=-1).indices


def without_sinks(model: Any) -> None:
    for layer in model.layers.values():
        layer.attention.sinks.scores.data.fill_(-100.0)


def unclamped(model: Any) -> None:
    for layer in model.layers.values():
        layer.moe.experts.activation = swiglu


def without_expert_bias(model: Any) -> None:
    for layer in model.layers.values():
        layer.moe.experts.bias13.data.zero_()


def sliding_windows(model: Any) -> None:
    model.has_chunks = False


def constant_temperature(model: Any) -> None:
    for layer in model.layers.values():
        layer.attention.attend = Attention()


def without_norms(model: Any) -> None:
    for layer in model.layers.values():
        layer.attention.q_norm = layer.attention.k_norm = None


def scaled_results(model: Any) -> None:
    for layer in model.layers.values():
        layer.moe.experts.__class__ = RoutedExperts


QWEN3 = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
QWEN2 = {**QWEN3, "norm_topk_prob": False}
LLAMA4 = {
    **{
        "no_rope_layers": [1, 0],
        "moe_layers": [0, 1],
        "attention_chunk_size": 5,
        "num_experts_per_tok": 2,
    },
    **{"attn_temperature_tuning": True, "use_qk_norm": True},
}
GLM = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 0,
    "norm_topk_prob": True,
}


@pytest.mark.parametrize(
    ("model_type", "options", "mistake"),
    [
        ("qwen3_moe", QWEN3, set_part(is_normalized=False)),
        ("qwen3_moe", QWEN3, set_part(is_sigmoid=True)),
        ("qwen3_moe", QWEN3, exchange_gate_and_up),
        ("qwen2_moe", QWEN2, set_part(is_normalized=True)),
        ("qwen2_moe", QWEN2, without_shared),
        ("qwen2_moe", QWEN2, open_gate),
        ("mixtral", {}, set_part(is_normalized=False)),
        ("gpt_oss", {}, without_sinks),
        ("gpt_oss", {}, unclamped),
        ("gpt_oss", {}, without_expert_bias),
        ("gpt_oss", {}, in_routers(lambda router: router.bias.data.zero_())),
        ("llama4_text", LLAMA4, sliding_windows),
        ("llama4_text", LLAMA4, constant_temperature),
        ("llama4_text", LLAMA4, without_norms),
        ("llama4_text", LLAMA4, scaled_results),
        ("llama4_text", LLAMA4, without_shared),
        ("qwen3_5_moe_text", {}, set_part(is_normalized=False)),
        ("qwen3_5_moe_text", {}, open_gate),
        ("glm4_moe", GLM, set_part(is_sigmoid=False)),
        ("glm4_moe", GLM, set_part(scale=1.0)),
        ("glm4_moe", GLM, without_bias),
        ("glm4_moe", GLM, in_routers(biased_weights)),
        ("glm4_moe", GLM, in_routers(all_groups)),
        ("glm4_moe", GLM, without_shared),
    ],
)
def test_mistake_is_caught(
    model_type: str, options: dict[str, Any], mistake: Callable[[Any], None]
) -> None:
    if model_type.startswith("qwen"):
        options = {**options, "mlp_only_layers": []}
    reference = random_reference(model_type, 0, num_hidden_layers=2, **options)
    assert difference_with(lambda model: None, reference) < 1e-5
    assert difference_with(mistake, reference) > 1e-3


# --- sizes and config.json
# --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "flavor", "billions", "active"),
    # As stated by publishers that explain how they count; without layers that predict more tokens.
    [
        (gpt_oss, "20B", 20.9, None),
        (gpt_oss, "120B", 116.8, None),
        (llama4, "17B-16E", 107.8, 17.2),
        (llama4, "17B-128E", 400.7, 17.2),
        (qwen3_5, "35B-A3B", 34.7, None),
        (mixtral, "8x7B", 46.7, 12.9),
        (mixtral, "8x22B", 140.6, 39.1),
        (qwen3_moe, "30B-A3B", 30.5, 3.35),
        (qwen3_moe, "235B-A22B", 235.1, 22.2),
        (qwen3_moe, "Coder-480B-A35B", 480.2, 35.5),
        (qwen3_moe, "1.5-A2.7B", 14.3, 2.69),
        (qwen3_moe, "2-57B-A14B", 57.4, 14.2),
        (glm4_moe, "4.5-Air-106B", 106.9, None),
        (glm4_moe, "4.5-355B", 352.8, None),
    ],
)
def test_published_sizes(family: Any, flavor: str, billions: float, active: float | None) -> None:
    """All parameters and active ones, which determine the count of operations."""
    config, format = family.FLAVORS[flavor], family.FORMATS["hf"]
    with torch.device("meta"):
        model = family.model_registry(flavor).model.build()
    assert model.num_parameters() / 1e9 == pytest.approx(billions, rel=5e-3)
    scores = 3 * sum(model.score_flops(index, 1024) for index in range(config.n_layers))
    embedding = config.vocab_size * config.dim
    operations = model.flops_per_token(1024) - scores
    routed = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    idle = routed * (1 - config.moe.top_k / config.moe.n_experts)
    assert operations / 6 == pytest.approx(model.num_parameters() - idle - embedding, rel=1e-9)
    if active is not None:
        assert (operations / 6 + embedding) / 1e9 == pytest.approx(active, rel=0.01)
    assert format.from_external(format.to_external(config)) == config


def test_published_files_equal_flavors(assets: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, family, flavor in (
        ("Qwen--Qwen3-30B-A3B", qwen3_moe, "30B-A3B"),
        ("mistralai--Mixtral-8x7B-v0.1", mixtral, "8x7B"),
        ("openai--gpt-oss-20b", gpt_oss, "20B"),
    ):
        document = json.loads((assets / f"hf-configs/{name}_config.json").read_text())
        assert family.FORMATS["hf"].from_external(document) == family.FLAVORS[flavor]
    assert not caplog.records


@pytest.mark.parametrize(
    "model_type",
    ["mixtral", "qwen3_moe", "qwen2_moe", "gpt_oss", "llama4_text", "qwen3_5_moe_text"],
)
def test_missing_keys_have_transformers_defaults(model_type: str) -> None:
    read = family_of(model_type).FORMATS["hf"].from_external
    theirs = transformers.AutoConfig.for_model(model_type)
    required = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
    )
    keys = (*required, "max_position_embeddings", "model_type")
    document = {key: getattr(theirs, key) for key in keys if hasattr(theirs, key)}
    assert read(document) == read(theirs.to_dict())


@pytest.mark.parametrize(
    ("model_type", "change", "message"),
    [
        (
            "qwen3_moe",
            {"num_experts_per_tok": 129},
            "top_k is 129, but must be from 1 to --model.moe.n_experts 128",
        ),
        ("qwen3_moe", {"num_experts": 0}, "num_experts is 0"),
        ("qwen3_moe", {"use_qk_norm": False}, "use_qk_norm is False"),
        ("qwen2_moe", {"use_qk_norm": True}, "use_qk_norm is True"),
        ("qwen3_moe", {"num_experts": 2**30}, "n_experts is 1073741824"),
        ("qwen3_moe", {"moe_intermediate_size": "768"}, "moe_intermediate_size is '768'"),
        ("qwen3_moe", {"mlp_only_layers": [24]}, "mlp_only_layers is .*numbers of layers"),
        ("qwen3_moe", {"mlp_only_layers": 3}, "mlp_only_layers is 3"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob is 1"),
        (
            "qwen2_moe",
            {"use_sliding_window": True, "layer_types": None},
            "use_sliding_window is True",
        ),
        (
            "qwen2_moe",
            {"shared_expert_intermediate_size": 0},
            "shared_expert_intermediate_size is 0",
        ),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
        ("mixtral", {"num_local_experts": 1}, "top_k is 2"),
        ("gpt_oss", {"swiglu_limit": 6.0}, "swiglu_limit is 6.0"),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("gpt_oss", {"num_experts_per_tok": 129}, "top_k is 129"),
        ("llama4_text", {"no_rope_layers": [1, 0]}, "no_rope_layers is .* 48 items"),
        ("llama4_text", {"no_rope_layers": 3}, "no_rope_layers is 3"),
        ("llama4_text", {"moe_layers": [48]}, "moe_layers is .*numbers of layers"),
        (
            "llama4_text",
            {"layer_types": ["full_attention"] * 48},
            "layer_types is .*chunked_attention where",
        ),
        ("llama4_text", {"attention_chunk_size": 0}, "attention_chunk_size is 0"),
        ("llama4_text", {"attn_scale": -1.0}, "attn_scale is -1.0"),
        (
            "llama4_text",
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
            "rope.scaling is yarn, but with use_qk_norm",
        ),
        ("llama4_text", {"floor_scale": 0}, "floor_scale is 0"),
        ("llama4_text", {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
        (
            "qwen3_5_moe_text",
            {"shared_expert_intermediate_size": 0},
            "shared_expert_intermediate_size is 0",
        ),
        (
            "glm4_moe",
            {"n_group": 3},
            "n_group is 3, but must be a divisor of --model.moe.n_experts 128",
        ),
        ("glm4_moe", {"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
        ("glm4_moe", {"routed_scaling_factor": -1.0}, "routed_scaling_factor is -1.0"),
        ("glm4_moe", {"num_hidden_layers": 2**31}, "num_hidden_layers is 2147483648"),
    ],
)
def test_unsupported_models_are_rejected_by_name(
    model_type: str, change: dict[str, Any], message: str
) -> None:
    document = {**transformers.AutoConfig.for_model(model_type).to_dict(), "head_dim": 128}
    if "num_experts" in change:
        document.pop("num_local_experts", None)
    with pytest.raises(UserError, match=message) as caught:
        family_of(model_type).FORMATS["hf"].from_external({**document, **change})
    assert "\n" not in str(caught.value)


# --- files
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model_type", ["mixtral", "qwen3_moe", "qwen2_moe", "glm4_moe", "qwen3_5_moe_text"]
)
def test_files_with_an_experts_tensors_and_with_all_experts_open(
    model_type: str, tmp_path: Path
) -> None:
    """transformers writes a tensor for each expert; its class holds one for all experts of a
    layer."""
    options = GLM if model_type == "glm4_moe" else {}
    reference = random_reference(model_type, 1, num_hidden_layers=3, **options)
    each = save_with_tokenizer(reference, tmp_path / "each")
    fused = save_with_tokenizer(reference, tmp_path / "fused")
    tied = reference.config.tie_word_embeddings
    weights = {
        k: v.clone()
        for k, v in reference.state_dict().items()
        if not (tied and k.startswith("lm_head"))
    }
    safetensors.save_file(weights, fused / "model.safetensors", metadata={"format": "pt"})
    tokens, _ = random_tokens(97, 40)
    expected = reference(tokens).logits
    names = set(safetensors.load_file(each / "model.safetensors"))
    assert any(".experts.0." in name for name in names) and any(
        name.endswith("experts.gate_up_proj") for name in weights
    )
    for folder in (each, fused):
        assert relative_error(load_model(folder, device="cpu").model(tokens), expected) < 1e-5
    one = next(name for name in sorted(names) if ".experts.3." in name)
    rest = {
        name: tensor
        for name, tensor in safetensors.load_file(each / "model.safetensors").items()
        if name != one
    }
    safetensors.save_file(rest, each / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"missing from the checkpoint: {one}$"):
        load_model(each, device="cpu")


def test_mxfp4_experts_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    reference = random_reference("gpt_oss", 0, **sizes)
    folder = save_with_tokenizer(reference, tmp_path)
    tensors = safetensors.load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, weight in dict(reference.named_parameters()).items():
        if name.endswith(("gate_up_proj", "down_proj")):
            n_experts, n_in, n_out = weight.shape
            blocks = torch.randint(
                256, (n_experts, n_out, n_in // 32, 16), generator=generator, dtype=torch.uint8
            )
            scales = torch.randint(
                120, 128, blocks.shape[:3], generator=generator, dtype=torch.uint8
            )
            weight.data = transformers.integrations.mxfp4.convert_moe_packed_tensors(
                blocks, scales
            ).float()
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            del tensors[name]
    safetensors.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    document = json.loads((folder / "config.json").read_text())
    quantized = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps({**document, "quantization_config": quantized}))
    tokens, _ = random_tokens(97, 40)
    model = load_model(folder, device="cpu", dtype=torch.float32).model
    assert relative_error(model(tokens), reference(tokens).logits) < 1e-5


def test_language_model_of_llama_4_with_vision_is_read(tmp_path: Path) -> None:
    reference = random_reference("llama4_text", 0, tie_word_embeddings=False)
    folder = save_with_tokenizer(reference, tmp_path)
    tensors = safetensors.load_file(folder / "model.safetensors")
    whole = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    vision = {
        "vision_model.class_embedding": torch.ones(4),
        "multi_modal_projector.linear_1.weight": torch.ones(4, 4),
    }
    safetensors.save_file(
        {**whole, **vision}, folder / "model.safetensors", metadata={"format": "pt"}
    )
    text = json.loads((folder / "config.json").read_text())
    document = {
        "model_type": "llama4",
        "text_config": text,
        "vision_config": {"model_type": "llama4_vision_model"},
    }
    (folder / "config.json").write_text(json.dumps(document))
    tokens, _ = random_tokens(97, 40)
    assert (
        relative_error(load_model(folder, device="cpu").model(tokens), reference(tokens).logits)
        < 1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"module": "gpt_oss"},
        {"module": "llama4"},
        {"module": "qwen3_5", "config": "qwen3_5_moe_debugmodel", "model__n_layers": 4},
    ],
    ids=lambda options: options["module"],
)
def test_exports_open_in_transformers(tmp_path: Path, options: dict[str, Any]) -> None:
    saving = {
        "checkpoint__enable": True,
        "checkpoint__last_save_in_hf": True,
        "checkpoint__export_dtype": "float32",
    }
    train(tmp_path, **options, **saving)
    (folder,) = (tmp_path / "checkpoint").glob("step-*")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens, _ = random_tokens(2000, 200)
    assert (
        relative_error(load_model(folder, device="cpu").model(tokens), theirs(tokens).logits) < 1e-5
    )


@pytest.mark.parametrize(
    ("family", "options"),
    [
        (glm4_moe, {"layer_types": ["sparse", "dense"]}),
        (mixtral, {"ffn_dim": 64}),
        (gpt_oss, {"layer_types": ["sparse", "dense"]}),
        (qwen3_5, {"norm_topk_prob": False}),
    ],
)
def test_models_that_a_format_cannot_describe_are_not_exported_as_others(
    family: Any, options: dict[str, Any]
) -> None:
    config: Any = family.model_registry(
        "moe-debugmodel" if family is qwen3_5 else "debugmodel"
    ).model
    config.moe.penalties.z_loss = 0.1
    family.FORMATS["hf"].to_external(config)
    for name, value in options.items():
        setattr(config.moe, name, value)
    with pytest.raises(UserError, match="no model_type of config.json"):
        family.FORMATS["hf"].to_external(config)


# --- training
# --------------------------------------------------------------------------------------------------

SIGMOID: dict[str, Any] = {
    "module": "glm4_moe",
    "model__n_layers": 2,
    "model__moe__layer_types": ["dense", "sparse"],
    "model__moe__bias_rate": 0.01,
    "training__global_batch_size": 4,
}


def tensors_of(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model_parts[0].state_dict().items()}


def test_resumed_run_is_bit_identical(tmp_path: Path) -> None:
    """With the selection bias, which checkpoints contain and the optimizer does not update."""
    saving = {"checkpoint__enable": True, "checkpoint__interval": 2}
    whole = tensors_of(train(tmp_path / "whole", **SIGMOID))
    train(tmp_path / "parts", **SIGMOID, **saving, training__steps=2, lr_scheduler__total_steps=4)
    resumed = train(tmp_path / "parts", **SIGMOID, **saving, lr_scheduler__total_steps=4)
    assert resumed.step == 4
    after = tensors_of(resumed)
    assert all(torch.equal(whole[name], after[name]) for name in whole)
    bias = after["layers.1.moe.router.selection.bias_E"]
    assert (
        bias.abs().max() > 0.015
        and read_metrics(tmp_path / "parts", "loss")[2:]
        == read_metrics(tmp_path / "whole", "loss")[2:]
    )


LAYOUTS: dict[str, dict[str, Any]] = {
    "FSDP": {},
    "TP": {"parallelism__tensor_parallel_degree": 2},
    "PP": {
        "parallelism__pipeline_parallel_degree": 2,
        "parallelism__pipeline_parallel_microbatch_size": 1,
    },
}


def train_layouts(folder: Path) -> None:
    for name, layout in LAYOUTS.items():
        train(folder / name, **SIGMOID, **layout)


@pytest.mark.slow
def test_metrics_of_load_are_the_same_in_any_layout(tmp_path: Path) -> None:
    """Also if the process that writes them has a stage of the pipeline without experts."""
    keys = [
        f"{name}/layers.1"
        for name in ("expert_load", "router_entropy", "selection_bias", "dropped_tokens")
    ]
    train(tmp_path / "one", **SIGMOID)
    run_processes(train_layouts, 2, tmp_path)
    expected = read_metrics(tmp_path / "one", "expert_load", *keys)
    assert expected[-1][1] > 1 and [row[-1] for row in expected] == [0, 0, 0, 0]
    for name in LAYOUTS:
        for ours, theirs in zip(
            read_metrics(tmp_path / name, "expert_load", *keys), expected, strict=True
        ):
            # No token of this run is so near to a tie that rounding moves it to another expert.
            assert ours == pytest.approx(theirs, rel=1e-5)


def last_means(folder: Path, module: str, *words: str) -> dict[str, float]:
    """Train a debug model for 300 steps; return the means of its metrics over the last 50."""
    config = "qwen3_5_moe_debugmodel" if module == "qwen3_5" else "debugmodel"
    words = ("--module", module, "--config", config, "--dump_folder", str(folder), *words)
    logging = ("--training.steps", "300", "--metrics.log_freq", "1", "--validator.no_enable")
    run(ConfigManager().parse_args([*words, *logging]).config)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()[-50:]]
    return {name: sum(line[name] for line in lines) / 50 for name in lines[0]}


WITHOUT_BALANCE = (
    "--model.moe.penalties.sequence_loss",
    "0",
    "--model.moe.penalties.batch_loss",
    "0",
)


@pytest.mark.long
@pytest.mark.parametrize(
    ("module", "without"),
    [
        *((name, ()) for name in ("mixtral", "qwen3_moe", "gpt_oss", "llama4", "qwen3_5")),
        *((name, ("--model.moe.bias_rate", "0")) for name in ("glm4_moe", "deepseek_v3")),
    ],
)
def test_recipes_balance_every_layer_without_harm(
    module: str, without: tuple[str, ...], tmp_path: Path
) -> None:
    balanced = last_means(tmp_path / "balanced", module)
    alone = last_means(tmp_path / "alone", module, *WITHOUT_BALANCE, *without)
    loads = {name: value for name, value in balanced.items() if name.startswith("expert_load/")}
    assert loads and max(loads.values()) <= 1.5, loads
    assert max(value for name, value in alone.items() if name.startswith("expert_load/")) > 2.5, (
        alone
    )
    # Balance costs little of what the experts learn in so short a run.
    assert balanced["loss"] < alone["loss"] + 0.05


class SecondStepIsNaN(Trainer):
    def clip_gradients(self) -> torch.Tensor:
        norm = super().clip_gradients()
        return norm * torch.nan if self.step == 1 else norm


def test_skipped_step_leaves_the_bias(tmp_path: Path) -> None:
    name = "layers.1.moe.router.selection.bias_E"
    clean = tensors_of(train(tmp_path / "clean", **SIGMOID, training__steps=1))[name]
    options = {**SIGMOID, "training__steps": 2, "training__on_nonfinite": "skip"}
    skipped = tensors_of(train(tmp_path / "skipped", trainer_class=SecondStepIsNaN, **options))[
        name
    ]
    assert torch.equal(clean, skipped) and clean.any()


def test_frozen_router_keeps_weights_and_bias(tmp_path: Path) -> None:
    frozen = Freeze.Config(include=[r"moe\.router"])
    start = tensors_of(
        train(tmp_path / "start", frozen, **SIGMOID, training__steps=1, optimizer__lr=0.0)
    )
    end = tensors_of(train(tmp_path / "end", frozen, **SIGMOID))
    prefix = "layers.1.moe."
    for name in ("router.weight", "router.selection.bias_E"):
        assert torch.equal(start[prefix + name], end[prefix + name])
    assert not torch.equal(start[f"{prefix}experts.w13"], end[f"{prefix}experts.w13"])


class OwnLoss(Trainer):
    def compute_loss(self, batch: Any) -> Any:
        return super().compute_loss(batch)


def test_penalties_change_gradients_but_not_the_loss(tmp_path: Path) -> None:
    logged = []
    for weight in (0.0, 1.0):
        folder = tmp_path / str(weight)
        penalties = {
            f"model__moe__penalties__{name}": weight
            for name in ("batch_loss", "sequence_loss", "z_loss")
        }
        train(folder, module="qwen3_moe", **penalties, training__steps=2)
        logged.append(read_metrics(folder, "loss", "grad_norm"))
    (_, loss, norm), (_, same, other) = logged[0][0], logged[1][0]
    assert loss == same and abs(norm - other) > 0.01 * norm


@pytest.mark.parametrize(
    ("family", "kind"), [(mixtral, "sigmoid"), (glm4_moe, "softmax"), (llama4, "softmax")]
)
def test_other_types_of_routers_are_refused(family: Any, kind: Any) -> None:
    config = family.model_registry("debugmodel").model
    config.moe.scoring_func = kind
    with pytest.raises(UserError, match=f"--model.moe.scoring_func is {kind}, but must be [a-z]*$"):
        config.validate()


def test_routing_without_a_place_in_config_json_trains_and_is_not_exported(tmp_path: Path) -> None:
    options = {
        "model__moe__selection_bias": True,
        "model__moe__bias_rate": 0.01,
        "model__moe__n_group": 4,
    }
    options |= {"model__moe__topk_group": 2, "model__moe__n_shared_experts": 1}
    trainer = train(tmp_path, module="qwen3_moe", **options, training__steps=1)
    model = trainer.model_parts[0]
    assert (
        model.layers["0"].moe.router.selection.bias_E.any()
        and model.layers["0"].moe.shared is not None
    )
    with pytest.raises(UserError, match="no model_type of config.json"):
        qwen3_moe.FORMATS["hf"].to_external(model.config)


def test_penalties_need_a_loss_that_is_divided_beforehand(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"OwnLoss computes its own loss.*--model.moe.penalties"):
        train(tmp_path / "own", trainer_class=OwnLoss, module="qwen3_moe")
    train(
        tmp_path / "fine",
        trainer_class=OwnLoss,
        **SIGMOID,
        model__moe__penalties__sequence_loss=0.0,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "include"),
    [
        ("mixtral", None),
        ("qwen3_moe", None),
        ("qwen2_moe", None),
        ("qwen3_moe", ["attention", "experts"]),
    ],
)
def test_adapters_open_in_peft(
    model_type: str, include: list[str] | None, tmp_path: Path, chat_file: Path
) -> None:
    """By default, attention and Qwen2's shared experts; routers stay as they are."""
    sparse = {"decoder_sparse_step": 1, "mlp_only_layers": [], "num_experts": 4}
    options = {} if model_type == "mixtral" else sparse
    sizes = {
        "vocab_size": 2048,
        "num_hidden_layers": 2,
        "hidden_size": 48,
        "num_key_value_heads": 2,
    }
    reference = random_reference(model_type, 0, **sizes, **options)
    pretrained = save_with_tokenizer(reference, tmp_path / "base")
    name = family_of(model_type).__name__.rpartition(".")[2]
    chosen = {"model_converters__lora__include": include} if include else {}
    assert_adapters_open_in_peft(name, pretrained, chat_file, tmp_path / "run", **chosen)
    (saved,) = tmp_path.glob("run/checkpoint/*/adapter/adapter_config.json")
    assert len(json.loads(saved.read_text()).get("target_parameters", [])) == (4 if include else 0)


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("qwen3_moe", {"use_sliding_window": False}),
        ("gpt_oss", {"layer_types": ["sliding_attention", "full_attention"]}),
        ("llama4_text", {**LLAMA4, "floor_scale": 4}),
    ],
)
def test_packed_documents_equal_documents_alone(model_type: str, options: dict[str, Any]) -> None:
    """Experts see one token at a time; chunks and temperatures begin with the document."""
    reference = random_reference(model_type, 2, **options, num_hidden_layers=2)
    model, _ = to_ours(family_of(model_type), reference)
    tokens = torch.randint(97, (1, 50), generator=torch.Generator().manual_seed(0))
    packed = model(tokens, metadata_of([[20, 30]]))
    alone = torch.cat([model(part) for part in tokens.split([20, 30], dim=1)], dim=1)
    assert relative_error(packed, alone) < 1e-5


def test_a_dry_run_counts_active_experts(tmp_path: Path) -> None:
    words = ["--module", "qwen3_moe", "--config", "debugmodel", "--dump_folder", str(tmp_path)]
    words += ["--model.moe.penalties.batch_loss", "0"]  # otherwise, a further forward pass counts
    (rank,) = dry_run(ConfigManager().parse_args(words).config, world_size=2)
    assert rank.executed_flops == pytest.approx(rank.model_flops, rel=0.01)


def test_a_layer_that_predicts_further_tokens_is_left_out() -> None:
    """As in the published files of GLM-4.5; without the layer's own projection, it is one layer too
    many."""
    model = glm4_moe.model_registry("debugmodel").model
    model.vocab_size = 64
    adapter, internal = glm4_moe.FORMATS["hf"].adapter(model), model_tensor_specs(model)
    external = adapter.external_specs(internal)
    spec = TensorSpec(torch.Size([4]), torch.float32)
    further = {
        f"model.layers.{model.n_layers}.{name}.weight": spec
        for name in ("eh_proj", "enorm", "mlp.gate")
    }
    assert adapter.plan({**external, **further}, internal).unexpected == []
    del further[f"model.layers.{model.n_layers}.eh_proj.weight"]
    with pytest.raises(UserError, match="enorm"):
        adapter.plan({**external, **further}, internal)


def test_exports_keep_the_type_of_the_selection_bias(tmp_path: Path) -> None:
    options = {
        "checkpoint__enable": True,
        "checkpoint__last_save_in_hf": True,
        "checkpoint__export_dtype": "bfloat16",
    }
    train(tmp_path, module="glm4_moe", **options)
    (folder,) = (tmp_path / "checkpoint").glob("step-*")
    types = {name: spec.dtype for name, spec in open_source(folder).specs.items()}
    biases = {dtype for name, dtype in types.items() if name.endswith("e_score_correction_bias")}
    assert biases == {torch.float32} and types["lm_head.weight"] == torch.bfloat16
