"""Llama in Hugging Face's format: the names of its weights, and config.json. Mistral's is the same model."""

from collections.abc import Mapping
from typing import Any

from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.protocols.state_dict_adapter import ForeignFormat, Row, StateDictAdapter
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger

MODEL_TYPES = ("llama", "mistral")

_ROWS = (
    Row("tok_embeddings.weight", "model.embed_tokens.weight"),
    Row("layers.*.attention_norm.weight", "model.layers.*.input_layernorm.weight"),
    Row("layers.*.attention.wq.weight", "model.layers.*.self_attn.q_proj.weight"),
    Row("layers.*.attention.wk.weight", "model.layers.*.self_attn.k_proj.weight"),
    Row("layers.*.attention.wv.weight", "model.layers.*.self_attn.v_proj.weight"),
    Row("layers.*.attention.wo.weight", "model.layers.*.self_attn.o_proj.weight"),
    Row("layers.*.ffn_norm.weight", "model.layers.*.post_attention_layernorm.weight"),
    Row("layers.*.feed_forward.w1.weight", "model.layers.*.mlp.gate_proj.weight"),
    Row("layers.*.feed_forward.w3.weight", "model.layers.*.mlp.up_proj.weight"),
    Row("layers.*.feed_forward.w2.weight", "model.layers.*.mlp.down_proj.weight"),
    Row("norm.weight", "model.norm.weight"),
)
_HEAD = Row("output.weight", "lm_head.weight")

_SIZES = {
    "hidden_size": "dim",
    "intermediate_size": "ffn_dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_seq_len",
}
"""Key of config.json, which must be there → field of the configuration."""

_FIXED: dict[str, Any] = {
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
"""What changes the computation, and the only value that this model has for it; also what an absent key means."""

_USED = {*_SIZES, *_FIXED, "model_type", "num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings"}
_USED |= {"sliding_window", "rope_theta", "rope_scaling", "rope_parameters"}

_WITHOUT_EFFECT = {
    *("architectures", "_name_or_path", "transformers_version", "torch_dtype", "dtype", "initializer_range"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "use_cache", "attention_dropout"),
    *("pretraining_tp", "return_dict", "output_attentions", "output_hidden_states", "_attn_implementation"),
}
"""Keys that say nothing of what the model computes from its weights. `pretraining_tp` changes the order of sums alone;
`attention_dropout` is for training, and 0 in the published ones."""

_LLAMA3_SCALING = {
    "factor": "scaling_factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_seq_len",
}
"""Key of RoPE scaling of type llama3 → field of `RoPEConfig`."""

_ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_LLAMA3_SCALING}


def adapter(config: Llama3Model.Config) -> StateDictAdapter:
    """The table of a model's weights. RoPE rotates the same pairs in both, so every tensor is the same."""
    tied = {"lm_head.weight": "model.embed_tokens.weight"}
    return StateDictAdapter(
        _ROWS if config.tie_embeddings else (*_ROWS, _HEAD),
        n_layers=config.n_layers,
        ignored=["model.layers.*.self_attn.rotary_emb.inv_freq"],
        tied=tied if config.tie_embeddings else {},
    )


