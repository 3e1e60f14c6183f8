"""Transfer of hyper-parameters over width and depth: initial values and rates of each parameter
relative to a base model of the same family.

Factors of width follow from shapes, as in muP (Yang et al. 2022, arXiv:2203.03466, table 3): a
matrix whose inputs grow by r gets the rate 1 / r, and initial values of 1 / sqrt(r) if its outputs
grow too, else of 1 / r (output head, routers). The multiplier 1 / depth of a residual branch
(CompleteP, Dey et al. 2025, arXiv:2505.01618) is part of its last matrix, whose initial values and
rate it multiplies, so a model computes as before and exports need no new key. Muon gives an update
of a matrix (m, n) the norm sqrt(max(m, n)) times the rate, which is divided by that, and multiplied
by sqrt(m / n), relative to the base (spectral condition, Yang et al. 2023, arXiv:2310.17813). All
layers start alike: a family's own fall of initial values with the layer's number would be a second
factor of depth. Rate times weight decay is the same at every size.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from torchtitan.components.optim.initial_scale import InitialScale, Scale
from torchtitan.components.optim.kinds import is_matrix_of_layer
from torchtitan.components.optim.optimizer import ParamGroup
from torchtitan.foresight.scaling import BASE_LAYERS
from torchtitan.protocols import BaseModel
from torchtitan.protocols.initializer import Constant, TruncatedNormal, initializers_of
from torchtitan.tools.errors import UserError

_LAST_MATRICES = (
    "attention.wo",
    "attention.out",
    "feed_forward.w2",
    "moe.shared.w2",
    "moe.experts.w2",
    "moe.experts.bias2",
)
"""Last matrix of each residual branch of a layer, and biases with names of their own."""

_POST_NORMS = {
    "attention": "attention_post_norm",
    "feed_forward": "ffn_post_norm",
    "moe": "ffn_post_norm",
}
"""Branch → norm after it, which undoes a factor before it."""

_LAYER = re.compile(r"^layers\.(\d+)\.")


class Transfer(NamedTuple):
    """Initial values and rate of a parameter, in all layers."""

    std: float | None
    """Standard deviation of the initial values; None: the family's."""
    factor: float
    """Multiplies the family's initial values."""
    lr: float
    """Factor of the rate."""
    decays: bool


class _Facts(NamedTuple):
    shape: tuple[int, ...]
    std: float | None
    """None: not a random matrix."""
    constant: float | None
    is_embedding: bool
    is_matrix: bool
    """True if Muon updates it."""

    @property
    def decays(self) -> bool:
        """Norms, biases and embeddings do not decay."""
        return len(self.shape) > 1 and self.constant is None and not self.is_embedding


def transfers(model: BaseModel, base: BaseModel, *, muon: bool = False) -> dict[str, Transfer]:
    """Return name, with `*` for the layer's number → transfer relative to `base`.

    Args:
        base: the same family and number of layers, at the base width. Both models may be on the
            meta device.
        muon: Muon updates the matrices inside layers, and AdamW the rest.

    Raises:
        UserError: for a parameter that `base` lacks or that transfers differently from layer to
            layer, and for a residual branch whose last matrix is unknown.
    """
    facts, base_facts = _facts_of(model), _facts_of(base)
    depth = BASE_LAYERS / model.config.n_layers  # type: ignore[attr-defined]
    ends = _ends_of_branches(facts)
    first: dict[str, _Facts] = {}
    found: dict[str, Transfer] = {}
    starts_alike: dict[str, bool] = {}
    for name, own in facts.items():
        if name not in base_facts:
            raise UserError(
                f"--config dial: the family has no {name} at the base size, so its rate and "
                "initial values are unknown; choose another family"
            )
        role, of_base = _LAYER.sub("layers.*.", name), base_facts[name]
        start = first.setdefault(role, of_base).std
        transfer = _over_width(own, of_base, start, muon=muon)
        # A norm whose gain starts at 0 adds one to it: no factor of its weight scales the branch.
        if name in ends and not (own.constant == 0.0 and "norm" in name):
            transfer = _over_depth(transfer, depth, own)
        if found.setdefault(role, transfer) != transfer:
            raise UserError(
                f"--config dial: {name} grows with the width in another way than in other layers; "
                "choose another family"
            )
        is_alike = transfer.std is None or math.isclose(transfer.std, own.std or 0.0)
        starts_alike[role] = starts_alike.get(role, True) and is_alike
    return {
        role: one._replace(std=None) if starts_alike[role] else one for role, one in found.items()
    }


