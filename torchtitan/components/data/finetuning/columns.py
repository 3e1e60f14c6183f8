"""Column names in public datasets: synonyms, and names that indicate the purpose of a column."""

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from torchtitan.tools.errors import UserError

T = TypeVar("T")

SYNONYMS = {
    "system_prompt": "system",
    "functions": "tools",
    "context": "input",
    "chosen_messages": "chosen",
    "rejected_messages": "rejected",
}
"""Synonym → column name of torchtitan."""

LABELS = ("label", "kto_tag")
"""Columns that label an answer as good (true) or bad (false), as in KTO data."""

ROW_WEIGHTS = ("weight", "loss_weight", "sample_weight")

_RELEVANT_NAMES = frozenset(
    "label labels kto_tag weight weights loss_weight sample_weight train train_detail mask "
    "loss_mask score scores rating reward rewards chosen rejected system system_prompt tools "
    "functions function_call documents history input inputs context reasoning reasoning_content "
    "thinking image images video videos audio audios thought thoughts analysis cot complex_cot "
    "chain_of_thought rationale chat_template_kwargs".split()
)
_IMAGE = re.compile(
    "(image|img|picture|photo|screenshot)s?(_?[0-9]+|_?(path|file|url|bytes|name)s?)?",
    re.IGNORECASE,
)

IMAGE_COLUMNS = ("image", "images")
"""Columns that `components.images.rows` reads."""

_PROMPT_NAMES = (
    "prompt question query problem instruction input inputs user human source request".split()
)
_ANSWER_NAMES = (
    "response completion answer output outputs solution target targets assistant reply".split()
)
_TURN_NAMES = "conversation dialogue dialog chat turns dialogs".split()


def mapped_row(row: Mapping[str, T], mapping: Mapping[str, str]) -> dict[str, T]:
    """Rename the columns of a row; `mapping` maps torchtitan's column names to the row's."""
    unmapped = {column: value for column, value in row.items() if column not in mapping.values()}
    return unmapped | {ours: row[theirs] for ours, theirs in mapping.items() if theirs in row}


def renamed_row(row: Mapping[str, T], mapping: Mapping[str, str]) -> dict[str, T]:
    """Rename the columns of a row by `mapping`, then by `SYNONYMS`."""
    renamed = mapped_row(row, mapping)
    for theirs, ours in SYNONYMS.items():
        if theirs in renamed and ours not in mapping and not is_filled(renamed.get(ours)):
            renamed[ours] = renamed.pop(theirs)
    return renamed


def is_filled(value: object) -> bool:
    return not (value is None or value == [] or isinstance(value, str) and not value.strip())


def relevant_columns(row: Mapping[str, object]) -> list[str]:
    """Return the non-empty columns of a row whose names suggest an effect on training."""
    return [column for column, value in row.items() if _is_relevant(column) and is_filled(value)]


@functools.lru_cache(maxsize=1024)  # each row of JSON may have other columns
def _is_relevant(column: str) -> bool:
    return column.lower() in _RELEVANT_NAMES or _IMAGE.fullmatch(column) is not None


def are_images(columns: Iterable[str]) -> bool:
    """Return whether a column has the name of one with images."""
    return any(_IMAGE.fullmatch(column) for column in columns)


def suggested_columns(columns: Iterable[str]) -> str:
    """Suggest a value of `--dataloader.columns` to read rows with these columns for SFT."""
    names = {column.lower(): column for column in columns}
    prompt, answer, turns = (
        next((names[name] for name in known if name in names), None)
        for known in (_PROMPT_NAMES, _ANSWER_NAMES, _TURN_NAMES)
    )
    if turns:
        return f"messages={turns}"
    return f"prompt={prompt} response={answer}" if prompt and answer else "OURS=THEIRS"


def parse_columns(columns: Sequence[str]) -> dict[str, str]:
    """Parse `["prompt=question", …]` into a dictionary. Raise `UserError` for other forms and
    repeated names."""
    mapping: dict[str, str] = {}
    for entry in columns:
        ours, equals, theirs = (part.strip() for part in entry.partition("="))
        if not (ours and equals and theirs):
            raise UserError(
                f"--dataloader.columns: {entry!r} must have the form OURS=THEIRS, such as "
                "prompt=question"
            )
        if ours in mapping:
            raise UserError(
                f"--dataloader.columns: {ours!r} is set twice, to {mapping[ours]!r} and {theirs!r}"
            )
        mapping[ours] = theirs
    return mapping
