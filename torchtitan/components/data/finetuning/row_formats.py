"""Shapes of a fine-tuning row, recognized by its columns."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from torchtitan.components.data.finetuning.columns import (
    LABELS,
    ROW_WEIGHTS,
    is_filled,
    mapped_row,
    relevant_columns,
    renamed_row,
    suggested_columns,
)
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
from torchtitan.components.data.finetuning.functions import function_fingerprint, load_function
from torchtitan.components.data.sources.rows import kind_of
from torchtitan.components.data.sources.source import AUTO, CHAT_DATASETS, RowFunction
from torchtitan.config.registry import suggest
from torchtitan.tools.errors import UserError

Kind = Literal["sft", "preference", "prompt"]
"""Purpose of rows: samples to imitate, pairs to compare, prompts to answer."""


@dataclass(frozen=True)
class RowFormat:
    """A shape of a row."""

    name: str
    kind: Kind
    required: tuple[str, ...]
    """Columns that a row must have."""
    convert: Callable[[dict[str, Any]], Sample | None]
    """Converts a row, or returns None to drop it, as only user functions do.
    Raises `BrokenSample` for an unusable row. In results of `find_format`, it takes rows as they are in the file."""
    optional: tuple[str, ...] = ()
    """Columns that are read if present; all others are ignored."""
    mapping: Mapping[str, str] = field(default_factory=dict)
    """Our column name → the file's, if they differ."""
    by_function: bool = False
    """Whether a user's function reads the columns."""
    fingerprint: str = ""
    """Cache key of the conversion, set by `find_format`."""

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.required, *self.optional)

    def unread(self, row: Mapping[str, Any]) -> list[str]:
        """Return a row's filled columns that are not read although their names suggest that they matter."""
        if self.by_function or not (suspects := relevant_columns(row)):
            return []
        filled = {column: column for column, value in row.items() if is_filled(value)}
        theirs = renamed_row(filled, self.mapping)
        read = {theirs[column] for column in self.columns if column in theirs}
        return [column for column in suspects if column not in read]


_TURNS, _INSTRUCTION = ("tools", "system"), ("input", "history", "system")
_PROMPTS = {
    "prompt": (turns_in("prompt"), _TURNS),
    "question": (turns_in("question"), _TURNS),
    "query": (turns_in("query"), _TURNS),
    "problem": (turns_in("problem"), _TURNS),
    "instruction": (instruction_in, _INSTRUCTION),
    "conversations": (listed_in("conversations"), _TURNS),
    "messages": (listed_in("messages"), _TURNS),
}
"""Prompt column → its reader, and the optional columns read with it."""

_QUESTIONS = (
    ("prompt", "response"),
    ("prompt", "completion"),
    ("question", "answer"),
    ("question", "response"),
    ("query", "response"),
    ("problem", "solution"),
)
_CHOICE = ("chosen", "rejected")

FORMATS: Sequence[RowFormat] = (
    RowFormat("messages", "sft", ("messages",), read_turns("messages"), _TURNS),
    RowFormat("conversations", "sft", ("conversations",), read_turns("conversations"), _TURNS),
    RowFormat("instruction", "sft", ("instruction", "output"), read_instruction("output"), _INSTRUCTION),
    RowFormat("instruction_response", "sft", ("instruction", "response"), read_instruction("response"), _INSTRUCTION),
    *(RowFormat("_".join(columns), "sft", columns, read_question(*columns), _TURNS) for columns in _QUESTIONS),
    RowFormat("text", "sft", ("text",), read_text),
    *(
        RowFormat(column, "preference", (column, *_CHOICE), read_pair(prompt), beside)
        for column, (prompt, beside) in _PROMPTS.items()
    ),
    RowFormat("chosen_rejected", "preference", _CHOICE, read_pair(no_prompt), _TURNS),
    *(
        RowFormat(column, "prompt", (column,), read_prompt(prompt), (*ANSWERS, *beside))
        for column, (prompt, beside) in _PROMPTS.items()
    ),
)
"""All formats; the first of a kind that has all its columns in the row is used."""


