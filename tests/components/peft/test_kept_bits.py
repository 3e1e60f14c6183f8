"""Adapters on published few bits, compared with LoRA on the dequantized weights."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.components.weights.test_few_bits import words_of
from tests.training import flags, read_metrics, run, tiny_config
from torchtitan.cli.main import main
from torchtitan.components.peft import LoRA, QLoRA
from torchtitan.components.peft.lora import LoRALinear, QLoRALinear
from torchtitan.components.quantization import nf4
from torchtitan.components.quantization.narrow import MXFP8
from torchtitan.components.quantization.packed_layers import PackedExperts, PackedLayer
from torchtitan.components.tokenizer import EMBEDDED_TOKENIZER
from torchtitan.components.weights import open_source, views
from torchtitan.components.weights.pretrained import load_pretrained
from torchtitan.config.manager import ConfigManager, ResolvedConfig
from torchtitan.distributed import initialize_weights
from torchtitan.distributed.initialize import canonical_name
from torchtitan.models.llama3 import model_registry
from torchtitan.models.pretrained import huggingface_model
from torchtitan.protocols import ModelSpec
from torchtitan.tools.errors import UserError

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}

Quantize = Callable[[Tensor, str], dict[str, Tensor]]
"""Weight and name of its layer → the tensors of a method."""


def of_bitsandbytes(kind: str, nested: bool) -> Quantize:
    library = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")

    def quantize(weight: Tensor, layer: str) -> dict[str, Tensor]:
        packed, state = library.functional.quantize_4bit(
            weight, quant_type=kind, compress_statistics=nested
        )
        parts = state.as_dict(packed=True)
        named = {f"{layer}.weight.{key}": parts[key] for key in parts}
        return {f"{layer}.weight": packed, **named}

    return quantize


def int8(weight: Tensor, layer: str) -> dict[str, Tensor]:
    maxima = weight.float().abs().amax(1)
    values = (weight.float() / maxima[:, None] * 127).round().to(torch.int8)
    return {f"{layer}.weight": values, f"{layer}.SCB": maxima}


def fp8(weight: Tensor, layer: str) -> dict[str, Tensor]:
    """In blocks of 32 x 32."""
    blocks = weight.float().unflatten(1, (-1, 32)).unflatten(0, (-1, 32))
    scale = blocks.abs().amax((1, 3), keepdim=True) / 448
    values = (blocks / scale).flatten(2).flatten(0, 1).to(torch.float8_e4m3fn)
    return {f"{layer}.weight": values, f"{layer}.weight_scale_inv": scale[:, 0, :, 0]}


def grouped(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return integers of 4 bits, zero points and scales of groups of 32 inputs."""
    groups = weight.float().unflatten(1, (-1, 32))
    low, high = groups.amin(-1), groups.amax(-1)
    scale = ((high - low) / 15).half()
    zeros = (-low / scale.float()).round().clamp(0, 15)
    values = (groups / scale.float()[..., None] + zeros[..., None]).round().clamp(0, 15)
    return values.flatten(1).int(), zeros.int(), scale


