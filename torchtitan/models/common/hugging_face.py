"""Dense decoders in Hugging Face's format: names of weights and config.json, from a table of each family."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, cast, get_args

from torchtitan.models.common.config_reader import ConfigReader
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.protocols.state_dict_adapter import ExternalFormat, KeyMapping, StateDictAdapter
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger

Precision = Literal["float32", "bfloat16"]
"""Value of `training.mixed_precision_param`."""

_FILE = "config.json"


@dataclass(frozen=True, kw_only=True)
class ModelType:
    """A `model_type` of transformers, with the differences of its computation from other types."""

    architecture: str
    """Its class in transformers: `LlamaForCausalLM`."""

    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Key that changes the computation → the only supported value, which is also the default of an absent key."""

    fixed_per_layer: Mapping[str, Any] = field(default_factory=dict)
    """Key of a list → the only supported value of its items."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Key → value if the key is absent, for keys whose default differs from Llama's."""

    ignored: tuple[str, ...] = ()
    """Keys without effect on the family's computation."""

    has_window: bool = False
    """True if `sliding_window` limits the attention of every layer."""

    heads_divide_width: bool = False
    """True if transformers requires the number of heads to divide `hidden_size`."""


DENSE_ROWS = (
    KeyMapping("tok_embeddings.weight", "model.embed_tokens.weight"),
    KeyMapping("layers.*.attention_norm.weight", "model.layers.*.input_layernorm.weight"),
    KeyMapping("layers.*.attention.wq.weight", "model.layers.*.self_attn.q_proj.weight"),
    KeyMapping("layers.*.attention.wk.weight", "model.layers.*.self_attn.k_proj.weight"),
    KeyMapping("layers.*.attention.wv.weight", "model.layers.*.self_attn.v_proj.weight"),
    KeyMapping("layers.*.attention.wo.weight", "model.layers.*.self_attn.o_proj.weight"),
    KeyMapping("layers.*.ffn_norm.weight", "model.layers.*.post_attention_layernorm.weight"),
    KeyMapping("layers.*.feed_forward.w1.weight", "model.layers.*.mlp.gate_proj.weight"),
    KeyMapping("layers.*.feed_forward.w3.weight", "model.layers.*.mlp.up_proj.weight"),
    KeyMapping("layers.*.feed_forward.w2.weight", "model.layers.*.mlp.down_proj.weight"),
    KeyMapping("head.norm.weight", "model.norm.weight"),
)
"""Names of weights as in Llama, without the output head."""

_HEAD = KeyMapping("head.output.weight", "lm_head.weight")

_SIZES = {
    "hidden_size": "dim",
    "intermediate_size": "ffn_dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_seq_len",
}
"""Required key of config.json → field of the configuration."""

_FIXED: Mapping[str, Any] = {"is_causal": True, "hidden_act": "silu", "partial_rotary_factor": 1.0}
"""`ModelType.fixed` of all types."""

_NULLABLE = {"partial_rotary_factor"}
"""Keys of `_FIXED` that may be null, meaning the supported value."""

_USED = {*_SIZES, *_FIXED, "model_type", "num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings"}
_USED |= {"sliding_window", "rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings"}
_USED |= {"attention_dropout", "dtype", "torch_dtype", "quantization_config"}

_WITHOUT_EFFECT = {
    *("architectures", "_name_or_path", "transformers_version", "initializer_range"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "use_cache"),
    *("pretraining_tp", "return_dict", "output_attentions", "output_hidden_states", "_attn_implementation"),
}
"""Keys without effect on the model's computation; `pretraining_tp` only changes the order of sums."""

_LLAMA3_FACTORS = {
    "factor": "scaling_factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
}
"""Key of RoPE scaling of type llama3 → field of `RoPEConfig`."""

_ORIGINAL_CONTEXT = "original_max_position_embeddings"

_ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_LLAMA3_FACTORS, _ORIGINAL_CONTEXT}


