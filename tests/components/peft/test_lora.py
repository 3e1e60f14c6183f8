"""LoRA, rsLoRA and DoRA, compared with peft, on one and two processes."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.equivalence.runs import UnitVariance
from tests.training import RaggedDataLoader, flags, read_metrics, read_validation, run, tiny_config
from torchtitan.components.peft import LoRA
from torchtitan.components.peft.lora import AdaptedLayer, LoRALinear
from torchtitan.config.manager import ConfigManager
from torchtitan.distributed import initialize_weights
from torchtitan.distributed.mixed_precision import MixedPrecision
from torchtitan.distributed.tensor_parallel import shard_parameters
from torchtitan.models.common.feed_forward import make_linear
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.protocols import ModelConverter
from torchtitan.protocols.conversion import convert_model
from torchtitan.protocols.initializer import (
    Constant,
    TruncatedNormal,
    initializers_of,
    with_initializers,
)
from torchtitan.protocols.model import converted_modules
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger

SIZES = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 56, "vocab_size": 61}
EVERYWHERE = [r"."]
LINEAR = [r"\blayers\.", r"^head\.output$"]

KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"rslora": True},
    "dora": {"dora": True},
    "lora everywhere": {"include": EVERYWHERE},
    "dora and head": {"dora": True, "include": LINEAR},
}
"""Options of `LoRA.Config`."""


def plain_model(**sizes: Any) -> Llama3Model:
    """Return a plain model on the meta device."""
    with torch.device("meta"):
        return Llama3Model.Config(**{**SIZES, **sizes}, rope=RoPEConfig(theta=10_000.0)).build()


def initialized(model: nn.Module) -> Any:
    """Return the model on the CPU, with initial weights."""
    model.to_empty(device="cpu")
    initialize_weights(model, seed=7)
    return model


def adapted_model(**options: Any) -> Any:
    """Return a model with new adapters of rank 4."""
    model = plain_model()
    convert_model(model, [LoRA.Config(**{"rank": 4, "alpha": 8.0, **options}).build()])
    return initialized(model)


def tokens(rows: int = 2, length: int = 9) -> Tensor:
    return torch.randint(
        0, SIZES["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(3)
    )


@torch.no_grad()
def randomize(model: nn.Module) -> None:
    """Move the adapters away from their initial values."""
    generator = torch.Generator().manual_seed(5)
    for module in model.modules():
        for name in module.adapter if isinstance(module, AdaptedLayer) else ():
            parameter = module.get_parameter(name)
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter * (1 + 0.2 * noise) if name == "magnitude" else 0.2 * noise)


# --- against peft
# --------------------------------------------------------------------------------------------------

MODULES = {
    "tok_embeddings": "embed_tokens",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "head.norm": "norm",
    "head.output": "lm_head",
}
PARAMETERS = {
    "weight": ("base_layer.weight", "weight"),
    "bias": ("base_layer.bias",),
    "lora_A": ("lora_A.default.weight", "lora_embedding_A.default"),
    "lora_B": ("lora_B.default.weight", "lora_embedding_B.default"),
    "magnitude": ("lora_magnitude_vector.default.weight",),
}


def name_in_peft(module: str) -> str:
    for ours, theirs in MODULES.items():
        module = module.removesuffix(ours) + theirs if module.endswith(ours) else module
    return f"base_model.model.{module if module == 'lm_head' else f'model.{module}'}"


def parameter_in_peft(module: nn.Module, name: str) -> Tensor:
    parameters = dict(module.named_parameters())
    return next(parameters[key] for key in PARAMETERS[name] if key in parameters)


def peft_model(options: dict[str, Any]) -> Any:
    """Return a random Llama of transformers with adapters of the same kind."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=SIZES["dim"],
        intermediate_size=SIZES["ffn_dim"],
        num_hidden_layers=SIZES["n_layers"],
        num_attention_heads=SIZES["n_heads"],
        num_key_value_heads=SIZES["n_kv_heads"],
        vocab_size=SIZES["vocab_size"],
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
        tie_word_embeddings=False,
    )
    lora = LoRA.Config(**options)
    targets = [
        name_in_peft(name).removeprefix("base_model.model.")
        for name in lora.build().select(plain_model())
    ]
    settings = {"use_rslora": lora.rslora, "use_dora": lora.dora}
    plain = transformers.LlamaForCausalLM(config)
    return peft.get_peft_model(
        plain, peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, **settings)
    )


