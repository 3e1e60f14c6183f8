"""The options of the built-in configurations, known without importing torch, which takes
seconds."""

import dataclasses
import hashlib
import importlib
import json
import re
from collections.abc import Callable, Collection, Mapping
from copy import copy, deepcopy
from functools import cache, cached_property, partial
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, get_type_hints

from torchtitan.config.configurable import convert
from torchtitan.config.model_sizes import Sizes, check_decoder_sizes
from torchtitan.config.ranges import RANGES, check_range
from torchtitan.config.registry import REGISTRY_FILE, built_in_modules
from torchtitan.config.sections import (
    ActivationCheckpointConfig,
    CommConfig,
    DebugConfig,
    ParallelismConfig,
    TrainingConfig,
)
from torchtitan.config.values import nested

_PACKAGE = Path(__file__).resolve().parents[1]

TABLE = _PACKAGE / "assets/options.json"
"""Written by `python -m tests.options_table`: `sections` lists sections, or parts of them, with
their classes and help texts, and the type and the help text of each option (null: a field that is
not an option), `values` their default values; `configurations` has the numbers of sections and of
values of each configuration. It excludes configurations for a folder, whose options depend on
it."""

_DECLARATIONS = re.compile(
    r"^( *)class \w*Config\b[^\n]*\n"
    r"(?:(?!\1    (?:def|@|class) )(?:\1 +[^\n]*|\1\)[^\n]*|)\n)*",
    re.MULTILINE,
)
"""A configuration class up to its first method."""

_CHOICES = re.compile(r"^\w+ = Literal\[[^\]]*\]", re.MULTILINE)
"""A name for choices, which fields of configurations have as their type."""

_BUILDERS = (
    "components/optim/optimizer.py",
    "models/common/layer_types.py",
    "models/common/recipes.py",
    "models/families.py",
)
"""Further files with defaults and sections of configurations."""


_Checked = TrainingConfig | ActivationCheckpointConfig | CommConfig | DebugConfig

SECTIONS: Mapping[str, type[_Checked]] = {
    "training": TrainingConfig,
    "activation_checkpoint": ActivationCheckpointConfig,
    "comm": CommConfig,
    "debug": DebugConfig,
}
"""Sections of every run that check their values without torch."""


class Option(NamedTuple):
    """An option, or a field that is not an option, whose declared type is `Any`."""

    declared: object
    default: object
    text: str
    hidden: bool


class KnownConfiguration:
    """The options of a built-in configuration, according to the table."""

    def __init__(self, table: Mapping[str, Any], numbers: list[list[int]]):
        self._source = table["source"]
        self.fields: dict[str, Option] = {}
        self._sections: dict[str, tuple[str | None, str]] = {}
        """Class (module:name) and help text of each section; None: not of a dataclass."""
        for section, values in numbers:
            part = table["sections"][section]
            self._sections |= part["sections"]
            spelled = {key: option[0] for key, option in part["options"].items() if option}
            types = _types(tuple(spelled.items()))
            rows = zip(part["options"].items(), table["values"][values], strict=True)
            for (key, option), default in rows:
                text = option[1] if option else ""
                self.fields[key] = Option(types.get(key, Any), default, text, hidden=not option)

    @property
    def options(self) -> list[str]:
        """The names of the options."""
        return [key for key, field in self.fields.items() if not field.hidden]

    @property
    def types(self) -> dict[str, object]:
        """The declared types of the options, and `Any` for fields that are not options."""
        return {key: field.declared for key, field in self.fields.items()}

    def value(self, key: str, given: Mapping[str, object]) -> Any:
        """Return the value of a field: the one `given` by key, which fits its type, or the default
        value."""
        field = self.fields[key]
        return convert(given[key], field.declared) if key in given else deepcopy(field.default)

    def section(self, name: str, given: Mapping[str, object]) -> dict[str, Any]:
        """Return the values of a section's fields, by name, as `value` does."""
        prefix = f"{name}."
        return {
            key.removeprefix(prefix): self.value(key, given)
            for key in self.fields
            if key.startswith(prefix)
        }

    def parallelism(self, given: Mapping[str, object]) -> ParallelismConfig:
        """Return the section `parallelism`, with the values `given` by key."""
        return ParallelismConfig(**self.section("parallelism", given))

    def has(self, names: Collection[str]) -> bool:
        """Return whether the table has all of these options, or components with options."""
        return all(name in self.fields or self._sections.get(name, ("", ""))[0] for name in names)

    def module_of(self, name: str) -> str:
        """Return the module with the class of a component; "": it has no options."""
        return str(self._sections.get(name, ("", ""))[0] or "").partition(":")[0]

    def component(self, name: str, given: Mapping[str, object]) -> Any:
        """Return the configuration of a component, or the value of an option, with the values
        `given` by key. This imports only the modules of the component and its parts."""
        if name in self.fields:
            return self.value(name, given)
        prefix = f"{name}."
        parts = dict.fromkeys(
            key.removeprefix(prefix).partition(".")[0]
            for key in self.fields
            if key.startswith(prefix)
        )
        module, _, path = str(self._sections[name][0]).partition(":")
        config: Any = attrgetter(path)(importlib.import_module(module))
        return config(**{part: self.component(f"{prefix}{part}", given) for part in parts})

    @cached_property
    def is_current(self) -> bool:
        """Return whether no configuration has been edited since the table was written. Default
        values that other code computes may differ."""
        return bool(self._source == _digest_at_first_use())

    def stand_in(self) -> object:
        """Return an instance of dataclasses with the same options, whose help is the same."""
        document = nested({key: self.fields[key] for key in self.options})
        return self._stand_in(document, "")()

    def _stand_in(self, document: Mapping[str, Any], section: str) -> type:
        fields = []
        for name, item in document.items():
            key = f"{section}.{name}".lstrip(".")
            make: Callable[[], object]
            if isinstance(item, Option):
                kind, text = item.declared, item.text
                make = partial(copy, item.default)
            else:
                kind = make = self._stand_in(item, key)
                _, text = self._sections.get(key, (None, ""))
            default = dataclasses.field(default_factory=make, metadata={"help": text})
            fields.append((name, kind, default))
        return dataclasses.make_dataclass("StandIn", fields, kw_only=True)


