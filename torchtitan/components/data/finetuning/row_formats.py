"""Formats of fine-tuning rows, detected from their columns."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from torchtitan.components.data.finetuning.columns import (
    IMAGE_COLUMNS,
    LABELS,
    ROW_WEIGHTS,
    is_filled,
    mapped_row,
    relevant_columns,
    renamed_row,
    suggested_columns,
)
from torchtitan.components.data.finetuning.conversation import (
    CONFIGURATIONS_OF_IMAGES,
    BrokenSample,
    Conversation,
    EmptySample,
    Sample,
)
from torchtitan.components.data.finetuning.conversions import (
    ANSWERS,
    Cells,
    PromptReader,
    instruction_in,
    listed_in,
    no_prompt,
    read_answers,
    read_calls,
    read_exchanges,
    read_glaive,
    read_instruction,
    read_other_answer,
    read_pair,
    read_prompt,
    read_question,
    read_rated,
    read_text,
    read_turns,
    turns_in,
)
from torchtitan.components.data.finetuning.functions import function_fingerprint, load_function
from torchtitan.components.data.finetuning.spellings.reasoning import REASONING_COLUMNS
from torchtitan.components.data.sources.rows import kind_of
from torchtitan.components.data.sources.source import AUTO, CHAT_DATASETS, RowFunction
from torchtitan.tools.errors import UserError, suggest
from torchtitan.tools.user_code import is_ctrl_c, with_place

Kind = Literal["sft", "preference", "rated", "prompt"]
"""Purpose of rows: samples to imitate, pairs to compare, answers to judge (pairs too), prompts to
answer."""


@dataclass(frozen=True)
class RowFormat:
    """Format of a row."""

    name: str
    kind: Kind
    required: tuple[str, ...]
    """Columns that a row must have."""
    convert: Callable[[Cells], Sample | None]
    """Converts a row; user functions may return None to drop it. Raises `BrokenSample` for an
    unusable row. In results of `find_format`, rows have the column names of the file."""
    optional: tuple[str, ...] = ()
    """Columns that are read if present; other columns are ignored."""
    mapping: Mapping[str, str] = field(default_factory=dict)
    """Format's column name → column name in the file, if they differ."""
    function: RowFunction | None = None
    """User function that converts the rows to rows of known formats."""
    fingerprint: str = ""
    """Cache key of the conversion, set by `find_format`."""
    prefetch: Callable[[Sequence[Mapping[str, object]]], None] | None = None
    """Called with the rows of a batch before they are converted, to wait for the network once."""

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.required, *self.optional)

    def unread_columns(self, row: Mapping[str, object]) -> list[str]:
        """Return a row's ignored, non-empty columns whose names suggest an effect on training."""
        if self.function or not (suspects := relevant_columns(row)):
            return []
        filled = {column: column for column, value in row.items() if is_filled(value)}
        theirs = renamed_row(filled, self.mapping)
        read = {theirs[column] for column in self.columns if column in theirs}
        return [column for column in suspects if column not in read]


_TURNS = ("tools", "system", "chat_template_kwargs")
_INSTRUCTION = ("input", "history", *_TURNS)
_REASONED = (*_TURNS, *REASONING_COLUMNS)
_REASONED_INSTRUCTION = (*_INSTRUCTION, *REASONING_COLUMNS)
_PROMPTS: dict[str, tuple[PromptReader, tuple[str, ...]]] = {
    **{
        name: (partial(turns_in, "user", name), _TURNS)
        for name in ("prompt", "question", "query", "problem")
    },
    "instruction": (instruction_in, _INSTRUCTION),
    **{name: (partial(listed_in, name), _TURNS) for name in ("conversations", "messages")},
}
"""Prompt column → its reader and optional columns."""

_QUESTIONS = (
    ("prompt", "response"),
    ("prompt", "completion"),
    ("question", "answer"),
    ("question", "response"),
    ("query", "response"),
    ("problem", "solution"),
)
_RATED: dict[tuple[str, ...], tuple[Callable[[Cells], Conversation], tuple[str, ...]]] = {
    **{columns: (partial(read_question, *columns), _REASONED) for columns in _QUESTIONS},
    **{
        ("instruction", answer): (partial(read_instruction, answer), _REASONED_INSTRUCTION)
        for answer in ("output", "response")
    },
    **{(name,): (partial(read_turns, name), _TURNS) for name in ("messages", "conversations")},
}
"""Columns of a conversation that may have a label → its reader and optional columns."""

