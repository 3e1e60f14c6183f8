"""Activation checkpointing: bitwise equal numbers, less memory, and recomputation."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from tests.processes import run_processes
from tests.training import lay_out, llama_config
from torchtitan.components.checkpoint import ModelState
from torchtitan.components.losses.loss import CrossEntropyLoss
from torchtitan.config import ActivationCheckpointConfig, CompileConfig, ParallelismConfig
from torchtitan.distributed import initialize_weights
from torchtitan.distributed.activation_checkpoint import (
    _save_costly_results,
    apply_activation_checkpointing,
    check_activation_checkpoint,
)
from torchtitan.distributed.initialize import canonical_name
from torchtitan.distributed.mixed_precision import MixedPrecision
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.tools.errors import UserError

BATCH, LENGTH = 2, 24
CONFIG = llama_config(n_layers=4)
MODES = {
    "full": ActivationCheckpointConfig(mode="full"),
    "op": ActivationCheckpointConfig(mode="selective"),
    "every second": ActivationCheckpointConfig(mode="selective", selective_option="2"),
}
NONE = ActivationCheckpointConfig()


def test_every_second_float8_product_is_kept():
    """With random inputs in float8, as torchao computes a converted layer."""
    one = torch.ones(())
    weight = torch.randn(16, 16).to(torch.float8_e4m3fn).T

    def compute(x: Tensor) -> Tensor:
        for _ in range(4):
            y = torch._scaled_mm(
                x.detach().to(torch.float8_e4m3fn), weight, one, one, out_dtype=torch.bfloat16
            )
            x = x * y.sin()
        return x

    x = torch.randn(16, 16, requires_grad=True)
    with Recorder() as recorder:
        checkpoint(
            compute, x, use_reentrant=False, context_fn=_save_costly_results
        ).sum().backward()
    assert recorder.calls["_scaled_mm"] == 4 + 2


@pytest.mark.slow
@pytest.mark.parametrize("is_fixed", [True, False])
def test_compiled_code_is_the_same_when_it_is_computed_again(is_fixed):
    """As in FlexAttention, which is compiled also in models that are not: the second size compiles
    code for any size, which fits the first size too (pytorch issue 166926)."""
    used: list[int] = []

    def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
        backend.count += 1
        own = backend.count

        def run(*inputs: Any) -> Any:
            used.append(own)
            return graph(*inputs)

        return run

    backend.count = 0
    torch._dynamo.reset()
    attend = torch.compile(lambda x: x.sin() * x, backend=backend)
    x, y = (torch.randn(4, size, requires_grad=True) for size in (8, 16))
    torch._C._dynamo.eval_frame._set_lru_cache(True)
    if is_fixed:
        make_model(MODES["full"])
    outputs = [checkpoint(attend, value, use_reentrant=False) for value in (x, y)]
    assert used == [1, 2]
    outputs[1].sum().backward()
    outputs[0].sum().backward()
    assert used == [1, 2, 2, 1 if is_fixed else 2]


@pytest.mark.slow
def test_compiled_attention_is_kept():
    """FlexAttention in a model that is not compiled is one operation for the policy, and its result
    is kept."""
    from torch.nn.attention.flex_attention import flex_attention

    apply_activation_checkpointing(CONFIG.build(), MODES["op"])
    torch._dynamo.reset()
    attend = torch.compile(flex_attention)
    calls: list[Any] = []
    keys = torch.randn(1, 2, 32, 16)

    class Calls(TorchDispatchMode):
        supports_higher_order_operators = True

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            return True  # otherwise, nothing is compiled

        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            calls.append(function)
            return function(*args, **(kwargs or {}))

    def compute(x: Tensor) -> Tensor:
        with torch.no_grad():  # on a CPU, FlexAttention has no gradient
            attended = attend(x.detach(), keys, keys)
        return x * attended

    x = torch.randn(1, 2, 32, 16, requires_grad=True)
    contexts = _save_costly_results()
    with Calls():
        output = checkpoint(compute, x, use_reentrant=False, context_fn=lambda: contexts)
    forward = len(calls)
    with Calls():
        output.sum().backward()
    compiled = [
        index
        for index, call in enumerate(calls)
        if call is torch.ops.higher_order.inductor_compiled_code
    ]
    assert len(compiled) == 1 and compiled[0] < forward


def make_model(config: ActivationCheckpointConfig = NONE) -> Llama3Model:
    """Build a model with fixed weights."""
    model = CONFIG.build()
    apply_activation_checkpointing(model, config)
    initialize_weights(model, 0)
    return model


def compute_loss(model: nn.Module, attention: AttentionMetadata | None = None) -> Tensor:
    tokens = torch.randint(
        0, CONFIG.vocab_size, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0)
    )
    return model(tokens, attention, head=CrossEntropyLoss.Config().build(), labels_BL=tokens)


def packed() -> AttentionMetadata:
    return AttentionMetadata.from_positions(
        torch.cat([torch.arange(9), torch.arange(LENGTH - 9)]).expand(BATCH, -1)
    )


def packed_with_window() -> AttentionMetadata:
    return replace(packed(), window=4)


class Recorder(TorchDispatchMode):
    """Count the operators that run, and the memory of their results that is still allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.calls[function.overloadpacket.__name__] += 1
        outputs = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return outputs

    def allocated_bytes(self) -> int:
        return sum(size for storage, size in self.storages.values() if not storage.expired())


