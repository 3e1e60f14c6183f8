"""Linear layers and experts in MXFP8 and NVFP4: products against torchao's emulation and float64,
runs across layouts, recomputation and checkpoints."""

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.processes import run_processes
from tests.training import read_metrics, tiny_config, train
from torchtitan.components.optim.freeze import Freeze
from torchtitan.components.peft import LoRA, QLoRA
from torchtitan.components.peft.lora import LoRALinear
from torchtitan.components.quantization import narrow
from torchtitan.components.quantization.block_formats import (
    hadamard,
    mxfp8,
    nvfp4,
)
from torchtitan.components.quantization.float8 import Float8LinearConverter
from torchtitan.components.quantization.narrow import MXFP8, NVFP4
from torchtitan.components.quantization.narrow_products import (
    Float8Products,
    MXFP8Products,
    NarrowLinear,
    NVFP4Products,
)
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.dry_run import dry_run
from torchtitan.models.common.moe.experts import ClampedExperts, RoutedExperts
from torchtitan.protocols.conversion import convert_model
from torchtitan.protocols.initializer import TruncatedNormal, initializers_of, with_initializers
from torchtitan.tools.errors import UserError

mx = partial(MXFP8.Config, min_features=0)
nv = partial(NVFP4.Config, min_features=0)
CONVERTERS = {
    "mxfp8": mx(),
    "wide gradient": mx(recipe="mxfp8_rceil_wgrad_with_hp"),
    "nvfp4": nv(),
    "nvfp4, nearest": nv(stochastic_rounding=False),
    "nvfp4, plain": nv(stochastic_rounding=False, hadamard_transforms=False),
}
ROWWISE = Float8LinearConverter.Config(recipe="rowwise", emulate=True, min_features=0)

# --- one layer
# --------------------------------------------------------------------------------------------------


