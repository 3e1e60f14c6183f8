"""Applies the parallelisms of a run to a model, once for all families."""

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.parallel_dims import ParallelDims


def parallelize_decoder(
    model: nn.Module,
    *,
    parallel_dims: ParallelDims,
    mesh: DeviceMesh | None,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
) -> nn.Module:
    """Shard or replicate a decoder on the meta device over the data-parallel mesh, in place.

    Args:
        model: has its blocks in `layers`, its embedding in `tok_embeddings` and, unless tied, its head in `output`.
        parallel_dims: the degrees.
        mesh: of the data-parallel dimensions; None leaves the model as it is.
        training: says in which types to compute and to reduce.
        parallelism: says when gathered weights are freed.
    """
    if mesh is None:
        return model
    precision = MixedPrecisionPolicy(
        param_dtype=getattr(torch, training.mixed_precision_param),
        reduce_dtype=getattr(torch, training.mixed_precision_reduce),
        # Hidden states have the right type from the embedding on; RoPE's angles must keep theirs.
        cast_forward_inputs=False,
    )
    if parallel_dims.dp_shard > 1:
        _apply_fsdp(model, mesh, precision, parallelism.fsdp_reshard_after_forward)
    else:
        _apply_ddp(model, mesh, precision)
    return model


def free_gathered_weights(model: nn.Module) -> None:
    """Free what a forward pass gathered and no backward pass will use: of units that keep it until then."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _units(model: nn.Module) -> list[nn.Module]:
    """What communicates together, in the order of the forward pass; the model itself takes the rest.

    A tied embedding is used at both ends of the model, so it stays with the model itself, as do the final norm and the
    head: they are used last, and a loss may read the head's weights outside of its forward.
    """
    embedding = [model.tok_embeddings] if model.output is not None else []
    return [*embedding, *model.layers.values()]  # type: ignore[list-item,operator]


def _apply_fsdp(model: nn.Module, mesh: DeviceMesh, precision: MixedPrecisionPolicy, reshard: str) -> None:
    """FSDP2, or HSDP on a two-dimensional mesh."""
    units = _units(model)
    for unit in units:
        # The backward pass begins with the last layer: freeing its weights only to gather them again is lost time.
        frees = reshard == "always" or (reshard == "default" and unit is not units[-1])
        fully_shard(unit, mesh=mesh, mp_policy=precision, reshard_after_forward=frees)
    fully_shard(model, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard == "always")


def _apply_ddp(model: nn.Module, mesh: DeviceMesh, precision: MixedPrecisionPolicy) -> None:
    """DDP on FSDP2's machinery: whole weights everywhere, gradients reduced per unit while the next is computed."""
    for unit in [*_units(model), model]:
        replicate(unit, mesh=mesh, mp_policy=precision)
