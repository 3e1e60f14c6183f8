"""The weights of converted models in and out of checkpoints: adapters, 4 bits, and a converter of a user's own."""

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
from tests.components.weights.test_formats_in_runs import from_folder, make_pretrained, weights_of
from tests.conftest import PROJECT
from tests.processes import run_processes
from tests.training import read_metrics, tiny_config, train
from torchtitan.cli.main import main
from torchtitan.components.checkpoint import CheckpointManager, CheckpointSaveError, ModelState, catalog
from torchtitan.components.checkpoint.dcp import DcpSource
from torchtitan.components.peft import LoRA, QLoRA
from torchtitan.components.tokenizer import EMBEDDED_TOKENIZER
from torchtitan.components.weights import ConvertedView, HuggingFaceSource, PlainView, TensorSource
from torchtitan.components.weights.pretrained import frozen_weights, is_as_saved
from torchtitan.models.pretrained import internal_source, load_model
from torchtitan.protocols import ModelConverter
from torchtitan.protocols.conversion import converted_model, converter_records, differences
from torchtitan.protocols.converter import LayerConverter
from torchtitan.protocols.initializer import Constant, DerivedRows, initializer_of, with_initializers
from torchtitan.protocols.model import ConvertedModule
from torchtitan.protocols.sharding import with_features
from torchtitan.protocols.tensor_source import TensorSpec, slice_shape
from torchtitan.tools.errors import UserError

FLOAT32 = {"training__mixed_precision_param": "float32"}
SAVING = {**FLOAT32, "checkpoint__enable": True, "checkpoint__interval": 2}
HEAD_TOO = [r"\blayers\.", "^output$"]


# --- a converter of a user's own --------------------------------------------------------------------------------------


def lengths(rows):
    return rows.norm(dim=1)


def directions(rows):
    return rows / lengths(rows)[:, None]


class WeightNorm(ConvertedModule, nn.Linear):
    """`(length + more) · direction` per row (arXiv:1602.07868): directions are frozen, the rest is trained."""

    def __init__(self, linear: nn.Linear):
        nn.Module.__init__(self)
        plain, start = linear.weight, initializer_of(linear, "weight")
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, None
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
        """What `more` begins as. None: 0.25."""

    def convert_layer(self, name, layer):
        return WeightNorm(layer)

    def load_initial_weights(self, model_parts, spec):
        if self.config.more is not None:
            for name, parameter in [pair for part in model_parts for pair in part.named_parameters()]:
                if name.endswith(".more"):
                    parameter.data.fill_(self.config.more)

    def write_export_files(self, folder, spec, model, read):
        (folder / "beside").mkdir()
        (folder / "beside" / "lengths.json").write_text(json.dumps(read("layers.0.attention.wq.length").tolist()))


NORMED = Normed.Config(include=[r"\.w[qko123]$"])
LORA = LoRA.Config(rank=4, alpha=8.0, include=HEAD_TOO)
DORA = LoRA.Config(rank=4, alpha=8.0, dora=True, include=HEAD_TOO)
QLORA = QLoRA.Config(rank=4, alpha=8.0, exclude=[r"\.wo$"])
CONVERTERS = {"own": [NORMED], "dora": [DORA], "qlora": [QLORA]}


class Still(ModelConverter):
    """Trains the output weights only, and changes no form."""

    def convert(self, model):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith("output"))


# --- helpers ----------------------------------------------------------------------------------------------------------


def begin(folder: Path, converters: list[Any], **options: Any) -> dict[str, torch.Tensor]:
    """The weights that a run begins with, whole."""
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
    """What a run is checked for before any process starts."""
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
    """Of a checkpoint in any format."""
    loaded = load_model(path, device="cpu")
    with torch.no_grad():
        return loaded.model(torch.arange(24).view(2, 12)).float()


def logits_in_training(trainer: Any) -> torch.Tensor:
    (model,) = trainer.model_parts
    model.eval()
    with torch.no_grad():
        return model(torch.arange(24).view(2, 12)).float()


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    differing = [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]
    assert differing == []


class RecordingSource(TensorSource):
    """Tensors in memory; writes down what is read."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        self.tensors, self.parts = tensors, []
        self.specs = {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}

    def read(self, name, slices=None):
        self.parts.append((name, None if slices is None else slice_shape(slices)))
        return self.tensors[name] if slices is None else self.tensors[name][slices]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a LoRA with the head adapted too, from random pre-trained weights, which ends as a Hugging Face folder;
    step 2 is a full checkpoint, step 4 the folder."""
    folder = tmp_path_factory.mktemp("adapted")
    source = make_pretrained(folder / "source")
    train(folder, LORA, **SAVING, **from_folder(source), checkpoint__last_save_in_hf=True, optimizer__lr=0.02)
    return folder


