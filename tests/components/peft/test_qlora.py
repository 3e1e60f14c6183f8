"""QLoRA, compared with LoRA on the unpacked weights; two processes compared with one."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from tests.equivalence.runs import UnitVariance, merge_weights
from tests.equivalence.workers import Workers
from tests.training import RaggedDataLoader, read_metrics, run, tiny_config
from torchtitan.components.peft import LoRA, QLoRA
from torchtitan.components.peft.lora import LoRALinear, QLoRALinear
from torchtitan.components.quantization.nf4 import NF4, pack, unpack
from torchtitan.distributed.initialize import canonical_name
from torchtitan.distributed.tensor_parallel import shard_parameters
from torchtitan.dry_run import dry_run
from torchtitan.protocols.initializer import TruncatedNormal, with_initializers
from torchtitan.protocols.model import converted_modules
from torchtitan.tools.errors import UserError

IN, OUT, RANK = 128, 96, 4
PARTS = NF4._fields


def linear(weight: Tensor) -> nn.Linear:
    with torch.device("meta"):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight.clone())
    return with_initializers(layer, weight=TruncatedNormal(0.1))


def make_pair(dora: bool, dtype: torch.dtype = torch.float32) -> tuple[QLoRALinear, LoRALinear]:
    """Return a 4-bit layer with a trained adapter, and the same layer with the unpacked weight."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(OUT, IN, generator=generator)
    options: dict[str, Any] = {"rank": RANK, "scaling": 0.5, "dropout": 0.0, "dora": dora}
    in_4_bits = QLoRALinear(linear(weight), **options)
    reference = LoRALinear(linear(unpack(*pack(weight), torch.float32)), **options)
    for name in in_4_bits.adapter:
        values = torch.rand(in_4_bits.get_parameter(name).shape, generator=generator)
        for layer in (in_4_bits, reference):
            layer.get_parameter(name).data.copy_(values)
    for layer in (in_4_bits, reference):
        for parameter in layer.parameters():
            parameter.data = parameter.data.to(
                dtype if parameter.is_floating_point() else parameter.dtype
            )
    return in_4_bits, reference


def output_and_gradients(layer: LoRALinear, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(layer.get_parameter(name).grad for name in layer.adapter)]


# --- a layer
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dora", [False, True])
def test_output_and_gradients_equal_lora_on_the_unpacked_weight(dora, dtype):
    """Exactly: the 4-bit weight has the same values in both types."""
    x = torch.randn(3, 5, IN, generator=torch.Generator().manual_seed(1)).to(dtype)
    in_4_bits, reference = make_pair(dora, dtype)
    results = zip(
        output_and_gradients(in_4_bits, x), output_and_gradients(reference, x), strict=True
    )
    assert all(torch.equal(result, expected) for result, expected in results)


