"""The table torchtitan/assets/options.json: the options of the built-in configurations (`python -m
tests.options_table` writes it)."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from itertools import groupby
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from tyro._docstrings import get_callable_description, get_field_docstring

from torchtitan.config.configurable import Configurable, config_key, leaves
from torchtitan.config.manager import registered_name
from torchtitan.config.option_table import TABLE, source_digest
from torchtitan.config.registry import (
    built_in_modules,
    list_module,
    load_config_function,
    needs_assets,
)
from torchtitan.config.values import is_hidden, is_unnamed, types_by_key


def configurations() -> Iterator[tuple[str, str, Any]]:
    """Yield module, name and configuration of those that need no folder."""
    for module, folder in built_in_modules().items():
        for name in list_module(module, folder).configs:
            function = load_config_function(module, name)
            if not needs_assets(function):
                yield module, name, function().registered(registered_name(function))


def spelled(declared: Any) -> str:
    """Return Python's spelling of a type, without annotations."""
    arguments = get_args(declared)
    origin = get_origin(declared)
    if origin is Annotated:
        return spelled(arguments[0])
    if origin in (Union, UnionType):
        return " | ".join(map(spelled, arguments))
    if origin is Literal:
        return f"Literal{list(arguments)!r}"
    if origin is list:
        return f"list[{spelled(arguments[0])}]"
    assert isinstance(declared, type)
    return "None" if declared is NoneType else declared.__name__


def texts_of(value: Any, key: str = "") -> dict[str, str]:
    """Return the help texts of all options and sections by key, as tyro finds them."""
    texts: dict[str, str] = {}
    if dataclasses.is_dataclass(value):
        hints = get_type_hints(type(value), include_extras=True)
        options = [one for one in dataclasses.fields(value) if not is_hidden(hints[one.name])]
        for field in options:
            item = getattr(value, field.name)
            name = "" if is_unnamed(hints[field.name]) else field.name
            text = field.metadata.get("help") or get_field_docstring(type(value), field.name, ())
            texts |= _texts_below(item, ".".join(filter(None, (key, name))), text)
    elif isinstance(value, Mapping):
        for name, item in value.items():
            texts |= _texts_below(item, f"{key}.{name}", None)
    elif isinstance(value, list) and all(isinstance(item, Configurable.Config) for item in value):
        for item in value:
            texts |= _texts_below(item, f"{key}.{config_key(item)}", None)
    return texts


def _texts_below(item: Any, key: str, text: str | None) -> dict[str, str]:
    if text is None and dataclasses.is_dataclass(item):
        text = get_callable_description(type(item))
    return {key: " ".join((text or "").split()), **texts_of(item, key)}


def classes_of(value: Any, key: str = "") -> dict[str, str]:
    """Return the classes of all sections by key, each as module:name."""
    own = {}
    if dataclasses.is_dataclass(value):
        own = {key: f"{type(value).__module__}:{type(value).__qualname__}"}
        items = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, list) and all(isinstance(item, Configurable.Config) for item in value):
        items = {config_key(item): item for item in value}
    else:
        items = value if isinstance(value, Mapping) else {}
    found: dict[str, str] = {}
    for name, item in items.items():
        found |= classes_of(item, f"{key}.{name}".lstrip("."))
    return found | own


def table() -> dict[str, Any]:
    sections: dict[str, int] = {}
    values: dict[str, int] = {}
    numbers: dict[str, dict[str, list[list[int]]]] = {}
    for module, name, config in configurations():
        types, texts = types_by_key(config, type(config)), texts_of(config)
        classes = classes_of(config)
        found = leaves(config.to_dict())
        pairs = []
        for section, group in groupby(found, lambda key: key.rpartition(".")[0]):
            options = {
                key: None if is_hidden(types.get(key)) else [spelled(types[key]), texts[key]]
                for key in group
            }
            parents = [section[:end] for end, letter in enumerate(section) if letter == "."]
            part = {
                "sections": {
                    parent: [classes.get(parent), texts.get(parent, "")]
                    for parent in (*parents, section)
                },
                "options": options,
            }
            rows = [found[key] for key in options]
            pairs.append(
                [
                    sections.setdefault(json.dumps(part), len(sections)),
                    values.setdefault(json.dumps(rows), len(values)),
                ]
            )
        numbers.setdefault(module, {})[name] = pairs
    return {
        "source": source_digest(),
        "sections": [json.loads(text) for text in sections],
        "values": [json.loads(text) for text in values],
        "configurations": numbers,
    }


def as_text(table: dict[str, Any]) -> str:
    """Return the table as JSON with a line per option, list of values, and configuration."""
    sections = ",\n".join(
        json.dumps(section).replace('], "', '],\n  "') for section in table["sections"]
    )
    values = ",\n".join(map(json.dumps, table["values"]))
    modules = ",\n".join(
        f"{json.dumps(module)}: {{\n"
        + ",\n".join(
            f"  {json.dumps(name)}: {json.dumps(pairs)}" for name, pairs in configs.items()
        )
        + "}"
        for module, configs in table["configurations"].items()
    )
    return (
        f'{{"source": {json.dumps(table["source"])},\n'
        f'"sections": [\n{sections}],\n'
        f'"values": [\n{values}],\n'
        f'"configurations": {{\n{modules}}}}}\n'
    )


if __name__ == "__main__":
    TABLE.write_text(as_text(table()))
