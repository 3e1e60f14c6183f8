"""Reading a YAML file of keys and values, which comes from anywhere."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from torchtitan.tools.errors import UserError
from torchtitan.tools.files import open_regular, regular_file

_MAX_BYTES = 2**20
_MAX_NODES = 100_000
_MAX_DIGITS = 100
"""Limits of a configuration file, about 100 times the needs of a resolved configuration."""


class _PlainLoader(yaml.SafeLoader):
    """Refuse keys that are not words, and duplicate keys: YAML would silently keep the last
    value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _wrong_node("a key is a list or a mapping", key)
        keys = [key.value for key, _ in node.value]
        if twice := {key for key, count in Counter(keys).items() if count > 1 and key != "<<"}:
            raise _wrong_node(f"{', '.join(sorted(twice))} is repeated", node)
        return super().construct_mapping(node, deep)


def _wrong_node(problem: str, node: yaml.Node) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark)


def read_config_file(path: Path, name: str) -> dict[str, Any]:
    """Return the content of a YAML file of keys and values, called `name` in messages. Raise
    `UserError` if it has none."""
    regular_file(path, name)
    if path.suffix.lower() == ".toml":
        raise UserError(
            f"{name} is TOML; torchtitan migrate {path} --out config.yaml rewrites it as YAML"
        )
    try:
        with open_regular(path, name) as file:
            n_bytes = os.fstat(file.fileno()).st_size
            text = file.read() if n_bytes <= _MAX_BYTES else b""
        document = _load_yaml(text.decode("utf-8"))
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not a text file in UTF-8") from error
    except RecursionError as error:
        raise UserError(f"{name} is nested too deeply") from error
    # also a date or a number that Python refuses
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise UserError(f"{name} is not valid YAML: {' '.join(str(error).split())}") from error
    if n_bytes > _MAX_BYTES:
        raise UserError(f"{name} has {n_bytes:,} bytes; the limit is {_MAX_BYTES:,}")
    if document is None:
        raise UserError(f"{name} is empty")
    if not isinstance(document, dict):
        raise UserError(f"{name} must map names to values, not be a {type(document).__name__}")
    return document


def _load_yaml(text: str) -> object:
    loader = _PlainLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check_expanded(node, {})
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _check_expanded(node: yaml.Node, known: dict[int, int]) -> int:
    """Return the number of nodes after expanding aliases (`*name`). Raise `YAMLError` for a
    recursive or huge node."""
    if known.setdefault(id(node), 0):
        return known[id(node)]
    children = node.value if isinstance(node, yaml.CollectionNode) else []
    if isinstance(node, yaml.MappingNode):
        children = [part for pair in children for part in pair]
    elif node.tag.endswith(":int") and len(node.value) > _MAX_DIGITS:
        raise _wrong_node(f"a number has more than {_MAX_DIGITS} digits", node)
    size = 1
    for child in children:
        if known.get(id(child)) == 0:
            raise _wrong_node("a value contains itself", child)
        size += _check_expanded(child, known)
    if size > _MAX_NODES:
        raise _wrong_node(f"it has more than {_MAX_NODES} values after expanding aliases", node)
    known[id(node)] = size
    return size