def products_of(layer: nn.Module, x: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    """Return output, gradient of the input and of the weight."""
    x = x.clone().requires_grad_()
    output = layer(x)
    output.backward(gradient)
    assert x.grad is not None and layer.weight.grad is not None
    return output.detach(), x.grad, layer.weight.grad


def operands() -> tuple[nn.Linear, Tensor, Tensor]:
    """Rows and columns differ in magnitude, so that blocks along the wrong dimension are found."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 96, bias=False)
    x = torch.randn(2, 40, 64) * torch.logspace(0, 2, 40)[:, None] * torch.logspace(0, 1, 64)
    return layer, x, torch.randn(2, 40, 96) * torch.logspace(0, -2, 96)


def casts_in_float64(
    kind: str, layer: nn.Linear, x_NI: Tensor, gradient_NO: Tensor
) -> tuple[Tensor, ...]:
    """Return the three products in float64 of operands cast along the sum."""
    weight = layer.weight.detach()

    def mx8(tensor: Tensor) -> Tensor:
        return mxfp8(tensor).values().double()

    def nv4(tensor: Tensor, **options: bool) -> Tensor:
        return nvfp4(tensor, **options).values().double()

    if kind in ("mxfp8", "wide gradient"):
        wide = kind == "wide gradient"
        gradient_ON, x_IN = gradient_NO.T, x_NI.T
        # 80 tokens are padded to whole blocks of 32
        pad = partial(nn.functional.pad, pad=(0, 16))
        return (
            mx8(x_NI) @ mx8(weight).T,
            mx8(gradient_NO) @ mx8(weight.T).T,
            gradient_ON.double() @ x_IN.double().T
            if wide
            else mx8(pad(gradient_ON)) @ mx8(pad(x_IN)).T,
        )
    sr, turn = {
        "nvfp4": (True, hadamard),
        "nvfp4, nearest": (False, hadamard),
        "nvfp4, plain": (False, lambda tensor: tensor),
    }[kind]
    square = nv4(weight, square_blocks=True)
    return (
        nv4(x_NI) @ square.T,
        nv4(gradient_NO, stochastic=sr) @ square,
        nv4(turn(gradient_NO.T.contiguous()), stochastic=sr) @ nv4(turn(x_NI.T)).T,
    )


@pytest.mark.parametrize("kind", CONVERTERS)
def test_products_are_those_of_the_cast_operands(kind):
    """The tolerance of 1e-6, relative to the largest element, covers float32 sums of at most 96
    terms."""
    layer, x, gradient = operands()
    converted = CONVERTERS[kind].build().convert_layer("layer", layer)
    results = products_of(converted, x, gradient)
    expected = casts_in_float64(kind, layer, x.flatten(0, 1), gradient.flatten(0, 1))
    for result, reference in zip(results, expected, strict=True):
        error = (result.view_as(reference) - reference).abs().max() / reference.abs().max()
        assert error <= 1e-6
    plain = nn.functional.linear(x, layer.weight)
    assert (results[0] - plain).abs().max() > 1e-3 * plain.abs().max()  # rounding has an effect


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wide", [False, True])
def test_mxfp8_products_match_torchao(dtype, wide):
    """torchao multiplies dequantized operands in the type of the inputs; their products are the
    same, and sums round at most once more, to bfloat16's 8 bits."""
    from torchao.prototype.moe_training.mxfp8_linear import mx_mm
    from torchao.prototype.mx_formats.config import (
        MXFP8Dim0CastKernelChoice,
        MXFP8Dim1CastKernelChoice,
        ScaleCalculationMode,
    )
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    layer, x, gradient = operands()
    layer, x, gradient = layer.to(dtype), x[:, :32].to(dtype), gradient[:, :32].to(dtype)
    results = products_of(NarrowLinear(layer, MXFP8Products(wide), 32), x, gradient)
    layer.weight.grad = None
    x = x.clone().requires_grad_()
    e4m3 = torch.float8_e4m3fn
    output = mx_mm.apply(
        x,
        layer.weight,
        *(e4m3, e4m3, e4m3, 32, KernelPreference.EMULATED),
        *(MXFP8Dim0CastKernelChoice.TRITON, MXFP8Dim1CastKernelChoice.TORCH),
        *(ScaleCalculationMode.RCEIL, wide),
    )
    output.backward(gradient)
    tolerance = 1e-6 if dtype == torch.float32 else 2**-8
    for result, expected in zip(results, (output, x.grad, layer.weight.grad), strict=True):
        assert (result - expected).abs().max() <= tolerance * expected.abs().max()


def test_mxfp8_experts_match_torchao():
    """torchao wants groups of whole blocks."""
    from torchao.prototype.moe_training.mxfp8_grouped_mm import _to_mxfp8_then_scaled_grouped_mm
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    torch.manual_seed(0)
    rows, weight = torch.randn(128, 64).bfloat16(), torch.randn(3, 96, 64).bfloat16()
    ends = torch.tensor([32, 32, 128], dtype=torch.int32)
    gradient = torch.randn(128, 96).bfloat16()
    results = []
    for multiply in (
        lambda a, b: MXFP8Products().multiply_experts(a, b, ends, None),
        lambda a, b: _to_mxfp8_then_scaled_grouped_mm(
            a, b.mT, ends, kernel_preference=KernelPreference.EMULATED
        ),
    ):
        a, b = rows.clone().requires_grad_(), weight.clone().requires_grad_()
        y = multiply(a, b)
        y.backward(gradient)
        results.append((y, a.grad, b.grad))
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).abs().max() <= 2**-7 * theirs.abs().max()