@pytest.mark.parametrize("dora", [False, True])
def test_merged_weights_equal_the_weights_in_the_forward_pass(dora):
    """The effective weight, with gradients, and the exported weight, which is bfloat16 by default;
    also on the meta device."""
    in_4_bits, reference = make_pair(dora)
    x = torch.randn(7, IN, generator=torch.Generator().manual_seed(1))
    weight = in_4_bits.effective_weight()
    # Float32 sums of 128 terms in another order.
    torch.testing.assert_close(F.linear(x, weight), in_4_bits(x), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(weight, reference.effective_weight(), rtol=0, atol=0)
    weight.sum().backward()
    assert all(in_4_bits.get_parameter(name).grad is not None for name in in_4_bits.adapter)
    own = {name: parameter.detach() for name, parameter in in_4_bits.named_parameters()}
    (plain,) = in_4_bits.plain_state(own).values()
    assert torch.equal(plain, weight.detach())
    assert in_4_bits.plain_types(own) == {"weight": torch.bfloat16}
    (meta,) = in_4_bits.plain_state(
        {name: tensor.to("meta") for name, tensor in own.items()}
    ).values()
    assert (meta.shape, meta.dtype) == (plain.shape, plain.dtype)


def test_weights_take_half_a_byte_and_are_frozen():
    in_4_bits, _ = make_pair(dora=True)
    parts = [in_4_bits.get_parameter(name) for name in PARTS]
    assert sum(tensor.nbytes for tensor in parts) == OUT * IN * (1 / 2 + 1 / 64 + 8 / IN)
    names = {name for name, parameter in in_4_bits.named_parameters() if parameter.requires_grad}
    assert (
        names
        == {"lora_A", "lora_B", "magnitude"}
        == set(dict(in_4_bits.named_parameters())) - set(PARTS)
    )


# --- a model
# --------------------------------------------------------------------------------------------------


def make_config(folder: Path, converter: LoRA.Config | None, **options: Any) -> Any:
    """Return a tiny run whose blocks affect the loss from the first step (`UnitVariance`)."""
    settings = {
        "optimizer__name": "SGD",
        "optimizer__lr": 0.1,
        "model__dim": 128,
        "model__ffn_dim": 256,
    }
    config = tiny_config(
        folder, **{**settings, "training__mixed_precision_param": "float32", **options}
    )
    config.model_converters = [UnitVariance.Config(), *([converter] if converter else [])]
    return config


def test_initial_values_are_the_packed_plain_weights(tmp_path):
    models = []
    for converter in (None, QLoRA.Config(dora=True)):
        trainer = make_config(tmp_path, converter).build()
        trainer.close()
        models.append(trainer.model_parts[0])
    weights, (_, converted) = models[0].state_dict(), models
    layers = dict(converted_modules(converted))
    assert len(layers) == 14
    for name, layer in layers.items():
        parts = pack(weights[f"{name}.weight"])
        assert all(torch.equal(layer.get_parameter(part), getattr(parts, part)) for part in PARTS)
        norms = unpack(*parts, torch.float32).norm(dim=1)
        # float32 sums
        torch.testing.assert_close(layer.magnitude.detach(), norms, rtol=1e-6, atol=0)


@pytest.mark.slow
def test_learns_like_lora(tmp_path):
    """The loss falls by more than the difference: 4 bits change these random weights by 9 %, and
    the loss by 1 %."""
    losses = []
    for converter in (LoRA.Config(), QLoRA.Config()):
        folder = tmp_path / type(converter).__qualname__
        options = {"optimizer__name": "AdamW", "optimizer__lr": 1e-2, "training__steps": 30}
        options |= {"lr_scheduler__warmup_steps": 3}
        run(make_config(folder, converter, **options))
        losses.append([loss for _, loss in read_metrics(folder, "loss")])
    lora, qlora = losses
    assert lora[-1] < 0.9 * lora[0]
    assert qlora == [pytest.approx(loss, rel=2e-2) for loss in lora]


@pytest.mark.slow
def test_a_step_needs_less_memory(tmp_path):
    """Only the packed weights account for the difference: no unpacked weight is kept."""
    options = {"model__dim": 256, "model__ffn_dim": 1024, "model__n_layers": 4}
    reports = []
    for converter in (LoRA.Config(), QLoRA.Config()):
        config = make_config(
            tmp_path, converter, **options, training__mixed_precision_param="bfloat16"
        )
        reports += dry_run(config, 1)
    lora, qlora = reports
    rows = 4 * (256 + 2 * 128 + 256 + 2 * 1024 + 256)
    n_weights = 4 * (256 * 256 + 2 * 128 * 256 + 256 * 256 + 3 * 1024 * 256)
    saved = n_weights * (2 - 1 / 2 - 1 / 64) - 8 * rows
    assert lora.parameter_bytes - qlora.parameter_bytes == saved
    kept = [report.peak["activations"] for report in reports]
    assert kept[1] <= kept[0]
    assert lora.executed_flops == qlora.executed_flops


# --- invalid options
# --------------------------------------------------------------------------------------------------


def test_inputs_that_are_not_whole_blocks_are_rejected(tmp_path):
    config = make_config(tmp_path, QLoRA.Config(), model__ffn_dim=100)
    with pytest.raises(
        UserError, match=r"layers\.0\.feed_forward\.w2 .*64 inputs, not 100.*qlora\.exclude"
    ):
        config.check(world_size=1)
    config.model_converters = [QLoRA.Config(exclude=[r"\.w2$"])]
    config.check(world_size=1)


def test_blocks_that_cannot_be_sharded_are_rejected(tmp_path):
    options = {
        "parallelism__tensor_parallel_degree": 4,
        "model__ffn_dim": 512,
        "model__n_kv_heads": 4,
    }
    config = make_config(tmp_path, QLoRA.Config(), **options)
    message = (
        r"tensor_parallel_degree 4 .*does not divide the size 2 of "
        r".*layers\.0\.attention\.wo.*qlora\.exclude"
    )
    with pytest.raises(UserError, match=message):
        config.check(world_size=4)
    config.model_converters = [QLoRA.Config(exclude=[r"\.wo$"])]
    config.check(world_size=4)


# --- on two processes
# -------------------------------------------------------------------------------------------------

LAYOUTS = {
    "FSDP": ({"model__vocab_size": 2051}, {"include": [r"layers", r"^head\.output$"]}),
    "TP": ({"parallelism__tensor_parallel_degree": 2}, {"dora": True}),
}
"""Options of the run and of the converter: rows that two ranks cannot divide evenly; sharded
columns and rows."""
SLOW_LAYOUTS = {
    "PP": ({"parallelism__pipeline_parallel_degree": 2, "training__local_batch_size": 4}, {}),
    "FSDP, AC, compile": (
        {
            "compile__enable": True,
            "compile__backend": "aot_eager",
            "activation_checkpoint__mode": "full",
        },
        {},
    ),
    "FSDP, CPU offload": ({"training__enable_cpu_offload": True}, {}),
}


def check_dropout_on_sharded_layers() -> None:
    """A layer is linear in its inputs for any dropout mask: the inputs times their gradient equal
    the outputs. With replicated inputs, each rank uses the mask of its part."""
    mesh = init_device_mesh("cpu", (2,))
    splits: tuple[tuple[Any, Placement], ...] = (
        ("out", Replicate()),
        ("in", Shard(2)),
        (None, Replicate()),
    )
    for features, placement in splits:
        layer, _ = make_pair(dora=True)
        layer.dropout = 0.5
        x = torch.randn(2, 8, IN, generator=torch.Generator().manual_seed(2))
        shard_parameters(layer, mesh, features)
        inputs = distribute_tensor(x, mesh, [placement]).requires_grad_()
        torch.manual_seed(dist.get_rank())
        total = layer(inputs).full_tensor().sum()
        total.backward()
        # Float32 sums of 1536 numbers of about 10.
        torch.testing.assert_close(
            (x * inputs.grad.full_tensor()).sum(), total, rtol=1e-4, atol=1e-2
        )


@pytest.mark.slow
def test_dora_and_dropout_under_tensor_parallelism(workers):
    workers.run(check_dropout_on_sharded_layers)


def record(folder: Path, options: dict[str, Any], converter_options: dict[str, Any]) -> None:
    """Train, and save the unsharded weights on each rank."""
    config = make_config(
        folder,
        QLoRA.Config(**converter_options),
        training__global_batch_size=8,
        training__steps=3,
        **options,
    )
    config.dataloader = RaggedDataLoader.Config(**config.dataloader.to_dict())
    trainer = run(config)
    named = [named for part in trainer.model_parts for named in part.named_parameters()]
    weights = {canonical_name(name): parameter.detach() for name, parameter in named}
    unsharded = {
        name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        for name, tensor in weights.items()
    }
    torch.save(unsharded, folder / f"weights-{trainer.rank}.pt")


def compare_with_one_process(
    workers: Workers, folder: Path, options: dict[str, Any], converter_options: Any
) -> None:
    """Frozen tensors exactly; the others differ by float32 sums in another order (measured:
    1e-6)."""
    layout = ("parallelism", "compile", "activation_checkpoint", "training__enable_cpu_offload")
    own = {name: value for name, value in options.items() if not name.startswith(layout)}
    record(folder / "one", {**own, "training__local_batch_size": 8}, converter_options)
    workers.run(record, folder / "two", options, converter_options)
    expected = torch.load(folder / "one/weights-0.pt")
    copies = 1 if "parallelism__pipeline_parallel_degree" in options else 2
    by_rank = [list(torch.load(folder / f"two/weights-{rank}.pt").items()) for rank in range(2)]
    weights = merge_weights(by_rank, copies=copies)
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        if "lora_" in name or "magnitude" in name:
            assert (weights[name] - tensor).norm() < 1e-5 * tensor.norm(), name
        else:
            assert torch.equal(weights[name], tensor), name
    one, two = (read_metrics(folder / name, "loss", "grad_norm") for name in ("one", "two"))
    assert two == [pytest.approx(line, rel=1e-5) for line in one]
    assert len(one) == 3


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["FSDP", "TP"])
def test_two_processes_equal_one(workers, tmp_path, layout):
    compare_with_one_process(workers, tmp_path, *LAYOUTS[layout])


@pytest.mark.slow
@pytest.mark.parametrize("layout", SLOW_LAYOUTS)
def test_other_layouts_equal_one_process(workers, tmp_path, layout):
    compare_with_one_process(workers, tmp_path, *SLOW_LAYOUTS[layout])
