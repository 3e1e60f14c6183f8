"""`ShardingPlan`: which modules of a family are split over ranks, and how; `torchtitan.distributed` applies it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

TensorSharding = Literal["vocabulary", "sequence", "whole sequence", "columns", "rows"]
"""How tensor parallelism treats a module. Between layers each rank holds its part of the sequence (sequence
parallelism).

- `vocabulary`: an embedding, its rows (tokens of the vocabulary) shared out. Takes all tokens, gives its part of the
  sequence.
- `sequence`: works on each token by itself, with the same weights on every rank; on its part of the sequence.
- `whole sequence`: has no weights of its own to share out; its first input is gathered from the ranks' parts.
- `columns`: a linear layer, its outputs shared out. Takes the whole sequence, gives its part of the features.
- `rows`: a linear layer, its inputs shared out. Takes its part of the features, gives its part of the sequence.
- For an output head, `columns` shares out the vocabulary, and the loss is computed on the parts.
"""


@dataclass(frozen=True)
class ShardingPlan:
    """What of a model is split over ranks. Names are those of modules; `*` stands for every layer's number."""

    tensor: Mapping[str, TensorSharding]
    """Tensor parallelism: module → how it is treated. Every module with parameters of its own is named."""

    attention: str
    """Context parallelism: the modules `attend(queries, keys, values, mask)`, whose keys and values are gathered."""

    mask: str
    """Context parallelism: the module that makes the attention mask from positions, `mask(positions, …)`. It is told
    which tokens its queries and keys are."""
