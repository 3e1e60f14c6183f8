"""Calls of functions in replies, in the notations that chat templates write.

A notation is found by trial of the template (`call_trials.py`), and reads what the model writes in
the same way.
"""

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import unquote

from torchtitan.components.chat_template.literals import LiteralError, Literals, skip_space

Schemas = Mapping[str, Mapping[str, object]]
"""Name of a function → JSON schema of its arguments, empty if it has none."""

Arguments = tuple[Mapping[str, object], int]
"""Arguments of a call, and the place after them in the text."""

SEPARATORS = " \t\r\n,;[]"
"""Characters between calls."""

_MARKUP = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]|`+|\s+|\w+|.", re.DOTALL)
_NAME = r"[^\s<>()\[\]{}\"'=]+"
_KEY = r"[^<>\"=]+?"


class Call(NamedTuple):
    """A call of a function."""

    id: str
    name: str
    arguments: str
    """A JSON object."""

    def to_dict(self) -> dict[str, object]:
        """Return an item of `tool_calls`."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, object]]:
    """Return the schemas of tools in the form of OpenAI's API."""
    functions = [tool["function"] for tool in tools]
    return {function["name"]: function.get("parameters") or {} for function in functions}


def new_call(name: str, arguments: Mapping[str, object], id: str = "") -> Call | None:
    """Return a call, with a new id if it has none; None for what JSON in Unicode cannot carry:
    infinity, which a decoder makes of 1e999, and half a character, of \\ud800."""
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (name + text).encode()
    except (ValueError, RecursionError):
        return None
    # Mistral's templates reject ids of any length other than 9.
    return Call(id or uuid.uuid4().hex[:9], name, text)


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


DECODER = json.JSONDecoder(parse_constant=_no_number)
"""Decoder of JSON without NaN and infinity."""


def decoded(text: str, at: int) -> tuple[object, int] | None:
    """Return the JSON value that begins at a place, and its end; None without such a value."""
    try:
        return DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None


def pieces(text: str) -> list[str]:
    """Return a text in marks, words, whitespace and single characters."""
    return _MARKUP.findall(text)


@dataclass(frozen=True, slots=True)
class CallMarks:
    """Calls as JSON objects between marks, with the name as a value."""

    opening: str
    """Mark before a call or several; empty: the reply is the JSON."""
    closing: str
    """Mark after it; empty: none."""
    name_key: str
    arguments_key: str
    before_name: str | None
    """Text from the beginning of a reply that calls a function to the function's name. None:
    unknown, since the finished turn does not continue the generation prompt."""
    after_name: str
    """Text between the name and the arguments."""

    @property
    def markup(self) -> str:
        """All marks."""
        return self.opening + self.closing

    def read(self, text: str, schemas: Schemas) -> list[Call] | None:
        """Return the calls in a text of nothing else; None if it is anything else. Without marks,
        `schemas` must have their names."""
        calls = []
        place = 0
        while place < len(text):
            mark = next((one for one in self._marks if text.startswith(one, place)), None)
            if mark:
                place += len(mark)
                continue
            if text[place] in SEPARATORS:
                place += 1
                continue
            found = decoded(text, place)
            call = found and self._call(found[0])
            if not found or not call or not (self.opening or call.name in schemas):
                return None
            place = found[1]
            calls.append(call)
        return calls or None

    @property
    def _marks(self) -> list[str]:
        return [mark for mark in (self.opening, self.closing) if mark]

    def _call(self, value: object) -> Call | None:
        if not isinstance(value, dict) or not isinstance(value.get(self.name_key), str):
            return None
        arguments = _as_object(value.get(self.arguments_key, {}))
        return None if arguments is None else new_call(value[self.name_key], arguments)


def _as_object(value: object) -> dict[str, object] | None:
    """Return arguments, which may be JSON text; None if they are not an object."""
    if isinstance(value, str):
        try:
            value = DECODER.decode(value)
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, dict) else None


@dataclass(frozen=True, slots=True)
class JsonArguments:
    """Arguments as a JSON object after the name."""

    @property
    def markup(self) -> str:
        return ""

    def read(self, text: str, at: int, schema: Mapping[str, object]) -> Arguments | None:
        """Return arguments and their end."""
        arguments, end = decoded(text, at) or (None, at)
        return (arguments, end) if isinstance(arguments, dict) else None


@dataclass(frozen=True, slots=True)
class KeyedArguments:
    """Arguments one by one between marks, such as `<parameter=KEY>VALUE</parameter>`. Text stands
    as it is, and other values as JSON, or as Python writes them."""

    before_key: str
    after_key: str
    after_value: str
    after_arguments: str

    @property
    def markup(self) -> str:
        return "".join((self.before_key, self.after_key, self.after_value, self.after_arguments))

    def read(self, text: str, at: int, schema: Mapping[str, Any]) -> Arguments | None:
        """Return arguments and their end. A value ends at its closing mark if another argument, or
        the end of the call, follows; so it may contain marks."""
        properties = _properties(schema)
        pattern = self._pattern()
        arguments: dict[str, object] = {}
        while match := pattern.match(text, at):
            arguments[match["key"]] = typed(match["value"], properties.get(match["key"]), schema)
            at = match.end()
        return arguments, at

    def _pattern(self) -> re.Pattern[str]:
        before, after = loose(self.before_key), _trailing(self.after_key)
        end = loose(self.after_arguments) if self.after_arguments.strip() else r"\s*\Z"
        return re.compile(
            rf"{before}(?P<key>{_KEY}){after}(?P<value>.*?){_leading(self.after_value)}"
            rf"(?={before}{_KEY}{after}|{end}|\s*\Z)",
            re.DOTALL,
        )


@dataclass(frozen=True, slots=True)
class LiteralArguments:
    """Arguments as in a call in Python, `KEY='VALUE', KEY=5)`, or like it (Gemma 4)."""

    literals: Literals
    closing: str
    """Character after the last argument."""

    @property
    def markup(self) -> str:
        return self.literals.quote

    def read(self, text: str, at: int, schema: Mapping[str, object]) -> Arguments | None:
        """Return arguments and their end."""
        try:
            return self.literals.pairs(text, at, self.closing)
        except (LiteralError, RecursionError):
            return None


@dataclass(frozen=True, slots=True)
class NamedCalls:
    """Calls with the name between marks, and arguments after it."""

    opening: str
    """Beginning of the calls."""
    begin: str
    """Text before the name of each call."""
    middle: str
    """Text between name and arguments, as a regular expression, with the groups `id` if there is
    one."""
    arguments: JsonArguments | KeyedArguments | LiteralArguments
    around: frozenset[str]
    """Pieces of text before, between and after calls."""
    before_name: str | None
    """As in `CallMarks`."""
    after_name: str

    @property
    def closing(self) -> str:
        return ""

    @property
    def markup(self) -> str:
        """All marks."""
        fixed = (self.opening, self.begin, self.after_name, self.arguments.markup, *self.around)
        return "\n".join(fixed)

    def read(self, text: str, schemas: Schemas) -> list[Call] | None:
        """Return the calls in a text of nothing else; None if it is anything else."""
        head = re.compile(f"{loose(self.begin)}(?P<name>{_NAME}){self.middle}")
        around = sorted(self.around, key=len, reverse=True)
        calls = []
        place = 0
        # Patterns begin with whitespace, and would try all of it at each of its characters.
        while (place := skip_space(text, place)) < len(text):
            if match := head.match(text, place):
                name = match["name"]
                found = self.arguments.read(text, match.end(), schemas.get(name) or {})
                if found is None:
                    return None
                value, place = found
                call = new_call(name, value, match.groupdict().get("id") or "")
                if call is None:
                    return None
                calls.append(call)
                continue
            piece = next((one for one in around if text.startswith(one, place)), None)
            if piece is None and text[place] not in SEPARATORS:
                return None
            place += len(piece or " ")
        return calls or None


CallNotation = CallMarks | NamedCalls


def loose(text: str) -> str:
    """Return a regular expression of a text with any whitespace where it has some, and around
    it."""
    return r"\s*".join(["", *map(re.escape, text.split()), ""])


def _trailing(text: str) -> str:
    """Return an expression of the text before a value, whose last whitespace is the value's unless
    it is a newline that the template writes."""
    return rf"\s*{re.escape(text.strip())}" + (r"\n?" if text.endswith("\n") else "")


def _leading(text: str) -> str:
    return (r"\n?" if text.startswith("\n") else "") + re.escape(text.strip())


_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
    "string": (str,),
}

_PYTHON = {"True": True, "False": False, "None": None}


def typed(text: str, schema: object, root: object = None) -> object:
    """Return the value of an argument that is written without quotes: its text if the schema allows
    only text or lists this text, if the text is neither JSON nor a constant of Python, or if the
    schema allows text but not the type of the value.

    Args:
        root: schema in which a `$ref` is looked up.
    """
    branches = _branches(schema, root)
    names = {name for one in branches for name in _strings(one.get("type"))}
    allowed = {kind for name in names for kind in _TYPES.get(name, ())}
    listed = [text in _strings(one.get("enum")) or text == one.get("const") for one in branches]
    if names == {"string"} or any(listed):
        return text
    stripped = text.strip()
    if stripped in _PYTHON:
        value = _PYTHON[stripped]
    else:
        try:
            value = DECODER.decode(stripped)
        except (ValueError, RecursionError):
            return text
    return text if str in allowed and type(value) not in allowed else value


def _properties(schema: object) -> dict[str, object]:
    """Return the schemas of an object's keys."""
    found: dict[str, object] = {}
    for one in _branches(schema, schema):
        properties = one.get("properties")
        found |= properties if isinstance(properties, Mapping) else {}
    return found


def _branches(schema: object, root: object) -> list[Mapping[str, Any]]:
    """Return a schema, the schemas that it combines, and the schemas that they refer to. A part
    that is not an object, such as the schema true, says nothing."""
    found: dict[int, Mapping[str, Any]] = {}
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if not isinstance(one, Mapping) or id(one) in found:
            continue
        found[id(one)] = one
        for key in ("anyOf", "oneOf", "allOf"):
            parts = one.get(key)
            waiting += parts if isinstance(parts, list) else []
        waiting.append(_referred(one.get("$ref"), root))
    return [*found.values()]


def _referred(reference: object, root: object) -> object:
    """Return the schema that a reference such as `#/$defs/Color` names; None for other ones."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    for part in reference.split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        root = root.get(key) if isinstance(root, Mapping) else None
    return root


def _strings(value: object) -> list[str]:
    """Return the texts in a keyword's value, which is one or a list."""
    every = value if isinstance(value, list) else [value]
    return [one for one in every if isinstance(one, str)]
