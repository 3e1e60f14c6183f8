"""The device that a user names or describes."""

import math
from dataclasses import fields
from pathlib import Path

from torchtitan.config.configurable import fits, from_plain
from torchtitan.foresight.devices import DEVICES, Device
from torchtitan.foresight.this_machine import this_machine
from torchtitan.tools.errors import UserError, require
from torchtitan.tools.files import read_yaml


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
    document = read_yaml(path, option)
    types = {field.name: field.type for field in fields(Device)}
    if not isinstance(document, dict):
        raise UserError(f"{option} must map names to values: {', '.join(types)}")
    document = {str(name): value for name, value in document.items()}
    for name, value in document.items():
        if types.get(name) is float and fits(value, float):  # also 1e12, which YAML reads as a string
            document[name] = float(value)
            require(0 < document[name] < math.inf, f"{option}: {name}", value, "a number above 0")
    try:
        device: Device = from_plain(Device, document)
    except UserError as error:
        raise UserError(f"{option}: {str(error).removeprefix('configuration: ')}") from error
    return device
