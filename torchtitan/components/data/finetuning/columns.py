"""Column names in public data: synonyms of our names, and names that reveal the purpose of a column."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torchtitan.tools.errors import UserError

SYNONYMS = {
    "system_prompt": "system",
    "functions": "tools",
    "context": "input",
    "chosen_messages": "chosen",
    "rejected_messages": "rejected",
}
"""Other names of columns → ours."""

LABELS = ("label", "kto_tag")
"""Columns that label an answer good (true) or bad (false), as in KTO data."""

ROW_WEIGHTS = ("weight", "loss_weight", "sample_weight")

_MATTERS = frozenset(
    "label labels kto_tag weight weights loss_weight sample_weight train train_detail mask loss_mask score scores "
    "rating reward rewards chosen rejected system system_prompt tools functions function_call documents history input "
    "inputs context reasoning reasoning_content thinking image images video videos audio audios "
    "chat_template_kwargs".split()
)
_ASKS = "prompt question query problem instruction input inputs user human source request".split()
_ANSWERS = "response completion answer output outputs solution target targets assistant reply".split()
_TURN_LISTS = "conversation dialogue dialog chat turns dialogs".split()


def mapped_row(row: Mapping[str, Any], mapping: Mapping[str, str]) -> dict[str, Any]:
    """Return a row's cells, renamed by a mapping of our column names to the row's."""
    kept = {column: value for column, value in row.items() if column not in mapping.values()}
    return kept | {ours: row[theirs] for ours, theirs in mapping.items() if theirs in row}


def renamed_row(row: Mapping[str, Any], mapping: Mapping[str, str]) -> dict[str, Any]:
    """Return a row's cells by our column names: first the ones in the mapping, then `SYNONYMS`."""
    renamed = mapped_row(row, mapping)
    for theirs, ours in SYNONYMS.items():
        if theirs in renamed and ours not in mapping and not is_filled(renamed.get(ours)):
            renamed[ours] = renamed.pop(theirs)
    return renamed


def is_filled(value: Any) -> bool:
    return not (value is None or value == [] or isinstance(value, str) and not value.strip())


def relevant_columns(row: Mapping[str, Any]) -> list[str]:
    """Return the filled columns of a row whose names suggest that they affect training."""
    return [column for column, value in row.items() if column.lower() in _MATTERS and is_filled(value)]


def suggested_columns(columns: Iterable[str]) -> str:
    """Return a value of `--dataloader.columns` that is likely to read rows with these columns for SFT."""
    names = {column.lower(): column for column in columns}
    ask, answer, turns = (
        next((names[name] for name in known if name in names), None) for known in (_ASKS, _ANSWERS, _TURN_LISTS)
    )
    if turns:
        return f"messages={turns}"
    return f"prompt={ask} response={answer}" if ask and answer else "OURS=THEIRS"


def parse_columns(columns: Sequence[str]) -> dict[str, str]:
    """Parse `["prompt=question", …]` as ours → the file's name; raises `UserError` for other forms and repeated
    names."""
    mapping: dict[str, str] = {}
    for entry in columns:
        ours, equals, theirs = (part.strip() for part in entry.partition("="))
        if not (ours and equals and theirs):
            raise UserError(f"--dataloader.columns: {entry!r} must be of the form OURS=THEIRS, such as prompt=question")
        if ours in mapping:
            raise UserError(f"--dataloader.columns: {ours!r} is given twice, {mapping[ours]!r} and {theirs!r}")
        mapping[ours] = theirs
    return mapping