def gptq(weight: Tensor, layer: str) -> dict[str, Tensor]:
    integers, zeros, scales = grouped(weight)
    return {
        f"{layer}.qweight": words_of(integers, 4).T.contiguous(),
        f"{layer}.qzeros": words_of((zeros.T - 1) % 16, 4),
        f"{layer}.scales": scales.T.contiguous(),
        f"{layer}.g_idx": (torch.arange(weight.shape[1]) // 32).int(),
    }


def awq(weight: Tensor, layer: str) -> dict[str, Tensor]:
    integers, zeros, scales = grouped(weight)
    order = torch.arange(len(weight)).unflatten(0, (-1, 8))[:, [0, 2, 4, 6, 1, 3, 5, 7]].flatten()
    return {
        f"{layer}.qweight": words_of(integers.T[:, order], 4),
        f"{layer}.qzeros": words_of(zeros.T[:, order], 4),
        f"{layer}.scales": scales.T.contiguous(),
    }


def of_compressed_tensors(form: str, **options: Any) -> Quantize:
    library = pytest.importorskip("compressed_tensors", reason="needs compressed-tensors")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    args = library.quantization.QuantizationArgs(**options)
    compressor = compressors.BaseCompressor.get_value_from_registry(form)
    scheme = library.quantization.QuantizationScheme(targets=["Linear"], weights=args)
    is_float = options["type"] == "float"

    def quantize(weight: Tensor, layer: str) -> dict[str, Tensor]:
        size = options["group_size"]
        largest = weight.float().unflatten(1, (-1, size)).abs().amax(-1)
        state = {"weight": weight.bfloat16(), "weight_scale": (largest / 7).bfloat16()}
        if is_float:
            factor = 448 * 6 / largest.amax()
            state["weight_global_scale"] = factor.reshape(1)
            scale = (largest / 6 * factor).to(torch.float8_e4m3fn).bfloat16()
            state["weight_scale"] = scale
        compressed = compressor.compress(state, scheme)
        return {f"{layer}.{name}": tensor.contiguous() for name, tensor in compressed.items()}

    return quantize


def scheme_of(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
    }


INTEGERS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
GROUPS = {"bits": 4, "group_size": 32}

METHODS: dict[str, tuple[Callable[[], Quantize], dict[str, Any], str, float]] = {
    "NF4": (
        lambda: of_bitsandbytes("nf4", True),
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        "nf4:64:dynamic:bfloat16:0",
        5.1,
    ),
    "FP4": (
        lambda: of_bitsandbytes("fp4", False),
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        "fp4:64:float32:bfloat16:0",
        4.6,
    ),
    "int8": (
        lambda: int8,
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        "int8/127:0:float32:bfloat16:0",
        8.6,
    ),
    "FP8": (
        lambda: fp8,
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
        "e4m3:32:float32:bfloat16:0",
        9.1,
    ),
    "GPTQ": (
        lambda: gptq,
        {"quant_method": "gptq", "checkpoint_format": "gptq", **GROUPS},
        "uint4:32:float16:float16:0",
        4.8,
    ),
    "AWQ": (
        lambda: awq,
        {"quant_method": "awq", "version": "gemm", **GROUPS},
        "uint4:32:float16:float16:0",
        4.8,
    ),
    "pack-quantized": (
        lambda: of_compressed_tensors("pack-quantized", **INTEGERS),
        scheme_of("pack-quantized", **INTEGERS),
        "int4:32:bfloat16:bfloat16:0",
        4.6,
    ),
    "NVFP4": (
        lambda: of_compressed_tensors("nvfp4-pack-quantized", **NVFP4),
        scheme_of("nvfp4-pack-quantized", **NVFP4),
        "e2m1:16:e4m3 over:bfloat16:0",
        5.6,
    ),
}
"""Method → its quantization, its section of config.json, the form of w2, and
the most bits that a weight takes; rows of 64 inputs have large scales for their size."""


def write_folder(
    folder: Path, config: Any, section: dict[str, Any], quantize: Quantize, parts: str = "layers."
) -> Path:
    """Write a random model of transformers, with the matrices of its blocks in few bits."""
    torch.manual_seed(0)
    wide = transformers.AutoModelForCausalLM.from_config(config).state_dict()
    tensors: dict[str, Tensor] = {}
    for name, tensor in wide.items():
        layer = name.removesuffix(".weight")
        is_matrix = parts in name and tensor.ndim == 2 and "router" not in name
        is_matrix = is_matrix and not name.endswith("mlp.gate.weight")
        found = quantize(tensor.bfloat16(), layer) if is_matrix else {name: tensor.bfloat16()}
        tensors |= {key: value.contiguous() for key, value in found.items()}
    save_file(tensors, folder / "model.safetensors")
    document = json.loads(config.to_json_string(use_diff=False))
    document |= {"quantization_config": section, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(document))
    return folder


def load(
    folder: Path, config: LoRA.Config, family: Any = None
) -> tuple[nn.Module, LoRA.Config, ModelSpec]:
    """Return the model of a folder with trained adapters, in float32."""
    spec, _ = huggingface_model(folder, family)
    config = config.with_weights(spec, str(folder), range(0))
    converter = config.build()
    with torch.device("meta"):
        model = spec.model.build()
    converter.convert(model)
    model.to_empty(device="cpu")
    load_pretrained(
        folder,
        spec,
        [model],
        converters=[converter],
        initialize=partial(initialize_weights, model, 0),
    )
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith(("lora_B", "_B")):
            parameter.data.normal_(std=0.05, generator=generator)
    return model, config, spec


def loss_and_gradients(model: nn.Module) -> dict[str, Tensor]:
    tokens = torch.randint(99, (2, 24), generator=torch.Generator().manual_seed(2))
    logits = model(tokens)
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    gradients = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return {"loss": loss.detach(), **gradients}


def llama() -> Any:
    return transformers.LlamaConfig(**SIZES, tie_word_embeddings=False)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dora", [False, True])
def test_loss_and_gradients_equal_lora_on_the_dequantized_weights(
    method: str, dora: bool, tmp_path: Path
) -> None:
    """Exactly, also with layers without adapters, which stay in few bits too."""
    make, section, form, most_bits = METHODS[method]
    folder = write_folder(tmp_path, llama(), section, make())
    options: dict[str, Any] = {"rank": 4, "dora": dora, "include": [r"attention\.w[qvo]$", "w2$"]}
    kept, config, _ = load(folder, QLoRA.Config(**options))
    assert isinstance(config, QLoRA.Config)
    assert f"layers.*.feed_forward.w2={form}" in config.forms
    layers = {name: layer for name, layer in kept.named_modules() if isinstance(layer, PackedLayer)}
    assert len(layers) == 14
    bits = 8 * sum(p.nbytes for p in kept.parameters() if p.dtype == torch.uint8)
    assert bits / 14 < most_bits * sum(64 * n for n in (64, 32, 32, 64, 128, 128, 128)) / 7
    reference, _, _ = load(folder, LoRA.Config(**options))
    result, expected = loss_and_gradients(kept), loss_and_gradients(reference)
    assert result.keys() == expected.keys()
    assert len(result) == 1 + 8 * (3 if dora else 2)
    for name, value in expected.items():
        assert torch.equal(result[name], value), name


# --- experts
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read one expert at a time, as of large models."""
    monkeypatch.setattr(views, "_COMPUTED_ELEMENTS", 5000)


def gpt_oss() -> Any:
    return transformers.GptOssConfig(
        **{**SIZES, "intermediate_size": 64},
        num_local_experts=4,
        num_experts_per_tok=2,
        head_dim=16,
        layer_types=["full_attention", "full_attention"],
        sliding_window=32,
        tie_word_embeddings=False,
    )


def write_mxfp4(folder: Path) -> Path:
    """Write gpt-oss with experts in random MXFP4."""
    write_folder(folder, gpt_oss(), {"quant_method": "mxfp4"}, int8, parts="no layer")
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        n_experts, inputs, outputs = tensors.pop(name).shape
        shape = (n_experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(118, 122, shape, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors")
    return folder


def qwen3_moe(width: int = 32) -> Any:
    return transformers.Qwen3MoeConfig(
        **SIZES,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=width,
        head_dim=16,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    )


def write_fp8_experts(folder: Path) -> Path:
    return write_experts(folder, "FP8")


def write_experts(folder: Path, method: str, width: int = 32) -> Path:
    """Write Qwen3-MoE, each expert with tensors of its own, in few bits."""
    make, section, _, _ = METHODS[method]
    quantize = make()
    write_folder(folder, qwen3_moe(width), section, quantize)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        stacked, layer = tensors.pop(name), name.rpartition(".")[0]
        kinds = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
        for expert, weight in enumerate(stacked):
            for kind, part in zip(kinds, weight.chunk(len(kinds)), strict=True):
                tensors |= quantize(part.contiguous(), f"{layer}.{expert}.{kind}")
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def aria() -> Any:
    return transformers.AriaTextConfig(
        **{**SIZES, "intermediate_size": 32},
        moe_num_experts=4,
        moe_topk=2,
        moe_num_shared_experts=1,
        pad_token_id=0,
        tie_word_embeddings=False,
    )


def llama4() -> Any:
    return transformers.Llama4TextConfig(
        **{**SIZES, "intermediate_size": 32},
        intermediate_size_mlp=64,
        num_local_experts=4,
        num_experts_per_tok=1,
        head_dim=16,
        interleave_moe_layer_step=1,
        tie_word_embeddings=False,
    )


def write_fp8_inputs(folder: Path, config: Any) -> Path:
    """Write experts (experts, inputs, outputs) in FP8 with a scale for each output, as
    transformers writes Llama 4 with the method of fbgemm."""
    write_folder(folder, config, {"quant_method": "fbgemm_fp8"}, int8, parts="no layer")
    tensors = load_file(folder / "model.safetensors")
    is_matrix = re.compile(r"experts\.(gate_up_proj|down_proj|fc[12]\.weight)$")
    for name in list(filter(is_matrix.search, tensors)):
        # the type's own initial values are zeros
        weight = torch.randn(tensors.pop(name).shape) / 8
        scale = weight.abs().amax(1, keepdim=True) / 448
        tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = scale
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_fp8_llama4(folder: Path) -> Path:
    return write_fp8_inputs(folder, llama4())


@pytest.mark.parametrize("write", [write_mxfp4, write_fp8_experts, write_fp8_llama4])
@pytest.mark.parametrize("include", [[r"attention\.w"], [r"attention\.w", r"experts$"]])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.usefixtures("small_chunks")
def test_experts_stay_in_few_bits(
    write: Callable[[Path], Path], include: list[str], device: str, tmp_path: Path
) -> None:
    """With and without adapters, by the algorithms of both devices. Products of all experts, and
    of one after another, add up in other orders in float32."""
    folder = write(tmp_path)
    options: dict[str, Any] = {"rank": 4, "include": include}
    kept, _, _ = load(folder, QLoRA.Config(**options))
    reference, _, _ = load(folder, LoRA.Config(**options))
    experts = [layer for layer in kept.modules() if isinstance(layer, PackedExperts)]
    assert len(experts) == 2
    for model in (kept, reference):
        for layer in model.modules():
            if hasattr(layer, "device_type"):
                layer.device_type = device
    result, expected = loss_and_gradients(kept), loss_and_gradients(reference)
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(result[name], value, rtol=1e-4, atol=1e-6, msg=name)
    n_bytes = sum(
        p.nbytes for layer in experts for p in layer.parameters() if not p.is_floating_point()
    )
    n_values = 2 * 4 * 3 * 64 * (64 if write is write_mxfp4 else 32)
    assert n_bytes <= n_values * (0.54 if write is write_mxfp4 else 1.2)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.usefixtures("small_chunks")
def test_experts_of_a_class_stay_in_few_bits(method: str, tmp_path: Path) -> None:
    """As the class computes the dequantized weights, up to the order of sums in float32."""
    from torchtitan.models import transformers as family

    folder = write_experts(tmp_path, method, width=64)
    kept, config, _ = load(folder, QLoRA.Config(rank=4), family)
    assert isinstance(config, QLoRA.Config)
    assert f"model.model.layers.*.mlp.experts.gate_up_proj={METHODS[method][2]}" in config.forms
    assert config.dequantized == []
    experts = [layer for layer in kept.modules() if isinstance(layer, PackedExperts)]
    assert len(experts) == 2
    parameters = [parameter for layer in experts for parameter in layer.parameters()]
    assert {parameter.dtype for parameter in parameters} == {torch.uint8}
    n_values = 2 * 4 * 3 * 64 * 64
    assert 8 * sum(parameter.nbytes for parameter in parameters) < METHODS[method][3] * n_values
    reference, _, _ = load(folder, LoRA.Config(rank=4), family)
    result, expected = loss_and_gradients(kept), loss_and_gradients(reference)
    assert result.keys() == expected.keys() and len(result) == 1 + 2 * 2 * 4
    for name, value in expected.items():
        torch.testing.assert_close(result[name], value, rtol=1e-4, atol=1e-6, msg=name)


TRANSPOSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "gpt_oss": (write_mxfp4, "e2m1:32:e8m0:bfloat16:0"),
    "aria_text": (lambda folder: write_fp8_inputs(folder, aria()), "e4m3:0:float32:bfloat16:0"),
    "llama4_text": (write_fp8_llama4, "e4m3:0:float32:bfloat16:0"),
}
"""Type whose class stores its experts as (experts, inputs, outputs) → a function that writes
a folder, and the form of their matrices."""


@pytest.mark.parametrize("model_type", TRANSPOSED)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.usefixtures("small_chunks")
def test_transposed_experts_of_a_class_stay_in_few_bits(
    model_type: str, device: str, tmp_path: Path
) -> None:
    """As the class computes the dequantized weights, up to the order of sums in float32."""
    from torchtitan.models import transformers as family

    write, form = TRANSPOSED[model_type]
    folder = write(tmp_path)
    kept, config, _ = load(folder, QLoRA.Config(rank=4, include=[r"self_attn\."]), family)
    assert isinstance(config, QLoRA.Config) and config.dequantized == []
    assert [entry.partition("=")[2] for entry in config.forms] == [form, form]
    experts = [layer for layer in kept.modules() if isinstance(layer, PackedExperts)]
    assert len(experts) == 2
    weights = [p for layer in experts for n, p in layer.named_parameters() if "bias" not in n]
    assert {parameter.dtype for parameter in weights} == {torch.uint8}
    n_values = 2 * 4 * 3 * 64 * (64 if model_type == "gpt_oss" else 32)
    n_bytes = sum(weight.nbytes for weight in weights)
    assert n_bytes <= n_values * (0.54 if model_type == "gpt_oss" else 1.13)
    reference, _, _ = load(folder, LoRA.Config(rank=4, include=[r"self_attn\."]), family)
    for layer in experts:
        layer.device_type = device
    result, expected = loss_and_gradients(kept), loss_and_gradients(reference)
    assert result.keys() == expected.keys() and len(result) == 1 + 2 * 2 * 4
    for name, value in expected.items():
        torch.testing.assert_close(result[name], value, rtol=1e-4, atol=1e-6, msg=name)


@torch.no_grad()
def round_to_nf4(model: nn.Module) -> None:
    """Round what QLoRA keeps in our NF4."""
    for module in model.modules():
        names = ["weight"] if isinstance(module, LoRALinear) else getattr(module, "matrices", ())
        for name in names:
            weight = module.get_parameter(name)
            rows = weight.mT if getattr(module, "is_transposed", False) else weight
            rows.copy_(nf4.unpack(*nf4.pack(rows), torch.float32))


@pytest.mark.parametrize(
    ("module", "make", "include"),
    [
        ("auto", qwen3_moe, r"attention\.w"),
        ("auto", qwen3_moe, "experts$"),
        ("transformers", qwen3_moe, r"self_attn\."),
        ("transformers", gpt_oss, r"self_attn\."),
    ],
)
def test_experts_become_nf4(
    module: str, make: Callable[..., Any], include: str, tmp_path: Path
) -> None:
    """Of a folder without few bits, with `base nf4`: as LoRA on the rounded weights."""
    from torchtitan.models import transformers as any_class

    family = any_class if module == "transformers" else None
    torch.manual_seed(0)
    config = make() if make is gpt_oss else make(64)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    options: dict[str, Any] = {"rank": 4, "include": [include]}
    kept, _, _ = load(tmp_path, QLoRA.Config(base="nf4", **options), family)
    experts = [layer for layer in kept.modules() if isinstance(layer, PackedExperts)]
    assert len(experts) == 2
    assert all(set(layer.forms.values()) == {nf4.FORM} for layer in experts)
    reference, _, _ = load(tmp_path, LoRA.Config(**options), family)
    if family:
        reference.stacked_experts()
    round_to_nf4(reference)
    result, expected = loss_and_gradients(kept), loss_and_gradients(reference)
    assert result.keys() == expected.keys() and len(result) > 4
    for name, value in expected.items():
        torch.testing.assert_close(result[name], value, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("include", [r"attention\.w", r"experts$"])
def test_the_log_names_experts_that_stay_wide(include: str, log: pytest.LogCaptureFixture) -> None:
    """The matrix whose rows are no whole blocks; none if all are in NF4, adapted or not."""
    for width, is_wide in ((64, False), (96, True)):
        log.clear()
        with torch.device("meta"):
            model = sized_experts(width)
        if is_wide and "experts" in include:
            with pytest.raises(UserError, match=r"multiple of 64 inputs of w2; exclude"):
                QLoRA.Config(base="nf4", rank=4, include=[include]).build().convert(model)
            continue
        QLoRA.Config(base="nf4", rank=4, include=[include]).build().convert(model)
        wide = [line for line in log.messages if "not in NF4" in line]
        assert len(wide) == is_wide
        assert all(line.endswith(": layers.*.moe.experts.w2") for line in wide)


def sized_experts(width: int) -> nn.Module:
    options: Any = {"model__vocab_size": 2048, "model__moe__ffn_dim": width}
    built: nn.Module = tiny_config(Path(), module="qwen3_moe", **options).model_spec.model.build()
    return built


def test_experts_that_another_converter_multiplies_are_not_packed() -> None:
    with torch.device("meta"):
        model = sized_experts(64)
    MXFP8.Config(emulate=True, min_features=0, include=["experts"]).build().convert(model)
    message = r"experts is already converted by mxfp8, and .*qlora keeps it .*mxfp8\.exclude"
    with pytest.raises(UserError, match=message):
        QLoRA.Config(base="nf4", rank=4, include=["attention"]).build().convert(model)
    with torch.device("meta"):
        model = sized_experts(64)
    QLoRA.Config(base="nf4", rank=4, include=["attention"]).build().convert(model)
    with pytest.raises(UserError, match=r"experts is already converted by qlora, and mxfp8 cannot"):
        MXFP8.Config(emulate=True, min_features=0, include=["experts"]).build().convert(model)


# --- runs
# --------------------------------------------------------------------------------------------------

ROWS = [
    {
        "messages": [
            {"role": "user", "content": f"What is {n} plus {n}?"},
            {"role": "assistant", "content": f"It is {2 * n}."},
        ]
    }
    for n in range(48)
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of models with the vocabulary of the embedded tokenizer."""
    found: dict[str, Path] = {}
    with mock.patch.dict(SIZES, vocab_size=2048):
        for write in (write_mxfp4, write_fp8_experts):
            folder = tmp_path_factory.mktemp(write.__name__)
            found[write.__name__] = write(folder)
            shutil.copytree(EMBEDDED_TOKENIZER, folder, dirs_exist_ok=True)
            lines = [json.dumps(row) for row in ROWS]
            (folder / "data.jsonl").write_text("\n".join(lines))
    return found


def run_config(
    name: str, folder: Path, dump_folder: Path, module: str = "auto", **options: Any
) -> Any:
    settings = {
        "dataloader.dataset": folder / "data.jsonl",
        "dataloader.chat_template": "alpaca",
        "dump_folder": dump_folder,
        "model.max_seq_len": 128,
        "training.seq_len": 128,
        "training.steps": 3,
        "training.local_batch_size": 2,
        "training.global_batch_size": 4,
        "training.mixed_precision_param": "float32",
        "metrics.log_freq": 1,
        "lr_scheduler.warmup_steps": 1,
        "optimizer.lr": 1e-3,
        "checkpoint.interval": 2,
        **{key.replace("__", "."): value for key, value in options.items()},
    }
    words = ["--module", module, "--config", name, "--hf_assets_path", str(folder)]
    return ConfigManager().parse_args([*words, *flags(settings)]).config


def train(config: Any, world_size: int = 1) -> Any:
    config.check(world_size=world_size)
    return run(config)


@pytest.mark.parametrize(
    ("written", "module"),
    [
        ("write_mxfp4", "auto"),
        ("write_fp8_experts", "transformers"),
        pytest.param("write_mxfp4", "transformers", marks=pytest.mark.slow),
    ],
)
def test_a_run_keeps_the_bits_resumes_and_exports(
    written: str, module: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Its losses, adapters and merged weights are those of LoRA on the dequantized weights, and a
    resumed run is bitwise the same."""
    folder = folders[written]
    for name in ("qlora", "lora"):
        train(run_config(name, folder, tmp_path / name, module))
    losses = [read_metrics(tmp_path / name, "loss", "grad_norm") for name in ("qlora", "lora")]
    assert losses[0] == [pytest.approx(line, rel=1e-5) for line in losses[1]]
    assert len(losses[0]) == 3

    steps = [tmp_path / name / "checkpoint/step-3" for name in ("qlora", "lora")]
    for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
        ours, theirs = (load_file(step / file) for step in steps)
        assert ours.keys() == theirs.keys()
        for key in ours:
            # rounded to bfloat16 in the file
            torch.testing.assert_close(ours[key], theirs[key], rtol=2**-7, atol=1e-6)
    described = json.loads((steps[0] / "adapter/adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == str(folder.resolve())

    state = open_source(tmp_path / "qlora/checkpoint/step-2")
    assert all("lora_" in name for name in state.specs)
    shutil.copytree(tmp_path / "qlora/checkpoint/step-2", tmp_path / "again/checkpoint/step-2")
    train(run_config("qlora", folder, tmp_path / "again", module))
    resumed = load_file(tmp_path / "again/checkpoint/step-3/adapter/adapter_model.safetensors")
    whole = load_file(steps[0] / "adapter/adapter_model.safetensors")
    assert all(torch.equal(resumed[key], whole[key]) for key in whole)


def test_a_run_resumes_with_its_bits_only(folders: dict[str, Path], tmp_path: Path) -> None:
    """Checkpoints hold the adapters only, whose tensors do not tell the bits of the base."""
    config = run_config("qlora", folders["write_mxfp4"], tmp_path)
    before = config.identity(config.tokenizer.build(path=config.hf_assets_path))
    [qlora] = config.model_converters
    config.model_converters = [replace(qlora, base="nf4")]
    now = config.identity(config.tokenizer.build(path=config.hf_assets_path))
    described = now.describe_differences(before.properties)
    assert described == ["model_converters.qlora.base was keep and is nf4"]


def layers_of(trainer: Any, kind: type[nn.Module]) -> dict[str, Any]:
    return {
        name: layer
        for name, layer in trainer.model_parts[0].named_modules()
        if isinstance(layer, kind)
    }


@pytest.mark.slow
def test_a_checkpoint_with_all_weights_starts_other_runs(
    folders: dict[str, Path], log: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """The same adapters continue on the same bits, also with other patterns for the same layers;
    adapters of another rank or on other layers start from the merged model, in NF4."""
    folder = folders["write_fp8_experts"]
    all_weights = {
        "checkpoint__save_trainable_only": False,
        "checkpoint__last_save_in_hf": False,
        "checkpoint__export_dtype": "None",
        "training__steps": 1,
    }
    first = train(run_config("qlora", folder, tmp_path / "1", optimizer__lr=0.1, **all_weights))
    weights = dict(first.model_parts[0].named_parameters())
    adapted = layers_of(first, QLoRALinear)
    merged = {name: layer.effective_weight().detach().float() for name, layer in adapted.items()}
    starts = {
        "checkpoint__initial_load_path": tmp_path / "1/checkpoint/step-1",
        "checkpoint__initial_load_in_hf": False,
        "optimizer__lr": 1e-9,
        **all_weights,
    }
    for number, include in enumerate((None, [r"\.attention\.w[qkvo]$"])):
        chosen = {"model_converters__qlora__include": include} if include else {}
        trainer = train(run_config("qlora", folder, tmp_path / f"same{number}", **starts, **chosen))
        for name, parameter in trainer.model_parts[0].named_parameters():
            torch.testing.assert_close(parameter, weights[name], rtol=0, atol=1e-7)
    assert "are merged into the weights" not in log.text

    for name, other in {
        "rank": {"model_converters__qlora__rank": 4},
        "layers": {"model_converters__qlora__include": [r"attention\.w[qk]$"]},
    }.items():
        log.clear()
        trainer = train(run_config("qlora", folder, tmp_path / name, **starts, **other))
        assert "are merged into the weights" in log.text
        layers = layers_of(trainer, PackedLayer)
        assert len(layers) == (8 if name == "rank" else 4)
        for path, layer in layers.items():
            assert layer.forms == {"weight": nf4.FORM}
            # NF4 is off by 9 % of normally distributed weights.
            error = layer.base_weight().float() - merged[path]
            assert error.norm() < 0.12 * merged[path].norm()
            moved = adapted[path].base_weight().float() - merged[path]
            assert moved.norm() > 0.2 * merged[path].norm()


def test_adapter_opens_in_peft_over_the_dequantized_folder(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    folder = folders["write_fp8_experts"]
    config = run_config("qlora", folder, tmp_path / "run", training__steps=2, optimizer__lr=0.1)
    train(config)
    main(["convert", "--to", "hf", str(folder), str(tmp_path / "wide")])
    step = tmp_path / "run/checkpoint/step-2"
    options = {"dtype": torch.float32}
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "wide", **options).eval()
    tokens = torch.randint(2048, (1, 16), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        before = base(tokens).logits.clone()
        adapted = peft.PeftModel.from_pretrained(base, step / "adapter")(tokens).logits
        merged = transformers.AutoModelForCausalLM.from_pretrained(step, **options)(tokens).logits
    # Merged weights are rounded to bfloat16.
    moved = (adapted - before).abs().max()
    assert (merged - adapted).abs().max() < 0.05 * moved


LAYOUTS: dict[str, dict[str, Any]] = {
    "FSDP": {},
    "TP": {"parallelism__tensor_parallel_degree": 2},
    "EP": {"parallelism__expert_parallel_degree": 2},
    "expert TP": {
        "parallelism__tensor_parallel_degree": 2,
        "parallelism__expert_tensor_parallel_degree": 2,
    },
}


def record(folder: Path, dump_folder: Path, n: int, module: str, options: dict[str, Any]) -> None:
    """Train, and save the unsharded weights on each rank."""
    config = run_config("qlora", folder, dump_folder, module, **options)
    trainer = train(config, n)
    weights = {
        canonical_name(name): getattr(
            parameter, "full_tensor", lambda own=parameter: own
        )().detach()
        for name, parameter in trainer.model_parts[0].named_parameters()
    }
    torch.save(weights, dump_folder / f"weights-{trainer.rank}.pt")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "module", "written"),
    [
        *((layout, "auto", "write_fp8_experts") for layout in LAYOUTS),
        ("EP", "transformers", "write_fp8_experts"),
        ("TP", "transformers", "write_fp8_experts"),
        ("EP", "transformers", "write_mxfp4"),
    ],
)
def test_two_processes_equal_one(
    layout: str, module: str, written: str, folders: dict[str, Path], workers: Any, tmp_path: Path
) -> None:
    """Few bits exactly; the others differ by float32 sums in another order."""
    folder = folders[written]
    adapted = {"model_converters__qlora__include": [r"attention\.w", r"experts$"]}
    options = adapted if module == "auto" else {}
    record(folder, tmp_path / "one", 1, module, options)
    workers.run(record, folder, tmp_path / "two", 2, module, options | LAYOUTS[layout])
    one, two = (torch.load(tmp_path / name / "weights-0.pt") for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, expected in one.items():
        if expected.dtype == torch.uint8:
            assert torch.equal(two[name], expected), name
        else:
            assert (two[name] - expected).norm() < 1e-4 * expected.norm() + 1e-6, name
    losses = [read_metrics(tmp_path / name, "loss", "grad_norm") for name in ("one", "two")]
    assert losses[1] == [pytest.approx(line, rel=1e-4) for line in losses[0]]


# --- refusals
# --------------------------------------------------------------------------------------------------


def gptq_out_of_order(weight: Tensor, layer: str) -> dict[str, Tensor]:
    tensors = gptq(weight, layer)
    return {**tensors, f"{layer}.g_idx": tensors[f"{layer}.g_idx"].flip(0)}


@pytest.mark.parametrize("desc_act", [True, False])
def test_weights_that_cannot_be_kept_are_refused_by_name(desc_act: bool, tmp_path: Path) -> None:
    """GPTQ in the order of activations, whatever the section says."""
    section = {**METHODS["GPTQ"][1], "desc_act": desc_act}
    folder = write_folder(tmp_path, llama(), section, gptq_out_of_order)
    spec, _ = huggingface_model(folder)
    message = r"base keep: .* layers\.0\.attention\.wk\.weight.*are not neighbors.*base nf4"
    with pytest.raises(UserError, match=message):
        QLoRA.Config().with_weights(spec, str(folder), range(0))
    config = QLoRA.Config(base="nf4").with_weights(spec, str(folder), range(0))
    assert isinstance(config, QLoRA.Config) and config.forms == []


def test_static_groups_in_the_order_of_activations_are_kept(tmp_path: Path) -> None:
    """The order is that of quantization alone; inputs of a group are neighbors in the file."""
    section = {**METHODS["GPTQ"][1], "desc_act": True, "static_groups": True}
    folder = write_folder(tmp_path, llama(), section, gptq)
    kept, config, _ = load(folder, QLoRA.Config(rank=4))
    assert isinstance(config, QLoRA.Config) and len(config.forms) == 7
    reference, _, _ = load(folder, LoRA.Config(rank=4))
    result, expected = loss_and_gradients(kept), loss_and_gradients(reference)
    assert result.keys() == expected.keys()
    assert all(torch.equal(result[name], expected[name]) for name in expected)


def test_each_run_says_what_is_dequantized(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    """Once, when its model is converted, also of the second run of a process."""
    section = METHODS["int8"][1]
    folder = write_folder(tmp_path, llama(), section, int8, parts="weight")
    for _ in range(2):
        log.clear()
        _, config, _ = load(folder, QLoRA.Config(rank=4))
        assert isinstance(config, QLoRA.Config)
        assert config.dequantized == ["head.output.weight", "tok_embeddings.weight"]
        said = [text for text in log.messages if "dequantized, not kept in few bits" in text]
        assert said == [
            "qlora: dequantized, not kept in few bits: head.output.weight, tok_embeddings.weight"
        ]


@pytest.mark.parametrize(
    "entry",
    [
        "w2",
        "=nf4:64:linear:bfloat16:0",
        "w2=nf4",
        "w2=nf5:64:linear:bfloat16:0",
        "w2=uint9:64:float16:float16:0",
        "w2=4:64:float16:float16:0",
        "w2=int4:x:float16:float16:0",
        "w2=int4:-32:float16:float16:0",
        "w2=int4:32:int8:float16:0",
        "w2=int4:32:float16:int8:0",
        "w2=int4:32:float16:float16",
    ],
)
def test_wrong_forms_in_a_checkpoint_are_refused(entry: str) -> None:
    right = "layers.*.w1=int4:32:float16:float16:0"
    assert QLoRA.Config.from_dict({"forms": [right]}).forms == [right]
    with pytest.raises(UserError, match=f"saved form {re.escape(repr(entry))} of QLoRA"):
        QLoRA.Config.from_dict({"forms": [right, entry]})


def test_fields_that_the_run_sets_are_no_options(folders: dict[str, Path], tmp_path: Path) -> None:
    """Nor in its configuration file, which starts a run again."""
    folder = folders["write_fp8_experts"]
    config = run_config("qlora", folder, tmp_path)
    tokenizer = config.tokenizer.build(path=str(folder))
    resolved = config.resolve(tokenizer)
    (converter,) = resolved.model_converters
    assert converter.forms and converter.base_path == str(folder)
    ResolvedConfig("auto", "qlora", resolved).save(tmp_path / "config.yaml")
    text = (tmp_path / "config.yaml").read_text()
    assert "rank: 16" in text and "forms" not in text and "base_path" not in text
    again = ConfigManager().parse_args(["--config_file", str(tmp_path / "config.yaml")]).config
    assert again.resolve(tokenizer).model_converters == resolved.model_converters
    for field, value in {"forms": "w2=nf4", "base_path": "/base"}.items():
        with pytest.raises(UserError, match=f"unknown option --model_converters.qlora.{field}"):
            run_config("qlora", folder, tmp_path, **{f"model_converters__qlora__{field}": value})


@pytest.mark.parametrize("converter", [LoRA.Config(), QLoRA.Config()])
def test_a_description_suffices_for_a_dry_run(converter: Any, tmp_path: Path) -> None:
    """Without a quantization, whose layers only the files of weights name."""
    spec = model_registry("debugmodel")
    file = tmp_path / "config.json"
    file.write_text("{}")
    assert converter.with_weights(spec, str(tmp_path), range(0)) == converter
    file.write_text(json.dumps({"quantization_config": {"quant_method": "mxfp4"}}))
    if isinstance(converter, QLoRA.Config):
        with pytest.raises(UserError, match="holds no checkpoint"):
            converter.with_weights(spec, str(tmp_path), range(0))
    else:
        assert converter.with_weights(spec, str(tmp_path), range(0)) == converter


def test_other_bits_than_those_of_the_run_are_refused(tmp_path: Path) -> None:
    """A run's folder, replaced by one in other bits."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    first = write_folder(tmp_path / "first", llama(), METHODS["GPTQ"][1], gptq)
    second = write_folder(tmp_path / "second", llama(), METHODS["FP8"][1], fp8)
    spec, _ = huggingface_model(first)
    converter = QLoRA.Config(rank=4).with_weights(spec, str(first), range(0)).build()
    with torch.device("meta"):
        model = spec.model.build()
    converter.convert(model)
    with pytest.raises(UserError, match=r"wq\.weight must be stored in few bits as uint4:32"):
        load_pretrained(second, spec, [model.to_empty(device="cpu")], converters=[converter])