@torch.no_grad()
def copy_to_peft(model: nn.Module, theirs: nn.Module) -> None:
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            parameter_in_peft(theirs.get_submodule(name_in_peft(module_name)), name).copy_(
                parameter
            )


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_equal_peft(kind):
    """Up to float32 rounding: the order of products differs."""
    ours, theirs = adapted_model(**KINDS[kind]), peft_model(KINDS[kind])
    randomize(ours)
    copy_to_peft(ours, theirs)
    logits, expected = ours(tokens()), theirs(tokens()).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    labels = tokens().roll(-1, 1).flatten()
    for value in (logits, expected):
        F.cross_entropy(value.flatten(0, 1), labels).backward()
    adapters = {name for name, parameter in ours.named_parameters() if parameter.requires_grad}
    assert len(adapters) == sum(parameter.requires_grad for parameter in theirs.parameters())
    for name in adapters:
        module_name, _, own = name.rpartition(".")
        reference = parameter_in_peft(theirs.get_submodule(name_in_peft(module_name)), own).grad
        gradient = ours.get_parameter(name).grad
        assert reference.norm() > 0, name
        assert (gradient - reference).norm() <= 1e-5 * reference.norm(), name


def linear_layer(bias: bool = True, **options: Any) -> LoRALinear:
    """Return a layer with 24 inputs and 16 outputs."""
    with torch.device("meta"):
        plain = nn.Linear(24, 16, bias=bias)
    with_initializers(
        plain, weight=TruncatedNormal(0.2), **({"bias": TruncatedNormal(0.2)} if bias else {})
    )
    settings: dict[str, Any] = {"rank": 4, "scaling": 2.0, "dropout": 0.0, "dora": False, **options}
    return initialized(LoRALinear(plain, **settings))


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_a_layer_with_bias_and_dropout_equals_peft(dora, dropout):
    """The same random numbers drop the same inputs; up to float32 rounding."""
    peft = pytest.importorskip("peft")
    layer = linear_layer(dropout=dropout, dora=dora)
    randomize(layer)
    config = peft.LoraConfig(
        r=4, lora_alpha=8, lora_dropout=dropout, use_dora=dora, target_modules=["0"]
    )
    whole = peft.get_peft_model(nn.Sequential(nn.Linear(24, 16)), config)
    theirs = whole.base_model.model[0]
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter_in_peft(theirs, name).copy_(parameter)
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(2))
    for training in (True, False):
        layer.train(training), theirs.train(training)
        torch.manual_seed(11)
        y = layer(x)
        torch.manual_seed(11)
        torch.testing.assert_close(y, theirs(x), rtol=1e-5, atol=1e-5)


def test_adapters_are_initialized_as_in_peft():
    """A is uniform within 1 / √in: check the bound and the variance (1 / 3 of the squared bound; 5
    % is four standard errors for these 2048 numbers). B is 0. In embeddings, A is 0 and B is
    normal."""
    model = plain_model(dim=128)
    convert_model(model, [LoRA.Config(rank=16, include=EVERYWHERE).build()])
    initialized(model)
    first = model.layers["0"].attention.wq
    assert first.lora_A.abs().max() <= 128**-0.5
    assert first.lora_A.var().item() == pytest.approx(1 / 128 / 3, rel=0.05)
    assert not first.lora_B.any()
    assert not model.tok_embeddings.lora_A.any()
    assert model.tok_embeddings.lora_B.var().item() == pytest.approx(1, rel=0.15)


# --- compared with the plain model
# ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_adapter_does_not_change_the_output(kind):
    assert torch.equal(adapted_model(**KINDS[kind])(tokens()), initialized(plain_model())(tokens()))


