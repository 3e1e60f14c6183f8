"""Loading weights from a tensor source into a model of any layout."""

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.checkpoint.state import ModelState
from torchtitan.distributed.initialize import local_part, local_slices
from torchtitan.protocols.tensor_source import TensorSource, TensorSpec
from torchtitan.tools.errors import UserError, summarize_names
from torchtitan.tools.sharded import is_dtensor

_QUANTIZED = "quantized (at least 16-bit floating point is required)"


def load_weights(
    source: TensorSource, model_parts: Sequence[nn.Module], group: dist.ProcessGroup | None = None
) -> None:
    """Copy all tensors of `source` into a model, one at a time; each process reads only its shards.
    Tensors added by a converted module keep their values if `source` does not have them. Raise
    `UserError` on every process if the weights do not fit (`check_fit`) or cannot be read.

    Args:
        source: weights under the model's names; they are converted to the parameters' dtypes.
        model_parts: a model, or the pipeline stages of this process; materialized, sharded or not.
        group: CPU process group of the model's processes; None: this process has the whole model.
    """
    state, ranks = ModelState(model_parts), Ranks(group)
    copies = state.copies()
    tensors = {name: same[0] for name, same in copies.items()}
    assert not any(tensor.is_meta for tensor in tensors.values()), "the model must be materialized"
    check_fit(source.specs, tensors, ranks, optional=state.added)
    # The source's order keeps related tensors together.
    names = [name for name in source.specs if name in tensors]
    ranks.all_ranks_or_raise(
        lambda: [_load_tensor(copy, name, source) for name in names for copy in copies[name]]
    )


def find_quantized(specs: Mapping[str, TensorSpec], tensors: Mapping[str, Tensor]) -> list[str]:
    """Return names and types of floating-point tensors that `specs` store as integers or with fewer
    than 16 bits, and which are therefore useless without their scales."""
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
    """Check that weights with these `specs` fit the model with these `tensors` (this rank's, if
    `ranks` call this together); `optional` names may be absent. Raise `UserError` on every process,
    naming the tensors that are missing, unexpected, quantized or of the wrong shape."""
    local_mismatches = [
        f"{name} {list(specs[name].shape)} (the model has {list(tensor.shape)})"
        for name, tensor in tensors.items()
        if name in specs and specs[name].shape != tensor.shape
    ]
    local = {
        "expected": list(tensors),
        "required": [name for name in tensors if name not in optional],
        "mismatched": local_mismatches,
        "quantized": find_quantized(specs, tensors),
    }
    gathered = (ranks or Ranks()).gather(local)
    names_of: dict[str, list[str]] = {}
    for key in local:
        names_of[key] = list(dict.fromkeys(name for of_rank in gathered for name in of_rank[key]))
    faults = {
        "missing": sorted(set(names_of["required"]) - specs.keys()),
        "not in the model": sorted(specs.keys() - set(names_of["expected"])),
        "of the wrong shape": names_of["mismatched"],
        _QUANTIZED: names_of["quantized"],
    }
    problems = [f"{summarize_names(names)} {fault}" for fault, names in faults.items() if names]
    if problems:
        raise UserError(f"the weights do not fit the model: {'; '.join(problems)}")


def check_types(specs: Mapping[str, TensorSpec], tensors: Mapping[str, Tensor]) -> None:
    """Raise `UserError` for quantized weights."""
    if names := find_quantized(specs, tensors):
        raise UserError(f"the weights do not fit the model: {summarize_names(names)} {_QUANTIZED}")


@torch.no_grad()
def _load_tensor(tensor: Tensor, name: str, source: TensorSource) -> None:
    part, values = read_part(source, name, tensor)
    part.copy_(values)


def read_part(source: TensorSource, name: str, tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return this process's shard of a model's tensor, and its values in `source`, in CPU
    memory."""
    part = local_part(tensor)
    if part.numel() == 0:
        return part, part.cpu()
    return part, source.read(name, local_slices(tensor) if is_dtensor(tensor) else None)
