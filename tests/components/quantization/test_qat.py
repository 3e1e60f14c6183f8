"""Quantization-aware training against its formulas, plain runs and other layouts; the exported
quantized model."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors import safe_open
from torch import nn

from tests.processes import run_processes
from tests.training import flags, read_metrics, read_validation, run, tiny_config, train
from torchtitan.cli.main import main
from torchtitan.components.optim.freeze import Freeze
from torchtitan.components.quantization.qat import QAT
from torchtitan.components.tokenizer import EMBEDDED_TOKENIZER
from torchtitan.config.manager import ConfigManager
from torchtitan.models.llama3 import model_registry
from torchtitan.models.pretrained import load_model
from torchtitan.protocols.initializer import initializers_of
from torchtitan.tools.errors import UserError
from torchtitan.trainer.callbacks import RecompileWarning

pytest.importorskip("torchao")


def losses(folder: Path) -> list[tuple[Any, ...]]:
    return read_metrics(folder, "loss", "grad_norm")


def make_model(**options: Any) -> nn.Module:
    """Build a small debug model on the meta device."""
    config = model_registry("debugmodel").model
    for name, value in {
        "vocab_size": 64,
        "dim": 64,
        "n_layers": 2,
        "ffn_dim": 96,
        **options,
    }.items():
        setattr(config, name, value)
    with torch.device("meta"):
        return config.build()


# --- numerics
# --------------------------------------------------------------------------------------------------


def quantized_weight(w: numpy.ndarray, group_size: int) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Return the matrix after int4 quantization per group, and a mask of the elements that were not
    clamped."""
    groups = w.reshape(w.shape[0], -1, group_size)
    scale = numpy.abs(groups).max(axis=-1, keepdims=True) / 7.5
    rounded = numpy.round(groups * (1 / scale))
    return (numpy.clip(rounded, -8, 7) * scale).reshape(w.shape), (
        (rounded >= -8) & (rounded <= 7)
    ).reshape(w.shape)


def quantized_tokens(x: numpy.ndarray) -> numpy.ndarray:
    """Return the rows after int8 quantization per row with a zero point."""
    low, high = (
        numpy.minimum(x.min(-1, keepdims=True), 0),
        numpy.maximum(x.max(-1, keepdims=True), 0),
    )
    scale = (high - low) / 255
    zero = numpy.clip(-128 - numpy.round(low / scale), -128, 127)
    return (numpy.clip(numpy.round(x * (1 / scale)) + zero, -128, 127) - zero) * scale


def test_a_layer_matches_the_formulas():
    """The NumPy reference also rounds in float32: the largest weight of a group is 7.5 scales, and
    the dtype decides how it is rounded. It sums in float64; the tolerance of 1e-5 covers float32
    sums in the layer."""
    torch.manual_seed(0)
    layer = nn.Linear(24, 10)
    nn.init.normal_(layer.weight)
    with torch.no_grad():
        # the largest of its group and positive: rounded to 8, then clamped to 7
        layer.weight[0, 0] = 10.0
    x = torch.randn(3, 7, 24) + 0.3
    x[0, 0].abs_()  # a token without negative values: its minimum is 0
    with torch.device("meta"):
        converted = QAT.Config(group_size=8).build().convert_layer("", nn.Linear(24, 10))
    converted.to_empty(device="cpu").load_state_dict(layer.state_dict())
    y = converted(x)
    weight, kept = quantized_weight(layer.weight.detach().numpy(), 8)
    tokens = quantized_tokens(x.numpy()).astype(numpy.float64)
    bias = layer.bias.detach().numpy()
    numpy.testing.assert_allclose(
        y.detach().numpy(), tokens @ weight.T + bias, rtol=1e-5, atol=1e-5
    )
    assert numpy.abs(tokens @ weight.T - x.numpy() @ layer.weight.detach().numpy().T).max() > 0.1
    # The gradient passes through rounding unchanged, and is 0 for clamped elements.
    y.sum().backward()
    expected = numpy.broadcast_to(tokens.sum((0, 1)), weight.shape) * kept
    assert not kept[0, 0]
    numpy.testing.assert_allclose(converted.weight.grad.numpy(), expected, rtol=1e-5, atol=1e-5)


def test_conversion_keeps_parameter_names_initializers_and_freezing():
    """Checkpoints of the converted and the plain model are interchangeable."""
    model, plain = make_model(), make_model()
    for converter in (Freeze.Config(include=["w1"]).build(), QAT.Config().build()):
        converter.convert(model)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == {
        f"layers.{i}.feed_forward.w1.weight" for i in range(2)
    }
    for name, module in plain.named_modules():
        assert initializers_of(model.get_submodule(name)) == initializers_of(module)
    assert type(model.head.output) is nn.Linear
    assert type(model.layers["0"].attention.wq) is not nn.Linear


