"""peft opens the adapters of every family with the same logits, and the other way round."""

import copy
import functools
import json
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.components.peft.test_adapter_files import (
    TOKENS,
    adapted,
    adapter_of,
    merged,
    open_adapter,
    open_base,
    plain_weights,
    randomize,
    read,
    write,
)
from tests.models.family_cases import CASES, random_reference
from tests.pretrained import assert_equal
from torchtitan.components.peft import LoRA
from torchtitan.components.peft.adapter_tensors import map_to_internal
from torchtitan.components.peft.rewritten_names import REWRITTEN_NAMES
from torchtitan.protocols.experts import LoadBalanced, StackedExperts
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools.errors import UserError

peft = pytest.importorskip("peft")

TOLERANCE = 1e-5
"""Relative to the largest logit: float32 sums in another order change the seventh digit, and layers
add to that."""

LESS_PRECISE = {"granitemoehybrid, Mamba": 5e-5}
"""Case → its tolerance. Its logits in float32 differ from those in float64 by up to 1.6e-5 both here
and in transformers (rsLoRA, patterns). In float64 the two differ by up to 5e-6, since transformers
computes norms and states in float32 there too."""

KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "all linear": {"include": [r"\.\d+\.", r"^head\.output$"]},
    "experts only": {"include": ["experts$"]},
    "routers": {"include": [r"\battention\.w", r"moe\.router$"]},
    "one layer": {"include": [r"layers\.1\.(?!.*\bexperts$)"]},
    "rsLoRA": {"rslora": True},
    "DoRA": {"dora": True},
    "patterns": {
        "include": [r"\.\d+\."],
        "rank_pattern": [r"layers\.1\..*=3"],
        "alpha_pattern": [r"layers\.2\..*=9"],
    },
}

QUICK = {"qwen3_moe", "glm4_moe", "deepseek_v2", "deepseek_v3"}
REWRITTEN = {
    *QUICK,
    "deepseek_v32",
    "ernie4_5_moe",
    "exaone_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "glm_moe_dsa, shared",
    "hunyuan_v1_moe",
    "qwen3_next",
}
"""Types with linear layers that peft takes for experts; the first ones are in default tests."""


DENSE_AND_EXPERTS: dict[str, dict[str, Any]] = {
    "ernie4_5_moe": {
        "moe_layer_start_index": 1,
        "moe_layer_interval": 1,
        "moe_num_shared_experts": 2,
    },
    "exaone_moe": {"first_k_dense_replace": 1, "mlp_layer_types": None},
}
"""Type → options with a dense layer first, and a shared expert in the others."""


def base_folder(name: str, folder: Path) -> Path:
    """Save a model with all kinds of layers: dense ones and experts, with and without attention."""
    sizes: dict[str, Any] = {
        "num_hidden_layers": 6 if name.startswith("gemma4") else 3,
        "hidden_size": 32,
    }
    if name.startswith("qwen3_5"):
        # Delta nets with 4 heads, which the rank does not exceed, and attention in layer 1.
        sizes |= {
            "linear_num_value_heads": 4,
            "layer_types": ["linear_attention", "full_attention", "full_attention"],
        }
    if name == "olmo_hybrid":
        # transformers saves the convolutions of queries, keys and values as three equal parts.
        sizes |= {"linear_num_key_heads": 4, "linear_num_value_heads": 4}
        sizes |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    if name == "kimi_linear":
        sizes |= {"linear_num_heads": 4, "layer_types": ("linear_attention", "full_attention")}
    sizes |= DENSE_AND_EXPERTS.get(name, {})
    random_reference(name, 0, **sizes).save_pretrained(folder)
    return folder


Bases = Callable[[str], tuple[Path, ModelSpec, dict[str, Tensor]]]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Bases:
    """Function of the name of a case that returns its folder, our model and the weights."""

    @functools.cache
    def base(name: str) -> tuple[Path, ModelSpec, dict[str, Tensor]]:
        folder = base_folder(name, tmp_path_factory.mktemp("base"))
        return folder, *plain_weights(folder)

    return base


@functools.cache
def opened(folder: Path) -> nn.Module:
    return open_base(folder)


def fresh(folder: Path) -> nn.Module:
    """Return a copy of the model of a folder, for peft to change."""
    return copy.deepcopy(opened(folder))


def lora_config(kind: str, spec: ModelSpec) -> LoRA.Config:
    """Return a configuration of a kind with rank 4 and alpha 6, so that a wrong scale changes the
    logits."""
    options = dict(KINDS[kind])
    with torch.device("meta"):
        model = spec.model.build()
    if kind == "all linear" and model.head.output is None:
        options["include"] = options["include"][:1]
    if kind == "routers" and not any(
        isinstance(module, LoadBalanced) for module in model.modules()
    ):
        pytest.skip("it has no routers")
    if kind == "experts only" and not any(
        isinstance(module, StackedExperts) for module in model.modules()
    ):
        pytest.skip("it has no experts")
    if spec.name == "nemotron_h":  # peft refuses the output projection of Mamba by its name
        options["exclude"] = [r"attention\.out$"]
    return LoRA.Config(rank=4, alpha=6.0, **options)


