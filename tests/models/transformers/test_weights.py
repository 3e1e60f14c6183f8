"""Files of transformers' classes: transformers writes them and we read them, and the other way
round, bit for bit."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.components.peft.test_adapter_files import adapted, merged, meta_model
from torchtitan.components.peft import LoRA
from torchtitan.components.peft.adapter_files import AdapterSource, write_adapter
from torchtitan.components.weights import TensorSource, open_source, pretrained
from torchtitan.components.weights.export import export_checkpoint
from torchtitan.models.pretrained import load_model, spec_of
from torchtitan.protocols import ModelSpec
from torchtitan.protocols.state_dict_adapter import Identity
from torchtitan.tools.errors import UserError

transformers = pytest.importorskip("transformers")
from torchtitan.models import transformers as family  # noqa: E402
from torchtitan.models.transformers.tiny import tiny_config  # noqa: E402
from torchtitan.models.transformers.weights import TransformersAdapter, class_names  # noqa: E402

TOKENS = torch.arange(8, 20).reshape(1, 12)
WEIGHTS = "model.safetensors"

IMAGE_TEXT = ("gemma3", "qwen2_vl", "llava")
TYPES = (
    *(
        "llama",
        "gemma3_text",
        "qwen3_moe",
        "mixtral",
        "gpt_oss",
        "deepseek_v3",
        "qwen3_next",
        "nemotron_h",
        "mamba",
    ),
    *("phi", *IMAGE_TEXT),
)


def make_random(model_type: str, **fields: Any) -> Any:
    """Return a tiny random model of transformers; `fields` of its configuration may differ from the
    defaults."""
    config = tiny_config(transformers.AutoConfig.for_model(model_type))
    if model_type == "qwen2_vl":
        config.get_text_config().rope_parameters["mrope_section"] = [2, 3, 3]
    if model_type == "nemotron_h":
        config.time_step_limit = [0.0, 1.0]
    for name, value in fields.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = auto_class(model_type).from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases are constant at first
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model


def auto_class(model_type: str) -> Any:
    return (
        transformers.AutoModelForImageTextToText
        if model_type in IMAGE_TEXT
        else transformers.AutoModelForCausalLM
    )


def open_weights(folder: Path) -> tuple[ModelSpec, TensorSource]:
    spec = spec_of(folder, family)
    return spec, pretrained.internal_source(folder, spec)


def in_class(folder: Path) -> dict[str, Tensor]:
    """Return the weights in `folder`, read by us, under the names of the class."""
    spec, source = open_weights(folder)
    with torch.device("meta"):
        names = class_names(spec.model.build())
    assert source.specs.keys() == names.keys()
    return {name: source.read(ours) for ours, name in names.items()}


def assert_same(ours: dict[str, Tensor], theirs: Any) -> None:
    """Check that `ours` are the tensors of the model `theirs`, which has tied ones under more
    names."""
    state = theirs.state_dict()
    assert [name for name, tensor in ours.items() if not torch.equal(tensor, state[name])] == []
    aliases = theirs.all_tied_weights_keys
    assert state.keys() - ours.keys() <= {*aliases, *aliases.values()}


@pytest.mark.parametrize("model_type", TYPES)
def test_files_are_read_and_written(model_type, tmp_path):
    reference = make_random(model_type)
    reference.save_pretrained(tmp_path)
    assert_same(in_class(tmp_path), reference)
    (tmp_path / "exported").mkdir()
    export_checkpoint(tmp_path / "exported", "hf", *open_weights(tmp_path), tmp_path)
    written, expected = (
        load_file(folder / WEIGHTS) for folder in (tmp_path / "exported", tmp_path)
    )
    assert written.keys() == expected.keys()
    reopened = auto_class(model_type).from_pretrained(tmp_path / "exported")
    with torch.no_grad():
        logits, theirs = (model(TOKENS, use_cache=False).logits for model in (reopened, reference))
    assert torch.equal(logits, theirs)


def test_conversions_take_the_experts_of_one_layer(tmp_path):
    """Reading or writing a tensor needs memory for one group, however many layers there are."""
    reference = make_random("qwen3_moe")
    reference.save_pretrained(tmp_path)
    spec, source = open_weights(tmp_path)
    with torch.device("meta"):
        table = TransformersAdapter(spec.model.build())
    read = table.match(open_source(tmp_path).specs).steps
    n_experts = reference.config.num_experts
    for steps in (read, table.steps):
        groups = sorted(
            (len(step.internal), len(step.external))
            for step in steps
            if step.transform != Identity()
        )
        assert groups == [(1, n_experts)] * 2 + [(1, 2 * n_experts)] * 2


def test_longcat_has_the_experts_of_its_published_files(tmp_path):
    """Transformers allocates, writes and wants matrices also for experts that return their input,
    which published files do not have."""
    reference = make_random("longcat_flash")
    reference.save_pretrained(tmp_path)
    weights = load_file(tmp_path / WEIGHTS)
    unread = re.compile(r"experts\.[4-7]\.(gate|up)_proj")
    published = {name: weight for name, weight in weights.items() if not unread.search(name)}
    assert len(weights) == len(published) + 2 * 4 * reference.config.num_layers

    with torch.no_grad():
        expected = reference(TOKENS, use_cache=False).logits
    for name, tensors in (("whole", weights), ("published", published)):
        save_file(tensors, tmp_path / WEIGHTS, {"format": "pt"})
        spec, source = open_weights(tmp_path)
        sizes = {key: value.numel() for key, value in published.items() if "bias" not in key}
        assert spec.model.build().num_parameters() == sum(sizes.values())
        model = load_model(tmp_path, device="cpu", family=family).model
        with torch.no_grad():
            # another attention, summed in another order
            torch.testing.assert_close(model(TOKENS), expected, rtol=0, atol=1e-6)
        (tmp_path / name).mkdir()
        export_checkpoint(tmp_path / name, "hf", spec, source, tmp_path)
        written = load_file(tmp_path / name / WEIGHTS)
        assert written.keys() == published.keys()
        # transformers reads no other files than its own
        filler = {name: torch.zeros_like(weights[name]) for name in weights.keys() - written.keys()}
        save_file(written | filler, tmp_path / name / WEIGHTS, {"format": "pt"})
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        with torch.no_grad():
            assert torch.equal(again(TOKENS, use_cache=False).logits, expected)


# --- other names that transformers reads
# -----------------------------------------------------------------------------


def renamed(model: Any, *changes: tuple[str, str]) -> dict[str, Tensor]:
    """Return the tensors that `save_pretrained` writes, with parts of their names changed."""
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tensors = load_file(Path(folder) / WEIGHTS)
    names = {
        name: functools.reduce(lambda new, change: re.sub(*change, new), changes, name)
        for name in tensors
    }
    assert names.keys() != set(names.values())
    return {names[name]: tensor for name, tensor in tensors.items()}


def class_named(model: Any) -> dict[str, Tensor]:
    return {
        name: tensor
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight" or not is_tied(model)
    }


def is_tied(model: Any) -> bool:
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


OTHER_FILES: dict[str, tuple[Any, Callable[[Any], dict[str, Tensor]]]] = {
    "the class's names": (("qwen3_moe", {}), class_named),
    "the class's names of images and text": (("qwen2_vl", {}), class_named),
    "names on the hub": (
        ("llava", {}),
        lambda model: renamed(model, (r"^vision_tower\.", "vision_tower.vision_model.")),
    ),
    "a base model's names": (
        ("llama", {"tie_word_embeddings": True}),
        lambda model: model.model.state_dict(),
    ),
    "names of TensorFlow": (
        ("bert", {"is_decoder": True}),
        lambda model: renamed(
            model, ("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")
        ),
    ),
    "a copy of a tied tensor": (("gemma3_text", {}), lambda model: unshared(model.state_dict())),
    "a tied tensor alone": (
        ("gemma3_text", {}),
        lambda model: renamed(model, (r"model\.embed_tokens\.weight", "lm_head.weight")),
    ),
    "tensors without information": (
        ("llama", {}),
        lambda model: {
            **model.state_dict(),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        },
    ),
    "layers of multi-token prediction": (
        ("deepseek_v3", {}),
        lambda model: {
            **unshared(model.state_dict()),
            "model.layers.61.eh_proj.weight": torch.ones(8),
        },
    ),
}


def unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def save_as(model: Any, folder: Path, tensors: dict[str, Tensor]) -> None:
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    save_file(unshared(tensors), folder / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize("kind", OTHER_FILES)
def test_other_files_are_read(kind, tmp_path):
    (model_type, fields), tensors = OTHER_FILES[kind]
    reference = make_random(model_type, **fields)
    save_as(reference, tmp_path, tensors(reference))
    opened, report = type(reference).from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert_same(in_class(tmp_path), opened)
    assert_same(in_class(tmp_path), reference)


def test_added_tokens_and_other_names(tmp_path):
    """A base model's file has no rows for added tokens: they get the mean of the others."""
    reference = make_random("llama", tie_word_embeddings=True)
    save_as(reference, tmp_path, reference.model.state_dict())
    spec = spec_of(tmp_path, family)
    n_tokens = reference.config.vocab_size
    spec.model.vocab_size = n_tokens + 2
    source = pretrained.internal_source(tmp_path, spec, added=range(n_tokens, n_tokens + 2))
    rows = source.read("model.model.embed_tokens.weight")
    embedding = reference.get_input_embeddings().weight.detach()
    assert torch.equal(rows[:n_tokens], embedding)
    torch.testing.assert_close(rows[n_tokens:], embedding.mean(0).expand(2, -1))