@pytest.mark.parametrize("dora", [False, True])
def test_a_new_adapter_does_not_change_the_output_in_mixed_precision(dora):
    """Exactly, with a frozen bfloat16 weight, a float32 adapter, and bfloat16 products."""
    layer = linear_layer(dora=dora).to_empty(device="meta")
    for parameter in (layer.weight, layer.bias):
        parameter.data = parameter.data.bfloat16()
    initialized(layer)
    assert layer.lora_A.dtype == torch.float32 and layer.weight.dtype == torch.bfloat16
    x = torch.randn(5, 24).bfloat16()
    with MixedPrecision(torch.bfloat16).of(layer):
        assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_give_the_same_output(kind):
    """In a plain model, up to float32 rounding. Shapes are also known on the meta device."""
    adapted, merged = adapted_model(**KINDS[kind]), plain_model()
    randomize(adapted)
    state = {
        name: parameter
        for name, parameter in adapted.named_parameters()
        if name.endswith(".weight")
    }
    for name, module in converted_modules(adapted):
        own = dict(module.named_parameters(recurse=False))
        plain = module.plain_state(own)
        without_values = module.plain_state({key: value.to("meta") for key, value in own.items()})
        assert without_values["weight"].shape == plain["weight"].shape
        state |= {f"{name}.{key}": value for key, value in plain.items()}
    merged.load_state_dict(state, assign=True)
    torch.testing.assert_close(merged(tokens()), adapted(tokens()), rtol=1e-5, atol=1e-5)
    # The adapter is large enough for its effect to be compared.
    changed = state["layers.1.feed_forward.w2.weight"] - adapted.layers["1"].feed_forward.w2.weight
    assert changed.norm() > 0.1


def test_merging_is_computed_in_float32():
    """A float32 export keeps an update that is too small for bfloat16."""
    layer = linear_layer(bias=False)
    own = {
        "weight": torch.ones(16, 24),
        "lora_A": torch.full((4, 24), 2**-6),
        "lora_B": torch.full((16, 4), 2**-6),
    }
    in_bfloat16 = {name: value.bfloat16() for name, value in own.items()}
    in_bfloat16["weight"] = torch.full((16, 24), 1 + 2**-7).bfloat16()
    merged = layer.plain_state(in_bfloat16)["weight"]
    assert torch.equal(merged, torch.full((16, 24), 1 + 2**-7 + 2.0 * 4 * 2**-12))
    assert layer.plain_types(in_bfloat16) == {"weight": torch.bfloat16}


@pytest.mark.parametrize("dora", [False, True])
def test_effective_weight_equals_the_forward_pass(dora):
    layer = linear_layer(bias=False, dora=dora)
    randomize(layer)
    x = torch.randn(5, 24)
    torch.testing.assert_close(
        F.linear(x, layer.effective_weight()), layer(x), rtol=1e-5, atol=1e-5
    )


def test_dora_with_a_row_of_zeros():
    """A row of zeros, such as vocabulary padding, outputs 0 with DoRA and does not affect other
    rows."""
    layer = linear_layer(bias=False, dora=True)
    with torch.no_grad():
        layer.weight[3] = 0
        layer.magnitude.copy_(layer.weight.norm(dim=1))
    x = torch.randn(5, 24)
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight), rtol=1e-5, atol=1e-6)
    layer(x).sum().backward()
    assert all(
        parameter.grad.isfinite().all()
        for parameter in layer.parameters()
        if parameter.requires_grad
    )
    merged = layer.plain_state(
        {name: parameter.detach() for name, parameter in layer.named_parameters()}
    )["weight"]
    torch.testing.assert_close(merged, layer.weight.detach(), rtol=1e-6, atol=0)


def test_dropout_keeps_the_mean():
    """Over many draws, the mean of each output is within four standard errors; without dropout in
    evaluation mode."""
    layer = linear_layer(dropout=0.5)
    randomize(layer)
    x = torch.randn(1, 24).expand(20_000, -1)
    torch.manual_seed(0)
    drawn, whole = layer(x), layer.eval()(x)
    assert torch.equal(whole[0], whole[1]) and not torch.equal(drawn[0], drawn[1])
    standard_error = drawn.std(0) / len(drawn) ** 0.5
    assert ((drawn.mean(0) - whole[0]).abs() <= 4 * standard_error).all()


# --- runs
# --------------------------------------------------------------------------------------------------

