"""The part of a model's products that converters compute in 8 or 4 bits, and the work with it.

Small dry runs leave these converters out, since their patterns name layers of the whole model, and
a dry run counts block formats as plain products. `narrowed` then replaces the part of the bfloat16
products that the converters select.
"""

import logging
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from torchtitan.components.quantization.float8 import Float8LinearConverter
from torchtitan.components.quantization.narrow import MXFP8, NVFP4, BlockConverter
from torchtitan.components.quantization.wide_layers import NarrowConverter
from torchtitan.dry_run.work_tracker import Kernel
from torchtitan.foresight.devices import Device
from torchtitan.foresight.time import FLOAT8_CASTS, Message
from torchtitan.protocols.converter import HEAD
from torchtitan.protocols.experts import StackedExperts
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import without_logs
from torchtitan.trainer import Trainer

NARROW = Float8LinearConverter.Config | BlockConverter.Config
"""Configurations of converters to narrow types."""


class _Format(NamedTuple):
    name: str
    """As in `Device.narrow_formats`."""
    dtype: torch.dtype
    per_bfloat16: int
    """Numbers in the space of one in bfloat16."""


_FORMATS: dict[type, _Format] = {
    Float8LinearConverter.Config: _Format("float8", torch.float8_e4m3fn, 2),
    MXFP8.Config: _Format("mxfp8", torch.float8_e4m3fn, 2),
    NVFP4.Config: _Format("nvfp4", torch.float4_e2m1fn_x2, 4),
}

_Other = TypeVar("_Other")


class NarrowPart(NamedTuple):
    """Products of a converter, as parts of the bfloat16 products that converters before it
    leave."""

    format: _Format
    of_layers: float
    """Without the head."""
    of_model: float
    """With the head."""
    gathers_float8: bool
    """FSDP gathers the weights in float8."""

    @property
    def is_in_dry_runs(self) -> bool:
        """True if a dry run of the converted model records these products in their type."""
        return self.format.name == "float8"


def check_kernels(config: Trainer.Config, device: Device) -> None:
    """Raise `UserError` if a run on a device would emulate or refuse narrow products."""
    for one in config.model_converters:
        if not isinstance(one, NARROW):
            continue
        name = _FORMATS[type(one)].name
        if one.emulate:
            raise UserError(
                f"{one.option}.emulate is set, and the time of emulated products is not predicted; "
                "unset it to predict a device with the kernels"
            )
        if name not in device.narrow_formats:
            known = ", ".join(device.narrow_formats) or "none"
            raise UserError(
                f"{one.option}: {device.name} has no kernels for {name} (for: {known}); choose "
                "another device, or remove the converter"
            )


def narrow_parts(config: Trainer.Config, whole: nn.Module) -> tuple[NarrowPart, ...]:
    """Return the products of each converter to a narrow type in a plain model on the meta device.
    Raise `UserError` for patterns without layers, and for layers that every device emulates."""
    left = {
        name: _size_of(layer)
        for name, layer in whole.named_modules()
        if isinstance(layer, NarrowConverter.layer_types)
    }
    parts = []
    for one in config.model_converters:
        if not isinstance(one, NARROW):
            continue
        converter: NarrowConverter = one.build()
        with without_logs(logging.INFO):
            selected = converter.select(whole)
        for name, layer in selected.items():
            if not converter.has_kernels(layer):
                raise UserError(
                    f"{one.option}: {name} is emulated on every device, and the time of emulated "
                    f"products is not predicted; exclude it ({one.option}.exclude)"
                )
        narrow = sum(left.pop(name, 0.0) for name in selected)
        model = narrow + sum(left.values())
        gathers = isinstance(one, Float8LinearConverter.Config) and one.fsdp_float8_all_gather
        of_layers = narrow / (model - left.get(HEAD, 0.0))
        parts.append(NarrowPart(_FORMATS[type(one)], of_layers, narrow / model, gathers))
    return tuple(parts)


def narrowed(
    work: Iterable[tuple[Kernel | Message | _Other, float]],
    format: _Format,
    part: float,
    *,
    gathers: bool = False,
) -> Iterator[tuple[Kernel | Message | _Other, float]]:
    """Yield work in which a part of each product in bfloat16 is a product in a narrow type, with
    kernels that cast; with `gathers`, FSDP gathers this part in float8."""
    for one, calls in work:
        changed: list[Kernel | Message] = []
        if isinstance(one, Kernel) and one.kind == "product" and one.dtype == torch.bfloat16:
            traffic = round(FLOAT8_CASTS * one.n_bytes)
            n_bytes = one.n_bytes // format.per_bfloat16
            changed = [
                one._replace(kind="other", flops=0, n_bytes=traffic),
                one._replace(dtype=format.dtype, n_bytes=n_bytes),
            ]
        elif isinstance(one, Message) and one.role == "FSDP" and one.kind == "all-gather":
            changed = [one._replace(n_bytes=one.n_bytes // 2)] if gathers else []
        yield from ((each, calls * part) for each in changed)
        yield one, calls * (1 - part if changed else 1)


def _size_of(layer: nn.Module) -> float:
    """Return the number of weights that multiply each token."""
    if not isinstance(layer, StackedExperts):
        return sum(weight.numel() for weight in layer.parameters() if weight.ndim == 2)
    active = getattr(layer, "active_fraction", 1.0)
    return active * sum(layer.get_parameter(name).numel() for name in layer.matrices)
