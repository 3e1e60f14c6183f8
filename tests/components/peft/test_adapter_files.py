"""Adapters in PEFT's files: the library itself opens what we write, and we what it writes, with equal logits."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.processes import run_processes
from tests.training import run, tiny_config
from torchtitan.cli.main import main
from torchtitan.components.checkpoint import catalog
from torchtitan.components.peft import LoRA, QLoRA
from torchtitan.components.peft.adapter_files import (
    CONFIG,
    WEIGHTS,
    AdapterSource,
    check_adapter_config,
    read_adapter,
    write_adapter,
)
from torchtitan.components.peft.lora import AdaptedLayer
from torchtitan.distributed import initialize_weights
from torchtitan.distributed.tensor_parallel import apply_tensor_parallel
from torchtitan.models.pretrained import internal_source
from torchtitan.protocols import ModelConverter, ModelSpec
from torchtitan.protocols.conversion import converted_model
from torchtitan.protocols.model import converted_modules
from torchtitan.protocols.state_dict_adapter import (
    Concatenated,
    ExternalFormat,
    KeyMapping,
    RopePermutation,
    StateDictAdapter,
)
from torchtitan.tools.errors import UserError

LAYERS = r"\blayers\."
TOKENS = torch.arange(40).reshape(2, 20)

# Both sides compute in float32, in another order of sums: logits of order 1 differ by some 1e-6.
EQUAL = {"rtol": 1e-5, "atol": 1e-5}

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def save_base(folder: Path, n_layers: int = 2, **sizes: float) -> None:
    """A Llama that transformers made at random."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SIZES, **sizes}, num_hidden_layers=n_layers, tie_word_embeddings=False)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def open_base(folder: Path) -> nn.Module:
    return pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained(folder).eval()


def open_adapter(below: nn.Module, folder: Path) -> nn.Module:
    """As users of peft do."""
    return pytest.importorskip("peft").PeftModel.from_pretrained(below, folder)


def on_meta(spec: ModelSpec, config: LoRA.Config) -> nn.Module:
    return converted_model(spec.model, [config.build()])


def adapted(spec: ModelSpec, config: LoRA.Config, plain: dict[str, Tensor], seed: int | None = None) -> nn.Module:
    """The model with the weights `plain` and the adapter as it begins, or a random one."""
    model = on_meta(spec, config).to_empty(device="cpu").eval()
    initialize_weights(model, seed=0)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name in plain:
                tensor.copy_(plain[name])
        for name, module in converted_modules(model):
            for own, derived in module.derived.items():
                getattr(module, own).copy_(derived.from_rows(plain[f"{name}.{derived.plain}"].float()))
        if seed is not None:
            randomize(model, seed)
    return model


@torch.no_grad()
def randomize(model: nn.Module, seed: int) -> None:
    """Move all that is trained away from where it begins: B is zero there, and would hide A."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


def plain_weights(folder: Path) -> tuple[ModelSpec, dict[str, Tensor]]:
    spec, source = internal_source(folder)
    return spec, {name: source.read(name) for name in source.specs}


@torch.no_grad()
def merged(model: nn.Module) -> dict[str, Tensor]:
    """The plain model's weights, by what the converted modules themselves say."""
    state = dict(model.state_dict())
    for name, module in converted_modules(model):
        own = {own: state.pop(f"{name}.{own}") for own, _ in module.named_parameters(recurse=False)}
        state |= {f"{name}.{plain}": tensor for plain, tensor in module.plain_state(own).items()}
    return state


def write(folder: Path, config: LoRA.Config, model: nn.Module, spec: ModelSpec) -> None:
    write_adapter(folder, config, on_meta(spec, config), spec, model.state_dict().__getitem__)


def read(folder: Path, config: LoRA.Config, spec: ModelSpec, model: nn.Module) -> None:
    read_adapter(folder, config, on_meta(spec, config), spec, [model])


def adapter_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def adapters_in(folder: Path) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in load_file(folder / WEIGHTS).items() if "base_layer" not in key}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@torch.no_grad()
def assert_equal_logits(ours: nn.Module, theirs: nn.Module) -> None:
    torch.testing.assert_close(ours(TOKENS), theirs(TOKENS).logits, **EQUAL)


