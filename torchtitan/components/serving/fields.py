"""The fields of a request: each is read with its type and range, or refused by name."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torchtitan.components.serving.errors import RequestError
from torchtitan.tools.errors import suggest

HARMLESS = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Fields that change nothing in an answer; accepted with any value."""

NEUTRAL: Mapping[str, Sequence[object]] = {
    "audio": (),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "function_call": (),
    "functions": (),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}
"""Fields that are not supported; accepted with null, or a value that asks for nothing."""

_MISSING = object()


def parse_body(content: bytes) -> dict[str, object]:
    """Return the JSON object in a body. Raise `RequestError` for anything else: invalid JSON, NaN,
    a key twice, text that is not Unicode."""
    try:
        body = json.loads(content, parse_constant=_constant, object_pairs_hook=_unique)
        # A lone surrogate, written as \ud800, is not a character.
        json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        words = " ".join(str(error).split())[:200]
        raise RequestError(f"the body is not valid JSON: {words}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object, not {kind(body)}", code="invalid_json")
    return body


def _constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    known = dict(pairs)
    if len(known) < len(pairs):
        numbers = Counter(key for key, _ in pairs)
        twice = next(key for key, number in numbers.items() if number > 1)
        raise ValueError(f"the key {twice[:80]!r} is there twice")
    return known


def kind(value: object) -> str:
    """Return JSON's name of a value's type, with its article."""
    if value is None:
        return "null"
    names = {
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        str: "a string",
        list: "an array",
        dict: "an object",
    }
    return names[type(value)]


def shown(value: object) -> str:
    """Return a value's JSON, shortened."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."


class Fields:
    """The fields of a request's body. Each method returns a field's value, or the default if it is
    absent or null, and raises `RequestError`, which names the field, for any other type or a value
    out of range. `finish` refuses fields that no method has read."""

    def __init__(self, body: Mapping[str, object]):
        self._body = {name: value for name, value in body.items() if value is not None}
        self._read: set[str] = set()

    def any(self, name: str, default: object = None) -> Any:
        """Return a field of any type."""
        self._read.add(name)
        return self._body.get(name, default)

    def required(self, name: str) -> Any:
        """Return a field that must be there."""
        value = self.any(name, _MISSING)
        if value is _MISSING:
            raise RequestError(
                f"the request has no {name}; set it", param=name, code="missing_field"
            )
        return value

    def text(self, name: str) -> str:
        """Return a string that must be there."""
        value = self.required(name)
        if not isinstance(value, str):
            raise wrong(name, value, "a string")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a boolean."""
        value = self.any(name, default)
        if not isinstance(value, bool):
            raise wrong(name, value, "true or false")
        return value

    def integer(self, name: str, low: int, high: int, default: int | None) -> int | None:
        """Return an integer from `low` to `high`."""
        value = self.any(name, _MISSING)
        if value is _MISSING:
            return default
        what = f"an integer from {low} to {high}"
        if type(value) is not int or not low <= value <= high:
            raise wrong(name, value, what)
        return value

    def number(self, name: str, low: float, high: float, default: float | None) -> float | None:
        """Return a number from `low` to `high`."""
        value = self.any(name, _MISSING)
        if value is _MISSING:
            return default
        is_number = type(value) in (int, float)
        if not is_number or not low <= value <= high or not math.isfinite(value):
            raise wrong(name, value, f"a number from {low:g} to {high:g}")
        return float(value)

    def object(self, name: str) -> dict[str, Any]:
        """Return an object; empty by default."""
        value = self.any(name, {})
        if not isinstance(value, dict):
            raise wrong(name, value, "an object")
        return value

    def finish(self) -> None:
        """Raise `RequestError` for a field that nothing here reads."""
        for name, value in self._body.items():
            if name in self._read or name in HARMLESS:
                continue
            if name not in NEUTRAL:
                known = {*self._read, *HARMLESS, *NEUTRAL}
                raise RequestError(
                    f"unknown field {name[:80]!r}{suggest(name[:80], known)}",
                    param=name[:80],
                    code="unknown_field",
                )
            allowed = NEUTRAL[name]
            if not any(_equal(value, one) for one in allowed):
                words = " or ".join(["null", *map(shown, allowed)])
                raise RequestError(
                    f"{name} {shown(value)} is not supported here; leave it out, or set {words}",
                    param=name,
                    code="unsupported_field",
                )


def _equal(value: object, other: object) -> bool:
    """Return whether two JSON values are equal; true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def wrong(name: str, value: object, what: str) -> RequestError:
    """Return the error for a field with a wrong value."""
    return RequestError(
        f"{name} is {shown(value)}, but must be {what}", param=name, code="invalid_value"
    )