def find_format(columns: Sequence[str], format: str, mapping: Mapping[str, str], kind: Kind) -> RowFormat:
    """Return the format of rows; its `convert` takes rows as they are in the file and renames their columns.

    Args:
        columns: of the first valid row.
        format: "auto" (recognized by the columns, reading all mapped ones), the name of a format, or a user's function,
            `package.module:function` or `path/to/file.py:function`.
        mapping: the format's column name → the file's.
        kind: purpose of the rows.

    Raises:
        UserError: no format has these columns, there is no such format or function, or a mapped column is missing.
    """
    if ":" in format:
        if mapping:
            raise UserError(f"--dataloader.columns cannot be combined with the function {format!r}, which reads them")
        return function_format(load_function(format), kind)
    _check_mapping(columns, mapping, kind)
    renamed = mapped_row(dict.fromkeys(columns), mapping)
    known = renamed_row({column: column for column in columns}, mapping)
    if format == AUTO and kind == "sft" and {"chosen", "rejected"} <= set(known):
        raise _to_imitate_one(known)
    found = _recognize(known, kind, mapping) if format == AUTO else _named(format, kind)
    if found is None or not set(found.required) <= set(known):
        raise _not_fitting(list(renamed), found, kind)
    if unread := [column for column in mapping if column not in found.columns]:
        raise UserError(f"--dataloader.columns: {unread[0]!r} is none that the format {format!r} reads")
    fingerprint = json.dumps([found.name, format == AUTO, kind, sorted(mapping.items())])
    convert = partial(_convert, found, dict(mapping), format == AUTO)
    return replace(found, convert=convert, mapping=dict(mapping), fingerprint=fingerprint)


def dataset_formats(
    datasets: Sequence[str],
    columns: Sequence[Sequence[str]],
    format: str,
    mapping: Mapping[str, str],
    kind: Kind,
) -> list[RowFormat]:
    """Return the row formats of data sets, by the columns of each.

    `format` (other than "auto") and `mapping` apply to the data sets that they fit, overriding the registration; the
    others are read as registered, or by their columns. A function fits every data set whose registration does not say
    how to read it.

    Raises:
        UserError: as `find_format`, or they fit no data set.
    """
    if format == AUTO and not mapping:
        return [_own_format(dataset, of_set, kind) for dataset, of_set in zip(datasets, columns, strict=True)]
    formats: list[RowFormat | None] = []
    errors = []
    for dataset, of_set in zip(datasets, columns, strict=True):
        try:
            formats.append(_described_format(dataset, of_set, format, mapping, kind))
        except UserError as error:
            errors.append(error)
            formats.append(None)
    if not any(formats):
        raise errors[0]
    own = zip(datasets, columns, formats, strict=True)
    return [described or _own_format(dataset, of_set, kind) for dataset, of_set, described in own]


def describes(dataset: str, columns: Sequence[str], format: str, mapping: Mapping[str, str], kind: Kind) -> bool:
    """Return whether `format` and `mapping` fit a data set, see `dataset_formats`."""
    try:
        _described_format(dataset, columns, format, mapping, kind)
    except UserError:
        return False
    return True


def _described_format(
    dataset: str, columns: Sequence[str], format: str, mapping: Mapping[str, str], kind: Kind
) -> RowFormat:
    registered = CHAT_DATASETS.registered.get(dataset)
    if ":" in format and registered is not None and registered.says_format():
        raise UserError(f"--dataloader.format {format!r}: {dataset!r} is registered with a way to be read of its own")
    return find_format(columns, format, mapping, kind)


def _own_format(dataset: str, columns: Sequence[str], kind: Kind) -> RowFormat:
    registered = CHAT_DATASETS.registered.get(dataset)
    if registered is None:
        return find_format(columns, AUTO, {}, kind)
    if registered.function is not None:
        return function_format(registered.function, kind)
    return find_format(columns, registered.format, registered.columns, kind)


def function_format(function: RowFunction, kind: Kind) -> RowFormat:
    """Return the format of rows that a function converts to rows of known formats; raises as `function_fingerprint`."""
    fingerprint = json.dumps([function_fingerprint(function), kind])
    return RowFormat(
        name=f"{function.__module__}:{function.__qualname__}",
        kind=kind,
        required=(),
        convert=partial(_convert_by_function, function, kind),
        by_function=True,
        fingerprint=fingerprint,
    )