def converter(kind: str, where: str, **settings) -> LoRA.Config:
    """rank 4 and alpha 6: what is divided by what shows."""
    include = {"layers": [LAYERS], "head": [LAYERS, "^output$"], "embedding": ["wq", "w2", "tok_embeddings"]}[where]
    kinds = {"lora": {}, "rslora": {"rslora": True}, "dora": {"dora": True}, "qlora": {}, "qdora": {"dora": True}}
    config_class = QLoRA.Config if kind.startswith("q") else LoRA.Config
    return config_class(rank=4, alpha=6.0, include=include, **kinds[kind], **settings)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    save_base(folder)
    return folder


CASES = [
    *(("lora", where) for where in ("layers", "head", "embedding")),
    *(("rslora", "layers"), ("dora", "layers"), ("dora", "head")),
    *(("qlora", "head"), ("qdora", "layers")),
]


@pytest.mark.parametrize(("kind", "where"), CASES)
def test_peft_opens_what_we_write_and_we_read_it_back(base, tmp_path, kind, where):
    dropout = 0.25 if where == "layers" else 0.0  # the others' inputs are none, or tokens
    config = converter(kind, where, dropout=dropout)
    spec, plain = plain_weights(base)
    model = adapted(spec, config, plain, seed=1)
    write(tmp_path, config, model, spec)

    below = open_base(base)
    if kind.startswith("q"):  # the model below the adapter is the one in 4 bits
        below.load_state_dict(to_external(spec, merged(adapted(spec, config, plain))))
    theirs = open_adapter(below, tmp_path)
    assert_equal_logits(model, theirs)
    assert theirs.peft_config["default"].lora_dropout == dropout

    again = adapted(spec, config, plain, seed=2)
    read(tmp_path, config, spec, again)
    assert_same(adapter_of(again), adapter_of(model))
    if not kind.startswith("q"):  # whose merged weights are of 16 bits
        # The merged export is the base and its adapter, to the rounding of one addition of float32.
        of_peft = theirs.merge_and_unload().state_dict()
        for name, tensor in to_external(spec, merged(model)).items():
            torch.testing.assert_close(tensor, of_peft[name], rtol=1e-5, atol=1e-6)


def to_external(spec: ModelSpec, internal: dict[str, Tensor]) -> dict[str, Tensor]:
    made: dict[str, Tensor] = {}
    for step in spec.formats["hf"].adapter(spec.model).steps:
        made |= dict(zip(step.external, step.transform.to_external([internal[n] for n in step.internal]), strict=True))
    return made


PEFT_NAMES = {
    "layers": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "head": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"],
    "embedding": ["q_proj", "down_proj", "embed_tokens"],
}


def save_peft_adapter(folder: Path, below: nn.Module, kind: str, where: str) -> nn.Module:
    """An adapter that peft made, as if it were trained; the model with it."""
    peft = pytest.importorskip("peft")
    options = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=PEFT_NAMES[where],
        use_rslora=kind == "rslora",
        use_dora=kind == "dora",
        task_type="CAUSAL_LM",
    )
    theirs = peft.get_peft_model(below, options).eval()
    randomize(theirs, seed=3)
    theirs.save_pretrained(folder)
    return theirs


@pytest.mark.parametrize(("kind", "where"), [case for case in CASES if not case[0].startswith("q")])
def test_we_read_what_peft_saved_and_write_the_same(base, tmp_path, kind, where):
    theirs = save_peft_adapter(tmp_path / "theirs", open_base(base), kind, where)
    config = converter(kind, where)
    spec, plain = plain_weights(base)
    model = adapted(spec, config, plain)
    read(tmp_path / "theirs", config, spec, model)
    assert_equal_logits(model, theirs)
    write(tmp_path / "ours", config, model, spec)
    assert_same(adapters_in(tmp_path / "ours"), adapters_in(tmp_path / "theirs"))


@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_a_base_in_fewer_bits_is_the_same_base(base, tmp_path, kind):
    """A run keeps frozen weights in the type that it computes in, or in 4 bits; peft's file has the head's in 32."""
    theirs = save_peft_adapter(tmp_path, open_base(base), "lora", "head")
    config = converter(kind, "head")
    spec, plain = plain_weights(base)
    model = adapted(spec, config, plain)
    for parameter in model.parameters():
        if parameter.is_floating_point() and not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    read(tmp_path, config, spec, model)
    head = theirs.get_submodule("base_model.model.lm_head.lora_B.default").weight
    assert torch.equal(model.get_parameter("output.lora_B"), head)


