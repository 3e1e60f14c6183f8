"""Folders in few bits, read with exactly the values of the libraries that wrote them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.components.weights.test_dequantize import assert_reads, save
from torchtitan.cli.main import main
from torchtitan.components.weights import few_bits, open_source
from torchtitan.components.weights.dequantize import methods
from torchtitan.models.pretrained import load_model
from torchtitan.tools.errors import UserError

INPUTS, OUTPUTS = 96, 64


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "_COMPUTED_ELEMENTS", 2000)


def words_of(integers: Tensor, bits: int, dense: bool = True) -> Tensor:
    """Pack each row of unsigned integers (rows, n) into words (rows, words), bit by bit."""
    rows = []
    for row in integers.tolist():
        text = ""
        for value in row:
            if not dense and len(text) % 32 + bits > 32:
                text += "0" * (32 - len(text) % 32)
            text += f"{value:0{bits}b}"[::-1]
        text += "0" * (-len(text) % 32)
        words = [int(text[start : start + 32][::-1], 2) for start in range(0, len(text), 32)]
        rows.append([word - 2**32 if word >= 2**31 else word for word in words])
    return torch.tensor(rows, dtype=torch.int32)


def integers_of(bits: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return integers (outputs, inputs), and zero points and scales (outputs, groups)."""
    torch.manual_seed(bits)
    most = 1 << bits
    integers = torch.randint(0, most, (OUTPUTS, INPUTS))
    return integers, torch.randint(0, most, (OUTPUTS, groups)), torch.rand(OUTPUTS, groups).half()


def product(integers: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor) -> Tensor:
    """Exact in float64, so rounded once."""
    return ((integers - zeros[:, groups]).double() * scales[:, groups].double()).to(scales.dtype)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("form", "group_size", "in_order"),
    [("gptq", 32, True), ("gptq", 32, False), ("gptq_v2", 32, True), ("gptq", -1, True)],
)
def test_gptq(bits: int, form: str, group_size: int, in_order: bool, tmp_path: Path) -> None:
    n_groups = 1 if group_size == -1 else INPUTS // group_size
    integers, zeros, scales = integers_of(bits, n_groups)
    groups = torch.arange(INPUTS) // (INPUTS if group_size == -1 else group_size)
    if not in_order:
        groups = groups[torch.randperm(INPUTS)]
    stored = zeros if form == "gptq_v2" else (zeros - 1) % (1 << bits)
    tensors = {
        "a.qweight": words_of(integers, bits).T.contiguous(),
        "a.qzeros": words_of(stored.T, bits),
        "a.scales": scales.T.contiguous(),
        "a.g_idx": groups.int(),
    }
    section = {"bits": bits, "group_size": group_size, "desc_act": not in_order}
    folder = save(tmp_path, tensors, {"quant_method": "gptq", "checkpoint_format": form, **section})
    expected = product(integers, zeros, scales, groups)
    assert_reads(folder, "a.weight", expected)

    # As AutoGPTQ stores it: in a file of its own, and without the groups if they are in order.
    if form == "gptq" and in_order:
        del tensors["a.g_idx"]
        save(tmp_path, tensors, None)
        (tmp_path / "quantize_config.json").write_text(json.dumps(section))
        assert_reads(folder, "a.weight", expected)


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_zeros_as_biases_of_all_layers_of_gptq_are_left_out(value: float, tmp_path: Path) -> None:
    """As GPTQ-for-LLaMa stores them; the model has no biases."""
    tensors = {}
    for layer in ("a", "b"):
        parts = {name.replace("a.", f"{layer}."): part for name, part in gptq_tensors().items()}
        tensors |= {**parts, f"{layer}.bias": torch.zeros(64).half()}
    tensors["b.bias"][3] = value
    names = {"a.weight", "b.weight"} | ({"a.bias", "b.bias"} if value else set())
    assert open_source(save(tmp_path, tensors, GPTQ)).specs.keys() == names


