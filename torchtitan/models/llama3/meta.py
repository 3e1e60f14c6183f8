"""Llama in Meta's own format: the names and row order of its weights, and params.json."""

import dataclasses
import math
from collections.abc import Mapping
from typing import TypedDict

from torchtitan.models.common.config_reader import ConfigReader
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.protocols.state_dict_adapter import (
    ExternalFormat,
    KeyMapping,
    Repeated,
    RopePermutation,
    StateDictAdapter,
)
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger

_SAME = (
    *("attention_norm", "attention.wv", "attention.wo"),
    *("ffn_norm", "feed_forward.w1", "feed_forward.w3", "feed_forward.w2"),
)
"""Modules of a layer with the same names and rows in both formats."""

_EXTRA = "torchtitan"
"""Our own key of params.json, for facts that Meta's keys cannot express; Meta's reader ignores
unknown keys."""

_SCALING_FACTOR = 8.0
"""The only factor in Meta's code, although Llama 3.2 (32 in its config.json) is published in this
format too."""

_KNOWN = {
    *(
        "dim",
        "n_layers",
        "n_heads",
        "n_kv_heads",
        "vocab_size",
        "multiple_of",
        "ffn_dim_multiplier",
        "norm_eps",
    ),
    *("rope_theta", "use_scaled_rope", _EXTRA),
}


def adapter(config: Llama3Model.Config) -> StateDictAdapter:
    """Return the adapter of a model. Meta rotates pairs of neighboring elements, and writes tied
    weights twice."""
    permutation = RopePermutation(config.resolved_head_dim)
    embedding, output = "tok_embeddings.weight", "output.weight"
    if config.tie_embeddings:
        ends = [KeyMapping(embedding, (embedding, output), Repeated(2))]
    else:
        ends = [KeyMapping(embedding, embedding), KeyMapping(f"head.{output}", output)]
    projections = [f"layers.*.attention.{projection}.weight" for projection in ("wq", "wk")]
    return StateDictAdapter(
        [
            *ends,
            KeyMapping("head.norm.weight", "norm.weight"),
            *(KeyMapping(name, name, permutation) for name in projections),
            *(KeyMapping(name, name) for name in (f"layers.*.{module}.weight" for module in _SAME)),
        ],
        n_layers=config.n_layers,
        ignored=["rope.freqs"],
        tied={output: embedding} if config.tie_embeddings else {},
    )


def from_params_json(document: Mapping[str, object]) -> Llama3Model.Config:
    """Return the model that a params.json describes. Warn of facts that neither Meta's keys nor
    `_EXTRA` give. Raise `UserError` for a missing size or an unsupported value."""
    if unknown := sorted(document.keys() - _KNOWN):
        raise UserError(f"params.json: not supported by this family: {', '.join(unknown)}")
    reader = ConfigReader("params.json", document)
    extra = reader.section(_EXTRA)
    implied = _implied(
        reader.flag("use_scaled_rope", default=False), has_theta="rope_theta" in document
    )
    if unknown := sorted(extra.values.keys() - implied.keys()):
        raise UserError(f"params.json: not known under '{_EXTRA}': {', '.join(unknown)}")
    dim, n_heads = (reader.whole_number(key) for key in ("dim", "n_heads"))
    multiplier = reader.number("ffn_dim_multiplier") if reader.has("ffn_dim_multiplier") else None
    config = Llama3Model.Config(
        dim=dim,
        n_layers=reader.whole_number("n_layers"),
        n_heads=n_heads,
        n_kv_heads=reader.whole_number("n_kv_heads") if reader.has("n_kv_heads") else n_heads,
        ffn_dim=_ffn_dim(dim, reader.whole_number("multiple_of", default=256), multiplier),
        vocab_size=reader.whole_number("vocab_size", hint=" (the rows of tok_embeddings.weight)"),
        norm_eps=reader.number("norm_eps", default=1e-5),
        tie_embeddings=extra.flag("tie_embeddings", default=implied["tie_embeddings"]),
        max_seq_len=extra.whole_number("max_seq_len", default=implied["max_seq_len"]),
        rope=RoPEConfig(
            theta=reader.number("rope_theta", default=10_000.0),
            scaling_factor=extra.number(
                "rope_scaling_factor", default=implied["rope_scaling_factor"]
            ),
        ),
    )
    config.validate()
    if "rope_theta" not in document and "max_seq_len" not in extra.values:
        logger.warning(
            f"params.json: no rope_theta, as in Llama 1 and 2: the base {config.rope.theta:g} and "
            f"a context of {config.max_seq_len} are assumed (--model.max_seq_len)"
        )
    if config.rope.scaling_factor != 1.0 and "rope_scaling_factor" not in extra.values:
        logger.warning(
            f"params.json does not give the scaling factor of RoPE: {config.rope.scaling_factor:g} "
            "is assumed, as in "
            f'Llama 3.1. Llama 3.2 has 32: set "{_EXTRA}": {{"rope_scaling_factor": 32}} in '
            "params.json, or "
            "use the files in Hugging Face's format"
        )
    return config


