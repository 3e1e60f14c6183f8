"""`Configurable`: a class paired with the dataclass that configures and builds it."""

import contextlib
import copy
import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Concatenate,
    Literal,
    ParamSpec,
    Self,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from torchtitan.config.code import untrusted_in
from torchtitan.tools.errors import UserError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

P = ParamSpec("P")
T = TypeVar("T")

_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    Path: "a path",
}


class Section:
    """Base of configurations: a single text given for a list of texts is a list of one, also when
    it is assigned. Any other single value raises `UserError`, since iterating over a text would
    read its characters. A `Path` in a list of texts is its text."""

    __slots__ = ()

    if not TYPE_CHECKING:  # with this method, mypy would allow any attribute

        def __setattr__(self, name: str, value: object) -> None:
            if isinstance(value, (str, Path, int, float)):
                value = _listed(type(self), name, value)
            elif isinstance(value, (list, tuple)) and any(isinstance(x, Path) for x in value):
                value = _with_texts(type(self), name, value)
            object.__setattr__(self, name, value)


def _listed(cls: type, name: str, value: object) -> object:
    """Return a single value of an option as its list, and values of other options unchanged."""
    declared = list_options(cls).get(name)
    if declared is None:
        return value
    if not isinstance(value, (str, Path)) or not fits([str(value)], declared, quoted=False):
        raise UserError(f"{cls.__qualname__}.{name} is {value!r}, but must be {describe(declared)}")
    return [str(value)]


def _with_texts(cls: type, name: str, values: list[object] | tuple[object, ...]) -> object:
    """Return a list with the texts of its paths if the option holds texts, else the list."""
    declared = list_options(cls).get(name)
    texts = [str(value) if isinstance(value, Path) else value for value in values]
    return type(values)(texts) if declared and fits(texts, declared, quoted=False) else values


@cache
def field_types(cls: type) -> Mapping[str, Any]:
    """Return the declared types of the fields of a dataclass, with their annotations."""
    return get_type_hints(cls, include_extras=True)


@cache
def list_options(cls: type) -> dict[str, Any]:
    """Return the declared types of the fields of a dataclass that hold lists or tuples."""
    types = get_type_hints(cls)
    return {
        field.name: types[field.name]
        for field in dataclasses.fields(cls)
        if holds_list(types[field.name])
    }


def holds_list(declared: object) -> bool:
    """Return whether an option of the declared type holds a list or tuple, or possibly None."""
    if get_origin(declared) is Annotated:
        return holds_list(get_args(declared)[0])
    if get_origin(declared) in (Union, UnionType):
        others = [argument for argument in get_args(declared) if argument is not NoneType]
        return all(map(holds_list, others))
    return get_origin(declared) in (list, tuple)


def builds(
    owner: Callable[[], Callable[Concatenate[Any, P], T]],
) -> Callable[[Callable[..., Any]], Callable[Concatenate[Any, P], T]]:
    """Give `build` of a nested `Config` the parameters and the result of its owner, for type
    checkers and editors:

        @builds(lambda: LRScheduler)
        def build(self) -> object:
            \"\"\"Build the schedule.\"\"\"

    The method does what `Configurable.Config.build` does, so a configuration of a subclass builds
    the subclass. `owner` is never called; it names the class before the class exists.
    """

    def typed(declared: Callable[..., object]) -> Callable[Concatenate[Any, P], T]:
        @functools.wraps(declared)
        def build(self: "Configurable.Config", /, *args: P.args, **runtime: P.kwargs) -> T:
            built: T = Configurable.Config.build(self, *args, **runtime)
            return built

        return build

    return typed


