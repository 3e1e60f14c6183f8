"""Keys of config.json with the same meaning in all families, and keys that no family needs."""

import re
from collections.abc import Collection, Mapping
from typing import Literal, TypeVar, cast, get_args

from torchtitan.models.common.config_reader import ConfigReader
from torchtitan.tools.errors import UnsupportedModelError, UserError
from torchtitan.tools.logging import logger

Precision = Literal["float32", "bfloat16"]
"""Value of `training.mixed_precision_param` that a config.json sets. float16, which needs a loss
scale, is the user's choice: weights in float16 also train in bfloat16."""

DefaultT = TypeVar("DefaultT", bound=str)

FILE = "config.json"

CLASSIFIER = "ForSequenceClassification"
"""End of the names of transformers' classes that compute scores instead of logits."""

KEYS = {
    "hidden_size": "dim",
    "intermediate_size": "ffn_dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_seq_len",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
}
"""Key of config.json → field of the configuration."""

REQUIRED = {"dim", "ffn_dim", "n_layers", "n_heads", "vocab_size", "max_seq_len"}
"""Fields whose keys must be present."""

OPTIONAL = {"layer_types", "no_rope_layers", "rope_parameters"}
"""Keys for which transformers treats null as absent."""

DEFAULTS: Mapping[str, object] = {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "num_key_value_heads": None,
}
"""`ModelType.defaults` of all types."""

FIXED: Mapping[str, object] = {"is_causal": True, "hidden_act": "silu"}
"""`ModelType.fixed` of all types."""

_NEUTRAL: Mapping[str, object] = {
    **dict.fromkeys(
        ("attention_bias", "mlp_bias", "use_qk_norm", "use_sliding_window", "use_mrope"), False
    ),
    "use_bidirectional_attention": False,
    **dict.fromkeys(
        ("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"), 1.0
    ),
    **dict.fromkeys(
        ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "clip_qkv"),
        None,
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 0),
    **dict.fromkeys(
        ("no_rope_layers", "layer_types", "attention_multiplier", "sliding_window_pattern"), None
    ),
}
"""Keys that change the computation of some family → the value without an effect. A type that does
not know such a key refuses any other value."""

_ROPE = {
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "original_max_position_embeddings",
    "partial_rotary_factor",
}

_DROPOUTS = ("attention_dropout", "residual_dropout", "resid_pdrop", "embd_pdrop")
"""Keys of dropout probabilities, which are ignored with a warning."""

_OF_FILES = {
    "model_type",
    "dtype",
    "torch_dtype",
    "quantization_config",
    "architectures",
    "_name_or_path",
    "transformers_version",
    "initializer_range",
    "auto_map",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "unk_token_id",
    "use_cache",
    "cache_implementation",
    "chunk_size_feed_forward",
    "id2label",
    "label2id",
    "num_labels",
    "is_encoder_decoder",
    "problem_type",
    "pretraining_tp",
    "return_dict",
    "output_attentions",
    "output_hidden_states",
    "_attn_implementation",
    "output_router_logits",
    "router_aux_loss_coef",
    "aux_loss_alpha",
    "seq_aux",
    "ep_size",
    "num_nextn_predict_layers",
    "num_mtp_layers",
}
"""Keys without effect on the model's computation; `pretraining_tp` only changes the order of
sums."""

_OF_OTHER_PARTS = re.compile(
    r"(vision|audio|image|video|mm|boi|eoi|boa|eoa)_\w+|language_model_only"
)
"""Keys next to `text_config` that say how images and sound enter."""


def check_values(
    document: Mapping[str, object], fixed: Mapping[str, object], known: Collection[str]
) -> None:
    """Raise `UserError` for a key whose value differs from the only supported one, `fixed`, and for
    a key that is not `known` unless its value has no effect."""
    for key, only in {**FIXED, **fixed}.items():
        value = document.get(key, only)
        if value == "swish":
            value = "silu"
        if not (value == only and isinstance(value, bool) == isinstance(only, bool)):
            raise UnsupportedModelError(
                f"config.json: {key} is {value!r}, which this family does not support (only "
                f"{only!r})"
            )
    for key in sorted(_NEUTRAL.keys() & document.keys() - fixed.keys() - set(known)):
        if document[key] not in (None, _NEUTRAL[key]):
            raise UnsupportedModelError(
                f"config.json: {key} is {document[key]!r}, which this family does not support"
            )


def warn_about_ignored_keys(document: Mapping[str, object], known: Collection[str]) -> None:
    """Log keys besides `known` ones whose effect is unknown, and dropout, which is not applied."""
    for key in _DROPOUTS:
        if document.get(key):
            probability = ConfigReader(FILE, document).number(key)
            logger.warning(
                "config.json: ignoring %s %g: torchtitan has no dropout", key, probability
            )
    if unknown := sorted(
        document.keys() - {*known, *_DROPOUTS, *_ROPE, *_OF_FILES, *FIXED, *_NEUTRAL}
    ):
        logger.warning("config.json: ignoring unknown keys: %s", ", ".join(unknown))


def language_model(document: Mapping[str, object], model_type: str) -> dict[str, object]:
    """Return the config.json of the language model in a file of a model with vision. Raise
    `UserError` if it is of another type, the two contradict each other, or a key is neither the
    language model's nor about images and sound."""
    text, tied = ConfigReader(FILE, document).section("text_config").values, "tie_word_embeddings"
    for key, expected in {"model_type": model_type, tied: document.get(tied)}.items():
        if expected is not None and text.get(key, expected) != expected:
            raise UserError(
                f"config.json: {key} is {text[key]!r} in text_config, but must be {expected!r}"
            )
    for key in sorted(document.keys() - _OF_FILES - {"text_config", tied}):
        if not _OF_OTHER_PARTS.match(key) and document[key] not in (None, text.get(key)):
            raise UnsupportedModelError(
                f"config.json: {key} is {document[key]!r} next to text_config, which this family "
                "does not support"
            )
    if parts := [
        part for part in ("vision", "audio") if document.get(f"{part}_config") is not None
    ]:
        named = " and ".join(parts)
        logger.warning(
            "config.json: only the language model is trained and exported, without the model's %s",
            named,
        )
    shared = {key: document[key] for key in (tied, "quantization_config") if key in document}
    return {"model_type": model_type, **shared, **text}


def precision_of(document: Mapping[str, object], default: DefaultT) -> Precision | DefaultT:
    """Return the `dtype` (transformers 5) or `torch_dtype` (4) of a config.json, or log and return
    `default` if it is not supported. Raise `UserError` for a value that is not a name."""
    key = "dtype" if document.get("dtype") is not None else "torch_dtype"
    value = document.get(key)
    if value is not None and not isinstance(value, str):
        raise ConfigReader(FILE, document).wrong(key, value, "the name of a type")
    if value in get_args(Precision):
        return cast(Precision, value)
    said = f"{key} is {value}, which is not supported" if value else "no dtype"
    logger.info("%s: %s: --training.mixed_precision_param is %s", FILE, said, default)
    return default


def describes_scores(document: Mapping[str, object]) -> bool:
    """Return whether a config.json describes a reward model. Raise `UserError` unless it has one
    score."""
    if CLASSIFIER not in str(document.get("architectures")):
        return False
    labels = ConfigReader(FILE, document).section("id2label").values
    n_labels = len(labels) or document.get("num_labels", 2)
    if n_labels != 1:
        raise UserError(f"config.json: num_labels is {n_labels}, but a reward model has 1")
    return True
