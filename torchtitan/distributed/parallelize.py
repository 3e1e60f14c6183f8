"""Apply the parallelisms of a run to a model of any family. Those based on DTensor are imported on
use."""

import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.config import (
    ActivationCheckpointConfig,
    CompileConfig,
    ParallelismConfig,
    TrainingConfig,
)
from torchtitan.distributed.activation_checkpoint import apply_activation_checkpointing
from torchtitan.distributed.compile import apply_compile
from torchtitan.distributed.context_parallel import apply_context_parallel
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.sharding import ShardingPlan
from torchtitan.tools.sharded import is_fsdp_module
from torchtitan.tools.torch_private import fuse_collectives_with_products

# Nothing here changes hidden states in place.
warnings.filterwarnings(
    "ignore", message=r"FSDP2-wrapped module \(.*\) returned a view tensor", category=UserWarning
)


def parallelize_model(
    model: BaseModel,
    *,
    parallel_dims: ParallelDims,
    mesh: DeviceMesh | None,
    sharding: ShardingPlan,
    training: TrainingConfig,
    parallelism: ParallelismConfig | None = None,
    activation_checkpoint: ActivationCheckpointConfig | None = None,
    compile: CompileConfig | None = None,
) -> nn.Module:
    """Apply a run's parallelisms to a model on the meta device, in place: tensor and context
    parallelism, activation checkpointing, compilation, then FSDP, HSDP or DDP.

    Args:
        model: the model, or a pipeline stage of it.
        mesh: from `parallel_dims.build_mesh`; None in a single process.
        sharding: the family's plan for tensor and context parallelism.

    Omitted configurations have their default values.
    """
    parallelism = parallelism or ParallelismConfig()
    activation_checkpoint = activation_checkpoint or ActivationCheckpointConfig()
    compile = compile or CompileConfig()
    expert_mesh = parallel_dims.expert_mesh(mesh)
    if expert_mesh is not None:
        from torchtitan.distributed.expert_parallel import apply_expert_parallel

        # With whole sequences, each of the tensor-parallel ranks sends the same tokens.
        copies = 1 if model.splits_sequences or parallel_dims.etp > 1 else parallel_dims.tp
        apply_expert_parallel(model.stacked_experts(), expert_mesh, parallel_dims.shards * copies)
    if mesh is not None and parallel_dims.tp > 1:
        from torchtitan.distributed.tensor_parallel import apply_tensor_parallel

        loss_on_full_tensors = parallelism.disable_loss_parallel
        apply_tensor_parallel(
            model, mesh["tp"], sharding, disable_loss_parallel=loss_on_full_tensors
        )
    if mesh is not None and parallel_dims.cp > 1:
        apply_context_parallel(model, parallel_dims.context_mesh(mesh), sharding)
    apply_activation_checkpointing(model, activation_checkpoint)
    if compile.compiles_model:
        apply_compile(model, compile, parallelism)
        if mesh is not None and parallelism.enable_async_tensor_parallel:
            fuse_collectives_with_products(mesh["tp"].get_group().group_name)
    if mesh is not None:
        _apply_data_parallel(model, mesh, expert_mesh, parallel_dims, training, parallelism)
    return model


def _apply_data_parallel(
    model: BaseModel,
    mesh: DeviceMesh,
    expert_mesh: DeviceMesh | None,
    dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
) -> None:
    """Apply FSDP over all ranks with the same weights and different tokens, HSDP with replicas, or
    DDP. On a single rank, FSDP provides mixed precision."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    from torchtitan.tools.torch_private import replicate

    precision = MixedPrecisionPolicy(
        param_dtype=getattr(torch, training.mixed_precision_param),
        reduce_dtype=getattr(torch, training.mixed_precision_reduce),
        # The embedding already returns hidden states of the right type, and RoPE's angles must keep
        # their type.
        cast_forward_inputs=False,
    )
    if dims.shards == 1 and dims.dp_replicate > 1 and expert_mesh is None:
        # DDP through FSDP2: replicated weights, with gradients reduced per unit during the backward
        # pass.
        for unit in [*model.units(), model]:
            replicate(unit, mesh=mesh["dp_replicate"], mp_policy=precision)
    elif (
        dims.shards > 1
        or training.mixed_precision_param != training.dtype
        or expert_mesh is not None
    ):
        fsdp_mesh = mesh["dp_replicate", "fsdp"] if dims.dp_replicate > 1 else mesh["fsdp"]
        options = {"mesh": fsdp_mesh, "mp_policy": precision}
        if training.enable_cpu_offload:  # GPUs copy fastest from pinned memory, which needs a GPU
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
        if expert_mesh is not None:
            from torchtitan.distributed.expert_parallel import expert_placements

            options["shard_placement_fn"] = expert_placements(model, expert_mesh).get
        reshard = parallelism.fsdp_reshard_after_forward
        reshard = (
            "never"
            if reshard == "default" and parallelism.pipeline_parallel_degree > 1
            else reshard
        )
        _apply_fsdp(model, reshard, options)


def set_replica_reduction(model: nn.Module, enabled: bool) -> None:
    """Set whether backward passes of a model under HSDP or DDP add up gradients over replicas;
    otherwise they accumulate on each replica until a backward pass does."""
    if is_fsdp_module(model):
        model.set_requires_all_reduce(enabled)


def free_gathered_weights(model: nn.Module) -> None:
    """Free weights that a forward pass left gathered; call this if no backward pass follows."""
    for module in model.modules():
        if is_fsdp_module(module):
            module.reshard()


def _apply_fsdp(model: BaseModel, reshard: str, options: dict[str, Any]) -> None:
    from torch.distributed.fsdp import fully_shard

    units = model.units()
    for index, unit in enumerate(units):
        # The backward pass begins with the head, which already has its gradients, and the last
        # layer; keep both.
        should_free = reshard == "always" or (reshard == "default" and index < len(units) - 2)
        fully_shard(unit, reshard_after_forward=should_free, **options)
    fully_shard(model, reshard_after_forward=reshard == "always", **options)
