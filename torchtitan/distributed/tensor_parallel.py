"""Tensor, sequence and loss parallelism, as a family's `ShardingPlan` says."""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, get_args

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
from torchtitan.protocols.converter import converter_of
from torchtitan.protocols.sharding import Features, ShardingPlan, TensorSharding, features_of, part_multiple_of
from torchtitan.tools.errors import UserError

_SHARED_FEATURES: Mapping[TensorSharding, Features] = {"columns": "out", "rows": "in"}
"""Of a linear layer, by how tensor parallelism treats it."""

_LAYER_KINDS: Mapping[TensorSharding, type[nn.Module]] = {
    "vocabulary": nn.Embedding,
    **dict.fromkeys(_SHARED_FEATURES, nn.Linear),
}
"""The class of a module, by how tensor parallelism treats it; others may be any module."""


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
    """Works on the parts of a sequence, or on some of the heads, with the same weights on every rank, frozen ones too,
    which torch's own style would train."""

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
        case "heads":
            return _SameWeights(sequence_dim=2, use_local_output=True)
        case "whole sequence":
            return _WholeSequence()
        case "columns":
            return _Columns()
        case "rows":
            return _Rows(output_layouts=Shard(1))


def check_parts(model: nn.Module, plan: ShardingPlan, degree: int) -> None:
    """Find entries of the plan that do not fit the model, which is converted and still whole, and linear layers that
    cannot be split over `degree` ranks: inputs that a parameter holds in pieces, and parts that a layer cannot compute
    with (`with_part_multiple`).

    Raises:
        UserError: for the first such entry, or the first such layer, by name.
    """
    for pattern, sharding in plan.tensor.items():
        parts = list(_parts(model, pattern))
        _check_entry(f"the sharding plan's entry '{pattern}': '{sharding}'", sharding, parts)
        for name, module in parts:
            if module is not None and sharding in _SHARED_FEATURES:
                _check_parts_of(name, module, _SHARED_FEATURES[sharding], degree)


def _check_entry(entry: str, sharding: TensorSharding, parts: list[tuple[str, nn.Module | None]]) -> None:
    if sharding not in get_args(TensorSharding):
        raise UserError(f"{entry} is none of {', '.join(get_args(TensorSharding))}")
    if not parts:
        raise UserError(f"{entry} names no module of the model")
    kind = _LAYER_KINDS.get(sharding, nn.Module)
    for name, module in parts:
        if not isinstance(module, kind | None):
            raise UserError(f"{entry} is for {kind.__name__}, and {name} is {type(module).__name__}")


def _parts(module: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module | None]]:
    """Yield the modules inside `module` that `pattern` names, each with its name; None for a module that is left out:
    an attribute that is None, or the layers of a pipeline stage that has none."""
    head, _, rest = pattern.partition(".")
    found = [(name, child) for name, child in module.named_children() if fnmatchcase(name, head)]
    if not found and (head == "*" or getattr(module, head, module) is None):
        yield head, None
    for name, child in found:
        inner = _parts(child, rest) if rest else [("", child)]
        yield from ((f"{name}.{part}".removesuffix("."), part_module) for part, part_module in inner)


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
        UserError: as `check_parts`, and if a parameter belongs to no module in `plan`, by name.
    """
    check_parts(model, plan, mesh.size())
    for pattern, sharding in plan.tensor.items():
        for _, module in list(_parts(model, pattern)):
            if module is not None:
                parallelize_module(module, mesh, _style(sharding))
    missed = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if missed:
        # Each rank would train its own copy of it, from its own part of the sequence.
        raise UserError(f"the sharding plan does not say what tensor parallelism does with {', '.join(missed)}")
    if disable_loss_parallel:
        model.register_forward_pre_hook(_use_whole_tensors, with_kwargs=True)


def _use_whole_tensors(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {**kwargs, "head": gather_for_head(kwargs.get("head", F.linear))}
