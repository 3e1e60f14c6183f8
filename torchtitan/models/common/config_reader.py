"""Checked access to the file that describes a model in another format, config.json or
params.json."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import NoneType
from typing import TypeVar, get_args, get_origin

from torchtitan.config.configurable import describe, fits
from torchtitan.config.model_sizes import MOST_LAYERS
from torchtitan.tools.errors import UserError

T = TypeVar("T")

_LARGEST = 2**32
"""Maximum of any size or context of a model; `Decoder.Config.validate` bounds each one more
tightly."""

_FURTHEST = 1e18
"""Maximum factor or base; its inverse is the minimum."""


@dataclass(frozen=True)
class ConfigReader:
    """Keys of a model description. Reading a key raises `UserError` with file, key and value if its
    type is wrong, or if it is absent and has no default. Null is not absent; use `has` if null has
    a meaning."""

    file: str

    values: Mapping[str, object]

    def has(self, key: str) -> bool:
        """Return whether the key is present and not null."""
        return self.values.get(key) is not None

    def whole_number(
        self, key: str, default: int | None = None, hint: str = "", least: int = 1
    ) -> int:
        """Return a whole number from `least` to `_LARGEST`; `hint` ends the error's message."""
        value = self.values.get(key, default)
        if type(value) is not int or not least <= value <= _LARGEST:
            raise self.wrong(key, value, f"a whole number from {least} to {_LARGEST}{hint}")
        return value

    def n_layers(self) -> int:
        """Return `num_hidden_layers`, at most `MOST_LAYERS`, for lists with an item per layer."""
        n_layers = self.whole_number("num_hidden_layers")
        if n_layers > MOST_LAYERS:
            raise self.wrong("num_hidden_layers", n_layers, f"at most {MOST_LAYERS}")
        return n_layers

    def number(self, key: str, default: float | None = None, least: int = 1) -> float:
        """Return a number from `1 / _FURTHEST` to `_FURTHEST`, or 0 if that is `least`."""
        value = self.values.get(key, default)
        if isinstance(value, int | float) and not isinstance(value, bool):
            if 1 / _FURTHEST <= value <= _FURTHEST or value == least == 0:
                return value
        above = "0, or a number above it" if least == 0 else "a number above 0"
        raise self.wrong(key, value, f"{above}, from {1 / _FURTHEST:g} to {_FURTHEST:g}")

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Return a boolean; truthy values are errors."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def section(self, key: str) -> "ConfigReader":
        """Return a reader of a nested object, empty if the object is null or absent."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(key, value, "an object")
        return ConfigReader(self.file, value or {})

    def value(self, key: str, declared: object, least: int = 1) -> object:
        """Return a value of the type that a model's field declares, a number from `least` on (1:
        any above 0, if it is not whole); of a list, only the repeating part."""
        value, types = (
            self.values.get(key),
            [kind for kind in get_args(declared) if kind is not NoneType],
        )
        is_optional = NoneType in get_args(declared)
        if value is None and (is_optional or key == "num_key_value_heads"):
            return None
        plain = types[0] if is_optional else declared
        readers: dict[object, Callable[[str], object]] = {
            bool: self.flag,
            int: partial(self.whole_number, least=least),
            float: partial(self.number, least=least),
        }
        if plain in readers:
            return readers[plain](key)
        if not fits(value, plain, quoted=False):
            raise self.wrong(key, value, describe(plain))
        if get_origin(plain) is list and isinstance(value, list):
            return self._shortest_period(key, value)
        return value

    def _shortest_period(self, key: str, items: list[object]) -> list[object]:
        """Return the fewest first items that a list repeats. Raise `UserError` unless it has one
        item per layer."""
        n_layers = self.whole_number("num_hidden_layers")
        if len(items) != n_layers:
            raise self.wrong(key, items, f"a list with num_hidden_layers = {n_layers} items")
        return shortest_period(items)

    def wrong(self, key: str, value: object, must_be: str) -> UserError:
        said = f"is {value!r}" if key in self.values else "is missing"
        return UserError(f"{self.file}: {key} {said}, but must be {must_be}")


def shortest_period(items: Sequence[T]) -> list[T]:
    """Return the fewest first items that `items` repeats."""
    periods = (
        n
        for n in range(1, len(items) + 1)
        if all(item == items[index % n] for index, item in enumerate(items))
    )
    return [*items[: next(periods)]]