def from_config_json(document: Mapping[str, Any]) -> Llama3Model.Config:
    """The model that a config.json describes, in the spelling of transformers 4 or 5.

    A key that is neither used nor known to be without effect is told in a warning.

    Raises:
        UserError: for a model of another type, a missing size, or what this model does not compute.
    """
    if document.get("model_type") not in MODEL_TYPES:
        raise UserError(
            f"config.json: model_type is {document.get('model_type')!r}, and this family is {' or '.join(MODEL_TYPES)}"
        )
    for key, only in _FIXED.items():
        _require(key, document.get(key, only), only)
    sizes = {field: _whole_number(document, key) for key, field in _SIZES.items()}
    _check_sliding_window(document)
    if unknown := sorted(document.keys() - _USED - _WITHOUT_EFFECT):
        logger.warning("config.json: not known, and ignored: %s", ", ".join(unknown))
    head_dim = _whole_number(document, "head_dim", default=sizes["dim"] // sizes["n_heads"])
    config = Llama3Model.Config(
        **sizes,
        n_kv_heads=_whole_number(document, "num_key_value_heads", default=sizes["n_heads"]),
        head_dim=None if head_dim * sizes["n_heads"] == sizes["dim"] else head_dim,
        norm_eps=_number(document, "rms_norm_eps", default=1e-6),
        tie_embeddings=document.get("tie_word_embeddings", False),
        rope=_rope(document),
    )
    config.validate()
    return config


def to_config_json(config: Llama3Model.Config) -> dict[str, Any]:
    """What follows from the model for its config.json; types of weights and token ids are for the caller to add.

    RoPE is spelled as in transformers 4, which 5 reads too.
    """
    # transformers' Llama wants a hidden_size that the heads divide; its Mistral is the same model without that check.
    name = "Mistral" if config.dim % config.n_heads else "Llama"
    return {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": name.lower(),
        **{key: getattr(config, field) for key, field in _SIZES.items()},
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.resolved_head_dim,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_theta": config.rope.theta,
        "rope_scaling": _rope_scaling(config.rope),
        "sliding_window": None,
        "hidden_act": _FIXED["hidden_act"],
        "attention_bias": _FIXED["attention_bias"],
        "mlp_bias": _FIXED["mlp_bias"],
    }


FORMAT = ForeignFormat(
    adapter=adapter, to_foreign=to_config_json, from_foreign=from_config_json, model_types=MODEL_TYPES
)


def _require(key: str, value: Any, only: Any) -> None:
    if value != only and value is not None:
        raise UserError(f"config.json: {key} is {value!r}, which this family does not support (only {only!r})")


def _whole_number(document: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = default if document.get(key) is None else document[key]
    if not isinstance(value, int) or value < 1:
        raise UserError(f"config.json: {key} is {value!r}, and must be a whole number above 0")
    return value


def _number(document: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = default if document.get(key) is None else document[key]
    if not isinstance(value, (int, float)):
        raise UserError(f"config.json: {key} is {value!r}, and must be a number")
    return value


def _check_sliding_window(document: Mapping[str, Any]) -> None:
    # A mistral that does not say has the window of its class in transformers.
    window = document.get("sliding_window", 4096 if document["model_type"] == "mistral" else None)
    if window is not None and window < document["max_position_embeddings"]:
        raise UserError(
            f"config.json: sliding_window is {window}, below max_position_embeddings "
            f"{document['max_position_embeddings']}: this family attends to the whole context only"
        )


def _rope(document: Mapping[str, Any]) -> RoPEConfig:
    parameters = document.get("rope_parameters") or document.get("rope_scaling") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise UserError(
            f"config.json: RoPE of type {kind!r}, which this family does not support (default, linear, llama3)"
        )
    for key, value in parameters.items():
        if key not in _ROPE_KEYS and value is not None:
            raise UserError(f"config.json: RoPE's {key} is {value!r}, which this family does not support")
    _require("partial_rotary_factor", parameters.get("partial_rotary_factor"), 1.0)
    theta = _number({**document, **parameters}, "rope_theta", default=10_000.0)
    if kind == "default":
        return RoPEConfig(theta=theta)
    if kind == "linear":
        return RoPEConfig(theta=theta, scaling="linear", scaling_factor=_number(parameters, "factor"))
    values: dict[str, Any] = {field: _number(parameters, key) for key, field in _LLAMA3_SCALING.items()}
    return RoPEConfig(theta=theta, **values)


def _rope_scaling(rope: RoPEConfig) -> dict[str, Any] | None:
    if rope.scaling_factor == 1.0:
        return None
    if rope.scaling == "linear":
        return {"rope_type": "linear", "factor": rope.scaling_factor}
    return {"rope_type": "llama3", **{key: getattr(rope, field) for key, field in _LLAMA3_SCALING.items()}}