# --- numerics
# --------------------------------------------------------------------------------------------------

INPUTS: dict[str, tuple[Callable[[], AttentionMetadata | None], bool, torch.dtype]] = {
    "one document": (lambda: None, False, torch.float32),
    "packed, lengths": (packed, False, torch.float32),
    "packed, dense mask": (packed, True, torch.float32),
    "packed, window": (packed_with_window, False, torch.float32),
    "bfloat16": (lambda: None, False, torch.bfloat16),
}


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("mode", MODES)
def test_loss_and_gradients_are_bitwise_equal(mode, inputs):
    """The same kernels compute the same results, only twice."""
    attention, compiled, dtype = INPUTS[inputs]
    results = []
    for config in (NONE, MODES[mode]):
        model = make_model(config)
        model.is_compiled = compiled
        with MixedPrecision(dtype).of(model):
            loss = compute_loss(model, attention())
            loss.backward()
        results.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    for expected, value in zip(*results, strict=True):
        assert torch.equal(value, expected)
    assert results[0][1].any()


# --- memory
# --------------------------------------------------------------------------------------------------


def measure(
    config: ActivationCheckpointConfig, attention: AttentionMetadata | None = None
) -> tuple[int, Counter[str]]:
    """Return the bytes allocated between forward and backward, and the operators of the backward
    pass."""
    model = make_model(config)
    with Recorder() as forward:
        loss = compute_loss(model, attention)
        held = forward.allocated_bytes()
    with Recorder() as backward:
        loss.backward()
    return held, backward.calls


def test_memory_and_recomputed_operators_by_mode():
    measured = [
        measure(config) for config in (NONE, MODES["every second"], MODES["op"], MODES["full"])
    ]
    none, every_second, op, full = (held for held, _ in measured)
    calls = [count for _, count in measured]
    assert full < op < none and full < every_second < none
    # half of the layers are checkpointed
    assert every_second == pytest.approx((full + none) / 2, rel=0.01)
    # Nothing in a layer needs the result of its seventh, last product, so PyTorch does not
    # recompute it.
    layers = CONFIG.n_layers
    assert [count["mm"] for count in calls] == [14 * layers, 17 * layers, 17 * layers, 20 * layers]
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert [count[attention] for count in calls] == [0, layers / 2, 0, layers]


def test_selective_op_saves_attention_and_every_second_product():
    (full, _), (op, _) = measure(MODES["full"]), measure(MODES["op"])
    # the result and the logarithm of each softmax denominator
    attention = CONFIG.dim + CONFIG.n_heads
    products = CONFIG.dim // 2 + CONFIG.dim + CONFIG.ffn_dim  # of wk, wo and w3
    per_layer = 4 * BATCH * LENGTH * (attention + products)
    assert op - full == pytest.approx(CONFIG.n_layers * per_layer, rel=0.02)


def test_selective_op_saves_attention_of_every_document():
    _, calls = measure(MODES["op"], packed())
    assert calls["_scaled_dot_product_flash_attention_for_cpu"] == 0
    assert (
        calls["_scaled_dot_product_flash_attention_for_cpu_backward"] == 2 * BATCH * CONFIG.n_layers
    )