RUN: dict[str, Any] = {
    "optimizer__lr": 1e-2,
    "training__global_batch_size": 4,
    "training__local_batch_size": 4,
    "loss__chunk_tokens": 25,
    "debug__seed": 3,
}


def lora_config(folder: Path, adapter: dict[str, Any], **options: Any) -> Any:
    """Return a tiny run with adapters of rank 4."""
    config = tiny_config(folder, **{**RUN, **options})
    config.dataloader = RaggedDataLoader.Config(**config.dataloader.to_dict())
    config.model_converters = [LoRA.Config(**{"rank": 4, **adapter})]
    config.check(world_size=int(os.environ.get("WORLD_SIZE", 1)))
    return config


@pytest.mark.parametrize("name", ["AdamW", pytest.param("Muon", marks=pytest.mark.slow)])
def test_only_adapters_are_trained(tmp_path, caplog, name):
    """No warning is logged."""
    options = {"optimizer__name": name, "training__mixed_precision_param": "bfloat16"}
    with caplog.at_level("WARNING", "torchtitan"):
        trainer = run(lora_config(tmp_path, {"dora": True}, **options))
    assert not caplog.records
    (model,) = trainer.model_parts
    optimized = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in optimized}
    adapters = {
        name
        for name, _ in model.named_parameters()
        if name.endswith(("lora_A", "lora_B", "magnitude"))
    }
    assert names == adapters and len(adapters) == 2 * 7 * 3
    assert trainer.num_trained == sum(model.get_parameter(name).numel() for name in names)
    for name, parameter in model.named_parameters():
        is_product = (
            not parameter.requires_grad and "norm" not in name and "tok_embeddings" not in name
        )
        assert parameter.dtype == (torch.bfloat16 if is_product else torch.float32), name
    untrained = lora_config(tmp_path / "untrained", {"dora": True}, **options).build()
    untrained.close()
    for name, weight in untrained.model_parts[0].named_parameters():
        assert torch.equal(model.get_parameter(name), weight) != (name in names), name


@pytest.mark.parametrize(
    "adapter",
    [
        pytest.param({"dropout": 0.3}, id="lora", marks=pytest.mark.slow),
        pytest.param({"dora": True, "dropout": 0.3}, id="dora"),
    ],
)
def test_resuming_is_exact(tmp_path, adapter):
    options = {
        "checkpoint__enable": True,
        "checkpoint__interval": 2,
        "lr_scheduler__total_steps": 4,
    }
    run(lora_config(tmp_path / "whole", adapter, **options))
    run(lora_config(tmp_path / "parts", adapter, **options, training__steps=2))
    run(lora_config(tmp_path / "parts", adapter, **options))
    whole, parts = (
        read_metrics(tmp_path / folder, "loss", "grad_norm") for folder in ("whole", "parts")
    )
    assert parts == whole


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputed_dropout_is_the_same(tmp_path, mode):
    """Activation checkpointing draws the same random numbers again."""
    kept, again = tmp_path / "kept", tmp_path / "again"
    run(lora_config(kept, {"dropout": 0.3, "dora": True}))
    run(lora_config(again, {"dropout": 0.3, "dora": True}, activation_checkpoint__mode=mode))
    assert read_metrics(again, "loss", "grad_norm") == read_metrics(kept, "loss", "grad_norm")


@pytest.mark.slow
def test_compiled_adapters_give_the_same_loss(tmp_path):
    """Up to float32 rounding of fused operations."""
    run(lora_config(tmp_path / "eager", KINDS["dora and head"]))
    run(
        lora_config(
            tmp_path / "compiled",
            KINDS["dora and head"],
            compile__enable=True,
            compile__backend="aot_eager",
        )
    )
    eager, compiled = (
        read_metrics(tmp_path / folder, "loss", "grad_norm") for folder in ("eager", "compiled")
    )
    for step, reference in zip(compiled, eager, strict=True):
        assert step == pytest.approx(reference, rel=1e-5)