class Configurable:
    """A component built from a nested `Config` dataclass, with a string literal under each field as
    its `--help` text.

    A subclass may define `class Config(Parent.Config)` as a `@dataclass(kw_only=True, slots=True)`;
    otherwise, it gets one derived from its parent's. `Child.Config().build()` always builds a
    `Child`. Any other `Config` raises `TypeError`.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Section):
        """Configuration of a component."""

        _owner: ClassVar[type["Configurable"]]

        def build(self, *args: Any, **runtime: Any) -> Any:
            """Construct the component as `Owner(copy of this configuration, **runtime)`, after
            calling `validate`. A component declares the types of its arguments with `builds`."""
            self.validate()
            return self._owner(copy.deepcopy(self), *args, **runtime)

        def validate(self) -> None:
            """Check the values before anything is built. Raise `UserError` for an unusable
            value."""

        def to_dict(self) -> dict[str, Any]:
            """Return JSON-ready values: nested dictionaries, lists, strings, numbers, booleans,
            None."""
            return _fields_as_plain(self)

        @classmethod
        def from_dict(cls, document: Mapping[str, object]) -> Self:
            """Return the configuration from `to_dict`'s result, with defaults for missing fields.
            Raise `UserError` for an unknown key, an unusable value, a missing field without a
            default, or a value that names code, since documents come from files."""
            config: Self = from_plain(cls, document)
            config.validate()
            return config

    def __init__(self, config: "Configurable.Config"):
        if isinstance(config, str | Path):
            names = [*inspect.signature(type(self).__init__).parameters][2:]
            arguments = ", ".join(f"{name}=…" for name in names)
            raise UserError(
                f"{type(self).__name__}({str(config)!r}): the argument is a configuration, not a "
                f"path; use {type(self).__name__}.Config().build({arguments})"
            )
        self.config = config

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "Config" not in cls.__dict__:
            cls.Config = _derive_config(cls)  # type: ignore[misc,assignment]
        _check_config(cls)
        cls.Config._owner = cls


Configurable.Config._owner = Configurable


def config_key(config: Configurable.Config) -> str:
    """Return the command-line name of a configuration in a list of configurations."""
    return config._owner.__name__.lower()


def to_plain(value: object) -> Any:
    """Convert `value` to JSON-ready values. Raise `TypeError` if this is impossible."""
    if callable(to_dict := getattr(value, "to_dict", None)):
        return to_dict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _fields_as_plain(value)
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise TypeError(
        f"{value!r} of type {type(value).__name__} has no JSON form and cannot be a configuration "
        "value"
    )


def _fields_as_plain(value: "DataclassInstance") -> dict[str, Any]:
    return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}


def from_plain(cls: type, document: Mapping[str, object], prefix: str = "") -> Any:
    """Return the dataclass `cls` with values from `to_plain`; see
    `Configurable.Config.from_dict`."""
    if not isinstance(document, Mapping):
        raise UserError(
            f"configuration: '{prefix.removesuffix('.')}' is {document!r}, but must be a mapping"
        )
    fields, types = dataclasses.fields(cls), field_types(cls)
    names = {field.name for field in fields}
    if unknown := sorted(prefix + key for key in document if key not in names):
        raise UserError(f"configuration: unknown keys {', '.join(unknown)}")
    required = [
        f
        for f in fields
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing := [prefix + field.name for field in required if field.name not in document]:
        raise UserError(f"configuration: missing keys {', '.join(missing)}")
    return cls(
        **{
            name: _field_value(types[name], value, f"{prefix}{name}")
            for name, value in document.items()
        }
    )


def _field_value(declared: object, value: Any, key: str) -> object:
    plain = get_args(declared)[0] if get_origin(declared) is Annotated else declared
    if dataclasses.is_dataclass(plain):
        assert isinstance(plain, type)
        return from_plain(plain, value, f"{key}.")
    if not fits(value, declared, quoted=False):
        raise UserError(f"configuration: '{key}' is {value!r}, but must be {describe(declared)}")
    for text, reason in untrusted_in(value, declared).items():
        raise UserError(
            f"configuration: '{key}' names '{text}', {reason}, which a file may not; set it on the "
            "command line, or in Python after reading"
        )
    return value


def leaves(document: Mapping[str, object], prefix: str = "") -> dict[str, Any]:
    """Return the values of a nested dictionary by their dotted keys."""
    found: dict[str, object] = {}
    for name, value in document.items():
        found |= (
            leaves(value, f"{prefix}{name}.")
            if isinstance(value, dict)
            else {f"{prefix}{name}": value}
        )
    return found


def _derive_config(cls: type[Configurable]) -> type:
    parent = cls.Config
    names = {
        "__module__": cls.__module__,
        "__qualname__": f"{cls.__qualname__}.Config",
        "__doc__": parent.__doc__,
    }
    return dataclasses.dataclass(kw_only=True, slots=True)(type("Config", (parent,), names))


def _check_config(cls: type[Configurable]) -> None:
    config = cls.__dict__["Config"]
    name = f"{cls.__qualname__}.Config"
    inherited = next(
        base.Config
        for base in cls.__mro__[1:]
        if issubclass(base, Configurable) and "Config" in vars(base)
    )
    if not (isinstance(config, type) and issubclass(config, inherited)):
        raise TypeError(f"{name} must inherit from {inherited.__qualname__}")
    is_decorated = {"__dataclass_fields__", "__slots__"} <= config.__dict__.keys()
    if not is_decorated or not all(field.kw_only for field in dataclasses.fields(config)):
        raise TypeError(f"{name} must be decorated with @dataclass(kw_only=True, slots=True)")


def fits(value: object, declared: object, *, quoted: bool = True) -> bool:
    """Return whether a value of a YAML or JSON file, or a word of the command line, fits the
    declared type. A type that files cannot express accepts any value. With `quoted`, numbers may be
    quoted and a single item may replace a list, as on the command line."""
    arguments = get_args(declared)
    origin = get_origin(declared)
    if origin is Annotated:
        return fits(value, arguments[0], quoted=quoted)
    if origin in (Union, UnionType):
        return any(fits(value, argument, quoted=quoted) for argument in arguments)
    if origin is Literal:
        return any(_is_choice(value, argument, quoted=quoted) for argument in arguments)
    if origin in (list, tuple):
        if not quoted and not isinstance(value, list):
            return False
        items = value if isinstance(value, list) else [value]
        types = _item_types(declared, len(items))
        return len(items) == len(types) and all(
            fits(*pair, quoted=quoted) for pair in zip(items, types, strict=True)
        )
    if declared is NoneType:
        return value is None or quoted and value == "None"
    if declared is bool:
        return isinstance(value, bool)
    if declared in (str, Path):
        return isinstance(value, str | int | float | date if quoted else str) and not isinstance(
            value, bool
        )
    if declared in (int, float):
        return not isinstance(value, bool) and _is_number(value, declared, quoted=quoted)
    return True


def is_plain(declared: object) -> bool:
    """Return whether files can express all values of the declared type, as `fits` checks them."""
    arguments = [one for one in get_args(declared) if one is not Ellipsis]
    origin = get_origin(declared)
    if origin is Annotated:
        return is_plain(arguments[0])
    if origin in (Union, UnionType, list, tuple):
        return all(map(is_plain, arguments))
    return origin is Literal or declared in (NoneType, bool, int, float, str, Path)


def convert(value: object, declared: object) -> Any:
    """Return a value that `fits` the declared type, quoted or not, as this type."""
    arguments = get_args(declared)
    origin = get_origin(declared)
    if origin is Annotated:
        return convert(value, arguments[0])
    if origin in (Union, UnionType):
        exact = [argument for argument in arguments if fits(value, argument, quoted=False)]
        fitting = [argument for argument in arguments if fits(value, argument)]
        return convert(value, [*exact, *fitting][0])
    if origin in (list, tuple):
        items = value if isinstance(value, list) else [value]
        types = _item_types(declared, len(items))
        return origin(convert(*pair) for pair in zip(items, types, strict=True))
    if origin is Literal:
        return next(argument for argument in arguments if _is_choice(value, argument, quoted=True))
    if declared is NoneType:
        return None
    if declared is int:
        return whole_number(value)
    if declared in (float, str, Path):
        return declared(str(value))
    return value


def _is_choice(value: object, choice: object, *, quoted: bool) -> bool:
    """Return whether a value is one of the choices of a `Literal`: of its type (1 is not true), or
    with `quoted`, its text."""
    is_text = quoted and isinstance(value, str) and value == str(choice)
    return is_text or type(value) is type(choice) and value == choice


def _item_types(declared: object, n_items: int) -> Sequence[object]:
    """Return the item types of a list or tuple with `n_items` items; of a fixed tuple, all of its
    types."""
    arguments = get_args(declared)
    if get_origin(declared) is tuple and Ellipsis not in arguments:
        return arguments
    return [arguments[0]] * n_items


def _is_number(value: Any, declared: type[int] | type[float], *, quoted: bool) -> bool:
    if not quoted and not isinstance(value, int if declared is int else (int, float)):
        return False
    try:
        whole_number(value) if declared is int else float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def whole_number(value: Any) -> int:
    """Return a whole number, which may be written like 1e3. Raise `ValueError` for any other
    value."""
    if isinstance(value, int):
        return value
    with contextlib.suppress(ValueError):
        if isinstance(value, str):
            return int(value)
    number = float(value)
    if not number.is_integer():
        raise ValueError(f"'{value}' is not a whole number")
    return int(number)


_CHOICES_ELSEWHERE = {
    "sigmoid": "dpo",  # of TRL's loss_type
    **dict.fromkeys(("fp16", "half"), "float16"),
    **dict.fromkeys(("fp32", "float"), "float32"),
}
"""Word of other libraries → the same choice here."""


def suggest_choice(value: object, declared: object) -> str:
    """Return `; did you mean 'x'?` for the word of a `Literal` type that `value` begins with, or is
    most like, in any case and without dashes; of a list, its first item that is no such word. ""
    without a similar word."""
    choices = [
        str(word)
        for part in (declared, *get_args(declared))
        if get_origin(part) is Literal
        for word in get_args(part)
    ]
    items = [str(item) for item in (value if isinstance(value, list) else [value])]
    meant = _letters(next((item for item in items if item not in choices), ""))
    words = {_letters(word): word for word in choices}
    if (same := _CHOICES_ELSEWHERE.get(meant)) in choices:
        return f"; did you mean '{same}'?"
    begun = [word for word in words if len(word) > 1 and meant.startswith(word)]
    if begun:
        meant = max(begun, key=len)
    found = difflib.get_close_matches(meant, words, n=1)
    return f"; did you mean '{words[found[0]]}'?" if found else ""


def _letters(word: str) -> str:
    return word.lower().replace("_", "").replace("-", "")


def describe(declared: Any) -> str:
    """Describe a type, to complete the message "must be …"."""
    arguments = get_args(declared)
    origin = get_origin(declared)
    if origin is Annotated:
        return describe(arguments[0])
    if origin in (Union, UnionType):
        return " or ".join(
            "null" if argument is NoneType else describe(argument) for argument in arguments
        )
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin in (list, tuple):
        types = dict.fromkeys(
            describe(argument) for argument in arguments if argument is not Ellipsis
        )
        return f"a list (each item {' or '.join(types)})"
    return _NAMES.get(declared, str(declared))