# --- runs
# --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_delayed_start(tmp_path):
    """Until `start_step`, the run is bitwise equal to a plain run and can load its checkpoints.
    Resuming is exact before and after the start."""
    saving = {"checkpoint__enable": True, "lr_scheduler__total_steps": 4}
    late = QAT.Config(start_step=2)
    train(tmp_path / "plain")
    train(tmp_path / "late", late)
    train(tmp_path / "immediate", QAT.Config(), training__steps=1)
    plain, delayed, immediate = (losses(tmp_path / name) for name in ("plain", "late", "immediate"))
    assert delayed[:2] == plain[:2]
    assert delayed[2] != plain[2] and delayed[3] != plain[3]
    assert immediate[0] != plain[0]
    for stop in (1, 3):
        folder = tmp_path / f"stopped at {stop}"
        train(folder, late, **saving, training__steps=stop)
        train(folder, late, **saving)
        assert losses(folder) == delayed
    train(tmp_path / "started plain", **saving, training__steps=2)
    train(tmp_path / "started plain", late, **saving)
    assert losses(tmp_path / "started plain") == delayed


@pytest.mark.slow
def test_activation_checkpointing_is_bitwise_exact(tmp_path):
    train(tmp_path / "none", QAT.Config(), training__steps=2)
    train(
        tmp_path / "selective",
        QAT.Config(),
        training__steps=2,
        activation_checkpoint__mode="selective",
    )
    assert losses(tmp_path / "selective") == losses(tmp_path / "none")


@pytest.mark.slow
def test_compiled_run_matches_eager(tmp_path):
    """The model is recompiled once, when the simulation starts. The backend aot_eager keeps all
    operations as they are, so gradients are bitwise equal; a compiled loss also adds up the zeros
    of tokens without a label, in another order."""
    late = QAT.Config(start_step=1)
    train(tmp_path / "eager", late, training__steps=3)
    compiled = train(
        tmp_path / "compiled",
        late,
        training__steps=3,
        compile__enable=True,
        compile__backend="aot_eager",
    )
    for (_, loss, grad_norm), (_, eager_loss, eager_norm) in zip(
        losses(tmp_path / "compiled"), losses(tmp_path / "eager"), strict=True
    ):
        assert loss == pytest.approx(eager_loss, rel=2**-22) and grad_norm == eager_norm
    (warning,) = (
        callback for callback in compiled.callbacks if isinstance(callback, RecompileWarning)
    )
    assert warning.monitor.recompiles == 1


LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {"training__local_batch_size": 1},
    "tensor": {"parallelism__tensor_parallel_degree": 2},
    "pipeline": {
        "parallelism__pipeline_parallel_degree": 2,
        "parallelism__pipeline_parallel_microbatch_size": 1,
        "activation_checkpoint__mode": "full",
    },
}
LAYOUT_QAT = QAT.Config(group_size=64, start_step=1)
"""`wo` has 64 inputs, 32 on each of two tensor-parallel ranks, so one group spans both ranks."""


WARM_UP = {"lr_scheduler__warmup_steps": 3}


def start_options(folder: Path) -> dict[str, Any]:
    """Return options that start from trained weights in `folder`, for which rounding has a visible
    effect."""
    return {"checkpoint__initial_load_path": folder / "trained/checkpoint/step-40", **WARM_UP}


def train_layouts(folder: Path) -> None:
    for name, options in LAYOUTS.items():
        config = tiny_config(folder / name, **options, **start_options(folder))
        config.model_converters = [LAYOUT_QAT]
        config.check(world_size=2)
        run(config)
    for steps in (1, 4):  # stop just before the simulation starts, then resume
        options = {
            **LAYOUTS["fsdp"],
            **start_options(folder),
            "checkpoint__enable": True,
            "lr_scheduler__total_steps": 4,
        }
        config = tiny_config(folder / "resumed", **options, training__steps=steps)
        config.model_converters = [LAYOUT_QAT]
        config.check(world_size=2)
        run(config)