@pytest.mark.slow
def test_fine_tuning_with_few_parameters(tmp_path, assets):
    """A pre-trained model is fine-tuned on the built-in stories: the validation loss falls by at
    least a tenth (measured: a sixth), with less than 5 % of the parameters trained."""
    losses = []
    for name, lr in (("before", 0.0), ("after", 1e-2)):
        options = {
            "module": "auto",
            "config": "pretrain",
            "hf_assets_path": assets / "stories260K/hf-converted",
            "dump_folder": tmp_path / name,
            "dataloader.dataset": "stories",
            "dataloader.num_workers": 0,
            "training.steps": 15 if lr else 1,
            "training.seq_len": 256,
            "training.local_batch_size": 4,
            "training.mixed_precision_param": "float32",
            "optimizer.lr": lr,
            "lr_scheduler.warmup_steps": 1,
            "validator.enable": True,
            "validator.steps": 5,
            "metrics.enable_tensorboard": False,
            "checkpoint.enable": False,
        }
        config = ConfigManager().parse_args(flags(options)).config
        config.model_converters = [LoRA.Config(rank=2, alpha=8.0)]
        config.check(world_size=1)
        trainer = run(config)
        assert trainer.num_trained < 0.05 * trainer.num_parameters
        losses.append(read_validation(tmp_path / name)[-1][1])
    assert losses[1] < 0.9 * losses[0]


INVALID = {
    "rank 0": ({"rank": 0}, {}, r"lora\.rank is 0, but must be .*"),
    "alpha": ({"alpha": 0.0}, {}, r"lora\.alpha is 0\.0, but must be .*"),
    "dropout": ({"dropout": 1.0}, {}, r"lora\.dropout is 1\.0, but must be .*"),
    "rank": (
        {"rank": 65},
        {},
        r"layers\.0\.attention\.wq .*rank 65 .*\(64, 64\); set rank to at most 64, or exclude",
    ),
    "rank of a layer": (
        {"rank_pattern": ["w2=4", "wq=0"]},
        {},
        r"lora\.rank_pattern wq is 0, but must be from 1",
    ),
    "large rank of a layer": (
        {"rank_pattern": ["wk=99"]},
        {},
        r"attention\.wk .*rank 99 is larger .*exclude",
    ),
    "alpha of a layer": (
        {"alpha_pattern": ["wq=-1"]},
        {},
        r"lora\.alpha_pattern wq is -1\.0, but must be",
    ),
    "no number": (
        {"rank_pattern": ["wq=8.5"]},
        {},
        r"lora\.rank_pattern: '8\.5' in 'wq=8\.5' is not a number",
    ),
    "no name": (
        {"alpha_pattern": ["8"]},
        {},
        r"lora\.alpha_pattern: '8' must be NAME=NUMBER, such as attention.wq=8",
    ),
    "twice": (
        {"rank_pattern": ["wq=8", "wq=4"]},
        {},
        r"'wq=4' must be NAME=NUMBER, .*, with a new NAME",
    ),
    "expression": ({"rank_pattern": ["(=8"]}, {}, r"'\(' is not a regular expression"),
    "other names": (
        {"rank_pattern": ["q_proj=8"]},
        {},
        r"'q_proj' matches the end of no adapted layer's name: layers",
    ),
    "pattern": ({"include": ["qkv"]}, {}, r"include 'qkv' matches none of the layers"),
    "head and dropout": ({"include": LINEAR, "dropout": 0.1}, {}, r"output .*dropout 0\.1"),
    "embedding and dropout": (
        {"include": EVERYWHERE, "exclude": ["output"], "dropout": 0.1},
        {},
        r"tok_emb.*dropout",
    ),
    "embedding and DoRA": ({"include": EVERYWHERE, "dora": True}, {}, r"tok_embeddings .*DoRA"),
    "tied head": (
        {"include": [r"^head\.output$"]},
        {"model__tie_embeddings": True},
        r"output\$' matches none of the layers \(the head is tied .*, so there is no "
        r"'head.output'\): tok_emb",
    ),
    "tied": (
        {"include": EVERYWHERE},
        {"model__tie_embeddings": True},
        r"tok_embeddings .*tie_embeddings",
    ),
}


@pytest.mark.parametrize("case", INVALID)
def test_invalid_options(tmp_path, case):
    adapter, options, message = INVALID[case]
    with pytest.raises(UserError, match=message):
        lora_config(tmp_path, adapter, **options)


