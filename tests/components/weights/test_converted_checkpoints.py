"""Checkpoints of converted models: adapters, 4-bit weights, and a custom converter."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.commands import RunningCommand
from tests.conftest import PROJECT
from tests.pretrained import FLOAT32, assert_equal, from_folder, make_pretrained, read_weights
from tests.processes import run_processes
from tests.training import read_metrics, tiny_config, train
from torchtitan.cli.main import main
from torchtitan.components.checkpoint import (
    CheckpointManager,
    CheckpointSaveError,
    ModelState,
    catalog,
)
from torchtitan.components.checkpoint.dcp import DcpSource
from torchtitan.components.peft import LoRA, QLoRA
from torchtitan.components.tokenizer import EMBEDDED_TOKENIZER
from torchtitan.components.weights import ConvertedView, HuggingFaceSource, PlainView, TensorSource
from torchtitan.components.weights.pretrained import frozen_weights, is_as_saved
from torchtitan.models.pretrained import internal_source, load_model
from torchtitan.protocols import ModelConverter
from torchtitan.protocols.conversion import converted_model, converter_records, differences
from torchtitan.protocols.converter import LayerConverter
from torchtitan.protocols.initializer import (
    Constant,
    DerivedRows,
    initializer_of,
    with_initializers,
)
from torchtitan.protocols.model import ConvertedModule
from torchtitan.protocols.sharding import with_features
from torchtitan.protocols.tensor_source import TensorSpec, slice_shape
from torchtitan.tools.errors import UserError

SAVING = {**FLOAT32, "checkpoint__enable": True, "checkpoint__interval": 2}
HEAD_TOO = [r"\blayers\.", r"^head\.output$"]


# --- a custom converter
# -----------------------------------------------------------------------------------------------


def lengths(rows):
    return rows.norm(dim=1)


def directions(rows):
    return rows / lengths(rows)[:, None]


class WeightNorm(ConvertedModule, nn.Linear):
    """`(length + more) · direction` per row (arXiv:1602.07868), with frozen directions."""

    def __init__(self, linear: nn.Linear):
        nn.Module.__init__(self)
        plain, start = linear.weight, initializer_of(linear, "weight")
        self.in_features, self.out_features, self.bias = (
            linear.in_features,
            linear.out_features,
            None,
        )
        self.direction = nn.Parameter(torch.empty_like(plain), requires_grad=False)
        self.length = nn.Parameter(plain.new_empty(plain.shape[0]))
        self.more = nn.Parameter(plain.new_empty(plain.shape[0]))
        self._derived = {
            "direction": DerivedRows("weight", plain.shape, start, directions),
            "length": DerivedRows("weight", plain.shape, start, lengths),
        }
        with_initializers(self, **self._derived, more=Constant(0.25))
        with_features(self, direction=("out", "in"), length=("out",), more=("out",))

    @property
    def derived(self):
        return self._derived

    @property
    def added(self):
        return ("more",)

    def plain_state(self, own):
        return {"weight": (own["length"] + own["more"])[:, None] * own["direction"]}

    def effective_weight(self):
        return (self.length + self.more)[:, None] * self.direction

    def forward(self, x):
        return nn.functional.linear(x, self.effective_weight())


class Normed(LayerConverter):
    changes_weights = True

    @dataclass(kw_only=True, slots=True)
    class Config(LayerConverter.Config):
        more: float | None = None
        """Initial value of `more`. None: 0.25."""

    def convert_layer(self, name, layer):
        return WeightNorm(layer)

    def load_initial_weights(self, model_parts, spec):
        if self.config.more is not None:
            for name, parameter in [
                pair for part in model_parts for pair in part.named_parameters()
            ]:
                if name.endswith(".more"):
                    parameter.data.fill_(self.config.more)

    def write_export_files(self, folder, spec, model, read):
        (folder / "extra").mkdir()
        (folder / "extra" / "lengths.json").write_text(
            json.dumps(read("layers.0.attention.wq.length").tolist())
        )


NORMED = Normed.Config(include=[r"\.w[qko123]$"])
LORA = LoRA.Config(rank=4, alpha=8.0, include=HEAD_TOO)
DORA = LoRA.Config(rank=4, alpha=8.0, dora=True, include=HEAD_TOO)
QLORA = QLoRA.Config(rank=4, alpha=8.0, exclude=[r"\.wo$"])
CONVERTERS = {"custom": [NORMED], "dora": [DORA], "qlora": [QLORA]}


class TrainOutput(ModelConverter):
    """Trains only the output weights, without converting a layer."""

    def convert(self, model):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith("head.output"))


# --- helpers
# --------------------------------------------------------------------------------------------------


def initial_weights(folder: Path, converters: list[Any], **options: Any) -> dict[str, torch.Tensor]:
    """Return the initial weights of a run, unsharded."""
    config = tiny_config(folder, **options)
    config.model_converters = converters
    config.check(world_size=int(os.environ.get("WORLD_SIZE", 1)))
    trainer = config.build()
    try:
        trainer.load_checkpoint()
        return whole_weights(trainer)
    finally:
        trainer.close()


def check(folder: Path, converters: list[Any], **options: Any) -> None:
    """Check a run as before any process starts."""
    config = tiny_config(folder, **options)
    config.model_converters = converters
    config.check(world_size=1)


def whole_weights(trainer: Any) -> dict[str, torch.Tensor]:
    state = ModelState(trainer.model_parts).state_dict()
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in state.items()
    }


def step(folder: Path, number: int) -> Path:
    return folder / "checkpoint" / f"step-{number}"


def logits_of(path: Path) -> torch.Tensor:
    """Return the logits of a checkpoint in any format."""
    loaded = load_model(path, device="cpu")
    with torch.no_grad():
        return loaded.model(torch.arange(24).view(2, 12)).float()


def logits_in_training(trainer: Any) -> torch.Tensor:
    (model,) = trainer.model_parts
    model.eval()
    with torch.no_grad():
        return model(torch.arange(24).view(2, 12)).float()


class RecordingSource(TensorSource):
    """Tensors in memory that record the slices read."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        self.tensors, self.parts = tensors, []
        self.specs = {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}

    def read(self, name, slices=None):
        self.parts.append((name, None if slices is None else slice_shape(slices)))
        return self.tensors[name] if slices is None else self.tensors[name][slices]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA run from pre-trained weights; step 2 is a full checkpoint, step 4 a Hugging Face
    folder."""
    folder = tmp_path_factory.mktemp("adapted")
    source = make_pretrained(folder / "source")
    train(
        folder,
        LORA,
        **SAVING,
        **from_folder(source),
        checkpoint__last_save_in_hf=True,
        optimizer__lr=0.02,
    )
    return folder


# --- views
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "converter", [NORMED, LORA, DORA, QLORA], ids=["custom", "lora", "dora", "qlora"]
)
def test_slices_equal_slices_of_the_whole(tmp_path, converter):
    """Only the requested rows are read from the file."""
    spec = tiny_config(tmp_path, model__vocab_size=256).model_spec
    plain = spec.model.build()
    source = RecordingSource({name: torch.randn(t.shape) for name, t in plain.state_dict().items()})
    model = converted_model(spec.model, [converter.build()])
    view = ConvertedView(source, model)
    missing = model.state_dict().keys() - view.specs.keys()
    assert missing and missing == ModelState([model]).added
    for name, form in view.specs.items():
        tensor, own = view.read(name), model.state_dict()[name]
        assert tensor.shape == form.shape == own.shape and tensor.dtype == form.dtype
        rows = slice(3, 11)
        columns = [slice(0, size // 2) for size in form.shape[1:]]
        source.parts.clear()
        assert torch.equal(view.read(name, (rows, *columns)), tensor[(rows, *columns)])
        assert [shape[0] for _, shape in source.parts] == [8]
    # With added parameters of 0, the plain weights are the original ones.
    own = {
        name: view.read(name) if name in view.specs else torch.zeros(model.state_dict()[name].shape)
        for name in model.state_dict()
    }
    back = PlainView(RecordingSource(own), model, [])
    assert list(back.specs) == list(plain.state_dict())
    for name in back.specs:
        # In 4 bits, the error is at most half the largest distance of two levels, 0.152 of the
        # largest value of the block; otherwise it is float32 rounding.
        rounding = 0.16 * 5 if isinstance(converter, QLoRA.Config) else 1e-5
        assert torch.allclose(back.read(name).float(), source.tensors[name], atol=rounding), name


def test_mismatched_weights_are_named(tmp_path):
    spec = tiny_config(tmp_path, model__vocab_size=256).model_spec
    model = converted_model(spec.model, [LORA.build()])
    tensors = {name: torch.zeros(tensor.shape) for name, tensor in model.state_dict().items()}
    del tensors["layers.1.attention.wq.lora_A"]
    tensors["layers.0.attention.wq.lora_B"] = torch.zeros(64, 3)
    with pytest.raises(
        UserError, match=r"layers.1.attention.wq.lora_A missing.*wq.lora_B \[64, 3\] \(the model"
    ):
        PlainView(RecordingSource(tensors), model, [])


# --- starting from pre-trained weights
# --------------------------------------------------------------------------------


def _start_in_two_layouts(folder: Path, source: Path, name: str) -> None:
    expected = torch.load(folder / "expected.pt")
    for layout in ("data_parallel_shard_degree", "tensor_parallel_degree"):
        options = {**FLOAT32, **from_folder(source), f"parallelism__{layout}": 2}
        assert_equal(expected, initial_weights(folder / layout, CONVERTERS[name], **options))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dora", "custom", "qlora"])
def test_initial_weights_are_the_same_in_every_layout(tmp_path, name):
    """In one process, with FSDP, and with tensor parallelism, exactly."""
    source = make_pretrained(tmp_path / "source")
    expected = initial_weights(tmp_path / "one", CONVERTERS[name], **FLOAT32, **from_folder(source))
    torch.save(expected, tmp_path / "expected.pt")
    run_processes(_start_in_two_layouts, 2, tmp_path, source, name)


def test_initial_weights(tmp_path):
    """Plain weights come from the file, added ones from the seed, and derived ones follow from
    plain ones."""
    source = make_pretrained(tmp_path / "source")
    plain = read_weights(source)
    weights = initial_weights(tmp_path / "run", [NORMED], **FLOAT32, **from_folder(source))
    assert torch.equal(weights["tok_embeddings.weight"], plain["model.embed_tokens.weight"])
    expected = lengths(plain["model.layers.0.mlp.down_proj.weight"])
    assert torch.equal(weights["layers.0.feed_forward.w2.length"], expected)
    lora = initial_weights(tmp_path / "lora", [LORA], **FLOAT32, **from_folder(source))
    seeded = initial_weights(tmp_path / "seeded", [LORA], **FLOAT32)
    added = [key for key in lora if key.endswith((".lora_A", ".lora_B"))]
    assert added and all(torch.equal(lora[key], seeded[key]) for key in added)
    # Derived parameters follow from the frozen weights after these were rounded.
    bfloat16 = {"training__mixed_precision_param": "bfloat16", **from_folder(source)}
    lower = initial_weights(tmp_path / "lower", [DORA], **bfloat16)
    weight = lower["layers.0.attention.wq.weight"]
    assert weight.dtype == torch.bfloat16
    magnitude = lower["layers.0.attention.wq.magnitude"]
    assert torch.allclose(magnitude, lengths(weight.float()), rtol=1e-6, atol=0)
    assert not torch.allclose(
        magnitude, lengths(plain["model.layers.0.self_attn.q_proj.weight"]), rtol=1e-6, atol=0
    )


@pytest.mark.slow
def test_a_converter_may_set_initial_weights(tmp_path):
    """The converter sets them in a new run, but not in a resumed one."""
    converter = Normed.Config(include=NORMED.include, more=3.0)
    for options in ({}, from_folder(make_pretrained(tmp_path / "source"))):
        weights = initial_weights(tmp_path / "new", [converter], **FLOAT32, **options)
        assert (weights["layers.0.attention.wq.more"] == 3.0).all()
    train(tmp_path / "run", converter, **SAVING, training__steps=2, lr_scheduler__total_steps=4)
    resumed = initial_weights(tmp_path / "run", [converter], **SAVING)
    assert (resumed["layers.0.attention.wq.more"] != 3.0).any()
    assert torch.equal(
        resumed["layers.0.attention.wq.more"],
        DcpSource(step(tmp_path / "run", 2)).read("layers.0.attention.wq.more"),
    )


def test_a_mismatched_file_is_rejected_before_any_process_starts(tmp_path):
    other = make_pretrained(tmp_path / "other", vocab_size=96)
    config = tiny_config(tmp_path / "run", **from_folder(other))
    config.model_converters = [LORA]
    with pytest.raises(UserError, match="embed_tokens"):
        config.check(world_size=2)
    train(tmp_path / "own", **SAVING, model__ffn_dim=96, training__steps=2)
    config = tiny_config(tmp_path / "run", checkpoint__initial_load_path=step(tmp_path / "own", 2))
    config.model_converters = [LORA]
    with pytest.raises(UserError, match="feed_forward.w1.weight"):
        config.check(world_size=2)


def test_quantized_weights_are_rejected(tmp_path):
    """8-bit weights mean nothing without their scales."""
    from safetensors.torch import load_file, save_file

    source = make_pretrained(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name].to(torch.int8)}, source / "model.safetensors")
    with pytest.raises(UserError, match=r"feed_forward.w3.weight \(int8\) quantized"):
        initial_weights(tmp_path / "run", [QLORA], **FLOAT32, **from_folder(source))


# --- opening and exporting checkpoints of converted models
# ------------------------------------------------------------


def test_merged_export_is_base_plus_adapter(adapted):
    """Merged weights are W + alpha / rank B A."""
    before, after = read_weights(adapted / "source"), read_weights(step(adapted, 4))
    adapter = DcpSource(step(adapted, 2))
    names = {"model.layers.1.self_attn.q_proj": "layers.1.attention.wq", "lm_head": "head.output"}
    for external, internal in names.items():
        lora_A, lora_B = adapter.read(f"{internal}.lora_A"), adapter.read(f"{internal}.lora_B")
        assert lora_B.abs().max() > 1e-3
        merged = internal_source(step(adapted, 2))[1].read(f"{internal}.weight")
        # One rounding of float32 at values up to 1.
        assert torch.allclose(
            merged, before[f"{external}.weight"] + 2 * (lora_B @ lora_A), rtol=0, atol=1e-6
        )
        assert not torch.equal(after[f"{external}.weight"], before[f"{external}.weight"])
    assert torch.equal(after["model.norm.weight"], before["model.norm.weight"])


@pytest.mark.slow
def test_logits_equal_the_logits_in_training(tmp_path):
    """Of the converted model in training, of the plain model from its checkpoint, and of
    transformers from the export. The order of float32 products differs."""
    from transformers import AutoModelForCausalLM

    for name, converters in CONVERTERS.items():
        folder = tmp_path / name
        options = {
            "checkpoint__last_save_in_hf": True,
            "checkpoint__export_dtype": "float32",
            "optimizer__lr": 0.01,
        }
        trainer = train(folder, *converters, **SAVING, **options, training__steps=3)
        expected = logits_in_training(trainer)
        with torch.no_grad():
            theirs = AutoModelForCausalLM.from_pretrained(step(folder, 3))(
                torch.arange(24).view(2, 12)
            ).logits
        # Merged 4-bit weights are rounded to bfloat16 (8 bits); the run multiplies without merging.
        rounding = 2e-2 if name == "qlora" else 1e-5
        assert torch.allclose(
            theirs, expected, rtol=rounding, atol=rounding * expected.abs().max()
        ), name
        trainer = train(tmp_path / f"{name}-full", *converters, **SAVING, training__steps=2)
        expected = logits_in_training(trainer)
        found = logits_of(step(tmp_path / f"{name}-full", 2))
        assert torch.allclose(
            found, expected, rtol=rounding, atol=rounding * expected.abs().max()
        ), name


def test_generate_opens_an_adapter_checkpoint(adapted, tmp_path, capsys):
    """The generated text equals the text of the merged model that `convert` writes."""
    assert main(["convert", str(step(adapted, 2)), str(tmp_path / "merged"), "--to", "hf"]) == 0
    capsys.readouterr()
    texts = []
    for path in (step(adapted, 2), tmp_path / "merged"):
        words = [
            "generate",
            "--checkpoint",
            str(path),
            "--prompt",
            "Once",
            "--max_new_tokens",
            "12",
        ]
        assert main([*words, "--temperature", "0"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and len(texts[0]) > len("Once\n")


def test_inspect_shows_adapters_and_converters(adapted, capsys):
    assert main(["inspect", str(step(adapted, 2)), "--tensors"]) == 0
    printed = capsys.readouterr().out
    assert (
        "layers.0.attention.wq.lora_A" in printed
        and "converters       torchtitan.components.peft" in printed
    )


@pytest.mark.slow
def test_files_of_converters_are_part_of_the_checkpoint(tmp_path, capsys):
    """In the final folder of a run, with digests, and in the folder that `convert` writes."""
    train(tmp_path, NORMED, **SAVING, checkpoint__last_save_in_hf=True, training__steps=3)
    folder = step(tmp_path, 3)
    written = folder / "extra" / "lengths.json"
    assert len(json.loads(written.read_text())) == 64
    assert "converters" not in json.loads((folder / "assets" / "model.json").read_text())
    assert catalog.verify(folder) == []
    n_bytes = written.stat().st_size
    written.write_text("[]")
    assert catalog.verify(folder) == [f"extra/lengths.json has 2 bytes instead of {n_bytes}"]
    written.unlink()
    assert catalog.verify(folder) == ["extra/lengths.json is missing"]
    assert main(["convert", str(step(tmp_path, 2)), str(tmp_path / "out"), "--to", "hf"]) == 0
    expected = DcpSource(step(tmp_path, 2)).read("layers.0.attention.wq.length").tolist()
    assert json.loads((tmp_path / "out" / "extra" / "lengths.json").read_text()) == expected


@pytest.mark.slow
def test_export_dtype_does_not_change_quantized_weights(tmp_path):
    options = {**SAVING, "checkpoint__last_save_model_only": True, "training__steps": 3}
    train(tmp_path / "bf16", QLORA, **options, checkpoint__export_dtype="bfloat16")
    forms = DcpSource(step(tmp_path / "bf16", 3)).specs
    types = {
        name.rpartition(".")[2]: form.dtype
        for name, form in forms.items()
        if "layers.0.attention.wq" in name
    }
    quantized = dict.fromkeys(("packed", "scales", "scale_ranges"), torch.uint8)
    assert types == {**quantized, "lora_A": torch.bfloat16, "lora_B": torch.bfloat16}
    assert forms["tok_embeddings.weight"].dtype == torch.bfloat16
    train(tmp_path / "hf", QLORA, **SAVING, checkpoint__last_save_in_hf=True, training__steps=3)
    forms = HuggingFaceSource(step(tmp_path / "hf", 3)).specs
    assert forms["model.layers.0.mlp.up_proj.weight"].dtype == torch.bfloat16
    assert forms["lm_head.weight"].dtype == torch.float32


@pytest.mark.slow
def test_a_missing_converter_is_named(adapted, tmp_path):
    path = tmp_path / "step-2"
    shutil.copytree(step(adapted, 2), path)
    description = json.loads((path / "assets" / "model.json").read_text())
    base = description["converters"][0]["config"]["base_path"]
    assert Path(base).name == "source"  # of the run's initial weights
    assert description["converters"] == converter_records(
        [dataclasses.replace(LORA, base_path=base)]
    )
    for gone, words in {
        "nowhere.converters:Mine": "which is not built in; .* --module",
        "this:Zen": "which is not built in; .* --module",  # importable, but not imported
        "torchtitan.components.gone:Mine": "importing .* failed: .*torchtitan.components.gone",
        "torchtitan.components.peft:Mine": "which is not a ModelConverter",
        "torch.nn:Linear": "which is not a ModelConverter",
    }.items():
        description["converters"][0]["class"] = gone
        (path / "assets" / "model.json").write_text(json.dumps(description))
        with pytest.raises(UserError, match=f"the converter {gone}.* {words}"):
            internal_source(path)
    assert "this" not in sys.modules


# --- starting from a checkpoint of another run
# ------------------------------------------------------------------------


@pytest.mark.slow
def test_starting_from_an_adapter_checkpoint(adapted, tmp_path):
    """Weights are loaded unchanged for the same converters, merged for none, and merged and
    converted for others."""
    path = step(adapted, 2)
    saved, merged = DcpSource(path), internal_source(path)[1]
    from_it = {**FLOAT32, "checkpoint__initial_load_path": path}
    same = initial_weights(tmp_path / "same", [LORA], **from_it)
    assert_equal({name: saved.read(name) for name in saved.specs}, same)
    plain = initial_weights(tmp_path / "plain", [], **from_it)
    assert_equal({name: merged.read(name) for name in merged.specs}, plain)
    other = initial_weights(tmp_path / "other", [DORA], **from_it)
    assert torch.equal(other["layers.0.attention.wq.weight"], plain["layers.0.attention.wq.weight"])
    assert torch.equal(other["head.output.weight"], plain["head.output.weight"])
    assert not other["layers.0.attention.wq.lora_B"].any()
    with pytest.raises(UserError, match="other model_converters"):
        initial_weights(
            tmp_path / "all", [DORA], **from_it, checkpoint__no_initial_load_model_only=True
        )


@pytest.mark.slow
def test_other_training_options_keep_the_adapters(adapted, tmp_path, caplog):
    """If only options differ that do not affect the meaning of the weights, these are loaded
    unchanged."""
    train(tmp_path / "qlora", QLORA, **SAVING, training__steps=2, optimizer__lr=0.01)
    for folder, config, change in (
        (tmp_path / "qlora", QLORA, {"dropout": 0.1, "exclude": [r"attention\.wo$"]}),
        (adapted, LORA, {"include": ["."], "exclude": ["tok_embeddings"]}),
    ):
        saved, from_it = (
            DcpSource(step(folder, 2)),
            {**FLOAT32, "checkpoint__initial_load_path": step(folder, 2)},
        )
        weights = initial_weights(
            tmp_path / "next", [dataclasses.replace(config, **change)], **from_it
        )
        assert_equal({name: saved.read(name) for name in saved.specs}, weights)
    assert "merged" not in caplog.text
    # An option that is missing in an older checkpoint counts as its default.
    older = tmp_path / "step-2"
    shutil.copytree(step(adapted, 2), older)
    description = json.loads((older / "assets" / "model.json").read_text())
    del description["converters"][0]["config"]["rslora"]
    (older / "assets" / "model.json").write_text(json.dumps(description))
    spec, _ = internal_source(older)
    assert is_as_saved(older, spec, [LORA.build()])
    assert not is_as_saved(older, spec, [dataclasses.replace(LORA, rslora=True).build()])
    two = [LoRA.Config(include=["attention"]), QLoRA.Config(include=["feed_forward"])]
    assert differences(converter_records(two), [config.build() for config in reversed(two)]) == []


@pytest.mark.slow
def test_merging_other_adapters_is_logged(adapted, tmp_path, caplog):
    from_it = {**FLOAT32, "checkpoint__initial_load_path": step(adapted, 2)}
    initial_weights(tmp_path / "alpha", [dataclasses.replace(LORA, alpha=1.0)], **from_it)
    assert (
        "step-2 was saved with other model_converters (--model_converters.lora.alpha was 8.0 and "
        "is 1.0)" in caplog.text
    )
    caplog.clear()
    initial_weights(
        tmp_path / "layers", [dataclasses.replace(LORA, include=["attention"])], **from_it
    )
    assert "for other layers or sizes): its adapters are merged into the weights" in caplog.text
    caplog.clear()
    initial_weights(tmp_path / "plain", [], **from_it)
    assert "merged" not in caplog.text


def test_adapter_path_is_checked_for_new_runs(adapted, tmp_path):
    """Checked before any process starts, and not when the run resumes."""
    exported = str(step(adapted, 4) / "adapter")
    begin_from = {"checkpoint__initial_load_path": step(adapted, 2)}
    check(tmp_path, [dataclasses.replace(LORA, adapter_path=exported)], **FLOAT32)
    with pytest.raises(
        UserError,
        match=r"the adapter has other layers .*only in the file: .*layers\.0\.feed_forward\.w1",
    ):
        check(
            tmp_path,
            [dataclasses.replace(LORA, include=["attention"], adapter_path=exported)],
            **FLOAT32,
        )
    gone = dataclasses.replace(LORA, adapter_path=str(tmp_path / "gone"))
    with pytest.raises(UserError, match="the folder '.*gone' has no adapter_config.json"):
        check(tmp_path, [gone], **FLOAT32)
    with pytest.raises(
        UserError, match="adapter_path .*gone: --checkpoint.initial_load_path already has adapters"
    ):
        check(tmp_path, [gone], **FLOAT32, **begin_from)
    check(adapted, [gone], **SAVING, **from_folder(adapted / "source"), training__steps=6)


@pytest.mark.slow
def test_an_initial_checkpoint_is_digested_once(adapted, tmp_path, monkeypatch):
    digested: list[str] = []
    find_damage = catalog.find_damage

    def counted(folder, ranks, *, only=None):
        if only is None:
            digested.append(str(folder))
        return find_damage(folder, ranks, only=only)

    monkeypatch.setattr(catalog, "find_damage", counted)
    path = step(adapted, 2)
    everything = {"checkpoint__no_initial_load_model_only": True}
    for converters, options in (([LORA], {}), ([DORA], {}), ([], {}), ([LORA], everything)):
        initial_weights(
            tmp_path / "run", converters, **FLOAT32, checkpoint__initial_load_path=path, **options
        )
        assert digested == [str(path)]
        digested.clear()


def test_starting_from_a_plain_checkpoint(tmp_path):
    """Adapters are initialized, and plain weights loaded."""
    trainer = train(tmp_path / "plain", **SAVING, training__steps=2)
    plain, from_it = (
        whole_weights(trainer),
        {"checkpoint__initial_load_path": step(tmp_path / "plain", 2)},
    )
    weights = initial_weights(tmp_path / "adapted", [LORA], **FLOAT32, **from_it)
    assert_equal(plain, {name: tensor for name, tensor in weights.items() if "lora" not in name})


# --- resuming
# --------------------------------------------------------------------------------------------------


def assert_resuming_is_exact(folder: Path, converters: list[Any], **options: Any) -> None:
    """Check that two steps and two resumed steps equal four steps, exactly."""
    options = {**SAVING, "lr_scheduler__total_steps": 4, "optimizer__lr": 0.01, **options}
    train(folder / "resumed", *converters, **options, training__steps=2)
    resumed = train(folder / "resumed", *converters, **options)
    straight = train(folder / "straight", *converters, **options)
    metrics = [read_metrics(folder / name, "loss", "grad_norm") for name in ("resumed", "straight")]
    assert len(metrics[0]) == 4 and metrics[0] == metrics[1]
    assert_equal(whole_weights(resumed), whole_weights(straight))


DROPOUT = QLoRA.Config(rank=4, alpha=8.0, dora=True, dropout=0.1)
SLOW = {"marks": pytest.mark.slow}


@pytest.mark.parametrize(
    ("converter", "is_pretrained", "save_trainable_only"),
    [
        pytest.param(DROPOUT, True, False, id="qdora-pretrained"),
        pytest.param(QLORA, True, True, id="qlora-pretrained-trainable_only", **SLOW),
        pytest.param(NORMED, False, False, id="custom-seeded", **SLOW),
        pytest.param(NORMED, False, True, id="custom-seeded-trainable_only", **SLOW),
    ],
)
def test_resuming_is_exact(tmp_path, converter, is_pretrained, save_trainable_only):
    source = from_folder(make_pretrained(tmp_path / "source")) if is_pretrained else {}
    assert_resuming_is_exact(
        tmp_path, [converter], **source, checkpoint__save_trainable_only=save_trainable_only
    )


def test_resuming_with_other_converters_is_rejected(adapted):
    """The message names the option and both values."""
    for converters, words in (
        (
            [dataclasses.replace(LORA, alpha=1.0)],
            r"model_converters\.lora\.alpha was 8\.0 and is 1\.0",
        ),
        (
            [dataclasses.replace(LORA, rslora=True)],
            r"model_converters\.lora\.rslora was False and is True",
        ),
        ([], "model_converters was lora and is none"),
        (
            [NORMED, dataclasses.replace(LORA, include=[r"^head\.output$"])],
            "model_converters was lora and is normed, lora",
        ),
    ):
        with pytest.raises(UserError, match=f"belongs to another run, .*{words}"):
            check(
                adapted, converters, **SAVING, **from_folder(adapted / "source"), training__steps=6
            )


def test_frozen_weights_do_not_depend_on_the_spelling_of_the_path(tmp_path, monkeypatch):
    (tmp_path / "base").mkdir()
    (tmp_path / "link").symlink_to("base")
    monkeypatch.chdir(tmp_path)
    paths = [str(tmp_path / "base"), "base", "base/../base", "link"]
    assert (
        len(
            {
                frozen_weights(CheckpointManager.Config(initial_load_path=path), seed=0).description
                for path in paths
            }
        )
        == 1
    )


class Undeclared(ModelConverter):
    """Adds a parameter without declaring it."""

    def convert(self, model):
        model.head.norm.extra = nn.Parameter(torch.empty(3, device="meta"))


def test_an_undeclared_parameter_is_rejected_for_export(tmp_path):
    with pytest.raises(UserError, match=r"\(head\.norm\.extra\).*changes_weights = True"):
        check(tmp_path, [LORA, Undeclared.Config()], **SAVING, checkpoint__last_save_in_hf=True)
    check(tmp_path, [LORA, Undeclared.Config()], **SAVING)
    check(tmp_path, [NORMED, TrainOutput.Config()], **SAVING, checkpoint__last_save_in_hf=True)


def test_two_converters_with_the_same_name_are_rejected(tmp_path):
    with pytest.raises(UserError, match="model_converters: lora is listed twice"):
        check(tmp_path, [LoRA.Config(include=["attention"]), LoRA.Config(include=["feed_forward"])])


def bytes_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*.distcp"))


@pytest.mark.slow
def test_save_trainable_only(adapted, tmp_path, capsys):
    """Checkpoints have the size of the adapters; a run resumes only with its original base
    weights."""
    sources = [
        make_pretrained(tmp_path / "source"),
        make_pretrained(tmp_path / "other", vocab_size=2064),
    ]
    options = {**SAVING, "checkpoint__save_trainable_only": True, "lr_scheduler__total_steps": 8}
    train(
        tmp_path,
        LORA,
        **options,
        **from_folder(sources[0]),
        training__steps=4,
        checkpoint__last_save_in_hf=True,
    )
    path = step(tmp_path, 2)
    saved = DcpSource(path)
    assert {name.rpartition(".")[2] for name in saved.specs} == {"lora_A", "lora_B"}
    frozen = [
        form for name, form in DcpSource(step(adapted, 2)).specs.items() if name not in saved.specs
    ]
    smaller, n_bytes = (
        bytes_of(step(adapted, 2)) - bytes_of(path),
        sum(form.n_bytes for form in frozen),
    )
    assert n_bytes < smaller < n_bytes + 4096 * len(frozen)  # metadata of each tensor
    assert read_weights(step(tmp_path, 4))  # the final export has all weights
    for source, name in (([*from_folder(sources[1]).items()], str(sources[1])), ([], "none")):
        config = tiny_config(tmp_path, **options, **dict(source))
        config.model_converters = [LORA]
        with pytest.raises(UserError, match=f"base weights was {sources[0]} and is {name}"):
            config.check(world_size=1)
        with pytest.raises(UserError, match=f"base weights was {sources[0]} and is {name}"):
            config.build().load_checkpoint()
    with pytest.raises(
        UserError,
        match="holds trained weights only; the frozen ones come from .* use a checkpoint of the "
        "run",
    ):
        initial_weights(tmp_path / "next", [LORA], **FLOAT32, checkpoint__initial_load_path=path)
    assert main(["inspect", str(path)]) == 0
    assert f"initial_load_path {sources[0]}" in capsys.readouterr().out
    # Without the option, the run resumes too, and then saves all weights.
    whole = {
        **options,
        "checkpoint__save_trainable_only": False,
        "checkpoint__load_step": 2,
        "training__steps": 6,
    }
    train(tmp_path, LORA, **whole, **from_folder(sources[0]))
    assert "head.output.weight" in DcpSource(step(tmp_path, 6)).specs
    with pytest.raises(
        UserError, match="--checkpoint.save_trainable_only: .*step-6 holds all weights"
    ):
        initial_weights(tmp_path, [LORA], **options, **from_folder(sources[0]))


@pytest.fixture(scope="module")
def trainable_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA run from the weights in `base`: step 2 has only the adapters, step 3 is the merged
    model."""
    folder = tmp_path_factory.mktemp("trainable_only")
    options = {**SAVING, **from_folder(make_pretrained(folder / "base")), "optimizer__lr": 0.02}
    last = {"checkpoint__last_save_in_hf": True, "training__steps": 3, "checkpoint__interval": 1}
    train(folder, LORA, **{**options, **last}, checkpoint__save_trainable_only=True)
    return folder


