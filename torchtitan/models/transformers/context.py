"""Context parallelism for classes of transformers whose attention is ours: each rank has a part of
the tokens, with their positions, and attention gathers the keys and values of all."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from torchtitan.distributed.context_parallel import SequenceShards
from torchtitan.models.common.attention import with_kernel
from torchtitan.models.transformers.description import transformers_config
from torchtitan.models.transformers.packing import find_packing
from torchtitan.models.transformers.tiny import (
    TEXT_IDS,
    changed_result,
    gradients_of,
    random_clone,
    trial,
)
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.tools.errors import in_words

if TYPE_CHECKING:
    from transformers import PretrainedConfig


ATTENTION = "attend"
"""Name of `ClassAttention` in our model, for the sharding plan."""

_LENGTHS = [27, 5, 1, 31, 40, 24]
"""Tokens of the documents of the trial, in two rows of 64."""


class ClassAttention(nn.Module):
    """The attention of all layers of a class, as one module, so that context parallelism can hook
    it."""

    def forward(
        self,
        q_BLHD: Tensor,
        k_BLKD: Tensor,
        v_BLKD: Tensor,
        attention: AttentionMetadata,
        *,
        products: Callable[..., Tensor],
    ) -> Tensor:
        """Return `products` of the other arguments, those of `common.attention.Attention`."""
        return products(q_BLHD, k_BLKD, v_BLKD, attention)


@trial
def unsupported_context(document: Mapping[str, object]) -> str:
    """Return why context parallelism is not supported ("": it is)."""
    config = transformers_config(document)
    if kind := _rope_of_lengths(config):
        return f"its RoPE of type {kind} depends on the largest position of all parts"
    try:
        return _try(config)
    except Exception as error:  # any class, called in a way that it was not written for
        return f"a trial with a part of the tokens failed: {in_words(error)}"


def _rope_of_lengths(config: "PretrainedConfig") -> str:
    """Return the type of RoPE whose frequencies the class recomputes from the largest position that
    it gets, as in transformers' `dynamic_rope_update`; "" without such a type."""
    for part in (config, config.get_text_config(decoder=True)):
        parameters = getattr(part, "rope_parameters", None) or {}
        ropes = [parameters, *(each for each in parameters.values() if isinstance(each, dict))]
        for rope in ropes:
            kind = str(rope.get("rope_type"))
            if "dynamic" in kind or kind == "longrope":
                return kind
    return ""


def _try(config: "PretrainedConfig") -> str:
    """Give a tiny clone both parts of each row as rows of their own, and return what changes."""
    packing = find_packing(config)
    if packing.mode != "kernel":
        return f"its attention is not ours: documents are packed in {packing.mode}"
    tokens_BL = torch.randint(TEXT_IDS.start, TEXT_IDS.stop, (2, 64))
    attention = AttentionMetadata.from_positions(
        torch.cat([torch.arange(n) for n in _LENGTHS]).view(2, 64)
    )
    shards = SequenceShards(2, "headtail")
    places_PL = [shards.tokens_of_rank(rank, 64) for rank in range(2)]
    order_L = shards.tokens_of_all(64)
    parts = [attention.shard(places_L, order_L) for places_L in places_PL]
    positions_BL = torch.cat([part.positions_BL for part in parts if part.positions_BL is not None])
    results = []
    for is_divided in (False, True):
        model = random_clone(config, packing.implementation)
        with torch.enable_grad():
            if is_divided:
                rows_BL = torch.cat([tokens_BL[:, places_L] for places_L in places_PL])
                both = replace(parts[0], positions_BL=positions_BL)
                outputs = packing.run(model, rows_BL, both, attend=_InTwo(parts))
                logits = torch.cat(outputs.logits.chunk(2), dim=1)[:, order_L.argsort()]
            else:
                logits = packing.run(model, tokens_BL, attention).logits
            (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
        results.append((logits.detach(), gradients_of(model)))
    (expected, gradients), (logits, found) = results
    changed = changed_result(logits, expected, found, gradients)
    return changed and f"in a trial, dividing its tokens changed {changed}"


class _InTwo(nn.Module):
    """As `ClassAttention`, for a batch that has both parts of the rows one after the other."""

    def __init__(self, parts: list[AttentionMetadata]):
        super().__init__()
        self.parts = parts

    def forward(
        self,
        q_BLHD: Tensor,
        k_BLKD: Tensor,
        v_BLKD: Tensor,
        attention: AttentionMetadata,
        *,
        products: Callable[..., Tensor],
    ) -> Tensor:
        keys, values = (torch.cat(x.chunk(2), dim=1) for x in (k_BLKD, v_BLKD))
        results = []
        for q_BLHD_of_part, part in zip(q_BLHD.chunk(2), self.parts, strict=True):
            own = replace(part, window=attention.window, kernel="dense")
            own = with_kernel(
                own, static=False, device=q_BLHD.device, dtype=q_BLHD.dtype, head_dim=64
            )
            results.append(products(q_BLHD_of_part, keys, values, own))
        return torch.cat(results)
