"""Tensor, sequence and loss parallelism, according to a family's `ShardingPlan`."""

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple, TypedDict

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)

from torchtitan.distributed.context_parallel import share_rows
from torchtitan.distributed.whole_tensors import whole
from torchtitan.protocols.attention import Documents
from torchtitan.protocols.converter import converter_of
from torchtitan.protocols.experts import LoadBalanced, StackedExperts
from torchtitan.protocols.model import AbsentModule
from torchtitan.protocols.output_head import compute_logits
from torchtitan.protocols.recurrence import OwnHeads
from torchtitan.protocols.sharding import Features, ShardingPlan, TensorSharding, features_of
from torchtitan.tools.errors import UserError
from torchtitan.tools.torch_private import (
    all_gather_single_autograd,
    parameter_entries,
    wait_tensor,
)


class _Interface(NamedTuple):
    """Placements of a module's first input and output; in hidden states, the sequence is dimension
    1."""

    input: Placement
    """Placement in which the input arrives."""
    desired_input: Placement
    """Placement that the module computes with."""
    output: Placement | None = None
    """Placement of the output; None: unchanged."""
    use_local_output: bool = True
    """True if the output is the local shard instead of a DTensor."""
    gradients: tuple[list[Placement] | None, list[Placement] | None] = (None, None)
    """Placements of the gradients of a plain input and output; None: the placements of the
    tensors."""
    features: Features | None = None
    """Features over which parameters are split; None: each rank has all."""
    kind: type[nn.Module] = nn.Module
    """Required class of the module."""


class _Divided(TypedDict):
    features: Features
    kind: type[nn.Module]


_COLUMNS: _Divided = {"features": "out", "kind": nn.Linear}
_ROWS: _Divided = {"features": "in", "kind": nn.Linear}
_VOCABULARY: _Divided = {"features": "in", "kind": nn.Embedding}

_INTERFACES: Mapping[TensorSharding, _Interface] = {
    "vocabulary": _Interface(Replicate(), Replicate(), output=Shard(1), **_VOCABULARY),
    "sequence": _Interface(Shard(1), Shard(1)),
    "final norm": _Interface(Shard(1), Shard(1), use_local_output=False),
    "heads": _Interface(Shard(2), Shard(2)),
    "own heads": _Interface(Shard(2), Shard(2), features="out"),
    "own channels": _Interface(Shard(2), Shard(2), features="out"),
    "all heads": _Interface(Shard(-1), Replicate(), output=Shard(-1)),
    "whole sequence": _Interface(Shard(1), Replicate()),
    "columns": _Interface(Replicate(), Replicate(), output=Shard(-1), **_COLUMNS),
    "parts to columns": _Interface(Shard(1), Replicate(), output=Shard(-1), **_COLUMNS),
    "parts to shared": _Interface(
        Shard(1), Replicate(), output=Replicate(), gradients=(None, [Partial()])
    ),
    "columns to shared": _Interface(
        Shard(-1), Replicate(), output=Replicate(), gradients=(None, [Partial()])
    ),
    "whole to shared": _Interface(
        Replicate(), Replicate(), output=Replicate(), gradients=(None, [Partial()])
    ),
    "shared to columns": _Interface(
        Replicate(), Replicate(), output=Shard(-1), gradients=([Partial()], None), **_COLUMNS
    ),
    "rows": _Interface(Shard(-1), Shard(-1), output=Shard(1), **_ROWS),
    "columns to whole": _Interface(Replicate(), Replicate(), output=Replicate(), **_COLUMNS),
    "rows to whole": _Interface(Shard(-1), Shard(-1), output=Replicate(), **_ROWS),
    "whole to rows": _Interface(Replicate(), Shard(-1), output=Replicate(), **_ROWS),
    "vocabulary to whole": _Interface(Replicate(), Replicate(), output=Replicate(), **_VOCABULARY),
    "whole": _Interface(Replicate(), Replicate(), output=Replicate()),
    "local tokens": _Interface(Shard(1), Shard(1)),
    "copy": _Interface(Replicate(), Replicate()),
}


