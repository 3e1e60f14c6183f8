"""Adapters in PEFT format: peft opens our files, and we open its files, with equal logits."""

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

from tests.models.family_cases import class_of
from tests.pretrained import assert_equal, make_pretrained
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
    ExternalFormat,
    KeyMapping,
    RopePermutation,
    StateDictAdapter,
)
from torchtitan.tools.errors import UserError

LAYERS = r"\blayers\."
TOKENS = torch.arange(40).reshape(2, 20)

# Float32 sums in another order: logits of about 1 differ by about 1e-6.
EQUAL = {"rtol": 1e-5, "atol": 1e-5}

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
}


def open_base(folder: Path) -> nn.Module:
    config = pytest.importorskip("transformers").AutoConfig.from_pretrained(folder)
    return class_of(config).from_pretrained(folder).eval()


def open_adapter(below: nn.Module, folder: Path) -> nn.Module:
    """Open an adapter with peft."""
    return pytest.importorskip("peft").PeftModel.from_pretrained(below, folder)


def meta_model(spec: ModelSpec, config: LoRA.Config) -> nn.Module:
    return converted_model(spec.model, [config.build()])


def adapted(
    spec: ModelSpec, config: LoRA.Config, plain: dict[str, Tensor], seed: int | None = None
) -> nn.Module:
    """Return the model with the weights `plain`, and an initial adapter or, with `seed`, a random
    one."""
    model = meta_model(spec, config).to_empty(device="cpu").eval()
    initialize_weights(model, seed=0)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name in plain:
                tensor.copy_(plain[name])
        for name, module in converted_modules(model):
            for own, derived in module.derived.items():
                getattr(module, own).copy_(
                    derived.from_rows(plain[f"{name}.{derived.plain}"].float())
                )
        if seed is not None:
            randomize(model, seed)
    return model


@torch.no_grad()
def randomize(model: nn.Module, seed: int) -> None:
    """Move trainable parameters away from their initial values: B would be 0 and hide A."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


def plain_weights(folder: Path) -> tuple[ModelSpec, dict[str, Tensor]]:
    spec, source = internal_source(folder)
    return spec, {name: source.read(name) for name in source.specs}


@torch.no_grad()
def merged(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of the plain model, merged by the converted modules."""
    state = dict(model.state_dict())
    for name, module in converted_modules(model):
        own = {own: state.pop(f"{name}.{own}") for own, _ in module.named_parameters(recurse=False)}
        state |= {f"{name}.{plain}": tensor for plain, tensor in module.plain_state(own).items()}
    return state


def write(folder: Path, config: LoRA.Config, model: nn.Module, spec: ModelSpec) -> None:
    write_adapter(folder, config, meta_model(spec, config), spec, model.state_dict().__getitem__)


def read(folder: Path, config: LoRA.Config, spec: ModelSpec, model: nn.Module) -> None:
    read_adapter(folder, config, meta_model(spec, config), spec, [model])


def adapter_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def adapters_in(folder: Path) -> dict[str, Tensor]:
    return {
        key: tensor
        for key, tensor in load_file(folder / WEIGHTS).items()
        if "base_layer" not in key
    }


@torch.no_grad()
def assert_equal_logits(ours: nn.Module, theirs: nn.Module) -> None:
    torch.testing.assert_close(ours(TOKENS), theirs(TOKENS).logits, **EQUAL)


def converter(kind: str, target: str, **settings) -> LoRA.Config:
    """Return a configuration with rank 4 and alpha 6, so that a wrong scale changes the logits."""
    include = {
        "layers": [LAYERS],
        "head": [LAYERS, r"^head\.output$"],
        "embedding": ["wq", "w2", "tok_embeddings"],
    }[target]
    kinds = {
        "lora": {},
        "rslora": {"rslora": True},
        "dora": {"dora": True},
        "qlora": {},
        "qdora": {"dora": True},
    }
    config_class = QLoRA.Config if kind.startswith("q") else LoRA.Config
    return config_class(rank=4, alpha=6.0, include=include, **kinds[kind], **settings)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_pretrained(tmp_path_factory.mktemp("base"), **SIZES)


CASES = [
    *(("lora", target) for target in ("layers", "head", "embedding")),
    *(("rslora", "layers"), ("dora", "layers"), ("dora", "head")),
    *(("qlora", "head"), ("qdora", "layers")),
]


