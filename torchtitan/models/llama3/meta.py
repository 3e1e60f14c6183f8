"""Llama in Meta's own format: the names and rows of its weights, and params.json."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.protocols.state_dict_adapter import ForeignFormat, Repeated, RopePermutation, Row, StateDictAdapter
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger

_SAME = (
    "layers.*.attention_norm.weight",
    "layers.*.attention.wv.weight",
    "layers.*.attention.wo.weight",
    "layers.*.ffn_norm.weight",
    "layers.*.feed_forward.w1.weight",
    "layers.*.feed_forward.w3.weight",
    "layers.*.feed_forward.w2.weight",
    "norm.weight",
)

_EXTRA = "torchtitan"
"""Key of params.json, of ours, for what Meta's do not say; Meta's reader passes over keys that it does not know."""

_SCALING_FACTOR = 8.0
"""Meta's code has no other, though it published Llama 3.2 (32 in its config.json) in this format too."""

_KNOWN = {
    *("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of", "ffn_dim_multiplier", "norm_eps"),
    *("rope_theta", "use_scaled_rope", _EXTRA),
}


def adapter(config: Llama3Model.Config) -> StateDictAdapter:
    """The table of a model's weights. Meta rotates neighbouring elements, and writes tied weights twice."""
    permutation = RopePermutation(config.resolved_head_dim)
    names = ("tok_embeddings.weight", "output.weight")
    if config.tie_embeddings:
        ends = [Row(names[0], names, Repeated(2))]
    else:
        ends = [Row(name, name) for name in names]
    projections = [f"layers.*.attention.{projection}.weight" for projection in ("wq", "wk")]
    return StateDictAdapter(
        [*ends, *(Row(name, name, permutation) for name in projections), *(Row(name, name) for name in _SAME)],
        n_layers=config.n_layers,
        ignored=["rope.freqs"],
        tied={names[1]: names[0]} if config.tie_embeddings else {},
    )


def from_params_json(document: Mapping[str, Any]) -> Llama3Model.Config:
    """The model that a params.json describes.

    The context that a model was trained for is not in the file: it is taken as 131072 with scaled RoPE, otherwise 8192.

    Raises:
        UserError: for a missing size, or what this model does not compute.
    """
    if unknown := sorted(document.keys() - _KNOWN):
        raise UserError(f"params.json: not supported by this family: {', '.join(unknown)}")
    dim, n_heads = (_whole_number(document, key) for key in ("dim", "n_heads"))
    scaled = bool(document.get("use_scaled_rope", False))
    # Llama 1 and 2, whose base was 10,000, do not say it.
    rope = RoPEConfig(theta=document.get("rope_theta", 10_000.0), scaling_factor=_SCALING_FACTOR if scaled else 1.0)
    config = Llama3Model.Config(
        dim=dim,
        n_layers=_whole_number(document, "n_layers"),
        n_heads=n_heads,
        n_kv_heads=_whole_number(document, "n_kv_heads") if document.get("n_kv_heads") else n_heads,
        ffn_dim=_ffn_dim(dim, document.get("multiple_of", 256), document.get("ffn_dim_multiplier")),
        vocab_size=_whole_number(document, "vocab_size"),
        norm_eps=document.get("norm_eps", 1e-5),
        max_seq_len=131_072 if scaled else 8192,
        rope=rope,
    )
    config = _with_extra(config, document.get(_EXTRA, {}))
    config.validate()
    return config


def to_params_json(config: Llama3Model.Config) -> dict[str, Any]:
    """The params.json of a model, with what Meta's keys do not say under a key of ours, which Meta's code ignores.

    Raises:
        UserError: for a model that Meta's code cannot compute.
    """
    _check_expressible(config)
    multiple_of, multiplier = _ffn_parameters(config.dim, config.ffn_dim)
    document: dict[str, Any] = {
        "dim": config.dim,
        "n_layers": config.n_layers,
        "n_heads": config.n_heads,
        "n_kv_heads": config.n_kv_heads,
        "vocab_size": config.vocab_size,
        "multiple_of": multiple_of,
        "ffn_dim_multiplier": multiplier,
        "norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "use_scaled_rope": config.rope.scaling_factor != 1.0,
    }
    if extra := _extra(config, from_params_json(document)):
        document[_EXTRA] = extra
    return document