# --- views ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("converter", [NORMED, LORA, DORA, QLORA], ids=["own", "lora", "dora", "qlora"])
def test_a_part_that_is_read_is_that_part_of_the_whole(tmp_path, converter):
    """And of the file no other rows are read than those asked for."""
    spec = tiny_config(tmp_path, model__vocab_size=256).model_spec
    plain = spec.model.build()
    source = RecordingSource({name: torch.randn(t.shape) for name, t in plain.state_dict().items()})
    model = converted_model(spec.model, [converter.build()])
    view = ConvertedView(source, model)
    left_out = model.state_dict().keys() - view.specs.keys()
    assert left_out and left_out == ModelState([model]).added
    for name, form in view.specs.items():
        tensor, own = view.read(name), model.state_dict()[name]
        assert tensor.shape == form.shape == own.shape and tensor.dtype == form.dtype
        rows = slice(3, 11)
        columns = [slice(0, size // 2) for size in form.shape[1:]]
        source.parts.clear()
        assert torch.equal(view.read(name, (rows, *columns)), tensor[(rows, *columns)])
        assert [shape[0] for _, shape in source.parts] == [8]
    # With what is added at its first value, the plain model is what it was.
    own = {
        name: view.read(name) if name in view.specs else torch.zeros(model.state_dict()[name].shape)
        for name in model.state_dict()
    }
    back = PlainView(RecordingSource(own), model, [])
    assert list(back.specs) == list(plain.state_dict())
    for name in back.specs:
        # In 4 bits a value is off by up to half the largest distance of two levels, 0.152 of its block's largest one;
        # else by a rounding of float32.
        rounding = 0.16 * 5 if isinstance(converter, QLoRA.Config) else 1e-5
        assert torch.allclose(back.read(name).float(), source.tensors[name], atol=rounding), name


def test_weights_of_another_model_are_named(tmp_path):
    spec = tiny_config(tmp_path, model__vocab_size=256).model_spec
    model = converted_model(spec.model, [LORA.build()])
    tensors = {name: torch.zeros(tensor.shape) for name, tensor in model.state_dict().items()}
    del tensors["layers.1.attention.wq.lora_A"]
    tensors["layers.0.attention.wq.lora_B"] = torch.zeros(64, 3)
    with pytest.raises(UserError, match=r"layers.1.attention.wq.lora_A missing.*wq.lora_B \[64, 3\] \(the model"):
        PlainView(RecordingSource(tensors), model, [])


# --- beginning from pre-trained weights -------------------------------------------------------------------------------


def _begin_in_parallel(folder: Path, source: Path, layouts: list[dict[str, int]]) -> None:
    for name, converters in CONVERTERS.items():
        for layout in layouts:
            path = folder / f"{name}-{'-'.join(layout)}"
            weights = begin(path, converters, **FLOAT32, **from_folder(source), **layout)
            expected = torch.load(folder / f"{name}.pt")
            assert_equal(expected, weights)


LAYOUTS = [{"parallelism__data_parallel_shard_degree": 2}, {"parallelism__tensor_parallel_degree": 2}]


def test_pretrained_weights_are_the_same_in_every_layout(tmp_path):
    """To the bit: in one process, under FSDP and under tensor parallelism."""
    source = make_pretrained(tmp_path / "source")
    plain = weights_of(source)
    for name, converters in CONVERTERS.items():
        weights = begin(tmp_path / name, converters, **FLOAT32, **from_folder(source))
        torch.save(weights, tmp_path / f"{name}.pt")
        # What is not converted is the file's, and what is added is what the seed gives.
        assert torch.equal(weights["tok_embeddings.weight"], plain["model.embed_tokens.weight"])
        seeded = begin(tmp_path / f"{name}-seeded", converters, **FLOAT32)
        added = [key for key in weights if key.endswith((".lora_A", ".lora_B", ".more"))]
        assert added and all(torch.equal(weights[key], seeded[key]) for key in added)
    own = torch.load(tmp_path / "own.pt")
    assert torch.equal(own["layers.0.feed_forward.w2.length"], lengths(plain["model.layers.0.mlp.down_proj.weight"]))
    # Frozen weights in a lower type are what a derived parameter follows from.
    lower = begin(tmp_path / "lower", [DORA], training__mixed_precision_param="bfloat16", **from_folder(source))
    weight = lower["layers.0.attention.wq.weight"]
    assert weight.dtype == torch.bfloat16
    magnitude = lower["layers.0.attention.wq.magnitude"]
    assert torch.allclose(magnitude, lengths(weight.float()), rtol=1e-6, atol=0)
    assert not torch.allclose(magnitude, lengths(plain["model.layers.0.self_attn.q_proj.weight"]), rtol=1e-6, atol=0)
    run_processes(_begin_in_parallel, 2, tmp_path, source, LAYOUTS)


def test_a_converter_s_own_initial_weights_come_where_a_run_begins(tmp_path):
    """And not where it resumes."""
    converter = Normed.Config(include=NORMED.include, more=3.0)
    for options in ({}, from_folder(make_pretrained(tmp_path / "source"))):
        weights = begin(tmp_path / "begun", [converter], **FLOAT32, **options)
        assert (weights["layers.0.attention.wq.more"] == 3.0).all()
    train(tmp_path / "run", converter, **SAVING, training__steps=2, lr_scheduler__total_steps=4)
    resumed = begin(tmp_path / "run", [converter], **SAVING)
    assert (resumed["layers.0.attention.wq.more"] != 3.0).any()
    assert torch.equal(
        resumed["layers.0.attention.wq.more"], DcpSource(step(tmp_path / "run", 2)).read("layers.0.attention.wq.more")
    )


def test_a_file_that_does_not_fit_is_found_before_any_process_starts(tmp_path):
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


def test_quantized_weights_are_no_plain_ones(tmp_path):
    """Weights in 8 bits mean nothing without their scales, whatever they would be converted to."""
    from safetensors.torch import load_file, save_file

    source = make_pretrained(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name].to(torch.int8)}, source / "model.safetensors")
    with pytest.raises(UserError, match=r"feed_forward.w3.weight \(int8\) quantized"):
        begin(tmp_path / "run", [QLORA], **FLOAT32, **from_folder(source))