def test_sizes_of_single_layers():
    """The first pattern that matches counts; rsLoRA divides by the root of the layer's rank."""
    model = plain_model()
    patterns = {"rank_pattern": ["0.attention.wq=9", "attention.*=4"], "alpha_pattern": ["w[q2]=6"]}
    convert_model(model, [LoRA.Config(rank=2, alpha=8.0, rslora=True, **patterns).build()])
    expected = {"0.attention.wq": (9, 2.0), "1.attention.wq": (4, 3.0), "0.attention.wk": (4, 4.0)}
    for name, (rank, scaling) in expected.items():
        layer = model.get_submodule(f"layers.{name}")
        assert (len(layer.lora_A), layer.lora_B.shape[1], layer.scaling) == (rank, rank, scaling)
    layer = model.get_submodule("layers.0.feed_forward.w2")
    assert (layer.rank, layer.scaling) == (2, pytest.approx(6 / 2**0.5))


def test_two_kinds_of_adapters_in_one_model():
    """The second converter does not freeze the adapters of the first."""

    class Other(LoRA):
        pass

    model = plain_model()
    convert_model(
        model,
        [
            LoRA.Config(rank=4, include=["attention"]).build(),
            Other.Config(rank=2, include=["w1"]).build(),
        ],
    )
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 2 * (4 + 1) and all("lora" in name for name in trained)


# --- two processes
# --------------------------------------------------------------------------------------------------

PROCESSES = 2
TP = {"parallelism__tensor_parallel_degree": 2}
PP = {"parallelism__pipeline_parallel_degree": 2}
LOCAL_BATCH_1 = {"training__local_batch_size": 1}

LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "FSDP, LoRA everywhere": (KINDS["lora everywhere"], LOCAL_BATCH_1),
    "FSDP, DoRA": (KINDS["dora and head"], LOCAL_BATCH_1),
    "TP, LoRA everywhere": (KINDS["lora everywhere"], {**TP, "model__vocab_size": 2051}),
    "TP, DoRA": (KINDS["dora and head"], TP),
    "PP, LoRA in the last stage": ({"include": [r"layers\.1\."]}, PP),
}
"""Options of the adapter and of the layout; layers are sharded by rows or columns, the vocabulary
unevenly."""


def run_and_keep_warnings(config: Any) -> None:
    """Train, and write warnings to a file next to the metrics, because workers disable logging. A
    busy machine may make a rank slow."""

    def keep(message: str, *args: Any) -> None:
        if "slower than the other ranks" not in message:
            (Path(config.dump_folder) / "warnings").write_text(message % args)

    logger.warning = keep
    run(config)


FIRST = {
    "training__mixed_precision_param": "bfloat16",
    "training__steps": 1,
    "training__local_batch_size": 2,
}
ADAPTERS: dict[str, list[LoRA.Config]] = {
    "plain": [],
    "lora": [LoRA.Config(rank=4, include=EVERYWHERE)],
    "dora": [LoRA.Config(rank=4, include=LINEAR, dora=True)],
}


def start_in_bfloat16(folder: Path) -> None:
    """Train a step without and with adapters; the blocks affect the loss from the first step
    (`UnitVariance`)."""
    for name, adapters in ADAPTERS.items():
        config = lora_config(folder / name, {}, **FIRST)
        config.model_converters = [UnitVariance.Config(), *adapters]
        run(config)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, PROCESSES])
def test_the_first_loss_in_bfloat16_equals_the_plain_run(workers, tmp_path, processes):
    """Exactly, in one process and with FSDP: freezing does not change the type of any
    computation."""
    if processes == 1:
        start_in_bfloat16(tmp_path)
    else:
        workers.run(start_in_bfloat16, tmp_path)
    plain, *adapted = (read_metrics(tmp_path / name, "loss") for name in ADAPTERS)
    assert adapted == [plain] * 2


