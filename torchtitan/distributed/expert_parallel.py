"""Expert parallelism: ranks have different experts, and exchange tokens (GShard, arXiv:2006.16668).

Experts have their own mesh, "efsdp" x "ep": ranks of "ep" divide a layer's experts, and ranks of
"efsdp" shard the weights of the same experts. A token travels to the ranks of its experts, and the
results travel back. Expert tensor parallelism also splits each expert's width over "tp", whose
ranks gather their tokens first.

R rows, one for each token and chosen expert; E experts in all; M rows that a rank receives.
"""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from torchtitan.distributed.tensor_parallel import compute_with_local_parameters
from torchtitan.protocols.converter import converter_of
from torchtitan.protocols.experts import StackedExperts
from torchtitan.tools.errors import UserError
from torchtitan.tools.torch_private import (
    all_gather_single_autograd,
    all_to_all_single_autograd,
    fsdp_mesh_info,
    reduce_scatter_single_autograd,
    wait_tensor,
)


class TokenExchange:
    """An `Exchange` over the ranks of a mesh dimension; each has an equal part of the experts, in
    order. The process waits for the device once, to read the numbers of rows to send and
    receive."""

    is_balanced = False
    """Assume the same number of rows of each expert instead of reading it: a dry run's tensors have
    no values."""

    def __init__(self, mesh: DeviceMesh):
        self.group = mesh.get_group()
        self.degree = mesh.size()

    def __call__(
        self, rows_RD: Tensor, weight_R: Tensor, counts_E: Tensor, compute: Callable[..., Tensor]
    ) -> Tensor:
        # this rank's experts, for each sender
        arriving_E = self._send(counts_E).view(self.degree, -1)
        if self.is_balanced:
            least, more = divmod(len(rows_RD), self.degree)
            sent = received = [least + (rank < more) for rank in range(self.degree)]
        else:
            sent, received = (
                torch.stack((counts_E.view(self.degree, -1), arriving_E)).sum(dim=-1).tolist()
            )
        expert_E = torch.arange(arriving_E.shape[1], device=counts_E.device).repeat(self.degree)
        expert_M = expert_E.repeat_interleave(arriving_E.flatten(), output_size=sum(received))
        rows_MD, weight_M = (self._send(tensor, received, sent) for tensor in (rows_RD, weight_R))
        return self._send(compute(rows_MD, weight_M[:, None], expert_M[:, None]), sent, received)

    def _send(
        self, tensor: Tensor, received: list[int] | None = None, sent: list[int] | None = None
    ) -> Tensor:
        # Wait now, for the same reason as in context parallelism.
        return wait_tensor(
            all_to_all_single_autograd(tensor.contiguous(), received, sent, self.group)
        )


def apply_expert_parallel(
    layers: Iterable[StackedExperts], mesh: DeviceMesh, gradient_degree: int
) -> None:
    """Divide the experts of a model's layers over the dimensions "ep" and, if present, "tp" of
    `mesh`, in place, before tensor parallelism. Their weights are the same on all ranks, or on the
    meta device.

    Gradients are summed over the ranks that send tokens, then averaged over "efsdp" only. A further
    factor makes this an average over `gradient_degree`, the number of ranks that shard the other
    weights.
    """
    factor = mesh["efsdp"].size() / gradient_degree
    has_tensor = "tp" in (mesh.mesh_dim_names or ()) and mesh["tp"].size() > 1
    for experts in layers:
        _shard(experts, mesh["ep", "tp"] if has_tensor else mesh["ep"])
        compute_with_local_parameters(experts, partial(_local, experts, factor))
        if mesh["ep"].size() > 1:
            experts.exchange = TokenExchange(mesh["ep"])
        if has_tensor:
            _gather_tokens(experts, mesh["tp"])


