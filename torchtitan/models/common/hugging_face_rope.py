"""RoPE in config.json, in the spellings of transformers 4 (`rope_theta`, `rope_scaling`) and 5
(`rope_parameters`)."""

import math
from collections.abc import Collection, Mapping

from torchtitan.models.common.config_reader import ConfigReader
from torchtitan.models.common.rope import RoPEConfig, Scaling
from torchtitan.tools.errors import UnsupportedModelError, UserError
from torchtitan.tools.logging import logger

_ORIGINAL_CONTEXT = "original_max_position_embeddings"
_CONTEXT = "max_position_embeddings"

_FACTOR = {"factor": "scaling_factor"}
_FACTORS = {
    **_FACTOR,
    _ORIGINAL_CONTEXT: "original_max_seq_len",
    "attention_factor": "attention_factor",
}

_FIELDS: dict[Scaling, dict[str, str]] = {
    "linear": _FACTOR,
    "dynamic": _FACTOR,
    "llama3": {
        **_FACTOR,
        **{n: n for n in ("low_freq_factor", "high_freq_factor")},
        _ORIGINAL_CONTEXT: "original_max_seq_len",
    },
    "yarn": {**_FACTORS, "beta_slow": "low_freq_factor", "beta_fast": "high_freq_factor"},
    "longrope": {**_FACTORS, "short_factor": "short_factors", "long_factor": "long_factors"},
    "proportional": _FACTOR,
}
"""Type of scaling → its own keys → fields of `RoPEConfig`."""

_ONLY_READ: dict[Scaling, set[str]] = {"yarn": {"mscale", "mscale_all_dim", "truncate"}}

_WITHOUT_EFFECT: dict[Scaling, set[str]] = {"yarn": {"attn_factor"}}
"""Keys of published files that transformers ignores."""

_ALIASES = {"su": "longrope"}
"""Older names of types."""

_COMMON_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


def check_sections(reader: ConfigReader, names: Collection[str]) -> None:
    """Raise `UserError` unless all keys of RoPE are in sections with these names."""
    for key in ("rope_parameters", "rope_scaling"):
        for name, value in reader.section(key).values.items():
            if name not in names:
                raise UserError(
                    f"config.json: {key} has {name!r}: {value!r}, but must have only the sections "
                    f"{' and '.join(names)}"
                )


def read_rope(
    reader: ConfigReader, *, rotates_part: bool, layer_type: str | None = None
) -> RoPEConfig:
    """Return the RoPE of a config.json. Raise `UserError` if its keys contradict each other, or
    need an unsupported feature.

    Args:
        rotates_part: the model type supports `partial_rotary_factor`, which proportional RoPE
            always does.
        layer_type: its section of `rope_parameters`; None: without sections.
    """
    given = [key for key in ("rope_scaling", "rope_parameters") if reader.section(key).values]
    sections = [reader.section(key) for key in given or ["rope_scaling"]]
    if layer_type is not None:
        sections = [section.section(layer_type) for section in sections]
        for section in sections:
            if section.has("type") and not section.has("rope_type"):
                raise UserError(
                    f"config.json: RoPE's type is {section.values['type']!r}, which transformers 5 "
                    "ignores in a model with several RoPEs; rename the key to rope_type"
                )
    ropes = [_read(reader, section, rotates_part) for section in sections]
    if any(rope != ropes[0] for rope in ropes):
        said = " and ".join(f"{key} {reader.values[key]!r}" for key in given)
        raise UserError(f"config.json: {said} differ; remove the wrong one")
    return ropes[0]


def _read(reader: ConfigReader, parameters: ConfigReader, rotates_part: bool) -> RoPEConfig:
    said = parameters.values.get("rope_type", parameters.values.get("type", "default"))
    kind: object = _ALIASES.get(said, said) if isinstance(said, str) else said
    if kind != "default" and kind not in [*_FIELDS]:
        supported = ", ".join(("default", *_FIELDS))
        raise UnsupportedModelError(
            f"config.json: RoPE of type {said!r}, which this family does not support ({supported})"
        )
    known = (
        _COMMON_KEYS
        if kind == "default"
        else {*_COMMON_KEYS, *_FIELDS[kind], *_ONLY_READ.get(kind, ())}
    )
    for key, value in parameters.values.items():
        if key in known or value is None:
            continue
        if kind in _WITHOUT_EFFECT and key in _WITHOUT_EFFECT[kind]:
            logger.warning("config.json: ignoring RoPE's %s %r, like transformers", key, value)
        else:
            raise UnsupportedModelError(
                f"config.json: RoPE's {key} is {value!r}, which this family does not support"
            )
    outer = ConfigReader(reader.file, {**reader.values, **parameters.values})
    rope = RoPEConfig(theta=outer.number("rope_theta", default=10_000.0))
    if outer.has("partial_rotary_factor"):
        rope.rotated_fraction = outer.number("partial_rotary_factor")
        if rope.rotated_fraction != 1.0 and not rotates_part and kind != "proportional":
            raise UnsupportedModelError(
                f"config.json: partial_rotary_factor is {rope.rotated_fraction}, which this family "
                "does not support (only 1.0)"
            )
    if kind != "default":
        rope.scaling = kind
        _read_scaling(rope, reader, parameters)
    return rope