def train_layout(folder: Path, name: str) -> None:
    adapter, options = LAYOUTS[name]
    run_and_keep_warnings(lora_config(folder, adapter, **options))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if "everywhere" in name else [])
        for name in LAYOUTS
    ],
)
def test_two_processes_equal_one(workers, tmp_path, name):
    """Loss and gradient norm of each step, within 1e-5, because float32 sums differ in order;
    without warnings."""
    workers.run(train_layout, tmp_path / "two", name)
    adapter, options = LAYOUTS[name]
    run(
        lora_config(
            tmp_path / "one",
            adapter,
            **{key: value for key, value in options.items() if "model__" in key},
        )
    )
    one, two = (read_metrics(tmp_path / folder, "loss", "grad_norm") for folder in ("one", "two"))
    assert two == [pytest.approx(line, rel=1e-5) for line in one]
    assert not (tmp_path / "two/warnings").exists()


def check_dropout_on_sharded_layers() -> None:
    """A layer is linear in its inputs, and the adapter's output is linear in A and in B. For any
    dropout mask, each of them times its gradient equals its contribution to a weighted sum of the
    outputs. Ranks with different masks for replicated inputs would have other gradients."""
    mesh = init_device_mesh("cpu", (PROCESSES,))
    generator = torch.Generator().manual_seed(2)
    splits: tuple[tuple[Any, Placement], ...] = (("out", Replicate()), ("in", Shard(2)))
    for features, placement in splits:
        layer = linear_layer(bias=False, dropout=0.5)
        randomize(layer)
        x, weights = (
            torch.randn(2, 8, 24, generator=generator),
            torch.randn(2, 8, 16, generator=generator),
        )
        base = (F.linear(x, layer.weight) * weights).sum()
        shard_parameters(layer, mesh, features)
        inputs = distribute_tensor(x, mesh, [placement]).requires_grad_()
        torch.manual_seed(dist.get_rank())
        total = (layer(inputs).full_tensor() * weights).sum()
        total.backward()
        adapter = total - base
        for tensor, part in ((inputs, total), (layer.lora_A, adapter), (layer.lora_B, adapter)):
            product = (tensor.full_tensor() * tensor.grad.full_tensor()).sum()
            # Float32 sums of a few hundred numbers of about 1.
            torch.testing.assert_close(product, part, rtol=1e-4, atol=1e-4)


def test_gradients_through_dropout_under_tensor_parallelism(workers):
    workers.run(check_dropout_on_sharded_layers)


class IdleParameter(ModelConverter):
    """Gives the last norm an unused parameter."""

    def convert(self, model: nn.Module) -> None:
        norm: Any = model.head.norm
        norm.idle = nn.Parameter(torch.empty(4, device="meta"))
        with_initializers(norm, **initializers_of(norm), idle=Constant(0.0))


def idle_config(folder: Path) -> Any:
    config = lora_config(folder, {}, **LOCAL_BATCH_1)
    config.model_converters = [*config.model_converters, IdleParameter.Config()]
    return config


def train_with_idle_parameter(folder: Path) -> None:
    run_and_keep_warnings(idle_config(folder))


@pytest.mark.slow
def test_a_parameter_without_a_gradient_is_named(workers, tmp_path, caplog):
    message = "trained parameters without a gradient: head.norm.idle"
    with caplog.at_level("WARNING", "torchtitan"):
        run(idle_config(tmp_path / "one"))
    assert [record.getMessage() for record in caplog.records] == [message]
    workers.run(train_with_idle_parameter, tmp_path / "two")
    assert (tmp_path / "two/warnings").read_text() == message


class WideOperations(TorchDispatchMode):
    """Names of the operations with a result as wide as the layer's."""

    def __init__(self, width: int):
        super().__init__()
        self.width, self.names = width, list[str]()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        is_view = function.is_view or function == torch.ops.aten._unsafe_view.default
        if isinstance(result, Tensor) and result.shape[-1] == self.width and not is_view:
            self.names.append(function.overloadpacket.__name__)
        return result


def test_an_adapter_takes_one_pass_over_the_output():
    """No operation but the two products writes the layer's full width."""
    layer = LoRALinear(make_linear(32, 48, 0.02), rank=4, scaling=2.0, dropout=0.0, dora=False)
    with WideOperations(48) as counted:
        out = layer(torch.randn(2, 3, 32))
    assert counted.names == ["mm", "addmm"]
    gradient = torch.ones_like(out)
    with WideOperations(48) as counted:
        out.backward(gradient)
    assert counted.names == []  # neither the base's gradient nor the adapter's is scaled or copied
