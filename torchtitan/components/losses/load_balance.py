"""`LoadBalancer` balances a model's experts by their load in the whole global batch, in any
layout."""

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.distributed.initialize import canonical_name
from torchtitan.distributed.process_group import gather_objects
from torchtitan.protocols.experts import LoadBalanced, PenaltyConfig
from torchtitan.tools.errors import summarize_names
from torchtitan.tools.logging import logger

_STARVING_SHARE, _STARVING_STEPS = 0.01, 100
"""An expert starves if it gets less than this share of the mean load for this many consecutive
steps."""


class LoadBalancer:
    """Runs the routers of a model through the steps of training. Call, in each step, `start_step`
    before the first forward pass, `measuring` around forward passes of all micro-batches if
    `needs_load`, and `finish_step` after the optimizer step. Without routers, nothing happens.

    Args:
        model_parts: the model, or this rank's stages of it.
        mesh: from `ParallelDims.build_mesh`; None in a single process.
    """

    def __init__(self, model_parts: Sequence[nn.Module], mesh: DeviceMesh | None = None):
        modules = (pair for part in model_parts for pair in part.named_modules())
        routers = (
            (canonical_name(name), module)
            for name, module in modules
            if isinstance(module, LoadBalanced)
        )
        # Lists, since the parts of a router in several stages have the same name.
        self._names, self._routers = list[str](), list[LoadBalanced]()
        for name, router in routers:
            self._names.append(name.removesuffix(".moe.router"))
            self._routers.append(router)
        self._totals: Sequence[Tensor] = []  # of each router over the last finished step
        self._idle_steps: list[Any] = [0] * len(self._routers)
        self._reported: set[str] = set()
        names = () if mesh is None else mesh.mesh_dim_names or ()
        groups = {
            name: mesh.get_group(name)
            for name in names
            if mesh is not None and mesh[name].size() > 1
        }
        # its ranks have other routers; ranks of the others route other tokens
        self._pipeline = groups.pop("pp", None)
        self._groups = groups.values()
        stages = self._of_stages([router.penalties for router in self._routers])
        penalties = [each for stage in stages for each in stage]
        self.needs_load = any(each.batch_loss for each in penalties)
        """True if any stage of the pipeline needs `measuring`."""
        self.has_routers = bool(penalties)
        """True if any stage has routers."""
        self.has_losses = any(each != PenaltyConfig() for each in penalties)
        """True if any stage has auxiliary losses."""

    def start_step(self, n_tokens: int, gradient_degree: int, device: torch.device) -> None:
        """Begin a step with `n_tokens` tokens of documents in this rank's micro-batches that no
        other rank counts (0 on all ranks: unknown). Each rank's gradients of auxiliary losses are
        larger by `gradient_degree`, the ranks over which gradients are averaged."""
        if not self._routers:
            return
        self._n_tokens = self._sum(torch.full((), n_tokens, dtype=torch.int64, device=device))
        for router in self._routers:
            router.totals = router.no_totals(device)
            router.gradient_scale = (gradient_degree / self._n_tokens.clamp(min=1)).float()

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Count in forward passes without gradients; then give each router the load of the global
        batch, which is known only after all micro-batches on all ranks."""
        for router in self._routers:
            router.is_measuring = True
        try:
            with torch.no_grad():
                yield
        finally:
            for router in self._routers:
                router.is_measuring = False
        for router, totals in zip(self._routers, self._global_totals(), strict=True):
            router.batch_counts_E = totals[: router.n_experts]
            router.totals = torch.zeros_like(totals)

    def finish_step(self) -> None:
        """Adapt the routers to the step's load, except frozen ones."""
        self._totals = self._global_totals()
        for index, (router, totals) in enumerate(zip(self._routers, self._totals, strict=True)):
            if router.selection is not None and router.is_trained:
                router.selection.update(totals[: router.n_experts])
            counts_LE = router.layer_counts(totals)
            least_L = _STARVING_SHARE * counts_LE.sum(-1, keepdim=True)
            is_idle_LE = counts_LE * router.n_experts < least_L
            self._idle_steps[index] = (self._idle_steps[index] + 1) * is_idle_LE

    def watch(self) -> dict[str, float]:
        """Return metrics of the last finished step, the same in any layout, and warn once of each
        expert that has starved for `_STARVING_STEPS` steps. All ranks of a pipeline call this; it
        waits for the device.

        - `expert_load`: tokens of a layer's busiest expert, relative to the mean; also
          `expert_load/LAYER`, which is the worst layer's for a router of several layers
        - `router_entropy/LAYER`: mean entropy of a token's probabilities, relative to the largest
        - `selection_bias/LAYER`: largest minus smallest
        - `dropped_tokens/LAYER`: choices of the batch's tokens that were not counted, if these are
          known
        """
        of_routers: list[dict[str, float]] = []
        starving: dict[str, str] = {}
        for name, router, totals, idle in zip(
            self._names, self._routers, self._totals, self._idle_steps, strict=True
        ):
            entropy = totals[router.n_experts]
            n_pairs = totals[: router.n_experts].sum()
            counts_LE = router.layer_counts(totals)
            if not counts_LE.any():
                continue  # below the first trained layer, nothing counts
            loads_LE = counts_LE * router.n_experts / counts_LE.sum(-1, keepdim=True).clamp(min=1)
            own = {"expert_load": loads_LE.max()}
            own["router_entropy"] = (
                entropy / 2**20 / math.log(max(router.n_experts, 2)) * router.top_k / n_pairs
            )
            if self._n_tokens:
                n_choices = self._n_tokens * router.top_k * router.n_layers
                own["dropped_tokens"] = n_choices - n_pairs
            if router.selection is not None:
                own["selection_bias"] = (
                    router.selection.bias_E.max() - router.selection.bias_E.min()
                )
            of_routers.append({f"{key}/{name}": float(number) for key, number in own.items()})
            where = "" if router.stage_layers is None else " of a layer"
            starving |= {
                f"{name} expert {e}{where}": router.advice
                for e, steps in enumerate(idle.amax(0).tolist())
                if steps >= _STARVING_STEPS
            }
        stages = self._of_stages((of_routers, starving))
        values: dict[str, float] = {}
        for own in itertools.chain.from_iterable(routers for routers, _ in stages):
            # parts of a router differ in the load of their layers only
            values |= {name: max(value, values.get(name, value)) for name, value in own.items()}
        starving = {name: advice for _, part in stages for name, advice in part.items()}
        if new := [name for name in starving if name not in self._reported]:
            self._reported.update(new)
            logger.warning(
                f"{summarize_names(new)}: less than {_STARVING_SHARE:.0%} of the mean load in each "
                f"of the last {_STARVING_STEPS} steps; {starving[new[0]]}"
            )
        loads = [value for name, value in values.items() if name.startswith("expert_load/")]
        return {"expert_load": max(loads), **values} if loads else {}

    def _of_stages(self, value: object) -> list[Any]:
        """Return this value of each stage of the pipeline."""
        return [value] if self._pipeline is None else gather_objects(value, self._pipeline)

    def _global_totals(self) -> Sequence[Tensor]:
        """Return the totals of each router, summed over ranks: one exchange for all of them."""
        totals: list[Any] = [router.totals for router in self._routers]
        if not totals:
            return []
        sums = self._sum(torch.cat(totals)).split([len(part) for part in totals])
        return self._over_stages(sums)

    def _over_stages(self, totals: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the totals, summed over the stages of a router that is divided into stages. Set
        the number of layers in the parts of this router."""
        of_stages = [router.stage_layers for router in self._routers]
        parts = [index for index, layers in enumerate(of_stages) if layers is not None]
        if not parts:
            return totals
        n_layers = totals[0].new_tensor([sum(of_stages[index] or 0 for index in parts)])
        ends = {index: self._routers[index].n_experts + 1 for index in parts}
        own = [totals[index][:end] for index, end in ends.items()]
        whole = torch.cat((torch.stack(own).sum(0), n_layers))
        if self._pipeline is not None:
            dist.all_reduce(whole, group=self._pipeline)
        for index in parts:
            self._routers[index].n_layers = whole[-1]
        return [
            torch.cat((whole[:-1], own[ends[index] :])) if index in ends else own
            for index, own in enumerate(totals)
        ]

    def _sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor, in place, over the ranks that route other tokens."""
        for group in self._groups:
            dist.all_reduce(tensor, group=group)
        return tensor