@pytest.mark.slow
def test_two_processes_match_one(tmp_path):
    """A different order of summation sometimes rounds a value to the neighboring quantized value.
    Differences then grow with each step, so only three steps are compared. Measured differences are
    3e-7 without such a value, and 7e-5 (loss) and 2e-4 (gradient norm) with one. The gradient norm
    of a plain run differs by up to 8e-3."""
    train(
        tmp_path / "trained",
        training__steps=40,
        optimizer__lr=1e-2,
        checkpoint__enable=True,
        **WARM_UP,
    )
    run_processes(train_layouts, 2, tmp_path)
    train(tmp_path / "one", LAYOUT_QAT, **start_options(tmp_path))
    train(tmp_path / "plain", **start_options(tmp_path))
    one = losses(tmp_path / "one")
    assert losses(tmp_path / "resumed") == losses(tmp_path / "fsdp")
    for name in LAYOUTS:
        compared = zip(losses(tmp_path / name)[:3], one[:3], strict=True)
        for (step, loss, norm), (_, expected_loss, expected_norm) in compared:
            assert loss == pytest.approx(expected_loss, rel=2e-4), (name, step)
            assert norm == pytest.approx(expected_norm, rel=5e-4), (name, step)
    plain = zip(losses(tmp_path / "plain"), one, strict=True)
    assert (
        max(abs(norm / expected_norm - 1) for (_, _, norm), (_, _, expected_norm) in plain) > 5e-3
    )


# --- the quantized model
# ----------------------------------------------------------------------------------------------

EXCLUDED = r"feed_forward\.w2$"
"""Layers of the stories model with 172 inputs, which no useful group size divides."""


def train_stories(folder: Path, weights: Path, qat: QAT.Config | None, **options: Any) -> float:
    """Fine-tune the stories model in `weights` on the built-in stories; return the last validation
    loss."""
    settings = {
        "dump_folder": folder,
        "dataloader.dataset": "stories",
        "dataloader.num_workers": 0,
        "training.seq_len": 128,
        "training.local_batch_size": 4,
        "training.mixed_precision_param": "float32",
        "optimizer.lr": 1e-3,
        "lr_scheduler.warmup_steps": 0,
        "activation_checkpoint.mode": "none",
        "metrics.enable_tensorboard": False,
        "validator.enable": True,
        "validator.steps": 8,
        **{key.replace("__", "."): value for key, value in options.items()},
    }
    stories = ["--module", "auto", "--config", "pretrain", f"--hf_assets_path={weights}"]
    config = ConfigManager().parse_args([*stories, *flags(settings)]).config
    config.model_converters = [qat] if qat else []
    run(config)
    return read_validation(folder)[-1][1]


STORIES_QAT = QAT.Config(group_size=64, exclude=[EXCLUDED])


@pytest.mark.slow
def test_training_reduces_the_cost_of_quantization(tmp_path, stories):
    plain = train_stories(tmp_path / "plain", stories, None, training__steps=15)
    aware = train_stories(tmp_path / "aware", stories, STORIES_QAT, training__steps=15)
    start = {
        "checkpoint__initial_load_path": tmp_path / "plain/checkpoint/step-15",
        "optimizer__lr": 0.0,
    }
    start |= {
        "checkpoint__initial_load_in_hf": False,
        "checkpoint__enable": False,
        "training__steps": 1,
    }
    rounded = train_stories(tmp_path / "rounded", stories, STORIES_QAT, **start)
    # Measured with four seeds: quantization costs 0.12 to 0.14 after plain training, and 0.04 to
    # 0.08 less here.
    assert plain < aware < rounded - 0.02


@pytest.mark.slow
@torch.no_grad()
def test_the_exported_model_has_the_logits_of_the_trained_model(tmp_path, stories):
    """Transformers loads the exported model."""
    transformers = pytest.importorskip("transformers")
    with torch.enable_grad():
        train_stories(
            tmp_path / "aware", stories, STORIES_QAT, training__steps=1, validator__steps=1
        )
    checkpoint, exported = tmp_path / "aware/checkpoint/step-1", tmp_path / "exported"
    # other settings come from the run
    options = ["--quantize", "int8dyn_int4w", "--max_shard_size", "0.0001"]
    assert main(["convert", str(checkpoint), str(exported), "--to", "hf", *options]) == 0
    assert len(list(exported.glob("*.safetensors"))) > 1
    reference, info = transformers.AutoModelForCausalLM.from_pretrained(
        exported, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    matrices = {
        name
        for name, p in reference.named_parameters()
        if type(p).__name__ == "IntxUnpackedToInt8Tensor"
    }
    assert len(matrices) == 5 * 6 and not any(
        "down_proj" in name or "embed" in name for name in matrices
    )
    model = load_model(checkpoint, device="cpu").model
    tokens = torch.arange(3, 99).reshape(2, 48)
    unquantized = model(tokens)
    STORIES_QAT.build().convert(model)
    theirs = reference(tokens).logits
    scale = theirs.abs().max()
    # Measured: bitwise equal. If sums are rounded differently, the value of a token may differ by
    # one of 255 steps.
    assert (theirs - model(tokens)).abs().max() < 1e-3 * scale
    assert (theirs - unquantized).abs().max() > 2e-2 * scale


def test_an_exported_bfloat16_model(tmp_path):
    """Scales and other weights have the dtype of `--export_dtype`, also in config.json. The
    exported tokenizer, whose configuration would add a leading space, gives the token ids of
    training in transformers."""
    transformers = pytest.importorskip("transformers")
    (tmp_path / "tokenizer.json").write_bytes((EMBEDDED_TOKENIZER / "tokenizer.json").read_bytes())
    declared = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(declared))
    start = {"hf_assets_path": tmp_path, "training__steps": 1}
    trainer = train(tmp_path / "run", checkpoint__enable=True, **start)
    options = ["--to", "hf", "--quantize", "int8dyn_int4w", "--export_dtype", "bfloat16"]
    assert (
        main(["convert", str(tmp_path / "run/checkpoint/step-1"), str(tmp_path / "hf"), *options])
        == 0
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    weight = model.model.layers[0].mlp.down_proj.weight
    assert (weight.scale.dtype, weight.qdata.dtype) == (torch.bfloat16, torch.int8)
    assert (int(weight.qdata.min()), int(weight.qdata.max())) == (-8, 7)
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert (
        json.loads((tmp_path / "hf/config.json").read_text())["quantization_config"]["quant_method"]
        == "torchao"
    )
    text = "The cat ran."
    assert transformers.AutoTokenizer.from_pretrained(tmp_path)(
        text
    ).input_ids != trainer.tokenizer.encode(text)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")(
        text
    ).input_ids == trainer.tokenizer.encode(text)


