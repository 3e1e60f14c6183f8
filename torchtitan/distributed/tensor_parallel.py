"""Tensor, sequence and loss parallelism, as a family's `ShardingPlan` says."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from torchtitan.distributed.loss_parallel import gather_for_head
from torchtitan.protocols.layer_converter import converter_of
from torchtitan.protocols.sharding import Features, ShardingPlan, TensorSharding, features_of, part_multiple_of
from torchtitan.tools.errors import UserError

_SHARED_FEATURES: Mapping[TensorSharding, Features] = {"columns": "out", "rows": "in"}
"""Of a linear layer, by how tensor parallelism treats it."""


class _WholeSequence(PrepareModuleInput):
    """Gathers the first of a module's inputs from the ranks' parts of the sequence; the others are the same anyway."""

    def __init__(self) -> None:
        super().__init__(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))

    def _prepare_input_fn(self, inputs: Any, device_mesh: DeviceMesh) -> Any:
        first, *others = inputs
        return (*super()._prepare_input_fn((first,), device_mesh), *others)


def _share_parameters(module: nn.Module, mesh: DeviceMesh, features: Features, src_data_rank: int | None) -> None:
    """Share out the dimension of each of `module`'s own parameters that runs over `features`; the others are whole.

    Torch's own styles know a weight and a bias only, and a converted layer has others.
    """
    for name, parameter in list(module.named_parameters(recurse=False)):
        dimensions = features_of(module)[name]
        placement: Placement = Shard(dimensions.index(features)) if features in dimensions else Replicate()
        shared = distribute_tensor(parameter, mesh, [placement], src_data_rank=src_data_rank)
        module.register_parameter(name, nn.Parameter(shared, requires_grad=parameter.requires_grad))


class _Columns(ColwiseParallel):
    """A linear layer whose outputs are shared out, with all the parameters that it has."""

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        _share_parameters(module, device_mesh, "out", self.src_data_rank)


class _Rows(RowwiseParallel):
    """A linear layer whose inputs, or an embedding whose tokens, are shared out, with all the parameters it has."""

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        _share_parameters(module, device_mesh, "in", self.src_data_rank)

    _partition_embedding_fn = _partition_linear_fn


class _SameWeights(SequenceParallel):
    """Works on the parts of a sequence with the same weights on every rank, frozen ones too, which torch's own style
    would train."""

    def _replicate_module_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        frozen = [own_name for own_name, parameter in module.named_parameters() if not parameter.requires_grad]
        super()._replicate_module_fn(name, module, device_mesh)
        for own_name in frozen:
            module.get_parameter(own_name).requires_grad_(False)


def _style(sharding: TensorSharding) -> ParallelStyle:
    """Torch's name for it; the sequence is dimension 1."""
    match sharding:
        case "vocabulary":
            return _Rows(input_layouts=Replicate(), output_layouts=Shard(1))
        case "sequence":
            return _SameWeights()
        case "whole sequence":
            return _WholeSequence()
        case "columns":
            return _Columns()
        case "rows":
            return _Rows(output_layouts=Shard(1))


def check_parts(model: nn.Module, plan: ShardingPlan, degree: int) -> None:
    """Find what of the linear layers cannot be shared out to `degree` ranks, on a model that is converted and still
    whole: inputs that a parameter holds in pieces, and parts that a layer cannot compute with (`with_part_multiple`).

    Raises:
        UserError: for the first layer of which that is so, by name.
    """
    for name, module in model.named_modules():
        for pattern, sharding in plan.tensor.items():
            if sharding in _SHARED_FEATURES and fnmatchcase(name, pattern):
                _check_parts_of(name, module, _SHARED_FEATURES[sharding], degree)


def _check_parts_of(name: str, layer: nn.Module, features: Features, degree: int) -> None:
    option, ends = f"--parallelism.tensor_parallel_degree {degree}", f"{features}puts of {name}"
    converter = converter_of(layer)
    advice = f"exclude the layer (--model_converters.{converter}.exclude), or " if converter else ""
    advice += "choose another degree"
    for own_name, parameter in layer.named_parameters(recurse=False):
        dimensions = features_of(layer)[own_name]
        if features not in dimensions:
            continue
        size, multiple = parameter.shape[dimensions.index(features)], part_multiple_of(layer)
        if multiple > 1 and size % (degree * multiple):
            raise UserError(f"{option} shares out the {size} {ends}, in multiples of {multiple} only; {advice}")
        if features == "in" and size % degree:  # outputs may be shared out unevenly
            pieces = "one piece" if size == 1 else f"{size} pieces"
            raise UserError(f"{option} shares out the {ends}, which lie in {pieces} in its {own_name}; {advice}")


def apply_tensor_parallel(
    model: nn.Module, mesh: DeviceMesh, plan: ShardingPlan, *, disable_loss_parallel: bool
) -> None:
    """Shard the modules that `plan` names over `mesh`, in place. Those that a pipeline stage lacks are skipped.

    Args:
        model: on the meta device, or with the same weights on every rank.
        mesh: of the one dimension of tensor parallelism.
        plan: see `ShardingPlan`.
        disable_loss_parallel: hand whole hidden states and output weights to the model's head.

    Raises:
        ValueError: if a parameter belongs to no module in `plan`, by name.
        UserError: as `check_parts`.
    """
    check_parts(model, plan, mesh.size())
    present = {name for name, _ in model.named_modules()}
    for pattern, sharding in plan.tensor.items():
        if "*" in pattern or pattern in present:
            parallelize_module(model, mesh, {pattern: _style(sharding)})
    missed = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if missed:
        # Each rank would train its own copy of it, from its own part of the sequence.
        raise ValueError(f"the sharding plan does not say what tensor parallelism does with {', '.join(missed)}")
    if disable_loss_parallel:
        model.register_forward_pre_hook(_use_whole_tensors, with_kwargs=True)


def _use_whole_tensors(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {**kwargs, "head": gather_for_head(kwargs.get("head", F.linear))}