# --- what a checkpoint of a converted model is for others -------------------------------------------------------------


def test_merged_export_is_adapter_and_base(adapted):
    """By transformers, and by the formula: W + alpha / rank B A."""
    before, after = weights_of(adapted / "source"), weights_of(step(adapted, 4))
    own = DcpSource(step(adapted, 2))
    names = {"model.layers.1.self_attn.q_proj": "layers.1.attention.wq", "lm_head": "output"}
    for theirs, ours in names.items():
        lora_A, lora_B = own.read(f"{ours}.lora_A"), own.read(f"{ours}.lora_B")
        assert lora_B.abs().max() > 1e-3
        merged = internal_source(step(adapted, 2))[1].read(f"{ours}.weight")
        # One rounding of float32 at values up to 1.
        assert torch.allclose(merged, before[f"{theirs}.weight"] + 2 * (lora_B @ lora_A), rtol=0, atol=1e-6)
        assert not torch.equal(after[f"{theirs}.weight"], before[f"{theirs}.weight"])
    assert torch.equal(after["model.norm.weight"], before["model.norm.weight"])


def test_logits_are_those_of_the_run(tmp_path):
    """Computed by the converted model; by the plain one, loaded from its checkpoint; and by transformers, from the
    folder. The order of products differs, in float32."""
    from transformers import AutoModelForCausalLM

    for name, converters in CONVERTERS.items():
        folder = tmp_path / name
        options = {"checkpoint__last_save_in_hf": True, "checkpoint__export_dtype": "float32", "optimizer__lr": 0.01}
        trainer = train(folder, *converters, **SAVING, **options, training__steps=3)
        expected = logits_in_training(trainer)
        with torch.no_grad():
            theirs = AutoModelForCausalLM.from_pretrained(step(folder, 3))(torch.arange(24).view(2, 12)).logits
        # Merged weights in 4 bits are bfloat16 first: 8 bits of each weight, and the run multiplies without merging.
        rounding = 2e-2 if name == "qlora" else 1e-5
        assert torch.allclose(theirs, expected, rtol=rounding, atol=rounding * expected.abs().max()), name
        trainer = train(tmp_path / f"{name}-full", *converters, **SAVING, training__steps=2)
        expected = logits_in_training(trainer)
        found = logits_of(step(tmp_path / f"{name}-full", 2))
        assert torch.allclose(found, expected, rtol=rounding, atol=rounding * expected.abs().max()), name


