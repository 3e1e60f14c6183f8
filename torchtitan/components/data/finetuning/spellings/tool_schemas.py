"""JSON schemas of the arguments of tools, in any spelling."""

from collections.abc import Mapping
from typing import TypeGuard

from torchtitan.components.data.finetuning.spellings.parts import type_of
from torchtitan.components.data.finetuning.spellings.roles import Turn

_JSON_TYPES = {
    name: kind
    for kind, names in {
        "string": "str string",
        "integer": "int integer",
        "number": "float number",
        "boolean": "bool boolean",
        "object": "dict object",
        "array": "list array tuple set",
    }.items()
    for name in names.split()
}
"""Type in xLAM's functions → type in a JSON schema."""


def with_parameters(tools: list[Turn] | None) -> list[Turn] | None:
    """Return normalized tools with a JSON schema of their arguments under `parameters`, also if it
    is Anthropic's `input_schema`, the Model Context Protocol's `inputSchema`, or xLAM's table of
    arguments."""
    if tools is None:
        return None
    return [{**tool, "function": _with_parameters(tool["function"])} for tool in tools]


def _with_parameters(function: Turn) -> Turn:
    names = [name for name in ("input_schema", "inputSchema") if function.get(name) is not None]
    if names and function.get("parameters") is None:
        others = {
            key: value for key, value in function.items() if key not in (*names, "parameters")
        }
        function = {**others, "parameters": function[names[0]]}
    parameters = function.get("parameters")
    if not isinstance(parameters, Mapping) or not _is_table(parameters):
        return function
    return {**function, "parameters": _schema(parameters)}


def _is_table(
    parameters: Mapping[str, object],
) -> TypeGuard[Mapping[str, Mapping[str, object]]]:
    """Return whether parameters are xLAM's: a mapping of names to objects with a type, without a
    schema's own keys."""
    return bool(parameters) and all(
        isinstance(type_of(given), str) for given in parameters.values()
    )


def _schema(table: Mapping[str, Mapping[str, object]]) -> Turn:
    """Return the JSON schema of xLAM's arguments, such as {"n": {"type": "int, optional"}}. Types
    that JSON schemas do not have (`List[int]`) keep their words in the description."""
    properties, required = {}, []
    for name, given in table.items():
        written = str(given["type"])
        words = [word.strip() for word in written.split(",")]
        is_optional = words[-1] == "optional"
        kind = ",".join(words[:-1] if is_optional else words)
        known = _JSON_TYPES.get(kind.partition("[")[0].lower())
        argument = {**given, "type": known or "string"}
        if kind.lower() not in _JSON_TYPES:
            argument["description"] = f"{given.get('description') or ''} ({kind})".strip()
        properties[name] = argument
        if not is_optional and given.get("default") is None:
            required.append(name)
    return {"type": "object", "properties": properties, "required": required}
