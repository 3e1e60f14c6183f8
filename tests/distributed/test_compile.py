"""Compiled models and losses against eager ones; log messages about compilation."""

import contextlib
import logging
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.processes import run_processes
from tests.training import lay_out, llama_config, train
from torchtitan.components.checkpoint import ModelState
from torchtitan.components.losses.loss import CrossEntropyLoss
from torchtitan.components.optim.optimizer import Optimizer
from torchtitan.config import ActivationCheckpointConfig, CompileConfig, ParallelismConfig
from torchtitan.distributed import compile as compile_module
from torchtitan.distributed import initialize_weights
from torchtitan.distributed.activation_checkpoint import apply_activation_checkpointing
from torchtitan.distributed.compile import (
    RecompileMonitor,
    apply_compile,
    check_compile,
    compile_loss,
)
from torchtitan.distributed.mixed_precision import MixedPrecision
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.tools.errors import UserError

pytestmark = pytest.mark.usefixtures("log")

BATCH, LENGTH, VOCABULARY = 2, 24, 99
EAGER_KERNELS = CompileConfig(enable=True, backend="aot_eager")
"""Traces forward and backward like inductor, but runs eager kernels: seconds instead of half a
minute."""
MODES = ("none", "full", "selective")


@pytest.fixture(autouse=True)
def reset_compiler() -> Iterator[None]:
    """Reset compiled code and settings, which belong to the process, so that tests do not share
    them."""
    import torch._functorch.config

    torch._dynamo.reset()
    with torch._functorch.config.patch(donated_buffer=True, activation_memory_budget=1.0):
        yield
    torch._dynamo.reset()


def make_model(compile: CompileConfig | None = None, mode: Any = "none") -> Llama3Model:
    """Build a model with fixed weights."""
    model = llama_config(vocab_size=VOCABULARY, n_layers=3).build()
    apply_activation_checkpointing(model, ActivationCheckpointConfig(mode=mode))
    if compile:
        apply_compile(model, compile, ParallelismConfig())
    initialize_weights(model, 0)
    return model