@torch.no_grad()
def relative_difference(ours: nn.Module, theirs: nn.Module) -> float:
    expected = theirs(TOKENS).logits
    return ((ours(TOKENS) - expected).abs().max() / expected.abs().max()).item()


def all_cases() -> Iterator[Any]:
    """Yield names of cases with kinds; default tests are of families with experts, and of one
    without."""
    fast = {("llama", "default"), ("llama", "DoRA"), *((name, "default") for name in QUICK)}
    for name in CASES:
        for kind in KINDS:
            is_fast = (name, kind) in fast or (
                name == "glm4_moe" and kind in ("all linear", "patterns", "routers")
            )
            yield pytest.param(name, kind, marks=[] if is_fast else [pytest.mark.slow])


def open_without_warnings(below: nn.Module, folder: Path) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
        # peft applies patterns to target_parameters, but looks for their names among those of
        # modules only.
        message = (
            r"The following (rank|alpha)_pattern keys did not match any .*(experts|gate_up_proj)"
        )
        warnings.filterwarnings("ignore", message)
        return open_adapter(below, folder)


@pytest.mark.parametrize(("name", "kind"), all_cases())
def test_peft_opens_what_a_family_writes(
    bases: Bases, name: str, kind: str, tmp_path: Path
) -> None:
    base, spec, plain = bases(name)
    config = lora_config(kind, spec)
    model = adapted(spec, config, plain, seed=1)
    if kind == "DoRA" and name in REWRITTEN:
        with pytest.raises(
            UserError,
            match="PEFT supports no DoRA of layers that it adapts as parameters: model.layers",
        ):
            write(tmp_path / "adapter", config, model, spec)
        return
    write(tmp_path / "adapter", config, model, spec)
    below = fresh(base)
    assert relative_difference(model, below) > 0.1  # the adapter matters
    theirs = open_without_warnings(below, tmp_path / "adapter")
    tolerance = LESS_PRECISE.get(name, TOLERANCE)
    assert relative_difference(model, theirs) < tolerance

    again = adapted(spec, config, plain, seed=2)
    read(tmp_path / "adapter", config, spec, again)
    assert_equal(adapter_of(again), adapter_of(model))
    ours = spec.model.build().eval()
    ours.load_state_dict(merged(model))
    assert relative_difference(ours, theirs.merge_and_unload()) < tolerance


@pytest.mark.parametrize(("name", "kind"), all_cases())
def test_a_family_opens_what_peft_writes(
    bases: Bases, name: str, kind: str, tmp_path: Path
) -> None:
    """peft trains the layers of an adapter that we wrote. Parts of layers that are fused there
    share A."""
    base, spec, plain = bases(name)
    config = lora_config(kind, spec)
    if kind == "DoRA" and name in REWRITTEN:
        pytest.skip("peft has no DoRA of layers that it takes for experts")
    model = adapted(spec, config, plain)
    write(tmp_path / "ours", config, model, spec)
    options = peft.PeftConfig.from_pretrained(tmp_path / "ours")
    options.inference_mode = False
    options.rank_pattern = {r"layers\.1\..*": 3} if kind == "patterns" else {}
    options.alpha_pattern = {r"layers\.2\..*": 9} if kind == "patterns" else {}
    theirs = peft.get_peft_model(fresh(base), options).eval()
    randomize(theirs, seed=3)
    theirs.save_pretrained(tmp_path / "theirs")
    read(tmp_path / "theirs", config, spec, model)
    assert relative_difference(model, theirs) < LESS_PRECISE.get(name, TOLERANCE)


def test_rewritten_names_are_those_of_peft() -> None:
    """Of types; other keys are names of classes."""
    conversion = pytest.importorskip("peft.utils.transformers_weight_conversion")
    types = pytest.importorskip("transformers.models.auto.configuration_auto").CONFIG_MAPPING_NAMES
    patterns = {
        name: kind
        for name, kind in conversion._MODEL_TO_CONVERSION_PATTERN.items()
        if name in types
    }
    names = conversion._MOE_TARGET_MODULE_MAPPING
    expected = {name: set(names[kind]) for name, kind in patterns.items() if kind in names}
    assert expected == REWRITTEN_NAMES


