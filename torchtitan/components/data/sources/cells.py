"""Cells of Arrow tables as the values that `datasets` returns, except floats of 16 and 32 bits.

`datasets` stores a column of type `Json`, or such a part of a column, as JSON text of Arrow's type
`arrow.json`. Arrow files keep this type in their schema, and parquet files in the column's logical
type `JSON`. Only `Json(decode=False)`, whose text `datasets` returns unchanged, appears just in the
schema's metadata, under the key `huggingface`.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from torchtitan.components.data.sources.rows import parse_json

if TYPE_CHECKING:
    import pyarrow

CellReader = Callable[[Any], object]
"""Maps a cell that pyarrow converted to Python, of a type that follows from its column's, to the
value of a row. Raises `ValueError` for broken JSON."""


def cell_readers(schema: "pyarrow.Schema") -> dict[str, CellReader]:
    """Return a reader for each column of a schema.

    Arrow gives all objects of a column the same keys. Readers drop keys without a value, except
    within JSON text, which keeps the keys of each object.
    """
    features = _features(schema)
    return {
        field.name: _reader(field.type, features.get(field.name)) or _unchanged for field in schema
    }


def _features(schema: "pyarrow.Schema") -> Mapping[str, object]:
    """Return the features of `datasets` by column, in the form of `Features.to_dict`; empty if the
    schema has none."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (LookupError, TypeError, ValueError, RecursionError):
        return {}
    return features if isinstance(features, dict) else {}


def _unchanged(cell: object) -> object:
    return cell


def _reader(kind: "pyarrow.DataType", feature: object) -> CellReader | None:
    """Return the reader of a type with a feature of `datasets`, if known; None if cells stay
    unchanged."""
    import pyarrow
    from pyarrow import types

    if isinstance(kind, pyarrow.JsonType):
        keeps_text = (
            isinstance(feature, dict)
            and feature.get("_type") == "Json"
            and feature.get("decode") is False
        )
        return None if keeps_text else _decoder()
    if isinstance(kind, pyarrow.BaseExtensionType):
        return _reader(kind.storage_type, None)
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _reader(kind.value_type, feature)
    if types.is_float16(kind) or types.is_float32(kind):
        return partial(_read_short_float, kind.to_pandas_dtype())
    if types.is_struct(kind):
        fields = feature if isinstance(feature, dict) else {}
        return partial(
            _read_object,
            {field.name: _reader(field.type, fields.get(field.name)) for field in kind},
        )
    if types.is_map(kind):
        return _if_any(_read_pairs, _reader(kind.key_type, None), _reader(kind.item_type, None))
    if _is_list(kind):
        if types.is_floating(kind.value_type):  # long vectors, which are no text
            return None
        return _if_any(_read_list, _reader(kind.value_type, _of_items(feature)))
    return None


def _is_list(kind: "pyarrow.DataType") -> bool:
    from pyarrow import types

    checks = (
        types.is_list,
        types.is_large_list,
        types.is_fixed_size_list,
        types.is_list_view,
        types.is_large_list_view,
    )
    return any(check(kind) for check in checks)


def _of_items(feature: object) -> object:
    """Return the feature of a list's items."""
    if isinstance(feature, list):
        return feature[0] if feature else None
    return feature.get("feature") if isinstance(feature, dict) else None


def _if_any(read: Callable[..., object], *readers: CellReader | None) -> CellReader | None:
    """Return the function with the readers of a cell's contents; None if nothing in it changes."""
    if not any(readers):
        return None
    return partial(read, *(reader or _unchanged for reader in readers))


def _decoder() -> CellReader:
    from datasets import Json

    decode = Json().decode_example

    def read(text: str | None) -> object:
        if text is None:
            return None
        if "\\u" in text:  # the parser of `datasets` changes a lone surrogate without an error
            parse_json(text)
        return decode(text)

    return read


def _read_short_float(dtype: Callable[[float], object], cell: float | None) -> float | None:
    """Return the number with the fewest digits that a float of 16 or 32 bits stands for: 0.1, not
    0.10000000149011612, which would become the text of an answer."""
    return None if cell is None else float(str(dtype(cell)))


def _read_object(
    readers: Mapping[str, CellReader | None], cell: dict[str, object] | None
) -> dict[str, object] | None:
    if cell is None:
        return None
    values = ((name, reader, cell[name]) for name, reader in readers.items())
    return {
        name: reader(value) if reader else value
        for name, reader, value in values
        if value is not None
    }


def _read_list(reader: CellReader, cell: list[object] | None) -> list[object] | None:
    return None if cell is None else [reader(item) for item in cell]


def _read_pairs(
    key: CellReader, item: CellReader, cell: list[tuple[object, object]] | None
) -> list[tuple[object, object]] | None:
    return None if cell is None else [(key(name), item(value)) for name, value in cell]