def n_groups(folder: Path) -> dict[str, int]:
    """Return the groups per row of each quantized matrix in the first layer of an exported
    model."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        scales = {
            name: file.get_slice(name).get_shape() for name in file.keys() if "layers.0" in name
        }
    return {
        name.split(".")[4]: shape[1] for name, shape in scales.items() if name.endswith("scale")
    }


@pytest.mark.parametrize("saved_in_hf", [False, True])
def test_conversion_uses_the_quantization_of_the_run(tmp_path, capsys, saved_in_hf):
    saving = {
        "checkpoint__enable": True,
        "checkpoint__last_save_in_hf": saved_in_hf,
        "training__steps": 1,
    }
    train(
        tmp_path, QAT.Config(group_size=64, include=["attention", "w2"], exclude=["wo"]), **saving
    )
    options = ["--to", "hf", "--quantize", "int8dyn_int4w"]
    assert (
        main(["convert", str(tmp_path / "checkpoint/step-1"), str(tmp_path / "same"), *options])
        == 0
    )
    settings = "group_size 64, include ['attention', 'w2'], exclude ['wo']"
    assert f"quantized as simulated by the run: {settings}" in capsys.readouterr().err
    assert n_groups(tmp_path / "same") == {"q_proj": 1, "k_proj": 1, "v_proj": 1, "down_proj": 2}
    other = [*options, "--group_size", "32"]
    assert (
        main(["convert", str(tmp_path / "checkpoint/step-1"), str(tmp_path / "other"), *other]) == 0
    )
    assert (
        f"quantized differently than simulated by the run, which used {settings}"
        in capsys.readouterr().err
    )
    assert n_groups(tmp_path / "other") == {"q_proj": 2, "k_proj": 2, "v_proj": 2, "down_proj": 4}


# --- refusals
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 1}, "group_size is 1, but must be at least 2"),
        ({"start_step": -1}, "start_step is -1, but must be at least 0"),
        (
            {"group_size": 64},
            r"group_size 64 does not divide the inputs \(96\) of layers\.\*\.feed_forward\.w2; "
            r".*exclude",
        ),
        ({"include": [r"head\.output"]}, r"'head\\.output' matches none"),
    ],
)
def test_layers_that_cannot_be_quantized_are_rejected(options, message):
    with pytest.raises(UserError, match=message):
        QAT.Config(**options).build().check_model(make_model())


def test_missing_torchao_names_the_extra(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *of: None if name == "torchao" else find(name, *of),
    )
    with pytest.raises(
        UserError, match=r"requires torchao: pip install 'torchtitan\[quantization\]'"
    ):
        train(tmp_path, QAT.Config())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--to", "meta", "--quantize", "int8dyn_int4w"],
            "--quantize int8dyn_int4w needs --to hf, not --to meta",
        ),
        (["--to", "hf", "--group_size", "32"], "--group_size has no effect without --quantize"),
        (["--to", "hf", "--exclude", "w2"], "--exclude has no effect without --quantize"),
        (
            ["--to", "hf", "--quantize", "int8dyn_int4w", "--group_size", "7"],
            "group_size 7 does not divide the inputs",
        ),
    ],
)
def test_convert_rejects_invalid_options(tmp_path, stories, capsys, words, message):
    assert main(["convert", str(stories), str(tmp_path / "out"), *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