_CHOICE = ("chosen", "rejected")

FORMATS: Sequence[RowFormat] = (
    RowFormat("messages", "sft", ("messages",), partial(read_turns, "messages"), _TURNS),
    RowFormat(
        "conversations", "sft", ("conversations",), partial(read_turns, "conversations"), _TURNS
    ),
    *(
        RowFormat(
            name,
            "sft",
            ("instruction", answer),
            partial(read_instruction, answer),
            _REASONED_INSTRUCTION,
        )
        for name, answer in (("instruction", "output"), ("instruction_response", "response"))
    ),
    *(
        RowFormat("_".join(columns), "sft", columns, partial(read_question, *columns), _REASONED)
        for columns in _QUESTIONS
    ),
    RowFormat("query_answers", "sft", ("query", "tools", "answers"), read_calls, ("system",)),
    RowFormat("glaive", "sft", ("system", "chat"), read_glaive, ("tools",)),
    RowFormat("texts", "sft", ("texts",), read_exchanges, _TURNS),
    RowFormat("text", "sft", ("text",), read_text),
    *(  # before pairs: some are an instruction and a list as its output
        RowFormat(
            "_".join((*columns, label)),
            "rated",
            (*columns, label),
            partial(read_rated, read, label),
            optional,
        )
        for columns, (read, optional) in _RATED.items()
        for label in LABELS
    ),
    *(
        RowFormat(
            column,
            "preference",
            (column, *_CHOICE),
            partial(read_pair, prompt),
            ("margin", *optional),
        )
        for column, (prompt, optional) in _PROMPTS.items()
    ),
    RowFormat(
        "chosen_rejected", "preference", _CHOICE, partial(read_pair, no_prompt), ("margin", *_TURNS)
    ),
    *(
        RowFormat(
            f"messages_{rejected}",
            "preference",
            ("messages", rejected),
            partial(read_other_answer, rejected),
            ("margin", *_TURNS),
        )
        for rejected in ("rejected_response", "rejected")
    ),
    *(
        RowFormat(
            name,
            "preference",
            ("instruction", answers),
            partial(read_answers, answers),
            ("margin", *_INSTRUCTION),
        )
        for name, answers in (
            ("instruction_outputs", "output"),
            ("instruction_responses", "response"),
        )
    ),
    *(
        RowFormat(column, "prompt", (column,), partial(read_prompt, prompt), (*ANSWERS, *optional))
        for column, (prompt, optional) in _PROMPTS.items()
    ),
)
"""All formats. The first one whose required columns are present is used."""


def formats_of(kind: Kind) -> list[RowFormat]:
    """Return the formats of a kind of rows, in the order of detection."""
    kinds = ("rated", "preference") if kind == "rated" else (kind,)
    return [format for format in FORMATS if format.kind in kinds]


def find_format(
    columns: Sequence[str], format: str, mapping: Mapping[str, str], kind: Kind
) -> RowFormat:
    """Return the format of rows for a purpose, given the columns of the first valid row.

    Its `convert` accepts rows with the column names of the file; `mapping` has the name in the file
    by the format's name. `format` is "auto" (detected from the columns, must use all mapped ones),
    a format name, or a user function, `package.module:function` or `path/to/file.py:function`.
    Raise `UserError` if no format matches, the format or function does not exist, or a mapped
    column is missing.
    """
    if ":" in format:
        if mapping:
            raise UserError(
                f"--dataloader.columns cannot be combined with the function {format!r}; remove one"
            )
        return function_format(load_function(format), kind)
    _check_mapping(columns, mapping, kind)
    of_text = [column for column in mapping if column not in IMAGE_COLUMNS]
    renamed = mapped_row(dict.fromkeys(columns), mapping)
    known = renamed_row({column: column for column in columns}, mapping)
    if format == AUTO and kind == "sft" and {"chosen", "rejected"} <= set(known):
        raise _preference_rows_error(known)
    found = _detect(known, kind, of_text) if format == AUTO else _format_by_name(format, kind)
    if found is None or not set(found.required) <= set(known):
        raise _mismatch_error(list(renamed), found, kind)
    if unread := [column for column in of_text if column not in found.columns]:
        raise UserError(f"--dataloader.columns: the format {format!r} has no column {unread[0]!r}")
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
    """Return the row formats of datasets, given the columns of each.

    `format` (other than "auto") and `mapping` apply to all datasets that they fit and override the
    registration. Other datasets use the registered or detected format. A function fits all datasets
    registered without a format. Raise `UserError` like `find_format`, and if `format` and `mapping`
    fit no dataset."""
    datasets_columns = list(zip(datasets, columns, strict=True))
    if format == AUTO and not mapping:
        return [_default_format(dataset, names, kind) for dataset, names in datasets_columns]
    requested: list[RowFormat | None] = []
    errors: list[UserError] = []
    for dataset, names in datasets_columns:
        registered = CHAT_DATASETS.registered.get(dataset)
        try:
            if ":" in format and registered is not None and registered.has_format():
                raise UserError(
                    f"--dataloader.format {format!r} cannot be used: {dataset!r} is registered "
                    "with a format"
                )
            requested.append(find_format(names, format, mapping, kind))
        except UserError as error:
            requested.append(None)
            errors.append(error)
    if errors and not any(requested):
        raise errors[0]
    pairs = zip(datasets_columns, requested, strict=True)
    return [found or _default_format(dataset, names, kind) for (dataset, names), found in pairs]