@pytest.mark.slow
def test_selective_op_saves_a_compiled_function_in_an_eager_block():
    """An example is FlexAttention on CUDA. It has no backward pass on a CPU, so a custom operator
    replaces it here."""
    calls = []

    @torch.library.custom_op("torchtitan_tests::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        calls.append("forward")
        return x * 2

    twice.register_fake(torch.empty_like)
    twice.register_autograd(lambda context, grad: grad * 2)
    compiled = torch.compile(lambda x: twice(x.sin()).cos())

    class Block(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return compiled(x).exp()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleDict({"0": Block()})

        def blocks(self) -> dict[str, nn.Module]:
            return {"layers.0": self.layers["0"]}

    model = Model()
    apply_activation_checkpointing(model, MODES["op"])
    x = torch.ones(3, requires_grad=True)
    model.layers["0"](x).sum().backward()
    assert calls == ["forward"]
    expected = torch.ones(3, requires_grad=True)
    (expected.sin() * 2).cos().exp().sum().backward()
    torch.testing.assert_close(x.grad, expected.grad)


# --- layers and names
# -------------------------------------------------------------------------------------------------


def wrapped_layers(model: nn.Module) -> list[str]:
    return [
        name for name, block in model.layers.items() if hasattr(block, "_checkpoint_wrapped_module")
    ]


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("op", ["0", "1", "2", "3"]),
        ("1", ["0", "1", "2", "3"]),
        ("2", ["0", "2"]),
        ("3", ["0", "3"]),
        ("9", ["0"]),
    ],
)
def test_selective_option_chooses_layers(option, expected):
    model = make_model(ActivationCheckpointConfig(mode="selective", selective_option=option))
    assert wrapped_layers(model) == expected


def test_a_pipeline_stage_chooses_the_same_layers_as_the_whole_model():
    stage = CONFIG.build()
    for name in ("0", "1"):
        del stage.layers[name]
    apply_activation_checkpointing(
        stage, ActivationCheckpointConfig(mode="selective", selective_option="3")
    )
    assert wrapped_layers(stage) == ["3"]


def test_names_and_initial_weights_are_unchanged():
    """Initial weights, checkpoints, and parameter groups of the optimizer depend on names."""
    plain, wrapped = make_model(), make_model(MODES["full"])
    assert (
        list(plain.state_dict())
        == list(wrapped.state_dict())
        == list(ModelState([wrapped]).state_dict())
    )
    assert [canonical_name(name) for name, _ in wrapped.named_parameters()] == list(
        plain.state_dict()
    )
    wrapped.load_state_dict(plain.state_dict())
    for expected, weight in zip(plain.parameters(), wrapped.parameters(), strict=True):
        assert torch.equal(weight, expected)


# --- configuration
# --------------------------------------------------------------------------------------------------


check = partial(check_activation_checkpoint, has_experts=False)


@pytest.mark.parametrize(
    "option", [{"mode": "full"}, {"mode": "selective", "selective_option": "2"}]
)
def test_compiled_tensor_parallelism_keeps_results_by_operation_only(option):
    """PyTorch 2.13 ends the others with an assertion about the mesh."""
    compile, parallelism = CompileConfig(enable=True), ParallelismConfig(tensor_parallel_degree=2)
    with pytest.raises(
        UserError,
        match=r"--activation_checkpoint\.mode .* cannot be combined with both .*_degree 2;",
    ):
        check(ActivationCheckpointConfig(**option), compile, parallelism)
    for allowed in (parallelism, ParallelismConfig()):
        check(ActivationCheckpointConfig(mode="selective"), compile, allowed)
        check(ActivationCheckpointConfig(**option), CompileConfig(), allowed)
    check(ActivationCheckpointConfig(**option), compile, ParallelismConfig())


@pytest.mark.parametrize(
    "compile", [CompileConfig(), CompileConfig(enable=True, components=["loss"])]
)
def test_a_memory_budget_without_the_compiler_is_rejected(compile):
    config = ActivationCheckpointConfig(mode="memory_budget")
    with pytest.raises(
        UserError,
        match=r"--activation_checkpoint\.mode memory_budget is a compiler .*set --compile\.enable "
        r"with `model` in",
    ):
        check(config, compile, ParallelismConfig())
    check(config, CompileConfig(enable=True), ParallelismConfig())
    check(MODES["full"], compile, ParallelismConfig())


