"""Quantized Hugging Face checkpoints. All comparisons with transformers are exact."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.components.weights.test_formats import CountingSource
from torchtitan.cli.main import main
from torchtitan.components.weights import open_source
from torchtitan.components.weights.dequantize import DequantizedSource, check_quantization, methods
from torchtitan.components.weights.dequantize.scaled import scaled_weights
from torchtitan.components.weights.few_bits import FewBits, unpack
from torchtitan.config.manager import ConfigManager
from torchtitan.models.pretrained import load_model
from torchtitan.protocols.tensor_source import full_slices
from torchtitan.tools.errors import UserError

transformers = pytest.importorskip("transformers")

FP8 = {"quant_method": "fp8", "weight_block_size": [32, 16]}
POWER = torch.float8_e8m0fnu


def save(folder: Path, tensors: dict[str, Tensor], quantization: Any = FP8) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama", "quantization_config": quantization})
    )
    return folder


def assert_reads(folder: Path, name: str, expected: Tensor) -> None:
    """Check that one tensor is left, whole and in part, also in chunks that are not aligned with
    blocks."""
    source = open_source(folder)
    assert list(source.specs) == [name]
    assert source.specs[name].shape == expected.shape
    assert source.specs[name].dtype == expected.dtype
    assert torch.equal(source.read(name), expected)
    ranges = [
        [(0, size), (size // 3, size - 1), (size // 2, size // 2 + 1)] for size in expected.shape
    ]
    for part in itertools.product(*ranges):
        slices = tuple(slice(*bounds) for bounds in part)
        assert torch.equal(source.read(name, slices), expected[slices])
    assert_keeps(folder, name, expected)


def assert_keeps(folder: Path, name: str, expected: Tensor) -> None:
    """Check that the few bits, kept row by row, have the same values; also those of some rows.
    Experts with a scale for each column are kept by columns."""
    source = open_source(folder)
    if name in source.reasons:
        assert name not in source.forms
        return
    form = FewBits.parse(source.forms[name])
    assert form.text == source.forms[name]
    # as in the files of gpt-oss, and Llama 4's in FP8
    is_transposed = name.endswith("_proj") or (expected.ndim == 3 and form.group == 0)
    expected = expected.mT if is_transposed else expected
    for rows in (slice(0, len(expected)), slice(len(expected) // 2, len(expected) // 2 + 1)):
        parts = []
        for part in form.parts:
            slices = (rows, *full_slices(source.specs[name].shape)[1:])
            plane = source.of_part(part).read(name, slices)
            assert plane.shape == source.specs[name].shape or rows.start
            parts.append(form.pack_part(part, plane.mT if is_transposed else plane))
            assert parts[-1].dtype == torch.uint8
            assert parts[-1].shape == form.part_shape(part, expected[rows].shape)
        assert torch.equal(unpack(form, parts, expected.dtype), expected[rows])


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(methods, "_COMPUTED_ELEMENTS", 333)


@pytest.mark.parametrize(
    ("shape", "scale_shape"),
    [
        ((64, 48), (2, 3)),
        ((64, 48), (64, 1)),
        ((64, 48), (1, 48)),
        ((64, 48), (1, 1)),
        ((64, 48), (1,)),
        ((64, 48), ()),
        ((3, 64, 48), (3, 2, 3)),
        ((3, 64, 48), (3, 1, 1)),
        ((3, 64, 48), (3, 1, 48)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, POWER, torch.uint8], ids=str)
@pytest.mark.parametrize("suffix", ["weight_scale_inv", "scale"])
def test_fp8_equals_transformers(tmp_path, shape, scale_shape, dtype, suffix):
    torch.manual_seed(1)
    values = torch.randn(shape).mul(100).to(torch.float8_e4m3fn)
    exponents = torch.randint(110, 140, scale_shape, dtype=torch.uint8)
    scale = exponents if dtype == torch.uint8 else exponents.view(POWER)
    if dtype.itemsize > 1:
        scale = torch.rand(scale_shape).to(dtype)
    tensors = {"a.weight": values, f"a.{suffix}": scale, "a.activation_scale": torch.tensor(2.0)}
    convert = transformers.integrations.finegrained_fp8.Fp8Dequantize(None)._dequantize_one
    assert_reads(save(tmp_path, tensors), "a.weight", convert(values, scale, torch.bfloat16))


def test_incomplete_blocks_equal_transformers(tmp_path):
    """As in DeepSeek-V3, whose `kv_a_proj_with_mqa` has 4.5 blocks of rows; transformers' loader
    refuses them."""
    torch.manual_seed(1)
    values, scale = torch.randn(72, 45).to(torch.float8_e4m3fn), torch.rand(3, 3)
    convert = transformers.integrations.finegrained_fp8._dequantize_fp8_weight
    expected = convert(values, scale, [32, 16], torch.float32).bfloat16()
    assert_reads(save(tmp_path, {"a": values, "a_scale_inv": scale}), "a", expected)


def test_fp4_with_scales_equals_transformers(tmp_path):
    torch.manual_seed(1)
    values = torch.randint(-128, 128, (24, 64), dtype=torch.int8)
    scale = torch.randint(110, 140, (24, 4), dtype=torch.uint8).view(POWER)
    expected = transformers.integrations.finegrained_fp8.Fp8Dequantize(None)._dequantize_one(
        values, scale, torch.bfloat16
    )
    assert_reads(save(tmp_path, {"a.weight": values, "a.scale": scale}), "a.weight", expected)


def test_mxfp4_equals_transformers(tmp_path):
    """All bytes with all scales, except 255, which is NaN in the standard and infinite in
    transformers."""
    blocks = torch.arange(256, dtype=torch.uint8).repeat(255, 1).reshape(3, 85, 16, 16)
    scales = torch.arange(255, dtype=torch.uint8).reshape(3, 85, 1).repeat(1, 1, 16)
    expected = transformers.integrations.mxfp4.convert_moe_packed_tensors(blocks, scales)
    folder = save(
        tmp_path,
        {"down_proj_blocks": blocks, "down_proj_scales": scales},
        {"quant_method": "mxfp4"},
    )
    assert_reads(folder, "down_proj", expected)


@pytest.mark.parametrize(
    "method", [{"quant_method": "fbgemm_fp8"}, {"quant_method": "compressed-tensors"}], ids=str
)
def test_row_scales_of_other_methods(tmp_path, method):
    """The reference is float64, rounded through float32; transformers needs other packages."""
    torch.manual_seed(1)
    values, scale = torch.randn(64, 48).to(torch.float8_e4m3fn), torch.rand(64, 1)
    tensors = {"a.weight": values, "a.weight_scale": scale, "a.input_scale": torch.ones(1)}
    expected = (values.double() * scale.double()).float().bfloat16()
    assert_reads(
        save(tmp_path, tensors, {**method, "format": "float-quantized"}), "a.weight", expected
    )


def test_only_requested_rows_are_read():
    tensors = {"a": torch.ones(96, 48).to(torch.float8_e4m3fn), "a_scale_inv": torch.ones(3, 3)}
    source = CountingSource(tensors)
    weights = scaled_weights(source.specs, [32, 16])
    DequantizedSource(source, weights).read("a", (slice(30, 40), slice(0, 5)))
    assert source.elements["a"] == 10 * 48


def quantize(folder: Path, quantized: Path) -> Path:
    """Write the model in `folder` with linear layers in FP8 and blocks of 32 x 16."""
    shutil.copytree(folder, quantized)
    tensors = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        tensors[name] = weight.bfloat16()
        if name.endswith("_proj.weight"):
            blocks = weight.float().unflatten(0, (-1, 32)).unflatten(2, (-1, 16))
            scale = blocks.abs().amax((1, 3)) / 448
            tensors[name] = (
                (blocks / scale[:, None, :, None]).reshape(weight.shape).to(torch.float8_e4m3fn)
            )
            tensors[f"{name}_scale_inv"] = scale
    save_file(tensors, quantized / "model.safetensors", {"format": "pt"})
    return change_config(quantized, quantization_config=FP8, dtype="bfloat16")


def change_config(folder: Path, **changes: Any) -> Path:
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(document | changes))
    return folder


SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}


@pytest.fixture
def folder(request, tmp_path, stories):
    """A Qwen3 or other model in FP8 with the tokenizer of the stories model."""
    torch.manual_seed(1)
    kind = getattr(request, "param", "qwen3")
    config = transformers.AutoConfig.for_model(kind, **SIZES, head_dim=16)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "plain")
    shutil.copy(stories / "tokenizer.json", tmp_path / "plain")
    return quantize(tmp_path / "plain", tmp_path / "model")


def read_by_transformers(folder: Path) -> dict[str, Tensor]:
    config = transformers.FineGrainedFP8Config(dequantize=True, weight_block_size=(32, 16))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", quantization_config=config
    )
    return dict(model.state_dict())


@pytest.mark.parametrize("folder", ["llama", "qwen3"], indirect=True)
def test_model_equals_transformers(folder, tmp_path):
    expected, source = read_by_transformers(folder), open_source(folder)
    assert source.specs.keys() == expected.keys()
    assert [
        name for name, tensor in expected.items() if not torch.equal(source.read(name), tensor)
    ] == []
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(
        load_file(tmp_path / "plain/model.safetensors")[name].bfloat16(), expected[name]
    )
    assert main(["convert", "--to", "dcp", str(folder), str(tmp_path / "dcp")]) == 0
    tokens, model = (
        torch.arange(20)[None],
        load_model(tmp_path / "dcp", device="cpu", dtype=torch.float32).model,
    )
    reference = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(folder)
    )
    reference.float().load_state_dict(expected)
    # Two implementations of the same float32 computation.
    torch.testing.assert_close(model(tokens), reference(tokens).logits, rtol=1e-5, atol=1e-5)


def train_words(folder: Path, out: Path) -> list[str]:
    words = [
        "--module",
        "auto",
        "--config",
        "pretrain",
        "--hf_assets_path",
        folder,
        "--dump_folder",
        out,
    ]
    words += [
        "--dataloader.dataset",
        "stories",
        "--training.seq_len",
        "32",
        "--training.local_batch_size",
        "2",
    ]
    words += [
        "--training.steps",
        "1",
        "--checkpoint.enable",
        "--checkpoint.last_save_in_hf",
        "--optimizer.lr",
        "1e-12",
    ]
    return [
        str(word) for word in (*words, "--validator.no_enable", "--metrics.no_enable_tensorboard")
    ]


def test_run_starts_from_it_and_exports_bfloat16(folder, tmp_path, capsys):
    """The learning rate is too low to change a weight in bfloat16."""
    expected = read_by_transformers(folder)
    config = ConfigManager().parse_args(
        [*train_words(folder, tmp_path), "--checkpoint.export_dtype", "bfloat16"]
    )
    trainer = config.config.build()
    trainer.train()
    trainer.close()
    (run,) = (path.parent for path in tmp_path.glob("checkpoint/*/model.safetensors"))
    assert main(["convert", "--to", "hf", str(folder), str(tmp_path / "converted")]) == 0
    for exported in (run, tmp_path / "converted"):
        assert "quantization_config" not in json.loads((exported / "config.json").read_text())
        tensors = load_file(exported / "model.safetensors")
        assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
        assert tensors.keys() == expected.keys()
        assert [
            name for name, tensor in tensors.items() if not torch.equal(tensor, expected[name])
        ] == []
        reference = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
        tokens = torch.arange(20)[None]
        loaded = load_model(exported, device="cpu", dtype=torch.float32).model
        # Two implementations of the same float32 computation.
        torch.testing.assert_close(loaded(tokens), reference(tokens).logits, rtol=1e-5, atol=1e-5)
    capsys.readouterr()
    assert main(["inspect", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "quantized        fp8, read as bfloat16" in out
    assert f"{len(expected)} tensors" in out


SCALE = "model.layers.1.mlp.up_proj.weight_scale_inv"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, f"model.layers.1.mlp.up_proj.weight is quantized, but its scale {SCALE} is missing"),
        (
            torch.ones(3, 3),
            f"{SCALE}, float32 [3, 3], cannot scale the weight {SCALE[:-10]} [96, 64]",
        ),
        (torch.ones(96), f"{SCALE}, float32 [96], cannot scale"),
        # of blocks along one dimension only
        (torch.ones(1, 4), f"{SCALE}, float32 [1, 4], cannot scale"),
        (torch.ones(3, 1), f"{SCALE}, float32 [3, 1], cannot scale"),
        (torch.ones(3, 4, dtype=torch.int32), f"{SCALE}, int32 [3, 4], cannot scale"),
    ],
)
def test_wrong_scale_is_named(folder, tmp_path, capsys, change, message):
    tensors = load_file(folder / "model.safetensors")
    del tensors[SCALE]
    if change is not None:
        tensors[SCALE] = change
    save_file(tensors, folder / "model.safetensors")
    for words in (
        ["train", *train_words(folder, tmp_path)],
        ["convert", "--to", "dcp", folder, tmp_path / "out"],
    ):
        assert main([str(word) for word in words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
    assert main(["inspect", str(folder)]) == 3
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("blocks", "scales", "message"),
    [
        (
            (2, 8, 3, 16),
            (2, 8, 1),
            "e_scales, uint8 [2, 8, 1], cannot scale the weight e_blocks [2, 8, 96]",
        ),
        (
            (2, 8, 3, 16),
            (2, 8, 3, 1),
            "e_scales, uint8 [2, 8, 3, 1], cannot scale the weight e_blocks [2, 8, 96]",
        ),
        (
            (2, 8, 3, 8),
            (2, 8, 3),
            "e_scales, uint8 [2, 8, 3], cannot scale the weight e_blocks [2, 8, 48]",
        ),
        ((2, 8, 3, 16), None, "e_blocks is quantized, but its scale e_scales is missing"),
    ],
)
def test_wrong_blocks_are_named(tmp_path, blocks, scales, message):
    tensors = {"e_blocks": torch.zeros(blocks, dtype=torch.uint8)}
    if scales:
        tensors["e_scales"] = torch.zeros(scales, dtype=torch.uint8)
    with pytest.raises(UserError) as caught:
        open_source(save(tmp_path, tensors, {"quant_method": "mxfp4"}))
    assert message in str(caught.value)


@pytest.mark.parametrize("value", [[128], [0, 128], [1.5, 2], "x", [True, 1]], ids=str)
def test_wrong_block_size_is_named(tmp_path, value):
    folder = save(
        tmp_path, {"a": torch.zeros(2)}, {"quant_method": "fp8", "weight_block_size": value}
    )
    with pytest.raises(
        UserError, match="weight_block_size is .* must be two whole numbers above 0"
    ):
        open_source(folder)


def test_other_methods_are_refused_by_name(folder, tmp_path, capsys):
    change_config(folder, quantization_config={"quant_method": "aqlm", "bits": 4})
    message = "quantization_config has 'aqlm', and only weights of fp8, "
    own = [
        "--module",
        "llama3",
        "--config",
        "debugmodel",
        "--checkpoint.enable",
        "--dump_folder",
        tmp_path,
    ]
    own += ["--checkpoint.initial_load_in_hf", "--checkpoint.initial_load_path", folder]
    convert = ["convert", "--to", "dcp", folder, tmp_path / "out"]
    for words in (["train", *train_words(folder, tmp_path)], ["train", *own], convert):
        assert main([str(word) for word in words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
    assert main(["inspect", str(folder)]) == 0, "it is intact"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("place", ["hf_quant_config.json", "config.json", "compressed-tensors"])
def test_scales_of_keys_and_values_alone_are_ignored(tmp_path, place):
    """Of folders that quantize the cache of an inference engine, and no weights."""
    weight = torch.randn(4, 4, dtype=torch.bfloat16)
    scales = {f"attn.{name}_proj.{name}_scale": torch.tensor(0.5) for name in ("k", "v")}
    section = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    if place == "compressed-tensors":
        scheme = {"num_bits": 8, "type": "float", "strategy": "tensor"}
        section = {"quant_method": place, "format": "dense", "kv_cache_scheme": scheme}
    beside = place == "hf_quant_config.json"
    save(tmp_path, {"attn.k_proj.weight": weight, **scales}, None if beside else section)
    if beside:
        (tmp_path / place).write_text(json.dumps({"quantization": section}))
    check_quantization(tmp_path)
    source = open_source(tmp_path)
    assert list(source.specs) == ["attn.k_proj.weight"]
    assert torch.equal(source.read("attn.k_proj.weight"), weight)


def test_a_refusal_names_the_file_that_describes_the_weights(tmp_path):
    save(tmp_path, {"a": torch.zeros(2)}, None)
    described = {"quantization": {"quant_algo": "INT4_AWQ", "group_size": 128}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(described))
    with pytest.raises(UserError, match=r"^/.*/hf_quant_config\.json has 'modelopt \(INT4_AWQ\)'"):
        check_quantization(tmp_path)


@pytest.mark.parametrize("keys", [("quantization",), ("quantization", "quantization_config")])
def test_weights_of_mlx_are_refused_by_name(tmp_path, keys):
    document = dict.fromkeys(keys, {"group_size": 64, "bits": 4})
    (tmp_path / "config.json").write_text(json.dumps(document))
    with pytest.raises(UserError, match="quantization says that mlx-lm wrote .* cannot be loaded"):
        check_quantization(tmp_path)


@pytest.mark.parametrize(
    ("quantization", "method"),
    [
        ({"quant_method": "aqlm"}, "'aqlm'"),
        (
            {"quant_method": "compressed-tensors", "format": "marlin-24"},
            r"'compressed-tensors \(marlin-24\)'",
        ),
        ({"quant_algo": "W4A16_AWQ"}, r"'modelopt \(W4A16_AWQ\)'"),
        ({"bits": 4}, "has no quant_method, but bits; add the method"),
        ("hqq", "'hqq'"),
    ],
    ids=str,
)
@pytest.mark.parametrize("key", ["quantization_config", "text_config"])
def test_method_is_found(tmp_path, quantization, method, key):
    """Also in the part of a config.json that describes the language model of several."""
    section = {"quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(section if key in section else {key: section}))
    with pytest.raises(UserError, match=method):
        check_quantization(tmp_path)


def test_a_file_of_its_own_comes_before_the_section_of_the_language_model(tmp_path):
    """NVIDIA's NVFP4 of Kimi K2.5 keeps the section of the model that it was made from."""
    old = {
        "quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    }
    (tmp_path / "config.json").write_text(json.dumps({"text_config": old}))
    assert methods.read_method(tmp_path)[0] == "compressed-tensors (pack-quantized)"
    described = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(described))
    assert methods.read_method(tmp_path)[0] == "modelopt (NVFP4)"