def _default_format(dataset: str, columns: Sequence[str], kind: Kind) -> RowFormat:
    registered = CHAT_DATASETS.registered.get(dataset)
    if registered is None:
        return find_format(columns, AUTO, {}, kind)
    if registered.function is not None:
        return function_format(registered.function, kind)
    return find_format(columns, registered.format, registered.columns, kind)


def function_format(function: RowFunction, kind: Kind) -> RowFormat:
    """Return the format of rows that a function converts to known formats. Raise the errors of
    `function_fingerprint`."""
    fingerprint = json.dumps([function_fingerprint(function), kind])
    return RowFormat(
        name=f"{function.__module__}:{function.__qualname__}",
        kind=kind,
        required=(),
        convert=partial(convert_by_function, function, kind),
        function=function,
        fingerprint=fingerprint,
    )


def _preference_rows_error(known: Mapping[str, str]) -> UserError:
    """Return the error for preference rows in SFT, with the option that selects one answer. `known`
    maps the formats' column names to column names in the file."""
    endings = [(f.required[:-1], f.required[-1]) for f in FORMATS if f.kind == "sft"]
    matching = [
        (before, last)
        for before, last in endings
        if set(before) <= set(known) and last not in known
    ]
    _, answer = max(matching, key=lambda ending: len(ending[0]))
    other = _detect(known, "sft")
    # the answers may continue or repeat them
    if other and other.name in ("messages", "conversations"):
        advice = (
            "write a function that returns the whole conversation, --dataloader.format "
            "my_rows.py:function"
        )
    else:
        advice = f"set --dataloader.columns {answer}={known['chosen']}"
    return UserError(
        f"the columns {known['chosen']} and {known['rejected']} are for preference training; to "
        "train on one of them, "
        f"{advice}" + (f"; to ignore both, set --dataloader.format {other.name}" if other else "")
    )


def _mismatch_error(columns: Sequence[str], format: RowFormat | None, kind: Kind) -> UserError:
    if kind == "preference" and (label := next((name for name in LABELS if name in columns), None)):
        return UserError(
            f"the column {label} rates single answers; use --config kto, since this method needs "
            "two answers per prompt, in the columns chosen and rejected"
        )
    if format:
        problem = f"but {format.name!r} needs {_needs(format)}"
        suggested = "OURS=THEIRS"
        formats = ""
    else:
        problem, formats = "which match no format", f": {_overview(kind)}"
        suggested = suggested_columns(columns) if kind == "sft" else "OURS=THEIRS"
    return UserError(
        f"the rows have the columns {', '.join(columns) or '(none)'}, {problem}; rename them with "
        f"--dataloader.columns {suggested}, or set another --dataloader.format{formats}"
    )


def _detect(columns: Iterable[str], kind: Kind, mapped: Iterable[str] = ()) -> RowFormat | None:
    """Return the first format with all required columns present that reads all mapped columns."""
    available = set(columns)
    matching = (f for f in formats_of(kind) if set(f.required) <= available)
    return next((f for f in matching if set(mapped) <= set(f.columns)), None)


def _format_by_name(name: str, kind: Kind) -> RowFormat:
    formats = {format.name: format for format in formats_of(kind)}
    if name not in formats:
        raise UserError(
            f"--dataloader.format {name!r} is unknown; use one of: {AUTO}, "
            f"{', '.join(formats)}{suggest(name, formats)} or a function, path/to/file.py:function"
        )
    return formats[name]


