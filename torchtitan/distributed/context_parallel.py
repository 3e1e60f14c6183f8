"""Context parallelism: split the tokens of each window over ranks.

For attention, each rank keeps its own queries and gathers all keys and values (section 3.3.2 of "The Llama 3 Herd of
Models", arXiv:2407.21783). Keys and values are small, since query heads share them, and this works with any mask.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.protocols.sharding import ShardingPlan
from torchtitan.tools.torch_private import all_gather_single_autograd, wait_tensor

LoadBalancer = Literal["headtail", "none"]


@dataclass(frozen=True)
class SequenceShards:
    """Assignment of a window's tokens to `degree` ranks. To balance causal attention, in which later tokens cost more,
    `headtail` cuts a window into 2 * degree pieces; rank r gets the r-th from each end."""

    degree: int
    load_balancer: LoadBalancer

    def tokens_of_rank(self, rank: int, length: int) -> Tensor:
        """Return the places of the tokens of `rank` in a window of `length` tokens, in the rank's order."""
        pieces = torch.arange(length).chunk(2 * self.degree if self.load_balancer == "headtail" else self.degree)
        if self.load_balancer == "none":
            return pieces[rank]
        return torch.cat((pieces[rank], pieces[2 * self.degree - 1 - rank]))

    def tokens_of_all(self, length: int) -> Tensor:
        """Return the places of all ranks' tokens, rank by rank: the order after a gather."""
        return torch.cat([self.tokens_of_rank(rank, length) for rank in range(self.degree)])


def shard_sequences(batch: Mapping[str, Tensor], shards: SequenceShards, rank: int) -> dict[str, Tensor]:
    """Return a batch with this rank's part of all per-token values, shape (B, T, …); other values are unchanged.
    Missing `positions` are added, since the tokens of a part are not contiguous."""
    length = batch["input"].shape[1]
    tokens = shards.tokens_of_rank(rank, length).to(batch["input"].device)
    whole = {"positions": torch.arange(length, device=tokens.device).expand_as(batch["input"]), **batch}
    per_token = batch["input"].shape
    return {name: value[:, tokens] if value.shape[:2] == per_token else value for name, value in whole.items()}


def apply_context_parallel(model: nn.Module, mesh: DeviceMesh, plan: ShardingPlan, shards: SequenceShards) -> None:
    """Make a model's attention cover the tokens of all ranks, in place, without changing weights.

    Args:
        mesh: the dimension of context parallelism, over which `shard_sequences` splits batches.
        plan: names the attention and mask modules.
    """
    rank = mesh.get_local_rank()

    def gather_keys_and_values(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        q_BLHD, k_BLKD, v_BLKD, mask = args
        return q_BLHD, _gather_sequence(k_BLKD, mesh), _gather_sequence(v_BLKD, mesh), mask

    def set_token_ids(_: nn.Module, args: tuple[Tensor], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        (positions_BL,) = args
        length, device = positions_BL.shape[1] * shards.degree, positions_BL.device
        tokens = {
            "query_tokens_L": shards.tokens_of_rank(rank, length).to(device),
            "key_tokens_K": shards.tokens_of_all(length).to(device),
        }
        return args, {**kwargs, **tokens}

    for name, module in model.named_modules():
        if fnmatchcase(name, plan.attention):
            module.register_forward_pre_hook(gather_keys_and_values)
        if fnmatchcase(name, plan.mask):
            module.register_forward_pre_hook(set_token_ids, with_kwargs=True)


def _gather_sequence(x_BLHD: Tensor, mesh: DeviceMesh) -> Tensor:
    """Gather (B, L, H, D) of each rank → (B, degree x L, H, D). The backward pass sums each rank's part over ranks."""
    gathered = all_gather_single_autograd(x_BLHD.contiguous(), gather_dim=1, group=mesh)
    # Wait now: with PyTorch 2.13 and gloo, waiting at the first use corrupted the heap of pipeline ranks in half of
    # the runs.
    return wait_tensor(gathered)
