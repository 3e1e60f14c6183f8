"""torch.compile: what is compiled, with which settings, and whether it stays compiled."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan.config import CompileConfig, ParallelismConfig
from torchtitan.tools.device import device_type
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger
from torchtitan.tools.torch_private import AsyncCollectiveTensor, compiler_statistics, functorch_config, wait_tensor


def check_compile(config: CompileConfig) -> None:
    """Raise `UserError` where there is nothing to compile, and for a backend that torch does not know, or that cannot
    compile on this machine."""
    if not config.enable:
        return
    if not config.components:
        raise UserError("--compile.enable with no --compile.components: there is nothing to compile (model, loss)")
    if config.backend not in torch.compiler.list_backends(exclude_tags=()):
        known = ", ".join(torch.compiler.list_backends())
        raise UserError(f"--compile.backend is '{config.backend}', and torch knows {known}; to debug: aot_eager, eager")
    if config.backend != "inductor" or device_type() != "cpu":
        return
    from torchtitan.tools.torch_private import InvalidCxxCompiler, get_cpp_compiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise UserError(
            "--compile.backend inductor needs a C++ compiler for a CPU, and found none: install g++, or set the "
            "environment variable CXX to another"
        ) from error


def apply_compile(model: nn.Module, config: CompileConfig, parallelism: ParallelismConfig) -> None:
    """Compile the blocks in `model.layers`, each by itself and in place; blocks that are alike share the result.

    After activation checkpointing, and before data parallelism, which communicates around a block. The model has in
    `mask` what makes its attention masks.
    """
    # Memory of saved tensors is given to the first half of a backward pass, and the second would read what it left.
    functorch_config.donated_buffer = not parallelism.splits_backward
    # A list of documents' lengths would be part of the compiled code, which the next batch could not use.
    model.mask.dense = True  # type: ignore[union-attr]
    if model.tok_embeddings is not None:
        model.tok_embeddings.register_forward_hook(_wait_for_communication)  # type: ignore[union-attr]
    for block in model.layers.values():  # type: ignore[operator]
        block.compile(backend=config.backend)


def _wait_for_communication(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """Under tensor parallelism the embeddings are still on their way; torch 2.13 loses the type of such a tensor's
    gradient in compiled code."""
    return wait_tensor(output) if isinstance(output, AsyncCollectiveTensor) else output


def compile_loss(loss: Any, config: CompileConfig) -> None:
    """Compile the loss of a chunk of logits, in place: `loss.from_logits` as the class of `loss` defines it, be it
    `CrossEntropyLoss` or one that overrides it. A loss of another kind, without that method, stays as it is."""
    if not hasattr(loss, "from_logits"):
        logger.warning("%s is not compiled: it has no method from_logits", type(loss).__qualname__)
        return
    loss.from_logits = torch.compile(loss.from_logits, backend=config.backend)


class RecompileMonitor:
    """Reports what torch compiles while training: in the first step it has to, and later it is lost time.

    Attributes:
        recompiles: graphs compiled in all steps but the first.
    """

    def __init__(self) -> None:
        self.recompiles = 0
        self._is_first_step = True

    @contextlib.contextmanager
    def watch(self, step: int) -> Iterator[None]:
        """Report on what is compiled within, which is all of a training step: once for the first that is watched, and
        as a warning with the reason that torch gives for a later one."""
        before, last_record = _graphs_compiled(), (_records() or [None])[-1]
        yield
        compiled = _graphs_compiled() - before
        if compiled and self._is_first_step:
            logger.info("compiled %d graphs in step %d", compiled, step)
        elif compiled:
            self.recompiles += compiled
            reasons = "; ".join(_reasons_since(last_record)) or "new code"
            logger.warning("step %d was slow: it compiled %d graphs again (%s)", step, compiled, reasons)
        self._is_first_step = False


def _graphs_compiled() -> int:
    statistics = compiler_statistics()
    return statistics.counters["stats"]["unique_graphs"] if statistics else 0


def _records() -> list[Any]:
    statistics = compiler_statistics()
    return statistics.get_compilation_metrics() if statistics else []


def _reasons_since(last_record: Any) -> list[str]:
    """Why functions were compiled again since `last_record`, the latest first; torch keeps 64 records."""
    reasons = []
    for record in reversed(_records()):
        if record is last_record:
            break
        if record.recompile_reason:
            reasons.append(f"{record.co_name}: {record.recompile_reason.strip()}")
    return reasons