FORMAT = ForeignFormat(adapter=adapter, to_foreign=to_params_json, from_foreign=from_params_json)


def _extra(config: Llama3Model.Config, read_back: Llama3Model.Config) -> dict[str, Any]:
    """What a reader of Meta's keys alone would get wrong."""
    extra: dict[str, Any] = {
        name: getattr(config, name)
        for name in ("tie_embeddings", "max_seq_len")
        if getattr(config, name) != getattr(read_back, name)
    }
    if config.rope.scaling_factor != read_back.rope.scaling_factor:
        extra["rope_scaling_factor"] = config.rope.scaling_factor
        logger.warning(
            "params.json cannot say that RoPE is scaled by %g: Meta's own code scales by %g, as it does with its "
            "Llama 3.2; torchtitan reads it back right",
            config.rope.scaling_factor,
            _SCALING_FACTOR,
        )
    assert dataclasses.replace(_with_extra(read_back, extra), head_dim=config.head_dim) == config
    return extra


def _with_extra(config: Llama3Model.Config, extra: Mapping[str, Any]) -> Llama3Model.Config:
    values = dict(extra)
    factor = values.pop("rope_scaling_factor", config.rope.scaling_factor)
    if unknown := values.keys() - {"tie_embeddings", "max_seq_len"}:
        raise UserError(f"params.json: not known under '{_EXTRA}': {', '.join(sorted(unknown))}")
    return dataclasses.replace(config, rope=dataclasses.replace(config.rope, scaling_factor=factor), **values)


def _check_expressible(config: Llama3Model.Config) -> None:
    if config.resolved_head_dim * config.n_heads != config.dim:
        raise UserError(
            f"Meta's format has no model.head_dim, and this model's {config.head_dim} is not dim / n_heads = "
            f"{config.dim} / {config.n_heads}"
        )
    if config.rope.scaling_factor == 1.0:
        return
    plain = RoPEConfig(theta=config.rope.theta, scaling_factor=config.rope.scaling_factor)
    if config.rope != plain:
        raise UserError(
            f"Meta's format has no RoPE scaling but Llama 3.1's, and this model's is {dataclasses.asdict(config.rope)}"
        )


def _ffn_dim(dim: int, multiple_of: int, multiplier: float | None) -> int:
    """Width of the feed-forward network as Meta's code computes it."""
    width = int(2 * (4 * dim) / 3)
    if multiplier is not None:
        width = int(multiplier * width)
    return -(-width // multiple_of) * multiple_of


def _ffn_parameters(dim: int, ffn_dim: int) -> tuple[int, float]:
    """`multiple_of` and a multiplier with as few digits as possible that give `ffn_dim` exactly."""
    multiple_of = math.gcd(ffn_dim, 1024)
    # Widths from ffn_dim - multiple_of + 1 to ffn_dim are rounded up to it; aim for the middle.
    ratio = (ffn_dim + 1 - multiple_of / 2) / int(2 * (4 * dim) / 3)
    found = (round(ratio, digits) for digits in range(1, 17))
    return multiple_of, next(m for m in found if _ffn_dim(dim, multiple_of, m) == ffn_dim)


def _whole_number(document: Mapping[str, Any], key: str) -> int:
    value = document.get(key)
    if not isinstance(value, int) or value < 1:
        hint = " (the rows of tok_embeddings.weight)" if key == "vocab_size" else ""
        raise UserError(f"params.json: {key} is {value!r}, and must be a whole number above 0{hint}")
    return value