@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4, plain", "float8"])
@pytest.mark.parametrize("experts_class", [RoutedExperts, ClampedExperts])
def test_experts_multiply_as_linear_layers(kind, experts_class):
    """Each expert computes as a network of narrow linear layers with the rows of its tokens, even
    without any; in float8, the layers are torchao's. The tolerance covers sums in another order."""
    torch.manual_seed(0)
    experts = experts_class(
        n_experts=4, top_k=2, dim=64, hidden_dim=96, init_std=1.0, out_init_std=1.0
    )
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.2)
    converter = {**CONVERTERS, "float8": ROWWISE}[kind].build()
    plain = {name: value.detach().clone() for name, value in experts.named_parameters()}
    converted = converter.convert_layer("experts", experts)
    assert isinstance(converted, experts_class) and converted.device_type is None
    x = torch.randn(50, 64)
    chosen = torch.tensor([[0, 1], [3, 0]]).repeat(25, 1)  # not expert 2
    weights = torch.rand(50, 2)
    output = converted(x, weights, chosen)
    expected, layers = torch.zeros(50, 64), []
    for e in range(4):
        pairs = [(n, k) for n in range(50) for k in range(2) if chosen[n, k] == e]
        if not pairs:
            continue
        rows = [n for n, _ in pairs]
        scale = torch.stack([weights[pair] for pair in pairs])[:, None]

        def layer(matrix: Tensor) -> nn.Module:
            linear = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False)
            linear.weight = nn.Parameter(matrix)
            layers.append(linear.weight)
            return converter.convert_layer("layer", linear)

        both = layer(plain["w13"][e].flatten(0, 1))(x[rows])
        if "bias13" in plain:
            both = both + plain["bias13"][e].flatten()
        hidden = experts_class.activation(*both.chunk(2, dim=1)) * scale
        result = layer(plain["w2"][e])(hidden)
        if "bias2" in plain:
            result = result + plain["bias2"][e] * scale
        expected.index_add_(0, torch.tensor(rows), result)
    assert (output - expected).abs().max() <= 1e-5 * expected.abs().max()
    narrow_w13 = converted.w13
    gradients = torch.autograd.grad(output.sum(), narrow_w13, retain_graph=True)
    (of_linear,) = torch.autograd.grad(expected.sum(), layers[0])
    assert (gradients[0][0].flatten(0, 1) - of_linear).abs().max() <= 1e-5 * of_linear.abs().max()
    output.sum().backward()
    assert not converted.w13.grad[2].any() and converted.w13.grad[[0, 1, 3]].flatten(1).any(1).all()


def test_conversion_keeps_parameters_and_initializers():
    with torch.device("meta"):
        layer = with_initializers(nn.Linear(32, 64), weight=TruncatedNormal(0.5))
    layer.weight.requires_grad_(False)
    converted = mx().build().convert_layer("layer", layer)
    assert initializers_of(converted) == initializers_of(layer)
    assert [name for name, _ in converted.named_parameters()] == ["weight", "bias"]
    assert converted.weight is layer.weight and converted.bias is layer.bias


def test_a_frozen_weight_gets_no_gradient():
    layer, x, gradient = operands()
    converted = mx().build().convert_layer("layer", layer.requires_grad_(False))
    x.requires_grad_()
    converted(x).backward(gradient)
    assert x.grad is not None and converted.weight.grad is None


@pytest.mark.parametrize("shape", [(64,), (1, 64), (0, 64), (2, 0, 64), (3, 2, 1, 64)])
@pytest.mark.parametrize("products", [MXFP8Products(), NVFP4Products(), Float8Products()])
def test_inputs_have_any_leading_dimensions(products, shape):
    """As those of a plain layer, also one token, none, and strides that no view can flatten."""
    plain = nn.Linear(64, 32)
    layer, x = NarrowLinear(plain, products, 32), torch.randn(shape)
    x = x.mT.contiguous().mT if x.ndim > 1 else x
    x.requires_grad_()
    y = layer(x)
    assert y.shape == plain(x).shape
    y.sum().backward()
    assert x.grad.shape == shape and x.grad.isfinite().all()
    torch.testing.assert_close(y, plain(x), rtol=0.2, atol=1.0)  # not a test of exactness


# --- layer selection and checks
# --------------------------------------------------------------------------------------------------


def model(**options: Any) -> nn.Module:
    with torch.device("meta"):
        return tiny_config(Path("unused"), **options).model_spec.model.build()


def narrow_names(converted: nn.Module) -> set[str]:
    return {
        name
        for name, module in converted.named_modules()
        if type(module).__name__.startswith("Narrow")
    }


def test_small_and_unaligned_layers_and_the_head_stay_wide(log):
    converted = model(model__vocab_size=2048, model__ffn_dim=80)
    mx(min_features=64, exclude=["wo"]).build().convert(converted)
    assert narrow_names(converted) == {f"layers.{layer}.attention.wq" for layer in range(2)}
    messages = " ".join(record.message for record in log.records)
    assert "not a multiple of 32: layers.*.feed_forward.w1" in messages
    assert "mxfp8: 2 layers are emulated in float32 (this machine has no GPU)" in messages
    four_bits = model(model__vocab_size=2048, model__ffn_dim=80)
    nv().build().convert(four_bits)
    assert len(narrow_names(four_bits)) == 14
    with_experts = model(module="qwen3_moe", model__vocab_size=2048)
    mx(include=["experts"]).build().convert(with_experts)
    assert narrow_names(with_experts) == {f"layers.{layer}.moe.experts" for layer in range(2)}


