"""torch.compile: compilation of layers and loss, and a monitor of recompilation."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan.config import CompileConfig, ParallelismConfig
from torchtitan.protocols.model import BaseModel
from torchtitan.tools.device import device_type
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger
from torchtitan.tools.torch_private import (
    AsyncCollectiveTensor,
    compiler_statistics,
    functorch_config,
    wait_tensor,
)


def check_compile(config: CompileConfig) -> None:
    """Raise `UserError` if there is nothing to compile, or the backend is unknown or cannot compile
    on this machine."""
    if not config.enable:
        return
    if not config.components:
        raise UserError(
            "--compile.enable with no --compile.components: there is nothing to compile (model, "
            "loss)"
        )
    if config.backend not in torch.compiler.list_backends(exclude_tags=()):
        known = ", ".join(torch.compiler.list_backends())
        raise UserError(
            f"--compile.backend is '{config.backend}', and torch knows {known}; to debug: "
            "aot_eager, eager"
        )
    if config.backend != "inductor":
        return
    if device_type() != "cpu":
        check_c_compiler("--compile.backend inductor")
        return
    from torchtitan.tools.torch_private import InvalidCxxCompiler, get_cpp_compiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise UserError(
            "--compile.backend inductor needs a C++ compiler for a CPU, and found none: install "
            "g++, or set the environment variable CXX to another"
        ) from error


def check_async_tensor_parallel(config: CompileConfig, parallelism: ParallelismConfig) -> None:
    """Raise `UserError` if `enable_async_tensor_parallel` would have no effect."""
    missing = {
        "--parallelism.tensor_parallel_degree above 1": parallelism.tensor_parallel_degree == 1,
        "--compile.enable with `model` in --compile.components": not config.compiles_model,
        "--compile.backend inductor": config.backend != "inductor",
        "GPUs of CUDA": device_type() != "cuda",
    }
    if parallelism.enable_async_tensor_parallel and (
        needed := [name for name, lacks in missing.items() if lacks]
    ):
        raise UserError(f"--parallelism.enable_async_tensor_parallel needs {needed[0]}")


def check_c_compiler(option: str) -> None:
    """Raise `UserError` if the device is a CUDA GPU and Triton, which `option` needs, would find no
    C compiler at the first step: neither the environment variable CC, nor gcc or clang."""
    if device_type() == "cuda" and not (
        os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    ):
        raise UserError(
            f"{option} needs a C compiler, and found none: install gcc, or set the environment "
            "variable CC to another"
        )


def apply_compile(model: BaseModel, config: CompileConfig, parallelism: ParallelismConfig) -> None:
    """Compile each block of a model in place; similar blocks share the code. Call this after
    activation checkpointing and before data parallelism, which communicates around a block."""
    # The first half of a backward pass would reuse the memory of saved tensors that the second half
    # reads.
    functorch_config.donated_buffer = not parallelism.splits_backward
    model.is_compiled = True  # type: ignore[assignment]
    if embedding := getattr(model, "tok_embeddings", None):
        embedding.register_forward_hook(_wait_for_communication)
    for block in model.blocks().values():
        for module in block.modules():
            if not getattr(module, "is_compiled", True):
                module.forward = torch.compiler.disable(module.forward)
        block.compile(backend=config.backend)


def _wait_for_communication(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    """Wait for the embeddings: in compiled code, PyTorch 2.13 loses the gradient type of an
    asynchronous tensor."""
    return wait_tensor(output) if isinstance(output, AsyncCollectiveTensor) else output


def compile_loss(loss: object, config: CompileConfig) -> None:
    """Compile the loss of a chunk of logits, in place, with the loss's method `compile`, if it has
    one."""
    if not hasattr(loss, "compile"):
        logger.warning("%s is not compiled: it has no `compile` method", type(loss).__qualname__)
        return
    loss.compile(config.backend)


class RecompileMonitor:
    """Report compilation in training: expected in the first step, lost time later (counted in
    `recompiles`)."""

    def __init__(self) -> None:
        self.recompiles = 0
        self._is_first_step = True

    @contextlib.contextmanager
    def watch(self, step: int) -> Iterator[None]:
        """Report compilation within a training step: once in the first, later as a warning with
        PyTorch's reason."""
        before, last_record = _graphs_compiled(), (_records() or [None])[-1]
        yield
        compiled = _graphs_compiled() - before
        if compiled and self._is_first_step:
            logger.info("compiled %d graphs in step %d", compiled, step)
        elif compiled:
            self.recompiles += compiled
            reasons = "; ".join(_reasons_since(last_record)) or "new code"
            logger.warning(
                "step %d was slow: it recompiled %d graphs (%s)", step, compiled, reasons
            )
        self._is_first_step = False


def _graphs_compiled() -> int:
    statistics = compiler_statistics()
    return statistics.counters["stats"]["unique_graphs"] if statistics else 0


def _records() -> list[Any]:
    statistics = compiler_statistics()
    return statistics.get_compilation_metrics() if statistics else []


def _reasons_since(last_record: object) -> list[str]:
    """Return why functions were recompiled since `last_record`, latest first. PyTorch keeps 64
    records."""
    reasons = []
    for record in reversed(_records()):
        if record is last_record:
            break
        if record.recompile_reason:
            reasons.append(f"{record.co_name}: {record.recompile_reason.strip()}")
    return reasons