def test_the_real_model(assets, tmp_path):
    folder = assets / "stories260K/hf-converted"
    config = converter("dora", "layers")
    spec, plain = plain_weights(folder)
    model = adapted(spec, config, plain, seed=1)
    write(tmp_path, config, model, spec)
    assert_equal_logits(model, open_adapter(open_base(folder), tmp_path))


@pytest.mark.parametrize(
    "include", [r"layers\.1\.", r"layers\.11\.attention\.wq", r"layers\.\d\.feed_forward", "wq|w2"]
)
def test_exactly_the_chosen_layers_are_adapted(tmp_path, include):
    """Of twelve: the name of layer 1 is the beginning of that of layer 11, and `q_proj` the end of all."""
    save_base(tmp_path, n_layers=12)
    config = LoRA.Config(rank=4, alpha=8.0, include=[include])
    spec, plain = plain_weights(tmp_path)
    model = adapted(spec, config, plain, seed=1)
    write(tmp_path / "adapter", config, model, spec)
    theirs = open_adapter(open_base(tmp_path), tmp_path / "adapter")
    chosen = [f"{name}.weight" for name, module in model.named_modules() if isinstance(module, AdaptedLayer)]
    steps = spec.formats["hf"].adapter(spec.model).steps
    expected = {step.external[0].removesuffix(".weight") for step in steps if step.internal[0] in chosen}
    assert set(theirs.targeted_module_names) == expected
    assert_equal_logits(model, theirs)


# --- a family whose query and key rows are in another order in its files ---------------------------------------------


