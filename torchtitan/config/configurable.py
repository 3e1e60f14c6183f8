"""`Configurable`: a class and, beside it, the dataclass that configures and builds it."""

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, get_args, get_origin, get_type_hints

from torchtitan.config.value_types import describe, fits
from torchtitan.tools.errors import UserError


class Configurable:
    """A component that is built from a nested `Config` dataclass.

    A subclass defines `class Config(Parent.Config)` as a `@dataclass(kw_only=True, slots=True)`; a subclass that
    needs no field of its own leaves it out and gets a fresh one derived from its parent's, so that
    `Child.Config().build()` always makes a `Child`. A string literal under each field documents it and becomes
    its help text on the command line.

    Raises:
        TypeError: when a class is defined whose `Config` is not such a dataclass.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config:
        """Configuration of a component."""

        _owner: ClassVar[type["Configurable"]]

        def build(self, **runtime: Any) -> Any:
            """Construct the component this configuration belongs to, as `Owner(copy, **runtime)`.

            It gets a copy of the configuration, so that what changes in one of the two does not change the other.

            Raises:
                torchtitan.tools.errors.UserError: for values that cannot be used, see `validate`.
            """
            self.validate()
            return self._owner(copy.deepcopy(self), **runtime)

        def validate(self) -> None:
            """Find mistakes in the values, before anything is built; `build` calls it.

            Raises:
                torchtitan.tools.errors.UserError: for a value that cannot be used.
            """

        def to_dict(self) -> dict[str, Any]:
            """The configuration as JSON-ready values: nested dictionaries, lists, strings, numbers, booleans, None."""
            return {field.name: to_plain(getattr(self, field.name)) for field in dataclasses.fields(self)}

        @classmethod
        def from_dict(cls, document: Mapping[str, Any]) -> Self:
            """The configuration that `to_dict` gave as `document`; nested dictionaries become nested dataclasses.

            A field that is not there has its default: it is younger than the document.

            Raises:
                torchtitan.tools.errors.UserError: for a key that is no field, a value that cannot be used, and a field
                    without default that is not there.
            """
            config: Self = from_plain(cls, document)
            config.validate()
            return config

    def __init__(self, config: "Configurable.Config"):
        self.config = config

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "Config" not in cls.__dict__:
            cls.Config = _derive_config(cls)  # type: ignore[misc,assignment]
        _check_config(cls)
        cls.Config._owner = cls


Configurable.Config._owner = Configurable


def config_key(config: Configurable.Config) -> str:
    """The name under which one of a list of configurations appears on the command line."""
    return config._owner.__name__.lower()


def to_plain(value: Any) -> Any:
    """`value` as JSON-ready values; raises `TypeError` for what has no such form."""
    if callable(to_dict := getattr(value, "to_dict", None)):
        return to_dict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise TypeError(f"{value!r} of type {type(value).__name__} has no JSON form and cannot be a configuration value")


def from_plain(cls: type, document: Mapping[str, Any], prefix: str = "") -> Any:
    """The dataclass `cls` with the values that `to_plain` gave; see `Configurable.Config.from_dict`."""
    if not isinstance(document, Mapping):
        raise UserError(f"configuration: '{prefix.removesuffix('.')}' is {document!r}, and must hold keys")
    fields, types = dataclasses.fields(cls), get_type_hints(cls)
    names = {field.name for field in fields}
    if unknown := sorted(prefix + key for key in document if key not in names):
        raise UserError(f"configuration: unknown keys {', '.join(unknown)}")
    required = [f for f in fields if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING]
    if missing := [prefix + field.name for field in required if field.name not in document]:
        raise UserError(f"configuration: missing keys {', '.join(missing)}")
    return cls(**{name: _field_value(types[name], value, f"{prefix}{name}") for name, value in document.items()})


def _field_value(declared: Any, value: Any, key: str) -> Any:
    if dataclasses.is_dataclass(declared):
        assert isinstance(declared, type)
        return from_plain(declared, value, f"{key}.")
    if not fits(value, declared, quoted=False):
        raise UserError(f"configuration: '{key}' is {value!r}, and must be {describe(declared)}")
    return value


def leaves(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a nested dictionary by their dotted keys."""
    found: dict[str, Any] = {}
    for name, value in document.items():
        found |= leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def types_by_key(value: Any, declared: Any, key: str = "") -> dict[str, Any]:
    """Return the types of all values in a configuration by their keys on the command line.

    As on the command line, a field with `tyro.conf.arg(name="")` adds nothing to the keys, and the items of a list of
    configurations are named by their classes.
    """
    children: Iterable[tuple[str, Any, Any]]
    if dataclasses.is_dataclass(value):
        hints = get_type_hints(type(value), include_extras=True)
        names = [field.name for field in dataclasses.fields(value)]
        children = ((_shown(name, hints[name]), getattr(value, name), hints[name]) for name in names)
    elif isinstance(value, Mapping):
        children = ((name, item, get_args(declared)[1]) for name, item in value.items())
    elif isinstance(value, list) and value and all(isinstance(item, Configurable.Config) for item in value):
        children = ((config_key(item), item, type(item)) for item in value)
    else:
        return {key: declared}
    types: dict[str, Any] = {}
    for name, item, item_type in children:
        types |= types_by_key(item, item_type, ".".join(part for part in (key, name) if part))
    return types


def _shown(name: str, declared: Any) -> str:
    annotations = get_args(declared)[1:] if get_origin(declared) is Annotated else ()
    return "" if any(getattr(annotation, "name", None) == "" for annotation in annotations) else name


def _derive_config(cls: type[Configurable]) -> type:
    parent = cls.Config
    derived = type(
        "Config",
        (parent,),
        {"__module__": cls.__module__, "__qualname__": f"{cls.__qualname__}.Config", "__doc__": parent.__doc__},
    )
    return dataclasses.dataclass(kw_only=True, slots=True)(derived)


def _check_config(cls: type[Configurable]) -> None:
    config = cls.__dict__["Config"]
    name = f"{cls.__qualname__}.Config"
    inherited = [
        base.Config for base in cls.__mro__[1:] if "Config" in base.__dict__ and issubclass(base, Configurable)
    ]
    if not (isinstance(config, type) and issubclass(config, inherited[0])):
        raise TypeError(f"{name} must inherit from {inherited[0].__qualname__}")
    if "__dataclass_fields__" not in config.__dict__:
        raise TypeError(f"{name} must be decorated with @dataclass(kw_only=True, slots=True)")
    positional = [field.name for field in dataclasses.fields(config) if not field.kw_only]
    if positional:
        raise TypeError(f"{name} must be decorated with kw_only=True (positional: {', '.join(positional)})")
    if "__slots__" not in config.__dict__:
        raise TypeError(f"{name} must be decorated with slots=True")