@pytest.mark.parametrize(("kind", "target"), CASES)
def test_round_trip_through_peft(base, tmp_path, kind, target):
    dropout = 0.25 if target == "layers" else 0.0  # heads and embeddings cannot have dropout
    config = converter(kind, target, dropout=dropout)
    spec, plain = plain_weights(base)
    model = adapted(spec, config, plain, seed=1)
    write(tmp_path, config, model, spec)

    below = open_base(base)
    if kind.startswith("q"):  # the base model has the 4-bit weights
        below.load_state_dict(to_external(spec, merged(adapted(spec, config, plain))))
    theirs = open_adapter(below, tmp_path)
    assert_equal_logits(model, theirs)
    assert theirs.peft_config["default"].lora_dropout == dropout

    again = adapted(spec, config, plain, seed=2)
    read(tmp_path, config, spec, again)
    assert_equal(adapter_of(again), adapter_of(model))
    if not kind.startswith("q"):  # merged 4-bit weights are 16-bit
        # Up to the rounding of one float32 addition.
        peft_weights = theirs.merge_and_unload().state_dict()
        for name, tensor in to_external(spec, merged(model)).items():
            torch.testing.assert_close(tensor, peft_weights[name], rtol=1e-5, atol=1e-6)


def to_external(spec: ModelSpec, internal: dict[str, Tensor]) -> dict[str, Tensor]:
    external: dict[str, Tensor] = {}
    for step in spec.formats["hf"].adapter(spec.model).steps:
        external |= dict(
            zip(
                step.external,
                step.transform.to_external([internal[n] for n in step.internal]),
                strict=True,
            )
        )
    return external


PEFT_NAMES = {
    "layers": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "head": [
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
        "lm_head",
    ],
    "embedding": ["q_proj", "down_proj", "embed_tokens"],
}


def save_peft_adapter(folder: Path, below: nn.Module, kind: str, target: str) -> nn.Module:
    """Save a random adapter with peft; return its model."""
    peft = pytest.importorskip("peft")
    options = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=PEFT_NAMES[target],
        use_rslora=kind == "rslora",
        use_dora=kind == "dora",
        task_type="CAUSAL_LM",
    )
    theirs = peft.get_peft_model(below, options).eval()
    randomize(theirs, seed=3)
    theirs.save_pretrained(folder)
    return theirs


@pytest.mark.parametrize("kind", ["lora", "rslora", "dora"])
def test_sizes_of_single_layers(base, tmp_path, kind):
    """With peft's kinds of patterns: last parts, regular expressions, full names, and several that
    match, in the order of the alphabet, since peft sorts them in its file."""
    peft = pytest.importorskip("peft")
    options = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=PEFT_NAMES["head"],
        rank_pattern={
            "^model.layers.1.self_attn.q_proj": 2,
            "k_proj|q_proj": 3,
            "lm_head": 5,
            "mlp.*": 7,
        },
        alpha_pattern={"down_proj": 1.5, r"layers\.0\..*": 9, "lm_head": 2},
        use_rslora=kind == "rslora",
        use_dora=kind == "dora",
    )
    theirs = peft.get_peft_model(open_base(base), options).eval()
    randomize(theirs, seed=3)
    theirs.save_pretrained(tmp_path / "theirs")
    ranks = ["layers.1.attention.wq=2", "w[qk]=3", "head.output=5", "feed_forward.*=7"]
    alphas = ["w2=1.5", r"layers\.0\..*=9", "output=2"]
    config = converter(kind, "head", rank_pattern=ranks, alpha_pattern=alphas)
    spec, plain = plain_weights(base)
    model = adapted(spec, config, plain)
    read(tmp_path / "theirs", config, spec, model)
    assert_equal_logits(model, theirs)
    randomize(model, seed=4)  # as more training
    write(tmp_path / "ours", config, model, spec)
    assert_equal_logits(model, open_adapter(open_base(base), tmp_path / "ours"))
    again = adapted(spec, config, plain)
    read(tmp_path / "ours", config, spec, again)
    assert_equal(adapter_of(again), adapter_of(model))


@pytest.mark.parametrize(
    ("kind", "target"), [case for case in CASES if not case[0].startswith("q")]
)
def test_round_trip_of_a_peft_adapter(base, tmp_path, kind, target):
    theirs = save_peft_adapter(tmp_path / "theirs", open_base(base), kind, target)
    config = converter(kind, target)
    spec, plain = plain_weights(base)
    model = adapted(spec, config, plain)
    read(tmp_path / "theirs", config, spec, model)
    assert_equal_logits(model, theirs)
    write(tmp_path / "ours", config, model, spec)
    assert_equal(adapters_in(tmp_path / "ours"), adapters_in(tmp_path / "theirs"))


