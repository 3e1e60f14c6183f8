"""`LoadBalancer`: balance the experts of a model by the load of the whole global batch, in any layout."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.protocols.load_balance import LoadBalanced

_DIMENSIONS = ("dp_replicate", "fsdp", "tp")
"""Dimensions of the mesh along which ranks route different tokens with the same weights. Pipeline ranks have others."""


class LoadBalancer:
    """Runs the routers of a model through the steps of training. Call, in each step, `start_step` before the first
    forward pass, `measuring` around forward passes of all micro-batches if `needs_load`, and `finish_step` after the
    optimizer step. Without routers, nothing happens.

    Args:
        model_parts: the model, or this rank's stages of it.
        mesh: from `ParallelDims.build_mesh`; None in a single process.
    """

    def __init__(self, model_parts: Sequence[nn.Module], mesh: DeviceMesh | None = None):
        modules = (module for part in model_parts for module in part.modules())
        self.routers = [module for module in modules if isinstance(module, LoadBalanced)]
        sizes = {} if mesh is None else dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
        self._groups = [mesh.get_group(name) for name in _DIMENSIONS if mesh is not None and sizes.get(name, 1) > 1]
        self.needs_load = any(router.needs_load for router in self.routers)
        """True if the steps need `measuring`; under pipeline parallelism, also for stages without routers."""
        if mesh is not None and sizes["pp"] > 1:
            flag = torch.full((), self.needs_load, dtype=torch.int32, device=mesh.device_type)
            dist.all_reduce(flag, dist.ReduceOp.MAX, mesh.get_group("pp"))
            self.needs_load = bool(flag)

    def start_step(self, n_tokens: int, gradient_degree: int, device: torch.device) -> None:
        """Begin a step. Auxiliary losses are means over the tokens of the global batch.

        Args:
            n_tokens: tokens that this rank routes in the step, over all micro-batches.
            gradient_degree: ranks over which gradients are averaged, so that each rank's must be larger by this factor.
            device: of the model.
        """
        if not self.routers:
            return
        total = torch.full((), n_tokens, dtype=torch.int64, device=device)
        for group in self._groups:
            dist.all_reduce(total, group=group)
        scale = (gradient_degree / total.clamp(min=1)).float()
        for router in self.routers:
            router.start_step(scale)

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Count in forward passes without gradients; then give each router the load of the global batch."""
        for router in self.routers:
            router.is_measuring = True
        try:
            with torch.no_grad():
                yield
        finally:
            for router in self.routers:
                router.is_measuring = False
        for router, counts_E in self._global_counts():
            router.use_load(counts_E)
            assert router.counts_E is not None
            router.counts_E.zero_()

    def finish_step(self) -> None:
        """Let the routers adapt to the step's load."""
        for router, counts_E in self._global_counts():
            router.rebalance(counts_E)

    def _global_counts(self) -> Iterator[tuple[LoadBalanced, Tensor]]:
        """Return each router with its counts, summed over ranks: one exchange for all of them."""
        if not self.routers:
            return iter(())
        counts_of = [router.counts_E for router in self.routers if router.counts_E is not None]
        assert len(counts_of) == len(self.routers), "call start_step first"
        counts = torch.cat(counts_of)
        for group in self._groups:
            dist.all_reduce(counts, group=group)
        return iter(zip(self.routers, counts.split([router.n_experts for router in self.routers]), strict=True))