def _shard(experts: StackedExperts, mesh: DeviceMesh) -> None:
    for name, parameter in list(experts.named_parameters(recurse=False)):
        dim = experts.hidden_dims.get(name)
        if dim is not None and mesh.ndim > 1:
            _check_parts(experts, name, parameter.shape[dim], mesh["tp"].size())
        placements: list[Placement] = [Shard(0), Replicate() if dim is None else Shard(dim)]
        sharded = distribute_tensor(parameter, mesh, placements[: mesh.ndim], src_data_rank=None)
        experts.register_parameter(
            name, nn.Parameter(sharded, requires_grad=parameter.requires_grad)
        )


def _check_parts(experts: StackedExperts, name: str, size: int, degree: int) -> None:
    multiple = experts.part_multiple
    if size % degree and experts.get_parameter(name).dtype == torch.uint8:
        raise UserError(
            f"--parallelism.expert_tensor_parallel_degree {degree} does not divide the size {size} "
            f"of the experts' {name}, weights in few bits; choose another degree"
        )
    if multiple > 1 and size % (degree * multiple):
        raise UserError(
            f"--parallelism.expert_tensor_parallel_degree {degree} cannot split the {size} "
            f"features of the experts' {name} into multiples of {multiple}; exclude the experts "
            f"(--model_converters.{converter_of(experts)}.exclude), or choose another degree"
        )


def _local(experts: StackedExperts, factor: float, name: str, parameter: DTensor) -> Tensor:
    """Return a rank's part of a parameter, or its share of one that tensor-parallel ranks add up;
    scale gradients."""
    placements = [Partial() if place.is_replicate() else place for place in parameter.placements]
    local = parameter.to_local(grad_placements=placements)
    if local.requires_grad:
        local.register_hook(lambda gradient: gradient * factor)
    if name in experts.hidden_dims or experts.width_group is None:
        return local
    return local / experts.width_group.size()


def _gather_tokens(experts: StackedExperts, mesh: DeviceMesh) -> None:
    """Gather the tokens of all ranks of `mesh`, which have parts of the width, and sum their
    results."""

    def gather(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(
            wait_tensor(all_gather_single_autograd(x.contiguous(), gather_dim=0, group=mesh))
            for x in args
        )

    def add_up(_: nn.Module, args: object, out_ND: Tensor) -> Tensor:
        return wait_tensor(
            reduce_scatter_single_autograd(out_ND.contiguous(), "sum", scatter_dim=0, group=mesh)
        )

    experts.width_group = mesh.get_group()
    experts.register_forward_pre_hook(gather)
    experts.register_forward_hook(add_up)


def expert_placements(model: nn.Module, mesh: DeviceMesh) -> dict[nn.Parameter, object]:
    """Return the experts' parameters, and how FSDP shards them over "efsdp" of `mesh`, with the
    rest of their unit."""
    from torchtitan.tools.torch_private import ShardPlacementResult  # since torch 2.13

    replicas = ("dp_replicate",) if mesh["dp_replicate"].size() > 1 else ()
    info, degree = fsdp_mesh_info(mesh[(*replicas, "efsdp")]), mesh["efsdp"].size()
    experts = (module for module in model.modules() if isinstance(module, StackedExperts))
    return {
        p: ShardPlacementResult(_shard_dimension(p, degree), info)
        for each in experts
        for p in each.parameters()
    }


def _shard_dimension(parameter: nn.Parameter, degree: int) -> Shard:
    """Return the placement of a parameter of experts over `degree` ranks: its experts if these
    divide them, else the first dimension that they divide. Raise `UserError` if they divide no
    dimension."""
    assert isinstance(parameter, DTensor)
    local = parameter.to_local()
    taken = {place.dim for place in parameter.placements if isinstance(place, Shard)} - {0}
    fitting = [
        dim for dim, size in enumerate(local.shape) if dim not in taken and size % degree == 0
    ]
    if not fitting:
        raise UserError(
            f"--parallelism.expert_parallel_degree leaves {degree} ranks for the same experts, and "
            f"they divide no size of their weights {list(local.shape)}; set a degree that leaves "
            "another number"
        )
    return Shard(fitting[0])
