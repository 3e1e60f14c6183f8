"""Context parallelism: split the tokens of each window over ranks.

For attention, each rank keeps its own queries and gathers all keys and values (section 3.3.2 of
"The Llama 3 Herd of Models", arXiv:2407.21783). Keys and values are small, since query heads share
them, and this works with any mask.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.protocols.experts import LoadBalanced
from torchtitan.protocols.sharding import ShardingPlan
from torchtitan.tools.device import send
from torchtitan.tools.torch_private import all_gather_single_autograd, wait_tensor

LoadBalancer = Literal["headtail", "none"]


@dataclass(frozen=True)
class SequenceShards:
    """Assignment of a window's tokens to `degree` ranks. Later tokens cost more in causal
    attention; to balance it, `headtail` cuts a window into 2 * degree pieces, and rank r gets the
    r-th piece from each end."""

    degree: int
    load_balancer: LoadBalancer

    def tokens_of_rank(self, rank: int, length: int) -> Tensor:
        """Return the places of one rank's tokens in a window of `length` tokens, in the rank's
        order."""
        pieces = torch.arange(length).chunk(
            2 * self.degree if self.load_balancer == "headtail" else self.degree
        )
        if self.load_balancer == "none":
            return pieces[rank]
        return torch.cat((pieces[rank], pieces[2 * self.degree - 1 - rank]))

    def tokens_of_all(self, length: int) -> Tensor:
        """Return the places of all ranks' tokens, rank by rank: the order after a gather."""
        return torch.cat([self.tokens_of_rank(rank, length) for rank in range(self.degree)])


def shard_sequences(batch: Mapping[str, Any], shards: SequenceShards, rank: int) -> dict[str, Any]:
    """Return a batch with this rank's part of all per-token values, shape (B, T, …); other values
    stay unchanged. Adds a missing `attention`, since a part's tokens are not contiguous."""
    (n_rows, length), device = batch["input"].shape, batch["input"].device
    places = shards.tokens_of_rank(rank, length), shards.tokens_of_all(length)
    tokens, tokens_of_all = (send(each, device) for each in places)
    per_token = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    per_token = {
        name: value[:, tokens]
        for name, value in per_token.items()
        if value.shape[:2] == (n_rows, length)
    }
    attention = batch.get("attention", AttentionMetadata.of_rows(n_rows, length))
    return {**batch, **per_token, "attention": attention.shard(tokens, tokens_of_all)}


def apply_context_parallel(model: nn.Module, mesh: DeviceMesh, plan: ShardingPlan) -> None:
    """Make a model's attention cover the tokens of all ranks, in place, without changing weights.

    Args:
        mesh: the dimension of context parallelism; `shard_sequences` splits batches over it.
        plan: names the attention modules.
    """

    def gather_keys_and_values(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        q_BLHD, k_BLKD, v_BLKD, attention = args
        return q_BLHD, _gather_sequence(k_BLKD, mesh), _gather_sequence(v_BLKD, mesh), attention

    for name, module in model.named_modules():
        if fnmatchcase(name, plan.attention):
            module.register_forward_pre_hook(gather_keys_and_values)
    share_rows(model, mesh)


def share_rows(model: nn.Module, mesh: DeviceMesh) -> None:
    """Make routers sum their counts over the ranks of `mesh`, which share the same rows of
    tokens."""
    for module in model.modules():
        if isinstance(module, LoadBalanced):
            module.row_groups = (*module.row_groups, mesh.get_group())


def _gather_sequence(x_BLHD: Tensor, mesh: DeviceMesh) -> Tensor:
    """Gather (B, L, H, D) of each rank → (B, degree x L, H, D). The backward pass sums each rank's
    part over ranks."""
    gathered = all_gather_single_autograd(x_BLHD.contiguous(), gather_dim=1, group=mesh)
    # Wait now: with PyTorch 2.13 and gloo, waiting at the first use corrupted the heap of pipeline
    # ranks in half of the runs.
    return wait_tensor(gathered)
