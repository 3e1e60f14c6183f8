"""Activation checkpointing: recompute forward results in the backward pass instead of keeping
them."""

import functools
from contextlib import AbstractContextManager

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

from torchtitan.config import ActivationCheckpointConfig, CompileConfig, ParallelismConfig
from torchtitan.protocols.model import BaseModel
from torchtitan.tools.errors import UserError
from torchtitan.tools.torch_private import (
    attention_operations,
    checkpoint_wrapper,
    choose_compiled_code_by_age,
    communication_operations,
    functorch_config,
    product_operations,
)


def check_activation_checkpoint(
    config: ActivationCheckpointConfig,
    compile: CompileConfig,
    parallelism: ParallelismConfig,
    *,
    has_experts: bool,
) -> None:
    """Raise `UserError` for a memory budget without a compiler, or an option that a pipeline or
    compiled tensor parallelism does not support. Compiled blocks exclude routed experts."""
    is_compiled = compile.compiles_model
    is_by_operation = config.mode in ("selective", "auto") and config.selective_option == "op"
    if is_by_operation and parallelism.splits_backward and (has_experts or not is_compiled):
        # The first part of the backward pass frees saved results that the second part needs.
        alternative = "" if has_experts else ", or --compile.enable"
        raise UserError(
            f"--activation_checkpoint.mode {config.mode} with selective_option op cannot be "
            "combined with --parallelism.pipeline_parallel_schedule "
            f"{parallelism.pipeline_parallel_schedule}, which splits the backward pass; set "
            f"--activation_checkpoint.selective_option 2, mode full{alternative}"
        )
    is_split = is_compiled and parallelism.tensor_parallel_degree > 1
    if is_split and not is_by_operation and config.mode not in ("none", "auto"):
        # PyTorch 2.13 mistakes the mesh for one of the tensors to keep.
        option = (
            f" with selective_option {config.selective_option}"
            if config.mode == "selective"
            else ""
        )
        raise UserError(
            f"--activation_checkpoint.mode {config.mode}{option} cannot be combined with both "
            "--compile.enable and --parallelism.tensor_parallel_degree "
            f"{parallelism.tensor_parallel_degree}; set mode none, mode selective with "
            "selective_option op, or --compile.no_enable"
        )
    if config.mode == "memory_budget" and not is_compiled:
        raise UserError(
            "--activation_checkpoint.mode memory_budget is a compiler setting; set "
            "--compile.enable with `model` in --compile.components"
        )


def apply_activation_checkpointing(model: BaseModel, config: ActivationCheckpointConfig) -> None:
    """Apply checkpointing to the blocks of a model, in place, before compilation and data
    parallelism. Attributes and `state_dict` names stay the same; `canonical_name` restores other
    names. Here `auto`, for which the commands choose a mode, means `selective`."""
    # This setting is global, and an earlier model may have changed it; 1 is PyTorch's default.
    functorch_config.activation_memory_budget = (
        config.memory_budget if config.mode == "memory_budget" else 1.0
    )
    if config.mode in ("full", "selective", "auto"):
        # Otherwise, after a later layer, micro-batch or pipeline stage has compiled FlexAttention
        # for any size, the recomputation of an earlier one chooses this code, and saves other
        # tensors (pytorch issue 166926).
        choose_compiled_code_by_age()
    if config.mode == "full":
        _wrap_blocks(model)
    elif config.mode in ("selective", "auto") and config.selective_option == "op":
        from torchtitan.tools.torch_private import inductor_config

        # By default, PyTorch hides compiled code such as FlexAttention from the policy, and
        # recomputes it.
        inductor_config.wrap_inductor_compiled_regions = True
        _wrap_blocks(model, context_fn=_save_costly_results)
    elif config.mode in ("selective", "auto"):
        _wrap_blocks(model, every=int(config.selective_option))


def _wrap_blocks(model: BaseModel, *, every: int = 1, **checkpoint_options: object) -> None:
    for name, block in model.blocks().items():
        # Numbered over the whole model, so that pipeline stages choose the same layers.
        if int(name.rpartition(".")[2]) % every == 0:
            model.set_submodule(name, checkpoint_wrapper(block, **checkpoint_options))


@functools.cache
def _always_saved() -> frozenset[object]:
    """Return the operations that are always saved: attention and reducing collectives, but not
    gathers, whose results are large."""
    compiled: object = torch.ops.higher_order.inductor_compiled_code
    return frozenset({*attention_operations(), *communication_operations(), compiled})


def _save_costly_results() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """Return the contexts of a forward pass and its recomputation, which keep `_always_saved` and
    every second matrix product."""
    linear, products = product_operations(), {False: 0, True: 0}

    def policy(
        context: SelectiveCheckpointContext, op: object, *args: object, **kwargs: object
    ) -> CheckpointPolicy:
        kept = op in _always_saved()
        # PyTorch 2.13 calls this only in the forward pass, 2.11 also in the recomputation, which
        # must decide alike.
        if op in linear:
            products[context.is_recompute] += 1
            kept = products[context.is_recompute] % 2 == 0
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