def test_patterns_without_layers_are_rejected():
    for option in ({"include": ["wx"]}, {"exclude": [r"layers\.9\."]}):
        with pytest.raises(UserError, match="matches none of the layers"):
            mx(**option).build().check_model(model(model__vocab_size=2048))
    with pytest.raises(UserError, match=r"no layer is left.*mxfp8\.min_features"):
        MXFP8.Config().build().check_model(model(model__vocab_size=2048))


def test_few_bits_of_a_narrow_layer_are_rejected():
    for converters in (
        [mx(include=["wq"]), QLoRA.Config(include=["wq"])],
        [LoRA.Config(include=["wq"]), mx(include=["wq"])],
        [mx(include=["experts"]), LoRA.Config(include=["experts"])],
    ):
        converted = model(module="qwen3_moe", model__vocab_size=2048)
        with pytest.raises(UserError, match="is already converted by .*lora|by mxfp8, and .*lora"):
            convert_model(converted, [each.build() for each in converters])


@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4, nearest"])
def test_adapters_of_a_narrow_layer_add_to_its_products(kind):
    """The frozen weight multiplies in the narrow type, the adapter does not."""
    layer, x, gradient = operands()
    base = CONVERTERS[kind].build().convert_layer("wq", layer)
    y, grad_x, _ = products_of(CONVERTERS[kind].build().convert_layer("wq", layer), x, gradient)
    layer.weight.grad = None
    adapted = LoRA.Config(rank=2, alpha=4).build().convert_layer("wq", base)
    assert isinstance(adapted, LoRALinear) and not adapted.weight.requires_grad
    nn.init.normal_(adapted.lora_A)
    nn.init.normal_(adapted.lora_B)
    own_x = x.clone().requires_grad_()
    output = adapted(own_x)
    output.backward(gradient)
    lora_A, lora_B = adapted.lora_A.detach().double(), adapted.lora_B.detach().double()
    added = 2 * x.double() @ lora_A.T @ lora_B.T
    added_grad = 2 * gradient.double() @ lora_B @ lora_A
    for ours, narrow_part, wide_part in (
        (output, y, added),
        (own_x.grad, grad_x, added_grad),
    ):
        expected = narrow_part.double() + wide_part
        assert (ours - expected).abs().max() <= 1e-6 * expected.abs().max()
    rows, of_gradient = x.flatten(0, 1).double(), gradient.flatten(0, 1).double()
    expected = 2 * (of_gradient.T @ (rows @ lora_A.T))
    assert (adapted.lora_B.grad - expected).abs().max() <= 1e-6 * expected.abs().max()
    assert adapted.weight.grad is None


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")


def check_run(config: Any, **training: Any) -> None:
    config.validate()
    config.check_run(
        training=TrainingConfig(**{"mixed_precision_param": "bfloat16", **training}),
        parallelism=ParallelismConfig(),
        compile=CompileConfig(enable=False),
    )


def test_kernels_are_used_if_the_device_has_them(monkeypatch, log):
    pretend_gpu(monkeypatch, (12, 0))
    assert mx().build().emulates
    check_run(nv(), seq_len=33)
    pretend_gpu(monkeypatch, (10, 0))
    assert not mx().build().emulates and mx(emulate=True).build().emulates
    converted = model(model__vocab_size=2048)
    mx().build().convert(converted)
    assert type(converted.layers["0"].attention.wq.products) is narrow._MXFP8Kernels
    assert log.records[-1].message == "mxfp8: torchao's kernels compute 14 layers"
    check_run(mx(), seq_len=33, local_batch_size=1)
    for config, training, message in (
        (mx(), {"mixed_precision_param": "float32"}, "mixed_precision_param is float32; set bf"),
        (nv(stochastic_rounding=False), {}, "kernels have stochastic rounding"),
    ):
        with pytest.raises(UserError, match=message):
            check_run(config, **training)
        config.emulate = True
        check_run(config, **training)
    # an expert's products have no 4-bit kernels
    experts = model(module="qwen3_moe", model__vocab_size=2048, model__dim=128)
    nv(include=["experts", "wq"]).build().convert(experts)
    kinds = {name: type(experts.get_submodule(name).products) for name in narrow_names(experts)}
    assert kinds["layers.0.moe.experts"] is narrow.NVFP4Products
    assert kinds["layers.0.attention.wq"] is narrow._NVFP4Kernels
    assert [record.message for record in log.records[-2:]] == [
        "nvfp4: torchao's kernels compute 2 layers",
        "nvfp4: 2 layers are emulated in float32 (torchao has no kernels for experts)",
    ]
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(UserError, match="mxfp8 requires torchao"):
        check_run(mx())