def dense_format(
    build: type[Decoder.Config], model_types: Mapping[str, ModelType], rows: tuple[KeyMapping, ...] = DENSE_ROWS
) -> ExternalFormat:
    """Return the format of a family of dense decoders from its `model_type`s, the preferred one for writing first, and
    the names of its weights (`rows`) without the output head."""
    return ExternalFormat(
        adapter=partial(_adapter, rows),
        to_external=partial(_to_config_json, model_types),
        from_external=partial(_from_config_json, build, model_types),
        model_types=tuple(model_types),
    )


def _adapter(rows: tuple[KeyMapping, ...], config: Decoder.Config) -> StateDictAdapter:
    tied = {"lm_head.weight": "model.embed_tokens.weight"}
    return StateDictAdapter(
        rows if config.tie_embeddings else (*rows, _HEAD),
        n_layers=config.n_layers,
        ignored=["model.layers.*.self_attn.rotary_emb.inv_freq"],
        tied=tied if config.tie_embeddings else {},
    )


def _from_config_json(
    build: type[Decoder.Config], model_types: Mapping[str, ModelType], document: Mapping[str, Any]
) -> Decoder.Config:
    """Return the model that a config.json of transformers 4 or 5 describes; warn of keys with unknown effect. Raise
    `UserError` for another model type, a missing size, or an unsupported value."""
    name = document.get("model_type")
    if name not in list(model_types):
        raise UserError(f"config.json: model_type is {name!r}, and this family is {' or '.join(model_types)}")
    kind = model_types[name]
    reader = ConfigReader(_FILE, {**kind.defaults, **document})
    reader.check_not_quantized()
    for key, only in {**_FIXED, **kind.fixed}.items():
        _require(key, document.get(key, only), only)
    for key, only in kind.fixed_per_layer.items():
        if (given := document.get(key)) is not None:
            for value in given if isinstance(given, list) else [given]:
                _require(key, value, only)
    sizes = {field: reader.whole_number(key) for key, field in _SIZES.items()}
    dim, n_heads = sizes["dim"], sizes["n_heads"]
    head_dim = reader.whole_number("head_dim") if reader.has("head_dim") else dim // n_heads
    has_kv_heads = reader.has("num_key_value_heads")  # null means the number of query heads
    config = build(
        **{**sizes, "max_seq_len": _context(reader, kind)},
        n_kv_heads=reader.whole_number("num_key_value_heads") if has_kv_heads else n_heads,
        head_dim=None if head_dim * n_heads == dim else head_dim,
        norm_eps=reader.number("rms_norm_eps", default=1e-6),
        tie_embeddings=reader.flag("tie_word_embeddings", default=False),
        rope=_rope(reader),
    )
    config.validate()
    _warn_about_ignored_keys(reader, {*kind.fixed, *kind.fixed_per_layer, *kind.ignored})
    return config


def _to_config_json(model_types: Mapping[str, ModelType], config: Decoder.Config) -> dict[str, Any]:
    """Return the keys of config.json that the model determines, with RoPE as in transformers 4 (which 5 reads too)."""
    fits = [n for n, kind in model_types.items() if not (kind.heads_divide_width and config.dim % config.n_heads)]
    kind = model_types[fits[0]]
    return {
        "architectures": [kind.architecture],
        "model_type": fits[0],
        **{key: getattr(config, field) for key, field in _SIZES.items()},
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.resolved_head_dim,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_theta": config.rope.theta,
        "rope_scaling": _rope_scaling(config.rope),
        "sliding_window": None,
        "hidden_act": _FIXED["hidden_act"],
        **kind.fixed,
    }


def precision_of(document: Mapping[str, Any], default: Precision) -> Precision:
    """Return the `dtype` (transformers 5) or `torch_dtype` (4) of a config.json, or log and return `default` if it is
    not supported. Raise `UserError` for a value that is not a name."""
    key = "dtype" if document.get("dtype") is not None else "torch_dtype"
    value = document.get(key)
    if value is not None and not isinstance(value, str):
        raise ConfigReader(_FILE, document).wrong(key, value, "the name of a type")
    if value in get_args(Precision):
        return cast(Precision, value)
    said = f"{key} is {value}, in which we do not compute" if value else "no dtype"
    logger.info("%s: %s: training.mixed_precision_param is %s", _FILE, said, default)
    return default