def shard_parameters(module: nn.Module, mesh: DeviceMesh, features: Features | None) -> None:
    """Shard each of `module`'s own parameters along its dimension over `features`, or replicate it.
    The weights must be the same on all ranks, or on the meta device."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        dimensions = features_of(module)[name] if features else ()
        placement = Shard(dimensions.index(features)) if features in dimensions else Replicate()
        sharded = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
        module.register_parameter(
            name, nn.Parameter(sharded, requires_grad=parameter.requires_grad)
        )


def _parallelize(module: nn.Module, mesh: DeviceMesh, sharding: TensorSharding) -> None:
    """Apply the plan to one module, in place. PyTorch's `ParallelStyle`s support only a weight and
    a bias, unlike converted layers, and unfreeze a norm's weight."""
    if sharding == "local tokens":
        return _replicate(module, mesh)
    if sharding == "copy":
        return _copy(module, mesh)
    if isinstance(module, OwnHeads):
        _split_own_heads(module, mesh)
    if sharding == "own channels":
        return None
    interface = _INTERFACES[sharding]

    def prepare_input(_: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
        first, *others = inputs
        if not isinstance(first, DTensor):
            first = DTensor.from_local(
                first, mesh, [interface.input], grad_placements=interface.gradients[0]
            )
        if interface.input != interface.desired_input:
            first = first.redistribute(placements=[interface.desired_input])
        return first, *others

    def prepare_output(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        if interface.output is not None and output.placements != (interface.output,):
            output = output.redistribute(placements=[interface.output], async_op=True)
        return (
            output.to_local(grad_placements=interface.gradients[1])
            if interface.use_local_output
            else output
        )

    def partition(_: str, part: nn.Module, mesh: DeviceMesh) -> None:
        shard_parameters(part, mesh, interface.features)

    if sharding == "whole sequence":  # its submodules have their own entries
        module.register_forward_pre_hook(lambda module, inputs: prepare_input(module, inputs, mesh))
    else:
        distribute_module(module, mesh, partition, prepare_input, prepare_output)


def _replicate(module: nn.Module, mesh: DeviceMesh) -> None:
    """Replicate the parameters of a module and its submodules, which compute with plain tensors.
    Each rank computes its own part of the tokens, and gradients are summed over the ranks."""
    for part in module.modules():
        if any(isinstance(parameter, DTensor) for parameter in part.parameters(recurse=False)):
            continue  # experts, which expert parallelism has divided
        shard_parameters(part, mesh, None)
        compute_with_local_parameters(
            part, lambda _, parameter: parameter.to_local(grad_placements=[Partial()])
        )


def _split_own_heads(module: OwnHeads, mesh: DeviceMesh) -> None:
    """Split a module's own parameters by heads, and compute with plain tensors. If all heads use
    all rows, each rank has all rows, and the gradients are summed over the ranks."""
    shard_parameters(module, mesh, None if module.is_shared else "out")
    gradients = [Partial()] if module.is_shared else None
    compute_with_local_parameters(
        module, lambda _, parameter: parameter.to_local(grad_placements=gradients)
    )
    module.total_of_ranks = partial(_total, mesh=mesh)


def _total(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the sum of x over the ranks, with the gradient of each rank's part."""
    gathered = all_gather_single_autograd(x[None].contiguous(), gather_dim=0, group=mesh)
    return wait_tensor(gathered).sum(dim=0)


def _copy(module: nn.Module, mesh: DeviceMesh) -> None:
    """Replicate a module's own parameters, and compute with plain tensors. Each rank computes the
    same, so each has the whole gradient. Experts that expert parallelism has divided stay so."""
    if isinstance(module, StackedExperts):
        return
    # This module uses the weights of its output layer without calling it.
    owners = [*module.modules()] if isinstance(module, nn.MultiheadAttention) else [module]
    for owner in owners:
        if not any(isinstance(one, DTensor) for one in owner.parameters(recurse=False)):
            shard_parameters(owner, mesh, None)
        compute_with_local_parameters(
            owner, lambda _, one: one.to_local(grad_placements=[Replicate()]), user=module
        )


def compute_with_local_parameters(
    module: nn.Module,
    localize: Callable[[str, DTensor], Tensor],
    *,
    user: nn.Module | None = None,
) -> None:
    """Run a module's forward pass, but not the passes of its submodules, with plain tensors instead
    of DTensors; or that of `user`, which uses the module's parameters."""

    def use_local(*_: object) -> None:
        # Not attributes: a module accepts only a leaf, and gradients must reach the DTensor.
        for name, parameter in parameter_entries(module).items():
            if isinstance(parameter, DTensor):
                parameter_entries(module)[name] = localize(name, parameter)
                replaced[name] = parameter

    def restore(*_: object) -> None:
        parameter_entries(module).update(replaced)
        replaced.clear()

    replaced: dict[str, DTensor] = {}
    user = user or module
    user.register_forward_pre_hook(use_local)
    user.register_forward_hook(restore, always_call=True)


def check_parts(model: nn.Module, plan: ShardingPlan, degree: int) -> None:
    """Raise `UserError` for the first entry of the plan that does not fit a converted, unsharded
    model, or a layer that cannot be split over `degree` ranks: its inputs are stored in pieces, or
    parts violate its `part_multiple`."""
    for pattern, sharding in plan.tensor.items():
        parts = list(_parts(model, pattern))
        _check_entry(f"the sharding plan's entry '{pattern}': '{sharding}'", sharding, parts)
        for name, module in parts:
            features = _INTERFACES[sharding].features
            if features and not isinstance(module, nn.Embedding | None):
                _check_parts_of(name, module, features, degree)


def _check_entry(
    entry: str, sharding: TensorSharding, parts: list[tuple[str, nn.Module | None]]
) -> None:
    if sharding not in _INTERFACES:
        raise UserError(f"{entry} is not one of {', '.join(_INTERFACES)}")
    if not parts:
        raise UserError(f"{entry} names no module of the model")
    kind = _INTERFACES[sharding].kind
    for name, module in parts:
        if not isinstance(module, kind | None):
            raise UserError(
                f"{entry} is for {kind.__name__}, and {name} is {type(module).__name__}"
            )


def _parts(module: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module | None]]:
    """Yield name and module for each match of `pattern`, None for an absent module or a stage
    without layers; of an empty pattern, the module itself."""
    if not pattern:
        yield "", module
        return
    head, _, rest = pattern.partition(".")
    found = [(name, child) for name, child in module.named_children() if fnmatchcase(name, head)]
    if not found and (head == "*" or getattr(module, head, module) is None):
        yield head, None
    for name, child in found:
        if isinstance(child, AbsentModule):
            yield name, None
            continue
        inner = _parts(child, rest) if rest else [("", child)]
        yield from (
            (f"{name}.{part}".removesuffix("."), part_module) for part, part_module in inner
        )


def _check_parts_of(name: str, layer: nn.Module, features: Features, degree: int) -> None:
    option, ends = f"--parallelism.tensor_parallel_degree {degree}", f"{features}puts of {name}"
    converter = converter_of(layer)
    advice = f"exclude the layer (--model_converters.{converter}.exclude), or " if converter else ""
    advice += "choose another degree"
    for own_name, parameter in layer.named_parameters(recurse=False):
        dimensions = features_of(layer)[own_name]
        if features not in dimensions:
            continue
        size = parameter.shape[dimensions.index(features)]
        multiple = getattr(layer, "part_multiple", 1)
        if multiple > 1 and size % (degree * multiple):
            raise UserError(
                f"{option} cannot split the {size} {ends} into multiples of {multiple}; {advice}"
            )
        if features == "in" and size % degree:  # outputs may be split unevenly
            raise UserError(
                f"{option} does not divide the size {size} of its {own_name} ({ends}); {advice}"
            )


def apply_tensor_parallel(
    model: nn.Module, mesh: DeviceMesh, plan: ShardingPlan, *, disable_loss_parallel: bool
) -> None:
    """Shard the modules in `plan` over `mesh`, in place; modules absent from a pipeline stage are
    skipped.

    The model is on the meta device, or has the same weights on every rank. With
    `disable_loss_parallel`, its head gets full tensors. Raise `UserError` like `check_parts`, or
    naming a parameter whose module is not in `plan`.
    """
    check_parts(model, plan, mesh.size())
    if getattr(model, "splits_sequences", True):
        share_rows(model, mesh)
        _give_routers_own_tokens(model, mesh)
    else:
        _count_once(model, mesh)
    for pattern, sharding in plan.tensor.items():
        for _, module in list(_parts(model, pattern)):
            if module is not None:
                _parallelize(module, mesh, sharding)
    trained = (
        (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
    )
    uncovered = [name for name, parameter in trained if not isinstance(parameter, DTensor)]
    if uncovered:
        # Otherwise each rank would train its own copy on its part of the sequence.
        raise UserError(
            f"the sharding plan has no entry for {', '.join(uncovered)}; add it for tensor "
            "parallelism"
        )
    if disable_loss_parallel:
        model.register_forward_pre_hook(_use_full_tensors, with_kwargs=True)


def _give_routers_own_tokens(model: nn.Module, mesh: DeviceMesh) -> None:
    """Pass to each rank's routers the documents of its own tokens, split like the hidden states."""

    def take_own(
        _: nn.Module, inputs: tuple[Tensor, Documents | None]
    ) -> tuple[Tensor, Documents | None]:
        x_BLD, documents = inputs
        if documents is None:
            return inputs
        size = -(-documents.of_token_BL.shape[1] // mesh.size())
        start = size * mesh.get_local_rank()
        return x_BLD, documents.tokens(slice(start, start + size))

    for module in model.modules():
        if isinstance(module, LoadBalanced):
            module.register_forward_pre_hook(take_own)


def _count_once(model: nn.Module, mesh: DeviceMesh) -> None:
    """Let one rank count the tokens that all of them route."""
    for module in model.modules():
        if isinstance(module, LoadBalanced):
            module.is_counting = mesh.get_local_rank() == 0


def _use_full_tensors(
    model: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Wrap the model's head so that every rank gathers DTensors and computes it on full tensors."""
    head = kwargs.get("head", compute_logits)

    def on_full_tensors(hidden_BLD: Tensor, weight_VD: Tensor, **inputs: object) -> Tensor:
        return head(whole(hidden_BLD), whole(weight_VD), **inputs)

    return args, {**kwargs, "head": on_full_tensors}