def permuted_table(config) -> StateDictAdapter:
    """Llama's names, and rows in the order of the RoPE paper: as transformers' Ernie 4.5 has them."""
    rows = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
    within = {
        **{f"attention.w{x}": f"self_attn.{x}_proj" for x in "qkvo"},
        **{f"feed_forward.w{i}": f"mlp.{x}_proj" for i, x in ((1, "gate"), (3, "up"), (2, "down"))},
        **{"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
    }
    rows |= {f"layers.*.{ours}": f"model.layers.*.{theirs}" for ours, theirs in within.items()}
    permutation = RopePermutation(config.resolved_head_dim)
    return StateDictAdapter(
        [
            KeyMapping(f"{ours}.weight", f"{theirs}.weight", *([permutation] if ours.endswith(("wq", "wk")) else []))
            for ours, theirs in rows.items()
        ],
        n_layers=config.n_layers,
    )


def with_table(spec: ModelSpec, table) -> ModelSpec:
    llama = spec.formats["hf"]
    format = ExternalFormat(adapter=table, to_external=llama.to_external, from_external=llama.from_external)
    return dataclasses.replace(spec, formats={"hf": format})


def permuted_family(below: nn.Module, base: Path) -> tuple[ModelSpec, dict[str, Tensor]]:
    """Our model with the weights of `below`, which rotates neighboring elements."""
    spec = with_table(internal_source(base)[0], permuted_table)
    spec.model.rope.theta = 10_000.0
    state = below.state_dict()
    plain: dict[str, Tensor] = {}
    for step in permuted_table(spec.model).steps:
        tensors = [state[name] for name in step.external]
        plain |= dict(zip(step.internal, step.transform.to_internal(tensors, [t.shape for t in tensors]), strict=True))
    return spec, plain


@pytest.fixture
def ernie() -> nn.Module:
    """A transformers model that is Llama with RoPE on neighboring elements."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Ernie4_5Config(
        **SIZES,
        num_hidden_layers=2,
        head_dim=16,
        tie_word_embeddings=False,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    return transformers.Ernie4_5ForCausalLM(config).eval()


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_permuted_rows_there(base, tmp_path, ernie, kind):
    spec, plain = permuted_family(ernie, base)
    config = converter(kind, "layers")
    assert_equal_logits(adapted(spec, config, plain), ernie)
    model = adapted(spec, config, plain, seed=1)
    write(tmp_path / "right", config, model, spec)
    below = {name: tensor.clone() for name, tensor in ernie.state_dict().items()}
    if kind == "lora":
        # W + s·B·A in their order of rows is ours permuted; sums of the same numbers, so to float32's last bits.
        tensors = adapters_in(tmp_path / "right")
        for name, weight in to_external(spec, merged(model)).items():
            key = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{key}.lora_A.weight" in tensors:
                update = tensors[f"{key}.lora_B.weight"] @ tensors[f"{key}.lora_A.weight"] * (6 / 4)
                torch.testing.assert_close(weight, below[name] + update, rtol=1e-6, atol=1e-6)
    assert_equal_logits(model, open_adapter(ernie, tmp_path / "right"))


def test_permuted_rows_that_are_not_permuted_would_show(base, tmp_path, ernie):
    """The check above can fail: with Llama's table the same adapter gives other logits."""
    spec, plain = permuted_family(ernie, base)
    config = converter("lora", "layers")
    model = adapted(spec, config, plain, seed=1)
    write(tmp_path, config, model, internal_source(base)[0])
    with torch.no_grad():
        logits = open_adapter(ernie, tmp_path)(TOKENS).logits
        assert (logits - model(TOKENS)).abs().max() > 1e-2


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_permuted_rows_back(base, tmp_path, ernie, kind):
    spec, plain = permuted_family(ernie, base)
    theirs = save_peft_adapter(tmp_path / "theirs", ernie, kind, "layers")
    config = converter(kind, "layers")
    model = adapted(spec, config, plain)
    read(tmp_path / "theirs", config, spec, model)
    assert_equal_logits(model, theirs)
    write(tmp_path / "ours", config, model, spec)
    assert_same(adapters_in(tmp_path / "ours"), adapters_in(tmp_path / "theirs"))


def fused_table(config) -> StateDictAdapter:
    """Queries, keys and values in one tensor, as many families have them."""
    steps = permuted_table(dataclasses.replace(config, n_layers=1)).steps
    qkv = tuple(f"layers.0.attention.{name}.weight" for name in ("wq", "wk", "wv"))
    rows = [KeyMapping(step.internal, step.external, step.transform) for step in steps if step.internal[0] not in qkv]
    fused = KeyMapping(qkv, "model.layers.0.self_attn.qkv_proj.weight", Concatenated(0))
    return StateDictAdapter([*rows, fused], n_layers=1)


def test_a_fused_weight_is_refused(tmp_path):
    save_base(tmp_path, n_layers=1)
    spec = with_table(internal_source(tmp_path)[0], fused_table)
    config = converter("lora", "layers")
    with pytest.raises(UserError, match=r"wq\.weight \(model\.layers\.0\.self_attn\.qkv_proj\.weight\)"):
        write_adapter(tmp_path, config, on_meta(spec, config), spec, lambda name: torch.empty(0))
    others = LoRA.Config(rank=4, alpha=6.0, include=["wo"])
    model = adapted(spec, others, {}, seed=1)
    write(tmp_path / "adapter", others, model, spec)
    assert json.loads((tmp_path / "adapter" / CONFIG).read_text())["target_modules"] == ["o_proj"]


# --- in any layout ---------------------------------------------------------------------------------------------------


def read_in_every_layout(base: Path, folder: Path) -> None:
    rank = torch.distributed.get_rank()
    spec = with_table(internal_source(base)[0], permuted_table)
    config = converter("dora", "head")
    expected = AdapterSource(folder, config, on_meta(spec, config), spec)
    for layout in ("fsdp", "tp", "pp"):
        model = on_meta(spec, config)
        if layout == "fsdp":
            for layer in (*model.layers.values(), model):
                fully_shard(layer)
        elif layout == "tp":
            mesh = init_device_mesh("cpu", (2,))
            apply_tensor_parallel(model, mesh, spec.sharding, disable_loss_parallel=False)
        else:
            del model.layers[str(1 - rank)]
            if rank == 0:
                model.output = None
        model.to_empty(device="cpu")
        initialize_weights(model, seed=0)
        load_base_head(model, expected)
        read_adapter(folder, config, on_meta(spec, config), spec, [model])
        read_here = {name: parameter for name, parameter in model.named_parameters() if name in expected.specs}
        assert len(read_here) == (len(expected.specs) if layout != "pp" else 21 + 4 * rank)
        for name, parameter in read_here.items():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            assert torch.equal(whole, expected.read(name)), (layout, name)


@torch.no_grad()
def load_base_head(model: nn.Module, source: AdapterSource) -> None:
    """The file has the head's own weights, which are compared with the model's."""
    if model.output is not None:
        weight, whole = model.output.weight, source.read("output.weight")
        is_shared = isinstance(weight, DTensor)
        weight.copy_(distribute_tensor(whole, weight.device_mesh, weight.placements) if is_shared else whole)


def test_each_process_reads_its_part(base, tmp_path, ernie):
    save_peft_adapter(tmp_path, ernie, "dora", "head")
    run_processes(read_in_every_layout, 2, base, tmp_path)


# --- in runs ---------------------------------------------------------------------------------------------------------


OF_RUNS = {"vocab_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 4, "rms_norm_eps": 1e-5}
"""What the settings of `tests.training.TINY` and of its tokenizer are called in config.json."""

KEY_OF_B = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"


def run_config(
    folder: Path, name: str, *converters: ModelConverter.Config, base: Path | None = None, **options: object
) -> Any:
    """A run of two steps in `folder` from the weights in its `base`, or another's, with a checkpoint after each."""
    settings = {"training__steps": 2, "checkpoint__enable": True, "checkpoint__interval": 1, **options}
    settings |= {"checkpoint__initial_load_path": (base or folder) / "base", "checkpoint__initial_load_in_hf": True}
    config = tiny_config(folder / name, **settings)
    config.model_converters = list(converters)
    config.check(world_size=1)
    return config


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Folder `base` has what both runs begin with; `full` exports in the end, `trained` keeps trained weights only."""
    folder = tmp_path_factory.mktemp("runs")
    save_base(folder / "base", **OF_RUNS)
    dora = converter("dora", "layers")
    run(run_config(folder, "full", dora, checkpoint__last_save_in_hf=True))
    run(run_config(folder, "trained", dora, checkpoint__save_trainable_only=True))
    return folder


def checkpoint(runs: Path, name: str, step: int) -> Path:
    return runs / name / "checkpoint" / f"step-{step}"


def test_a_run_exports_its_adapter_beside_the_merged_model(runs):
    """Both compute the same, by transformers and by peft; the adapter has been trained."""
    exported = checkpoint(runs, "full", 2)
    theirs = open_adapter(open_base(runs / "base"), exported / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(theirs(TOKENS).logits, open_base(exported)(TOKENS).logits, **EQUAL)
    assert all(adapters_in(exported / "adapter")[KEY_OF_B].abs().amax(dim=0) > 0)
    assert catalog.verify(exported) == []


def test_a_run_begins_from_an_adapter(runs, tmp_path):
    exported = checkpoint(runs, "full", 2) / "adapter"
    config = converter("dora", "layers", adapter_path=str(exported))
    trainer = run_config(runs, "next", config).build()
    trainer.load_checkpoint()
    (model,) = trainer.model_parts
    trainer.close()
    write(tmp_path / "again", config, model, trainer.config.model_spec)
    assert_same(adapters_in(tmp_path / "again"), adapters_in(exported))


def test_an_adapter_of_other_settings_is_found_before_the_run(runs):
    exported = checkpoint(runs, "full", 2) / "adapter"
    with pytest.raises(UserError, match=r"use_dora is True, but --model_converters\.lora\.dora is False"):
        run_config(runs, "next", converter("lora", "layers", adapter_path=str(exported)))
    with pytest.raises(UserError, match=r"lora\.adapter_path: the folder .* has no adapter_config\.json"):
        run_config(runs, "next", converter("lora", "layers", adapter_path=str(runs)))


def test_the_adapter_of_a_checkpoint(runs, tmp_path, capsys):
    """Of one with all weights and of one with the trained ones: the same run, so the same adapter."""
    for name in ("full", "trained"):
        assert main(["convert", "--to", "peft", str(checkpoint(runs, name, 1)), str(tmp_path / name)]) == 0
        assert "(peft): llama3 debugmodel, 42 tensors" in capsys.readouterr().out
    assert_same(adapters_in(tmp_path / "full"), adapters_in(tmp_path / "trained"))
    assert sorted(file.name for file in (tmp_path / "full").iterdir()) == [CONFIG, WEIGHTS]
    words = ["--to", "peft", "--export_dtype", "bfloat16", str(checkpoint(runs, "full", 1)), str(tmp_path / "half")]
    assert main(["convert", *words]) == 0
    whole = adapters_in(tmp_path / "full")
    assert_same(adapters_in(tmp_path / "half"), {key: tensor.bfloat16() for key, tensor in whole.items()})
    # On top of the base it is the model that is exported merged.
    assert main(["convert", "--to", "hf", str(checkpoint(runs, "full", 1)), str(tmp_path / "merged")]) == 0
    assert_same(adapters_in(tmp_path / "merged/adapter"), whole)
    theirs = open_adapter(open_base(runs / "base"), tmp_path / "trained")
    with torch.no_grad():
        torch.testing.assert_close(theirs(TOKENS).logits, open_base(tmp_path / "merged")(TOKENS).logits, **EQUAL)


def test_a_merged_model_in_float32_is_not_rounded_before(runs, tmp_path):
    """The base is in bfloat16, as it was computed with, and what is added to it is not; of the change, float32 may lose
    what it loses of a sum (1e-4 of it, as it is small)."""
    lora = LoRA.Config(rank=4, alpha=6.0, include=["w2"])
    options = {"training__mixed_precision_param": "bfloat16", "checkpoint__export_dtype": "float32"}
    run(run_config(runs, "precise", lora, **options, checkpoint__last_save_in_hf=True))
    exported, name = checkpoint(runs, "precise", 2), "model.layers.1.mlp.down_proj"
    weights = {
        folder: load_file(folder / "model.safetensors")[f"{name}.weight"] for folder in (exported, runs / "base")
    }
    a, b = (adapters_in(exported / "adapter")[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
    expected = 6 / 4 * b @ a
    change = weights[exported] - weights[runs / "base"].bfloat16().float()
    assert expected.norm() > 0 and (change - expected).norm() < 1e-4 * expected.norm()


class TrainNorms(ModelConverter):
    """Trains the norms again, which adapters have frozen."""

    def convert(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.requires_grad_()


OTHERS = {
    "two adapters": (QLoRA.Config(rank=4, include=["w1"]), "layers.0.feed_forward.w1.lora_A", " has 2"),
    "norms": (TrainNorms.Config(), r"layers.0.attention_norm.weight, .*norm.weight", "layers.0.attention_norm.weight"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_half_of_what_was_trained_is_not_written(runs, tmp_path, capsys, caplog, case):
    """Neither beside an export, of a run or of its checkpoint, nor alone; both say why."""
    other, names, alone = OTHERS[case]
    converters = [LoRA.Config(rank=4, include=["attention"]), other]
    with caplog.at_level("WARNING", "torchtitan"):
        run(run_config(tmp_path, "run", *converters, base=runs, checkpoint__last_save_in_hf=True))
    message = f"exported without a separate adapter: PEFT files hold only one adapter, .*: {names}"
    assert any(re.match(message, line) for line in caplog.messages)
    assert not list(checkpoint(tmp_path, "run", 2).rglob(WEIGHTS))
    whole = str(checkpoint(tmp_path, "run", 1))
    assert main(["convert", "--to", "hf", whole, str(tmp_path / "merged")]) == 0
    assert re.search(message, capsys.readouterr().err)
    assert not list((tmp_path / "merged").rglob(WEIGHTS))
    assert main(["convert", "--to", "peft", whole, str(tmp_path / "alone")]) == 2
    assert alone in capsys.readouterr().err


def test_a_checkpoint_without_an_adapter_is_refused(runs, tmp_path, capsys):
    plain = tmp_path / "plain"
    assert main(["convert", "--to", "dcp", str(runs / "base"), str(plain)]) == 0
    for source in (plain, runs / "base"):
        assert main(["convert", "--to", "peft", str(source), str(tmp_path / "out")]) == 2
        message = capsys.readouterr().err
        assert f"--to peft writes the adapter of a model, and {source} has none: name the step-N folder" in message
    assert list(tmp_path.iterdir()) == [plain]


# --- what does not fit -----------------------------------------------------------------------------------------------


@pytest.fixture
def saved(base, tmp_path) -> tuple[Path, LoRA.Config, ModelSpec, dict[str, Tensor]]:
    """An adapter of ours, and what it belongs to."""
    config = converter("lora", "head")
    spec, plain = plain_weights(base)
    write(tmp_path, config, adapted(spec, config, plain, seed=1), spec)
    return tmp_path, config, spec, plain


def edit_config(folder: Path, **options) -> None:
    file = folder / CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | options))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 8}, r"r is 4, but --model_converters.lora.rank is 8; set --model_converters.lora.rank 4$"),
        (
            {"alpha": 4.0},
            r"lora_alpha is 6, but --model_converters.lora.alpha is 4.0; set --model_converters.lora.alpha 6$",
        ),
        ({"rslora": True}, r"use_rslora is False, .*lora.rslora is True; set --model_converters.lora.no_rslora$"),
        ({"dora": True}, r"use_dora is False, but --model_converters.lora.dora is True"),
    ],
)
def test_another_setting_is_refused(saved, change, message):
    folder, config, *_ = saved
    with pytest.raises(UserError, match=message):
        check_adapter_config(folder, dataclasses.replace(config, **change))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type 'LOHA'"),
        ({"bias": "all"}, "bias 'all'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
        ({"modules_to_save": ["lm_head"]}, r"unsupported options: modules_to_save \(\['lm_head'\]\)"),
        ({"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 2}}, "alpha_pattern .*, rank_pattern "),
        ({"lora_bias": True}, "lora_bias"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"option_of_tomorrow": 1}, "option_of_tomorrow"),
    ],
)
def test_an_unsupported_option_is_refused(saved, options, message):
    folder, config, *_ = saved
    check_adapter_config(folder, config)
    edit_config(folder, **options)
    with pytest.raises(UserError, match=message):
        check_adapter_config(folder, config)


def test_all_defaults_of_peft_are_supported(saved):
    """Whatever options it has: those that are not set say nothing."""
    folder, config, *_ = saved
    defaults = (
        pytest.importorskip("peft")
        .LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", target_modules=["q_proj"])
        .to_dict()
    )
    edit_config(folder, **json.loads(json.dumps(defaults, default=list)))
    check_adapter_config(folder, config)


def test_other_layers_are_refused(saved):
    folder, config, spec, plain = saved
    other = dataclasses.replace(config, include=[LAYERS], exclude=[r"layers\.1\.attention\.wq"])
    with pytest.raises(UserError, match=r"only in the file: layers\.1\.attention\.wq, output$"):
        read(folder, other, spec, adapted(spec, other, plain))
    fewer = dataclasses.replace(config, include=["wq"])
    write(folder / "fewer", fewer, adapted(spec, fewer, plain), spec)
    with pytest.raises(UserError, match=r"only in the run: layers\.0\.attention\.wk, .*13 in all"):
        read(folder / "fewer", config, spec, adapted(spec, config, plain))


KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({KEY: None}, "q_proj.lora_B.weight is missing"),
        ({KEY: torch.zeros(32, 4)}, r"q_proj.lora_B.weight has shape \[32, 4\] instead of \[64, 4\]"),
        ({KEY: torch.zeros(64, 4, dtype=torch.int8)}, "q_proj.lora_B.weight has type int8"),
        (
            {KEY.replace("lora_B.weight", "lora_magnitude_vector"): torch.zeros(64)},
            "lora_magnitude_vector is unknown",
        ),
        ({KEY.replace("lora_B", "base_layer"): torch.zeros(64, 64)}, "its layers.0.attention.wq.weight differs"),
        ({"surprise": torch.zeros(1)}, "only in the file: surprise"),
    ],
    ids=["missing", "misshapen", "quantized", "unknown", "another base", "another layer"],
)
def test_tensors_that_do_not_fit_are_named(saved, change, message):
    folder, config, spec, plain = saved
    tensors = {name: tensor for name, tensor in (load_file(folder / WEIGHTS) | change).items() if tensor is not None}
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(UserError, match=message):
        read(folder, config, spec, adapted(spec, config, plain))


def test_missing_and_damaged_files_are_named(saved):
    folder, config, spec, plain = saved
    model = adapted(spec, config, plain)
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=f"{re.escape(WEIGHTS)} cannot be read"):
        read(folder, config, spec, model)
    (folder / CONFIG).write_text("{")
    with pytest.raises(UserError, match=f"{re.escape(CONFIG)}' is not valid JSON"):
        check_adapter_config(folder, config)
    (folder / WEIGHTS).unlink()
    with pytest.raises(UserError, match=f"adapter_path: the folder .* has no {re.escape(WEIGHTS)}"):
        check_adapter_config(folder, config)
    with pytest.raises(UserError, match=f"the folder '{folder}/nowhere' has no {re.escape(CONFIG)}"):
        check_adapter_config(folder / "nowhere", config)