@cache
def _types(spelled: tuple[tuple[str, str], ...]) -> Mapping[str, object]:
    """Return types by key, given pairs of a key and a type as Python spells it."""
    holder = type("Types", (), {"__annotations__": dict(spelled)})
    return get_type_hints(holder, localns={"Literal": Literal})


def check_sections(known: KnownConfiguration, given: Mapping[str, object]) -> None:
    """Raise `UserError` for a value that one of `SECTIONS` refuses by itself, or that is outside
    its range, or for sizes that no decoder can have. `given` has values by key, which fit their
    types."""
    is_decoder = all(f"model.{name}" in known.fields for name in get_type_hints(Sizes))
    if is_decoder and any(key.startswith("model.") for key in given):
        check_decoder_sizes(SimpleNamespace(**known.section("model", given)))
    for name, section in SECTIONS.items():
        if any(key.startswith(f"{name}.") for key in given):
            section(**known.section(name, given)).validate()
    if any(key.startswith("parallelism.") for key in given):
        known.parallelism(given).check_values()
    for section_name, options in RANGES.items():
        for option in options:
            if (key := f"{section_name}.{option}") in given and key in known.fields:
                check_range(section_name, option, known.value(key, given))


def known_configuration(module: str, config: str) -> KnownConfiguration | None:
    """Return the options of a configuration, or None if the table does not have it: modules outside
    of the package may have any options."""
    if module not in built_in_modules():
        return None
    table = _table(TABLE)
    configs = table["configurations"].get(module, {})
    numbers = configs.get(config, configs.get(f"{module}_{config}"))
    return KnownConfiguration(table, numbers) if numbers is not None else None


@cache
def _table(file: Path) -> Mapping[str, Any]:
    table: Mapping[str, Any] = json.loads(file.read_text())
    return table


@cache
def _digest_at_first_use() -> str:
    return source_digest()


def source_digest() -> str:
    """Return the digest of the code that declares options: configuration classes, their choices,
    configuration functions and flavors."""
    whole = files_of_declarations()
    files = sorted(_PACKAGE.rglob("*.py"))
    found = [part for file in files for part in declaring_parts(file, whole)]
    return hashlib.sha256("\n".join(found).encode()).hexdigest()[:16]


def files_of_declarations() -> set[Path]:
    """Return the files that declare options as a whole."""
    folders = built_in_modules().values()
    registries = {folder / name for folder in folders for name in (REGISTRY_FILE, "__init__.py")}
    return registries | {_PACKAGE / name for name in _BUILDERS}


def declaring_parts(file: Path, whole: Collection[Path]) -> list[str]:
    """Return the parts of a source file that declare options: all of it if it is in `whole`."""
    text = file.read_text()
    if file in whole:
        return [text]
    return [match[0] for match in _DECLARATIONS.finditer(text)] + _CHOICES.findall(text)
