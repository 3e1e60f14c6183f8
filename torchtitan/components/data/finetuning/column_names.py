"""What columns are called in public data: other names for ours, and names that tell what a column is for."""

from collections.abc import Iterable, Mapping
from typing import Any

SYNONYMS = {
    "system_prompt": "system",
    "functions": "tools",
    "context": "input",
    "chosen_messages": "chosen",
    "rejected_messages": "rejected",
}
"""Other names of columns → ours."""

LABELS = ("label", "kto_tag")
"""Columns that call a row's answer good (true) or bad (false), as data for KTO has them."""

ROW_WEIGHTS = ("weight", "loss_weight", "sample_weight")
"""Columns that weigh a whole row."""

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
    """The cells of a row by the names of a mapping, our name for a column → the row's; the others by the row's."""
    kept = {column: value for column, value in row.items() if column not in mapping.values()}
    return kept | {ours: row[theirs] for ours, theirs in mapping.items() if theirs in row}


def renamed_row(row: Mapping[str, Any], mapping: Mapping[str, str]) -> dict[str, Any]:
    """The cells of a row by our names for the columns: those of the mapping, else those of `SYNONYMS`."""
    renamed = mapped_row(row, mapping)
    for theirs, ours in SYNONYMS.items():
        if theirs in renamed and ours not in mapping and not is_filled(renamed.get(ours)):
            renamed[ours] = renamed.pop(theirs)
    return renamed


def is_filled(value: Any) -> bool:
    """Whether a cell has something in it."""
    return not (value is None or value == [] or isinstance(value, str) and not value.strip())


def columns_that_matter(row: Mapping[str, Any]) -> list[str]:
    """The filled columns of a row that, by their names, change what it says to train."""
    return [column for column, value in row.items() if column.lower() in _MATTERS and is_filled(value)]


def suggested_columns(columns: Iterable[str]) -> str:
    """What `--dataloader.columns` may be for rows to imitate that have columns of these names."""
    names = {column.lower(): column for column in columns}
    ask, answer, turns = (
        next((names[name] for name in known if name in names), None) for known in (_ASKS, _ANSWERS, _TURN_LISTS)
    )
    if turns:
        return f"messages={turns}"
    return f"prompt={ask} response={answer}" if ask and answer else "OURS=THEIRS"
