"""`ShardingPlan` splits a family's modules over ranks. `torchtitan.distributed` applies it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from torch import nn

ModuleT = TypeVar("ModuleT", bound=nn.Module)

TensorSharding = str
"""Treatment of a module in tensor parallelism. Between layers, each rank holds its part of the
sequence.

- `vocabulary`: an embedding, split by rows (tokens). Takes all tokens, returns its part of the
  sequence.
- `sequence`: works on each token separately, with the same weights on every rank, on its part of
  the sequence.
- `final norm`: as `sequence`; returns a DTensor for the head, which computes logits or the loss.
- `local tokens`: as `sequence`, with all its submodules, which get plain tensors.
- `heads`: works on each head separately, with the same weights on every rank, on its heads of the
  whole sequence, in dimension 2 of (B, L, heads, head_dim).
- `own heads`: as `heads`, with parameters of one row per head, which are split (`with_features`:
  "out").
- `own channels`: as `own heads`, for an `OwnHeads` (`torchtitan.protocols.recurrence`), which gets
  and computes with plain tensors.
- `all heads`: works on the features of all heads together, with the same weights on every rank.
  Takes and returns a rank's part of the features, and gathers them.
- `whole sequence`: its first input is gathered from the ranks' parts. It has no weights of its own,
  or is an `OwnHeads`.
- `columns`: a linear layer, split by outputs. Takes the whole sequence, returns its part of the
  features. In an output head, these are its part of the vocabulary, and the loss is computed from
  them.
- `parts to columns`: as `columns`; takes its part of the sequence.
- `parts to shared`: has no weights; gathers the whole sequence, which each rank uses for its own
  heads.
- `columns to shared`: as `parts to shared`, for the result of `columns`.
- `whole to shared`: as `parts to shared`, for the whole sequence.
- `shared to columns`: as `columns`, for a result of `parts to shared` or `whole to shared`.
- `rows`: a linear layer, split by inputs. Takes its part of the features, returns its part of the
  sequence.

In models whose ranks all have the whole sequence between layers:

- `rows to whole`: as `rows`; returns the whole sequence.
- `columns to whole`: as `columns`; returns all features.
- `whole to rows`: as `rows to whole`; takes all features.
- `vocabulary to whole`: as `vocabulary`; returns the whole sequence.
- `whole`: works on the whole sequence, with the same weights on every rank.
- `copy`: as `whole`, for any inputs, such as images; only its own weights, not its submodules'. The
  name of the model itself is empty.
"""

Features = Literal["in", "out"] | None
"""Meaning of a parameter's dimension: input features (or tokens), output features, or neither."""

_ATTRIBUTE = "parameter_features"
_LINEAR: Mapping[str, tuple[Features, ...]] = {"weight": ("out", "in"), "bias": ("out",)}
_EMBEDDING: Mapping[str, tuple[Features, ...]] = {"weight": ("in", "out")}


def with_features(module: ModuleT, **features: tuple[Features, ...]) -> ModuleT:
    """Declare the dimensions of `module`'s additional parameters, as in `lora_A=(None, "in")`, and
    return `module`. `columns` splits "out", `rows` and `vocabulary` split "in"; other parameters
    are replicated."""
    setattr(module, _ATTRIBUTE, {**features_of(module), **features})
    return module


def features_of(module: nn.Module) -> Mapping[str, tuple[Features, ...]]:
    """Return parameter name → meaning of its dimensions, for a linear layer or an embedding."""
    own: Mapping[str, tuple[Features, ...]] | None = getattr(module, _ATTRIBUTE, None)
    if own is not None:
        return own
    return _EMBEDDING if isinstance(module, nn.Embedding) else _LINEAR


@dataclass(frozen=True)
class ShardingPlan:
    """Parts of a model that are split over ranks. Keys are module names; `*` matches every layer's
    number."""

    tensor: Mapping[str, TensorSharding]
    """Tensor parallelism: module → treatment, for every module that owns parameters in any model of
    the family."""

    attention: str
    """Modules `attend(queries, keys, values, …)`, whose keys and values context parallelism
    gathers."""
