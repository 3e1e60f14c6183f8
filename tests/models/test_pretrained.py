"""Checkpoints in other formats, loaded as our models: the logits of transformers, and exact round
trips."""

import dataclasses
import importlib
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from torchtitan.components.checkpoint import catalog
from torchtitan.components.tokenizer import EMBEDDED_TOKENIZER
from torchtitan.components.weights import ExternalView, HuggingFaceSource, load_weights
from torchtitan.components.weights.assets import CheckpointAssets, files_in
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.llama3 import FLAVORS, FORMATS, Llama3Model
from torchtitan.models.pretrained import internal_source, load_model, spec_of
from torchtitan.protocols.state_dict_adapter import RopePermutation, StateDictAdapter
from torchtitan.tools.errors import UserError

transformers = pytest.importorskip("transformers")


def scaled_down(published: Llama3Model.Config) -> Llama3Model.Config:
    """The same ratios, tying and RoPE scaling in a small size; samples are longer than the original
    context."""
    n_heads = 2 * published.n_heads // published.n_kv_heads
    dim = 16 * n_heads
    rope = dataclasses.replace(published.rope, original_max_seq_len=24)
    sizes = {"vocab_size": 97, "n_layers": 2, "max_seq_len": 512, "rope": rope}
    ffn_dim = dim * published.ffn_dim // published.dim
    return dataclasses.replace(
        published, dim=dim, n_heads=n_heads, n_kv_heads=2, ffn_dim=ffn_dim, **sizes
    )


ODD = Llama3Model.Config(
    vocab_size=101,
    dim=40,
    n_layers=3,
    n_heads=5,
    n_kv_heads=1,
    head_dim=14,
    ffn_dim=53,
    norm_eps=1e-3,
    max_seq_len=77,
    rope=RoPEConfig(theta=321.0),
)
LINEAR = dataclasses.replace(
    ODD, n_kv_heads=5, rope=RoPEConfig(theta=50.0, scaling="linear", scaling_factor=3.0)
)
SHAPES = {name: scaled_down(config) for name, config in FLAVORS.items()}
SHAPES |= {"odd": ODD, "linear": LINEAR}


def reference_of(config: Llama3Model.Config) -> "transformers.PreTrainedModel":
    """Return transformers' model of these sizes with random weights."""
    rope = config.rope
    parameters = {"rope_type": "default", "rope_theta": rope.theta}
    if rope.scaling == "linear":
        parameters |= {"rope_type": "linear", "factor": rope.scaling_factor}
    elif rope.scaling_factor != 1.0:
        parameters |= {
            "rope_type": "llama3",
            "factor": rope.scaling_factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_seq_len,
        }
    sizes = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        intermediate_size=config.ffn_dim,
        num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads,
        num_key_value_heads=config.n_kv_heads,
        head_dim=config.head_dim or config.dim // config.n_heads,
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.tie_embeddings,
        max_position_embeddings=config.max_seq_len,
        rope_parameters=parameters,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(sizes).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_()
            if "q_proj" in name or "k_proj" in name:
                # With initial weights, attention is nearly uniform, which would hide a wrong
                # rotation.
                parameter.normal_(std=1.5 * config.dim**-0.5)
    return model


def save_older_spelling(model: "transformers.PreTrainedModel", folder: Path) -> None:
    """Save like transformers 4."""
    model.save_pretrained(folder)
    document = json.loads((folder / "config.json").read_text())
    rope = document.pop("rope_parameters")
    document["rope_theta"] = rope.pop("rope_theta")
    document["rope_scaling"] = (
        None if rope["rope_type"] == "default" else {"type": rope.pop("rope_type"), **rope}
    )
    document["torch_dtype"] = document.pop("dtype")
    (folder / "config.json").write_text(json.dumps(document))


def tokens_for(config: Llama3Model.Config) -> torch.Tensor:
    return torch.randint(config.vocab_size, (2, 70), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def assert_same_logits(ours: Llama3Model, theirs: "transformers.PreTrainedModel") -> None:
    tokens = tokens_for(ours.config)
    # The documented tolerance; logits here are of order 1.
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)


