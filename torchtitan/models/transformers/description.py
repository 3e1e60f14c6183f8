"""What config.json says: the class in transformers that computes a model, and its sizes."""

import copy
import importlib.util
from collections.abc import Mapping
from typing import Any

import torch

from torchtitan.config.registry import suggest
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger

_OF_FILES = ("auto_map", "quantization_config", "transformers_version", "dtype", "torch_dtype", "_name_or_path")
"""Keys of config.json about its files and the program that wrote them, not about the model."""

if importlib.util.find_spec("transformers") is None:
    raise UserError(
        "this model is computed by its class in transformers, which is not installed: pip install "
        "'torchtitan[transformers]', or EXTRA=transformers ./run_train.sh"
    )

_AUTO_CLASSES = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT")
"""Tasks whose classes train here, in the order of preference."""


def model_classes() -> dict[str, str]:
    """Return model_type → name of the class that trains here, for every type that transformers knows."""
    from transformers.models.auto import modeling_auto

    names: dict[str, str] = {}
    for task in _AUTO_CLASSES:
        for model_type, name in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").items():
            names.setdefault(model_type, name[0] if isinstance(name, (tuple, list)) else name)
    return names


def class_of(config: Any) -> tuple[Any, Any]:
    """Return the class for a transformers configuration, and the part of the configuration that describes it: the class
    that config.json names in `architectures` if it trains here, otherwise that of its model_type."""
    import transformers

    known = model_classes()
    named = [name for name in config.architectures or () if name in known.values()]
    cls = getattr(transformers, named[0] if named else known[config.model_type])
    # Otherwise the language side of a model of images and text.
    return cls, config if cls.config_class is type(config) else config.get_text_config(decoder=True)


def build_class(config: Any, implementation: str | None = None) -> Any:
    """Build the class for a transformers configuration, in float32. `implementation` is that of attention; None: the
    default."""
    cls, config = class_of(config)
    options = {} if implementation is None else {"attn_implementation": implementation}
    return cls._from_config(config, dtype=torch.float32, **options)


def written_document(document: Mapping[str, Any], vocab_size: int | None) -> dict[str, Any]:
    """Return the config.json of an exported model."""
    cls, config = class_of(transformers_config(document, vocab_size))
    return {**config.to_dict(), "architectures": [cls.__name__]}


def checked_document(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a config.json that describes the model. Raise `UserError` if no class here computes it; warn
    of keys that the class does not know."""
    known, model_type = model_classes(), document.get("model_type")
    if model_type not in known:
        raise UserError(_refusal(document, known))
    kept = {key: value for key, value in document.items() if key not in _OF_FILES}
    try:
        config = transformers_config(kept)
    except Exception as error:  # validators of transformers raise various types
        reason = " ".join(str(error).split())
        raise UserError(f"config.json: transformers refuses it: {type(error).__name__}: {reason}") from error
    if config.is_encoder_decoder:
        raise UserError(f"config.json: model_type '{model_type}' is an encoder-decoder, and only decoders train here")
    if unknown := sorted(kept.keys() - type(config)().to_dict().keys() - {"architectures", "model_type"}):
        logger.warning("config.json: transformers' %s does not know %s", type(config).__name__, ", ".join(unknown))
    return kept


def _refusal(document: Mapping[str, Any], known: Mapping[str, str]) -> str:
    import transformers
    from transformers import CONFIG_MAPPING

    model_type = document.get("model_type")
    if code := document.get("auto_map"):
        files = sorted({str(path).partition("--")[2] or str(path) for path in code.values()})
        return (
            f"config.json: model_type '{model_type}' is computed by code in its folder ({', '.join(files)}), and code "
            "of a model's folder is never executed here; use a model whose class is in transformers"
        )
    if model_type in CONFIG_MAPPING:
        return f"config.json: model_type '{model_type}' has no class in transformers that predicts the next token"
    wanted = document.get("transformers_version")
    newer = f" (the file was written by transformers {wanted})" if wanted else ""
    nearest = suggest(str(model_type), sorted(known))
    return f"config.json: transformers {transformers.__version__} does not know model_type '{model_type}'{newer}{nearest}"


def transformers_config(document: Mapping[str, Any], vocab_size: int | None = None) -> Any:
    """Return transformers' configuration object for a `checked_document`, with another size of the vocabulary."""
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[document["model_type"]].from_dict(copy.deepcopy(dict(document)))
    for part in (config, config.get_text_config(decoder=True)):
        if vocab_size is not None and hasattr(part, "vocab_size"):
            part.vocab_size = vocab_size
    return config
