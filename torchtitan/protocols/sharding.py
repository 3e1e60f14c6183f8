"""`ShardingPlan`: which modules of a family are split over ranks, and how; `torchtitan.distributed` applies it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from torch import nn

ModuleT = TypeVar("ModuleT", bound=nn.Module)

TensorSharding = Literal["vocabulary", "sequence", "heads", "whole sequence", "columns", "rows"]
"""How tensor parallelism treats a module. Between layers each rank holds its part of the sequence.

- `vocabulary`: an embedding, its rows (tokens) split. Takes all tokens, gives its part of the sequence.
- `sequence`: works on each token by itself, with the same weights on every rank; on its part of the sequence.
- `heads`: works on each head by itself, with the same weights on every rank; on its heads, dimension 2 of (B, L, heads,
  head_dim), of the whole sequence.
- `whole sequence`: none of its own weights are split; its first input is gathered from the ranks' parts.
- `columns`: a linear layer, its outputs split. Takes the whole sequence, gives its part of the features; of an output
  head, these are parts of the vocabulary, and the loss is computed on them.
- `rows`: a linear layer, its inputs split. Takes its part of the features, gives its part of the sequence.
"""

Features = Literal["in", "out"] | None
"""What a dimension of a parameter runs over: features (or tokens) that go into the layer or come out of it, or
neither."""

_ATTRIBUTE = "parameter_features"
_PART_MULTIPLE = "part_multiple"
_LINEAR: Mapping[str, tuple[Features, ...]] = {"weight": ("out", "in"), "bias": ("out",)}
_EMBEDDING: Mapping[str, tuple[Features, ...]] = {"weight": ("in", "out")}


def with_features(module: ModuleT, **features: tuple[Features, ...]) -> ModuleT:
    """Return `module`, a linear layer or an embedding, made to carry what the dimensions of further parameters run
    over: `lora_A=(None, "in")`. `columns` splits the dimension "out", `rows` and `vocabulary` split "in"; a parameter
    without that dimension is the same on every rank."""
    setattr(module, _ATTRIBUTE, {**features_of(module), **features})
    return module


def features_of(module: nn.Module) -> Mapping[str, tuple[Features, ...]]:
    """Name of a parameter of a linear layer or an embedding → what its dimensions run over."""
    own: Mapping[str, tuple[Features, ...]] | None = getattr(module, _ATTRIBUTE, None)
    return own if own is not None else _EMBEDDING if isinstance(module, nn.Embedding) else _LINEAR


def with_part_multiple(module: ModuleT, multiple: int) -> ModuleT:
    """Return `module`, a linear layer, made to say that it computes only with multiples of this many inputs and
    outputs, on each rank."""
    setattr(module, _PART_MULTIPLE, multiple)
    return module


def part_multiple_of(module: nn.Module) -> int:
    """What `with_part_multiple` was given, or 1."""
    return getattr(module, _PART_MULTIPLE, 1)


@dataclass(frozen=True)
class ShardingPlan:
    """What of a model is split over ranks. Names are those of modules; `*` stands for every layer's number."""

    tensor: Mapping[str, TensorSharding]
    """Tensor parallelism: module → how it is treated. Every module with parameters of its own is named; so may one be
    that a model leaves out, whose attribute is None."""

    attention: str
    """Context parallelism: the modules `attend(queries, keys, values, mask)`, whose keys and values are gathered."""

    mask: str
    """Context parallelism: the module that makes the attention mask, `mask(positions, query_tokens, key_tokens)`."""