def read_all(path: Path, **options: Any) -> dict[str, torch.Tensor]:
    _, source = internal_source(path, **options)
    return {name: source.read(name) for name in source.specs}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("custom", "hf"),
        ("dora", "hf"),
        ("qlora", "hf"),
        ("dora", "added tokens"),
        ("dora", "plain"),
        ("qlora", "same"),
    ],
)
def test_a_trainable_only_checkpoint_equals_a_full_one(tmp_path, name, kind):
    """With frozen weights from pre-trained files (also with a smaller vocabulary), from a plain
    native checkpoint, or from a checkpoint with the same converters."""
    converters = CONVERTERS[name]
    if kind in ("hf", "added tokens"):
        source = from_folder(make_pretrained(tmp_path / "base"))
    if kind == "added tokens":
        shutil.copy(EMBEDDED_TOKENIZER / "tokenizer.json", tmp_path / "base")
        source["tokenizer__added_tokens"] = ["<|one|>"]
    if kind in ("plain", "same"):
        train(
            tmp_path / "begun",
            *converters if kind == "same" else [],
            **SAVING,
            training__steps=2,
            optimizer__lr=0.01,
        )
        source = {"checkpoint__initial_load_path": step(tmp_path / "begun", 2)}
    options = {**SAVING, **source, "training__steps": 2, "optimizer__lr": 0.01, "debug__seed": 3}
    found = []
    for save_trainable_only in (True, False):
        folder = tmp_path / f"run-{save_trainable_only}"
        train(folder, *converters, **options, checkpoint__save_trainable_only=save_trainable_only)
        found.append(read_all(step(folder, 2)))
    assert_equal(*found)


