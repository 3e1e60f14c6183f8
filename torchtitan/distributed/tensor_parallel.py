"""Tensor, sequence and loss parallelism, according to a family's `ShardingPlan`."""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, get_args

import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor

from torchtitan.distributed.loss_parallel import gather_for_head
from torchtitan.protocols.converter import converter_of
from torchtitan.protocols.sharding import Features, ShardingPlan, TensorSharding, features_of
from torchtitan.tools.errors import UserError

_SHARED_FEATURES: Mapping[TensorSharding, Features] = {"columns": "out", "rows": "in"}
"""Split dimension of a linear layer."""

_LAYER_KINDS: Mapping[TensorSharding, type[nn.Module]] = {
    "vocabulary": nn.Embedding,
    **dict.fromkeys(_SHARED_FEATURES, nn.Linear),
}
"""Required class of a module; the other shardings accept any module."""


class _Interface(NamedTuple):
    """Placements of a module's first input and output; in hidden states, the sequence is dimension 1."""

    given: Placement
    """Placement of the incoming input."""
    wanted: Placement
    """Placement that the module computes with."""
    returned: Placement | None = None
    """Placement of the output; None: unchanged."""
    returns_local: bool = True
    """True if the output is the rank's local part rather than a DTensor."""


_INTERFACES: Mapping[TensorSharding, _Interface] = {
    "vocabulary": _Interface(Replicate(), Replicate(), returned=Shard(1)),
    "sequence": _Interface(Shard(1), Shard(1), returns_local=False),
    "heads": _Interface(Shard(2), Shard(2)),
    "whole sequence": _Interface(Shard(1), Replicate()),
    "columns": _Interface(Replicate(), Replicate(), returned=Shard(-1)),
    "rows": _Interface(Shard(-1), Shard(-1), returned=Shard(1)),
}


def shard_parameters(module: nn.Module, mesh: DeviceMesh, features: Features | None) -> None:
    """Shard each of `module`'s own parameters along its dimension over `features`, or replicate it. The weights must be
    the same on all ranks, or on the meta device."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        dimensions = features_of(module)[name] if features else ()
        placement = Shard(dimensions.index(features)) if features in dimensions else Replicate()
        shared = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(shared, requires_grad=parameter.requires_grad))


def _parallelize(module: nn.Module, mesh: DeviceMesh, sharding: TensorSharding) -> None:
    """Apply the plan to one module, in place. Torch's `ParallelStyle`s support only a weight and a bias, unlike
    converted layers, and unfreeze a norm's weight."""
    given, wanted, returned, returns_local = _INTERFACES[sharding]
    features: Features | None = "in" if sharding == "vocabulary" else _SHARED_FEATURES.get(sharding)

    def take(_: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
        first, *others = inputs
        if not isinstance(first, DTensor):
            first = DTensor.from_local(first, mesh, [given], run_check=False)
        return (first if given == wanted else first.redistribute(placements=[wanted]), *others)

    def give(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        if returned is not None and output.placements != (returned,):
            output = output.redistribute(placements=[returned], async_op=True)
        return output.to_local() if returns_local else output

    if sharding == "whole sequence":  # its parts have entries of their own
        module.register_forward_pre_hook(lambda module, inputs: take(module, inputs, mesh))
    else:
        distribute_module(module, mesh, lambda _, part, mesh: shard_parameters(part, mesh, features), take, give)


def check_parts(model: nn.Module, plan: ShardingPlan, degree: int) -> None:
    """Raise `UserError` for the first entry of the plan that does not fit a converted, unsharded model, or a layer that
    cannot be split over `degree` ranks: its inputs are stored in pieces, or parts violate its `part_multiple`."""
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
    """Yield name and module for each match of `pattern`, None for an absent module or a stage without layers."""
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
        size, multiple = parameter.shape[dimensions.index(features)], getattr(layer, "part_multiple", 1)
        if multiple > 1 and size % (degree * multiple):
            raise UserError(f"{option} shares out the {size} {ends}, in multiples of {multiple} only; {advice}")
        if features == "in" and size % degree:  # outputs may be split unevenly
            pieces = "one piece" if size == 1 else f"{size} pieces"
            raise UserError(f"{option} shares out the {ends}, which lie in {pieces} in its {own_name}; {advice}")


def apply_tensor_parallel(
    model: nn.Module, mesh: DeviceMesh, plan: ShardingPlan, *, disable_loss_parallel: bool
) -> None:
    """Shard the modules that `plan` names over `mesh`, in place, except those that a pipeline stage lacks.

    The model is on the meta device, or has the same weights on every rank. With `disable_loss_parallel`, its head gets
    whole tensors. Raise `UserError` like `check_parts`, or naming a parameter whose module is not in `plan`.
    """
    check_parts(model, plan, mesh.size())
    for pattern, sharding in plan.tensor.items():
        for _, module in list(_parts(model, pattern)):
            if module is not None:
                _parallelize(module, mesh, sharding)
    missed = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if missed:
        # Each rank would train its own copy of it, from its own part of the sequence.
        raise UserError(f"the sharding plan does not say what tensor parallelism does with {', '.join(missed)}")
    if disable_loss_parallel:
        model.register_forward_pre_hook(_use_full_tensors, with_kwargs=True)


def _use_full_tensors(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {**kwargs, "head": gather_for_head(kwargs.get("head", F.linear))}