@pytest.mark.parametrize("n_rows", [1, 128, 130])
def test_rows_are_padded_for_kernels(n_rows, monkeypatch):
    """Stand-ins for the kernels refuse other numbers of rows, as torchao does, and multiply
    exactly."""

    def multiply(multiple: int, x: Tensor, weight: Tensor, **options: Any) -> Tensor:
        assert len(x) % multiple == 0
        return nn.functional.linear(x, weight)

    library = SimpleNamespace(
        nvfp4_linear=partial(multiply, 128), _to_mxfp8_then_scaled_mm=partial(multiply, 32)
    )
    kernels = narrow._MXFP8Kernels(False), narrow._NVFP4Kernels()
    monkeypatch.setattr(narrow, "import_torchao", lambda name: library)
    torch.manual_seed(0)
    layer, x, gradient = nn.Linear(128, 128, False), torch.randn(n_rows, 128), torch.ones(128)
    expected = products_of(layer, x, gradient.expand(n_rows, 128))
    for kernel in kernels:
        layer.weight.grad = None
        results = products_of(NarrowLinear(layer, kernel, 16), x, gradient.expand(n_rows, 128))
        for ours, plain in zip(results, expected, strict=True):
            assert torch.allclose(ours, plain, rtol=1e-5, atol=1e-4)


def test_tensor_parallel_shards_must_be_whole_blocks(tmp_path):
    options = {"model__n_kv_heads": 8, "parallelism__tensor_parallel_degree": 2}
    config = tiny_config(tmp_path, model__ffn_dim=96, **options)
    config.model_converters = [mx()]
    with pytest.raises(UserError, match=r"96 outputs of layers\.0\.feed_forward\.w1 into mult"):
        config.check(2, dry_run=True)
    config.model_converters = [mx(exclude=["feed_forward"])]
    config.check(2, dry_run=True)


@pytest.mark.slow
def test_a_dry_run_counts_the_products_of_a_device_with_kernels(tmp_path):
    config = tiny_config(tmp_path, module="qwen3_moe", activation_checkpoint__mode="none")
    (plain,) = dry_run(config, 1)
    config.model_converters = [nv()]
    (report,) = dry_run(config, 1)
    assert report.executed_flops == plain.executed_flops
    assert report.parameter_bytes == plain.parameter_bytes


# --- whole runs
# --------------------------------------------------------------------------------------------------

MOE = {"module": "qwen3_moe", "model__moe__ffn_dim": 32, "model__moe__n_experts": 4}
BASE = {
    "model__n_kv_heads": 8,
    "training__steps": 2,
    "training__global_batch_size": 2,
    "training__local_batch_size": 1,
    "lr_scheduler__warmup_steps": 1,
    "optimizer__lr": 1e-3,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "tp": {"parallelism__tensor_parallel_degree": 2},
    "pp": {"parallelism__pipeline_parallel_degree": 2, "training__local_batch_size": 2},
    "cp": {"parallelism__context_parallel_degree": 2, "training__seq_len": 128},
}
EXACT = ("fsdp", "pp")
"""Layouts that compute the same products; others add up parts."""


RUNS = {"mxfp8": tuple(LAYOUTS), "nvfp4": EXACT, "nvfp4, nearest": ("tp", "cp")}


