"""Qwen2 and Qwen2.5 (arXiv:2407.10671, arXiv:2412.15115), and their Hugging Face format."""

from typing import Any

from torch import nn

from torchtitan.models.common.hugging_face import DENSE_ROWS, ModelType, dense_format
from torchtitan.models.common.layer_types import WINDOW_KEYS, WindowedDecoder
from torchtitan.tools.errors import UserError


class Qwen2Model(WindowedDecoder):
    """Llama's decoder with biases of queries, keys and values, and windows in some models' upper layers."""

    def make_attention(self, index: int, **options: Any) -> nn.Module:
        return super().make_attention(index, biases="qkv", **options)


def prepare_windows(document: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json with `layer_types` if it has windows, and without the keys that older files use instead.
    Raise `UserError` for contradictory keys."""
    document = dict(document)
    has_window = document.pop("use_sliding_window", False) and document.setdefault("sliding_window", 4096) is not None
    first, types = document.pop("max_window_layers", 28), document.get("layer_types")
    if not has_window:
        if "sliding_attention" in (types or ()):
            raise UserError(f"config.json: layer_types is {types!r}, but use_sliding_window is not true")
        return {key: value for key, value in document.items() if key not in ("sliding_window", "layer_types")}
    if types is None:
        n_layers = document.get("num_hidden_layers", 0)
        types = ["full_attention" if index < first else "sliding_attention" for index in range(n_layers)]
    return {**document, "layer_types": types}


FORMAT = dense_format(
    {
        "qwen2": ModelType(
            architecture="Qwen2ForCausalLM",
            config=Qwen2Model.Config,
            rows=DENSE_ROWS,
            keys=WINDOW_KEYS,
            prepare=prepare_windows,
            extra=lambda config: {"use_sliding_window": config.sliding_window is not None},
            defaults={"num_key_value_heads": 32},
            describes=lambda config: config.resolved_head_dim * config.n_heads == config.dim,
        )
    }
)
