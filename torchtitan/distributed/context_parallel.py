"""Context parallelism: split the tokens of each window over ranks.

For attention, each rank keeps its own queries and gathers all keys and values (section 3.3.2 of
"The Llama 3 Herd of Models", arXiv:2407.21783). Keys and values are small, since query heads share
them, and this works with any mask.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.protocols.experts import LoadBalanced
from torchtitan.protocols.own_tokens import OwnTokens
from torchtitan.protocols.recurrence import OwnHeads
from torchtitan.protocols.sharding import ShardingPlan
from torchtitan.tools.device import send
from torchtitan.tools.errors import UserError
from torchtitan.tools.torch_private import (
    all_gather_single_autograd,
    all_to_all_single_autograd,
    wait_tensor,
)

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


class HeadsOverRanks:
    """A `HeadExchange` over the ranks of a mesh dimension, by one all-to-all in each direction."""

    def __init__(self, mesh: DeviceMesh):
        self._group = mesh.get_group()
        self._degree = mesh.size()
        self._rank = mesh.get_local_rank()

    def to_heads(
        self, inputs: Sequence[Tensor], attention: AttentionMetadata, shared: Collection[int]
    ) -> tuple[Tensor, ...]:
        parts = [
            x_BLH[..., None, :].expand(-1, -1, self._degree, -1)
            if number in shared
            else x_BLH.unflatten(-1, (self._degree, -1))
            for number, x_BLH in enumerate(inputs)
        ]
        widths = [part.shape[-1] for part in parts]
        x_RBLH = self._exchange(torch.cat(parts, dim=-1).movedim(2, 0))
        assert attention.key_places_S is not None
        # the order after a gather → the order of the row
        x_BSH = x_RBLH.movedim(0, 1).flatten(1, 2)[:, attention.key_places_S.argsort()]
        return x_BSH.split(widths, dim=-1)

    def to_tokens(self, x_BSH: Tensor, attention: AttentionMetadata) -> Tensor:
        x_BRLH = x_BSH[:, attention.key_places_S].unflatten(1, (self._degree, -1))
        return self._exchange(x_BRLH.movedim(1, 0)).movedim(0, 2).flatten(2, 3)

    def own(self, parameter_H: Tensor) -> Tensor:
        return parameter_H.unflatten(0, (self._degree, -1))[self._rank]

    def _exchange(self, x_RBLH: Tensor) -> Tensor:
        # Wait now, as below.
        sent = all_to_all_single_autograd(x_RBLH.contiguous(), None, None, self._group)
        return wait_tensor(sent)


class TokensOverRanks:
    """A `TokenExchange` over the ranks of a mesh dimension, which have contiguous parts."""

    def __init__(self, mesh: DeviceMesh):
        self._mesh = mesh

    def take(self, x: Tensor, dim: int) -> Tensor:
        degree, length = self._mesh.size(), x.shape[dim]
        if length % degree:
            raise UserError(
                f"--parallelism.context_parallel_degree {degree} does not divide the {length} "
                "tokens of a sample"
            )
        return x.chunk(degree, dim)[self._mesh.get_local_rank()]

    def join(self, x_BLD: Tensor) -> Tensor:
        return _gather_sequence(x_BLD, self._mesh)


def apply_context_parallel(model: nn.Module, mesh: DeviceMesh, plan: ShardingPlan) -> None:
    """Make a model's attention and recurrences cover the tokens of all ranks, in place, without
    changing weights.

    Args:
        mesh: the dimension of context parallelism; `shard_sequences` splits batches over it, or the
            model's `OwnTokens` samples.
        plan: names the attention modules.
    """

    def gather_keys_and_values(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        q_BLHD, k_BLKD, v_BLKD, *others = args
        return q_BLHD, _gather_sequence(k_BLKD, mesh), _gather_sequence(v_BLKD, mesh), *others

    for name, module in model.named_modules():
        if plan.attention and fnmatchcase(name, plan.attention):
            module.register_forward_pre_hook(gather_keys_and_values)
        if isinstance(module, OwnHeads):
            module.exchange = HeadsOverRanks(mesh)
        if isinstance(module, OwnTokens):
            module.exchange = TokensOverRanks(mesh)
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