def external_tensors(path: Path, name: str) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint in another format."""
    spec, source = internal_source(path)
    view = ExternalView(source, spec.formats[name].adapter(spec.model))
    return {key: view.read(key) for key in view.specs}


def assert_identical(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert (tensor.shape, tensor.dtype) == (expected[name].shape, expected[name].dtype), name
        values, expected_values = (
            x.contiguous().view(torch.uint8) for x in (tensor, expected[name])
        )
        assert torch.equal(values, expected_values), name


@pytest.mark.parametrize("shape", SHAPES)
class TestEveryShape:
    @pytest.mark.parametrize(
        "save", [transformers.PreTrainedModel.save_pretrained, save_older_spelling]
    )
    def test_logits_equal_transformers(self, shape, save, tmp_path):
        reference = reference_of(SHAPES[shape])
        save(reference, tmp_path)
        loaded = load_model(tmp_path, device="cpu")
        # Without scaling, the file lacks its fields.
        unscaled = SHAPES[shape].rope.scaling_factor == 1.0
        rope = RoPEConfig(theta=SHAPES[shape].rope.theta) if unscaled else SHAPES[shape].rope
        assert loaded.spec.model == dataclasses.replace(SHAPES[shape], rope=rope)
        assert not loaded.model.training
        assert_same_logits(loaded.model, reference)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_round_trip_keeps_every_byte(self, shape, dtype, tmp_path):
        reference_of(SHAPES[shape]).to(dtype).save_pretrained(tmp_path)
        assert {p.dtype for p in load_model(tmp_path, device="cpu").model.parameters()} == {dtype}
        assert_identical(
            external_tensors(tmp_path, "hf"), load_file(tmp_path / "model.safetensors")
        )

    def test_transformers_loads_our_config_json(self, shape, tmp_path):
        reference = reference_of(SHAPES[shape])
        reference.save_pretrained(tmp_path / "theirs")
        (tmp_path / "ours").mkdir()
        save_file(
            external_tensors(tmp_path / "theirs", "hf"),
            tmp_path / "ours/model.safetensors",
            {"format": "pt"},
        )
        document = FORMATS["hf"].to_external(spec_of(tmp_path / "theirs").model)
        (tmp_path / "ours/config.json").write_text(json.dumps(document))
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
        assert type(again) is type(reference)
        tokens = tokens_for(SHAPES[shape])
        assert torch.equal(again(tokens).logits, reference(tokens).logits)


def test_requested_dtype(tmp_path):
    reference_of(ODD).to(torch.bfloat16).save_pretrained(tmp_path)
    loaded = load_model(tmp_path, device="cpu", dtype=torch.float32)
    assert_same_logits(
        loaded.model,
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32),
    )


def test_real_model(stories):
    loaded = load_model(stories, device="cpu")
    assert loaded.tokenizer_path == stories
    assert_same_logits(loaded.model, transformers.AutoModelForCausalLM.from_pretrained(stories))
    assert_identical(external_tensors(stories, "hf"), load_file(stories / "model.safetensors"))


class TestTies:
    """Files with an output weight, for a model with tied embeddings."""

    @pytest.fixture
    def folder(self, tmp_path):
        reference_of(SHAPES["1B"]).save_pretrained(tmp_path)
        return tmp_path

    def add_head(self, folder: Path, change: float) -> None:
        tensors = load_file(folder / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + change
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    def test_equal_output_weight_is_accepted(self, folder):
        self.add_head(folder, 0.0)
        assert load_model(folder, device="cpu").model.head.output is None

    def test_different_output_weight_is_rejected(self, folder):
        self.add_head(folder, 1e-3)
        with pytest.raises(
            UserError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"
        ):
            load_model(folder, device="cpu")


def metas_rows(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Permute rows: Hugging Face rotates i with i + head_dim / 2, and Meta 2i with 2i + 1."""
    rows: list[torch.Tensor] = []
    for head in weight.split(head_dim):
        for i in range(head_dim // 2):
            rows += [head[i], head[i + head_dim // 2]]
    return torch.stack(rows)


def metas_weights(reference: "transformers.PreTrainedModel") -> dict[str, torch.Tensor]:
    """Return the weights of transformers' model under Meta's names, without our table."""
    theirs, head_dim = reference.state_dict(), reference.config.head_dim
    tensors = {
        "tok_embeddings.weight": theirs["model.embed_tokens.weight"],
        "norm.weight": theirs["model.norm.weight"],
    }
    tensors["output.weight"] = theirs["lm_head.weight"].clone()
    inner = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    inner |= {f"attention.w{x}": f"self_attn.{x}_proj" for x in "qkvo"}
    inner |= {
        f"feed_forward.w{i}": f"mlp.{x}_proj" for i, x in ((1, "gate"), (2, "down"), (3, "up"))
    }
    for layer in range(reference.config.num_hidden_layers):
        for ours, name in inner.items():
            weight = theirs[f"model.layers.{layer}.{name}.weight"]
            rotated = ours in ("attention.wq", "attention.wk")
            tensors[f"layers.{layer}.{ours}.weight"] = (
                metas_rows(weight, head_dim) if rotated else weight
            )
    return tensors


def save_meta(
    reference: "transformers.PreTrainedModel", config: Llama3Model.Config, folder: Path
) -> None:
    """Write a folder in Meta's format."""
    folder.mkdir()
    torch.save(metas_weights(reference), folder / "consolidated.00.pth")
    (folder / "params.json").write_text(json.dumps(FORMATS["meta"].to_external(config)))


METAS = {
    name: dataclasses.replace(
        scaled, rope=dataclasses.replace(scaled.rope, original_max_seq_len=8192)
    )
    for name, scaled in SHAPES.items()
    if name in FLAVORS
} | {"odd": dataclasses.replace(ODD, n_heads=4, head_dim=None)}
"""Shapes that Meta's format supports: one original context of RoPE scaling, and head_dim = dim /
n_heads."""


class TestMeta:
    @pytest.mark.parametrize("shape", METAS)
    def test_logits_equal_transformers_and_round_trip_is_exact(self, shape, tmp_path):
        reference = reference_of(METAS[shape])
        save_meta(reference, METAS[shape], tmp_path / "meta")
        loaded = load_model(tmp_path / "meta", device="cpu")
        assert loaded.spec.model == METAS[shape]
        assert_same_logits(loaded.model, reference)
        assert_identical(external_tensors(tmp_path / "meta", "meta"), metas_weights(reference))

    @pytest.mark.parametrize("said", [{"vocab_size": -1}, {}])
    def test_vocabulary_size_comes_from_the_weights(self, tmp_path, said):
        """Llama 1 and 2 take it from the tokenizer."""
        save_meta(reference_of(METAS["odd"]), METAS["odd"], tmp_path / "meta")
        path = tmp_path / "meta/params.json"
        document = {
            key: value for key, value in json.loads(path.read_text()).items() if key != "vocab_size"
        }
        path.write_text(json.dumps(document | said))
        assert load_model(tmp_path / "meta", device="cpu").spec.model == METAS["odd"]

    def test_missing_permutation_is_caught(self, tmp_path, monkeypatch):
        reference = reference_of(METAS["odd"])
        save_meta(reference, METAS["odd"], tmp_path / "meta")
        monkeypatch.setattr(RopePermutation, "to_internal", lambda self, tensors, shapes: tensors)
        with pytest.raises(AssertionError, match="not close"):
            assert_same_logits(load_model(tmp_path / "meta", device="cpu").model, reference)


def test_extra_permutation_is_caught(tmp_path, monkeypatch):
    """Permuting rows that are already in our order, the most common mistake with this format."""
    reference = reference_of(SHAPES["8B"])
    reference.save_pretrained(tmp_path)

    def permuted(match):
        steps = [
            dataclasses.replace(step, transform=RopePermutation(16))
            if "q_proj" in step.external[0]
            else step
            for step in match.steps
        ]
        return match._replace(steps=steps)

    match = StateDictAdapter.match
    monkeypatch.setattr(StateDictAdapter, "match", lambda *args: permuted(match(*args)))
    with pytest.raises(AssertionError, match="not close"):
        assert_same_logits(load_model(tmp_path, device="cpu").model, reference)


class TestMismatches:
    @pytest.fixture
    def folder(self, tmp_path):
        reference_of(ODD).save_pretrained(tmp_path)
        return tmp_path

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"model.norm.weight": None}, r"missing from the checkpoint: model\.norm\.weight"),
            (
                {"model.layers.0.self_attn.q_proj.bias": torch.zeros(70)},
                r"not in the model: .*q_proj\.bias",
            ),
            (
                {"model.layers.2.mlp.up_proj.weight": torch.zeros(52, 40)},
                r"up_proj\.weight has shape \[52, 40\] instead of \[53, 40\]",
            ),
        ],
    )
    def test_tensors_are_named(self, folder, changes, message):
        tensors = {**load_file(folder / "model.safetensors"), **changes}
        save_file(
            {k: v for k, v in tensors.items() if v is not None},
            folder / "model.safetensors",
            {"format": "pt"},
        )
        with pytest.raises(UserError, match=message):
            load_model(folder, device="cpu")

    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
    @pytest.mark.parametrize("only", ["", "layers.1.mlp.up_proj"])
    def test_quantized_weights_are_named(self, folder, dtype, only):
        tensors = load_file(folder / "model.safetensors")
        tensors |= {name: tensor.to(dtype) for name, tensor in tensors.items() if only in name}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        name = "layers.1.feed_forward.w3.weight" if only else r"tok_embeddings\.weight"
        message = rf"{name} \({str(dtype).removeprefix('torch.')}\).* quantized"
        with pytest.raises(UserError, match=message):
            load_model(folder, device="cpu")
        spec, source = internal_source(folder)
        with pytest.raises(UserError, match=message):
            load_weights(source, [spec.model.build()])

    def test_rope_frequencies_of_old_files_are_ignored(self, folder):
        tensors = load_file(folder / "model.safetensors")
        tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.ones(7)
        expected = load_model(folder, device="cpu").model.state_dict()
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        loaded = load_model(folder, device="cpu").model.state_dict()
        assert loaded.keys() == expected.keys()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())

    def test_other_family_is_named(self, folder):
        other = {"model_type": "lamma", "architectures": ["LammaForCausalLM"]}
        document = json.loads((folder / "config.json").read_text()) | other
        (folder / "config.json").write_text(json.dumps(document))
        with pytest.raises(
            UserError, match="'lamma', which neither a family here nor .*; did you mean 'llama'"
        ):
            load_model(folder, device="cpu")

    def test_quantized_model_is_reported_briefly(self, folder):
        document = json.loads((folder / "config.json").read_text())
        document["quantization_config"] = {
            "quant_method": "torchao",
            "quant_type": {"default": list(range(1000))},
        }
        (folder / "config.json").write_text(json.dumps(document))
        with pytest.raises(UserError, match="quantization_config has 'torchao'") as refused:
            load_model(folder, device="cpu")
        assert len(str(refused.value)) < 150 + len(str(folder))

    @pytest.mark.parametrize(
        ("text", "message"),
        [(None, "no config.json"), ("{", "not valid JSON"), ("[]", "object, not list")],
    )
    def test_invalid_config_json(self, folder, text, message):
        (folder / "config.json").unlink()
        if text is not None:
            (folder / "config.json").write_text(text)
        with pytest.raises(UserError, match=message):
            spec_of(folder)

    def test_no_checkpoint(self, tmp_path):
        with pytest.raises(UserError, match="nowhere"):
            load_model(tmp_path / "nowhere", device="cpu")