@pytest.mark.parametrize("group_size", [32, -1])
def test_awq(group_size: int, tmp_path: Path) -> None:
    integers, zeros, scales = integers_of(4, 1 if group_size == -1 else INPUTS // group_size)
    groups = torch.arange(INPUTS) // (INPUTS if group_size == -1 else group_size)
    # Values 0, 2, 4, 6, 1, 3, 5, 7 of eight, from the lowest bits.
    order = torch.arange(OUTPUTS).unflatten(0, (-1, 8))[:, [0, 2, 4, 6, 1, 3, 5, 7]].flatten()
    tensors = {
        "a.qweight": words_of(integers.T[:, order], 4),
        "a.qzeros": words_of(zeros.T[:, order], 4),
        "a.scales": scales.T.contiguous(),
    }
    section = {"quant_method": "awq", "bits": 4, "group_size": group_size, "version": "gemm"}
    folder = save(tmp_path, tensors, section)
    assert_reads(folder, "a.weight", product(integers, zeros, scales, groups))


def schemes(**weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
    }


INTEGERS = [
    *({"num_bits": bits, "strategy": "group", "group_size": 32} for bits in (2, 3, 4, 5, 6, 8)),
    {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
    {"num_bits": 3, "strategy": "group", "group_size": 32, "symmetric": False},
    {"num_bits": 4, "strategy": "channel"},
    {"num_bits": 8, "strategy": "channel", "symmetric": False},
    {"num_bits": 8, "strategy": "tensor"},
]


@pytest.mark.parametrize("scheme", INTEGERS, ids=str)
@pytest.mark.parametrize("form", ["pack-quantized", "int-quantized"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_compressed_integers(
    scheme: dict[str, Any], form: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Values equal those that the library itself decompresses."""
    library = pytest.importorskip("compressed_tensors", reason="needs compressed-tensors")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    if scheme["strategy"] == "tensor" and form == "pack-quantized":
        pytest.skip("the library packs no weight with a single scale")
    torch.manual_seed(1)
    args = library.quantization.QuantizationArgs(type="int", **scheme)
    n_groups = INPUTS // 32 if scheme["strategy"] == "group" else 1
    shape = (1,) if scheme["strategy"] == "tensor" else (OUTPUTS, n_groups)
    half = 1 << (scheme["num_bits"] - 1)
    state = {
        "weight": torch.randn(OUTPUTS, INPUTS).to(dtype),
        "weight_scale": (torch.rand(shape) / half).to(dtype),
    }
    if not args.symmetric:
        state["weight_zero_point"] = torch.randint(-half, half, shape, dtype=torch.int8)
    compressor = compressors.BaseCompressor.get_value_from_registry(form)
    options = library.quantization.QuantizationScheme(targets=["Linear"], weights=args)
    packed = compressor.compress(state, options)
    expected = compressor.decompress(packed, options)["weight"]
    folder = save(
        tmp_path,
        {f"a.{name}": tensor.contiguous() for name, tensor in packed.items()},
        {**schemes(**args.model_dump(mode="json")), "format": form},
    )
    assert len(expected.unique()) > 2
    assert_reads(folder, "a.weight", expected)


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_integers_with_gaps(bits: int, tmp_path: Path) -> None:
    """As compressed-tensors stores them before 0.18."""
    integers, zeros, scales = integers_of(bits, INPUTS // 32)
    half = 1 << (bits - 1)
    tensors = {
        "a.weight_packed": words_of(integers, bits, dense=False),
        "a.weight_zero_point": words_of(zeros.T, bits, dense=False).T.contiguous(),
        "a.weight_scale": scales,
        "a.weight_shape": torch.tensor([OUTPUTS, INPUTS]),
    }
    folder = save(tmp_path, tensors, schemes(num_bits=bits, group_size=32, strategy="group"))
    groups = torch.arange(INPUTS) // 32
    assert_reads(folder, "a.weight", product(integers - half, zeros - half, scales, groups))


@pytest.mark.parametrize(
    "form", ["nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"]
)
def test_compressed_floats(form: str, tmp_path: Path) -> None:
    library = pytest.importorskip("compressed_tensors", reason="needs compressed-tensors")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    torch.manual_seed(1)
    is_nvfp4 = form.startswith("nvfp4")
    group_size = 16 if is_nvfp4 else 32
    args = library.quantization.QuantizationArgs(
        num_bits=8 if form == "mxfp8-quantized" else 4,
        type="float",
        strategy="tensor_group" if is_nvfp4 else "group",
        group_size=group_size,
    )
    scale = torch.rand(OUTPUTS, INPUTS // group_size) * 50 + 1
    state = {
        "weight": torch.randn(OUTPUTS, INPUTS).bfloat16(),
        "weight_scale": scale.to(torch.float8_e4m3fn).bfloat16()
        if is_nvfp4
        else torch.exp2(scale.log2().round() - 5).bfloat16(),
    }
    if is_nvfp4:
        state["weight_global_scale"] = torch.tensor([123.0])
    compressor = compressors.BaseCompressor.get_value_from_registry(form)
    options = library.quantization.QuantizationScheme(targets=["Linear"], weights=args)
    packed = compressor.compress(state, options)
    expected = compressor.decompress(packed, options)["weight"]
    folder = save(
        tmp_path,
        {f"a.{name}": tensor.contiguous() for name, tensor in packed.items()},
        {**schemes(**args.model_dump(mode="json")), "format": form},
    )
    assert len(expected.unique()) > 20
    assert_reads(folder, "a.weight", expected)


def test_dense_weights_are_read_as_they_are(tmp_path: Path) -> None:
    """As of pruned models; with scales, the library computes with rounded weights."""
    pruned = {"format": "dense", "sparsity_structure": "2:4"}
    tensors = {"a.weight": torch.randn(OUTPUTS, INPUTS)}
    own = {"quant_method": "compressed-tensors", "format": "dense", "sparsity_config": pruned}
    source = open_source(save(tmp_path, tensors, own))
    assert list(source.specs) == ["a.weight"]
    assert torch.equal(source.read("a.weight"), tensors["a.weight"])
    save(tmp_path, {**tensors, "a.weight_scale": torch.ones(OUTPUTS, 1)}, own)
    with pytest.raises(UserError, match=r"have scales \(a.weight_scale\), by which"):
        open_source(tmp_path)
    save(tmp_path, tensors, {**own, "sparsity_config": {"format": "sparse-24-bitmask"}})
    with pytest.raises(UserError, match="'sparse-24-bitmask', which stores only"):
        open_source(tmp_path)


def test_weights_that_are_rotated_offline_are_read_as_they_are(tmp_path: Path) -> None:
    """The library stores them rotated, and needs nothing else to compute the same. A rotation of
    activations is refused."""
    transform = pytest.importorskip("compressed_tensors.transform", reason="needs the library")
    torch.manual_seed(1)
    layers = torch.nn.Sequential(
        *(torch.nn.Linear(64, 64, bias=False, dtype=torch.float64) for _ in "ab")
    )
    x = torch.randn(5, 64, dtype=torch.float64)
    expected, before = layers(x), layers[0].weight.clone()
    apply = [
        {"targets": ["0"], "location": "weight_output"},
        {"targets": ["1"], "location": "weight_input", "inverse": True},
    ]
    scheme = {"type": "hadamard", "apply": apply, "precision": "float64"}
    config = transform.TransformConfig(config_groups={"R1": scheme})
    transform.apply_transform_config(layers, config)
    own = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "transform_config": config.model_dump(mode="json"),
    }
    folder = save(tmp_path, {k: v.detach() for k, v in layers.state_dict().items()}, own)
    source = open_source(folder)
    assert sorted(source.specs) == ["0.weight", "1.weight"]
    assert not torch.allclose(source.read("0.weight"), before)
    found = x @ source.read("0.weight").T @ source.read("1.weight").T
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    own["transform_config"]["config_groups"]["R1"]["apply"][1]["location"] = "input"
    save(tmp_path, {}, own)
    with pytest.raises(UserError, match="transform_config that also rotates activations"):
        open_source(tmp_path)


def test_nvfp4_of_modelopt_is_described_in_a_file_of_its_own(tmp_path: Path) -> None:
    torch.manual_seed(1)
    packed = torch.randint(0, 256, (OUTPUTS, INPUTS // 2), dtype=torch.uint8)
    scale = (torch.rand(OUTPUTS, INPUTS // 16) * 100).to(torch.float8_e4m3fn)
    factor = torch.tensor(0.0123)
    tensors = {
        "a.weight": packed,
        "a.weight_scale": scale,
        "a.weight_scale_2": factor,
        "a.input_scale": torch.tensor(1.0),
    }
    folder = save(tmp_path, tensors, None)
    (tmp_path / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}})
    )
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.stack((packed & 15, packed >> 4), 2).flatten(1).int()
    values = table[values & 7] * torch.where(values > 7, -1, 1)
    factors = (scale.float() * factor).repeat_interleave(16, 1)
    assert_reads(folder, "a.weight", (values * factors).bfloat16())

    save(tmp_path, {"a.weight": values.to(torch.float8_e4m3fn), "a.weight_scale": factor}, None)
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    assert_reads(folder, "a.weight", (values * factor).bfloat16())


def four_bit(
    codes: Tensor, block: int, nested: bool, kind: str
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the tensors of bitsandbytes for a weight of `codes`, and its values."""
    table = torch.linspace(-1, 1, 16) ** 3
    n_blocks = -(-codes.numel() // block)
    flat = codes.flatten().to(torch.uint8)
    flat = torch.nn.functional.pad(flat, (0, len(flat) % 2))
    state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "float16"}
    state["shape"] = list(codes.shape)
    tensors = {"a.weight": (flat[::2] << 4 | flat[1::2])[:, None], "a.weight.quant_map": table}
    if nested:
        of_maxima = torch.linspace(-1, 1, 256)
        inner = torch.randint(0, 256, (n_blocks,), dtype=torch.uint8)
        outer = torch.rand(-(-n_blocks // 8))
        maxima = of_maxima[inner.int()] * outer[torch.arange(n_blocks) // 8] + 1.25
        state |= {"nested_blocksize": 8, "nested_offset": 1.25, "nested_dtype": "float32"}
        tensors["a.weight.nested_absmax"] = outer
        tensors["a.weight.nested_quant_map"] = of_maxima
        tensors["a.weight.absmax"] = inner
    else:
        maxima = tensors["a.weight.absmax"] = torch.rand(n_blocks)
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    tensors[f"a.weight.quant_state.bitsandbytes__{kind}"] = text
    each = maxima.repeat_interleave(block)[: codes.numel()].reshape(codes.shape)
    return tensors, (table[codes] * each).half()


@pytest.mark.parametrize("shape", [(OUTPUTS, INPUTS), (9, 7)])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_four_bits_of_bitsandbytes(
    shape: tuple[int, int], nested: bool, kind: str, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    tensors, expected = four_bit(torch.randint(0, 16, shape), 64, nested, kind)
    section = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    assert_reads(save(tmp_path, tensors, section), "a.weight", expected)


def test_weights_that_bitsandbytes_wrote(tmp_path: Path) -> None:
    library = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    torch.manual_seed(1)
    weight = torch.randn(OUTPUTS, INPUTS).bfloat16()
    for kind in ("nf4", "fp4"):
        for nested in (False, True):
            packed, state = library.functional.quantize_4bit(
                weight, quant_type=kind, compress_statistics=nested
            )
            parts = state.as_dict(packed=True)
            tensors = {"a.weight": packed, **{f"a.weight.{key}": parts[key] for key in parts}}
            folder = save(tmp_path, tensors, {"quant_method": "bitsandbytes"})
            expected = library.functional.dequantize_4bit(packed, state)
            assert_reads(folder, "a.weight", expected)
    values, maxima, _ = library.functional.int8_vectorwise_quant(weight.half())
    folder = save(tmp_path, {"a.weight": values, "a.SCB": maxima}, {"quant_method": "bitsandbytes"})
    expected = library.functional.int8_vectorwise_dequant(values, maxima).bfloat16()
    assert_reads(folder, "a.weight", expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_int8_of_bitsandbytes(dtype: torch.dtype, tmp_path: Path) -> None:
    """The type is the one that config.json names for the model."""
    torch.manual_seed(1)
    values = torch.randint(-128, 128, (OUTPUTS, INPUTS), dtype=torch.int8)
    maxima = torch.rand(OUTPUTS)
    tensors = {"a.weight": values, "a.SCB": maxima, "a.weight_format": torch.tensor(0).byte()}
    folder = save(tmp_path, tensors, {"quant_method": "bitsandbytes", "load_in_8bit": True})
    document = json.loads((folder / "config.json").read_text())
    name = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps({**document, "torch_dtype": name}))
    expected = (values * maxima[:, None] * (1 / 127)).to(dtype)
    assert_reads(folder, "a.weight", expected)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
SCHEME = {"num_bits": 3, "group_size": 32, "strategy": "group"}
OTHER_BITS = {
    **schemes(),
    "config_groups": {str(n): {"weights": {**SCHEME, "num_bits": n}} for n in (3, 5)},
}


def gptq_tensors() -> dict[str, Tensor]:
    return {
        "a.qweight": torch.zeros(12, 64, dtype=torch.int32),
        "a.qzeros": torch.zeros(3, 8, dtype=torch.int32),
        "a.scales": torch.zeros(3, 64).half(),
        "a.g_idx": torch.zeros(96, dtype=torch.int32),
    }


def packed_tensors(n_words: int) -> dict[str, Tensor]:
    return {
        "a.weight_packed": torch.zeros(64, n_words, dtype=torch.int32),
        "a.weight_scale": torch.ones(64, 3).half(),
        "a.weight_shape": torch.tensor([64, 96]),
    }


REFUSED = {
    "bits": (gptq_tensors(), {**GPTQ, "bits": 5}, "bits of the quantization is 5, but must be one"),
    "group size": (gptq_tensors(), {**GPTQ, "group_size": 0}, "group_size .* is 0, but must be -1"),
    "form": (gptq_tensors(), {**GPTQ, "checkpoint_format": "marlin"}, "'marlin' of GPTQ cannot be"),
    "layers": (gptq_tensors(), {**GPTQ, "dynamic": {"a": {}}}, "other bits in some layers"),
    "shape": (
        gptq_tensors(),
        {**GPTQ, "bits": 8},
        r"a.qweight is \[12, 64\], but must be \[24, 64",
    ),
    "missing": (
        {key: value for key, value in gptq_tensors().items() if "qzeros" not in key},
        GPTQ,
        "a.qzeros, which a quantized weight needs, is missing",
    ),
    "order of inputs": (
        {key: value for key, value in gptq_tensors().items() if "g_idx" not in key},
        {**GPTQ, "desc_act": True},
        "a.g_idx, the order of a weight's inputs .desc_act., is missing",
    ),
    "AWQ": (
        gptq_tensors(),
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"},
        "version 'gemv' of AWQ cannot be read",
    ),
    "width": (packed_tensors(8), schemes(**SCHEME), r"a.weight_packed \[64, 8\] fits 0 of the sch"),
    "no bits": (
        packed_tensors(9),
        schemes(group_size=32),
        "num_bits of the quantization is None, but must be one of 2, 3,",
    ),
    "rotated": (
        packed_tensors(9),
        {**schemes(**SCHEME), "transform_config": {"config_groups": {"u": {"type": "hadamard"}}}},
        "has a transform_config that also rotates activations",
    ),
    "no scale": (
        {"a.weight_packed": torch.zeros(64, 9, dtype=torch.int32)},
        schemes(**SCHEME),
        "its scale a.weight_scale is missing",
    ),
    "FP4": (
        {
            "a.weight_packed": torch.zeros(64, 48, dtype=torch.uint8),
            "a.weight_scale": torch.ones(64, 3).to(torch.float8_e4m3fn),
            "a.weight_global_scale": torch.ones(1),
        },
        schemes(),
        r"a.weight_scale, float8_e4m3fn \[64, 3\], cannot scale .* in NVFP4, which needs \[64, 6\]",
    ),
    "state": (
        {
            "a.weight": torch.zeros(32, 1, dtype=torch.uint8),
            "a.weight.quant_state.bitsandbytes__nf4": torch.tensor(list(b"{}"), dtype=torch.uint8),
        },
        {"quant_method": "bitsandbytes"},
        "quant_state.bitsandbytes__nf4 is damaged",
    ),
    "order": (
        {
            "a.weight": torch.zeros(4, 4, dtype=torch.int8),
            "a.SCB": torch.ones(4),
            "a.weight_format": torch.tensor(1).byte(),
        },
        {"quant_method": "bitsandbytes"},
        "a.weight_format is 1: only weights in row order",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_named(name: str, tmp_path: Path) -> None:
    tensors, section, reason = REFUSED[name]
    with pytest.raises(UserError, match=reason):
        open_source(save(tmp_path, tensors, section))


def test_a_description_without_quantized_weights_changes_nothing(tmp_path: Path) -> None:
    folder = save(tmp_path, {"a.weight": torch.ones(4, 4)}, None)
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 128}))
    assert not isinstance(open_source(folder), methods.DequantizedSource)


def test_the_width_tells_the_bits_of_a_layer(tmp_path: Path) -> None:
    for bits in (3, 5):
        integers, _, scales = integers_of(bits, 3)
        tensors = packed_tensors(1)
        tensors |= {"a.weight_packed": words_of(integers, bits), "a.weight_scale": scales}
        folder = save(tmp_path, tensors, OTHER_BITS)
        zeros = torch.full((OUTPUTS, 3), 1 << (bits - 1))
        groups = torch.arange(INPUTS) // 32
        assert_reads(folder, "a.weight", product(integers, zeros, scales, groups))


def test_a_model_in_gptq_computes_with_its_values(tmp_path: Path) -> None:
    """All linear layers of a Llama, compared with transformers' model of the same values."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    tensors = {}
    for name, weight in model.state_dict().items():
        if not name.endswith("_proj.weight"):
            tensors[name] = weight.contiguous()
            continue
        layer = name.removesuffix(".weight")
        outputs, inputs = weight.shape
        scale = (weight.abs().amax(1, keepdim=True) / 7).half()
        integers = (weight / scale.float()).round().long() + 8
        tensors[f"{layer}.qweight"] = words_of(integers, 4).T.contiguous()
        tensors[f"{layer}.qzeros"] = words_of(torch.full((1, outputs), 7), 4)
        tensors[f"{layer}.scales"] = scale.T.contiguous()
        tensors[f"{layer}.g_idx"] = torch.zeros(inputs, dtype=torch.int32)
        weight.data.copy_((integers - 8).half() * scale)
    document = json.loads((tmp_path / "config.json").read_text())
    save(tmp_path, tensors)
    section = {"quant_method": "gptq", "bits": 4, "group_size": -1, "checkpoint_format": "gptq"}
    document["quantization_config"] = section
    (tmp_path / "config.json").write_text(json.dumps(document))
    tokens = torch.arange(20)[None]
    loaded = load_model(tmp_path, device="cpu", dtype=torch.float32).model
    # Two implementations of the same float32 computation.
    torch.testing.assert_close(loaded(tokens), model(tokens).logits, rtol=1e-5, atol=1e-5)

    assert main(["convert", "--to", "hf", str(tmp_path), str(tmp_path / "hf")]) == 0
    assert "quantization_config" not in json.loads((tmp_path / "hf/config.json").read_text())
    converted = load_file(tmp_path / "hf/model.safetensors")
    for name, weight in model.state_dict().items():
        assert torch.equal(converted[name].float(), weight), name


def test_scales_that_are_no_numbers_are_named():
    """NaN differs from itself, and would count as several scales."""
    scales = torch.tensor([[1.0, 1.0, float("nan"), float("nan")]])
    with pytest.raises(ValueError, match="some of its scales are NaN"):
        few_bits._first_of(scales, 2)
    with pytest.raises(ValueError, match="2 neighboring inputs have several scales"):
        few_bits._first_of(torch.tensor([[1.0, 2.0]]), 2)
    assert few_bits._first_of(torch.tensor([[1.0, 1.0, 2.0, 2.0]]), 2).tolist() == [[1.0, 2.0]]
