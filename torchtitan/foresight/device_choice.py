"""The device that a user names or describes."""

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from torchtitan.config.configurable import from_plain
from torchtitan.foresight.devices import DEVICES, Device
from torchtitan.foresight.this_machine import this_machine
from torchtitan.tools.errors import UserError


def device_named(name: str, world_size: int) -> Device:
    """Return a device of the table, or `cpu`: one of `world_size` processes on this machine. Raise `UserError` for
    another name."""
    if name == "cpu":
        return this_machine(world_size)
    if name not in DEVICES:
        raise UserError(
            f"unknown device '{name}' (there are: {', '.join([*DEVICES, 'cpu'])}); describe another one in a "
            "--device_file"
        )
    return DEVICES[name]


def device_of_gpu(name: str) -> Device | None:
    """Return the device of the table with a GPU's own name, such as NVIDIA H100 80GB HBM3. The table has no PCIe cards,
    which are slower (H100 PCIe, H100 NVL)."""
    words = set(name.upper().split())
    return None if words & {"PCIE", "NVL"} else next((DEVICES[key] for key in DEVICES if key.upper() in words), None)


def device_in_file(path: Path) -> Device:
    """Read a device from a YAML file with the fields of `Device`. Raise `UserError` for a file without them."""
    option = f"--device_file '{path}'"
    try:
        document: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{option} cannot be read as YAML: {' '.join(str(error).split())}") from error
    types = {field.name: field.type for field in fields(Device)}
    if not isinstance(document, dict):
        raise UserError(f"{option} must map names to values: {', '.join(types)}")
    values = {str(name): _number(x) if types.get(name) is float else x for name, x in document.items()}
    try:
        device: Device = from_plain(Device, values)
    except UserError as error:
        raise UserError(f"{option}: {str(error).removeprefix('configuration: ')}") from error
    for name, value in document.items():
        if types[name] is float and not 0 < values[name] < math.inf:
            raise UserError(f"{option}: {name} must be a number above 0, not {value!r}")
    return device


def _number(value: Any) -> float:
    try:  # YAML reads 1e12 without a dot as a string
        return math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return math.nan