def in_layouts(folder: Path) -> None:
    for kind, layouts in RUNS.items():
        for layout in layouts:
            train(folder / kind / layout, CONVERTERS[kind], **{**BASE, **LAYOUTS[layout]})
    for layout in ADAPTED:
        train(folder / "adapters" / layout, mx(), ADAPTERS, **{**BASE, **LAYOUTS[layout]})
    for kind, options in EXPERT_RUNS.items():
        train(folder / kind / "experts", *options.pop("converters"), **{**MOE, **BASE, **options})


ADAPTERS = LoRA.Config(rank=2, dora=True)
ADAPTED = ("fsdp", "tp")
EXPERT_RUNS: dict[str, dict[str, Any]] = {
    "mxfp8": {"converters": [mx()], "parallelism__expert_parallel_degree": 2},
    "nvfp4, nearest": {
        # The scale of a tensor depends on its tokens: only experts see all tokens in both layouts.
        "converters": [nv(include=["experts"], stochastic_rounding=False)],
        "parallelism__expert_parallel_degree": 2,
    },
}


def numbers(folder: Path) -> list[tuple[Any, ...]]:
    return read_metrics(folder, "loss", "grad_norm")


@pytest.mark.slow
def test_two_processes_match_one(tmp_path):
    """FSDP and pipelines multiply the same numbers. Sums over shards differ by 1e-7, which moves a
    few values to the other of two neighbors; stochastic choices then differ altogether."""
    run_processes(in_layouts, 2, tmp_path / "two")
    for kind, layouts in RUNS.items():
        for layout in layouts:
            options = {"training__seq_len": LAYOUTS[layout].get("training__seq_len", 32)}
            one = tmp_path / "one" / kind / str(options["training__seq_len"])
            if not one.exists():
                train(one, CONVERTERS[kind], **{**BASE, **options})
            tolerance = 1e-6 if layout in EXACT else 1e-3
            for ours, expected in zip(
                numbers(tmp_path / "two" / kind / layout), numbers(one), strict=True
            ):
                assert ours == pytest.approx(expected, rel=tolerance), (kind, layout)
    train(tmp_path / "one" / "adapters", mx(), ADAPTERS, **BASE)
    for layout in ADAPTED:
        for ours, expected in zip(
            numbers(tmp_path / "two" / "adapters" / layout),
            numbers(tmp_path / "one" / "adapters"),
            strict=True,
        ):
            assert ours == pytest.approx(expected, rel=1e-3), layout
    for kind, options in EXPERT_RUNS.items():
        whole = {**MOE, **BASE, "training__local_batch_size": 2}
        train(tmp_path / "one" / kind / "experts", *options["converters"], **whole)
        for ours, expected in zip(
            numbers(tmp_path / "two" / kind / "experts"),
            numbers(tmp_path / "one" / kind / "experts"),
            strict=True,
        ):
            assert ours == pytest.approx(expected, rel=1e-3), kind


@pytest.mark.slow
def test_recomputation_is_bitwise_exact(tmp_path):
    for kind, options in (("nvfp4", {}), ("mxfp8", MOE)):
        runs = []
        for mode in ("none", "selective", "full"):
            folder = tmp_path / kind / mode
            settings = {**BASE, **options, "activation_checkpoint__mode": mode}
            train(folder, CONVERTERS[kind], **settings)
            runs.append(numbers(folder))
        assert runs[1:] == [runs[0], runs[0]]


def test_resume_is_exact(tmp_path):
    """Stochastic rounding depends on nothing but the gradients."""
    options = {**BASE, "lr_scheduler__total_steps": 2, "checkpoint__enable": True}
    train(tmp_path / "whole", nv(), **options)
    for steps in (1, 2):
        train(tmp_path / "parts", nv(), **{**options, "training__steps": steps})
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")
    train(tmp_path / "nearest", nv(stochastic_rounding=False), **options)
    assert numbers(tmp_path / "nearest") != numbers(tmp_path / "whole")


def test_frozen_layers_train_the_others(tmp_path):
    trainer = train(tmp_path, mx(), Freeze.Config(include=["attention"]), **BASE)
    frozen = [name for name, x in trainer.model_parts[0].named_parameters() if not x.requires_grad]
    assert len(frozen) == 10 and all("attention" in name for name in frozen)
    assert all(loss > 0 for _, loss in read_metrics(tmp_path, "loss"))
