"""Reading a configuration file or command line of another library, and finding out whose it is."""

import json
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan.config.migration.outcome import flat
from torchtitan.config.migration.torchtitan_files import values_in_python
from torchtitan.config.yaml_files import read_config_file
from torchtitan.tools.errors import UserError, os_errors_as
from torchtitan.tools.files import regular_file

KINDS = ("torchtune", "torchtitan", "axolotl", "llama_factory", "trl", "litgpt")

_MOST_BYTES = 2**20


class ForeignConfig(NamedTuple):
    """A configuration of another library."""

    kind: str
    values: dict[str, Any]
    """Dotted key → value."""
    command: str
    """Words before the arguments of a command line, in lower case; "" for other files."""


def read_foreign(path: Path, kind: str = "", name: str = "") -> ForeignConfig:
    """Read a file: YAML, JSON, TOML, Python (`name`: the function), or a shell script with one
    command.

    Raises:
        UserError: if it cannot be read, or its kind is not found and not given.
    """
    suffix = path.suffix.lower()
    if suffix in (".toml", ".py", ".json", ".sh", ".bash", ".txt"):
        text = _text(path)
        if suffix == ".toml":
            return ForeignConfig(kind or "torchtitan", flat(_parsed_toml(text, path)), "")
        if suffix == ".py":
            return ForeignConfig(kind or "torchtitan", values_in_python(text, name, str(path)), "")
        if suffix != ".json":
            return read_command(_words(text, path), kind)
        document = _parsed_json(text, path)
    else:
        document = read_config_file(path, str(path))
    values = flat(document)
    return ForeignConfig(kind or kind_of(values, str(path)), values, "")


def read_command(words: Sequence[str], kind: str = "") -> ForeignConfig:
    """Read a command line. A YAML file that it names (`--config`, or the only word) is read
    first."""
    start = next((place for place, word in enumerate(words) if word.startswith("--")), len(words))
    command = " ".join(words[:start])
    for word in words[:start]:
        name, is_variable, value = word.partition("=")
        if is_variable and name in ("MODULE", "CONFIG"):
            words = [*words, f"--{name.lower()}", value]
    given = _arguments(words[start:])
    files = [word for word in words[:start] if word.endswith((".yaml", ".yml", ".json"))]
    if str(given.get("config", "")).endswith((".yaml", ".yml")):
        files.append(str(given.pop("config")))
    for file in files:
        base = read_foreign(Path(file), kind)
        return ForeignConfig(kind or base.kind, {**base.values, **given}, command.lower())
    if not kind:
        kind = _kind_of_command(command.lower()) or kind_of(given, "the command")
    return ForeignConfig(kind, given, command.lower())


def kind_of(values: Mapping[str, Any], name: str) -> str:
    """Return the library whose names a file has. Raise `UserError` if none has them."""
    sections = {key.partition(".")[0] for key in values}
    if any(key.endswith("_component_") for key in values):
        return "torchtune"
    if "base_model" in values:
        return "axolotl"
    if {"stage", "finetuning_type"} & sections and "model_name_or_path" in values:
        return "llama_factory"
    if {"checkpoint_dir", "model_name", "out_dir"} & sections and "train" in sections:
        return "litgpt"
    if {"job", "training", "model"} <= sections or {"training", "parallelism"} <= sections:
        return "torchtitan"
    trainer = {"per_device_train_batch_size", "num_train_epochs", "learning_rate", "max_steps"}
    if "model_name_or_path" in values or len(trainer & sections) > 1:
        return "trl"
    raise UserError(
        f"{name} has the names of none of {', '.join(KINDS)}; name its library with --from"
    )


def _kind_of_command(command: str) -> str:
    marks = {
        "llamafactory": "llama_factory",
        "axolotl": "axolotl",
        "litgpt": "litgpt",
        "run_train.sh": "torchtitan",
        "torchtitan": "torchtitan",
        "trl ": "trl",
    }
    return next((kind for mark, kind in marks.items() if mark in command), "")


def _arguments(words: Sequence[str]) -> dict[str, Any]:
    """Return the values of `--key value ...`, `--key=value` and `--switch`."""
    values: dict[str, list[str]] = {}
    key = ""
    for word in words:
        if word.startswith("--"):
            name, is_assigned, value = word[2:].partition("=")
            key = name.replace("-", "_")
            values[key] = [value] if is_assigned else []
        elif key:
            values[key].append(word)
    single = {key: found[0] for key, found in values.items() if len(found) == 1}
    switches = {key: True for key, found in values.items() if not found}
    return flat({**values, **single, **switches})


def _text(path: Path) -> str:
    regular_file(path, str(path))
    with os_errors_as(f"{path} cannot be read"):
        if (n_bytes := path.stat().st_size) > _MOST_BYTES:
            raise UserError(f"{path} has {n_bytes:,} bytes; the limit is {_MOST_BYTES:,}")
        return path.read_text(encoding="utf-8")


def _parsed_toml(text: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from error


def _parsed_json(text: str, path: Path) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise UserError(f"{path} must map names to values")
    return document


def _words(text: str, path: Path) -> list[str]:
    """Return the words of the first command with arguments."""
    joined = re.sub(r"\\\n", " ", text)
    lines = [line for line in joined.splitlines() if not line.lstrip().startswith("#")]
    command = next((line for line in lines if " --" in line), "")
    command = command or next((line for line in lines if re.search(r"\.ya?ml\b", line)), "")
    if not command:
        raise UserError(f"{path} has no command with arguments such as --learning_rate 1e-4")
    try:
        return shlex.split(command, comments=True)
    except ValueError as error:
        raise UserError(f"{path}: the command is not closed: {error}") from error