def to_params_json(config: Llama3Model.Config) -> dict[str, object]:
    """Return the params.json of a model. Raise `UserError` if Meta's code cannot compute the
    model."""
    _check_expressible(config)
    multiple_of, multiplier = _ffn_parameters(config.dim, config.ffn_dim)
    factor = config.rope.scaling_factor
    said = {
        "tie_embeddings": config.tie_embeddings,
        "max_seq_len": config.max_seq_len,
        "rope_scaling_factor": factor,
    }
    implied = _implied(factor != 1.0)
    extra = {key: value for key, value in said.items() if (key, value) not in implied.items()}
    if "rope_scaling_factor" in extra:
        logger.warning(
            f"params.json cannot express that RoPE is scaled by {factor:g}: Meta's code scales by "
            f"{_SCALING_FACTOR:g}, even for Llama 3.2; torchtitan reads the file back correctly"
        )
    return {
        **{
            name: getattr(config, name)
            for name in ("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size")
        },
        "multiple_of": multiple_of,
        "ffn_dim_multiplier": multiplier,
        "norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "use_scaled_rope": factor != 1.0,
        **({_EXTRA: extra} if extra else {}),
    }


FORMAT = ExternalFormat(adapter=adapter, to_external=to_params_json, from_external=from_params_json)


class _Extra(TypedDict):
    tie_embeddings: bool
    max_seq_len: int
    rope_scaling_factor: float


def _implied(is_scaled: bool, *, has_theta: bool = True) -> _Extra:
    """Return the values under `_EXTRA` that Meta's keys imply: the context of Llama 3.1, 3 or 2."""
    unscaled_context = 8192 if has_theta else 4096
    return {
        "tie_embeddings": False,
        "max_seq_len": 131_072 if is_scaled else unscaled_context,
        "rope_scaling_factor": _SCALING_FACTOR if is_scaled else 1.0,
    }


def _check_expressible(config: Llama3Model.Config) -> None:
    if config.scores:
        raise UserError("Meta's format has no reward models; use --to hf")
    if config.resolved_head_dim * config.n_heads != config.dim:
        raise UserError(
            f"Meta's format has no model.head_dim, and this model's {config.head_dim} is not dim / "
            f"n_heads = {config.dim} / {config.n_heads}"
        )
    if config.attention_bias or config.mlp_bias:
        raise UserError("Meta's format has no biases (model.attention_bias, model.mlp_bias)")
    if config.rope.scaling_factor == 1.0:
        return
    plain = RoPEConfig(theta=config.rope.theta, scaling_factor=config.rope.scaling_factor)
    if config.rope != plain:
        raise UserError(
            "Meta's format has no RoPE scaling but Llama 3.1's, and this model's is "
            f"{dataclasses.asdict(config.rope)}"
        )


def _ffn_dim(dim: int, multiple_of: int, multiplier: float | None) -> int:
    """Return the width of the feed-forward network as Meta's code computes it."""
    width = int(2 * (4 * dim) / 3)
    if multiplier is not None:
        width = int(multiplier * width)
    return -(-width // multiple_of) * multiple_of


def _ffn_parameters(dim: int, ffn_dim: int) -> tuple[int, float]:
    """Return `multiple_of` and the multiplier with the fewest digits that give `ffn_dim`
    exactly."""
    multiple_of = math.gcd(ffn_dim, 1024)
    # Widths from ffn_dim - multiple_of + 1 to ffn_dim are rounded up to it; aim for the middle.
    ratio = (ffn_dim + 1 - multiple_of / 2) / int(2 * (4 * dim) / 3)
    found = (round(ratio, digits) for digits in range(1, 17))
    return multiple_of, next(m for m in found if _ffn_dim(dim, multiple_of, m) == ffn_dim)
