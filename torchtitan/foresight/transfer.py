"""Transfer of hyper-parameters over width and depth: initial values and rates of each parameter
relative to a base model of the same family.

Roles follow from shapes, as in muP (Yang et al. 2022, arXiv:2203.03466, table 3): a matrix whose
inputs grow by r gets the rate 1 / r, and initial values of 1 / sqrt(r) if its outputs grow too,
else of 1 / r (output head, routers). The multiplier 1 / depth of a residual branch (CompleteP, Dey
et al. 2025, arXiv:2505.01618) is part of its last matrix, whose initial values and rate it
multiplies, so a model computes as before and exports need no new key. Rate times weight decay is
the same at every size.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from torchtitan.components.optim.initial_scale import InitialScale, Scale
from torchtitan.components.optim.optimizer import ParamGroup
from torchtitan.protocols import BaseModel
from torchtitan.protocols.initializer import Constant, TruncatedNormal, initializers_of

_LAST_OF_BRANCH = re.compile(
    r"\.(attention\.(wo|out)\.|feed_forward\.w2\.|moe\.shared\.w2\.|moe\.experts\.(w2|bias2)$)"
)
_LAST_NORM = re.compile(r"\.(attention_post_norm|ffn_post_norm)\.")
"""Norm after a branch, which undoes a factor before it."""

_NO_DECAY = re.compile(r"norm|bias|tok_embeddings")


class Transfer(NamedTuple):
    """Factors of a parameter relative to the base model."""

    init: float
    """Factor of the family's own initial values."""
    lr: float
    decays: bool


class _Facts(NamedTuple):
    shape: tuple[int, ...]
    std: float | None
    """None: not a random matrix."""
    constant: float | None
    is_embedding: bool


def transfers(model: BaseModel, base: BaseModel) -> dict[str, Transfer]:
    """Return name, with `*` for the layer's number → factors relative to `base`, a model of the
    same family. Both may be on the meta device."""
    facts, base_facts = _facts_of(model), _facts_of(base)
    depth = base.config.n_layers / model.config.n_layers  # type: ignore[attr-defined]
    post_norms = [name for name in facts if _LAST_NORM.search(name)]
    last = _LAST_NORM if post_norms else _LAST_OF_BRANCH
    found = {}
    for name, own in facts.items():
        init, lr = _over_width(own, base_facts.get(name, own))
        # A norm whose gain starts at 0 adds one to it: no factor of its weight scales the branch.
        if last.search(name) and own.constant != 0.0:
            init, lr = init * depth, lr * depth
        elif last is _LAST_OF_BRANCH and last.search(name):
            lr *= depth  # a bias
        found[name] = Transfer(init, lr, not _NO_DECAY.search(name))
    return found


def transfers_depth(model: BaseModel) -> bool:
    """Return whether residual branches can be scaled: not if norms that add one end them."""
    facts = _facts_of(model)
    return all(facts[name].constant != 0.0 for name in facts if _LAST_NORM.search(name))


def _over_width(own: _Facts, base: _Facts) -> tuple[float, float]:
    """Return the factors of initial values and rate."""
    if own.std is None or base.std is None:
        return 1.0, 1.0
    if own.is_embedding:  # times what the family multiplies it by, it is the same at every width
        return 1.0, own.std / base.std
    r_in = own.shape[-1] / base.shape[-1]
    r_out = own.shape[-2] / base.shape[-2]
    std = base.std / (r_in if r_out == 1 else math.sqrt(r_in))
    return std / own.std, 1 / r_in


def _facts_of(model: nn.Module) -> dict[str, _Facts]:
    found: dict[str, _Facts] = {}
    for prefix, module in model.named_modules():
        initializers = initializers_of(module)
        for name, parameter in module.named_parameters(recurse=False):
            initializer = initializers.get(name)
            facts = _Facts(
                tuple(parameter.shape),
                initializer.std if isinstance(initializer, TruncatedNormal) else None,
                initializer.value if isinstance(initializer, Constant) else None,
                isinstance(module, nn.Embedding),
            )
            found.setdefault(re.sub(r"\.\d+\.", ".*.", f"{prefix}.{name}"), facts)
    return found


def initial_scale(found: Mapping[str, Transfer]) -> InitialScale.Config:
    """Return the converter that sets the initial values."""
    by_factor = defaultdict(list)
    for name, one in found.items():
        if not math.isclose(one.init, 1.0):
            by_factor[one.init].append(name)
    scales = {
        f"scale_{number}": Scale(pattern=_pattern(names), factor=factor)
        for number, (factor, names) in enumerate(by_factor.items(), 1)
    }
    return InitialScale.Config(scales=scales)


def param_groups(found: Mapping[str, Transfer]) -> dict[str, ParamGroup]:
    """Return the optimizer's groups, whose rates and weight decays follow `--optimizer.lr` and
    `--optimizer.weight_decay`."""
    by_factors = defaultdict(list)
    for name, one in found.items():
        by_factors[one.lr, one.decays].append(name)
    return {
        f"{'' if decays else 'no_decay_'}rate_{number}": ParamGroup(
            pattern=_pattern(names), lr_factor=lr, weight_decay_factor=1 / lr if decays else 0.0
        )
        for number, ((lr, decays), names) in enumerate(by_factors.items(), 1)
    }


def _pattern(names: Iterable[str]) -> str:
    """Return a regular expression for exactly these names, with any number for each `*`."""
    escaped = (re.escape(name).replace(r"\*", r"\d+") for name in names)
    return f"^({'|'.join(escaped)})$"


def on_meta(config: Any) -> BaseModel:
    """Build a model without memory."""
    with torch.device("meta"):
        model: BaseModel = config.build()
    return model
