"""Weights of several models in memory once."""

import torch
from torch import nn


def share_weights(model: nn.Module, other: nn.Module) -> float:
    """Make the second model use the memory of the first one for equal parameters; return their
    share of its elements."""
    known = dict(model.named_parameters(remove_duplicate=False))
    n_shared = 0
    n_all = 0
    for name, parameter in list(other.named_parameters(remove_duplicate=False)):
        n_all += parameter.numel()
        own = known.get(name)
        if own is None or own.dtype != parameter.dtype or not torch.equal(own, parameter):
            continue
        owner, _, attribute = name.rpartition(".")
        setattr(other.get_submodule(owner), attribute, own)
        n_shared += parameter.numel()
    return n_shared / n_all
