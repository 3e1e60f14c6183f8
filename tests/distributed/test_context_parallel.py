"""Context parallelism: the tokens of each rank, and attention over all of them."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from tests.training import llama_config
from torchtitan.distributed import context_parallel, initialize_weights
from torchtitan.distributed.context_parallel import (
    LoadBalancer,
    SequenceShards,
    TokensOverRanks,
    apply_context_parallel,
    shard_sequences,
)
from torchtitan.models.llama3 import SHARDING
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.tools.errors import UserError

BALANCERS: tuple[LoadBalancer, ...] = ("headtail", "none")
LENGTH, VOCABULARY = 24, 61


# --- tokens
# --------------------------------------------------------------------------------------------------


def test_tokens_of_a_sample_must_be_divisible():
    mesh = mock.Mock(size=lambda: 3, get_local_rank=lambda: 1)
    tokens = TokensOverRanks(mesh)
    assert tokens.take(torch.arange(6)[None], 1).tolist() == [[2, 3]]
    with pytest.raises(UserError, match="degree 3 does not divide the 7 tokens of a sample"):
        tokens.take(torch.arange(7), 0)


@pytest.mark.parametrize("balancer", BALANCERS)
@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_each_token_is_on_one_rank(degree, balancer):
    shards = SequenceShards(degree, balancer)
    tokens_by_rank = [shards.tokens_of_rank(rank, LENGTH).tolist() for rank in range(degree)]
    assert sorted(sum(tokens_by_rank, [])) == list(range(LENGTH))
    assert {len(tokens) for tokens in tokens_by_rank} == {LENGTH // degree}
    assert shards.tokens_of_all(LENGTH).tolist() == sum(tokens_by_rank, [])


def test_tokens_of_each_balancer():
    assert SequenceShards(2, "headtail").tokens_of_rank(0, 8).tolist() == [0, 1, 6, 7]
    assert SequenceShards(2, "headtail").tokens_of_rank(1, 8).tolist() == [2, 3, 4, 5]
    assert SequenceShards(2, "none").tokens_of_rank(1, 8).tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("degree", [2, 4])
def test_headtail_balances_causal_attention(degree):
    def costs(balancer: LoadBalancer) -> list[int]:
        """Return the number of query-key pairs of each rank."""
        shards = SequenceShards(degree, balancer)
        return [int((shards.tokens_of_rank(rank, 64) + 1).sum()) for rank in range(degree)]

    assert len(set(costs("headtail"))) == 1
    assert max(costs("none")) > 2 * min(costs("none"))


def test_places_are_copied_without_waiting_for_the_device(monkeypatch: pytest.MonkeyPatch):
    """`send` pins memory on CUDA; every other copy to a device would wait."""
    sent = []
    monkeypatch.setattr(
        context_parallel, "send", lambda x, device: sent.append(x.tolist()) or x.to(device)
    )
    batch = {"input": torch.zeros(1, 8, dtype=torch.long, device="meta")}
    with CopiesToMeta() as copies:
        shard_sequences(batch, SequenceShards(2, "none"), 1)
    assert sent == [[4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7]]
    assert copies.count == len(sent)


class CopiesToMeta(TorchDispatchMode):
    """Counts copies of host tensors to the meta device."""

    count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        is_host = args and isinstance(args[0], Tensor) and args[0].device.type == "cpu"
        self.count += bool(is_host and (kwargs or {}).get("device") == torch.device("meta"))
        return function(*args, **(kwargs or {}))


def test_a_batch_is_sharded_with_the_positions_of_its_tokens():
    tokens = torch.arange(16).view(2, 8)
    batch = {"input": tokens, "labels": tokens + 1, "documents": torch.tensor([[0, 1], [1, 2]])}
    shard = shard_sequences(batch, SequenceShards(2, "headtail"), rank=1)
    assert shard["input"].tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]]
    assert shard["labels"].tolist() == [[3, 4, 5, 6], [11, 12, 13, 14]]
    # Derived from the token indices, since the batch has no attention.
    assert shard["attention"].positions_BL.tolist() == [[2, 3, 4, 5]] * 2
    assert shard["attention"].query_places_L.tolist() == [2, 3, 4, 5]
    assert shard["attention"].key_places_S.tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert shard["documents"] is batch["documents"]
    assert "attention" not in batch
    packed = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]).expand(2, -1)
    attention = AttentionMetadata.from_positions(packed)
    shard = shard_sequences({**batch, "attention": attention}, SequenceShards(2, "none"), rank=1)
    assert shard["attention"].positions_BL.tolist() == [[1, 2, 3, 4]] * 2


# --- attention
# --------------------------------------------------------------------------------------------------


def make_model() -> Llama3Model:
    model = llama_config(vocab_size=VOCABULARY).build()
    initialize_weights(model, 0)
    # With the usual small projections, attention would be nearly uniform and have little effect on
    # the outputs.
    for block in model.layers.values():
        for projection in (
            block.attention.wq,
            block.attention.wk,
            block.attention.wv,
            block.attention.wo,
        ):
            projection.weight.data *= 10
    return model


def make_batch(packed: bool, window: int | None) -> dict[str, Any]:
    """Return a batch whose documents end inside and at the ends of the shards, differently in each
    sample."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (3, LENGTH), generator=generator)
    batch: dict[str, Any] = {"input": tokens, "labels": tokens.roll(-1, 1)}
    lengths = ((LENGTH,), (5, 1, 12, 6), (6, 6, 6, 6))
    if packed:
        positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
        batch["attention"] = replace(AttentionMetadata.from_positions(positions), window=window)
    return batch


def logits_and_gradients(
    model: Llama3Model, batch: dict[str, Any], weights: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Return the logits, and the gradients of their sum weighted by `weights`."""
    logits = model(batch["input"], batch.get("attention"))
    (logits * weights).sum().backward()
    return logits.detach(), [parameter.grad for parameter in model.parameters()]


def compare_with_whole_sequences(folder: Path, balancer: LoadBalancer) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    shards = SequenceShards(2, balancer)
    weights = torch.randn(3, LENGTH, VOCABULARY, generator=torch.Generator().manual_seed(2))
    outputs = []
    # The window crosses the borders of shards and documents.
    for packed, window in ((False, None), (True, None), (True, 8)):
        batch = make_batch(packed, window)
        expected, expected_gradients = logits_and_gradients(make_model(), batch, weights)
        model = make_model()
        apply_context_parallel(model, mesh, SHARDING)
        tokens = shards.tokens_of_rank(mesh.get_local_rank(), LENGTH)
        local_batch = shard_sequences(batch, shards, mesh.get_local_rank())
        logits, gradients = logits_and_gradients(model, local_batch, weights[:, tokens])
        # Another kernel, which sums in a different order.
        torch.testing.assert_close(
            logits, expected[:, tokens], rtol=0, atol=1e-5 * expected.abs().max().item()
        )
        for gradient, whole in zip(gradients, expected_gradients, strict=True):
            dist.all_reduce(gradient)
            assert (gradient - whole).norm() < 1e-5 * whole.norm()
        outputs.append(expected)
    # document boundaries have an effect, and so has the window
    for one, other in pairwise(outputs):
        assert (one - other).norm() > 1e-2 * one.norm()
    (folder / str(dist.get_rank())).touch()


@pytest.mark.parametrize("balancer", BALANCERS)
def test_attention_and_gradients_match_whole_sequences(workers, tmp_path, balancer):
    workers.run(compare_with_whole_sequences, tmp_path, balancer)
    assert len(list(tmp_path.iterdir())) == 2