@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_selective_op_with_a_split_backward_pass_is_rejected(schedule):
    """PyTorch would raise "Trying to backward an extra time". The compiled case works (see the
    equivalence matrix)."""
    parallelism = ParallelismConfig(pipeline_parallel_degree=2, pipeline_parallel_schedule=schedule)
    op = ActivationCheckpointConfig(mode="selective")
    with pytest.raises(UserError, match=f"selective.*{schedule}.*splits the backward pass"):
        check(op, CompileConfig(), parallelism)
    check(op, CompileConfig(enable=True), parallelism)
    # experts are not compiled
    with pytest.raises(UserError, match=r"selective_option 2, mode full$"):
        check_activation_checkpoint(op, CompileConfig(enable=True), parallelism, has_experts=True)
    check(op, CompileConfig(), ParallelismConfig(pipeline_parallel_degree=2))
    check(ActivationCheckpointConfig(mode="full"), CompileConfig(), parallelism)


@pytest.fixture
def functorch_config() -> Iterator[Any]:
    import torch._functorch.config

    with torch._functorch.config.patch(activation_memory_budget=1.0):
        yield torch._functorch.config


def test_a_memory_budget_sets_the_compiler_option(functorch_config):
    make_model(ActivationCheckpointConfig(mode="memory_budget", memory_budget=0.25))
    assert functorch_config.activation_memory_budget == 0.25
    make_model()
    assert functorch_config.activation_memory_budget == 1.0


@pytest.mark.slow
def test_a_smaller_memory_budget_saves_memory(functorch_config):
    """The backend decides which tensors to save, but generates no code."""

    def measure_saved(budget: float) -> tuple[int, list[Tensor]]:
        torch._dynamo.reset()
        model = make_model(ActivationCheckpointConfig(mode="memory_budget", memory_budget=budget))
        for block in model.layers.values():
            block.compile(backend="aot_eager_decomp_partition")
        saved = {}

        def pack(tensor: Tensor) -> Tensor:
            saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = compute_loss(model)
        loss.backward()
        return sum(saved.values()), [parameter.grad for parameter in model.parameters()]

    (full, expected), (least, gradients) = measure_saved(1.0), measure_saved(0.0)
    assert least < full
    for gradient, reference in zip(gradients, expected, strict=True):
        # Decomposed operations sum in a different order.
        assert (gradient - reference).norm() <= 1e-5 * reference.norm()


# --- several processes
# ------------------------------------------------------------------------------------------------


def compare_layouts(folder: Path) -> None:
    import torch.distributed as dist

    from torchtitan.config import ParallelismConfig

    def gradients(config: ActivationCheckpointConfig, **degrees: int) -> tuple[list[Tensor], int]:
        """Return the loss, the gradients, and the number of reduce-scatters in the backward
        pass."""
        model = CONFIG.build()
        lay_out(model, ParallelismConfig(**degrees), activation_checkpoint=config)
        initialize_weights(model, 0)
        loss = compute_loss(model, packed())
        with Recorder() as backward:
            loss.backward()
        scatters = backward.calls["reduce_scatter_tensor"]
        full = [parameter.grad.full_tensor() for parameter in model.parameters()]
        return [loss.detach(), *full], scatters

    layouts = {
        "FSDP": {"data_parallel_shard_degree": 2},
        "DDP": {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1},
        "TP": {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 1},
    }
    for name, degrees in layouts.items():
        expected, scatters = gradients(NONE, **degrees)
        assert math.isfinite(expected[0].item())
        for mode in ("full", "op") if name == "TP" else ("full",):
            values, scatters_again = gradients(MODES[mode], **degrees)
            for reference, value in zip(expected, values, strict=True):
                assert torch.equal(value, reference), (name, mode)
            # The reduce-scatter after attention is recomputed. The one after the feed-forward
            # network is not, since nothing needs the output of the layer.
            repeated = CONFIG.n_layers if (name, mode) == ("TP", "full") else 0
            assert scatters_again - scatters == repeated, (name, mode)
    (folder / f"rank {dist.get_rank()} has compared").touch()


@pytest.mark.slow
def test_two_processes_are_bitwise_equal(tmp_path):
    """Under FSDP, DDP, and tensor parallelism."""
    run_processes(compare_layouts, 2, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
