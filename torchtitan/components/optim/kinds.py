"""The optimizers that `--optimizer.name` selects, a row each."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from torchtitan.components.optim.adamw_few_bits import make_adamw_few_bits
from torchtitan.components.optim.adamw_offload import AdamWOffload
from torchtitan.components.optim.bf16_weights import RoundedAdamW, Rounding
from torchtitan.components.optim.dion import Dion
from torchtitan.components.optim.muon import Muon
from torchtitan.components.optim.own_state import AdamSettings, Groups
from torchtitan.components.optim.schedule_free import ScheduleFreeAdamW
from torchtitan.components.optim.soap import SOAP
from torchtitan.components.optim.without_compiler import without_compiler
from torchtitan.distributed.compile import check_c_compiler
from torchtitan.tools.torchao import check_torchao

OptimizerName = Literal[
    "AdamW",
    "AdamW8bit",
    "AdamW4bit",
    "AdamWOffload",
    "Adam",
    "SGD",
    "Muon",
    "Dion",
    "SOAP",
    "ScheduleFreeAdamW",
]
"""The keys of `KINDS`."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Hyperparameters of `Optimizer.Config`."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    momentum: float
    """0 for an optimizer that has none."""

    implementation: Literal["fused", "foreach", "for-loop"]
    rounding: Rounding
    rank_fraction: float
    basis_interval: int


@dataclass(frozen=True, kw_only=True)
class Kind:
    """An optimizer of the table."""

    make: Callable[[Groups, Settings], torch.optim.Optimizer]
    """Makes it for parameter groups with peak rates and weight decays."""

    for_matrices: bool = False
    """True if it updates only matrices in layers, and AdamW all other parameters."""

    momentum: float | None = None
    """Default of `momentum`; None: it has none."""

    rounds: bool = False
    """True if it can round updates of bfloat16 weights otherwise than to the nearest number."""

    skips: bool = False
    """True if its fused updates can be skipped by the device."""

    averages: bool = False
    """True if it evaluates averages of the weights, so that nothing else should average them, nor
    the learning rate decay."""

    needs_float32: str = ""
    """Operation that needs float32 weights, as in "computes eigenvectors"; empty: none."""

    offloads: bool = True
    """True if it supports weights that FSDP keeps in CPU memory."""

    check: Callable[[str], None] = lambda option: None
    """Raises `UserError` if this machine lacks what it needs; `option` selects it."""


def make_adam(
    groups: Groups,
    optimizer: Settings,
    *,
    kind: type[torch.optim.AdamW] | type[torch.optim.Adam] = torch.optim.AdamW,
) -> torch.optim.Optimizer:
    """Return AdamW, or Adam."""
    if optimizer.rounding != "nearest":
        return RoundedAdamW(groups, rounding=optimizer.rounding, **_adam(optimizer))
    adam = without_compiler(kind)
    fused, foreach = (optimizer.implementation == name for name in ("fused", "foreach"))
    return adam(groups, **_adam(optimizer), fused=fused, foreach=foreach)


def _make_few_bits(
    groups: Groups, optimizer: Settings, *, bits: Literal[4, 8]
) -> torch.optim.Optimizer:
    return make_adamw_few_bits(groups, bits=bits, rounding=optimizer.rounding, **_adam(optimizer))


def _make_sgd(groups: Groups, optimizer: Settings) -> torch.optim.Optimizer:
    # Never fused, since PyTorch 2.13 has no fused SGD for sharded parameters.
    foreach = optimizer.implementation != "for-loop"
    sgd = without_compiler(torch.optim.SGD)
    return sgd(groups, lr=optimizer.lr, momentum=optimizer.momentum, foreach=foreach)


def _make_muon(groups: Groups, optimizer: Settings) -> torch.optim.Optimizer:
    # Updates are scaled to AdamW's size, so that both can use the same learning rate.
    return Muon(
        groups,
        lr=optimizer.lr,
        momentum=optimizer.momentum,
        adjust_lr_fn="match_rms_adamw",
        rounding=optimizer.rounding,
    )


def _make_dion(groups: Groups, optimizer: Settings) -> torch.optim.Optimizer:
    return Dion(
        groups,
        lr=optimizer.lr,
        momentum=optimizer.momentum,
        rank_fraction=optimizer.rank_fraction,
    )


def _make_soap(groups: Groups, optimizer: Settings) -> torch.optim.Optimizer:
    return SOAP(groups, **_adam(optimizer), basis_interval=optimizer.basis_interval)


def _adam(optimizer: Settings) -> AdamSettings:
    betas = (optimizer.beta1, optimizer.beta2)
    return {"lr": optimizer.lr, "betas": betas, "eps": optimizer.eps}


def _check_few_bits(option: str) -> None:
    check_torchao(option)
    check_c_compiler(f"{option} updates weights in compiled code, which")


KINDS: Mapping[str, Kind] = {
    "AdamW": Kind(make=make_adam, rounds=True, skips=True),
    "AdamW8bit": Kind(make=partial(_make_few_bits, bits=8), rounds=True, check=_check_few_bits),
    "AdamW4bit": Kind(make=partial(_make_few_bits, bits=4), rounds=True, check=_check_few_bits),
    "AdamWOffload": Kind(make=lambda groups, optimizer: AdamWOffload(groups, **_adam(optimizer))),
    "Adam": Kind(make=partial(make_adam, kind=torch.optim.Adam), skips=True),
    "SGD": Kind(make=_make_sgd, momentum=0.0),
    "Muon": Kind(make=_make_muon, for_matrices=True, momentum=0.95, rounds=True),
    "Dion": Kind(
        make=_make_dion,
        for_matrices=True,
        momentum=0.95,
        needs_float32="computes QR decompositions",
        offloads=False,
    ),
    "SOAP": Kind(
        make=_make_soap,
        for_matrices=True,
        needs_float32="computes eigenvectors",
        offloads=False,
    ),
    "ScheduleFreeAdamW": Kind(
        make=lambda groups, optimizer: ScheduleFreeAdamW(groups, **_adam(optimizer)),
        averages=True,
        needs_float32="averages weights by small steps",
    ),
}


def names_where(has: Callable[[Kind], bool]) -> str:
    """Return the names of the optimizers for which `has` is true, as text."""
    return ", ".join(name for name, kind in KINDS.items() if has(kind))


def is_matrix_of_layer(name: str, parameter: Tensor) -> bool:
    """Return whether a parameter is a matrix, or matrices of stacked experts, other than the
    embedding, the output head and routers of tokens."""
    if re.search(r"(^|\.)experts\.w\d+$", name):
        return parameter.ndim >= 3
    return parameter.ndim == 2 and not re.search(r"(^|\.)(tok_embeddings|output|router)\.", name)
