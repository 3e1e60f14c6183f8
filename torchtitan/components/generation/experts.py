"""The experts that tokens pass through while a model generates, for training that repeats the
choice."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan.components.generation.row import Generation
from torchtitan.distributed.whole_tensors import sequence_group
from torchtitan.protocols.experts import LinearRouter
from torchtitan.tools.errors import UserError

Experts = npt.NDArray[np.int16]
"""Numbers of experts, (tokens, layers, experts of a token); -1: unknown, or a layer without."""


def reason_not_to_record(model: nn.Module) -> str:
    """Return what keeps a model's experts from being recorded, "" for nothing."""
    routers = [module for module in model.modules() if isinstance(module, LinearRouter)]
    if not routers:
        return "it has no routers that are computed here"
    if max(router.n_experts for router in routers) > torch.iinfo(torch.int16).max:
        return "it has more experts than an int16 counts"
    if model.cache_boundaries():  # type: ignore[operator]
        return "long texts recompute all of their tokens (LongRoPE)"
    return ""


class ExpertSizes(NamedTuple):
    """Sizes of `Experts` of a model whose layers all have experts."""

    n_layers: int
    top_k: int
    n_experts: int

    @classmethod
    def of(cls, model: Any) -> "ExpertSizes":
        """Raise `UserError` as `require_recordable`, and if a layer has no experts or others."""
        require_recordable(model)
        routers = [module for module in model.modules() if isinstance(module, LinearRouter)]
        sizes = {(router.top_k, router.n_experts) for router in routers}
        n_layers = model.config.n_layers
        if sorted(router.layer for router in routers) != [*range(n_layers)] or len(sizes) > 1:
            raise UserError(
                f"a {type(model).__name__} has layers without experts, or with others: how a "
                "server numbers them is not known; set --rollout.engine embedded, or remove "
                "--policy.replay_experts"
            )
        return cls(n_layers, *sizes.pop())


class ExpertRecorder:
    """Records the experts that a model's routers choose, within a `with` block. Under tensor
    parallelism, each rank routes a part of the tokens, and all ranks `take` together."""

    def __init__(self, model: Any):
        self._group = sequence_group(model)
        self._n_layers = model.config.n_layers
        self._routers = [module for module in model.modules() if isinstance(module, LinearRouter)]
        self._chosen: dict[int, Tensor] = {}
        self._cleanup = ExitStack()

    def __enter__(self) -> Self:
        for router in self._routers:
            hook = partial(self._record, router.layer)
            self._cleanup.callback(router.register_forward_hook(hook).remove)
        return self

    def __exit__(self, *exception: object) -> None:
        self._cleanup.close()
        self._chosen.clear()

    def _record(
        self, layer: int, _: nn.Module, args: object, results: tuple[Tensor, Tensor]
    ) -> None:
        self._chosen[layer] = results[1].to(torch.int16)

    def take(self) -> Tensor:
        """Return the experts of the last forward pass, (B, L, layers, K), int16."""
        absent = torch.full_like(next(iter(self._chosen.values())), -1)
        layers = [self._chosen.get(layer, absent) for layer in range(self._n_layers)]
        self._chosen.clear()
        own_BLNK = torch.stack(layers, dim=2)
        if self._group is None:
            return own_BLNK
        wide_BLNK = own_BLNK.int()  # NCCL sends no int16
        parts = [torch.empty_like(wide_BLNK) for _ in range(self._group.size())]
        dist.all_gather(parts, wide_BLNK, group=self._group)
        return torch.cat(parts, dim=1).to(torch.int16)


def merged_experts(n_tokens: int, texts: Sequence[tuple[int, Generation]]) -> Experts | None:
    """Return the experts of each token of a trajectory, for the continuations that it contains,
    each with the place of its end, in the order of sampling. A token keeps the experts that it had
    first. A continuation's last token passes through the model only in the next one. None: no
    continuation has experts."""
    merged: Experts | None = None
    n_known = 0
    for end, generation in texts:
        if generation.experts is None:
            continue
        if merged is None:
            merged = np.full((n_tokens, *generation.experts.shape[1:]), -1, np.int16)
        merged[n_known : end - 1] = generation.experts[n_known:]
        n_known = max(n_known, end - 1)
    return merged


def add_experts(generation: Generation, experts: Experts) -> None:
    """Add the experts of all tokens that the model has computed. Tokens that later weights have
    recomputed keep the experts that they had first."""
    if generation.experts is not None:
        experts[: len(generation.experts)] = generation.experts
    generation.experts = experts


def require_recordable(model: nn.Module) -> None:
    """Raise `UserError` for a model whose experts cannot be recorded."""
    if reason := reason_not_to_record(model):
        raise UserError(
            f"the experts of a {type(model).__name__} are not recorded: {reason}; remove "
            "--policy.replay_experts"
        )
