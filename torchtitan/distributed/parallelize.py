"""Applies the parallelisms of a run to a model, once for all families."""

import warnings

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from torchtitan.config import ActivationCheckpointConfig, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import apply_activation_checkpointing
from torchtitan.distributed.compile import apply_compile
from torchtitan.distributed.context_parallel import apply_context_parallel
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.distributed.tensor_parallel import apply_tensor_parallel
from torchtitan.protocols.sharding import ShardingPlan
from torchtitan.tools.torch_private import replicate

# Nothing here changes hidden states in place.
warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(.*\) returned a view tensor", category=UserWarning)


def parallelize_decoder(
    model: nn.Module,
    *,
    parallel_dims: ParallelDims,
    mesh: DeviceMesh | None,
    sharding: ShardingPlan,
    training: TrainingConfig,
    parallelism: ParallelismConfig | None = None,
    activation_checkpoint: ActivationCheckpointConfig | None = None,
    compile: CompileConfig | None = None,
) -> nn.Module:
    """Apply all that a run asks for to a decoder on the meta device, in place: tensor and context parallelism,
    activation checkpointing, compilation, and FSDP, HSDP or DDP around it.

    Args:
        model: has its blocks in `layers`, its embedding in `tok_embeddings` and, unless tied, its head in `output`; a
            pipeline stage lacks some of them.
        parallel_dims: the degrees.
        mesh: what `parallel_dims.build_mesh` made; None in a single process.
        sharding: the family's plan for tensor and context parallelism.
        training: says in which types to compute and to reduce, and whether weights stay in CPU memory.
        parallelism: says when gathered weights are freed, and how the loss is computed.
        activation_checkpoint: what is kept for the backward pass.
        compile: what is compiled.

    What is not given has its default values.
    """
    parallelism = parallelism or ParallelismConfig()
    activation_checkpoint = activation_checkpoint or ActivationCheckpointConfig()
    compile = compile or CompileConfig()
    if mesh is not None and parallel_dims.tp > 1:
        loss_on_whole_tensors = parallelism.disable_loss_parallel
        apply_tensor_parallel(model, mesh["tp"], sharding, disable_loss_parallel=loss_on_whole_tensors)
    if mesh is not None and parallel_dims.cp > 1:
        apply_context_parallel(model, parallel_dims.context_mesh(mesh), sharding, parallel_dims.sequence_shards)
    apply_activation_checkpointing(model, activation_checkpoint)
    if compile.enable and "model" in compile.components:
        apply_compile(model, compile, parallelism)
    if mesh is not None:
        _apply_data_parallel(model, mesh, parallel_dims, training, parallelism)
    return model


def _apply_data_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
) -> None:
    """FSDP over all ranks with the same weights and other tokens, in one dimension or, with replicas, in two; DDP.

    Where there is only one such rank, FSDP is still what computes in lower precision than that of the master weights.
    """
    precision = MixedPrecisionPolicy(
        param_dtype=getattr(torch, training.mixed_precision_param),
        reduce_dtype=getattr(torch, training.mixed_precision_reduce),
        # Hidden states have the right type from the embedding on; RoPE's angles must keep theirs.
        cast_forward_inputs=False,
    )
    shards = dims.dp_shard * dims.cp
    if shards == 1 and dims.dp_replicate > 1:
        _apply_ddp(model, mesh["dp_replicate"], precision)
    elif shards > 1 or training.mixed_precision_param != training.dtype:
        over = mesh["dp_replicate", "fsdp"] if dims.dp_replicate > 1 else mesh["fsdp"]
        _apply_fsdp(model, over, precision, _reshard(parallelism), _offload_policy(training, mesh))


def free_gathered_weights(model: nn.Module) -> None:
    """Free what a forward pass gathered and no backward pass will use: of units that keep it until then."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _reshard(parallelism: ParallelismConfig) -> str:
    chosen = parallelism.fsdp_reshard_after_forward
    return "never" if chosen == "default" and parallelism.pipeline_parallel_degree > 1 else chosen


def _offload_policy(training: TrainingConfig, mesh: DeviceMesh) -> OffloadPolicy:
    if not training.enable_cpu_offload:
        return OffloadPolicy()
    # Pinned memory is what a GPU copies from fastest; without a GPU there is none.
    return CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")


def _units(model: nn.Module) -> list[nn.Module]:
    """What communicates together, in the order of the forward pass; the model itself takes the rest.

    A tied embedding is used at both ends of the model, so it stays with the model itself, as do the final norm and the
    head: they are used last, and a loss may read the head's weights outside of its forward.
    """
    config = model.config
    separate = model.tok_embeddings is not None and not config.tie_embeddings  # type: ignore[union-attr]
    embedding = [model.tok_embeddings] if separate else []
    return [*embedding, *model.layers.values()]  # type: ignore[list-item,operator]


def _apply_fsdp(
    model: nn.Module, mesh: DeviceMesh, precision: MixedPrecisionPolicy, reshard: str, offload: OffloadPolicy
) -> None:
    """FSDP2, or HSDP on a two-dimensional mesh."""
    units = _units(model)
    for unit in units:
        # The backward pass begins with the last layer: freeing its weights only to gather them again is lost time.
        frees = reshard == "always" or (reshard == "default" and unit is not units[-1])
        fully_shard(unit, mesh=mesh, mp_policy=precision, reshard_after_forward=frees, offload_policy=offload)
    frees = reshard == "always"
    fully_shard(model, mesh=mesh, mp_policy=precision, reshard_after_forward=frees, offload_policy=offload)


def _apply_ddp(model: nn.Module, mesh: DeviceMesh, precision: MixedPrecisionPolicy) -> None:
    """DDP on FSDP2's machinery: whole weights everywhere, gradients reduced per unit while the next is computed."""
    for unit in [*_units(model), model]:
        replicate(unit, mesh=mesh, mp_policy=precision)