def test_dropout_that_peft_does_not_support_is_left_out(
    bases: Bases, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base, spec, plain = bases("glm4_moe")
    config = LoRA.Config(rank=4, alpha=6.0, dropout=0.1)
    model = adapted(spec, config, plain, seed=1)
    write(tmp_path / "adapter", config, model, spec)
    assert (
        relative_difference(model, open_without_warnings(fresh(base), tmp_path / "adapter"))
        < TOLERANCE
    )
    assert "has lora_dropout 0 in place of 0.1" in caplog.text


TARGETS: dict[str, Any] = {
    "default": None,
    "all linear": "all-linear",
    "expression": r".*\.(o_proj|(gate|up|down)_proj)",
    "experts": ["q_proj", "gate_proj", "up_proj", "down_proj"],
    "experts, rsLoRA": ["q_proj", "gate_proj", "up_proj", "down_proj"],
}
"""`target_modules`, of which peft takes names of experts' layers for their parameters."""


def doubled(config: LoRA.Config) -> LoRA.Config:
    """Return a configuration with the sizes that peft gives to gates and ups."""
    return replace(config, rank_pattern=["w13=8"], alpha_pattern=["w13=12"])


def names_of_targets(theirs: Any, spec: ModelSpec) -> list[str]:
    """Return our names of the layers that peft adapts."""
    names = map_to_internal(spec)
    parameters = [name.removesuffix(".weight") for name in theirs.targeted_parameter_names]
    ours = [names[name].split(" and ") for name in {*theirs.targeted_module_names, *parameters}]
    return sorted({re.sub(r"(\.experts)\.w\d+$", r"\1", name) for group in ours for name in group})


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "name",
    [
        "glm4_moe",
        *(pytest.param(name, marks=pytest.mark.slow) for name in sorted(REWRITTEN - {"glm4_moe"})),
    ],
)
def test_a_family_with_experts_opens_targets_of_peft(
    bases: Bases, name: str, target: str, tmp_path: Path
) -> None:
    """peft doubles the rank and alpha of fused gates and ups. It has routers in "all-linear"."""
    base, spec, plain = bases(name)
    defaults = peft.utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    if (
        target == "default"
        and json.loads((base / "config.json").read_text())["model_type"] not in defaults
    ):
        pytest.skip("peft has no default for it")
    if target == "all linear" and name == "qwen3_next":
        pytest.skip("peft also adapts the gate of its shared expert, which is no linear layer here")
    if target == "all linear" and name.startswith(("deepseek_v32", "glm_moe_dsa")):
        pytest.skip("peft also adapts the indexer, which is frozen here")
    rslora = "rsLoRA" in target
    targets = TARGETS[target]
    options = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=targets, use_rslora=rslora, task_type="CAUSAL_LM"
    )
    theirs = peft.get_peft_model(fresh(base), options).eval()
    randomize(theirs, seed=3)
    theirs.save_pretrained(tmp_path / "theirs")
    layers = names_of_targets(theirs, spec)
    include = [f"^{re.escape(layer)}$" for layer in layers]
    config = LoRA.Config(rank=4, alpha=6.0, rslora=rslora, include=include)
    if any("experts" in layer for layer in layers):
        with pytest.raises(
            UserError,
            match=r"rank_pattern w13=8 and set --model_converters\.lora\.alpha_pattern w13=12$",
        ):
            read(tmp_path / "theirs", config, spec, adapted(spec, config, plain))
        config = doubled(config)
    model = adapted(spec, config, plain)
    read(tmp_path / "theirs", config, spec, model)
    assert relative_difference(model, theirs) < TOLERANCE
    randomize(model, seed=4)  # as more training
    write(tmp_path / "ours", config, model, spec)
    again = open_without_warnings(fresh(base), tmp_path / "ours")
    assert relative_difference(model, again) < TOLERANCE


@pytest.mark.parametrize("dora", [False, True])
def test_routers_of_all_linear_layers_are_read(bases: Bases, dora: bool, tmp_path: Path) -> None:
    """In Gemma 4, they are linear layers, which peft adapts with the others, also by DoRA."""
    base, spec, plain = bases("gemma4_text, experts")
    options = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules="all-linear", use_dora=dora, task_type="CAUSAL_LM"
    )
    theirs = peft.get_peft_model(fresh(base), options).eval()
    randomize(theirs, seed=3)
    theirs.save_pretrained(tmp_path / "theirs")
    layers = names_of_targets(theirs, spec)
    assert "layers.0.moe.router" in layers
    config = LoRA.Config(
        rank=4, alpha=6.0, dora=dora, include=[f"^{re.escape(layer)}$" for layer in layers]
    )
    model = adapted(spec, config, plain)
    read(tmp_path / "theirs", config, spec, model)
    assert relative_difference(model, theirs) < TOLERANCE
    if dora:
        with pytest.raises(
            UserError, match="no DoRA of layers that it adapts as parameters: model.layers"
        ):
            write(tmp_path / "ours", config, model, spec)
        return
    write(tmp_path / "ours", config, model, spec)
    assert (
        relative_difference(model, open_without_warnings(fresh(base), tmp_path / "ours"))
        < TOLERANCE
    )