def _require(key: str, value: Any, only: Any) -> None:
    value = "silu" if value == "swish" else value
    is_same = value == only and isinstance(value, bool) == isinstance(only, bool)
    if not is_same and not (value is None and key in _NULLABLE):
        raise UserError(f"config.json: {key} is {value!r}, which this family does not support (only {only!r})")


def _context(reader: ConfigReader, kind: ModelType) -> int:
    """Return the longest supported window. A sliding window shortens it, since full attention equals the model's only
    within that window."""
    context = reader.whole_number("max_position_embeddings")
    if not reader.has("sliding_window"):
        return context
    window = reader.whole_number("sliding_window")
    if not kind.has_window or window >= context:
        return context
    logger.warning(
        "config.json: sliding_window is %d, below max_position_embeddings %d: this family attends to the whole "
        "context only, so model.max_seq_len is %d, up to which that is the same",
        window,
        context,
        window,
    )
    return window


def _warn_about_ignored_keys(reader: ConfigReader, known: set[str]) -> None:
    dropout = reader.values.get("attention_dropout") or 0.0
    if dropout and reader.number("attention_dropout"):
        logger.warning("config.json: attention_dropout is %g, and ignored: there is no dropout here", dropout)
    if unknown := sorted(reader.values.keys() - _USED - _WITHOUT_EFFECT - known):
        logger.warning("config.json: not known, and ignored: %s", ", ".join(unknown))


def _rope(reader: ConfigReader) -> RoPEConfig:
    given = [key for key in ("rope_scaling", "rope_parameters") if reader.section(key).values]
    ropes = [_rope_of(reader, reader.section(key)) for key in given or ["rope_scaling"]]
    if any(rope != ropes[0] for rope in ropes):
        said = " and ".join(f"{key} {reader.values[key]!r}" for key in given)
        raise UserError(f"config.json: {said} differ; leave the one out that does not hold")
    return ropes[0]


def _rope_of(reader: ConfigReader, parameters: ConfigReader) -> RoPEConfig:
    kind = parameters.values.get("rope_type", parameters.values.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise UserError(
            f"config.json: RoPE of type {kind!r}, which this family does not support (default, linear, llama3)"
        )
    for key, value in parameters.values.items():
        if key not in _ROPE_KEYS and value is not None:
            raise UserError(f"config.json: RoPE's {key} is {value!r}, which this family does not support")
    _require("partial_rotary_factor", parameters.values.get("partial_rotary_factor"), 1.0)
    theta = ConfigReader(_FILE, {**reader.values, **parameters.values}).number("rope_theta", default=10_000.0)
    if kind == "default":
        return RoPEConfig(theta=theta)
    if kind == "linear":
        return RoPEConfig(theta=theta, scaling="linear", scaling_factor=parameters.number("factor"))
    values: dict[str, Any] = {field: parameters.number(key) for key, field in _LLAMA3_FACTORS.items()}
    return RoPEConfig(theta=theta, original_max_seq_len=_original_context(reader, parameters), **values)


def _original_context(reader: ConfigReader, parameters: ConfigReader) -> int:
    """Return the context before llama3 scaling of RoPE, inside or outside the section of the scaling.
    transformers 4 reads it inside; 5 prefers it outside, and defaults to the whole context."""
    key = _ORIGINAL_CONTEXT
    found = [where.whole_number(key) for where in (parameters, reader) if where.has(key)]
    if len(set(found)) > 1:
        raise UserError(
            f"config.json: {key} is {found[1]}, and {found[0]} in the scaling of RoPE; leave out the wrong one"
        )
    return found[0] if found else reader.whole_number("max_position_embeddings")


def _rope_scaling(rope: RoPEConfig) -> dict[str, Any] | None:
    if rope.scaling_factor == 1.0:
        return None
    if rope.scaling == "linear":
        return {"rope_type": "linear", "factor": rope.scaling_factor}
    factors = {key: getattr(rope, field) for key, field in _LLAMA3_FACTORS.items()}
    return {"rope_type": "llama3", **factors, _ORIGINAL_CONTEXT: rope.original_max_seq_len}