# --- files that do not fit
# -------------------------------------------------------------------------------------------


EXPERT = "model.layers.0.mlp.experts.1.up_proj.weight"
ABSENT = None


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        (
            "llama",
            {"model.norm.weight": ABSENT},
            r"^missing from the checkpoint: model\.norm\.weight$",
        ),
        ("llama", {"lm_head.weight": ABSENT}, r"^missing from the checkpoint: lm_head\.weight$"),
        (
            "llama",
            {"model.more.weight": (2,)},
            r"^in the checkpoint, but not in the model: model\.more\.weight$",
        ),
        (
            "llama",
            {"model.norm.weight": (3,)},
            r"model\.norm\.weight has shape \[3\] instead of \[64\]$",
        ),
        (
            "llama",
            {"norm.weight": (64,)},
            r"has model\.norm\.weight more than once: model\.norm\.weight, norm\.weight$",
        ),
        ("qwen3_moe", {EXPERT: ABSENT}, rf"^missing from the checkpoint: {EXPERT}$"),
        (
            "qwen3_moe",
            {EXPERT: (3, 64)},
            rf"do not fit the model: {EXPERT} has shape \[3, 64\] instead of \[\d+, 64\]$",
        ),
        (
            "qwen3_moe",
            {"model.layers.0.mlp.experts.4.down_proj.weight": (64, 96)},
            r"do not fit the model: \S+down_proj has shape \[5, 64, 96\] instead of \[4, 64, 96\]$",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(model_type, changes, message, tmp_path):
    reference = make_random(model_type)
    reference.save_pretrained(tmp_path)
    tensors = {
        **load_file(tmp_path / WEIGHTS),
        **{name: size and torch.ones(size) for name, size in changes.items()},
    }
    save_as(
        reference,
        tmp_path,
        {name: tensor for name, tensor in tensors.items() if tensor is not ABSENT},
    )
    with pytest.raises(UserError, match=message):
        open_weights(tmp_path)


def test_tied_tensors_must_be_equal(tmp_path):
    reference = make_random("gemma3_text")
    tensors = unshared(reference.state_dict())
    tensors["lm_head.weight"] += 1
    save_as(reference, tmp_path, tensors)
    with pytest.raises(
        UserError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"
    ):
        open_weights(tmp_path)


# --- adapters
# --------------------------------------------------------------------------------------------------


def test_adapters_have_the_names_of_the_class(tmp_path):
    """Qwen2-VL's files have `model.layers` where the class has `model.language_model.layers`."""
    peft = pytest.importorskip("peft")
    reference = make_random("qwen2_vl")
    reference.save_pretrained(tmp_path)
    spec, source = open_weights(tmp_path)
    config = LoRA.Config(rank=4, alpha=8.0, include=[r"language_model.*(q_proj|down_proj)"])
    plain = {name: source.read(name) for name in source.specs}
    model = adapted(spec, config, plain, seed=1)
    write_adapter(
        tmp_path / "adapter", config, meta_model(spec, config), spec, model.state_dict().__getitem__
    )
    opened = peft.PeftModel.from_pretrained(reference, tmp_path / "adapter")
    theirs = opened.merge_and_unload().state_dict()
    ours = merged(model)
    names = class_names(spec.model.build())
    assert [
        name
        for name in ours
        if not torch.allclose(ours[name], theirs[names[name]], rtol=1e-5, atol=1e-6)
    ] == []
    changed = {names[name] for name in ours if not torch.equal(ours[name], plain[name])}
    assert changed == {f"{name}.weight" for name in opened.targeted_module_names}


def test_adapters_of_peft_are_read(tmp_path):
    peft = pytest.importorskip("peft")
    reference = make_random("qwen2_vl")
    reference.save_pretrained(tmp_path)
    chosen = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=r".*language_model.*q_proj", init_lora_weights=False
    )
    theirs = peft.get_peft_model(reference, chosen)
    theirs.save_pretrained(tmp_path / "adapter")
    spec, _ = open_weights(tmp_path)
    config = LoRA.Config(rank=4, alpha=8.0, include=["language_model.*q_proj"])
    source = AdapterSource(tmp_path / "adapter", config, meta_model(spec, config), spec)
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    names = {name: name.removeprefix("model.") for name in source.specs}
    assert len(saved) == len(names) > 0
    for name, short in names.items():
        assert torch.equal(source.read(name), saved[f"base_model.model.{short}.weight"])
