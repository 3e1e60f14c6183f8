"""Mistral ("Mistral 7B", arXiv:2310.06825) and Ministral, and their Hugging Face format."""

import dataclasses

from torchtitan.models.common.hugging_face import DENSE_ROWS, ModelType, dense_format, write_if
from torchtitan.models.common.layer_types import WINDOW_KEYS, WindowedDecoder


class MistralModel(WindowedDecoder):
    """Llama's decoder with sliding windows in all layers (Mistral 7B 0.1), some (Ministral), or none (later models)."""


_ALL_LAYERS = ModelType(
    architecture="MistralForCausalLM",
    config=MistralModel.Config,
    rows=DENSE_ROWS,
    keys={"sliding_window": "sliding_window"},
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    # transformers' Ministral needs a window.
    write=write_if(lambda config: config.sliding_window is None or config.layer_types == ["sliding_attention"]),
)

_SOME_LAYERS = dataclasses.replace(
    _ALL_LAYERS, architecture="MinistralForCausalLM", keys=WINDOW_KEYS, write=lambda config: {}
)

FORMAT = dense_format({"mistral": _ALL_LAYERS, "ministral": _SOME_LAYERS})
