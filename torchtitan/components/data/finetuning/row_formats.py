"""The shapes that a row of fine-tuning data can have, recognized by its columns."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from torchtitan.components.data.finetuning.conversation import BrokenSample, EmptySample, Sample
from torchtitan.components.data.finetuning.conversions import (
    ANSWERS,
    instruction_in,
    listed_in,
    no_prompt,
    read_instruction,
    read_pair,
    read_prompt,
    read_question,
    read_text,
    read_turns,
    turns_in,
)
from torchtitan.components.data.finetuning.function_fingerprint import function_fingerprint
from torchtitan.components.data.finetuning.row_functions import RowFunction, load_function
from torchtitan.components.data.readers import kind_of
from torchtitan.config.registry import suggest
from torchtitan.tools.errors import UserError

Kind = Literal["sft", "preference", "prompt"]
"""What rows are for: samples to imitate, pairs to choose from, prompts to answer."""

AUTO = "auto"
"""The format that is recognized by the columns."""


@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """A shape of a row."""

    name: str
    kind: Kind
    required: tuple[str, ...]
    """The columns that a row must have."""
    optional: tuple[str, ...] = ()
    """The columns that are read where a row has them; all others are not."""
    convert: Callable[[dict[str, Any]], Sample | None]
    """What a row says; None: it is left out, which only a user's function does.
    Raises `BrokenSample` for a row that cannot be used. That of `find_format` takes rows as they are in the file."""
    fingerprint: str = ""
    """Equal ones convert equally, by the same code, for the key of a cache. `find_format` fills it in."""

    @property
    def columns(self) -> tuple[str, ...]:
        """All that are read."""
        return (*self.required, *self.optional)


_TURNS, _INSTRUCTION = ("tools", "system"), ("input", "history", "system")
_PROMPTS = {
    "prompt": (turns_in("prompt"), _TURNS),
    "question": (turns_in("question"), _TURNS),
    "instruction": (instruction_in, _INSTRUCTION),
    "conversations": (listed_in("conversations"), _TURNS),
    "messages": (listed_in("messages"), _TURNS),
}
"""The columns that a prompt can be in: how it is read, and what is read beside it."""

FORMATS: Sequence[RowFormat] = (
    RowFormat(name="messages", kind="sft", required=("messages",), optional=_TURNS, convert=read_turns("messages")),
    RowFormat(
        name="conversations",
        kind="sft",
        required=("conversations",),
        optional=_TURNS,
        convert=read_turns("conversations"),
    ),
    RowFormat(
        name="instruction",
        kind="sft",
        required=("instruction", "output"),
        optional=_INSTRUCTION,
        convert=read_instruction,
    ),
    *(
        RowFormat(
            name=f"{question}_{answer}",
            kind="sft",
            required=(question, answer),
            optional=_TURNS,
            convert=read_question(question, answer),
        )
        for question, answer in (("prompt", "response"), ("prompt", "completion"), ("question", "answer"))
    ),
    RowFormat(name="text", kind="sft", required=("text",), convert=read_text),
    *(
        RowFormat(
            name=column,
            kind="preference",
            required=(column, "chosen", "rejected"),
            optional=beside,
            convert=read_pair(prompt),
        )
        for column, (prompt, beside) in _PROMPTS.items()
    ),
    RowFormat(
        name="chosen_rejected",
        kind="preference",
        required=("chosen", "rejected"),
        optional=_TURNS,
        convert=read_pair(no_prompt),
    ),
    *(
        RowFormat(
            name=column,
            kind="prompt",
            required=(column,),
            optional=(*ANSWERS, *beside),
            convert=read_prompt(prompt),
        )
        for column, (prompt, beside) in _PROMPTS.items()
    ),
)
"""All formats. The first of a kind whose columns a row has is its own."""


def parse_columns(columns: Sequence[str]) -> dict[str, str]:
    """`["prompt=question", …]`, the format's name for a column and the file's, as a dictionary.

    Raises:
        UserError: an entry of another form, or a name twice.
    """
    mapping: dict[str, str] = {}
    for entry in columns:
        ours, equals, theirs = (part.strip() for part in entry.partition("="))
        if not (ours and equals and theirs):
            raise UserError(f"--dataloader.columns: {entry!r} must be of the form OURS=THEIRS, such as prompt=question")
        if ours in mapping:
            raise UserError(f"--dataloader.columns: {ours!r} is given twice, {mapping[ours]!r} and {theirs!r}")
        mapping[ours] = theirs
    return mapping


def find_format(columns: Sequence[str], format: str, mapping: Mapping[str, str], kind: Kind) -> RowFormat:
    """The format to read rows with; its `convert` takes rows as they are in the file and renames the columns.

    Args:
        columns: those of the first good row.
        format: "auto" (recognized by the columns; it reads all that are mapped), the name of a format, or a function of
            the user's, `package.module:function` or `path/to/file.py:function`.
        mapping: the format's name for a column → the file's.
        kind: what the rows are for.

    Raises:
        UserError: no format has these columns, there is no such format or function, or a mapped column is missing.
    """
    if ":" in format:
        if mapping:
            raise UserError(f"--dataloader.columns cannot be combined with the function {format!r}, which reads them")
        return function_format(load_function(format), kind)
    _check_mapping(columns, mapping, kind)
    renamed = list(_renamed(dict.fromkeys(columns), mapping))
    if format == AUTO and kind == "sft" and {"chosen", "rejected"} <= set(renamed):
        raise UserError(
            "the rows have chosen and rejected, which are for preference training; to imitate one of them, name it by "
            "--dataloader.columns response=chosen, and to read neither, choose a --dataloader.format, such as messages"
        )
    found = _recognize(renamed, kind, mapping) if format == AUTO else _named(format, kind)
    if found is None or not set(found.required) <= set(renamed):
        wanted = (
            f"and {format!r} needs {_needs(found)}" if found else f"which fit none of the formats ({_overview(kind)})"
        )
        raise UserError(
            f"the rows have the columns {', '.join(renamed) or '(none)'}, {wanted}: name them by --dataloader.columns "
            "OURS=THEIRS, or choose another --dataloader.format"
        )
    if unread := [column for column in mapping if column not in found.columns]:
        raise UserError(f"--dataloader.columns: {unread[0]!r} is none that the format {format!r} reads")
    fingerprint = json.dumps([found.name, format == AUTO, kind, sorted(mapping.items())])
    convert = partial(_convert, found, dict(mapping), format == AUTO)
    return replace(found, convert=convert, fingerprint=fingerprint)


def function_format(function: RowFunction, kind: Kind) -> RowFormat:
    """The format of rows that a function turns into rows of a known format, each recognized by its columns.

    Raises:
        UserError: as `function_fingerprint`.
    """
    fingerprint = json.dumps([function_fingerprint(function), kind])
    return RowFormat(
        name=f"{function.__module__}:{function.__qualname__}",
        kind=kind,
        required=(),
        convert=partial(_convert_by_function, function, kind),
        fingerprint=fingerprint,
    )


def _recognize(columns: Sequence[str], kind: Kind, mapped: Iterable[str] = ()) -> RowFormat | None:
    """The first format that these columns suffice for and that reads those which are mapped."""
    suited = (f for f in FORMATS if f.kind == kind and set(f.required) <= set(columns))
    return next((f for f in suited if set(mapped) <= set(f.columns)), None)


def _named(name: str, kind: Kind) -> RowFormat:
    formats = {format.name: format for format in FORMATS if format.kind == kind}
    if name not in formats:
        raise UserError(
            f"--dataloader.format {name!r} is none of: {AUTO}, {', '.join(formats)}{suggest(name, formats)} "
            "(or a function, package.module:function or path/to/file.py:function)"
        )
    return formats[name]


def _check_mapping(columns: Sequence[str], mapping: Mapping[str, str], kind: Kind) -> None:
    known = sorted({column for f in FORMATS if f.kind == kind for column in f.columns})
    for ours, theirs in mapping.items():
        if ours not in known:
            raise UserError(
                f"--dataloader.columns: {ours!r} is a column of no format{suggest(ours, known)} "
                f"(left of the = goes one of: {', '.join(known)})"
            )
        if theirs not in columns:
            raise UserError(
                f"--dataloader.columns: the rows have no column {theirs!r}{suggest(theirs, columns)} "
                f"(they have: {', '.join(columns)})"
            )


def _renamed(row: Mapping[str, Any], mapping: Mapping[str, str]) -> dict[str, Any]:
    kept = {column: value for column, value in row.items() if column not in mapping.values()}
    return kept | {ours: row[theirs] for ours, theirs in mapping.items() if theirs in row}


def _convert(format: RowFormat, mapping: Mapping[str, str], auto: bool, row: Mapping[str, Any]) -> Sample | None:
    renamed = _renamed(row, mapping)
    if missing := [column for column in format.required if column not in renamed]:
        raise BrokenSample(f"no column {', '.join(missing)}, only {', '.join(renamed) or 'none at all'}")
    try:
        return format.convert(renamed)
    except EmptySample as error:
        if auto and (other := _filled_format(format, renamed)):
            raise BrokenSample(
                f"{error}, while the columns of another format are filled ({_needs(other)}); rows of one file must be "
                f"of one format: separate them, or leave such rows out by --dataloader.format {format.name}"
            ) from None
        raise


def _filled_format(format: RowFormat, row: Mapping[str, Any]) -> RowFormat | None:
    """The format that a row which is empty in its own may be meant for: all of its columns are filled, those that are
    in its own among them. A `text` beside an instruction without output is not meant instead of that."""
    filled = {column for column, value in row.items() if _is_filled(value)}
    own = filled & set(format.required)
    if own == set(format.required):
        return None
    return next((f for f in FORMATS if f.kind == format.kind and own <= set(f.required) <= filled), None)


def _is_filled(value: Any) -> bool:
    return not (value is None or value == [] or isinstance(value, str) and not value.strip())


def _convert_by_function(function: RowFunction, kind: Kind, row: Mapping[str, Any]) -> Sample | None:
    name = f"the function {function.__qualname__}"
    try:
        result = function(dict(row))
    except BrokenSample:
        raise
    except Exception as error:
        raise BrokenSample(f"{name} fails: {type(error).__name__}: {error}") from error
    if result is None:
        return None
    if not isinstance(result, Mapping):
        raise UserError(f"{name} gave {kind_of(result)}, and must give a dictionary, or None for no row")
    format = _recognize(list(result), kind)
    if format is None:
        raise UserError(f"{name} gave {', '.join(map(repr, result))}, which fits none of: {_overview(kind)}")
    return format.convert(dict(result))


def _overview(kind: Kind) -> str:
    return "; ".join(f"{format.name}: {_needs(format)}" for format in FORMATS if format.kind == kind)


def _needs(format: RowFormat) -> str:
    return ", ".join(format.required)
