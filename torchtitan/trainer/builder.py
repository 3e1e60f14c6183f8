"""Build single parts of a run from its configuration. The `build_…` methods of `Trainer` call these
functions."""

import dataclasses
import logging
import os
import random
from typing import Any

import numpy
import torch
from torch import Tensor

from torchtitan.config import DebugConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.compile import check_c_compiler, compile_loss
from torchtitan.protocols import BaseModel, ModelSpec
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger
from torchtitan.trainer.config import RunConfig
from torchtitan.trainer.data_progress import DataProgress


def init_random_state(debug: DebugConfig, rank: int) -> None:
    """Seed every generator, differently on each rank; make algorithms deterministic if
    requested."""
    seed = debug.seed + rank
    random.seed(seed)
    numpy.random.seed(seed % 2**32)  # NumPy's range of seeds
    torch.manual_seed(seed)
    if debug.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        set_deterministic(True)


def set_deterministic(mode: bool) -> None:
    """Set whether PyTorch's algorithms are deterministic, if they are not so already: setting it
    imports the compiler, which takes a second."""
    if torch.are_deterministic_algorithms_enabled() != mode:
        torch.use_deterministic_algorithms(mode)


def build_data_progress(
    config: RunConfig, global_batch_size: int, n_samples: int | None
) -> DataProgress:
    """Build the counter that determines the last step, from `training.steps` or `training.epochs`.

    Args:
        global_batch_size: windows in the first step.
        n_samples: samples of all epochs; None for a stream.

    Raises:
        UserError: for early optimizer steps with the epochs of a stream.
    """
    training = config.training
    if (
        training.epochs is not None
        and n_samples is None
        and config.optimizer.early_step_in_backward
    ):
        # The end of a stream is known only after a backward pass, when an early optimizer has
        # already stepped.
        raise UserError(
            "--optimizer.early_step_in_backward cannot be combined with --training.epochs of a "
            "stream, whose end is found too late to skip the step; set --training.steps instead"
        )
    run_length = config.data_progress(global_batch_size, n_samples)
    if training.epochs is not None and n_samples is not None:
        n_steps = run_length.last_step(0)
        logger.log(
            logging.WARNING if n_steps > training.steps else logging.INFO,
            f"--training.epochs {training.epochs} sets the length of the run, {n_steps:,} steps, "
            f"in place of --training.steps {training.steps}; omit --training.epochs to train "
            "by steps",
        )
    return run_length


def build_loss(config: RunConfig) -> Any:
    """Build the training loss, compiled if requested."""
    loss = config.chosen_loss.build()
    if config.compile.enable and "loss" in config.compile.components:
        compile_loss(loss, config.compile)
    return loss


def build_model(config: RunConfig) -> BaseModel:
    """Build the model on the meta device, in the type of the master weights. Raise `UserError` if
    its attention needs a C compiler that this host lacks."""
    model_config, training = config.model_spec.model, config.training
    if training.seq_lens[-1] > model_config.max_seq_len:
        logger.warning(
            f"--training.seq_len {training.seq_lens[-1]} exceeds the model's maximum sequence "
            f"length of {model_config.max_seq_len} tokens: later positions of a document are new "
            "to it; lower seq_len, or scale them (--model.rope.scaling, docs/pretrained.md)"
        )
    with torch.device("meta"):
        model: BaseModel = model_config.build().to(getattr(torch, training.dtype))
    attention = [
        part for part in model.modules() if hasattr(part, "softcap") and hasattr(part, "has_sinks")
    ]
    if any(part.softcap or part.has_sinks for part in attention):
        check_c_compiler("attention with soft caps or sinks is computed by FlexAttention, which")
    is_packed = getattr(config.dataloader, "document_mask", True)
    if attention and is_packed and training.mixed_precision_param == "float32":
        check_c_compiler(
            "attention to packed documents in float32 is computed by FlexAttention, which"
        )
    return model


def with_vocabulary_of(spec: ModelSpec, main: ModelSpec) -> ModelSpec:
    """Return a specification in which a vocabulary size of None is the main model's."""
    vocab_size = spec.model.vocab_size or main.model.vocab_size
    return dataclasses.replace(spec, model=dataclasses.replace(spec.model, vocab_size=vocab_size))


def build_other_model(
    spec: ModelSpec, config: RunConfig, parallel_dims: ParallelDims, *, trained: bool
) -> BaseModel:
    """Build an additional model on the meta device; a frozen one in the type that FSDP computes in.
    Raise `UserError` under pipeline parallelism."""
    if parallel_dims.pp > 1:
        raise UserError(
            "--parallelism.pipeline_parallel_degree above 1 supports a single model, but this run "
            "has several"
        )
    dtype = config.training.dtype if trained else config.training.mixed_precision_param
    with torch.device("meta"):
        model: BaseModel = spec.model.build().to(getattr(torch, dtype))
    if not trained:
        model.requires_grad_(False)
    return model


def stage_input(config: RunConfig, parallel_dims: ParallelDims, stage: BaseModel) -> Tensor:
    """Return an example of the hidden states that a pipeline stage receives, on the meta device."""
    parts = parallel_dims.cp * (parallel_dims.tp if stage.splits_sequences else 1)
    return torch.empty(
        config.parallelism.pipeline_parallel_microbatch_size,
        config.training.seq_len // parts,
        config.model_spec.model.dim,
        dtype=getattr(torch, config.training.mixed_precision_param),
        device="meta",
        requires_grad=True,
    )
