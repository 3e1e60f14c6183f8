"""Types and values of a configuration by their keys, as on the command line."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, get_args, get_origin

import tyro

from torchtitan.config.configurable import Configurable, config_key, convert, field_types
from torchtitan.tools.errors import UserError


def option_names(keys: Iterable[str], types: Mapping[str, object]) -> list[str]:
    """Return the configuration's keys whose types (`types_by_key`) are not hidden."""
    return [key for key in keys if not is_hidden(types.get(key))]


def types_by_key(value: Any, declared: object, key: str = "") -> dict[str, Any]:
    """Return the types of all values by their command-line keys, including class names for items of
    a list of configurations, but not fields with `tyro.conf.arg(name="")`. Values inside a hidden
    field are hidden."""
    children: Iterable[tuple[str, object, object]]
    kind: type = type(value)
    if dataclasses.is_dataclass(kind):
        hints = field_types(kind)
        names = [field.name for field in dataclasses.fields(value)]
        children = (
            ("" if is_unnamed(hints[name]) else name, getattr(value, name), hints[name])
            for name in names
        )
    elif isinstance(value, Mapping):
        children = ((name, item, _value_type(declared)) for name, item in value.items())
    elif _is_config_list(value):
        children = ((name, item, type(item)) for name, item in by_name(value).items())
    else:
        return {key: declared}
    types: dict[str, object] = {}
    for name, item, item_type in children:
        if is_hidden(declared):
            item_type = Annotated[item_type, tyro.conf.Suppress]
        types |= types_by_key(item, item_type, _joined(key, name))
    return types


def _value_type(declared: object) -> object:
    """Return the type of a mapping's values, which may be mappings of any values."""
    arguments = get_args(declared)
    if get_origin(declared) is Annotated:
        return _value_type(arguments[0])
    return arguments[1] if len(arguments) == 2 else Any


def is_unnamed(declared: object) -> bool:
    annotations = get_args(declared)[1:] if get_origin(declared) is Annotated else ()
    return any(getattr(annotation, "name", None) == "" for annotation in annotations)


def is_hidden(declared: object) -> bool:
    """Return whether a field is not an option."""
    annotations = get_args(declared)[1:] if get_origin(declared) is Annotated else ()
    return any(annotation in (tyro.conf.Fixed, tyro.conf.Suppress) for annotation in annotations)


def nested(values: Mapping[str, object]) -> dict[str, Any]:
    """Return a nested dictionary of values by their dotted keys."""
    document: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        section = document
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = value
    return document


def with_values(value: Any, declared: object, given: Mapping[str, object], key: str = "") -> Any:
    """Return a copy of a configuration with the values `given` by the keys of `types_by_key`, which
    fit their types. `key` is the configuration's own."""
    if key in given:
        return convert(given[key], declared)
    if not any(name.startswith(f"{key}." if key else "") for name in given):
        return value
    kind: type = type(value)
    if dataclasses.is_dataclass(kind):
        hints = field_types(kind)
        changes: dict[str, object] = {}
        for name in (field.name for field in dataclasses.fields(value)):
            hint, child = hints[name], getattr(value, name)
            child_key = key if is_unnamed(hint) else _joined(key, name)
            if not is_hidden(hint):
                changes[name] = with_values(child, hint, given, child_key)
        return dataclasses.replace(value, **changes)
    if isinstance(value, Mapping):
        item_type = _value_type(declared)
        return {
            name: with_values(item, item_type, given, _joined(key, name))
            for name, item in value.items()
        }
    if _is_config_list(value):
        return [
            with_values(item, type(item), given, _joined(key, name))
            for name, item in by_name(value).items()
        ]
    return value


def _joined(*names: str) -> str:
    return ".".join(filter(None, names))


def by_name(configs: Sequence[Configurable.Config]) -> dict[str, Configurable.Config]:
    """Return a list of configurations by their names on the command line. Raise `UserError` if two
    have the same."""
    names = [config_key(config) for config in configs]
    if len(set(names)) < len(names):
        raise UserError(f"the same component is listed twice: {', '.join(names)}")
    return dict(zip(names, configs, strict=True))


def _is_config_list(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, Configurable.Config) for item in value)
    )


@contextlib.contextmanager
def refusals_named() -> Iterator[None]:
    """Raise `UserError` if a configuration refuses its values with a `ValueError`. tyro ends the
    process instead, so the error is in the context of a `SystemExit`."""
    try:
        yield
    except UserError:
        raise
    except (ValueError, SystemExit) as raised:
        error: BaseException | None = raised
        while error and not isinstance(error, ValueError):
            error = error.__context__
        if error is None:
            raise
        raise UserError(
            f"a configuration refuses its values: {error} ({type(error).__name__})"
        ) from error