def transfers_depth(model: BaseModel) -> bool:
    """Return whether residual branches can be scaled: not if norms that add one end them."""
    facts = _facts_of(model)
    ends = _ends_of_branches(facts)
    return not any(facts[name].constant == 0.0 and "norm" in name for name in ends)


def _over_width(own: _Facts, base: _Facts, start: float | None, *, muon: bool) -> Transfer:
    """Return the transfer without depth. `start`: standard deviation in the base's first layer with
    the parameter."""
    if own.std is None or base.std is None or start is None:
        return Transfer(None, 1.0, 1.0, own.decays)
    if own.is_embedding:  # times what the family multiplies it by, it is the same at every width
        return Transfer(None, 1.0, own.std / base.std, own.decays)
    r_in = own.shape[-1] / base.shape[-1]
    r_out = own.shape[-2] / base.shape[-2]
    lr = 1 / r_in
    if muon and own.is_matrix:
        lr = math.sqrt(r_out / r_in * max(base.shape[-2:]) / max(own.shape[-2:]))
    return Transfer(start / (r_in if r_out == 1 else math.sqrt(r_in)), 1.0, lr, own.decays)


def _over_depth(transfer: Transfer, depth: float, own: _Facts) -> Transfer:
    """Return the transfer of a parameter that ends a residual branch."""
    lr = transfer.lr * depth
    if transfer.std is not None:
        return transfer._replace(std=transfer.std * depth, lr=lr)
    return transfer._replace(factor=depth if own.constant else 1.0, lr=lr)  # a norm, or a bias of 0


def _ends_of_branches(facts: Mapping[str, _Facts]) -> set[str]:
    """Return the parameters that multiply the result of a residual branch: its last matrix, or the
    norm after it. Raise `UserError` for a branch with neither."""
    branches = defaultdict(list)
    for name, one in facts.items():
        if number := _LAYER.match(name):
            part = name[number.end() :].partition(".")[0]
            branches[number[0], part].append((name, one))
    ends: set[str] = set()
    for (layer, part), parameters in branches.items():
        if all(one.std is None for _, one in parameters):
            continue  # a norm
        post_norm = f"{layer}{_POST_NORMS.get(part)}.weight"
        names = [name for name, _ in parameters if _is_last(name.removeprefix(layer))]
        found = [post_norm] if post_norm in facts else names
        if not found:
            raise UserError(
                f"--config dial does not know the last matrix of the residual branch {layer}{part};"
                f" it knows {', '.join(_LAST_MATRICES)}"
            )
        ends.update(found)
    return ends


def _is_last(name: str) -> bool:
    return any(name == last or name.startswith(f"{last}.") for last in _LAST_MATRICES)


def _facts_of(model: nn.Module) -> dict[str, _Facts]:
    found: dict[str, _Facts] = {}
    for prefix, module in model.named_modules():
        initializers = initializers_of(module)
        for name, parameter in module.named_parameters(recurse=False):
            initializer = initializers.get(name)
            found[f"{prefix}.{name}"] = _Facts(
                tuple(parameter.shape),
                initializer.std if isinstance(initializer, TruncatedNormal) else None,
                initializer.value if isinstance(initializer, Constant) else None,
                isinstance(module, nn.Embedding),
                is_matrix_of_layer(f"{prefix}.{name}", parameter),
            )
    return found


def initial_scale(found: Mapping[str, Transfer]) -> InitialScale.Config:
    """Return the converter that sets the initial values."""
    by_values = defaultdict(list)
    for name, one in found.items():
        if one.std is not None or not math.isclose(one.factor, 1.0):
            by_values[one.std, one.factor].append(name)
    scales = {
        f"scale_{number}": Scale(pattern=_pattern(names), std=std, factor=factor)
        for number, ((std, factor), names) in enumerate(by_values.items(), 1)
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