def _to_imitate_one(known: Mapping[str, str]) -> UserError:
    """Return the error for preference rows in SFT, which names the option that reads one answer. `known` maps our
    column names to the rows'."""
    endings = [(f.required[:-1], f.required[-1]) for f in FORMATS if f.kind == "sft"]
    suited = [(before, last) for before, last in endings if set(before) <= set(known) and last not in known]
    _, answer = max(suited, key=lambda ending: len(ending[0]))
    neither = _recognize(known, "sft")
    if neither and neither.name in ("messages", "conversations"):  # which the answers may continue or repeat
        advice = "write a function that gives the whole conversation, --dataloader.format my_rows.py:function"
    else:
        advice = f"name it by --dataloader.columns {answer}={known['chosen']}"
    return UserError(
        f"the rows have {known['chosen']} and {known['rejected']}, which are for preference training; to imitate one "
        f"of them, {advice}" + (f", and to read neither, choose --dataloader.format {neither.name}" if neither else "")
    )


def _not_fitting(columns: Sequence[str], named: RowFormat | None, kind: Kind) -> UserError:
    if kind == "preference" and (label := next((name for name in LABELS if name in columns), None)):
        return UserError(
            f"the rows have the column {label}, which judges one answer each, as for KTO; preference training compares "
            "two answers to a prompt, in the columns chosen and rejected"
        )
    if named:
        lack, suggested, formats = f"and {named.name!r} needs {_needs(named)}", "OURS=THEIRS", ""
    else:
        lack, formats = "which fit none of the formats", f": {_overview(kind)}"
        suggested = suggested_columns(columns) if kind == "sft" else "OURS=THEIRS"
    return UserError(
        f"the rows have the columns {', '.join(columns) or '(none)'}, {lack}; name them by --dataloader.columns "
        f"{suggested}, or choose another --dataloader.format{formats}"
    )


def _recognize(columns: Iterable[str], kind: Kind, mapped: Iterable[str] = ()) -> RowFormat | None:
    """Return the first format that these columns suffice for and that reads all mapped columns."""
    there = set(columns)
    suited = (f for f in FORMATS if f.kind == kind and set(f.required) <= there)
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


def _convert(format: RowFormat, mapping: Mapping[str, str], auto: bool, row: Mapping[str, Any]) -> Sample | None:
    renamed = renamed_row(row, mapping)
    if missing := [column for column in format.required if column not in renamed]:
        raise BrokenSample(f"no column {', '.join(missing)}, only {', '.join(renamed) or 'none at all'}")
    if auto:
        _check_label(format, renamed)
    try:
        return format.convert(renamed)
    except EmptySample as error:
        if auto and (other := _filled_format(format, renamed)):
            raise BrokenSample(
                f"{error}, while the columns of another format are filled ({_needs(other)}); rows of one file must be "
                f"of one format: separate them, or leave such rows out by --dataloader.format {format.name}"
            ) from None
        raise


_JUDGING_COLUMNS = {
    **dict.fromkeys(LABELS, "judge one answer each, as for KTO"),
    **dict.fromkeys(ROW_WEIGHTS, "say how much a row counts"),
}
"""Column → meaning, in words."""

_BAD = ("false", "0", "0.0", "undesirable")
"""Values of a label or weight for an answer that must not be imitated."""


def _check_label(format: RowFormat, row: Mapping[str, Any]) -> None:
    if format.kind != "sft" or format.required == ("text",):
        return
    for column, meaning in _JUDGING_COLUMNS.items():
        if column not in format.columns and str(row.get(column)).lower() in _BAD:
            raise UserError(
                f"its {column} is {row[column]!r}: such columns {meaning}, and this row's answer must not be imitated; "
                "leave such rows out by a function (--dataloader.format my_rows.py:good_ones), or imitate all by "
                f"--dataloader.format {format.name}"
            )


def _filled_format(format: RowFormat, row: Mapping[str, Any]) -> RowFormat | None:
    """Return the format that a row empty in its own format may be meant for: all its columns are filled, including the
    ones filled in its own format. A `text` next to an instruction without output does not count."""
    filled = {column for column, value in row.items() if is_filled(value)}
    own = filled & set(format.required)
    if own == set(format.required):
        return None
    return next((f for f in FORMATS if f.kind == format.kind and own <= set(f.required) <= filled), None)


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
    renamed = renamed_row(result, {})
    format = _recognize(renamed, kind)
    if format is None:
        raise UserError(f"{name} gave {', '.join(map(repr, result))}, which fits none of: {_overview(kind)}")
    _check_label(format, renamed)
    return format.convert(renamed)


def _overview(kind: Kind) -> str:
    return "; ".join(f"{format.name}: {_needs(format)}" for format in FORMATS if format.kind == kind)


def _needs(format: RowFormat) -> str:
    return ", ".join(format.required)
