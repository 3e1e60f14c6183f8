"""Mistral ("Mistral 7B", arXiv:2310.06825) and Ministral, and their Hugging Face format."""

from torchtitan.models.common.hugging_face import DENSE_ROWS, ModelType, dense_format
from torchtitan.models.common.layer_types import WINDOW_KEYS, WindowedDecoder


class MistralModel(WindowedDecoder):
    """Llama's decoder with sliding windows in all layers (Mistral 7B 0.1), some (Ministral), or none (later models)."""


_SHARED = {"config": MistralModel.Config, "rows": DENSE_ROWS}
_DEFAULTS = {"num_key_value_heads": 8, "sliding_window": 4096}

FORMAT = dense_format(
    {
        "mistral": ModelType(
            architecture="MistralForCausalLM",
            keys={"sliding_window": "sliding_window"},
            defaults=_DEFAULTS,
            describes=lambda config: config.layer_types == ["sliding_attention"],
            **_SHARED,
        ),
        "ministral": ModelType(
            architecture="MinistralForCausalLM",
            keys=WINDOW_KEYS,
            defaults=_DEFAULTS,
            **_SHARED,
        ),
    }
)