def make_loss(compile: CompileConfig | None = None) -> CrossEntropyLoss:
    loss = CrossEntropyLoss.Config(chunk_tokens=BATCH * LENGTH // 2).build()
    if compile:
        compile_loss(loss, compile)
    return loss


def batch(seed: int, length: int = LENGTH) -> tuple[Tensor, AttentionMetadata]:
    """Return tokens and the attention of packed documents, which differ in every batch."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (BATCH, length), generator=generator)
    cut = int(torch.randint(1, length, (), generator=generator))
    positions = torch.cat([torch.arange(cut), torch.arange(length - cut)]).expand(BATCH, -1)
    return tokens, AttentionMetadata.from_positions(positions)


def step(model: nn.Module, loss: CrossEntropyLoss, seed: int, length: int = LENGTH) -> list[Tensor]:
    """Return the loss and the gradients."""
    model.zero_grad()
    tokens, attention = batch(seed, length)
    value = model(tokens, attention, head=loss, labels_BL=tokens)
    value.backward()
    return [value.detach(), *(parameter.grad for parameter in model.parameters())]


def assert_close(values: list[Tensor], expected: list[Tensor]) -> None:
    """Compare up to float32 rounding: compiled code sums in a different order, and a dense mask
    uses another kernel."""
    for value, reference in zip(values, expected, strict=True):
        assert (value - reference).norm() <= 1e-5 * reference.norm()


# --- numerics
# --------------------------------------------------------------------------------------------------


def assert_matches_eager(config: CompileConfig, mode: str) -> None:
    model, loss = make_model(config, mode), make_loss(config)
    expected_model, expected_loss = make_model(), make_loss()
    for seed in range(2):
        assert_close(step(model, loss, seed), step(expected_model, expected_loss, seed))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_loss_and_gradients_match_eager(mode):
    assert_matches_eager(EAGER_KERNELS, mode)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [mode if mode == "selective" else pytest.param(mode, marks=pytest.mark.long) for mode in MODES],
)
def test_inductor_matches_eager(mode):
    assert_matches_eager(CompileConfig(enable=True), mode)


@pytest.mark.slow
def test_mixed_precision_matches_eager():
    values = []
    for config in (None, EAGER_KERNELS):
        model = make_model(config)
        model.is_compiled = True
        tokens, attention = batch(0, LENGTH)
        with MixedPrecision(torch.bfloat16).of(model):
            loss = model(tokens, attention, head=make_loss(config), labels_BL=tokens)
            loss.backward()
        values.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    for value, reference in zip(*reversed(values), strict=True):
        # The same kernels round at the same places, except for casts that the compiler removes.
        assert (value - reference).norm() <= 0.01 * reference.norm()


@pytest.mark.parametrize("mode", MODES)
def test_names_and_weights_are_unchanged(mode):
    plain, compiled = make_model(), make_model(EAGER_KERNELS, mode)
    assert list(ModelState([compiled]).state_dict()) == list(plain.state_dict())
    for expected, weight in zip(plain.parameters(), compiled.parameters(), strict=True):
        assert torch.equal(weight, expected)


# --- the loss
# --------------------------------------------------------------------------------------------------


class SmoothedLoss(CrossEntropyLoss):
    """A custom loss."""

    @dataclass(kw_only=True, slots=True)
    class Config(CrossEntropyLoss.Config):
        smoothing: float = 0.1
        """Label smoothing."""

    def from_logits(self, logits_NV: Tensor, labels_N: Tensor) -> Tensor:
        return F.cross_entropy(
            logits_NV.float(), labels_N, reduction="sum", label_smoothing=self.config.smoothing
        )


@pytest.mark.slow
@pytest.mark.parametrize("chunk_tokens", [0, 7])
def test_the_loss_of_a_subclass_is_compiled(chunk_tokens):
    def numbers(loss: CrossEntropyLoss) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        hidden, weight = (
            torch.randn(size, generator=generator).requires_grad_() for size in ((2, 8, 5), (11, 5))
        )
        value = loss(hidden, weight, torch.arange(16).view(2, 8) % 11)
        value.backward()
        return [value.detach(), hidden.grad, weight.grad]

    config = SmoothedLoss.Config(chunk_tokens=chunk_tokens)
    compiled = config.build()
    compile_loss(compiled, EAGER_KERNELS)
    before = count_graphs()
    assert_close(numbers(compiled), numbers(config.build()))
    assert count_graphs() > before
    assert numbers(compiled)[0] != numbers(CrossEntropyLoss.Config().build())[0]


def test_a_loss_without_compile_is_not_compiled(log):
    class Distance:
        pass

    compile_loss(Distance(), EAGER_KERNELS)
    assert "Distance is not compiled: it has no `compile` method" in log.text


# --- recompilation
# --------------------------------------------------------------------------------------------------


def count_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_layers_share_compiled_code_and_new_documents_do_not_recompile(log, mode):
    model, loss = make_model(EAGER_KERNELS, mode), make_loss(EAGER_KERNELS)
    monitor = RecompileMonitor()
    for index in range(4):
        with monitor.watch(index + 1):
            step(model, loss, seed=index)
    assert log.messages == ["compiled 2 graphs in step 1"]
    assert monitor.recompiles == 0


@pytest.mark.slow
def test_a_new_shape_is_recompiled_with_a_warning(log):
    model, loss = make_model(EAGER_KERNELS), make_loss()
    monitor = RecompileMonitor()
    for number, length in ((7, LENGTH), (8, LENGTH), (9, LENGTH + 2), (10, LENGTH + 4)):
        with monitor.watch(number):
            step(model, loss, seed=number, length=length)
    first, again = log.records
    assert first.getMessage() == "compiled 1 graphs in step 7"
    assert again.levelno == logging.WARNING
    message = again.getMessage()
    assert "step 9 was slow: it recompiled 1 graphs (forward: " in message
    assert f"size mismatch at index 1. expected {LENGTH}, actual {LENGTH + 2}" in message
    assert monitor.recompiles == 1  # the second graph accepts any length


@pytest.mark.slow
def test_validation_is_not_reported_as_recompilation(log):
    """Validation has no gradients, and so needs other compiled code."""
    model, loss = make_model(EAGER_KERNELS), make_loss()
    monitor = RecompileMonitor()
    for number in range(2):
        with monitor.watch(number):
            step(model, loss, seed=number)
        before = count_graphs()
        with torch.no_grad():
            tokens, attention = batch(0)
            model(tokens, attention, head=loss, labels_BL=tokens)
        assert count_graphs() == before + (number == 0)
    assert log.messages == ["compiled 1 graphs in step 0"]


def test_an_eager_step_reports_nothing(log):
    with RecompileMonitor().watch(1):
        step(make_model(), make_loss(), seed=0)
    assert log.messages == []


@pytest.mark.slow
def test_the_trainer_reports_compilation(tmp_path, log):
    train(tmp_path, compile__enable=True, compile__backend="aot_eager")
    assert [message for message in log.messages if "compiled" in message] == [
        "compiled 2 graphs in step 1"
    ]


# --- settings
# --------------------------------------------------------------------------------------------------


def test_an_unknown_backend_is_rejected():
    with pytest.raises(
        UserError, match=r"--compile\.backend is 'inducto', and torch knows .*inductor.*aot_eager"
    ):
        check_compile(CompileConfig(enable=True, backend="inducto"))
    check_compile(CompileConfig(enable=False, backend="inducto"))
    for backend in ("inductor", "aot_eager", "eager"):
        check_compile(CompileConfig(enable=True, backend=backend))


@pytest.mark.skipif(
    torch.accelerator.is_available(), reason="only code for the CPU needs a C++ compiler"
)
def test_a_missing_cpp_compiler_is_reported():
    import torch._inductor.config

    message = r"--compile\.backend inductor needs a C\+\+ compiler .*CXX"
    # monkeypatch would leave the process without the setting.
    with (
        torch._inductor.config.patch({"cpp.cxx": (None, "/nowhere/g++")}),
        pytest.raises(UserError, match=message),
    ):
        check_compile(CompileConfig(enable=True))
    check_compile(EAGER_KERNELS)


def test_a_missing_c_compiler_is_reported(monkeypatch):
    """Before the model loads, not by Triton in the first step."""
    monkeypatch.setattr(compile_module, "device_type", lambda: "cuda")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/clang" if name == "clang" else None)
    eight_bit = Optimizer.Config(name="AdamW8bit")
    check_compile(CompileConfig(enable=True))
    eight_bit.validate()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UserError, match=r"--compile\.backend inductor needs a C compiler, .*CC"):
        check_compile(CompileConfig(enable=True))
    with pytest.raises(
        UserError, match="AdamW8bit updates weights in compiled code, which needs a C compiler"
    ):
        eight_bit.validate()
    monkeypatch.setenv("CC", "/opt/gcc")
    check_compile(CompileConfig(enable=True))
    eight_bit.validate()


def test_attention_that_needs_a_c_compiler_on_cuda(monkeypatch):
    """Before the weights load: FlexAttention compiles code also in models that are not compiled."""
    from torchtitan.models.gemma.config_registry import gemma2_debugmodel, gemma_debugmodel
    from torchtitan.models.gpt_oss.config_registry import gpt_oss_debugmodel
    from torchtitan.trainer.builder import build_model

    def build(configuration: Any, *, precision: str = "bfloat16", **dataloader: bool) -> None:
        config = configuration()
        config.model_spec.model.vocab_size = VOCABULARY
        config.training.mixed_precision_param = precision
        config.dataloader = replace(config.dataloader, **dataloader)
        build_model(config)  # type: ignore[arg-type]

    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    for configuration in (gemma2_debugmodel, gpt_oss_debugmodel):
        monkeypatch.setattr(compile_module, "device_type", lambda: "cpu")
        build(configuration)
        monkeypatch.setattr(compile_module, "device_type", lambda: "cuda")
        with pytest.raises(
            UserError,
            match="soft caps or sinks is computed by FlexAttention, which needs a C compiler",
        ):
            build(configuration)
    build(gemma_debugmodel)
    build(gemma_debugmodel, precision="float32", document_mask=False)
    with pytest.raises(
        UserError, match="packed documents in float32 is computed by FlexAttention, which needs a C"
    ):
        build(gemma_debugmodel, precision="float32")


@pytest.mark.parametrize(
    ("degree", "schedule", "expected"),
    [
        (1, "ZBVZeroBubble", True),
        (2, "1F1B", True),
        (2, "Interleaved1F1B", True),
        (2, "InterleavedZeroBubble", False),
        (2, "ZBVZeroBubble", False),
        (2, "DualPipeV", False),
    ],
)
def test_schedules_that_split_the_backward_pass_disable_donated_buffers(degree, schedule, expected):
    import torch._functorch.config

    parallelism = ParallelismConfig(
        pipeline_parallel_degree=degree, pipeline_parallel_schedule=schedule
    )
    apply_compile(llama_config().build(), EAGER_KERNELS, parallelism)
    assert torch._functorch.config.donated_buffer == expected


# --- several processes
# ------------------------------------------------------------------------------------------------


def compare_layouts(folder: Path) -> None:
    import torch.distributed as dist

    def numbers(compile: CompileConfig, mode: Any, **degrees: int) -> list[Tensor]:
        torch._dynamo.reset()
        model, loss = make_model(), make_loss(compile if compile.enable else None)
        checkpointing = ActivationCheckpointConfig(mode=mode)
        lay_out(
            model,
            ParallelismConfig(**degrees),
            activation_checkpoint=checkpointing,
            compile=compile,
        )
        initialize_weights(model, 0)
        monitor = RecompileMonitor()
        for seed in range(2):
            with monitor.watch(seed):
                value, *gradients = step(model, loss, seed)
        assert monitor.recompiles == 0
        return [value, *(gradient.full_tensor() for gradient in gradients)]

    layouts = {
        "FSDP": {"data_parallel_shard_degree": 2},
        "DDP": {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1},
        "TP": {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 1},
    }
    for mode, name in zip(("full", "none", "selective"), layouts, strict=True):
        degrees = layouts[name]
        assert_close(
            numbers(EAGER_KERNELS, mode, **degrees), numbers(CompileConfig(), "none", **degrees)
        )
    (folder / f"rank {dist.get_rank()} has compared").touch()


@pytest.mark.slow
def test_two_processes_match_eager(tmp_path):
    run_processes(compare_layouts, 2, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_async_tensor_parallelism_needs_compiled_code_on_gpus(monkeypatch):
    asked = ParallelismConfig(tensor_parallel_degree=2, enable_async_tensor_parallel=True)
    inductor = CompileConfig(enable=True)
    for compile, parallelism, device, missing in (
        (
            inductor,
            replace(asked, tensor_parallel_degree=1),
            "cuda",
            "tensor_parallel_degree above 1",
        ),
        (CompileConfig(), asked, "cuda", "--compile.enable with `model`"),
        (
            CompileConfig(enable=True, components=["loss"]),
            asked,
            "cuda",
            "--compile.enable with `model`",
        ),
        (EAGER_KERNELS, asked, "cuda", "--compile.backend inductor"),
        (inductor, asked, "cpu", "GPUs of CUDA"),
        (inductor, asked, "cuda", None),
        (CompileConfig(), replace(asked, enable_async_tensor_parallel=False), "cpu", None),
    ):
        monkeypatch.setattr(compile_module, "device_type", lambda device=device: device)
        with (
            pytest.raises(UserError, match=f"needs .*{missing}")
            if missing
            else contextlib.nullcontext()
        ):
            compile_module.check_async_tensor_parallel(compile, parallelism)


class Counted(BaseException):
    """Ends a compiled call, whose fused operations exist only on CUDA."""


@pytest.mark.slow
@pytest.mark.parametrize("is_asynchronous", [True, False])
def test_async_tensor_parallelism_fuses_each_collective_of_a_layer(is_asynchronous, monkeypatch):
    """Inductor's own passes for CUDA over a layer's forward graph, on one rank of two without the
    other."""
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric_memory
    from torch._inductor import config as inductor
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape

    calls: Counter[str] = Counter()

    def count(graph: Any, inputs: Any, **options: Any) -> Any:
        view_to_reshape(graph)
        post_grad_passes(graph, False)
        calls.update(str(node.target) for node in graph.graph.nodes)
        raise Counted

    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(symmetric_memory, "_group_name_to_store", {})
    parallelism = ParallelismConfig(
        tensor_parallel_degree=2, enable_async_tensor_parallel=is_asynchronous
    )
    model = llama_config(vocab_size=VOCABULARY, n_layers=1).build()
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        with inductor.patch(_micro_pipeline_tp=False):
            compile = CompileConfig(
                enable=True, backend=lambda graph, x: compile_fx(graph, x, inner_compile=count)
            )
            lay_out(model, parallelism, compile=compile)
            initialize_weights(model, 0)
            tokens_BL = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
            with pytest.raises(Counted):
                model(tokens_BL, None, head=CrossEntropyLoss.Config().build(), labels_BL=tokens_BL)
    finally:
        dist.destroy_process_group()
    fused = {name: n for name, n in calls.items() if "fused_" in name}
    expected = {
        "symm_mem.fused_all_gather_matmul.default": 2,
        "symm_mem.fused_matmul_reduce_scatter.default": 2,
    }
    assert fused == (expected if is_asynchronous else {})
    # Before attention and before the network; after each.
    single = [
        n for name, n in calls.items() if name.startswith("_c10d_functional") and "wait" not in name
    ]
    assert sum(single) == (0 if is_asynchronous else 4)