def _check_mapping(columns: Sequence[str], mapping: Mapping[str, str], kind: Kind) -> None:
    of_formats = {column for f in formats_of(kind) for column in f.columns}
    known = sorted(of_formats | {*IMAGE_COLUMNS})
    for ours, theirs in mapping.items():
        if ours not in known:
            raise UserError(
                f"--dataloader.columns: no format has a column {ours!r}{suggest(ours, known)} "
                f"(before the =, use one of: {', '.join(known)})"
            )
        if theirs not in columns:
            raise UserError(
                "--dataloader.columns: the rows have no column "
                f"{theirs!r}{suggest(theirs, columns)} (they have: {', '.join(columns)})"
            )


def _convert(
    format: RowFormat, mapping: Mapping[str, str], auto: bool, row: Mapping[str, object]
) -> Sample | None:
    if images := [column for column in IMAGE_COLUMNS if mapping.get(column) in row]:
        raise UserError(
            f"--dataloader.columns names images ({images[0]}), and this configuration trains on "
            f"text; {CONFIGURATIONS_OF_IMAGES}"
        )
    renamed = renamed_row(row, mapping)
    if missing := [column for column in format.required if column not in renamed]:
        raise BrokenSample(
            f"no column {', '.join(missing)}; the columns are: {', '.join(renamed) or '(none)'}"
        )
    if auto:
        _check_label(format, renamed)
    try:
        return format.convert(renamed)
    except EmptySample as error:
        if auto and (other := _filled_format(format, renamed)):
            raise BrokenSample(
                f"{error}, but the columns of another format have content ({_needs(other)}); split "
                "rows of different formats into separate datasets, or skip such rows with "
                f"--dataloader.format {format.name}"
            ) from None
        raise


_JUDGING_COLUMNS = {
    **dict.fromkeys(LABELS, "rate answers, as for KTO"),
    **dict.fromkeys(ROW_WEIGHTS, "weight rows"),
}
"""Column → meaning, for error messages."""

_BAD = ("false", "0", "0.0", "undesirable")
"""Labels and weights of answers that must not be learned."""


def _check_label(format: RowFormat, row: Mapping[str, object]) -> None:
    if format.kind != "sft" or format.required == ("text",):
        return
    if _JUDGING_COLUMNS.keys().isdisjoint(row):
        return
    for column, meaning in _JUDGING_COLUMNS.items():
        if column not in format.columns and str(row.get(column)).lower() in _BAD:
            raise UserError(
                f"its {column} is {row[column]!r}: such columns {meaning}, so this answer must not "
                "be learned; drop such rows in a function (--dataloader.format "
                "my_rows.py:good_ones), or train on all rows with --dataloader.format "
                f"{format.name}"
            )


def _filled_format(format: RowFormat, row: Mapping[str, object]) -> RowFormat | None:
    """Return another format that fits a row without content in its own format: all required columns
    have content, including its own columns with content. A `text` next to an instruction without
    output does not count."""
    filled = {column for column, value in row.items() if is_filled(value)}
    own = filled & set(format.required)
    if own == set(format.required):
        return None
    return next(
        (f for f in FORMATS if f.kind == format.kind and own <= set(f.required) <= filled), None
    )


def convert_by_function(
    function: RowFunction, kind: Kind, row: Mapping[str, object]
) -> Sample | None:
    """Convert the row that a function returns. Raise `BrokenSample` for an unusable row, and if the
    function fails; `UserError` if it returns no row of a known format."""
    name = f"the function {function.__qualname__}"
    try:
        result = function(dict(row))
    except BrokenSample:
        raise
    except Exception as error:
        raise BrokenSample(f"{name} failed: {with_place(error)}") from error
    except BaseException as error:  # an exit ends the run, also where broken rows are dropped
        if is_ctrl_c(error):
            raise
        raise UserError(f"{name} failed: {with_place(error)}") from error
    if result is None:
        return None
    if not isinstance(result, Mapping):
        raise UserError(
            f"{name} returned {kind_of(result)}; it must return a dictionary, or None to drop the "
            "row"
        )
    renamed = renamed_row(result, {})
    format = _detect(renamed, kind)
    if format is None:
        raise UserError(
            f"{name} returned the columns {', '.join(map(repr, result))}, which match no format: "
            f"{_overview(kind)}"
        )
    _check_label(format, renamed)
    return format.convert(renamed)


def _overview(kind: Kind) -> str:
    return "; ".join(f"{format.name}: {_needs(format)}" for format in formats_of(kind))


def _needs(format: RowFormat) -> str:
    return ", ".join(format.required)
