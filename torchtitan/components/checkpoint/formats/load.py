"""Weights from a source into a model, whatever its layout."""

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan.components.checkpoint.formats.source import Slices, TensorSource, some
from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.checkpoint.states import ModelState
from torchtitan.protocols.state_dict_adapter import TensorForm
from torchtitan.tools.errors import UserError
from torchtitan.tools.torch_private import compute_local_shape_and_global_offset

_QUANTIZED = "of a type for quantized weights, where at least 16 bits of floating point are needed"


def load_weights(
    source: TensorSource, model_parts: Sequence[nn.Module], group: dist.ProcessGroup | None = None
) -> None:
    """Copy all tensors of `source` into a model, one at a time, each process reading its own part of each.

    What a converted module has added to the plain one's tensors keeps its values where `source` does not have it.

    Args:
        source: the weights under the model's own names; values are converted to the parameters' dtypes.
        model_parts: one model, or the pipeline stages of this process; materialised, sharded or not.
        group: the processes that hold the model together (a group whose backend has collectives of Python objects);
            None: this one has all of it.

    Raises:
        UserError: on every process, where tensors are missing, surplus, of another shape or of a type for quantized
            ones (it names them), or cannot be read.
    """
    state, ranks = ModelState(model_parts), Ranks(group)
    tensors = state.state_dict()
    assert not any(tensor.is_meta for tensor in tensors.values()), "the model has memory"
    check_fit(source.forms, tensors, ranks, optional=state.added)
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


def check_fit(
    forms: Mapping[str, TensorForm],
    tensors: Mapping[str, Tensor],
    ranks: Ranks | None = None,
    *,
    optional: Collection[str] = (),
) -> None:
    """Find weights that are not those of a model.

    Args:
        forms: the weights, the same on every process.
        tensors: the model's, or those of the part of it that this process holds.
        ranks: the processes that hold the model together, calling this together; None: this one has all of it.
        optional: those of `tensors` that `forms` may lack.

    Raises:
        UserError: on every process, naming what is missing, surplus, of another shape, or quantized.
    """
    misshapen = [
        f"{name} {list(forms[name].shape)} where the model has {list(tensor.shape)}"
        for name, tensor in tensors.items()
        if name in forms and forms[name].shape != tensor.shape
    ]
    needed = [name for name in tensors if name not in optional]
    of_ranks = (ranks or Ranks()).gather((list(tensors), needed, misshapen, quantized(forms, tensors)))
    wanted, required, differing, of_type = (
        list(dict.fromkeys(name for names in column for name in names)) for column in zip(*of_ranks, strict=True)
    )
    faults = {
        "missing": sorted(set(required) - forms.keys()),
        "not in the model": sorted(forms.keys() - set(wanted)),
        "of another shape": differing,
        _QUANTIZED: of_type,
    }
    found = [f"{some(names)} {fault}" for fault, names in faults.items() if names]
    if found:
        raise UserError(f"the weights do not fit the model: {'; '.join(found)}")


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
