"""Tests of sharded tensors and modules. They do not import the modules of DTensor and FSDP, which
takes half a second that a run in one process need not wait: without the module, there is no
instance."""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_dtensor(x: object) -> "TypeIs[DTensor]":
    """Return whether `x` is a DTensor."""
    return _is_instance(x, "torch.distributed.tensor", "DTensor")


def is_fsdp_module(x: object) -> "TypeIs[FSDPModule]":
    """Return whether `x` is a unit of FSDP or DDP."""
    return _is_instance(x, "torch.distributed.fsdp", "FSDPModule")


def _is_instance(x: object, module: str, name: str) -> bool:
    # without the name while another thread imports the module
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(x, kind)