@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_a_rounded_base_is_accepted(base, tmp_path, kind):
    """Runs keep frozen weights in bfloat16 or 4 bits; the file of peft has the head in float32."""
    theirs = save_peft_adapter(tmp_path, open_base(base), "lora", "head")
    config = converter(kind, "head")
    spec, plain = plain_weights(base)
    model = adapted(spec, config, plain)
    for parameter in model.parameters():
        if parameter.is_floating_point() and not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    read(tmp_path, config, spec, model)
    head = theirs.get_submodule("base_model.model.lm_head.lora_B.default").weight
    assert torch.equal(model.get_parameter("head.output.lora_B"), head)


def test_pretrained_model(assets, tmp_path):
    folder = assets / "stories260K/hf-converted"
    config = converter("dora", "layers")
    spec, plain = plain_weights(folder)
    model = adapted(spec, config, plain, seed=1)
    write(tmp_path, config, model, spec)
    assert_equal_logits(model, open_adapter(open_base(folder), tmp_path))


@pytest.mark.parametrize(
    "include", [r"layers\.1\.", r"layers\.11\.attention\.wq", r"layers\.\d\.feed_forward", "wq|w2"]
)
def test_only_selected_layers_are_adapted(tmp_path, include):
    """Of twelve layers: the name of layer 1 is a prefix of layer 11, and `q_proj` is a common
    suffix."""
    make_pretrained(tmp_path, **SIZES, num_hidden_layers=12)
    config = LoRA.Config(rank=4, alpha=8.0, include=[include])
    spec, plain = plain_weights(tmp_path)
    model = adapted(spec, config, plain, seed=1)
    write(tmp_path / "adapter", config, model, spec)
    theirs = open_adapter(open_base(tmp_path), tmp_path / "adapter")
    chosen = [
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, AdaptedLayer)
    ]
    steps = spec.formats["hf"].adapter(spec.model).steps
    expected = {
        step.external[0].removesuffix(".weight") for step in steps if step.internal[0] in chosen
    }
    assert set(theirs.targeted_module_names) == expected
    assert_equal_logits(model, theirs)


# --- a family whose files have query and key rows in another order
# ---------------------------------------------------


