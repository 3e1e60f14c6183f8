"""Loading of weights from a source into a model of any layout."""

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.checkpoint.state import ModelState
from torchtitan.protocols.tensor_source import Slices, TensorSource, TensorSpec, summarize_names
from torchtitan.tools.errors import UserError
from torchtitan.tools.torch_private import compute_local_shape_and_global_offset

_QUANTIZED = "of a type for quantized weights, where at least 16 bits of floating point are needed"


def load_weights(
    source: TensorSource, model_parts: Sequence[nn.Module], group: dist.ProcessGroup | None = None
) -> None:
    """Copy all tensors of `source` into a model, one at a time, each process reading its own part of each. Tensors that
    a converted module has added keep their values if `source` lacks them. Raise `UserError` on every process, as
    `check_fit`, or if tensors cannot be read.

    Args:
        source: weights under the model's own names; values are converted to the parameters' dtypes.
        model_parts: one model, or the pipeline stages of this process; materialized, sharded or not.
        group: the processes that hold the model, able to send Python objects; None: this one has all of it.
    """
    state, ranks = ModelState(model_parts), Ranks(group)
    tensors = state.state_dict()
    assert not any(tensor.is_meta for tensor in tensors.values()), "the model has memory"
    check_fit(source.specs, tensors, ranks, optional=state.added)
    # In the source's order, which keeps related tensors together.
    names = [name for name in source.specs if name in tensors]
    ranks.all_ranks_or_raise(lambda: [_fill(tensors[name], name, source) for name in names])


def quantized(specs: Mapping[str, TensorSpec], tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the tensors, with their types, that are floating-point only in the model, or have fewer than 16 bits in
    `specs`: without their scales they are not the weights."""
    return [
        f"{name} ({str(specs[name].dtype).removeprefix('torch.')})"
        for name, tensor in tensors.items()
        if name in specs
        and tensor.is_floating_point()
        and not (specs[name].dtype.is_floating_point and specs[name].dtype.itemsize >= 2)
    ]


def check_fit(
    specs: Mapping[str, TensorSpec],
    tensors: Mapping[str, Tensor],
    ranks: Ranks | None = None,
    *,
    optional: Collection[str] = (),
) -> None:
    """Check that weights with these `specs` fit a model. `tensors` are the model's (with `ranks`, which call this
    together, this rank's part); `optional` ones may be absent. Raise `UserError` on every process, naming missing,
    surplus, misshapen and quantized tensors."""
    misshapen = [
        f"{name} {list(specs[name].shape)} where the model has {list(tensor.shape)}"
        for name, tensor in tensors.items()
        if name in specs and specs[name].shape != tensor.shape
    ]
    needed = [name for name in tensors if name not in optional]
    of_ranks = (ranks or Ranks()).gather((list(tensors), needed, misshapen, quantized(specs, tensors)))
    wanted, required, differing, of_type = (
        list(dict.fromkeys(name for names in column for name in names)) for column in zip(*of_ranks, strict=True)
    )
    faults = {
        "missing": sorted(set(required) - specs.keys()),
        "not in the model": sorted(specs.keys() - set(wanted)),
        "of another shape": differing,
        _QUANTIZED: of_type,
    }
    found = [f"{summarize_names(names)} {fault}" for fault, names in faults.items() if names]
    if found:
        raise UserError(f"the weights do not fit the model: {'; '.join(found)}")


def check_types(specs: Mapping[str, TensorSpec], tensors: Mapping[str, Tensor]) -> None:
    """Raise `UserError` for quantized weights, before a model of their type exists."""
    if found := quantized(specs, tensors):
        raise UserError(f"the weights do not fit the model: {summarize_names(found)} {_QUANTIZED}")


@torch.no_grad()
def _fill(tensor: Tensor, name: str, source: TensorSource) -> None:
    slices: Slices | None = None
    if isinstance(tensor, DTensor):
        slices, tensor = local_slices(tensor), tensor.to_local()
    if tensor.numel():
        tensor.copy_(source.read(name, slices))


def local_slices(tensor: DTensor) -> Slices:
    """Return the part of the whole tensor held by this process."""
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
