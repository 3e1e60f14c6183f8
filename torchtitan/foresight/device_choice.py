"""The device that a user names or describes."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import yaml

from torchtitan.foresight.devices import DEVICES, Device
from torchtitan.foresight.this_machine import this_machine
from torchtitan.tools.errors import UserError

_OPTIONAL = {field.name for field in dataclasses.fields(Device) if field.default is not dataclasses.MISSING}


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
    """Return the device of the table with a GPU's own name, such as NVIDIA H100 80GB HBM3."""
    words = set(name.upper().split())
    return next((device for key, device in DEVICES.items() if key.upper() in words), None)


def device_in_file(path: Path) -> Device:
    """Read a device from a YAML file with the fields of `Device`. Raise `UserError` for a file without them."""
    try:
        document: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"--device_file '{path}' cannot be read as YAML: {reason}") from error
    types = {field.name: field.type for field in dataclasses.fields(Device)}
    if not isinstance(document, dict):
        raise UserError(f"--device_file '{path}' must map names to values: {', '.join(types)}")
    unknown, missing = set(document) - set(types), set(types) - _OPTIONAL - set(document)
    for problem, names in (("unknown", unknown), ("missing", missing)):
        if names:
            raise UserError(f"--device_file '{path}': {problem} {', '.join(map(str, sorted(names, key=str)))}")
    return Device(**{name: _value(path, name, types[name], value) for name, value in document.items()})


def _value(path: Path, name: str, kind: Any, value: Any) -> Any:
    if kind is not float:
        if isinstance(value, kind):
            return value
        raise UserError(f"--device_file '{path}': {name} must be of type {kind.__name__}, not {value!r}")
    try:  # YAML reads 1e12 without a dot as a string
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not 0 < number < math.inf:
        raise UserError(f"--device_file '{path}': {name} must be a number above 0, not {value!r}")
    return number