def permuted_table(config) -> StateDictAdapter:
    """Llama names with rows in the order of the RoPE paper, like Ernie 4.5 in transformers."""
    rows = {
        "tok_embeddings": "model.embed_tokens",
        "head.norm": "model.norm",
        "head.output": "lm_head",
    }
    within = {
        **{f"attention.w{x}": f"self_attn.{x}_proj" for x in "qkvo"},
        **{f"feed_forward.w{i}": f"mlp.{x}_proj" for i, x in ((1, "gate"), (3, "up"), (2, "down"))},
        **{"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
    }
    rows |= {f"layers.*.{ours}": f"model.layers.*.{theirs}" for ours, theirs in within.items()}
    permutation = RopePermutation(config.resolved_head_dim)
    return StateDictAdapter(
        [
            KeyMapping(
                f"{ours}.weight",
                f"{theirs}.weight",
                *([permutation] if ours.endswith(("wq", "wk")) else []),
            )
            for ours, theirs in rows.items()
        ],
        n_layers=config.n_layers,
    )


def with_table(spec: ModelSpec, table) -> ModelSpec:
    llama = spec.formats["hf"]
    format = ExternalFormat(
        adapter=table, to_external=llama.to_external, from_external=llama.from_external
    )
    return dataclasses.replace(spec, formats={"hf": format})


def permuted_family(below: nn.Module, base: Path) -> tuple[ModelSpec, dict[str, Tensor]]:
    """Return our model with the weights of `below`, whose RoPE rotates neighboring elements."""
    spec = with_table(internal_source(base)[0], permuted_table)
    spec.model.rope.theta = 10_000.0
    state = below.state_dict()
    plain: dict[str, Tensor] = {}
    for step in permuted_table(spec.model).steps:
        tensors = [state[name] for name in step.external]
        plain |= dict(
            zip(
                step.internal,
                step.transform.to_internal(tensors, [t.shape for t in tensors]),
                strict=True,
            )
        )
    return spec, plain


@pytest.fixture
def ernie() -> nn.Module:
    """A transformers model like Llama, with RoPE on neighboring elements."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Ernie4_5Config(
        **SIZES,
        num_hidden_layers=2,
        head_dim=16,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    return transformers.Ernie4_5ForCausalLM(config).eval()


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_writing_permuted_rows(base, tmp_path, ernie, kind):
    spec, plain = permuted_family(ernie, base)
    config = converter(kind, "layers")
    assert_equal_logits(adapted(spec, config, plain), ernie)
    model = adapted(spec, config, plain, seed=1)
    write(tmp_path / "right", config, model, spec)
    below = {name: tensor.clone() for name, tensor in ernie.state_dict().items()}
    if kind == "lora":
        # W + s·B·A with their row order equals our merged weight, permuted; up to float32 rounding.
        tensors = adapters_in(tmp_path / "right")
        for name, weight in to_external(spec, merged(model)).items():
            key = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{key}.lora_A.weight" in tensors:
                update = tensors[f"{key}.lora_B.weight"] @ tensors[f"{key}.lora_A.weight"] * (6 / 4)
                torch.testing.assert_close(weight, below[name] + update, rtol=1e-6, atol=1e-6)
    assert_equal_logits(model, open_adapter(ernie, tmp_path / "right"))


def test_missing_permutation_changes_logits(base, tmp_path, ernie):
    """The test above can fail: with the table of Llama, the same adapter gives other logits."""
    spec, plain = permuted_family(ernie, base)
    config = converter("lora", "layers")
    model = adapted(spec, config, plain, seed=1)
    write(tmp_path, config, model, internal_source(base)[0])
    with torch.no_grad():
        logits = open_adapter(ernie, tmp_path)(TOKENS).logits
        assert (logits - model(TOKENS)).abs().max() > 1e-2


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_reading_permuted_rows(base, tmp_path, ernie, kind):
    spec, plain = permuted_family(ernie, base)
    theirs = save_peft_adapter(tmp_path / "theirs", ernie, kind, "layers")
    config = converter(kind, "layers")
    model = adapted(spec, config, plain)
    read(tmp_path / "theirs", config, spec, model)
    assert_equal_logits(model, theirs)
    write(tmp_path / "ours", config, model, spec)
    assert_equal(adapters_in(tmp_path / "ours"), adapters_in(tmp_path / "theirs"))


# --- a family whose files fuse layers
# --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def phi(tmp_path_factory) -> Path:
    return make_fused("phi3", tmp_path_factory.mktemp("phi"))


@pytest.fixture(scope="module")
def glm(tmp_path_factory) -> Path:
    """Part of the rows of queries and keys is in another order, too."""
    return make_fused("glm4", tmp_path_factory.mktemp("glm"), head_dim=16)


def make_fused(model_type: str, folder: Path, **fields: Any) -> Path:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        model_type, **SIZES, num_hidden_layers=2, pad_token_id=None, **fields
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


FUSED_NAMES = {
    "phi": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "glm": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"],
}


@pytest.mark.parametrize(
    ("family", "kind"),
    [*(("phi", kind) for kind in ("lora", "rslora", "dora", "qlora", "qdora")), ("glm", "dora")],
)
def test_writing_adapters_of_fused_layers(family, kind, tmp_path, request):
    base = request.getfixturevalue(family)
    config = converter(kind, "layers")
    spec, plain = plain_weights(base)
    model = adapted(spec, config, plain, seed=1)
    write(tmp_path, config, model, spec)
    below = open_base(base)
    if kind.startswith("q"):
        below.load_state_dict(to_external(spec, merged(adapted(spec, config, plain))))
    theirs = open_adapter(below, tmp_path)
    assert {name.rpartition(".")[2] for name in theirs.targeted_module_names} == set(
        FUSED_NAMES[family]
    )
    assert_equal_logits(model, theirs)
    again = adapted(spec, config, plain, seed=2)
    read(tmp_path, config, spec, again)
    assert_equal(adapter_of(again), adapter_of(model))


@pytest.mark.parametrize(
    ("family", "kind"),
    [("phi", "lora"), ("phi", "rslora"), ("phi", "dora"), ("glm", "lora"), ("glm", "dora")],
)
def test_reading_adapters_of_fused_layers(family, kind, tmp_path, request, monkeypatch):
    """And our file of them, for peft."""
    base = request.getfixturevalue(family)
    monkeypatch.setitem(PEFT_NAMES, "layers", FUSED_NAMES[family])
    theirs = save_peft_adapter(tmp_path / "theirs", open_base(base), kind, "layers")
    config = converter(kind, "layers")
    spec, plain = plain_weights(base)
    model = adapted(spec, config, plain)
    read(tmp_path / "theirs", config, spec, model)
    assert_equal_logits(model, theirs)
    write(tmp_path / "ours", config, model, spec)
    assert_equal_logits(model, open_adapter(open_base(base), tmp_path / "ours"))


def test_scale_and_order_of_fused_layers_matter(phi, tmp_path):
    """The tests above can fail."""
    config = converter("lora", "layers")
    spec, plain = plain_weights(phi)
    model = adapted(spec, config, plain, seed=1)
    write(tmp_path, config, model, spec)
    document, tensors = json.loads((tmp_path / CONFIG).read_text()), load_file(tmp_path / WEIGHTS)
    assert document["alpha_pattern"] == {"qkv_proj": 18, "gate_up_proj": 12}
    edit(tmp_path, alpha_pattern={})
    assert_other_logits(model, open_adapter(open_base(phi), tmp_path))
    with pytest.raises(
        UserError,
        match=r"gives other ranks or alpha to .*; set --model_converters\.lora\.rank_pattern",
    ):
        read(tmp_path, config, spec, model)
    edit(tmp_path, alpha_pattern=document["alpha_pattern"])
    exchanged = {
        key: torch.cat(tensor.chunk(2)[::-1]) if "gate_up_proj.lora_A" in key else tensor
        for key, tensor in tensors.items()
    }
    save_file(exchanged, tmp_path / WEIGHTS)
    assert_other_logits(model, open_adapter(open_base(phi), tmp_path))


@torch.no_grad()
def assert_other_logits(ours: nn.Module, theirs: nn.Module) -> None:
    assert (ours(TOKENS) - theirs(TOKENS).logits).abs().max() > 1e-2


def edit(folder: Path, **changes: Any) -> None:
    document = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(document | changes))


def test_inseparable_adapters_of_fused_layers_are_rejected(phi, tmp_path):
    """After more training by peft, say."""
    config = converter("lora", "layers")
    spec, plain = plain_weights(phi)
    model = adapted(spec, config, plain, seed=1)
    write(tmp_path, config, model, spec)
    tensors = load_file(tmp_path / WEIGHTS)
    key = "base_model.model.model.layers.1.mlp.gate_up_proj.lora_B.weight"
    tensors[key] += 0.1
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(
        UserError, match=r"layers\.1\.mlp\.gate_up_proj is 2 layers here, .* is not block-diagonal"
    ):
        read(tmp_path, config, spec, model)
    sizes = {
        "rank_pattern": ["attention.w[qkv]=12", "w[13]=8"],
        "alpha_pattern": ["attention.w[qkv]=18", "w[13]=12"],
    }
    config = dataclasses.replace(config, **sizes)
    model = adapted(spec, config, plain)
    read(tmp_path, config, spec, model)
    assert_equal_logits(model, open_adapter(open_base(phi), tmp_path))


def test_some_of_fused_layers_are_rejected(phi, tmp_path):
    spec, _ = plain_weights(phi)
    config = LoRA.Config(rank=4, alpha=6.0, include=["wq", "wv", "wo"])
    pattern = (
        r"layers\.0\.attention\.wq\.weight, .*wv\.weight "
        r"\(model\.layers\.0\.self_attn\.qkv_proj\.weight\)"
    )
    with pytest.raises(UserError, match=pattern):
        write_adapter(tmp_path, config, meta_model(spec, config), spec, lambda name: torch.empty(0))
    sizes = LoRA.Config(rank=4, alpha=6.0, rank_pattern=["wq=2"])
    with pytest.raises(
        UserError, match=r"the same rank and alpha for .*: layers\.0\.attention\.wq\.weight, .*wk"
    ):
        write_adapter(tmp_path, sizes, meta_model(spec, sizes), spec, lambda name: torch.empty(0))
    others = LoRA.Config(rank=4, alpha=6.0, include=["wo"])
    model = adapted(spec, others, {}, seed=1)
    write(tmp_path / "adapter", others, model, spec)
    document = json.loads((tmp_path / "adapter" / CONFIG).read_text())
    assert document["target_modules"] == ["o_proj"] and "rank_pattern" not in document


# --- layouts
# --------------------------------------------------------------------------------------------------


def check_layouts(base: Path, folder: Path) -> None:
    rank = torch.distributed.get_rank()
    spec = with_table(internal_source(base)[0], permuted_table)
    config = converter("dora", "head")
    expected = AdapterSource(folder, config, meta_model(spec, config), spec)
    for layout in ("fsdp", "tp", "pp"):
        model = meta_model(spec, config)
        if layout == "fsdp":
            for layer in (*model.layers.values(), model):
                fully_shard(layer)
        elif layout == "tp":
            mesh = init_device_mesh("cpu", (2,))
            apply_tensor_parallel(model, mesh, spec.sharding, disable_loss_parallel=False)
        else:
            del model.layers[str(1 - rank)]
            if rank == 0:
                model.head.output = None
        model.to_empty(device="cpu")
        initialize_weights(model, seed=0)
        load_base_head(model, expected)
        read_adapter(folder, config, meta_model(spec, config), spec, [model])
        loaded = {
            name: parameter
            for name, parameter in model.named_parameters()
            if name in expected.specs
        }
        assert len(loaded) == (len(expected.specs) if layout != "pp" else 21 + 4 * rank)
        for name, parameter in loaded.items():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            assert torch.equal(whole, expected.read(name)), (layout, name)


@torch.no_grad()
def load_base_head(model: nn.Module, source: AdapterSource) -> None:
    """Set the weights of the head, which reading an adapter compares with the file."""
    if model.head.output is not None:
        weight, whole = model.head.output.weight, source.read("head.output.weight")
        is_sharded = isinstance(weight, DTensor)
        weight.copy_(
            distribute_tensor(whole, weight.device_mesh, weight.placements) if is_sharded else whole
        )


@pytest.mark.slow
def test_each_process_reads_its_shard(base, tmp_path, ernie):
    save_peft_adapter(tmp_path, ernie, "dora", "head")
    run_processes(check_layouts, 2, base, tmp_path)


# --- in runs
# --------------------------------------------------------------------------------------------------


KEY_OF_B = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"


def run_config(
    folder: Path,
    name: str,
    *converters: ModelConverter.Config,
    base: Path | None = None,
    **options: object,
) -> Any:
    """Return a run of two steps from the weights in `base`, with a checkpoint after each step."""
    settings = {
        "training__steps": 2,
        "checkpoint__enable": True,
        "checkpoint__interval": 1,
        **options,
    }
    settings |= {
        "checkpoint__initial_load_path": (base or folder) / "base",
        "checkpoint__initial_load_in_hf": True,
    }
    config = tiny_config(folder / name, **settings)
    config.model_converters = list(converters)
    config.check(world_size=1)
    return config


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Two runs from the weights in `base`: `full` ends with an export, `trained` saves only trained
    weights."""
    folder = tmp_path_factory.mktemp("runs")
    make_pretrained(folder / "base", initializer_range=0.02)
    dora = converter("dora", "layers")
    run(run_config(folder, "full", dora, checkpoint__last_save_in_hf=True))
    run(run_config(folder, "trained", dora, checkpoint__save_trainable_only=True))
    return folder


def checkpoint(runs: Path, name: str, step: int) -> Path:
    return runs / name / "checkpoint" / f"step-{step}"


def test_a_run_exports_its_adapter_and_the_merged_model(runs):
    """The merged model and the base with the adapter give equal logits; the adapter was trained."""
    exported = checkpoint(runs, "full", 2)
    theirs = open_adapter(open_base(runs / "base"), exported / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(
            theirs(TOKENS).logits, open_base(exported)(TOKENS).logits, **EQUAL
        )
    assert all(adapters_in(exported / "adapter")[KEY_OF_B].abs().amax(dim=0) > 0)
    assert catalog.verify(exported) == []


def test_a_run_starts_from_an_adapter(runs, tmp_path):
    exported = checkpoint(runs, "full", 2) / "adapter"
    config = converter("dora", "layers", adapter_path=str(exported))
    trainer = run_config(runs, "next", config).build()
    trainer.load_checkpoint()
    (model,) = trainer.model_parts
    trainer.close()
    write(tmp_path / "again", config, model, trainer.config.model_spec)
    assert_equal(adapters_in(tmp_path / "again"), adapters_in(exported))


def test_an_adapter_with_other_settings_is_rejected_before_the_run(runs):
    exported = checkpoint(runs, "full", 2) / "adapter"
    with pytest.raises(
        UserError, match=r"use_dora is True, but --model_converters\.lora\.dora is False"
    ):
        run_config(runs, "next", converter("lora", "layers", adapter_path=str(exported)))
    with pytest.raises(
        UserError, match=r"lora\.adapter_path: the folder .* has no adapter_config\.json"
    ):
        run_config(runs, "next", converter("lora", "layers", adapter_path=str(runs)))


@pytest.mark.slow
def test_converting_a_checkpoint_to_peft(runs, tmp_path, capsys):
    """Checkpoints with all weights and with only trained ones give the same adapter."""
    for name in ("full", "trained"):
        assert (
            main(["convert", "--to", "peft", str(checkpoint(runs, name, 1)), str(tmp_path / name)])
            == 0
        )
        assert "(peft): llama3 debugmodel, 42 tensors" in capsys.readouterr().out
    assert_equal(adapters_in(tmp_path / "full"), adapters_in(tmp_path / "trained"))
    assert sorted(file.name for file in (tmp_path / "full").iterdir()) == [CONFIG, WEIGHTS]
    words = [
        "--to",
        "peft",
        "--export_dtype",
        "bfloat16",
        str(checkpoint(runs, "full", 1)),
        str(tmp_path / "half"),
    ]
    assert main(["convert", *words]) == 0
    whole = adapters_in(tmp_path / "full")
    assert_equal(
        adapters_in(tmp_path / "half"), {key: tensor.bfloat16() for key, tensor in whole.items()}
    )
    # With the base, it equals the merged export.
    assert (
        main(["convert", "--to", "hf", str(checkpoint(runs, "full", 1)), str(tmp_path / "merged")])
        == 0
    )
    assert_equal(adapters_in(tmp_path / "merged/adapter"), whole)
    theirs = open_adapter(open_base(runs / "base"), tmp_path / "trained")
    with torch.no_grad():
        torch.testing.assert_close(
            theirs(TOKENS).logits, open_base(tmp_path / "merged")(TOKENS).logits, **EQUAL
        )


@pytest.mark.slow
def test_a_float32_export_does_not_round_the_update(runs, tmp_path):
    """The base is rounded to bfloat16, as in training, but not the update. The float32 sum may lose
    1e-4 of the small update."""
    lora = LoRA.Config(rank=4, alpha=6.0, include=["w2"])
    options = {"training__mixed_precision_param": "bfloat16", "checkpoint__export_dtype": "float32"}
    run(run_config(runs, "precise", lora, **options, checkpoint__last_save_in_hf=True))
    exported, name = checkpoint(runs, "precise", 2), "model.layers.1.mlp.down_proj"
    weights = {
        folder: load_file(folder / "model.safetensors")[f"{name}.weight"]
        for folder in (exported, runs / "base")
    }
    a, b = (
        adapters_in(exported / "adapter")[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB"
    )
    expected = 6 / 4 * b @ a
    change = weights[exported] - weights[runs / "base"].bfloat16().float()
    assert expected.norm() > 0 and (change - expected).norm() < 1e-4 * expected.norm()


class TrainNorms(ModelConverter):
    """Trains the norms, which adapters have frozen."""

    def convert(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.requires_grad_()


OTHERS = {
    "two adapters": (
        QLoRA.Config(rank=4, include=["w1"]),
        "layers.0.feed_forward.w1.lora_A",
        " has 2",
    ),
    "norms": (
        TrainNorms.Config(),
        "head.norm.weight, layers.0.attention_norm",
        "layers.0.attention_norm.weight",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS)
def test_an_adapter_that_is_not_all_trained_weights_is_not_written(
    runs, tmp_path, capsys, caplog, case
):
    """Exports have no separate adapter, and `--to peft` is rejected; both messages give the
    reason."""
    other, names, message_alone = OTHERS[case]
    converters = [LoRA.Config(rank=4, include=["attention"]), other]
    with caplog.at_level("WARNING", "torchtitan"):
        run(run_config(tmp_path, "run", *converters, base=runs, checkpoint__last_save_in_hf=True))
    message = f"exported without a separate adapter: PEFT files hold only one adapter, .*: {names}"
    assert any(re.search(message, line) for line in caplog.messages)
    assert not list(checkpoint(tmp_path, "run", 2).rglob(WEIGHTS))
    whole = str(checkpoint(tmp_path, "run", 1))
    assert main(["convert", "--to", "hf", whole, str(tmp_path / "merged")]) == 0
    assert re.search(message, capsys.readouterr().err)
    assert not list((tmp_path / "merged").rglob(WEIGHTS))
    assert main(["convert", "--to", "peft", whole, str(tmp_path / "alone")]) == 2
    assert message_alone in capsys.readouterr().err


def test_a_checkpoint_without_adapter_is_rejected(runs, tmp_path, capsys):
    plain = tmp_path / "plain"
    assert main(["convert", "--to", "dcp", str(runs / "base"), str(plain)]) == 0
    for source in (plain, runs / "base"):
        assert main(["convert", "--to", "peft", str(source), str(tmp_path / "out")]) == 2
        message = capsys.readouterr().err
        assert (
            f"--to peft writes a single adapter, but {source} has none; use the step-N folder"
            in message
        )
    assert list(tmp_path.iterdir()) == [plain]


# --- mismatches
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(base, tmp_path) -> tuple[Path, LoRA.Config, ModelSpec, dict[str, Tensor]]:
    """An adapter in a folder, with its configuration and base model."""
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
        (
            {"rank": 8},
            r"r is 4, but --model_converters.lora.rank is 8; set --model_converters.lora.rank 4$",
        ),
        (
            {"alpha": 4.0},
            r"lora_alpha is 6, but --model_converters.lora.alpha is 4.0; set "
            r"--model_converters.lora.alpha 6$",
        ),
        (
            {"rslora": True},
            r"use_rslora is False, .*lora.rslora is True; set --model_converters.lora.no_rslora$",
        ),
        ({"dora": True}, r"use_dora is False, but --model_converters.lora.dora is True"),
    ],
)
def test_other_settings_are_rejected(saved, change, message):
    folder, config, *_ = saved
    with pytest.raises(UserError, match=message):
        check_adapter_config(folder, dataclasses.replace(config, **change))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type 'LOHA'"),
        ({"bias": "all"}, "bias 'all'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
        (
            {"modules_to_save": ["lm_head"]},
            r"unsupported options: modules_to_save \(\['lm_head'\]\)",
        ),
        ({"lora_bias": True}, "lora_bias"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"option_of_tomorrow": 1}, "option_of_tomorrow"),
    ],
)
def test_unsupported_options_are_rejected(saved, options, message):
    folder, config, *_ = saved
    check_adapter_config(folder, config)
    edit_config(folder, **options)
    with pytest.raises(UserError, match=message):
        check_adapter_config(folder, config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {".*proj": 4, "q_proj": 9}},
            r"alpha to layers\.0\.attention\.wk, .*14 in all\); set "
            r"--model_converters\.lora\.rank_pattern wq=2 "
            r"and set --model_converters\.lora\.alpha_pattern wq=4 wk=4 wv=4 wo=4 w1=4 w2=4 w3=4$",
        ),
        (
            {"rank_pattern": {r"model\.layers\.1\.mlp\.(up|down)_proj": 2}},
            r"to layers\.1\.feed_forward\.w2, layers\.1\.feed_forward\.w3; set "
            r"--model_converters\.lora\.rank_pattern "
            r"1\\\.feed_forward\\\.w2=2 1\\\.feed_forward\\\.w3=2$",
        ),
        (
            {"rank_pattern": {"q_proj": 2.5}},
            r"rank_pattern of 'q_proj' is 2\.5, not a number above 0",
        ),
        (
            {"alpha_pattern": {"q_proj": True}},
            "alpha_pattern of 'q_proj' is True, not a number above 0",
        ),
        ({"rank_pattern": {"(": 2}}, r"rank_pattern has '\(', which is no regular expression"),
        ({"rank_pattern": ["q_proj"]}, r"rank_pattern \['q_proj'\] is not an object"),
        ({"target_parameters": 3}, "target_parameters 3 is not a list"),
    ],
)
def test_other_sizes_are_named_with_the_options_to_set(saved, options, message):
    folder, config, spec, plain = saved
    edit_config(folder, **options)
    with pytest.raises(UserError, match=message):
        read(folder, config, spec, adapted(spec, config, plain))