@pytest.mark.slow
def test_a_trainable_only_checkpoint_needs_its_base_weights(trainable_only, tmp_path, capsys):
    """From the original folder, or from the folder given with --base if the weights were moved."""
    path, base = step(trainable_only, 2), trainable_only / "base"
    expected = read_all(path)
    assert not torch.equal(
        expected["layers.0.attention.wq.weight"],
        read_weights(base)["model.layers.0.self_attn.q_proj.weight"],
    )
    words = ["--prompt", "Once", "--max_new_tokens", "8", "--json"]
    assert main(["convert", str(path), str(tmp_path / "merged"), "--to", "hf"]) == 0
    assert (tmp_path / "merged" / "adapter" / "adapter_model.safetensors").is_file()
    capsys.readouterr()
    texts = []
    for folder in (path, tmp_path / "merged"):
        assert main(["generate", "--checkpoint", str(folder), *words]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    base.rename(tmp_path / "moved")
    try:
        assert main(["generate", "--checkpoint", str(path), *words]) == 2
        assert (
            f"{base} is not a local folder; set the folder of these weights with --base"
            in capsys.readouterr().err
        )
        assert (
            main(["generate", "--checkpoint", str(path), "--base", str(tmp_path / "moved"), *words])
            == 0
        )
        assert_equal(read_all(path, base=tmp_path / "moved"), expected)
        # The run can also resume.
        moved = {**SAVING, **from_folder(tmp_path / "moved"), "checkpoint__load_step": 2}
        check(trainable_only, [LORA], **moved, checkpoint__save_trainable_only=True)
    finally:
        (tmp_path / "moved").rename(base)
    for whole in (step(trainable_only, 3), base):
        with pytest.raises(
            UserError, match=f"holds all weights of its model; remove --base {base}"
        ):
            internal_source(whole, base=base)
    assert (
        main(["convert", str(path), str(tmp_path / "a"), "--to", "peft", "--base", str(base)]) == 2
    )


@pytest.mark.slow
def test_changed_base_weights_are_rejected(trainable_only, tmp_path):
    """Changes in all weights, in a small tensor, or slight ones in one tensor, on opening and on
    resuming."""
    from safetensors.torch import load_file, save_file

    path = step(trainable_only, 2)
    for name, factor in (
        ("", 1.1),
        ("model.layers.1.input_layernorm.weight", 1.1),
        ("model.layers.0.mlp.up_proj.weight", 1.001),
    ):
        base = tmp_path / (name or "all")
        shutil.copytree(trainable_only / "base", base)
        tensors = load_file(base / "model.safetensors")
        changed = {key: tensor * factor for key, tensor in tensors.items() if name in key}
        save_file({**tensors, **changed}, base / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(UserError, match=f"but the weights in {base} are different"):
            internal_source(path, base=base)
        config = tiny_config(trainable_only, **SAVING, **from_folder(base), checkpoint__load_step=2)
        config.model_converters = [LORA]
        with pytest.raises(
            UserError, match=f"base weights was {trainable_only / 'base'} and is {base}"
        ):
            config.check(world_size=1)
    other = from_folder(trainable_only / "base")
    (trainable_only / "base").rename(tmp_path / "kept")
    shutil.copytree(tmp_path / "all", trainable_only / "base")
    try:
        with pytest.raises(UserError, match=r"base weights \(.*base\) has changed since"):
            check(trainable_only, [LORA], **SAVING, **other, checkpoint__load_step=2)
    finally:
        shutil.rmtree(trainable_only / "base")
        (tmp_path / "kept").rename(trainable_only / "base")


def test_an_adapter_cannot_be_opened_as_a_model(trainable_only, tmp_path, capsys):
    """The message names the folder of the merged model; for `--to peft`, the folder of the
    adapter."""
    merged = step(trainable_only, 3)
    with pytest.raises(
        UserError, match=f"adapter holds only an adapter, .* the merged model \\({merged}\\)"
    ):
        internal_source(merged / "adapter")
    assert main(["convert", str(merged), str(tmp_path / "out"), "--to", "peft"]) == 2
    assert (
        f"is a merged model, which already contains its adapter: {merged / 'adapter'}"
        in capsys.readouterr().err
    )
    assert (
        main(["convert", str(step(trainable_only, 2)), str(tmp_path / "out"), "--to", "peft"]) == 0
    )
    with pytest.raises(UserError, match="the step-N folder of its run"):
        internal_source(tmp_path / "out")
    for folder in (merged / "adapter", tmp_path / "out"):
        modes = {file.stat().st_mode for file in folder.iterdir()}
        assert modes == {(merged / "config.json").stat().st_mode}


@pytest.mark.slow
def test_save_trainable_only_without_converted_weights(tmp_path):
    """Frozen weights are omitted regardless of who froze them; without frozen weights, the option
    is rejected."""
    assert_resuming_is_exact(tmp_path, [TrainOutput.Config()], checkpoint__save_trainable_only=True)
    path = step(tmp_path / "straight", 4)
    assert list(DcpSource(path).specs) == ["head.output.weight"]
    # Without a converter, it is not an adapter.
    with pytest.raises(UserError, match="use a checkpoint of the run with all weights"):
        internal_source(path)
    with pytest.raises(UserError, match="use a checkpoint of the run with all weights"):
        initial_weights(
            tmp_path / "next", [TrainOutput.Config()], checkpoint__initial_load_path=path
        )
    with pytest.raises(
        UserError, match="--checkpoint.save_trainable_only: all weights are trained"
    ):
        train(tmp_path / "all", **SAVING, checkpoint__save_trainable_only=True)


@pytest.mark.slow
def test_a_final_export_replaces_a_trainable_only_checkpoint(tmp_path):
    """If the data ends at a step that was already saved, the export replaces that checkpoint."""
    options = {**SAVING, "checkpoint__save_trainable_only": True, "lr_scheduler__total_steps": 8}
    trainer = train(tmp_path, LORA, **options, training__steps=2)
    assert trainer.checkpointer._saver.kind == "full"
    config = tiny_config(tmp_path, **options, checkpoint__last_save_in_hf=True)
    config.model_converters = [LORA]
    resumed = config.build()
    resumed.load_checkpoint()
    resumed.checkpointer.save(2, last=True)
    resumed.close()
    assert read_weights(step(tmp_path, 2))


def test_a_failed_export_keeps_the_checkpoint(tmp_path, monkeypatch):
    """The checkpoint of the same step is kept."""
    options = {**SAVING, "checkpoint__save_trainable_only": True}
    train(tmp_path, LORA, **options, training__steps=2)
    config = tiny_config(tmp_path, **options, checkpoint__last_save_in_hf=True)
    config.model_converters = [LORA]
    resumed = config.build()
    resumed.load_checkpoint()

    def fail(*args: Any) -> None:
        raise OSError("No space left")

    monkeypatch.setattr(resumed.checkpointer._saver, "export", fail)
    with pytest.raises(
        CheckpointSaveError, match="step-2 could not be saved: OSError: No space left"
    ):
        resumed.checkpointer.save(2, last=True)
    resumed.close()
    assert [
        (info.path.name, info.kind) for info in catalog.list_checkpoints(tmp_path / "checkpoint")
    ] == [("step-2", "full")]
    assert catalog.verify(step(tmp_path, 2)) == []


def test_a_store_that_cannot_rename_keeps_the_checkpoint(tmp_path, caplog):
    """Replacing it would mean removing it first."""
    options = {
        **SAVING,
        "checkpoint__save_trainable_only": True,
        "checkpoint__folder": f"memory://{tmp_path.name}",
    }
    train(tmp_path, LORA, **options, training__steps=2)
    config = tiny_config(tmp_path, **options, checkpoint__last_save_model_only=True)
    config.model_converters = [LORA]
    resumed = config.build()
    resumed.load_checkpoint()
    resumed.checkpointer.save(2, last=True)
    resumed.close()
    assert "step 2 is already saved (trained weights only) and is kept" in caplog.text
    assert [info.kind for info in catalog.list_checkpoints(resumed.checkpointer.folder)] == ["full"]


KILLED = """
import sys
from pathlib import Path
from tests.components.weights.test_converted_checkpoints import LORA, SAVING, train
options = {**SAVING, "checkpoint__save_trainable_only": True, "checkpoint__interval": 1}
options["training__steps"] = int(sys.argv[2])
train(Path(sys.argv[1]), LORA, **options, lr_scheduler__total_steps=400)
"""


@pytest.mark.slow
def test_killed_and_resumed(tmp_path):
    """After SIGKILL at an arbitrary step, the resumed run equals an uninterrupted one."""
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", KILLED, str(tmp_path / "killed")]
    process = RunningCommand(
        [*command, "400"], env=environment, cwd=tmp_path, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 120
        while not step(tmp_path / "killed", 5).exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    folder = catalog.folder_at(tmp_path / "killed" / "checkpoint")
    newest = catalog.resumable(folder, catalog.list_checkpoints(folder))[-1].step
    options = {
        **SAVING,
        "checkpoint__save_trainable_only": True,
        "checkpoint__interval": 1,
        "lr_scheduler__total_steps": 400,
    }
    runs = {
        name: train(tmp_path / name, LORA, **options, training__steps=newest + 2)
        for name in ("killed", "straight")
    }
    assert_equal(whole_weights(runs["killed"]), whole_weights(runs["straight"]))
    losses = [dict(read_metrics(tmp_path / name, "loss")) for name in ("killed", "straight")]
    assert losses[0] == losses[1]