def _read_scaling(rope: RoPEConfig, reader: ConfigReader, parameters: ConfigReader) -> None:
    context, keys = reader.whole_number(_CONTEXT), _FIELDS[rope.scaling]
    if _ORIGINAL_CONTEXT in keys or rope.scaling == "dynamic":
        rope.original_max_seq_len = (
            _original_context(reader, parameters) if _ORIGINAL_CONTEXT in keys else context
        )
    ratio = context / rope.original_max_seq_len
    implied = {
        "factor": 1.0 if rope.scaling == "proportional" else ratio,
        "beta_slow": 1.0,
        "beta_fast": 32.0,
    }
    implied = implied if rope.scaling in ("yarn", "longrope", "proportional") else {}
    for key in (key for key in keys if key not in (_ORIGINAL_CONTEXT, "attention_factor")):
        read = _numbers if key in ("short_factor", "long_factor") else ConfigReader.number
        is_implied = key in implied and not parameters.has(key)
        setattr(rope, keys[key], implied[key] if is_implied else read(parameters, key))
    if parameters.has("attention_factor"):
        rope.attention_factor = parameters.number("attention_factor")
    elif parameters.has("mscale") and parameters.has("mscale_all_dim"):
        rope.attention_factor = _mscale(rope, parameters, "mscale") / _mscale(
            rope, parameters, "mscale_all_dim"
        )
    if parameters.has("truncate") and not parameters.flag("truncate"):
        rope.scaling = "yarn_untruncated"


def _mscale(rope: RoPEConfig, parameters: ConfigReader, key: str) -> float:
    """Return a scale of YaRN as in DeepSeek, which divides two of them."""
    factor = rope.scaling_factor
    return 0.1 * parameters.number(key) * math.log(factor) + 1.0 if factor > 1 else 1.0


def _numbers(parameters: ConfigReader, key: str) -> list[float]:
    values = parameters.values.get(key)
    if not isinstance(values, list):
        raise parameters.wrong(key, values, "a list of numbers")
    return [float(ConfigReader(parameters.file, {key: value}).number(key)) for value in values]


def _original_context(reader: ConfigReader, parameters: ConfigReader) -> int:
    """Return the context before scaling, inside or outside the section of the scaling. transformers
    4 reads it inside; 5 prefers it outside, and defaults to the whole context."""
    key = _ORIGINAL_CONTEXT
    found = [where.whole_number(key) for where in (parameters, reader) if where.has(key)]
    if len(set(found)) > 1:
        raise UserError(
            f"config.json: {key} is {found[1]}, and {found[0]} in the scaling of RoPE; remove the "
            "wrong one"
        )
    return found[0] if found else reader.whole_number(_CONTEXT)


def write_rope(rope: RoPEConfig, max_seq_len: int) -> dict[str, object]:
    """Return the keys of transformers 4, which 5 also reads. Raise `UserError` if neither can
    express the model."""
    scaling = write_scaling(rope, max_seq_len)
    keys: dict[str, object] = {"rope_theta": rope.theta, "rope_scaling": scaling}
    if rope.rotated_fraction != 1.0:
        keys["partial_rotary_factor"] = rope.rotated_fraction
    if rope.scaling == "longrope":  # where transformers 4 reads it
        keys[_ORIGINAL_CONTEXT] = rope.original_max_seq_len
    return keys


def write_rope_section(rope: RoPEConfig, max_seq_len: int) -> dict[str, object]:
    """Return a section of `rope_parameters` of transformers 5. Raise `UserError` like
    `write_rope`."""
    section = {
        "rope_theta": rope.theta,
        **(write_scaling(rope, max_seq_len) or {"rope_type": "default"}),
    }
    if rope.rotated_fraction != 1.0:
        section["partial_rotary_factor"] = rope.rotated_fraction
    return section


def write_scaling(rope: RoPEConfig, max_seq_len: int) -> Mapping[str, object] | None:
    """Return `rope_scaling` of transformers 4. Raise `UserError` like `write_rope`."""
    if not rope.is_scaled:
        return None
    if rope.scaling == "dynamic" and rope.original_max_seq_len != max_seq_len:
        raise UserError(
            "config.json cannot express dynamic RoPE with original_max_seq_len "
            f"{rope.original_max_seq_len} and max_seq_len {max_seq_len}: there they are equal"
        )
    kind: Scaling = "yarn" if rope.scaling == "yarn_untruncated" else rope.scaling
    values = {key: getattr(rope, field) for key, field in _FIELDS[kind].items()}
    scaling = {"rope_type": kind} | {
        key: value for key, value in values.items() if value is not None
    }
    return scaling if kind == rope.scaling else {**scaling, "truncate": False}


GROWTH = "llama_4_scaling_beta"
"""Key of the growth of queries with their position, in the section of RoPE, and its field."""


def prepare_growth(document: dict[str, object], default: Mapping[str, object]) -> dict[str, object]:
    """Return a config.json with the growth of queries outside of RoPE's section, which has a
    `default`; a growth of 0 is omitted. Raise `UserError` without a growth, or with two."""
    keys = ("rope_scaling", "rope_parameters")
    given = [key for key in keys if ConfigReader("config.json", document).section(key).values]
    prepared = document if given else {**document, "rope_parameters": default}
    found = [document[GROWTH]] if GROWTH in document else []
    for key in given or keys[1:]:
        section = ConfigReader("config.json", prepared).section(key)
        found.append(section.values.get(GROWTH))
        if found[-1] is None or found[-1] != found[0]:
            raise section.wrong(GROWTH, found[-1], f"a number in {key}, the only one")
        unread = (GROWTH, "max_position_embeddings")
        without = {name: value for name, value in section.values.items() if name not in unread}
        prepared = {**prepared, key: without}
    prepared = {key: value for key, value in prepared.items() if key != GROWTH}
    return {**prepared, GROWTH: found[0]} if found[0] else prepared