class TestModelJson:
    @pytest.fixture
    def folder(self, tmp_path):
        from torchtitan.components.checkpoint.dcp import write_dcp

        reference_of(ODD).save_pretrained(tmp_path / "hf")
        spec, source = internal_source(tmp_path / "hf")
        partial = catalog.start_partial(tmp_path, 3)
        path = Path(str(partial))
        write_dcp(path, source.specs, source.read)
        CheckpointAssets.of(spec, files_in(EMBEDDED_TOKENIZER)).write(path)
        return Path(
            str(catalog.commit(partial, catalog.Marker(step=3, kind="model_only", world_size=1)))
        )

    def test_damaged_file_is_rejected(self, folder):
        file = next(folder.glob("*.distcp"))
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        with pytest.raises(UserError, match=f"is damaged.*{file.name}"):
            load_model(folder, device="cpu")

    def test_names_its_model(self, folder):
        loaded = load_model(folder, device="cpu")
        assert loaded.spec.model == ODD
        assert (loaded.spec.module, loaded.spec.flavor) == (
            "torchtitan.models.llama3",
            "pretrained",
        )
        assert (loaded.tokenizer_path / "tokenizer.json").is_file()
        assert_same_logits(
            loaded.model,
            transformers.AutoModelForCausalLM.from_pretrained(
                folder.parent / "hf", dtype=torch.float32
            ),
        )
        assert_identical(
            external_tensors(folder, "hf"), load_file(folder.parent / "hf/model.safetensors")
        )

    def describe(self, folder: Path, **changes: object) -> None:
        path = folder / "assets/model.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    def test_family_outside_the_package(self, folder, tmp_path, monkeypatch):
        """The family must have been imported; a checkpoint never imports it."""
        self.describe(folder, module="family_of_mine")
        (tmp_path / "family_of_mine.py").write_text(
            "from torchtitan.models.llama3 import *\nFLAVORS, model_spec"
        )
        monkeypatch.syspath_prepend(str(tmp_path))
        with pytest.raises(
            UserError, match="'family_of_mine', which is neither built in nor installed.* --module"
        ):
            spec_of(folder)
        importlib.import_module("family_of_mine")
        assert spec_of(folder).model == ODD
        del sys.modules["family_of_mine"]

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"module": "json"}, "'json', which is not a model family"),
            ({"module": 5}, "module must be the import path of a model family, not 5"),
            ({"module": ""}, "'', which is not a package name"),
            ({"module": ".llama3"}, "'.llama3', which is not a package name"),
            ({"flavor": None}, "flavor must be a string, not None"),
            ({"config": [3]}, r"config must be an object, not \[3\]"),
        ],
    )
    def test_model_json_without_a_model(self, folder, changes, message):
        self.describe(folder, **changes)
        with pytest.raises(UserError, match=message):
            spec_of(folder)

    def test_configuration_of_another_model(self, folder):
        self.describe(folder, config={"dim": 3, "depth": 4})
        with pytest.raises(UserError, match="unknown keys depth"):
            spec_of(folder)

    def test_missing_model_json(self, folder):
        shutil.rmtree(folder / "assets")
        with pytest.raises(UserError, match=r"model\.json"):
            spec_of(folder)


def test_files_are_read_in_blocks(tmp_path, monkeypatch):
    """Tensors that are equal in both formats are read in slices, directly from the file."""
    reference_of(ODD).save_pretrained(tmp_path)
    asked = []
    read = HuggingFaceSource.read
    monkeypatch.setattr(
        HuggingFaceSource, "read", lambda self, *args: (asked.append(args), read(self, *args))[1]
    )
    part = internal_source(tmp_path)[1].read("tok_embeddings.weight", (slice(3, 7), slice(0, 40)))
    assert asked == [("model.embed_tokens.weight", (slice(3, 7), slice(0, 40)))]
    assert torch.equal(
        part, load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"][3:7]
    )