def test_defaults_of_peft_are_supported(saved):
    """Whatever options this version of peft has."""
    folder, config, *_ = saved
    defaults = (
        pytest.importorskip("peft")
        .LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", target_modules=["q_proj"])
        .to_dict()
    )
    edit_config(folder, **json.loads(json.dumps(defaults, default=list)))
    check_adapter_config(folder, config)


def test_other_layers_are_rejected(saved):
    folder, config, spec, plain = saved
    other = dataclasses.replace(config, include=[LAYERS], exclude=[r"layers\.1\.attention\.wq"])
    with pytest.raises(
        UserError, match=r"only in the file: head\.output, layers\.1\.attention\.wq$"
    ):
        read(folder, other, spec, adapted(spec, other, plain))
    fewer = dataclasses.replace(config, include=["wq"])
    write(folder / "fewer", fewer, adapted(spec, fewer, plain), spec)
    with pytest.raises(
        UserError, match=r"only in the run: head\.output, layers\.0\.attention\.wk, .*13 in all"
    ):
        read(folder / "fewer", config, spec, adapted(spec, config, plain))


KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({KEY: None}, "q_proj.lora_B.weight is missing"),
        (
            {KEY: torch.zeros(32, 4)},
            r"q_proj.lora_B.weight has shape \[32, 4\] instead of \[64, 4\]",
        ),
        ({KEY: torch.zeros(64, 4, dtype=torch.int8)}, "q_proj.lora_B.weight has type int8"),
        (
            {KEY.replace("lora_B.weight", "lora_magnitude_vector"): torch.zeros(64)},
            "lora_magnitude_vector is unknown",
        ),
        (
            {KEY.replace("lora_B", "base_layer"): torch.zeros(64, 64)},
            "its layers.0.attention.wq.weight differs",
        ),
        ({"surprise": torch.zeros(1)}, "only in the file: surprise"),
    ],
    ids=["missing", "misshapen", "quantized", "unknown", "another base", "another layer"],
)
def test_mismatched_tensors_are_named(saved, change, message):
    folder, config, spec, plain = saved
    tensors = {
        name: tensor
        for name, tensor in (load_file(folder / WEIGHTS) | change).items()
        if tensor is not None
    }
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
    with pytest.raises(
        UserError, match=f"the folder '{folder}/nowhere' has no {re.escape(CONFIG)}"
    ):
        check_adapter_config(folder / "nowhere", config)
