"""Weights from a source into a model, whatever its layout."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from torchtitan.components.checkpoint.formats.source import Slices, TensorSource, some
from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.checkpoint.states import ModelState
from torchtitan.protocols.state_dict_adapter import TensorForm
from torchtitan.tools.errors import UserError

_QUANTIZED = "of a type for quantized weights, where at least 16 bits of floating point are needed"


def load_weights(
    source: TensorSource, model_parts: Sequence[nn.Module], group: dist.ProcessGroup | None = None
) -> None:
    """Copy all tensors of `source` into a model, one at a time, each process reading its own part of each.

    Args:
        source: the weights under the model's own names; values are converted to the parameters' dtypes.
        model_parts: one model, or the pipeline stages of this process; materialised, sharded or not.
        group: the processes that hold the model together (a group whose backend has collectives of Python objects);
            None: this one has all of it.

    Raises:
        UserError: on every process, where tensors are missing, surplus, of another shape or of a type for quantized
            ones (it names them), or cannot be read.
    """
    tensors = ModelState(model_parts).state_dict()
    assert not any(tensor.is_meta for tensor in tensors.values()), "the model has memory"
    ranks = Ranks(group)
    _check(source, tensors, ranks)
    # In the source's order: it makes tensors that belong together one after the other.
    names = [name for name in source.forms if name in tensors]
    ranks.together(lambda: [_fill(tensors[name], name, source) for name in names])


def quantized(forms: Mapping[str, TensorForm], tensors: Mapping[str, Tensor]) -> list[str]:
    """The tensors, with their types, that are floating-point numbers in the model and in `forms` are not, or are of
    fewer than 16 bits: without the scales they belong to they are not the weights."""
    return [
        f"{name} ({str(forms[name].dtype).removeprefix('torch.')})"
        for name, tensor in tensors.items()
        if name in forms
        and tensor.is_floating_point()
        and not (forms[name].dtype.is_floating_point and forms[name].dtype.itemsize >= 2)
    ]


def check_types(forms: Mapping[str, TensorForm], tensors: Mapping[str, Tensor]) -> None:
    """Find weights that are quantized before there is a model of their type; `tensors` are a model's, without memory.

    Raises:
        UserError: naming them.
    """
    if found := quantized(forms, tensors):
        raise UserError(f"the weights do not fit the model: {some(found)} {_QUANTIZED}")


@torch.no_grad()
def _fill(tensor: Tensor, name: str, source: TensorSource) -> None:
    slices: Slices | None = None
    if isinstance(tensor, DTensor):
        slices, tensor = local_slices(tensor), tensor.to_local()
    if tensor.numel():
        tensor.copy_(source.read(name, slices))


def local_slices(tensor: DTensor) -> Slices:
    """The part of the whole tensor that this process has."""
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def _check(source: TensorSource, tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
    misshapen = [
        f"{name} {list(source.forms[name].shape)} where the model has {list(tensor.shape)}"
        for name, tensor in tensors.items()
        if name in source.forms and source.forms[name].shape != tensor.shape
    ]
    of_ranks = ranks.gather((list(tensors), misshapen, quantized(source.forms, tensors)))
    wanted = {name for names, _, _ in of_ranks for name in names}
    faults = {
        "missing": sorted(wanted - source.forms.keys()),
        "not in the model": sorted(source.forms.keys() - wanted),
        "of another shape": list(dict.fromkeys(fault for _, faults, _ in of_ranks for fault in faults)),
        _QUANTIZED: list(dict.fromkeys(fault for _, _, faults in of_ranks for fault in faults)),
    }
    found = [f"{some(names)} {fault}" for fault, names in faults.items() if names]
    if found:
        raise UserError(f"the weights do not fit the model: {'; '.join(found)}")
