"""Mistral ("Mistral 7B", arXiv:2310.06825) and Ministral, and their Hugging Face format."""

import dataclasses
from typing import Any

from torchtitan.models.common.gguf import NEIGHBORS, Architecture, gguf_format
from torchtitan.models.common.hugging_face import DENSE_ROWS, ModelType, dense_format, write_if
from torchtitan.models.common.layer_types import WINDOW_KEYS, WindowedDecoder


class MistralModel(WindowedDecoder):
    """Llama's decoder with sliding windows in all layers (Mistral 7B 0.1), some (Ministral), or
    none (later models)."""


_ALL_LAYERS = ModelType(
    architecture="MistralForCausalLM",
    config=MistralModel.Config,
    rows=DENSE_ROWS,
    keys={"sliding_window": "sliding_window"},
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
)


def _prepare(document: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json without types of layers if it has no window, so that it is written as
    Mistral: transformers' Ministral needs a window."""
    unused = () if document.get("sliding_window", True) else ("layer_types",)
    return {key: value for key, value in document.items() if key not in unused}


_SOME_LAYERS = dataclasses.replace(
    _ALL_LAYERS,
    architecture="MinistralForCausalLM",
    keys=WINDOW_KEYS,
    prepare=_prepare,
    write=write_if(lambda config: config.sliding_window is not None),
)

FORMAT = dense_format({"mistral": _ALL_LAYERS, "ministral": _SOME_LAYERS})

GGUF = gguf_format(
    Architecture(name="llama", config=MistralModel.Config, rotation=NEIGHBORS, biased="qkvof")
)
