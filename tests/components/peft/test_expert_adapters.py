"""Adapters of routed experts: values and gradients, files of peft, layouts, and options that are
refused."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from tests.components.peft.test_adapter_files import (
    adapted,
    adapter_of,
    assert_equal_logits,
    merged,
    open_adapter,
    open_base,
    plain_weights,
    randomize,
    read,
    write,
)
from tests.models.family_cases import random_reference
from tests.pretrained import assert_equal
from tests.training import read_metrics, run, tiny_config
from torchtitan.cli.main import main
from torchtitan.components.peft import LoRA, QLoRA
from torchtitan.components.peft.adapter_files import WEIGHTS
from torchtitan.components.peft.experts import adapt_experts
from torchtitan.models.common.moe.experts import ClampedExperts, InputScaledExperts, RoutedExperts
from torchtitan.tools.errors import UserError

SIZES: dict[str, Any] = {
    "n_experts": 4,
    "top_k": 2,
    "dim": 16,
    "hidden_dim": 8,
    "init_std": 1.0,
    "out_init_std": 1.0,
}
SCALING = 1.5


def adapted_matrix(own: dict[str, Tensor], name: str) -> Tensor:
    """Return the matrices of all experts, with DoRA's norms as constants (arXiv:2402.09353,
    4.3)."""
    matrix = own[name] + SCALING * torch.einsum(
        "e...or,eri->e...oi", own[f"{name}_B"], own[f"{name}_A"]
    )
    if f"{name}_magnitude" not in own:
        return matrix
    return own[f"{name}_magnitude"][..., None] * matrix / matrix.detach().norm(dim=-1, keepdim=True)


def reference(
    experts: RoutedExperts, own: dict[str, Tensor], x_ND: Tensor, weights: Tensor, chosen: Tensor
) -> Tensor:
    """Compute token by token, one expert after the other."""
    w13, w2, results = adapted_matrix(own, "w13"), adapted_matrix(own, "w2"), []
    for x, token_weights, token_experts in zip(x_ND, weights, chosen, strict=True):
        total = torch.zeros_like(x)
        for weight, e in zip(token_weights, token_experts, strict=True):
            inputs, factor = (
                (x * weight, 1.0) if isinstance(experts, InputScaledExperts) else (x, weight)
            )
            gate, up = (
                F.linear(inputs, w13[e, i], own["bias13"][e, i] if "bias13" in own else None)
                for i in (0, 1)
            )
            out = F.linear(
                experts.activation(gate, up), w2[e], own["bias2"][e] if "bias2" in own else None
            )
            total = total + factor * out
        results.append(total)
    return torch.stack(results)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("kind", [ClampedExperts, InputScaledExperts])
def test_values_and_gradients_equal_float64(kind: type[RoutedExperts], dora: bool) -> None:
    """Of each expert alone. Expert 3 has no tokens; rank 3 is no multiple of the rows that grouped
    products need."""
    torch.manual_seed(0)
    experts = kind(**SIZES)
    sizes = {
        "ranks": dict.fromkeys(experts.matrices, 3),
        "scalings": dict.fromkeys(experts.matrices, SCALING),
    }
    adapt_experts(experts, **sizes, dora=dora)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x, weights = torch.randn(7, 16, requires_grad=True), torch.rand(7, 2, requires_grad=True)
    chosen = torch.tensor([[0, 1], [1, 2], [2, 0]] * 3)[:7]
    result, upstream = experts(x, weights, chosen), torch.randn(7, 16)
    (result * upstream).sum().backward()
    own = {
        name: p.detach().double().requires_grad_(p.requires_grad)
        for name, p in experts.named_parameters()
    }
    inputs = [tensor.detach().double().requires_grad_() for tensor in (x, weights)]
    expected = reference(experts, own, *inputs, chosen)
    (expected * upstream).sum().backward()
    pairs = [(result, expected), (x.grad, inputs[0].grad), (weights.grad, inputs[1].grad)]
    pairs += [(p.grad, own[name].grad) for name, p in experts.named_parameters() if p.requires_grad]
    assert len(pairs) == 3 + (6 if dora else 4)
    for found, exact in pairs:
        # Float32 sums of about 20 products, relative to the largest.
        torch.testing.assert_close(
            found.double(), exact, rtol=0, atol=1e-5 * exact.abs().max().item()
        )
    assert all(p.grad is None for p in experts.parameters() if not p.requires_grad)


# --- files
# --------------------------------------------------------------------------------------------------

FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen3_moe": {"decoder_sparse_step": 1, "mlp_only_layers": []},
    "deepseek_v3": {},
    "gpt_oss": {},
    "llama4_text": {},
}


def save_base(folder: Path, model_type: str) -> Path:
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 48,
        "tie_word_embeddings": False,
        "vocab_size": 96,
    }
    random_reference(model_type, 0, **sizes, **FAMILIES[model_type]).save_pretrained(folder)
    return folder


CONFIG = {"rank": 4, "alpha": 6.0}


@pytest.mark.parametrize(
    "model_type",
    [
        "qwen3_moe",
        "gpt_oss",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("mixtral", "deepseek_v3", "llama4_text")
        ),
    ],
)
def test_round_trip_through_peft(tmp_path: Path, model_type: str) -> None:
    config = LoRA.Config(**CONFIG, include=[r"attention\.wo$", "experts"])
    base = save_base(tmp_path / "base", model_type)
    spec, plain = plain_weights(base)
    model = adapted(spec, config, plain, seed=1)
    write(tmp_path / "ours", config, model, spec)
    theirs = open_adapter(open_base(base), tmp_path / "ours")
    assert_equal_logits(model, theirs)
    again = adapted(spec, config, plain, seed=2)
    read(tmp_path / "ours", config, spec, again)
    assert_equal(adapter_of(again), adapter_of(model))
    peft_weights = theirs.merge_and_unload().state_dict()
    table = spec.formats["hf"].other_adapter(spec.model) or spec.formats["hf"].adapter(spec.model)
    weights = merged(model)
    for step in table.steps:
        if "experts" in step.internal[0]:
            (tensor,) = step.transform.to_external([weights[name] for name in step.internal])
            torch.testing.assert_close(tensor, peft_weights[step.external[0]], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "model_type",
    [
        "qwen3_moe",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt_oss", "llama4_text")),
    ],
)
def test_round_trip_of_a_peft_adapter(tmp_path: Path, model_type: str) -> None:
    peft = pytest.importorskip("peft")
    base = save_base(tmp_path / "base", model_type)
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    options = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=["o_proj"], target_parameters=targets
    )
    theirs = peft.get_peft_model(open_base(base), options).eval()
    randomize(theirs, seed=3)
    theirs.save_pretrained(tmp_path / "theirs")
    config = LoRA.Config(**CONFIG, include=[r"attention\.wo$", "experts"])
    spec, plain = plain_weights(base)
    model = adapted(spec, config, plain)
    read(tmp_path / "theirs", config, spec, model)
    assert_equal_logits(model, theirs)


@pytest.mark.parametrize(
    ("model_type", "options", "message"),
    [
        ("qwen3_moe", {"dora": True}, r"DoRA of experts: layers\.0\.moe\.experts\.w13"),
    ],
)
def test_adapters_that_peft_cannot_express(
    tmp_path: Path, model_type: str, options: dict[str, Any], message: str
) -> None:
    config = LoRA.Config(**CONFIG, include=["experts"], **options)
    spec, plain = plain_weights(save_base(tmp_path / "base", model_type))
    with pytest.raises(UserError, match=message):
        write(tmp_path / "ours", config, adapted(spec, config, plain, seed=1), spec)


def test_adapters_of_each_experts_layers_are_refused(tmp_path: Path) -> None:
    """As PEFT made them with transformers 4."""
    config = LoRA.Config(**CONFIG, include=["experts"])
    spec, plain = plain_weights(save_base(tmp_path / "base", "qwen3_moe"))
    model = adapted(spec, config, plain, seed=1)
    write(tmp_path / "ours", config, model, spec)
    layer = "base_model.model.model.layers.0.mlp.experts.0.gate_proj"
    shapes = {f"{layer}.lora_A.weight": (4, 48), f"{layer}.lora_B.weight": (24, 4)}
    save_file(
        {name: torch.ones(shape) for name, shape in shapes.items()}, tmp_path / "ours" / WEIGHTS
    )
    with pytest.raises(
        UserError, match=r"only in the file: model\.layers\.0\.mlp\.experts\.0\.gate_proj; only in"
    ):
        read(tmp_path / "ours", config, spec, model)


# --- runs
# --------------------------------------------------------------------------------------------------

RUN: dict[str, Any] = {
    "module": "qwen3_moe",
    "optimizer__lr": 1e-2,
    "training__global_batch_size": 4,
    "loss__chunk_tokens": 25,
    "debug__seed": 3,
}
TP = {"parallelism__tensor_parallel_degree": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "FSDP": {},
    "EP": {"parallelism__expert_parallel_degree": 2},
    "TP": TP,
    "TP x EP": {**TP, "parallelism__expert_parallel_degree": 2},
    "TP x ETP": {**TP, "parallelism__expert_tensor_parallel_degree": 2},
}


def adapter_config(folder: Path, kind: type[LoRA] = LoRA, **options: Any) -> Any:
    """Return a tiny run with adapters on attention and experts; `adapter__` begins the adapter's
    options."""
    adapter = {
        name.removeprefix("adapter__"): options.pop(name)
        for name in list(options)
        if "adapter__" in name
    }
    config = tiny_config(folder, **{**RUN, **options})
    config.model_converters = [
        kind.Config(**{"rank": 4, "include": ["attention", "experts"], **adapter})
    ]
    config.check(world_size=int(os.environ.get("WORLD_SIZE", 1)))
    return config


ROUTERS = {"adapter__include": ["attention", "experts", r"moe\.router$"]}
"""Routers too, whose gradients also come from the penalty for imbalance."""
BALANCED = {**ROUTERS, "model__moe__penalties__batch_loss": 1.0}


def train_layout(folder: Path, name: str, dora: bool) -> None:
    run(adapter_config(folder, adapter__dora=dora, **BALANCED, **LAYOUTS[name]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dora"),
    [
        *((name, False) for name in LAYOUTS),
        *((name, True) for name in ("FSDP", "TP x EP", "TP x ETP")),
    ],
)
def test_two_processes_equal_one(workers, tmp_path: Path, name: str, dora: bool) -> None:
    """Loss and gradient norm of each step, within 1e-5, because float32 sums differ in order."""
    workers.run(train_layout, tmp_path / "two", name, dora)
    run(adapter_config(tmp_path / "one", adapter__dora=dora, **BALANCED))
    one, two = (read_metrics(tmp_path / folder, "loss", "grad_norm") for folder in ("one", "two"))
    assert two == [pytest.approx(line, rel=1e-5) for line in one]


RESUMED = {"checkpoint__enable": True, "checkpoint__interval": 2, "lr_scheduler__total_steps": 4}


def train_two_steps(folder: Path, name: str) -> None:
    run(adapter_config(folder, adapter__dora=True, **RESUMED, **LAYOUTS[name], training__steps=2))


def train_to_the_end(folder: Path, name: str) -> None:
    run(adapter_config(folder, adapter__dora=True, **RESUMED, **LAYOUTS[name]))


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [("EP", "FSDP"), ("FSDP", "EP"), ("TP x ETP", "EP")])
def test_adapters_resume_at_another_expert_degree(
    workers, tmp_path: Path, first: str, then: str
) -> None:
    """As one process that never stopped, within 1e-5: steps 3 and 4, whose moments came from the
    checkpoint."""
    workers.run(train_two_steps, tmp_path / "parts", first)
    workers.run(train_to_the_end, tmp_path / "parts", then)
    run(adapter_config(tmp_path / "whole", adapter__dora=True, **RESUMED))
    whole, parts = (
        read_metrics(tmp_path / folder, "loss", "grad_norm") for folder in ("whole", "parts")
    )
    assert len(whole) == 4 and parts == [pytest.approx(line, rel=1e-5) for line in whole]


def test_resuming_is_exact_and_the_export_is_merged(tmp_path: Path) -> None:
    """The whole run starts like the plain one, and its merged model has the loss of its last
    step."""
    trainer = run(adapter_config(tmp_path / "whole", **RESUMED))
    run(adapter_config(tmp_path / "parts", **RESUMED, training__steps=2))
    run(adapter_config(tmp_path / "parts", **RESUMED))
    whole, parts = (
        read_metrics(tmp_path / folder, "loss", "grad_norm") for folder in ("whole", "parts")
    )
    assert parts == whole
    run(tiny_config(tmp_path / "plain", **RUN, training__steps=1))
    assert read_metrics(tmp_path / "plain", "loss")[0] == pytest.approx(whole[0][:2], rel=1e-6)
    assert (
        main(
            [
                "convert",
                "--to",
                "hf",
                str(tmp_path / "whole/checkpoint/step-4"),
                str(tmp_path / "merged"),
            ]
        )
        == 0
    )
    assert (tmp_path / "merged/adapter/adapter_model.safetensors").is_file()
    spec, plain = plain_weights(tmp_path / "merged")
    model = spec.model.build()
    model.load_state_dict(plain)
    tokens = torch.arange(40).view(2, 20)
    with torch.no_grad():
        # Merging rounds each weight once.
        torch.testing.assert_close(
            model(tokens), trainer.model_parts[0](tokens), rtol=1e-4, atol=1e-4
        )


def test_new_adapters_do_not_change_the_loss_in_bfloat16(tmp_path: Path) -> None:
    """Exactly: frozen experts are in bfloat16, and DoRA's magnitudes are the norms of their rounded
    rows."""
    losses = set()
    for dora in (False, True):
        options = {
            "adapter__dora": dora,
            "training__mixed_precision_param": "bfloat16",
            "training__steps": 1,
        }
        trainer = run(adapter_config(tmp_path / str(dora), **options, lr_scheduler__total_steps=4))
        losses.add(read_metrics(tmp_path / str(dora), "loss")[0])
        experts = trainer.model_parts[0].get_submodule("layers.0.moe.experts")
        assert (
            experts.w13.dtype == experts.w2.dtype == torch.bfloat16
            and experts.w2_A.dtype == torch.float32
        )
    assert len(losses) == 1


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (
            LoRA,
            {"dropout": 0.1},
            r"lora: layers\.0\.moe\.experts cannot have an adapter: dropout 0\.1 .*exclude it",
        ),
        (LoRA, {"rank": 97}, r"layers\.0\.moe\.experts .*rank 97"),
        (
            QLoRA,
            {},
            r"qlora: layers\.0\.moe\.experts cannot have an adapter: routed experts stay in few "
            r"bits only if published so",
        ),
    ],
)
def test_refused_options(
    tmp_path: Path, kind: type[LoRA], options: dict[str, Any], message: str
) -> None:
    options = {
        f"adapter__{name}": value for name, value in {"include": ["experts"], **options}.items()
    }
    with pytest.raises(UserError, match=message):
        adapter_config(tmp_path, kind, **options)


def test_experts_are_adapted_only_if_a_pattern_names_them(tmp_path: Path) -> None:
    for include, expected in ({}, False), ({"adapter__include": [r"\.\d+\."]}, True):
        options = {"adapter__include": LoRA.Config().include, **include}
        trainer = adapter_config(tmp_path / str(expected), **options).build()
        names = {
            name
            for name, parameter in trainer.model_parts[0].named_parameters()
            if parameter.requires_grad
        }
        trainer.close()
        assert any("attention.wq.lora_A" in name for name in names)
        assert any("experts" in name for name in names) == expected