def test_generate_opens_an_adapter_checkpoint(adapted, tmp_path, capsys):
    """What it says is what the merged model says that `convert` makes of the checkpoint."""
    assert main(["convert", str(step(adapted, 2)), str(tmp_path / "merged"), "--to", "hf"]) == 0
    capsys.readouterr()
    texts = []
    for path in (step(adapted, 2), tmp_path / "merged"):
        words = ["generate", "--checkpoint", str(path), "--prompt", "Once", "--max_new_tokens", "12"]
        assert main([*words, "--temperature", "0"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and len(texts[0]) > len("Once\n")


def test_inspect_shows_it(adapted, capsys):
    assert main(["inspect", str(step(adapted, 2)), "--tensors"]) == 0
    printed = capsys.readouterr().out
    assert "layers.0.attention.wq.lora_A" in printed and "converters       torchtitan.components.peft" in printed


def test_what_converters_write_beside_is_of_the_checkpoint(tmp_path, capsys):
    """In the folder of a run's end, under the same digests; and in what `convert` writes."""
    train(tmp_path, NORMED, **SAVING, checkpoint__last_save_in_hf=True, training__steps=3)
    folder = step(tmp_path, 3)
    written = folder / "beside" / "lengths.json"
    assert len(json.loads(written.read_text())) == 64
    assert "converters" not in json.loads((folder / "assets" / "model.json").read_text())
    assert catalog.verify(folder) == []
    written.write_text("[]")
    assert catalog.verify(folder) == [f"beside/lengths.json has 2 bytes, and not {written_bytes(folder)}"]
    written.unlink()
    assert catalog.verify(folder) == ["beside/lengths.json is missing"]
    assert main(["convert", str(step(tmp_path, 2)), str(tmp_path / "out"), "--to", "hf"]) == 0
    expected = DcpSource(step(tmp_path, 2)).read("layers.0.attention.wq.length").tolist()
    assert json.loads((tmp_path / "out" / "beside" / "lengths.json").read_text()) == expected


def written_bytes(folder: Path) -> int:
    size: int = json.loads((folder / "manifest.json").read_text())["files"]["beside/lengths.json"]["bytes"]
    return size


def test_a_type_for_export_leaves_what_has_one_of_its_own(tmp_path):
    options = {**SAVING, "checkpoint__last_save_model_only": True, "training__steps": 3}
    train(tmp_path / "bf16", QLORA, **options, checkpoint__export_dtype="bfloat16")
    forms = DcpSource(step(tmp_path / "bf16", 3)).specs
    types = {name.rpartition(".")[2]: form.dtype for name, form in forms.items() if "layers.0.attention.wq" in name}
    quantized = dict.fromkeys(("packed", "scales", "scale_ranges"), torch.uint8)
    assert types == {**quantized, "lora_A": torch.bfloat16, "lora_B": torch.bfloat16}
    assert forms["tok_embeddings.weight"].dtype == torch.bfloat16
    train(tmp_path / "hf", QLORA, **SAVING, checkpoint__last_save_in_hf=True, training__steps=3)
    forms = HuggingFaceSource(step(tmp_path / "hf", 3)).specs
    assert forms["model.layers.0.mlp.up_proj.weight"].dtype == torch.bfloat16
    assert forms["lm_head.weight"].dtype == torch.float32


def test_a_converter_that_is_gone_is_named(adapted, tmp_path):
    path = tmp_path / "step-2"
    shutil.copytree(step(adapted, 2), path)
    said = json.loads((path / "assets" / "model.json").read_text())
    assert said["converters"] == converter_records([LORA])
    for gone, words in {
        "nowhere.converters:Mine": "which is not built in; .* --module",
        "this:Zen": "which is not built in; .* --module",  # could be imported
        "torchtitan.components.gone:Mine": "importing .* failed: .*torchtitan.components.gone",
        "torchtitan.components.peft:Mine": "which is not a ModelConverter",
        "torch.nn:Linear": "which is not a ModelConverter",
    }.items():
        said["converters"][0]["class"] = gone
        (path / "assets" / "model.json").write_text(json.dumps(said))
        with pytest.raises(UserError, match=f"the converter {gone}.* {words}"):
            internal_source(path)
    assert "this" not in sys.modules


# --- beginning from a run's checkpoint --------------------------------------------------------------------------------


def test_beginning_from_an_adapter_checkpoint(adapted, tmp_path):
    """The same converters: as it is. None: merged. Others: merged, then converted."""
    path = step(adapted, 2)
    saved, merged = DcpSource(path), internal_source(path)[1]
    from_it = {**FLOAT32, "checkpoint__initial_load_path": path}
    same = begin(tmp_path / "same", [LORA], **from_it)
    assert_equal({name: saved.read(name) for name in saved.specs}, same)
    plain = begin(tmp_path / "plain", [], **from_it)
    assert_equal({name: merged.read(name) for name in merged.specs}, plain)
    other = begin(tmp_path / "other", [DORA], **from_it)
    assert torch.equal(other["layers.0.attention.wq.weight"], plain["layers.0.attention.wq.weight"])
    assert torch.equal(other["output.weight"], plain["output.weight"])
    assert not other["layers.0.attention.wq.lora_B"].any()
    with pytest.raises(UserError, match="other model_converters"):
        begin(tmp_path / "all", [DORA], **from_it, checkpoint__no_initial_load_model_only=True)


def test_the_same_adapters_trained_in_another_way_go_on(adapted, tmp_path, caplog):
    """Weights are the ones saved, to the bit, where options differ that do not say what they mean."""
    train(tmp_path / "qlora", QLORA, **SAVING, training__steps=2, optimizer__lr=0.01)
    for folder, config, change in (
        (tmp_path / "qlora", QLORA, {"dropout": 0.1, "exclude": [r"attention\.wo$"]}),
        (adapted, LORA, {"include": ["."], "exclude": ["tok_embeddings"]}),
    ):
        saved, from_it = DcpSource(step(folder, 2)), {**FLOAT32, "checkpoint__initial_load_path": step(folder, 2)}
        weights = begin(tmp_path / "next", [dataclasses.replace(config, **change)], **from_it)
        assert_equal({name: saved.read(name) for name in saved.specs}, weights)
    assert "merged" not in caplog.text
    # An option that has come since has its default in what was saved before.
    older = tmp_path / "step-2"
    shutil.copytree(step(adapted, 2), older)
    said = json.loads((older / "assets" / "model.json").read_text())
    del said["converters"][0]["config"]["rslora"]
    (older / "assets" / "model.json").write_text(json.dumps(said))
    spec, _ = internal_source(older)
    assert is_as_saved(older, spec, [LORA.build()])
    assert not is_as_saved(older, spec, [dataclasses.replace(LORA, rslora=True).build()])
    two = [LoRA.Config(include=["attention"]), QLoRA.Config(include=["feed_forward"])]
    assert differences(converter_records(two), [config.build() for config in reversed(two)]) == []


def test_merging_into_a_run_with_adapters_of_its_own_is_said(adapted, tmp_path, caplog):
    from_it = {**FLOAT32, "checkpoint__initial_load_path": step(adapted, 2)}
    begin(tmp_path / "alpha", [dataclasses.replace(LORA, alpha=1.0)], **from_it)
    assert (
        "step-2 was saved with other model_converters (--model_converters.lora.alpha was 8.0 and is 1.0)" in caplog.text
    )
    caplog.clear()
    begin(tmp_path / "layers", [dataclasses.replace(LORA, include=["attention"])], **from_it)
    assert "for other layers or sizes): its adapters are merged into the weights" in caplog.text
    caplog.clear()
    begin(tmp_path / "plain", [], **from_it)
    assert "merged" not in caplog.text


def test_an_adapter_to_begin_from_is_opened_where_the_run_begins(adapted, tmp_path):
    """And only there, before any process starts."""
    exported = str(step(adapted, 4) / "adapter")
    begin_from = {"checkpoint__initial_load_path": step(adapted, 2)}
    check(tmp_path, [dataclasses.replace(LORA, adapter_path=exported)], **FLOAT32)
    with pytest.raises(
        UserError, match=r"the adapter has other layers .*only in the file: layers\.0\.feed_forward\.w1"
    ):
        check(tmp_path, [dataclasses.replace(LORA, include=["attention"], adapter_path=exported)], **FLOAT32)
    gone = dataclasses.replace(LORA, adapter_path=str(tmp_path / "gone"))
    with pytest.raises(UserError, match="the folder '.*gone' has no adapter_config.json"):
        check(tmp_path, [gone], **FLOAT32)
    with pytest.raises(UserError, match="adapter_path .*gone: checkpoint.initial_load_path already has adapters"):
        check(tmp_path, [gone], **FLOAT32, **begin_from)
    check(adapted, [gone], **SAVING, **from_folder(adapted / "source"), training__steps=6)


def test_a_checkpoint_to_begin_from_is_digested_once(adapted, tmp_path, monkeypatch):
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
        begin(tmp_path / "run", converters, **FLOAT32, checkpoint__initial_load_path=path, **options)
        assert digested == [str(path)]
        digested.clear()


def test_beginning_from_a_plain_checkpoint(tmp_path):
    """What is excluded from loading is initialized as where the run begins."""
    trainer = train(tmp_path / "plain", **SAVING, training__steps=2)
    plain, from_it = whole_weights(trainer), {"checkpoint__initial_load_path": step(tmp_path / "plain", 2)}
    weights = begin(tmp_path / "adapted", [LORA], **FLOAT32, **from_it)
    assert_equal(plain, {name: tensor for name, tensor in weights.items() if "lora" not in name})


# --- resuming ---------------------------------------------------------------------------------------------------------


def resumed_and_straight(folder: Path, converters: list[Any], **options: Any) -> None:
    """Two steps and two more are four, to the bit."""
    options = {**SAVING, "lr_scheduler__total_steps": 4, "optimizer__lr": 0.01, **options}
    train(folder / "resumed", *converters, **options, training__steps=2)
    resumed = train(folder / "resumed", *converters, **options)
    straight = train(folder / "straight", *converters, **options)
    metrics = [read_metrics(folder / name, "loss", "grad_norm") for name in ("resumed", "straight")]
    assert len(metrics[0]) == 4 and metrics[0] == metrics[1]
    assert_equal(whole_weights(resumed), whole_weights(straight))


@pytest.mark.parametrize("save_trainable_only", [False, True], ids=["whole", "save_trainable_only"])
def test_resuming_is_exact(tmp_path, save_trainable_only):
    options = {"checkpoint__save_trainable_only": save_trainable_only}
    dropout = LoRA.Config(rank=4, alpha=8.0, dora=True, dropout=0.1)
    source = from_folder(make_pretrained(tmp_path / "source"))
    resumed_and_straight(tmp_path / "pretrained", [QLORA if save_trainable_only else dropout], **options, **source)
    resumed_and_straight(tmp_path / "seeded", [NORMED], **options)


def test_resuming_with_weights_of_another_meaning_is_refused(adapted):
    """By name and with both values, before any process starts."""
    for converters, words in (
        ([dataclasses.replace(LORA, alpha=1.0)], r"model_converters\.lora\.alpha was 8\.0 and is 1\.0"),
        ([dataclasses.replace(LORA, rslora=True)], r"model_converters\.lora\.rslora was False and is True"),
        ([], "model_converters was lora and is none"),
        ([NORMED, dataclasses.replace(LORA, include=["^output$"])], "model_converters was lora and is normed, lora"),
    ):
        with pytest.raises(UserError, match=f"belongs to another run, .*{words}"):
            check(adapted, converters, **SAVING, **from_folder(adapted / "source"), training__steps=6)


def test_frozen_weights_of_a_folder_are_the_same_however_it_is_named(tmp_path, monkeypatch):
    (tmp_path / "base").mkdir()
    (tmp_path / "link").symlink_to("base")
    monkeypatch.chdir(tmp_path)
    paths = [str(tmp_path / "base"), "base", "base/../base", "link"]
    assert (
        len({frozen_weights(CheckpointManager.Config(initial_load_path=path), seed=0).description for path in paths})
        == 1
    )


class Silent(ModelConverter):
    """Adds a parameter, and does not say so."""

    def convert(self, model):
        model.norm.extra = nn.Parameter(torch.empty(3, device="meta"))


def test_a_converter_whose_weights_cannot_be_exported_is_found_before(tmp_path):
    with pytest.raises(UserError, match=r"\(norm\.extra\).*changes_weights = True"):
        check(tmp_path, [LORA, Silent.Config()], **SAVING, checkpoint__last_save_in_hf=True)
    check(tmp_path, [LORA, Silent.Config()], **SAVING)
    check(tmp_path, [NORMED, Still.Config()], **SAVING, checkpoint__last_save_in_hf=True)


def test_two_converters_of_one_name_are_refused(tmp_path):
    with pytest.raises(UserError, match="model_converters: lora is listed twice"):
        check(tmp_path, [LoRA.Config(include=["attention"]), LoRA.Config(include=["feed_forward"])])


def bytes_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*.distcp"))


def test_trained_weights_only(adapted, tmp_path, capsys):
    """Checkpoints of the adapters' size; a run goes on with the weights that it began with, and with no others."""
    sources = [make_pretrained(tmp_path / "source"), make_pretrained(tmp_path / "other", vocab_size=2064)]
    options = {**SAVING, "checkpoint__save_trainable_only": True, "lr_scheduler__total_steps": 8}
    train(tmp_path, LORA, **options, **from_folder(sources[0]), training__steps=4, checkpoint__last_save_in_hf=True)
    path = step(tmp_path, 2)
    saved = DcpSource(path)
    assert {name.rpartition(".")[2] for name in saved.specs} == {"lora_A", "lora_B"}
    frozen = [form for name, form in DcpSource(step(adapted, 2)).specs.items() if name not in saved.specs]
    smaller, n_bytes = bytes_of(step(adapted, 2)) - bytes_of(path), sum(form.n_bytes for form in frozen)
    assert n_bytes < smaller < n_bytes + 4096 * len(frozen)  # what a file says of a tensor
    assert weights_of(step(tmp_path, 4))  # the end is whole
    for begun, name in (([*from_folder(sources[1]).items()], str(sources[1])), ([], "none")):
        config = tiny_config(tmp_path, **options, **dict(begun))
        config.model_converters = [LORA]
        with pytest.raises(UserError, match=f"base weights was {sources[0]} and is {name}"):
            config.check(world_size=1)
        with pytest.raises(UserError, match=f"base weights was {sources[0]} and is {name}"):
            config.build().load_checkpoint()
    with pytest.raises(
        UserError, match="holds trained weights only; the frozen ones come from .* use a checkpoint of the run"
    ):
        begin(tmp_path / "next", [LORA], **FLOAT32, checkpoint__initial_load_path=path)
    assert main(["inspect", str(path)]) == 0
    assert f"initial_load_path {sources[0]}" in capsys.readouterr().out
    # Without the option a run goes on from there too, and saves all from then on.
    whole = {**options, "checkpoint__save_trainable_only": False, "checkpoint__load_step": 2, "training__steps": 6}
    train(tmp_path, LORA, **whole, **from_folder(sources[0]))
    assert "output.weight" in DcpSource(step(tmp_path, 6)).specs
    with pytest.raises(UserError, match="checkpoint.save_trainable_only: .*step-6 holds all weights"):
        begin(tmp_path, [LORA], **options, **from_folder(sources[0]))


@pytest.fixture(scope="module")
def left_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a LoRA on the weights in the folder `base`: step 2 has its adapters, step 3 is the merged model."""
    folder = tmp_path_factory.mktemp("left_out")
    options = {**SAVING, **from_folder(make_pretrained(folder / "base")), "optimizer__lr": 0.02}
    last = {"checkpoint__last_save_in_hf": True, "training__steps": 3, "checkpoint__interval": 1}
    train(folder, LORA, **{**options, **last}, checkpoint__save_trainable_only=True)
    return folder


def opened(path: Path, **options: Any) -> dict[str, torch.Tensor]:
    _, source = internal_source(path, **options)
    return {name: source.read(name) for name in source.specs}


@pytest.mark.parametrize(
    ("name", "kind"),
    [("own", "hf"), ("dora", "hf"), ("qlora", "hf"), ("dora", "added tokens"), ("dora", "plain"), ("qlora", "same")],
)
def test_a_checkpoint_of_trained_weights_opens_as_the_one_of_all(tmp_path, name, kind):
    """Whatever the others are from: pre-trained files, with a smaller vocabulary too; a plain checkpoint of ours; one
    with the same converters."""
    converters = CONVERTERS[name]
    if kind in ("hf", "added tokens"):
        source = from_folder(make_pretrained(tmp_path / "base"))
    if kind == "added tokens":
        shutil.copy(EMBEDDED_TOKENIZER / "tokenizer.json", tmp_path / "base")
        source["tokenizer__added_tokens"] = ["<|one|>"]
    if kind in ("plain", "same"):
        train(
            tmp_path / "begun", *converters if kind == "same" else [], **SAVING, training__steps=2, optimizer__lr=0.01
        )
        source = {"checkpoint__initial_load_path": step(tmp_path / "begun", 2)}
    options = {**SAVING, **source, "training__steps": 2, "optimizer__lr": 0.01, "debug__seed": 3}
    found = []
    for save_trainable_only in (True, False):
        folder = tmp_path / f"run-{save_trainable_only}"
        train(folder, *converters, **options, checkpoint__save_trainable_only=save_trainable_only)
        found.append(opened(step(folder, 2)))
    assert_equal(*found)


def test_trained_weights_open_where_the_others_are(left_out, tmp_path, capsys):
    """In the folder that the run had them from, or the one that they have moved to; nowhere else."""
    path, base = step(left_out, 2), left_out / "base"
    expected = opened(path)
    assert not torch.equal(
        expected["layers.0.attention.wq.weight"], weights_of(base)["model.layers.0.self_attn.q_proj.weight"]
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
        assert f"{base} is not a local folder; set the folder of these weights with --base" in capsys.readouterr().err
        assert main(["generate", "--checkpoint", str(path), "--base", str(tmp_path / "moved"), *words]) == 0
        assert_equal(opened(path, base=tmp_path / "moved"), expected)
        # A run goes on too.
        moved = {**SAVING, **from_folder(tmp_path / "moved"), "checkpoint__load_step": 2}
        check(left_out, [LORA], **moved, checkpoint__save_trainable_only=True)
    finally:
        (tmp_path / "moved").rename(base)
    for whole in (step(left_out, 3), base):
        with pytest.raises(UserError, match="holds all weights of its model; leave out --base"):
            internal_source(whole, base=base)
    assert main(["convert", str(path), str(tmp_path / "a"), "--to", "peft", "--base", str(base)]) == 2


def test_other_weights_than_those_left_out_are_found(left_out, tmp_path):
    """Another model, the same one trained further, or one tensor that is not the same; by the run and to open it."""
    from safetensors.torch import load_file, save_file

    path = step(left_out, 2)
    for name, factor in (
        ("", 1.1),
        ("model.layers.1.input_layernorm.weight", 1.1),
        ("model.layers.0.mlp.up_proj.weight", 1.001),
    ):
        base = tmp_path / (name or "all")
        shutil.copytree(left_out / "base", base)
        tensors = load_file(base / "model.safetensors")
        changed = {key: tensor * factor for key, tensor in tensors.items() if name in key}
        save_file({**tensors, **changed}, base / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(UserError, match=f"but the weights in {base} are different"):
            internal_source(path, base=base)
        config = tiny_config(left_out, **SAVING, **from_folder(base), checkpoint__load_step=2)
        config.model_converters = [LORA]
        with pytest.raises(UserError, match=f"base weights was {left_out / 'base'} and is {base}"):
            config.check(world_size=1)
    other = from_folder(left_out / "base")
    (left_out / "base").rename(tmp_path / "kept")
    shutil.copytree(tmp_path / "all", left_out / "base")
    try:
        with pytest.raises(UserError, match=r"base weights \(.*base\) has changed since"):
            check(left_out, [LORA], **SAVING, **other, checkpoint__load_step=2)
    finally:
        shutil.rmtree(left_out / "base")
        (tmp_path / "kept").rename(left_out / "base")


def test_an_adapter_alone_is_no_model(left_out, tmp_path, capsys):
    """The message says where the model is; and, where one asks for the adapter of that, where the adapter is."""
    merged = step(left_out, 3)
    with pytest.raises(UserError, match=f"adapter holds only an adapter, .* the merged model \\({merged}\\)"):
        internal_source(merged / "adapter")
    assert main(["convert", str(merged), str(tmp_path / "out"), "--to", "peft"]) == 2
    assert f"its adapter lies in it already: {merged / 'adapter'}" in capsys.readouterr().err
    assert main(["convert", str(step(left_out, 2)), str(tmp_path / "out"), "--to", "peft"]) == 0
    with pytest.raises(UserError, match="the step-N folder of its run"):
        internal_source(tmp_path / "out")
    for folder in (merged / "adapter", tmp_path / "out"):
        modes = {file.stat().st_mode for file in folder.iterdir()}
        assert modes == {(merged / "config.json").stat().st_mode}


def test_trained_only_without_a_converted_weight(tmp_path):
    """Frozen weights are left out whatever froze them; where nothing is frozen, there is nothing to leave out."""
    resumed_and_straight(tmp_path, [Still.Config()], checkpoint__save_trainable_only=True)
    path = step(tmp_path / "straight", 4)
    assert list(DcpSource(path).specs) == ["output.weight"]
    # There is no adapter that could be made of it.
    with pytest.raises(UserError, match="use a checkpoint of the run with all weights"):
        internal_source(path)
    with pytest.raises(UserError, match="use a checkpoint of the run with all weights"):
        begin(tmp_path / "next", [Still.Config()], checkpoint__initial_load_path=path)
    with pytest.raises(UserError, match="checkpoint.save_trainable_only: all weights are trained"):
        train(tmp_path / "all", **SAVING, checkpoint__save_trainable_only=True)


def test_an_end_that_is_a_step_saved_already_is_whole(tmp_path):
    """Where the data ends at a step that has its checkpoint, no other form could be made of trained weights only."""
    options = {**SAVING, "checkpoint__save_trainable_only": True, "lr_scheduler__total_steps": 8}
    trainer = train(tmp_path, LORA, **options, training__steps=2)
    assert trainer.checkpointer._saver.kind == "full"
    config = tiny_config(tmp_path, **options, checkpoint__last_save_in_hf=True)
    config.model_converters = [LORA]
    resumed = config.build()
    resumed.load_checkpoint()
    resumed.checkpointer.save(2, last=True)
    resumed.close()
    assert weights_of(step(tmp_path, 2))


def test_an_end_that_fails_leaves_what_a_run_resumes_from(tmp_path, monkeypatch):
    """The step's checkpoint of trained weights, with all that a run needs besides."""
    options = {**SAVING, "checkpoint__save_trainable_only": True}
    train(tmp_path, LORA, **options, training__steps=2)
    config = tiny_config(tmp_path, **options, checkpoint__last_save_in_hf=True)
    config.model_converters = [LORA]
    resumed = config.build()
    resumed.load_checkpoint()

    def fail(*args: Any) -> None:
        raise OSError("No space left")

    monkeypatch.setattr(resumed.checkpointer._saver, "export", fail)
    with pytest.raises(CheckpointSaveError, match="step-2 could not be saved: OSError: No space left"):
        resumed.checkpointer.save(2, last=True)
    resumed.close()
    assert [(info.path.name, info.kind) for info in catalog.list_checkpoints(tmp_path / "checkpoint")] == [
        ("step-2", "full")
    ]
    assert catalog.verify(step(tmp_path, 2)) == []


def test_a_store_that_cannot_rename_keeps_what_a_run_resumes_from(tmp_path, caplog):
    """To replace it would be to remove it first."""
    options = {**SAVING, "checkpoint__save_trainable_only": True, "checkpoint__folder": f"memory://{tmp_path.name}"}
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


def test_killed_and_resumed(tmp_path):
    """With SIGKILL, at some step; what is left goes on as if it had not been."""
    project = PROJECT
    environment = {**os.environ, "PYTHONPATH": str(project), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", KILLED, str(tmp_path / "killed")]
    process = RunningCommand([*command, "400"], env=environment, cwd=tmp_path, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not step(tmp_path / "killed", 5).exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    newest = catalog.resumable(catalog.folder_at(tmp_path / "killed" / "checkpoint"))[-1].step
    options = {
        **SAVING,
        "checkpoint__save_trainable_only": True,
        "checkpoint__interval": 1,
        "lr_scheduler__total_steps": 400,
    }
    runs = {name: train(tmp_path / name, LORA, **options, training__steps=newest + 2) for name in ("killed", "left")}
    assert_equal(whole_weights(runs["killed"]), whole_weights(runs["left"]))
    losses = [dict(read_metrics(tmp_path / name, "loss")) for name in ("killed", "left")]
    assert losses[0] == losses[1]
